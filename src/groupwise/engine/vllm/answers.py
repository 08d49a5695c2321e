"""Reads what vLLM answers to /v1/completions: the ids of the tokens and their log-probabilities, and no more of it.

Of 80 bytes a token two numbers are read. vLLM also says each token as text, where it stands, and again with its
log-probability; `json.loads` makes objects of all of that (1.6 microseconds a token). So the two lists are looked for
in the bytes and read alone (0.15): `_listed`. An answer that is not laid out as vLLM 0.32's are, an event of a stream,
and what has alternatives are read whole, by a type that says what objects are to be made of (0.3). The numbers are the
same, to the last bit. Lists that were looked for keep the text that they were read from, for the rollouts file.

vLLM's /inference/v1/generate has two objects for each token, 141 bytes, which take two to eight times as long to read:
so it is asked only for prompts with images (`images`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter

from groupwise.store.number_texts import NumbersRead


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Holds a completion as vLLM sampled it, or (`finish_reason` None) the next tokens of one.

    `logprobs` (nats) are those of the tempered distribution, restricted to the tokens that top_k, top_p and min_p leave
    (`processed_logprobs`); `tops[t]` has the likeliest (id, log-probability) at t, as many as the request asked for.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str | None
    tops: tuple[tuple[tuple[int, float], ...], ...] = ()

    @property
    def is_whole(self) -> bool:
        """Return whether there is at least one token, and a finite log-probability for each token."""
        try:
            return len(self.token_ids) == len(self.logprobs) > 0 and math.isfinite(sum(self.logprobs))
        except TypeError:  # null
            return False


@dataclass(frozen=True)
class _Logprobs:
    token_logprobs: tuple[float | None, ...]
    top_logprobs: tuple[dict[str, float] | None, ...] | None = None


@dataclass(frozen=True)
class _LogprobsAlone:
    token_logprobs: tuple[float | None, ...]


L = TypeVar("L", _Logprobs, _LogprobsAlone)
T = TypeVar("T", int, float)


@dataclass(frozen=True)
class _Choice(Generic[L]):
    index: int
    token_ids: tuple[int, ...]
    logprobs: L | None = None
    finish_reason: str | None = None


@dataclass(frozen=True)
class _Answer(Generic[L]):
    choices: list[_Choice[L]]


_INTS, _FLOATS = TypeAdapter(tuple[int, ...]), TypeAdapter(tuple[float, ...])
_BEGINS = re.compile(rb'\{"index":\d+,"text":"')
_LOGPROBS, _REASON, _IDS = b'"token_logprobs":[', b'"finish_reason":"', b'"token_ids":['
_WHOLE, _WITH_TOPS = TypeAdapter(_Answer[_LogprobsAlone]), TypeAdapter(_Answer[_Logprobs])


def read_answer(said: bytes | str, *, top: int) -> list[Sampled]:
    """Return the completions of an answer, or of an event of a stream, in order; `top` alternatives of each token were
    asked for. Raises ValueError for what has no token ids or, with tokens, no log-probabilities."""
    if isinstance(said, bytes) and top == 0 and (found := _listed(said)) is not None:
        return found
    answer = (_WITH_TOPS if top else _WHOLE).validate_json(said, strict=True)
    return [_sampled(choice, top) for choice in sorted(answer.choices, key=lambda each: each.index)]


def _listed(said: bytes) -> list[Sampled] | None:
    """Return the completions of an answer whose choices have all that is read here, in vLLM's order; None of another.

    What is looked for is a key and how its value begins, in a choice, from the end where that is nearer. In a text a
    quotation mark follows a backslash, and keys that are texts (of `top_logprobs`) have numbers: so nothing that was
    sampled is taken for one.
    """
    found, at = list[Sampled](), _choice_from(said, 0)
    while at < len(said):
        if not said.startswith(b'{"index":%d,' % len(found), at):
            return None
        end = _choice_from(said, at + 1)
        logprobs, ids = said.find(_LOGPROBS, at, end), said.rfind(_IDS, at, end)
        reason = said.rfind(_REASON, at, max(at, ids))
        if not 0 <= logprobs < reason < ids:
            return None
        logprobs, ids, reason = logprobs + len(_LOGPROBS), ids + len(_IDS), reason + len(_REASON)
        try:
            read = _numbers(_INTS, said[ids - 1 : said.find(b"]", ids) + 1])
            told = _numbers(_FLOATS, said[logprobs - 1 : said.find(b"]", logprobs) + 1])
        except ValueError:  # null for a number: read whole, it says what is wrong and where
            return None
        why = said[reason : said.find(b'"', reason)].decode()
        found.append(Sampled(token_ids=read, logprobs=told, finish_reason=why))
        at = end
    return found or None


def _choice_from(said: bytes, at: int) -> int:
    """Return where the next choice begins, or the end."""
    while (at := said.find(b'{"index":', at)) >= 0:
        if _BEGINS.match(said, at):
            return at
        at += 1
    return len(said)


def _numbers(of: TypeAdapter[tuple[T, ...]], json: bytes) -> tuple[T, ...]:
    return NumbersRead.of(of.validate_json(json, strict=True), json)


def _sampled(choice: _Choice[Any], top: int) -> Sampled:
    ids, told = choice.token_ids, choice.logprobs
    if ids and told is None:
        raise ValueError(f"choice {choice.index} has {len(ids)} tokens and no log-probabilities")
    logprobs = told.token_logprobs if told is not None and ids else ()
    tops = tuple(_named(top, each) for each in told.top_logprobs or ()) if told is not None and top else ()
    return Sampled(token_ids=ids, logprobs=logprobs, finish_reason=choice.finish_reason, tops=tops)


def likeliest(alternatives: Iterable[tuple[int, float]], top: int) -> tuple[tuple[int, float], ...]:
    """Return the first `top` of (id, log-probability) pairs, likeliest first; vLLM adds the sampled token to them."""
    return tuple(sorted(alternatives, key=lambda pair: -pair[1])[:top])


def _named(top: int, alternatives: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    """Return the pairs of {"token_id:12": -0.5, ...}."""
    return likeliest(((int(name.removeprefix("token_id:")), at) for name, at in alternatives.items()), top)
