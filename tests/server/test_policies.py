"""Leases and swaps over a real store and a real engine: one version per request, whatever else happens.

The adapters are marked: each makes the tiny model's greedy completion another one, which an engine that holds nothing
else computed beforehand. A completion that is none of these was decoded under two versions.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from safetensors.torch import load_file, save_file

from groupwise.config.lora import LoraSpec
from groupwise.engine.local import LocalEngine
from groupwise.errors import (
    AdapterError,
    AdapterNotFoundError,
    DeadlineError,
    GroupwiseError,
    ModelError,
    OverloadedError,
    RequestError,
    StorageError,
    SwapRefusedError,
)
from groupwise.model.load import LoadedModel
from groupwise.server.policies import AdapterInUseError, Policies, canary_tolerance
from groupwise.store.adapters import AdapterStore
from groupwise.store.files import WEIGHTS, Provenance
from groupwise.store.merge import MergeMode, WeightedAdapter, merge_adapters
from groupwise.train.learner import Learner
from groupwise.types import PolicyVersion, Sample, SamplingParams, SamplingRequest
from wording import raises

BASE = PolicyVersion.base()
PROMPT, LENGTH, MARKS = (3, 1, 4, 1, 5), 12, 4
CANARY = {"prompt_ids": [3, 1, 4], "completion_ids": [1, 5, 9, 2, 6]}


@dataclass(frozen=True)
class Share:
    name: str
    scale: float


@dataclass
class Marked:
    """A base model and adapters over it that are told apart by what they say."""

    base: LoadedModel
    directories: list[Path]
    said: dict[int | None, tuple[int, ...]]  # adapter (None: the base) -> its greedy completion
    canaries: list[dict]

    def publish(self, store: AdapterStore, name: str, mark: int, **info) -> PolicyVersion:
        provenance = Provenance(**{"base_model": "tiny", "base_hash": self.base.hash, **info})
        return store.import_(self.directories[mark], name, info=provenance)


def request(version: PolicyVersion, *, length: int = LENGTH) -> SamplingRequest:
    params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
    return SamplingRequest(prompt_ids=PROMPT, params=params, version=version)


def canary_of(base: LoadedModel, directory: Path) -> dict:
    """What the worker writes: the trainer's log-probabilities, by its own forward and not the engine's."""
    learner = Learner(base, lora=LoraSpec(rank=3, alpha=6.0))
    learner.load_adapter(directory)
    prompt, completion = tuple(CANARY["prompt_ids"]), tuple(CANARY["completion_ids"])
    sample = Sample(prompt_ids=prompt, completion_ids=completion, mask=(1,) * len(completion))
    return CANARY | {"logprobs": list(learner.forward([sample])[0])}


@pytest.fixture(scope="module")
def marked(make_base, make_adapter) -> Marked:
    base = make_base(dtype=torch.float32)
    directories = [make_adapter(base, seed=seed) for seed in range(MARKS)]
    engine, said = LocalEngine(base), {}
    try:
        for mark in (None, *range(MARKS)):
            version = BASE if mark is None else PolicyVersion("alone", mark)
            if mark is not None:
                engine.load(version, directories[mark])
            ((completion,),) = engine.generate([request(version)])
            said[mark] = completion.token_ids
    finally:
        engine.close()
    assert len(set(said.values())) == MARKS + 1
    return Marked(base, directories, said, [canary_of(base, directory) for directory in directories])


@pytest.fixture(scope="module")
def engine(marked: Marked) -> Iterator[LocalEngine]:
    engine = LocalEngine(marked.base, max_rows=64)
    yield engine
    engine.close()


@pytest.fixture
def store(tmp_path: Path) -> AdapterStore:
    return AdapterStore(tmp_path / "adapters")


@pytest.fixture
def policies(marked: Marked, engine: LocalEngine, store: AdapterStore) -> Iterator[Policies]:
    policies = Policies(store, engine, base=marked.base, served_name="tiny", max_loaded=2)
    yield policies
    policies.close()
    for version in policies.in_use:
        engine.unload(version)
    assert engine.stats()["adapters"] == 0  # nothing is left behind, in no test


async def say(engine: LocalEngine, version: PolicyVersion) -> tuple[int, ...]:
    ((completion,),) = await engine.sample([request(version)])
    return completion.token_ids


def run(work: Coroutine) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


# --- leases ---


def test_what_a_request_means(marked: Marked, engine, store, policies: Policies):
    first, second = (marked.publish(store, "math", mark) for mark in (0, 1))
    other = marked.publish(store, "sql", 2)

    async def work():
        await policies.swap(first)
        for selector, expected in (
            ({}, first),
            ({"model": "tiny"}, first),
            ({"model": "tiny", "adapter": "sql"}, other),
            ({"model": "sql"}, other),
            ({"model": "sql", "adapter": "sql@1"}, other),
            ({"adapter": "math"}, first),
            ({"adapter": "math@2"}, second),
            ({"model": "math@2"}, second),
            ({"model": "base"}, BASE),
            ({"adapter": "base"}, BASE),
        ):
            async with policies.lease(**selector) as version:
                assert version == expected, selector
                mark = {first: 0, second: 1, other: 2}.get(version)
                assert await say(engine, version) == marked.said[mark]

    run(work())


@pytest.mark.parametrize(
    ("selector", "error", "code"),
    [
        ({"model": "gpt-4"}, ModelError, "model_not_found"),
        ({"model": "math@7"}, ModelError, "model_not_found"),
        ({"model": "../../etc/passwd"}, ModelError, "model_not_found"),
        ({"model": "math", "adapter": "sql"}, RequestError, "invalid_value"),
        ({"adapter": "nope"}, AdapterNotFoundError, "adapter_not_found"),
        ({"adapter": "math@0"}, AdapterNotFoundError, "adapter_not_found"),
        ({"adapter": "math@1@1"}, AdapterNotFoundError, "adapter_not_found"),
        ({"adapter": "math@" + "1" * 300}, AdapterNotFoundError, "adapter_not_found"),
        ({"adapter": "x" * 300}, AdapterNotFoundError, "adapter_not_found"),
        ({"adapter": "."}, AdapterNotFoundError, "adapter_not_found"),
        ({"adapter": "a\0b"}, AdapterNotFoundError, "adapter_not_found"),
        ({"adapter": "/"}, AdapterNotFoundError, "adapter_not_found"),
        ({"adapter": "math@\u00b2"}, AdapterNotFoundError, "adapter_not_found"),
        ({"adapters": [Share("nope", 1.0)]}, AdapterNotFoundError, "adapter_not_found"),
        ({"adapters": [Share("math", 1.0), Share("base", 1.0)]}, RequestError, "invalid_value"),
    ],
)
def test_what_means_nothing(marked, store, policies: Policies, selector: dict, error, code: str):
    for name in ("math", "sql"):
        marked.publish(store, name, 0)

    async def work():
        with pytest.raises(error) as caught:
            async with policies.lease(**selector):
                raise AssertionError("must not be admitted")
        assert caught.value.code == code and len(str(caught.value)) < 400
        assert policies.in_use == {}

    run(work())


def test_requests_for_one_version_load_it_once(marked, engine, store, policies: Policies, monkeypatch):
    version = marked.publish(store, "math", 0)
    loads: list[PolicyVersion] = []
    load = engine.load
    monkeypatch.setattr(engine, "load", lambda v, d: (loads.append(v), load(v, d)))

    async def ask() -> None:
        async with policies.lease(adapter="math") as leased:
            assert await say(engine, leased) == marked.said[0]

    async def work():
        await asyncio.gather(*(ask() for _ in range(20)))
        assert policies.in_use == {version: 0}

    run(work())
    assert loads == [version]


def test_the_longest_unused_is_unloaded_and_comes_back(marked, engine, store, policies: Policies):
    versions = [marked.publish(store, "math", mark) for mark in range(4)]

    async def ask(index: int) -> None:
        async with policies.lease(adapter=str(versions[index])) as version:
            assert await say(engine, version) == marked.said[index]

    async def work():
        await policies.swap(versions[3])
        for index in (0, 1, 0, 2):
            await ask(index)
        assert set(policies.in_use) == {versions[0], versions[2], versions[3]}  # two, and the active one
        await ask(1)
        assert set(policies.in_use) == {versions[1], versions[2], versions[3]}

    run(work())


# --- waiting for room ---


def test_where_there_is_no_room_newcomers_wait_their_turn(marked, engine, store, policies: Policies):
    versions = [marked.publish(store, "math", mark) for mark in range(4)]

    async def late() -> tuple[int, ...]:
        async with policies.lease(adapter=str(versions[2])) as version:
            return await say(engine, version)

    async def work():
        async with AsyncExitStack() as first, AsyncExitStack() as second:
            await first.enter_async_context(policies.lease(adapter=str(versions[0])))
            await second.enter_async_context(policies.lease(adapter=str(versions[1])))
            waits = asyncio.create_task(late())
            await until(lambda: policies.waiting == 1)
            await policies.swap(versions[3])  # the active one always has its place
            async with policies.lease() as active:
                assert await say(engine, active) == marked.said[3]
            assert not waits.done() and set(policies.in_use) == {versions[0], versions[1], versions[3]}
            await second.aclose()  # one of the two ends
            assert await waits == marked.said[2]
        assert policies.waiting == 0 and policies.in_use == {versions[0]: 0, versions[2]: 0, versions[3]: 0}

    run(work())


def test_sixty_requests_over_twelve_adapters_are_all_answered(marked, engine, store, policies: Policies):
    """And in the order in which they came where they want the same adapter."""
    marks = [i % MARKS for i in range(12)]
    versions = [marked.publish(store, f"number-{i}", mark) for i, mark in enumerate(marks)]
    began: list[int] = []

    async def ask(i: int) -> None:
        async with policies.lease(adapter=f"number-{i % 12}") as version:
            assert version == versions[i % 12]
            began.append(i)
            assert await say(engine, version) == marked.said[marks[i % 12]]
        assert len(policies.in_use) <= 2

    async def work():
        await asyncio.gather(*(ask(i) for i in range(60)))
        assert policies.waiting == 0 and len(policies.in_use) == 2

    run(work())
    assert all(sorted(same) == same for same in ([i for i in began if i % 12 == k] for k in range(12)))


def test_who_waits_is_not_starved_by_those_that_keep_coming(marked, engine, store, policies: Policies):
    """Two adapters that are never idle by themselves, as their requests overlap: one lets go for who waits."""
    versions = [marked.publish(store, "math", mark) for mark in range(3)]
    answered = asyncio.Event()
    asked = 0

    async def keep_asking(version: PolicyVersion) -> None:
        nonlocal asked
        while not answered.is_set():
            async with policies.lease(adapter=str(version)) as leased:
                asked += 1
                await say(engine, leased)
            assert asked < 500, "it was passed over"

    async def work():
        crowd = [asyncio.create_task(keep_asking(version)) for version in versions[:2] for _ in range(4)]
        await until(lambda: asked > 8)
        async with policies.lease(adapter=str(versions[2])) as leased:
            assert await say(engine, leased) == marked.said[2]
        answered.set()
        await asyncio.gather(*crowd)
        assert policies.waiting == 0

    run(work())


def test_while_somebody_waits_only_one_adapter_lets_go(marked, engine, store, policies: Policies):
    """The requests of the other one go on being admitted."""
    versions = [marked.publish(store, "math", mark) for mark in range(3)]

    async def work():
        async with AsyncExitStack() as old, AsyncExitStack() as new:
            await old.enter_async_context(policies.lease(adapter=str(versions[0])))
            await new.enter_async_context(policies.lease(adapter=str(versions[1])))
            waits = asyncio.create_task(hold(policies, versions[2]))
            await until(lambda: policies.waiting == 1)
            async with policies.lease(adapter=str(versions[1])):  # asked for last, so that it is not the one
                pass
            behind = asyncio.create_task(hold(policies, versions[0]))
            await until(lambda: policies.waiting == 2)
            waits.cancel()  # nobody needs its place any more
            await asyncio.gather(waits, return_exceptions=True)
            await asyncio.wait_for(behind, 30)
        assert policies.waiting == 0

    run(work())


async def hold(policies: Policies, version: PolicyVersion, **options) -> PolicyVersion:
    async with policies.lease(adapter=str(version), **options) as leased:
        return leased


def test_waiting_has_an_end_and_so_has_the_queue(marked, engine, store):
    policies = Policies(store, engine, base=marked.base, served_name="tiny", max_loaded=1, max_waiting=2)
    versions = [marked.publish(store, "math", mark) for mark in range(2)]

    async def work():
        async with policies.lease(adapter=str(versions[0])):
            with raises(DeadlineError):
                await hold(policies, versions[1], patience_s=0.01)
            waits = [asyncio.create_task(hold(policies, versions[1])) for _ in range(2)]
            await until(lambda: policies.waiting == 2)
            with raises(OverloadedError):
                await hold(policies, versions[1])
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
            assert policies.waiting == 0
            async with policies.lease(adapter=str(versions[0])):  # nobody waits for its place any more
                pass
        assert await hold(policies, versions[1]) == versions[1]
        assert policies.in_use == {versions[1]: 0}

    run(work())
    policies.close()
    engine.unload(versions[1])


def test_who_is_given_up_just_when_its_turn_comes_takes_no_place(marked, engine, store):
    policies = Policies(store, engine, base=marked.base, served_name="tiny", max_loaded=1)
    versions = [marked.publish(store, "math", mark) for mark in range(3)]

    async def work():
        async with policies.lease(adapter=str(versions[0])):
            gone, next_one = (asyncio.create_task(hold(policies, version)) for version in versions[1:])
            await until(lambda: policies.waiting == 2)
        gone.cancel()  # between the turn and the first thing it could do with it
        assert await next_one == versions[2]
        assert policies.in_use == {versions[2]: 0} and policies.waiting == 0

    run(work())
    policies.close()
    engine.unload(versions[2])


def test_a_version_that_is_deleted_while_a_request_waits_for_it(marked, engine, store, policies: Policies):
    versions = [marked.publish(store, "math", mark) for mark in range(3)]

    async def work():
        async with AsyncExitStack() as held:
            for version in versions[:2]:
                await held.enter_async_context(policies.lease(adapter=str(version)))
            waits = asyncio.create_task(hold(policies, versions[2]))
            await until(lambda: policies.waiting == 1)
            await policies.delete([versions[2]])
        with raises(AdapterNotFoundError):
            await waits

    run(work())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0)


# --- requests that are given up ---


def test_a_request_that_is_given_up_while_it_loads(marked, engine, store, policies: Policies, monkeypatch):
    version = marked.publish(store, "math", 0)
    load = engine.load

    async def work():
        loop, started, may_finish = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

        def slow(v: PolicyVersion, directory: Path) -> None:
            loop.call_soon_threadsafe(started.set)
            asyncio.run_coroutine_threadsafe(may_finish.wait(), loop).result(30)
            load(v, directory)

        monkeypatch.setattr(engine, "load", slow)

        async def ask() -> tuple[int, ...]:
            async with policies.lease(adapter="math") as leased:
                return await say(engine, leased)

        impatient, patient = asyncio.create_task(ask()), asyncio.create_task(ask())
        await started.wait()
        assert policies.in_use == {version: 2}
        impatient.cancel()
        await asyncio.gather(impatient, return_exceptions=True)
        assert policies.in_use == {version: 1}
        may_finish.set()
        assert await patient == marked.said[0]
        assert policies.in_use == {version: 0}

    run(work())


# --- what cannot be loaded ---


def test_an_adapter_of_another_base(marked, store, policies: Policies):
    version = marked.publish(store, "math", 0, base_hash="another", base_model="other-model")

    async def work():
        with raises(AdapterError):
            async with policies.lease(adapter="math"):
                pass
        with raises(SwapRefusedError):
            await policies.swap(version)
        assert policies.active == store.active == BASE and policies.in_use == {}

    run(work())


def test_weights_that_do_not_fit_or_overflow(marked, store, policies: Policies, tmp_path: Path):
    """The base hash is right: what an adapter claims is not believed."""
    narrow = changed(marked, tmp_path / "narrow", lambda key, x: x[:, :-1] if "lora_A" in key else x)
    huge = changed(marked, tmp_path / "huge", lambda key, x: torch.full_like(x, 1e30))
    info = Provenance(base_model="tiny", base_hash=marked.base.hash)
    shape, overflow = store.import_(narrow, "shape", info=info), store.import_(huge, "overflow", info=info)

    async def work():
        with raises(SwapRefusedError):
            await policies.swap(shape)
        with raises(SwapRefusedError):
            await policies.swap(overflow)
        for directory, kind in ((narrow, "shape"), (huge, "not_finite")):
            with raises(AdapterError, kind=kind):
                await asyncio.to_thread(policies.verify_files, directory)
        await asyncio.to_thread(policies.verify_files, marked.directories[0])
        assert policies.in_use == {} and policies.active == BASE

    run(work())


def changed(marked: Marked, directory: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
    """A copy of the first adapter with other weights."""
    shutil.copytree(marked.directories[0], directory)
    tensors = load_file(directory / WEIGHTS)
    save_file({key: change(key, tensor).contiguous() for key, tensor in tensors.items()}, directory / WEIGHTS)
    return directory


def test_a_failure_is_not_remembered(marked, engine, store, policies: Policies, monkeypatch):
    marked.publish(store, "math", 0)

    def fails(version: PolicyVersion, directory: Path) -> None:
        raise AdapterError("out of memory")

    async def work():
        with monkeypatch.context() as patch:
            patch.setattr(engine, "load", fails)
            outcomes = await asyncio.gather(*(ask() for _ in range(5)), return_exceptions=True)
            assert [str(outcome) for outcome in outcomes] == ["out of memory"] * 5 and policies.in_use == {}
        assert await ask() == marked.said[0]

    async def ask() -> tuple[int, ...]:
        async with policies.lease(adapter="math") as version:
            return await say(engine, version)

    run(work())


# --- swaps ---


@pytest.mark.parametrize(
    ("change", "refused"),
    [(0.0, False), (1e-5, False), (0.01, True), (-0.01, True), (float("nan"), True), (float("inf"), True)],
)
def test_the_canary(marked, engine, store, policies: Policies, change: float, refused: bool):
    """The trainer's own log-probabilities pass; one that is off anywhere does not, and the old policy goes on."""
    first = marked.publish(store, "math", 0, canary=marked.canaries[0])
    canary = marked.canaries[1]
    canary = canary | {"logprobs": [canary["logprobs"][0] + change, *canary["logprobs"][1:]]}
    # JSON has no NaN: the sidecar is read back as it would be from a damaged file
    info = replace(store.info(first), canary=canary)

    async def work():
        await policies.swap(first)
        second = marked.publish(store, "math", 1)
        read = store.info
        store.info = lambda version: info if version == second else read(version)  # pyright: ignore
        if not refused:
            assert await policies.swap(second) == first
            assert policies.active == store.active == second
            return
        with raises(SwapRefusedError):
            await policies.swap(second)
        assert policies.active == store.active == first
        async with policies.lease() as version:
            assert await say(engine, version) == marked.said[0]

    run(work())


