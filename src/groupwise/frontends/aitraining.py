"""aitraining's flags (`aitraining llm --train --trainer grpo ...`) as far as they have a counterpart.

There an environment makes the prompts and the rewards. Environments are not in this version; what is understood is all
that is around them: sampling, the loss, LoRA, the optimizer, the batch. With `data` and `rewards` it is a run.

    --rl-num-generations 4     flags, for `groupwise import --from aitraining`
    training_params.json       what it writes into a project; a file with `task: llm` and `params:` is read too
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from groupwise.configfile import Document
from groupwise.errors import ConfigError
from groupwise.frontends.aitraining_keys import KEYS, NAMES
from groupwise.frontends.batch_sizes import Names, put_batch
from groupwise.frontends.optimizer_args import length_of, put_optimizer
from groupwise.frontends.translation import Translation, run_name

MARKS = frozenset({"rl_env_module", "rl_env_class", "rl_num_generations", "rl_max_new_tokens", "project_name"})
SIZES = Names(
    micro="batch_size",
    accumulate="gradient_accumulation",
    group="rl_num_generations",
    generation="generation_batch_size",
    processes="num_processes",
)
Count = Callable[[Translation], int | None]


def flags(arguments: Sequence[str]) -> Document:
    """A command line, as in `--model M --rl-num-generations 4 --peft`, as a document. Raises ConfigError."""
    data: dict[str, Any] = {}
    words = [word for word in arguments if word not in ("aitraining", "autotrain", "llm")]
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not name:
            raise ConfigError(f"{word!r} is not a flag", hint="write aitraining's flags, as in --rl-num-generations 4")
        if not equals:
            value = words.pop(0) if words and not words[0].startswith("--") else "true"
        data[name.replace("-", "_")] = value
    return Document(data)


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
    if t["log"] == "wandb":
        t.put("tracking.wandb", t.draft.data["name"], "log", "project_name")
    elif t["log"] == "tensorboard":
        t.put("tracking.tensorboard", True, "log")
    elif t["log"] not in (None, "none"):
        t.refuse("log", f"{t['log']} is not here; wandb and tensorboard are", instead="log=none")
    return t


def _put_loss(t: Translation) -> None:
    t.put("algo.policy_loss", t["rl_loss_type"], "rl_loss_type")
    t.put("algo.clip_low", t["rl_clip_range"], "rl_clip_range")
    t.put("algo.clip_high", t["rl_clip_range"], "rl_clip_range")
    if t["rl_kl_coef"]:
        t.put("algo.kl", "k3", "rl_kl_coef")
        t.put("algo.kl_coeff", t["rl_kl_coef"], "rl_kl_coef")


def _put_model(t: Translation) -> None:
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
