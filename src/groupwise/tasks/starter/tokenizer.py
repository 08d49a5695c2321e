"""The starter's tokenizer: byte-level BPE in the manner of Qwen, small, with every digit its own token.

Sennrich et al. 2016 (arXiv 1508.07909) on the bytes of the text, so that anything can be encoded. Single digits because
a column of an addition is then a column of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD, TURN_START, TURN_END)
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# Contractions; a word with the sign or space before it; one digit; signs; line ends; spaces.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build_tokenizer(texts: Iterable[str], *, vocab_size: int = 1024) -> PreTrainedTokenizerFast:
    """Return a tokenizer of at most `vocab_size` tokens (256 bytes, 9 added, the rest merges learned from `texts`).

    Equal texts give an equal tokenizer. `texts` are conversations as `render` writes them; the markers in them are left
    out of the merges, being tokens of their own. Save it with `save_pretrained`, load it with AutoTokenizer.
    """
    least = 256 + len(SPECIAL_TOKENS) + len(MARKERS)
    if vocab_size < least:
        raise ValueError(f"vocab_size is {vocab_size}; the bytes and the added tokens alone are {least}")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS) - len(MARKERS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator((_without_markers(text) for text in texts), trainer)
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    bpe.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKERS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=TURN_END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE.read_text(encoding="utf-8")
    return tokenizer


def render(messages: Sequence[dict[str, Any]], *, tools: Sequence[dict[str, Any]] | None = None) -> str:
    """Return a conversation in the starter's chat format; needs no tokenizer, as it makes the text that one is built
    from."""
    template = CHAT_TEMPLATE.read_text(encoding="utf-8")
    texts, _ = render_jinja_template([list(messages)], tools=list(tools) if tools else None, chat_template=template)
    return texts[0]


def _without_markers(text: str) -> str:
    for marker in (*SPECIAL_TOKENS, *MARKERS):
        text = text.replace(marker, "\n")
    return text
