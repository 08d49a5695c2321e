"""Rewards on Python code, which runs in boxes (`groupwise.sandbox`). Options are the keyword-only arguments.

    code_execution     the share of test cases that the program passes: all or nothing, or with partial credit
    code_block_format  exactly one fenced Python block, closed and not empty
    no_syntax_error    it can be compiled, and is more than a word

The program is the last ```python block of a completion, or else the last block without a language, or else all of it
(behind the last </think>). Test cases are the row's own, a list whose entries are

    {"input": x, "output": y}                     solution(x) returns y; "expected" is the same as "output"
    {"args": [a, b], "kwargs": {}, "output": y}   solution(a, b) returns y
    "assert solution(2) == 4"                     any Python tests, as in MBPP, or HumanEval's check(solution)
    {"input": text, "output": text}               with form: stdin, what the script prints when it reads that

What a policy cannot do is pass without being right. The program's box never holds an expected result: it is asked for
values, over a channel of its own with a number on every question, and these come back as plain data (JSON) and are
compared here. So it is no use to print "passed", to exit with status 0, to return an object that is equal to
everything, to patch `==`, `assert` or `json`, or to look for the tests: a forged answer is an answer like any other.
Tests written as code run in a second box, in which the calls that they make are questions to the first. What changes
its arguments in place, or returns anything else than plain data, cannot be tested so.
"""

from __future__ import annotations

import ast
import json
import math
import os
import re
import secrets
import textwrap
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from groupwise.rewards import code_harness
from groupwise.rewards.base import text_of
from groupwise.rewards.code_harness import decode, encode
from groupwise.sandbox import Box, Isolation, Limits, SandboxError, checked_isolation, python, run_python, untrusted

_PYTHON = ("python", "py", "python3")
_LONGEST_PROGRAM = 100_000  # characters
_LONGEST_ANSWER = 1 << 20  # bytes of JSON
_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([\w+.-]*)")


@dataclass(frozen=True)
class Block:
    """A fenced block of Markdown."""

    language: str
    code: str
    closed: bool


def blocks_of(text: str) -> list[Block]:
    """The fenced blocks, in order; the last may never be closed.

    >>> blocks_of("so:\\n```python\\nx = 1\\n```\\n")
    [Block(language='python', code='x = 1\\n', closed=True)]
    """
    blocks: list[Block] = []
    fence, language, lines = "", "", []
    for line in text.splitlines(keepends=True):
        match = _FENCE.match(line)
        if not fence:
            if match:
                fence, language, lines = match[1], match[2].lower(), []
        elif line.strip() and set(line.strip()) == {fence[0]} and line.strip().startswith(fence):
            blocks.append(Block(language, textwrap.dedent("".join(lines)), closed=True))
            fence = ""
        else:
            lines.append(line)
    if fence:
        blocks.append(Block(language, textwrap.dedent("".join(lines)), closed=False))
    return blocks


def program_of(text: str) -> str | None:
    """The program in a completion; None where it holds nothing but blocks of other languages, or is blank."""
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


