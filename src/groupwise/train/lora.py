"""LoRA adapters through PEFT: wrap a model, switch the adapter off for the reference, read and write PEFT's layout.

y = W x + (alpha / r) B A x, A random, B zero (Hu et al. 2021, arXiv 2106.09685). Adapter weights are float32 whatever
the base is in. A saved adapter is a directory that `peft.PeftModel.from_pretrained` and vLLM load.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from groupwise.config.lora import LoraSpec
from groupwise.errors import AdapterError, ConfigError
from groupwise.model.adaptable import adapted_modules
from groupwise.model.backbone import adapter_dtype, project_plainly
from groupwise.model.mixture import Routed, experts_forward, is_router, low_rank, router_forward
from groupwise.model.products import product
from groupwise.model.quantized import QuantizedLinear, quantization_of
from groupwise.model.transfer import on_host
from groupwise.store.adapter_config import ExpertTargets, adapted, check_config

_PEFT_PREFIX = "base_model.model."
_A = ".lora_A.weight"
_ADAPTER = "default"
_MAGNITUDE = "lora_magnitude_vector"  # DoRA's, which PEFT's files have without ".weight"

NARROW = 16  # ranks below it: a CPU multiplies with B up to six times faster where its rows, of a rank, are columns


def add_lora(model: PreTrainedModel, spec: LoraSpec, *, seed: int) -> LoraConfig:
    """Insert a fresh adapter into `model` in place; only its parameters require gradients.

    The layers are PEFT's, but those of experts and of routers (`ParameterLora`). Which modules get one is decided here
    and not by PEFT, which reads names differently in mixtures of experts: there it takes `down_proj` for the routed
    experts, even where a dense layer is called so.

    Returns:
        What `peft.PeftModel.from_pretrained` must read to adapt the same modules.

    Raises:
        ConfigError: a target is the name of no module of the model, or of one that cannot be adapted.
    """
    names, every = adapted_modules(model, spec.targets), dict(model.named_modules())
    if spec.use_dora:
        _check_dora(model, names, every)
    modules, parameters = _as_peft_reads(model, names)
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,  # pyright: ignore[reportArgumentType]  PEFT takes fractions too
        use_rslora=spec.use_rslora,
        use_dora=spec.use_dora,
        lora_dropout=spec.dropout,
        target_modules=modules,
        target_parameters=parameters or None,
        fan_in_fan_out=any(isinstance(every.get(name), Conv1D) for name in names),  # GPT-2's transposed linear
        task_type="CAUSAL_LM",
    )
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name in names:
            if name not in every or is_router(every[name]):
                _wrap_parameter(model, name, spec)
                continue
            base: Any = every[name]
            layer = LoraLinear(
                base,
                _ADAPTER,
                config=config,
                r=spec.rank,
                lora_alpha=spec.alpha,  # pyright: ignore[reportArgumentType]
                is_target_conv_1d_layer=isinstance(base, Conv1D),
            )
            layer.fan_in_fan_out = isinstance(base, Conv1D)
            setattr(every[name.rpartition(".")[0]], _last(name), layer)
    for parameter in lora_tensors(model).values():
        if parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.float()
    return config


def _check_dora(model: PreTrainedModel, names: Sequence[str], every: Mapping[str, nn.Module]) -> None:
    """Raise ConfigError where DoRA is not what it is for linear layers with weights in full width."""
    if other := next((name for name in names if name not in every or is_router(every[name])), None):
        raise ConfigError(
            f"DoRA is of linear layers, and {other} is of a mixture's experts or routers",
            hint="leave it out of train.lora.targets, or set use_dora: false",
        )
    if (kind := quantization_of(model)) is not None:
        raise ConfigError(
            f"DoRA divides by norms of the weights, and these are quantised ({kind})",
            hint="set use_dora: false, or quantization: null",
        )


def _as_peft_reads(model: PreTrainedModel, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """`target_modules` and `target_parameters` with which PEFT adapts just these modules.

    Parameters of experts are named as they are, and routers by their weights. For some model types PEFT rewrites
    `target_modules` that were names of experts in older versions of transformers. Dense layers of such names have to be
    named by their weights too, which PEFT takes as they are.
    """
    modules = dict(model.named_modules())
    every, parameters = list(modules), [name for name, _ in model.named_parameters()]
    experts = [name for name in names if name not in modules]
    plain = [name for name in names if name in modules]
    taken = {last for last in {_last(name) for name in plain} if _rewritten(model, last)}
    by_weight = [name for name in plain if _last(name) in taken or is_router(modules[name])]
    by_name = [name for name in plain if name not in by_weight]
    weights = [f"{name}.weight" for name in by_weight]
    return _shortest(by_name, every), _shortest([*weights, *experts], parameters)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _rewritten(model: PreTrainedModel, name: str) -> bool:
    """Return whether PEFT takes a module's name for something else in this model."""
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # before PEFT 0.19
        return False
    probe = LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(probe, model, None)
    except ValueError:  # one of several that were fused
        return True
    return name not in (probe.target_modules or ())


