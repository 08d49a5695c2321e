"""Grammars that explode when they are compiled: each ends a process of its own, and nobody else waits for it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from groupwise.engine import grammar as grammars
from groupwise.engine import vetting
from groupwise.engine.grammar import GrammarCompiler, check_grammar
from groupwise.engine.vetting import Debts, TokenizerParts, Vetting
from groupwise.errors import GrammarError, NotReadyError, OverloadedError
from groupwise.types import Grammar
from processes import becomes

pytestmark = pytest.mark.xdist_group("vetting")


def step_of(number: int) -> Grammar:
    """A grammar whose states are remainders: for a large number they take gigabytes. Its schema stands in Lark."""
    return Grammar.lark(f'start: %json {{"type": "integer", "multipleOf": {number}}}', field="guided_grammar")


ENDLESS = {
    "remainders": step_of(99_999_989),
    "what patterns have in common": Grammar.of_json(
        {"allOf": [{"type": "string", "pattern": f".*a.{{{i}}}b"} for i in range(1, 30)]}, field="guided_grammar"
    ),
    "a stack of rules": Grammar.lark(
        "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(4500)), 'r4500: "x"']), field="guided_grammar"
    ),
}


@pytest.fixture(scope="module")
def bytewise() -> Iterator[Vetting]:
    made = Vetting(TokenizerParts())
    yield made
    made.close()


@pytest.fixture
def make_compiler(make_base) -> Iterator[Any]:
    made: list[GrammarCompiler] = []

    def make() -> GrammarCompiler:
        base = make_base("qwen3")
        made.append(GrammarCompiler(base.tokenizer, vocabulary=base.vocabulary, eos_ids=base.eos_ids))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize(
    ("schema", "field"),
    [
        ({"type": "integer", "multipleOf": 99_999_989}, "json.multipleOf"),
        ({"properties": {"a": {"items": {"multipleOf": 12_345.678}}}}, "json.properties.a.items.multipleOf"),
        (
            {"patternProperties": {f"^a{i:04}": {"type": "integer"} for i in range(1500)}},
            "json.patternProperties",
        ),
    ],
)
def test_what_is_known_to_explode_is_refused_with_its_key(schema: dict[str, Any], field: str) -> None:
    with pytest.raises(GrammarError) as refused:
        check_grammar(Grammar.of_json(schema, field="json"))
    assert refused.value.field == field and refused.value.kind is None


@pytest.mark.parametrize(
    "step", [1, 5, 10**4000, 0.01, 1e-9, 12.5, 997, 50_000, 25_000_000, 1e6, 0, -5, True, 1e400, "x"]
)
def test_an_ordinary_multiple_is_left_to_the_library(step: Any) -> None:
    grammars.check_bounds(Grammar.of_json({"multipleOf": step}))


@pytest.mark.parametrize("what", ENDLESS)
def test_what_does_not_end_is_refused_and_ends_nothing_else(bytewise: Vetting, what: str) -> None:
    with pytest.raises(GrammarError) as refused:
        bytewise.vet(ENDLESS[what])
    assert (refused.value.kind, refused.value.field) == ("limit", "guided_grammar")
    assert bytewise.vet(Grammar.choice(["yes", "no"])) >= 0


def test_others_are_compiled_while_two_run_into_their_limits(make_compiler) -> None:
    compiler = make_compiler()
    endless = [compiler.prepare(step_of(number), sender="one") for number in (99_999_989, 99_999_971)]
    assert becomes(lambda: len(compiler.__dict__["_vetting"]._asked) == 2 if "_vetting" in compiler.__dict__ else False)
    compiler.prepare(Grammar.choice(["yes", "no"]), sender="another").result(timeout=60)
    assert not any(each.done() for each in endless)
    for each in endless:
        with pytest.raises(GrammarError):
            each.result(timeout=60)


def test_a_grammar_is_vetted_once_whatever_errors_call_it(make_compiler, monkeypatch) -> None:
    compiler, vetted = make_compiler(), list[Grammar]()
    vet = Vetting.vet
    monkeypatch.setattr(Vetting, "vet", lambda self, grammar: vetted.append(grammar) or vet(self, grammar))
    monkeypatch.setattr(grammars, "MOST_COMPILED", 1)
    for source in ("a+", "b+", "a+", "b+"):
        compiler.prepare(Grammar.regex(source)).result(timeout=60)
    for field in ("one", "two"):
        with pytest.raises(GrammarError) as refused:
            compiler.prepare(Grammar.lark(ENDLESS["a stack of rules"].source, field=field)).result(timeout=60)
        assert (refused.value.field, refused.value.kind) == (field, "limit")
    assert len(vetted) == 3


def test_what_is_held_is_there_whatever_is_asked_for_meanwhile(make_compiler, monkeypatch) -> None:
    """Otherwise what submits the request would compile it again and wait, as the event loop of a server."""
    compiler, wanted = make_compiler(), Grammar.choice(["a"])
    monkeypatch.setattr(grammars, "MOST_COMPILED", 1)
    held = compiler.prepare(wanted)
    for source in "bc":
        compiler.prepare(Grammar.choice([source])).result(timeout=60)
    assert [each.source for each in compiler._compiled] == ['["c"]']
    assert compiler.prepare(wanted) is held


def test_what_is_kept_is_bounded_by_its_memory(make_compiler, monkeypatch) -> None:
    compiler = make_compiler()
    monkeypatch.setattr(Vetting, "vet", lambda *_: 40)
    monkeypatch.setattr(grammars, "MOST_KEPT", 100)
    for source in "abcd":
        compiler.prepare(Grammar.choice([source])).result(timeout=60)
    assert [each.source for each in compiler._compiled] == ['["c"]', '["d"]']


def test_who_sends_what_is_refused_waits_and_others_do_not(make_compiler, monkeypatch) -> None:
    monkeypatch.setattr(vetting, "MOST_DEBT_S", 0.0)
    compiler = make_compiler()
    with pytest.raises(GrammarError):
        compiler.prepare(Grammar.regex("("), sender="one").result(timeout=60)
    with pytest.raises(OverloadedError) as waits:
        compiler.prepare(Grammar.regex("a"), sender="one").result(timeout=60)
    assert waits.value.retry_after >= 1 and waits.value.status == 429
    compiler.prepare(Grammar.regex("a"), sender="another").result(timeout=60)
    assert compiler.prepare(Grammar.regex("a"), sender="one").result(timeout=60)  # it is compiled


def test_a_sender_is_charged_what_a_refusal_took_of_a_processor_and_not_the_time_that_it_waited(
    make_compiler, monkeypatch
) -> None:
    charged: list[float] = []
    monkeypatch.setattr(Debts, "charge", lambda _, sender, seconds: charged.append(seconds))
    vet = Vetting.vet
    monkeypatch.setattr(Vetting, "vet", lambda self, grammar: time.sleep(0.3) or vet(self, grammar))
    compiler = make_compiler()
    endless_one = ENDLESS["remainders"]
    for grammar, kind in ((Grammar.regex("("), None), (endless_one, "limit"), (endless_one, "limit")):
        with pytest.raises(GrammarError) as refused:
            compiler.prepare(grammar).result(timeout=60)
        assert refused.value.kind == kind
    wrong, endless, known = charged
    assert 0 < wrong < 0.3 and endless == vetting.CPU_S and known == 0


def test_debts_are_forgiven_with_time(monkeypatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(vetting.time, "monotonic", lambda: now[0])
    debts = Debts()
    debts.charge("one", vetting.MOST_DEBT_S)
    debts.check("one")
    debts.charge("one", 2.0)
    with pytest.raises(OverloadedError) as waits:
        debts.check("one")
    now[0] += waits.value.retry_after
    debts.check("one")
    for i in range(vetting.MOST_SENDERS):
        debts.charge(f"other {i}", 9.0)
    assert len(debts._owed) == vetting.MOST_SENDERS


def test_closing_ends_what_is_being_vetted(make_compiler) -> None:
    compiler = make_compiler()
    compiler.prepare(Grammar.choice(["a"])).result(timeout=60)
    waiting = compiler.prepare(step_of(99_999_989))
    assert becomes(lambda: bool(compiler._vetting._asked))
    began = time.monotonic()
    compiler.close()
    with pytest.raises(NotReadyError):
        waiting.result(timeout=60)
    assert time.monotonic() - began < vetting.CPU_S / 2
    assert compiler._vetting._forks._process is None


def test_processes_that_have_ended_are_replaced() -> None:
    made = Vetting(TokenizerParts())
    try:
        made.vet(Grammar.choice(["a"]))
        assert len(made._idle) == 1
        process = made._forks._process
        assert process is not None
        children = [int(each) for each in _children(process.pid)]
        for each in children:
            os.kill(each, signal.SIGKILL)
        made.vet(Grammar.choice(["b"]))
        process.kill()
        process.wait()
        made.vet(Grammar.choice(["c"]))
        assert made._forks._process is not process
    finally:
        made.close()
    with pytest.raises(NotReadyError):
        made.vet(Grammar.choice(["d"]))


def _children(pid: int) -> list[str]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()


def test_many_are_vetted_at_the_same_time(bytewise: Vetting) -> None:
    sizes: list[int] = []
    threads = [
        threading.Thread(target=lambda i=i: sizes.append(bytewise.vet(Grammar.choice([f"text {i}"]))))
        for i in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(sizes) == 12
