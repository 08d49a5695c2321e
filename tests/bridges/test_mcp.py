"""Tools of MCP servers, against real ones: over stdio and over HTTP, in processes of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
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
