"""Merging several LoRA adapters into one (weighted average, TIES and others), re-factored to a rank.

A LoRA adapter i stands for the weight update D_i = s_i B_i A_i of each module it targets (s_i = alpha / r, Hu et al.
2021, arXiv 2106.09685). A merge combines the updates, never the factors:

    weighted_average    D = sum_i w_i D_i / sum_i w_i
    concat              D = sum_i w_i D_i                                    weights of any sign: 1 and -1 subtract
    ties                D = TIES(D_1 .. D_n), then rounded to the rank (Yadav et al. 2023, arXiv 2306.01708):
                            trim    T_i: the `density` largest entries of D_i by magnitude, the others 0
                            elect   g = sign(sum_i w_i T_i)                  entry by entry
                            merge   D = sum_{i: sign T_i = g} w_i T_i / sum_{i: sign T_i = g} w_i

Why not average A and B each by themselves, as the name "weighted_average" was once implemented? (sum w_i B_i)
(sum w_j A_j) has the cross terms w_i w_j B_i A_j, updates that no source ever learned; and (B R, R^-1 A) is the same
adapter as (B, A) for any invertible R, but averages to something else. Side by side the sum is exact:

    D = [w_1 s_1 B_1 .. w_n s_n B_n] [A_1; ..; A_n]                          of rank r_1 + .. + r_n

That sum of ranks is the merge's own rank. A smaller `rank` gives the nearest update of that rank in the Frobenius norm
(Eckart and Young 1936), for ties by randomised subspace iteration (Halko et al. 2011, arXiv 0909.4061), which is exact
for small modules; the report says how much of the update was lost.

Sources may have different ranks, scales and targets: a module that a source does not target has the update 0 there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from groupwise.errors import AdapterError
from groupwise.store.adapter_config import ExpertTargets, adapted, check_config, is_expert_parameter, packed
from groupwise.store.files import CONFIG, MAX_RANK, MAX_WEIGHTS_BYTES, WEIGHTS

MAX_SOURCES = 16
DENSITY = 0.2  # what the paper keeps

_PREFIX = "base_model.model."
_OVERSAMPLING, _ITERATIONS = 32, 4  # of the subspace iteration


class MergeMode(StrEnum):
    """The way in which the adapters' weight updates are combined."""

    WEIGHTED_AVERAGE = "weighted_average"
    TIES = "ties"
    CONCAT = "concat"


@dataclass(frozen=True)
class WeightedAdapter:
    """An adapter directory and its weight in the merge."""

    directory: Path
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class MergeReport:
    """Result of a merge. `relative_error` is |D - B A| / |D| (Frobenius, all modules): 0 where nothing was rounded."""

    tensors: int
    rank: int
    relative_error: float


def merge_adapters(
    sources: Sequence[WeightedAdapter],
    target: Path,
    *,
    mode: MergeMode,
    density: float | None = None,
    rank: int | None = None,
) -> MergeReport:
    """Write the merge of `sources` into the existing directory `target`, in PEFT's layout.

    Args:
        density: for `ties`, the share of entries that trimming keeps, in (0, 1].
        rank: round to this rank; by default the sum of the sources' ranks, at which sums are exact.

    Raises:
        AdapterError: the sources cannot be merged so: their shapes differ, a weight or the density is out of range,
            the result would be too large, or they are not plain LoRA.
    """
    _check(sources, mode=mode, density=density)
    with ExitStack() as stack:
        adapters = [_Adapter(source.directory, stack) for source in sources]
        modules = sorted({module for adapter in adapters for module in adapter.modules})
        total = sum(adapter.rank for adapter in adapters)
        rank = total if rank is None else rank
        _check_result(adapters, modules, rank=rank, total=total)
        whole = sum(source.weight for source in sources) if mode is MergeMode.WEIGHTED_AVERAGE else 1.0
        config = _config([adapter.config for adapter in adapters], modules, rank)
        targets = ExpertTargets(config)
        tensors: dict[str, Tensor] = {}
        lost = norm = 0.0
        for module in modules:
            having = [(i, adapter) for i, adapter in enumerate(adapters) if module in adapter.modules]
            parts = [(*adapter.factors(module), sources[i].weight / whole) for i, adapter in having]
            of_experts = []
            for expert in range(len(parts[0][0])):
                mine = [(a_ERI[expert], b_EOR[expert], weight) for a_ERI, b_EOR, weight in parts]
                merged = _ties(mine, density or DENSITY, rank) if mode is MergeMode.TIES else _sum(mine, rank)
                lost, norm = lost + merged.lost, norm + merged.norm
                of_experts.append(merged)
            a, b = packed(torch.stack([each.a for each in of_experts]), torch.stack([each.b for each in of_experts]))
            key = f"{_PREFIX}{targets.key(module)}"
            tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"] = a.contiguous(), b.contiguous()
    save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
    (target / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return MergeReport(tensors=len(tensors), rank=rank, relative_error=math.sqrt(lost / norm) if norm else 0.0)


# --- one module, or one expert of it ---


@dataclass(frozen=True)
class _MergedTensor:
    """B A is the merged update; `lost` and `norm` are the squared norms of what was rounded away and of the whole."""

    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]
    lost: float
    norm: float


