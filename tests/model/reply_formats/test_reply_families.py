"""What each family's own template writes is read back, shown again, streamed and constrained (docs/models.md)."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer

from calls import calls_of
from groupwise.engine.grammar import compile_grammar
from groupwise.engine.vetting import TokenizerParts
from groupwise.model.chat import encode_prompt, render_prompt, stop_ids, template_thinks
from groupwise.model.reply_formats.format import ReplyFormat
from groupwise.model.reply_formats.known import format_of, shown_format
from groupwise.tasks.structured import free_reply, reply_grammar, thoughts_of, with_thoughts
from groupwise.tasks.tool_calls import parse
from groupwise.types import Grammar, Message, Prompt
from template_families import FAMILIES, OTHERS, plain_tokenizer_of, tokenizer_of

FOUND = Path(__file__).parents[3] / "docs" / "reply_formats.json"
EXPECTED = {
    "starter": "hermes",
    "hermes": "hermes",
    "qwen3": "hermes",
    "qwen3_5": "qwen_xml",
    "nemotron": "qwen_xml",
    "llama3": "llama",
    "mistral": "mistral",
    "mistral v13": "mistral_args",
    "glm": "glm",
    "deepseek v3": "deepseek_v3",
    "deepseek v3.1": "deepseek_v31",
    "kimi": "kimi",
    "minimax": "minimax",
    "lfm2": "lfm2",
    "lfm2.5": "lfm2",
    "gpt-oss": "harmony",
    "gemma 4": "gemma4",
}
ONE_CALL = ("llama3", "gpt-oss")  # in a message of these templates
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "way": {"enum": ["up", "down"]},
        "on": {"type": "boolean"},
        "note": {"type": "string"},
        "at": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
        "deep": {"$ref": "#/$defs/deep"},
    },
    "required": ["n", "note"],
    "$defs": {"deep": {"type": "object", "properties": {"Key": {"type": "string"}, "a": {"type": "number"}}}},
}
MOVE = {"type": "function", "function": {"name": "move", "description": "Moves.", "parameters": PARAMETERS}}
WAIT = {"type": "function", "function": {"name": "wait", "description": "Waits.", "parameters": {"type": "object"}}}
STRICT = {"type": "function", "function": {**MOVE["function"], "strict": True}}
ARGUMENTS = {"n": 7, "way": "up", "on": True, "note": 'it\'s "so" {1}', "at": [1, 2], "deep": {"Key": "k", "a": 1.5}}
ASKED: Message = {"role": "user", "content": "Go."}

WORDS = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\\<|>`"), max_size=10).map(str.strip)
VALUES = st.recursive(
    st.booleans() | st.integers(-(10**12), 10**12) | st.floats(-1e6, 1e6) | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "B", "c_d"]), inner, max_size=2),
    max_leaves=4,
)
CALLS = st.lists(
    st.tuples(st.sampled_from(["move", "wait"]), st.dictionaries(st.sampled_from(["x", "Yes", "z_1"]), VALUES)),
    min_size=1,
    max_size=3,
)


def family(name: str) -> tuple[Any, ReplyFormat]:
    tokenizer = tokenizer_of(name)
    return tokenizer, format_of(tokenizer)


def message(form: ReplyFormat, calls: list[tuple[str, dict[str, Any]]], **fields: Any) -> Message:
    made = [
        {"id": form.call_id(i), "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return Message(**{"role": "assistant", "content": "", "tool_calls": made} | fields)  # type: ignore[typeddict-item]


def written(name: str, said: Message) -> str:
    """What the template writes for the assistant, without its head and without what begins the next turn."""
    tokenizer, form = family(name)
    before = render_prompt([ASKED], tokenizer).rstrip().removesuffix(form.thought.start)
    after = render_prompt([ASKED, said, {"role": "user", "content": "END"}], tokenizer)
    assert after.startswith(before)
    return after[len(before) : after.index("END")]


def declared(calls: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Tools whose strings are declared to be strings."""
    tools = []
    for name, arguments in dict(calls).items():
        types = {key: {"type": "string"} if isinstance(value, str) else {} for key, value in arguments.items()}
        tools.append({"type": "function", "function": {"name": name, "description": "", "parameters": {
            "type": "object", "properties": types}}})  # fmt: skip
    return tools


def streamed(form: ReplyFormat, text: str, size: int, **options: Any) -> list[tuple[str, Any]]:
    parser = form.parser(**options)
    parts = [part for at in range(0, len(text), size) for part in parser.push(text[at : at + size])] + parser.finish()
    return [(part.name, json.loads(part.arguments)) for part in parts if part.kind == "tool_call"]


