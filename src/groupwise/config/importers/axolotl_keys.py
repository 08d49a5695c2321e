"""The table of Axolotl's keys for `rl: grpo` and `rl: gdpo`, and what becomes of each; the defaults are Axolotl's.

Axolotl pins TRL 1.8.0, so what it leaves to TRL has the defaults of that. Its own schema ignores unknown keys under
`trl:`; here every argument of TRL's GRPO acts there, and an unknown one is an error.
"""

from __future__ import annotations

from groupwise.config.importers.base import (
    absent,
    all_idle,
    anything,
    boolean,
    flag_or_text,
    idle,
    integer,
    made,
    number,
    plain,
    text,
    texts,
    under,
)
from groupwise.config.importers.grpo_args import AXOLOTL_SECTION_KEYS, DEFAULTS_1_8
from groupwise.config.importers.grpo_args import KEYS as GRPO_KEYS
from groupwise.config.importers.optimizer_args import (
    DEEPSPEED,
    FSDP,
    SHARDS,
    WHOLE_KEYS,
    OptimizerNames,
    optimizer_keys,
)

NAMES = OptimizerNames(
    learning_rate="learning_rate",
    optimizer="optimizer",
    schedule="lr_scheduler",
    schedule_kwargs="lr_scheduler_kwargs",
    max_steps="max_steps",
    epochs="num_epochs",
    warmup_steps="warmup_steps",
    warmup_ratio="warmup_ratio",
)

_GRPO_DEFAULTS = DEFAULTS_1_8 | {
    "max_completion_length": None,
    "ref_model_mixup_alpha": 0.9,
    "ref_model_sync_steps": 64,
    "vllm_gpu_memory_utilization": None,  # of the section vllm
    "vllm_tensor_parallel_size": None,
    "vllm_importance_sampling_mode": None,  # sequence_mask, or token_truncate in the asynchronous trainer
}
ATTENTION = "attention is chosen by the model and the device"
_PACKED = "micro-batches are always packed, without padding"
_TRACKER_ENV = "the tracker reads its own environment variable for it"

ASYNC_ONLY = (
    "trl.vllm_sync_interval",
    "trl.prefetch_depth",
    "trl.streaming_partial_batch",
    "trl.streaming_min_groups",
    "trl.reward_num_workers",
    "trl.replay_buffer_size",
    "trl.reroll_start_fraction",
    "trl.reroll_max_groups",
)
"""What Axolotl drops without a word unless async_prefetch or use_data_producer is set."""

TRL_KEYS = (
    *under("trl.", GRPO_KEYS, _GRPO_DEFAULTS),
    made("trl.reward_funcs", texts, "rewards", what="dotted paths as module:function; reward models by name or folder"),
    made(
        "trl.async_prefetch",
        boolean,
        "rollout.max_staleness",
        default=False,
        what="sampling goes on while training does: max_staleness = vllm_sync_interval - 1 + prefetch_depth",
    ),
    made("trl.prefetch_depth", integer, "rollout.max_staleness", default=1, what="with async_prefetch"),
    made("trl.vllm_sync_interval", integer, "rollout.weight_sync_interval", default=1, what="optimizer steps there"),
    made(
        "trl.streaming_partial_batch",
        boolean,
        "rollout.stream_groups",
        default=False,
        what="training begins with the first `streaming_min_groups` groups that are scored",
    ),
    made("trl.streaming_min_groups", integer, "rollout.stream_groups", default=1, what="with streaming_partial_batch"),
    plain("trl.reward_num_workers", integer, "scoring.workers"),
    absent(
        "trl.skip_zero_advantage_batches",
        "groups without a learning signal are never trained",
        "trl.skip_zero_advantage_batches=true",
        off=(True,),
        kind=boolean,
    ),
    made("trl.replay_buffer_size", integer, "rollout.replay", default=0, what="share 1 and no age limit, as there"),
    absent(
        "trl.replay_recompute_logps",
        "replayed groups are always measured against the present policy",
        "trl.replay_recompute_logps=true",
        off=(True,),
        kind=boolean,
    ),
    made(
        "trl.reroll_start_fraction",
        number,
        "rollout.reroll",
        default=1.0,
        what="start; from 1 on it is off. Here a prompt is tried again twice, there without end",
    ),
    made("trl.reroll_max_groups", integer, "rollout.reroll", default=1, what="max_groups"),
    idle("trl.use_data_producer", "there is one way to make rollouts, and it is that"),
    idle("trl.vllm_lora_sync", "adapters are always exchanged as adapters"),
    *all_idle(
        "Axolotl reads it from its section vllm, and so do we",
        "trl.vllm_device",
        "trl.vllm_dtype",
        "trl.vllm_max_model_len",
        "trl.vllm_enable_prefix_caching",
    ),
    absent("trl.vllm_guided_decoding_regex", "the engine samples freely", off=()),
    absent(
        "trl.rollout_func",
        "env.agent=groupwise.tasks.compat.trl:RolloutFunc with env.args.function=MODULE:FUNCTION plays it",
        off=(),
    ),
    absent("trl.reward_processing_classes", "a reward model has its own tokenizer", off=()),
    idle("trl.use_liger_loss", "the loss is always fused with the LM head"),
    *AXOLOTL_SECTION_KEYS,
)

