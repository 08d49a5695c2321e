"""Reads the rows of a source and converts them to our columns: cut to a slice, renamed, filtered, sampled.

    read_rows   rows as they are written, each with an id that names its place: `prompts.jsonl:3`
    Rows        the same as a run uses them; read again in each iteration, and counted

Rows are kept in memory only if `sample` or a slice in percent needs all of them: JSON lines, tables and streamed
datasets are read a few rows at a time.
"""

from __future__ import annotations

import difflib
import itertools
import json
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.config.data import FILES, RowsConfig, SourceConfig
from groupwise.config.hub import reading
from groupwise.config.load import load_object, with_folder
from groupwise.errors import ConfigError, DataError
from groupwise.tasks.data_source import data_source
from groupwise.tasks.row_formats import as_ours
from groupwise.tasks.tables import csv_rows, parquet_rows, row_of

DATA_SOURCE = "data_source"  # the column that names the source of a row, where there are several
_BUILDER = "one of another kind, or a directory of many, is read by a builder: source: json, args: {data_files: PATH}"


@dataclass(frozen=True, kw_only=True)
class RowCount:
    """Says how many rows a source has, how many of them `filter` passed over, and how many are used.

    `share` is the part of all that is drawn, from 0 to 1; None where a source is drawn as often as it has rows. `whole`
    says that all rows were looked at: a stream's are not, nor those after the last that `limit` admits.
    """

    label: str
    rows: int
    filtered: int
    used: int
    share: float | None = None
    whole: bool = True

    def __str__(self) -> str:
        first = "" if self.whole else "the first "
        parts = [f"{self.label}: {self.used:,} of {first}{self.rows:,} rows"]
        parts += [f"{self.filtered:,} filtered out"] if self.filtered else []
        parts += [f"{self.share:.1%} of what is drawn"] if self.share is not None else []
        return ", ".join(parts)


class Rows:
    """Yields the rows of a source as a run uses them, in our columns, as (id, row). Each iteration reads from the
    start.

    Raises (during iteration):
        DataError: the source cannot be read, a row has wrong columns, `filter` fails, or there are fewer than `sample`
            rows.
        LoadError: a function cannot be loaded.
    """

    def __init__(self, config: RowsConfig, *, folder: str | Path = ".", streaming: bool = False):
        self.config, self._folder, self._streaming = config, Path(folder), streaming
        self._name = config.label if isinstance(config, SourceConfig) else None
        self.label = config.label
        self._rows = self._filtered = 0
        self._whole = False

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        config = self.config
        kept = self._kept()
        if config.sample is None:
            return itertools.islice(kept, config.limit)
        return self._sampled(list(kept), config.sample)

    def count(self, used: int, *, share: float | None = None) -> RowCount:
        """Return the counts of the last iteration, of which `used` rows are used."""
        rows, filtered, whole = self._rows, self._filtered, self._whole
        return RowCount(label=self.label, rows=rows, filtered=filtered, used=used, share=share, whole=whole)

    def empty(self) -> DataError:
        """Return the error to raise where the last iteration had no row."""
        if self._filtered:
            what = f"{self.config.filter} passed over all {self._filtered:,} rows of {self.label}"
            return DataError(what, hint="return true for the rows to keep", field="data.filter")
        return DataError(f"{self.label} has no rows", hint="a dataset needs at least one prompt")

    def _kept(self) -> Iterator[tuple[str, Any]]:
        config, self._rows, self._filtered, self._whole = self.config, 0, 0, False
        keep = None if config.filter is None else load_object(config.filter, folder=self._folder)
        for id, written in read_rows(config, folder=self._folder, streaming=self._streaming):
            if self._name is not None and config.kind != "generated":
                id = f"{self._name}:{id.rpartition(':')[2]}"
            self._rows += 1
            row = as_ours(written, id=id, columns=config.columns, prompt_key=config.prompt_key)
            if keep is not None and not self._passes(keep, row, id):
                self._filtered += 1
                continue
            if self._name is not None and isinstance(row, Mapping):
                row = {**row, DATA_SOURCE: row.get(DATA_SOURCE) or self._name}
            yield id, row
        self._whole = True

    def _passes(self, keep: Callable[[Any], Any], row: Any, id: str) -> bool:
        name = self.config.filter
        try:
            said = keep(row)
        except DataError:
            raise
        except Exception as error:
            held = ", ".join(map(repr, row)) if isinstance(row, Mapping) else f"a {type(row).__name__}"
            message = f"{id}: {name} failed: {type(error).__name__}: {error}; the row is {held or 'empty'}"
            raise DataError(message, field="data.filter") from error
        if isinstance(said, bool) or type(said).__name__ in ("bool_", "bool"):  # numpy's too
            return bool(said)
        message = f"{id}: {name} returned {said!r:.80} ({type(said).__name__}); it must be true or false"
        raise DataError(message, hint="true keeps the row", field="data.filter")

    def _sampled(self, rows: list[tuple[str, Any]], count: float) -> Iterator[tuple[str, Any]]:
        count = int(count if count >= 1 else max(1, count * len(rows)))
        if len(rows) < count:
            raise DataError(
                f"{self.label} has {len(rows)} rows to draw from, and data.sample is {count}",
                hint="lower it, or leave it out",
                field="data.sample",
            )
        chosen = random.Random(f"{self.config.seed or 0}/sample").sample(range(len(rows)), count)
        return (rows[index] for index in sorted(chosen))