def test_another_adapters_weights_fail_the_canary(marked, store, policies: Policies):
    version = marked.publish(store, "math", 0, canary=marked.canaries[1])

    async def work():
        with raises(SwapRefusedError):
            await policies.swap(version)

    run(work())


def test_the_tolerance_is_the_types(make_base):
    tolerances = [canary_tolerance(make_base(dtype=dtype)) for dtype in (torch.float64, torch.float32, torch.bfloat16)]
    assert tolerances == [1e-3, 1e-3, 0.1]


def test_requests_end_on_the_version_they_began_on(marked, engine, store, policies: Policies):
    """Long streams, and a storm of swaps among them: nobody hears two versions, and the newest swap wins."""
    versions = [marked.publish(store, "math", mark, canary=marked.canaries[mark]) for mark in range(3)]
    expected = dict(zip((BASE, *versions), (marked.said[m] for m in (None, 0, 1, 2)), strict=True))
    seen: list[PolicyVersion] = []

    async def ask(delay: float) -> None:
        await asyncio.sleep(delay)
        async with policies.lease() as version:
            seen.append(version)
            ((completion,),) = await engine.sample([request(version, length=48)])
            assert completion.token_ids[:LENGTH] == expected[version]
            assert completion.version == version

    async def work():
        asks: list[asyncio.Task[None]] = []
        for i in range(24):
            await policies.swap(versions[i % 3])
            asks += [asyncio.create_task(ask(delay)) for delay in (0.0, 0.015)]  # the second comes in a later swap
            await asyncio.sleep(0.01)
        storm = [policies.swap((BASE, *versions)[i % 4]) for i in range(10)]  # all at once: 0 1 2 3 0 1 2 3 0 1
        await asyncio.gather(*storm, *asks)
        assert policies.active == store.active == versions[0]
        assert set(seen) >= set(versions)

    run(work())


