"""When trials of a version end, and how: what each outcome needs, and how often it is wrong."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from groupwise.config.learn import CanaryConfig, ShadowConfig
from groupwise.server.policies import Pair, Trial
from groupwise.server.trials import Ratings, compared, in_turns, judge_canary, judge_shadow, ratings_needed
from groupwise.types import PolicyVersion

# ---- the canary ----


def rated(rng: np.random.Generator, count: int, *, share: float, new: float, old: float) -> tuple[Ratings, Ratings]:
    """Thumbs of both versions as they come, `count` of the new one's, with these chances of being up."""
    mine, others, seq = list[tuple[int, float]](), list[tuple[int, float]](), 0
    while len(mine) < count:
        seq += 1
        if rng.random() < share:
            mine.append((seq, float(rng.random() < new)))
        else:
            others.append((seq, float(rng.random() < old)))
    return mine, others


def ended(mine: Ratings, others: Ratings, config: CanaryConfig, *, every: int = 10) -> str:
    """What becomes of a canary that is looked at after every few ratings."""
    for count in range(every, len(mine) + every, every):
        until = mine[min(count, len(mine)) - 1][0]
        so_far = [each for each in others if each[0] <= until]
        outcome, reason = judge_canary(mine[:count], so_far, config=config, minutes=1)
        if outcome != "go on":
            return "not known" if reason.startswith("not known") else outcome
    raise AssertionError("it has an end")


def test_a_trial_goes_on_until_it_is_sure_and_then_is_promoted_or_rolled_back() -> None:
    canary, many = CanaryConfig(share=0.5), 30

    def alternating(new: float, old: float, count: int = many) -> tuple[Ratings, Ratings]:
        return [(2 * i, new) for i in range(count)], [(2 * i + 1, old) for i in range(count)]

    assert judge_canary(*alternating(1.0, 1.0, 10), config=canary, minutes=1)[0] == "go on"
    assert judge_canary(*alternating(1.0, 1.0), config=canary, minutes=1)[0] == "promote"
    assert judge_canary(*alternating(0.0, 1.0, 10), config=canary, minutes=1)[0] == "roll back"
    assert judge_canary([(i, 1.0) for i in range(12)], [], config=canary, minutes=1)[0] == "go on", "nothing to compare"
    failing = judge_canary([], [], config=canary, minutes=1, requests=(10, 90), errors=(5, 1))
    assert failing[0] == "roll back" and "5 of 10 requests" in failing[1]
    for errors in ((5, 6), (5, 4), (4, 0)):
        assert judge_canary([], [], config=canary, minutes=1, requests=(90, 90), errors=errors)[0] == "go on"


def test_a_trial_of_which_nothing_is_known_ends_as_is_configured() -> None:
    few = ([(1, 1.0), (3, 0.0)], [(2, 1.0), (4, 1.0)])
    for config, minutes in ((CanaryConfig(), 9999.0), (CanaryConfig(ratings=2), 1.0)):
        outcome, reason = judge_canary(*few, config=config, minutes=minutes)
        assert (outcome, reason[:9]) == ("roll back", "not known") and "canary.undecided is reject" in reason
        allowed = config.model_copy(update={"undecided": "promote"})
        assert judge_canary(*few, config=allowed, minutes=minutes)[0] == "promote"
    assert judge_canary(*few, config=CanaryConfig(), minutes=9)[0] == "go on"
    assert judge_canary([], [], config=CanaryConfig(), minutes=9999)[0] == "roll back"


def test_ratings_are_compared_in_blocks_as_they_came() -> None:
    new, old = [(3, 1.0), (4, 0.0), (5, 1.0), (9, 1.0)], [(1, 1.0), (2, 0.0), (6, 1.0)]
    assert compared(new, old) == [0.5, -0.5]
    assert compared(new, []) == []


ANN, BOB, NOBODY = ("", "ann"), ("", "bob"), ("", None)


def test_what_a_rater_says_of_one_version_in_a_row_counts_once() -> None:
    new = [(1, 1.0, ANN), (2, 0.0, ANN), (5, 1.0, ANN), (7, 0.0, NOBODY), (8, 0.0, NOBODY)]
    old = [(3, 1.0, BOB), (4, 0.5, ANN), (6, 0.0, BOB), (9, 1.0, NOBODY)]
    assert in_turns(new, old) == ([(1, 0.5), (5, 1.0), (7, 0.0), (8, 0.0)], [(3, 0.5), (4, 0.5), (9, 1.0)])
    assert in_turns([], old[:1]) == ([], [(3, 1.0)])


