"""Datasets by name: rows in the shapes that the field's datasets have, from files and from saved datasets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from field_shapes import SHAPES, write_rows
from groupwise.config.data import DataConfig
from groupwise.config.load import load_object
from groupwise.errors import DataError
from groupwise.tasks import datasets as named
from groupwise.tasks.prompts import open_prompts
from wording import raises

MATH, TEXT = "groupwise.rewards.math", "groupwise.rewards.text"
JUDGED = {
    "gsm8k": (r"So \boxed{1203}.", r"\boxed{1200}", f"{MATH}:number_match", {"box": True}),
    "math": (r"\boxed{0.5}", r"\boxed{2}", f"{MATH}:math_match", {}),
    "countdown": ("<answer>(44 + 19) + 35 = 98</answer>", "<answer>98</answer>", f"{MATH}:equation_match", {}),
    "reverse_text": (
        "<reversed_text>.tac ehT</reversed_text>",
        ".tac ehT",
        f"{TEXT}:lcs_ratio",
        {"tag": "reversed_text"},
    ),
}


def config(name: str, source: str) -> DataConfig:
    return DataConfig(source=f"groupwise.tasks.datasets:{name}", args={"source": source})


@pytest.mark.parametrize("name", SHAPES)
def test_the_reward_of_a_dataset_knows_its_answers(tmp_path: Path, name: str):
    write_rows(tmp_path / "rows.jsonl", name)
    [prompt] = open_prompts(config(name, "rows.jsonl"), folder=tmp_path).known
    right, wrong, function, args = JUDGED[name]
    said = [[{"role": "assistant", "content": each}] for each in (right, wrong)]
    columns = {key: [value] * 2 for key, value in prompt.columns.items()}
    takes = {key: columns[key] for key in ("nums", "answer") if key in columns}
    assert load_object(function)(said, **takes, **args) == [1.0, 0.0]


@pytest.mark.parametrize("name", SHAPES)
def test_a_saved_dataset_is_read_with_its_split(tmp_path: Path, name: str):
    DatasetDict({"test": Dataset.from_list([SHAPES[name]] * 3)}).save_to_disk(str(tmp_path / "saved"))
    asked = DataConfig(source=f"groupwise.tasks.datasets:{name}", args={"source": "saved", "split": "test"})
    prompts = open_prompts(asked, folder=tmp_path).known
    assert len(prompts) == 3 and prompts[0].messages[-1]["role"] == "user"


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("gsm8k", {"question": "1+1?"}),
        ("gsm8k", {"question": "1+1?", "answer": "2"}),
        ("math", {"problem": "1+1?", "solution": "2"}),
        ("countdown", {"nums": "1 2", "target": 3}),
        ("reverse_text", {"prompt": [{"role": "user"}]}),
    ],
)
def test_a_row_of_another_shape_is_named(tmp_path: Path, name: str, row: dict):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    with raises(DataError):
        open_prompts(config(name, "rows.jsonl"), folder=tmp_path)


def test_what_is_told_may_be_another(tmp_path: Path):
    write_rows(tmp_path / "rows.jsonl", "gsm8k")
    [row] = named.gsm8k("rows.jsonl", instruction="Write #### and the answer.", folder=str(tmp_path))
    assert row["prompt"].endswith("Write #### and the answer.") and row["answer"] == "1203"


def test_a_number_that_is_the_answer_may_be_zero(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"problem": "1 - 1?", "answer": 0}))
    [row] = named.math("rows.jsonl", folder=str(tmp_path))
    assert row["answer"] == "0"


def test_a_split_of_a_file_acts_or_is_refused(tmp_path: Path):
    """Training and evaluation may name two parts of one file; both had all of it."""
    rows = [{"problem": f"{n} + 1?", "answer": n + 1} for n in range(10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parts = [[*named.math("rows.jsonl", split=split, folder=str(tmp_path))] for split in ("train[:80%]", "train[80%:]")]
    assert [[int(row["answer"]) for row in part] for part in parts] == [[*range(1, 9)], [9, 10]]
    for refused in ("test", "train[:x]"):
        with raises(DataError):
            [*named.math("rows.jsonl", split=refused, folder=str(tmp_path))]


def test_a_saved_dataset_of_one_split_is_read_as_it_is(tmp_path: Path):
    Dataset.from_list([SHAPES["math"]] * 2).save_to_disk(str(tmp_path / "saved"))
    assert len([*named.math("saved", folder=str(tmp_path))]) == 2
