"""How do time and memory grow? A training pass and a rollout while one size doubles and the others stay.

    python benchmarks/scaling.py                     writes docs/scaling.png and docs/scaling.json
    python benchmarks/scaling.py --model 25M         instead of the starter's shape (random weights in any case)
    python benchmarks/scaling.py --quick             does it run?

    prompt       tokens of each prompt
    completion   tokens of each completion
    group        completions of each prompt
    group, C=1   the same with completions of one token: what remains is what prompts cost
    prompts      prompts in the batch
    vocabulary   token ids of the model

Every point is a process of its own, one for the pass and one for the rollout. Seconds are medians after a first time;
memory is the most that was resident beyond the loaded model, the first time included. A pass is
`Learner.forward_backward` (adapter of rank 16, micro-batches of 8192 tokens, which bound memory as batches grow), a
rollout `LocalEngine.generate` under an adapter, all at the same time and to full length.

Dotted lines double with the size. The dashed line is the memory that float32 logits of all completion tokens would take
if they existed at once. What there is to see: no logits in the memory of training, however large the vocabulary and
long the prompt; prompts cost the same whatever the group, in time as in memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from step_sides import MIB, peak, resident, restart_peak
from step_vs_trl import machine
from subjects import Shape, load, random_ids, samples_of, save_adapter

from groupwise.algo.loss import resolve_loss
from groupwise.engine.local import LocalEngine
from groupwise.train.learner import Learner
from groupwise.types import PolicyVersion, SamplingParams, SamplingRequest

SIDES = ("training", "rollout")
AXES = ("prompt", "completion", "group", "group, C=1", "prompts", "vocabulary")
VERSION = PolicyVersion("bench", 1)

Point = tuple[Shape, int]  # and the vocabulary


def points_of(axis: str, base: Shape, vocabulary: int, doublings: int) -> list[Point]:
    """The points along an axis, from the base on."""
    factors = [2**i for i in range(doublings + 1)]
    if axis == "vocabulary":
        return [(base, vocabulary * factor) for factor in factors]
    start = replace(base, completion=1) if axis == "group, C=1" else base
    name = axis.partition(",")[0]
    return [(replace(start, **{name: getattr(start, name) * factor}), vocabulary) for factor in factors]


def size_of(axis: str, point: Point) -> int:
    """Where along an axis a point is."""
    return point[1] if axis == "vocabulary" else getattr(point[0], axis.partition(",")[0])


# -- one point, in this process ----------------------------------------------------------------------------------------


def measured(run: Callable[[], object], *, repeats: int) -> dict[str, float]:
    """Median seconds after a first time, and the most memory beyond what was resident before."""
    loaded, seconds = resident(), []
    restart_peak()
    for _ in range(repeats + 1):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return {"seconds": statistics.median(seconds[1:]), "mib": (peak() - loaded) / MIB}


def training(model: str, shape: Shape, vocabulary: int, *, repeats: int) -> dict[str, float]:
    """A forward and backward pass."""
    learner, samples, spec = Learner(load(model, vocabulary=vocabulary)), samples_of(shape), resolve_loss("grpo")

    def run() -> None:
        learner.forward_backward(samples, spec)
        learner.zero_grad()

    return measured(run, repeats=repeats)


def rollout(model: str, shape: Shape, vocabulary: int, *, repeats: int) -> dict[str, float]:
    """All completions of a batch."""
    base = load(model, vocabulary=vocabulary)
    engine = LocalEngine(base, max_rows=shape.rows)
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        save_adapter(base, Path(folder))
        engine.load(VERSION, Path(folder))
    params = SamplingParams(max_tokens=shape.completion, ignore_eos=True, seed=0)
    requests = [
        SamplingRequest(prompt_ids=random_ids(shape.prompt, seed=p), params=params, n=shape.group, version=VERSION)
        for p in range(shape.prompts)
    ]

    def run() -> None:
        done = engine.generate(requests)
        assert sum(len(c.token_ids) for each in done for c in each) == shape.rows * shape.completion

    try:
        return measured(run, repeats=repeats)
    finally:
        engine.close()


# -- all of them -------------------------------------------------------------------------------------------------------


def spawn(side: str, point: Point, options: argparse.Namespace) -> dict[str, float]:
    """One point in a fresh process."""
    what = {"side": side, "shape": asdict(point[0]), "vocabulary": point[1]}
    settings = ["--model", options.model, "--repeats", str(options.repeats), "--threads", str(options.threads)]
    command = [sys.executable, __file__, *settings, "--point", json.dumps(what)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{side} at {what} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def logits_mib(point: Point) -> float:
    """What float32 logits of all completion tokens would take."""
    shape, vocabulary = point
    return shape.rows * shape.completion * vocabulary * 4 / MIB


def sweep(options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Every point of every axis; a point that is on several axes is measured once."""
    known: dict[tuple[str, Point], dict[str, float]] = {}
    lines = []
    for axis in options.axes:
        for point in points_of(axis, options.shape, options.vocabulary, options.doublings):
            for side in SIDES:
                if (side, point) not in known:
                    known[side, point] = spawn(side, point, options)
                found = known[side, point]
                place = {"axis": axis, "size": size_of(axis, point), "side": side, "logits_mib": logits_mib(point)}
                lines.append({**place, "shape": asdict(point[0]), "vocabulary": point[1], **found})
                console.print(f"  {axis} {place['size']}, {side}: {found['seconds']:.3f} s, {found['mib']:.0f} MiB")
    return lines


