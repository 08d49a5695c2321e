"""Prompts of sets that do not fit into memory: read while they are drawn (`data.streaming`).

What is held is `shuffle_buffer` rows of each source, the prompts on their way, and the first thousand of each, by which
rewards, environment and memory are tried before a run begins. A row that is read takes a random place of the buffer,
and what was there is drawn; at the end of a pass over the source the rest is drawn in random order, and the next pass
begins, with another shuffle. All of that follows from (seed, source, pass), so that a restored stream continues exactly
as it would have: it reads its sources again, from the beginning of the pass that it was in, up to where it was, and
says so if what was drawn in that pass is not what it was.

A row is checked when it is drawn: a bad one ends a run then, and not before it begins.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from groupwise.config.data import RowsConfig
from groupwise.errors import DataError
from groupwise.tasks.mixture import Mixture
from groupwise.tasks.prompt_stream import Ticket, Tickets
from groupwise.tasks.rows import RowCount, Rows
from groupwise.types import Prompt

KNOWN = 1000  # rows of each source that are looked at before a run begins
BLOCK = 1024  # draws of a block of the mixture
_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")  # in what Python shows of an image, another one in each process


class StreamedPrompts(Tickets[tuple[int, int]]):
    """Reads prompts when they are drawn, endlessly; see the head of this file and `PromptStream`.

    Args:
        sources: the rows of each source; every pass reads them from the start.
        weights: the sources' shares of the drawn prompts, in order.
        to_prompt: makes a prompt from the configuration of a row's source, its id and the row. Raises DataError.
        buffer: the number of rows of a source from which the next one is drawn; 1 keeps their order.

    Raises DataError for a bad row among the first of a source, or a source without rows.
    """

    def __init__(
        self,
        sources: Sequence[Rows],
        *,
        weights: Sequence[float],
        to_prompt: Callable[[RowsConfig, str, Any], Prompt],
        seed: int = 0,
        buffer: int = 1,
    ):
        self._sources, self._to_prompt, self._seed, self._buffer = sources, to_prompt, seed, buffer
        self._mixture = Mixture(weights, block=BLOCK, seed=seed, jitter=buffer > 1)
        known, counts = list[Prompt](), list[RowCount]()
        for rows, weight in zip(sources, weights, strict=True):
            first = list(itertools.islice(rows, KNOWN))
            if not first:
                raise rows.empty()
            known += [to_prompt(rows.config, id, row) for id, row in first]
            share = weight / sum(weights) if len(weights) > 1 else None
            counts.append(rows.count(len(first), share=share))
        self.known, self.counts = tuple(known), tuple(counts)
        self._readers = [self._reader(source) for source in range(len(sources))]
        super().__init__(self._mixture.draws, self._read)

    def prompt(self, id: str) -> Prompt:
        """Return a prompt on its way. Raises DataError for any other, as none is held."""
        found = next((prompt for prompt in self._open.values() if prompt.id == id), None)
        if found is None:
            raise DataError(
                f"the prompt {id!r} is not on its way, and a stream holds no other", hint="leave out streaming"
            )
        return found

    def metrics(self) -> dict[str, float]:
        """Return how many passes were finished over every source, as `data/passes`."""
        return {"data/passes": self.epochs}

    @property
    def epochs(self) -> float:
        """Passes that were finished over every source."""
        return float(min(reader.passes for reader in self._readers))

    @property
    def cursor(self) -> dict[str, Any]:
        """Says where the stream stands, for `restore`; goes through JSON. `sources` has of each the pass from which it
        is read again, the draws before that pass, and what was drawn last, with a digest of all draws of its pass."""
        oldest = [reader.number for reader in self._readers]
        for source, number in map(self._draw_of, self._open):
            oldest[source] = min(oldest[source], number)
        return {
            "epoch": self._epoch,
            "position": self._position,
            "unresolved": [list(ticket) for ticket in self._open],
            "sources": [
                [*reader.pass_of(number), reader.last] for reader, number in zip(self._readers, oldest, strict=True)
            ],
        }

    def restore(self, cursor: Mapping[str, Any]) -> None:
        """Continue where `cursor` was taken, reading again what was read since the pass began.

        Raises DataError for a value that is not a cursor of these sources, or if they have other rows now.
        """
        try:
            block, position = int(cursor["epoch"]), int(cursor["position"])
            tickets = [Ticket(int(epoch), int(place)) for epoch, place in cursor["unresolved"]]
            begun = [(int(turn), int(before), last) for turn, before, last in cursor["sources"]]
            draws = self._mixture.draws(max(block, 0))
            fits = block >= 0 and 0 <= position <= len(draws) and len(begun) == len(self._sources)
            fits = fits and len(set(tickets)) == len(tickets)
            if not fits or not all((0, 0) <= ticket < (block, position) for ticket in tickets):
                raise ValueError("it fits neither its own tickets nor these sources")
            wanted = {self._draw_of(ticket): ticket for ticket in tickets}
            if not all(begun[source][1] <= number for source, number in wanted):
                raise ValueError("a source begins after a prompt that is on its way")
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DataError(f"not the cursor of a stream: {type(error).__name__}: {error}") from error
        found: dict[Ticket, Prompt] = {}
        readers: list[_Reader] = []
        for source, (turn, before, last) in enumerate(begun):
            reader = self._reader(source, turn=turn, number=before)
            readers.append(reader)
            end = self._mixture.before(block, source) + sum(each == source for each, _ in draws[:position])
            while reader.number < end:
                id, row = reader.draw()
                if (ticket := wanted.get((source, reader.number - 1))) is not None:
                    found[ticket] = self._to_prompt(self._sources[source].config, id, row)
            if end > before and reader.last != last:
                raise DataError(
                    f"{self._sources[source].label} has changed: up to draw {end:,}, {_place(last)}, other rows come "
                    f"now, the last being {_place(reader.last)}",
                    hint="resume with the dataset that the run was started with",
                )
        self._readers = readers
        self._goes_on(Ticket(block, position), draws, {ticket: found[ticket] for ticket in tickets})

    def _draw_of(self, ticket: Ticket) -> tuple[int, int]:
        """Return the source of a draw, and its number among those of the source."""
        draws = self._order if ticket.epoch == self._epoch else self._order_of(ticket.epoch)
        return draws[ticket.position]

    def _read(self, draw: tuple[int, int]) -> Prompt:
        source, _ = draw
        return self._to_prompt(self._sources[source].config, *self._readers[source].draw())

    def _reader(self, source: int, *, turn: int = 0, number: int = 0) -> _Reader:
        return _Reader(self._sources[source], f"{self._seed}/{source}", self._buffer, turn=turn, number=number)


class _Reader:
    """The draws of one source, pass after pass. `number` are made so far; `turn` is the pass to begin with."""

    def __init__(self, rows: Rows, seed: str, buffer: int, *, turn: int, number: int):
        self._rows, self._seed, self._buffer = rows, seed, buffer
        self.number, self.passes = number, turn
        self._begun: deque[tuple[int, int]] = deque()  # (pass, draws before it) that may still be gone back to
        self.last: list[str] | None = None  # the id of the row that was drawn last, a digest of all draws of its pass
        self._digest = b""
        self._draws = self._endless()

    def draw(self) -> tuple[str, Any]:
        """Return the next row, with its id."""
        id, row = next(self._draws)
        self.number += 1
        said = _ADDRESS.sub("", repr((id, row))).encode(errors="replace")
        self._digest = hashlib.blake2b(self._digest + said, digest_size=8).digest()
        self.last = [id, self._digest.hex()]
        return id, row

    def pass_of(self, number: int) -> tuple[int, int]:
        """Return the pass that the draw belongs to, or comes after, and the draws before it. Earlier ones are not asked
        for again."""
        while len(self._begun) > 1 and self._begun[1][1] <= number:
            self._begun.popleft()
        return self._begun[0] if self._begun else (self.passes, self.number)

    def _endless(self) -> Iterator[tuple[str, Any]]:
        while True:
            self._begun.append((self.passes, self.number))
            self._digest = b""
            generator, held, seen = random.Random(f"{self._seed}/{self.passes}"), list[tuple[str, Any]](), False
            for row in self._rows:
                seen = True
                if len(held) < self._buffer:
                    held.append(row)
                    if self._buffer > 1:
                        continue
                    yield held.pop()
                else:
                    place = generator.randrange(len(held))
                    drawn, held[place] = held[place], row
                    yield drawn
            generator.shuffle(held)
            while held:
                yield held.pop()
            if not seen:
                raise DataError(
                    f"{self._rows.label} has no rows any more", hint="a function returns them anew each time"
                )
            self.passes += 1


def _place(last: Any) -> str:
    return str(last[0]) if last else "none"
