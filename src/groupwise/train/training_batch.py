"""A batch that is known whole, as optimizer steps: `passes` times over it (mu, num_iterations), each in `minibatches`.

    for each pass:  for each minibatch:  accumulate its gradient, one optimizer step

A step of a run and a posted job, on scored groups or on examples, train through it.

So `Learner.steps`, which counts optimizer steps, grows by passes x minibatches (less those that are refused). In a
run they all have one learning rate: there schedules count rollout batches. What the policy is compared with stays
while it moves: the anchor is the behaviour policy, or a snapshot from before the first of these steps; the reference
follows only after the last.

Next to the samples of the policy there may be demonstrations: a teacher's completions, or the examples of supervised
training, then alone. A step's gradient is that of

    policy loss of its samples  +  coefficient  sum -log pi(y_t) / tokens     over the tokens y_t of its demonstrations

each term with its own denominator, so that neither depends on how much there is of the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise, zip_longest
from random import Random
from typing import TYPE_CHECKING

from torch import Tensor

from groupwise.algo.loss_metrics import averaged
from groupwise.algo.metrics import Metrics
from groupwise.algo.prefixes import groups_of
from groupwise.config.loss import LossSpec
from groupwise.model.packing import MicroBatch
from groupwise.store import faults
from groupwise.train.optimizer import OptimStepResult
from groupwise.train.strategy import Rows
from groupwise.types import Sample

if TYPE_CHECKING:
    from groupwise.train.learner import Learner


@dataclass(frozen=True, kw_only=True)
class TrainingBatch:
    """A batch, cut into optimizer steps: what `Learner.step` takes one after another, and a posted job one between two
    checkpoints.

    Attributes:
        spec: the policy loss of the samples; None where there are demonstrations alone.
        passes: of each pass over the samples, of each minibatch, the rows (indices of `samples`).
        old: log-probabilities of the samples under the policy before the first step (`with_old`), if they are known.
        reference: log-probabilities of the samples under the reference (`with_reference`), if they are known.
        demonstrations: what is learned by cross-entropy; `shown` are the rows of it, in the shape of `passes`.
    """

    samples: Sequence[Sample] = ()
    spec: LossSpec | None = None
    passes: Sequence[Sequence[Sequence[int]]] = ()
    temperature: float = 1.0
    old: Rows | None = None
    reference: Rows | None = None
    demonstrations: Sequence[Sample] = ()
    shown: Sequence[Sequence[Sequence[int]]] = ()
    coefficient: float = 1.0

    @classmethod
    def cut(
        cls,
        samples: Sequence[Sample],
        spec: LossSpec,
        *,
        minibatches: int,
        passes: int,
        shuffle: Random,
        temperature: float = 1.0,
        demonstrations: Sequence[Sample] = (),
        coefficient: float = 1.0,
    ) -> TrainingBatch:
        """Return the samples in `passes` times `minibatches` steps; of each pass in its own order, drawn here. So
        are the demonstrations; where there are fewer of the one than steps, the last steps have none of it."""
        rows = [list(_minibatches(samples, minibatches, shuffle=shuffle)) for _ in range(passes)]
        if not demonstrations:
            return cls(samples=samples, spec=spec, passes=rows, temperature=temperature)
        shown = [list(_minibatches(demonstrations, minibatches, shuffle=shuffle)) for _ in range(passes)]
        both = [list(zip_longest(*each, fillvalue=[])) for each in zip(rows, shown, strict=True)]
        return cls(
            samples=samples,
            spec=spec,
            passes=[[rows for rows, _ in steps] for steps in both],
            temperature=temperature,
            demonstrations=demonstrations,
            shown=[[rows for _, rows in steps] for steps in both],
            coefficient=coefficient,
        )

    @property
    def steps(self) -> int:
        """Return the number of optimizer steps."""
        return len(self.step_rows)

    @cached_property
    def step_rows(self) -> Sequence[tuple[Sequence[int], Sequence[int]]]:
        """Return the rows of each optimizer step: of the samples, and of the demonstrations."""
        return list(zip_longest(chain.from_iterable(self.passes), chain.from_iterable(self.shown), fillvalue=()))

    def step_samples(self, step: int) -> list[Sample]:
        """Return all that goes through the model in optimizer step `step`, from 0."""
        rows, shown = self.step_rows[step]
        return [*(self.samples[row] for row in rows), *(self.demonstrations[row] for row in shown)]

    def with_old(self, learner: Learner) -> TrainingBatch:
        """Return it with the learner's policy as it is as the one before the first step.

        It is computed in the minibatches that are trained: what is packed together decides how 16-bit numbers are
        rounded, and the same packing gives a ratio of exactly 1 where the policy has not moved.
        """
        old: list[tuple[float, ...]] = [()] * len(self.samples)
        for rows in self.passes[0]:
            logprobs = learner.forward([self.samples[row] for row in rows], temperature=self.temperature)
            for row, values in zip(rows, logprobs, strict=True):
                old[row] = values
        return replace(self, old=old)

    def with_reference(self, learner: Learner) -> TrainingBatch:
        """Return it with the reference, where more than one pass reads it; else each step computes that of its
        samples."""
        if self.spec is None or len(self.passes) < 2 or not self.spec.reads_reference or not self.samples:
            return self
        reference = learner.forward(self.samples, temperature=self.temperature, reference=True)
        return replace(self, reference=reference)

    def take_step(self, learner: Learner, step: int, *, learning_rate: float) -> tuple[Metrics, OptimStepResult]:
        """Take optimizer step `step`, from 0. Raises TrainingError as `Learner.optim_step`."""
        metrics = self.accumulate(learner, step)
        faults.point("train:after-backward")
        result = learner.optim_step(learning_rate=learning_rate)
        faults.point("train:after-step")
        return metrics, result

    def accumulate(self, learner: Learner, step: int) -> Metrics:
        """Run forward and backward of optimizer step `step`, from 0."""
        (rows, shown), metrics = self.step_rows[step], dict[str, float]()
        if shown:
            metrics |= learner.forward_backward_supervised(
                [self.demonstrations[row] for row in shown], coefficient=self.coefficient
            )
        if self.spec is None or (shown and not rows):
            return metrics
        return metrics | learner.forward_backward(
            [self.samples[row] for row in rows],
            self.spec,
            temperature=self.temperature,
            old_logprobs=None if self.old is None else [self.old[row] for row in rows],
            reference_logprobs=None if self.reference is None else [self.reference[row] for row in rows],
        )


def train_on_batch(learner: Learner, batch: TrainingBatch, *, learning_rate: float) -> dict[str, float]:
    """Take all optimizer steps of the batch. Metrics are means over them, extremes of all of them."""
    collected: list[Metrics] = []
    for step in range(batch.steps):
        metrics, result = batch.take_step(learner, step, learning_rate=learning_rate)
        collected.append({**metrics, **result.metrics()})
    learner.end_batch()
    return averaged(collected)


def _minibatches(samples: Sequence[Sample], count: int, *, shuffle: Random) -> Iterator[list[int]]:
    """Yield the row indices of each minibatch of a pass; of several in a new order, in which groups stay together, so
    that their prompts are still shared."""
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


def unmasked(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples with every completion token that something predicts marked as a loss token."""
    return [
        replace(s, mask=tuple(int(bool(s.prompt_ids) or t > 0) for t in range(len(s.mask))), soft_targets=None)
        for s in samples
    ]


def of_tokens(batch: MicroBatch, tokens: int) -> tuple[float, float]:
    """Return a micro-batch's share of a batch of this many loss tokens, where the loss is a mean over them."""
    return len(batch.target_N) / tokens, len(batch.target_N) / tokens


def no_loss(logprobs_N: Tensor, entropy_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a micro-batch that stands for no sample, and is run because other processes run one."""
    return 0 * (logprobs_N.sum() + entropy_N.sum()), {}
