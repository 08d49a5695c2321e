"""The learner: samples in, adapter updates out.

    forward                   log-probabilities of the completions under the policy or the reference
    forward_backward          a policy loss (algo.loss) on scored samples; gradients accumulate
    forward_backward_supervised   cross-entropy on what the mask marks
    forward_backward_custom   any function of the log-probabilities
    optim_step                clip, step AdamW, zero; a non-finite gradient is refused and counted
    step                      one rollout batch: as many of the above as `minibatches` asks for

A batch is cut into micro-batches by a token budget; every loss divides by counts of the whole batch, so the cut changes
nothing but rounding. With an adapter the reference is this model with its adapter off. Without one (`lora=None`) all
parameters train and the reference, if a term reads it, is a frozen copy.

Shapes: N loss tokens of a micro-batch.
"""

from __future__ import annotations

import copy
import json
import math
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from groupwise.algo.batch import MicroBatch, count_loss_tokens, micro_batches
from groupwise.algo.loss import LossInputs, LossSpec, policy_loss
from groupwise.errors import ConfigError, TrainingError
from groupwise.model import LoadedModel, packed_forward_gap, packed_tolerance, plain_implementation, share_weights
from groupwise.train.logprobs import packed_logprobs, plain_logprobs
from groupwise.train.lora import LoraSpec, adapter_off, add_lora, load_lora, save_lora
from groupwise.types import Sample

MAX_REFUSED_STEPS = 5  # in a row