def read_rows(config: RowsConfig, *, folder: str | Path = ".", streaming: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield each row of `split` with its id, as it is written. Raises DataError and LoadError."""
    if config.kind == "file":
        return _sliced(_file_rows(config, Path(folder)), config.slice)
    if config.kind == "dataset":
        return _dataset_rows(config, Path(folder), streaming=streaming)
    return (_function_rows if config.kind == "function" else _generated_rows)(config, Path(folder))


def _sliced(rows: Iterator[tuple[str, Any]], ends: tuple[str | None, str | None] | None) -> Iterator[tuple[str, Any]]:
    """Return the rows between two ends as `datasets` counts them: row numbers, percent, or from the end; percent is
    rounded to the nearest row."""
    if ends is None:
        return rows
    if all(end is None or end.isdigit() for end in ends):
        first, last = (None if end is None else int(end) for end in ends)
        return itertools.islice(rows, first, last)
    listed = list(rows)
    first, last = (None if end is None else _row_number(end, len(listed)) for end in ends)
    return iter(listed[first:last])


def _row_number(end: str, count: int) -> int:
    """Return a row number; `-10%` and `-5` count from the end, as Python's slices do.

    >>> _row_number("90%", 11), _row_number("-10%", 20), _row_number("-5", 20)
    (10, -2, -5)
    """
    return round(int(end[:-1]) * count / 100) if end.endswith("%") else int(end)


def _file_rows(config: RowsConfig, folder: Path) -> Iterator[tuple[str, Any]]:
    path = folder / Path(config.origin).expanduser()
    if path.is_dir():
        raise DataError(f"{path.resolve()} is a directory; data.source names a file in it", hint=_BUILDER)
    if not path.is_file():
        beside = [each.name for each in path.parent.glob("*") if each.suffix in FILES and each.is_file()]
        similar = difflib.get_close_matches(path.name, beside, n=1)
        hint = f"did you mean {similar[0]}?" if similar else "a relative path starts at the config file's folder"
        raise DataError(f"there is no file {path.resolve()}", hint=hint)
    return _opened(path)


def _opened(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a file. Raises DataError where this user may not read it."""
    try:
        yield from {".jsonl": _lines, ".json": _json_rows}.get(path.suffix, _table_rows)(path)
    except PermissionError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}", hint=f"let user {os.geteuid()} read it (`ls -l {path}`)"
        ) from None


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield a list of objects, an object with one list of them, or lines after all."""
    try:
        value = json.loads(path.read_bytes())
    except UnicodeDecodeError as error:
        raise DataError(f"{path.name}: not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # a second value after the first
            yield from _lines(path)
            return
        raise DataError(
            f"{path.name}: invalid JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        ) from None
    lists = [each for each in value.values() if isinstance(each, list)] if isinstance(value, dict) else []
    if isinstance(value, dict) and not ({"prompt", "messages"} & value.keys()) and len(lists) == 1:
        value = lists[0]
    if not isinstance(value, list):
        value = [value]  # one line that is a row
    yield from ((f"{path.name}:{index}", row) for index, row in enumerate(value))


def _table_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield a table's rows, as `tables` reads them."""
    import pyarrow

    rows = csv_rows(path) if path.suffix == ".csv" else parquet_rows(path)
    try:
        yield from ((f"{path.name}:{index}", row) for index, row in enumerate(rows))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"cannot read {path}: {error}", hint=f"is it a {path.suffix} file with one table?") from error


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            id = f"{path.name}:{number}"
            if not line.strip():
                continue
            try:
                yield id, json.loads(line.rstrip())
            except UnicodeDecodeError as error:
                raise DataError(f"{id}: not UTF-8 text (byte {error.start} of the line)") from None
            except json.JSONDecodeError as error:
                message = f"{id}: invalid JSON at column {error.colno}: {error.msg}"
                raise DataError(message, hint="each line is one JSON object, without line breaks inside") from None


