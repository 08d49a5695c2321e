"""Parses TOML 1.0 (https://toml.io) into a mapping and nodes that know their lines, as a YAML file is parsed.

The standard library's `tomllib` reads the values and says no lines. These are found statement by statement: lines are
taken together until they parse by themselves, and what that parses to says which key was written there.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from ruamel.yaml.error import StringMark
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from groupwise.errors import ConfigError

Keys = tuple[str | int, ...]

_MAY_END = re.compile(r"""[]}"']\s*(#|$)""")  # the last line of a value of several: an array, a table or a string


def parse_toml(text: str, *, source: str) -> tuple[dict[str, Any] | None, Node]:
    """Return what the text says, None if nothing, and its nodes. Raises ConfigError, with line and column."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        hint = 'strings are quoted (name = "x"), and tables begin with [name]'
        raise ConfigError(f"malformed TOML in {source}: {error}", hint=hint) from None
    return data or None, _node(data, (), _lines(text), 0)


def _lines(text: str) -> dict[Keys, int]:
    """Return the line, from 0, on which each key or table was written first."""
    lines: dict[Keys, int] = {}
    tables: dict[Keys, int] = {}  # an array of tables -> the index of its last one
    section: Keys = ()
    for line, said in _statements(text):
        stated = tomllib.loads(said)
        header = said.lstrip().startswith("[")
        path = _numbered(_path(stated), tables, new=said.lstrip().startswith("[[")) if header else section
        if header:
            section = path
        for keys in [path] if header else [(*section, *each) for each in _inside(stated)]:
            for end in range(1, len(keys) + 1):
                lines.setdefault(keys[:end], line)
    return lines


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Yield each header or assignment with its first line; comments and empty lines are none."""
    begun: list[str] = []
    first = 0
    for number, line in enumerate(text.splitlines()):
        if not begun:
            first = number
        begun.append(line)
        if len(begun) > 1 and not _MAY_END.search(line):
            continue
        try:
            stated = tomllib.loads("\n".join(begun))
        except tomllib.TOMLDecodeError:
            continue  # a value of several lines
        if stated:
            yield first, "\n".join(begun)
        begun = []


def _path(stated: Mapping[str, Any]) -> Keys:
    """Return the keys of a header: `[a.b]` reads as {a: {b: {}}}, `[[a.b]]` as {a: {b: [{}]}}."""
    keys: Keys = ()
    while stated:
        ((name, inner),) = stated.items()
        keys = (*keys, name)
        stated = inner[0] if isinstance(inner, list) else inner
    return keys


def _numbered(names: Keys, tables: dict[Keys, int], *, new: bool) -> Keys:
    """Return a header's keys with the indices of the arrays of tables on its way; `new` begins another table of the
    last."""
    keys: Keys = ()
    for depth, name in enumerate(names):
        keys = (*keys, name)
        if new and depth == len(names) - 1:
            tables[keys] = tables.get(keys, -1) + 1
        if keys in tables:
            keys = (*keys, tables[keys])
    return keys


def _inside(value: Any) -> Iterator[Keys]:
    """Yield the keys of all that an assignment says."""
    held = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in held:
        yield (key,)
        yield from ((key, *keys) for keys in _inside(inner))


def _node(value: Any, keys: Keys, lines: Mapping[Keys, int], around: int) -> Node:
    """Return the nodes of a value; what has no line of its own has that of the section around it."""
    line = lines.get(keys, around)
    mark = StringMark("", 0, line, 0, "", 0)
    if isinstance(value, Mapping):
        pairs = [
            (
                ScalarNode("", name, StringMark("", 0, lines.get((*keys, name), line), 0, "", 0)),
                _node(each, (*keys, name), lines, line),
            )
            for name, each in value.items()
        ]
        return MappingNode("", pairs, mark)
    if isinstance(value, list):
        return SequenceNode("", [_node(each, (*keys, i), lines, line) for i, each in enumerate(value)], mark)
    return ScalarNode("", str(value), mark)
