"""Tasksets and environments of `verifiers` 0.4 (its `verifiers.v1`), unchanged, as an agent.

    env:
      agent: groupwise.bridges.verifiers.tasksets:TasksetAgent
      args:
        taskset: reverse-text-v1                an installed package, or a module next to the configuration
        config: {taskset: {split: train}}       what verifiers calls [env]: taskset, agent.harness, agent.runtime, ...
        eval_config: {taskset: {split: test}}   laid over it for evaluation

An environment of 0.4 is a taskset, a harness (the program that asks the model) and a runtime (where that program runs).
Here the harness is `null`, a chat loop with the taskset's tools, and the runtime `subprocess`, this machine, unless
`config` says otherwise. The harness asks verifiers' own server, which passes each request on to the run's endpoint,
where all of it is recorded: what is trained are the tokens that were sampled. The package's scoring gives the reward,
the sum of the trace's, and its metrics are logged.

Needs verifiers 0.4 and its program `uv`, which prepares what a harness needs from a package index. An environment with
several agents is refused: one policy plays one of them.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import itertools
import math
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.config.load import first_on_path
from groupwise.errors import ConfigError, EnvError

SUPPORTED = "verifiers>=0.4,<0.5"
DEFAULT = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}  # of the one agent
TRAIN, EVAL = "train", "eval"


class TasksetAgent:
    """A taskset of `verifiers` 0.4; one instance plays all episodes.

    Args:
        taskset: the taskset's id: the name of a package or of a module.
        config: the environment's configuration, as under `[env]` in verifiers' files.
        eval_config: the differences in evaluation; None: there is no evaluation set.
        tasks: the number of tasks taken from an endless taskset, and the most taken from others; None takes all of
            those.
        folder: a folder in which the module may be; the configuration's.

    Raises:
        ConfigError: no package `verifiers` of 0.4, no such taskset, a configuration that it refuses, or an environment
            of several agents.
    """

    def __init__(
        self,
        taskset: str,
        config: Mapping[str, Any] | None = None,
        eval_config: Mapping[str, Any] | None = None,
        tasks: int | None = None,
        folder: str | None = None,
    ):
        self._taskset, self._folder, self._most = taskset, folder, tasks
        self._loaders = _loaders()
        self._envs = {TRAIN: self._environment(dict(config or {}))}
        if eval_config is not None:
            self._envs[EVAL] = self._environment(_merged(config or {}, eval_config))
        self._show_folder()
        self._tasks: dict[str, list[Any]] = {}
        self._serving: dict[int, _Serving] = {}  # by environment: its shared tools

    def cases(self) -> list[dict[str, Any]]:
        """Return the taskset's tasks: their data, with the number by which they are found again."""
        return self._cases(TRAIN)

    def eval_cases(self) -> list[dict[str, Any]]:
        """Return the tasks of `eval_config`."""
        if EVAL not in self._envs:
            hint = "set env.args.eval_config, as in {taskset: {split: test}}"
            raise ConfigError(f"{self._taskset} has no evaluation set", hint=hint)
        return self._cases(EVAL)

    async def __call__(self, case: Mapping[str, Any], *, base_url: str, api_key: str, model: str) -> dict[str, Any]:
        """Play an episode; its reward and the trace's numbers. Raises EnvError for what verifiers calls an error."""
        vf: Any = importlib.import_module("verifiers.v1")
        split, number = str(case["verifiers_set"]), int(case["verifiers_task"])
        env, task = self._envs[split], self._all(split)[number]
        await self._shared_tools(env)
        variable = f"GROUPWISE_API_KEY_{uuid.uuid4().hex}"  # runtimes hand on no variable with API_KEY in its name
        os.environ[variable] = api_key
        try:
            client = vf.EvalClientConfig(base_url=base_url, api_key_var=variable)
            episode = await env.run_episode(task, vf.ModelContext(model=model, client=client))
        finally:
            del os.environ[variable]
        return _outcome(episode)

    # ---- inside ----
    def _show_folder(self) -> None:
        """Add the configuration's folder to PYTHONPATH, so that a taskset's tool servers, which inherit this process's
        environment, can import the taskset."""
        if self._folder is None or not any((Path(self._folder) / each).exists() for each in _files_of(self._taskset)):
            return
        before = os.environ.get("PYTHONPATH", "")
        if str(self._folder) not in before.split(os.pathsep):
            os.environ["PYTHONPATH"] = os.pathsep.join([str(self._folder), *filter(None, [before])])

    def _environment(self, config: dict[str, Any]) -> Any:
        """Return the environment of a configuration, where the one agent's harness and runtime have defaults."""
        taskset = {"id": self._taskset, **dict(config.get("taskset") or {})}
        package = _package_of(self._taskset)
        try:
            with first_on_path(package, self._folder):
                kind = self._loaders.env_config_type(self._taskset, config.get("id") or "")
                seats = [name for name, field in kind.model_fields.items() if _is_seat(field.default)]
                if len(seats) != 1:
                    raise ConfigError(
                        f"{self._taskset} has {len(seats)} agents ({', '.join(seats)}); one is played here",
                        hint="name an environment of one agent in env.args.config.id",
                    )
                [seat] = seats
                given = {**config, "taskset": taskset, seat: {**DEFAULT, **dict(config.get(seat) or {})}}
                return self._loaders.load_environment(self._loaders.resolve_env_config(given))
        except ConfigError:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise ConfigError(f"verifiers cannot load {self._taskset!r}: {why}") from error

    def _all(self, split: str) -> list[Any]:
        if split not in self._tasks:
            taskset = self._envs[split].taskset
            most = self._most
            if most is None and getattr(type(taskset), "INFINITE", False):
                raise ConfigError(f"{self._taskset} has no end", hint="say how many: env.args.tasks")
            self._tasks[split] = list(itertools.islice(iter(taskset), most))
        return self._tasks[split]

    def _cases(self, split: str) -> list[dict[str, Any]]:
        return [
            {**task.data.model_dump(mode="json"), "verifiers_set": split, "verifiers_task": number}
            for number, task in enumerate(self._all(split))
        ]

    async def _shared_tools(self, env: Any) -> None:
        """Wait for the tool servers that all tasks of a taskset share, which run until the event loop ends; most
        tasksets have none. The first episode starts them, and where that fails the next one does."""
        if not env.taskset.toolsets(env.taskset.config):
            return
        loop = asyncio.get_running_loop()
        held = self._serving.get(id(env))
        if held is None or held.task.done() or held.task.get_loop() is not loop:
            ready: asyncio.Future[None] = loop.create_future()
            held = self._serving[id(env)] = _Serving(loop.create_task(_serve(env, ready)), ready)
        await asyncio.shield(held.ready)  # an episode that is given up ends nothing that others use


