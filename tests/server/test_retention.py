"""Old versions go, and nothing that somebody needs: over a real store, ledger, engine and policies."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from groupwise.engine.local import LocalEngine
from groupwise.errors import AdapterNotFoundError, StorageError
from groupwise.server.policies import AdapterInUseError, Policies
from groupwise.server.retention import Retention, needing
from groupwise.store.adapters import AdapterStore
from groupwise.store.files import Provenance
from groupwise.store.ledger import JobState, Ledger
from groupwise.types import PolicyVersion
from wording import raises

KEEP = 2


class Site:
    """A store with versions, and what could need them."""

    def __init__(self, base: Any, adapter: Path, engine: LocalEngine, root: Path):
        self.base, self.adapter, self.engine = base, adapter, engine
        self.store, self.ledger = AdapterStore(root / "adapters"), Ledger(root / "ledger.db")
        self.policies = Policies(self.store, engine, base=base, served_name="tiny")

    def publish(self, name: str, count: int = 1, *, job: str | None = "some job", unhealthy: str | None = None) -> None:
        info = Provenance(base_model="tiny", base_hash=self.base.hash, job=job, unhealthy=unhealthy)
        for _ in range(count):
            self.store.import_(self.adapter, name, info=info)

    def retention(self, *, keep: int | None = KEEP, grace_s: float = 0.0, every_s: float = 0.01) -> Retention:
        parts = {"store": self.store, "ledger": self.ledger, "policies": self.policies}
        return Retention(**parts, keep=keep, grace_s=grace_s, every_s=every_s)

    def submit(self, **config: Any) -> str:
        options = {"summary": {}, "payload": b"{}", "steps": 1, "auto_load": True}
        return self.ledger.submit(kind="grpo", adapter="math", config=config, **options)[0].id

    def left(self, name: str = "math") -> list[int]:
        return [version.number for version in self.store.versions(name)]


@pytest.fixture(scope="module")
def parts(make_base, make_adapter) -> Iterator[tuple[Any, Path, LocalEngine]]:
    base = make_base(dtype=torch.float32)
    engine = LocalEngine(base)
    yield base, make_adapter(base), engine
    engine.close()


@pytest.fixture
def site(parts: tuple[Any, Path, LocalEngine], tmp_path: Path) -> Iterator[Site]:
    site = Site(*parts, tmp_path)
    yield site
    site.policies.close()
    for version in site.policies.in_use:
        site.engine.unload(version)
    site.ledger.close()


def sweep(retention: Retention) -> list[str]:
    return sorted(map(str, asyncio.run(retention.sweep())))


def test_the_newest_versions_that_jobs_made_stay_of_each_adapter(site: Site) -> None:
    site.publish("math", 4)
    site.publish("code", 2)
    assert sweep(site.retention()) == ["math@1", "math@2"]
    assert (site.left("math"), site.left("code")) == ([3, 4], [1, 2])
    assert sweep(site.retention()) == []
    site.publish("math")
    assert site.left() == [3, 4, 5]  # numbers do not come back
    assert sweep(site.retention()) == ["math@3"]


def test_what_people_brought_stays_and_takes_nobodys_place(site: Site) -> None:
    site.publish("math", 2, job=None)
    site.publish("math", 3)
    site.publish("math", job=None)
    assert sweep(site.retention()) == ["math@3"]
    assert site.left() == [1, 2, 4, 5, 6]


def test_unhealthy_versions_do_not_push_out_those_that_are_well(site: Site) -> None:
    site.publish("math", 3)
    site.publish("math", 4, unhealthy="it fell apart")
    assert sweep(site.retention()) == ["math@1", "math@4", "math@5"]
    assert site.left() == [2, 3, 6, 7] and str(site.store.newest("math")) == "math@3"


def test_nothing_is_removed_where_all_is_to_be_kept(site: Site) -> None:
    site.publish("math", 5)
    asyncio.run(site.retention(keep=None).run())  # returns: there is nothing to do
    assert sweep(site.retention(keep=None)) == [] and len(site.left()) == 5


def test_the_active_version_and_the_one_before_it_stay(site: Site) -> None:
    site.publish("math", 6)

    async def test() -> None:
        for number in (1, 3, 2):
            await site.policies.swap(PolicyVersion("math", number))
        retention = site.retention()
        assert sorted(await retention.sweep()) == [PolicyVersion("math", 1), PolicyVersion("math", 4)]
        assert PolicyVersion("math", 1) not in site.policies.in_use  # nor does the engine hold it
        assert str(await site.policies.rollback()) == "math@3"
        await site.policies.swap(PolicyVersion("math", 6))
        await site.policies.swap(PolicyVersion("math", 5))
        assert sorted(await retention.sweep()) == [PolicyVersion("math", 2), PolicyVersion("math", 3)]

    asyncio.run(test())
    assert site.left() == [5, 6]


def test_what_answers_a_request_stays_until_it_has_ended(site: Site) -> None:
    site.publish("math", 4)

    async def test() -> None:
        retention = site.retention()
        async with AsyncExitStack() as request:
            await request.enter_async_context(site.policies.lease(adapter="math@1"))
            assert await retention.sweep() == [PolicyVersion("math", 2)]
        assert await retention.sweep() == [PolicyVersion("math", 1)]
        with pytest.raises(AdapterNotFoundError):
            async with site.policies.lease(adapter="math@1"):
                pass

    asyncio.run(test())


def test_what_jobs_begin_from_or_have_made_stays_until_they_have_ended(site: Site) -> None:
    site.publish("math", 6)
    retention = site.retention()
    waiting, made = site.submit(base_adapter="math@1"), site.submit(base_adapter="math")
    site.ledger.cancel(waiting)
    lease = site.ledger.lease("w")
    assert lease is not None and lease.job.id == made
    site.ledger.published(lease, "math@2")  # and waits to be swapped in
    waiting = site.submit(base_adapter="math@3")
    assert sweep(retention) == ["math@1", "math@4"]
    site.ledger.complete(made)
    assert sweep(retention) == ["math@2"]
    site.ledger.cancel(waiting)
    assert sweep(retention) == ["math@3"] and site.left() == [5, 6]


def test_a_job_that_has_not_ended_needs_what_it_begins_from(site: Site) -> None:
    """Named by number it is that version; by name, or by the job's own, any one of that name that is well."""
    site.publish("math", 2)
    site.publish("math", unhealthy="kl")
    one, two, bad = site.store.versions("math")

    def needed(*versions: PolicyVersion, **config: Any) -> bool:
        id = site.submit(**config)
        try:
            return needing(site.ledger.jobs(states=[JobState.QUEUED]), versions, site.store) is not None
        finally:
            site.ledger.cancel(id)

    assert needed(one, base_adapter="math@1") and not needed(two, bad, base_adapter="math@1")
    assert needed(bad, base_adapter="math@3")
    for config in ({"base_adapter": "math"}, {}):
        assert needed(one, two, bad, **config) and needed(one, two, **config)
        assert not needed(one, **config) and not needed(two, bad, **config)
    assert not needed(one, two, bad, base_adapter="base")
    assert not needed(one, base_adapter="a-job-ahead-makes-it")


