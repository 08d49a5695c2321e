"""The tables of docs/metrics.md, made from `groupwise.algo.metrics.definitions`.

    python docs/generate_metrics.py            write the tables into docs/metrics.md
    python docs/generate_metrics.py --check    exit with 1 if they are not what would be written

A table stands between `<!-- SECTION -->` and `<!-- end -->`; the rest of the page is written by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if it is not up to date")
    check = parser.parse_args().check
    before = TARGET.read_text(encoding="utf-8")
    after = page(before)
    if not check:
        TARGET.write_text(after, encoding="utf-8")
    return int(check and before != after)


if __name__ == "__main__":
    sys.exit(main())