def test_a_swap_that_cannot_be_written(marked, engine, store, policies: Policies, monkeypatch):
    version = marked.publish(store, "math", 0)

    def full(version: PolicyVersion) -> None:
        raise StorageError("disk full")

    monkeypatch.setattr(store, "activate", full)

    async def work():
        with pytest.raises(StorageError):
            await policies.swap(version)
        assert policies.active == BASE
        async with policies.lease() as active:
            assert await say(engine, active) == marked.said[None]

    run(work())


def test_rollback(marked, engine, store, policies: Policies):
    first, second = (marked.publish(store, "math", mark) for mark in (0, 1))

    async def work():
        with raises(AdapterError):
            await policies.rollback()
        await policies.swap(first)
        await policies.swap(second)
        assert await policies.rollback() == first == policies.active == store.active
        async with policies.lease() as version:
            assert await say(engine, version) == marked.said[0]
        assert await policies.rollback() == BASE == policies.active

    run(work())


def test_a_rollback_that_is_refused_changes_nothing(marked, store, policies: Policies, monkeypatch):
    first, second = (marked.publish(store, "math", mark) for mark in (0, 1))

    async def work():
        await policies.swap(first)
        await policies.swap(second)
        monkeypatch.setattr(policies, "_verify", lambda version: (_ for _ in ()).throw(AdapterError("no")))
        with pytest.raises(SwapRefusedError):
            await policies.rollback()
        assert policies.active == store.active == second

    run(work())


