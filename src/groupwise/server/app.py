"""The server as a whole: the application over its parts, and the server process from start to exit.

    build_app    the parts -> a FastAPI application with every route, guarded and documented
    serve        a configuration -> a running server, until SIGTERM or SIGINT

    bind the port, lock the state directory    what is missing ends the process at once, with exit code 3
    open ledger and store                      a crash's remains are repaired; a damaged ledger ends the process, too
    answer: /health, and 503 to all else       while the model is loaded, in a thread
    activate what was active, start the worker, be ready
    SIGTERM or Ctrl-C                          503 to new requests; those in flight may end, the worker saves; exit
    a second one                               exit at once; the next start repairs what that left
    the GPU is lost to this process            the same as SIGTERM, with exit code 75 and /health 503: the service
                                               manager (a container, systemd) restarts the server

Nothing heavy is imported before the port is bound.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.config.hub import check_model
from groupwise.errors import GroupwiseError
from groupwise.platform import importing, spared
from groupwise.server.listen import bind, incoming, own, url_of

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import ASGIApp, Receive, Scope, Send

    from groupwise.config.serve import ServeConfig
    from groupwise.errors import DeviceLostError
    from groupwise.server.guard import Gate
    from groupwise.server.metrics import Recorder
    from groupwise.server.state import Server
    from groupwise.store.adapters import AdapterStore
    from groupwise.store.ledger import Ledger
    from groupwise.store.locate import Located
    from groupwise.types import PolicyVersion

HOUSEKEEPING_S = 3600.0
READER_AFTER_S = 5.0
SWITCH_S = 1e-3  # how long a thread may keep Python's lock from the engine's, which asks for it at every operation
LOOK_S = 0.5  # between looks whether the GPU is lost
END_S = 5.0  # for connections to close, and streams that shutdown_timeout_s was not enough for to be cut

log = logging.getLogger(__name__)


# ---- the application ----
def build_app(server: Server, *, gate: Gate | None = None) -> FastAPI:
    """Return every route over these parts, behind the guard. Without a `gate` it is ready."""
    from fastapi import FastAPI
    from starlette.middleware.cors import CORSMiddleware

    from groupwise import __version__
    from groupwise.server import (
        adapters,
        admin,
        audit,
        chat,
        completions,
        feedback,
        findings,
        images,
        learn,
        live_events,
        messages,
        metric_definitions,
        raters,
        responses,
        rollout_log,
        rollouts,
        tenants,
        train,
        usage,
    )
    from groupwise.server.errors import add_handlers
    from groupwise.server.guard import Gate, Guard
    from groupwise.server.more_routes import more_routes
    from groupwise.server.openapi import describe
    from groupwise.server.ui import Web
    from groupwise.store.keys import KeyFile

    app = FastAPI(title="Groupwise", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.server = server
    for module in (
        chat,
        completions,
        responses,
        messages,
        rollouts,
        rollout_log,
        images,
        feedback,
        learn,
        raters,
        train,
        findings,
        adapters,
        admin,
        usage,
        audit,
        tenants,
        live_events,
    ):
        app.include_router(module.router)
    app.include_router(metric_definitions.definitions_router)
    config = server.config
    for name, routes in more_routes(config).items():
        if routes.make is not None:
            server.more[name] = routes.make(server)
        routes.mount(app, server)
    add_handlers(app, without=server.paths, disk_failed=server.storage.failed)
    describe(app, config)
    whose = partial(tenants.tenant_of, keys=KeyFile(config.state_dir.absolute()))
    gate = gate or Gate("ready")
    app.add_middleware(Guard, config=config, gate=gate, recorder=server.recorder, usage=server.usage, whose=whose)
    if config.cors_origins:
        headers = ["authorization", "content-type", "idempotency-key", "last-event-id", "x-request-id", "x-session-id"]
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=headers,
            expose_headers=["x-request-id", "retry-after", "x-adapter-version"],
        )
    app.add_middleware(Web)
    return app


class _Front:
    """The ASGI application that uvicorn serves: the loading page at first, then the application in its place."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


