"""Chooses what trackers are shown of a step's rollouts: every reward, for a histogram, and a table of completions under
the column names of TRL's.

    rewards_of   distribution/reward, distribution/reward/<name> -> the values of all completions of the step
    rows_of      step, prompt, completion, a column a reward function, reward, advantage
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

from groupwise.types import Prompt, Rollout, RolloutGroup

Row = dict[str, str | float | None]


def rewards_of(groups: Sequence[RolloutGroup]) -> dict[str, list[float]]:
    """Return the rewards of the completions, together and by their functions; those that are not finite numbers are
    left out."""
    values: dict[str, list[float]] = {}
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        named = {f"distribution/reward/{name}": reward for name, reward in rollout.rewards.items()}
        for name, reward in {"distribution/reward": rollout.reward, **named}.items():
            if reward is not None and math.isfinite(reward):
                values.setdefault(name, []).append(reward)
    return values


def rows_of(step: int, groups: Sequence[RolloutGroup], *, most: int) -> list[Row]:
    """Return the first `most` completions that were scored, in the order in which they were sampled, so that those of a
    group stand together. Every row has the same columns."""
    scored = ((group.prompt, each) for group in groups for each in group.rollouts if each.reward is not None)
    shown = list(islice(scored, most))
    names = list(dict.fromkeys(name for _, rollout in shown for name in rollout.rewards))
    return [_row(step, prompt, rollout, names) for prompt, rollout in shown]


def _row(step: int, prompt: Prompt, rollout: Rollout, names: Sequence[str]) -> Row:
    asked = prompt.text or "\n".join(f"{each['role']}: {each.get('content') or ''}" for each in prompt.messages or ())
    said = "\n\n".join(turn.completion.text for turn in rollout.turns)
    rewards = {name: rollout.rewards.get(name) for name in names}
    return {
        "step": float(step),
        "prompt": asked,
        "completion": said,
        **rewards,
        "reward": rollout.reward,
        "advantage": rollout.advantage,
    }
