"""Environments of OpenEnv (`openenv-core`): a server that plays, and a client of it with `reset` and `step`.

    env:
      environment: groupwise.envs.openenv:OpenEnvironment
      args:
        base_url: http://127.0.0.1:8000
        client: my_env.client:MyEnv        an EnvClient; without it the package's GenericEnvClient, which takes objects
        action: my_env.models:MyAction     the assistant's message -> an action; see below
        text_field: message
        instructions: "Guess the word."

Each episode has a connection, which is a session of the server, so the server must allow as many as `env.concurrency`.
`reset` gets the seed and the case's columns (but its prompt); servers leave out what theirs does not take. The policy
is told the case's prompt or the instructions, then each observation: its one text as it is, more fields as JSON, or
what `show` (`module:function`) makes of it.

An action is made of the message's text: a JSON object is taken as the action's fields, any other text as its
`text_field`. `action` is called with these fields by name; without it they are the action.

The rewards of the steps are the rewards of the turns. Where there is no `data`, `episodes` makes that many cases, which
differ by their seed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from inspect import isawaitable
from typing import Any

from groupwise.envs.base import Observation, StepResult
from groupwise.envs.load import load_once
from groupwise.errors import ConfigError, LoadError
from groupwise.types import Message

GENERIC = "openenv.core.generic_client:GenericEnvClient"
OF_THE_STEP = ("reward", "done", "metadata")  # fields of an observation that are not shown


class OpenEnvironment:
    """An episode on a server. The arguments are at the head of this file."""

    def __init__(
        self,
        base_url: str,
        client: str | None = None,
        action: str | None = None,
        show: str | None = None,
        text_field: str = "message",
        instructions: str | None = None,
        episodes: int = 0,
        folder: str | None = None,
    ):
        def load(reference: str | None) -> Callable[..., Any] | None:
            return None if reference is None else load_once(reference, folder=folder)

        try:
            self._client_type = load_once(client or GENERIC, folder=folder)
        except LoadError as error:
            if client is not None:
                raise
            raise ConfigError("OpenEnv is not installed", hint="pip install openenv-core") from error
        self._action, self._show = load(action), load(show)
        self._base_url, self._text_field = base_url, text_field
        self._instructions, self._episodes = instructions, episodes
        self._client: Any = None

    def cases(self) -> list[dict[str, Any]]:
        """Cases that differ by their seed."""
        if self._episodes < 1:
            raise ConfigError("an OpenEnv server has no dataset", hint="set data.source, or env.args.episodes")
        return [{"seed": number} for number in range(self._episodes)]

    async def reset(self, case: Mapping[str, Any], seed: int) -> Observation:
        """Connect, and begin an episode of the server's."""
        self._client = self._client_type(base_url=self._base_url)
        columns = {name: value for name, value in case.items() if name != "prompt"}
        result = await _finished(self._client.reset(**{"seed": seed % (1 << 31), **columns}))
        messages = _told(case.get("prompt") or self._instructions)
        seen = self._shown(result.observation)
        if messages and messages[-1]["role"] == "user" and isinstance(seen, str):
            messages[-1] = Message(role="user", content=f"{messages[-1].get('content') or ''}\n\n{seen}".strip())
            return Observation(messages=messages)
        return Observation(messages=[*messages, *_told(seen)])

    async def step(self, message: Message) -> StepResult:
        """Act; what the server observes, its reward, and whether the episode is over."""
        result = await _finished(self._client.step(self._acted(str(message.get("content") or ""))))
        reward = None if result.reward is None else float(result.reward)
        return StepResult(messages=_told(self._shown(result.observation)), reward=reward, done=bool(result.done))

    async def close(self) -> None:
        """End the session."""
        if self._client is not None:
            await _finished(self._client.close())

    # ---- inside ----
    def _acted(self, text: str) -> Any:
        try:
            fields = json.loads(text)
        except ValueError:
            fields = None
        if not isinstance(fields, dict):
            fields = {self._text_field: text}
        return fields if self._action is None else self._action(**fields)

    def _shown(self, observation: Any) -> Any:
        """An observation as a text, or as what `show` makes of it."""
        if self._show is not None:
            return self._show(observation)
        fields = {name: each for name, each in _fields(observation).items() if name not in OF_THE_STEP}
        texts = [each for each in fields.values() if isinstance(each, str)]
        if len(texts) == len(fields) == 1:
            return texts[0]
        return json.dumps(fields, ensure_ascii=False, default=str)


def _fields(observation: Any) -> dict[str, Any]:
    if isinstance(observation, Mapping):
        return dict(observation)
    dump: Any = getattr(observation, "model_dump", None)  # pydantic's
    if dump is not None:
        return dump()
    if dataclasses.is_dataclass(observation) and not isinstance(observation, type):
        return dataclasses.asdict(observation)
    return {"observation": observation}


def _told(said: Any) -> list[Message]:
    """Messages; a text is a user's."""
    if said is None:
        return []
    return [Message(role="user", content=said)] if isinstance(said, str) else list(said)


async def _finished(value: Any) -> Any:
    return await value if isawaitable(value) else value
