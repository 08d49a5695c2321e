"""A server that learns from simulated users: does it get better, and does a poisoned stream stay out?

    python benchmarks/learn_soak.py --minutes 5
    python benchmarks/learn_soak.py --minutes 120 --poison 40 20 --kill-every 300

Users ask the starter sums over the chat route, and rate some of the answers after a while: a thumb, sometimes with the
right sum, wrong in `--noise` of the cases. In the minutes of `--poison START LENGTH` every thumb is inverted and every
correction is a wrong sum. The server makes jobs of it (`learn`), judges their versions on held-out sums (`gate`) and
tries them on a fifth of the requests (canary). With `--kill-every` it is killed (SIGKILL) and started again.

Printed: greedy accuracy of the active version on held-out sums over time, the transitions, latencies of chats while a
job trained and while none did, and whether every acknowledged rating is in the ledger. `--json FILE` keeps all of it.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from groupwise import Client
from groupwise.errors import RemoteError
from groupwise.tasks.starter.tasks import prompts as arithmetic

USERS = 3
HELD_OUT = 96
QUIET = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


@dataclass
class Soak:
    """What the users do, and what they saw."""

    url: str
    noise: float
    poison: tuple[float, float]  # seconds since the beginning: from, to
    began: float = field(default_factory=time.monotonic)
    acknowledged: set[str] = field(default_factory=set)
    latencies: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    training: bool = False
    refused: int = 0
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def poisoned(self) -> bool:
        return self.poison[0] <= time.monotonic() - self.began < self.poison[1]

    def user(self, seed: int) -> None:
        """Ask, wait, rate, until it is over."""
        rng, questions = random.Random(seed), arithmetic("add", "train", n=4000, seed=seed)
        later: list[tuple[float, str, str, bool]] = []
        with Client(self.url, retries=0) as client:
            for row in questions:
                if self.stop.wait(rng.uniform(0.05, 0.4)):
                    return
                try:
                    asked = time.monotonic()
                    training = self.training
                    answer = client.chat(row["prompt"], max_tokens=8, timeout=60)
                    self.latencies[training].append(time.monotonic() - asked)
                    right = answer.text.strip() == str(row["answer"])
                    if rng.random() < 0.8:
                        later.append((asked + rng.expovariate(1 / 4), answer.id, str(row["answer"]), right))
                    due, later = [e for e in later if e[0] <= asked], [e for e in later if e[0] > asked]
                    for _, id, gold, was_right in due:
                        self.rate(client, rng, id, gold, was_right, f"{seed}")
                except RemoteError:
                    self.refused += 1

    def rate(self, client: Client, rng: random.Random, id: str, gold: str, right: bool, user: str) -> None:
        wrong = rng.random() < self.noise
        if self.poisoned or wrong:
            right, gold = not right, str(int(gold) + rng.randint(1, 9))
        said: dict[str, Any] = {"thumb": "up" if right else "down"}
        if not right and rng.random() < 0.8:
            said["correction"] = gold
        self.acknowledged.add(client.feedback(id, user=user, timeout=30, **said).id)


def settings(folder: Path, port: int) -> Path:
    """The server's YAML."""
    prompts = {"source": "groupwise.tasks.starter.tasks:prompts", "args": {"skill": "add", "split": "test", "n": 192}}
    learn = {"adapter": "sums", "after": 24, "max_jobs_per_hour": 240, "max_tokens": 8}
    learn["config"] = {"learning_rate": 1.0e-3}
    gate = {"prompts": prompts, "rewards": ["groupwise.rewards.text:exact_match"], "max_tokens": 8, "margin": 0.05}
    gate |= {"scoring": {"workers": 0}, "canary": {"share": 0.2, "ratings": 8, "minutes": 1.0}}
    file = folder / "server.yaml"
    told = {"model": "starter", "port": port, "state_dir": str(folder / "state"), "min_free_bytes": 0}
    file.write_text(json.dumps({**told, "worker_threads": 1, "keep_versions": None, "learn": learn, "gate": gate}))
    return file


