"""Which rows of a source are used: slices of a split, filters, and rows drawn by seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from groupwise.config.data import DataConfig, DatasetConfig
from groupwise.errors import DataError, LoadError
from groupwise.tasks.prompts import open_prompts
from groupwise.tasks.rows import _sliced


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [{"prompt": f"p{i}", "level": i % 5} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my_filters.py").write_text(
        "import numpy\n"
        "def easy(row): return row['level'] < 2\n"
        "def odd(row): return numpy.bool_(row['level'] % 2)\n"
        "def none(row): return False\n"
        "def unsure(row): return row['level']\n"
        "def fails(row): return row['levle'] < 2\n"
        "def renamed(row): return row['prompt'] == 'p3'\n"
    )
    return tmp_path


def read(folder: Path, **options: object) -> list[str]:
    config = DatasetConfig.model_validate({"source": "rows.jsonl", **options})
    return [str(prompt.text) for prompt in open_prompts(config, folder=folder).known]


# ---- slices ----


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("train", range(20)),
        ("train[:90%]", range(18)),
        ("train[90%:]", range(18, 20)),
        ("train[5:8]", range(5, 8)),
        ("train[:-5]", range(15)),
        ("train[-10%:]", range(18, 20)),
        ("train[25%:50%]", range(5, 10)),
        ("train[:]", range(20)),
    ],
)
def test_a_slice_of_a_file_is_that_of_load_dataset(folder, split, expected):
    import datasets

    found = read(folder, split=split)
    assert found == [f"p{i}" for i in expected]
    theirs = datasets.load_dataset("json", data_files=str(folder / "rows.jsonl"), split=split, cache_dir=folder / "c")
    assert found == list(theirs["prompt"])  # type: ignore[index]


@given(st.integers(1, 50), st.integers(0, 100))
def test_two_slices_at_one_place_share_no_row_and_leave_none_out(count, percent):
    rows = [(str(i), i) for i in range(count)]
    first = _sliced(iter(rows), (None, f"{percent}%"))
    assert [*first, *_sliced(iter(rows), (f"{percent}%", None))] == rows


def test_a_slice_of_a_saved_dataset(tmp_path):
    import datasets

    rows = datasets.Dataset.from_list([{"prompt": f"p{i}"} for i in range(10)])
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "several")
    assert read(tmp_path, source="one", split="train[:20%]") == ["p0", "p1"]
    assert read(tmp_path, source="several", split="test[-1:]") == ["p9"]


# ---- filters ----


def test_a_filter_keeps_rows_and_limit_counts_what_it_kept(folder):
    assert read(folder, filter="my_filters:easy") == [f"p{i}" for i in (0, 1, 5, 6, 10, 11, 15, 16)]
    assert read(folder, filter="my_filters:easy", limit=3) == ["p0", "p1", "p5"]
    assert read(folder, filter="my_filters:odd", split="train[:5]") == ["p1", "p3"]


def test_a_filter_sees_columns_under_their_new_names(folder):
    (folder / "asked.jsonl").write_text('{"question": "p3"}\n{"question": "p4"}\n')
    options = {"source": "asked.jsonl", "columns": {"prompt": "question"}, "filter": "my_filters:renamed"}
    assert read(folder, **options) == ["p3"]


def test_what_was_filtered_is_counted(folder):
    source = open_prompts(DataConfig(source="rows.jsonl", filter="my_filters:easy"), folder=folder)
    [count] = source.counts
    assert (count.rows, count.filtered, count.used) == (20, 12, 8)


@pytest.mark.parametrize("limit", [2, 20, 21, None])
def test_rows_after_the_limit_are_not_counted_as_read(folder, limit):
    """Whether there is one after the twentieth nobody has looked."""
    [count] = open_prompts(DataConfig(source="rows.jsonl", limit=limit), folder=folder).counts
    assert (count.rows, count.used, count.whole) == (min(limit or 20, 20), min(limit or 20, 20), limit in (21, None))


@pytest.mark.parametrize("name", ["none", "unsure", "fails"])
def test_a_filter_that_cannot_be_used_is_an_error_of_the_data(folder, name):
    with pytest.raises(DataError) as caught:
        read(folder, filter=f"my_filters:{name}")
    assert (caught.value.code, caught.value.field) == ("invalid_data", "data.filter")
    assert ("rows.jsonl:1" in caught.value.message) == (name != "none")  # the row that it is about
    with pytest.raises(LoadError):
        read(folder, filter="my_filters:missing")


# ---- rows drawn at random ----


def test_rows_drawn_by_seed_keep_their_order(folder):
    first, same, other = read(folder, sample=7), read(folder, sample=7, seed=0), read(folder, sample=7, seed=1)
    assert first == same != other
    assert len(set(first)) == 7 and first == sorted(first, key=lambda text: int(text[1:]))
    assert set(read(folder, sample=4, filter="my_filters:easy")) < set(read(folder, filter="my_filters:easy"))


def test_every_row_is_drawn_as_often_as_any_other(folder):
    """500 seeds, 5 of 20 rows: each is expected 125 times, with a deviation of 9.7."""
    drawn = [text for seed in range(500) for text in read(folder, sample=5, seed=seed)]
    assert all(abs(drawn.count(f"p{i}") - 125) < 4.5 * 9.7 for i in range(20))


def test_a_share_of_the_rows_is_drawn(folder):
    assert len(read(folder, sample=0.25)) == 5 and len(read(folder, sample=0.001)) == 1
    assert read(folder, sample=0.25) == read(folder, sample=5)


def test_more_rows_than_there_are_cannot_be_drawn(folder):
    with pytest.raises(DataError) as caught:
        read(folder, sample=21)
    assert caught.value.field == "data.sample"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"sample": 5, "limit": 5}, "sample"),
        ({"sample": 1.5}, "sample"),
        ({"seed": 5}, "seed"),
        ({"split": "test[:5]"}, "split"),
    ],
)
def test_what_does_nothing_is_refused(options, field):
    with pytest.raises(ValidationError) as caught:
        DataConfig.model_validate({"source": "rows.jsonl", **options})
    assert caught.value.errors()[0]["loc"] == (field,)


# ---- names ----


def test_a_new_name_that_is_taken_is_refused(folder):
    with pytest.raises(DataError) as caught:
        read(folder, columns={"level": "prompt"})
    assert (caught.value.field, "rows.jsonl:1" in caught.value.message) == ("data.columns", True)
    swapped = open_prompts(
        DatasetConfig(source="rows.jsonl", columns={"answer": "level", "level": "prompt"}, prompt_key="level"),
        folder=folder,
    )
    assert (swapped.known[3].text, swapped.known[3].columns) == ("p3", {"answer": 3})
