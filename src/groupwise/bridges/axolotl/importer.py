"""Reads an Axolotl file as a run's configuration: of GRPO here, of SFT and DPO in `supervised.py`.

    rl: grpo | gdpo          datasets, transforms and reward modules next to the file, as in Axolotl
    trl: {...}               GRPO's arguments, and the asynchronous trainer's

`keys.yaml` says what becomes of every key. Where Axolotl is known to do something else than it documents (keys that it
drops, masks that do not mask), Groupwise does what Axolotl documents, and says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from groupwise.bridges.axolotl import supervised
from groupwise.bridges.axolotl.trainer import (
    BITS,
    NAMES,
    check_plugins,
    check_template,
    put_adapter,
    put_evaluation,
    put_machine,
    put_optimizer_and_floor,
    put_order,
    put_run,
)
from groupwise.bridges.trainer_args.batch_sizes import Names, put_batch
from groupwise.bridges.trainer_args.grpo_args import put_algorithm, put_rewards, put_sampling, put_shown
from groupwise.bridges.trainer_args.optimizer_args import Length, length_of, refuse_combinations
from groupwise.bridges.trainer_args.parallel_args import put_parallel
from groupwise.bridges.trainer_args.sources import name_apart, source_of
from groupwise.bridges.trainer_args.vllm_args import put_vllm
from groupwise.config.data import FILES
from groupwise.config.formats.format import ConfigFormat, Count
from groupwise.config.formats.tables import keys_of
from groupwise.config.formats.translation import Translation, run_name
from groupwise.config.yaml import Document

KEYS = Path(__file__).with_name("keys.yaml")
ROWS = "groupwise.bridges.axolotl.data:rows"

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

SIZES = Names(
    micro="micro_batch_size",
    accumulate="gradient_accumulation_steps",
    group="trl.num_generations",
    generation="trl.generation_batch_size",
    processes="num_processes",
)


def translate(document: Document, *, folder: Path, count: Count) -> Translation:
    """Return the translation of a file in `folder`; `count` counts the prompts of a translation's data."""
    if (kind := supervised.kind_of(document.data)) is not None:
        return supervised.translated(document, kind, folder=folder, count=count)
    t = Translation(document, system="Axolotl", keys=_keys(document.data))
    _require(t)
    t.put("name", run_name(Path(document.name).stem), origin="the file's name")
    batch = put_batch(t, SIZES, generation=t[SIZES.generation], said=SIZES.generation)
    _put_data(t, folder)
    put_sampling(t, "trl.")
    put_rewards(t, "trl.reward_funcs", "trl.reward_weights")
    t.raise_problems()
    evaluated = "eval" in t.draft.data and (t["evals_per_epoch"] or t["eval_strategy"] == "epoch")
    by_epochs = (t["max_steps"] or 0) <= 0 or evaluated
    rows = count(t) if by_epochs else None
    per_epoch = None if rows is None else rows // batch.prompts
    if per_epoch == 0:
        t.problem("datasets", f"{rows} prompts are fewer than the {batch.prompts} of one step")
        t.raise_problems()
    length = length_of(t, NAMES, steps_there=batch.steps_there, passes=t["trl.num_iterations"], per_epoch=per_epoch)
    put_optimizer_and_floor(t, length)
    off_policy = _put_pipeline(t, length)
    t.stand_in("trl.beta", "rl_beta")
    put_algorithm(t, "trl.", off_policy=off_policy)
    put_adapter(t)
    put_vllm(t, "trl.", lora=t["adapter"] is not None, mode="server")
    put_machine(t)
    put_parallel(t, folder)
    refuse_combinations(t, bits=BITS, dora="peft_use_dora", vllm="trl.use_vllm", optimizer=NAMES.optimizer)
    put_run(t, length)
    put_shown(t, "trl.")
    _put_eval(t, length)
    return t


def _keys(data: Mapping[str, Any]) -> list[Any]:
    """Return the table with the defaults that depend on the trainer that Axolotl would choose."""
    section = data.get("trl")
    trl = section if isinstance(section, Mapping) else {}
    queued = bool(trl.get("async_prefetch") or trl.get("use_data_producer"))
    defaults = {"trl.vllm_importance_sampling_mode": "token_truncate" if queued else "sequence_mask"}
    if data.get("rl") == "gdpo":
        defaults["trl.multi_objective_aggregation"] = "normalize_then_sum"
    return [replace(key, default=defaults.get(key.name, key.default)) for key in keys_of(KEYS)]


def _require(t: Translation) -> None:
    if t["rl"] not in ("grpo", "gdpo"):
        if t["rl"] is not None:  # the other keys belong to it
            t.problems.clear()
        said = "required with trl, and missing" if t["rl"] is None else f"{t['rl']} is not trained here"
        t.problem("rl", f"{said}; write grpo, gdpo, dpo or ipo, or neither rl nor trl for SFT")
        t.raise_problems()
    if t["rl"] == "gdpo" and t["trl.multi_objective_aggregation"] != "normalize_then_sum":
        t.problem("trl.multi_objective_aggregation", "rl: gdpo is normalize_then_sum; write rl: grpo for the other")
    check_template(t, t["chat_template"])
    for name in ("base_model", "learning_rate", "datasets"):
        if not t.given(name):
            t.problem(name, "required and missing")
    check_plugins(t)


