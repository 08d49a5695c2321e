"""Reads what vLLM answers to /v1/completions: the ids of the tokens and their log-probabilities, and no more of it.

Of 80 bytes a token two numbers are read. vLLM also says each token as text, where it stands, and again with its
log-probability; `json.loads` makes objects of all of that (1.6 microseconds a token). What is read here is said
beforehand, so that objects are made of nothing else: 0.3 microseconds by pydantic, which is always there, and 0.15 by
msgspec where it is installed (`pip install "groupwise[fast]"`). The numbers are the same, to the last bit.

vLLM's /inference/v1/generate has two objects for each token, 141 bytes, which take two to eight times as long to read
by any of these: so it is asked only for prompts with images (`images`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One completion as vLLM sampled it, or (`finish_reason` None) the next tokens of one.

    `logprobs` (nats) are of the tempered distribution, and of what top_k, top_p and min_p leave of it
    (`processed_logprobs`); `tops[t]` the likeliest (id, log-probability) at t, as many as were asked for.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str | None
    tops: tuple[tuple[tuple[int, float], ...], ...] = ()

    @property
    def is_whole(self) -> bool:
        """Return whether there is a token, and a log-probability for each; -inf and nan are none."""
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


@dataclass(frozen=True)
class _Choice(Generic[L]):
    index: int
    token_ids: tuple[int, ...]
    logprobs: L | None = None
    finish_reason: str | None = None


@dataclass(frozen=True)
class _Answer(Generic[L]):
    choices: list[_Choice[L]]


def read_answer(said: bytes | str, *, top: int) -> list[Sampled]:
    """Return the completions of an answer, or of an event of a stream, in order; `top` alternatives of each token were
    asked for. Raises ValueError for what has no token ids or, with tokens, no log-probabilities."""
    return [_sampled(choice, top) for choice in sorted(_reader(top > 0)(said).choices, key=lambda each: each.index)]


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


@cache
def _reader(tops: bool) -> Callable[[bytes | str], _Answer[Any]]:
    """Return what reads an answer; raises ValueError for what is none."""
    wanted = _Answer[_Logprobs] if tops else _Answer[_LogprobsAlone]
    try:
        import msgspec  # pyright: ignore[reportMissingImports]
    except ImportError:
        return partial(TypeAdapter(wanted).validate_json, strict=True)
    decode = msgspec.json.Decoder(wanted).decode

    def read(said: bytes | str) -> _Answer[Any]:
        try:
            return decode(said)
        except msgspec.DecodeError as error:
            raise ValueError(str(error)) from None

    return read
