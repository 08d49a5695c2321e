"""What would a step take on more machines than here? Sampling, training and syncing simulated, with costs counted.

    python benchmarks/cluster_plan.py                            8B on 1, 8 and 64 GPUs, 70B on 64
    python benchmarks/cluster_plan.py --measured limits.json     with the shares that limits.py --json measured
    python benchmarks/cluster_plan.py --gpu h200 --completion 4000

Every step samples `--prompts` groups of `--group` completions and trains on them once. Lengths are log-normal with the
mean `--completion` and the spread `--spread`, cut at eight times the mean. On each engine completions are decoded as
they come, up to `--rows` at once; one that ends makes room for the next. A decode step reads the engine's weights and
the keys and values of its rows, and computes two operations a weight and row: it takes the longer of the two, and

    share of bandwidth, of products    what of the device's figures is reached: limits.py's on the machine where it was
                                       run, which is a guess for another; without --measured they are assumed
    host                               seconds of Python a decode step, as measured with the smallest model

Training takes 4 operations a weight and token with an adapter, 6 with all parameters, 2 more with checkpointing, and
what attention adds; every prompt is counted once a group. On several GPUs weights are sharded (FSDP2) where one does
not hold them: they are gathered three times a micro-batch, behind the products where those take longer.

`colocated`: all GPUs sample, then all train. `split`: some sample and some train, and with `max_staleness` s the
completions of batch k may be begun when version k - s is published; the seconds of a step are those of a steady state.
For each cluster the settings of its size are simulated, and the fastest of each kind shown with what slows it down.
`rank 0` is how long the process that leads has its processor busy besides (`run/controller_cost.py`). The
answer to `sampling` is more engines, to `training` more learners (train.devices), to `the longest completions` a larger
max_staleness, tensor parallelism or a smaller max_tokens, to `sync` an adapter instead of all parameters.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from groupwise.run.controller_cost import controller_seconds

GIGA, RANK, STEPS, MOST = 1e9, 16, 5, 8


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Dense 16-bit operations, bytes a second of its memory, and of its links within a machine and between machines."""

    flops: float
    memory: float
    bandwidth: float
    link: float
    network: float
    node: int = 8  # GPUs of a machine


@dataclass(frozen=True, kw_only=True)
class Model:
    """A decoder with gated MLPs in 16 bits."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    head_dim: int = 128
    tied: bool = False

    @property
    def linear(self) -> int:
        """Weights of the linear layers."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def parameters(self) -> int:
        return self.linear + self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def adapter(self) -> int:
        """Parameters of an adapter of rank 16 on all linear layers."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        widths = 2 * (self.hidden + query) + 2 * (self.hidden + key) + 3 * (self.hidden + self.intermediate)
        return RANK * self.layers * widths

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


GPUS = {  # the makers' data sheets
    "h100": Gpu(flops=989e12, memory=80e9, bandwidth=3.35e12, link=450e9, network=50e9),
    "h200": Gpu(flops=989e12, memory=141e9, bandwidth=4.8e12, link=450e9, network=50e9),
    "a100": Gpu(flops=312e12, memory=80e9, bandwidth=2.04e12, link=300e9, network=25e9),
}
MODELS = {
    "8B": Model(layers=36, hidden=4096, intermediate=12288, heads=32, kv_heads=8, vocabulary=151_936),
    "70B": Model(layers=80, hidden=8192, intermediate=28672, heads=64, kv_heads=8, vocabulary=128_256),
}
CLUSTERS = (("8B", 1), ("8B", 8), ("8B", 64), ("70B", 64))


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a step is made of, and what is trained."""

    prompts: int
    group: int
    prompt: int
    completion: float
    spread: float
    rows: int
    full: bool

    def lengths(self, step: int) -> list[int]:
        """Tokens of each completion; the same for every setting that is compared."""
        draw = random.Random(step)
        mu = math.log(self.completion) - self.spread**2 / 2
        most = MOST * self.completion
        return [
            max(1, round(min(draw.lognormvariate(mu, self.spread), most))) for _ in range(self.prompts * self.group)
        ]


