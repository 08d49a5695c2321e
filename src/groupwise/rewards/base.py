"""The reward contract, and scoring groups with it. The contract is the one that TRL and Axolotl users know:

    def exact(completions, answer, **columns) -> list[float | None]:
        return [float(completion[0]["content"] == gold) for completion, gold in zip(completions, answer)]

A function gets one group, as keyword arguments, each a list with one entry per completion:

    completions     a str where the prompt is plain text; [{"role": "assistant", "content": str}] where it is a chat
    prompts         the prompt's text, or its messages
    completion_ids  token ids of the completion
    <column>        every other column of the dataset, under its own name

and of these only what its signature names, or all with `**kwargs`. It may be async. `args` from the configuration are
passed on every call, and win over a column of that name. It returns one float per completion, in order; None says
"does not apply to this one", and true and false count as 1 and 0.

The reward of a completion is  sum of weight x value  over the functions that apply, and None where none does. A failure
is not a zero: where a function with a weight raises, returns another number of values, or returns nan, inf or something
that is no number, the completion's reward is None and its error says why. One call scores one group, so a failure
cannot take down another group; if nothing of a whole batch could be scored, `score` raises RewardError.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from groupwise.config import RewardConfig
from groupwise.errors import ConfigError, RewardError
from groupwise.load import load_object
from groupwise.types import Prompt, Rollout, RolloutGroup

OFFERED = ("completions", "prompts", "completion_ids")  # besides the dataset's columns


@dataclass(frozen=True, kw_only=True)
class RewardFunction:
    """A function of the contract with its name, weight and bound options."""

    name: str
    function: Callable[..., Any]
    weight: float = 1.0
    args: Mapping[str, Any]

    def missing(self, columns: Iterable[str]) -> list[str]:
        """Parameters that have no default and that neither the options nor `columns` fill."""
        given = {*OFFERED, *columns, *self.args}
        return [name for name, each in self._parameters().items() if each.default is each.empty and name not in given]

    def accepted(self, columns: Mapping[str, list[Any]]) -> dict[str, Any]:
        """What of `columns` the signature takes, and the options."""
        everything = any(each.kind is each.VAR_KEYWORD for each in inspect.signature(self.function).parameters.values())
        names = self._parameters()
        taken = {name: values for name, values in columns.items() if everything or name in names}
        return taken | dict(self.args)

    def _parameters(self) -> dict[str, inspect.Parameter]:
        """The parameters that can be given by name."""
        parameters = inspect.signature(self.function).parameters.values()
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return {each.name: each for each in parameters if each.kind in by_name}


@dataclass(frozen=True, kw_only=True)
class RewardReport:
    """What came of scoring, for metrics and messages.

    `failed` completions have an error; `excluded` ones have no reward (they failed, or no function applied to them).
    `means` are by function name, over the completions that it scored.
    """

    completions: int
    failed: int
    excluded: int
    first_cause: str | None
    means: Mapping[str, float]


def text_of(completion: Any) -> str:
    """The text of one entry of `completions`: a string, or the last message's content."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


# ---- loading ----


def load_rewards(specs: Sequence[RewardConfig], *, folder: str | Path | None = None) -> tuple[RewardFunction, ...]:
    """The functions that the configuration lists. One that is listed twice without names becomes `x` and `x_2`.

    Raises LoadError for what cannot be imported, and ConfigError for two equal names, a function that does not take
    `completions`, or an option that it does not have.
    """
    functions: list[RewardFunction] = []
    for spec in specs:
        function = load_object(spec.function, folder=folder)
        taken = {each.name for each in functions} | {each.name for each in specs if each.name}
        if spec.name and any(each.name == spec.name for each in functions):
            raise ConfigError(f"two rewards have the name {spec.name!r}; give each its own `name`")
        name = spec.name or _free_name(spec.function.replace(":", ".").rpartition(".")[2], taken)
        _check_signature(function, spec)
        functions.append(RewardFunction(name=name, function=function, weight=spec.weight, args=spec.args))
    return tuple(functions)


def _free_name(name: str, taken: set[str]) -> str:
    number = 2
    free = name
    while free in taken:
        free, number = f"{name}_{number}", number + 1
    return free


def _check_signature(function: Callable[..., Any], spec: RewardConfig) -> None:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise ConfigError(f"reward {spec.function!r} has no signature; write a Python function around it") from None
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return
    if "completions" not in parameters:
        names = ", ".join(parameters) or "nothing"
        hint = "its head is `def reward(completions, **columns)`"
        raise ConfigError(f"reward {spec.function!r} takes {names}, but not `completions`", hint=hint)
    for option in spec.args:
        if option not in parameters:
            similar = difflib.get_close_matches(option, parameters, n=1)
            guess = f"did you mean {similar[0]}?" if similar else f"it takes {', '.join(parameters)}"
            raise ConfigError(f"reward {spec.function!r} has no option {option!r}; {guess}")


def check_columns(functions: Sequence[RewardFunction], prompts: Sequence[Prompt]) -> None:
    """Raise ConfigError where a function needs a column that a prompt does not have; before any model is loaded."""
    for prompt in prompts:
        for function in functions:
            if missing := function.missing(prompt.columns):
                raise ConfigError(_missing_column(function, missing, prompt))


def _missing_column(function: RewardFunction, missing: Sequence[str], prompt: Prompt) -> str:
    held = ", ".join(map(repr, prompt.columns)) or "no columns"
    needed = " and ".join(map(repr, missing))
    return f"reward {function.name!r} needs {needed} as a column or an option; prompt {prompt.id!r} has {held}"