@pytest.mark.parametrize("name", EXPECTED)
def test_the_format_is_the_families(name: str) -> None:
    assert shown_format(tokenizer_of(name)) is not None and format_of(tokenizer_of(name)).name == EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
@settings(max_examples=20)
@given(calls=CALLS, size=st.integers(1, 9))
def test_what_the_template_writes_is_read_and_written_again(name: str, calls: Any, size: int) -> None:
    calls = list(dict(calls).items())[: 1 if name in ONE_CALL else None]
    tools, form = declared(calls), family(name)[1]
    text = written(name, message(form, calls))
    reply = parse(text, form, tools=tools)
    assert (calls_of(reply), reply.malformed) == (calls, [])
    assert written(name, message(form, calls_of(reply))) == text
    assert streamed(form, text, size, tools=tools) == calls


def thinking(name: str) -> str:
    """What begins a thought of the family, where one in front of a call is read, and shown again with its result."""
    tokenizer, form = family(name)
    if not template_thinks(tokenizer):
        return "none"
    text = f"{form.thought.start}\nHm.\n{form.thought.end}" + form.text_of("wait", {})
    parser = form.parser(tools=[WAIT])
    parts = [part for letter in text for part in parser.push(letter)] + parser.finish()
    assert "".join(part.text for part in parts if part.kind == "reasoning").strip() == "Hm."
    inside = {"content": f"{form.thought.start}\nHm.\n{form.thought.end}\n\n"}
    said = message(form, [("wait", {})], **({"reasoning_content": "Hm."} if form.thoughts_apart else inside))
    answer = Message(role="tool", content="R", tool_call_id=form.call_id(0))
    shown = "Hm." in render_prompt([ASKED, said, answer], tokenizer, tools=[WAIT])
    return form.thought.start + ("" if shown else ", not shown again")


def prefills(name: str) -> bool:
    """Whether a reply can be begun for the model."""
    tokenizer, _ = family(name)
    messages = (ASKED, Message(role="assistant", content="It is"))
    ids = encode_prompt(Prompt(id="p", messages=messages), tokenizer).token_ids
    return tokenizer.decode(list(ids)).endswith("It is")


def takes(tokenizer: Any, grammar: Grammar | None, text: str) -> bool:
    """Whether a reply of this text is one of the grammar's; markers are tokens where the model has them."""
    assert grammar is not None
    matcher = compile_grammar(grammar, lltokenizer(tokenizer))
    ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@functools.cache
def lltokenizer(tokenizer: Any) -> LLTokenizer:
    parts = TokenizerParts(tokenizer.backend_tokenizer.to_str(), len(tokenizer), tuple(stop_ids(tokenizer)))
    return parts.open()


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("made", [tokenizer_of, plain_tokenizer_of])
def test_calls_are_kept_to_their_tools(name: str, made: Any) -> None:
    """Whether the markers are special tokens of the tokenizer, or tokens and not special, or text."""
    tokenizer, form = made(name), family(name)[1]
    good, other = form.text_of("move", ARGUMENTS), form.text_of("wait", {})
    wrong = [form.text_of("move", ARGUMENTS | change) for change in ({"n": 1000}, {"way": "left"}, {"at": [1]})]
    wrong += [form.text_of("dance", {}), form.text_of("move", {"n": 1}), "It is 4."]

    required = reply_grammar(form, [MOVE, WAIT], tokenizer, choice="required", several=False)
    assert [takes(tokenizer, required, text) for text in (good, other, *wrong)] == [True, True] + [False] * len(wrong)
    named = reply_grammar(form, [MOVE, WAIT], tokenizer, choice="required", only="move", several=False)
    assert [takes(tokenizer, named, text) for text in (good, other)] == [True, False]
    either = reply_grammar(form, [MOVE, WAIT], tokenizer, answer=Grammar.choice(["yes"]))
    answer = "yes" if name != "gpt-oss" else "<|channel|>final<|message|>yes"
    assert [takes(tokenizer, either, text) for text in (good, answer, wrong[-1])] == [True, True, False]
    strict = reply_grammar(form, [STRICT, WAIT], tokenizer)
    lead = "" if name in ("llama3", "gpt-oss") else "Well. "
    assert [takes(tokenizer, strict, f"{lead}{text}") for text in (good, wrong[0], wrong[3])] == [True, False, False]
    thought = f"{form.thought.start}\nHm.\n{form.thought.end}"
    bounded = with_thoughts(required, tokenizer, "optional")  # type: ignore[arg-type]
    assert [takes(tokenizer, bounded, text) for text in (good, thought + good, thought)] == [True, True, False]


