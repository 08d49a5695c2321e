"""Conversations as logs have them, in our words: each message is recognised by its own shape.

    OpenAI          {"role": .., "content": text or parts, "tool_calls": [..]}
    Responses       {"type": "message"}, {"type": "function_call"}, {"type": "function_call_output"}, ..
    Anthropic       {"role": .., "content": [{"type": "tool_use"}, ..]}
    OpenTelemetry   {"role": .., "parts": [{"type": "text", "content": ..}, {"type": "tool_call"}, ..]}
    LangChain       {"type": "human", "content": ..}, or serialised: {"lc": 1, "id": [.., "HumanMessage"], "kwargs": ..}
    ShareGPT        {"from": "human", "value": ..}

What is in none of them, or has images (which nothing here can mask), raises DataError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.errors import DataError, RequestError
from groupwise.tasks.dialects.anthropic import InputMessage, ToolDefinition
from groupwise.tasks.dialects.chat_form import ChatMessage, Tool
from groupwise.tasks.dialects.form import assistant, call, joined, merged, read
from groupwise.tasks.dialects.responses import FunctionTool, ResponsesRequest
from groupwise.tasks.logs.exchange import parsed, well_formed, worded
from groupwise.tasks.prompts import message_at
from groupwise.tasks.row_formats import message_of
from groupwise.types import Message

BLOCKS = {"tool_use", "tool_result", "thinking", "redacted_thinking"}  # of a message's content: it is Anthropic's
ITEMS = {"function_call", "function_call_output", "reasoning"}
PARTS = {"input_text", "output_text", "refusal", "summary_text", "reasoning_text"}
LANGCHAIN = {"human": "user", "ai": "assistant", "aimessagechunk": "assistant", "system": "system", "tool": "tool"}
HELD = ("messages", "message", "input", "prompt")  # where an object has the conversation that it stands for


def conversation(value: Any) -> tuple[Message, ...]:
    """Return a conversation: a text is a message of the user. Raises DataError."""
    value = parsed(value)
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if isinstance(value, Mapping) and not {"role", "type", "lc", "from"} & value.keys():
        held = [value[name] for name in HELD if name in value]
        if not held:
            raise DataError(f"there is no conversation in an object with {', '.join(map(repr, value)) or 'nothing'}")
        return conversation(held[0])
    listed = [value] if isinstance(value, Mapping) else value
    if isinstance(listed, Sequence) and len(listed) == 1 and isinstance(listed[0], list):
        listed = listed[0]  # LangChain asks in batches
    if not isinstance(listed, Sequence) or not listed:
        raise DataError(f"{value!r:.40} is not a conversation")
    forms = merged([form for each in listed for form in _forms(each)])
    messages = [_checked(_read(each, ChatMessage).as_message()) for each in forms]
    if any(isinstance(each.get("content"), list) for each in messages):
        raise DataError("the messages have images, in which personal data cannot be masked")
    return tuple(messages)


def answer_in(value: Any) -> Message:
    """Return the one message of the assistant's that an answer is: a text, a message, items in a row, or the body of a
    response. Raises DataError."""
    value = worded(parsed(value))
    if isinstance(value, str):
        value = {"role": "assistant", "content": value}
    if isinstance(value, Mapping):
        if value.get("choices"):
            return answer_in(value["choices"][0].get("message"))
        if value.get("generations"):  # LangChain's
            inner = value["generations"]
            inner = inner[0] if isinstance(inner[0], Mapping) else inner[0][0]
            return answer_in(inner.get("message") or inner.get("text"))
        for name in ("output", "messages", "message", "content", "text"):
            if not {"role", "type", "lc"} & value.keys() and value.get(name):
                return answer_in(value[name])
        if value.get("object") == "response" and value.get("output"):
            return answer_in(value["output"])
    elif isinstance(value, Sequence) and value and all(_is_block(each) for each in value):
        value = {"role": "assistant", "content": value}
    said = conversation(value)
    if not said or said[-1]["role"] != "assistant":
        raise DataError(f"the answer is not an assistant message: {value!r:.40}")
    return said[-1]


def tools_in(value: Any) -> tuple[dict[str, Any], ...]:
    """Return tool definitions in OpenAI's form, without those that run at their provider. Raises DataError."""
    value = parsed(value)
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise DataError(f"tools is {value!r:.40}; it must be a list")
    found = [_tool(parsed(each)) for each in value]
    return tuple(each for each in found if each is not None)


def _tool(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, Mapping):
        raise DataError(f"a tool is {value!r:.40}; it must be an object")
    if "input_schema" in value:
        form = _read(value, ToolDefinition).chat()
    elif isinstance(value.get("function"), Mapping):
        form = dict(value)
    elif value.get("type") == "function":
        form = _read(value, FunctionTool).chat()
    else:
        return None
    return _read(form, Tool).as_dict()


