"""The generators of the package `reasoning-gym`: their problems as prompts, their scores as rewards, their difficulty.

    data:
      source: reasoning-gym
      tasks:
        chain_sum: {min_terms: 2, max_terms: 3, weight: 2}    a generator's parameters; twice as many problems of it
        number_sorting: {max_numbers: 4}
      size: 2000
    rewards: [reasoning-gym]                                  the default with this source

A prompt is a generator's question. Its columns are `task` (the generator's name), `level` (of its difficulty),
`question`, `answer`, `metadata` and `parameters`. `score_answer` gives what the generator's own `score_answer` says of
the reply, 0 to 1, and logs its mean by task as `reward/reasoning-gym/log/<task>`. Needs
`pip install 'groupwise[reasoning-gym]'`.

Problem i of a generator depends on (seed, task, parameters, i) only. The package seeds problem i with seed + i, so that
neighbouring seeds share nearly all problems; here `data.seed` is hashed with the task's name before.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import importlib
import importlib.util
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from groupwise.config.data import REASONING_GYM, DataConfig, DatasetConfig
from groupwise.errors import ConfigError, DataError
from groupwise.rewards.base import text_of
from groupwise.tasks.env import StepResult
from groupwise.tasks.prompts import Issued, PromptSource, Ticket, WrappedStream, to_prompt
from groupwise.types import Message, Prompt, RolloutGroup

if importlib.util.find_spec("reasoning_gym"):  # seconds, which are not to be the first score's: that has a deadline
    importlib.import_module("reasoning_gym")

SIZE = 1000  # problems, where `data.size` does not say
OWN = ("seed", "size")  # parameters of every generator that `data` says


class Problems:
    """The problems that `data` describes.

    Raises ConfigError where the package is missing, a task does not exist, or a parameter is not the generator's.
    """

    def __init__(self, config: DatasetConfig):
        self._config = config
        training = isinstance(config, DataConfig)
        self._seed = config.seed if config.seed is not None else int(not training)
        self._levels = dict(config.difficulty) if isinstance(config, DataConfig) else {}
        self._size = config.size or SIZE
        self._weights = {name: float(each.get("weight", 1)) for name, each in config.tasks.items()}
        for name in config.tasks:
            for level in range(len(self._levels[name].levels) if name in self._levels else 1):
                self._generator(name, level)

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Every problem's id and row, the tasks spread evenly by their weights; of each the easiest level."""
        total, counts = sum(self._weights.values()), dict.fromkeys(self._weights, 0)
        for number in range(1, self._size + 1):
            owed = {name: weight * number / total - counts[name] for name, weight in self._weights.items()}
            task = max(owed, key=lambda name: owed[name])
            yield _id(task, 0, counts[task]), self._row(task, 0, counts[task])
            counts[task] += 1

    def prompt(self, task: str, level: int, index: int) -> Prompt:
        """Problem `index` of a task, at a level of its difficulty."""
        row = self._row(task, level, index)
        return to_prompt(row, id=_id(task, level, index), raw=self._config.raw, system=self._config.system)

    def _row(self, task: str, level: int, index: int) -> dict[str, Any]:
        try:
            entry = self._generator(task, level)[index]
        except Exception as error:
            raise DataError(f"{task} could not make problem {index}: {type(error).__name__}: {error}") from error
        return {
            "prompt": entry["question"],
            "task": task,
            "level": level,
            "question": entry["question"],
            "answer": entry["answer"],
            "metadata": entry["metadata"],
            "parameters": self._parameters(task, level),
        }

    def _generator(self, task: str, level: int) -> Any:
        drawn = hashlib.blake2b(f"{self._seed}/{task}".encode(), digest_size=8).digest()
        seed = int.from_bytes(drawn, "little") % (1 << 31)  # NumPy's seeds are below 2^32, and an index is added
        return generator(task, json.dumps(self._parameters(task, level)), seed, self._size)

    def _parameters(self, task: str, level: int) -> dict[str, Any]:
        given = {name: each for name, each in self._config.tasks[task].items() if name != "weight"}
        rule = self._levels.get(task)
        return given if rule is None else {**given, rule.parameter: rule.levels[level]}


