"""The reference files of the other systems, as their documentation has them, and a folder that they run in."""

from __future__ import annotations

import json
from pathlib import Path

QUICK_START = """\
base_model: Qwen/Qwen2.5-1.5B-Instruct
rl: grpo
chat_template: tokenizer_default
vllm: {host: 0.0.0.0, port: 8000, gpu_memory_utilization: 0.85, dtype: auto, max_model_len: 2048}
adapter: lora
lora_r: 32
lora_alpha: 64
lora_target_linear: true
trl:
  use_vllm: true
  use_data_producer: true
  vllm_server_host: 0.0.0.0
  vllm_server_port: 8000
  vllm_server_timeout: 300
  vllm_lora_sync: true
  num_generations: 8
  max_completion_length: 512
  temperature: 0.7
  reward_funcs: [rewards.accuracy_reward, rewards.format_reward]
  reward_weights: [1.0, 0.5]
datasets:
  - {path: openai/gsm8k, name: main, type: rewards.prompt_transform, split: train}
skip_prepare_dataset: true
val_set_size: 0.0
sequence_len: 512
micro_batch_size: 2
gradient_accumulation_steps: 4
max_steps: 200
learning_rate: 5.0e-6
optimizer: adamw_torch_fused
lr_scheduler: cosine
warmup_steps: 10
bf16: true
attn_implementation: flash_attention_2
gradient_checkpointing: true
special_tokens: {pad_token: "<|endoftext|>"}
output_dir: ./grpo-output
logging_steps: 1
"""

FULL_ASYNC = """\
base_model: Qwen/Qwen2.5-1.5B-Instruct
rl: grpo
adapter: lora
lora_r: 32
lora_alpha: 64
lora_target_linear: true
vllm: {host: 0.0.0.0, port: 8000, gpu_memory_utilization: 0.35, dtype: auto}
trl:
  use_data_producer: true
  use_vllm: true
  async_prefetch: true
  prefetch_depth: 1
  vllm_sync_interval: 2
  vllm_lora_sync: true
  streaming_partial_batch: true
  vllm_importance_sampling_correction: true
  off_policy_mask_threshold: 0.5
  importance_sampling_level: token
  num_generations: 8
  max_completion_length: 512
  reward_funcs: [rewards.accuracy_reward]
  reroll_start_fraction: 0.5
  replay_buffer_size: 100
  reward_num_workers: 4
  skip_zero_advantage_batches: true
datasets:
  - {path: AI-MO/NuminaMath-TIR, type: rewards.prompt_transform, split: train}
gradient_accumulation_steps: 4
micro_batch_size: 2
max_steps: 500
learning_rate: 1.0e-5
"""

DORA = """\
base_model: HuggingFaceTB/SmolLM2-135M
chat_template: llama3
rl: grpo
trl: {beta: 0.001, max_completion_length: 256, use_vllm: true, num_generations: 4, reward_funcs: [rewards.rand_reward]}
vllm: {max_model_len: 800, enable_prefix_caching: true}
datasets: [{path: openai/gsm8k, name: main, type: rewards.prompt_transform}]
adapter: lora
lora_r: 8
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
peft_use_dora: true
flash_attention: true
sequence_len: 1024
special_tokens: {pad_token: "<|endoftext|>"}
max_steps: 3
micro_batch_size: 4
gradient_accumulation_steps: 2
warmup_steps: 10
learning_rate: 1.0e-4
optimizer: adamw_torch_fused
lr_scheduler: cosine
bf16: auto
"""

CPU = """\
base_model: HuggingFaceTB/SmolLM2-135M
rl: grpo
trl: {beta: 0.001, max_completion_length: 256, use_vllm: false, num_generations: 4, reward_funcs: [rewards.rand_reward]}
datasets: [{path: openai/gsm8k, name: main, type: rewards.prompt_transform, split: "train[:16]"}]
micro_batch_size: 4
gradient_accumulation_steps: 1
max_steps: 2
learning_rate: 1.0e-4
"""

REWARDS = '''
import random
import re


def accuracy_reward(completions, answer, **kwargs) -> list[float]:
    """1 where the last number is the answer's; a completion is a message or a string."""
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    numbers = [re.findall(r"-?[0-9]+", text) for text in texts]
    return [float(bool(found) and found[-1] == gold) for found, gold in zip(numbers, answer)]


def format_reward(completions, **kwargs) -> list[float]:
    """The share of vowels, which differs between the completions of any model."""
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [sum(text.count(vowel) for vowel in "aeiou") / (1 + len(text)) for text in texts]


def rand_reward(completions, **kwargs) -> list[float]:
    return [random.random() for _ in completions]


def prompt_transform(cfg, *args, **kwargs):
    def transform_fn(example, tokenizer=None):
        return {
            "prompt": [{"role": "user", "content": example["question"]}],
            "answer": example["answer"].split("####")[-1].strip().replace(",", ""),
        }

    return transform_fn, {"remove_columns": ["question", "a column that is not there"]}
'''


def write_project(folder: Path, *, rows: int = 12) -> Path:
    """The reward module and a dataset with gsm8k's columns, `gsm8k.jsonl`."""
    (folder / "rewards.py").write_text(REWARDS, encoding="utf-8")
    lines = [
        {"question": f"What is {i} + {i + 1}? Reply with just the number.", "answer": f"It is so.\n#### {2 * i + 1}"}
        for i in range(rows)
    ]
    (folder / "gsm8k.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines), encoding="utf-8")
    return folder
