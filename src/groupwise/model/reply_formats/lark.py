"""Tool calls as a grammar, in llguidance's Lark: what every format writes alike, and the lists that several need.

A format's writer says how one call is written (`body`), and what stands around it. Arguments in JSON are a part of
their own (`Grammar.of_json`); formats that write strings as they are have `parameters_of` check what can be
guaranteed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from groupwise.errors import GrammarError
from groupwise.model.reply_formats.format import ReplyFormat, Tools
from groupwise.model.reply_formats.json_text import pointed_to, schema_types, text_of_value
from groupwise.types import Grammar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXT = "/(.|\\n)*/"
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties", "additionalProperties")
_SAID = {"title", "description", "default", "examples"}  # what a schema only says
_TEXTS = _SAID | {"type", "enum", "const", "minLength", "maxLength"}
MOST_DEPTH = 16  # of references within references
_KINDS: Mapping[str, tuple[type, str]] = {
    "properties": (dict, "an object"),
    **dict.fromkeys(("required", "enum"), (list, "a list")),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), (int, "a whole number")),
}


class CallWriter:
    """Writes calls of `tools` in Lark: `rules`, and the `parts` that they refer to.

    Attributes:
        lead: the text behind the marker with which calls begin, in front of the tool's name.
        between: the text between two calls.
        trail: the text in front of the marker that closes calls.
        sectioned: whether all calls stand between two such markers, and not each between its own.
    """

    lead, between, trail, sectioned = "", "", "", False

    def __init__(self, form: ReplyFormat, tools: Tools, tokenizer: PreTrainedTokenizerBase, *, only: str | None):
        self.opening, self.closing, self._answer_head = form.start + self.lead, self.trail + form.end, form.answer_head
        added: Any = tokenizer.get_added_vocab
        self._added: Mapping[str, int] = added()
        longest_first = sorted(self._added, key=len, reverse=True)
        self._splits = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self.rules: list[str] = []
        self.parts: list[tuple[str, Grammar]] = []
        named = [(i, tool["function"]) for i, tool in enumerate(tools) if only in (None, tool["function"]["name"])]
        alternatives = [self.body(i, function) for i, function in named]
        self.rules.append(f"call: {' | '.join(alternatives)}")

    def body(self, index: int, function: Mapping[str, Any]) -> str:
        """Return one call of a tool, between the format's opening and closing."""
        raise NotImplementedError

    # ---- what a reply is ----
    def calls(self, *, several: bool) -> str:
        """Return calls and nothing else."""
        one = f"{self.text(self.opening)} {self._inside(several=several)}"
        return f"{one} ({self.text(self.between)} {one})*" if several and not self.sectioned else one

    def amid_text(self, *, several: bool) -> str:
        """Return `start`: text in which calls stand. Their opening is the sign by which a call is known, also spelled
        out."""
        opening = self.text(self.opening)
        if opening.startswith("<["):
            sign = self._splits.match(self.opening)
            assert sign is not None
            head, free = f"FREE {opening}", f"FREE: {TEXT} & ~/(.|\\n)*{pattern(sign[0])}(.|\\n)*/"
        else:
            head, free = "head", f"head[lazy]: TEXT {opening}\nFREE: TEXT"
        many = "*" if several and not self.sectioned else "?"
        return f"start: ({head} {self._inside(several=several)}){many} FREE\n{free}"

    def answer(self) -> str:
        """Return how an answer that has its own grammar is written."""
        return f"{self.text(self._answer_head)} @content"

    def _inside(self, *, several: bool) -> str:
        """Return what stands behind the opening: a call, or all of them."""
        more = f"({self.text(self.between)} call)*" if several and self.sectioned else ""
        return f"call {more} {self.text(self.closing)}"

    # ---- texts ----
    def text(self, text: str) -> str:
        """Return a text in Lark, its tokens of their own as what they are; nothing for none."""
        parts, position = [], 0
        for found in self._splits.finditer(text):
            parts += [quoted(text[position : found.start()]), f"<[{self._added[found[0]]}]>"]
            position = found.end()
        return " ".join(part for part in [*parts, quoted(text[position:])] if part)

    def until(self, key: str, end: str, *, least: int = 0, most: int | str = "") -> str:
        """Return a reference to any text of this many characters that ends with `end`, which it does not have in it."""
        if (mark := self._splits.match(end)) is not None:  # its own token, which is none of a text's
            self.rules.append(f"TEXT_{key}: /(.|\\n){{{least},{most}}}/ & ~/(.|\\n)*{pattern(mark[0])}(.|\\n)*/")
            return f"TEXT_{key} {self.text(end)}"
        self.rules.append(f"text_{key}[lazy]: /(.|\\n){{{least},{most}}}{pattern(end)}/")
        return f"text_{key}"

    # ---- arguments ----
    def arguments(self, index: int, function: Mapping[str, Any]) -> str:
        """Return a reference to the grammar of a tool's arguments as JSON."""
        field = field_of(index)
        return self.json(f"arguments_{index}", object_schema(function.get("parameters"), field), field)

    def json(self, key: str, schema: Mapping[str, Any], field: str) -> str:
        """Return a reference to the grammar of JSON that the schema allows."""
        self.parts.append((key, Grammar.of_json(schema, field=field)))
        return f"@{key}"

    def listed(self, key: str, items: Sequence[tuple[str, bool]], between: str) -> str:
        """Return items one behind the other in their order, of which some must be there (True)."""
        rest = ""
        for i in range(len(items) - 1, -1, -1):  # `rest_i`: of the items from i on, where some stand before them
            item, must = items[i]
            first, later = f"{item} {rest}", f"{quoted(between)} {item}"
            if i + 1 < len(items) and not must:
                first = f"{first} | first_{key}_{i + 1}"
            elif not must:
                first = f"({first})?"
            self.rules += [f"first_{key}_{i}: {first}", f"rest_{key}_{i}: {later if must else f'({later})?'} {rest}"]
            rest = f"rest_{key}_{i}"
        return f"first_{key}_0" if items else ""


