"""Calls one reward function on one group: what it is given, what it may return, how it fails. `base` says what the
contract is; this is the only place where reward code is called and its answers are read, in this process and in a
pool's.

Every way to fail has a kind, by which failures are counted:

    timeout     it did not answer in time (in a pool only)
    crash       it ended the process that it ran in (in a pool only)
    exception   it raised
    wrong_type  it returned something else than one finite number or None per completion
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, Protocol

from groupwise.pictures import COLUMNS, Picture
from groupwise.types import MAX_REWARD

OFFERED = ("completions", "prompts", "completion_ids")  # besides the dataset's columns
PICTURED = ("prompts", *COLUMNS)  # what may have pictures

EXTRAS = ("log_metric", "trainer_state")  # given only to a function whose signature names them

LONGEST_CAUSE = 1000  # characters of an exception's message


class RewardSpec(Protocol):
    """The specification from which a reward function is loaded: a `RewardConfig`, or a worker process's copy of its
    fields."""

    @property
    def function(self) -> str: ...
    @property
    def weight(self) -> float: ...
    @property
    def args(self) -> Mapping[str, Any]: ...
    @property
    def name(self) -> str | None: ...


@dataclass(frozen=True, kw_only=True)
class RewardFunction:
    """A reward function with its name in metrics, its weight and its options.

    `spec` is what it was loaded from; one that has none cannot be loaded again and runs in this process.
    """

    name: str
    function: Callable[..., Any]
    weight: float = 1.0
    args: Mapping[str, Any]
    spec: RewardSpec | None = None

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(
            getattr(self.function, "__call__", None)  # noqa: B004, the method of an object is meant
        )

    @cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self.function)

    def missing(self, columns: Iterable[str]) -> list[str]:
        """Return the parameters without a default that neither the options nor `columns` fill."""
        given = {*OFFERED, *EXTRAS, *columns, *self.args}
        return [name for name, each in self.parameters().items() if each.default is each.empty and name not in given]

    def accepted(self, columns: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        """Return the part of `columns` that the function's signature accepts and that no option overrides."""
        everything = any(each.kind is each.VAR_KEYWORD for each in self._signature.parameters.values())
        names = self.parameters()
        return {
            name: values
            for name, values in columns.items()
            if (everything or name in names) and name not in self.args and name not in EXTRAS
        }

    def parameters(self) -> dict[str, inspect.Parameter]:
        """Return the parameters that can be given by name."""
        parameters = self._signature.parameters.values()
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return {each.name: each for each in parameters if each.kind in by_name}


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """The run's progress, for a reward function with a parameter `trainer_state`; attributes are named as in TRL."""

    global_step: int = 0
    max_steps: int = 0


AT_START = TrainerState()


class FailureKind(StrEnum):
    """The ways in which a reward function can fail; counted as `reward/<name>/failed/<kind>`."""

    TIMEOUT = "timeout"
    CRASH = "crash"
    EXCEPTION = "exception"
    WRONG_TYPE = "wrong_type"


@dataclass(frozen=True)
class Failure:
    """The reason why a completion has no value from a function."""

    cause: str
    kind: FailureKind


Value = float | None | Failure


@dataclass(frozen=True, kw_only=True)
class GroupScores:
    """The result of one function on one group: a value per completion, and the numbers it logged, by name."""

    values: Sequence[Value]
    logged: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @classmethod
    def failed(cls, cause: str, kind: FailureKind, size: int) -> GroupScores:
        """Return the same failure for each of `size` completions."""
        return cls(values=[Failure(cause, kind)] * size)


