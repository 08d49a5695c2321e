"""A prompt and a rollout as the web interface shows them: bounded texts, and a completion cut into its tokens.

An episode is a transcript: what the policy said token by token, and between that what it was told, message by message.

They are made from the lines of a run's rollouts as they are, so that one damaged field costs no more than it must.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer

from groupwise.pictures import NAMED, text_of
from groupwise.server.token_texts import text_of_ids, token_texts

MAX_CHARS = 4000  # of a prompt, a completion without tokens, or an error

_MAX_COLUMN_CHARS = 300

_MAX_TOLD_CHARS = 600  # of a message between the turns of an episode

_TOKEN_CHARS = 8  # of it that take the place of a token

_HEAD = 0.7  # of what is shown of a long completion


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A token, or what stands between: its text, log-probability when it was sampled, and how far the trainer's log-
    probability is from that (nats; None where it was not recorded). `kind` is sampled, end (sampled, and no part of the
    text: it closed the turn), seen (sampled, and not trained), given (the policy did not write it) or cut (tokens are
    left out here)."""

    text: str
    logprob: float | None = None
    gap: float | None = None
    kind: str = "sampled"


@dataclass(frozen=True, kw_only=True)
class Block:
    """Holds a turn of an episode, or a message between two, and its author; "" for a completion outside an episode.

    `images` are the SHA-256 of those in the message; `reward` is the turn's own; `fork`: it does not continue from the
    turn before, and begins a trained segment.
    """

    role: str = ""
    pieces: tuple[Piece, ...]
    images: tuple[str, ...] = ()
    reward: float | None = None
    fork: bool = False


@dataclass(frozen=True, kw_only=True)
class ShownCompletion:
    """Holds a rollout as the web interface shows it. `by_token` is False if the texts of single tokens are not known:
    then a piece is a whole turn. `stop` says why an episode ended; None for a rollout without an environment."""

    reward: float | None
    rewards: Mapping[str, float | None]
    advantage: float | None
    finish_reason: str
    version: str
    tokens: int
    mean_logprob: float | None
    blocks: tuple[Block, ...]
    by_token: bool
    error: str | None
    turns: int = 1
    stop: str | None = None

    @property
    def pieces(self) -> list[Piece]:
        return [piece for block in self.blocks for piece in block.pieces]

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def ended(self) -> str:
        """Return how it ended, in words."""
        if self.stop is None:
            return "cut at the longest" if self.finish_reason == "length" else f"ended with {self.finish_reason}"
        ends = {"done": "done", "error": "failed"}.get(self.stop, f"stopped by {self.stop}")
        return f"{ends} after {self.turns} turn{'' if self.turns == 1 else 's'}"


