"""Who may ask, how much, how slowly; and that every error has the envelope. In process, and over raw sockets."""

import asyncio
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from starlette.responses import StreamingResponse
from starlette.testclient import TestClient

from groupwise.config.serve import ServeConfig
from groupwise.errors import (
    ConfigError,
    ConflictError,
    GroupwiseError,
    NotReadyError,
    OverloadedError,
    RequestError,
    StorageError,
    StorageFullError,
)
from groupwise.server.errors import add_handlers, envelope
from groupwise.server.guard import UPLOADS, Gate, Guard, read_body
from groupwise.server.metrics import Recorder
from groupwise.server.openapi import describe
from groupwise.server.schema_adapters import LoadRequest
from groupwise.server.schema_openai import ChatRequest
from groupwise.server.schema_train import GrpoRequest
from groupwise.store.keys import KeyFile
from groupwise.tasks.arriving import SMALL, BodyGuard, ByteLimit
from raw_http import Answered, connect, head, is_closed, listening, read
from wording import raises, wording

KEY = "sk-planted-0123456789"
JSON = "content-type: application/json"
CHAT = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
ENVELOPE = {"message", "type", "param", "code", "hint"}


@dataclass
class Site:
    """A small application behind the guard."""

    config: ServeConfig
    gate: Gate = field(default_factory=lambda: Gate("ready"))
    held: list[str] = field(default_factory=list)
    go: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.recorder = Recorder(model_name="tiny")
        self.app = FastAPI(openapi_url="/openapi.json", docs_url=None, redoc_url=None, redirect_slashes=False)
        add_handlers(self.app, without={"/srv/groupwise-state": "<state_dir>"})
        describe(self.app, self.config)
        _add_routes(self.app, self)
        self.asgi = Guard(self.app, config=self.config, gate=self.gate, recorder=self.recorder)
        self.http = TestClient(self.asgi, base_url="http://127.0.0.1:8420", raise_server_exceptions=False)


def _add_routes(app: FastAPI, site: Site) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> dict[str, int]:
        return {"messages": len((await read_body(request, ChatRequest)).messages)}

    @app.post("/v1/train/grpo")
    async def grpo(request: Request) -> dict[str, int]:
        return {"groups": len((await read_body(request, GrpoRequest)).groups)}

    @app.post("/v1/adapters/load")
    async def load(request: Request) -> dict[str, str]:
        return {"name": (await read_body(request, LoadRequest)).name}

    @app.post("/v1/adapters/upload")
    async def upload(request: Request) -> dict[str, int]:
        return {"bytes": len(await request.body())}

    @app.post("/v1/adapters/unload")
    async def unload() -> dict[str, str]:
        return {"status": "unloaded"}

    @app.delete("/v1/adapters/{name}")
    async def delete(name: str) -> dict[str, str]:
        raise ConflictError(f"{name} is active")

    @app.get("/v1/adapters/{name}")
    async def show(name: str, after: int = 0) -> dict[str, Any]:
        return {"name": name, "after": after}

    @app.get("/bug")
    async def bug() -> None:
        raise ValueError("/srv/groupwise-state/secret.py went wrong")

    @app.get("/full")
    async def full() -> None:
        raise StorageFullError("publishing failed: /srv/groupwise-state/adapters/x: no space left")

    @app.get("/later")
    async def later() -> None:
        raise NotReadyError("swapping", retry_after=2.5)

    @app.post("/v1/adapters/merge")
    @app.api_route("/hold", methods=["GET", "POST"], include_in_schema=False)
    async def hold() -> dict[str, str]:
        site.held.append("hold")
        await asyncio.to_thread(site.go.wait, 10)
        return {}

    @app.get("/v1/train/events/{job_id}")
    async def events(job_id: str) -> StreamingResponse:
        return StreamingResponse(_ticks(), media_type="text/event-stream")

    @app.get("/cut")
    async def cut() -> StreamingResponse:
        return StreamingResponse(_breaks())


async def _ticks() -> AsyncIterator[bytes]:
    while True:
        yield b": ping\n\n"
        await asyncio.sleep(0.02)


async def _breaks() -> AsyncIterator[bytes]:
    yield b"some"
    raise ValueError("in the middle")


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where these servers keep what they write, which is below the working directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("guard"))
        yield Path.cwd()


