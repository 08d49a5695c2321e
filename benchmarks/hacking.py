"""A reward that can be gamed: trained by it, and by the reward that was meant; what was said before, and when.

    python benchmarks/hacking.py [--seeds 0 1 2] [--steps 45] [--out docs/hacking]

The starter is asked which of some numbers is the largest or smallest. `mentions` pays where the answer occurs anywhere
in the reply, as many a first reward does, so a reply that goes through all the numbers is paid, too. `right` is the
reward that was meant: the reply, behind its thoughts, is the answer. Runs:

    gameable   trained by `mentions`, evaluated by `right` (`eval.rewards`)
    mended     trained by `right`, evaluated by `right`

Before the first run the reward is given to `groupwise rewards lint` and `groupwise check`. Of each run: both rewards on
held-out prompts, the mean length of the training completions, the findings of `groupwise health` with the steps at
which they began, the version that `eval.best` kept, and the one that it would have kept without `eval.rewards`.

Prints a table, writes OUT.json and OUT.png. Runs that are in OUT.json already are not run again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from rich.console import Console
from rich.table import Table

from groupwise.config.run import RunConfig, parse_config
from groupwise.rewards.base import load_rewards
from groupwise.rewards.check import lint
from groupwise.run.check import check
from groupwise.run.health_report import examine
from groupwise.run.loop import run_loop
from groupwise.store.tracking import read_metrics

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SOURCE = {"source": "groupwise.tasks.starter.tasks:prompts"}
TASK = {"skill": ["compare"], "style": "bare"}
RIGHT = {"function": "groupwise.rewards.text:exact_match", "args": {"after": "</think>"}, "name": "right"}
TRAINED_BY: Mapping[str, Mapping[str, Any]] = {"gameable": {"function": "hacking:mentions"}, "mended": RIGHT}
MODE = "sampled"
Outcome = dict[str, Any]


def mentions(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """1 where the answer occurs anywhere in the reply."""
    return [float(a in c[0]["content"]) for c, a in zip(completions, answer, strict=True)]


def config(way: str, *, seed: int, steps: int, folder: Path) -> RunConfig:
    counted = {} if way == "mended" else {"rewards": [RIGHT]}
    return parse_config(
        {
            "name": way,
            "model": "starter",
            "seed": seed,
            "folder": str(Path(__file__).parent),
            "data": {**SOURCE, "args": {**TASK, "n": 2000}},
            "eval": {
                **counted,
                "data": {**SOURCE, "args": {**TASK, "n": 128, "split": "test"}},
                "every": 5,
                "best": MODE,
            },
            "rewards": [TRAINED_BY[way]],
            "rollout": {"prompts_per_step": 16, "group_size": 8, "max_tokens": 24},
            "train": {"steps": steps, "learning_rate": 2e-3, "lora": {"rank": 8}},
            "checkpoint": {"every": 0},
            "scoring": {"workers": 0},
            "run_dir": str(folder),
        }
    )


def said_before(way: str, *, steps: int) -> Outcome:
    """What `groupwise rewards lint` and `groupwise check` say of the reward."""
    plan = config(way, seed=0, steps=steps, folder=Path("unused"))
    [function] = load_rewards(plan.rewards, folder=plan.folder)
    findings = asyncio.run(lint(function)).findings
    linted = [f"{each.severity} {each.check}, {each.probe!r}: {each.message}" for each in findings]
    return {"lint": linted, "check": list(check(plan).warnings)}


def trained(way: str, *, seed: int, steps: int) -> Outcome:
    """One run: its curves, the findings on it, and the version that was kept."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        plan = config(way, seed=seed, steps=steps, folder=folder)
        result = run_loop(plan)
        if result.interrupted:
            raise KeyboardInterrupt
        records = list(read_metrics(folder / "metrics.jsonl"))
    by_right = curve(records, f"eval/{MODE}/reward")
    by_reward = curve(records, f"eval/{MODE}/training_reward") or by_right
    found = {each.label: [each.severity, each.began] for each in reversed(examine(records, config=plan).findings)}
    return {
        "right": by_right,
        "trained_by": by_reward,
        "length": curve(records, "rollout/len_mean"),
        "found": dict(sorted(found.items(), key=lambda pair: pair[1][1])),
        "kept": result.version.number,
        "kept_by_the_training_reward": int(max(by_reward, key=lambda step: by_reward[step])),
    }


