"""Streams of tokens against whole texts: split characters, stop strings, thoughts and tool calls, cut anywhere."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from calls import calls_of
from groupwise.model.chat import decode, stopped_text
from groupwise.model.reply_formats.format import ReplyFormat
from groupwise.model.reply_formats.known import FORMATS
from groupwise.model.reply_formats.parser import ReplyParser, ReplyPart, beginning_length
from groupwise.tasks.reply import (
    Detokenizer,
    TextStream,
    token_text,
)
from groupwise.tasks.tool_calls import parse
from groupwise.types import SamplingParams

SAMPLE = "naïve café 東京タワー 🙂👩‍👩‍👧 ﷽ <think>\n</think> STOP end 12\n"
REPLACEMENT = "\ufffd"


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """All bytes, and pieces of one to five bytes cut from `SAMPLE` anywhere: most edges are inside characters."""
    letters, data, draw = bytes_to_unicode(), SAMPLE.encode(), random.Random(0)
    cuts = [(i, i + draw.randint(2, 5)) for i in range(len(data)) for _ in range(2)]
    pieces = {bytes([byte]) for byte in range(256)} | {data[a:b] for a, b in cuts}
    vocabulary = {"".join(letters[byte] for byte in piece): i for i, piece in enumerate(sorted(pieces))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return with_ends(backend)


@cache
def byte_fallback() -> PreTrainedTokenizerFast:
    """Sentencepiece's kind: words with their space in front, and bare bytes for everything else."""
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁▁",
        "▁the",
        "the",
        "é",
        "東",
        "\n",
        "ST",
        "OP",
    ]
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return with_ends(backend)


def with_ends(backend: Tokenizer) -> PreTrainedTokenizerFast:
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<|end|>", "<|pad|>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", pad_token="<|pad|>")


TOKENIZERS = {"byte level": byte_level, "byte fallback": byte_fallback}


@st.composite
def token_lists(draw: st.DrawFn) -> tuple[PreTrainedTokenizerFast, list[int]]:
    """Ids at random, and the bytes of real text split at random, with ends in the middle now and then."""
    tokenizer = TOKENIZERS[draw(st.sampled_from(sorted(TOKENIZERS)))]()
    vocabulary = tokenizer.get_vocab()
    letters = bytes_to_unicode()

    def spelled(text: str) -> list[int]:
        names = [letters[b] if tokenizer is byte_level() else f"<0x{b:02X}>" for b in text.encode()]
        return [vocabulary[name] for name in names]

    any_id = st.integers(0, len(tokenizer) - 1)
    text = st.text(st.sampled_from(SAMPLE), max_size=6).map(spelled)
    pieces = st.lists(st.one_of(st.lists(any_id, max_size=5), text), max_size=8)
    return tokenizer, [i for piece in draw(pieces) for i in piece]


