"""A judge, or any other reward, asked about answers of which a log says how good they were.

    read_scored   `train_scored.jsonl` and `heldout_scored.jsonl` of an import -> answers by their prompts
    grade         the reward's grade of each, of those of one prompt together, and once more in the opposite order

What a reward is told is what it is told in a run: the completions of one prompt, and the row's columns by name.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.config.json_lines import json_lines
from groupwise.errors import DataError, RewardError
from groupwise.rewards.call import Failure, FunctionCall, RewardFunction, call_here
from groupwise.tasks.logs.calibration import Graded
from groupwise.tasks.logs.cases import GOOD

FILES = ("train_scored.jsonl", "heldout_scored.jsonl")
AT_ONCE = 8  # prompts about which the judge is asked
MOST_FAILED = 0.2  # of the answers


@dataclass(frozen=True, kw_only=True)
class ScoredAnswer:
    """Holds an answer of a log, as a message. `good` follows from its score; `model` wrote it, None for people; `by`
    stands for the user who rated it, None if there are none or several."""

    message: Mapping[str, Any]
    good: bool
    model: str | None
    by: str | None = None

    @property
    def text(self) -> str:
        return str(self.message.get("content") or "")


@dataclass(frozen=True, kw_only=True)
class ScoredPrompt:
    """A prompt with the answers whose scores are known."""

    key: str
    messages: Sequence[Mapping[str, Any]]
    columns: Mapping[str, Any]
    answers: list[ScoredAnswer]


def read_scored(folder: Path) -> list[ScoredPrompt]:
    """Return the answers with a score above or below a half. Raises DataError where there are none."""
    found: dict[str, ScoredPrompt] = {}
    for name in FILES:
        path = folder / name
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        for number, line in json_lines(text):
            try:
                row = json.loads(line)
                score, key = float(row["score"]), _digest(row["prompt"], row.get("tools"))
                by = f"{name} {row['by']}" if "by" in row else None
                said = ScoredAnswer(message=dict(row["completion"][0]), good=score > GOOD, model=row["model"], by=by)
                columns = {each: row[each] for each in ("answer",) if each in row}
                prompt = ScoredPrompt(key=key, messages=list(row["prompt"]), columns=columns, answers=[])
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise DataError(f"{path}:{number}: no answer with a score: {type(error).__name__}: {error}") from error
            if score != GOOD:
                found.setdefault(key, prompt).answers.append(said)
    if not found:
        hint = "import logs with outcomes: groupwise logs import ... --outcomes FILE"
        raise DataError(f"in {folder} there are no answers with a score ({', '.join(FILES)})", hint=hint, kind="empty")
    return list(found.values())


def _digest(*values: Any) -> str:
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()


def grade(prompts: Sequence[ScoredPrompt], reward: RewardFunction, *, model: str | None) -> tuple[list[Graded], int]:
    """Return the graded answers, and how many the reward gave no grade; `model` is the judge's own, as logs name it.

    Raises RewardError, with the first cause, where it is more than a fifth.
    """
    return asyncio.run(_grade(prompts, reward, model))


async def _grade(
    prompts: Sequence[ScoredPrompt], reward: RewardFunction, model: str | None
) -> tuple[list[Graded], int]:
    room = asyncio.Semaphore(AT_ONCE)
    known = any(answer.model == model for prompt in prompts for answer in prompt.answers)

    async def ask(prompt: ScoredPrompt, answers: Sequence[ScoredAnswer]) -> Sequence[float | Failure | None]:
        size = len(answers)
        columns = {
            "completions": [[dict(each.message)] for each in answers],
            "prompts": [list(prompt.messages)] * size,
            **{name: [value] * size for name, value in prompt.columns.items()},
        }
        async with room:
            call = FunctionCall(reward, reward.accepted(columns), size=size, prompt_id=prompt.key)
            return (await call_here(call)).values

    async def both(prompt: ScoredPrompt) -> tuple[Sequence[float | Failure | None], Sequence[float | Failure | None]]:
        straight = await ask(prompt, prompt.answers)
        if len(prompt.answers) == 1:
            return straight, [None]
        return straight, (await ask(prompt, prompt.answers[::-1]))[::-1]

    grades = await asyncio.gather(*map(both, prompts))
    graded, causes, failed = list[Graded](), list[str](), 0
    for prompt, (straight, turned) in zip(prompts, grades, strict=True):
        for at, (answer, one, other) in enumerate(zip(prompt.answers, straight, turned, strict=True)):
            if not isinstance(one, float):
                failed += 1
                causes += [one.cause] if isinstance(one, Failure) else []
                continue
            graded.append(
                Graded(
                    key=prompt.key,
                    good=answer.good,
                    grade=one if not isinstance(other, float) else (one + other) / 2,
                    length=len(answer.text),
                    own=answer.model == model if known and model is not None else None,
                    places=_places(one, other, at, len(prompt.answers)),
                    by=answer.by,
                )
            )
    if failed > MOST_FAILED * (failed + len(graded)):
        cause = causes[0] if causes else "it does not apply to them"
        raise RewardError(f"{reward.name} gave no grade to {failed} of {failed + len(graded)} answers: {cause}")
    return graded, failed


def _places(straight: float, turned: Any, at: int, size: int) -> tuple[float, float] | None:
    """Return the grades in the first and in the last half; None for the answer in the middle."""
    if not isinstance(turned, float) or 2 * at == size - 1:
        return None
    return (straight, turned) if 2 * at < size - 1 else (turned, straight)