@dataclass(frozen=True)
class _Serving:
    """Keeps the tool servers that tasks share, as `task`; `ready` is set when they answer, or has the error of their
    start."""

    task: asyncio.Task[None]
    ready: asyncio.Future[None]


async def _serve(env: Any, ready: asyncio.Future[None]) -> None:
    """Hold the shared tool servers of an environment."""
    try:
        async with env.serving():
            ready.set_result(None)
            await asyncio.Event().wait()
    except Exception as error:
        if ready.done():
            raise
        ready.set_exception(error)


def _loaders() -> Any:
    if importlib.util.find_spec("verifiers") is None:
        raise ConfigError("verifiers is not installed", hint=f"pip install '{SUPPORTED}'")
    package: Any = importlib.import_module("verifiers")
    version = str(getattr(package, "__version__", "0"))
    if not version.startswith("0.4."):
        raise ConfigError(
            f"verifiers {version} is not one of {SUPPORTED}",
            hint="for 0.1.14 to 0.3.1 set env.agent: groupwise.bridges.verifiers.before_0_4:VerifiersAgent",
        )
    return importlib.import_module("verifiers.v1.utils.loaders")


def _package_of(taskset: str) -> str:
    """Return the module of a taskset's id, which may have an owner and a version."""
    return taskset.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()


def _files_of(taskset: str) -> tuple[str, str]:
    """Return what its module is called in a folder: a package or one file."""
    return _package_of(taskset), f"{_package_of(taskset)}.py"


def _is_seat(default: Any) -> bool:
    return isinstance(default, importlib.import_module("verifiers.v1").AgentConfig)


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `over` into `base`, section by section."""
    merged = dict(base)
    for key, value in over.items():
        inner = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(inner, Mapping)
        merged[key] = _merged(inner, value) if both else value  # type: ignore[arg-type]
    return merged


def _outcome(episode: Any) -> dict[str, Any]:
    """Return the reward of an episode's trace, and its numbers. Raises EnvError."""
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        told = "; ".join(f"{error.type}: {error.message}" for error in errors) or "it was not completed"
        raise EnvError(f"the environment failed: {told}"[:2000])
    [trace] = episode.traces
    numbers = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    numbers |= {name: value for name, value in trace.metrics.items() if value is not None}
    return {
        "reward": float(trace.reward),
        "metrics": {name: float(value) for name, value in numbers.items() if math.isfinite(value)},
    }
