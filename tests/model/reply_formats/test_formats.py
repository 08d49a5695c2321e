"""What single formats read that their templates do not write, what they say of what cannot be read, and what they make
of earlier messages."""

from __future__ import annotations

import json
from typing import Any

import pytest

from calls import calls_of
from groupwise.errors import GrammarError
from groupwise.model.reply_formats import harmony
from groupwise.model.reply_formats.format import MalformedCall, ParsedCall, ReplyFormat
from groupwise.model.reply_formats.json_text import types_of
from groupwise.model.reply_formats.known import FORMATS, format_of, shown_format
from groupwise.tasks.structured import reply_grammar
from groupwise.tasks.tool_calls import parse
from template_families import tokenizer_of
from wording import raises, wording

THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
FINAL, SAID = "<|channel|>final<|message|>", "<|channel|>commentary<|message|>"
KIMI, KIMI_END, OPENS = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_argument_begin|>"
KIMI_CALL = f"<|tool_call_begin|>functions.{{}}:0{OPENS}{{}}<|tool_call_end|>"
CALLS, CALL, SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
END, CALLS_END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        ("glm", "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>", [("f", {"x": 1})]),
        ("glm", "<tool_call>f</tool_call>", [("f", {})]),
        (
            "glm",
            "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>a </tool_call> b</arg_value>\n</tool_call>",
            [("f", {"s": "a </tool_call> b"})],
        ),
        ("lfm2", "<|tool_call_start|>[f(x=[1, 'a, b'], y=true, z=None)]<|tool_call_end|>",
         [("f", {"x": [1, "a, b"], "y": True, "z": None})]),
        ("lfm2", """<|tool_call_start|>[ns.f(s='it's', t="a\\"b"), g-2()]<|tool_call_end|>""",
         [("ns.f", {"s": "it's", "t": 'a"b'}), ("g-2", {})]),
        ("lfm2", r"<|tool_call_start|>[f(s='\u00e9\ud83d\ude42\n', o={'k': -1.5e3})]<|tool_call_end|>",
         [("f", {"s": "é🙂\n", "o": {"k": -1500.0}})]),
        ("lfm2", "<|tool_call_start|>[f(s=')]<|tool_call_end|>')]<|tool_call_end|>",
         [("f", {"s": ")]<|tool_call_end|>"})]),
        ("gemma4", '<|tool_call>call:f{ x: 1, o: {<|"|>a b<|"|>: [true, null]} }<tool_call|>',
         [("f", {"x": 1, "o": {"a b": [True, None]}})]),
        ("gemma4", '<|tool_call>call:f{s:<|"|>}<tool_call|><|"|>}<tool_call|>', [("f", {"s": "}<tool_call|>"})]),
        ("kimi", f"{KIMI} <|tool_call_begin|> f:3 {OPENS} {{}} <|tool_call_end|>",
         [("f", {})]),
        ("deepseek_v3", f"{CALLS}{CALL}function{SEP}f\n```json\n{{}}\n```{END}",
         [("f", {})]),
        ("harmony", ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>', [("f", {"x": 1})]),
        ("harmony", THOUGHT + TO_F + '{"s": "<|call|>"}<|call|>',
         [("f", {"s": "<|call|>"})]),
    ],
)  # fmt: skip
def test_what_is_read(form: str, text: str, expected: list[tuple[str, Any]]) -> None:
    reply = parse(text, FORMATS[form])
    assert (calls_of(reply), reply.malformed, reply.content) == (expected, [], "")


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("glm", "<tool_call>f\n<arg_key>x</arg_key>\nno value</tool_call>"),
        ("glm", '<tool_call>{"name": "f"}</tool_call>'),
        ("minimax", '<minimax:tool_call><invoke name="f">x=1</invoke></minimax:tool_call>'),
        ("minimax", "<minimax:tool_call>f()</minimax:tool_call>"),
        ("kimi", f"{KIMI}f{KIMI_END}"),
        ("kimi", KIMI + KIMI_CALL.format("f", "{oops") + KIMI_END),
        ("deepseek_v31", f"{CALLS}{CALL}f{SEP}{{}} more{END}{CALLS_END}"),
        ("lfm2", "<|tool_call_start|>[f(x=)]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>f(x=1)<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f(x='a"),
        ("gemma4", "<|tool_call>call:f{x 1}<tool_call|>"),
        ("gemma4", '<|tool_call>call:f{s:<|"|>a}<tool_call|>'),
        ("gemma4", "<|tool_call>f()<tool_call|>"),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>{oops<|call|>"),
        ("harmony", "<|channel|>commentary to=python<|message|>print(1)<|call|>"),
        ("harmony", TO_F),
        ("glm", "<tool_call>f<arg_key>a</arg_key>b</arg_key><arg_value>1</arg_value></tool_call>"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_said_with_its_place_and_stays(form: str, text: str) -> None:
    reply = parse(text, FORMATS[form])
    assert not reply.calls and len(reply.malformed) == 1
    wording(reply.malformed[0].reason)
    assert reply.content == text and reply.malformed[0].text in text


def test_a_good_call_beside_a_bad_one() -> None:
    reply = parse(KIMI + KIMI_CALL.format("f", "{oops") + KIMI_CALL.format("g", "{}") + KIMI_END, FORMATS["kimi"])
    assert calls_of(reply) == [("g", {})] and len(reply.malformed) == 1


@pytest.mark.parametrize(
    ("text", "said", "thought"),
    [
        (f"{THOUGHT}{FINAL}It is 7.<|return|>", "It is 7.", "Hm."),
        (f"{SAID}I look. <|end|><|start|>assistant{FINAL}7", "I look. 7", None),
        ("It is 7.", "It is 7.", None),
        (f"{THOUGHT}{THOUGHT}{FINAL}7", "7", "Hm.Hm."),
        ("<|channel|>analysis<|message|>Never en", "", "Never en"),
    ],
)  # fmt: skip
def test_channels_are_thoughts_and_text(text: str, said: str, thought: str | None) -> None:
    reply = parse(text, FORMATS["harmony"], calls=False)
    assert (reply.content, reply.thought, reply.calls) == (said, thought, [])


def test_kimis_calls_are_numbered_through_the_conversation() -> None:
    made = [{"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": {}}}
            for i, name in enumerate("fgf")]  # fmt: skip
    shown = FORMATS["kimi"].history([
        {"role": "assistant", "content": "<think>Hm.</think>Well.", "tool_calls": made[:2]},
        {"role": "tool", "content": "1", "tool_call_id": "call_1"},
        {"role": "tool", "content": "0", "tool_call_id": "call_0"},
        {"role": "assistant", "content": "", "tool_calls": made[2:]},
    ])  # fmt: skip
    assert [call["id"] for call in shown[0]["tool_calls"]] == ["functions.f:0", "functions.g:1"]
    assert [each["tool_call_id"] for each in shown[1:3]] == ["functions.g:1", "functions.f:0"]
    assert shown[3]["tool_calls"][0]["id"] == "functions.f:2"
    assert (shown[0]["reasoning_content"], shown[0]["content"]) == ("Hm.", "Well.")


def test_harmony_shows_calls_one_by_one() -> None:
    made = [{"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": {"i": i}}} for i in range(2)]
    results = [{"role": "tool", "content": str(i), "tool_call_id": f"c{i}"} for i in (1, 0)]
    asked = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": made}
    shown = FORMATS["harmony"].history([asked, *results])
    assert [message["role"] for message in shown] == ["assistant", "tool"] * 2
    assert [message["tool_calls"] for message in shown[::2]] == [made[:1], made[1:]]
    assert [message["content"] for message in shown[1::2]] == ["0", "1"]
    assert "Hm." in shown[0]["thinking"] and "I look." in shown[0]["thinking"] and not shown[0]["content"]


