"""Distillation beside GRPO: the starter learns from a better adapter of itself, at equal numbers of sampled tokens.

    python benchmarks/distillation.py [--steps 24] [--seeds 1] [--teacher-steps 60]

First an adapter is trained by GRPO for longer than the others: the teacher. Then the starter is trained for the same
number of steps, on the same prompts, by GRPO on the reward; from the teacher alone, at the sampled token and over its
8 likeliest; and from itself with the answer in its prompt. Reported is the exact match of held-out problems, sampled at
temperature 1, four completions each: before, on the way, after.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from groupwise.config.run import RunConfig, parse_config
from groupwise.run.loop import run_loop

SKILL = {"skill": ["add"], "style": "bare"}
SOURCE = "groupwise.tasks.starter.tasks:prompts"


def config(folder: Path, *, seed: int, steps: int, every: int, **sections: Any) -> RunConfig:
    return parse_config(
        {
            "model": "starter",
            "seed": seed,
            "data": {"source": SOURCE, "args": {**SKILL, "n": 512}},
            "rewards": ["groupwise.rewards.text:exact_match"],
            "rollout": {"prompts_per_step": 8, "group_size": 8, "max_tokens": 12, "refill": 1.0},
            "train": {"steps": steps, "learning_rate": 1e-3, "lora": {"rank": 8}},
            "eval": {
                "data": {"source": SOURCE, "args": {**SKILL, "n": 64, "split": "test"}},
                "modes": ["sampled"],
                "k": 4,
                "every": every,
            },
            "checkpoint": {"every": 0},
            "scoring": {"workers": 0},
            "run_dir": str(folder),
            **sections,
        }
    )


def curve(folder: Path) -> dict[int, float]:
    """The exact match by step, and the tokens that were sampled for training."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {each["step"]: each["eval/sampled/reward"] for each in records if "eval/sampled/reward" in each}


def sampled_tokens(folder: Path) -> int:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return int(sum(each.get("rollout/tokens", 0) for each in records))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--teacher-steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    every = max(options.steps // 4, 1)
    with tempfile.TemporaryDirectory() as place:
        taught = Path(place) / "teacher"
        run_loop(config(taught, seed=100, steps=options.teacher_steps, every=options.teacher_steps))
        print(f"the teacher: {curve(taught)}", flush=True)
        teacher = {"adapter": str(taught), "reward_weight": 0.0}
        ways: dict[str, dict[str, Any]] = {
            "GRPO": {},
            "teacher, sampled token": {"teacher": teacher},
            "teacher, top_k 8": {"teacher": {**teacher, "top_k": 8}},
            "GRPO + teacher": {"teacher": {"adapter": str(taught)}},
            "itself, told the answer": {
                "teacher": {"self": True, "loss": "sdpo", "context": "answer", "reward_weight": 0.0}
            },
        }
        for seed in range(options.seeds):
            for name, sections in ways.items():
                folder = Path(place) / f"{name}-{seed}".replace(" ", "_")
                run_loop(config(folder, seed=seed, steps=options.steps, every=every, **sections))
                points = "  ".join(f"{step}: {value:.3f}" for step, value in curve(folder).items())
                print(f"seed {seed}  {name:24}  {sampled_tokens(folder):6} tokens   {points}", flush=True)


if __name__ == "__main__":
    main()
