"""A prompt and a rollout as the report shows them: texts of bounded length, and a completion cut into its tokens.

They are made from the lines of a run's rollouts as they are, so that one damaged field costs no more than it must.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer

from groupwise.report.tokens import token_texts

MAX_CHARS = 4000  # of a prompt, a completion without tokens, or an error
_MAX_COLUMN_CHARS = 300
_HEAD = 0.7  # of what is shown of a long completion


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A token, or what stands between: its text, log-probability when it was sampled, and how far the trainer's log-
    probability is from that (nats; None where it was not recorded). `kind` is sampled, end (sampled, and no part of the
    text: it closed the turn), given (the policy did not write it) or cut (tokens are left out here)."""

    text: str
    logprob: float | None = None
    gap: float | None = None
    kind: str = "sampled"

    @property
    def probability(self) -> float | None:
        return None if self.logprob is None else math.exp(min(self.logprob, 0.0))


@dataclass(frozen=True, kw_only=True)
class ShownCompletion:
    """One rollout. `by_token` is False where its tokens' texts are not known and `pieces` are whole turns."""

    reward: float | None
    rewards: Mapping[str, float | None]
    advantage: float | None
    finish_reason: str
    version: str
    tokens: int
    mean_logprob: float | None
    pieces: tuple[Piece, ...]
    by_token: bool
    error: str | None

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


def messages(prompt: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(role, text) of each message; of a plain prompt, one."""
    if prompt["messages"] is None:
        yield "prompt", _clip(prompt["text"] or "")
        return
    for message in prompt["messages"]:
        content = message.get("content")
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        if message.get("tool_calls"):
            text = f"{text if content else ''}\n{json.dumps(message['tool_calls'], ensure_ascii=False)}".strip()
        yield str(message["role"]), _clip(text)


def columns(prompt: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The prompt's other columns as text."""
    return tuple((str(key), _short(value)) for key, value in (prompt["columns"] or {}).items())


def completion(
    raw: Mapping[str, Any], prompt_ids: Sequence[int], tokenizer: Tokenizer | None, *, budget: int
) -> ShownCompletion:
    """A rollout, at most `budget` tokens of it."""
    pieces: list[Piece] = []
    by_token = tokenizer is not None
    seen: list[int] = []
    for turn in raw["turns"]:
        given = list(turn["prompt_ids"] or prompt_ids)
        if seen and tokenizer is not None and given[: len(seen)] == seen:
            text = tokenizer.decode(given[len(seen) :], skip_special_tokens=False)
            pieces.append(Piece(text=_clip(text), kind="given"))
        found = _pieces(turn, tokenizer)
        by_token = by_token and found is not None
        pieces += [_whole(turn)] if found is None else found
        seen = given + list(turn["token_ids"])
    last = raw["turns"][-1]
    logprobs = [value for turn in raw["turns"] for value in _numbers(turn["logprobs"]) if value is not None]
    return ShownCompletion(
        reward=finite(raw["reward"]),
        rewards={str(name): finite(value) for name, value in raw["rewards"].items()},
        advantage=finite(raw["advantage"]),
        finish_reason=str(last["finish_reason"]),
        version=str(last["version"]),
        tokens=sum(len(turn["token_ids"]) for turn in raw["turns"]),
        mean_logprob=statistics.fmean(logprobs) if logprobs else None,
        pieces=tuple(_bounded(pieces, budget)),
        by_token=by_token,
        error=None if raw["error"] is None else _clip(str(raw["error"])),
    )


def _pieces(turn: Mapping[str, Any], tokenizer: Tokenizer | None) -> list[Piece] | None:
    """A piece a token; tokens that share a character are one, whose log-probability is their sum."""
    texts = token_texts(turn["token_ids"], tokenizer, text=turn["text"])
    if texts is None:
        return None
    logprobs, gaps = _numbers(turn["logprobs"]), _gaps(turn)
    pieces: list[Piece] = []
    start = 0
    for index, text in enumerate(texts):
        if text or index == len(texts) - 1:
            span = slice(start, index + 1)
            pieces.append(Piece(text=text or "�", logprob=_sum(logprobs[span]), gap=_sum(gaps[span])))
            start = index + 1
    if pieces and "".join(piece.text for piece in pieces[:-1]).endswith(turn["text"].rstrip()):
        pieces[-1] = replace(pieces[-1], kind="end")
    return pieces


def _whole(turn: Mapping[str, Any]) -> Piece:
    """A turn in one, with the means over its tokens."""
    logprobs = [value for value in _numbers(turn["logprobs"]) if value is not None]
    gaps = [abs(value) for value in _gaps(turn) if value is not None]
    return Piece(
        text=_clip(turn["text"]),
        logprob=statistics.fmean(logprobs) if logprobs else None,
        gap=statistics.fmean(gaps) if gaps else None,
    )


def _bounded(pieces: Sequence[Piece], budget: int) -> list[Piece]:
    """The beginning and the end of a completion that is longer than `budget` pieces."""
    if len(pieces) <= budget:
        return list(pieces)
    head = math.ceil(_HEAD * budget)
    cut = Piece(text=f" … {len(pieces) - budget:,} tokens are left out here … ", kind="cut")
    return [*pieces[:head], cut, *pieces[len(pieces) - (budget - head) :]]


def _gaps(turn: Mapping[str, Any]) -> list[float | None]:
    """Trainer's minus sampler's log-probability per token, where the trainer's were recorded."""
    sampled, trained = _numbers(turn["logprobs"]), _numbers(turn.get("trainer_logprobs") or ())
    if len(trained) != len(sampled):
        return [None] * len(sampled)
    return [None if a is None or b is None else b - a for a, b in zip(sampled, trained, strict=True)]


def _sum(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) if present and len(present) == len(values) else None


def _numbers(values: Sequence[Any]) -> list[float | None]:
    return [finite(value) for value in values]


def finite(value: Any) -> float | None:
    """A finite number; a rollout's file has the others as strings."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _clip(text: str) -> str:
    return text if len(text) <= MAX_CHARS else f"{text[: MAX_CHARS - 1]}…"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_COLUMN_CHARS else f"{text[: _MAX_COLUMN_CHARS - 1]}…"
