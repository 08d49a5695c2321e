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
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

WRITTEN: tuple[Callable[[str], Any], ...] = (int, float)  # types whose text is the cell's, tried in this order


def csv_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Return the rows of a CSV file. Raises pyarrow.ArrowException and OSError."""
    import pyarrow
    from pyarrow import csv

    parsing = csv.ParseOptions(newlines_in_values=True)
    with csv.open_csv(path, parse_options=parsing) as reader:
        names = reader.schema.names
    kinds = csv.ConvertOptions(column_types=dict.fromkeys(names, pyarrow.string()))
    table = csv.read_csv(path, parse_options=parsing, convert_options=kinds)
    columns = [_typed(column.to_pylist()) for column in table.columns]
    return (dict(zip(names, cells, strict=True)) for cells in zip(*columns, strict=True))


def parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Return the rows of a Parquet file. Raises pyarrow.ArrowException and OSError."""
    from pyarrow import parquet

    batches = parquet.read_table(path).to_batches()
    return map(row_of, itertools.chain.from_iterable(batch.to_pylist() for batch in batches))


def row_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of an Arrow table, without what only the format put there."""
    return {name: _plain(value) for name, value in row.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Decimal | datetime.date | datetime.time | datetime.timedelta) else value


def _typed(cells: Sequence[str]) -> Sequence[Any]:
    """Return a column's cells as numbers if all of them are written as Python writes numbers, empty ones as None; else
    texts.

    >>> _typed(["5", "", "-12"]), _typed(["2.5", "1.0"]), _typed(["007", "12"]), _typed(["1.10", "2.50"])
    ([5, None, -12], [2.5, 1.0], ['007', '12'], ['1.10', '2.50'])
    """
    for kind in WRITTEN if any(cells) else ():
        try:
            values = [kind(cell) if cell else None for cell in cells]
        except (ValueError, OverflowError):
            continue
        pairs = zip(values, cells, strict=True)
        if all(value is None or (math.isfinite(value) and str(value) == cell) for value, cell in pairs):
            return values
    return cells
