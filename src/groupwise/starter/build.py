"""Train the starter model from scratch: tokenizer, architecture, supervised training, bf16 weights.

`groupwise starter build` runs this; the result is the model in the wheel. The architecture is Qwen3's (grouped-query
attention, q/k norms, SwiGLU, tied embeddings, head size 64), which transformers, PEFT, vLLM and llama.cpp load; the
data is `starter.tasks`; the training is the learner's supervised path over all parameters. Everything is seeded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, Qwen3Config

from groupwise.chat import encode_supervised
from groupwise.model import STARTER, wrap_model
from groupwise.starter.tasks import supervised_conversations
from groupwise.starter.tokenizer import build_tokenizer, render
from groupwise.train.learner import Learner, OptimizerSpec, learning_rate_at
from groupwise.types import Sample


@dataclass(frozen=True, kw_only=True)
class BuildSpec:
    """The recipe of the model in the wheel; `groupwise starter build` takes the first three as options."""

    steps: int = 3200
    seed: int = 0
    tokens_per_step: int = 4096
    learning_rate: float = 3e-3
    warmup_steps: int = 100
    weight_decay: float = 0.1
    vocab_size: int = 1024
    hidden_size: int = 192
    layers: int = 4
    context_length: int = 1024


def build_starter(directory: Path, spec: BuildSpec, *, report: Callable[[str], None], save_every: int = 0) -> None:
    """Train and write the starter into `directory`. `report` receives a line now and then."""
    torch.manual_seed(spec.seed)
    texts = [render(c["messages"], tools=c["tools"]) for c in supervised_conversations(spec.seed, 20000)]
    tokenizer = build_tokenizer(texts, vocab_size=spec.vocab_size)
    model = new_model(spec, tokenizer)
    learner = Learner(
        wrap_model(model, tokenizer, name=STARTER),
        lora=None,
        optimizer=OptimizerSpec(weight_decay=spec.weight_decay, betas=(0.9, 0.98)),
        micro_tokens=spec.tokens_per_step * 2,
        autocast=torch.bfloat16,
    )
    report(f"{sum(p.numel() for p in learner.parameters):,} parameters, {spec.steps} steps, seed {spec.seed}")
    start, smoothed = time.monotonic(), math.nan
    for step, samples in zip(range(spec.steps), batches(spec, tokenizer), strict=False):
        loss = learner.forward_backward_supervised(samples)["loss/cross_entropy"]
        rate = learning_rate_at(
            step, peak=spec.learning_rate, warmup_steps=spec.warmup_steps, steps=spec.steps, schedule="cosine"
        )
        learner.optim_step(learning_rate=rate)
        smoothed = loss if math.isnan(smoothed) else 0.95 * smoothed + 0.05 * loss
        if (step + 1) % 50 == 0:
            report(f"step {step + 1}/{spec.steps}  loss {smoothed:.4f}  {time.monotonic() - start:.0f} s")
        if save_every and (step + 1) % save_every == 0:
            save(model, tokenizer, directory)
    save(model, tokenizer, directory)


def new_model(spec: BuildSpec, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The untrained model."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=spec.hidden_size,
        intermediate_size=spec.hidden_size * 8 // 3,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.hidden_size // 64,
        num_key_value_heads=1,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=spec.context_length,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return AutoModelForCausalLM.from_config(config)


def batches(spec: BuildSpec, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[Sample]]:
    """Endless batches of about `tokens_per_step` tokens; no conversation twice."""
    batch: list[Sample] = []
    used, chunk = 0, 0
    while True:
        chunk += 1
        for conversation in supervised_conversations(spec.seed * 1_000_003 + chunk, 2000):
            sample = encode_supervised(conversation["messages"], tokenizer, tools=conversation["tools"])
            length = len(sample.prompt_ids) + len(sample.completion_ids)
            if used + length > spec.tokens_per_step:
                yield batch
                batch, used = [], 0
            batch.append(_joined(sample))
            used += length


def _joined(sample: Sample) -> Sample:
    """The same sample without a separate prompt: nothing is shared here, and one causal row is cheaper."""
    prompt = sample.prompt_ids
    return Sample(
        prompt_ids=(), completion_ids=(*prompt, *sample.completion_ids), mask=(*(0 for _ in prompt), *sample.mask)
    )


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write config, bf16 weights and tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    model.config.dtype = "bfloat16"
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(directory, state_dict=state)
    tokenizer.save_pretrained(directory)
