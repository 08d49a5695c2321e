"""What a command is given to read, a file or flags, and where what `groupwise import` makes of it goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from groupwise.config.importers import aitraining
from groupwise.errors import ConfigError, StorageError
from groupwise.run.config_file import LoadedRun, System, read_run, understand
from groupwise.run.native_yaml import native_yaml

SYSTEMS: dict[str, System] = {
    "axolotl": "Axolotl",
    "trl": "TRL",
    "aitraining": "aitraining",
    "prime-rl": "prime-rl",
    "unsloth": "Unsloth",
}


def import_run(arguments: Sequence[str], *, system: str | None = None) -> LoadedRun:
    """Read `FILE [KEY=VALUE]...`, or aitraining's flags. Raises ConfigError."""
    if system is not None and system.lower() not in SYSTEMS:
        raise ConfigError(f"--from {system} is not known; write {', '.join(SYSTEMS)}")
    chosen = SYSTEMS[system.lower()] if system else None
    if chosen == "aitraining" and (not arguments or arguments[0].startswith("-") or "llm" in arguments[:2]):
        return _flags(arguments)
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError("name the file to import", hint="groupwise import axolotl.yaml -o native.yaml")
    loaded = read_run(arguments[0], arguments[1:], system=chosen)
    if loaded.system == "Groupwise":
        raise ConfigError(f"{arguments[0]} is in Groupwise's own words already", hint="groupwise run it as it is")
    return loaded


def read_words(words: Sequence[str]) -> LoadedRun:
    """Read what `run`, `check`, `eval` are given: `FILE [KEY=VALUE]...` or aitraining's flags. Raises ConfigError."""
    if aitraining.is_flags(words):
        return _flags(words)
    if options := [word for word in words if word.startswith("-")]:
        name, _, value = options[0].lstrip("-").partition("=")
        key = name.replace("-", "_")
        hint = f"an override of a file is written {key}={value or 'VALUE'}; aitraining's flags stand without a file"
        raise ConfigError(f"there is no option {options[0]}", hint=hint)
    return read_run(words[0], words[1:])


def _flags(words: Sequence[str]) -> LoadedRun:
    document, overrides = aitraining.flags(words)
    return understand(document, overrides, folder=Path.cwd(), system="aitraining")


def written(loaded: LoadedRun, out: Path | None) -> str:
    """The file's text, which is also written to `out`. Raises ConfigError if that exists, StorageError if it fails."""
    text = native_yaml(loaded, folder=Path.cwd() if out is None else out.parent)
    if out is not None:
        try:
            with out.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise ConfigError(f"{out} exists already", hint="name another file, or remove it first") from None
        except OSError as error:
            raise StorageError.of(error, f"cannot write {out}: {error.strerror or error}") from error
    return text
