"""Evaluates a policy on held-out prompts, with the sampling, rewards and words of training; nothing is trained.

With k completions for each prompt in mode `sampled`, of which c succeed (reward >= `success`) and n <= k were scored,

    avg@k    the mean over prompts of their mean reward
    pass@k   the mean over prompts of  1 - C(n - c, k) / C(n, k)     Chen et al. 2021, arXiv 2107.03374, equation 1
    maj@k    the share of prompts solved by the answer that most completions give (`majority`), self-consistency
             (Wang et al. 2022, arXiv 2203.11171)

Each is a mean over prompts, and its standard error is std / sqrt(P) of the P prompts' values: the completions of one
prompt are not independent. Completions that failed are counted and left out; only if all of a mode failed, RewardError
is raised. `paired` tests two policies on the same prompts.

With `eval.rewards` all of this is computed with those rewards, and the training reward of the same completions is
reported next to it: where the training reward rises and the other falls, the policy games the reward.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from groupwise.config.run import RunConfig
from groupwise.errors import ConfigError, DataError, RewardError
from groupwise.model.chat_length import check_length
from groupwise.rewards.base import refuse_failed
from groupwise.rewards.math import final_answer
from groupwise.run.collect import Score
from groupwise.store import files
from groupwise.store.rollouts import group_from_json, group_to_json
from groupwise.store.rundir import EVALUATIONS
from groupwise.tasks.rollout_sources import RolloutSource, play_all
from groupwise.types import FinishReason, PolicyVersion, Prompt, RolloutGroup, SamplingParams

SUCCESS = 1.0  # the reward of a right answer, where nothing else is said
_SAME = 1e-9
MODES = ("greedy", "sampled")
Answer = Callable[[str], object]  # the text of a completion -> what votes in maj@k, None for no vote


def checked_modes(config: RunConfig, modes: Sequence[str]) -> tuple[str, ...]:
    """Return the modes that are named, or without any those of `eval`. Raises ConfigError for an unknown one."""
    modes = tuple(modes) or (MODES if config.eval is None else config.eval.modes)
    if unknown := [mode for mode in modes if mode not in MODES]:
        near = difflib.get_close_matches(unknown[0], MODES, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"--mode {unknown[0]!r} does not exist; {meant}valid: {', '.join(MODES)}")
    return modes


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Rewards of one policy in one mode, and the completions they come from (k per prompt).

    `answers` are, for each prompt and completion, what it votes for in maj@k; empty where nothing was voted on.
    `training` are the rewards that the run is trained by, where the evaluation counts by others (`eval.rewards`):
    for each prompt and completion one, None without a value; empty where it counts by the same.
    """

    mode: str
    version: PolicyVersion
    groups: tuple[RolloutGroup, ...]
    success: float = SUCCESS
    answers: tuple[tuple[str | None, ...], ...] = ()
    training: tuple[tuple[float | None, ...], ...] = ()

    @property
    def k(self) -> int:
        """Return the number of completions that were sampled for each prompt."""
        return max((len(group.rollouts) for group in self.groups), default=0)

    @property
    def failed(self) -> int:
        """Return the number of completions that could not be scored."""
        return sum(rollout.error is not None for group in self.groups for rollout in group.rollouts)

    def failures(self) -> str | None:
        """Return how many completions could not be scored and why the first could not, in a sentence; None if all
        could."""
        causes = [rollout.error for group in self.groups for rollout in group.rollouts if rollout.error is not None]
        if not causes:
            return None
        completions = sum(len(group.rollouts) for group in self.groups)
        return f"{self.mode}: {len(causes)} of {completions} completions could not be scored; the first: {causes[0]}"

    def mean(self, *, column: str | None = None, value: object = None) -> float:
        """Return the mean reward, of all prompts or of those whose `column` is written as `value` is; NaN where
        nothing could be scored."""
        chosen = [each for each in self.groups if column is None or str(each.prompt.columns.get(column)) == str(value)]
        return _mean(_mean(_rewards(group)) for group in chosen)

    def training_mean(self) -> float:
        """Return the mean of the rewards that the run is trained by; NaN where the evaluation counts by the same."""
        return _mean(_mean(reward for reward in each if reward is not None) for each in self.training)

    def said(self) -> str:
        """Return the mean in a line, and where there is one that of what the run is trained by."""
        beside = self.training_mean()
        mean = _shown(self.mean(), (reward for group in self.groups for reward in _rewards(group)))
        trained = _shown(beside, (reward for each in self.training for reward in each if reward is not None))
        return mean + ("" if math.isnan(beside) else f" (the training reward {trained})")

    def values(self, measure: str) -> list[float]:
        """Return a measure of each prompt: its mean `reward`, `pass@K` or `maj@K`. NaN where too few completions were
        scored: pass@K needs K of them, and maj@K all of K = `k`."""
        name, _, size = measure.partition("@")
        if name == "reward":
            return [_mean(_rewards(group)) for group in self.groups]
        solved = [[reward >= self.success - _SAME for reward in _rewards(group)] for group in self.groups]
        if name == "pass":
            k = int(size)
            return [pass_at_k(len(each), sum(each), k) if len(each) >= k else math.nan for each in solved]
        votes = self.answers or [()] * len(self.groups)
        full = [len(each) == len(answers) == int(size) for each, answers in zip(solved, votes, strict=True)]
        return [
            majority(answers, each) if whole else math.nan
            for each, answers, whole in zip(solved, votes, full, strict=True)
        ]

    @property
    def measures(self) -> tuple[str, ...]:
        """Return the measures to report: the reward, and with several completions of a prompt pass@1, pass@k,
        maj@k."""
        voted = (f"maj@{self.k}",) if self.answers else ()
        return ("reward", "pass@1", f"pass@{self.k}", *voted) if self.k > 1 else ("reward",)

    def measured(self, measure: str) -> float:
        """Return the mean over prompts of a measure (`values`); NaN without any."""
        return _mean(self.values(measure))

    def standard_error(self, measure: str = "reward") -> float:
        """Return the standard error of `measured`; NaN for fewer than two prompts."""
        values = _known(self.values(measure))
        return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan

    def metrics(self, *, by: str | None = None) -> dict[str, float]:
        """{"eval/greedy/reward": mean} and, with `by`, the means per value of that column; `training_reward` where
        there is one."""
        metrics = {f"eval/{self.mode}/reward": self.mean()}
        if not math.isnan(beside := self.training_mean()):
            metrics[f"eval/{self.mode}/training_reward"] = beside
        values = [] if by is None else dict.fromkeys(str(each.prompt.columns.get(by)) for each in self.groups)
        return metrics | {f"eval/{self.mode}/{value}/reward": self.mean(column=by, value=value) for value in values}

    def details(self) -> dict[str, float]:
        """Return further numbers to log: standard errors, the failures, and for k > 1 avg@k, pass@k and maj@k."""
        details = {"reward_stderr": self.standard_error(), "failed": float(self.failed)}
        for measure in self.measures[1:]:
            details |= {measure: self.measured(measure), f"{measure}_stderr": self.standard_error(measure)}
        if self.k > 1:
            details |= {f"avg@{self.k}": self.mean(), f"avg@{self.k}_stderr": self.standard_error()}
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
    answer: Answer = final_answer,
    counted: Score | None = None,
) -> dict[str, Evaluation]:
    """Play every prompt (as `play.prepare` returns it) in each mode: "greedy" once at temperature 0, "sampled" k times
    as `params` says.

    `score` gives a group its rewards (`scorer.Scorer`). With `counted` those that count are what it gives, without what
    an environment gave, and those of `score` are in `Evaluation.training`. `answer` reads what a completion votes for
    in maj@k. The first of k samples are those of a smaller k.

    Raises RewardError when no completion of a mode could be scored, and where
    `answer` fails.
    """
    result: dict[str, Evaluation] = {}
    for mode in modes:
        greedy = mode == "greedy"
        how = replace(params, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0) if greedy else params
        seeds = [seed * 1_000_003 + i for i in range(len(prompts))]
        groups = await play_all(play, prompts, seeds=seeds, n=1 if greedy else k, params=how, version=version)
        played = [_without_aborted(group) for group in groups]
        own = [] if counted is None else await asyncio.gather(*(counted(_without_rewards(each)) for each in played))
        by_run = await asyncio.gather(*(score(each) for each in played))  # last: with it an episode is done
        scored = own or by_run
        refuse_failed(scored)
        training = tuple(tuple(rollout.reward for rollout in group.rollouts) for group in by_run) if own else ()
        answers = () if greedy or k == 1 else tuple(_answers(group, answer) for group in scored)
        result[mode] = Evaluation(
            mode=mode, version=version, groups=tuple(scored), success=success, answers=answers, training=training
        )
    return result


