"""TRL's arguments as a run of ours: the YAML of `trl grpo --config`, or a `GRPOConfig` in Python.

    model_name_or_path: Qwen/Qwen3-0.6B
    dataset_name: trl-lib/DeepMath-103K
    reward_funcs: [accuracy_reward]
    num_generations: 8
    per_device_train_batch_size: 8

The names are those of GRPOConfig, ModelConfig and the script's arguments, the defaults TRL 1.16.0's; `trl_version: 1.8`
has those of 1.8.0 (completions of 256 tokens, the KL as k3 without the ratio).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from groupwise.config.importers.base import (
    Translation,
    absent,
    all_idle,
    anything,
    boolean,
    idle,
    integer,
    made,
    number,
    one_of,
    plain,
    run_name,
    text,
    texts,
)
from groupwise.config.importers.grpo_args import (
    DEFAULTS_1_8,
    Batch,
    Names,
    put_algorithm,
    put_batch,
    put_rewards,
    put_sampling,
    put_vllm,
)
from groupwise.config.importers.grpo_args import KEYS as GRPO_KEYS
from groupwise.config.importers.optimizer_args import (
    ACCELERATE,
    DEEPSPEED,
    FSDP,
    TRANSFORMERS,
    WHOLE,
    Length,
    length_of,
    optimizer_keys,
    put_optimizer,
    put_parallel,
)
from groupwise.config.run import FILES
from groupwise.config.yaml import Document

# ----------------------------------------------------------------------------------------------------------------------
# The table of TRL's arguments besides GRPO's own: the model, the script, and transformers' TrainingArguments.
# ----------------------------------------------------------------------------------------------------------------------

REWARDS = {
    name: {"function": f"trl.rewards:{name}"}
    for name in ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
} | {
    "get_soft_overlong_punishment": {
        "function": "groupwise.rewards.length:soft_overlong",
        "args": {"max_length": 1280, "buffer": 256},
    }
}
"""The script's short names of rewards; those of `trl.rewards` need TRL installed."""

_STRATEGY = one_of("no", "steps", "epoch")

SCRIPT_KEYS = (
    made("trl_version", anything, what="1.8 has the defaults of that version; not a key there"),
    made("model_name_or_path", text, "model", what="required"),
    absent("model_revision", "the newest is loaded; download the revision and give its folder", off=("main",)),
    made("dtype", text, "dtype", default="float32", what="without an adapter it is float32"),
    made("use_peft", boolean, "train.lora", default=False, what="without it all parameters are trained"),
    made("lora_r", integer, "train.lora.rank", default=16, what="as it is"),
    made("lora_alpha", number, "train.lora.alpha", default=32, what="times sqrt(rank) with use_rslora"),
    made("lora_dropout", number, "train.lora.dropout", default=0.05, what="0 with disable_dropout"),
    made("lora_target_modules", anything, "train.lora.targets", what="a list of names, or all-linear"),
    made("use_rslora", boolean, "train.lora.alpha", default=False, what="alpha x sqrt(rank), which is the same"),
    absent("use_dora", "DoRA is not here; without it plain LoRA is trained", "use_dora=false"),
    absent("load_in_4bit", "weights are not quantised", "load_in_4bit=false"),
    absent("load_in_8bit", "weights are not quantised", "load_in_8bit=false"),
    *all_idle("weights are not quantised", "bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage"),
    absent("lora_modules_to_save", "only the adapter is trained", off=([],)),
    absent("lora_target_parameters", "only modules are adapted", off=([],)),
    idle("lora_task_type", "it is CAUSAL_LM"),
    idle("attn_implementation", "attention is chosen by the model and the device"),
    made(
        "dataset_name",
        text,
        "data",
        "eval",
        what="a Hugging Face name, a folder or a file of rows",
    ),
    made("dataset_config", text, "data.args", what="the dataset's configuration"),
    made("dataset_train_split", text, "data.split", default="train", what="as it is"),
    made("dataset_test_split", text, "eval.data.split", default="test", what="where eval_strategy is not no"),
    absent("dataset_streaming", "all rows are read when the run starts", "dataset_streaming=false"),
    absent("datasets", "a mixture is not here; give dataset_name, or a function that yields rows", off=()),
    idle("ignore_bias_buffers", "it concerns several processes"),
    made("reward_funcs", texts, "rewards", what="dotted paths, reward models, or names of functions in trl.rewards"),
    made("reward_model_name_or_path", text, "rewards", what="one more of `reward_funcs`"),
)

