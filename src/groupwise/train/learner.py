"""The learner: samples in, adapter updates out.

    forward                   log-probabilities of the completions under the policy or the reference
    forward_backward          a policy loss (algo.loss) on scored samples; gradients accumulate
    forward_backward_supervised   cross-entropy on what the mask marks
    forward_backward_preference   a loss of preference pairs (algo.preference)
    forward_backward_custom   any function of the log-probabilities
    optim_step                clip, step AdamW, zero; a non-finite gradient is refused and counted
    step                      one rollout batch: as many of the above as `minibatches` and `passes` ask for
    begin_step                one batch that arrives in parts (`accumulated_step`)

A batch is cut into micro-batches by a token budget; every loss divides by counts of the whole batch, so the cut changes
nothing but rounding, and one for which a GPU's memory does not suffice is cut again. A small model's run side by side
(`ThreadedMicroBatches`). Without an adapter (`lora=None`) all parameters train. The reference is `reference.py`'s
affair.

Shapes: N loss tokens of a micro-batch.
"""

from __future__ import annotations

import gc
import math
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from groupwise.algo.kl import kl_metrics, measured_rows
from groupwise.algo.loss import policy_loss
from groupwise.algo.loss_inputs import LossInputs
from groupwise.algo.loss_metrics import as_numbers, combined
from groupwise.algo.metrics import Metrics
from groupwise.algo.preference import Pair, preference_loss
from groupwise.config.lora import LoraSpec
from groupwise.config.loss import LossSpec
from groupwise.config.preference import PreferenceConfig
from groupwise.config.run import Attention, OptimizerConfig
from groupwise.config.trained import TEXT
from groupwise.errors import ConfigError, ContextLengthError, TrainingError
from groupwise.model.backbone import checkpoint_layers, is_lean
from groupwise.model.checkpoint_tensors import TakeTensor
from groupwise.model.flex_trial import why_not_flex
from groupwise.model.image_tokens import vision_of
from groupwise.model.layouts import FLEX, Layouts, merged_for
from groupwise.model.load import LoadedModel, longest_row
from groupwise.model.mixture import RouterOutput, Routers, balancing_coefficient, load_balancing
from groupwise.model.packed_check import PLAIN_COST, look, turn_plain, why_twin_not_packed
from groupwise.model.packing import (
    MicroBatch,
    count_loss_tokens,
    count_sequences,
    micro_batches,
    padded_batches,
    pair_batches,
    sequence_lengths,
    side_by_side,
)
from groupwise.model.vision import train_parts
from groupwise.train.accumulated_step import AccumulatedStep
from groupwise.train.forward import of_tokens_alone
from groupwise.train.lanes import ThreadedMicroBatches, is_light
from groupwise.train.lora import adapter_as, add_lora, load_lora, router_parameters, save_lora, without_dropout
from groupwise.train.optimizer import OptimStepResult, make_optimizer
from groupwise.train.reference import Reference, ReferenceSpec
from groupwise.train.schedule import learning_rate_at
from groupwise.train.strategy import Rows, SingleProcess, TokenLoss, verb
from groupwise.train.training_batch import TrainingBatch, no_loss, of_tokens, train_on_batch, unmasked
from groupwise.types import Sample

__all__ = ["Learner", "Metrics", "OptimStepResult", "learning_rate_at"]

MAX_REFUSED_STEPS = 5  # in a row

Gradients = Sequence[Tensor | None]  # of the parameters, in their order; empty where they are added up already

Item = tuple[int, tuple[MicroBatch, Tensor | None]]  # a micro-batch's number, itself, the reference's log-probabilities

PassedBatch = tuple[MicroBatch, Tensor, dict[str, Tensor], Gradients]  # ... log-probabilities, metrics, gradients

Listener = Callable[[MicroBatch, Tensor], None]  # logprobs_N, without a graph

DEFAULTS = OptimizerConfig()


