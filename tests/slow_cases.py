"""Which cases of a parametrised test are quick: one of each kind, and of what is crossed each value at least once with
the hardest of the others. The rest differ by their data only, and are slow."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import product
from typing import Any

import pytest


def slow_but(quick: Collection[Any], *, of: Iterable[Any]) -> list[Any]:
    """All of `of` as parameters; those that are not among `quick` are not part of `make test`."""
    return [each if each in quick else pytest.param(each, marks=pytest.mark.slow) for each in of]


def crossed(*values: Iterable[Any], quick: Callable[..., bool]) -> list[Any]:
    """Every combination as parameters of as many names; those of which `quick` is false are not part of `make test`."""
    return [pytest.param(*each, marks=() if quick(*each) else pytest.mark.slow) for each in product(*values)]
