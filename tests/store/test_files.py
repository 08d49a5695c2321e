"""Directories that are written whole, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from groupwise.store import files


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("there", [False, True])
def test_a_folder_is_filled_whether_it_is_there_or_not(tmp_path: Path, there: bool) -> None:
    target = tmp_path / "parent" / "new"
    if there:
        target.mkdir(parents=True)
    before = target.stat().st_ino if there else None
    with files.filling(target) as folder:
        (folder / "inside").mkdir()
        (folder / "inside" / "a").write_text("1")
        (folder / "b").write_text("2")
    assert names(target) == ["b", "inside"] and names(target.parent) == ["new"]
    assert (target / "inside" / "a").read_text() == "1" and target.stat().st_mode & 0o777 == folder_mode(tmp_path)
    assert before in (None, target.stat().st_ino)  # a shell that stands in it still does


def folder_mode(beside: Path) -> int:
    (beside / "mode").mkdir()
    return (beside / "mode").stat().st_mode & 0o777


def test_what_cannot_come_in_whole_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "there"
    target.mkdir()

    def fill() -> None:
        with files.filling(target) as folder:
            (folder / "a").write_text("1")
            (folder / "b").write_text("2")
            (target / "b").mkdir()  # of somebody else, meanwhile

    with pytest.raises(IsADirectoryError):
        fill()
    assert names(target) == ["b"] and names(tmp_path) == ["there"]


def test_a_block_that_raises_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), files.filling(tmp_path / "new") as folder:
        (folder / "a").write_text(str(1 // 0))
    assert names(tmp_path) == []
