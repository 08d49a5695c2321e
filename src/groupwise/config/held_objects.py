"""Objects that are handed over in Python, as names that a configuration can hold.

A function at the top level of a module has a name that other processes can use too. Any other object (a lambda, what
a function made, an instance, a dataset) is held here, under a name that this process alone understands.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.config.load import GoneError
from groupwise.errors import ConfigError

_held: dict[str, tuple[Any, Callable[..., Any]]] = {}  # name -> what was handed over, the function for it


def __getattr__(name: str) -> Callable[..., Any]:
    if name in _held:
        return _held[name][1]
    if name.startswith("_"):
        raise AttributeError(name)
    message = f"{name!r} was handed over in Python, to a process that has ended"
    raise GoneError(message, hint="run the script that made it again")


@dataclass(frozen=True, kw_only=True)
class Named:
    """The name of an object, `module:function`, with the folder from which the module is imported, and whether only
    this process has the object."""

    name: str
    folder: Path
    only_here: bool


def named(function: Callable[..., Any], *, what: str) -> Named:
    """Return the name of a function. Raises ConfigError for one that is not at the top level of a module."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<object>")
    if module is None or not name.isidentifier():
        hint = "define it at the top level of a module"
        raise ConfigError(f"{what} {name} cannot be found by its name", hint=hint)
    file = getattr(sys.modules.get(module), "__file__", None)
    folder = Path.cwd() if file is None else Path(file).resolve().parents[module.count(".")]
    return Named(name=f"{module}:{name}", folder=folder, only_here=module == "__main__")


def named_or_held(function: Callable[..., Any], *, what: str) -> Named:
    """Return `named`, or, for a function that cannot be found by its name, the name under which it is held here."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", type(function).__qualname__)
    if getattr(sys.modules.get(str(module)), name, None) is function:
        return named(function, what=what)
    return Named(name=held(function, name=name), folder=Path.cwd(), only_here=True)


def held(function: Callable[..., Any], *, name: str, of: Any = None) -> str:
    """Return a reference, made of `name`, by which this process finds `function` as long as it lives. `of` is what was
    handed over, where that is something else: the same gets the same reference.

    The same names in the same order give the same references, so a script that is run again finds its run.
    """
    base = re.sub(r"\W+", "_", name.rpartition(".")[2]).strip("_") or "function"
    base = f"f_{base}" if base[0].isdigit() or base in globals() else base
    free, number = base, 2
    given = function if of is None else of
    while free in _held and _held[free][0] is not given:
        free, number = f"{base}_{number}", number + 1
    _held[free] = (given, function)
    return f"{__name__}:{free}"