def code_execution(
    completions: Sequence[Any],
    test_cases: Sequence[Sequence[Any] | None],
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
    a row without test cases.

    `timeout_s` is for all cases of a completion together. Floats may differ by `tolerance`, relative and absolute;
    lists and tuples of equal entries are equal, and so are keys of the same JSON. `parallel` programs run at once (as
    many as there are processors). Raises ValueError for test cases that are none, and SandboxError where
    `require_isolation` and this machine has no namespaces, or a box cannot be made.
    """
    if form not in ("call", "stdin"):
        raise ValueError(f"form is {form!r}; it must be 'call' or 'stdin'")
    level = checked_isolation(require_isolation)
    limits = Limits(wall_s=timeout_s, cpu_s=math.ceil(timeout_s), memory_mb=memory_mb)
    options = _Options(partial=partial, tolerance=tolerance, limits=limits, level=level)
    programs = [program_of(text_of(completion)) for completion in completions]
    cases_of = [_cases(each, form=form, entry=entry) for each in test_cases]
    with ThreadPoolExecutor(parallel or os.cpu_count() or 1) as threads:
        return list(threads.map(lambda program, cases: _score(program, cases, options), programs, cases_of))


@dataclass(frozen=True, kw_only=True)
class _Case:
    """A test case: `tests` as code, or a `question` to the program (or `stdin` for it) and what is expected."""

    tests: str | None = None
    question: Mapping[str, Any] | None = None
    stdin: str = ""
    expected: Any = None


def _case(case: Any, *, form: str, entry: str) -> _Case:
    """Raises ValueError for what is no test case: a mistake in the dataset is not a wrong program."""
    try:
        if form == "call" and isinstance(case, str):
            ast.parse(case)
            return _Case(tests=case)
        expected = case["expected"] if "expected" in case else case["output"]
        if form == "stdin":
            if not isinstance(expected, str) or not isinstance(case["input"], str):
                raise TypeError("input and output must be text")
            return _Case(stdin=case["input"], expected=expected)
        args = list(case["args"]) if "args" in case else [case["input"]]
        question = {"call": entry, "args": encode(args), "kwargs": encode(dict(case.get("kwargs") or {}))}
        return _Case(question=question, expected=decode(encode(expected)))
    except (KeyError, TypeError, ValueError, AttributeError, SyntaxError) as error:
        cause = f"the test case {case!r:.200} is none: {type(error).__name__}: {error}"
        like = '{"input": text, "output": text}' if form == "stdin" else '{"input": x, "output": y}, or tests as text'
        raise ValueError(f"{cause}; write {like}") from None


def _cases(cases: Any, *, form: str, entry: str) -> list[_Case]:
    if cases is not None and not isinstance(cases, list | tuple):
        raise ValueError(f"test_cases of a row is a {type(cases).__name__}; it must be a list")
    return [_case(case, form=form, entry=entry) for case in cases or ()]


def _score(program: str | None, cases: list[_Case], options: _Options) -> float | None:
    if not cases:
        return None
    if program is None or len(program) > _LONGEST_PROGRAM:
        return 0.0
    passed = 0
    with ExitStack() as boxes:
        examiner = _Examiner(program, options, boxes)
        for case in cases:
            passed += (right := examiner.passes(case))
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
        try:
            if case.tests is not None:
                return self._passes_tests(case.tests)
            return self._prints(case) if case.question is None else self._returns(case.question, case.expected)
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
        return outcome.status == "ok" and _lines(outcome.stdout) == _lines(case.expected)

    def _returns(self, question: Mapping[str, Any], expected: Any) -> bool:
        answer = self._ask(question)
        return "value" in answer and same(decode(answer["value"]), expected, tolerance=self.options.tolerance)

    def _passes_tests(self, test: str) -> bool:
        """The tests' box says which function of the program it wants called; this passes questions and answers on."""
        if self._checking is None:
            self._checking = self._box("check", {})
        self._tell(self._checking, {"test": test})
        while True:
            said = self._hear(self._checking)
            if "call" in said:
                answer = self._ask({name: said[name] for name in ("call", "args", "kwargs")})
                self._tell(self._checking, {name: answer[name] for name in ("value", "raised") if name in answer})
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
        with suppress(OSError):  # where nobody reads, nobody answers
            assert box.channel is not None
            box.channel.send(json.dumps(message).encode(), timeout=max(0.001, self.deadline - time.monotonic()))

    def _hear(self, box: Box) -> dict[str, Any]:
        assert box.channel is not None
        try:
            message = box.channel.receive(timeout=self.deadline - time.monotonic())
        except EOFError:
            if setup := box.wait(timeout=self.options.limits.wall_s).get("setup"):
                raise SandboxError(f"the program could not be started in its box: {setup}") from None
            raise _Over from None
        except (OSError, ValueError):  # late, or longer than any answer
            raise _Over from None
        said = json.loads(message)
        if not isinstance(said, dict):
            raise ValueError("not a message")
        return said


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def same(got: Any, expected: Any, *, tolerance: float) -> bool:
    """Whether two plain values are equal as test data are: floats nearly, tuples as lists, keys as JSON spells them.

    >>> same((1, 2.0), [1, 2.0000000001], tolerance=1e-9), same({1: "a"}, {"1": "a"}, tolerance=0)
    (True, True)
    """
    if isinstance(got, list | tuple) and isinstance(expected, list | tuple):
        pairs = zip(got, expected, strict=False)
        return len(got) == len(expected) and all(same(a, b, tolerance=tolerance) for a, b in pairs)
    if isinstance(got, dict) and isinstance(expected, dict):
        a, b = ({_key(key): value for key, value in each.items()} for each in (got, expected))
        return a.keys() == b.keys() and all(same(a[key], b[key], tolerance=tolerance) for key in a)
    if isinstance(got, float) and isinstance(expected, int | float):
        close = math.isfinite(got) and abs(got - expected) <= tolerance * max(1.0, abs(expected))
        return close or got == expected or (got != got and expected != expected)
    return got == expected


def _key(key: Any) -> str:
    return key if isinstance(key, str) else json.dumps(encode(key))
