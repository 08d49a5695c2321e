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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from groupwise.bridges.trainer_args.batch_sizes import Batch, Names, put_batch
from groupwise.bridges.trainer_args.grpo_args import DEFAULTS_1_8, put_algorithm, put_rewards, put_sampling
from groupwise.bridges.trainer_args.optimizer_args import (
    TRANSFORMERS,
    Length,
    length_of,
    put_optimizer,
    put_quantization,
    refuse_combinations,
)
from groupwise.bridges.trainer_args.parallel_args import put_parallel
from groupwise.bridges.trainer_args.vllm_args import put_vllm
from groupwise.bridges.trl import supervised
from groupwise.bridges.trl.script import parse_script
from groupwise.config.data import FILES
from groupwise.config.formats.format import ConfigFormat, Count
from groupwise.config.formats.keys import Key
from groupwise.config.formats.tables import keys_of
from groupwise.config.formats.translation import Translation, run_name
from groupwise.config.yaml import Document

KEYS = Path(__file__).with_name("keys.yaml")
SCRIPT = Path(__file__).with_name("script.yaml")
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

OF_A_MIXTURE = ("path", "name", "data_dir", "data_files", "split", "columns")  # keys of one of TRL's `datasets`
OF_OPEN_R1 = ("id", "config", "split", "columns", "weight")  # keys of one of open-r1's

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
    keys = [*_keys(document.data), *(keys_of(SCRIPT) if "GRPOTrainer" in document.data else ())]
    return complete(Translation(document, system="TRL", keys=keys), folder=folder, count=count)


def complete(t: Translation, *, folder: Path, count: Count) -> Translation:
    """Return what becomes of TRL's arguments in a translation that has been begun."""
    document = t.document
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
    _put_eval(t, length, per_epoch)
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
    if t.given("datasets", "dataset_mixture"):
        _put_mixture(t)
    else:
        _put_dataset(t, "data", "dataset_train_split")
        t.put("data.streaming", t["dataset_streaming"] or None, "dataset_streaming")
        _check_stream(t, "dataset_streaming")
    t.put("data.shuffle", t["shuffle_dataset"], "shuffle_dataset")


def _check_stream(t: Translation, name: str) -> None:
    """A stream has no number of rows, of which epochs could be made."""
    if t[name] and (t["max_steps"] or 0) <= 0 and "max_steps" not in t.unread:
        t.problem("max_steps", f"required with {name}: nobody knows how many rows a stream has")


def _put_mixture(t: Translation) -> None:
    """Put TRL's `datasets`, or open-r1's `dataset_mixture`: the rows of all, or a share of those of each."""
    for name in ("dataset_name", "dataset_streaming"):
        if t.given(name):
            t.note_idle(name, "datasets are given, and take its place there too")
    open_r1 = not t.given("datasets")
    name = "dataset_mixture" if open_r1 else "datasets"
    mixture = t[name] if open_r1 else {"datasets": t[name]}
    listed = mixture.get("datasets") if isinstance(mixture, Mapping) else None
    keys = OF_OPEN_R1 if open_r1 else OF_A_MIXTURE
    if not isinstance(listed, list) or not listed or not all(isinstance(each, Mapping) for each in listed):
        t.problem(
            name,
            f"it must be a list of datasets, each with {', '.join(keys)}" if not open_r1 else "datasets is missing",
        )
        return
    seed = mixture.get("seed", 0) if open_r1 else None
    size = mixture.get("test_split_size") if open_r1 else t["test_split_size"]
    sources = [_source(t, name, each, keys, seed) for each in listed]
    streaming = bool(t["streaming"]) and not open_r1
    labels = [Path(each["source"]).name if each["source"].endswith(FILES) else each["source"] for each in sources]
    for number, (source, label) in enumerate(zip(sources, labels, strict=True)):
        if labels.count(label) > 1:
            source["name"] = f"{label} ({number})"
        if streaming and len(sources) > 1:
            source["weight"] = 1.0
    t.put("data.sources", sources, name)
    _put_reading(t, "data")
    if any(each.get("columns") for each in listed):
        t.note_idle(name, "rewards see every column, and not only those of columns")
    if streaming:
        t.put("data.streaming", True, "streaming")
        _check_stream(t, "streaming")
        if len(sources) > 1:
            t.note_difference("streaming", "equal shares of each source are drawn; there one comes after another")
    if size is not None:
        what = "rows are not held out by chance; cut the sources (split: train[:90%]), and name eval.data"
        t.refuse(
            "test_split_size" if not open_r1 else name,
            what,
            instead="dataset_mixture.test_split_size=null" if open_r1 else None,
        )


