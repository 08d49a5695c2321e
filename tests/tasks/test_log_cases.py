"""Exchanges become prompts, answers that were given to the same prompt stand together, outcomes find their answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from groupwise.errors import DataError
from groupwise.tasks.logs.cases import continued, cut, ways_on
from groupwise.tasks.logs.exchange import Exchange, Outcome
from groupwise.tasks.logs.outcomes import joined, read_outcomes
from groupwise.types import Message
from wording import raises


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def exchange(id: str, *messages: Message, answer: str | Message = "ok", **more: Any) -> Exchange:
    said = says(answer) if isinstance(answer, str) else answer
    return Exchange(place=f"log:{id}", ids=(id,), messages=messages, answer=said, **more)


def test_equal_prompts_are_one_with_all_their_answers():
    asked = [
        exchange("a", user("Hi?"), answer="Hello.", time=20.0),
        exchange("b", user("Hi?"), answer="Hello.", time=10.0),
        exchange("c", user("Hi?"), answer="What?", cut=True),
        exchange("d", user("Hi!")),
    ]
    known = {
        0: [Outcome(id="a", name="thumb", value=1.0)],
        1: [Outcome(id="b", name="thumb", value=0.0), Outcome(id="b", name="edited", edited="Good day.")],
    }
    (first, second), bad = cut(asked, known, each=False)
    assert not bad and (first.asked, first.time, first.exchanges, first.known) == (3, 10.0, [0, 1, 2], 3)
    hello, what = first.answers.values()
    assert (hello.times, hello.score, hello.edited, hello.cut) == (2, 0.5, ["Good day."], False)
    assert (what.times, what.score, what.cut) == (1, None, True)
    assert second.asked == 1


def test_ids_of_calls_are_drawn_and_do_not_tell_prompts_apart():
    def called(id: str, city: str = "Paris") -> tuple[Message, ...]:
        call = {"id": id, "type": "function", "function": {"name": "weather", "arguments": city}}
        return (
            user("Warm?"),
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "21", "tool_call_id": id},
        )

    asked = [exchange("a", *called("x1")), exchange("b", *called("x2")), exchange("c", *called("x3", "Rome"))]
    cases, _ = cut(asked, {}, each=False)
    assert [case.asked for case in cases] == [2, 1]


def test_each_turn_is_a_prompt_where_that_is_asked_for():
    talk = exchange("a", user("One?"), says("1"), user("Two?"), answer="2")
    (last,), _ = cut([talk], {}, each=False)
    assert len(last.messages) == 3
    logged = exchange("b", user("One?"), answer="1")
    cases, _ = cut([talk, logged], {0: [Outcome(id="a", name="thumb", value=1.0)]}, each=True)
    assert [(len(case.messages), case.asked, case.scores) for case in cases] == [(1, 1, []), (3, 1, [1.0])]
    assert next(iter(cases[0].answers.values())).times == 2


def test_what_no_run_would_take_is_left_out_with_its_reason():
    cases, bad = cut([exchange("a", {"role": "system", "content": "Be brief."})], {}, each=False)
    assert not cases and bad[0].place == "log:a" and "system" in bad[0].reason


def test_what_goes_on_from_an_answer_has_what_was_said_before_it():
    system: Message = {"role": "system", "content": "Be brief."}
    other: Message = {"role": "system", "content": "Be kind."}
    asked = [
        exchange("c", user("Three?"), answer="3", after="b"),
        exchange("b", other, user("Two?"), answer="2", after="a"),
        exchange("a", system, user("One?"), answer="1"),
        exchange("x", user("?"), after="absent"),
        exchange("y", user("?"), after="x"),
        exchange("loop", user("?"), after="loop"),
    ]
    whole, bad = continued(asked)
    assert [each.messages for each in whole] == [
        (user("One?"), says("1"), user("Two?"), says("2"), user("Three?")),
        (other, user("One?"), says("1"), user("Two?")),
        (system, user("One?")),
    ]
    assert [each.place for each in bad] == ["log:x", "log:y", "log:loop"]


def test_requests_that_repeat_what_was_said_belong_to_one_conversation():
    greeting = says("How can I help?")
    asked = [
        exchange("a", greeting, user("One?"), answer="1"),
        exchange("b", greeting, user("One?"), says("1"), user("Two?"), answer="2"),
        exchange("c", greeting, user("Other?"), answer="1"),
        exchange("d", greeting, user("One?"), says("1"), user("Two?"), answer="2", conversation="known"),
    ]
    assert list(ways_on(asked)) == [(1, 0)]


def test_of_several_that_said_the_same_the_last_before_it_is_gone_on_from():
    def hello(id: str, **more: Any) -> Exchange:
        return exchange(id, user("Hello"), answer="Hi.", **more)

    later = exchange("x", user("Hello"), says("Hi."), user("Bye"), time=5.0, user="ann")
    asked = [hello("a", time=1.0), later, hello("b", time=4.0), hello("c", time=4.5, user="bob"), hello("d", time=9.0)]
    assert list(ways_on(asked)) == [(1, 2)]
    assert list(ways_on([later, hello("a", time=9.0)])) == [(0, 1)]


# ---- outcomes ----
def test_outcomes_find_their_answer_and_of_a_conversation_the_last_one():
    asked = [
        exchange("a", user("1"), trace="t", conversation="c", time=2.0),
        exchange("b", user("2"), trace="t", conversation="c", time=1.0),
        exchange("d", user("3"), conversation="c", time=0.0),
    ]
    said = [
        Outcome(id="b", name="thumb", value=0.0, rating="1"),
        Outcome(id="b", name="thumb", value=0.0, rating="1"),
        Outcome(id="b", name="thumb", value=0.0, rating="2"),
        Outcome(id="t", name="resolved", value=1.0),
        Outcome(id="c", name="edited", edited="So."),
        Outcome(id="absent", name="thumb", value=1.0),
    ]
    found = joined(asked, said)
    assert {number: [each.name for each in some] for number, some in found.of.items()} == {
        1: ["thumb", "thumb"],
        0: ["resolved", "edited"],
    }
    assert (found.unmatched, found.unscaled) == (1, {})
    twice = [exchange("same", user("1"), time=2.0), exchange("same", user("2"), time=1.0)]
    assert list(joined(twice, [Outcome(id="same", name="thumb", value=1.0)]).of) == [0]


def test_values_come_to_one_scale_or_are_named():
    asked = [exchange(id, user(id)) for id in "abc"]
    rated = [("thumb", -1.0), ("thumb", 1.0), ("stars", 5.0), ("stars", 1.0), ("share", 0.25), ("delta", -1.0)]
    said = [Outcome(id="abc"[at % 3], name=name, value=value) for at, (name, value) in enumerate(rated)]
    found = joined(asked, said)
    values = {(each.name, each.value) for some in found.of.values() for each in some}
    assert values == {("thumb", 0.0), ("thumb", 1.0), ("share", 0.25), ("delta", 0.0)}
    assert found.unscaled == {"stars": (1.0, 5.0)}


def test_a_file_of_outcomes(tmp_path: Path):
    path = tmp_path / "outcomes.jsonl"
    rows: list[Any] = [
        {"id": "a", "thumb": "up", "comment": "thanks"},
        {"response_id": "b", "resolved": False, "retried": True},
        {"trace_id": "c", "edited": "It is 185."},
        {"run_id": "d", "key": "stars", "value": 4},
        {"id": "e", "thumb": None},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_outcomes(path) == [
        Outcome(id="a", name="thumb", value=1.0),
        Outcome(id="b", name="resolved", value=0.0),
        Outcome(id="b", name="retried", value=0.0),
        Outcome(id="c", name="edited", edited="It is 185."),
        Outcome(id="d", name="stars", value=4.0),
    ]
    table = tmp_path / "outcomes.csv"
    table.write_text("id,thumb\n7,down\n")
    assert read_outcomes(table) == [Outcome(id="7", name="thumb", value=0.0)]
    path.write_text('{"thumb": "up"}\n')
    with raises(DataError, field="--outcomes"):
        read_outcomes(path)
    path.write_text('{"id": "a", "comment": "nice"}\n')
    with raises(DataError, field="--outcomes", kind="empty"):
        read_outcomes(path)
