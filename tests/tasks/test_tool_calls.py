"""Tool calls in replies: what real chat templates write is read back, and nothing that a model writes is an error."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from calls import calls_of
from groupwise.model.chat import encode_prompt
from groupwise.model.reply_formats.format import MalformedCall, ParsedCall, ReplyFormat
from groupwise.model.reply_formats.known import FORMATS, format_of
from groupwise.tasks.starter.tasks import supervised_conversations
from groupwise.tasks.starter.tokenizer import build_tokenizer, render
from groupwise.tasks.tool_calls import parse
from groupwise.types import Prompt

HERMES, QWEN_XML, LLAMA, MISTRAL, MISTRAL_ARGS = (
    FORMATS[name] for name in ("hermes", "qwen_xml", "llama", "mistral", "mistral_args")
)


def of_trl(name: str) -> str:
    """A model's own template, as TRL ships it."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(next(iter(spec.submodule_search_locations)))
    return (folder / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


# What Mistral's templates do with an assistant's message, before tokenizer v11 and since.
LISTED = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS] ["
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{{ '' if loop.last else ', ' }}{% endfor %}]{{ eos_token }}"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
WITH_ARGS = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' }}"
    "{{ c.function.arguments | tojson }}{% endfor %}{{ eos_token }}{% endif %}{% endfor %}"
)
WITH_IDS = WITH_ARGS.replace("'[ARGS]'", "'[CALL_ID]' + c.id + '[ARGS]'")
TEMPLATES = {
    "qwen2_5": (HERMES, of_trl("qwen2_5")),
    "qwen3": (HERMES, of_trl("qwen3")),
    "qwen3_instruct_2507": (HERMES, of_trl("qwen3_instruct_2507")),
    "qwen3_5_nothink": (QWEN_XML, of_trl("qwen3_5_nothink")),
    "nemotron_3_nano": (QWEN_XML, of_trl("nemotron_3_nano")),
    "llama3_1": (LLAMA, of_trl("llama3_1")),
    "llama3_2": (LLAMA, of_trl("llama3_2")),
    "mistral before v11": (MISTRAL, LISTED),
    "mistral v11": (MISTRAL_ARGS, WITH_IDS),
    "mistral v13": (MISTRAL_ARGS, WITH_ARGS),
}
ENDS = ("<|im_end|>\n", "<|im_end|>", "<|eot_id|>", "</s>")

# Text that no format cuts: its own markers, and in XML a line break at either end, are lost by design.
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
    lambda text: (
        not any(marker in text for marker in ("tool_call>", "parameter>", "function>")) and text == text.strip()
    )
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
NAMES = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_-]{0,12}", fullmatch=True)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=3)), min_size=1, max_size=3)


def definition(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A tool whose strings are declared to be strings."""
    declared = {key: {"type": "string"} if isinstance(value, str) else {} for key, value in arguments.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": declared}}}


def rendered(template: str, calls: list[dict[str, Any]]) -> str:
    """What the template writes for the assistant's turn, without what ends it."""
    asked = [{"role": "user", "content": "Q"}]
    said = [*asked, {"role": "assistant", "content": "", "tool_calls": calls}]
    options: dict[str, Any] = {
        "bos_token": "",
        "eos_token": "</s>",
        "date_string": "1 May 2026",
        "enable_thinking": False,
    }
    (before,), _ = render_jinja_template([asked], chat_template=template, add_generation_prompt=True, **options)
    (after,), _ = render_jinja_template([said], chat_template=template, **options)
    shared = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
    text = after[shared:]
    for end in ENDS:
        text = text.removesuffix(end)
    return text


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_is_read_off_the_template(name: str) -> None:
    form, template = TEMPLATES[name]
    assert format_of(template) is form


def test_without_a_sign_it_is_hermes() -> None:
    tokenizer = build_tokenizer([render([{"role": "user", "content": "a"}])], vocab_size=300)
    assert format_of(tokenizer) is format_of(None) is format_of("{{ messages }}") is HERMES
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": LISTED}  # type: ignore[assignment]
    assert format_of(tokenizer) is MISTRAL


@pytest.mark.parametrize("name", TEMPLATES)
@given(CALLS)
@settings(max_examples=25)
def test_what_a_template_writes_is_read_back(name: str, calls) -> None:
    form, template = TEMPLATES[name]
    calls = list(dict(calls).items())  # one schema a name
    calls = calls[:1] if name.startswith("llama") else calls  # its template refuses more
    asked = [ParsedCall(f, arguments).as_openai(form.call_id(i)) for i, (f, arguments) in enumerate(calls)]
    text = rendered(template, asked)
    parsed = parse(text, form, tools=[definition(f, arguments) for f, arguments in calls])
    assert parsed.calls == asked and not parsed.malformed
    assert parsed.content.removeprefix("<think></think>") == ""


@given(CALLS, st.sampled_from(["; ", ";", "\n", ""]), st.booleans())
def test_llama_writes_several_calls_with_semicolons(calls, between: str, tagged: bool) -> None:
    text = between.join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls)
    parsed = parse(f"{'<|python_tag|>' * tagged}{text}<|eom_id|>", LLAMA)
    assert calls_of(parsed) == calls
    assert (parsed.content, parsed.malformed) == ("", [])


