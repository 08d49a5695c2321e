"""Turns of threads that compute: as many at a time as there are processors, in the order in which they asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from groupwise.train.processor_turns import ProcessorTurns


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_no_more_than_so_many_compute_at_a_time_and_all_come_in(count: int) -> None:
    turns, lock, inside, most, entered = ProcessorTurns(count), threading.Lock(), 0, 0, 0

    def compute(_: int) -> None:
        nonlocal inside, most, entered
        for _ in range(50):
            with turns:
                with lock:
                    inside, entered = inside + 1, entered + 1
                    most = max(most, inside)
                time.sleep(0)
                with lock:
                    inside -= 1

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(compute, range(8)))
    assert most <= count and entered == 400
    assert turns._free == count and not turns._waiting


def test_they_come_in_as_they_asked_also_before_one_that_asks_again() -> None:
    turns, order = ProcessorTurns(1), list[int]()

    def compute(number: int) -> None:
        with turns:
            order.append(number)

    with ThreadPoolExecutor(3) as threads:
        with turns:
            for number in range(3):
                threads.submit(compute, number)
                until(lambda behind=number: len(turns._waiting) == behind + 1)
        compute(3)  # who has just computed is behind those that wait
    assert order == [0, 1, 2, 3]


def test_an_error_within_gives_the_turn_back() -> None:
    turns = ProcessorTurns(1)
    for _ in range(2):
        with pytest.raises(ValueError), turns:
            raise ValueError
    assert turns._free == 1
