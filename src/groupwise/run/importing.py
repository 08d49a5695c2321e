"""Reads what a command is given, a file or flags, and writes the configuration that `groupwise import` makes of it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from groupwise.config.formats.format import ConfigFormat, config_formats, format_named
from groupwise.config.formats.known_elsewhere import known_elsewhere
from groupwise.config.other_names import OTHER_NAMES
from groupwise.config.run import RunConfig
from groupwise.config.yaml import key_paths, names_file, parse_keys, suggest_key
from groupwise.errors import ConfigError, DataError
from groupwise.run.config_file import GROUPWISE, LoadedRun, read_run, understand
from groupwise.run.native_yaml import native_yaml
from groupwise.store import files
from groupwise.store.locate import find_run
from groupwise.store.rundir import CONFIG


def import_run(arguments: Sequence[str], *, system: str | None = None) -> LoadedRun:
    """Read `FILE [KEY=VALUE]...`, or flags of a system that has some. Raises ConfigError."""
    chosen = None if system is None else format_named(system)
    no_file = not arguments or arguments[0].startswith("-")
    if chosen is not None and chosen.flags is not None and (no_file or chosen.is_flags(arguments)):
        return _of_flags(chosen, arguments)
    if no_file:
        raise ConfigError("name the file to import", hint="groupwise import axolotl.yaml -o native.yaml")
    loaded = read_run(arguments[0], arguments[1:], system=None if chosen is None else chosen.name)
    if loaded.system == GROUPWISE:
        raise ConfigError(f"{arguments[0]} is in Groupwise's own words already", hint="groupwise run it as it is")
    return loaded


def read_words(words: Sequence[str]) -> LoadedRun:
    """Read what `run`, `check`, `eval` are given: `FILE [KEY=VALUE]...` or a system's flags. Raises ConfigError."""
    options = [word for word in words if word.startswith("-")]
    if not (words and Path(words[0]).suffix) or options:  # a file's name comes first: no format need be asked
        for each in config_formats():
            if each.is_flags(words):
                return _of_flags(each, words)
    if options:
        name, _, value = options[0].lstrip("-").partition("=")
        behind = words[words.index(options[0]) + 1 :]
        if not value and behind and not behind[0].startswith("-") and "=" not in behind[0]:
            value = behind[0]  # as in --seed 3
        key = name.replace("-", "_")
        keys = parse_keys(key) or (key,)
        hint = f"an override of a file is written {key}={value or 'VALUE'}; aitraining's flags stand without a file"
        if tuple(each for each in keys if isinstance(each, str)) not in set(key_paths(RunConfig)):
            meant = suggest_key(
                keys, f"={value or 'VALUE'}", model=RunConfig, other_names=OTHER_NAMES, elsewhere=known_elsewhere
            )
            hint = f"an override of a file is written KEY=VALUE (aitraining's flags stand without a file): {meant}"
        raise ConfigError(f"there is no option {options[0]}", hint=hint)
    return read_run(_file(words[0]), words[1:])


def _file(text: str) -> Path:
    """Return the file that is meant; where `text` names a run, its configuration."""
    if names_file(text):
        return Path(text)
    try:
        run = find_run(text)
    except DataError:
        return Path(text)
    warnings.warn(f"{text} is no file: this is by the configuration of the run {run}", stacklevel=2)
    return run / CONFIG


def _of_flags(written: ConfigFormat, words: Sequence[str]) -> LoadedRun:
    assert written.flags is not None
    document, overrides = written.flags(words)
    return understand(document, overrides, folder=Path.cwd(), system=written.name)


def written(loaded: LoadedRun, out: Path | None) -> str:
    """Return the file's text, which is also written to `out`. Raises ConfigError if that exists, StorageError if it
    fails."""
    text = native_yaml(loaded, folder=Path.cwd() if out is None else out.parent)
    if out is not None:
        files.write_new(out, text)
    return text