@dataclass(frozen=True, kw_only=True)
class Shares:
    """What of the device's figures is reached; `host`: seconds of Python a decode step."""

    bandwidth: float = 0.6
    products: float = 0.6
    decode_products: float = 0.6
    host: float = 0.002
    published: float = 0.05  # seconds to make a version durable, whatever its size
    writes: float = 2e9  # bytes a second of the shared storage


@dataclass(frozen=True, kw_only=True)
class Setting:
    """`engines` of `tensor` GPUs each; `learners` GPUs; 0 learners: colocated."""

    engines: int
    tensor: int
    learners: int
    staleness: int = 0

    @property
    def colocated(self) -> bool:
        return not self.learners

    @property
    def trainers(self) -> int:
        return self.learners or self.engines * self.tensor

    def __str__(self) -> str:
        place = "colocated" if self.colocated else f"{self.learners} train"
        late = "" if self.colocated else f", max_staleness {self.staleness}"
        return f"{self.engines} x TP {self.tensor}, {place}{late}"


# -- what things cost --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds and bytes of one setting."""

    gpu: Gpu
    model: Model
    work: Work
    shares: Shares
    setting: Setting

    def decode_step(self, rows: int, held: float) -> float:
        """Seconds of one token for each of `rows`, which hold `held` tokens of keys and values together."""
        tensor, model = self.setting.tensor, self.model
        read = (2 * model.parameters + held * model.token_bytes) / tensor
        operations = 2 * model.parameters * rows / tensor
        busy = max(
            read / (self.gpu.bandwidth * self.shares.bandwidth),
            operations / (self.gpu.flops * self.shares.decode_products),
        )
        exchanged = 0.0 if tensor == 1 else 2 * model.layers * (1e-5 + 2 * rows * model.hidden * 2 / self.gpu.link)
        return busy + exchanged + self.shares.host

    def prefill(self) -> float:
        """Seconds of a group's prompt."""
        return self._operations(self.work.prompt, 0, passes=2) / (
            self.setting.tensor * self.gpu.flops * self.shares.products
        )

    def training(self, lengths: Sequence[int]) -> float:
        """Seconds of one optimizer step on completions of these lengths."""
        gpus, model = self.setting.trainers, self.model
        prompts, tokens = len(lengths) // self.work.group * self.work.prompt, sum(lengths)
        passes = (6 if self.work.full else 4) + (2 if self.checkpointing else 0)
        pairs = sum(length * (self.work.prompt + length / 2) for length in lengths)
        pairs += len(lengths) / self.work.group * self.work.prompt**2 / 2
        products = self._operations(prompts + tokens, pairs, passes=passes) / (
            gpus * self.gpu.flops * self.shares.products
        )
        gathered = 0.0
        if self.sharded:
            micro = max(1, math.ceil((prompts + tokens) / gpus / 16_384))
            gathered = 3 * micro * 2 * model.parameters * (1 - 1 / gpus) / self.link(gpus)
        trained = 2 * model.parameters if self.work.full else 4 * model.adapter
        reduced = 0.0 if gpus == 1 else 2 * trained * (1 - 1 / gpus) / self.link(gpus)
        return max(products, gathered) + reduced

    def _operations(self, tokens: int, pairs: float, *, passes: int) -> float:
        attention = 2 * passes * self.model.head_dim * self.model.heads * self.model.layers * pairs
        return passes * self.model.parameters * tokens + attention

    def sync(self) -> float:
        """Seconds from an optimizer step to the engines' next token: written once, read by every engine at once."""
        readers = 1 if self.work.full else self.setting.engines
        return (
            self.shares.published + self.sync_bytes / self.shares.writes + readers * self.sync_bytes / self.gpu.network
        )

    def controller(self, lengths: Sequence[int]) -> float:
        """Processor seconds of rank 0 for a step of completions of these lengths."""
        return sum(controller_seconds(sum(lengths), ranks=self.setting.trainers, servers=True).values())

    @property
    def sync_bytes(self) -> int:
        return 2 * self.model.parameters if self.work.full else 4 * self.model.adapter

    def link(self, gpus: int) -> float:
        return self.gpu.link if gpus <= self.gpu.node else self.gpu.network

    @property
    def sharded(self) -> bool:
        """Whether a learner's GPU cannot hold the weights (and the optimizer's, training all) by itself."""
        return self.setting.trainers > 1 and self._states(1) > 0.5 * self.gpu.memory

    @property
    def checkpointing(self) -> bool:
        """Whether activations of 16,384 tokens do not fit beside the weights."""
        return self._states(self._shards) + self._activations(16_384) > 0.9 * self.gpu.memory

    @property
    def _shards(self) -> int:
        return self.setting.trainers if self.sharded else 1

    def _states(self, shards: int) -> float:
        weights = self.model.parameters
        return (weights * 16 if self.work.full else weights * 2 + self.model.adapter * 16) / shards

    def _activations(self, tokens: int) -> float:
        model = self.model
        widths = 6 * model.hidden + 3 * model.intermediate + 4 * model.heads * model.head_dim
        return 2.0 * tokens * model.layers * widths

    @property
    def learner_bytes(self) -> float:
        """Of a GPU that trains."""
        kept = 2 * 16_384 * self.model.layers * self.model.hidden if self.checkpointing else self._activations(16_384)
        return self._states(self._shards) + kept

    @property
    def rows(self) -> int:
        """Completions that an engine decodes at once: as many as its memory holds at their mean length."""
        kept = self.learner_bytes - self._shared if self.setting.colocated else 0.0
        free = (0.9 * self.gpu.memory - kept) * self.setting.tensor - 2 * self.model.parameters
        return min(self.work.rows, int(free / (self._row_tokens * self.model.token_bytes)))

    @property
    def _row_tokens(self) -> float:
        return self.work.prompt / self.work.group + self.work.completion

    @property
    def _shared(self) -> float:
        """Weights that the engine and the learner of a GPU have in common."""
        return 0.0 if self.sharded or self.setting.tensor > 1 else 2.0 * self.model.parameters

    @property
    def engine_bytes(self) -> float:
        """Of a GPU that samples."""
        held = self.rows * self._row_tokens * self.model.token_bytes
        return (2 * self.model.parameters + held) / self.setting.tensor

    @property
    def fits(self) -> bool:
        return self.rows >= self.work.group and self.learner_bytes <= 0.9 * self.gpu.memory