def test_a_template_that_shows_no_calls_has_the_common_format() -> None:
    assert shown_format("{{ messages }}") is None and format_of("{{ messages }}") is FORMATS["hermes"]


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("gemma 4", {"pattern": "x", "type": "string"}),
        ("gemma 4", {"type": "array", "items": {"type": "string"}, "uniqueItems": True}),
        ("gemma 4", {"type": "object", "properties": {}, "minProperties": 1}),
        ("gemma 4", {}),
        ("lfm2", {"type": ["string", "null"]}),
        ("glm", {"type": "string", "format": "date"}),
        ("minimax", {"type": "string", "pattern": "x"}),
    ],
)
def test_what_cannot_be_guaranteed_is_refused(name: str, schema: dict[str, Any]) -> None:
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}},
    }
    tokenizer = tokenizer_of(name)
    with pytest.raises(GrammarError) as refused:
        reply_grammar(format_of(tokenizer), [tool], tokenizer, choice="required")
    assert refused.value.field == "tools[0].function.parameters.properties.a"


def tool_with(**definitions: Any) -> dict[str, Any]:
    """A tool whose one parameter is the definition `a`."""
    parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": definitions}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def test_a_schema_that_points_to_nothing_but_itself_is_refused() -> None:
    tokenizer = tokenizer_of("gemma 4")
    endless = tool_with(a={"$ref": "#/$defs/b"}, b={"$ref": "#/$defs/a"})
    with raises(GrammarError, field="tools[0].function.parameters.properties.a"):
        reply_grammar(format_of(tokenizer), [endless], tokenizer, choice="required")


