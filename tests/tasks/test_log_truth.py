"""Verified answers: what of a file can be used, what is held apart, and what they say of a log."""

from __future__ import annotations

import json
import random
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
    audit,
    comparing,
    concentrated,
    covering,
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


def test_words_are_told_where_they_are_more_than_chance() -> None:
    texts = [f"take {n}{' please' * (n % 10 == 0)}" for n in range(40)]
    assert concentrated(texts, [n % 10 == 0 for n in range(40)]) == "please"
    assert concentrated(texts, [n == 0 for n in range(40)]) is None  # one is no pattern
    assert concentrated(texts, [n % 2 == 0 for n in range(40)]) is None  # half are wrong, please or not
    assert concentrated([], []) is None


def test_what_is_to_be_verified_says_nothing_of_what_others_said() -> None:
    row = {"prompt": question(2), "answer": "9", "logged": "9", "score": 1.0, "tools": [{"type": "function"}]}
    assert to_verify([row]) == [{"prompt": question(2), "tools": [{"type": "function"}], "answer": ""}]


def test_what_is_drawn_to_be_verified_has_each_phrase_that_enough_prompts_have() -> None:
    texts = [f"how far is place {at} from here{', as the manager said' if at % 20 == 0 else ''}" for at in range(240)]
    for seed in range(20):
        places = covering(texts, 30, draw=random.Random(seed))
        assert len(set(places)) == 30
        assert sum("manager" in texts[place] for place in places) >= 3, "by chance alone 1.5 of 30"
    assert {place for seed in range(60) for place in covering(texts, 30, draw=random.Random(seed))} == set(range(240))


def test_what_is_drawn_to_be_verified_is_mostly_drawn_by_chance() -> None:
    """Forty phrases cannot all be among twenty prompts: half of these are drawn for them."""
    texts = [f"{chr(97 + at % 26)}{at % 20} {chr(97 + at % 26)}{at % 24} tell me number {at}" for at in range(480)]
    places = covering(texts, 20, draw=random.Random(1))
    assert len(set(places)) == 20 and covering(texts, 1000, draw=random.Random(1)) != sorted(range(480))
    assert covering([], 5, draw=random.Random(1)) == [] and covering(["a b"], 0, draw=random.Random(1)) == []
