import doctest
import threading
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.rewards import math as math_rewards
from groupwise.rewards.math import boxed, last_number, math_match, number_match


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("it costs $1,250.50.", Fraction("1250.5")),
        ("x = -3/4", Fraction(-3, 4)),
        ("\u22125", -5),
        ("10-3=7", 7),
        ("10-3", 3),
        (".5 or -.25", Fraction("-0.25")),
        ("2e-3", Fraction("0.002")),
        ("42%", 42),
        ("7.", 7),
        ("1, 2, 3", 3),
        ("none", None),
        ("", None),
        ("1/0", None),
        ("9" * 101, None),
        ("1e999999999", 1),  # not ten to that power
    ],
)
def test_last_number(text, number):
    assert last_number(text) == number


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**9), max_value=10**9))
def test_written_numbers_are_read_back(value):
    assert last_number(f"the result is {value}") == Fraction(str(value))
    assert last_number(f"the result is {value:,}.") == Fraction(str(value))


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.text("0123456789.,-/eE+ a", max_size=30))
def test_any_text_has_a_last_number_or_none(text):
    number = last_number(text)
    assert number is None or isinstance(number, Fraction)


def test_number_match():
    texts = ["so 42", "41", "no number", "0.333333333"]
    assert number_match(texts, ["42", 42, "42", "1/3"]) == [1.0, 0.0, 0.0, 1.0]
    assert number_match([[{"role": "assistant", "content": "1,000"}]], ["#### 1000"]) == [1.0]
    assert number_match(["0.0000001", "0", "x"], ["0", "0", None]) == [0.0, 1.0, None]
    assert number_match(["101"], ["100"], tolerance=0.01) == [1.0]
    assert number_match(["<answer>5</answer> of 9", "5"], ["5", "5"], tag="answer") == [1.0, 0.0]


def test_an_expected_answer_without_a_number_is_an_error():
    with pytest.raises(ValueError, match="the answer 'Paris' holds no number"):
        number_match(["5"], ["Paris"])


def test_boxed():
    assert boxed(r"\boxed{\frac{1}{2}} and \boxed{3}") == "3"
    assert boxed(r"\boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert boxed(r"\fbox{4}") == "4"
    assert boxed(r"\boxed{unclosed") is None
    assert boxed("4") is None


@pytest.mark.parametrize(
    ("gold", "answer", "score"),
    [
        ("1/2", r"\frac12", 1.0),
        (r"\frac{1}{2}", "0.5", 1.0),
        ("1,234", "1234", 1.0),
        (7, "7", 1.0),
        ("We get 40 + 2.\n#### 42", "42", 1.0),
        (r"$\sqrt{2}$", "2^{1/2}", 1.0),
        (r"so \boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        (r"\{1,2\}", r"\{2,1\}", 1.0),
        (r"\frac{x^2}{y^2}", "x^2/y^2", 1.0),
        ("42", "43", 0.0),
        ("2", "2 or 3", 0.0),
        ("(1,2)", "(2,1)", 0.0),
        ("7", "", 0.0),
    ],
)
def test_math_match(gold, answer, score):
    assert math_match([rf"I think it is \boxed{{{answer}}}."], [gold]) == [score]


def test_math_match_and_the_box():
    assert math_match(["42", r"\boxed{1}, no: \boxed{42}", "x"], ["42", "42", None]) == [0.0, 1.0, None]
    assert math_match(["The answer is 42."], ["42"], require_box=False) == [1.0]


@pytest.mark.parametrize(
    "answer",
    ["10^{10^{10}}", "9^9^9^9", "9**9**9", "((99!)!)!", "2^{99999999}", "1+" * 2000 + "1", r"\frac{1}{" * 3000],
)
def test_answers_that_are_built_to_take_for_ever_are_wrong(answer, monkeypatch):
    import math_verify

    def refuse(*args, **kwargs):
        raise AssertionError("the answer went to sympy")

    gold = math_verify.parse(r"\boxed{7}")
    monkeypatch.setattr(math_rewards, "_parse_gold", lambda _: gold)
    monkeypatch.setattr(math_verify, "parse", refuse)
    assert math_match([rf"\boxed{{{answer}}}"], ["7"]) == [0.0]


def test_an_expected_answer_that_cannot_be_read_is_an_error():
    with pytest.raises(ValueError, match="math-verify cannot read the answer"):
        math_match([r"\boxed{1}"], [r"\frac{"])


def test_outside_the_main_thread_it_says_so():
    caught: list[Exception] = []

    def work():
        try:
            math_match([r"\boxed{1}"], ["1"])
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "main thread only" in str(caught[0])


def test_the_examples_in_the_docstrings():
    assert doctest.testmod(math_rewards).failed == 0 < doctest.testmod(math_rewards).attempted
