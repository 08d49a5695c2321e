"""Programs that are right, that are wrong, and that are wrong and try to pass, in every way that is known."""

from __future__ import annotations

import doctest
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.rewards import code, code_harness, sandbox
from groupwise.rewards.code import (
    BadTestCase,
    blocks_of,
    code_block_format,
    code_execution,
    no_syntax_error,
    program_of,
    same,
)
from groupwise.rewards.code_harness import decode, encode
from groupwise.rewards.sandbox import Isolation, SandboxError
from processes import descendants
from slow_cases import long_case
from wording import raises

DOUBLE = [{"input": 1, "output": 2}, {"input": 5, "expected": 10}, {"input": "ab", "output": "abab"}]
ASSERTS = ["assert solution(1) == 2", "assert solution(5) == 10", "assert solution('ab') == 'abab'"]
RIGHT = "def solution(x): return 2 * x"


def fenced(program: str) -> str:
    return f"Like this:\n```python\n{program}\n```\nThat is all."


def execute(*programs: str, cases=DOUBLE, **options) -> list[float | None]:
    options = {"require_isolation": False, "timeout_s": 30.0, **options}
    return code_execution([fenced(p) for p in programs], [cases] * len(programs), **options)


# ---- finding the program ----


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```py\nx = 1\n```\nor\n```Python\nx = 2\n```", "x = 2\n"),
        ("```python\nx = 1\n```\nOutput:\n```\n1\n```\n```bash\nls\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```bash\nls\n```", None),
        ("```python\n\n```", None),
        ("```python\nx = 1", "x = 1"),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),
        ("1. first\n   ```python\n   if x:\n       y\n   ```", "if x:\n    y\n"),
        ("~~~python\nx = 1\n~~~", "x = 1\n"),
        ("x = 1", "x = 1"),
        ("<think>x = 0</think>x = 1", "x = 1"),
        ("", None),
        ("  \n", None),
    ],
)
def test_the_program_is_found(text, program):
    assert program_of(text) == program


@settings(max_examples=200)
@given(st.text("`~py \nx", max_size=60))
def test_any_text_has_a_program_or_none(text):
    program = program_of(text)
    assert program is None or program.strip()


def test_a_long_text_of_fences_takes_no_time():
    began = time.process_time()
    blocks_of("```python\n" * 200_000)
    assert time.process_time() - began < 10


# ---- form ----


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (fenced(RIGHT), 1.0),
        (fenced(RIGHT) + "```bash\nls\n```", 1.0),
        (fenced(RIGHT) * 2, 0.0),  # stuffing
        ("```python\nx = 1", 0.0),
        ("```python\n```", 0.0),
        ("```\nx = 1\n```", 0.0),
        ("x = 1", 0.0),
        ("", 0.0),
    ],
)
def test_code_block_format(text, score):
    assert code_block_format([text]) == [score]


@pytest.mark.parametrize(
    ("program", "score"),
    [
        (RIGHT, 1.0),
        ("x = 1\nprint(x)", 1.0),
        ("import os", 1.0),
        ("print('\\d')", 1.0),  # a warning is no error
        ("def solution(x) return", 0.0),
        ("return 1", 0.0),  # parses, but cannot be compiled
        ("break", 0.0),
        ("42", 0.0),  # a word is a program, but not a try
        ("hello", 0.0),
        ("'''text'''", 0.0),
        ("# only a comment", 0.0),
        ("x = '\0'", 0.0),
        ("(" * 5000 + ")" * 5000, 0.0),
        ("x = 1\n" * 20_000, 0.0),  # longer than any answer
    ],
)
def test_no_syntax_error(program, score):
    assert no_syntax_error([fenced(program)]) == [score]


def test_both_read_chat_messages():
    chat = [{"role": "assistant", "content": fenced(RIGHT)}]
    assert code_block_format([chat]) == no_syntax_error([chat]) == [1.0]


# ---- running it ----


