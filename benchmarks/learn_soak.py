"""A server that learns from simulated users: four claims about it, in one run of two hours.

    python benchmarks/learn_soak.py --out soak                 two hours; the same line again goes on where it was cut
    python benchmarks/learn_soak.py --out quick --minutes 5    the same in short

Users ask the starter sums of two-digit numbers over the chat route, about one a second, and rate most answers after a
while: a thumb, mostly with the sum, wrong in `--noise` of the cases. The server makes jobs of it (`learn`): 32 ratings,
eight completions each, 8 optimizer steps. It judges their versions on 256 held-out sums (`gate`) and tries them on a
quarter of the requests (canary). The phases, as shares of the run (`Schedule`), of 120 minutes:

    0 to 5         users ask and do not rate, so that nothing is trained: the latencies of an idle server
    5 to 120       they rate, and the server learns
    60 to 80       every thumb is inverted: of a wrong answer users say that it is the sum, and of a right one another
    ... but for 56 to 88, spread over it: 20 kills (SIGKILL) of the server, which is started again

so that what the poison does is not what a kill did. The claims:

    learns     accuracy of the active version on 256 other held-out sums, sampled at temperature 1 as users' answers
               are, is higher at the end than of the base by more than two standard errors
    clean      no version that went live was trained on ratings of which most were inverted
    durable    every rating that was acknowledged is in the ledger
    prompt     the p99 of chats beside training is at most twice that of the idle phase. Chats that a measurement of
               this script fell into do not count, nor those of a server that is away or has just come back

`--out` is a directory: `log.jsonl` has every chat, rating, measurement, kill and transition as it happens (what is read
when the run goes on), `state/` is the server's, `result.json` is what is printed at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx2

from groupwise import Client
from groupwise.errors import RemoteError

USERS = 2
THINK_S = (0.8, 2.2)  # between two questions of a user
HELD_OUT = 256
IDLE, POISON = 5 / 120, (60 / 120, 80 / 120)  # of the whole run
LEAST_IDLE_S = 45.0
NO_KILLS = (56 / 120, 88 / 120)
KILL_FROM, KILL_TO = 8 / 120, 117 / 120
KILLS_A_MINUTE = 20 / 120
WARM_S = 10.0  # after a start, in which what is used for the first time is slow
QUIET = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}

Entry = Mapping[str, Any]  # of the log: `kind`, `seconds` since the beginning, and what it is about


# ---- when what happens ----
@dataclass(frozen=True)
class Schedule:
    """The phases of a run of so many seconds."""

    seconds: float
    kills: int

    def _within(self, now: float, phase: tuple[float, float]) -> bool:
        return phase[0] * self.seconds <= now < phase[1] * self.seconds

    @property
    def idle_s(self) -> float:
        """Until when nobody rates."""
        return max(IDLE * self.seconds, LEAST_IDLE_S)

    def poisoned(self, now: float) -> bool:
        """Ratings are inverted."""
        return self._within(now, POISON)

    @property
    def kill_times(self) -> list[float]:
        """When the server is killed: evenly over the time in which it may be."""
        before = (NO_KILLS[0] - KILL_FROM) * self.seconds
        whole = before + (KILL_TO - NO_KILLS[1]) * self.seconds
        passed = [whole * (i + 0.5) / self.kills for i in range(self.kills)]
        return [
            KILL_FROM * self.seconds + each if each < before else NO_KILLS[1] * self.seconds + each - before
            for each in passed
        ]

    def kill_due(self, now: float, done: int) -> bool:
        """Whether the next kill is due, `done` having been made. One that the benchmark slept through is made later."""
        times = self.kill_times
        return done < len(times) and now >= times[done] and not self._within(now, NO_KILLS)


# ---- what is written down ----
class Log:
    """The entries of a run, appended to `log.jsonl` as they happen. A run that was cut goes on from its last one."""

    def __init__(self, path: Path):
        self._lock, self.entries = threading.Lock(), list[dict[str, Any]]()
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    self.entries.append(json.loads(line))
                except ValueError:  # the line that was being written
                    continue
        gone = max((each["seconds"] for each in self.entries), default=0.0)
        self._began, self._file = time.monotonic() - gone, path.open("a", buffering=1)
        if gone:
            self._file.write("\n")

    @property
    def now(self) -> float:
        """Seconds since the beginning, without those between a cut and going on."""
        return time.monotonic() - self._began

    def of(self, kind: str) -> list[dict[str, Any]]:
        with self._lock:
            return [each for each in self.entries if each["kind"] == kind]

    def add(self, kind: str, *, seconds: float | None = None, **said: Any) -> dict[str, Any]:
        entry = {"kind": kind, "seconds": round(self.now if seconds is None else seconds, 3), **said}
        with self._lock:
            self.entries.append(entry)
            self._file.write(json.dumps(entry) + "\n")
        return entry


# ---- the users ----
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


@dataclass
class Users:
    """What the users do. `state` is what the server was last seen doing: idle, training, measured, down or
    warming."""

    url: str
    noise: float
    schedule: Schedule
    log: Log
    state: str = "warming"
    stop: threading.Event = field(default_factory=threading.Event)

    def user(self, seed: int) -> None:
        """Ask, wait, rate, until it is over."""
        rng, later = random.Random(f"{seed} {self.log.now}"), list[tuple[float, str, int, str]]()
        with Client(self.url, retries=0) as client:
            while not self.stop.wait(rng.uniform(*THINK_S)):
                question, gold = asked_sum(rng, held_out=False)
                began, state = self.log.now, self.state
                try:
                    answer = client.chat(question, max_tokens=8, temperature=1.0, timeout=60)
                    seconds = self.log.now - began
                    state = state if state == self.state else "changed"  # it ended as something else than it began
                    self.log.add("chat", ms=round(1000 * seconds, 1), state=state)
                    if rng.random() < 0.8 and began >= self.schedule.idle_s:
                        later.append((began + rng.expovariate(1 / 4), answer.id, gold, answer.text.strip()))
                    due, later = [e for e in later if e[0] <= began], [e for e in later if e[0] > began]
                    for _, id, gold, text in due:
                        self.rate(client, rng, id, gold, text, f"{seed}")
                except RemoteError as error:
                    reason = "server is down (killed)" if self.state == "down" else f"{error.status or error}"
                    self.log.add("failed", reason=reason[:80])
                    self.stop.wait(0.5)

    def rate(self, client: Client, rng: random.Random, id: str, gold: int, text: str, user: str) -> None:
        """Say of an answer whether it is the sum, and mostly what is; the opposite while the stream is poisoned."""
        right, sum_, poisoned = text == str(gold), str(gold), self.schedule.poisoned(self.log.now)
        if poisoned or rng.random() < self.noise:
            right, sum_ = not right, str(gold + rng.randint(1, 9)) if right else text or "0"
        said: dict[str, Any] = {"thumb": "up" if right else "down"}
        if rng.random() < 0.9:
            said["correction"] = sum_
        kept = client.feedback(id, user=user, timeout=30, **said)
        self.log.add("rated", id=kept.id, poisoned=poisoned)


# ---- the server ----
def settings(folder: Path, port: int) -> Path:
    """The server's YAML."""
    rows = [json.dumps({"prompt": question, "answer": str(gold)}) for question, gold in held_out_sums(HELD_OUT)]
    (folder / "held_out.jsonl").write_text("\n".join(rows) + "\n")
    learn = {"adapter": "sums", "after": 32, "max_groups": 96, "max_jobs_per_hour": 240, "max_tokens": 8}
    learn["config"] = {"learning_rate": 1.0e-3, "iterations": 2, "minibatches": 4}
    gate = {"prompts": {"source": "held_out.jsonl"}, "rewards": ["groupwise.rewards.text:exact_match"]}
    gate |= {"max_tokens": 8, "margin": 0.05, "scoring": {"workers": 0}}
    gate["canary"] = {"share": 0.25, "margin": 0.3, "minutes": 3.0}
    file = folder / "server.yaml"
    told = {"model": "starter", "port": port, "state_dir": str(folder / "state"), "min_free_bytes": 0}
    file.write_text(json.dumps({**told, "worker_threads": 1, "keep_versions": None, "learn": learn, "gate": gate}))
    return file


