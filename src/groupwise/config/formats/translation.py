"""The base of all formats: a table of keys, and a translation that records where every value came from.

A `Translation` reads the document against the system's table of keys: unknown keys and wrong values are problems, what
is idle or absent is noted, plain keys are copied. The system's module then reads the rest by name and puts what it
makes of it into the draft; `finish` validates that as a RunConfig, with errors that point into the user's file.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from groupwise.config.formats.keys import Key, Unread
from groupwise.config.run import RunConfig, validated
from groupwise.config.yaml import Document, Keys, dotted, parse_keys, problems_error
from groupwise.types import BASE

MISSING = "missing"  # the origin of what a run needs and a file does not say


@dataclass(frozen=True, kw_only=True)
class Note:
    """A note for the user about a key: `place` is the key with its file and line."""

    place: str
    text: str
    instead: str = ""  # of what is absent: the override without it

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


def run_name(said: str) -> str:
    """Return a run's and adapter's name from the name of a file or project."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", said).strip("-._")[:64]
    return "run" if name in ("", BASE) else name


@dataclass(frozen=True)
class Draft(Document):
    """The configuration that is being made; `origins` say by dotted key what its values were made of."""

    origins: dict[str, str] = field(default_factory=dict)

    def origin(self, keys: Keys) -> str:
        for end in range(len(keys), 0, -1):
            if any(assigned == keys[:end] for assigned, _ in self.overrides):
                return super().origin(keys)
            if (origin := self.origins.get(dotted(keys[:end]))) is not None:
                return origin
        return ""


def _name(keys: Keys) -> Keys:
    """Return where a value stands, whichever entry of a list it is of."""
    return tuple("[]" if isinstance(key, int) else key for key in keys)