def test_each_row_has_its_own_test_cases():
    """Known hole: the whole column is tested instead of the row's cases."""
    texts = [fenced(RIGHT), fenced("def solution(x): return x + 1"), fenced(RIGHT)]
    cases = [[{"input": 2, "output": 4}], [{"input": 2, "output": 3}], [{"input": 2, "output": 3}]]
    assert code_execution(texts, cases, require_isolation=False) == [1.0, 1.0, 0.0]


def test_partial_credit():
    half = "def solution(x):\n    if x == 5: raise ValueError\n    return 2 * x"
    assert execute(RIGHT, half, "x = 1", partial=True) == [1.0, pytest.approx(2 / 3), 0.0]
    assert execute(half) == [0.0]
    assert execute(RIGHT, half, cases=ASSERTS, partial=True) == [1.0, pytest.approx(2 / 3)]


@pytest.mark.parametrize(
    "program",
    [
        "def solution(x) return 2 * x",
        "import no_such_module\ndef solution(x): return 2 * x",
        "raise SystemError\ndef solution(x): return 2 * x",
        "def answer(x): return 2 * x",
        "solution = 3",
        "",
    ],
)
@pytest.mark.parametrize("cases", [DOUBLE, ASSERTS], ids=["values", "asserts"])
def test_a_program_that_does_not_load_passes_nothing(program, cases):
    """Known hole: partial credit counts failed assertions, and a program that never runs has none."""
    assert execute(program, cases=cases, partial=True) == [0.0]


def test_no_test_cases_no_reward():
    assert execute(RIGHT, cases=None) == execute(RIGHT, cases=[]) == [None]
    assert code_execution([""], [DOUBLE], require_isolation=False) == [0.0]


def test_several_arguments_keywords_and_another_name():
    cases = [{"args": [2, 3], "output": 8}, {"args": [2], "kwargs": {"b": 4}, "output": 16}, {"input": 5, "output": 25}]
    assert execute("def power(a, b=2): return a ** b", cases=cases, entry="power") == [1.0]


def test_what_a_table_fills_in_is_not_there():
    """Arrow has every key of a column in each of its entries, null where there was none."""
    case = {"input": 2, "args": None, "kwargs": None, "output": 4, "expected": None}
    assert execute(RIGHT, cases=[case]) == [1.0]
    assert execute(RIGHT, cases=[{**case, "input": None, "args": [2]}]) == [1.0]
    assert execute("def solution(x): pass", cases=[{**case, "output": None}]) == [1.0]


def test_values_are_compared_as_test_data():
    program = "def solution(x): return {1: (1, 2.0000000001), 'b': [None, True]}"
    assert execute(program, cases=[{"input": 0, "output": {"1": [1, 2.0], "b": [None, True]}}]) == [1.0]
    assert execute(program, cases=[{"input": 0, "output": {"1": [1, 2.1], "b": [None, True]}}]) == [0.0]
    assert execute(program, cases=[{"input": 0, "output": {"1": [1, 2], "b": [None, True]}}]) == [0.0]
    numpy = "import numpy\ndef solution(x): return numpy.arange(x)"
    assert execute(numpy, cases=[{"input": 3, "output": [0, 1, 2]}]) == [1.0]


def test_scripts_that_read_and_print():
    cases = [{"input": "1 2\n", "output": "3"}, {"input": "4 5", "output": "9\n"}]
    right = "a, b = map(int, input().split())\nprint(a + b, ' ')"
    assert execute(right, "print(3)", cases=cases, form="stdin", partial=True) == [1.0, 0.5]
    assert execute(right + "\nraise SystemExit(1)", cases=cases, form="stdin") == [0.0]


@pytest.mark.parametrize("form", ["call", long_case("stdin")])
def test_what_hangs_fails_in_time_and_alone(form):
    cases = DOUBLE if form == "call" else [{"input": "2", "output": "4"}]
    right = RIGHT if form == "call" else "print(2 * int(input()))"
    began = time.monotonic()
    assert execute("while True: pass", right, cases=cases, form=form, timeout_s=3, parallel=2) == [0.0, 1.0]
    assert time.monotonic() - began < 120


