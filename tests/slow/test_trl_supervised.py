"""TRL's own SFTTrainer and DPOTrainer beside ours: the gradients of one batch in float64, and a step of each.

    pytest -m slow -s tests/slow/test_trl_supervised.py

The starter in float64 with the same adapter on both sides, TRL's rows as TRL tokenised them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from groupwise.config.data import DatasetConfig
from groupwise.config.lora import LoraSpec
from groupwise.config.preference import PreferenceConfig
from groupwise.config.run import STARTER_DIR, OptimizerConfig
from groupwise.model.chat import encode_prompt
from groupwise.model.load import load_model
from groupwise.tasks.answers import answer_turns
from groupwise.tasks.prompts import open_prompts
from groupwise.train.learner import Learner
from groupwise.train.preference_step import train_on_pairs
from groupwise.types import Sample

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

WORDS = ("abc", "bad", "cab", "dab", "fed", "bee")
PAIRS = [
    {
        "prompt": [{"role": "user", "content": f"Spell {word} backwards."}],
        "chosen": [{"role": "assistant", "content": word[::-1]}],
        "rejected": [{"role": "assistant", "content": f"{word}, I think"}],
    }
    for word in WORDS
]
EXAMPLES = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS]
RATE = 1e-3


@pytest.fixture
def sides(tmp_path: Path):
    """`sides(trainer, config, rows)`: TRL's trainer on the starter in float64, and our learner with the same adapter,
    which differs from the base."""

    def make(trainer: type[Any], config: type[Any], rows: list[dict[str, Any]], **options: Any) -> tuple[Any, Learner]:
        settings = {
            "output_dir": str(tmp_path / "trl"),
            "per_device_train_batch_size": len(rows),
            "bf16": False,
            "gradient_checkpointing": False,
            "report_to": [],
            "use_cpu": True,
            "learning_rate": RATE,
            "lr_scheduler_type": "constant",
            "max_steps": 1,
            "logging_steps": 1,
            "disable_tqdm": True,
            "save_strategy": "no",
        }
        theirs = trainer(
            model=AutoModelForCausalLM.from_pretrained(STARTER_DIR, dtype=torch.float64),
            args=config(**settings | options),
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(STARTER_DIR),
            peft_config=LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear"),
        )
        base = load_model("starter", device="cpu", dtype="float64")
        optimizer = OptimizerConfig(learning_rate=RATE, weight_decay=0.0, max_grad_norm=1.0)
        ours = Learner(base, lora=LoraSpec(rank=4, alpha=8.0, targets="all-linear"), optimizer=optimizer)
        g = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for (name, mine), (other_name, other) in zip(named(ours.model), named(theirs.model), strict=True):
                assert name == other_name
                other.data = other.data.double()
                other.copy_(0.05 * torch.randn(other.shape, generator=g, dtype=torch.float64))
                mine.copy_(other)
        return theirs, ours

    return make


def named(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """The adapter's parameters by the module that they are of, whatever wraps the model."""
    found = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    short = [(name[name.index("layers.") :].replace(".default", "").replace(".groupwise", ""), p) for name, p in found]
    return sorted(short, key=lambda pair: pair[0])


def compared(theirs: Any, ours: Learner) -> float:
    """The largest difference of a gradient, relative to the largest gradient; forgets them."""
    both = [[each.grad for _, each in named(side) if each.grad is not None] for side in (theirs.model, ours.model)]
    largest = max(float(grad.abs().max()) for grad in both[0])
    difference = max(float((grad - mine).abs().max()) for grad, mine in zip(*both, strict=True))
    theirs.model.zero_grad()
    ours.zero_grad()
    assert largest > 0
    return difference / largest


def moved(theirs: Any, ours: Learner) -> float:
    """The mean difference of a parameter after a step, relative to the learning rate; AdamW's first step is as long for
    the smallest gradients, which TRL's LM head computes in float32, as for the largest."""
    both = zip(named(theirs.model), named(ours.model), strict=True)
    return float(torch.cat([(p - mine).abs().flatten() for (_, p), (_, mine) in both]).mean()) / RATE


