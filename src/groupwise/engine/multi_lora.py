"""Several LoRA adapters in one batch: each row of a forward may use another policy version.

    y = x W^T;   y[rows] += (x[rows] A^T) B^T * scale      for each adapter present in the batch

Base rows cost nothing. When one policy has the whole batch, which is how training samples, its weights are merged and
an adapter costs nothing either: W + scale (B A), in float32 and float64 only (16 bits would round the update away), for
as many policies as fit in `MERGED_BYTES`. Large ones are laid out for the CPU where that pays (`lay_out`). For a single
token it does not: that has a plain copy, or, where two copies do not fit, the base's own weights and the adapter. The
base weights themselves are never written to. Over rounded copies of them (`rounded`) nothing is merged: adapters stay
separate products, unrounded.

If nothing is merged, the adapters of modules that share an input act as one. On a GPU with the base in bfloat16 they
are in bfloat16 too, as in training (`train.lora`): their products then take as long as the base's.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from groupwise.config.lora import EXPERT_PARAMETERS
from groupwise.errors import AdapterError
from groupwise.model.adaptable import is_linear
from groupwise.model.backbone import adapter_dtype, is_lean
from groupwise.model.mixture import Routed, experts_forward, fused_parameters, is_router, low_rank, router_forward
from groupwise.model.quantized import QuantizedLinear, quantization_of
from groupwise.model.transfer import on_device
from groupwise.store.adapter_config import Adapted, adapted, check_config
from groupwise.store.files import MAGNITUDE

MERGED_BYTES = 1 << 30
LAID_OUT_BYTES = 1 << 20  # of a matrix, from which on it is laid out
MOST_BESIDE = 16  # policies whose adapters are laid side by side, where nothing is merged

_PREFIX = "base_model.model."


@dataclass(frozen=True)
class AdapterWeights:
    """Holds an adapter's matrices: module name -> (A transposed [in, r], B transposed and scaled [r, out]); for a
    parameter of E experts, `<module>.gate_up_proj` -> ([E, in, r], [E, r, out]).

    With DoRA `magnitudes` has the magnitudes m of a module's outputs [out], and `columns` the factors c of the module's
    product, which need the base weights (`AdapterBank.prepare`): y = c (x W^T + (x A) B), c = m / |W + B A| for each
    output; B then contains c.
    """

    pairs: dict[str, tuple[Tensor, Tensor]]
    magnitudes: dict[str, Tensor] = field(default_factory=dict)
    columns: dict[str, Tensor] = field(default_factory=dict)


def read_adapter(directory: Path, *, device: torch.device) -> AdapterWeights:
    """Read PEFT's layout. Raises AdapterError for unreadable files, for what is not plain LoRA, and where PEFT would
    compute something else with the same files."""
    try:
        config = json.loads((directory / "adapter_config.json").read_text())
        tensors = load_file(directory / "adapter_model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise AdapterError(f"the adapter in {directory} cannot be read: {error}") from error
    given = {key.removesuffix(MAGNITUDE): tensors.pop(key) for key in list(tensors) if key.endswith(MAGNITUDE)}
    names = sorted({key.rpartition(".lora_")[0] for key in tensors})
    if given.keys() != (set(names) if config.get("use_dora") else set()):
        raise AdapterError(f"the adapter in {directory} has use_dora {config.get('use_dora')} and not its magnitudes")
    if unknown := tensors.keys() ^ {f"{name}.lora_{half}.weight" for name in names for half in "AB"}:
        raise AdapterError(
            f"the adapter in {directory} is not plain LoRA: the tensor {min(unknown)!r} is one too many or missing"
        )
    check_config(config)
    rows = {name.removeprefix(_PREFIX): tensors[f"{name}.lora_A.weight"].shape[0] for name in names}
    halves = {
        target.name: (*_halves(tensors, key, target), target.scale) for key, target in adapted(config, rows).items()
    }
    found = {
        name.removeprefix(_PREFIX): on_device(m, device, torch.promote_types(m.dtype, torch.float32))
        for name, m in given.items()
    }
    return AdapterWeights(_transposed(halves, device), found)


def _halves(tensors: Mapping[str, Tensor], key: str, target: Adapted) -> tuple[Tensor, Tensor]:
    """Return a [r, in] and B [out, r] of one pair of tensors; of a parameter of E experts [E, r, in] and [E, out,
    r]."""
    a, b = (tensors[f"{_PREFIX}{key}.lora_{half}.weight"] for half in "AB")
    return (a, b) if target.name == key else target.unpacked(a, b)


def _transposed(
    halves: Mapping[str, tuple[Tensor, Tensor, float]], device: torch.device
) -> dict[str, tuple[Tensor, Tensor]]:
    """Pairs of the host and their scales -> those of `AdapterWeights`, in float32 at least. Pairs of one shape and
    scale are made together: what is started on a GPU does not grow with the model's layers."""
    alike: dict[Any, list[str]] = {}
    for name, (a, b, scale) in halves.items():
        alike.setdefault((a.shape, b.shape, a.dtype, scale), []).append(name)
    found = dict[str, tuple[Tensor, Tensor]]()
    for (_, _, dtype, scale), names in alike.items():
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        every = torch.stack([halves[name][0] for name in names]), torch.stack([halves[name][1] for name in names])
        a, b = (on_device(half, device).to(exact) for half in every)
        found |= zip(names, zip(a.mT.contiguous(), b.mT.contiguous() * scale, strict=True), strict=True)
    return {name: found[name] for name in halves}


