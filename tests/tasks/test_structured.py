"""Replies that have a form: in each format that models write calls in, what the grammar lets through is such calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from groupwise.engine.local import LocalEngine
from groupwise.errors import GrammarError
from groupwise.model.load import load_model
from groupwise.model.reply_formats.format import ReplyFormat
from groupwise.model.reply_formats.known import FORMATS, format_of
from groupwise.tasks.structured import answer_grammars, of_reply, reply_grammar, thoughts_of
from groupwise.tasks.tool_calls import parse
from groupwise.types import Completion, Grammar, SamplingParams, SamplingRequest
from slow_cases import long_case, slow_but
from wording import raises

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "way": {"enum": ["up", "so \"to\" say"]},
        "on": {"type": "boolean"},
        "note": {"type": "string", "maxLength": 6},
        "at": {"$ref": "#/$defs/point"},
    },
    "required": ["n", "way", "at"],
    "$defs": {"point": {"type": "array", "items": {"type": "integer", "maximum": 9}, "minItems": 2, "maxItems": 2}},
}  # fmt: skip
MOVE = {"type": "function", "function": {"name": "move.it", "parameters": PARAMETERS}}
WAIT = {"type": "function", "function": {"name": "wait"}}
STRICT = {"type": "function", "function": {**MOVE["function"], "strict": True}}
HI = [{"role": "user", "content": "What is 4 + 5?"}]


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    opened = LocalEngine(load_model("starter"), lanes=1)
    yield opened
    opened.close()


def sampled(engine: LocalEngine, grammar: Grammar | None, *, n: int = 4, **params: Any) -> list[Completion]:
    """Replies that were not cut."""
    tokenizer = engine._base.tokenizer
    ids = tuple(tokenizer.apply_chat_template(HI, add_generation_prompt=True)["input_ids"])
    params = {"max_tokens": 200, "seed": 4, "top_p": 0.95, "grammar": grammar} | params
    said = engine.generate([SamplingRequest(prompt_ids=ids, n=n, params=SamplingParams(**params))])[0]
    return [each for each in said if each.finish_reason == "stop"]


def calls_in(text: str, form: ReplyFormat) -> list[str]:
    """The names of the calls that a reply is, all valid."""
    reply = parse(text, form, tools=[MOVE, WAIT])
    assert not reply.malformed, text
    for call in reply.calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        assert name in ("move.it", "wait")
        Draft202012Validator(PARAMETERS if name == "move.it" else {"maxProperties": 0}).validate(arguments)
    return [call["function"]["name"] for call in reply.calls]


@pytest.mark.parametrize("form", slow_but({FORMATS["hermes"]}, of=FORMATS.values()), ids=str)
def test_forced_calls(engine: LocalEngine, form: ReplyFormat) -> None:
    def names(**how: Any) -> list[list[str]]:
        grammar = reply_grammar(form, [MOVE, WAIT], engine._base.tokenizer, choice="required", **how)
        return [calls_in(each.text, form) for each in sampled(engine, grammar, max_tokens=400)]  # Kimi's take 350

    single = names(several=False)
    assert single and {len(each) for each in single} == {1}
    assert {each[0] for each in names(several=False, only="move.it")} == {"move.it"}
    assert {each[0] for each in names(several=False, only="wait")} == {"wait"}
    assert all(names())


JSON = '{"name": "wait", "arguments": {}}'
KIMI = "<|tool_call_begin|>functions.wait:{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>wait\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>wait<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
THRICE = {
    "hermes": "\n".join([f"<tool_call>\n{JSON}\n</tool_call>"] * 3),
    "qwen_xml": "\n".join(["<tool_call>\n<function=wait>\n</function>\n</tool_call>"] * 3),
    "llama": "; ".join(['{"name": "wait", "parameters": {}}'] * 3),
    "mistral": f"[TOOL_CALLS] [{JSON}, {JSON}, {JSON}]",
    "mistral_args": "[TOOL_CALLS]wait[ARGS]{}" * 3,
    "glm": "\n".join(["<tool_call>wait\n</tool_call>"] * 3),
    "minimax": "<minimax:tool_call>\n" + '<invoke name="wait">\n</invoke>\n' * 3 + "</minimax:tool_call>",
    "kimi": f"<|tool_calls_section_begin|>{''.join(map(KIMI.format, range(3)))}<|tool_calls_section_end|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜>" + "\n".join([V3] * 3) + "<｜tool▁calls▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜>{V31 * 3}<｜tool▁calls▁end｜>",
    "lfm2": "<|tool_call_start|>[wait(), wait(), wait()]<|tool_call_end|>",
    "gemma4": "<|tool_call>call:wait{}<tool_call|>" * 3,
}  # and Harmony's calls each end their turn


@pytest.mark.parametrize("form", FORMATS.values(), ids=str)
def test_several_calls_can_be_made(engine: LocalEngine, form: ReplyFormat) -> None:
    """Written as the format writes them, and followed token by token."""
    assert set(FORMATS) - set(THRICE) == {"harmony"}
    if form.name not in THRICE:
        return
    text = THRICE[form.name]
    tokenizer = engine._base.tokenizer
    for several, taken in ((True, True), (False, False)):
        grammar = reply_grammar(form, [MOVE, WAIT], tokenizer, choice="required", several=several)
        assert grammar is not None
        matcher = engine.prepare(grammar).result().deep_copy()
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == taken
    assert calls_in(text, form) == ["wait"] * 3


@pytest.mark.parametrize(
    "form",
    [long_case(form) if name in ("kimi", "minimax", "deepseek_v3") else form for name, form in FORMATS.items()],
    ids=str,
)
def test_auto(engine: LocalEngine, form: ReplyFormat) -> None:
    tokenizer = engine._base.tokenizer
    assert reply_grammar(form, [MOVE, WAIT], tokenizer) is None
    answer = Grammar.choice(["yes"])
    alone = reply_grammar(form, [], tokenizer, answer=answer)
    assert (alone == answer) == (form.name != "harmony")  # in which an answer has a header
    either = reply_grammar(form, [MOVE, WAIT], tokenizer, answer=answer)
    for each in sampled(engine, either, n=3):
        assert each.text.endswith("yes") or calls_in(each.text, form)
    free = sampled(engine, None, temperature=0.0)
    if form.name == "harmony":  # the starter writes no headers
        return
    assert sampled(engine, reply_grammar(form, [STRICT, WAIT], tokenizer), temperature=0.0)[0].text == free[0].text


@pytest.mark.parametrize("form", [FORMATS["hermes"], FORMATS["mistral"], FORMATS["mistral_args"]])
def test_with_strict_tools_what_begins_like_a_call_becomes_one(engine: LocalEngine, form: ReplyFormat) -> None:
    tokenizer = engine._base.tokenizer
    grammar = reply_grammar(form, [STRICT, WAIT], tokenizer)
    assert grammar is not None
    fresh = engine.prepare(grammar).result()
    for text, taken in (
        (f"Well. {form.opening()}", True),
        (f"Well. {form.opening('wait')}", True),
        (f"Well. {form.opening('dance')}", False),
        ("Well. {[<", True),
    ):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert (fresh.deep_copy().try_consume_tokens(ids) == len(ids)) == taken, text


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"type": "array"}, "tools[1].function.parameters.type"),
        ({"type": "object", "anyOf": [{}]}, "tools[1].function.parameters"),
        (
            {"properties": {"a": {"type": "string", "pattern": "x"}}},
            "tools[1].function.parameters.properties.a",
        ),
        (
            {"properties": {"a": {"type": ["string", "null"]}}},
            "tools[1].function.parameters.properties.a",
        ),
    ],
)
def test_what_cannot_be_guaranteed_as_xml_is_refused(
    engine: LocalEngine, parameters: dict[str, Any], field: str
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with raises(GrammarError, field=field):
        reply_grammar(FORMATS["qwen_xml"], [WAIT, tool], engine._base.tokenizer, choice="required")


@pytest.mark.parametrize("form", FORMATS.values(), ids=repr)
def test_required_that_is_null_is_left_out(engine: LocalEngine, form: ReplyFormat) -> None:
    """As programs in Go write it: a server of MCP's, say."""
    plain = {"type": "object", "properties": {"x": {"type": "string"}}}
    asked = [
        [{"type": "function", "function": {"name": "f", "parameters": plain | more}}]
        for more in ({}, {"required": None})
    ]
    without, null = (reply_grammar(form, each, engine._base.tokenizer, choice="required") for each in asked)
    assert null == without is not None


