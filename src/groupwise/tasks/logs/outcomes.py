"""Reads outcomes (how good answers were) from a separate file, brings them to one scale, and joins them to
exchanges.

read_outcomes   {"id": .., "thumb": "up"}, {"id": .., "resolved": false}, {"id": .., "edited": "It is 185."}, a row each
joined          the outcomes of each exchange, and the ids that are in no exchange
scaled          values of 0 to 1; a name whose values are -1, 0 and 1 is a thumb; others have no scale that is known
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from groupwise.config.data import DataConfig
from groupwise.errors import DataError
from groupwise.tasks.logs.exchange import Exchange, Outcome, outcomes_of, text_at
from groupwise.tasks.rows import read_rows

IDS = ("id", "response_id", "request_id", "rollout_id", "observation_id", "run_id", "trace_id", "conversation_id")
ABOUT = (*IDS, "user", "user_id", "time", "timestamp", "created_at", "comment", "name", "key", "value")


class Joined(NamedTuple):
    """Outcomes by the number of their exchange; how many have an id that no exchange has; and names without a scale,
    with their lowest and highest value."""

    of: Mapping[int, Sequence[Outcome]]
    unmatched: int
    unscaled: Mapping[str, tuple[float, float]]


def read_outcomes(path: Path) -> list[Outcome]:
    """Return the outcomes of a file of JSON lines, JSON, CSV or Parquet. Columns are names of outcomes, or a row has
    `name` and `value`. Raises DataError for a row without an id, and where no row says anything."""
    found: list[Outcome] = []
    for place, row in read_rows(DataConfig(source=str(path.absolute()))):
        id = text_at(row, *IDS) if isinstance(row, Mapping) else None
        if id is None:
            what = ", ".join(map(repr, row)) if isinstance(row, Mapping) else f"a {type(row).__name__}"
            hint = "an outcome names its answer, request, trace or conversation by one of " + ", ".join(IDS)
            raise DataError(f"{place}: no id; the row has {what}", hint=hint, field="--outcomes")
        named: list[tuple[str, Any]] = [(str(name), value) for name, value in row.items() if name not in ABOUT]
        if (name := text_at(row, "name", "key")) is not None:
            named.append((name, row.get("value")))
        found += outcomes_of(id, named)
    if not found:
        hint = "columns are thumb (up, down), resolved, retried, score (0 to 1) or edited (a text)"
        raise DataError(f"{path} says nothing of any answer", hint=hint, field="--outcomes", kind="empty")
    return found


def joined(exchanges: Sequence[Exchange], outcomes: Iterable[Outcome]) -> Joined:
    """Join outcomes by id, or by the place of an answer. Of a trace or conversation, and of an id that several answers
    have, the last answer is meant; a rating that stands twice counts once."""
    by_id: dict[str, int] = {}
    last: dict[str, int] = {}
    for number, each in sorted(enumerate(exchanges), key=lambda one: one[1].time or 0.0):
        by_id |= dict.fromkeys((each.place, *each.ids), number)
        last |= {id: number for id in (each.trace, each.conversation) if id is not None}
    known, seen = list[Outcome](), set[Outcome]()
    for each in outcomes:
        if each.rating is None or each not in seen:
            known.append(each)
            seen.add(each)
    values, unscaled = scaled(known)
    of: dict[int, list[Outcome]] = defaultdict(list)
    unmatched = 0
    for each in known:
        number = by_id.get(each.id, last.get(each.id))
        if number is None:
            unmatched += 1
        elif each.value is None:
            of[number].append(each)
        elif each.name not in unscaled:
            of[number].append(replace(each, value=values(each)))
    return Joined(of, unmatched, unscaled)


def scaled(outcomes: Iterable[Outcome]) -> tuple[Any, dict[str, tuple[float, float]]]:
    """Return what makes of an outcome a score from 0 to 1, and the names for which nothing does."""
    seen: dict[str, set[float]] = defaultdict(set)
    for each in outcomes:
        if each.value is not None:
            seen[each.name].add(each.value)
    thumbs = {name for name, values in seen.items() if values <= {-1.0, 0.0, 1.0} and -1.0 in values}
    unscaled = {
        name: (min(values), max(values))
        for name, values in seen.items()
        if name not in thumbs and not all(0 <= value <= 1 for value in values)
    }
    return lambda each: (each.value + 1) / 2 if each.name in thumbs else each.value, unscaled
