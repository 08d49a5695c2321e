"""Takes the Python out of a notebook: what IPython alone understands becomes Python that does nothing.

    !pip install trl \\            pass            also %pip, pip install trl, %%bash and all of its cell
        peft
    if colab: !pip install trl    if colab: pass
    files = !ls                   files = get_ipython()
    %time trainer.train()         trainer.train()
    GRPOConfig?                   pass

Each line stays on its line, so that errors and origins name the line of the code cells, one after another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from groupwise.errors import ConfigError

PYTHON_CELLS = ("capture", "time", "timeit", "prun")
"""The cell magics below which Python stands."""
_CELL_MAGIC = re.compile(r"(?:[ \t]*(?:#[^\n]*)?\n)*[ \t]*%%(\w+)[^\n]*")
_COMMAND = re.compile(r"[!%?](?:[^\n]*\\\n)*[^\n]*")
_BARE = re.compile(r"(?:pip|conda|mamba|cd|ls)[ \t]+[\w.~/-](?:[^\n]*\\\n)*[^\n]*")
_TIMED = re.compile(r"%time[ \t]+(?=\S)")
_TOKEN = re.compile(
    r""""{3}(?:\\.|[^\\])*?"{3}|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*\'"""
    r"""|\#[^\n]*|\\\n|\n|[ \t]+|\w+|.""",
    re.DOTALL,
)


def python_of(text: str, *, source: str) -> str:
    """Return the Python of a notebook's code cells. Raises ConfigError for a file that is not a notebook; `source`
    names the file."""
    try:
        cells = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"malformed notebook: {source} has no cells in JSON") from None
    return "\n".join(_python(cell.removesuffix("\n")) for cell in cells)


def _python(cell: str) -> str:
    if magic := _CELL_MAGIC.match(cell):
        if magic[1] not in PYTHON_CELLS:
            return _lines(cell)
        cell = _lines(magic[0]) + cell[magic.end() :]
    return "".join(_statements(cell))


def _statements(cell: str) -> Iterator[str]:
    """Yield a cell in pieces. IPython's own may stand where a statement begins, or a value behind `=` or a block's
    `:`."""
    line: list[str] = []  # of the line that is read: its pieces
    before, depth, position = "\n", 0, 0  # before: the last piece that is neither space nor comment
    while position < len(cell):
        if depth == 0 and before in ("\n", "=", ":"):
            if timed := _TIMED.match(cell, position):
                position = timed.end()
            if command := _COMMAND.match(cell, position) or (before == "\n" and _BARE.match(cell, position)):
                line += ["get_ipython()" if before == "=" else "pass", _lines(command[0])]
                before, position = "pass", command.end()
                continue
        piece = _TOKEN.match(cell, position)[0]  # type: ignore[index]  # any character is a token
        position += len(piece)
        if piece == "?":  # help on what stands before it
            line[:] = [line[0] if line and line[0].isspace() else "", "pass"]
            continue
        line.append(piece)
        depth = max(0, depth + (piece in "([{") - (piece in ")]}"))
        if piece == "\n" and depth == 0:
            before = piece
            yield "".join(line)
            line.clear()
        elif not piece.isspace() and piece[0] not in "#\\":
            before = piece
    yield "".join(line)


def _lines(text: str) -> str:
    """Return as many lines as `text` has, empty."""
    return "\n" * text.count("\n")