def start(file: Path, log: Path, url: str) -> subprocess.Popen[bytes]:
    """A server that is ready."""
    with log.open("ab") as output:
        command = [sys.executable, "-m", "groupwise", "serve", "--config", str(file)]
        process = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | QUIET)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx2.get(f"{url}/ready", timeout=5).status_code == 200:
                return process
        except httpx2.RequestError:
            pass
        time.sleep(0.2)
    process.kill()
    raise SystemExit(f"the server did not start: see {log}\n{log.read_text()[-2000:]}")


def accuracy(client: Client, version: str) -> float:
    """Sampled, on held-out sums that the gate does not see."""
    rows = held_out_sums(HELD_OUT, skip=HELD_OUT)
    groups = client.sample(
        [question for question, _ in rows], n=1, max_tokens=8, temperature=1.0, seed=1, adapter=version, timeout=120
    )
    return statistics.fmean(g.texts[0].strip() == str(gold) for g, (_, gold) in zip(groups, rows, strict=True))


@dataclass
class Watch:
    """Looks at the server again and again, measures it, and kills it when that is due."""

    users: Users
    log: Log
    client: Client
    process: subprocess.Popen[bytes]
    restart: Callable[[], subprocess.Popen[bytes]]
    every_s: float
    warm_at: float = 0.0  # seconds since the beginning

    def run(self) -> None:
        """Until the time is over."""
        self.warm_at = self.log.now + WARM_S
        while self.log.now < self.users.schedule.seconds:
            if self.users.schedule.kill_due(self.log.now, len(self.log.of("kill"))):
                self.kill()
            try:
                self.look()
            except (httpx2.RequestError, RemoteError) as error:
                self.log.add("unseen", error=str(error)[:200])
            time.sleep(1.0)

    def kill(self) -> None:
        """SIGKILL, and a new server."""
        self.log.add("kill", while_=self.users.state)
        self.users.state = "down"
        self.process.kill()
        self.process.wait()
        self.process = self.restart()
        self.users.state, self.warm_at = "warming", self.log.now + WARM_S

    def look(self) -> None:
        """What it does; its transitions; its accuracy, where it is time."""
        state = httpx2.get(f"{self.users.url}/v1/learn", timeout=30).json()
        busy = state["job_id"] is not None
        told = max((each["seq"] for each in self.log.of("transition")), default=0)
        for each in state["transitions"][::-1]:
            if each["seq"] > told:
                gone = time.time() - datetime.fromisoformat(each["at"]).timestamp()
                self.log.add(
                    "transition",
                    what=each["kind"],
                    **{k: each[k] for k in ("seq", "message", "data")},
                    ago_s=round(gone),
                )
                print(f"{self.log.now:6.0f} s  {each['kind']}: {each['message']}", flush=True)
        measured = self.log.of("accuracy")
        if not measured or self.log.now - measured[-1]["seconds"] > self.every_s:
            self.users.state = "measured"
            self.measure(state)
        warm = self.log.now >= self.warm_at
        self.users.state = "warming" if not warm else "training" if busy else "idle"

    def measure(self, state: Mapping[str, Any]) -> None:
        found = accuracy(self.client, state["active"])
        poisoned = self.users.schedule.poisoned(self.log.now)
        said = {"active": state["active"], "trial": state["trial"], "poisoned": poisoned, **state["counts"]}
        point = self.log.add("accuracy", accuracy=round(found, 4), **said)
        print(f"{point['seconds']:6.0f} s  {said | {'accuracy': point['accuracy']}}", flush=True)


