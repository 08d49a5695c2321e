"""Reads logs of requests to OpenAI's and Anthropic's APIs, by any server: chat completions, Responses, Messages.

    {"request": {..}, "response": {..}}     what a proxy or a program writes, under any name of `ASKED` and `SAID`
    {"messages": [..], "choices": [..]}     a stored completion with its messages; also Anthropic's, with `content`
    {"messages": [.., assistant]}           a conversation whose last message is the answer
    {"custom_id", "body"} and {"custom_id", "response"}   a batch's two files, OpenAI's or Anthropic's

The user, the time and the conversation are next to these two or in the request's `metadata`, under the names in `USER`,
`TIME` and `CONVERSATION`; a field of `OUTCOMES` there is an outcome.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from groupwise.errors import DataError
from groupwise.tasks.logs.exchange import (
    BAD,
    Bad,
    Exchange,
    Read,
    attempted,
    first,
    ids_at,
    outcomes_of,
    parsed,
    seconds,
    text_at,
)
from groupwise.tasks.logs.messages import answer_in, conversation, tools_in
from groupwise.types import Message

ASKED = ("request", "request_body", "req", "body", "params", "input", "kwargs")
SAID = ("response", "response_body", "resp", "result", "completion", "output")
TIME = ("time", "timestamp", "created_at", "created", "start_time", "startTime", "request_created_at", "ts", "date")
USER = ("user", "user_id", "userId", "user.id", "end_user", "safety_identifier", "customer_id", "request_user_id")
CONVERSATION = ("conversation_id", "conversationId", "session_id", "sessionId", "thread_id", "threadId", "chat_id")
IDS = ("id", "request_id", "response_id", "custom_id", "rollout_id")
OUTCOMES = ("thumb", "thumbs", "feedback", "rating", "score", "resolved", "edited", "edited_answer", "correction", *BAD)
FAILED = ("errored", "canceled", "expired")


Halves = list[tuple[str, Mapping[str, Any]]]  # places and rows


class RequestLogs:
    """The `LogFormat` of logged requests to OpenAI's and Anthropic's APIs."""

    name = "requests to OpenAI's and Anthropic's APIs"

    def __init__(self) -> None:
        self._asked: dict[str, Halves] = defaultdict(list)  # by custom_id
        self._said: dict[str, Halves] = defaultdict(list)

    def knows(self, row: Mapping[str, Any]) -> bool:
        if "custom_id" in row:
            return True
        asked = _asked(row)
        return asked is not None and ("messages" in asked or "input" in asked)

    def read(self, row: Mapping[str, Any], place: str) -> Iterator[Read]:
        asked = _asked(row)
        answered = any(row.get(name) is not None for name in SAID) or "choices" in row
        if "custom_id" in row and (asked is None or not answered):
            (self._said if asked is None else self._asked)[str(row["custom_id"])].append((place, row))
        else:
            yield from _exchange(row, asked or {}, _said(row), place)

    def finish(self) -> Iterator[Read]:
        for id, said in self._said.items():
            asked = self._asked.pop(id, [])
            places = [place for place, _ in said]
            if not asked:
                reason = f"there is no request with custom_id {id!r}; name the batch's input file, too"
            elif len(asked) > 1 or len(said) > 1:
                reason = f"several requests have the custom_id {id!r}; import one batch at a time"
            else:
                ((place, row),) = said
                yield from attempted(self._joined(asked[0][1], row, place), place)
                continue
            yield from (Bad(place, reason) for place in places)
        for id, asked in self._asked.items():
            reason = f"there is no answer with custom_id {id!r}; name the batch's output file, too"
            yield from (Bad(place, reason) for place, _ in asked)

    def _joined(self, asked: Mapping[str, Any], row: Mapping[str, Any], place: str) -> Iterator[Read]:
        yield from _exchange(row, _asked(asked) or {}, _said(row), place)


def _asked(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the body of the request."""
    for name in ASKED:
        value = parsed(row.get(name))
        if isinstance(value, Mapping) and isinstance(parsed(value.get("body")), Mapping):
            value = parsed(value["body"])
        if isinstance(value, Mapping) and ("messages" in value or "input" in value):
            return value
    return row if "messages" in row or ("input" in row and ("output" in row or "model" in row)) else None


