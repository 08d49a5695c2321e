"""Wordle, and names sorted over several turns."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

from groupwise.errors import DataError
from groupwise.tasks import word_games
from groupwise.tasks.env import StepResult
from groupwise.tasks.word_games import AlphabetSort, Wordle, feedback
from wording import raises


def say(env: Wordle | AlphabetSort, text: str) -> StepResult:
    return env.step({"role": "assistant", "content": text})


def test_the_colours_of_a_guess():
    assert doctest.testmod(word_games).failed == 0
    assert [feedback(guess, "abbey") for guess in ("abbey", "babes", "kebab", "vivid")] == [
        "GGGGG",
        "YYGGX",
        "XYGYY",
        "XXXXX",
    ]


def test_a_word_that_is_found_is_worth_1():
    env = Wordle()
    assert "six" not in env.reset({"word": "crane"}, 0)
    heard = say(env, "<think>vowels?</think><guess>[TRACE]</guess>")
    assert heard.messages[0]["content"] == "T R A C E\nX G G Y G\n5 guesses left." and not heard.done
    end = say(env, "crane")
    assert (end.reward, end.done, end.info) == (1.0, True, {"solved": 1.0, "guesses": 2})


def test_the_last_guess_leaves_what_the_best_one_had():
    env = Wordle(guesses=3)
    env.reset({"word": "crane"}, 0)
    say(env, "<guess>trace</guess>")
    assert "no word of five letters" in say(env, "I do not know").messages[0]["content"]
    end = say(env, "<guess>zzzzz</guess>")
    assert end.done and end.reward == pytest.approx(0.5 * 3.5 / 5)


def test_words_of_ones_own_are_checked(tmp_path: Path):
    (tmp_path / "mine.txt").write_text("crane\n\nslate\n")
    env = Wordle("mine.txt", folder=str(tmp_path))
    assert [each["word"] for each in (*env.cases(), *env.eval_cases())] == ["slate", "crane"]
    (tmp_path / "mine.txt").write_text("crane\nslates\n")
    with raises(DataError):
        Wordle("mine.txt", folder=str(tmp_path))
    with raises(DataError):
        Wordle("yours.txt", folder=str(tmp_path))


def test_lists_that_are_right_are_worth_1_in_all():
    env = AlphabetSort()
    told, so_far, reward = env.reset({"number": 1}, 0), [], 0.0
    while True:
        so_far += told.split(":\n")[1].split("\nLater")[0].splitlines()
        result = say(env, "<sorted>\n" + "\n".join(sorted(so_far, key=str.casefold)) + "\n</sorted>")
        reward += result.reward or 0.0
        assert result.info == {"exact": 1.0}
        if result.done:
            break
        told = str(result.messages[0]["content"])
    assert reward == pytest.approx(1.0)


def test_lists_that_are_wrong_are_worth_less_and_floods_nothing():
    env = AlphabetSort()
    told = env.reset({"number": 2}, 0)
    names = told.split(":\n")[1].split("\nLater")[0].splitlines()
    backwards = say(env, "\n".join(sorted(names, reverse=True))).reward
    assert backwards is not None and 0 < backwards < 0.2
    assert say(env, "\n".join(names * 20)).reward == 0.0


def test_held_out_cases_are_others():
    for env, key in ((Wordle(), "word"), (AlphabetSort(), "number")):
        trained, held_out = ({case[key] for case in cases} for cases in (env.cases(), env.eval_cases()))
        assert trained and held_out and not trained & held_out
