"""The words of refusals: what is written is read again, and a test whose error is another one fails."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest

import wording
from groupwise.errors import ConfigError, DataError

FILES = {
    "test_a.py": {"test_x[a b]": ["one", "two\n\n  - three\n# four\n  -> five"], "test_y": ["[invalid_config, a] b"]},
    "test_b.py": {"test_z": ["plain", "-"]},
}


def test_what_is_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wording, "TESTS", tmp_path)
    (tmp_path / "room").mkdir()
    wording._write("room", FILES)
    assert wording._read((tmp_path / "room" / "wording.txt").read_text()) == FILES


def test_another_error_or_another_fact_fails() -> None:
    with pytest.raises(DataError), wording.raises(ConfigError, words=False):
        raise DataError("no row")
    with pytest.raises(AssertionError), wording.raises(ConfigError, field="a", words=False):
        raise ConfigError("wrong", field="b")
    with wording.raises(ConfigError, field="b", words=False) as caught:
        raise ConfigError("wrong", field="b")
    assert caught.value.message == "wrong" and caught.type is ConfigError


@pytest.mark.skipif(wording.WRITES or not hypothesis.settings().derandomize, reason="words are not compared")
def test_other_words_fail() -> None:
    with pytest.raises(pytest.fail.Exception):
        wording.wording("words that no file has")


@pytest.mark.parametrize("said", ["/home/me/.venv/lib/python3.11/site-packages/x.py", "127.0.0.1:8123", "3.25 seconds"])
def test_what_differs_from_run_to_run_has_a_name(said: str) -> None:
    text = said
    for pattern, name in wording.PLACES:
        text = pattern.sub(name, text)
    assert text in ("SITE/x.py", "HOST", "N seconds")
