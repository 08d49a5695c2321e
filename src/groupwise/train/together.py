"""Joins learners of one base model, each in its own thread, to compute their micro-batches together.

    place = JointPasses(at_once=2)              one for the base model
    Learner(base, strategy=Joined(place))       for each of the learners

A pass (`joint_pass`) takes what waits when there is a processor for it, in the order in which it came; before that it
waits for the learners that were in one just now, for half the time that this one took. A learner by itself never waits.
The thread of one of those in a pass computes it for all; there are no other threads. Who is in a pass with whom depends
on time, and what each gets does not: its bytes are those of `SingleProcess`.

What cannot fail for one alone fails for none: where a pass raises, memory that does not suffice above all, each of its
learners computes its micro-batch by itself, and the one whose error it is sees it there. Micro-batches that are large
enough to keep a processor busy (`JOIN_TOKENS`) are never in a pass, nor are those of learners with anything but plain
LoRA over a small model of the Llama family on a CPU. They are computed by turns (`processor_turns`), as passes are.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor
from transformers import PreTrainedModel

from groupwise.model.backbone import is_lean
from groupwise.model.load import LoadedModel
from groupwise.model.packing import MicroBatch
from groupwise.model.quantized import quantization_of
from groupwise.train.joint_pass import Seat, joint_gradients, joint_logprobs
from groupwise.train.joint_trial import why_not_as_alone
from groupwise.train.lanes import is_light, torch_threads
from groupwise.train.lora import term_of
from groupwise.train.processor_turns import ProcessorTurns
from groupwise.train.strategy import Passed, SingleProcess, TokenLoss

if TYPE_CHECKING:
    from groupwise.train.learner import Learner

JOIN_TOKENS = 256  # packed tokens of a micro-batch up to which joining pays (benchmarks/many_learners.py)

PASS_TOKENS = 4096  # of all micro-batches in a pass

PATIENCE = 0.5  # of a pass's time: for so long the next one waits for its learners, which take an optimizer step

BUILDING = threading.Lock()  # models and adapters are made with the process's generator and default type

log = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(eq=False)
class _Waiting(Generic[Result]):
    """A seat whose learner waits for a pass."""

    seat: Seat
    compute: Callable[[Sequence[Seat]], Sequence[Result | None]]
    ticket: int = 0
    taken: bool = False
    done: bool = False
    result: Result | None = None


@dataclass
class PassCounts:
    """Counts of the joint passes, of those that failed, and of the seats and tokens in them."""

    passes: int = 0
    failed: int = 0
    seats: int = 0
    tokens: int = 0


class JointPasses:
    """Computes what waits, `at_once` passes at a time: as many as the process has processors.

    Attributes:
        counts: counts of the passes so far.
        turns: taken by a thread for each pass, for each micro-batch that a learner computes by itself, and by
            the engines of the same runs for each decoding step.
        why_not: why its learners compute alone: what a trial found to be different on this processor, if anything.
    """

    def __init__(self, *, at_once: int = 1):
        self._at_once = self._free = at_once
        self.turns = ProcessorTurns(at_once)
        self.counts = PassCounts()
        self.why_not: str | None = None
        self._tried: list[str] = []  # models, by their hashes
        self._trying = threading.Lock()
        self._waiting: list[_Waiting[Any]] = []
        self._tickets = 0  # given to waiting callers, in the order in which they came
        self._halting: list[int] = []  # tickets of callers that wait to compute while no pass runs
        self._halted = False  # one of them does
        self._running = 0  # seats in passes
        self._coming: dict[int, float] = {}  # learners (by their models) that were in a pass just now -> until when
        self._changed = threading.Condition()

    def try_with(self, base: LoadedModel) -> None:
        """Find out, once for a model, whether what it computes for several is what it computes for each."""
        with self._trying:
            if base.hash in self._tried or self.why_not is not None or not _has_small_products(base.model):
                return
            self._tried.append(base.hash)
            with torch_threads(1):
                self.why_not = why_not_as_alone(base)
            if self.why_not is not None:
                log.warning("learners of %s do not train in joint passes: %s would differ", base.name, self.why_not)

    def logprobs(self, seat: Seat) -> tuple[Tensor, Tensor] | None:
        """Return the log-probabilities and entropy of a seat's loss tokens, without a graph; None: the learner computes
        them by itself."""
        return self._result(_Waiting(seat, _without_graph))

    def gradients(self, seat: Seat) -> Passed | None:
        """Return the log-probabilities, metrics and gradients of a seat; None: the learner computes them by itself."""
        return self._result(_Waiting(seat, _with_graph))

    @contextmanager
    def halted(self) -> Iterator[None]:
        """Keep passes and all other `halted` blocks from running during the block."""
        with self._changed:
            mine = self._ticket()
            self._halting.append(mine)
            try:
                self._changed.wait_for(lambda: self._may_halt(mine))
                self._halted = True
            finally:  # also if the wait is interrupted: others would wait for this ticket for ever
                self._halting.remove(mine)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._halted = False
                self._changed.notify_all()

    def _ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def _may_halt(self, mine: int) -> bool:
        first = min(self._halting) == mine and not (self._waiting and self._waiting[0].ticket < mine)
        return first and not self._halted and self._free == self._at_once

    def _may_pass(self) -> bool:
        first = not self._halting or self._waiting[0].ticket < min(self._halting)
        return first and not self._halted and self._free > 0

    def _result(self, mine: _Waiting[Result]) -> Result | None:
        with self._changed:
            self._coming.pop(id(mine.seat.model), None)
            mine.ticket = self._ticket()
            self._waiting.append(mine)
            self._changed.notify_all()
        while True:
            with self._changed:
                while not mine.done and (mine.taken or not self._may_pass() or self._pause() > 0):
                    self._changed.wait(self._pause() if not mine.taken and self._may_pass() else None)
                if mine.done:
                    return mine.result
                taken = self._take()
            began = time.monotonic()
            try:
                self._compute(taken)
            finally:
                with self._changed:
                    self._end(taken, time.monotonic() - began)

    def _pause(self) -> float:
        """Return for how many seconds the next pass still waits for learners that were in one just now."""
        now = time.monotonic()
        self._coming = {model: until for model, until in self._coming.items() if until > now}
        return max(self._coming.values(), default=now) - now

    def _take(self) -> list[_Waiting[Any]]:
        """Return the next pass: what has waited longest, and what can be computed with it, up to its share of all that
        is here. Of a learner with several micro-batches side by side one is in it: gradients of two with respect to the
        same parameters would be added up before each gets its own."""
        first, tokens = self._waiting[0], 0
        share = -(-(len(self._waiting) + self._running + len(self._coming)) // self._at_once)
        taken: list[_Waiting[Any]] = []
        for each in self._waiting:
            fits = len(taken) < share and tokens + each.seat.tokens <= PASS_TOKENS
            apart = all(each.seat.model is not other.seat.model for other in taken)
            if each is first or (each.compute is first.compute and fits and apart):
                taken.append(each)
                tokens += each.seat.tokens
                each.taken = True
        self._waiting = [each for each in self._waiting if not each.taken]
        self._free, self._running = self._free - 1, self._running + len(taken)
        self.counts.passes += 1
        self.counts.seats += len(taken)
        self.counts.tokens += tokens
        return taken

    def _end(self, taken: Sequence[_Waiting[Any]], seconds: float) -> None:
        """Give the learners of a pass what they get; they are expected back soon."""
        until = time.monotonic() + PATIENCE * seconds
        self._free, self._running = self._free + 1, self._running - len(taken)
        for each in taken:
            each.done = True
            self._coming[id(each.seat.model)] = until
        self._changed.notify_all()

    def _compute(self, taken: Sequence[_Waiting[Any]]) -> None:
        try:
            with self.turns, torch_threads(1):
                results = taken[0].compute([each.seat for each in taken])
        except Exception:  # each by itself: whose it is will see it
            log.debug("a pass of %d learners failed", len(taken), exc_info=True)
            self.counts.failed += 1
            return
        for each, result in zip(taken, results, strict=True):
            each.result = result


def _with_graph(seats: Sequence[Seat]) -> Sequence[Passed | None]:
    with torch.enable_grad():
        return joint_gradients(seats)


def _without_graph(seats: Sequence[Seat]) -> Sequence[tuple[Tensor, Tensor] | None]:
    with torch.no_grad():
        return joint_logprobs(seats)


class Joined(SingleProcess):
    """The strategy of a learner that computes small micro-batches with others at `place`, and everything else alone."""

    def __init__(self, place: JointPasses):
        self._place = place
        self._may: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()

    def tree(self, base: LoadedModel, *, all_parameters: bool) -> tuple[LoadedModel, PreTrainedModel]:
        if not all_parameters:
            self._place.try_with(base)
        return super().tree(base, all_parameters=all_parameters)

    def shard(self, learner: Learner) -> None:
        """Find out whether the learner can be in a joint pass, while its adapter is on."""
        super().shard(learner)
        self._may[learner.model] = may_join(learner.model)

    def logprobs(
        self, model: PreTrainedModel, batch: MicroBatch, *, temperature: float, packed: bool
    ) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled():  # within a turn that `Learner` has taken
            return super().logprobs(model, batch, temperature=temperature, packed=packed)
        if packed and self._fits(model, batch):
            found = self._place.logprobs(Seat(model, batch, temperature))
            if found is not None:
                return found
        with self.turn():
            return super().logprobs(model, batch, temperature=temperature, packed=packed)

    def turn(self) -> AbstractContextManager[object]:
        return self._place.turns

    def passed(self, learner: Learner, batch: MicroBatch, temperature: float, token_loss: TokenLoss) -> Passed | None:
        if not learner.packed or learner.autocast is not None or not self._fits(learner.model, batch):
            return None
        return self._place.gradients(Seat(learner.model, batch, temperature, token_loss, learner.parameters))

    def _fits(self, model: PreTrainedModel, batch: MicroBatch) -> bool:
        if not 0 < len(batch.input_ids_S) <= JOIN_TOKENS or torch.is_autocast_enabled("cpu"):
            return False
        return self._place.why_not is None and self._may.get(model, False)


def may_join(model: PreTrainedModel) -> bool:
    """Return whether a learner with this module tree can be in a joint pass: plain LoRA over a model with small
    products."""
    adapted = [module for module in model.modules() if isinstance(module, LoraLinear)]
    trained = {id(weight) for layer in adapted for half in (layer.lora_A, layer.lora_B) for weight in half.parameters()}
    if not adapted or any(p.requires_grad and id(p) not in trained for p in model.parameters()):
        return False
    x = torch.empty(0, dtype=model.dtype)
    return _has_small_products(model) and all(term_of(layer, x) is not None for layer in adapted)


def may_share(base: LoadedModel) -> bool:
    """Return whether learners of this model can be in joint passes at all."""
    return _has_small_products(base.model)


def _has_small_products(model: PreTrainedModel) -> bool:
    """Return whether it is a small model with the lean backbone and plain linear layers, on a CPU."""
    if model.device.type != "cpu" or not is_lean(model) or quantization_of(model) is not None:  # gpu-aware
        return False
    return is_light(sum(p.numel() * p.itemsize for p in model.parameters()))
