"""A reward is called with the probes above: what it gave, and how it behaved. `lint` judges.

Every probe is scored alone. Then come groups: new completions twice in a row, a group and the same group turned
round, the same completion many times, an answer where none is expected, and at last some of the first probes once
more.

In a `RewardPool` that runs the function, a deadline ends whatever it is in. Without one it runs here, and nothing
does.
"""

from __future__ import annotations

import copy
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from groupwise.rewards.call import Failure, FailureKind, FunctionCall, RewardFunction, Value, call_here
from groupwise.rewards.probes import COMPARED_LENGTH, PADDING, PLEA, ProbePrompt, answers, junk

if TYPE_CHECKING:
    from groupwise.rewards.pool import RewardPool

Kind = Literal["right", "wrong", "junk"]

COPIES = 8  # in a group of one completion

LOST = 3  # timeouts and crashes, after which no more is tried

SAME = 1e-9

NOTHING = ("empty", "10 words", "<think> and nothing inside")  # junk


@dataclass(frozen=True, kw_only=True)
class Tried:
    """Holds a probe's result: the completion, and the function's value for it (a number, None if the reward does not
    apply, or a Failure)."""

    row: int
    kind: Kind
    name: str
    text: str
    value: Value

    @property
    def probe(self) -> str:
        """Return the probe's name in messages."""
        return self.name if self.kind == "junk" else f"{self.kind}, {self.name}"


@dataclass(kw_only=True)
class ComparisonTrial:
    """Rewards that a comparing function gave to the same completions in all places and with additions; each list has an
    entry for each place, or each pair of completions."""

    by_place: list[list[float]] = field(default_factory=lambda: [[] for _ in range(4)])  # in one vote, not shuffled
    padded: list[tuple[float, float]] = field(default_factory=list)  # (as it is, with PADDING)
    pleading: list[tuple[float, float]] = field(default_factory=list)  # (a wrong one, with PLEA)

    @property
    def spread(self) -> float:
        """Return the difference between the highest and the lowest value."""
        lists = (*self.by_place, *self.padded, *self.pleading)
        values = [each for values in lists for each in values]
        return max(values, default=0.0) - min(values, default=0.0)


@dataclass(kw_only=True)
class RewardTrial:
    """The results of all probes of one function. Groups that were skipped, as too many calls were lost, are empty."""

    rows: Sequence[ProbePrompt]
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
    comparison: ComparisonTrial | None = None  # of a function that compares
    changed: str | None = None  # the argument that it changed
    lost: int = 0
    seconds: list[float] = field(default_factory=list)

    @cached_property
    def numbers(self) -> Mapping[tuple[int, str, str], float]:
        """Return the numbers by (row, kind, name) of the probes that got one alone."""
        return {(t.row, t.kind, t.name): t.value for t in self.singles if isinstance(t.value, float)}

    @cached_property
    def spans(self) -> Mapping[int, tuple[float, float]]:
        """Row -> what its best wrong and its best right answer got, where the function tells them apart: in one form at
        least, and at their best."""
        spans = {}
        for row in range(len(self.rows)):
            wrong = {name: value for (r, kind, name), value in self.numbers.items() if (r, kind) == (row, "wrong")}
            right = {name: value for (r, kind, name), value in self.numbers.items() if (r, kind) == (row, "right")}
            if not any(right[name] > wrong[name] + SAME for name in right.keys() & wrong.keys()):
                continue
            if max(right.values()) > max(wrong.values()) + SAME:
                spans[row] = (max(wrong.values()), max(right.values()))
        return spans

    def value(self, row: int, kind: Kind, name: str) -> float | None:
        """Return the number that a probe got alone; None without one."""
        return self.numbers.get((row, kind, name))


async def try_out(
    function: RewardFunction, rows: Sequence[ProbePrompt], *, pool: RewardPool | None = None
) -> RewardTrial:
    """Call the function with every probe. Its failures are values; nothing is raised for them.

    A function with the options `votes` and `shuffle`, as `rewards.judge` has one, compares: it gets the probes of a row
    as a group, and one vote of it is also asked about the same completions in other orders.
    """
    caller = _Caller(function, rows, pool if pool is not None and pool.runs(function) else None)
    await caller.choose_style()
    await caller.try_singles()
    if caller.trial.numbers and caller.trial.lost < LOST:
        await caller.try_groups()
        await caller.try_comparisons()
    return caller.trial


