"""SIGKILL under a server that trains on feedback by itself: nothing that was acknowledged is lost or trained twice.

pytest -m slow tests/crash/test_feedback_kills.py     20 kills, some minutes
"""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path

import httpx2
import pytest

from groupwise import Client
from groupwise.errors import RemoteError

from .place import Place, a_place
from .test_kills import SUBMITTING

KILLS = 20
LEARN = "learn={adapter: sums, after: 6, max_jobs_per_hour: 240, max_tokens: 8, config: {learning_rate: 1.0e-3}}"
LONGEST_LIFE_S = 8.0
FAULT_S = 600.0  # a job that an earlier server queued is trained first, by a worker that begins anew


class Users:
    """Ask sums and rate two answers of each, again and again, whatever becomes of the server."""

    def __init__(self, url: str):
        self._url, self._stop = url, threading.Event()
        self.acknowledged: dict[str, str] = {}  # idempotency key -> the feedback's id
        self.wrong: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=60)

    def _run(self) -> None:
        rng, asked = random.Random(1), 0
        with Client(self._url, retries=0) as client:
            while not self._stop.is_set():
                asked += 1
                question = f"What is {rng.randint(10, 99)} + {rng.randint(10, 99)}?"
                try:
                    (group,) = client.sample([question], n=2, max_tokens=8, timeout=20)
                    for j, completion in enumerate(group.completions):
                        self._rate(client, completion.rollout_id, f"{asked}-{j}", float(j))
                except RemoteError:
                    self._stop.wait(0.2)

    def _rate(self, client: Client, rollout: str, key: str, score: float) -> None:
        """Until it is acknowledged; a rollout that was answered is on the disk, so it must be known."""
        while not self._stop.is_set():
            try:
                kept = client.feedback(rollout, score=score, idempotency_key=key, timeout=20)
            except RemoteError as error:
                if error.status == 404:
                    self.wrong.append(f"{rollout} is forgotten")
                    return
                self._stop.wait(0.2)
                continue
            if self.acknowledged.setdefault(key, kept.id) != kept.id:
                self.wrong.append(f"{key} was kept twice")
            return


def blows() -> list[str]:
    """Faults to die of; an empty one is a kill at a random time."""
    faults = [f"{point}:kill" for point in SUBMITTING] + ["swap:after-activate:kill", "swap:before-complete:kill"]
    chosen = faults + [""] * (KILLS - len(faults))
    random.Random(2).shuffle(chosen)
    return chosen


def deal(place: Place, fault: str, rng: random.Random) -> None:
    place.start(fault=fault)
    if fault:
        place.await_kill_of_server(seconds=FAULT_S)
    else:
        place.ends_or_is_ready()
        time.sleep(rng.uniform(0.0, LONGEST_LIFE_S))
        place.kill_server()
    place.kill_workers()


def settled(place: Place) -> bool:
    states = {row["state"] for row in place.query("SELECT state FROM job")}
    return bool(states) and not states & {"queued", "running"}


@pytest.mark.slow
def test_no_acknowledged_feedback_is_lost_or_trained_twice(tmp_path: Path) -> None:
    rng = random.Random(3)
    with a_place(tmp_path, settings=[LEARN]) as place:
        users = Users(place.url)
        users.start()
        try:
            for number, fault in enumerate(blows()):
                deal(place, fault, rng)
                print(f"blow {number}: {fault or 'at random'}; {len(users.acknowledged)} ratings are acknowledged")
                assert not (wrong := place.faults_of_state()), (fault, wrong)
        finally:
            users.stop()
        place.start()
        place.await_ready()
        assert httpx2.post(f"{place.url}/v1/learn/pause", timeout=30).status_code == 200
        place.until(lambda: settled(place), "jobs do not end", seconds=300)
        place.stop()
        rows = place.query("SELECT * FROM feedback")
        jobs = {row["id"]: row for row in place.query("SELECT * FROM job")}
        taken = [row["trained_by"] for row in rows if row["trained_by"] is not None]
        print(place.kills, len(users.acknowledged), len(rows), len(jobs), len(taken))
        assert place.kills >= KILLS and not users.wrong, users.wrong
        assert set(users.acknowledged.values()) <= {row["id"] for row in rows}
        assert len({row["key"] for row in rows}) == len(rows), "once for each key"
        assert taken and set(taken) <= jobs.keys()
        for id, job in jobs.items():
            assert job["state"] == "completed", dict(job)
            assert json.loads(job["summary"])["ratings"] == taken.count(id), "what it says it took is what it took"
