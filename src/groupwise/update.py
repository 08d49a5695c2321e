"""One step's groups -> one update of the policy: advantages, the KL's weight, the learning rate, the optimizer steps.

    rewards -> advantages (- beta (K - mean K), with the KL in the reward) -> samples -> policy loss -> AdamW

Groups may come in parts (`rollout.stream_groups`): each is run forward and backward while the next is sampled, and the
gradient is the one of the whole step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from groupwise.algo.advantage import with_advantages
from groupwise.algo.kl import AdaptiveKL, kl_metrics, sequence_kl, with_kl_penalty
from groupwise.algo.metrics import Metrics, rollout_metrics, sample_metrics, time_metrics
from groupwise.algo.samples import samples_of
from groupwise.assemble import Plan
from groupwise.batches import Batches
from groupwise.config.loss import LossSpec
from groupwise.rewards.base import Scorer
from groupwise.rollout import Collected
from groupwise.train.learner import Learner, StreamedStep
from groupwise.train.schedule import learning_rate_at
from groupwise.types import RolloutGroup, Sample

T = TypeVar("T")


def learner_thread(threads: int) -> ThreadPoolExecutor:
    """The one thread that all training runs in, with `threads` of torch: by itself it would have as many as whoever set
    them last."""
    return ThreadPoolExecutor(1, "learner", initializer=torch.set_num_threads, initargs=(threads,))


class Update:
    """Trains on the groups of one step after another. `changed` is the last step that changed the policy; 0 is none."""

    def __init__(self, plan: Plan, learner: Learner, scorer: Scorer):
        self._plan, self._learner, self._scorer, self.changed = plan, learner, scorer, 0
        algo, coeff = plan.config.algo, plan.kl_coeff or plan.loss.kl_coeff
        self._kl = None
        if algo.kl_target is not None and coeff is not None:
            self._kl = AdaptiveKL(coeff=coeff, target=algo.kl_target, horizon=algo.kl_horizon)
        self._thread = learner_thread(learner.threads)

    async def __call__(
        self, batches: Batches, *, step: int, on_phase: Callable[[str], None]
    ) -> tuple[list[RolloutGroup], Metrics]:
        """Train on the groups of `step`; returns them with their advantages, and the step's metrics."""
        seconds, mark = {"rollout": 0.0, "train": 0.0}, time.monotonic()
        parts: list[_Part] = []
        stream = self._begin() if (size := self._plan.config.rollout.stream_groups) else None

        self._scorer.begin_step(step)
        on_phase("sampling")
        async for groups in batches.step(chunk=size):
            seconds["rollout"] += (now := time.monotonic()) - mark
            on_phase("training")
            beside = self._left_out(groups, batches.collected) if stream is None else ()
            parts.append(await self._in_thread(lambda groups=groups, beside=beside: self._prepare(groups, beside)))
            if stream is not None:
                await self._in_thread(lambda: stream.accumulate(parts[-1].samples))
            on_phase("sampling")
            seconds["train"] += (mark := time.monotonic()) - now
        seconds["rollout"] += (now := time.monotonic()) - mark

        groups = [group for part in parts for group in part.groups]
        samples = [sample for part in parts for sample in part.samples]
        metrics = sample_metrics(samples)
        if any(any(sample.mask) for sample in samples):
            on_phase("training")
            metrics |= await self._in_thread(lambda: self._train(samples, parts, stream, step))
            self.changed = step
        batches.trained(groups)
        seconds["train"] += time.monotonic() - now
        metrics |= self._rollout_metrics(batches.collected, groups) | self._scorer.log.metrics() | batches.metrics()
        return groups, metrics | time_metrics(metrics, seconds)

    def state_dict(self) -> dict[str, Any]:
        """Everything, for `load_state_dict`; goes through JSON."""
        return {"changed": self.changed, "kl": None if self._kl is None else self._kl.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.changed = state["changed"]
        if self._kl is not None:
            self._kl.load_state_dict(state["kl"])

    # -- in the learner's thread ---------------------------------------------------------------------------------------

    @staticmethod
    def _left_out(groups: Sequence[RolloutGroup], collected: Collected) -> list[RolloutGroup]:
        """Groups that were sampled for the step and are not trained; they count in statistics of the whole batch."""
        trained = set(map(id, groups))
        return [group for group in collected.sampled if id(group) not in trained]

    def _prepare(self, groups: Sequence[RolloutGroup], beside: Sequence[RolloutGroup]) -> _Part:
        """Groups -> the same with advantages, and what the learner gets of them."""
        plan, algo = self._plan, self._plan.config.algo
        weighed = with_advantages(groups, plan.advantage, weights=plan.reward_weights, beside=beside)
        samples = samples_of(weighed)
        if plan.kl_coeff is None or not samples:
            return _Part(groups=weighed, samples=samples_of(weighed, mask_truncated=algo.mask_truncated))
        reference = self._learner.forward(samples, temperature=self._temperature, reference=True)
        kls = [sequence_kl(sample, row) for sample, row in zip(samples, reference, strict=True)]
        coeff = plan.kl_coeff if self._kl is None else self._kl.coeff
        weighed = with_kl_penalty(weighed, kls, plan.advantage, coeff=coeff)
        samples = samples_of(weighed, mask_truncated=algo.mask_truncated)
        return _Part(groups=weighed, samples=samples, kl=kl_metrics(samples, reference))

    def _train(
        self, samples: Sequence[Sample], parts: Sequence[_Part], stream: StreamedStep | None, step: int
    ) -> Metrics:
        """The optimizer steps, and the divergence from the reference, which the policy is weighed by next time."""
        train = self._plan.config.train
        rate = learning_rate_at(
            step - 1,
            peak=train.learning_rate,
            steps=train.steps,
            schedule=train.schedule,
            warmup_steps=train.warmup_steps,
            decay_steps=train.decay_steps,
            final_rate=train.final_rate,
        )
        kl = combined_kl([part.kl for part in parts])
        if not kl and not self._plan.loss.reads_reference:
            kl = self._learner.measure_kl(samples, temperature=self._temperature)
        if stream is not None:
            metrics = stream.finish(learning_rate=rate)
        else:
            metrics = self._learner.step(
                samples,
                self._loss,
                learning_rate=rate,
                minibatches=train.minibatches,
                passes=train.passes,
                temperature=self._temperature,
            )
        metrics |= kl | {"optim/lr": rate}
        if self._kl is not None:
            metrics["kl/coeff"] = self._kl.coeff
            self._kl.update(metrics["kl/mean"])
        return metrics

    def _begin(self) -> StreamedStep:
        return self._learner.begin_step(self._loss, temperature=self._temperature)

    @property
    def _loss(self) -> LossSpec:
        """The loss, with the KL's weight as it is now."""
        if self._kl is None or self._plan.kl_coeff is not None:
            return self._plan.loss
        return replace(self._plan.loss, kl_coeff=self._kl.coeff)

    @property
    def _temperature(self) -> float:
        return self._plan.config.rollout.temperature

    def _rollout_metrics(self, collected: Collected, trained: Sequence[RolloutGroup]) -> Metrics:
        return rollout_metrics(
            collected.sampled,
            trained=trained,
            advantage=self._plan.advantage,
            weights=self._plan.reward_weights,
            batch_groups=self._plan.config.rollout.prompts_per_step,
            staleness=collected.ages,
            replayed=collected.replayed,
            rerolled=collected.rerolled,
            too_long=collected.too_long,
        )

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Some of a step's groups, with advantages."""

    groups: list[RolloutGroup]
    samples: list[Sample]
    kl: Metrics = field(default_factory=dict)


def combined_kl(parts: Sequence[Metrics]) -> Metrics:
    """`kl_metrics` of several parts as that of all of their tokens."""
    measured = [part for part in parts if part]
    if not measured:
        return {}
    tokens = sum(part["kl/tokens"] for part in measured)
    mean = sum(part["kl/mean"] * part["kl/tokens"] for part in measured) / tokens
    return {"kl/mean": mean, "kl/max": max(part["kl/max"] for part in measured), "kl/tokens": tokens}