ARGUMENT_KEYS = (
    made("learning_rate", number, "train.learning_rate", default=1e-6, what="as it is"),
    *optimizer_keys(TRANSFORMERS, optimizer="adamw_torch_fused", schedule="linear", epochs=3.0),
    made("per_device_train_batch_size", integer, "rollout.prompts_per_step", default=8, what="see Batches"),
    made("gradient_accumulation_steps", integer, "rollout.prompts_per_step", default=1, what="see Batches"),
    made("steps_per_generation", integer, "rollout.prompts_per_step", "train.minibatches", what="see Batches"),
    made("num_processes", integer, "rollout.prompts_per_step", default=1, what="of accelerate; not a key there"),
    plain("seed", integer, "seed", 42),
    plain("output_dir", text, "output_dir", what="runs are folders in it"),
    plain("shuffle_dataset", boolean, "data.shuffle", True),
    made("disable_dropout", boolean, "train.lora.dropout", default=False, what="true is 0"),
    made("gradient_checkpointing", boolean, "train.gradient_checkpointing", what="off unless it is asked for"),
    made("save_strategy", _STRATEGY, "checkpoint.every", what="no is 0"),
    made("save_steps", number, "checkpoint.every", what="optimizer steps there; below 1 it is a share of the run"),
    made("save_total_limit", integer, "adapters.keep", what="as it is"),
    made("eval_strategy", _STRATEGY, "eval", default="no", what="no is without"),
    made("eval_steps", number, "eval.every", what="optimizer steps there; below 1 it is a share of the run"),
    made("load_best_model_at_end", boolean, "eval.best", default=False, what="true is sampled: the best mean reward"),
    absent("metric_for_best_model", "the mean reward is the measure", off=("eval_reward", "reward")),
    idle("greater_is_better", "a greater reward is"),
    made("report_to", anything, "tracking", what="wandb, trackio, mlflow, tensorboard"),
    made("project", text, "tracking", default="huggingface", what="the project of the trackers"),
    absent("remove_unused_columns", "rewards see every column", "remove_unused_columns=false"),
    absent("model_init_kwargs", "the model is loaded as it is", off=({},)),
    absent("trust_remote_code", "no code of a model is run", "trust_remote_code=false"),
    absent("router_aux_loss_coef", "there is no loss on the router", off=(0.0,)),
    absent("cast_lm_head_to_fp32", "the head has the model's type", "cast_lm_head_to_fp32=false"),
    absent("auto_find_batch_size", "micro-batches are cut by train.micro_tokens", "auto_find_batch_size=false"),
    absent("label_smoothing_factor", "the loss is the policy's", off=(0.0,)),
    absent("train_sampling_strategy", "shuffle_dataset decides", off=("random",)),
    absent("fp16", "bfloat16 and float32 are here", "fp16=false"),
    absent("fp16_full_eval", "bfloat16 and float32 are here", "fp16_full_eval=false"),
    DEEPSPEED,
    *FSDP,
    ACCELERATE,
    absent("parallelism_config", WHOLE, off=()),
    absent("push_to_hub", "nothing is uploaded; the adapter in the run directory can be", "push_to_hub=false"),
    absent(
        "resume_from_checkpoint",
        "resume=auto goes on with a run that was not finished",
        off=(False,),
        instead="resume_from_checkpoint=null resume=auto",
    ),
    *all_idle(
        "nothing is uploaded",
        "hub_token",
        "hub_private_repo",
        "hub_model_id",
        "hub_strategy",
        "hub_always_push",
        "hub_revision",
    ),
    *all_idle(
        "precision follows the device: bfloat16 on a GPU, float32 on a CPU", "bf16", "bf16_full_eval", "tf32", "use_cpu"
    ),
    *all_idle(
        "it is how activations are recomputed",
        "gradient_checkpointing_kwargs",
        "activation_checkpointing",
        "activation_checkpointing_kwargs",
    ),
    *all_idle("the loss is always fused with the LM head", "use_liger_kernel", "liger_kernel_config"),
    *all_idle("micro-batches are packed without padding", "pad_to_multiple_of", "length_column_name"),
    *all_idle(
        "the engine has batching and a cache of its own",
        "use_transformers_continuous_batching",
        "transformers_continuous_batching_config",
        "use_transformers_paged",
        "use_cache",
        "torch_empty_cache_steps",
    ),
    *all_idle(
        "it concerns several processes",
        "ds3_gather_for_generation",
        "average_tokens_across_devices",
        "accelerator_config",
        "local_rank",
        "ddp_find_unused_parameters",
        "ddp_bucket_cap_mb",
        "ddp_broadcast_buffers",
        "ddp_static_graph",
        "ddp_backend",
        "ddp_timeout",
        "log_on_each_node",
        "save_on_each_node",
        "log_level_replica",
    ),
    *all_idle(
        "rows are read when the run starts",
        "dataloader_drop_last",
        "dataloader_num_workers",
        "dataloader_pin_memory",
        "dataloader_persistent_workers",
        "dataloader_prefetch_factor",
        "dataloader_multiprocessing_context",
        "dataloader_in_order",
        "ignore_data_skip",
        "data_seed",
        "label_names",
    ),
    *all_idle(
        "evaluation is a mean reward over whole groups",
        "eval_delay",
        "per_device_eval_batch_size",
        "prediction_loss_only",
        "eval_on_start",
        "eval_do_concat_batches",
        "eval_use_gather_object",
        "eval_accumulation_steps",
        "include_for_metrics",
        "batch_eval_metrics",
        "do_train",
        "do_eval",
        "do_predict",
    ),
    *all_idle(
        "it only says what is logged or kept",
        "logging_nan_inf_filter",
        "include_num_input_tokens_seen",
        "log_level",
        "disable_tqdm",
        "run_name",
        "trackio_space_id",
        "trackio_bucket_id",
        "trackio_static_space_id",
        "debug",
        "skip_memory_metrics",
        "save_only_model",
        "enable_jit_checkpoint",
        "restore_callback_states_from_checkpoint",
    ),
    idle("full_determinism", "on a CPU in float32 a run is repeated bit for bit anyway"),
)

