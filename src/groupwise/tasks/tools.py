"""Python functions as tools: a function -> OpenAI's definition of it, and a model's call -> a `tool` message.

    def search(query: str, limit: int = 5) -> list[str]:
        \"\"\"Search the notes.

        Args:
            query: Words that must all occur.
        \"\"\"

    box = ToolBox([search, Tool.from_function(slow, time_limit_s=60)])
    box.definitions                    [{"type": "function", "function": {"name": "search", "description": ..., ...}}]
    await box.call(tool_call)          {"role": "tool", "tool_call_id": "call_0", "name": "search", "content": "[...]"}

Type hints become the JSON schema and check the arguments (pydantic, which reads "5" as 5 where an int is wanted). A
call is always answered: whatever goes wrong comes back to the model as a message beginning with "Error:", counted by
its kind (`CallOutcome`). A result that is not text is sent as JSON, and an image of PIL's, or a list that has some, as
the parts of a message, for models that see. Functions that are not async run in daemon threads,
that a time limit abandons but cannot end: work that may never end, or that is not trusted, belongs in a process.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from enum import StrEnum
from inspect import isawaitable, iscoroutinefunction
from typing import Any
from weakref import WeakKeyDictionary

from pydantic_core import to_json

from groupwise.errors import ConfigError
from groupwise.pictures import is_image
from groupwise.tasks.tool_schema import signature_of
from groupwise.types import Message

Content = str | list[dict[str, Any]]  # of a message: a text, or parts

TIME_LIMIT_S = 10.0  # below env.step_timeout_s, which costs the whole episode

LONGEST_RESULT = 10_000  # characters

THREADS = 256  # calls of functions that are not async, at once and on one event loop; others wait for their turn


class CallOutcome(StrEnum):
    """The outcome of a tool call."""

    OK = "ok"
    UNKNOWN = "unknown_tool"
    ARGUMENTS = "wrong_arguments"
    FAILED = "exception"
    TIME = "time_limit"
    MALFORMED = "malformed"


class ToolError(Exception):
    """A tool's answer is an error: raise it in a tool to choose the message that the model reads."""

    def __init__(self, message: str, outcome: CallOutcome = CallOutcome.FAILED):
        super().__init__(message)
        self.outcome = outcome


@dataclass(frozen=True, kw_only=True)
class CallableTool:
    """A tool that a model can call. `run` takes the arguments as they came and may raise anything.

    `parameters` is a JSON schema of type object. `owner` is the object whose method it is, if it is one.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    run: Callable[[dict[str, Any]], Awaitable[Any]]
    time_limit_s: float = TIME_LIMIT_S
    owner: Any = None

    @classmethod
    def from_function(
        cls,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        time_limit_s: float = TIME_LIMIT_S,
        thread: Thread | None = None,
    ) -> CallableTool:
        """Return a function or bound method, async or not, as a tool. Its docstring's first part is the description.

        Args:
            time_limit_s: seconds that a call may take.
            thread: the executor of functions that are not async, instead of separate threads.

        Raises:
            ConfigError: a parameter has no type hint, no schema, or cannot be passed by name.
        """
        signature = signature_of(function)
        submit = thread or in_thread

        async def run(arguments: dict[str, Any]) -> Any:
            try:
                keywords = signature.check(arguments)
            except ValueError as error:
                raise ToolError(f"wrong arguments for {tool.name}: {error}", CallOutcome.ARGUMENTS) from None
            if iscoroutinefunction(function):
                return await function(**keywords)
            result = await submit(lambda: function(**keywords))
            return await result if isawaitable(result) else result

        tool = cls(
            name=name or signature.name,
            description=signature.description if description is None else description,
            parameters=signature.parameters,
            run=run,
            time_limit_s=time_limit_s,
            owner=getattr(function, "__self__", None),
        )
        return tool

    @property
    def definition(self) -> dict[str, Any]:
        """Return the tool in OpenAI's form, which chat templates take."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolResult:
    """The message for a call, and what became of it."""

    message: Message
    outcome: CallOutcome


