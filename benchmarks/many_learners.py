"""What does training adapters together bring? N learners over one base, in joint passes and one after another.

    python benchmarks/many_learners.py [--models starter 25M] [--learners 1 4 16 64] [--shapes 8,4,4,1 16,8,4,1]

Each learner takes `--steps` optimizer steps, each on one micro-batch of a shape PROMPT,COMPLETION,GROUP,PROMPTS (ranks
4, 8 and 16 in turns). Both sides run in this process by turns, `--rounds` times after one that does not count: one
after another, as a queue of jobs trains them, with `--threads` for each; and each in a thread of its own, where they
meet (`train.together`). Prints packed tokens a second by the clock one after another, how many times as many together,
by the clock and by the processor's time, the learners in a pass, and `at most`: by how much the processor's time could
shrink if all but what a token costs in a large micro-batch were shared. Before it, what a learner more takes of memory,
with its optimizer. Adapters of both sides are compared, and have the same bytes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from step_sides import MIB, resident
from subjects import Shape, load, samples_of

from groupwise.algo.loss import resolve_loss
from groupwise.config.lora import LoraSpec
from groupwise.model.load import LoadedModel
from groupwise.train.learner import Learner
from groupwise.train.strategy import SingleProcess
from groupwise.train.together import Joined, JointPasses
from groupwise.types import Sample

RANKS = (4, 8, 16)
LARGE = Shape(16, 8, 8, 16)  # 1,280 packed tokens
SHAPES = [Shape(8, 4, 4, 1), Shape(16, 8, 4, 1), Shape(16, 8, 4, 2)]
LOSS = resolve_loss("grpo")
HEAD = ("learners", "tokens", "alone t/s", "clock", "cpu", "at most", "in a pass")


def train(learner: Learner, samples: Sequence[Sample], steps: int) -> None:
    for _ in range(steps):
        learner.forward_backward(samples, LOSS)
        learner.optim_step(learning_rate=1e-4)


def new_learners(base: LoadedModel, count: int, *, threads: int, place: JointPasses | None) -> list[Learner]:
    strategies = (SingleProcess() if place is None else Joined(place) for _ in range(count))
    return [
        Learner(base, lora=LoraSpec(rank=RANKS[n % 3]), threads=threads, seed=n, strategy=strategy)
        for n, strategy in enumerate(strategies)
    ]


def measured(
    learners: Sequence[Learner], samples: Sequence[Sample], steps: int, *, at_once: bool
) -> tuple[float, float]:
    """Seconds by the clock and of the processor."""
    began, used = time.perf_counter(), time.process_time()
    if at_once:
        with ThreadPoolExecutor(len(learners), initializer=torch.set_num_threads, initargs=(1,)) as threads:
            list(threads.map(lambda each: train(each, samples, steps), learners))
    else:
        for each in learners:
            train(each, samples, steps)
    return time.perf_counter() - began, time.process_time() - used


def seconds_a_token(base: LoadedModel) -> float:
    """Of the processor, in a large micro-batch that one thread computes."""
    (learner,), samples = new_learners(base, 1, threads=1, place=None), samples_of(LARGE)
    return min(measured([learner], samples, 1, at_once=False)[1] for _ in range(4)) / LARGE.packed


def compare(base: LoadedModel, count: int, shape: Shape, options: argparse.Namespace, token_s: float) -> str:
    place, samples = JointPasses(at_once=options.threads), samples_of(shape)
    apart = new_learners(base, count, threads=options.threads, place=None)
    together = new_learners(base, count, threads=options.threads, place=place)
    found: list[tuple[tuple[float, float], tuple[float, float]]] = []
    for _ in range(1 + options.rounds):
        one = measured(apart, samples, options.steps, at_once=False)
        found.append((one, measured(together, samples, options.steps, at_once=True)))
    for mine, theirs in zip(together, apart, strict=True):
        assert all(a.equal(b) for a, b in zip(mine.parameters, theirs.parameters, strict=True))
    counted, tokens = found[1:], count * options.steps * shape.packed
    clock, cpu = (statistics.median(one[i] / all_[i] for one, all_ in counted) for i in (0, 1))
    speed = tokens / statistics.median(one[0] for one, _ in counted)
    most = statistics.median(one[1] for one, _ in counted) / (tokens * token_s)
    seats = place.counts.seats / max(place.counts.passes, 1)
    return f"{count:8} {shape.packed:7} {speed:10.0f} {clock:8.2f}x {cpu:8.2f}x {most:8.2f}x {seats:9.1f}"


def a_learner_more(base: LoadedModel, options: argparse.Namespace) -> float:
    """MiB of one with rank 8 and its optimizer's moments."""
    samples, before, many = samples_of(options.shapes[0]), 0.0, 16
    kept = []
    for number in range(many + 2):
        if number == 2:  # what the first ones need besides is there
            before = resident()
        kept.append(Learner(base, lora=LoraSpec(rank=8), threads=1))
        train(kept[-1], samples, 1)
    return (resident() - before) / MIB / many


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["starter", "25M"])
    parser.add_argument("--learners", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--shapes", nargs="+", type=Shape.parse, default=SHAPES)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.models:
        base = load(name)
        token_s = seconds_a_token(base)
        print(f"{name}: {1 / token_s:,.0f} tokens a second of a processor in large micro-batches", flush=True)
        print(
            f"{'learners':>8} {'tokens':>7} {'alone t/s':>10} {'clock':>9} {'cpu':>9} {'at most':>9} {'in a pass':>9}"
        )
        for shape in options.shapes:
            for count in options.learners:
                print(compare(base, count, shape, options, token_s), flush=True)


if __name__ == "__main__":
    main()
