"""A server in a thread, made of the real parts over the starter model, for the tests that talk to it over sockets."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import uvicorn
from fastapi import APIRouter, FastAPI
from starlette.types import ASGIApp

from groupwise.config.serve import ServeConfig
from groupwise.engine.local import LocalEngine
from groupwise.model.load import LoadedModel, load_model
from groupwise.server.assemble import server_over
from groupwise.server.errors import add_handlers
from groupwise.server.guard import Gate, Guard
from groupwise.server.metrics import Recorder
from groupwise.server.policies import Policies
from groupwise.server.quotas import Quotas
from groupwise.server.reader import Reader, TextModel
from groupwise.server.state import Parts, Server
from groupwise.store.adapters import AdapterStore
from groupwise.store.feedback import FeedbackLog
from groupwise.store.files import Provenance
from groupwise.store.keys import KeyFile
from groupwise.store.ledger import Ledger
from groupwise.store.tenants import OWNER
from groupwise.types import PolicyVersion


@functools.cache
def starter() -> LoadedModel:
    return load_model("starter")


@dataclass(frozen=True)
class Served:
    """A running server and its parts."""

    port: int
    server: Server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine(self) -> LocalEngine:
        return self.server.engine

    def publish(self, directory: Path, name: str) -> PolicyVersion:
        info = Provenance(base_model=self.server.base.name, base_hash=self.server.base.hash)
        return self.server.store.import_(directory, name, info=info)

    def is_idle_within(self, seconds: float) -> bool:
        """Whether the engine has nothing left to do before `seconds` have passed."""
        return comes_within(lambda: not (self.engine.stats()["running"] or self.engine.stats()["waiting"]), seconds)

    def is_busy_within(self, seconds: float) -> bool:
        return comes_within(lambda: self.engine.stats()["running"] > 0, seconds)


def comes_within(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether `condition` becomes true before `seconds` have passed."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


@contextmanager
def served(
    directory: Path,
    routers: Sequence[APIRouter],
    *,
    base: LoadedModel | None = None,
    engine: LocalEngine | None = None,
    **config: Any,
) -> Iterator[Served]:
    """A server of these routers, with its state in `directory`. Without an `engine` it has one of its own."""
    settings = ServeConfig(state_dir=directory, min_free_bytes=0, **config)
    model = base or starter()
    own = engine or LocalEngine(model, max_rows=32)
    store, ledger = AdapterStore(directory / "adapters"), Ledger(directory / "ledger.db")
    policies = Policies(store, own, base=model, served_name=settings.served_name, max_loaded=4)
    recorder = Recorder(model_name=settings.served_name)
    reader = Reader(TextModel.of(model), settings)
    parts = Parts(
        config=settings,
        base=model,
        engine=own,
        store=store,
        ledger=ledger,
        policies=policies,
        recorder=recorder,
        feedback=FeedbackLog(ledger),
        quotas=Quotas(KeyFile(directory), OWNER, directory),
    )
    server = server_over(parts, reader=reader, supervisor=cast(Any, None))
    app = FastAPI()
    app.state.server, app.state.config = server, settings
    for router in routers:
        app.include_router(router)
    add_handlers(app)
    try:
        with running(Guard(app, config=settings, gate=Gate("ready"), recorder=recorder, usage=server.usage)) as port:
            yield Served(port, server)
    finally:
        policies.close()
        reader.close()
        ledger.close()
        for version in policies.in_use:
            own.unload(version)
        if engine is None:
            own.close()


@contextmanager
def running(app: ASGIApp) -> Iterator[int]:
    """The port of an application in a thread."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.002)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(timeout=120)
