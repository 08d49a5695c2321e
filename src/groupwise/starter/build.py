"""Train the starter model from scratch: tokenizer, architecture, supervised training, bf16 weights.

`groupwise starter build` runs this; the result is the model in the wheel. The architecture is Qwen3's (grouped-query
attention, q/k norms, SwiGLU, tied embeddings, head size 64), which transformers, PEFT, vLLM and llama.cpp load; the
data is `starter.tasks`; the training is the learner's supervised path over all parameters. Everything is seeded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, Qwen3Config

from groupwise.chat import encode_supervised
from groupwise.model import STARTER, wrap_model
from groupwise.starter.tasks import CURIOUS_SKILLS, CURIOUS_STYLES, Mix, supervised_conversations
from groupwise.starter.tokenizer import build_tokenizer, render
from groupwise.train.learner import Learner, OptimizerSpec, learning_rate_at
from groupwise.types import Sample


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """One pass of supervised training: AdamW from rest, warm-up, cosine to zero, on a mix of conversations."""

    steps: int
    learning_rate: float
    mix: Mix = field(default_factory=Mix)


# First everything; then more of sums and differences, worked out; last, to forget when one was asked to think.
LESSONS = (
    Lesson(steps=2200, learning_rate=3e-3),
    Lesson(steps=1100, learning_rate=2e-3, mix=Mix(skills=CURIOUS_SKILLS, asked=CURIOUS_STYLES)),
    Lesson(steps=200, learning_rate=5e-4, mix=Mix(skills=CURIOUS_SKILLS, asked=CURIOUS_STYLES, noise={"think": 0.75})),
)


@dataclass(frozen=True, kw_only=True)
class BuildSpec:
    """The recipe of the model in the wheel."""

    lessons: tuple[Lesson, ...] = LESSONS
    seed: int = 0
    tokens_per_step: int = 4096
    warmup_steps: int = 100
    weight_decay: float = 0.1
    vocab_size: int = 1024
    hidden_size: int = 192
    layers: int = 4
    context_length: int = 1024


def build_starter(directory: Path, spec: BuildSpec, *, report: Callable[[str], None]) -> None:
    """Train the starter and write it into `directory`, after every lesson; the next begins from what was written.

    `report` receives a line now and then.
    """
    torch.manual_seed(spec.seed)
    texts = [render(c["messages"], tools=c["tools"]) for c in supervised_conversations(spec.seed, 20000)]
    tokenizer = build_tokenizer(texts, vocab_size=spec.vocab_size)
    save(new_model(spec, tokenizer), tokenizer, directory)
    for number, lesson in enumerate(spec.lessons):
        report(f"lesson {number + 1} of {len(spec.lessons)}: {lesson.steps} steps, seed {spec.seed}")
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        teach(model, tokenizer, lesson, spec, number=number, report=report)
        save(model, tokenizer, directory)


def teach(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    lesson: Lesson,
    spec: BuildSpec,
    *,
    number: int,
    report: Callable[[str], None],
) -> None:
    """One lesson: train all parameters of `model` in place."""
    learner = Learner(
        wrap_model(model, tokenizer, name=STARTER),
        lora=None,
        optimizer=OptimizerSpec(weight_decay=spec.weight_decay, betas=(0.9, 0.98)),
        micro_tokens=spec.tokens_per_step * 2,
        autocast=torch.bfloat16,
    )
    start, smoothed = time.monotonic(), math.nan
    stream = batches(spec, tokenizer, lesson.mix, first_seed=spec.seed * 1_000_003 + number * 10_000)
    warmup = min(spec.warmup_steps, lesson.steps // 4)
    for step, samples in zip(range(lesson.steps), stream, strict=False):
        loss = learner.forward_backward_supervised(samples)["loss/cross_entropy"]
        rate = learning_rate_at(
            step, peak=lesson.learning_rate, warmup_steps=warmup, steps=lesson.steps, schedule="cosine"
        )
        learner.optim_step(learning_rate=rate)
        smoothed = loss if math.isnan(smoothed) else 0.95 * smoothed + 0.05 * loss
        if (step + 1) % 50 == 0:
            report(f"step {step + 1}/{lesson.steps}  loss {smoothed:.4f}  {time.monotonic() - start:.0f} s")


def new_model(spec: BuildSpec, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The untrained model."""
    end: Any = tokenizer.eos_token_id  # an int; the stubs admit more
    padding: Any = tokenizer.pad_token_id
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
        eos_token_id=end,
        pad_token_id=padding,
    )
    return AutoModelForCausalLM.from_config(config)


def batches(
    spec: BuildSpec, tokenizer: PreTrainedTokenizerBase, mix: Mix, *, first_seed: int
) -> Iterator[list[Sample]]:
    """Endless batches of about `tokens_per_step` tokens; no conversation twice."""
    batch: list[Sample] = []
    used, chunk = 0, 0
    while True:
        chunk += 1
        for conversation in supervised_conversations(first_seed + chunk, 2000, mix=mix):
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
