"""The tables of docs/migrating.md, made from the code that reads the files.

    python docs/generate_migrating.py            write the tables into docs/migrating.md
    python docs/generate_migrating.py --check    exit with 1 if they are not what would be written

A table stands between `<!-- NAME -->` and `<!-- end -->`; the rest of the page is written by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from groupwise.configfile import inline
from groupwise.frontends import aitraining_keys, axolotl_keys, trl_keys
from groupwise.frontends.keys import Key

TARGET = Path(__file__).parent / "migrating.md"
TABLES = {"axolotl": axolotl_keys.KEYS, "trl": trl_keys.KEYS, "aitraining": aitraining_keys.KEYS}
BLOCK = re.compile(r"(<!-- ({}) -->\n).*?(<!-- end -->)".format("|".join(TABLES)), re.DOTALL)


def table(keys: Iterable[Key]) -> Iterator[str]:
    """The lines of one system's three tables: what acts, what has no effect, what is not here."""
    keys = list(keys)
    yield from ("", "| key | here | default there | how |", "|---|---|---|---|")
    for key in keys:
        if key.fate in ("plain", "made"):
            here = ", ".join(f"`{each}`" for each in key.here)
            default = "" if key.default is None else f"`{inline(key.default)}`"
            yield f"| `{key.name}` | {here} | {default} | {key.what} |"
    yield from ("", "| no effect | because |", "|---|---|")
    reasons = dict.fromkeys(key.what for key in keys if key.fate == "idle")
    for reason in reasons:
        names = ", ".join(f"`{key.name}`" for key in keys if key.fate == "idle" and key.what == reason)
        yield f"| {names} | {reason} |"
    yield from ("", "| not here | why | what runs |", "|---|---|---|")
    for key in keys:
        if key.fate == "absent":
            instead = f"`{key.instead}`" if key.instead else ""
            yield f"| `{key.name}` | {key.what} | {instead} |"
    yield ""


def page(text: str) -> str:
    """The page with its tables made anew."""
    return BLOCK.sub(lambda found: found[1] + "\n".join(table(TABLES[found[2]])) + "\n" + found[3], text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether the page is what would be written")
    text = TARGET.read_text(encoding="utf-8")
    made = page(text)
    if parser.parse_args().check:
        return int(made != text)
    TARGET.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
