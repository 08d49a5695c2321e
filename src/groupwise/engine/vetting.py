"""Vets grammars: compiles each in another process first, which can be killed, before it may be compiled in this one.

    Vetting          vet(grammar): compiles it in its own process (`vetting_process`), within limits
    TokenizerParts   what such a process makes llguidance's tokenizer of
    Debts            processor seconds that each sender's refused grammars took, and who has to wait for them

A compiled grammar cannot travel between processes. But compiling the same grammar for the same tokenizer does the same
work again: what took little there takes little here. What does not end, needs too much memory or overflows the stack
has ended its own process only, and is refused.

Processes run side by side, and one that takes long steps aside for all others: a small grammar is vetted in
milliseconds while others run into their limits.
"""

from __future__ import annotations

import pickle
import socket
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from groupwise.engine.forks import GO, ForkServer, frame, receive_frame
from groupwise.errors import GrammarError, NotReadyError, OverloadedError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from groupwise.types import Grammar

CPU_S = 3  # of a processor, for one grammar; the slowest ordinary schemas of 65,536 characters take under one
MOST_BYTES = 64 << 20  # of memory, for one grammar
WALL_S = 10.0  # for one grammar, on a machine that is busy with others
STACK = 1 << 20  # bytes of the thread that vets; those that compile and sample have eight times as much, or twice
AT_ONCE_S = 0.5  # in which a process ends that does not wait for a grammar any more, or that cannot take one
BESIDE = 8  # grammars that are vetted at the same time
MOST_DEBT_S, PAID = 6.0, 0.1  # seconds that a sender may owe, and how much of one is forgiven in a second
MOST_SENDERS = 4096  # whose debts are known


@dataclass(frozen=True)
class TokenizerParts:
    """A tokenizer before it is llguidance's. `text` is its tokenizer.json, or "byte" for one of single bytes."""

    text: str = "byte"
    vocabulary: int | None = None
    eos_ids: tuple[int, ...] | None = None

    def open(self) -> LLTokenizer:
        """Return a matcher as llguidance does."""
        from llguidance import LLTokenizer

        ends = None if self.eos_ids is None else list(self.eos_ids)
        return LLTokenizer(self.text, n_vocab=self.vocabulary, eos_token=ends)


@dataclass(frozen=True)
class Vetted:
    """The report of a process that compiled a grammar: how much memory that took, or why the grammar is refused; and
    `again`, whether the process takes another grammar."""

    size: int = 0
    refused: GrammarError | None = None
    bug: str | None = None
    again: bool = False


