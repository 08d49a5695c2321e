"""How far does training an adapter in bfloat16 lead from training it in float64? Ours, beside PEFT's.

    python benchmarks/adapter_rounding.py              # 50 steps of AdamW, three seeds, a model of 25M parameters
    python benchmarks/adapter_rounding.py --quick      # does it run? tiny

Three sides begin with the same weights (numbers of bfloat16) and the same adapter, and get the same examples:

    float64    transformers and PEFT, base and adapter in float64
    PEFT       transformers and PEFT, the base in bfloat16, the adapter in float32 as PEFT keeps it
    ours       `Learner` over the base in bfloat16

After the steps that are shown: `adapter` is the distance of the products B A from float64's, as a share of how far
float64 moved them; `nats` the mean absolute difference of the log-probabilities of held-out tokens under both adapters,
computed in float64. The last column is ours over PEFT's: 1 or less is not farther.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import PeftModel
from subjects import load, random_ids, save_adapter
from torch import Tensor

from groupwise.train.learner import Learner
from groupwise.types import Sample

RATE, CLIP = 1e-3, 1.0
SIDES = ("PEFT", "ours")
MEASURES = ("adapter", "nats")


class Peer:
    """transformers and PEFT: one row after another, gradients added up over a step's tokens."""

    def __init__(self, model: str, adapter: Path, dtype: torch.dtype):
        base = load(model, dtype="bfloat16").model.to(dtype)  # pyright: ignore[reportArgumentType]
        self.model: Any = PeftModel.from_pretrained(base, str(adapter), is_trainable=True).eval()
        self.adapter = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if dtype == torch.float64:
            for parameter in self.adapter.values():
                parameter.data = parameter.data.double()
        self._optimizer = torch.optim.AdamW(self.adapter.values(), lr=RATE, betas=(0.9, 0.999), weight_decay=0.0)

    def step(self, samples: Sequence[Sample]) -> None:
        tokens = sum(sum(sample.mask) for sample in samples)
        for sample in samples:
            (-self.logprobs(sample).sum() / tokens).backward()
        torch.nn.utils.clip_grad_norm_(self.adapter.values(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def logprobs(self, sample: Sample) -> Tensor:
        """[completion] of the completion's tokens."""
        ids = torch.tensor([[*sample.prompt_ids, *sample.completion_ids]])
        logits = self.model(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 : -1]
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return wide.log_softmax(-1).gather(-1, torch.tensor(sample.completion_ids)[:, None])[:, 0]

    @torch.no_grad()
    def products(self) -> list[Tensor]:
        """B A of each layer, in float64 and in order."""
        return products_of(self.adapter)


class Ours:
    """The learner, with its adapter as it is saved."""

    def __init__(self, model: str, adapter: Path):
        self._learner = Learner(load(model, dtype="bfloat16"))
        self._learner.load_adapter(adapter)

    def step(self, samples: Sequence[Sample]) -> None:
        self._learner.forward_backward_supervised(samples)
        self._learner.optim_step(learning_rate=RATE)

    def save(self, folder: Path) -> None:
        self._learner.save_adapter(folder)


def products_of(named: dict[str, Tensor]) -> list[Tensor]:
    """B A of every pair in `named`, by name."""
    pairs = sorted((name, name.replace("lora_A", "lora_B")) for name in named if "lora_A" in name)
    return [named[b].detach().double() @ named[a].detach().double() for a, b in pairs]


def examples(seed: int, *, rows: int, prompt: int, completion: int) -> list[Sample]:
    """Random prompts with completions that can be learnt: each token is the one before it plus one."""
    every = []
    for row in range(rows):
        ids = random_ids(prompt, seed=1000 * seed + row, below=900)
        said = tuple(ids[-1] + 1 + t for t in range(completion))
        every.append(Sample(prompt_ids=ids, completion_ids=said, mask=(1,) * completion))
    return every


def measured(model: str, seed: int, *, steps: int, at: Sequence[int], shape: dict[str, int]) -> list[dict[str, Any]]:
    """The distances of both sides after the steps `at`."""
    held_out, found = examples(10_000 + seed, **shape), []
    with TemporaryDirectory() as name:
        start, moved = Path(name) / "start", Path(name) / "ours"
        start.mkdir()
        moved.mkdir()
        save_adapter(load(model, dtype="bfloat16"), start)
        exact, peft, ours = Peer(model, start, torch.float64), Peer(model, start, torch.bfloat16), Ours(model, start)
        begun = exact.products()
        for step in range(1, steps + 1):
            batch = examples(100 * seed + step, **shape)
            for side in (exact, peft, ours):
                side.step(batch)
            if step not in at:
                continue
            ours.save(moved)
            theirs = {"PEFT": in_double(model, start, peft.adapter), "ours": Peer(model, moved, torch.float64)}
            far = norm(a - b for a, b in zip(exact.products(), begun, strict=True))
            for side, peer in theirs.items():
                away = norm(a - b for a, b in zip(exact.products(), peer.products(), strict=True)) / far
                found.append(
                    {"seed": seed, "step": step, "side": side, "adapter": away, "nats": gap(exact, peer, held_out)}
                )
    return found


def in_double(model: str, start: Path, adapter: dict[str, Any]) -> Peer:
    """A peer in float64 with these adapter weights."""
    peer = Peer(model, start, torch.float64)
    for name, parameter in peer.adapter.items():
        parameter.data = adapter[name].detach().double()
    return peer


def norm(parts: Any) -> float:
    return float(torch.stack([part.norm() for part in parts]).norm())


@torch.no_grad()
def gap(exact: Peer, other: Peer, samples: Sequence[Sample]) -> float:
    """The mean absolute difference of a token's log-probability."""
    return float(torch.cat([exact.logprobs(s) - other.logprobs(s) for s in samples]).abs().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="25M", help="as in subjects.py")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    asked = parser.parse_args()
    if asked.quick:
        asked.model, asked.steps, asked.seeds = "64x2", 10, 1
    at = sorted({1, asked.steps // 2, asked.steps})
    shape = {"rows": 4, "prompt": 8, "completion": 8} if asked.quick else {"rows": 8, "prompt": 24, "completion": 24}
    found = [
        each
        for seed in range(asked.seeds)
        for each in measured(asked.model, seed, steps=asked.steps, at=at, shape=shape)
    ]
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    print("| step | measure | PEFT | ours | ours / PEFT, each seed |\n| --- | --- | --- | --- | --- |")
    for step in at:
        for measure in MEASURES:
            of = {s: [e[measure] for e in found if e["step"] == step and e["side"] == s] for s in SIDES}
            ratios = [ours / peft for ours, peft in zip(of["ours"], of["PEFT"], strict=True)]
            means = " | ".join(f"{statistics.mean(of[side]):.3g}" for side in SIDES)
            print(f"| {step} | {measure} | {means} | {', '.join(f'{ratio:.2f}' for ratio in ratios)} |")


if __name__ == "__main__":
    main()
