"""Values that models write nearly as JSON, each in its way: how they are read, and where the marker behind them is."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from groupwise.model.reply_formats.json_text import SPACE, end_at

MOST_DEPTH = 64  # lists and objects within others
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_WORD = re.compile("|".join(_WORDS))


class Unreadable(Exception):
    """Says what is wrong and where; `in_string`: all that follows may be part of a string."""

    def __init__(self, why: str, at: int, *, in_string: bool = False):
        super().__init__(why)
        self.why, self.at, self.in_string = why, at, in_string


class LiteralReader(ABC):
    """Reads a text from `position` on, and moves it behind what was read. Space in front of anything is passed over;
    what is not there raises Unreadable."""

    def __init__(self, text: str, position: int = 0):
        self.text, self.position = text, position

    @abstractmethod
    def compound(self, depth: int) -> Any:
        """Read a string, a list or an object, which stands in `depth` others."""

    def value(self, depth: int = 0) -> Any:
        """Read any value, which stands in `depth` others."""
        self.skip()
        if depth > MOST_DEPTH:
            raise Unreadable("a value is nested too deeply", self.position)
        if (word := _WORD.match(self.text, self.position)) is not None:
            self.position = word.end()
            return _WORDS[word[0]]
        if (number := _NUMBER.match(self.text, self.position)) is None:
            return self.compound(depth)
        try:
            value = float(number[0]) if number[1] or number[2] else int(number[0])
        except ValueError:  # of thousands of digits
            raise Unreadable("a number is too long", self.position) from None
        self.position = number.end()
        return value

    def items(self, close: str) -> Iterator[None]:
        """Yield where an item is to be read, until `close` is there instead. Commas stand between them."""
        first = True
        while not self.takes(close):
            if not first:
                self.expect(",")
            yield
            first = False

    def takes(self, sign: str) -> bool:
        """Return whether `sign` is next; if so, it is read."""
        self.skip()
        found = self.text.startswith(sign, self.position)
        self.position += len(sign) if found else 0
        return found

    def expect(self, sign: str) -> None:
        """Read `sign`."""
        if not self.takes(sign):
            raise Unreadable(f"{sign!r} is missing", self.position)

    def match(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        """Read what matches; `what` it is, for the error."""
        self.skip()
        found = pattern.match(self.text, self.position)
        if found is None:
            raise Unreadable(f"no {what} begins", self.position)
        self.position = found.end()
        return found

    def skip(self) -> None:
        """Read space, if there is some."""
        self.position = end_at(SPACE, self.text, self.position)

    def mark_behind(self, mark: str, read: Callable[[], object], *, last: bool) -> int:
        """Return where the first `mark` behind what `read` reads begins; -1 where it is not there, or more text may
        show that what is there is part of a string. If no more text comes (`last`), the first one counts where none
        does."""
        begin = self.position
        try:
            read()
        except Unreadable as error:
            self.position = len(self.text) if error.in_string else error.at
        close = self.text.find(mark, self.position)
        return self.text.find(mark, begin) if close < 0 and last else close
