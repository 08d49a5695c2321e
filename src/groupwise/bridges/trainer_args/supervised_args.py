"""A Trainer's run of examples or of preference pairs as ours (`kind: sft`, `kind: dpo`), in whoever's words it is.

A step here is an optimizer step there: the rows of the micro-batches that it accumulates, on all processes. An epoch is
as many whole steps as the rows make.
"""

from __future__ import annotations

from collections.abc import Sequence

from groupwise.bridges.trainer_args.optimizer_args import Length, OptimizerNames, length_of
from groupwise.config.formats.format import Count
from groupwise.config.formats.translation import Translation

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


def length_in_steps(t: Translation, names: OptimizerNames, *, rows_per_step: int, data: str, count: Count) -> Length:
    """Return the run's length; where no number of steps is given, `count` counts the rows. Raises ConfigError, at the
    key `data`, where they are fewer than those of one step."""
    by_epochs = (t[names.max_steps] or 0) <= 0 and names.max_steps not in t.unread
    rows = count(t) if by_epochs else None
    per_epoch = None if rows is None else rows // rows_per_step
    if per_epoch == 0:
        t.problem(data, f"{rows} rows are fewer than the {rows_per_step} of one step")
        t.raise_problems()
    return length_of(t, names, steps_there=1, passes=1, per_epoch=per_epoch)


def put_preference_loss(t: Translation, name: str, said: str | Sequence[str]) -> None:
    """Put the loss of pairs, of the key `name` that says one or several."""
    losses = [said] if isinstance(said, str) else said
    if len(losses) == 1 and losses[0] in LOSSES:
        t.put("dpo.loss", losses[0], name)
    else:
        what = f"{', '.join(losses)}: one of {' and '.join(LOSSES)} is here"
        t.refuse(name, what, instead=f"{name}=sigmoid")
