"""Refusals as tests state them: the class, code, field and kind stand in the test, the words in one file a room.

    with raises(ConfigError, field="train.lora.rank"):
        ...                                     # what must be refused
    wording(command("run", "nothing.yaml").stderr)
    with warns():
        ...                                     # what must be done with a warning

Every message that a test meets is kept in `tests/<room>/wording.txt`, by test, to be read as a whole and not to be
edited: who changes an error's English changes the source, writes the files again with `make wording` and reads the
difference. A test whose message is not in the file fails.

The words of Python, of the operating system and of libraries stand inside ours, so they are compared on the Python that
wrote the files alone. What differs from run to run has a name in them: TMP, HERE, ENV and SITE are paths, PATH is where
programs are looked for, HOST is a server of a test, ID what is drawn, N what is measured, CAUSE what the network says.
`raises(..., words=False)` leaves a message out.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import hypothesis
import pytest

TESTS = Path(__file__).resolve().parent
E = TypeVar("E", bound=BaseException)
WRITES = os.environ.get("WORDING") == "write"
PYTHON = (3, 11)
PLACES = [
    (re.compile(re.escape(sys.prefix)), "ENV"),
    (re.compile(r"[^\s'\"]*/site-packages"), "SITE"),
    (re.compile(re.escape(str(TESTS.parent))), "HERE"),
    (re.compile(rf"{re.escape(tempfile.gettempdir())}/(pytest-of-[^/]+/pytest-\d+/(popen-gw\d+/)?)?[\w.-]+"), "TMP"),
    (re.compile(r"\bENV/bin/python[\d.]*"), "ENV/bin/python"),
    (re.compile(r"\bENV/bin(?::/[^\s:'\"]+)+"), "PATH"),
    (re.compile(r'(?<=", line )\d+'), "N"),
    (re.compile(r"\b127\.0\.0\.1:\d+"), "HOST"),
    (re.compile(r"\b(pid|process|port) \d{2,}|\b(user) \d+\b"), r"\1\2 N"),
    (re.compile(r"(?<=, expected )\d+(?=\))"), "N"),  # bytes of an HTTP body, as httpx says it
    (re.compile(r"\b\d[\d,]*(?:\.\d+)?(?:e-?\d+)? (nats|GiB|MiB|bytes|seconds|ms|s)\b"), r"N \1"),
    (re.compile(r"(?<=[-_])[0-9a-f]{8}(?:[0-9a-f]{16})?\b|\b[0-9a-f]{32}\b"), "ID"),
    (re.compile(r"\b\d{10,}\b"), "N"),
    (re.compile(r"\b\d{4}-\d\d-\d\dT[\d:.]+Z|\b\d\d:\d\d:\d\d\b"), "TIME"),
    (re.compile(r"(?<='model)\d+(?=')"), "N"),  # a directory of pytest's
    (re.compile(r"(?<= at )0x[0-9a-f]+"), "ADDRESS"),
    (re.compile(r"(?<=/\.mine-)\w{8}\b"), "ID"),
    (re.compile(r"Server disconnected without sending a response\.?|\[Errno (?:-\d+|104|32)\] [A-Z][\w ]+"), "CAUSE"),
    (
        re.compile(r"(?<=CSV parse error: )Row #\d+: "),
        "",
    ),  # which Arrow says of one thread
    (re.compile(r"(no server answers at [^;\n]*; again in N s\s*)+"), r"\1"),
]
_written: dict[str, list[str]] = {}  # by room, of the test that runs
_now: tuple[pytest.Item | None, int] = (None, 0)  # the test that runs, and its process


class Raised(Generic[E]):
    """The error that was raised, once the block has ended; its names are those of pytest's."""

    value: E

    @property
    def type(self) -> type[E]:
        return type(self.value)


@contextmanager
def raises(
    kind_of: type[E] | tuple[type[E], ...],
    *,
    words: bool = True,
    **facts: Any,
) -> Iterator[Raised[E]]:
    """Expect an error with these facts (`code`, `field`, `kind`, `status`, ...), and with the words in the file."""
    caught = Raised[E]()
    with pytest.raises(kind_of) as raised:
        yield caught
    caught.value = raised.value
    for name, fact in facts.items():
        assert getattr(raised.value, name) == fact, (name, str(raised.value))
    if words:
        wording(raised.value)


@contextmanager
def warns() -> Iterator[pytest.WarningsRecorder]:
    """Expect one or several warnings of ours, with the words in the file."""
    with pytest.warns(UserWarning) as said:  # noqa: PT030 - the words are compared below
        yield said
    for each in said.list:
        if issubclass(each.category, UserWarning):
            wording(each.message)


