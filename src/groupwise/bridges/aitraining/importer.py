"""aitraining's flags (`aitraining llm --train --trainer grpo ...`): an environment, and what is around it.

    --rl-env-module my_envs.hotel --rl-env-class HotelEnv --rl-env-config '{"difficulty": "hard"}'
                               flags, for `groupwise run`, `check`, `eval`, and `groupwise import --from aitraining`
    training_params.json       what it writes into a project; a file with `task: llm` and `params:` is read too

The environment has the methods of there (`bridges.aitraining.three_method`), or those of ours. Prompts and rewards
of ours (`data`, `rewards`) do in its place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from groupwise.bridges.trainer_args.batch_sizes import Names, put_batch
from groupwise.bridges.trainer_args.grpo_args import put_narrowing
from groupwise.bridges.trainer_args.optimizer_args import OptimizerNames, length_of, put_optimizer
from groupwise.bridges.trainer_args.vllm_args import put_vllm
from groupwise.config.formats.format import ConfigFormat, Count
from groupwise.config.formats.tables import keys_of
from groupwise.config.formats.translation import MISSING, Translation, run_name
from groupwise.config.yaml import Document
from groupwise.errors import ConfigError

KEYS = Path(__file__).with_name("keys.yaml")
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
MARKS = frozenset({"rl_env_module", "rl_env_class", "rl_num_generations", "rl_max_new_tokens", "project_name"})
MAX_TURNS = 4096
SIZES = Names(
    micro="batch_size",
    accumulate="gradient_accumulation",
    group="rl_num_generations",
    generation="generation_batch_size",
    processes="num_processes",
)
_OVERRIDE = re.compile(r"[A-Za-z_][\w.-]*(\[\d+\][\w.-]*)*=")


def is_flags(arguments: Sequence[str]) -> bool:
    """Return whether a command line is aitraining's, and not a file with overrides."""
    names = {word.removeprefix("--").partition("=")[0].replace("-", "_") for word in arguments if word[:2] == "--"}
    begins = bool(arguments) and arguments[0].startswith("--")
    return "llm" in arguments[:2] or (begins and not names.isdisjoint(key.name for key in keys_of(KEYS)))


def flags(arguments: Sequence[str]) -> tuple[Document, list[str]]:
    """Return a command line, as in `--model M --rl-num-generations 4 --peft train.steps=3`: a document, and the
    overrides.

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
    """Return the translation of a document; `count` counts the prompts of a translation's data."""
    params = document.data.get("params")
    if isinstance(params, dict):
        flat = {key: value for key, value in document.data.items() if key != "params"} | params
        document = Document(flat, document.name, None, document.overrides)
    t = Translation(document, system="aitraining", keys=keys_of(KEYS))
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
            "rl_top_k", "completions are drawn from all tokens, as the loss there has it; there from the 50 likeliest"
        )
    for name in ("top_p", "top_k"):
        put_narrowing(t, f"rl_{name}", f"rollout.{name}", t[f"rl_{name}"], vllm=bool(t["use_vllm"]))
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
    if (kind := t["quantization"]) not in (None, "none"):
        known = {"int4": "nf4", "int8": "int8"}
        if kind in known:
            t.put("quantization", known[kind], "quantization")
        else:
            t.refuse("quantization", "int4 and int8 are here", instead="quantization=int4")
    modules = t["target_modules"]
    t.put("train.lora.rank", t["lora_r"], "lora_r")
    t.put("train.lora.alpha", t["lora_alpha"], "lora_alpha")
    t.put("train.lora.dropout", t["lora_dropout"], "lora_dropout")
    names = "all-linear" if modules == "all-linear" else [each.strip() for each in modules.split(",")]
    t.put("train.lora.targets", names, "target_modules")


def complete(t: Translation) -> bool:
    """Refuse a run that names no environment and has neither prompts nor rewards of ours in its place."""
    if {"env", "data", "rewards"} & t.draft.data.keys():
        return False
    what = "no environment is said, which makes the prompts and scores; data and rewards of ours do in its place"
    t.refuse("rl_env_module", what, instead="rl_env_module=MODULE rl_env_class=CLASS")
    t.put("data.source", "FILE.jsonl", origin=MISSING)
    t.put("rewards", ["MODULE:FUNCTION"], origin=MISSING)
    return True


FORMAT = ConfigFormat(
    name="aitraining",
    order=30,
    recognises=lambda data: not data.keys().isdisjoint(MARKS) or {"task", "params"} <= data.keys(),
    table=KEYS,
    translate=translate,
    flags=flags,
    is_flags=is_flags,
    complete=complete,
)
