"""Do the example environments teach? Held-out episode scores before and after; all turns against the first.

    python examples/envs/hotel_form.py
    python benchmarks/environments.py [--seeds 0 1 2] [--jobs 2] [--only hotel] [a.b=c ...]

Runs the configurations in examples/envs as they are, and the hotel once more with only the first turn of each episode
trained, in the same number of steps. Each run has one thread, `--jobs` of them at once. Prints a table.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

from ablation import job, one_thread, span

RUNS = {
    "calculator": ("examples/envs/calculator.yaml", []),
    "guess the number": ("examples/envs/guess_number.yaml", []),
    "hotel booking": ("examples/envs/hotel_booking.yaml", []),
    "hotel booking, first turn only": ("examples/envs/hotel_booking.yaml", ["env.train_turns=first"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2)))
    parser.add_argument("--only", help="runs whose name contains this")
    parser.add_argument("overrides", nargs="*", help="dotted overrides of every configuration")
    options = parser.parse_args()
    chosen = {name: run for name, run in RUNS.items() if not options.only or options.only in name}
    outcomes: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn"), initializer=one_thread) as pool:
        jobs = {
            pool.submit(job, config, [*options.overrides, *keys, f"seed={seed}"]): (name, seed)
            for seed in options.seeds
            for name, (config, keys) in chosen.items()
        }
        for done in as_completed(jobs):
            name, seed = jobs[done]
            outcomes[name].append(done.result())
            print(f"{name}, seed {seed}: {outcomes[name][-1]['after']}", file=sys.stderr, flush=True)
    print("| environment | sampled before | after | greedy before | after | wall s |\n|---|---|---|---|---|---|")
    for name, runs in outcomes.items():
        cells = [
            span([run[when][mode] for run in runs]) for mode in ("sampled", "greedy") for when in ("before", "after")
        ]
        wall = statistics.fmean(run["wall_s"] for run in runs)
        print(f"| {name} | {' | '.join(cells)} | {wall:.0f} |")


if __name__ == "__main__":
    main()
