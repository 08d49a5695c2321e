"""What was read of a file is read again when it is another one, and not before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from groupwise.store.unchanged import Unchanged


class Reader:
    def __init__(self, path: Path):
        self.path, self.known, self.reads = path, Unchanged[str](), 0

    def get(self) -> str:
        return self.known.get(str(self.path), self._read)

    def _read(self) -> str:
        self.reads += 1
        return self.path.read_text()


@pytest.fixture
def reader(tmp_path) -> Reader:
    (tmp_path / "file").write_text("one")
    os.utime(tmp_path / "file", (1, 1))
    return Reader(tmp_path / "file")


def test_a_file_is_read_once(reader):
    assert [reader.get() for _ in range(3)] == ["one"] * 3 and reader.reads == 1


@pytest.mark.parametrize("how", ["another file", "another size", "another time"])
def test_a_file_that_changed_is_read_again(reader, how):
    reader.get()
    if how == "another file":
        (other := reader.path.with_name("other")).write_text("two")
        os.utime(other, (1, 1))
        os.replace(other, reader.path)
    else:
        reader.path.write_text("three" if how == "another size" else "two")
        os.utime(reader.path, (1, 1) if how == "another size" else (2, 2))
    assert reader.get() != "one" and reader.reads == 2


def test_a_file_that_has_just_changed_may_change_in_the_same_tick(reader):
    os.utime(reader.path)
    assert [reader.get() for _ in range(2)] == ["one"] * 2 and reader.reads == 2


def test_a_file_that_is_gone_is_not_known_any_more(reader):
    reader.get()
    reader.path.unlink()
    with pytest.raises(FileNotFoundError):
        reader.get()
    reader.path.write_text("one")
    os.utime(reader.path, (1, 1))
    assert reader.get() == "one" and reader.reads == 2


def test_what_is_forgotten_is_read_again(reader):
    reader.get()
    reader.known.forget(str(reader.path))
    assert reader.get() == "one" and reader.reads == 2