def _shortest(names: Sequence[str], every: Sequence[str]) -> list[str]:
    """Return the shortest dotted suffixes that mean these of `every` name and no other, sorted."""
    others = {suffix for name in set(every).difference(names) for suffix in _suffixes(name)}
    return sorted({next((s for s in _suffixes(name) if s not in others), name) for name in names})


def _suffixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[at:]) for at in range(len(parts) - 1, -1, -1))


# -- adapters of parameters: experts and routers -----------------------------------------------------------------------


class ParameterLora(nn.Module):
    """LoRA of one parameter of a module, in the layout of PEFT's `ParamWrapper`: A [E r, in] and B [out, r E] for a
    parameter of E experts, E = 1 for a router's weight. Those of two parameters of one module are one in the other.

    PEFT makes W + B A of all experts in every forward. Here only the tokens of an expert are multiplied with its A and
    B. Dropout acts on the input, as of any other LoRA layer; PEFT has none here.
    """

    def __init__(self, base_layer: nn.Module, parameter: str, spec: LoraSpec):
        super().__init__()
        self.base_layer, self.parameter_name, self.enabled = base_layer, parameter, True
        root = math.sqrt(spec.rank) if spec.use_rslora else spec.rank
        self.dropout, self.scale = spec.dropout, spec.alpha / root
        weight = getattr(self.inner, parameter)
        *experts, inputs, outputs = weight.shape if getattr(self.inner, "is_transposed", False) else (
            *weight.shape[:-2], weight.shape[-1], weight.shape[-2]
        )  # fmt: skip
        self.experts = experts[0] if experts else 1
        kind = {"bias": False, "dtype": weight.dtype, "device": weight.device}
        self.lora_A = nn.ModuleDict({_ADAPTER: nn.Linear(inputs, spec.rank * self.experts, **kind)})
        self.lora_B = nn.ModuleDict({_ADAPTER: nn.Linear(spec.rank * self.experts, outputs, **kind)})
        nn.init.kaiming_uniform_(self._weights()[0], a=math.sqrt(5))  # as PEFT, and nn.Linear, have it
        nn.init.zeros_(self._weights()[1])

    @property
    def inner(self) -> nn.Module:
        """Return the model's own module."""
        return self.base_layer.inner if isinstance(self.base_layer, ParameterLora) else self.base_layer

    def enable_adapters(self, enabled: bool) -> None:
        """Enable adapters, as PEFT's layers do."""
        self.enabled = enabled

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return a [E, in, r] and B [E, r, out], B scaled."""
        a, b = self._weights()
        a_EIR = a.view(self.experts, -1, a.shape[1]).mT
        return a_EIR, b.view(b.shape[0], -1, self.experts).permute(2, 1, 0) * self.scale

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        acting = {layer.parameter_name: layer for layer in self._chain() if layer.enabled}
        if not acting:
            return self.inner(x, *args, **kwargs)
        if is_router(self.inner):
            return router_forward(self.inner, self.inner, x, *args, *kwargs.values(), delta=self._router_delta)
        chosen_SK, weight_SK = (*args, *kwargs.values())

        def delta(name: str, x_N: Tensor, routed: Routed) -> Tensor | None:
            layer = acting.get(name)
            return None if layer is None else low_rank(layer._dropped(x_N), *layer.factors(), routed.counts)

        return experts_forward(self.inner, x, chosen_SK, weight_SK, delta)

    def _router_delta(self, x_SH: Tensor) -> Tensor:
        a, b = self._weights()
        return (self._dropped(x_SH).to(a.dtype) @ a.T) @ b.T * self.scale

    def _dropped(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, self.dropout, self.training) if self.dropout else x

    def _weights(self) -> tuple[nn.Parameter, nn.Parameter]:
        a: Any = self.lora_A[_ADAPTER]
        b: Any = self.lora_B[_ADAPTER]
        return a.weight, b.weight

    def _chain(self) -> Iterator[ParameterLora]:
        yield self
        if isinstance(self.base_layer, ParameterLora):
            yield from self.base_layer._chain()


def router_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the weights of routers, and those of adapters around them."""
    for module in model.modules():
        if is_router(module) or (isinstance(module, ParameterLora) and is_router(module.inner)):
            yield from module.parameters()


