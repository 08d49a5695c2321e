"""TRL's arguments as a run of ours: the YAML of `trl grpo --config`, or a `GRPOConfig` in Python; what is SFT's and
DPO's is in `supervised.py`.

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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groupwise.bridges.trainer_args.batch_sizes import Batch, Names, put_batch
from groupwise.bridges.trainer_args.grpo_args import DEFAULTS_1_8, put_algorithm, put_rewards, put_sampling, put_shown
from groupwise.bridges.trainer_args.optimizer_args import (
    TRANSFORMERS,
    Length,
    length_of,
    put_optimizer,
    refuse_combinations,
)
from groupwise.bridges.trainer_args.parallel_args import put_parallel
from groupwise.bridges.trainer_args.vllm_args import put_vllm
from groupwise.bridges.trl import supervised
from groupwise.bridges.trl.every_trainer import SCRIPT, put_model, put_run
from groupwise.bridges.trl.script import parse_script
from groupwise.bridges.trl.sources import put_held_out, put_sources
from groupwise.config.formats.format import ConfigFormat, Count
from groupwise.config.formats.keys import Key
from groupwise.config.formats.tables import keys_of
from groupwise.config.formats.translation import MISSING, Translation, run_name
from groupwise.config.yaml import Document
from groupwise.errors import GroupwiseError

KEYS = Path(__file__).with_name("keys.yaml")
GRPO = {key.name for key in keys_of(KEYS)}
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


def translate(document: Document, *, folder: Path, count: Count) -> Translation:
    """Return the translation of a file in `folder`; `count` counts the prompts of a translation's data."""
    if (trainer := supervised.trainer_of(document.data)) is not None:
        t = Translation(document, system="TRL", keys=supervised.keys(trainer))
        return supervised.translated(t, trainer, folder=folder, count=count)
    called = "GRPOTrainer" in document.data
    keys = [*_keys(document.data), *(keys_of(SCRIPT) if called else ())]
    trainer = None if called else supervised.trainer_of_keys(document.data, grpo=GRPO)
    if trainer is not None:
        t = Translation(document, system="TRL", keys=supervised.keys(trainer))
        return supervised.translated(t, trainer, folder=folder, count=count)
    try:
        return complete(Translation(document, system="TRL", keys=keys), folder=folder, count=count)
    except GroupwiseError as error:
        if _says_no_trainer(document.data):
            error.hint = f"{f'{error.hint}; ' if error.hint else ''}if it is no file of `trl grpo`, {supervised.SAY}"
        raise


def _says_no_trainer(data: Mapping[str, Any]) -> bool:
    """Return whether a file is read as one of `trl grpo` although nothing in it says so."""
    return not {"kind", "GRPOTrainer"} & data.keys() and bool(supervised.trainers_with_keys(data, grpo=GRPO))


def complete(t: Translation, *, folder: Path, count: Count) -> Translation:
    """Return what becomes of TRL's arguments in a translation that has been begun."""
    document = t.document
    supervised.check_kind(t, "grpo")
    t.put("name", run_name(Path(document.name).stem), origin="the file's name")
    batch = _put_batch(t)
    _put_data(t)
    put_sampling(t, "")
    if t.given("reward_funcs", "reward_model_name_or_path"):
        t.values["reward_funcs"] = [*(t["reward_funcs"] or []), *_texts(t["reward_model_name_or_path"])]
        put_rewards(t, "reward_funcs", "reward_weights", known=REWARDS)
    t.raise_problems()
    by_epochs = (t["max_steps"] or 0) <= 0 and "max_steps" not in t.unread
    rows = count(t) if by_epochs or t["eval_strategy"] == "epoch" else None
    per_epoch = None if rows is None else rows // batch.prompts
    if per_epoch == 0:
        t.problem("dataset_name", f"{rows} prompts are fewer than the {batch.prompts} of one step")
        t.raise_problems()
    passes = t["num_iterations"]
    length = length_of(t, TRANSFORMERS, steps_there=batch.steps_there, passes=passes, per_epoch=per_epoch)
    put_optimizer(t, TRANSFORMERS, length, warmup=0)
    put_algorithm(t, "", off_policy=False)
    put_model(t)
    put_vllm(t, "", lora=t["use_peft"])
    put_parallel(t, folder)
    refuse_combinations(t, bits=("load_in_4bit", "load_in_8bit"), dora="use_dora", vllm="use_vllm")
    put_run(t, length)
    put_shown(t, "")
    _put_eval(t, length)
    return t


def _keys(data: Mapping[str, Any]) -> list[Key]:
    """Return the table with the defaults of the version that is meant."""
    keys = keys_of(KEYS)
    if not str(data.get("trl_version", "")).startswith("1.8"):
        return [*keys]
    return [dataclasses.replace(key, default=DEFAULTS_1_8.get(key.name, key.default)) for key in keys]


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
    put_sources(t)
    if t.given("dataset_name", "datasets", "dataset_mixture"):
        _put_reading(t, "data")
    t.put("data.shuffle", t["shuffle_dataset"], "shuffle_dataset")


def _put_reading(t: Translation, to: str) -> None:
    """Put how a row becomes a prompt."""
    t.put(f"{to}.prompt_key", "prompt", origin="the column that GRPO reads there")
    t.put(f"{to}.raw", True, origin="a prompt that is a string is sampled as it is there")
    t.put(f"{to}.completion_only", False, origin="rewards see an opened message with what continues it there")
    if t.given("dataset_prompt_column", "system_prompt"):  # open-r1 makes a conversation of it
        t.put(f"{to}.prompt_key", t["dataset_prompt_column"], "dataset_prompt_column")
        t.put(f"{to}.system", t["system_prompt"], "system_prompt")
        t.put(f"{to}.raw", False, origin="open-r1 makes a user's message of it")


def _put_eval(t: Translation, length: Length) -> None:
    if not put_held_out(t, length):
        return
    if t.given("dataset_name") and "dataset_test_split" not in t.unread:
        _put_reading(t, "eval.data")
    t.put("eval.modes", ["sampled"], origin="evaluation samples there")
    t.put("eval.k", t["num_generations_eval"] or t["num_generations"], "num_generations_eval", "num_generations")
    if t["load_best_model_at_end"]:
        t.put("eval.best", "sampled", "load_best_model_at_end")


def _ask_for_rewards(t: Translation) -> bool:
    """Say of a file without rewards, in which nothing says what it is of, how it is read as one of SFT or DPO."""
    learns = t.draft.data.get("kind", "grpo") == "grpo" and "env" not in t.draft.data
    if learns and "rewards" not in t.draft.data and _says_no_trainer(t.document.data):
        what = f"no rewards of TRL's are said, and nothing says that it is a file of `trl grpo`; {supervised.SAY}"
        t.refuse("rewards", what, instead="rewards=[MODULE:FUNCTION]")
        t.put("rewards", ["MODULE:FUNCTION"], origin=MISSING)
    return False


FORMAT = ConfigFormat(
    name="TRL",
    order=50,
    recognises=lambda data: not data.keys().isdisjoint({*MARKS, *supervised.TRAINERS}),
    table=KEYS,
    translate=translate,
    parse={".py": parse_script, ".ipynb": parse_script},
    complete=_ask_for_rewards,
)
