"""Answers that are asked for later, and requests that run by their numbers however they arrive."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable

import pytest

from groupwise.bridges.tinker import futures as tinker_futures
from groupwise.bridges.tinker.futures import FutureResult, Futures, Turns, answer
from groupwise.errors import ConfigError, OverloadedError
from wording import raises


def working(ran: list[int], number: int) -> Callable[[], Awaitable[FutureResult]]:
    async def work() -> FutureResult:
        await asyncio.sleep(0)
        ran.append(number)
        return answer(number=number)

    return work


def test_requests_run_by_their_numbers_once_however_they_arrive() -> None:
    async def scenario(seed: int) -> list[int]:
        futures, ran = Futures(most=100), []
        turns = Turns(futures, gap_s=5)
        order = [*range(30), *random.Random(seed).choices(range(30), k=20)]  # some come twice
        random.Random(seed).shuffle(order)
        for number in order:
            future, is_new = futures.begin(f"m:{number}")
            if is_new:
                turns.add(number, future, working(ran, number))
            await asyncio.sleep(0)
        found = [await futures.wait(f"m:{number}", seconds=120) for number in range(30)]
        assert [json.loads(each.body)["number"] for each in found if each] == list(range(30))
        return ran

    for seed in range(5):
        assert asyncio.run(scenario(seed)) == list(range(30))


def test_ten_thousand_requests_run_in_order_and_go_with_their_session() -> None:
    async def scenario() -> None:
        futures, ran = Futures(most=10_000), []
        turns = Turns(futures, gap_s=60)
        for start in range(0, 10_000, 2_500):
            for number in random.Random(start).sample(range(start, start + 2_500), 2_500):
                turns.add(number, futures.begin(f"m:{number}", size=10)[0], working(ran, number))
            await futures.wait(f"m:{start + 2_499}", seconds=120)
        assert await futures.wait("m:9999", seconds=120) == answer(number=9999)
        assert ran == list(range(10_000)) and len(futures) == 10_000
        futures.forget("m:")
        assert len(futures) == 0
        assert (futures._load.unfinished, futures._load.waiting, futures._load.kept) == (0, 0, 0)

    asyncio.run(scenario())


def test_after_a_gap_those_that_wait_run_and_what_was_missing_comes_too_late() -> None:
    async def scenario() -> None:
        futures, ran = Futures(most=100), []
        turns = Turns(futures, gap_s=0.02)

        def send(number: int) -> None:
            future, is_new = futures.begin(f"m:{number}")
            if is_new:
                turns.add(number, future, working(ran, number))

        for number in (0, 2, 3, 6):
            send(number)
        assert await futures.wait("m:6", seconds=120) == answer(number=6)
        assert ran == [0, 2, 3, 6] and turns.gap == "seq_id 4 to 5 did not come within 0.02 s"
        assert turns.forgive() and turns.gap is None
        send(1)
        late = await futures.wait("m:1", seconds=120)
        assert late is not None and "seq_id 1 comes too late: the next is 7" in json.loads(late.body)["error"]
        send(7)
        assert await futures.wait("m:7", seconds=120) == answer(number=7)
        assert ran == [0, 2, 3, 6, 7] and turns.gap is None

    asyncio.run(scenario())


def test_what_ends_waits_no_longer() -> None:
    async def scenario() -> None:
        futures = Futures(most=100)
        turns = Turns(futures, gap_s=60)
        turns.add(3, futures.begin("m:3")[0], working([], 3))
        turns.close()
        told = await futures.wait("m:3", seconds=120)
        assert told is not None and json.loads(told.body)["error"] == "the session has ended"

    asyncio.run(scenario())


def test_a_failure_is_an_answer_and_the_next_request_runs() -> None:
    async def scenario() -> None:
        futures, ran = Futures(most=100, without="/secret"), []
        turns = Turns(futures, gap_s=5)

        async def wrong() -> FutureResult:
            raise ConfigError("in /secret/place", hint="do it right")

        async def bug() -> FutureResult:
            raise KeyError("x")

        for number, work in enumerate((wrong, bug, working(ran, 2))):
            future, _ = futures.begin(f"m:{number}")
            turns.add(number, future, work)
        first, second, third = [await futures.wait(f"m:{number}", seconds=120) for number in range(3)]
        assert first and second and third == answer(number=2)
        told = json.loads(first.body)
        assert told["error"] == "in <state_dir>/place (do it right)" and told["category"] == "user"
        assert json.loads(second.body)["category"] == "server"

    asyncio.run(scenario())


def test_there_is_a_bound_but_what_is_due_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        futures = Futures(most=10)
        for number in range(10):
            futures.begin(f"a:{number}")
        with raises(OverloadedError):
            futures.begin("a:10")
        assert futures.begin("a:3")[1] is False
        due, _ = futures.begin("a:11", due=True)
        due.finish(answer())
        futures.find("a:0").finish(answer())  # pyright: ignore[reportOptionalMemberAccess]
        assert futures.begin("a:12")[1] is True

    asyncio.run(scenario())


def test_answers_stay_for_a_while_and_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinker_futures, "SWEEP_S", 0.0)
    monkeypatch.setattr(tinker_futures, "KEEP_S", 0.05)
    monkeypatch.setattr(tinker_futures, "MOST_KEPT", 40)

    async def scenario() -> None:
        futures = Futures(most=10)
        first, _ = futures.begin("s:first")
        first.finish(answer(x=1))
        for _ in range(3):  # as often as one likes
            assert await futures.wait("s:first", seconds=1) == answer(x=1)
        await asyncio.sleep(0.06)
        futures.begin("s:other")
        assert futures.find("s:first") is None
        for number in range(200):  # nobody fetches
            future, _ = futures.begin(f"s:{number}")
            future.finish(answer(x="y" * 100))
        assert len(futures) <= 41 and futures.find("s:199") is not None
        futures.forget("s:")
        assert len(futures) == 1  # the one that is not finished

    asyncio.run(scenario())
