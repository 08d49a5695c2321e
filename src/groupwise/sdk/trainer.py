"""The verbs: forward, forward_backward, forward_backward_custom, optim_step, save_state, load_state.

    service = TrainingService(base)                               one base model in memory, one thread that trains
    policy = service.create_training_client(lora=LoraSpec())      an adapter being trained over it; several at once
    reference = policy.create_base_reference()                    the same with its adapter off, forward only

Verbs answer at once with a `Pending` and run one after the other, in the order of the calls, whichever client they are
of. Gradients accumulate over calls until `optim_step`, and are then divided once by the tokens or the sequences of all
of them: how a batch is cut into calls changes nothing but rounding. A verb that refuses its input has changed nothing.

All is done by `train.learner`; these classes turn datums into its samples.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupwise.algo.metrics import Metrics
from groupwise.config.lora import LoraSpec
from groupwise.config.loss import LossSpec
from groupwise.config.trained import TEXT, checked_parts
from groupwise.errors import ConfigError, ContextLengthError, DataError, TrainingError
from groupwise.model.load import LoadedModel
from groupwise.model.packing import MicroBatch
from groupwise.model.readable import check_ids, check_routing
from groupwise.run.update import learner_thread
from groupwise.sdk.alignment import UNKNOWN
from groupwise.sdk.datums import Datum
from groupwise.sdk.losses import CROSS_ENTROPY, LossFn, built_in, check_inputs, checked_custom, rows_of, weights_of
from groupwise.sdk.pending import Pending, T
from groupwise.sdk.state import copied, load, save
from groupwise.train.accumulated_step import Normalization, check_adds_up
from groupwise.train.learner import Learner, OptimStepResult
from groupwise.train.together import BUILDING, Joined, JointPasses
from groupwise.types import Sample


@dataclass(frozen=True, kw_only=True)
class AdamParams:
    """Holds the parameters of an AdamW step (arXiv 1711.05101): the learning rate, the decay rates of both moments, the
    decoupled weight decay, and the norm to which the whole gradient is clipped (0: not clipped). Raises ConfigError for
    a number out of range."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def __post_init__(self) -> None:
        for name, valid, wanted in (
            ("learning_rate", lambda x: 0 <= x < math.inf, "0 or more"),
            ("beta1", lambda x: 0 <= x < 1, "in [0, 1)"),
            ("beta2", lambda x: 0 <= x < 1, "in [0, 1)"),
            ("eps", lambda x: 0 < x < math.inf, "positive"),
            ("weight_decay", lambda x: 0 <= x < math.inf, "0 or more"),
            ("grad_clip_norm", lambda x: 0 <= x < math.inf, "0 (off) or more"),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real) or not valid(value):
                raise ConfigError(f"{name} is {value!r}; it must be {wanted}")


@dataclass(frozen=True, kw_only=True)
class ForwardBackwardOutput:
    """The result of a forward. `loss_fn_outputs[i]["logprobs"]` [N - 1] (nats) are of datum i's targets, under the
    policy as it was for this call; from `forward_backward` they are NaN where the target is not trained."""

    loss_fn_outputs: tuple[Mapping[str, tuple[float, ...]], ...]
    metrics: Metrics = field(default_factory=dict)

    @property
    def logprobs(self) -> list[tuple[float, ...]]:
        """Return the log-probabilities of every datum."""
        return [output["logprobs"] for output in self.loss_fn_outputs]


def what_trains(lora: LoraSpec | None, parameters: Sequence[str]) -> str:
    """Return in words what of a model trains.

    >>> what_trains(LoraSpec(targets="vision"), ()), what_trains(None, ("text", "vision"))
    ('rank 16 and alpha 32 on vision', 'all parameters of text, vision')
    """
    if lora is None:
        return f"all parameters of {', '.join(parameters)}"
    targets = lora.targets if isinstance(lora.targets, str) else ", ".join(lora.targets)
    return f"rank {lora.rank} and alpha {lora.alpha:g} on {targets}"


