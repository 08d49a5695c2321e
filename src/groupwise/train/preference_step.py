"""A step on preference pairs: `passes` times over them, each in `minibatches` optimizer steps.

    for each pass:  for each minibatch of pairs:  forward under the reference, forward and backward, one optimizer step

The reference stands still meanwhile, so that of several passes only one forward under it is needed, of all pairs before
the first. It follows after the last (`train/reference.py`): `ema` and `refresh` are those of TR-DPO (arXiv 2404.09656),
a step being what all of the pairs are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from groupwise.algo.loss_metrics import averaged
from groupwise.algo.metrics import Metrics
from groupwise.algo.preference import Pair
from groupwise.config.preference import PreferenceConfig

if TYPE_CHECKING:
    from groupwise.train.learner import Learner


def train_on_pairs(
    learner: Learner,
    pairs: Sequence[Pair],
    config: PreferenceConfig,
    *,
    learning_rate: float,
    minibatches: int = 1,
    passes: int = 1,
) -> Metrics:
    """Take all optimizer steps on the pairs. Metrics are means over them, extremes of all of them."""
    collected: list[Metrics] = []
    parts, known = min(minibatches, len(pairs)), None
    if passes > 1:
        known = learner.forward([sample for pair in pairs for sample in pair], reference=True)
    for _ in range(passes):
        order = list(range(len(pairs)))
        if parts > 1:
            learner.shuffle.shuffle(order)
        for part in range(parts):
            rows = order[len(pairs) * part // parts : len(pairs) * (part + 1) // parts]
            reference = None if known is None else [known[2 * row + side] for row in rows for side in (0, 1)]
            metrics = learner.forward_backward_preference(
                [pairs[row] for row in rows], config, reference_logprobs=reference
            )
            result = learner.optim_step(learning_rate=learning_rate)
            collected.append({**metrics, **result.metrics()})
    learner.end_batch()
    return averaged(collected)
