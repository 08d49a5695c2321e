"""Does training through a harness teach? Programs that know only an OpenAI client or URL, before and after.

    pip install openai-agents
    python benchmarks/harness.py [--examples repair] [--seeds 0 1 2] [--shuffled 0] [--out OUT.json] [a.b=c ...]

    repair                      examples/envs/repair.yaml: a coding agent, each episode a process
    openai_agents_calculator    examples/envs/openai_agents_calculator.yaml: an agent of OpenAI's Agents SDK, as it is

Runs each example once for each seed, and once more for each seed of `--shuffled` with the rewards of training shuffled
within their groups: the same distribution of rewards, no information, so that nothing may be learned. Writes a record
for each run as soon as it ends, and goes on where it was stopped: runs that are in the file are not made again, and one
that was cut goes on from its last checkpoint. Prints a table of each example: mean held-out scores, and seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

if TYPE_CHECKING:
    from groupwise.tasks.rollout_sources import RolloutSource
    from groupwise.types import Prompt, RolloutGroup

FOLDER = Path(__file__).parent.parent / "examples" / "envs"
EXAMPLES = ("repair", "openai_agents_calculator")


@dataclass(frozen=True)
class Shuffled:
    """A `RolloutSource` whose rewards are dealt at random within each group. Groups of one, of which evaluations are,
    stay as they are."""

    source: RolloutSource
    dice: random.Random

    def prepare(self, prompt: Prompt) -> Prompt:
        return self.source.prepare(prompt)

    def begin(self, *arguments: Any, **options: Any) -> list[Awaitable[RolloutGroup]]:
        return [self._dealt(group) for group in self.source.begin(*arguments, **options)]

    def close(self) -> None:
        self.source.close()

    async def _dealt(self, pending: Awaitable[RolloutGroup]) -> RolloutGroup:
        group = await pending
        rewards = [rollout.reward for rollout in group.rollouts]
        self.dice.shuffle(rewards)
        pairs = zip(group.rollouts, rewards, strict=True)
        return replace(group, rollouts=tuple(replace(rollout, reward=reward) for rollout, reward in pairs))


@contextmanager
def without_information(seed: int) -> Iterator[None]:
    """Within it, the rewards of runs are `Shuffled`."""
    from groupwise.run import assemble

    open_play: Callable[..., RolloutSource] = assemble.open_play
    assemble.open_play = lambda *arguments: Shuffled(open_play(*arguments), random.Random(seed))
    try:
        yield
    finally:
        assemble.open_play = open_play


def train(example: str, seed: int, overrides: list[str], place: Path, *, shuffled: bool) -> dict[str, Any]:
    """One run: its evaluations, training rewards by step, failures and seconds."""
    from groupwise.run.config_file import load_config
    from groupwise.run.loop import run_loop
    from groupwise.store.tracking import read_metrics

    started = time.monotonic()
    keys = [f"seed={seed}", f"name={place.name}", f"run_dir={place}", "resume=auto", *overrides]
    config = load_config(FOLDER / f"{example}.yaml", keys)
    if shuffled:
        with without_information(seed):
            result = run_loop(config)
    else:
        result = run_loop(config)
    if result.interrupted:
        raise SystemExit("stopped: the same call goes on from here")
    steps = [each for each in read_metrics(result.run_dir / "metrics.jsonl") if "reward/mean" in each]
    return {
        "steps": len(steps),
        "before": {mode: each.mean() for mode, each in result.before.items()},
        "after": {mode: each.mean() for mode, each in result.after.items()},
        "rewards": [each["reward/mean"] for each in steps],
        "means": {
            name: statistics.fmean(each[name] for each in steps)
            for name in ("time/step_s", "env/failed_frac", "env/forks", "env/program_s", "env/program_failed")
            if name in steps[0]
        },
        "wall_s": time.monotonic() - started,
    }


def table(example: str, records: list[dict[str, Any]]) -> list[str]:
    """Lines of Markdown, a row for each run."""
    lines = [f"{example}.yaml", "", "| seed | steps | before | after | failed episodes | s of a step | wall s |"]
    lines.append("|" + "---|" * 7)
    for each in records:
        before, after = (
            ", ".join(f"{mode} {score:.1%}" for mode, score in each[when].items()) for when in ("before", "after")
        )
        seed = f"{each['seed']}, rewards shuffled" if each["shuffled"] else each["seed"]
        means = each["means"]
        lines.append(
            f"| {seed} | {each['steps']} | {before} | {after} | {means['env/failed_frac']:.1%} | "
            f"{means['time/step_s']:.1f} | {each['wall_s']:.0f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", nargs="+", choices=EXAMPLES, default=list(EXAMPLES))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--shuffled", type=int, nargs="*", default=[], help="seeds of the control")
    parser.add_argument("--out", type=Path, default=Path("runs/harness.json"))
    parser.add_argument("overrides", nargs="*", help="dotted overrides of the configurations")
    options = parser.parse_args()
    records = json.loads(options.out.read_text()) if options.out.exists() else []
    wanted = [(seed, False) for seed in options.seeds] + [(seed, True) for seed in options.shuffled]
    for example in options.examples:
        for seed, shuffled in wanted:
            run = {"example": example, "seed": seed, "shuffled": shuffled, "overrides": options.overrides}
            if any(run.items() <= each.items() for each in records):
                continue
            place = options.out.with_suffix("") / f"{example}-{seed}{'-shuffled' * shuffled}"
            place.parent.mkdir(parents=True, exist_ok=True)
            records.append(run | train(example, seed, options.overrides, place, shuffled=shuffled))
            partial = options.out.with_suffix(".partial")
            partial.write_text(json.dumps(records, indent=1))
            partial.replace(options.out)
    for example in options.examples:
        if rows := [each for each in records if each["example"] == example]:
            print("\n".join([*table(example, rows), ""]))


if __name__ == "__main__":
    main()
