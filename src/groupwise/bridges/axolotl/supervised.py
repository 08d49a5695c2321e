"""Axolotl's files of SFT and DPO as runs of ours: `kind: sft` and `kind: dpo`.

    (no rl)             datasets of conversations or of instructions and their answers
    rl: dpo | ipo       datasets of preference pairs

`sft.yaml` and `dpo.yaml` are the tables of their keys, and `dataset_types` reads what `datasets` names, an entry a
source. A step here is an optimizer step there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from groupwise.bridges.axolotl.dataset_types import (
    NAMED_TEMPLATES,
    TEMPLATES,
    Kind,
    TypeNotHere,
    is_chat,
    reader_of,
    roles_of,
    template_of,
)
from groupwise.bridges.axolotl.trainer import (
    BITS,
    NAMES,
    check_plugins,
    check_template,
    check_tokens,
    put_adapter,
    put_evaluation,
    put_machine,
    put_optimizer_and_floor,
    put_order,
    put_run,
)
from groupwise.bridges.trainer_args.optimizer_args import refuse_combinations
from groupwise.bridges.trainer_args.parallel_args import put_parallel
from groupwise.bridges.trainer_args.sources import name_apart
from groupwise.bridges.trainer_args.supervised_args import (
    check_best,
    length_in_steps,
    put_preference_loss,
    put_rows_per_step,
)
from groupwise.config.formats.format import Count
from groupwise.config.formats.keys import Key, idle
from groupwise.config.formats.tables import keys_of
from groupwise.config.formats.translation import Note, Translation, run_name
from groupwise.config.yaml import Document, dotted

KEYS: Mapping[Kind, Path] = {kind: Path(__file__).with_name(f"{kind}.yaml") for kind in ("sft", "dpo")}
GRPO = Path(__file__).with_name("keys.yaml")
SOURCE = "groupwise.bridges.axolotl.dataset_types:rows"
RAW = {"raw": True}  # a prompt that is a string is plain text
WHOLE = ("micro_batch_size", "gradient_accumulation_steps", "num_processes")
ENDS = ("train_on_eos", "train_on_eot")  # of which turns the end is learned


def kind_of(data: Mapping[str, Any]) -> Kind | None:
    """Return the kind (sft, dpo) of a file's training; None for training from rewards, or one that is not supported."""
    if data.get("rl") in ("dpo", "ipo"):
        return "dpo"
    return "sft" if data.get("rl") is None and not data.get("trl") else None


def translated(document: Document, kind: Kind, *, folder: Path, count: Count) -> Translation:
    """Return the translation of a file in `folder`; `count` counts the rows of a translation's data."""
    t = Translation(document, system="Axolotl", keys=_keys(kind))
    for name in ("base_model", "learning_rate", "datasets"):
        if not t.given(name) and not t.given("pretraining_dataset"):
            t.problem(name, "required and missing")
    t.put("kind", kind, "rl", origin="" if kind == "dpo" else "no rl is named")
    t.put("name", run_name(Path(document.name).stem), origin="the file's name")
    rows = put_rows_per_step(t, WHOLE)
    entries = _entries(t)
    _put_data(t, kind, entries)
    _put_templates(t, entries)
    if kind == "dpo":
        _put_preferences(t)
    elif t["sample_packing"]:
        what = f"a step is {rows} rows, packed whole; there {rows} blocks of sequence_len tokens, with as many as fit"
        t.note_difference("sample_packing", f"{what}: raise micro_batch_size accordingly")
    if t.given("sequence_len"):
        what = f"rows of more than {t['sequence_len']} tokens are learned, up to the model's context"
        t.note_difference("sequence_len", f"{what}; there they are left out")
    t.raise_problems()
    counts = "eval" in t.draft.data and not t["eval_steps"]  # evaluations, in epochs
    known = not t.refused or (t["max_steps"] or 0) > 0  # what is not read cannot be counted
    read = count if known else lambda t: None
    length = length_in_steps(t, NAMES, rows_per_step=rows, data="datasets", count=read, evaluated=counts)
    put_optimizer_and_floor(t, length)
    put_adapter(t)
    if kind == "dpo" and t["adapter"] is not None and t["lora_dropout"]:
        t.put("train.lora.dropout", 0.0, origin="DPOTrainer turns dropout off there")
        t.note_idle("lora_dropout", "DPOTrainer turns dropout off")
    put_machine(t)
    if t["activation_offloading"]:
        t.put("train.gradient_checkpointing", "offload", "activation_offloading")
    put_parallel(t, folder)
    refuse_combinations(t, bits=BITS, dora="peft_use_dora", vllm="", optimizer=NAMES.optimizer)
    put_run(t, length)
    put_evaluation(t, length, best="loss", by_epoch=True)
    check_best(t)
    check_tokens(t)
    check_plugins(t)
    return t


def _keys(kind: Kind) -> list[Key]:
    """Return the table of a kind; of pairs it has `trl.beta`, and what else GRPO has under `trl` does nothing."""
    table = keys_of(KEYS[kind])
    known = {key.name for key in table}
    others = (key.name for key in keys_of(GRPO) if key.name.startswith("trl.") and key.name not in known)
    return [*table, *(idle(name, "it belongs to GRPO") for name in others if "trl.beta" in known)]