def _said(row: Mapping[str, Any]) -> Any:
    """Return the body of the response, or what of it there is: a message, items, a text; None where there is none."""
    for name in SAID:
        value = parsed(row.get(name))
        if isinstance(value, Mapping):
            return _body(value)
        if _is_stream(value):
            raise DataError("the answer is a stream of events; log the message that the events make up")
        if value not in (None, "", [], {}):
            return value
    if row.get("choices"):
        return row
    if "messages" in row and row.get("content") and row.get("role", "assistant") == "assistant":
        return {name: row.get(name) for name in ("id", "content", "stop_reason")} | {"role": "assistant"}
    return None


def _body(response: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the body in what a proxy or a batch keeps of a response. Raises DataError for a request that failed."""
    inner = parsed(response.get("body")) or (response.get("message") if response.get("type") == "succeeded" else None)
    body = inner if isinstance(inner, Mapping) else response
    if fault := response.get("error") or body.get("error"):
        raise DataError(f"the request failed: {fault!r:.80}")
    if response.get("type") in FAILED:
        raise DataError(f"the request was {response['type']}")
    return body


def _is_stream(value: Any) -> bool:
    if isinstance(value, str):
        return value.startswith(("data:", "event:"))
    events = isinstance(value, list) and all(isinstance(each, Mapping) for each in value)
    return bool(events and value and ("delta" in value[0] or value[0].get("object") == "chat.completion.chunk"))


def _exchange(row: Mapping[str, Any], asked: Mapping[str, Any], said: Any, place: str) -> Iterator[Read]:
    beside = said if isinstance(said, Mapping) else row
    messages = _conversation(asked)
    if said is None:
        if messages[-1]["role"] != "assistant" or len(messages) == 1:
            raise DataError("the row has a request and no answer")
        messages, answer = messages[:-1], messages[-1]
    else:
        answer = answer_in(said)
    if first(asked, "conversation") is not None and "messages" not in asked:
        raise DataError("the request continues a conversation that OpenAI stores; log the items that the model saw")
    metadata = {**_object(asked.get("metadata")), **_object(row.get("metadata"))}
    told = (row, metadata, asked)
    ids = tuple(dict.fromkeys((*ids_at(beside, "id"), *ids_at(row, *IDS, "response.request_id")))) or (place,)
    yield Exchange(
        place=place,
        ids=ids,
        messages=messages,
        answer=answer,
        tools=tools_in(asked.get("tools")),
        time=next((at for each in (row, beside) if (at := seconds(first(each, *TIME))) is not None), None),
        user=next((who for each in told if (who := text_at(each, *USER)) is not None), None),
        conversation=next((which for each in told if (which := text_at(each, *CONVERSATION)) is not None), None),
        trace=text_at(row, "trace_id", "traceId"),
        model=text_at(beside, "model") or text_at(asked, "model"),
        cut=_is_cut(beside),
        after=text_at(asked, "previous_response_id"),
    )
    for each in (row, metadata):
        yield from outcomes_of(place, ((name, each[name]) for name in OUTCOMES if name in each))  # ids may repeat


def _conversation(asked: Mapping[str, Any]) -> tuple[Message, ...]:
    """Return what the model saw: instructions first."""
    head: list[Any] = []
    if system := first(asked, "system", "instructions"):
        texts = system if isinstance(system, str) else "\n".join(str(each.get("text") or "") for each in system)
        head = [{"role": "system", "content": texts}]
    said = parsed(asked.get("messages") if "messages" in asked else asked.get("input"))
    if said in (None, "", []):
        raise DataError("the request has no messages")
    return (*(conversation(head) if head else ()), *conversation(said))


def _is_cut(said: Mapping[str, Any]) -> bool:
    choices = said.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], Mapping) else {}
    reason = first(choice, "finish_reason") or first(said, "stop_reason", "finish_reason", "status")
    return reason in ("length", "max_tokens", "incomplete", "model_context_window_exceeded")


def _object(value: Any) -> dict[str, Any]:
    value = parsed(value)
    return dict(value) if isinstance(value, Mapping) else {}
