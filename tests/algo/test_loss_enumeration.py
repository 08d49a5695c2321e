"""The expected gradient, exactly: all completions of two tokens over a vocabulary of three, by their probability.

Estimators that claim to be unbiased must equal autograd of the true objective to rounding; the others must not.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from groupwise.algo.advantage import advantages
from groupwise.algo.credit import with_advantages
from groupwise.algo.kl import with_kl_penalty
from groupwise.algo.loss import policy_loss, resolve_loss
from groupwise.algo.loss_inputs import LossInputs
from groupwise.config.algo import AdvantageConfig
from groupwise.config.loss import LossSpec
from groupwise.types import Completion, FinishReason, Prompt, Rollout, RolloutGroup, Turn

V, T = 3, 2
SEQUENCES = list(product(range(V), repeat=T))
REWARDS = torch.tensor([0.3, 1.0, -0.5, 0.0, 2.0, 0.7, 1.1, -1.0, 0.4], dtype=torch.float64)
EXACT = {"rtol": 0.0, "atol": 1e-12}


def parameters(seed: int) -> Tensor:
    """Logits [1 + V, V]: of the first token, and of the second after each first."""
    return torch.randn(1 + V, V, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def token_logprobs(theta: Tensor) -> Tensor:
    """[V * V, T]"""
    table = theta.log_softmax(-1)
    return torch.stack([torch.stack([table[0, a], table[1 + a, b]]) for a, b in SEQUENCES])


def probabilities(theta: Tensor) -> Tensor:
    return token_logprobs(theta).sum(-1).exp()


def policy_gradient(theta: Tensor) -> Tensor:
    """The gradient of the expected reward."""
    leaf = theta.clone().requires_grad_()
    return torch.autograd.grad((probabilities(leaf) * REWARDS).sum(), leaf)[0]


def estimate(spec: LossSpec, theta: Tensor, rows: tuple[int, ...], advantage: list[float], **policies: Tensor):
    """Loss gradient and metrics of one sampled group; `policies` are the parameters of behaviour and reference."""
    leaf = theta.clone().requires_grad_()
    pick = lambda p: token_logprobs(p)[list(rows)].flatten()  # noqa: E731
    inputs = LossInputs(
        row_N=torch.arange(len(rows)).repeat_interleave(T),
        num_rows=len(rows),
        advantages_N=torch.tensor(advantage, dtype=torch.float64).repeat_interleave(T),
        behaviour_N=pick(policies["behaviour"]),
        reference_N=pick(policies["reference"]) if "reference" in policies else None,
        total_tokens=float(len(rows) * T),
        total_rows=float(len(rows)),
    )
    loss, metrics = policy_loss(pick(leaf), inputs, spec)
    return torch.autograd.grad(loss, leaf)[0], metrics


def expected_gradient(
    spec: LossSpec, advantage: AdvantageConfig, theta: Tensor, *, group_size: int, behaviour: Tensor
) -> Tensor:
    """Over all groups that `behaviour` can sample."""
    total, probability = torch.zeros_like(theta), probabilities(behaviour)
    for rows in product(range(len(SEQUENCES)), repeat=group_size):
        values = [a or 0.0 for a in advantages([REWARDS[list(rows)].tolist()], advantage)[0]]
        total += probability[list(rows)].prod() * estimate(spec, theta, rows, values, behaviour=behaviour)[0]
    return total


@pytest.mark.parametrize("group_size", [2, 3])
@pytest.mark.parametrize(("kind", "factor"), [("leave_one_out", lambda g: 1.0), ("mean", lambda g: (g - 1) / g)])
def test_reinforce_is_unbiased(kind: str, factor, group_size: int):
    """leave_one_out exactly; the group mean contains the rollout itself, which scales the gradient by (G - 1) / G."""
    theta, spec = parameters(0), resolve_loss("reinforce", reduction="sequence_sum")
    got = expected_gradient(spec, AdvantageConfig(advantage=kind), theta, group_size=group_size, behaviour=theta)
    torch.testing.assert_close(got, -factor(group_size) * policy_gradient(theta), **EXACT)


@pytest.mark.parametrize("preset", ["grpo", "importance_sampling", "cispo", "dapo", "gspo", "sapo"])
def test_on_policy_all_ratio_losses_are_reinforce(preset: str):
    theta, spec = parameters(0), resolve_loss(preset, reduction="sequence_sum")
    got = expected_gradient(spec, AdvantageConfig(advantage="leave_one_out"), theta, group_size=2, behaviour=theta)
    torch.testing.assert_close(got, -policy_gradient(theta), **EXACT)


@pytest.mark.parametrize("preset", ["reinforce", "importance_sampling"])
def test_off_policy_the_sequence_weight_is_exact_and_the_token_weight_is_not(preset: str):
    theta, behaviour, spec = parameters(0), parameters(1), AdvantageConfig(advantage="leave_one_out")

    def error(correction: str) -> float:
        loss = resolve_loss(preset, reduction="sequence_sum", correction=correction, correction_cap=None)
        got = expected_gradient(loss, spec, theta, group_size=2, behaviour=behaviour)
        # leave_one_out subtracts a sibling's reward: a baseline that does not depend on the rollout
        return float((got + policy_gradient(theta)).abs().max())

    assert error("tis_sequence") < 1e-12
    assert error("tis_token") > 1e-2


def kl_at_states(theta: Tensor, reference: Tensor, states: Tensor, *, forward: bool = False) -> tuple[Tensor, Tensor]:
    """Value and gradient of sum_s states[s] KL(pi(.|s) || reference(.|s)), or of KL(reference || pi); states fixed."""
    leaf = theta.clone().requires_grad_()
    p, q = leaf.log_softmax(-1), reference.log_softmax(-1)
    kl_S = (q.exp() * (q - p)).sum(-1) if forward else (p.exp() * (p - q)).sum(-1)
    value = (states * kl_S).sum()
    return value.detach(), torch.autograd.grad(value, leaf)[0]


def expected_kl(kl: str, theta: Tensor, *, reference: Tensor, behaviour: Tensor) -> tuple[Tensor, Tensor]:
    """Expected value and gradient of the estimator, summed over the tokens of a row."""
    spec = resolve_loss("reinforce", kl=kl, kl_coeff=1.0, reduction="sequence_sum")
    value, gradient = torch.zeros((), dtype=torch.float64), torch.zeros_like(theta)
    for row, probability in enumerate(probabilities(behaviour)):
        grad, metrics = estimate(spec, theta, (row,), [0.0], behaviour=behaviour, reference=reference)
        value += probability * metrics["loss/kl"] * T
        gradient += probability * grad
    return value, gradient


def visited(behaviour: Tensor) -> Tensor:
    """How often each state is visited: the start, and after each first token."""
    return torch.cat([torch.ones(1, dtype=torch.float64), behaviour[0].softmax(-1)])


@pytest.mark.parametrize(("kl", "unbiased_value"), [("k1", True), ("k2", False), ("k3", True), ("k3_unbiased", True)])
def test_kl_on_policy(kl: str, unbiased_value: bool):
    theta, reference = parameters(0), parameters(2)
    value, gradient = expected_kl(kl, theta, reference=reference, behaviour=theta)
    # k3 alone descends the other divergence, KL(reference || pi)
    true_value, true_gradient = kl_at_states(theta, reference, visited(theta))
    if kl == "k3":
        _, true_gradient = kl_at_states(theta, reference, visited(theta), forward=True)
    torch.testing.assert_close(gradient, true_gradient, **EXACT)
    assert gradient.abs().max() > 1e-2
    assert (abs(float(value - true_value)) < 1e-12) == unbiased_value


def test_only_the_ratio_weighted_kl_is_exact_off_policy():
    theta, reference, behaviour = parameters(0), parameters(2), parameters(1)
    true_value, true_gradient = kl_at_states(theta, reference, visited(behaviour))
    value, gradient = expected_kl("k3_unbiased", theta, reference=reference, behaviour=behaviour)
    torch.testing.assert_close(value, true_value, **EXACT)
    torch.testing.assert_close(gradient, true_gradient, **EXACT)
    for kl in ("k1", "k2", "k3"):
        _, gradient = expected_kl(kl, theta, reference=reference, behaviour=behaviour)
        assert (gradient - true_gradient).abs().max() > 1e-2


def test_k1_differentiated_naively_would_teach_nothing():
    theta = parameters(0).requires_grad_()
    expected = (probabilities(theta).detach()[:, None] * token_logprobs(theta)).sum()
    torch.testing.assert_close(torch.autograd.grad(expected, theta)[0], torch.zeros(1 + V, V).double(), **EXACT)


# ---- KL in the reward ----


def penalised(rows: tuple[int, ...], rewards: Tensor, kl: Tensor, spec: AdvantageConfig, *, beta: float) -> list[float]:
    """The advantages of one sampled group with the KL in its rewards."""
    turn = Turn((0,), Completion(token_ids=(0,), logprobs=(0.0,), text="", finish_reason=FinishReason.STOP))
    rollouts = tuple(Rollout(turns=(turn,), reward=float(rewards[row])) for row in rows)
    groups = with_advantages([RolloutGroup(prompt=Prompt(id=""), rollouts=rollouts)], spec)
    (group,) = with_kl_penalty(groups, kl[list(rows)].tolist(), spec, coeff=beta)
    return [rollout.advantage or 0.0 for rollout in group.rollouts]


def expected_in_reward(
    theta: Tensor, reference: Tensor, rewards: Tensor, *, beta: float, preset: str = "reinforce"
) -> Tensor:
    """The expected gradient over all groups of two that the policy can sample; the loss has no KL term."""
    spec, advantage = resolve_loss(preset, reduction="sequence_sum"), AdvantageConfig(advantage="leave_one_out")
    kl, probability = (token_logprobs(theta) - token_logprobs(reference)).sum(-1), probabilities(theta)
    total = torch.zeros_like(theta)
    for rows in product(range(len(SEQUENCES)), repeat=2):
        values = penalised(rows, rewards, kl, advantage, beta=beta)
        total += probability[list(rows)].prod() * estimate(spec, theta, rows, values, behaviour=theta)[0]
    return total


@pytest.mark.parametrize("preset", ["reinforce", "grpo", "cispo"])
def test_kl_in_the_reward_descends_the_kl_of_whole_completions(preset: str):
    """Exactly: reward minus beta KL(pi || reference), where later tokens lead included."""
    theta, reference, beta = parameters(0), parameters(2), 0.7
    leaf = theta.clone().requires_grad_()
    sequence_kl = (probabilities(leaf) * (token_logprobs(leaf) - token_logprobs(reference)).sum(-1)).sum()
    objective = (probabilities(leaf) * REWARDS).sum() - beta * sequence_kl
    expected = -torch.autograd.grad(objective, leaf)[0]
    got = expected_in_reward(theta, reference, REWARDS, beta=beta, preset=preset)
    torch.testing.assert_close(got, expected, **EXACT)


def test_kl_in_the_reward_is_k1_in_the_loss_and_credit_for_later_tokens():
    """The second part is what no term in the loss has: sum_{s < t} d_t grad log pi_s."""
    theta, reference = parameters(0), parameters(2)
    in_reward = expected_in_reward(theta, reference, torch.zeros(V * V), beta=1.0)
    _, in_loss = expected_kl("k1", theta, reference=reference, behaviour=theta)
    leaf = theta.clone().requires_grad_()
    d = token_logprobs(theta) - token_logprobs(reference)
    later = (probabilities(theta) * d[:, 1] * token_logprobs(leaf)[:, 0]).sum()
    credit = torch.autograd.grad(later, leaf)[0]
    torch.testing.assert_close(in_reward, in_loss + credit, **EXACT)
    assert credit.abs().max() > 1e-2


def test_where_nothing_comes_later_kl_in_the_reward_is_k1_in_the_loss():
    """The reference differs from the policy in the last token of each completion only."""
    theta, reference = parameters(0), parameters(2)
    reference[0] = theta[0]
    reference[2:] = reference[1]  # and by as much wherever the first token leads
    theta[2:] = theta[1]
    in_reward = expected_in_reward(theta, reference, torch.zeros(V * V), beta=1.0)
    _, in_loss = expected_kl("k1", theta, reference=reference, behaviour=theta)
    torch.testing.assert_close(in_reward, in_loss, **EXACT)
    assert in_loss.abs().max() > 1e-2
