"""A payload as optimizer steps: what step k of a job accumulates the gradient of.

    grpo   `iterations` passes over the groups, each cut into `minibatches` optimizer steps: one rollout batch of a
           run, with the same cuts, anchor and reference (`RolloutBatch`)
    sft    `epochs` passes over the examples, each cut into steps of `batch_size`

Step k's batch follows from the configuration and k alone, so that a job that goes on from a checkpoint does what it
would have done. Groups whose rewards are all equal are left out before anything is computed, unless another term of
the loss has a gradient there (a KL, an entropy bonus), as in a run.

What was posted as text has no behaviour logprobs; nobody knows what sampled it. It gets those of the policy that the
job starts from, so that every loss works with its own anchor: the first step is then an on-policy one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress, groupby

from groupwise.algo.credit import has_signal, with_advantages
from groupwise.algo.distillation import teacher_scores, with_teacher_advantages
from groupwise.algo.distillation_metrics import teacher_metrics
from groupwise.algo.metrics import Metrics, rollout_metrics
from groupwise.algo.samples import samples_of
from groupwise.config.job import GrpoJobConfig, SftJobConfig
from groupwise.errors import ContextLengthError, DataError, TrainingError
from groupwise.model.load import LoadedModel
from groupwise.model.packing import count_loss_tokens
from groupwise.store.job_payload import EncodedGroup, GrpoPayload, SftPayload
from groupwise.train.learner import Learner
from groupwise.train.rollout_batch import RolloutBatch
from groupwise.types import Completion, FinishReason, Prompt, Rollout, RolloutGroup, Sample, SequenceScores, Turn

Rows = Sequence[tuple[float, ...]]  # a log-probability per token of each sample

_REWARD = "reward"

_FACTS = ("reward/mean", "reward/std", "reward/frac_zero_std", "rollout/count", "rollout/groups_trained")

_FACTS += ("rollout/len_mean", "rollout/len_max", "rollout/tokens")


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a job does. `batches` are the rows (indices of samples) of each optimizer step, `facts` metrics that hold
    for all of them, `start` the samples' log-probabilities under the policy that the job starts from."""

    samples: Sequence[Sample]
    facts: Metrics
    temperature: float = 1.0
    start: Rows | None = None

    @property
    def batches(self) -> Sequence[Sequence[int]]:
        raise NotImplementedError

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return len(self.batches)

    @property
    def reads_start(self) -> bool:
        """Whether `started` must be called before the first step."""
        return False

    def started(self, learner: Learner) -> Task:
        """Return the task, with its `start` under the learner's policy as it is."""
        return self

    def with_start(self, start: Rows) -> Task:
        """Return the task, given its `start`."""
        return replace(self, start=start)

    def with_reference(self, learner: Learner) -> Task:
        """Return the task with the reference's log-probabilities, where several steps read those of one sample."""
        return self

    def accumulate(self, learner: Learner, step: int) -> Metrics:
        """Accumulate the gradient of step `step`, from 0."""
        raise NotImplementedError

    @property
    def largest(self) -> int:
        """Tokens of the largest batch that goes through the model at once, a prompt counted once for its group."""
        return max(_packed([self.samples[row] for row in rows]) for rows in self.batches)

    @property
    def longest(self) -> int:
        """Tokens of the longest sample: no pass can have fewer."""
        return max(len(sample.prompt_ids) + len(sample.completion_ids) for sample in self.samples)

    def tokens(self, step: int) -> int:
        """Completion tokens of step `step`."""
        return sum(len(self.samples[row].completion_ids) for row in self.batches[step])

    def some(self, tokens: int) -> list[Sample]:
        """Return as many of the samples as have about this many tokens together, at least one, from all over the
        job."""
        each = sum(len(sample.prompt_ids) + len(sample.completion_ids) for sample in self.samples) / len(self.samples)
        return list(self.samples[:: max(1, math.ceil(len(self.samples) * each / tokens))])


@dataclass(frozen=True, kw_only=True)
class GrpoTask(Task):
    """Policy steps. A behaviour logprob that nobody recorded is NaN until `with_start`."""

    batch: RolloutBatch

    @property
    def batches(self) -> Sequence[Sequence[int]]:
        return self.batch.steps

    @property
    def reads_start(self) -> bool:
        unknown = any(math.isnan(x) for sample in self.samples for x in sample.behaviour_logprobs or ())
        return unknown or (self.batch.spec.reads_old and self.steps > 1)

    def started(self, learner: Learner) -> GrpoTask:
        return self.with_start(self.batch.with_old(learner).old or ())

    def with_start(self, start: Rows) -> GrpoTask:
        filled = [
            replace(sample, behaviour_logprobs=tuple(map(_known, sample.behaviour_logprobs or (), row)))
            for sample, row in zip(self.samples, start, strict=True)
        ]
        old = start if self.batch.spec.reads_old else None
        return replace(self, samples=filled, start=start, batch=replace(self.batch, samples=filled, old=old))

    def with_reference(self, learner: Learner) -> GrpoTask:
        return replace(self, batch=self.batch.with_reference(learner))

    def accumulate(self, learner: Learner, step: int) -> Metrics:
        return self.batch.accumulate(learner, step)


