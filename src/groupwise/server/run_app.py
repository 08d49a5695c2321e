"""`groupwise ui`: the web interface over runs on disk. No model, no training, nothing that writes.

build_run_app    runs -> a FastAPI application, guarded and documented as the live server's is
serve_runs       ... on a port, until SIGTERM or Ctrl-C
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from fastapi import FastAPI

from groupwise import __version__
from groupwise.config.serve import ServeConfig
from groupwise.server.connections import close_overdue, make_server
from groupwise.server.envelope import add_handlers
from groupwise.server.guard import Gate, Guard
from groupwise.server.listen import bind, url_of
from groupwise.server.openapi import describe
from groupwise.server.recorder import Recorder
from groupwise.server.run_files import RunFiles
from groupwise.server.run_routes import router
from groupwise.server.web import Web
from groupwise.server.wire import Answer, documented

ABOUT = """Runs of `groupwise run`, read from their directories while they are written or after. Nothing is changed.

Every error is `{"error": {"message", "type", "param", "code", "hint"}}`; every answer has an `x-request-id`."""


class RunsHealth(Answer):
    """The answer of GET /health."""

    status: str
    version: str
    uptime_seconds: float


def build_run_app(runs: Mapping[str, RunFiles], config: ServeConfig, *, gate: Gate | None = None) -> FastAPI:
    """Every route over these runs, behind the guard. Of `config` the address, the key and the limits count."""
    began = time.time()
    app = FastAPI(title="Groupwise", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.runs = runs

    @app.get("/health", tags=["Server"], **documented(answer=RunsHealth))
    async def health() -> RunsHealth:
        """That the server lives."""
        return RunsHealth(status="ok", version=__version__, uptime_seconds=time.time() - began)

    app.include_router(router)
    add_handlers(app)
    describe(app, config)
    app.openapi()["info"]["description"] = ABOUT
    app.add_middleware(Guard, config=config, gate=gate or Gate("ready"), recorder=Recorder(model_name="runs"))
    app.add_middleware(Web)
    return app


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