@pytest.fixture(scope="module")
def site() -> Site:
    limits = {"chat_body_bytes": 4096, "train_body_bytes": 8192}
    return Site(ServeConfig(**limits, body_timeout_s=0.3, header_timeout_s=0.4))


@pytest.fixture(scope="module")
def port(site: Site) -> Iterator[int]:
    with listening(site.asgi, site.config) as port:
        yield port


def refused(response: Any, status: int, code: str) -> dict[str, Any]:
    """The error of a response, which must have the envelope."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == ENVELOPE and error["code"] == code and error["message"]
    assert re.fullmatch(r"[\w-]{1,64}", response.headers["x-request-id"])
    return error


# ---- one envelope ----
@pytest.mark.parametrize("kind", [ConfigError, RequestError, StorageError, NotReadyError])
def test_the_field_of_any_error_is_openais_param(kind: type[GroupwiseError]) -> None:
    for path in ("groups[0].messages", None):
        told = json.loads(envelope(kind("no", field=path, kind="conflict"))[2])["error"]
        assert told["param"] == path and set(told) == ENVELOPE


@pytest.mark.parametrize(
    ("send", "status", "code", "kind"),
    [
        (lambda h: h.get("/v1/chat"), 404, "route_not_found", "invalid_request_error"),
        (lambda h: h.get("/v1/chat/completions"), 405, "method_not_allowed", "invalid_request_error"),
        (lambda h: h.request("TRACE", "/health"), 405, "method_not_allowed", "invalid_request_error"),
        (lambda h: h.head("/v1/train/grpo/"), 404, None, None),
        (lambda h: h.post("/v1/chat/completions", content=b"{"), 415, "unsupported_media_type", None),
        (lambda h: h.post("/v1/chat/completions", json={}), 400, "invalid_value", "invalid_request_error"),
        (lambda h: h.get("/v1/adapters/x?after=y"), 400, "invalid_value", "invalid_request_error"),
        (lambda h: h.delete("/v1/adapters/x"), 409, "already_exists", "invalid_request_error"),
        (lambda h: h.get("/bug"), 500, "internal_error", "server_error"),
        (lambda h: h.get("/full"), 507, "storage_full", "server_error"),
        (lambda h: h.get("/later"), 503, "not_ready", "server_error"),
    ],
)
def test_every_error_has_the_envelope(site: Site, send: Any, status: int, code: str | None, kind: str | None) -> None:
    response = send(site.http)
    if code is None:  # HEAD has no body
        assert response.status_code == status
    else:
        error = refused(response, status, code)
        assert kind is None or error["type"] == kind


def test_headers_say_whether_to_try_again(site: Site) -> None:
    assert site.http.get("/later").headers["retry-after"] == "3"
    for response in (site.http.delete("/v1/adapters/x"), site.http.get("/full")):
        assert response.headers["x-should-retry"] == "false"
    assert "x-should-retry" not in site.http.get("/later").headers


def test_a_405_lists_the_methods_of_all_routes_with_that_path(site: Site) -> None:
    assert site.http.put("/v1/adapters/x").headers["allow"] == "DELETE, GET, HEAD"


# ---- HEAD ----
@pytest.mark.parametrize("path", ["/health", "/v1/adapters/x", "/v1/adapters/x?after=y", "/full", "/later", "/bug"])
def test_head_is_get_without_the_body(site: Site, port: int, path: str) -> None:
    """Errors too; and the next request on the connection is understood."""
    connection = connect(port, head("HEAD", path) + head("GET", path))
    data = b""
    while not data.endswith(b"}"):
        data += connection.recv(65536)
    connection.close()
    first, second, *_ = data.split(b"HTTP/1.1 ")[1:]
    assert first.endswith(b"\r\n\r\n") and b"content-length" in first
    assert _without_names(first) == _without_names(second.partition(b"\r\n\r\n")[0])


def _without_names(top: bytes) -> list[bytes]:
    """The status line and the headers, but for what is each answer's own."""
    lines = top.strip().split(b"\r\n")
    return [line for line in lines if not line.startswith((b"x-request-id", b"date"))]