# -- the simulation ----------------------------------------------------------------------------------------------------


class Engine:
    """One engine, from the end of one completion to the next."""

    def __init__(self, costs: Costs):
        self.costs, self.now, self.busy, self.row_seconds = costs, 0.0, 0.0, 0.0
        self.ends: list[tuple[int, int, int]] = []  # heap of (token count at which it ends, batch, length)
        self.done = 0  # tokens decoded by each row that was there from the start
        self.held = 0.0

    def admit(self, batch: int, length: int, first: bool) -> None:
        heapq.heappush(self.ends, (self.done + length, batch, length))
        self.held += self.costs.work.prompt / self.costs.work.group
        if first:
            self._spend(self.costs.prefill())

    def next_end(self) -> int:
        """Decode until a completion ends. -> its batch."""
        at, batch, length = heapq.heappop(self.ends)
        rows, tokens = len(self.ends) + 1, at - self.done
        self.held += rows * tokens / 2
        seconds = tokens * self.costs.decode_step(rows, self.held)
        self._spend(seconds)
        self.row_seconds += seconds
        self.held += rows * tokens / 2 - length - self.costs.work.prompt / self.costs.work.group
        self.done = at
        return batch

    def _spend(self, seconds: float) -> None:
        self.row_seconds += seconds * len(self.ends)
        self.now += seconds
        self.busy += seconds


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of a steady state, in seconds a step; `sampling` is the mean of the engines'. Idle: shares of the time in which a
    GPU has nothing to do."""

    setting: Setting
    seconds: float
    tokens_per_s: float
    sampling: float
    training: float
    sync: float
    controller: float  # of rank 0's processor: what `groupwise check FILE --gpus 8x80` says, too
    rows_used: float  # of the rows that the engines have, while they sample
    engines_idle: float
    learners_idle: float
    sync_bytes: int
    engine_gb: float
    learner_gb: float

    @property
    def bottleneck(self) -> str:
        """What a step would be shorter without."""
        if self.controller > 0.5 * self.seconds:
            return "rank 0"
        if self.sync > 0.2 * self.seconds:
            return "sync"
        if self.rows_used < 0.5 and self.sampling > self.training:
            return "the longest completions"
        if self.setting.colocated:
            return "sampling" if self.sampling > self.training else "training"
        if min(self.engines_idle, self.learners_idle) > 0.2:
            return "waiting for each other"
        return "sampling" if self.learners_idle > self.engines_idle else "training"


class Timeline:
    """The batches of one setting as they are sampled and trained, in simulated seconds."""

    def __init__(self, costs: Costs, batches: int):
        self.costs, self.lengths = costs, [costs.work.lengths(step) for step in range(batches)]
        self.engines = [Engine(costs) for _ in range(costs.setting.engines)]
        self.training: list[float] = []  # seconds that each batch took to train
        self.versions: list[float] = []  # when the version of each trained batch was there
        self._waiting: deque[tuple[int, int, bool]] = deque()
        self._missing = [len(each) for each in self.lengths]
        self._last = [0.0] * batches  # when the last completion so far of each batch ended
        self._queued = 0

    def until(self, trained: int) -> None:
        """Go on until so many batches are trained. Later ones are sampled meanwhile, as the staleness allows."""
        while len(self.versions) < trained:
            self._queue()
            engine = min(self.engines, key=lambda e: e.now if e.ends or self._waiting else math.inf)
            if not self._admitted(engine):
                batch = engine.next_end()
                self._missing[batch] -= 1
                self._last[batch] = max(self._last[batch], engine.now)
                self._train(trained)

    def _queue(self) -> None:
        """The completions of every batch that may be begun, each with whether it is the first of its group."""
        group = self.costs.work.group
        while self._queued < len(self.lengths) and self._version_since(self._queued) < math.inf:
            lengths = self.lengths[self._queued]
            self._waiting.extend((self._queued, length, i % group == 0) for i, length in enumerate(lengths))
            self._queued += 1

    def _version_since(self, batch: int) -> float:
        """When the version that a batch may be begun with was published; infinite where it has not been yet."""
        late = batch - self.costs.setting.staleness - 1
        return 0.0 if late < 0 else self.versions[late] if late < len(self.versions) else math.inf

    def _admitted(self, engine: Engine) -> bool:
        if not self._waiting or len(engine.ends) >= self.costs.rows:
            return False
        since = self._version_since(self._waiting[0][0])
        if engine.ends and since > engine.now:
            return False
        engine.now = max(engine.now, since)
        engine.admit(*self._waiting.popleft())
        return True

    def _train(self, most: int) -> None:
        """Every batch whose turn it is and that is complete."""
        while (batch := len(self.versions)) < most and not self._missing[batch]:
            begun = max(self._last[batch], self.versions[-1] if self.versions else 0.0)
            self.training.append(self.costs.training(self.lengths[batch]))
            self.versions.append(begun + self.training[-1] + self.costs.sync())


def simulate(costs: Costs, steps: int = STEPS) -> Outcome:
    """`steps` steps in a steady state. Batches go on coming after the last one that is looked at."""
    setting, before = costs.setting, costs.setting.staleness + 1
    timeline = Timeline(costs, batches=steps + 2 * before)
    timeline.until(before + steps)
    engines, versions = timeline.engines, timeline.versions
    span, training = versions[-1] - versions[before - 1], statistics.fmean(timeline.training[before:])
    seconds, decoding = span / steps, sum(engine.busy for engine in engines)
    ended = max(engine.now for engine in engines) if setting.staleness else versions[-1]
    busy = seconds * decoding / setting.engines / ended
    trains, samples = (training, busy) if setting.colocated else (0.0, 0.0)  # what the same GPUs do as well
    return Outcome(
        setting=setting,
        seconds=seconds,
        tokens_per_s=sum(map(sum, timeline.lengths[before : before + steps])) / span,
        sampling=busy,
        training=training,
        sync=costs.sync(),
        controller=statistics.fmean(map(costs.controller, timeline.lengths[before : before + steps])),
        rows_used=sum(engine.row_seconds for engine in engines) / (costs.rows * decoding),
        engines_idle=max(0.0, 1 - (busy + trains) / seconds),
        learners_idle=max(0.0, 1 - (training + samples) / seconds),
        sync_bytes=costs.sync_bytes,
        engine_gb=costs.engine_bytes / GIGA,
        learner_gb=costs.learner_bytes / GIGA,
    )


def settings(gpus: int) -> Iterator[Setting]:
    """What can be configured for so many GPUs."""
    for tensor in (1, 2, 4, 8):
        if gpus % tensor == 0:
            yield Setting(engines=gpus // tensor, tensor=tensor, learners=0)
        for learners in sorted({max(1, gpus * eighths // 8) for eighths in (1, 2, 3, 4, 5, 6)}):
            if (gpus - learners) // tensor and (gpus - learners) % tensor == 0:
                for staleness in (0, 1, 2):
                    yield Setting(
                        engines=(gpus - learners) // tensor, tensor=tensor, learners=learners, staleness=staleness
                    )


def plan(model: Model, gpus: int, *, gpu: Gpu, work: Work, shares: Shares) -> list[Outcome]:
    """Every setting that fits into memory, the fastest first."""
    every = [Costs(gpu=gpu, model=model, work=work, shares=shares, setting=setting) for setting in settings(gpus)]
    return sorted((simulate(costs) for costs in every if costs.fits), key=lambda outcome: outcome.seconds)


# -- the report --------------------------------------------------------------------------------------------------------


def measured(path: Path) -> Shares:
    """The shares of limits.py's largest model; the host's seconds from the smallest at one row."""
    models = sorted(json.loads(path.read_text())["results"], key=lambda each: each["parameters"])
    smallest, largest = models[0], models[-1]
    by_rows = sorted(largest["decoding"], key=lambda each: each["rows"])
    return Shares(
        bandwidth=by_rows[0]["share_of_reading"]["large"],
        products=max(each["share"]["base products"] for each in largest["training"]),
        decode_products=by_rows[-1]["share_of_products"],
        host=min(each["step_s"] for each in smallest["decoding"]),
    )


def chosen(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The fastest of each kind: colocated, and split with each staleness."""
    best: dict[tuple[bool, int], Outcome] = {}
    for outcome in outcomes:
        best.setdefault((outcome.setting.colocated, outcome.setting.staleness), outcome)
    return list(best.values())


