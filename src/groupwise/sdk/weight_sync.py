"""Weight sync from the trainer to the engine, saving of states, and resuming from them.

    weight_sync_interval   1   sample, train, sync, repeat: on-policy (the default)
                           N   N steps are sampled by one version, sync at the end of the window
                           0   never: everything is sampled by what the engine has served from the start (for ablations)
    dcp_save_interval      N   a state every N steps; 0 (the default) saves none, and a loop that ends cannot be resumed

A sync is a version: published into the deployment's store, loaded, served (`swap`). A state is the trainer's
(`state`), the version that samples, and what the loop gives to get back. Both run in the trainer's order, after the
optimizer step that was called before.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from groupwise.errors import ConfigError, StorageError
from groupwise.run.policy import Policy
from groupwise.sdk import state
from groupwise.sdk.config import WeightSyncConfig
from groupwise.sdk.deployment import Deployment
from groupwise.sdk.pending import Pending
from groupwise.sdk.trainer import TrainingClient
from groupwise.store import files
from groupwise.types import PolicyVersion

STATES = "states"
KEEP = 3  # versions in the store, and states
_STEP = re.compile(r"step-([0-9]{6,})")


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Result of `resume`: the step after which the state was saved, and the loop's own `extra`."""

    step: int
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Synced:
    """Result of `after_step`: the version that samples now, and the directory of the state, if one was saved."""

    version: PolicyVersion
    state: Path | None = None


class WeightSyncer:
    """Syncs and saves one policy. `log_path`/states/step-000010 are the states, of which the newest few stay.

    `rewinds`: the store is this run's alone, so that a run that continues publishes the numbers that were lost again.
    """

    def __init__(
        self,
        policy: TrainingClient,
        deployment: Deployment | None,
        config: WeightSyncConfig,
        *,
        log_path: str | Path,
        rewinds: bool,
    ):
        self.policy, self.deployment, self.config = policy, deployment, config
        self.states = Path(log_path) / STATES
        self._rewinds = rewinds
        self._versions = None if deployment is None else self._policy(deployment)
        self._loads = policy.loads
        if policy.learner.lora is None and deployment is not None and config.weight_sync_interval != 1:
            raise ConfigError(
                f"weight_sync_interval is {config.weight_sync_interval}, and all parameters are trained: the engine "
                "samples from the very weights that change",
                hint="set weight_sync_interval 1, or train an adapter (lora_rank)",
            )

    def sync(self) -> Pending[PolicyVersion]:
        """Publish the policy as it is and sample from it from now on. Does nothing without a deployment.

        Raises AdapterError, StorageError; what was served before still is.
        """
        return self.policy.service.submit(self._sync)

    def after_step(self, step: int, *, extra: Mapping[str, Any] | None = None) -> Pending[Synced]:
        """Sync and save as the intervals say after optimizer step `step` (counted from 1); `extra` as in `save`."""
        _check_step(step)
        kept = state.copied(extra)
        return self.policy.service.submit(lambda: self._after_step(step, kept))

    def save(self, step: int, *, extra: Mapping[str, Any] | None = None) -> Pending[Path]:
        """Save a state after `step`; `extra` (JSON) is returned by `resume`. Raises ConfigError, at once, for a step or
        an extra that cannot be kept."""
        _check_step(step)
        kept = state.copied(extra)
        return self.policy.service.submit(lambda: self._save(step, kept))

    def resume(self) -> Resumed | None:
        """Restore trainer, optimizer and sampling version from the newest state. Returns None if there is
        none; `weight_sync_before_training` then serves the fresh policy.

        Raises:
            StorageError, ConfigError, AdapterError, AdapterNotFoundError: it cannot be loaded, or its version is gone.
        """
        return self.policy.service.submit(self._resume).result()

    # -- in the trainer's thread ---------------------------------------------------------------------------------------

    def _policy(self, deployment: Deployment) -> Policy:
        return Policy(
            self.policy.learner,
            deployment.store,
            deployment,
            name=self.policy.name,
            base=deployment.base,
            keep=KEEP,
            config_hash="",
        )

    def _sync(self) -> PolicyVersion:
        if self._versions is None or self.deployment is None:
            return PolicyVersion.base()
        if self._loads != self.policy.loads:  # after as many steps, and yet another policy
            self._loads, self._versions.step = self.policy.loads, -1
        version = self._versions.publish(step=self.policy.learner.steps, metrics={}, sync=True)
        self.deployment.serve(version)
        return version

    def _after_step(self, step: int, extra: dict[str, Any]) -> Synced:
        interval, saves = self.config.weight_sync_interval, self.config.dcp_save_interval
        if interval and step % interval == 0:
            self._sync()
        saved = self._save(step, extra) if saves and step % saves == 0 else None
        return Synced(version=self._serving, state=saved)

    @property
    def _serving(self) -> PolicyVersion:
        return PolicyVersion.base() if self.deployment is None else self.deployment.serving

    def _save(self, step: int, extra: dict[str, Any]) -> Path:
        directory = self.states / f"step-{step:06d}"
        turns = [turn for turn, _ in map(_order, self._states()) if turn < math.inf]
        facts = {"step": step, "turn": max(turns, default=0) + 1, "serving": str(self._serving), "loop": extra}
        if self._versions is not None:
            facts["published"] = [str(self._versions.newest), self._versions.step]
        self.policy.save_now(directory, facts)
        if self._versions is not None:  # those of the state before are needed until here
            self._versions.protected = {self._serving, self._versions.newest}
        for old in self._saved()[:-KEEP]:
            state.remove(old)
        return directory

    def _saved(self) -> list[Path]:
        """Return the states in the order in which they were saved: a loop that began again, or went back, saves under
        lower steps than there are."""
        return sorted(self._states(), key=_order)

    def _states(self) -> list[Path]:
        there = {*self.states.glob("step-*"), *files.set_aside(self.states, "step-*")}
        return [path for path in there if _STEP.fullmatch(path.name)]

    def _resume(self) -> Resumed | None:
        if not (saved := self._saved()):
            if self.config.weight_sync_before_training:
                self._sync()
            return None
        facts = self.policy.load_now(saved[-1])
        self._loads = self.policy.loads
        if self.deployment is not None and "published" in facts:
            self._serve_again(self.deployment, facts)
        return Resumed(step=facts["step"], extra=facts["loop"])

    def _serve_again(self, deployment: Deployment, facts: Mapping[str, Any]) -> None:
        """Serve again the versions of a state, and none of those that came after it."""
        newest, step = PolicyVersion.parse(facts["published"][0]), facts["published"][1]
        serving = PolicyVersion.parse(facts["serving"])
        gone = self._versions
        deployment.serve(PolicyVersion.base())
        if gone is not None:
            deployment.unload(gone.newest)
        if self._rewinds and self.policy.learner.lora is not None:
            deployment.store.rewind(self.policy.name, newest.number)
        self._versions = self._policy(deployment)
        self._versions.resume(newest=newest, sampling=serving, step=step)
        self._versions.protected = {newest, serving}
        deployment.serve(serving)


def _check_step(step: object) -> None:
    if type(step) is not int or step < 0:
        raise ConfigError(
            f"step is {step!r}; it must be a whole number, 0 or more", hint="count optimizer steps from 1"
        )


def _order(saved: Path) -> tuple[float, int]:
    """Return the turn in which a state was saved, and its step. One that is damaged comes last, so that who resumes
    hears of it; one from before turns were kept comes first."""
    try:
        turn = state.extra_of(saved).get("turn", 0)
    except StorageError:
        turn = math.inf
    return turn, int(saved.name.removeprefix("step-"))