def test_what_takes_too_much_fails():
    hog = "def solution(x): return len(' ' * (1 << 33)) and 2 * x"
    noisy = "def solution(x):\n    while True: print('x' * 1000)"
    large = "def solution(x): return 'x' * (1 << 22)"
    assert execute(hog, noisy, large, memory_mb=512) == [0.0, 0.0, 0.0]


# ---- faking it ----

FAKES = {
    "exits with success": "import sys; sys.exit(0)",
    "exits at once": "import os; os._exit(0)",
    "exits in the call": "import os\ndef solution(x): os._exit(0)",
    "is equal to everything": "class A:\n    def __eq__(self, other): return True\ndef solution(x): return A()",
    "is an int that is equal to everything": """
class A(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = int.__hash__
def solution(x): return A(7)""",
    "is a list that is equal to everything": """
class A(list):
    def __eq__(self, other): return True
    def __iter__(self): return iter([])
def solution(x): return A()""",
    "prints that it passed": "print('{\"passed\": true}\\n' * 100)\ndef solution(x): print('PASSED'); return None",
    "patches comparison": """
import builtins, operator, json, sys
operator.eq = lambda a, b: True
builtins.AssertionError = SystemExit
json.dumps = lambda *a, **k: '{"passed": true}'
json.loads = lambda *a, **k: {"passed": True}
def solution(x): return None""",
    "writes to every descriptor": """
import json, os
message = json.dumps({"passed": True, "value": 2, "id": "0" * 16}).encode()
for descriptor in range(3, 64):
    try: os.write(descriptor, len(message).to_bytes(8, "big") + message)
    except OSError: pass
def solution(x): return None""",
    "returns the harness's own words": "def solution(x): return {'passed': True, 'value': 2}",
    "raises what tests expect": "def solution(x): raise SystemExit(0)",
    "answers everything with one value": "def solution(x): return 2",
}


@pytest.mark.parametrize("program", FAKES.values(), ids=FAKES.keys())
@pytest.mark.parametrize("cases", [DOUBLE, ASSERTS], ids=["values", "asserts"])
def test_a_pass_cannot_be_faked(program, cases):
    assert execute(program, cases=cases, timeout_s=8.0) == [0.0]


# Tests that Python's own protocols would cut short, were the program's exception raised in them as it is.
PROTOCOLS = {
    "map": "for got, wanted in zip(map(solution, [1, 5]), [2, 10]):\n    assert got == wanted",
    "list of a map": "assert all(got == wanted for got, wanted in zip(list(map(solution, [1, 5])), [2, 10]))",
    "iter": "for got in iter(lambda: solution(1), 2):\n    assert False",
    "next": "assert next(map(solution, [1]), 2) == 2",
    "hasattr": "class A:\n    b = property(lambda self: solution(1))\nassert not hasattr(A(), 'b') or A().b == 2",
    "getattr": "class A:\n    b = property(lambda self: solution(1))\nassert getattr(A(), 'b', 2) == 2",
    "index": (
        "class A:\n    def __getitem__(self, i):\n        return solution(i)\n"
        "for i, got in enumerate(A()):\n    assert got == 2 * i\n    if i == 3: break"
    ),
    "missing key": (
        "class A(dict):\n    def __missing__(self, key):\n        return solution(key)\n"
        "assert A().get(1) or '{x}'.format_map(A()) == '{0}'.format(2 * 'x')"
    ),
    "caught": (
        "try:\n    got = list(map(solution, [1, 5]))\nexcept ValueError:\n    assert False\nassert got in ([2, 10], [])"
    ),
}
SIGNALS = ("StopIteration", "StopAsyncIteration", "GeneratorExit", "AttributeError", "IndexError", "KeyError")


