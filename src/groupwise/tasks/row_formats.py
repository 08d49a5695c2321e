"""Rows as other systems write them, in our words: a `prompt` or `messages`, an `answer`, `tools`.

    columns     {prompt: question, answer: label}                       the names that a configuration gives
    ShareGPT    {"conversations": [{"from": "human", "value": ..}, ..]}   -> messages
    Alpaca      {"instruction": .., "input": .., "output": ..}            -> prompt; `output` stays, and is the answer
                {"instruction": .., "chosen": .., "rejected": ..}         -> prompt; the pair stays
    tools       "[{...}]"                                               -> the list that the JSON is

A row that has a prompt or messages of its own keeps them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.errors import DataError

ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}  # what ShareGPT's relatives call the speakers


def as_ours(row: Any, *, id: str, columns: Mapping[str, str], prompt_key: str | None = None) -> Any:
    """Return a row in our words; `columns` are new names -> those in the data. With a `prompt_key`, only that column
    may be a conversation in ShareGPT's form. A row that is not an object is returned unchanged.

    Raises:
        DataError: a named column is missing, a new name is that of another column, or `tools` is not JSON.
    """
    if not isinstance(row, Mapping):
        return row
    named = _renamed(row, id, columns)
    if isinstance(tools := named.get("tools"), str):
        named["tools"] = _parsed(tools, id)
    if prompt_key is not None:
        if _is_conversation(named.get(prompt_key)):
            named[prompt_key] = [message_of(each) for each in named[prompt_key]]
        return named
    if named.get("prompt") is not None or named.get("messages") is not None:
        return named
    if _is_conversation(named.get("conversations")):
        return _from_sharegpt(named)
    if isinstance(named.get("instruction"), str) and ("output" in named or "chosen" in named):
        return _from_alpaca(named)
    return named


def _renamed(row: Mapping[str, Any], id: str, columns: Mapping[str, str]) -> dict[str, Any]:
    missing = [old for old in columns.values() if old not in row]
    if missing:
        held = ", ".join(map(repr, row)) or "none"
        raise DataError(f"{id}: data.columns names {missing[0]!r}, and the columns are {held}", field="data.columns")
    taken = [new for new, old in columns.items() if new in row and new != old and new not in columns.values()]
    if taken:
        raise DataError(
            f"{id}: data.columns calls {columns[taken[0]]!r} {taken[0]!r}, and there is a column {taken[0]!r} already",
            hint=f"give that one a name too, as in other_{taken[0]}: {taken[0]}",
            field="data.columns",
        )
    kept = {name: value for name, value in row.items() if name not in columns.values()}
    return kept | {new: row[old] for new, old in columns.items()}


def _parsed(tools: str, id: str) -> Any:
    if not tools.strip():
        return None
    try:
        return json.loads(tools)
    except ValueError as error:
        message = f"{id}: 'tools' is text, and no JSON: {error}"
        raise DataError(message, hint="give a list of tool definitions") from None


def _is_conversation(value: Any) -> bool:
    several = isinstance(value, Sequence) and not isinstance(value, str) and bool(value)
    return several and all(isinstance(each, Mapping) and ("from" in each or "role" in each) for each in value)


def _from_sharegpt(row: dict[str, Any]) -> dict[str, Any]:
    messages = [message_of(each) for each in row.pop("conversations")]
    system = row.pop("system", None)
    if isinstance(system, str) and system.strip() and messages[0].get("role") != "system":
        messages.insert(0, {"role": "system", "content": system})
    return {"messages": messages, **row}


def message_of(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as we have it of one as we or ShareGPT do."""
    if "from" not in turn:
        return dict(turn)
    rest = {name: value for name, value in turn.items() if name not in ("from", "value") and value is not None}
    return {"role": ROLES.get(turn["from"], turn["from"]), "content": turn.get("value"), **rest}


def _from_alpaca(row: dict[str, Any]) -> dict[str, Any]:
    asked, more = row.pop("instruction"), row.pop("input", None)
    return {"prompt": f"{asked}\n\n{more}" if isinstance(more, str) and more.strip() else asked, **row}
