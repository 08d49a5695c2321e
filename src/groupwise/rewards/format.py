"""Ready rewards on the form of a completion. Options are the keyword-only arguments; set them with `args`.

tag_format    <think>...</think><answer>...</answer> and nothing else
tag_progress  partial credit on the way there
think_format  <think>...</think>, and then an answer
json_format   JSON, if wanted of a schema (https://json-schema.org)
regex_match   a pattern occurs in the completion

They say nothing about whether an answer is right: give them a small weight next to a reward that does, or use them in
`rewards.ensemble:gated`. Empty, repeated, nested and reversed tags earn nothing.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.errors import ConfigError
from groupwise.rewards.base import text_of
from groupwise.rewards.text import answer_part

_TYPES = {"object": dict, "array": list, "string": str, "number": (int, float), "boolean": bool, "null": type(None)}


# ---- tags ----


def tag_format(completions: Sequence[Any], *, tags: Sequence[str] = ("think", "answer")) -> list[float]:
    """1 where the completion is <a>...</a><b>...</b> for the `tags` a, b in this order: each exactly once, none empty,
    and only blanks around them; else 0."""
    return [float(_is_tagged(text_of(completion), tags)) for completion in completions]


def _is_tagged(text: str, tags: Sequence[str]) -> bool:
    rest = text.strip()
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) != 1 or text.count(closing) != 1 or not rest.startswith(opening):
            return False
        inside, _, rest = rest.removeprefix(opening).partition(closing)
        if not inside.strip():
            return False
        rest = rest.lstrip()
    return not rest


def tag_progress(completions: Sequence[Any], *, tags: Sequence[str] = ("think", "answer")) -> list[float]:
    """Return the share of the `tags` that is there, in [0, 1], less 0.001 for each character outside of them.

    Tags count from the first one on and only in their order. One that is opened, exactly once, counts half; one that
    is closed, exactly once and with something inside, counts whole; behind one that is neither, nothing counts.
    """
    return [_progress(text_of(completion), tags) for completion in completions]


def _progress(text: str, tags: Sequence[str]) -> float:
    there, outside, rest = 0.0, 0, text
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        before, opened, behind = rest.partition(opening)
        if not opened or text.count(opening) != 1 or text.count(closing) > 1:
            break
        outside += len(before.strip())
        inside, closed, behind = behind.partition(closing)
        there += 1.0 if closed and inside.strip() else 0.5
        rest = behind
        if not closed or not inside.strip():
            break
    outside += len(rest.strip())
    return max(0.0, there / len(tags) - 0.001 * outside)


def think_format(completions: Sequence[Any], *, tag: str = "think", opened: bool = False) -> list[float]:
    """1 where the completion is <think>, something, </think>, and then an answer; each tag exactly once; else 0.

    `opened` is for chat templates that write the <think> themselves: then the completion begins inside it.
    """
    opening, closing = f"<{tag}>", f"</{tag}>"
    scores: list[float] = []
    for completion in completions:
        text = (opening if opened else "") + text_of(completion).strip()
        thought, _, answer = text.removeprefix(opening).partition(closing)
        once = text.startswith(opening) and text.count(opening) == text.count(closing) == 1
        scores.append(float(once and bool(thought.strip()) and bool(answer.strip())))
    return scores


# ---- JSON ----


def json_format(
    completions: Sequence[Any],
    *,
    schema: Mapping[str, Any] | bool | None = None,
    types: Sequence[str] | None = None,
    tag: str | None = None,
    after: str | None = None,
) -> list[float]:
    """1 where the completion is one JSON value and nothing else, bare or in one ``` fence; else 0.

    Without a `schema` it must be an object or an array; `types` names others ("string", "number", "boolean", "null").
    NaN, Infinity and an object that has a key twice are not JSON here. `tag` and `after` choose the part that is read.
    Raises ConfigError for a schema that is none, or that refers to one elsewhere: nothing is downloaded.
    """
    if types is None:
        types = ("object", "array") if schema is None else tuple(_TYPES)
    if unknown := set(types) - set(_TYPES):
        raise ConfigError(f"types {sorted(unknown)} are not JSON's; they are {', '.join(_TYPES)}")
    validator = None if schema is None else _validator(json.dumps(schema, sort_keys=True))
    parts = [answer_part(text_of(completion), tag=tag, after=after) for completion in completions]
    return [float(part is not None and _is_json(part, types, validator)) for part in parts]


@functools.lru_cache(maxsize=64)
def _validator(schema: str) -> Any:
    import jsonschema_rs

    def elsewhere(uri: str) -> Any:
        raise ConfigError(f"the schema refers to {uri!r}; put what it needs into the schema, under `$defs`")

    try:
        return jsonschema_rs.validator_for(json.loads(schema), retriever=elsewhere)
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        raise ConfigError(f"this is not a JSON schema: {str(error).splitlines()[0]}") from None


def _is_json(text: str, types: Sequence[str], validator: Any) -> bool:
    try:
        value = json.loads(_unfenced(text.strip()), object_pairs_hook=_unique, parse_constant=_refuse)
        if not any(_is_type(value, name) for name in types):
            return False
        return validator is None or validator.is_valid(value)
    except (ValueError, RecursionError):  # not JSON, numbers of thousands of digits, thousands of brackets
        return False


def _is_type(value: Any, name: str) -> bool:
    return isinstance(value, _TYPES[name]) and (name == "boolean" or not isinstance(value, bool))


def _unfenced(text: str) -> str:
    if text.startswith("```") and text.endswith("```") and len(text) >= 6:
        return text[3:-3].removeprefix("json").strip()
    return text


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key occurs twice")
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


# ---- patterns ----


def regex_match(
    completions: Sequence[Any],
    *,
    pattern: str,
    full: bool = False,
    ignore_case: bool = False,
    tag: str | None = None,
    after: str | None = None,
) -> list[float]:
    """1 where the regular expression occurs in the completion, or with `full` is all of it, else 0. A dot is any
    character, line breaks too. `tag` and `after` choose the part that is searched; without the tag it is 0.

    The time that a pattern takes is the pattern's: nested repetitions, (a+)+, can take for ever on some text.
    """
    compiled = re.compile(pattern, re.DOTALL | (re.IGNORECASE if ignore_case else 0))
    match = compiled.fullmatch if full else compiled.search
    parts = [answer_part(text_of(completion), tag=tag, after=after) for completion in completions]
    return [float(part is not None and match(part) is not None) for part in parts]
