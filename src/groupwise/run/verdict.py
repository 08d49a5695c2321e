"""May one version take another's place? Both on the same held-out prompts; the gate of a server (`server.gate`) and
`promote` of a run (`run.promote`) ask the same.

    measured    an evaluation -> what one version did on each prompt
    judge       two of these, and a KL -> a Verdict; within_bounds: what of it needs no reward
    divergence  the KL of one version from the other, on what the first sampled

With d_p the difference of the mean rewards of prompt p, the lower confidence bound of the mean of d must be at least
-margin: non-inferiority, by a bound that holds with few prompts and rare losses, too (`algo.evidence`). Versions that
are judged on the same prompts share one error (`Look`): were each judged at the full one, the best of twenty lucky
versions would pass. `evaluate.paired` asks another question, and neither answers the other's: flipping signs tests
exactly, with any number of prompts, that two policies are equally good, but its null hypothesis is symmetric around 0,
and cannot be moved to -margin where the differences are 0, 1 and -1.

Losses within the margin would add up over versions that are each compared with the one before, so `judge` compares with
the best one so far, too; and lengths and divergences, so that these have a second bound, from where it all began.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from groupwise.algo.evidence import lower_bound, p_at_most, sample_needed, share_of_error
from groupwise.config.promote import Bounds, LastingBounds
from groupwise.run.evaluate import Evaluation
from groupwise.sampler import Scores
from groupwise.types import PolicyVersion

SLACK = 1e-6  # by which rounding may take a reward out of its range

Limit = tuple[str, float | None]  # a key of the configuration, and its value; None does not limit


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of one version on the held-out prompts: the mean reward of each prompt (nan where none could be
    scored), and the mean length of its completions (of an episode all that the policy said) in tokens."""

    rewards: Sequence[float]
    length: float

    @property
    def reward(self) -> float:
        """Return the mean over the prompts that could be scored; nan without any."""
        known = [each for each in self.rewards if math.isfinite(each)]
        return fmean(known) if known else math.nan

    def as_dict(self) -> dict[str, Any]:
        """Return the values for `from_dict`; fit for JSON, which has no nan."""
        return {"rewards": [each if math.isfinite(each) else None for each in self.rewards], "length": self.length}

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any]) -> Measured:
        """Return the inverse of `as_dict`; other keys do no harm."""
        return cls(rewards=[math.nan if each is None else each for each in kept["rewards"]], length=kept["length"])


def measured(evaluation: Evaluation) -> Measured:
    """Return the results of the evaluated version."""
    said = [
        sum(len(turn.completion.token_ids) for turn in rollout.turns)
        for group in evaluation.groups
        for rollout in group.rollouts
    ]
    return Measured(rewards=evaluation.values("reward"), length=fmean(said) if said else 0.0)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The decision whether a version passes, with the reason and the numbers that were measured."""

    passed: bool
    reason: str
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Look:
    """A look at held-out prompts: the `number` of it, 1 first, and the chance `alpha` at which it may let a version
    pass that is too bad."""

    number: int
    alpha: float

    @classmethod
    def of(cls, bounds: Bounds, number: int) -> Look:
        """Return look number `number`, with its share of the error when the number of looks is not known in advance."""
        return cls(number=number, alpha=share_of_error(1 - bounds.confidence, number))

    @classmethod
    def only(cls, bounds: Bounds) -> Look:
        """Return the only look that there will be at these prompts."""
        return cls(number=1, alpha=1 - bounds.confidence)

    @property
    def told(self) -> str:
        several = f"look {self.number} at these prompts, " if self.number > 1 else ""
        return f"{several}confidence {1 - self.alpha:.6g}"


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Two versions' results on the same prompts with the same draws, and the `name` of the `old` one in messages."""

    name: str
    new: Measured
    old: Measured


@dataclass(frozen=True, kw_only=True)
class Start:
    """A version that another one came from: its name in messages, the mean length of its completions, and the KL of the
    new version from it in nats a token; None was not measured."""

    name: str
    length: float
    kl: float | None = None


