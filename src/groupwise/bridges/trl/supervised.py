"""Scripts of TRL's that call SFTTrainer or DPOTrainer as a run of ours: `kind: sft` and `kind: dpo`.

    trainer = SFTTrainer(model="Qwen/Qwen3-0.6B", args=SFTConfig(max_steps=100), train_dataset=dataset)
    trainer = DPOTrainer(model="Qwen/Qwen3-0.6B", args=DPOConfig(beta=0.1), train_dataset=dataset)

`bridges/trl/script.py` reads them and runs none of it; `sft.yaml` and `dpo.yaml` are the tables of their arguments. A
step here is an optimizer step there: the micro-batches that it accumulates, on all processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groupwise.bridges.trainer_args.optimizer_args import (
    TRANSFORMERS,
    length_of,
    put_optimizer,
    refuse_combinations,
)
from groupwise.bridges.trainer_args.parallel_args import put_parallel
from groupwise.bridges.trl.every_trainer import SCRIPT, put_model, put_run
from groupwise.bridges.trl.sources import put_sources
from groupwise.config.formats.format import Count
from groupwise.config.formats.keys import Key
from groupwise.config.formats.tables import keys_of
from groupwise.config.formats.translation import Translation, run_name

TRAINERS = {"SFTTrainer": "sft", "DPOTrainer": "dpo"}
KEYS = {kind: Path(__file__).with_name(f"{kind}.yaml") for kind in TRAINERS.values()}
LOSSES = ("sigmoid", "ipo")
WHOLE = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_processes")


def trainer_of(data: Mapping[str, Any]) -> str | None:
    """Return which of these trainers a script calls; None for neither."""
    return next((name for name in TRAINERS if name in data), None)


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
    t.put("kind", kind, origin=trainer)
    t.put("name", run_name(Path(t.document.name).stem), origin="the file's name")
    for name in WHOLE:
        if name in t.unread:
            t.problem(name, f"{t.unread[name].why}; write {t.unread[name].instead}")
        elif t[name] < 1:
            t.problem(name, f"{t[name]} is not valid; it must be 1 or more")
    t.raise_problems()
    rows_of_step = t[WHOLE[0]] * t[WHOLE[1]] * t[WHOLE[2]]
    t.put("rollout.prompts_per_step", rows_of_step, *WHOLE)
    _put_data(t)
    (_put_sft if kind == "sft" else _put_dpo)(t)
    t.raise_problems()
    by_epochs = (t["max_steps"] or 0) <= 0 and "max_steps" not in t.unread
    rows = count(t) if by_epochs else None
    per_epoch = None if rows is None else rows // rows_of_step
    if per_epoch == 0:
        t.problem("dataset_name", f"{rows} rows are fewer than the {rows_of_step} of one step")
        t.raise_problems()
    length = length_of(t, TRANSFORMERS, steps_there=1, passes=1, per_epoch=per_epoch)
    put_optimizer(t, TRANSFORMERS, length, warmup=0)
    put_model(t)
    put_parallel(t, folder)
    refuse_combinations(t, bits=("load_in_4bit", "load_in_8bit"), dora="use_dora", vllm="")
    put_run(t, length)
    if t["eval_strategy"] != "no":
        why = "a held-out loss is not computed; evaluation is by rewards (eval)"
        t.refuse("eval_strategy", why, instead="eval_strategy=no")
    t.unread.pop("dataset_test_split", None)
    return t


def _put_data(t: Translation) -> None:
    put_sources(t)
    t.put("data.raw", True, origin="a prompt that is a string is plain text there")
    if t["max_length"] is not None:
        what = f"rows are not cut at {t['max_length']} tokens: those that are longer than the context are passed over"
        t.note_difference("max_length", what)
    if t.given("truncation_mode"):
        t.note_idle("truncation_mode", "rows are not cut")


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


def _put_dpo(t: Translation) -> None:
    said = t["loss_type"]
    losses = [said] if isinstance(said, str) else said
    if len(losses) == 1 and losses[0] in LOSSES:
        t.put("dpo.loss", losses[0], "loss_type")
    else:
        what = f"{', '.join(losses)}: one of {' and '.join(LOSSES)} is here"
        t.refuse("loss_type", what, instead="loss_type=sigmoid")
