"""Credit inside an episode: returns of turns, GiGPO's anchor states, roles; against independent numpy."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from groupwise.algo.credit import discounted_returns, has_signal, with_advantages
from groupwise.algo.kl import with_kl_penalty
from groupwise.algo.metrics import rollout_metrics, sample_metrics
from groupwise.algo.samples import samples_of
from groupwise.config.algo import AdvantageConfig, CreditConfig
from groupwise.config.job import parse_job_config
from groupwise.config.run import parse_config
from groupwise.errors import ConfigError
from groupwise.store.rollouts import group_from_json, group_to_json
from groupwise.types import Completion, FinishReason, Prompt, Rollout, RolloutGroup, Turn
from wording import raises

EPS = 1e-4
few = settings(max_examples=60, deadline=None)


def turn(reward: float | None, *, after: Turn | None = None, heard: int = 7, **fields) -> Turn:
    """A turn of two tokens, which extends the one before it by one token that was heard."""
    seen = () if after is None else after.prompt_ids + after.completion.token_ids
    completion = Completion(token_ids=(1, 2), logprobs=(-0.1, -0.2), text="x", finish_reason=FinishReason.STOP)
    return Turn((*seen, heard), completion, reward=reward, **fields)


def episode(*rewards: float | None, outcome: float = 0.0, states: str | None = None, heard=(), **fields) -> Rollout:
    """Turns with these rewards, and `outcome` for the whole of it."""
    turns: list[Turn] = []
    for i, reward in enumerate(rewards):
        state = None if states is None else states[i]
        told = heard[i] if heard else 7
        turns.append(turn(reward, after=turns[-1] if turns else None, state=state, heard=told))
    total = math.fsum([*(reward or 0.0 for reward in rewards), outcome])
    return Rollout(turns=tuple(turns), reward=total, **fields)


def group(*rollouts: Rollout) -> RolloutGroup:
    return RolloutGroup(prompt=Prompt(id="p", token_ids=(7,)), rollouts=rollouts)


def weighed(spec: CreditConfig, *rollouts: Rollout) -> list[list[float | None]]:
    """The advantages of the turns of each rollout."""
    (done,) = with_advantages([group(*rollouts)], spec)
    return [[each.advantage for each in rollout.turns] for rollout in done.rollouts]


TURN = CreditConfig(credit="turn", advantage="mean")
GIGPO = CreditConfig(credit="gigpo", advantage="mean", turn_discount=1.0)


def test_a_turns_return_is_what_it_and_later_turns_were_given():
    """Of two episodes of two turns: returns 3, 2 and 1, 1 (what the episode was given beyond is its last turn's)."""
    got = weighed(TURN, episode(1.0, None, outcome=2.0), episode(0.0, 1.0))
    assert got == [[1.0, 0.5], [-1.0, -0.5]]


def test_a_discount_makes_later_rewards_count_less():
    got = weighed(CreditConfig(credit="turn", advantage="mean", turn_discount=0.5), episode(0, 4), episode(0, 0))
    assert got == [[1.0, 2.0], [-1.0, -2.0]]
    assert discounted_returns([], 0.5) == []


def test_turns_are_compared_with_turns_of_the_same_number_or_with_all():
    """Returns 2, 1 and 0. The longer episode's second turn has none of its number to be compared with."""
    one, other = episode(1.0, 1.0), episode(0.0)
    assert weighed(TURN, one, other) == [[1.0, 0.0], [-1.0]]
    every = CreditConfig(credit="turn", advantage="mean", turn_baseline="group")
    assert weighed(every, one, other) == [[1.0, 0.0], [-1.0]]
    assert weighed(every, episode(1.0, 3.0), other) == [[4 - 7 / 3, 3 - 7 / 3], [-7 / 3]]


def test_with_one_turn_everything_is_the_advantage_of_the_episode():
    rewards = (1.0, 0.0, 0.5, 0.25)
    for kind in ("group_std", "mean", "batch_std", "leave_one_out"):
        (plain,) = with_advantages([group(*map(episode, rewards))], AdvantageConfig(advantage=kind))
        expected = [rollout.advantage for rollout in plain.rollouts]
        (turns,) = with_advantages([group(*map(episode, rewards))], CreditConfig(advantage=kind, credit="turn"))
        assert [rollout.advantage for rollout in turns.rollouts] == expected
        spec = CreditConfig(advantage=kind, credit="gigpo", step_advantage_weight=0.5)
        (anchored,) = with_advantages([group(*map(episode, rewards))], spec)
        assert [r.advantage for r in anchored.rollouts] == pytest.approx([1.5 * value for value in expected])


def test_a_group_of_equal_episodes_may_have_turns_that_differ():
    """GRPO drops it; the turns were worth 1, 0 and 0, 1, and their returns are 1, 0 and 1, 1."""
    same = group(episode(1.0, 0.0), episode(0.0, 1.0))
    assert not has_signal(same, AdvantageConfig(advantage="mean"))
    assert has_signal(same, TURN)
    assert weighed(TURN, *same.rollouts) == [[0.0, -0.5], [0.0, 0.5]]
    for spec in (TURN, GIGPO):
        assert not has_signal(group(episode(1.0, 0.0, states="AB"), episode(1.0, 0.0, states="AB")), spec)
        assert not has_signal(group(episode(1.0, 0.0)), spec)


def test_a_turn_that_is_not_trained_is_compared_with_nothing_and_counts_in_returns():
    quiet = episode(0.0, 3.0)
    quiet = replace(quiet, turns=(quiet.turns[0], replace(quiet.turns[1], trained=False)))
    got = weighed(TURN, quiet, episode(0.0, 1.0), episode(0.0, 5.0))
    assert got == [[0.0, None], [-2.0, -2.0], [2.0, 2.0]]


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e101])
def test_an_episode_with_a_reward_that_is_none_is_in_no_statistic(bad: float):
    broken = replace(episode(0.0, 1.0), turns=(turn(bad), turn(1.0)))
    for spec in (TURN, GIGPO):
        (done,) = with_advantages([group(broken, episode(1.0, 0.0), episode(0.0, 0.0))], spec)
        assert done.rollouts[0].advantage is None and len(samples_of([done])) == 2
        without = weighed(spec, episode(1.0, 0.0), episode(0.0, 0.0))
        assert [[each.advantage for each in r.turns] for r in done.rollouts[1:]] == without
    unscored = replace(episode(1.0, 0.0), reward=None)
    (done,) = with_advantages([group(unscored, episode(1.0, 0.0))], TURN)
    assert [rollout.advantage for rollout in done.rollouts] == [None, None] and not has_signal(done, TURN)