def test_head_of_a_stream_ends(site: Site, port: int) -> None:
    connection = connect(port, head("HEAD", "/v1/train/events/x"))
    assert b"text/event-stream" in connection.recv(4096)
    connection.sendall(head("GET", "/health"))
    assert read(connection).body == b'{"status":"ok"}'
    connection.close()


def test_head_where_there_is_no_get_is_a_405_without_a_body(site: Site) -> None:
    response = site.http.head("/v1/chat/completions")
    assert (response.status_code, response.headers["allow"], response.content) == (405, "POST", b"")


def test_head_is_counted_as_head(site: Site) -> None:
    site.http.head("/v1/adapters/x")
    counted = 'groupwise_http_requests_total{handler="/v1/adapters/{name}",method="HEAD",status="200"}'
    assert counted in site.recorder.exposition().decode()


def test_a_404_proposes_a_route(site: Site) -> None:
    assert "/v1/train/grpo" in refused(site.http.post("/v1/train/gpro", json={}), 404, "route_not_found")["hint"]


def test_a_wrong_parameter_is_named(site: Site) -> None:
    error = refused(site.http.get("/v1/adapters/x?after=" + "y" * 500), 400, "invalid_value")
    assert error["param"] == "after" and len(error["message"]) < 200
    wording(error)


