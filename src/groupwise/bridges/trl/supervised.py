"""Arguments of TRL's SFTTrainer or DPOTrainer as a run of ours: `kind: sft` and `kind: dpo`.

    trainer = SFTTrainer(model="Qwen/Qwen3-0.6B", args=SFTConfig(max_steps=100), train_dataset=dataset)
    trainer = DPOTrainer(model="Qwen/Qwen3-0.6B", args=DPOConfig(beta=0.1), train_dataset=dataset)

`bridges/trl/script.py` reads such scripts and runs none of them. The YAML of `trl sft --config` and `trl dpo --config`
has the same arguments, and which of the two it is for, keys say that only one has (`packing`, `label_smoothing`), or
else `kind`. `sft.yaml` and `dpo.yaml` are the tables.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from groupwise.bridges.trainer_args.optimizer_args import TRANSFORMERS, Length, put_optimizer, refuse_combinations
from groupwise.bridges.trainer_args.parallel_args import put_parallel
from groupwise.bridges.trainer_args.supervised_args import (
    check_best,
    length_in_steps,
    put_preference_loss,
    put_rows_per_step,
)
from groupwise.bridges.trl.every_trainer import SCRIPT, put_model, put_run
from groupwise.bridges.trl.sources import put_held_out, put_sources
from groupwise.config.formats.format import Count
from groupwise.config.formats.keys import Key
from groupwise.config.formats.tables import keys_of
from groupwise.config.formats.translation import Translation, run_name
from groupwise.errors import ConfigError

TRAINERS = {"SFTTrainer": "sft", "DPOTrainer": "dpo"}
KEYS = {kind: Path(__file__).with_name(f"{kind}.yaml") for kind in TRAINERS.values()}
SAY = "say it behind the file: kind=sft for a file of `trl sft`, kind=dpo for one of `trl dpo`"
WHOLE = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_processes")


def trainer_of(data: Mapping[str, Any]) -> str | None:
    """Return which of these trainers a script calls; None for neither."""
    return next((name for name in TRAINERS if name in data), None)


def trainer_of_keys(data: Mapping[str, Any], *, grpo: Collection[str]) -> str | None:
    """Return which of these trainers a YAML file is for: that of its `kind`, or the only one that has all its keys.
    None where `trl grpo`, whose keys are `grpo`, has them too. Raises ConfigError where both of these have them and it
    does not."""
    if "kind" in data:
        return next((trainer for trainer, kind in TRAINERS.items() if kind == data["kind"]), None)
    fitting = trainers_with_keys(data, grpo=grpo)
    own = {key.name for trainer in fitting for key in keys(trainer)} - set(grpo)
    if not (said := sorted(data.keys() & own)):
        return None
    if len(fitting) > 1:
        raise ConfigError(
            f"{said[0]} is SFT's and DPO's, and no key says which of the two it is", hint=SAY, field=said[0]
        )
    return fitting[0]


def trainers_with_keys(data: Mapping[str, Any], *, grpo: Collection[str]) -> list[str]:
    """Return those of these trainers that have all keys of a YAML file which are TRL's at all."""
    tables = {trainer: {key.name for key in keys(trainer)} for trainer in TRAINERS}
    said = data.keys() & set(grpo).union(*tables.values())
    return [trainer for trainer, names in tables.items() if said <= names]


def shared_names() -> set[str]:
    """Return the names of the keys that both configurations have: the Trainer's, the model's and the data's."""
    return {key.name for key in keys_of(Path(__file__).with_name("supervised.yaml"))}


def keys(trainer: str) -> list[Key]:
    """Return the keys of a script that calls `trainer`."""
    of_adapters = (key for key in keys_of(SCRIPT) if key.name.startswith("LoraConfig."))
    return [*keys_of(KEYS[TRAINERS[trainer]]), *of_adapters]


def translated(t: Translation, trainer: str, *, folder: Path, count: Count) -> Translation:
    """Return what becomes of the arguments of a script in `folder` that calls `trainer`; `count` counts its rows."""
    kind = TRAINERS[trainer]
    check_kind(t, kind)
    t.put("kind", kind, "kind", origin="" if t.given("kind") else trainer)
    t.put("name", run_name(Path(t.document.name).stem), origin="the file's name")
    rows = put_rows_per_step(t, WHOLE)
    _put_data(t)
    if kind == "sft":
        _put_sft(t)
    else:
        put_preference_loss(t, "loss_type", t["loss_type"])
    t.raise_problems()
    epochs = t["eval_strategy"] == "epoch"
    length = length_in_steps(t, TRANSFORMERS, rows_per_step=rows, data="dataset_name", count=count, evaluated=epochs)
    put_optimizer(t, TRANSFORMERS, length, warmup=0)
    put_model(t)
    put_parallel(t, folder)
    refuse_combinations(t, bits=("load_in_4bit", "load_in_8bit"), dora="use_dora", vllm="")
    put_run(t, length)
    _put_eval(t, length)
    return t


def check_kind(t: Translation, kind: str) -> None:
    """Report a `kind` that is not that of the trainer which a script calls."""
    if t.given("kind") and t["kind"] != kind:
        t.problem("kind", f"{t['kind']}, and what is called is the trainer of kind {kind}; leave it out")


def _put_data(t: Translation) -> None:
    put_sources(t)
    t.put("data.raw", True, origin="a prompt that is a string is plain text there")
    if t["max_length"] is not None:
        what = f"rows are not cut at {t['max_length']} tokens: those that are longer than the context are passed over"
        t.note_difference("max_length", what)
    if t.given("truncation_mode"):
        t.note_idle("truncation_mode", "rows are not cut")


def _put_eval(t: Translation, length: Length) -> None:
    """Put the held-out rows, whose loss is computed as there, and that the version of the least is kept, if it is."""
    held_out = t.given("dataset_test_split", "datasets") or "dataset_test_split" in t.unread
    if t["eval_strategy"] != "no" and trainer_of(t.document.data) is not None and not held_out:
        t.refuse("eval_strategy", "it needs an eval_dataset, and there is none", instead="eval_strategy=no")
    elif put_held_out(t, length):
        t.put("eval.data.raw", True, origin="a prompt that is a string is plain text there")
        if t["load_best_model_at_end"]:
            t.put("eval.best", "loss", "load_best_model_at_end")
        check_best(t)


def _put_sft(t: Translation) -> None:
    if t["loss_type"] not in ("nll", "chunked_nll"):
        t.refuse("loss_type", f"{t['loss_type']} is not here; the loss is cross-entropy", instead="loss_type=nll")
    if t["completion_only_loss"] is False:
        t.refuse("completion_only_loss", "prompts are not learned", instead="completion_only_loss=true")
    if not t["assistant_only_loss"]:
        what = "of conversations what the assistant says is learned, there every token unless it is true"
        t.note_difference("assistant_only_loss", what)
    if t["packing"]:
        t.note_difference("packing", "a step is so many rows, packed whole; there so many blocks of max_length tokens")