class Learner:
    """Trains an adapter on (or, with `lora=None`, all parameters of) a base model.

    Args:
        base: the loaded model. An adapter goes into a module tree of the learner's own; `base` is not touched.
        lora: the adapter, or None to train parameters of `base` itself, of the parts that `parameters` names.
        micro_tokens: token budget of a micro-batch: packed tokens, those that samples share counted once; where the
            model cannot run packed, tokens of padded rows.
        attention: how it is computed over packed rows, `merged` or `flex` (`model.attention`); `auto`: flex on a GPU,
            if the model is not so small that waiting for its kernels' compiler costs more than they save.
        gradient_checkpointing: compute a layer's activations again in the backward pass; `offload`: and keep its input
            in the CPU's memory until then.
        autocast: run the forward in this type over float32 weights (mixed precision); None: in the weights' own.
        reference: the policy against which KLs are measured.
        seed: the seed of the adapter's random half, of dropout and of the minibatch shuffle.
        threads: torch's threads for training; None: torch's own number.
        router_replay: whether routers choose the experts of `Sample.routed_experts`, where there are any.
        strategy: trains in this process alone, or in several processes together (`data_parallel.py`).

    Raises:
        ConfigError: the adapter does not fit the model, or all parameters are to be trained in 16 bits.
        ModelError: the model's logits are not what its LM head makes of its last hidden states.
    """

    def __init__(
        self,
        base: LoadedModel,
        *,
        lora: LoraSpec | None = LoraSpec(),
        parameters: Sequence[str] = (TEXT,),
        optimizer: OptimizerConfig = DEFAULTS,
        micro_tokens: int = DEFAULTS.micro_tokens,
        gradient_checkpointing: bool | Literal["offload"] = False,
        attention: Attention = "auto",
        autocast: torch.dtype | None = None,
        reference: ReferenceSpec = ReferenceSpec(),
        seed: int = 0,
        threads: int | None = None,
        router_replay: bool = True,
        strategy: SingleProcess | None = None,
    ):
        self.strategy, self._replays = strategy or SingleProcess(), router_replay
        self.autocast = autocast
        self.micro_tokens, self.max_grad_norm = micro_tokens, optimizer.max_grad_norm
        if lora is None and base.quantization is not None:
            raise ConfigError(
                f"all parameters would be trained, and those of {base.name!r} are quantised ({base.quantization})",
                hint="train an adapter (train.lora), or set quantization: null",
            )
        if lora is None and base.model.dtype.itemsize < 4:
            raise ConfigError(
                f"all parameters would be trained in {str(base.model.dtype).removeprefix('torch.')}, in which most "
                "optimizer steps are too small to change a weight",
                hint="set dtype: float32, on a GPU with train.mixed_precision: true; or train an adapter (train.lora)",
            )
        self.base, self.model = self.strategy.tree(base, all_parameters=lora is None)
        self.packed = self._verify_packed()
        self.why_not_flex: str | None = None  # where it was asked for and is not used
        self.layouts = merged_for(self.model)
        if self.packed and (attention == "flex" or (attention == "auto" and self._pays_for_flex())):
            self.layouts = self._try_flex(checkpointing=bool(gradient_checkpointing))
        with self.strategy.as_if_whole(self.model):
            self.lora = None if lora is None else add_lora(self.model, lora, seed=seed)
        if lora is None:
            train_parts(self.model, parameters)
        self._routers = Routers(self.model)
        train = any(parameter.requires_grad for parameter in router_parameters(self.model))
        self.balances = balancing_coefficient(self.model) if train else 0.0
        if gradient_checkpointing:
            checkpoint_layers(self.model, device=self.device, offload=gradient_checkpointing == "offload")
        self.strategy.shard(self)
        threads = threads or torch.get_num_threads()
        self._lanes = ThreadedMicroBatches(threads if self._is_small(dropout=bool(lora and lora.dropout)) else 1)
        self.threads = 1 if self._lanes.most > 1 else threads  # of torch, in the thread that trains
        self._dropout, self._seed = bool(lora and lora.dropout), seed
        self.model.train(bool(gradient_checkpointing) or self._dropout)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(self.parameters, optimizer)
        self.reference = Reference(
            reference, model=self.model, parameters=self.parameters, adapter=self.lora is not None
        )
        self.shuffle = random.Random(seed)
        self.steps = 0  # optimizer steps that were applied
        self.refused_steps = self._refused_in_a_row = 0
        self.accumulated = 0  # micro-batches whose gradients were added since the last optimizer step

    @property
    def device(self) -> torch.device:
        return self.strategy.device(self.base)

    @property
    def routes(self) -> bool:
        """Return whether the model is a mixture of experts whose choice can be replayed."""
        return bool(self._routers.modules)

    @property
    def computes_alone(self) -> bool:
        """Return whether a micro-batch has one of torch's threads, so that others, also another learner's, run at the
        same time."""
        return self._lanes.most > 1

    # -- the verbs ----------------------------------------------------------------------------------------------------

    @verb
    def forward(
        self, samples: Sequence[Sample], *, temperature: float = 1.0, reference: bool = False
    ) -> list[tuple[float, ...]]:
        """Log-probability (nats) of every completion token of each sample, trained or not, or of its target where the
        sample has targets; in the order given.

        The first token of a completion without a prompt is predicted by nothing: its entry is NaN. `reference`: under
        the reference, not the policy; at the same temperature the two can be compared.
        """
        mine = self.strategy.share(samples)
        out: list[tuple[float, ...]] = [()] * len(mine)
        lanes, batches = self._cut(unmasked([samples[row] for row in mine]))
        with without_dropout(self.model):
            known = self._frozen(batches, temperature, lanes=lanes, reference=reference)
        for batch, logprobs_N in known:
            values = iter(logprobs_N.tolist())
            for row, sample in zip(batch.rows, batch.samples, strict=True):
                out[row] = tuple(next(values) if predicted else math.nan for predicted in sample.mask)
        return self.strategy.gathered(mine, out, total=len(samples))

    @verb
    def forward_of(
        self, adapter: Mapping[str, Tensor] | None, samples: Sequence[Sample], *, temperature: float = 1.0
    ) -> list[tuple[float, ...]]:
        """Return `forward` under another adapter of the same shape (`read_lora`); None: under none."""
        with adapter_as(self.model, adapter):
            return self.forward(samples, temperature=temperature)

    @verb
    def forward_backward(
        self,
        samples: Sequence[Sample],
        spec: LossSpec,
        *,
        temperature: float = 1.0,
        old_logprobs: Rows | None = None,
        reference_logprobs: Rows | None = None,
        totals: tuple[float, float] | None = None,
        on_logprobs: Listener | None = None,
    ) -> Metrics:
        """Accumulate the gradient of a policy loss over `samples`.

        Args:
            temperature: the one the samples were drawn at; logits are divided by it.
            old_logprobs: the trainer's snapshot per sample (`forward`), for losses anchored to it; without one the
                current log-probabilities stand in, which is exact for the first step on a batch.
            reference_logprobs: the reference's per sample (`forward`); without them they are computed if read.
            totals: loss tokens and rows of the batch that `samples` are a part of; None: they are all of it.
            on_logprobs: is shown each micro-batch and the log-probabilities of its loss tokens.
        """
        if not spec.reads_soft_targets:
            samples = [replace(sample, soft_targets=None) if sample.soft_targets else sample for sample in samples]
        by_prompt = spec.by_prompt
        counted = float(count_loss_tokens(samples)), float(count_sequences(samples, by_prompt=by_prompt))
        total_tokens, total_rows = totals or counted
        several = by_prompt or any(sample.continues for sample in samples)
        lengths = sequence_lengths(samples, by_prompt=by_prompt) if several else None
        of_sequence = None
        if self.balances and spec.reduction not in ("token_mean", "sum"):
            of_sequence = lengths or sequence_lengths(samples, by_prompt=by_prompt)

        def term(batch: MicroBatch, reference_N: Tensor | None) -> TokenLoss:
            inputs = LossInputs(
                row_N=batch.row_N,
                num_rows=len(batch.rows),
                advantages_N=batch.advantages_N,
                behaviour_N=batch.behaviour_N,
                behaviour_is_finite=batch.behaviour_is_finite,
                old_N=batch.of_rows(old_logprobs),
                reference_N=batch.of_rows(reference_logprobs) if reference_N is None else reference_N,
                length_N=None if lengths is None else batch.per_row([lengths[row] for row in batch.rows]),
                soft_NK=batch.soft_targets[1] if spec.reads_soft_targets else None,
                total_tokens=total_tokens,
                total_rows=total_rows,
            )

            def token_loss(logprobs: Tensor, entropy_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
                soft_NK = logprobs.view(len(entropy_N), -1)[:, 1:] if spec.reads_soft_targets else None
                return policy_loss(of_tokens_alone(logprobs), inputs, spec, entropy_N=entropy_N, soft_NK=soft_NK)

            return token_loss

        def share(batch: MicroBatch) -> tuple[float, float]:
            tokens = part = float(len(batch.target_N))
            if of_sequence is not None:  # a sequence may be in several micro-batches, and counts once in all of them
                each = zip(batch.rows, batch.samples, strict=True)
                part = math.fsum(count_loss_tokens([sample]) / max(of_sequence[row], 1) for row, sample in each)
            return part / spec.denominator(tokens=total_tokens, rows=total_rows), tokens / total_tokens

        reads = spec.reads_reference and reference_logprobs is None
        return self._accumulate(samples, term, share, temperature, reads_reference=reads, on_logprobs=on_logprobs)

    @verb
    def forward_backward_supervised(self, samples: Sequence[Sample], *, coefficient: float = 1.0) -> Metrics:
        """Accumulate the gradient of `coefficient` times the mean cross-entropy (nats per trained token, weighted by
        `Sample.weights`); the metric is without the coefficient.

        It is over the whole vocabulary, whatever the samples were drawn from (`Sample.kept`)."""
        samples = [replace(sample, kept=None, soft_targets=None) for sample in samples]
        tokens = max(count_loss_tokens(samples), 1)
        total = sum(
            sum(w for w, m in zip(s.weights, s.mask, strict=True) if m) if s.weights else sum(s.mask) for s in samples
        )

        def term(batch: MicroBatch, _: Tensor | None) -> TokenLoss:
            weights_N = batch.per_token([s.weights or (1.0,) * len(s.mask) for s in batch.samples])
            assert weights_N is not None

            def token_loss(logprobs_N: Tensor, entropy_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
                loss = -(logprobs_N * weights_N.to(logprobs_N)).sum() / max(total, 1e-9)
                return coefficient * loss, {
                    "loss/cross_entropy": loss.detach(),
                    "loss/entropy": entropy_N.detach().sum() / tokens,
                }

            return token_loss

        return self._accumulate(samples, term, lambda batch: of_tokens(batch, tokens), 1.0)

    @verb
    def forward_backward_preference(
        self, pairs: Sequence[Pair], config: PreferenceConfig, *, reference_logprobs: Rows | None = None
    ) -> Metrics:
        """Accumulate the gradient of the mean loss of preference pairs, each against the reference as it is now.

        A pair is in one micro-batch, its prompt once: forward under the reference, forward and backward of the policy,
        with the parts of the whole vocabulary.

        Args:
            reference_logprobs: the reference's per completion (`forward`), chosen and rejected in turns; without them
                they are computed.
        """
        samples = [replace(sample, kept=None, soft_targets=None) for pair in pairs for sample in pair]
        total, tokens = len(pairs), max(count_loss_tokens(samples), 1)

        def term(batch: MicroBatch, reference_N: Tensor | None) -> TokenLoss:
            reference_N = batch.of_rows(reference_logprobs) if reference_N is None else reference_N
            assert reference_N is not None

            def row_sums(x_N: Tensor) -> Tensor:
                return x_N.new_zeros(len(batch.rows)).index_add(0, batch.row_N, x_N)

            def token_loss(logprobs_N: Tensor, entropy_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
                reference_B, tokens_B = row_sums(reference_N.to(logprobs_N)), row_sums(torch.ones_like(logprobs_N))
                loss, metrics = preference_loss(row_sums(logprobs_N), reference_B, tokens_B, config, pairs=total)
                return loss, metrics | {"loss/entropy": entropy_N.detach().sum() / tokens}

            return token_loss

        def share(batch: MicroBatch) -> tuple[float, float]:
            return len(batch.rows) / (2 * total), len(batch.target_N) / tokens

        return self._accumulate(samples, term, share, 1.0, reads_reference=reference_logprobs is None, pairs=True)

    @verb
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

        def term(batch: MicroBatch, _: Tensor | None) -> TokenLoss:
            slope_N = batch.of_rows(slopes)
            assert slope_N is not None
            return lambda logprobs_N, entropy_N: ((logprobs_N * slope_N.to(logprobs_N)).sum(), {})

        everything = unmasked(samples)
        tokens = count_loss_tokens(everything)
        balance = self._accumulate(everything, term, lambda batch: of_tokens(batch, tokens), temperature)
        metrics = {**metrics, **{name: value for name, value in balance.items() if name.startswith("router/")}}
        return {"loss/custom": float(loss.detach()), **metrics}

    @verb
    def optim_step(self, *, learning_rate: float) -> OptimStepResult:
        """Clip to `max_grad_norm`, apply AdamW, zero the gradients. A non-finite gradient changes nothing.

        Raises:
            TrainingError: the fifth refused step in a row.
        """
        norm = self.strategy.clip(self.parameters, self.max_grad_norm)
        applied = math.isfinite(norm)
        if applied:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
            self.steps += 1
            self._refused_in_a_row = 0
        else:
            self.refused_steps += 1
            self._refused_in_a_row += 1
        self.zero_grad()
        if self._refused_in_a_row >= MAX_REFUSED_STEPS:
            raise TrainingError(
                f"{self._refused_in_a_row} optimizer steps in a row had a non-finite gradient (last norm: {norm})",
                hint="lower the learning rate, check the rewards for huge values, or train in float32",
            )
        return OptimStepResult(norm, applied)

    @verb
    def zero_grad(self) -> None:
        """Forget what has been accumulated."""
        self.optimizer.zero_grad(set_to_none=True)
        self.accumulated = 0

    @verb
    def divide_gradients(self, by: float) -> None:
        """Divide the accumulated gradients by `by`, once the denominator is known."""
        if gradients := [parameter.grad for parameter in self.parameters if parameter.grad is not None]:
            torch._foreach_div_(gradients, by)

    @verb
    def set_micro_tokens(self, micro_tokens: int) -> None:
        """Set the token budget of micro-batches from now on."""
        self.micro_tokens = micro_tokens

    @verb
    def gather_weights(self) -> None:
        """Copy the trained weights into `base`, in full-parameter training. In one process they are the same
        tensors."""
        self.strategy.gather_weights(self)

    @verb
    def end_batch(self) -> None:
        """Update the reference, after the last optimizer step on a rollout batch."""
        self.reference.after_step()

    # -- one rollout batch --------------------------------------------------------------------------------------------

    @verb
    def step(
        self,
        samples: Sequence[Sample],
        spec: LossSpec,
        *,
        learning_rate: float,
        minibatches: int = 1,
        passes: int = 1,
        temperature: float = 1.0,
        demonstrations: Sequence[Sample] = (),
        coefficient: float = 1.0,
    ) -> Metrics:
        """Train on one rollout batch: `passes` times over it, each in `minibatches` optimizer steps; the metrics are
        means over these, and extremes of all of them. Each of these steps also has its part of the `demonstrations`,
        whose mean cross-entropy is added to the loss times `coefficient`."""
        batch = TrainingBatch.cut(
            samples,
            spec,
            minibatches=minibatches,
            passes=passes,
            shuffle=self.shuffle,
            temperature=temperature,
            demonstrations=demonstrations,
            coefficient=coefficient,
        )
        if passes * minibatches > 1 and spec.reads_old:
            batch = batch.with_old(self)
        return train_on_batch(self, batch.with_reference(self), learning_rate=learning_rate)

    def begin_step(self, *, temperature: float = 1.0) -> AccumulatedStep:
        """Begin one optimizer step on a batch that arrives in parts; what was accumulated before is forgotten."""
        self.zero_grad()
        return AccumulatedStep(self, temperature=temperature)

    def set_adam(self, *, betas: tuple[float, float], eps: float, weight_decay: float, max_grad_norm: float) -> None:
        """Set AdamW's constants and the norm that gradients are clipped to, from the next optimizer step on."""
        for group in self.optimizer.param_groups:
            group.update(betas=betas, eps=eps, weight_decay=weight_decay)
        self.max_grad_norm = max_grad_norm

    @verb
    def keep_reference(self) -> None:
        """Begin the reference with the policy as it is now: after `load_adapter`, before training and before `load`.

        Without an adapter this copies the model; with one, and the reference `base`, it does nothing.
        """
        self.strategy.check_reference()
        self.reference.begin()

    def measure_kl(
        self, samples: Sequence[Sample], *, temperature: float = 1.0, max_tokens: int | None = None
    ) -> Metrics:
        """`kl/mean` and the like (`algo.kl.kl_metrics`), where the loss does not read the reference.

        An estimate, from rows of one group, another one each step: `max_tokens` completion tokens (None: a tenth of the
        batch's), and at least one row. It costs the reference's forward on these, about 3 % of the arithmetic of
        training. Nothing without a reference or behaviour logprobs.
        """
        if not self.reference.ready:
            return {}
        chosen = measured_rows(samples, turn=self.reference.steps, max_tokens=max_tokens)
        return kl_metrics(chosen, self.forward(chosen, temperature=temperature, reference=True))

    # -- saving -------------------------------------------------------------------------------------------------------

    @verb
    def save_adapter(self, directory: Path) -> None:
        """Write the policy into an existing directory: a PEFT adapter, or a whole model when there is no adapter."""
        self.strategy.save_adapter(self, directory)

    def stream_weights(self, take: TakeTensor | None) -> None:
        """`take` every tensor of the checkpoint of what is trained whole, in turn. Ranks that only help have None."""
        self.strategy.stream_weights(self, take)

    def write_adapter(self, directory: Path) -> None:
        """Write the policy, in a process that has what is trained whole; see `save_adapter`."""
        if self.lora is None:
            self.model.save_pretrained(directory)
            self.write_tokenizer(directory)
        else:
            save_lora(self.model, self.lora, directory, base_name=self.base.name)

    def write_tokenizer(self, directory: Path) -> None:
        """Write the other files of a model's directory: the tokenizer, and the processor of images."""
        self.base.tokenizer.save_pretrained(directory)
        if (vision := vision_of(self.model)) is not None:
            vision.save(Path(directory))

    def save(self, directory: Path) -> None:
        """Write what `load` needs to continue exactly: policy, reference, the optimizer's moments, counters."""
        self.strategy.save(self, directory)

    def load(self, directory: Path) -> None:
        """Load the files of `save`, on a learner made with the same arguments (`load_state`)."""
        self.strategy.load(self, directory)

    def load_adapter(self, directory: Path, *, alpha_field: str = "train.lora.alpha") -> None:
        """Start from a saved adapter instead of a fresh one. Raises AdapterError when it does not fit; `alpha_field` is
        the configuration's name of alpha there."""
        assert self.lora is not None, "full-parameter training starts from a model, not from an adapter"
        load_lora(self.model, self.lora, directory, alpha_field=alpha_field)
        self.strategy.after_load_adapter(self)

    # -- of several processes -----------------------------------------------------------------------------------------

    @verb
    def check_alike(self) -> None:
        """Raise ConfigError where processes that train together have other models or versions."""
        self.strategy.check_alike(self)

    @verb
    def spread_state(self) -> None:
        """Let every process take over what rank 0 has: parameters, the optimizer's moments, counters."""
        self.strategy.spread_state(self)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _is_small(self, *, dropout: bool) -> bool:
        """Return whether micro-batches run side by side: an adapter is trained, without dropout, on a small model."""
        if self.lora is None or dropout or self.device.type != "cpu" or not self._is_light():
            return False
        return self.strategy.runs_side_by_side and self.packed and is_lean(self.model)

    def _pays_for_flex(self) -> bool:
        return self.device.type == "cuda" and not self._is_light()  # gpu-aware

    def _is_light(self) -> bool:
        return is_light(sum(weight.numel() * weight.itemsize for weight in self.base.model.parameters()))

    def _verify_packed(self) -> bool:
        why = self.strategy.tried(self.model, partial(why_twin_not_packed, self.base, self.model))
        look(self.model, why)
        if why is None:
            return True
        warnings.warn(
            f"{type(self.base.model).__name__} cannot be trained in packed rows: {why}; training uses padded rows "
            f"instead, which is correct and {PLAIN_COST}",
            stacklevel=3,
        )
        self.strategy.with_weights(self.model, partial(turn_plain, self.model))
        return False

    def _try_flex(self, *, checkpointing: bool) -> Layouts:
        trial = partial(why_not_flex, self.model, checkpointing=checkpointing, agreed=self.strategy.agreed)
        self.why_not_flex = self.strategy.tried(self.model, trial)
        if self.why_not_flex is None:
            return FLEX
        warnings.warn(
            f"train.attention flex cannot be used for {type(self.base.model).__name__}: {self.why_not_flex}; training "
            "uses merged instead, which computes the same",
            stacklevel=3,
        )
        return merged_for(self.model)

    def _cut(self, samples: Sequence[Sample], *, pairs: bool = False) -> tuple[int, Iterator[MicroBatch]]:
        """Return how many micro-batches to run at once, and all of them; with `pairs`, samples stand in twos, which
        stay together."""
        budget, device, layouts, lanes = self.micro_tokens, self.device, self.layouts, self._lanes.most
        self._check_lengths(samples)
        if not self.packed:
            lanes, batches = 1, padded_batches(samples, token_budget=budget, device=device, pairs=pairs)
        elif pairs:
            lanes, batches = pair_batches(samples, token_budget=budget, lanes=lanes, device=device, layouts=layouts)
        elif lanes == 1:
            batches = micro_batches(samples, token_budget=budget, device=device, layouts=layouts)
        else:
            lanes, batches = side_by_side(samples, token_budget=budget, lanes=lanes, device=device, layouts=layouts)
        return lanes, self.strategy.evened(batches, packed=self.packed)

    def _check_lengths(self, samples: Sequence[Sample]) -> None:
        longest = longest_row(self.model.config.get_text_config()) or sys.maxsize
        for sample in samples:
            length = len(sample.prompt_ids) + len(sample.completion_ids)
            if length - 1 > longest:  # the last token is a target only
                raise ContextLengthError(
                    f"a sample has {length} tokens, of which {length - 1} are read; beyond {longest} the "
                    f"rotary positions of {self.base.name} depend on the length of the row, so that its tokens have no "
                    "log-probability of their own",
                    hint=f"train on samples of {longest + 1} tokens at most, prompt and completion together",
                )

    def _logprobs(
        self, batch: MicroBatch, temperature: float, *, model: PreTrainedModel | None = None
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            return self.strategy.logprobs(model or self.model, batch, temperature=temperature, packed=self.packed)

    def _frozen(
        self, batches: Iterable[MicroBatch], temperature: float, *, lanes: int, reference: bool
    ) -> list[tuple[MicroBatch, Tensor]]:
        """Return each with the log-probabilities of its loss tokens [N] under the policy or the reference, without a
        graph."""
        with self.strategy.forward_only(), self.reference.active() if reference else nullcontext(self.model) as model:

            @torch.no_grad()  # which is of a thread
            def logprobs_of(batch: MicroBatch) -> tuple[MicroBatch, Tensor]:
                if not len(batch.target_N):
                    return batch, torch.empty(0)
                with self._replaying(batch):
                    return batch, of_tokens_alone(self._logprobs(batch, temperature, model=model)[0])

            return list(self._lanes.map(logprobs_of, batches, lanes=lanes))

    def _accumulate(
        self,
        samples: Sequence[Sample],
        term: Callable[[MicroBatch, Tensor | None], TokenLoss],
        share: Callable[[MicroBatch], tuple[float, float]],
        temperature: float,
        *,
        reads_reference: bool = False,
        on_logprobs: Listener | None = None,
        pairs: bool = False,
    ) -> Metrics:
        """Run forward and backward on this process's share of the samples; the metrics are those of all. `term` makes
        the loss of a micro-batch, whose rows are those of `samples`, given the reference's logprobs if they are read;
        `share` is the micro-batch's of the whole, as the loss is reduced and of the loss tokens: what an auxiliary loss
        of routers and its metric are multiplied by. With `pairs`, samples stand in twos, which stay together."""
        mine = self.strategy.share(samples, pairs=pairs)
        lanes, cut = self._cut([samples[row] for row in mine], pairs=pairs)
        cut = (replace(batch, rows=tuple(mine[row] for row in batch.rows)) for batch in cut)

        # gradients of a micro-batch are whole before they are added up
        apart = lanes > 1 or (self.lora is not None and self.strategy.runs_side_by_side)

        def run(item: Item) -> PassedBatch:
            number, (batch, reference_N) = item
            token_loss = term(batch, reference_N) if batch.rows else no_loss
            if (joined := self.strategy.passed(self, batch, temperature, token_loss)) is not None:
                return batch, *joined
            with self.strategy.turn(), self._replaying(batch) as recorded:
                with self._seeded_dropout(number), self._routers.watched() as routed:
                    logprobs_N, entropy_N = self._logprobs(batch, temperature)
                loss, metrics = token_loss(logprobs_N, entropy_N)
                if self.routes and batch.rows:
                    loss, told = self._and_routers(loss, batch, routed, *share(batch), recorded=recorded)
                    metrics |= told
                gradients: Gradients = ()
                if apart:
                    gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
                else:
                    loss.backward()
            return batch, of_tokens_alone(logprobs_N.detach()), metrics, gradients

        told: list[Mapping[str, Tensor]] = []
        with self.strategy.forward_and_backward():
            work: list[tuple[MicroBatch, Tensor | None]] = [(batch, None) for batch in cut if len(batch.target_N)]
            if reads_reference:
                batches = [batch for batch, _ in work]
                work = [*self._frozen(batches, temperature, lanes=lanes, reference=True)]
            items: Iterator[Item] = enumerate(work, self.accumulated)

            def parts(item: Item) -> Iterable[PassedBatch]:
                in_parts = apart and lanes == 1
                return self._within_memory(run, item, temperature, pairs=pairs) if in_parts else [run(item)]

            for batch, logprobs_N, metrics, gradients in chain.from_iterable(
                self._lanes.map(parts, items, lanes=lanes)
            ):
                self._add(gradients)
                self.accumulated += 1
                told.append(metrics)
                if on_logprobs is not None:
                    on_logprobs(batch, logprobs_N)
        return self.strategy.combined(combined(as_numbers(told)))

    def _within_memory(
        self, run: Callable[[Item], PassedBatch], item: Item, temperature: float, *, pairs: bool
    ) -> Iterator[PassedBatch]:
        """Yield what a micro-batch comes to, or, where the memory does not suffice for it, its parts."""
        number, (batch, reference_N) = item
        passed, why = None, ""
        try:
            passed = run(item)
        except torch.OutOfMemoryError as error:
            why = str(error)
        if passed is not None:
            yield passed
            return
        self._take_smaller(batch, why, least=2 if pairs else 1)
        cut = self._cut(batch.samples, pairs=pairs)[1]
        parts = [replace(part, rows=tuple(batch.rows[row] for row in part.rows)) for part in cut]
        work: list[tuple[MicroBatch, Tensor | None]] = [(part, None) for part in parts]
        if reference_N is not None:
            work = [*self._frozen(parts, temperature, lanes=1, reference=True)]
        for each in work:
            yield from self._within_memory(run, (number, each), temperature, pairs=pairs)

    def _take_smaller(self, batch: MicroBatch, why: str, *, least: int) -> None:
        """After memory did not suffice for a micro-batch: from now on take half of what it had. Raises TrainingError
        for one of `least` samples, a pair or a single one."""
        tokens = len(batch.input_ids_S)
        if len(batch.samples) <= least:
            one = "one pair" if least > 1 else "one sample"
            raise TrainingError(
                f"the memory does not suffice to train on {one} of {tokens} tokens: {why.splitlines()[0]}",
                hint="set train.gradient_checkpointing: true, or lower rollout.max_tokens or rollout.cache_gb",
            )
        self.micro_tokens = max(1, tokens // 2)
        warnings.warn(
            f"the memory does not suffice for a micro-batch of {tokens} tokens; from now on train.micro_tokens is "
            f"{self.micro_tokens}",
            stacklevel=3,
        )
        gc.collect()  # what the failed pass still holds
        if self.device.type == "cuda":  # gpu-only: what the allocator keeps in pieces of the wrong size
            torch.cuda.empty_cache()

    def _and_routers(
        self,
        loss: Tensor,
        batch: MicroBatch,
        routed: Sequence[RouterOutput],
        of_loss: float,
        of_tokens: float,
        *,
        recorded: bool,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """After a micro-batch's forward: its loss with the routers' auxiliary loss, and the routers' metrics."""
        metrics = {"recorded_frac": torch.zeros(())}
        if recorded:
            metrics = self._routers.replayed(self.strategy.of_row(batch.copies_S > 0, dim=0))
        if self.balances:
            auxiliary = load_balancing(routed, batch.copies_S)
            loss, metrics["aux_loss"] = loss + self.balances * of_loss * auxiliary, auxiliary.detach()
        return loss, {f"router/{name}": of_tokens * value.to(loss) for name, value in metrics.items()}

    @contextmanager
    def _replaying(self, batch: MicroBatch) -> Iterator[bool]:
        """Context manager: routers choose what the sampler's chose, as far as that was recorded; whether anything
        was."""
        if not self._routers.modules:  # whose micro-batches may run side by side
            yield False
            return
        chosen_LSK = self.strategy.of_row(batch.routed_experts(), dim=1)
        with self._routers.replaying(chosen_LSK, apply=self._replays):
            yield chosen_LSK is not None

    def _add(self, gradients: Gradients) -> None:
        """Add in the order of micro-batches, whichever ended first."""
        for parameter, gradient in zip(self.parameters, gradients, strict=bool(gradients)):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    @contextmanager
    def _seeded_dropout(self, micro_batch: int) -> Iterator[None]:
        """Context manager: dropout depends on the seed, the step and the micro-batch alone, so that a resumed run
        repeats it."""
        if not self._dropout:
            yield
            return
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):  # gpu-aware
            number = self.strategy.dropout_number(micro_batch)
            state = f"{self._seed}/{self.steps}/{self.refused_steps}/{number}"
            torch.manual_seed(random.Random(state).getrandbits(63))
            yield