def sample(prompt: list[int], completion: list[int]) -> Sample:
    return Sample(prompt_ids=tuple(prompt), completion_ids=tuple(completion), mask=(1,) * len(completion))


def trained(row: dict[str, Any]) -> Sample:
    """A row of TRL's SFT: what its labels mark is learned."""
    start = next(i for i, label in enumerate(row["labels"]) if label != -100)
    mask = tuple(int(label != -100) for label in row["labels"][start:])
    return Sample(prompt_ids=tuple(row["input_ids"][:start]), completion_ids=tuple(row["input_ids"][start:]), mask=mask)


def loss_and_gradient(theirs: Any) -> float:
    batch = theirs._prepare_inputs(theirs.data_collator(list(theirs.train_dataset)))
    theirs.model.train()
    value = theirs.compute_loss(theirs.model, batch)
    value.backward()
    return float(value.detach())


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_dpo(sides, loss: str):
    theirs, ours = sides(DPOTrainer, DPOConfig, PAIRS, loss_type=[loss], beta=0.3)
    pairs = [
        (sample(row["prompt_ids"], row["chosen_ids"]), sample(row["prompt_ids"], row["rejected_ids"]))
        for row in theirs.train_dataset
    ]
    value, config = loss_and_gradient(theirs), PreferenceConfig.model_validate({"loss": loss, "beta": 0.3})
    told = ours.forward_backward_preference(pairs, config)
    difference = compared(theirs, ours)
    theirs.train()
    train_on_pairs(ours, pairs, config, learning_rate=RATE)
    apart = moved(theirs, ours)
    print(
        f"\nDPO, {loss}: loss {told['loss/preference']:.9f}, TRL {value:.9f}; gradients differ by {difference:.1e} of "
        f"the largest; after a step of AdamW parameters differ by {apart:.1e} of the step"
    )
    assert told["loss/preference"] == pytest.approx(value, rel=1e-6)
    assert difference < 1e-6 and apart < 1e-4


def test_sft(sides):
    theirs, ours = sides(SFTTrainer, SFTConfig, EXAMPLES)
    samples = [trained(row) for row in theirs.train_dataset]
    value = loss_and_gradient(theirs)
    told = ours.forward_backward_supervised(samples)
    difference = compared(theirs, ours)
    theirs.train()
    ours.forward_backward_supervised(samples)
    ours.optim_step(learning_rate=RATE)
    apart = moved(theirs, ours)
    print(
        f"\nSFT: loss {told['loss/cross_entropy']:.9f}, TRL {value:.9f}; gradients differ by {difference:.1e} of the "
        f"largest; after a step of AdamW parameters differ by {apart:.1e} of the step"
    )
    assert told["loss/cross_entropy"] == pytest.approx(value, rel=1e-6)
    assert difference < 1e-6 and apart < 1e-4


def test_rows_have_trls_tokens(sides, tmp_path: Path):
    """Prompts and completions of a conversation, as the starter's template has them; ours ends with the end-of-turn
    token, theirs with what the template puts behind it, too."""
    theirs, ours = sides(DPOTrainer, DPOConfig, PAIRS)
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    prompts = open_prompts(DatasetConfig(source="pairs.jsonl"), folder=tmp_path, kind="dpo").known
    for row, prompt in zip(theirs.train_dataset, prompts, strict=True):
        encoded = encode_prompt(prompt, ours.base.tokenizer)
        assert list(encoded.token_ids) == row["prompt_ids"]
        for ids, answer in ((row["chosen_ids"], prompt.answer), (row["rejected_ids"], prompt.rejected)):
            (turn,) = answer_turns(replace(encoded, answer=answer), ours.base.tokenizer)
            mine = list(turn.completion.token_ids)
            assert ids[: len(mine)] == mine and ours.base.tokenizer.decode(ids[len(mine) :]).strip() == ""
