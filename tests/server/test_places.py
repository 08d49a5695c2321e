"""Places for requests: bounds, turns, and what one sender may have of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.errors import OverloadedError
from groupwise.server.places import KEPT, Places


def test_places_are_taken_in_turn_and_given_back() -> None:
    async def run() -> None:
        places, order = Places(1, 2, patience_s=10), []

        async def visit(name: str) -> None:
            async with places.held("one"):
                order.append(name)
                await asyncio.sleep(0)

        async with places.held("one"):
            waiting = [asyncio.create_task(visit(name)) for name in "ab"]
            await asyncio.sleep(0)
            with pytest.raises(OverloadedError):
                async with places.held("one"):
                    pass
        await asyncio.gather(*waiting)
        assert order == ["a", "b"]
        async with places.held("one"):  # nobody holds one any more
            pass

    asyncio.run(run())


@pytest.mark.parametrize(("capacity", "share", "most"), [(256, None, 224), (8, None, 7), (3, None, 3), (256, 64, 64)])
def test_of_one_sender_s_flood_others_notice_nothing(capacity: int, share: int | None, most: int) -> None:
    async def run() -> None:
        places = Places(capacity, 64, patience_s=0.05, share=share)
        async with AsyncExitStack() as stack:
            for _ in range(most):
                await stack.enter_async_context(places.held("flood"))
            flood = [asyncio.create_task(stack.enter_async_context(places.held("flood"))) for _ in range(100)]
            await asyncio.sleep(0)
            for number in range(capacity - most):  # at once, though a hundred came before
                await stack.enter_async_context(places.held(f"other {number % 8}"))
            refused = await asyncio.gather(*flood, return_exceptions=True)
            assert all(isinstance(each, OverloadedError) for each in refused)
            soon = sum("waited" not in str(each) for each in refused)
            assert soon == 100 - (64 - 64 // KEPT)  # the waiting room is not theirs alone either

    asyncio.run(run())


def test_who_waits_is_served_by_turns_of_the_senders() -> None:
    async def run() -> list[str]:
        places, served = Places(2, 64, patience_s=10), []

        async def visit(sender: str) -> None:
            async with places.held(sender):
                served.append(sender)
                await asyncio.sleep(0.001)

        async with places.held("a"), places.held("a"):
            tasks = [asyncio.create_task(visit(sender)) for sender in "aaaaaabbc"]
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        return served

    served = asyncio.run(run())
    assert sorted(served) == sorted("aaaaaabbc") and "b" in served[:3] and "c" in served[:5]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=40), st.integers(1, 12))
def test_bounds_hold_and_nothing_is_lost(visits: list[tuple[str, bool]], capacity: int) -> None:
    """Whoever comes, in whatever order, and whoever gives up while waiting."""

    async def run() -> None:
        places, inside = Places(capacity, 40, patience_s=10), Counter[str]()

        async def visit(sender: str) -> None:
            async with places.held(sender):
                inside[sender] += 1
                try:
                    assert inside.total() <= capacity
                    assert inside[sender] <= capacity - capacity // KEPT
                    await asyncio.sleep(0)
                finally:
                    inside[sender] -= 1

        tasks = [(asyncio.create_task(visit(sender)), gives_up) for sender, gives_up in visits]
        await asyncio.sleep(0)
        for task, gives_up in tasks:
            if gives_up:
                task.cancel()
        outcomes = await asyncio.gather(*(task for task, _ in tasks), return_exceptions=True)
        wrong = [each for each in outcomes if isinstance(each, AssertionError)]
        assert not wrong and not places._held and not places._waiting

    asyncio.run(run())
