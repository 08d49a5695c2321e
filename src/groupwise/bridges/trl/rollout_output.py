"""Checks what a rollout function returned, and turns it into rollouts.

    {"prompt_ids": [...], "completion_ids": [...], "logprobs": [...], "env_mask": [...], <name>: ...}

has an entry for each prompt that it was given. Where `env_mask` is 0 the environment spoke; what stands between two
such stretches is a turn,

    prompt 1 2    completion 3 4 9 9 5    env_mask 1 1 0 0 1    ->    saw 1 2, said 3 4; saw 1 2 3 4 9 9, said 5

which `segments` joins again. Other names reach reward functions: a list by its entries, anything else as it is. A
turn that the engine sampled in just that context has its version and its reason to end. One that it did not (text
that was encoded again, ids put behind each other that the policy saw apart) is trained as it was returned, with the
log-probabilities that came with it, and counted: `foreign_tokens`.

What is wrong with the whole raises; what is wrong with one entry is that rollout's error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from groupwise.errors import EnvError
from groupwise.model.chat import stop_ids
from groupwise.tasks.policy_calls import PolicyCalls
from groupwise.types import Completion, FinishReason, PolicyVersion, Rollout, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REQUIRED = ("prompt_ids", "completion_ids", "logprobs")

MASK = "env_mask"

FOREIGN = "foreign_tokens"

ABOVE_ZERO = 1e-3  # what a log-probability may be above 0 by rounding


@dataclass(frozen=True, kw_only=True)
class OutputRow:
    """The output for one prompt. `mask` and `logprobs` have one entry per completion token."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    mask: tuple[bool, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class OutputReader:
    """Reads what the function `name` returns in one call."""

    name: str
    calls: PolicyCalls
    version: PolicyVersion
    tokenizer: PreTrainedTokenizerBase
    vocabulary: int
    only_first: bool  # turns after the first are not trained

    def rollouts(self, output: Any, size: int) -> list[Rollout]:
        """Return `size` rollouts, in order. Raises EnvError if the output does not have the required form."""
        entries = self._entries(output, size)
        names = (*REQUIRED, MASK)
        rollouts = [self._rollout(i, *(entries[name][i] for name in names)) for i in range(size)]
        own = {name: entry for name, entry in entries.items() if name not in names}
        return [
            replace(rollout, columns={name: entry[i] for name, entry in own.items()})
            for i, rollout in enumerate(rollouts)
        ]

    def _entries(self, output: Any, size: int) -> dict[str, Sequence[Any]]:
        if not isinstance(output, Mapping):
            raise EnvError(f"{self.name} returned {_short(output)}; it must return a dict with {', '.join(REQUIRED)}")
        if missing := [name for name in REQUIRED if output.get(name) is None]:
            held = ", ".join(map(repr, output)) or "nothing"
            raise EnvError(f"{self.name} returned no {' and no '.join(missing)}; it returned {held}")
        entries = {name: _listed(output[name]) for name in REQUIRED}
        entries[MASK] = [None] * size if output.get(MASK) is None else _listed(output[MASK])
        for name, value in output.items():
            if name not in entries:
                listed = _listed(value)
                entries[str(name)] = listed if isinstance(listed, list) else [value] * size
        for name, entry in entries.items():
            if not isinstance(entry, Sequence) or len(entry) != size:
                got = len(entry) if isinstance(entry, Sequence) else _short(entry)
                raise EnvError(
                    f"{self.name} returned {name} of {got} for {size} prompts",
                    hint="return one entry for each prompt, in order; a prompt comes once for each of its generations",
                )
        return entries

    def _rollout(self, number: int, *entries: Any) -> Rollout:
        try:
            row = self._row(*entries)
        except EnvError as error:
            return Rollout(turns=(), error=f"{self.name} returned, for prompt {number}, {error.message}", stop="error")
        turns, foreign = self._turns(row)
        text = self.tokenizer.decode(list(row.completion_ids), skip_special_tokens=True)
        return Rollout(
            turns=turns,
            messages=({"role": "assistant", "content": str(text)},),  # as TRL's reward functions see it
            stop="done",
            info={FOREIGN: float(foreign)},
        )

    def _row(self, prompt_ids: Any, completion_ids: Any, logprobs: Any, mask: Any) -> OutputRow:
        prompt, said = self._ids(prompt_ids, "prompt_ids"), self._ids(completion_ids, "completion_ids")
        mask = [True] * len(said) if mask is None else _listed(mask)
        logprobs = _listed(logprobs)
        for name, entry in ((MASK, mask), ("logprobs", logprobs)):
            if not isinstance(entry, Sequence) or len(entry) != len(said):
                got = len(entry) if isinstance(entry, Sequence) else _short(entry)
                raise EnvError(f"{name} of {got} for {len(said)} completion_ids")
        if unclear := [each for each in mask if each not in (0, 1)]:
            raise EnvError(f"env_mask with {_short(unclear[0])}; it is 1 where the policy spoke and 0 elsewhere")
        if not any(mask):
            raise EnvError("an env_mask of zeros: there is nothing to train")
        if len(prompt) + len(said) > self.calls.context_length:
            held, context = len(prompt) + len(said), self.calls.context_length
            raise EnvError(f"{held} tokens; the model's context is {context}")
        return OutputRow(
            prompt_ids=prompt,
            completion_ids=said,
            mask=tuple(bool(each) for each in mask),
            logprobs=tuple(_logprob(each) if spoke else 0.0 for each, spoke in zip(logprobs, mask, strict=True)),
        )

    def _ids(self, value: Any, name: str) -> tuple[int, ...]:
        ids = _listed(value)
        if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
            raise EnvError(f"{name} {_short(value)}; they are a list of token ids")
        ids = [_listed(each) for each in ids]
        if not ids:
            raise EnvError(f"no {name}; there must be at least one")
        wrong = [each for each in ids if not isinstance(each, int) or isinstance(each, bool)]
        wrong += [each for each in ids if each not in wrong and not 0 <= each < self.vocabulary]
        if wrong:
            raise EnvError(f"{name} with {_short(wrong[0])}; token ids are integers from 0 to {self.vocabulary - 1}")
        return tuple(ids)

    def _turns(self, row: OutputRow) -> tuple[tuple[Turn, ...], int]:
        """Return the turns, and how many trained tokens the engine did not sample where they stand."""
        turns: list[Turn] = []
        at = foreign = 0
        ends = stop_ids(self.tokenizer)
        for spoke, run in groupby(row.mask):
            start, at = at, at + len(list(run))
            if not spoke:
                continue
            seen, ids = row.prompt_ids + row.completion_ids[:start], row.completion_ids[start:at]
            said = self.calls.said(seen, ids)
            foreign += len(ids) if said is None else 0
            ended = at < len(row.completion_ids) or ids[-1] in ends
            completion = Completion(
                token_ids=ids,
                logprobs=row.logprobs[start:at],
                text=str(self.tokenizer.decode(list(ids), skip_special_tokens=True)),
                finish_reason=FinishReason.STOP if ended else FinishReason.LENGTH,
                version=self.version,
            )
            if said is not None and said.completion.token_ids == ids:
                completion = replace(completion, finish_reason=said.completion.finish_reason)
            if said is not None and (kept := said.completion.kept) is not None:
                restricted = said.completion.kept_logprobs[: len(ids)]
                completion = replace(completion, kept=kept.cut(0, len(ids)), kept_logprobs=restricted)
            trained = (said is None or said.as_run) and not (self.only_first and turns)
            turns.append(Turn(seen, completion, trained=trained))
        return tuple(turns), foreign


def _logprob(value: Any) -> float:
    """Return a log-probability; TRL's client of a server gives each in a list of one."""
    value = _listed(value)
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 1:
        value = value[0]
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise EnvError(f"logprobs with {_short(value)}; each is a number")
    if not math.isfinite(value) or value > ABOVE_ZERO:
        raise EnvError(f"logprobs with {value}; each is finite, and no more than 0")
    return min(float(value), 0.0)


def _listed(value: Any) -> Any:
    """Return tensors and arrays as lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
