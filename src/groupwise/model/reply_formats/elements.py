"""Calls whose parameters are elements, <name>value</name>: where one ends, and what it says.

Values are written as they are, so that a closing tag in one is no different from its own. It closes where what must
follow it does: the next parameter, or the end of the call.
"""

from __future__ import annotations

import re
from typing import Any

from groupwise.model.reply_formats.format import ParsedCall, Tools
from groupwise.model.reply_formats.json_text import add_typed, call_of, types_of

MOST_ENDS = 64  # markers that are tried as the end of one call


def end_behind(text: str, start: int, end: str, behind: str, *, last: bool) -> int:
    """Return where the first marker `end` from `start` on begins that stands right behind the text `behind`; -1 where
    there is none yet. If no more text comes (`last`), the first one counts where none does. After the first
    `MOST_ENDS` that stand elsewhere, the next one counts wherever it stands."""
    first = close = text.find(end, start)
    for _ in range(MOST_ENDS):
        if close < 0 or text[start:close].rstrip().endswith(behind):
            break
        close = text.find(end, close + 1)
    return first if close < 0 and last else close


def call_with(
    name: str, body: str, parameter: re.Pattern[str], tools: Tools, *, of_form: str, at: int = 0
) -> ParsedCall | str:
    """Return a call, or why there is none.

    Args:
        body: the text of the call's parameters.
        parameter: matches one, with its name and its value as groups.
        of_form: the form of a parameter, for the reason.
        at: the position in the call at which the body begins.
    """
    arguments, types, position = dict[str, Any](), types_of(name, tools), 0
    while (found := parameter.match(body, position)) is not None:
        add_typed(arguments, found[1].strip(), found[2], types)
        position = found.end()
    if body[position:].strip():
        return f"The call has text outside {of_form}, from its character {at + position} on."
    return call_of({"name": name, "arguments": arguments})
