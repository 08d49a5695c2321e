"""How good is a policy on held-out prompts? The same sampling, rewards and words as in training; nothing is trained.

With k completions for each prompt in mode `sampled`, of which c succeed (reward >= `success`) and n <= k were scored,

    avg@k    the mean over prompts of their mean reward
    pass@k   the mean over prompts of  1 - C(n - c, k) / C(n, k)     Chen et al. 2021, arXiv 2107.03374, equation 1

The standard error of the mean is std / sqrt(P) of the P prompts' mean rewards: the completions of one prompt are not
independent. Completions that failed are counted and left out; only if all of a mode failed, RewardError is raised.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from groupwise.config.run import RunConfig
from groupwise.errors import ConfigError, DataError
from groupwise.model.chat import check_length
from groupwise.rewards.base import refuse_failed
from groupwise.run.batches import Score
from groupwise.store import files
from groupwise.store.rollouts import group_from_json, group_to_json
from groupwise.store.rundir import EVALUATIONS
from groupwise.tasks.episode import RolloutSource, play_all
from groupwise.types import FinishReason, PolicyVersion, Prompt, RolloutGroup, SamplingParams

SUCCESS = 1.0  # the reward of a right answer, where nothing else is said
_SAME = 1e-9
MODES = ("greedy", "sampled")


def checked_modes(config: RunConfig, modes: Sequence[str]) -> tuple[str, ...]:
    """The modes that are named, or without any those of `eval`. Raises ConfigError for an unknown one."""
    modes = tuple(modes) or (MODES if config.eval is None else config.eval.modes)
    if unknown := [mode for mode in modes if mode not in MODES]:
        near = difflib.get_close_matches(unknown[0], MODES, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"--mode {unknown[0]!r} does not exist; {meant}valid: {', '.join(MODES)}")
    return modes


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Rewards of one policy in one mode, and the completions they come from (k per prompt)."""

    mode: str
    version: PolicyVersion
    groups: tuple[RolloutGroup, ...]
    success: float = SUCCESS

    @property
    def k(self) -> int:
        """Completions that were sampled for each prompt."""
        return max((len(group.rollouts) for group in self.groups), default=0)

    @property
    def failed(self) -> int:
        """Completions that could not be scored."""
        return sum(rollout.error is not None for group in self.groups for rollout in group.rollouts)

    def failures(self) -> str | None:
        """How many completions could not be scored and why the first could not, in a sentence; None if all could."""
        causes = [rollout.error for group in self.groups for rollout in group.rollouts if rollout.error is not None]
        if not causes:
            return None
        completions = sum(len(group.rollouts) for group in self.groups)
        return f"{self.mode}: {len(causes)} of {completions} completions could not be scored; the first: {causes[0]}"

    def mean(self, *, column: str | None = None, value: object = None) -> float:
        """The mean reward, of all prompts or of those whose `column` is `value`; NaN where nothing could be scored."""
        chosen = [each for each in self.groups if column is None or each.prompt.columns.get(column) == value]
        means = _means(chosen)
        return math.fsum(means) / len(means) if means else math.nan

    def standard_error(self) -> float:
        """Of `mean`; NaN for fewer than two prompts."""
        means = _means(self.groups)
        return statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.nan

    def pass_at(self, k: int) -> float:
        """The chance that one of k completions succeeds, over the prompts with k that were scored; NaN without any."""
        chances = [
            pass_at_k(len(rewards), sum(reward >= self.success - _SAME for reward in rewards), k)
            for rewards in map(_rewards, self.groups)
            if len(rewards) >= k
        ]
        return math.fsum(chances) / len(chances) if chances else math.nan

    def metrics(self, *, by: str | None = None) -> dict[str, float]:
        """{"eval/greedy/reward": mean} and, with `by`, the means per value of that column."""
        metrics = {f"eval/{self.mode}/reward": self.mean()}
        values = {} if by is None else {str(each): each for each in (g.prompt.columns.get(by) for g in self.groups)}
        return metrics | {
            f"eval/{self.mode}/{name}/reward": self.mean(column=by, value=value) for name, value in values.items()
        }

    def details(self) -> dict[str, float]:
        """What else there is to log: the standard error, the failures, and for k > 1 avg@k and pass@k."""
        details = {"reward_stderr": self.standard_error(), "failed": float(self.failed)}
        if self.k > 1:
            details |= {f"avg@{self.k}": self.mean(), "pass@1": self.pass_at(1), f"pass@{self.k}": self.pass_at(self.k)}
        return {f"eval/{self.mode}/{name}": value for name, value in details.items()}


async def evaluate(
    play: RolloutSource,
    prompts: Sequence[Prompt],
    score: Score,
    *,
    version: PolicyVersion,
    params: SamplingParams,
    modes: Sequence[str],
    seed: int,
    k: int = 1,
    success: float = SUCCESS,
) -> dict[str, Evaluation]:
    """Play every prompt (as `play.prepare` returns it) in each mode: "greedy" once at temperature 0, "sampled" k times
    as `params` says.

    `score` gives a group its rewards (`scorer.Scorer`). The first of k samples are those of a smaller k. Raises
    RewardError when no completion of a mode could be scored.
    """
    result: dict[str, Evaluation] = {}
    for mode in modes:
        greedy = mode == "greedy"
        how = replace(params, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0) if greedy else params
        seeds = [seed * 1_000_003 + i for i in range(len(prompts))]
        groups = await play_all(play, prompts, seeds=seeds, n=1 if greedy else k, params=how, version=version)
        scored = await asyncio.gather(*(score(_without_aborted(group)) for group in groups))
        refuse_failed(scored)
        result[mode] = Evaluation(mode=mode, version=version, groups=tuple(scored), success=success)
    return result


