"""Makes one update of the policy from one step's groups: advantages, the KL's weight, the learning rate, optimizer
steps.

    rewards -> advantages (- beta (K - mean K), with the KL in the reward) -> samples (+ a teacher's log-probabilities)
    -> policy loss -> AdamW

Of a dataset's answers the loss is cross-entropy, of its preference pairs DPO's (`algo.preference`).

Groups may come in parts (`rollout.stream_groups`): each is run forward and backward while the next is sampled, and the
gradient is the one of the whole step. `run/loop.py` calls this; sampling, scoring and publishing are not here.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from groupwise.algo.algorithm import with_token_weights
from groupwise.algo.credit import with_advantages
from groupwise.algo.distillation import (
    demonstration_metrics,
    demonstrations,
    teacher_scores,
    with_reward_weight,
    with_teacher,
)
from groupwise.algo.distillation_metrics import teacher_metrics
from groupwise.algo.kl import AdaptiveKL, kl_metrics, sequence_kl, with_kl_penalty
from groupwise.algo.metrics import Metrics, sample_metrics
from groupwise.algo.preference import pairs_of
from groupwise.algo.samples import samples_of
from groupwise.config.loss import LossSpec
from groupwise.run.plan import RunPlan
from groupwise.train.learner import Learner
from groupwise.train.preference_step import train_on_pairs
from groupwise.train.schedule import learning_rate_at
from groupwise.types import RolloutGroup, Sample

T = TypeVar("T")


def learner_thread(threads: int) -> ThreadPoolExecutor:
    """Return the one thread in which all training runs, with `threads` of torch. Without this setting it would have the
    number that was last set in the process."""
    return ThreadPoolExecutor(1, "learner", initializer=torch.set_num_threads, initargs=(threads,))


class PolicyUpdates:
    """Makes the update of one step after another; what is said of a single step is `StepUpdate`.

    Attributes:
        changed: the last step that changed the policy; 0 is none.
    """

    def __init__(self, plan: RunPlan, learner: Learner):
        self.plan, self.learner, self.changed = plan, learner, 0
        algo, coeff = plan.config.algo, plan.kl_coeff or plan.loss.kl_coeff
        self.adaptive_kl: AdaptiveKL | None = None
        if algo.kl_target is not None and coeff is not None:
            self.adaptive_kl = AdaptiveKL(coeff=coeff, target=algo.kl_target, horizon=algo.kl_horizon)
        self._thread = learner_thread(learner.threads)

    def begin(self, step: int) -> StepUpdate:
        """Return the update of this step, from 1."""
        return StepUpdate(self, step)

    async def in_learner_thread(self, work: Callable[[], T]) -> T:
        """Run `work` in the learner's thread and return its result; everything that uses the learner runs there."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def state_dict(self) -> dict[str, Any]:
        """Return everything for `load_state_dict`; fit for JSON."""
        return {"changed": self.changed, "kl": None if self.adaptive_kl is None else self.adaptive_kl.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the values of `state_dict`."""
        self.changed = state["changed"]
        if self.adaptive_kl is not None:
            self.adaptive_kl.load_state_dict(state["kl"])


class StepUpdate:
    """Makes one update of the policy from one step's groups. `PolicyUpdates.begin` makes an instance; use it as

        groups = await update.advantages(groups, sampled=...)    as often as groups come
        await update.accumulate()                                after each, with rollout.stream_groups
        metrics = await update.train()                           once

    Attributes:
        groups: the groups given to `advantages`, with their advantages.
    """

    def __init__(self, updates: PolicyUpdates, step: int):
        self._updates, self._plan, self._learner, self._step = updates, updates.plan, updates.learner, step
        self._parts: list[_Part] = []
        streams = self._plan.config.rollout.stream_groups > 0
        self._stream = self._learner.begin_step(temperature=self._temperature) if streams else None

    @property
    def groups(self) -> list[RolloutGroup]:
        return [group for part in self._parts for group in part.groups]

    @property
    def samples(self) -> list[Sample]:
        """Return the learner's samples: one for each segment of each rollout that has an advantage."""
        return [sample for part in self._parts for sample in part.samples]

    @property
    def shown(self) -> list[Sample]:
        """Return the groups' demonstrations: a teacher's completions, a dataset's answers, or its pairs in twos."""
        return [sample for part in self._parts for sample in part.shown]

    @property
    def trains(self) -> bool:
        """Return whether there is a token to train on."""
        return any(any(sample.mask) for sample in self.samples) or bool(self.shown)

    async def advantages(
        self, groups: Sequence[RolloutGroup], *, sampled: Sequence[RolloutGroup]
    ) -> list[RolloutGroup]:
        """Return the scored groups with the advantage of each rollout, less the KL where that is in the reward.

        `sampled` are all groups that were sampled for the step, also those that are not trained: they count in
        statistics of the batch (`batch_std`). A streamed step has none: its batch is not known yet.
        """
        trained = set(map(id, groups))
        beside = [group for group in sampled if id(group) not in trained] if self._stream is None else []
        self._parts.append(await self._updates.in_learner_thread(lambda: self._prepare(groups, beside)))
        return self._parts[-1].groups

    async def accumulate(self) -> None:
        """Run forward and backward on the newest groups now, where the step is streamed; else `train` does."""
        if (stream := self._stream) is not None:
            samples = self._parts[-1].samples
            await self._updates.in_learner_thread(lambda: stream.accumulate(samples, self._loss))

    async def train(self) -> Metrics:
        """Take the optimizer steps on all groups; return nothing but counts where no token is trained."""
        metrics = sample_metrics(self.samples)
        teacher = self._plan.config.teacher
        if self._plan.config.kind == "dpo":
            metrics["train/samples"] += len(self.shown)
            metrics["train/tokens"] += sum(sum(sample.mask) for sample in self.shown)
        elif self._plan.config.imitates:
            told = demonstration_metrics(self.shown)
            metrics["train/samples"] += told["teacher/demonstrations"]
            metrics["train/tokens"] += told["teacher/demonstrated_tokens"]
            metrics |= told
        elif teacher is not None:
            metrics |= teacher_metrics(self.samples, teacher_scores(self.groups))
        if self.trains:
            metrics |= await self._updates.in_learner_thread(self._train)
            self._updates.changed = self._step
        return metrics

    # -- in the learner's thread ---------------------------------------------------------------------------------------

    def _prepare(self, groups: Sequence[RolloutGroup], beside: Sequence[RolloutGroup]) -> _Part:
        """Return groups -> the same with advantages, and what the learner gets of them."""
        plan, algo, teacher = self._plan, self._plan.config.algo, self._plan.config.teacher
        weighed = with_advantages(
            groups, plan.config.algo, weights=plan.reward_weights, beside=beside, algorithm=plan.algorithm
        )
        if teacher is not None:
            weighed = with_reward_weight(weighed, teacher.reward_weight)
        first = len(self.groups)
        shown = demonstrations(weighed, first=first)
        if plan.config.learns_no_rewards:
            return _Part(groups=weighed, samples=[], shown=shown)
        samples = samples_of(weighed, first=first)
        if plan.kl_coeff is None or not samples:
            samples = samples_of(weighed, mask_truncated=algo.mask_truncated, first=first)
            if plan.algorithm is not None:
                samples = with_token_weights(samples, weighed, plan.algorithm)
            return _Part(groups=weighed, samples=with_teacher(samples, weighed, teacher), shown=shown)
        reference = self._learner.forward(samples, temperature=self._temperature, reference=True)
        kls = [sequence_kl(sample, row) for sample, row in zip(samples, reference, strict=True)]
        adaptive = self._updates.adaptive_kl
        coeff = plan.kl_coeff if adaptive is None else adaptive.coeff
        weighed = with_kl_penalty(weighed, kls, plan.config.algo, coeff=coeff)
        samples = samples_of(weighed, mask_truncated=algo.mask_truncated, first=first)
        kl = kl_metrics(samples, reference)
        return _Part(groups=weighed, samples=with_teacher(samples, weighed, teacher), shown=shown, kl=kl)

    def _train(self) -> Metrics:
        """Take the optimizer steps, and measure the divergence from the reference, which the policy is weighed by next
        time."""
        train, samples, adaptive = self._plan.config.train, self.samples, self._updates.adaptive_kl
        rate = learning_rate_at(
            self._step - 1,
            peak=train.learning_rate,
            steps=train.steps,
            schedule=train.schedule,
            warmup_steps=train.warmup_steps,
            decay_steps=train.decay_steps,
            final_rate=train.final_rate,
        )
        kl = combined_kl([part.kl for part in self._parts])
        if not kl and samples and not self._plan.loss.reads_reference:
            kl = self._learner.measure_kl(samples, temperature=self._temperature)
        if self._plan.config.kind == "dpo":
            metrics = train_on_pairs(
                self._learner,
                pairs_of(self.shown),
                self._plan.config.dpo,
                learning_rate=rate,
                minibatches=train.minibatches,
                passes=train.passes,
            )
        elif self._stream is not None:
            metrics = self._stream.finish(learning_rate=rate)
        else:
            metrics = self._learner.step(
                samples,
                self._loss,
                learning_rate=rate,
                minibatches=train.minibatches,
                passes=train.passes,
                temperature=self._temperature,
                demonstrations=self.shown,
                coefficient=1.0 if (teacher := self._plan.config.teacher) is None else teacher.coefficient,
            )
        metrics |= kl | {"optim/lr": rate}
        if adaptive is not None:
            metrics["kl/coeff"] = adaptive.coeff
            adaptive.update(metrics.get("kl/mean", math.nan))  # unknown where demonstrations alone are trained
        return metrics

    @property
    def _loss(self) -> LossSpec:
        """Return the loss, with the present weight of the KL."""
        adaptive = self._updates.adaptive_kl
        if adaptive is None or self._plan.kl_coeff is not None:
            return self._plan.loss
        return replace(self._plan.loss, kl_coeff=adaptive.coeff)

    @property
    def _temperature(self) -> float:
        return self._plan.config.rollout.temperature


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Part of a step's groups, with advantages, and the samples that are trained of them."""

    groups: list[RolloutGroup]
    samples: list[Sample]
    shown: list[Sample]
    kl: Metrics = field(default_factory=dict)


def combined_kl(parts: Sequence[Metrics]) -> Metrics:
    """Combine `kl_metrics` of several parts into those of all their tokens."""
    measured = [part for part in parts if part]
    if not measured:
        return {}
    tokens = sum(part["kl/tokens"] for part in measured)
    mean = sum(part["kl/mean"] * part["kl/tokens"] for part in measured) / tokens
    return {"kl/mean": mean, "kl/max": max(part["kl/max"] for part in measured), "kl/tokens": tokens}
