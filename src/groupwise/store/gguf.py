"""A model as one GGUF file, which llama.cpp, Ollama and LM Studio read; by the `gguf` package (`groupwise[gguf]`).

    write_gguf(base, path, dtype="q8_0")      weights, hyperparameters, vocabulary with merges, chat template

Names of tensors and of metadata are the package's (`TensorNameMap`, `GGUFWriter`). This module does the rest of
llama.cpp's own converter, for the families of `ARCHITECTURES`: the keys that describe a model, the order of a Llama's
query and key rows (pairs of rotary features are neighbours there, halves in transformers), and a tokenizer's way of
splitting text into words. Vectors (norms, biases) are always float32.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from groupwise.errors import ModelError
from groupwise.model.load import LoadedModel
from groupwise.store import dtypes, files

ARCHITECTURES = {"LlamaForCausalLM": "LLAMA", "Qwen2ForCausalLM": "QWEN2", "Qwen3ForCausalLM": "QWEN3"}

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PRE_TOKENIZERS = {
    _WORDS % r"\p{N}": "qwen2",
    _WORDS % r"\p{N}{1,3}": "llama-bpe",
    None: "gpt-2",
}  # by their expression


def check_gguf(architecture: str, dtype: str) -> None:
    """Raise ModelError unless a model of this class can be written with matrices of this type."""
    if importlib.util.find_spec("gguf") is None:
        raise ModelError("GGUF needs the package gguf", hint="pip install 'groupwise[gguf]'")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{architecture} cannot be written as GGUF; these can: {', '.join(ARCHITECTURES)}",
            hint="export it merged, and convert that with llama.cpp's convert_hf_to_gguf.py",
        )
    if dtype not in dtypes.GGUF:
        raise ModelError(f"dtype {dtype!r} is none of GGUF's here", hint=f"use one of {', '.join(dtypes.GGUF)}")


def write_gguf(base: LoadedModel, path: Path, *, dtype: str) -> Path:
    """Write the model to `path`, whole or not at all; one tensor at a time is converted.

    Raises:
        ModelError: as `check_gguf`; or its tokenizer or its rotary positions have no name in GGUF.
        StorageError: it cannot be written.
    """
    import gguf  # pyright: ignore[reportMissingImports]

    architecture = type(base.model).__name__
    check_gguf(architecture, dtype)
    arch = gguf.MODEL_ARCH[ARCHITECTURES[architecture]]
    staged = path.with_name(f".{path.name}.part")
    with files.writing(f"writing {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            writer = gguf.GGUFWriter(staged, gguf.MODEL_ARCH_NAMES[arch])
            _describe(writer, base, dtype)
            _write_vocabulary(writer, base)
            _write_tensors(writer, base, arch, dtype)
            writer.close()
            files.fsync(staged)
            staged.rename(path)
        finally:
            staged.unlink(missing_ok=True)
    return path


# -- metadata ----------------------------------------------------------------------------------------------------------


def _describe(writer: Any, base: LoadedModel, dtype: str) -> None:
    """Write the keys from which llama.cpp builds the model."""
    import gguf  # pyright: ignore[reportMissingImports]

    config: Any = base.model.config.get_text_config()
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = {"float32": "ALL_F32", "float16": "MOSTLY_F16", "bfloat16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
    writer.add_name(Path(base.name).name)
    writer.add_file_type(gguf.LlamaFileType[kinds[dtype]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(base.vocabulary)
    writer.add_rope_dimension_count(head)
    rope: Mapping[str, Any] = config.rope_parameters
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType[kind.upper()])
        writer.add_rope_scaling_factor(float(rope["factor"]))
        if kind == "yarn":
            trained = rope.get("original_max_position_embeddings") or config.max_position_embeddings
            writer.add_rope_scaling_orig_ctx_len(int(trained))
    elif kind not in ("default", "llama3"):
        raise ModelError(f"rotary positions of type {kind!r} have no place in GGUF here", hint="export it merged")


def _write_vocabulary(writer: Any, base: LoadedModel) -> None:
    """Write the tokens with their types, merges, special ids and the chat template of a byte-level BPE."""
    import gguf  # pyright: ignore[reportMissingImports]

    with TemporaryDirectory() as folder:
        base.tokenizer.save_pretrained(folder)
        described = json.loads(Path(folder, "tokenizer.json").read_text(encoding="utf-8"))
        special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=base.vocabulary)
    kind = gguf.TokenType
    tokens, types = [f"[PAD{i}]" for i in range(base.vocabulary)], [kind.UNUSED] * base.vocabulary
    for text, number in described["model"]["vocab"].items():
        tokens[number], types[number] = text, kind.NORMAL
    for added in described["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = kind.CONTROL if added["special"] else kind.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(described, base.name))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    special.special_token_ids.setdefault("eos", base.eos_ids[0])
    special.add_special_token.setdefault(
        "bos", bool(base.tokenizer("a").input_ids[:1] == [base.tokenizer.bos_token_id])
    )
    special.add_to_gguf(writer, quiet=True)


def _pre_tokenizer(described: Mapping[str, Any], name: str) -> str:
    """llama.cpp's name of how this tokenizer splits text before it merges. Raises ModelError if it has none."""
    steps = described.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    kinds = [step.get("type") for step in steps]
    patterns = [step["pattern"].get("Regex") for step in steps if step.get("type") == "Split"]
    pattern = patterns[0] if patterns else None
    is_bytes = described["model"]["type"] == "BPE" and kinds[-1:] == ["ByteLevel"] and len(kinds) == len(patterns) + 1
    if not is_bytes or len(patterns) > 1 or pattern not in _PRE_TOKENIZERS:
        raise ModelError(
            f"the tokenizer of {name!r} splits text in a way that has no name in GGUF here; these have: byte-level BPE "
            f"as {', '.join(_PRE_TOKENIZERS.values())} have it",
            hint="export it merged, and convert that with llama.cpp's convert_hf_to_gguf.py",
        )
    return _PRE_TOKENIZERS[pattern]