@pytest.mark.parametrize("form", [FORMATS[name] for name in ("qwen_xml", "gemma4")], ids=repr)
@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"properties": ["x"]}, "properties"),
        ({"properties": {}, "required": True}, "required"),
        ({"properties": {"x": {"type": "string", "enum": 5}}}, "properties.x.enum"),
        ({"properties": {"x": {"type": "string", "maxLength": "5"}}}, "properties.x.maxLength"),
    ],
)
def test_what_is_no_schema_is_refused_with_its_place(
    engine: LocalEngine, form: ReplyFormat, parameters: dict[str, Any], field: str
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with raises(GrammarError, field=f"tools[0].function.parameters.{field}"):
        reply_grammar(form, [tool], engine._base.tokenizer, choice="required")


def test_thoughts_are_where_the_template_has_them(engine: LocalEngine) -> None:
    tokenizer = engine._base.tokenizer
    encode = tokenizer.apply_chat_template
    plain = encode(HI, add_generation_prompt=True)["input_ids"]
    off = encode(HI, add_generation_prompt=True, enable_thinking=False)["input_ids"]
    begun = [*plain, *tokenizer.encode("<think>\n")]
    assert [thoughts_of(ids, tokenizer) for ids in (plain, off, begun)] == ["optional", "none", "begun"]
    assert answer_grammars(None, [plain, off], tokenizer) == [None, None]
    grammars = answer_grammars(Grammar.choice(["a"]), [plain, off], tokenizer)
    assert [each and each.thoughts for each in grammars] == ["optional", "none"]
    assert format_of(tokenizer) is FORMATS["hermes"] and json.loads(grammars[0].source) == ["a"]


# ---- a thought's budget ----
def thought_of(engine: LocalEngine, budget: int | None, opening: str, **params: Any) -> list[Completion]:
    """Replies to a prompt behind which the assistant has said `opening` already."""
    tokenizer = engine._base.tokenizer
    asked = tokenizer.apply_chat_template(HI, add_generation_prompt=True, tokenize=False) + opening
    ids = tuple(tokenizer.encode(asked, add_special_tokens=False))
    given = SamplingParams(**{"max_tokens": 60, "seed": 4, "thinking_budget": budget} | params)
    return engine.generate([SamplingRequest(prompt_ids=ids, n=8, params=of_reply(given, ids, tokenizer))])[0]


@pytest.mark.parametrize("budget", [1, 4, 30])
def test_a_thought_ends_when_its_tokens_are_used_up(engine, budget):
    """What was left to draw is recorded: one token has probability 1 whatever the policy, and so no gradient."""
    end = engine._base.tokenizer.convert_tokens_to_ids("</think>")
    never = {"logit_bias": ((end, -50.0),)}  # a policy that ends no thought by itself
    for reply in thought_of(engine, budget, "<think>\n", **never):
        assert reply.token_ids.index(end) == budget
        assert reply.kept is not None and reply.kept.array()[budget].sum() == 1
        assert reply.kept_logprobs[budget] == 0.0 > reply.logprobs[budget]
        assert reply.kept.array()[-1].sum() > 100  # the answer is free


def test_a_thought_that_is_shorter_is_left_alone(engine):
    free, bounded = (thought_of(engine, budget, "<think>\n") for budget in (None, 50))
    assert [each.token_ids for each in free] == [each.token_ids for each in bounded]


def test_where_nothing_thinks_there_is_nothing_to_bound(engine):
    tokenizer = engine._base.tokenizer
    closed = tuple(tokenizer.encode("<think>\n\n</think>\n\n", add_special_tokens=False))
    assert of_reply(SamplingParams(thinking_budget=5), closed, tokenizer).grammar is None


def test_a_bounded_thought_stands_before_an_answer_that_has_a_form(engine):
    form = Grammar.of_json({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    end = engine._base.tokenizer.convert_tokens_to_ids("</think>")
    said = thought_of(engine, 3, "<think>\n", grammar=form, logit_bias=((end, -50.0),), max_tokens=90)
    whole = [each for each in said if each.finish_reason == "stop"]
    assert whole and all(each.token_ids.index(end) == 3 for each in whole)
    assert all("n" in json.loads(each.text.rpartition("</think>")[2]) for each in whole)
