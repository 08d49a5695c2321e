"""What does training posted jobs at once bring? N jobs of N adapters together, and one at a time as a queue does it.

    python benchmarks/many_jobs.py [--jobs 1 4 16 64] [--model starter] [--steps 40] [--shape 8,4,4,4] [--rounds 3]
                                   [--threads 1]

Two workers (the process that `groupwise serve` starts), each on a ledger of its own, get the same jobs by turns: one
trains one job at a time, the other as many at once as it will. A job takes `--steps` optimizer steps on one micro-batch
of the shape PROMPT,COMPLETION,GROUP,PROMPTS; ranks are 4, 8 and 16 in turns. `--model 25M` is another of the models of
`subjects`, with random weights. A round is from the moment when all jobs
are in the queue to that when all versions are published. Beside them a server answers chats, one after another: how
long they take (p50, p99) is said of each side, and of times in which nobody trains. Before the rounds, what the worker
takes of memory with one job at work and with all, at the most.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from live_server import groupwise_server
from subjects import SIZES, Shape, random_ids, write_model

from groupwise.config.job import parse_job_config
from groupwise.platform import resident_bytes
from groupwise.store.ledger import Ledger
from groupwise.store.ledger_schema import JobState

MIB, RANKS, WAIT_S = 1 << 20, (4, 8, 16), 600
WORK = "import sys; from groupwise.run import job_room, worker; job_room.MOST_AT_ONCE = int(sys.argv.pop(1)); "
WORK += "sys.exit(worker.main())"
ONE, ALL = "one at a time", "at once"


class Side:
    """A worker on a ledger of its own, that trains at most `most` jobs at once."""

    def __init__(self, folder: Path, *, model: str, most: int, threads: int):
        folder.mkdir()
        self.ledger, self._posted = Ledger(folder / "ledger.db"), 0
        command = [sys.executable, "-c", WORK, str(most), "--state", str(folder), "--model", model]
        command += ["--dtype", "float32", "--device", "cpu", "--threads", str(threads)]
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                command, stderr=log, env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
            )
        self._log = folder / "log"

    def post(self, count: int, shape: Shape, steps: int) -> None:
        for number in range(count):
            config = {"lora_rank": RANKS[number % 3], "iterations": steps, "kl_coeff": 0.0, "seed": number}
            self.ledger.submit(
                kind="grpo",
                adapter=f"a{self._posted}",
                config=parse_job_config("grpo", config).model_dump(mode="json"),
                summary={},
                payload=json.dumps(payload(shape, seed=number)).encode(),
                steps=steps,
                auto_load=False,
                max_queued=10_000,
            )
            self._posted += 1

    def done(self) -> float:
        """Wait until all jobs have ended; returns the most bytes that the process had meanwhile."""
        most, deadline = 0, time.monotonic() + WAIT_S
        while left := self.ledger.jobs(states=(JobState.QUEUED, JobState.RUNNING), limit=1):
            if self.process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{len(left)} jobs do not end:\n{self._log.read_text()[-3000:]}")
            most = max(most, resident_bytes(self.process.pid))
            time.sleep(0.01)
        assert not self.ledger.jobs(states=(JobState.FAILED,)), self._log.read_text()[-3000:]
        return most

    def round(self, count: int, shape: Shape, steps: int) -> float:
        """Seconds for all of them."""
        self.post(count, shape, steps)
        began = time.perf_counter()
        self.done()
        return time.perf_counter() - began

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)
        self.ledger.close()


def payload(shape: Shape, *, seed: int) -> dict[str, object]:
    """Groups of random tokens, as the reader would hand them on."""

    def group(number: int) -> dict[str, object]:
        at = 1000 * seed + 100 * number
        completions = [
            {"ids": random_ids(shape.completion, seed=at + k), "logprobs": None, "reward": float(k % 2)}
            for k in range(shape.group)
        ]
        return {"prompt_ids": random_ids(shape.prompt, seed=at + 99), "completions": completions}

    return {"groups": [group(number) for number in range(shape.prompts)]}


class Chats(threading.Thread):
    """Chats one after another; `during` says whose seconds are being counted."""

    def __init__(self, client):
        super().__init__(daemon=True)
        self._client, self._ended, self._during, self.took = client, threading.Event(), "", dict[str, list[float]]()

    def run(self) -> None:
        while not self._ended.is_set():
            during, began = self._during, time.perf_counter()
            self._client.sample(
                [[{"role": "user", "content": "What is 17 + 25?"}]], n=1, max_tokens=24, temperature=1.0
            )
            if during and during == self._during:
                self.took.setdefault(during, []).append(time.perf_counter() - began)
            self._ended.wait(0.02)

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        self._during = what
        try:
            yield
        finally:
            self._during = ""

    def end(self) -> None:
        self._ended.set()
        self.join(60)

    def said(self, what: str) -> str:
        took = sorted(self.took.get(what, [0.0]))
        p50, p99 = (1000 * took[int(part * (len(took) - 1))] for part in (0.5, 0.99))
        return f"{what:14} p50 {p50:6.1f} ms  p99 {p99:6.1f} ms  ({len(took)} chats)"


def measure(sides: dict[str, Side], chats: Chats, count: int, shape: Shape, steps: int, rounds: int) -> None:
    """Rounds of so many jobs on both sides by turns, and what is printed of them."""
    sides[ALL].post(1, shape, steps)
    alone = sides[ALL].done()
    sides[ALL].post(count, shape, steps)
    more = (sides[ALL].done() - alone) / max(1, count - 1) / MIB
    chats.took.clear()
    seconds = {name: list[float]() for name in sides}
    for _ in range(rounds):
        with chats.during("nobody trains"):
            time.sleep(5)
        for name, side in sides.items():
            with chats.during(name):
                seconds[name].append(side.round(count, shape, steps))
    tokens = count * steps * shape.packed
    print(f"--- {count} jobs; {more:.1f} MiB for a job more ({alone / MIB:.0f} MiB with one)")
    for name, took in seconds.items():
        middle = statistics.median(took)
        print(f"{name:14} {middle:6.1f} s, {tokens / middle:,.0f} packed tokens a second")
    ratios = [one / together for one, together in zip(seconds[ONE], seconds[ALL], strict=True)]
    print(f"{statistics.median(ratios):.2f}x at once ({min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} rounds)")
    for name in ("nobody trains", *sides):
        print(chats.said(name), flush=True)


def made(model: str, folder: Path) -> str:
    """The model by a name of `subjects`, as a server takes it."""
    if model in SIZES:
        (place := folder / "model").mkdir()
        hidden, layers = SIZES[model]
        write_model(place, hidden=hidden, layers=layers)
        return str(place)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--model", default="starter")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--shape", type=Shape.parse, default=Shape(8, 4, 4, 4))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="many-jobs-") as name:
        folder = Path(name)
        model = made(options.model, folder)
        with groupwise_server(model=model) as client:
            sides = {ONE: Side(folder / "one", model=model, most=1, threads=options.threads)}
            sides[ALL] = Side(folder / "all", model=model, most=64, threads=options.threads)
            with closing(sides[ONE]), closing(sides[ALL]):
                for side in sides.values():
                    side.round(2, options.shape, 2)  # they have loaded, and tried what they try once
                chats = Chats(client)
                chats.start()
                for count in options.jobs:
                    measure(sides, chats, count, options.shape, options.steps, options.rounds)
                chats.end()


if __name__ == "__main__":
    main()
