"""The token ids of images: made of an image's content, beyond every vocabulary.

    id = 2^62 + (first 46 bits of the image's SHA-256) 2^16 + place

An image takes places among a prompt's tokens, as many as its features, and each place has an id of its own. So two
prompts have equal ids exactly if their texts and images are equal, and everything that compares ids (shared prompts,
prefix caches, prefix trees, records of rollouts) is right about images without knowing of any.

    vision_of(model)    the `Vision` of a model or its tokenizer; None where it reads text alone
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupwise.model.vision import Vision

FIRST = 1 << 62
PLACES = 1 << 16  # tokens of one image at most
VISION = "_groupwise_vision"  # an attribute of a model and of its tokenizer


def vision_of(of: Any) -> Vision | None:
    """Return the eyes of a model, or of its tokenizer; None where it reads text alone."""
    return getattr(of, VISION, None)


def is_of_image(token: int) -> bool:
    """Return whether a token id is of an image."""
    return token >= FIRST


def key_of(digest: str) -> int:
    """Return the first 46 bits of a SHA-256 in hexadecimal digits."""
    return int(digest[:12], 16) >> 2
