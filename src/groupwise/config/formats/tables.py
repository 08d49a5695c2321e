"""The tables of other systems' keys: YAML files in which a format says of each key what becomes of it.

A table is a list. An entry names a key by what becomes of it; `keys.py` says what the five are:

    - {plain: seed, kind: integer, here: seed, default: 42}
    - {made: loss_type, one_of: [grpo, dapo], here: algo.policy_loss, default: dapo, what: the preset of that name}
    - {idle: [bf16, tf32], because: precision follows the device}
    - {absent: use_dora, because: DoRA is not here, instead: use_dora=false, off: [false]}
    - {older: torch_dtype, now: dtype}
    - {include: ../trainer_args/grpo_args, under: "trl.", defaults: {beta: 0.04}}

`kind` says which values a key takes, by the name of a function (`KINDS`, or `module:function`); `default` is what holds
there if nothing is said. `off` are values with which what is absent is not asked for, `instead` the override with which
the file runs; they are [false] and NAME=null unless something else stands there. `include` takes in the keys of another
table, a path from this one's folder: those of `only` if that is given, with `under` before their names, or called as
`names` has it, with other `defaults`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import ruamel.yaml

from groupwise.config.formats import keys
from groupwise.config.formats.keys import Key, Kind

KINDS: Mapping[str, Kind] = {
    "integer": keys.integer,
    "count": keys.count,
    "number": keys.number,
    "boolean": keys.boolean,
    "text": keys.text,
    "texts": keys.texts,
    "words": keys.words,
    "numbers": keys.numbers,
    "mapping": keys.mapping,
    "mappings": keys.mappings,
    "json_object": keys.json_object,
    "flag_or_text": keys.flag_or_text,
    "anything": keys.anything,
}


@cache
def keys_of(table: Path) -> tuple[Key, ...]:
    """Return the keys of a table, in the order of the file."""
    entries = ruamel.yaml.YAML(typ="safe").load(table.read_text("utf-8"))
    return tuple(key for entry in entries for key in _keys(dict(entry), table.parent))


def _keys(entry: dict[str, Any], folder: Path) -> Iterator[Key]:
    """Yield the keys of an entry of a table in `folder`. Raises ValueError for a word that no entry has."""
    fate, name = next(iter(entry.items()))
    del entry[fate]
    if fate == "include":
        yield from _included((folder / f"{name}.yaml").resolve(), **entry)
    elif fate == "idle":
        for each in name if isinstance(name, list) else [name]:
            yield keys.idle(each, entry["because"])
    elif fate == "absent":
        yield _absent(name, **entry)
    elif fate == "older":
        yield keys.older(name, **entry)
    elif fate in ("plain", "made"):
        yield _acting(fate, name, **entry)
    else:
        raise ValueError(f"{fate}: {name} is no entry of a table; valid: plain, made, idle, absent, older, include")


def _acting(
    fate: Any,
    name: str,
    *,
    here: str | Sequence[str] = (),
    kind: str | None = None,
    one_of: list[str] | None = None,
    default: Any = None,
    what: str = "",
) -> Key:
    places = (here,) if isinstance(here, str) else tuple(here)
    return Key(name=name, fate=fate, kind=_kind(kind, one_of), here=places, default=default, what=what)


def _absent(
    name: str, *, because: str, instead: str | None = None, off: list[Any] | None = None, kind: str | None = None
) -> Key:
    return keys.absent(
        name,
        because,
        instead,
        off=(False,) if off is None else off,
        kind=keys.switch if kind is None else _kind(kind, None),
    )


def _kind(name: str | None, words: list[str] | None) -> Kind:
    if words:
        return keys.one_of(*words)
    name = name or "anything"
    module, colon, function = name.partition(":")
    return getattr(importlib.import_module(module), function) if colon else KINDS[name]


def _included(
    table: Path,
    *,
    only: list[str] | None = None,
    under: str = "",
    names: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Iterator[Key]:
    """Yield the keys of another table, as the table that takes them in calls them."""
    keys = [key for key in keys_of(table) if only is None or key.name in only]
    called, other = names or {}, defaults or {}

    def name_of(name: str) -> str:
        return under + called.get(name, name)

    known = {key.name for key in keys}
    if wrong := sorted({*called, *other, *(only or ())} - known):
        raise ValueError(f"{table.name} has no key {wrong[0]}")
    for key in keys:
        instead, now = f"{under}{key.instead}" if key.instead else "", name_of(key.now) if key.now else ""
        default = other.get(key.name, key.default)
        yield replace(key, name=name_of(key.name), instead=instead, now=now, default=default)
