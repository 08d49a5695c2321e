"""What does overlap bring where scoring is slow? The main job with a reward that sleeps, one way and the other.

    python benchmarks/overlap.py [--sleep 0.05] [--steps 30] [--seeds 0 1 2] [--json FILE] [a.b=c ...]

    synchronous   every group scored in this process, one after another, then trained: the plain loop
    overlapped    scored as the groups come, several at once, while sampling and training go on

The reward waits `--sleep` seconds for each completion, as one that asks a service does: one after another, or, written
as an async function, for all of a group at once. Both sides run by turns in one invocation with the same prompts and
steps. Prints wall seconds of the steps, held-out accuracy and the ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from groupwise.config.run import load_config
from groupwise.run.loop import run_loop
from groupwise.store.tracking import read_metrics

SIDES = {
    "synchronous": ["scoring.workers=0", "rewards[0].function=overlap:sleepy"],
    "overlapped": [
        "scoring.workers=2",
        "rewards[0].function=overlap:sleepy_async",
        "rollout.max_staleness=1",
        "rollout.stream_groups=8",
    ],
}


def sleepy(completions: list[Any], sleep: float, **columns: Any) -> list[float]:
    """The exact match of the job, after a while for each completion."""
    for _ in completions:
        time.sleep(sleep)
    return _exact(completions, **columns)


async def sleepy_async(completions: list[Any], sleep: float, **columns: Any) -> list[float]:
    """The same, while others wait too."""
    await asyncio.gather(*(asyncio.sleep(sleep) for _ in completions))
    return _exact(completions, **columns)


def _exact(completions: list[Any], **columns: Any) -> list[float]:
    from groupwise.rewards.text import exact_match

    return exact_match(completions, columns["answer"], after="</think>")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/arithmetic.yaml")
    parser.add_argument("--sleep", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    here = Path(__file__).parent.resolve()
    common = [
        f"folder={here}",
        f"rewards[0].args={{sleep: {options.sleep}}}",
        f"train.steps={options.steps}",
        "eval.every=0",
        "output_dir=runs/overlap",
        *options.overrides,
    ]
    outcomes: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES}
    for seed in options.seeds:
        for name, keys in SIDES.items():
            config = load_config(options.config, [*common, *keys, f"seed={seed}", f"name={name}-{seed}"])
            result = run_loop(config)
            records = [m for m in read_metrics(result.run_dir / "metrics.jsonl") if "time/step_s" in m]
            steps_s = sum(m["time/step_s"] for m in records)
            outcomes[name].append({"steps_s": steps_s, "sampled": result.after["sampled"].mean()})
            print(f"{name}, seed {seed}: {outcomes[name][-1]}", file=sys.stderr)
    for name, each in outcomes.items():
        seconds, accuracy = (statistics.fmean(run[key] for run in each) for key in ("steps_s", "sampled"))
        print(f"{name:12}  {seconds:6.1f} s for {options.steps} steps   held out {accuracy:.1%}")
    ratios = [a["steps_s"] / b["steps_s"] for a, b in zip(*outcomes.values(), strict=True)]
    print(f"ratio         {statistics.median(ratios):.2f} (of {', '.join(f'{ratio:.2f}' for ratio in ratios)})")
    if options.json:
        options.json.write_text(json.dumps(outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
