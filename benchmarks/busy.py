"""How much slower does a busy machine make it? Sampling and whole steps beside 0, 1, 2 and 4 processes that only count.

    python benchmarks/busy.py                         sampling: the starter and 25M parameters; then a step beside TRL's
    python benchmarks/busy.py --models starter --no-step
    python benchmarks/busy.py --quick                 does it run?

A hog is a process of normal priority that never sleeps. With N of them on C cores a fair share is C / (C + N) of the
machine for a side with C threads, and less for one with fewer threads; what is lost beyond that is lost by waiting:
an operation on several threads ends when the last of them has been given a core, and a decode step has hundreds.

    ours                    the local engine as it is by default
    generate, 1 thread      transformers' `generate` with the PEFT model: no thread waits for another
    generate, C threads     ... as torch does by default

All sides sample the same: `rollouts.py` says what, and checks it there. Sides take turns, and the hogs start and stop
around every measurement. A rate's ratio is to the same side without hogs; the last column is ours over the better of
the two others on the same busy machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from rich.console import Console
from rich.table import Table
from rollouts import VERSION, Peer, Work, by_requests, seconds_of
from step_sides import GROUPWISE, PREPARE, TRL_GENERATE
from step_vs_trl import case_of, machine, spawn
from subjects import load, random_ids, save_adapter

from groupwise.engine.local import LocalEngine


@contextlib.contextmanager
def hogs(count: int) -> Iterator[None]:
    """`count` processes that keep a core each busy for as long as they are given one."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.3 if count else 0.0)  # Python has started
        yield
    finally:
        for hog in running:
            hog.kill()
        for hog in running:
            hog.wait()


def sampling(name: str, options: Namespace, console: Console) -> dict[str, dict[int, list[float]]]:
    """Tokens a second of each side, by hogs."""
    base = load(name)
    base.model.generation_config.eos_token_id = None  # nothing ends a completion but its length
    engine = LocalEngine(base, max_rows=options.prompts * options.group)
    with tempfile.TemporaryDirectory(prefix="busy-") as folder:
        save_adapter(base, Path(folder))
        engine.load(VERSION, Path(folder))
        model: Any = PeftModel.from_pretrained(base.model, folder).eval()
    prompts = [random_ids(options.prompt, seed=p) for p in range(options.prompts)]
    rows = options.prompts * options.group
    work = Work(name=name, prompts=prompts, group=options.group, lengths=[options.completion] * rows, temperature=1.0)
    sides: dict[str, Any] = {"ours": lambda seed: by_requests(engine, work, seed)}
    for threads in sorted({1, options.threads}):
        peer = Peer(min(options.batch, rows), threads)
        sides[f"generate, {threads} thread{'s' * (threads > 1)}"] = lambda seed, peer=peer: peer.run(model, base, work)
    rates: dict[str, dict[int, list[float]]] = {side: {count: [] for count in options.hogs} for side in sides}
    try:
        for side in sides.values():
            seconds_of(side, work, 0)  # the first run of a process is slow
        for repeat in range(options.repeats):
            for count in options.hogs:
                for side in list(sides) if repeat % 2 == 0 else list(reversed(sides)):
                    with hogs(count):
                        seconds, _ = seconds_of(sides[side], work, 1 + repeat)
                    rate = sum(work.lengths) / seconds
                    rates[side][count].append(rate)
                    console.print(f"  {name}, {count} hogs, {side}: {rate:,.0f} tokens/s", style="dim")
    finally:
        engine.close()
    return rates


def steps(options: Namespace, console: Console) -> dict[str, dict[int, list[float]]]:
    """Steps a second of each side, by hogs: `step_vs_trl.py`'s first shape, TRL with `generate`."""
    args = Namespace(warmup=2, steps=options.steps, threads=options.threads, kl=0.0, model=None, hidden=192, layers=4)
    sides = {"ours": GROUPWISE, "TRL": TRL_GENERATE}
    rates: dict[str, dict[int, list[float]]] = {side: {count: [] for count in options.hogs} for side in sides}
    with tempfile.TemporaryDirectory(prefix="busy-") as folder:
        case = case_of(options.shape, args, Path(folder))
        spawn(PREPARE, case, args)
        for count in options.hogs:
            for side, role in sides.items():
                with hogs(count):
                    seconds = statistics.median(spawn(role, case, args)["step"])
                rates[side][count].append(1 / seconds)
                console.print(f"  a step, {count} hogs, {side}: {seconds:.2f} s", style="dim")
    return rates


def table_of(results: dict[str, dict[str, dict[int, list[float]]]], unit: dict[str, str]) -> Table:
    """A line per work and number of hogs; a cell is the median rate and what is left of that without hogs."""
    table = Table("work", "hogs", title="Beside busy processes", caption="medians; in brackets, of the first line's")
    table.add_column("ours", justify="right")
    table.add_column("others", justify="left")
    table.add_column("ours / best other", justify="right")
    for work, rates in results.items():
        idle = {side: statistics.median(next(iter(by.values()))) for side, by in rates.items()}
        for count in rates["ours"]:
            now = {side: statistics.median(by[count]) for side, by in rates.items()}
            cells = {side: f"{rate:,.4g} ({rate / idle[side]:.2f})" for side, rate in now.items()}
            others = ", ".join(f"{side} {cell}" for side, cell in cells.items() if side != "ours")
            best = max(rate for side, rate in now.items() if side != "ours")
            label = f"{work}, {unit[work]}" if count == next(iter(rates["ours"])) else ""
            table.add_row(label, str(count), cells["ours"], others, f"{now['ours'] / best:.2f}x")
        table.add_section()
    return table


def parse_options() -> Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["starter", "25M"], help="starter, 25M, 150M or HIDDENxLAYERS")
    parser.add_argument("--hogs", nargs="+", type=int, default=[0, 1, 2, 4])
    numbers = {"prompts": 16, "group": 16, "prompt": 64, "completion": 64, "batch": 64, "repeats": 3, "steps": 5}
    for name, default in {**numbers, "threads": torch.get_num_threads()}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--shape", default="64,32,8", help="of the step, as in step_vs_trl.py")
    parser.add_argument("--no-step", action="store_true", help="only sampling")
    parser.add_argument("--quick", action="store_true", help="a smoke run: the starter, few and short completions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    options = parser.parse_args()
    if options.quick:
        options.models, options.prompts, options.group, options.completion = ["starter"], 4, 4, 16
        options.hogs, options.repeats, options.steps, options.shape = [0, 2], 1, 1, "16,8,4,2"
    return options


def main() -> None:
    options, console = parse_options(), Console(width=120)
    about = machine(options.threads)
    console.print("  ".join(f"{name} {value}" for name, value in about.items()), soft_wrap=True, highlight=False)
    results = {f"sampling, {name}": sampling(name, options, console) for name in options.models}
    unit = dict.fromkeys(results, "tokens/s")
    if not options.no_step:
        results["a whole step"], unit["a whole step"] = steps(options, console), "steps/s"
    console.print(table_of(results, unit))
    if options.json:
        options.json.write_text(json.dumps({"machine": about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
