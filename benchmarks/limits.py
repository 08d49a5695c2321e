"""How close to the machine's limits? A training pass beside matrix products, a decode step beside memory and products.

    python benchmarks/limits.py                      the starter and a model of 25M parameters
    python benchmarks/limits.py --models 150M        a larger one
    python benchmarks/limits.py --quick              does it run?

Training: `Learner.forward_backward`, the adapter of rank r on all linear layers, base weights frozen, in micro-batches
of the learner's own. Useful floating-point operations of S packed tokens (each prompt once) with N loss tokens:

    linear layer in -> out     2 S in out forward, as much backward for the gradient of its input. None for its weight,
                               which is frozen, nor for the input of the first layer's q, k, v, which needs none
    adapter of it              2 S r (in + out) forward, twice that backward (but for that same input)
    LM head H -> V             2 N H V forward, as much backward. That the backward pass computes the logits again
                               costs 2 N H V more and is not useful
    attention                  a pair of a query and a key it may see: 4 D forward, 8 D backward, for each of the query
                               heads. A prompt of L has L (L + 1) / 2 pairs, a completion of C on it L C + C (C + 1) / 2

The limit is the rate of the matrix products that are in this pass, [tokens, in] x [in, out] and the two kinds of the
backward pass, each measured alone at its own shape, in turns with the pass; where micro-batches run side by side, with
one thread, and as many at once are taken to be as fast each. `share` is useful operations over seconds, over that rate:
with the base model's products alone as the yardstick, and with the thin ones of the adapter too.

Decoding: a step of the engine at B rows under an adapter, from the difference of two lengths. It must read every weight
once and all keys and values that its tokens look at (a group's prompt once): over the seconds of a step, this is
compared with the rate at which this run reads an array much larger than the caches, and one of the model's size, which
may be in a cache (sums and matrix-vector products, one thread and all of them: the best). With many rows products are
the limit: `products` is the time of the step's matrix products alone, with weights of their own for each layer.

Passes, products and decode steps are measured in processes of their own: each has one team of threads, as a run has
(docs/performance.md, "Threads"). Two in one process would slow each other down.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Table
from step_sides import MIB
from step_vs_trl import machine
from subjects import Shape, load, parameters_of, random_ids, samples_of, save_adapter
from torch import Tensor, nn

from groupwise.algo.loss import resolve_loss
from groupwise.engine.local import LocalEngine
from groupwise.model.load import LoadedModel
from groupwise.train.learner import Learner
from groupwise.types import PolicyVersion, SamplingParams, SamplingRequest

RANK = 16
GIGA = 1e9
SHORT = 0.02  # seconds that a timing takes at least, of as many calls as that needs
VERSION = PolicyVersion("bench", 1)
Key = TypeVar("Key")
T = TypeVar("T")


@dataclass(frozen=True)
class Product:
    """[m, k] x [k, n]. `kind`: forward x W^T, gradient of the input g W, of the weight g^T x."""

    kind: str
    m: int
    k: int
    n: int
    adapter: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n

    def function(self) -> Callable[[], Tensor]:
        """Computes it from operands that lie in memory as they do in the pass."""
        left = torch.randn(self.k, self.m).T if self.kind == "weight" else torch.randn(self.m, self.k)
        right = torch.randn(self.n, self.k).T if self.kind == "forward" else torch.randn(self.k, self.n)
        out = torch.empty(self.m, self.n)
        return lambda: torch.mm(left, right, out=out)


# -- the model, as products --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Linears:
    """Modules that share an input: their inputs and the outputs of each; `first`: the input needs no gradient."""

    inputs: int
    outputs: tuple[int, ...]
    first: bool = False


def linears_of(base: LoadedModel) -> list[Linears]:
    """The linear modules of every layer of a Llama-like model, in order, without the head."""
    own: Any = base.model
    groups = []
    for i, layer in enumerate(own.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        for names in (
            (attention.q_proj, attention.k_proj, attention.v_proj),
            (attention.o_proj,),
            (mlp.gate_proj, mlp.up_proj),
            (mlp.down_proj,),
        ):
            first = i == 0 and names[0] is attention.q_proj
            groups.append(Linears(names[0].in_features, tuple(module.out_features for module in names), first))
    return groups


def products_of(base: LoadedModel, tokens: int, predicted: int, *, rank: int = RANK) -> list[Product]:
    """The useful products of one forward and backward pass over `tokens`, of which `predicted` are loss tokens."""
    out: list[Product] = []
    for group in linears_of(base):
        inputs, ranks = group.inputs, rank * len(group.outputs)
        out.append(Product("forward", tokens, inputs, ranks, True))
        out.append(Product("weight", ranks, tokens, inputs, True))
        if not group.first:
            out.append(Product("input", tokens, ranks, inputs, True))
        for outputs in group.outputs:
            out.append(Product("forward", tokens, inputs, outputs))
            out.append(Product("forward", tokens, rank, outputs, True))
            out.append(Product("input", tokens, outputs, rank, True))
            out.append(Product("weight", outputs, tokens, rank, True))
            if not group.first:
                out.append(Product("input", tokens, outputs, inputs))
    hidden, vocabulary = head_of(base)
    return [*out, Product("forward", predicted, hidden, vocabulary), Product("input", predicted, vocabulary, hidden)]


def head_of(base: LoadedModel) -> tuple[int, int]:
    """Hidden size and vocabulary."""
    linear: Any = base.model.get_output_embeddings()
    return linear.in_features, linear.out_features


def attention_flops(base: LoadedModel, shape: Shape) -> int:
    """Of a forward and backward pass, with shared prompts and only the pairs that the causal mask leaves."""
    config: Any = base.model.config
    L, C = shape.prompt, shape.completion
    pairs = shape.prompts * (L * (L + 1) // 2 + shape.group * (L * C + C * (C + 1) // 2))
    return 12 * config.head_dim * config.num_attention_heads * config.num_hidden_layers * pairs


# -- the limits --------------------------------------------------------------------------------------------------------


def by_turns(functions: Mapping[Key, Callable[[], object]], *, repeats: int) -> dict[Key, float]:
    """Median seconds of a call of each, in rounds, so that the machine's moods meet all; one call each comes before."""
    calls, times = {}, {key: list[float]() for key in functions}
    for key, function in functions.items():
        function()
        calls[key] = max(1, math.ceil(SHORT / max(_seconds(function, 1), 1e-7)))
    for _ in range(repeats):
        for key, function in functions.items():
            times[key].append(_seconds(function, calls[key]))
    return {key: statistics.median(each) for key, each in times.items()}