class TrainingService:
    """Trains any number of policies over one base model.

    Args:
        micro_tokens, gradient_checkpointing, autocast: as for `Learner`, for all policies.
        threads: torch's number of threads; None: torch's own choice.
        passes: the joint passes in which this service's learners compute together with the learners of other services
            over the same base; None: without others.
    """

    def __init__(
        self,
        base: LoadedModel,
        *,
        micro_tokens: int = 8192,
        gradient_checkpointing: bool = False,
        autocast: torch.dtype | None = None,
        threads: int | None = None,
        passes: JointPasses | None = None,
    ):
        self.base, self._passes = base, passes
        self._options: dict[str, Any] = {
            "micro_tokens": micro_tokens,
            "gradient_checkpointing": gradient_checkpointing,
            "autocast": autocast,
        }
        self._thread = learner_thread(threads or torch.get_num_threads())
        self._ident = self._thread.submit(threading.get_ident).result()
        self._numbers = itertools.count(1)

    def create_training_client(
        self,
        *,
        name: str | None = None,
        lora: LoraSpec | None = LoraSpec(),
        parameters: str | Sequence[str] = TEXT,
        seed: int = 0,
        temperature: float = 1.0,
    ) -> TrainingClient:
        """Return a new policy over the base model. `lora=None` trains all parameters; for a model with vision, the
        parts in `parameters`: `all`, or a list of `text`, `vision` and `projector`. Raises ConfigError as `Learner`,
        and for `parameters` together with an adapter."""
        parts = checked_parts(parameters, adapter=lora is not None)
        learner = self.submit(lambda: self._learner(lora, parts, seed)).result()
        return TrainingClient(
            learner,
            service=self,
            name=name or f"policy-{next(self._numbers)}",
            temperature=temperature,
            trains=what_trains(lora, parts),
        )

    def submit(self, work: Callable[[], T]) -> Pending[T]:
        """Run `work` in the training thread, after all verbs called so far. Raises TrainingError when closed."""
        try:
            return Pending(self._thread.submit(work), thread=self._ident)
        except RuntimeError:
            hint = "call it before close(), within setup_infra's `with`; what was saved can be loaded into another one"
            raise TrainingError("the trainer is closed", hint=hint) from None

    def close(self, *, wait: bool = True) -> None:
        """Let pending verbs finish and end the training thread; `wait=False` returns at once."""
        self._thread.shutdown(wait=wait)

    def _learner(self, lora: LoraSpec | None, parameters: Sequence[str], seed: int) -> Learner:
        strategy = None if self._passes is None else Joined(self._passes)
        with BUILDING:
            return Learner(self.base, lora=lora, parameters=parameters, seed=seed, strategy=strategy, **self._options)


class ReferenceClient:
    """Forward only: log-probabilities under the model without its adapter. It has no `optim_step`."""

    def __init__(self, learner: Learner, *, service: TrainingService, temperature: float):
        self.service, self._learner, self.temperature = service, learner, temperature

    def forward(self, data: Sequence[Datum], loss_fn: str = CROSS_ENTROPY) -> Pending[ForwardBackwardOutput]:
        """See `TrainingClient.forward`, under the reference."""
        return self.service.submit(_forward(self._learner, data, loss_fn, temperature=self.temperature, reference=True))