# ---- GiGPO ----


def test_turns_in_the_same_state_are_compared():
    """States A B and B C: rewards of episodes 3 and 1; the returns in B are 2 (second turn) and 1 (first turn)."""
    got = weighed(GIGPO, episode(1.0, 2.0, states="AB"), episode(0.0, 1.0, states="BC"))
    assert got == [[1.0, 1.0 + 0.5], [-1.0 - 0.5, -1.0]]


def test_a_state_without_a_name_is_what_was_heard():
    """The first turns heard 7; of the second ones two heard 8."""
    heard = [(7, 8), (7, 8), (7, 9)]
    named = [episode(0.0, r, states="A" + "BBC"[i]) for i, r in enumerate((1.0, 2.0, 3.0))]
    unnamed = [episode(0.0, r, heard=heard[i]) for i, r in enumerate((1.0, 2.0, 3.0))]
    assert weighed(GIGPO, *unnamed) == weighed(GIGPO, *named)


@st.composite
def trees(draw) -> list[Rollout]:
    """Episodes in a small world of few states, with rewards at turns and at the end; some cannot be scored."""
    rollouts = []
    for _ in range(draw(st.integers(1, 6))):
        length = draw(st.integers(1, 6))
        states = "".join(draw(st.lists(st.sampled_from("ABCD"), min_size=length, max_size=length)))
        rewards = draw(st.lists(st.sampled_from([None, -1.0, 0.0, 0.5, 2.0]), min_size=length, max_size=length))
        rollout = episode(*rewards, outcome=draw(st.sampled_from([0.0, 1.0, -3.0])), states=states)
        rollouts.append(rollout if draw(st.integers(0, 4)) else replace(rollout, reward=None))
    return rollouts


