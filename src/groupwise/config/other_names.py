"""Other names of our keys and values, as people know them from elsewhere, and the first place of keys that have two:
for "did you mean" alone. Where another value does the same it stands here as an override, `key=value`.

The keys of systems whose files are imported stand here only where a job is asked for them, too (`config.job`), or where
their tables say less to the point: of all others these say what each is (`config.formats.known_elsewhere`).
"""

from __future__ import annotations

from typing import Any

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
    "reward_funcs": "rewards=[MODULE:FUNCTION]",
    "scale_rewards": "algo.advantage=group_std (true there; mean is false)",
    **dict.fromkeys(("model_name", "model_name_or_path"), "model"),
    "optim": "train.optimizer",
    "save_steps": "checkpoint.every",
    "eval_steps": "eval.every",
    **dict.fromkeys(("lora_r", "r"), "train.lora.rank"),
    **dict.fromkeys(("target_modules", "lora_target_modules"), "train.lora.targets"),
    "lora_alpha": "train.lora.alpha",
    "lora": "train.lora.rank=N (LoRA is the default; train.lora=null trains all parameters)",
    "lora_rank": "train.lora.rank",
    "peft_config": "train.lora.rank=N, train.lora.alpha=N",
    "use_peft": "train.lora.rank=N (LoRA is the default; train.lora=null trains all parameters)",
    "full_finetuning": "train.lora=null",
    "load_in_4bit": "quantization=nf4",
    "load_in_8bit": "quantization=int8",
    "bf16": "dtype=bfloat16",
    "fp16": "dtype=bfloat16",
    "use_vllm": "engine=vllm",
    "report_to": "tracking.wandb=PROJECT (or tracking.trackio, mlflow, tensorboard)",
    "run_name": "name",
    **dict.fromkeys(
        ("num_train_epochs", "num_epochs", "epochs"), "train.steps=N (N = epochs x prompts / rollout.prompts_per_step)"
    ),
    "n": "rollout.group_size",
    "max_length": "rollout.max_tokens",
    "max_seq_length": "rollout.max_tokens=N (of completions; rollout.max_prompt_tokens=N of prompts)",
    "clip_range": "algo.clip_low",
    **dict.fromkeys(("ref_model", "reference_model"), "algo.kl=k3 with algo.kl_coeff=N (algo.reference: to which)"),
    **dict.fromkeys(("gpus", "num_gpus", "n_gpus"), "train.devices"),
    "resume_from_checkpoint": "resume=auto",
    "dataset": "data.source",
    "dataset_name": "data.source",
    "train_dataset": "data.source",
    "datasets": "data",
    "eval_dataset": "eval.data.source",
    "system_prompt": "data.system",
    "judge": "rewards=[MODULE:FUNCTION] (docs/rewards.md has judges)",
    "adapter": "adapters.start",
    "enable_thinking": "chat.template_kwargs.enable_thinking",
    "reasoning_effort": "chat.template_kwargs.reasoning_effort",
}

OTHER_VALUES: dict[tuple[str, Any], str] = {
    **dict.fromkeys((("resume", True), ("resume", "true"), ("resume", "yes"), ("resume", "always")), "resume=auto"),
    ("resume", False): "resume=never",
    **dict.fromkeys((("device", "gpu"), ("device", "cuda:all")), "device=cuda"),
    **dict.fromkeys((("dtype", word) for word in ("bf16", "fp16", "float16", "half")), "dtype=bfloat16"),
    **dict.fromkeys((("dtype", word) for word in ("fp32", "float", "full")), "dtype=float32"),
    **dict.fromkeys((("quantization", word) for word in ("4bit", "int4", "fp4", 4)), "quantization=nf4"),
    **dict.fromkeys((("quantization", word) for word in ("8bit", "fp8", 8)), "quantization=int8"),
    **dict.fromkeys((("engine", word) for word in ("hf", "transformers", "native")), "engine=local"),
}  # a key of ours and a value, in small letters, that people know from elsewhere
