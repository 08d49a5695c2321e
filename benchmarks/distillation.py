"""Distillation beside GRPO: the starter learns from a better adapter of itself, at equal numbers of sampled tokens.

    python benchmarks/distillation.py [--steps 24] [--seeds 0 1 2] [--teacher-steps 60] [--out docs/distillation.json]

First an adapter is trained by GRPO for longer than the others: the teacher. Then the starter is trained for the same
number of steps, on the same prompts, by GRPO on the reward; from the teacher alone, at the sampled token, over its 8
likeliest, and by its own completions (sft: it samples as many as the policy would); by both, where half of each step's
completions are the teacher's with sft; and from itself with the answer in its prompt. Reported is the exact match of
held-out problems, sampled at temperature 1, four completions each: before, on the way, after, and the tokens that were
sampled for training, whoever sampled them.

Prints a table (mean of the seeds, least and most) and writes OUT.json. Runs that are in OUT.json are not run again, and
the teacher is kept in runs/distillation.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from groupwise.config.run import RunConfig, parse_config
from groupwise.run.loop import run_loop
from groupwise.store.tracking import read_metrics

SKILL = {"skill": ["add"], "style": "bare"}
SOURCE = "groupwise.tasks.starter.tasks:prompts"
ROLLOUT = {"prompts_per_step": 8, "group_size": 8, "max_tokens": 12, "refill": 1.0}
REWARD = "eval/sampled/reward"


def config(folder: Path, *, seed: int, steps: int, every: int, **sections: Any) -> RunConfig:
    return parse_config(
        {
            "model": "starter",
            "seed": seed,
            "data": {"source": SOURCE, "args": {**SKILL, "n": 512}},
            "rewards": ["groupwise.rewards.text:exact_match"],
            "rollout": ROLLOUT,
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


def ways(adapter: Path) -> Mapping[str, Mapping[str, Any]]:
    """The sections of the configuration that are another one in each way of training."""
    both: dict[str, Any] = {"adapter": str(adapter)}
    alone = {**both, "reward_weight": 0.0}
    half = {"rollout": {**ROLLOUT, "group_size": 4}}  # the other half is the teacher's
    return {
        "GRPO": {},
        "teacher alone, sampled token": {"teacher": alone},
        "teacher alone, top_k 8": {"teacher": {**alone, "top_k": 8}},
        "teacher alone, sft": {"teacher": {**alone, "loss": "sft"}},
        "teacher alone, sft of right answers": {"teacher": {**alone, "loss": "sft", "least_reward": 1.0}},
        "GRPO + teacher": {"teacher": both},
        "GRPO + sft": {"teacher": {**both, "loss": "sft"}, **half},
        "itself, told the answer": {
            "teacher": {"self": True, "loss": "sdpo", "context": "answer", "reward_weight": 0.0}
        },
    }


def outcome(folder: Path) -> dict[str, Any]:
    """The exact match by step, and the tokens that were sampled for training."""
    records = list(read_metrics(folder / "metrics.jsonl"))
    tokens = sum(each.get("rollout/tokens", 0) for each in records)
    if "loss/policy" in records[1] and "teacher/demonstrated_tokens" in records[1]:  # beside the policy's
        tokens += sum(each.get("teacher/demonstrated_tokens", 0) for each in records)
    return {"tokens": int(tokens), "right": {str(each["step"]): each[REWARD] for each in records if REWARD in each}}


def report(runs: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    """A row for each way: means over the seeds, the least and the most after the last step."""
    names = list(dict.fromkeys(name.rpartition(", seed ")[0] for name in runs))
    steps = list(next(iter(runs.values()))["right"])
    table = Table("", "tokens sampled", *(f"step {step}" for step in steps), "least to most")
    for name in names:
        mine = [run for key, run in runs.items() if key.rpartition(", seed ")[0] == name]
        means = [f"{fmean(run['right'][step] for run in mine):.3f}" for step in steps]
        last = [run["right"][steps[-1]] for run in mine]
        tokens = f"{fmean(run['tokens'] for run in mine):,.0f}"
        table.add_row(name, tokens, *means, f"{min(last):.3f} to {max(last):.3f}")
    console.print(table)


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--teacher-steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("docs/distillation.json"))
    return parser.parse_args(arguments)


def main() -> int:
    options = options_of()
    settings = {"steps": options.steps, "teacher_steps": options.teacher_steps}
    done = json.loads(options.out.read_text()) if options.out.exists() else {"settings": settings, "runs": {}}
    if done["settings"] != settings:
        print(f"{options.out} is of {done['settings']}, not {settings}: move it away, or set --out", file=sys.stderr)
        return 2
    adapter = Path(f"runs/distillation/teacher-{options.teacher_steps}")
    sections = {"steps": options.teacher_steps, "every": options.teacher_steps, "resume": "auto"}
    run_loop(config(adapter, seed=100, **sections))
    done["teacher"] = outcome(adapter)["right"][str(options.teacher_steps)]
    for seed in options.seeds:
        for name, changed in ways(adapter.absolute()).items():
            if (key := f"{name}, seed {seed}") in done["runs"]:
                continue
            with tempfile.TemporaryDirectory() as place:
                folder = Path(place) / "run"
                every = max(options.steps // 4, 1)
                if run_loop(config(folder, seed=seed, steps=options.steps, every=every, **changed)).interrupted:
                    return 130
                done["runs"][key] = outcome(folder)
            options.out.write_text(json.dumps(done, indent=1) + "\n")
    console = Console(width=150)
    console.print(f"the teacher: {done['teacher']:.3f}")
    report(done["runs"], console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
