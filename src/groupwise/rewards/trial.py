"""A reward is called with the probes of `rewards.probes`: what it gave, and how it behaved. `lint` judges.

Every probe is scored alone. Then come groups: new completions twice in a row, a group and the same group turned round,
the same completion many times, an answer where none is expected, and at last some of the first probes once more.

In a `RewardPool` that runs the function, a deadline ends whatever it is in. Without one it runs here, and nothing does.
"""

from __future__ import annotations

import copy
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from groupwise.rewards import probes
from groupwise.rewards.call import Call, Failure, FailureKind, RewardFunction, Value, call_here
from groupwise.rewards.probes import Row

if TYPE_CHECKING:
    from groupwise.rewards.pool import RewardPool

Kind = Literal["right", "wrong", "junk"]
COPIES = 8  # in a group of one completion
LOST = 3  # timeouts and crashes, after which no more is tried
_SAME = 1e-9
NOTHING = ("empty", "10 words", "<think> and nothing inside")  # junk


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A completion and its value for a row: a number, None where the function does not apply, or a Failure."""

    row: int
    kind: Kind
    name: str
    text: str
    value: Value

    @property
    def probe(self) -> str:
        """What to call it in a message."""
        return self.name if self.kind == "junk" else f"{self.kind}, {self.name}"


@dataclass(kw_only=True)
class Trial:
    """What came of it. Groups that were not tried, because too many calls were lost, are empty."""

    rows: Sequence[Row]
    needs_gold: bool  # a column with the expected answer, by its signature
    made_up: Sequence[str] = ()  # columns of another name that it needs, which hold the expected answer too
    chat: bool = True
    singles: list[Tried] = field(default_factory=list)
    later: list[Tried] = field(default_factory=list)  # some of `singles`, at the end
    twice: tuple[Sequence[Value], Sequence[Value]] = ((), ())
    group: Sequence[Tried] = ()
    turned: Sequence[Value] = ()  # the values of `group`, which was given from its last to its first
    copies: Sequence[Value] = ()
    without_gold: Value | None = None  # of a right answer, where None is expected
    of_nothing: Sequence[Tried] = ()  # junk, where "" is expected
    changed: str | None = None  # the argument that it changed
    lost: int = 0
    seconds: list[float] = field(default_factory=list)

    @cached_property
    def numbers(self) -> Mapping[tuple[int, str, str], float]:
        """(row, kind, name) -> number, of the probes that got one alone."""
        return {(t.row, t.kind, t.name): t.value for t in self.singles if isinstance(t.value, float)}

    @cached_property
    def spans(self) -> Mapping[int, tuple[float, float]]:
        """Row -> what its best wrong and its best right answer got, where the function tells them apart: in one form at
        least, and at their best."""
        spans = {}
        for row in range(len(self.rows)):
            wrong = {name: value for (r, kind, name), value in self.numbers.items() if (r, kind) == (row, "wrong")}
            right = {name: value for (r, kind, name), value in self.numbers.items() if (r, kind) == (row, "right")}
            if not any(right[name] > wrong[name] + _SAME for name in right.keys() & wrong.keys()):
                continue
            if max(right.values()) > max(wrong.values()) + _SAME:
                spans[row] = (max(wrong.values()), max(right.values()))
        return spans

    def value(self, row: int, kind: Kind, name: str) -> float | None:
        """The number that a probe got alone; None without one."""
        return self.numbers.get((row, kind, name))


async def try_out(function: RewardFunction, rows: Sequence[Row], *, pool: RewardPool | None = None) -> Trial:
    """Call the function with every probe. Its failures are values; nothing is raised for them."""
    caller = _Caller(function, rows, pool if pool is not None and pool.runs(function) else None)
    await caller.choose_style()
    await caller.try_singles()
    if caller.trial.numbers and caller.trial.lost < LOST:
        await caller.try_groups()
    return caller.trial


class _Caller:
    """Fills a Trial."""

    def __init__(self, function: RewardFunction, rows: Sequence[Row], pool: RewardPool | None):
        needed, known = function.missing(()), {name for row in rows for name in (*row.gold_columns, *row.columns)}
        made_up = [name for name in needed if name not in known]
        needs_gold = any(name in row.gold_columns for row in rows for name in needed)
        self.trial = Trial(rows=rows, needs_gold=needs_gold or bool(made_up), made_up=made_up)
        self._function, self._pool = function, pool

    async def ask(self, texts: Sequence[str], row: Row, *, gold: Any, here: bool = False) -> Sequence[Value]:
        """The values of a group. `here` runs it in this process and looks whether it changes its arguments."""
        columns, size, id = self._columns(texts, row, gold=gold), len(texts), "probe"
        before = copy.deepcopy(columns) if here else {}
        started = time.monotonic()
        if self._pool is None or here:
            answer = await call_here(Call(self._function, columns, size=size, prompt_id=id))
        else:
            answer = await self._pool.call(self._function, columns, size=size, prompt_id=id)
        self.trial.seconds.append(time.monotonic() - started)
        lost = (FailureKind.TIMEOUT, FailureKind.CRASH)
        self.trial.lost += any(isinstance(each, Failure) and each.kind in lost for each in answer.values)
        self.trial.changed = self.trial.changed or next((n for n in before if before[n] != columns[n]), None)
        return answer.values

    async def choose_style(self) -> None:
        """Chat messages, or plain text where the function can read only that."""
        row, text = self.trial.rows[0], probes.answers(self.trial.rows[0].gold)["bare"]
        [as_chat] = await self.ask([text], row, gold=row.gold)
        if isinstance(as_chat, Failure) and not self.trial.lost:
            self.trial.chat = False
            [as_text] = await self.ask([text], row, gold=row.gold)
            self.trial.chat = isinstance(as_text, Failure)

    async def try_singles(self) -> None:
        for index, row in enumerate(self.trial.rows):
            kinds: list[tuple[Kind, dict[str, str]]] = [
                ("right", probes.answers(row.gold)),
                ("wrong", probes.answers(row.wrong)),
                ("junk", probes.junk(row)),
            ]
            for kind, texts in kinds:
                for name, text in texts.items():
                    if self.trial.lost >= LOST:
                        return
                    [value] = await self.ask([text], row, gold=row.gold)
                    self.trial.singles.append(Tried(row=index, kind=kind, name=name, text=text, value=value))

    async def try_groups(self) -> None:
        trial = self.trial
        index = next(each.row for each in trial.singles if isinstance(each.value, float))
        row = trial.rows[index]
        new = list(probes.answers(row.gold, thought="Now in other words, and a little longer than before.").values())
        trial.twice = (await self.ask(new, row, gold=row.gold), await self.ask(new, row, gold=row.gold))
        scored = [each for each in trial.singles if each.row == index and isinstance(each.value, float)]
        if not trial.lost:
            await self.ask([each.text for each in scored], row, gold=row.gold, here=True)
        together = await self.ask([each.text for each in scored], row, gold=row.gold)
        trial.group = [
            Tried(row=index, kind=each.kind, name=each.name, text=each.text, value=value)
            for each, value in zip(scored, together, strict=True)
        ]
        trial.turned = (await self.ask([each.text for each in reversed(scored)], row, gold=row.gold))[::-1]
        trial.copies = await self.ask([scored[0].text] * COPIES, row, gold=row.gold)
        [trial.without_gold] = await self.ask([scored[0].text], row, gold=None)
        nothing = {name: probes.junk(row)[name] for name in NOTHING}
        values = await self.ask(list(nothing.values()), row, gold="")
        trial.of_nothing = [
            Tried(row=index, kind="junk", name=name, text=text, value=value)
            for (name, text), value in zip(nothing.items(), values, strict=True)
        ]
        for each in scored:
            [value] = await self.ask([each.text], row, gold=row.gold)
            trial.later.append(Tried(row=index, kind=each.kind, name=each.name, text=each.text, value=value))

    def _columns(self, texts: Sequence[str], row: Row, *, gold: Any) -> dict[str, list[Any]]:
        """What the function is given for these completions."""
        held = {**row.columns, **dict.fromkeys((*row.gold_columns, *self.trial.made_up), gold)}
        chat = self.trial.chat
        offered = {
            "completions": [[{"role": "assistant", "content": text}] if chat else text for text in texts],
            "prompts": [[{"role": "user", "content": row.prompt}] if chat else row.prompt for _ in texts],
            "completion_ids": [[zlib.crc32(word.encode()) % 50_000 for word in text.split()] for text in texts],
        }
        return self._function.accepted({name: [value] * len(texts) for name, value in held.items()} | offered)