class TrainingClient:
    """Trains one policy: an adapter, or all parameters, as `trains` says."""

    def __init__(
        self, learner: Learner, *, service: TrainingService, name: str, temperature: float = 1.0, trains: str = ""
    ):
        self.learner, self.service, self.name, self.temperature = learner, service, name, temperature
        self.trains = trains
        self.loads = 0  # states that were loaded
        self._step = learner.begin_step(temperature=temperature)

    # -- the verbs -----------------------------------------------------------------------------------------------------

    def forward(self, data: Sequence[Datum], loss_fn: str = CROSS_ENTROPY) -> Pending[ForwardBackwardOutput]:
        """Return log-probabilities (nats) of all N - 1 targets of each datum; changes nothing.

        Raises:
            DataError, ContextLengthError: the model cannot read a datum. At once, as all that is refused.
        """
        return self.service.submit(_forward(self.learner, data, loss_fn, temperature=self.temperature, reference=False))

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str | LossSpec, loss_fn_config: Mapping[str, float] | None = None
    ) -> Pending[ForwardBackwardOutput]:
        """Accumulate the gradient of a loss: a built-in one by name (`losses`) or any `LossSpec`.

        Metrics are those of `algo.loss` for this call; the loss is reduced as the spec says, over this call.

        Raises:
            DataError, ContextLengthError: a datum lacks what the loss reads, or the model cannot read it.
            ConfigError: no such loss or knob, or one that does not go with what has been accumulated.
        """
        _check_data(data)
        _check_kind("loss_fn_config", loss_fn_config, Mapping | None, "give a mapping from knobs to numbers, or none")
        _check_kind(
            "loss_fn", loss_fn, str | LossSpec, "give a name or a LossSpec; forward_backward_custom takes a function"
        )
        if isinstance(loss_fn, LossSpec) and loss_fn_config:
            raise ConfigError("loss_fn_config goes with a built-in loss; a LossSpec has its numbers in itself")
        spec = built_in(loss_fn, loss_fn_config) if isinstance(loss_fn, str) else loss_fn
        weights = weights_of(loss_fn)
        check_inputs(data, spec, weights=weights)
        check_adds_up(spec)
        samples = [datum.sample(weights) for datum in data]
        _check_readable(data, samples, self.learner.base)
        kept = list(data)  # what the caller's list is later is another matter
        return self.service.submit(lambda: self._accumulate(kept, samples, spec))

    def forward_backward_custom(self, data: Sequence[Datum], loss_fn: LossFn) -> Pending[ForwardBackwardOutput]:
        """Accumulate the gradient of `loss_fn(data, logprobs) -> (scalar, metrics)`, any differentiable function of the
        log-probabilities, a float tensor [N - 1] for each datum. Two forwards and a backward.

        Raises as `forward_backward`, and what `loss_fn` raises; a loss that is not finite is a TrainingError.
        """
        if not callable(loss_fn):
            raise ConfigError(f"loss_fn is a {type(loss_fn).__name__}; give a function of (data, logprobs)")
        samples, kept = _whole(self.learner, data), list(data)
        return self.service.submit(lambda: self._accumulate_custom(kept, samples, loss_fn))

    def optim_step(
        self, adam_params: AdamParams, *, grad_accumulation_normalization: Normalization | None = None
    ) -> Pending[OptimStepResult]:
        """Normalise the accumulated gradient, clip it, apply AdamW, and zero it. A gradient that is not finite changes
        nothing and is counted.

        Args:
            grad_accumulation_normalization: what a sum of losses is divided by: its trained tokens, its sequences, or
                None. The mean of a `LossSpec` is taken without being asked for.

        Raises:
            TrainingError: nothing was accumulated, or the fifth refused step in a row.
            ConfigError: a loss that is a mean already would be divided again.
        """
        _check_kind("adam_params", adam_params, AdamParams, "give AdamParams(learning_rate=...)")
        return self.service.submit(lambda: self._apply(adam_params, grad_accumulation_normalization))

    def save_state(self, path: str | Path, *, extra: Mapping[str, Any] | None = None) -> Pending[Path]:
        """Write policy, optimizer and counters, and `extra` with them (`state`).

        Raises StorageError, or TrainingError while a gradient is accumulated, which a state does not hold.
        """
        _check_kind("path", path, str | os.PathLike, "give the name of a directory")
        kept = copied(extra)
        return self.service.submit(lambda: self.save_now(Path(path), kept))

    def load_state(self, path: str | Path) -> Pending[dict[str, Any]]:
        """Return the inverse of `save_state` -> `extra`; what was accumulated is forgotten. Raises as `state.load`."""
        _check_kind("path", path, str | os.PathLike, "give the name of a directory")
        return self.service.submit(lambda: self.load_now(Path(path)))

    def zero_grad(self) -> Pending[None]:
        """Discard the accumulated gradient."""
        return self.service.submit(self.forget_now)

    def create_base_reference(self) -> ReferenceClient:
        """Return a reference that needs no memory: this policy with its adapter off. Raises ConfigError without an
        adapter."""
        if self.learner.lora is None:
            raise ConfigError(
                "all parameters are trained: there is no adapter to switch off",
                hint="set infra.ref_training_shape_id, which provisions a reference of its own",
            )
        return ReferenceClient(self.learner, service=self.service, temperature=self.temperature)

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _accumulate(self, data: Sequence[Datum], samples: Sequence[Sample], spec: LossSpec) -> ForwardBackwardOutput:
        rows: dict[int, list[float]] = {}

        def keep(batch: MicroBatch, logprobs_N: Tensor) -> None:
            values = iter(logprobs_N.tolist())
            for row, sample in zip(batch.rows, batch.samples, strict=True):
                rows[row] = [next(values) if trained else UNKNOWN for trained in sample.mask]

        metrics = self._step.accumulate(
            samples,
            spec,
            old_logprobs=rows_of(data, "old_logprobs"),
            reference_logprobs=rows_of(data, "reference_logprobs"),
            on_logprobs=keep,
            tokens=sum(datum.loss_tokens for datum in data),
        )
        logprobs = [
            (*[UNKNOWN] * datum.skipped, *rows.get(i, [UNKNOWN] * (len(datum.model_input) - datum.skipped)))
            for i, datum in enumerate(data)
        ]
        return ForwardBackwardOutput(loss_fn_outputs=tuple({"logprobs": row} for row in logprobs), metrics=metrics)

    def _accumulate_custom(
        self, data: Sequence[Datum], samples: Sequence[Sample], loss_fn: LossFn
    ) -> ForwardBackwardOutput:
        seen: list[tuple[float, ...]] = []

        def checked(logprobs: list[Tensor]) -> tuple[Tensor, Metrics]:
            seen.extend(tuple(row.tolist()) for row in logprobs)
            return checked_custom(loss_fn(data, logprobs))

        metrics = self._step.accumulate_custom(samples, checked, tokens=sum(datum.loss_tokens for datum in data))
        return ForwardBackwardOutput(loss_fn_outputs=tuple({"logprobs": row} for row in seen), metrics=metrics)

    def _apply(self, adam: AdamParams, normalization: Normalization | None) -> OptimStepResult:
        self.learner.set_adam(
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            max_grad_norm=adam.grad_clip_norm or math.inf,
        )
        return self._step.apply(learning_rate=adam.learning_rate, normalization=normalization)

    def save_now(self, directory: Path, extra: dict[str, Any]) -> Path:
        """Do `save_state` at once, in a function that `submit` runs."""
        if self._step.calls:
            raise TrainingError(
                f"{self._step.calls} calls have accumulated a gradient, which a state does not have",
                hint="call optim_step before save_state",
            )
        save(self.learner, directory, extra=extra)
        return directory

    def load_now(self, directory: Path) -> dict[str, Any]:
        """Do `load_state` at once, in a function that `submit` runs."""
        extra = load(self.learner, directory)
        self.loads += 1
        self.forget_now()
        return extra

    def forget_now(self) -> None:
        """Do `zero_grad` at once, in a function that `submit` runs."""
        self._step.forget()