def _source(t: Translation, name: str, entry: Mapping[str, Any], keys: Sequence[str], seed: Any) -> dict[str, Any]:
    """Return one of `data.sources`, of an entry of a mixture."""
    for key in entry.keys() - set(keys):
        t.problem(name, f"{key!r} is unknown; the keys of a dataset are {', '.join(keys)}")
    path = entry.get("path", entry.get("id"))
    if not isinstance(path, str) or not path:
        t.problem(name, f"every dataset needs {keys[0]}: a Hugging Face name, a folder or a file of rows")
        return {"source": "FILE.jsonl"}
    source: dict[str, Any] = {"source": path}
    args = {"name": entry.get("name", entry.get("config"))} | {
        key: entry.get(key) for key in ("data_dir", "data_files")
    }
    args = {key: value for key, value in args.items() if value is not None}
    if args and not path.endswith(FILES):
        source["args"] = args
    if entry.get("split", "train") != "train":
        source["split"] = entry["split"]
    if (share := entry.get("weight")) is not None and share < 1:
        source |= {"sample": share, "seed": seed}
        t.note_difference(
            name, f"{share:g} of the rows of {path} are drawn by seed {seed}, but not the same rows as there"
        )
    return source


def _put_dataset(t: Translation, to: str, split: str) -> None:
    name = t["dataset_name"]
    if name is None:
        return
    t.put(f"{to}.source", name, "dataset_name")
    if not name.endswith(FILES):
        t.put(f"{to}.split", t[split], split)
        t.put(f"{to}.args", {"name": t["dataset_config"]} if t.given("dataset_config") else None, "dataset_config")
    _put_reading(t, to)


def _put_reading(t: Translation, to: str) -> None:
    """Put how a row becomes a prompt."""
    t.put(f"{to}.prompt_key", "prompt", origin="the column that GRPO reads there")
    t.put(f"{to}.raw", True, origin="a prompt that is a string is sampled as it is there")
    t.put(f"{to}.completion_only", False, origin="rewards see an opened message with what continues it there")
    if t.given("dataset_prompt_column", "system_prompt"):  # open-r1 makes a conversation of it
        t.put(f"{to}.prompt_key", t["dataset_prompt_column"], "dataset_prompt_column")
        t.put(f"{to}.system", t["system_prompt"], "system_prompt")
        t.put(f"{to}.raw", False, origin="open-r1 makes a user's message of it")


