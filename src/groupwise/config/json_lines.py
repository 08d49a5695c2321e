"""Cuts a text of JSON lines into its lines."""

from __future__ import annotations


def json_lines(text: str) -> list[tuple[int, str]]:
    """Return the lines of JSONL that are not blank, with their numbers. A text in JSON may have U+2028 or U+0085 in it,
    at which `str.splitlines` would cut."""
    return [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
