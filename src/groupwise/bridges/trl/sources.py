"""The rows of a TRL run: those that it reads (`dataset_name`, a mixture in `datasets`, open-r1's `dataset_mixture`) as
`data`, and those that it holds out as `eval.data`. Runs of rewards, of examples and of preferences say them alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.bridges.trainer_args.optimizer_args import Length
from groupwise.bridges.trainer_args.sources import name_apart, source_of
from groupwise.config.data import FILES
from groupwise.config.formats.translation import Translation

OF_A_MIXTURE = ("path", "name", "data_dir", "data_files", "split", "columns")  # keys of one of TRL's `datasets`
OF_OPEN_R1 = ("id", "config", "split", "columns", "weight")  # keys of one of open-r1's


def put_sources(t: Translation) -> None:
    """Put what is read: the rows of a dataset, or a mixture of several."""
    if t.given("datasets", "dataset_mixture"):
        _put_mixture(t)
    else:
        put_dataset(t, "data", "dataset_train_split")
        t.put("data.streaming", t["dataset_streaming"] or None, "dataset_streaming")
        _check_stream(t, "dataset_streaming")


def _check_stream(t: Translation, name: str) -> None:
    """Report a stream without a number of steps: it has no number of rows, of which epochs could be made."""
    if t[name] and (t["max_steps"] or 0) <= 0 and "max_steps" not in t.unread:
        t.problem("max_steps", f"required with {name}: nobody knows how many rows a stream has")


def _put_mixture(t: Translation) -> None:
    """Put TRL's `datasets`, or open-r1's `dataset_mixture`: the rows of all, or a share of those of each."""
    for name in ("dataset_name", "dataset_streaming"):
        if t.given(name):
            t.note_idle(name, "datasets are given, and take its place there too")
    t.unread.pop("dataset_name", None)
    open_r1 = not t.given("datasets")
    name = "dataset_mixture" if open_r1 else "datasets"
    mixture = t[name] if open_r1 else {"datasets": t[name]}
    listed = mixture.get("datasets") if isinstance(mixture, Mapping) else None
    keys = OF_OPEN_R1 if open_r1 else OF_A_MIXTURE
    if not isinstance(listed, list) or not listed or not all(isinstance(each, Mapping) for each in listed):
        t.problem(
            name,
            f"it must be a list of datasets, each with {', '.join(keys)}" if not open_r1 else "datasets is missing",
        )
        return
    seed = mixture.get("seed", 0) if open_r1 else None
    size = mixture.get("test_split_size") if open_r1 else t["test_split_size"]
    sources = [_source(t, name, each, keys, seed) for each in listed]
    streaming = bool(t["streaming"]) and not open_r1
    name_apart(sources)
    if streaming and len(sources) > 1:
        sources = [{**each, "weight": 1.0} for each in sources]
    t.put("data.sources", sources, name)
    if any(each.get("columns") for each in listed):
        t.note_idle(name, "every column is read, and not only those of columns")
    if streaming:
        t.put("data.streaming", True, "streaming")
        _check_stream(t, "streaming")
        if len(sources) > 1:
            t.note_difference("streaming", "equal shares of each source are drawn; there one comes after another")
    if size is not None:
        what = "rows are not held out by chance; cut the sources (split: train[:90%]), and name eval.data"
        t.refuse(
            "test_split_size" if not open_r1 else name,
            what,
            instead="dataset_mixture.test_split_size=null" if open_r1 else None,
        )


def _source(t: Translation, name: str, entry: Mapping[str, Any], keys: Sequence[str], seed: Any) -> dict[str, Any]:
    """Return one of `data.sources`, of an entry of a mixture."""
    for key in entry.keys() - set(keys):
        t.problem(name, f"{key!r} is unknown; the keys of a dataset are {', '.join(keys)}")
    path = entry.get("path", entry.get("id"))
    if not isinstance(path, str) or not path:
        t.problem(name, f"every dataset needs {keys[0]}: a Hugging Face name, a folder or a file of rows")
        return {"source": "FILE.jsonl"}
    args = {"name": entry.get("name", entry.get("config"))} | {
        key: entry.get(key) for key in ("data_dir", "data_files")
    }
    split = entry.get("split", "train")
    source = source_of(path, args=args, split=None if split == "train" else split)
    if (share := entry.get("weight")) is not None and share < 1:
        source |= {"sample": share, "seed": seed}
        t.note_difference(
            name, f"{share:g} of the rows of {path} are drawn by seed {seed}, but not the same rows as there"
        )
    return source


def put_held_out(t: Translation, length: Length) -> bool:
    """Put the rows that are held out, and when they are evaluated. Returns False where nothing is evaluated."""
    if t["eval_strategy"] == "no":
        t.unread.pop("dataset_test_split", None)
        if t.given("eval_steps"):
            t.note_idle("eval_steps", "eval_strategy is no, so nothing is evaluated")
        return False
    if "dataset_test_split" in t.unread:
        t.put("eval.data.source", "FILE.jsonl", "dataset_test_split")
    elif t.given("datasets", "dataset_mixture"):
        t.problem("eval_strategy", "it evaluates on rows of the mixture that are held out; write no, and set eval.data")
    else:
        put_dataset(t, "eval.data", "dataset_test_split")
    every = length.per_epoch if t["eval_strategy"] == "epoch" else length.interval(t["eval_steps"] or 500)
    t.put("eval.every", every, "eval_steps", "eval_strategy")
    return True


def put_dataset(t: Translation, to: str, split: str) -> None:
    """Put the rows of one dataset at `to`: data, or eval.data; `split` is the key that names its part."""
    name = t["dataset_name"]
    if name is None:
        return
    t.put(f"{to}.source", name, "dataset_name")
    if not name.endswith(FILES) or "[" in (t[split] or ""):  # a file has no splits, and slices of its rows
        t.put(f"{to}.split", t[split], split)
    if not name.endswith(FILES):
        t.put(f"{to}.args", {"name": t["dataset_config"]} if t.given("dataset_config") else None, "dataset_config")
