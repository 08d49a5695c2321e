"""Models in files, read whole by one process and in parts by several, in float64 that is float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from exact_norms import with_exact_norms
from groupwise.config.chat import ChatConfig
from groupwise.model.load import LoadedModel, load_model
from groupwise.model.parts import Parts, open_parts
from groupwise.train.fully_sharded import FullySharded
from groupwise.train.learner import Learner
from groupwise.train.ranks import Ranks

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Settings:
    """Of a configuration, what says how its model is loaded."""

    model: str
    device: str = "cpu"
    dtype: str = "float64"
    quantization: str | None = None
    cast_lm_head: str = "auto"
    chat: ChatConfig = field(default_factory=ChatConfig)
    folder: Path = Path()


def save(base: LoadedModel, directory: Path) -> Path:
    base.model.save_pretrained(directory)
    base.tokenizer.save_pretrained(directory)
    return directory


def read_whole(directory: Path) -> LoadedModel:
    base = load_model(str(directory), device="cpu", dtype="float64")
    with_exact_norms(base.model)
    return base


def read_parts(directory: Path) -> Parts:
    parts = open_parts(Settings(str(directory)), device=CPU)
    with_exact_norms(parts.base.model)
    return parts


def of_parts(directory: Path, *, ranks: Ranks, shard_size: int | None = None, **options: Any) -> Learner:
    """A learner over a model that each rank reads its parts of."""
    parts = read_parts(directory)
    return Learner(parts.base, strategy=FullySharded(ranks, parts=parts, shard_size=shard_size), **options)