KEYS = (*GRPO_KEYS, *SCRIPT_KEYS, *ARGUMENT_KEYS)

"""Fields of a LoraConfig that say nothing of what is trained."""
MARKS = frozenset(
    {
        "model_name_or_path",
        "dataset_name",
        "num_generations",
        "max_completion_length",
        "per_device_train_batch_size",
        "reward_funcs",
    }
)
SIZES = Names(
    micro="per_device_train_batch_size",
    accumulate="gradient_accumulation_steps",
    group="num_generations",
    generation="generation_batch_size",
    processes="num_processes",
)
Count = Callable[[Translation], int | None]


def translate(document: Document, *, folder: Path, count: Count) -> Translation:
    """The translation of a file in `folder`; `count` counts the prompts of a translation's data."""
    t = Translation(document, system="TRL", keys=_keys(document.data))
    t.put("name", run_name(Path(document.name).stem), origin="the file's name")
    batch = _put_batch(t)
    _put_data(t)
    put_sampling(t, "")
    if t.given("reward_funcs", "reward_model_name_or_path"):
        t.values["reward_funcs"] = [*(t["reward_funcs"] or []), *_texts(t["reward_model_name_or_path"])]
        put_rewards(t, "reward_funcs", "reward_weights", known=REWARDS)
    t.raise_problems()
    by_epochs = (t["max_steps"] or 0) <= 0
    rows = count(t) if by_epochs or t["eval_strategy"] == "epoch" else None
    per_epoch = None if rows is None else rows // batch.prompts
    if per_epoch == 0:
        t.problem("dataset_name", f"{rows} prompts are fewer than the {batch.prompts} of one step")
        t.raise_problems()
    passes = t["num_iterations"]
    length = length_of(t, TRANSFORMERS, steps_there=batch.steps_there, passes=passes, per_epoch=per_epoch)
    put_optimizer(t, TRANSFORMERS, length, warmup=0)
    put_algorithm(t, "", off_policy=False)
    _put_model(t)
    put_vllm(t, "", lora=t["use_peft"])
    put_parallel(t, folder)
    _put_run(t, length)
    _put_eval(t, length, per_epoch)
    return t


def _keys(data: Mapping[str, Any]) -> list[Any]:
    """The table with the defaults of the version that is meant."""
    old = str(data.get("trl_version", "")).startswith("1.8")
    return (
        [dataclasses.replace(key, default=DEFAULTS_1_8.get(key.name, key.default)) for key in KEYS] if old else [*KEYS]
    )


def _texts(value: str | None) -> list[str]:
    return [] if value is None else [value]


