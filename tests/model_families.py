"""Tiny configurations of the model families that transformers has: what they are called, and the options that make
each the kind of model that its published ones are (windows, experts, recurrent layers), of two layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

WINDOW = 4  # tokens of every sliding window and chunk: fewer than any sequence in the tests
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {  # multi-head latent attention
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
SHARED_EXPERTS = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
DEEPSEEK = {**SHARED_EXPERTS, "q_lora_rank": 16, **LATENT}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}


@dataclass(frozen=True)
class Family:
    """`name` is what people call its models; `kind` is transformers' `model_type`; `options` are of its configuration.

    `rounding` bounds, in nats, how far float32 may take the sampler's log-probabilities from the trainer's: the one
    computes a recurrence token by token, the other in chunks.
    """

    name: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    rounding: float = 1e-4


def _families(*given: Family) -> dict[str, Family]:
    return {family.kind.removesuffix("_text") if "gemma" in family.kind else family.kind: family for family in given}


FAMILIES: dict[str, Family] = _families(
    # dense
    Family("Qwen2, Qwen2.5", "qwen2"),
    Family("Qwen3", "qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    Family("Llama 2, 3", "llama", {"head_dim": 8, "tie_word_embeddings": False, "attention_bias": True}),
    Family("Mistral 7B", "mistral", {"head_dim": 8}),
    Family("Ministral 3", "ministral3", {"head_dim": 8}),
    Family("Gemma", "gemma", {"head_dim": 8}),
    Family(
        "Gemma 2",
        "gemma2",
        {
            "head_dim": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 6,
            **SLIDING,
        },
    ),
    Family("Gemma 3", "gemma3_text", {"head_dim": 8, "query_pre_attn_scalar": 6, **SLIDING}),
    Family(
        "Gemma 4",
        "gemma4_text",
        {"head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 280}
        | SLIDING,
    ),
    Family("OLMo 2", "olmo2"),
    Family("OLMo 3", "olmo3", SLIDING),
    Family("SmolLM3", "smollm3", {"no_rope_layers": [1, 0]}),
    Family("Phi-3, Phi-4", "phi3"),
    Family("Cohere 2 (Command R7B, A)", "cohere2", {"head_dim": 8, **SLIDING}),
    Family("Granite 3", "granite"),
    Family("GLM-4", "glm4", {"head_dim": 8}),
    Family("EXAONE 4", "exaone4", SLIDING),
    Family("ERNIE 4.5", "ernie4_5", {"head_dim": 8}),
    Family("Hunyuan (dense)", "hunyuan_v1_dense", {"head_dim": 8}),
    Family("Seed-OSS", "seed_oss", {"head_dim": 8}),
    Family("Apertus", "apertus"),
    Family("StarCoder 2", "starcoder2"),
    Family("Pythia (GPT-NeoX)", "gpt_neox"),
    Family("GPT-2", "gpt2", {"n_inner": 48}),
    # mixtures of experts
    Family(
        "Qwen1.5-MoE, Qwen2-MoE",
        "qwen2_moe",
        {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 24, **EXPERTS},
    ),
    Family("Qwen3-MoE", "qwen3_moe", {"head_dim": 8, "moe_intermediate_size": 16, **EXPERTS}),
    Family("Mixtral", "mixtral", LOCAL_EXPERTS),
    Family("OLMoE", "olmoe", EXPERTS),
    Family("MiniMax-M2", "minimax_m2", {"head_dim": 8, "rotary_dim": 8, **LOCAL_EXPERTS}),
    Family(
        "GLM-4.5 (MoE)",
        "glm4_moe",
        {"head_dim": 8, **SHARED_EXPERTS},
    ),
    Family(
        "gpt-oss",
        "gpt_oss",
        {"head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, **LOCAL_EXPERTS, **SLIDING},
    ),
    Family(
        "Llama 4",
        "llama4_text",
        {
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
            "moe_layers": [],
        },
    ),
    # latent attention
    Family(
        "DeepSeek-V2",
        "deepseek_v2",
        {**DEEPSEEK, "head_dim": 8},
    ),
    Family(
        "DeepSeek-V3, R1, Kimi-K2",
        "deepseek_v3",
        DEEPSEEK,
    ),
    # hybrids and state-space models
    Family(
        "Qwen3-Next",
        "qwen3_next",
        {
            "head_dim": 8,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            **EXPERTS,
            **DELTA_NET,
        },
    ),
    Family("Qwen3.5", "qwen3_5_text", {"head_dim": 8, **DELTA_NET}),
    Family(
        "Qwen3.5-MoE",
        "qwen3_5_moe_text",
        {
            "head_dim": 8,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            **EXPERTS,
            **DELTA_NET,
        },
    ),
    Family(
        "LFM2-MoE",
        "lfm2_moe",
        {
            "layer_types": ["conv", "full_attention"],
            "conv_L_cache": 3,
            "num_dense_layers": 1,
            "moe_intermediate_size": 16,
            **EXPERTS,
        },
    ),
    Family("LFM2", "lfm2", {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_multiple_of": 8}),
    Family("Falcon-H1", "falcon_h1", {**MAMBA2, "mamba_d_ssm": 32, "mamba_n_heads": 4}),
    Family(
        "Granite 4 (hybrid)",
        "granitemoehybrid",
        {
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 48,
            **MAMBA2,
        },
    ),
    Family("Bamba", "bamba", {"attn_layer_indices": [1], **MAMBA2}),
    Family(
        "Nemotron-H",
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "attention", "moe"],
            "num_hidden_layers": 3,
            "head_dim": 8,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    Family(
        "Jamba",
        "jamba",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
            **EXPERTS,
        },
    ),
    Family("Mamba", "mamba", {"state_size": 4}),
    Family("Mamba 2", "mamba2", {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1}),
    Family(
        "Kimi Linear",
        "kimi_linear",
        {
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
            "moe_intermediate_size": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "mlp_layer_types": ["dense", "sparse"],
            **LATENT,
        },
        rounding=1e-3,
    ),
    Family("OLMo Hybrid", "olmo_hybrid", DELTA_NET),
)
TEMPLATES = {  # family -> the chat template of its models, by its name for `template_families.template_of`
    "qwen2": "qwen2_5",
    "qwen3": "qwen3",
    "llama": "llama3_1",
    "gemma": "gemma",
    "gemma2": "gemma",
    "gemma3": "gemma3",
    "gemma4": "gemma4_v5",
    "phi3": "phi3_5",
    "cohere2": "cohere2",
    "qwen3_moe": "qwen3",
    "minimax_m2": "minimax_m2",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gptoss",
    "deepseek_v3": "deepseekv3",
    "qwen3_5_text": "qwen3_5_think",
    "qwen3_5_moe_text": "qwen3_5_think",
    "lfm2": "lfm2_v2",
    "lfm2_moe": "lfm2_v2",
    "nemotron_h": "nemotron_3_nano",
}


def family_config(key: str, *, vocab: int, eos: int, context: int, **options: Any) -> PreTrainedConfig:
    """A model of two layers, 4 heads of 8 features each."""
    family = FAMILIES[key]
    sizes = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context,
        "eos_token_id": eos,
        "pad_token_id": None,
        "bos_token_id": None,
    }
    if key == "gpt2":
        sizes = {k: v for k, v in sizes.items() if k not in ("intermediate_size", "num_key_value_heads")}
    return CONFIG_MAPPING[family.kind](**(sizes | family.options | options))