class Vetting:
    """Vets grammars for one tokenizer. For any thread."""

    def __init__(self, parts: TokenizerParts):
        self._forks = ForkServer("groupwise.engine.vetting_process", parts, without="grammars cannot be compiled")
        self._lock = threading.Lock()
        self._asked: set[socket.socket] = set()
        self._idle: list[socket.socket] = []  # to processes that have vetted before
        self._closed = False

    def start(self) -> None:
        """Have the process that forks. Raises NotReadyError."""
        self._forks.start()

    def vet(self, grammar: Grammar) -> int:
        """Compile a grammar elsewhere. Returns how many bytes of memory that took.

        Raises:
            GrammarError: it is wrong; or it is at a limit, and its `kind` is "limit"; or the machine was too busy for
                it, and its `kind` is "time".
            NotReadyError: there is no process to vet it, or this was closed meanwhile.
        """
        stream, reused = self._stream()
        began = time.monotonic()
        outcome = self._said(stream, grammar)
        if outcome is None and reused and time.monotonic() - began < AT_ONCE_S and not self._closed:
            stream, _ = self._stream(new=True)  # that process may have ended before it was asked
            outcome = self._said(stream, grammar)
        if outcome is None:
            raise _closing() if self._closed else _charged(too_costly(grammar))
        if outcome.refused is not None:
            raise outcome.refused
        if outcome.bug is not None:
            raise RuntimeError(f"a grammar could not be vetted:\n{outcome.bug}")
        return outcome.size

    def _stream(self, *, new: bool = False) -> tuple[socket.socket, bool]:
        """Return a conversation with a process, and whether it had one before."""
        with self._lock:
            if self._closed:
                raise _closing()
            if self._idle and self._forks.running and not new:
                stream = self._idle.pop()
                self._asked.add(stream)
                return stream, True
        ours, theirs = socket.socketpair()
        ours.settimeout(WALL_S)
        begun = False
        with theirs:
            self._forks.start()
            self._forks.fork(theirs.fileno())
        with suppress(OSError):
            begun = ours.recv(len(GO)) == GO
        with self._lock:
            if begun and not self._closed:
                self._asked.add(ours)
                return ours, False
        ours.close()
        if self._closed:
            raise _closing()
        raise NotReadyError("there is no process to compile a grammar", hint="try again", retry_after=5)

    def _said(self, stream: socket.socket, grammar: Grammar) -> Vetted | None:
        """Return what the process says; None where it ended before, or is ended now: it is at a limit, or this is
        closed."""
        outcome, late = None, False
        try:
            stream.sendall(frame(pickle.dumps(grammar)))
            outcome = pickle.loads(receive_frame(stream))
        except TimeoutError:
            late = True
        except (OSError, EOFError):
            pass
        with self._lock:
            self._asked.discard(stream)
            if outcome is not None and outcome.again and not self._closed:
                self._idle.append(stream)
            else:
                stream.close()
        if late:
            message = f"{grammar.field} was not compiled after {WALL_S:g} seconds, beside others"
            error = GrammarError(message, hint="make it smaller, or try again", field=grammar.field, kind="time")
            raise _charged(error)
        return outcome

    def close(self) -> None:
        """Close for good: what is being vetted ends at once."""
        with self._lock:
            self._closed = True
            for stream in self._idle:
                stream.close()
            for stream in self._asked:  # others wait for them
                with suppress(OSError):
                    stream.shutdown(socket.SHUT_RDWR)
        self._forks.close()


def too_costly(grammar: Grammar) -> GrammarError:
    """Return the error for a grammar that ran into a limit while it was vetted."""
    return GrammarError(
        f"{grammar.field} takes more than {CPU_S} seconds of a processor or {MOST_BYTES >> 20} MiB of memory to "
        "compile, or is nested too deeply",
        hint="make it smaller: shorter patterns, fewer that exclude each other, fewer rules that refer to one another",
        field=grammar.field,
        kind="limit",
    )


def _charged(error: GrammarError) -> GrammarError:
    """Return the error of what used up all that a grammar may take."""
    error.seconds = CPU_S
    return error


def _closing() -> NotReadyError:
    return NotReadyError("the engine is shutting down", retry_after=5)


class Debts:
    """Processor seconds that each sender's refused grammars took, less what time has forgiven. For any thread."""

    def __init__(self) -> None:
        self._owed: OrderedDict[Any, tuple[float, float]] = OrderedDict()  # seconds, as of a time
        self._lock = threading.Lock()

    def check(self, sender: str) -> None:
        """Raise OverloadedError while a sender owes too much."""
        with self._lock:
            owed = self._now_owed(sender, time.monotonic())
        if owed > MOST_DEBT_S:
            raise OverloadedError(
                f"grammars that could not be compiled took {owed:.1f} seconds of this sender's {MOST_DEBT_S:g}: "
                "a new one has to wait",
                hint="ask with schemas that were compiled before, or wait",
                retry_after=max(1.0, (owed - MOST_DEBT_S) / PAID),
            )

    def charge(self, sender: str, seconds: float) -> None:
        """Charge the sender of a grammar that was refused after these seconds of a processor."""
        with self._lock:
            now = time.monotonic()
            self._owed[sender] = (self._now_owed(sender, now) + seconds, now)
            self._owed.move_to_end(sender)
            while len(self._owed) > MOST_SENDERS:
                self._owed.popitem(last=False)

    def _now_owed(self, sender: str, now: float) -> float:
        owed, since = self._owed.get(sender, (0.0, now))
        return max(0.0, owed - PAID * (now - since))