@pytest.mark.parametrize("signal", [*SIGNALS, "SystemExit", "KeyboardInterrupt"])
def test_an_exception_of_the_program_ends_no_loop_of_the_tests(signal):
    tests = list(PROTOCOLS.values())
    plain, of_its_own = f"def solution(x): raise {signal}", f"class A({signal}): pass\ndef solution(x): raise A"
    assert execute(plain, of_its_own, cases=tests, partial=True) == [0.0, 0.0]


def test_the_same_tests_pass_a_program_that_is_right():
    assert execute("def solution(x): return 2 * x", cases=list(PROTOCOLS.values()), partial=True) == [1.0]


EXPECTS = "try:\n    solution(-1)\nexcept {}:\n    pass\nelse:\n    assert False"


@pytest.mark.parametrize(
    ("raised", "expected", "score"),
    [
        ("ValueError('x')", "ValueError", 1.0),
        ("ValueError('x')", "Exception as error:\n    assert str(error) == 'x'\nexcept TypeError", 1.0),
        ("ValueError('x')", "TypeError", 0.0),
        ("type('Own', (ValueError,), {})('x')", "ValueError", 1.0),  # Python would have caught it
        ("type('Own', (Exception,), {})('x')", "RuntimeError", 0.0),
        ("type('Own', (Exception,), {})('x')", "Exception", 1.0),
        ("AttributeError('x')", "AttributeError", 1.0),  # a test that names it expects it
        ("StopIteration", "StopIteration", 1.0),
        ("StopIteration", "Exception", 1.0),
        ("KeyboardInterrupt", "KeyboardInterrupt", 0.0),
        ("UnicodeDecodeError('utf-8', b'x', 0, 1, 'y')", "ValueError", 1.0),
    ],
)
def test_a_test_may_expect_an_exception(raised, expected, score):
    assert execute(f"def solution(x): raise {raised}", cases=[EXPECTS.format(expected)]) == [score]


def test_other_ways_to_expect_an_exception():
    raises = "from unittest import TestCase\nTestCase().assertRaises(ValueError, solution, -1)"
    inside = "import contextlib\nwith contextlib.suppress(ValueError):\n    solution(-1)\n    assert False"
    right = "def solution(x):\n    if x < 0: raise ValueError"
    assert execute(right, "def solution(x): return x", cases=[raises, inside], partial=True) == [1.0, 0.0]


@pytest.mark.parametrize(
    "program",
    [
        "def solution(x) return x",
        "raise ValueError",
        "def other(x): return x",
        "def solution(x): return object()",  # which is no plain data: a TypeError, but not the program's
        "def solution(x):\n    a = []\n    a.append(a)\n    return a",
    ],
)
def test_a_program_that_cannot_answer_does_not_raise_what_a_test_expects(program):
    assert execute(program, cases=[EXPECTS.format("BaseException"), EXPECTS.format("Exception")]) == [0.0]


@pytest.mark.parametrize("when", ["", "def solution(x): "], ids=["at once", "in the call"])
@pytest.mark.parametrize("cases", [DOUBLE, ASSERTS], ids=["values", "asserts"])
def test_a_program_that_kills_itself_is_wrong_and_not_lost(when, cases):
    if not sandbox.isolation().filtered:
        pytest.skip(f"no filter of system calls here: {sandbox.isolation().reason}")
    assert execute(f"import os\n{when}os.kill(os.getpid(), 9)", cases=cases) == [0.0]


def test_an_answer_that_is_none_does_not_spoil_the_next_test():
    forged = """
import os, sys
def solution(x):
    if x == 1:
        os.write(int(sys.argv[2]), (3).to_bytes(8, "big") + b"[[[")
    return 2 * x"""
    assert execute(forged, cases=ASSERTS, partial=True) == [pytest.approx(2 / 3)]


