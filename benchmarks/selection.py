"""Does sampling ahead of training choose what is trained? A policy that never changes trains on the same everywhere.

    python benchmarks/selection.py --out runs/selection.jsonl [--seeds 0 1 2 3] [--steps 20] [--modes ...] [--quick]

    length    half of the prompts are answered at length; scoring takes `--per-token` seconds a token, so that long
              completions come late however fast the machine is
    slow      the scores of every fourth prompt take `--slow` seconds: the share of those among the trained

Each on-policy, in windows, with sampling ahead of training, and with in-flight updates, over the same prompts with the
same seeds. Learning rate 0: versions are published and synced, and are all the same policy. Prints for each mode the
mean over seeds and its standard error, the same of the first half of the steps (what comes late within a run is not
lost, and would still be late), and how many prompts that the synchronous run trained are missing (dropped), or were
drawn twice (redrawn). Ends with 1 if a mean differs from the synchronous one by more than two standard errors.

Finished runs are in `--out`, one a line, and are not run again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from groupwise.config.run import parse_config
from groupwise.run.display import LineDisplay
from groupwise.run.loop import run_loop
from groupwise.store.tracking import read_metrics, read_rollouts
from groupwise.tasks.starter.tasks import prompts

AHEAD = {"max_staleness": 2, "in_flight_updates": True}
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "window": {"weight_sync_interval": 3},
    "staleness 1": {"max_staleness": 1},
    "staleness 2": {"max_staleness": 2},
    "staleness 4": {"max_staleness": 4},
    "in-flight, keep": AHEAD,
    "in-flight, recompute": {**AHEAD, "in_flight_cache": "recompute"},
}
MEASURES = {"length": "mean length", "slow": "share of slow"}


def rows(measure: str) -> list[dict[str, Any]]:
    """Sums that are answered at once and at length, in a fixed mixture; every fourth is slow."""
    mixed = [row for style in ("think", "bare") for row in prompts(skill=["add"], style=style, split="train", n=200)]
    random.Random(0).shuffle(mixed)
    return [{**row, "slow": measure == "slow" and number % 4 == 0} for number, row in enumerate(mixed)]


async def late(
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    slow: Sequence[bool],
    *,
    per_token: float,
    slow_s: float,
) -> list[float]:
    """0 and 1 by turns, so that every group has a signal, after a while."""
    longest = max(map(len, completion_ids))
    await asyncio.sleep(per_token * longest + (slow_s if slow[0] else 0.0))
    return [float(i % 2) for i in range(len(completions))]


def run(measure: str, mode: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run: the mean of what is measured over all steps and the first half, and the prompts that were drawn."""
    waits = {"per_token": options.per_token if measure == "length" else 0.0, "slow_s": options.slow}
    with tempfile.TemporaryDirectory() as folder:
        config = parse_config(
            {
                "name": "selection",
                "model": "starter",
                "device": "cpu",
                "dtype": "float32",
                "folder": str(Path(__file__).parent.resolve()),
                "run_dir": folder + "/run",
                "seed": seed,
                "data": {"source": "selection:rows", "args": {"measure": measure}},
                "rewards": [{"function": "selection:late", "args": waits}],
                "scoring": {"workers": 0, "timeout_s": 600},
                "rollout": {"prompts_per_step": 4, "group_size": 4, "max_tokens": 40, "batch_rows": 16, **MODES[mode]},
                "train": {"steps": options.steps, "learning_rate": 0},
                "checkpoint": {"every": 0},
            }
        )
        with LineDisplay(options.steps, stream=sys.stderr) as display:
            directory = run_loop(config, display=display).run_dir
        steps = [step for step in read_metrics(directory / "metrics.jsonl") if "rollout/len_mean" in step]
    if len(steps) < options.steps:
        sys.exit(f"stopped after {len(steps)} of {options.steps} steps; what is finished is in {options.out}")
        drawn = [list(read_rollouts(directory / "rollouts" / f"step_{step['step']:06d}.jsonl")) for step in steps]
    by_step = [
        statistics.fmean(float(group.prompt.columns["slow"]) for group in groups)
        if measure == "slow"
        else statistics.fmean(len(r.completion.token_ids) for group in groups for r in group.rollouts)
        for groups in drawn
    ]
    return {
        "measure": measure,
        "mode": mode,
        "seed": seed,
        "steps": options.steps,
        "waits": waits,
        "all": statistics.fmean(by_step),
        "first_half": statistics.fmean(by_step[: len(by_step) // 2]),
        "drawn": [group.prompt.id for groups in drawn for group in groups],
        "staleness": statistics.fmean(step["rollout/staleness_mean"] for step in steps),
        "token_age": statistics.fmean(step["rollout/token_age_mean"] for step in steps),
        "versions": statistics.fmean(step["rollout/versions_mean"] for step in steps),
        "selection_len": statistics.fmean(step["rollout/selection_len"] for step in steps),
    }


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error; of one value there is none."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return statistics.fmean(values), error


def table(measure: str, found: Sequence[dict[str, Any]]) -> tuple[list[str], bool]:
    """The lines of a table in Markdown, and whether every mode agrees with the synchronous one."""
    lines = [
        f"| {measure} | {MEASURES[measure]} | first half | dropped | redrawn | staleness | age of a token | versions |",
        "|---|---|---|---|---|---|---|---|",
    ]
    reference = {each["seed"]: each for each in found if each["mode"] == "synchronous"}
    equal = True
    for mode in dict.fromkeys(each["mode"] for each in found):
        runs = [each for each in found if each["mode"] == mode]
        whole, half = (mean_and_error([each[key] for each in runs]) for key in ("all", "first_half"))
        pairs = [(Counter(reference[each["seed"]]["drawn"]), Counter(each["drawn"])) for each in runs]
        dropped = sum((before - now).total() for before, now in pairs)
        redrawn = sum(count - 1 for _, now in pairs for count in now.values())
        for (mean, error), key in ((whole, "all"), (half, "first_half")):
            expected, noise = mean_and_error([each[key] for each in reference.values()])
            equal &= not abs(mean - expected) > 2 * (error**2 + noise**2) ** 0.5
        more = [statistics.fmean(each[key] for each in runs) for key in ("staleness", "token_age", "versions")]
        lines.append(
            f"| {mode} | {whole[0]:.3f} ± {whole[1]:.3f} | {half[0]:.3f} ± {half[1]:.3f} | {dropped} | {redrawn} | "
            + " | ".join(f"{value:.2f}" for value in more)
            + " |"
        )
    return lines, equal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/selection.jsonl"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--per-token", type=float, default=0.02, help="seconds that scoring takes for each token")
    parser.add_argument("--slow", type=float, default=0.5, help="seconds that scoring takes for a slow prompt")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--quick", action="store_true", help="does it run? two modes, one seed, few steps")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.steps, options.modes = [0], 4, ["synchronous", "in-flight, keep"]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    wanted = [
        (measure, mode, seed)
        for measure in MEASURES
        for seed in options.seeds
        for mode in dict.fromkeys(["synchronous", *options.modes])
    ]
    runs = {(each["measure"], each["mode"], each["seed"]): each for each in done if each["steps"] == options.steps}
    for key in wanted:
        if key not in runs:
            runs[key] = run(*key, options)
            with options.out.open("a") as file:
                file.write(json.dumps(runs[key]) + "\n")
    agrees = True
    for measure in MEASURES:
        lines, equal = table(measure, [runs[key] for key in wanted if key[0] == measure])
        print("\n".join(lines), end="\n\n")
        agrees &= equal
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
