import contextlib
import doctest
import math
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.rewards import math as math_rewards
from groupwise.rewards.math import boxed, equation_match, final_answer, final_number, math_match, number_match
from wording import raises

# ---- number_match ----


def test_number_match():
    texts = ["so 42", "41", "no number", "0.3333333333"]
    assert number_match(texts, ["42", 42, "42", "1/3"]) == [1.0, 0.0, 0.0, 1.0]
    assert number_match([[{"role": "assistant", "content": "1,000"}]], ["#### 1000"]) == [1.0]
    assert number_match(["x", "5"], [None, " "]) == [None, None]
    assert number_match(["<answer>5</answer> of 9", "5"], ["5", "5"], tag="answer") == [1.0, 0.0]
    assert number_match(["<think>6</think> 5", "<think>5</think> six"], ["5", "5"], after="</think>") == [1.0, 0.0]
    assert number_match([r"\boxed{5} (of 9)", "5"], ["5", "5"], box=True) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("said", "gold", "score"),
    [
        ("$42", "42", 1),
        ("42 dollars", "$42", 1),
        ("€42", "$42", 0),
        ("42%", "42", 1),
        ("42%", "0.42", 1),
        ("0.42", "42%", 1),
        ("42", "42%", 1),
        ("4200%", "42%", 0),
        ("1/2", "0.5", 1),
        (r"\frac12", "0.5", 1),
        ("1 1/2", "1.5", 1),
        ("1e3 m", "1 km", 1),
        ("1e3 m", "1000", 1),
        ("1 km", "1000", 0),  # compared as it stands
        ("1000", "1 km", 0),
        ("1", "1 km", 1),
        ("5 m", "5 km", 0),
        ("5 kg", "5 km", 0),
        ("5 potatoes", "5 km", 1),  # no unit that is known
        ("1,234", "1234", 1),
        ("1234.0", "1,234", 1),
        (r"1{,}234", "1234", 1),
        ("90 min", "1 h 30 min", 1),
        ("\u22125", "-5", 1),
        ("5", "-5", 0),
        ("٤٢", "42", 0),
        ("４２", "42", 0),
        ("42²", "42", 0),
        ("1e999999999", "1", 0),
        ("nan", "42", 0),
        ("inf", "42", 0),
        ("", "42", 0),
        ("41 or 42 or 43", "42", 0),
    ],
)
def test_how_numbers_are_written(said, gold, score):
    assert number_match([said], [gold]) == [score]


def test_units_can_be_required_or_ignored():
    said = ["5 km", "5000 m", "5", "5 m"]
    assert number_match(said, ["5 km"] * 4) == [1, 1, 1, 0]
    assert number_match(said, ["5 km"] * 4, unit="required") == [1, 1, 0, 0]
    assert number_match(said, ["5 km"] * 4, unit="ignored") == [1, 0, 1, 1]
    assert number_match(["5"], ["5"], unit="required") == [1]


def test_tolerances():
    assert number_match(["101", "102"], ["100"] * 2, tolerance=0.01) == [1.0, 0.0]
    assert number_match(["-101"], ["-100"], tolerance=0.01) == [1.0]
    assert number_match(["42.00001", "42.0001"], ["42"] * 2) == [1.0, 0.0]
    assert number_match(["42.0"], ["42"], tolerance=0) == [1.0]
    with raises(ValueError):
        number_match(["1"], ["1"], tolerance=-1.0)


def test_zero_is_met_closely_and_small_numbers_are_not_zero():
    assert number_match(["0", "0.000000001", "0.0001", "1", ""], ["0"] * 5) == [1, 1, 0, 0, 0]
    assert number_match(["0", "1.6e-19"], ["1.6e-19"] * 2) == [0, 1]
    assert number_match(["0.0001"], ["0"], zero_tolerance=0.001) == [1]


def test_an_expected_answer_without_a_number_is_an_error():
    with raises(ValueError):
        number_match(["5"], ["Paris"])


