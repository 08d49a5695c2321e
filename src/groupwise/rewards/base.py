"""The contract of reward functions (TRL's and Axolotl's signature), and the scoring of groups of rollouts with several
of them.

    def exact(completions, answer, **columns) -> list[float | None]:
        return [float(completion[0]["content"] == gold) for completion, gold in zip(completions, answer)]

A function gets one group, as keyword arguments, each a list with one entry per completion:

    completions     a str where the prompt is plain text; [{"role": "assistant", "content": str}] where it is a chat;
                    all messages after the prompt where it is an episode in an environment
    prompts         the prompt's text, or its messages
    completion_ids  token ids of the completion
    <column>        every other column of the dataset, under its own name, and a rollout function's further columns

and of these only what its signature names, or all with `**kwargs`. It may be async. `args` from the configuration are
passed on every call, and win over a column of that name. It returns one float per completion, in order; None says
"does not apply to this one", and true and false count as 1 and 0.

A function whose signature names them gets two things more, as in TRL: `log_metric(name, value)`, whose values end up as
the metric `reward/<function>/log/<name>`, averaged over each group and then over groups, and `trainer_state`, an object
with `global_step` and `max_steps`.

The reward of a completion is  sum of weight x value  over the functions that apply, and None where none does. A failure
is not a zero: if a function with a weight raises, returns another number of values, or returns nan, inf or something
that is not a number, the completion's reward is None and its error says why. One call scores one group, so a failure
cannot take down another group; if nothing of a whole batch could be scored, `score` raises RewardError.

With a `RewardPool` (`pool.py`) the functions run in their own processes, with a deadline; what they are given, and
what comes of it, is the same. Without, they run in this one: async functions concurrently, the others one after
another; nothing protects from one that hangs, crashes or changes the process, and KeyboardInterrupt is Ctrl-C.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from groupwise.config.load import load_object, with_folder
from groupwise.errors import ConfigError, RewardError
from groupwise.rewards.call import (
    AT_START,
    Failure,
    FailureKind,
    FunctionCall,
    GroupScores,
    RewardFunction,
    RewardSpec,
    TrainerState,
    Value,
    call_here,
)
from groupwise.types import MAX_REWARD, Prompt, Rollout, RolloutGroup, last_answer


class RewardWorkers(Protocol):
    """Other processes that run reward functions: a `RewardPool`, or several of them on a cluster."""

    def runs(self, function: RewardFunction) -> bool:
        """Return whether this is one of their functions."""
        ...

    async def call(
        self,
        function: RewardFunction,
        columns: Mapping[str, list[Any]],
        *,
        size: int,
        prompt_id: str,
        state: TrainerState = AT_START,
    ) -> GroupScores:
        """Return the function's values for one group of `size` completions; failures are values, too."""
        ...

    def close(self) -> None:
        """End the processes."""
        ...


@dataclass(frozen=True, kw_only=True)
class RewardReport:
    """A summary of scored groups, for metrics and messages.

    `failed` completions have an error; `excluded` ones have no reward (they failed, or no function applied to them).
    `means` are by function name, over the completions that it scored.
    """

    completions: int
    failed: int
    excluded: int
    first_cause: str | None
    means: Mapping[str, float]


class RewardLog:
    """Collects what reward functions logged and how they failed over the groups of one step.

    `failures[name][kind]` counts completions. `metrics()` is for the step's metrics.
    """

    def __init__(self) -> None:
        self.failures: dict[str, dict[FailureKind, int]] = {}
        self.logged: dict[tuple[str, str], list[float]] = {}  # (function, name): a mean per group

    def add(self, name: str, answer: GroupScores) -> None:
        """Add the result of the function `name` on one group."""
        counts = self.failures.setdefault(name, {})
        for value in answer.values:
            if isinstance(value, Failure):
                counts[value.kind] = counts.get(value.kind, 0) + 1
        for metric, values in answer.logged.items():
            self.logged.setdefault((name, metric), []).append(math.fsum(values) / len(values))

    def metrics(self) -> dict[str, float]:
        """Return reward/<function>/failed, .../failed/<kind> for the kinds that occurred, and .../log/<name>."""
        metrics: dict[str, float] = {}
        for name, counts in self.failures.items():
            metrics[f"reward/{name}/failed"] = float(sum(counts.values()))
            metrics |= {f"reward/{name}/failed/{kind}": float(count) for kind, count in counts.items()}
        return metrics | {
            f"reward/{name}/log/{metric}": math.fsum(means) / len(means)
            for (name, metric), means in self.logged.items()
        }