def test_bugs_and_paths_do_not_show(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    response = site.http.get("/bug", headers={"x-request-id": "abc-1"})
    assert "secret" not in response.text and "Traceback" not in response.text
    assert any("abc-1" in record.getMessage() and record.exc_info for record in caplog.records)
    assert "/srv" not in site.http.get("/full").text and "<state_dir>/adapters" in site.http.get("/full").text


def test_a_full_disk_is_a_line_in_the_log_not_a_traceback(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    assert site.http.get("/full").status_code == 507
    (record,) = caplog.records
    assert (record.levelname, record.exc_info) == ("WARNING", None)
    assert "GET /full: publishing failed" in record.getMessage()


def test_a_request_has_a_line_in_the_log_by_its_id(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="groupwise")
    site.http.get("/v1/adapters/x?api_key=sk-secret", headers={"x-request-id": "abc-1"})
    site.http.get("/no/such%0AGET%20/route", headers={"x-request-id": "abc-2"})
    site.http.get("/api/v1/links/secret", headers={"x-request-id": "abc-3"})
    site.http.get("/health")
    said = [record.getMessage() for record in caplog.records if record.name == "groupwise.access"]
    assert [re.sub(r"\d+ ms", "N ms", line) for line in said] == [
        "GET /v1/adapters/x 200 N ms request abc-1",
        r"GET /no/such\u000aGET /route 404 N ms request abc-2",
        "GET /api/v1/links/... 404 N ms request abc-3",
    ]


@pytest.mark.parametrize("given", ["a" * 65, "a b", "é".encode(), "a;b", ""])
def test_a_request_id_is_kept_only_if_it_is_one(site: Site, given: Any) -> None:
    assert site.http.get("/health", headers={"x-request-id": "ok_1-A"}).headers["x-request-id"] == "ok_1-A"
    fresh = site.http.get("/health", headers={"x-request-id": given}).headers["x-request-id"]
    assert re.fullmatch(r"[0-9a-f]{32}", fresh)


# ---- who may ask ----
@pytest.fixture(scope="module")
def locked() -> Site:
    return Site(ServeConfig(api_key=KEY))


@pytest.mark.parametrize(
    ("headers", "query"),
    [
        ({}, ""),
        ({"authorization": "Bearer wrong"}, ""),
        ({"authorization": f"Bearer {KEY}x"}, ""),
        ({"authorization": f"Basic {KEY}"}, ""),
        ({"authorization": KEY}, ""),
        ({"authorization": b"Bearer \xff\xfe"}, ""),
        ({"authorization": "Bearer " + "k" * (1 << 20)}, ""),
        ({"x-api-key": f"{KEY}x"}, ""),
        ({"x-api-key": KEY, "authorization": "Bearer wrong"}, ""),
        ({}, f"?api_key={KEY}"),
        ({}, f"?token={KEY}"),
    ],
)
def test_no_key_no_answer(locked: Site, headers: dict[str, Any], query: str) -> None:
    for method, path in (("GET", "/v1/adapters/x"), ("GET", "/openapi.json"), ("POST", "/nowhere"), ("GET", "/bug")):
        error = refused(locked.http.request(method, path + query, headers=headers), 401, "invalid_api_key")
        assert error["type"] == "authentication_error" and KEY not in json.dumps(error)
        assert not query or "URL" in error["hint"]
        wording(error)
    assert locked.http.get("/v1/adapters/x", headers=headers).headers["www-authenticate"] == "Bearer"


def test_the_key_opens_and_health_is_open(locked: Site) -> None:
    assert locked.http.get("/health").status_code == 200
    for scheme in ("Bearer", "bearer"):
        headers = {"authorization": f"{scheme} {KEY}"}
        assert locked.http.get("/v1/adapters/x", headers=headers).status_code == 200
    assert locked.http.get("/v1/adapters/x", headers={"x-api-key": KEY}).status_code == 200


def test_keys_are_compared_whatever_the_scheme(locked: Site) -> None:
    """Whether a key is right must not show in what a wrong scheme takes or answers."""
    right = locked.http.get("/bug", headers={"authorization": f"Basic {KEY}"})
    wrong = locked.http.get("/bug", headers={"authorization": "Basic nonsense"})
    assert right.json() == wrong.json()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8420", "LOCALHOST.", "[::1]:8420", "127.9.9.9"])
def test_local_hosts_are_known(site: Site, host: str) -> None:
    assert site.http.get("/health", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.nip.io", "localhost.evil.com", "10.0.0.1", "", "::1:x"])
def test_other_hosts_are_refused_on_loopback(site: Site, host: str) -> None:
    """DNS rebinding: a page of evil.example whose name has come to mean 127.0.0.1."""
    refused(site.http.get("/health", headers={"host": host}), 403, "forbidden")


def test_hosts_may_be_allowed_and_a_public_server_has_any() -> None:
    named = Site(ServeConfig(allowed_hosts=("box.lan",)))
    assert named.http.get("/health", headers={"host": "box.lan:80"}).status_code == 200
    assert named.http.get("/health", headers={"host": "other.lan"}).status_code == 403
    public = Site(ServeConfig(host="0.0.0.0", api_key=KEY))
    assert public.http.get("/health", headers={"host": "any.example"}).status_code == 200


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://127.0.0.1:9999", "http://[bad", "http://]", "[", "http://[::1"]
)
def test_pages_of_other_sites_change_nothing(site: Site, origin: str) -> None:
    refused(site.http.post("/v1/adapters/unload", headers={"origin": origin}), 403, "forbidden")
    assert "access-control-allow-origin" not in site.http.get("/health", headers={"origin": origin}).headers
    assert site.http.post("/v1/adapters/unload", headers={"origin": "http://127.0.0.1:8420"}).status_code == 200
    allowed = Site(ServeConfig(cors_origins=("https://app.example",)))
    assert allowed.http.post("/v1/adapters/unload", headers={"origin": "https://app.example"}).status_code == 200


# ---- when ----
def test_only_health_answers_while_loading_and_draining() -> None:
    site = Site(ServeConfig(api_key=KEY), gate=Gate())
    headers = {"authorization": f"Bearer {KEY}"}
    for phase, code in ((site.gate, "not_ready"), (None, "shutting_down")):
        if phase is None:
            site.gate.drain()
        assert site.http.get("/health").status_code == 200
        response = site.http.get("/v1/adapters/x", headers=headers)
        refused(response, 503, code)
        assert int(response.headers["retry-after"]) >= 1
        refused(site.http.get("/v1/adapters/x"), 401, "invalid_api_key")
    site.gate.phase = "ready"
    assert site.http.get("/v1/adapters/x", headers=headers).status_code == 200


def _get(port: int, path: str, method: str = "GET") -> Answered:
    connection = connect(port, head(method, path, "content-length: 0"))
    try:
        return read(connection)
    finally:
        connection.close()


def _eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_so_many_at_once_so_many_waiting_and_then_429() -> None:
    site = Site(ServeConfig(max_concurrent=2, max_waiting=1))
    with listening(site.asgi, site.config) as port:
        first = [connect(port, head("POST", "/hold", "content-length: 0")) for _ in range(2)]
        _eventually(lambda: len(site.held) == 2)
        waiting = connect(port, head("POST", "/hold", "content-length: 0"))
        _eventually(lambda: len(site.asgi._writes._waiting) == 1)
        turned_away = _get(port, "/hold", "POST")
        assert turned_away.status == 429 and turned_away.error["code"] == "overloaded"
        assert turned_away.headers["retry-after"] == "1" and turned_away.error["type"] == "rate_limit_error"
        assert _get(port, "/v1/adapters/x").status == 200  # reading is not held up by writing
        assert _get(port, "/health").status == 200
        assert len(site.held) == 2
        site.go.set()
        assert [read(connection).status for connection in (*first, waiting)] == [200, 200, 200]
        assert _get(port, "/hold", "POST").status == 200


def test_what_a_key_may_have_at_once_is_changed_by_others_in_nothing(tmp_path: Path) -> None:
    """The third of a key that may have two waits; another key's is answered, and so are all in the end."""
    site = Site(ServeConfig(state_dir=tmp_path, max_concurrent=8))
    keys = KeyFile(tmp_path)
    made = {"two": keys.add("two", role="admin", concurrent_requests=2), "any": keys.add("any", role="admin")}
    bearer = {name: f"authorization: Bearer {key}" for name, key in made.items()}
    with listening(site.asgi, site.config) as port:
        sent = [connect(port, head("POST", "/hold", bearer["two"], "content-length: 0")) for _ in range(3)]
        _eventually(lambda: len(site.held) == 2 and len(site.asgi._writes._waiting) == 1)
        sent.append(connect(port, head("POST", "/hold", bearer["any"], "content-length: 0")))
        _eventually(lambda: len(site.held) == 3)
        reading = connect(port, head("GET", "/v1/adapters/x", bearer["two"], "content-length: 0"))
        assert read(reading).status == 200
        site.go.set()
        assert [read(connection).status for connection in sent] == [200] * 4


@pytest.mark.parametrize(
    ("chunks", "placed"),
    [
        ([b"x" * 10], [True]),
        ([b"x" * 10, b"x" * 10, b"x"], [False, False, True]),  # a small one, once it is whole
        ([b"x" * SMALL, b"x", b"x"], [False, True, True]),  # a large one, from where it is no longer small
        ([b"x" * (SMALL + 1), b""], [True, True]),
    ],
)
def test_a_body_takes_a_place_once_it_is_whole_or_no_longer_small(chunks: list[bytes], placed: list[bool]) -> None:
    taken: list[int] = []
    messages = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    messages[-1]["more_body"] = False

    async def receive() -> Any:
        return messages.pop(0)

    async def take(*, long: bool) -> None:
        assert long == (len(chunks[0]) >= SMALL)
        taken.append(1)

    async def run() -> list[bool]:
        body = BodyGuard(receive, (1 << 30, "train_body_bytes"), take, seconds=30.0)
        async with asyncio.timeout(120) as body.deadline:
            seen = []
            for _ in chunks:
                await body()
                seen.append(bool(taken))
            return seen

    assert asyncio.run(run()) == placed and len(taken) == 1


def test_long_bodies_share_so_many_bytes_and_each_takes_all_that_it_may_need_at_once() -> None:
    async def run() -> None:
        bytes_, order = ByteLimit(10, patience_s=10), list[str]()

        async def visit(name: str, size: int, go: asyncio.Event) -> None:
            async with bytes_.held(size):
                order.append(name)
                await go.wait()

        gates = {name: asyncio.Event() for name in "abcd"}
        sizes = {"a": 6, "b": 4, "c": 99, "d": 1}  # c takes all there are, and d comes behind it
        visits = [asyncio.ensure_future(visit(name, size, gates[name])) for name, size in sizes.items()]
        await asyncio.sleep(0.01)
        assert order == ["a", "b"]
        gates["a"].set()
        await asyncio.sleep(0.01)
        assert order == ["a", "b"]
        gates["b"].set()
        await asyncio.sleep(0.01)
        assert order == ["a", "b", "c"]
        visits[2].cancel()
        await asyncio.sleep(0.01)
        assert order == ["a", "b", "c", "d"]
        gates["d"].set()
        await asyncio.gather(*visits, return_exceptions=True)
        assert bytes_._free == 10

    asyncio.run(run())


def test_who_waits_too_long_for_bytes_is_told_and_keeps_none() -> None:
    async def run() -> None:
        bytes_ = ByteLimit(10, patience_s=0.05)
        async with bytes_.held(10):
            with raises(OverloadedError) as caught:
                async with bytes_.held(1):
                    pass
            assert caught.value.retry_after == 5
            leaves = asyncio.ensure_future(bytes_._take(1))
            await asyncio.sleep(0)
            leaves.cancel()
            await asyncio.gather(leaves, return_exceptions=True)
        assert bytes_._free == 10
        async with bytes_.held(10):
            pass

    asyncio.run(run())


def test_a_long_body_waits_until_there_is_room_for_it() -> None:
    site = Site(ServeConfig(bodies_bytes=SMALL * 3, body_timeout_s=60))
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 2 * SMALL}]}).encode()
    lines = head("POST", "/v1/chat/completions", JSON, f"content-length: {len(body)}")
    with listening(site.asgi, site.config) as port:
        first = connect(port, lines + body[: SMALL + 1])
        time.sleep(0.1)
        second = connect(port, lines + body[: SMALL + 1])
        small = connect(port, head("POST", "/v1/chat/completions", JSON, f"content-length: {len(CHAT)}") + CHAT)
        assert read(small).status == 200
        time.sleep(0.3)
        first.sendall(body[SMALL + 1 :])
        assert read(first).status == 200
        second.sendall(body[SMALL + 1 :])
        assert read(second).status == 200
        for each in (first, second, small):
            each.close()