def gigpo_by_hand(rollouts: list[Rollout], *, gamma: float, weight: float, std: bool) -> list[list[float]] | None:
    """GiGPO, arXiv 2505.10978, written down again with numpy: A^E of episodes and A^S of anchor states."""
    scored = [(i, r) for i, r in enumerate(rollouts) if r.reward is not None]
    if len(scored) < 2:
        return None

    def norm(x: list[float]) -> np.ndarray:
        a = np.array(x, dtype=np.float64)
        if len(a) < 2 or np.ptp(a) < 1e-12:
            return np.zeros_like(a)
        return (a - a.mean()) / ((a.std(ddof=1) + EPS) if std else 1.0)

    out = {
        i: np.full(len(r.turns), value)
        for (i, r), value in zip(scored, norm([r.reward for _, r in scored]), strict=True)
    }
    anchors: dict[str, list[tuple[int, int, float]]] = defaultdict(list)
    for i, r in scored:
        given = np.array([t.reward or 0.0 for t in r.turns])
        given[-1] += r.reward - given.sum()
        for t, each in enumerate(r.turns):
            anchors[each.state].append((i, t, float(np.sum(given[t:] * gamma ** np.arange(len(given) - t)))))
    for members in anchors.values():
        for (i, t, _), value in zip(members, norm([g for _, _, g in members]), strict=True):
            out[i][t] += weight * value
    return [list(out[i]) if i in out else [] for i in range(len(rollouts))]


@few
@given(trees(), st.sampled_from([1.0, 0.95, 0.5]), st.sampled_from([1.0, 0.3]), st.booleans())
def test_gigpo_on_random_trees(rollouts, gamma, weight, std):
    kind = "group_std" if std else "mean"
    spec = CreditConfig(credit="gigpo", advantage=kind, turn_discount=gamma, step_advantage_weight=weight)
    (done,) = with_advantages([group(*rollouts)], spec)
    expected = gigpo_by_hand(rollouts, gamma=gamma, weight=weight, std=std)
    if expected is None:
        assert all(rollout.advantage is None for rollout in done.rollouts)
        return
    for rollout, row in zip(done.rollouts, expected, strict=True):
        if rollout.advantage is None:
            assert rollout.reward is None
        else:
            assert [each.advantage for each in rollout.turns] == pytest.approx(row, abs=1e-9)
            assert rollout.advantage == pytest.approx(np.mean(row), abs=1e-9)


def test_gigpos_discount_is_the_papers_unless_it_is_set():
    assert CreditConfig(credit="gigpo").gamma == 0.95 and CreditConfig(credit="turn").gamma == 1.0
    assert CreditConfig(credit="gigpo", turn_discount=0.5).gamma == 0.5


# ---- roles ----


def match(first: float, second: float, *, turns: int = 2) -> Rollout:
    """A game of two players, whose turns stand together; each was given its reward at its last turn."""
    played = []
    for role, reward, said in (("first", first, 7), ("second", second, 8)):
        mine: list[Turn] = []
        for number in range(turns):
            given = reward if number == turns - 1 else None
            mine.append(turn(given, after=mine[-1] if mine else None, heard=said, role=role))
        played += mine
    rewards = {"first": first, "second": second}
    return Rollout(turns=tuple(played), reward=(first + second) / 2, role_rewards=rewards)


def test_each_role_has_its_own_reward_and_baseline():
    """The first player wins 3 of 4: its baseline is 1/2, the second's is -1/2; every episode's mean reward is 0."""
    matches = [match(1, -1), match(1, -1), match(1, -1), match(-1, 1)]
    spec = CreditConfig(advantage="mean")
    assert has_signal(group(*matches), spec)
    assert weighed(spec, *matches) == [[0.5, 0.5, -0.5, -0.5]] * 3 + [[-1.5, -1.5, 1.5, 1.5]]
    assert not has_signal(group(match(1, -1), match(1, -1)), spec)
    (done,) = with_advantages([group(*matches)], spec)
    samples = samples_of([done])
    assert [sample.continues for sample in samples] == [False, True] * 4
    assert {sample.group for sample in samples} == {0}
    assert samples[0].weights == (0.5, 0.5, 0.0, 0.5, 0.5) and samples[0].mask == (1, 1, 0, 1, 1)


def test_returns_and_anchors_are_those_of_a_role():
    """What the other player was given is none of one's return, and its states are not one's own."""
    for spec in (TURN, GIGPO):
        got = weighed(spec, match(1, -1), match(-1, 1))
        factor = 1 if spec is TURN else 2
        assert got == [[factor, factor, -factor, -factor], [-factor, -factor, factor, factor]]


