"""Separates tenants: turns the sender of a request into the server that it talks to, in this one place.

    tenant_of       a caller, a path and a request's headers -> a tenant; "" is the owner
    may_name        the paths behind which a tenant finds its own; all others, those of tomorrow too, are the owner's
    Tenants.of      a tenant -> a `Server` of which every part is the tenant's, over the one model, engine and worker

Routes name parts (`state.given`) and get those of the request's tenant. A tenant's parts hold only its own things: its
ledger is a view of its rows, its adapters are in its directory, and so on. So a thing of another tenant is the same 404
as a thing that does not exist, and no route has anything to filter.

    shared       the model and its tokenizer, the engine's time, the worker's, the readers of bodies, the disk, images
    a tenant's   adapters and which is active, the active policy, jobs, rollouts, feedback, responses, idempotency keys,
                 Tinker's sessions and checkpoints, the latest requests, the speed of decoding, usage, the audit log
    the owner's  learning from feedback, gates and trials, webhooks, Prometheus, the run that is shown

The owner's key with the header `x-groupwise-tenant: acme` is answered as acme is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, cast

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool

from groupwise.config.serve import ServeConfig
from groupwise.errors import GroupwiseError, RequestError
from groupwise.sdk.types import Answer
from groupwise.server.feedback import AnswerLog
from groupwise.server.metrics import Recorder, RequestRecord
from groupwise.server.policies import RecordedPolicies
from groupwise.server.quotas import Quotas, TenantStore, bytes_in
from groupwise.server.retention import Retention
from groupwise.server.roles import Caller, OwnersError
from groupwise.server.sampling import Admissions
from groupwise.server.state import Parts, Server, given
from groupwise.server.supervisor import Supervisor, WorkerStatus
from groupwise.server.tenant_engine import TenantEngine
from groupwise.server.usage import KeyUsage, UsedByKey
from groupwise.server.wire import documented
from groupwise.store import files
from groupwise.store.adapters import names_in
from groupwise.store.feedback import FeedbackLog
from groupwise.store.keys import KeyFile
from groupwise.store.tenants import BETWEEN, OWNER, home_of, is_tenant, label, tenants_in
from groupwise.tasks.dialects.responses import ResponseStore

if TYPE_CHECKING:
    from starlette.datastructures import Headers

    from groupwise.server.more_routes import MoreRoutes
    from groupwise.store.ledger import Ledger

HEADER = "x-groupwise-tenant"

VIEWS = (  # whole segments of paths
    "/health",
    "/ready",
    "/openapi.json",
    "/v1/health",
    "/v1/models",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
    "/v1/rollouts",
    "/v1/images",
    "/v1/feedback",
    "/v1/learn",
    "/v1/train",
    "/v1/adapters",
    "/v1/config",
    "/v1/stats",
    "/v1/metrics/definitions",
    "/v1/events",
    "/v1/usage",
    "/v1/audit",
    "/api/v1",
    "/oai/api/v1",
)

NOT_A_TENANTS: Mapping[str, Any] = {  # settings: the owner's own, in a tenant's view as if they were not there
    "learn": None,
    "gate": None,
    "raters": None,
    "webhook_url": None,
    "webhook_secret": None,
    "tinker_other_models": {},
}


UNTOLD = ("state_dir", "folder", "host", "port", "allowed_hosts", "cors_origins", "vllm")  # settings: the machine's


class TenantNotFoundError(GroupwiseError, LookupError):
    """The owner names a tenant that has no key and never had a thing."""

    code, status, exit_code = "tenant_not_found", 404, 2


# ---- who ----
def tenant_of(caller: Caller, path: str, headers: Headers, *, keys: KeyFile) -> str:
    """Return whose things a request is about: the tenant of its key, or the one that the owner names.

    Raises OwnersError for a request that only the owner may make, RequestError or TenantNotFoundError for a wrong
    tenant in the owner's header.
    """
    named = headers.get(HEADER)
    if named is not None and caller.role != "admin":
        raise OwnersError(f"the header {HEADER} is the owner's", hint="leave it out: your key says whose you are")
    if named is not None and not is_tenant(named):
        raise RequestError(f"{HEADER} is {named[:64]!r}, which cannot name a tenant", field=HEADER)
    if named is not None and not keys.of(named) and named not in tenants_in(keys.path.parent):
        raise TenantNotFoundError(f"there is no tenant {named!r}", hint="GET /v1/tenants lists them")
    tenant = caller.tenant if named is None else named
    if tenant != OWNER and not may_name(path):
        raise OwnersError(f"{path[:80]!r} is the owner's alone", hint="docs/server.md#tenants lists what is a tenant's")
    return tenant


def may_name(path: str) -> bool:
    """Return whether a tenant finds its own behind a path."""
    return any(path == each or path.startswith(f"{each}/") for each in VIEWS)


# ---- what ----
class _TenantConfig(ServeConfig):
    """Shows the server's configuration to a tenant: only the options that act on its requests."""

    def public(self) -> dict[str, Any]:
        return {name: value for name, value in super().public().items() if name not in {*UNTOLD, *NOT_A_TENANTS}}