def test_few_uploads_arrive_at_once() -> None:
    site = Site(ServeConfig(body_timeout_s=20))
    taken: list[str] = []
    part = b"x" * (SMALL + 1)
    with listening(site.asgi, site.config) as port:
        uploads, take = site.asgi._uploads, site.asgi._uploads._take

        async def counted(sender: str) -> None:
            await take(sender)
            taken.append("one")

        uploads._take = counted  # type: ignore[method-assign]
        form = "content-type: multipart/form-data; boundary=b"
        lines = head("POST", "/v1/adapters/upload", form, "content-length: 99999999")
        unfinished = [connect(port, lines + part) for _ in range(6)]
        _eventually(lambda: len(taken) == UPLOADS)
        time.sleep(0.2)
        assert len(taken) == UPLOADS
        for each in unfinished[:3]:
            each.close()
        _eventually(lambda: len(taken) > UPLOADS)
        for each in unfinished:
            each.close()


def test_few_adapters_are_merged_at_once_and_nobody_else_waits_for_them() -> None:
    """Each has a thread that all routes share, and a client can ask for hundreds."""
    site = Site(ServeConfig(max_waiting=64))
    with listening(site.asgi, site.config) as port:
        merges = [connect(port, head("POST", "/v1/adapters/merge", "content-length: 0")) for _ in range(6)]
        _eventually(lambda: len(site.held) == UPLOADS)
        assert _get(port, "/v1/adapters/a").status == 200
        assert len(site.held) == UPLOADS
        site.go.set()
        assert [read(each).status for each in merges] == [200] * 6
        for each in merges:
            each.close()