def _sum(parts: Sequence[tuple[Tensor, Tensor, float]], rank: int) -> _MergedTensor:
    """sum_i w_i B_i A_i, from the factors alone: the update itself [out, in] is never made."""
    a = torch.cat([a for a, _, _ in parts])
    b = torch.cat([b * weight for _, b, weight in parts], 1)
    if a.shape[0] <= rank:
        return _MergedTensor(_pad(a, 0, rank), _pad(b, 1, rank), 0.0, float(((b.T @ b) * (a @ a.T)).sum()))
    (left, inner_left), (right, inner_right) = torch.linalg.qr(b), torch.linalg.qr(a.T)
    u, s, vh = torch.linalg.svd(inner_left @ inner_right.T, full_matrices=False)
    a, b = _leading(left @ u, s, vh @ right.T, rank)
    return _MergedTensor(a, b, float(s[rank:].square().sum()), float(s.square().sum()))


def _ties(parts: Sequence[tuple[Tensor, Tensor, float]], density: float, rank: int) -> _MergedTensor:
    trimmed = [(_trim(b @ a, density), weight) for a, b, weight in parts]
    elected = torch.zeros_like(trimmed[0][0])
    for update, weight in trimmed:
        elected += weight * update
    elected.sign_()
    agreed, kept = torch.zeros_like(elected), torch.zeros_like(elected)
    for update, weight in trimmed:
        agrees = (update.sign() == elected) & (update != 0)
        agreed += weight * update * agrees
        kept += weight * agrees
    merged = torch.where(kept > 0, agreed / kept, 0.0)
    a, b = _leading(*_singular(merged, rank), rank)
    return _MergedTensor(a, b, float((merged - b @ a).square().sum()), float(merged.square().sum()))


def _trim(update: Tensor, density: float) -> Tensor:
    """Return the `density` largest entries by magnitude, at least one; the others 0."""
    kept = max(1, int(density * update.numel()))
    magnitude = update.abs()
    smallest = magnitude.flatten().kthvalue(update.numel() - kept + 1).values
    return update * (magnitude >= smallest)


