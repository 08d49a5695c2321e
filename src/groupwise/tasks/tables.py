"""Rows of tables: CSV, Parquet, and datasets that are kept in Arrow.

    csv_rows       a cell is the text that stands in the file, or a number where that is written as Python writes it:
                   5 and 2.5 are numbers, 007, 1.10, 11:30 and 2024-05-01 are texts. A column has one type
    parquet_rows   the column's types; decimals, dates and times as text
    row_of         the same for a row of `datasets`

Arrow gives every struct of a column all keys that any row has, and null where a row has not: a tool would get the
parameters of all other tools, and a call their arguments. So inside structs a null is a key that the row does not have.
What an author wrote as null in JSON lines is read elsewhere, and stays.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

READ_AT_ONCE = 1024  # rows of a Parquet file
WRITTEN: tuple[Callable[[str], Any], ...] = (int, float)  # types whose text is the cell's, tried in this order


def csv_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a CSV file, which is gone through twice, but for one whose columns were typed before: what type
    a column has, all of its cells say. Raises pyarrow.ArrowException and OSError."""
    stat = path.stat()
    types = _types(path.resolve(), stat.st_ino, stat.st_mtime_ns, stat.st_size)
    for names, columns in _csv_parts(path):
        typed = [column.typed(cells) for column, cells in zip(types, columns, strict=True)]
        yield from (dict(zip(names, cells, strict=True)) for cells in zip(*typed, strict=True))


@lru_cache(maxsize=64)
def _types(path: Path, *state: int) -> list[_Written]:
    """Return the types of a file's columns, from a cache, because a stream reads a file again in each pass. `state`
    changes with the file."""
    types: list[_Written] = []
    for names, columns in _csv_parts(path):
        types = types or [_Written() for _ in names]
        for column, cells in zip(types, columns, strict=True):
            column.see(cells)
    return types


def _csv_parts(path: Path) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Yield the columns' names and the cells of each as they are written, a part of the file after another."""
    import pyarrow
    from pyarrow import csv

    parsing = csv.ParseOptions(newlines_in_values=True)
    with csv.open_csv(path, parse_options=parsing) as reader:
        names = reader.schema.names
    kinds = csv.ConvertOptions(column_types=dict.fromkeys(names, pyarrow.string()))
    with csv.open_csv(path, parse_options=parsing, convert_options=kinds) as reader:
        for batch in reader:
            yield names, [column.to_pylist() for column in batch.columns]


def parquet_rows(path: Path | BinaryIO) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file, by its path or open, a thousand read at a time. Raises pyarrow.ArrowException
    and OSError."""
    from pyarrow import parquet

    with parquet.ParquetFile(path, pre_buffer=False) as file:
        for batch in file.iter_batches(batch_size=READ_AT_ONCE):
            yield from map(row_of, batch.to_pylist())


def row_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of an Arrow table, without what only the format put there."""
    return {name: _plain(value) for name, value in row.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Decimal | datetime.date | datetime.time | datetime.timedelta) else value


class _Written:
    """Finds the type of a column from its cells: numbers if all but empty ones are as Python writes numbers; else
    texts.

    >>> def typed(*cells):
    ...     written = _Written()
    ...     written.see(cells)
    ...     return written.typed(cells)
    >>> typed("5", "", "-12"), typed("2.5", "1.0"), typed("007", "12"), typed("1.10", "2.50")
    ([5, None, -12], [2.5, 1.0], ['007', '12'], ['1.10', '2.50'])
    """

    def __init__(self) -> None:
        self._kinds, self._any = list(WRITTEN), False

    def see(self, cells: Sequence[str]) -> None:
        """Take note of some of the column's cells."""
        self._any = self._any or any(cells)
        self._kinds = [kind for kind in self._kinds if all(_is_written(cell, kind) for cell in cells if cell)]

    def typed(self, cells: Sequence[str]) -> list[Any]:
        """Return cells as what all of the column's are."""
        if not (self._any and self._kinds):
            return list(cells)
        return [self._kinds[0](cell) if cell else None for cell in cells]


def _is_written(cell: str, kind: Callable[[str], Any]) -> bool:
    """Return whether the text is how Python writes a finite number of this kind."""
    try:
        value = kind(cell)
        return str(value) == cell and math.isfinite(value)
    except (ValueError, OverflowError):
        return False
