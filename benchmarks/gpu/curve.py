"""Does it learn on a GPU? The main job (configs/arithmetic.yaml) with the starter, and with a model of 150M parameters.

The larger one is made here: weights are drawn, and it is shown worked sums (`tools/starter.py`) in lessons until it
gets some of them right, since a policy that never does has nothing to learn from. Held-out prompts, before and after.
"""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from starter import (
    LESSONS,
    MAX_TOKENS,
    BuildSpec,
    Lesson,
    accuracies,
    draw_conversations,
    held_out,
    is_right_reply,
    new_model,
    save,
    teach,
)
from subjects import SIZES

from gpu.cases import ROOT, Cases, Result, Setting
from groupwise.config.run import STARTER, load_config
from groupwise.engine.local import LocalEngine
from groupwise.model.load import load_tokenizer, wrap_model
from groupwise.run.loop import run_loop
from groupwise.store.tracking import read_metrics

ENOUGH, MOST_LESSONS = 0.1, 5  # of answers right, sampled
MISMATCH = "mismatch/logprob_diff_mean"


def cases(setting: Setting) -> Cases:
    return {"starter": lambda: learned(STARTER, [], setting), "150M": lambda: larger(setting)}


def larger(setting: Setting) -> Result:
    """Teach the model of 150M, then the job."""
    hidden, layers = setting.of(SIZES["150M"], (64, 2))
    tokenizer, spec = load_tokenizer(STARTER), BuildSpec(hidden_size=hidden, layers=layers)
    lesson = Lesson(steps=setting.of(300, 2), learning_rate=1e-3, mix=LESSONS[1].mix)
    torch.manual_seed(0)
    model: Any = new_model(spec, tokenizer).to(setting.device)
    started, right, taught = time.perf_counter(), 0.0, 0
    while right < ENOUGH and taught < setting.of(MOST_LESSONS, 1):
        drawn = draw_conversations(lesson.mix, first_seed=1 + taught * 10_000)
        teach(model, tokenizer, lesson, spec, conversations=drawn, report=lambda said: print(f"   {said}", flush=True))
        taught, right = taught + 1, accuracy_of(model, tokenizer)
        print(f"   lesson {taught}: {right:.1%} right", flush=True)
    seconds = time.perf_counter() - started
    with TemporaryDirectory() as folder:
        save(model.cpu(), tokenizer, Path(folder))
        del model
        overrides = ["train.learning_rate=1e-3", f"train.steps={setting.of(60, 2)}"]
        result = learned(folder, overrides, setting)
    result["row"] |= {"lessons": taught, "teaching s": seconds}
    return result


def accuracy_of(model: Any, tokenizer: Any) -> float:
    """Return the share of right sampled answers to held-out sums."""
    with closing(LocalEngine(wrap_model(model, tokenizer, name="taught"))) as engine:
        asked = held_out("add", style="think", at_most=64)
        return accuracies(engine, tokenizer, asked, is_right_reply, max_tokens=MAX_TOKENS, samples=2, seed=0)[1]


def learned(model: str, overrides: list[str], setting: Setting) -> Result:
    """One run of the job -> held-out accuracy before and after, and the curve of the training reward."""
    small = ["train.steps=2", "rollout.prompts_per_step=4", "eval.data.args.n=8", "data.args.n=64"]
    with TemporaryDirectory() as folder:
        where = [f"model={model}", f"device={setting.device}", f"run_dir={folder}/run"]
        config = load_config(ROOT / "configs" / "arithmetic.yaml", [*where, *overrides, *setting.of([], small)])
        started = time.perf_counter()
        result = run_loop(config)
        seconds = time.perf_counter() - started
        steps = [line for line in read_metrics(result.run_dir / "metrics.jsonl") if "reward/mean" in line]
    row: dict[str, Any] = {"steps": result.steps, "seconds": seconds}
    for mode, before in result.before.items():
        row |= {f"{mode} before": before.mean(), f"{mode} after": result.after[mode].mean()}
    if gaps := [line[MISMATCH] for line in steps if MISMATCH in line]:  # none where no step had a signal
        row["mismatch, nats"] = max(gaps)
    row["s/step"] = sorted(line["time/step_s"] for line in steps)[len(steps) // 2]
    return {"row": row, "reward": [line["reward/mean"] for line in steps]}