class Tenants:
    """The tenants of one server, each made when it is asked for first. For the event loop."""

    def __init__(self, server: Server, whole: Ledger, *, more: Mapping[str, MoreRoutes]):
        self._server, self._whole, self._more = server, whole, more
        self.keys = KeyFile(server.config.state_dir.absolute())
        self._open: dict[str, asyncio.Task[Server]] = {}
        self._keeping: set[asyncio.Task[None]] = set()

    async def of(self, tenant: str) -> Server:
        """Return the server as a tenant sees it. Raises StorageError where its directory cannot be made."""
        if tenant == OWNER:
            return self._server
        if tenant not in self._open:
            self._open[tenant] = asyncio.create_task(self._begin(tenant))
        begun = self._open[tenant]
        try:
            return await asyncio.shield(begun)
        except Exception:
            if self._open.get(tenant) is begun:  # the next request tries again, or has begun to
                del self._open[tenant]
            raise

    def opened(self) -> list[Server]:
        """Return the tenants' servers that `of` has opened."""
        return [task.result() for task in self._open.values() if task.done() and not task.exception()]

    def names(self) -> list[str]:
        """Return all there are: those with keys, and those that have things. Raises StorageError."""
        state_dir = self._server.config.state_dir.absolute()
        return sorted({key.tenant for key in self.keys.all()} - {OWNER} | {*tenants_in(state_dir)})

    def whole(self) -> Ledger:
        """Return the ledger of all."""
        return self._whole

    def close(self) -> None:
        """Let go of what was made. What is to be kept is on the disk, but for the last answers, which are written."""
        for task in self._keeping:
            task.cancel()
        for view in self.opened():
            view.admissions.scoring.close()
            view.answers.close()
            view.policies.close()
            view.engine.close()

    async def _begin(self, tenant: str) -> Server:
        parts = await asyncio.to_thread(self._parts, tenant)
        view = self._view(tenant, parts)
        for name, routes in self._more.items():
            if routes.make is not None:
                view.more[name] = routes.make(view)
        await view.policies.start()
        keep = Retention(store=view.store, ledger=view.ledger, policies=view.policies, keep=view.config.keep_versions)
        self._keeping.add(asyncio.create_task(keep.run()))
        return view

    def _parts(self, tenant: str) -> Parts:
        server = self._server
        home = home_of(server.config.state_dir.absolute(), tenant)
        with files.writing(f"making {home}"):
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
        config = _TenantConfig.model_construct(**{**dict(server.config), **NOT_A_TENANTS, "state_dir": home})
        quotas, ledger = Quotas(self.keys, tenant, home), self._whole.of(tenant)
        engine, store = TenantEngine(server.engine, tenant), TenantStore(home / "adapters", quotas)
        recorder = TenantRecorder(server.recorder, tenant, model_name=config.served_name)
        policies = RecordedPolicies(config, store, engine, base=server.base, recorder=recorder)
        return Parts(
            config=config,
            base=server.base,
            engine=engine,
            store=store,
            ledger=ledger,
            policies=policies,
            recorder=recorder,
            feedback=FeedbackLog(ledger),
            quotas=quotas,
        )

    def _view(self, tenant: str, parts: Parts) -> Server:
        server, answers = self._server, AnswerLog(parts.ledger)
        admissions = Admissions(
            config=parts.config,
            base=parts.base,
            engine=parts.engine,
            policies=parts.policies,
            recorder=parts.recorder,
            answers=answers,
            usage=server.usage,
            gate=None,
        )
        return Server(
            **vars(parts),
            reader=server.reader,
            supervisor=cast("Supervisor", _WorkerSeen(server.supervisor)),
            usage=cast("KeyUsage", _UsageSeen(server.usage, tenant)),
            storage=server.storage,
            admissions=admissions,
            responses=ResponseStore(),
            answers=answers,
            paths=server.paths,
        )


