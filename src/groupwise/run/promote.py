"""`promote` of a run: which of its versions become the active one of its store, by the verdict that servers' gates use.

Each version that is evaluated is judged by that evaluation (`run.verdict`): against the base model, another version, or
the one promoted before, and against the best one promoted so far. One that passes becomes active, which is what the
run's name means from then on; one that does not is refused, and stays in the store with the reason.

All looks share one error: each has an equal part of what is left, which the evaluations that are still to come share
with it, so that one more (an interrupt's) leaves the last one its part. A version that was promoted was chosen by its
draws, which were perhaps lucky ones; so that they are not what later versions are measured by for ever, both are
evaluated with other seeds where such a version is what one is compared with (in mode sampled).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Protocol, cast

from groupwise.config.promote import PromoteConfig
from groupwise.model.load import LoadedModel
from groupwise.run.evaluate import Evaluation
from groupwise.run.policy import Policy
from groupwise.run.verdict import Beside, Look, Measured, Start, Verdict, divergence, judge, measured, too_few
from groupwise.sampler import Sampler, Scores
from groupwise.store.adapters import AdapterStore
from groupwise.store.locate import find_adapter
from groupwise.types import PolicyVersion

OWN = ("base", "active")  # of `against`: what needs no other adapter
NOTHING = 1e-12  # what rounding may leave of an error that is used up


class Evaluate(Protocol):
    """Evaluates a version, which is in the engine, on the run's held-out prompts, as the run's own evaluations; with
    another `draw` than 0 by other seeds."""

    async def __call__(self, version: PolicyVersion, *, draw: int = 0) -> Mapping[str, Evaluation]: ...


class Promotion:
    """Judges the versions of one run. `promoted` is the last one that passed.

    Args:
        temperature: the temperature of mode sampled.
        prompts: the number of evaluated prompts.
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
        prompts: int,
    ):
        self._config, self._policy, self._store, self._engine = config, policy, store, engine
        self._evaluate, self._base = evaluate, base
        self._temperature = temperature if config.mode == "sampled" else 1.0
        self.promoted: PolicyVersion | None = None
        self._start = self._against = PolicyVersion.base()
        self._prompts, self._looked, self._spent = prompts, 0, 0.0
        self._old: Measured | None = None  # what `against` did
        self._start_length = 0.0
        self._best: PolicyVersion | None = None

    def warning(self, looks: int) -> str | None:
        """Return why none of the next `looks` versions can pass (the error was used up before the run was given more
        steps), or none that is not clearly better (the prompts are too few); None if one can."""
        if not looks:
            return None
        if self._left <= NOTHING:
            return (
                f"the {self._looked} versions that were judged before have used up the chance of an error that a run "
                "may take (1 - promote.confidence), so that none of those that follow is promoted; begin a run from "
                "this one's adapter (adapters.start), which has a chance of its own"
            )
        return too_few(self._prompts, self._config, self._look(looks - 1), key="promote")

    @property
    def _left(self) -> float:
        """Return what is left of the error."""
        return 1 - self._config.confidence - self._spent

    def _look(self, later: int) -> Look:
        """Return the next look, which `later` evaluations follow: an equal part of the error that is left."""
        return Look(number=self._looked + 1, alpha=self._left / (1 + max(0, later)))

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
        self._start_length = measured(evaluations[self._config.mode]).length
        found = evaluations if self._against == start else await self._evaluate(self._against)
        self._old = measured(found[self._config.mode])

    async def consider(
        self, version: PolicyVersion, evaluations: Mapping[str, Evaluation], *, later: int
    ) -> str | None:
        """Judge an evaluated version, which `later` evaluations follow; what is said of it, None for what was judged
        before."""
        if version in (self._start, self.promoted) or self._store.refused(version) is not None:
            return None
        verdict = await self._verdict(version, evaluations[self._config.mode], later=later)
        if not verdict.passed:
            self._store.refuse(version, f"it was not promoted: {verdict.reason}")
            return f"{version} is not promoted: {verdict.reason}"
        name, numbers = self._name(), verdict.numbers
        self._policy.activate(version)
        self.promoted = version
        if self._best is None or numbers["reward"] >= numbers.get("reward_best", numbers["reward_active"]):
            self._best = version
        if self._config.against == "active":
            self._against, self._old = version, measured(evaluations[self._config.mode])
        before = numbers["reward_active"]
        return f"{version} is promoted: its held-out reward is {numbers['reward']:.3f}, that of {name} {before:.3f}"

    async def _verdict(self, version: PolicyVersion, said: Evaluation, *, later: int) -> Verdict:
        assert self._old is not None
        look, config = self._look(later), self._config
        self._looked, self._spent = self._looked + 1, self._spent + look.alpha
        new, old, best = measured(said), self._old, None
        if self._best is not None:  # one was promoted, by its draws
            again = await self._drawn(version)
            if config.against == "active":
                new, old = again, await self._yardstick(self._against)
            if self._best != self._against:
                best = Beside(name=str(self._best), new=again, old=await self._yardstick(self._best))
        kl = None if config.max_kl is None else await asyncio.to_thread(self._kl, said, version, self._against)
        total = None if config.max_kl_total is None else await asyncio.to_thread(self._kl, said, version, self._start)
        begun = "the base model" if self._start.is_base else str(self._start)
        start = Start(name=f"{begun}, from which the run started,", length=self._start_length, kl=total)
        words = {"key": "promote", "other": self._name()}
        return judge(new, old, kl=kl, bounds=config, look=look, best=best, start=start, **words)

    async def _yardstick(self, version: PolicyVersion) -> Measured:
        """Return what a version that was promoted does, by draws that did not choose it."""
        with self._policy.held(version):
            return await self._drawn(version)

    async def _drawn(self, version: PolicyVersion) -> Measured:
        """Return what a version does by the draws of this look; greedily nothing is drawn."""
        draw = self._looked if self._config.mode == "sampled" else 0
        return measured((await self._evaluate(version, draw=draw))[self._config.mode])

    def _kl(self, said: Evaluation, version: PolicyVersion, other: PolicyVersion) -> float:
        with ExitStack() as stack:
            if self._config.against in OWN or other == self._start:
                stack.enter_context(self._policy.held(other))
            engine = cast(Scores, self._engine)  # the configuration asks it of the local one only
            return divergence(engine, said, version, other, temperature=self._temperature)

    def _name(self) -> str:
        """Return what versions are compared with, in words."""
        if self._config.against not in OWN:
            return self._config.against
        return "the base model" if self._against.is_base else str(self._against)

    def conclude(self) -> None:
        """Refuse the versions that were not judged or not promoted when the run ends, so that the adapter's name does
        not mean one of them."""
        for version in self._store.versions(self._policy.newest.name):
            if version not in (self.promoted, self._start) and self._store.refused(version) is None:
                self._store.refuse(version, "it was not promoted: it was not evaluated, or a later one was promoted")

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`; fit for JSON."""
        assert self._old is not None
        versions = {"start": self._start, "against": self._against, "promoted": self.promoted, "best": self._best}
        return {
            **{name: None if version is None else str(version) for name, version in versions.items()},
            "old": self._old.as_dict(),
            "start_length": self._start_length,
            "looked": self._looked,
            "spent": self._spent,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint: versions that were promoted after it no longer exist."""
        self._start, self._against = PolicyVersion.parse(state["start"]), PolicyVersion.parse(state["against"])
        self._old, self._start_length = Measured.from_dict(state["old"]), state["start_length"]
        self._looked, self._spent = state["looked"], state["spent"]
        self.promoted, self._best = (
            None if state[name] is None else PolicyVersion.parse(state[name]) for name in ("promoted", "best")
        )
        if self.promoted is not None:
            self._policy.activate(self.promoted)
