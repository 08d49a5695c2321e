"""Finds which of several runs is best on its held-out prompts, and by how much: the best less each other, prompt by
prompt.

Runs are compared where they answer for the same: held-out prompts counted by the same rewards. The best of many was
also lucky on these prompts, so that its lead is somewhat less on others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from groupwise.config.run import RunConfig
from groupwise.errors import DataError
from groupwise.run.evaluate import PairedTest, paired_tests
from groupwise.run.sweep import Outcome

COUNTED = ("data", "rewards", "modes", "k", "success", "answer", "limit")  # keys of `eval` by which one is measured


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The best of several runs by a `measure`, such as greedy/reward, and its tests against the others, by their
    labels. Without a best there is a reason `why`."""

    measure: str | None = None
    best: Outcome | None = None
    against: dict[str, PairedTest]
    why: str | None = None


def rank(outcomes: Sequence[Outcome]) -> Ranking:
    """Return which run's policy is best after training: by the mode in which `eval.best` looks, else the first."""
    measured = [each for each in outcomes if each.result is not None and each.result.after]
    if len(measured) < 2:
        return Ranking(against={}, why="fewer than two of the runs were evaluated on held-out prompts (eval)")
    if len({_counted_by(each.run.config) for each in measured}) > 1:
        return Ranking(
            against={}, why="they are evaluated by other rewards or prompts (eval.rewards counts all of them alike)"
        )
    chosen = measured[0].run.config.eval
    assert chosen is not None
    after = {each.run.label: each.result.after for each in measured if each.result is not None}
    modes = next(iter(after.values()))
    mode = next((each for each in modes if each == chosen.best), next(iter(modes)))
    means = {label: evaluations[mode].mean() for label, evaluations in after.items()}
    first = max(measured, key=lambda each: -math.inf if math.isnan(m := means[each.run.label]) else m)
    measure, against = f"{mode}/reward", dict[str, PairedTest]()
    for label, evaluations in after.items():
        if label != first.run.label:
            try:
                test = paired_tests({mode: after[first.run.label][mode]}, evaluations).get(measure)
            except DataError as error:
                return Ranking(against={}, why=error.message)
            if test is not None:
                against[label] = test
    return Ranking(measure=measure, best=first, against=against)


def _counted_by(config: RunConfig) -> str:
    """Return what makes two evaluations comparable, as text."""
    held_out = config.eval
    assert held_out is not None
    said = held_out.model_dump_json(include=set(COUNTED))
    rewards = [] if held_out.rewards else [each.model_dump_json() for each in config.rewards]
    env = None if config.env is None else config.env.model_dump_json()
    return "\n".join([said, *rewards, str(env), str(config.folder.resolve()) if rewards or held_out.rewards else ""])
