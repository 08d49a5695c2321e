"""Preference pairs as rows: a prompt, the completion that is `chosen`, and the one that is `rejected`.

    {"prompt": "2+2?", "chosen": "4", "rejected": "5"}                      texts
    {"prompt": [user], "chosen": [assistant], "rejected": [assistant]}      messages, or one message each
    {"chosen": [user, assistant], "rejected": [user, assistant]}            two conversations that begin alike
    {"chosen": "The sky is blue.", "rejected": "The sky is green."}         two texts that do

These are TRL's forms, and the prompt of the last two is what they begin with, as there. A text that holds its own
prompt is plain text, not a user's message. Images in the columns `image` and `images` are the prompt's. ShareGPT's
messages (`from`, `value`) are read, too, and prompts that are token ids, as `groupwise feedback export` writes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from groupwise.config.data import RowsConfig
from groupwise.errors import DataError
from groupwise.tasks.prompts import PROMPT_KEYS, TOKENS, asked, row_at, said_at
from groupwise.tasks.row_images import read_images
from groupwise.types import Message, Prompt

KEYS = ("chosen", "rejected")

T = TypeVar("T")
Said = str | list[Message]


def to_pair(row: Any, *, id: str, config: RowsConfig, folder: Path = Path()) -> Prompt:
    """Return a row as a Prompt whose `answer` is the chosen completion, and with the `rejected` one. Raises DataError
    naming `id` and what is missing."""
    row = row_at(row, id)
    chosen, rejected = (_said(row, key, id) for key in KEYS)
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError(f"{id}: of 'chosen' and 'rejected' one is a text and the other is messages; give two alike")
    if TOKENS in row:
        return _with_answers(asked(row, id, config), chosen, rejected, folder)
    rest, plain = {name: value for name, value in row.items() if name not in KEYS}, False
    if isinstance(chosen, str) or isinstance(rejected, str):
        if config.prompt_key is None and all(row.get(key) is None for key in PROMPT_KEYS):
            rest["prompt"], plain = _common_text(str(chosen), str(rejected), id), True
            chosen, rejected = (said[len(rest["prompt"]) :] for said in (chosen, rejected))
    elif chosen[0]["role"] != "assistant":  # a conversation with its prompt
        common = _common(chosen, rejected)
        if not common:
            raise DataError(f"{id}: 'chosen' and 'rejected' are conversations that do not begin alike, with one prompt")
        rest = {name: value for name, value in rest.items() if name not in PROMPT_KEYS}
        rest[config.prompt_key or "prompt"] = common
        chosen, rejected = (said[len(common) :] for said in (chosen, rejected))
    return _with_answers(asked(rest, id, config, plain=plain, folder=folder), chosen, rejected, folder)


def _with_answers(prompt: Prompt, chosen: Said, rejected: Said, folder: Path) -> Prompt:
    """Return the prompt with both completions."""
    answer, other = (
        _answer(said, f"{prompt.id}: {key}", folder) for said, key in zip((chosen, rejected), KEYS, strict=True)
    )
    return replace(prompt, answer=answer, rejected=other)


def _said(row: Mapping[str, Any], key: str, id: str) -> Said:
    """Return what a column says, which every pair has."""
    if row.get(key) is None:
        held = ", ".join(map(repr, row)) or "none"
        raise DataError(
            f"{id}: no column {key!r}, which a preference pair has; the columns are {held}",
            hint=f"name it in data.columns, as in {{{key}: COLUMN}}",
        )
    return said_at(row, key, id)


def _common(chosen: Sequence[T], rejected: Sequence[T]) -> list[T]:
    """Return the elements that two sequences begin with."""
    return [a for a, b in takewhile(lambda two: two[0] == two[1], zip(chosen, rejected, strict=False))]


def _common_text(chosen: str, rejected: str, id: str) -> str:
    """Return what two texts begin with; a space before where they part is theirs, as tokens begin with one."""
    common = "".join(_common(chosen, rejected)).removesuffix(" ")
    if not common:
        raise DataError(
            f"{id}: no prompt, and 'chosen' and 'rejected' do not begin alike",
            hint="name the column of the prompt in data.prompt_key",
        )
    return common


def _answer(said: Said, place: str, folder: Path) -> tuple[Message, ...]:
    if isinstance(said, str):
        if not said.strip():
            raise DataError(f"{place} has no text of its own; a completion needs some")
        return (Message(role="assistant", content=said),)
    if not said or said[0]["role"] != "assistant" or said[-1]["role"] != "assistant":
        roles = ", ".join(each["role"] for each in said) or "nothing"
        raise DataError(f"{place}, after the prompt, has messages of {roles}; it begins and ends with the assistant's")
    return tuple(read_images(message, where=f"{place}[{i}]", folder=folder) for i, message in enumerate(said))