def text_of(completion: Any) -> str:
    """Return the text of one entry of `completions`: the string itself, or the `last_answer` of its messages. Later
    messages of an environment or a tool earn the policy nothing."""
    return completion if isinstance(completion, str) else last_answer(completion)


# ---- loading ----
def load_rewards(specs: Sequence[RewardSpec], *, folder: str | Path | None = None) -> tuple[RewardFunction, ...]:
    """Return the functions that the configuration lists, under the names that `reward_names` gives them.

    Raises LoadError for what cannot be imported, and ConfigError for two equal names, a function that does not take
    `completions`, or an option that it does not have.
    """
    functions: list[RewardFunction] = []
    for spec, name in zip(specs, reward_names(specs), strict=True):
        function = load_object(spec.function, folder=folder)
        _check_signature(function, spec)
        args = with_folder(function, spec.args, folder)
        functions.append(RewardFunction(name=name, function=function, weight=spec.weight, args=args, spec=spec))
    return tuple(functions)


def reward_names(specs: Sequence[RewardSpec]) -> list[str]:
    """Return the name of each in metrics: its own, or its function's. One listed twice without names becomes `x` and
    `x_2`.

    Raises ConfigError for two equal names.
    """
    names: list[str] = []
    for spec in specs:
        if spec.name and spec.name in names:
            raise ConfigError(f"two rewards have the name {spec.name!r}; give each its own `name`")
        taken = {*names, *(each.name for each in specs if each.name)}
        names.append(spec.name or _free_name(spec.function.replace(":", ".").rpartition(".")[2], taken))
    return names


def _free_name(name: str, taken: set[str]) -> str:
    number = 2
    free = name
    while free in taken:
        free, number = f"{name}_{number}", number + 1
    return free


def _check_signature(function: Callable[..., Any], spec: RewardSpec) -> None:
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
                having = sum(not function.missing(each.columns) for each in prompts)
                hint = "rename the column, or write a reward with a parameter of the column's name"
                if having:
                    hint = f"{having} of {len(prompts)} rows have it; give it to every row, null where there is none"
                raise ConfigError(_missing_column(function, missing, prompt), hint=hint)


def _missing_column(function: RewardFunction, missing: Sequence[str], prompt: Prompt) -> str:
    held = ", ".join(map(repr, prompt.columns)) or "no columns"
    needed = " and ".join(map(repr, missing))
    return f"reward {function.name!r} needs {needed} as a column or an option; prompt {prompt.id!r} has {held}"


# ---- scoring ----
async def score(
    groups: Sequence[RolloutGroup],
    functions: Sequence[RewardFunction],
    *,
    pool: RewardWorkers | None = None,
    log: RewardLog | None = None,
    state: TrainerState = AT_START,
) -> list[RolloutGroup]:
    """Return the groups with `rewards`, `reward` and `error` set on every rollout; one that has an error already keeps
    it.

    `pool` runs those of the functions that it knows, `log` collects what they log and how they fail, `state` is what
    they get as `trainer_state`. Raises RewardError, with the first cause, when there are completions and all failed.
    """
    scored = await asyncio.gather(*(score_group(each, functions, pool=pool, log=log, state=state) for each in groups))
    refuse_failed(scored)
    return list(scored)


