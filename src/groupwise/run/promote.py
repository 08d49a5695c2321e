"""`promote` of a run: which of its versions become the active one of its store, by the verdict that servers' gates use.

Each version that is evaluated is judged by that evaluation (`run.verdict`): against the base model, another version, or
the one promoted before, and against the best one promoted so far. One that passes becomes active, which is what the
run's name means from then on; one that does not is refused, and stays in the store with the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from typing import Any, cast

from groupwise.config.promote import PromoteConfig
from groupwise.model.load import LoadedModel
from groupwise.run.evaluate import Evaluation
from groupwise.run.policy import Policy
from groupwise.run.verdict import Measured, Verdict, divergence, judge, measured
from groupwise.sampler import Sampler, Scores
from groupwise.store.adapters import AdapterStore
from groupwise.store.locate import find_adapter
from groupwise.types import PolicyVersion

OWN = ("base", "active")  # of `against`: what needs no other adapter

Evaluate = Callable[[PolicyVersion], Awaitable[Mapping[str, Evaluation]]]


class Promotion:
    """Judges the versions of one run. `promoted` is the last one that passed.

    Args:
        evaluate: evaluates a version on the run's held-out prompts, as the run's own evaluations.
        temperature: at which mode sampled samples.
    """

    def __init__(
        self,
        config: PromoteConfig,
        policy: Policy,
        store: AdapterStore,
        engine: Sampler,
        evaluate: Evaluate,
        *,
        base: LoadedModel,
        temperature: float,
    ):
        self._config, self._policy, self._store, self._engine = config, policy, store, engine
        self._evaluate, self._base = evaluate, base
        self._temperature = temperature if config.mode == "sampled" else 1.0
        self.promoted: PolicyVersion | None = None
        self._start = self._against = PolicyVersion.base()
        self._old: Measured | None = None  # what `against` did
        self._best: tuple[str, Measured] | None = None

    def open(self) -> None:
        """Load the version that `against` names. Raises AdapterNotFoundError, AdapterError."""
        if self._config.against in OWN:
            return
        located = find_adapter(self._config.against)
        located.check_base(self._base.hash)
        self._against = PolicyVersion(f"against-{located.version.name}", located.version.number)
        with located.held():
            self._engine.load(self._against, located.directory)

    async def begin(self, start: PolicyVersion, evaluations: Mapping[str, Evaluation]) -> None:
        """Begin from what the run starts from, which was evaluated and is active until a version passes. Evaluates what
        versions are compared with, if that is another one."""
        self._start = start
        if not start.is_base:
            self._policy.activate(start)
        if self._config.against == "active":
            self._against = start
        found = evaluations if self._against == start else await self._evaluate(self._against)
        self._old = measured(found[self._config.mode])

    async def consider(self, version: PolicyVersion, evaluations: Mapping[str, Evaluation]) -> str | None:
        """Judge an evaluated version; what is said of it, None for what was judged before."""
        if version in (self._start, self.promoted) or self._store.refused(version) is not None:
            return None
        new, name = measured(evaluations[self._config.mode]), self._name()
        verdict = await self._verdict(version, new, evaluations[self._config.mode], name)
        if not verdict.passed:
            self._store.refuse(version, f"it was not promoted: {verdict.reason}")
            return f"{version} is not promoted: {verdict.reason}"
        self._policy.activate(version)
        self.promoted = version
        if self._config.against == "active":
            self._against, self._old = version, new
        if self._best is None or new.reward >= self._best[1].reward:
            self._best = str(version), new
        before = verdict.numbers["reward_active"]
        return f"{version} is promoted: its held-out reward is {new.reward:.3f}, that of {name} {before:.3f}"

    async def _verdict(self, version: PolicyVersion, new: Measured, said: Evaluation, name: str) -> Verdict:
        assert self._old is not None
        kl = None if self._config.max_kl is None else await asyncio.to_thread(self._kl, said, version)
        best = None if self._best is None or self._best[0] == str(self._against) else self._best
        return judge(new, self._old, kl=kl, bounds=self._config, best=best, key="promote", other=name)

    def _kl(self, said: Evaluation, version: PolicyVersion) -> float:
        with ExitStack() as stack:
            if self._config.against in OWN:
                stack.enter_context(self._policy.held(self._against))
            engine = cast(Scores, self._engine)  # the configuration asks it of the local one only
            return divergence(engine, said, version, self._against, temperature=self._temperature)

    def _name(self) -> str:
        """Return what versions are compared with, in words."""
        if self._config.against not in OWN:
            return self._config.against
        return "the base model" if self._against.is_base else str(self._against)

    def conclude(self) -> None:
        """End with the run: its name is not to mean a version that nobody judged."""
        for version in self._store.versions(self._policy.newest.name):
            if version not in (self.promoted, self._start) and self._store.refused(version) is None:
                self._store.refuse(version, "it was not promoted: it was not evaluated, or a later one was promoted")

    def state_dict(self) -> dict[str, Any]:
        """Return what is for `load_state_dict`; goes through JSON."""
        assert self._old is not None
        best = None if self._best is None else {"version": self._best[0], **self._best[1].as_dict()}
        promoted = None if self.promoted is None else str(self.promoted)
        versions = {"start": str(self._start), "against": str(self._against), "promoted": promoted}
        return {**versions, "old": self._old.as_dict(), "best": best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint was taken: versions that were promoted after it are not there any more."""
        self._start, self._against = PolicyVersion.parse(state["start"]), PolicyVersion.parse(state["against"])
        self._old = Measured.from_dict(state["old"])
        best = state["best"]
        self._best = None if best is None else (best["version"], Measured.from_dict(best))
        self.promoted = None if state["promoted"] is None else PolicyVersion.parse(state["promoted"])
        if self.promoted is not None:
            self._policy.activate(self.promoted)
