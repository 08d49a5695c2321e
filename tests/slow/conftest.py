"""A browser, and a page in it that shows the `place` of the module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from crash.place import Place

from .chromium import launched, watched


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as browser:
        yield browser


@pytest.fixture
def page(browser: Any, place: Place) -> Iterator[Any]:
    with watched(browser, place.url) as page:
        yield page
