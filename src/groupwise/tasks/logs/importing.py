"""Logs -> prompts to learn from: read, mask, join outcomes, cut, join what is alike, split, write.

    train.jsonl, heldout.jsonl                   prompts, for `kind: grpo`
    train_examples.jsonl, heldout_examples.jsonl good and edited answers, for `kind: sft`, where there are any
    train_pairs.jsonl, heldout_pairs.jsonl       better and worse answers, for `kind: dpo`, where there are any
    train_scored.jsonl, heldout_scored.jsonl     all answers with a score, for a judge to be compared with
    report.json, report.md                       what is there, what was masked and left out, what can be learned

The logs are only read. Everything is masked before it is compared, so that two prompts that differ in an address are
the same.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from groupwise.errors import ConfigError, DataError, StorageError
from groupwise.store import files
from groupwise.store.masking import ENVIRONMENT, Masking
from groupwise.tasks.logs.cases import GOOD, Case, continued, cut, ways_on
from groupwise.tasks.logs.exchange import Belongs, Exchange, Outcome, well_formed
from groupwise.tasks.logs.learnable import Row, example_rows, pair_rows, prompt_rows, rules, scored_rows
from groupwise.tasks.logs.near import alike_ones
from groupwise.tasks.logs.outcomes import Joined, joined, read_outcomes
from groupwise.tasks.logs.read import Logs, read_logs
from groupwise.tasks.logs.report import as_markdown, judged
from groupwise.tasks.logs.split import Together, by_lot, held_out
from groupwise.types import Message

SHOWN = 3  # places of a reason
MOST_MODELS = 10
TURNS = ("last", "each")


@dataclass(frozen=True, kw_only=True)
class ImportConfig:
    """Options of an import of logs.

    Args:
        turns: `last`: a prompt is the conversation before the answer of each request; `each`: also before every earlier
            message of the assistant's in it, for logs that have a conversation only once.
        heldout: the share of the prompts that is held out, from 0 to 1.
        alike: prompts that share so much, from 0 to 1, are the same (`near`); 1 joins only what has the same words.
        outcomes: a file of outcomes.
    """

    turns: str = "last"
    heldout: float = 0.2
    alike: float = 0.8
    outcomes: Path | None = None

    def __post_init__(self) -> None:
        if self.turns not in TURNS:
            raise ConfigError(f"--turns is {self.turns!r}; it must be last or each", field="--turns")
        if not 0 <= self.heldout < 1:
            message = f"--heldout is {self.heldout:g}; it must be a share of the prompts, from 0 to below 1"
            raise ConfigError(message, field="--heldout")
        if not 0 < self.alike <= 1:
            raise ConfigError(f"--alike is {self.alike:g}; it must be above 0, and 1 at most", field="--alike")


@dataclass(frozen=True, kw_only=True)
class Imported:
    """The prompts of both sides, and the report as JSON has it."""

    train: Sequence[Case]
    heldout: Sequence[Case]
    report: Mapping[str, Any]


def import_logs(sources: Sequence[Path], config: ImportConfig, *, masking: Masking) -> Imported:
    """Return the import of logs. Raises DataError if a source or the outcomes cannot be read, or no row is usable."""
    logs = read_logs(sources)
    outcomes = [*logs.outcomes, *(read_outcomes(config.outcomes) if config.outcomes is not None else ())]
    logs.exchanges, twice = _once(logs.exchanges)
    mask = _Masked(masking)
    exchanges = [mask.exchange(each) for each in _belonging(logs.exchanges, logs.belongs)]
    exchanges, lost = continued(exchanges)
    logs.bad += lost
    known = joined(exchanges, [mask.outcome(each) for each in outcomes])
    cases, unfit = cut(exchanges, known.of, each=config.turns == "each")
    logs.bad += unfit
    if not cases:
        first = unfit[0] if unfit else lost[0]
        raise DataError(f"no request can be used; {first.place}: {first.reason}", field="SOURCE", kind="unusable")
    train, heldout, split = _split(exchanges, known, cases, config)
    for each in (*train, *heldout):
        each.id = masking.text(each.id)
    report = {
        "read": _read(logs, exchanges, sources, twice=twice, masking=masking),
        "masked": _masked(masking),
        "outcomes": _outcomes(exchanges, known, outcomes, cases),
        "prompts": {"distinct": len(cases), "asked": sum(each.asked for each in cases)} | split,
        "learn": _learn(train, heldout),
    }
    return Imported(train=train, heldout=heldout, report=report | {"says": judged(report)})


def write(imported: Imported, folder: Path) -> list[str]:
    """Write the files into a folder that must not be there, or be empty; return their names. What people asked is for
    the eyes of this user alone. Raises ConfigError, StorageError."""
    check_free(folder)
    written: dict[str, str] = {}
    for side, cases in (("train", imported.train), ("heldout", imported.heldout)):
        for suffix, rows in (
            ("", prompt_rows),
            ("_examples", example_rows),
            ("_pairs", pair_rows),
            ("_scored", scored_rows),
        ):
            if text := _jsonl(rows(cases)):
                written[f"{side}{suffix}.jsonl"] = text
    written["report.json"] = json.dumps(imported.report, indent=1, ensure_ascii=False) + "\n"
    written["report.md"] = as_markdown(imported.report)
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in written.items():
            files.write_new(folder / name, well_formed(text), mode=0o600)
    except OSError as error:
        if made:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, StorageError):
            raise
        raise StorageError.of(error, f"cannot write {folder}: {error.strerror or error}") from error
    return list(written)


def check_free(folder: Path) -> None:
    """Raise ConfigError if there is something in the folder already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        hint = "name another folder, or remove it first"
        raise ConfigError(f"{folder} exists already, and is not empty", hint=hint, field="--to", kind="exists")


