"""Refuses conversations that are too long, before they are rendered or tokenised whole.

The number of characters is enough to refuse most of them: no token stands for more characters than the longest token
has. A text that would take too long to tokenise is refused as one that is too long.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from groupwise.errors import ChatError, ContextLengthError
from groupwise.model.special_text import CODE_END, CODE_START
from groupwise.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PIECE = 1 << 14  # characters that are tokenised at once while a long text is only counted
EXPECTED = 8  # characters a token; a text with fewer for each token of the context is tokenised without counting first
MOST_AGAIN = 1 << 25  # characters rendered or tokenised again to find where the assistant speaks in one conversation


def check_length(prompt_ids: Sequence[int], *, max_tokens: int, context: int) -> None:
    """Raise ContextLengthError unless the prompt and `max_tokens` more tokens fit in `context` tokens."""
    room = context - len(prompt_ids)
    if room >= max_tokens:
        return
    message = f"the prompt is {len(prompt_ids)} tokens and max_tokens is {max_tokens}; the context is {context}"
    shorter = f"lower max_tokens to {room} or less, or shorten the prompt" if room > 0 else "shorten the prompt"
    raise ContextLengthError(message, hint=shorter)


def least_tokens(characters: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return how many tokens a text of this many characters has at least: no token stands for more than the longest one
    does."""
    return -(-characters // _longest_token(tokenizer, len(tokenizer)))


@lru_cache(maxsize=8)
def _longest_token(tokenizer: PreTrainedTokenizerBase, _: int) -> int:
    """Characters of the longest entry of the vocabulary. In a byte-level one a character stands for a byte of text, in
    others for a character, so that no token has more text than this."""
    return max(map(len, tokenizer.get_vocab()), default=1)


def check_messages(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, context: int | None) -> None:
    """Raise ContextLengthError if what is said in the messages must be longer than `context` tokens."""
    if context is not None:
        _check_characters(sum(_characters(message) for message in messages), tokenizer, context)


def _characters(message: Message) -> int:
    """Return the characters of a message's content. Content that is not text is refused when it is rendered."""
    content: Any = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, str):
        return len(content)
    parts = content if isinstance(content, list) else ()
    texts = (part.get("text") for part in parts if isinstance(part, Mapping))
    return sum(len(text) for text in texts if isinstance(text, str))


def _check_characters(characters: int, tokenizer: PreTrainedTokenizerBase, context: int) -> None:
    least = least_tokens(characters, tokenizer)
    if least > context:
        raise too_long(f"{characters} characters, at least {least} tokens", context)


def check_text(text: str, tokenizer: PreTrainedTokenizerBase, context: int | None) -> None:
    """Raise ContextLengthError if `text` must be longer than `context` tokens: by its length, or, where it has many
    characters for each of these tokens, by counting them piece by piece. A cut makes a few tokens more, hence `2 *`."""
    if context is None:
        return
    _check_characters(len(text), tokenizer, context)
    if len(text) <= PIECE + EXPECTED * context:
        return
    plain, counted = re.sub(f"{CODE_START}[0-9]+{CODE_END}", "", text), 0
    for start in range(0, len(plain), PIECE):
        counted += len(tokenizer.encode(plain[start : start + PIECE], add_special_tokens=False))
        if counted > 2 * context:
            read = min(len(plain), start + PIECE)
            raise too_long(f"{len(text)} characters, and the first {read} are about {counted} tokens", context)


def too_long(what: str, context: int) -> ContextLengthError:
    """Return the error that a text does not fit into so many tokens. `what`: what it has, as in "9 tokens"."""
    return ContextLengthError(
        f"This model's maximum context length is {context} tokens, and the text has {what}", hint="shorten it"
    )


def check_again(characters: int, text: str, chat: Sequence[Mapping[str, Any]] = ()) -> None:
    """Raise ChatError if too much had to be rendered or tokenised again to find where the assistant speaks."""
    if characters > MOST_AGAIN + 4 * len(text):
        size = f"{len(chat)} messages and {len(text)} characters" if chat else f"{len(text)} characters"
        raise ChatError(
            f"where the assistant speaks in a conversation of {size} cannot be found with this chat template in "
            "reasonable time",
            hint="mark it in the template with {% generation %} and end turns with a special token, or give the "
            "conversation in several shorter ones",
        )