def along(lines: list[dict[str, Any]], axis: str, side: str) -> list[dict[str, Any]]:
    return [line for line in lines if line["axis"] == axis and line["side"] == side]


def table_of(lines: list[dict[str, Any]]) -> Table:
    """From the first point of an axis to the last: how many times as much."""
    table = Table(
        "size", "from", "to", title="Growth", caption="last point over first; memory is beyond the loaded model"
    )
    for side in SIDES:
        for heading in (f"{side}, s", "times", f"{side}, MiB", "times"):
            table.add_column(heading, justify="right")
    for axis in dict.fromkeys(line["axis"] for line in lines):
        first, last = along(lines, axis, SIDES[0])[0]["size"], along(lines, axis, SIDES[0])[-1]["size"]
        cells = []
        for side in SIDES:
            start, *_, end = along(lines, axis, side)
            for key, digits in (("seconds", ".2f"), ("mib", ".0f")):
                ratio = end[key] / start[key] if start[key] > 0 else float("nan")
                cells += [f"{start[key]:{digits}} → {end[key]:{digits}}", f"{ratio:.1f}"]
        table.add_row(f"{axis} (x{last // first})", str(first), str(last), *cells)
    return table


def plot(lines: list[dict[str, Any]], path: Path) -> None:
    """Time above, memory below; a column per axis."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    axes = list(dict.fromkeys(line["axis"] for line in lines))
    figure, panels = plt.subplots(
        2, len(axes), figsize=(3.1 * len(axes), 6.2), sharey="row", sharex="col", squeeze=False
    )
    for column, axis in enumerate(axes):
        points = {side: along(lines, axis, side) for side in SIDES}
        sizes = [point["size"] for point in points[SIDES[0]]]
        for panel, key in zip(panels[:, column], ("seconds", "mib"), strict=True):
            for side, colour in zip(SIDES, ("tab:blue", "tab:orange"), strict=True):
                values = [point[key] for point in points[side]]
                panel.plot(sizes, values, marker="o", color=colour, label=side)
                panel.plot(sizes, [values[0] * size / sizes[0] for size in sizes], ":", color=colour, linewidth=0.8)
            panel.set(xscale="log", yscale="log")
            panel.set_xticks(sizes, [str(size) for size in sizes])
            panel.minorticks_off()
            panel.grid(alpha=0.3)
        logits = [point["logits_mib"] for point in points[SIDES[0]]]
        panels[1, column].plot(sizes, logits, "--", color="grey", label="logits, if they existed")
        panels[0, column].set_title(axis)
    panels[0, 0].set_ylabel("seconds")
    panels[1, 0].set_ylabel("MiB beyond the loaded model")
    panels[1, 0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="192x4", help="25M, 150M or HIDDENxLAYERS; 192x4 is the starter's shape")
    parser.add_argument("--shape", type=Shape.parse, default=Shape(128, 32, 8, 4), metavar="P,C,G,PROMPTS")
    for name, default in {"vocabulary": 4096, "doublings": 3, "repeats": 3, "threads": torch.get_num_threads()}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES), metavar="AXIS")
    parser.add_argument("--out", type=Path, default=Path("docs/scaling"), help="OUT.png and OUT.json")
    parser.add_argument("--quick", action="store_true", help="a smoke run: two axes, one doubling; OUT is not written")
    parser.add_argument("--point", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.axes, options.doublings, options.repeats = ["group, C=1", "vocabulary"], 1, 1
        options.out = Path(tempfile.mkdtemp(prefix="scaling-")) / "scaling"
    return options


def one_point(what: Mapping[str, Any], options: argparse.Namespace) -> dict[str, float]:
    """What a process of its own does."""
    run = training if what["side"] == "training" else rollout
    return run(options.model, Shape(**what["shape"]), what["vocabulary"], repeats=options.repeats)


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    if options.point:
        print(json.dumps(one_point(options.point, options)))
        return
    console, about = Console(width=130), {**machine(options.threads), "model": options.model}
    console.print("  ".join(f"{name} {value}" for name, value in about.items()), soft_wrap=True, highlight=False)
    lines = sweep(options, console)
    console.print(table_of(lines))
    plot(lines, options.out.with_suffix(".png"))
    options.out.with_suffix(".json").write_text(json.dumps({"machine": about, "points": lines}, indent=1) + "\n")
    console.print(f"written: {options.out}.png and {options.out}.json", style="dim")


if __name__ == "__main__":
    main()