def _id(task: str, level: int, index: int) -> str:
    return f"{task}/{level}/{index}"


@functools.lru_cache(maxsize=1024)
def generator(task: str, parameters: str, seed: int = 0, size: int = 1) -> Any:
    """A generator of the package, by its name and its parameters as JSON. Raises ConfigError."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigError("reasoning-gym is not installed", hint="pip install 'groupwise[reasoning-gym]'")
    factory: Any = importlib.import_module("reasoning_gym.factory")
    importlib.import_module("reasoning_gym")  # registers the generators
    if task not in factory.DATASETS:
        similar = difflib.get_close_matches(task, factory.DATASETS, n=1)
        hint = f"did you mean {similar[0]}?" if similar else f"it has {', '.join(sorted(factory.DATASETS))}"
        raise ConfigError(f"data.tasks: reasoning-gym has no generator {task!r}", hint=hint)
    made, configured = factory.DATASETS[task]
    given = json.loads(parameters)
    known = [each.name for each in dataclasses.fields(configured)]
    for name in given:
        if name in OWN:
            raise ConfigError(f"data.tasks.{task}.{name} is said for all tasks at once", hint=f"set data.{name}")
        if name not in known:
            similar = difflib.get_close_matches(name, known, n=1)
            takes = ", ".join(each for each in known if each not in OWN)
            hint = f"did you mean {similar[0]}?" if similar else f"it takes {takes}"
            raise ConfigError(f"data.tasks.{task}: {task} has no parameter {name!r}", hint=hint)
    try:
        return made(configured(**given, seed=seed, size=size))
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"data.tasks.{task} = {parameters} is refused by reasoning-gym: {why}") from error


# ----------------------------------------------------------------------------------------------------------------------
# The reward: the generator's own score of the answer in a reply.
# ----------------------------------------------------------------------------------------------------------------------


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
    """The score, 0 to 1, that the generator gives the answer of each reply.

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
    """What a reply answers; None where it has no answer.

    >>> answer_of("<think>2 + 2</think>It is <answer> 4 </answer>"), answer_of("4 "), answer_of("4", strict=True)
    ('4', '4', None)
    """
    said = reply.rpartition("</think>")[2]
    tagged = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", said, re.DOTALL)
    if tagged:
        return tagged[-1].strip()
    return None if strict else said.strip()


class ReasoningGymEnv:
    """One task as an environment of one turn: `env: {environment: "reasoning-gym:chain_sum"}`.

    Args:
        task: the generator.
        size: problems, of training and of evaluation.
        parameters: the generator's.
    """

    def __init__(self, task: str, size: int = SIZE, **parameters: Any):
        self._task, self._size, self._parameters = task, size, parameters

    def cases(self) -> list[dict[str, Any]]:
        """The problems of seed 0."""
        return self._problems(0)

    def eval_cases(self) -> list[dict[str, Any]]:
        """The problems of seed 1."""
        return self._problems(1)

    def reset(self, case: Mapping[str, Any], seed: int) -> str:
        """The question."""
        self._case = dict(case)
        return self._case["question"]

    def step(self, message: Message) -> StepResult:
        """The end, with the score of the answer."""
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


# ----------------------------------------------------------------------------------------------------------------------
# Difficulty that follows the pass rate. `data.difficulty` names a parameter of a task and its values, easy to hard:
#
#     mean reward of the last `groups` groups at this level  > high    the next level
#                                                            < low     the level before
#
# and the count begins again. Groups that were sampled at another level say nothing about this one.
# ----------------------------------------------------------------------------------------------------------------------