BATCH_KEYS = (
    made(
        "micro_batch_size",
        integer,
        "rollout.prompts_per_step",
        default=1,
        what="see Batches; micro-batches here are cut by train.micro_tokens",
    ),
    made("gradient_accumulation_steps", integer, "rollout.prompts_per_step", default=1, what="see Batches"),
    made(
        "num_processes",
        integer,
        "rollout.prompts_per_step",
        default=1,
        what="of `axolotl train --num-processes`, for the batch of so many; not a key there",
    ),
    absent("batch_size", "give micro_batch_size and gradient_accumulation_steps", off=()),
    absent("auto_find_batch_size", "micro-batches are cut by train.micro_tokens"),
    idle("eval_batch_size", "evaluation fills the engine's rows"),
    idle("batch_flattening", _PACKED),
    idle("pad_to_sequence_len", _PACKED),
    absent("sample_packing", "it is for supervised training; Axolotl refuses it with rl too"),
    idle("eval_sample_packing", "it is for supervised training"),
    idle("sequence_len", "prompts are not cut, there or here; rollout.max_prompt_tokens passes long ones over"),
    idle("group_by_length", _PACKED),
)

DATASET_KEYS = (
    made(
        "datasets",
        anything,
        "data",
        what="with a `type`, or several entries: groupwise.config.importers.axolotl makes the rows",
    ),
    made("test_datasets", anything, "eval", what="the same, for evaluation"),
    *(
        made(f"{block}[].{name}", kind, what=what)
        for block in ("datasets", "test_datasets")
        for name, kind, what in (
            ("path", text, "a file or folder beside the configuration, or a Hugging Face name"),
            ("name", text, "the dataset's configuration"),
            ("split", text, "the split, `train` by default; slices such as train[:16] too"),
            ("type", text, "module.transform, as in Axolotl; the module may stand beside the file"),
            ("ds_type", text, "json, csv, parquet, text or arrow, for `data_files` or a file"),
            ("data_files", anything, "the files"),
            ("revision", text, "of the Hugging Face dataset"),
        )
    ),
    *(absent(f"{block}[].trust_remote_code", "no code of a dataset is run") for block in ("datasets", "test_datasets")),
    made("val_set_size", number, "eval", default=0.0, what="held-out rows: a share, or a number from 1 on"),
    plain("curriculum_sampling", boolean, "data.shuffle", what="true keeps the order of the rows"),
    absent("remove_unused_columns", "rewards see every column", "remove_unused_columns=false"),
    absent("default_system_message", "transforms write prompts as they are; data.system=TEXT adds a message", off=()),
    absent("dataset_exact_deduplication", "rows are taken as they are"),
    absent(
        "shuffle_merged_datasets",
        "curriculum_sampling keeps the order",
        "shuffle_merged_datasets=true curriculum_sampling=true",
        off=(True,),
    ),
    absent("pretraining_dataset", "it is for pre-training", off=()),
    *all_idle(
        "rows are read and prepared on every start",
        "skip_prepare_dataset",
        "dataset_prepared_path",
        "dataset_processes",
        "dataset_num_proc",
        "dataset_keep_in_memory",
        "dataloader_num_workers",
        "dataloader_pin_memory",
        "dataloader_prefetch_factor",
        "hf_use_auth_token",
    ),
    *all_idle("it is for supervised training", "train_on_inputs", "max_prompt_len"),
)

