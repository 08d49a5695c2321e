"""aitraining's flags (`aitraining llm --train --trainer grpo ...`): an environment, and what is around it.

    --rl-env-module my_envs.hotel --rl-env-class HotelEnv --rl-env-config '{"difficulty": "hard"}'
                               flags, for `groupwise run`, `check`, `eval`, and `groupwise import --from aitraining`
    training_params.json       what it writes into a project; a file with `task: llm` and `params:` is read too

The environment has the three methods of there (`groupwise.tasks.compat.three_method`), or those of ours. Prompts and
rewards of ours (`data`, `rewards`) do in its place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
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
    json_object,
    made,
    number,
    one_of,
    plain,
    run_name,
    text,
)
from groupwise.config.importers.grpo_args import (
    AITRAINING_VLLM_KEYS,
    NARROWED,
    NARROWING_OFF,
    Names,
    put_batch,
    put_vllm,
)
from groupwise.config.importers.optimizer_args import OptimizerNames, length_of, optimizer_keys, put_optimizer
from groupwise.config.yaml import Document
from groupwise.errors import ConfigError

# ----------------------------------------------------------------------------------------------------------------------
# The table of aitraining's parameters for `--trainer grpo`, and what becomes of each; the defaults are aitraining's.
#
# Its `training_params.json` holds the parameters of all its trainers; those that its GRPO trainer does not read are
# idle.
# ----------------------------------------------------------------------------------------------------------------------

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

MARKS = frozenset({"rl_env_module", "rl_env_class", "rl_num_generations", "rl_max_new_tokens", "project_name"})
MAX_TURNS = 4096
SIZES = Names(
    micro="batch_size",
    accumulate="gradient_accumulation",
    group="rl_num_generations",
    generation="generation_batch_size",
    processes="num_processes",
)
Count = Callable[[Translation], int | None]
_OVERRIDE = re.compile(r"[A-Za-z_][\w.-]*(\[\d+\][\w.-]*)*=")


def is_flags(arguments: Sequence[str]) -> bool:
    """Whether a command line is aitraining's, and not a file with overrides."""
    names = {word.removeprefix("--").partition("=")[0].replace("-", "_") for word in arguments if word[:2] == "--"}
    begins = bool(arguments) and arguments[0].startswith("--")
    return "llm" in arguments[:2] or (begins and not names.isdisjoint(key.name for key in KEYS))


def flags(arguments: Sequence[str]) -> tuple[Document, list[str]]:
    """A command line, as in `--model M --rl-num-generations 4 --peft train.steps=3`: a document, and the overrides.

    Raises ConfigError.
    """
    data: dict[str, Any] = {}
    overrides: list[str] = []
    words = list(arguments)
    while words and words[0] in ("aitraining", "autotrain", "llm"):
        words.pop(0)
    while words:
        word = words.pop(0)
        if _OVERRIDE.match(word):
            overrides.append(word)
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not name:
            raise ConfigError(f"{word!r} is not a flag", hint="write aitraining's flags, as in --rl-num-generations 4")
        if not equals:
            alone = not words or words[0].startswith("--") or _OVERRIDE.match(words[0])
            value = "true" if alone else words.pop(0)
        data[name.replace("-", "_")] = value
    return Document(data, "the command line"), overrides


