"""TRL's real `GRPOTrainer._compute_loss` on a stub model, in float64: what losses and gradients are held against.

A batch is any object with [B, T] tensors `logprobs`, `mask`, `old`, `behaviour`, `reference`, `entropy` (those that the
case reads) and `advantages` [B].
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from peers import peer

trl = peer("trl")

MAX_LENGTH = 8  # TRL's max_completion_length, our reduction_length


@contextmanager
def float64_default():
    """TRL makes some constants in torch's default dtype; 1.05 in float32 would cost 1e-8."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def engine_ratio(batch: Any, case: dict) -> torch.Tensor:
    """What TRL's `_generate_and_score_completions` would have stored as importance_sampling_ratio."""
    assert batch.old is not None and batch.behaviour is not None
    difference = (batch.old - batch.behaviour) * batch.mask
    if case["vllm"].startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    ratio, cap = difference.exp(), case.get("cap", 3.0)
    if case["vllm"].endswith("truncate"):
        return ratio.clamp(min=case.get("floor"), max=cap)
    return ratio.masked_fill(ratio > cap, 0.0)


def trl_loss(batch: Any, case: dict) -> tuple[torch.Tensor, torch.Tensor, dict]:
    leaf = batch.logprobs.clone().requires_grad_()
    low, high = case.get("eps", (0.2, 0.28))
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True
    )
    trainer = trl.GRPOTrainer.__new__(trl.GRPOTrainer)
    settings = {
        "model": SimpleNamespace(training=True),
        "accelerator": accelerator,
        "args": SimpleNamespace(
            delta=case.get("delta"),
            use_bias_correction_kl=case.get("bias_kl", True),
            steps_per_generation=case.get("spg", 1),
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            vespo_k_pos=2.0,
            vespo_lambda_pos=3.0,
            vespo_k_neg=3.0,
            vespo_lambda_neg=2.0,
        ),
        "loss_type": case["loss_type"],
        "importance_sampling_level": case.get("level", "token"),
        "epsilon_low": low,
        "epsilon_high": high,
        "beta": case.get("beta", 0.0),
        "off_policy_mask_threshold": case.get("opsm"),
        "top_entropy_quantile": 1.0,
        "use_vllm": "vllm" in case,
        "vllm_importance_sampling_correction": "vllm" in case,
        "max_completion_length": MAX_LENGTH,
        "current_gradient_accumulation_steps": case.get("ga", 1),
        "aux_loss_enabled": False,
        "entropy_coef": case.get("ent_coef", 0.0),
        "_entropy_bonus_enabled": "ent_coef" in case,
        "use_adaptive_entropy": False,
        "_metrics": {"train": defaultdict(list)},
        "_get_per_token_logps_and_entropies": lambda *args, **kwargs: (leaf, batch.entropy, None),
    }
    vars(trainer).update(settings)
    ids = torch.zeros(batch.mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": batch.mask.long(),
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old,
        "ref_per_token_logps": batch.reference,
        "num_items_in_batch": torch.tensor(case.get("n_items", int(batch.mask.sum()))),
    }
    if "vllm" in case:
        inputs["importance_sampling_ratio"] = engine_ratio(batch, case)
    with float64_default():
        loss = trainer._compute_loss(None, inputs)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0], trainer._metrics["train"]
