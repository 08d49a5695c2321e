"""Environments written for TRL's `environment_factory` (TRL 1.16), unchanged.

    env:
      environment: groupwise.bridges.trl.environment:TrlEnvironment
      args: {factory: my_module:MyEnv}                  or {chess: my_chess:Env, maze: my_maze:Env}
    data: {source: prompts.jsonl}

`reset(**row)` gets the row's columns and may return a text, which is appended to the last message; the public methods
are the tools, with type hints and docstrings; `get_reward()`, if there is one, is the reward, added to what reward
functions give; with several factories the row's column `environment` names one, whose tools alone are offered. A row
without a prompt begins with an empty user message. Methods may be async.

What differs: each episode has its own instance, which TRL uses again and again; a tool has a time limit.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from groupwise.errors import ConfigError, EnvError
from groupwise.tasks.env import Episode, Observation, reward_of
from groupwise.tasks.env_loading import load_once
from groupwise.tasks.tool_env import ToolEnv
from groupwise.tasks.tools import TIME_LIMIT_S, CallableTool
from groupwise.types import Message

NOT_TOOLS = ("reset", "get_reward")

SELECTS = "environment"  # the column that names one of several factories


class TrlEnvironment(ToolEnv):
    """An episode in an environment of TRL's kind.

    Args:
        factory: `module:callable` without arguments that makes an environment, or several of them by name.
        tools: further tools, as `module:function`.
        time_limit_s: seconds that a tool may take.
        folder: a folder in which the modules may be; the configuration's.
    """

    def __init__(
        self,
        factory: str | Mapping[str, str],
        tools: Sequence[str] = (),
        time_limit_s: float = TIME_LIMIT_S,
        folder: str | None = None,
    ):
        self._several = isinstance(factory, Mapping)
        named: Mapping[Any, str] = factory if isinstance(factory, Mapping) else {None: factory}
        self._factories = {name: load_once(each, folder=folder) for name, each in named.items()}
        self._more = [load_once(each, folder=folder) for each in tools]
        self._time_limit_s = time_limit_s
        self._played: Any = None

    async def reset(self, case: Mapping[str, Any], seed: int) -> Observation:
        """Return the row's prompt, and what the environment adds to it. TRL's environments get no seed."""
        self._played = await self._in_own_thread(self._factory(case))
        if not callable(getattr(type(self._played), "reset", None)):
            raise ConfigError(f"{type(self._played).__name__} has no method reset, which TRL's environments have")
        columns = {name: value for name, value in case.items() if not (self._several and name == SELECTS)}
        seen = await self._called(self._played.reset, **columns)
        self.tools = [*self._more, *map(self._tool, _public(self._played))]
        return self.offer(_with(_messages(case.get("prompt")), seen))

    async def score(self, episode: Episode) -> float:
        """Return the result of `get_reward`; 0 without it, when reward functions score."""
        if not callable(getattr(type(self._played), "get_reward", None)):
            return 0.0
        return reward_of(await self._called(self._played.get_reward), f"{type(self._played).__name__}.get_reward")

    def _factory(self, case: Mapping[str, Any]) -> Callable[[], Any]:
        name = case.get(SELECTS) if self._several else None
        if name not in self._factories:
            raise EnvError(
                f"the row's column {SELECTS!r} is {name!r}; env.args.factory has {', '.join(map(str, self._factories))}"
            )
        return self._factories[name]

    def _tool(self, method: Callable[..., Any]) -> CallableTool:
        return CallableTool.from_function(method, time_limit_s=self._time_limit_s, thread=self._in_own_thread)

    async def _called(self, method: Callable[..., Any], **arguments: Any) -> Any:
        """Return a method's result, in the episode's thread if it is not async."""
        if inspect.iscoroutinefunction(method):
            return await method(**arguments)
        return await self._in_own_thread(lambda: method(**arguments))


def _public(environment: Any) -> list[Callable[..., Any]]:
    """Return the methods that are tools: those of its class that are not private, without reset and get_reward."""
    names = [name for name, _ in inspect.getmembers(type(environment), predicate=inspect.isfunction)]
    return [getattr(environment, name) for name in names if not name.startswith("_") and name not in NOT_TOOLS]


def _messages(prompt: Any) -> list[Message]:
    if prompt is None:
        return [Message(role="user", content="")]
    return [Message(role="user", content=prompt)] if isinstance(prompt, str) else [*prompt]


def _with(messages: list[Message], seen: Any) -> list[Message]:
    """Return the messages with what `reset` returned at the end of the last one."""
    if seen is None:
        return messages
    if isinstance(seen, list):
        if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in seen):
            raise EnvError("reset returned content that is not text; this model reads text only")
        seen = "".join(part["text"] for part in seen)
    if not isinstance(seen, str):
        raise EnvError(f"reset returned a {type(seen).__name__}; environments of TRL's kind return None or a text")
    last = messages[-1]
    content = last.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part.get("text", "") for part in content)
    return [*messages[:-1], {**last, "content": content + seen}]
