"""SIGKILL of a server and its worker while 16 adapters learn at once: nothing that was acknowledged is lost, and each
adapter has, to the byte, what it has alone.

pytest -m slow tests/crash/test_many_learners.py     30 kills, 19 minutes on two cores that others kept busy
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from .place import Place, a_place
from .test_kills import DRAIN_S, MOST_CRASHES, assert_nothing_wrong
from .traffic import Traffic
from .verdict import judge

LEARNERS, KILLS = 16, 30
MANY_AT_ONCE = 10  # every so many-th kill is at 8 learners or more; those that were hit then train one at a time
SERVERS = 4  # every so many-th kill is the server's
LONGEST_LIFE_S = 4.0  # from when a job is trained
TAKEN_S = 600.0


def running(place: Place) -> int:
    """Return how many jobs the worker has in its hands."""
    return sum(row["state"] == "running" and row["version"] is None for row in place.jobs())


def until_at_work(place: Place, jobs: int) -> None:
    """Wait until so many jobs are being trained, and none of them has died so often that another time were one too
    many."""
    place.until(
        lambda: running(place) >= jobs and place.crashes_of_a_job() < MOST_CRASHES,
        f"{jobs} jobs are not trained",
        seconds=TAKEN_S,
    )


@pytest.mark.slow
def test_kills_while_16_adapters_learn(tmp_path: Path) -> None:
    rng, beside = random.Random(0), []
    with a_place(tmp_path) as place:
        traffic = Traffic(place.url, tmp_path / "history", learners=LEARNERS)
        traffic.start()
        try:
            place.start()
            while place.kills < KILLS:
                until_at_work(place, 1 if len(beside) % MANY_AT_ONCE else LEARNERS // 2 if beside else LEARNERS)
                time.sleep(rng.uniform(0.0, LONGEST_LIFE_S))
                beside.append(running(place))
                if len(beside) % SERVERS:
                    place.kill_workers()
                    assert not (wrong := place.faults_of_state()), wrong
                    continue
                place.kill_server()
                if len(beside) % (2 * SERVERS):
                    place.kill_workers()
                place.await_no_worker()
                assert not (wrong := place.faults_of_state()), wrong
                place.start()
            place.await_ready()
            traffic.finish(seconds=2 * DRAIN_S)
        finally:
            traffic.stop()
        counts = judge(place, traffic)
        print(counts, place.kills, beside, *traffic.wrong, sep="\n")
        assert place.stop() == 0
    assert max(beside) == LEARNERS and sum(hit > 1 for hit in beside) >= KILLS // MANY_AT_ONCE, beside
    assert counts["jobs"] >= LEARNERS + 2 * (LEARNERS // 2)
    assert_nothing_wrong(counts)
