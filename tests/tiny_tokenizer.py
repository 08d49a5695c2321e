"""The starter's kind of tokenizer with few merges; its vocabulary is that of all tiny models."""

from __future__ import annotations

import functools

from transformers import PreTrainedTokenizerBase

from groupwise.tasks.starter.tasks import supervised_conversations
from groupwise.tasks.starter.tokenizer import build_tokenizer, render


@functools.cache
def starter_tokenizer() -> PreTrainedTokenizerBase:
    """The one of this process; whoever changes it copies it first."""
    texts = [render(c["messages"], tools=c["tools"]) for c in supervised_conversations(0, 60)]
    return build_tokenizer(texts, vocab_size=280)
