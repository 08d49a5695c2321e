"""The learning rate of each step. No torch here.

    rate(step)   linear warm-up to the peak, then the peak times  f + (1 - f) shape(p),  f = final_rate

    constant     shape = 1
    linear       1 - p
    cosine       (1 + cos(pi p)) / 2                                  arXiv 1608.03983, without restarts
    wsd          1 until the last `decay_steps`, then 1 - p           warm-up, stable, decay: arXiv 2404.06395

p goes from 0 where the decay begins (for all but `wsd`: after the warm-up) to 1 just after the last step. The warm-up
goes from 0 at the first step (`wsd`: from f times the peak) to the peak at step `warmup_steps`, counted from 0. Both
are as in transformers, rate by rate.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

from groupwise.errors import ConfigError

Schedule = Literal["constant", "linear", "cosine", "wsd"]

DECAY_SHARE = 0.2  # of the steps, for `wsd` where decay_steps is not given


def learning_rate_at(
    step: int,
    *,
    peak: float,
    steps: int,
    schedule: str = "constant",
    warmup_steps: int = 0,
    decay_steps: int | None = None,
    final_rate: float = 0.0,
) -> float:
    """Return the learning rate of step `step` (from 0) of `steps`.

    Args:
        decay_steps: of `wsd`: how many steps at the end the rate falls in; None is a fifth of all, at least one.
        final_rate: the share of the peak that the decay ends at.

    Raises:
        ConfigError: an unknown schedule.
    """
    if schedule not in get_args(Schedule):
        raise ConfigError(f"schedule {schedule!r} does not exist; valid: {', '.join(get_args(Schedule))}")
    if step < warmup_steps:
        least = final_rate if schedule == "wsd" else 0.0
        return peak * (least + (1 - least) * step / warmup_steps)
    begin = warmup_steps
    if schedule == "wsd":
        begin = max(begin, steps - (max(1, round(DECAY_SHARE * steps)) if decay_steps is None else decay_steps))
    progress = min(max((step - begin) / max(1, steps - begin), 0.0), 1.0)
    return peak * (final_rate + (1 - final_rate) * _shape(schedule, progress))


def _shape(schedule: str, progress: float) -> float:
    if schedule == "constant":
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1.0 - progress
