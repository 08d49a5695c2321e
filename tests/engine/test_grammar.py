"""Structured outputs in the local engine: completions are text of their grammar, whatever shares their batch."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator

from groupwise.engine import grammar as grammars
from groupwise.engine.local import LocalEngine
from groupwise.errors import GrammarError
from groupwise.types import (
    Completion,
    FinishReason,
    Grammar,
    GrammarKind,
    PolicyVersion,
    SamplingParams,
    SamplingRequest,
)
from processes import becomes
from wording import raises

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "on": {"type": "boolean"}},
    "required": ["x", "on"],
    "additionalProperties": False,
}
GRAMMARS = (
    Grammar.of_json(POINT),
    Grammar.regex(r"[a-f]{3}-\d{2,4}"),
    Grammar.choice(["yes", "no", 'per"haps\n', "é"]),
    Grammar.lark('start: "(" start ")" | "x"'),
    Grammar.lark('root ::= "a" | "b" root'),
)


@pytest.fixture(scope="module")
def engine(make_base, request: pytest.FixtureRequest) -> Iterator[LocalEngine]:
    """One for tests that leave nothing behind: the first grammar of each starts a process that vets."""
    base = make_base(getattr(request, "param", "qwen3"), dtype=torch.float64, context=256)
    with closing(LocalEngine(base, lanes=1)) as opened:
        yield opened


@pytest.fixture
def open_engine(make_base) -> Iterator:
    opened: list[LocalEngine] = []

    def make(architecture: str = "qwen3", *, context: int = 256, **options) -> LocalEngine:
        base = make_base(architecture, dtype=torch.float64, context=context)
        opened.append(LocalEngine(base, **{"lanes": 1} | options))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


def request(grammar: Grammar | None, *, ids: tuple[int, ...] = (1, 2, 3), n: int = 1, **params: Any) -> SamplingRequest:
    version, cache = params.pop("version", PolicyVersion.base()), params.pop("cache", False)
    params = {"max_tokens": 96, "seed": 5, "grammar": grammar} | params
    return SamplingRequest(prompt_ids=ids, n=n, version=version, cache=cache, params=SamplingParams(**params))


def is_text_of(grammar: Grammar, text: str) -> bool:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return Draft202012Validator(json.loads(grammar.source)).is_valid(json.loads(text))
        case GrammarKind.JSON_OBJECT:
            return isinstance(json.loads(text), dict)
        case GrammarKind.REGEX:
            return re.fullmatch(grammar.source, text) is not None
        case GrammarKind.CHOICE:
            return text in json.loads(grammar.source)
        case GrammarKind.LARK:
            return re.fullmatch(r"b*a" if "root" in grammar.source else r"(\(*)x(\)*)", text) is not None


def check_whole(grammar: Grammar, completions: list[Completion], engine: LocalEngine) -> int:
    """All that ended are text of the grammar, and end with the end of the turn. -> how many did."""
    whole = [each for each in completions if each.finish_reason is FinishReason.STOP]
    for each in whole:
        assert is_text_of(grammar, each.text), each.text
        assert each.token_ids[-1] in engine._shared.eos_ids
    return len(whole)


def ids_of(groups: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[each.token_ids for each in group] for group in groups]


@pytest.mark.parametrize("engine", ["qwen3", "gpt2"], indirect=True)
@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind.value)
def test_what_a_random_model_says_is_text_of_the_grammar(engine: LocalEngine, grammar: Grammar) -> None:
    sampled = engine.generate([request(grammar, n=8)])[0]
    greedy = engine.generate([request(grammar, temperature=0.0)])[0]
    narrow = engine.generate([request(grammar, n=4, top_k=1), request(grammar, n=4, top_p=0.1, min_p=0.2)])
    everything = [*sampled, *greedy, *narrow[0], *narrow[1]]
    assert check_whole(grammar, everything, engine) >= len(everything) // 2
    assert all(each.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) for each in everything)


def test_rows_without_a_grammar_are_drawn_as_if_they_were_alone(engine: LocalEngine) -> None:
    free = [request(None, ids=(4, 5, 6 + i), n=2, max_tokens=24, presence_penalty=0.5 * (i % 2)) for i in range(3)]
    alone = engine.generate(free)
    constrained = [request(each, ids=(4, 5, 6 + i), n=2) for i, each in enumerate(GRAMMARS)]
    apart = [engine.generate([each])[0] for each in constrained]
    mixed = engine.generate([each for pair in zip(constrained, [*free, *free[:2]], strict=True) for each in pair])
    assert ids_of(mixed[0::2]) == ids_of(apart)
    assert ids_of(mixed[1::2]) == ids_of([*alone, *alone[:2]])


def test_rows_are_followed_over_lanes_waiting_requests_and_adapters(open_engine, make_adapter) -> None:
    engine, adapter = open_engine(lanes=2, max_rows=4), PolicyVersion("other", 1)
    engine.load(adapter, make_adapter(engine._base))
    asked = [
        request(each, ids=(9, i), n=3, version=version)
        for i, each in enumerate(GRAMMARS)
        for version in (PolicyVersion.base(), adapter)
    ]
    groups = engine.generate(asked)
    whole = [check_whole(each.params.grammar, group, engine) for each, group in zip(asked, groups, strict=True)]
    assert sum(whole) > 20
    assert any(a != b for a, b in zip(groups[::2], groups[1::2], strict=True))


def test_log_probabilities_are_those_of_the_whole_distribution(engine: LocalEngine) -> None:
    asked = request(GRAMMARS[0], temperature=0.7, top_logprobs=3)
    (said,) = engine.generate([asked])[0]
    scored = engine.score(asked.prompt_ids, said.token_ids, asked.version, temperature=0.7)
    assert said.logprobs == pytest.approx(scored, abs=1e-9)
    assert asked.params.reshaped == ("grammar",)


@pytest.mark.parametrize("draft_tokens", [0, 6])
def test_drafts_change_nothing(open_engine, draft_tokens: int) -> None:
    engine = open_engine(draft_tokens=draft_tokens)
    repeated = tuple(engine._base.tokenizer.encode('{"x": 1, "on": true} {"x": 1, "on": true} {"x": 2'))
    asked = [request(GRAMMARS[0], ids=repeated, n=2), request(None, ids=repeated, n=3, temperature=0.01)]
    constrained, _ = engine.generate(asked)
    assert check_whole(GRAMMARS[0], constrained, engine) == 2
    assert ids_of([constrained]) == ids_of([open_engine().generate(asked)[0]])
    if draft_tokens:
        assert engine.stats()["drafted"] > 0


def test_the_next_turn_of_a_conversation_goes_on_from_what_is_kept(open_engine) -> None:
    engine = open_engine()
    first = engine.generate([request(GRAMMARS[1], ids=(7, 8, 9), cache=True)])[0][0]
    again = (7, 8, 9, *first.token_ids, 4, 5)
    kept = engine.generate([request(GRAMMARS[0], ids=again, cache=True)])[0]
    assert kept[0].cached_tokens
    assert ids_of([kept]) == ids_of([open_engine().generate([request(GRAMMARS[0], ids=again)])[0]])


def test_what_else_ends_a_completion_still_does(engine: LocalEngine) -> None:
    cut = engine.generate([request(Grammar.regex("a{50}"), max_tokens=10)])[0][0]
    assert cut.finish_reason is FinishReason.LENGTH and set(cut.text) == {"a"}
    stopped = engine.generate([request(Grammar.lark('start: "a" "b" "c" "d"'), stop=("c",))])[0][0]
    assert stopped.finish_reason is FinishReason.STOP and stopped.text == "ab"
    longer = engine.generate([request(Grammar.choice(["a", "b"]), min_tokens=20)])[0][0]
    assert longer.text in ("a", "b") and longer.finish_reason is FinishReason.STOP
    biased = engine.generate([request(Grammar.choice(["a", "b"]), logit_bias=tuple((i, 100.0) for i in range(97)))])
    assert biased[0][0].text in ("a", "b")
    with raises(ValueError):
        request(Grammar.choice(["a"]), ignore_eos=True)


@pytest.mark.parametrize("thoughts", ["optional", "begun"])
def test_thoughts_are_free_and_the_answer_is_not(engine: LocalEngine, thoughts: Any) -> None:
    grammar = replace(GRAMMARS[0], thoughts=thoughts)
    end = engine._base.tokenizer.convert_tokens_to_ids("</think>")
    bias = {"logit_bias": ((end, 8.0),), "max_tokens": 160}
    whole = [each for each in engine.generate([request(grammar, n=12, **bias)])[0] if each.finish_reason == "stop"]
    answers = [each.text.rpartition("</think>")[2] for each in whole]
    assert answers and all(is_text_of(GRAMMARS[0], answer) for answer in answers)
    thought = [each for each in whole if "</think>" in each.text]
    assert len(thought) == len(whole) if thoughts == "begun" else all(e.text[0] in "<{ \n" for e in whole)


@pytest.mark.parametrize(
    ("grammar", "field"),
    [
        (
            Grammar.of_json({"properties": {"a": {"items": {"type": "strin"}}}}),
            "grammar.properties.a.items",
        ),
        (
            Grammar.of_json({"$defs": {"b": {"pattern": "("}}, "$ref": "#/$defs/b"}),
            "grammar.$defs.b",
        ),
        (Grammar.of_json({"anyOf": [{}, {"uniqueItems": True}]}), "grammar.anyOf[1]"),
        (Grammar.of_json({"oneOf": [{"type": "integer"}, {"minimum": 3}]}), "grammar"),
        (Grammar.of_json({"type": "object", "properties": {f"p{i}": {} for i in range(900)}}), "grammar"),
        (Grammar.of_json({"$ref": "https://example.com/x"}), "grammar"),
        (Grammar.of_json({"format": {"type": "string"}}), "grammar"),  # of which `properties` was forgotten
        (Grammar.of_json({"enum": ["x" * 70_000]}), "grammar"),
        (Grammar(GrammarKind.JSON_SCHEMA, "[1]"), "grammar"),
        (Grammar(GrammarKind.JSON_SCHEMA, "[" * 5000), "grammar"),
        (Grammar.regex("(?=x)", field="guided_regex"), "guided_regex"),
        (Grammar.lark("start: missing"), "grammar"),
        (Grammar.lark("&&&"), "grammar"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_grammar_that_cannot_be_kept_to_is_refused_before_anything_is_queued(
    engine: LocalEngine, grammar: Grammar, field: str
) -> None:
    for ask in (lambda: engine.prepare(grammar).result(), lambda: engine.submit([request(None), request(grammar)])):
        with raises(GrammarError, field=field):
            ask()
    assert engine.stats()["waiting"] == engine.stats()["running"] == 0
    assert engine.generate([request(GRAMMARS[2])])


def test_lenient_schemas_and_descriptive_formats_compile(engine: LocalEngine) -> None:
    unkept = {"type": "array", "uniqueItems": True, "items": {"type": "integer", "format": "int32"}, "maxItems": 2}
    with pytest.raises(GrammarError):
        engine.prepare(Grammar.of_json(unkept)).result()
    said = engine.generate([request(Grammar.of_json(unkept, lenient=True))])[0][0]
    assert isinstance(json.loads(said.text), list)
    named = {"type": "object", "properties": {"format": {"type": "string", "enum": ["int32"]}}, "required": ["format"]}
    named["additionalProperties"] = False
    assert json.loads(engine.generate([request(Grammar.of_json(named))])[0][0].text) == {"format": "int32"}
    switched = {"x-guidance": {"lenient": True}, "uniqueItems": True}
    with raises(GrammarError, field="grammar"):
        engine.prepare(Grammar.of_json(switched)).result()


def test_each_format_is_known_to_the_library(engine: LocalEngine) -> None:
    for format in sorted(grammars.FORMATS):
        engine.prepare(Grammar.of_json({"type": "string", "format": format})).result()


def test_a_grammar_that_fails_while_it_is_sampled_fails_its_request_alone(open_engine) -> None:
    engine = open_engine()
    wide = {"type": "object", "properties": {f"p{i}": {} for i in range(900)}}
    name = "behind the tokens that are tried"
    deep = Grammar.of_json({"type": "object", "properties": {name: wide}, "required": [name]})
    engine.prepare(deep).result()
    beside, hopeless, after = engine.submit([request(GRAMMARS[0]), request(deep, n=3), request(GRAMMARS[1])])
    with raises(GrammarError, field="grammar"):
        hopeless.result(timeout=60)
    assert check_whole(GRAMMARS[0], beside.result(timeout=60), engine) == 1
    assert check_whole(GRAMMARS[1], after.result(timeout=60), engine) == 1
    assert becomes(lambda: engine.stats()["running"] == 0)  # a failed request's rows are given up in the next step


def test_a_grammar_whose_tokens_take_too_long_fails_its_request_alone(open_engine, monkeypatch) -> None:
    engine = open_engine()
    (beside,) = engine.submit([request(GRAMMARS[0])])
    with monkeypatch.context() as patched:
        patched.setattr(grammars, "MATCH_S", -1e9)
        (slow,) = engine.submit([request(Grammar.lark('start: a\na: a a | "x" | "xx"', field="guided_grammar"), n=3)])
    with pytest.raises(GrammarError) as refused:
        slow.result(timeout=60)
    assert refused.value.field == "guided_grammar"
    assert check_whole(GRAMMARS[0], beside.result(timeout=60), engine) == 1
    assert becomes(lambda: engine.stats()["running"] == 0)


def test_time_for_a_grammar_grows_with_what_is_said(monkeypatch) -> None:
    monkeypatch.setattr(grammars, "MATCH_TOKEN_S", 0.01)
    time = grammars.MatchTime()
    time.take(grammars.MATCH_S)
    time.take(0.04, tokens=4)
    assert not time.is_over
    time.take(0.001)
    assert time.is_over


def test_compiled_grammars_are_shared_and_bounded(open_engine, monkeypatch) -> None:
    engine = open_engine()
    compiled: list[Grammar] = []
    compile_one = grammars.GrammarCompiler._compile
    monkeypatch.setattr(
        grammars.GrammarCompiler, "_compile", lambda self, each: compiled.append(each) or compile_one(self, each)
    )
    monkeypatch.setattr(grammars, "MOST_COMPILED", 3)
    threads = [threading.Thread(target=engine.generate, args=([request(GRAMMARS[0])],)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiled == [GRAMMARS[0]]
    for each in (*GRAMMARS, GRAMMARS[-1]):
        engine.prepare(each).result()
    assert compiled == [*GRAMMARS] and len(engine._grammars._compiled) == 3


def test_many_rows_share_the_work_and_draw_the_same(open_engine, monkeypatch) -> None:
    engine = open_engine()
    asked = [request(GRAMMARS[0], n=6), request(GRAMMARS[1], n=6)]
    together = engine.generate(asked)
    monkeypatch.setattr(grammars, "TOGETHER", 100)
    assert ids_of(engine.generate(asked)) == ids_of(together)


def test_without_a_grammar_no_mask_is_made(open_engine, monkeypatch) -> None:
    from groupwise.engine import decoder

    monkeypatch.setattr(decoder, "allowed_tokens", lambda *_: pytest.fail("a mask was made"))
    assert open_engine().generate([request(None, n=3, max_tokens=8)])
