"""Turns a payload into optimizer steps: the samples of which step k of a job accumulates the gradient.

    grpo   `iterations` passes over the groups, each cut into `minibatches` optimizer steps: one rollout batch of a
           run, with the same cuts, anchor and reference (`TrainingBatch`)
    sft    `epochs` passes over the examples, each cut into steps of `batch_size`

Step k's batch follows from the configuration and k alone, so that a job that continues from a checkpoint takes the same
steps. Groups whose rewards are all equal are left out before anything is computed, unless another term of the loss has
a gradient there (a KL, an entropy bonus), as in a run.

Completions posted as text have no behaviour logprobs, because the policy that sampled them is unknown. They get those
of the policy from which the job starts, so that every loss works with its own anchor: the first step is then on-policy.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from groupwise.algo.credit import has_signal, with_advantages
from groupwise.algo.distillation import teacher_scores, with_teacher_advantages
from groupwise.algo.distillation_metrics import teacher_metrics
from groupwise.algo.metrics import Metrics, rollout_metrics
from groupwise.algo.samples import samples_of
from groupwise.config.job import GrpoJobConfig, SftJobConfig
from groupwise.errors import TrainingError
from groupwise.model.load import LoadedModel
from groupwise.model.packing import count_loss_tokens, packed_tokens
from groupwise.model.readable import check_readable
from groupwise.store.job_payload import EncodedGroup, GrpoPayload, SftPayload
from groupwise.train.learner import Learner
from groupwise.train.training_batch import TrainingBatch
from groupwise.types import Completion, FinishReason, Prompt, Rollout, RolloutGroup, Sample, SequenceScores, Turn

Rows = Sequence[tuple[float, ...]]  # a log-probability per token of each sample

_REWARD = "reward"

_FACTS = ("reward/mean", "reward/std", "reward/frac_zero_std", "rollout/count", "rollout/groups_trained")

_FACTS += ("rollout/len_mean", "rollout/len_max", "rollout/tokens")


@dataclass(frozen=True, kw_only=True)
class Task:
    """Holds a job's work: the optimizer steps over `batch`.

    Attributes:
        facts: metrics that are the same for all steps.
        start: log-probabilities of the samples under the policy from which the job starts, set by `with_start`; until
            then a behaviour logprob that was not recorded is NaN.
    """

    batch: TrainingBatch
    facts: Metrics
    start: Rows | None = None

    @property
    def samples(self) -> list[Sample]:
        """Return all samples of the job: scored completions, or examples."""
        return [*self.batch.samples, *self.batch.demonstrations]

    @property
    def reads_start(self) -> bool:
        """Return whether `started` must be called before the first step."""
        spec, samples = self.batch.spec, self.batch.samples
        unknown = any(math.isnan(x) for sample in samples for x in sample.behaviour_logprobs or ())
        return unknown or (spec is not None and spec.reads_old and self.batch.steps > 1)

    def started(self, learner: Learner) -> Task:
        """Return the task with its `start` under the learner's policy as it is now."""
        return self.with_start(self.batch.with_old(learner).old or ())

    def with_start(self, start: Rows) -> Task:
        """Return the task, given its `start`."""
        filled = [
            replace(sample, behaviour_logprobs=tuple(map(_known, sample.behaviour_logprobs or (), row)))
            for sample, row in zip(self.batch.samples, start, strict=True)
        ]
        old = start if self.batch.spec is not None and self.batch.spec.reads_old else None
        return replace(self, start=start, batch=replace(self.batch, samples=filled, old=old))

    def with_reference(self, learner: Learner) -> Task:
        """Return the task with the reference's log-probabilities, where several steps read those of one sample."""
        return replace(self, batch=self.batch.with_reference(learner))

    @property
    def largest(self) -> int:
        """Return the tokens of the largest batch of one optimizer step, a prompt counted once for its group."""
        return max(packed_tokens(self.batch.step_samples(step)) for step in range(self.batch.steps))

    @property
    def longest(self) -> int:
        """Return the tokens of the longest sample: no pass can have fewer."""
        return max(len(sample.prompt_ids) + len(sample.completion_ids) for sample in self.samples)

    def tokens(self, step: int) -> int:
        """Return the completion tokens of step `step`."""
        return sum(len(sample.completion_ids) for sample in self.batch.step_samples(step))

    def packed_tokens(self, step: int) -> int:
        """Return the tokens that go through the model in step `step`, prompts included, a group's once."""
        return packed_tokens(self.batch.step_samples(step))

    def some(self, tokens: int) -> list[Sample]:
        """Return as many of the samples as have about this many tokens together, at least one, from all over the
        job."""
        samples = self.samples
        each = sum(len(sample.prompt_ids) + len(sample.completion_ids) for sample in samples) / len(samples)
        return samples[:: max(1, math.ceil(len(samples) * each / tokens))]


