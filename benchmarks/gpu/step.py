"""A whole step beside TRL's trainer, by `benchmarks/step_sides.py`: prompts and completions of 512 tokens, groups of
16.

Both sides have the same model (0.6B, random weights, written to a temporary folder), prompts, reward and adapter. TRL
takes the completions of a prompt in one forward, and generates in either of its ways without vLLM.
"""

from __future__ import annotations

import os
import statistics
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from step_sides import GROUPWISE, PREPARE, TRL_CONTINUOUS, TRL_GENERATE
from step_vs_trl import case_of, spawn, summary
from subjects import save_shape

from gpu.cases import Cases, Result, Setting, missing


def cases(setting: Setting) -> Cases:
    return {role: partial(side, role, setting) for role in (GROUPWISE, TRL_GENERATE, TRL_CONTINUOUS)}


def side(role: str, setting: Setting) -> Result:
    """One side, in a process of its own: two steps after one that does not count."""
    if role != GROUPWISE and (absent := missing("trl", "datasets")):
        return absent
    with TemporaryDirectory() as name:
        folder = Path(name)
        options = Namespace(device=setting.device, kl=0.0, hidden=64, layers=2, model=None, warmup=1, steps=2)
        options.threads = os.cpu_count() or 1
        case = case_of(setting.of("512,512,16,2", "16,8,4,2"), options, folder)
        if not setting.smoke:
            save_shape("0.6B", Path(case.model), device=setting.device, dtype=setting.dtype)
            torch.cuda.empty_cache()
        spawn(PREPARE, case, options)
        found = spawn(role, replace(case, at_once=case.group), options)
    row: dict[str, Any] = {f"{key}, s": value for key, value in summary([found]).items() if key != "peak_mib"}
    row["tokens/s"] = case.rows * case.completion / statistics.median(found["step"])
    return {"row": {**row, "peak above the model, MiB": found["peak_mib"]}, "found": found}
