"""Several adapters in one batch: every row of a forward may belong to another policy version.

The base modules stay as they are. A forward hook on each linear module that some adapter targets adds

    y[rows] += (x[rows] A^T) B^T * scale

for each adapter present in the batch; base rows cost nothing. When all rows share one adapter no row is gathered.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from groupwise.errors import AdapterError

_PREFIX = "base_model.model."


@dataclass(frozen=True)
class AdapterWeights:
    """One adapter: module name -> (A transposed [in, r], B transposed and scaled [r, out])."""

    pairs: dict[str, tuple[Tensor, Tensor]]


def read_adapter(directory: Path, *, device: torch.device) -> AdapterWeights:
    """Read PEFT's layout. Raises AdapterError for unreadable files and for variants that are not plain LoRA."""
    try:
        config = json.loads((directory / "adapter_config.json").read_text())
        tensors = load_file(directory / "adapter_model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise AdapterError(f"the adapter in {directory} cannot be read: {error}") from error
    for option in ("use_dora", "modules_to_save"):
        if config.get(option):
            raise AdapterError(
                f"the adapter in {directory} uses {option}, which the local engine does not apply",
                hint="merge the adapter into the model, or use another engine",
            )
    root = math.sqrt if config.get("use_rslora") else float
    names = {key.rpartition(".lora_")[0] for key in tensors}
    unknown = tensors.keys() ^ {f"{name}.lora_{half}.weight" for name in names for half in "AB"}
    if unknown or not isinstance(config.get("lora_alpha"), int | float):
        what = f"the tensor {min(unknown)!r} is one too many or missing" if unknown else "its config has no lora_alpha"
        raise AdapterError(f"the adapter in {directory} is not plain LoRA: {what}")
    pairs = {}
    for name in names:
        a, b = (tensors[f"{name}.lora_{half}.weight"].to(device) for half in "AB")
        module = name.removeprefix(_PREFIX)
        scale = _alpha(config.get("alpha_pattern"), module, config["lora_alpha"]) / root(a.shape[0])
        exact = torch.float64 if a.dtype == torch.float64 else torch.float32
        pairs[module] = (a.to(exact).T.contiguous(), b.to(exact).T.contiguous() * scale)
    return AdapterWeights(pairs)


def _alpha(patterns: dict[str, float] | None, module: str, default: float) -> float:
    """PEFT's per-module override: the first pattern that matches the module's name or a dotted suffix of it."""
    return next((v for k, v in (patterns or {}).items() if re.fullmatch(rf"(.*\.)?({k})", module)), default)


class AdapterBank:
    """Adds the adapters of the current batch to a model's linear modules."""

    def __init__(self, model: PreTrainedModel):
        head = model.get_output_embeddings()  # applied without being called, so a hook would not hear of it
        self._modules = {name: module for name, module in model.named_modules() if module is not head}
        self._hooked: set[str] = set()
        self._batch: list[tuple[AdapterWeights, Tensor | None]] = []

    def prepare(self, weights: AdapterWeights) -> None:
        """Make sure that every module `weights` targets is heard. Raises AdapterError if one is missing or unfit."""
        for name, (a, b) in weights.pairs.items():
            module: Any = self._modules.get(name)
            shape = None if module is None else _in_out(module)
            if module is None or shape != (a.shape[0], b.shape[1]):
                raise AdapterError(
                    f"the adapter targets {name!r} with shape {(a.shape[0], b.shape[1])}; this model has {shape}",
                    hint="the adapter was trained on another base model",
                )
            if name not in self._hooked:
                module.register_forward_hook(self._hook(name))
                self._hooked.add(name)

    def select(self, rows: Sequence[tuple[AdapterWeights, Tensor | None]]) -> None:
        """Set the adapters of the next forwards: (weights, indices of the tokens that use them, None for all)."""
        self._batch = list(rows)

    def _hook(self, name: str) -> Callable[..., Tensor | None]:
        def add(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            for weights, rows in self._batch:
                pair = weights.pairs.get(name)
                if pair is None:
                    continue
                x = args[0] if rows is None else args[0].index_select(-2, rows)
                delta = (x.to(pair[0].dtype) @ pair[0]) @ pair[1]
                if rows is None:
                    output = (output + delta).to(output.dtype)
                else:
                    output = output.index_add(-2, rows, delta.to(output.dtype))
            return output

        return add


def _in_out(module: nn.Module) -> tuple[int, int] | None:
    """(inputs, outputs) of a linear module; transformers' Conv1D keeps its weight transposed."""
    weight = getattr(module, "weight", None)
    if weight is None or weight.ndim != 2:
        return None
    rows, columns = weight.shape
    return (columns, rows) if isinstance(module, nn.Linear) else (rows, columns)