class Translation:
    """See the module. `values` are what is given, by name; `t[name]` is that or the system's default."""

    def __init__(self, document: Document, *, system: str, keys: Iterable[Key]):
        self.document, self.system = document, system
        self.keys = {key.name: key for key in keys}
        self._sections = {name[: dot + 1] for name in self.keys for dot, sign in enumerate(name) if sign == "."}
        self.values: dict[str, Any] = {}
        self.draft = Draft({}, document.name)
        self.idle: list[Note] = []
        self.differs: list[Note] = []
        self.refused: list[Note] = []
        self.problems: list[str] = []
        self.unread: dict[str, Unread] = {}  # what a script says in a way that is not read
        self._paths: dict[str, Keys] = {}
        self._read(document.data, (), "")
        for key in self.keys.values():
            if key.fate == "plain":
                self.put(key.here[0], self[key.name], key.name)

    # ---- what the file says ----

    def given(self, *names: str) -> bool:
        """Return whether one of these has a value in the file or on the command line."""
        return any(name in self.values for name in names)

    def __getitem__(self, name: str) -> Any:
        return self.values[name] if name in self.values else self.keys[name].default

    def place(self, name: str) -> str:
        """ "trl.beta (a.yaml:12)"."""
        keys = self.written_at(name)
        return dotted(keys) + (self.document.where(keys) if name in self._paths else "")

    def written_at(self, name: str) -> Keys:
        """Return the keys under which this stands in the file, which may be an older name."""
        return self._paths.get(name, parse_keys(name))

    def stand_in(self, name: str, other: str) -> None:
        """Let `other` stand in for `name`, if only `other` is given."""
        if self.given(other) and not self.given(name):
            self.values[name], self._paths[name] = self.values[other], self._paths[other]

    # ---- what becomes of it ----

    def clear(self, to: str, *names: str, origin: str = "") -> None:
        """Set our key `to` to null."""
        self.put(to, "", *names, origin=origin)
        *sections, last = to.split(".")
        target = self.draft.data
        for section in sections:
            target = target[section]
        target[last] = None

    def drop(self, section: str) -> None:
        """Leave out what was put under a key at the top level."""
        del self.draft.data[section]
        for key in [key for key in self.draft.origins if f"{key}.".startswith(f"{section}.")]:
            del self.draft.origins[key]

    def put(self, to: str, value: Any, *names: str, origin: str = "") -> None:
        """Set our key `to`, made of the keys `names`; None leaves our default alone."""
        if value is None:
            return
        *sections, last = to.split(".")
        target = self.draft.data
        for section in sections:
            target = target.setdefault(section, {})
        target[last] = value
        paths = [self._paths[name] for name in names if name in self._paths]
        said = [f"{dotted(path)} {self.document.origin(path)}".strip() for path in paths]
        default = f"{self.system}'s default" + (f" of {names[0]}" if names else "")
        self.draft.origins[to] = origin or ", ".join(said) or default

    def note_idle(self, name: str, why: str) -> None:
        """Accepted without effect."""
        self.idle.append(Note(place=self.place(name), text=why))

    def note_difference(self, name: str, what: str) -> None:
        """Note that an option acts otherwise here than there, which is said before every run."""
        self.differs.append(Note(place=self.place(name), text=what))

    def refuse(self, name: str, why: str, *, instead: str | None = None) -> None:
        """Refuse a key that Groupwise does not have. `instead` is the override that makes the run work; by default the
        removal."""
        keys = self.written_at(name)
        instead = f"{dotted(keys)}=null" if instead is None else instead
        self.refused.append(Note(place=self.place(name), text=why, instead=instead))

    def leaves_open(self, section: str) -> bool:
        """Return whether a script says this part of a run in a way that is not read."""
        return any(here.partition(".")[0] == section for name in self.unread for here in self.keys[name].here)

    def refuse_unread(self) -> None:
        """Refuse what a script says in a way that is not read, unless an override in our words says it."""
        for name, unread in self.unread.items():
            key = self.keys[name]
            places = {unread.instead.partition("=")[0], *(key.here if len(key.here) == 1 else ())}
            said = [dotted(assigned) for assigned, _ in self.draft.overrides]
            if not any(
                f"{place}.".startswith(f"{each}.") or each.startswith(place) for place in places for each in said
            ):
                self.refuse(name, unread.why, instead=unread.instead)

    def problem(self, name: str, message: str) -> None:
        """Record that the file cannot be read as anything."""
        self.problems.append(f"{self.place(name)}: {message}")

    def finish(self) -> RunConfig:
        """Return the configuration. Raises ConfigError with every problem."""
        self.raise_problems()
        return validated(self.draft)

    def raise_problems(self) -> None:
        """Raise ConfigError if there are problems."""
        if self.problems:
            raise problems_error(self.document, self.problems)

    # ---- reading ----

    def _read(self, section: Mapping[Any, Any], path: Keys, pattern: str) -> None:
        """Read every key of a section, whose keys' names begin with `pattern`."""
        for name, value in section.items():
            keys, known = (*path, name), f"{pattern}{name}"
            place = dotted(keys) + self.document.where(keys)
            if known in self.keys and value is not None:
                self._take_under(known, keys, value)
            inside, entries = f"{known}." in self._sections, f"{known}[]." in self._sections
            if value is not None and inside:
                if isinstance(value, Mapping):
                    self._read(value, keys, f"{known}.")
                else:
                    self.problems.append(f"{place}: {value!r} is not valid; it must be a mapping")
            if value is not None and entries:
                if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
                    for index, each in enumerate(value):
                        self._read(each, (*keys, index), f"{known}[].")
                else:
                    self.problems.append(f"{place}: {value!r} is not valid; it must be a list of mappings")
            if not (known in self.keys or inside or entries):
                self.problems.append(f"{place}: unknown; {self._suggest(known)}")

    def _take_under(self, name: str, keys: Keys, value: Any) -> None:
        """Take a value that is given under a key's name, or the name that it had in an older version."""
        key = self.keys[name]
        key = self.keys[key.now] if key.now else key
        other = self._paths.get(key.name)
        if other is not None and _name(other) != _name(keys):  # under both: what an override says holds
            if any(other == said for said, _ in self.document.overrides):
                return
            if not any(keys == said for said, _ in self.document.overrides):
                self.problem(key.name, f"{dotted(keys)} says the same under another name; write one of them")
        self._paths[key.name] = keys
        self._take(key, keys, value)

    def _take(self, key: Key, keys: Keys, value: Any) -> None:
        if isinstance(value, Unread):
            if key.fate == "idle":
                self.note_idle(key.name, key.what)
            else:
                self.unread[key.name] = value
            return
        try:
            value = key.kind(value)
        except ValueError as error:
            place = dotted(keys) + self.document.where(keys)
            self.problems.append(f"{place}: {value!r} is not valid; it must be {error}")
            return
        self.values[key.name] = value
        if key.fate == "idle":
            self.note_idle(key.name, key.what)
        elif key.fate == "absent" and value not in key.off:
            self.refuse(key.name, key.what, instead=None if "[]" in key.name else key.instead)

    def _suggest(self, known: str) -> str:
        """Return the key that was probably meant: the same name in another section, else a similar name in the same
        section, else a similar name anywhere."""
        section, _, last = known.rpartition(".")
        names = list(self.keys) + [name.partition(".")[0].removesuffix("[]") for name in self.keys if "." in name]
        elsewhere = {name.rpartition(".")[2]: name for name in reversed(names)}
        beside = {name.rpartition(".")[2]: name for name in names if name.rpartition(".")[0] == section}
        if last in elsewhere:
            return f"did you mean {elsewhere[last]}?"
        if similar := difflib.get_close_matches(last, beside, n=1):
            return f"did you mean {beside[similar[0]]}?"
        if similar := difflib.get_close_matches(last, elsewhere, n=1, cutoff=0.75):
            return f"did you mean {elsewhere[similar[0]]}?"
        if not section and last in RunConfig.model_fields:
            return f"it is a key of Groupwise's own files; give it on the command line, as in {last}.KEY=VALUE"
        return f"no such key of {self.system} is known here (docs/migrating.md has those of Groupwise's own formats)"
