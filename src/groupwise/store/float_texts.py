"""Long lists of floats in JSON, character by character as `json.dumps` writes them, in a third to a half of the time.

Log-probabilities are most of what a rollouts file costs. Python finds the shortest decimal of a float by an algorithm
of 1990, for half a microsecond each; pydantic's serialiser (Rust) by a newer one, with the same digits, as there is one
shortest decimal that is nearest. The two differ in how they write numbers below 0.0001 and from 1e16 on (1e-05 and
0.00001), so these are written by Python.

    floats = FloatTexts()
    text = json.dumps({"logprobs": floats(logprobs)})       a long list leaves a mark in the text
    floats.filled(text)                                     ... which what it stands for takes the place of
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any

from pydantic_core import to_json

LONG = 48  # floats from which a list is worth its mark


class FloatTexts:
    """The long lists of one JSON text; see above."""

    def __init__(self) -> None:
        self._mark, self._texts = secrets.token_hex(16), list[str]()

    def __call__(self, values: Sequence[Any]) -> str | None:
        """Return a mark that stands for these values in `json.dumps`; None where they are few, or others than finite
        floats."""
        text = _text_of(values) if len(values) >= LONG and set(map(type, values)) == {float} else None
        if text is None:
            return None
        self._texts.append(text)
        return f"{self._mark}{len(self._texts) - 1}"

    def filled(self, text: str) -> str:
        """Return the text with the floats in the place of their marks."""
        parts = re.split(f'"{self._mark}(\\d+)"', text)
        parts[1::2] = [self._texts[int(number)] for number in parts[1::2]]
        return "".join(parts)


def _text_of(values: Sequence[float]) -> str | None:
    import numpy as np  # not by whoever merely reads a run

    size_N = np.abs(np.fromiter(values, float, len(values)))
    if not np.isfinite(size_N).all():
        return None
    otherwise = np.flatnonzero(((size_N < 1e-4) & (size_N > 0)) | (size_N >= 1e16)).tolist()
    text = to_json(values)
    if not otherwise:
        return text.replace(b",", b", ").decode()
    parts = text[1:-1].decode().split(",")
    for at in otherwise:
        parts[at] = repr(values[at])
    return f"[{', '.join(parts)}]"
