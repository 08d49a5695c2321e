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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from groupwise.train.learner import Learner, Listener, TokenLoss
from groupwise.train.ranks import Ranks
from groupwise.train.state import is_sharded, load_shards, load_whole, restore, save_shards, state_of
from groupwise.types import Sample

# ----------------------------------------------------------------------------------------------------------------------
# A batch of samples shared out over ranks: disjoint, balanced by tokens, groups whole where that is possible.
#
# A group (adjacent samples that `algo.batch` packs together) costs the tokens that its pack has: what its samples share
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

Term = Callable[[MicroBatch, Tensor | None], TokenLoss]


class ParallelLearner(Learner):
    """A learner that is one of several; `Learner` says what the verbs do.

    `on_logprobs` is shown the rank's own share only. Raises RankLostError from every verb, if a rank is gone.
    """

    def __init__(self, base: LoadedModel, *, ranks: Ranks, **options: Any):
        self.ranks = ranks
        super().__init__(base, **options)

    @property
    def sharded(self) -> bool:
        """Whether what is trained is cut into parts; here every rank has all of it."""
        return False

    def check_alike(self) -> None:
        """Raises ConfigError where ranks have another model or other versions."""
        mine = {
            "the weights of the model": self.base.hash,
            "trained tensors": [tuple(parameter.shape) for parameter in self.parameters],
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        for rank, theirs in enumerate(self.ranks.gather(mine, phase="comparing models and versions")):
            if wrong := [what for what, value in mine.items() if theirs[what] != value]:
                raise ConfigError(
                    f"rank {rank} has other {', '.join(wrong)} than rank {self.ranks.rank}",
                    hint="give all machines the same files and packages; groupwise doctor names versions",
                )

    def forward(
        self, samples: Sequence[Sample], *, temperature: float = 1.0, reference: bool = False
    ) -> list[tuple[float, ...]]:
        mine = self._mine(samples)
        rows = super().forward([samples[row] for row in mine], temperature=temperature, reference=reference)
        out: list[tuple[float, ...]] = [()] * len(samples)
        for theirs in self.ranks.gather(list(zip(mine, rows, strict=True)), phase="log-probabilities"):
            for row, logprobs in theirs:
                out[row] = logprobs
        return out

    def save_adapter(self, directory: Path) -> None:
        if self.ranks.leads:
            super().save_adapter(directory)

    def save(self, directory: Path) -> None:
        if self.ranks.leads:
            super().save(directory)

    def spread_state(self) -> None:
        """Every rank takes over what rank 0 has: parameters, the optimizer's moments, counters."""
        state = self.ranks.spread(state_of(self) if self.ranks.leads else None, phase="spreading the state")
        if state is not None and not self.ranks.leads:
            restore(self, *state)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _mine(self, samples: Sequence[Sample]) -> list[int]:
        return shares(samples, self.ranks.size)[self.ranks.rank]

    def _accumulate(
        self,
        samples: Sequence[Sample],
        term: Term,
        temperature: float,
        *,
        reads_reference: bool = False,
        on_logprobs: Listener | None = None,
    ) -> Metrics:
        mine = self._mine(samples)

        def named(batch: MicroBatch) -> MicroBatch:
            """With its rows as those of the whole batch."""
            return replace(batch, rows=tuple(mine[row] for row in batch.rows))

        metrics = super()._accumulate(
            [samples[row] for row in mine],
            lambda batch, reference_N: term(named(batch), reference_N),
            temperature,
            reads_reference=reads_reference,
            on_logprobs=on_logprobs and (lambda batch, logprobs_N: on_logprobs(named(batch), logprobs_N)),
        )
        return combined(self.ranks.gather(metrics, phase="forward and backward"))

    def _clip(self) -> float:
        self._sum_gradients()
        return super()._clip()

    def _sum_gradients(self) -> None:
        """A parameter that no rank has a gradient of keeps having none."""
        has = self.ranks.gather([p.grad is not None for p in self.parameters], phase="gradients")
        touched = [p for p, *any_rank in zip(self.parameters, *has, strict=True) if any(any_rank)]
        for bucket in _buckets(touched):
            flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in bucket])
            self.ranks.sum(flat, phase="gradients")
            for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                parameter.grad = part.view_as(parameter)

    @contextmanager
    def _seeded_dropout(self, micro_batch: int) -> Iterator[None]:
        with super()._seeded_dropout(micro_batch * self.ranks.size + self.ranks.rank):
            yield


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
# A decoder layer's weights are gathered just before its forward and its backward pass and let go after each;
# embeddings,
# last norm and LM head stay gathered from a forward pass to the end of its backward pass. What is cut:
#
#     with an adapter    the frozen base. The adapter is whole on every rank, its gradients are added up as in
#     `parallel`
#     without            every parameter, its gradient and the optimizer's moments; gradients are added up as they are
#     cut
#
# The hooks that gather are those of modules, so the model runs as transformers wrote it, on the same packed rows (not
# in
# `backbone`'s shorter way over bare weights), and the LM head inside the model's own hooks. Every rank must run as many
# passes as the others: those with fewer micro-batches add passes whose loss is 0 times one token.
# ----------------------------------------------------------------------------------------------------------------------

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


