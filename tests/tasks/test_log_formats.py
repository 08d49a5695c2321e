"""Each system's rows, as its own exports have them, come to exchanges and outcomes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from groupwise.errors import DataError
from groupwise.store.rollouts import group_to_json
from groupwise.tasks.logs.exchange import Belongs, Exchange, Outcome, seconds, value_of
from groupwise.tasks.logs.outcomes import joined, read_outcomes
from groupwise.tasks.logs.read import UNKNOWN, Logs, read_logs
from groupwise.types import Completion, FinishReason, Prompt, Rollout, RolloutGroup, Turn
from wording import raises

MAY = 1777636800.0  # 2026-05-01T12:00:00Z
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"}]
CHAT = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": int(MAY),
    "model": "gpt-x-2026",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "4"}, "finish_reason": "stop"}],
}


def read(folder: Path, *rows: Any, name: str = "log.jsonl") -> Logs:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return read_logs([path])


def only(logs: Logs) -> Exchange:
    assert not logs.bad
    (exchange,) = logs.exchanges
    return exchange


# ---- requests ----
def test_a_request_and_its_response(tmp_path: Path):
    row = {
        "request_id": "req-9",
        "request": {"model": "gpt-x", "messages": ASKED, "user": "ann", "metadata": {"thread_id": "t1"}},
        "response": CHAT,
        "thumb": "down",
    }
    logs = read(tmp_path, row)
    got = only(logs)
    assert [dict(each) for each in got.messages] == ASKED and got.answer == {"role": "assistant", "content": "4"}
    assert (got.ids, got.user, got.conversation) == (("chatcmpl-1", "req-9"), "ann", "t1")
    assert (got.time, got.model, got.cut) == (MAY, "gpt-x-2026", False)
    assert logs.outcomes == [Outcome(id="log.jsonl:1", name="thumb", value=0.0)]  # its own, whatever ids repeat


def test_bodies_may_be_texts_under_other_names(tmp_path: Path):
    row = {
        "request_body": json.dumps({"messages": ASKED}),
        "response_body": json.dumps(CHAT),
        "ts": "2026-05-01T13:00Z",
    }
    assert only(read(tmp_path, row)).time == MAY + 3600


def test_a_stored_completion_with_its_messages(tmp_path: Path):
    got = only(read(tmp_path, {"object": "list", "data": [CHAT | {"messages": ASKED, "metadata": {"user_id": 7}}]}))
    assert (got.ids, got.user, got.time) == (("chatcmpl-1",), "7", MAY)


def test_messages_of_anthropic(tmp_path: Path):
    asked = {"system": [{"type": "text", "text": "Be brief."}], "messages": ASKED[1:], "metadata": {"user_id": "u"}}
    said = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "t", "name": "add", "input": {"a": 2}}],
        "stop_reason": "max_tokens",
    }
    tools = [{"name": "add", "input_schema": {"type": "object"}}, {"type": "web_search_20250305", "name": "web_search"}]
    got = only(read(tmp_path, {"request": asked | {"tools": tools}, "response": said, "timestamp": MAY * 1e9}))
    assert [dict(each) for each in got.messages] == ASKED
    assert got.answer["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2}'}  # pyright: ignore
    assert (got.user, got.cut, got.time, [each["function"]["name"] for each in got.tools]) == ("u", True, MAY, ["add"])


def test_responses(tmp_path: Path):
    output = [
        {"type": "reasoning", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4"}]},
    ]
    said = {"id": "resp_1", "object": "response", "created_at": MAY, "status": "incomplete", "output": output}
    asked = {"model": "m", "instructions": "Be brief.", "input": "What is 2 + 2?", "previous_response_id": "resp_0"}
    got = only(read(tmp_path, {"request": asked, "response": said}))
    assert [dict(each) for each in got.messages] == ASKED
    assert (got.answer["content"], got.after, got.cut, got.ids[0]) == ("4", "resp_0", True, "resp_1")  # pyright: ignore
    flat = only(read(tmp_path, {"id": "resp_2", "model": "m", "input": ASKED, "output": output}))
    assert (flat.ids, [dict(each) for each in flat.messages]) == (("resp_2",), ASKED)


def test_a_conversation_whose_last_message_is_the_answer(tmp_path: Path):
    got = only(read(tmp_path, {"messages": [*ASKED, {"role": "assistant", "content": "4"}], "resolved": True}))
    assert (len(got.messages), got.ids) == (2, ("log.jsonl:1",))


def test_the_two_files_of_a_batch(tmp_path: Path):
    asked = [{"custom_id": f"b{n}", "method": "POST", "url": "/v1/x", "body": {"messages": ASKED}} for n in range(3)]
    said = [
        {
            "id": "r0",
            "custom_id": "b0",
            "response": {"status_code": 200, "request_id": "q", "body": CHAT},
            "error": None,
        },
        {"id": "r1", "custom_id": "b1", "response": {"status_code": 400, "body": {"error": {"message": "no"}}}},
        {"id": "r9", "custom_id": "b9", "response": {"status_code": 200, "body": CHAT}},
    ]
    logs = read(tmp_path, *asked, *said)
    assert [each.ids for each in logs.exchanges] == [("chatcmpl-1", "r0", "b0", "q")]
    assert [each.place for each in logs.bad] == ["log.jsonl:5", "log.jsonl:6", "log.jsonl:3"]
    again = read(tmp_path, *asked, *asked[:1], *said[:1], {"request": {"messages": ASKED}, "response": CHAT})
    assert len(again.exchanges) == 1 and {each.place for each in again.bad} == {f"log.jsonl:{n}" for n in (2, 3, 5)}
    params = {"custom_id": "a", "params": {"system": "Be brief.", "messages": ASKED[1:]}}
    message = {"role": "assistant", "type": "message", "id": "msg_2", "content": [{"type": "text", "text": "4"}]}
    anthropic = only(read(tmp_path, params, {"custom_id": "a", "result": {"type": "succeeded", "message": message}}))
    assert anthropic.ids == ("msg_2", "a")


@pytest.mark.parametrize(
    "row",
    [
        {"request": {"messages": []}, "response": CHAT},
        {"request": {"messages": ASKED}},
        {"request": {"messages": ASKED}, "response": {"error": {"message": "overloaded"}}},
        {"request": {"messages": ASKED}, "response": 'data: {"choices": []}'},
        {"request": {"messages": ASKED}, "response": [{"object": "chat.completion.chunk", "choices": []}]},
        {"request": {"input": "x", "conversation": "conv_1"}, "response": {"id": "r", "output": CHAT["choices"]}},
        {"request": {"input": "x", "conversation": "conv_1"}, "response": {"id": "r", "output": "4"}},
        {"messages": ASKED},
        {
            "request": {"messages": ASKED},
            "response": {"choices": [{"message": {"role": "assistant", "content": None}}]},
        },
        {"request": {"messages": "x", "tools": 7}, "response": CHAT},
    ],
)
def test_a_row_that_is_known_and_cannot_be_used_has_a_reason(tmp_path: Path, row: dict[str, Any]):
    logs = read(tmp_path, row, {"request": {"messages": ASKED}, "response": CHAT})
    assert len(logs.exchanges) == 1 and logs.bad[0].place == "log.jsonl:1"
    assert logs.bad[0].reason not in ("", UNKNOWN)


# ---- spans ----
def attributes(**values: Any) -> list[dict[str, Any]]:
    """Return them as OTLP writes them, dots for double underscores."""
    return [{"key": name.replace("__", "."), "value": any_value(value)} for name, value in values.items()]


def any_value(value: Any) -> dict[str, Any]:
    if isinstance(value, list):
        return {"arrayValue": {"values": [any_value(each) for each in value]}}
    if isinstance(value, dict):
        return {"kvlistValue": {"values": [{"key": key, "value": any_value(each)} for key, each in value.items()]}}
    return {"intValue": str(value)} if isinstance(value, int) else {"stringValue": str(value)}


PARTS = [{"role": "user", "parts": [{"type": "text", "content": "What is 2 + 2?"}]}]
SAYS = [{"role": "assistant", "parts": [{"type": "text", "content": "4"}], "finish_reason": "stop"}]
SYSTEM = [{"type": "text", "content": "Be brief."}]


def traces(*spans: dict[str, Any]) -> dict[str, Any]:
    return {"resourceSpans": [{"resource": {"attributes": []}, "scopeSpans": [{"spans": list(spans)}]}]}


def records(*records: dict[str, Any]) -> dict[str, Any]:
    return {"resourceLogs": [{"scopeLogs": [{"logRecords": list(records)}]}]}


@pytest.mark.parametrize("structured", [True, False])
def test_a_span_of_a_call_with_its_evaluation(tmp_path: Path, structured: bool):
    written = (lambda value: value) if structured else json.dumps
    told = attributes(
        gen_ai__operation__name="chat",
        gen_ai__conversation__id="c1",
        gen_ai__request__model="gpt-x",
        gen_ai__response__id="resp_1",
        gen_ai__response__finish_reasons=["length"],
        gen_ai__input__messages=written(PARTS),
        gen_ai__output__messages=written(SAYS),
        gen_ai__system_instructions=written(SYSTEM),
        user__id="ann",
    )
    span = {"traceId": "t1", "spanId": "s1", "startTimeUnixNano": str(int(MAY * 1e9)), "attributes": told}
    agent = {"spanId": "s0", "attributes": attributes(gen_ai__operation__name="invoke_agent")}
    other = {"spanId": "s2", "attributes": attributes(http__route="/")}
    said = attributes(gen_ai__evaluation__name="correct", gen_ai__evaluation__score__value=0)
    event = {"eventName": "gen_ai.evaluation.result", "spanId": "s1", "attributes": said}
    logs = read(tmp_path, traces(agent, span, other), records(event))
    got = only(logs)
    assert [dict(each) for each in got.messages] == ASKED and got.answer["content"] == "4"  # pyright: ignore
    assert (got.ids, got.user, got.conversation, got.trace) == (("resp_1", "s1"), "ann", "c1", "t1")
    assert (got.time, got.model, got.cut) == (MAY, "gpt-x", True)
    assert logs.outcomes == [Outcome(id="s1", name="correct", value=0.0)]


def test_the_event_with_the_details(tmp_path: Path):
    told = attributes(gen_ai__input__messages=PARTS, gen_ai__output__messages=SAYS, gen_ai__system_instructions=SYSTEM)
    event = {"eventName": "gen_ai.client.inference.operation.details", "spanId": "s", "attributes": told}
    assert [dict(each) for each in only(read(tmp_path, records(event | {"timeUnixNano": 1}))).messages] == ASKED


def test_events_as_they_were_before_and_the_sdks_own_print(tmp_path: Path):
    body = {"kvlistValue": {"values": [{"key": "content", "value": {"stringValue": "What is 2 + 2?"}}]}}
    choice = any_value({"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "4"}})
    logs = read(
        tmp_path,
        records(
            {"attributes": attributes(event__name="gen_ai.system.message", content="Be brief."), "spanId": "s"},
            {"attributes": attributes(event__name="gen_ai.user.message"), "body": body, "spanId": "s"},
            {"attributes": attributes(event__name="gen_ai.choice"), "body": choice, "spanId": "s"},
        ),
    )
    assert [dict(each) for each in only(logs).messages] == ASKED
    printed = {
        "name": "chat m",
        "context": {"trace_id": "0xt", "span_id": "0xs"},
        "start_time": "2026-05-01T12:00:00.000000Z",
        "attributes": {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"},
        "events": [
            {"name": "gen_ai.user.message", "attributes": {"content": "What is 2 + 2?"}},
            {"name": "gen_ai.choice", "attributes": {"index": 0, "message": '{"content": "4"}'}},
        ],
    }
    got = only(read(tmp_path, printed))
    assert (got.time, got.trace, got.answer["content"]) == (MAY, "0xt", "4")  # pyright: ignore


def test_numbered_attributes_as_openllmetry_writes_them(tmp_path: Path):
    told = {
        "gen_ai.prompt.0.role": "system",
        "gen_ai.prompt.0.content": "Be brief.",
        "gen_ai.prompt.1.role": "user",
        "gen_ai.prompt.1.content": "What is 2 + 2?",
        "gen_ai.prompt.10.role": "tool",
        "gen_ai.prompt.10.content": "4",
        "gen_ai.prompt.10.tool_call_id": "c",
        "gen_ai.prompt.2.role": "assistant",
        "gen_ai.prompt.2.tool_calls.0.id": "c",
        "gen_ai.prompt.2.tool_calls.0.name": "add",
        "gen_ai.prompt.2.tool_calls.0.arguments": '{"a": 2}',
        "gen_ai.completion.0.role": "assistant",
        "gen_ai.completion.0.content": "It is 4.",
        "gen_ai.completion.0.finish_reason": "stop",
        "llm.request.functions.0.name": "add",
        "llm.request.functions.0.parameters": '{"type": "object"}',
        "traceloop.association.properties.user_id": "ann",
    }
    listed = [{"key": name, "value": any_value(value)} for name, value in told.items()]
    got = only(read(tmp_path, traces({"spanId": "s", "attributes": listed})))
    assert [dict(each) for each in got.messages[:2]] == ASKED
    assert [each["role"] for each in got.messages[2:]] == ["assistant", "tool"]
    assert got.messages[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2}'}  # pyright: ignore
    assert (got.answer.get("content"), got.user, got.tools[0]["function"]["name"]) == ("It is 4.", "ann", "add")


def test_spans_without_content_are_no_error_and_half_of_one_is(tmp_path: Path):
    bare = {"spanId": "a", "attributes": attributes(gen_ai__operation__name="chat")}
    half = {"spanId": "b", "attributes": attributes(gen_ai__operation__name="chat", gen_ai__input__messages=PARTS)}
    whole = {"spanId": "c", "attributes": attributes(gen_ai__input__messages=PARTS, gen_ai__output__messages=SAYS)}
    logs = read(tmp_path, traces(bare, half, whole))
    assert len(logs.exchanges) == 1 and [each.place for each in logs.bad] == ["log.jsonl:1"]


# ---- Langfuse ----
def test_observations_traces_and_scores_of_langfuse(tmp_path: Path):
    trace = {"id": "t1", "userId": "ann", "sessionId": "s1", "projectId": "p", "input": None, "output": None}
    generation = {
        "id": "o1",
        "traceId": "t1",
        "type": "GENERATION",
        "startTime": "2026-05-01T12:00:00.000Z",
        "model": "m",
        "input": {"messages": ASKED},
        "output": {"role": "assistant", "content": "4"},
    }
    scores = [
        {"id": "x", "traceId": "t1", "observationId": "o1", "name": "thumb", "value": 1, "dataType": "NUMERIC"},
        {"id": "y", "traceId": "t1", "name": "resolved", "value": 0, "stringValue": "False", "dataType": "BOOLEAN"},
        {"id": "z", "traceId": "t1", "name": "tone", "stringValue": "warm", "dataType": "CATEGORICAL"},
        {"id": "w", "traceId": "t1", "name": "correction", "stringValue": "Four.", "dataType": "CORRECTION"},
    ]
    logs = read(tmp_path, trace, generation, generation | {"type": "SPAN", "id": "o2"}, *scores)
    got = only(logs)
    assert (got.ids, got.trace, got.time, got.model) == (("o1",), "t1", MAY, "m")
    assert logs.belongs == [Belongs(id="t1", user="ann", conversation="s1")]
    assert logs.outcomes == [
        Outcome(id="o1", name="thumb", value=1.0, rating="x"),
        Outcome(id="t1", name="resolved", value=0.0, rating="y"),
        Outcome(id="t1", name="edited", edited="Four.", rating="w"),
    ]


def test_langfuses_blob_storage_writes_texts_and_snake_case(tmp_path: Path):
    row = {
        "id": "o1",
        "trace_id": "t1",
        "type": "GENERATION",
        "start_time": "2026-05-01 12:00:00.000000",
        "user_id": "ann",
        "session_id": "s1",
        "provided_model_name": "m",
        "input": json.dumps(ASKED),
        "output": "4",
    }
    got = only(read(tmp_path, row))
    assert (got.user, got.conversation, got.time, got.model, len(got.messages)) == ("ann", "s1", MAY, "m", 2)


def test_a_trace_as_it_is_downloaded_and_one_without_a_generation(tmp_path: Path):
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    inside = {"id": "o1", "type": "GENERATION", "input": [*ASKED, tool], "output": "4"}
    down = {"id": "t1", "userId": "u", "tags": [], "scores": [{"name": "ok", "value": 1}], "observations": [inside]}
    logs = read(tmp_path, {"trace": down, "observations": [inside], "scores": down["scores"]})
    assert (len(only(logs).tools), logs.outcomes) == (1, [Outcome(id="t1", name="ok", value=1.0)])
    alone = only(read(tmp_path, {"id": "t2", "userId": "u", "tags": [], "input": "Hello?", "output": "Hi."}))
    assert (alone.ids, alone.messages[0]["content"]) == (("t2",), "Hello?")  # pyright: ignore


# ---- LangSmith ----
def test_runs_and_feedback_of_langsmith(tmp_path: Path):
    message = {"lc": 1, "type": "constructor", "id": ["langchain", "schema", "messages", "HumanMessage"]}
    run = {
        "id": "r1",
        "trace_id": "root",
        "run_type": "llm",
        "start_time": "2026-05-01T12:00:00",
        "inputs": {"messages": [[message | {"kwargs": {"content": "What is 2 + 2?", "type": "human"}}]]},
        "outputs": {"generations": [[{"text": "4", "message": {"type": "ai", "content": "4"}}]]},
        "extra": {
            "metadata": {"thread_id": "th", "user_id": "ann", "ls_model_name": "m"},
            "invocation_params": {"tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}]},
        },
        "feedback_stats": {"thumb": {"n": 2, "avg": 0.5}},
    }
    chain = {"id": "root", "trace_id": "root", "run_type": "chain", "inputs": {"question": "?"}, "outputs": {}}
    said = {"run_id": "root", "key": "resolved", "score": 1, "correction": {"output": "Four."}}
    logs = read(tmp_path, chain, run, said)
    got = only(logs)
    assert (got.ids, got.trace, got.user, got.conversation, got.model) == (("r1",), "root", "ann", "th", "m")
    assert (got.time, len(got.tools), got.answer["content"]) == (MAY, 1, "4")  # pyright: ignore
    assert [(each.id, each.name, each.value) for each in logs.outcomes] == [
        ("r1", "thumb", 0.5),
        ("root", "resolved", 1.0),
        ("root", "edited", None),
    ]


def test_langsmiths_wrapped_clients(tmp_path: Path):
    openai = {"id": "a", "run_type": "llm", "inputs": {"messages": ASKED}, "outputs": CHAT}
    said = {"role": "assistant", "type": "message", "content": [{"type": "text", "text": "4"}]}
    anthropic = {
        "id": "b",
        "run_type": "llm",
        "inputs": {"system": "Be brief.", "messages": ASKED[1:]},
        "outputs": said,
    }
    failed = {"id": "c", "run_type": "llm", "inputs": {"messages": ASKED}, "outputs": None, "error": "timeout"}
    logs = read(tmp_path, openai, anthropic, failed)
    first, second = logs.exchanges
    assert first.messages == second.messages and first.answer == second.answer and len(logs.bad) == 1


# ---- our own ----
def test_our_rollouts_and_ratings(tmp_path: Path):
    def rollout(text: str, reward: float, reason: FinishReason = FinishReason.STOP) -> Rollout:
        completion = Completion(token_ids=(1,), logprobs=(0.0,), text=text, finish_reason=reason)
        return Rollout(turns=(Turn((2, 3), completion),), rewards={}, reward=reward)

    prompt = Prompt(id="p:1", text="2+2=", token_ids=(2, 3), columns={"answer": "4"})
    group = RolloutGroup(prompt=prompt, rollouts=(rollout("4", 1.0), rollout("5", 0.0, FinishReason.LENGTH)))
    (tmp_path / "run" / "rollouts").mkdir(parents=True)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "run" / "rollouts" / "000001.jsonl").write_text(json.dumps(group_to_json(group)) + "\n")
    logs = read_logs([tmp_path / "run"])
    assert [(each.answer["content"], each.cut) for each in logs.exchanges] == [("4", False), ("5", True)]  # pyright: ignore
    assert logs.exchanges[0].columns == {"answer": "4"} and not logs.bad
    assert [each.value for each in logs.outcomes] == [1.0, 0.0]
    rated = {"feedback": [{"rollout_id": "r1", "score": 1.0, "correction": "Four.", "user": "ann"}]}
    logs = read(tmp_path, rated, {"request": {"messages": ASKED}, "response": CHAT | {"id": "r1"}})
    assert [(each.id, each.name) for each in logs.outcomes] == [("r1", "score"), ("r1", "edited")]


# ---- files ----
def test_files_of_all_kinds_are_read_and_those_of_several_systems_together(tmp_path: Path):
    row = {"request": {"messages": ASKED}, "response": CHAT}
    (tmp_path / "a.json").write_text(json.dumps([row, row], indent=1))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps(row).encode()))
    cells = [json.dumps(each).replace('"', '""') for each in (ASKED, "4")]
    (tmp_path / "c.csv").write_text(f'id,messages,response\nx,"{cells[0]}","{cells[1]}"\n')
    (tmp_path / "d.jsonl").write_text(json.dumps({"id": "q", "run_type": "llm", "inputs": "Hi?", "outputs": "Hi."}))
    (tmp_path / "notes.txt").write_text("not a log")
    logs = read_logs([tmp_path])
    assert (len(logs.exchanges), logs.files, logs.rows, logs.bad) == (5, 4, 5, [])
    assert sum(logs.formats.values()) == 5 and len(logs.formats) == 2


@pytest.mark.parametrize("ids", [{}, {"id": 1}])
def test_rows_keep_their_own_outcomes_where_files_have_one_name(tmp_path: Path, ids: dict[str, int]):
    """As those of two days do, and the rollouts of two runs, without ids or counted anew in each; and rows in one line,
    as the pages of an API are."""
    days = {"may-1": ("4", "up"), "may-2": ("5", "down")}
    for day, (said, thumb) in days.items():
        (tmp_path / day).mkdir()
        rows = [
            {"messages": ASKED, "response": said, "thumb": thumb},
            {"messages": ASKED, "response": "7", "thumb": 0.5},
        ]
        (tmp_path / day / "log.jsonl").write_text(json.dumps({"data": rows}))
    for sources in ([tmp_path], [tmp_path / day for day in days]):
        logs = read_logs(sources)
        known = joined(logs.exchanges, logs.outcomes)
        scores = [(each.answer["content"], known.of[at][0].value) for at, each in enumerate(logs.exchanges)]  # pyright: ignore
        assert scores == [("4", 1.0), ("7", 0.5), ("5", 0.0), ("7", 0.5)]
        assert len({each.place for each in logs.exchanges}) == 4


@pytest.mark.parametrize("name", ["log.csv.gz", "log.parquet.gz", "log.parquet"])
def test_tables_are_read_gzipped_or_not_and_a_broken_one_is_an_error(tmp_path: Path, name: str):
    rows = [{"id": f"x{n}", "messages": json.dumps(ASKED), "response": n} for n in (0, 4)]  # columns are typed
    table = Dataset.from_list(rows)
    path, plain = tmp_path / name, tmp_path / name.removesuffix(".gz")
    (table.to_csv if ".csv" in name else table.to_parquet)(str(plain))
    if plain != path:
        path.write_bytes(gzip.compress(plain.read_bytes()))
    found = [(each.ids, each.answer["content"]) for each in read_logs([path]).exchanges]  # pyright: ignore
    assert found == [(("x0",), "0"), (("x4",), "4")]
    broken = b"a,b\n1\n" if ".csv" in name else b"PAR1"
    path.write_bytes(gzip.compress(broken) if name.endswith(".gz") else broken)
    with raises(DataError, field="SOURCE"):
        read_logs([path])
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(bytes(99))[:12] + bytes(9))
        with raises(DataError, field="SOURCE", words=False):
            read_logs([path])


@pytest.mark.parametrize("name", ["spans.json", "spans.jsonl", "spans.jsonl.gz"])
def test_values_that_are_spread_over_lines_are_read_one_after_another(tmp_path: Path, name: str):
    """As OpenTelemetry's SDK prints spans to the console, and as people pretty-print."""
    row = {"request": {"messages": ASKED}, "response": CHAT}
    text = "\n".join(json.dumps(each, indent=4) for each in (row, [row, row])) + "\n"
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    logs = read_logs([tmp_path / name])
    assert [each.place for each in logs.exchanges] == [f"{name}:{n}" for n in (1, 2, 3)] and not logs.bad
    (tmp_path / "torn.json").write_text(text[:-9])  # the second value is not whole
    torn = read_logs([tmp_path / "torn.json"])
    assert (len(torn.exchanges), [each.place for each in torn.bad]) == (1, ["torn.json:2"])


