"""Logs as a whole: what is masked, what is on which side, what can be learned, and that a run reads it."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.config.data import DataConfig, RunKind
from groupwise.errors import ConfigError, DataError
from groupwise.store.masking import PERSONAL, SECRETS, Masking
from groupwise.tasks.logs.importing import ImportConfig, Imported, import_logs, write
from groupwise.tasks.logs.judging import read_scored
from groupwise.tasks.logs.near import alike_ones
from groupwise.tasks.logs.report import lines
from groupwise.tasks.prompts import open_prompts
from simulated_logs import SYSTEMS, asked
from wording import raises

HOUR = 3600
MAY = 1777636800


def row(id: str, asked: str | list[dict[str, Any]], said: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    choice = {"message": {"role": "assistant", "content": said}, "finish_reason": more.pop("ended", "stop")}
    response = {"id": id, "model": "m", "choices": [choice]}
    return {"request": {"messages": messages}, "response": response, **more}


def imported(folder: Path, *rows: dict[str, Any], environ: dict[str, str] | None = None, **config: Any) -> Imported:
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
    masking = Masking(environ or {}, rules=(*SECRETS, *PERSONAL))
    return import_logs([path], ImportConfig(**config), masking=masking)


def written(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def test_everything_that_is_written_is_masked_and_counted_once(tmp_path: Path):
    call = {"id": "c", "type": "function", "function": {"name": "pay", "arguments": '{"card": 4111111111111111}'}}
    first = [{"role": "system", "content": "Key: swordfish-12"}, {"role": "user", "content": "I am bob@example.com"}]
    then = [
        *first,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "call +49 170 1234567", "tool_call_id": "c"},
    ]
    tools = [{"type": "function", "function": {"name": "pay", "description": "of bob@example.com"}}]
    last = row("bob@example.com-2", then, "Sent to bob@example.com", edited="Sent to amy@example.com")
    last["request"]["tools"] = tools
    rows = [row("a", first, "Hi bob@example.com!"), last, {"request": {"messages": [{"role": "bob@example.com"}]}}]
    rows[2]["response"] = "x"
    result = imported(tmp_path, *rows, environ={"API_KEY": "swordfish-12"}, heldout=0.0)
    write(result, tmp_path / "to")
    for file in (tmp_path / "to").iterdir():
        text = file.read_text(encoding="utf-8")
        assert not [each for each in ("example.com", "swordfish", "1234567", "41111111") if each in text], file
    prompt = written(tmp_path / "to", "train")[1]["prompt"]
    assert json.loads(prompt[2]["tool_calls"][0]["function"]["arguments"]) == {"card": "[card]"}
    counts = {each["rule"]: each["count"] for each in result.report["masked"]}
    assert (counts["card"], counts["phone"], counts["environment"]) == (1, 1, 1)
    assert {rule.name for rule in PERSONAL} | {rule.name for rule in SECRETS} < set(counts)


def test_names_within_arguments_are_masked_too(tmp_path: Path):
    arguments = {"to": {"bob@example.com": "Hi"}, "amy@example.com": 1}
    call = {"id": "c", "type": "function", "function": {"name": "send", "arguments": json.dumps(arguments)}}
    said = [
        {"role": "user", "content": "Send it."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sent", "tool_call_id": "c"},
    ]
    write(imported(tmp_path, row("a", said, "Done."), heldout=0.0), tmp_path / "to")
    (only,) = written(tmp_path / "to", "train")
    masked = json.loads(only["prompt"][1]["tool_calls"][0]["function"]["arguments"])
    assert masked == {"to": {"[email]": "Hi"}, "[email]": 1}


def test_what_ends_a_line_elsewhere_ends_no_row(tmp_path: Path):
    """JSON may hold U+2028 and U+0085 as they are, and `str.splitlines` cuts at them."""
    said = "one\u2028two\x85three"
    rows = [row("a", "Say one.", said, thumb="up"), row("b", "Say something else.", said, thumb="down")]
    write(imported(tmp_path, *rows, heldout=0.0), tmp_path / "to")
    found = [each.answers[0] for each in read_scored(tmp_path / "to")]
    assert [(each.text, each.good) for each in found] == [(said, True), (said, False)]


def noisy_log(seed: int) -> list[dict[str, Any]]:
    """Users with conversations of several turns, who ask things that others ask, too, or nearly; ids are missing."""
    draws = random.Random(seed)
    words = [f"w{n}" for n in range(200)]
    stock = [" ".join(draws.choices(words, k=12)) for _ in range(30)]
    rows: list[dict[str, Any]] = []
    for talk in range(80):
        user, messages = f"user{draws.randrange(50)}", list[dict[str, Any]]()
        known: dict[str, Any] = {"user": user, "conversation_id": f"c{talk}"}
        for name in ("user", "conversation_id"):
            if draws.random() < 0.3:
                del known[name]
        for _ in range(draws.randint(1, 3)):
            asked = draws.choice(stock) if draws.random() < 0.3 else " ".join(draws.choices(words, k=12))
            asked += " please" * (draws.random() < 0.2)
            messages = [*messages, {"role": "user", "content": asked}]
            said, id = " ".join(draws.choices(words, k=5)), f"r{len(rows)}"
            rows.append(row(id, messages, said, time=MAY + talk * HOUR, truth=(user, talk), **known))
            messages = [*messages, {"role": "assistant", "content": said}]
    draws.shuffle(rows)
    return rows


@pytest.mark.parametrize("seed", range(5))
def test_nothing_that_hangs_together_is_on_both_sides(tmp_path: Path, seed: int):
    rows = noisy_log(seed)
    result = imported(tmp_path, *rows, heldout=0.25, alike=0.7)
    by_answer = {each["response"]["choices"][0]["message"]["content"]: each for each in rows}
    sides: list[list[dict[str, Any]]] = []
    for cases in (result.train, result.heldout):
        all_ = [each for case in cases for each in (case, *case.near)]
        texts = [said.text for each in all_ for said in each.answers.values()]
        sides.append([by_answer[text] for text in texts])
    train, heldout = sides
    assert len(heldout) > 10 and len(train) > 2 * len(heldout)
    for name in ("user", "conversation_id"):
        assert not {each.get(name) for each in train} & {each.get(name) for each in heldout} - {None}
    talks = [{each["truth"][1] for each in side} for side in sides]
    assert not talks[0] & talks[1]  # also where the conversation is known from its messages alone
    prompts = [
        [case.messages for case in (*cases, *(n for c in cases for n in c.near))]
        for cases in (result.train, result.heldout)
    ]
    _, together = alike_ones([*prompts[0], *prompts[1]], alike=0.7)
    border = len(prompts[0])
    assert not [group for group in together.groups() if min(group) < border <= max(group)]
    both = result.report["prompts"]
    assert both["train"] == len(result.train) and both["heldout"] == len(result.heldout)


def test_the_newest_is_held_out(tmp_path: Path):
    rows = [row(f"r{n}", f"question {n} of mine {n}?", "yes", time=MAY + n * HOUR) for n in range(20)]
    random.Random(0).shuffle(rows)
    result = imported(tmp_path, *rows)
    assert [case.id for case in result.heldout] == [f"r{n}" for n in range(16, 20)]
    assert result.report["prompts"]["train_later_than_heldout"] == 0
    assert result.report["read"]["first"] == "2026-05-01T12:00:00Z"


def test_a_question_of_many_users_is_on_one_side_and_joins_nobody(tmp_path: Path):
    rows = [row(f"a{n}", "hello", "Hi.", user=f"u{n}", time=MAY + n) for n in range(40)]
    rows += [row(f"b{n}", f"what is {n} and {n}?", str(2 * n), user=f"u{n}", time=MAY + n) for n in range(40)]
    result = imported(tmp_path, *rows)
    asked = [[case.messages[0]["content"] for case in cases] for cases in (result.train, result.heldout)]  # pyright: ignore
    assert sum("hello" in side for side in asked) == 1 and len(result.heldout) >= 8
    prompts = result.report["prompts"]
    assert (prompts["asked_by_both_sides"], prompts["groups"], prompts["largest_group"]) == (1, 40, 2 / 80)


def test_answers_logged_twice_count_once_and_alike_prompts_are_one(tmp_path: Path):
    text = "my parcel with the two blue lamps has not arrived in Lyon and the shop does not answer"
    rows = [row("a", text, "Sorry."), row("a", text, "Sorry."), row("b", text + " now", "Oh.", thumb="up")]
    result = imported(tmp_path, *rows, heldout=0.0)
    (case,) = result.train
    assert case.id == "b" and [each.id for each in case.near] == ["a"] and case.asked == 2
    assert (result.report["read"]["logged_twice"], result.report["prompts"]["near_duplicates"]) == (1, 1)
    assert len(imported(tmp_path, *rows, heldout=0.0, alike=1.0).train) == 2
    twice = [row("a", text, "Sorry."), row("a", text, "Sorry.", thumb="down")]  # logged again when it was known
    assert imported(tmp_path, *twice, heldout=0.0).train[0].scores == [0.0]


@pytest.fixture
def rated(tmp_path: Path) -> Path:
    """A folder with what a log of sums comes to: good, bad, corrected and cut answers."""
    rows = [
        row("a", "2 + 2?", "4", thumb="up"),
        row("b", "2 + 2?", "5", thumb="down"),
        row("c", "3 + 3?", "7", edited="6"),
        row("d", "4 + 4?", "8 and a long tale of how it comes", thumb="up"),
        row("e", "5 + 5?", "10", thumb="up", ended="length"),
        row("f", "6 + 6?", "12"),
    ]
    write(imported(tmp_path, *rows, heldout=0.0), tmp_path / "to")
    return tmp_path / "to"


def test_what_can_be_learned(rated: Path):
    prompts = {each["log_id"]: each for each in written(rated, "train")}
    assert {id: (each.get("answer"), each.get("answer_from"), each["score"]) for id, each in prompts.items()} == {
        "a": ("4", "good", 0.5),
        "c": ("6", "edited", None),
        "d": (None, None, 1.0),
        "e": (None, None, 1.0),
        "f": (None, None, None),
    }
    said = [each["completion"] for each in written(rated, "train_examples")]
    assert said == [
        [{"role": "assistant", "content": "4"}],
        "6",
        [{"role": "assistant", "content": "8 and a long tale of how it comes"}],
    ]
    pairs = [(each["chosen"][0]["content"], each["rejected"][0]["content"]) for each in written(rated, "train_pairs")]
    assert pairs == [("4", "5"), ("6", "7")]
    report = json.loads((rated / "report.json").read_text())
    rule = next(each for each in report["learn"]["rules"] if each["reward"].endswith("number_match"))
    assert (rule["prompts"], rule["paid"], rule["good"], rule["bad"]) == (2, 0.0, None, 0.0)
    assert {each["kind"] for each in report["says"]["can"]} == {"grpo", "sft", "dpo"} and report["says"]["lacks"]
    assert "number_match" in (rated / "report.md").read_text() and lines(report)


@pytest.mark.parametrize(
    ("name", "kind", "count"), [("train", "grpo", 5), ("train_examples", "sft", 3), ("train_pairs", "dpo", 2)]
)
def test_a_run_reads_what_is_written(rated: Path, name: str, kind: RunKind, count: int):
    source = open_prompts(DataConfig(source=f"{name}.jsonl"), folder=rated, kind=kind)
    assert len(source) == count  # pyright: ignore[reportArgumentType]


def test_json_answers_can_be_scored_by_their_form(tmp_path: Path):
    rows = [row(f"r{n}", f"sort {n}", json.dumps({"n": n}), thumb="up" if n % 2 else "down") for n in range(10)]
    found = {each["reward"]: each for each in imported(tmp_path, *rows).report["learn"]["rules"]}
    form = found["groupwise.rewards.format:json_format"]
    assert (form["paid"], form["good"], form["bad"]) == (1.0, 1.0, 1.0)


def test_outcomes_of_a_file_are_joined_and_those_of_nothing_counted(tmp_path: Path):
    said = tmp_path / "said.jsonl"
    said.write_text('{"id": "a", "thumb": "up"}\n{"id": "zzz", "thumb": "up"}\n{"id": "b", "stars": 5}\n')
    result = imported(tmp_path, row("a", "A?", "a"), row("b", "B?", "b"), outcomes=said, heldout=0.0)
    assert result.report["outcomes"] | {"names": None} == {
        "read": 3,
        "unmatched": 1,
        "answers": 1,
        "answers_without": 1,
        "edited": 0,
        "names": None,
        "prompts": 1,
        "raters": 0,
        "largest_rater": 0.0,
        "scored_again": 0,
        "contradicted": 0,
        "no_scale": {"stars": [5.0, 5.0]},
    }
    assert len(result.report["says"]["lacks"]) >= 2


def test_a_correction_that_is_a_number_is_one(tmp_path: Path):
    """A table types its columns: where all corrections are numbers, they are no texts."""
    said = tmp_path / "said.csv"
    said.write_text("id,thumb,edited\na,down,185\nb,down,0\n")
    result = imported(tmp_path, row("a", "A?", "x"), row("b", "B?", "y"), outcomes=said, heldout=0.0)
    edited = [text for case in result.train for each in case.answers.values() for text in each.edited]
    assert (edited, result.report["outcomes"]["edited"]) == (["185", "0"], 2)


def test_of_a_prompt_with_many_answers_the_best_and_the_worst_are_compared(tmp_path: Path):
    """All pairs of a thousand answers to "hello" would be half a million, and looked for in one another."""
    rows = [
        row(f"r{n}", "hello", f"answer {n}", score=n / 1000, ended="length" if n == 999 else "stop")
        for n in range(1000)
    ]
    write(imported(tmp_path, *rows, heldout=0.0), tmp_path / "to")
    pairs = [
        [each[side][0]["content"] for side in ("chosen", "rejected")]
        for each in written(tmp_path / "to", "train_pairs")
    ]
    chosen, rejected = ({int(text.split()[1]) for text in texts} for texts in zip(*pairs, strict=True))
    assert chosen | rejected == {*range(8), *range(991, 999)}  # and not 999, which was cut off
    assert len(pairs) == 16 * 15 / 2


def test_a_log_of_one_user_has_nothing_to_hold_out(tmp_path: Path):
    result = imported(tmp_path, *(row(f"r{n}", f"question {n}?", "yes", user="ann") for n in range(10)))
    assert (len(result.train), len(result.heldout)) == (10, 0)
    write(result, tmp_path / "to")
    assert not (tmp_path / "to" / "heldout.jsonl").exists()


def test_a_folder_with_something_in_it_is_refused_and_files_are_the_owners(tmp_path: Path):
    result = imported(tmp_path, row("a", "A?", "a"), heldout=0.0)
    write(result, tmp_path / "to")
    assert {each.stat().st_mode & 0o077 for each in (tmp_path / "to").iterdir()} == {0}
    with raises(ConfigError, field="--to", kind="exists"):
        write(result, tmp_path / "to")
    (tmp_path / "free").mkdir()
    assert "train.jsonl" in write(result, tmp_path / "free")


@pytest.mark.parametrize(
    ("given", "field"), [({"turns": "all"}, "--turns"), ({"heldout": 1.0}, "--heldout"), ({"alike": 0}, "--alike")]
)
def test_wrong_options_are_refused(given: dict[str, Any], field: str):
    with raises(ConfigError, field=field):
        ImportConfig(**given)


def test_logs_of_which_no_prompt_can_be_used_are_an_error(tmp_path: Path):
    with raises(DataError, field="SOURCE", kind="unusable"):
        imported(tmp_path, row("a", [{"role": "system", "content": "Be brief."}], "Yes."))


def test_a_call_of_a_tool_is_no_answer_and_a_sentence_with_a_number_no_number(tmp_path: Path):
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    calls = row("a", "Warm?", "I look.", thumb="up")
    calls["response"]["choices"][0]["message"]["tool_calls"] = [call]
    result = imported(tmp_path, calls, row("b", "How warm?", "It is 21.", edited="It is 22 degrees."), heldout=0.0)
    assert {each["reward"].rpartition(":")[2]: each["prompts"] for each in result.report["learn"]["rules"]} == {
        "exact_match": 1
    }


def test_who_rates_much_and_who_contradicts_is_said(tmp_path: Path):
    def said(name: str, asks: list[tuple[str, str, str]]) -> dict[str, Any]:
        rows = [row(f"{name}{n}", text, "yes", user=user, thumb=thumb) for n, (text, user, thumb) in enumerate(asks)]
        return dict(imported(tmp_path, *rows, heldout=0.0).report)

    fair = said("a", [(f"question {n // 2}?", f"u{n}", "up") for n in range(40)])
    assert (fair["outcomes"]["raters"], fair["outcomes"]["scored_again"], fair["outcomes"]["contradicted"]) == (
        40,
        20,
        0,
    )
    lone = said("b", [(f"question {n}?", "eve" if n < 20 else f"u{n}", "up") for n in range(40)])
    assert lone["outcomes"]["largest_rater"] == 0.5
    torn = said("c", [(f"question {n // 2}?", f"u{n}", "up" if n % 2 else "down") for n in range(40)])
    assert (torn["outcomes"]["scored_again"], torn["outcomes"]["contradicted"]) == (20, 20)
    assert (
        len({*torn["says"]["lacks"]} - {*fair["says"]["lacks"]})
        >= 1
        <= len({*lone["says"]["lacks"]} - {*fair["says"]["lacks"]})
    )


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


LOGGED = [row for each in asked(0, talks=4) for make in SYSTEMS.values() for row in make(each)]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_row_in_which_anything_stands_ends_nothing(data: st.DataObject):
    """Rows as systems write them, with a value in any place replaced by another: whatever comes of it, a run reads."""
    changed = json.loads(json.dumps(data.draw(st.sampled_from(LOGGED))))
    at: Any = changed
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(at[key], dict | list) or not at[key] or data.draw(st.integers(0, 3)) == 0:
            break
        at = at[key]
    at[key] = data.draw(ANYTHING)
    with tempfile.TemporaryDirectory() as folder:
        result = imported(Path(folder), changed, row("whole", "Does this stand?", "It does."), heldout=0.0)
        write(result, Path(folder) / "to")
        found = {each["log_id"] for each in written(Path(folder) / "to", "train")}
        assert "whole" in found
        kinds: dict[str, RunKind] = {"train": "grpo", "train_examples": "sft", "train_pairs": "dpo"}
        for name, kind in kinds.items():
            if (Path(folder) / "to" / f"{name}.jsonl").exists():
                open_prompts(DataConfig(source=f"{name}.jsonl"), folder=Path(folder) / "to", kind=kind)


def test_half_a_character_is_replaced(tmp_path: Path):
    write(imported(tmp_path, row("\ud83d", "cut \ud83d here", "ok \ude00"), heldout=0.0), tmp_path / "to")
    (prompt,) = written(tmp_path / "to", "train")
    assert (prompt["prompt"][0]["content"], prompt["logged"]) == ("cut \ufffd here", "ok \ufffd")


def test_what_is_scored_says_which_are_of_one_user_and_not_who(tmp_path: Path):
    rows = [
        row(f"r{at}", f"What is {at} + {at}?", f"{2 * at}", thumb="up", user=user) for at, user in enumerate("abab")
    ]
    rows += [row("nobody", "What is 9 + 9?", "17", thumb="down")]
    write(imported(tmp_path, *rows, heldout=0.0), tmp_path / "out")
    said = {each["prompt"][0]["content"]: each.get("by") for each in written(tmp_path / "out", "train_scored")}
    numbers = [said[f"What is {at} + {at}?"] for at in (0, 1, 2, 3, 9)]
    assert numbers == [0, 1, 0, 1, None]
    by = {each.by for prompt in read_scored(tmp_path / "out") for each in prompt.answers}
    assert by == {"train_scored.jsonl 0", "train_scored.jsonl 1", None}


def test_a_text_with_a_line_break_of_its_own_is_one_row(tmp_path: Path):
    said = "one\u2028two\x85three"
    write(imported(tmp_path, row("a", f"{said}?", said, thumb="up"), heldout=0.0), tmp_path / "out")
    (prompt,) = read_scored(tmp_path / "out")
    assert prompt.messages[0]["content"] == f"{said}?" and prompt.answers[0].message["content"] == said
