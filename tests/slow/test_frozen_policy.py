"""However far sampling runs ahead, a policy that never changes trains on the same groups, long ones as often."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from groupwise.store.tracking import read_metrics
from starter_run import starter_run

pytestmark = pytest.mark.slow

MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "window": {"weight_sync_interval": 3},
    "staleness 1": {"max_staleness": 1},
    "staleness 2": {"max_staleness": 2},
    "staleness 4": {"max_staleness": 4},
    "in-flight": {"max_staleness": 2, "in_flight_updates": True, "batch_rows": 8},
    "in-flight, recomputed": {"max_staleness": 2, "in_flight_updates": True, "in_flight_cache": "recompute"},
}
ROWS = """
import random
from groupwise.tasks.starter.tasks import prompts

def alternate(completions, **columns):
    return [float(i % 2) for i in range(len(completions))]

def short_and_long():
    rows = [row for style in ("think", "bare") for row in prompts(skill=["add"], style=style, split="train", n=200)]
    random.Random(0).shuffle(rows)
    return rows
"""


def of_a_run(folder: Path, rollout: dict[str, Any]) -> Sequence[dict[str, Any]]:
    """The steps' metrics of a run with learning rate 0 over prompts that are answered at once or at length."""
    folder.mkdir()
    (folder / "mixed_lengths.py").write_text(ROWS)
    result = starter_run(
        folder,
        name="frozen",
        data={"source": "mixed_lengths:short_and_long"},
        rewards=["mixed_lengths:alternate"],
        scoring={"workers": 0},
        rollout={"prompts_per_step": 4, "group_size": 4, "max_tokens": 40, **rollout},
        train={"steps": 20, "learning_rate": 0},
    )
    return [step for step in read_metrics(result.run_dir / "metrics.jsonl") if "rollout/len_mean" in step]


def test_the_mean_length_is_that_of_the_synchronous_run(tmp_path: Path):
    """Every mode trains on the very same groups: 80 of them, none sampled in vain."""
    lengths = {}
    for number, (name, rollout) in enumerate(MODES.items()):
        steps = of_a_run(tmp_path / str(number), rollout)
        assert sum(step["rollout/groups"] for step in steps) == 80
        limit = max(rollout.get("max_staleness", 0), rollout.get("weight_sync_interval", 1) - 1)
        assert max(step["rollout/staleness_max"] for step in steps) <= limit
        assert all(step["rollout/selection_len"] == 0.0 for step in steps)
        lengths[name] = fmean(step["rollout/len_mean"] for step in steps)
    assert all(mean == pytest.approx(lengths["synchronous"], rel=0.01) for mean in lengths.values()), lengths