def curve(records: Sequence[Mapping[str, Any]], metric: str) -> dict[str, float]:
    """A metric by step; JSON's keys are strings."""
    return {str(each["step"]): round(each[metric], 4) for each in records if each.get(metric) is not None}


def report(done: Mapping[str, Any], console: Console) -> None:
    for line in (*done["before"]["lint"], *done["before"]["check"]):
        console.print(f"before the run: {line}", markup=False)
    table = Table(
        "run", "trained by", "right", "tokens a reply", "reward.gamed at", "kept", "kept without eval.rewards"
    )
    for name, run in done["runs"].items():
        ends = [f"{first:.2f} -> {last:.2f}" for first, last in map(first_and_last, (run["trained_by"], run["right"]))]
        lengths = "{:.1f} -> {:.1f}".format(*first_and_last(run["length"]))
        gamed = run["found"].get(f"reward.gamed ({MODE})", ["", "never"])[1]
        kept = [f"{at} ({right_of(run, at):.2f})" for at in (run["kept"], run["kept_by_the_training_reward"])]
        table.add_row(name, *ends, lengths, str(gamed), *kept)
    console.print(table)


def right_of(run: Mapping[str, Any], version: int) -> float:
    """What `right` gave a version where it was evaluated: at its step, or after steps that trained nothing."""
    return next(value for step, value in run["right"].items() if int(step) >= version)


def first_and_last(values: Mapping[str, float]) -> tuple[float, float]:
    listed = list(values.values())
    return listed[0], listed[-1]


def plot(done: Mapping[str, Any], path: Path) -> None:
    """Both rewards of the gameable runs, of the mended ones, and the lengths of all; a line a seed."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.2))
    for name, run in done["runs"].items():
        gameable = name.startswith("gameable")
        axis, color = (left, "tab:red") if gameable else (middle, "tab:green")
        first = name.endswith(" 0")
        if gameable:
            draw(axis, run["trained_by"], "tab:red", "the reward it is trained by" if first else None, dashed=True)
        draw(axis, run["right"], color if not gameable else "tab:blue", "right" if first else None)
        draw(right, run["length"], color, name.split(",")[0] if first else None)
        if gameable and (gamed := run["found"].get(f"reward.gamed ({MODE})")):
            left.axvline(gamed[1], color="0.6", linewidth=0.8, label="reward.gamed" if first else None)
    left.set(title="trained by `mentions`", xlabel="step", ylabel="held-out prompts", ylim=(0, 1))
    middle.set(title="trained by `right`", xlabel="step", ylim=(0, 1))
    right.set(title="tokens a completion", xlabel="step", ylim=(0, None))
    for axis in (left, middle, right):
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def draw(axis: Any, values: Mapping[str, float], color: str, label: str | None, *, dashed: bool = False) -> None:
    axis.plot([int(step) for step in values], list(values.values()), "--" if dashed else "-", color=color, label=label)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--out", type=Path, default=Path("docs/hacking"))
    options = parser.parse_args()
    path = options.out.with_suffix(".json")
    done = json.loads(path.read_text()) if path.exists() else {"steps": options.steps, "runs": {}}
    if done["steps"] != options.steps:
        print(f"{path} is of {done['steps']} steps, not {options.steps}: move it away, or set --out", file=sys.stderr)
        return 2
    done.setdefault("before", said_before("gameable", steps=options.steps))
    for seed in options.seeds:
        for way in TRAINED_BY:
            if (name := f"{way}, seed {seed}") not in done["runs"]:
                done["runs"][name] = trained(way, seed=seed, steps=options.steps)
                path.write_text(json.dumps(done, indent=1) + "\n")
    report(done, Console(width=160))
    plot(done, options.out.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
