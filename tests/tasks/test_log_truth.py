"""Verified answers: what of a file can be used, what is held apart, and what they say of a log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from groupwise.errors import ConfigError, DataError
from groupwise.store.masking import PERSONAL, SECRETS, Masking
from groupwise.tasks.logs.learnable import NUMBERS, SHORT
from groupwise.tasks.logs.truth import (
    Truth,
    Verified,
    apart,
    asked_again,
    audit,
    checked,
    comparing,
    read_truth,
    to_verify,
)
from wording import raises

MASKING = Masking({}, rules=(*SECRETS, *PERSONAL))


def question(number: int, said: str = "") -> list[Any]:
    return [{"role": "user", "content": f"What is {number} plus {3 * number}{said}?"}]


def truth_of(folder: Path, *rows: dict[str, Any]) -> Truth:
    path = folder / "truth.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return read_truth(path, masking=MASKING, alike=0.8)


def test_rows_that_say_the_same_count_once_and_empty_ones_not_at_all(tmp_path: Path) -> None:
    long = "my parcel with the two blue lamps has not arrived in Lyon and the shop does not answer"
    found = truth_of(
        tmp_path,
        {"prompt": "2 + 2?", "answer": 4},
        {"prompt": "2 + 2?", "answer": " 4 "},
        {"prompt": long, "answer": "refund"},
        {"prompt": f"{long} now", "answer": "refund"},
        {"prompt": "3 + 3?", "answer": ""},
        {"prompt": "4 + 4?"},
    )
    assert [(each.row["prompt"], each.answer) for each in found.verified] == [
        ([{"role": "user", "content": "2 + 2?"}], "4"),
        ([{"role": "user", "content": long}], "refund"),
    ]
    assert (found.rows, found.unfilled, found.twice) == (6, 2, 2)


def test_prompts_are_asked_as_they_are_and_compared_as_a_log_has_them(tmp_path: Path) -> None:
    (only,) = truth_of(tmp_path, {"prompt": "I am bob@example.com: 2 + 2?", "answer": "4"}).verified
    assert only.row["prompt"][0]["content"] == "I am bob@example.com: 2 + 2?"
    assert only.messages[0]["content"] == "I am [email]: 2 + 2?"  # pyright: ignore[reportTypedDictNotRequiredAccess]


@pytest.mark.parametrize(
    "rows",
    [
        [{"prompt": "2 + 2?", "answer": "4"}, {"prompt": "2 + 2?", "answer": "5"}],
        [{"prompt": "2 + 2?", "right": "4"}],
        [{"prompt": "2 + 2?", "answer": ""}],
        [{"prompt": "2 + 2?", "answer": ["4"]}],
        [{"question": "2 + 2?", "answer": "4"}],
        [],
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    with raises(DataError):
        truth_of(tmp_path, *rows)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for name in ("absent.jsonl", "absent.txt"):
        with raises(ConfigError, field="--truth"):
            read_truth(tmp_path / name, masking=MASKING, alike=0.8)


def test_the_rule_is_that_of_the_log_or_what_the_answers_allow(tmp_path: Path) -> None:
    numbers = truth_of(tmp_path, {"prompt": "2 + 2?", "answer": "4"}).verified
    words = truth_of(tmp_path, {"prompt": "Open?", "answer": "yes"}).verified
    assert comparing(numbers, None) == comparing(numbers, NUMBERS) == NUMBERS
    assert comparing(numbers, SHORT) == comparing([*numbers, *words], "my:judge") == SHORT
    with raises(DataError, field="--truth"):
        comparing(words, NUMBERS)
    with raises(DataError, field="--truth"):
        comparing(
            truth_of(tmp_path, {"prompt": "Why?", "answer": "because it is so, as everybody knows"}).verified, None
        )


def test_what_is_like_a_verified_prompt_is_not_trained_on() -> None:
    rows = [{"prompt": question(number)} for number in range(10, 20)]
    kept, out = apart(rows, [question(12), [{"role": "system", "content": "Add."}, *question(15)]], alike=0.8)
    assert [rows.index(each) for each in out] == [2, 5] and len(kept) == 8
    assert apart(rows, [], alike=0.8) == (rows, [])


def logged(wrong: set[int], size: int, said: dict[int, str] | None = None) -> tuple[Truth, list[dict[str, Any]]]:
    asked = [question(number, (said or {}).get(number, "")) for number in range(size)]
    verified = [Verified({"prompt": each}, tuple(each), str(4 * number)) for number, each in enumerate(asked)]
    rows = [{"prompt": each, "answer": str(4 * number + (number in wrong))} for number, each in enumerate(asked)]
    return Truth(verified=verified, rows=size, unfilled=0, twice=0), rows


@pytest.mark.parametrize(
    ("size", "wrong", "passed"), [(8, 0, False), (9, 0, True), (30, 4, True), (30, 10, False), (60, 11, True)]
)
def test_a_log_passes_where_surely_fewer_than_three_in_ten_are_wrong(size: int, wrong: int, passed: bool) -> None:
    truth, rows = logged(set(range(size - wrong, size)), size)
    found = audit(truth.verified, rows, [], reward=NUMBERS)
    assert (found.checked, found.wrong, found.passed) == (size, wrong, passed)


def test_only_what_taught_counts_and_what_was_held_out_tells_of_a_phrase() -> None:
    said: dict[int, str] = dict.fromkeys((3, 13, 23, 33), ", as the manager said")
    truth, rows = logged({3, 13, 23, 33}, 40, said)
    found = audit(truth.verified, rows[:20], rows[20:], reward=NUMBERS)
    assert (found.checked, found.wrong) == (20, 2)
    assert found.alike == "the manager said" and not found.passed
    truth, rows = logged({3, 13, 23, 33}, 40)  # as many mistakes that have nothing in common
    assert audit(truth.verified, rows[:20], rows[20:], reward=NUMBERS).passed


def test_what_is_to_be_verified_says_nothing_of_what_others_said() -> None:
    row = {"prompt": question(2), "answer": "9", "logged": "9", "score": 1.0, "tools": [{"type": "function"}]}
    assert to_verify([row]) == [{"prompt": question(2), "tools": [{"type": "function"}], "answer": ""}]


def test_what_is_not_sure_is_asked_again_of_other_prompts() -> None:
    """Five of sixty are wrong, and two of these have a phrase that only one more has: it may be chance."""
    said: dict[int, str] = dict.fromkeys((3, 13, 23), ", as the manager said")
    truth, rows = logged({3, 13, 31, 41, 51}, 60, said)
    found = audit(truth.verified, rows[:30], rows[30:], reward=NUMBERS)
    assert found.alike is None and found.perhaps == ("the manager said",) and len(found.texts) == 60

    def fresh(wrong: int, of: int) -> bool:
        asked, logs = logged(set(range(wrong)), of, dict.fromkeys(range(of), ", as the manager said"))
        return asked_again(found, "the manager said", checked(asked.verified, logs, reward=NUMBERS))

    assert [fresh(*each) for each in ((2, 2), (3, 4), (1, 4), (0, 4), (0, 0))] == [True, True, False, False, False]
