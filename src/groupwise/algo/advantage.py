"""Advantages from rewards: how much better each rollout is than the others of its group (the same prompt).

For the rewards r_1..r_n of one group's *scorable* rollouts (G of them were sampled, n <= G could be scored):

    group_std       A_i = (r_i - mean) / (std + eps)          GRPO      arXiv 2402.03300
    mean            A_i =  r_i - mean                         Dr. GRPO  arXiv 2503.20783
    batch_std       A_i = (r_i - mean) / (std_batch + eps)    Lite-PPO  arXiv 2508.08221
    leave_one_out   A_i =  r_i - mean_{j != i} r_j            RLOO      arXiv 2402.14740

`std` has n - ddof in its denominator: n - 1 (the sample's, the default), or n (the population's). The two differ by
sqrt(n / (n - 1)), 7 % in a group of 8. `std_batch` and `mean_batch` are over all usable groups of the batch, also those
of equal rewards, which may be left out of training. Several reward functions are either summed with their weights first
and treated as above (`sum_then_normalize`), or normalised one by one (GDPO, arXiv 2601.05242, `normalize_then_sum`), so
that a function with a large spread does not drown the others:

    z_fi = (r_fi - mean_f) / (std_f + eps)
    s_i = sum_f w_f z_fi
    A_i = (s_i - mean_batch s) / (std_batch s + eps)

A reward that failed is None (or not finite, or beyond +-1e100) and is never counted as zero: the rollout gets
advantage None and enters no statistic. So does, with `truncated_votes: false`, one that was cut. A group with fewer
than two scorable rollouts has nothing to compare and is unusable: all its advantages are None. A group whose rewards
are all equal is usable but teaches nothing: its advantages are exactly 0.0.

**Credit inside an episode** (`CreditConfig.credit`). Episode i has turns t = 1..T_i with rewards r_it; what its
reward R_i is beyond their sum (a score at the end, reward functions) is a part of r_i,T_i. A turn's return is

    G_it = sum_{s >= t} gamma^(s - t) r_is                            gamma: `turn_discount`; t in the order of time

and A(x; S) is one of the four formulas above for the value x among the values S:

    episode   A_it = A(R_i; {R_j})                                    the episode's, for each of its turns
    turn      A_it = A(G_it; {G_jt : T_j >= t})                       MT-GRPO, arXiv 2505.11821: turn-level rewards
              A_it = A(G_it; {G_js})                                  normalised over the group; `turn_baseline` says
                                                                      over its turns of the same number, or all of them
    gigpo     A_it = A(R_i; {R_j}) + w A(G_it; {G_js : s_js = s_it})  GiGPO, arXiv 2505.10978, section 4

MT-GRPO's paper has two turns and adds the group's normalised outcome to the normalised reward of the first; here the
outcome reaches earlier turns through the return, for any number of turns. In GiGPO s_it is the state in which turn t
was taken, the paper's anchor state: what the environment calls it (`Turn.state`), or else what the policy heard since
the turn that it continues from; w is `step_advantage_weight`, and `group_std` and `mean` are the paper's two
normalisations. A turn that has none to be compared with has A = 0 there. Turns that are not trained are compared with
nothing and count in returns.

**Several roles.** Where turns have a role, the turns of a role in an episode are their own episode, with its
reward R_ia (`Rollout.role_rewards`), and are compared with those of the same role alone: a baseline for each role
(SPIRAL, arXiv 2506.24119, whose baseline is a moving average; here it is the group's).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from groupwise.config.algo import AdvantageConfig, RunAlgoConfig
from groupwise.errors import ConfigError
from groupwise.types import MAX_REWARD, RolloutGroup

Reward = float | None

NOISE = 1e-6  # of a reward's size: eight float32 steps


def advantages(groups: Sequence[Sequence[Reward]], spec: AdvantageConfig) -> list[list[Reward]]:
    """Return one reward per rollout -> one advantage per rollout, in the same shape; all groups of the batch at once.

    >>> advantages([[1.0, 0.0, None]], AdvantageConfig(advantage="mean"))
    [[0.5, -0.5, None]]
    """
    scorable = [_scorable(group) for group in groups]
    batch_std = _std([reward for rewards in scorable for reward in rewards.values()], ddof=spec.advantage_ddof)
    result: list[list[Reward]] = []
    for group, rewards in zip(groups, scorable, strict=True):
        values = list(rewards.values())
        out: list[Reward] = [None] * len(group)
        if differ(values):
            mean, scale = mean_of(values), _scale(values, batch_std, spec)
            for i, reward in rewards.items():
                out[i] = (reward - mean) * scale
        else:  # exact zeros, also where rounding made the rewards differ
            for i in rewards:
                out[i] = 0.0
        result.append(out)
    return result


def gdpo_advantages(
    groups: Sequence[Sequence[Mapping[str, Reward]]],
    spec: AdvantageConfig,
    *,
    weights: Mapping[str, float] | None = None,
) -> list[list[Reward]]:
    """Return GDPO's advantages from rewards by function name, per rollout, per group. Weights default to 1 for every
    function.

    >>> gdpo = AdvantageConfig(aggregation="normalize_then_sum")
    >>> gdpo_advantages([[{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}]], gdpo)
    [[0.0, 0.0]]
    """
    per_function = AdvantageConfig(advantage_eps=spec.advantage_eps, advantage_ddof=spec.advantage_ddof)
    sums: list[list[Reward]] = []
    for group in groups:
        usable = [total is not None for total in weighted_rewards(group, weights)]
        names = _functions(group, weights)
        columns = [[r[name] if ok else None for r, ok in zip(group, usable, strict=True)] for name in names]
        z = advantages(columns, per_function)
        total: list[Reward] = []
        for i in range(len(group)):
            terms = [(_weight(weights, name), column[i]) for name, column in zip(names, z, strict=True)]
            known = [weight * value for weight, value in terms if value is not None]
            total.append(math.fsum(known) if known else None)
        sums.append(total)
    flat = [value for group in sums for value in group if value is not None]
    if not differ(flat):
        return [[None if value is None else 0.0 for value in group] for group in sums]
    mean, scale = mean_of(flat), 1.0 / (_std(flat, ddof=spec.advantage_ddof) + spec.advantage_eps)
    return [[None if value is None else (value - mean) * scale for value in group] for group in sums]


def voters(group: RolloutGroup, spec: AdvantageConfig | None) -> RolloutGroup:
    """Return the group as its rollouts are compared: with `truncated_votes: false` those that were cut have no
    reward."""
    if not isinstance(spec, RunAlgoConfig) or spec.truncated_votes or not spec.mask_truncated:
        return group
    return replace(group, rollouts=tuple(replace(r, reward=None) if r.truncated else r for r in group.rollouts))


def _with_rewards_of(group: RolloutGroup, weighed: RolloutGroup) -> RolloutGroup:
    pairs = zip(group.rollouts, weighed.rollouts, strict=True)
    return replace(weighed, rollouts=tuple(replace(after, reward=before.reward) for before, after in pairs))


def weighted_rewards(group: Sequence[Mapping[str, Reward]], weights: Mapping[str, float] | None = None) -> list[Reward]:
    """Return the rewards of one group, by function name -> one weighted sum per rollout, None where it cannot be
    scored.

    Rewards of a group are compared, so they must be sums over the same functions. A function that is None for the
    *whole* group does not apply to this prompt and is left out. One that is None for *some* of the rollouts failed
    there, and those rollouts are unscorable: leaving it out of their sum would count the failure as zero. Functions of
    weight 0 are only watched: they neither add nor fail anything.

    >>> weighted_rewards([{"math": 1.0, "code": None}, {"math": 0.0, "code": None}], {"math": 2.0})
    [2.0, 0.0]
    >>> weighted_rewards([{"math": 1.0, "format": 1.0}, {"math": None, "format": 1.0}])
    [2.0, None]

    Raises:
        ConfigError: a weight names a function that gave no rewards anywhere in the group.
    """
    known = {name for rewards in group for name in rewards}
    unknown = sorted(set(weights or ()) - known)
    if unknown and known:
        raise ConfigError(f"weight for {unknown[0]!r}, which is no reward function here; there are: {sorted(known)}")
    names = _functions(group, weights)
    result: list[Reward] = []
    for rewards in group:
        terms = [(_weight(weights, name), rewards.get(name)) for name in names]
        known = [weight * value for weight, value in terms if value is not None and is_valid(value)]
        total = math.fsum(known) if names and len(known) == len(names) else None
        result.append(total if is_valid(total) else None)
    return result


def differ(rewards: Sequence[Reward]) -> bool:
    """Return whether any two of the rewards differ by more than rounding; None is ignored.

    Rewards that are a millionth of the larger one apart (`NOISE`) are equal: a reward model's float32 numbers are off
    by that after a few operations, and divided by their own deviation such noise would be advantages of size 1.

    >>> differ([0.1 + 0.2, 0.3]), differ([2.5, 2.5000002, None]), differ([2.5, 2.501])
    (False, False, True)
    """
    values = list(_scorable(rewards).values())
    return len(values) > 1 and not math.isclose(min(values), max(values), rel_tol=NOISE, abs_tol=1e-12)


def _scorable(group: Sequence[Reward]) -> dict[int, float]:
    """Index -> reward of the scorable rollouts; empty if there are fewer than two."""
    found = {i: float(reward) for i, reward in enumerate(group) if reward is not None and is_valid(reward)}
    return found if len(found) > 1 else {}


def _functions(group: Sequence[Mapping[str, Reward]], weights: Mapping[str, float] | None = None) -> list[str]:
    """Return the functions that apply to this group: a reward for at least one rollout, a weight that is not 0."""
    names = dict.fromkeys(name for rewards in group for name, value in rewards.items() if is_valid(value))
    return [name for name in names if _weight(weights, name)]


def _scale(values: Sequence[float], batch_std: float, spec: AdvantageConfig) -> float:
    """Return what (reward - mean) is multiplied by."""
    if spec.advantage == "group_std":
        return 1.0 / (_std(values, ddof=spec.advantage_ddof) + spec.advantage_eps)
    if spec.advantage == "batch_std":
        return 1.0 / (batch_std + spec.advantage_eps)
    if spec.advantage == "leave_one_out":  # r_i - mean of the others = (r_i - mean of all) n / (n - 1)
        return len(values) / (len(values) - 1)
    return 1.0


def is_valid(reward: Reward) -> bool:
    return reward is not None and abs(reward) <= MAX_REWARD


def _weight(weights: Mapping[str, float] | None, name: str) -> float:
    return 1.0 if weights is None else weights.get(name, 1.0)


def mean_of(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _std(values: Sequence[float], *, ddof: int) -> float:
    """Return the standard deviation with n - ddof in the denominator; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    mean = mean_of(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - ddof))
