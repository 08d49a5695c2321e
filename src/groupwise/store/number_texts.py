"""Long lists of numbers in JSON, character by character as `json.dumps` writes them: floats in a third of the time.

Token ids and their log-probabilities are most of what a rollouts file costs. Python finds the shortest decimal of a
float by an algorithm of 1990, for half a microsecond each; pydantic's serialiser (Rust) by a newer one, with the same
digits, as there is one shortest decimal that is nearest. The two differ in how they write numbers below 0.0001
(1e-05 and 0.00001, 1e-06 and 1e-6), which is put right here, and from 1e16 on: lists with such numbers are left to
Python.

    numbers = NumberTexts()
    text = json.dumps({"token_ids": numbers(ids)})       a long list leaves a mark in the text
    numbers.filled(text)                                 ... which what it stands for takes the place of

Numbers that came as JSON keep it (`NumbersRead`), and it is written as it came: nothing is printed that was just read.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import TypeAdapter

LONG = 48  # numbers from which a list is worth its mark
_INTS, _FLOATS = TypeAdapter(tuple[int, ...]), TypeAdapter(tuple[float, ...])

T = TypeVar("T", int, float)


class NumbersRead(tuple[T, ...]):
    """Numbers that were read from JSON, and that JSON: one line without spaces. What is made of them, also by
    pickling, is a plain tuple."""

    json: bytes

    @classmethod
    def of(cls, values: tuple[T, ...], json: bytes) -> tuple[T, ...]:
        """Return the values, which were read from `json`; without it where it is laid out otherwise."""
        if b" " in json or b"\n" in json or b"\r" in json or b"\t" in json:
            return values
        read = cls(values)
        read.json = json
        return read

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (list(self),)


class NumberTexts:
    """The long lists of one JSON text; see above."""

    def __init__(self) -> None:
        self._mark, self._texts = secrets.token_hex(16), list[str]()

    def __call__(self, values: Sequence[Any]) -> str | None:
        """Return a mark that stands for these values in `json.dumps`; None where they are few, large, or others than
        whole numbers alone or finite floats alone."""
        if len(values) < LONG:
            return None
        text = _spaced(values.json) if isinstance(values, NumbersRead) else _text_of(tuple(values))
        if text is None:
            return None
        self._texts.append(text)
        return f"{self._mark}{len(self._texts) - 1}"

    def filled(self, text: str) -> str:
        """Return the text with the numbers in the place of their marks."""
        parts = re.split(f'"{self._mark}(\\d+)"', text)
        parts[1::2] = [self._texts[int(number)] for number in parts[1::2]]
        return "".join(parts)


def _text_of(values: tuple[Any, ...]) -> str | None:
    kinds = set(map(type, values))
    if kinds == {int}:
        return _spaced(_INTS.dump_json(values))
    if kinds != {float}:
        return None
    import numpy as np  # imported here: a program that only reads a run does not need it

    size_N = np.abs(np.fromiter(values, float, len(values)))
    if not size_N.max() < 1e16:  # nor is NaN
        return None
    text = _FLOATS.dump_json(values)
    small = np.flatnonzero((size_N < 1e-4) & (size_N > 0)).tolist()
    if not small:
        return _spaced(text)
    parts = text[1:-1].decode().split(",")
    for at in small:
        parts[at] = _as_python(parts[at])
    return f"[{', '.join(parts)}]"


def _spaced(text: bytes) -> str:
    return text.replace(b",", b", ").decode()


def _as_python(small: str) -> str:
    """Return a number below 0.0001 as `repr` writes it.

    >>> list(map(_as_python, ["-0.0000123", "0.00001", "-1.5e-6", "1e-10"]))
    ['-1.23e-05', '1e-05', '-1.5e-06', '1e-10']
    """
    digits, exponent, power = small.partition("e-")
    if exponent:
        return small if len(power) > 1 else f"{digits}e-0{power}"
    sign, _, digits = small.partition("0.0000")
    return f"{sign}{digits[0]}.{digits[1:]}e-05" if len(digits) > 1 else f"{sign}{digits}e-05"
