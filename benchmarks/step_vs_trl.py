"""One GRPO step: Groupwise and TRL's GRPOTrainer side by side, in time and in peak memory.

    python benchmarks/step_vs_trl.py                       both default shapes
    python benchmarks/step_vs_trl.py --shape 128,64,8      prompts of 128 tokens, completions of 64, groups of 8
    python benchmarks/step_vs_trl.py --demo                what a step of configs/arithmetic.yaml does
    python benchmarks/step_vs_trl.py --kl 0.04             with a KL term, and so a pass of the reference model
    python benchmarks/step_vs_trl.py --defaults            TRL with its own micro-batches (8) and gradient checkpointing
    python benchmarks/step_vs_trl.py --device cuda         on a GPU, in bfloat16
    python benchmarks/step_vs_trl.py --quick               a smoke run

Every measurement is a process of its own, and the two sides take turns, so that neither inherits the other's memory or
the machine's mood. Both load the same weights from the same directory and get the same prompts, group size, reward,
LoRA, AdamW, learning rate, float32, temperature, number of threads, and one optimizer step per batch of completions
that all have the same length. TRL may generate in either of its ways and take the batch in one forward or in parts,
whose gradients add up: short runs find out what is fastest. Each side checks that it did that work. `--demo` is the
starter on the demo's own prompts, 32 of them x 8 completions, which end where they end, after 40 tokens at the latest.
`step_sides.py` is what such a process does.

    generation  token ids in, token ids out
    training    forward, backward, clipping, AdamW; on Groupwise's side also the reference's pass, where there is one
    other       the rest: tokenising, decoding, rewards, advantages, data loading, tracking and `publish`; the peer's
                reference pass
    publish     of that: making the adapter the next version on disk, and the policy that samples

Peak memory is the highest resident size of the process from the moment its imports are done and its model is loaded,
minus the resident size at that moment; on a GPU the same of the memory that torch has given out there.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from step_sides import GROUPWISE, PREPARE, TRL_CONTINUOUS, TRL_GENERATE, Case

PADDED_TOKENS = 20_480  # about as many tokens as a default step has when every prompt is repeated for its group
TRL = (TRL_GENERATE, TRL_CONTINUOUS)
DEFAULT_AT_ONCE, MOST_AT_ONCE = 8, 32  # completions: TRL's default, and what is tried first
PHASES = ("step", "generation", "training", "other", "publish")
SIDES = Path(__file__).with_name("step_sides.py")


# -- taking turns ------------------------------------------------------------------------------------------------------


def spawn(role: str, case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Run `role` in a fresh process. Raises RuntimeError with the end of its output if it fails."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(case.threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    options = json.dumps({"case": asdict(case), "hidden": args.hidden, "layers": args.layers})
    with tempfile.TemporaryDirectory(prefix="step_vs_trl-") as folder:
        command = [sys.executable, str(SIDES), role, options, folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{role} failed:\n{(done.stdout + done.stderr)[-2000:]}")
        return json.loads((Path(folder) / "result.json").read_text())


def compare(case: Case, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Both sides by turns, TRL in the way that is fastest here (`fastest`) or, with --defaults, as it is by default."""
    spawn(PREPARE, case, args)
    best, case, trials, errors = fastest(case, args, console)
    runs: dict[str, list[dict[str, Any]]] = {GROUPWISE: [], best: []}
    for repeat in range(args.repeats):
        for role in (GROUPWISE, best) if repeat % 2 == 0 else (best, GROUPWISE):
            runs[role].append(spawn(role, case, args))
            median = statistics.median(runs[role][-1]["step"])
            console.print(f"  {role}: {median:.3f} s a step, peak {runs[role][-1]['peak_mib']:.0f} MiB", style="dim")
    adapters = {run["trainable_parameters"] for each in runs.values() for run in each}
    if len(adapters) > 1:
        raise RuntimeError(f"the two sides train adapters of different sizes: {sorted(adapters)} parameters")
    return {"case": asdict(case), "trl": best, "trl_trials_s": trials, "trl_errors": errors, "runs": runs}


