"""Does it learn, and only when it should? The main job for several seeds, and its controls.

    python benchmarks/learning.py [--config configs/arithmetic.yaml] [--seeds 0 1 2] [--out docs/learning] [a.b=c ...]
    python benchmarks/learning.py --before earlier.json        with the curves of an earlier version beside

    seeds      the job as it is; held-out accuracy before and after, wall time
    shuffled   rewards shuffled within each group: the same distribution of rewards, no information. Must not gain.
    lr 0       learning rate 0. The logits after training must equal those before, bit for bit.

Prints a table, writes OUT.json with everything and OUT.png with the curves. Exits 1 if a control fails. The OUT.json of
an earlier version shows whether what was done since, for speed say, changed the curves by more than seeds do.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import torch
from rich.console import Console
from rich.table import Table

from groupwise.config.run import RunConfig, load_config
from groupwise.engine.local import LocalEngine
from groupwise.model.load import load_model
from groupwise.rewards.base import load_rewards
from groupwise.rewards.call import RewardFunction
from groupwise.run.loop import RunResult, run_loop
from groupwise.store.adapters import AdapterStore
from groupwise.store.tracking import read_metrics
from groupwise.types import PolicyVersion, SamplingParams, SamplingRequest

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main() -> int:
    options = parse_options()
    runs: dict[str, dict[str, Any]] = {}
    for seed in options.seeds:
        runs[f"seed {seed}"] = job(config_of(options, f"seed={seed}", f"name=learning-seed-{seed}"))
    shuffled = config_of(options, f"seed={options.seeds[0]}", "name=learning-shuffled")
    runs["shuffled rewards"] = job(shuffled, rewards=[without_information(f) for f in load_rewards(shuffled.rewards)])
    frozen = config_of(options, "name=learning-lr-0", "train.learning_rate=0", "train.steps=5", "train.warmup_steps=0")
    runs["learning rate 0"] = job(frozen)
    runs["learning rate 0"]["bit_identical"] = is_bit_identical(frozen, runs["learning rate 0"])
    report(runs, options.out, steps=config_of(options).train.steps, before=seeds_of(options.before))
    return verdict(runs)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/arithmetic.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("docs/learning"))
    parser.add_argument("--before", type=Path, metavar="FILE", help="OUT.json of an earlier version")
    parser.add_argument("overrides", nargs="*", help="dotted overrides of the configuration")
    return parser.parse_args()


def config_of(options: argparse.Namespace, *overrides: str) -> RunConfig:
    return load_config(options.config, ["output_dir=runs/learning", *options.overrides, *overrides])


def seeds_of(path: Path | None) -> dict[str, dict[str, Any]]:
    """The seeds that an earlier version wrote, by name."""
    runs = {} if path is None else json.loads(path.read_text())["runs"]
    return {f"{name}, before": outcome for name, outcome in runs.items() if name.startswith("seed")}


def job(config: RunConfig, *, rewards: list[RewardFunction] | None = None) -> dict[str, Any]:
    """One run -> its wall time, evaluations and curves."""
    started = time.monotonic()
    result: RunResult = run_loop(config, rewards=rewards)
    wall_s = time.monotonic() - started
    by = config.eval.by if config.eval else None
    return {
        "wall_s": wall_s,
        "before": {key: v for each in result.before.values() for key, v in each.metrics(by=by).items()},
        "after": {key: v for each in result.after.values() for key, v in each.metrics(by=by).items()},
        "metrics": read_metrics(result.run_dir / "metrics.jsonl"),
        "run_dir": str(result.run_dir),
        "version": str(result.version),
    }


def without_information(function: RewardFunction) -> RewardFunction:
    """The same rewards, dealt at random to the completions of the group."""
    dice = random.Random(0)

    def shuffled(completions: list[Any], **columns: Any) -> list[float | None]:
        rewards = list(function.function(completions=completions, **function.args, **function.accepted(columns)))
        dice.shuffle(rewards)
        return rewards

    return replace(function, function=shuffled, args={}, spec=None)  # of which no process could load another


def is_bit_identical(config: RunConfig, outcome: dict[str, Any]) -> bool:
    """Whether the final adapter's log-probabilities equal the base model's exactly, on tokens sampled from the base."""
    base = load_model(config.model, device=config.device, dtype=config.dtype)
    engine = LocalEngine(base)
    version = PolicyVersion.parse(outcome["version"])
    engine.load(version, AdapterStore(Path(outcome["run_dir"]) / "adapters").path(version))
    prompt = tuple(base.tokenizer("What is 47 + 138?")["input_ids"])
    params = SamplingParams(max_tokens=64, seed=1, ignore_eos=True)
    one, other = engine.generate(
        [SamplingRequest(prompt_ids=prompt, params=params, n=4, version=v) for v in (PolicyVersion.base(), version)]
    )
    engine.close()
    return [c.logprobs for c in one] == [c.logprobs for c in other]


def report(runs: dict[str, dict[str, Any]], out: Path, *, steps: int, before: dict[str, dict[str, Any]]) -> None:
    """The table on stdout, OUT.json and OUT.png."""
    keys = list(runs[next(iter(runs))]["before"])
    table = Table("run", *(key.removeprefix("eval/").removesuffix("/reward") for key in keys), "wall s")
    for name, outcome in (runs | before).items():
        cells = [f"{outcome['before'][key]:.1%} -> {outcome['after'][key]:.1%}" for key in keys]
        table.add_row(name, *cells, f"{outcome['wall_s']:.0f}")
    Console(width=160).print(table)
    machine = {"machine": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    out.parent.mkdir(parents=True, exist_ok=True)
    written = {name: {k: v for k, v in r.items() if k != "run_dir"} for name, r in runs.items()}
    out.with_suffix(".json").write_text(json.dumps({"machine": machine, "torch": torch.__version__, "runs": written}))
    plot(runs | before, out.with_suffix(".png"), steps=steps)


def plot(runs: dict[str, dict[str, Any]], path: Path, *, steps: int) -> None:
    """Mean training reward, and held-out accuracy, over steps; a line per run."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for name, outcome in runs.items():
        style: dict[str, Any] = {"linestyle": "-" if name.startswith("seed") else "--", "label": name}
        if name.endswith("before"):
            style |= {"color": "0.6", "linewidth": 0.8, "zorder": 0}
        training = [(m["step"], m["reward/mean"]) for m in outcome["metrics"] if "reward/mean" in m]
        left.plot(*zip(*training, strict=True), **style)
        evaluation = [(m["step"], m["eval/sampled/reward"]) for m in outcome["metrics"] if "eval/sampled/reward" in m]
        right.plot(*zip(*evaluation, strict=True), marker="o", **style)
    left.set(title="reward of the training rollouts", xlabel="step", ylabel="mean reward", xlim=(0, steps), ylim=(0, 1))
    right.set(title="held-out prompts, sampled at temperature 1", xlabel="step")
    right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def verdict(runs: dict[str, dict[str, Any]]) -> int:
    """0 if the controls behaved: no gain beyond four standard errors without information, nothing moved at rate 0."""
    control = runs["shuffled rewards"]
    key = "eval/sampled/reward"
    gain = control["after"][key] - control["before"][key]
    noise = 4 * (0.5 / 512) ** 0.5  # four standard errors of a difference of two proportions of 512 prompts, at most
    failures = []
    if gain > noise:
        failures.append(f"shuffled rewards gained {gain:.1%}, more than noise explains ({noise:.1%})")
    if not runs["learning rate 0"]["bit_identical"]:
        failures.append("learning rate 0 changed the logits")
    print("\n".join(failures) or "the controls behaved", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
