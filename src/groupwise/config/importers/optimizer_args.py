"""The optimizer's arguments as transformers' Trainer names and means them, for TRL, Axolotl and aitraining.

There steps are optimizer steps; here they are rollout batches, each with `steps_there` of those. A learning rate there
rises as k / warm-up from 0, here as (k + 1) / warm-up, so that the first step trains. A warm-up that is longer than the
run never reaches the peak; here it becomes one of the run's length that rises as far.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.config.importers.base import Translation, boolean
from groupwise.errors import GroupwiseError

ADAMW = (
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_hf",
    "adamw_apex_fused",
    "adamw_anyprecision",
    "paged_adamw",
    "paged_adamw_32bit",
)
ADAMW_8BIT = {"adamw_8bit": "adamw_8bit", "adamw_bnb_8bit": "adamw_8bit", "paged_adamw_8bit": "paged_adamw_8bit"}
ADAMW_8BIT_OF_TORCHAO = ("adamw_torch_8bit", "ao_adamw_8bit")
SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "wsd",
}


@dataclass(frozen=True, kw_only=True)
class OptimizerNames:
    """What a system calls these."""

    learning_rate: str
    optimizer: str
    schedule: str
    schedule_kwargs: str
    max_steps: str
    epochs: str
    warmup_steps: str
    warmup_ratio: str


TRANSFORMERS = OptimizerNames(
    learning_rate="learning_rate",
    optimizer="optim",
    schedule="lr_scheduler_type",
    schedule_kwargs="lr_scheduler_kwargs",
    max_steps="max_steps",
    epochs="num_train_epochs",
    warmup_steps="warmup_steps",
    warmup_ratio="warmup_ratio",
)


@dataclass(frozen=True, kw_only=True)
class Length:
    """How long the run is. `there`: optimizer steps in the other system, None if it says nothing."""

    there: int | None
    steps_there: int  # optimizer steps there on one rollout batch
    passes: int

    @property
    def per_rollout(self) -> int:
        return self.steps_there * self.passes

    @property
    def here(self) -> int | None:
        return None if self.there is None else math.ceil(self.there / self.per_rollout)

    def rollouts(self, optimizer_steps: float) -> int:
        """So many optimizer steps there, in rollout batches."""
        return math.ceil(optimizer_steps / self.per_rollout)

    def interval(self, steps: float) -> int | None:
        """So many optimizer steps there, or a share of the run, in rollout batches; None if that is not known."""
        if steps < 1:
            return None if self.here is None else max(1, math.floor(steps * self.here))
        return self.rollouts(steps)


def length_of(t: Translation, names: OptimizerNames, *, steps_there: int, passes: int, per_epoch: int | None) -> Length:
    """The run's length, from the number of steps or else from epochs of `per_epoch` rollout batches."""
    asked = t[names.max_steps]
    if asked is not None and asked > 0:
        return Length(there=asked, steps_there=steps_there, passes=passes)
    if per_epoch is None:
        return Length(there=None, steps_there=steps_there, passes=passes)
    epochs = t[names.epochs]
    return Length(there=math.ceil(epochs * per_epoch * steps_there * passes), steps_there=steps_there, passes=passes)


def put_optimizer(t: Translation, names: OptimizerNames, length: Length, *, warmup: float | None) -> None:
    """Steps, learning rate, warm-up, schedule and AdamW. `warmup` is the system's default, in optimizer steps."""
    peak = t[names.learning_rate]
    name = names.max_steps if t.given(names.max_steps) and t[names.max_steps] > 0 else names.epochs
    t.put("train.steps", length.here, name)
    if length.here is not None and length.there is not None and length.here * length.per_rollout != length.there:
        made_of = f"{length.here} rollout batches of {length.per_rollout} optimizer steps"
        t.note_difference(name, f"{length.there} optimizer steps become {made_of}")
    _put_schedule(t, names, length, peak)
    _put_warmup(t, names, length, peak=peak, default=warmup)
    optimizer = t[names.optimizer]
    if optimizer in ADAMW_8BIT:
        t.put("train.optimizer", ADAMW_8BIT[optimizer], names.optimizer)
    elif optimizer in ADAMW_8BIT_OF_TORCHAO:
        t.note_idle(names.optimizer, "AdamW, with moments in float32")
    elif optimizer not in ADAMW:
        t.refuse(names.optimizer, "AdamW is the optimizer here", instead=f"{names.optimizer}=adamw_torch")
    t.put("train.betas", [t["adam_beta1"], t["adam_beta2"]], "adam_beta1", "adam_beta2")
    if t["max_grad_norm"]:
        t.put("train.max_grad_norm", t["max_grad_norm"], "max_grad_norm")
    else:
        t.refuse("max_grad_norm", "the gradient is always clipped here", instead="max_grad_norm=1e9")