MARKERS = [
    *("<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=x>", "</parameter>", "<|python_tag|>"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>", "</think>", '{"name": "f", "parameters": {}}', "<|eom_id|>"),
    *(
        '{"name": ',
        '{"type": "function"',
        "NaN",
        "1e999",
        '"\\ud800"',
        "[",
        "]",
        "{",
        "}",
        '"',
        ";",
        ":",
        ",",
        "\n",
        "9" * 5000,
        *("<arg_key>x</arg_key>", "<arg_value>", "</arg_value>"),
        *("<minimax:tool_call>", '<invoke name="f">', "</invoke>", "</minimax:tool_call>"),
        *("<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"),
        *("<|tool_call_end|>", "<|tool_calls_section_end|>", "<|tool_call_start|>", "f(x='", "')", ")"),
        *(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>f<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ),
        *("<|tool_call>", "call:f{", "x:", '<|"|>', "<tool_call|>"),
        *("<|channel|>", "commentary to=functions.f", "<|message|>", "<|end|>", "<|start|>assistant"),
    ),
]
REPLIES = st.text(max_size=40) | st.lists(st.sampled_from(MARKERS) | st.text(max_size=3), max_size=10).map("".join)


@given(REPLIES, st.sampled_from(list(FORMATS.values())), st.booleans())
@settings(max_examples=200)
def test_no_reply_is_an_error_and_nothing_of_it_is_lost(text: str, form: ReplyFormat, thinking: bool) -> None:
    parsed = parse(text, form, thinking=thinking)
    assert [call["id"] for call in parsed.calls] == [form.call_id(i) for i in range(len(parsed.calls))]
    for call in parsed.calls:
        json.dumps(call, allow_nan=False, ensure_ascii=False)
    for one in parsed.malformed:
        assert one.reason.endswith(".") and "\n" not in one.reason
    if form.name == "harmony":  # whose headers are not part of what is said
        return
    if not parsed.calls:
        said = [parsed.content] if parsed.thought is None else [parsed.thought, parsed.content]
        assert "".join(said).split() == text.split() and (len(said) == 2 or parsed.content == text.strip())
    found = list(form.pieces(text))
    said = [piece if isinstance(piece, str) else piece.text for piece in found if not isinstance(piece, ParsedCall)]
    if len(said) == len(found):
        assert "".join(said) == text
    position = 0
    for each in said:  # word for word and in order, also between calls
        position = text.index(each, position) + len(each)


def written(form: ReplyFormat, value: Any) -> str:
    """A call as a reply has it, around any JSON value."""
    text = json.dumps(value)
    around = {HERMES: f"<tool_call>{text}</tool_call>", QWEN_XML: "<tool_call><function=f></function></tool_call>"}
    return around.get(form, f"{form.start}{text}")


@pytest.mark.parametrize("form", [HERMES, QWEN_XML])
@given(st.lists(WORDS, min_size=1, max_size=4))
def test_text_between_calls_stays_as_it_is(form: ReplyFormat, said: list[str]) -> None:
    text = written(form, {"name": "f", "arguments": {}}).join(said)
    assert [piece for piece in form.pieces(text) if isinstance(piece, str)] == said


JUNK = st.none() | st.booleans() | st.integers() | st.just([]) | st.just({}) | st.just({"name": 3, "parameters": {}})


@pytest.mark.parametrize("form", [HERMES, LLAMA, MISTRAL])
@given(st.lists(JUNK, min_size=1, max_size=3), st.sampled_from(["", " ", "\n", ";", " ; "]))
def test_a_value_that_is_no_call_keeps_its_marker(form: ReplyFormat, values: list[Any], between: str) -> None:
    text = between.join(written(form, value) for value in values) + between
    parsed = parse(text, form)
    assert not parsed.calls and parsed.content == text.strip()


@pytest.mark.parametrize(
    ("form", "text", "content", "malformed"),
    [
        (LLAMA, "<|python_tag|>0", "<|python_tag|>0", ["<|python_tag|>0"]),
        (LLAMA, "<|python_tag|> 0 ; So.", "<|python_tag|> 0 ; So.", ["<|python_tag|> 0"]),
        (
            LLAMA,
            '<|python_tag|>{"name": 1}; {"name": 2};',
            '<|python_tag|>{"name": 1}; {"name": 2};',
            ['<|python_tag|>{"name": 1}', '{"name": 2}'],
        ),
        (LLAMA, '<|python_tag|>{"name": "f"}; {"name": 2};', '{"name": 2};', ['{"name": 2}']),
        (LLAMA, '<|python_tag|>0; {"name": "f"};', "0", ["0"]),
        (LLAMA, '{"name": "f", "parameters": {}}; {"name": "Ada"}', '{"name": "Ada"}', []),
        (MISTRAL, "[TOOL_CALLS] [3,  4 ]", "[TOOL_CALLS] [3,  4 ]", ["[TOOL_CALLS] [3", "4 ]"]),
        (MISTRAL, '[TOOL_CALLS] [{"name": "f"}, 3.0]', "3.0", ["3.0"]),
        (MISTRAL, '[TOOL_CALLS] [3.0, {"name": "f"}]', "3.0", ["3.0"]),
        (MISTRAL, "[TOOL_CALLS] [] So.", "[TOOL_CALLS] [] So.", ["[TOOL_CALLS] []"]),
        (MISTRAL, "[TOOL_CALLS]3 [TOOL_CALLS]4", "[TOOL_CALLS]3 [TOOL_CALLS]4", ["[TOOL_CALLS]3 ", "[TOOL_CALLS]4"]),
        (MISTRAL_ARGS, "[TOOL_CALLS]f[ARGS]3\n[TOOL_CALLS]g[ARGS]{}", "[TOOL_CALLS]f[ARGS]3", ["[TOOL_CALLS]f[ARGS]3"]),
    ],
)
def test_what_is_no_call_stays_word_for_word(form: ReplyFormat, text: str, content: str, malformed: list[str]) -> None:
    parsed = parse(text, form)
    assert (parsed.content, [each.text for each in parsed.malformed]) == (content, malformed)


@pytest.mark.parametrize("form", FORMATS.values(), ids=str)
def test_deep_nesting_is_malformed(form: ReplyFormat) -> None:
    start = form.opening("f") if form is not LLAMA else "<|python_tag|>"
    assert parse(start + "[" * 100_000 + (form.end or ""), form).malformed


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        ("4", "4", []),
        ('<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', "", [{"x": 1}]),
        (
            'Hm. <tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "f", "arguments": {"x": 2}}</tool_call> So',
            "Hm. So",
            [{}, {"x": 2}],
        ),
        ('<think>\n<tool_call>{"name": "f"}</tool_call></think>4',) * 2 + ([],),
        ('<think>a</think><tool_call>{"name": "f"}</tool_call>', "<think>a</think>", [{}]),
        ('<think><tool_call>{"name": "f"}</tool_call>',) * 2 + ([],),
    ],
)
def test_examples_of_hermes(text: str, content: str, arguments: list[dict[str, Any]]) -> None:
    parsed = parse(text)
    assert parsed.content == content
    assert [call["function"] for call in parsed.calls] == [{"name": "f", "arguments": given} for given in arguments]


