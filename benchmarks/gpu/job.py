"""Does a shipped configuration run on the GPU that it names? `groupwise run`, end to end, where no more is free.

Weights have the model's published shape and are drawn; the data is made here and has the dataset's shape. So
completions are as long as they may be, which takes most memory; what they get is drawn, too, so that there is something
to train on. A larger card is made small by a tensor that fills the rest of it.

    full          told of more memory than there is, the learner runs out of it in its first micro-batch, and the run
                  goes on with smaller ones
    vLLM, ...     `engine: vllm` on the learner's own card, in what training leaves of it; versions are published
                  between two steps
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from subjects import save_shape

from gpu.cases import ROOT, Cases, Result, Setting, missing
from groupwise.store.tracking import read_metrics

GB = 10**9
CONTEXT = 2 * GB  # of CUDA itself and its libraries, in two processes
SUMS = "groupwise.tasks.datasets:gsm8k", "sums.jsonl"
TEXTS = "groupwise.tasks.datasets:reverse_text", "texts.jsonl"
# name: configuration, its data, GB of the card, changes
JOBS: dict[str, tuple[str, tuple[str, str], float, list[str]]] = {
    "reverse-text-0.6b, 16 GB": ("reverse-text-0.6b", TEXTS, 16, ["train.steps=3"]),
    "gsm8k-qwen3-0.6b, 24 GB": ("gsm8k-qwen3-0.6b", SUMS, 24, ["train.steps=1", "rollout.prompts_per_step=8"]),
    "vLLM, gsm8k-qwen3-0.6b, 24 GB": (
        "gsm8k-qwen3-0.6b",
        SUMS,
        24,
        ["engine=vllm", "train.steps=2", "rollout.prompts_per_step=8"],
    ),
    "full": ("reverse-text-0.6b", TEXTS, 10, ["train.steps=2", "train.micro_tokens=65536", "train.memory_gb=1000"]),
}
REWARD = """def drawn(completions, **columns):
    return [len(str(said)) % 7 / 6 for said in completions]
"""
SMOKE = ["train.steps=1", "rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_tokens=8"]


def cases(setting: Setting) -> Cases:
    return {name: partial(run, *job, setting) for name, job in JOBS.items()}


def run(name: str, data: tuple[str, str], gigabytes: float, changes: list[str], setting: Setting) -> Result:
    """One run by the command line; raises RuntimeError with the end of what it says if it fails."""
    if "engine=vllm" in changes and (absent := missing("vllm")):
        return absent
    with TemporaryDirectory() as where:
        folder = Path(where)
        save_shape(setting.of("0.6B", "tiny"), folder / "model", device=setting.device, dtype=setting.dtype)
        write_data(folder)
        if setting.device != "cpu":
            torch.cuda.empty_cache()
        function, file = data
        command = [sys.executable, "-m", "groupwise", "run", str(ROOT / "configs" / f"{name}.yaml")]
        command += [f"model={folder / 'model'}", f"run_dir={folder / 'run'}", f"device={setting.device}"]
        command += [f"data.source={function}", f"data.args.source={folder / file}", "eval=null"]
        command += [f"rewards=[{folder / 'drawn.py'}:drawn]", "algo.mask_truncated=false"]
        command += [*changes, *setting.of([], SMOKE)]
        started = time.perf_counter()
        with only_free(gigabytes, setting):
            done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
            free = torch.cuda.mem_get_info()[0] if setting.device != "cpu" else 0
        seconds = time.perf_counter() - started
        said = done.stdout + done.stderr
        if done.returncode:
            raise RuntimeError(said[-6000:])
        steps = [line for line in read_metrics(folder / "run" / "metrics.jsonl") if "reward/mean" in line]
    row: dict[str, Any] = {"steps": len(steps), "seconds": seconds, "free GB": free / GB}
    for key in ("time/rollout_s", "time/train_s", "time/sync_s", "completions/mean_length", "optim/grad_norm"):
        if key in steps[-1]:
            row[key] = steps[-1][key]
    return {"row": row, "said": said[-6000:], "metrics": steps}


@contextmanager
def only_free(gigabytes: float, setting: Setting) -> Any:
    """Fill what a card of so many gigabytes would not have."""
    if setting.device == "cpu":
        yield
        return
    free = torch.cuda.mem_get_info()[0]
    filling = torch.empty(max(1, int(free - gigabytes * GB + CONTEXT / 2)), dtype=torch.uint8, device=setting.device)
    try:
        yield
    finally:
        del filling
        torch.cuda.empty_cache()


def write_data(folder: Path) -> None:
    """Files of the two datasets' shapes, and the reward."""
    sums = [{"question": f"What is {a} + {3 * a}?", "answer": f"It is {4 * a}.\n#### {4 * a}"} for a in range(64)]
    numbers, letters = ["one", "two", "three", "four"], "abcdefghijklmnop"
    texts = [{"prompt": f"the {number} of {letter} and the rest"} for number in numbers for letter in letters]
    for name, rows in ((SUMS[1], sums), (TEXTS[1], texts)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "drawn.py").write_text(REWARD)