def streamed(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> list[str]:
    stream = Detokenizer(tokenizer)
    return [stream.push(i) for i in ids]


# ---- tokens to text ----


@given(token_lists())
@settings(max_examples=150)
def test_what_is_given_out_is_never_taken_back(case) -> None:
    """After every token the pieces so far begin the text so far, whatever the tokens are."""
    tokenizer, ids = case
    pieces = streamed(tokenizer, ids)
    for count in range(len(ids) + 1):
        assert decode(ids[:count], tokenizer).startswith("".join(pieces[:count]))
    whole, given = decode(ids, tokenizer), "".join(pieces)
    run = 0  # bare bytes at the end, which are not settled
    content = [i for i in ids if i not in (tokenizer.eos_token_id, tokenizer.pad_token_id)]
    while run < len(content) and tokenizer.convert_ids_to_tokens(content[-1 - run]).startswith("<0x"):
        run += 1
    assert given == whole or whole.endswith(REPLACEMENT) or run


@pytest.mark.parametrize("text", [SAMPLE, "🙂" * 40, "a" * 100 + "東京" * 20])
def test_whole_characters_leave_as_soon_as_they_are_whole(text: str) -> None:
    tokenizer = byte_level()
    ids = [tokenizer.get_vocab()[bytes_to_unicode()[byte]] for byte in text.encode()]
    assert [piece for piece in streamed(tokenizer, ids) if piece] == list(text)


def test_a_run_of_bare_bytes_is_read_as_one() -> None:
    """Sentencepiece drops a whole run that is not valid, so the smiley must wait until the run is over."""
    tokenizer = byte_fallback()
    vocabulary = tokenizer.get_vocab()
    smiley = [vocabulary[f"<0x{byte:02X}>"] for byte in "🙂".encode()]
    assert streamed(tokenizer, [vocabulary["▁the"], *smiley, vocabulary["the"]])[-1] == "🙂the"
    broken = [vocabulary["▁the"], *smiley, smiley[0], vocabulary["the"]]
    assert "".join(streamed(tokenizer, broken)) == decode(broken, tokenizer) == "the" + 5 * REPLACEMENT + "the"


@pytest.mark.parametrize("name", ["▁the", "▁", "▁▁"])
def test_no_space_is_lost_in_a_long_reply(name: str) -> None:
    """These decoders take one space away at the start of what they are given, and only there."""
    tokenizer = byte_fallback()
    ids = [tokenizer.get_vocab()[name]] * 100
    assert "".join(streamed(tokenizer, ids)) == decode(ids, tokenizer)


def test_ends_show_only_where_the_reply_goes_on() -> None:
    tokenizer = byte_level()
    end, a, b = tokenizer.eos_token_id, tokenizer.get_vocab()["a"], tokenizer.get_vocab()["b"]
    assert streamed(tokenizer, [a, end, b, end, end]) == ["a", "", "<|end|>b", "", ""]
    stream = Detokenizer(tokenizer, ends=[b])
    assert [stream.push(i) for i in (a, b)] == ["a", ""]


# ---- stop strings ----


def as_the_engine_stops(
    tokenizer: PreTrainedTokenizerFast, ids: Sequence[int], *, stop: Sequence[str]
) -> tuple[list[int], str]:
    """Token by token: the first text that contains a stop string ends there, cut before its first one."""
    for count in range(1, len(ids) + 1):
        text = decode(ids[:count], tokenizer)
        found = [text.find(one) for one in stop if one in text]
        if found:
            return list(ids[:count]), text[: min(found)]
    return list(ids), decode(ids, tokenizer)


STOPS = st.lists(
    st.one_of(
        st.text(st.sampled_from(SAMPLE), min_size=1, max_size=5), st.sampled_from(["STOP", REPLACEMENT, "<|end"])
    ),
    min_size=1,
    max_size=4,
)


@given(token_lists(), STOPS)
@settings(max_examples=150)
def test_a_stream_joins_to_the_text_and_never_shows_a_stop_string(case, stop) -> None:
    tokenizer, ids = case
    ids, text = as_the_engine_stops(tokenizer, ids, stop=stop)
    stream = TextStream(tokenizer, SamplingParams(stop=tuple(stop)))
    pieces = [stream.push(i) for i in ids]
    assert text.startswith("".join(pieces))
    assert "".join(pieces) + stream.finish(text) == text


@given(token_lists(), STOPS, st.integers(0, 6), st.booleans())
@settings(max_examples=150)
def test_a_stream_stops_where_the_engine_does_when_it_may(case, stop, least: int, kept: bool) -> None:
    """A stop string within the first `min_tokens` tokens ends nothing."""
    tokenizer, ids = case
    params = SamplingParams(stop=tuple(stop), min_tokens=least, include_stop=kept)
    texts = ((count, stopped_text(ids[:count], params, tokenizer)) for count in range(1, len(ids) + 1))
    count, text = next((each for each in texts if each[1] is not None), (len(ids), decode(ids, tokenizer)))
    stream = TextStream(tokenizer, params)
    said = "".join(map(stream.push, ids[:count]))
    assert text.startswith(said) and said + stream.finish(text) == text


def test_a_stop_string_that_came_too_early_gives_nothing_out() -> None:
    tokenizer = byte_level()
    stream = TextStream(tokenizer, SamplingParams(stop=("l", "alxy"), min_tokens=3))
    assert "".join(stream.push(tokenizer.get_vocab()[letter]) for letter in "halxy") == "h"


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    tokenizer = byte_level()
    letters = [tokenizer.get_vocab()[letter] for letter in "tSTaSTO1STOP"]
    stream = TextStream(tokenizer, SamplingParams(stop=("STOP", "OP!")))
    assert [stream.push(i) for i in letters] == ["t", "", "", "STa", "", "", "", "STO1", "", "", "", ""]
    assert stream.finish("tSTaSTO1") == ""


def test_a_stop_id_is_not_text() -> None:
    tokenizer = byte_level()
    a, b = (tokenizer.get_vocab()[letter] for letter in "ab")
    stream = TextStream(tokenizer, SamplingParams(stop_ids=(b,)))
    assert [stream.push(a), stream.push(b), stream.finish("a")] == ["a", "", ""]


@given(st.text("ab", max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_beginning_length_is_the_longest_end_that_begins_a_wanted_text(text, wanted) -> None:
    ends = [n for n in range(len(text) + 1) if any(w.startswith(text[len(text) - n :]) and len(w) > n for w in wanted)]
    assert beginning_length(text, wanted) == max(ends, default=0)


# ---- single tokens ----


def test_the_bytes_of_tokens_join_to_the_text(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "The answer is 12é東🙂\n<think>"
    for one, ids in ((tokenizer, tokenizer.encode(text)), (byte_level(), None)):
        ids = ids or [one.get_vocab()[bytes_to_unicode()[byte]] for byte in text.encode()]
        assert b"".join(token_text(i, one)[1] for i in ids) == text.encode()
    assert token_text(tokenizer.encode("é")[0], tokenizer)[0] in (REPLACEMENT, "é")


def test_every_byte_has_its_letter() -> None:
    vocabulary = byte_level().get_vocab()
    assert {byte: token_text(vocabulary[letter], byte_level())[1] for byte, letter in bytes_to_unicode().items()} == {
        byte: bytes([byte]) for byte in range(256)
    }


def test_a_token_keeps_the_space_in_front_of_it_and_a_bare_byte_is_itself() -> None:
    vocabulary = byte_fallback().get_vocab()
    assert token_text(vocabulary["▁the"], byte_fallback()) == (" the", b" the")
    assert token_text(vocabulary["<0xE2>"], byte_fallback()) == (REPLACEMENT, b"\xe2")


# ---- thoughts and calls ----


def joined(parts: Sequence[ReplyPart]) -> tuple[str, str, list[tuple[str, str]]]:
    text = {kind: "".join(part.text for part in parts if part.kind == kind) for kind in ("reasoning", "content")}
    return text["reasoning"], text["content"], [(p.name, p.arguments) for p in parts if p.kind == "tool_call"]


def parser_of(*, calls: ReplyFormat | None = None, thinks: bool = False, tools: Sequence[Any] = ()) -> ReplyParser:
    return (calls or FORMATS["hermes"]).parser(thinks=thinks, calls=calls is not None, tools=tools)


def parsed(pieces: Sequence[str], **options: Any) -> tuple[str, str, list[tuple[str, str]]]:
    parser = parser_of(**options)
    parts = [part for piece in pieces for part in parser.push(piece)]
    assert all(part.text or part.kind == "tool_call" for part in parts)
    return joined([*parts, *parser.finish()])


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
FRAGMENTS = {
    None: [CALL],
    FORMATS["hermes"]: ["<tool_call>", "</tool_call>", CALL, '{"name": "x"}'],
    FORMATS["qwen_xml"]: [
        "<tool_call>",
        "<function=f>",
        "<parameter=x>",
        "</parameter>",
        "</function>",
        "</tool_call>",
    ],
    FORMATS["llama"]: ["<|python_tag|>", '{"name": "f", "parameters": {}}', ";", "{", "}", '{"a": 1}', "0"],
    FORMATS["mistral"]: [
        "[TOOL_CALLS]",
        '[{"name": "f"}]',
        "[",
        "]",
        ",",
        "0",
        '{"name": "g", "arguments": {"x": 1}}',
    ],
    FORMATS["mistral_args"]: [
        "[TOOL_CALLS]",
        "f",
        "[ARGS]",
        "{}",
        '[CALL_ID]0[ARGS]{"x": 1}',
        "[TOOL_CALLS]f[ARGS]{}",
    ],
    FORMATS["glm"]: ["<tool_call>f", "</tool_call>", "<arg_key>x</arg_key>", "<arg_value>", "</arg_value>"],
    FORMATS["minimax"]: [
        "<minimax:tool_call>",
        '<invoke name="f">',
        '<parameter name="x">',
        "</parameter>",
        "</invoke>",
        "</minimax:tool_call>",
    ],
    FORMATS["kimi"]: [
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>",
        '{"x": 1}',
        '{"x": "<|tool_call_end|>',
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ],
    FORMATS["deepseek_v3"]: [
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n",
        '{"x": 1}',
        '{"x": "',
        "\n```",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ],
    FORMATS["deepseek_v31"]: [
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>",
        "{}",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ],
    FORMATS["lfm2"]: ["<|tool_call_start|>[", "f(", "x=", "'", "1", ", ", ")", "]", "<|tool_call_end|>", "[1, 'a']"],
    FORMATS["gemma4"]: [
        "<|tool_call>call:f",
        "{",
        "x:",
        '<|"|>',
        "1",
        ",",
        "}",
        "<tool_call|>",
        "<|channel>thought\n",
        "<channel|>",
    ],
    FORMATS["harmony"]: [
        "<|channel|>analysis<|message|>",
        "<|channel|>final<|message|>",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
        '{"x": "<|call|>"}',
        "{",
        "<|end|>",
        "<|call|>",
        "<|start|>assistant",
    ],
}
COMMON = ["<think>", "</think>", " ", "\n", "a", "b c", "<", "</t"]


@st.composite
def replies(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    form = draw(st.sampled_from(list(FRAGMENTS)))
    fragments = draw(st.lists(st.sampled_from([*FRAGMENTS[form], *COMMON]), max_size=8))
    return "".join(fragments), {"calls": form, "thinks": draw(st.booleans())}


@given(replies(), st.data())
@example((f"a\n<tool_call>{CALL}", {"calls": FORMATS["hermes"]}), None)
@settings(max_examples=200)
def test_a_reply_is_split_alike_however_it_is_cut(reply, data) -> None:
    text, options = reply
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text))))) if data else range(len(text))
    edges = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    whole = parsed([text], **options)
    assert parsed(pieces, **options) == whole
    assert parsed(list(text), **options) == whole