def start(file: Path, log: Path, url: str) -> subprocess.Popen[bytes]:
    """A server that is ready."""
    import os

    with log.open("ab") as output:
        command = [sys.executable, "-m", "groupwise", "serve", "--config", str(file)]
        process = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | QUIET)
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx2.get(f"{url}/ready", timeout=5).status_code == 200:
                return process
        except httpx2.RequestError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"the server did not start: see {log}\n{log.read_text()[-2000:]}")


def accuracy(client: Client, version: str) -> float:
    """Greedy, on held-out sums that the gate does not see."""
    rows = arithmetic("add", "test", n=192 + HELD_OUT, seed=1)[-HELD_OUT:]
    groups = client.sample([row["prompt"] for row in rows], n=1, max_tokens=8, temperature=0.0, adapter=version)
    return statistics.fmean(g.texts[0].strip() == str(r["answer"]) for g, r in zip(groups, rows, strict=True))


def watch(soak: Soak, client: Client, process: subprocess.Popen[bytes], restart: Any, args: argparse.Namespace) -> Any:
    """Measure until the time is over; returns (curve, kills)."""
    curve: list[dict[str, Any]] = []
    measured, killed, kills = -1e9, time.monotonic(), 0
    while (now := time.monotonic() - soak.began) < 60 * args.minutes:
        if args.kill_every and time.monotonic() - killed > args.kill_every:
            process.kill()
            process.wait()
            process, killed, kills = restart(), time.monotonic(), kills + 1
        try:
            state = httpx2.get(f"{soak.url}/v1/learn", timeout=30).json()
            soak.training = state["job_id"] is not None
            if now - measured > args.measure_every:
                measured = now
                point = {
                    "seconds": round(now),
                    "active": state["active"],
                    "accuracy": accuracy(client, state["active"]),
                }
                point |= {"trial": state["trial"], "poisoned": soak.poisoned, **state["counts"]}
                curve.append(point)
                print(point, flush=True)
        except (httpx2.RequestError, RemoteError) as error:
            print(f"at {now:.0f} s: {error}", flush=True)
        time.sleep(0.5)
    return curve, kills, process


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Milliseconds."""
    ordered = sorted(seconds)
    at = lambda q: round(1000 * ordered[min(len(ordered) - 1, int(q * len(ordered)))], 1)  # noqa: E731
    return {"chats": len(ordered), **({"p50_ms": at(0.5), "p99_ms": at(0.99)} if ordered else {})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--noise", type=float, default=0.1)
    parser.add_argument("--poison", type=float, nargs=2, default=None, metavar=("START", "LENGTH"), help="minutes")
    parser.add_argument("--kill-every", type=float, default=0.0, help="seconds; 0 never")
    parser.add_argument("--measure-every", type=float, default=15.0, help="seconds")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    begin, length = args.poison or (0.6 * args.minutes, 0.3 * args.minutes)
    folder = Path(tempfile.mkdtemp(prefix="learn-soak-"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url, file, log = f"http://127.0.0.1:{port}", settings(folder, port), folder / "server.log"
    process = start(file, log, url)
    try:
        soak = Soak(url, args.noise, (60 * begin, 60 * (begin + length)))
        users = [threading.Thread(target=soak.user, args=(i,), daemon=True) for i in range(USERS)]
        for user in users:
            user.start()
        with Client(url) as client:
            curve, kills, process = watch(soak, client, process, lambda: start(file, log, url), args)
            soak.stop.set()
            for user in users:
                user.join(timeout=60)
            state = httpx2.get(f"{url}/v1/learn", timeout=30).json()
            kept, cursor = set[str](), None
            while True:
                page = client.list_feedback(before=cursor, limit=2000)
                kept |= {each.id for each in page.feedback}
                if (cursor := page.next) is None:
                    break
    finally:
        process.terminate()
        process.wait(timeout=120)
    result = {
        "curve": curve,
        "transitions": [f"{each['kind']}: {each['message']}" for each in reversed(state["transitions"])],
        "counts": state["counts"],
        "kills": kills,
        "acknowledged": len(soak.acknowledged),
        "lost": len(soak.acknowledged - kept),
        "idle": quantiles(soak.latencies[False]),
        "beside_training": quantiles(soak.latencies[True]),
        "calls_that_failed": soak.refused,
    }
    print(json.dumps({key: value for key, value in result.items() if key != "curve"}, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