class FunctionCall:
    """Makes one call of a reward function: `begin` runs the function, `answer` reads the values that it returned,
    `failed` reads the error that it raised.

    `columns` are the columns that the function accepts (`RewardFunction.accepted`); `size` is the number of
    completions.
    """

    def __init__(
        self,
        function: RewardFunction,
        columns: Mapping[str, list[Any]],
        *,
        size: int,
        prompt_id: str,
        state: TrainerState = AT_START,
    ):
        self.function = function
        self.size = size
        self.prompt_id = prompt_id
        self.logged: dict[str, list[float]] = {}
        extras = {"log_metric": self._log_metric, "trainer_state": state}
        named = function.parameters()
        self._arguments = {
            **columns,
            **{name: value for name, value in extras.items() if name in named},
            **function.args,
        }

    def begin(self) -> Any:
        """Call the function: what it returns, an awaitable where it is async. Raises what it raises. Pictures are PIL
        images to it, as in TRL."""
        pictured = {name: _decoded(value) for name, value in self._arguments.items() if name in PICTURED}
        return self.function.function(**{**self._arguments, **pictured})

    def answer(self, returned: Any) -> GroupScores:
        """Return one value per completion, in order: a finite number, None, or why it is neither."""
        try:
            values = returned.tolist() if hasattr(returned, "tolist") else returned  # a NumPy array or a tensor
        except Exception as error:
            return self.failed(error)
        if not isinstance(values, list | tuple):
            got = f"a {type(returned).__name__}"
        elif len(values) != self.size:
            got = f"{len(values)} values"
        else:
            return GroupScores(values=[self._value(each) for each in values], logged=self.logged)
        where = f"for {self.size} completions (prompt {self.prompt_id!r})"
        cause = f"reward {self.function.name!r} returned {got} {where}. Return one float per completion, in order."
        return self._failed(cause, FailureKind.WRONG_TYPE)

    def failed(self, error: BaseException) -> GroupScores:
        """Return the answer of a function that raised."""
        cause = f"reward {self.function.name!r} failed on prompt {self.prompt_id!r}: {_described(error)}"
        form = self._form() if isinstance(error, TypeError | AttributeError) else None
        return self._failed(f"{cause} ({form})" if form else cause, FailureKind.EXCEPTION)

    def _form(self) -> str | None:
        """Return what a completion is here, for a function that took it for something else."""
        match self._arguments.get("completions"):
            case [list(), *_]:
                return "completions[i] is a list of messages: its text is completions[i][-1]['content']"
            case [str(), *_]:
                return "completions[i] is a string, as data.raw is true; without it, a list of messages"
            case _:
                return None

    def _failed(self, cause: str, kind: FailureKind) -> GroupScores:
        return GroupScores(values=[Failure(cause, kind)] * self.size, logged=self.logged)

    def _value(self, returned: Any) -> Value:
        if returned is None:
            return None
        number = returned
        try:
            if not isinstance(number, int | float) and callable(getattr(number, "item", None)):
                number = number.item()  # a NumPy scalar or a tensor of one element
            if isinstance(number, int | float) and abs(number) <= MAX_REWARD:
                return float(number)
        except Exception:
            pass  # a tensor of several elements, an int too large for a float
        shown = f"{_shown(returned)[:60]} ({type(returned).__name__})"
        cause = f"reward {self.function.name!r} returned {shown} on prompt {self.prompt_id!r}"
        hint = f"return a finite number within {MAX_REWARD:g} of 0, or None where it does not apply."
        return Failure(f"{cause}; {hint}", FailureKind.WRONG_TYPE)

    def _log_metric(self, name: str, value: float) -> None:
        """Record a metric: what a function gets as `log_metric`. Raises TypeError or ValueError for a value that is not
        a finite number."""
        number = float(value)
        if not isinstance(name, str) or not math.isfinite(number):
            raise ValueError(f"log_metric({name!r}, {value!r}): give a name and a finite number")
        self.logged.setdefault(name, []).append(number)


async def call_here(call: FunctionCall) -> GroupScores:
    """Return the answer of a function that runs in this process; nothing limits how long it takes."""
    try:
        returned = call.begin()
        if inspect.isawaitable(returned):
            returned = await returned
    except BaseException as error:
        if _is_interrupt(error):
            raise
        return call.failed(error)
    return call.answer(returned)


def _is_interrupt(error: BaseException) -> bool:
    """Return whether this is not the function's doing: Ctrl-C, or the task in which it runs being cancelled."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return isinstance(error, KeyboardInterrupt)


def _described(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:LONGEST_CAUSE]
    except Exception:
        return type(error).__name__


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except Exception:
        return f"<{type(value).__name__}>"


def _decoded(value: Any) -> Any:
    """Return pictures as PIL images, also inside lists and objects; what has none is returned as it is."""
    if isinstance(value, Picture):
        return value.pixels()
    if isinstance(value, list) and any(_has_pictures(each) for each in value):
        return [_decoded(each) for each in value]
    if isinstance(value, dict) and _has_pictures(value):
        return {name: _decoded(each) for name, each in value.items()}
    return value


def _has_pictures(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_pictures, value.values()))
    return isinstance(value, Picture) or (isinstance(value, list) and any(map(_has_pictures, value)))