def wording(said: object) -> None:
    """Compare a message, or an error's, with the words that the room's file has for this test, or write them."""
    node, process = _now
    if node is None or node.get_closest_marker("slow") or process != os.getpid():
        return  # what a process of the test's meets, the test is told of
    if not hypothesis.settings().derandomize:
        return  # examples that are drawn anew meet words that nobody has read
    lines = _told(said).strip().splitlines()
    text = "\n".join(line.rstrip() for line in lines if "errors.pydantic.dev" not in line)
    for pattern, name in PLACES:
        text = pattern.sub(name, text)
    room, file, test = _address(node)
    if WRITES:
        _written.setdefault(room, []).append(json.dumps([file, test, text]))
    elif sys.version_info[:2] == PYTHON and text not in (kept := _kept(room).get(file, {}).get(test, [])):
        nearest = max(kept, key=lambda each: difflib.SequenceMatcher(None, each, text).ratio(), default="")
        changed = "\n".join(difflib.ndiff(nearest.splitlines(), text.splitlines()))
        pytest.fail(f"the words are not in tests/{room}/wording.txt; if they should be, `make wording`:\n{changed}")


def _told(said: object) -> str:
    """Return what is kept: an error's facts and words, an answer's that has it as JSON, or what a command printed."""
    if isinstance(said, str):  # as wide as the terminal, perhaps in a frame
        return " ".join(re.sub("[│╭╮╰╯─]", " ", said).split()).replace(" -> ", "\n  -> ")
    facts = said if isinstance(said, dict) else {name: getattr(said, name, None) for name in ("code", "field", "kind")}
    head = ", ".join(str(facts[name]) for name in ("code", "field", "param", "kind") if facts.get(name) is not None)
    words = str(said)
    if isinstance(said, dict):
        words = said["message"] + (f"\n  -> {said['hint']}" if said.get("hint") else "")
    return f"[{head}] {words}" if head else words


def _address(node: pytest.Item) -> tuple[str, str, str]:
    path = node.path.relative_to(TESTS)
    room = path.parts[0] if len(path.parts) > 1 else "."
    test = node.nodeid.partition("::")[2]
    return room, str(path.relative_to(room)), re.sub(r"@[\w.-]+$", "", test)


@functools.cache
def _kept(room: str) -> dict[str, dict[str, list[str]]]:
    path = TESTS / room / "wording.txt"
    return _read(path.read_text()) if path.exists() else {}


def _read(text: str) -> dict[str, dict[str, list[str]]]:
    """Return file -> test -> messages of a room's file."""
    files: dict[str, dict[str, list[str]]] = {}
    tests: dict[str, list[str]] = {}
    messages: list[str] = []
    for line in text.splitlines():
        if line.startswith("# "):
            tests = files.setdefault(line[2:], {})
        elif line.startswith("## "):
            messages = tests.setdefault(line[3:], [])
        elif line.startswith("  - ") or line == "  -":
            messages.append(line[4:])
        elif line.startswith("    ") or (not line and messages):
            messages[-1] += "\n" + line[4:]
    return {file: {test: [each.rstrip() for each in said] for test, said in of.items()} for file, of in files.items()}


def _write(room: str, files: dict[str, dict[str, list[str]]]) -> None:
    lines: list[str] = []
    for file, tests in sorted(files.items()):
        lines += [f"# {file}", ""]
        for test, messages in sorted(tests.items()):
            lines.append(f"## {test}")
            for message in messages:
                first, *others = message.split("\n")
                lines += [f"  - {first}".rstrip(), *(f"    {each}".rstrip() for each in others)]
            lines.append("")
    (TESTS / room / "wording.txt").write_text("\n".join(lines))


def begin(node: pytest.Item | None) -> None:
    """Note which test runs now, and put down what the one before met (which may have run as another user)."""
    for room, lines in _written.items():
        with (TESTS / room / f".wording-{os.getpid()}.jsonl").open("a") as record:
            record.writelines(f"{line}\n" for line in lines)
    _written.clear()
    global _now
    _now = node, os.getpid()


def gather(*, of: str) -> None:
    """Put what the test processes wrote into the rooms' files.

    `of` says which tests ran: "all" of the suite, whole "files", or "some" of a file's tests, which change no others.
    """
    if of == "all":
        for path in TESTS.glob("**/wording.txt"):
            path.unlink()
    for room in sorted({record.parent for record in TESTS.glob("**/.wording-*.jsonl")}):
        new: dict[str, dict[str, list[str]]] = {}
        for record in sorted(room.glob(".wording-*.jsonl")):
            for file, test, text in map(json.loads, record.read_text().splitlines()):
                said = new.setdefault(file, {}).setdefault(test, [])
                if text not in said:
                    said.append(text)
            record.unlink()
        name = str(room.relative_to(TESTS))
        files = _kept(name)
        for file, tests in new.items():
            files[file] = files.get(file, {}) | tests if of == "some" else tests
        _write(name, {file: tests for file, tests in files.items() if (room / file).exists()})