def test_a_few_persons_with_habits_do_not_decide_a_canary_by_whom_they_meet() -> None:
    """Twenty persons, half of whom like nothing and half everything, each answered by one version for ten answers: a
    worse version goes live, and one as good is rolled back, no more often than the confidence says."""
    canary, trials = CanaryConfig(share=0.5, margin=0.4, confidence=0.9), 40

    def outcome(random: np.random.Generator, drop: float) -> str:
        likes = random.permutation([0.05, 0.95] * 10)
        said: dict[bool, list[tuple[int, float, tuple[str, str | None]]]] = {True: [], False: []}
        for came in range(0, 2000, 10):
            who, is_new = int(random.integers(20)), bool(random.random() < 0.5)
            chance = likes[who] * (1 - 2 * drop if is_new else 1)
            said[is_new] += [(came + i, float(random.random() < chance), ("", str(who))) for i in range(10)]
            ended = "go on" if came % 80 else judge_canary(*in_turns(*said.values()), config=canary, minutes=1)[0]
            if ended != "go on":
                return ended
        return "go on"

    worse = [outcome(np.random.default_rng([i, 3]), 0.4) for i in range(trials)]
    equal = [outcome(np.random.default_rng([i, 4]), 0.0) for i in range(trials)]
    bound = 0.1 + 2 * (0.1 * 0.9 / trials) ** 0.5
    assert worse.count("promote") / trials <= bound and equal.count("roll back") / trials <= bound
    assert worse.count("roll back") > trials / 4


def test_how_often_a_canary_is_wrong_is_what_its_confidence_says_and_its_power_what_its_end_is_for() -> None:
    canary, trials = CanaryConfig(share=0.1, margin=0.25), 120
    needed = ratings_needed(canary)
    assert 40 < needed < 100
    outcomes = {
        chance: [
            ended(*rated(np.random.default_rng([i, 7]), needed, share=0.1, new=chance, old=0.5), canary)
            for i in range(trials)
        ]
        for chance in (0.5, 0.25)
    }
    error = 0.05 * trials + 3.1 * math.sqrt(0.05 * 0.95 * trials)
    assert outcomes[0.25].count("promote") <= error and outcomes[0.5].count("roll back") <= error
    assert outcomes[0.5].count("promote") >= 0.8 * trials - 3.1 * math.sqrt(0.8 * 0.2 * trials)


def test_a_narrower_margin_needs_more_ratings() -> None:
    needed = [ratings_needed(CanaryConfig(margin=margin)) for margin in (0.05, 0.1, 0.2)]
    assert needed[0] > 3 * needed[1] > 9 * needed[2] > 0
    assert ratings_needed(CanaryConfig(confidence=0.99)) > needed[2]


# ---- the shadow ----


def shadowed(**fields: Any) -> Trial:
    given = {"version": PolicyVersion("a", 2), "against": PolicyVersion("a", 1), "share": 0.5, "since": 0.0, **fields}
    return Trial(stage="shadow", **given)


def pairs_of(count: int, new: float, old: float, *, tokens: tuple[int, int] = (5, 5), gap: float = 0.0) -> list[Pair]:
    return [Pair(rewards=(new, old), tokens=tokens, gap=gap) for _ in range(count)]


def test_a_shadow_is_judged_by_its_pairs_and_its_bounds() -> None:
    shadow = ShadowConfig(requests=20, max_kl=0.5)

    def judged(trial: Trial, *, scored: bool = True) -> tuple[str, str]:
        outcome, verdict = judge_shadow(trial, config=shadow, scored=scored)
        return outcome, verdict.reason

    assert judged(shadowed(pairs=pairs_of(19, 0.0, 1.0))) == ("go on", "19 of 20 pairs of answers are compared")
    assert judged(shadowed(pairs=pairs_of(20, 1.0, 1.0)))[0] == "promote"
    worse = judged(shadowed(pairs=pairs_of(20, 0.0, 1.0)))
    assert worse[0] == "roll back" and "its shadowed reward is 0.000, that of the active version 1.000" in worse[1]
    unscored = [Pair(rewards=None, tokens=(5, 5), gap=0.0)] * 20
    assert judged(shadowed(pairs=unscored), scored=False)[0] == "promote"
    assert judged(shadowed(pairs=unscored))[0] == "roll back", "rewards were asked for"
    for scored, rewards in ((True, (1.0, 1.0)), (False, None)):
        long = [Pair(rewards=rewards, tokens=(50, 5), gap=0.0)] * 20
        far = [Pair(rewards=rewards, tokens=(5, 5), gap=5.0)] * 20
        assert "10.00 times as long" in judged(shadowed(pairs=long), scored=scored)[1]
        assert "KL from the active version is 1.0000 nats a token" in judged(shadowed(pairs=far), scored=scored)[1]
    failed = shadowed(requests={True: 6, False: 90}, errors={True: 5, False: 1})
    assert judged(failed) == ("roll back", "5 of 6 requests failed under it, 1.1% under the active one")


def test_a_shadow_without_traffic_ends_as_is_configured() -> None:
    trial = shadowed(pairs=pairs_of(3, 1.0, 1.0), seconds=61.0)
    for undecided, expected in (("reject", "roll back"), ("promote", "promote")):
        shadow = ShadowConfig(minutes=1.0, undecided=undecided)  # pyright: ignore[reportArgumentType]
        outcome, verdict = judge_shadow(trial, config=shadow, scored=True)
        assert outcome == expected and f"shadow.undecided is {undecided}" in verdict.reason