class XmlWriter(CallWriter):
    """Writes parameters as elements: strings as they are, all else as JSON."""

    def head(self, name: str) -> str:
        """Return the text in front of the parameters of a call of this tool."""
        raise NotImplementedError

    def around(self, name: str) -> tuple[str, str]:
        """Return the texts before and after the value of a parameter of this name."""
        raise NotImplementedError

    tail = ""  # behind the parameters

    def body(self, index: int, function: Mapping[str, Any]) -> str:
        schema, properties = parameters_of(index, function)
        pieces = [self.text(self.head(function["name"]))]
        for n, (name, value) in enumerate(properties.items()):
            parameter = self._parameter(f"{index}_{n}", name, value, schema, f"{field_of(index)}.properties.{name}")
            pieces.append(parameter if name in schema.get("required", ()) else f"({parameter})?")
        return " ".join([*pieces, self.text(self.tail)])

    def _parameter(self, key: str, name: str, schema: Any, root: Mapping[str, Any], field: str) -> str:
        before, end = self.around(name)
        value = resolved(schema, root, field)
        if (texts := texts_of(value, root, field)) is not None:  # written as it is, and read as a string
            if texts.values:
                return f"{self.text(before)} ({' | '.join(map(quoted, texts.values))}) {self.text(end)}"
            return f"{self.text(before)} {self.until(key, end, least=texts.least, most=texts.most)}"
        return f"{self.text(before)} {self.json(f'value_{key}', with_definitions(value, root), field)} {self.text(end)}"


class Texts:
    """The strings that a schema allows: `values`, or any of `least` to `most` characters."""

    def __init__(self, schema: Mapping[str, Any]):
        of_const = [schema["const"]] if "const" in schema else []
        self.values: list[str] = [text_of_value(each) for each in [*of_const, *(schema.get("enum") or ())]]
        self.least, self.most = schema.get("minLength", 0), schema.get("maxLength", "")


def texts_of(schema: Mapping[str, Any], root: Mapping[str, Any], field: str) -> Texts | None:
    """Return what strings a parameter's schema allows where it is one for strings; None where it is for other values.
    Raises GrammarError where some are allowed and more is said of them than can be guaranteed."""
    types = schema_types(schema, root)
    if "string" not in types:
        return None
    if unknown := sorted(set(schema) - _TEXTS) or ["several types"] * (len(types) > 1):
        raise refused(field, unknown[0], "leave it out, or use `enum`")
    return Texts(schema)


def resolved(schema: Any, root: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Return a part of the schema `root`, with what it points to in place of a `$ref` that says all. Raises as
    `checked`."""
    for _ in range(MOST_DEPTH):
        if reference(schema) is None:
            break
        schema = pointed_to(schema, root)
    return checked(schema, field) if isinstance(schema, Mapping) else {}


def checked(schema: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Return a schema without keys that are null, as some programs write what they leave out. Raises GrammarError for
    one whose value is not of the kind that the writers read."""
    given = {key: value for key, value in schema.items() if value is not None or key == "const"}
    for key, (kind, said) in _KINDS.items():
        if key in given and not isinstance(given[key], kind):
            named = f"{field}.{key}"
            raise GrammarError(f"{named} is {given[key]!r:.80}; it must be {said}", field=named)
    return given


def reference(schema: Any) -> str | None:
    """Return the `$ref` of a schema that says nothing else; None for any other."""
    alone = isinstance(schema, Mapping) and set(schema) - _SAID == {"$ref"} and isinstance(schema["$ref"], str)
    return schema["$ref"] if alone else None


def parameters_of(index: int, function: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the schema of a tool's arguments, and its properties. Raises GrammarError where it says more than which
    these are."""
    schema = object_schema(function.get("parameters"), field_of(index))
    if combined := [key for key in _COMBINING if schema.get(key) not in (None, False)]:
        raise refused(field_of(index), combined[0], "name all parameters in `properties`")
    return schema, schema.get("properties") or {}


def refused(field: str, what: str, hint: str) -> GrammarError:
    """Return the error for a part of a schema that a format other than JSON cannot guarantee."""
    message = f"{field} has {what}, which cannot be guaranteed where a model does not write arguments as JSON"
    return GrammarError(message, hint=hint, field=field)


def with_definitions(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part of the schema `root` with the definitions that it may point to."""
    return {**{key: root[key] for key in ("$defs", "definitions") if key in root}, **schema}


def field_of(index: int) -> str:
    """Return by which name errors call the schema of tool number `index`."""
    return f"tools[{index}].function.parameters"


def object_schema(parameters: Any, field: str) -> dict[str, Any]:
    """Return the schema of a tool's arguments, which are an object; of the properties that it names, where it names
    some. Raises GrammarError, also as `checked`."""
    schema: dict[str, Any] = {"properties": {}} if parameters is None else checked(parameters, field)
    if schema.setdefault("type", "object") != "object":
        message = f"{field}.type is {schema['type']!r}; a tool's arguments are an object"
        raise GrammarError(message, hint='write "type": "object"', field=f"{field}.type")
    if "properties" in schema and not any(key in schema for key in _COMBINING):
        schema["additionalProperties"] = False
    return schema


def quoted(text: str) -> str:
    """Return a text in Lark; nothing for none."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def pattern(text: str) -> str:
    """Return a text in a Lark regular expression."""
    return re.escape(text).replace("\n", "n").replace("/", "\\/")
