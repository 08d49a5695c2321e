"""The sources of Groupwise, each parsed once a process: many tests look through all of them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "groupwise"


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file; nobody may change it."""
    return ast.parse(path.read_text(encoding="utf-8"))
