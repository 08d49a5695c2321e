"""Records of an engine about tokens, besides their ids and log-probabilities, with which the trainer computes the same.

RoutedExperts    the experts that the routers of a mixture chose (`train.router_replay`); `RoutingShape` of which
SamplingMask     the part of the vocabulary that each token could be drawn from (top_p, a grammar, ...)
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RoutedExperts:
    """The experts that the routers of a mixture chose for tokens: whole numbers [tokens, layers, K], of the layers that
    have a router; -1 where that was not recorded. `data` are their bytes, of 8 bits where that suffices."""

    shape: tuple[int, int, int]
    data: bytes = field(repr=False)

    @classmethod
    def of(cls, chosen_TLK: Any) -> RoutedExperts:
        """Make it from a NumPy array of integers below 32768."""
        kind = "int8" if chosen_TLK.max(initial=0) < 128 else "<i2"
        return cls(chosen_TLK.shape, chosen_TLK.astype(kind).tobytes())

    def to_bytes(self) -> bytes:
        """Return it as it is stored and sent."""
        return _ROUTED.pack(_ROUTED_MARK, *self.shape) + self.data

    @classmethod
    def from_bytes(cls, data: bytes) -> RoutedExperts:
        """Return the inverse of `to_bytes`. Raises ValueError for what is none."""
        if len(data) < _ROUTED.size or data[:4] != _ROUTED_MARK:
            raise ValueError("these bytes are no record of experts")
        _, tokens, layers, chosen = _ROUTED.unpack_from(data)
        routed = cls((tokens, layers, chosen), data[_ROUTED.size :])
        if min(tokens + 1, layers, chosen) < 1 or len(routed.data) not in (math.prod(routed.shape) * k for k in (1, 2)):
            raise ValueError(f"a record of experts [{tokens}, {layers}, {chosen}] cannot have {len(data)} bytes")
        if (least := routed.array().min(initial=0)) < -1:
            raise ValueError(f"a record of experts has expert {least}; valid: from 0, and -1 where none was recorded")
        return routed

    def first(self, tokens: int) -> RoutedExperts:
        """Return those of the first `tokens` tokens."""
        bytes_each = len(self.data) // max(1, self.shape[0])
        return RoutedExperts((tokens, *self.shape[1:]), self.data[: tokens * bytes_each])

    def array(self) -> Any:
        """Return it as a NumPy array [tokens, layers, K]."""
        import numpy as np

        kind = "int8" if len(self.data) == math.prod(self.shape) else "<i2"
        return np.frombuffer(self.data, kind).reshape(self.shape)


@dataclass(frozen=True)
class RoutingShape:
    """The shape of a mixture's routing: its layers with a router, the experts that each chooses for a token, and of how
    many."""

    layers: int
    chosen: int
    experts: int

    def has(self, routed: RoutedExperts) -> bool:
        """Return whether these can be experts of such a model."""
        return routed.shape[1:] == (self.layers, self.chosen) and routed.array().max(initial=-1) < self.experts


_ROUTED = struct.Struct("<4siii")  # mark, tokens, layers, experts of a token
_ROUTED_MARK = b"expt"

MaskEntry = tuple[int, Any]  # of one token in a `SamplingMask`: its kind, and a NumPy array of 32-bit words
KEPT, DROPPED, BITMAP = 0, 1, 2
_HEADER = struct.Struct("<4sii")  # mark, vocabulary, tokens
_MARK = b"kept"


@dataclass(frozen=True)
class SamplingMask:
    """Records for each of T tokens the part of the vocabulary from which it could be drawn, after top_p, top_k, min_p,
    min_tokens and a grammar (the "keep sampling mask" of the DeepSeek-V3.2 report, arXiv 2512.02556).

    Each token has a kind and a number of 32-bit words; the kind is the one that needs the fewest words:

        KEPT      the ids that could be drawn, ascending
        DROPPED   the ids that could not; without any it was drawn from the whole vocabulary
        BITMAP    a bit for each id, the lowest first: 1 is kept

    With a vocabulary of 6, tokens that could be 1 or 4, anything, and anything but 5:

    >>> import numpy as np
    >>> mask = SamplingMask.of(np.array([[0, 1, 0, 0, 1, 0], [1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]], bool), most=2)
    >>> [(kind, words.tolist()) for kind, words in mask.entries()]
    [(0, [1, 4]), (1, []), (1, [5])]
    >>> mask.has([4, 0, 5]), SamplingMask.from_bytes(mask.to_bytes()) == mask
    ([True, True, False], True)

    `kinds` are the bytes of T int8, `lengths` (in words) of T little-endian int32, `words` those of all tokens.
    """

    vocabulary: int
    kinds: bytes = field(repr=False)
    lengths: bytes = field(repr=False)
    words: bytes = field(repr=False)

    @classmethod
    def of_entries(cls, vocabulary: int, entries: Sequence[MaskEntry]) -> SamplingMask:
        """Make it from the entries of all tokens."""
        import numpy as np

        lengths = np.array([len(words) for _, words in entries], "<i4").tobytes()
        words = b"".join(words.astype("<i4", copy=False).tobytes() for _, words in entries)
        return cls(vocabulary, bytes(kind for kind, _ in entries), lengths, words)

    @classmethod
    def of(cls, kept_TV: Any, *, most: int | None = None) -> SamplingMask:
        """Return the mask of a NumPy array of bools [T, vocabulary]; tokens with more than `most` ids to list, or a bit
        for each id, are bitmaps."""
        vocabulary = kept_TV.shape[1]
        return cls.of_entries(vocabulary, [mask_entry(row, most=most) for row in kept_TV])

    @classmethod
    def whole(cls, vocabulary: int, tokens: int) -> SamplingMask:
        """Make it of this many tokens, each drawn from the whole vocabulary."""
        return cls(vocabulary, bytes([DROPPED]) * tokens, bytes(4 * tokens), b"")

    @classmethod
    def join(cls, parts: Sequence[SamplingMask]) -> SamplingMask:
        """Return those of the tokens of all parts, in order. Raises ValueError where they are of several
        vocabularies."""
        vocabularies = sorted({part.vocabulary for part in parts})
        if len(vocabularies) != 1:
            raise ValueError(f"sampling masks of vocabularies of {vocabularies} ids cannot be joined")
        columns = (b"".join(getattr(part, name) for part in parts) for name in ("kinds", "lengths", "words"))
        return cls(vocabularies[0], *columns)

    def __len__(self) -> int:
        return len(self.kinds)

    @property
    def is_whole(self) -> bool:
        """Return whether every token was drawn from the whole vocabulary."""
        return not self.words and all(kind == DROPPED for kind in self.kinds)

    def entries(self) -> list[MaskEntry]:
        """Return the kind and the words (a NumPy array of int32) of each token."""
        import numpy as np

        ends = np.frombuffer(self.lengths, "<i4").astype("int64").cumsum()
        parts = np.split(np.frombuffer(self.words, "<i4"), ends[:-1]) if len(ends) else []
        return list(zip(self.kinds, parts, strict=True))

    def cut(self, start: int, stop: int | None = None) -> SamplingMask:
        """Return those of the tokens [start:stop]."""
        return SamplingMask.of_entries(self.vocabulary, self.entries()[start:stop])

    def has(self, ids: Sequence[int]) -> list[bool]:
        """Return whether each token, by its id, is in its part of the vocabulary."""
        return [_is_kept(token, *entry) for token, entry in zip(ids, self.entries(), strict=True)]

    def array(self) -> Any:
        """Return the mask as a NumPy array of bools [T, vocabulary]."""
        import numpy as np

        rows = [_mask_row(kind, words, self.vocabulary) for kind, words in self.entries()]
        return np.stack(rows) if rows else np.zeros((0, self.vocabulary), bool)

    def to_bytes(self) -> bytes:
        """Return the bytes that are stored and sent."""
        return _HEADER.pack(_MARK, self.vocabulary, len(self)) + self.kinds + self.lengths + self.words

    @classmethod
    def from_bytes(cls, data: bytes) -> SamplingMask:
        """Return the inverse of `to_bytes`. Raises ValueError for what is none."""
        if len(data) < _HEADER.size or data[:4] != _MARK:
            raise ValueError("these bytes are no sampling mask")
        _, vocabulary, tokens = _HEADER.unpack_from(data)
        ends = [_HEADER.size + size * tokens for size in (0, 1, 5)]
        if vocabulary < 1 or tokens < 0 or len(data) < ends[2]:
            raise ValueError(f"a sampling mask of {tokens} tokens of {vocabulary} ids cannot have {len(data)} bytes")
        mask = cls(vocabulary, data[ends[0] : ends[1]], data[ends[1] : ends[2]], data[ends[2] :])
        mask._check()
        return mask

    def _check(self) -> None:
        import numpy as np

        lengths = np.frombuffer(self.lengths, "<i4").astype("int64")
        if (lengths < 0).any() or 4 * lengths.sum() != len(self.words):
            raise ValueError(f"a sampling mask has {len(self.words)} bytes of words, and lengths of other sums")
        for t, (kind, words) in enumerate(self.entries()):
            if kind not in (KEPT, DROPPED, BITMAP):
                raise ValueError(f"token {t} of a sampling mask is of kind {kind}; valid: 0, 1, 2")
            if kind == BITMAP:
                valid = len(words) == words_of(self.vocabulary) and _mask_row(kind, words, self.vocabulary).any()
            else:
                ascending = (np.diff(np.concatenate(([-1], words, [self.vocabulary]))) > 0).all()
                valid = ascending and (len(words) > 0 if kind == KEPT else len(words) < self.vocabulary)
            if not valid:
                raise ValueError(
                    f"token {t} of a sampling mask has {len(words)} words that are no part of {self.vocabulary} ids"
                )


def words_of(vocabulary: int) -> int:
    """Return how many words a bit for each id needs."""
    return -(-vocabulary // 32)


def mask_entry(kept_V: Any, *, most: int | None = None) -> MaskEntry:
    """Return a token's entry in a `SamplingMask`, from a NumPy array of bools."""
    import numpy as np

    count, vocabulary = int(kept_V.sum()), len(kept_V)
    most = words_of(vocabulary) if most is None else most
    if min(count, vocabulary - count) > most:
        bits = np.zeros(words_of(vocabulary) * 32, bool)
        bits[:vocabulary] = kept_V
        return BITMAP, np.packbits(bits, bitorder="little").view("<i4")
    few = count <= vocabulary - count
    return (KEPT if few else DROPPED), np.flatnonzero(kept_V if few else ~kept_V).astype("<i4")


def _mask_row(kind: int, words: Any, vocabulary: int) -> Any:
    """Return the inverse of `mask_entry`."""
    import numpy as np

    if kind == BITMAP:
        return np.unpackbits(words.view("u1"), bitorder="little")[:vocabulary].astype(bool)
    row = np.full(vocabulary, kind == DROPPED)
    row[words] = kind == KEPT
    return row


def _is_kept(token: int, kind: int, words: Any) -> bool:
    if kind == BITMAP:
        return token // 32 < len(words) and bool(words[token // 32] >> (token % 32) & 1)
    place = int(words.searchsorted(token))
    listed = place < len(words) and bool(words[place] == token)
    return listed == (kind == KEPT)