def _jsonl(rows: Iterable[Row]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


# ---- what was read ----
def _once(exchanges: Sequence[Exchange]) -> tuple[list[Exchange], int]:
    """Return the exchanges without those that were logged before, under the same id, and how many these are. What is
    said of either is said of the one that stays."""
    seen: dict[tuple[str, str], Exchange] = {}
    for each in exchanges:
        first = seen.setdefault(key := (each.ids[0], json.dumps([each.messages, each.answer])), each)
        if first is not each:
            seen[key] = replace(first, ids=tuple(dict.fromkeys((*first.ids, *each.ids, each.place))))
    return list(seen.values()), len(exchanges) - len(seen)


def _belonging(exchanges: Sequence[Exchange], belongs: Iterable[Belongs]) -> list[Exchange]:
    """Return the exchanges with the user and the conversation that their traces have."""
    of = {each.id: each for each in belongs}
    found: list[Exchange] = []
    for each in exchanges:
        known = of.get(each.trace or "")
        if known is not None:
            user, conversation = each.user or known.user, each.conversation or known.conversation
            each = replace(each, user=user, conversation=conversation)
        found.append(each)
    return found


class _Masked:
    """Masks exchanges, each text once: a conversation is repeated in all of its requests."""

    def __init__(self, masking: Masking):
        self._masking, self._known = masking, dict[str, str]()

    def exchange(self, exchange: Exchange) -> Exchange:
        return replace(
            exchange,
            messages=tuple(map(self._message, exchange.messages)),
            answer=self._message(exchange.answer),
            tools=tuple(self._value(tool) for tool in exchange.tools),
            columns=self._value(exchange.columns),
        )

    def outcome(self, outcome: Outcome) -> Outcome:
        return outcome if outcome.edited is None else replace(outcome, edited=self._text(outcome.edited))

    def _message(self, message: Message) -> Message:
        masked = self._value({name: value for name, value in message.items() if name != "tool_calls"})
        if calls := message.get("tool_calls"):
            masked["tool_calls"] = [{**call, "function": self._called(call["function"])} for call in calls]
        return masked

    def _called(self, function: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call's name and arguments; those that are JSON stay so, with a number masked as a text."""
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                given = json.loads(arguments)
            except ValueError:
                return {**function, "arguments": self._text(arguments)}
            masked = self._value(given)
            return {**function, "arguments": arguments if masked == given else json.dumps(masked, ensure_ascii=False)}
        return {**function, "arguments": self._value(arguments)}

    def _value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping):
            return {self._text(key) if isinstance(key, str) else key: self._value(each) for key, each in value.items()}
        return [self._value(each) for each in value] if isinstance(value, list | tuple) else self._masking.value(value)

    def _text(self, text: str) -> str:
        if text not in self._known:
            self._known[text] = self._masking.text(text)
        return self._known[text]


# ---- the two sides ----
def _split(
    exchanges: Sequence[Exchange], known: Joined, cases: Sequence[Case], config: ImportConfig
) -> tuple[list[Case], list[Case], dict[str, Any]]:
    together = Together(len(exchanges))
    for name in ("user", "conversation", "trace"):
        values = ((number, getattr(each, name)) for number, each in enumerate(exchanges))
        together.join_all((number, value) for number, value in values if value is not None)
    for number, before in ways_on(exchanges):
        together.join(number, before)
    groups = together.groups()
    chosen = held_out(groups, [each.time for each in exchanges], share=config.heldout)
    out = {number for group in chosen for number in groups[group]}
    _, alike = alike_ones([each.messages for each in cases], alike=config.alike)
    sides: dict[str, bool | None] = {}  # a prompt -> whether it is held out
    both = 0
    for cluster in alike.groups():
        members = [cases[number] for number in cluster]
        asked_by = {number in out for each in members for number in each.exchanges}
        both += len(asked_by) == 2
        side = asked_by.pop() if len(asked_by) == 1 else by_lot((each.key for each in members), share=config.heldout)
        sides |= {each.key: side for each in members}
    found: list[list[Case]] = []
    near = 0
    for side in (False, True):
        numbers = [number for number in range(len(exchanges)) if (number in out) is side]
        own, _ = cut(exchanges, known.of, each=config.turns == "each", numbers=numbers)
        own = sorted((case for case in own if sides.get(case.key) is side), key=lambda case: -case.known)
        like, _ = alike_ones([case.messages for case in own], alike=config.alike)
        for number, other in like.items():
            own[other].asked += own[number].asked
            own[other].near.append(own[number])
        near += len(like)
        kept = [case for number, case in enumerate(own) if number not in like]
        found.append(sorted(kept, key=lambda case: (case.time or 0.0, case.exchanges)))
    train, heldout = found
    begins = min((case.time for case in heldout if case.time is not None), default=None)
    later = sum(1 for case in train if begins is not None and case.time is not None and case.time > begins)
    biggest = max(groups, key=len)
    return (
        train,
        heldout,
        {
            "near_duplicates": near,
            "asked_by_both_sides": both,
            "groups": len(groups),
            "largest_group": len(biggest) / len(exchanges),
            "train": len(train),
            "heldout": len(heldout),
            "heldout_since": None if begins is None else _utc(begins),
            "train_later_than_heldout": later,
        },
    )


# ---- the report ----
def _read(
    logs: Logs, exchanges: Sequence[Exchange], sources: Sequence[Path], *, twice: int, masking: Masking
) -> dict[str, Any]:
    reasons: dict[str, list[str]] = defaultdict(list)
    for bad in logs.bad:  # which may repeat what stands there
        reasons[masking.text(bad.reason)].append(bad.place)
    times = [each.time for each in exchanges if each.time is not None]
    models = Counter(each.model for each in exchanges if each.model is not None)
    return {
        "sources": [str(each) for each in sources],
        "files": logs.files,
        "rows": logs.rows,
        "formats": dict(logs.formats),
        "exchanges": len(exchanges),
        "logged_twice": twice,
        "bad": len(logs.bad),
        "reasons": [
            {"reason": reason, "count": len(places), "places": places[:SHOWN]}
            for reason, places in sorted(reasons.items(), key=lambda item: -len(item[1]))
        ],
        "first": _utc(min(times)) if times else None,
        "last": _utc(max(times)) if times else None,
        "without_time": len(exchanges) - len(times),
        "users": len({each.user for each in exchanges} - {None}),
        "conversations": len({each.conversation for each in exchanges} - {None}),
        "several_turns": sum(any(message["role"] == "assistant" for message in each.messages) for each in exchanges),
        "with_tools": sum(bool(each.tools) for each in exchanges),
        "cut_off": sum(each.cut for each in exchanges),
        "models": dict(models.most_common(MOST_MODELS)),
    }


def _masked(masking: Masking) -> list[dict[str, Any]]:
    rules = [(ENVIRONMENT, "values of environment variables that are named as secrets")]
    rules += [(rule.name, rule.says) for rule in masking.rules]
    return [{"rule": name, "says": says, "count": masking.counts[name]} for name, says in rules]


def _outcomes(
    exchanges: Sequence[Exchange], known: Joined, outcomes: Sequence[Outcome], cases: Sequence[Case]
) -> dict[str, Any]:
    values: dict[str, list[float]] = defaultdict(list)
    edited = 0
    for each in (outcome for found in known.of.values() for outcome in found):
        edited += each.edited is not None
        if each.value is not None:
            values[each.name].append(each.value)
    return {
        "read": len(outcomes),
        "unmatched": known.unmatched,
        "answers": len(known.of),
        "answers_without": len(exchanges) - len(known.of),
        "names": {name: {"count": len(found), "mean": sum(found) / len(found)} for name, found in values.items()},
        **_raters(exchanges, known, cases),
        "edited": edited,
        "no_scale": {name: list(ends) for name, ends in known.unscaled.items()},
        "prompts": sum(bool(each.known) for each in cases),
    }


def _raters(exchanges: Sequence[Exchange], known: Joined, cases: Sequence[Case]) -> dict[str, Any]:
    """Return who stands behind the outcomes, as far as users are known, and whether they are of one mind."""
    users = Counter(exchanges[number].user for number, found in known.of.items() for _ in found)
    del users[None]
    several = [each.scores for case in cases for each in case.answers.values() if len(each.scores) > 1]
    return {
        "raters": len(users),
        "largest_rater": max(users.values(), default=0) / max(1, users.total()),
        "scored_again": len(several),
        "contradicted": sum(min(each) <= GOOD < max(each) for each in several),
    }


def _learn(train: Sequence[Case], heldout: Sequence[Case]) -> dict[str, Any]:
    def count(rows: Iterable[Row]) -> int:
        return sum(1 for _ in rows)

    scored = [score for case in train for each in case.answers.values() if (score := each.score) is not None]
    return {
        "prompts": {"train": len(train), "heldout": len(heldout)},
        "examples": {"train": count(example_rows(train)), "heldout": count(example_rows(heldout))},
        "pairs": {"train": count(pair_rows(train)), "heldout": count(pair_rows(heldout))},
        "rules": [rule._asdict() for rule in rules(train)],
        "scored": {"good": sum(each > GOOD for each in scored), "bad": sum(each <= GOOD for each in scored)},
    }


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
