"""Zeros that look like a fault, explained once where they first appear: a loss of 0, rewards that do not differ.

The value of a policy loss says little. While the policy is the one that sampled, every ratio is 1 and a group's
advantages add up to 0, so GRPO's loss is 0 by construction; its gradient is not. A loss is truly without effect where
no group's rewards differ: then every advantage is 0, and there is nothing to train.
"""

from __future__ import annotations

from collections.abc import Mapping

ZERO = 1e-6  # of a loss in float32


def explain_zeros(metrics: Mapping[str, float | None]) -> dict[str, str]:
    """Return {kind: a sentence} for the zeros in a step's metrics: the reason, and whether it is a problem."""
    if metrics.get("rollout/groups_trained") is None:  # an evaluation, or no step of reinforcement learning
        return {}
    found: dict[str, str] = {}
    if metrics["rollout/groups_trained"] == 0:
        found["nothing trained"] = (
            f"nothing was trained in this step and its loss is 0, because {why_flat(metrics)}: no problem now and "
            "then, but a run learns only in steps in which the rewards of some group differ"
        )
    elif metrics.get("reward/frac_zero_std") == 1.0:
        found["rewards equal"] = (
            f"reward/std is 0 because {why_flat(metrics)}: no problem now and then, but in such a step only the other "
            "terms of the loss, or groups of earlier steps, move the policy"
        )
    loss, norm = metrics.get("loss/policy"), metrics.get("optim/grad_norm")
    if loss is None or norm is None or abs(loss) >= ZERO or found:
        return found
    if norm > 0:
        found["loss is zero"] = (
            "the policy loss is 0 and that is no problem: a group's advantages add up to 0 while the policy is the one "
            f"that sampled; the gradient is not 0 (norm {norm:.2g}), and progress shows in the reward"
        )
    else:
        found["gradient is zero"] = (
            "the policy loss is 0 and so is the gradient, which is a problem: nothing was learned in this step; every "
            "token is masked or clipped, or every advantage is 0"
        )
    return found


def why_flat(metrics: Mapping[str, float | None]) -> str:
    """Return why no group teaches anything."""
    if metrics.get("rollout/groups") == 0:
        return "no group was sampled"
    if metrics.get("rollout/excluded_frac") == 1:
        return "no completion could be scored"
    low, high = metrics.get("reward/min"), metrics.get("reward/max")
    if low is not None and low == high:
        return f"every completion has the reward {low:.4g}"
    return "in each of its groups all rewards are equal"
