"""Writes the requests that change something to the audit log, and serves it: GET /v1/audit shows a sender its own.

Every request that may change something is logged, refused or not, once its sender is known: all methods but GET, HEAD
and OPTIONS. What only samples, tokenises or says that a client lives is not (NOT_CHANGES); nor is each step of a model
that is trained over Tinker's API, of which the log has the making, the saving and the end.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.concurrency import run_in_threadpool
from starlette.types import Scope

from groupwise.errors import StorageError
from groupwise.sdk.types import Answer
from groupwise.server.errors import printable
from groupwise.server.quotas import Quotas
from groupwise.server.roles import SHOWS, Caller
from groupwise.server.state import given
from groupwise.server.wire import documented
from groupwise.store.audit import MOST_TEXT, AuditLog, Change, now

NOT_CHANGES = (  # the ends of paths
    "/chat/completions",
    "/completions",
    "/completions/batch",
    "/messages",
    "/messages/count_tokens",
    "/responses",
    "/asample",
    "/cancel_future",
    "/retrieve_future",
    "/session_heartbeat",
    "/telemetry",
    "/client/config",
    "/client/dynamic_config",
    "/forward",
    "/forward_backward",
    "/optim_step",
    "/get_info",
    "/weights_info",
)
MOST = 1000

log = logging.getLogger(__name__)
router = APIRouter(tags=["Server"])


def changes(method: str, path: str) -> bool:
    """Return whether the log has requests like this."""
    return method not in SHOWS and not path.endswith(NOT_CHANGES)


def note(audit: AuditLog, scope: Scope, status: int) -> None:
    """Write the line of a request that was answered, if it is to have one. A disk that does not take it is told in the
    server's log."""
    state: Mapping[str, Any] = scope["state"]
    caller: Caller | None = state.get("caller")
    if caller is None or not changes(scope["method"], scope["path"]):
        return
    things = {**scope.get("path_params", {}), **state.get("things", {})}
    change = Change(
        at=now(),
        who=caller.label,
        tenant=state.get("tenant", ""),
        method=printable(scope["method"])[:MOST_TEXT],
        route=getattr(scope.get("route"), "path", None) or printable(scope["path"])[:MOST_TEXT],
        things={name: printable(str(value))[:MOST_TEXT] for name, value in things.items()},
        status=status,
        request=state["request_id"],
    )
    try:
        audit.append(change)
    except StorageError as error:
        log.error("the audit log has not %s: %s", change.model_dump_json(), error)


class AuditAnswer(Answer):
    """Changes that requests made or tried to make, the newest first."""

    changes: list[Change]


@dataclass(frozen=True, kw_only=True)
class AuditParts:
    """The parts of a server that this route reads."""

    quotas: Quotas


@router.get("/v1/audit", **documented(answer=AuditAnswer, errors=[StorageError]))
async def show_audit(
    parts: Annotated[AuditParts, given(AuditParts)], limit: Annotated[int, Query(ge=1, le=MOST)] = 100
) -> AuditAnswer:
    """List what was changed with the keys of the sender's tenant, or, for the owner, with those that have none."""
    book = AuditLog(parts.quotas.keys.path.parent)
    return AuditAnswer(changes=await run_in_threadpool(lambda: book.read(parts.quotas.tenant, limit=limit)))