def _singular(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the leading singular triplets of `matrix`, `rank` of them and some more."""
    width = min(rank + _OVERSAMPLING, *matrix.shape)
    noise = torch.randn(matrix.shape[1], width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    basis = torch.linalg.qr(matrix @ noise.to(matrix.dtype)).Q
    for _ in range(_ITERATIONS):
        basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.T @ basis).Q).Q
    u, s, vh = torch.linalg.svd(basis.T @ matrix, full_matrices=False)
    return basis @ u, s, vh


def _leading(u: Tensor, s: Tensor, vh: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return a and B of the first `rank` singular triplets, the root of each singular value on either side."""
    root = s[:rank].sqrt()
    return _pad(root[:, None] * vh[:rank], 0, rank), _pad(u[:, :rank] * root, 1, rank)


def _pad(x: Tensor, dim: int, size: int) -> Tensor:
    """Zeros up to `size`: every module of a merge has the same rank, whichever sources target it."""
    missing = list(x.shape)
    missing[dim] = size - missing[dim]
    return torch.cat([x, x.new_zeros(missing)], dim).contiguous()


# --- files ---


class _Adapter:
    """A source, read module by module."""

    def __init__(self, directory: Path, stack: ExitStack):
        where = f"{directory.parent.name}/{directory.name}"
        try:
            self.config: dict[str, Any] = json.loads((directory / CONFIG).read_bytes())
            self._file: Any = stack.enter_context(safe_open(directory / WEIGHTS, framework="pt"))
        except (OSError, ValueError, SafetensorError) as error:
            raise AdapterError(f"the adapter in {where} cannot be read: {error}") from error
        keys = set(self._file.keys())
        names = {key.removeprefix(_PREFIX).rpartition(".lora_")[0] for key in keys}
        if odd := keys ^ {f"{_PREFIX}{name}.lora_{half}.weight" for name in names for half in "AB"}:
            raise AdapterError(f"{where} is not plain LoRA: the tensor {min(odd)!r} is one too many or missing")
        check_config(self.config)
        found = adapted(self.config, {name: self._shape(name)[0] for name in names})
        self.modules = {each.name: (key, each) for key, each in found.items()}
        self.rank = max(each.rank for each in found.values())

    def _shape(self, key: str) -> tuple[int, int, int, str]:
        """(rows of A, in, out, dtype)"""
        a, b = (self._file.get_slice(f"{_PREFIX}{key}.lora_{half}.weight") for half in "AB")
        return a.get_shape()[0], a.get_shape()[1], b.get_shape()[0], a.get_dtype()

    def size(self, module: str) -> tuple[int, int, int]:
        """(experts, in, out) of the module."""
        key, target = self.modules[module]
        return target.experts, *self._shape(key)[1:3]

    def item_bytes(self) -> int:
        return 8 if any(self._shape(key)[3] == "F64" for key, _ in self.modules.values()) else 4

    def factors(self, module: str) -> tuple[Tensor, Tensor]:
        """Return a [E, r, in] and s B [E, out, r], in float32 or, if they were saved so, float64; E is 1 but of
        experts."""
        key, target = self.modules[module]
        a, b = (self._file.get_tensor(f"{_PREFIX}{key}.lora_{half}.weight") for half in "AB")
        exact = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
        return target.unpacked(a.to(exact), b.to(exact) * target.scale)


def _check(sources: Sequence[WeightedAdapter], *, mode: MergeMode, density: float | None) -> None:
    if not 1 <= len(sources) <= MAX_SOURCES:
        raise AdapterError(f"a merge has 1 to {MAX_SOURCES} sources; {len(sources)} were given")
    if density is not None and mode is not MergeMode.TIES:
        raise AdapterError(f"density is for the mode 'ties'; the mode is {str(mode)!r}", hint="leave density out")
    if density is not None and not 0 < density <= 1:
        raise AdapterError(f"density is {density}; it must be in (0, 1]")
    for source in sources:
        positive = mode is not MergeMode.CONCAT
        if not math.isfinite(source.weight) or source.weight == 0 or (positive and source.weight < 0):
            rule = "positive" if positive else "finite and not 0"
            raise AdapterError(
                f"the weight {source.weight} cannot be used in the mode {str(mode)!r}: it must be {rule}",
                hint="'concat' adds updates with weights of any sign" if positive else None,
            )


def _check_result(adapters: Sequence[_Adapter], modules: Sequence[str], *, rank: int, total: int) -> None:
    if not 1 <= rank <= min(total, MAX_RANK):
        hint = "give a smaller rank" if total > MAX_RANK else None
        raise AdapterError(f"the merged rank is {rank}; it must be from 1 to {min(total, MAX_RANK)}", hint=hint)
    size = 0
    for module in modules:
        sizes = [adapter.size(module) for adapter in adapters if module in adapter.modules]
        if len(set(sizes)) > 1:
            other = max(set(sizes) - {sizes[0]})
            raise AdapterError(
                f"{module!r} has (in, out) = {sizes[0][1:]} in one source and {other[1:]} in another"
                if sizes[0][0] == other[0]
                else f"{module!r} has {sizes[0][0]} experts in one source and {other[0]} in another",
                hint="merge adapters of one base model",
            )
        experts, inputs, outputs = sizes[0]
        size += rank * experts * (inputs + outputs)
    if (size := size * max(adapter.item_bytes() for adapter in adapters)) > MAX_WEIGHTS_BYTES:
        raise AdapterError(
            f"the merge would have {size:,} bytes at rank {rank}; the limit is {MAX_WEIGHTS_BYTES:,}",
            hint="give a smaller rank",
        )


def _config(sources: Sequence[dict[str, Any]], modules: Sequence[str], rank: int) -> dict[str, Any]:
    """Return the configuration. The scale is 1 (alpha = r): each source's own is in its B. Targets are the modules'
    full names, which say exactly what is there whatever patterns the sources used; of a module that a source names by
    its weight, the weight's, and of experts their parameters'."""
    first = sources[0]
    named = tuple(f".{name}" for source in sources for name in source.get("target_parameters") or ())
    by_weight = [f"{module}.weight" for module in modules if f".{module}.weight".endswith(named)]
    experts = [name for name in modules if is_expert_parameter(name)]
    return {
        "peft_type": "LORA",
        "task_type": first.get("task_type") or "CAUSAL_LM",
        "base_model_name_or_path": first.get("base_model_name_or_path"),
        "r": rank,
        "lora_alpha": rank,
        "target_modules": [name for name in modules if name not in experts and f"{name}.weight" not in by_weight],
        "target_parameters": [*by_weight, *experts] or None,
        "fan_in_fan_out": bool(first.get("fan_in_fan_out")),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