@dataclass(frozen=True, kw_only=True)
class Margin:
    """The comparison of two versions on the prompts that were scored for both: the mean rewards, the mean of the paired
    differences, its lower confidence bound, and how many prompts with such differences would let the new one pass; None
    if no number would."""

    prompts: int
    new: float
    old: float
    difference: float
    bound: float
    passed: bool
    needed: int | None


def margin_between(new: Measured, old: Measured, *, bounds: Bounds, look: Look) -> Margin | None:
    """Return the comparison of both means, and whether it passes at this look. None if no prompt was scored for
    both."""
    both = [(n, o) for n, o in zip(new.rewards, old.rewards, strict=True) if math.isfinite(n) and math.isfinite(o)]
    if not both:
        return None
    differences, worst = [n - o for n, o in both], bounds.worst
    passed = p_at_most(differences, -bounds.margin, worst=worst) <= look.alpha
    return Margin(
        prompts=len(both),
        new=fmean(n for n, _ in both),
        old=fmean(o for _, o in both),
        difference=fmean(differences),
        bound=lower_bound(differences, alpha=look.alpha, worst=worst),
        passed=passed,
        needed=len(both) if passed else sample_needed(differences, -bounds.margin, alpha=look.alpha, worst=worst),
    )


def outside(measures: Sequence[Measured], bounds: Bounds) -> float | None:
    """Return a reward that is not within `reward_range`; None if all are."""
    low, high = bounds.reward_range
    found = (each for measured in measures for each in measured.rewards)
    return next((each for each in found if math.isfinite(each) and not low - SLACK <= each <= high + SLACK), None)


def too_few(prompts: int, bounds: Bounds, look: Look, *, key: str) -> str | None:
    """Return that even a version that answers every prompt as before could not pass this look, and what would help;
    None if it could."""
    alike = [0.0] * max(1, prompts)
    if p_at_most(alike, -bounds.margin, worst=bounds.worst) <= look.alpha:
        return None
    needed = sample_needed(alike, -bounds.margin, alpha=look.alpha, worst=bounds.worst)
    margin = -lower_bound(alike, alpha=look.alpha, worst=bounds.worst)
    return (
        f"with {prompts} held-out prompts ({look.told}) no version passes that is not clearly better: one that answers "
        f"all as before may still be {margin:.3f} worse, and {key}.margin is {bounds.margin:g}; give "
        f"{'more' if needed is None else needed} prompts, or {key}.margin {math.ceil(1000 * margin) / 1000:g}"
    )


def judge(
    new: Measured,
    old: Measured,
    *,
    kl: float | None,
    bounds: Bounds,
    look: Look | None = None,
    best: Beside | None = None,
    start: Start | None = None,
    key: str = "gate",
    other: str = "the active version",
    prompts: str = "held-out",
) -> Verdict:
    """Return whether `new` may take the place of `old`, which messages call `other`, on what they call `prompts`. `kl`
    is in nats a token; None was not measured. `look` is how often the prompts have been looked at; None is the only
    time. `best` is the best version that ever passed, if that is not `old`: `new` must be non-inferior to both, each at
    the error of the look, which as a whole does not grow by it. `start` has the bounds' totals. `key` is where the
    bounds stand in the configuration."""
    look = look or Look.only(bounds)
    measures = [new, old, *([] if best is None else [best.new, best.old])]
    if (beyond_range := outside(measures, bounds)) is not None:
        words = f"a {prompts} reward is {beyond_range:g}, outside {key}.reward_range {list(bounds.reward_range)}"
        return Verdict(passed=False, reason=f"{words}; give the range that rewards can have")
    found = margin_between(new, old, bounds=bounds, look=look)
    beside = margin_between(best.new, best.old, bounds=bounds, look=look) if best else None
    if found is None or (best is not None and beside is None):
        return Verdict(passed=False, reason=f"no {prompts} prompt could be scored for both versions")
    beyond, bounded = within_bounds(new, old, kl=kl, bounds=bounds, start=start, key=key, other=other)
    numbers = {
        "prompts": float(found.prompts),
        "reward": found.new,
        "reward_active": found.old,
        "difference": found.difference,
        "lower_bound": found.bound,
        "margin": bounds.margin,
        "look": float(look.number),
        "error": look.alpha,
        **bounded,
        **({} if found.needed is None else {"prompts_needed": float(found.needed)}),
        **({} if beside is None else {"reward_best": beside.old, "lower_bound_best": beside.bound}),
    }
    problems = []
    margins = [(other, found)]
    if best is not None and beside is not None:
        margins.append((f"{best.name}, the best that went live,", beside))
    for name, margin in margins:
        if not margin.passed:
            problems.append(
                f"its {prompts} reward is {margin.new:.3f}, that of {name} {margin.old:.3f}; it may be "
                f"{-margin.bound:.3f} lower ({look.told}), and {key}.margin is {bounds.margin:g}: "
                f"{_would_decide(margin, prompts, key)}"
            )
    problems += beyond
    passed = f"{prompts} reward {found.new:.3f}, before {found.old:.3f}"
    return Verdict(passed=not problems, reason="; ".join(problems) or passed, numbers=numbers)