def test_a_schema_may_have_itself_in_it() -> None:
    """Where arguments are no JSON it is written out here."""
    tokenizer, form = family("gemma 4")
    node = {"type": "object", "properties": {"n": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}}}
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/node"}}, "$defs": {"node": node}}
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("f", "g")]
    grammar = reply_grammar(form, tools, tokenizer, choice="required", several=False)
    deep: dict[str, Any] = {}
    for _ in range(30):
        deep = {"n": 1, "next": deep}
    wrong = [{"n": "one"}, {"next": {"next": 1}}, {"other": 1}]
    assert [takes(tokenizer, grammar, form.text_of("g", {"a": value})) for value in (deep, *wrong)] == [True] + 3 * [
        False
    ]


THINKING = {
    **dict.fromkeys(("starter", "qwen3", "glm", "kimi", "lfm2.5", "gpt-oss", "gemma 4"), "optional"),
    **dict.fromkeys(("qwen3_5", "nemotron", "deepseek v3", "minimax"), "begun"),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_replies_may_think_where_the_family_does(name: str) -> None:
    tokenizer, form = family(name)
    ids = encode_prompt(Prompt(id="p", messages=(ASKED,)), tokenizer).token_ids
    assert thoughts_of(ids, tokenizer) == THINKING.get(name, "none")
    closed = [*ids, *tokenizer.encode(form.thought.end, add_special_tokens=False)]
    assert name == "gpt-oss" or thoughts_of(closed, tokenizer) == "none"


@pytest.mark.parametrize("name", ["qwen3", "glm", "lfm2.5", "gpt-oss", "gemma 4"])
def test_a_thought_is_bounded_between_the_families_marks(name: str) -> None:
    """After its tokens are used up nothing is left but its end; an answer in a form follows in the form's place."""
    tokenizer, form = family(name)
    answer = reply_grammar(form, (), tokenizer, answer=Grammar.choice(["yes"]))
    assert answer is not None
    for grammar, said in ((answer, "yes"), (free_reply(), "Whatever.")):
        matcher = compile_grammar(with_thoughts(grammar, tokenizer, "optional", tokens=3), lltokenizer(tokenizer))
        begun = tokenizer.encode(form.thought.start, add_special_tokens=False)
        thought = tokenizer.encode("abcdefghijk", add_special_tokens=False)[:3]
        assert len(thought) == 3 and matcher.try_consume_tokens([*begun, *thought]) == len(begun) + 3
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        end = tokenizer.encode(form.thought.end, add_special_tokens=False)
        assert np.flatnonzero(bits[: len(tokenizer)]).tolist() == end[:1]
        head = "<|channel|>final<|message|>" if name == "gpt-oss" else ""
        rest = [*end, *tokenizer.encode(f"{head}{said}", add_special_tokens=False)]
        assert matcher.try_consume_tokens(rest) == len(rest) and matcher.is_accepting()


def facts(name: str) -> dict[str, Any]:
    """What docs/models.md says of a family; each is tried."""
    tokenizer, form = family(name)
    calls = [("move", ARGUMENTS), ("wait", {})][: 1 if name in ONE_CALL else None]
    text = written(name, message(form, calls))
    reply = parse(text, form, tools=[MOVE, WAIT])
    required = reply_grammar(form, [MOVE, WAIT], tokenizer, choice="required")
    strict = reply_grammar(form, [STRICT, WAIT], tokenizer, choice="auto")
    bad = form.text_of("move", ARGUMENTS | {"n": 1000})
    return {
        "format": form.name,
        "read": calls_of(reply) == calls,
        "rendered": written(name, message(form, calls_of(reply))) == text,
        "streamed": streamed(form, text, 1, tools=[MOVE, WAIT]) == calls,
        "constrained": [takes(tokenizer, each, one) for each in (required, strict)
                        for one in (form.text_of(*calls[0]), bad)] == [True, False] * 2,
        "thinking": thinking(name),
        "prefill": prefills(name),
    }  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_what_docs_models_says(name: str) -> None:
    """`GROUPWISE_WRITE_MODELS=1` writes it."""
    row = facts(name)
    known = json.loads(FOUND.read_text(encoding="utf-8")) if FOUND.exists() else {}
    if os.environ.get("GROUPWISE_WRITE_MODELS") == "1":
        known[name] = row
        FOUND.write_text(json.dumps({key: known[key] for key in EXPECTED if key in known}, indent=1) + "\n", "utf-8")
    assert known[name] == row and all(row[what] for what in ("read", "rendered", "streamed", "constrained"))


def test_every_family_that_shows_calls_is_here() -> None:
    shown = [name for name in FAMILIES | OTHERS if shown_format(tokenizer_of(name)) is not None]
    assert set(shown) - {"deepseek"} == set(EXPECTED)  # the distilled R1's template drops calls