@settings(max_examples=60)
@given(st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6))
def test_only_the_same_number_is_right(said, gold):
    assert number_match([f"it is {said:,}"], [str(gold)], tolerance=0) == [float(said == gold)]


# ---- math_match ----


def test_boxed():
    assert boxed(r"\boxed{\frac{1}{2}} and \boxed{3}") == "3"
    assert boxed(r"\boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert boxed(r"\fbox {4}") == "4"
    assert boxed(r"\boxed{unclosed") is None
    assert boxed(r"\boxed{1} \boxed{unclosed") is None
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
        ("42", r"\$42", 1.0),
        ("42", r"42\%", 1.0),
        ("0.42", r"42\%", 1.0),
        ("42", r"42\text{ m}", 1.0),
        ("42", "43", 0.0),
        ("(1,2)", "(2,1)", 0.0),
        ("0", "0.0000001", 0.0),
        ("7", "", 0.0),
    ],
)
def test_math_match(gold, answer, score):
    assert math_match([rf"I think it is \boxed{{{answer}}}."], [gold]) == [score]


@pytest.mark.parametrize(
    "answer",
    [
        "2 or 3",
        "1, 2, 3",
        r"x=1, x=2, x=3",
        r"x \in \{2, 3\}",
        "[0, 100]",
        r"2 \pm 1",
        "x",
        "x = x",
        "x < 3",
        "f(2)",
        "2!+0!+0!",
        "1/0",
        r"\infty",
        r"\text{2 or 3}",
        "٢",
        "２",
    ],
)
def test_an_answer_that_hedges_is_wrong(answer):
    assert math_match([rf"\boxed{{{answer}}}"], ["2"]) == [0.0]


def test_math_match_and_the_box():
    texts = ["42", r"\boxed{1}, no: \boxed{42}", r"\boxed{42}, no: \boxed{1}", "x", ""]
    assert math_match(texts, ["42", "42", "42", None, ""]) == [0.0, 1.0, 0.0, None, None]
    assert math_match(["The answer is 42."], ["42"], require_box=False) == [1.0]
    assert math_match([r"<think>\boxed{42}</think> \boxed{41}"], ["42"], after="</think>") == [0.0]
    tagged = [r"<answer>\frac{84}{2}</answer>", "42"]
    assert math_match(tagged, ["42"] * 2, tag="answer", require_box=False) == [1.0, 0.0]