def test_who_waits_too_long_for_a_place_is_told() -> None:
    site = Site(ServeConfig(max_concurrent=1, first_token_timeout_s=0.1))
    with listening(site.asgi, site.config) as port:
        first = connect(port, head("POST", "/hold", "content-length: 0"))
        _eventually(lambda: len(site.held) == 1)
        late = _get(port, "/hold", "POST")
        assert late.status == 429
        wording(late.error)
        site.go.set()
        assert read(first).status == 200


def test_an_answer_that_does_not_begin_in_time_is_504(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("groupwise.server.guard.GRACE_S", 0.0)
    site = Site(ServeConfig(request_timeout_s=0.1))
    with listening(site.asgi, site.config) as port:
        late = _get(port, "/hold")
        assert late.status == 504 and late.error["code"] == "deadline_exceeded"
        assert late.headers["x-should-retry"] == "false"
        site.go.set()


def test_watchers_are_let_go_when_the_server_drains() -> None:
    site = Site(ServeConfig())
    with listening(site.asgi, site.config) as port:
        watcher = connect(port, head("GET", "/v1/train/events/x"))
        assert b": ping" in watcher.recv(4096) + watcher.recv(4096)
        site.gate.drain()
        rest = b""
        watcher.settimeout(5)
        while not rest.endswith(b"0\r\n\r\n"):  # the stream's proper end, not a cut
            rest += watcher.recv(4096)
        watcher.close()


def test_a_stream_that_breaks_is_seen_to_break(site: Site, port: int) -> None:
    connection = connect(port, head("GET", "/cut"))
    data = b""
    while part := connection.recv(4096):
        data += part
    assert b"some" in data and not data.endswith(b"0\r\n\r\n")


def test_there_are_no_websockets(port: int) -> None:
    lines = ("connection: upgrade", "upgrade: websocket", "sec-websocket-version: 13", "sec-websocket-key: AAAA")
    connection = connect(port, head("GET", "/health", *lines))
    assert read(connection).status == 200  # an ordinary answer: nothing was upgraded
    connection.close()


# ---- bodies ----
@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "json", "a" * 5000]
)
def test_bodies_are_json_by_their_own_account(site: Site, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    response = site.http.post("/v1/chat/completions", content=CHAT, headers=headers)
    error = refused(response, 415, "unsupported_media_type")
    assert len(error["message"]) < 200
    wording(error)


@pytest.mark.parametrize("content_type", ["application/json", "Application/JSON; charset=UTF-8", "application/json;"])
def test_json_may_be_spelled_in_a_few_ways(site: Site, content_type: str) -> None:
    response = site.http.post("/v1/chat/completions", content=CHAT, headers={"content-type": content_type})
    assert response.json() == {"messages": 1}
    latin = {"content-type": "application/json; charset=latin-1"}
    assert site.http.post("/v1/chat/completions", content=CHAT, headers=latin).status_code == 415


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip", "\x1b[31m"])
def test_compressed_bodies_are_not_read(site: Site, encoding: str) -> None:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    refused(site.http.post("/v1/chat/completions", content=CHAT, headers=headers), 415, "unsupported_media_type")


def test_routes_without_a_body_read_none(site: Site) -> None:
    for content in (b"", b"{", b"x" * 4000):
        assert site.http.post("/v1/adapters/unload", content=content).status_code == 200


@pytest.mark.parametrize(
    ("path", "limit"), [("/v1/chat/completions", 4096), ("/v1/train/grpo", 8192), ("/v1/adapters/load", 4096)]
)
def test_each_route_has_its_limit(site: Site, path: str, limit: int) -> None:
    headers = {"content-type": "application/json"}
    fits = site.http.post(path, content=b" " * (limit - 2) + b"{}", headers=headers)
    assert fits.status_code == 400
    too_large = site.http.post(path, content=b" " * (limit - 1) + b"{}", headers=headers)
    assert str(limit) in refused(too_large, 413, "body_too_large")["message"]


def test_a_declared_length_beyond_the_limit_is_refused_before_it_arrives(port: int) -> None:
    connection = connect(port, head("POST", "/v1/chat/completions", JSON, "content-length: 999999999999999"))
    answer = read(connection)
    assert answer.status == 413 and answer.error["code"] == "body_too_large"
    connection.close()


def test_nobody_is_asked_for_a_body_that_is_not_wanted(port: int) -> None:
    lines = (JSON, "content-length: 9999999", "expect: 100-continue")
    connection = connect(port, head("POST", "/v1/chat/completions", *lines))
    first = connection.recv(16)
    assert first.startswith(b"HTTP/1.1 413")
    connection.close()


def test_chunks_are_counted_while_they_arrive(port: int) -> None:
    """No length is declared: what is read is what counts, and it is not kept once it is too much."""
    connection = connect(port, head("POST", "/v1/chat/completions", JSON, "transfer-encoding: chunked"))
    for _ in range(6):
        connection.sendall(b"400\r\n" + b" " * 0x400 + b"\r\n")
    answer = read(connection)
    assert answer.status == 413 and answer.error["code"] == "body_too_large"
    assert is_closed(connection)  # and it does not go on for ever
    connection.close()


def test_a_body_shorter_than_its_length_is_not_waited_for_long(port: int) -> None:
    connection = connect(port, head("POST", "/v1/chat/completions", JSON, f"content-length: {len(CHAT) + 50}") + CHAT)
    answer = read(connection)
    assert answer.status == 408 and answer.error["code"] == "body_timeout"
    assert f"{len(CHAT)} bytes did" in answer.error["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert is_closed(connection)
    connection.close()


def test_a_body_that_drips_is_not_waited_for_long(port: int) -> None:
    connection = connect(port, head("POST", "/v1/chat/completions", JSON, f"content-length: {len(CHAT)}"))
    began = time.monotonic()
    for byte in CHAT:
        connection.send(bytes([byte]))
        time.sleep(0.02)
        if time.monotonic() - began > 0.6:
            break
    assert read(connection).status == 408
    connection.close()


def test_a_body_longer_than_its_length_is_another_request_and_refused_as_such(port: int) -> None:
    connection = connect(port, head("POST", "/v1/chat/completions", JSON, f"content-length: {len(CHAT)}") + CHAT)
    assert read(connection).status == 200
    connection.sendall(b"garbage\r\n\r\n")
    answer = read(connection)
    assert answer.status == 400 and answer.error["code"] == "invalid_http" and set(answer.error) == ENVELOPE
    assert is_closed(connection)
    connection.close()


def test_a_client_that_leaves_in_the_middle_costs_nothing(site: Site, port: int) -> None:
    for _ in range(20):
        connection = connect(port, head("POST", "/v1/chat/completions", JSON, "content-length: 500") + CHAT)
        connection.close()
    _eventually(lambda: 'status="499"' in site.recorder.exposition().decode())
    assert _get(port, "/health").status == 200


def test_a_slow_body_does_not_hold_up_others() -> None:
    """Those that are slow would be waited for until long after this one's answer is given up."""
    site = Site(ServeConfig(body_timeout_s=3600))
    with listening(site.asgi, site.config) as port:
        begun = head("POST", "/v1/chat/completions", JSON, "content-length: 500") + b"{"
        slow = [connect(port, begun) for _ in range(50)]
        with connect(port, head("POST", "/v1/chat/completions", JSON, f"content-length: {len(CHAT)}") + CHAT) as quick:
            assert read(quick).status == 200
        for each in slow:
            each.close()


def test_http_1_0_and_pipelined_requests_work(port: int) -> None:
    old = connect(port, b"GET /health HTTP/1.0\r\n\r\n")
    assert read(old).status == 200 and is_closed(old)
    two = connect(port, head("GET", "/health") + head("GET", "/v1/adapters/x"))
    data = b""
    while data.count(b"HTTP/1.1 200") < 2:
        data += two.recv(4096)
    old.close()
    two.close()


# ---- what was seen ----
def test_metrics_name_templates_not_paths(site: Site) -> None:
    site.http.get("/v1/adapters/planted-name")
    site.http.get("/planted-path")
    site.http.request("PLANTED", "/health")
    text = site.recorder.exposition().decode()
    assert "planted" not in text.lower()
    assert 'handler="/v1/adapters/{name}",method="GET",status="200"' in text
    assert 'handler="unmatched",method="GET",status="404"' in text


# ---- what a shutdown cuts ----
@pytest.mark.parametrize("draining", [True, False])
def test_a_request_that_a_shutdown_cuts_is_told_so(draining: bool, caplog: pytest.LogCaptureFixture) -> None:
    """What is still under way at the end of a shutdown is cancelled, and is no bug."""
    own = Site(ServeConfig())
    sent: list[Any] = []

    async def receive() -> Any:
        await asyncio.sleep(60)

    async def send(message: Any) -> None:
        sent.append(message)

    async def cut() -> None:
        scope = {"type": "http", "method": "GET", "path": "/hold", "headers": [(b"host", b"127.0.0.1")]}
        scope |= {"query_string": b"", "http_version": "1.1", "scheme": "http", "server": ("127.0.0.1", 8420)}
        task = asyncio.ensure_future(own.asgi(scope, receive, send))
        while not own.held:
            await asyncio.sleep(0.01)
        if draining:
            own.gate.drain()
        task.cancel()
        try:
            await task
        finally:
            own.go.set()

    if not draining:
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(cut())
        return
    asyncio.run(cut())
    body = json.loads(sent[1]["body"])["error"]
    assert (sent[0]["status"], body["code"]) == (503, "shutting_down") and set(body) == ENVELOPE
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]