MODEL_KEYS = (
    plain("base_model", text, "model"),
    made(
        "adapter", text, "train.lora", what="lora; without it all parameters are trained, in float32. qlora is not here"
    ),
    made("lora_r", integer, "train.lora.rank", default=8, what="the default is PEFT's"),
    made("lora_alpha", number, "train.lora.alpha", default=8, what="the default is PEFT's"),
    made("lora_dropout", number, "train.lora.dropout", default=0.0, what="as it is"),
    made("lora_target_linear", boolean, "train.lora.targets", what="true is all-linear"),
    made("lora_target_modules", anything, "train.lora.targets", what="a list of names, or all-linear"),
    made("lora_model_dir", text, "adapters.start", what="an adapter to start from"),
    made("peft_use_rslora", boolean, "train.lora.alpha", what="alpha x sqrt(rank), which is the same"),
    absent("peft_use_dora", "DoRA is not here; without it plain LoRA is trained", "peft_use_dora=false"),
    absent("load_in_4bit", "weights are not quantised", "load_in_4bit=false"),
    absent("load_in_8bit", "weights are not quantised", "load_in_8bit=false"),
    *(
        absent(name, "not here", off=(False, []))
        for name in (
            "lora_modules_to_save",
            "lora_target_parameters",
            "peft_layers_to_transform",
            "peft_layers_pattern",
            "peft_init_lora_weights",
            "peft",
            "loraplus_lr_ratio",
            "relora",
            "unfrozen_parameters",
            "gptq",
            "tokens",
            "added_tokens_overrides",
            "lr_groups",
            "embedding_lr",
            "cosine_constant_lr_ratio",
        )
    ),
    *all_idle(
        "it is how the adapter is kept or computed",
        "lora_fan_in_fan_out",
        "lora_on_cpu",
        "lora_mlp_kernel",
        "lora_qkv_kernel",
        "lora_o_kernel",
        "peft_autocast_adapter_dtype",
    ),
    made(
        "chat_template",
        text,
        what="tokenizer_default, or a name of what the tokenizer's own renders anyway",
    ),
    absent("chat_template_jinja", "prompts are rendered with the tokenizer's own template", off=()),
    idle("special_tokens.pad_token", "nothing is padded"),
    *(
        absent(f"special_tokens.{name}", "the tokenizer's own tokens are used", off=())
        for name in ("bos_token", "eos_token", "unk_token", "additional_special_tokens")
    ),
    absent("trust_remote_code", "no code of a model is run", "trust_remote_code=false"),
    absent("revision_of_model", "the newest is loaded; download the revision and give its folder", off=()),
    absent("tokenizer_config", "the tokenizer is the model's", off=()),
    *all_idle(
        "transformers' auto classes choose it",
        "model_type",
        "tokenizer_type",
        "processor_type",
        "base_model_config",
        "tokenizer_use_fast",
        "tokenizer_legacy",
        "is_llama_derived_model",
        "is_mistral_derived_model",
        "is_falcon_derived_model",
        "is_qwen_derived_model",
    ),
)

MACHINE_KEYS = (
    made(
        "bf16",
        flag_or_text,
        "dtype",
        default="auto",
        what="true, auto and full: auto, which is bfloat16 on a GPU; false: float32",
    ),
    idle("tf32", "it is how matrix products are computed"),
    absent("fp16", "bfloat16 and float32 are here", "bf16=true fp16=false"),
    absent("fp8", "bfloat16 and float32 are here", "bf16=true fp8=false"),
    idle("bfloat16", "see bf16"),
    absent("float16", "bfloat16 and float32 are here", "bf16=true float16=false"),
    made(
        "gradient_checkpointing",
        flag_or_text,
        "train.gradient_checkpointing",
        what="offload and offload_disk are true too",
    ),
    idle("gradient_checkpointing_kwargs", "it is always the variant that re-enters nothing"),
    made("flex_attention", boolean, "train.attention", what="true is flex"),
    made("attn_implementation", text, "train.attention", what="flex_attention is flex; others change nothing"),
    *all_idle(
        ATTENTION,
        "flash_attention",
        "sdp_attention",
        "xformers_attention",
        "eager_attention",
        "flash_attn_cross_entropy",
        "flash_attn_rms_norm",
    ),
    absent("s2_attention", "shifted attention is another model", off=(False,)),
    DEEPSPEED,
    *FSDP,
    SHARDS,
    idle("fsdp_version", "it is FSDP2; the update is the same"),
    *WHOLE_KEYS,
    absent("use_ray", "`groupwise launch` with launcher=ray starts actors", "use_ray=null launcher=ray"),
    *all_idle(
        "it concerns several processes or devices",
        "ddp",
        "ddp_timeout",
        "ddp_bucket_cap_mb",
        "ddp_broadcast_buffers",
        "ddp_find_unused_parameters",
        "local_rank",
        "device_map",
        "heads_k_stride",
        "ring_attn_func",
        "max_memory",
        "gpu_memory_limit",
        "low_cpu_mem_usage",
        "gc_steps",
    ),
    *all_idle(
        "kernels of its own are always used",
        "liger_rope",
        "liger_rms_norm",
        "liger_glu_activation",
        "liger_swiglu",
        "liger_fused_linear_cross_entropy",
        "liger_cross_entropy",
        "liger_layer_norm",
    ),
    made("plugins", texts, what="LigerPlugin changes no result; others are not here"),
    absent("trainer_cls", "there is one loop", off=()),
)

