"""The parts of a running server, and how a module of routes gets those that it names.

    @dataclass(frozen=True, kw_only=True)
    class JobParts:                             # what the routes of this module use, and all that they can reach
        config: ServeConfig
        ledger: Ledger

    Jobs = Annotated[JobParts, given(JobParts)]

    @router.get("/queue")
    async def queue(parts: Jobs) -> TrainQueue: ...

A route gets the parts of the request's sender: a tenant's, or the owner's (`server.tenants`). `assemble` builds
every part once and gives each what it uses; only it, the application, `server.tenants` and this file know the `Server`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Depends, Request

if TYPE_CHECKING:
    from groupwise.config.serve import ServeConfig
    from groupwise.model.load import LoadedModel
    from groupwise.sampler import LiveEngine
    from groupwise.server.feedback import AnswerLog
    from groupwise.server.gate import Gatekeeper
    from groupwise.server.learn import FeedbackTrainer
    from groupwise.server.metrics import Recorder
    from groupwise.server.policies import Policies
    from groupwise.server.quotas import Quotas
    from groupwise.server.raters import Raters
    from groupwise.server.reader import Reader
    from groupwise.server.sampling import Admissions
    from groupwise.server.storage import StorageProbe
    from groupwise.server.supervisor import Supervisor
    from groupwise.server.tenants import Tenants
    from groupwise.server.usage import KeyUsage
    from groupwise.store.adapters import AdapterStore
    from groupwise.store.feedback import FeedbackLog
    from groupwise.store.ledger import Ledger
    from groupwise.tasks.dialects.responses import ResponseStore


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a server, from the engine that samples to the logs that record, and `quotas`, the limits on
    adapters, jobs and stored bytes. `assemble` makes all of them; no part makes another."""

    config: ServeConfig
    base: LoadedModel
    engine: LiveEngine
    store: AdapterStore
    ledger: Ledger
    policies: Policies
    recorder: Recorder
    feedback: FeedbackLog
    quotas: Quotas


@dataclass(frozen=True, kw_only=True)
class Server(Parts):
    """Every part of a server; `app.state.server`.

    Args:
        reader: reads the bodies of requests, long ones in other processes.
        supervisor: starts the worker and swaps in what it trained.
        usage: counts what each named key uses, and bounds it.
        storage: tells whether the state directory can still be written.
        admissions: admits the requests that sample.
        responses: the answers of /v1/responses that are kept.
        answers: keeps answers, so that feedback can name them.
        paths: the directories of this machine that no answer names, and what stands in their place.
        tenants: the tenants of the owner's server; None in a tenant's server, and in one without tenants.
        more: the state of other packages' routes (`more_routes.MoreRoutes.make`), by the package's name.
        trainer: makes jobs of feedback; None where the configuration has no `learn`.
        gate: decides which versions go live; None where the configuration has no `gate`.
        raters: finds raters whose ratings are not worth anything; None where the configuration has no `raters`.
    """

    reader: Reader
    supervisor: Supervisor
    usage: KeyUsage
    storage: StorageProbe
    admissions: Admissions
    responses: ResponseStore
    answers: AnswerLog
    paths: Mapping[str, str]
    tenants: Tenants | None = None
    more: dict[str, Any] = field(default_factory=dict)
    trainer: FeedbackTrainer | None = None
    gate: Gatekeeper | None = None
    raters: Raters | None = None


P = TypeVar("P")


async def seen(request: Request) -> Server:
    """Return the server as who sends the request sees it."""
    server, tenant = request.app.state.server, getattr(request.state, "tenant", "")
    return await server.tenants.of(tenant) if tenant else server


def opened(request: Request) -> list[Server]:
    """Return the server as the owner and as every tenant sees it, for a secret that says by itself whose it is."""
    server = request.app.state.server
    return [server, *([] if server.tenants is None else server.tenants.opened())]


def given(kind: type[P]) -> Any:
    """Return FastAPI's dependency that makes a `kind` for a route: a dataclass whose fields name parts of the `Server`.

    Raises TypeError, when the module is imported, for a field that names no part.
    """
    names = [each.name for each in fields(kind)]  # pyright: ignore[reportArgumentType]
    if strange := set(names) - {each.name for each in fields(Server)}:
        raise TypeError(f"{kind.__name__}: a server has no part {', '.join(sorted(strange))}")

    async def parts(request: Request) -> P:
        return select(kind, await seen(request))

    return Depends(parts)


def select(kind: type[P], server: Server) -> P:
    """Return a `kind` of the server's parts: a dataclass whose fields name some of them."""
    return kind(**{each.name: getattr(server, each.name) for each in fields(kind)})  # pyright: ignore[reportArgumentType]
