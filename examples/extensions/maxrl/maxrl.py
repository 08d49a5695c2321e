"""MaxRL (arXiv 2602.02710): advantages relative to how often a prompt is solved.

    A_i = (r_i - mean) / mean        rewards from 0 to 1

A rare success on a hard prompt counts more than one of many on an easy prompt, as in the likelihood of the
right answers. `ForkingMaxRL` trains only on the tokens at which a completion could have continued differently (after
arXiv 2506.01939, which finds that a fifth of the tokens account for most of the learning).
"""

from __future__ import annotations

from collections.abc import Sequence

from groupwise.algo.algorithm import Algorithm
from groupwise.types import Rollout, Sample


class MaxRL(Algorithm):
    """The advantages of MaxRL, the same for each token of a completion."""

    def advantages(self, rewards: Sequence[float], rollouts: Sequence[Rollout]) -> list[float]:
        """Return (r - mean) / mean for each rollout; the rewards differ, so that their mean is above 0."""
        if min(rewards) < 0:
            raise ValueError(f"a reward is {min(rewards)}; MaxRL needs rewards from 0 to 1")
        mean = sum(rewards) / len(rewards)
        return [(reward - mean) / mean for reward in rewards]


class ForkingMaxRL(MaxRL):
    """MaxRL on the fifth of a completion's tokens that the sampler held least likely."""

    def token_weights(self, rollout: Rollout, sample: Sample) -> list[float] | None:
        """Return 1 for these tokens and 0 for the others."""
        sampled = sorted(p for p, trained in zip(sample.behaviour_logprobs or (), sample.mask, strict=False) if trained)
        if not sampled:
            return None
        bound = sampled[(len(sampled) - 1) // 5]
        return [float(p <= bound) for p in sample.behaviour_logprobs or ()]