SEARCH = """
import gc, os, re
def solution(x):
    here = [folder for folder in os.scandir(os.getcwd()) if folder.is_dir() and not os.access(folder, os.W_OK)]
    walks = [walk for walk in os.walk(os.getcwd()) if not walk[0].startswith(tuple(f.path for f in here))]  # not Python
    places = [os.path.join(folder, name) for folder, _, names in walks for name in names]
    places += ["/proc/self/environ", "/proc/self/cmdline", "/proc/1/environ", "/proc/1/cmdline"]
    texts = [repr([each for each in gc.get_objects() if isinstance(each, (dict, list, tuple))]), repr(x)]
    for place in places:
        try:
            texts.append(open(place, errors="replace").read())
        except OSError:
            pass
    for line in open("/proc/self/maps"):
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if "rw" in line and end - start < 1 << 26:
            try:
                with open("/proc/self/mem", "rb", 0) as memory:
                    memory.seek(start)
                    texts.append(memory.read(end - start).decode("latin-1"))
            except OSError:
                pass
    found = re.search("the answer " + "is ([a-z]+)[.]", "".join(texts))
    return found and found[1]
"""


@pytest.mark.skipif(sys.platform != "linux", reason="searches /proc")
def test_the_expected_value_is_nowhere_in_the_programs_box():
    expected = {"input": "the answer is plover.", "output": "plover"}  # if it is there, it is found
    assert execute(SEARCH, cases=[expected]) == [1.0]
    assert execute(SEARCH, cases=[{"input": "", "output": "plover", "note": "the answer is plover."}]) == [0.0]
    assert execute(SEARCH, cases=["assert solution('') == 'plover'  # the answer is plover."]) == [0.0]


def test_what_is_sent_to_the_program_is_its_input(monkeypatch):
    sent: list[tuple[bool, str]] = []
    tell = code._Examiner._tell

    def recorded(self, box, message):
        sent.append((box is self._serving, json.dumps(message)))
        tell(self, box, message)

    monkeypatch.setattr(code._Examiner, "_tell", recorded)
    cases = [{"input": 11, "output": 777777777777777777}, "assert solution(12) != 888888888888888888"]
    assert execute("def solution(x): return 777777777777777777", cases=cases) == [1.0]
    to_program = " ".join(text for to_it, text in sent if to_it)
    assert "[11]" in to_program and "[12]" in to_program
    assert "777777777777777777" not in to_program and "888888888888888888" not in to_program


# ---- tests as code ----


def test_tests_in_the_manner_of_mbpp_and_humaneval():
    program = "def add(a, b): return a + b\ndef fail(x): raise ValueError('no ' + x)\ndef pair(x): return (x, {x})"
    tests = [
        "assert add(1, 2) == 3",
        "import math\nassert math.isclose(add(0.1, 0.2), 0.3)",
        "def check(candidate):\n    for i in range(5):\n        assert candidate(i, b=i) == 2 * i\ncheck(add)",
        "try:\n    fail('way')\n    assert False\nexcept ValueError as error:\n    assert str(error) == 'no way'",
        "assert pair('a') == ('a', {'a'}) and isinstance(pair('a'), tuple)",
        "assert [add(x, 1) for x in (1, 2)] == [2, 3]",
        "assert add([1], [2]) == [1, 2] and add(b'a', b'b') == b'ab' and add(1j, 1) == 1 + 1j",
    ]
    assert execute(program, cases=tests, partial=True) == [1.0]
    wrong = [test.replace("==", "!=") for test in tests if "==" in test]
    assert execute(program, cases=wrong, partial=True) == [0.0]


def test_what_is_no_plain_data_passes_no_test():
    program = "class Stack:\n    pass\ndef solution(x): return Stack()\ndef endless(x): yield x"
    assert execute(program, cases=["assert solution(1)", "assert endless(1)", "Stack()"], partial=True) == [0.0]


# ---- mistakes that are not the program's ----


