"""A reward inside another reward: named as in the configuration, loaded once, called, its values told apart.

    {"function": "groupwise.rewards.math:number_match", "args": {"tag": "answer"}}, or only "module:function"

A value is a number, None ("does not apply") or a failure: nan, with a cause. The combining reward decides what a
member's failure means; it is never a zero.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from groupwise.config.rewards import RewardConfig
from groupwise.errors import ConfigError
from groupwise.rewards.base import load_rewards
from groupwise.rewards.call import Failure, FunctionCall, RewardFunction, TrainerState, call_here

Reference = str | Mapping[str, Any]

LogMetric = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True)
class Values:
    """The values of a reward that is part of another: one a completion, nan where it failed, and the first cause."""

    weight: float
    values: tuple[float | None, ...]
    cause: str | None = None


def load_members(references: Sequence[Reference], *, folder: str | Path | None = None) -> tuple[RewardFunction, ...]:
    """Return the rewards that `references` name, loaded at the first call. A module may stand in `folder`, or else in
    the working directory. Raises ConfigError for a reference that is none, and what `load_rewards` raises."""
    if isinstance(references, str | Mapping) or not references:
        raise ConfigError("`functions` must be a list with at least one reward", hint='as in ["my_rewards:exact"]')
    written = [{"function": each} if isinstance(each, str) else dict(each) for each in references]
    try:
        return _load(json.dumps(written), str(Path.cwd() if folder is None else folder))
    except TypeError as error:
        raise ConfigError(f"a member's options must be what YAML can say: {error}") from None


@functools.lru_cache(maxsize=64)
def _load(written: str, folder: str) -> tuple[RewardFunction, ...]:
    try:
        specs = [RewardConfig.model_validate(each) for each in json.loads(written)]
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "a reward"
        raise ConfigError(f"{place}: {first['msg']}", hint="a reward has function, args, name and weight") from None
    return load_rewards(specs, folder=folder)


async def values_of(
    member: RewardFunction,
    columns: Mapping[str, Any],
    *,
    size: int,
    log_metric: LogMetric | None = None,
    state: TrainerState | None = None,
) -> Values:
    """Return the member's values for `size` completions; `columns` are what the contract offers, and the dataset's.
    What it logs is logged as <member>/<name>."""
    if missing := member.missing(columns):
        cause = f"reward {member.name!r} needs {' and '.join(map(repr, missing))} as a column or an option"
        return Values(weight=member.weight, values=(math.nan,) * size, cause=cause)
    given = member.accepted(dict(columns))
    answer = await call_here(FunctionCall(member, given, size=size, prompt_id="this", state=state or TrainerState()))
    if log_metric is not None:
        for name, logged in answer.logged.items():
            log_metric(f"{member.name}/{name}", math.fsum(logged) / len(logged))
    causes = [value.cause for value in answer.values if isinstance(value, Failure)]
    values = tuple(math.nan if isinstance(value, Failure) else value for value in answer.values)
    return Values(weight=member.weight, values=values, cause=causes[0] if causes else None)