Metrics = dict[str, float]
TokenLoss = Callable[[MicroBatch, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """AdamW (arXiv 1711.05101)."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class StepResult:
    """`grad_norm` is before clipping; `applied` is False when the step was refused because it was not finite."""

    grad_norm: float
    applied: bool


class Learner:
    """Trains an adapter on (or, with `lora=None`, all parameters of) a base model.

    Args:
        base: the loaded model. An adapter goes into a module tree of the learner's own; `base` is not touched.
        lora: the adapter, or None to train every parameter of `base` itself.
        micro_tokens: token budget of a micro-batch (packed tokens, prompts counted once per group).
        autocast: run the forward in this type over float32 weights (mixed precision); None: in the weights' own.
        seed: of the adapter's random half, of dropout and of the minibatch shuffle.

    Raises:
        ConfigError: the adapter does not fit the model, or all parameters are to be trained in 16 bits.
    """

    def __init__(
        self,
        base: LoadedModel,
        *,
        lora: LoraSpec | None = LoraSpec(),
        optimizer: OptimizerSpec = OptimizerSpec(),
        micro_tokens: int = 8192,
        gradient_checkpointing: bool = False,
        autocast: torch.dtype | None = None,
        seed: int = 0,
    ):
        self.autocast = autocast
        self.base, self.micro_tokens, self.max_grad_norm = base, micro_tokens, optimizer.max_grad_norm
        self.model: PreTrainedModel = share_weights(base.model)
        if lora is None and base.model.dtype.itemsize < 4:
            raise ConfigError(
                f"all parameters would be trained in {str(base.model.dtype).removeprefix('torch.')}, in which most "
                "optimizer steps are too small to change a weight",
                hint="set dtype: float32, or train an adapter (train.lora)",
            )
        self.packed = self._verify_packed()
        self.lora = None if lora is None else add_lora(self.model, lora, seed=seed)
        if lora is None:
            self.model.requires_grad_(True)
        if gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._dropout, self._seed = bool(lora and lora.dropout), seed
        self.model.train(gradient_checkpointing or self._dropout)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self.parameters,
            lr=0.0,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        self._reference: PreTrainedModel | None = None
        self._shuffle = random.Random(seed)
        self.steps = 0
        self.refused_steps = 0
        self._refused_in_a_row = 0

    @property
    def device(self) -> torch.device:
        return self.base.device

    # -- the verbs ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(
        self, samples: Sequence[Sample], *, temperature: float = 1.0, reference: bool = False
    ) -> list[tuple[float, ...]]:
        """Log-probability (nats) of every completion token of each sample, trained or not; in the order given.

        The first token of a completion without a prompt is predicted by nothing: its entry is NaN.
        """
        out: list[tuple[float, ...]] = [()] * len(samples)
        run, training = self._reference_logprobs if reference else self._logprobs, self.model.training
        self.model.eval()  # no dropout
        for batch in self._micro_batches(_unmasked(samples)):
            values = iter(run(batch, temperature)[0].tolist() if len(batch.target_N) else ())
            for row, sample in zip(batch.rows, batch.samples, strict=True):
                out[row] = tuple(next(values) if predicted else math.nan for predicted in sample.mask)
        self.model.train(training)
        return out

    def forward_backward(
        self,
        samples: Sequence[Sample],
        spec: LossSpec,
        *,
        temperature: float = 1.0,
        old_logprobs: Sequence[tuple[float, ...]] | None = None,
    ) -> Metrics:
        """Accumulate the gradient of a policy loss over `samples`.

        Args:
            temperature: the one the samples were drawn at; logits are divided by it.
            old_logprobs: the trainer's snapshot per sample (`forward`), for losses anchored to it; without one the
                current log-probabilities stand in, which is exact for the first step on a batch.
        """
        total_tokens, total_rows = float(count_loss_tokens(samples)), float(len(samples))

        def token_loss(batch: MicroBatch, logprobs_N: Tensor, entropy_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            old_N = None if old_logprobs is None else batch.per_token([old_logprobs[row] for row in batch.rows])
            reference_N = None
            if spec.reads_reference:
                with torch.no_grad():
                    reference_N, _ = self._reference_logprobs(batch, temperature)
            inputs = LossInputs(
                row_N=batch.row_N,
                num_rows=len(batch.rows),
                advantages_N=batch.advantages_N,
                behaviour_N=batch.behaviour_N,
                old_N=old_N,
                reference_N=reference_N,
                total_tokens=total_tokens,
                total_rows=total_rows,
            )
            return policy_loss(logprobs_N, inputs, spec, entropy_N=entropy_N)

        return self._accumulate(samples, token_loss, temperature)

    def forward_backward_supervised(self, samples: Sequence[Sample]) -> Metrics:
        """Accumulate the gradient of the mean cross-entropy (nats per trained token, weighted by `Sample.weights`)."""
        tokens = max(count_loss_tokens(samples), 1)
        total = sum(
            sum(w for w, m in zip(s.weights, s.mask, strict=True) if m) if s.weights else sum(s.mask) for s in samples
        )

        def token_loss(batch: MicroBatch, logprobs_N: Tensor, entropy_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            weights_N = batch.per_token([s.weights or (1.0,) * len(s.mask) for s in batch.samples])
            assert weights_N is not None
            loss = -(logprobs_N * weights_N).sum() / max(total, 1e-9)
            return loss, {"loss/cross_entropy": loss.detach(), "loss/entropy": entropy_N.detach().sum() / tokens}

        return self._accumulate(samples, token_loss, 1.0)

    def forward_backward_custom(
        self,
        samples: Sequence[Sample],
        loss_fn: Callable[[list[Tensor]], tuple[Tensor, Metrics]],
        *,
        temperature: float = 1.0,
    ) -> Metrics:
        """Accumulate the gradient of `loss_fn(logprobs)`, any differentiable function of all log-probabilities.

        `loss_fn` receives one float tensor [T] per sample, an entry per completion token (NaN where nothing predicts
        it), and returns (scalar loss, metrics). Two passes: logprobs without a graph, then one linear in dL/dlogprob.
        """
        leaves = [torch.tensor(lp, requires_grad=True) for lp in self.forward(samples, temperature=temperature)]
        loss, metrics = loss_fn(leaves)
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        slopes = [
            (0.0,) * len(leaf) if grad is None else tuple(grad.masked_fill(leaf.isnan(), 0.0).tolist())
            for leaf, grad in zip(leaves, grads, strict=True)
        ]

        def token_loss(batch: MicroBatch, logprobs_N: Tensor, entropy_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            slope_N = batch.per_token([slopes[row] for row in batch.rows])
            assert slope_N is not None
            return (logprobs_N * slope_N).sum(), {}

        self._accumulate(_unmasked(samples), token_loss, temperature)
        return {"loss/custom": float(loss.detach()), **metrics}

    def optim_step(self, *, learning_rate: float) -> StepResult:
        """Clip to `max_grad_norm`, apply AdamW, zero the gradients. A non-finite gradient changes nothing.

        Raises:
            TrainingError: the fifth refused step in a row.
        """
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm))
        applied = math.isfinite(norm)
        if applied:
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
            self.steps += 1
            self._refused_in_a_row = 0
        else:
            self.refused_steps += 1
            self._refused_in_a_row += 1
        self._optimizer.zero_grad(set_to_none=True)
        if self._refused_in_a_row >= MAX_REFUSED_STEPS:
            raise TrainingError(
                f"{self._refused_in_a_row} optimizer steps in a row had a non-finite gradient (last norm: {norm})",
                hint="lower train.learning_rate, check the rewards for huge values, or train in float32",
            )
        return StepResult(norm, applied)

    def step(
        self,
        samples: Sequence[Sample],
        spec: LossSpec,
        *,
        learning_rate: float,
        minibatches: int = 1,
        temperature: float = 1.0,
    ) -> Metrics:
        """Train on one rollout batch in `minibatches` optimizer steps; metrics are means over them."""
        old = self.forward(samples, temperature=temperature) if minibatches > 1 and spec.reads_old else None
        order = list(range(len(samples)))
        if minibatches > 1:
            order = self._shuffled_groups(samples)
        parts = min(minibatches, len(samples))
        bounds = [len(samples) * part // parts for part in range(parts + 1)]
        collected: list[Metrics] = []
        for start, stop in pairwise(bounds):
            rows = order[start:stop]
            metrics = self.forward_backward(
                [samples[row] for row in rows],
                spec,
                temperature=temperature,
                old_logprobs=None if old is None else [old[row] for row in rows],
            )
            result = self.optim_step(learning_rate=learning_rate)
            metrics["optim/grad_norm"] = result.grad_norm
            metrics["optim/refused"] = float(not result.applied)
            collected.append(metrics)
        keys = dict.fromkeys(key for metrics in collected for key in metrics)
        return {key: _combine(key, [metrics[key] for metrics in collected if key in metrics]) for key in keys}

    def keep_reference(self) -> None:
        """Freeze a copy of the policy as it is now: the reference of full-parameter training (adapters need none)."""
        if self.lora is None:
            self._reference = copy.deepcopy(self.model).eval().requires_grad_(False)

    # -- saving -------------------------------------------------------------------------------------------------------

    def save_adapter(self, directory: Path) -> None:
        """Write the policy into an existing directory: a PEFT adapter, or a whole model when there is no adapter."""
        if self.lora is None:
            self.model.save_pretrained(directory)
            self.base.tokenizer.save_pretrained(directory)
        else:
            save_lora(self.model, self.lora, directory, base_name=self.base.name)

    def save(self, directory: Path) -> None:
        """Write everything that `load` needs to go on exactly: the policy, the optimizer's moments, counters."""
        directory.mkdir(parents=True, exist_ok=True)
        trained = {f"parameter.{i}": p.detach().cpu().contiguous() for i, p in enumerate(self.parameters)}
        moments = {
            f"{key}.{i}": value.detach().cpu().contiguous()
            for i, p in enumerate(self.parameters)
            for key, value in self._optimizer.state.get(p, {}).items()
        }
        save_file(trained | moments, directory / "learner.safetensors")
        counters = {"steps": self.steps, "refused_steps": self.refused_steps, "shuffle": self._shuffle.getstate()}
        (directory / "learner.json").write_text(json.dumps(counters))

    def load(self, directory: Path) -> None:
        """Inverse of `save`, on a learner made with the same arguments."""
        tensors = load_file(directory / "learner.safetensors")
        with torch.no_grad():
            for i, parameter in enumerate(self.parameters):
                parameter.copy_(tensors[f"parameter.{i}"])
                keys = [key for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}.{i}" in tensors]
                self._optimizer.state[parameter] = {key: tensors[f"{key}.{i}"].to(parameter.device) for key in keys}
        counters = json.loads((directory / "learner.json").read_text())
        self.steps, self.refused_steps = counters["steps"], counters["refused_steps"]
        version, state, gauss = counters["shuffle"]
        self._shuffle.setstate((version, tuple(state), gauss))

    def load_adapter(self, directory: Path) -> None:
        """Start from a saved adapter instead of a fresh one. Raises AdapterError when it does not fit."""
        assert self.lora is not None, "full-parameter training starts from a model, not from an adapter"
        load_lora(self.model, self.lora, directory)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _verify_packed(self) -> bool:
        gap, tolerance = packed_forward_gap(self.model), packed_tolerance(self.model)
        if gap <= tolerance:
            return True
        warnings.warn(
            f"{type(self.model).__name__}: the packed forward differs from the model's own by {gap:.3g} nats "
            f"(tolerance {tolerance:g}); training uses padded rows instead, which is correct and several times slower",
            stacklevel=3,
        )
        self.model.set_attn_implementation(plain_implementation(self.model))
        return False

    def _micro_batches(self, samples: Sequence[Sample]) -> Iterator[MicroBatch]:
        return micro_batches(samples, token_budget=self.micro_tokens, device=self.device)

    def _logprobs(
        self, batch: MicroBatch, temperature: float, *, model: PreTrainedModel | None = None
    ) -> tuple[Tensor, Tensor]:
        run = packed_logprobs if self.packed else plain_logprobs
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            return run(model or self.model, batch, temperature=temperature)

    def _reference_logprobs(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        if self.lora is not None:
            with adapter_off(self.model):
                return self._logprobs(batch, temperature)
        assert self._reference is not None, "keep_reference() must be called before full-parameter training"
        return self._logprobs(batch, temperature, model=self._reference)

    def _accumulate(self, samples: Sequence[Sample], token_loss: TokenLoss, temperature: float) -> Metrics:
        metrics: dict[str, list[float]] = {}
        for i, batch in enumerate(self._micro_batches(samples)):
            if not len(batch.target_N):
                continue
            with self._seeded_dropout(i):
                logprobs_N, entropy_N = self._logprobs(batch, temperature)
            loss, values = token_loss(batch, logprobs_N, entropy_N)
            loss.backward()
            for key, value in values.items():
                metrics.setdefault(key, []).append(float(value))
        return {key: _sum(key, values) for key, values in metrics.items()}

    @contextmanager
    def _seeded_dropout(self, micro_batch: int) -> Iterator[None]:
        """Within: dropout depends on the seed, the step and the micro-batch alone, so that a resumed run repeats it."""
        if not self._dropout:
            yield
            return
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            state = f"{self._seed}/{self.steps}/{self.refused_steps}/{micro_batch}"
            torch.manual_seed(random.Random(state).getrandbits(63))
            yield

    def _shuffled_groups(self, samples: Sequence[Sample]) -> list[int]:
        """Row indices with groups in random order, each still together (so its prompt stays shared)."""
        groups: list[list[int]] = []
        for row, sample in enumerate(samples):
            if groups and samples[groups[-1][0]].prompt_ids == sample.prompt_ids:
                groups[-1].append(row)
            else:
                groups.append([row])
        self._shuffle.shuffle(groups)
        return [row for group in groups for row in group]


def _unmasked(samples: Sequence[Sample]) -> list[Sample]:
    """The samples with every completion token that something predicts marked as a loss token."""
    return [replace(s, mask=tuple(int(bool(s.prompt_ids) or t > 0) for t in range(len(s.mask)))) for s in samples]


def _sum(key: str, values: Sequence[float]) -> float:
    """Micro-batch metrics -> the batch's: losses and means are already divided by global counts, so they add up."""
    return max(values) if key.endswith("_max") else min(values) if key.endswith("_min") else math.fsum(values)


def _combine(key: str, values: Sequence[float]) -> float:
    """Metrics of several optimizer steps -> one number."""
    return (
        max(values)
        if key.endswith("_max")
        else min(values)
        if key.endswith("_min")
        else math.fsum(values) / len(values)
    )


def learning_rate_at(step: int, *, peak: float, warmup_steps: int, steps: int, schedule: str = "constant") -> float:
    """The learning rate of optimizer step `step` (from 0): linear warm-up, then constant, linear or cosine to zero."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    progress = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    return peak * (1 - progress) if schedule == "linear" else peak * 0.5 * (1 + math.cos(math.pi * progress))