class ToolBox:
    """The tools of an environment. `outcomes` counts the calls so far, by kind.

    Args:
        tools: functions, methods, Tools, or other boxes, whose tools are taken over.
        longest_result: characters of a result; the rest is cut, and the model is told so.

    Raises:
        ConfigError: two tools have one name, or a function cannot be a tool.
    """

    def __init__(
        self, tools: Iterable[CallableTool | ToolBox | Callable[..., Any]], *, longest_result: int = LONGEST_RESULT
    ):
        self.outcomes: Counter[CallOutcome] = Counter()
        self._longest = longest_result
        self._tools: dict[str, CallableTool] = {}
        for given in tools:
            for tool in given if isinstance(given, ToolBox) else [given]:
                self._add(tool if isinstance(tool, CallableTool) else CallableTool.from_function(tool))

    def __iter__(self):
        return iter(self._tools.values())

    def __len__(self) -> int:
        return len(self._tools)

    def get(self, name: str) -> CallableTool | None:
        """Return the tool of that name."""
        return self._tools.get(name)

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """Return all tools in OpenAI's form."""
        return [tool.definition for tool in self]

    async def call(self, call: Mapping[str, Any]) -> Message:
        """Return the `tool` message that answers one of a message's `tool_calls`. Never raises."""
        return (await self.answer(call)).message

    async def answer(self, call: Mapping[str, Any]) -> ToolResult:
        """See `call`, with the outcome."""
        function = call.get("function") or {}
        name = str(function.get("name", ""))
        try:
            content, outcome = _content_of(await self._run(name, function.get("arguments"))), CallOutcome.OK
        except ToolError as error:
            content, outcome = f"Error: {error}", error.outcome
        self.outcomes[outcome] += 1
        return ToolResult(
            tool_message(_each_text(content, self._shortened), call_id=str(call.get("id", "")), name=name), outcome
        )

    def _add(self, tool: CallableTool) -> None:
        if tool.name in self._tools:
            raise ConfigError(
                f"two tools are named {tool.name!r}", hint="rename one: Tool.from_function(f, name=...) or prefix=..."
            )
        self._tools[tool.name] = tool

    async def _run(self, name: str, arguments: Any) -> Any:
        """Return the tool's result. Raises ToolError and, where the caller is cancelled, CancelledError; nothing
        else."""
        tool = self._tools.get(name)
        if tool is None:
            raise ToolError(_unknown(name, list(self._tools)), CallOutcome.UNKNOWN)
        given = _object_of(arguments, name)
        limit = asyncio.timeout(tool.time_limit_s)
        _clock.set(lambda on: limit.reschedule(asyncio.get_running_loop().time() + tool.time_limit_s if on else None))
        try:
            async with limit:
                return await tool.run(given)
        except ToolError:
            raise
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise ToolError(f"{name} was cancelled") from None
        except BaseException as error:
            if isinstance(error, TimeoutError) and limit.expired():
                message = f"{name} took longer than {tool.time_limit_s:g} s and was given up"
                raise ToolError(message, CallOutcome.TIME) from None
            if isinstance(error, KeyboardInterrupt | GeneratorExit):
                raise
            raise ToolError(f"{name} raised {type(error).__name__}: {_one_line(error)}") from error

    def _shortened(self, text: str) -> str:
        more = len(text) - self._longest
        return text if more <= 0 else f"{text[: self._longest]}\n... ({more:,} more characters were cut)"


def tool_message(content: Content, *, call_id: str, name: str) -> Message:
    """Return a tool's answer as a message; half surrogate pairs, which no tokenizer takes, become "?"."""
    sendable = _each_text(content, lambda text: text.encode("utf-8", "replace").decode())
    return Message(role="tool", tool_call_id=call_id, name=name, content=sendable)


def _each_text(content: Content, change: Callable[[str], str]) -> Content:
    """Return a content with every text in it changed."""
    if isinstance(content, str):
        return change(content)
    return [{**part, "text": change(part["text"])} if "text" in part else part for part in content]


# ---- threads ----
Thread = Callable[[Callable[[], Any]], Awaitable[Any]]

_clock: ContextVar[Callable[[bool], None]] = ContextVar("clock", default=lambda on: None)  # of the running call's limit

_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


async def in_thread(function: Callable[[], Any]) -> Any:
    """Run `function` in a daemon thread and return its result; at most `THREADS` are waited for at once.

    A caller that stops waiting leaves its thread behind, which delays neither other calls nor the end of the process.
    The time for which a call waits for its turn does not count as the tool's.
    """
    loop = asyncio.get_running_loop()
    _clock.get()(False)
    async with _slots.setdefault(loop, asyncio.Semaphore(THREADS)):
        _clock.get()(True)
        future: asyncio.Future[Any] = loop.create_future()
        context = copy_context()

        def work() -> None:
            try:
                result, error = context.run(function), None
            except BaseException as raised:
                result, error = None, raised
            try:
                loop.call_soon_threadsafe(_settle, future, result, error)
            except RuntimeError:  # the loop is closed: no call waits
                return

        threading.Thread(target=work, name="tool", daemon=True).start()
        return await future


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():  # given up
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):
        future.set_exception(error)
    else:  # what a future cannot carry: SystemExit, KeyboardInterrupt, StopIteration
        future.set_exception(ToolError(f"the tool raised {type(error).__name__}: {error}"))


# ---- texts ----
def _unknown(name: str, known: Sequence[str]) -> str:
    similar = difflib.get_close_matches(name, known, n=1)
    guess = f"did you mean {similar[0]!r}? " if similar else ""
    return f"there is no tool {name[:80]!r}; {guess}The tools are {', '.join(known) or 'none'}."


def _object_of(arguments: Any, name: str) -> dict[str, Any]:
    """Return the arguments as an object; OpenAI's clients send them as JSON text. Raises ToolError."""
    try:
        value = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        raise ToolError(f"the arguments for {name} are not JSON: {error}", CallOutcome.ARGUMENTS) from None
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ToolError(
            f"the arguments for {name} are of type {type(value).__name__}; give an object", CallOutcome.ARGUMENTS
        )
    return dict(value)


def _content_of(result: Any) -> Content:
    """Return a result as a message's content: parts where there are images, else text. Raises ToolError as
    `_text_of`."""
    several = result if isinstance(result, list | tuple) else [result]
    if not any(map(is_image, several)):
        return _text_of(result)
    return [
        {"type": "image", "image": each} if is_image(each) else {"type": "text", "text": _text_of(each)}
        for each in several
    ]


def _text_of(result: Any) -> str:
    """Return a result as the model reads it. Raises ToolError where it cannot be written as JSON."""
    if isinstance(result, str):
        return result
    try:
        return to_json(result, fallback=str).decode()
    except Exception as error:
        raise ToolError(f"the result cannot be written as JSON: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 500 else f"{text[:500]}..."
