"""Rendered text to token ids, piece by piece: the ids of what was said before never depend on what is said later.

A piece ends where the policy begins or stops to speak. It is what the longer text adds to the ids of the shorter one;
where a token would straddle the edge the piece is tokenised alone, since that is what a sampler does too: it appends to
ids that it does not change.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from groupwise.model.chat_length import check_again
from groupwise.model.special_text import CODE_END, CODE_START, quotable, special_pattern

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of rendered text: the template has written the special tokens, and codes stand for quoted ones."""
    if CODE_START not in text:
        return tokenizer.encode(text, add_special_tokens=False)
    quoted, ids = _quoted_ids(tokenizer, quotable(tokenizer)), []
    for i, part in enumerate(re.split(f"{CODE_START}([0-9]+){CODE_END}", text)):
        if i % 2:
            ids += quoted[int(part)]
        elif part:
            ids += tokenizer.encode(part, add_special_tokens=False)
    return ids


@lru_cache(maxsize=8)
def _quoted_ids(tokenizer: PreTrainedTokenizerBase, texts: tuple[str, ...]) -> list[list[int]]:
    """Return the ids of each quotable text as ordinary characters.

    From a copy: `split_special_tokens` is a switch in the tokenizer, which other threads encode with at the same time.
    """
    own = copy.deepcopy(tokenizer)
    return [own.encode(text, add_special_tokens=False, split_special_tokens=True) for text in texts]


def encode_pieces(pieces: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the ids of each piece of a text, such that those of the first k pieces never depend on the later ones."""
    encoded = _encode_by_tails(pieces, tokenizer)
    return _encode_by_prefixes(pieces, tokenizer) if encoded is None else encoded


def _encode_by_prefixes(pieces: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return what `encode_pieces` means: a piece is what the longer text adds to the ids of the shorter one, or the
    piece alone where a token would straddle the edge. Quadratic."""
    text, ids, encoded, read = "", [], [], 0
    for piece in pieces:
        text += piece
        read += len(text)
        check_again(read, text)
        whole = encode_text(text, tokenizer)
        added = whole[len(ids) :] if whole[: len(ids)] == ids else encode_text(piece, tokenizer)
        encoded.append(added)
        ids = ids + added
    return encoded


def _encode_by_tails(pieces: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]] | None:
    """Return the same in linear time: a tokenizer splits a text at special tokens, so that what stands before the last
    one does not matter for what is added. None where this tokenizer shows that it does."""
    tail, encoded, read = Tail("", []), list[list[int]](), 0
    for piece in pieces:
        text = tail.text + piece
        read += len(text)
        check_again(read, text)
        whole = encode_text(text, tokenizer)
        if whole[: len(tail.ids)] != tail.ids:
            break
        encoded.append(whole[len(tail.ids) :])
        tail = tail_of(text, whole, tokenizer)
    fitting, ids = len(encoded), [token for piece in encoded for token in piece]
    if encode_text("".join(pieces[:fitting]), tokenizer) != ids:
        return None
    if fitting < len(pieces):  # and there a token straddles the edge, and behind it no whole begins with what was given
        if encode_text("".join(pieces[: fitting + 1]), tokenizer)[: len(ids)] == ids:
            return None
        encoded += [encode_text(piece, tokenizer) for piece in pieces[fitting:]]
    return encoded


@dataclass(frozen=True)
class Tail:
    """The end of a text, from its last special token, and its ids."""

    text: str
    ids: list[int]


def tail_of(text: str, ids: list[int], tokenizer: PreTrainedTokenizerBase) -> Tail:
    """Return the tail of a text whose ids are `ids`; the whole where it has no special token, or none that splits
    it."""
    start = -1
    for match in special_pattern(tokenizer).finditer(text):
        start = match.start()
    if start <= 0:
        return Tail(text, ids)
    tail = encode_text(text[start:], tokenizer)
    return Tail(text[start:], tail) if ids[-len(tail) :] == tail else Tail(text, ids)


def encode_plain(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Encode plain text with the tokens that the tokenizer adds in front, once (the text may have them), and none at
    the end."""
    ids = tokenizer.encode(text)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if bos is not None and ids[:2] == [bos, bos]:
        ids = ids[1:]
    if eos is not None and ids[-1:] == [eos] and not text.endswith(str(tokenizer.eos_token)):
        ids = ids[:-1]
    return ids
