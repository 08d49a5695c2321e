"""Fully sharded: every rank keeps a part of each weight (FSDP2, `fully_shard`; ZeRO stage 3, arXiv 1910.02054).

A decoder layer's weights are gathered just before its forward and its backward pass and released after each;
embeddings, last norm and LM head stay gathered from a forward pass to the end of its backward pass. What is cut:

    with an adapter    the frozen base. The adapter is whole on every rank, its gradients are added up as in
    `parallel`
    without            every parameter, its gradient and the optimizer's moments; gradients are added up as they are
    cut

A model in safetensors files is read in parts (`model.parts`): it is cut on the meta device, each rank reads what is its
own, and an adapter is put around what was cut. So no rank ever has more than its parts and what is gathered at once.
What cannot be read so is whole on every rank until it is cut.

The hooks that gather are those of modules, so the model runs as transformers wrote it, on the same packed rows (not
in `backbone`'s shorter way over bare weights), and the LM head inside the model's own hooks. Every rank must run as
many passes as the others: those with fewer micro-batches add passes whose loss is 0 times one token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar

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
from groupwise.model.backbone import unsplit_layers
from groupwise.model.checkpoint_tensors import TakeTensor, checkpoint_tensors
from groupwise.model.load import LoadedModel, share_weights
from groupwise.model.packing import MicroBatch, pack, pad
from groupwise.model.parts import Parts, fill
from groupwise.train.data_parallel import DataParallel
from groupwise.train.forward import packed_logprobs, plain_logprobs
from groupwise.train.gathered import cut_hash, whole_of, write_gathered
from groupwise.train.ranks import Ranks
from groupwise.train.sharded_state import load_shards, load_whole, save_shards
from groupwise.train.state import is_sharded
from groupwise.types import Sample

if TYPE_CHECKING:
    from groupwise.train.learner import Learner

T = TypeVar("T")

NOTHING = Sample(prompt_ids=(0,), completion_ids=(0,), mask=(1,), advantage=0.0)


class FullySharded(DataParallel):
    """`DataParallel` whose weights are cut (FSDP2).

    Args:
        cpu_offload: keep the parts in the CPU's memory, and move a layer to the GPU when it runs.
        parts: the model to read in parts. None: every rank has it whole, and releases it once it is cut, all but rank
            0, which samples.
        shard_size: so many ranks, one after another, share one copy of the weights, and groups of them have the same
            (HSDP). None: those of one machine where there are several, else all.
        context_size: see `DataParallel`.

    Raises:
        ConfigError: the model's decoder layers are not known, there is no GPU to offload from, or the ranks do not
            make groups of `shard_size`.
    """

    runs_side_by_side = False  # passes in several threads would gather in any order

    def __init__(
        self,
        ranks: Ranks,
        *,
        orders: bool = False,
        cpu_offload: bool = False,
        parts: Parts | None = None,
        shard_size: int | None = None,
        context_size: int = 1,
    ):
        if cpu_offload and ranks.device.type != "cuda":  # gpu-aware
            raise ConfigError("train.cpu_offload moves weights off a GPU, and there is none", hint="set it to false")
        super().__init__(ranks, orders=orders, context_size=context_size)
        self.shard_size = shard_size or (ranks.size if ranks.size % ranks.local_size else ranks.local_size)
        if ranks.size % self.shard_size:
            raise ConfigError(
                f"train.shard_size is {self.shard_size}, and {ranks.size} processes do not make groups of that size",
                hint="set it to a divisor of train.devices, or leave it out",
                field="train.shard_size",
            )
        self._offload, self._parts = cpu_offload, parts
        self._model: Any = None  # with the hooks that gather
        self._has_run = False

    def device(self, base: LoadedModel) -> torch.device:
        return self.ranks.device

    def tree(self, base: LoadedModel, *, all_parameters: bool) -> tuple[LoadedModel, PreTrainedModel]:
        if self._parts is None:
            return super().tree(base, all_parameters=all_parameters)
        model = share_weights(self._parts.base.model)
        model.requires_grad_(all_parameters)
        self._cut(model, whole=set())
        kept = torch.device("cpu") if self._offload else self.ranks.device
        fill(model, self._parts, device=self.ranks.device, parts_on=kept)
        found = cut_hash(model, self.ranks)
        return (base if base.hash else replace(base, hash=found)), model  # rank 0 may have it whole, and its own hash

    def tried(self, model: PreTrainedModel, why_not: Callable[[], str | None]) -> str | None:
        """Return what any rank finds, at every rank. Where the model is still whole it is rank 0 that tries: on the
        others it is not on the GPU before it is cut."""
        if self._parts is None:
            return self.ranks.spread(why_not() if self.ranks.leads else None, phase="trying the attention's kernels")
        return self.agreed(self.with_weights(model, why_not))

    def agreed(self, why: str | None) -> str | None:
        if self._parts is None:
            return why
        return next(filter(None, self.ranks.gather(why, phase="trying the attention's kernels")), None)

    def with_weights(self, model: PreTrainedModel, trial: Callable[[], T]) -> T:
        if self._parts is None:
            return trial()
        with self.ranks.named("trying the model"):
            found = self._model.within_hooks(trial)
        self._has_run = True
        for module in model.modules():  # a trial that failed has left some gathered
            if isinstance(module, FSDPModule):
                module.reshard()
        return found

    @contextmanager
    def as_if_whole(self, model: PreTrainedModel) -> Iterator[None]:
        """Let parameters that are cut be stood for by ones of their whole shape that have a single value in memory:
        PEFT takes the shape of a part for the layer's."""
        stood_for: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if isinstance(parameter, DTensor):
                    stood_for.append((module, name, parameter))
                    one = parameter.to_local().new_zeros(()).expand(parameter.shape)
                    module._parameters[name] = torch.nn.Parameter(one, requires_grad=parameter.requires_grad)
        try:
            yield
        finally:
            for module, name, parameter in stood_for:
                module._parameters[name] = parameter

    def shard(self, learner: Learner) -> None:
        super().shard(learner)
        self.sharded = learner.lora is None  # else only what is frozen is cut
        if self._parts is None:
            if (kind := learner.base.quantization) is not None:
                raise ConfigError(
                    f"{kind} weights are not cut by FSDP, whose parts have one type", hint="set train.parallel: ddp"
                )
            whole = set() if self.sharded else {p for p in learner.model.parameters() if p.requires_grad}
            for parameter in whole:
                parameter.data = parameter.data.to(self.ranks.device)
            self._cut(learner.model, whole=whole)
            if not self.ranks.leads:
                learner.base.model.to("meta")  # pyright: ignore[reportArgumentType]
        forward = partial(packed_logprobs, context=self.context) if learner.packed else plain_logprobs
        self._model.logprobs = MethodType(forward, self._model)
        register_fsdp_forward_method(self._model, "logprobs")

    def _cut(self, model: PreTrainedModel, *, whole: set[torch.nn.Parameter]) -> None:
        """Cut all parameters but those that stay `whole`; on the meta device, too, where their parts are put later."""
        layers = unsplit_layers(model).values()
        if not layers:
            raise ConfigError(
                f"{type(model).__name__} does not name its decoder layers, so it cannot be cut",
                hint="set train.parallel: ddp",
            )
        whole = whole | self._of_other_types(model)
        kind, copies = self.ranks.device.type, self.ranks.size // self.shard_size
        if copies == 1:
            mesh = init_device_mesh(kind, (self.shard_size,))
        else:
            mesh = init_device_mesh(kind, (copies, self.shard_size), mesh_dim_names=("replicate", "shard"))
        offload = CPUOffloadPolicy() if self._offload else OffloadPolicy()  # gpu-aware
        for module in layers:
            fully_shard(module, mesh=mesh, ignored_params=whole, offload_policy=offload)
        fully_shard(model, mesh=mesh, ignored_params=whole, offload_policy=offload, reshard_after_forward=False)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        self._model = model
        self._model.within_hooks = MethodType(lambda _, trial: trial(), model)
        register_fsdp_forward_method(self._model, "within_hooks")

    def _of_other_types(self, model: PreTrainedModel) -> set[torch.nn.Parameter]:
        """Return frozen parameters that are not of the model's type, which FSDP cuts no two of: a few of recurrent
        layers. Raises ConfigError for ones that are trained."""
        others = {name: p for name, p in model.named_parameters() if p.dtype != model.dtype and "lora_" not in name}
        if found := next((name for name, p in others.items() if p.requires_grad), None):
            raise ConfigError(
                f"{found} is of type {others[found].dtype} in a model of {model.dtype}, and FSDP trains parameters of "
                "one type",
                hint="set train.parallel: ddp, or train an adapter (train.lora)",
            )
        return set(others.values())

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
        if self._has_run:  # before its own hook would, after which the buffer that they came in stays to the next
            self._model.unshard()
        self._has_run = True
        return self._model.logprobs(batch, temperature=temperature)

    def clip(self, parameters: Sequence[torch.nn.Parameter], max_norm: float) -> float:
        if not self.sharded:
            return super().clip(parameters, max_norm)
        with self.ranks.together("gradient norm"):
            return float(whole_of(torch.nn.utils.clip_grad_norm_(parameters, max_norm)))

    def check_reference(self) -> None:
        if self.sharded:
            raise ConfigError(
                "a KL term needs a frozen copy of the model when all parameters are trained, and FSDP makes none",
                hint="train an adapter (train.lora), leave the KL term out, or set train.parallel: ddp",
            )

    def gather_weights(self, learner: Learner) -> None:
        """Copy the trained weights into the base of rank 0, with which an engine of its process samples. Without a base
        there, do nothing: no engine reads the weights, and `save_adapter` writes the files."""
        if not self.sharded or not self.ranks.spread(_is_there(learner.base.model), phase="gathering weights"):
            return
        whole = dict(learner.base.model.named_parameters())
        with self.ranks.together("gathering weights"), torch.no_grad():
            for name, parameter in learner.model.named_parameters():
                tensor = whole_of(parameter)
                if self.ranks.leads:
                    whole[name].copy_(tensor)

    def stream_weights(self, learner: Learner, take: TakeTensor | None) -> None:
        if not self.sharded:
            return super().stream_weights(learner, take)
        with self.announced("stream_weights", (None,), {}), self.ranks.together("gathering weights"):
            for name, tensor in checkpoint_tensors(learner.model, whole_of):
                if take is not None:
                    take(name, tensor)

    def save_adapter(self, learner: Learner, directory: Path) -> None:
        if not self.sharded:
            return super().save_adapter(learner, directory)
        with self.ranks.together("gathering weights"):
            write_gathered(learner.model, directory, writes=self.ranks.leads)
        if self.ranks.leads:
            learner.write_tokenizer(directory)

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


def _is_there(model: PreTrainedModel) -> bool:
    return not next(model.parameters()).is_meta
