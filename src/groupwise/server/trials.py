"""Decides when a trial of a version ends, and how, by pure functions of what was counted.

    judge_shadow  of a shadow (`server.shadow`): pairs of answers, looked at when there are enough
    judge_canary  of a canary: ratings and failures under two versions, looked at all the time
    in_turns      of what one rater says of one version in a row, the mean
    ratings_needed  how many ratings a canary takes
    compared_ratings  what a canary's end is told with: both versions' ratings, counted and averaged

Each outcome has an error that holds (`algo.evidence`): with confidence c a canary that is worse by the margin goes live
with a chance of 1 - c at most, and one that is as good is rolled back for its ratings with no larger one, however
often they are looked at in between. Where neither is known when the ratings or the time are over, nothing is known, and
`undecided` says what then.

Ratings of the two versions come mixed. They are compared in blocks, each as short as it can be: the mean of the new
version's ratings in it less that of the active one's. So ratings that are worse at night are worse for both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Literal

from groupwise.algo.evidence import failure_evidence, length_needed, log_wealth
from groupwise.config.learn import CanaryConfig, ShadowConfig
from groupwise.run.verdict import Measured, Verdict, judge, within_bounds
from groupwise.server.policies import Trial
from groupwise.store.feedback import Rater

Outcome = Literal["go on", "promote", "roll back"]
Ratings = Sequence[tuple[int, float]]  # the number under which each came, and how good the answer was, from 0 to 1


def failing(requests: tuple[int, int], errors: tuple[int, int], *, max_errors: int, alpha: float) -> str | None:
    """Return why a version on trial fails too often, (under the new, under the old); None if it does not."""
    if errors[0] < max_errors or failure_evidence(errors, requests) < 1 / alpha:
        return None
    share = errors[1] / requests[1] if requests[1] else 0.0
    return f"{errors[0]} of {requests[0]} requests failed under it, {share:.1%} under the active one"


def judge_shadow(trial: Trial, *, config: ShadowConfig, scored: bool) -> tuple[Outcome, Verdict]:
    """Return the decision about a shadow, and its reason. `scored`: its pairs have rewards."""
    requests, errors = ((each[True], each[False]) for each in (trial.requests, trial.errors))
    if why := failing(requests, errors, max_errors=config.max_errors, alpha=1 - config.confidence):
        return "roll back", Verdict(passed=False, reason=why)
    pairs = trial.pairs
    if len(pairs) < config.requests:
        told = f"{len(pairs)} of {config.requests} pairs of answers are compared"
        if trial.seconds < 60 * config.minutes:
            return "go on", Verdict(passed=False, reason=told)
        passed = config.undecided == "promote"
        reason = f"{trial.seconds / 60:.0f} minutes were over, and {told} (shadow.undecided is {config.undecided})"
        return "promote" if passed else "roll back", Verdict(passed=passed, reason=reason)
    new, old = (
        Measured(
            rewards=[math.nan if pair.rewards is None else pair.rewards[side] for pair in pairs],
            length=fmean(pair.tokens[side] for pair in pairs),
        )
        for side in (0, 1)
    )
    gaps = [(pair.gap, pair.tokens[0]) for pair in pairs if pair.gap is not None]
    kl = sum(gap for gap, _ in gaps) / max(1, sum(tokens for _, tokens in gaps)) if gaps else None
    if scored:
        verdict = judge(new, old, kl=kl, bounds=config, key="gate.shadow", prompts="shadowed")
    else:
        problems, numbers = within_bounds(new, old, kl=kl, bounds=config, key="gate.shadow")
        passed = f"{len(pairs)} answers are within the bounds of gate.shadow"
        numbers = {"prompts": float(len(pairs)), **numbers}
        verdict = Verdict(passed=not problems, reason="; ".join(problems) or passed, numbers=numbers)
    return "promote" if verdict.passed else "roll back", verdict


def in_turns(
    new: Sequence[tuple[int, float, Rater]], old: Sequence[tuple[int, float, Rater]]
) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """Return the ratings of both versions (number, vote, rater), of what a named rater said of one of them before it
    rated the other one the mean, under the first one's number. Who rates without a name is not known: each counts."""
    merged = sorted([(*each, True) for each in new] + [(*each, False) for each in old], key=lambda each: each[0])
    turns, latest = list[tuple[int, bool, list[float]]](), dict[Rater, tuple[int, bool, list[float]]]()
    for came, vote, rater, is_new in merged:
        turn = latest.get(rater)
        if turn is None or turn[1] is not is_new or rater[1] is None:
            turn = latest[rater] = (came, is_new, [])
            turns.append(turn)
        turn[2].append(vote)
    both = [[(came, fmean(said)) for came, side, said in turns if side is is_new] for is_new in (True, False)]
    return both[0], both[1]


