"""Seeds from what they are for."""

from __future__ import annotations

import hashlib


def seed_of(*parts: int | str) -> int:
    """Return a 63-bit seed that depends on all of `parts`."""
    digest = hashlib.blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