def _answers(group: RolloutGroup, answer: Answer) -> tuple[str | None, ...]:
    """Return what each completion (of an episode its last turn) votes for; None where it was not scored."""
    answers: list[str | None] = []
    for rollout in group.rollouts:
        counts = rollout.reward is not None and rollout.turns
        try:
            said = answer(rollout.completion.text) if counts else None
            answers.append(None if said is None else str(said))
        except Exception as error:
            raise RewardError(
                f"eval.answer failed on a completion of prompt {group.prompt.id!r}: {type(error).__name__}: {error}",
                hint="it takes a completion's text, and returns its answer, or None where it has none",
            ) from error
    return tuple(answers)


def majority(answers: Sequence[str | None], solved: Sequence[bool]) -> float:
    """Return whether the answer that most completions give is right, in [0, 1]; 0 where none of them gives one.

    An answer is as right as the completions that give it: the share of them that are `solved` (all or none, where the
    reward reads the answer alone). Of several answers with the most votes each is as likely as the others, so that
    k answers which all differ have maj@k = pass@1.

    >>> majority(["5", "5", "6"], [True, True, False]), majority(["5", "6"], [True, False]), majority([None], [True])
    (1.0, 0.5, 0.0)
    """
    votes = Counter(answer for answer in answers if answer is not None)
    most = max(votes.values(), default=0)
    winners = [answer for answer, count in votes.items() if count == most]
    right = [sum(hit for answer, hit in zip(answers, solved, strict=True) if answer == each) / most for each in winners]
    return _mean(right) if right else 0.0


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate of the chance that at least one of k completions succeeds, from c successes among n
    >= k.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 4), pass_at_k(4, 2, 2)
    (0.25, 1.0, 0.8333333333333334)
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {c} successes among {n}; it must be that 0 <= c <= n and 1 <= k <= n")
    return (math.comb(n, k) - math.comb(n - c, k)) / math.comb(n, k)


