"""The token ids of images: made of an image's content, beyond every vocabulary.

    id = 2^62 + (first 46 bits of the image's SHA-256) 2^16 + place

An image takes places among a prompt's tokens, as many as its features, and each place has its own id. So two
prompts have equal ids exactly if their texts and images are equal, and everything that compares ids (shared prompts,
prefix caches, prefix trees, records of rollouts) is right about images without knowing of any.

    packed_ids          token ids as bytes, four for each of a text;  unpacked_ids  those ids
    vision_of(model)    the `Vision` of a model or its tokenizer; None where it reads text alone
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupwise.model.vision import Vision

FIRST = 1 << 62
PLACES = 1 << 16  # tokens of one image at most
HALF = 23  # bits of the 46
VISION = "_groupwise_vision"  # an attribute of a model and of its tokenizer


def vision_of(of: Any) -> Vision | None:
    """Return the eyes of a model, or of its tokenizer; None where it reads text alone."""
    return getattr(of, VISION, None)


def is_of_image(token: int) -> bool:
    """Return whether a token id is of an image."""
    return token >= FIRST


def is_first(token: int) -> bool:
    """Return whether the token id of an image is of its first place."""
    return token % PLACES == 0


def packed_ids(ids: Sequence[int]) -> bytes:
    """Return token ids as int32: a text's as they are, an image's as -1 - place and the two halves of its 46 bits."""
    packed = array("i")
    for token in ids:
        if token < FIRST:
            packed.append(token)
        else:
            key, place = divmod(token - FIRST, PLACES)
            packed.extend((-1 - place, key >> HALF, key & ((1 << HALF) - 1)))
    return packed.tobytes()


def unpacked_ids(data: bytes) -> tuple[int, ...]:
    """Return the inverse of `packed_ids`. Raises ValueError for bytes that are none of its."""
    packed = array("i", data)
    if min(packed, default=0) >= 0:
        return tuple(packed)
    ids, following = list[int](), iter(packed)
    for token in following:
        if token >= 0:
            ids.append(token)
            continue
        high, low = next(following, -1), next(following, -1)
        if min(high, low) < 0:
            raise ValueError("token ids of an image are cut off")
        ids.append(FIRST + ((high << HALF) + low) * PLACES - 1 - token)
    return tuple(ids)


def key_of(digest: str) -> int:
    """Return the first 46 bits of a SHA-256 in hexadecimal digits."""
    return int(digest[:12], 16) >> 2