def _function_rows(config: RowsConfig, folder: Path) -> Iterator[tuple[str, Any]]:
    function = load_object(config.origin, folder=folder)
    try:
        for index, row in enumerate(function(**with_folder(function, config.args, folder))):
            yield f"{config.origin}:{index}", row
    except DataError:
        raise
    except Exception as error:
        arguments = ", ".join(f"{key}={value!r}" for key, value in config.args.items())
        raise DataError(f"{config.origin}({arguments}) failed: {type(error).__name__}: {error}") from error


def _dataset_rows(config: RowsConfig, folder: Path, *, streaming: bool) -> Iterator[tuple[str, Any]]:
    local = folder / Path(config.origin).expanduser()
    if local.is_file():
        raise DataError(
            f"data.source {config.origin!r} is a file that ends with {local.suffix or 'nothing'!r}; files of rows end "
            f"with {', '.join(FILES)}",
            hint=_BUILDER,
        )
    saved = (local / "dataset_info.json").is_file() or (local / "dataset_dict.json").is_file()
    try:
        import datasets  # pandas and pyarrow take a second to import, and most runs read JSON lines

        if saved:
            dataset: Any = datasets.load_from_disk(str(local), **config.args)
        else:
            source = str(local) if local.exists() else config.origin
            with reading(source):
                split = config.split or "train"
                dataset = datasets.load_dataset(source, split=split, streaming=streaming, **config.args)
    except Exception as error:
        hint = "a name on the Hugging Face hub, a directory, or a builder such as csv with args.data_files"
        if isinstance(error, ConnectionError):
            hint = (
                "let this machine reach the hub (HTTPS_PROXY, HF_ENDPOINT, HF_HUB_OFFLINE); or where there is a "
                f"network `hf download --repo-type dataset {config.origin} --local-dir DIR`, and name DIR, brought here"
            )
        message = f"cannot load the dataset {config.origin!r}: {type(error).__name__}: {error}"
        raise DataError(message, hint=hint) from error
    split = (config.split or "train").partition("[")[0] if config.slice else config.split or "train"
    if isinstance(dataset, datasets.DatasetDict):
        if split not in dataset:
            raise DataError(f"{config.origin} has no split {split!r}; it has {', '.join(map(str, dataset))}")
        dataset = dataset[split]
    elif config.split is not None and saved and not (config.slice and split == "train"):
        raise ConfigError(
            f"data.split {config.split!r} does not act: {config.origin} was saved as a single split",
            hint="leave it out, or write a slice of it, as in train[:90%]",
        )
    rows = ((f"{config.origin}:{index}", row_of(row)) for index, row in enumerate(_read(dataset, config.origin)))
    yield from _sliced(rows, config.slice) if saved else rows


def _read(dataset: Iterable[Any], source: str) -> Iterator[Any]:
    """Yield the rows of a dataset; of one that streams, each is fetched now. Raises DataError where that fails."""
    try:
        yield from dataset
    except Exception as error:  # of a network, of a damaged file: datasets raises many
        raise DataError(f"cannot go on reading {source!r}: {type(error).__name__}: {error}") from error


def _generated_rows(config: RowsConfig, folder: Path) -> Iterator[tuple[str, Any]]:
    yield from data_source(config.origin).rows(config)
