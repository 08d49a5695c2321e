"""GET /v1/events over a socket: everything at first, then what changes, and an end."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from groupwise.server.event_stream import PING
from serving import running
from whole_server import Whole, whole

NAMES = {"health", "decode", "requests", "adapters", "jobs", "learn"}
CHAT = {"messages": [{"role": "user", "content": "What is 2+2?"}], "max_tokens": 4, "temperature": 0}

Events = Iterator[tuple[str, Any]]


@pytest.fixture(scope="module")
def site(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Whole, str]]:
    with whole(tmp_path_factory.mktemp("state"), model_dir) as site, running(site.app) as port:
        yield site, f"http://127.0.0.1:{port}"


@contextmanager
def events(url: str) -> Iterator[Events]:
    with httpx2.stream("GET", f"{url}/v1/events", timeout=120) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        yield parsed(answer.iter_lines())


def parsed(lines: Iterator[str]) -> Events:
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            yield name, json.loads(line[6:])
        else:
            assert line in ("", PING.decode().strip())


def first(stream: Events) -> dict[str, Any]:
    return dict(next(stream) for _ in NAMES)


def next_of(stream: Events, name: str) -> Any:
    return next(data for each, data in stream if each == name)


def test_feedback_is_told_when_it_comes(site: tuple[Whole, str]) -> None:
    server, url = site
    with events(url) as stream:
        before = first(stream)["learn"]["counts"]["waiting"]
        answer = httpx2.post(f"{url}/v1/chat/completions", json=CHAT, timeout=60).json()
        said = httpx2.post(f"{url}/v1/feedback", json={"rollout_id": answer["id"], "thumb": "up"}, timeout=60)
        assert said.status_code == 200, said.text
        assert next_of(stream, "learn")["counts"]["waiting"] == before + 1
        server.server.feedback.note("paused", "somebody paused it")
        assert next_of(stream, "learn")["transitions"][0]["kind"] == "paused"


def submitted(site: Whole) -> str:
    job, _ = site.server.ledger.submit(
        kind="grpo", adapter="x", config={}, summary={}, payload=b"{}", steps=3, auto_load=True
    )
    return job.id


def test_it_begins_with_what_the_routes_answer(site: tuple[Whole, str]) -> None:
    whole, url = site
    with events(url) as stream:
        told = first(stream)
    assert set(told) == NAMES
    assert told["jobs"] == whole.http.get("/v1/train/status").json()
    assert told["adapters"] == whole.http.get("/v1/adapters").json()
    health = whole.http.get("/v1/health").json()
    assert told["health"] | {"uptime_seconds": 0} == health | {"uptime_seconds": 0}


def test_a_job_is_told_when_it_changes_and_others_are_not(site: tuple[Whole, str]) -> None:
    whole, url = site
    old = submitted(whole)
    with events(url) as stream:
        assert old in [job["job_id"] for job in first(stream)["jobs"]]
        new = submitted(whole)
        assert [(job["job_id"], job["state"]) for job in next_of(stream, "jobs")] == [(new, "queued")]
        whole.server.ledger.cancel(old)
        changed = {job["job_id"]: job for job in next_of(stream, "jobs")}
        assert changed[old]["state"] == "cancelled" and changed[new]["position"] == 1
        whole.server.ledger.cancel(new)
        assert [job["state"] for job in next_of(stream, "jobs")] == ["cancelled"]


def test_adapters_and_requests_are_told_when_there_are_new_ones(
    site: tuple[Whole, str], make_adapter: Callable[..., Path]
) -> None:
    whole, url = site
    with events(url) as stream:
        assert first(stream)["adapters"]["available"] == []
        version = str(whole.publish(make_adapter(whole.server.base, seed=1), "math"))
        assert next_of(stream, "adapters")["available"][0]["versions"] == [version]
        assert httpx2.post(f"{url}/v1/adapters/math/activate", timeout=120).status_code == 200
        assert next_of(stream, "adapters")["active_version"] == version
        assert httpx2.put(f"{url}/v1/adapters/math/notes", json={"note": "sums"}, timeout=60).status_code == 200
        assert next_of(stream, "adapters")["available"][0]["notes"] == {version: "sums"}
        assert httpx2.post(f"{url}/v1/chat/completions", json=CHAT, timeout=120).status_code == 200
        assert next_of(stream, "requests")[0]["prompt_preview"] == "What is 2+2?"


def test_it_ends_when_the_server_does(site: tuple[Whole, str]) -> None:
    """The last of these tests: nothing starts the supervisor again."""
    whole, url = site
    with events(url) as stream:
        first(stream)
        asyncio.run(whole.server.supervisor.stop(timeout_s=1))
        assert {name for name, _ in stream} <= NAMES