def _shown(mean: float, rewards: Iterable[float]) -> str:
    """Return a mean of rewards: per cent where each of them is between 0 and 1, a number where one is not."""
    return f"{mean:.1%}" if all(0 <= reward <= 1 for reward in rewards) else f"{mean:.3f}"


class BestVersion:
    """Remembers the version with the highest value of a metric so far (of equal ones the earlier), and says when to
    stop.

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
        """Return whether this is the best so far; a value that is NaN never is."""
        if value > self.value:
            self.version, self.value, self.waited = version, value, 0
            return True
        self.waited += 1
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return everything but `patience`, for `load_state_dict`; fit for JSON."""
        if self.version is None:
            return {"version": None, "value": None, "waited": self.waited}
        return {"version": str(self.version), "value": self.value, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`. Raises DataError for a value that is not such a state."""
        try:
            version = None if state["version"] is None else PolicyVersion.parse(state["version"])
            value = -math.inf if version is None else float(state["value"])
            waited = int(state["waited"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"not the state of a BestVersion: {type(error).__name__}: {error}") from error
        self.version, self.value, self.waited = version, value, waited


def prepare_all(prompts: Sequence[Prompt], play: RolloutSource, *, context: int) -> list[Prompt]:
    """Return prompts as `play` takes them. Raises ContextLengthError for one that fills the model's context."""
    prepared = [play.prepare(prompt) for prompt in prompts]
    for prompt in prepared:
        check_length(prompt.token_ids, max_tokens=1, context=context)
    return prepared


def compare(
    before: Mapping[str, Evaluation], after: Mapping[str, Evaluation], *, by: str | None
) -> list[tuple[str, float, float]]:
    """Return rows (what, before, after) of the closing table: mean rewards, and with several samples pass@k and
    maj@k."""
    rows = []
    for mode, evaluation in after.items():
        first = before[mode].metrics(by=by)
        rows += [(key.removeprefix("eval/"), first[key], value) for key, value in evaluation.metrics(by=by).items()]
        for measure in evaluation.measures[2:]:
            rows.append((f"{mode}/{measure}", before[mode].measured(measure), evaluation.measured(measure)))
    return rows


# ---- two policies on the same prompts ----

_EXACT = 16  # non-zero differences, up to which all 2^n signs are tried
_FLIPS = 20_000  # draws of the signs beyond that
_FLIPPED_AT_ONCE = 1 << 20  # numbers in memory


@dataclass(frozen=True, kw_only=True)
class PairedTest:
    """A measure of one policy less that of another on the same prompts.

    `standard_error` is of the `difference`: std / sqrt(prompts) of the prompts' differences; NaN for fewer than two.
    `won` and `lost` are the shares of prompts on which the first is better and worse. `p_value` is that of a difference
    as large in either direction, were the two policies equally good.
    """

    prompts: int
    difference: float
    standard_error: float
    p_value: float
    won: float
    lost: float


def paired(first: Sequence[float], second: Sequence[float], *, seed: int = 0) -> PairedTest:
    """Return the paired test of two policies' values on the same prompts, in the same order; pairs with a NaN are left
    out.

    Fisher's sign-flip permutation test: were the policies equally good, each prompt's difference could as well have had
    the other sign. p is the share of signs whose sum is as far from 0 as the sum that was seen. It assumes no
    distribution. Differences of one size make it McNemar's exact test (a binomial); up to 16 others are tried with all
    signs, and more with 20,000 that are drawn by `seed`, so that p is then at least 5e-5.

    Raises DataError where no prompt is left.
    """
    differences = [a - b for a, b in zip(first, second, strict=True) if not math.isnan(a - b)]
    if not differences:
        raise DataError("there is no prompt on which both policies have a value, so they cannot be compared")
    changed = [each for each in differences if abs(each) > _SAME]
    prompts, won = len(differences), sum(each > 0 for each in changed)
    return PairedTest(
        prompts=prompts,
        difference=math.fsum(differences) / prompts,
        standard_error=statistics.stdev(differences) / math.sqrt(prompts) if prompts > 1 else math.nan,
        p_value=_sign_flips(changed, seed=seed),
        won=won / prompts,
        lost=(len(changed) - won) / prompts,
    )


def paired_tests(first: Mapping[str, Evaluation], second: Mapping[str, Evaluation]) -> dict[str, PairedTest]:
    """Return the test of each mode and measure, by name ("greedy/reward", "sampled/pass@8"), of the first policy
    against the second. Raises DataError where they were not evaluated on the same prompts."""
    tests: dict[str, PairedTest] = {}
    for mode, one in first.items():
        other = second[mode]
        if [each.prompt.id for each in one.groups] != [each.prompt.id for each in other.groups]:
            raise DataError(f"{one.version} and {other.version} were not evaluated on the same prompts")
        for measure in one.measures:
            values = one.values(measure), other.values(measure)
            if any(not math.isnan(a - b) for a, b in zip(*values, strict=True)):
                tests[f"{mode}/{measure}"] = paired(*values)
    return tests


def run_summary(before: Mapping[str, Evaluation], after: Mapping[str, Evaluation]) -> dict[str, float]:
    """Return a run's change on its held-out prompts, by mode and measure: `before/greedy/reward`, `after/...` and
    `change/...`, each with its standard error (`_stderr`), and the p value of the change (`_p`)."""
    summary: dict[str, float] = {}
    for when, evaluations in (("before", before), ("after", after)):
        for mode, each in evaluations.items():
            for measure in each.measures:
                summary[f"{when}/{mode}/{measure}"] = each.measured(measure)
                summary[f"{when}/{mode}/{measure}_stderr"] = each.standard_error(measure)
    for name, test in paired_tests(after, before).items():
        summary[f"change/{name}"] = test.difference
        summary[f"change/{name}_stderr"] = test.standard_error
        summary[f"change/{name}_p"] = test.p_value
    return {name: value for name, value in summary.items() if not math.isnan(value)}


def _sign_flips(differences: Sequence[float], *, seed: int) -> float:
    """Return the p value of the sign-flip test, of differences that are not 0."""
    count = len(differences)
    if not count:
        return 1.0
    sizes = [abs(each) for each in differences]
    if max(sizes) - min(sizes) < _SAME:
        more = max(won := sum(each > 0 for each in differences), count - won)
        return min(1.0, 2 * sum(math.comb(count, i) for i in range(more, count + 1)) / 2**count)
    import numpy as np

    values = np.array(differences)
    seen = abs(values.sum()) * (1 - _SAME) - _SAME

    def as_far(signs: Any) -> int:  # [flips, differences] of 0 and 1
        return int((np.abs((signs * 2.0 - 1.0) @ values) >= seen).sum())

    if count <= _EXACT:
        return as_far((np.arange(2**count)[:, None] >> np.arange(count)) & 1) / 2**count
    random, rows = np.random.default_rng(seed), max(1, _FLIPPED_AT_ONCE // count)
    sizes_of = [min(rows, _FLIPS - at) for at in range(0, _FLIPS, rows)]
    found = sum(as_far(random.integers(0, 2, size=(size, count))) for size in sizes_of)
    return (found + 1) / (_FLIPS + 1)


def _without_aborted(group: RolloutGroup) -> RolloutGroup:
    """Return the groups with aborted completions as failed: they say nothing about the policy."""
    return replace(
        group,
        rollouts=tuple(
            replace(rollout, error="the completion was aborted")
            if rollout.turns and rollout.completion.finish_reason is FinishReason.ABORT
            else rollout
            for rollout in group.rollouts
        ),
    )


def _without_rewards(group: RolloutGroup) -> RolloutGroup:
    """Return the group without what its environment gave."""
    return replace(group, rollouts=tuple(replace(each, rewards={}, reward=None) for each in group.rollouts))


def _rewards(group: RolloutGroup) -> list[float]:
    return [rollout.reward for rollout in group.rollouts if rollout.reward is not None]


def _known(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _mean(values: Iterable[float]) -> float:
    """Return the mean of the values that are not NaN; NaN without any."""
    known = _known(values)
    return math.fsum(known) / len(known) if known else math.nan


def save_evaluations(run_dir: Path, step: int, evaluations: Mapping[str, Evaluation], *, again: bool = False) -> None:
    """Write the evaluations at `step`, one file for each mode; a second call for a step replaces them. `again`: the
    chosen version was evaluated with other seeds, and the files go next to those by which it was chosen. Raises
    StorageError."""
    directory = run_dir / EVALUATIONS
    with files.writing(f"writing the evaluation at step {step}"):
        directory.mkdir(exist_ok=True)
        for mode, evaluation in evaluations.items():
            head = {"version": str(evaluation.version), "success": evaluation.success}
            lines = [head, *map(group_to_json, evaluation.groups)]
            for name, of_groups in (("answers", evaluation.answers), ("training", evaluation.training)):
                for line, values in zip(lines[1:], of_groups, strict=False):
                    line[name] = values
            text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
            files.replace(directory / f"{_named(step, again)}.{mode}.jsonl", text)


_FILE = re.compile(r"step_(\d+)\.(.+)\.jsonl")


def _named(step: int, again: bool) -> str:
    return f"{'again' if again else 'step'}_{step:06d}"


def evaluation_files(run_dir: Path) -> dict[str, dict[int, Path]]:
    """Return the files of `save_evaluations`, by mode and then by step; those of other seeds are left out."""
    found: dict[str, dict[int, Path]] = {}
    for path in sorted((run_dir / EVALUATIONS).glob("step_*.jsonl")):
        if match := _FILE.fullmatch(path.name):
            found.setdefault(match[2], {})[int(match[1])] = path
    return found


def load_evaluations(run_dir: Path, step: int, *, again: bool = False) -> dict[str, Evaluation]:
    """Return the inverse of `save_evaluations`. Raises DataError for a file that is none."""
    found = {}
    for path in sorted((run_dir / EVALUATIONS).glob(f"{_named(step, again)}.*.jsonl")):
        mode = path.name.split(".")[1]
        head, *groups = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        found[mode] = Evaluation(
            mode=mode,
            version=PolicyVersion.parse(head["version"]),
            success=head["success"],
            groups=tuple(map(group_from_json, groups)),
            answers=tuple(tuple(group["answers"]) for group in groups if "answers" in group),
            training=tuple(tuple(group["training"]) for group in groups if "training" in group),
        )
    return found
