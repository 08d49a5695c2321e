"""How good is a policy on held-out prompts? The same sampling, rewards and words as in training; nothing is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from groupwise.chat import check_length, encode_prompt
from groupwise.engine.base import Sampler
from groupwise.model import LoadedModel
from groupwise.rewards.base import RewardFunction, score
from groupwise.rollout import sample_groups
from groupwise.types import PolicyVersion, Prompt, RolloutGroup, SamplingParams


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Mean rewards of one policy in one mode, and the completions they come from (one per prompt)."""

    mode: str
    version: PolicyVersion
    groups: tuple[RolloutGroup, ...]

    def mean(self, *, column: str | None = None, value: object = None) -> float:
        """The mean reward, of all prompts or of those whose `column` is `value`; NaN where nothing could be scored."""
        rewards = [
            rollout.reward
            for group in self.groups
            if column is None or group.prompt.columns.get(column) == value
            for rollout in group.rollouts
            if rollout.reward is not None
        ]
        return sum(rewards) / len(rewards) if rewards else float("nan")

    def metrics(self, *, by: str | None = None) -> dict[str, float]:
        """{"eval/greedy/reward": mean} and, with `by`, the means per value of that column."""
        metrics = {f"eval/{self.mode}/reward": self.mean()}
        values = {} if by is None else {str(each): each for each in (g.prompt.columns.get(by) for g in self.groups)}
        return metrics | {
            f"eval/{self.mode}/{name}/reward": self.mean(column=by, value=value) for name, value in values.items()
        }


async def evaluate(
    sampler: Sampler,
    prompts: Sequence[Prompt],
    rewards: Sequence[RewardFunction],
    *,
    version: PolicyVersion,
    params: SamplingParams,
    modes: Sequence[str],
    seed: int,
) -> dict[str, Evaluation]:
    """Sample one completion per encoded prompt in each mode ("greedy": temperature 0, "sampled": as `params` says)."""
    result: dict[str, Evaluation] = {}
    for mode in modes:
        how = replace(params, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0) if mode == "greedy" else params
        seeds = [seed * 1_000_003 + i for i in range(len(prompts))]
        groups = await sample_groups(sampler, prompts, params=how, n=1, version=version, seeds=seeds)
        result[mode] = Evaluation(mode=mode, version=version, groups=tuple(await score(groups, rewards)))
    return result


def encode_all(prompts: Sequence[Prompt], base: LoadedModel) -> list[Prompt]:
    """Prompts with their token ids. Raises ContextLengthError for one that fills the model's context."""
    encoded = [encode_prompt(prompt, base.tokenizer) for prompt in prompts]
    for prompt in encoded:
        check_length(prompt.token_ids, max_tokens=1, context=base.context_length)
    return encoded


def compare(
    before: Mapping[str, Evaluation], after: Mapping[str, Evaluation], *, by: str | None
) -> list[tuple[str, float, float]]:
    """Rows (what, before, after) of the closing table."""
    rows = []
    for mode, evaluation in after.items():
        first = before[mode].metrics(by=by)
        rows += [(key.removeprefix("eval/"), first[key], value) for key, value in evaluation.metrics(by=by).items()]
    return rows