def fastest(
    case: Case, args: argparse.Namespace, console: Console
) -> tuple[str, Case, dict[str, float], dict[str, str]]:
    """TRL's way to generate and the case with its completions in one forward, by short runs; what each took."""
    at_once = DEFAULT_AT_ONCE if args.defaults else min(MOST_AT_ONCE, case.rows)
    trials: dict[str, float] = {}
    errors: dict[str, str] = {}
    found: dict[str, tuple[str, Case]] = {}

    def attempt(role: str, way: Case) -> None:
        name = f"{role}, {way.at_once} at once"
        console.print(f"  trying {name}", style="dim")
        try:
            trials[name] = statistics.median(spawn(role, replace(way, warmup=1, steps=args.trial_steps), args)["step"])
            found[name] = role, way
        except RuntimeError as error:
            errors[name] = str(error)

    def best() -> tuple[str, Case]:
        return found[min(trials, key=lambda name: trials[name])]

    for role in TRL:
        attempt(role, replace(case, at_once=at_once, checkpointing=args.defaults))
    if not trials:
        raise RuntimeError("\n".join(errors.values()))
    if not args.defaults:
        role, way = best()
        for rows in sorted({min(DEFAULT_AT_ONCE, case.rows), case.rows} - {at_once}):
            attempt(role, replace(way, at_once=rows))
    return *best(), trials, errors


def shape_of(case: Case) -> str:
    """A case in a few words."""
    sizes = f"G={case.group}, {case.prompts} prompts" + (f", KL {case.kl:g}" if case.kl else "")
    sizes += ", TRL's defaults" if case.checkpointing else ""
    return f"demo C<={case.completion} {sizes}" if case.natural else f"P={case.prompt} C={case.completion} {sizes}"


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Medians: of all measured steps of all repeats, and of the repeats' peaks."""
    names = [name for name in PHASES if name in runs[0]]
    medians = {name: statistics.median(x for run in runs for x in run[name]) for name in names}
    return medians | {"peak_mib": statistics.median(run["peak_mib"] for run in runs)}


def table_of(results: Sequence[Mapping[str, Any]]) -> Table:
    """A line per shape and side; ratios are TRL's number over Groupwise's."""
    table = Table("shape", "side", title="One GRPO step", caption="median seconds; peak above the loaded model in MiB")
    for heading in (*PHASES, "peak MiB"):
        table.add_column(heading, justify="right")
    for result in results:
        case, sides = result["case"], {role: summary(runs) for role, runs in result["runs"].items()}
        shape = shape_of(Case(**case)) + f", TRL {case['at_once']} at once"
        for role, values in sides.items():
            numbers = [f"{values[name]:.3f}" if name in values else "-" for name in PHASES]
            table.add_row(shape if role == GROUPWISE else "", role, *numbers, f"{values['peak_mib']:.0f}")
        ours, theirs = sides[GROUPWISE], sides[result["trl"]]
        ratios = [f"{theirs[name] / ours[name]:.2f}x" if name in theirs else "" for name in PHASES]
        table.add_row("", "ratio", *ratios, f"{theirs['peak_mib'] / ours['peak_mib']:.2f}x", style="bold")
        table.add_section()
    return table


