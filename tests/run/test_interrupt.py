"""Ctrl-C once is a wish, twice an order; afterwards the handlers are those of before."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from groupwise.run import stop_request
from groupwise.run.stop_request import StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_and_second(number: signal.Signals, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stop_request, "SAME_S", 0.0)
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_a_sigterm_that_comes_by_two_ways_is_one():
    """Slurm's to each process of a job, and torchrun's to its own."""
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_before_there_is_anything_to_finish_the_first_stops_at_once():
    with StopRequest(graceful=False) as stop:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        stop.graceful = True
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested


def test_handlers_come_back_after_an_error():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ArithmeticError), StopRequest():
        raise ArithmeticError
    assert signal.getsignal(signal.SIGINT) is before


def test_in_another_thread_it_does_nothing():
    before, seen = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with StopRequest() as stop:
            seen.append((stop.requested, signal.getsignal(signal.SIGINT) is before))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, True)]