# ---- what it comes to ----
def quantiles(chats: Iterable[Entry]) -> dict[str, float]:
    """Of their latencies, in milliseconds: the nearest ranks."""
    ordered = sorted(each["ms"] for each in chats)
    at = lambda q: ordered[max(0, math.ceil(q * len(ordered)) - 1)]  # noqa: E731
    return {"chats": len(ordered), **({"p50_ms": at(0.5), "p99_ms": at(0.99)} if ordered else {})}


def poison_of_versions(entries: Iterable[Entry], feedback: Sequence[Entry]) -> dict[str, float]:
    """For each version that a job of ratings made and the gate judged, the share of its ratings that were inverted."""
    inverted = {each["id"] for each in entries if each["kind"] == "rated" and each["poisoned"]}
    taken: dict[str, list[bool]] = {}
    for each in feedback:
        if each["job_id"] is not None:
            taken.setdefault(each["job_id"], []).append(each["id"] in inverted)
    judged = [
        each for each in entries if each["kind"] == "transition" and each["what"] in ("gate_passed", "gate_refused")
    ]
    return {
        each["data"]["version"]: round(statistics.fmean(taken[each["data"]["job_id"]]), 3)
        for each in judged
        if each["data"]["job_id"] in taken
    }


def summary(entries: Sequence[Entry], feedback: Sequence[Entry], schedule: Schedule) -> dict[str, Any]:
    """The claims, and the numbers that they rest on. `feedback` is what the ledger has in the end."""
    of = lambda kind: [each for each in entries if each["kind"] == kind]  # noqa: E731
    curve, chats, transitions = of("accuracy"), of("chat"), of("transition")
    first, last = curve[0]["accuracy"], curve[-1]["accuracy"]
    error = math.sqrt((first * (1 - first) + last * (1 - last)) / HELD_OUT)
    poison = poison_of_versions(entries, feedback)
    live = [each["data"]["version"] for each in transitions if each["what"] == "promoted"]
    poisoned_live = {version: poison[version] for version in live if poison.get(version, 0.0) > 0.5}
    acknowledged, kept = {each["id"] for each in of("rated")}, {each["id"] for each in feedback}
    idle = quantiles(each for each in chats if each["state"] == "idle" and each["seconds"] < schedule.idle_s)
    beside = quantiles(each for each in chats if each["state"] == "training")
    ratio = beside["p99_ms"] / idle["p99_ms"] if idle["chats"] and beside["chats"] else math.nan
    mostly = [version for version, share in poison.items() if share > 0.5]
    return {
        "claims": {
            "learns": last - first > 2 * error,
            "clean": not poisoned_live if mostly else None,  # None: nothing was put to the test
            "durable": acknowledged <= kept,
            "prompt": ratio <= 2.0,
        },
        "accuracy": {"base": first, "end": last, "standard_error_of_difference": round(error, 4)},
        "versions": {"judged": len(poison), "live": live, "mostly_inverted": mostly, "of_them_live": poisoned_live},
        "ratings": {"acknowledged": len(acknowledged), "lost": len(acknowledged - kept)},
        "inverted": sum(each["poisoned"] for each in of("rated")),
        "kills": len(of("kill")),
        "latency": {"idle": idle, "beside_training": beside, "p99_ratio": round(ratio, 2)},
        "calls_that_failed": dict(Counter(each["reason"] for each in of("failed"))),
        "transitions": dict(Counter(each["what"] for each in transitions)),
    }


