"""Import user code (rewards, environments, data) that a configuration names as `module:attribute` or by its file.

A file is `path/to/file.py:attribute`; a relative path begins at `folder`.

`folder` (a config file's folder; for a file, the file's own) is first on the import path while the module is imported,
and only then. So a module there wins over an installed one of the same name, for this call only. Import neighbouring
modules at the top of the module.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from groupwise.errors import LoadError

# What configurations named before its module had another place.
MOVED = {
    "groupwise.rewards.judge:group_judge": "groupwise.rewards.group_judge:group_judge",
    "groupwise.tasks.compat.others:OpenEnvironment": "groupwise.bridges.openenv:OpenEnvironment",
    "groupwise.tasks.compat.others:VerifiersAgent": "groupwise.bridges.verifiers.before_0_4:VerifiersAgent",
    "groupwise.tasks.compat.trl:RolloutFunc": "groupwise.bridges.trl.rollout_func:RolloutFunc",
    "groupwise.tasks.compat.trl:TrlEnvironment": "groupwise.bridges.trl.environment:TrlEnvironment",
    "groupwise.tasks.compat.rollout_func:RolloutFunc": "groupwise.bridges.trl.rollout_func:RolloutFunc",
    "groupwise.tasks.compat.openenv:OpenEnvironment": "groupwise.bridges.openenv:OpenEnvironment",
    "groupwise.tasks.compat.verifiers:TasksetAgent": "groupwise.bridges.verifiers.tasksets:TasksetAgent",
    "groupwise.tasks.compat.verifiers_before_0_4:VerifiersAgent": (
        "groupwise.bridges.verifiers.before_0_4:VerifiersAgent"
    ),
    "groupwise.tasks.compat.reasoning_gym_reward:score_answer": "groupwise.bridges.reasoning_gym.reward:score_answer",
    "groupwise.sdk.cookbook_config:rows": "groupwise.bridges.cookbook.config:rows",
    "groupwise.sdk.cookbook_config:ground_truth": "groupwise.bridges.cookbook.config:ground_truth",
    "groupwise.sdk.cookbook_config:by_row": "groupwise.bridges.cookbook.config:by_row",
    "groupwise.config.importers.axolotl_data:rows": "groupwise.bridges.axolotl.data:rows",
}
_IMPORTING = threading.RLock()  # the import path is the process's


class GoneError(AttributeError):
    """Error of a module's `__getattr__` for a name that the module held in another process. To code that only asks
    whether the name is there (torch's compiler asks every module for `torch`) it says no, as any AttributeError."""

    def __init__(self, message: str, *, hint: str):
        super().__init__(message)
        self.hint = hint


def load_object(reference: str, *, folder: str | Path | None = None) -> Callable[..., Any]:
    """Return the function or class that `module:attribute`, `package.module.attribute` or `path/to/file.py:attribute`
    names.

    Raises LoadError: the reference is malformed, the module is not found or fails to import (with file and line), it
    has no such attribute, or the attribute is not callable.
    """
    reference = MOVED.get(reference, reference)
    module_name, colon, attributes = reference.rpartition(":")
    if not colon:
        module_name, _, attributes = reference.rpartition(".")
    of_file = bool(colon) and module_name.endswith(".py")
    names = [*([] if of_file else module_name.split(".")), *attributes.split(".")]
    if not all(name.isidentifier() for name in names) or attributes == "py":
        hint = "name the function too, as in my_rewards.py:exact" if reference.endswith(".py") else None
        raise LoadError(f"{reference!r} is not a reference; write module:function, as in my_rewards:exact", hint=hint)
    if of_file:
        path = _file(module_name, reference, folder)
        module_name, folder = path.stem, path.parent
    with _IMPORTING, first_on_path(module_name.partition(".")[0], folder):
        target: Any = _import(module_name, reference, folder)
    for name in attributes.split("."):
        try:
            target = getattr(target, name)
        except GoneError as gone:
            raise LoadError(str(gone), hint=gone.hint) from None
        except AttributeError:
            raise LoadError(_missing(target, name, reference)) from None
    if not callable(target):
        raise LoadError(f"{reference!r} is a {type(target).__name__}; it must be a function or a class")
    return target


def with_folder(made: Callable[..., Any], args: Mapping[str, Any], folder: str | Path | None) -> dict[str, Any]:
    """Return `args`, with `folder` if the function has a parameter of that name, because it loads files itself."""
    try:
        takes = "folder" in inspect.signature(made).parameters
    except ValueError:  # no signature to look at
        takes = False
    return {"folder": str(folder), **args} if takes and folder is not None else dict(args)


def _file(name: str, reference: str, folder: str | Path | None) -> Path:
    path = (Path(folder or ".") / Path(name).expanduser()).resolve()
    if not path.is_file():
        beside = [each.name for each in path.parent.glob("*.py") if each.is_file()]
        similar = difflib.get_close_matches(path.name, beside, n=1)
        hint = f"did you mean {similar[0]}?" if similar else "a relative path starts at the config file's folder"
        raise LoadError(f"cannot load {reference!r}: there is no file {path}", hint=hint)
    return path


@contextmanager
def first_on_path(package: str, folder: str | Path | None) -> Iterator[None]:
    """Import `package` from `folder` where it is there, even if another of that name is already imported."""
    if folder is None:
        yield
        return
    root = Path(folder).resolve()
    here = (root / f"{package}.py").is_file() or (root / package).is_dir()
    origin = getattr(sys.modules.get(package), "__file__", None)
    mine = {(root / f"{package}.py").resolve(), (root / package / "__init__.py").resolve()}
    others = {}
    if here and package in sys.modules and (origin is None or Path(origin).resolve() not in mine):
        others = {name: sys.modules.pop(name) for name in list(sys.modules) if f"{name}.".startswith(f"{package}.")}
    sys.path.insert(0, str(root))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(root))
        sys.modules.update(others)


def _import(name: str, reference: str, folder: str | Path | None) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise LoadError(_not_found(name, reference, folder)) from None
        raise LoadError(
            f"cannot load {reference!r}: {_place(error)} imports {error.name!r}, which is missing"
        ) from error
    except SyntaxError as error:
        place = f"{error.filename}:{error.lineno}"
        raise LoadError(f"cannot load {reference!r}: syntax error at {place}: {error.msg}") from None
    except (Exception, SystemExit) as error:
        raise LoadError(f"cannot load {reference!r}: {_place(error)}: {type(error).__name__}: {error}") from error


def _place(error: BaseException) -> str:
    """Return file and line of the innermost frame outside the import machinery."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    return f"{frames[-1].filename}:{frames[-1].lineno}"


def _not_found(name: str, reference: str, folder: str | Path | None) -> str:
    looked = (
        f"in {Path(folder).resolve()} and among the installed packages" if folder else "among the installed packages"
    )
    beside = [path.stem for path in Path(folder).glob("*.py")] if folder else []
    similar = difflib.get_close_matches(name, beside, n=1)
    guess = f"; did you mean {similar[0]}?" if similar else ""
    return f"cannot load {reference!r}: no module {name!r} {looked}{guess}"


def _missing(target: Any, name: str, reference: str) -> str:
    held = getattr(target, "__name__", type(target).__name__)
    public = [each for each in vars(target) if not each.startswith("_") and callable(getattr(target, each))]
    similar = difflib.get_close_matches(name, public, n=1)
    guess = f"did you mean {similar[0]}?" if similar else f"it has {', '.join(sorted(public)[:12]) or 'no functions'}"
    return f"cannot load {reference!r}: {held!r} has no {name!r}; {guess}"
