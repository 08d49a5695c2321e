"""A small HTTP server with real sockets that speaks the live server's wire format, for tests of its clients.

Its policy answers "What is A + B?" and is right in more completions of a group with every version that is trained.
`plan(...)` makes it fail in the next requests of a route, as networks and busy servers do.
"""

from __future__ import annotations

import io
import json
import re
import socket
import tarfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.message import Message as Headers
from email.parser import BytesParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

QUEUED_S, RUNNING_S = 0.05, 0.15  # how long a job takes
METRICS = {"reward/mean": 0.5, "loss/policy": -0.25, "optim/grad_norm": 1.5}


@dataclass(frozen=True)
class Seen:
    """A request as it arrived."""

    method: str
    path: str
    headers: Mapping[str, str]
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens instead of an answer: a refusal, silence for `stall` seconds, or a cut after `keep` bytes."""

    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    code: str = "overloaded"
    stall: float = 0.0
    cut: bool = False
    keep: int | None = None
    late: bool = False  # the request is carried out; only its answer is lost


@dataclass
class ToyJob:
    """A training job that runs by the clock."""

    id: str
    kind: str
    adapter: str
    body: Mapping[str, Any]
    number: int
    at: float
    outcome: str = "completed"
    cancelled: bool = False

    @property
    def state(self) -> str:
        age = time.monotonic() - self.at
        if self.cancelled:
            return "cancelled"
        return "queued" if age < QUEUED_S else "running" if age < RUNNING_S else self.outcome

    def as_json(self) -> dict[str, Any]:
        state = self.state
        done = state == "completed"
        error = {"code": "training_failed", "message": "the loss is not finite", "hint": "lower the rate", "log": None}
        return {
            "job_id": self.id,
            "kind": self.kind,
            "state": state,
            "phase": {"queued": "waiting", "running": "training"}.get(state, "done"),
            "progress": 1.0 if done else 0.0,
            "step": 1 if done else 0,
            "steps": 1,
            "current_loss": -0.25 if done else None,
            "adapter_name": self.adapter,
            "adapter_version": f"{self.adapter}@{self.number}" if done else None,
            "metrics": METRICS if done else {},
            "created_at": "2026-01-02T03:04:05Z",
            "started_at": None if state == "queued" else "2026-01-02T03:04:06Z",
            "finished_at": "2026-01-02T03:04:07Z" if done else None,
            "elapsed_secs": 2.0,
            "duration_secs": None if state == "queued" else 1.0,
            "position": 1 if state == "queued" else None,
            "waits": None,
            "deadline": None,
            "attempt": 1,
            "cancel_requested": self.cancelled,
            "error": error if state == "failed" else None,
            "config": self.body.get("config", {}),
            "summary": {},
            "changed": [],
            "unhealthy": None,
            "warnings": [],
            "a_field_of_tomorrow": True,
        }

    def events(self) -> list[dict[str, Any]]:
        kinds: list[dict[str, Any]] = [{"kind": "state", "message": "queued"}]
        if self.state != "queued":
            kinds += [{"kind": "state", "message": "running"}, {"kind": "metrics", "data": {"step": 1, **METRICS}}]
        if self.state in ("completed", "failed", "cancelled"):
            kinds.append({"kind": "state", "message": self.state})
        return [{"at": "2026-01-02T03:04:05Z", "level": "info", "message": "", "data": {}, **each} for each in kinds]


class WireServer:
    """`url`, what was `seen`, the `jobs`, and faults by `plan`."""

    def __init__(self, *, port: int = 0, api_key: str | None = None):
        self.api_key = api_key
        self.seen: list[Seen] = []
        self.jobs: dict[str, ToyJob] = {}
        self.versions: dict[str, int] = {}
        self.notes: dict[str, str] = {}
        self.history: list[str] = ["base"]
        self.archives: dict[str, bytes] = {}
        self.next_outcome = "completed"
        self._keys: dict[str, str] = {}
        self._faults: dict[tuple[str, str], deque[Fault]] = defaultdict(deque)
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        self._server.daemon_threads = True
        self.closed = threading.Event()  # no stream of a job that never ends goes on in later tests
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def active(self) -> str:
        return self.history[-1]

    def plan(self, method: str, path: str, *faults: Fault) -> None:
        self._faults[method, path].extend(faults)

    def fault(self, method: str, path: str) -> Fault | None:
        for (planned, prefix), faults in self._faults.items():
            if planned == method and path.startswith(prefix) and faults:
                return faults.popleft()
        return None

    def of(self, method: str, path: str) -> list[Seen]:
        return [each for each in self.seen if each.method == method and each.path.startswith(path)]

    # ---- what the routes do ----

    def submit(self, kind: str, body: Mapping[str, Any], key: str | None) -> dict[str, Any]:
        with self._lock:
            if key in self._keys:
                job = self.jobs[self._keys[key]]
            else:
                name = body.get("config", {}).get("output_name") or kind
                self.versions[name] = self.versions.get(name, 0) + 1
                job = ToyJob(
                    id=f"{len(self.jobs) + 1:032x}",
                    kind=kind,
                    adapter=name,
                    body=body,
                    number=self.versions[name],
                    at=time.monotonic(),
                    outcome=self.next_outcome,
                )
                self.jobs[job.id] = job
                if key:
                    self._keys[key] = job.id
        return {
            "job_id": job.id,
            "state": "queued",
            "message": f"Queued {kind.upper()} training",
            "adapter_name": job.adapter,
            "position": 1,
            "waits": None,
            "deadline": None,
            "warnings": ["2 of 3 groups have equal rewards"] if body.get("config", {}).get("seed") == 13 else [],
        }

    def settle(self) -> None:
        """Activate what has been completed."""
        for job in self.jobs.values():
            version = f"{job.adapter}@{job.number}"
            if job.state == "completed" and version not in self.history:
                self.history.append(version)

    def text(self, messages: list[Mapping[str, Any]], index: int) -> str:
        asked = re.search(r"(\d+) \+ (\d+)", str(messages[-1]["content"]))
        if asked is None:
            return f"reply {index}"
        skill = 1 + 2 * int(self.active.rpartition("@")[2]) if "@" in self.active else 1
        right = int(asked[1]) + int(asked[2])
        return str(right if index < skill else right + 1)

    def batch(self, body: Mapping[str, Any]) -> dict[str, Any]:
        self.settle()
        completions = []
        for p, messages in enumerate(body["prompts"]):
            for j in range(body.get("n", 1)):
                completion = {
                    "prompt_index": p,
                    "completion_index": j,
                    "rollout_id": f"rollout-{p}-{j}",
                    "adapter": self.active,
                    "text": self.text(messages, j),
                    "finish_reason": "stop",
                    "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
                }
                if body.get("return_token_ids"):
                    completion |= {"token_ids": [7, 2], "prompt_token_ids": [5, 10]}
                if body.get("logprobs"):
                    completion |= {"logprobs": [-0.5, -0.25]}
                completions.insert(0, completion)  # in no order that a client may rely on
        usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
        return {"id": "batchcmpl-1", "created": 1, "model": "toy", "completions": completions, "usage": usage}

    def adapters(self) -> dict[str, Any]:
        self.settle()
        names = {version.partition("@")[0] for version in self.history if version != "base"} | set(self.archives)
        active = None if self.active == "base" else self.active.partition("@")[0]
        return {
            "active": active,
            "active_version": self.active,
            "keep_versions": 1,
            "available": [self.adapter(name) for name in sorted(names)],
        }

    def adapter(self, name: str) -> dict[str, Any]:
        numbers = range(1, self.versions.get(name, 1) + 1)
        return {
            "name": name,
            "has_config": True,
            "has_weights": True,
            "size_bytes": 3 << 20,
            "modified_at": "2026-01-02T03:04:05Z",
            "files": ["adapter_config.json", "adapter_model.safetensors"],
            "versions": [f"{name}@{number}" for number in numbers],
            "active_version": self.active if self.active.partition("@")[0] == name else None,
            "notes": {version: note for version, note in self.notes.items() if version.partition("@")[0] == name},
        }


def _handler(server: WireServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, format: str, *args: object) -> None:
            pass

        def handle(self) -> None:
            with suppress(ConnectionError):
                super().handle()

        def do_GET(self) -> None:
            self._serve()

        do_POST = do_PUT = do_DELETE = do_GET

        def _serve(self) -> None:
            raw = self.rfile.read(int(self.headers.get("content-length") or 0))
            if self.headers.get("transfer-encoding") == "chunked":
                raw = b"".join(self._chunks())
            seen = Seen(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, raw)
            server.seen.append(seen)
            fault = server.fault(seen.method, seen.path)
            if fault is not None and fault.late:
                self._answer(seen, lost=True)
            if fault is None:
                return self._answer(seen)
            time.sleep(fault.stall)
            if fault.keep is not None:
                self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n" + b"x" * fault.keep)
            if fault.cut or fault.late or fault.keep is not None:
                self.close_connection = True
                with suppress(OSError):
                    self.connection.shutdown(socket.SHUT_RDWR)
                return None
            assert fault.status is not None
            words = {"message": f"planned {fault.code}", "type": "t", "param": None, "code": fault.code, "hint": "rest"}
            body = fault.body if fault.body is not None else json.dumps({"error": words}).encode()
            self._send(fault.status, body, {"x-request-id": "req-7", **fault.headers})

        def _chunks(self) -> Iterator[bytes]:
            while size := int(self.rfile.readline(), 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()

        def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"content-length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def _error(self, status: int, code: str, message: str) -> None:
            words = {"message": message, "type": "invalid_request_error", "param": None, "code": code, "hint": None}
            self._send(status, json.dumps({"error": words}).encode(), {"x-request-id": "req-1"})

        def _answer(self, seen: Seen, *, lost: bool = False) -> None:
            if (
                server.api_key
                and seen.path != "/health"
                and seen.headers.get("authorization") != f"Bearer {server.api_key}"
            ):
                return self._error(401, "invalid_api_key", "the API key is missing or wrong")
            found = self._route(seen)
            if lost or found is None:
                return None
            return self._send(200, json.dumps(found).encode(), {"content-type": "application/json"})

        def _route(self, seen: Seen) -> Any:
            """What to answer as JSON; None where it was answered."""
            path, _, last = seen.path.rpartition("/")
            last = unquote(last)
            match seen.method, path:
                case "GET", "":
                    return {"status": "ok", "version": "1.2.3", "uptime_seconds": 61.0} | self._details()
                case "GET", "/v1" if last == "models":
                    return {
                        "object": "list",
                        "data": [
                            {
                                "id": "toy",
                                "created": 1,
                                "owned_by": "toy",
                                "root": "toy",
                                "parent": None,
                                "max_model_len": 64,
                            }
                        ],
                    }
                case "POST", "/v1/chat":
                    return self._chat(seen.json)
                case "POST", "/v1/completions":
                    return server.batch(seen.json)
                case "POST", "/v1/train":
                    return server.submit(last, seen.json, seen.headers.get("idempotency-key"))
                case "GET", "/v1/train":
                    return [job.as_json() for job in server.jobs.values()]
                case _, "/v1/train/status" | "/v1/train/events" | "/v1/train/metrics" | "/v1/train/cancel":
                    return self._job(seen, path.rpartition("/")[2], last)
                case "GET", "/v1" if last == "adapters":
                    return server.adapters()
            return self._adapters(seen)

        def _details(self) -> dict[str, Any]:
            server.settle()
            return {
                "model": "toy",
                "backend": "cpu",
                "active_adapter": None,
                "active_version": server.active,
                "training": {"active_job": None, "queued": 0},
                "checks": [{"name": "ledger", "pass": True}, {"name": "disk_space", "pass": False, "detail": "full"}],
            }

        def _chat(self, body: Mapping[str, Any]) -> Any:
            server.settle()
            texts = [server.text(body["messages"], i) for i in range(body.get("n") or 1)]
            common = {"id": "chatcmpl-1", "created": 1, "model": "toy", "system_fingerprint": server.active}
            if not body.get("stream"):
                choices = [
                    {"index": i, "message": {"content": text}, "logprobs": None, "finish_reason": "stop"}
                    for i, text in enumerate(texts)
                ]
                usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
                return {**common, "choices": choices, "usage": usage}
            deltas: list[tuple[dict[str, Any], str | None]] = [({"role": "assistant", "content": ""}, None)]
            deltas += [({"content": piece}, None) for piece in texts[0]] + [({}, "stop")]
            pieces = [
                {**common, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
                for delta, finish in deltas
            ]
            if "fail" in body["messages"][-1]["content"]:
                pieces[2:] = [{"error": {"message": "the engine stopped", "code": "engine_unavailable", "hint": None}}]
            data = [f"data: {json.dumps(piece)}\n\n".encode() for piece in pieces]
            if "stop short" not in body["messages"][-1]["content"]:
                data.append(b"data: [DONE]\n\n")
            return self._stream(iter([b": ping\n\n", *data]))

        def _stream(self, pieces: Iterator[bytes]) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for piece in pieces:
                for part in (piece[:5], piece[5:]):  # a client must not rely on how bytes come
                    if part:
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            self.wfile.write(b"0\r\n\r\n")

        def _job(self, seen: Seen, what: str, job_id: str) -> Any:
            job = server.jobs.get(job_id)
            if job is None:
                return self._error(404, "job_not_found", f"there is no job {job_id!r}")
            if what == "cancel":
                if job.state not in ("queued", "running"):
                    return self._error(409, "not_cancellable", f"job {job_id} is {job.state}")
                job.cancelled = True
                return {"job_id": job_id, "status": "cancelled"}
            if what == "metrics":
                return {"job_id": job_id, "steps": [{"step": 1, "time": "2026-01-02T03:04:05Z", **METRICS}]}
            if what == "status":
                server.settle()
                return job.as_json()
            return self._stream(self._events(job, int(seen.headers.get("last-event-id") or 0)))

        def _events(self, job: ToyJob, after: int) -> Iterator[bytes]:
            while not server.closed.is_set():
                events, state = job.events(), job.state
                for number, event in enumerate(events, start=1):
                    if number > after:
                        after = number
                        yield f"id: {number}\r\ndata: {json.dumps(event)}\r\n\r\n".encode()
                if state in ("completed", "failed", "cancelled") and len(job.events()) == after:
                    return
                server.closed.wait(0.01)

        def _adapters(self, seen: Seen) -> Any:
            parts = seen.path.removeprefix("/v1/adapters/").split("/")
            name, _, number = unquote(parts[0]).partition("@")
            if seen.method == "POST" and parts == ["upload"]:
                return self._upload(seen)
            if seen.method == "POST" and parts == ["merge"]:
                body = seen.json
                return {"mode": "", **body, "version": f"{body['output_name']}@1", "num_tensors": 4}
            if seen.method == "POST" and parts == ["rollback"]:
                server.history.pop()
                return {"status": "rolled_back", "name": server.active.partition("@")[0], "version": server.active}
            known = name == "base" or name in server.versions or name in server.archives
            if not known:
                return self._error(404, "adapter_not_found", f"there is no adapter {name!r}")
            if seen.method == "POST" and parts[1:] == ["activate"]:
                version = "base" if name == "base" else f"{name}@{number or server.versions[name]}"
                server.history.append(version)
                return {"status": "activated", "name": name, "version": version}
            if seen.method == "PUT" and parts[1:] == ["notes"]:
                version = f"{name}@{number or server.versions[name]}"
                server.notes[version] = seen.json["note"] or ""
                return {"version": version, "note": server.notes[version] or None}
            if seen.method == "GET" and parts[1:] == ["download"]:
                return self._send(200, server.archives[name], {"content-type": "application/gzip"})
            if seen.method == "DELETE":
                return {"status": "deleted", "name": name, "versions": [f"{name}@1"]}
            entry = {
                "number": 1,
                "active": False,
                "created_at": "2026-01-02T03:04:05Z",
                "step": 4,
                "size_bytes": 3 << 20,
                "unhealthy": None,
                "note": server.notes.get(f"{name}@1"),
                "held_out": None,
            }
            entry["surplus"] = server.versions.get(name, 1) > 1
            entry |= {"base_hash": "0" * 64, "quantization": None, "job_id": None, "metrics": METRICS}
            entry |= {"version": f"{name}@1", "base_model": "toy", "parent": "base"}
            return server.adapter(name) | {"history": [entry]}

        def _upload(self, seen: Seen) -> dict[str, Any]:
            head = f"content-type: {seen.headers['content-type']}\r\n\r\n".encode()
            form: Headers = BytesParser().parsebytes(head + seen.raw)
            fields = {part.get_param("name", header="content-disposition"): part for part in form.get_payload()}
            name = fields["name"].get_payload(decode=True).decode()
            server.archives[name] = fields["archive"].get_payload(decode=True)
            server.versions[name] = server.versions.get(name, 0) + 1
            with tarfile.open(fileobj=io.BytesIO(server.archives[name])) as archive:
                files = sorted(member.name.rpartition("/")[2] for member in archive.getmembers())
            return {
                "name": name,
                "version": f"{name}@{server.versions[name]}",
                "size_bytes": len(server.archives[name]),
                "files": files,
            }

    return Handler


@contextmanager
def wire_server(*, port: int = 0, api_key: str | None = None) -> Iterator[WireServer]:
    server = WireServer(port=port, api_key=api_key)
    try:
        yield server
    finally:
        server.close()
