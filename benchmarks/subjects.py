"""What the benchmarks of speed run: models of several sizes, an adapter that changes something, batches of known shape.

starter          the model in the wheel
25M, 150M        Qwen3s with random weights and the starter's tokenizer
HIDDENxLAYERS    another of them, such as 256x6
0.6B, 4B         Qwen3's published shapes; moe, qwen3.5: about 0.6B parameters of these families. tiny-... : small ones
                 of the same kinds. Random weights, the starter's tokenizer for whatever needs one
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.utils import logging

from groupwise.config.run import STARTER, STARTER_DIR
from groupwise.model.load import LoadedModel, load_model, load_tokenizer, resolve_device, resolve_dtype, wrap_model
from groupwise.train.learner import Learner
from groupwise.types import Sample

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from starter import BuildSpec, new_model

SIZES = {"25M": (512, 9), "150M": (1024, 14)}  # hidden size, layers
CONTEXT = 131_072
QWEN3: dict[str, Any] = {"vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8, "tie_word_embeddings": True}
EXPERTS = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 256}
TINY: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
}
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {  # transformers' `model_type`, options of its configuration
    "0.6B": (
        "qwen3",
        {**QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    ),
    "4B": (
        "qwen3",
        {**QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    ),
    "moe": (
        "qwen3_moe",
        {**QWEN3, **EXPERTS, "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16},
    ),
    "qwen3.5": (
        "qwen3_5_text",
        {
            **QWEN3,
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
        },
    ),
    "tiny": ("qwen3", TINY),
    "tiny-moe": ("qwen3_moe", {**TINY, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    "tiny-qwen3.5": (
        "qwen3_5_text",
        {**TINY, **DELTA_NET},
    ),
}


@dataclass(frozen=True)
class Shape:
    """`prompts` groups of `group` completions, of `prompt` + `completion` tokens each."""

    prompt: int
    completion: int
    group: int
    prompts: int

    @property
    def rows(self) -> int:
        return self.prompts * self.group

    @property
    def packed(self) -> int:
        """Tokens with every prompt counted once."""
        return self.prompts * (self.prompt + self.group * self.completion)

    @classmethod
    def parse(cls, text: str) -> Shape:
        """`P,C,G,PROMPTS`, for argparse."""
        numbers = [int(number) for number in text.split(",")]
        if len(numbers) != 4 or min(numbers) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is not P,C,G,PROMPTS, as in 64,32,8,8")
        return cls(*numbers)


def load(name: str, *, vocabulary: int | None = None, device: str = "cpu", dtype: str = "float32") -> LoadedModel:
    """A model by its name above; `vocabulary`: with as many token ids. `device` and `dtype` as `load_model` takes
    them."""
    logging.disable_progress_bar()
    if name == STARTER:
        base = load_model(STARTER, device=device, dtype=dtype)
    elif name in SHAPES:
        base = _made(name, device=device, dtype=dtype)
    else:
        hidden, layers = SIZES.get(name) or _parsed(name)
        with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
            write_model(Path(directory), hidden=hidden, layers=layers)
            base = load_model(str(directory), device=device, dtype=dtype)
    if vocabulary is not None:
        base.model.resize_token_embeddings(vocabulary, mean_resizing=False)
        base.model.requires_grad_(False)
    return base


def config_of(name: str) -> PreTrainedConfig:
    """The configuration of one of `SHAPES`."""
    kind, options = SHAPES[name]
    return CONFIG_MAPPING[kind](**options, max_position_embeddings=CONTEXT, eos_token_id=None, bos_token_id=None)


def _made(name: str, *, device: str, dtype: str) -> LoadedModel:
    """One of `SHAPES`, its weights drawn where they stay: nothing is written, and the CPU never holds them."""
    where = resolve_device(device)
    torch.manual_seed(0)
    with where:
        model = AutoModelForCausalLM.from_config(config_of(name), dtype=resolve_dtype(dtype, where))
    model.generation_config.eos_token_id = None  # nothing ends a completion but its length
    return wrap_model(model, load_tokenizer(STARTER), name=name)


def save_shape(name: str, directory: Path, *, device: str = "cpu", dtype: str = "float32") -> None:
    """Write one of `SHAPES` for whoever reads a directory."""
    base = _made(name, device=device, dtype=dtype)
    base.model.save_pretrained(directory)
    base.tokenizer.save_pretrained(directory)


def write_model(directory: Path, *, hidden: int, layers: int, context: int = 2048) -> None:
    """A Qwen3 of these sizes with random weights and the starter's tokenizer, as `load_model` reads it."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(STARTER_DIR)
    new_model(BuildSpec(hidden_size=hidden, layers=layers, context_length=context), tokenizer).save_pretrained(
        directory
    )
    tokenizer.save_pretrained(directory)


def _parsed(name: str) -> tuple[int, int]:
    try:
        hidden, layers = map(int, name.split("x"))
    except ValueError:
        known = ", ".join([*SIZES, *SHAPES])
        sys.exit(f"the model {name!r} is not known; give starter, {known} or HIDDENxLAYERS, as in 256x6")
    return hidden, layers


def parameters_of(base: LoadedModel) -> int:
    """How many weights there are; tied ones count once."""
    return sum(weight.numel() for weight in base.model.parameters())


def save_adapter(base: LoadedModel, directory: Path) -> None:
    """Write an adapter (rank 16, all linear layers) that moves the model: neither half is zero."""
    learner = Learner(base)
    draw = torch.Generator(base.device).manual_seed(1)
    with torch.no_grad():
        for weight in learner.parameters:
            weight.normal_(std=0.05, generator=draw)
    learner.save_adapter(directory)


def random_ids(count: int, *, seed: int, below: int = 1000) -> tuple[int, ...]:
    """Token ids; their values change no time."""
    return tuple(torch.randint(0, below, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def samples_of(shape: Shape, *, below: int = 1000) -> list[Sample]:
    """A batch to train on: random tokens, advantages of both signs, the behaviour's log-probabilities about right."""
    said = (-6.9,) * shape.completion
    return [
        Sample(
            prompt_ids=random_ids(shape.prompt, seed=p, below=below),
            completion_ids=random_ids(shape.completion, seed=1000 + p * shape.group + g, below=below),
            mask=(1,) * shape.completion,
            behaviour_logprobs=said,
            advantage=1.0 if g % 2 else -1.0,
        )
        for p in range(shape.prompts)
        for g in range(shape.group)
    ]
