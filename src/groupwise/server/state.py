"""The parts of a running server, as every route gets them.

server_of(request)    the `Server` behind a request
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from starlette.requests import Request

    from groupwise.config.serve import ServeConfig
    from groupwise.model.load import LoadedModel
    from groupwise.sampler import LiveEngine
    from groupwise.server.feedback import AnswerLog
    from groupwise.server.gate import Gatekeeper
    from groupwise.server.learn import FeedbackTrainer
    from groupwise.server.metrics import Recorder
    from groupwise.server.policies import Policies
    from groupwise.server.reader import Reader
    from groupwise.server.storage import StorageProbe
    from groupwise.server.supervisor import Supervisor
    from groupwise.store.adapters import AdapterStore
    from groupwise.store.feedback import FeedbackLog
    from groupwise.store.ledger import Ledger
    from groupwise.tasks.dialects.responses import ResponseStore


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What serves a policy and remembers what came of it; `assemble` makes them, and no other part makes any."""

    config: ServeConfig
    base: LoadedModel
    engine: LiveEngine
    store: AdapterStore
    ledger: Ledger
    policies: Policies
    recorder: Recorder
    feedback: FeedbackLog


@dataclass(frozen=True, kw_only=True)
class Server(Parts):
    """What the routes work with; `request.app.state.server`.

    Args:
        storage: tells whether the state directory can still be written.
        responses: the answers of /v1/responses that are kept.
        answers: keeps answers, so that feedback can name them.
        trainer: makes jobs of feedback; None where the configuration has no `learn`.
        gate: decides which versions go live; None where the configuration has no `gate`.
        under_way: how many requests for completions each address has. For the event loop.
    """

    reader: Reader
    supervisor: Supervisor
    storage: StorageProbe
    responses: ResponseStore
    answers: AnswerLog
    trainer: FeedbackTrainer | None = None
    gate: Gatekeeper | None = None
    under_way: Counter[str] = field(default_factory=Counter)

    @property
    def paths(self) -> Mapping[str, str]:
        """The directories of this machine that no answer names, and what stands in their place."""
        from groupwise.server.errors import private_paths  # which needs fastapi; this module is read before a start

        return private_paths(self.config.state_dir, self.config.model)


def server_of(request: Request) -> Server:
    """Return the parts of the server that answers `request`."""
    return cast("Server", request.app.state.server)
