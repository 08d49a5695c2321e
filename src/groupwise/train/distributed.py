"""Data parallel: every rank trains on its share of each batch, and all make the same optimizer step (DDP).

All ranks call the same verbs with the same arguments, the whole batch, as one learner would be called. A loss divides
by counts of the whole batch, which every rank knows, so a rank's gradient is one summand of the batch's:

    grad = sum over ranks of d/dtheta sum over the rank's tokens of loss(token) / D

and the adapters of one rank and of many are the same but for rounding, whatever the shares. What is decided from
gradients (a step is refused, training stops) is decided after they were added up, and so by all ranks alike.

Every rank has all weights; with an adapter the gradients, a few megabytes, are all that travels.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import transformers
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

from groupwise.algo.loss import combined
from groupwise.algo.metrics import Metrics
from groupwise.algo.prefixes import cut, families, tree_of
from groupwise.errors import ConfigError, TrainingError
from groupwise.model.load import LoadedModel
from groupwise.model.packing import MicroBatch, pack, pad
from groupwise.train.forward import packed_logprobs, plain_logprobs
from groupwise.train.ranks import Ranks
from groupwise.train.state import is_sharded, load_shards, load_whole, restore, save_shards, state_of
from groupwise.train.strategy import Rows, SingleProcess
from groupwise.types import Sample

if TYPE_CHECKING:
    from groupwise.train.learner import Learner

# ----------------------------------------------------------------------------------------------------------------------
# A batch of samples shared out over ranks: disjoint, balanced by tokens, groups whole where that is possible.
#
# A group (adjacent samples that `model.packing` packs together) costs the tokens of its pack: what its samples share
# counts once. Groups go to the rank that has least so far, the largest first (Graham 1969: at most 4/3 of the best
# possible longest share). A group larger than an even share is cut first, since all other ranks would wait for its one;
# each piece has the tokens that it shared with the others once more.
# ----------------------------------------------------------------------------------------------------------------------


def shares(samples: Sequence[Sample], ranks: int) -> list[list[int]]:
    """The rows of each rank, ascending; every row is in exactly one. A rank may have none."""
    trees = [tree_of(samples, rows) for rows, _ in families(samples)]
    even = -(-sum(line.own for tree in trees for line in tree) // ranks)
    pieces = [piece for tree in trees for piece in cut(tree, even + max(line.known for line in tree))]
    load, taken = [0] * ranks, [[] for _ in range(ranks)]
    for rows, tokens in sorted(pieces, key=lambda piece: -piece[1]):
        least = load.index(min(load))
        load[least] += tokens
        taken[least] += rows
    return [sorted(rows) for rows in taken]


BUCKET = 1 << 26  # gradient values that travel at once


class DataParallel(SingleProcess):
    """Every rank has all weights and computes its share of each batch; gradients are added up (DDP).

    A learner's `on_logprobs` is shown the rank's own share only. Raises RankLostError from every verb, if a rank is
    gone.

    Args:
        ranks: this process among the others.
        orders: this is rank 0 and the others `follow`: each verb is first sent to them as an order. Otherwise all ranks
            call the same verbs themselves.
    """

    def __init__(self, ranks: Ranks, *, orders: bool = False):
        self.ranks, self.orders = ranks, orders
        self._inside = False  # a verb that was sent: those that it calls are part of it

    @contextmanager
    def announced(self, verb: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
        if not self.orders or self._inside:
            yield
            return
        self.ranks.send_order(_written(verb, args, kwargs))
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def share(self, samples: Sequence[Sample]) -> Sequence[int]:
        return shares(samples, self.ranks.size)[self.ranks.rank]

    def gathered(self, mine: Sequence[int], rows: Rows, *, total: int) -> list[tuple[float, ...]]:
        out: list[tuple[float, ...]] = [()] * total
        for theirs in self.ranks.gather(list(zip(mine, rows, strict=True)), phase="log-probabilities"):
            for row, logprobs in theirs:
                out[row] = logprobs
        return out

    def combined(self, metrics: Metrics) -> Metrics:
        return combined(self.ranks.gather(metrics, phase="forward and backward"))

    def dropout_number(self, micro_batch: int) -> int:
        return micro_batch * self.ranks.size + self.ranks.rank

    def clip(self, parameters: Sequence[torch.nn.Parameter], max_norm: float) -> float:
        self._sum_gradients(parameters)
        return super().clip(parameters, max_norm)

    def save_adapter(self, learner: Learner, directory: Path) -> None:
        if self.ranks.leads:
            learner.write_adapter(directory)

    def save(self, learner: Learner, directory: Path) -> None:
        if self.ranks.leads:
            super().save(learner, directory)

    def load(self, learner: Learner, directory: Path) -> None:
        """Where rank 0 sends orders it alone reads the files, and the others are given what it read."""
        super().load(learner, directory)
        if self.orders:
            learner.spread_state()

    def after_load_adapter(self, learner: Learner) -> None:
        if self.orders:
            learner.spread_state()

    def check_alike(self, learner: Learner) -> None:
        mine = {
            "the weights of the model": learner.base.hash,
            "trained tensors": [tuple(parameter.shape) for parameter in learner.parameters],
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        for rank, theirs in enumerate(self.ranks.gather(mine, phase="comparing models and versions")):
            if wrong := [what for what, value in mine.items() if theirs[what] != value]:
                raise ConfigError(
                    f"rank {rank} has other {', '.join(wrong)} than rank {self.ranks.rank}",
                    hint="give all machines the same files and packages; groupwise doctor names versions",
                )

    def spread_state(self, learner: Learner) -> None:
        state = self.ranks.spread(state_of(learner) if self.ranks.leads else None, phase="spreading the state")
        if state is not None and not self.ranks.leads:
            restore(learner, *state)

    def _sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """A parameter that no rank has a gradient of keeps having none."""
        has = self.ranks.gather([p.grad is not None for p in parameters], phase="gradients")
        touched = [p for p, *any_rank in zip(parameters, *has, strict=True) if any(any_rank)]
        for bucket in _buckets(touched):
            flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in bucket])
            self.ranks.sum(flat, phase="gradients")
            for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                parameter.grad = part.view_as(parameter)


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Adjacent parameters of one type, up to `BUCKET` values."""
    bucket: list[Tensor] = []
    for parameter in parameters:
        if bucket and (bucket[0].dtype != parameter.dtype or sum(map(Tensor.numel, [*bucket, parameter])) > BUCKET):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket


