"""Tinker sessions: alive while the client sends heartbeats; their models and samplers are released at the end.

Sessions are not kept over a restart: a client makes a new one and continues from its last saved state.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from groupwise.errors import GroupwiseError, OverloadedError
from groupwise.server.errors import echo

MOST = 1024
LOOK_EVERY_S = 30.0

log = logging.getLogger(__name__)


class SessionGoneError(GroupwiseError, LookupError):
    """There is no such session or model: it ended, or the server has restarted since."""

    code, status, exit_code = "session_gone", 404, 2


class HeartbeatGoneError(SessionGoneError):
    """The same to a heartbeat: the package stops sending them at 410."""

    status = 410


@dataclass
class Session:
    """A client's session. `user_metadata` is the client's own."""

    id: str
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None
    last_seen: float = field(default_factory=time.monotonic)


class Sessions:
    """The sessions of one server. `ended(id)` is called when one is over."""

    def __init__(self, *, idle_s: float, ended: Callable[[str], Awaitable[None]]):
        self._idle_s, self._ended = idle_s, ended
        self._by_id: dict[str, Session] = {}
        self._looking: asyncio.Task[None] | None = None

    @property
    def ids(self) -> list[str]:
        return list(self._by_id)

    def create(self, **about: Any) -> Session:
        """Return a new session. Raises OverloadedError."""
        if len(self._by_id) >= MOST:
            raise OverloadedError(f"there are {MOST} sessions", hint="end some", retry_after=30)
        session = Session(uuid4().hex, **about)
        self._by_id[session.id] = session
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        return session

    def touch(self, id: str, *, error: type[SessionGoneError] = SessionGoneError) -> Session:
        """Return the session, which was heard of just now. Raises `error`."""
        if (session := self._by_id.get(id)) is None:
            raise error(f"there is no session {echo(id)}: it ended, or the server was started anew", hint=GO_ON)
        session.last_seen = time.monotonic()
        return session

    def silent(self, seconds: float) -> list[Session]:
        """Return those not heard of for so long, the longest first."""
        before = time.monotonic() - seconds
        return sorted(
            (each for each in self._by_id.values() if each.last_seen < before), key=lambda each: each.last_seen
        )

    async def end(self, id: str) -> None:
        """Let go of a session and all that belongs to it."""
        if self._by_id.pop(id, None) is not None:
            await self._ended(id)

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()

    async def _look(self) -> None:
        """End those that were not heard of for long, as long as there are any."""
        while self._by_id:
            await asyncio.sleep(min(LOOK_EVERY_S, self._idle_s))
            for session in self.silent(self._idle_s):
                log.info("tinker session %s was silent for %g s and has ended", session.id, self._idle_s)
                try:
                    await self.end(session.id)
                except Exception:
                    log.exception("tinker session %s has ended, and not all that belongs to it is gone", session.id)
        self._looking = None


GO_ON = "make a new client: create_training_client_from_state_with_optimizer(path) goes on from a saved state"
