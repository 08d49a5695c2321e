"""Configurations of published models, as their config.json has them, without weights: for the tables of
docs/hardware.md, and for tests that ask what a model of such a shape takes."""

from __future__ import annotations

from pathlib import Path

from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

QWEN3 = {"vocab_size": 151936, "max_position_embeddings": 40960, "head_dim": 128}
SHAPES: dict[str, PretrainedConfig] = {
    "Qwen2.5-0.5B": Qwen2Config(
        vocab_size=151936, hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
        intermediate_size=4864, max_position_embeddings=32768, tie_word_embeddings=True,
    ),
    "Qwen2.5-1.5B": Qwen2Config(
        vocab_size=151936, hidden_size=1536, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
        intermediate_size=8960, max_position_embeddings=4096, tie_word_embeddings=True,
    ),
    "Qwen2.5-3B": Qwen2Config(
        vocab_size=151936, hidden_size=2048, num_hidden_layers=36, num_attention_heads=16, num_key_value_heads=2,
        intermediate_size=11008, max_position_embeddings=32768, tie_word_embeddings=True,
    ),
    "Qwen3-0.6B": Qwen3Config(
        **QWEN3, hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
        intermediate_size=3072, tie_word_embeddings=True,
    ),
    "Qwen3-1.7B": Qwen3Config(
        **QWEN3, hidden_size=2048, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
        intermediate_size=6144, tie_word_embeddings=True,
    ),
    "Qwen3-4B": Qwen3Config(
        **QWEN3, hidden_size=2560, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=9728, tie_word_embeddings=True,
    ),
    "Qwen3-8B": Qwen3Config(
        **QWEN3, hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=12288, tie_word_embeddings=False,
    ),
    "Qwen3-32B": Qwen3Config(
        **QWEN3, hidden_size=5120, num_hidden_layers=64, num_attention_heads=64, num_key_value_heads=8,
        intermediate_size=25600, tie_word_embeddings=False,
    ),
    "Llama-3.3-70B": LlamaConfig(
        vocab_size=128256, hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        intermediate_size=28672, max_position_embeddings=131072, head_dim=128, tie_word_embeddings=False,
    ),
    "Qwen3-30B-A3B": Qwen3MoeConfig(
        **QWEN3, hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4,
        intermediate_size=6144, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
        tie_word_embeddings=False,
    ),
}  # fmt: skip


def shape_dir(name: str, folder: Path) -> str:
    """A directory with nothing but the config.json of a published model."""
    directory = folder / name
    SHAPES[name].save_pretrained(directory)
    return str(directory)
