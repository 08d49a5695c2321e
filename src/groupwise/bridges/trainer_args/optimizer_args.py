"""The optimizer's arguments as transformers' Trainer names and means them, for TRL, Axolotl and aitraining.

There steps are optimizer steps; here they are rollout batches, each with `steps_there` of those. A learning rate there
rises as k / warm-up from 0, here as (k + 1) / warm-up, so that the first step trains. A warm-up that is longer than the
run never reaches the peak; here it becomes one of the run's length that rises as far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.config.formats.translation import Translation

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
    """The names that a system gives these options, for messages."""

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
    """The length of the run. `there`: optimizer steps in the other system, None if it says nothing. `per_epoch`:
    rollout batches of an epoch, None if they were not counted."""

    there: int | None
    steps_there: int  # optimizer steps there on one rollout batch
    passes: int
    per_epoch: int | None = None

    @property
    def per_rollout(self) -> int:
        return self.steps_there * self.passes

    @property
    def here(self) -> int | None:
        return None if self.there is None else math.ceil(self.there / self.per_rollout)

    def rollouts(self, optimizer_steps: float) -> int:
        """Convert a number of the other system's optimizer steps to rollout batches."""
        return math.ceil(optimizer_steps / self.per_rollout)

    def interval(self, steps: float) -> int | None:
        """Convert a number of the other system's optimizer steps, or a share of the run, to rollout batches; None if
        unknown."""
        if steps < 1:
            return None if self.here is None else max(1, math.floor(steps * self.here))
        return self.rollouts(steps)


def length_of(t: Translation, names: OptimizerNames, *, steps_there: int, passes: int, per_epoch: int | None) -> Length:
    """Return the run's length, from the number of steps or else from epochs of `per_epoch` rollout batches."""
    asked, there = t[names.max_steps], None
    if asked is not None and asked > 0:
        there = asked
    elif per_epoch is not None:
        there = math.ceil(t[names.epochs] * per_epoch * steps_there * passes)
    return Length(there=there, steps_there=steps_there, passes=passes, per_epoch=per_epoch)


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
    """Translate two boolean keys to `quantization`; `asked` is a given key that means 4 bits by itself."""
    if t[four] and t[eight]:
        t.problem(eight, f"{four} says 4 bits; write one of them")
    elif t[four] or asked:
        t.put("quantization", "nf4", *(name for name in (asked, four) if name))
    elif t[eight]:
        t.put("quantization", "int8", eight)


def refuse_combinations(
    t: Translation, *, bits: Sequence[str], dora: str | None, vllm: str, optimizer: str = "optim"
) -> None:
    """Refuse what of a quantised base, DoRA and the optimizer does not go with the rest of the file here; `bits`,
    `dora`, `vllm` and `optimizer` are the names of the keys that ask for them. Called when all of these have been
    put."""
    data: dict[str, Any] = t.draft.data
    train = data.get("train", {})
    kind, lora, by_vllm = data.get("quantization"), train.get("lora") or {}, data.get("engine") == "vllm"
    asking = [name for name in bits if t.given(name) and t[name] not in (None, False, "lora")] or [bits[0]]
    if kind and (by_vllm or train.get("parallel") == "fsdp"):
        what = "vLLM would sample from other weights than train" if by_vllm else "FSDP does not cut quantised weights"
        plain = " ".join(f"{name}={'lora' if name == 'adapter' else 'false'}" for name in asking)
        t.refuse(asking[0], what, instead=f"{vllm}=false" if by_vllm else plain)
        t.drop("quantization")
    if dora is not None and lora.get("use_dora") and (by_vllm or kind):
        what = "vLLM serves no DoRA" if by_vllm else "DoRA needs norms of weights that are not quantised"
        t.refuse(dora, what, instead=f"{vllm}=false" if by_vllm else f"{dora}=false")
        del lora["use_dora"]
    whole = "lora" in train and train["lora"] is None
    if whole and train.get("parallel") == "fsdp" and train.get("optimizer", "adamw") != "adamw":
        what = f"{train.pop('optimizer')} cannot keep moments of weights that FSDP cuts"
        t.refuse(optimizer, what, instead=f"{optimizer}=adamw_torch")


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
        peak, warmup = float(f"{peak * length.here / warmup:.12g}"), length.here  # the same rates, step by step
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
