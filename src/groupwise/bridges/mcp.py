"""Tools of MCP servers (Model Context Protocol), through the official `mcp` package (`pip install groupwise[mcp]`).

    class Notes(ToolEnv):
        tools = mcp_tools(command=["python", "notes_server.py"])          # or url="http://localhost:8000/mcp"

A process connects to a server once, on the first request for it: a stdio server is started then, not for each episode,
and all episodes share its state. The connection has its own thread with an event loop, so that tools can be called from
any other thread. If the connection is lost, the next call connects again, and restarts a stdio server. A started server
ends with the process: orderly at the process's end, and if the process is killed the server's standard input closes,
which is MCP's signal to stop.

Protocol: https://modelcontextprotocol.io/specification, transports stdio and streamable HTTP.
"""

from __future__ import annotations

import asyncio
import atexit
import re
import shlex
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import httpx2
from pydantic_core import to_json

from groupwise.errors import ConfigError, DataError, EnvError
from groupwise.pictures import Picture, read_picture
from groupwise.tasks.tools import CallableTool, ToolBox, ToolError, in_thread

if TYPE_CHECKING:
    from mcp import Client

START_LIMIT_S = 25.0  # both below env.step_timeout_s (30), which ends the episode and says nothing of the server
CALL_LIMIT_S = 20.0  # a call that takes longer costs only itself: the policy reads the error and may go on
GIVE_UP_S = 2.0  # for the calls that are under way when a connection ends
LISTED_PAGES = 100  # of a server's list of tools
NO_CONNECTION = re.compile(
    r"connection closed|session (terminated|not found|expired)|(no valid|invalid|missing|unknown) session",
    re.IGNORECASE,
)
"""What clients and servers say where there is no connection, or where a server has no such session (any more): it was
started again, or has ended a session that was idle."""


