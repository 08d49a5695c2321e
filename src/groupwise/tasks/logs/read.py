"""Files and folders of logs, row by row, each read by the format that knows it.

A file may be JSON lines, JSON (a list, an object with a list under `data`, or objects one behind the other), CSV or
Parquet, and gzipped; of a folder all such files are read, and of the directory of a run its rollouts. Formats are told
apart by each row, so that files of several systems may be given together. What cannot be used is kept with its place
and the reason.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from groupwise.errors import DataError
from groupwise.tasks.logs.exchange import Bad, Belongs, Exchange, LogFormat, Outcome, Read, attempted
from groupwise.tasks.logs.langfuse import Langfuse
from groupwise.tasks.logs.langsmith import LangSmith
from groupwise.tasks.logs.own import OwnRollouts
from groupwise.tasks.logs.requests import RequestLogs
from groupwise.tasks.logs.spans import Spans
from groupwise.tasks.tables import csv_rows, parquet_rows

FORMATS: tuple[type[LogFormat], ...] = (OwnRollouts, Spans, LangSmith, Langfuse, RequestLogs)
SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")
LISTS = ("data", "feedback", "runs", "traces", "observations")  # where an object that is no row has its rows
_DECODER, _SIGN = json.JSONDecoder(), re.compile(r"\S")
UNKNOWN = "the row is in none of the formats that are read"


@dataclass
class Logs:
    """The contents of logs that were read. `rows` counts the rows of the files, `formats` the rows of each system."""

    exchanges: list[Exchange] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    belongs: list[Belongs] = field(default_factory=list)
    bad: list[Bad] = field(default_factory=list)
    formats: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    files: int = 0

    def add(self, found: Iterator[Read], place: str) -> None:
        """Take in what stands at a place."""
        for each in attempted(found, place):
            if isinstance(each, Exchange):
                self.exchanges.append(each)
            elif isinstance(each, Outcome):
                self.outcomes.append(each)
            elif isinstance(each, Belongs):
                self.belongs.append(each)
            else:
                self.bad.append(each)


def read_logs(sources: Sequence[Path]) -> Logs:
    """Read the logs in files and folders.

    Raises:
        DataError: a source is not there or cannot be opened, or no row of any is a log that is known.
    """
    logs, formats = Logs(), [make() for make in FORMATS]
    keys: list[str] = []
    files = [file for source in sources for file in _files(source)]
    names = Counter(path.name for path in files)
    for path in files:
        logs.files += 1
        for place, row in _rows(path, path.name if names[path.name] == 1 else str(path)):
            logs.rows += 1
            if isinstance(row, DataError):
                logs.bad.append(Bad(place, row.message))
                continue
            known = next((each for each in formats if isinstance(row, Mapping) and each.knows(row)), None)
            if known is None:
                logs.bad.append(Bad(place, UNKNOWN))
                keys = keys or [str(each) for each in row] if isinstance(row, Mapping) else keys
                continue
            logs.formats[known.name] += 1
            logs.add(known.read(row, place), place)
    for each in formats:
        logs.add(each.finish(), each.name)
    if not logs.exchanges:
        raise _nothing(logs, keys)
    return logs


def _nothing(logs: Logs, keys: Sequence[str]) -> DataError:
    if not logs.rows:
        return DataError("there are no rows in the logs", kind="empty", field="SOURCE")
    names = ", ".join(each.name for each in FORMATS)
    if logs.formats:
        first = logs.bad[0] if logs.bad else Bad("", "no row has a question with its answer")
        message = f"none of {logs.rows} rows can be used; {first.place}: {first.reason}"
        return DataError(message, hint="log the messages and the answer of each call", kind="unusable", field="SOURCE")
    held = f"; the first has {', '.join(map(repr, keys[:8]))}" if keys else ""
    message = f"none of {logs.rows} rows is in a format that is read{held}"
    hint = f"the formats are {names} (docs/logs.md has an example of each)"
    return DataError(message, hint=hint, kind="unrecognised", field="SOURCE")


# ---- files ----
def _files(source: Path) -> list[Path]:
    if source.is_dir():
        inside = source / "rollouts" if (source / "rollouts").is_dir() else source
        found = sorted(each for each in inside.rglob("*") if each.is_file() and _suffix(each) in SUFFIXES)
        if not found:
            message = f"{source} has no log files"
            raise DataError(
                message,
                hint=f"names of log files end with {', '.join(SUFFIXES)}, or one of these and .gz",
                field="SOURCE",
            )
        return found
    if not source.is_file():
        raise DataError(f"there is no file {source}", field="SOURCE", kind="missing")
    if _suffix(source) not in SUFFIXES:
        message = f"{source} ends with {source.suffix or 'nothing'!r}"
        raise DataError(
            message, hint=f"names of log files end with {', '.join(SUFFIXES)}, or one of these and .gz", field="SOURCE"
        )
    return [source]


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def _rows(path: Path, label: str) -> Iterator[tuple[str, Any]]:
    """Yield each row with its place, which no other row has: an answer without an id is known by it. The file is called
    `label` there. For a line that is not JSON, yield the error."""
    try:
        if _suffix(path) in (".csv", ".parquet"):
            yield from ((f"{label}:{number}", row) for number, row in enumerate(_table(path), start=1))
            return
        if _suffix(path) == ".json":
            try:
                value = json.loads(_bytes(path))
            except (ValueError, RecursionError):
                yield from _lines(path, label)
                return
            rows = _listed(value)
            yield from ((f"{label}:{number}" if len(rows) > 1 else label, row) for number, row in enumerate(rows))
            return
        yield from _lines(path, label)
    except PermissionError as error:
        hint = f"let user {os.geteuid()} read it (`ls -l {path}`)"
        raise DataError(f"cannot read {path}: {error.strerror}", hint=hint, field="SOURCE") from None
    except (OSError, EOFError, ArithmeticError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}", field="SOURCE") from error


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # pyright: ignore[reportReturnType]


def _bytes(path: Path) -> bytes:
    with _open(path) as file:
        return file.read()


def _table(path: Path) -> Iterator[Any]:
    """Yield the rows of a table. Raises DataError for a file that holds none."""
    import pyarrow

    try:
        if _suffix(path) == ".csv":
            yield from csv_rows(path)  # which pyarrow decompresses by its name
        else:
            yield from parquet_rows(path if path.suffix == ".parquet" else io.BytesIO(_bytes(path)))
    except pyarrow.ArrowException as error:
        raise DataError(f"cannot read {path}: {error}", field="SOURCE") from error


def _spread(path: Path) -> list[Any] | None:
    """Return the values of a file in which each is spread over lines, as OpenTelemetry's SDK prints spans, and an error
    where it does not go on so; None for any other file."""
    with _open(path) as file:
        first = next((line for line in file if line.strip()), b"").strip()
    if first not in (b"{", b"["):
        return None
    values, position, text = list[Any](), 0, _bytes(path).decode(errors="replace")
    try:
        while (begin := _SIGN.search(text, position)) is not None:
            value, position = _DECODER.raw_decode(text, begin.start())
            values.append(value)
    except (ValueError, RecursionError) as error:
        values += [DataError(f"what follows is not JSON: {error}")] if values else []
    return values or None


def _lines(path: Path, label: str) -> Iterator[tuple[str, Any]]:
    if (values := _spread(path)) is not None:
        rows = [row for value in values for row in _listed(value)]
        yield from ((f"{label}:{number}", row) for number, row in enumerate(rows, start=1))
        return
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{label}:{number}"
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                yield place, DataError(f"the line is not JSON: {error}")
                continue
            rows = _listed(value)
            yield from ((f"{place}.{at}" if len(rows) > 1 else place, row) for at, row in enumerate(rows, start=1))


def _listed(value: Any) -> list[Any]:
    """Return the rows that a JSON value is."""
    if isinstance(value, list):
        return value
    if isinstance(value, dict) and not any(make().knows(value) for make in FORMATS):
        held = next((value[name] for name in LISTS if isinstance(value.get(name), list)), None)
        if held is not None:
            return held
    return [value]
