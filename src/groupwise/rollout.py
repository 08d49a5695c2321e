"""Prompts -> scored groups -> samples: everything between the dataset and the learner.

`collect` fills one training batch: it samples a group for each of `prompts_per_step` prompts, scores it, and replaces
the groups that cannot teach (all rewards equal, or fewer than two completions that could be scored) by sampling further
prompts, within a bounded budget (dynamic sampling, DAPO, arXiv 2503.14476). A budget that runs out makes a smaller
batch, never an endless loop.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from groupwise.algo.advantage import AdvantageSpec, has_signal
from groupwise.chat import encode_prompt
from groupwise.data import PromptSource
from groupwise.engine.base import Sampler
from groupwise.errors import DataError, RewardError
from groupwise.model import LoadedModel
from groupwise.rewards.base import RewardFunction, score
from groupwise.types import (
    FinishReason,
    PolicyVersion,
    Prompt,
    Rollout,
    RolloutGroup,
    Sample,
    SamplingParams,
    SamplingRequest,
    Turn,
)


@dataclass(frozen=True, kw_only=True)
class Collected:
    """One step's groups. `groups` will be trained on; `sampled` is every group drawn for it, for the statistics."""

    groups: tuple[RolloutGroup, ...]
    sampled: tuple[RolloutGroup, ...]
    too_long: int = 0  # prompts passed over because they fill the model's context

    @property
    def completions(self) -> list[Rollout]:
        return [rollout for group in self.sampled for rollout in group.rollouts]


@dataclass(kw_only=True)
class Collector:
    """What `collect` needs from one step to the next."""

    source: PromptSource
    sampler: Sampler
    rewards: Sequence[RewardFunction]
    base: LoadedModel
    params: SamplingParams
    prompts_per_step: int
    group_size: int
    refill: float
    seed: int
    advantage: AdvantageSpec = field(default_factory=AdvantageSpec)
    keep_flat: bool = False  # the loss has a term whose gradient does not need an advantage (KL, entropy)
    on_phase: Callable[[str], None] = lambda phase: None

    async def collect(self, *, step: int, version: PolicyVersion) -> Collected:
        """The groups of one training step, sampled by `version`.

        Raises:
            DataError: no prompt of the dataset fits the context.
            RewardError: no completion at all could be scored.
        """
        kept: list[RolloutGroup] = []
        sampled: list[RolloutGroup] = []
        too_long = 0
        budget = int(self.prompts_per_step * self.refill)
        while len(kept) < self.prompts_per_step and len(sampled) < budget:
            wanted = min(self.prompts_per_step - len(kept), budget - len(sampled))
            prompts, passed_over = self._take(wanted)
            too_long += passed_over
            self.on_phase("sampling")
            seeds = [_seed(self.seed, step, len(sampled) + i) for i in range(len(prompts))]
            groups = await sample_groups(
                self.sampler, prompts, params=self.params, n=self.group_size, version=version, seeds=seeds
            )
            self.on_phase("scoring")
            sampled.extend(groups := await self._score(groups, first=not sampled))
            kept.extend(group for group in groups if self.keep_flat or has_signal(group, self.advantage))
        return Collected(groups=tuple(kept), sampled=tuple(sampled), too_long=too_long)

    async def _score(self, groups: list[RolloutGroup], *, first: bool) -> list[RolloutGroup]:
        """Only the step as a whole fails: replacements that cannot be scored are like any other unscorable rollout."""
        try:
            return await score(groups, self.rewards)
        except RewardError as error:
            if first:
                raise
            failed = [tuple(replace(r, error=error.message) for r in group.rollouts) for group in groups]
            return [replace(group, rollouts=rollouts) for group, rollouts in zip(groups, failed, strict=True)]

    def _take(self, count: int) -> tuple[list[Prompt], int]:
        """The next `count` prompts that leave room for a completion, and how many did not."""
        prompts: list[Prompt] = []
        passed_over = 0
        while len(prompts) < count:
            for prompt in self.source.take(count - len(prompts)):
                encoded = encode_prompt(prompt, self.base.tokenizer)
                if len(encoded.token_ids) < self.base.context_length:
                    prompts.append(encoded)
                else:
                    passed_over += 1
            if passed_over >= 2 * len(self.source) and not prompts:  # a whole epoch, wherever this one began
                raise DataError(
                    f"all {len(self.source)} prompts fill the model's context of {self.base.context_length} tokens",
                    hint="shorten the prompts, or use a model with a longer context",
                )
        return prompts, passed_over


