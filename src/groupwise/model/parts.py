"""Reads of a model what one process is to have of it: slices of the tensors in its safetensors files.

    open_parts    the model on torch's meta device, its buffers real, and which tensor of which file each parameter is
    fill          once the parameters are cut (DTensor): this process's part of each, read and put where it belongs

Nothing whole is in memory but one tensor at a time, and that only where transformers makes a parameter of several
tensors of the file. Of experts that lie in the file one by one a process reads those that are in its part.

What from_pretrained does with names (renamed, merged, tied) is taken from transformers, which here says for each tensor
of the files what becomes of it (`transformers.core_model_loading`); where that is not clear the model is not read in
parts, and `NotInParts` says why. Buffers are made by the model's own constructor, as those that no file has must be
(rotary frequencies), and read whole where a file has them.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from groupwise.config.hub import model_path, reading
from groupwise.errors import ModelError
from groupwise.model.chat import configure_chat
from groupwise.model.head import CAST_HEAD
from groupwise.model.load import (
    UNREADABLE,
    LoadedModel,
    ModelSettings,
    auto_class,
    not_loaded,
    resolve_dtype,
    wrap_model,
)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

COMPARED_AT_ONCE = 1 << 24  # values of two tensors that may be one

Region = tuple[slice, ...]


class NotInParts(Exception):
    """Says why a model can only be read whole."""


class Files:
    """The tensors of safetensors files, by name; opened once, mapped and not read."""

    def __init__(self, paths: Sequence[str]):
        self._opened = ExitStack()
        self._of: dict[str, Any] = {}
        for path in paths:
            file = self._opened.enter_context(safe_open(path, framework="pt"))
            self._of |= dict.fromkeys(file.keys(), file)

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *exception: object) -> None:
        self._opened.close()

    def names(self) -> list[str]:
        return sorted(self._of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._of[name].get_slice(name).get_shape())

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """Return a tensor, or a region of it, in the type of the file."""
        file = self._of[name]
        return file.get_slice(name)[region] if region else file.get_tensor(name)


@dataclass(frozen=True)
class Origin:
    """The conversion of tensors of the files to parameters: one is a parameter as it is, or `converter` (transformers')
    makes `targets` of all of them. `sources` are (the converter's pattern, name in the files)."""

    first: str
    sources: tuple[tuple[str, str], ...]
    targets: tuple[str, ...]
    converter: Any = None

    @property
    def by_expert(self) -> bool:
        """Return whether row e of the parameter is made of the e-th tensors alone: experts that are stacked."""
        if self.converter is None or len(self.targets) != 1:
            return False
        first, *rest = self.converter.operations
        stacked = type(first).__name__ == "MergeModulelist" and first.dim == 0
        return stacked and all(type(each).__name__ == "Concatenate" and each.dim != 0 for each in rest)

    def converted(self, model: PreTrainedModel, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the parameters that the converter makes of `tensors`, one for each of `sources`."""
        converter = copy.deepcopy(self.converter)
        for (pattern, name), tensor in zip(self.sources, tensors, strict=True):
            converter.add_tensor(self.first, name, pattern, tensor)
        made = converter.convert(self.first, model=model, config=model.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A model that can be read in parts. `base` has its tokenizer and its modules, on the meta device; `origins` say
    where each parameter is, `tied` the names of parameters that are one."""

    base: LoadedModel
    paths: tuple[str, ...]
    origins: tuple[Origin, ...] = field(repr=False)
    tied: Mapping[str, tuple[str, ...]] = field(repr=False)

    def with_hash(self, hash: str) -> LoadedModel:
        """Return the base, whose weights were found to have this fingerprint."""
        return replace(self.base, hash=hash)


def open_parts(config: ModelSettings, *, device: torch.device) -> Parts:
    """Return the model of a configuration, to be read in parts; `device` is that which it will be computed on.

    Raises:
        NotInParts: it has to be read whole.
        ModelError, ConfigError: as `model.load.load_configured`.
    """
    path, dtype = model_path(config.model), resolve_dtype(config.dtype, device)
    if config.quantization is not None:
        raise NotInParts(f"{config.quantization} weights are quantised while they are loaded")
    try:
        with reading(path):
            shape = AutoConfig.from_pretrained(path)
            _check_plain(shape)
            tokenizer = AutoTokenizer.from_pretrained(path)
            paths = _paths(path)
            model = bare_model(shape, dtype=dtype)
            _read_generation_config(model, path)
    except UNREADABLE as error:
        raise not_loaded("model", config.model, error) from error
    _check_types(model, dtype)
    with Files(paths) as files:
        origins, tied = _planned(model, files)
    setattr(model, CAST_HEAD, config.cast_lm_head)
    base = wrap_model(model, tokenizer, name=config.model, hash="")
    configure_chat(base.tokenizer, config.chat, folder=config.folder)
    return Parts(base=base, paths=tuple(paths), origins=tuple(origins), tied=tied)


def bare_model(config: PreTrainedConfig, *, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model whose parameters are on the meta device and whose buffers are what its constructor makes."""
    with _parameters_on_meta():
        model = auto_class(config).from_config(copy.deepcopy(config), dtype=dtype)
    model.tie_weights()
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Context manager: a parameter is put onto the meta device as its module takes it, so that of those that a
    constructor makes one at a time is anywhere, and not written."""
    own = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:  # one that is tied is there already, and stays one
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        own(module, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = own  # type: ignore[method-assign]


def _read_generation_config(model: PreTrainedModel, path: str) -> None:
    """Give the model the generation config that lies with it, which says what ends a reply."""
    if not model.can_generate():
        return
    try:
        model.generation_config = GenerationConfig.from_pretrained(path)
    except OSError:  # it has none, and what follows from the model's is what from_pretrained takes
        return


# -- what can be read in parts -----------------------------------------------------------------------------------------


def _check_plain(config: PreTrainedConfig) -> None:
    """Raise NotInParts for what only from_pretrained knows how to make."""
    if getattr(config, "quantization_config", None) is not None:
        raise NotInParts("its weights were saved quantised")
    if config.get_text_config() is not config and getattr(config, "vision_config", None) is not None:
        raise NotInParts("it sees, and its vision tower is computed with outside of the layers that are cut")
    if getattr(config, "transformers_weights", None) or getattr(type(config), "extra_files", None):
        raise NotInParts("its configuration names files of its own")


def _check_types(model: PreTrainedModel, dtype: torch.dtype) -> None:
    if dtype.itemsize == 2 and getattr(model, "_keep_in_fp32_modules_strict", None):
        raise NotInParts(f"{type(model).__name__} keeps some weights in float32 whatever the others are in")


def _paths(path: str) -> list[str]:
    """Return the safetensors files of a directory or of a name on the hub."""
    found = cached_file(path, SINGLE, _raise_exceptions_for_missing_entries=False)
    if found is not None:
        return [str(found)]
    index = cached_file(path, INDEX, _raise_exceptions_for_missing_entries=False)
    if index is None:
        raise NotInParts(f"it has no {SINGLE}, whole or in several files with an index")
    files: Any = get_checkpoint_shard_files(path, index)[0]
    return [str(file) for file in files]


def _planned(model: PreTrainedModel, files: Files) -> tuple[list[Origin], dict[str, tuple[str, ...]]]:
    """Return what becomes of the tensors of the files, and which parameters are one. Raises NotInParts."""
    wanted: dict[str, Tensor] = model.state_dict()
    try:
        origins = list(_origins(model, files, wanted))
    except (ImportError, AttributeError, TypeError, RuntimeError, ValueError) as error:
        raise NotInParts(
            f"what this version of transformers makes of its files is not clear ({type(error).__name__}: {error})"
        ) from error
    there = {name for origin in origins for name in origin.targets}
    tied: dict[str, tuple[str, ...]] = {}
    named = list(model.named_parameters(remove_duplicate=False))
    for name, parameter in named:
        names = tuple(other for other, each in named if each is parameter)
        tied |= {name: names} if len(names) > 1 else {}
        if not there & {*names}:
            raise NotInParts(f"its files lack {name}, which would be made up")
    read: list[Origin] = []
    for origin in origins:
        first = next((each for each in read if {*origin.targets} & {*tied.get(each.first, ())}), None)
        if first is None:
            read.append(origin)
        elif origin.converter or first.converter or not _same(files, first.sources[0][1], origin.sources[0][1]):
            raise NotInParts(f"{first.first} and {origin.first} should be one weight, and its files have two")
    return read, tied


def _origins(model: PreTrainedModel, files: Files, wanted: dict[str, Tensor]) -> Iterator[Origin]:
    """Yield what becomes of the tensors of the files, as `convert_and_load_state_dict_in_model` of transformers does
    it."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    if len(renamings) + len(converters) != len(mapping):
        raise TypeError("it has conversions of another kind")
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    prefix, found = model.base_model_prefix, dict[str, list[tuple[str, str]]]()
    made_by: dict[str, Any] = {}
    for name in sorted(files.names(), key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = rename_source_key(name, [], [], prefix, wanted)
        if target not in wanted:
            continue  # as from_pretrained leaves it out
        found.setdefault(target, []).append((pattern or "", name))
        if pattern is not None:
            made_by[target] = by_pattern[pattern]
    model._weight_conversions = [each for each in mapping if each.was_used()]  # type: ignore[assignment]  saving undoes them
    for target, sources in found.items():
        origin = Origin(target, tuple(sources), (target,), made_by.get(target))
        if origin.converter is not None:
            shapes = [torch.empty(files.shape(name), device="meta") for _, name in sources]
            made = {name: tuple(each.shape) for name, each in origin.converted(model, shapes).items()}
            origin = replace(origin, targets=tuple(made))
        elif len(sources) == 1:
            made = {target: files.shape(sources[0][1])}
        else:
            raise ValueError(f"{len(sources)} tensors are {target}")
        for name, shape in made.items():
            if name not in wanted or tuple(wanted[name].shape) != shape:
                raise ValueError(f"{name} has the shape {list(shape)} in its files")
        yield origin


def _same(files: Files, one: str, other: str) -> bool:
    """Return whether two tensors of the files are equal, looking at some rows at a time."""
    shape = files.shape(one)
    if shape != files.shape(other):
        return False
    rows = max(1, COMPARED_AT_ONCE // max(1, math.prod(shape[1:])))
    parts = [(slice(at, at + rows),) for at in range(0, shape[0], rows)]
    return all(torch.equal(files.read(one, part), files.read(other, part)) for part in parts)


# -- reading -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def fill(model: PreTrainedModel, parts: Parts, *, device: torch.device, parts_on: torch.device | None = None) -> None:
    """Read this process's part of every parameter of `model`, which is cut, and its buffers, onto `device`; parts onto
    `parts_on` (None: there, too).

    Raises:
        ModelError: a file cannot be read.
    """
    wanted: dict[str, Tensor] = model.state_dict()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    try:
        with Files(parts.paths) as files:
            for origin in parts.origins:
                regions = {name: _region(wanted[name]) for name in origin.targets}
                for name, tensor in _read(model, files, origin, regions):
                    if name not in parameters:
                        wanted[name].copy_(tensor)
                        continue
                    old: Any = parameters[name]
                    there = (parts_on or device) if isinstance(old, DTensor) else device
                    local = torch.empty(tensor.shape, dtype=old.dtype, device=there).copy_(tensor)
                    _put(model, parts.tied.get(name, (name,)), _like(old, local))
                    del tensor, local
    except UNREADABLE as error:
        raise not_loaded("model", parts.base.name, error) from error
    if left := [name for name, parameter in model.named_parameters() if parameter.is_meta]:
        raise ModelError(f"{parts.base.name!r} was read, and {left[0]} and {len(left) - 1} others were not")


def _read(
    model: PreTrainedModel, files: Files, origin: Origin, regions: Mapping[str, Region]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the regions of the parameters that an origin is of."""
    if origin.converter is None:
        region = regions[origin.first]
        yield origin.first, files.read(origin.sources[0][1], region)
        return
    if origin.by_expert and _only_rows(region := regions[origin.first], model.get_parameter(origin.first)):
        kept = _of_experts(origin, region[0])
        if kept.sources:
            yield from kept.converted(model, [files.read(name) for _, name in kept.sources]).items()
            return
        origin = _of_experts(origin, slice(0, 1))  # none is in this part, which has a shape all the same
        regions = {origin.first: (slice(0, 0),)}
    whole = origin.converted(model, [files.read(name) for _, name in origin.sources])
    for name in list(whole):
        yield name, whole.pop(name)[regions[name]]


def _only_rows(region: Region, of: Tensor) -> bool:
    """Return whether a region is some of the first dimension, and all of the others."""
    return region[1:] == tuple(slice(0, size) for size in of.shape[1:])


def _of_experts(origin: Origin, rows: slice) -> Origin:
    """Return what makes these rows of a parameter of experts."""
    seen: Counter[str] = Counter()
    kept: list[tuple[str, str]] = []
    for pattern, name in origin.sources:
        if rows.start <= seen[pattern] < rows.stop:
            kept.append((pattern, name))
        seen[pattern] += 1
    return replace(origin, sources=tuple(kept))


def _region(tensor: Tensor) -> Region:
    """Return which part of a tensor this process has: all of one that is not cut."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))


def _like(old: Any, local: Tensor) -> nn.Parameter:
    """Return a parameter like `old` whose part here is `local`."""
    value: Tensor = local
    if isinstance(old, DTensor):
        value = DTensor.from_local(
            local, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride()
        )
    return nn.Parameter(value, requires_grad=old.requires_grad)


def _put(model: nn.Module, names: Sequence[str], parameter: nn.Parameter) -> None:
    """Make it the parameter of these names."""
    for name in names:
        module, _, last = name.rpartition(".")
        setattr(model.get_submodule(module), last, parameter)
