"""The losses of preference pairs: their formulas, TRL 1.16.0's on the same numbers, and what of a group is a pair."""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from groupwise.algo.distillation import demonstrations
from groupwise.algo.preference import pairs_of, preference_loss
from groupwise.config.preference import PreferenceConfig
from groupwise.store.trl_names import trl_metrics
from groupwise.types import Completion, FinishReason, Prompt, Rollout, RolloutGroup, Turn
from peers import peer

trl = peer("trl")


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_dpo_of_numbers_that_one_can_check():
    """Two pairs, whose margins are 3 and -1 nats."""
    policy = torch.tensor([-5.0, -9.0, -4.0, -2.0], dtype=torch.float64, requires_grad=True)
    reference, tokens = torch.tensor([-6.0, -7.0, -4.0, -3.0], dtype=torch.float64), 2 * torch.ones(4)
    loss, metrics = preference_loss(policy, reference, tokens, PreferenceConfig(beta=0.5), pairs=2)
    assert float(loss.detach()) == pytest.approx((-math.log(sigmoid(1.5)) - math.log(sigmoid(-0.5))) / 2, abs=1e-12)
    (gradient,) = torch.autograd.grad(loss, policy)
    first, second = 0.25 * sigmoid(-1.5), 0.25 * sigmoid(0.5)
    assert gradient.tolist() == pytest.approx([-first, first, -second, second], abs=1e-12)
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(
        {
            "loss/preference": float(loss.detach()),
            "preference/chosen_reward": 0.25,
            "preference/rejected_reward": (-1 + 0.5) / 2,
            "preference/margin": 0.5,
            "preference/accuracy": 0.5,
            "preference/chosen_gain": 0.25,
            "preference/chosen_logprob": -4.5,
            "preference/rejected_logprob": -5.5,
        }
    )


class Scored(torch.nn.Module):
    """What TRL's trainer gets of a model: the log-probabilities of a batch, without one."""

    def __init__(self, logprobs: torch.Tensor):
        super().__init__()
        zeros = torch.zeros_like(logprobs)
        self.said = SimpleNamespace(
            log_probs=logprobs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool(), aux_loss=None
        )

    def forward(self, **inputs: object) -> SimpleNamespace:
        return self.said


def trl_preference(
    policy: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor, *, loss: str, beta: float
) -> tuple[torch.Tensor, dict[str, list[float]]]:
    """Return TRL's loss, and its metrics, of [2 P, T] log-probabilities, chosen rows before rejected ones."""
    trainer = trl.DPOTrainer.__new__(trl.DPOTrainer)
    settings = {
        "model": Scored(policy),
        "ref_model": Scored(reference),
        "accelerator": SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x),
        "args": SimpleNamespace(gradient_checkpointing_kwargs=None),
        "beta": beta,
        "loss_types": [loss],
        "loss_weights": [1.0],
        "ld_alpha": None,
        "precompute_ref_logps": False,
        "f_divergence_type": "reverse_kl",
        "label_smoothing": 0.0,
        "use_weighting": False,
        "aux_loss_enabled": False,
        "_tp_size": 1,
        "_total_train_tokens": 0,
        "_metrics": {"train": defaultdict(list)},
    }
    vars(trainer).update(settings)
    before = torch.zeros(len(mask), 1, dtype=torch.long)  # a prompt of one token
    completion_mask = torch.cat([before, mask.long()], dim=1)
    inputs = {
        "input_ids": torch.zeros_like(completion_mask),
        "attention_mask": torch.ones_like(completion_mask),
        "completion_mask": completion_mask,
    }
    return trainer._compute_loss(trainer.model, inputs, False), trainer._metrics["train"]


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
@pytest.mark.parametrize("beta", [0.1, 0.7])
def test_it_is_trls(loss: str, beta: float, monkeypatch: pytest.MonkeyPatch):
    """TRL 1.16.0's own `_compute_loss`, in float64: loss, gradient and metrics."""
    monkeypatch.setattr("trl.trainer.dpo_trainer.disable_gradient_checkpointing", lambda *_: nullcontext())
    g = torch.Generator().manual_seed(0)
    lengths = torch.tensor([5, 2, 7, 3, 6, 1])  # three chosen, three rejected
    mask = (torch.arange(7) < lengths[:, None]).double()
    policy, reference = (-(3 * torch.rand(6, 7, generator=g, dtype=torch.float64)) * mask for _ in range(2))
    policy = policy.requires_grad_()
    theirs, told = trl_preference(policy, reference, mask, loss=loss, beta=beta)
    (their_gradient,) = torch.autograd.grad(theirs, policy)
    turns = [0, 3, 1, 4, 2, 5]  # chosen and rejected in turns
    ours, metrics = preference_loss(
        policy.sum(1)[turns],
        reference.sum(1)[turns],
        mask.sum(1)[turns],
        PreferenceConfig.model_validate({"loss": loss, "beta": beta}),
        pairs=3,
    )
    (gradient,) = torch.autograd.grad(ours, policy)
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), abs=1e-12)
    torch.testing.assert_close(gradient, their_gradient, rtol=0, atol=1e-12)
    named = trl_metrics({name: float(value) for name, value in metrics.items()})
    assert named.pop("loss") == pytest.approx(float(theirs.detach()), abs=1e-12)
    assert len(named) == 6
    assert named == pytest.approx({name: told[name][0] for name in named}, abs=1e-6)  # accuracies there in float32


def group(*said: tuple[int, ...]) -> RolloutGroup:
    """A group whose demonstrations are these completions of the tokens 1 and 2."""
    shown = [
        Completion(token_ids=ids, logprobs=(0.0,) * len(ids), text="", finish_reason=FinishReason.STOP) for ids in said
    ]
    return RolloutGroup(
        prompt=Prompt(id="rows.jsonl:1", text="1"),
        rollouts=(),
        demonstrations=tuple(Rollout(turns=(Turn((1, 2), each),)) for each in shown),
    )


def test_a_pair_is_two_completions_of_one_prompt():
    """Also of a step's second part, whose groups are numbered on."""
    shown = demonstrations([group((3, 4), (5,)), group(), group((6,), (7, 8))], first=3)
    assert [
        [(each.prompt_ids, each.completion_ids, each.mask, each.group) for each in pair] for pair in pairs_of(shown)
    ] == [
        [((1, 2), (3, 4), (1, 1), 3), ((1, 2), (5,), (1,), 3)],
        [((1, 2), (6,), (1,), 5), ((1, 2), (7, 8), (1, 1), 5)],
    ]