def _would_decide(margin: Margin, prompts: str, key: str) -> str:
    """Return what would let such a version pass."""
    wider = f"{key}.margin {math.ceil(-1000 * margin.bound) / 1000:g}"
    if margin.needed is None:
        return f"no number of {prompts} prompts like these would do, as it is lower by more; {wider} would"
    return f"{margin.needed} {prompts} prompts like these {margin.prompts} would do, or {wider}"


def within_bounds(
    new: Measured,
    old: Measured,
    *,
    kl: float | None,
    bounds: Bounds,
    start: Start | None = None,
    key: str = "gate",
    other: str = "the active version",
) -> tuple[list[str], dict[str, float]]:
    """Return what is wrong with `new` that needs no reward, its KL and its length, and the numbers; arguments as
    `judge`."""
    before = Start(name=other, length=old.length, kl=kl)
    most = (f"{key}.max_kl", bounds.max_kl), (f"{key}.max_length_ratio", bounds.max_length_ratio)
    problems, numbers = drifted(new, before, *most)
    if start is not None and isinstance(bounds, LastingBounds):
        most = (
            (f"{key}.max_kl_total", bounds.max_kl_total),
            (f"{key}.max_length_ratio_total", bounds.max_length_ratio_total),
        )
        more, its = drifted(new, start, *most)
        problems += more
        numbers |= {f"{name}_total": value for name, value in its.items()}
    return problems, numbers


def drifted(new: Measured, before: Start, max_kl: Limit, max_length_ratio: Limit) -> tuple[list[str], dict[str, float]]:
    """Return why `new` has drifted too far from earlier versions (empty if not), and the numbers."""
    ratio, problems = new.length / before.length if before.length else 1.0, list[str]()
    name, most = max_kl
    if most is not None and before.kl is not None and not before.kl <= most:
        problems.append(f"its KL from {before.name} is {before.kl:.4f} nats a token; {name} is {most:g}")
    name, most = max_length_ratio
    if most is not None and not 1 / most <= ratio <= most:
        words = f"its completions are {ratio:.2f} times as long as those of {before.name}"
        problems.append(f"{words}; {name} is {most:g}")
    return problems, {"length_ratio": ratio, **({} if before.kl is None else {"kl": before.kl})}


def divergence(
    engine: Scores, evaluation: Evaluation, new: PolicyVersion, old: PolicyVersion, *, temperature: float
) -> float:
    """Return the mean over the tokens that `new` sampled of log p_new - log p_old, at `temperature`: an estimate of
    KL(new || old) in nats a token, 0 without tokens. Both versions must be loaded. Blocks; for a thread."""
    gaps = list[float]()
    for group in evaluation.groups:
        for turn in (turn for rollout in group.rollouts for turn in rollout.turns):
            ids = (turn.prompt_ids, turn.completion.token_ids)
            gaps += gaps_between(engine, *ids, new, old, temperature=temperature)
    return fmean(gaps) if gaps else 0.0


def gaps_between(
    engine: Scores,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    new: PolicyVersion,
    old: PolicyVersion,
    *,
    temperature: float,
) -> list[float]:
    """Return log p_new - log p_old of each token of a completion, in nats. Both must be loaded. Blocks: call it in a
    thread."""
    ours, theirs = (
        engine.score(prompt_ids, completion_ids, version, temperature=temperature) for version in (new, old)
    )
    return [a - b for a, b in zip(ours, theirs, strict=True)]