@given(replies())
@settings(max_examples=150)
def test_a_split_reply_is_what_is_made_of_the_whole(reply) -> None:
    text, options = reply
    assume(options["calls"])
    _, content, calls = parsed([text], **options)
    whole = parse(text, options["calls"], thinking=options["thinks"])
    _, closed, said = whole.content.partition("</think>")
    apart = options["calls"].thoughts_apart
    if apart or not (options["thinks"] or text.lstrip().startswith("<think>")):
        said = whole.content
    elif not closed:
        said = ""
    assert content.strip() == said.strip()
    assert [(name, json.loads(arguments)) for name, arguments in calls] == calls_of(whole)


HERMES = {"calls": FORMATS["hermes"]}


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("  185\n", {}, ("", "  185\n", [])),
        ("<think>\n7+8=15\n</think>\n\n185", {}, ("7+8=15", "185", [])),
        ("7+8=15\n</think>\n\n185", {"thinks": True}, ("7+8=15", "185", [])),
        ("<think>\nnever ends ", {}, ("never ends", "", [])),
        ("a</think>b", {}, ("", "a</think>b", [])),
        ("one <think>two</think>", {}, ("", "one <think>two</think>", [])),
        (CALL, {}, ("", CALL, [])),
        (f"Wait.\n{CALL}\n{CALL}\n", HERMES, ("", "Wait.", [("add", '{"a": 1}')] * 2)),
        (f"<think>{CALL}</think>{CALL}", HERMES, (CALL, "", [("add", '{"a": 1}')])),
        ("a <tool_call>not JSON</tool_call> b", HERMES, ("", "a <tool_call>not JSON</tool_call> b", [])),
        ("a <tool_call>{}", HERMES, ("", "a <tool_call>{}", [])),
    ],
)
def test_examples(text: str, options: dict[str, Any], expected: tuple) -> None:
    assert parsed([text], **options) == parsed(list(text), **options) == expected


