"""Images that lie in a folder, each once, named by the SHA-256 of its file: as a server keeps them, and a run.

digests_of     the images that token ids are of, as far as they are kept
shown_image    the file of one, as an answer
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from starlette.responses import FileResponse

from groupwise.errors import GroupwiseError
from groupwise.model.image_tokens import FIRST, PLACES, is_first, is_of_image, key_of
from groupwise.pictures import kept_pictures

TYPES = {"ppm": "image/x-portable-anymap"}  # others are image/<format>
_KNOWN_DIGITS = 11  # of a digest, in hexadecimal: those that the 46 bits of a token id say whole


class ImageNotFoundError(GroupwiseError, LookupError):
    """No image of this digest is kept."""

    code, status, exit_code = "image_not_found", 404, 2


def digests_of(ids: Sequence[int], folder: Path) -> list[str | None]:
    """Return the digest of each image among a row's tokens, in order; None for one that is not in `folder`."""
    return [_digest_of(token, folder) for token in ids if is_of_image(token) and is_first(token)]


def _digest_of(token: int, folder: Path) -> str | None:
    key = (token - FIRST) // PLACES
    beginning = f"{key << 2:012x}"[:_KNOWN_DIGITS]
    return next((path.stem for path in kept_pictures(folder, beginning) if key_of(path.stem) == key), None)


def shown_image(folder: Path, digest: str, *, hint: str) -> FileResponse:
    """Return the image of this digest, as it was given. Raises ImageNotFoundError."""
    found = []
    if len(digest) == 64 and set(digest) <= set("0123456789abcdef"):
        found = kept_pictures(folder, digest)
    if not found:
        raise ImageNotFoundError(f"there is no image {digest[:64]!r}", hint=hint)
    kind = found[0].suffix.removeprefix(".")
    return FileResponse(found[0], media_type=TYPES.get(kind, f"image/{kind}"))