class AdaptiveDifficulty(WrappedStream):
    """A PromptSource of generated problems, of which each is drawn at its task's present level.

    Args:
        config: the source's, with `difficulty`.
        reward: the name of the reward that tells success; None takes the weighted sum.
    """

    def __init__(self, source: PromptSource, config: DataConfig, *, reward: str | None = None):
        super().__init__(source)
        self._problems, self._rules, self._reward = Problems(config), config.difficulty, reward
        self._level = dict.fromkeys(self._rules, 0)
        self._seen: dict[str, list[float]] = defaultdict(list)  # mean rewards of groups at the present level
        self._rate: dict[str, float] = {}  # the mean that decided last
        self._issued: dict[Ticket, int] = {}  # the level of what is on its way

    def issue(self, n: int) -> list[Issued]:
        """The next n problems; what was on its way when a run stopped has the level that it had."""
        return [self._at_level(each) for each in self._source.issue(n)]

    def resolve(self, ticket: Ticket) -> None:
        """As PromptSource.resolve."""
        super().resolve(ticket)
        self._issued.pop(ticket, None)

    def prompt(self, id: str) -> Prompt:
        """The problem of that id, at the level that is part of it. Raises DataError if there is none."""
        easiest = self._source.prompt(_easiest(id))
        return self._made(easiest, int(id.split("/")[1]))

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        """Learn from scored groups, each once and when it is fresh; one without any reward says nothing."""
        for group in groups:
            task, level, _ = group.prompt.id.split("/")
            values = [r.reward if self._reward is None else r.rewards.get(self._reward) for r in group.rollouts]
            rewards = [value for value in values if value is not None and math.isfinite(value)]
            if task in self._rules and rewards and int(level) == self._level[task]:
                self._seen[task].append(math.fsum(rewards) / len(rewards))
                self._decide(task)

    def metrics(self) -> dict[str, float]:
        """By task, the level (0 is the easiest) and the mean reward that decided last."""
        levels = {f"difficulty/{task}/level": float(level) for task, level in self._level.items()}
        return levels | {f"difficulty/{task}/rate": rate for task, rate in self._rate.items()}

    @property
    def cursor(self) -> dict[str, Any]:
        """Where the stream and the levels stand, for `restore`; goes through JSON."""
        state = {
            "level": self._level,
            "seen": {task: list(seen) for task, seen in self._seen.items()},
            "rate": self._rate,
            "issued": [[*ticket, level] for ticket, level in self._issued.items()],
        }
        return self._source.cursor | {"difficulty": state}

    def restore(self, cursor: Mapping[str, Any]) -> None:
        """Continue where `cursor` was taken. Raises DataError for what is no cursor of these tasks and levels."""
        try:
            state = cursor["difficulty"]
            level = {str(task): int(each) for task, each in state["level"].items()}
            seen = {str(task): [float(each) for each in means] for task, means in state["seen"].items()}
            rate = {str(task): float(each) for task, each in state["rate"].items()}
            issued = {Ticket(int(epoch), int(position)): int(at) for epoch, position, at in state["issued"]}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"not the cursor of a difficulty: {type(error).__name__}: {error}") from error
        if level.keys() != self._rules.keys() or any(each >= len(self._rules[t].levels) for t, each in level.items()):
            raise DataError(f"the cursor's levels {level} are not those of data.difficulty; resume with the same ones")
        self._source.restore(cursor)
        self._level, self._rate, self._issued = level, rate, issued
        self._seen = defaultdict(list, seen)

    def _decide(self, task: str) -> None:
        rule, seen = self._rules[task], self._seen[task]
        if len(seen) < rule.groups:
            return
        rate = self._rate[task] = math.fsum(seen) / len(seen)
        step = (rate > rule.band[1]) - (rate < rule.band[0])
        self._level[task] = min(max(self._level[task] + step, 0), len(rule.levels) - 1)
        seen.clear()

    def _at_level(self, issued: Issued) -> Issued:
        task = issued.prompt.columns["task"]
        present = self._level.get(task, 0)
        level = self._issued.get(issued.ticket, present) if issued.again else present
        self._issued[issued.ticket] = level
        return dataclasses.replace(issued, prompt=self._made(issued.prompt, level))

    def _made(self, easiest: Prompt, level: int) -> Prompt:
        task, _, index = easiest.id.split("/")
        return easiest if level == 0 else self._problems.prompt(task, level, int(index))


def _easiest(id: str) -> str:
    """The id of the same problem at the easiest level; one that is none of ours as it is."""
    parts = id.split("/")
    return _id(parts[0], 0, int(parts[2])) if len(parts) == 3 and parts[1].isdigit() and parts[2].isdigit() else id
