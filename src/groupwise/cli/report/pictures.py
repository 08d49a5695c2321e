"""The pictures of a run in its report: small, each once, and so many of them as fit.

A picture becomes a data: URL. One that is small already stays as it is; others are drawn again at most SIDE pixels a
side, which needs Pillow (`groupwise[images]`).
"""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Iterable
from pathlib import Path

from groupwise.errors import GroupwiseError
from groupwise.pictures import Picture, kept_pictures

MOST_BYTES = 2_000_000  # of the data: URLs of all runs together
SIDE = 320  # pixels
AS_IT_IS = 8_000  # bytes of a file that is not made smaller
SHOWN = {".png": "image/png", ".jpeg": "image/jpeg", ".webp": "image/webp", ".gif": "image/gif"}  # by any browser


def embedded(addresses: Iterable[str | None], folder: Path, *, room: int) -> dict[str, str]:
    """Return the data: URL of each picture of `folder` that an address ends with, the first ones that fit in `room`
    bytes; none of what cannot be read."""
    found: dict[str, str] = {}
    for address in dict.fromkeys(addresses):
        files = kept_pictures(folder, address.rpartition("/")[2]) if address else []
        url = _url_of(files[0]) if files else None
        if address is None or url is None:
            continue
        if (room := room - len(url)) < 0:
            break
        found[address] = url
    return found


def _url_of(file: Path) -> str | None:
    try:
        kind, data = SHOWN.get(file.suffix), file.read_bytes()
        if kind is None or len(data) > AS_IT_IS:
            kind, data = "image/webp", _smaller(data)
    except (OSError, ImportError, GroupwiseError):
        return None
    return f"data:{kind};base64,{b64encode(data).decode()}"


def _smaller(data: bytes) -> bytes:
    """Return a WebP of the image. Raises DataError for what cannot be decoded, ImportError without Pillow."""
    image = Picture(data).pixels()
    image.thumbnail((SIDE, SIDE))
    written = io.BytesIO()
    image.save(written, format="WEBP", quality=80)
    return written.getvalue()