def test_a_schema_too_deep_is_refused_and_may_say_the_same_by_references() -> None:
    tokenizer, deep = tokenizer_of("gemma 4"), {"type": "boolean"}
    definitions: dict[str, Any] = {"d0": deep}
    for i in range(70):
        deep = {"type": "object", "properties": {"a": deep}}
        definitions[f"d{i + 1}"] = {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i}"}}}
    definitions = {"a": {"$ref": "#/$defs/d70"}} | definitions
    field = "tools[0].function.parameters" + ".properties.a" * 64
    with raises(GrammarError, field=field):
        reply_grammar(format_of(tokenizer), [tool_with(a=deep)], tokenizer, choice="required")
    assert reply_grammar(format_of(tokenizer), [tool_with(**definitions)], tokenizer, choice="required") is not None


def test_what_is_pointed_to_often_is_written_once() -> None:
    """Each of 15 definitions has the next one twice, so that the last stands in 16,384 places."""
    twice = {f"d{i}": {"type": "object", "properties": {key: {"$ref": f"#/$defs/d{i + 1}"} for key in "xy"}}
             for i in range(15)}  # fmt: skip
    tool, tokenizer = tool_with(a={"$ref": "#/$defs/d0"}, **twice, d15={"type": "string"}), tokenizer_of("gemma 4")
    grammar = reply_grammar(format_of(tokenizer), [tool], tokenizer, choice="required")
    assert grammar is not None and len(grammar.source) < 5_000


def test_a_schema_of_many_alternatives_is_looked_at_once() -> None:
    """Each alternative has them all again; one by one this would not end."""
    node = {"anyOf": [{"$ref": "#/$defs/node"}] * 100 + [{"type": "integer"}]}
    schema = {"properties": {"x": node}, "$defs": {"node": node}}
    assert types_of("f", [{"function": {"name": "f", "parameters": schema}}]) == {"x": {"integer"}}


@pytest.mark.parametrize(
    ("form", "begun"),
    [("kimi", f"{KIMI}<|tool_call_begin|>"), ("kimi", f"{KIMI}<|tool_call_begin|>f"),
     ("deepseek_v3", f"{CALLS}{CALL}"), ("deepseek_v31", f"{CALLS}{CALL}f")],
)  # fmt: skip
def test_spaces_in_a_begun_call_are_read_once(form: str, begun: str) -> None:
    """Tried in every way of sharing them out, so many would not end."""
    text = f"{begun}{' ' * 20_000}x"
    assert parse(text, FORMATS[form]).content == text


