"""The form that a reply must have, as one `Grammar`: an answer as asked for, tool calls in the model's own format, and
what of a reply is free.

    reply_grammar   tools, whether one must be called, and an answer's grammar -> the grammar of a reply
    answer_grammars the same without tools, for several conversations
    format_grammar  OpenAI's `response_format` -> the grammar of an answer
    of_reply        sampling parameters with an answer's grammar -> those of one reply, which may think and call tools
    thoughts_of     whether a reply to this prompt may have a <think> block

A call is written as the model's chat template writes it (`tool_calls`), with a name that was offered and arguments that
are valid for it. The engine keeps to a grammar; here it is only written, in llguidance's Lark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from groupwise.errors import GrammarError
from groupwise.model.chat import THINK_END, THINKS, decode, opens_thought, template_reads
from groupwise.tasks.tool_calls import (
    ARGS,
    CALL_END,
    CALL_START,
    PYTHON_TAG,
    TOOL_CALLS,
    ToolCallFormat,
    format_of,
    schema_types,
)
from groupwise.types import Grammar, GrammarKind, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tool = Mapping[str, Any]  # OpenAI's definition
BUDGET = "rollout.thinking_budget"

_TEXT = "/(.|\\n)*/"
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties", "additionalProperties")
_TEXTS = {"type", "enum", "const", "minLength", "maxLength", "title", "description", "default", "examples"}


def thoughts_of(prompt_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> Literal["none", "optional", "begun"]:
    """Return what `Grammar.thoughts` is for a reply to this prompt: "begun" where it ends inside a thought, "optional"
    where the chat template has a switch for thoughts and the prompt does not show that they are off."""
    if opens_thought(prompt_ids, tokenizer):
        return "begun"
    is_closed = decode(prompt_ids[-8:], tokenizer).rstrip().endswith(THINK_END)
    return "optional" if template_reads(THINKS, tokenizer) and not is_closed else "none"


def answer_grammars(
    answer: Grammar | None, prompts: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase
) -> list[Grammar | None]:
    """Return the grammar of the reply to each of several conversations, whose answers all have the same."""
    return [answer and replace(answer, thoughts=thoughts_of(ids, tokenizer)) for ids in prompts]


def format_grammar(
    kind: Literal["text", "json_object", "json_schema"],
    schema: Mapping[str, Any] | None = None,
    *,
    strict: bool | None = None,
) -> Grammar | None:
    """Return what OpenAI's `response_format` of this type asks for; None for text. `strict` false leaves to the model
    what of the schema cannot be guaranteed."""
    if kind == "text":
        return None
    if kind == "json_object" or schema is None:
        return Grammar.of_json(field="response_format")
    return Grammar.of_json(schema, lenient=strict is False, field="response_format.json_schema.schema")


def of_reply(
    params: SamplingParams,
    prompt_ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: Sequence[Tool] = (),
) -> SamplingParams:
    """Return `params` for the reply to this prompt, where `params.grammar` is that of an answer: the reply may think
    first, for `params.thinking_budget` tokens, and may be calls of `tools` instead. Raises GrammarError where what a
    tool takes cannot be guaranteed."""
    budget = params.thinking_budget
    if params.grammar is None and budget is None:
        return params
    thoughts = thoughts_of(prompt_ids, tokenizer)
    if params.grammar is None:
        if thoughts == "none":
            return params
        return replace(params, grammar=replace(free_reply(), thoughts=thoughts, thought_tokens=budget))
    grammar = reply_grammar(format_of(tokenizer), tools, tokenizer, answer=params.grammar)
    assert grammar is not None  # as there is an answer
    return replace(params, grammar=replace(grammar, thoughts=thoughts, thought_tokens=budget))


def free_reply() -> Grammar:
    """Return the grammar of a reply of which only the thought is bounded (`rollout.thinking_budget`)."""
    return Grammar(GrammarKind.FREE, field=BUDGET)


def reply_grammar(
    form: ToolCallFormat,
    tools: Sequence[Tool],
    tokenizer: PreTrainedTokenizerBase,
    *,
    choice: Literal["auto", "required"] = "auto",
    only: str | None = None,
    several: bool = True,
    answer: Grammar | None = None,
) -> Grammar | None:
    """Return the grammar of a reply for which `tools` were offered.

    Args:
        choice: "required" for a call of any of them; "auto" for calls or an answer. Without an `answer`, "auto" leaves
            text free, and calls in it are kept to their form if one of the tools is `strict`.
        only: the name of the tool that is to be called; None is any.
        several: whether there may be more than one call.
        answer: the grammar of a reply that is no call.

    Returns:
        None where everything is allowed.

    Raises:
        GrammarError: what a tool takes cannot be guaranteed in this format.
    """
    strict = any(tool["function"].get("strict") for tool in tools)
    if not tools or (choice == "auto" and answer is None and not strict):
        return answer
    writer = _WRITERS[form](tools, tokenizer, only=only)
    calls = writer.calls(several=several)
    if choice == "auto" and answer is not None:
        rules, parts = [f"start: calls | @content\ncalls: {calls}"], [("content", answer)]
    elif choice == "auto":
        rules, parts = [writer.amid_text(several=several)], []
    else:
        rules, parts = [f"start: {calls}"], []
    source = "\n".join([*rules, *writer.rules, f"TEXT: {_TEXT}"])
    return Grammar(GrammarKind.LARK, source, parts=(*parts, *writer.parts), field="tools")


# ---- one writer a format ----
class _Writer:
    """Writes calls of `tools` in Lark: `rules`, and the `parts` that they refer to."""

    opening, between, closing = "", "", ""  # of a call, between two calls, and behind the last

    def __init__(self, tools: Sequence[Tool], tokenizer: PreTrainedTokenizerBase, *, only: str | None):
        added: Any = tokenizer.get_added_vocab
        self._added: Mapping[str, int] = added()
        self.rules: list[str] = []
        self.parts: list[tuple[str, Grammar]] = []
        named = [(i, tool["function"]) for i, tool in enumerate(tools) if only in (None, tool["function"]["name"])]
        alternatives = [self.body(i, function) for i, function in named]
        self.rules.append(f"call: {' | '.join(alternatives)}")

    def body(self, index: int, function: Mapping[str, Any]) -> str:
        """Return one call of a tool, between the format's opening and closing."""
        raise NotImplementedError

    def inside(self, *, several: bool) -> str:
        """Return what stands behind the opening: a call, or all of them."""
        return f"call {self.closing}"

    def calls(self, *, several: bool) -> str:
        """Calls and nothing else."""
        one = f"{self._marker(self.opening)} {self.inside(several=several)}"
        return f"{one} ({_quoted(self.between)} {one})*" if several else one

    def amid_text(self, *, several: bool) -> str:
        """`start`: text in which calls stand. Their opening is the sign by which a call is known, also spelled out."""
        opening = self._marker(self.opening)
        if opening.startswith("<["):
            head, free = f"FREE {opening}", f"FREE: {_TEXT} & ~/(.|\\n)*{re.escape(self.opening)}(.|\\n)*/"
        else:
            head, free = "head", f"head[lazy]: TEXT {opening}\nFREE: TEXT"
        return f"start: ({head} {self.inside(several=several)}){'*' if several else '?'} FREE\n{free}"

    def _marker(self, text: str) -> str:
        """Return a marker in Lark: the token that it is, or else its text."""
        known = self._added.get(text)
        return _quoted(text) if known is None else f"<[{known}]>"

    def _arguments(self, index: int, function: Mapping[str, Any]) -> str:
        """Return a reference to the grammar of a tool's arguments as JSON."""
        name, field = f"arguments_{index}", _field(index)
        self.parts.append((name, Grammar.of_json(_object(function.get("parameters"), field), field=field)))
        return f"@{name}"


