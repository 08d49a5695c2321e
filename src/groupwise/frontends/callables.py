"""Functions that are handed over in Python, as names that other processes and a saved configuration can use."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Named:
    """`module:function`, the folder from which the module is imported, and whether only this process has it."""

    name: str
    folder: Path
    only_here: bool


def named(function: Callable[..., Any], *, what: str) -> Named:
    """The name of a function. Raises ConfigError for one that is not at the top level of a module."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<object>")
    if module is None or not name.isidentifier():
        hint = "define it at the top level of a module"
        raise ConfigError(f"{what} {name} cannot be found by its name", hint=hint)
    file = getattr(sys.modules.get(module), "__file__", None)
    folder = Path.cwd() if file is None else Path(file).resolve().parents[module.count(".")]
    return Named(name=f"{module}:{name}", folder=folder, only_here=module == "__main__")
