"""Tiny random models of images and text, saved as their families save them and loaded as any model is."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedTokenizerBase

from groupwise.model.load import LoadedModel, load_model
from tiny_tokenizer import starter_tokenizer

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
}
SIGLIP = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 32}
QWEN3_TOWER = {
    **TOWER,
    "depth": 3,
    "patch_size": 16,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
}
QWEN3_5_TOWER = {name: value for name, value in QWEN3_TOWER.items() if name != "deepstack_visual_indexes"}
QWEN_IMAGES = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 784, "max_pixels": 12544}
GEMMA4 = ("<|image|>", "<|image>", "<image|>", "<|video|>", "<|audio|>")
GEMMA4_NAMED = {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"}
GEMMA4_TOWER = {
    **SIGLIP,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "patch_size": 6,
    "pooling_kernel_size": 2,
    "position_embedding_size": 64,
}
GEMMA4_IMAGES = {
    "image_processor_type": "Gemma4ImageProcessor",
    "patch_size": 6,
    "pooling_kernel_size": 2,
    "max_soft_tokens": 70,
}
GEMMA4_EARS = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "subsampling_conv_channels": [4, 4]}
GLM = ("<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|video|>", "<|begin_of_video|>", "<|end_of_video|>")
GLM_TOWER = {**TOWER, "depth": 2, "patch_size": 14, "image_size": 112}
GLM_IMAGES = {
    "image_processor_type": "Glm4vImageProcessor",
    "size": {"shortest_edge": 784, "longest_edge": 12544},
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}


QWEN3_5 = {
    **TEXT,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {
        **ROPE,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
        "partial_rotary_factor": 0.5,
    },
}


@dataclass(frozen=True)
class Seeing:
    """A family: `name` of its models, `kind` of its configuration, the tokens that stand for images, what is of its
    text decoder and tower, and its processor's files."""

    name: str
    kind: str
    placeholder: str  # as the chat template writes an image
    special: tuple[str, ...]
    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    image_processor: Mapping[str, Any]
    processor: Mapping[str, Any]
    tokens: Callable[[PreTrainedTokenizerBase], Mapping[str, Any]]
    more: Mapping[str, Any] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)  # tokens that the processor asks its tokenizer for


def _qwen(tokenizer: PreTrainedTokenizerBase) -> Mapping[str, Any]:
    names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    names |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}


def _gemma(tokenizer: PreTrainedTokenizerBase) -> Mapping[str, Any]:
    names = {"image_token_index": "<image_soft_token>"}
    names |= {"boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>"}
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}


def _glm(tokenizer: PreTrainedTokenizerBase) -> Mapping[str, Any]:
    names = {"image_token_id": "<|image|>", "video_token_id": "<|video|>"}
    names |= {"image_start_token_id": "<|begin_of_image|>", "image_end_token_id": "<|end_of_image|>"}
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}


def _one(name: str, token: str) -> Callable[[PreTrainedTokenizerBase], Mapping[str, Any]]:
    return lambda tokenizer: {name: tokenizer.convert_tokens_to_ids(token)}


def _gemma4(tokenizer: PreTrainedTokenizerBase) -> Mapping[str, Any]:
    names = {"image_token_id": "<|image|>", "video_token_id": "<|video|>", "audio_token_id": "<|audio|>"}
    names |= {"boi_token_id": "<|image>", "eoi_token_id": "<image|>"}
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}


QWEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SMOL = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
INTERN = ("<img>", "</img>", "<IMG_CONTEXT>", "<video>")
FAMILIES = {
    "qwen2_5_vl": Seeing(
        name="Qwen2.5-VL",
        kind="qwen2_5_vl",
        placeholder="<|vision_start|><|image_pad|><|vision_end|>",
        special=QWEN,
        text={**TEXT, "rope_parameters": ROPE},
        vision={**TOWER, "depth": 2, "patch_size": 14, "fullatt_block_indexes": [1], "window_size": 56},
        image_processor=QWEN_IMAGES,
        processor={"processor_class": "Qwen2_5_VLProcessor"},
        tokens=_qwen,
    ),
    "qwen2_vl": Seeing(
        name="Qwen2-VL",
        kind="qwen2_vl",
        placeholder="<|vision_start|><|image_pad|><|vision_end|>",
        special=QWEN,
        text={**TEXT, "rope_parameters": ROPE},
        vision={"embed_dim": 32, "hidden_size": 32, "num_heads": 4, "depth": 2, "patch_size": 14, "mlp_ratio": 2},
        image_processor=QWEN_IMAGES,
        processor={"processor_class": "Qwen2VLProcessor"},
        tokens=_qwen,
    ),
    "qwen3_vl": Seeing(
        name="Qwen3-VL",
        kind="qwen3_vl",
        placeholder="<|vision_start|><|image_pad|><|vision_end|>",
        special=QWEN,
        text={**TEXT, "head_dim": 8, "rope_parameters": {**ROPE, "mrope_interleaved": True}},
        vision=QWEN3_TOWER,
        image_processor={**QWEN_IMAGES, "patch_size": 16},
        processor={"processor_class": "Qwen3VLProcessor"},
        tokens=_qwen,
    ),
    "qwen3_vl_moe": Seeing(
        name="Qwen3-VL-MoE",
        kind="qwen3_vl_moe",
        placeholder="<|vision_start|><|image_pad|><|vision_end|>",
        special=QWEN,
        text={
            **TEXT,
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "rope_parameters": {**ROPE, "mrope_interleaved": True},
        },
        vision=QWEN3_TOWER,
        image_processor={**QWEN_IMAGES, "patch_size": 16},
        processor={"processor_class": "Qwen3VLProcessor"},
        tokens=_qwen,
    ),
    "qwen3_5": Seeing(
        name="Qwen3.5",
        kind="qwen3_5",
        placeholder="<|vision_start|><|image_pad|><|vision_end|>",
        special=QWEN,
        text=QWEN3_5,
        vision=QWEN3_5_TOWER,
        image_processor={**QWEN_IMAGES, "patch_size": 16},
        processor={"processor_class": "Qwen3VLProcessor"},
        tokens=_qwen,
    ),
    "qwen3_5_moe": Seeing(
        name="Qwen3.5-MoE",
        kind="qwen3_5_moe",
        placeholder="<|vision_start|><|image_pad|><|vision_end|>",
        special=QWEN,
        text={
            **QWEN3_5,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
        },
        vision=QWEN3_5_TOWER,
        image_processor={**QWEN_IMAGES, "patch_size": 16},
        processor={"processor_class": "Qwen3VLProcessor"},
        tokens=_qwen,
    ),
    "glm4v": Seeing(
        name="GLM-4.1V",
        kind="glm4v",
        placeholder="<|begin_of_image|><|image|><|end_of_image|>",
        special=GLM,
        text={**TEXT, "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0}},
        vision=GLM_TOWER,
        image_processor=GLM_IMAGES,
        processor={"processor_class": "Glm4vProcessor"},
        tokens=_glm,
    ),
    "glm46v": Seeing(
        name="GLM-4.6V-Flash",
        kind="glm46v",
        placeholder="<|begin_of_image|><|image|><|end_of_image|>",
        special=GLM,
        text={**TEXT, "model_type": "glm4v_text", "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0}},
        vision={**GLM_TOWER, "model_type": "glm4v_vision"},
        image_processor={**GLM_IMAGES, "image_processor_type": "Glm46VImageProcessor"},
        processor={"processor_class": "Glm46VProcessor"},
        tokens=_glm,
    ),
    "glm4v_moe": Seeing(
        name="GLM-4.5V, GLM-4.6V",
        kind="glm4v_moe",
        placeholder="<|begin_of_image|><|image|><|end_of_image|>",
        special=GLM,
        text={
            **TEXT,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0},
        },
        vision=GLM_TOWER,
        image_processor=GLM_IMAGES,
        processor={"processor_class": "Glm4vProcessor"},
        tokens=_glm,
    ),
    "gemma3": Seeing(
        name="Gemma 3",
        kind="gemma3",
        placeholder="<start_of_image>",
        special=("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
        text={
            **TEXT,
            "head_dim": 8,
            "query_pre_attn_scalar": 6,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        vision={**SIGLIP, "image_size": 56, "patch_size": 7},
        image_processor={"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 56, "width": 56}},
        processor={"processor_class": "Gemma3Processor", "image_seq_length": 16},
        tokens=_gemma,
        more={"mm_tokens_per_image": 16},
        named={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
    ),
    "gemma4": Seeing(
        name="Gemma 4: 26B, 31B",
        kind="gemma4",
        placeholder="<|image|>",
        special=GEMMA4,
        text={
            **TEXT,
            "head_dim": 8,
            "global_head_dim": 16,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "use_bidirectional_attention": "vision",
            "final_logit_softcapping": 30.0,
            "pad_token_id": 0,
        },
        vision=GEMMA4_TOWER,
        image_processor=GEMMA4_IMAGES,
        processor={"processor_class": "Gemma4Processor"},
        tokens=_gemma4,
        named=GEMMA4_NAMED,
    ),
    "gemma4_e": Seeing(  # E2B and E4B: embeddings for each layer, keys and values of earlier layers, causal throughout
        name="Gemma 4: E2B, E4B",
        kind="gemma4",
        placeholder="<|image|>",
        special=GEMMA4,
        text={
            **TEXT,
            "num_hidden_layers": 4,
            "head_dim": 8,
            "global_head_dim": 8,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 300,
            "pad_token_id": 0,
        },
        vision={**GEMMA4_TOWER, "use_clipped_linears": True, "standardize": True},
        image_processor=GEMMA4_IMAGES,
        processor={"processor_class": "Gemma4Processor"},
        tokens=_gemma4,
        named=GEMMA4_NAMED,
        more={"audio_config": GEMMA4_EARS},
    ),
    "smolvlm": Seeing(
        name="SmolVLM",
        kind="smolvlm",
        placeholder="<image>",
        special=SMOL,
        text={**TEXT, "model_type": "llama"},
        vision={**SIGLIP, "image_size": 28, "patch_size": 7},
        image_processor={
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": 56},
            "max_image_size": {"longest_edge": 28},
        },
        processor={"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
        tokens=_one("image_token_id", "<image>"),
        more={"scale_factor": 2},
    ),
    "idefics3": Seeing(
        name="Idefics3",
        kind="idefics3",
        placeholder="<image>",
        special=SMOL,
        text={**TEXT, "model_type": "llama"},
        vision={**SIGLIP, "image_size": 28, "patch_size": 7},
        image_processor={
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": 56},
            "max_image_size": {"longest_edge": 28},
        },
        processor={"processor_class": "Idefics3Processor", "image_seq_len": 4},
        tokens=_one("image_token_id", "<image>"),
        more={"scale_factor": 2},
    ),
    "llava": Seeing(
        name="LLaVA 1.5",
        kind="llava",
        placeholder="<image>",
        special=("<image>",),
        text={**TEXT, "model_type": "llama"},
        vision={
            **SIGLIP,
            "model_type": "clip_vision_model",
            "image_size": 28,
            "patch_size": 14,
            "projection_dim": 32,
        },
        image_processor={
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 28},
            "crop_size": {"height": 28, "width": 28},
        },
        processor={
            "processor_class": "LlavaProcessor",
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        tokens=_one("image_token_index", "<image>"),
        more={"vision_feature_layer": -1},
    ),
    "llava_onevision": Seeing(
        name="LLaVA-OneVision",
        kind="llava_onevision",
        placeholder="<image>",
        special=("<image>", "<video>"),
        text={**TEXT, "model_type": "qwen2"},
        vision={**SIGLIP, "model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14},
        image_processor={
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "size": {"height": 28, "width": 28},
            "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
        },
        processor={
            "processor_class": "LlavaOnevisionProcessor",
            "num_image_tokens": 4,
            "vision_feature_select_strategy": "full",
        },
        tokens=_one("image_token_id", "<image>"),
        more={"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]], "vision_feature_select_strategy": "full"},
    ),
    "llava_next": Seeing(
        name="LLaVA-NeXT",
        kind="llava_next",
        placeholder="<image>",
        special=("<image>",),
        text={**TEXT, "model_type": "llama"},
        vision={**SIGLIP, "model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, "projection_dim": 32},
        image_processor={
            "image_processor_type": "LlavaNextImageProcessor",
            "size": {"shortest_edge": 28},
            "crop_size": {"height": 28, "width": 28},
            "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
        },
        processor={
            "processor_class": "LlavaNextProcessor",
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        tokens=_one("image_token_id", "<image>"),
        more={"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]], "vision_feature_layer": -1},
    ),
    "internvl": Seeing(
        name="InternVL",
        kind="internvl",
        placeholder="<IMG_CONTEXT>",
        special=INTERN,
        text={**TEXT, "model_type": "qwen2"},
        vision={**SIGLIP, "image_size": [28, 28], "patch_size": [7, 7]},
        image_processor={
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": 28, "width": 28},
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 3,
        },
        processor={"processor_class": "InternVLProcessor", "image_seq_length": 4},
        tokens=_one("image_token_id", "<IMG_CONTEXT>"),
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
}
WITH_TORCHVISION = {  # by which transformers prepares their images, and by nothing else
    "lfm2_vl": Seeing(
        name="LFM2-VL",
        kind="lfm2_vl",
        placeholder="<image>",
        special=("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
        text={**TEXT, "model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"], "block_ff_dim": 64},
        vision={**SIGLIP, "model_type": "siglip2_vision_model", "num_patches": 16, "patch_size": 7},
        image_processor={
            "image_processor_type": "Lfm2VlImageProcessor",
            "encoder_patch_size": 7,
            "tile_size": 28,
            "max_image_tokens": 16,
            "min_image_tokens": 4,
            "max_num_patches": 64,
        },
        processor={"processor_class": "Lfm2VlProcessor"},
        tokens=_one("image_token_id", "<image>"),
        more={"projector_hidden_size": 32},
    ),
}


def template(placeholder: str) -> str:
    """Return a chat template of the starter's form that writes images."""
    part = f"{{% if p.type == 'image' %}}{placeholder}{{% else %}}{{{{ p.text }}}}{{% endif %}}"
    content = (
        f"{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}{{% for p in m.content %}}{part}{{% endfor %}}"
    )
    turn = f"<|im_start|>{{{{ m.role }}}}\n{content}{{% endif %}}<|im_end|>\n"
    opening = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    return f"{{% for m in messages %}}{turn}{{% endfor %}}{opening}"


def save_seeing(name: str, folder: Path, *, seed: int = 0, text: Mapping[str, Any] | None = None) -> Path:
    """Save a model of a family into `folder`, with its tokenizer and the files of its processor; `text` are other sizes
    of its text decoder."""
    family, tokenizer = {**FAMILIES, **WITH_TORCHVISION}[name], copy.deepcopy(starter_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.special)})
    told = {**family.text, **(text or {}), "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    options = {"text_config": told, "vision_config": dict(family.vision), **family.tokens(tokenizer), **family.more}
    config = CONFIG_MAPPING[family.kind](**options)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.data.normal_(0.0, 1.5 * min(parameter.shape[-2:]) ** -0.5)
    model.save_pretrained(folder)
    tokenizer.chat_template = template(family.placeholder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(dict(family.image_processor)))
    (folder / "processor_config.json").write_text(json.dumps(dict(family.processor)))
    if family.named:
        told = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**told, "extra_special_tokens": dict(family.named)}))
    return folder


def load_seeing(name: str, folder: Path, *, dtype: str = "float64", seed: int = 0) -> LoadedModel:
    """Return a tiny random model of a family that sees."""
    return load_model(str(save_seeing(name, folder, seed=seed)), device="cpu", dtype=dtype)


def drawn(width: int, height: int, *, seed: int = 0) -> Image.Image:
    """Return a picture of which no two parts are alike."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)
