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
from collections.abc import Iterator
from typing import Any

from groupwise.config.data import DataConfig, RowsConfig
from groupwise.errors import ConfigError, DataError
from groupwise.tasks.prompts import to_prompt
from groupwise.types import Prompt

if importlib.util.find_spec("reasoning_gym"):  # seconds, which are not to be the first score's: that has a deadline
    importlib.import_module("reasoning_gym")

SIZE = 1000  # problems, where `data.size` does not say

OWN = ("seed", "size")  # parameters of every generator that `data` says


class Problems:
    """The problems that `data` describes.

    Raises ConfigError where the package is missing, a task does not exist, or a parameter is not the generator's.
    """

    def __init__(self, config: RowsConfig):
        self._config = config
        self._seed = config.seed or 0
        self._levels = dict(config.difficulty) if isinstance(config, DataConfig) else {}
        self._size = config.size or SIZE
        self._weights = {name: float(each.get("weight", 1)) for name, each in config.tasks.items()}
        for name in config.tasks:
            for level in range(len(self._levels[name].levels) if name in self._levels else 1):
                self._generator(name, level)

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield every problem's id and row, the tasks spread evenly by their weights; of each the easiest level."""
        total, counts = sum(self._weights.values()), dict.fromkeys(self._weights, 0)
        for number in range(1, self._size + 1):
            owed = {name: weight * number / total - counts[name] for name, weight in self._weights.items()}
            task = max(owed, key=lambda name: owed[name])
            yield problem_id(task, 0, counts[task]), self._row(task, 0, counts[task])
            counts[task] += 1

    def prompt(self, task: str, level: int, index: int) -> Prompt:
        """Return problem `index` of a task, at a level of its difficulty."""
        row = self._row(task, level, index)
        return to_prompt(row, id=problem_id(task, level, index), raw=self._config.raw, system=self._config.system)

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


def problem_id(task: str, level: int, index: int) -> str:
    return f"{task}/{level}/{index}"


@functools.lru_cache(maxsize=1024)
def generator(task: str, parameters: str, seed: int = 0, size: int = 1) -> Any:
    """Return a generator of the package, by its name and its parameters as JSON. Raises ConfigError."""
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