# ---- scoring ----


@dataclass(frozen=True)
class _Failure:
    """Why there is no value."""

    cause: str


_Value = float | None | _Failure


async def score(groups: Sequence[RolloutGroup], functions: Sequence[RewardFunction]) -> list[RolloutGroup]:
    """The groups with `rewards`, `reward` and `error` set on every rollout; one that has an error already keeps it.

    Async functions of all groups run concurrently; the others run one after another in this thread.
    Raises RewardError, with the first cause, when there are completions and all of them failed.
    """
    scored = await asyncio.gather(*(_score_group(group, functions) for group in groups))
    report = summarize(scored)
    if report.completions and report.failed == report.excluded == report.completions:
        message = f"no reward for any of {report.completions} completions; the first cause: {report.first_cause}"
        raise RewardError(message, hint="correct the reward function or the dataset; nothing was trained on this batch")
    return list(scored)


def summarize(groups: Iterable[RolloutGroup]) -> RewardReport:
    """Counts, the first cause and means by function of scored groups."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    errors = [rollout.error for rollout in rollouts if rollout.error is not None]
    values: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.rewards.items():
            values.setdefault(name, []).extend([] if value is None else [value])
    return RewardReport(
        completions=len(rollouts),
        failed=len(errors),
        excluded=sum(rollout.reward is None for rollout in rollouts),
        first_cause=errors[0] if errors else None,
        means={name: math.fsum(each) / len(each) for name, each in values.items() if each},
    )


async def _score_group(group: RolloutGroup, functions: Sequence[RewardFunction]) -> RolloutGroup:
    healthy = [rollout for rollout in group.rollouts if rollout.error is None]
    if not healthy:
        return group
    columns = _columns(group.prompt, healthy)
    values_FG = await asyncio.gather(*(_call(each, columns, group.prompt) for each in functions))  # F functions
    combined = iter(
        [_combine(rollout, functions, values) for rollout, *values in zip(healthy, *values_FG, strict=True)]
    )
    return replace(group, rollouts=tuple(each if each.error is not None else next(combined) for each in group.rollouts))


def _columns(prompt: Prompt, rollouts: Sequence[Rollout]) -> dict[str, list[Any]]:
    size = len(rollouts)
    texts = [rollout.completion.text for rollout in rollouts]
    chat = prompt.messages is not None
    offered = {
        "completions": [[{"role": "assistant", "content": text}] for text in texts] if chat else texts,
        "prompts": [[dict(message) for message in prompt.messages or ()] if chat else prompt.text for _ in texts],
        "completion_ids": [list(rollout.completion.token_ids) for rollout in rollouts],
    }
    return {name: [value] * size for name, value in prompt.columns.items()} | offered


def _combine(rollout: Rollout, functions: Sequence[RewardFunction], values: Sequence[_Value]) -> Rollout:
    rewards: dict[str, float | None] = {}
    causes: list[str] = []
    total, counted, excluded = 0.0, False, False
    for function, value in zip(functions, values, strict=True):
        failure = value if isinstance(value, _Failure) else None
        number = None if isinstance(value, _Failure) else value
        rewards[function.name] = number
        if failure is not None:
            causes.append(failure.cause)
            excluded |= function.weight != 0  # one that is only recorded cannot spoil the sum
        elif number is not None and function.weight != 0:
            total, counted = total + function.weight * number, True
    reward = total if counted and not excluded else None
    return replace(rollout, rewards=rewards, reward=reward, error="; ".join(causes) or None)


async def _call(function: RewardFunction, columns: dict[str, list[Any]], prompt: Prompt) -> list[_Value]:
    """One function on one group: the only place where reward code runs. Failures come back as values."""
    size = len(columns["completions"])
    if missing := function.missing(columns):
        return [_Failure(_missing_column(function, missing, prompt))] * size
    try:
        returned = function.function(**function.accepted(columns))
        if inspect.isawaitable(returned):
            returned = await returned
    except (Exception, SystemExit) as error:
        cause = f"reward {function.name!r} failed on prompt {prompt.id!r}: {type(error).__name__}: {error}"
        return [_Failure(cause)] * size
    values = returned.tolist() if hasattr(returned, "tolist") else returned  # a NumPy array or a tensor
    if not isinstance(values, list | tuple):
        got = f"a {type(returned).__name__}"
    elif len(values) != size:
        got = f"{len(values)} values"
    else:
        return [_value(each, function, prompt) for each in values]
    cause = f"reward {function.name!r} returned {got} for {size} completions (prompt {prompt.id!r})."
    return [_Failure(f"{cause} Return one float per completion, in order.")] * size


def _value(returned: Any, function: RewardFunction, prompt: Prompt) -> _Value:
    if returned is None:
        return None
    number = returned
    try:
        if not isinstance(number, int | float) and callable(getattr(number, "item", None)):
            number = number.item()  # a NumPy scalar or a tensor of one element
        if isinstance(number, int | float) and math.isfinite(number):
            return float(number)
    except (ValueError, TypeError, RuntimeError, OverflowError):
        pass  # a tensor of several elements, an int too large for a float
    shown = repr(returned)[:60]
    cause = f"reward {function.name!r} returned {shown} ({type(returned).__name__}) on prompt {prompt.id!r}"
    return _Failure(f"{cause}; return a finite number, or None where it does not apply.")
