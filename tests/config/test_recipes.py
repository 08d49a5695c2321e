"""The recipes in configs/: each is a configuration, says what was published, and runs two steps on the starter."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from field_shapes import write_rows
from groupwise.config.run import load_config
from groupwise.run.display import LineDisplay
from groupwise.run.loop import run_loop
from slow_cases import slow_but

RECIPES = Path(__file__).parents[2] / "configs"
NAMES = sorted(path.name for path in RECIPES.glob("*.yaml") if path.name != "arithmetic.yaml")
SMALL = (
    "model=starter",
    "rollout.prompts_per_step=2",
    "rollout.group_size=2",
    "rollout.max_tokens=12",
    "rollout.refill=1",
    "train.steps=2",
    "scoring.workers=0",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_says_where_it_comes_from(name: str):
    text = (RECIPES / name).read_text()
    head = text[: text.index("\nname:")]
    assert (f"groupwise run configs/{name}" in head and "GPU of" in head and "ublished" in head) or "no table" in head
    assert load_config(RECIPES / name).train.lora is not None


@pytest.mark.parametrize("name", slow_but({"gsm8k-0.5b.yaml", "wordle-1.7b.yaml"}, of=NAMES))
def test_a_recipe_runs_on_the_starter(tmp_path: Path, name: str):
    changes = [*SMALL, f"output_dir={tmp_path}"]
    config = load_config(RECIPES / name)
    for key, data in (("data", config.data), ("eval.data", config.eval and config.eval.data)):
        if data is not None:
            write_rows(tmp_path / "rows.jsonl", data.source.rpartition(":")[2], count=4)
            changes += [f"{key}.args={{source: {tmp_path / 'rows.jsonl'}}}", f"{key}.limit=4"]
    if config.env is not None and config.data is None:
        changes.append("eval.limit=2")
    result = run_loop(load_config(RECIPES / name, changes), display=LineDisplay(2, stream=io.StringIO()))
    assert result.steps == 2
