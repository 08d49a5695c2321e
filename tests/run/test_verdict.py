"""Whether a version may take another's place: the bound, the margins, the KL and the lengths, and a real evaluation."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.config.promote import Bounds, PromoteConfig
from groupwise.run.evaluate import Evaluation
from groupwise.run.verdict import Beside, Look, Measured, Start, divergence, judge, measured, too_few
from groupwise.types import Completion, FinishReason, PolicyVersion, Prompt, Rollout, RolloutGroup, Turn
from wording import raises


def done(rewards: Sequence[float], length: float = 10.0) -> Measured:
    return Measured(rewards=rewards, length=length)


def test_what_is_as_good_passes_and_what_is_worse_does_not() -> None:
    old = done([0.0, 1.0] * 100)
    assert judge(old, old, kl=None, bounds=Bounds()).passed
    worse = judge(done([0.0, 0.5] * 100), old, kl=None, bounds=Bounds())
    assert not worse.passed and "0.250" in worse.reason and "gate.margin is 0.02" in worse.reason
    assert "no number of held-out prompts like these would do" in worse.reason and "prompts_needed" not in worse.numbers
    assert judge(done([0.0, 0.5] * 100), old, kl=None, bounds=Bounds(margin=0.5)).passed
    few = judge(done([0.0, 1.0, 1.0, 0.5]), done([1.0, 0.0, 1.0, 0.5]), kl=None, bounds=Bounds())
    assert not few.passed, "as good on average, and nothing says so with confidence"


def test_where_nothing_differs_what_could_have_been_missed_still_counts() -> None:
    """Of n prompts that all went as before, a share p of losses shows nothing with probability (1 - p)^n."""
    alike = [done([1.0] * n) for n in (148, 149)]
    assert [judge(each, each, kl=None, bounds=Bounds()).passed for each in alike] == [False, True]
    refused = judge(alike[0], alike[0], kl=None, bounds=Bounds())
    assert math.isclose(refused.numbers["lower_bound"], -(1 - 0.05 ** (1 / 148)), rel_tol=1e-6)
    assert (refused.numbers["prompts_needed"], refused.numbers["margin"]) == (149, 0.02)
    assert "149 held-out prompts like these 148 would do, or gate.margin 0.021" in refused.reason
    told = too_few(148, Bounds(), Look.only(Bounds()), key="gate")
    assert told is not None and "give 149 prompts, or gate.margin 0.021" in told
    assert too_few(149, Bounds(), Look.only(Bounds()), key="gate") is None
    large = Bounds(reward_range=(-10, 1))
    assert not judge(alike[1], alike[1], kl=None, bounds=large).passed, "what is missed could be eleven times as bad"


def test_a_reward_outside_its_range_is_refused_and_names_the_key() -> None:
    old = done([1.0] * 200)
    refused = judge(done([1.0] * 199 + [-10.0]), old, kl=None, bounds=Bounds(margin=0.5))
    assert not refused.passed and "a held-out reward is -10, outside gate.reward_range" in refused.reason
    assert judge(done([1.0] * 199 + [-10.0]), old, kl=None, bounds=Bounds(margin=0.9, reward_range=(-10, 1))).passed
    for wrong in ((1, 0), (0, float("nan"))):
        with raises(ValueError):
            Bounds(reward_range=wrong)


def test_a_later_look_at_the_same_prompts_needs_more() -> None:
    old, bounds = done([1.0] * 200), Bounds(confidence=0.95)
    looks = [Look.of(bounds, number) for number in (1, 2, 40)]
    assert [judge(old, old, kl=None, bounds=bounds, look=look).passed for look in looks] == [True, False, False]
    last = judge(old, old, kl=None, bounds=bounds, look=looks[2])
    assert "look 40 at these prompts" in last.reason and last.numbers["look"] == 40
    assert sum(Look.of(bounds, number).alpha for number in range(1, 100_000)) < 0.05


def test_what_each_version_adds_to_lengths_and_divergence_has_a_bound_from_the_start() -> None:
    bounds = PromoteConfig(margin=0.5, max_kl=0.5, max_kl_total=1.0)
    old, new = done([1.0] * 100, length=39.0), done([1.0] * 100, length=41.0)
    near = Start(name="base", length=20.0, kl=0.9)
    assert judge(new, old, kl=0.1, bounds=bounds, start=near).passed
    far = judge(new, old, kl=0.1, bounds=bounds, start=Start(name="base", length=10.0, kl=1.1))
    assert "its completions are 4.10 times as long as those of base; gate.max_length_ratio_total is 4" in far.reason
    assert "its KL from base is 1.1000 nats a token; gate.max_kl_total is 1" in far.reason
    assert (far.numbers["length_ratio_total"], far.numbers["kl_total"]) == (4.1, 1.1)


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
    best, active, new = ([1.0] * k + [0.0] * (400 - k) for k in (400, 392, 384))
    options = Bounds(margin=0.05)
    assert judge(done(new), done(active), kl=None, bounds=options).passed
    beside = Beside(name="a@1", new=done(new), old=done(best))
    refused = judge(done(new), done(active), kl=None, bounds=options, best=beside)
    assert not refused.passed and "a@1, the best that went live" in refused.reason
    assert "of the active version" not in refused.reason and refused.numbers["reward_best"] == 1.0
    again = Beside(name="a@1", new=done(active), old=done(best))
    assert judge(done(active), done(active), kl=None, bounds=options, best=again).passed


@settings(max_examples=20)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=30), st.floats(0, 0.5))
def test_a_version_that_is_better_everywhere_is_never_more_doubtful(rewards: list[float], gain: float) -> None:
    better = [min(1.0, each + gain) for each in rewards]
    bound, alike = (
        judge(done(each), done(rewards), kl=None, bounds=Bounds()).numbers["lower_bound"] for each in (better, rewards)
    )
    assert bound >= alike - 1e-9


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
