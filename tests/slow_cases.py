"""Which cases of a parametrised test are quick: one of each kind, and of what is crossed each value at least once with
the hardest of the others. The rest differ by their data only, and are slow; those that are seconds of a processor, and
differ by more, are long: not part of `make test`, but of CI (`make long`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import product
from typing import Any

import pytest


def slow_but(quick: Collection[Any], *, of: Iterable[Any], long: Collection[Any] = ()) -> list[Any]:
    """Return all of `of` as parameters; those that are neither among `quick` nor among `long` are slow."""

    def case(each: Any) -> Any:
        return long_case(each) if each in long else pytest.param(each, marks=() if each in quick else pytest.mark.slow)

    return [case(each) for each in of]


def long_case(*values: Any, id: str | None = None) -> Any:
    """Return one long case of a parametrised test."""
    return pytest.param(*values, id=id, marks=pytest.mark.long)


def crossed(*values: Iterable[Any], quick: Callable[..., bool]) -> list[Any]:
    """Every combination as parameters of as many names; those of which `quick` is false are not part of `make test`."""
    return [pytest.param(*each, marks=() if quick(*each) else pytest.mark.slow) for each in product(*values)]
