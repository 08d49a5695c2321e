"""What does each choice of the recipe bring? The main job, shorter, with one thing changed at a time.

    python benchmarks/ablation.py [--seeds 0 1 2] [--jobs 2] [--out docs/ablation] [a.b=c ...]

The losses with 1 and 4 optimizer steps a batch; what the mean is over; logits of a 16-bit model; how often the sampling
policy is synced; how stale a group may be, with and without the correction for it; replay. `--only TEXT ...` takes the
settings whose name contains one of them. Prints a table, writes OUT.json and OUT.md. Each run has one thread;
`--jobs` of them run at once, so that wall times compare with each other and not with other machines. Exits 1 if a
setting ends below the base model, or if never syncing is not worse than syncing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

LOSSES = ("grpo", "importance_sampling", "reinforce", "dapo", "dro", "gspo", "cispo", "dppo", "dppo_kl")
SHORT = ["train.steps=20", "rollout.prompts_per_step=16", "eval.every=0", "eval.data.args.n=192", "rollout.refill=2.0"]
METRIC = "eval/{}/reward"


def settings() -> dict[str, list[str]]:
    """Name -> overrides."""
    found: dict[str, list[str]] = {}
    for loss in LOSSES:
        for inner in (1, 4):
            found[f"{loss}, {inner} inner step{'s' * (inner > 1)}"] = [
                f"algo.policy_loss={loss}",
                f"train.minibatches={inner}",
            ]
    for reduction in ("token_mean", "prompt_mean"):
        found[f"grpo, 4 inner steps, {reduction}"] = ["train.minibatches=4", f"algo.reduction={reduction}"]
    for cast in ("none", "float32"):
        found[f"grpo, bfloat16, cast_lm_head {cast}"] = ["dtype=bfloat16", f"cast_lm_head={cast}"]
    for interval in (4, 0):
        found[f"grpo, weight_sync_interval {interval}"] = [f"rollout.weight_sync_interval={interval}"]
    stale = ["rollout.max_staleness=2"]
    found["grpo, max_staleness 2"] = stale
    found["grpo, max_staleness 2, tis_token"] = [*stale, "algo.correction=tis_token", "algo.anchor=old"]
    for correction in ("mask_token", "mask_sequence"):
        found[f"grpo, max_staleness 2, {correction}"] = [*stale, f"algo.correction={correction}", "algo.anchor=old"]
    found["grpo, replay"] = ["rollout.refill=1.0", "rollout.replay.size=64", "rollout.replay.share=0.25"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/arithmetic.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2)))
    parser.add_argument("--out", type=Path, default=Path("docs/ablation"))
    parser.add_argument("--only", nargs="+", help="settings whose name contains one of these")
    parser.add_argument("overrides", nargs="*", help="dotted overrides of the configuration")
    options = parser.parse_args()
    chosen = {
        name: keys
        for name, keys in settings().items()
        if not options.only or any(part in name for part in options.only)
    }
    outcomes: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn"), initializer=one_thread) as pool:
        jobs = {
            pool.submit(job, options.config, [*SHORT, *options.overrides, *keys, f"seed={seed}"]): (name, seed)
            for seed in options.seeds
            for name, keys in chosen.items()
        }
        for done in as_completed(jobs):
            name, seed = jobs[done]
            outcomes[name].append({"seed": seed, **done.result()})
            print(f"{name}, seed {seed}: {outcomes[name][-1]['after']}", file=sys.stderr, flush=True)
    lines = table(outcomes, command=" ".join(["python", *sys.argv]))
    print("\n".join(lines))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(outcomes, indent=1))
    options.out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    return verdict(outcomes)


def one_thread() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def job(config: str, overrides: list[str]) -> dict[str, Any]:
    """One run -> its evaluations, its wall time, its last metrics."""
    from groupwise.config.run import load_config
    from groupwise.run.loop import run_loop
    from groupwise.store.tracking import read_metrics

    started = time.monotonic()
    result = run_loop(
        load_config(config, ["output_dir=runs/ablation", f"name=ablation-{os.getpid()}-{time.time_ns()}", *overrides])
    )
    records = [m for m in read_metrics(result.run_dir / "metrics.jsonl") if "reward/mean" in m]
    return {
        "wall_s": time.monotonic() - started,
        "before": {mode: each.mean() for mode, each in result.before.items()},
        "after": {mode: each.mean() for mode, each in result.after.items()},
        "staleness": statistics.fmean(m.get("rollout/staleness_mean", 0.0) for m in records),
        "replayed": statistics.fmean(m.get("replay/groups", 0.0) for m in records),
    }


def table(outcomes: dict[str, list[dict[str, Any]]], *, command: str) -> list[str]:
    """Markdown: means over the seeds, with the smallest and the largest."""
    lines = [f"`{command}`", "", "| setting | sampled | greedy | staleness | wall s |", "|---|---|---|---|---|"]
    runs = [run for each in outcomes.values() for run in each]
    base = [span([run["before"][mode] for run in runs]) for mode in ("sampled", "greedy")]
    lines.append(f"| the base model | {base[0]} | {base[1]} | | |")
    for name, each in outcomes.items():
        cells = [span([run["after"][mode] for run in each]) for mode in ("sampled", "greedy")]
        staleness = statistics.fmean(run["staleness"] for run in each)
        wall = statistics.fmean(run["wall_s"] for run in each)
        lines.append(f"| {name} | {cells[0]} | {cells[1]} | {staleness:.2f} | {wall:.0f} |")
    return lines


def span(values: list[float]) -> str:
    return f"{statistics.fmean(values):.1%} ({min(values):.1%} to {max(values):.1%})"


def verdict(outcomes: dict[str, list[dict[str, Any]]]) -> int:
    """0 if every setting learned, and never syncing was worse than syncing each step."""
    failures = []
    for name, runs in outcomes.items():
        after, before = (statistics.fmean(run[when]["sampled"] for run in runs) for when in ("after", "before"))
        if after < before:
            failures.append(f"{name}: {after:.1%} is below the base model's {before:.1%}")
    synced, never = ("grpo, 1 inner step", "grpo, weight_sync_interval 0")
    if synced in outcomes and never in outcomes:
        means = [statistics.fmean(run["after"]["sampled"] for run in outcomes[name]) for name in (synced, never)]
        if means[1] >= means[0]:
            failures.append(f"never syncing reached {means[1]:.1%}, syncing each step {means[0]:.1%}")
    print("\n".join(failures) or "every setting is above the base, and never syncing is worse", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
