"""The optimizer's arguments as transformers' Trainer names and means them, for TRL, Axolotl and aitraining.

There steps are optimizer steps; here they are rollout batches, each with `steps_there` of those. A learning rate there
rises as k / warm-up from 0, here as (k + 1) / warm-up, so that the first step trains. A warm-up that is longer than the
run never reaches the peak; here it becomes one of the run's length that rises as far.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from groupwise.frontends.keys import Key, absent, all_idle, idle, integer, made, mapping, number, plain, text
from groupwise.frontends.translation import Translation

ADAMW = (
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_hf",
    "adamw_apex_fused",
    "adamw_anyprecision",
    "paged_adamw",
    "paged_adamw_32bit",
)
ADAMW_8BIT = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit", "ao_adamw_8bit")
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


def optimizer_keys(
    names: OptimizerNames, *, optimizer: str, schedule: str, epochs: float, warmup_ratio: float | None = None
) -> tuple[Key, ...]:
    """The table's part but for the learning rate; the keywords are the system's defaults."""
    what = f"{', '.join(ADAMW)} are AdamW; of 8 bits ({', '.join(ADAMW_8BIT)}) too, with float32 moments"
    return (
        made(names.optimizer, text, default=optimizer, what=what),
        absent("optim_args", "AdamW has its betas and weight decay here", off=("",)),
        absent("optim_target_modules", "every trained parameter has the same optimizer", off=()),
        made(
            names.schedule,
            text,
            "train.schedule",
            default=schedule,
            what=", ".join(f"{there}: {here}" for there, here in SCHEDULES.items()),
        ),
        made(
            names.schedule_kwargs,
            mapping,
            "train.final_rate",
            "train.decay_steps",
            what="min_lr_rate and min_lr_ratio are final_rate, min_lr is a rate, num_decay_steps are decay_steps",
        ),
        made(names.max_steps, integer, "train.steps", what="optimizer steps there, rollout batches here"),
        made(names.epochs, number, "train.steps", default=epochs, what="without a number of steps; whole batches only"),
        made(names.warmup_steps, number, "train.warmup_steps", what="below 1 it is a share of the run"),
        made(names.warmup_ratio, number, "train.warmup_steps", default=warmup_ratio, what="a share of the run"),
        plain("weight_decay", number, "train.weight_decay", 0.0),
        made("adam_beta1", number, "train.betas", default=0.9, what="the first of the two"),
        made("adam_beta2", number, "train.betas", default=0.999, what="the second of the two"),
        absent("adam_epsilon", "AdamW's epsilon is 1e-8 here", off=(1e-8,), kind=number),
        made("max_grad_norm", number, "train.max_grad_norm", default=1.0, what="0 does not clip there; here it must"),
        *all_idle("it only says what is logged when", "logging_steps", "logging_strategy", "logging_first_step"),
        idle("torch_compile", "nothing is compiled, which changes no result"),
        *all_idle("it belongs to torch_compile", "torch_compile_backend", "torch_compile_mode"),
        absent("neftune_noise_alpha", "there is no noise on embeddings", off=()),
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
        t.note_idle(names.optimizer, "AdamW, with moments in float32")
    elif optimizer not in ADAMW:
        t.refuse(names.optimizer, "AdamW is the optimizer here", instead=f"{names.optimizer}=adamw_torch")
    t.put("train.betas", [t["adam_beta1"], t["adam_beta2"]], "adam_beta1", "adam_beta2")
    if t["max_grad_norm"]:
        t.put("train.max_grad_norm", t["max_grad_norm"], "max_grad_norm")
    else:
        t.refuse("max_grad_norm", "the gradient is always clipped here", instead="max_grad_norm=1e9")


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