class _Hermes(_Writer):
    opening, between = CALL_START, "\n"

    @property
    def closing(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._marker(CALL_END)

    def body(self, index: int, function: Mapping[str, Any]) -> str:
        head = f'\n{{"name": {json.dumps(function["name"])}, "arguments": '
        return f"{_quoted(head)} {self._arguments(index, function)} {_quoted('}' + chr(10))}"


class _QwenXml(_Hermes):
    """Parameters as elements: strings as they are, all else as JSON."""

    def body(self, index: int, function: Mapping[str, Any]) -> str:
        field = _field(index)
        schema = _object(function.get("parameters"), field)
        combined = [key for key in _COMBINING if schema.get(key) not in (None, False)]
        if combined:
            message = f"{field} has {combined[0]}, which cannot be guaranteed where a model writes arguments as XML"
            raise GrammarError(message, hint="name all parameters in `properties`", field=field)
        defined = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        pieces = [_quoted(f"\n<function={function['name']}>\n")]
        for n, (name, value) in enumerate((schema.get("properties") or {}).items()):
            parameter = self._parameter(f"{index}_{n}", name, value, defined, f"{field}.properties.{name}")
            pieces.append(parameter if name in schema.get("required", ()) else f"({parameter})?")
        return " ".join([*pieces, _quoted("</function>\n")])

    def _parameter(self, key: str, name: str, schema: Any, defined: Mapping[str, Any], field: str) -> str:
        opening, end = _quoted(f"<parameter={name}>\n"), "\n</parameter>\n"
        schema = schema if isinstance(schema, dict) else {}
        texts = [each for each in [schema.get("const"), *(schema.get("enum") or ())] if each is not None]
        types = schema_types(schema) or (
            {"string"} if texts and all(isinstance(each, str) for each in texts) else set()
        )
        if "string" in types:  # it is written as it is, and read as a string whatever it looks like
            if unknown := sorted(set(schema) - _TEXTS) or ["several types"] * (len(types) > 1):
                message = f"{field} has {unknown[0]}, which cannot be guaranteed where a model writes arguments as XML"
                raise GrammarError(message, hint="leave it out, or use `enum`", field=field)
            if texts:
                return f"{opening} ({' | '.join(map(_quoted, texts))}) {_quoted(end)}"
            least, most = schema.get("minLength", 0), schema.get("maxLength", "")
            self.rules.append(f"text_{key}[lazy]: /(.|\\n){{{least},{most}}}{_pattern(end)}/")
            return f"{opening} text_{key}"
        self.parts.append((f"value_{key}", Grammar.of_json({**defined, **schema}, field=field)))
        return f"{opening} @value_{key} {_quoted(end)}"


class _Llama(_Writer):
    """JSON alone, as the whole reply; text that does not begin like it is free."""

    between = "; "

    def body(self, index: int, function: Mapping[str, Any]) -> str:
        head = f'{{"name": {json.dumps(function["name"])}, "parameters": '
        return f"{_quoted(head)} {self._arguments(index, function)} {_quoted('}')}"

    def calls(self, *, several: bool) -> str:
        return 'call ("; " call)*' if several else "call"

    def amid_text(self, *, several: bool) -> str:
        tag = self._marker(PYTHON_TAG)
        return f"start: {tag}? calls | FREE\ncalls: {self.calls(several=several)}\nFREE: /[^{{](.|\\n)*/"


class _Mistral(_Writer):
    """All calls in one list behind the marker."""

    opening = TOOL_CALLS

    def body(self, index: int, function: Mapping[str, Any]) -> str:
        head = f'{{"name": {json.dumps(function["name"])}, "arguments": '
        return f"{_quoted(head)} {self._arguments(index, function)} {_quoted('}')}"

    def inside(self, *, several: bool) -> str:
        more = ' (", " call)*' if several else ""
        return f'" [" call{more} "]"'

    def calls(self, *, several: bool) -> str:
        return f"{self._marker(self.opening)} {self.inside(several=several)}"


class _MistralArgs(_Writer):
    """A marker, a name, a marker and the arguments, for each call."""

    opening = TOOL_CALLS

    def body(self, index: int, function: Mapping[str, Any]) -> str:
        return f"{_quoted(function['name'])} {self._marker(ARGS)} {self._arguments(index, function)}"


_WRITERS: Mapping[ToolCallFormat, type[_Writer]] = {
    ToolCallFormat.HERMES: _Hermes,
    ToolCallFormat.QWEN_XML: _QwenXml,
    ToolCallFormat.LLAMA: _Llama,
    ToolCallFormat.MISTRAL: _Mistral,
    ToolCallFormat.MISTRAL_ARGS: _MistralArgs,
}


def _field(index: int) -> str:
    return f"tools[{index}].function.parameters"


def _object(parameters: Any, field: str) -> dict[str, Any]:
    """Return the schema of a tool's arguments, which are an object; of the properties that it names, where it names
    some."""
    schema: dict[str, Any] = {"properties": {}} if parameters is None else dict(parameters)
    if schema.setdefault("type", "object") != "object":
        message = f"{field}.type is {schema['type']!r}; a tool's arguments are an object"
        raise GrammarError(message, hint='write "type": "object"', field=f"{field}.type")
    if "properties" in schema and not any(key in schema for key in _COMBINING):
        schema["additionalProperties"] = False
    return schema


def _quoted(text: str) -> str:
    """Return a text in Lark; nothing for none."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def _pattern(text: str) -> str:
    """Return a text in a Lark regular expression."""
    return re.escape(text).replace("\n", "n").replace("/", "\\/")
