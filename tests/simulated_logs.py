"""A log of which the truth is known, as five systems would have written it: users with conversations of one to three
questions, the second of which takes a tool, thumbs that are right in nine of ten cases, and addresses of the users."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

MAY = 1777636800
SYSTEM = "Answer with the sum alone."
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Asked:
    """One request: messages and answer in OpenAI's form, and whether the answer `is_right`."""

    id: str
    user: str
    talk: str
    time: int
    messages: Rows
    answer: dict[str, Any]
    tools: Rows
    thumb: bool | None
    is_right: bool


def asked(seed: int, *, talks: int) -> Iterator[Asked]:
    """Yield the requests of so many conversations."""
    draws = random.Random(seed)
    number = 0
    for talk in range(talks):
        user = f"user{draws.randrange(talks // 2)}"
        messages: Rows = [{"role": "system", "content": SYSTEM}]
        for turn in range(draws.randint(1, 3)):
            a, b = draws.randrange(10, 99), draws.randrange(10, 99)
            question = f"What is {a} + {b}? I am {user}@example.com, in conversation {talk}."
            messages = [*messages, {"role": "user", "content": question}]
            tools: Rows = []
            if turn == 1:
                function = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
                tools = [{"type": "function", "function": function}]
                arguments = json.dumps({"a": a, "b": b})
                call = {"id": f"call_{number}", "type": "function", "function": {"name": "add", "arguments": arguments}}
                messages = [*messages, {"role": "assistant", "tool_calls": [call]}]
                messages = [*messages, {"role": "tool", "content": str(a + b), "tool_call_id": call["id"]}]
            right = draws.random() < 0.6
            answer = {"role": "assistant", "content": str(a + b + (0 if right else draws.randint(1, 9)))}
            thumb = None if draws.random() < 0.3 else right == (draws.random() < 0.9)
            yield Asked(f"r{number}", user, f"c{talk}", MAY + 60 * number, messages, answer, tools, thumb, right)
            messages = [*messages, answer]
            number += 1


def openai(each: Asked) -> Rows:
    request = {"model": "m", "messages": each.messages, **({"tools": each.tools} if each.tools else {})}
    response = {"id": each.id, "model": "m", "choices": [{"message": each.answer, "finish_reason": "stop"}]}
    row = {"request": request, "response": response, "user": each.user, "session_id": each.talk, "time": each.time}
    return [row | ({} if each.thumb is None else {"thumb": "up" if each.thumb else "down"})]


def anthropic(each: Asked) -> Rows:
    messages: Rows = []
    for message in each.messages[1:]:
        if message["role"] == "tool":
            block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
            messages.append({"role": "user", "content": [block]})
        elif message.get("tool_calls"):
            call = message["tool_calls"][0]
            given = json.loads(call["function"]["arguments"])
            block = {"type": "tool_use", "id": call["id"], "name": "add", "input": given}
            messages.append({"role": "assistant", "content": [block]})
        else:
            messages.append({"role": message["role"], "content": [{"type": "text", "text": message["content"]}]})
    tools = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}] if each.tools else []
    content = [{"type": "text", "text": each.answer["content"]}]
    response = {"id": each.id, "type": "message", "role": "assistant", "model": "m", "content": content}
    request = {"model": "m", "system": SYSTEM, "messages": messages, "tools": tools, "metadata": {"user_id": each.user}}
    row = {"request": request, "response": response, "conversation_id": each.talk, "timestamp": _iso(each.time)}
    return [row | ({} if each.thumb is None else {"thumb": each.thumb})]


