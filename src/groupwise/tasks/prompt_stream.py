"""Prompts as one endless stream that can be resumed: what a loop draws from.

The order of an epoch depends on (seed, epoch) only, so a cursor is an epoch, a position in it, and what before that is
on its way.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from groupwise.errors import DataError
from groupwise.tasks.rows import RowCount
from groupwise.types import Prompt, RolloutGroup

Entry = TypeVar("Entry")  # of an epoch's order: what a prompt is drawn by


class Ticket(NamedTuple):
    """Names one drawing of a row: the epoch, and the position in its order. No two drawings have the same one."""

    epoch: int
    position: int


@dataclass(frozen=True, kw_only=True)
class Issued:
    """A prompt on its way through sampling and training. `again`: it was so already when the run stopped."""

    ticket: Ticket
    prompt: Prompt
    again: bool = False


class PromptStream(Protocol):
    """The prompts of a training loop, drawn one after another: a PromptSource, a Curriculum or an AdaptiveDifficulty
    around one, or a StreamedPrompts.

    `known` are the prompts that were read before the first is drawn, in the order of the rows: all, or the first of a
    stream. `counts` says of each source how many rows it has.
    """

    @property
    def known(self) -> Sequence[Prompt]: ...

    @property
    def counts(self) -> Sequence[RowCount]: ...

    def issue(self, n: int) -> list[Issued]: ...

    def resolve(self, ticket: Ticket) -> None: ...

    def prompt(self, id: str) -> Prompt: ...

    def observe(self, groups: Sequence[RolloutGroup]) -> None: ...

    def metrics(self) -> dict[str, float]: ...

    @property
    def epochs(self) -> float: ...

    @property
    def cursor(self) -> dict[str, Any]: ...

    def restore(self, cursor: Mapping[str, Any]) -> None: ...


class Tickets(Generic[Entry]):
    """Issues prompts with tickets, which are resolved once the prompt was trained on or given up, in any order; the
    part that streams have in common.

    A cursor holds the position up to which prompts were issued and the tickets that are not resolved. A stream restored
    from it issues those first, so that none is lost and none is trained twice, however far ahead others had come.

    Args:
        order_of: returns what is drawn in the epoch with that number, an entry for each position.
        drawn: returns the prompt of an entry that is drawn for the first time. Raises DataError for a bad row.
    """

    def __init__(self, order_of: Callable[[int], Sequence[Entry]], drawn: Callable[[Entry], Prompt]):
        self._order_of, self._drawn = order_of, drawn
        self._epoch = self._position = 0
        self._order = order_of(0)
        self._open: dict[Ticket, Prompt] = {}  # issued, not resolved; in the order in which they were issued
        self._again: list[Ticket] = []  # of these, the ones to be issued again, last first

    def issue(self, n: int) -> list[Issued]:
        """Return the next n prompts with their tickets; an epoch follows another, so a prompt can come twice. Raises
        DataError for a bad row of a stream that is read as it is drawn."""
        issued: list[Issued] = []
        while len(issued) < n:
            again = bool(self._again)
            ticket = self._again.pop() if again else self._advance()
            issued.append(Issued(ticket=ticket, prompt=self._open[ticket], again=again))
        return issued

    def resolve(self, ticket: Ticket) -> None:
        """Take note that the prompt is done with: after a restart it does not come again. Raises ValueError if it is
        not issued."""
        if ticket not in self._open or ticket in self._again:
            raise ValueError(f"{ticket} is not issued, or is resolved already; resolve each ticket of issue() once")
        del self._open[ticket]

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        """Does nothing with scored groups: the order does not depend on them."""

    def _goes_on(self, at: Ticket, order: Sequence[Entry], again: Mapping[Ticket, Prompt]) -> None:
        """Go on from a place of a restored cursor, of whose epoch this is the order; these are issued again first."""
        (self._epoch, self._position), self._order = at, order
        self._open, self._again = dict(again), [*again][::-1]

    def _advance(self) -> Ticket:
        if self._position == len(self._order):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        ticket = Ticket(self._epoch, self._position)
        self._open[ticket] = self._drawn(self._order[self._position])
        self._position += 1
        return ticket


class PromptSource(Tickets[int]):
    """Prompts that are held, in epochs, each a new order if `shuffle`; or each in the order that `order` returns for
    its number, as indices of prompts."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int = 0,
        shuffle: bool = True,
        order: Callable[[int], list[int]] | None = None,
        counts: Sequence[RowCount] = (),
    ):
        if not prompts:
            raise DataError("there are no prompts", hint="give at least one")
        self.known, self.counts = tuple(prompts), tuple(counts)
        self._seed, self._shuffle = seed, shuffle
        super().__init__(self._shuffled if order is None else order, self.known.__getitem__)

    def __len__(self) -> int:
        """Number of prompts in an epoch."""
        return len(self.known)

    def prompt(self, id: str) -> Prompt:
        """Return the prompt of that id; the stream does not move. Raises DataError if there is none."""
        if id not in self._by_id:
            raise DataError(f"there is no prompt {id!r}", hint="resume with the dataset that the run was started with")
        return self._by_id[id]

    def metrics(self) -> dict[str, float]:
        """Return nothing: how often a prompt is drawn follows from the configuration."""
        return {}

    @property
    def epochs(self) -> float:
        """Return the number of issued epochs, the last in part."""
        return self._epoch + self._position / len(self._order)

    @property
    def cursor(self) -> dict[str, Any]:
        """Says where the stream stands, for `restore`; goes through JSON."""
        unresolved = [list(ticket) for ticket in self._open]
        return {
            "epoch": self._epoch,
            "position": self._position,
            "rows": len(self.known),
            "unresolved": unresolved,
        }

    def restore(self, cursor: Mapping[str, Any]) -> None:
        """Continue where `cursor` was taken. Raises DataError when the dataset has another number of rows."""
        epoch, position, rows = (cursor.get(key, -1) for key in ("epoch", "position", "rows"))
        if rows != len(self.known):
            message = f"the cursor is of a dataset with {rows} rows; this one has {len(self.known)}"
            raise DataError(message, hint="resume with the dataset that the run was started with")
        unresolved = cursor.get("unresolved", ())
        tickets = [Ticket(*each) for each in unresolved if len(each) == 2]
        fits = epoch >= 0 and all((0, 0) <= each < (epoch, position) for each in tickets)
        orders = {each: self._order_of(each) for each in {epoch, *(ticket.epoch for ticket in tickets)}} if fits else {}
        fits = fits and 0 <= position <= len(orders[epoch]) and len(set(tickets)) == len(unresolved)
        if not fits or not all(0 <= each.position < len(orders[each.epoch]) for each in tickets):
            raise DataError(f"{dict(cursor)} is not a cursor; take one from PromptSource.cursor")
        again = {ticket: self.known[orders[ticket.epoch][ticket.position]] for ticket in tickets}
        self._goes_on(Ticket(epoch, position), orders[epoch], again)

    @cached_property
    def _by_id(self) -> dict[str, Prompt]:
        return {prompt.id: prompt for prompt in reversed(self.known)}  # the first, where ids repeat

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self.known)))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)  # a string seed is hashed with SHA-512: stable
        return order


class WrappedStream:
    """Base of streams around a PromptSource: hands on to `source` whatever they do not do themselves."""

    def __init__(self, source: PromptSource):
        self._source = source

    def __len__(self) -> int:
        """Number of prompts in an epoch of the source."""
        return len(self._source)

    def resolve(self, ticket: Ticket) -> None:
        """See `PromptSource.resolve`."""
        self._source.resolve(ticket)

    @property
    def known(self) -> Sequence[Prompt]:
        """See `PromptStream`."""
        return self._source.known

    @property
    def counts(self) -> Sequence[RowCount]:
        """See `PromptStream`."""
        return self._source.counts

    def prompt(self, id: str) -> Prompt:
        """See `PromptSource.prompt`."""
        return self._source.prompt(id)

    @property
    def epochs(self) -> float:
        """Return the number of the source's issued epochs, the last in part."""
        return self._source.epochs
