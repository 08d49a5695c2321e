"""All formats of replies, and which of them a chat template shows."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from groupwise.model.reply_formats.deepseek import DeepSeekV3, DeepSeekV31
from groupwise.model.reply_formats.format import ReplyFormat
from groupwise.model.reply_formats.gemma4 import Gemma4
from groupwise.model.reply_formats.glm import Glm
from groupwise.model.reply_formats.harmony import Harmony
from groupwise.model.reply_formats.hermes import Hermes
from groupwise.model.reply_formats.kimi import Kimi
from groupwise.model.reply_formats.lfm2 import Lfm2
from groupwise.model.reply_formats.llama import Llama
from groupwise.model.reply_formats.minimax import MiniMax
from groupwise.model.reply_formats.mistral import Mistral, MistralArgs
from groupwise.model.reply_formats.qwen_xml import QwenXml

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HERMES = Hermes()
FORMATS: Mapping[str, ReplyFormat] = {
    form.name: form
    for form in (
        Harmony(),
        Gemma4(),
        Glm(),
        QwenXml(),
        MiniMax(),
        Kimi(),
        DeepSeekV3(),
        DeepSeekV31(),
        Lfm2(),
        HERMES,
        MistralArgs(),
        Mistral(),
        Llama(),
    )
}  # in the order in which a template is asked; those whose markers others have too come later


def format_of(source: PreTrainedTokenizerBase | str | None) -> ReplyFormat:
    """Return the format that a chat template writes calls in, given itself or with its tokenizer; Hermes where it shows
    none.

    >>> format_of("{{ '[TOOL_CALLS]' + tool.name + '[ARGS]' + tool.arguments }}")
    mistral_args
    """
    return shown_format(source) or HERMES


def shown_format(source: PreTrainedTokenizerBase | str | None) -> ReplyFormat | None:
    """Return the format that a chat template shows; None where it shows none of these, and so another one or none at
    all."""
    template = source if source is None or isinstance(source, str) else source.chat_template
    if isinstance(template, Mapping):  # several by name
        template = template.get("tool_use") or template.get("default")
    return _shown(template or "")


@lru_cache(maxsize=16)
def _shown(template: str) -> ReplyFormat | None:
    return next((form for form in FORMATS.values() if form.shown_in(template)), None)
