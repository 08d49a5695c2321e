"""Environments of OpenEnv (`openenv-core`): a server that plays, and a client of it with `reset` and `step`.

    env:
      environment: groupwise.bridges.openenv:OpenEnvironment
      args:
        base_url: http://127.0.0.1:8000
        client: my_env.client:MyEnv        an EnvClient; without it the package's GenericEnvClient, which takes
    objects
        action: my_env.models:MyAction     the assistant's message -> an action; see below
        text_field: message
        instructions: "Guess the word."

Each episode has a connection, which is a session of the server, so the server must allow as many as
`env.concurrency`. `reset` gets the seed and the case's columns (but its prompt); servers leave out what theirs does
not take. The policy is told the case's prompt or the instructions, then each observation: its one text as it is, more
fields as JSON, or what `show` (`module:function`) makes of it.

An action is made of the message's text: a JSON object is taken as the action's fields, any other text as its
`text_field`. `action` is called with these fields by name; without it they are the action.

A server may have tools (its `MCPEnvironment`): a client that lists them (the package's MCPToolClient and those made
of it) has them offered to the policy, and so has any client with `tools: true`. Each call of a message is a step of
the server's, one after another; its result or error is the call's answer, and the turn's reward the sum of theirs. A
message without a call ends such an episode, or is an action where `action` is given.

The rewards of the steps are the rewards of the turns. Where there is no `data`, `episodes` makes that many cases,
which differ by their seed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from inspect import isawaitable
from typing import Any

from groupwise.errors import ConfigError, LoadError
from groupwise.tasks.env import Observation, StepResult
from groupwise.tasks.env_loading import load_once
from groupwise.tasks.tool_env import ToolEnv
from groupwise.tasks.tools import CallableTool, CallOutcome, ToolError
from groupwise.types import Message

GENERIC = "openenv.core.generic_client:GenericEnvClient"

CALL = "openenv.core.env_server.mcp_types:CallToolAction"

OUTCOMES = {"tool_not_found": CallOutcome.UNKNOWN, "invalid_args": CallOutcome.ARGUMENTS, "timeout": CallOutcome.TIME}

OF_THE_STEP = ("reward", "done", "metadata")  # fields of an observation that are not shown


class OpenEnvironment(ToolEnv):
    """An episode on a server. The arguments are at the head of this file."""

    def __init__(
        self,
        base_url: str,
        client: str | None = None,
        action: str | None = None,
        show: str | None = None,
        text_field: str = "message",
        tools: bool | None = None,
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
        self._with_tools = callable(getattr(self._client_type, "list_tools", None)) if tools is None else tools
        self._client: Any = None
        self._in_turn = asyncio.Lock()  # a session answers one step at a time
        self._results: list[Any] = []  # of this turn's calls
        self._broken: Exception | None = None  # what the client raised in one of them

    def cases(self) -> list[dict[str, Any]]:
        """Return cases that differ by their seed."""
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
        if self._with_tools:
            self.tools = await self._listed()
        if messages and messages[-1]["role"] == "user" and isinstance(seen, str):
            messages[-1] = Message(role="user", content=f"{messages[-1].get('content') or ''}\n\n{seen}".strip())
            return self.offer(messages)
        return self.offer([*messages, *_told(seen)])

    async def step(self, message: Message) -> StepResult:
        """Act, or call the tools; what the server observes, its reward, and whether the episode is over."""
        called = bool(message.get("tool_calls") or message.get("malformed_calls"))
        if self.tools and (called or self._action is None):
            return await self._call(message)
        result = await _finished(self._client.step(self._acted(str(message.get("content") or ""))))
        reward = None if result.reward is None else float(result.reward)
        return StepResult(messages=_told(self._shown(result.observation)), reward=reward, done=bool(result.done))

    async def close(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride], either may be
        """End the session."""
        if self._client is not None:
            await _finished(self._client.close())
        super().close()

    # ---- tools ----
    async def _call(self, message: Message) -> StepResult:
        """Return the answers to a message's calls. Raises what the client raised in one."""
        self._results = []
        answered = await super().step(message)
        if self._broken is not None:
            raise self._broken
        rewards = [float(each.reward) for each in self._results if each.reward is not None]
        over = any(each.done for each in self._results)
        return dataclasses.replace(answered, reward=sum(rewards) if rewards else None, done=answered.done or over)

    async def _listed(self) -> list[CallableTool]:
        """Return the server's tools. Raises ConfigError where it has none."""
        listing = getattr(self._client, "list_tools", None)
        if listing is not None:
            found: Any = await _finished(listing())
        else:
            answer = await _finished(self._client.step({"type": "list_tools"}))
            found = _fields(answer.observation).get("tools")
        tools = [_fields(each) for each in found or ()]
        if not tools:
            raise ConfigError(
                f"the server at {self._base_url} lists no tools", hint="set env.args.tools: false, or its client"
            )
        return [self._tool(each) for each in tools]

    def _tool(self, listed: Mapping[str, Any]) -> CallableTool:
        name = str(listed["name"])

        async def run(arguments: dict[str, Any]) -> Any:
            async with self._in_turn:
                if any(each.done for each in self._results):
                    raise ToolError("the episode is over")
                try:
                    result = await _finished(self._client.step(self._call_of(name, arguments)))
                except Exception as error:  # a lost connection is not an answer of the tool
                    self._broken = error
                    raise
                self._results.append(result)
            return _answer(_fields(result.observation))

        schema = listed.get("input_schema") or listed.get("inputSchema") or {"type": "object", "properties": {}}
        description = str(listed.get("description") or "")
        # no limit of its own: a session that was left in the middle of a step is of no use; env.step_timeout_s ends it
        return CallableTool(name=name, description=description, parameters=schema, run=run, time_limit_s=math.inf)

    def _call_of(self, name: str, arguments: dict[str, Any]) -> Any:
        """Return what the client sends as a call."""
        if getattr(self._client, "list_tools", None) is not None:
            return load_once(CALL)(tool_name=name, arguments=arguments)
        return {"type": "call_tool", "tool_name": name, "arguments": arguments}

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
        """Return an observation as a text, or as what `show` makes of it."""
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
    """Return messages; a text becomes a user's message."""
    if said is None:
        return []
    return [Message(role="user", content=said)] if isinstance(said, str) else list(said)


async def _finished(value: Any) -> Any:
    return await value if isawaitable(value) else value


def _answer(observation: Mapping[str, Any]) -> Any:
    """Return the result in what a server observed of a call. Raises ToolError for an error."""
    if error := observation.get("error"):
        said = _fields(error)
        kind = str(getattr(said.get("error_type"), "value", said.get("error_type")))
        raise ToolError(str(said.get("message") or error), OUTCOMES.get(kind, CallOutcome.FAILED))
    result = observation.get("result")
    if isinstance(result, str | int | float | bool | Sequence | None):
        return result
    said = _fields(result)  # MCP's CallToolResult
    texts = [part["text"] for part in map(_fields, said.get("content") or ()) if isinstance(part.get("text"), str)]
    if said.get("is_error") or said.get("isError"):
        raise ToolError("\n".join(texts))
    if said.get("data") is not None:
        return said["data"]
    return "\n".join(texts) if texts else said
