"""A peer is imported by who reads a name of it, and not by a plugin that looks at a test file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from peers import peer


def test_it_is_imported_when_a_name_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_peer_of_this_test.py").write_text("NUMBER = 7\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    made = peer("a_peer_of_this_test")
    assert not hasattr(made, "__test__") and not hasattr(made, "_mock_name")
    assert "a_peer_of_this_test" not in sys.modules
    assert made.NUMBER == 7
    monkeypatch.delitem(sys.modules, "a_peer_of_this_test")


def test_without_its_package_a_file_is_skipped() -> None:
    with pytest.raises(pytest.skip.Exception):
        peer("no_such_package.inside")