class TenantRecorder(Recorder):
    """Records the numbers of a tenant's requests, and also in the server's recorder."""

    def __init__(self, servers: Recorder, tenant: str, *, model_name: str):
        super().__init__(model_name=model_name)
        self._servers, self._tenant = servers, tenant

    def request_started(self, route: str, **about: Any) -> RequestRecord:
        record = super().request_started(route, **about)
        theirs = {**about, "adapter": label(self._tenant, about.get("adapter", "base"))}
        record.also = self._servers.request_started(route, **theirs)
        return record

    def tokens(self, record: RequestRecord, count: int = 1) -> None:
        super().tokens(record, count)
        if record.also is not None:
            self._servers.tokens(record.also, count)

    def finished(self, record: RequestRecord, **how: Any) -> None:
        super().finished(record, **how)
        if record.also is not None:
            self._servers.finished(record.also, **how)

    def rated(self, *, score: float | None) -> None:
        super().rated(score=score)
        self._servers.rated(score=score)

    def swapped(self, *, ok: bool, seconds: float) -> None:
        super().swapped(ok=ok, seconds=seconds)
        self._servers.swapped(ok=ok, seconds=seconds)


@dataclass(frozen=True)
class _WorkerSeen:
    """Shows a tenant whether the worker is alive. The worker's last output may be about other tenants' jobs and is left
    out."""

    supervisor: Supervisor

    @property
    def status(self) -> WorkerStatus:
        return replace(self.supervisor.status, pid=None)

    def last_words(self, job_id: str) -> None:
        return None


@dataclass(frozen=True)
class _UsageSeen:
    """The usage counts as a tenant sees them: those of its own keys."""

    usage: KeyUsage
    tenant: str

    def days(self) -> dict[str, dict[str, UsedByKey]]:
        before = f"{self.tenant}{BETWEEN}"
        return {
            day: {name.removeprefix(before): used for name, used in keys.items() if name.startswith(before)}
            for day, keys in self.usage.days().items()
            if any(name.startswith(before) for name in keys)
        }


# ---- the owner's list ----
router = APIRouter(tags=["Server"])


class TenantShown(Answer):
    """A tenant, with its keys, adapters, jobs and bytes on disk."""

    keys: list[str]
    adapters: list[str]
    bytes: int
    jobs_waiting: int
    jobs_running: int
    weight: int
    """The tenant's weight when tenants share the training."""


class TenantList(Answer):
    """The tenants of this server, by name."""

    tenants: dict[str, TenantShown]


@dataclass(frozen=True, kw_only=True)
class TenantParts:
    """The part of a server that this route reads."""

    tenants: Tenants


@router.get("/v1/tenants", **documented(answer=TenantList))
async def list_tenants(parts: Annotated[TenantParts, given(TenantParts)]) -> TenantList:
    """List the tenants with what each has. To see it as the tenant does, send `x-groupwise-tenant` with any request."""
    return TenantList(tenants=await run_in_threadpool(partial(_listed, parts.tenants)))


def _listed(tenants: Tenants) -> dict[str, TenantShown]:
    counted: dict[str, dict[str, int]] = {}
    with tenants.whole().reader("counting the tenants' jobs") as db:
        query = "SELECT tenant, state, count(*) AS n FROM job WHERE finished_at IS NULL GROUP BY tenant, state"
        for row in db.execute(query):
            counted.setdefault(row["tenant"], {})[row["state"]] = row["n"]
    state_dir, shown = tenants.keys.path.parent, dict[str, TenantShown]()
    for name in tenants.names():
        home = home_of(state_dir, name)
        shown[name] = TenantShown(
            keys=[key.name for key in tenants.keys.of(name)],
            adapters=names_in(home / "adapters"),
            bytes=bytes_in(home),
            jobs_waiting=counted.get(name, {}).get("queued", 0),
            jobs_running=counted.get(name, {}).get("running", 0),
            weight=tenants.keys.weight(name),
        )
    return shown
