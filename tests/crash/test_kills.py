"""SIGKILL at every named point and at random times, of server, worker or both, under a client that goes on.

pytest -m slow tests/crash     more than 100 kills, some minutes
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from .place import Place, a_place
from .traffic import Traffic
from .verdict import judge, left_over

SUBMITTING = ("submit:before-spool", "submit:after-spool", "submit:before-commit", "submit:after-commit")
SWAPPING = (
    *("swap:before-load", "swap:after-load", "swap:after-verify", "swap:after-activate"),
    *("swap:before-complete", "swap:after-complete"),
)
WORKING = (
    *("lease:after-commit", "progress:after-commit", "train:after-backward", "train:after-step"),
    *("checkpoint:before-rename", "checkpoint:after-rename", "checkpoint:after-cleaning"),
    *("publish:before-rename", "publish:after-rename", "publish:after-moments"),
    *("publish:before-ledger", "publish:after-ledger"),
)
MOST_CRASHES = 2  # of a worker with one job: at the third the job fails, as it should
LONGEST_LIFE_S = 14.0  # of what is killed at a random time: until then a worker has loaded, trained, published
DRAIN_S = 300.0
LANES = 3  # that can run beside each other


@dataclass(frozen=True)
class Blow:
    """Kill `victim` at `fault`, or at a random time without one; then the server if it was not that.

    `both`: the worker of a killed server is killed, too; otherwise it must end by itself.
    """

    victim: str
    fault: str = ""
    both: bool = False


def at_points(victim: str, points: Sequence[str]) -> list[Blow]:
    return [Blow(victim, f"{point}:kill@{visit}", both=visit == 1) for point in points for visit in (1, 2)]


QUICK = [Blow("worker", "publish:after-rename:kill"), Blow("server", "swap:after-activate:kill", both=True)]
AT_RANDOM = [Blow("server", both=True)] * 5 + [Blow("server")] * 3 + [Blow("worker", both=True)] * 4
ALL = at_points("server", SUBMITTING + SWAPPING) + at_points("worker", WORKING) + AT_RANDOM
random.Random(1).shuffle(ALL)


def run(blows: Sequence[Blow], root: Path, *, kills: int) -> dict[str, int]:
    """Deal the blows, and more until there were so many kills; restart, and judge. Prints what was found."""
    rng, left = random.Random(0), list(blows)
    with a_place(root) as place:
        traffic = Traffic(place.url, root / "history")
        traffic.start()
        try:
            while left or place.kills < kills:
                left = left or [Blow("server", both=True)]
                if (blow := choose(left, place)) is None:
                    calm(place)
                else:
                    left.remove(blow)
                    deal(blow, place, traffic, rng)
                assert not (wrong := place.faults_of_state()), (blow, wrong)
            place.start()
            place.await_ready()
            traffic.finish(seconds=DRAIN_S)
        finally:
            traffic.stop()
        counts = judge(place, traffic)
        print(counts, place.kills, *traffic.wrong, *left_over(place), sep="\n")
        assert place.stop() == 0
        return counts


def choose(left: Sequence[Blow], place: Place) -> Blow | None:
    """The next blow; None if it could be the last one for a job that has seen many: any job's turn may be next."""
    return None if place.crashes_of_a_job() >= MOST_CRASHES else left[0]


def deal(blow: Blow, place: Place, traffic: Traffic, rng: random.Random) -> None:
    place.start(fault=blow.fault)
    if blow.fault.startswith("submit:"):
        traffic.ask_for_jobs(2)
    if blow.victim == "server":
        if blow.fault:
            place.await_kill_of_server()
        else:
            time.sleep(rng.uniform(0.0, LONGEST_LIFE_S))
    elif blow.fault:
        place.await_kill_of_worker()
    else:
        place.await_worker()
        time.sleep(rng.uniform(0.0, LONGEST_LIFE_S))
        place.kill_workers()
    if blow.victim == "worker":
        time.sleep(rng.uniform(0.0, 1.5))  # perhaps the next worker has been started
    place.kill_server()
    if blow.both:
        place.kill_workers()
    place.await_no_worker()


def calm(place: Place) -> None:
    """Let the job that has seen many crashes end."""
    place.start()
    deadline = time.monotonic() + DRAIN_S
    while place.crashes_of_a_job():
        assert time.monotonic() < deadline, place.words
        time.sleep(0.1)
    place.kill_server()
    place.kill_workers()


def assert_nothing_wrong(counts: dict[str, int]) -> None:
    jobs, versions = counts.pop("jobs"), counts.pop("versions")
    assert jobs == versions >= 2 and counts.pop("begun_again") >= 1
    assert not any(counts.values()), {name: count for name, count in counts.items() if count}


@pytest.mark.slow
def test_a_few_kills(tmp_path: Path) -> None:
    assert_nothing_wrong(run(QUICK, tmp_path, kills=3))


@pytest.mark.slow
@pytest.mark.parametrize("lane", range(LANES))
def test_kills_at_every_named_point_and_at_random_times(tmp_path: Path, lane: int) -> None:
    assert_nothing_wrong(run(ALL[lane::LANES], tmp_path, kills=34))


def test_every_named_point_is_among_the_blows() -> None:
    source = Path(__file__).parents[2] / "src" / "groupwise"
    texts = [path.read_text() for path in source.rglob("*.py") if path.name != "faults.py"]
    named = {piece.split('"')[0] for text in texts for piece in text.split('faults.point("')[1:]}
    written = {piece.split('"')[0] for text in texts for piece in text.split('new_directory(target, fault="')[1:]}
    named |= {f"{what}:{when}-rename" for what in written for when in ("before", "after")}
    assert named == {*SUBMITTING, *SWAPPING, *WORKING}