def spans(each: Asked) -> Rows:
    def parts(message: dict[str, Any]) -> dict[str, Any]:
        if message["role"] == "tool":
            said = {"type": "tool_call_response", "id": message["tool_call_id"], "response": message["content"]}
        elif message.get("tool_calls"):
            call = message["tool_calls"][0]
            given = json.loads(call["function"]["arguments"])
            said = {"type": "tool_call", "id": call["id"], "name": "add", "arguments": given}
        else:
            said = {"type": "text", "content": message["content"]}
        return {"role": message["role"], "parts": [said]}

    told = {
        "gen_ai.operation.name": "chat",
        "gen_ai.response.id": each.id,
        "gen_ai.response.model": "m",
        "gen_ai.conversation.id": each.talk,
        "user.id": each.user,
        "gen_ai.system_instructions": json.dumps(parts(each.messages[0])["parts"]),
        "gen_ai.input.messages": json.dumps([parts(message) for message in each.messages[1:]]),
        "gen_ai.output.messages": json.dumps([parts(each.answer)]),
        **({"gen_ai.tool.definitions": json.dumps(each.tools)} if each.tools else {}),
    }
    attributes = [{"key": name, "value": {"stringValue": value}} for name, value in told.items()]
    start = str(each.time * 10**9)
    span = {"traceId": f"t{each.talk}", "spanId": f"s{each.id}", "startTimeUnixNano": start, "attributes": attributes}
    rows: Rows = [{"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}]
    if each.thumb is not None:
        scored = [
            {"key": "gen_ai.evaluation.name", "value": {"stringValue": "thumb"}},
            {"key": "gen_ai.evaluation.score.value", "value": {"doubleValue": float(each.thumb)}},
            {"key": "gen_ai.response.id", "value": {"stringValue": each.id}},
        ]
        record = {"eventName": "gen_ai.evaluation.result", "attributes": scored}
        rows.append({"resourceLogs": [{"scopeLogs": [{"logRecords": [record]}]}]})
    return rows


def langfuse(each: Asked) -> Rows:
    trace = {"id": f"t{each.id}", "userId": each.user, "sessionId": each.talk, "tags": [], "input": None}
    asked: Any = {"messages": each.messages, "tools": each.tools} if each.tools else each.messages
    row = {"id": each.id, "traceId": f"t{each.id}", "type": "GENERATION", "startTime": _iso(each.time), "model": "m"}
    rows: Rows = [trace, row | {"input": asked, "output": each.answer}]
    if each.thumb is not None:
        rows.append({"traceId": f"t{each.id}", "name": "thumb", "value": int(each.thumb), "dataType": "NUMERIC"})
    return rows


def langsmith(each: Asked) -> Rows:
    def message(given: dict[str, Any]) -> dict[str, Any]:
        kinds = {"system": "System", "user": "Human", "assistant": "AI", "tool": "Tool"}
        fields = {"content": given.get("content") or ""}
        if given.get("tool_calls"):
            call = given["tool_calls"][0]
            fields["tool_calls"] = [
                {"name": "add", "args": json.loads(call["function"]["arguments"]), "id": call["id"]},
            ]
        if given["role"] == "tool":
            fields["tool_call_id"] = given["tool_call_id"]
        id = ["langchain", "schema", "messages", f"{kinds[given['role']]}Message"]
        return {"lc": 1, "type": "constructor", "id": id, "kwargs": fields}

    said = {"generations": [[{"text": each.answer["content"], "message": message(each.answer)}]]}
    extra = {"metadata": {"session_id": each.talk, "user_id": each.user, "ls_model_name": "m"}}
    run = {
        "id": each.id,
        "trace_id": f"root{each.id}",
        "run_type": "llm",
        "start_time": _iso(each.time),
        "inputs": {"messages": [[message(one) for one in each.messages]]},
        "outputs": said,
        "extra": extra | ({"invocation_params": {"tools": each.tools}} if each.tools else {}),
    }
    rows: Rows = [run]
    if each.thumb is not None:
        rows.append({"run_id": f"root{each.id}", "key": "thumb", "score": float(each.thumb)})
    return rows


def _iso(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, tz=UTC).isoformat()


SYSTEMS: dict[str, Callable[[Asked], Rows]] = {
    "openai": openai,
    "anthropic": anthropic,
    "spans": spans,
    "langfuse": langfuse,
    "langsmith": langsmith,
}