# ----------------------------------------------------------------------------------------------------------------------
# Fully sharded: every rank keeps a part of each weight (FSDP2, `fully_shard`; ZeRO stage 3, arXiv 1910.02054).
#
# A decoder layer's weights are gathered just before its forward and its backward pass and released after each;
# embeddings, last norm and LM head stay gathered from a forward pass to the end of its backward pass. What is cut:
#
#     with an adapter    the frozen base. The adapter is whole on every rank, its gradients are added up as in
#     `parallel`
#     without            every parameter, its gradient and the optimizer's moments; gradients are added up as they are
#     cut
#
# The hooks that gather are those of modules, so the model runs as transformers wrote it, on the same packed rows (not
# in `backbone`'s shorter way over bare weights), and the LM head inside the model's own hooks. Every rank must run as
# many passes as the others: those with fewer micro-batches add passes whose loss is 0 times one token.
# ----------------------------------------------------------------------------------------------------------------------

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
        """As many with something to predict as any rank has."""
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
    """All of it, at every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# ----------------------------------------------------------------------------------------------------------------------
# Rank 0 runs the run; the other ranks do with their learner what it does with its own.
#
#     rank 0    a strategy with `orders`: a verb is first sent to the others as an order, then done
#     others    `follow`: wait for an order, do it, again, until rank 0 says that it has ended
#
# So sampling, rewards, evaluation, the run's files and every decision are rank 0's alone and cannot differ, and the
# loop does not know how many there are. Verbs are called one at a time; of those that call each other the outermost is
# sent.
# ----------------------------------------------------------------------------------------------------------------------

_END = "end"


def strategy_of(ranks: Ranks, *, sharded: bool = False, cpu_offload: bool = False) -> DataParallel:
    """This rank's, of a learner that rank 0 leads. Raises ConfigError as `FullySharded`."""
    if sharded:
        return FullySharded(ranks, orders=ranks.leads, cpu_offload=cpu_offload)
    return DataParallel(ranks, orders=ranks.leads)


def follow(learner: Learner) -> Any:
    """Do what rank 0 orders until it has ended; returns what `end` was given.

    Raises:
        TrainingError: rank 0 ended with an error.
        RankLostError: a rank is gone.
    """
    assert isinstance(learner.strategy, DataParallel)
    while True:
        verb, args, kwargs = pickle.loads(learner.strategy.ranks.next_order())
        if verb != _END:
            getattr(learner, verb)(*args, **kwargs)
            continue
        result, error = args
        if error is not None:
            raise TrainingError(f"rank 0 ended: {error}", hint="what it says itself is the cause")
        return result


def end(ranks: Ranks, result: object = None, *, error: BaseException | None = None) -> None:
    """Of rank 0: the run is over, with this result or error, and the others need not wait. Raises RankLostError."""
    ranks.send_order(_written(_END, (result, None if error is None else f"{type(error).__name__}: {error}"), {}))


def _written(verb: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """The order. Raises ConfigError for an argument that only this process has, before anyone waits for it."""
    try:
        return pickle.dumps((verb, tuple(args), dict(kwargs)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{verb} cannot be sent to the other ranks: {error}",
            hint="pass functions that a module has by name",
        ) from error