def test_nothing_of_a_call_is_given_out_before_it_is_whole() -> None:
    parser = parser_of(**HERMES)
    text = f"Let me see. {CALL}"
    pieces = [parser.push(letter) for letter in text]
    assert joined([part for piece in pieces[:-1] for part in piece]) == ("", "Let me see.", [])
    assert pieces[-1] == [ReplyPart("tool_call", name="add", arguments='{"a": 1}')]


def test_arguments_are_json_text_in_their_own_letters() -> None:
    (part,) = parser_of(**HERMES).push('<tool_call>{"name": "say", "arguments": {"text": "caf\\u00e9"}}</tool_call>')
    assert part == ReplyPart("tool_call", name="say", arguments='{"text": "café"}')


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (FORMATS["llama"], '{"name": "f", "parameters": {"x": 1}}', ("", "", [("f", '{"x": 1}')])),
        (FORMATS["llama"], ' {"age": 12}\n', ("", ' {"age": 12}\n', [])),
        (
            FORMATS["llama"],
            'So: <|python_tag|>{"name": "f"}; {"name": "g"}',
            ("", "So:", [("f", "{}"), ("g", "{}")]),
        ),
        (FORMATS["mistral"], 'Hm.\n[TOOL_CALLS] [{"name": "f"}]', ("", "Hm.", [("f", "{}")])),
        (
            FORMATS["mistral_args"],
            "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{}",
            ("", "", [("f", "{}"), ("g", "{}")]),
        ),
        (
            FORMATS["qwen_xml"],
            "<think>\nx\n</think>\n\n<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
            ("x", "", [("f", '{"x": 1}')]),
        ),
    ],
)
def test_other_formats(form: ReplyFormat, text: str, expected: tuple) -> None:
    assert parsed([text], calls=form) == parsed(list(text), calls=form) == expected


def test_definitions_say_what_is_a_string() -> None:
    text = "<tool_call><function=f><parameter=x>1</parameter></function></tool_call>"
    schema = {"type": "object", "properties": {"x": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    assert parsed([text], calls=FORMATS["qwen_xml"], tools=tools)[2] == [("f", '{"x": "1"}')]
