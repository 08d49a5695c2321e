"""A run that was read in another system's words, as a file of ours, with a remark on where each value came from."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from groupwise.config.yaml import inline
from groupwise.run.config_file import MISSING, LoadedRun


def native_yaml(loaded: LoadedRun, *, folder: Path) -> str:
    """Return the file, for a directory `folder`. It loads as the same run; what is not here is said at its head."""
    values = _ordered(loaded.document.data, loaded.config.model_dump())
    source = Path(values.pop("folder", "."))
    lines = [f"# From {loaded.document.name or 'flags'}, which is in {loaded.system}'s words.", *_notes(loaded)]
    if source.resolve() != folder.resolve():
        values = {"folder": os.path.relpath(source, folder)} | values
    for keys in (("data", "source"), ("rewards",)):
        if loaded.document.origin(keys) == MISSING:
            lines.append(f"# {keys[0]}: to be said before this can run")
            section: Any = values[keys[0]] if len(keys) > 1 else {}
            section.pop(keys[-1], None)
            if not section:  # else it says something else, too
                del values[keys[0]]
    lines += _section(loaded, values, ())
    return "\n".join(lines) + "\n"


def _ordered(values: Mapping[str, Any], like: Any) -> dict[str, Any]:
    """Return the values with the keys of each section in the order of the configuration's fields."""
    keys = [key for key in like or values if key in values]
    sections = {key for key in keys if isinstance(values[key], Mapping) and key != "args"}
    return {key: _ordered(values[key], (like or {}).get(key)) if key in sections else values[key] for key in keys}


def _notes(loaded: LoadedRun) -> Iterator[str]:
    for title, notes in (
        ("Not here, so this run is without", loaded.refused),
        ("Otherwise than there", loaded.differs),
        ("Without effect here", loaded.idle),
    ):
        if notes:
            yield "#"
            yield f"# {title}:"
            yield from (f"#   {note}" for note in notes)


def _section(loaded: LoadedRun, section: Mapping[str, Any], path: tuple[str | int, ...]) -> Iterator[str]:
    """Yield the lines of a section, each value with its origin."""
    indent = "  " * len(path)
    if not path:
        yield ""
    for key, value in section.items():
        keys = (*path, key)
        origin = loaded.document.origin(keys)
        remark = f"  # {origin}" if origin else ""
        if isinstance(value, Mapping) and value and key != "args":
            yield f"{indent}{key}:"
            yield from _section(loaded, value, keys)
        elif isinstance(value, list) and value and any(isinstance(each, Mapping) for each in value):
            yield f"{indent}{key}:{remark}"
            yield from (f"{indent}  - {inline(each)}" for each in value)
        else:
            yield f"{indent}{key}: {inline(value)}{remark}"
