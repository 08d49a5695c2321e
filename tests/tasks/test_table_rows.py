"""Rows of tables: what stands in a CSV file, and what a column format pads with nulls."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from groupwise.config.data import DataConfig
from groupwise.tasks import tables
from groupwise.tasks.prompts import open_prompts
from groupwise.tasks.tables import _Written, csv_rows, row_of


def answers(path: Path, text: str) -> list[Any]:
    path.write_text("prompt,answer\n" + "".join(f"q,{cell}\n" for cell in text.split("|")), encoding="utf-8")
    return [row["answer"] for row in csv_rows(path)]


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ("007|012", ["007", "012"]),
        ("11:30|12:45", ["11:30", "12:45"]),
        ("2024-05-01 10:00|2024-05-02 11:00", ["2024-05-01 10:00", "2024-05-02 11:00"]),
        ("10000000000000000000001|5", [10**22 + 1, 5]),
        ("1.10|2.50", ["1.10", "2.50"]),
        ("5|-7", [5, -7]),
        ("2.5|0.1", [2.5, 0.1]),
        ("5|", [5, None]),
        ("yes|", ["yes", ""]),
        ("true|false", ["true", "false"]),
        ("nan|1.5", ["nan", "1.5"]),
        ("1e5|2", ["1e5", "2"]),
        ("1_000|2", ["1_000", "2"]),
        ('"a, ""b"""|"two\nlines"', ['a, "b"', "two\nlines"]),
    ],
)
def test_a_cell_is_what_stands_in_the_file(tmp_path: Path, cells: str, expected: list[Any]) -> None:
    found = answers(tmp_path / "rows.csv", cells)
    assert found == expected and list(map(type, found)) == list(map(type, expected))


def test_types_are_looked_for_once_and_again_in_a_file_that_was_written_anew(tmp_path, monkeypatch):
    """A stream goes through its file in every pass."""
    parts, gone_through = tables._csv_parts, list[Path]()

    def counted(path: Path) -> Any:
        gone_through.append(path)
        return parts(path)

    monkeypatch.setattr(tables, "_csv_parts", counted)
    path = tmp_path / "rows.csv"
    assert answers(path, "5|7") == [5, 7] and len(gone_through) == 2
    assert [row["answer"] for row in csv_rows(path)] == [5, 7] and len(gone_through) == 3
    assert answers(path, "007|5") == ["007", "5"] and len(gone_through) == 5


@given(st.lists(st.text(max_size=6), min_size=1, max_size=6), st.integers(0, 6))
def test_no_cell_loses_anything(cells: list[str], cut: int) -> None:
    column = _Written()
    parts = [cells[:cut], cells[cut:]]
    for part in parts:
        column.see(part)
    values = [value for part in parts for value in column.typed(part)]
    assert [str(value) if value is not None else "" for value in values] == cells


def test_the_type_of_a_column_is_that_of_all_of_the_file(tmp_path: Path) -> None:
    path, rows = tmp_path / "rows.csv", 150_000  # several of the parts in which Arrow reads a file
    path.write_text("id,last\n" + "".join(f"{n},{n}\n" for n in range(rows)) + "x,1\n", encoding="utf-8")
    first, *_, end = csv_rows(path)
    assert first == {"id": "0", "last": 0} and end == {"id": "x", "last": 1}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


def asked(name: str, properties: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
    messages = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "ok", "tool_call_id": "c1"},
        {"role": "user", "content": "And?"},
    ]
    return {"prompt": messages, "tools": [tool(name, **properties)], "answer": "5"}


ROWS = [
    asked("weather", {"city": {"type": "string"}}, {"city": "Oslo"}),
    asked("add", {"a": {"type": "integer"}, "b": {"type": "integer"}}, {"a": 1, "b": 2}),
]


def seen(source: Path) -> list[tuple[Any, Any]]:
    """Of each prompt its tool's properties and its call's arguments."""
    found = []
    for prompt in open_prompts(DataConfig(source=str(source), shuffle=False)).known:
        assert prompt.tools is not None and prompt.messages is not None
        arguments = prompt.messages[1]["tool_calls"][0]["function"]["arguments"]
        given = json.loads(arguments) if isinstance(arguments, str) else arguments
        found.append((prompt.tools[0]["function"]["parameters"]["properties"], given))
    return found


EXPECTED = [
    ({"city": {"type": "string"}}, {"city": "Oslo"}),
    ({"a": {"type": "integer"}, "b": {"type": "integer"}}, {"a": 1, "b": 2}),
]


def test_tools_and_calls_have_their_own_keys(tmp_path: Path) -> None:
    dataset = Dataset.from_list(ROWS)
    dataset.to_parquet(str(tmp_path / "rows.parquet"))
    dataset.save_to_disk(str(tmp_path / "saved"))
    assert seen(tmp_path / "rows.parquet") == seen(tmp_path / "saved") == EXPECTED


def test_a_null_that_an_author_wrote_stays(tmp_path: Path) -> None:
    written = [asked("weather", {"city": {"type": "string", "default": None}}, {"city": None})]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, written)), encoding="utf-8")
    assert seen(path) == [({"city": {"type": "string", "default": None}}, {"city": None})]


def test_decimals_and_times_are_text(tmp_path: Path) -> None:
    row = {
        "prompt": "q",
        "price": Decimal("1.10"),
        "at": datetime.time(11, 30),
        "day": datetime.date(2024, 5, 1),
        "nested": {"when": datetime.datetime(2024, 5, 1, 10), "none": None},
        "missing": None,
        "list": [None, 1],
    }
    table = pyarrow.Table.from_pylist([row])
    (found,) = map(row_of, table.to_pylist())
    assert found["price"] == "1.10" and found["at"] == "11:30:00" and found["day"] == "2024-05-01"
    assert (
        found["nested"] == {"when": "2024-05-01 10:00:00"} and found["missing"] is None and found["list"] == [None, 1]
    )