async def score_group(
    group: RolloutGroup,
    functions: Sequence[RewardFunction],
    *,
    pool: RewardWorkers | None = None,
    log: RewardLog | None = None,
    state: TrainerState = AT_START,
) -> RolloutGroup:
    """Score one group as `score` does, for a caller that uses each group at once; failures do not raise."""
    healthy = [rollout for rollout in group.rollouts if rollout.error is None]
    if not healthy or not functions:
        return group

    async def answer(function: RewardFunction) -> GroupScores:
        return await _answer(function, group.prompt, healthy, pool=pool, state=state)

    answers_F = await asyncio.gather(*map(answer, functions))  # F functions
    if log is not None:
        for function, each in zip(functions, answers_F, strict=True):
            log.add(function.name, each)
    values_FG = [each.values for each in answers_F]
    combined = iter(
        [_combine(rollout, functions, values) for rollout, *values in zip(healthy, *values_FG, strict=True)]
    )
    return replace(group, rollouts=tuple(each if each.error is not None else next(combined) for each in group.rollouts))


def refuse_failed(groups: Sequence[RolloutGroup]) -> None:
    """Raise RewardError, with the first cause, when there are completions and all of them failed."""
    report = summarize(groups)
    if report.completions and report.failed == report.excluded == report.completions:
        message = f"no reward for any of {report.completions} completions; the first cause: {report.first_cause}"
        raise RewardError(message, hint="correct what it names; nothing was trained on this batch")


async def _answer(
    function: RewardFunction,
    prompt: Prompt,
    rollouts: Sequence[Rollout],
    *,
    pool: RewardWorkers | None,
    state: TrainerState,
) -> GroupScores:
    columns = _columns(prompt, rollouts)  # for each function: one that changes its lists must not change another's
    size = len(rollouts)
    if missing := function.missing(columns):
        return GroupScores.failed(_missing_column(function, missing, prompt), FailureKind.EXCEPTION, size)
    given = function.accepted(columns)
    if pool is not None and pool.runs(function):
        return await pool.call(function, given, size=size, prompt_id=prompt.id, state=state)
    return await call_here(FunctionCall(function, given, size=size, prompt_id=prompt.id, state=state))


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


def _columns(prompt: Prompt, rollouts: Sequence[Rollout]) -> dict[str, list[Any]]:
    size = len(rollouts)
    opening = prompt.opening if prompt.shows_opening else ""
    said = [_messages(rollout, opening) for rollout in rollouts]
    chat = prompt.messages is not None
    offered = {
        "completions": said if chat else [messages[-1]["content"] for messages in said],
        "prompts": [[dict(message) for message in prompt.messages or ()] if chat else prompt.text for _ in said],
        "completion_ids": [
            list(chain.from_iterable(turn.completion.token_ids for turn in rollout.turns)) for rollout in rollouts
        ],
    }
    named = {name: [value] * size for name, value in prompt.columns.items()}
    own = dict.fromkeys(name for rollout in rollouts for name in rollout.columns)
    return named | {name: [rollout.columns.get(name) for rollout in rollouts] for name in own} | offered


def _messages(rollout: Rollout, opening: str) -> list[dict[str, Any]]:
    """Return what was said after the prompt; a completion with the `opening` that it continues."""
    said = [dict(message) for message in rollout.messages]
    return said or [{"role": "assistant", "content": opening + rollout.completion.text}]


def _combine(rollout: Rollout, functions: Sequence[RewardFunction], values: Sequence[Value]) -> Rollout:
    """Return what the functions gave, added to what the rollout has from its environment."""
    rewards, causes = dict(rollout.rewards), list[str]()
    total, counted, excluded = rollout.reward or 0.0, rollout.reward is not None, False
    for function, value in zip(functions, values, strict=True):
        failure = value if isinstance(value, Failure) else None
        number = None if isinstance(value, Failure) else value
        rewards[function.name] = number
        if failure is not None:
            causes.append(failure.cause)
            excluded |= function.weight != 0  # one that is only recorded cannot spoil the sum
        elif number is not None and function.weight != 0:
            total, counted = total + function.weight * number, True
    if not abs(total) <= MAX_REWARD:
        causes.append(f"the weighted sum of the rewards is {total:g}; it must be within {MAX_REWARD:g} of 0")
        excluded = True
    reward = total if counted and not excluded else None
    return replace(rollout, rewards=rewards, reward=reward, error="; ".join(causes) or None)
