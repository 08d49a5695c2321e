"""What people call our keys elsewhere, and the first place of keys that have two: for "did you mean" alone.

The keys of systems whose files are imported stand here only where a job is asked for them, too (`config.job`), or where
their tables say less to the point: of all others these say what each is (`config.formats.known_elsewhere`).
"""

from __future__ import annotations

from groupwise.config.evaluation import EVAL_SAMPLING

OTHER_NAMES = {
    **{key: f"rollout.{key}" for key in EVAL_SAMPLING},
    "lr": "train.learning_rate",
    "max_steps": "train.steps",
    "lr_scheduler_type": "train.schedule",
    "max_new_tokens": "rollout.max_tokens",
    "beta": "dpo.beta or algo.kl_coeff",
    "loss_type": "algo.policy_loss",
    "loss_agg_mode": "algo.reduction",
    "adv_estimator": "algo.credit",
    "gamma": "algo.turn_discount",
    "step_advantage_w": "algo.step_advantage_weight",
    "epsilon": "algo.clip_low",
    "epsilon_high": "algo.clip_high",
    "reward_funcs": "rewards",
    "lora_r": "train.lora.rank",
    "lora_alpha": "train.lora.alpha",
    "datasets": "data",
    "adapter": "adapters.start",
    "enable_thinking": "chat.template_kwargs.enable_thinking",
    "reasoning_effort": "chat.template_kwargs.reasoning_effort",
}