# ----------------------------------------------------------------------------------------------------------------------
# Rank 0 runs the run; the other ranks do with their learner what it does with its own.
#
#     rank 0    `Leading`: a verb is first sent to the others as an order, then done
#     others    `follow`: wait for an order, do it, again, until rank 0 says that it has ended
#
# So sampling, rewards, evaluation, the run's files and every decision are rank 0's alone and cannot differ, and the
# loop
# does not know how many there are. Verbs are called one at a time; of those that call each other the outermost is sent.
# ----------------------------------------------------------------------------------------------------------------------

VERBS = (
    "check_alike",
    "forward",
    "forward_backward",
    "forward_backward_supervised",
    "forward_backward_custom",
    "step",
    "optim_step",
    "zero_grad",
    "divide_gradients",
    "end_batch",
    "keep_reference",
    "set_micro_tokens",
    "gather_weights",
    "save_adapter",
    "spread_state",
)
_END = "end"

if TYPE_CHECKING:
    _Base = ParallelLearner
else:
    _Base = object


class Leading(_Base):
    """Of rank 0's learner: sends its verbs. What is read from files is read here and spread, unless it is sharded."""

    _inside = False

    def load_adapter(self, directory: Path) -> None:
        super().load_adapter(directory)
        self.spread_state()

    def load(self, directory: Path) -> None:
        if self.sharded:
            self._order("load", directory)
        else:
            super().load(directory)
            self.spread_state()

    def save(self, directory: Path) -> None:
        if self.sharded:
            self._order("save", directory)
        else:
            super().save(directory)

    def _order(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """Have it done by all, this one included."""
        method = getattr(super(), verb)
        if self._inside:
            return method(*args, **kwargs)
        self.ranks.send_order(_written(verb, args, kwargs))
        self._inside = True
        try:
            return method(*args, **kwargs)
        finally:
            self._inside = False


def _ordered(verb: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: self._order(verb, *args, **kwargs)


for _verb in VERBS:
    setattr(Leading, _verb, _ordered(_verb))


class LeadingLearner(Leading, ParallelLearner):
    """Rank 0's, where every rank has all weights."""


class LeadingShardedLearner(Leading, ShardedLearner):
    """Rank 0's, where every rank has a part of them."""


def learner_of(base: LoadedModel, *, ranks: Ranks, sharded: bool, cpu_offload: bool, **options: Any) -> ParallelLearner:
    """This rank's, which for rank 0 has made sure that the others' are alike. Raises ConfigError, RankLostError."""
    if sharded:
        options["cpu_offload"] = cpu_offload
    if not ranks.leads:
        return (ShardedLearner if sharded else ParallelLearner)(base, ranks=ranks, **options)
    learner = (LeadingShardedLearner if sharded else LeadingLearner)(base, ranks=ranks, **options)
    learner.check_alike()
    return learner


def follow(learner: ParallelLearner) -> Any:
    """Do what rank 0 orders until it has ended; returns what `end` was given.

    Raises:
        TrainingError: rank 0 ended with an error.
        RankLostError: a rank is gone.
    """
    while True:
        verb, args, kwargs = pickle.loads(learner.ranks.next_order())
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


def _written(verb: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    """The order. Raises ConfigError for an argument that only this process has, before anyone waits for it."""
    try:
        return pickle.dumps((verb, args, dict(kwargs)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{verb} cannot be sent to the other ranks: {error}",
            hint="pass functions that a module has by name, or call the verb of a ParallelLearner on every rank",
        ) from error
