"""The part of a learner's state that goes through JSON: steps, what the reference counts, the shuffle of batches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupwise.train.learner import Learner

COUNTERS, SHARDS = "learner.json", "shards"  # what a checkpoint's directory holds: a file, a directory of parts


def counters_of(learner: Learner) -> dict[str, Any]:
    """Return its counters, as values for JSON."""
    counters = {"steps": learner.steps, "refused_steps": learner.refused_steps, **learner.reference.counters()}
    return {**counters, "shuffle": learner.shuffle.getstate()}


def restore_counters(learner: Learner, counters: Mapping[str, Any]) -> None:
    """Restore the values of `counters_of`, except the reference's."""
    learner.steps, learner.refused_steps = counters["steps"], counters["refused_steps"]
    version, state, gauss = counters["shuffle"]
    learner.shuffle.setstate((version, tuple(state), gauss))


def read_counters(directory: Path) -> dict[str, Any]:
    """Return the counters of `counters_of` that were saved there."""
    return json.loads((directory / COUNTERS).read_text())