@dataclass(frozen=True, kw_only=True)
class SftTask(Task):
    """Steps on the cross-entropy; `rows` are those of each."""

    rows: Sequence[Sequence[int]]

    @property
    def batches(self) -> Sequence[Sequence[int]]:
        return self.rows

    def accumulate(self, learner: Learner, step: int) -> Metrics:
        return learner.forward_backward_supervised([self.samples[row] for row in self.rows[step]])


def make_task(config: GrpoJobConfig | SftJobConfig, payload: GrpoPayload | SftPayload, *, base: LoadedModel) -> Task:
    """Return what the job does.

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


def _grpo_task(config: GrpoJobConfig, payload: GrpoPayload) -> GrpoTask:
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
    batch = RolloutBatch.cut(
        samples,
        config.loss(recorded=recorded),
        minibatches=config.minibatches,
        passes=config.iterations,
        shuffle=random.Random(config.seed),
        temperature=config.temperature or payload.temperature,
    )
    return GrpoTask(
        samples=samples,
        batch=batch,
        temperature=batch.temperature,
        facts={key: measured[key] for key in _FACTS} | (teacher_metrics(samples, scores) if any(taught) else {}),
    )


def _rollouts(index: int, group: EncodedGroup) -> RolloutGroup:
    """Return the group in the words of the loop; a logprob that nobody recorded is NaN."""
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


def _sft_task(config: SftJobConfig, payload: SftPayload) -> SftTask:
    if not payload.examples:
        raise TrainingError("there are no examples to train on", hint="post at least one")
    samples = [
        Sample(prompt_ids=each.prompt_ids, completion_ids=each.completion_ids, mask=each.mask)
        for each in payload.examples
    ]
    parts = config.steps(examples=len(samples)) // config.epochs
    rows = [part for turn in range(config.epochs) for part in _epoch(len(samples), parts, f"{config.seed}/{turn}")]
    return SftTask(samples=samples, rows=rows, facts={"data/examples": float(len(samples))})


def _epoch(examples: int, parts: int, seed: str) -> Iterator[list[int]]:
    """Yield all examples in so many parts of about the same size; in an order of its own if there are several."""
    order = list(range(examples))
    if parts > 1:
        random.Random(seed).shuffle(order)
    for part in range(parts):
        yield order[examples * part // parts : examples * (part + 1) // parts]


def _packed(samples: Sequence[Sample]) -> int:
    """Return tokens of a batch, where neighbours with equal prompts share theirs."""
    prompts = [prompt for prompt, _ in groupby(sample.prompt_ids for sample in samples)]
    return sum(map(len, prompts)) + sum(len(sample.completion_ids) for sample in samples)


def check_readable(samples: Sequence[Sample], base: LoadedModel) -> None:
    """On a GPU an id, also of a target that is read, or a position out of range would kill the process."""
    for sample in samples:
        length = len(sample.prompt_ids) + len(sample.completion_ids)
        if length > base.context_length:
            raise ContextLengthError(
                f"a prompt of {len(sample.prompt_ids)} tokens and a completion of {len(sample.completion_ids)} do not "
                f"fit: the maximum context length is {base.context_length} tokens",
                hint="shorten the prompt or the completion",
            )
    check_ids(samples, base)
    check_routing(samples, base)


def check_routing(samples: Sequence[Sample], base: LoadedModel) -> None:
    """Raise DataError unless the experts that are recorded, where they are, can be the model's."""
    recorded = [sample.routed_experts for sample in samples if sample.routed_experts is not None]
    routing = base.routing if recorded else None
    for routed in recorded:
        if routing is None or not routing.has(routed):
            own = "no routers" if routing is None else f"{routing.layers} routers that choose {routing.chosen} "
            own += "" if routing is None else f"of {routing.experts} experts"
            raise DataError(
                f"routed_experts have {routed.shape[2]} experts of {routed.shape[1]} layers for each token, up to "
                f"number {routed.array().max(initial=-1)}; {base.name} has {own}",
                hint="train what this model sampled, or leave routed_experts out",
            )


def check_ids(samples: Sequence[Sample], base: LoadedModel) -> None:
    """Raise DataError unless the model has every token id, and every target that is read."""
    for sample in samples:
        if (largest := max((*sample.prompt_ids, *sample.completion_ids))) >= base.vocabulary:
            raise DataError(f"token id {largest} is not in the vocabulary: ids go from 0 to {base.vocabulary - 1}")
        if (largest := max(compress(sample.targets or (), sample.mask), default=0)) >= base.vocabulary:
            raise DataError(f"target {largest} is not in the vocabulary: ids go from 0 to {base.vocabulary - 1}")


def _known(recorded: float, start: float) -> float:
    return start if math.isnan(recorded) else recorded
