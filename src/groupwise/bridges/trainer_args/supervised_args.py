"""Translates the arguments of a transformers Trainer's run on examples or preference pairs (`kind: sft`, `kind: dpo`),
from any system that uses them.

A step here is an optimizer step there: the rows of the accumulated micro-batches, on all processes. An epoch is as many
whole steps as the rows make.
"""

from __future__ import annotations

from collections.abc import Sequence

from groupwise.bridges.trainer_args.optimizer_args import Length, OptimizerNames, length_of
from groupwise.config.formats.format import Count
from groupwise.config.formats.translation import Translation
from groupwise.errors import GroupwiseError

LOSSES = ("sigmoid", "ipo")


def put_rows_per_step(t: Translation, names: Sequence[str]) -> int:
    """Put and return the rows of a step, the product of the keys `names`. Raises ConfigError."""
    rows = 1
    for name in names:
        if name in t.unread:
            t.problem(name, f"{t.unread[name].why}; write {t.unread[name].instead}")
        elif t[name] < 1:
            t.problem(name, f"{t[name]} is not valid; it must be 1 or more")
        else:
            rows *= t[name]
    t.raise_problems()
    t.put("rollout.prompts_per_step", rows, *names)
    return rows


def length_in_steps(
    t: Translation, names: OptimizerNames, *, rows_per_step: int, data: str, count: Count, evaluated: bool
) -> Length:
    """Return the run's length. `count` counts the rows where no number of steps is given, or where it is `evaluated` in
    epochs; a number of steps that is given does without, where they cannot be read now. (The run says why.)

    Raises:
        ConfigError: at the key `data`, the rows are fewer than those of one step.
        GroupwiseError: they are needed, and cannot be read.
    """
    by_epochs, rows = (t[names.max_steps] or 0) <= 0 and names.max_steps not in t.unread, None
    try:
        rows = count(t) if by_epochs or evaluated else None
    except GroupwiseError:
        if by_epochs:
            raise
        t.note_difference(
            data, "the rows cannot be counted here, so that an epoch of evaluations is unknown: set eval.every"
        )
    if rows is not None and rows < rows_per_step and by_epochs:
        t.problem(data, f"{rows} rows are fewer than the {rows_per_step} of one step")
        t.raise_problems()
    per_epoch = None if rows is None else max(1, rows // rows_per_step)
    return length_of(t, names, steps_there=1, passes=1, per_epoch=per_epoch)


def check_best(t: Translation) -> None:
    """Refuse another measure of the best model than the loss of held-out rows."""
    if (measure := t["metric_for_best_model"]) not in (None, "loss", "eval_loss"):
        what = f"{measure} is not measured; the least held-out loss is what is kept"
        t.refuse("metric_for_best_model", what, instead="metric_for_best_model=eval_loss")


def put_preference_loss(t: Translation, name: str, said: str | Sequence[str]) -> None:
    """Put the loss of pairs, of the key `name` that says one or several."""
    losses = [said] if isinstance(said, str) else said
    if len(losses) == 1 and losses[0] in LOSSES:
        t.put("dpo.loss", losses[0], name)
    else:
        what = f"{', '.join(losses)}: one of {' and '.join(LOSSES)} is here"
        t.refuse(name, what, instead=f"{name}=sigmoid")