def translate(document: Document, *, folder: Path, count: Count) -> Translation:
    """The translation of a document; `count` counts the prompts of a translation's data."""
    params = document.data.get("params")
    if isinstance(params, dict):
        flat = {key: value for key, value in document.data.items() if key != "params"} | params
        document = Document(flat, document.name, None, document.overrides)
    t = Translation(document, system="aitraining", keys=KEYS)
    if t["trainer"] != "grpo":
        t.problem("trainer", f"{t['trainer']} is not trained here; write grpo")
    t.put("name", run_name(t["project_name"].rstrip("/").rpartition("/")[2]), "project_name")
    _put_environment(t)
    batch = put_batch(t, SIZES, generation=t[SIZES.generation], said=SIZES.generation)
    t.raise_problems()
    rows = None if t.given("max_steps") else count(t)
    per_epoch = None if rows is None else max(1, rows // batch.prompts)
    length = length_of(t, NAMES, steps_there=batch.steps_there, passes=1, per_epoch=per_epoch)
    if length.there is None:
        t.note_difference("epochs", "how many steps that is depends on the data; until then train.steps is our default")
    put_optimizer(t, NAMES, length, warmup=None)
    _put_loss(t)
    _put_model(t)
    put_vllm(t, "", lora=t["peft"], flag="peft")
    if not t.given("rl_top_k"):
        t.note_difference(
            "rl_top_k", "completions are drawn from all tokens, as the loss has it; there from the 50 likeliest"
        )
    if t["log"] == "wandb":
        t.put("tracking.wandb", t.draft.data["name"], "log", "project_name")
    elif t["log"] == "tensorboard":
        t.put("tracking.tensorboard", True, "log")
    elif t["log"] not in (None, "none"):
        t.refuse("log", f"{t['log']} is not here; wandb and tensorboard are", instead="log=none")
    return t


def _put_environment(t: Translation) -> None:
    module, name = "rl_env_module", "rl_env_class"
    if not t.given(module, name):
        for key in ("rl_env_config", "train_turns"):
            if t.given(key):
                t.problem(key, f"there is no environment; write {module} and {name} too")
        return
    for key, other, what in ((module, name, "the module"), (name, module, "the class")):
        if not t.given(key):
            t.problem(key, f"required with {other} and missing; name {what} of the environment")
            return
    t.put("env.environment", f"{t[module]}:{t[name]}", module, name)
    t.put("env.args", t["rl_env_config"], "rl_env_config")
    t.put("env.max_turns", MAX_TURNS, origin="turns have no limit there")
    t.put("env.train_turns", t["train_turns"], "train_turns")
    if not t.given("train_turns"):
        t.note_difference(module, "every turn that the environment generates is trained; train_turns=first is as there")


def _put_loss(t: Translation) -> None:
    loss, clip = t["rl_loss_type"], t["rl_clip_range"]
    t.put("algo.policy_loss", loss, "rl_loss_type")
    if loss == "cispo":
        if clip < 1:
            what = f"{clip:g} would be the largest ratio with cispo, and scale every token down; ScaleRL has 5.0"
            t.problem("rl_clip_range", f"{what}: write rl_clip_range=5.0")
        t.put("algo.clip_high", clip - 1, "rl_clip_range")
    elif loss == "sapo":
        t.put("algo.sapo_tau_positive", 1.0, origin="TRL's default, which is used there")
        t.put("algo.sapo_tau_negative", 1.05, origin="TRL's default, which is used there")
        if t.given("rl_clip_range"):
            t.note_idle("rl_clip_range", "sapo does not clip")
    else:
        t.put("algo.clip_low", clip, "rl_clip_range")
        t.put("algo.clip_high", clip, "rl_clip_range")
    if t["rl_kl_coef"]:
        t.put("algo.kl", "k3", "rl_kl_coef")
        t.put("algo.kl_coeff", t["rl_kl_coef"], "rl_kl_coef")


def _put_model(t: Translation) -> None:
    if t["distributed_backend"] not in (None, "none"):
        sharded = t["distributed_backend"] == "deepspeed"
        t.put("train.parallel", "fsdp" if sharded else "ddp", "distributed_backend")
    name = "disable_gradient_checkpointing"
    if t.given(name):
        t.put("train.gradient_checkpointing", not t[name], name)
    if not t["peft"]:
        t.clear("train.lora", "peft")
        t.put("dtype", "float32", origin="all parameters are trained")
        return
    if t["mixed_precision"] == "fp16":
        t.refuse("mixed_precision", "bfloat16 and float32 are here", instead="mixed_precision=bf16")
    elif t.given("mixed_precision"):
        t.put("dtype", "float32" if t["mixed_precision"] in ("no", "none") else "auto", "mixed_precision")
    modules = t["target_modules"]
    t.put("train.lora.rank", t["lora_r"], "lora_r")
    t.put("train.lora.alpha", t["lora_alpha"], "lora_alpha")
    t.put("train.lora.dropout", t["lora_dropout"], "lora_dropout")
    names = "all-linear" if modules == "all-linear" else [each.strip() for each in modules.split(",")]
    t.put("train.lora.targets", names, "target_modules")
