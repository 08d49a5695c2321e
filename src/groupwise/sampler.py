"""Protocols of an engine: all that the rest of the system may assume of it.

Token ids in, token ids and behaviour logprobs out, sampled by a named, immutable policy version. Engines are
interchangeable: nothing above this file knows which one it talks to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from groupwise.errors import DeviceLostError
from groupwise.types import Completion, Grammar, PolicyVersion, SamplingRequest, SequenceScores

TokenSink = Callable[[int, int, float, tuple[tuple[int, float], ...]], None]

"""Hears of a token as it is sampled: completion, token id, log-probability, the likeliest (id, log-probability)."""


class Submits(Protocol):
    """Anything that takes sampling requests: an engine, or a queue in front of one."""

    @property
    def context_length(self) -> int:
        """Return the most tokens that a prompt and its completion may have together."""
        ...

    def submit(self, requests: Sequence[SamplingRequest]) -> list[Future[list[Completion]]]:
        """Queue requests, admitted together and in order; each future is done when its `n` completions are.

        Cancelling one gives its completions up. Raises as `Sampler.sample`.
        """
        ...


class Sampler(Submits, Protocol):
    """An engine: samples from versions of a policy that it has loaded (`engine.local`, `engine.vllm`)."""

    async def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Completion]]:
        """Sample `request.n` completions for each request, in order.

        Requests given together are admitted together; several callers may wait at once.

        Raises:
            ContextLengthError: a prompt leaves no room for a single new token.
            AdapterNotFoundError: a request names a version that was not loaded.
            GrammarError: a grammar cannot be compiled, or not by this engine.
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


@runtime_checkable
class GivesMemoryBack(Protocol):
    """A sampler that can free its device memory for training, and that takes the memory again at the next request."""

    async def rest(self) -> None:
        """Free the memory while nothing is sampled, and return when it is free."""
        ...


@runtime_checkable
class UpdatesInFlight(Protocol):
    """An engine in which a new version may take over completions that are being sampled."""

    def replace(self, old: PolicyVersion, new: PolicyVersion, *, recompute: bool) -> None:
        """Whatever is asked of `old` is sampled by `new` from its next token on: completions under way, and requests
        that are still to come, until `old` is unloaded. When this returns the next token is `new`'s.

        With `recompute` the keys and values of what was read and said so far are computed again under `new`, as if it
        had read the whole text; else they are kept, and `new` continues from what older versions computed.

        Raises:
            AdapterNotFoundError: `new` was not loaded.
            ConfigError: as `check_replaceable`.
        """
        ...

    def check_replaceable(self, *, recompute: bool) -> None:
        """Raise ConfigError if this engine cannot treat keys and values so."""
        ...


class Scores(Protocol):
    """An engine that computes the log-probability of given tokens, without sampling. Engines that inherit from this
    write `score_sequence` alone."""

    def score_sequence(
        self,
        ids: Sequence[int],
        version: PolicyVersion,
        *,
        first: int,
        top: int = 0,
        cells: tuple[Sequence[int], Sequence[int]] = ((), ()),
        temperature: float = 1.0,
    ) -> SequenceScores:
        """Return log-probabilities under `version` from one forward over `ids`, of which each has those before it as
        context.

        Args:
            ids: the sequence. Its length may be the whole context.
            first: own log-probabilities are those of `ids[first:]`; 1 to `len(ids)`.
            top: the number of the likeliest tokens that are returned for each of these.
            cells: places (1 to `len(ids) - 1`) and as many token ids: the log-probability of each id in its place,
                whatever token stands there.

        Raises as `sample`.
        """
        ...

    def score(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        version: PolicyVersion,
        *,
        temperature: float = 1.0,
    ) -> tuple[float, ...]:
        """Return the log-probability (nats) of each completion token after the prompt, under `version`. Raises as
        `sample`."""
        scored = self.score_top(prompt_ids, completion_ids, version, temperature=temperature, top=0)
        return tuple(logprob for logprob, _ in scored)

    def score_top(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        version: PolicyVersion,
        *,
        temperature: float = 1.0,
        top: int,
    ) -> tuple[tuple[float, tuple[tuple[int, float], ...]], ...]:
        """Return `score`'s log-probabilities, each with those of the `top` likeliest tokens at its position, by their
        ids."""
        ids, first = (*prompt_ids, *completion_ids), len(prompt_ids)
        scores = self.score_sequence(ids, version, first=first, top=top, temperature=temperature)
        return tuple(zip(scores.logprobs, scores.top, strict=True))


class LiveEngine(Sampler, Scores, Protocol):
    """An engine behind a live server: it also streams tokens, scores completions, and serves weighted sums of
    adapters."""

    def submit(
        self, requests: Sequence[SamplingRequest], *, on_token: TokenSink | None = None
    ) -> list[Future[list[Completion]]]:
        """See `Sampler.submit`. `on_token` hears of every token, in a thread of the engine, and must return at once."""
        ...

    @property
    def vocabulary(self) -> int:
        """Return how many token ids there are; they go from 0."""
        ...

    def prepare(self, grammar: Grammar, *, sender: str = "") -> Future[Any]:
        """Compile a grammar before requests name it: in a process that can be killed, and then in a thread. Hold the
        future until they are submitted: then none of them waits for it.

        The future, which is not to be cancelled, raises GrammarError where the engine cannot keep to the grammar, and
        OverloadedError where grammars of this `sender` that were refused have taken too long lately.
        """
        ...

    def load_composed(self, version: PolicyVersion, parts: Sequence[tuple[Path, float]]) -> None:
        """Make the weighted sum of saved adapters available under `version`. Raises AdapterError as `load` does."""
        ...

    def stats(self) -> Mapping[str, int]:
        """Return completions being decoded (`running`) and not yet begun (`waiting`), and `adapters` loaded."""
        ...

    @property
    def lost(self) -> DeviceLostError | None:
        """Return the error that the device is lost to this process, which is to be replaced by a new one; None while it
        is not."""
        ...

    @property
    def unavailable_reason(self) -> str | None:
        """Return why the engine cannot sample at the moment, such as a server that is restarting; None while it can."""
        ...
