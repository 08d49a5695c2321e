"""Tool calls in the text of a reply, in the formats in which models write them.

    hermes        <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>        Hermes, Qwen 2.5 and 3, the starter
    qwen_xml      <tool_call><function=f><parameter=x>1</parameter></function></tool_call>         Qwen3-Coder, Qwen 3.5
    llama         <|python_tag|>{"name": "f", "parameters": {"x": 1}}, or only the JSON; several with ";"  Llama 3.1-3.3
    mistral       [TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}]                Mistral's tokenizers before v11
    mistral_args  [TOOL_CALLS]f[ARGS]{"x": 1}, a marker for each call                ... and since

`format_of` reads a model's format off its chat template; `parse` splits a reply. <|python_tag|> and Mistral's markers
are special tokens, which `chat.decode` keeps; the others are text, or tokens that are not special. A marker inside a
JSON string or an XML parameter closes nothing: a call ends where its JSON, or its </function>, has ended, and at its
first </tool_call> where neither can be read. A call that was begun and cannot be used is no error here: it is
`malformed`, with a reason that can be sent back to the model, and its text stays in the content.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from groupwise.model.chat import THINK_END, THINK_START

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
LONGEST_SHOWN = 300  # characters of a malformed call that its report repeats

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|\Z)", re.DOTALL)
MOST_ENDS = 64  # markers that are tried as the end of one XML call
_BARE_CALL = r'\A\s*(?=\{\s*"(?:name"\s*:|type"\s*:\s*"function"))'
_BETWEEN = re.compile(r"(?:[\s;]|<\|eom_id\|>)*")
_NAME = re.compile(r"([^\[\]{}]*)(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*")
_PYTHON = {"True": True, "False": False, "None": None}  # some XML templates write these so
_SPACE = re.compile(r"\s*")


class ToolCallFormat(StrEnum):
    """How a model writes its calls."""

    HERMES = "hermes"
    QWEN_XML = "qwen_xml"
    LLAMA = "llama"
    MISTRAL = "mistral"
    MISTRAL_ARGS = "mistral_args"

    @property
    def start(self) -> str:
        """The marker with which a call begins (Llama's may also be JSON alone, as the whole reply)."""
        return _GRAMMARS[self].start

    @property
    def end(self) -> str | None:
        """The marker that closes a call; None where calls go on until the reply ends."""
        return _GRAMMARS[self].end

    def end_of(self, text: str, start: int, *, last: bool) -> int:
        """Return where the marker begins that closes the call whose own marker begins at `start`; -1 where it is not
        there yet, or there is none. `last`: no more text comes."""
        grammar = _GRAMMARS[self]
        return -1 if grammar.end_of is None else grammar.end_of(text, start + len(grammar.start), last=last)

    def opening(self, name: str | None = None) -> str:
        """Return the beginning of a call, of the tool `name` if given; the model completes it.

        >>> ToolCallFormat.LLAMA.opening("add"), ToolCallFormat.MISTRAL_ARGS.opening()
        ('{"name": "add", "parameters":', '[TOOL_CALLS]')
        """
        grammar = _GRAMMARS[self]
        return grammar.opening if name is None else grammar.opening_of(name)

    def call_id(self, index: int) -> str:
        """Return the id of a reply's call number `index`. Mistral's templates take nine letters and digits and nothing
        else.

        >>> ToolCallFormat.HERMES.call_id(1), ToolCallFormat.MISTRAL.call_id(1)
        ('call_1', 'call00001')
        """
        return f"call{index:05d}" if self.start == TOOL_CALLS else f"call_{index}"

    def random_id(self) -> str:
        """Return an id that no other call has, whatever the conversation."""
        return secrets.token_hex(5)[:9] if self.start == TOOL_CALLS else f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True)
