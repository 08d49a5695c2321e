"""tools/release.py: what keeps a release back is found in the texts, and the repository is ready for its first."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import release

TEXTS = {
    "project": '[project]\nname = "groupwise"\nversion = "0.2.0"\n',
    "package": '__version__ = "0.2.0"\n',
    "changelog": "# Changelog\n\n## Unreleased\n\n## 0.2.0 - not released\n\n- New.\n\n## 0.1.0 - 2026-12-01\n",
    "readme": "[a](https://x.y/z) and\n```\n[b](c)\n```\n",
}


def test_nothing_keeps_back_what_is_ready() -> None:
    assert release.complaints(**TEXTS) == []


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        ("package", "0.2.0", "0.1.0"),
        ("changelog", "0.2.0 - not released", "0.3.0 - not released"),
        ("changelog", "0.2.0 - not released", "0.2.0 - 2027-01-01"),
        ("changelog", "## Unreleased\n", "## Unreleased\n\n- Also new.\n"),
        ("readme", "https://x.y/z", "docs/z.md"),
    ],
)
def test_each_thing_that_is_not_is_said(text: str, old: str, new: str) -> None:
    changed = TEXTS[text].replace(old, new)
    assert changed != TEXTS[text]
    assert len(release.complaints(**{**TEXTS, text: changed})) == 1


def test_the_day_is_written_into_the_heading_and_nowhere_else() -> None:
    dated = release.dated(TEXTS["changelog"], version="0.2.0", day="2027-01-02")
    assert dated == TEXTS["changelog"].replace("## 0.2.0 - not released", "## 0.2.0 - 2027-01-02")
    assert len(release.complaints(**{**TEXTS, "changelog": dated})) == 1
    assert release.complaints(**{**TEXTS, "changelog": dated}, tagged=True) == []
    assert len(release.complaints(**TEXTS, tagged=True)) == 1


def test_the_wheel_must_have_what_is_no_python() -> None:
    assert release.missing([*release.IN_THE_WHEEL, "groupwise/types.py"]) == []
    assert release.missing([name for name in release.IN_THE_WHEEL if "py.typed" not in name]) == ["groupwise/py.typed"]
    source = Path(__file__).parents[2] / "src"
    assert [name for name in release.IN_THE_WHEEL if not (source / name).exists()] == []


def test_the_repository_is_ready_but_for_entries_that_are_still_unreleased() -> None:
    found = release.complaints(**{text: release.read(text) for text in release.TEXTS})
    assert [each for each in found if "Unreleased" not in each] == []
    assert len(release.pictures(release.read("readme"))) == 2
