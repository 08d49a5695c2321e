"""Counts the bytes of a process's tensors while they live, and the most that there were at once.

Every tensor that an operation of torch takes or makes is noted by its storage, once, until that is freed: what is
gathered of other ranks, what is read of a file, gradients, activations, buffers of collectives. Kernels' own buffers
and files that are mapped are not tensors, and are not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class CountedBytes(TorchDispatchMode):
    """A context manager; `now` are the bytes that live, `peak` the most since `restart`. What was there before it was
    entered counts from the first operation that takes it on."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}
        self._sizes: dict[int, int] = {}
        self._resize: Any = torch.UntypedStorage.resize_

    def __enter__(self) -> CountedBytes:
        own, counted = self._resize, self

        def resize(storage: Any, size: int) -> Any:  # as FSDP frees what it has gathered, and takes it again
            done = own(storage, size)
            counted._resized(storage)
            return done

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*exception)

    def restart(self) -> None:
        """Take what lives now for the most so far."""
        self.peak = self.now

    def note(self, tensor: Tensor) -> None:
        """Count a tensor from now on."""
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        if (key := storage._cdata) not in self._known:
            self._known[key] = weakref.ref(storage, lambda _: self._gone(key))
            self._sizes[key] = 0
        self._resized(storage)

    def _resized(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._known:
            self.now += storage.nbytes() - self._sizes[key]
            self._sizes[key] = storage.nbytes()
            self.peak = max(self.peak, self.now)

    def _gone(self, key: int) -> None:
        self._known.pop(key, None)
        self.now -= self._sizes.pop(key, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in (args, kwargs, out):
            self._note_all(each)
        return out

    def _note_all(self, found: Any) -> None:
        if isinstance(found, Tensor):
            self.note(found)
        elif isinstance(found, Mapping):
            for each in found.values():
                self._note_all(each)
        elif isinstance(found, Sequence) and not isinstance(found, str):
            for each in found:
                self._note_all(each)
