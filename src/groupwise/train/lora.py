"""LoRA adapters through PEFT: wrap a model, switch the adapter off for the reference, read and write PEFT's layout.

y = W x + (alpha / r) B A x, A random, B zero (Hu et al. 2021, arXiv 2106.09685). Adapter weights are float32 whatever
the base is in. A saved adapter is a directory that `peft.PeftModel.from_pretrained` and vLLM load.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from groupwise.errors import AdapterError, ConfigError

_PEFT_PREFIX = "base_model.model."
_ADAPTER = "default"


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    """Which adapter to train. `targets` are module names, or "all-linear": every linear layer but the LM head."""

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: str | Sequence[str] = "all-linear"


def add_lora(model: PreTrainedModel, spec: LoraSpec, *, seed: int) -> LoraConfig:
    """Insert a fresh adapter into `model` in place; only its parameters require gradients.

    Raises:
        ConfigError: a target is the name of no module of the model, or of one that cannot be adapted.
    """
    targets = spec.targets if isinstance(spec.targets, str) else list(spec.targets)
    _check_targets(model, targets)
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,  # pyright: ignore[reportArgumentType]  PEFT takes fractions too
        lora_dropout=spec.dropout,
        target_modules=targets,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),  # GPT-2's transposed linear
        task_type="CAUSAL_LM",
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
    except ValueError as error:
        raise ConfigError(
            f"train.lora.targets {targets!r} does not fit {type(model).__name__}: {error}",
            hint='use "all-linear" or names of linear modules, such as [q_proj, v_proj]',
        ) from error
    for name, parameter in model.named_parameters():
        if "lora_" in name and parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.float()
    return config


def _check_targets(model: PreTrainedModel, targets: str | list[str]) -> None:
    if targets == "all-linear":
        return
    names = [name for name, _ in model.named_modules()]
    head = next((name for name, module in model.named_modules() if module is model.get_output_embeddings()), "")
    hint = 'use "all-linear" or names of linear modules, such as [q_proj, v_proj]'
    if isinstance(targets, str):
        raise ConfigError(f"train.lora.targets is {targets!r}", hint=hint)
    for target in targets:
        matches = [name for name in names if name == target or name.endswith(f".{target}")]
        if not matches:
            raise ConfigError(f"train.lora.targets: {type(model).__name__} has no module {target!r}", hint=hint)
        if head in matches:
            raise ConfigError(f"train.lora.targets: {target!r} is the LM head, which takes no adapter here", hint=hint)


@contextmanager
def adapter_off(model: PreTrainedModel) -> Iterator[None]:
    """Within: the model is the base, which is the reference policy of an adapter."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def lora_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The adapter's parameters under the names PEFT's files use."""
    return {
        _PEFT_PREFIX + name.replace(f".{_ADAPTER}.", "."): parameter
        for name, parameter in model.named_parameters()
        if "lora_" in name
    }


def save_lora(model: PreTrainedModel, config: LoraConfig, directory: Path, *, base_name: str) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors` into an existing directory."""
    tensors = {name: p.detach().to("cpu", copy=True).contiguous() for name, p in lora_tensors(model).items()}
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    plain = config.to_dict()
    plain["base_model_name_or_path"] = base_name
    plain["inference_mode"] = True
    plain["target_modules"] = sorted(config.target_modules or ())
    text = json.dumps(plain, indent=2, sort_keys=True, default=str)
    (directory / "adapter_config.json").write_text(text + "\n")


def load_lora(model: PreTrainedModel, config: LoraConfig, directory: Path) -> None:
    """Copy a saved adapter's weights into the adapter inside `model`.

    Raises:
        AdapterError: the files cannot be read, or are not of this adapter (other rank, alpha, targets or base model).
    """
    try:
        have = load_file(directory / "adapter_model.safetensors")
        saved = json.loads((directory / "adapter_config.json").read_text())
    except (OSError, ValueError, SafetensorError) as error:
        raise AdapterError(f"the adapter in {directory} cannot be read: {error}") from error
    if saved.get("lora_alpha") != config.lora_alpha or bool(saved.get("use_rslora")) != config.use_rslora:
        raise AdapterError(
            f"the adapter in {directory} has alpha {saved.get('lora_alpha')}; training is to use {config.lora_alpha}",
            hint="set train.lora.alpha to the adapter's",
        )
    want = lora_tensors(model)
    wrong = sorted(have.keys() ^ want.keys()) or [n for n in want if have[n].shape != want[n].shape]
    if wrong:
        raise AdapterError(
            f"the adapter in {directory} does not fit: {len(wrong)} of {len(want)} tensors differ, first {wrong[0]}",
            hint="train with the rank and the targets that the adapter has, on the same base model",
        )
    with torch.no_grad():
        for name, parameter in want.items():
            parameter.copy_(have[name])
