"""Does training through a harness teach? A coding agent that is a program of its own, before and after.

    python benchmarks/harness.py [--seeds 0 1 2] [--out runs/harness.json] [a.b=c ...]

Runs examples/envs/repair.yaml once for each seed. Each episode is a process; its reward is the share of the tests of
its repository that pass. Writes a record for each seed as soon as its run ends, and goes on where it was stopped: seeds
that are in the file are not run again, and a run that was cut goes on from its last checkpoint. Prints a table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
CONFIG = Path(__file__).parent.parent / "examples" / "envs" / "repair.yaml"


def record(seed: int, overrides: list[str], place: Path) -> dict[str, Any]:
    """One run: its evaluations, training rewards by step, and what its programs cost."""
    from groupwise.run.config_file import load_config
    from groupwise.run.loop import run_loop
    from groupwise.store.tracking import read_metrics

    started = time.monotonic()
    keys = [f"seed={seed}", f"name=repair-{seed}", f"run_dir={place}", "resume=auto", *overrides]
    result = run_loop(load_config(CONFIG, keys))
    if result.interrupted:
        raise SystemExit("stopped: the same call goes on from here")
    steps = [each for each in read_metrics(result.run_dir / "metrics.jsonl") if "reward/mean" in each]
    return {
        "seed": seed,
        "overrides": overrides,
        "steps": len(steps),
        "before": {mode: each.mean() for mode, each in result.before.items()},
        "after": {mode: each.mean() for mode, each in result.after.items()},
        "rewards": [each["reward/mean"] for each in steps],
        "program_s": statistics.fmean(each["env/program_s"] for each in steps),
        "program_failed": statistics.fmean(each["env/program_failed"] for each in steps),
        "episodes_failed": statistics.fmean(each["env/failed_frac"] for each in steps),
        "wall_s": time.monotonic() - started,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/harness.json"))
    parser.add_argument("overrides", nargs="*", help="dotted overrides of the configuration")
    options = parser.parse_args()
    records = json.loads(options.out.read_text()) if options.out.exists() else []
    for seed in options.seeds:
        if any(each["seed"] == seed and each["overrides"] == options.overrides for each in records):
            continue
        options.out.parent.mkdir(parents=True, exist_ok=True)
        records.append(record(seed, options.overrides, options.out.with_suffix("") / f"seed-{seed}"))
        partial = options.out.with_suffix(".partial")
        partial.write_text(json.dumps(records, indent=1))
        partial.replace(options.out)
    print(
        "| seed | steps | before | after | failed programs | s of a program | wall s |\n|---|---|---|---|---|---|---|"
    )
    for each in records:
        scores = [", ".join(f"{mode} {each[when][mode]:.1%}" for mode in each[when]) for when in ("before", "after")]
        print(
            f"| {each['seed']} | {each['steps']} | {scores[0]} | {scores[1]} | {each['program_failed']:.1%} | "
            f"{each['program_s']:.2f} | {each['wall_s']:.0f} |"
        )


if __name__ == "__main__":
    main()
