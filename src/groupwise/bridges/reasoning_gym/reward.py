"""The reward: the generator's own score of the answer in a reply."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from groupwise.bridges.reasoning_gym.problems import SIZE, Problems, generator
from groupwise.config.data import REASONING_GYM, DatasetConfig
from groupwise.rewards.base import text_of
from groupwise.tasks.env import StepResult
from groupwise.types import Message


def score_answer(
    completions: Sequence[Any],
    task: Sequence[str],
    question: Sequence[str],
    answer: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    parameters: Sequence[Mapping[str, Any]],
    log_metric: Callable[[str, float], None],
    tag: str = "answer",
    strict: bool = False,
) -> list[float]:
    """Return the score, 0 to 1, that the generator gives the answer of each reply.

    Args:
        tag: the answer is what stands in the last `<tag>...</tag>` of a reply, after its thoughts ...
        strict: ... and where there is none the whole reply; with `strict` such a reply has 0.

    A reply on which the generator's score raises cannot be read as an answer, and has 0; the share of these is logged
    as `unreadable`.
    """
    scores, unreadable = [], 0
    for i, completion in enumerate(completions):
        entry = {"question": question[i], "answer": answer[i], "metadata": dict(metadata[i])}
        said = answer_of(text_of(completion), tag=tag, strict=strict)
        made = generator(task[i], json.dumps(parameters[i]))
        try:
            scores.append(float(made.score_answer(answer=said, entry=entry)))
        except Exception:
            scores.append(0.0)
            unreadable += 1
        log_metric(task[i], scores[-1])
    log_metric("unreadable", unreadable / max(1, len(scores)))
    return scores


def answer_of(reply: str, *, tag: str = "answer", strict: bool = False) -> str | None:
    """Return a reply's answer; None if it has none.

    >>> answer_of("<think>2 + 2</think>It is <answer> 4 </answer>"), answer_of("4 "), answer_of("4", strict=True)
    ('4', '4', None)
    """
    said = reply.rpartition("</think>")[2]
    tagged = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", said, re.DOTALL)
    if tagged:
        return tagged[-1].strip()
    return None if strict else said.strip()


class ReasoningGymEnv:
    """Makes an environment of one turn from a generator: `env: {environment: "reasoning-gym:chain_sum"}`.

    Args:
        task: the generator's name.
        size: the number of problems in `cases`, and the number in `eval_cases`.
        parameters: the generator's own parameters.
    """

    named_by = "task"  # the argument that is the name in `env.environment`

    def __init__(self, task: str, size: int = SIZE, **parameters: Any):
        self._task, self._size, self._parameters = task, size, parameters

    def cases(self) -> list[dict[str, Any]]:
        """Return the problems of seed 0."""
        return self._problems(0)

    def eval_cases(self) -> list[dict[str, Any]]:
        """Return the problems of seed 1."""
        return self._problems(1)

    def reset(self, case: Mapping[str, Any], seed: int) -> str:
        """Return the question."""
        self._case = dict(case)
        return self._case["question"]

    def step(self, message: Message) -> StepResult:
        """Return the end, with the score of the answer."""
        columns: dict[str, Any] = {
            name: [self._case[name]] for name in ("task", "question", "answer", "metadata", "parameters")
        }
        said = str(message.get("content") or "")
        [reward] = score_answer([said], **columns, log_metric=lambda name, value: None)
        return StepResult(reward=reward, done=True)

    def _problems(self, seed: int) -> list[dict[str, Any]]:
        tasks = {self._task: self._parameters}
        config = DatasetConfig(source=REASONING_GYM, tasks=tasks, size=self._size, seed=seed)
        return [{name: each for name, each in row.items() if name != "prompt"} for _, row in Problems(config).rows()]