def compared(new: Ratings, old: Ratings) -> list[float]:
    """Return how much higher the new version was rated, block by block, in the order in which ratings came."""
    merged = sorted([(came, True, vote) for came, vote in new] + [(came, False, vote) for came, vote in old])
    differences, block = list[float](), dict[bool, list[float]]({True: [], False: []})
    for _, is_new, vote in merged:
        block[is_new].append(vote)
        if block[True] and block[False]:
            differences.append(fmean(block[True]) - fmean(block[False]))
            block = {True: [], False: []}
    return differences


def ratings_needed(config: CanaryConfig) -> int:
    """Return how many ratings of its answers a version that is rated as the active one takes to go live in about four
    of five cases, where one rating in two is a 1 and the others are 0, which is the most that ratings can differ."""
    others = max(1, round((1 - config.share) / config.share))
    values = [up - k / others for up in (0, 1) for k in range(others + 1)]
    chances = [math.comb(others, k) / 2 ** (others + 1) for _ in (0, 1) for k in range(others + 1)]
    needed = length_needed(values, chances, -config.margin, alpha=1 - config.confidence, worst=-1.0)
    assert needed is not None, "their mean is 0, which is above -margin"
    return needed


def compared_ratings(new: Ratings, old: Ratings) -> dict[str, float]:
    """Return how many ratings the version on trial and the active one got, and their means from 0 to 1, where there
    are any."""
    told = {"ratings": float(len(new)), "ratings_active": float(len(old))}
    means = {"rating": new, "rating_active": old}
    return told | {name: fmean(vote for _, vote in each) for name, each in means.items() if each}


def judge_canary(
    new: Ratings,
    old: Ratings,
    *,
    config: CanaryConfig,
    minutes: float,
    requests: tuple[int, int] = (0, 0),
    errors: tuple[int, int] = (0, 0),
) -> tuple[Outcome, str]:
    """Return the decision about a canary, and its reason. `new` and `old` are the ratings that both versions got since
    it began; `requests` and `errors` are (under the new, under the old)."""
    alpha = 1 - config.confidence
    if why := failing(requests, errors, max_errors=config.max_errors, alpha=alpha):
        return "roll back", why
    means = [fmean(vote for _, vote in each) if each else math.nan for each in (new, old)]
    told = f"mean rating {means[0]:.3f} of {len(new)}, that of the active version {means[1]:.3f} of {len(old)}"
    differences, sure = compared(new, old), math.log(1 / alpha)
    if log_wealth([-each for each in differences], 0.0, worst=-1.0) >= sure:
        return "roll back", f"{told}: surely lower ({config.confidence:.0%})"
    if log_wealth(differences, -config.margin, worst=-1.0) >= sure:
        return "promote", f"{told}: surely not lower by more than {config.margin:g} ({config.confidence:.0%})"
    most, over = config.ratings or ratings_needed(config), minutes >= config.minutes
    if not over and len(new) < most:
        return "go on", told
    ended = f"{minutes:.0f} minutes were over with {len(new)} ratings of it and {len(old)} of the active version"
    words = f"not known: {told}" if not over else f"not known: {ended}"
    outcome: Outcome = "promote" if config.undecided == "promote" else "roll back"
    return outcome, f"{words} (canary.undecided is {config.undecided})"