@pytest.mark.parametrize(
    "test",
    [
        "assert len([1]) == 1",
        "assert isclose(solution(1), 2)",
        "assert Counter(solution('ab')) == Counter('ab')",
        "assert isclose(double(1), 2)",
        "assert solution(1) == math.floor(2.5)",
        "def check(candidate):\n    assert candidate(1) == other(2)\ncheck(solution)",
        "return solution(1)",
    ],
)
def test_a_test_names_nothing_that_only_the_program_could_define(test):
    with raises(BadTestCase):
        execute(RIGHT + "\ndef isclose(*_): return True\ndef Counter(_): return 1", cases=[test])


@pytest.mark.parametrize(
    "test",
    [
        "assert solution",
        "assert callable(solution) and solution != 3",
        "def check(candidate):\n    assert candidate(1) == 2\nsolution",
        "if False:\n    solution(1)",
        "assert False, solution",
        "import no_such_module\nassert solution(1) == 2",
        "assert solution(lambda: 1) == 2",
        "import os\nos._exit(0)\nsolution(1)",
    ],
)
def test_a_test_that_does_not_ask_the_program_is_a_mistake_of_the_dataset(test):
    with raises(BadTestCase):
        execute(RIGHT, cases=[test])


ADDS = fenced("def add(a, b): return a + b\ndef one(): return 1")
TWO = "assert add(one(), one()) == 2"


def test_a_row_can_say_what_its_program_defines():
    def scores(test, entry_point):
        return code_execution([ADDS], [[test]], [entry_point], require_isolation=False)

    assert scores(TWO, ["add", "one"]) == [1.0]
    assert scores("assert add(1, 1) == 2", "add") == scores({"args": [1, 1], "output": 2}, "add") == [1.0]


@pytest.mark.parametrize(
    ("test", "entry_point"),
    [(TWO, None), (TWO, "add"), (TWO, "other"), (TWO, 3), ({"args": [1, 1], "output": 2}, ["add", "one"])],
    ids=["none", "one of two", "another", "no name", "two for a call of one"],
)
def test_a_row_that_does_not_say_what_its_program_defines(test, entry_point):
    with raises(BadTestCase):
        code_execution([ADDS], [[test]], [entry_point], require_isolation=False)


def test_names_that_a_test_defines_are_its_own():
    program = RIGHT + "\ndef isclose(*_): return True\nab = c = d = e = f = g = h = k = Error = lambda *_: 0"
    tests = [
        "from math import *\nassert isclose(solution(1), 3)",
        "ab, (c, *d) = 1, (2, 3)\nassert solution(ab) == c + sum(d) - 2",
        "def f(e, *g, h=1, **k):\n    global z\n    z = e\n    return [e for e in g] or (c := h)\n"
        "assert solution(f(1)) < z",
        "import math as m\nfor i in range(3):\n    assert m.isclose(solution(i), i + 1)",
        "class A:\n    x = 1\n    def y(self): return self.x\nassert solution(A().y()) == 1",
        "try:\n    solution(None)\nexcept TypeError as error:\n    assert not error.args",
    ]
    assert execute(program, cases=tests, partial=True) == [0.0]


@pytest.mark.parametrize(
    "cases",
    [
        "assert 1",
        [{"input": 1}],
        [{"output": 1}],
        [3],
        [{"input": 1, "output": 2, "expected": 3}],
        ["assert (1"],
        [{"input": object(), "output": 1}],
    ],
)
def test_test_cases_that_are_none_are_a_mistake_of_the_dataset(cases):
    with raises(ValueError):
        execute(RIGHT, cases=cases)


# ---- what is nobody's mistake ----


@contextmanager
def killed_from_outside(*names: str) -> Iterator[None]:
    """SIGKILL for the first process that has these arguments, and descends from this one."""
    done = threading.Event()

    def kill() -> None:
        while not done.wait(0.01):
            for pid in descendants(os.getpid()):
                with suppress(OSError):
                    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                    if {*names} <= {*arguments}:
                        os.kill(pid, signal.SIGKILL)
                        return

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


SLOW = "import time\ntime.sleep(1)\n"
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")


