"""The table of aitraining's parameters for `--trainer grpo`, and what becomes of each; the defaults are aitraining's.

Its `training_params.json` holds the parameters of all its trainers; those that its GRPO trainer does not read are idle.
"""

from __future__ import annotations

from groupwise.frontends.grpo_args import NARROWED, NARROWING_OFF
from groupwise.frontends.keys import (
    absent,
    all_idle,
    anything,
    boolean,
    idle,
    integer,
    json_object,
    made,
    number,
    one_of,
    plain,
    text,
)
from groupwise.frontends.optimizer_args import OptimizerNames, optimizer_keys
from groupwise.frontends.vllm_keys import AITRAINING_VLLM_KEYS

NAMES = OptimizerNames(
    learning_rate="lr",
    optimizer="optimizer",
    schedule="scheduler",
    schedule_kwargs="lr_scheduler_kwargs",
    max_steps="max_steps",
    epochs="epochs",
    warmup_steps="warmup_steps",
    warmup_ratio="warmup_ratio",
)
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo")

_OTHER_TRAINERS = """
train backend data_path train_split valid_split max_samples add_eos_token block_size model_max_length padding
prompt_text_column text_column rejected_text_column max_prompt_length max_completion_length model_ref dpo_beta
auto_convert_dataset use_sharegpt_mapping sharegpt_mapping_enabled suggested_chat_template column_mapping
runtime_mapping map_eos_token conversation_extension apply_chat_template use_distillation teacher_model
teacher_prompt_template student_prompt_template distill_temperature distill_alpha distill_max_teacher_length
sweep_backend sweep_n_trials sweep_metric sweep_direction sweep_params wandb_sweep wandb_sweep_project
wandb_sweep_entity wandb_sweep_id wandb_run_id use_enhanced_eval eval_metrics eval_dataset_path eval_batch_size
eval_save_predictions eval_benchmark chat_format token_weights rl_gamma rl_gae_lambda rl_value_loss_coef rl_reward_fn
rl_multi_objective rl_reward_weights rl_env_type rl_reward_model_path rl_num_ppo_epochs rl_chunk_size
rl_mini_batch_size rl_optimize_device_cache rl_value_clip_range custom_loss custom_loss_weights custom_metrics
use_forward_backward forward_backward_loss_fn forward_backward_custom_fn gradient_accumulation_steps
manual_optimizer_control optimizer_step_frequency grad_clip_value sample_every_n_steps sample_prompts
sample_temperature sample_top_k sample_top_p manual_checkpoint_control save_state_every_n_steps load_state_from
inference_prompts inference_max_tokens inference_temperature inference_top_p inference_top_k inference_output
"""

GRPO_KEYS = (
    made("rl_env_module", text, "env.environment", what="`module:class`; without it `data` and `rewards` of ours"),
    made("rl_env_class", text, "env.environment", what="with `rl_env_module`"),
    made("rl_env_config", json_object, "env.args", what="a JSON object: arguments of the class"),
    made(
        "train_turns",
        one_of("all", "first"),
        "env.train_turns",
        what="not a parameter there: `first` is what it does, all is our default",
    ),
    plain("rl_num_generations", integer, "rollout.group_size", 4),
    plain("rl_max_new_tokens", integer, "rollout.max_tokens", 128),
    plain("rl_temperature", number, "rollout.temperature", 1.0),
    absent("rl_top_p", NARROWED, off=NARROWING_OFF["top_p"], kind=number),
    absent("rl_top_k", NARROWED, off=NARROWING_OFF["top_k"], kind=integer),
    made("rl_kl_coef", number, "algo.kl_coeff", "algo.kl", default=0.1, what="0 is without; otherwise k3 in the loss"),
    made(
        "rl_clip_range",
        number,
        "algo.clip_low",
        "algo.clip_high",
        default=0.2,
        what="both; with cispo the largest ratio, so clip_high is one less; not read by sapo",
    ),
    made("rl_loss_type", one_of(*LOSSES), "algo.policy_loss", default="grpo", what="with `rl_clip_range`"),
    plain("rl_mask_truncated_completions", boolean, "algo.mask_truncated", False),
    *AITRAINING_VLLM_KEYS,
)

TRAINER_KEYS = (
    plain("model", text, "model"),
    made("project_name", text, "name", default="project-name", what="its last part"),
    made("trainer", text, default="grpo", what="grpo"),
    made("params", anything, what="the parameters, in a file with `task: llm`"),
    idle("task", "it is llm"),
    made("lr", number, "train.learning_rate", default=3e-5, what="as it is"),
    *optimizer_keys(NAMES, optimizer="adamw_torch", schedule="linear", epochs=1.0, warmup_ratio=0.1),
    made("batch_size", integer, "rollout.prompts_per_step", default=2, what="see Batches"),
    made("gradient_accumulation", integer, "rollout.prompts_per_step", default=4, what="see Batches"),
    made("generation_batch_size", integer, "rollout.prompts_per_step", what="not a parameter there"),
    made("num_processes", integer, "rollout.prompts_per_step", default=1, what="GPUs; not a parameter there"),
    plain("seed", integer, "seed", 42),
    made("peft", boolean, "train.lora", default=False, what="without it all parameters are trained"),
    made("lora_r", integer, "train.lora.rank", default=16, what="with peft"),
    made("lora_alpha", number, "train.lora.alpha", default=32, what="with peft"),
    made("lora_dropout", number, "train.lora.dropout", default=0.05, what="with peft"),
    made("target_modules", text, "train.lora.targets", default="all-linear", what="all-linear, or names with commas"),
    made("mixed_precision", text, "dtype", what="bf16: auto; none: float32; fp16 is not here"),
    absent("quantization", "weights are not quantised", off=("none",)),
    made("log", text, "tracking", what="wandb, in the project's name, and tensorboard; only where it is said"),
    plain("save_total_limit", integer, "adapters.keep"),
    made("disable_gradient_checkpointing", boolean, "train.gradient_checkpointing", what="false is true"),
    absent(
        "resume_from_checkpoint",
        "resume=auto goes on with a run that was not finished",
        "resume_from_checkpoint=null resume=auto",
        off=(),
    ),
    made(
        "distributed_backend",
        one_of("ddp", "deepspeed", "none"),
        "train.parallel",
        what="deepspeed is ZeRO 3 there: fsdp; ddp is ddp",
    ),
    absent("use_sweep", "there are no sweeps; start several runs", "use_sweep=false"),
    absent("push_to_hub", "nothing is uploaded; the adapter in the run directory can be", "push_to_hub=false"),
    absent("chat_template", "prompts are rendered with the tokenizer's own template", off=("tokenizer", "none")),
)

IDLE_KEYS = (
    idle("merge_adapter", "what comes out is the adapter; peft's merge_and_unload makes one model of it"),
    *all_idle("nothing is uploaded", "username", "token", "repo_id", "hub_private"),
    *all_idle(
        "attention, kernels and micro-batches are chosen by the model and the device",
        "use_flash_attention_2",
        "attn_implementation",
        "auto_find_batch_size",
        "packing",
        "ddp_timeout",
        "unsloth",
    ),
    *all_idle("checkpoints are what a run goes on from", "save_strategy", "save_steps", "eval_strategy"),
    *all_idle(
        "its GRPO trainer does not read it",
        *_OTHER_TRAINERS.split(),
    ),
)

KEYS = (*GRPO_KEYS, *TRAINER_KEYS, *IDLE_KEYS)