def test_a_version_goes_only_when_it_was_free_for_a_while(site: Site) -> None:
    site.publish("math", 3)
    retention = site.retention(grace_s=0.2)

    async def test() -> None:
        assert await retention.sweep() == ()
        await asyncio.sleep(0.25)
        job = site.submit(base_adapter="math@1")  # just in time
        assert await retention.sweep() == ()
        site.ledger.cancel(job)
        assert await retention.sweep() == ()  # its time begins anew
        await asyncio.sleep(0.25)
        assert await retention.sweep() == [PolicyVersion("math", 1)]

    asyncio.run(test())


def test_what_is_needed_is_asked_again_when_a_swap_is_over(site: Site) -> None:
    """The sweep waits for a swap; a job that was posted meanwhile keeps its version."""
    site.publish("math", 3)
    retention = site.retention()

    async def test() -> None:
        await site.policies._changing.acquire()  # a swap that takes its time
        sweeping = asyncio.create_task(retention.sweep())
        await asyncio.sleep(0.05)
        job = site.submit(base_adapter="math@1")
        site.policies._changing.release()
        assert list(await sweeping) == []
        site.ledger.cancel(job)
        assert list(await retention.sweep()) == [PolicyVersion("math", 1)]

    asyncio.run(test())


def test_what_another_process_reads_stays_until_it_has_read_it(site: Site) -> None:
    site.publish("math", 4)
    retention = site.retention()
    with AdapterStore(site.store.root).held(PolicyVersion("math", 1)) as directory:  # as a job that begins
        assert sweep(retention) == ["math@2"]
        assert (directory / "groupwise.json").exists()
        with raises(AdapterInUseError):
            asyncio.run(site.policies.delete([PolicyVersion("math", 1)]))
    assert sweep(retention) == ["math@1"] and site.left() == [3, 4]


def test_it_goes_on_after_a_failure(site: Site, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    site.publish("math", 3)
    plain, failures = site.store.prune, [StorageError("the disk is full")]

    def prune(*arguments: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return plain(*arguments, **options)

    monkeypatch.setattr(site.store, "prune", prune)

    async def test() -> None:
        running = asyncio.create_task(site.retention().run())
        async with asyncio.timeout(20):
            while site.left() != [2, 3]:
                await asyncio.sleep(0.01)
        running.cancel()

    asyncio.run(test())
    assert "were not removed: the disk is full" in caplog.text


def test_a_damaged_version_does_not_stop_the_others(site: Site) -> None:
    site.publish("math", 4)
    (site.store.root / "math" / "v000003" / "groupwise.json").write_text("{")
    assert sweep(site.retention(keep=1)) == ["math@1", "math@2"]
    assert site.left() == [4]  # the third is in quarantine