def messages(prompt: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(role, text) of each message, the names of the tools before them; of a plain prompt, one."""
    if prompt["messages"] is None:
        if prompt["text"] is not None:
            yield "prompt", _clip(prompt["text"])
        return
    if tools := prompt.get("tools"):
        yield "tools", _clip(", ".join(str((tool.get("function") or tool).get("name", "?")) for tool in tools))
    for message in prompt["messages"]:
        yield str(message["role"]), _clip(_said(message))


def columns(prompt: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the prompt's other columns as text."""
    return tuple((str(key), _short(value)) for key, value in (prompt["columns"] or {}).items())


def completion(
    raw: Mapping[str, Any], prompt_ids: Sequence[int], tokenizer: Tokenizer | None, *, budget: int
) -> ShownCompletion:
    """Return a rollout, at most `budget` tokens of it. It has no turns where the environment failed before the
    first."""
    turns = raw["turns"]
    texts = [_pieces(turn, tokenizer) for turn in turns]
    said = [
        Block(
            role="assistant",
            pieces=tuple(_trained(turn, [_whole(turn)] if found is None else found)),
            reward=finite(turn.get("reward")),
            fork=new,
        )
        for turn, found, new in zip(turns, texts, _forks(turns, prompt_ids), strict=True)
    ]
    told = _told(turns, prompt_ids, tokenizer)
    logprobs = [value for turn in turns for value in _numbers(turn["logprobs"]) if value is not None]
    return ShownCompletion(
        reward=finite(raw["reward"]),
        rewards={str(name): finite(value) for name, value in raw["rewards"].items()},
        advantage=finite(raw["advantage"]),
        finish_reason=str(turns[-1]["finish_reason"]) if turns else "nothing",
        version=str(turns[-1]["version"]) if turns else "",
        tokens=sum(len(turn["token_ids"]) for turn in turns),
        mean_logprob=statistics.fmean(logprobs) if logprobs else None,
        blocks=tuple(_bounded(_transcript(raw, said, told), budget)),
        by_token=tokenizer is not None and None not in texts,
        error=None if raw["error"] is None else _clip(str(raw["error"])),
        turns=len(turns),
        stop=raw.get("stop"),
    )


def _transcript(raw: Mapping[str, Any], said: Sequence[Block], told: Sequence[str]) -> list[Block]:
    """Return what was said by whom. `told` is what the policy heard before each turn and after the one before, as its
    tokens say: that is shown where there are no messages for it."""
    if raw.get("stop") is None:
        pieces = [piece for heard, block in zip(told, said, strict=True) for piece in (*_given(heard), *block.pieces)]
        return [Block(pieces=tuple(pieces))]
    spoken = iter(said)
    if sum(message.get("role") == "assistant" for message in raw["messages"]) == len(said):
        return [next(spoken) if message["role"] == "assistant" else _message(message) for message in raw["messages"]]
    return [
        block
        for heard, turn in zip(told, said, strict=True)
        for block in (Block(role="told", pieces=_given(heard)), turn)
        if block.pieces or block is turn
    ]


def _told(turns: Sequence[Mapping[str, Any]], prompt_ids: Sequence[int], tokenizer: Tokenizer | None) -> list[str]:
    """Return what each turn saw beyond the turn before and what that said; "" where the tokens do not continue from
    there."""
    texts: list[str] = []
    seen: list[int] | None = None
    for turn in turns:
        given = list(turn["prompt_ids"] or prompt_ids)
        goes_on = seen is not None and tokenizer is not None and given[: len(seen)] == seen
        new = given[len(seen) :] if seen is not None and goes_on else []
        texts.append(text_of_ids(new, tokenizer) if tokenizer is not None and new else "")
        seen = given + list(turn["token_ids"])
    return texts


def _forks(turns: Sequence[Mapping[str, Any]], prompt_ids: Sequence[int]) -> list[bool]:
    """Return whether each turn does not continue from the one before."""
    forks: list[bool] = []
    seen: list[int] = []
    for turn in turns:
        given = list(turn["prompt_ids"] or prompt_ids)
        forks.append(given[: len(seen)] != seen)
        seen = given + list(turn["token_ids"])
    return forks


def _trained(turn: Mapping[str, Any], pieces: Sequence[Piece]) -> list[Piece]:
    return list(pieces) if turn.get("trained", True) else [replace(piece, kind="seen") for piece in pieces]


def _given(text: str) -> tuple[Piece, ...]:
    return (Piece(text=_clip(text, _MAX_TOLD_CHARS), kind="given"),) if text else ()


def _message(message: Mapping[str, Any]) -> Block:
    parts = content if isinstance(content := message.get("content"), list) else ()
    named = [part.get("image") for part in parts if isinstance(part, Mapping) and part.get("type") == "image"]
    images = tuple(name.removeprefix(NAMED) for name in named if isinstance(name, str) and name.startswith(NAMED))
    return Block(role=_who(message), pieces=_given(_said(message)), images=images)


def _who(message: Mapping[str, Any]) -> str:
    name = message.get("name")
    return f"{message['role']} {name}" if name else str(message["role"])


def _said(message: Mapping[str, Any]) -> str:
    """Return a message's text, its tool calls behind it."""
    content = message.get("content")
    text = text_of(content)
    if message.get("tool_calls"):
        text = f"{text if content else ''}\n{json.dumps(message['tool_calls'], ensure_ascii=False)}".strip()
    return text


def _pieces(turn: Mapping[str, Any], tokenizer: Tokenizer | None) -> list[Piece] | None:
    """Return a piece a token; tokens that share a character are one, whose log-probability is their sum."""
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
    """Return a turn in one, with the means over its tokens."""
    logprobs = [value for value in _numbers(turn["logprobs"]) if value is not None]
    gaps = [abs(value) for value in _gaps(turn) if value is not None]
    return Piece(
        text=_clip(turn["text"]),
        logprob=statistics.fmean(logprobs) if logprobs else None,
        gap=statistics.fmean(gaps) if gaps else None,
    )


def _bounded(blocks: Sequence[Block], budget: int) -> list[Block]:
    """Return the beginning and the end of what is longer than `budget` tokens; what others said counts by its
    characters."""
    placed = [(place, piece) for place, block in enumerate(blocks) for piece in block.pieces]
    sizes = [len(piece.text) // _TOKEN_CHARS + 1 if piece.kind == "given" else 1 for _, piece in placed]
    if sum(sizes) <= budget:
        return list(blocks)
    head = math.ceil(_HEAD * budget)
    front = _fitting(sizes, head)
    back = max(front, len(placed) - _fitting(sizes[::-1], budget - head))
    cut = Piece(text=f" … {back - front:,} tokens are left out here … ", kind="cut")
    kept = [*placed[:front], (placed[max(0, front - 1)][0], cut), *placed[back:]]
    by_block = itertools.groupby(kept, key=operator.itemgetter(0))
    return [replace(blocks[place], pieces=tuple(piece for _, piece in group)) for place, group in by_block]


def _fitting(sizes: Sequence[int], most: int) -> int:
    """Return how many of the first fit."""
    return sum(total <= most for total in itertools.accumulate(sizes))


def _gaps(turn: Mapping[str, Any]) -> list[float | None]:
    """Return the trainer's minus the sampler's log-probability per token, if the trainer's were recorded."""
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
    """Return a finite number; a rollout's file has the others as strings."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _clip(text: str, limit: int = MAX_CHARS) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_COLUMN_CHARS else f"{text[: _MAX_COLUMN_CHARS - 1]}…"
