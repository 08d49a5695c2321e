"""Text to and from a judge: a conversation between marks, a request's body, an answer's JSON."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from groupwise.errors import ConfigError


# ---- options ----
def score_bounds(scale: Sequence[float]) -> tuple[float, float]:
    if len(scale) != 2 or not all(map(math.isfinite, scale)) or scale[0] >= scale[1]:
        raise ConfigError(f"scale is {list(scale)}; it must be [lowest, highest]")
    return float(scale[0]), float(scale[1])


def request_body(model: str, messages: Any, extra: Mapping[str, Any] | None, **more: Any) -> bytes:
    body = {"model": model, "messages": messages, **more} | dict(extra or {})
    return json.dumps({key: value for key, value in body.items() if value is not None}).encode()


def conversation_text(messages: Any) -> str:
    return messages if isinstance(messages, str) else "\n\n".join(map(_turn, messages))


def _turn(message: Mapping[str, Any]) -> str:
    calls = message.get("tool_calls")
    said = [message.get("content") or "", *([json.dumps(calls)] if calls else [])]
    return f"[{message.get('role', '?')}]\n" + "\n".join(filter(None, said))


def reference(gold: Any) -> dict[str, str]:
    return {} if gold is None else {"reference answer": str(gold)}


def marked(parts: Mapping[str, str], mark: str) -> str:
    return "\n\n".join(f"--- {name} {mark}\n{text}\n--- end of {name} {mark}" for name, text in parts.items())


def mark_of(texts: Sequence[str]) -> str:
    """Return the same for the same texts, so that scoring is repeatable, and in none of them."""
    for number in itertools.count():
        written = json.dumps([number, *texts]).encode()
        mark = hashlib.sha256(written).hexdigest()[:20]
        if not any(mark in text for text in texts):
            return mark
    raise AssertionError("unreachable")


# ---- what the judge says ----
_NUMBER = r"(-?[0-9]+(?:\.[0-9]+)?)(?![\w.]*\w)"

_KEY = re.compile(rf'(?<!\\)"score"\s*:\s*"?{_NUMBER}')  # not inside a string, where the quotes are escaped

_WRITTEN = re.compile(rf"\bscore[\"'*_]*\s*(?:is|[:=])[\s\"'*_:]*{_NUMBER}", re.IGNORECASE)

_ALONE = re.compile(rf"{_NUMBER}(?:\s*/\s*[0-9]+)?")


def read_score(said: str) -> float | None:
    """Return the number under "score" in the last JSON object that has one, or else behind the last "score:", or else
    what is all of the answer; thoughts in <think> are not read. None without a finite number.

    >>> read_score('{"reason": "it says {\\\\"score\\\\": 9}", "score": 2}'), read_score("Score: 7/10"), read_score("8")
    (2.0, 7.0, 8.0)
    """
    said = said.rpartition("</think>")[2].replace("\u2212", "-")
    if found := [number for each in json_objects(said) if (number := finite(each.get("score"))) is not None]:
        return found[-1]
    if written := (_KEY if "{" in said else _WRITTEN).findall(said):
        return float(written[-1])
    alone = _ALONE.fullmatch(said.strip())
    return float(alone[1]) if alone else None


def json_objects(said: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in a text, in order; not those inside others or inside their strings."""
    decoder, place = json.JSONDecoder(), 0
    while (place := said.find("{", place)) >= 0:
        try:
            value, place = decoder.raw_decode(said, place)
        except (ValueError, RecursionError):
            place += 1
            continue
        if isinstance(value, dict):
            yield value


def finite(value: Any) -> float | None:
    if isinstance(value, str) and (alone := _ALONE.fullmatch(value.strip())):
        value = float(alone[1])
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
