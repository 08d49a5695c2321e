"""Packages that ours is held against, imported by the first test that reads a name of one: every process of the suite
collects every test, and would take seconds to import packages whose tests another process runs."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest


class Peer:
    """Stands for a module; what is read of it is the module's. It has no private names: plugins of pytest look for
    their own in everything that a test file holds."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


def peer(name: str) -> Any:
    """Return a module that is not imported yet. Without its package the tests of the file that asks are skipped."""
    package = name.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; the dev extra has it", allow_module_level=True)
    return Peer(name)
