"""Lists a module's reward functions: the public functions that it defines itself and that take `completions`."""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from groupwise import rewards
from groupwise.config.load import load_object


def functions_in(module: str, *, folder: str | Path | None = None) -> dict[str, Callable[..., Any]]:
    """Return functions by reference ("module:function"), in the order of the file. Raises LoadError."""
    loaded = _load_module(module, folder)
    return {
        f"{module}:{name}": function
        for name, function in vars(loaded).items()
        if not name.startswith("_")
        and inspect.isfunction(function)
        and function.__module__ == loaded.__name__
        and "completions" in inspect.signature(function).parameters
    }


def built_in() -> Iterator[tuple[str, str]]:
    """Yield (reference, description) of every reward in the package, module by module."""
    for module in sorted(each.name for each in pkgutil.iter_modules(rewards.__path__, f"{rewards.__name__}.")):
        for reference, function in functions_in(module).items():
            yield reference, first_sentence(function)


def first_sentence(function: Callable[..., Any]) -> str:
    """Return the first sentence of the docstring, on one line; empty without one."""
    paragraph = " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=[\w)`]\.)\s(?=[A-Z`])", paragraph, maxsplit=1)[0]


def _load_module(name: str, folder: str | Path | None) -> ModuleType:
    method: Any = load_object(f"{name}:__dir__", folder=folder)  # which every module has
    return method.__self__