def _loading_app(config: ServeConfig, gate: Gate, recorder: Recorder) -> ASGIApp:
    """Return the application while the model loads: /health, the web interface's files, and 503 for everything else."""
    from starlette.responses import JSONResponse

    from groupwise import __version__
    from groupwise.server.guard import Guard
    from groupwise.server.ui import Web

    began = time.time()

    async def health(scope: Scope, receive: Receive, send: Send) -> None:
        body = {"status": gate.phase, "version": __version__, "uptime_seconds": time.time() - began}
        await JSONResponse(body)(scope, receive, send)

    return Web(Guard(health, config=config, gate=gate, recorder=recorder))


# ---- the process ----
@dataclass(frozen=True, kw_only=True)
class Start:
    """The state that a server begins with: an `adapter`, copied into its store and made active (`always`: even if the
    store had it already and another one was active), and a run whose pages it shows under /run."""

    adapter: Located | None = None
    always: bool = False
    run_dir: Path | None = None


def serve(
    config: ServeConfig,
    *,
    repair_ledger: bool = False,
    start: Start | None = None,
    announce: Callable[[str], None] | None = None,
    ready: Callable[[str], object] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. `announce` is told what happens, a line at a time, and `ready` the address of the
    web interface, once all routes answer. `repair_ledger`: first put the ledger together again, if it is damaged.

    Raises:
        StartError: the port or the state directory is taken (exit code 3); before anything is loaded.
        LedgerDamagedError: the ledger is damaged (exit code 3), and was left as it is.
        ModelError: the model cannot be loaded.
        AdapterError: the adapter of `start` is of another model, or cannot be used.
        StorageError: the state directory cannot be written.
        DeviceLostError: the GPU was lost to this process (exit code 75).
    """
    check_model(config.model)
    listener = bind(config.host, config.port)
    with listener, own(config.state_dir), incoming(config.state_dir):
        if not logging.getLogger().handlers:
            logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
            logging.getLogger("groupwise").setLevel(logging.INFO)
        announce = announce or _say
        state = _open_state(config, announce, repair=repair_ledger)
        sys.setswitchinterval(SWITCH_S)
        process = _ServerProcess(config, listener, announce, start=start or Start(), ready=ready)
        asyncio.run(process.run(*state))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _ServerProcess:
    """Runs a server in this process: serves the loading page at first, then the assembled server, until it is
    stopped."""

    def __init__(
        self,
        config: ServeConfig,
        listener: socket.socket,
        announce: Callable[[str], None],
        *,
        start: Start,
        ready: Callable[[str], object] | None,
    ):
        from groupwise import __version__
        from groupwise.server.connections import make_server
        from groupwise.server.guard import Gate
        from groupwise.server.metrics import Recorder

        self._config, self._listener, self._announce = config, listener, announce
        self._start, self._ready = start, ready
        self._gate = Gate()
        self._recorder = Recorder(model_name=config.served_name, version=__version__)
        self._front = _Front(_loading_app(config, self._gate, self._recorder))
        self._uvicorn = make_server(self._front, config)
        self._stop = asyncio.Event()
        self._server: Server | None = None
        self._served: PolicyVersion | None = None  # what the adapter of `start` is called here

    async def run(self, ledger: Ledger, store: AdapterStore) -> None:
        self._catch_signals()
        serving = asyncio.create_task(self._uvicorn.serve(sockets=[self._listener]))
        tasks: list[asyncio.Task[Any]] = [serving, asyncio.create_task(self._sweep())]
        settings = ExitStack()
        try:
            self._announce(f"loading {self._config.model}; {url_of(self._listener)}/health answers already")
            begun = asyncio.create_task(self._begin(ledger, store))
            await _first(begun, asyncio.create_task(self._stop.wait()), tasks[0])
            if not begun.done():
                _exit_now("stopped while the model was being loaded")  # a thread that loads cannot be interrupted
            await begun
            settings.enter_context(spared())  # or requests would wait again and again
            later = (_keep_house(ledger, self._config), self._keep_versions(), self._have_reader())
            tasks += [asyncio.create_task(each) for each in later]
            assert self._server is not None
            if self._server.trainer is not None:
                tasks.append(asyncio.create_task(self._server.trainer.run()))
            if self._server.gate is not None:
                tasks.append(asyncio.create_task(self._server.gate.watch()))
            if self._server.raters is not None:
                tasks.append(asyncio.create_task(self._server.raters.watch()))
            self._say_ready()
            lost = asyncio.create_task(self._device_lost())
            await _first(asyncio.create_task(self._stop.wait()), tasks[0], lost)
            if lost.done():
                self._announce(f"ending, to be started again: {lost.result()}")
            tasks.append(lost)
            await self._drain()
        finally:
            await self._end(tasks, ledger)
            settings.close()
        if lost.done() and not lost.cancelled() and not self._stop.is_set():
            raise lost.result()
        self._announce("stopped")

    async def _device_lost(self) -> DeviceLostError:
        """Wait until the engine's device is lost."""
        assert self._server is not None
        while (lost := self._server.engine.lost) is None:
            await asyncio.sleep(LOOK_S)
        return lost

    def _say_ready(self) -> None:
        """Say where it answers, what a browser should open, and what answers."""
        assert self._server is not None
        url = url_of(self._listener)
        pages = f"in a browser: {url}/ui/ to chat, score and train"
        if (run_dir := self._start.run_dir) is not None:
            pages += f", {url}/run/ui/ for the curves and completions of {run_dir.name}"
        self._announce(pages)
        if self._start.adapter is not None:
            self._announce(f"requests that name no adapter are answered by {self._server.policies.active}")
        self._announce(f"ready on {url}")  # the last line: scripts wait for it
        if self._ready is not None:
            self._ready(f"{url}/ui/" if self._start.adapter is None else f"{url}/ui/#/play")

    def _catch_signals(self) -> None:
        def stop(number: int) -> None:
            if self._stop.is_set():
                _exit_now("stopped at once", code=128 + number)
            self._stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            with suppress(ValueError, RuntimeError):  # not in the main thread, as in tests
                asyncio.get_running_loop().add_signal_handler(number, stop, number)

    async def _begin(self, ledger: Ledger, store: AdapterStore) -> None:
        """Load, activate, start the worker; then all routes answer."""
        load = partial(_load, self._config, ledger, store, self._recorder)
        self._server = server = await _in_daemon(load)
        if self._start.adapter is not None:
            from groupwise.server.assemble import begin_with

            always = self._start.always
            self._served = await asyncio.to_thread(begin_with, server, self._start.adapter, always=always)
        await server.policies.start()
        for warning in (*store.warnings, *server.policies.warnings):
            log.warning("%s", warning)
            self._announce(f"warning: {warning}")
        app = await asyncio.to_thread(build_app, server, gate=self._gate)
        await asyncio.to_thread(app.openapi)
        await server.supervisor.start()
        self._front.app = app if self._start.run_dir is None else await asyncio.to_thread(self._with_run, app)
        self._gate.phase = "ready"

    def _with_run(self, app: FastAPI) -> ASGIApp:
        from groupwise.server.run_app import WithRun

        assert self._start.run_dir is not None
        return WithRun(app, self._start.run_dir, self._config, gate=self._gate, served=self._served)

    async def _sweep(self) -> None:
        from groupwise.server.connections import close_overdue

        await close_overdue(self._uvicorn.server_state.connections, seconds=self._config.header_timeout_s)

    async def _have_reader(self) -> None:
        """Start the process that long bodies are read from, before there is one; not while the worker is being
        started."""
        server = self._server
        assert server is not None
        await asyncio.sleep(READER_AFTER_S)
        try:
            await server.reader.start()
        except GroupwiseError as error:  # it is tried again for the first long body
            log.warning("%s", error)

    async def _keep_versions(self) -> None:
        """Remove adapter versions that are older than those that are kept."""
        from groupwise.server.retention import Retention

        server = self._server
        assert server is not None
        keep = self._config.keep_versions
        await Retention(store=server.store, ledger=server.ledger, policies=server.policies, keep=keep).run()

    async def _drain(self) -> None:
        """Refuse new requests, and give those in flight, and the worker, `shutdown_timeout_s`."""
        assert self._server is not None
        self._gate.drain()
        self._announce(f"stopping; requests in flight: {len(self._uvicorn.server_state.tasks)}")
        timeout = self._config.shutdown_timeout_s
        await asyncio.gather(self._finish_requests(timeout), self._server.supervisor.stop(timeout_s=timeout))

    async def _finish_requests(self, timeout: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._uvicorn.server_state.tasks:
                    await asyncio.sleep(0.02)

    async def _end(self, tasks: Sequence[asyncio.Task[Any]], ledger: Ledger) -> None:
        self._uvicorn.should_exit = True
        with suppress(Exception):
            await asyncio.wait_for(tasks[0], END_S)
        for task in tasks[1:]:
            task.cancel()
        if self._server is not None:
            await self._server.supervisor.stop(timeout_s=END_S)  # does nothing after a drain
            if self._server.tenants is not None:
                await asyncio.to_thread(self._server.tenants.close)
            self._server.admissions.scoring.close()
            self._server.policies.close()
            self._server.reader.close()
            await asyncio.to_thread(self._server.engine.close)
            await asyncio.to_thread(self._server.answers.close)
            await asyncio.to_thread(self._server.usage.save)
            for part in (self._server.trainer, self._server.gate, self._server.raters):
                if part is not None:
                    await asyncio.to_thread(part.close)
        ledger.close()


def _open_state(config: ServeConfig, announce: Callable[[str], None], *, repair: bool) -> tuple[Ledger, AdapterStore]:
    """Return the store and the ledger, which was read from its first byte to its last. Raises LedgerDamagedError."""
    from groupwise.store import ledger_repair
    from groupwise.store.adapters import AdapterStore
    from groupwise.store.ledger import Ledger
    from groupwise.store.tenants import OWNER, home_of

    store, path = AdapterStore(config.state_dir / "adapters"), config.state_dir / "ledger.db"

    def find(tenant: str, adapter: str, job: str) -> tuple[str, bool] | None:
        own = store if tenant == OWNER else AdapterStore(home_of(config.state_dir, tenant) / "adapters")
        version = own.version_of_job(adapter, job)
        return None if version is None else (str(version), own.was_active(version))

    if repair:
        announce(ledger_repair.repair(path, find=find) or "the ledger is whole: there is nothing to repair")
    ledger_repair.check(path)
    return Ledger(path, rollout_bytes=config.rollout_bytes), store


def _load(config: ServeConfig, ledger: Ledger, store: AdapterStore, recorder: Recorder) -> Server:
    with importing():
        from groupwise.server.assemble import assemble

    return assemble(config, ledger, store, recorder)


# ---- small pieces of a process's life ----
async def _first(*tasks: asyncio.Task[Any]) -> None:
    """Wait until one of them is done."""
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


async def _in_daemon(work: Callable[[], Server]) -> Server:
    """Run `work` in a thread that does not keep the process alive, as asyncio's own threads do."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Server] = loop.create_future()

    def settle(result: Server | None, error: BaseException | None) -> None:
        if outcome.cancelled():
            return
        if error is not None:
            outcome.set_exception(error)
        elif result is not None:
            outcome.set_result(result)

    def run() -> None:
        try:
            result, error = work(), None
        except BaseException as raised:
            result, error = None, raised
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="groupwise-load", daemon=True).start()
    return await outcome


async def _keep_house(ledger: Ledger, config: ServeConfig) -> None:
    """Forget old jobs, rollouts and images, and read and back up the ledger, now and every hour."""
    from groupwise.server.images import prune as prune_images
    from groupwise.store.feedback import FeedbackLog

    def prune() -> None:
        ledger.prune()
        FeedbackLog(ledger).prune()
        prune_images(config, ledger)

    back_up = partial(ledger.back_up, least_free=config.min_free_bytes)
    while True:
        for what, act in (("old jobs were not removed", prune), ("the ledger was not backed up", back_up)):
            try:
                await asyncio.to_thread(act)
            except GroupwiseError as error:
                log.warning("%s: %s", what, error)
        await asyncio.sleep(HOUSEKEEPING_S)


def _exit_now(why: str, *, code: int = 0) -> None:
    """End the process as a kill would: what is on the disk is whole at any moment."""
    _say(why)
    os._exit(code)