RUN_KEYS = (
    made("rl", text, "algo.aggregation", what="grpo; gdpo is normalize_then_sum"),
    made("rl_beta", number, "algo.kl_coeff", what="where trl.beta is not set"),
    made("learning_rate", number, "train.learning_rate", what="required"),
    made("cosine_min_lr_ratio", number, "train.final_rate", what="with the schedule cosine"),
    *optimizer_keys(NAMES, optimizer="adamw_torch_fused", schedule="cosine", epochs=1.0),
    plain("seed", integer, "seed", 42),
    plain("output_dir", text, "output_dir", "./model-out", what="runs are folders in it"),
    made("save_steps", number, "checkpoint.every", what="optimizer steps there; below 1 it is a share of the run"),
    made("save_strategy", text, "checkpoint.every", what="no is 0; steps is `save_steps`; epoch is our default"),
    idle("saves_per_epoch", "checkpoints come every 25 steps unless save_steps says otherwise"),
    made("save_total_limit", integer, "adapters.keep", what="as it is"),
    *all_idle(
        "what is saved is an adapter in safetensors, and what a resumed run needs",
        "save_safetensors",
        "save_only_model",
        "save_first_step",
    ),
    made("auto_resume_from_checkpoints", boolean, "resume", what="true is auto"),
    absent(
        "resume_from_checkpoint",
        "auto_resume_from_checkpoints finds it",
        "resume_from_checkpoint=null auto_resume_from_checkpoints=true",
        off=(),
    ),
    made("eval_steps", number, "eval.every", what="optimizer steps there; below 1 it is a share of the run"),
    made("evals_per_epoch", integer, "eval.every", what="steps of an epoch / so many"),
    made("eval_strategy", text, "eval", what="no is without; steps is `eval_steps`; epoch is once an epoch"),
    made("load_best_model_at_end", boolean, "eval.best", what="true is sampled: the best mean reward"),
    made("early_stopping_patience", integer, "eval.patience", what="with eval.best"),
    idle("greater_is_better", "a greater reward is"),
    absent("metric_for_best_model", "the mean reward is the measure", off=("eval_reward", "reward")),
    made("wandb_project", text, "tracking.wandb", what="unless use_wandb is false or wandb_mode disabled"),
    made("wandb_entity", text, "tracking.wandb_entity", what="with wandb_project"),
    made("wandb_name", text, "tracking.wandb_name", what="with wandb_project"),
    idle("wandb_run_id", "a run's id is its directory's name, so that it goes on in its own when it is resumed"),
    made("use_wandb", boolean, "tracking.wandb", what="false is without"),
    made("wandb_mode", text, "tracking.wandb", what="disabled is without; others by WANDB_MODE"),
    *all_idle(
        _TRACKER_ENV,
        "wandb_watch",
        "wandb_log_model",
        "mlflow_tracking_uri",
        "mlflow_run_name",
    ),
    plain("use_tensorboard", boolean, "tracking.tensorboard"),
    plain("mlflow_experiment_name", text, "tracking.mlflow"),
    idle("use_mlflow", "mlflow_experiment_name is what decides"),
    plain("trackio_project_name", text, "tracking.trackio"),
    idle("use_trackio", "trackio_project_name is what decides"),
    absent("use_comet", "W&B, Trackio, MLflow and TensorBoard are here"),
    absent("use_swanlab", "W&B, Trackio, MLflow and TensorBoard are here"),
    absent("hub_model_id", "nothing is uploaded; the adapter in the run directory can be", off=()),
    *all_idle("nothing is uploaded", "hub_strategy", "hub_revision", "push_dataset_to_hub"),
    *all_idle(
        "it only says what is logged or kept for debugging",
        "debug",
        "strict",
        "profiler_steps",
        "include_tokens_per_second",
        "eval_table_size",
        "loss_watchdog_threshold",
        "loss_watchdog_patience",
    ),
)

KEYS = (*RUN_KEYS, *TRL_KEYS, *BATCH_KEYS, *DATASET_KEYS, *MODEL_KEYS, *MACHINE_KEYS)
