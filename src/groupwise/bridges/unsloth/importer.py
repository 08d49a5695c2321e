"""A GRPO script of Unsloth's as a run of ours (`bridges/trl/script.py` reads it, and runs none of it).

    from_pretrained: {...}      FastLanguageModel.from_pretrained, FastModel's and FastVisionModel's too
    get_peft_model: {...}       the adapter
    num_generations: 8          GRPOConfig, at the top level, with the defaults that Unsloth gives it

Unsloth also changes some values: a batch that holds no whole groups becomes one of groups, dapo brings its clipping and
mask, and dr_grpo does not scale rewards. So it is here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from groupwise.bridges.trl import importer as trl
from groupwise.bridges.trl import supervised
from groupwise.config.formats.format import ConfigFormat, Count
from groupwise.config.formats.keys import Key
from groupwise.config.formats.tables import keys_of
from groupwise.config.formats.translation import Translation
from groupwise.config.yaml import Document

KEYS = Path(__file__).with_name("keys.yaml")
SECTIONS = ("from_pretrained", "get_peft_model")
LOAD, LORA = "from_pretrained.", "get_peft_model."
RENAMED = {
    f"{LOAD}model_name": "model_name_or_path",
    f"{LOAD}dtype": "dtype",
    f"{LOAD}load_in_4bit": "load_in_4bit",
    f"{LOAD}load_in_8bit": "load_in_8bit",
    f"{LOAD}fast_inference": "use_vllm",
    f"{LOAD}gpu_memory_utilization": "vllm_gpu_memory_utilization",
    f"{LORA}r": "lora_r",
    f"{LORA}lora_alpha": "lora_alpha",
    f"{LORA}lora_dropout": "lora_dropout",
    f"{LORA}target_modules": "lora_target_modules",
    f"{LORA}use_rslora": "use_rslora",
    f"{LORA}use_gradient_checkpointing": "gradient_checkpointing",
    "vllm_sampling_params": "generation_kwargs",
}
"""Arguments that mean what one of `trl grpo` does."""
ADAPTER = tuple(name for name in RENAMED if name.startswith(LORA) and not name.endswith("use_gradient_checkpointing"))
WIDTHS = ("load_in_8bit", "load_in_16bit", "full_finetuning")
WITHOUT_EFFECT = ("seed", "include_stop_str_in_output")


def translate(document: Document, *, folder: Path, count: Count) -> Translation:
    """Return the translation of a script in `folder`; `count` counts the prompts of a translation's data."""
    keys, trainer = keys_of(KEYS), supervised.trainer_of(document.data)
    if trainer is not None:
        of_calls = (key for key in keys if key.name.startswith((LOAD, LORA)))
        keys = (*_with_own_defaults(supervised.keys(trainer), keys), *of_calls)
    t = Translation(document, system="Unsloth", keys=keys)
    full = bool(t[f"{LOAD}full_finetuning"])
    if not full and "get_peft_model" not in document.data:
        what = "without get_peft_model(...) there is no adapter to train, and full_finetuning is not set"
        t.refuse(f"{LOAD}full_finetuning", what, instead="get_peft_model.r=16")
    four = t[f"{LOAD}load_in_4bit"] and (
        t.given(f"{LOAD}load_in_4bit") or not any(t[f"{LOAD}{each}"] for each in WIDTHS)
    )
    for name, other in RENAMED.items():
        if other not in t.keys:  # nothing is sampled
            if name in t.keys and t.given(name):
                t.note_idle(name, "nothing is sampled")
        elif full and name in ADAPTER:
            if t.given(name) or t.unread.pop(name, None):
                t.note_idle(name, "full_finetuning trains all parameters")
        else:
            _rename(t, name, other)
    t.values |= {"use_peft": not full, "load_in_4bit": four and not full}
    if trainer is not None:
        t.stand_in("max_length", f"{LOAD}max_seq_length")
        _change_precision(t)
        return supervised.translated(t, trainer, folder=folder, count=count)
    _put_length(t)
    _change(t)
    return trl.complete(t, folder=folder, count=count)


def _with_own_defaults(theirs: Iterable[Key], own: Iterable[Key]) -> Iterator[Key]:
    """Yield TRL's keys with the defaults that Unsloth gives to all trainers' configurations."""
    shared, defaults = supervised.shared_names(), {key.name: key.default for key in own}
    for key in theirs:
        yield replace(key, default=defaults[key.name]) if key.name in shared and key.name in defaults else key


def _rename(t: Translation, name: str, other: str) -> None:
    """Say what `name` says, or its default, as `other`."""
    if t.given(name):
        t.stand_in(other, name)
        t.values.pop(name)
    elif name in t.unread:
        t.unread.setdefault(other, t.unread.pop(name))
    elif not t.given(other) and t.keys[name].default is not None:
        t.values[other] = t.keys[name].default


def _put_length(t: Translation) -> None:
    """Put what `max_seq_length` leaves for prompts, and vLLM's length."""
    name = f"{LOAD}max_seq_length"
    length, completion = t[name], t["max_completion_length"]
    if t["use_vllm"] and not t.given("vllm_max_model_length"):
        t.stand_in("vllm_max_model_length", name)
    if t.given("max_prompt_length") or {name, "max_completion_length"} & t.unread.keys():
        return
    if completion is not None and completion >= length:
        what = f"{length} tokens hold no prompt beside completions of {completion}"
        t.problem(name, f"{what}; write more, or a smaller max_completion_length")
    elif completion is not None:
        t.put("rollout.max_prompt_tokens", length - completion, name, "max_completion_length")


def _change(t: Translation) -> None:
    """Replace the values that Unsloth does when it makes a GRPOConfig."""
    micro, group = t["per_device_train_batch_size"], t["num_generations"]
    whole = t["steps_per_generation"] is not None or t["generation_batch_size"] is not None
    if not whole and micro * t["gradient_accumulation_steps"] * t["num_processes"] % group:
        t.values["per_device_train_batch_size"] = group
    if t["loss_type"] == "dapo":
        t.values |= {"epsilon_high": 0.28}
        t.put("algo.mask_truncated", True, "loss_type")
    if t["loss_type"] == "dr_grpo" and t.values.get("scale_rewards") is True:
        t.values["scale_rewards"] = False
    _change_precision(t)
    if t.given("generation_kwargs"):
        given = t["generation_kwargs"]
        t.values["generation_kwargs"] = {
            key: value for key, value in given.items() if key not in WITHOUT_EFFECT and value not in (None, [])
        }


def _change_precision(t: Translation) -> None:
    """Read how activations are kept, and in which type."""
    if t["gradient_checkpointing"] == "unsloth":
        t.values["gradient_checkpointing"] = True
        if t.document.data.get("get_peft_model", {}).get("use_gradient_checkpointing"):
            what = "activations are computed again; train.gradient_checkpointing=offload moves them off a CUDA GPU too"
            t.note_difference("gradient_checkpointing", what)
    if t["dtype"] == "float16":
        t.note_difference("dtype", "bfloat16 on a GPU and float32 on a CPU; float16 is not here")


FORMAT = ConfigFormat(
    name="Unsloth",
    order=40,
    recognises=lambda data: not data.keys().isdisjoint(SECTIONS),
    table=KEYS,
    translate=translate,
)
