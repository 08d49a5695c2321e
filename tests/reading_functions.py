"""Functions that read a body in place of a route's; readers import them from here, and from here nothing heavy."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from groupwise.config.serve import MIB, ServeConfig

if TYPE_CHECKING:
    from groupwise.server.reader import TextModel


def where(raw: bytes, base: TextModel, config: ServeConfig) -> tuple[int, str, int, str | None]:
    """The process, the body's digest, its priority, and what it knows of the key."""
    return os.getpid(), hashlib.sha256(raw).hexdigest(), os.nice(0), config.api_key


def refuse(raw: bytes, base: TextModel, config: ServeConfig, *, error: Exception) -> None:
    raise error


def swell(raw: bytes, base: TextModel, config: ServeConfig) -> None:
    kept = [bytearray(MIB) for _ in range(1 << 14)]
    assert kept


def swell_inside(raw: bytes, base: TextModel, config: ServeConfig) -> None:
    """In compiled code, which keeps the interpreter's lock and does not ask Python whether it may."""
    json.loads("[" + "[]," * (1 << 23) + "[]]")


def die(raw: bytes, base: TextModel, config: ServeConfig) -> None:
    os.abort()


def linger(raw: bytes, base: TextModel, config: ServeConfig, *, note: str) -> None:
    Path(note).write_text(str(os.getpid()))
    time.sleep(60)


def imported(raw: bytes, base: TextModel, config: ServeConfig) -> frozenset[str]:
    """The packages that a reader has imported."""
    return frozenset(name for name in sys.modules if "." not in name)
