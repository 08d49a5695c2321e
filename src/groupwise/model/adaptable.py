"""Finds the modules of a model that an adapter can change: linear layers, routers, and experts' parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from groupwise.config.lora import EXPERTS, PROJECTOR, VISION
from groupwise.model.mixture import fused_parameters, is_router
from groupwise.model.quantized import QuantizedLinear
from groupwise.model.targets import AdaptableModules, means
from groupwise.model.vision import linear_of_eyes

_EXPERTS = ": transformers has no exchangeable forward of these experts, so they take no adapter"


def adapted_modules(model: PreTrainedModel, targets: str | Sequence[str]) -> list[str]:
    """Return the modules that an adapter with these targets changes: full names of linear modules, of routers, and of
    the parameters of experts, in the model's order.

    `all-linear` is every linear layer of the text decoder but the LM head: the projections of attention and of dense
    MLPs, shared experts included. It is neither a router nor a routed expert. `experts` is all routed experts, `vision`
    every linear layer of the vision tower, and `projector` those between it and the text decoder. Names mean the
    text decoder's modules that have them, or whose last parts they are, and may name a router (`gate`, `mlp.router`)
    or a parameter of experts (`experts.down_proj`).

    Raises:
        FieldError: a target names no module of the model, the LM head, or something that is not a linear layer, such
            as an embedding.
    """
    return adaptable_modules(model).meant(targets)


def adaptable_modules(model: PreTrainedModel) -> AdaptableModules:
    """Return the modules of a model that an adapter can change."""
    every, head = dict(model.named_modules()), model.get_output_embeddings()
    config: Any = model.config
    text: Any = model if config.get_text_config() is config else model.get_decoder()  # without a vision tower
    ours = {id(module) for module in text.modules()}
    modules = {name: module for name, module in every.items() if id(module) in ours or module is head}
    refused: dict[str, str | None] = {}
    experts: dict[str, tuple[str, ...]] = {}
    for name, module in modules.items():
        refused[name] = _why_not(model, name, module)
        fused = [f"{name}.{parameter}" for parameter in fused_parameters(module)]
        if fused and name.rpartition(".")[2] == EXPERTS:
            refused |= dict.fromkeys(fused)
            experts[name] = tuple(fused)
    for name in modules:
        if name.rpartition(".")[2] == EXPERTS and name not in experts:
            inside = (each for each in modules if each.startswith(f"{name}.") and refused[each] is None)
            experts[name] = tuple(inside)
    fused = {parameter for parameters in experts.values() for parameter in parameters}
    linear = [name for name, why in refused.items() if why is None and name not in fused]
    all_linear = tuple(name for name in linear if not _is_routed(name, every))
    tensors = tuple(name for name, _ in model.named_parameters())
    eyes = {VISION: linear_of_eyes(model), PROJECTOR: linear_of_eyes(model, projector=True)}
    return AdaptableModules(type(model).__name__, refused, all_linear, experts, tensors, eyes)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is x W^T + b and nothing else; transformers' Conv1D is too, with its weight
    transposed."""
    plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    return plain or isinstance(module, Conv1D | QuantizedLinear) or type(module).__name__ == "FalconLinear"


def _is_routed(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether a module is, or is inside, a router of a mixture of experts or an expert that tokens are routed
    to."""
    return EXPERTS in name.split(".") or is_routing(name, modules)


def is_routing(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether a module is, or is inside, a router of a mixture of experts; `modules` are all of the model."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part == "router" or "Router" in type(modules[".".join(parts[: i + 1])]).__name__:
            return True
        if part in ("gate", "shared_expert_gate") and hasattr(modules[".".join(parts[:i])], "experts"):
            return True
    return False


def _is_passed_over(model: PreTrainedModel, name: str) -> bool:
    """Return whether the kernels of a state-space layer take this module's weight without calling it, and so without
    its adapter. PEFT refuses it too."""
    kernels = ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h")
    return model.config.model_type in kernels and means("out_proj", name)


def _why_not(model: PreTrainedModel, name: str, module: nn.Module) -> str | None:
    """Return why a module takes no adapter; None if it does."""
    if module is model.get_output_embeddings():
        return "is the LM head, which takes no adapter here"
    if not is_linear(module) and not is_router(module):
        experts = _EXPERTS if EXPERTS in name.split(".") else ""
        return f"is {name}, which is of type {type(module).__name__} and not a linear layer{experts}"
    if _is_passed_over(model, name):
        return f"is {name}, whose weight the kernels of {model.config.model_type} take without its adapter"
    return None