def _put_batch(t: Translation) -> Batch:
    steps, generation = t["steps_per_generation"], t[SIZES.generation]
    if steps is None:
        return put_batch(t, SIZES, generation=generation, said=SIZES.generation)
    if generation is not None:
        t.problem("steps_per_generation", f"{SIZES.generation} says the same in completions; write one of them")
        t.raise_problems()
    generation = steps * t[SIZES.micro] * t[SIZES.processes]
    return put_batch(t, SIZES, generation=generation, said="steps_per_generation")


def _put_data(t: Translation) -> None:
    _put_dataset(t, "data", "dataset_train_split")
    t.put("data.shuffle", t["shuffle_dataset"], "shuffle_dataset")


def _put_dataset(t: Translation, to: str, split: str) -> None:
    name = t["dataset_name"]
    if name is None:
        return
    t.put(f"{to}.source", name, "dataset_name")
    if not name.endswith(FILES):
        t.put(f"{to}.split", t[split], split)
        t.put(f"{to}.args", {"name": t["dataset_config"]} if t.given("dataset_config") else None, "dataset_config")
    t.put(f"{to}.prompt_key", "prompt", origin="the column that GRPO reads there")
    t.put(f"{to}.raw", True, origin="a prompt that is a string is sampled as it is there")


def _put_model(t: Translation) -> None:
    if not t.given("model_name_or_path"):
        t.problem("model_name_or_path", "required and missing")
    t.put("model", t["model_name_or_path"], "model_name_or_path")
    if not t["use_peft"]:
        t.clear("train.lora", "use_peft")
        t.put("dtype", "float32", "dtype", origin="all parameters are trained, in float32 as there")
        for name in ("lora_r", "lora_alpha", "lora_target_modules"):
            if t.given(name):
                t.refuse(name, "it acts with use_peft; as it is, all parameters are trained", instead="use_peft=true")
        return
    if t.given("dtype"):
        t.put("dtype", {"float32": "float32", "bfloat16": "bfloat16"}.get(t["dtype"], "auto"), "dtype")
    t.put("train.lora.rank", t["lora_r"], "lora_r")
    scale = math.sqrt(t["lora_r"]) if t["use_rslora"] else 1.0
    t.put("train.lora.alpha", t["lora_alpha"] * scale, "lora_alpha", "use_rslora")
    t.put("train.lora.dropout", 0.0 if t["disable_dropout"] else t["lora_dropout"], "lora_dropout", "disable_dropout")
    modules = t["lora_target_modules"]
    if modules is None:
        t.note_difference(
            "lora_target_modules",
            "not set: all-linear is adapted; there PEFT chooses",
        )
    every = modules is None or modules in ("all-linear", ["all-linear"])
    t.put("train.lora.targets", "all-linear" if every else modules, "lora_target_modules")


def _put_run(t: Translation, length: Length) -> None:
    """Checkpoints, what is kept, and where metrics go."""
    if t.given("gradient_checkpointing"):
        t.put("train.gradient_checkpointing", t["gradient_checkpointing"], "gradient_checkpointing")
    if t["save_strategy"] == "no":
        t.put("checkpoint.every", 0, "save_strategy")
    elif t.given("save_steps"):
        t.put("checkpoint.every", length.interval(t["save_steps"]), "save_steps")
    t.put("adapters.keep", t["save_total_limit"], "save_total_limit")
    report = t["report_to"]
    for tracker in [report] if isinstance(report, str) else report or []:
        if tracker in ("wandb", "trackio", "mlflow"):
            t.put(f"tracking.{tracker}", t["project"], "report_to", "project")
        elif tracker == "tensorboard":
            t.put("tracking.tensorboard", True, "report_to")
        elif tracker != "none":
            t.refuse("report_to", f"{tracker} is not here; wandb, trackio, mlflow and tensorboard are")


def _put_eval(t: Translation, length: Length, per_epoch: int | None) -> None:
    if t["eval_strategy"] == "no":
        if t.given("eval_steps"):
            t.note_idle("eval_steps", "eval_strategy is no, so nothing is evaluated")
        return
    if t.given("dataset_name"):
        _put_dataset(t, "eval.data", "dataset_test_split")
    every = per_epoch if t["eval_strategy"] == "epoch" else length.interval(t["eval_steps"] or 500)
    t.put("eval.every", every, "eval_steps", "eval_strategy")
    t.put("eval.modes", ["sampled"], origin="evaluation samples there")
    t.put("eval.k", t["num_generations_eval"] or t["num_generations"], "num_generations_eval", "num_generations")
    if t["load_best_model_at_end"]:
        t.put("eval.best", "sampled", "load_best_model_at_end")


# ---- from Python ----
