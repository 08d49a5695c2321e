"""Exports of Langfuse: observations, traces and scores, as its tables, its API and its blob storage write them.

    {"type": "GENERATION", "traceId": .., "input": .., "output": ..}     an observation; also with snake_case names
    {"id": .., "userId": .., "sessionId": .., "observations": [..]}      a trace, with what is in it or alone
    {"traceId": .., "observationId": .., "name": .., "value": ..}        a score: an outcome, by its own name

Of a trace without a generation its own input and output are read. Other observations are passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from groupwise.errors import DataError
from groupwise.tasks.logs.exchange import (
    Belongs,
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

KINDS = {"GENERATION", "SPAN", "EVENT", "AGENT", "TOOL", "CHAIN", "RETRIEVER", "EVALUATOR", "EMBEDDING", "GUARDRAIL"}
TRACE = ("traceId", "trace_id")
OF_TRACES = {"observations", "scores", "bookmarked", "public", "projectId", "project_id", "htmlPath", "tags", "release"}
EDITED = ("correction", "corrected output", "edited", "expected_output", "expected output")  # names of scores: a text


class Langfuse:
    """The `LogFormat` of Langfuse's exports."""

    name = "Langfuse"

    def __init__(self) -> None:
        self._traces: dict[str, tuple[str, Mapping[str, Any]]] = {}  # those that may have no generation
        self._generated: set[str] = set()  # traces that have

    def knows(self, row: Mapping[str, Any]) -> bool:
        if isinstance(row.get("trace"), Mapping) and "observations" in row:
            return True
        kind, of_trace = str(row.get("type") or "").upper(), first(row, *TRACE) is not None
        score = of_trace and "name" in row and bool({"value", "stringValue", "string_value"} & row.keys())
        trace = bool({"userId", "user_id", "sessionId", "session_id"} & row.keys()) and bool(OF_TRACES & row.keys())
        return (of_trace and kind in KINDS) or score or (trace and ("input" in row or "observations" in row))

    def read(self, row: Mapping[str, Any], place: str) -> Iterator[Read]:
        if isinstance(row.get("trace"), Mapping):  # a trace as it is downloaded
            row = {**row["trace"], **{name: row.get(name) or () for name in ("observations", "scores")}}
        of = text_at(row, *TRACE)
        if of is None:
            yield from self._trace(row, place)
        elif str(row.get("type") or "").upper() in KINDS:
            yield from self._observation(row, place, of)
        else:
            yield from _score(row)

    def _trace(self, row: Mapping[str, Any], place: str) -> Iterator[Read]:
        id = text_at(row, "id") or place
        self._traces[id] = place, row
        yield Belongs(
            id=id, user=text_at(row, "userId", "user_id"), conversation=text_at(row, "sessionId", "session_id")
        )
        for score in row.get("scores") or ():
            if isinstance(score, Mapping):
                yield from _score({"traceId": id, **score})
        for each in row.get("observations") or ():
            if isinstance(each, Mapping):
                yield from attempted(self._observation(each, place, id), place)

    def _observation(self, row: Mapping[str, Any], place: str, trace: str) -> Iterator[Read]:
        if str(row.get("type")).upper() != "GENERATION":
            return
        self._generated.add(trace)
        yield from _exchange(row, place, trace, ids_at(row, "id"))

    def finish(self) -> Iterator[Read]:
        for id, (place, row) in self._traces.items():
            if id not in self._generated and row.get("input") is not None:
                yield from attempted(_exchange(row, place, id, (id,)), place)


def _exchange(row: Mapping[str, Any], place: str, trace: str, ids: tuple[str, ...]) -> Iterator[Exchange]:
    asked, said = parsed(row.get("input")), parsed(row.get("output"))
    if asked is None or said is None:
        raise DataError("the row has an input and no output" if said is None else "the row has an output and no input")
    tools = first(asked, "tools") if isinstance(asked, Mapping) else None
    if isinstance(asked, list) and any(isinstance(each, Mapping) and _is_tool(each) for each in asked):
        tools = [each for each in asked if _is_tool(each)]  # as Langfuse's wrapper of OpenAI's client writes them
        asked = [each for each in asked if not _is_tool(each)]
    yield Exchange(
        place=place,
        ids=ids or (place,),
        messages=conversation(asked),
        answer=answer_in(said),
        tools=tools_in(tools),
        time=seconds(first(row, "startTime", "start_time", "timestamp")),
        user=text_at(row, "userId", "user_id"),
        conversation=text_at(row, "sessionId", "session_id"),
        trace=trace,
        model=text_at(row, "model", "providedModelName", "provided_model_name"),
    )


def _is_tool(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("type") == "function" and "function" in value


def _score(row: Mapping[str, Any]) -> Iterator[Outcome]:
    id, rating = text_at(row, "observationId", "observation_id", *TRACE), text_at(row, "id")
    name, said = str(row.get("name") or "score"), first(row, "stringValue", "string_value")
    if id is None:
        return
    if name.lower().replace("-", " ") in EDITED and isinstance(said, str):
        yield Outcome(id=id, name="edited", edited=said, rating=rating)
        return
    numeric = row.get("value")
    value = value_of(name, said if isinstance(said, str) and value_of(name, said) is not None else numeric)
    if value is not None:
        yield Outcome(id=id, name=name, value=value, rating=rating)
