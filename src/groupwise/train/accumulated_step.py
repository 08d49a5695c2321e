"""One optimizer step on a batch that arrives in parts, while the rest of it is still being sampled, scored or sent.

    step = learner.begin_step()
    step.accumulate(samples, spec)          as often as parts come
    step.apply(learning_rate=...)           divide, clip, AdamW
    step.finish(learning_rate=...)          the same at the end of a rollout batch -> the metrics of the whole

A run with `rollout.stream_groups`, a loop of the SDK and a client of the Tinker wire train through it. The update is
that of `Learner.step` on all of the samples, up to rounding, although the batch's size is known only at the end. A
policy loss is a sum over tokens, divided by one number D of the whole batch,

    token_mean                     D = its loss tokens
    sequence_mean, sequence_sum    D = its rows            (a row's own length is known with the row)
    prompt_mean                    D = its prompts         (all samples of a prompt come together)
    constant                       D = its rows            (times a constant)
    sum                            D = 1

so the gradient of the sum is accumulated, and divided by D before it is clipped and applied. The entropy bonus is a
mean over tokens whatever the reduction; with a reduction that divides by rows there would be two such numbers, and the
sum of two gradients cannot be taken apart again. That combination is refused.

What is a statistic of the whole batch before the loss, such as the advantages of `batch_std`, is the caller's to
know. The parameters do not change before `apply`, so the anchor of the first optimizer step holds for all parts.

A part that fails in its midst may have added some of its gradient. As the first of a step it leaves nothing behind and
may come again; after others, whose gradient it has spoilt, the step is not made: `apply` says so and forgets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from groupwise.algo.loss_metrics import combined, rescaled
from groupwise.algo.metrics import Metrics
from groupwise.config.loss import LossSpec
from groupwise.errors import ConfigError, TrainingError
from groupwise.model.packing import MicroBatch, count_loss_tokens, count_sequences
from groupwise.train.optimizer import OptimStepResult
from groupwise.train.strategy import Rows
from groupwise.types import Sample

if TYPE_CHECKING:
    from groupwise.train.learner import Learner

Normalization = Literal["NUM_LOSS_TOKENS", "NUM_SEQUENCES"]

NORMALIZATIONS = ("NUM_LOSS_TOKENS", "NUM_SEQUENCES")

_ONE_TOKEN = (1.0, 1.0)  # totals of a batch of one token and one row: nothing is divided


def check_adds_up(spec: LossSpec) -> None:
    """Raise ConfigError for a loss that cannot be accumulated before the size of its batch is known."""
    if not spec.streams:
        raise ConfigError(
            f"an entropy bonus (entropy_coeff {spec.entropy_coeff:g}) with reduction {spec.reduction!r} cannot be "
            "accumulated before the size of the batch is known: one is divided by tokens, the other is not",
            hint="use reduction token_mean, or take the batch whole (in a run, rollout.stream_groups: 0)",
        )


class AccumulatedStep:
    """Accumulates gradients of parts until one optimizer step applies them.

    Attributes:
        tokens, rows, calls: loss tokens, rows (with `prompt_mean`, prompts) and parts since the last optimizer step.
    """

    def __init__(self, learner: Learner, *, temperature: float = 1.0):
        self._learner, self._temperature = learner, temperature
        self._start()

    def _start(self) -> None:
        self._parts: list[Metrics] = []
        self._spec: LossSpec | None = None  # of the parts; None: a custom loss, which is a sum
        self._spoilt = False  # there may be some of the gradient of a part that failed
        self.tokens = self.rows = self.calls = 0

    def accumulate(
        self,
        samples: Sequence[Sample],
        spec: LossSpec,
        *,
        old_logprobs: Rows | None = None,
        reference_logprobs: Rows | None = None,
        on_logprobs: Callable[[MicroBatch, Tensor], None] | None = None,
        tokens: int | None = None,
    ) -> Metrics:
        """Run forward and backward on some of the step's samples; whole rows, and best whole groups.

        Returns the metrics of these samples, the loss reduced over them alone.

        Args:
            old_logprobs, reference_logprobs, on_logprobs: as `Learner.forward_backward` takes them.
            tokens: loss tokens that the samples count for; None: all that their masks mark.

        Raises:
            ConfigError: the loss does not add up, or has another divisor than the parts before.
        """
        check_adds_up(spec)
        self._check_divisor(spec)
        with self._adding():
            metrics = self._learner.forward_backward(
                samples,
                spec,
                temperature=self._temperature,
                old_logprobs=old_logprobs,
                reference_logprobs=reference_logprobs,
                totals=_ONE_TOKEN,
                on_logprobs=on_logprobs,
            )
        tokens = count_loss_tokens(samples) if tokens is None else tokens
        rows = count_sequences(samples, by_prompt=spec.by_prompt)
        self._count(metrics, spec, tokens=tokens, rows=rows)
        if not tokens:
            return metrics
        return rescaled(metrics, tokens=tokens, policy=spec.denominator(tokens=tokens, rows=rows))

    def accumulate_custom(
        self, samples: Sequence[Sample], loss_fn: Callable[[list[Tensor]], tuple[Tensor, Metrics]], *, tokens: int
    ) -> Metrics:
        """Run forward and backward of a function of the log-probabilities (`Learner.forward_backward_custom`), which
        counts as a sum over `tokens` loss tokens. Raises ConfigError after parts whose loss is a mean."""
        self._check_divisor(None)
        with self._adding():
            metrics = self._learner.forward_backward_custom(samples, loss_fn, temperature=self._temperature)
        self._count(metrics, None, tokens=tokens, rows=len(samples))
        return metrics

    def apply(self, *, learning_rate: float, normalization: Normalization | None = None) -> OptimStepResult:
        """Divide the accumulated gradient by D, clip it, apply AdamW, and begin the next step.

        Args:
            normalization: what a sum of losses is divided by, its loss tokens or its rows; None: by nothing.

        Raises:
            TrainingError: nothing was accumulated, or a part failed in its midst; and as `Learner.optim_step`.
            ConfigError: a loss that is a mean already would be divided again; what was accumulated is still there.
        """
        if not self.calls:
            raise TrainingError("nothing was accumulated since the last step", hint="call forward_backward first")
        if self._spoilt:
            self.forget()
            raise TrainingError(
                "a forward_backward since the last step failed in its midst, so that the gradient has some of it: no "
                "step was made, and the gradient is forgotten",
                hint="send the whole batch again",
            )
        self._learner.divide_gradients(self._divisor(normalization))
        self._start()
        return self._learner.optim_step(learning_rate=learning_rate)

    def finish(self, *, learning_rate: float) -> Metrics:
        """Apply the step at the end of a rollout batch -> the metrics of the whole batch; nothing is done, and none
        returned, without any loss token. Raises as `apply`."""
        if not self.tokens or self._spec is None:
            return {}
        denominator = self._spec.denominator(tokens=self.tokens, rows=self.rows)
        metrics = rescaled(combined(self._parts), tokens=self.tokens, policy=denominator)
        result = self.apply(learning_rate=learning_rate)
        self._learner.end_batch()
        return {**metrics, **result.metrics()}

    def forget(self) -> None:
        """Discard what has been accumulated."""
        self._learner.zero_grad()
        self._start()

    @contextmanager
    def _adding(self) -> Iterator[None]:
        """Context manager: a part is being added to the gradient."""
        before = self._learner.accumulated
        try:
            yield
        except Exception:
            if not self.calls:
                self._learner.zero_grad()
            elif self._learner.accumulated != before or self._learner.lora is None:  # or a backward ended in its midst
                self._spoilt = True
            raise

    def _count(self, metrics: Metrics, spec: LossSpec | None, *, tokens: int, rows: int) -> None:
        self._parts.append(metrics)
        self._spec = spec
        self.tokens, self.rows, self.calls = self.tokens + tokens, self.rows + rows, self.calls + 1

    def _check_divisor(self, spec: LossSpec | None) -> None:
        if self.calls and _reduction(spec) != _reduction(self._spec):
            raise ConfigError(
                f"a loss with reduction {_reduction(spec)!r} after one with {_reduction(self._spec)!r}: "
                "one gradient cannot be divided by two numbers",
                hint="call optim_step between them, or give both losses one reduction",
            )

    def _divisor(self, normalization: Normalization | None) -> float:
        if normalization is None:
            return 1.0 if self._spec is None else self._spec.denominator(tokens=self.tokens, rows=self.rows)
        if normalization not in NORMALIZATIONS:
            valid = ", ".join((*NORMALIZATIONS, "None"))
            raise ConfigError(f"grad_accumulation_normalization is {normalization!r}; valid: {valid}")
        if _reduction(self._spec) != "sum":
            raise ConfigError(
                f"{normalization} would divide again what reduction {_reduction(self._spec)!r} divides",
                hint="leave grad_accumulation_normalization out",
            )
        return max(self.tokens if normalization == "NUM_LOSS_TOKENS" else self.rows, 1.0)


def _reduction(spec: LossSpec | None) -> str:
    return "sum" if spec is None else spec.reduction
