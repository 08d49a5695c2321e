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
from groupwise.store.keys import Key


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


def bounded(name: str, most: int | None, *, tenant: str = "") -> Key:
    return Key(name=name, role="sample", digest="", made="", tenant=tenant, concurrent_requests=most)


def test_a_key_has_no_more_at_once_than_its_bound_and_those_behind_it_do_not_wait() -> None:
    async def run() -> None:
        places = Places(16, 64, patience_s=0.05)
        small, large = bounded("small", 2, tenant="acme"), bounded("large", None, tenant="acme")
        async with AsyncExitStack() as stack:
            for _ in range(2):
                await stack.enter_async_context(places.held("tenant acme", small))
            third = asyncio.create_task(stack.enter_async_context(places.held("tenant acme", small)))
            await asyncio.sleep(0)
            for _ in range(3):  # another key of the tenant, and another sender
                await stack.enter_async_context(places.held("tenant acme", large))
                await stack.enter_async_context(places.held("key b", bounded("b", 3)))
            with pytest.raises(OverloadedError) as refused:
                await third
            assert refused.value.retry_after
        assert not places._held and not places._of_keys and not places._waiting

    asyncio.run(run())


def test_a_room_full_of_those_who_wait_for_their_own_key_keeps_nobody_out() -> None:
    async def run() -> None:
        places = Places(16, 8, patience_s=10)
        async with AsyncExitStack() as stack:
            waiting = list[asyncio.Task[None]]()
            for name in ("a", "b"):
                key = bounded(name, 1)
                await stack.enter_async_context(places.held(name, key))
                waiting += [asyncio.create_task(_visit(places, name, key)) for _ in range(4)]
            await asyncio.sleep(0)
            await stack.enter_async_context(places.held("c", bounded("c", 1)))
            assert not any(task.done() for task in waiting)
        await asyncio.gather(*waiting)  # each in its turn
        assert not places._held and not places._of_keys

    asyncio.run(run())


async def _visit(places: Places, sender: str, key: Key) -> None:
    async with places.held(sender, key):
        assert places._of_keys[key.label] == 1
        await asyncio.sleep(0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=40), st.integers(1, 12))
def test_bounds_hold_and_nothing_is_lost(visits: list[tuple[str, bool]], capacity: int) -> None:
    """Whoever comes, in whatever order, and whoever gives up while waiting; a's key may have two at once."""

    async def run() -> None:
        places, inside = Places(capacity, 40, patience_s=10), Counter[str]()

        async def visit(sender: str) -> None:
            async with places.held(sender, bounded("a", 2) if sender == "a" else None):
                inside[sender] += 1
                try:
                    assert inside.total() <= capacity
                    assert inside[sender] <= (2 if sender == "a" else capacity - capacity // KEPT)
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
        assert not wrong and not places._held and not places._of_keys and not places._waiting

    asyncio.run(run())