@pytest.mark.parametrize("form", [form for form in FORMATS.values() if form.end], ids=str)
def test_an_open_call_is_not_read_again_for_every_piece(form: ReplyFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[int]()
    owner, name = (harmony, "json_end") if form.name == "harmony" else (type(form), "end_of")
    real = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **last: read.append(1) or real(*args, **last))
    text = form.text_of("f", {"s": f"a {form.end} b{' c' * 1000}"})
    parser = form.parser()
    parts = [part for sign in text for part in parser.push(sign)] + parser.finish()
    assert [(part.kind, part.name) for part in parts] == [("tool_call", "f")] and 0 < len(read) <= 4


def test_a_long_open_call_is_not_read_again_for_every_end_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    form, read = FORMATS["gemma4"], list[int]()
    real = type(form).end_of
    monkeypatch.setattr(type(form), "end_of", lambda *args, **last: read.append(1) or real(*args, **last))
    ends = form.end * 3_000
    text = form.text_of("f", {"l": [1] * 10_000, "s": ends})
    parser = form.parser()
    parts = [part for at in range(0, len(text), 12) for part in parser.push(text[at : at + 12])] + parser.finish()
    assert [part.call and part.call.arguments["s"] for part in parts] == [ends] and len(read) < 40


def test_an_answer_in_json_is_no_call_that_may_have_begun() -> None:
    """It is given out as it comes, where a call might have been JSON without a marker."""
    parser = FORMATS["llama"].parser()
    given = [[part.text for part in parser.push(text)] for text in ('{"na', "me", 's": ', "[1", "]}", ' {"name": "')]
    assert given == [[], [], [], ['{"names": [1'], ["]}"], [' {"name": "']]


@pytest.mark.parametrize(
    ("form", "text", "called"),
    [
        ("gemma4", '<|tool_call>call:f{<|"|>a<|"|>}<tool_call|><|tool_call>call:g{<|"|>b<|"|>:1}<tool_call|>', ["g"]),
        ("gemma4", '<|tool_call>call:f{<|"|>a}<tool_call|><|tool_call>call:g{<|"|>b<|"|>:1}<tool_call|>', ["g"]),
        ("gemma4", '<|tool_call>call:f{"a}<tool_call|><|tool_call>call:g{"b":1}<tool_call|>', ["g"]),
        ("gemma4", "<|tool_call>call:f<tool_call|>{x:1}<tool_call|>", []),
        ("kimi", KIMI + KIMI_CALL.format("f", "{oops") + KIMI_CALL.format("g", "[]") + KIMI_END, []),
        ("kimi", KIMI + KIMI_CALL.format("f", "{oops") * 2 + KIMI_CALL.format("g", "{}") + KIMI_END, ["g"]),
        ("harmony", f'{TO_F}{{"x": 1}}<|start|>assistant{FINAL}Done.', ["f"]),
        ("harmony", f'{TO_F}{{"s": "<|start|>"}}<|call|>', ["f"]),
        ("harmony", f"{TO_F}{{oops<|start|>assistant{FINAL}Done.", []),
        ("harmony", TO_F, []),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_where_a_call_ends_depends_on_no_cut(form: str, text: str, called: list[str], size: int) -> None:
    parser = FORMATS[form].parser()
    parts = [part for at in range(0, len(text), size) for part in parser.push(text[at : at + size])] + parser.finish()
    whole = parse(text, FORMATS[form])
    assert [part.name for part in parts if part.call] == [name for name, _ in calls_of(whole)] == called
    assert [part.malformed for part in parts if part.malformed] == whole.malformed
    assert "".join(part.text for part in parts).strip() == whole.content
    assert form != "harmony" or whole.content.endswith("Done." if FINAL in text else ("" if called else TO_F))


@pytest.mark.parametrize("name", ["hermes", "mistral_args", "qwen_xml", "kimi"])
def test_arguments_that_are_nested_without_end_are_no_call(name: str) -> None:
    """A model may say them, and every later turn would show them again."""
    form = FORMATS[name]
    for depth, kind in ((100, ParsedCall), (600, MalformedCall)):
        text = form.text_of("f", {"x": json.loads("[" * depth + "]" * depth)})
        (said,) = (piece for piece in form.pieces(text) if not isinstance(piece, str))
        assert isinstance(said, kind)
