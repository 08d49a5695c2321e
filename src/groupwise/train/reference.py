"""The reference policy, which the KL measures the policy against.

    base      the base model, always
    start     the policy that training starts from, frozen: differs from base where an adapter is continued
    ema       the moving average of the policy     ref <- d ref + (1 - d) policy    after every step
    refresh   the policy as it was at the last of every K steps

(The last two: soft and hard update of arXiv 2404.09656.) With an adapter no second model is needed: `base` is the model
with its adapter off, and the others are one more set of the adapter's tensors, a few megabytes, which take the place of
the policy's while the reference's forward runs. The average is of the tensors A and B, not of their product. Training
all parameters needs a copy of the model, for `base` too.

A step is one rollout batch, whatever the number of its optimizer steps, so that the reference stands still while a
batch is trained on.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from groupwise.config.algo import ReferenceKind
from groupwise.errors import ConfigError, TrainingError
from groupwise.train.lora import adapter_off, without_dropout

_KEY = "reference."


@dataclass(frozen=True, kw_only=True)
class ReferenceSpec:
    """The choice of the reference policy; `decay` is d of `ema` and `every` K of `refresh`.

    Raises:
        ConfigError: an unknown kind, or a number out of range.
    """

    kind: ReferenceKind = "base"
    decay: float = 0.99
    every: int = 64

    def __post_init__(self) -> None:
        if self.kind not in get_args(ReferenceKind):
            raise ConfigError(f"reference is {self.kind!r}; valid: {', '.join(get_args(ReferenceKind))}")
        if not (math.isfinite(self.decay) and 0 <= self.decay < 1):
            raise ConfigError(f"reference_decay is {self.decay}; it must be in [0, 1)")
        if self.every < 1:
            raise ConfigError(f"reference_every is {self.every}; it must be at least 1")


class Reference:
    """The reference of one learner, whose `model` and trained `parameters` it is given."""

    def __init__(
        self, spec: ReferenceSpec, *, model: PreTrainedModel, parameters: Sequence[torch.nn.Parameter], adapter: bool
    ):
        self.spec, self._model, self._parameters, self._adapter = spec, model, parameters, adapter
        self._tensors: list[Tensor] = []  # in the order of `parameters`
        self._copy: PreTrainedModel | None = None  # whose parameters the tensors are; without an adapter only
        self.steps = 0  # of training, one a rollout batch

    @property
    def ready(self) -> bool:
        """Return whether there is one to compute: always for `base` with an adapter, else after `begin`."""
        return bool(self._tensors) or (self._adapter and self.spec.kind == "base")

    def begin(self) -> None:
        """Begin with the policy as it is now."""
        if self._adapter:
            self._tensors = [] if self.spec.kind == "base" else [p.detach().clone() for p in self._parameters]
        else:
            self._copy = copy.deepcopy(self._model).eval().requires_grad_(False)
            pairs = zip(self._model.parameters(), self._copy.parameters(), strict=True)
            copied = {id(parameter): theirs for parameter, theirs in pairs}
            self._tensors = [copied[id(parameter)] for parameter in self._parameters]

    @torch.no_grad()
    def after_step(self) -> None:
        """Follow the policy, after a step of training."""
        self.steps += 1
        if self.spec.kind == "ema":
            share = 1 - self.spec.decay
        elif self.spec.kind == "refresh" and self.steps % self.spec.every == 0:
            share = 1.0
        else:
            return
        if self._tensors:
            torch._foreach_lerp_(self._tensors, list(self._parameters), share)

    @contextmanager
    def active(self) -> Iterator[PreTrainedModel]:
        """Yield the model that computes the reference, without dropout. No backward pass may run inside the block.

        Raises:
            TrainingError: `begin` has not been called.
        """
        if not self.ready:
            raise TrainingError(
                f"the reference ({self.spec.kind}) is read and was never kept",
                hint="call Learner.keep_reference() before training",
            )
        if self._copy is not None:
            yield self._copy
        elif not self._tensors:
            with adapter_off(self._model):
                yield self._model
        else:
            self._swap()
            try:
                with without_dropout(self._model):
                    yield self._model
            finally:
                self._swap()

    def _swap(self) -> None:
        for i, parameter in enumerate(self._parameters):
            parameter.data, self._tensors[i] = self._tensors[i], parameter.data

    # -- saving: `base` is what the learner is made with, and is not saved ---------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors for `load`, on the CPU."""
        saved = [] if self.spec.kind == "base" else self._tensors
        return {f"{_KEY}{i}": tensor.detach().cpu().contiguous() for i, tensor in enumerate(saved)}

    def counters(self) -> dict[str, int]:
        """Return the other values for `load`."""
        return {"reference_steps": self.steps}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], counters: Mapping[str, int]) -> None:
        """Load the values of `tensors` and `counters`.

        Raises:
            TrainingError: another kind of reference was saved.
        """
        self.steps = counters.get("reference_steps", 0)
        if self.spec.kind == "base":
            return
        saved = [tensors[key] for i in range(len(self._parameters)) if (key := f"{_KEY}{i}") in tensors]
        if bool(saved) != bool(self._tensors):
            raise TrainingError(
                f"the checkpoint {'has' if saved else 'has not'} the tensors of a reference, and this run's reference "
                f"({self.spec.kind}) {'has none' if saved else 'needs them'}",
                hint="resume with the reference (algo.reference) that the run had",
            )
        for mine, tensor in zip(self._tensors, saved, strict=True):
            mine.copy_(tensor)