def all_feedback(client: Client) -> list[dict[str, Any]]:
    """What the ledger has."""
    found, cursor = list[dict[str, Any]](), None
    while True:
        page = client.list_feedback(before=cursor, limit=2000)
        found += [{"id": each.id, "job_id": each.job_id} for each in page.feedback]
        if (cursor := page.next) is None:
            return found


def play(args: argparse.Namespace, schedule: Schedule) -> dict[str, Any]:
    """The run, from where it is; its summary."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url, file, server_log = f"http://127.0.0.1:{port}", settings(args.out, port), args.out / "server.log"
    process = start(file, server_log, url)
    log = Log(args.out / "log.jsonl")  # whose clock goes on from here
    users = Users(url, args.noise, schedule, log)
    with Client(url) as client:
        watch = Watch(users, log, client, process, lambda: start(file, server_log, url), args.measure_every)
        try:
            threads = [threading.Thread(target=users.user, args=(i,), daemon=True) for i in range(USERS)]
            for thread in threads:
                thread.start()
            watch.run()
            users.stop.set()
            for thread in threads:
                thread.join(timeout=90)
            return summary(log.entries, all_feedback(client), schedule)
        finally:
            users.stop.set()
            watch.process.terminate()
            watch.process.wait(timeout=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a directory; one that is there is gone on with")
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--kills", type=int, help="default: one for each six minutes")
    parser.add_argument("--noise", type=float, default=0.1)
    parser.add_argument("--measure-every", type=float, default=60.0, help="seconds")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    kills = round(args.minutes * KILLS_A_MINUTE) if args.kills is None else args.kills
    result = play(args, Schedule(60 * args.minutes, kills))
    text = json.dumps({"minutes": args.minutes, "noise": args.noise, **result}, indent=2)
    (args.out / "result.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
