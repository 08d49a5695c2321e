"""One GRPO step on images: Groupwise and TRL's GRPOTrainer by turns, on the packaged model that sees and its pictures.

    python benchmarks/images_vs_trl.py                        16 questions x 8 completions, 3 runs of each side
    python benchmarks/images_vs_trl.py --quick                does it run?

Both sides load `starter-vl` and the pictures of `groupwise init --from images`, each with its question, and take the
same work as in `step_vs_trl.py`: group size, reward, LoRA of the text decoder's linear layers, AdamW, learning rate,
float32, threads, completions of at most 8 tokens. TRL is given the processor that Groupwise makes, since its own needs
torchvision (for videos).

    tower      seconds of a step in which the vision tower runs, sampling and training together
    cpu        processor seconds of a step, from the loaded model on, which a busy machine changes less than the clock
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.table import Table
from step_sides import ALPHA, GROUPWISE, RANK, TRL_GENERATE, Case, Recorder, even_ids, run_groupwise, trl_config
from step_sides import _watch_trl as watch_trl

SIDES = (GROUPWISE, TRL_GENERATE)
LAYERS = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"


# ---- a side, in a process of its own ----
class Tower:
    """Counts the seconds of a function, and how often it was called."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds += time.perf_counter() - started
            self.calls += 1
            return result

        return wrapper


def groupwise_side(case: Case, folder: Path, tower: Tower) -> dict[str, Any]:
    from groupwise.model.vision import Vision

    Vision._computed = tower.timed(Vision._computed)
    return run_groupwise(case, folder)


def trl_side(case: Case, folder: Path, tower: Tower) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from PIL import Image
    from transformers import AutoModelForImageTextToText
    from trl import GRPOTrainer

    from groupwise.config.hub import model_path
    from groupwise.model.image_tokens import vision_of
    from groupwise.model.load import load_model

    vision = vision_of(load_model(case.model, device="cpu", dtype=case.dtype).tokenizer)
    assert vision is not None
    processor = vision.processor
    processor.chat_template, processor.video_token = processor.tokenizer.chat_template, None
    recorder = Recorder(case)
    rows = [json.loads(line) for line in Path(case.prompts_file).read_text().splitlines()]
    rows = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "image": Image.open(row["image"]).convert("RGB"),
        }
        for row in rows[: case.prompts * (case.warmup + case.steps)]
    ]
    model = AutoModelForImageTextToText.from_pretrained(model_path(case.model), dtype=getattr(torch, case.dtype))
    model.model.get_image_features = tower.timed(model.model.get_image_features)
    recorder.model_is_loaded()
    trainer: Any = GRPOTrainer(
        model=model,
        reward_funcs=cast(Any, even_ids),
        args=trl_config(case, folder, continuous=False),
        train_dataset=Dataset.from_list(rows),
        processing_class=processor,
        peft_config=LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=LAYERS, task_type="CAUSAL_LM"),
    )
    watch_trl(recorder, trainer)
    trainer.train()
    return recorder.result(sum(p.numel() for p in trainer.model.parameters() if p.requires_grad))


def be_a_side(role: str, case: Case, folder: Path) -> None:
    tower, at_load, is_loaded = Tower(), [0.0], Recorder.model_is_loaded

    def loaded(self: Recorder) -> None:
        at_load[0] = time.process_time()
        is_loaded(self)

    Recorder.model_is_loaded = loaded
    result = (groupwise_side if role == GROUPWISE else trl_side)(case, folder, tower)
    every = case.warmup + case.steps
    result |= {"tower": tower.seconds / every, "tower_calls": tower.calls / every}
    result |= {"cpu": (time.process_time() - at_load[0]) / every}
    (folder / "result.json").write_text(json.dumps(result))


# ---- taking turns ----
def spawn(role: str, case: Case) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(case.threads), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory(prefix="images_vs_trl-") as folder:
        command = [sys.executable, __file__, "--side", role, "--case", json.dumps(asdict(case)), "--folder", folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{role} failed:\n{(done.stdout + done.stderr)[-3000:]}")
        return json.loads((Path(folder) / "result.json").read_text())


def pictures(folder: Path) -> Path:
    """Return the file of the rows of `groupwise init --from images`, with whole paths of their pictures."""
    command = [str(Path(sys.executable).with_name("groupwise")), "init", str(folder / "my-images"), "--from", "images"]
    subprocess.run(command, check=True, capture_output=True)
    path = folder / "my-images" / "prompts.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**row, "image": str(path.parent / row["image"])}) + "\n" for row in rows))
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side, by turns")
    parser.add_argument("--steps", type=int, default=6, help="measured steps of a run")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="one run of two steps of two questions")
    parser.add_argument("--json", type=Path, help="keep the numbers here")
    for name in ("--side", "--case", "--folder"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        be_a_side(options.side, Case(**json.loads(options.case)), Path(options.folder))
        return 0
    with tempfile.TemporaryDirectory(prefix="images_vs_trl-") as folder:
        case = Case(
            prompt=0,
            completion=8,
            group=8,
            prompts=2 if options.quick else 16,
            warmup=1,
            steps=2 if options.quick else options.steps,
            threads=options.threads,
            model="starter-vl",
            prompts_file=str(pictures(Path(folder))),
            natural=True,
        )
        runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        for repeat in range(1 if options.quick else options.repeats):
            for side in SIDES if repeat % 2 == 0 else SIDES[::-1]:
                runs[side].append(spawn(side, case))
    report(runs)
    if options.json:
        options.json.write_text(json.dumps({"case": asdict(case), "runs": runs}, indent=1) + "\n")
    return 0


def report(runs: dict[str, list[dict[str, Any]]]) -> None:
    table = Table(
        "", "s a step", "generation", "training", "tower", "cpu", "its calls a step", "peak MiB", "parameters"
    )
    for side, each in runs.items():
        cells = [statistics.median(value for run in each for value in run[name]) for name in ("step", "generation")]
        cells.append(statistics.median(value for run in each for value in run["training"]))
        cells += [statistics.median(run[name] for run in each) for name in ("tower", "cpu")]
        more = [statistics.median(run[name] for run in each) for name in ("tower_calls", "peak_mib")]
        shown = [f"{cell:.3f}" for cell in cells] + [f"{cell:.0f}" for cell in more]
        table.add_row(side, *shown, str(each[0]["trainable_parameters"]))
    console = Console()
    console.print(table)
    pairs = [
        statistics.median(theirs["step"]) / statistics.median(ours["step"])
        for ours, theirs in zip(*runs.values(), strict=True)
    ]
    console.print(f"TRL's step / ours, pair by pair: {', '.join(f'{pair:.2f}' for pair in pairs)}")


if __name__ == "__main__":
    sys.exit(main())