def test_delete(marked, store, policies: Policies):
    versions = [marked.publish(store, "math", mark) for mark in range(3)]

    async def work():
        await policies.swap(versions[2])
        async with policies.lease(adapter="math@1"):
            for refused, kind in ((versions, "active"), (versions[:2], "in_use")):
                with raises(AdapterInUseError, status=409, code="adapter_in_use", kind=kind):
                    await policies.delete(list(reversed(refused)))
                assert store.versions("math") == tuple(versions)
            await policies.delete([versions[1]])
        await policies.delete([versions[0]])
        assert store.versions("math") == (versions[2],) and set(policies.in_use) == {versions[2]}
        for gone in ("math@1", "math@2"):
            with pytest.raises(AdapterNotFoundError):
                async with policies.lease(adapter=gone):
                    pass
        with pytest.raises(AdapterNotFoundError):
            await policies.delete([versions[0]])

    run(work())


# --- start ---


def restarted(marked: Marked, engine: LocalEngine, store: AdapterStore) -> Policies:
    """What the next process has."""
    return Policies(AdapterStore(store.root), engine, base=marked.base, served_name="tiny", max_loaded=2)


@pytest.mark.parametrize("damage", ["none", "active", "base", "all"])
def test_start(marked, engine, store, policies: Policies, damage: str):
    first = marked.publish(store, "math", 0)
    second = marked.publish(store, "math", 1, base_hash="another" if damage == "base" else marked.base.hash)
    store.activate(first)
    store.activate(second)
    for version in {"active": [second], "all": [first, second]}.get(damage, ()):
        weights = store.path(version) / WEIGHTS
        weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")  # of the same length: only the hash tells
    again = restarted(marked, engine, store)

    async def work():
        await again.start()
        async with again.lease() as version:
            mark = {"none": 1, "active": 0}.get(damage)
            assert version == {"none": second, "active": first}.get(damage, BASE)
            assert await say(engine, version) == marked.said[mark]
        assert bool(again.warnings) == (damage == "base")

    try:
        run(work())
    finally:
        again.close()
        for version in again.in_use:
            engine.unload(version)