def test_aggregation_of_several_functions_does_not_go_with_roles():
    with raises(ConfigError):
        with_advantages([group(match(1, -1), match(-1, 1))], AdvantageConfig(aggregation="normalize_then_sum"))


# ---- what becomes of them ----


def test_each_token_has_the_advantage_of_its_turn():
    (done,) = with_advantages([group(episode(1.0, None, outcome=2.0), episode(0.0, 1.0))], TURN)
    first, second = samples_of([done])
    assert first.advantage == 1.0 and first.weights == (1.0, 1.0, 0.0, 0.5, 0.5) and first.mask == (1, 1, 0, 1, 1)
    assert second.weights == (-1.0, -1.0, 0.0, -0.5, -0.5)
    assert sample_metrics([first, second])["train/advantage_abs_mean"] == pytest.approx(0.75)


def test_a_penalty_is_taken_off_every_turn():
    (done,) = with_advantages([group(episode(1.0, None, outcome=2.0), episode(0.0, 1.0))], TURN)
    (less,) = with_kl_penalty([done], [2.0, 0.0], TURN, coeff=0.5)
    assert [[each.advantage for each in r.turns] for r in less.rollouts] == [[0.5, 0.0], [-0.5, 0.0]]


def test_a_group_is_written_and_read_bit_for_bit():
    played = [match(1, -1), match(-1, 1)]
    named = replace(played[0], turns=(replace(played[0].turns[0], state="7 stones"), *played[0].turns[1:]), stop="done")
    (done,) = with_advantages([group(named, replace(played[1], stop="done"))], AdvantageConfig())
    assert group_from_json(group_to_json(done)) == done


def test_metrics():
    groups = [group(episode(1.0, 2.0, states="AB"), episode(0.0, 1.0, states="BC"))]
    trained = with_advantages(groups, GIGPO)
    found = rollout_metrics(groups, trained=trained, advantage=GIGPO)
    assert found["turn/advantage_std"] == pytest.approx(np.std([1, 1.5, -1.5, -1], ddof=1))
    assert (found["gigpo/anchor_share"], found["gigpo/anchor_size"]) == (0.5, 4 / 3)
    assert found["turn/signal_share"] == 0.5
    found = rollout_metrics(groups, trained=with_advantages(groups, TURN), advantage=TURN)
    assert found["turn/compared_share"] == 1.0 and "gigpo/anchor_share" not in found
    matches = [group(match(1, -1), match(1, -1), match(-1, 1))]
    found = rollout_metrics(matches, trained=matches, advantage=AdvantageConfig())
    assert found["role/first/reward"] == pytest.approx(1 / 3) == -found["role/second/reward"]
    assert found["role/first/std"] == pytest.approx(np.std([1, 1, -1], ddof=1))
    plain = rollout_metrics(groups, trained=groups, advantage=AdvantageConfig())
    assert not [name for name in plain if name.startswith(("turn/", "gigpo/", "role/"))]


# ---- every knob acts or is refused ----


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"turn_discount": 0.9}, "turn_discount"),
        ({"turn_baseline": "group"}, "turn_baseline"),
        ({"credit": "gigpo", "turn_baseline": "group"}, "turn_baseline"),
        ({"credit": "turn", "step_advantage_weight": 2.0}, "step_advantage_weight"),
        ({"credit": "turn", "aggregation": "normalize_then_sum"}, "credit"),
        ({"credit": "turn", "turn_discount": 0.0}, "turn_discount"),
        ({"credit": "step"}, "credit"),
    ],
)
def test_what_does_not_act_is_refused(given, field):
    with raises(ValidationError) as refused:
        CreditConfig(**given)
    assert [each["loc"] for each in refused.value.errors()] == [(field,)]


def test_where_there_is_one_turn_credit_inside_an_episode_is_refused():
    run = {"name": "x", "model": "starter", "data": {"source": "x.jsonl"}, "rewards": ["groupwise.rewards.math:x"]}
    with raises(ConfigError, field="algo.credit", kind="conflict"):
        parse_config(run | {"algo": {"credit": "turn"}})
    with raises(ConfigError, field="credit", kind="unknown"):
        parse_job_config("grpo", {"credit": "gigpo"})
