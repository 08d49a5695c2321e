"""OpenTelemetry's spans and events of calls of models (semantic conventions for generative AI), as OTLP JSON.

    {"resourceSpans": [{"scopeSpans": [{"spans": [..]}]}]}          traces, an object a file or a line
    {"resourceLogs": [{"scopeLogs": [{"logRecords": [..]}]}]}       events
    {"name": .., "context": {"trace_id", "span_id"}, "attributes"}  a span as the SDK for Python prints it

The conversation is in `gen_ai.input.messages`, `gen_ai.output.messages`, `gen_ai.system_instructions` and
`gen_ai.tool.definitions`: on the span, or on its event `gen_ai.client.inference.operation.details`; or, as instrumented
before 2025-08, in events `gen_ai.user.message`, .., `gen_ai.choice`, or in numbered attributes (`gen_ai.prompt.0.role`,
`gen_ai.completion.0.content`, as OpenLLMetry writes them). `gen_ai.evaluation.result` is an outcome. Spans of
agents and tools are passed over: what a model was asked in them has its own spans.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from groupwise.errors import DataError
from groupwise.tasks.logs.exchange import (
    Exchange,
    Outcome,
    Read,
    attempted,
    first,
    ids_at,
    parsed,
    seconds,
    text_at,
    value_of,
)
from groupwise.tasks.logs.messages import answer_in, conversation, tools_in

ASKS = ("chat", "text_completion", "generate_content")  # operations that ask a model for text
DETAILS = "gen_ai.client.inference.operation.details"
EVALUATION = "gen_ai.evaluation.result"
CHOICE = "gen_ai.choice"
ROLES = {f"gen_ai.{role}.message": role for role in ("system", "user", "assistant", "tool")}
OPENLLMETRY = "traceloop.association.properties."
USER = ("user.id", "enduser.id", "user.hash", "langfuse.user.id", f"{OPENLLMETRY}user_id")
CONVERSATION = ("gen_ai.conversation.id", "session.id", "langfuse.session.id", f"{OPENLLMETRY}session_id")
FUNCTIONS = "llm.request.functions."
KINDS = ("stringValue", "boolValue", "doubleValue")


@dataclass
class _Call:
    """The parts of one span that have been read so far."""

    place: str
    attributes: dict[str, Any] = field(default_factory=dict)
    said: list[dict[str, Any]] = field(default_factory=list)  # by events of messages
    choice: dict[str, Any] | None = None
    time: float | None = None
    trace: str | None = None


class Spans:
    """The `LogFormat` of OpenTelemetry spans."""

    name = "OpenTelemetry's spans and events"

    def __init__(self) -> None:
        self._calls: dict[str, _Call] = {}  # by span id

    def knows(self, row: Mapping[str, Any]) -> bool:
        return "resourceSpans" in row or "resourceLogs" in row or ("context" in row and "attributes" in row)

    def read(self, row: Mapping[str, Any], place: str) -> Iterator[Read]:
        if "context" in row:
            context = row["context"] if isinstance(row["context"], Mapping) else {}
            yield from self._span({**row, "traceId": context.get("trace_id"), "spanId": context.get("span_id")}, place)
        for resource in row.get("resourceSpans") or ():
            for scope in resource.get("scopeSpans") or ():
                for span in scope.get("spans") or ():
                    yield from attempted(self._span(span, place), place)
        for resource in row.get("resourceLogs") or ():
            for scope in resource.get("scopeLogs") or ():
                for record in scope.get("logRecords") or ():
                    yield from attempted(self._record(record, place), place)

    def finish(self) -> Iterator[Read]:
        for id, call in self._calls.items():
            if call.attributes.get("gen_ai.operation.name") in (None, *ASKS):
                yield from attempted(_exchange(id, call), call.place)

    def _record(self, record: Mapping[str, Any], place: str) -> Iterator[Read]:
        attributes = _attributes(record.get("attributes"))
        name = str(record.get("eventName") or attributes.get("event.name") or "")
        body = _plain(record["body"]) if isinstance(record.get("body"), Mapping) else {}
        yield from self._event(name, {**attributes, **(body if isinstance(body, Mapping) else {})}, record, place)

    def _span(self, span: Mapping[str, Any], place: str) -> Iterator[Read]:
        attributes, id = _attributes(span.get("attributes")), str(span.get("spanId") or place)
        events = [(str(each.get("name") or ""), each) for each in span.get("events") or ()]
        if any(name.startswith("gen_ai.") for name in attributes) or any(
            name.startswith("gen_ai.") for name, _ in events
        ):
            call = self._call(id, place)
            call.attributes |= attributes
            call.time = seconds(first(span, "startTimeUnixNano", "start_time"))
            call.trace = text_at(span, "traceId")
        for name, event in events:
            yield from self._event(name, _attributes(event.get("attributes")), {**event, "spanId": id}, place)

    def _event(self, name: str, told: dict[str, Any], event: Mapping[str, Any], place: str) -> Iterator[Read]:
        span = text_at(event, "spanId")
        if name == EVALUATION:
            of = text_at(told, "gen_ai.response.id") or span
            value = first(told, "gen_ai.evaluation.score.value", "gen_ai.evaluation.score.label")
            score_name = str(told.get("gen_ai.evaluation.name") or "evaluation")
            if of is not None and (score := value_of(score_name, value)) is not None:
                yield Outcome(id=of, name=score_name, value=score)
            return
        if name != DETAILS and name != CHOICE and name not in ROLES:
            return
        call = self._call(span or place, place)
        call.time = call.time or seconds(first(event, "timeUnixNano", "observedTimeUnixNano", "timestamp"))
        call.trace = call.trace or text_at(event, "traceId")
        if name == DETAILS:
            call.attributes |= told
        elif name == CHOICE:
            message = parsed(told.get("message"))
            call.choice = call.choice or {"role": "assistant", **(message if isinstance(message, Mapping) else told)}
        else:
            message = {each: parsed(told[each]) for each in ("tool_calls", "id") if each in told}
            message["role"], message["content"] = ROLES[name], told.get("content")
            if ROLES[name] == "tool":
                message["tool_call_id"] = message.pop("id", None)
            call.said.append(message)

    def _call(self, id: str, place: str) -> _Call:
        return self._calls.setdefault(id, _Call(place=place))


def _exchange(id: str, call: _Call) -> Iterator[Exchange]:
    """Yield what a call came to; nothing where neither question nor answer was recorded: that is opt-in."""
    at = call.attributes
    asked, said = parsed(at.get("gen_ai.input.messages")), parsed(at.get("gen_ai.output.messages"))
    if asked is None:
        asked = call.said or _numbered(at, "gen_ai.prompt.") or None
    if said is None:
        said = call.choice or _numbered(at, "gen_ai.completion.") or None
    if asked is None and said is None:
        return
    if asked is None or said is None:
        raise DataError(
            "a span has a question and no answer" if said is None else "a span has an answer and no question"
        )
    instructions = parsed(at.get("gen_ai.system_instructions"))
    if instructions:
        parts = [{"type": "text", "content": instructions}] if isinstance(instructions, str) else instructions
        asked = [{"role": "system", "parts": parts}, *asked]
    reasons = parsed(at.get("gen_ai.response.finish_reasons")) or []
    if isinstance(said, list):  # a choice each
        said = said[0] if said else None
    yield Exchange(
        place=call.place,
        ids=(*ids_at(at, "gen_ai.response.id"), *(() if id == call.place else (id,))) or (call.place,),
        messages=conversation(asked),
        answer=answer_in(said),
        tools=tools_in(at.get("gen_ai.tool.definitions") or _numbered(at, FUNCTIONS) or None),
        time=call.time,
        user=next((str(at[name]) for name in USER if at.get(name)), None),
        conversation=next((str(at[name]) for name in CONVERSATION if at.get(name)), None),
        trace=call.trace,
        model=next((str(at[n]) for n in ("gen_ai.response.model", "gen_ai.request.model") if at.get(n)), None),
        cut="length" in reasons or (isinstance(said, Mapping) and said.get("finish_reason") == "length"),
    )


def _numbered(attributes: Mapping[str, Any], beginning: str) -> list[dict[str, Any]]:
    """Return the objects that attributes with a number in their name are: `gen_ai.prompt.0.role`."""
    found: dict[int, dict[str, Any]] = {}
    calls: dict[tuple[int, int], dict[str, Any]] = {}
    for name, value in attributes.items():
        number, _, key = name.removeprefix(beginning).partition(".") if name.startswith(beginning) else ("", "", "")
        if not number.isdigit() or not key:
            continue
        message = found.setdefault(int(number), {})
        if (of_call := re.fullmatch(r"tool_calls\.(\d+)\.(id|name|arguments)", key)) is not None:
            calls.setdefault((int(number), int(of_call[1])), {})[of_call[2]] = value
        else:
            message[key] = parsed(value) if key in ("content", "parameters") else value
    for (number, _), told in sorted(calls.items()):
        function = {"name": told.get("name"), "arguments": told.get("arguments") or "{}"}
        one = {"id": str(told.get("id") or ""), "type": "function", "function": function}
        found[number].setdefault("tool_calls", []).append(one)
    listed = [found[number] for number in sorted(found)]
    if beginning == FUNCTIONS:
        return [{"type": "function", "function": each} for each in listed]
    return [{"role": "assistant", **each} for each in listed]


def _attributes(value: Any) -> dict[str, Any]:
    """Return attributes by name, from OTLP's list of keys and values or an object."""
    if isinstance(value, Mapping):
        return dict(value)
    return {str(each.get("key")): _plain(each.get("value")) for each in value or () if isinstance(each, Mapping)}


def _plain(value: Any) -> Any:
    """Return what a value of OTLP's stands for."""
    if not isinstance(value, Mapping):
        return value
    for kind in KINDS:
        if kind in value:
            return value[kind]
    if "intValue" in value:
        return int(value["intValue"])
    if "arrayValue" in value:
        return [_plain(each) for each in value["arrayValue"].get("values") or ()]
    if "kvlistValue" in value:
        return _attributes(value["kvlistValue"].get("values"))
    return None
