"""Rewards for Python code, which runs in a sandbox (`groupwise.rewards.sandbox`). Options are the keyword-only
arguments.

    code_execution     the share of test cases that the program passes: all or nothing, or with partial credit
    code_block_format  exactly one fenced Python block, closed and not empty
    no_syntax_error    it can be compiled, and is more than a word

The program is the last ```python block of a completion, or else the last block without a language, or else all of it
(behind the last </think>). Test cases are the row's own, a list whose entries are

    {"input": x, "output": y}                     solution(x) returns y; "expected" is the same as "output"
    {"args": [a, b], "kwargs": {}, "output": y}   solution(a, b) returns y
    "assert solution(2) == 4"                     any Python tests, as in MBPP, or HumanEval's check(solution)
    {"input": text, "output": text}               with form: stdin, what the script prints when it reads that

Values are compared by `same`: a bool is not a number, an integer is met exactly (by an equal float too), and the
tolerance is for each expected float. Tests written as code mean what Python means by them: there `True == 1` holds.

What a policy cannot do is pass without being right. The program's box never holds an expected result: it is asked for
values, over its own channel with a number on every question, and these come back as plain data (JSON) and are
compared here. So it is no use to print "passed", to exit with status 0, to return an object that is equal to
everything, to patch `==`, `assert` or `json`, or to look for the tests: a forged answer is an answer like any other.
Tests written as code run in a second box, in which the calls that they make are questions to the first. What changes
its arguments in place, or returns anything else than plain data, cannot be tested so.

Which names of a test are functions of the program: those that the row's `entry_point` lists; else `entry`, if the test
names it and does not define it; else the only name that it does not define. A test that names anything more, or that
ends without having called the program, is a mistake of the dataset, BadTestCase: whatever a test leaves undefined
(`isclose`, without its import) the policy would define.
"""

from __future__ import annotations

import ast
import builtins
import json
import logging
import math
import re
import secrets
import symtable
import textwrap
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from groupwise.platform import cores
from groupwise.rewards import code_harness
from groupwise.rewards.base import text_of
from groupwise.rewards.code_harness import decode, encode
from groupwise.rewards.sandbox import (
    Box,
    Isolation,
    Limits,
    ProgramResult,
    SandboxError,
    checked_isolation,
    outcome_of,
    python,
    run_python,
    untrusted,
)

log = logging.getLogger(__name__)

_PYTHON = ("python", "py", "python3")
_LONGEST_PROGRAM = 100_000  # characters
_LONGEST_ANSWER = 1 << 20  # bytes of JSON
_DYING_S = 5.0  # from the end of what a program says to its own
_ANSWERS = ("value", "raised", "absent")
_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([\w+.-]*)")


@dataclass(frozen=True)
class CodeBlock:
    """A fenced block of Markdown."""

    language: str
    code: str
    closed: bool


def blocks_of(text: str) -> list[CodeBlock]:
    """Return the fenced blocks, in order; the last may never be closed.

    >>> blocks_of("so:\\n```python\\nx = 1\\n```\\n")
    [CodeBlock(language='python', code='x = 1\\n', closed=True)]
    """
    blocks: list[CodeBlock] = []
    fence, language, lines = "", "", []
    for line in text.splitlines(keepends=True):
        match = _FENCE.match(line)
        if not fence:
            if match:
                fence, language, lines = match[1], match[2].lower(), []
        elif line.strip() and set(line.strip()) == {fence[0]} and line.strip().startswith(fence):
            blocks.append(CodeBlock(language, textwrap.dedent("".join(lines)), closed=True))
            fence = ""
        else:
            lines.append(line)
    if fence:
        blocks.append(CodeBlock(language, textwrap.dedent("".join(lines)), closed=False))
    return blocks


def program_of(text: str) -> str | None:
    """Return the program in a completion; None where it holds nothing but blocks of other languages, or is blank."""
    blocks = blocks_of(text)
    for languages in (_PYTHON, ("",)):
        for block in reversed(blocks):
            if block.language in languages:
                return block.code if block.code.strip() else None
    plain = text.rpartition("</think>")[2]
    return None if blocks or not plain.strip() else plain


# ---- form ----


