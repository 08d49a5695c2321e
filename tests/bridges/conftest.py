"""A server with the Tinker wire, and a client of it, for the tests that speak the protocol by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tinker_wire import Wire
    from whole_server import Whole


@pytest.fixture(scope="module")
def tinker(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    """One server for a module. A request waits half a second for an earlier one."""
    from tinker_wire import tinker_site  # which needs protobuf

    with tinker_site(tmp_path_factory.mktemp("state"), model_dir, tinker_gap_s=0.5) as site:
        yield site


@pytest.fixture
def wire(tinker: Whole) -> Iterator[Wire]:
    """A session of its own."""
    from tinker_wire import Wire

    wire = Wire(tinker)
    yield wire
    wire.ok(f"sessions/{wire.session}/finish")