def _wrap_parameter(model: nn.Module, name: str, spec: LoraSpec) -> None:
    """Put an adapter around a router, or around the module whose parameter `name` is."""
    path, _, parameter = name.rpartition(".")
    try:
        module = model.get_submodule(name)
        path, parameter = name, "weight"
    except AttributeError:
        module = model.get_submodule(path)
    parent, _, last = path.rpartition(".")
    setattr(model.get_submodule(parent), last, ParameterLora(module, parameter, spec))


@contextmanager
def adapter_off(model: PreTrainedModel) -> Iterator[None]:
    """Turn the adapter off during the block: the model is then the base, the reference policy of an adapter."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer | ParameterLora)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@contextmanager
def without_dropout(model: PreTrainedModel) -> Iterator[None]:
    """Context manager: nothing is dropped, whatever becomes of what is computed; then the model is as it was."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextmanager
def adapter_as(model: PreTrainedModel, tensors: Mapping[str, Tensor] | None) -> Iterator[None]:
    """Context manager: the adapter has these weights (`read_lora`) in the place of its own; None: it is off."""
    if tensors is None:
        with adapter_off(model):
            yield
        return
    own = {parameter: parameter.data for parameter in lora_tensors(model).values()}
    for name, parameter in lora_tensors(model).items():
        parameter.data = tensors[name].to(parameter)
    try:
        yield
    finally:
        for parameter, data in own.items():
            parameter.data = data


def lora_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the adapter's parameters under the names PEFT's files use."""
    return {
        _PEFT_PREFIX + name.replace(f".{_ADAPTER}.", ".").replace(f"{_MAGNITUDE}.weight", _MAGNITUDE): parameter
        for name, parameter in model.named_parameters()
        if "lora_" in name
    }


def save_lora(model: PreTrainedModel, config: LoraConfig, directory: Path, *, base_name: str) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors` into an existing directory."""
    save_file(on_host(lora_tensors(model)), directory / "adapter_model.safetensors", metadata={"format": "pt"})
    plain = {key: sorted(x) if isinstance(x, set) else x for key, x in config.to_dict().items()}
    plain["base_model_name_or_path"] = base_name
    plain["inference_mode"] = True
    if plain["target_parameters"]:
        plain["lora_dropout"] = 0.0  # of training only, and PEFT has none for layers named by their weights
    text = json.dumps(plain, indent=2, sort_keys=True)
    (directory / "adapter_config.json").write_text(text + "\n")


def load_lora(
    model: PreTrainedModel, config: LoraConfig, directory: Path, *, alpha_field: str = "train.lora.alpha"
) -> None:
    """Copy a saved adapter's weights into the adapter inside `model`. Raises as `read_lora`."""
    have = read_lora(model, config, directory, alpha_field=alpha_field)
    with torch.no_grad():
        for name, parameter in lora_tensors(model).items():
            parameter.copy_(have[name])