def test_a_thought_that_began_in_the_prompt() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    assert not parse(f"maybe {call}", thinking=True).calls
    assert len(parse(f"maybe {call}</think>{call}", thinking=True).calls) == 1


@pytest.mark.parametrize(
    ("form", "text", "reason"),
    [
        (HERMES, '<tool_call>{"name": "f"}', "is not closed: </tool_call> is missing"),
        (HERMES, "<tool_call>{oops</tool_call>", "is not JSON: Expecting property name"),
        (HERMES, "<tool_call></tool_call>", "is not JSON"),
        (HERMES, '<tool_call>["f"]</tool_call>', "JSON of type list; it must be an object"),
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>', "has no name"),
        (HERMES, '<tool_call>{"name": ""}</tool_call>', "has no name"),
        (HERMES, '<tool_call>{"name": 3}</tool_call>', "has no name"),
        (HERMES, '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "arguments are of type str; give an object"),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "NaN is not a JSON value"),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>', "JSON cannot carry"),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>', "JSON cannot carry"),
        (HERMES, '<tool_call>{"name": "f"} and more</tool_call>', "more text follows"),
        (QWEN_XML, "<tool_call><function=f>", "is not closed"),
        (QWEN_XML, '<tool_call>{"name": "f"}</tool_call>', "is not of the form <function=NAME>"),
        (QWEN_XML, "<tool_call><function=f>x=1</function></tool_call>", "has text outside <parameter=NAME>"),
        (LLAMA, '<|python_tag|>brave_search.call(query="x")', "is not JSON"),
        (LLAMA, '{"name": "f", "parameters": {"x":', "is not JSON"),
        (LLAMA, '{"type": "function", "parameters": {}}', "has no name"),
        (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arg', "is not JSON"),
        (MISTRAL, "[TOOL_CALLS] [3]", "JSON of type int"),
        (MISTRAL_ARGS, "[TOOL_CALLS]f[ARGS]{", "is not JSON"),
        (MISTRAL_ARGS, "[TOOL_CALLS][ARGS]{}", "has no name"),
        (MISTRAL_ARGS, "[TOOL_CALLS]", "is not JSON"),
    ],
)
def test_a_malformed_call_says_why_and_stays_in_the_content(form: ReplyFormat, text: str, reason: str) -> None:
    parsed = parse(f"{text}", form)
    assert not parsed.calls and parsed.content == text
    (malformed,) = parsed.malformed
    assert reason in malformed.reason and malformed.text == text
    assert str(malformed) == f"{malformed.reason} It was: {text}"


def test_one_bad_call_does_not_spoil_the_others() -> None:
    text = '<tool_call>{oops</tool_call><tool_call>{"name": "f"}</tool_call>'
    parsed = parse(text)
    assert (len(parsed.calls), len(parsed.malformed)) == (1, 1) and parsed.calls[0]["id"] == "call_0"
    text = "[TOOL_CALLS]f[ARGS]{oops[TOOL_CALLS]g[ARGS]{}"
    parsed = parse(text, MISTRAL_ARGS)
    assert parsed.calls[0]["function"]["name"] == "g" and parsed.malformed[0].text == "[TOOL_CALLS]f[ARGS]{oops"


def test_an_answer_in_json_is_no_call() -> None:
    for text in ('{"age": 12}', '{"name": "Ada", "age": 12}', '[{"name": "f", "parameters": {}}]'):
        assert parse(text, LLAMA).content == text and not parse(text, LLAMA).malformed


def test_a_long_malformed_call_is_shown_in_part() -> None:
    assert len(str(MalformedCall("x" * 10_000, "Why."))) < 400


@pytest.mark.parametrize("form", FORMATS.values(), ids=str)
def test_a_begun_call_can_be_completed(form: ReplyFormat) -> None:
    """`parseJSON` holds what a careless replacement would replace."""
    rest = {
        "hermes": "{}}</tool_call>",
        "qwen_xml": "</function></tool_call>",
        "llama": "{}}",
        "mistral": "{}}]",
        "mistral_args": "{}",
        "glm": "</tool_call>",
        "minimax": "</invoke>\n</minimax:tool_call>",
        "kimi": "{}<|tool_call_end|><|tool_calls_section_end|>",
        "deepseek_v3": "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "deepseek_v31": "{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "lfm2": ")]<|tool_call_end|>",
        "gemma4": "}<tool_call|>",
        "harmony": "{}<|call|>",
    }
    (call,) = parse(form.opening("parseJSON") + rest[form.name], form).calls
    assert call["function"] == {"name": "parseJSON", "arguments": {}}
    assert form.opening("parseJSON").startswith(form.opening()[:8])


def test_ids_are_what_mistrals_templates_take() -> None:
    for form in (MISTRAL, MISTRAL_ARGS):
        for made in (form.call_id(12), form.random_id()):
            assert len(made) == 9 and made.isalnum()
    assert HERMES.random_id() != HERMES.random_id()


def test_the_starters_calls_are_read() -> None:
    """What its template writes, tokenised and decoded."""
    conversations = supervised_conversations(0, 300)
    tokenizer = build_tokenizer((render(c["messages"], tools=c["tools"]) for c in conversations), vocab_size=700)
    found = 0
    for conversation in conversations:
        messages = conversation["messages"]
        at = next((i for i, message in enumerate(messages) if message.get("tool_calls")), None)
        if at is None:
            continue
        before = encode_prompt(Prompt(id="0", messages=tuple(messages[:at])), tokenizer).token_ids
        whole = encode_prompt(Prompt(id="1", messages=tuple(messages[: at + 2])), tokenizer).token_ids
        text = str(tokenizer.decode(list(whole[len(before) :]))).partition("<|im_end|>")[0]
        (call,) = parse(text, format_of(tokenizer)).calls
        assert call["function"] == messages[at]["tool_calls"][0]["function"]
        found += 1
    assert found > 5
