"""Special tokens in text: which there are, and how what is only written like one is quoted.

A special token's text inside a message ("<|im_end|>" typed by a user) is content. For the render it is replaced by a
code of private-use characters, which survives whatever a template does to content: CODE_START, the text's number in
`quotable`, CODE_END.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CODE_START, CODE_END = "\ue000", "\ue001"


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of the special tokens, which only the template and the policy write."""
    return frozenset(cast("list[int]", tokenizer.convert_tokens_to_ids(list(special_texts(tokenizer)))))


def special_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    return any_of(special_texts(tokenizer))


def special_texts(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the texts of the special tokens, longest first, so that none hides behind a prefix of it."""
    return _special_texts_of(tokenizer, tuple(tokenizer.all_special_tokens), len(tokenizer))


@lru_cache(maxsize=8)
def _special_texts_of(tokenizer: PreTrainedTokenizerBase, named: tuple[str, ...], _: int) -> tuple[str, ...]:
    """Return the special texts; the last two arguments say whether the tokenizer still has the tokens that it had: it
    need not list hundreds each time."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return tuple(sorted(added | set(named), key=lambda text: (-len(text), text)))


def quotable(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    return (*special_texts(tokenizer), CODE_START)  # the code's own first character too, so that a code is always ours


def quote(value: Any, texts: tuple[str, ...]) -> Any:
    """Return `value` with each of the texts in its strings (also in keys) replaced by its code."""
    if isinstance(value, str):
        return any_of(texts).sub(lambda match: f"{CODE_START}{texts.index(match[0])}{CODE_END}", value)
    if isinstance(value, Mapping):
        return {quote(key, texts): quote(item, texts) for key, item in value.items()}
    if isinstance(value, Iterable):
        return [quote(item, texts) for item in value]
    return value


@lru_cache(maxsize=16)
def any_of(texts: tuple[str, ...]) -> re.Pattern[str]:
    """Finds any of the texts, of those that begin alike the first; nothing where there are none."""
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")
