"""Environments of the `verifiers` package (0.1.14 to 0.3.1), unchanged, as an agent.

    env:
      agent: groupwise.bridges.verifiers.before_0_4:VerifiersAgent
      args: {environment: wordle, args: {...}}           an installed environment, or module:load_environment

Its dataset are the cases, its evaluation dataset the held-out ones. `Environment.run_rollout` plays each episode with
the run's OpenAI client at our endpoint, and its rubric scores it; the rubric's other numbers are logged.
Rubrics that compare the rollouts of a group cannot be asked for one episode and are refused. What the package calls
`verifiers.v1`, all of it from 0.4 on, are other environments: `bridges.verifiers.tasksets` plays those of 0.4.
"""

from __future__ import annotations

import importlib.util
import math
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from groupwise.config.load import load_object
from groupwise.errors import ConfigError, EnvError

SUPPORTED = "verifiers>=0.1.14,<0.4"


class VerifiersAgent:
    """An environment of `verifiers`; one instance plays all episodes.

    Args:
        environment: a name for `verifiers.load_environment`, or `module:function` that returns the environment.
        args: arguments of that function.
        folder: a folder in which the module may be; the configuration's.

    Raises:
        ConfigError: there is no package `verifiers` that has such environments, or this one cannot be asked for single
            episodes.
    """

    def __init__(self, environment: str, args: Mapping[str, Any] | None = None, folder: str | None = None):
        load = _loader(environment, folder)
        with _signals_kept():
            self._env: Any = load(**dict(args or {}))
        if not callable(getattr(self._env, "run_rollout", None)):
            raise ConfigError(f"{environment!r} made a {type(self._env).__name__}, which is no verifiers.Environment")
        if self._env.requires_group_rollouts:
            raise ConfigError(
                f"the rubric of {environment!r} scores whole groups, and an episode is scored by itself here",
                hint="use reward functions of single rollouts; advantages compare them",
            )

    def cases(self) -> list[dict[str, Any]]:
        """Return the rows of its dataset."""
        return [dict(row) for row in self._env.get_dataset()]

    def eval_cases(self) -> list[dict[str, Any]]:
        """Return the rows of its evaluation dataset; the package itself takes the dataset where there is none."""
        return [dict(row) for row in self._env.get_eval_dataset()]

    async def __call__(self, case: Mapping[str, Any], client: Any, model: str) -> dict[str, Any]:
        """Play an episode; its reward and the rubric's numbers. Raises EnvError for what the environment calls one."""
        from verifiers.clients import OpenAIChatCompletionsClient  # pyright: ignore[reportMissingImports]

        asked = OpenAIChatCompletionsClient(client)
        played = await self._env.run_rollout(dict(case), client=asked, model=model, sampling_args={})
        if (error := played.get("error")) is not None:
            told = error.get("error_chain_str") or error.get("error") if isinstance(error, Mapping) else error
            raise EnvError(f"the environment failed: {told}")
        numbers = {name: float(each) for name, each in (played.get("metrics") or {}).items()}
        return {"reward": played["reward"], "metrics": {k: v for k, v in numbers.items() if math.isfinite(v)}}


def _loader(environment: str, folder: str | None) -> Any:
    if importlib.util.find_spec("verifiers") is None:
        raise ConfigError("verifiers is not installed", hint=f"pip install '{SUPPORTED}'")
    import verifiers  # pyright: ignore[reportMissingImports]

    load: Any = getattr(verifiers, "load_environment", None)
    if load is None:
        raise ConfigError(
            f"verifiers {verifiers.__version__} has no load_environment: its environments are tasksets",
            hint=f"groupwise.bridges.verifiers.tasksets:TasksetAgent plays those of 0.4; or pip install '{SUPPORTED}'",
        )
    return load_object(environment, folder=folder) if ":" in environment else lambda **args: load(environment, **args)


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Let the block change the handlers of Ctrl-C and SIGTERM, and restore the run's afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