# --- compositions ---


def test_a_composition_is_the_sum(marked, engine, store, policies: Policies, tmp_path: Path):
    """Against the same sum merged into one adapter."""
    for mark, name in ((0, "math"), (1, "sql")):
        marked.publish(store, name, mark)
    sources = [WeightedAdapter(marked.directories[0], 0.5), WeightedAdapter(marked.directories[1], -1.25)]
    merge_adapters(sources, tmp_path, mode=MergeMode.CONCAT)
    merged = PolicyVersion("merged", 1)

    async def work():
        async with policies.lease(adapters=[Share("sql", -1.25), Share("math", 0.5)]) as version:
            assert str(version) == "0.5*math@1+-1.25*sql@1" and PolicyVersion.parse(str(version)) == version
            composed = engine.score((1, 2, 3), (4, 5, 6, 7), version)
        async with policies.lease(adapters=[Share("math", 0.5), Share("sql", -1.25)]) as same:
            assert same == version and policies.in_use == {version: 1}
        engine.load(merged, tmp_path)
        assert composed == pytest.approx(engine.score((1, 2, 3), (4, 5, 6, 7), merged), abs=1e-4)
        assert composed != pytest.approx(engine.score((1, 2, 3), (4, 5, 6, 7), BASE), abs=1e-2)
        engine.unload(merged)

    run(work())


