"""One rollout batch as optimizer steps: `passes` times over it (mu, num_iterations), each in `minibatches`.

    for each pass:  for each minibatch:  accumulate its gradient, one optimizer step

So `Learner.steps`, which counts optimizer steps, grows by passes x minibatches (less those that are refused), all at
one learning rate: schedules count rollout batches. What the policy is compared with stays while it moves: the anchor is
the behaviour policy, or a snapshot from before the first of these steps; the reference follows only after the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING

from groupwise.algo.loss import averaged
from groupwise.algo.prefixes import groups_of
from groupwise.config.loss import LossSpec
from groupwise.types import Sample

if TYPE_CHECKING:
    from groupwise.train.learner import Learner


def train_on_batch(
    learner: Learner,
    samples: Sequence[Sample],
    spec: LossSpec,
    *,
    learning_rate: float,
    minibatches: int,
    passes: int,
    temperature: float,
) -> dict[str, float]:
    """`Learner.step`. Metrics are means over the optimizer steps, extremes of all of them."""
    every = [list(_minibatches(samples, minibatches, shuffle=learner.shuffle)) for _ in range(passes)]
    several = passes * minibatches > 1
    old = snapshot(learner, samples, every[0], temperature=temperature) if several and spec.reads_old else None
    reused = passes > 1 and spec.reads_reference  # else every sample's is computed once anyway
    reference = learner.forward(samples, temperature=temperature, reference=True) if reused else None
    collected: list[dict[str, float]] = []
    for rows in (part for parts in every for part in parts):
        metrics = learner.forward_backward(
            [samples[row] for row in rows],
            spec,
            temperature=temperature,
            old_logprobs=None if old is None else [old[row] for row in rows],
            reference_logprobs=None if reference is None else [reference[row] for row in rows],
        )
        result = learner.optim_step(learning_rate=learning_rate)
        collected.append({**metrics, **result.metrics()})
    learner.end_batch()
    return averaged(collected)


def snapshot(
    learner: Learner, samples: Sequence[Sample], minibatches: Iterable[Sequence[int]], *, temperature: float
) -> list[tuple[float, ...]]:
    """Log-probabilities of the samples under the policy as it is, computed in the minibatches (row indices) that are
    trained: what is packed together decides how 16-bit numbers are rounded, and the same packing gives a ratio of
    exactly 1 where the policy has not moved."""
    old: list[tuple[float, ...]] = [()] * len(samples)
    for rows in minibatches:
        logprobs = learner.forward([samples[row] for row in rows], temperature=temperature)
        for row, values in zip(rows, logprobs, strict=True):
            old[row] = values
    return old


def _minibatches(samples: Sequence[Sample], count: int, *, shuffle: Random) -> Iterator[list[int]]:
    """The row indices of each minibatch of a pass; of several in a new order, in which groups stay together, so that
    their prompts are still shared."""
    order = list(range(len(samples)))
    if count > 1:
        rows = iter(order)
        groups = [[next(rows) for _ in group] for group in groups_of(samples)]
        shuffle.shuffle(groups)
        order = [row for group in groups for row in group]
    starts = [place for place, row in enumerate(order) if place == 0 or not samples[row].continues]  # of episodes
    parts = min(count, len(starts))
    cuts = [starts[len(starts) * part // parts] for part in range(parts)]
    for start, stop in pairwise([*cuts, len(samples)]):
        yield order[start:stop]
