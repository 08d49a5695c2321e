"""Finds the lines of this package that have never run, since only a GPU executes them, by the comments that mark them.

    if device.type == "cuda":  # gpu-only: pinned copies          the block below has never run, and why it is there
    if device.type != "cuda":  # gpu-only below: CUDA IPC         ... what follows the block, to the end of its parent
    if device.type == "cuda":  # gpu-seen: CUDA graphs            only a GPU executes it, and an H100 has (also below)
    gpu = device.type == "cuda"  # gpu-aware                      runs here too, whatever comes out

A statement that asks for a GPU has one of these, or stands in a block that has: `unmarked` finds those without, and a
test fails. So `places`, `groupwise doctor` and docs/performance.md name what a machine with a GPU has yet to try.
What computes the same on a GPU with other numbers (tiles of another size) is not among it. Standard library only.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MARK = re.compile(r"# gpu-(only|seen)( below)?: *(.*)")
AWARE = "# gpu-aware"
PACKAGE = Path(__file__).parents[1]
_ANYWHERE = ("is_available", "device_count")  # of torch.cuda: answered without a GPU
_KINDS = ("cuda", "mps")


@dataclass(frozen=True)
class Untested:
    """Lines that have never run: `first` to `last` of `file` (within the package), `lines` of them with code; `what`
    is what they are for."""

    file: str
    first: int
    last: int
    lines: int
    what: str


def places(package: Path = PACKAGE) -> list[Untested]:
    """Return every place that only a GPU reaches and none has, by file and line; of nested ones the outer."""
    found: list[Untested] = []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        end = 0
        for first, last, kind, what in sorted(_marked(text)) if "# gpu-only" in text else ():
            if first > end and kind == "only":
                code = [line for line in text.splitlines()[first - 1 : last] if line.strip()[:1] not in ("", "#")]
                found.append(Untested(str(path.relative_to(package)), first, last, len(code), what))
                end = last
    return found


def unmarked(text: str) -> list[int]:
    """Return the lines of a module's source at which statements begin that ask for a GPU and have no mark."""
    if not any(word in text for word in (*_KINDS, "pin_memory")):
        return []
    comments = _comments(text)
    ranges = [(first, last) for first, last, *_ in _marked(text)] if comments else []
    asking = set[int]()
    for statement in _statements(ast.parse(text)):
        first, last = _header(statement)
        mine = [comments.get(line, "") for line in range(first, last + 1)]
        marked = any(AWARE in comment or MARK.search(comment) for comment in mine)
        inside = any(start <= first <= stop for start, stop in ranges)
        if not marked and not inside and any(map(_asks, _own(statement))):
            asking.add(first)
    return sorted(asking)


def _marked(text: str) -> Iterator[tuple[int, int, str, str]]:
    """Yield the first line, last line, kind (only, seen) and meaning of each marked part."""
    comments = _comments(text)
    for block in _blocks(ast.parse(text)):
        for at, statement in enumerate(block):
            first, last = _header(statement)
            mark = next(filter(None, (MARK.search(comments.get(line, "")) for line in range(first, last + 1))), None)
            if mark is None:
                continue
            kind, below, what = mark.groups()
            inner: Sequence[ast.stmt] = getattr(statement, "body", ())
            within = block[at + 1 :] if below else inner
            if within:
                first, last = within[0].lineno, within[-1].end_lineno or 0
            yield first, last, kind, what.strip()


def _comments(text: str) -> dict[int, str]:
    """Return the comment of each line that has one, if one of them is a mark."""
    if "# gpu-" not in text:
        return {}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block:
                yield block


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    return (statement for block in _blocks(tree) for statement in block)


def _header(statement: ast.stmt) -> tuple[int, int]:
    """Return the lines of a statement without those of the blocks in it."""
    inner: Sequence[ast.stmt] = getattr(statement, "body", ())
    last = inner[0].lineno - 1 if inner else statement.end_lineno or statement.lineno
    return statement.lineno, max(last, statement.lineno)


def _own(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield what is in a statement and in none of the statements inside."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)]


def _asks(node: ast.AST) -> bool:
    """Return whether an expression is about a GPU: a comparison with a kind of device, a call of torch.cuda, pinned
    memory."""
    if isinstance(node, ast.Compare):
        return any(isinstance(each, ast.Constant) and each.value in _KINDS for each in ast.walk(node))
    if isinstance(node, ast.Attribute):
        value = node.value
        of_cuda = isinstance(value, ast.Attribute) and value.attr == _KINDS[0] and _is_torch(value.value)
        return (of_cuda and node.attr not in _ANYWHERE) or node.attr in ("is_cuda", "pin_memory", "pin_memory_device")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "device":
        named = any(isinstance(each, ast.Constant) and each.value in _KINDS for each in node.args)
        return named and _is_torch(node.func.value)
    return False


def _is_torch(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "torch"
