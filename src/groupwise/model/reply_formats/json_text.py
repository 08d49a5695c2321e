"""JSON inside the text of a reply: a value and where it ends, the marker behind it, a call that it is, a value's type.

What is wrong with a text is said with its place, counted from where the value should begin.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.model.reply_formats.format import ParsedCall, Tools

SPACE = re.compile(r"\s*")
MOST_NESTED = 200  # lists and objects within others in a call: whoever shows it again goes down into each
_PYTHON = {"True": True, "False": False, "None": None}  # some templates write these so
_JSON_TYPES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    list: "array",
    dict: "object",
}


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def json_at(text: str, position: int = 0) -> tuple[Any, int]:
    """Return the JSON value at `position` and where it ends; instead of the value a ValueError that says what is
    wrong."""
    try:
        return _DECODER.raw_decode(text, end_at(SPACE, text, position))
    except json.JSONDecodeError as error:
        return ValueError(f"{error.msg} at its character {error.pos - position}"), position
    except RecursionError:
        return ValueError("it is nested too deeply"), position
    except ValueError as error:
        return ValueError(str(error).partition(";")[0]), position


def json_then(text: str, start: int, mark: str, *, last: bool) -> int:
    """Return where the first `mark` behind the JSON value at `start` begins; -1 where it is not there, or more text may
    show that what is there is part of a string. What cannot be read ends at its first mark, if no more text comes
    (`last`)."""
    end, is_json = json_end(text, start)
    close = text.find(mark, end)
    return text.find(mark, start) if close < 0 and last and not is_json else close


def json_end(text: str, start: int) -> tuple[int, bool]:
    """Return where the JSON value at `start` ends, and True; where there is none, False and how far it could be read: a
    marker before that is in a string, and in a string that is not closed all are."""
    try:
        return _DECODER.raw_decode(text, end_at(SPACE, text, start))[1], True
    except json.JSONDecodeError as error:
        return len(text) if error.msg.startswith("Unterminated string") else max(error.pos, start), False
    except (RecursionError, ValueError):
        return start, False


def call_of(value: Any) -> ParsedCall | str:
    """Return the call in a decoded {"name": ..., "arguments" or "parameters": {...}}, or why there is none."""
    if not isinstance(value, dict):
        return f"The call is JSON of type {type(value).__name__}; it must be an object."
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or not name:
        return "The call has no name."
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        return f"The call's arguments are of type {type(arguments).__name__}; give an object."
    if _is_nested(arguments):
        return "The call's arguments are nested too deeply."
    try:
        f"{name}{json.dumps(arguments, ensure_ascii=False, allow_nan=False)}".encode()
    except (ValueError, RecursionError):  # a number without bounds, or half a surrogate pair
        return "The call has numbers or characters that JSON cannot carry."
    return ParsedCall(name, arguments)


def _is_nested(value: Any) -> bool:
    """Return whether lists and objects stand in more than `MOST_NESTED` others."""
    level = [value]
    for _ in range(MOST_NESTED):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for values in inner for each in values if isinstance(each, dict | list)]
        if not level:
            return False
    return True


def named_call(name: str, text: str, position: int = 0) -> tuple[ParsedCall | str, int]:
    """Return the call of `name` whose arguments are the JSON at `position`, or why there is none; and where it ends."""
    value, end = json_at(text, position)
    if isinstance(value, ValueError):
        return f"The call's arguments are not JSON: {value}.", position
    return call_of({"name": name, "arguments": value}), end


def end_at(pattern: re.Pattern[str], text: str, position: int) -> int:
    """Return where a match of the pattern at `position` ends; `position` where there is none."""
    match = pattern.match(text, position)
    return match.end() if match else position


# ---- types, for formats that write strings and numbers alike ----
def types_of(name: str, tools: Tools) -> dict[str, set[str]]:
    """Return the JSON types of each parameter of the tool `name`, as far as its definition tells."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            schema = function.get("parameters")
            named = schema.get("properties") if isinstance(schema, Mapping) else None
            items = named.items() if isinstance(named, Mapping) else ()
            return {key: schema_types(each, schema) for key, each in items}
    return {}


def schema_types(schema: Any, root: Any = None) -> set[str]:
    """Return the JSON types that a schema declares: itself, by its values, in its alternatives, or where it points to
    in the schema `root`. Each part is looked at once, however often it is pointed to; what is no schema declares
    nothing."""
    types, waiting, seen = set[str](), [schema], set[int]()
    while waiting:
        one = waiting.pop()
        if not isinstance(one, Mapping) or id(one) in seen:
            continue
        seen.add(id(one))
        declared = one.get("type")
        own = {each for each in ([declared] if isinstance(declared, str) else _list(declared)) if isinstance(each, str)}
        if not own:
            values = [one["const"]] if "const" in one else _list(one.get("enum"))
            own = {_JSON_TYPES[type(value)] for value in values if type(value) in _JSON_TYPES}
        types |= own
        waiting += [each for key in ("anyOf", "oneOf", "allOf") for each in _list(one.get(key))]
        waiting.append(pointed_to(one, root))
    return types


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def pointed_to(schema: Mapping[str, Any], root: Any) -> Any:
    """Return the part of the schema `root` to which a schema's `$ref` points; None if it has none, or the part is
    missing."""
    place = schema.get("$ref")
    if not isinstance(place, str) or not place.startswith("#/"):
        return None
    found = root
    for step in place[2:].split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def add_typed(arguments: dict[str, Any], key: str, text: str, types: Mapping[str, set[str]]) -> None:
    """Put a parameter's text among the arguments as a value of its declared types. Nothing is no number: it is left
    out."""
    declared = types.get(key)
    if text.strip() or "string" in (declared or {"string"}):
        arguments[key] = _typed(text, declared)


def _typed(text: str, types: set[str] | None) -> Any:
    """Return a parameter's text as a value of its declared types; what may be a string and is not null is one."""
    if types and "string" in types and not (text in ("null", "None") and "null" in types):
        return text
    if text in _PYTHON:
        return _PYTHON[text]
    value, end = json_at(text)
    return text if isinstance(value, ValueError) or text[end:].strip() else value


def text_of_value(value: Any) -> str:
    """Return a value as such formats write it: strings as they are, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