class ParsedCall:
    """One call: a tool's name, and its arguments as a JSON object."""

    name: str
    arguments: dict[str, Any]

    def as_openai(self, call_id: str) -> dict[str, Any]:
        """Return it as messages carry it, `arguments` as the object that chat templates want."""
        return {"id": call_id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class MalformedCall:
    """A call that was begun and cannot be used: its `text`, and why, in one sentence. `str` tells the model both."""

    text: str
    reason: str

    def __str__(self) -> str:
        shown = self.text if len(self.text) <= LONGEST_SHOWN else f"{self.text[:LONGEST_SHOWN]}..."
        return f"{self.reason} It was: {shown.strip()}"


@dataclass(frozen=True)
class ParsedReply:
    """`content` is the reply without its calls (thoughts and malformed calls stay), `calls` are in OpenAI's form."""

    content: str
    calls: list[dict[str, Any]] = field(default_factory=list)
    malformed: list[MalformedCall] = field(default_factory=list)


def format_of(source: PreTrainedTokenizerBase | str | None) -> ToolCallFormat:
    """Return the format that a chat template writes calls in, given itself or with its tokenizer; Hermes where it shows
    none.

    >>> format_of("{{ '[TOOL_CALLS]' + tool.name + '[ARGS]' + tool.arguments }}").value
    'mistral_args'
    """
    return shown_format(source) or ToolCallFormat.HERMES


def shown_format(source: PreTrainedTokenizerBase | str | None) -> ToolCallFormat | None:
    """Return the format that a chat template shows; None where it shows none of these, and so another one or none at
    all."""
    template = source if source is None or isinstance(source, str) else source.chat_template
    if isinstance(template, Mapping):  # several by name
        template = template.get("tool_use") or template.get("default")
    if "<arg_key>" in (template or ""):  # GLM 4.5's XML, between Hermes' tags
        return None
    signs = (
        (ToolCallFormat.QWEN_XML, "<function="),
        (ToolCallFormat.HERMES, CALL_START),
        (ToolCallFormat.MISTRAL_ARGS, ARGS),
        (ToolCallFormat.MISTRAL, TOOL_CALLS),
        (ToolCallFormat.LLAMA, PYTHON_TAG),
        (ToolCallFormat.LLAMA, '"parameters": '),
    )
    return next((form for form, sign in signs if sign in (template or "")), None)


def parse(
    text: str,
    form: ToolCallFormat = ToolCallFormat.HERMES,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    thinking: bool = False,
) -> ParsedReply:
    """Split a whole reply. Never raises.

    Args:
        tools: the definitions that were offered. The XML format writes strings and numbers alike; their schemas say
            which is which, and without one what reads as JSON is JSON.
        thinking: whether the prompt ends inside a <think> block, so that the reply begins in it. Calls in thoughts are
            thoughts.

    >>> parse('Wait. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    ParsedReply(content='Wait.', calls=[{'id': 'call_0', 'type': 'function', 'function': {'name': 'add', \
'arguments': {'a': 1}}}], malformed=[])
    >>> str(parse('<tool_call>{"name": "add"').malformed[0])
    'The call is not closed: </tool_call> is missing. It was: <tool_call>{"name": "add"'
    """
    content, reply = "", text
    if thinking or text.lstrip().startswith(THINK_START):
        thought, closed, reply = text.partition(THINK_END)
        content = thought + closed
    calls: list[dict[str, Any]] = []
    malformed: list[MalformedCall] = []
    for piece in pieces(reply, form, tools=tools):
        if isinstance(piece, ParsedCall):
            content = content.rstrip()
            calls.append(piece.as_openai(form.call_id(len(calls))))
            continue
        if isinstance(piece, MalformedCall):
            malformed.append(piece)
        content += piece if isinstance(piece, str) else piece.text
    return ParsedReply(content.strip(), calls, malformed)


def pieces(
    text: str, form: ToolCallFormat, *, tools: Sequence[Mapping[str, Any]] = ()
) -> Iterator[str | ParsedCall | MalformedCall]:
    """Yield a reply without thoughts, piece by piece: what is said, calls, and calls that cannot be used. Where there
    is no `ParsedCall`, the pieces' texts are the reply; markers and separators are left out only beside a call that
    they belong to."""
    grammar, position = _GRAMMARS[form], 0
    while (begin := grammar.begin.search(text, position)) is not None:
        yield text[position : begin.start()]
        found, position = grammar.read(text, begin, tools)
        yield from _in_full(text, begin.start(), found, position)
    yield text[position:]


@dataclass(frozen=True)
class _Span:
    """What was read from text[start:end]: a call, the reason why it is none (a str), or None for text that began like
    one."""

    what: ParsedCall | str | None
    start: int
    end: int

    def piece(self, text: str, start: int, end: int) -> str | ParsedCall | MalformedCall:
        if isinstance(self.what, ParsedCall):
            return self.what
        return text[start:end] if self.what is None else MalformedCall(text[start:end], self.what)


def _in_full(text: str, start: int, spans: list[_Span], end: int) -> Iterator[str | ParsedCall | MalformedCall]:
    """Yield the spans of text[start:end] as pieces. What lies around them is a call's own syntax and goes with it; with
    no call there, it stays: at either end as part of the malformed call, in between as text."""
    called = any(isinstance(span.what, ParsedCall) for span in spans)
    for i, span in enumerate(spans):
        before = spans[i - 1] if i else None
        if before is not None and not isinstance(before.what, ParsedCall) and not isinstance(span.what, ParsedCall):
            yield text[before.end : span.start]
        first, last = before is None and not called, i == len(spans) - 1 and not called
        yield span.piece(text, start if first else span.start, end if last else span.end)


# ---- one reader a format: the text and where a call begins in it -> what was found, and where it ends ----
Found = list[_Span]


def _read_hermes(text: str, begin: re.Match[str], _: Sequence[Mapping[str, Any]]) -> tuple[Found, int]:
    inside, end = _enclosed(text, begin, json_end)
    if inside is None:
        return [_Span(_NOT_CLOSED, begin.start(), end)], end
    value, stop = _json(inside)
    if isinstance(value, ValueError):
        what = f"The call is not JSON: {value}."
    elif inside[stop:].strip():
        what = f"The call's JSON ends at character {stop} and more text follows."
    else:
        what = _call(value)
    return [_Span(what, begin.start(), end)], end


def _read_xml(text: str, begin: re.Match[str], tools: Sequence[Mapping[str, Any]]) -> tuple[Found, int]:
    inside, end = _enclosed(text, begin, xml_end)
    what = _NOT_CLOSED if inside is None else _xml_call(inside, tools)
    return [_Span(what, begin.start(), end)], end


def _xml_call(inside: str, tools: Sequence[Mapping[str, Any]]) -> ParsedCall | str:
    function = _FUNCTION.fullmatch(inside)
    if function is None:
        return "The call is not of the form <function=NAME> ... </function>."
    name, body, position = function[1].strip(), function[2], 0
    arguments, types = {}, _types(name, tools)
    while (parameter := _PARAMETER.match(body, position)) is not None:
        key = parameter[1].strip()
        if parameter[2].strip() or "string" in (types.get(key) or {"string"}):
            arguments[key] = _typed(parameter[2], types.get(key))  # nothing is no number: it is left out
        position = parameter.end()
    if body[position:].strip():
        return "The call has text outside <parameter=NAME> ... </parameter>."
    return _call({"name": name, "arguments": arguments})


def _read_llama(text: str, begin: re.Match[str], _: Sequence[Mapping[str, Any]]) -> tuple[Found, int]:
    found, end, bare = Found(), begin.end(), not begin[0].endswith(PYTHON_TAG)
    while True:
        start = _end(_BETWEEN, text, end)
        if not text.startswith("{", start) and found:
            return found, start if isinstance(found[-1].what, ParsedCall) else end
        value, end = _json(text, start)
        if isinstance(value, ValueError):
            return [*found, _Span(f"The call is not JSON: {value}.", start, len(text))], len(text)
        if bare and not (isinstance(value, dict) and value.keys() & {"parameters", "arguments"}):
            return [*found, _Span(None, start, end)], end  # an answer that is JSON
        found.append(_Span(_call(value), start, end))


def _read_mistral(text: str, begin: re.Match[str], _: Sequence[Mapping[str, Any]]) -> tuple[Found, int]:
    start = _end(_SPACE, text, begin.end())
    name = None
    if text[start : start + 1] not in ("[", "{") or text.startswith((ARGS, CALL_ID), start):
        named = _NAME.match(text, start)
        name, start = (named[1].strip(), named.end()) if named else ("", start)
    value, end = _json(text, start)
    if isinstance(value, ValueError):
        following = text.find(TOOL_CALLS, begin.end())
        end = len(text) if following < 0 else following
        return [_Span(f"The call is not JSON: {value}.", begin.start(), end)], end
    if name is not None:
        found = [_Span(_call({"name": name, "arguments": value}), start, end)]
    elif isinstance(value, list):
        found = _listed(text, start) or [_Span("The list of calls is empty.", start, end)]
    else:
        found = [_Span(_call(value), start, end)]
    after = _end(_SPACE, text, end)
    called = any(isinstance(span.what, ParsedCall) for span in found)
    return found, after if called and text.startswith(TOOL_CALLS, after) else end


def _listed(text: str, start: int) -> Found:
    """Return the entries of a JSON array that has been read once."""
    found, position = Found(), _end(_SPACE, text, start)
    while text[position] != "]":
        position = _end(_SPACE, text, position + 1)  # behind "[" or ","
        if text[position] != "]":
            value, end = _json(text, position)
            found.append(_Span(_call(value), position, end))
            position = _end(_SPACE, text, end)
    return found


# ---- what the readers share ----
_NOT_CLOSED = f"The call is not closed: {CALL_END} is missing."


def json_end(text: str, start: int, *, last: bool) -> int:
    """Return where the </tool_call> of a call in JSON begins, whose <tool_call> ends at `start`; -1 where it is not
    there, or more text may show that what is there is part of a string. `last`: no more text comes."""
    try:
        return text.find(CALL_END, _DECODER.raw_decode(text, _end(_SPACE, text, start))[1])
    except json.JSONDecodeError as error:
        in_string = error.msg.startswith("Unterminated string")
        read = len(text) if in_string else error.pos  # every mark before it is in a string
    except (RecursionError, ValueError):
        read = start
    close = text.find(CALL_END, max(read, start))
    return text.find(CALL_END, start) if close < 0 and last else close


def xml_end(text: str, start: int, *, last: bool) -> int:
    """Return the same of a call in XML: the first </tool_call> behind a </function>, if it is a call of that form."""
    first = close = text.find(CALL_END, start)
    if first < 0 or not text[start:first].lstrip().startswith("<function="):
        return first
    for _ in range(MOST_ENDS):
        if close < 0 or text[start:close].rstrip().endswith("</function>"):
            break
        close = text.find(CALL_END, close + 1)
    return first if close < 0 and last else close


def _enclosed(text: str, begin: re.Match[str], end_of: Callable[..., int]) -> tuple[str | None, int]:
    """Return what stands between a <tool_call> and its end (None without one), and where the whole of it ends."""
    close = end_of(text, begin.end(), last=True)
    if close < 0:
        return None, len(text)
    return text[begin.end() : close], close + len(CALL_END)


def _call(value: Any) -> ParsedCall | str:
    """Return the call in a decoded {"name": ..., "arguments" or "parameters": {...}}, or why there is none."""
    if not isinstance(value, dict):
        return f"The call is JSON of type {type(value).__name__}; it must be an object."
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or not name:
        return "The call has no name."
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        return f"The call's arguments are of type {type(arguments).__name__}; give an object."
    try:
        f"{name}{json.dumps(arguments, ensure_ascii=False, allow_nan=False)}".encode()
    except (ValueError, RecursionError):  # a number without bounds, or half a surrogate pair
        return "The call has numbers or characters that JSON cannot carry."
    return ParsedCall(name, arguments)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _json(text: str, position: int = 0) -> tuple[Any, int]:
    """Return the JSON value at `position` and where it ends; instead of the value a ValueError that says what is
    wrong."""
    try:
        return _DECODER.raw_decode(text, _end(_SPACE, text, position))
    except json.JSONDecodeError as error:
        return ValueError(f"{error.msg} at its character {error.pos - position}"), position
    except RecursionError:
        return ValueError("it is nested too deeply"), position
    except ValueError as error:
        return ValueError(str(error).partition(";")[0]), position


def _end(pattern: re.Pattern[str], text: str, position: int) -> int:
    match = pattern.match(text, position)
    return match.end() if match else position


def _types(name: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, set[str]]:
    """Return the JSON types of each parameter of the tool `name`, as far as its definition tells."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            schema = function.get("parameters") or {}
            return {key: schema_types(each, schema) for key, each in (schema.get("properties") or {}).items()}
    return {}


def schema_types(schema: Any, root: Any = None, *, depth: int = 8) -> set[str]:
    """Return the JSON types that a schema declares: itself, by its values, in its alternatives, or where it points to
    in the schema `root`."""
    if not isinstance(schema, Mapping) or not depth:
        return set()
    declared = schema.get("type") or []
    types = {declared} if isinstance(declared, str) else set(declared)
    if not types:
        values = [schema["const"]] if "const" in schema else schema.get("enum") or ()
        types = {_JSON_TYPES[type(value)] for value in values if type(value) in _JSON_TYPES}
    others = [one for key in ("anyOf", "oneOf", "allOf") for one in schema.get(key) or ()]
    if isinstance(place := schema.get("$ref"), str) and place.startswith("#/"):
        found = root
        for step in place[2:].split("/"):
            found = found.get(step) if isinstance(found, Mapping) else None
        others.append(found)
    return types.union(*(schema_types(one, root, depth=depth - 1) for one in others))


_JSON_TYPES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    list: "array",
    dict: "object",
}


def _typed(text: str, types: set[str] | None) -> Any:
    """Return a parameter's text as a value of its declared types; what may be a string and is not null is one."""
    if types and "string" in types and not (text in ("null", "None") and "null" in types):
        return text
    if text in _PYTHON:
        return _PYTHON[text]
    value, end = _json(text)
    return text if isinstance(value, ValueError) or text[end:].strip() else value


@dataclass(frozen=True, kw_only=True)
class _Grammar:
    start: str
    end: str | None
    begin: re.Pattern[str]
    end_of: Callable[..., int] | None = None
    read: Callable[[str, re.Match[str], Sequence[Mapping[str, Any]]], tuple[Found, int]]
    opening: str
    opening_of: Callable[[str], str]


_TAGGED = re.compile(re.escape(CALL_START))
_LISTED = re.compile(re.escape(TOOL_CALLS))
_GRAMMARS = {
    ToolCallFormat.HERMES: _Grammar(
        start=CALL_START,
        end=CALL_END,
        begin=_TAGGED,
        end_of=json_end,
        read=_read_hermes,
        opening=CALL_START,
        opening_of=lambda name: f'{CALL_START}\n{{"name": {json.dumps(name)}, "arguments":',
    ),
    ToolCallFormat.QWEN_XML: _Grammar(
        start=CALL_START,
        end=CALL_END,
        begin=_TAGGED,
        end_of=xml_end,
        read=_read_xml,
        opening=f"{CALL_START}\n<function=",
        opening_of=lambda name: f"{CALL_START}\n<function={name}>\n",
    ),
    ToolCallFormat.LLAMA: _Grammar(
        start=PYTHON_TAG,
        end=None,
        begin=re.compile(f"{re.escape(PYTHON_TAG)}|{_BARE_CALL}"),
        read=_read_llama,
        opening='{"name": "',
        opening_of=lambda name: f'{{"name": {json.dumps(name)}, "parameters":',
    ),
    ToolCallFormat.MISTRAL: _Grammar(
        start=TOOL_CALLS,
        end=None,
        begin=_LISTED,
        read=_read_mistral,
        opening=f'{TOOL_CALLS} [{{"name": "',
        opening_of=lambda name: f'{TOOL_CALLS} [{{"name": {json.dumps(name)}, "arguments":',
    ),
    ToolCallFormat.MISTRAL_ARGS: _Grammar(
        start=TOOL_CALLS,
        end=None,
        begin=_LISTED,
        read=_read_mistral,
        opening=TOOL_CALLS,
        opening_of=lambda name: f"{TOOL_CALLS}{name}{ARGS}",
    ),
}
