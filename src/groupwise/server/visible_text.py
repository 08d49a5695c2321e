"""Text as it stands on the page."""

from __future__ import annotations

from groupwise.tasks.transcript import visible

# In addition to the characters that `visible` replaces: direction marks, line separators, invisible joints, and lone
# surrogates, which UTF-8 cannot hold.
_HIDDEN = (0x061C, 0x200B, 0x200E, 0x200F, 0x2028, 0x2029, 0x2060, 0xFEFF, 0xFFFE, 0xFFFF, *range(0xD800, 0xE000))

_VISIBLE = dict.fromkeys(_HIDDEN, 0xFFFD)


def plain(text: str, *, limit: int | None = None) -> str:
    """Return `text` with invisible characters, and those that reorder others, replaced by visible ones.

    >>> plain("a\\u200fb\\x00"), plain("abcdef", limit=4)
    ('a\\ufffdb␀', 'abc…')
    """
    if limit is not None and len(text) > limit:
        text = text[: limit - 1] + "…"
    return visible(text).translate(_VISIBLE)
