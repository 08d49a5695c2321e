"""Sampling: the local engine with and without CUDA graphs, transformers' `generate`, and vLLM where it is installed.

16 prompts of 64 tokens with 16 completions of 128 each under one adapter, as in `benchmarks/rollouts.py`, whose work
and checks these are. `publish` is what stands between an optimizer step and the first token under its version:
writing the adapter, loading it into the engine, and what the first token takes more than the next one.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from functools import partial
from multiprocessing.connection import Client
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import PeftModel
from rollouts import ROUGHLY, VERSION, Peer, Row, Side, Work, by_requests, check_logprobs, seconds_of
from subjects import SHAPES, load, random_ids, save_adapter, save_shape

from gpu.cases import Cases, Result, Setting, missing
from groupwise.engine.local import LocalEngine
from groupwise.model.load import LoadedModel
from groupwise.train.learner import Learner
from groupwise.types import PolicyVersion, SamplingParams, SamplingRequest

SIDE = Path(__file__).resolve().parents[1] / "vllm_side.py"
START_S = 400.0


def cases(setting: Setting) -> Cases:
    models = setting.of(("0.6B", "150M", "4B"), ("tiny",))
    every: dict[str, Any] = {}
    for model in models:
        every[f"{model}, engine"] = partial(engine_side, model, False, setting)
        every[f"{model}, engine, graphs"] = partial(engine_side, model, True, setting)
        every[f"{model}, generate"] = partial(generate_side, model, setting)
        if model in SHAPES:
            every[f"{model}, vLLM"] = partial(vllm_side, model, setting)
    return every


def work_of(setting: Setting) -> Work:
    prompts, group, prompt, tokens = setting.of((16, 16, 64, 128), (2, 4, 8, 6))
    lengths = [tokens] * (prompts * group)
    every = [random_ids(prompt, seed=p) for p in range(prompts)]
    return Work(name="equal", prompts=every, group=group, lengths=lengths, temperature=1.0)


def timed(side: Side, work: Work, setting: Setting) -> tuple[dict[str, Any], list[Row]]:
    """Tokens a second, after one run that does not count; and the rows of the last run."""
    seconds_of(side, work, 0)
    runs = [seconds_of(side, work, 1000 * (1 + i)) for i in range(setting.of(3, 1))]
    seconds = statistics.median(each for each, _ in runs)
    return {"tokens/s": sum(work.lengths) / seconds, "seconds": seconds}, runs[-1][1]


def engine_side(model: str, compiled: bool, setting: Setting) -> Result:
    base, work = load(model, device=setting.device, dtype=setting.dtype), work_of(setting)
    started = time.perf_counter()
    engine = LocalEngine(base, max_rows=len(work.lengths), compile=compiled)
    with TemporaryDirectory() as folder:
        save_adapter(base, Path(folder))
        engine.load(VERSION, Path(folder))
        try:
            row, rows = timed(partial(by_requests, engine, work), work, setting)
            row["with start"] = time.perf_counter() - started
            row |= published(base, engine)
        finally:
            engine.close()
        if (why := getattr(engine._lanes[0].decoder, "steps", None)) and getattr(why, "why_not", None):
            row["note"] = f"uncompiled: {why.why_not}"
        peer: Any = PeftModel.from_pretrained(base.model, folder).eval()
        row["gap to PEFT, nats"] = check_logprobs(peer, work, rows, "the engine", ROUGHLY)
    return {"row": row}


def published(base: LoadedModel, engine: LocalEngine) -> dict[str, float]:
    """Seconds of publishing a version: to disk, into the engine, and its first token."""
    learner, version = Learner(base), PolicyVersion("bench", 2)
    with torch.no_grad():
        for weight in learner.parameters:
            weight.add_(0.01)

    def token() -> float:
        params = SamplingParams(max_tokens=1, seed=0, ignore_eos=True)
        began = time.perf_counter()
        engine.generate([SamplingRequest(prompt_ids=random_ids(64, seed=9), params=params, n=1, version=version)])
        return time.perf_counter() - began

    with TemporaryDirectory() as folder:
        started = time.perf_counter()
        learner.save_adapter(Path(folder))
        saved = time.perf_counter()
        engine.load(version, Path(folder))
        loaded = time.perf_counter()
    more = max(0.0, token() - token())
    return {"publish s": loaded - started + more, "of that saving": saved - started, "first token": more}


def generate_side(model: str, setting: Setting) -> Result:
    """All rows at once; a quarter at a time where memory does not suffice for that."""
    base, work = load(model, device=setting.device, dtype=setting.dtype), work_of(setting)
    base.model.generation_config.eos_token_id = None
    with TemporaryDirectory() as folder:
        save_adapter(base, Path(folder))
        peer: Any = PeftModel.from_pretrained(base.model, folder).eval()

    def generated(batch: int) -> Result:
        way = Peer(batch, torch.get_num_threads())
        row, _ = timed(lambda seed: way.run(peer, base, work), work, setting)
        return {"row": {**row, "note": f"{batch} rows at once"}}

    try:
        return generated(len(work.lengths))
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
    return generated(len(work.lengths) // 4)


def vllm_side(model: str, setting: Setting) -> Result:
    """`vllm.LLM` in a process of its own, with its CUDA graphs and the same adapter."""
    if absent := missing("vllm"):
        return absent
    work = work_of(setting)
    with TemporaryDirectory() as name:
        folder = Path(name)
        save_shape(model, folder / "model", device=setting.device, dtype=setting.dtype)
        (folder / "adapter").mkdir()
        save_adapter(load(model, device=setting.device, dtype=setting.dtype), folder / "adapter")
        torch.cuda.empty_cache()
        llm = {"model": str(folder / "model"), "dtype": setting.dtype, "enable_lora": True, "max_lora_rank": 16}
        llm |= {"max_loras": 1, "max_num_seqs": len(work.lengths), "max_model_len": 1024, "gpu_memory_utilization": 0.6}
        options = json.dumps({"llm": llm, "adapter": str(folder / "adapter")})
        process = subprocess.Popen([sys.executable, str(SIDE), str(folder / "socket"), options])
        try:
            with connected(process, folder / "socket") as line:
                return {"row": timed(partial(asked, line, work), work, setting)[0]}
        finally:
            process.kill()
            process.wait()


def connected(process: subprocess.Popen[bytes], socket: Path) -> Any:
    ends = time.monotonic() + START_S
    while not socket.exists():
        if process.poll() is not None or time.monotonic() > ends:
            raise RuntimeError(f"vLLM did not start: exit code {process.poll()}; its output is above")
        time.sleep(0.2)
    return Client(str(socket), family="AF_UNIX")


def asked(line: Any, work: Work, seed: int) -> list[Row]:
    """The work as a request for each group."""
    how = {"n": work.group, "max_tokens": work.lengths[0], "temperature": 1.0, "ignore_eos": True, "logprobs": 0}
    line.send([{"prompt": prompt, "seed": seed + p, **how} for p, prompt in enumerate(work.prompts)])
    return [row for rows in line.recv() for row in rows]
