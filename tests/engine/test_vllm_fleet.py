"""Servers that the run starts: they share the load, keep their conversations, are replaced, and not for ever."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from groupwise.config.engine import VllmConfig
from groupwise.engine.local import LocalEngine
from groupwise.engine.vllm.engine import VllmEngine
from groupwise.engine.vllm.fleet import STARTS
from groupwise.engine.vllm.handshake import linear_names
from groupwise.errors import EngineError
from groupwise.model.load import LoadedModel
from groupwise.types import PolicyVersion, SamplingParams, SamplingRequest
from processes import becomes
from vllm_peer import Faults, Peer
from wording import raises

BASE, FIRST = PolicyVersion.base(), PolicyVersion("math", 1)
QUICK = {"max_loras": 3, "health_interval_s": 0.1, "start_timeout_s": 20.0, "recovery_timeout_s": 20.0}


class Started:
    """A server that speaks vLLM's API, in a place of the fleet, until it is killed or stopped."""

    def __init__(self, base: LoadedModel):
        self.peer, self.ended = Peer(base), None
        self.url: str | None = self.peer.url

    def kill(self, why: str = "vLLM ended with signal 9") -> None:
        if self.ended is None:
            self.ended = why
            self.peer.die()

    def stop(self) -> None:
        self.peer.faults = Faults()
        self.kill("it was stopped")


class Place:
    """One place: `lives` are the servers that were started there."""

    def __init__(self, base: LoadedModel):
        self._base, self.lives = base, list[Started]()
        self.ready = threading.Event()
        self.ready.set()

    def __call__(self) -> Started:
        self.lives.append(Started(self._base))
        if not self.ready.is_set():  # its machine says later where it listens
            self.lives[-1].url = None
        return self.lives[-1]

    @property
    def peer(self) -> Peer:
        return self.lives[-1].peer


@pytest.fixture
def gave_back() -> list[None]:
    """An entry for each time that learners were to give memory back."""
    return []


@pytest.fixture
def start(tiny: LoadedModel, gave_back: list[None]) -> Iterator[Callable[..., tuple[VllmEngine, list[Place]]]]:
    """`start(2)`: an engine over so many servers that it starts, and their places."""
    with ExitStack() as opened:

        def make(count: int, *, rows: int | None = None, **options) -> tuple[VllmEngine, list[Place]]:
            places = [Place(tiny) for _ in range(count)]
            targets = linear_names(tiny.model, "all-linear")
            local = LocalEngine(tiny, max_rows=1, prefix_cache_mb=0)
            config = VllmConfig(**{**QUICK, **options})
            woken = lambda: gave_back.append(None)  # noqa: E731
            engine = VllmEngine(config, tiny, local, targets=targets, starts=places, rows=rows, before_waking=woken)
            opened.callback(engine.close)
            return engine, places

        yield make


@pytest.fixture(scope="module")
def adapter(make_base, make_adapter) -> Path:
    return make_adapter(make_base("qwen3", dtype=torch.float32, context=192), seed=1)


def request(seed: int = 5, *, n: int = 1, version: PolicyVersion = BASE, conversation: str = "") -> SamplingRequest:
    params = SamplingParams(max_tokens=8, seed=seed, ignore_eos=True)
    return SamplingRequest(prompt_ids=(1, 2, 3, 4), n=n, version=version, params=params, conversation=conversation)


def seen(places: Sequence[Place]) -> list[int]:
    return [sum(len(life.peer.seen) for life in place.lives) for place in places]


def test_they_share_the_load_and_end_with_the_run(start) -> None:
    engine, places = start(2)
    for place in places:
        place.peer.faults.slow_s = 0.5  # all requests are there before the first is answered
    before = seen(places)
    answers = engine.generate([request(seed) for seed in range(12)])
    given = [now - then for now, then in zip(seen(places), before, strict=True)]
    assert sum(given) == len(answers) == 12 and min(given) >= 4
    engine.close()
    assert [len(place.lives) for place in places] == [1, 1] and all(place.lives[0].ended for place in places)


def test_one_that_is_killed_is_replaced_and_nothing_is_lost(start, adapter: Path, tiny_engine: LocalEngine) -> None:
    """Its requests go on elsewhere, a version is published meanwhile without waiting for it, and it has that version
    when it is back, at another address."""
    engine, places = start(2)
    tiny_engine.load(FIRST, adapter)
    for place in places:
        place.peer.faults.slow_s = 0.3
    futures = engine.submit([request(seed, n=2) for seed in range(8)])
    time.sleep(0.1)
    places[0].ready.clear()
    places[0].lives[0].kill()
    assert [len(future.result(60)) for future in futures] == [2] * 8
    began = time.monotonic()
    engine.load(FIRST, adapter)
    assert time.monotonic() - began < QUICK["recovery_timeout_s"] and list(engine.servers.values()).count(None) == 1
    places[0].ready.set()
    assert becomes(lambda: len(places[0].lives) == 2)
    places[0].lives[1].url = places[0].peer.url
    assert becomes(lambda: None not in engine.servers.values())
    assert places[0].peer.url in engine.servers and any(name.startswith("math-v1") for name in places[0].peer.loaded)
    before = len(places[0].peer.seen)
    for seed, (each,) in enumerate(engine.generate([request(seed, version=FIRST) for seed in range(8)])):
        scored = tiny_engine.score((1, 2, 3, 4), each.token_ids, FIRST)
        assert max(abs(a - b) for a, b in zip(each.logprobs, scored, strict=True)) < 1e-4, seed
    assert len(places[0].peer.seen) > before
    tiny_engine.unload(FIRST)