def put_quantization(t: Translation, *, four: str, eight: str, asked: str | None = None) -> None:
    """`quantization`, of two keys that are true or false; `asked` is one that says 4 bits by itself."""
    if t[four] and t[eight]:
        t.problem(eight, f"{four} says 4 bits; write one of them")
    elif t[four] or asked:
        t.put("quantization", "nf4", *(name for name in (asked, four) if name))
    elif t[eight]:
        t.put("quantization", "int8", eight)


def refuse_combinations(t: Translation, *, bits: Sequence[str], dora: str | None, vllm: str) -> None:
    """What of a quantised base and DoRA does not go with the rest of the file here; `bits`, `dora` and `vllm` are the
    names of the keys that ask for them. Called when all of these have been put."""
    data: dict[str, Any] = t.draft.data
    train = data.get("train", {})
    kind, lora, by_vllm = data.get("quantization"), train.get("lora") or {}, data.get("engine") == "vllm"
    asked = next((name for name in bits if t.given(name) and t[name] not in (None, False, "lora")), bits[0])
    if kind and (by_vllm or train.get("parallel") == "fsdp"):
        what = "vLLM would sample from other weights than train" if by_vllm else "FSDP does not cut quantised weights"
        plain = f"{asked}={'lora' if asked == 'adapter' else 'false'}"
        t.refuse(asked, what, instead=f"{vllm}=false" if by_vllm else plain)
        t.drop("quantization")
    if dora is not None and lora.get("use_dora") and (by_vllm or kind):
        what = "vLLM serves no DoRA" if by_vllm else "DoRA needs norms of weights that are not quantised"
        t.refuse(dora, what, instead=f"{vllm}=false" if by_vllm else f"{dora}=false")
        del lora["use_dora"]


def _put_warmup(t: Translation, names: OptimizerNames, length: Length, *, peak: float, default: float | None) -> None:
    steps, ratio = t[names.warmup_steps], t[names.warmup_ratio]
    if t.given(names.warmup_steps) and t.given(names.warmup_ratio) and steps and ratio:
        t.problem(names.warmup_ratio, f"{names.warmup_steps} says how long the warm-up is; write one of them")
    name = names.warmup_steps if steps is not None else names.warmup_ratio
    total = length.there
    if steps is None or 0 < steps < 1:
        share = steps or ratio
        steps = default if share is None else None if total is None else share * total
    if t[names.schedule] == "constant" and steps:
        if t.given(name):
            t.note_idle(name, "the schedule `constant` has no warm-up there; constant_with_warmup has")
        steps = 0
    if steps is None:  # a share of a run whose length is not known
        t.put("train.learning_rate", peak, names.learning_rate)
        return
    warmup = length.rollouts(steps)
    if length.here is not None and warmup > length.here:
        what = f"a warm-up of {steps:g} steps is longer than the run of {length.there}: the rate rises to"
        t.note_difference(name, f"{what} {length.here}/{warmup} of {names.learning_rate}, as there")
        peak, warmup = float(f"{peak * length.here / warmup:.12g}"), length.here
    t.put("train.learning_rate", peak, names.learning_rate)
    t.put("train.warmup_steps", warmup, name)


def _put_schedule(t: Translation, names: OptimizerNames, length: Length, peak: float) -> None:
    there, kwargs = t[names.schedule], dict(t[names.schedule_kwargs] or {})
    if there not in SCHEDULES:
        instead = f"{names.schedule}=cosine"
        t.refuse(names.schedule, f"{there} is not here; {', '.join(SCHEDULES)} are", instead=instead)
        return
    t.put("train.schedule", SCHEDULES[there], names.schedule)
    final: Any = None
    for key in ("min_lr_rate", "min_lr_ratio", "min_lr"):
        if key in kwargs and there in ("cosine_with_min_lr", "warmup_stable_decay"):
            final = kwargs.pop(key) / (peak if key == "min_lr" else 1)
    t.put("train.final_rate", final, names.schedule_kwargs)
    if there == "warmup_stable_decay":
        if (decay := kwargs.pop("num_decay_steps", None)) is not None:
            t.put("train.decay_steps", length.rollouts(decay), names.schedule_kwargs)
        kwargs.pop("num_stable_steps", None)  # what warm-up and decay leave
        if kwargs.pop("decay_type", "cosine") != "linear":
            t.note_difference(names.schedule, "the fall is linear; there it is a cosine unless decay_type says linear")
    for key in kwargs:
        t.refuse(names.schedule_kwargs, f"{key!r} is not here")


# ----------------------------------------------------------------------------------------------------------------------
# How several processes share a model there, as our `train.parallel` and `train.cpu_offload`.
#
#     fsdp, fsdp_config, fsdp_version, dp_shard_size     FSDP: parallel fsdp; its `offload` is cpu_offload
#     deepspeed                                          a file, its name or its content: ZeRO 3 is fsdp, 1 and 2 are
#     ddp
#     accelerate_config                                  of `trl grpo`: a file, or one of the names that TRL has
#
# ZeRO 1 and 2 cut what the optimizer keeps, and not the weights: with an adapter that is next to nothing, and the same
# update either way.
# ----------------------------------------------------------------------------------------------------------------------

