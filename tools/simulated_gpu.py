"""A GPU that is not there: what a program would ask of a CUDA device, counted on a CPU, with the right results.

    with SimulatedGpu() as gpu:
        gpu.move(model)                    # its parameters and buffers are on "cuda:0" now
        ...                                # code runs as it does on a GPU: `x.device.type == "cuda"`, `x.is_cuda`
    gpu.counts.launches                    # kernels that would have been started
    gpu.counts.waits                       # what the host would have waited for the device for, by the line that asked

A tensor of the simulated device (`OnGpu`) wraps one of the CPU, which computes. So the same code takes the branches
that it takes on a GPU, and every way from one side to the other is seen:

    waits     `.item()`, `.tolist()`, `bool(x)`, copies to the CPU; copies to the device from memory that is not pinned,
              or that do not say `non_blocking`; operations whose result has a size that depends on values (`nonzero`,
              indexing with bools, `bincount`, `unique`)
    launches  every operation on the device that is neither a view nor memory without contents, once. An operation may
              be several kernels (sorting, long sums), so it is a lower bound; what libraries do inside is not counted

Only the thread that entered the block is seen. Use `torch.no_grad()`, not `torch.inference_mode()`, in which torch
leaves compound operations whole. CUDA graphs, Triton and `torch.compile` are not there.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
SOURCES = Path(__file__).parents[1] / "src"

_aten = torch.ops.aten
_NO_KERNEL = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "_unsafe_view",
    "lift_fresh", "is_same_size", "_reshape_alias", "resize_", "set_", "_local_scalar_dense",
}  # fmt: skip
_SIZED_BY_VALUES = {
    "nonzero", "masked_select", "bincount", "unique", "_unique", "_unique2", "unique_dim", "unique_consecutive",
    "repeat_interleave", "equal", "is_nonzero", "_local_scalar_dense", "histc",
}  # fmt: skip
_COPIES = (torch.tensor, torch.as_tensor, torch.asarray)


@dataclass
class Counts:
    """Of operations by name, and of waits by the line of `src/` that asked."""

    operations: Counter[str] = field(default_factory=Counter)
    waited: Counter[str] = field(default_factory=Counter)

    @property
    def launches(self) -> int:
        """Kernels that would have been started."""
        return self.operations.total()

    @property
    def waits(self) -> int:
        """How often the host would have waited for the device."""
        return self.waited.total()


class OnGpu(Tensor):
    """A tensor of the simulated device; `inner` has its values."""

    inner: Tensor
    gpu: SimulatedGpu
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, gpu: SimulatedGpu) -> OnGpu:
        made = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="meta",  # of which autograd has no streams
        )
        made.inner, made.gpu = inner, gpu
        return made

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        return GPU

    @property
    def is_cuda(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return True

    @property
    def is_cpu(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return False

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:
        new: Any = other.detach().requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            new._is_param = True
        torch.utils.swap_tensors(self, new)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"OnGpu({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found: list[OnGpu] = []
        kwargs = dict(kwargs or {})
        tree_map_only(OnGpu, found.append, (args, kwargs))
        return found[0].gpu.run(func, args, kwargs)


MEMORY = 80 << 30  # bytes that are free, and that there are


class SimulatedGpu(TorchFunctionMode):
    """The device, and where its tensors are counted while the block runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()
        self._factories = _Factories(self)
        # torch asks for types of devices and tensors as C++ sees them
        devices = patch.object(_foreach_utils, "_get_foreach_kernels_supported_devices", lambda: ["cuda", "meta"])
        types = patch.object(_foreach_utils, "_foreach_supported_types", [Tensor, nn.Parameter, OnGpu])
        memory = patch.object(torch.cuda, "mem_get_info", lambda device=None: (MEMORY, MEMORY))
        self._patches = (devices, types, memory)

    def __enter__(self) -> SimulatedGpu:
        for each in self._patches:
            each.start()
        self._factories.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._factories.__exit__(*error)
        for each in self._patches:
            each.stop()

    def move(self, model: nn.Module) -> None:
        """Put the parameters and buffers of a model on the device; tied ones stay tied."""
        moved: dict[int, Any] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    new = moved.get(id(parameter))
                    if new is None:
                        new = nn.Parameter(OnGpu(parameter.detach(), self), requires_grad=parameter.requires_grad)
                        moved[id(parameter)] = new
                    module._parameters[name] = new
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = OnGpu(buffer, self)

    @contextmanager
    def counting(self) -> Iterator[Counts]:
        """Counts of what runs within."""
        before, self.counts = self.counts, Counts()
        try:
            yield self.counts
        finally:
            self.counts = before

    @contextmanager
    def _again(self) -> Iterator[None]:
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)

    # -- what arrives from Python ---------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.backward:
            with self._again():  # it calls Python, which is to be seen too
                return torch.autograd.backward(args[0], kwargs.get("gradient"))
        if func is nn.functional.scaled_dot_product_attention:
            return _Attention.apply(self, kwargs, *args)
        if func in (Tensor.pin_memory, Tensor.is_pinned):
            return _pinned(func, args[0])
        if func in (Tensor.to, Tensor.cuda):
            return self._to(func, args, kwargs)
        if func in (Tensor.new_tensor,) and isinstance(args[0], OnGpu):
            self.wait("copy to the device")
            return OnGpu(torch.tensor(args[1], dtype=kwargs.get("dtype", args[0].dtype)), self)
        if "device" in kwargs and _is_gpu(kwargs["device"]):
            del kwargs["device"]
            if func in _COPIES:
                return self._copied(func, args, kwargs)
            made = func(*args, **kwargs)
            if not isinstance(made, Tensor) or isinstance(made, OnGpu):
                return made
            if not func.__name__.startswith("empty"):
                self.counts.operations[func.__name__] += 1
            return OnGpu(made, self)
        return func(*args, **kwargs)

    def _copied(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        if isinstance(args[0], OnGpu):
            return args[0].to(kwargs["dtype"]) if kwargs.get("dtype") else args[0]
        made = func(*args, **kwargs)
        if made.numel():
            self.wait("copy to the device")
        return OnGpu(made, self)

    def _to(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        x, *rest = args
        if func is Tensor.cuda:
            rest = [GPU]
        where = [each for each in (*rest, kwargs.get("device")) if isinstance(each, str | torch.device)]
        other = next((each for each in rest if isinstance(each, Tensor)), None)
        to_gpu = bool(where and _is_gpu(where[0])) or isinstance(other, OnGpu)
        if not to_gpu:
            return func(*args, **kwargs)
        rest = [each.dtype if isinstance(each, Tensor) else each for each in rest]
        rest = [each for each in rest if not isinstance(each, str | torch.device)]
        kwargs.pop("device", None)
        asynchronous = bool(kwargs.pop("non_blocking", False))
        if isinstance(x, OnGpu):
            return func(x, *rest, **kwargs) if rest or kwargs else x
        made = func(x, *rest, **kwargs) if rest or kwargs else x
        if made.numel():
            if asynchronous and getattr(x, "pinned", False):
                self.counts.operations["copy to the device"] += 1
            else:
                self.wait("copy to the device")
        return OnGpu(made.detach(), self)

    # -- what runs on the device ----------------------------------------------------------------------------------

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One operation with tensors of the device among its arguments."""
        name = func._schema.name.partition("::")[2]
        plain_args, plain_kwargs = tree_map_only(OnGpu, lambda x: x.inner, (args, kwargs))
        target = plain_kwargs.pop("device", None)
        if name == "_to_copy" and target is not None and not _is_gpu(target) and torch.device(target).type == "cpu":
            asynchronous = plain_kwargs.pop("non_blocking", False)
            self.counts.operations["copy to the CPU"] += 1
            if not asynchronous:
                self.wait("copy to the CPU")
            return func(*plain_args, **plain_kwargs).clone()
        self._count(func, name, args)
        if target is not None and name != "_to_copy":
            plain_kwargs["device"] = CPU
        if func in (_aten.mm.dtype, _aten.bmm.dtype):  # which a CPU does not have
            out = torch.matmul(*(each.to(plain_args[2]) for each in plain_args[:2]))
        else:
            out = func(*plain_args, **plain_kwargs)
        if name == "copy_" and not isinstance(args[0], OnGpu):
            return args[0]
        wrapped = tree_map_only(Tensor, lambda x: OnGpu(x, self), out)
        return return_and_correct_aliasing(func, args, kwargs, wrapped)

    def _count(self, func: Any, name: str, args: Any) -> None:
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        if not is_view and name not in _NO_KERNEL:
            self.counts.operations[name] += 1
        by_bools = False
        if name in ("index", "index_put", "index_put_", "_unsafe_index"):
            indices = [each for each in args[1] if each is not None]
            by_bools = any(each.dtype in (torch.bool, torch.uint8) for each in indices)
            if any(not isinstance(each, OnGpu) and each.ndim for each in indices):
                self.wait("indices on the CPU")
        if name in _SIZED_BY_VALUES or by_bools:
            self.wait(name)
        if name == "copy_":
            here, there = (isinstance(each, OnGpu) for each in args[:2])
            if here != there and args[1].numel() and args[1].ndim and not getattr(args[1], "pinned", False):
                self.wait("copy")

    def wait(self, why: str) -> None:
        """The host waits for the device."""
        self.counts.waited[f"{_asked_by()} {why}"] += 1


class _Factories(TorchDispatchMode):
    """Tensors that C++ makes where it believes the others to be, such as the zeros of a gradient."""

    def __init__(self, gpu: SimulatedGpu):
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is None or torch.device(device).type != "meta" or any(issubclass(each, OnGpu) for each in types):
            return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if name not in _NO_KERNEL:
            self._gpu.counts.operations[name] += 1
        return OnGpu(func(*args, **{**kwargs, "device": CPU}), self._gpu)


class _Attention(torch.autograd.Function):
    """Fused attention, forward and backward one kernel each."""

    @staticmethod
    def forward(ctx: Any, gpu: SimulatedGpu, options: Any, query: Any, key: Any, value: Any) -> Tensor:
        gpu.counts.operations["scaled_dot_product_attention"] += 1
        ctx.save_for_backward(query, key, value)
        ctx.gpu, ctx.options = gpu, options
        with torch._C.DisableTorchFunction():
            inner = [x.inner if isinstance(x, OnGpu) else x for x in (query, key, value)]
            return OnGpu(nn.functional.scaled_dot_product_attention(*inner, **options), gpu)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.gpu.counts.operations["scaled_dot_product_attention_backward"] += 1
        with torch._C.DisableTorchFunction(), torch.enable_grad():
            inner = [x.inner.detach().requires_grad_() for x in ctx.saved_tensors]
            out = nn.functional.scaled_dot_product_attention(*inner, **ctx.options)
            found = torch.autograd.grad(out, inner, grads[0].inner)
        return None, None, *(OnGpu(x, ctx.gpu) for x in found)


def _is_gpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _pinned(func: Any, x: Tensor) -> Any:
    if func is Tensor.is_pinned:
        return getattr(x, "pinned", False)
    made = x.detach().view(x.shape)
    made.pinned = True  # pyright: ignore[reportAttributeAccessIssue]
    return made


def _asked_by() -> str:
    """The innermost line of `src/` that is running, as file:line."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(str(SOURCES)):
            return f"{path[len(str(SOURCES)) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"