# ---- one message ----
def _forms(value: Any) -> list[dict[str, Any]]:
    """Return a message as those of OpenAI's chat form that it is."""
    if isinstance(value, str):
        value = {"role": "user", "content": value}
    if not isinstance(value, Mapping):
        raise DataError(f"a message is {value!r:.40}; it must be an object")
    if "from" in value:
        value = message_of(value)
    kind = str(value.get("type") or "").lower()
    if isinstance(value.get("parts"), list):
        return _of_parts(value)
    if "lc" in value or isinstance(value.get("data"), Mapping) or ("role" not in value and kind in LANGCHAIN):
        return _of_langchain(value)
    content = value.get("content")
    parts = [each for each in content if isinstance(each, Mapping)] if isinstance(content, list) else []
    kinds = {each.get("type") for each in parts}
    if kind in ITEMS or kinds & PARTS:
        asked = _read({"input": [value]}, ResponsesRequest)
        return asked.said()
    if kinds & BLOCKS or any("source" in each for each in parts):
        message = {name: value.get(name) for name in ("role", "content")}
        return [each for each in _read(message, InputMessage).chat() if each.get("content") or "tool_calls" in each]
    if "role" not in value:
        raise DataError(f"an item of type {value.get('type')!r} is not read")
    return [{name: each for name, each in value.items() if each is not None}]


def _of_parts(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a message of OpenTelemetry's."""
    texts, thoughts, calls, results = list[str](), list[str](), list[dict[str, Any]](), list[dict[str, Any]]()
    for part in value["parts"]:
        if not isinstance(part, Mapping):
            raise DataError(f"a part of a message is {part!r:.40}; it must be an object")
        kind, said = part.get("type"), part.get("content")
        if kind == "text":
            texts.append(str(said or ""))
        elif kind == "reasoning":
            thoughts.append(str(said or ""))
        elif kind == "tool_call":
            calls.append(_call(part.get("id"), part.get("name"), part.get("arguments")))
        elif kind == "tool_call_response":
            response = part.get("response", part.get("result"))
            told = response if isinstance(response, str) else json.dumps(response, ensure_ascii=False)
            results.append({"role": "tool", "content": told, "tool_call_id": str(part.get("id") or "")})
        else:
            raise DataError(f"a part of a message is of type {kind!r}, which is not read")
    role = value.get("role")
    if role == "assistant":
        return [assistant("".join(texts), joined(thoughts), calls)]
    if role == "tool" and not results:
        results = [{"role": "tool", "content": joined(texts)}]
    spoken = [{"role": role, "content": joined(texts)}] if texts and role != "tool" else []
    return [*results, *spoken]


def _of_langchain(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a message of LangChain's, as it is dumped, serialised or kept in a database."""
    fields = next((value[name] for name in ("kwargs", "data") if isinstance(value.get(name), Mapping)), value)
    kind = str(fields.get("type") or value.get("type") or "").lower()
    if kind not in LANGCHAIN and value.get("id"):
        kind = str(value["id"][-1]).lower().removesuffix("chunk").removesuffix("message")
    if kind not in LANGCHAIN:
        raise DataError(f"a message of LangChain's is of type {kind!r}; known are {', '.join(LANGCHAIN)}")
    role, content = LANGCHAIN[kind], fields.get("content")
    if isinstance(content, list):
        told = [each if isinstance(each, Mapping) else {"type": "text", "text": str(each)} for each in content]
        content = [each for each in told if role != "assistant" or each.get("type") != "tool_use"]  # tool_calls has it
    if role != "assistant":
        return _forms({"role": role, "content": content, "tool_call_id": fields.get("tool_call_id")})
    calls = [_call(each.get("id"), each.get("name"), each.get("args")) for each in fields.get("tool_calls") or ()]
    calls = calls or (fields.get("additional_kwargs") or {}).get("tool_calls") or []
    said = _forms({"role": role, "content": content})[0] if content else {}
    return [assistant(_text(said.get("content")), str(said.get("reasoning_content") or ""), calls)]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(each.get("text") or "" for each in content or ())


def _call(id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    written = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return call(str(id or ""), str(name), written)


def _is_block(value: Any) -> bool:
    """Return whether this is a part of a message's content, and not a message."""
    return isinstance(value, Mapping) and "role" not in value and value.get("type") in ("text", *BLOCKS)


def _checked(message: Message) -> Message:
    """Return a message that a run takes. Raises DataError."""
    return message_at(message, "a message")


def _read(value: Mapping[str, Any], model: Any) -> Any:
    try:
        return read(well_formed(json.dumps(value, ensure_ascii=False)).encode(), model)
    except (RequestError, TypeError, ValueError) as error:
        raise DataError(error.message if isinstance(error, RequestError) else str(error)) from None
