"""Values with which a key of another system's table asks for what it is named for."""

from __future__ import annotations

from typing import Any

from groupwise.config.formats.keys import Key


def asking(key: Key) -> Any:
    """Return such a value; the first that the key takes and that does not say that it is off."""
    for value in (7, "x", True, 0.5, [3], {"a": 1}, False):
        try:
            if key.kind(value) not in key.off:
                return value
        except ValueError:
            continue
    raise AssertionError(f"no value for {key.name}")
