"""A server that learns from simulated users: does it get better, and does a poisoned stream stay out?

    python benchmarks/learn_soak.py --minutes 5
    python benchmarks/learn_soak.py --minutes 120 --poison 40 20 --kill-every 300

Users ask the starter sums of two-digit numbers over the chat route, and rate most answers after a while: a thumb,
mostly with the sum, wrong in `--noise` of the cases. In the minutes of `--poison START LENGTH` every thumb is inverted:
of a wrong answer users say that it is the sum, and of a right one another. The server makes jobs of it (`learn`): 32
ratings, eight completions each, 8 optimizer steps. It judges their versions on 256 held-out sums (`gate`) and tries
them on a quarter of the requests (canary). With `--kill-every` it is killed (SIGKILL) and started again.

Printed: accuracy of the active version on 256 other held-out sums over time, sampled at temperature 1 as users' answers
are; the transitions, and which versions went live during the poison; latencies of chats while a job trained and while
none did; the calls that failed, by reason; and whether every acknowledged rating is in the ledger. `--json FILE` keeps
it.
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
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx2

from groupwise import Client
from groupwise.errors import RemoteError

USERS = 3
HELD_OUT = 256
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
    failures: Counter[str] = field(default_factory=Counter)
    transitions: list[dict[str, Any]] = field(default_factory=list)
    down: bool = False  # killed, and not ready again
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def poisoned(self) -> bool:
        return self.poison[0] <= time.monotonic() - self.began < self.poison[1]

    def user(self, seed: int) -> None:
        """Ask, wait, rate, until it is over."""
        rng, later = random.Random(seed), list[tuple[float, str, int, str]]()
        with Client(self.url, retries=0) as client:
            while not self.stop.wait(rng.uniform(0.3, 1.5)):
                question, gold = asked_sum(rng, held_out=False)
                try:
                    began, training = time.monotonic(), self.training
                    answer = client.chat(question, max_tokens=8, temperature=1.0, timeout=60)
                    self.latencies[training].append(time.monotonic() - began)
                    if rng.random() < 0.8:
                        later.append((began + rng.expovariate(1 / 4), answer.id, gold, answer.text.strip()))
                    due, later = [e for e in later if e[0] <= began], [e for e in later if e[0] > began]
                    for _, id, gold, text in due:
                        self.rate(client, rng, id, gold, text, f"{seed}")
                except RemoteError as error:
                    reason = "server is down (killed)" if self.down else f"{error.status or type(error).__name__}"
                    self.failures[reason] += 1
                    self.stop.wait(0.5)

    def rate(self, client: Client, rng: random.Random, id: str, gold: int, text: str, user: str) -> None:
        right = text == str(gold)
        sum_ = str(gold)
        if self.poisoned or rng.random() < self.noise:
            right, sum_ = not right, str(gold + rng.randint(1, 9)) if right else text or "0"
        said: dict[str, Any] = {"thumb": "up" if right else "down"}
        if rng.random() < 0.9:
            said["correction"] = sum_
        self.acknowledged.add(client.feedback(id, user=user, timeout=30, **said).id)


def asked_sum(rng: random.Random, *, held_out: bool) -> tuple[str, int]:
    """A question and its answer; a tenth of all sums are held out, and none of these is asked by users."""
    while True:
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        if ((37 * a + b) % 10 == 0) == held_out:
            return f"What is {a} + {b}? Reply with just the number.", a + b


def held_out_sums(n: int, *, skip: int = 0) -> list[tuple[str, int]]:
    """Distinct ones."""
    rng, found = random.Random(0), dict[str, int]()
    while len(found) < skip + n:
        question, gold = asked_sum(rng, held_out=True)
        found[question] = gold
    return list(found.items())[skip:]


def settings(folder: Path, port: int) -> Path:
    """The server's YAML."""
    rows = [json.dumps({"prompt": question, "answer": str(gold)}) for question, gold in held_out_sums(HELD_OUT)]
    (folder / "held_out.jsonl").write_text("\n".join(rows) + "\n")
    learn = {"adapter": "sums", "after": 32, "max_groups": 96, "max_jobs_per_hour": 240, "max_tokens": 8}
    learn["config"] = {"learning_rate": 1.0e-3, "iterations": 2, "minibatches": 4}
    gate = {"prompts": {"source": "held_out.jsonl"}, "rewards": ["groupwise.rewards.text:exact_match"]}
    gate |= {"max_tokens": 8, "margin": 0.05, "scoring": {"workers": 0}}
    gate["canary"] = {"share": 0.25, "ratings": 8, "minutes": 1.0}
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
    """Sampled, on held-out sums that the gate does not see."""
    rows = held_out_sums(HELD_OUT, skip=HELD_OUT)
    groups = client.sample(
        [question for question, _ in rows], n=1, max_tokens=8, temperature=1.0, seed=1, adapter=version, timeout=120
    )
    return statistics.fmean(g.texts[0].strip() == str(gold) for g, (_, gold) in zip(groups, rows, strict=True))


def watch(soak: Soak, client: Client, process: subprocess.Popen[bytes], restart: Any, args: argparse.Namespace) -> Any:
    """Measure until the time is over; returns (curve, kills, the process)."""
    curve: list[dict[str, Any]] = []
    measured, killed, kills, told = -1e9, time.monotonic(), 0, 0
    while (now := time.monotonic() - soak.began) < 60 * args.minutes:
        if args.kill_every and now > 60 * args.kill_from and time.monotonic() - killed > args.kill_every:
            soak.down = True
            process.kill()
            process.wait()
            process, killed, kills = restart(), time.monotonic(), kills + 1
            soak.down = False
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
                for each in state["transitions"][::-1]:
                    if each["seq"] > told:
                        told = each["seq"]
                        gone = time.time() - datetime.fromisoformat(each["at"]).timestamp()
                        soak.transitions.append({"seconds": round(time.monotonic() - soak.began - gone), **each})
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
    parser.add_argument("--kill-from", type=float, default=0.0, help="minutes without a kill at the beginning")
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
        "transitions": [f"{each['seconds']} s, {each['kind']}: {each['message']}" for each in soak.transitions],
        "live_in_poison": [
            each["data"]["version"]
            for each in soak.transitions
            if each["kind"] == "promoted" and soak.poison[0] <= each["seconds"] < soak.poison[1]
        ],
        "counts": state["counts"],
        "kills": kills,
        "acknowledged": len(soak.acknowledged),
        "lost": len(soak.acknowledged - kept),
        "idle": quantiles(soak.latencies[False]),
        "beside_training": quantiles(soak.latencies[True]),
        "calls_that_failed": dict(soak.failures),
    }
    print(json.dumps({key: value for key, value in result.items() if key != "curve"}, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
