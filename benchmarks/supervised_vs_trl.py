"""One step on examples or on preference pairs: Groupwise beside TRL's SFTTrainer or DPOTrainer, in seconds.

    python benchmarks/supervised_vs_trl.py                      both kinds
    python benchmarks/supervised_vs_trl.py --kind dpo --rows 16
    python benchmarks/supervised_vs_trl.py --hidden 512 --layers 9
    python benchmarks/supervised_vs_trl.py --quick              a smoke run

Every measurement is a process of its own, and the two sides take turns. Both load the same weights and read the same
conversations, whose lengths differ as people's do (drawn log-normally around --prompt and --answer, in words), with the
same LoRA, AdamW, learning rate, float32 and number of threads; a step is one optimizer step on --rows of them. TRL
takes the rows in one forward or in parts whose gradients add up: short runs find out what is fastest. A step's time is
the interval between the ends of two steps, as the trainers run: Groupwise's has the rows' tokenisation, metrics and the
publishing of the adapter in it, TRL's rows are tokenised before.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from step_vs_trl import machine

RANK, RATE = 16, 1e-4
KINDS = ("sft", "dpo")


def rows_of(kind: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return conversations of words, enough for all steps of a process."""
    draw = random.Random(0)

    def said(role: str, words: int) -> list[dict[str, str]]:
        count = max(4, min(4 * words, round(words * draw.lognormvariate(0.0, 0.6))))
        return [{"role": role, "content": " ".join(str(draw.randint(10, 99)) for _ in range(count))}]

    def row() -> dict[str, Any]:
        asked = {"prompt": said("user", args.prompt)}
        if kind == "sft":
            return asked | {"completion": said("assistant", args.answer)}
        return asked | {name: said("assistant", args.answer) for name in ("chosen", "rejected")}

    return [row() for _ in range(args.rows * (args.warmup + args.steps))]


def groupwise_side(kind: str, args: argparse.Namespace, folder: Path) -> list[float]:
    """Return when each step ended."""
    import warnings

    from groupwise.config.run import parse_config
    from groupwise.run.display import LineDisplay
    from groupwise.run.loop import run_loop

    ends: list[float] = []

    class Watched(LineDisplay):
        def step(self, step: int, metrics: Mapping[str, float]) -> None:
            ends.append(time.perf_counter())
            super().step(step, metrics)

    warnings.simplefilter("ignore")
    config = {
        "kind": kind,
        "model": str(folder / "model"),
        "data": {"source": str(folder / f"{kind}.jsonl"), "shuffle": False},
        "rollout": {"prompts_per_step": args.rows},
        "train": {
            "steps": args.warmup + args.steps,
            "learning_rate": RATE,
            "schedule": "constant",
            "lora": {"rank": RANK, "alpha": 2 * RANK},
            "micro_tokens": args.micro_tokens,
        },
        "device": "cpu",
        "dtype": "float32",
        "output_dir": str(folder / f"groupwise-{os.getpid()}"),
    }
    run_loop(parse_config(config), display=Watched(args.warmup + args.steps, stream=sys.stderr))
    return ends


