"""Fully sharded: every rank keeps a part of each weight (FSDP2, `fully_shard`; ZeRO stage 3, arXiv 1910.02054).

A decoder layer's weights are gathered just before its forward and its backward pass and released after each;
embeddings, last norm and LM head stay gathered from a forward pass to the end of its backward pass. What is cut:

    with an adapter    the frozen base. The adapter is whole on every rank, its gradients are added up as in
    `parallel`
    without            every parameter, its gradient and the optimizer's moments; gradients are added up as they are
    cut

The hooks that gather are those of modules, so the model runs as transformers wrote it, on the same packed rows (not
in `backbone`'s shorter way over bare weights), and the LM head inside the model's own hooks. Every rank must run as
many passes as the others: those with fewer micro-batches add passes whose loss is 0 times one token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

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

from groupwise.errors import ConfigError
from groupwise.model.load import LoadedModel
from groupwise.model.packing import MicroBatch, pack, pad
from groupwise.train.data_parallel import DataParallel
from groupwise.train.forward import packed_logprobs, plain_logprobs
from groupwise.train.ranks import Ranks
from groupwise.train.sharded_state import load_shards, load_whole, save_shards
from groupwise.train.state import is_sharded
from groupwise.types import Sample

if TYPE_CHECKING:
    from groupwise.train.learner import Learner

NOTHING = Sample(prompt_ids=(0,), completion_ids=(0,), mask=(1,), advantage=0.0)


class FullySharded(DataParallel):
    """`DataParallel` whose weights are cut (FSDP2). Those of `base` are released on all ranks but 0, which samples.

    Args:
        cpu_offload: keep the parts in the CPU's memory, and move a layer to the GPU when it runs.

    Raises:
        ConfigError: the model's decoder layers are not known, or there is no GPU to offload from.
    """

    runs_side_by_side = False  # passes in several threads would gather in any order

    def __init__(self, ranks: Ranks, *, orders: bool = False, cpu_offload: bool = False):
        if cpu_offload and ranks.device.type != "cuda":  # gpu-aware
            raise ConfigError("train.cpu_offload moves weights off a GPU, and there is none", hint="set it to false")
        super().__init__(ranks, orders=orders)
        self._offload = cpu_offload
        self._model: Any = None  # with the hooks that gather

    def device(self, base: LoadedModel) -> torch.device:
        return self.ranks.device

    def tried(self, why_not: Callable[[], str | None]) -> str | None:
        """Return what rank 0 finds, at every rank: on the others the model is not on the GPU before it is cut."""
        return self.ranks.spread(why_not() if self.ranks.leads else None, phase="trying the attention's kernels")

    def shard(self, learner: Learner) -> None:
        self.sharded = learner.lora is None  # else only what is frozen is cut
        if (kind := learner.base.quantization) is not None:
            raise ConfigError(
                f"{kind} weights are not cut by FSDP, whose parts have one type", hint="set train.parallel: ddp"
            )
        model = learner.model
        layers = [m for m in model.modules() if type(m).__name__ in (model._no_split_modules or ())]
        if not layers:
            raise ConfigError(
                f"{type(model).__name__} does not name its decoder layers, so it cannot be cut",
                hint="set train.parallel: ddp",
            )
        mesh = init_device_mesh(self.ranks.device.type, (self.ranks.size,))
        whole = set() if self.sharded else {p for p in model.parameters() if p.requires_grad}
        for parameter in whole:
            parameter.data = parameter.data.to(self.ranks.device)
        offload = CPUOffloadPolicy() if self._offload else OffloadPolicy()  # gpu-aware
        for module in layers:
            fully_shard(module, mesh=mesh, ignored_params=whole, offload_policy=offload)
        fully_shard(model, mesh=mesh, ignored_params=whole, offload_policy=offload, reshard_after_forward=False)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        self._model = model
        self._model.logprobs = MethodType(packed_logprobs if learner.packed else plain_logprobs, model)
        register_fsdp_forward_method(self._model, "logprobs")
        if not self.ranks.leads:
            learner.base.model.to("meta")  # pyright: ignore[reportArgumentType]

    def evened(self, batches: Iterator[MicroBatch], *, packed: bool) -> Iterator[MicroBatch]:
        """Return as many with something to predict as any rank has."""
        mine, device = list(batches), self.ranks.device
        passes = self.ranks.gather(sum(bool(len(b.target_N)) for b in mine), phase="counting micro-batches")
        missing = max(passes) - passes[self.ranks.rank]
        nothing = pack([NOTHING], [[0]], device=device) if packed else pad([NOTHING], [0], device=device)
        return iter([*mine, *[replace(nothing, samples=(), rows=())] * missing])

    @contextmanager
    def forward_only(self) -> Iterator[None]:
        with self.ranks.named("forward"):
            yield
        self._model.reshard()  # or the next forward pass would take these weights for its own

    def forward_and_backward(self) -> AbstractContextManager[None]:
        return self.ranks.named("forward and backward")

    def logprobs(
        self, model: PreTrainedModel, batch: MicroBatch, *, temperature: float, packed: bool
    ) -> tuple[Tensor, Tensor]:
        return self._model.logprobs(batch, temperature=temperature)

    def clip(self, parameters: Sequence[torch.nn.Parameter], max_norm: float) -> float:
        if not self.sharded:
            return super().clip(parameters, max_norm)
        with self.ranks.together("gradient norm"):
            return float(_whole(torch.nn.utils.clip_grad_norm_(parameters, max_norm)))

    def check_reference(self) -> None:
        if self.sharded:
            raise ConfigError(
                "a KL term needs a frozen copy of the model when all parameters are trained, and FSDP makes none",
                hint="train an adapter (train.lora), leave the KL term out, or set train.parallel: ddp",
            )

    def gather_weights(self, learner: Learner) -> None:
        if not self.sharded:
            return
        whole = dict(learner.base.model.named_parameters())
        with self.ranks.together("gathering weights"), torch.no_grad():
            for name, parameter in learner.model.named_parameters():
                tensor = _whole(parameter)
                if self.ranks.leads:
                    whole[name].copy_(tensor)

    def save_adapter(self, learner: Learner, directory: Path) -> None:
        self.gather_weights(learner)
        if self.ranks.leads:
            learner.write_adapter(directory, model=learner.base.model if self.sharded else None)

    def save(self, learner: Learner, directory: Path) -> None:
        if not self.sharded:
            return super().save(learner, directory)
        with self.announced("save", (directory,), {}), self.ranks.together("saving"):
            save_shards(learner, directory, group=self.ranks.control)

    def load(self, learner: Learner, directory: Path) -> None:
        if not self.sharded:
            return super().load(learner, directory)
        with self.announced("load", (directory,), {}), self.ranks.together("loading"):
            if is_sharded(directory):
                load_shards(learner, directory, group=self.ranks.control)
            else:
                load_whole(learner, directory)


def _whole(tensor: Tensor) -> Tensor:
    """Return all of it, at every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