def _entries(t: Translation) -> list[dict[str, Any]]:
    """Return the entries of `datasets`, without keys that say nothing. Raises ConfigError."""
    listed = t["datasets"] if isinstance(t["datasets"], list) else []
    entries = [{key: value for key, value in each.items() if value is not None} for each in listed if each]
    if t.given("datasets") and not (entries and all(isinstance(each.get("path"), str) for each in entries)):
        t.problem("datasets", "every entry needs a path: a Hugging Face name, a file or a folder")
    t.raise_problems()
    return entries


def _refuse(t: Translation, index: int, key: str, why: str, *, instead: str) -> None:
    """Refuse a key of one of the entries; `instead` is the value with which it is read, or "" where none is."""
    keys = ("datasets", index, key)
    override = f"{dotted(keys)}={instead}" if instead else ""
    t.refused.append(Note(place=dotted(keys) + t.document.where(keys), text=why, instead=override))


# ---- the data ----


def _put_data(t: Translation, kind: Kind, entries: Sequence[Mapping[str, Any]]) -> None:
    """Put a source for each entry, or say what of it is not here."""
    put_order(t)
    for index, entry in enumerate(entries):
        _check_entry(t, kind, index, entry)
    held_out = t["val_set_size"]
    if t["test_datasets"]:
        _put_sources(t, "data", kind, entries, "datasets")
        tests = [dict(each) for each in t["test_datasets"]]
        for entry in tests:
            try:
                reader_of(kind, entry)
            except TypeNotHere as error:
                t.problem("test_datasets", f"{entry.get('path')}: {error}")
        _put_sources(t, "eval.data", kind, tests, "test_datasets")
    elif not held_out:
        _put_sources(t, "data", kind, entries, "datasets")
    elif held_out >= 1 and len(entries) > 1:
        what = f"{held_out:g} rows are held out of all; a share below 1 is of each dataset"
        t.refuse("val_set_size", what, instead="val_set_size=0.05")
    else:
        for to, part, block in (("data", "train", "datasets"), ("eval.data", "test", "val_set_size")):
            _put_sources(t, to, kind, entries, block, part=part, held_out=held_out, seed=t["seed"])
        t.note_difference("val_set_size", "so many rows are held out, though not the same as there")


def _put_sources(
    t: Translation, to: str, kind: Kind, entries: Sequence[Mapping[str, Any]], block: str, **part: Any
) -> None:
    """Put the entries as the source, or the sources, of `to`: data or eval.data; `part` is what is read of each."""
    sources: list[dict[str, Any]] = [
        {"source": SOURCE, "args": {"kind": kind, "dataset": dict(entry), **part}} | ({} if is_chat(entry) else RAW)
        for entry in entries
    ]
    if len(sources) == 1:
        for key, value in sources[0].items():
            t.put(f"{to}.{key}", value, block)
    elif sources:
        named = [{"name": entry["path"], **source} for entry, source in zip(entries, sources, strict=True)]
        name_apart(named)
        t.put(f"{to}.sources", named, block)


def _check_entry(t: Translation, kind: Kind, index: int, entry: Mapping[str, Any]) -> None:
    """Refuse a type that is not read, and what is learned there and not here."""
    try:
        reader_of(kind, entry)
    except TypeNotHere as error:
        _refuse(t, index, "type", str(error), instead="")
        return
    if kind == "dpo" or not is_chat(entry):
        return
    learned = entry.get("roles_to_train", ["assistant"])
    if {roles_of(entry).get(role, role) for role in learned} != {"assistant"}:
        what = (
            f"{', '.join(learned) or 'nobody'}: what the assistant says is learned, each of its turns, and nothing else"
        )
        _refuse(t, index, "roles_to_train", what, instead="[assistant]")
    for key in ENDS:
        if entry.get(key, "turn") != "turn":
            what = f"{entry[key]}: the end of each turn of the assistant's is learned, and no other"
            _refuse(t, index, key, what, instead="turn")


def _put_templates(t: Translation, entries: Sequence[Mapping[str, Any]]) -> None:
    """Put or check the chat template in which conversations are rendered."""
    rendered = [(index, entry) for index, entry in enumerate(entries) if is_chat(entry)]
    if not rendered:
        for name in ("chat_template", "chat_template_jinja"):
            if t.given(name):
                t.note_idle(name, "rows are plain text, which no template renders")
        return
    written = {template_of(entry) for _, entry in rendered}
    named = {entry.get("chat_template") or t["chat_template"] for _, entry in rendered}
    if len(written) > 1 or (written == {None} and len(named) > 1):
        said = ", ".join(sorted(str(each) for each in (written if len(written) > 1 else named)))
        t.problem("datasets", f"a run has one chat template, and the entries name several: {said}")
    elif (template := next(iter(written))) is not None:
        t.put("chat.template", TEMPLATES[template], "datasets")
    else:
        own = [f"datasets[{index}].chat_template=null" for index, entry in rendered if entry.get("chat_template")]
        takes_away = " ".join([*own, "chat_template=tokenizer_default"])
        check_template(t, next(iter(named)), written=NAMED_TEMPLATES, instead=takes_away)


def _put_preferences(t: Translation) -> None:
    """Put the loss of pairs and how strongly the reference holds."""
    beta = next((name for name in ("trl.beta", "rl_beta") if t[name] is not None), None)
    if beta is not None:
        t.put("dpo.beta", t[beta], beta)
    if t["rl"] == "ipo":
        t.put("dpo.loss", "ipo", "rl")
        if t.given("dpo_loss_type"):
            t.note_idle("dpo_loss_type", "rl: ipo is the loss ipo there too")
    elif t.given("dpo_loss_type"):
        put_preference_loss(t, "dpo_loss_type", t["dpo_loss_type"])
