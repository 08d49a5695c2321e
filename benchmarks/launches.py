"""What would a GPU wait for? Kernels started and waits of the host, of a decode step, a training step and a publish.

    python benchmarks/launches.py            all cases, a few minutes
    python benchmarks/launches.py --quick    does it run?

Nothing here is timed and no GPU is needed: the real engine and learner run on a simulated device
(`tools/simulated_gpu.py`), which computes on the CPU and counts. The counts are the same each time. A kernel takes the
host some 5 us to start, so

    host      launches x 5 us: a step cannot be shorter, unless CUDA graphs start many at once
    memory    decoding: bytes of weights, keys and values over 3.35 TB/s
    products  training: operations of the matrix products over 989 TFLOP/s (bfloat16, dense)

beside each other say what bounds a step on an H100. Rates are the data sheet's, which no kernel reaches. An operation
is counted as one kernel, so launches are a lower bound.

Models are in bfloat16, as `device: auto` loads them on a GPU, under an adapter of rank 16 on all linear layers.
Counts do not depend on widths: the 0.6B is counted with its vocabulary and narrow layers, with 2 and 4 of them, and the
rest is that every layer costs as much (`Counted.at`). A publish costs 5 launches for each shape of adapters, of which
the narrow layers have three, and a 0.6B's five.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter, deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from subjects import Shape, load, random_ids, samples_of, save_adapter

from groupwise.algo.loss import resolve_loss
from groupwise.engine.kv_cache import Extend
from groupwise.engine.local import LocalEngine
from groupwise.model.load import LoadedModel
from groupwise.train.learner import Learner
from groupwise.types import PolicyVersion, SamplingParams, SamplingRequest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from simulated_gpu import Counts, SimulatedGpu

LAUNCH_S, BYTES_S, FLOPS_S = 5e-6, 3.35e12, 989e12
ADAPTER = PolicyVersion("bench", 1)
PROMPT, GROUP, STEPS = 16, 8, 8


@dataclass(frozen=True)
class Subject:
    """A model: how it is counted (`name` of `subjects.load`, vocabulary), and its sizes. `per_layer` are weights."""

    label: str
    names: tuple[str, str]  # of two depths that it is counted at; the same twice: as it is
    depths: tuple[int, int]
    vocabulary: int | None
    layers: int
    hidden: int
    head: int
    per_layer: int
    key_values: int  # numbers of a token and layer


STARTER = Subject("starter, 1.8M", ("starter", "starter"), (4, 4), None, 4, 192, 4096 * 192, 0, 0)
SMALL = Subject(
    "Qwen3-0.6B's shape", ("64x2", "64x4"), (2, 4), 151_936, 28, 1024, 151_936 * 1024, 15_730_944, 2 * 8 * 128
)


@dataclass(frozen=True)
class Counted:
    """Launches and waits, and how many of the launches are within attention."""

    launches: float
    waits: float
    attention: float = 0.0

    def at(self, other: Counted, depths: tuple[int, int], layers: int) -> Counted:
        """Of so many layers, from this at `depths[0]` and another at `depths[1]` of them."""
        if depths[0] == depths[1]:
            return self
        share = (layers - depths[0]) / (depths[1] - depths[0])
        mine, theirs = asdict(self), asdict(other)
        return Counted(**{name: mine[name] + share * (theirs[name] - mine[name]) for name in mine})


def counted(counts: Counts, *, by: int = 1, attention: int = 0) -> Counted:
    return Counted(counts.launches / by, counts.waits / by, attention / by)


# -- what is counted ---------------------------------------------------------------------------------------------------


def moved(name: str, vocabulary: int | None, adapter: Path | None) -> tuple[SimulatedGpu, LoadedModel]:
    """A model in bfloat16 on a simulated GPU; an adapter of it is written to `adapter`."""
    base = load(name, vocabulary=vocabulary)
    if adapter is not None:
        save_adapter(base, adapter)
    base.model.to(torch.bfloat16)
    gpu = SimulatedGpu()
    with gpu:
        gpu.move(base.model)
    return gpu, base


def decode(name: str, vocabulary: int | None, rows: int, *, steps: int = STEPS) -> tuple[Counted, Counts]:
    """A decode step of `rows` rows of uneven length, in groups; the mean of several, none of which ends a row."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
        gpu, base = moved(name, vocabulary, Path(directory))
        with gpu, torch.no_grad():
            engine = LocalEngine(base, max_rows=rows, compile=False)
            engine.load(ADAPTER, Path(directory))
            decoder: Any = engine._lanes[0].decoder
            params = SamplingParams(max_tokens=4 * steps, seed=0, ignore_eos=True)
            group = min(GROUP, rows)
            asked = [
                SamplingRequest(prompt_ids=random_ids(PROMPT + 4 * p, seed=p), n=group, version=ADAPTER, params=params)
                for p in range(rows // group)
            ]
            first = len(asked) // 2
            for part in (asked[:first], asked[first:]):  # the second half begins later
                waiting = deque(engine._job(request, None) for request in part)
                while waiting:
                    decoder.admit(deque(), waiting)
                for _ in range(3):
                    decoder.decode() if decoder.active else None
            with gpu.counting() as counts, attention_of(gpu) as within:
                for _ in range(steps):
                    decoder.decode()
    return counted(counts, by=steps, attention=within.total()), counts


class attention_of:
    """Counts what is launched within attention."""

    def __init__(self, gpu: SimulatedGpu):
        self._gpu, self._own, self.seen = gpu, Extend.attend, Counter[str]()

    def __enter__(self) -> Counter[str]:
        gpu, own, seen = self._gpu, self._own, self.seen

        def attend(layout: Extend, *args: Any) -> Any:
            before = gpu.counts.launches
            out = own(layout, *args)
            seen["attention"] += gpu.counts.launches - before
            return out

        Extend.attend = attend
        return seen

    def __exit__(self, *error: object) -> None:
        Extend.attend = self._own


def train(name: str, vocabulary: int | None, shape: Shape, *, micro_batches: int = 1) -> tuple[Counted, Counted]:
    """Forward and backward of a batch in so many micro-batches, and the optimizer step, after a first of both."""
    gpu, base = moved(name, vocabulary, None)
    budget = -(-shape.packed // micro_batches)
    with gpu:
        learner = Learner(base, micro_tokens=budget)
        samples, spec = samples_of(shape), resolve_loss("grpo")
        learner.forward_backward(samples, spec)
        learner.optim_step(learning_rate=1e-5)
        with gpu.counting() as passes:
            learner.forward_backward(samples, spec)
        with gpu.counting() as step:
            learner.optim_step(learning_rate=1e-5)
    return counted(passes), counted(step)


def publish(name: str, vocabulary: int | None) -> Counted:
    """The adapter's way from the learner to the engine of the same process."""
    gpu, base = moved(name, vocabulary, None)
    with gpu, torch.no_grad(), tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
        learner, engine = Learner(base), LocalEngine(base, max_rows=8, compile=False)
        with gpu.counting() as counts:
            learner.save_adapter(Path(directory))
            engine.load(ADAPTER, Path(directory))
    return counted(counts)


# -- and what it means on an H100 --------------------------------------------------------------------------------------


def weights_of(subject: Subject) -> int:
    """The numbers that a token is multiplied with."""
    if subject.per_layer:
        return subject.layers * subject.per_layer + subject.head
    return sum(p.numel() for p in load("starter").model.parameters() if p.ndim == 2)


def decode_bytes(subject: Subject, rows: int, tokens: int) -> int:
    """Of a step: every weight once, and the keys and values of `tokens` of each row, in 16 bits."""
    return 2 * (weights_of(subject) + rows * tokens * subject.layers * (subject.key_values or 2 * subject.hidden))


def training_flops(subject: Subject, shape: Shape) -> int:
    """Forward and the gradient of inputs through frozen layers; the head forward, again, and backward."""
    body = weights_of(subject) - subject.head
    return 4 * body * shape.packed + 6 * subject.head * shape.rows * shape.completion


def whole(subject: Subject, function: Any, *args: Any) -> Any:
    """What is counted at two depths, as of all layers."""
    names = dict.fromkeys(subject.names)
    found = [function(name, subject.vocabulary, *args) for name in names]
    first, other = found[0], found[-1]
    pick = (lambda x: x[0]) if isinstance(first, tuple) and isinstance(first[1], Counts) else (lambda x: x)
    first, other = pick(first), pick(other)
    if isinstance(first, Counted):
        return first.at(other, subject.depths, subject.layers)
    return tuple(a.at(b, subject.depths, subject.layers) for a, b in zip(first, other, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Kernels that would be started, and waits of the host.")
    parser.add_argument("--quick", action="store_true", help="The starter alone, with few rows.")
    parser.add_argument("--json", type=Path, help="Write the counts there.")
    options = parser.parse_args()
    subjects = [STARTER] if options.quick else [STARTER, SMALL]
    rows = (1, 8) if options.quick else (1, 64, 256)
    shape = Shape(PROMPT, 32, GROUP, 2 if options.quick else 8)
    console, report = Console(), dict[str, Any]()

    table = Table("model", "rows", "launches", "a token", "of attention", "waits", "host, ms", "memory, ms")
    for subject in subjects:
        for count in rows:
            step = whole(subject, decode, count)
            memory = decode_bytes(subject, count, 512) / BYTES_S
            report[f"decode, {subject.label}, {count}"] = asdict(step)
            cells = (f"{step.launches:,.0f}", f"{step.launches / count:,.1f}", f"{step.attention:,.0f}")
            times = (f"{step.waits:.2f}", f"{step.launches * LAUNCH_S * 1e3:.2f}", f"{memory * 1e3:.3f}")
            table.add_row(subject.label, str(count), *cells, *times)
    console.print("A decode step (keys and values of 512 tokens a row)", table, sep="\n")

    table = Table("model", "what", "launches", "waits", "host, ms", "products, ms")
    for subject in subjects:
        for parts in (1, 4):
            passes, step = whole(subject, train, shape) if parts == 1 else whole(subject, _in_parts(parts), shape)
            products = training_flops(subject, shape) / FLOPS_S
            label = f"forward and backward, {shape.packed:,} tokens in {parts}"
            report[f"train, {subject.label}, {parts}"] = asdict(passes)
            times = (f"{passes.launches * LAUNCH_S * 1e3:.1f}", f"{products * 1e3:.2f}")
            table.add_row(subject.label, label, f"{passes.launches:,.0f}", f"{passes.waits:.0f}", *times)
        report[f"optimizer, {subject.label}"] = asdict(step)
        table.add_row(
            subject.label, "optimizer step", f"{step.launches:,.0f}", f"{step.waits:.0f}",
            f"{step.launches * LAUNCH_S * 1e3:.1f}", "",
        )  # fmt: skip
        given = whole(subject, publish)
        report[f"publish, {subject.label}"] = asdict(given)
        table.add_row(subject.label, "publish to the engine", f"{given.launches:,.0f}", f"{given.waits:.0f}", "", "")
    console.print("A training step", table, sep="\n")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


def _in_parts(parts: int) -> Any:
    return lambda *args: train(*args, micro_batches=parts)


if __name__ == "__main__":
    main()
