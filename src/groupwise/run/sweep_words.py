"""Reads which runs the words of `groupwise run` name: one, or several files, or one with values to go through.

    a.yaml b.yaml train.steps=20                               two runs, each with the override
    a.yaml --sweep seed=0,1,2                                  three
    a.yaml --sweep seed=0,1 --sweep train.learning_rate=1e-5,3e-5      four: every value with every other

Values are written as in an override; a comma within brackets, braces or quotes is part of one:
`--sweep 'rewards=[r:exact],[r:exact,r:short]'`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from groupwise.config.yaml import names_file
from groupwise.errors import ConfigError
from groupwise.run.config_file import LoadedRun
from groupwise.run.importing import read_words


@dataclass(frozen=True, kw_only=True)
class NamedRun:
    """Holds a run that the words name, and a label that tells it from the others: its file and the values that it alone
    has."""

    label: str
    loaded: LoadedRun


def read_runs(words: Sequence[str], sweeps: Sequence[str] = ()) -> list[NamedRun]:
    """Return the runs that `FILE... [KEY=VALUE]...` names, with each value of each of the `sweeps` (KEY=A,B,...); or
    what a system's flags say, with these.

    Raises ConfigError as `importing.read_words`, and for a sweep that is none.
    """
    files, others = [list(words[:1])], list(words[1:])
    if not any(word.startswith("-") for word in words):  # a flag's value may be a word with a dot
        more = [word for word in others if "=" not in word and names_file(word)]
        files += [[word] for word in more]
        others = [word for word in others if word not in more]
    axes = [_axis(text) for text in sweeps]
    if twice := [key for key, count in Counter(key for key, _ in axes).items() if count > 1]:
        raise ConfigError(
            f"--sweep {twice[0]} is there twice", hint=f"name all its values at once: --sweep {twice[0]}=A,B,C"
        )
    stems = _apart([file[0] for file in files]) if len(files) > 1 else [""]
    keys = _short([key for key, _ in axes])
    found = list[NamedRun]()
    for stem, file in zip(stems, files, strict=True):
        for values in itertools.product(*(each for _, each in axes)):
            own = [f"{key}={value}" for (key, _), value in zip(axes, values, strict=True)]
            told = [f"{key}={value}" for key, value in zip(keys, values, strict=True)]
            label = " ".join(filter(None, (stem, *told)))
            found.append(NamedRun(label=label, loaded=read_words([*file, *others, *own])))
    numbers = Counter[str]()
    if len(found) > 1:  # a file that is named twice
        return [NamedRun(label=_numbered(each.label, numbers), loaded=each.loaded) for each in found]
    return found


def _axis(text: str) -> tuple[str, list[str]]:
    """Return the key and the values of KEY=A,B,... Raises ConfigError."""
    key, equals, values = text.partition("=")
    found = _values(values)
    if not (key and equals and all(found)):
        raise ConfigError(
            f"--sweep {text!r} has no values", hint="write KEY=A,B,..., as in --sweep seed=0,1,2; one --sweep a key"
        )
    return key, found


def _values(text: str) -> list[str]:
    """Return the values between commas that stand in no brackets and no quotes; a quote within a word is none."""
    values, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'" and values[-1][-1:] in ("", *" [{(,:"):
            quote = letter
        elif letter in "[{(":
            depth += 1
        elif letter in ")}]":
            depth = max(0, depth - 1)
        elif letter == "," and not depth:
            values.append("")
            continue
        values[-1] += letter
    return [value.strip() for value in values]


def _apart(files: Sequence[str]) -> list[str]:
    """Return the files by their names without what all of them end with, or by their paths where that is the same."""
    stems = [Path(file).stem for file in files]
    return stems if len(set(stems)) == len(set(files)) else [*files]


def _short(keys: Sequence[str]) -> list[str]:
    """Return keys by their last parts, where these differ."""
    last = [key.rpartition(".")[2] for key in keys]
    return last if len(set(last)) == len(keys) else [*keys]


def _numbered(label: str, numbers: Counter[str]) -> str:
    numbers[label] += 1
    return label if numbers[label] == 1 else f"{label} ({numbers[label]})"