def trl_side(kind: str, args: argparse.Namespace, folder: Path, at_once: int) -> list[float]:
    """Return when each step ended, with `at_once` rows in a forward."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    ends: list[float] = []

    class Watched(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    trainer, config = (SFTTrainer, SFTConfig) if kind == "sft" else (DPOTrainer, DPOConfig)
    settings: dict[str, Any] = {
        "output_dir": str(folder / f"trl-{os.getpid()}"),
        "per_device_train_batch_size": at_once,
        "gradient_accumulation_steps": args.rows // at_once,
        "max_steps": args.warmup + args.steps,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    made = trainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        args=config(**settings),
        train_dataset=Dataset.from_list([json.loads(line) for line in (folder / f"{kind}.jsonl").open()]),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        peft_config=LoraConfig(r=RANK, lora_alpha=2 * RANK, lora_dropout=0.0, target_modules="all-linear"),
        callbacks=[Watched()],
    )
    made.train()
    return ends


def spawn(kind: str, side: str, args: argparse.Namespace, folder: Path, *, steps: int | None = None) -> list[float]:
    """Return the seconds of each step that counts, of a side in a process of its own. Raises RuntimeError with the end
    of its output where it fails."""
    options = vars(args) | {"steps": steps or args.steps, "json": None}
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, "--side", json.dumps([kind, side, options, str(folder)])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{side} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    ends = json.loads((folder / "ends.json").read_text())
    return [after - before for before, after in itertools.pairwise(ends)][args.warmup - 1 :]


def run_side(asked: str) -> None:
    """Do what `spawn` asks."""
    kind, side, options, where = json.loads(asked)
    args, folder = argparse.Namespace(**options), Path(where)
    import torch

    torch.set_num_threads(args.threads)
    ours = side == "groupwise"
    ends = groupwise_side(kind, args, folder) if ours else trl_side(kind, args, folder, int(side.split()[1]))
    (folder / "ends.json").write_text(json.dumps(ends))


def compare(kind: str, args: argparse.Namespace, folder: Path, console: Console) -> dict[str, Any]:
    """Return the seconds of both sides' steps, TRL's at the number of rows in a forward that is fastest here."""
    (folder / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(kind, args)))
    sizes = [size for size in dict.fromkeys((args.rows, args.rows // 2, 8, 4)) if size > 0 and not args.rows % size]
    trials = {f"trl {size}": statistics.median(spawn(kind, f"trl {size}", args, folder, steps=2)) for size in sizes}
    best = min(trials, key=lambda side: trials[side])
    runs: dict[str, list[float]] = {"groupwise": [], best: []}
    for repeat in range(args.repeats):
        for side in ("groupwise", best) if repeat % 2 == 0 else (best, "groupwise"):
            runs[side] += spawn(kind, side, args, folder)
            console.print(f"  {kind}, {side}: {statistics.median(runs[side]):.3f} s a step", style="dim")
    return {"kind": kind, "trl": best, "trl_trials_s": trials, "runs": runs}


def arguments() -> argparse.Namespace:
    head = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=head, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, help="one of the two; both without it")
    parser.add_argument("--rows", type=int, default=32, help="conversations, or pairs, of a step")
    parser.add_argument("--prompt", type=int, default=64, help="words of a prompt, about")
    parser.add_argument("--answer", type=int, default=64, help="words of an answer, about")
    parser.add_argument("--hidden", type=int, default=192, help="of the model: hidden size, a multiple of 64")
    parser.add_argument("--layers", type=int, default=4, help="of the model")
    parser.add_argument("--micro-tokens", type=int, default=8192, help="Groupwise's train.micro_tokens")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="torch threads of each side")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each side")
    parser.add_argument("--warmup", type=int, default=2, help="steps of a process that do not count, at least 1")
    parser.add_argument("--steps", type=int, default=5, help="steps of a process that count")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    args = parser.parse_args()
    if args.quick:
        args.rows, args.prompt, args.answer, args.repeats, args.warmup, args.steps = 4, 8, 8, 1, 1, 2
    if args.warmup < 1:
        parser.error("--warmup is the steps that do not count; the first never does, so give 1 or more")
    return args


def main() -> None:
    from subjects import write_model

    args, console = arguments(), Console(width=max(110, Console().width))
    about = machine(args.threads)
    console.print("  ".join(f"{name} {value}" for name, value in about.items()), soft_wrap=True, highlight=False)
    with tempfile.TemporaryDirectory(prefix="supervised_vs_trl-") as made:
        folder = Path(made)
        write_model(folder / "model", hidden=args.hidden, layers=args.layers)
        results = [compare(kind, args, folder, console) for kind in ((args.kind,) if args.kind else KINDS)]
    table = Table("kind", "side", title="One supervised step", caption=f"{args.rows} rows a step; median seconds")
    table.add_column("s a step", justify="right")
    for result in results:
        medians = {side: statistics.median(values) for side, values in result["runs"].items()}
        for side, value in medians.items():
            table.add_row(result["kind"], side, f"{value:.3f}")
        table.add_row("", "ratio", f"{medians[result['trl']] / medians['groupwise']:.2f}x", style="bold")
    console.print(table)
    if args.json:
        args.json.write_text(json.dumps({"machine": about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        run_side(sys.argv[2])
    else:
        main()
