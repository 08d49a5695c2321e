"""Repositories with failing tests: modules with a few sums that are not filled in yet."""

import random


def cases(first: int = 0, count: int = 400, sums: int = 2) -> list[dict]:
    """Return rows with the module and the values that its tests expect. Rows from 1,000,000 on are held out."""
    rows = []
    for number in range(first, first + count):
        draw = random.Random(number)
        terms = [(f"total_{i}", f"{draw.randint(1, 9)} + {draw.randint(1, 9)}") for i in range(sums)]
        text = "".join(f"{name} = None  # {what}\n" for name, what in terms)
        rows.append({"files": {"totals.py": text, "wanted.txt": text}, "tests": {"wanted.txt": text}})
    return rows
