"""Rewards made of other rewards, which are named as in the configuration (`module:function`).

ensemble  several rewards of the same thing, as one: mean, least or median. One noisy or exploitable member then moves
          the reward less, and how far the members are apart is a metric (Coste et al. 2023, arXiv 2310.02743: taking
          the least is a conservative estimate, which over-optimisation of a single reward model does not fool)
gated     a reward that counts only where another one says that the completion is good enough: brevity, length or
          style of a wrong answer earn nothing
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Sequence
from typing import Any, Literal

from groupwise.errors import ConfigError, RewardError
from groupwise.rewards.call import RewardFunction, TrainerState
from groupwise.rewards.member import LogMetric, Reference, Values, load_members, values_of


async def ensemble(
    completions: Sequence[Any],
    *,
    functions: Sequence[Reference],
    aggregate: Literal["mean", "min", "median"] = "mean",
    quorum: int | None = None,
    folder: str | None = None,
    log_metric: LogMetric | None = None,
    trainer_state: TrainerState | None = None,
    **columns: Any,
) -> list[float | None]:
    """Return one value a completion from the members' `functions`, which must mean the same on the same scale.

    The mean is weighted by the members' weights, which must be positive. A member that does not apply to a completion,
    or failed on it, is left out there; at least `quorum` members (by default the majority) must be left. Otherwise the
    value is nan, a failure, if a member failed, and None if they only do not apply.

    Logs `disagreement` (standard deviation over the members, mean over the completions) and `failed` (the share of the
    members' values that failed). Raises ConfigError for wrong options, and RewardError, with the first cause, where
    every completion failed.
    """
    members = load_members(functions, folder=folder)
    needed = _quorum(quorum, members, aggregate)
    results = await _values(members, {"completions": completions, **columns}, log_metric, trainer_state)
    weights = [member.weight for member in members]
    per_completion = list(zip(*(result.values for result in results), strict=True))
    scores = [_combine(values, weights, aggregate, needed) for values in per_completion]
    _raise_if_all_failed(scores, results)
    if log_metric is not None and scores:
        spreads = [statistics.pstdev(known) for values in per_completion if len(known := _known(values)) > 1]
        log_metric("disagreement", statistics.fmean(spreads) if spreads else 0.0)
        failed = sum(_is_failure(value) for values in per_completion for value in values)
        log_metric("failed", failed / (len(members) * len(scores)))
    return scores


async def _values(
    members: Sequence[RewardFunction],
    columns: dict[str, Any],
    log_metric: LogMetric | None,
    state: TrainerState | None,
) -> list[Values]:
    """Return the values of all members; async members run concurrently."""
    size = len(columns["completions"])
    calls = (values_of(member, columns, size=size, log_metric=log_metric, state=state) for member in members)
    return await asyncio.gather(*calls)


def _quorum(quorum: int | None, members: Sequence[RewardFunction], aggregate: str) -> int:
    if aggregate not in ("mean", "min", "median"):
        raise ConfigError(f"aggregate is {aggregate!r}; it must be mean, min or median")
    if any(member.weight <= 0 for member in members):
        raise ConfigError("an ensemble's weights must be positive", hint="list what is to be subtracted beside it")
    if aggregate != "mean" and len({member.weight for member in members}) > 1:
        raise ConfigError(f"weights mean nothing to the {aggregate}", hint="leave them out, or aggregate the mean")
    if quorum is not None and not 1 <= quorum <= len(members):
        raise ConfigError(f"quorum is {quorum}; there are {len(members)} members")
    return len(members) // 2 + 1 if quorum is None else quorum


def _combine(values: Sequence[float | None], weights: Sequence[float], aggregate: str, needed: int) -> float | None:
    known = _known(values)
    if len(known) < needed:
        return math.nan if any(map(_is_failure, values)) else None
    if aggregate == "min":
        return min(known)
    if aggregate == "median":
        return statistics.median(known)
    used = [weight for value, weight in zip(values, weights, strict=True) if value is not None and value == value]
    return statistics.fmean(known, used)


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None and not math.isnan(value)]


def _is_failure(value: float | None) -> bool:
    return value is not None and math.isnan(value)


def _raise_if_all_failed(scores: Sequence[float | None], results: Sequence[Values]) -> None:
    if scores and all(map(_is_failure, scores)):
        causes = [result.cause for result in results if result.cause]
        raise RewardError(f"too few members could score: {causes[0]}")


async def gated(
    completions: Sequence[Any],
    *,
    function: Reference,
    condition: Reference,
    threshold: float = 1.0,
    closed: float = 0.0,
    folder: str | None = None,
    log_metric: LogMetric | None = None,
    trainer_state: TrainerState | None = None,
    **columns: Any,
) -> list[float | None]:
    """Return the value of `function` where `condition` gives at least `threshold`, `closed` where it gives less.

    Where the condition does not apply the value is None; where it failed, nan, a failure. The members' weights count:
    {"function": "...:ideal_length", "weight": 0.3} gives at most 0.3. Logs `open`, the share that passes.
    Raises ConfigError for wrong options, and RewardError, with the cause, where every completion failed.
    """
    members = load_members([function, condition], folder=folder)
    inner, gate = await _values(members, {"completions": completions, **columns}, log_metric, trainer_state)
    scores: list[float | None] = []
    for passed, value in zip(gate.values, inner.values, strict=True):
        if passed is None or math.isnan(passed):
            scores.append(passed)
        elif passed * gate.weight < threshold:
            scores.append(closed)
        else:
            scores.append(None if value is None else value * inner.weight)
    _raise_if_all_failed(scores, (gate, inner))
    if log_metric is not None and scores:
        log_metric("open", sum(v is not None and v * gate.weight >= threshold for v in gate.values) / len(scores))
    return scores
