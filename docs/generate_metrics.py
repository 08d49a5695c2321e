"""The tables of docs/metrics.md, made from `groupwise.algo.metrics.definitions`.

    python docs/generate_metrics.py    write the tables into docs/metrics.md

A table stands between `<!-- SECTION -->` and `<!-- end -->`; the rest of the page is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from groupwise.algo.metrics import definitions

TARGET = Path(__file__).parent / "metrics.md"
SECTIONS = tuple(dict.fromkeys(each.section for each in definitions()))
BLOCK = re.compile(rf"(<!-- ({'|'.join(SECTIONS)}) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(section: str) -> Iterator[str]:
    """The lines of one section's table."""
    yield from ("| metric | what it is | good | otherwise |", "|---|---|---|---|")
    for each in definitions():
        if each.section == section:
            yield f"| `{each.metric}` | {each.means} | {each.good} | {each.otherwise} |"


def page(text: str) -> str:
    """The page with its tables as they are now."""
    return BLOCK.sub(lambda found: "\n".join([found[1], *table(found[2]), "", found[3]]), text)


if __name__ == "__main__":
    TARGET.write_text(page(TARGET.read_text(encoding="utf-8")), encoding="utf-8")
