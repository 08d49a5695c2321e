"""A trained policy as a whole model: base and adapter merged, for what loads no adapters.

    export_model(policy, dest, format="merged")     a directory as transformers saves it, which vLLM and others load
    export_model(policy, dest, format="gguf")       one file, for llama.cpp, Ollama, LM Studio (`store.gguf`)

The base is loaded, checked to be the one that was trained on, and W + s B A put in the place of W, by PEFT, in float32
(or bfloat16, where the files of the base and the exported model are). A base that was in 4 or 8 bits is quantised,
dequantised and merged into: that is what the adapter was trained over. Merged into the original weights it is another
policy.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import PreTrainedModel

from groupwise.errors import AdapterError, ModelError
from groupwise.model.image_tokens import vision_of
from groupwise.model.load import LoadedModel, load_config, load_model, weights_hash
from groupwise.model.quantized import dequantize
from groupwise.store import dtypes, files
from groupwise.store.gguf import check_gguf, write_gguf
from groupwise.store.locate import Located, TrainedPolicy

MERGED, GGUF = "merged", "gguf"


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Result of an export: its `path`, its `dtype`, and a `note` for the user where there is something to know."""

    path: Path
    dtype: str
    note: str | None


def export_model(policy: TrainedPolicy, dest: Path, *, format: str, dtype: str = "auto") -> Exported:
    """Write the policy as a whole model to `dest`, which must not exist (a directory may be empty); all or nothing.

    Args:
        policy: the policy's base model, and its adapter, if it has one.
        format: `merged` or `gguf`.
        dtype: `float32`, `bfloat16`, `float16`, with gguf also `q8_0`; `auto` is the type of the base model's files.

    Raises:
        ModelError: the base cannot be loaded, or its family not be written so.
        AdapterError: the adapter is of another base, or there is something at `dest`.
        StorageError: it cannot be written.
    """
    if dest.exists() and (format == GGUF or not dest.is_dir() or any(dest.iterdir())):
        raise AdapterError(f"{dest} exists already", hint="give a directory, or with gguf a file, that is new")
    config = load_config(policy.model)
    saved = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    chosen = saved if dtype == "auto" else dtype
    allowed = dtypes.BY_FORMAT[format]
    if chosen not in allowed:
        raise ModelError(f"a {format} model cannot be of type {chosen!r}", hint=f"use one of {', '.join(allowed)}")
    if format == GGUF:
        check_gguf((config.architectures or ["?"])[0], chosen)
    base = merged_model(policy, dtype="bfloat16" if chosen == saved == "bfloat16" else "float32")
    if format == GGUF:
        write_gguf(base, dest, dtype=chosen)
    else:
        _save(base, dest, getattr(torch, chosen))
    return Exported(path=dest, dtype=chosen, note=_note(policy))


def merged_model(policy: TrainedPolicy, *, dtype: str) -> LoadedModel:
    """Return the policy as one model on the CPU, without an adapter and nothing quantised."""
    base = load_model(policy.model, device="cpu", dtype=dtype, quantization=policy.quantization)
    if policy.adapter is not None:
        _check_base(policy.adapter, base)
    dequantize(base.model, base.model.dtype)
    if policy.adapter is None:
        return base
    with policy.adapter.held():
        files.check_adapter(policy.adapter.directory)
        adapted = peft.PeftModel.from_pretrained(base.model, str(policy.adapter.directory))
        merged: Any = adapted.merge_and_unload(safe_merge=True)
    model: PreTrainedModel = merged
    return LoadedModel(name=base.name, model=model, tokenizer=base.tokenizer, hash=weights_hash(model))


class AdapterMerge:
    """Merges adapters into one base, each into a copy of it: what an engine reads that serves no adapters.

    Args:
        base: a separate model on the CPU, which this keeps. Quantised layers are dequantised.
    """

    def __init__(self, base: LoadedModel):
        self._model: Any = base.model
        dequantize(self._model, self._model.dtype)

    def __call__(self, adapter: Path | None) -> PreTrainedModel:
        """Return the base with the adapter in this directory, in PEFT's layout, merged into it; None is the base
        itself, only to be read. Raises AdapterError."""
        if adapter is None:
            return self._model
        files.check_adapter(adapter)
        adapted: Any = peft.PeftModel.from_pretrained(copy.deepcopy(self._model), str(adapter))
        return adapted.merge_and_unload()


def _check_base(adapter: Located, base: LoadedModel) -> None:
    """Raise AdapterError unless the base is that of the adapter, in the type it was trained over or in this one."""
    rounded = ""
    if adapter.base_hash not in (None, base.hash) and base.model.dtype == torch.float32 and not base.quantization:
        rounded = weights_hash(copy.deepcopy(base.model).to(torch.bfloat16))  # pyright: ignore[reportArgumentType]
    if adapter.base_hash != rounded:
        adapter.check_base(base.hash)


def _save(base: LoadedModel, dest: Path, dtype: torch.dtype) -> None:
    """Save weights, configuration, tokenizer with chat template, and a generation config with the ids that end a
    reply."""
    model: Any = base.model.to(dtype)  # pyright: ignore[reportArgumentType]
    model.config.use_cache, model.config.dtype = True, dtype
    if model.generation_config is not None:
        model.generation_config.eos_token_id = list(base.eos_ids)
    with files.writing(f"writing the merged model {dest}"), files.filling(dest) as staged:
        model.save_pretrained(staged)
        base.tokenizer.save_pretrained(staged)
        if (vision := vision_of(base.model)) is not None:
            vision.save(staged)


def _note(policy: TrainedPolicy) -> str | None:
    if policy.quantization is None:
        return None
    return (
        f"the base was trained over in {policy.quantization}: the adapter is merged into the dequantised weights, "
        f"which are not those of {policy.model}"
    )
