"""Distillation: the divergences against sums over the whole vocabulary, and what a teacher adds to advantages."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.algo.distillation import (
    soft_divergence,
    teacher_scores,
    with_reward_weight,
    with_teacher,
    with_teacher_advantages,
)
from groupwise.algo.distillation_metrics import teacher_metrics
from groupwise.algo.loss import policy_loss, resolve_loss
from groupwise.algo.loss_inputs import LossInputs
from groupwise.algo.samples import samples_of
from groupwise.config.teacher import TeacherConfig
from groupwise.errors import ConfigError
from groupwise.types import Completion, FinishReason, Prompt, Rollout, RolloutGroup, SequenceScores, Turn
from wording import raises


def distributions(seed: int, vocabulary: int = 9, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(rows, vocabulary, generator=g, dtype=torch.float64).log_softmax(1) for _ in range(2))
    return p, q


def policy_of(logp_NV: torch.Tensor, ids_NK: torch.Tensor) -> torch.Tensor:
    """What the forward gives of a policy: its log-probabilities of K tokens, and of all others as one."""
    others = logp_NV.scatter(1, ids_NK, -math.inf).logsumexp(1, keepdim=True)
    return torch.cat([logp_NV.gather(1, ids_NK), others], dim=1)


def by_hand(p: list[float], q: list[float], kind: str) -> float:
    """The divergence of two distributions given as probabilities."""
    kl = lambda a, b: sum(x * math.log(x / y) for x, y in zip(a, b, strict=True) if x > 0)  # noqa: E731
    middle = [(x + y) / 2 for x, y in zip(p, q, strict=True)]
    return {"reverse": kl(p, q), "forward": kl(q, p), "jsd": (kl(p, middle) + kl(q, middle)) / 2}[kind]


@pytest.mark.parametrize("kind", ["reverse", "forward", "jsd"])
@pytest.mark.parametrize("k", [1, 3, 9])
def test_the_divergence_is_of_k_tokens_and_the_rest_as_one(kind: str, k: int):
    p, q = distributions(0)
    ids = q.topk(k).indices
    found = soft_divergence(policy_of(p, ids), q.gather(1, ids), kind)
    for row in range(len(p)):
        here = [[float(x[row, i].exp()) for i in ids[row]] for x in (p, q)]
        here = [[*each, max(1 - sum(each), 0.0)] if k < 9 else each for each in here]
        assert float(found[row]) == pytest.approx(by_hand(here[0], here[1], kind), abs=1e-12)


@given(seed=st.integers(0, 10_000), k=st.integers(1, 8), kind=st.sampled_from(["reverse", "forward", "jsd"]))
def test_it_is_never_negative_and_at_most_that_of_the_whole_vocabulary(seed: int, k: int, kind: str):
    p, q = distributions(seed)
    ids = q.topk(k).indices
    some = soft_divergence(policy_of(p, ids), q.gather(1, ids), kind)
    whole = torch.arange(9).expand_as(q)
    assert bool((some >= -1e-12).all())
    assert bool((some <= soft_divergence(policy_of(p, whole), q, kind) + 1e-12).all())
    assert soft_divergence(policy_of(q, ids), q.gather(1, ids), kind).tolist() == pytest.approx([0.0] * 4, abs=1e-12)


@pytest.mark.parametrize("kind", ["reverse", "forward", "jsd"])
def test_what_is_not_filled_counts_for_nothing(kind: str):
    p, q = distributions(1)
    ids = q.topk(3).indices
    ids[0, 2] = ids[0, 0]  # as `MicroBatch.soft_targets` fills them up
    policy = policy_of(p, ids).requires_grad_()
    target = q.gather(1, ids)
    target[0, 2], target[3] = -math.inf, -math.inf
    found = soft_divergence(policy, target, kind)
    alone = soft_divergence(policy_of(p[:1], ids[:1, :2]), target[:1, :2], kind)
    assert found[0].item() == pytest.approx(alone.item(), abs=1e-12)
    assert found[3].item() == 0.0
    found.sum().backward()
    assert policy.grad is not None and bool(policy.grad.isfinite().all())
    assert policy.grad[3].tolist() == [0.0] * 4 and float(policy.grad[0, 2]) == 0.0


def test_a_token_that_one_of_the_two_is_sure_of():
    """Nothing is infinite where a probability is 1 but for rounding."""
    sure, rest = torch.tensor([[0.0, -90.0]]), torch.tensor([[-3.0, -4.0]])
    left = torch.tensor([[-95.0]]), (-rest.exp().sum()).log1p().view(1, 1)
    sure_policy, unsure = torch.cat([sure, left[0]], dim=1), torch.cat([rest, left[1]], dim=1)
    for kind in ("reverse", "forward", "jsd"):
        for policy, target in ((sure_policy, rest), (unsure, sure), (sure_policy, sure)):
            leaf = policy.clone().requires_grad_()
            found = soft_divergence(leaf, target, kind)
            found.sum().backward()
            assert math.isfinite(found.item()) and leaf.grad is not None and bool(leaf.grad.isfinite().all())


# ---- what becomes of groups ----


def group(rewards: tuple[float | None, ...] = (1.0, 0.0), *, taught: bool = True) -> RolloutGroup:
    said = Completion(token_ids=(5, 6), logprobs=(-0.5, -1.0), text="", finish_reason=FinishReason.STOP)
    top = (((5, -0.2), (7, -2.0)), ((9, -0.1), (6, -3.0)))
    scores = (SequenceScores(logprobs=(-0.2, -3.0), top=top),) if taught else ()
    rollouts = tuple(Rollout(turns=(Turn((1, 2), said),), reward=reward, teacher=scores) for reward in rewards)
    return RolloutGroup(prompt=Prompt(id="0", token_ids=(1, 2)), rollouts=rollouts)


def advantaged(each: RolloutGroup, *values: float | None) -> RolloutGroup:
    return replace(each, rollouts=tuple(replace(r, advantage=a) for r, a in zip(each.rollouts, values, strict=True)))


def test_the_teachers_advantage_is_added_to_that_of_rewards():
    (weighed,) = with_reward_weight([advantaged(group(), 1.0, -1.0)], 0.5)
    samples = with_teacher(samples_of([weighed]), [weighed], TeacherConfig(adapter="x", coefficient=2.0))
    assert [sample.advantage for sample in samples] == [1.0, 1.0]
    assert samples[0].weights == pytest.approx((0.5 + 2 * 0.3, 0.5 - 2 * 2.0))
    assert samples[1].weights == pytest.approx((-0.5 + 2 * 0.3, -0.5 - 2 * 2.0))


def test_soft_targets_leave_the_advantage_alone():
    weighed = advantaged(group(), 1.0, -1.0)
    samples = with_teacher(samples_of([weighed]), [weighed], TeacherConfig(adapter="x", top_k=2))
    assert [(sample.advantage, sample.weights) for sample in samples] == [(1.0, None), (-1.0, None)]
    assert samples[0].soft_targets == weighed.rollouts[0].teacher[0].top


def test_without_rewards_the_advantage_is_the_teachers_and_without_a_teacher_there_is_none():
    plain = advantaged(group((None, None)), None, None)
    (weighed,) = with_reward_weight([plain], 1.0)
    samples = with_teacher(samples_of([weighed]), [weighed], TeacherConfig(adapter="x"))
    assert [sample.weights for sample in samples] == [pytest.approx((0.3, -2.0))] * 2
    failed = replace(plain.rollouts[0], error="the judge is away")
    (mixed,) = with_reward_weight([replace(plain, rollouts=(failed, plain.rollouts[1]))], 1.0)
    assert [rollout.advantage for rollout in mixed.rollouts] == [None, 0.0]
    (untaught,) = with_reward_weight([advantaged(group((None, None), taught=False), None, None)], 1.0)
    assert [rollout.advantage for rollout in untaught.rollouts] == [None, None]


def test_the_gap_is_bounded_and_what_is_not_known_adds_nothing():
    (sample,) = samples_of([advantaged(group((1.0,)), 1.0)])
    sample = replace(sample, behaviour_logprobs=(math.nan, -1.0))
    scores = SequenceScores(logprobs=(-0.2, -math.inf), top=())
    (found,) = with_teacher_advantages([sample], [scores], coefficient=1.0)
    assert found.weights == (1.0, -19.0)
    assert with_teacher_advantages([sample], [None], coefficient=1.0) == [sample]


def test_metrics():
    some = [advantaged(group(), 1.0, -1.0), advantaged(group(taught=False), 0.5, -0.5)]
    found = teacher_metrics(samples_of(some), teacher_scores(some))
    assert found["teacher/scored_frac"] == 0.5 and found["teacher/tokens"] == 4
    assert found["teacher/kl"] == pytest.approx((2.0 - 0.3) / 2) and found["teacher/gap_max"] == 2.0
    assert found["teacher/agreement"] == 0.5  # 5 is the likeliest, 6 is not
    mass = (math.exp(-0.2) + math.exp(-2) + math.exp(-0.1) + math.exp(-3)) / 2
    assert found["teacher/mass"] == pytest.approx(mass)
    bare = [advantaged(group(taught=False), 1.0, -1.0)]
    assert teacher_metrics(samples_of(bare), teacher_scores(bare)) == {"teacher/scored_frac": 0.0}
    assert teacher_metrics([], []) == {}


# ---- the term of the loss ----


def test_the_loss_without_what_it_reads_is_refused():
    inputs = LossInputs(
        row_N=torch.zeros(2, dtype=torch.long),
        num_rows=1,
        advantages_N=torch.ones(2),
        behaviour_N=torch.zeros(2),
        total_tokens=2,
        total_rows=1,
    )
    with raises(ConfigError):
        policy_loss(torch.zeros(2), inputs, resolve_loss("grpo", soft_kl="forward"))
    with raises(ConfigError, field="soft_kl_coeff", kind="ineffective"):
        resolve_loss("grpo", soft_kl_coeff=0.5)


def test_a_dropped_token_is_in_no_sum():
    """One without a behaviour logprob has no soft targets either, and stays in the denominator."""
    p, q = distributions(2)
    row = torch.zeros(4, dtype=torch.long)
    behaviour = torch.tensor([-1.0, math.nan, -1.0, -1.0], dtype=torch.float64)
    inputs = LossInputs(
        row_N=row,
        num_rows=1,
        advantages_N=torch.zeros(4),
        behaviour_N=behaviour,
        soft_NK=q[:, :3],
        total_tokens=4,
        total_rows=1,
    )
    spec = resolve_loss("dapo", soft_kl="reverse", soft_kl_coeff=0.5)
    policy = policy_of(p, torch.arange(3).expand(4, 3))
    loss, metrics = policy_loss(torch.full((4,), -1.0).double(), inputs, spec, soft_NK=policy)
    each = soft_divergence(policy, q[:, :3], "reverse")
    assert float(metrics["loss/soft_kl"]) == pytest.approx(float(each[[0, 2, 3]].sum()) / 4)
    assert float(loss) == pytest.approx(0.5 * float(each[[0, 2, 3]].sum()) / 4)
