"""A trained adapter becomes the policy that samples: in this order, and not at all if anything fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from groupwise.algo.loss import resolve_loss
from groupwise.engine.local import LocalEngine
from groupwise.errors import AdapterError, AdapterNotFoundError, StorageError
from groupwise.model.load import LoadedModel
from groupwise.run.policy import Policy
from groupwise.store.adapters import AdapterStore
from groupwise.train.learner import Learner
from groupwise.types import PolicyVersion, Sample, SamplingParams, SamplingRequest

FIRST, SECOND = PolicyVersion("math", 1), PolicyVersion("math", 2)


class Run:
    """A learner, a store and an engine over one base, and what a loop would do with them."""

    def __init__(self, base: LoadedModel, root: Path, samples: list[Sample], **options):
        self.base, self.samples = base, samples
        self.learner, self.store, self.engine = Learner(base, **options), AdapterStore(root), LocalEngine(base)
        self.policy = Policy(
            self.learner, self.store, self.engine, name="math", base=base, keep=1, config_hash="c" * 16
        )

    def step(self, number: int, *, protect=(), sync: bool = True) -> PolicyVersion:
        self.learner.step(self.samples, resolve_loss("reinforce"), learning_rate=0.05)
        self.policy.protected |= set(protect)
        return self.policy.publish(step=number, metrics={}, sync=sync)

    def sample(self, version: PolicyVersion):
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        (group,) = self.engine.generate([SamplingRequest(prompt_ids=(1, 2, 3), params=params, version=version)])
        return group[0]

    def trainer_logprobs(self, completion) -> tuple[float, ...]:
        ids = completion.token_ids
        return self.learner.forward([Sample(prompt_ids=(1, 2, 3), completion_ids=ids, mask=(1,) * len(ids))])[0]


@pytest.fixture
def run(make_base, make_samples, tmp_path: Path) -> Iterator[Run]:
    run = Run(make_base(dtype=torch.float32), tmp_path / "adapters", make_samples(((4, (5, 6)),)))
    yield run
    run.engine.close()


def test_the_next_tokens_are_the_new_versions(run: Run):
    before = run.sample(PolicyVersion.base())
    for number in (1, 2):
        version = run.step(number)
        assert version == PolicyVersion("math", number) == run.store.active
        completion = run.sample(version)
        assert completion.version == version
        assert completion.logprobs == pytest.approx(run.trainer_logprobs(completion), abs=1e-4)
        assert completion.logprobs != pytest.approx(before.logprobs, abs=1e-3)
    assert run.sample(PolicyVersion.base()) == before


def test_the_old_version_is_let_go(run: Run):
    """By the engine at once, by the disk as `keep` and `protect` say; rollback's version stays too."""
    for number in range(1, 5):
        run.step(number, protect={FIRST})
    with pytest.raises(AdapterNotFoundError):
        run.sample(PolicyVersion("math", 3))
    assert run.store.versions("math") == tuple(PolicyVersion("math", n) for n in (1, 3, 4))
    assert run.store.info(run.policy.newest).parent == PolicyVersion("math", 3)


def test_the_order(run: Run, monkeypatch: pytest.MonkeyPatch):
    """On disk before it is loaded, loaded before it is active, active before its parent is forgotten."""
    run.step(1)
    seen: list[str] = []

    def record(owner, name: str):
        original = getattr(owner, name)

        def wrapped(*args, **options):
            seen.append(f"{name}: on disk {len(run.store.versions('math'))}, active {run.store.active}")
            return original(*args, **options)

        monkeypatch.setattr(owner, name, wrapped)

    for owner, name in ((run.engine, "load"), (run.store, "activate"), (run.engine, "unload"), (run.store, "prune")):
        record(owner, name)
    run.step(2)
    assert seen == [
        "load: on disk 2, active math@1",
        "activate: on disk 2, active math@1",
        "unload: on disk 2, active math@2",
        "prune: on disk 2, active math@2",
    ]


def test_a_version_that_cannot_be_published(run: Run):
    """Weights that are not finite are no adapter: the policy is the one it was."""
    run.step(1)
    before = run.sample(FIRST)
    run.learner.parameters[0].data.fill_(float("nan"))
    with pytest.raises(AdapterError):
        run.policy.publish(step=2, metrics={}, sync=True)
    assert run.store.active == FIRST and run.store.versions("math") == (FIRST,)
    assert run.sample(FIRST) == before