def test_a_bad_line_is_counted_with_its_place(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    good = json.dumps({"request": {"messages": ASKED}, "response": CHAT})
    path.write_bytes(b'{"torn": \n\n[1, 2]\n{"x": 1}\n\xff\xfe\n' + good.encode())
    logs = read_logs([path])
    places = ["log.jsonl:1", "log.jsonl:3.1", "log.jsonl:3.2", "log.jsonl:4", "log.jsonl:5"]
    assert [each.place for each in logs.bad] == places
    assert len(logs.exchanges) == 1 and logs.rows == 6


def test_nothing_that_is_known_is_an_error(tmp_path: Path):
    with raises(DataError, field="SOURCE", kind="unrecognised"):
        read(tmp_path, {"level": "info", "text": "started"})
    with raises(DataError, field="SOURCE", kind="empty"):
        read(tmp_path)
    with raises(DataError, field="SOURCE", kind="unusable"):
        read(tmp_path, {"request": {"messages": ASKED}})
    with raises(DataError, field="SOURCE", kind="missing"):
        read_logs([tmp_path / "absent.jsonl"])
    with raises(DataError, field="SOURCE"):
        read_logs([tmp_path / "log.txt"]) if (tmp_path / "log.txt").write_text("x") else None
    (tmp_path / "empty").mkdir()
    with raises(DataError, field="SOURCE"):
        read_logs([tmp_path / "empty"])


def test_what_is_wrong_in_a_row_with_many_is_left_out_alone(tmp_path: Path):
    told = attributes(gen_ai__input__messages=PARTS, gen_ai__output__messages=SAYS)
    spans = traces(
        {"spanId": 7, "attributes": "x"}, {"spanId": "a", "attributes": told}, {"spanId": "b", "events": [1]}
    )
    half = {"id": "o1", "type": "GENERATION", "input": ASKED}
    trace = {"id": "t", "userId": "u", "tags": [], "observations": [half, half | {"id": "o2", "output": "4"}]}
    logs = read(tmp_path, spans, trace)
    assert [each.ids for each in logs.exchanges] == [("o2",), ("a",)]
    assert [each.place for each in logs.bad] == ["log.jsonl:1", "log.jsonl:2"]


def test_a_line_that_is_too_deep_is_counted(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    deep = "[" * 100_000 + "]" * 100_000
    good = {"request": {"messages": ASKED}, "response": CHAT}
    path.write_text(f"{deep}\n{json.dumps({'messages': deep, 'response': 'x'})}\n{json.dumps(good)}\n")
    logs = read_logs([path])
    assert [each.place for each in logs.bad] == ["log.jsonl:1"] and len(logs.exchanges) == 2


# ---- values ----
def test_times_and_values_of_any_spelling():
    spelled = [MAY, str(int(MAY)), MAY * 1e3, MAY * 1e6, str(int(MAY * 1e9)), "2026-05-01T14:00:00+02:00"]
    assert {seconds(each) for each in spelled} == {MAY}
    assert seconds("yesterday") is seconds(True) is seconds(None) is seconds(-5) is seconds(1e300) is None
    assert [value_of("thumb", each) for each in ("up", "👎", True, -1, 0.5, "7", "so so")] == [
        1,
        0,
        1,
        -1,
        0.5,
        7,
        None,
    ]
    huge = 10**400
    assert seconds(huge) is seconds(str(huge)) is value_of("score", huge) is value_of("score", str(huge)) is None
    assert value_of("retried", True) == 0 and value_of("retried", "no") == 1 and value_of("score", float("nan")) is None


def test_a_number_without_bounds_is_one_bad_row(tmp_path: Path):
    told = [{"key": "gen_ai.usage.input_tokens", "value": {"intValue": float("inf")}}]
    logs = read(tmp_path, traces({"spanId": "a", "attributes": told}), {"messages": ASKED, "response": "4"})
    assert (len(logs.exchanges), [each.place for each in logs.bad]) == (1, ["log.jsonl:1"])


def test_the_rows_of_the_page_are_read_as_it_says(tmp_path: Path):
    page = (Path(__file__).parents[2] / "docs" / "logs.md").read_text(encoding="utf-8")
    blocks = [block.partition("```")[0] for block in page.split("```json\n")[1:]]
    rows = [json.loads(line) for line in blocks[0].splitlines()]
    logs = read(tmp_path, *rows)
    assert len(logs.exchanges) == len(rows) and not logs.bad and len(logs.formats) == 4
    assert [each.answer.get("content") for each in logs.exchanges] == ["4"] * len(rows)
    path = tmp_path / "outcomes.jsonl"
    path.write_text(blocks[1])
    assert [each.id for each in read_outcomes(path)] == ["chatcmpl-1", "chatcmpl-2", "c7", "c7", "r"]