def put_model(t: Translation) -> None:
    """Put the model, its precision and the adapter."""
    if not t.given("model_name_or_path") and "model_name_or_path" not in t.unread:
        t.problem("model_name_or_path", "required and missing")
    t.put("model", t["model_name_or_path"], "model_name_or_path")
    if "cast_lm_head_to_fp32" in t.keys and t["cast_lm_head_to_fp32"]:
        t.put("cast_lm_head", "float32", "cast_lm_head_to_fp32")
    if not t["use_peft"]:
        t.clear("train.lora", "use_peft")
        t.put("dtype", "float32", "dtype", origin="all parameters are trained, in float32 as there")
        for name in ("lora_r", "lora_alpha", "lora_target_modules", "use_dora", "load_in_4bit", "load_in_8bit"):
            if t.given(name) and t[name]:
                t.refuse(name, "it acts with use_peft; as it is, all parameters are trained", instead="use_peft=true")
        return
    if t.given("dtype"):
        t.put("dtype", {"float32": "float32", "bfloat16": "bfloat16"}.get(t["dtype"], "auto"), "dtype")
    t.put("train.lora.rank", t["lora_r"], "lora_r")
    t.put("train.lora.alpha", t["lora_alpha"], "lora_alpha")
    t.put("train.lora.use_rslora", t["use_rslora"] or None, "use_rslora")
    t.put("train.lora.use_dora", t["use_dora"] or None, "use_dora")
    put_quantization(t, four="load_in_4bit", eight="load_in_8bit")
    if t["load_in_4bit"] and t["bnb_4bit_quant_type"] != "nf4":
        t.refuse("bnb_4bit_quant_type", "nf4 is here", instead="bnb_4bit_quant_type=nf4")
    t.put("train.lora.dropout", 0.0 if t["disable_dropout"] else t["lora_dropout"], "lora_dropout", "disable_dropout")
    modules = t["lora_target_modules"]
    if modules is None:
        t.note_difference(
            "lora_target_modules",
            "not set: all-linear is adapted; there PEFT chooses",
        )
    every = modules is None or modules in ("all-linear", ["all-linear"])
    t.put("train.lora.targets", "all-linear" if every else modules, "lora_target_modules")


def put_run(t: Translation, length: Length) -> None:
    """Put the device, checkpoints, what is kept, and where metrics go."""
    t.put("device", "cpu" if t["use_cpu"] else None, "use_cpu")
    if t.given("gradient_checkpointing"):
        t.put("train.gradient_checkpointing", t["gradient_checkpointing"], "gradient_checkpointing")
    if t["save_strategy"] == "no":
        t.put("checkpoint.every", 0, "save_strategy")
    elif t.given("save_steps"):
        t.put("checkpoint.every", length.interval(t["save_steps"]), "save_steps")
    t.put("adapters.keep", t["save_total_limit"], "save_total_limit")
    report = t["report_to"]
    for tracker in [report] if isinstance(report, str) else report or []:
        if tracker == "wandb" and t.given("wandb_project"):
            t.put("tracking.wandb", t["wandb_project"], "report_to", "wandb_project")
            t.put("tracking.wandb_entity", t["wandb_entity"], "wandb_entity")
        elif tracker in ("wandb", "trackio", "mlflow"):
            t.put(f"tracking.{tracker}", t["project"], "report_to", "project")
        elif tracker == "tensorboard":
            t.put("tracking.tensorboard", True, "report_to")
        elif tracker != "none":
            t.refuse("report_to", f"{tracker} is not here; wandb, trackio, mlflow and tensorboard are")


def _put_eval(t: Translation, length: Length, per_epoch: int | None) -> None:
    if t["eval_strategy"] == "no":
        t.unread.pop("dataset_test_split", None)
        if t.given("eval_steps"):
            t.note_idle("eval_steps", "eval_strategy is no, so nothing is evaluated")
        return
    if "dataset_test_split" in t.unread:
        t.put("eval.data.source", "FILE.jsonl", "dataset_test_split")
    elif t.given("datasets", "dataset_mixture"):
        t.problem("eval_strategy", "it evaluates on rows of the mixture that are held out; write no, and set eval.data")
    elif t.given("dataset_name"):
        _put_dataset(t, "eval.data", "dataset_test_split")
    every = per_epoch if t["eval_strategy"] == "epoch" else length.interval(t["eval_steps"] or 500)
    t.put("eval.every", every, "eval_steps", "eval_strategy")
    t.put("eval.modes", ["sampled"], origin="evaluation samples there")
    t.put("eval.k", t["num_generations_eval"] or t["num_generations"], "num_generations_eval", "num_generations")
    if t["load_best_model_at_end"]:
        t.put("eval.best", "sampled", "load_best_model_at_end")


FORMAT = ConfigFormat(
    name="TRL",
    order=50,
    recognises=lambda data: not data.keys().isdisjoint({*MARKS, *supervised.TRAINERS}),
    table=KEYS,
    translate=translate,
    parse={".py": parse_script, ".ipynb": parse_script},
    complete=supervised.complete,
)
