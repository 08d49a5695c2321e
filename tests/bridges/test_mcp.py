"""Tools of MCP servers, against real ones: over stdio and over HTTP, in processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from groupwise.bridges import mcp
from groupwise.bridges.mcp import close_mcp, mcp_tools
from groupwise.config.run import EnvConfig
from groupwise.errors import ConfigError, EnvError
from groupwise.tasks.tools import CallOutcome, ToolBox
from wording import raises

SERVER = '''
import asyncio, os, sys
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("notes")
notes = []

@server.tool()
def note(text: str) -> str:
    """Keep a note."""
    notes.append(text)
    return f"{len(notes)} kept by {os.getpid()}"

@server.tool()
def total(numbers: list[float]) -> float:
    """Add numbers."""
    return sum(numbers)

@server.tool()
def fail() -> str:
    raise ToolError("no such note")

@server.tool()
async def hang() -> str:
    await asyncio.sleep(60)
    return "late"

@server.tool()
def leave() -> str:
    os._exit(1)

if len(sys.argv) > 1:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
else:
    server.run()
'''


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "notes_server.py"
    path.write_text(SERVER, encoding="utf-8")
    yield path
    close_mcp()


def answer(box: ToolBox, name: str, /, **arguments: Any) -> str:
    function = {"name": name, "arguments": arguments}
    return str(asyncio.run(box.call({"id": "call_0", "function": function})).get("content"))


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int) -> bool:
    until = time.monotonic() + 10
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.02)
    return not alive(pid)


def test_a_stdio_servers_tools_are_offered_and_called(script: Path) -> None:
    box = mcp_tools(command=[sys.executable, str(script)])
    function = {one["function"]["name"]: one["function"] for one in box.definitions}
    assert set(function) == {"note", "total", "fail", "hang", "leave"}
    assert function["note"]["description"] == "Keep a note."
    assert function["note"]["parameters"]["properties"]["text"]["type"] == "string"
    kept = answer(box, "note", text="a")
    assert kept.startswith("1 kept by ")
    assert float(answer(box, "total", numbers=[1, 2.5])) == 3.5
    assert "no such note" in answer(box, "fail") and answer(box, "fail").startswith("Error: ")
    assert answer(box, "total", numbers="x").startswith("Error: ")
    assert box.outcomes == {CallOutcome.OK: 2, CallOutcome.FAILED: 3}

    # another episode asks again: the same process, from another event loop, with other limits and names
    again = mcp_tools(command=[sys.executable, str(script)], only=["note", "hang"], prefix="my_", time_limit_s=0.3)
    assert answer(again, "my_note", text="b") == kept.replace("1 kept", "2 kept")
    assert answer(again, "my_hang") == "Error: my_hang took longer than 0.3 s and was given up"
    assert answer(again, "my_note", text="c").startswith("3 kept")
    with raises(ConfigError):
        mcp_tools(command=[sys.executable, str(script)], only=["nothing"])

    # the server leaves: an error of the call, and the next one has a new server
    assert answer(box, "leave").endswith("is lost")
    after = answer(box, "note", text="b")
    assert after.startswith("1 kept by ") and after != kept.replace("2 kept", "1 kept")
    pid = int(after.rpartition(" ")[2])
    assert alive(pid)
    close_mcp()
    assert gone(pid)


def test_by_default_a_call_and_a_start_end_before_the_limit_of_a_step(script: Path) -> None:
    """A step that reaches `env.step_timeout_s` fails its episode; a call that reaches its own limit is answered."""
    step = EnvConfig.model_fields["step_timeout_s"].default
    limits = {tool.name: tool.time_limit_s for tool in mcp_tools(command=[sys.executable, str(script)])}
    assert set(limits) == {"note", "total", "fail", "hang", "leave"} and set(limits.values()) == {20.0}
    assert max(*limits.values(), mcp.START_LIMIT_S) < step


@pytest.mark.slow
def test_a_server_dies_with_the_process(script: Path) -> None:
    """With one that ends, and with one that is killed."""
    program = f"""
