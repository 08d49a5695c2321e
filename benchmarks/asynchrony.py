"""Learning against wall-clock where scoring is slow: on-policy, ahead of training, with in-flight updates.

    python benchmarks/asynchrony.py --out runs/asynchrony.jsonl [--seeds 0 1 2] [--steps 40] [--quick] [a.b=c ...]

The main job, with a reward that waits for each group as long as a step of training takes (`--wait` seconds; by default
measured first, in a short run without waiting, and kept in `--out`). Groups are scored beside each other in this
process. The engine has rows for a quarter of a step's completions, so that it has something to do whenever a version
comes, as one that is kept full.

Prints for each mode, as the mean of the seeds (and their range): seconds of a step, held-out accuracy after all steps,
and seconds until the reward of training, a mean of five steps, was at each of `--reach`; then staleness, the age of a
token and versions per completion. Evaluation is no part of the seconds.

Finished runs are in `--out`, one a line, and are not run again: what was interrupted goes on with the next run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from groupwise.config.run import load_config
from groupwise.run.display import LineDisplay
from groupwise.run.loop import run_loop
from groupwise.store.tracking import read_metrics

IN_FLIGHT = ["rollout.max_staleness=2", "rollout.in_flight_updates=true"]
MODES = {
    "synchronous": [],
    "staleness 1": ["rollout.max_staleness=1"],
    "staleness 2": ["rollout.max_staleness=2"],
    "in-flight, keep": IN_FLIGHT,
    "in-flight, recompute": [*IN_FLIGHT, "rollout.in_flight_cache=recompute"],
}
SMOOTHED = 5  # steps


async def waiting(completions: Sequence[Any], wait: float, **columns: Any) -> list[float | None]:
    """The exact match of the job, after a while for each group."""
    from groupwise.rewards.text import exact_match

    await asyncio.sleep(wait)
    return exact_match(completions, columns["answer"], after="</think>")


def run(mode: str, seed: int, wait: float, options: argparse.Namespace) -> dict[str, Any]:
    """What one run was like, step by step and after."""
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(
            options.config,
            [
                f"folder={Path(__file__).parent.resolve()}",
                "rewards[0].function=asynchrony:waiting",
                f"rewards[0].args={{wait: {wait}}}",
                "scoring.workers=0",
                "rollout.batch_rows=64",
                f"scoring.timeout_s={60 + 10 * wait}",
                f"train.steps={options.steps}",
                "eval.every=0",
                "checkpoint.every=0",
                f"run_dir={folder}/run",
                *MODES[mode],
                *options.overrides,
                f"seed={seed}",
            ],
        )
        with LineDisplay(options.steps, stream=sys.stderr) as display:
            result = run_loop(config, display=display)
        steps = [step for step in read_metrics(result.run_dir / "metrics.jsonl") if "time/step_s" in step]
    if len(steps) < options.steps:
        sys.exit(f"stopped after {len(steps)} of {options.steps} steps; what is finished is in {options.out}")
    return {
        "mode": mode,
        "seed": seed,
        "steps": options.steps,
        "wait": wait,
        "overrides": options.overrides,
        "reward": [step.get("reward/mean", 0.0) for step in steps],
        "step_s": [step["time/step_s"] for step in steps],
        "train_s": statistics.median(step["time/train_s"] for step in steps),
        "held_out": {name: each.mean() for name, each in result.after.items()},
        **{
            name: statistics.fmean(step.get(f"rollout/{name}", 0.0) for step in steps)
            for name in ("staleness_mean", "token_age_mean", "versions_mean")
        },
    }


def seconds_until(found: Mapping[str, Any], level: float) -> float | None:
    """When the smoothed reward was first at this level; None: never."""
    clock = list(accumulate(found["step_s"]))
    for end in range(SMOOTHED, len(clock) + 1):
        if statistics.fmean(found["reward"][end - SMOOTHED : end]) >= level:
            return clock[end - 1]
    return None


def cell(values: Sequence[float | None], form: str) -> str:
    """The mean of the seeds and their range; how many never came there."""
    known = [value for value in values if value is not None]
    if not known:
        return "never"
    mean, low, high = (format(value, form) for value in (statistics.fmean(known), min(known), max(known)))
    late = f", {len(values) - len(known)} never" if len(known) < len(values) else ""
    return f"{mean} ({low} to {high}{late})" if len(values) > 1 else mean


def table(found: Sequence[Mapping[str, Any]], levels: Sequence[float]) -> list[str]:
    """In Markdown, a line for each mode."""
    names = ["mode", "s/step", "greedy", "sampled", *(f"s to reward {level:g}" for level in levels)]
    names += ["staleness", "age of a token", "versions"]
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for mode in dict.fromkeys(each["mode"] for each in found):
        runs = [each for each in found if each["mode"] == mode]
        cells = [mode, cell([statistics.fmean(each["step_s"]) for each in runs], ".2f")]
        cells += [cell([each["held_out"].get(name) for each in runs], ".1%") for name in ("greedy", "sampled")]
        cells += [cell([seconds_until(each, level) for each in runs], ".1f") for level in levels]
        for name in ("staleness_mean", "token_age_mean", "versions_mean"):
            cells.append(format(statistics.fmean(each[name] for each in runs), ".2f"))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/arithmetic.yaml")
    parser.add_argument("--out", type=Path, default=Path("runs/asynchrony.jsonl"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--wait", type=float, help="seconds that scoring a group takes; default: a step of training")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--reach", type=float, nargs="+", default=[0.5, 0.7, 0.85])
    parser.add_argument("--quick", action="store_true", help="does it run? three modes, one seed, few steps")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.steps, options.modes = [0], 6, ["synchronous", "staleness 1", "in-flight, keep"]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []

    def keep(line: Mapping[str, Any]) -> None:
        with options.out.open("a") as file:
            file.write(json.dumps(line) + "\n")

    wait = options.wait
    if wait is None:
        measured = [each["measured_wait"] for each in done if "measured_wait" in each]
        if not measured:
            short = argparse.Namespace(**{**vars(options), "steps": 6})
            measured = [run("synchronous", 0, 0.0, short)["train_s"]]
            keep({"measured_wait": measured[0]})
        wait = measured[-1]
    same = {"steps": options.steps, "wait": wait, "overrides": options.overrides}
    runs = {(e["mode"], e["seed"]): e for e in done if "mode" in e and all(e[key] == same[key] for key in same)}
    wanted = [(mode, seed) for seed in options.seeds for mode in options.modes]  # by turns: the machine is not the same
    for key in wanted:
        if key not in runs:
            runs[key] = run(*key, wait, options)
            keep(runs[key])
    wanted.sort(key=lambda key: options.modes.index(key[0]))
    print(f"{options.steps} steps, scoring waits {wait:.2f} s for each group\n")
    print("\n".join(table([runs[key] for key in wanted], options.reach)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
