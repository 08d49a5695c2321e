"""A base class for environments in which the policy calls tools until it answers.

    class Shop(ToolEnv):
        def first_message(self, case, seed):
            self.stock = dict(case["stock"])
            return case["question"]                       a user's text, messages, or an Observation

        def look(self, item: str) -> int:
            '''How many of an item there are.'''
            return self.stock[item]

        tools = (look, search, mcp_tools(url=...))        methods, functions, Tools, ToolBoxes

        def score(self, episode):
            return float(episode.answer == "4")

Each turn's calls are answered by a `tool` message each, in their order. Functions and MCP tools run at once; the
environment's own methods one after another, in the episode's thread, so that parallel calls change its state in the
order in which they were written. Calls that failed say why, and so do those that could not be read. The episode is
done when a message has no call. The numbers `tool_errors` and `tool_<outcome>` are logged (`tools.CallOutcome`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from inspect import isawaitable, isfunction
from typing import Any

from groupwise.errors import EnvError
from groupwise.tasks.env import Observation, StepResult
from groupwise.tasks.own_thread import OwnThread
from groupwise.tasks.tools import CallableTool, CallOutcome, ToolBox, ToolResult, tool_message
from groupwise.types import Message

FAILURES = tuple(outcome for outcome in CallOutcome if outcome is not CallOutcome.OK)


class ToolEnv:
    """Offers `tools` and answers calls; a subclass has `first_message`, `tools` and `score`.

    A subclass with a `reset` of its own ends it with `return self.offer(messages)`.
    """

    tools: Sequence[Any] | ToolBox = ()
    thread: OwnThread | None = None  # the episode's, in which its methods are called; set before the first step
    toolbox: ToolBox | None = None  # the tools, bound to this instance
    _spare: OwnThread | None = None

    def first_message(self, case: Mapping[str, Any], seed: int) -> Any:
        """Return the policy's first prompt: a user's text, messages, or an Observation. May be async."""
        raise EnvError(
            f"{type(self).__name__} has no first_message(case, seed)", hint="write it; it returns the question"
        )

    def reset(self, case: Mapping[str, Any], seed: int) -> Any:
        """Return the observation that begins an episode, with the tools."""
        value = self.first_message(case, seed)
        return self._offer_when_there(value) if isawaitable(value) else self.offer(value)

    def offer(self, said: Observation | Sequence[Message] | str) -> Observation:
        """`said` with the tools, and any that an Observation brings. Raises ConfigError for a value that is not a
        tool."""
        self.toolbox = ToolBox(map(self._bound, self.tools))
        more: Sequence[Mapping[str, Any]] = ()
        if isinstance(said, Observation):
            said, more = said.messages, said.tools
        messages = [Message(role="user", content=said)] if isinstance(said, str) else said
        return Observation(messages=messages, tools=(*self.toolbox.definitions, *more))

    async def step(self, message: Message) -> StepResult:
        """Return the answers to a message's calls; done when it has none."""
        said: Mapping[str, Any] = message
        malformed: Sequence[str] = said.get("malformed_calls") or ()
        answers = [
            *await self._answers(said.get("tool_calls") or ()),
            *map(_malformed, range(len(malformed)), malformed),
        ]
        kinds = [answer.outcome for answer in answers]
        info = {f"tool_{kind}": float(kinds.count(kind)) for kind in FAILURES}
        info["tool_errors"] = float(sum(kind is not CallOutcome.OK for kind in kinds))
        return StepResult(messages=[answer.message for answer in answers], done=not answers, info=info)

    def close(self) -> None:
        """Let go of what the base class holds. A subclass that overrides it calls `super().close()`."""
        if self._spare is not None:
            self._spare.close()

    # ---- inside ----
    async def _offer_when_there(self, value: Any) -> Observation:
        return self.offer(await value)

    def _bound(self, given: Any) -> Any:
        """Return a function of the class as the method that it is; a method as a tool that runs in the episode's
        thread."""
        if isfunction(given) and any(vars(one).get(given.__name__) is given for one in type(self).__mro__):
            given = getattr(self, given.__name__)
        if getattr(given, "__self__", None) is self:
            return CallableTool.from_function(given, thread=self._in_own_thread)
        return given

    async def _answers(self, calls: Sequence[Mapping[str, Any]]) -> list[ToolResult]:
        if self.toolbox is None:
            self.toolbox = ToolBox(map(self._bound, self.tools))
        box, answers = self.toolbox, dict[int, ToolResult]()

        async def answer(numbers: Sequence[int]) -> None:
            for i in numbers:
                answers[i] = await box.answer(calls[i])

        own = [i for i, call in enumerate(calls) if self._is_own(call, box)]
        await asyncio.gather(answer(own), *(answer([i]) for i in range(len(calls)) if i not in own))
        return [answers[i] for i in range(len(calls))]

    def _is_own(self, call: Mapping[str, Any], box: ToolBox) -> bool:
        tool = box.get(str((call.get("function") or {}).get("name")))
        return tool is not None and tool.owner is self

    async def _in_own_thread(self, function: Callable[[], Any]) -> Any:
        if self.thread is None and self._spare is None:
            self._spare = OwnThread("tools")
        thread = self.thread or self._spare
        assert thread is not None
        return await thread.call(function, timeout_s=None, what="a tool")


def _malformed(index: int, report: str) -> ToolResult:
    """Return the answer to a call that could not be read; its id is one that every chat template takes."""
    message = tool_message(f"Error: {report}", call_id=f"bad{index:06d}", name="malformed_call")
    return ToolResult(message, CallOutcome.MALFORMED)