@pytest.mark.parametrize(
    "answer",
    [
        "10^{10^{10}}",
        "9^9^9^9",
        "9**9**9",
        "((99!)!)!",
        "999999!",
        "2^{99999999}",
        "1+" * 2000 + "1",
        r"\frac{1}{" * 3000,
    ],
    ids=lambda answer: answer[:12],
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
    with raises(ValueError):
        math_match([r"\boxed{1}"], [r"\frac{"])


# ---- the time limit ----


@pytest.fixture
def slow(monkeypatch) -> None:
    """math-verify takes for ever on what holds a 13, in loops that swallow every Exception, as sympy's do, and in
    destructors, which swallow everything."""
    import math_verify

    real = math_verify.verify

    class Grave:
        def __del__(self):
            sum(range(10_000))

    def verify(gold, target, **options):
        while "13" in str(target):
            with contextlib.suppress(Exception):
                Grave()
                sum(range(10_000))
        return real(gold, target, **options)

    monkeypatch.setattr(math_verify, "verify", verify)
    monkeypatch.setattr(math_rewards, "_TIME_LIMIT_S", 0.2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # where a destructor swallowed it
def test_an_answer_that_takes_too_long_is_a_failure_and_costs_only_itself(slow):
    scores = math_match([r"\boxed{42}", r"\boxed{13}", r"\boxed{41}"], ["42"] * 3)
    assert (scores[0], scores[2]) == (1.0, 0.0) and math.isnan(scores[1])
    assert signal.getsignal(signal.SIGVTALRM) is signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_waiting_is_not_counted():
    with math_rewards._deadline(0.05):
        time.sleep(0.3)


def test_timers_of_others_are_left_alone(slow):
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    try:
        signal.setitimer(signal.ITIMER_REAL, 30.0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 30.0)
        assert math_match([r"\boxed{42}"], ["42"]) == [1.0]
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 20 and signal.getitimer(signal.ITIMER_VIRTUAL)[0] > 20
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_it_works_outside_the_main_thread_and_says_nothing():
    scores: list[float | None] = []
    thread = threading.Thread(target=lambda: scores.extend(math_match([r"\boxed{1/2}"], ["0.5"])))
    thread.start()
    thread.join()
    assert scores == [1.0]


def test_long_texts_take_linear_time():
    start = time.process_time()
    for text in (r"\boxed{" * 30_000, "}" * 200_000 + r"\boxed{1}", r"\boxed{1}" * 30_000, "{" * 200_000):
        boxed(text)
    assert number_match(["42 " * 100_000], ["42"]) == [1.0]
    assert math_match([r"\boxed{42}" * 20_000], ["42"]) == [1.0]
    assert time.process_time() - start < 8


def test_the_module_is_cheap_to_import():
    code = "import sys, groupwise.rewards.math; assert not {'sympy', 'math_verify', 'torch'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_the_examples_in_the_docstrings():
    assert doctest.testmod(math_rewards).failed == 0 < doctest.testmod(math_rewards).attempted


# ---- equation_match ----


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ("<answer>44 + 19 + 35</answer>", 1.0),
        ("<answer>(19 + 35) + 44 = 98</answer>", 1.0),
        ("<answer>35*2 + 28</answer>", 0.0),  # numbers of its own
        ("<answer>98</answer>", 0.0),
        ("<answer>44 + 19 + 35 + 44 - 44</answer>", 0.0),  # one of them three times
        ("<answer>44 + 54</answer>", 0.0),
        ("<answer>44 + 19 + 35 = 99</answer>", 0.0),
        ("44 + 19 + 35", 0.0),
        ("<answer>44 + 19 + 35; 1</answer>", 0.0),
        ("<answer>__import__('os')</answer>", 0.0),
        ("<answer>44 / (19 - 19) + 35</answer>", 0.0),
        ("<answer>9 ** 9 ** 9 ** 9</answer>", 0.0),
        ("<answer>" + "(" * 300 + "44" + ")" * 300 + "</answer>", 0.0),
        ("<answer></answer>", 0.0),
    ],
)
def test_an_equation_of_the_given_numbers(said, score):
    assert equation_match([said], [98], [[44, 19, 35]]) == [score]


def test_equations_are_exact_and_rows_without_a_target_are_none():
    assert equation_match(["<answer>-(1 - 8 / 3) * 3</answer>"], [5], [[1, 8, 3, 3]]) == [1.0]
    assert equation_match(["<answer>1 / 3</answer>", "x"], [0.3333333333333333, None], [[1, 3], [1]]) == [0.0, None]
    assert equation_match(["7 × 6"], [42], tag=None) == [1.0]


# ---- what votes in maj@k ----


@pytest.mark.parametrize(
    ("text", "answer", "number"),
    [
        ("5", "5", "5"),
        (" five\n", "five", None),
        ("<think>\\boxed{4} or 6?</think> It is \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}", "1/2"),
        ("<answer>7</answer> no, <answer> 8 </answer>", "8", "8"),
        ("2 + 3 = 5\n#### 1,000", "1,000", "1000"),
        ("#### 1000.0", "1000.0", "1000"),
        ("that makes 2 km", "that makes 2 km", "2000 length"),
        ("</think>", None, None),
        ("", None, None),
    ],
)
def test_the_answer_that_a_completion_ends_with(text, answer, number):
    assert (final_answer(text), final_number(text)) == (answer, number)
