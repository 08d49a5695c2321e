"""CUDA graphs of a decode step's pieces: a layer is started by one call instead of one for each of its kernels.

A graph is a recording of kernels and of the addresses that they read and write. So

    rows      are padded to one of a few numbers (`bucket_of`), each with its own graphs, recorded on first use
    inputs    are copied into buffers; outputs are tensors that the next replay writes over
    weights   are read where they were when it was recorded. The model's parameters stay there, also when they are
              trained. The tensors of each version (adapters, and weights merged with one) are copied to the addresses
              of the first version's. Recording again would cost (layers + 1) x buckets recordings after every sync;
              copying reads and writes the changed tensors once

Only `cuda_recorder` speaks to CUDA; what is around it runs with any recorder.

Shapes: R rows with padding, B rows, H query heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

Carry = tuple[Tensor, Tensor, Tensor]  # from piece to piece: h, cosines and sines

Heads = tuple[Tensor, Tensor, Tensor]  # queries, keys and values of the next attention

Recorder = Callable[[Callable[[], Any]], tuple[Callable[[], object], Any]]

WARM_UPS = 2


class Step(Protocol):
    """The parts of a decode step between attentions, called one after the other. Rows beyond those given are
    padding."""

    def open(self, ids: Tensor, positions: Tensor) -> tuple[Carry, Heads]: ...

    def between(self, layer: int, carry: Carry, mixed: Tensor) -> tuple[Carry, Heads]:
        """Compute from the attention of `layer` to that of the next."""
        ...

    def close(self, carry: Carry, mixed: Tensor) -> Tensor:
        """Return the last hidden states."""
        ...


def cuda_recorder(device: torch.device) -> Recorder:  # gpu-seen: CUDA graphs of decode steps (rollout.compile)
    """Records what a function does on the GPU -> what replays it, and its outputs, which every replay writes over.

    Recordings share their memory: they must be replayed in the order in which they were made. Other threads continue
    using the GPU meanwhile.
    """
    pool: Any = torch.cuda.graph_pool_handle()

    def record(function: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        with torch.cuda.device(device):
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):  # compiles, and lets libraries allocate what they need
                for _ in range(WARM_UPS):
                    function()
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                outputs = function()
        return graph.replay, outputs

    return record


class Graphs:
    """CUDA graphs of a decode step, one for each bucket of rows. `parameters` are tensors that keep their addresses."""

    def __init__(self, parameters: Iterable[Tensor], record: Recorder):
        self._stay, self._record = {parameter.data_ptr() for parameter in parameters}, record
        self._places: dict[Any, _Place] = {}  # by shapes
        self._recorded: dict[tuple[Any, int], Recorded] = {}

    def step(self, made: Callable[[Any], Step], weights: Any, shapes: Any, rows: int) -> Recorded:
        """Return the graph for this number of rows and these weights, recorded from `made` on first use."""
        place = self._places.get(shapes)
        if place is None:
            own = mapped(weights, lambda x: x if x.data_ptr() in self._stay else x.clone())
            place = self._places[shapes] = _Place(own, weights)
        if place.holds is not weights:
            for mine, theirs in zip(tensors_in(place.weights), tensors_in(weights), strict=True):
                if mine.data_ptr() != theirs.data_ptr():
                    mine.copy_(theirs)
            place.holds = weights
        if (shapes, rows) not in self._recorded:
            layers, device = len(weights.after), weights.norm.weight.device
            self._recorded[shapes, rows] = Recorded(made(place.weights), layers, rows, device, self._record)
        return self._recorded[shapes, rows]


@dataclass
class _Place:
    """Weights that recordings read, and whose they hold."""

    weights: Any
    holds: Any


class Recorded:
    """A `Step` of `rows` rows that replays a CUDA graph."""

    def __init__(self, step: Step, layers: int, rows: int, device: torch.device, record: Recorder):
        self._ids, self._positions = (torch.zeros(rows, dtype=torch.long, device=device) for _ in range(2))
        self._replays: list[tuple[Callable[[], object], Any]] = []

        def recorded(function: Callable[[], Any]) -> Any:
            self._replays.append(record(function))
            return self._replays[-1][1]

        carry, heads = recorded(partial(step.open, self._ids, self._positions))
        self._mixed = torch.zeros_like(heads[0])
        for layer in range(layers - 1):
            carry, heads = recorded(partial(step.between, layer, carry, self._mixed))
        recorded(partial(step.close, carry, self._mixed))

    def open(self, ids: Tensor, positions: Tensor) -> tuple[Carry, Heads]:
        self._ids[: len(ids)], self._positions[: len(ids)] = ids, positions
        return self._replay(0)

    def between(self, layer: int, carry: Carry, mixed: Tensor) -> tuple[Carry, Heads]:
        self._mixed[: len(mixed)] = mixed
        return self._replay(layer + 1)

    def close(self, carry: Carry, mixed: Tensor) -> Tensor:
        self._mixed[: len(mixed)] = mixed
        return self._replay(-1)

    def _replay(self, which: int) -> Any:
        replay, outputs = self._replays[which]
        replay()
        return outputs


def bucket_of(rows: int) -> int:
    """Round rows up to a power of two or three quarters of one, from 2, so that at most a third are padding."""
    power = max(2, 1 << (rows - 1).bit_length())
    return power * 3 // 4 if power > 2 and rows <= power * 3 // 4 else power


def mapped(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return nested (named) tuples with `change` applied to their tensors."""
    if isinstance(tree, Tensor):
        return change(tree)
    if not isinstance(tree, tuple):
        return tree
    parts = [mapped(part, change) for part in tree]
    return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors of nested tuples, in order."""
    found: list[Tensor] = []
    mapped(tree, found.append)
    return found