import asyncio, sys, time
from groupwise.bridges.mcp import mcp_tools
box = mcp_tools(command=[sys.executable, {str(script)!r}])
call = {{"id": "a", "function": {{"name": "note", "arguments": {{"text": "x"}}}}}}
print(asyncio.run(box.call(call))["content"], flush=True)
time.sleep(float(sys.argv[1]))
"""
    run = [sys.executable, "-c", program]
    ends = subprocess.Popen([*run, "0"], stdout=subprocess.PIPE, text=True)
    killed = subprocess.Popen([*run, "60"], stdout=subprocess.PIPE, text=True)
    with ends, killed:
        assert ends.stdout is not None and killed.stdout is not None
        pids = [int(process.stdout.readline().rpartition(" ")[2]) for process in (ends, killed) if process.stdout]
        assert alive(pids[1])
        os.kill(killed.pid, signal.SIGKILL)
        assert ends.wait(timeout=120) == 0
    assert all(map(gone, pids))


@pytest.mark.slow
def test_a_server_behind_a_url(script: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/mcp"
    with pytest.raises(EnvError, match=f"the MCP server {url} could not be reached"):
        mcp_tools(url=url)
    with subprocess.Popen([sys.executable, str(script), str(port)], stderr=subprocess.DEVNULL) as process:
        try:
            until = time.monotonic() + 20
            while socket.socket().connect_ex(("127.0.0.1", port)) and time.monotonic() < until:
                time.sleep(0.05)
            box = mcp_tools(url=url, headers={"X-Run": "test"})
            assert answer(box, "note", text="a") == f"1 kept by {process.pid}"
            close_mcp()
        finally:
            process.terminate()


class Sessions(ThreadingHTTPServer):
    """A server of the protocol's version 2025-06-18, of which each client has a session."""

    daemon_threads = True

    def __init__(self, unknown: tuple[int, dict[str, Any] | None]):
        super().__init__(("127.0.0.1", 0), Answers)
        self.unknown, self.known, self.called, self.ends = unknown, set[str](), threading.Event(), threading.Event()


class Answers(BaseHTTPRequestHandler):
    server: Sessions
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, status: int, said: dict[str, Any] | None = None, **headers: str) -> None:
        content = b"" if said is None else json.dumps(said).encode()
        self.send_response(status)
        kind = {} if said is None else {"content-type": "application/json"}
        for name, value in {**kind, "content-length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        self.answer(405)

    def do_DELETE(self) -> None:
        self.answer(200)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        method, session = asked.get("method"), self.headers.get("mcp-session-id")
        told: dict[str, Any] = {"jsonrpc": "2.0", "id": asked.get("id")}
        if method == "initialize":
            self.server.known.add(session := f"session-{len(self.server.known)}")
            about = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
            about["serverInfo"] = {"name": "notes", "version": "1"}
            self.answer(200, told | {"result": about}, **{"mcp-session-id": session})
        elif method not in ("notifications/initialized", "tools/list", "tools/call"):
            self.answer(200, told | {"error": {"code": -32601, "message": "Method not found"}})
        elif session not in self.server.known:
            status, error = self.server.unknown
            self.answer(status, None if error is None else told | {"error": error})
        elif method == "tools/list":
            takes = {"type": "object", "properties": {}}
            listed = [{"name": name, "inputSchema": takes} for name in ("note", "hang")]
            self.answer(200, told | {"result": {"tools": listed}})
        elif method == "tools/call":
            if asked["params"]["name"] == "hang":
                self.server.called.set()
                self.server.ends.wait(20)
            self.answer(200, told | {"result": {"content": [{"type": "text", "text": session}]}})
        else:
            self.answer(202)


@pytest.mark.parametrize(
    "unknown",
    [
        (404, None),
        (404, {"code": -32001, "message": "Session not found"}),
        (400, {"code": -32000, "message": "Bad Request: No valid session ID provided"}),
    ],
)
def test_a_session_that_the_server_has_ended_is_followed_by_another(unknown: tuple[int, dict[str, Any] | None]) -> None:
    """As it is after a restart, or when nothing was asked for half an hour; a call under way ends, too."""
    with Sessions(unknown) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        box = mcp_tools(url=f"http://127.0.0.1:{server.server_port}/mcp", time_limit_s=15)
        assert answer(box, "note") == "session-0"
        try:
            with ThreadPoolExecutor(1) as others:
                waits = others.submit(answer, box, "hang")
                assert server.called.wait(10)
                server.known = {"session-"}
                assert answer(box, "note").endswith("is lost")
                assert waits.result().endswith("is lost")
            assert answer(box, "note") == "session-1"
        finally:
            server.ends.set()
            close_mcp()
            server.shutdown()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; sys.exit('no licence')", "could not be started: .*it wrote: no licence"),
        ("import time; time.sleep(60)", "did not answer within 0.3 s"),
    ],
)
def test_a_server_that_does_not_start_says_why(code: str, message: str) -> None:
    with raises(EnvError):
        mcp_tools(command=[sys.executable, "-c", code], start_limit_s=0.3 if "within" in message else 120)


def test_what_is_no_server_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with raises(EnvError):
        mcp_tools(command="no-such-program --now")
    for both in ({}, {"command": "a", "url": "http://b"}):
        with raises(ConfigError):
            mcp_tools(**both)
    monkeypatch.setitem(sys.modules, "mcp", None)
    with raises(ConfigError):
        mcp.McpConnection(mcp.McpAddress(command=("a",)))