@dataclass(frozen=True, kw_only=True)
class McpAddress:
    """The address of a server: a command to start it, or the URL of one that runs."""

    command: tuple[str, ...] = ()
    url: str | None = None
    env: tuple[tuple[str, str], ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    cwd: str | None = None

    def __str__(self) -> str:
        return self.url or shlex.join(self.command)


def mcp_tools(
    *,
    command: Sequence[str] | str | None = None,
    url: str | None = None,
    env: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    only: Sequence[str] | None = None,
    prefix: str = "",
    time_limit_s: float = CALL_LIMIT_S,
    start_limit_s: float = START_LIMIT_S,
) -> ToolBox:
    """Return the tools of a server; connect to the server if this process has no connection yet.

    Args:
        command: starts the server, which communicates over stdin and stdout; or
        url: the streamable-HTTP endpoint of a running server.
        env, cwd: the started server's environment variables (in addition to PATH, HOME and the like) and its directory.
        headers: headers of each request to `url`, for authorisation.
        only: the names of the tools to offer; by default all tools.
        prefix: put in front of the tools' names, for two servers with tools of the same name.
        time_limit_s: seconds that a call may take. A call that takes longer is answered with an error, if the limit is
            below `env.step_timeout_s`; else it fails the whole episode.
        start_limit_s: seconds that connecting, or starting the server, and listing its tools may take.

    Raises:
        ConfigError: neither or both of command and url, a tool in `only` that the server does not have, or `mcp` is not
            installed.
        EnvError: the server cannot be started or reached in time; the message has the server's stderr.
    """
    words = shlex.split(command) if isinstance(command, str) else list(command or ())
    if bool(words) == (url is not None):
        raise ConfigError("an MCP server has a command or a url", hint='as in command=["python", "server.py"]')
    address = McpAddress(
        command=tuple(words),
        url=url,
        env=tuple(sorted((env or {}).items())),
        headers=tuple(sorted((headers or {}).items())),
        cwd=None if cwd is None else str(cwd),
    )
    tools = _connection(address, start_limit_s).tools
    missing = [name for name in only or () if name not in tools]
    if missing:
        raise ConfigError(f"the MCP server {address} has no tool {missing[0]!r}; it has {', '.join(tools) or 'none'}")
    chosen = [tools[name] for name in (tools if only is None else only)]
    return ToolBox(replace(tool, name=f"{prefix}{tool.name}", time_limit_s=time_limit_s) for tool in chosen)


class McpConnection:
    """A connected server and its `tools` by name. The thread that made it holds it until `close`.

    Raises what `mcp_tools` does.
    """

    def __init__(self, address: McpAddress, *, start_limit_s: float = START_LIMIT_S):
        try:
            import mcp  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                "tools of MCP servers need the package mcp", hint="pip install 'groupwise[mcp]'"
            ) from error
        self.address = address
        self.tools: dict[str, CallableTool] = {}
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._client: Client | None = None
        self._lost = False
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(start_limit_s,), name="mcp", daemon=True)
        self._thread.start()
        self._ready.result()
        atexit.register(self.close)

    def close(self) -> None:
        """End the connection, and a server that was started with it."""
        atexit.unregister(self.close)
        if self._loop.is_closed():
            return
        self._end()
        self._thread.join(timeout=10)

    def _end(self) -> None:
        with suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._stop.set)

    @property
    def closed(self) -> bool:
        return self._lost or not self._thread.is_alive()

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Return the tool's answer, from any event loop. Raises ToolError for an error of the tool's own."""
        client = self._client
        if client is None or self.closed:
            raise ToolError(f"the MCP server {self.address} is gone")
        future = asyncio.run_coroutine_threadsafe(client.call_tool(name, arguments), self._loop)
        lost = f"the connection to the MCP server {self.address} is lost"
        try:
            result = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():  # the caller waits no longer
                raise
            raise ToolError(lost) from None
        except Exception as error:
            if _lost(error):
                self._lost = True
                self._end()
                raise ToolError(lost) from error
            raise
        content = _content_of(result)
        if result.is_error:
            raise ToolError(content if isinstance(content, str) else "\n".join(map(str, content)))
        return content

    def _run(self, start_limit_s: float) -> None:
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr:
            try:
                self._loop.run_until_complete(self._hold(start_limit_s, stderr))
            except BaseException as error:
                if not self._ready.done():
                    self._ready.set_exception(self._start_error(error, start_limit_s, stderr))
            finally:
                self._client = None
                self._give_up_calls()
                self._loop.close()

    def _give_up_calls(self) -> None:
        """End the calls that are under way, which would be waited for without an answer."""
        if calls := asyncio.all_tasks(self._loop):
            for call in calls:
                call.cancel()
            self._loop.run_until_complete(asyncio.wait(calls, timeout=GIVE_UP_S))

    async def _hold(self, start_limit_s: float, stderr: IO[str]) -> None:
        """Connect, list the tools, and keep the connection; in one task, as its cancel scopes want it."""
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(start_limit_s):
                client = await stack.enter_async_context(self._made_client(stderr, stack))
                self.tools = {tool.name: _tool(tool, self.address) for tool in await _all_tools(client)}
            self._client = client
            self._ready.set_result(None)
            await self._stop.wait()

    def _made_client(self, stderr: IO[str], stack: AsyncExitStack) -> Client:
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import streamable_http_client

        address = self.address
        if address.url is None:
            program, *rest = address.command
            started = StdioServerParameters(command=program, args=rest, env=dict(address.env), cwd=address.cwd)
            return Client(stdio_client(started, errlog=stderr))  # type: ignore[arg-type]
        http = httpx2.AsyncClient(headers=dict(address.headers), timeout=httpx2.Timeout(30, read=300))
        stack.push_async_callback(http.aclose)
        return Client(streamable_http_client(address.url, http_client=http))

    def _start_error(self, error: BaseException, start_limit_s: float, stderr: IO[str]) -> EnvError:
        stderr.seek(0)
        lines = stderr.read().strip().splitlines()[-5:]
        wrote = "; it wrote: " + " | ".join(line.strip() for line in lines) if lines else ""
        error = _innermost(error)
        if isinstance(error, TimeoutError):
            why = f"did not answer within {start_limit_s:g} s"
        else:
            why = (
                f"could not be {'started' if self.address.url is None else 'reached'}: {type(error).__name__}: {error}"
            )
        return EnvError(
            f"the MCP server {self.address} {why}{wrote}",
            hint="try its command in a terminal" if self.address.url is None else "start it, or check the URL",
        )


_connections: dict[McpAddress, McpConnection] = {}
_connecting = threading.Lock()


def _connection(address: McpAddress, start_limit_s: float) -> McpConnection:
    with _connecting:
        held = _connections.get(address)
        if held is None or held.closed:
            if held is not None:
                held.close()
            held = _connections[address] = McpConnection(address, start_limit_s=start_limit_s)
        return held


def _tool(listed: Any, address: McpAddress) -> CallableTool:
    async def run(arguments: dict[str, Any]) -> Any:
        held = _connections.get(address)
        if held is None or held.closed:
            held = await in_thread(lambda: _connection(address, START_LIMIT_S))
        return await held.call(listed.name, arguments)

    return CallableTool(
        name=listed.name, description=listed.description or "", parameters=dict(listed.input_schema), run=run
    )


def close_mcp() -> None:
    """End all connections."""
    with _connecting:
        for connection in _connections.values():
            connection.close()
        _connections.clear()


async def _all_tools(client: Client) -> list[Any]:
    tools, cursor = [], None
    for _ in range(LISTED_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if not cursor:
            break
    return tools


def _content_of(result: Any) -> str | list[str | Picture]:
    """Return the texts of a result, and its images in their places where it has some; what is neither is named. A
    result with structure alone is JSON. Raises ToolError for an image that cannot be read."""
    if not result.content and result.structured_content is not None:
        return to_json(result.structured_content).decode()
    parts: list[str | Picture] = []
    for part in result.content:
        if part.type == "image":
            try:
                parts.append(read_picture(f"data:;base64,{part.data}", where="what the tool shows"))
            except DataError as error:
                raise ToolError(error.message) from error
        else:
            parts.append(part.text if part.type == "text" else f"[{part.type}]")
    texts = [part for part in parts if isinstance(part, str)]
    return "\n".join(texts) if len(texts) == len(parts) else parts


def _lost(error: Exception) -> bool:
    """Return whether an error of a call means that there is no connection any more."""
    from anyio import BrokenResourceError, ClosedResourceError
    from mcp import MCPError

    if isinstance(error, MCPError):
        return NO_CONNECTION.search(error.message) is not None
    return isinstance(error, BrokenResourceError | ClosedResourceError | httpx2.TransportError)


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