def test_a_composition_follows_its_parts_versions(marked, store, policies: Policies):
    """A name inside a composition is settled like any other: retraining it gives another sum, not a stale one."""
    marked.publish(store, "math", 0)

    async def work():
        async with policies.lease(adapters=[Share("math", 1.0)]) as first:
            assert str(first) == "1.0*math@1"
        marked.publish(store, "math", 1)
        async with policies.lease(adapters=[Share("math", 1.0)]) as second:
            assert str(second) == "1.0*math@2"

    run(work())


# --- everything at once ---


def check_any_order(marked: Marked, engine: LocalEngine, *, examples: int, steps: int) -> None:
    class Machine(RuleBasedStateMachine):
        """Publications, swaps, leases, deletions and rollbacks in any order, against a model of a few lines."""

        def __init__(self):
            super().__init__()
            self.loop = asyncio.new_event_loop()
            self.root = Path(tempfile.mkdtemp())
            self.store = AdapterStore(self.root)
            self.policies = Policies(self.store, engine, base=marked.base, served_name="tiny", max_loaded=2)
            self.marks: dict[PolicyVersion, int] = {}
            self.sound: set[PolicyVersion] = set()
            self.active = BASE
            self.leases: list[tuple[PolicyVersion, AsyncExitStack]] = []

        def do(self, work: Coroutine):
            return self.loop.run_until_complete(asyncio.wait_for(work, 30))

        def expect(self, error: type[GroupwiseError] | None, work: Callable[[], Coroutine]):
            if error is None:
                return self.do(work())
            with pytest.raises(error):
                self.do(work())
            return None

        def users(self, version: PolicyVersion) -> int:
            return sum(leased == version for leased, _ in self.leases)

        @rule(
            name=st.sampled_from(["math", "sql"]),
            mark=st.integers(0, MARKS - 1),
            sound=st.sampled_from([True, True, False]),
        )
        def publish(self, name: str, mark: int, sound: bool):
            canary = marked.canaries[mark if sound else (mark + 1) % MARKS]
            version = marked.publish(self.store, name, mark, canary=canary)
            self.marks[version] = mark
            if sound:
                self.sound.add(version)

        @precondition(lambda self: self.marks)
        @rule(data=st.data())
        def swap(self, data):
            version = data.draw(st.sampled_from([BASE, *sorted(self.marks)]))
            refused = not version.is_base and version not in self.sound
            self.expect(SwapRefusedError if refused else None, lambda: self.policies.swap(version))
            self.active = self.active if refused else version

        @precondition(lambda self: self.marks)
        @rule(data=st.data())
        def begin(self, data):
            """A request without an adapter, by name, or by version."""
            version = data.draw(st.sampled_from([None, *sorted(self.marks)]))
            by_name = version is not None and data.draw(st.booleans())
            text = None if version is None else version.name if by_name else str(version)
            expected = self.active if version is None else version
            if by_name and version is not None:
                same = [v for v in sorted(self.marks) if v.name == version.name]
                expected = self.active if self.active.name == version.name else same[-1]
            busy = {v for v, _ in self.leases if not v.is_base and v != self.active}
            full = not expected.is_base and expected != self.active and expected not in busy and len(busy) >= 2
            stack = AsyncExitStack()
            lease = self.policies.lease(adapter=text, patience_s=0.0)
            if full and expected not in self.policies.in_use:
                self.expect(DeadlineError, lambda: stack.enter_async_context(lease))
                return
            got = self.do(stack.enter_async_context(lease))
            assert got == expected
            self.leases.append((got, stack))

        @precondition(lambda self: self.leases)
        @rule(data=st.data(), end=st.booleans())
        def go_on(self, data, end: bool):
            """A request hears its own version, whatever has been swapped or deleted since; then perhaps it ends."""
            version, stack = data.draw(st.sampled_from(self.leases))
            assert self.do(say(engine, version)) == marked.said[self.marks.get(version)]
            if end:
                self.leases.remove((version, stack))
                self.do(stack.aclose())

        @precondition(lambda self: self.marks)
        @rule(data=st.data())
        def delete(self, data):
            version = data.draw(st.sampled_from(sorted(self.marks)))
            refused = version == self.active or self.users(version) > 0
            self.expect(AdapterInUseError if refused else None, lambda: self.policies.delete([version]))
            if not refused:
                del self.marks[version]

        @precondition(lambda self: not self.active.is_base)
        @rule()
        def rollback(self):
            self.active = self.do(self.policies.rollback())
            assert self.active.is_base or (self.active in self.marks and self.active in self.sound)

        @invariant()
        def agrees(self):
            assert self.policies.active == self.store.active == self.active
            in_use = self.policies.in_use
            leased = {version for version, _ in self.leases if not version.is_base}
            assert leased <= set(in_use) and all(users == self.users(v) for v, users in in_use.items())
            assert engine.stats()["adapters"] == len(in_use)
            others = [version for version in in_use if version != self.active]
            assert len(others) <= 2 or all(in_use[version] for version in others)

        def teardown(self):
            for _, stack in self.leases:
                self.do(stack.aclose())
            for version in self.policies.in_use:
                engine.unload(version)
            self.policies.close()
            self.loop.close()
            shutil.rmtree(self.root)

    limits = settings(
        max_examples=examples,
        stateful_step_count=steps,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    run_state_machine_as_test(Machine, settings=limits)


def test_any_order(marked: Marked, engine: LocalEngine):
    check_any_order(marked, engine, examples=8, steps=25)
