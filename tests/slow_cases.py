"""Which cases of a parametrised test are quick: one of each kind. The rest differ by their data only, and are slow."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(quick: Collection[Any], *, of: Iterable[Any]) -> list[Any]:
    """All of `of` as parameters; those that are not among `quick` are not part of `make test`."""
    return [each if each in quick else pytest.param(each, marks=pytest.mark.slow) for each in of]
