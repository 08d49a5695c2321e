"""Is the estimate of a micro-batch's memory right on a GPU? The cases of `benchmarks/memory.py`, measured by
`torch.cuda.max_memory_allocated`."""

from __future__ import annotations

from functools import partial

import torch
from memory import LARGE, TOLERANCE, Case, measure
from memory import cases as every_case
from step_sides import MIB

from gpu.cases import Cases, Result, Setting, missing


def cases(setting: Setting) -> Cases:
    """In 16 bits, trained whole, and of uneven lengths; in smoke runs a small one."""
    wanted = [case for case in every_case() if case.dtype is torch.bfloat16 or case.rank is None or case.uneven]
    if setting.smoke:
        wanted = [Case(name="starter", model="starter", shape=(4, 26, 16, 4))]
    named = {f"{case.name} {'x'.join(map(str, case.shape))}": case for case in wanted}
    return {name: partial(measured, case, setting) for name, case in named.items()}


def measured(case: Case, setting: Setting) -> Result:
    if case.quantization and (absent := missing("bitsandbytes")):
        return absent
    found = measure(case, setting.device)
    off = found["estimate"] / found["live"] - 1
    row = {f"{key} MiB": found[key] / MIB for key in ("weights", "estimate", "live")}
    wrong = abs(off) > TOLERANCE and found["live"] > LARGE
    return {"row": {**row, "off by": off, "note": "more than 10 % off" if wrong else ""}}