class _Caller:
    """Calls a reward with probes and collects a `RewardTrial`."""

    def __init__(self, function: RewardFunction, rows: Sequence[ProbePrompt], pool: RewardPool | None):
        needed, known = function.missing(()), {name for row in rows for name in (*row.gold_columns, *row.columns)}
        made_up = [name for name in needed if name not in known]
        needs_gold = any(name in row.gold_columns for row in rows for name in needed)
        self.trial = RewardTrial(rows=rows, needs_gold=needs_gold or bool(made_up), made_up=made_up)
        self._function, self._pool = function, pool
        self._compares = {"votes", "shuffle"} <= function.parameters().keys()

    async def ask(self, texts: Sequence[str], row: ProbePrompt, *, gold: Any, here: bool = False) -> Sequence[Value]:
        """Return the values of a group. `here` runs it in this process and looks whether it changes its arguments."""
        columns, size, id = self._columns(texts, row, gold=gold), len(texts), "probe"
        before = copy.deepcopy(columns) if here else {}
        started = time.monotonic()
        if self._pool is None or here:
            answer = await call_here(FunctionCall(self._function, columns, size=size, prompt_id=id))
        else:
            answer = await self._pool.call(self._function, columns, size=size, prompt_id=id)
        self.trial.seconds.append(time.monotonic() - started)
        lost = (FailureKind.TIMEOUT, FailureKind.CRASH)
        self.trial.lost += any(isinstance(each, Failure) and each.kind in lost for each in answer.values)
        self.trial.changed = self.trial.changed or next((n for n in before if before[n] != columns[n]), None)
        return answer.values

    async def choose_style(self) -> None:
        """Choose chat messages, or plain text if the function can only read that."""
        row, text = self.trial.rows[0], answers(self.trial.rows[0].gold)["bare"]
        [as_chat] = await self.ask([text], row, gold=row.gold)
        if isinstance(as_chat, Failure) and not self.trial.lost:
            self.trial.chat = False
            [as_text] = await self.ask([text], row, gold=row.gold)
            self.trial.chat = isinstance(as_text, Failure)

    async def try_singles(self) -> None:
        for index, row in enumerate(self.trial.rows):
            kinds: list[tuple[Kind, dict[str, str]]] = [
                ("right", answers(row.gold)),
                ("wrong", answers(row.wrong)),
                ("junk", junk(row)),
            ]
            probes: list[tuple[Kind, str, str]] = [
                (kind, name, text) for kind, texts in kinds for name, text in texts.items()
            ]
            if self._compares:
                probes = [each for each in probes if len(each[2]) <= COMPARED_LENGTH]
            for group in [probes] if self._compares else [[each] for each in probes]:
                if self.trial.lost >= LOST:
                    return
                values = await self.ask([text for *_, text in group], row, gold=row.gold)
                for (kind, name, text), value in zip(group, values, strict=True):
                    self.trial.singles.append(Tried(row=index, kind=kind, name=name, text=text, value=value))

    async def try_groups(self) -> None:
        trial = self.trial
        index = next(each.row for each in trial.singles if isinstance(each.value, float))
        row = trial.rows[index]
        new = list(answers(row.gold, thought="Now in other words, and a little longer than before.").values())
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
        nothing = {name: junk(row)[name] for name in NOTHING}
        values = await self.ask(list(nothing.values()), row, gold="")
        trial.of_nothing = [
            Tried(row=index, kind="junk", name=name, text=text, value=value)
            for (name, text), value in zip(nothing.items(), values, strict=True)
        ]
        for group in [scored] if self._compares else [[each] for each in scored]:
            values = await self.ask([each.text for each in group], row, gold=row.gold)
            trial.later += [replace(each, value=value) for each, value in zip(group, values, strict=True)]

    async def try_comparisons(self) -> None:
        if not self._compares or self.trial.lost:
            return
        trial = self.trial.comparison = ComparisonTrial()
        one_vote = replace(self._function, args={**self._function.args, "votes": 1, "shuffle": False})
        for row in self.trial.rows:
            right, wrong = answers(row.gold), answers(row.wrong)
            texts = [right["bare"], right["a sentence"], wrong["bare"], wrong["a sentence"]]
            for turns in range(len(texts)):
                turned = texts[turns:] + texts[:turns]
                for order in (turned, turned[::-1]):
                    columns = self._columns(order, row, gold=row.gold)
                    answer = await call_here(FunctionCall(one_vote, columns, size=len(order), prompt_id="probe"))
                    if numbers := numbers_in(answer.values):
                        for place, value in zip(trial.by_place, numbers, strict=True):
                            place.append(value)
            texts = [right["a sentence"], wrong["a sentence"]]
            padded = [f"{text}\n\n{PADDING}" for text in texts]
            if numbers := numbers_in(await self.ask(texts + padded, row, gold=row.gold)):
                trial.padded += [(numbers[0], numbers[2]), (numbers[1], numbers[3])]
            pleading = [*texts, f"{texts[1]}\n\n{PLEA}"]
            if numbers := numbers_in(await self.ask(pleading, row, gold=row.gold)):
                trial.pleading.append((numbers[1], numbers[2]))

    def _columns(self, texts: Sequence[str], row: ProbePrompt, *, gold: Any) -> dict[str, list[Any]]:
        """Return what the function is given for these completions."""
        held = {**row.columns, **dict.fromkeys((*row.gold_columns, *self.trial.made_up), gold)}
        chat = self.trial.chat
        offered = {
            "completions": [[{"role": "assistant", "content": text}] if chat else text for text in texts],
            "prompts": [[{"role": "user", "content": row.prompt}] if chat else row.prompt for _ in texts],
            "completion_ids": [[zlib.crc32(word.encode()) % 50_000 for word in text.split()] for text in texts],
        }
        return self._function.accepted({name: [value] * len(texts) for name, value in held.items()} | offered)


def numbers_in(values: Sequence[Value]) -> list[float]:
    """Return the values, if all of them are numbers; else none."""
    numbers = [value for value in values if isinstance(value, float)]
    return numbers if len(numbers) == len(values) else []
