"""The bytes of each token of a byte-level tokenizer, so that a text is a join of them.

A byte-level tokenizer (Qwen's, Llama 3's, GPT-2's, DeepSeek's) writes each byte of a text as one character, and what a
token stands for does not depend on its neighbours: a text is the bytes of its tokens, one after the other, and what is
not UTF-8 in the whole of it is U+FFFD. `tokenizers` looks each id up, copies its token and takes it apart again, every
time; here that is done once for each id. Other kinds (SentencePiece's, which strip a space where a text begins) have no
such bytes, and neither has a tokenizer class with a `decode` of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenBytes(dict[int, bytes]):
    """Token id -> its bytes; filled as ids are asked for. An id that the tokenizer does not have is nothing, as it is
    when `tokenizers` decodes."""

    def __init__(self, token_of: Callable[[int], str | None]):
        super().__init__()
        self._token_of, self._bytes = token_of, _bytes_of_characters()

    def __missing__(self, id: int) -> bytes:
        token = self._token_of(id)
        if token is None:
            return b""
        try:
            self[id] = bytes(map(self._bytes.__getitem__, token))
        except KeyError:  # a special token, with characters that stand for no byte
            self[id] = token.encode()
        return self[id]

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of these tokens."""
        return b"".join(map(self.__getitem__, ids)).decode("utf-8", "replace")


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> TokenBytes | None:
    """Return the bytes of this tokenizer's tokens; None where tokens have none of their own."""
    try:
        return _KNOWN[tokenizer]
    except KeyError:
        backend: Any = tokenizer.backend_tokenizer if _is_byte_level(tokenizer) else None
        known = None if backend is None else TokenBytes(backend.id_to_token)
        return _KNOWN.setdefault(tokenizer, known)


_KNOWN: WeakKeyDictionary[PreTrainedTokenizerBase, TokenBytes | None] = WeakKeyDictionary()


def _is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    from tokenizers import decoders
    from transformers import PreTrainedTokenizerFast as Stock

    kind = type(tokenizer)
    if not issubclass(kind, Stock) or (kind.decode, kind._decode) != (Stock.decode, Stock._decode):
        return False
    backend: Any = tokenizer.backend_tokenizer
    return isinstance(backend.decoder, decoders.ByteLevel)


@cache
def _bytes_of_characters() -> dict[str, int]:
    """Return the byte that each character stands for: itself where it can be printed, else one of those after 255."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + at): byte for at, byte in enumerate(others)}