def make_task(config: GrpoJobConfig | SftJobConfig, payload: GrpoPayload | SftPayload, *, base: LoadedModel) -> Task:
    """Return the job's task.

    Raises:
        TrainingError: there is nothing to learn from.
        DataError, ContextLengthError: the model cannot read the payload.
    """
    if isinstance(config, GrpoJobConfig):
        assert isinstance(payload, GrpoPayload)
        task = _grpo_task(config, payload)
    else:
        assert isinstance(payload, SftPayload)
        task = _sft_task(config, payload)
    if not count_loss_tokens(task.samples):
        raise TrainingError("there is not a single token to train on", hint="post completions that are not empty")
    check_readable(task.samples, base)
    return task


def _grpo_task(config: GrpoJobConfig, payload: GrpoPayload) -> Task:
    groups = [_rollouts(i, group) for i, group in enumerate(payload.groups)]
    taught = [any(rollout.teacher for rollout in group.rollouts) for group in groups]
    differ = [has_signal(group, config) or each for group, each in zip(groups, taught, strict=True)]
    if not any(differ):
        raise TrainingError(
            f"none of the {len(groups)} groups has completions whose rewards differ, so there is nothing to learn",
            hint="sample more completions per prompt, or use a finer reward",
        )
    recorded = any(each.logprobs is not None for group in payload.groups for each in group.completions)
    flat_too = config.trains_flat(recorded=recorded)
    weighed = with_advantages(groups, config)
    kept = [group for group, differs in zip(weighed, differ, strict=True) if differs or flat_too]
    scores, samples = teacher_scores(kept), samples_of(kept)
    samples = with_teacher_advantages(samples, scores, coefficient=config.teacher_coefficient)
    measured = rollout_metrics(groups, trained=kept, advantage=config)
    batch = TrainingBatch.cut(
        samples,
        config.loss(recorded=recorded),
        minibatches=config.minibatches,
        passes=config.iterations,
        shuffle=random.Random(config.seed),
        temperature=config.temperature or payload.temperature,
    )
    return Task(
        batch=batch,
        facts={key: measured[key] for key in _FACTS} | (teacher_metrics(samples, scores) if any(taught) else {}),
    )


def _rollouts(index: int, group: EncodedGroup) -> RolloutGroup:
    """Return the group as the training loop's `RolloutGroup`; a logprob that was not recorded is NaN."""
    rollouts = []
    for each in group.completions:
        logprobs = (math.nan,) * len(each.ids) if each.logprobs is None else each.logprobs
        completion = Completion(
            token_ids=each.ids,
            logprobs=logprobs,
            text="",
            finish_reason=FinishReason.STOP,
            kept=each.sampling_mask,
            kept_logprobs=() if each.kept is None else logprobs,
            routed_experts=each.routing,
        )
        turn = Turn(group.prompt_ids, completion)
        said = () if each.teacher_logprobs is None else (SequenceScores(logprobs=each.teacher_logprobs, top=()),)
        rollouts.append(Rollout(turns=(turn,), rewards={_REWARD: each.reward}, reward=each.reward, teacher=said))
    return RolloutGroup(prompt=Prompt(id=str(index), token_ids=group.prompt_ids), rollouts=tuple(rollouts))


def _sft_task(config: SftJobConfig, payload: SftPayload) -> Task:
    if not payload.examples:
        raise TrainingError("there are no examples to train on", hint="post at least one")
    samples = [
        Sample(prompt_ids=each.prompt_ids, completion_ids=each.completion_ids, mask=each.mask)
        for each in payload.examples
    ]
    parts = config.steps(examples=len(samples)) // config.epochs
    rows = [list(_epoch(len(samples), parts, f"{config.seed}/{turn}")) for turn in range(config.epochs)]
    batch = TrainingBatch(demonstrations=samples, shown=rows)
    return Task(batch=batch, facts={"data/examples": float(len(samples))})


def _epoch(examples: int, parts: int, seed: str) -> Iterator[list[int]]:
    """Yield all examples in so many parts of about the same size; in its own order if there are several."""
    order = list(range(examples))
    if parts > 1:
        random.Random(seed).shuffle(order)
    for part in range(parts):
        yield order[examples * part // parts : examples * (part + 1) // parts]


def _known(recorded: float, start: float) -> float:
    return start if math.isnan(recorded) else recorded
