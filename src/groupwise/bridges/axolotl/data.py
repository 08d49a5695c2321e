"""Axolotl's `datasets:` as rows: load each entry, apply its transform, and put them one after another.

A transform is `module.function`, called with the file's configuration, and returns what is done with each row:

    def gsm8k(cfg, *args, **kwargs):
        def row(example, tokenizer=None):
            return {"prompt": [{"role": "user", "content": example["question"]}], "answer": example["answer"]}
        return row, {"remove_columns": ["question"]}

The second value, which may be left out, goes to `datasets.Dataset.map`; `remove_columns` may name columns that are
not there, or be "__all__". A function with a parameter `tokenizer` gets the model's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from groupwise.config.hub import model_path, reading
from groupwise.config.load import load_object
from groupwise.config.yaml import Document
from groupwise.errors import DataError, GroupwiseError, LoadError

if TYPE_CHECKING:
    from datasets import Dataset

Part = Literal["train", "test"]  # of what is read: what is not held out, or what is
BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text", ".arrow": "arrow"}


class Settings(dict[str, Any]):
    """Holds a transform's `cfg`: keys as attributes, None for a missing key."""

    def __getattr__(self, name: str) -> Any:
        value = self.get(name)
        return Settings(value) if isinstance(value, Mapping) else value


def rows(
    *,
    datasets: Sequence[Mapping[str, Any]],
    folder: str = ".",
    cfg: str | None = None,
    overrides: Sequence[str] = (),
    model: str | None = None,
    part: Part | None = None,
    held_out: float = 0.0,
    seed: int = 0,
) -> Iterator[Any]:
    """Yield the rows of all entries, transformed.

    Args:
        datasets: the entries: `path`, and perhaps name, split, type, ds_type, data_files, revision.
        folder: the folder in which paths and the modules of transforms are looked up first.
        cfg: the Axolotl file that transforms get as their configuration, with `overrides`.
        model: the model whose tokenizer the transforms get.
        part: `test` is `held_out` rows (a share below 1, or a number) of an order fixed by `seed`, `train` are the
            others, None is all.

    Raises:
        DataError: an entry cannot be loaded, or its transform fails; names it.
        LoadError: a transform cannot be imported.
    """
    import datasets as library

    settings = _settings(cfg, overrides, folder)
    library.disable_progress_bars()
    try:
        parts = []
        for entry in datasets:
            with reading(entry["path"]):
                parts.append(_load(entry, folder))
        for index, entry in enumerate(datasets):
            parts[index] = _transformed(parts[index], entry, index, folder, settings, model)
        whole = library.concatenate_datasets(parts)
        yield from whole if part is None else _part(whole, part, held_out, seed)
    finally:
        library.enable_progress_bars()


def _settings(cfg: str | None, overrides: Sequence[str], folder: str) -> Settings:
    """Return the file as transforms see it. Raises ConfigError if it is not there."""
    if cfg is None:
        return Settings()
    document = Document.read(Path(folder) / cfg)
    for each in overrides:
        document.override(each, shorthand={})
    return Settings(document.data)


def _part(whole: Dataset, part: Part, held_out: float, seed: int) -> Dataset:
    size = len(whole)
    kept_back = round(held_out * size) if held_out < 1 else int(held_out)
    if not 0 < kept_back < size:
        raise DataError(
            f"val_set_size {held_out} holds out {kept_back} of {size} rows; there must be some on each side"
        )
    span = range(size - kept_back, size) if part == "test" else range(size - kept_back)
    return whole.shuffle(seed=seed).select(span)


def _load(entry: Mapping[str, Any], folder: str) -> Dataset:
    """Return one entry's dataset, before its transform."""
    import datasets as library

    path, split, files = entry["path"], entry.get("split", "train"), entry.get("data_files")
    local = next((each for each in (Path(folder) / path, Path(path)) if each.exists()), None)
    try:
        if local is not None and ((local / "dataset_info.json").is_file() or (local / "dataset_dict.json").is_file()):
            saved = library.load_from_disk(str(local))
            return saved[split] if isinstance(saved, library.DatasetDict) else saved
        builder = entry.get("ds_type") or (BUILDERS.get(local.suffix) if local and local.is_file() else None)
        if builder:
            found = files or str(local or path)
            return library.load_dataset(builder, data_files=_beside(found, folder), split=split)
        more = {key: entry[key] for key in ("revision",) if key in entry}
        return library.load_dataset(str(local or path), entry.get("name"), split=split, data_files=files, **more)
    except Exception as error:
        hint = "a Hugging Face name, a folder, or a .jsonl, .json, .csv or .parquet file beside the configuration"
        raise DataError(f"cannot load the dataset {path!r}: {type(error).__name__}: {error}", hint=hint) from error


def _beside(files: Any, folder: str) -> Any:
    """Return names of files, those that are in `folder` with their whole path."""
    if isinstance(files, str):
        return str(Path(folder) / files) if (Path(folder) / files).exists() else files
    return [_beside(each, folder) for each in files]


def _transformed(
    dataset: Dataset,
    entry: Mapping[str, Any],
    index: int,
    folder: str,
    cfg: Settings,
    model: str | None,
) -> Dataset:
    """Return the dataset after its transform, if it has one."""
    reference = entry.get("type")
    if reference is None:
        return dataset
    function, options = _function(reference, index, folder, cfg)
    if "tokenizer" in inspect.signature(function).parameters:
        function = partial(function, tokenizer=tokenizer_of(model))
    removed = options.get("remove_columns")
    if removed is not None:
        names = dataset.column_names if removed == "__all__" else removed
        options["remove_columns"] = [name for name in names if name in dataset.column_names]
    try:
        return dataset.map(function, load_from_cache_file=False, keep_in_memory=True, **options)
    except GroupwiseError:
        raise
    except Exception as error:
        raise DataError(f"{reference} failed on {entry['path']!r}: {type(error).__name__}: {error}") from error


def _function(reference: str, index: int, folder: str, cfg: Settings) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return what `module.transform` returns: a function of a row, and options of `map`."""
    try:
        transform = load_object(reference, folder=folder)
    except LoadError as error:
        hint = "Axolotl's own types are for preference pairs; for GRPO write a transform beside the file"
        raise LoadError(str(error), hint=hint) from error
    made = transform(cfg, dataset_idx=index) if _takes(transform, "dataset_idx") else transform(cfg)
    function, options = made if isinstance(made, tuple) else (made, {})
    if not callable(function):
        raise DataError(f"{reference} returned a {type(function).__name__}; it must return a function of a row")
    return function, dict(options)


def _takes(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def tokenizer_of(model: str | None) -> Any:
    """Return the tokenizer of a model; None where no model is named."""
    from transformers import AutoTokenizer

    if model is None:
        return None
    with reading(path := model_path(model)):
        return AutoTokenizer.from_pretrained(path)