_ZERO = re.compile(r"zero[-_]?(?:stage[-_]?)?([0-3])", re.IGNORECASE)
_PLAIN = ("multi_gpu", "single_gpu", "ddp", "no", "multi_cpu")
FSDP_WORDS = ("full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2", "no_shard", "offload", "auto_wrap")


def fsdp(value: Any) -> Any:
    """True or false, or FSDP's words in a list or one text."""
    if isinstance(value, bool):
        return value
    words = value.replace(",", " ").split() if isinstance(value, str) else value
    if words in (["true"], ["false"]):
        return boolean(words[0])
    if not isinstance(words, list) or any(word not in FSDP_WORDS for word in words):
        raise ValueError(f"true or false, or some of {', '.join(FSDP_WORDS)}")
    return words


def settings(value: Any) -> Any:
    """A mapping, or the path of a file with one."""
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, str) or not value:
        raise ValueError("a mapping, or the path of a file")
    return value


def put_parallel(t: Translation, folder: Path) -> None:
    """`train.parallel` and `train.cpu_offload`; files are looked for in `folder`."""
    asked = [name for name in ("fsdp", "deepspeed", "accelerate_config") if name in t.keys and t[name]]
    if len(asked) > 1:
        t.problem(asked[1], f"{asked[0]} says how the model is shared too; write one of them")
        return
    if asked == ["deepspeed"] or asked == ["accelerate_config"]:
        _put_file(t, asked[0], folder)
    elif asked or _given_config(t) or ("dp_shard_size" in t.keys and (t["dp_shard_size"] or 1) > 1):
        _put_fsdp(t)


def _given_config(t: Translation) -> bool:
    return t["fsdp"] is None and bool(t["fsdp_config"])


def _put_fsdp(t: Translation) -> None:
    words = t["fsdp"] if isinstance(t["fsdp"], list) else []
    if "no_shard" in words:
        t.put("train.parallel", "ddp", "fsdp")
        return
    t.put("train.parallel", "fsdp", *(name for name in ("fsdp", "fsdp_config", "dp_shard_size") if name in t.keys))
    settings = t["fsdp_config"] if isinstance(t["fsdp_config"], dict) else {}
    if "offload" in words or _offloads(settings):
        t.put("train.cpu_offload", True, "fsdp", "fsdp_config")


def _offloads(settings: Mapping[str, Any]) -> bool:
    asked = [settings.get(name) for name in ("offload_params", "fsdp_offload_params", "cpu_offload")]
    return any(value is True or str(value).lower() == "true" for value in asked)


def _put_file(t: Translation, name: str, folder: Path) -> None:
    said = t[name]
    content = said if isinstance(said, dict) else _read(folder / said)
    found = _of_name(str(said)) if content is None else _of_content(content)
    if found is None:
        why = f"what {said!r} asks for is unknown; it is no file here, and its name tells no stage of ZeRO"
        t.refuse(name, why, instead=f"{name}=null train.parallel=fsdp")
        return
    parallel, offload = found
    t.put("train.parallel", parallel, name)
    if offload and parallel == "fsdp":
        t.put("train.cpu_offload", True, name)


def _read(path: Path) -> Mapping[str, Any] | None:
    """The mapping in a JSON or YAML file; None if there is none."""
    from groupwise.config.yaml import Document

    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text("utf-8")) if path.suffix == ".json" else Document.read(path).data
    except (ValueError, GroupwiseError):
        return None


def _of_name(said: str) -> tuple[str, bool] | None:
    """(parallel, whether weights are offloaded) of a file's name or one of TRL's."""
    stem = Path(said).stem.lower()
    offload = "offload" in stem
    if stage := _ZERO.search(stem):
        return ("fsdp" if stage[1] == "3" else "ddp"), offload
    if "fsdp" in stem:
        return "fsdp", offload
    return ("ddp", False) if stem in _PLAIN else None


def _of_content(content: Mapping[str, Any]) -> tuple[str, bool] | None:
    """The same of a DeepSpeed file, or of accelerate's."""
    if isinstance(zero := content.get("zero_optimization"), Mapping):
        offload = zero.get("offload_param") or {}
        return ("fsdp" if zero.get("stage") == 3 else "ddp"), offload.get("device", "none") == "cpu"
    kind = str(content.get("distributed_type", "")).upper()
    if kind == "FSDP":
        return "fsdp", _offloads(content.get("fsdp_config") or {})
    if kind == "DEEPSPEED":
        settings = content.get("deepspeed_config") or {}
        offload = settings.get("offload_param_device") == "cpu"
        return ("fsdp" if settings.get("zero_stage") == 3 else "ddp"), offload
    return ("ddp", False) if kind.lower() in _PLAIN else None
