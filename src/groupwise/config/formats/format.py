"""The protocol of a configuration format: how a file in another system's words is recognised and becomes a run.

    FORMAT = ConfigFormat(
        name="MyTrainer",
        recognises=lambda data: "my_trainer" in data,
        table=Path(__file__).with_name("keys.yaml"),
        translate=translate,  # (document, folder=..., count=...) -> Translation
    )

A package makes one known by an entry point of the group `groupwise.config_formats`. The formats of Axolotl, TRL,
aitraining, prime-rl and Unsloth in `bridges` are five of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from groupwise.config.formats.keys import Key
from groupwise.config.formats.tables import keys_of
from groupwise.errors import ConfigError
from groupwise.extensions import extensions

if TYPE_CHECKING:
    from ruamel.yaml.nodes import Node

    from groupwise.config.formats.translation import Translation
    from groupwise.config.yaml import Document

Count = Callable[["Translation"], "int | None"]


class Translate(Protocol):
    """Translates a document, of a file in `folder`, into a run; `count` counts the prompts of a translation's data and
    returns None while the data is not known."""

    def __call__(self, document: Document, /, *, folder: Path, count: Count) -> Translation: ...


class Parse(Protocol):
    """Parses a file's text into a mapping (None where it is empty) and nodes that know their lines; `source` is the
    file's name for errors. Raises ConfigError."""

    def __call__(self, text: str, /, *, source: str) -> tuple[dict[str, Any] | None, Node]: ...


@dataclass(frozen=True, kw_only=True)
class ConfigFormat:
    """A format of run configurations.

    Args:
        name: the system's name, as messages, `check` and `groupwise import --from` (in lower case) have it.
        recognises: whether a document is in this format; asked of the formats by `order`, least first.
        table: the file of the system's keys (`config.formats.tables`). Overrides with these names are applied to the
            document before it is translated.
        shares_keys: whether its files, too, have `data` or `rewards` at the top level, which else mean ours.
        parse: readers of files with other endings than .yaml, .json and .toml, by ending.
        flags: a command line in the system's flags -> the document and the overrides; None where it has no flags.
            Raises ConfigError.
        is_flags: whether a command line is in the system's flags, and not a file with overrides.
        complete: adds what a run needs and the translation has not found; returns whether it has seen to that.
    """

    name: str
    recognises: Callable[[Mapping[str, Any]], bool]
    table: Path
    translate: Translate
    order: int = 50
    shares_keys: bool = False
    parse: Mapping[str, Parse] = field(default_factory=dict)
    flags: Callable[[Sequence[str]], tuple[Document, list[str]]] | None = None
    is_flags: Callable[[Sequence[str]], bool] = lambda words: False
    complete: Callable[[Translation], bool] = lambda translation: False

    @property
    def keys(self) -> tuple[Key, ...]:
        """Return the system's keys, in the order of the table."""
        return keys_of(self.table)


def config_formats() -> list[ConfigFormat]:
    """Return all formats that are installed, in the order in which they are asked."""
    return sorted(extensions("groupwise.config_formats").values(), key=lambda each: each.order)


def format_named(name: str) -> ConfigFormat:
    """Return the format of this name, in any case. Raises ConfigError where none is installed."""
    known = {each.name.lower(): each for each in config_formats()}
    if name.lower() not in known:
        raise ConfigError(f"the format {name} is not known; write {', '.join(sorted(known))}")
    return known[name.lower()]


def parser_of(suffix: str) -> Parse | None:
    """Return how a file with this ending is read by the format that reads such files; None where none does."""
    return next((each.parse[suffix] for each in config_formats() if suffix in each.parse), None)
