"""Whether a version may take another's place: the bound, the margins, the KL and the lengths, and a real evaluation."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from groupwise.config.promote import Bounds
from groupwise.run.evaluate import Evaluation
from groupwise.run.verdict import Measured, divergence, judge, lower_bound, measured
from groupwise.types import Completion, FinishReason, PolicyVersion, Prompt, Rollout, RolloutGroup, Turn


def done(rewards: Sequence[float], length: float = 10.0) -> Measured:
    return Measured(rewards=rewards, length=length)


def test_the_bound_is_below_the_mean_and_covers_it_about_as_often_as_it_says() -> None:
    rng, covered = random.Random(0), 0
    for trial in range(200):
        values = [rng.gauss(0.1, 1.0) for _ in range(60)]
        bound = lower_bound(values, confidence=0.9, seed=trial)
        assert bound < sum(values) / len(values)
        covered += bound <= 0.1
    assert 0.84 <= covered / 200 <= 0.96


def test_what_is_as_good_passes_and_what_is_worse_does_not() -> None:
    old = done([0.0, 1.0] * 50)
    assert judge(old, old, kl=None, bounds=Bounds()).passed
    worse = judge(done([0.0, 0.5] * 50), old, kl=None, bounds=Bounds())
    assert not worse.passed and "0.250" in worse.reason and "gate.margin is 0.02" in worse.reason
    assert judge(done([0.0, 0.5] * 50), old, kl=None, bounds=Bounds(margin=0.5)).passed
    few = judge(done([0.0, 1.0, 1.0, 0.5]), done([1.0, 0.0, 1.0, 0.5]), kl=None, bounds=Bounds())
    assert not few.passed, "as good on average, and nothing says so with confidence"


def test_kl_and_length_have_bounds_and_prompts_without_a_score_do_not_count() -> None:
    old = done([1.0] * 8)
    far = judge(old, old, kl=0.2, bounds=Bounds(max_kl=0.1))
    assert not far.passed and "0.2000 nats" in far.reason and far.numbers["kl"] == 0.2
    for length in (25.0, 4.0):
        assert "max_length_ratio" in judge(done([1.0] * 8, length), old, kl=None, bounds=Bounds()).reason
    nan = float("nan")
    assert judge(done([1.0, nan]), done([1.0, 0.0]), kl=None, bounds=Bounds()).numbers["prompts"] == 1
    assert not judge(done([nan]), done([1.0]), kl=None, bounds=Bounds()).passed


def test_what_is_as_good_as_the_active_version_and_worse_than_the_best_does_not_pass() -> None:
    best, active, new = ([1.0] * k + [0.0] * (100 - k) for k in (100, 98, 96))
    options = Bounds(margin=0.05)
    assert judge(done(new), done(active), kl=None, bounds=options).passed
    refused = judge(done(new), done(active), kl=None, bounds=options, best=("a@1", done(best)))
    assert not refused.passed and "a@1, the best that went live" in refused.reason
    assert "of the active version" not in refused.reason and refused.numbers["reward_best"] == 1.0
    assert judge(done(active), done(active), kl=None, bounds=options, best=("a@1", done(best))).passed


@given(st.lists(st.floats(0, 1), min_size=2, max_size=30), st.floats(0, 0.5))
def test_a_version_is_never_refused_for_being_better_everywhere(rewards: list[float], gain: float) -> None:
    better = [min(1.0, each + gain) for each in rewards]
    assert judge(done(better), done(rewards), kl=None, bounds=Bounds()).passed


# ---- of evaluations ----


def rollout(tokens: tuple[int, ...], reward: float | None) -> Rollout:
    said = Completion(token_ids=tokens, logprobs=(-1.0,) * len(tokens), text="", finish_reason=FinishReason.STOP)
    return Rollout(turns=(Turn((9,), said),), reward=reward, error=None if reward is not None else "away")


def evaluation(*groups: Sequence[Rollout]) -> Evaluation:
    made = [RolloutGroup(prompt=Prompt(id=str(i), text=""), rollouts=tuple(each)) for i, each in enumerate(groups)]
    return Evaluation(mode="sampled", version=PolicyVersion("a", 1), groups=tuple(made))


def test_what_a_version_did_is_read_off_its_evaluation_and_goes_through_json() -> None:
    found = measured(evaluation([rollout((1, 2), 1.0), rollout((1,), 0.0)], [rollout((1, 2, 3), None)]))
    assert found.rewards[0] == 0.5 and math.isnan(found.rewards[1])
    assert (found.length, found.reward) == (2.0, 0.5)
    again = Measured.from_dict(json.loads(json.dumps({"version": "a@1", **found.as_dict()}, allow_nan=False)))
    assert (again.rewards[0], math.isnan(again.rewards[1]), again.length) == (0.5, True, 2.0)


class Scoring:
    """An engine under which a token's log-probability is -token, halved by temperature 2 and one lower for `old`."""

    def score(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], version: PolicyVersion, *, temperature: float
    ) -> tuple[float, ...]:
        assert tuple(prompt_ids) == (9,)
        return tuple(-token / temperature - (version.name == "old") for token in completion_ids)


def test_the_divergence_is_the_mean_over_tokens_and_not_over_completions() -> None:
    of = evaluation([rollout((1, 2), 1.0), rollout((1,), 0.0)], [rollout((4,), 1.0)])
    engine, new, old = Scoring(), PolicyVersion("new", 1), PolicyVersion("old", 1)
    assert divergence(engine, of, new, old, temperature=2.0) == 1.0  # pyright: ignore[reportArgumentType]
    assert divergence(engine, of, new, new, temperature=2.0) == 0.0  # pyright: ignore[reportArgumentType]
    assert divergence(engine, evaluation(), new, old, temperature=1.0) == 0.0  # pyright: ignore[reportArgumentType]
