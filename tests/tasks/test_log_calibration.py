"""A judge is believed where it is right more often than chance, and seldom else; what it prefers is measured."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from groupwise.config.rewards import RewardConfig
from groupwise.errors import DataError, RewardError
from groupwise.rewards.call import RewardFunction
from groupwise.tasks.logs.calibration import (
    Graded,
    best_threshold,
    bias,
    by_chance,
    by_chance_within,
    calibrate,
    strata,
)
from groupwise.tasks.logs.judging import FILES, grade, read_scored
from wording import raises


def answers(
    seed: int, count: int, *, good: float = 0.5, seen: float = 0.5, called: float = 0.5, spread: float = 0.1
) -> list[Graded]:
    """Answers of which a share is good, and a judge that gives 1 to a share of good (`seen`) and of bad ones
    (`called`), and 0 else, with noise."""
    draws, found = random.Random(seed), list[Graded]()
    for _ in range(count):
        is_good = draws.random() < good
        high = draws.random() < (seen if is_good else called)
        key = f"{draws.getrandbits(128):032x}"
        found.append(
            Graded(key=key, good=is_good, grade=high + draws.uniform(-spread, spread), length=draws.randrange(99))
        )
    return found


def chances(count: int, share: float) -> list[float]:
    """The binomial distribution."""
    return [math.comb(count, k) * share**k * (1 - share) ** (count - k) for k in range(count + 1)]


@pytest.mark.parametrize(("good", "bad"), [(20, 20), (80, 12), (100, 100)])
def test_a_judge_by_chance_is_believed_in_one_of_twenty_cases_at_most(good: int, bad: int):
    """Not by simulation: over all numbers of right verdicts, each with its chance, whatever share it calls good."""
    believed = [[by_chance(k, good, m, bad) <= 0.05 for m in range(bad + 1)] for k in range(good + 1)]
    rates: list[float] = []
    for called in (0.05, 0.3, 0.5, 0.8, 0.95):
        of_good, of_bad = chances(good, called), chances(bad, 1 - called)
        rates.append(sum(of_good[k] * of_bad[m] for k in range(good + 1) for m in range(bad + 1) if believed[k][m]))
    assert max(rates) <= 0.05 and believed[good][bad]


def test_a_judge_that_knows_is_believed_and_its_threshold_lies_between():
    found = [calibrate(answers(seed, 200, good=0.7, seen=0.85, called=0.15)) for seed in range(3)]
    assert all(each is not None and each.believed and 0.05 < each.threshold < 0.95 for each in found)
    (first, *_) = found
    assert first is not None
    assert first.good_seen.low < 0.85 < first.good_seen.high and first.bad_seen.low < 0.85 < first.bad_seen.high
    assert first.p < 1e-6 and first.balanced > 0.75 and first.base_rate < first.agrees.value and first.needed == 0


def test_a_judge_with_a_constant_verdict_is_refused_however_many_answers_are_good():
    found = calibrate(answers(0, 400, good=0.9, seen=1.0, called=1.0, spread=0.0))
    assert found is not None and not found.believed and found.agrees.value == pytest.approx(found.base_rate)
    assert found.needed is None


def test_few_answers_are_refused_and_it_is_said_how_many_would_do():
    found = calibrate(answers(3, 24, seen=0.8, called=0.2))
    assert found is not None and not found.believed and found.needed is not None and found.needed > 24


def test_without_good_or_bad_answers_nothing_is_known():
    assert calibrate(answers(0, 50, good=1.0)) is None
    assert calibrate([]) is None


def test_the_threshold_is_the_best_one_and_in_the_middle_of_those_that_are_as_good():
    def graded(good: Sequence[float], bad: Sequence[float]) -> list[Graded]:
        return [
            Graded(key="", good=side, grade=each, length=1)
            for side, all_ in ((True, good), (False, bad))
            for each in all_
        ]

    assert best_threshold(graded([0.8, 0.9], [0.1, 0.2])) == pytest.approx(0.5)
    assert best_threshold(graded([0.5], [0.5])) in (-0.5, 0.5)
    assert best_threshold(graded([0.1], [0.9])) < 0.1


def test_a_preference_is_measured_among_answers_that_are_as_good():
    """Long answers are good more often here, which is no bias."""
    draws, fair, biased = random.Random(0), list[Graded](), list[Graded]()
    for number in range(600):
        long = number % 2 == 0
        good = draws.random() < (0.8 if long else 0.3)
        for found, more in ((fair, 0.0), (biased, 0.3 * long)):
            high = draws.random() < (0.6 if good else 0.2) + more
            found.append(Graded(key="", good=good, grade=float(high), length=200 if long else 20))
    none, some = (bias(each, 0.5, lambda one: one.length > 100) for each in (fair, biased))
    assert none is not None and some is not None
    assert not none.found and none.low < 0 < none.high
    assert some.found and some.low < 0.3 < some.high and some.of == 600
    assert bias(fair, 0.5, lambda one: True) is None


# ---- answers of one user ----
def of_users(seed: int, users: int, each: int, *, seen: float = 0.0, named: bool = True) -> list[Graded]:
    """Answers of users who are content to a different degree, and a judge that calls each user's good to another one,
    whatever is true; of a share it knows what is."""
    draws, found = random.Random(seed), list[Graded]()
    for user in range(users):
        content, called = draws.random(), draws.random()
        for _ in range(each):
            good = draws.random() < content
            high = good if draws.random() < seen else draws.random() < called
            key = f"{draws.getrandbits(128):032x}"
            found.append(Graded(key=key, good=good, grade=float(high), length=9, by=str(user) if named else None))
    return found


def test_a_judge_that_only_tells_users_apart_is_believed_as_seldom_as_one_by_chance():
    def believed(**how: Any) -> float:
        ps = [by_chance_within(strata(of_users(seed, 10, 20, **how), 0.5)) for seed in range(80)]
        return sum(p <= 0.05 for p in ps) / len(ps)

    assert believed() <= 0.05 + 2 * (0.05 * 0.95 / 80) ** 0.5
    assert believed(named=False) > 0.1, "as if each answer were another user's"
    assert believed(seen=0.4) > 0.9


def test_of_a_user_whose_answers_tell_nothing_by_themselves_one_counts():
    alike = [Graded(key=f"{at}", good=True, grade=1.0, length=9, by="ann") for at in range(30)]
    bob = [Graded(key=f"{at}", good=at < 3, grade=float(at < 2), length=9, by="bob") for at in range(8)]
    nobody = [Graded(key="x", good=False, grade=0.0, length=9)]
    assert strata([*alike, *bob, *nobody], 0.5) == [(1, 1, 1, 1), (2, 3, 5, 5)]
    assert by_chance_within([(2, 3, 5, 5)]) == pytest.approx(by_chance(2, 3, 5, 5))
    assert by_chance_within([(0, 0, 0, 0)]) == 1.0


# ---- a reward is asked ----
def reward(function: Callable[..., Any]) -> RewardFunction:
    return RewardFunction(name="judge", function=function, args={}, spec=RewardConfig(function="a:b"))


def scored(folder: Path, *rows: tuple[str, str, float, str | None]) -> Path:
    with (folder / "train_scored.jsonl").open("w") as file:
        for asked, said, score, model in rows:
            prompt, completion = (
                [{"role": role, "content": text}] for role, text in (("user", asked), ("assistant", said))
            )
            file.write(json.dumps({"prompt": prompt, "completion": completion, "score": score, "model": model}) + "\n")
    return folder


def test_answers_of_one_prompt_are_graded_together_and_in_both_orders(tmp_path: Path):
    """The place counts as much as the answer does, and the mean of both orders has nothing of it."""
    asked: list[list[str]] = []

    def places(completions, prompts, **columns):
        texts = [each[0]["content"] for each in completions]
        asked.append(texts)
        assert len(prompts) == len(texts) and prompts[0][0]["role"] == "user"
        return [len(text) + at for at, text in enumerate(texts)]

    folder = scored(
        tmp_path, ("A?", "a", 0.0, "m"), ("A?", "aaa", 1.0, None), ("A?", "half", 0.5, "m"), ("B?", "b", 1.0, "n")
    )
    graded, failed = grade(read_scored(folder), reward(places), model="m")
    assert sorted(asked) == [["a", "aaa"], ["aaa", "a"], ["b"]] and failed == 0
    assert [(each.grade, each.good, each.own, each.places) for each in graded] == [
        (1.5, False, True, (1.0, 2.0)),
        (3.5, True, False, (3.0, 4.0)),
        (1.0, True, False, None),
    ]
    assert graded[0].key == graded[1].key != graded[2].key


def test_a_separator_of_lines_in_an_answer_ends_no_line(tmp_path: Path):
    """An import writes U+2028 as it is."""
    row = {"prompt": [{"role": "user", "content": "A?"}], "completion": [{"role": "assistant", "content": "a\u2028b"}]}
    (tmp_path / FILES[0]).write_text(json.dumps({**row, "score": 1.0, "model": "m"}, ensure_ascii=False) + "\n")
    (prompt,) = read_scored(tmp_path)
    assert prompt.answers[0].message["content"] == "a\u2028b"


def test_the_bias_for_a_place_is_found(tmp_path: Path):
    rows = [(f"{n}?", text, score, None) for n in range(60) for text, score in (("no", 0.0), ("yes", 1.0))]
    prompts = read_scored(scored(tmp_path, *rows))
    fair = reward(lambda completions: [float(each[0]["content"] == "yes") for each in completions])
    last = reward(lambda completions: [float(at == len(completions) - 1) for at in range(len(completions))])
    (good, _), (place, _) = (grade(prompts, each, model=None) for each in (fair, last))
    found, lost = calibrate(good), calibrate(place)
    assert found is not None and found.believed and found.turned_verdicts == 0
    assert found.place_bias is not None and found.place_bias.value == 0.0 and found.own_bias is None
    assert lost is not None and not lost.believed and lost.place_bias is not None and lost.place_bias.value == -1.0


def test_a_judge_that_fails_is_no_judge(tmp_path: Path):
    prompts = read_scored(scored(tmp_path, *((f"{n}?", "x", float(n % 2), None) for n in range(10))))

    def fails(completions, prompts):
        return [None if prompts[0][0]["content"] in ("1?", "2?") else 0.5]

    graded, failed = grade(prompts, reward(fails), model=None)
    assert (len(graded), failed) == (8, 2)

    def raises_(completions):
        raise RuntimeError("the judge is out")

    with raises(RewardError):
        grade(prompts, reward(raises_), model=None)


def test_a_folder_without_scores_is_refused(tmp_path: Path):
    with raises(DataError, kind="empty"):
        read_scored(tmp_path)
    (tmp_path / "train_scored.jsonl").write_text('{"prompt": []}\n')
    with raises(DataError):
        read_scored(tmp_path)
