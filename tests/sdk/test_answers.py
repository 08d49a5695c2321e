"""What the client reads is what the server's own document says that it answers: the same names, of the same kinds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest
from pydantic import TypeAdapter

from groupwise.config.serve import ServeConfig
from groupwise.sdk import types as client
from groupwise.server.app import build_app
from groupwise.server.guard import Gate
from groupwise.server.metrics import Recorder
from groupwise.server.state import Server

PAIRS = {
    client.Health: "Health",
    client.Model: "ModelCard",
    client.Usage: "Usage",
    client.RolloutCompletion: "BatchCompletion",
    client.ChatMessage: "AnsweredMessage",
    client.ChatChoice: "ChatChoice",
    client.ChatReply: "ChatCompletion",
    client.SubmittedJob: "TrainSubmitted",
    client.JobError: "JobError",
    client.Job: "TrainStatus",
    client.Cancelled: "CancelAnswer",
    client.AdapterVersion: "AdapterVersion",
    client.Adapter: "AdapterDetail",
    client.AdapterList: "AdapterList",
    client.ActiveVersion: "AdapterLoaded",
    client.DeletedAdapter: "AdapterDeleted",
    client.UploadedAdapter: "AdapterUploaded",
    client.MergedAdapter: "AdapterMerged",
}
LEFT_OUT = {"checks", "tool_calls"}  # by the server rather than sent as null, which its document cannot say
Schema = Mapping[str, Any]


@pytest.fixture(scope="module")
def answers() -> Mapping[str, Schema]:
    """The schemas of the server's OpenAPI document."""
    names = ("base", "engine", "store", "ledger", "policies", "reader", "supervisor")
    parts: dict[str, Any] = dict.fromkeys(names, cast(Any, None))
    server = Server(config=ServeConfig(), recorder=Recorder(model_name="m"), **parts)
    return build_app(server, gate=Gate("loading")).openapi()["components"]["schemas"]


def kinds(schema: Schema, named: Mapping[str, Schema]) -> set[str]:
    """The JSON types that a value may have; "any" where nothing is said."""
    if "$ref" in schema:
        return kinds(named[schema["$ref"].rpartition("/")[2]], named)
    if several := schema.get("anyOf") or schema.get("oneOf"):
        return {kind for each in several for kind in kinds(each, named)}
    if "type" in schema:
        return {schema["type"]}
    words = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    return {"string" if isinstance(word, str) else "integer" for word in words} or {"any"}


@pytest.mark.parametrize("kind", PAIRS, ids=lambda kind: kind.__name__)
def test_what_the_client_reads_is_what_the_server_answers(answers: Mapping[str, Schema], kind: type) -> None:
    read = TypeAdapter(kind).json_schema(by_alias=True)
    answered = answers[PAIRS[kind]]["properties"]
    assert set(read["properties"]) <= set(answered), "the client reads what the server does not say"
    for name, schema in read["properties"].items():
        accepted = kinds(schema, read.get("$defs", {}))
        accepted |= {"integer"} if "number" in accepted else set()
        said = kinds(answered[name], answers) - ({"null"} if name in LEFT_OUT else set())
        assert "any" in accepted or said <= accepted, f"{name}: the server says {said}, the client reads {accepted}"


def test_every_answer_of_the_client_is_compared() -> None:
    """But for what is made here of several answers, and the events of a stream, which no schema has."""
    made_here = {"SampledGroup", "ChatDelta", "JobEvent"}
    public = {
        name for name, kind in vars(client).items() if isinstance(kind, type) and hasattr(kind, "__dataclass_fields__")
    }
    assert public - made_here == {kind.__name__ for kind in PAIRS}