# -- tensors -----------------------------------------------------------------------------------------------------------


def _write_tensors(writer: Any, base: LoadedModel, arch: Any, dtype: str) -> None:
    import gguf  # pyright: ignore[reportMissingImports]

    kinds = [(name, _kind(tensor.shape, dtype)) for name, tensor in _tensors(base, arch)]
    for (name, tensor), (_, kind) in zip(_tensors(base, arch), kinds, strict=True):
        shape, quantised = (
            tuple(tensor.shape),
            kind not in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16),
        )
        shape = gguf.quant_shape_to_byte_shape(shape, kind) if quantised else shape
        stored = np.uint8 if quantised else np.float32 if kind == gguf.GGMLQuantizationType.F32 else np.float16
        count = math.prod(shape) * np.dtype(stored).itemsize
        writer.add_tensor_info(name, shape, np.dtype(stored), count, raw_dtype=kind if quantised else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for (_, tensor), (_, kind) in zip(_tensors(base, arch), kinds, strict=True):
        values = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
        writer.write_tensor_data(gguf.quants.quantize(values, kind))


def _kind(shape: torch.Size, dtype: str) -> Any:
    """Return the type in which a tensor is written: vectors in float32, rows that are not whole blocks in float16
    instead of q8_0."""
    import gguf  # pyright: ignore[reportMissingImports]

    kinds = gguf.GGMLQuantizationType
    if len(shape) == 1:
        return kinds.F32
    whole = shape[-1] % gguf.GGML_QUANT_SIZES[kinds.Q8_0][0] == 0
    return kinds[dtypes.GGUF[dtype]] if dtype != "q8_0" or whole else kinds.F16


def _tensors(base: LoadedModel, arch: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter's name in GGUF and its stored tensor; an LM head that is tied to the embeddings comes
    once."""
    import gguf  # pyright: ignore[reportMissingImports]

    config: Any = base.model.config.get_text_config()
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    if (factors := _long_factors(base)) is not None:
        yield "rope_freqs.weight", factors
    for name, tensor in base.model.named_parameters():
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if known is None:
            raise ModelError(f"{name} of {base.name!r} has no name in GGUF", hint="export it merged")
        module = name.split(".")[-2]
        yield known, _neighbours(tensor, heads[module]) if arch == gguf.MODEL_ARCH.LLAMA and module in heads else tensor


def _neighbours(rows: Tensor, heads: int) -> Tensor:
    """Return the rows of a query or key projection [heads * D, ...] reordered: in each head, feature i is followed by
    feature i + D/2, with which it rotates."""
    halves = rows.detach().reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _long_factors(base: LoadedModel) -> Tensor | None:
    """Llama 3.1's rotary frequencies as what the plain ones are divided by [D/2]; None for any other's."""
    config: Any = base.model.config.get_text_config()
    if config.rope_parameters.get("rope_type") != "llama3":
        return None
    rotary: Any = next(module for module in base.model.modules() if hasattr(module, "inv_freq"))
    scaled: Tensor = rotary.inv_freq.double()
    plain = float(config.rope_parameters["rope_theta"]) ** -(torch.arange(len(scaled)).double() / len(scaled))
    return (plain.to(scaled.device) / scaled).float()
