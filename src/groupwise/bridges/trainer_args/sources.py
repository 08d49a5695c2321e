"""Several datasets of another system's file as `data.sources`: each as a source, those that would be called alike by
names of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.config.data import FILES, SourceConfig


def source_of(path: str, *, args: Mapping[str, Any], split: str | None) -> dict[str, Any]:
    """Return one of `data.sources`; of `args` those that are not None, and none of a file, which is read without."""
    source: dict[str, Any] = {"source": path}
    given = {key: value for key, value in args.items() if value is not None}
    if given and not path.endswith(FILES):
        source["args"] = given
    return source if split is None else {**source, "split": split}


def name_apart(sources: Sequence[dict[str, Any]]) -> None:
    """Give sources whose rows would be called alike a name, with their number among all of them."""
    labels = [each.get("name") or SourceConfig(source=each["source"]).label for each in sources]
    for number, (source, label) in enumerate(zip(sources, labels, strict=True)):
        if labels.count(label) > 1:
            source["name"] = f"{label} ({number})"