@ON_LINUX
@pytest.mark.parametrize(
    ("names", "options"),
    [
        (("harness.py", "serve"), {"cases": DOUBLE}),
        (("harness.py", "serve"), {"cases": ASSERTS}),
        (("harness.py", "check"), {"cases": ["import time; time.sleep(1)\nassert solution(1) == 2"]}),
        (("main.py",), {"cases": [{"input": "", "output": "2"}], "form": "stdin"}),
    ],
    ids=["serve", "serve, asserts", "check", "stdin"],
)
def test_a_program_that_was_killed_from_outside_is_not_wrong(names, options, caplog):
    right = SLOW + ("print(2)" if options.get("form") else RIGHT)
    with killed_from_outside(*names):
        lost, scored = execute(right, right, parallel=1, **options)
    assert lost is not None and math.isnan(lost) and scored == 1.0
    assert "1 of 2 programs could not be scored: a program was killed from outside of its box" in caplog.text
    with killed_from_outside(*names), raises(SandboxError):
        execute(right, **options)


@ON_LINUX
def test_a_keeper_that_was_killed_is_not_the_programs_mistake():
    with killed_from_outside(str(sandbox.KEEPER)), raises(SandboxError):
        execute(SLOW + RIGHT)


def test_a_program_that_only_falls_silent_is_wrong(monkeypatch):
    monkeypatch.setattr(code, "_DYING_S", 0.5)
    silent = (
        "import os, time\nfor descriptor in range(3, 64):\n    try: os.close(descriptor)\n    except OSError: pass\n"
    )
    assert execute(silent + "time.sleep(60)\n" + RIGHT, timeout_s=20.0) == [0.0]


def test_scripts_take_text():
    with raises(ValueError):
        execute(RIGHT, cases=[{"input": 1, "output": "2"}], form="stdin")
    with raises(ValueError):
        execute(RIGHT, form="shell")


def test_without_isolation_it_refuses_unless_told_otherwise(monkeypatch):
    monkeypatch.setattr(sandbox, "isolation", lambda: Isolation(namespaces=False, own_user=False, reason="not today"))
    with raises(SandboxError):
        code_execution([fenced(RIGHT)], [DOUBLE])
    assert execute(RIGHT) == [1.0]
    fakes = [FAKES["exits at once"], FAKES["is equal to everything"], FAKES["writes to every descriptor"]]
    assert execute(*fakes, cases=ASSERTS, timeout_s=8.0) == [0.0] * 3


def test_a_dataset_of_this_machine_is_out_of_reach(tmp_path):
    if not sandbox.isolation().namespaces:
        pytest.skip(f"no namespaces here: {sandbox.isolation().reason}")
    answers = tmp_path / "answers.txt"
    answers.write_text("42")
    program = f"def solution(x): return int(open({str(answers)!r}).read())"
    assert execute(program, cases=[{"input": 0, "output": 42}]) == [0.0]
    assert os.path.exists(answers)


# ---- plain data ----

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        | st.frozensets(st.integers() | st.frozensets(st.booleans()), max_size=3)
        | st.sets(st.integers(), max_size=3)
    ),
    max_leaves=10,
)


@settings(max_examples=150)
@given(PLAIN)
def test_plain_data_come_back_as_they_were(value):
    back = decode(json.loads(json.dumps(encode(value))))
    assert back == value and type(back) is type(value)
    assert same(back, value, tolerance=0)


ALIKE = [number * (2**61 - 1) for number in range(100)]  # which have one hash: thousands of them take minutes in a set


@pytest.mark.parametrize(
    "junk",
    [
        *({"no": 1}, {}, {"tuple": 3}, {"bytes": "x"}, {"a": 1, "b": 2}, {"set": [[1]]}),
        *({"set": ALIKE}, {"frozenset": ALIKE}, {"dict": [[number, 0] for number in ALIKE]}),
    ],
)
def test_junk_is_refused(junk):
    with pytest.raises((ValueError, TypeError)):
        decode(junk)


