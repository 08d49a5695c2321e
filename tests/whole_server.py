"""The whole application over real parts and a tiny model, in this process; the worker is not started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.testclient import TestClient

from groupwise.config.serve import ServeConfig
from groupwise.run.job import WorkerContext
from groupwise.run.job_queue import LeaseHeartbeat, Worker
from groupwise.server.app import build_app
from groupwise.server.assemble import assemble
from groupwise.server.guard import Gate
from groupwise.server.metrics import Recorder
from groupwise.server.state import Server
from groupwise.store.adapters import AdapterStore
from groupwise.store.files import Provenance
from groupwise.store.ledger import Job, Ledger
from groupwise.types import PolicyVersion


@dataclass(frozen=True)
class Whole:
    """The parts, the application, and a client that sends the key where there is one."""

    server: Server
    app: FastAPI
    gate: Gate
    http: TestClient

    def publish(self, directory: Path, name: str, **info: Any) -> PolicyVersion:
        provenance = Provenance(base_model=self.server.base.name, base_hash=self.server.base.hash, **info)
        return self.server.store.import_(directory, name, info=provenance)

    def train(self) -> Job:
        """Do the next job as a worker would, in this process, to its end."""
        parts = self.server
        state_dir = parts.ledger.path.parent
        assert parts.tenants is not None
        whole = parts.tenants.whole()
        place = WorkerContext(base=parts.base, ledger=whole, store=parts.store, state_dir=state_dir)
        lease = whole.lease("worker")
        assert lease is not None
        Worker(place, LeaseHeartbeat(whole), name="worker").do(lease)
        job = whole.job(lease.job.id)
        assert job.error is None, job.error
        return job


@contextmanager
def whole(state_dir: Path, model: Path, **settings: Any) -> Iterator[Whole]:
    config = ServeConfig(model=str(model), state_dir=state_dir, dtype="float32", **{"min_free_bytes": 0, **settings})
    state_dir.mkdir(parents=True, exist_ok=True)
    ledger, store = Ledger(state_dir / "ledger.db"), AdapterStore(state_dir / "adapters")
    server = assemble(config, ledger, store, Recorder(model_name=config.served_name, version="test"))
    gate = Gate("ready")
    app = build_app(server, gate=gate)
    headers = {} if config.api_key is None else {"authorization": f"Bearer {config.api_key}"}
    client = TestClient(app, base_url="http://127.0.0.1:8420", headers=headers, raise_server_exceptions=False)
    try:
        with client:
            yield Whole(server, app, gate, client)
    finally:
        if server.tenants is not None:
            server.tenants.close()
        server.policies.close()
        server.engine.close()
        ledger.close()
