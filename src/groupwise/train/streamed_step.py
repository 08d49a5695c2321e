"""One optimizer step on a batch that arrives in parts, while the rest of it is still being sampled or scored.

    stream = learner.begin_step(spec)
    stream.accumulate(samples)          as often as groups come
    stream.finish(learning_rate=...)    -> metrics

The update is that of `Learner.step` on all of the samples, but for rounding, although the batch's size is known only
at the end. A policy loss is a sum over tokens, divided by one number D of the whole batch,

    token_mean                     D = its loss tokens
    sequence_mean, sequence_sum    D = its rows            (a row's own length is known with the row)
    prompt_mean                    D = its prompts         (all samples of a prompt come together)
    constant                       D = its rows            (times a constant)
    sum                            D = 1

so the gradient of the sum is accumulated, and divided by D before it is clipped and applied. The entropy bonus is a
mean over tokens whatever the reduction; beside one that divides by rows there would be two such numbers, and the sum
of two gradients cannot be taken apart again. That combination is refused.

What is a statistic of the whole batch before the loss, such as the advantages of `batch_std`, is the caller's to
know. The parameters do not change before `finish`, so the anchor of the first optimizer step holds for all parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from groupwise.algo.loss_metrics import combined, rescaled
from groupwise.config.loss import LossSpec
from groupwise.errors import ConfigError
from groupwise.model.packing import count_loss_tokens, count_sequences
from groupwise.types import Sample

if TYPE_CHECKING:
    from groupwise.train.learner import Learner

SUMS = (1.0, 1.0)  # totals of a batch of one token and one row: nothing is divided


class StreamedStep:
    """Made by `Learner.begin_step`. `tokens` and `rows` are what has been accumulated so far."""

    def __init__(self, learner: Learner, spec: LossSpec, *, temperature: float):
        if not spec.streams:
            raise ConfigError(
                f"an entropy bonus (entropy_coeff {spec.entropy_coeff:g}) with reduction {spec.reduction!r} cannot be "
                "accumulated before the size of the batch is known: one is divided by tokens, the other is not",
                hint="use reduction token_mean, or take the batch whole (rollout.stream_groups: 0)",
            )
        self._learner, self._spec, self._temperature = learner, spec, temperature
        self._parts: list[dict[str, float]] = []
        self.tokens, self.rows = 0, 0
        learner.zero_grad()

    def accumulate(self, samples: Sequence[Sample]) -> None:
        """Forward and backward of some of the step's samples; whole rows, and best whole groups."""
        metrics = self._learner.forward_backward(samples, self._spec, temperature=self._temperature, totals=SUMS)
        self._parts.append(metrics)
        self.tokens += count_loss_tokens(samples)
        self.rows += count_sequences(samples, by_prompt=self._spec.by_prompt)

    def finish(self, *, learning_rate: float) -> dict[str, float]:
        """Return the optimizer step -> the metrics of the whole; nothing is done, and none returned, without any loss
        token.

        Raises:
            TrainingError: as `Learner.optim_step`.
        """
        if not self.tokens:
            return {}
        denominator = self._spec.denominator(tokens=self.tokens, rows=self.rows)
        self._learner.divide_gradients(denominator)
        result = self._learner.optim_step(learning_rate=learning_rate)
        self._learner.end_batch()
        metrics = rescaled(combined(self._parts), tokens=self.tokens, policy=denominator)
        return {**metrics, **result.metrics()}
