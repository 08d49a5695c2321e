"""The common form of all logs: exchanges with a model, outcomes that say how good an answer was, and who asked.

Exchange    the conversation before an answer, and the answer
Outcome     a score of an answer, or what should have been said, by the id of the answer, its trace or conversation
Belongs     of what stands in its own row: the user and the conversation of a trace
Bad         something that a format knows and that cannot be used, with the reason; it ends nothing
LogFormat   reads the rows of one system as these
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol

from groupwise.errors import DataError
from groupwise.types import Message

WORDS = {
    **dict.fromkeys(("up", "thumbs_up", "thumbsup", "positive", "good", "like", "true", "yes", "pass", "correct"), 1.0),
    **dict.fromkeys(("down", "thumbs_down", "thumbsdown", "negative", "bad", "dislike", "false", "no", "fail"), 0.0),
    "resolved": 1.0,
    "unresolved": 0.0,
    "incorrect": 0.0,
    "👍": 1.0,
    "👎": 0.0,
}  # what is written for a score
BAD = ("retried", "regenerated", "escalated")  # outcomes that are good where they did not happen
LATEST = 1e11  # seconds since 1970 that are a time: up to the year 5138
EPOCHS = (1e17, 1e9), (1e14, 1e6), (1e11, 1e3)  # a time from here on is in nano-, micro- and milliseconds


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A score or a correction of an answer. `id` is that of the answer, of its request, trace or conversation; of the
    last two, their last answer is meant. Where it stands in the row of its answer, `id` is the place, as ids may be
    those of other answers, too. `value` is a score as the log has it (see `outcomes.scaled`), `edited` the text that
    should have been said, `rating` the id of the outcome itself: outcomes with the same one are the same."""

    id: str
    name: str
    value: float | None = None
    edited: str | None = None
    rating: str | None = None


@dataclass(frozen=True, kw_only=True)
class Belongs:
    """The user and the conversation that a trace belongs to."""

    id: str
    user: str | None = None
    conversation: str | None = None


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Holds a model's answer in a log, with the conversation before it.

    `ids` are the ids by which other records may refer to it: the answer's, the request's, the span's, the trace's.
    `time` is seconds since 1970, None if the log does not say. `cut` says that the answer was cut at its token limit.
    `after` is the id of an earlier answer that `messages` continue without repeating the messages before it. `columns`
    are columns for rewards.
    """

    place: str
    ids: tuple[str, ...]
    messages: tuple[Message, ...]
    answer: Message
    tools: tuple[dict[str, Any], ...] = ()
    time: float | None = None
    user: str | None = None
    conversation: str | None = None
    trace: str | None = None
    model: str | None = None
    cut: bool = False
    after: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)


class Bad(NamedTuple):
    """A part of a log that cannot be used, with the reason."""

    place: str
    reason: str


Read = Exchange | Outcome | Belongs | Bad
FAULTS = (
    KeyError,
    IndexError,
    TypeError,
    ValueError,
    AttributeError,
    RecursionError,
    ArithmeticError,
)  # of a row that looks like another


def attempted(found: Iterator[Read], place: str) -> Iterator[Read]:
    """Yield what is found, up to where it cannot be used; then that, with the reason."""
    try:
        yield from found
    except DataError as error:
        yield Bad(place, error.message)
    except FAULTS as error:
        yield Bad(place, f"not as this format has it: {type(error).__name__}: {error}")


class LogFormat(Protocol):
    """Reads the rows of one system; what stands in several rows is put together in `finish`."""

    name: str

    def knows(self, row: Mapping[str, Any]) -> bool:
        """Return whether the row is one of this system's."""
        ...

    def read(self, row: Mapping[str, Any], place: str) -> Iterator[Read]:
        """Yield what the row holds; nothing where it is none of the model's business. Raises DataError, or one of
        `FAULTS`."""
        ...

    def finish(self) -> Iterator[Read]:
        """Yield what several rows came to."""
        ...


# ---- values as logs have them ----
def first(row: Mapping[str, Any], *names: str) -> Any:
    """Return the first value among these that is not null or empty; a dot leads into an object, unless it is in the
    name itself."""
    for name in names:
        value: Any = row.get(name)
        if value is None and "." in name:
            value = row
            for part in name.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
        if value not in (None, "", [], {}):
            return value
    return None


def text_at(row: Mapping[str, Any], *names: str) -> str | None:
    """Return the first of these values as text, where it is a text or a number."""
    value = first(row, *names)
    return str(value) if isinstance(value, str | int | float) else None


def ids_at(row: Mapping[str, Any], *names: str) -> tuple[str, ...]:
    """Return all of these values that are texts or numbers, each once."""
    found = (text_at(row, name) for name in names)
    return tuple(dict.fromkeys(each for each in found if each is not None))


def parsed(value: Any) -> Any:
    """Return the value of a text that is JSON, and anything else unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def worded(value: Any) -> Any:
    """Return a number as its text, since an answer that is one is a number in a table; anything else unchanged."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def well_formed(text: str) -> str:
    """Return text that UTF-8 has: half of a character, where something was cut off, is a replacement character.

    >>> well_formed("cut \\ud83d here")
    'cut � here'
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def seconds(value: Any) -> float | None:
    """Return a time in seconds since 1970, of ISO 8601 (UTC, unless it says) or of a number in any usual unit.

    >>> seconds("2026-05-01T12:00:00Z") == seconds(1777636800) == seconds("1777636800000000000")
    True
    """
    if isinstance(value, str) and not re.fullmatch(r"\d+(\.\d+)?", value):
        try:
            at = datetime.fromisoformat(value)
            return max(0.0, (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp())
        except (ValueError, OverflowError):
            return None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    if (number := _finite(value)) is None:
        return None
    number /= next((unit for least, unit in EPOCHS if number >= least), 1.0)
    return number if 0 <= number < LATEST else None


def _finite(value: str | float) -> float | None:
    """Return what a number or its digits are as a float; None for one without bounds, or of hundreds of digits."""
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def value_of(name: str, value: Any) -> float | None:
    """Return what is said of an answer as a number; of what is good where it did not happen (`BAD`), the opposite.

    >>> value_of("thumb", "up"), value_of("resolved", False), value_of("retried", True), value_of("note", "see above")
    (1.0, 0.0, 0.0, None)
    """
    if isinstance(value, str):
        word = value.strip().lower()
        number = WORDS[word] if word in WORDS else _finite(word) if re.fullmatch(r"-?\d+(\.\d+)?", word) else None
    else:
        number = _finite(value) if isinstance(value, bool | int | float) else None
    return 1 - number if number in (0, 1) and name.lower() in BAD else number


def outcomes_of(id: str, named: Iterable[tuple[str, Any]]) -> Iterator[Outcome]:
    """Yield an outcome for each name whose value says something; `edited` and `correction` are texts."""
    for name, value in named:
        text = worded(value)
        if name in ("edited", "correction", "edited_answer") and isinstance(text, str) and text.strip():
            yield Outcome(id=id, name="edited", edited=text)
        elif name not in ("edited", "correction", "edited_answer") and (number := value_of(name, value)) is not None:
            yield Outcome(id=id, name=name, value=number)