def read_lora(
    model: PreTrainedModel, config: LoraConfig, directory: Path, *, alpha_field: str = "train.lora.alpha"
) -> dict[str, Tensor]:
    """Return a saved adapter's weights, for the adapter inside `model`. `alpha_field` is what the caller's
    configuration calls alpha, for the error.

    Raises:
        AdapterError: the files cannot be read, or are not of this adapter (other rank, alpha, targets or base model).
    """
    try:
        have = load_file(directory / "adapter_model.safetensors")
        saved = json.loads((directory / "adapter_config.json").read_text())
    except (OSError, ValueError, SafetensorError) as error:
        raise AdapterError(f"the adapter in {directory} cannot be read: {error}") from error
    for key in ("use_rslora", "use_dora"):
        if bool(saved.get(key)) != getattr(config, key):
            raise AdapterError(
                f"the adapter in {directory} has {key} {bool(saved.get(key))}; training is to use "
                f"{getattr(config, key)}",
                hint=f"set {alpha_field.rpartition('.')[0] or 'lora'}.{key} to the adapter's",
            )
    if saved.get("lora_alpha") != config.lora_alpha:
        raise AdapterError(
            f"the adapter in {directory} has alpha {saved.get('lora_alpha')}; training is to use {config.lora_alpha}",
            hint=f"set {alpha_field} to the adapter's, {saved.get('lora_alpha')}",
            field=alpha_field,
        )
    want = lora_tensors(model)
    wrong = sorted(have.keys() ^ want.keys()) or [n for n in want if have[n].shape != want[n].shape]
    if wrong:
        raise AdapterError(
            f"the adapter in {directory} does not fit: {len(wrong)} of {len(want)} tensors differ, first {wrong[0]}",
            hint="train with the rank and the targets that the adapter has, on the same base model",
        )
    check_config(saved)
    rows = {name.removeprefix(_PEFT_PREFIX).removesuffix(_A): len(want[name]) for name in want if name.endswith(_A)}
    found = adapted(saved, rows)
    ours = ExpertTargets(config.to_dict())
    if swapped := next((key for key, each in found.items() if each.name != ours.name(key)), None):
        raise AdapterError(
            f"the adapter in {directory} has {found[swapped].name} where training has {ours.name(swapped)}",
            hint="train with the targets that the adapter has",
        )
    if {each.scale for each in found.values()} != {
        config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)
    }:
        raise AdapterError(
            f"the adapter in {directory} has an alpha_pattern, and training scales every module alike",
            hint="start a fresh adapter, or fold the scales into lora_B",
        )
    return have


# -- the fused product -------------------------------------------------------------------------------------------------


def project_with_lora(modules: Sequence[nn.Module], x: Tensor) -> Tensor:
    """`backbone.Project` for training: base and adapter products into one tensor, without one between them.

    What this does not cover (dropout, DoRA, autocast) runs as PEFT has it.
    """
    terms = [term_of(module, x) for module in modules]
    if any(term is None for term in terms) or torch.is_autocast_enabled(x.device.type):
        return project_plainly(modules, x)
    known = [term for term in terms if term is not None]
    flat = [tensor for term in known for tensor in (term.a, term.b)]
    return _Projection.apply(x, known, *flat)  # type: ignore[return-value]


class Term(NamedTuple):
    """A linear module: W and b of `base`, and s B A where an adapter acts."""

    base: nn.Linear | QuantizedLinear
    bias: Tensor | None
    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 0.0


def term_of(module: Any, x: Tensor) -> Term | None:
    """Return what a linear module multiplies `x` with; None: it is not that simple."""
    base = getattr(module, "base_layer", module)
    if type(base) is nn.Linear:
        if base.weight.dtype != x.dtype or base.weight.requires_grad:
            return None
    elif not isinstance(base, QuantizedLinear):
        return None
    if base.bias is not None and base.bias.dtype != x.dtype:
        return None
    if module is base or module.disable_adapters:
        return Term(base, base.bias)
    if type(module) is not LoraLinear or list(module.active_adapters) != [_ADAPTER] or module.merged:
        return None
    a: Any = module.lora_A[_ADAPTER].weight
    b: Any = module.lora_B[_ADAPTER].weight
    fits = a.dtype == x.dtype or (a.dtype == torch.float32 and x.dtype in (torch.bfloat16, torch.float16))
    if not fits or module.lora_magnitude_vector or not isinstance(module.lora_dropout[_ADAPTER], nn.Identity):
        return None
    return Term(base, base.bias, a, b, float(module.scaling[_ADAPTER]))


def _matrix(base: nn.Linear | QuantizedLinear, dtype: torch.dtype) -> Tensor:
    """Return W [out, in]; for a quantised layer a new tensor."""
    return base.dequantized(dtype) if isinstance(base, QuantizedLinear) else base.weight