def machine(threads: int) -> dict[str, Any]:
    """What the numbers depend on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    cpu = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
    packages = ("torch", "transformers", "peft", "trl", "groupwise")
    versions = {name: version for name in packages if (version := version_of(name))}
    return {"cpu": cpu, "cores": os.cpu_count(), "threads": threads, "python": platform.python_version(), **versions}


def version_of(package: str) -> str | None:
    """The installed version; None of a package that is not installed (as Groupwise where it is only on the path)."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def arguments() -> argparse.Namespace:
    head = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=head, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    shape = "prompt tokens, completion tokens, group size and, if not the default, prompts a step; can be repeated"
    parser.add_argument("--shape", action="append", metavar="P,C,G[,PROMPTS]", help=shape)
    parser.add_argument("--demo", action="store_true", help="the demo's prompts, model and sizes; lengths as they come")
    parser.add_argument("--kl", type=float, default=0.0, help="weight of a KL term (k3) to the base model")
    parser.add_argument("--defaults", action="store_true", help="TRL with its own micro-batches and checkpointing")
    parser.add_argument("--model", help="a model directory; without it, a new Qwen3 of the starter's architecture")
    parser.add_argument("--hidden", type=int, default=192, help="of the new model: hidden size, a multiple of 64")
    parser.add_argument("--layers", type=int, default=4, help="of the new model")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser.add_argument("--device", default="cpu", help="cpu, or cuda: bfloat16, memory as torch gives it out there")
    parser.add_argument("--threads", type=int, default=cores, help="torch threads of each side")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each side")
    parser.add_argument("--warmup", type=int, default=2, help="steps of a process that do not count, at least 1")
    parser.add_argument("--steps", type=int, default=5, help="steps of a process that count")
    parser.add_argument("--trial-steps", type=int, default=2, help="steps of a trial that count")
    parser.add_argument("--quick", action="store_true", help="a smoke run: one small shape, one repeat, two steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    args = parser.parse_args()
    if args.quick:
        args.shape, args.repeats, args.warmup, args.steps = args.shape or ["16,8,4,2"], 1, 1, 2
    if args.warmup < 1:
        parser.error("--warmup is the steps that do not count; the first never does, so give 1 or more")
    return args


def case_of(shape: str, args: argparse.Namespace, folder: Path) -> Case:
    """`P,C,G` or `P,C,G,PROMPTS`; the default is as many prompts as make a step of PADDED_TOKENS, 8 at the most."""
    numbers = [int(number) for number in shape.split(",")]
    if len(numbers) not in (3, 4) or min(numbers) < 1:
        sys.exit(f"--shape {shape!r} is not valid; write P,C,G or P,C,G,PROMPTS, as in 64,32,8")
    prompt, completion, group = numbers[:3]
    prompts = numbers[3] if len(numbers) == 4 else min(8, max(1, PADDED_TOKENS // (group * (prompt + completion))))
    return Case(
        prompt=prompt,
        completion=completion,
        group=group,
        prompts=prompts,
        warmup=args.warmup,
        steps=args.steps,
        threads=args.threads,
        kl=args.kl,
        model=args.model or str(folder / "model"),
        prompts_file=str(folder / "prompts.jsonl"),
        device=args.device,
        dtype="float32" if args.device == "cpu" else "bfloat16",
    )


def demo_case(args: argparse.Namespace, folder: Path) -> Case:
    """A step of configs/arithmetic.yaml."""
    from groupwise.config.run import STARTER_DIR

    case = case_of("1,40,8,32", args, folder)
    return replace(case, model=str(STARTER_DIR), prompts_file=str(folder / "demo.jsonl"), natural=True)


def main() -> None:
    args, console, results = arguments(), Console(width=max(110, Console().width)), []
    about = machine(args.threads)
    console.print("  ".join(f"{name} {value}" for name, value in about.items()), soft_wrap=True, highlight=False)
    with tempfile.TemporaryDirectory(prefix="step_vs_trl-") as folder:
        shapes = args.shape or ([] if args.demo else ["64,32,8", "512,64,16"])
        cases = [case_of(shape, args, Path(folder)) for shape in shapes]
        for case in [*cases, *([demo_case(args, Path(folder))] if args.demo else [])]:
            console.print(shape_of(case), highlight=False)
            results.append(compare(case, args, console))
    for result in results:
        trials = ", ".join(f"{role} {seconds:.3f} s" for role, seconds in result["trl_trials_s"].items())
        failed = "".join(f"; {role} does not run here" for role in result["trl_errors"])
        console.print(f"TRL's ways, a step: {trials}{failed}", highlight=False)
    console.print(table_of(results))
    if args.json:
        args.json.write_text(json.dumps({"machine": about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
