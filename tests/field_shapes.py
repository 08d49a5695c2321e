"""Rows as the datasets of the field have them, made here: a column more or less is a dataset that nobody could read."""

from __future__ import annotations

import json
from pathlib import Path

SHAPES = {
    "gsm8k": {
        "question": "Ann has 3 eggs and buys 1,200. How many has she?",
        "answer": "3+1200=<<3+1200=1203>>\n#### 1,203",
    },
    "math": {
        "problem": "Halve $1$.",
        "level": "Level 1",
        "solution": r"It is $\boxed{\frac{1}{2}}$.",
        "type": "Algebra",
    },
    "countdown": {"target": 98, "nums": [44, 19, 35]},
    "reverse_text": {"prompt": "The cat."},
}


def write_rows(path: Path, name: str, count: int = 1) -> None:
    """A file of rows in the shape of a dataset."""
    path.write_text("".join(json.dumps(SHAPES[name]) + "\n" for _ in range(count)))
