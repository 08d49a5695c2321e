"""Workers that share calls: who gets one, and what becomes of it when they are lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from groupwise.engine.worker_group import SENDS, WorkerGroup, WorkerLost
from groupwise.errors import ClusterError, ConfigError, GroupwiseError
from processes import becomes
from wording import raises


class Clerk:
    """A worker in this process: what it is asked stays open until the test answers, but for orders."""

    def __init__(self, number: int, *, slow: bool = False):
        self.number, self.slow, self.alive = number, slow, True
        self.opening: list[Future[Any]] = []
        self.gone: set[str] = set()  # what cannot be loaded any more
        self.obeyed: list[tuple[Any, ...]] = []
        self.open: list[tuple[tuple[Any, ...], Future[Any]]] = []

    def ask(self, method: str, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if not self.alive:
            future.set_exception(WorkerLost("it was killed"))
        elif method == "open" and self.slow:
            self.opening.append(future)
        elif method == "refuse" or (method == "load" and arguments[0] in self.gone):
            future.set_exception(ConfigError("no such thing"))
        elif method == "work":
            self.open.append((arguments, future))
        else:
            self.obeyed.append((method, *arguments))
            future.set_result(None)
        return future

    def end(self) -> None:
        self.alive = False
        for _, future in self.open:
            if not future.done():
                future.set_exception(WorkerLost("it was killed"))


class Office:
    """The clerks in the order in which they were started."""

    def __init__(self) -> None:
        self.clerks: list[Clerk] = []
        self.slow = False  # whoever is started opens when the test says so
        self.broken = False  # whoever is started is dead
        self.doors = threading.Event()  # nobody is started before they open
        self.doors.set()
        self._lock = threading.Lock()

    def start(self, number: int) -> Clerk:
        self.doors.wait(120)
        with self._lock:
            self.clerks.append(clerk := Clerk(number, slow=self.slow))
        clerk.alive = not self.broken
        return clerk

    def of(self, number: int) -> Clerk:
        return [clerk for clerk in self.clerks if clerk.number == number][-1]


@pytest.fixture
def office() -> Office:
    return Office()


@pytest.fixture
def group_of(office: Office) -> Iterator[Callable[..., WorkerGroup]]:
    """`group_of(2)`: a group whose workers are all up."""
    made: list[WorkerGroup] = []

    def make(size: int, **options: Any) -> WorkerGroup:
        settings = {"setup": {"open": ("open", ())}, "restarts": 2, "timeout_s": 5.0, **options}
        made.append(WorkerGroup("clerk", office.start, size=size, **settings))
        if office.doors.is_set() and not office.broken:
            assert becomes(lambda: all(slot.worker for slot in made[-1]._slots))
        return made[-1]

    yield make
    for group in made:
        group.close()


def test_the_least_busy_gets_the_next_call(office: Office, group_of: Callable[..., WorkerGroup]) -> None:
    group = group_of(2)
    answers = [group.ask("work", name, weight=weight) for name, weight in (("a", 8), ("b", 2), ("c", 4), ("d", 1))]
    assert [arguments for arguments, _ in office.of(0).open] == [("a",)]
    assert [arguments for arguments, _ in office.of(1).open] == [("b",), ("c",), ("d",)]
    office.of(0).open[0][1].set_result("done")
    assert answers[0].result(1) == "done"
    group.ask("work", "e")
    assert office.of(0).open[-1][0] == ("e",)


def test_what_a_worker_raises_is_raised(group_of: Callable[..., WorkerGroup]) -> None:
    with raises(ConfigError):
        group_of(1).ask("refuse").result(1)


def test_a_lost_worker_is_replaced_and_its_calls_are_made_again(
    office: Office, group_of: Callable[..., WorkerGroup]
) -> None:
    group = group_of(1)
    group.broadcast("v1", "load", "v1")
    group.broadcast("v2", "load", "v2")
    group.retract("v1", "unload", "v1")
    answer, first = group.ask("work", "a"), office.of(0)
    first.end()
    assert becomes(lambda: office.of(0) is not first and office.of(0).open)
    assert office.of(0).obeyed == [("open",), ("load", "v2")]
    office.of(0).open[0][1].set_result("done")
    assert answer.result(1) == "done"


def test_a_broadcast_is_undone_when_no_call_needs_it_any_more(
    office: Office, group_of: Callable[..., WorkerGroup]
) -> None:
    group = group_of(1)
    group.broadcast("v1", "load", "v1")
    answer, first = group.ask("work", "a", needs="v1"), office.of(0)
    group.retract("v1", "unload", "v1")
    assert first.obeyed == [("open",), ("load", "v1")]
    first.end()
    assert becomes(lambda: office.of(0) is not first and office.of(0).open)
    assert office.of(0).obeyed == [("open",), ("load", "v1")]
    office.of(0).open[0][1].set_result("done")
    assert answer.result(1) == "done"
    assert office.of(0).obeyed[2:] == [("unload", "v1")]


def test_a_broadcast_that_is_retracted_while_a_worker_comes_may_fail(
    office: Office, group_of: Callable[..., WorkerGroup]
) -> None:
    """The version of a run is removed from the disk once it is unloaded."""
    group = group_of(1)
    group.broadcast("v1", "load", "v1")
    office.slow, first = True, office.of(0)
    answer = group.ask("work", "a")
    first.end()
    assert becomes(lambda: office.of(0) is not first and office.of(0).opening)
    group.retract("v1", "unload", "v1")
    office.of(0).gone.add("v1")
    office.of(0).opening[0].set_result(None)
    assert becomes(lambda: office.of(0).open)
    office.of(0).open[0][1].set_result("done")
    assert answer.result(1) == "done"


def test_calls_wait_until_somebody_is_up(office: Office, group_of: Callable[..., WorkerGroup]) -> None:
    office.doors.clear()
    group = group_of(1)
    answer = group.ask("work", "a")
    office.doors.set()
    assert becomes(lambda: office.clerks and office.of(0).open)
    office.of(0).open[0][1].set_result("done")
    assert answer.result(1) == "done"


def test_a_broadcast_that_is_refused_is_raised_and_not_kept(
    office: Office, group_of: Callable[..., WorkerGroup]
) -> None:
    group = group_of(1)
    with pytest.raises(ConfigError):
        group.broadcast("bad", "refuse")
    answer, first = group.ask("work", "a"), office.of(0)
    first.end()
    assert becomes(lambda: office.of(0) is not first and office.of(0).open)
    assert not answer.done()


def test_a_setup_that_is_refused_ends_it_all_at_once(office: Office, group_of: Callable[..., WorkerGroup]) -> None:
    office.broken = True  # nobody comes up
    group = group_of(1, setup={"open": ("refuse", ())}, restarts=1)
    with raises(ClusterError):
        group.ask("work", "a").result(5)
    office.broken = False
    group = WorkerGroup("clerk", office.start, size=1, setup={"open": ("refuse", ())}, restarts=1, timeout_s=5)
    with raises(ConfigError):
        group.ask("work", "a").result(5)
    with pytest.raises(ConfigError):
        group.broadcast("v1", "load", "v1")


def test_losses_in_a_row_are_counted_and_an_answer_forgives_them(
    office: Office, group_of: Callable[..., WorkerGroup]
) -> None:
    group = group_of(1, restarts=1)
    for _ in range(3):
        answer = group.ask("work", "a")
        assert becomes(lambda: office.of(0).open)
        lost = office.of(0)
        lost.end()
        assert becomes(lambda lost=lost: office.of(0) is not lost and office.of(0).open)
        office.of(0).open[-1][1].set_result("done")
        assert answer.result(1) == "done"


def test_a_call_that_every_worker_dies_of_is_given_up(office: Office, group_of: Callable[..., WorkerGroup]) -> None:
    group = group_of(1, restarts=100)
    answer = group.ask("work", "poison")
    for _ in range(SENDS):
        assert becomes(lambda: office.of(0).open and office.of(0).alive)
        office.of(0).end()
    with raises(ClusterError):
        answer.result(5)


def test_a_cancelled_call_is_given_up_where_it_is(office: Office, group_of: Callable[..., WorkerGroup]) -> None:
    group = group_of(1)
    group.ask("work", "a", weight=5).cancel()
    assert office.of(0).open[0][1].cancelled()
    assert group._slots[0].load == 0


def test_closed_it_ends_its_workers_and_fails_what_is_open(
    office: Office, group_of: Callable[..., WorkerGroup]
) -> None:
    group = group_of(2)
    answer = group.ask("work", "a")
    group.close()
    with raises(GroupwiseError):
        answer.result(5)
    assert not any(clerk.alive for clerk in office.clerks)


def test_calls_that_may_not_be_made_again_tell_of_the_loss(office: Office) -> None:
    group = WorkerGroup("desk", office.start, size=1, first=4, again=False, setup={}, restarts=1, timeout_s=5)
    try:
        asked = group.ask("work", 1)
        assert becomes(lambda: office.clerks and office.clerks[0].open)
        office.of(4).end()
        with raises(WorkerLost):
            asked.result(5)
        again = group.ask("work", 2)  # another has taken its place
        assert becomes(lambda: len(office.clerks) == 2 and office.clerks[1].open)
        office.of(4).open[0][1].set_result("done")
        assert again.result(5) == "done"
    finally:
        group.close()