@pytest.mark.parametrize("place", ["write", "load"])
def test_a_failure_half_way(run: Run, monkeypatch: pytest.MonkeyPatch, place: str):
    run.step(1)
    before = run.sample(FIRST)

    def fails(*args, **options):
        raise StorageError("disk full") if place == "write" else AdapterError("out of memory")

    monkeypatch.setattr(
        run.learner if place == "write" else run.engine, "save_adapter" if place == "write" else "load", fails
    )
    with pytest.raises((StorageError, AdapterError)):
        run.step(2)
    assert run.store.active == FIRST and run.sample(FIRST) == before
    monkeypatch.undo()
    version = run.step(3)
    assert version.number > 1 and run.store.active == version == run.policy.sampling


def test_full_parameters_only_change_their_name(make_base, make_samples, tmp_path: Path):
    run = Run(make_base(dtype=torch.float32), tmp_path, make_samples(((4, (5, 6)),)), lora=None)
    try:
        before = run.sample(PolicyVersion.base())
        for number in (1, 2):
            version = run.step(number)
            assert version == PolicyVersion("math", number)
            completion = run.sample(version)
            assert completion.logprobs == pytest.approx(run.trainer_logprobs(completion), abs=1e-4)
        assert completion.logprobs != pytest.approx(before.logprobs, abs=1e-3)
        assert run.store.versions("math") == ()
        with pytest.raises(AdapterNotFoundError):
            run.sample(FIRST)
    finally:
        run.engine.close()


def test_what_samples_stays_until_the_sync(run: Run):
    """Versions that are published in between are active on disk; the engine keeps the two it needs."""
    run.step(1)
    before = run.sample(FIRST)
    for number in (2, 3):
        run.step(number, sync=False)
    third = PolicyVersion("math", 3)
    assert (run.policy.sampling, run.policy.newest, run.store.active) == (FIRST, third, third)
    assert run.sample(FIRST) == before and run.sample(third).version == third
    with pytest.raises(AdapterNotFoundError):
        run.sample(SECOND)
    assert run.policy.publish(step=3, metrics={}, sync=True) == third == run.policy.sampling
    with pytest.raises(AdapterNotFoundError):
        run.sample(FIRST)


def test_going_on_and_beginning_from_an_adapter(run: Run, make_base, make_samples, tmp_path: Path):
    run.step(1)
    run.step(2, sync=False)
    second = Run(run.base, tmp_path / "adapters", run.samples)
    third = Run(run.base, tmp_path / "other", run.samples)
    try:
        second.policy.resume(newest=SECOND, sampling=FIRST, step=2)
        assert second.sample(FIRST) == run.sample(FIRST) and second.sample(SECOND) == run.sample(SECOND)
        third.policy.begin(run.store.path(SECOND))
        assert third.policy.sampling == FIRST and third.sample(FIRST).token_ids == run.sample(SECOND).token_ids
        assert third.sample(FIRST).logprobs == pytest.approx(run.sample(SECOND).logprobs, abs=1e-6)
    finally:
        second.engine.close()
        third.engine.close()


def test_in_flight_what_was_asked_of_the_old_version_is_the_new_ones(run: Run):
    """A version that groups under way name stays loaded while there are any, and what stands for it goes with it."""
    names: set[PolicyVersion] = {PolicyVersion.base()}
    options = {"in_flight": "keep", "in_use": lambda: names}
    run.policy = Policy(
        run.learner, run.store, run.engine, name="math", base=run.base, keep=1, config_hash="c" * 16, **options
    )
    run.step(1)
    assert run.sample(PolicyVersion.base()) == run.sample(FIRST) and run.sample(FIRST).version == FIRST
    names.add(FIRST)
    run.step(2)
    assert {run.sample(version).version for version in (PolicyVersion.base(), FIRST, SECOND)} == {SECOND}
    names.clear()
    run.step(3)
    assert run.sample(PolicyVersion.base()).version == PolicyVersion.base()
    with pytest.raises(AdapterNotFoundError):
        run.sample(FIRST)