def add_adapters(parts: Sequence[tuple[AdapterWeights, float]]) -> AdapterWeights:
    """Return the adapter whose update is the weighted sum of others': their ranks side by side. Raises AdapterError for
    DoRA, whose update is not a product of two matrices."""
    if any(weights.magnitudes for weights, _ in parts):
        raise AdapterError("an adapter with DoRA cannot be added to others", hint="name one adapter")
    pairs = {}
    for name in dict.fromkeys(name for weights, _ in parts for name in weights.pairs):
        halves = [(*weights.pairs[name], scale) for weights, scale in parts if name in weights.pairs]
        pairs[name] = torch.cat([a for a, _, _ in halves], -1), torch.cat([b * scale for _, b, scale in halves], -2)
    return AdapterWeights(pairs)


class _Selection(threading.local):
    """Holds the adapters of a thread's next forwards."""

    batch: Sequence[tuple[AdapterWeights, Tensor | None]] = ()  # and their rows; None: all
    alone: Products | None = None
    sole: Sequence[AdapterWeights | None] = ()  # whose the batch is where it is one policy's
    owners: Sequence[AdapterWeights | None] = ()  # of each token


class AdapterBank:
    """Applies the adapters of the current batch to a model's linear modules: as `project` where the model runs through
    the lean backbone, by forward hooks where it runs as transformers wrote it (`hooked`). Each thread has its own
    batch. `rounded` makes what is multiplied with in the place of the base's own weights; `lay_out` the form of large
    merged ones."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        hooked: bool = False,
        rounded: Callable[[], BaseProducts] | None = None,
        lay_out: Callable[[Tensor], Matrix] | None = None,
    ):
        head = model.get_output_embeddings()  # applied without being called, so a hook would not hear of it
        self._modules = {name: module for name, module in model.named_modules() if module is not head}
        self._names = {id(module): name for name, module in self._modules.items()}
        self._lean, self._hooked = is_lean(model) and not hooked, set[str]()
        self._beside = adapter_dtype(model.device, model.dtype)
        self._now = _Selection()  # of the calling thread
        self._lock = threading.Lock()  # of what threads share and make when it is first needed
        linear = [module.weight for module in self._modules.values() if type(module) is nn.Linear]
        size = sum(weight.numel() * weight.itemsize for weight in linear)
        exact = all(weight.dtype in (torch.float32, torch.float64) for weight in linear)
        self._quantized = quantization_of(model) is not None  # whose weights nothing can be merged into
        merged = MERGED_BYTES // max(size, 1) if exact else 0  # policies
        self._lay_out, self._twice = lay_out, lay_out is not None and merged > 1  # plain copies besides
        self._new_rounded, self._rounded = rounded, rounded and rounded()  # in the place of the base's own weights
        self._merges = merged > 0 and self._rounded is None
        self._most = (merged // (1 + self._twice)) if self._merges else MOST_BESIDE
        self._own: OrderedDict[int, tuple[AdapterWeights | None, Products]] = OrderedDict()  # by id, oldest first

    def prepare(self, weights: AdapterWeights) -> None:
        """Hook every module that `weights` targets. Raises AdapterError if one is missing or does not fit."""
        for name, (a, b) in list(weights.pairs.items()):
            path, _, parameter = name.rpartition(".")
            module: Any = self._modules.get(name) if a.ndim == 2 else self._modules.get(path)
            shape = _in_out(module) if a.ndim == 2 else _experts_in_out(module, parameter)
            wanted = (*a.shape[:-1], b.shape[-1])
            if shape != wanted:
                has = "no linear layer, router or experts of that name" if shape is None else f"{shape}"
                raise AdapterError(
                    f"the adapter targets {name!r} with shape {wanted}; this model has {has}",
                    hint="the adapter was trained on another base model, or changes more than is served",
                    kind="shape",
                )
            if not self._lean and name not in self._hooked:
                self._attach(name if a.ndim == 2 else path, module)
                self._hooked.add(name)
            if name in weights.magnitudes and name not in weights.columns:
                c = weights.magnitudes[name] / (_in_by_out(module).to(a.dtype) + a @ b).norm(dim=0)
                weights.columns[name], weights.pairs[name] = c, (a, b * c)
            if is_linear(module) and self._beside.itemsize < a.dtype.itemsize:
                weights.pairs[name] = a.to(self._beside), weights.pairs[name][1].to(self._beside)

    def _attach(self, name: str, module: Any) -> None:
        """Have a module apply the adapters of the batch: by a hook behind a linear layer, and as the forward of a
        router or of experts, whose adapters act within."""
        if is_linear(module):
            module.register_forward_hook(self._hook(name))
        elif name not in self._hooked:
            own = module.forward
            if is_router(module):
                module.forward = lambda *args: router_forward(
                    module, own, *args, delta=partial(self._router_delta, name)
                )
            else:
                module.forward = lambda *args, **given: self._experts(name, module, own, *args, *given.values())
            self._hooked.add(name)

    def forget(self, weights: AdapterWeights | None) -> None:
        """Drop what was made of an adapter that is unloaded, or of base weights that have changed."""
        with self._lock:
            self._own.pop(id(weights), None)
            if weights is None and self._new_rounded is not None:
                self._rounded = self._new_rounded()
                self._own.clear()

    @property
    def owners(self) -> Sequence[AdapterWeights | None]:
        """Return the calling thread's selection."""
        return self._now.owners

    def select(self, owners: Sequence[AdapterWeights | None]) -> None:
        """Set the adapters of the calling thread's next forwards: one for each token of the packed row, None where it
        is the base."""
        now = self._now
        if now.owners is owners and now.alone is None:
            return  # as in the step before: no row has come or gone
        distinct, now.owners = {id(weights): weights for weights in owners}, owners
        now.batch, now.alone, now.sole = [], None, owners[:1] if len(distinct) == 1 else ()
        beside = not (now.sole and now.sole[0] is not None and now.sole[0].columns)  # DoRA cannot be a separate product
        if now.sole and self._lean and not self._quantized and (self._merges or beside):
            now.alone = self._products(owners[0])
            return
        for key, weights in distinct.items():
            if weights is not None:
                if len(distinct) == 1 or not weights.pairs:
                    now.batch.append((weights, None))
                    continue
                rows = [i for i, owner in enumerate(owners) if id(owner) == key]
                now.batch.append((weights, on_device(rows, next(iter(weights.pairs.values()))[0].device)))

    def project(self, modules: Sequence[nn.Module], x: Tensor) -> Tensor:
        """`backbone.Project`: one product for all of `modules` when one policy has the whole batch, else the base's
        products and each adapter's on its own rows."""
        if self._now.alone is not None:
            return self._now.alone.project(modules, x)
        if self._rounded is None:
            outputs = [module(x) for module in modules]
        else:
            widths = [module.get_parameter("weight").shape[0] for module in modules]
            outputs = multiply(Group((self._rounded.of(modules),)), x).split(widths, -1)
        outputs = [self._adapted(self._names[id(m)], x, y) for m, y in zip(modules, outputs, strict=True)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    def alone(self) -> Products | None:
        """Return the products of the single policy of the batch, merged or not. None if several policies share the
        batch, or if the single policy cannot be a separate product (DoRA) and nothing is merged into the weights."""
        return self._now.alone

    def _products(self, weights: AdapterWeights | None) -> Products:
        """Return a policy's own, made when it first has a batch to itself and kept while there is room."""
        with self._lock:
            if id(weights) not in self._own:
                while len(self._own) >= self._most:
                    self._own.popitem(last=False)
                self._own[id(weights)] = weights, self._new_products(weights)
            self._own.move_to_end(id(weights))
            return self._own[id(weights)][1]

    def _new_products(self, weights: AdapterWeights | None) -> Products:
        new = partial(Products, self._names, weights)
        if self._rounded is not None:
            return new(rounded=self._rounded)
        if not self._merges:
            return new(merged=False)
        if self._lay_out is None:
            return new()
        if self._twice:
            return new(lay_out=self._lay_out, single=new())
        if weights is not None and weights.columns:  # DoRA, which is more than a separate product
            return new(lay_out=self._lay_out)
        return new(lay_out=self._lay_out, single=new(merged=False))

    def _adapted(self, name: str, x: Tensor, output: Tensor) -> Tensor:
        for weights, rows in self._now.batch:
            pair = weights.pairs.get(name)
            if pair is None:
                continue
            delta = _delta(pair, x if rows is None else x.index_select(-2, rows))
            if (c := weights.columns.get(name)) is not None:
                own = output if rows is None else output.index_select(-2, rows)
                bias: Any = self._modules[name].bias  # which has no part in it
                delta = delta + (own if bias is None else own - bias) * (c - 1)
            if rows is None:
                output = (output + delta).to(output.dtype)
            else:
                output = output.index_add(-2, rows, delta.to(output.dtype))
        return output

    def _router_delta(self, name: str, x: Tensor) -> Tensor | None:
        """Return what the adapters of the batch add to a router's logits."""
        added = None
        for weights, rows in self._now.batch:
            if (pair := weights.pairs.get(name)) is not None:
                mine = _delta(pair, x if rows is None else x[rows])
                added = mine.new_zeros(len(x), mine.shape[-1]) if added is None else added
                added = added + mine if rows is None else added.index_add(0, rows, mine)
        return added

    def _experts(self, path: str, module: Any, own: Callable[..., Tensor], x: Tensor, *routing: Tensor) -> Tensor:
        """Return the forward of experts: the model's own where no adapter of the batch changes them."""
        acting = [
            (weights, rows) for weights, rows in self._now.batch
            if any(f"{path}.{parameter}" in weights.pairs for parameter in EXPERT_PARAMETERS)
        ]  # fmt: skip
        if not acting:
            return own(x, *routing)
        own_tokens = [(weights, None if rows is None else _mask(rows, len(x))) for weights, rows in acting]

        def delta(parameter: str, x_N: Tensor, routed: Routed) -> Tensor | None:
            added = None
            for weights, mask_S in own_tokens:
                if (pair := weights.pairs.get(f"{path}.{parameter}")) is None:
                    continue
                if mask_S is None:
                    return low_rank(x_N, *pair, routed.counts)  # the one policy of the batch
                at = mask_S[routed.token_N].nonzero()[:, 0]
                mine = Routed(routed.token_N[at], routed.expert_N[at], routed.experts)
                added = pair[1].new_zeros(len(x_N), pair[1].shape[-1]) if added is None else added
                added.index_add_(0, at, low_rank(x_N[at], *pair, mine.counts))
            return added

        return experts_forward(module, x, routing[0], routing[1], delta)

    def _hook(self, name: str) -> Callable[..., Tensor]:
        return lambda module, args, output: self._adapted(name, args[0], output)


class Matrix(Protocol):
    """Weights [in, out] in another form than a tensor."""

    def times(self, x: Tensor) -> Tensor:
        """Return x W [S, out], in the type of x [S, in]."""
        ...


class BaseProducts(Protocol):
    """Multiplies with the base model's weights in another form than the model has them, such as rounded
    (`cpu_weights`)."""

    def of(self, modules: Sequence[Any]) -> Product:
        """Return one product for all of `modules`, with their outputs side by side."""
        ...


class Product(NamedTuple):
    """The product x W^T + bias of one linear module, or of several with one input, for an input x [S, in]."""

    matrix: Tensor | Matrix  # [in, out]
    bias: Tensor | None


class Group(NamedTuple):
    """Linear modules with the same input: their products, and (x A) B where that is in none of them."""

    products: tuple[Product, ...]
    pair: tuple[Tensor, Tensor] | None = None  # A [in, r] and B [r, sum of out]


def multiply(group: Group, x: Tensor) -> Tensor:
    """Return [S, sum of out]."""
    outputs = []
    for matrix, bias in group.products:
        if isinstance(matrix, Tensor):
            outputs.append(x @ matrix if bias is None else torch.addmm(bias, x, matrix))
        else:
            outputs.append(matrix.times(x) if bias is None else matrix.times(x).add_(bias))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
    if group.pair is None:
        return output
    a, b = group.pair
    if a.dtype == x.dtype == output.dtype:
        return torch.addmm(output, x @ a, b)
    return (output + _delta(group.pair, x)).to(output.dtype)


def _delta(pair: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
    """Return (x A) B, in the adapter's type."""
    return (x.to(pair[0].dtype) @ pair[0]) @ pair[1]


class Products:
    """Holds the matrices of one policy's linear modules. Merged: W^T + A B of the modules that share an input, as one
    matrix [in, sum of out]. The inputs come first, because the product is up to a third faster so on a CPU. From
    LAID_OUT_BYTES on the matrix has the layout of `lay_out`, and `single` is used for a single token. Over `rounded`
    weights: the rounded matrix, and A B as a separate product."""

    def __init__(
        self,
        names: Mapping[int, str],
        weights: AdapterWeights | None,
        *,
        merged: bool = True,
        rounded: BaseProducts | None = None,
        lay_out: Callable[[Tensor], Matrix] | None = None,
        single: Products | None = None,
    ):
        self.weights, self._names, self._merged, self._rounded = weights, names, merged, rounded
        self._pairs = {} if weights is None else weights.pairs
        self._columns = {} if weights is None else weights.columns
        self._lay_out = lay_out
        self._single = single
        self._made: dict[int, Group] = {}  # by the first module's id
        self._lock = threading.Lock()

    def project(self, modules: Sequence[nn.Module], x: Tensor) -> Tensor:
        """`backbone.Project`."""
        if len(x) == 1 and self._single is not None and _is_large(modules):
            return self._single.project(modules, x)
        return multiply(self.of(modules), x)

    def of(self, modules: Sequence[Any]) -> Group:
        """Return the matrices of modules that share an input; the same tensors each time."""
        made = self._made.get(id(modules[0]))
        if made is None:
            with self._lock:  # threads that decode side by side need it at the same time
                if id(modules[0]) not in self._made:
                    self._made[id(modules[0])] = self._make(modules)
            made = self._made[id(modules[0])]
        return made

    def _make(self, modules: Sequence[Any]) -> Group:
        if self._rounded is not None:
            return Group((self._rounded.of(modules),), self._side_by_side(modules))
        if self._merged:
            return Group((self._merge(modules),))
        own = tuple(Product(module.weight.T, module.bias) for module in modules)
        return Group(own, self._side_by_side(modules))

    def _side_by_side(self, modules: Sequence[Any]) -> tuple[Tensor, Tensor] | None:
        """Return the adapters of modules that share an input as one: A [in, sum of r] and B [sum of r, sum of out], in
        which each module's has its own columns."""
        pairs = [self._pairs.get(self._names[id(module)]) for module in modules]
        there = [pair for pair in pairs if pair is not None]
        if not there:
            return None
        blocks = [
            there[0][1].new_zeros(0, module.weight.shape[0]) if pair is None else pair[1]
            for module, pair in zip(modules, pairs, strict=True)
        ]
        return torch.cat([a for a, _ in there], 1).contiguous(), torch.block_diag(*blocks)

    def _merge(self, modules: Sequence[Any]) -> Product:
        matrices = []
        for module in modules:
            pair = self._pairs.get(self._names[id(module)])
            c = self._columns.get(self._names[id(module)])
            base = module.weight.T if c is None else module.weight.T * c.to(module.weight.dtype)
            matrices.append(base if pair is None else torch.addmm(base, *pair))
        biases = [module.bias for module in modules]
        whole = None
        if any(bias is not None for bias in biases):
            columns = zip(biases, matrices, strict=True)
            whole = torch.cat([m.new_zeros(m.shape[1]) if b is None else b for b, m in columns])
        matrix = torch.cat(matrices, 1).contiguous()
        if self._lay_out is not None and _is_large(modules):
            return Product(self._lay_out(matrix), whole)
        return Product(matrix, whole)


def _is_large(modules: Sequence[Any]) -> bool:
    """Return whether the matrix of modules that share an input is one that is laid out."""
    return sum(module.weight.nbytes for module in modules) >= LAID_OUT_BYTES


def _in_out(module: nn.Module | None) -> tuple[int, int] | None:
    """(inputs, outputs) of a linear module or a router; transformers' Conv1D keeps its weight transposed. None: it is
    neither."""
    if module is None or not (is_linear(module) or is_router(module)):
        return None
    if isinstance(module, QuantizedLinear):
        return module.in_features, module.out_features
    weight: Any = module.weight
    rows, columns = weight.shape
    return (rows, columns) if isinstance(module, Conv1D) else (columns, rows)


def _in_by_out(module: Any) -> Tensor:
    """Return the weights of a linear module [in, out], of a quantised one dequantised."""
    if isinstance(module, QuantizedLinear):
        return module.dequantized(torch.float32).T
    return module.weight if isinstance(module, Conv1D) else module.weight.T


def _experts_in_out(module: Any, parameter: str) -> tuple[int, int, int] | None:
    """(experts, inputs, outputs) of a parameter of experts; None: it is none."""
    if module is None or parameter not in fused_parameters(module):
        return None
    experts, rows, columns = getattr(module, parameter).shape
    return (experts, rows, columns) if module.is_transposed else (experts, columns, rows)


def _mask(rows: Tensor, size: int) -> Tensor:
    mask = torch.zeros(size, dtype=torch.bool, device=rows.device)
    mask[rows] = True
    return mask
