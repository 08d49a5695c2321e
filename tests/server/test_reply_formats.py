"""Tool calls over HTTP in the formats of other families: the starter's weights, told by their chat templates."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from calls import MOVE
from groupwise.server import chat
from serving import served, starter
from slow_cases import slow_but
from template_families import FAMILIES, OTHERS

NAMES = ("glm", "deepseek v3", "deepseek v3.1", "kimi", "minimax", "lfm2", "lfm2.5", "gpt-oss", "gemma 4")
WAIT = {"type": "function", "function": {"name": "wait", "description": "Waits.", "parameters": {"type": "object"}}}
ASK: list[Any] = [{"role": "user", "content": "Go north."}]


def parts_of(stream: Any) -> list[list[tuple[str, str]]]:
    """The calls of each choice."""
    found: list[list[tuple[str, str]]] = [[] for _ in range(8)]
    for choice in (choice for chunk in stream for choice in chunk.choices):
        found[choice.index] += [(call.function.name, call.function.arguments) for call in choice.delta.tool_calls or ()]
    return found


@pytest.mark.parametrize("name", slow_but({"kimi"}, of=NAMES, long={"gpt-oss"}))
def test_a_call_is_forced_streamed_and_answered(tmp_path: Path, name: str) -> None:
    tokenizer = copy.deepcopy(starter().tokenizer)
    tokenizer.chat_template = (FAMILIES | OTHERS)[name].source
    tokenizer.add_special_tokens({"bos_token": "<|endoftext|>"})
    base = dataclasses.replace(starter(), tokenizer=tokenizer)
    end = tokenizer.convert_tokens_to_ids("</think>")
    options: dict[str, Any] = {"model": "starter", "tools": [MOVE, WAIT], "max_tokens": 150, "seed": 5, "n": 8}
    options |= {"logit_bias": {str(end): 90}}  # where a thought may stand it ends at once
    with served(tmp_path, [chat.router], base=base) as api, OpenAI(base_url=f"{api.url}/v1", api_key="none") as client:
        named: Any = {"type": "function", "function": {"name": "move"}}
        choices = client.chat.completions.create(messages=ASK, tool_choice=named, **options).choices
        whole = [choice for choice in choices if choice.finish_reason == "tool_calls"]  # others are cut in a thought
        assert whole and not any(choice.message.content for choice in whole)
        for choice in whole:
            (call,) = choice.message.tool_calls or ()
            given = json.loads(call.function.arguments)
            assert call.function.name == "move" and given["to"] in ("north", "south") and 1 <= given["steps"] <= 9

        streamed = client.chat.completions.create(messages=ASK, tool_choice=named, stream=True, **options)
        assert parts_of(streamed) == [
            [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
            for choice in choices
        ]

        said: Any = whole[0].message.model_dump(exclude_none=True)
        result = {"role": "tool", "content": "There.", "tool_call_id": said["tool_calls"][0]["id"]}
        after = client.chat.completions.create(messages=[*ASK, said, result], tool_choice="required", **options).choices
        called = {call.function.name for each in after for call in each.message.tool_calls or ()}
        assert called and called <= {"move", "wait"}