def _put_pipeline(t: Translation, length: Length) -> bool:
    """Return how far sampling runs ahead of training; returns whether samples may be older than the policy."""
    if not (t["trl.async_prefetch"] or t["trl.use_data_producer"]):
        for name in ASYNC_ONLY:
            if t.given(name) and t[name] != t.keys[name].default:
                what = "it acts here; Axolotl drops it unless async_prefetch or use_data_producer is set"
                t.note_difference(name, what)
    interval = length.rollouts(t["trl.vllm_sync_interval"] or 1)
    t.put("rollout.weight_sync_interval", interval, "trl.vllm_sync_interval")
    staleness = interval - 1 + t["trl.prefetch_depth"] if t["trl.async_prefetch"] else 0
    t.put("rollout.max_staleness", staleness, "trl.async_prefetch", "trl.prefetch_depth", "trl.vllm_sync_interval")
    if t["trl.streaming_partial_batch"]:
        names = ("trl.streaming_partial_batch", "trl.streaming_min_groups")
        t.put("rollout.stream_groups", t["trl.streaming_min_groups"], *names)
    if size := t["trl.replay_buffer_size"]:
        t.put("rollout.replay.size", size, "trl.replay_buffer_size")
        t.put("rollout.replay.share", 1.0)
        t.put("rollout.replay.max_age", length.here)
    if t["trl.reroll_start_fraction"] < 1:
        t.put("rollout.reroll.max_groups", t["trl.reroll_max_groups"], "trl.reroll_max_groups")
        t.put("rollout.reroll.start", t["trl.reroll_start_fraction"], "trl.reroll_start_fraction")
    return interval > 1 or staleness > 0


# ---- the data ----
def _put_data(t: Translation, folder: Path) -> None:
    held_out = t["val_set_size"] or 0
    put_order(t)
    _put_dataset(t, "data", "datasets", folder, part="train" if held_out else None)
    if t.given("test_datasets"):
        _put_dataset(t, "eval.data", "test_datasets", folder, part=None)
    elif held_out:
        _put_dataset(t, "eval.data", "datasets", folder, part="test")


def _put_dataset(t: Translation, to: str, block: str, folder: Path, *, part: str | None) -> None:
    listed = t[block] if isinstance(t[block], list) else []
    entries = [{key: value for key, value in each.items() if value is not None} for each in listed if each]
    if not entries or not all(isinstance(each.get("path"), str) for each in entries):
        t.problem(block, "every entry needs a path: a Hugging Face name, a file or a folder")
        return
    whole = len(entries) == 1 and not part and set(entries[0]) <= {"path", "name", "split"}
    is_file = str(entries[0]["path"]).endswith(FILES)
    if whole and not (is_file and entries[0].get("split", "train") != "train"):  # a slice of a file is read with others
        entry, local = entries[0], _local(entries[0]["path"], folder)
        t.put(f"{to}.source", local or entry["path"], block)
        if not is_file:
            t.put(f"{to}.split", entry.get("split"), block)
            t.put(f"{to}.args", {"name": entry["name"]} if "name" in entry else None, block)
    elif len(entries) > 1 and not part and all(_is_plain(each) for each in entries):
        t.put(f"{to}.sources", _sources(entries, folder), block)
    else:
        args: dict[str, Any] = {"datasets": entries, "folder": str(folder.resolve())}
        if any("type" in each for each in entries):
            overrides = [text for _, text in t.document.overrides]
            args |= {"model": t["base_model"], "cfg": t.document.name} | ({"overrides": overrides} if overrides else {})
        if part:
            args |= {"part": part, "held_out": t["val_set_size"], "seed": t["seed"]}
        t.put(f"{to}.source", ROWS, block)
        t.put(f"{to}.args", args, block)
    t.put(f"{to}.prompt_key", "prompt", origin="the column that GRPO reads there")
    t.put(f"{to}.raw", True, origin="a prompt that is a string is sampled as it is there")
    t.put(f"{to}.completion_only", False, origin="rewards see an opened message with what continues it there")


def _is_plain(entry: Mapping[str, Any]) -> bool:
    """Return whether `data.sources` says all that the entry says: no transform, and of a file no other split."""
    named = str(entry.get("split", "train")).partition("[")[0]
    return entry.keys() <= {"path", "name", "split"} and (named == "train" or not entry["path"].endswith(FILES))


def _sources(entries: Sequence[Mapping[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Return the entries as `data.sources`, whose rows are all drawn once an epoch, as there."""
    sources = [
        source_of(
            _local(entry["path"], folder) or entry["path"], args={"name": entry.get("name")}, split=entry.get("split")
        )
        for entry in entries
    ]
    name_apart(sources)
    return sources


def _local(path: str, folder: Path) -> str | None:
    """Return a path that exists next to the configuration unchanged, a path that exists in the working directory as an
    absolute path, and None for any other."""
    if (folder / path).exists():
        return path
    return str(Path(path).resolve()) if Path(path).exists() else None


def _put_eval(t: Translation, length: Length) -> None:
    if not put_evaluation(t, length, best="sampled", by_epoch=False):
        return
    t.put("eval.modes", ["sampled"], origin="evaluation samples there")
    name = "trl.num_generations_eval"
    t.put("eval.k", t[name] or t[SIZES.group], name, SIZES.group)


FORMAT = ConfigFormat(
    name="Axolotl",
    order=20,
    recognises=lambda data: not data.keys().isdisjoint({"rl", "trl", "base_model"}),
    table=KEYS,
    translate=translate,
)