def code_block_format(completions: Sequence[Any]) -> list[float]:
    """1 where the completion holds exactly one Python block, closed and not empty, else 0."""
    return [float(_has_one_block(text_of(completion))) for completion in completions]


def _has_one_block(text: str) -> bool:
    found = [block for block in blocks_of(text) if block.language in _PYTHON]
    return len(found) == 1 and found[0].closed and bool(found[0].code.strip())


def no_syntax_error(completions: Sequence[Any]) -> list[float]:
    """1 where the program can be compiled and has a statement that is more than a name or a constant, else 0."""
    return [float(_compiles(program_of(text_of(completion)))) for completion in completions]


def _compiles(program: str | None) -> bool:
    if program is None or len(program) > _LONGEST_PROGRAM:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the program's own style
            tree = ast.parse(program)
            compile(tree, "program.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Name | ast.Constant)) for s in tree.body)


# ---- execution ----


@dataclass(frozen=True, kw_only=True)
class _Options:
    partial: bool
    tolerance: float
    limits: Limits
    level: Isolation


class BadTestCase(ValueError):
    """A test case that no program can pass, or any: a mistake of the dataset, and no wrong program."""


def code_execution(
    completions: Sequence[Any],
    test_cases: Sequence[Sequence[Any] | None],
    entry_point: Sequence[str | Sequence[str] | None] | None = None,
    *,
    entry: str = "solution",
    form: Literal["call", "stdin"] = "call",
    partial: bool = False,
    timeout_s: float = 10.0,
    memory_mb: int = 1024,
    tolerance: float = 1e-9,
    parallel: int | None = None,
    require_isolation: bool = True,
) -> list[float | None]:
    """1 where the program passes all of its row's test cases, else 0; with `partial` the share that it passes. None for
    a row without test cases; nan, a failure, where a program was killed from outside of its box.

    The function that is called is `entry`, or what the column `entry_point` says: a name, or several where tests
    written as code call them all. `timeout_s` is for all cases of a completion together. A value may differ by
    `tolerance`, relative and absolute, from a float that is expected; lists and tuples of equal entries are equal, and
    so are keys of the same JSON. `parallel` programs run at once (as many as there are processors).

    Raises BadTestCase for test cases that are none, and SandboxError where `require_isolation` and this machine has no
    namespaces, or every program was lost: its box could not be made, or was killed from outside.
    """
    if form not in ("call", "stdin"):
        raise ValueError(f"form is {form!r}; it must be 'call' or 'stdin'")
    level = checked_isolation(require_isolation)
    limits = Limits(wall_s=timeout_s, cpu_s=math.ceil(timeout_s), memory_mb=memory_mb)
    options = _Options(partial=partial, tolerance=tolerance, limits=limits, level=level)
    programs = [program_of(text_of(completion)) for completion in completions]
    points = [None] * len(programs) if entry_point is None else entry_point
    entries = [_Entry.of(point, default=entry) for point in points]
    cases_of = [_cases(each, form=form, entry=names) for each, names in zip(test_cases, entries, strict=True)]
    with ThreadPoolExecutor(parallel or cores()) as threads:
        scores = list(threads.map(lambda program, cases: _score(program, cases, options), programs, cases_of))
    lost = [score for score in scores if isinstance(score, SandboxError)]
    if lost and len(lost) == len(scores):
        raise lost[0]
    if lost:
        log.warning("%d of %d programs could not be scored: %s", len(lost), len(scores), lost[0])
    return [math.nan if isinstance(score, SandboxError) else score for score in scores]


@dataclass(frozen=True)
class _Entry:
    """Holds the functions that a row's program must define: `named` by the row, or else a `default`."""

    named: tuple[str, ...]
    default: str

    @classmethod
    def of(cls, point: Any, *, default: str) -> _Entry:
        named = (point,) if isinstance(point, str) else tuple(point) if isinstance(point, list | tuple) else point
        if named is None:
            return cls((), default)
        if not isinstance(named, tuple) or not named or not all(isinstance(name, str) for name in named):
            raise BadTestCase(f"entry_point is {point!r}; it must be a name, or a list of names")
        return cls(named, default)

    def single(self) -> str:
        if len(self.named) > 1:
            raise BadTestCase(f"entry_point is {list(self.named)}; these test cases call one function: give its name")
        return self.named[0] if self.named else self.default

    def asked(self, test: str) -> list[str]:
        """Return the names in a test that the program defines. Raises BadTestCase if there are none, or more than it
        may."""
        free, rest = undefined(test)
        asked = {*self.named} & free
        if not self.named:
            asked = {self.default} if self.default in free else free if len(free) == 1 else set()
            if len(free) > 1 and not asked:
                raise BadTestCase(_UNKNOWN.format(names=_listed(free)))
        if not asked:
            whose = f", which is to define {_listed(self.named)}" if self.named else ""
            raise BadTestCase(f"it calls nothing of the program{whose}")
        if (unknown := free - asked) and not rest:
            raise BadTestCase(_UNKNOWN.format(names=_listed(unknown)))
        return sorted(asked)


_UNKNOWN = (
    "it names {names}, which neither it nor Python defines: import or define that in the test, or list all that the "
    "program is to define in the row's column entry_point"
)


def _listed(names: Iterable[str]) -> str:
    *first, last = sorted(names)
    return f"{', '.join(first)} and {last}" if first else last


def undefined(code: str) -> tuple[set[str], bool]:
    """Return the names that code uses and neither it nor Python defines, and whether it imports more names than it
    shows (*). Raises SyntaxError or ValueError for what cannot be compiled.

    >>> undefined("from math import pi\\nassert [f(x, pi) for x in range(3)] == []")
    ({'f'}, False)
    """
    used, bound = set[str](), {*dir(builtins), "__name__", "__file__"}
    tables = [symtable.symtable(code, "test.py", "exec")]
    compile(code, "test.py", "exec", dont_inherit=True)
    for table in tables:
        tables += table.get_children()
        top = table.get_type() == "module"
        for symbol in table.get_symbols():
            if not (top or symbol.is_global()):
                continue
            if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace():
                bound.add(symbol.get_name())
            if symbol.is_referenced():
                used.add(symbol.get_name())
    stars = (node.names[0].name == "*" for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom))
    return used - bound, any(stars)


