"""The table of what never ran in docs/performance.md, made from `groupwise.cli.untested`.

python docs/generate_untested.py    write the table into docs/performance.md
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from groupwise.cli.untested import places

TARGET = Path(__file__).parent / "performance.md"
BLOCK = re.compile(r"(<!-- untested -->\n).*?(<!-- end -->)", re.DOTALL)


def table() -> Iterator[str]:
    """The lines of the table, and their sum. Places are named by what they are for: line numbers change."""
    found = places()
    lines = sum(place.lines for place in found)
    yield f"{lines} lines in {len(found)} places (`groupwise doctor --untested` has their line numbers):"
    yield from ("", "| file | lines | what they are for |", "|---|---|---|")
    for place in found:
        yield f"| `{place.file}` | {place.lines} | {place.what} |"


def page(text: str) -> str:
    """The page with its table as it is now."""
    return BLOCK.sub(lambda found: "\n".join(["<!-- untested -->", *table(), "", "<!-- end -->"]), text)


if __name__ == "__main__":
    TARGET.write_text(page(TARGET.read_text(encoding="utf-8")), encoding="utf-8")
