"""What the host does to the GPU in a training step and in a decode step, by torch.profiler.

    launches    kernels and graphs that the host starts (cudaLaunchKernel and its kin, cudaGraphLaunch)
    waits       calls in which the host waits for the device (cudaStreamSynchronize and its kin)
    items       single values that torch reads from the device (aten::_local_scalar_dense; aten::item is around it)
    to host     copies from the device to the host
    device      share of the time in which some kernel or copy ran
    kernels     the ten that took most of the device's time, in the JSON; the table has three

The profiler itself slows the host, so that `device` is a lower bound. On a CPU it counts operations in their place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from subjects import Shape, load, random_ids, save_adapter
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerActivity, profile

from gpu.cases import Cases, Result, Setting
from gpu.learner import FLEX, batch_of
from groupwise.algo.loss import resolve_loss
from groupwise.engine.local import LocalEngine
from groupwise.train.learner import Learner
from groupwise.types import PolicyVersion, SamplingParams, SamplingRequest

LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
ITEMS = ("aten::_local_scalar_dense",)
VERSION = PolicyVersion("bench", 1)
KERNELS = 10


def cases(setting: Setting) -> Cases:
    model = setting.of("0.6B", "tiny")
    every: dict[str, Callable[[], Result]] = {
        "training step, groups 16384, merged": lambda: training(model, "merged", setting),
        "training step, groups 16384, flex": lambda: training(model, FLEX, setting),
    }
    for rows in setting.of((1, 32, 256), (4,)):
        for compiled in (False, True):
            name = f"decode step, {rows} rows{', graphs' if compiled else ''}"
            every[name] = lambda rows=rows, compiled=compiled: decoding(model, rows, compiled, setting)
    return every


def training(model: str, way: Any, setting: Setting) -> Result:
    learner = Learner(load(model, device=setting.device, dtype=setting.dtype), attention=way, micro_tokens=1 << 20)
    samples, spec = batch_of(setting.of(Shape(512, 992, 16, 1), Shape(16, 16, 3, 1))), resolve_loss("grpo")

    def step() -> None:
        learner.forward_backward(samples, spec)
        learner.optim_step(learning_rate=1e-5)

    for _ in range(3):
        step()
    return told(watched(step, setting), steps=1)


def decoding(model: str, rows: int, compiled: bool, setting: Setting) -> Result:
    """Steps in the middle of a rollout, seen from the thread that decodes; numbers are of one step."""
    base = load(model, device=setting.device, dtype=setting.dtype)
    engine = LocalEngine(base, max_rows=rows, compile=compiled, lanes=1)
    try:
        with TemporaryDirectory() as folder:
            save_adapter(base, Path(folder))
            engine.load(VERSION, Path(folder))
        params = SamplingParams(max_tokens=setting.of(64, 24), seed=0, ignore_eos=True)
        request = SamplingRequest(prompt_ids=random_ids(64, seed=0), params=params, n=rows, version=VERSION)
        engine.generate([request])  # compiles, records
        seen: list[tuple[profile, float]] = []
        steps, warm = setting.of(16, 8), 8
        decoder: Any = engine._lanes[0].decoder
        decode, calls = decoder.decode, 0

        def counted() -> None:
            nonlocal calls
            calls += 1
            if calls == warm:
                seen.append(watched(lambda: [decode() for _ in range(steps)], setting))
            else:
                decode()

        decoder.decode = counted
        engine.generate([request])
        result = told(seen[0], steps=steps)
        why = getattr(decoder.steps, "why_not", None)
        if why is not None:
            result["row"]["note"] = f"uncompiled: {why}"
        return result
    finally:
        engine.close()


def watched(function: Callable[[], object], setting: Setting) -> tuple[profile, float]:
    """What the profiler saw, and seconds from the call to the end of what it started."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.device != "cpu" else [])]
    setting.synchronize()
    with profile(activities=activities) as seen:
        started = time.perf_counter()
        function()
        setting.synchronize()
        seconds = time.perf_counter() - started
    return seen, seconds


def told(watched: tuple[profile, float], *, steps: int) -> Result:
    """Numbers of one step, of so many that were watched."""
    seen, seconds = watched
    found = seen.events()
    assert found is not None
    on_device = [event for event in found if "CUDA" in str(event.device_type)]
    host = [event for event in found if "CUDA" not in str(event.device_type)]
    busy = covered((event.time_range.start, event.time_range.end) for event in on_device) / 1e6
    row = {
        "ms": 1e3 * seconds / steps,
        "operations": count(host, lambda name: name.startswith("aten::")) / steps,
        "launches": count(host, LAUNCHES.__contains__) / steps,
        # the last wait is this benchmark's own
        "waits": max(0, count(host, WAITS.__contains__) - bool(on_device)) / steps,
        "items": count(host, ITEMS.__contains__) / steps,
        "to host": count(on_device, lambda name: "DtoH" in name) / steps,
        "device": busy / seconds,
    }
    most = kernels(seen, steps=steps)
    row["most time in"] = "; ".join(f"{each['name'][:40]} {each['us']:.0f} us" for each in most[:3])
    return {"row": row, "kernels": most}


def count(events: Iterable[Any], is_one: Callable[[str], object]) -> int:
    return sum(bool(is_one(event.name)) for event in events)


def covered(ranges: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(ranges):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def kernels(seen: profile, *, steps: int) -> list[dict[str, Any]]:
    """The ten on which the device (where there is none, the CPU) spent most time."""
    averages: EventList = seen.key_averages()
    on_device = [each for each in averages if "CUDA" in str(each.device_type)]
    key = "self_device_time_total" if on_device else "self_cpu_time_total"
    most = sorted(on_device or averages, key=lambda each: -getattr(each, key))[:KERNELS]
    return [{"name": each.key[:120], "times": each.count / steps, "us": getattr(each, key) / steps} for each in most]