def _check_kind(name: str, value: object, kind: Any, hint: str) -> None:
    if not isinstance(value, kind):
        raise ConfigError(f"{name} is a {type(value).__name__}; {hint}")


def _check_data(data: Sequence[Datum]) -> None:
    hint = "give a list of Datum"
    if not isinstance(data, Sequence) or isinstance(data, str | bytes):
        raise DataError(f"data is a {type(data).__name__}; {hint}")
    for i, datum in enumerate(data):
        if not isinstance(datum, Datum):
            raise DataError(f"data[{i}] is a {type(datum).__name__}; {hint}")


def _whole(learner: Learner, data: Sequence[Datum]) -> list[Sample]:
    _check_data(data)
    if not data:
        raise DataError("there are no datums", hint="skip the call")
    samples = [datum.whole() for datum in data]
    _check_readable(data, samples, learner.base)
    return samples


def _check_readable(data: Sequence[Datum], samples: Sequence[Sample], base: LoadedModel) -> None:
    """Check that the model can read the data: on a GPU an id or a position out of range would kill the process. The
    last target is not read."""
    for i, datum in enumerate(data):
        if len(datum.model_input) > base.context_length:
            raise ContextLengthError(
                f"data[{i}] has {len(datum.model_input)} tokens; the model reads at most {base.context_length}",
                hint="shorten model_input",
            )
    check_ids(samples, base)
    check_routing(samples, base)


def _forward(
    learner: Learner, data: Sequence[Datum], loss_fn: str, *, temperature: float, reference: bool
) -> Callable[[], ForwardBackwardOutput]:
    if loss_fn != CROSS_ENTROPY:
        raise ConfigError(f"forward computes log-probabilities, for {CROSS_ENTROPY!r}; loss_fn is {loss_fn!r}")
    samples = _whole(learner, data)

    def run() -> ForwardBackwardOutput:
        rows = learner.forward(samples, temperature=temperature, reference=reference)
        return ForwardBackwardOutput(loss_fn_outputs=tuple({"logprobs": row} for row in rows))

    return run
