"""What the benchmarks of speed run: models of several sizes, an adapter that changes something, batches of known shape.

starter          the model in the wheel
25M, 150M        Qwen3s with random weights and the starter's tokenizer
HIDDENxLAYERS    another of them, such as 256x6
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer
from transformers.utils import logging

from groupwise.config.run import STARTER, STARTER_DIR
from groupwise.model.load import LoadedModel, load_model
from groupwise.train.learner import Learner
from groupwise.types import Sample

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from starter import BuildSpec, new_model

SIZES = {"25M": (512, 9), "150M": (1024, 14)}  # hidden size, layers


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


def load(name: str, *, vocabulary: int | None = None) -> LoadedModel:
    """A model by its name above, on the CPU in float32; `vocabulary`: with as many token ids."""
    logging.disable_progress_bar()
    if name == STARTER:
        base = load_model(STARTER, device="cpu", dtype="float32")
    else:
        hidden, layers = SIZES.get(name) or _parsed(name)
        with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
            write_model(Path(directory), hidden=hidden, layers=layers)
            base = load_model(str(directory), device="cpu", dtype="float32")
    if vocabulary is not None:
        base.model.resize_token_embeddings(vocabulary, mean_resizing=False)
        base.model.requires_grad_(False)
    return base


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
        sys.exit(f"the model {name!r} is not known; give starter, {', '.join(SIZES)} or HIDDENxLAYERS, as in 256x6")
    return hidden, layers


def parameters_of(base: LoadedModel) -> int:
    """How many weights there are; tied ones count once."""
    return sum(weight.numel() for weight in base.model.parameters())


def save_adapter(base: LoadedModel, directory: Path) -> None:
    """Write an adapter (rank 16, all linear layers) that moves the model: neither half is zero."""
    learner = Learner(base)
    draw = torch.Generator().manual_seed(1)
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
