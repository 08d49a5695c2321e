"""The bridge between a request and the engine, and back.

    Generation    requests in the engine for one client: tokens as they are sampled, or all completions
    Said          the sampled tokens of a completion that have not been sent yet
    tokens_of     a whole completion as the same tokens

The engine's thread never waits for a client: it leaves tokens in a `Generation`'s buffer. A client that reads too
slowly fills its own buffer and loses its own request. If a request ends early (the client left, the deadline, a full
buffer), its futures are cancelled, and the engine frees the rows before their next token.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from groupwise.errors import DeadlineError, GroupwiseError
from groupwise.sampler import LiveEngine
from groupwise.tasks.reply import TextStream
from groupwise.types import Completion, SamplingRequest

MOST_UNREAD = 8192  # tokens and alternatives that may wait for a slow reader,

LEAST_STEPS = 64  # or this many tokens of each completion, where that is more

LEAST_LOGPROB = -9999.0  # JSON has no minus infinity; this is what OpenAI writes for it


class SlowReaderError(GroupwiseError):
    """The client reads more slowly than the model speaks, and its buffer is full."""

    code, status = "client_too_slow", 408


class Token(NamedTuple):
    """Holds a sampled token of completion `choice` of the `prompt`-th request."""

    prompt: int
    choice: int
    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Generation:
    """Requests in the engine for one client. Make it in the event loop; `cancel` it when done with it, always.

    Args:
        timeout_s: the seconds that the requests may take, from `began`.
        stream: keep tokens for `next`; otherwise there are only the `completions`.
        counted: count in `sampled` the tokens of what is not streamed as they come, too. This makes the engine look
            at each token.
        first_token_s: the seconds that a stream may wait for its first token, from `began`.
        began: the event loop's time; None is now.

    Raises:
        ContextLengthError, AdapterNotFoundError, ModelError: as the engine.
    """

    def __init__(
        self,
        engine: LiveEngine,
        requests: Sequence[SamplingRequest],
        *,
        timeout_s: float,
        stream: bool = False,
        counted: bool = False,
        first_token_s: float | None = None,
        began: float | None = None,
    ):
        self._loop = asyncio.get_running_loop()
        self._began, self._timeout_s = self._loop.time() if began is None else began, timeout_s
        self._allowed_s = min(timeout_s, first_token_s or timeout_s)  # until there is a first token
        self._unread: deque[Token] = deque()
        weight = 1 + max((request.params.top_logprobs for request in requests), default=0)
        self._most_unread = max(MOST_UNREAD // weight, LEAST_STEPS * sum(request.n for request in requests))
        self._too_slow = self._told = False
        self.sampled = 0  # tokens that were heard of, read or not
        self._changed = asyncio.Event()
        self._futures = []
        try:
            if not stream:
                self._futures = engine.submit(requests, on_token=self._count if counted else None)
            for prompt, request in enumerate(requests if stream else ()):
                self._futures += engine.submit([request], on_token=partial(self._hear, prompt))
        except GroupwiseError:
            self.cancel()
            raise
        for future in self._futures:
            future.add_done_callback(lambda _: self._tell())

    def cancel(self) -> None:
        """Let the engine forget what is not finished."""
        for future in self._futures:
            future.cancel()

    async def completions(self) -> list[list[Completion]]:
        """Return all completions of each request, once they are there.

        Raises:
            DeadlineError: they took too long.
            GroupwiseError: the engine failed or was closed.
        """
        try:
            async with asyncio.timeout_at(self._began + self._timeout_s):
                return await asyncio.gather(*map(asyncio.wrap_future, self._futures))
        except TimeoutError as error:
            raise _overdue(f"the answer was not whole after {self._timeout_s:g} seconds") from error
        finally:
            self.cancel()

    async def next(self, patience_s: float) -> list[Token] | None:
        """Return the tokens since the last call, as soon as there are any; none when `patience_s` passed; None at the
        end.

        Raises:
            DeadlineError, GroupwiseError: as `completions`.
            SlowReaderError: too many tokens were waiting to be read.
        """
        until = self._loop.time() + patience_s
        while True:
            over = all(future.done() for future in self._futures)  # asked before the buffer is emptied
            tokens = [self._unread.popleft() for _ in range(len(self._unread))]
            self._check(tokens, over=over)
            if tokens:
                self._allowed_s = self._timeout_s
                return tokens
            if over:
                for future in self._futures:
                    future.result()
                return None
            if self._loop.time() >= until:
                return []
            with suppress(TimeoutError):
                async with asyncio.timeout_at(min(until, self._began + self._allowed_s)):
                    await self._changed.wait()
            self._changed.clear()

    def _check(self, tokens: Sequence[Token], *, over: bool) -> None:
        """Raise what ends this request early."""
        if self._too_slow:
            raise SlowReaderError(
                f"the client left {len(tokens)} tokens unread, and its buffer is full",
                hint="read faster, ask for fewer completions or alternatives at once, or do not stream",
            )
        if not over and self._loop.time() >= self._began + self._allowed_s:
            self.cancel()
            first = self._allowed_s < self._timeout_s and not tokens
            what = "there was no token" if first else "the answer was not whole"
            raise _overdue(f"{what} after {self._allowed_s:g} seconds")

    def _hear(
        self, prompt: int, choice: int, token_id: int, logprob: float, top: tuple[tuple[int, float], ...]
    ) -> None:
        """Take note, in the engine's thread, that a token was sampled."""
        self.sampled += 1
        if len(self._unread) >= self._most_unread:
            self._too_slow = True
            self.cancel()
        else:
            self._unread.append(Token(prompt, choice, token_id, logprob, top))
        self._tell()

    def _count(self, *_: object) -> None:
        self.sampled += 1

    def _tell(self) -> None:
        """Wake `next`, from any thread; many tokens make one call of the loop."""
        if not self._told:
            self._told = True
            with suppress(RuntimeError):  # the loop has been closed: no request waits
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._told = False
        self._changed.set()


def _overdue(message: str) -> DeadlineError:
    return DeadlineError(message, hint="lower max_tokens or n, or let the server take longer (request_timeout_s)")


class StreamedCompletion:
    """Holds back the part of one sampled completion that has not been sent yet: text that is certain, and the tokens
    behind it."""

    def __init__(self, stream: TextStream):
        self._stream, self._text = stream, ""
        self._tokens: list[Token] = []

    def hear(self, token: Token) -> None:
        self._tokens.append(token)
        self._text += self._stream.push(token.id)

    def take_text(self) -> str:
        text, self._text = self._text, ""
        return text

    def take_tokens(self) -> list[Token]:
        tokens, self._tokens = self._tokens, []
        return tokens

    def finish(self, completion: Completion) -> str:
        """Return the rest of the text."""
        return self.take_text() + self._stream.finish(completion.text)


def tokens_of(completion: Completion) -> list[Token]:
    """Return a completion's tokens, as a stream would have brought them."""
    alternatives = completion.top_logprobs or ((),) * len(completion.token_ids)
    rows = zip(completion.token_ids, completion.logprobs, alternatives, strict=True)
    return [Token(0, 0, token_id, logprob, top) for token_id, logprob, top in rows]


def sendable(logprob: float) -> float:
    """Return a log-probability as JSON can have it."""
    return logprob if logprob >= LEAST_LOGPROB else LEAST_LOGPROB
