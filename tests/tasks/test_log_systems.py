"""The same exchanges, logged by five systems, come to the same rows, which hold what is true of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from groupwise.store.masking import PERSONAL, SECRETS, Masking
from groupwise.tasks.logs.importing import ImportConfig, Imported, import_logs, write
from simulated_logs import SYSTEMS, asked

TALKS = 120


def imported(folder: Path, system: str) -> Imported:
    rows = [row for each in asked(1, talks=TALKS) for row in SYSTEMS[system](each)]
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    masking = Masking({}, rules=(*SECRETS, *PERSONAL))
    return import_logs([folder / "log.jsonl"], ImportConfig(), masking=masking)


def rows_of(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """All rows, by file."""
    return {each.name: [json.loads(line) for line in each.open()] for each in sorted(folder.glob("*.jsonl"))}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Imported, dict[str, list[dict[str, Any]]]]:
    folder = tmp_path_factory.mktemp("openai")
    result = imported(folder, "openai")
    write(result, folder / "to")
    return result, rows_of(folder / "to")


@pytest.mark.parametrize("system", [each for each in SYSTEMS if each != "openai"])
def test_every_system_comes_to_the_same_rows(first: tuple[Imported, dict[str, Any]], system: str, tmp_path: Path):
    result = imported(tmp_path, system)
    write(result, tmp_path / "to")
    expected, rows = first
    assert result.report["read"]["bad"] == 0
    assert rows_of(tmp_path / "to") == rows
    for name in ("outcomes", "prompts", "learn", "masked"):
        assert result.report[name] == expected.report[name]


def test_what_the_rows_hold_is_true(first: tuple[Imported, dict[str, Any]]):
    _, rows = first
    truth = {each.id: each for each in asked(1, talks=TALKS)}
    prompts = [*rows["train.jsonl"], *rows["heldout.jsonl"]]
    assert len(prompts) == len(truth) and len(rows["heldout.jsonl"]) > 20
    users = [{truth[row["log_id"]].user for row in rows[f"{side}.jsonl"]} for side in ("train", "heldout")]
    assert not users[0] & users[1]
    for row in prompts:
        said = truth[row["log_id"]]
        assert row["score"] == (None if said.thumb is None else float(said.thumb))
        assert row["logged"] == said.answer["content"]
        assert (row.get("answer") is not None) == (said.thumb is True)
        assert "example.com" not in json.dumps(row) and "[email]" in row["prompt"][1]["content"]
        assert bool(row.get("tools")) == bool(said.tools)
    right = [truth[row["log_id"]].is_right for row in prompts if "answer" in row]
    assert 0.8 < sum(right) / len(right) < 1  # thumbs err