class _Projection(torch.autograd.Function):
    """y_i = x W_i^T + s_i (x A_i^T) B_i^T for modules i with the same input, side by side (`multiply_terms`).

    Backward keeps x and the x A_i^T, which are side by side too; all gradients of x are added up by the products
    themselves. The frozen W_i stay where they are, in the modules.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, terms: list[Term], *flat: Tensor | None) -> Tensor:
        y = x.new_empty(x.shape[0], widths_of(terms))
        z, A = multiply_terms(x, terms, y)
        ctx.save_for_backward(x, z, A, *(term.b for term in terms))
        ctx.terms = [term._replace(bias=None, a=None, b=None) for term in terms]
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        x, z, A, *every_b = ctx.saved_tensors
        terms = [term._replace(b=b) for term, b in zip(ctx.terms, every_b, strict=True)]
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        pairs = differentiate_terms(grads[0], x, z, A, terms, grad_x)
        return grad_x, None, *(gradient for pair in pairs for gradient in pair)


def widths_of(terms: Sequence[Term]) -> int:
    """Return the sum of the outputs of modules that stand side by side."""
    return sum(term.base.out_features for term in terms)


def multiply_terms(x: Tensor, terms: Sequence[Term], y: Tensor) -> tuple[Tensor, Tensor]:
    """Write the outputs for `x` [S, in] side by side into `y`; return the x A_i^T, side by side, and the A_i, one above
    the other.

    Where W and x have 16 bits, the adapter's products are of float32, in which A and B are, and sums of both are
    rounded once; x is kept in its 16 bits. On a GPU (`adapter_dtype`) their factors are rounded to bfloat16 with it,
    and gradients of A and B are sums in float32.
    """
    every_a = [term.a for term in terms if term.a is not None]
    A = every_a[0] if len(every_a) == 1 else torch.cat(every_a) if every_a else x.new_empty(0, x.shape[1])
    beside = adapter_dtype(x.device, x.dtype)
    A = A.to(beside)
    z = x.to(beside) @ A.T
    for out, mine, term in zip(y.split(_widths(terms), -1), z.split(_ranks(terms), -1), terms, strict=True):
        w = _matrix(term.base, x.dtype)
        torch.mm(x, w.T, out=out) if term.bias is None else torch.addmm(term.bias, x, w.T, out=out)
        if term.b is not None:
            _add_product(out, mine, term.b.T.to(beside), term.scale)
        del w  # a quantised layer's, before the next one's is made
    return z, A


def differentiate_terms(
    grad_y: Tensor, x: Tensor, z: Tensor, A: Tensor, terms: Sequence[Term], grad_x: Tensor | None
) -> list[tuple[Tensor | None, Tensor | None]]:
    """Return the gradients of A and B of each term, and write that of `x` into `grad_x`, where it is wanted; `z` and
    `A` are what `multiply_terms` returned."""
    ranks, grad_z = _ranks(terms), torch.empty_like(z)
    grad_b: list[Tensor | None] = []
    lines = zip(grad_y.split(_widths(terms), -1), z.split(ranks, -1), grad_z.split(ranks, -1), terms, strict=True)
    for i, (grad, mine, out, term) in enumerate(lines):
        if grad_x is not None:
            w = _matrix(term.base, x.dtype)
            torch.mm(grad, w, out=grad_x) if i == 0 else grad_x.addmm_(grad, w)
            del w
        if term.b is None:
            grad_b.append(None)
            continue
        beside, b = grad.to(A.dtype), term.b.to(A.dtype)
        narrow = b.shape[1] < NARROW and not b.is_cuda  # gpu-aware
        torch.mm(beside, b.T.contiguous().T if narrow else b, out=out).mul_(term.scale)
        grad_b.append(product(mine.T, beside).mul_(term.scale).T.contiguous())
        del beside  # before the next one's is made
    if grad_x is not None and A.shape[0]:
        _add_product(grad_x, grad_z, A)
    grad_a = product(grad_z.T, x.to(A.dtype)).split(ranks)
    return [(None if b is None else a, b) for a, b in zip(grad_a, grad_b, strict=True)]


def _widths(terms: Sequence[Term]) -> list[int]:
    return [term.base.out_features for term in terms]


def _ranks(terms: Sequence[Term]) -> list[int]:
    """Return what `z` has of each term: the rank, and nothing where no adapter acts."""
    return [0 if term.b is None else term.b.shape[1] for term in terms]


def _add_product(out: Tensor, left: Tensor, right: Tensor, scale: float = 1.0) -> None:
    """out += scale left right, in the type of the two; an `out` of fewer bits is rounded once."""
    if out.dtype == left.dtype:
        out.addmm_(left, right, alpha=scale)
    else:
        out.copy_((left @ right).mul_(scale).add_(out))