@dataclass(frozen=True, kw_only=True)
class _Case:
    """A test case: `tests` as code, of which the program answers what is `asked`, or a `question` to the program (or
    `stdin` for it) and what is expected."""

    tests: str | None = None
    asked: Sequence[str] = ()
    question: Mapping[str, Any] | None = None
    stdin: str = ""
    expected: Any = None


def _case(case: Any, *, form: str, entry: _Entry) -> _Case:
    """Raise BadTestCase."""
    try:
        if form == "call" and isinstance(case, str):
            return _Case(tests=case, asked=entry.asked(case))
        expected = case[_given(case, "expected", "output")]
        if form == "stdin":
            if not isinstance(expected, str) or not isinstance(case["input"], str):
                raise TypeError("input and output must be text")
            return _Case(stdin=case["input"], expected=expected)
        args = list(case["args"]) if _given(case, "args", "input") == "args" else [case["input"]]
        question = {"call": entry.single(), "args": encode(args), "kwargs": encode(dict(case.get("kwargs") or {}))}
        return _Case(question=question, expected=decode(encode(expected)))
    except BadTestCase as error:
        raise BadTestCase(f"the test case {case!r:.200} is none: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, SyntaxError) as error:
        cause = f"the test case {case!r:.200} is none: {type(error).__name__}: {error}"
        like = '{"input": text, "output": text}' if form == "stdin" else '{"input": x, "output": y}, or tests as text'
        raise BadTestCase(f"{cause}; write {like}") from None


def _given(case: Mapping[str, Any], first: str, second: str) -> str:
    """Return which of two keys a case has. Tables (Arrow's) have both, and null in the one that their row had not."""
    there = [name for name in (first, second) if name in case]
    filled = [name for name in there if case[name] is not None]
    if len(filled) > 1 and case[first] != case[second]:
        raise ValueError(f"it has both {first!r} and {second!r}")
    return (filled or there or [second])[0]


def _cases(cases: Any, *, form: str, entry: _Entry) -> list[_Case]:
    if cases is not None and not isinstance(cases, list | tuple):
        raise BadTestCase(f"test_cases of a row is a {type(cases).__name__}; it must be a list")
    return [_case(case, form=form, entry=entry) for case in cases or ()]


def _score(program: str | None, cases: list[_Case], options: _Options) -> float | SandboxError | None:
    if not cases:
        return None
    if program is None or len(program) > _LONGEST_PROGRAM:
        return 0.0
    passed = 0
    with ExitStack() as boxes:
        examiner = _Examiner(program, options, boxes)
        for case in cases:
            try:
                passed += (right := examiner.passes(case))
            except SandboxError as error:
                return error
            if examiner.over or not (right or options.partial):
                break
    return passed / len(cases) if options.partial else float(passed == len(cases))


class _Over(Exception):
    """The program, or its time, has ended."""


class _Examiner:
    """Puts test cases to one program. `over` once it cannot answer any more."""

    def __init__(self, program: str, options: _Options, boxes: ExitStack):
        self.program, self.options, self._boxes = program, options, boxes
        self.deadline = time.monotonic() + options.limits.wall_s
        self._serving: Box | None = None
        self._checking: Box | None = None
        self.over = False

    def passes(self, case: _Case) -> bool:
        """Raise SandboxError where the program was not tested, and BadTestCase."""
        try:
            if case.tests is not None:
                return self._passes_tests(case.tests, case.asked)
            return self._prints(case) if case.question is None else self._returns(case.question, case.expected)
        except BadTestCase:
            raise
        except _Over:
            self.over = True
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
            pass  # an answer that is none
        return False

    def _prints(self, case: _Case) -> bool:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise _Over
        limits = replace(self.options.limits, wall_s=left, cpu_s=math.ceil(left))
        outcome = run_python(self.program, stdin=case.stdin, limits=limits)
        _refuse_lost(outcome)
        return outcome.status == "ok" and _lines(outcome.stdout) == _lines(case.expected)

    def _returns(self, question: Mapping[str, Any], expected: Any) -> bool:
        answer = self._ask(question)
        return "value" in answer and same(decode(answer["value"]), expected, tolerance=self.options.tolerance)

    def _passes_tests(self, test: str, asked: Sequence[str]) -> bool:
        """Return whether the tests pass. Their box says which function of the program it wants called; this passes
        questions and answers on."""
        if self._checking is None:
            self._checking = self._box("check", {})
        self._tell(self._checking, {"test": test, "asked": asked})
        while True:
            said = self._hear(self._checking)
            if "call" in said:
                try:
                    answer = self._ask({name: said[name] for name in ("call", "args", "kwargs")})
                except (
                    ValueError,
                    RecursionError,
                ) as error:  # no JSON; the tests' box waits for an answer all the same
                    answer = {"absent": type(error).__name__}
                self._tell(self._checking, {name: answer[name] for name in _ANSWERS if name in answer})
            elif not said["calls"]:
                how = "passes" if said["passed"] else "fails"
                cause = f": {said['cause']}" if said["cause"] else ""
                raise BadTestCase(
                    f"the test case {test!r:.200} is none: it {how} without having called the program{cause}"
                )
            else:
                return said["passed"] is True

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        if self._serving is None:
            self._serving = self._box("serve", {"program.py": self.program})
        number = secrets.token_hex(8)
        self._tell(self._serving, {"id": number, **question})
        while True:
            answer = self._hear(self._serving)
            if answer.get("id") == number:
                return answer

    def _box(self, role: str, files: Mapping[str, str]) -> Box:
        harness = {"harness.py": Path(code_harness.__file__).read_text(encoding="utf-8"), **files}
        argv = [*python("harness.py"), role, "{channel}"]
        spec = untrusted(argv, files=harness, limits=self.options.limits, level=self.options.level)
        return self._boxes.enter_context(Box(spec, channel=True, longest=_LONGEST_ANSWER))

    def _tell(self, box: Box, message: Mapping[str, Any]) -> None:
        with suppress(OSError):  # a process that has ended is noticed by its missing answer
            assert box.channel is not None
            box.channel.send(json.dumps(message).encode(), timeout=max(0.001, self.deadline - time.monotonic()))

    def _hear(self, box: Box) -> dict[str, Any]:
        assert box.channel is not None
        try:
            message = box.channel.receive(timeout=self.deadline - time.monotonic())
        except EOFError:
            self._look_up_end(box)
            raise _Over from None
        except (OSError, ValueError):  # late, or longer than any answer
            raise _Over from None
        said = json.loads(message)
        if not isinstance(said, dict):
            raise ValueError("not a message")
        return said

    def _look_up_end(self, box: Box) -> None:
        """Find out why a box says nothing more. Returns where that is the program's doing. Raises SandboxError, or
        BadTestCase for tests that end their own process."""
        try:
            end = box.wait(timeout=_DYING_S)
        except SandboxError:
            end = box.close()  # it only closed its channel; or the keeper is gone
            if not end:
                raise
        outcome = outcome_of(end, self.options.limits, self.options.level)
        _refuse_lost(outcome)
        if box is self._checking and outcome.status in ("ok", "error", "killed"):
            how = f"signal {outcome.signal}" if outcome.signal else f"exit status {outcome.exit_code}"
            raise BadTestCase(f"a test case is none: its process ended: {how}")


def _refuse_lost(outcome: ProgramResult) -> None:
    if outcome.status == "lost":
        raise SandboxError(
            "a program was killed from outside of its box (SIGKILL, at none of its limits)",
            hint="was memory short? run fewer at once (`parallel`), or lower memory_mb",
        )


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def same(got: Any, expected: Any, *, tolerance: float) -> bool:
    """Return whether two plain values are equal as test data are: expected floats nearly, integers exactly, tuples as
    lists, keys as JSON spells them; True is not 1, and 3.0 is 3, as in Python.

    >>> same((1, 2.0), [1, 2.0000000001], tolerance=1e-9), same({1: "a"}, {"1": "a"}, tolerance=0)
    (True, True)
    >>> same(3.0, 3, tolerance=0), same(True, 1, tolerance=0), same(2.9999999999, 3, tolerance=1e-9)
    (True, False, False)
    """
    if isinstance(got, bool) or isinstance(expected, bool):
        return got is expected
    if isinstance(got, list | tuple) and isinstance(expected, list | tuple):
        pairs = zip(got, expected, strict=False)
        return len(got) == len(expected) and all(same(a, b, tolerance=tolerance) for a, b in pairs)
    if isinstance(got, dict) and isinstance(expected, dict):
        a, b = ({_exact(key): value for key, value in each.items()} for each in (got, expected))
        if a.keys() != b.keys():
            a, b = ({_spelled(key): value for key, value in each.items()} for each in (got, expected))
        whole = len(a) == len(got) and len(b) == len(expected)  # 1 and "1" are two keys
        return whole and a.keys() == b.keys() and all(same(a[key], b[key], tolerance=tolerance) for key in a)
    if isinstance(got, set | frozenset) and isinstance(expected, set | frozenset):
        return _exact(frozenset(got)) == _exact(frozenset(expected))
    if isinstance(expected, float | complex) and isinstance(got, int | float | complex):
        return _near(got, expected, tolerance)
    return got == expected


def _near(got: complex, expected: complex, tolerance: float) -> bool:
    if isinstance(got, complex) or isinstance(expected, complex):
        parts = (got.real, expected.real), (got.imag, expected.imag)
        return all(_near(a, b, tolerance) for a, b in parts)
    if got == expected or (got != got and expected != expected):
        return True
    try:
        return math.isfinite(expected) and abs(got - expected) <= tolerance * max(1.0, abs(expected))
    except OverflowError:  # an int beyond all floats
        return False


def _exact(value: Any) -> Any:
    """Return a key, or an entry of a set, that is equal to another only where `same` says so without a tolerance."""
    if isinstance(value, bool):
        return "bool", value
    if isinstance(value, tuple):
        return "tuple", *map(_exact, value)
    if isinstance(value, frozenset):
        return frozenset(map(_exact, value))
    return ("nan",) if value != value else value


def _spelled(key: Any) -> Any:
    """Return a key as JSON's objects have it; as it is where they have none such."""
    return json.dumps(key) if key is None or isinstance(key, bool | int | float) else _exact(key)
