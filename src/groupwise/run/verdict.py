"""May one version take another's place? Both on the same held-out prompts; the gate of a server (`server.gate`) and
`promote` of a run (`run.promote`) ask the same.

    measured    an evaluation -> what one version did on each prompt
    judge       two of these, and a KL -> a Verdict; within_bounds: what of it needs no reward
    divergence  the KL of one version from the other, on what the first sampled

With d_p the difference of the mean rewards of prompt p, the lower bound of a one-sided bootstrap interval of the mean
of d (resampled over prompts, Efron 1979) must be at least -margin: non-inferiority. `evaluate.paired` asks another
question, and neither answers the other's: flipping signs tests exactly, with any number of prompts, that two policies
are equally good, but its null hypothesis is symmetric around 0, and cannot be moved to -margin where the differences
are 0, 1 and -1.

Losses within the margin would add up over versions that are each compared with the one before, so `judge` compares with
the best one so far, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from groupwise.config.promote import Bounds
from groupwise.run.evaluate import Evaluation
from groupwise.sampler import Scores
from groupwise.types import PolicyVersion

if TYPE_CHECKING:
    import numpy as np

RESAMPLES = 2000
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one version did on the held-out prompts: the mean reward of each prompt (nan where none could be scored),
    and the mean length of its completions (of an episode all that the policy said) in tokens."""

    rewards: Sequence[float]
    length: float

    @property
    def reward(self) -> float:
        """The mean over the prompts that could be scored; nan without any."""
        known = [each for each in self.rewards if math.isfinite(each)]
        return fmean(known) if known else math.nan

    def as_dict(self) -> dict[str, Any]:
        """Return what is for `from_dict`; goes through JSON, which has no nan."""
        return {"rewards": [each if math.isfinite(each) else None for each in self.rewards], "length": self.length}

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any]) -> Measured:
        """Return the inverse of `as_dict`; other keys do no harm."""
        return cls(rewards=[math.nan if each is None else each for each in kept["rewards"]], length=kept["length"])


def measured(evaluation: Evaluation) -> Measured:
    """Return what the evaluated version did."""
    said = [
        sum(len(turn.completion.token_ids) for turn in rollout.turns)
        for group in evaluation.groups
        for rollout in group.rollouts
    ]
    return Measured(rewards=evaluation.values("reward"), length=fmean(said) if said else 0.0)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a version passes, why, and what was measured."""

    passed: bool
    reason: str
    numbers: Mapping[str, float] = field(default_factory=dict)


def resampled_means(values: Sequence[float], *, seed: int = SEED) -> np.ndarray:
    """Return the means of RESAMPLES samples, each as many as `values` drawn from them with replacement; [RESAMPLES]."""
    import numpy as np

    known = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(0, len(known), size=(RESAMPLES, len(known)))
    return known[drawn].mean(axis=1)


def lower_bound(differences: Sequence[float], *, confidence: float, seed: int = SEED) -> float:
    """Return the one-sided lower confidence bound of the mean of paired differences, by the percentile bootstrap."""
    import numpy as np

    return float(np.quantile(resampled_means(differences, seed=seed), 1.0 - confidence))


@dataclass(frozen=True, kw_only=True)
class Margin:
    """How two versions compare on the prompts that were scored for both: the mean rewards, the mean of the paired
    differences, and its lower confidence bound."""

    prompts: int
    new: float
    old: float
    difference: float
    bound: float


def margin_between(new: Measured, old: Measured, *, confidence: float) -> Margin | None:
    """None if no prompt was scored for both."""
    both = [(n, o) for n, o in zip(new.rewards, old.rewards, strict=True) if math.isfinite(n) and math.isfinite(o)]
    if not both:
        return None
    differences = [n - o for n, o in both]
    return Margin(
        prompts=len(both),
        new=fmean(n for n, _ in both),
        old=fmean(o for _, o in both),
        difference=fmean(differences),
        bound=lower_bound(differences, confidence=confidence),
    )


def judge(
    new: Measured,
    old: Measured,
    *,
    kl: float | None,
    bounds: Bounds,
    best: tuple[str, Measured] | None = None,
    key: str = "gate",
    other: str = "the active version",
    prompts: str = "held-out",
) -> Verdict:
    """Return whether `new` may take the place of `old`, which messages call `other`, on what they call `prompts`. `kl`
    is in nats a token; None was not measured. `best` is the best version that ever passed, by its name, if that is not
    `old`: `new` must be non-inferior to both. `key` is where the bounds stand in the configuration."""
    found = margin_between(new, old, confidence=bounds.confidence)
    beside = margin_between(new, best[1], confidence=bounds.confidence) if best else None
    if found is None or (best is not None and beside is None):
        return Verdict(passed=False, reason=f"no {prompts} prompt could be scored for both versions")
    beyond, bounded = within_bounds(new, old, kl=kl, bounds=bounds, key=key, other=other)
    numbers = {
        "prompts": float(found.prompts),
        "reward": found.new,
        "reward_active": found.old,
        "difference": found.difference,
        "lower_bound": found.bound,
        **bounded,
        **({} if beside is None else {"reward_best": beside.old, "lower_bound_best": beside.bound}),
    }
    problems = []
    margins = [(other, found)]
    if best is not None and beside is not None:
        margins.append((f"{best[0]}, the best that went live,", beside))
    for name, margin in margins:
        if margin.bound < -bounds.margin:
            problems.append(
                f"its {prompts} reward is {margin.new:.3f}, that of {name} {margin.old:.3f}; it may be "
                f"{-margin.bound:.3f} lower (confidence {bounds.confidence:.0%}), and {key}.margin is {bounds.margin:g}"
            )
    problems += beyond
    passed = f"{prompts} reward {found.new:.3f}, before {found.old:.3f}"
    return Verdict(passed=not problems, reason="; ".join(problems) or passed, numbers=numbers)


def within_bounds(
    new: Measured,
    old: Measured,
    *,
    kl: float | None,
    bounds: Bounds,
    key: str = "gate",
    other: str = "the active version",
) -> tuple[list[str], dict[str, float]]:
    """Return what is wrong with `new` that needs no reward, its KL and its length, and the numbers; arguments as
    `judge`."""
    ratio, problems = new.length / old.length if old.length else 1.0, list[str]()
    if kl is not None and bounds.max_kl is not None and not kl <= bounds.max_kl:
        problems.append(f"its KL from {other} is {kl:.4f} nats a token; {key}.max_kl is {bounds.max_kl:g}")
    most = bounds.max_length_ratio
    if most is not None and not 1 / most <= ratio <= most:
        words = f"its completions are {ratio:.2f} times as long as those of {other}"
        problems.append(f"{words}; {key}.max_length_ratio is {most:g}")
    return problems, {"length_ratio": ratio, **({} if kl is None else {"kl": kl})}


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
    """log p_new - log p_old of each token of a completion, in nats. Both must be loaded. Blocks; for a thread."""
    ours, theirs = (
        engine.score(prompt_ids, completion_ids, version, temperature=temperature) for version in (new, old)
    )
    return [a - b for a, b in zip(ours, theirs, strict=True)]
