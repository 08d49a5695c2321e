"""The API's document is true: bodies, limits, errors and the key, for every route there is."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from groupwise.server.openapi import ALWAYS_OPEN
from whole_server import Whole, whole

KEY = "sk-planted-0123456789"
METHODS = {"get", "post", "delete", "put", "patch"}


@pytest.fixture(scope="module")
def site(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    state = tmp_path_factory.mktemp("state")
    with whole(state, model_dir, api_key=KEY, max_n=7, max_messages=9, chat_body_bytes=1 << 16) as site:
        yield site


@pytest.fixture(scope="module")
def document(site: Whole) -> dict[str, Any]:
    response = site.http.get("/openapi.json")
    assert response.status_code == 200
    return response.json()


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in document["paths"].items():
        for method, operation in item.items():
            assert method in METHODS
            yield path, method.upper(), operation


def concrete(path: str) -> str:
    return re.sub(r"\{[^}]*\}", "x", path)


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        node = list(node.values())
    if isinstance(node, list):
        for item in node:
            yield from references(item)


def test_the_routes_of_the_seed_and_of_openai_are_there(document: dict[str, Any]) -> None:
    for path, method in [
        ("/v1/chat/completions", "post"), ("/v1/completions", "post"), ("/v1/completions/batch", "post"),
        ("/v1/models", "get"), ("/v1/train/grpo", "post"), ("/v1/train/sft", "post"), ("/v1/train/status", "get"),
        ("/v1/train/status/{job_id}", "get"), ("/v1/train/queue", "get"), ("/v1/train/queue/{job_id}", "delete"),
        ("/v1/train/cancel/{job_id}", "post"), ("/v1/train/events/{job_id}", "get"), ("/v1/adapters", "get"),
        ("/v1/adapters/load", "post"), ("/v1/adapters/unload", "post"), ("/v1/adapters/merge", "post"),
        ("/v1/adapters/upload", "post"), ("/v1/adapters/rollback", "post"), ("/v1/adapters/{name}", "delete"),
        ("/health", "get"), ("/v1/health", "get"), ("/ready", "get"), ("/metrics", "get"), ("/v1/config", "get"),
        ("/v1/stats/decode", "get"), ("/v1/stats/recent-requests", "get"),
    ]:  # fmt: skip
        assert method in document["paths"][path], path


def test_every_reference_resolves_and_nothing_of_fastapis_is_left(document: dict[str, Any]) -> None:
    for reference in references(document):
        node: Any = document
        for key in reference.removeprefix("#/").split("/"):
            node = node[key]
    text = json.dumps(document)
    for leftover in ("HTTPValidationError", "x-definitions", "x-limit", "$defs"):
        assert leftover not in text


def test_limits_are_those_of_this_server(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    n = schemas["ChatRequest"]["properties"]["n"]["anyOf"][0]
    assert (n["minimum"], n["maximum"]) == (1, 7)
    assert schemas["ChatRequest"]["properties"]["messages"]["maxItems"] == 9


def test_our_bodies_are_closed_and_openais_are_open(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for name in ("BatchRequest", "GrpoRequest", "SftRequest", "MergeRequest", "LoadRequest"):
        assert schemas[name]["additionalProperties"] is False, name
    for name in ("ChatRequest", "CompletionRequest"):
        assert schemas[name].get("additionalProperties") in (None, True), name


def test_every_operation_names_the_key_and_the_guards_errors(document: dict[str, Any]) -> None:
    for path, method, operation in operations(document):
        open_ = path == ALWAYS_OPEN
        assert operation.get("security") == (None if open_ else [{"key": []}]), path
        expected = {"403"} if open_ else {"400", "401", "403", "429", "500", "503", "504"}
        expected |= {"408", "413", "415"} if "requestBody" in operation else set()
        assert expected <= set(operation["responses"]), (method, path)
        for status, response in operation["responses"].items():
            if status >= "400":
                schema = response["content"]["application/json"]["schema"]
                envelope = "AnthropicEnvelope" if path.startswith("/v1/messages") else "ErrorEnvelope"
                assert schema == {"$ref": f"#/components/schemas/{envelope}"}, (method, path, status)
            assert response["description"], (method, path, status)
        assert operation["summary"] and operation.get("description"), (method, path)


ELSEWHERE = {  # answered where there is no operation, or in a stream; or a base of others
    *("route_not_found", "method_not_allowed", "invalid_http", "bad_request", "client_too_slow", "try_again"),
    *("checkpoint_not_found", "future_gone", "not_offered", "session_gone"),  # under /api/v1, which is Tinker's
    "run_not_found",  # of `groupwise ui`
    *("owners_only", "tenant_not_found"),  # before any operation
}


def test_every_error_code_of_the_guide_is_in_the_document_with_its_status(document: dict[str, Any]) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    told = set(re.findall(r"^### `(\w+)`\n\n(\d{3})\b", guide, re.MULTILINE))
    named = {
        (code, status)
        for _, _, operation in operations(document)
        for status, response in operation["responses"].items()
        for code in re.findall(r"`(\w+)`", response["description"])
    }
    assert {each for each in told - named if each[0] not in ELSEWHERE} == set()
    assert len(told) > 30


def test_a_submission_names_its_own_errors(document: dict[str, Any]) -> None:
    described = {
        path: document["paths"][path]["post"]["responses"]["400"]["description"]
        for path in ("/v1/train/grpo", "/v1/train/sft", "/v1/completions/batch")
    }
    for code in ("no_signal", "rollout_not_found", "context_length_exceeded", "invalid_messages", "limit_exceeded"):
        assert f"`{code}`" in described["/v1/train/grpo"], code
    assert "`no_signal`" not in described["/v1/train/sft"]
    assert "`unsupported_parameter`" in described["/v1/completions/batch"]


def test_answers_name_the_headers_that_they_bring(document: dict[str, Any]) -> None:
    headers = document["components"]["headers"]
    for path, method, operation in operations(document):
        for status, response in operation["responses"].items():
            expected = {"x-request-id": "RequestId"}
            expected |= {"retry-after": "RetryAfter"} if status in ("429", "503") else {}
            expected |= {"x-should-retry": "ShouldRetry"} if status in ("408", "409", "413", "504", "507") else {}
            found = {name: each["$ref"].rpartition("/")[2] for name, each in response["headers"].items()}
            assert found == expected and headers.keys() >= set(found.values()), (method, path, status)


def test_lists_say_how_many_they_need(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    least = {("GrpoRequest", "groups"): 1, ("SftRequest", "examples"): 1, ("ScoredGroup", "completions"): 2}
    for (name, field), count in least.items():
        assert schemas[name]["properties"][field]["minItems"] == count, name
    for field in ("token_ids", "prompt_token_ids"):
        assert schemas["ScoredCompletion"]["properties"][field]["anyOf"][0]["minItems"] == 1


def test_every_route_but_health_needs_the_key(site: Whole, document: dict[str, Any]) -> None:
    paths = [(path, method) for path, method, _ in operations(document)]
    for path, method in [*paths, ("/openapi.json", "GET"), ("/nowhere", "GET"), ("/docs", "GET")]:
        response = site.http.request(method, concrete(path), headers={"authorization": ""})
        assert response.status_code == (200 if path == ALWAYS_OPEN else 401), (method, path)


JSON_ROUTES = [
    *[f"/v1/{path}" for path in ("chat/completions", "completions", "completions/batch", "train/grpo", "train/sft")],
    *[f"/v1/{path}" for path in ("messages", "messages/count_tokens", "responses", "feedback", "learn/raters/trust")],
    *[f"/v1/adapters/{path}" for path in ("load", "merge", "math/activate", "math/notes")],
]
PUT = {"/v1/adapters/math/notes"}  # the others are POST
HOSTILE = {
    "malformed": (b"{", 400),
    "not an object": (b"[]", 400),
    "NaN": (b'{"n": NaN}', 400),
    "1e999": (b'{"temperature": 1e999, "reward": 1e999}', 400),
    "surrogate": (b'{"name": "\\ud800"}', 400),
    "deep": (b"[" * 30_000, 400),
    "digits": (b"1" * 6000, 400),
    "not utf-8": (b'{"name": "\xff"}', 400),
    "too large": (b" " * (65 << 20), 413),
    "a number for everything": (b'{"name":1,"messages":1,"prompt":1,"prompts":1,"groups":1,"examples":1}', 400),
    "null for everything": (b'{"name":null,"messages":null,"prompts":null,"groups":null,"version":"x"}', 400),
}


def method_of(path: str) -> str:
    return "PUT" if path in PUT else "POST"


@pytest.mark.parametrize("path", JSON_ROUTES)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bodies_are_refused_everywhere(site: Whole, path: str, name: str) -> None:
    content, status = HOSTILE[name]
    response = site.http.request(method_of(path), path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    assert set(response.json()["error"]) == {"message", "type", "param", "code", "hint"}
    assert ("type" in response.json()) == path.startswith("/v1/messages")
    assert len(response.text) < 1500


def test_the_document_lists_every_json_route(document: dict[str, Any]) -> None:
    bodies = {
        concrete(path).replace("/x/", "/math/")
        for path, _, operation in operations(document)
        if "application/json" in operation.get("requestBody", {}).get("content", {})
    }
    assert bodies == set(JSON_ROUTES)


@pytest.mark.parametrize("path", JSON_ROUTES)
def test_bodies_are_json_by_their_own_account_everywhere(site: Whole, path: str) -> None:
    response = site.http.request(method_of(path), path, content=b"{}", headers={"content-type": "text/plain"})
    assert response.status_code == 415


@pytest.mark.parametrize("name", ["..", "%2e%2e", "a%00b", "%2Fetc%2Fpasswd", "C:%5C", "~", "a" * 300, "a%0ab", "‮x"])
def test_names_in_paths_cannot_leave_their_place(site: Whole, document: dict[str, Any], name: str) -> None:
    for path, method, _ in operations(document):
        if "{" in path:
            response = site.http.request(method, re.sub(r"\{[^}]*\}", name, path))
            assert 400 <= response.status_code < 500, (method, path, response.text)
            assert len(response.text) < 1500