async def sample_groups(
    sampler: Sampler,
    prompts: Sequence[Prompt],
    *,
    params: SamplingParams,
    n: int,
    version: PolicyVersion,
    seeds: Sequence[int],
) -> list[RolloutGroup]:
    """`n` single-turn rollouts for each encoded prompt, unscored."""
    requests = [
        SamplingRequest(prompt_ids=prompt.token_ids, params=replace(params, seed=seed), n=n, version=version)
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    completions_PG = await sampler.sample(requests)
    return [
        RolloutGroup(prompt=prompt, rollouts=tuple(Rollout(turns=(Turn(prompt.token_ids, c),)) for c in completions_G))
        for prompt, completions_G in zip(prompts, completions_PG, strict=True)
    ]


def samples_of(groups: Sequence[RolloutGroup]) -> list[Sample]:
    """The samples of groups that have advantages; rollouts without one (unscorable) are left out.

    Token ids and behaviour logprobs are those of the engine, untouched.
    """
    return [
        Sample(
            prompt_ids=turn.prompt_ids,
            completion_ids=turn.completion.token_ids,
            mask=(1,) * len(turn.completion.token_ids),
            advantage=rollout.advantage,
            behaviour_logprobs=turn.completion.logprobs,
        )
        for group in groups
        for rollout in group.rollouts
        if rollout.advantage is not None
        for turn in rollout.turns
    ]


def rollout_metrics(collected: Collected, advantage: AdvantageSpec | None = None) -> dict[str, float]:
    """What a step's rollouts were like: over everything sampled, also the groups that were not trained on."""
    rollouts = collected.completions
    rewards = [r.reward for r in rollouts if r.reward is not None]
    lengths = [len(r.completion.token_ids) for r in rollouts]
    mean = sum(rewards) / max(1, len(rewards))
    flat = sum(not has_signal(group, advantage) for group in collected.sampled)
    metrics = {
        "reward/mean": mean,
        "reward/std": (sum((r - mean) ** 2 for r in rewards) / max(1, len(rewards) - 1)) ** 0.5,
        "reward/frac_zero_std": flat / max(1, len(collected.sampled)),
        "rollout/count": float(len(rollouts)),
        "rollout/groups_trained": float(len(collected.groups)),
        "rollout/len_mean": sum(lengths) / max(1, len(lengths)),
        "rollout/len_max": float(max(lengths, default=0)),
        "rollout/tokens": float(sum(lengths)),
        "rollout/truncated_frac": _share(rollouts, lambda r: r.completion.finish_reason is FinishReason.LENGTH),
        "rollout/error_frac": _share(rollouts, lambda r: r.error is not None),
        "data/too_long": float(collected.too_long),
    }
    for name in {name for r in rollouts for name in r.rewards}:
        values = [value for r in rollouts if (value := r.rewards.get(name)) is not None]
        metrics[f"reward/{name}/mean"] = sum(values) / max(1, len(values))
    return metrics


def _share(rollouts: Sequence[Rollout], predicate: Callable[[Rollout], bool]) -> float:
    return sum(map(predicate, rollouts)) / max(1, len(rollouts))


def _seed(*parts: int) -> int:
    """A 63-bit seed that depends on all of `parts`."""
    digest = hashlib.blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
