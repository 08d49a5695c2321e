"""Text and numbers as they stand on the page."""

from __future__ import annotations

import math

from groupwise.tasks.transcript import visible

# Beside what `visible` replaces: direction marks, line separators, invisible joints, and lone surrogates, which UTF-8
# cannot hold.
_HIDDEN = (0x061C, 0x200B, 0x200E, 0x200F, 0x2028, 0x2029, 0x2060, 0xFEFF, 0xFFFE, 0xFFFF, *range(0xD800, 0xE000))
_VISIBLE = dict.fromkeys(_HIDDEN, 0xFFFD)


def plain(text: str, *, limit: int | None = None) -> str:
    """`text` with everything that is not seen, or that reorders what is, replaced by something visible.

    >>> plain("a\\u200fb\\x00"), plain("abcdef", limit=4)
    ('a\\ufffdb␀', 'abc…')
    """
    if limit is not None and len(text) > limit:
        text = text[: limit - 1] + "…"
    return visible(text).translate(_VISIBLE)


def number(value: float | None) -> str:
    """A number with three significant digits, or four and more where it is large.

    >>> [number(x) for x in (0.24609, 1231.97, 6.01e-7, 0.0, 12.0, -0.5, None)]
    ['0.246', '1,232', '6.0e−7', '0', '12', '−0.5', '–']
    """
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    if size >= 1000:
        text = f"{size:,.0f}"
    elif size and size < 1e-3:
        mantissa, exponent = f"{size:.1e}".split("e")
        text = f"{mantissa}e{int(exponent)}".replace("-", "−")
    else:
        text = f"{size:.3g}"
    return f"−{text}" if value < 0 and text != "0" else text


def reward(value: float | None) -> str:
    """A mean reward, in a form that aligns in columns.

    >>> reward(0.98437), reward(1.0)
    ('0.984', '1.000')
    """
    return "–" if value is None or not math.isfinite(value) else f"{value:,.3f}".replace("-", "−")


def change(value: float | None) -> str:
    """A difference of rewards, with its sign.

    >>> change(0.125), change(-2), change(0.0)
    ('+0.125', '−2.000', '0.000')
    """
    return f"+{reward(value)}" if value is not None and value > 0 else reward(value)


def duration(seconds: float) -> str:
    """Seconds as one would say them.

    >>> duration(4.26), duration(125), duration(7380)
    ('4.3 s', '2 min 5 s', '2 h 3 min')
    """
    if seconds < 60:
        return f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours} h {minutes_left} min" if hours else f"{minutes} min {rest} s"
