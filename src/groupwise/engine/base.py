"""What the rest of the system may assume of an engine.

Token ids in, token ids and behaviour logprobs out, sampled by a named, immutable policy version. Engines are
interchangeable: nothing above this file knows which one it talks to.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from groupwise.types import Completion, PolicyVersion, SamplingRequest


class Sampler(Protocol):
    """An engine."""

    @property
    def context_length(self) -> int:
        """Tokens that a prompt and its completion may have together."""
        ...

    def submit(self, requests: Sequence[SamplingRequest]) -> list[Future[list[Completion]]]:
        """Queue requests, admitted together and in order; each future is done when its `n` completions are.

        Cancelling one gives its completions up. Raises as `sample`.
        """
        ...

    async def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Completion]]:
        """`request.n` completions for each request, in order.

        Requests given together are admitted together; several callers may wait at once.

        Raises:
            ContextLengthError: a prompt leaves no room for a single new token.
            AdapterNotFoundError: a request names a version that was not loaded.
        """
        ...

    def load(self, version: PolicyVersion, directory: Path) -> None:
        """Make an adapter version, saved in PEFT's layout, available to requests. Loading it again is a no-op.

        Raises:
            AdapterError: the files cannot be read or do not fit the base model.
        """
        ...

    def adopt(self, version: PolicyVersion) -> None:
        """Full-parameter training: `version` is the present state of the base weights, which the learner changes."""
        ...

    def unload(self, version: PolicyVersion) -> None:
        """Forget a version once the requests that use it are done."""
        ...

    def close(self) -> None:
        """Stop; requests in flight fail."""
        ...