def test_one_that_answers_nothing_is_not_started_for_ever(start) -> None:
    engine, (place,) = start(1)
    assert engine.generate([request()])  # an answer begins the count anew
    for lives in range(1, STARTS + 2):
        assert becomes(lambda: None not in engine.servers.values()) and len(place.lives) == lives
        place.lives[-1].kill()
        assert becomes(lambda lives=lives: len(place.lives) == lives + 1 or lives == STARTS + 1)
    with raises(EngineError, kind="restarts"):
        engine.generate([request()])
    assert len(place.lives) == STARTS + 1


@pytest.mark.long
def test_one_that_answers_may_be_lost_more_often(start) -> None:
    engine, (place,) = start(1)
    for _ in range(STARTS + 1):
        assert engine.generate([request()])
        before = len(place.lives)
        place.lives[-1].kill()
        assert becomes(lambda before=before: len(place.lives) > before)
    assert engine.generate([request()])


def test_servers_on_the_learners_gpus_sleep_while_those_train(start, gave_back: list[None], adapter: Path) -> None:
    """From the beginning, and after each `rest`; a request or a version wakes them, once the learners gave back what
    they do not use. One that dies in its sleep is started when the others wake."""
    engine, places = start(2, sleep=True)

    def asleep() -> list[bool]:
        return [place.peer.asleep for place in places]

    assert asleep() == [True, True] and not gave_back
    assert len(engine.generate([request(seed) for seed in range(4)])) == 4
    assert asleep() == [False, False] and len(gave_back) == 1

    for place in places:
        place.peer.faults.slow_s = 0.3
    future = engine.submit([request(9)])[0]
    time.sleep(0.1)
    asyncio.run(engine.rest())  # waits for what is in flight
    assert future.done() and asleep() == [True, True]
    engine.load(FIRST, adapter)
    assert asleep() == [False, False] and len(gave_back) == 2

    asyncio.run(engine.rest())
    places[0].lives[0].kill()
    assert becomes(lambda: None in engine.servers.values())
    time.sleep(0.5)
    assert len(places[0].lives) == 1 and asleep()[1]
    assert engine.generate([request(version=FIRST)])
    assert becomes(lambda: None not in engine.servers.values()) and len(places[0].lives) == 2
    asyncio.run(engine.rest())
    assert asleep() == [True, True]
    engine.unload(FIRST)  # when they are awake
    time.sleep(0.2)
    assert any(name.startswith("math-v1") for name in places[1].peer.loaded)
    assert engine.generate([request()])
    assert becomes(lambda: not any(name.startswith("math-v1") for name in places[1].peer.loaded))


def test_servers_with_gpus_of_their_own_do_not_sleep(start) -> None:
    engine, (place,) = start(1)
    asyncio.run(engine.rest())
    assert not place.peer.slept


def test_turns_of_a_conversation_stay_on_their_server(start) -> None:
    """Ten conversations of three turns each, in another order every time: both servers have some, and none moves."""
    engine, places = start(2, rows=64)
    turns = [[replace(request(number), prompt_ids=(number, 3), conversation=f"{number}/0") for number in range(10)]]
    for order in (*turns, turns[0][::-1], turns[0][5:] + turns[0][:5]):
        engine.generate(order)
    homes = [[body["prompt"][0] for body in place.peer.seen if body["prompt"][1:] == [3]] for place in places]
    assert min(map(len, homes)) >= 9 and not set(homes[0]) & set(homes[1])
    assert sorted(homes[0] + homes[1]) == sorted(3 * list(range(10)))


def test_a_conversation_begins_where_its_group_did_and_moves_when_that_is_full_or_lost(start) -> None:
    engine, places = start(2, rows=2)
    before = seen(places)
    engine.generate([request(conversation="7")])
    home = next(at for at, count in enumerate(seen(places)) if count > before[at])
    other = 1 - home
    for place in places:
        place.peer.faults.slow_s = 0.5
    busy = engine.submit([replace(request(n=2), conversation="7/0")])
    assert becomes(lambda: places[home].peer.most_flying and seen(places)[home] > before[home] + 1)
    begun = seen(places)
    assert engine.generate([request(conversation="7/1")]) and seen(places)[other] == begun[other] + 1  # no room
    assert busy[0].result(60) and engine.generate([request(conversation="7/1")])
    assert seen(places)[other] == begun[other] + 2  # and there it stays
    places[other].lives[0].kill()
    assert becomes(lambda: None in engine.servers.values())
    assert engine.generate([request(conversation="7/1")])
