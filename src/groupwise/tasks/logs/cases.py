"""Exchanges as prompts: those with the same conversation are one, with all answers that were given to it.

Case       a prompt with its context, the answers to it, and what is known of each
cut        exchanges -> cases; with `each` also at every earlier message of the assistant's
continued  exchanges whose messages are what came after another answer, with what came before it
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from groupwise.errors import DataError
from groupwise.tasks.logs.exchange import Bad, Exchange, Outcome
from groupwise.tasks.prompts import to_prompt
from groupwise.types import Message

GOOD = 0.5  # a mean score above it is a good answer


@dataclass
class Answered:
    """Holds a distinct answer to a prompt, with the number of times that a log has it. `scores` are from 0 to 1;
    `model` is the first model that gave the answer; `users` are the users who got the answer and rated it."""

    message: Message
    model: str | None = None
    cut: bool = False
    times: int = 0
    scores: list[float] = field(default_factory=list)
    edited: list[str] = field(default_factory=list)
    users: set[str] = field(default_factory=set)

    @property
    def score(self) -> float | None:
        return fmean(self.scores) if self.scores else None

    @property
    def text(self) -> str:
        content = self.message.get("content")
        return content if isinstance(content, str) else ""


@dataclass
class Case:
    """Holds a prompt of the log, which stands for all equal ones (`key`). `exchanges` are the numbers of its requests,
    `time` is that of the first, `near` are the similar prompts that it stands for."""

    key: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    columns: Mapping[str, Any]
    place: str
    id: str
    time: float | None
    exchanges: list[int] = field(default_factory=list)
    answers: dict[str, Answered] = field(default_factory=dict)
    asked: int = 0
    near: list[Case] = field(default_factory=list)

    @property
    def scores(self) -> list[float]:
        return [score for each in self.answers.values() for score in each.scores]

    @property
    def known(self) -> int:
        """Return how much is known of its answers."""
        return len(self.scores) + sum(len(each.edited) for each in self.answers.values())


def cut(
    exchanges: Sequence[Exchange],
    outcomes: Mapping[int, Sequence[Outcome]],
    *,
    each: bool,
    numbers: Iterable[int] | None = None,
) -> tuple[list[Case], list[Bad]]:
    """Return the prompts of the exchanges, or of those with these `numbers`, in the order in which they first stood in
    the log, and what is none that a run would take."""
    cases: dict[str, Case] = {}
    bad: list[Bad] = []
    for number in range(len(exchanges)) if numbers is None else numbers:
        exchange = exchanges[number]
        for messages, answer, logged in _turns(exchange, each=each):
            key = _key(messages, exchange.tools)
            if key not in cases:
                row = {"prompt": list(messages), "tools": list(exchange.tools)}
                try:
                    to_prompt(row, id=exchange.place)
                except DataError as error:
                    bad.append(Bad(exchange.place, error.message.partition(": ")[2]))
                    continue
                cases[key] = Case(
                    key=key,
                    messages=messages,
                    tools=exchange.tools,
                    columns=exchange.columns,
                    place=exchange.place,
                    id=exchange.ids[0],
                    time=exchange.time,
                )
            case = cases[key]
            case.exchanges.append(number)
            case.asked += logged
            if case.time is None or (exchange.time is not None and exchange.time < case.time):
                case.time = exchange.time
            said = case.answers.setdefault(_key((answer,)), Answered(message=answer))
            said.times += 1
            if logged:
                said.cut = said.cut or exchange.cut
                said.model = said.model or exchange.model
                known = outcomes.get(number, ())
                said.scores += [outcome.value for outcome in known if outcome.value is not None]
                said.users |= {exchange.user} if known and exchange.user is not None else set()
                said.edited += [outcome.edited for outcome in known if outcome.edited is not None]
    return list(cases.values()), bad


def _turns(exchange: Exchange, *, each: bool) -> Iterator[tuple[tuple[Message, ...], Message, bool]]:
    """Yield conversations, the answer to each, and whether it is the one that was logged."""
    if each:
        for at, message in enumerate(exchange.messages):
            if at and message["role"] == "assistant" and exchange.messages[at - 1]["role"] in ("user", "tool"):
                yield exchange.messages[:at], message, False
    yield exchange.messages, exchange.answer, True


def continued(exchanges: Sequence[Exchange]) -> tuple[list[Exchange], list[Bad]]:
    """Return the exchanges with the whole conversation that the model saw, without those that go on from an answer that
    is not in the log."""
    by_id = {id: each for each in exchanges for id in each.ids}
    whole: dict[str, tuple[Message, ...] | None] = {}

    def before(exchange: Exchange) -> tuple[Message, ...] | None:
        chain: list[Exchange] = []
        at: Exchange | None = exchange
        while at is not None and at.ids[0] not in whole and at not in chain[:1]:
            chain.append(at)
            if at.after is None or len(chain) > len(exchanges):
                break
            at = by_id.get(at.after)
        for link in reversed(chain):
            if link.after is None:
                whole[link.ids[0]] = link.messages
                continue
            earlier = by_id.get(link.after)
            said = None if earlier is None else whole.get(earlier.ids[0])
            instructions = link.messages[:1] if link.messages[0]["role"] == "system" else ()
            if earlier is None or said is None:
                whole[link.ids[0]] = None
                continue
            said = said[1:] if said[0]["role"] == "system" else said  # instructions are not taken over
            whole[link.ids[0]] = (*instructions, *said, earlier.answer, *link.messages[len(instructions) :])
        return whole[exchange.ids[0]]

    found, bad = list[Exchange](), list[Bad]()
    for each in exchanges:
        messages = before(each) if each.after is not None else each.messages
        if messages is None:
            bad.append(Bad(each.place, f"the request continues the response {each.after}, which is not in the logs"))
        else:
            found.append(replace(each, messages=messages))
    return found, bad


def ways_on(exchanges: Sequence[Exchange]) -> Iterator[tuple[int, int]]:
    """Yield each exchange that continues from an answer, which it repeats with all that came before, and the one that
    gave it; of several that said the same, the last before it. Where a conversation's id is known, that is enough."""
    said: dict[str, list[int]] = defaultdict(list)
    order = sorted(range(len(exchanges)), key=lambda number: exchanges[number].time or 0.0)
    place = {number: at for at, number in enumerate(order)}
    for number in order:
        said[_key((*exchanges[number].messages, exchanges[number].answer))].append(number)
    for number, each in enumerate(exchanges):
        if each.conversation is not None:
            continue
        for at in range(len(each.messages) - 1, 0, -1):
            if each.messages[at]["role"] != "assistant" or not (same := said.get(_key(each.messages[: at + 1]))):
                continue
            own = [other for other in same if other != number and exchanges[other].user in (each.user, None)]
            if own:
                yield number, max(own, key=lambda other: (place[other] < place[number], place[other]))
                break


def _key(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return what is equal for equal conversations; the ids of tool calls, which are drawn, count by their order."""
    ids: dict[str, int] = {}
    said: list[Any] = []
    for message in messages:
        calls = [
            (ids.setdefault(str(call.get("id")), len(ids)), call.get("function"))
            for call in message.get("tool_calls") or ()
        ]
        of = message.get("tool_call_id")
        result = None if of is None else ids.setdefault(of, len(ids))
        said.append((message["role"], message.get("content") or "", calls, result, message.get("name")))
    written = json.dumps([said, list(tools)], sort_keys=True).encode()
    return hashlib.blake2b(written, digest_size=16).hexdigest()
