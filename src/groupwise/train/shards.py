"""Fully sharded: every rank keeps a part of each weight (FSDP2, `fully_shard`; ZeRO stage 3, arXiv 1910.02054).

A decoder layer's weights are gathered just before its forward and its backward pass and let go after each; embeddings,
last norm and LM head stay gathered from a forward pass to the end of its backward pass. What is cut:

    with an adapter    the frozen base. The adapter is whole on every rank, its gradients are added up as in `parallel`
    without            every parameter, its gradient and the optimizer's moments; gradients are added up as they are cut

The hooks that gather are those of modules, so the model runs as transformers wrote it, on the same packed rows (not in
`backbone`'s shorter way over bare weights), and the LM head inside the model's own hooks. Every rank must run as many
passes as the others: those with fewer micro-batches add passes whose loss is 0 times one token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from groupwise.algo.metrics import Metrics
from groupwise.errors import ConfigError
from groupwise.model.load import LoadedModel
from groupwise.model.packing import MicroBatch, pack, pad
from groupwise.train.learner import Listener
from groupwise.train.learner_state import is_sharded
from groupwise.train.logprobs import packed_logprobs, plain_logprobs
from groupwise.train.parallel import ParallelLearner, Term
from groupwise.train.ranks import Ranks
from groupwise.train.sharded_state import load_shards, load_whole, save_shards
from groupwise.types import Sample

NOTHING = Sample(prompt_ids=(0,), completion_ids=(0,), mask=(1,), advantage=0.0)


class ShardedLearner(ParallelLearner):
    """A `ParallelLearner` whose weights are cut. The weights of `base` are let go on all ranks but 0, which samples.

    Args:
        cpu_offload: keep the parts in the CPU's memory, and move a layer to the GPU when it runs.

    Raises:
        ConfigError: the model's decoder layers are not known, or there is no GPU to offload from.
    """

    def __init__(self, base: LoadedModel, *, ranks: Ranks, cpu_offload: bool = False, **options: Any):
        if cpu_offload and ranks.device.type != "cuda":
            raise ConfigError("train.cpu_offload moves weights off a GPU, and there is none", hint="set it to false")
        self._offload = cpu_offload
        super().__init__(base, ranks=ranks, **options)

    @property
    def device(self) -> torch.device:
        return self.ranks.device

    @property
    def sharded(self) -> bool:
        """Whether what is trained is cut, and not only what is frozen."""
        return self.lora is None

    def keep_reference(self) -> None:
        if self.sharded:
            raise ConfigError(
                "a KL term needs a frozen copy of the model when all parameters are trained, and FSDP makes none",
                hint="train an adapter (train.lora), leave the KL term out, or set train.parallel: ddp",
            )
        super().keep_reference()

    def gather_weights(self) -> None:
        if not self.sharded:
            return
        whole = dict(self.base.model.named_parameters())
        with self.ranks.together("gathering weights"), torch.no_grad():
            for name, parameter in self.model.named_parameters():
                tensor = _whole(parameter)
                if self.ranks.leads:
                    whole[name].copy_(tensor)

    def save_adapter(self, directory: Path) -> None:
        if not self.sharded:
            return super().save_adapter(directory)
        self.gather_weights()
        if self.ranks.leads:
            self.base.model.save_pretrained(directory)
            self.base.tokenizer.save_pretrained(directory)

    def save(self, directory: Path) -> None:
        if not self.sharded:
            return super().save(directory)
        with self.ranks.together("saving"):
            save_shards(self, directory, group=self.ranks.control)

    def load(self, directory: Path) -> None:
        if not self.sharded:
            return super().load(directory)
        with self.ranks.together("loading"):
            if is_sharded(directory):
                load_shards(self, directory, group=self.ranks.control)
            else:
                load_whole(self, directory)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _is_small(self, *, dropout: bool) -> bool:
        return False  # passes in several threads would gather in any order

    def _shard(self) -> None:
        layers = [m for m in self.model.modules() if type(m).__name__ in (self.model._no_split_modules or ())]
        if not layers:
            raise ConfigError(
                f"{type(self.model).__name__} does not name its decoder layers, so it cannot be cut",
                hint="set train.parallel: ddp",
            )
        mesh = init_device_mesh(self.device.type, (self.ranks.size,))
        whole = {p for p in self.model.parameters() if p.requires_grad} if self.lora is not None else set()
        for parameter in whole:
            parameter.data = parameter.data.to(self.device)
        offload = CPUOffloadPolicy() if self._offload else OffloadPolicy()
        for module in layers:
            fully_shard(module, mesh=mesh, ignored_params=whole, offload_policy=offload)
        fully_shard(self.model, mesh=mesh, ignored_params=whole, offload_policy=offload, reshard_after_forward=False)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        self._run: Any = self.model
        self._run.logprobs = MethodType(packed_logprobs if self.packed else plain_logprobs, self.model)
        register_fsdp_forward_method(self.model, "logprobs")
        if not self.ranks.leads:
            self.base.model.to("meta")  # pyright: ignore[reportArgumentType]

    def _logprobs(
        self, batch: MicroBatch, temperature: float, *, model: PreTrainedModel | None = None
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            return self._run.logprobs(batch, temperature=temperature)

    def _cut(self, samples: Sequence[Sample]) -> tuple[int, Iterator[MicroBatch]]:
        """One at a time, and as many with something to predict as any rank has."""
        lanes, cut = super()._cut(samples)
        batches = list(cut)
        passes = self.ranks.gather(sum(bool(len(b.target_N)) for b in batches), phase="counting micro-batches")
        missing = max(passes) - passes[self.ranks.rank]
        device = self.device
        nothing = pack([NOTHING], [[0]], device=device) if self.packed else pad([NOTHING], [0], device=device)
        return lanes, iter([*batches, *[_unnamed(nothing)] * missing])

    def _frozen(
        self, batches: Iterable[MicroBatch], temperature: float, *, lanes: int, reference: bool
    ) -> list[tuple[MicroBatch, Tensor]]:
        with self.ranks.named("forward"):
            out = super()._frozen(batches, temperature, lanes=lanes, reference=reference)
        self._run.reshard()  # or the next forward pass would take these weights for its own
        return out

    def _accumulate(
        self,
        samples: Sequence[Sample],
        term: Term,
        temperature: float,
        *,
        reads_reference: bool = False,
        on_logprobs: Listener | None = None,
    ) -> Metrics:
        def or_nothing(batch: MicroBatch, reference_N: Tensor | None) -> Any:
            if batch.rows:
                return term(batch, reference_N)
            return lambda logprobs_N, entropy_N: (0 * (logprobs_N.sum() + entropy_N.sum()), {})

        with self.ranks.named("forward and backward"):
            return super()._accumulate(
                samples, or_nothing, temperature, reads_reference=reads_reference, on_logprobs=on_logprobs
            )

    def _clip(self) -> float:
        if not self.sharded:
            return super()._clip()
        with self.ranks.together("gradient norm"):
            return float(_whole(torch.nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)))


def _whole(tensor: Tensor) -> Tensor:
    """All of it, at every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _unnamed(batch: MicroBatch) -> MicroBatch:
    """Of no sample at all."""
    return replace(batch, samples=(), rows=())