def rows_of(name: str, gpus: int, outcomes: Sequence[Outcome]) -> Iterator[list[str]]:
    for outcome in chosen(outcomes):
        yield [
            f"{name} on {gpus}",
            str(outcome.setting),
            f"{outcome.seconds:.1f}",
            f"{outcome.tokens_per_s:,.0f}",
            f"{outcome.sampling:.1f}",
            f"{outcome.training:.1f}",
            f"{outcome.sync:.2f}",
            f"{outcome.controller:.2f}",
            f"{outcome.rows_used:.0%}",
            f"{outcome.engines_idle:.0%} {outcome.learners_idle:.0%}",
            f"{outcome.engine_gb:.0f} {outcome.learner_gb:.0f}",
            outcome.bottleneck,
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", choices=GPUS, default="h100")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--completion", type=float, default=1500.0)
    parser.add_argument("--spread", type=float, default=0.8)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--full", action="store_true", help="all parameters are trained, and synced whole")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="of limits.py --json")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    shares = Shares() if options.measured is None else measured(options.measured)
    names = ("prompts", "group", "prompt", "completion", "spread", "rows", "full")
    work = Work(**{name: getattr(options, name) for name in names})
    title = f"{options.gpu}, {work.prompts} x {work.group} completions of {work.completion:g} tokens a step"
    table = Table("cluster", "setting", title=title, caption="seconds; GB on a GPU that samples and one that trains")
    for heading in ("step", "tokens/s", "sampling", "training", "sync", "rank 0", "rows used", "idle", "GB"):
        table.add_column(heading, justify="right")
    table.add_column("slowed by")
    results: list[dict[str, Any]] = []
    for name, gpus in CLUSTERS:
        outcomes = plan(MODELS[name], gpus, gpu=GPUS[options.gpu], work=work, shares=shares)
        for row in rows_of(name, gpus, outcomes):
            table.add_row(*row)
        table.add_section()
        results.append({"model": name, "gpus": gpus, "settings": [asdict(outcome) for outcome in outcomes]})
    Console(width=170).print(table)
    if options.json is not None:
        options.json.write_text(json.dumps({"shares": asdict(shares), "work": asdict(work), "clusters": results}))


if __name__ == "__main__":
    main()
