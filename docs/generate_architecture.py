"""Write the map of files into docs/architecture.md: `python docs/generate_architecture.py`. A test runs it."""

from __future__ import annotations

import ast
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "groupwise"
PAGE = ROOT / "docs" / "architecture.md"
TEMPLATES = SOURCE / "cli" / "templates"  # what `groupwise init` copies: files of users
BEGIN = "<!-- written by docs/generate_architecture.py -->"


def page(text: str) -> str:
    """The page with its last part, the map, as the files are now."""
    return text.partition(BEGIN)[0] + BEGIN + "\n\n" + _map()


def _map() -> str:
    modules = (path for path in SOURCE.rglob("*.py") if TEMPLATES not in path.parents)
    files = sorted(modules, key=lambda path: (path.parent, path.name != "__init__.py", path.name))
    parts = []
    for folder, inside in groupby(files, key=lambda path: path.parent):
        paths = list(inside)
        name = folder.relative_to(SOURCE.parent).as_posix()
        lines = [f"- `{path.name}`: {_first_line(path)}" for path in paths if path.name != "__init__.py"]
        about = [_first_line(path) for path in paths if path.name == "__init__.py"]
        parts.append("\n".join([f"### {name}/", "", *about, "", *lines, ""]))
    return "\n".join(parts)


def _first_line(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split())


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
