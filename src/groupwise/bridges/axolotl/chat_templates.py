"""Axolotl's names for chat templates, and whether a tokenizer's own template is the one that a name means.

Prompts are rendered with the tokenizer's own template here. Where a name stands for what that renders anyway, there is
nothing to refuse; whether it does is tried on conversations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Turns = Sequence[Mapping[str, str]]
_USER = {"role": "user", "content": "What is 2 + 2?"}
_ANSWER = {"role": "assistant", "content": "It is 4."}
_SYSTEM = {"role": "system", "content": "Be brief."}
CONVERSATIONS: tuple[Turns, ...] = ((_USER,), (_SYSTEM, _USER), (_USER, _ANSWER, _USER))
_QWEN = {"role": "system", "content": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."}


def _chatml(turns: Turns, bos: str) -> str:
    said = (f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns)
    return "".join(said) + "<|im_start|>assistant\n"


def _qwen_25(turns: Turns, bos: str) -> str:
    return _chatml(turns if turns[0]["role"] == "system" else [_QWEN, *turns], bos)


def _llama3(turns: Turns, bos: str) -> str:
    heads = (f"<|start_header_id|>{turn['role']}<|end_header_id|>\n\n{turn['content']}<|eot_id|>" for turn in turns)
    return bos + "".join(heads) + "<|start_header_id|>assistant<|end_header_id|>\n\n"


def _gemma(turns: Turns, bos: str) -> str | None:
    if turns[0]["role"] == "system":  # it has none
        return None
    names = {"assistant": "model"}
    said = (
        f"<start_of_turn>{names.get(turn['role'], turn['role'])}\n{turn['content']}<end_of_turn>\n" for turn in turns
    )
    return bos + "".join(said) + "<start_of_turn>model\n"


def _phi_3(turns: Turns, bos: str) -> str:
    return "".join(f"<|{turn['role']}|>\n{turn['content']}<|end|>\n" for turn in turns) + "<|assistant|>\n"


TEMPLATES: Mapping[str, Callable[[Turns, str], str | None]] = {
    "chatml": _chatml,
    "qwen_25": _qwen_25,
    "qwen3": _chatml,  # without tools and thoughts
    "llama3": _llama3,
    "gemma": _gemma,
    "phi_35": _phi_3,
}
"""What each makes of a conversation, with the head of the answer behind it; None where it raises."""


def why_not(name: str, tokenizer: Any) -> str | None:
    """Return why the template called `name` is not the tokenizer's own; None if it is."""
    if name not in TEMPLATES:
        return f"only {', '.join(TEMPLATES)} are compared with the tokenizer's own template"
    if tokenizer.chat_template is None:
        return "the tokenizer has no template"
    for turns in CONVERSATIONS:
        meant = TEMPLATES[name](turns, tokenizer.bos_token or "")
        if meant is not None and (own := _rendered(tokenizer, turns)) != meant:
            return f"the tokenizer's own template renders {own!r} where {name} renders {meant!r}"
    return None


def _rendered(tokenizer: Any, turns: Turns) -> str:
    try:
        return tokenizer.apply_chat_template([dict(turn) for turn in turns], tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template's own raise_exception
        return f"{type(error).__name__}: {error}"
