"""`groupwise ui`: the web interface over runs on disk. No model, no training, nothing that writes.

build_run_app    runs -> a FastAPI application, guarded and documented as the live server's is
WithRun          ... of one run, under /run of a live server
serve_runs       ... on a port, until SIGTERM or Ctrl-C
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import RedirectResponse
from starlette.types import Receive, Scope, Send

from groupwise import __version__
from groupwise.config.serve import ServeConfig
from groupwise.sdk.types import Answer
from groupwise.server.connections import close_overdue, make_server
from groupwise.server.errors import add_handlers
from groupwise.server.guard import Gate, Guard
from groupwise.server.listen import bind, url_of
from groupwise.server.metric_definitions import definitions_router
from groupwise.server.metrics import Recorder
from groupwise.server.openapi import describe
from groupwise.server.run_files import RunFiles, open_runs, with_stages
from groupwise.server.runs import RUN_PREFIX, router
from groupwise.server.ui import SAFETY, Web
from groupwise.server.wire import documented
from groupwise.types import PolicyVersion

ABOUT = """Runs of `groupwise run`, read from their directories while they are written or after. Nothing is changed.

Every error is `{"error": {"message", "type", "param", "code", "hint"}}`; every answer has an `x-request-id`."""


class RunsHealth(Answer):
    """The answer of GET /health."""

    status: str
    version: str
    uptime_seconds: float


def build_run_app(
    runs: Mapping[str, RunFiles], config: ServeConfig, *, gate: Gate | None = None, served: str | None = None
) -> FastAPI:
    """Return the application with every route over these runs, behind the guard. It uses the address, the key and the
    limits of `config`. `served` is the active version of the live server, None without one."""
    began = time.time()
    app = FastAPI(title="Groupwise", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.runs, app.state.served = runs, served

    @app.get("/health", tags=["Server"], **documented(answer=RunsHealth))
    async def health() -> RunsHealth:
        """Answer that the server lives."""
        return RunsHealth(status="ok", version=__version__, uptime_seconds=time.time() - began)

    app.include_router(router)
    app.include_router(definitions_router)
    add_handlers(app)
    describe(app, config)
    app.openapi()["info"]["description"] = ABOUT
    app.add_middleware(Guard, config=config, gate=gate or Gate("ready"), recorder=Recorder(model_name="runs"))
    app.add_middleware(Web)
    return app


class WithRun:
    """ASGI application: a live server, and under /run what `groupwise ui` shows of the run that it serves.

    Args:
        served: the name of the run's adapter in the server's store; None if the run has published none.
    """

    def __init__(self, app: FastAPI, run_dir: Path, config: ServeConfig, *, gate: Gate, served: PolicyVersion | None):
        runs = with_stages(open_runs([run_dir]))
        answers = str(PolicyVersion.base() if served is None else served)
        self._app, self._run_app = app, build_run_app(runs, config, gate=gate, served=answers)
        app.state.run = next(iter(runs))  # its pages and the server's lead to each other

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http" and path == RUN_PREFIX:
            answer = RedirectResponse(f"{RUN_PREFIX.lstrip('/')}/ui/", status_code=308, headers=SAFETY)
            return await answer(scope, receive, send)
        if scope["type"] == "http" and path.startswith(f"{RUN_PREFIX}/"):
            scope = {**scope, "path": path.removeprefix(RUN_PREFIX)}
            return await self._run_app(scope, receive, send)
        await self._app(scope, receive, send)


def serve_runs(runs: Mapping[str, RunFiles], config: ServeConfig, *, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT. Raises StartError if the port is taken."""
    with bind(config.host, config.port) as listener:
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
        gate = Gate("ready")
        server = make_server(build_run_app(runs, config, gate=gate), config)

        async def process() -> None:
            def stop() -> None:
                gate.drain()
                server.should_exit = True

            for number in (signal.SIGTERM, signal.SIGINT):
                with suppress(ValueError, RuntimeError):  # not in the main thread, as in tests
                    asyncio.get_running_loop().add_signal_handler(number, stop)
            sweep = asyncio.create_task(close_overdue(server.server_state.connections, seconds=config.header_timeout_s))
            announce(f"{url_of(listener)}/ui/ shows {len(runs)} {'run' if len(runs) == 1 else 'runs'}; Ctrl-C ends it")
            await server.serve(sockets=[listener])
            sweep.cancel()

        asyncio.run(process())
