"""What the rest of the system may assume of an engine.

Token ids in, token ids and behaviour logprobs out, sampled by a named, immutable policy version. Engines are
interchangeable: nothing above this file knows which one it talks to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from groupwise.types import Completion, PolicyVersion, SamplingRequest

TokenSink = Callable[[int, int, float, tuple[tuple[int, float], ...]], None]
"""Hears of a token as it is sampled: completion, token id, log-probability, the likeliest (id, log-probability)."""


class Submits(Protocol):
    """What takes requests: an engine, or what stands before one."""

    @property
    def context_length(self) -> int:
        """Tokens that a prompt and its completion may have together."""
        ...

    def submit(self, requests: Sequence[SamplingRequest]) -> list[Future[list[Completion]]]:
        """Queue requests, admitted together and in order; each future is done when its `n` completions are.

        Cancelling one gives its completions up. Raises as `Sampler.sample`.
        """
        ...


class Sampler(Submits, Protocol):
    """An engine."""

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


class Scores(Protocol):
    """What says how likely a completion is."""

    def score(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        version: PolicyVersion,
        *,
        temperature: float = 1.0,
    ) -> tuple[float, ...]:
        """Log-probability (nats) of each completion token after the prompt, under `version`. Raises as `sample`."""
        ...


class LiveEngine(Sampler, Scores, Protocol):
    """An engine behind a live server: it also streams, scores, and adds adapters up."""

    def submit(
        self, requests: Sequence[SamplingRequest], *, on_token: TokenSink | None = None
    ) -> list[Future[list[Completion]]]:
        """As `Sampler.submit`. `on_token` hears of every token, in a thread of the engine, and must return at once."""
        ...

    def score_top(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        version: PolicyVersion,
        *,
        temperature: float = 1.0,
        top: int,
    ) -> tuple[tuple[float, tuple[tuple[int, float], ...]], ...]:
        """As `score`; beside each log-probability those of the `top` likeliest tokens in its place, by their ids."""
        ...

    def load_composed(self, version: PolicyVersion, parts: Sequence[tuple[Path, float]]) -> None:
        """Make the weighted sum of saved adapters available under `version`. Raises AdapterError as `load` does."""
        ...

    def stats(self) -> Mapping[str, int]:
        """Completions being decoded (`running`) and not yet begun (`waiting`), and `adapters` loaded."""
        ...

    @property
    def away(self) -> str | None:
        """Why nothing can be sampled just now; None while it can."""
        ...
