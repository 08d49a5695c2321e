"""Should a version take the place of the model that is there? The answer is replace, keep or not known.

    decide    what both did on the same verified prompts -> better, not better or open, with an interval; told alone
    planned   how many verified answers a decision takes, by how they differ on other prompts
    answer    that, the audit of the log, and what the log itself says -> the answer, why, and what would tell more

With d_p the difference of the mean scores of prompt p, from -1 to 1, *better* is a lower confidence bound of the mean
of d above 0, and *not better* an upper one below `gain`, what a replacement must bring to be worth it. Both bounds are
`algo.evidence`'s, which hold with few prompts, too; each errs at most at the chance `alpha` of its look, and all looks
at the same verified answers together at most at 5 % (`share_of_error`, as the number of looks is not known in advance).

A log's own answers never prove that a model is better, because a person who writes into the log can write both the
training prompts and the test. They can show that it is worse: keeping the present model is the safe side.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, pstdev
from typing import Literal, NamedTuple

from groupwise.algo.evidence import lower_bound, p_at_most, sample_needed, share_of_error
from groupwise.tasks.logs.phrases import ALPHA
from groupwise.tasks.logs.truth import MOST_WRONG, Audit

WORST = -1.0  # the worst difference of two scores from 0 to 1
POWER = 0.8
ASSUMED = (0.15, 0.4)  # mean and standard deviation of the differences, where nothing is known of them
PRUDENT = 0.5  # of what a log says a version gains, which learned to please it, is planned with
FEWEST = 60  # verified answers that are asked for, at least

Says = Literal["better", "not better", "open"]
Known = Literal["replace", "keep", "not known"]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Two models on the same prompts: their mean scores, the mean difference with its interval, each end at `alpha`,
    what that says, and how many prompts with such differences would say something; None if no number would."""

    prompts: int
    new: float
    old: float
    difference: float
    low: float
    high: float
    alpha: float
    says: Says
    needed: int | None


def decide(new: Sequence[float], old: Sequence[float], *, gain: float, alpha: float) -> Compared | None:
    """Return how two models compare by their mean scores on each prompt, from 0 to 1; None where no prompt has both."""
    both = [(n, o) for n, o in zip(new, old, strict=True) if math.isfinite(n) and math.isfinite(o)]
    if not both:
        return None
    gains = [n - o for n, o in both]
    losses = [-each for each in gains]
    says = told(gains, gain=gain, alpha=alpha)
    would = (
        sample_needed(gains, 0.0, alpha=alpha, worst=WORST),
        sample_needed(losses, -gain, alpha=alpha, worst=WORST),
    )
    return Compared(
        prompts=len(both),
        new=fmean(n for n, _ in both),
        old=fmean(o for _, o in both),
        difference=fmean(gains),
        low=lower_bound(gains, alpha=alpha, worst=WORST),
        high=-lower_bound(losses, alpha=alpha, worst=WORST),
        alpha=alpha,
        says=says,
        needed=len(both) if says != "open" else min((each for each in would if each is not None), default=None),
    )


def told(gains: Sequence[float], *, gain: float, alpha: float) -> Says:
    """Return the decision by the prompts' differences: better, not better or open."""
    if p_at_most([-each for each in gains], -gain, worst=WORST) <= alpha:
        return "not better"
    return "better" if p_at_most(gains, 0.0, worst=WORST) <= alpha else "open"


def planned(differences: Sequence[float], *, gain: float) -> int:
    """Return about how many verified answers let a first look decide in four of five cases, where prompts differ as
    these do; what a log's own answers say is only good for such a plan."""
    mean, deviation = (fmean(differences), pstdev(differences)) if len(differences) > 1 else ASSUMED
    mean, alpha = PRUDENT * mean, share_of_error(ALPHA, 1)
    away = max(mean, gain - mean)  # from what is to be excluded: no gain, or one that matters
    z = NormalDist().inv_cdf(1 - alpha) + NormalDist().inv_cdf(POWER)
    return max(FEWEST, math.ceil((z * deviation / away) ** 2))


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer, why, and what would be needed to know more."""

    known: Known
    why: tuple[str, ...]
    needs: tuple[str, ...]


class Unsettled(NamedTuple):
    """A doubt that verified answers would settle, and which."""

    why: str
    needs: str


def answer(
    verified: Compared | None,
    logged: Compared | None,
    audited: Audit | None,
    *,
    gain: float,
    worse_where: str | None = None,
    unsettled: Sequence[Unsettled] = (),
) -> Answer:
    """Return whether the new version should replace the present model: replace, keep or not known.

    Args:
        verified: the comparison of both models by verified answers; None without any.
        logged: the comparison by the log's own answers, on the held-out prompts.
        audited: the comparison of the log's answers with verified ones.
        worse_where: what the prompts on which the new version lost have in common.
        unsettled: questions that further verified answers to the log's prompts would settle.
    """
    if verified is None:
        if logged is not None and logged.high < 0:
            return Answer(known="keep", why=("the new version is worse, even by the log's own answers",), needs=())
        why = "no verified answers were given, and a log alone cannot show that the new version is better"
        return Answer(known="not known", why=(why,), needs=())
    doubts = (*_doubts(audited, worse_where), *(each.why for each in unsettled))
    settling = (*_of(audited), *(each.needs for each in unsettled))
    if verified.says == "not better":
        why = "worse" if verified.high < 0 else f"not better by {gain:g}, the least gain for which to replace a model"
        return Answer(known="keep", why=(f"the new version is {why}",), needs=())
    if verified.says == "open":
        needs = (
            "both models score so alike on these answers that no number of such answers would decide"
            if verified.needed is None
            else f"about {verified.needed} verified answers would decide, if more are like these {verified.prompts}"
        )
        why = ("the verified answers do not show whether the new version is better", *doubts)
        return Answer(known="not known", why=why, needs=(needs, *settling))
    if doubts:
        return Answer(
            known="not known", why=("the new version is better by the verified answers, but", *doubts), needs=settling
        )
    why = "the new version is better by verified answers, which do not come from the log"
    return Answer(known="replace", why=(why,), needs=())


def _doubts(audited: Audit | None, worse_where: str | None) -> Iterator[str]:
    """Yield why a model that is better by what is verified is not to be trusted."""
    if audited is None or not audited.checked:
        yield "none of the log's answers, on which it was trained, has been checked"
    elif audited.alike is not None:
        yield f"the log's wrong answers have {audited.alike!r} in their prompts: someone may have planted them"
    elif not audited.passed:
        yield (
            f"{audited.wrong} of {audited.checked} checked answers of the log are wrong, so up to {audited.most:.0%} "
            f"of those that it was trained on may be wrong; this must be below {MOST_WRONG:.0%}"
        )
    if worse_where is not None:
        yield f"it is worse on prompts with {worse_where!r}"


def _of(audited: Audit | None) -> tuple[str, ...]:
    """Return what would make the audit pass, if it is for lack of answers that it does not."""
    if audited is None or not audited.checked:
        return (f"verify {checks_needed(1, 0)} of the log's own prompts; they are in verify.jsonl",)
    if audited.alike is not None or audited.passed:
        return ()
    number = checks_needed(audited.checked - audited.wrong, audited.wrong)
    said = f"check about {number} of the log's answers in all, if the others are right as often as these"
    return () if number is None else (said,)


def checks_needed(right: int, wrong: int) -> int | None:
    """Return how many of a log's answers must be checked for the audit to pass, if they are right as often as these;
    None if no number would do."""
    return sample_needed([1.0] * right + [0.0] * wrong, 1 - MOST_WRONG, alpha=ALPHA, worst=0.0)
