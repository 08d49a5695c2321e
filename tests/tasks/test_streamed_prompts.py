"""Sets that are read while they are drawn: the same rows, in an order of the seed, resumed exactly, held by nobody."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from pydantic import ValidationError

from groupwise.config.data import DataConfig, DatasetConfig
from groupwise.errors import DataError
from groupwise.tasks.prompts import open_prompts
from groupwise.tasks.streamed_prompts import KNOWN, StreamedPrompts
from prompt_streams import take
from wording import raises


def write(path: Path, count: int, name: str = "row") -> str:
    path.write_text("".join(json.dumps({"prompt": f"{name}-{i}"}) + "\n" for i in range(count)))
    return path.name


def stream(folder: Path, *, seed: int = 0, **data: object) -> StreamedPrompts:
    config = DataConfig.model_validate({"streaming": True, **data})
    source = open_prompts(config, folder=folder, seed=seed)
    assert isinstance(source, StreamedPrompts)
    return source


def texts(source: StreamedPrompts, count: int) -> list[str]:
    return [str(prompt.text) for prompt in take(source, count)]


def test_every_pass_has_every_row_in_an_order_of_its_own(tmp_path):
    write(tmp_path / "rows.jsonl", 50)
    source = stream(tmp_path, source="rows.jsonl", shuffle_buffer=8)
    first, second = texts(source, 50), texts(source, 50)
    rows = {f"row-{i}" for i in range(50)}
    assert set(first) == set(second) == rows and first != second
    assert texts(stream(tmp_path, source="rows.jsonl", shuffle_buffer=8), 50) == first
    assert texts(stream(tmp_path, source="rows.jsonl", shuffle_buffer=8, seed=1), 50) != first
    assert [int(text[4:]) for text in first] != sorted(int(text[4:]) for text in first)
    assert source.metrics() == {"data/passes": 1.0}


def test_without_shuffling_rows_come_in_order(tmp_path):
    write(tmp_path / "rows.jsonl", 3)
    assert texts(stream(tmp_path, source="rows.jsonl", shuffle=False), 7) == [f"row-{i % 3}" for i in range(7)]


def test_a_buffer_as_large_as_the_set_shuffles_all_of_it(tmp_path):
    """The first row that is drawn may be any: over 400 seeds each of 10 comes 40 times, give or take 4 deviations."""
    write(tmp_path / "rows.jsonl", 10)
    first = Counter(texts(stream(tmp_path, source="rows.jsonl", seed=seed), 1)[0] for seed in range(400))
    assert len(first) == 10 and all(abs(count - 40) < 4 * 6 for count in first.values())


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ""])
def test_tables_and_datasets_stream_as_files_of_lines_do(tmp_path, suffix):
    import datasets

    table = datasets.Dataset.from_list([{"prompt": f"row-{i}", "n": i} for i in range(30)])
    path = tmp_path / f"rows{suffix}"
    {".csv": table.to_csv, ".parquet": table.to_parquet, "": table.save_to_disk}[suffix](str(path))
    source = stream(tmp_path, source=path.name, shuffle=False)
    assert [(prompt.text, prompt.columns["n"]) for prompt in take(source, 31)] == [
        *((f"row-{i}", i) for i in range(30)),
        ("row-0", 0),
    ]


def test_a_hugging_face_dataset_is_asked_to_stream(tmp_path):
    write(tmp_path / "rows.jsonl", 4)
    args = {"data_files": str(tmp_path / "rows.jsonl")}
    source = stream(tmp_path, source="json", args=args, shuffle=False)
    assert texts(source, 5) == ["row-0", "row-1", "row-2", "row-3", "row-0"]


def test_a_function_is_asked_anew_for_each_pass(tmp_path):
    (tmp_path / "my_rows.py").write_text("def rows(): return ({'prompt': f'row-{i}'} for i in range(2))\n")
    assert texts(stream(tmp_path, source="my_rows:rows", shuffle=False), 4) == ["row-0", "row-1"] * 2


# ---- going on after a stop ----


@pytest.mark.parametrize("buffer", [2, 7, 1000])
@pytest.mark.parametrize("stop", [0, 1, 5, 29, 30, 31, 64, 1100])
def test_a_restored_stream_goes_on_exactly(tmp_path, buffer, stop):
    write(tmp_path / "many.jsonl", 30, "many")
    write(tmp_path / "few.jsonl", 3, "few")
    sources = [{"source": "many.jsonl", "weight": 2}, {"source": "few.jsonl", "weight": 1}]
    options = {"sources": sources, "shuffle_buffer": buffer}
    expected = texts(stream(tmp_path, **options), stop + 60)
    first = stream(tmp_path, **options)
    assert texts(first, stop) == expected[:stop]
    restored = stream(tmp_path, **options)
    restored.restore(json.loads(json.dumps(first.cursor)))
    assert texts(restored, 60) == expected[stop:]
    assert restored.epochs == pytest.approx(stream_after(tmp_path, options, stop + 60))


def stream_after(folder: Path, options: dict, count: int) -> float:
    source = stream(folder, **options)
    take(source, count)
    return source.epochs


def test_what_was_on_its_way_comes_first_whatever_pass_it_is_of(tmp_path):
    write(tmp_path / "rows.jsonl", 6)
    source = stream(tmp_path, source="rows.jsonl", shuffle_buffer=3)
    early = source.issue(2)
    assert len(texts(source, 16)) == 16
    late = source.issue(3)
    source.resolve(late[1].ticket)
    rest = stream(tmp_path, source="rows.jsonl", shuffle_buffer=3)
    rest.restore(json.loads(json.dumps(source.cursor)))
    again = rest.issue(4)
    assert [each.prompt for each in again] == [each.prompt for each in (*early, late[0], late[2])]
    assert [each.ticket for each in again] == [each.ticket for each in (*early, late[0], late[2])]
    assert all(each.again for each in again)
    assert texts(rest, 12) == texts(source, 12)


def test_a_stream_of_images_is_restored(tmp_path):
    """As `datasets` gives them: objects, which another process has at another address."""
    (tmp_path / "my_rows.py").write_text(
        "from PIL import Image\n"
        "kept = []\n"
        "def rows():\n"
        "    for n in range(6):\n"
        "        kept.append(Image.new('RGB', (4, 4), (n, 0, 0)))\n"
        "        yield {'prompt': f'row-{n}', 'image': kept[-1]}\n"
    )
    source = stream(tmp_path, source="my_rows:rows", shuffle_buffer=3)
    take(source, 4)
    rest = stream(tmp_path, source="my_rows:rows", shuffle_buffer=3)
    rest.restore(json.loads(json.dumps(source.cursor)))
    assert [each.messages for each in take(rest, 8)] == [each.messages for each in take(source, 8)]


def test_a_set_that_has_changed_is_said(tmp_path):
    write(tmp_path / "rows.jsonl", 20)
    source = stream(tmp_path, source="rows.jsonl", shuffle_buffer=4)
    assert "row-0" in texts(source, 15)
    path = tmp_path / "rows.jsonl"
    path.write_text(path.read_text().replace('"row-19"', '"mended"'))  # too far on to have been drawn
    stream(tmp_path, source="rows.jsonl", shuffle_buffer=4).restore(source.cursor)
    path.write_text(path.read_text().replace('"row-0"', '"mended"'))
    with pytest.raises(DataError) as caught:
        stream(tmp_path, source="rows.jsonl", shuffle_buffer=4).restore(source.cursor)
    assert "rows.jsonl" in caught.value.message


@pytest.mark.parametrize(
    "cursor",
    [
        {},
        {"epoch": 0, "position": 9999, "unresolved": [], "sources": [[0, 0, None]]},
        {"epoch": -1, "position": 0, "unresolved": [], "sources": [[0, 0, None]]},
        {"epoch": 0, "position": 1, "unresolved": [[0, 1]], "sources": [[0, 0, None]]},
        {"epoch": 0, "position": 2, "unresolved": [[0, 1], [0, 1]], "sources": [[0, 0, None]]},
        {"epoch": 0, "position": 0, "rows": 20, "unresolved": []},
        {"epoch": 0, "position": 0, "unresolved": [], "sources": []},
        {"epoch": 0, "position": 3, "unresolved": [[0, 0]], "sources": [[1, 2, None]]},
    ],
)
def test_what_is_no_cursor_is_refused(tmp_path, cursor):
    write(tmp_path / "rows.jsonl", 20)
    with raises(DataError):
        stream(tmp_path, source="rows.jsonl").restore(cursor)


def test_a_stream_that_cannot_be_restored_stays_where_it_is(tmp_path):
    write(tmp_path / "rows.jsonl", 20)
    source, other = stream(tmp_path, source="rows.jsonl"), stream(tmp_path, source="rows.jsonl")
    assert texts(source, 3) == texts(other, 3)
    for last in (None, ["rows.jsonl:9", "00"]):
        begun = [[1, 2, None]] if last is None else [[0, 0, last]]
        with pytest.raises(DataError):
            source.restore({"epoch": 0, "position": 3, "unresolved": [[0, 0]], "sources": begun})
    assert source.cursor == other.cursor and texts(source, 30) == texts(other, 30)


def test_a_ticket_is_resolved_once(tmp_path):
    write(tmp_path / "rows.jsonl", 3)
    source = stream(tmp_path, source="rows.jsonl")
    [issued] = source.issue(1)
    assert source.prompt(issued.prompt.id) == issued.prompt
    source.resolve(issued.ticket)
    with raises(ValueError):
        source.resolve(issued.ticket)
    with raises(DataError):
        source.prompt(issued.prompt.id)


# ---- what is looked at beforehand, and what is refused ----


def test_the_first_rows_are_checked_before_and_the_others_when_they_are_drawn(tmp_path):
    write(tmp_path / "rows.jsonl", KNOWN + 5)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"question": "x"}\n')
    source = stream(tmp_path, source="rows.jsonl", shuffle=False)
    assert len(source.known) == KNOWN
    assert (source.counts[0].rows, source.counts[0].whole) == (KNOWN, False)
    take(source, KNOWN + 5)
    with pytest.raises(DataError, match=rf"rows\.jsonl:{KNOWN + 6}"):
        source.issue(1)
    (tmp_path / "bad.jsonl").write_text('{"prompt": "x"}\n{"question": "y"}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl:2"):
        stream(tmp_path, source="bad.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    with raises(DataError):
        stream(tmp_path, source="empty.jsonl")


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"source": "a.jsonl", "sample": 5}, ("sample",)),
        ({"source": "a.json"}, ("source",)),
        ({"source": "a.jsonl", "split": "train[:10%]"}, ("split",)),
        ({"source": "a.jsonl", "split": "train[-5:]"}, ("split",)),
        ({"source": "org/set", "split": "train[:5]"}, ("split",)),
        ({"source": "a.jsonl", "curriculum": {"weight": True}}, ("curriculum",)),
        ({"source": "a.jsonl", "shuffle": False, "shuffle_buffer": 5}, ("shuffle_buffer",)),
        ({"source": "a.jsonl", "streaming": False, "shuffle_buffer": 5}, ("shuffle_buffer",)),
        ({"sources": [{"source": "a.jsonl"}, {"source": "b.jsonl"}]}, ("sources",)),
        (
            {"sources": [{"source": "a.json", "weight": 1}, {"source": "b.jsonl", "weight": 1}]},
            ("sources", 0, "source"),
        ),
    ],
)
def test_what_needs_all_rows_is_refused(data, field):
    with pytest.raises(ValidationError) as caught:
        DataConfig.model_validate({"streaming": True, **data})
    assert caught.value.errors()[0]["loc"] == field


def test_an_evaluation_holds_what_it_reads_so_that_it_needs_a_limit(tmp_path):
    (tmp_path / "my_rows.py").write_text(
        "import itertools\ndef rows(): return ({'prompt': str(i)} for i in itertools.count())\n"
    )
    with pytest.raises(ValidationError) as caught:
        DatasetConfig(source="my_rows:rows", streaming=True)
    assert caught.value.errors()[0]["loc"] == ("limit",)
    prompts = open_prompts(DatasetConfig(source="my_rows:rows", streaming=True, limit=3), folder=tmp_path).known
    assert [prompt.text for prompt in prompts] == ["0", "1", "2"]


# ---- memory ----

PEAK = """
import resource, sys
from groupwise.config.data import DataConfig
from groupwise.tasks.prompts import open_prompts

source = open_prompts(DataConfig(source=sys.argv[1], streaming=True, shuffle_buffer=500), seed=1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(int(sys.argv[2])):
    [issued] = source.issue(1)
    source.resolve(issued.ticket)
print(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.long
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_memory_does_not_grow_with_the_set(tmp_path, suffix):
    """Two passes over 32 MB and over 3 MB in processes of their own: the peak rises by the buffer, not by the set."""
    rose = {}
    for count in (1_500, 16_000):
        path = tmp_path / f"{count}{suffix}"
        write_long(path, count)
        said = subprocess.run(
            [sys.executable, "-c", PEAK, str(path), str(2 * count)],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        before, after = map(int, said.stdout.split())
        rose[count] = after - before
    assert rose[16_000] < rose[1_500] + 12_000, rose  # KiB; the larger set has 32 MB


def write_long(path: Path, count: int) -> None:
    """Rows of 2 kB, none of which can be kept in the place of another."""
    rows = ({"prompt": f"{i} " * (2000 // (len(str(i)) + 1))} for i in range(count))
    if path.suffix == ".jsonl":
        with path.open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        return
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path, row_group_size=1000)