@pytest.mark.parametrize(
    ("got", "expected", "tolerance", "equal"),
    [
        (0.1 + 0.2, 0.3, 1e-9, True),
        (0.31, 0.3, 1e-9, False),
        (1e20 + 1e5, 1e20, 1e-9, True),
        (math.nan, math.nan, 0, True),
        (math.inf, math.inf, 0, True),
        (math.inf, 1.0, 1, False),
        (5.0, math.inf, 1e-9, False),  # every tolerance of infinity is infinite
        (-math.inf, math.inf, 1e-9, False),
        (10**400, 1.0, 1, False),
        (10**400, math.inf, 1, False),
        # integers: exactly, whichever way they are written
        (3, 3.0, 0, True),
        (3.0, 3, 0, True),
        (2, 2.0000000001, 1e-9, True),  # a float was expected
        (2.0000000001, 2, 1e-9, False),
        (101.0, 100, 0.5, False),
        (12345678901234567.0, 12345678901234567, 1e-9, False),
        (12345678901234568, 12345678901234567, 1e-9, False),
        (12345678901234567, 12345678901234567, 0, True),
        # true and false are no numbers
        (True, 1, 1e-9, False),
        (1, True, 1e-9, False),
        (1.0, True, 1e-9, False),
        (False, 0.0, 1e-9, False),
        (True, True, 0, True),
        ([True, 0], [1, False], 1, False),
        ({True}, {1}, 0, False),
        ({(1, False)}, {(1, 0)}, 0, False),
        ({1.0, 2}, {1, 2.0}, 0, True),
        ({True: "a"}, {1: "a"}, 0, False),
        # a tolerance is for each float, and for floats only
        ([1.0, 1.0], [1.05, 1.0], 0.1, True),
        ([1.0, 1.0], [1.05, 1.5], 0.1, False),
        ([1.4, 2.4], [1, 2], 0.5, False),
        ([1.0], [1.0, 0.0], 1, False),
        ({"a": [1.1]}, {"a": [1.0]}, 0.5, True),
        (1 + 1e-12j, 1 + 0j, 1e-9, True),
        (1 + 1j, 1 + 0j, 1e-9, False),
        ("3", 3, 1, False),
        (None, 0, 1, False),
        (b"a", "a", 1, False),
        # keys, which JSON has as text
        ({1: "a"}, {"1": "a"}, 0, True),
        ({1.0: "a"}, {1: "a"}, 0, True),
        ({None: 1, False: 2}, {"null": 1, "false": 2}, 0, True),
        ({1: "wrong", "1": "a"}, {"1": "a"}, 0, False),
        ({"1": "a", 1: "wrong"}, {"1": "a"}, 0, False),
        ({1: "a"}, {1: "a", "1": "b"}, 0, False),
        ({1: "a", "1": "b"}, {1: "a", "1": "b"}, 0, True),
        ({1: "a", "1": "b"}, {1: "b", "1": "a"}, 0, False),
        ({'{"tuple": [1, 2]}': 0}, {(1, 2): 0}, 0, False),
        ({(1, 2): 0}, {(1, 2): 0}, 0, True),
    ],
)
def test_values_are_the_same(got, expected, tolerance, equal):
    assert same(got, expected, tolerance=tolerance) is equal


def test_what_is_not_the_same_is_not_paid():
    """From end to end, through the box and its channel."""
    cases = [{"input": 0, "output": 1}, {"input": 0, "output": 12345678901234567}, {"input": 0, "output": {"1": 2}}]
    wrong = ["True", "12345678901234567.0", "{1: 3, '1': 2}"]
    right = ["1.0", "12345678901234567", "{1: 2}"]
    for case, bad, good in zip(cases, wrong, right, strict=True):
        programs = [f"def solution(x): return {value}" for value in (bad, good)]
        assert execute(*programs, cases=[case]) == [0.0, 1.0]


def test_doctests():
    assert doctest.testmod(code).failed == doctest.testmod(code_harness).failed == 0
