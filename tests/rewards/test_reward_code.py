"""Programs that are right, that are wrong, and that are wrong and try to pass, in every way that is known."""

from __future__ import annotations

import doctest
import json
import math
import os
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise import sandbox
from groupwise.rewards import code, code_harness
from groupwise.rewards.code import blocks_of, code_block_format, code_execution, no_syntax_error, program_of, same
from groupwise.rewards.code_harness import decode, encode
from groupwise.sandbox import Isolation, SandboxError

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


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.text("`~py \nx", max_size=60))
def test_any_text_has_a_program_or_none(text):
    program = program_of(text)
    assert program is None or program.strip()


def test_a_long_text_of_fences_takes_no_time():
    began = time.monotonic()
    blocks_of("```python\n" * 200_000)
    assert time.monotonic() - began < 10


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


def test_values_are_compared_as_test_data():
    program = "def solution(x): return {1: (1, 2.0000000001), 'b': [None, True]}"
    assert execute(program, cases=[{"input": 0, "output": {"1": [1, 2], "b": [None, True]}}]) == [1.0]
    assert execute(program, cases=[{"input": 0, "output": {"1": [1, 2.1], "b": [None, True]}}]) == [0.0]
    numpy = "import numpy\ndef solution(x): return numpy.arange(x)"
    assert execute(numpy, cases=[{"input": 3, "output": [0, 1, 2]}]) == [1.0]


def test_scripts_that_read_and_print():
    cases = [{"input": "1 2\n", "output": "3"}, {"input": "4 5", "output": "9\n"}]
    right = "a, b = map(int, input().split())\nprint(a + b, ' ')"
    assert execute(right, "print(3)", cases=cases, form="stdin", partial=True) == [1.0, 0.5]
    assert execute(right + "\nraise SystemExit(1)", cases=cases, form="stdin") == [0.0]


@pytest.mark.parametrize("form", ["call", "stdin"])
def test_what_hangs_fails_in_time_and_alone(form):
    cases = DOUBLE if form == "call" else [{"input": "2", "output": "4"}]
    right = RIGHT if form == "call" else "print(2 * int(input()))"
    began = time.monotonic()
    assert execute("while True: pass", right, cases=cases, form=form, timeout_s=5, parallel=2) == [0.0, 1.0]
    assert time.monotonic() - began < 30


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
    cases = [{"input": 11, "output": 777}, "assert solution(12) != 888"]
    assert execute("def solution(x): return 777", cases=cases) == [1.0]
    to_program = " ".join(text for to_it, text in sent if to_it)
    assert "11" in to_program and "12" in to_program
    assert "777" not in to_program and "888" not in to_program


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
    ("cases", "message"),
    [
        ("assert 1", "test_cases of a row is a str; it must be a list"),
        ([{"input": 1}], "the test case {'input': 1} is none: KeyError: 'output'"),
        ([{"output": 1}], "is none: KeyError: 'input'"),
        ([3], "is none"),
        (["assert (1"], "is none: SyntaxError"),
        ([{"input": object(), "output": 1}], "a object is no plain data"),
    ],
)
def test_test_cases_that_are_none_are_a_mistake_of_the_dataset(cases, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace("{", r"\{")):
        execute(RIGHT, cases=cases)


def test_scripts_take_text():
    with pytest.raises(ValueError, match="input and output must be text; write"):
        execute(RIGHT, cases=[{"input": 1, "output": "2"}], form="stdin")
    with pytest.raises(ValueError, match="form is 'shell'; it must be 'call' or 'stdin'"):
        execute(RIGHT, form="shell")


def test_without_isolation_it_refuses_unless_told_otherwise(monkeypatch):
    monkeypatch.setattr(sandbox, "isolation", lambda: Isolation(namespaces=False, own_user=False, reason="not today"))
    with pytest.raises(SandboxError, match="with this user's files and network: not today"):
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
        | st.sets(st.integers(), max_size=3)
    ),
    max_leaves=10,
)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(PLAIN)
def test_plain_data_come_back_as_they_were(value):
    back = decode(json.loads(json.dumps(encode(value))))
    assert back == value and type(back) is type(value)
    assert same(back, value, tolerance=0)


@pytest.mark.parametrize("junk", [{"no": 1}, {}, {"tuple": 3}, {"bytes": "x"}, {"a": 1, "b": 2}, {"set": [[1]]}])
def test_junk_is_refused(junk):
    with pytest.raises((ValueError, TypeError)):
        decode(junk)


def test_numbers_are_compared_with_a_tolerance():
    assert same(0.1 + 0.2, 0.3, tolerance=1e-9) and not same(0.31, 0.3, tolerance=1e-9)
    assert same(1e20 + 1e5, 1e20, tolerance=1e-9)
    assert same(math.nan, math.nan, tolerance=0) and same(math.inf, math.inf, tolerance=0)
    assert not same(math.inf, 1.0, tolerance=1) and not same(10**400, 1.0, tolerance=1)
    assert same(3, 3.0, tolerance=0) and not same("3", 3, tolerance=1)


def test_doctests():
    assert doctest.testmod(code).failed == doctest.testmod(code_harness).failed == 0