def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate of the chance that at least one of k completions succeeds, from c successes among n >= k.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 4), pass_at_k(4, 2, 2)
    (0.25, 1.0, 0.8333333333333334)
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {c} successes among {n}; it must be that 0 <= c <= n and 1 <= k <= n")
    return (math.comb(n, k) - math.comb(n - c, k)) / math.comb(n, k)


class BestVersion:
    """Which version had the highest value of a metric so far (of equal ones the earlier), and when to stop looking.

    `stop` is True once `patience` evaluations in a row brought no new best; 0 never stops.
    """

    def __init__(self, *, patience: int = 0):
        self.patience = patience
        self.version: PolicyVersion | None = None
        self.value = -math.inf
        self.waited = 0

    @property
    def stop(self) -> bool:
        return 0 < self.patience <= self.waited

    def observe(self, version: PolicyVersion, value: float) -> bool:
        """Whether this is the best so far; a value that is NaN never is."""
        if value > self.value:
            self.version, self.value, self.waited = version, value, 0
            return True
        self.waited += 1
        return False

    def state_dict(self) -> dict[str, Any]:
        """Everything but `patience`, for `load_state_dict`; goes through JSON."""
        if self.version is None:
            return {"version": None, "value": None, "waited": self.waited}
        return {"version": str(self.version), "value": self.value, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`. Raises DataError for what is no such state."""
        try:
            version = None if state["version"] is None else PolicyVersion.parse(state["version"])
            value = -math.inf if version is None else float(state["value"])
            waited = int(state["waited"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"not the state of a BestVersion: {type(error).__name__}: {error}") from error
        self.version, self.value, self.waited = version, value, waited


def prepare_all(prompts: Sequence[Prompt], play: RolloutSource, *, context: int) -> list[Prompt]:
    """Prompts as `play` takes them. Raises ContextLengthError for one that fills the model's context."""
    prepared = [play.prepare(prompt) for prompt in prompts]
    for prompt in prepared:
        check_length(prompt.token_ids, max_tokens=1, context=context)
    return prepared


def compare(
    before: Mapping[str, Evaluation], after: Mapping[str, Evaluation], *, by: str | None
) -> list[tuple[str, float, float]]:
    """Rows (what, before, after) of the closing table: mean rewards, and pass@k where there are several samples."""
    rows = []
    for mode, evaluation in after.items():
        first = before[mode].metrics(by=by)
        rows += [(key.removeprefix("eval/"), first[key], value) for key, value in evaluation.metrics(by=by).items()]
        if (k := evaluation.k) > 1:
            rows.append((f"{mode}/pass@{k}", before[mode].pass_at(k), evaluation.pass_at(k)))
    return rows


def _without_aborted(group: RolloutGroup) -> RolloutGroup:
    """An aborted completion says nothing about the policy: it counts as failed."""
    return replace(
        group,
        rollouts=tuple(
            replace(rollout, error="the completion was aborted")
            if rollout.turns and rollout.completion.finish_reason is FinishReason.ABORT
            else rollout
            for rollout in group.rollouts
        ),
    )


def _rewards(group: RolloutGroup) -> list[float]:
    return [rollout.reward for rollout in group.rollouts if rollout.reward is not None]


def _means(groups: Sequence[RolloutGroup]) -> list[float]:
    """The mean reward of each prompt of which anything could be scored."""
    return [math.fsum(rewards) / len(rewards) for rewards in map(_rewards, groups) if rewards]


def save_evaluations(run_dir: Path, step: int, evaluations: Mapping[str, Evaluation]) -> None:
    """Write down what was evaluated at `step`, by mode; done again it replaces what was there. Raises StorageError."""
    directory = run_dir / EVALUATIONS
    with files.writing(f"writing the evaluation at step {step}"):
        directory.mkdir(exist_ok=True)
        for mode, evaluation in evaluations.items():
            head = {"version": str(evaluation.version), "success": evaluation.success}
            lines = [head, *(group_to_json(group) for group in evaluation.groups)]
            text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
            files.replace(directory / f"step_{step:06d}.{mode}.jsonl", text)


def load_evaluations(run_dir: Path, step: int) -> dict[str, Evaluation]:
    """Inverse of `save_evaluations`. Raises DataError for a file that is none."""
    found = {}
    for path in sorted((run_dir / EVALUATIONS).glob(f"step_{step:06d}.*.jsonl")):
        mode = path.name.split(".")[1]
        head, *groups = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        found[mode] = Evaluation(
            mode=mode,
            version=PolicyVersion.parse(head["version"]),
            success=head["success"],
            groups=tuple(map(group_from_json, groups)),
        )
    return found