def _seconds(function: Callable[[], object], calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - started) / calls


def with_threads(count: int, function: Callable[[], object]) -> Callable[[], object]:
    """`function` with so many torch threads."""

    def run() -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        function()
        torch.set_num_threads(before)

    return run


def read_rates(size: int, *, threads: int, repeats: int) -> dict[str, float]:
    """Bytes a second at which `size` bytes are read, by threads and way; the best is the limit."""
    rows = max(1, size // (4 * 4096))
    x, vector = torch.ones(rows, 4096), torch.ones(4096)
    ways = {"sum": x.sum, "matrix-vector": lambda: torch.mv(x, vector)}
    functions = {
        f"{name}, {count} threads": with_threads(count, way)
        for name, way in ways.items()
        for count in sorted({1, threads})
    }
    return {name: x.nbytes / seconds for name, seconds in by_turns(functions, repeats=repeats).items()}


# -- training ----------------------------------------------------------------------------------------------------------


def trainings(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every shape; the calling thread computes alone where micro-batches run side by side."""
    base = load(name)
    return [training(base, shape, options) for shape in options.shapes]


def training(base: LoadedModel, shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """One shape: the pass, its operations, and its products alone."""
    learner, samples, spec = Learner(base, threads=options.threads), samples_of(shape), resolve_loss("grpo")
    lanes, batches = learner._cut(samples)
    packed = [(len(batch.input_ids_S), len(batch.target_N)) for batch in batches]
    assert sum(tokens for tokens, _ in packed) == shape.packed, "prompts are not shared"

    def run() -> None:
        learner.forward_backward(samples, spec)
        learner.zero_grad()

    products = [product for tokens, predicted in packed for product in products_of(base, tokens, predicted)]
    functions: dict[Product | None, Callable[[], object]] = {None: with_threads(learner.threads, run)}
    functions |= {product: with_threads(learner.threads, product.function()) for product in dict.fromkeys(products)}
    alone = by_turns(functions, repeats=options.repeats)
    seconds = alone.pop(None)
    alone = {product: each / lanes for product, each in alone.items()}
    whole = [product for product in products if not product.adapter]
    flops, attention = sum(product.flops for product in products), attention_flops(base, shape)
    base_seconds = sum(alone[product] for product in whole)
    base_rate = sum(product.flops for product in whole) / base_seconds
    every_rate = flops / sum(alone[product] for product in products)
    rate = (flops + attention) / seconds
    return {
        "shape": asdict(shape),
        "micro_batches": len(packed),
        "lanes": lanes,
        "packed_tokens": shape.packed,
        "seconds": seconds,
        "products_s": sum(alone[product] for product in products),
        "base_products_s": base_seconds,
        "useful_gflop": {"products": flops / GIGA, "attention": attention / GIGA},
        "gflop_per_s": rate / GIGA,
        "limit_gflop_per_s": {"base products": base_rate / GIGA, "all products": every_rate / GIGA},
        "share": {"base products": rate / base_rate, "all products": rate / every_rate},
        "each_product": [{**asdict(p), "seconds": s, "gflop_per_s": p.flops / s / GIGA} for p, s in alone.items() if p],
    }


# -- decoding ----------------------------------------------------------------------------------------------------------


def decodings(name: str, options: argparse.Namespace) -> dict[int, list[float]]:
    """Seconds of a step, by its rows; as in a run the engine's thread has all threads, and the calling one computes
    alone."""
    torch.set_num_threads(1)
    base = load(name)
    engine = LocalEngine(base, max_rows=max(options.rows), threads=options.threads)
    with tempfile.TemporaryDirectory(prefix="limits-") as folder:
        save_adapter(base, Path(folder))
        engine.load(VERSION, Path(folder))
    try:
        return {rows: steps_of(engine, rows, options) for rows in options.rows}
    finally:
        engine.close()


def steps_of(engine: LocalEngine, rows: int, options: argparse.Namespace) -> list[float]:
    """Seconds of a step of `rows` rows: groups of at most 16."""
    group = min(rows, 16)
    groups, (short, long) = rows // group, options.tokens

    def run(tokens: int) -> float:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=0)
        requests = [
            SamplingRequest(prompt_ids=random_ids(options.prompt, seed=p), params=params, n=group, version=VERSION)
            for p in range(groups)
        ]
        started = time.perf_counter()
        done = engine.generate(requests)
        seconds = time.perf_counter() - started
        assert all(len(c.token_ids) == tokens for each in done for c in each)
        return seconds

    run(long)
    return [(run(long) - run(short)) / (long - short) for _ in range(options.repeats)]


def alone(name: str, options: argparse.Namespace) -> tuple[dict[int, float], dict[str, float]]:
    """Seconds of a step's products by its rows, and the rates at which as much as the model is read."""
    torch.set_num_threads(options.threads)
    base, found = load(name), {}
    for rows in options.rows:
        products = step_products(base, rows)
        by_threads = {count: with_threads(count, products) for count in {1, options.threads}}
        found[rows] = min(by_turns(by_threads, repeats=options.repeats).values())
    return found, read_rates(4 * parameters_of(base), threads=options.threads, repeats=options.repeats)


def decoding(
    base: LoadedModel, rows: int, steps: list[float], fastest: float, rates: dict[str, float], options: Any
) -> dict[str, Any]:
    """One line: what a step reads and computes, beside the limits."""
    seconds, (short, long), groups = statistics.median(steps), options.tokens, rows // min(rows, 16)
    config: Any = base.model.config
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    weights = 4 * parameters_of(base)
    cached = per_token * (groups * options.prompt + rows * (short + long) // 2)
    read = (weights + cached) / seconds
    return {
        "rows": rows,
        "step_s": seconds,
        "steps_s": steps,
        "tokens_per_s": rows / seconds,
        "weights_mib": weights / MIB,
        "cache_mib": cached / MIB,
        "gb_per_s": read / GIGA,
        "share_of_reading": {name: read / rate for name, rate in rates.items()},
        "products_s": fastest,
        "share_of_products": fastest / seconds,
    }


def step_products(base: LoadedModel, rows: int) -> Callable[[], None]:
    """Computes a decode step's matrix products, as few as the merged weights allow, layer after layer."""
    hidden, vocabulary = head_of(base)
    shapes = [(sum(group.outputs), group.inputs) for group in linears_of(base)] + [(vocabulary, hidden)]
    pairs = [(torch.randn(rows, inputs), torch.randn(outputs, inputs)) for outputs, inputs in shapes]

    def run() -> None:
        for x, weight in pairs:
            nn.functional.linear(x, weight)

    return run


# -- both --------------------------------------------------------------------------------------------------------------


def measure(name: str, stream: dict[str, float], options: argparse.Namespace) -> dict[str, Any]:
    """Everything about one model."""
    base = load(name)
    products, own = apart(alone, name, options)
    rates = {"large": max(stream.values()), "own size": max(own.values())}
    steps = apart(decodings, name, options)
    return {
        "model": name,
        "parameters": parameters_of(base),
        "training": apart(trainings, name, options),
        "decoding": [decoding(base, rows, each, products[rows], rates, options) for rows, each in steps.items()],
        "read_own_size": own,
    }


def apart(function: Callable[[str, argparse.Namespace], T], name: str, options: argparse.Namespace) -> T:
    """In a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, name, options).result()


def training_table(results: Sequence[dict[str, Any]]) -> Table:
    table = Table("model", "P,C,G,prompts", title="A training pass", caption="GFLOP and GFLOP/s; products alone in s")
    for heading in ("useful", "seconds", "products", "rate", "limit", "share", "limit, adapter's too", "share"):
        table.add_column(heading, justify="right")
    for result in results:
        for each in result["training"]:
            numbers = (sum(each["useful_gflop"].values()), each["seconds"], each["products_s"], each["gflop_per_s"])
            cells = [f"{number:.3g}" for number in numbers]
            for name in ("base products", "all products"):
                cells += [f"{each['limit_gflop_per_s'][name]:.3g}", f"{each['share'][name]:.0%}"]
            table.add_row(result["model"], ",".join(map(str, each["shape"].values())), *cells)
    return table


def decoding_table(results: Sequence[dict[str, Any]]) -> Table:
    table = Table("model", "rows", title="A decode step", caption="shares of reading rates; products' share of time")
    headings = ("ms", "tokens/s", "weights MiB", "cache MiB", "GB/s", "of large", "of own size", "products ms", "share")
    for heading in headings:
        table.add_column(heading, justify="right")
    for result in results:
        for each in result["decoding"]:
            reading = [f"{share:.0%}" for share in each["share_of_reading"].values()]
            table.add_row(
                result["model"],
                str(each["rows"]),
                f"{each['step_s'] * 1e3:.2f}",
                f"{each['tokens_per_s']:,.0f}",
                f"{each['weights_mib']:.0f}",
                f"{each['cache_mib']:.1f}",
                f"{each['gb_per_s']:.1f}",
                *reading,
                f"{each['products_s'] * 1e3:.2f}",
                f"{each['share_of_products']:.0%}",
            )
    return table


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["starter", "25M"], help="starter, 25M, 150M or HIDDENxLAYERS")
    shapes = [Shape(64, 32, 8, 8), Shape(512, 64, 16, 2)]
    parser.add_argument("--shapes", nargs="+", type=Shape.parse, default=shapes, metavar="P,C,G,PROMPTS")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 256], help="of a decode step")
    parser.add_argument("--tokens", nargs=2, type=int, default=[16, 80], help="the lengths whose difference is taken")
    parser.add_argument("--stream-mib", type=int, default=2048, help="the array that no cache holds")
    for name, default in {"prompt": 64, "repeats": 5, "threads": torch.get_num_threads()}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--quick", action="store_true", help="a smoke run: the starter, one small shape, few rows")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    options = parser.parse_args()
    if options.quick:
        options.models, options.shapes, options.rows = ["starter"], [Shape(32, 16, 4, 2)], [1, 16]
        options.tokens, options.stream_mib, options.repeats = [4, 36], 256, 3
    return options


def main() -> None:
    options, console = parse_options(), Console(width=130)
    about = machine(options.threads)
    console.print("  ".join(f"{name} {value}" for name, value in about.items()), soft_wrap=True, highlight=False)
    stream = read_rates(options.stream_mib * MIB, threads=options.threads, repeats=options.repeats)
    for way, rate in stream.items():
        console.print(f"  reading {options.stream_mib} MiB, {way}: {rate / GIGA:.1f} GB/s", style="dim")
    results = [measure(name, stream, options) for name in options.models]
    console.print(training_table(results))
    console.print(decoding_table(results))
    if options.json:
        everything = {"machine": about, "read_large": stream, "results": results}
        options.json.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
