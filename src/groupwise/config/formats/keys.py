"""The keys of another system: what may stand there, what it is when nothing does, and what becomes of it here.

The tables are YAML files (`config.formats.tables`). There are five things that can become of a key:

    plain     its value is the value of one of our keys
    made      the translation makes something of it, often together with others
    idle      it says how to reach on their machinery what is reached here anyway: accepted, and listed by `check`
    absent    it asks for something that is not here: the file is read and explained, but not run; `instead` is the
              override with which it is. Some values do not ask for it (`off`) and are nothing to speak of
    older     it is what an earlier version of the system called the key `now`, and is read as that

A name is dotted as its users write it; `datasets[].path` is a key of each entry of a list.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Unread:
    """An argument whose value is known only when a script runs: why, and the override that says it."""

    why: str
    instead: str


Kind = Callable[[Any], Any]  # a value as it was written -> as it is meant; raises ValueError saying what it must be

Fate = Literal["plain", "made", "idle", "absent", "older"]


@dataclass(frozen=True, kw_only=True)
class Key:
    """Says what becomes of a key of another trainer's configuration. `what` is a clause for the documentation and for
    messages: how the key is translated, or why it has no effect."""

    name: str
    fate: Fate
    what: str
    kind: Kind
    here: tuple[str, ...] = ()
    default: Any = None
    off: tuple[Any, ...] = ()
    instead: str = ""
    now: str = ""


# ---- kinds ----
def integer(value: Any) -> int:
    """Return a whole number; YAML 1.1 and flags give some as text."""
    try:
        whole = int(value) if isinstance(value, str) else value
    except ValueError:
        whole = None
    if isinstance(whole, float) and whole.is_integer():
        whole = int(whole)
    if isinstance(whole, bool) or not isinstance(whole, int):
        raise ValueError("a whole number")
    return whole


def count(value: Any) -> int:
    """Return a whole number of 1 or more."""
    try:
        counted = integer(value)
    except ValueError:
        counted = 0
    if counted < 1:
        raise ValueError("a whole number, 1 or more")
    return counted


def number(value: Any) -> float:
    """Return a number; PyYAML reads 1e-5 as text, so files that were written for it may quote it."""
    try:
        read = float(value) if isinstance(value, str) else value
    except ValueError:
        read = None
    if isinstance(read, bool) or not isinstance(read, int | float):
        raise ValueError("a number")
    return read


def boolean(value: Any) -> bool:
    """Return a boolean of true, false, or YAML 1.1's words for them: yes, no, on, off. Raises ValueError."""
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    read = words.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(read, bool):
        raise ValueError("true or false")
    return read


def text(value: Any) -> str:
    """Return a string that is not empty."""
    if not isinstance(value, str) or not value:
        raise ValueError("a string")
    return value


def texts(value: Any) -> list[str]:
    """Return a list of strings."""
    if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
        raise ValueError("a list of strings")
    return value


def words(value: Any) -> list[str]:
    """Return a list of strings; one may stand alone."""
    return [value] if isinstance(value, str) else texts(value)


def numbers(value: Any) -> list[float]:
    """Return a list of numbers."""
    if not isinstance(value, list):
        raise ValueError("a list of numbers")
    return [number(each) for each in value]


def mapping(value: Any) -> dict[str, Any]:
    """Return a mapping."""
    if not isinstance(value, Mapping):
        raise ValueError("a mapping")
    return dict(value)


def mappings(value: Any) -> list[dict[str, Any]]:
    """Return a list of mappings; null stands for an entry that was taken away on the command line."""
    if not isinstance(value, list) or not all(isinstance(each, Mapping | None) for each in value):
        raise ValueError("a list of mappings")
    return [{} if each is None else dict(each) for each in value]


def json_object(value: Any) -> dict[str, Any]:
    """Return a JSON object as text, or a mapping."""
    if isinstance(value, Mapping):
        return dict(value)
    wanted = """a JSON object, as in '{"difficulty": "hard"}'"""
    try:
        read = json.loads(value)
    except TypeError:
        raise ValueError(wanted) from None
    except ValueError as error:
        raise ValueError(f"{wanted}; {error}") from None
    if not isinstance(read, dict):
        raise ValueError(wanted)
    return read


def anything(value: Any) -> Any:
    """Return any value unchanged."""
    return value


def flag_or_text(value: Any) -> Any:
    """Accept true, false, or a word such as `auto`."""
    read = switch(value)
    return read if isinstance(read, bool) else text(read)


def switch(value: Any) -> Any:
    """Return what stands there, with yes, no, on and off as YAML 1.1 reads them."""
    try:
        return boolean(value)
    except ValueError:
        return value


def one_of(*words: str) -> Kind:
    """Return one of some words."""

    def choice(value: Any) -> str:
        if value not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return value

    return choice


# ---- keys that do not act ----
def idle(name: str, because: str) -> Key:
    """Accepted without effect."""
    return Key(name=name, fate="idle", kind=anything, what=because)


def older(name: str, now: str) -> Key:
    """Return the name that the key `now` had in an earlier version."""
    return Key(name=name, fate="older", kind=anything, what=f"{now}, by its older name", now=now)


def absent(
    name: str, because: str, instead: str | None = None, *, off: Iterable[Any] = (False,), kind: Kind = switch
) -> Key:
    """Return a key that Groupwise does not have, which is refused unless it is off. `instead` is by default its
    removal; "" if no change makes the file run."""
    instead = f"{name}=null" if instead is None else instead
    return Key(name=name, fate="absent", kind=kind, what=because, off=tuple(off), instead=instead)
