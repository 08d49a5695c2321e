"""The parts of a running server, as every route gets them.

server_of(request)    the `Server` behind a request
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
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
class Server:
    """What the routes work with; `request.app.state.server`."""

    config: ServeConfig
    base: LoadedModel
    engine: LiveEngine
    store: AdapterStore
    ledger: Ledger
    policies: Policies
    reader: Reader
    recorder: Recorder
    supervisor: Supervisor

    @cached_property
    def storage(self) -> StorageProbe:
        """Whether the state directory can still be written."""
        from groupwise.server.storage import StorageProbe  # imports numpy: too slow before the port is bound

        return StorageProbe(self.config.state_dir)

    @cached_property
    def under_way(self) -> Counter[str]:
        """How many requests for completions each address has. For the event loop."""
        return Counter()

    @cached_property
    def responses(self) -> ResponseStore:
        """The answers of /v1/responses that are kept."""
        from groupwise.tasks.dialects.responses import ResponseStore

        return ResponseStore()

    @cached_property
    def feedback(self) -> FeedbackLog:
        """What people said of answers."""
        from groupwise.store.feedback import FeedbackLog

        return FeedbackLog(self.ledger)

    @cached_property
    def trainer(self) -> FeedbackTrainer | None:
        """Makes jobs of feedback; None where the configuration has no `learn`. Raises ConfigError, LoadError."""
        from groupwise.server.learn import FeedbackTrainer

        return None if self.config.learn is None else FeedbackTrainer(self, self.config.learn)

    @cached_property
    def gate(self) -> Gatekeeper | None:
        """Decides which versions go live; None where the configuration has no `gate`. Raises ConfigError and others."""
        from groupwise.server.gate import Gatekeeper

        return None if self.config.gate is None else Gatekeeper(self, self.config.gate)

    @cached_property
    def answers(self) -> AnswerLog:
        """Keeps answers, so that feedback can name them."""
        from groupwise.server.feedback import AnswerLog

        return AnswerLog(self.ledger)

    @property
    def paths(self) -> Mapping[str, str]:
        """The directories of this machine that no answer names, and what stands in their place."""
        from groupwise.server.errors import private_paths  # which needs fastapi; this module is read before a start

        return private_paths(self.config.state_dir, self.config.model)


def server_of(request: Request) -> Server:
    """Return the parts of the server that answers `request`."""
    return cast("Server", request.app.state.server)
