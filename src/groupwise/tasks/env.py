"""Environments: what a user's class must offer (`reset`, `step`, ...), the checks of what it returns, and `ToolEnv`.

    class Guess:
        def __init__(self, highest=10): ...                         the arguments come from the configuration (env.args)
        def cases(self): return [{"secret": 4}, {"secret": 9}]      the dataset; or the configuration's `data`
        def reset(self, case, seed): return f"I think of a number up to {self.highest}. Guess."
        def step(self, message):                                    what the policy said -> what it hears
            return StepResult(messages=[{"role": "user", "content": "Higher."}], reward=0.1)
        def score(self, episode): return 1.0                        optional, at the end
        def close(self): ...                                        optional, always

Any method may be async. No base class is needed; what is returned may be short for what is meant:

    reset   Observation | messages | a user's text
    step    StepResult | (messages, reward, done) | (messages, reward, done, info) | messages | a user's text | None,
            which says nothing more: done

An episode's reward is the sum of its turns' rewards and its score. `case` is a row of the dataset: its columns by name.
Everything random must come from `seed`, which is the same for the episodes of one group: then they differ by what the
policy did, and by nothing else.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from inspect import isawaitable, isfunction
from pathlib import Path
from typing import Any

from groupwise.config.load import load_object, with_folder
from groupwise.config.run import EnvConfig
from groupwise.errors import ConfigError, DataError, EnvError, GroupwiseError
from groupwise.platform import run_coroutine
from groupwise.tasks.tools import CallableTool, CallOutcome, ToolBox, ToolResult, tool_message
from groupwise.types import MAX_REWARD, Message, Prompt, Rollout

REWARD = "env"  # the name of an environment's reward among those of reward functions

ROLES = ("system", "developer", "user", "assistant", "tool")
SAYING = ("system", "developer", "user", "tool")  # the assistant's turns are the policy's


@dataclass(frozen=True, kw_only=True)
class Observation:
    """How an episode begins: messages up to where the assistant speaks, and tools it may call, in OpenAI's form.

    `state` names the state in which the policy now speaks, for `algo.credit: gigpo`: episodes of a group are compared
    turn by turn where they are in the same one. None: what it was told is its name.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    state: str | None = None


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What came of a turn: messages that the policy hears next, a reward for the turn, whether the episode is over.

    `info` are numbers to log, by name; their means over episodes are the metrics `env/<name>`. `state` is the name of
    the state that the policy speaks in next, as `Observation.state`.
    """

    messages: Sequence[Message] = ()
    reward: float | None = None
    done: bool = False
    info: Mapping[str, float] = field(default_factory=dict)
    state: str | None = None


@dataclass(frozen=True, kw_only=True)
class MoveResult:
    """What came of a player's turn in a game of several (`self_play`), each by player: what it is told next, and its
    reward, which counts for the last turn that it took. `next` speaks next (None: whoever is next in `players`), in the
    state `state` (as `Observation.state`)."""

    messages: Mapping[str, Any] = field(default_factory=dict)
    rewards: Mapping[str, float] = field(default_factory=dict)
    next: str | None = None
    done: bool = False
    info: Mapping[str, float] = field(default_factory=dict)
    state: str | None = None


@dataclass(frozen=True, kw_only=True)
class Episode:
    """What `score` gets: all that was said, the first observation included, and how it ended.

    `stop` is "done", or the limit that ended it: "max_turns", "max_tokens", "max_tool_calls", "context", "timeout".
    """

    case: Mapping[str, Any]
    seed: int
    messages: tuple[Message, ...]
    rewards: tuple[float | None, ...]  # one per turn
    stop: str

    @property
    def answer(self) -> str:
        """The text of the assistant's last message; "" without one."""
        said = [message for message in self.messages if message["role"] == "assistant"]
        content = said[-1].get("content") if said else None
        return content if isinstance(content, str) else ""


# ---- what user code returns -> the types above ----


def observation_of(value: Any, *, limit: int) -> Observation:
    """Check what `reset` returned; `limit` is the most characters of all its messages. Raises EnvError."""
    if isinstance(value, Observation):
        messages, tools, state = value.messages, value.tools, state_of(value.state, "reset")
    else:
        messages, tools, state = value, (), None
    checked = messages_of(messages, "reset", limit=limit, roles=ROLES)
    if not checked:
        raise EnvError("reset returned no messages", hint="return at least one: what the policy is asked")
    for tool in tools:
        if not isinstance(tool, Mapping) or not tool:
            raise EnvError(f"reset returned the tool {tool!r}; a tool is an object with a name and parameters")
    return Observation(messages=checked, tools=tuple(dict(tool) for tool in tools), state=state)


def step_result_of(value: Any, *, limit: int) -> StepResult:
    """Check what `step` returned. Raises EnvError."""
    match value:
        case StepResult():
            result = value
        case None:
            return StepResult(done=True)
        case tuple() if len(value) in (3, 4):
            result = StepResult(
                messages=value[0] if value[0] is not None else (),
                reward=value[1],
                done=value[2],
                info=value[3] if len(value) == 4 else {},
            )
        case str() | list() | tuple() | Mapping():
            result = StepResult(messages=value)  # type: ignore[arg-type]
        case _:
            raise EnvError(f"step returned {_short(value)}; return a StepResult, messages or a text")
    done = done_of(result.done)
    messages = messages_of(result.messages, "step", limit=limit, roles=SAYING)
    if not messages and not done:
        raise EnvError("step returned no messages and is not done: there is nothing the policy could answer to")
    reward = None if result.reward is None else reward_of(result.reward, "step")
    return StepResult(
        messages=messages,
        reward=reward,
        done=done,
        info=numbers_of(result.info),
        state=state_of(result.state, "step"),
    )


def openings_of(value: Any, players: Sequence[str], *, limit: int) -> dict[str, Observation]:
    """Check what `reset` of a game returned: what each player is told. Raises EnvError."""
    if not isinstance(value, Mapping) or not value:
        raise EnvError(f"reset returned {_short(value)}; return what each player is told, by its name")
    return {_player(player, players, "reset"): observation_of(told, limit=limit) for player, told in value.items()}


def move_result_of(value: Any, players: Sequence[str], *, limit: int) -> MoveResult:
    """Check what `step` of a game returned. Raises EnvError."""
    if not isinstance(value, MoveResult):
        raise EnvError(f"step returned {_short(value)}; return a MoveResult")
    told = {
        _player(player, players, "step"): messages_of(messages, "step", limit=limit, roles=SAYING)
        for player, messages in value.messages.items()
    }
    return replace(
        value,
        messages=told,
        rewards=rewards_of(value.rewards, players, "step"),
        next=None if value.next is None else _player(value.next, players, "step"),
        done=done_of(value.done),
        info=numbers_of(value.info),
        state=state_of(value.state, "step"),
    )


def rewards_of(value: Any, players: Sequence[str], method: str) -> dict[str, float]:
    """Check rewards by player; None gives none. Raises EnvError."""
    if not isinstance(value, Mapping | None):
        raise EnvError(f"{method} returned {_short(value)}; rewards are an object, a number by player")
    return {_player(player, players, method): reward_of(reward, method) for player, reward in (value or {}).items()}


def _player(name: Any, players: Sequence[str], method: str) -> str:
    if name not in players:
        raise EnvError(f"{method} named the player {_short(name)}; the players are {', '.join(players)}")
    return name


def messages_of(value: Any, method: str, *, limit: int, roles: Sequence[str]) -> tuple[Message, ...]:
    """Checked messages; a text is a user's message. Raises EnvError."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    elif isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, Sequence):
        raise EnvError(f"{method} returned {_short(value)}; messages are a text or a list of objects with a role")
    size, checked = 0, []
    for message in value:
        if not isinstance(message, Mapping) or message.get("role") not in roles:
            role = message.get("role") if isinstance(message, Mapping) else message
            raise EnvError(f"{method} returned a message of role {_short(role)}; the roles are {', '.join(roles)}")
        content = message.get("content")
        if not isinstance(content, str | list | None):
            raise EnvError(f"{method} returned a message with the content {_short(content)}; it must be a text")
        size += len(content) if isinstance(content, str) else len(str(content or ""))
        checked.append(dict(message))
    if size > limit:
        raise EnvError(
            f"{method} returned {size:,} characters; env.max_characters is {limit:,}", hint="shorten it, or raise that"
        )
    return tuple(checked)


def state_of(value: Any, method: str) -> str | None:
    """Check the name of a state. Raises EnvError."""
    if value is not None and not isinstance(value, str):
        raise EnvError(f"{method} returned the state {_short(value)}; a state's name is a text")
    return value


def reward_of(value: Any, method: str, *, did: str = "returned") -> float:
    """Check a reward: a finite float of sensible size. Raises EnvError."""
    try:
        number = float(value) if not isinstance(value, str | bytes) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not abs(number) <= MAX_REWARD:
        message = f"{method} {did} {_short(value)}; a reward is a finite number within {MAX_REWARD:g} of 0"
        raise EnvError(message, field=method)
    return number


def done_of(value: Any) -> bool:
    """Check whether an episode is over. Raises EnvError."""
    if not isinstance(value, bool | int) or isinstance(value, float):
        raise EnvError(f"step returned done={_short(value)}; it is true or false")
    return bool(value)


def numbers_of(info: Any) -> dict[str, float]:
    """The numbers of `info` that are finite. Raises EnvError where it is no object."""
    if not isinstance(info, Mapping):
        raise EnvError(f"step returned info={_short(info)}; it is an object of numbers by name")
    numbers = {str(name): value for name, value in info.items() if isinstance(value, int | float)}
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}... ({type(value).__name__})"


def told_of(name: str, error: GroupwiseError) -> str:
    """The error's message as one of the environment `name`, which stands before it unless it names its method."""
    return error.message if (error.field or "").startswith(name) else f"{name}: {error.message}"


def priced(played: Rollout, config: EnvConfig) -> Rollout:
    """The episode with its `reward` set; for one with an `error`, what `env.on_error` prescribes.

    Raises EnvError where an error is to end the run.
    """
    reward, error, stop = played.reward, played.error, played.stop
    if error is not None:
        if config.on_error == "stop":
            hint = "env.on_error: exclude goes on without such episodes"
            raise EnvError(error, hint=hint, kind=played.error_kind)
        reward, stop = 0.0 if config.on_error == "zero" and played.turns else None, "error"
    rewards, left = ({}, error) if reward is None else ({REWARD: reward}, None)
    info = {**played.info, "turns": float(len(played.turns)), "failed": float(error is not None)}
    kind = None if left is None else played.error_kind
    return replace(played, rewards=rewards, reward=reward, error=left, error_kind=kind, stop=stop, info=info)


# ----------------------------------------------------------------------------------------------------------------------
# Load an environment by name, check that it is one, and make an instance for each episode.
#
# Two contracts are known: `reset` and `step` (`base`), and the three methods of aitraining (`build_dataset`,
# `score_episode`, `get_tools`), which `legacy` describes.
# ----------------------------------------------------------------------------------------------------------------------

MODERN, THREE_METHODS = ("reset", "step"), ("build_dataset", "score_episode")


NAMED = {  # environments of other packages by name, as in textarena:GuessTheNumber-v0; what they call the name
    "textarena": ("groupwise.tasks.compat.textarena:TextArenaGame", "game"),
    "reasoning-gym": ("groupwise.tasks.compat.reasoning_gym:ReasoningGymEnv", "task"),
}


@dataclass(frozen=True, kw_only=True)
class EnvFactory:
    """Makes instances of a user's environment class with `env.args`; implements `tasks.episode.Environments`."""

    name: str
    make_one: Callable[..., Any]
    args: Mapping[str, Any]
    legacy: bool = False
    patience_s: float = 0.0

    @property
    def players(self) -> tuple[str, ...]:
        """The players of its episodes, where they are several (`self_play`)."""
        return tuple(getattr(self.make_one, "players", ()))

    def close(self) -> None:
        """Does nothing: instances share no state."""

    def make(self) -> Any:
        """An instance, for one episode. Raises EnvError, or ConfigError where the class itself does."""
        try:
            return self.make_one(**self.args)
        except ConfigError:
            raise
        except Exception as error:
            raise EnvError.raised(f"{self.name}()", error) from error

    def cases(self, *, held_out: bool = False) -> list[Prompt] | None:
        """What its `cases` (or `eval_cases`) returns, as prompts whose columns the case is; None without the method.

        Raises DataError, or EnvError where the method raises; a ConfigError of its own as it is.
        """
        method = "eval_cases" if held_out else "cases"
        instance = self.make()
        if not callable(function := getattr(instance, method, None)):
            return None
        try:
            rows = function()
            rows = run_coroutine(_awaited(rows)) if inspect.isawaitable(rows) else rows
        except ConfigError:
            raise
        except Exception as error:
            raise EnvError.raised(f"{self.name}.{method}", error) from error
        return prompts_of(rows, f"{self.name}.{method}")


def load_env(config: EnvConfig, *, folder: str | Path | None = None) -> EnvFactory:
    """The environment that the configuration names.

    Raises LoadError for what cannot be imported, ConfigError for what is no environment or takes other arguments.
    """
    assert config.environment is not None  # else `load_agent` is asked
    package, _, name = config.environment.partition(":")
    reference, argument = NAMED.get(package, (config.environment, None))
    made = load_object(reference, folder=folder)
    if inspect.isclass(made):
        _check_methods(made, config.environment)
    _check_players(made, config)
    args = config.args if argument is None else {**config.args, argument: name}
    _check_arguments(made, args, config.environment)
    return EnvFactory(
        name=config.environment.rpartition(":")[2],
        make_one=made,
        args=with_folder(made, args, folder),
        legacy=all(hasattr(made, name) for name in THREE_METHODS) and not hasattr(made, "step"),
    )


@lru_cache(maxsize=256)
def load_once(reference: str, *, folder: str | None = None) -> Callable[..., Any]:
    """`load_object` for environments that load something themselves, in every episode: each reference once."""
    return load_object(reference, folder=folder)


def prompts_of(rows: Any, source: str) -> list[Prompt]:
    """Rows of a dataset of cases -> prompts; the whole row is the case. Raises DataError."""
    if isinstance(rows, str | bytes | Mapping) or not hasattr(rows, "__iter__"):
        raise DataError(f"{source} returned a {type(rows).__name__}; it must be a list of objects, one per case")
    prompts: list[Prompt] = []
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(f"{source}: case {i} is {row!r}; a case is an object, its columns by name")
        prompts.append(Prompt(id=f"case:{i}", columns=dict(row)))
    if not prompts:
        raise DataError(f"{source} returned no cases", hint="return at least one")
    return prompts


def _check_methods(made: type, reference: str) -> None:
    missing: Sequence[str] = [name for name in MODERN if not callable(getattr(made, name, None))]
    if not missing or all(callable(getattr(made, name, None)) for name in THREE_METHODS):
        return
    held = [name for name, value in vars(made).items() if callable(value) and not name.startswith("_")]
    raise ConfigError(
        f"env.environment {reference!r} has no {' and no '.join(missing)}; it has {', '.join(held) or 'no methods'}",
        hint="an environment has reset(case, seed) and step(message), or build_dataset and score_episode",
    )


def _check_players(made: Any, config: EnvConfig) -> None:
    if (players := getattr(made, "players", None)) is None:
        return
    valid = isinstance(players, tuple | list) and len({each for each in players if isinstance(each, str) and each}) > 1
    if not valid or len(set(players)) != len(players):
        message = f"env.environment {config.environment!r} has players = {_short(players)}"
        raise ConfigError(message, hint='players is a tuple of two or more names, as ("first", "second")')


def _check_arguments(made: Callable[..., Any], args: Mapping[str, Any], reference: str) -> None:
    try:
        inspect.signature(made).bind(**args)
    except TypeError as error:
        takes = ", ".join(inspect.signature(made).parameters) or "nothing"
        raise ConfigError(f"env.args does not fit {reference!r}, which takes {takes}: {error}") from None
    except ValueError:  # no signature to look at
        return


async def _awaited(value: Any) -> Any:
    return await value


# ----------------------------------------------------------------------------------------------------------------------
# Calling user code that may be slow: async functions are awaited, others run in a thread of their episode's own.
#
# A method that hangs costs its episode and nothing else: what waits for it gives up after its time, the thread is left
# behind, and as a daemon it does not keep the process from ending. All calls of one episode are made in the same
# thread, for user code that minds (a SQLite connection does).
# ----------------------------------------------------------------------------------------------------------------------

Job = tuple[Callable[[], Any], asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


class OwnThread:
    """A thread that makes one call after another, until it is closed or one hangs."""

    def __init__(self, name: str = "episode"):
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._busy = False

    async def call(self, function: Callable[..., Any], *args: Any, timeout_s: float | None, what: str) -> Any:
        """The result of `function(*args)`, awaited if it is awaitable. Raises what it raises.

        Raises:
            EnvError: it took longer than `timeout_s` seconds. `what` names it in the message.
        """
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                if inspect.iscoroutinefunction(function):
                    return await function(*args)
                result = await self._submit(lambda: function(*args))
                return await result if inspect.isawaitable(result) else result
        except TimeoutError as error:
            if not limit.expired():  # the function's own
                raise
            raise EnvError(f"{what} took longer than {timeout_s:g} s", field=what, kind="timeout") from error

    @property
    def busy(self) -> bool:
        """Whether a call is being made, waited for or not."""
        return self._busy

    def close(self) -> None:
        """The thread ends once it is idle."""
        self._jobs.put(None)

    async def _submit(self, call: Callable[[], Any]) -> Any:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._jobs.put((call, loop, future))
        return await future

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            call, loop, future = job
            self._busy = True
            try:
                result, error = call(), None
            except BaseException as raised:  # SystemExit in user code must not end the thread in silence
                result, error = None, raised
            self._busy = False
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, future, result, error)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():  # given up
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):
        future.set_exception(error)
    else:
        future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))


# ----------------------------------------------------------------------------------------------------------------------
# A base class for environments in which the policy calls tools until it answers.
#
#     class Shop(ToolEnv):
#         def first_message(self, case, seed):
#             self.stock = dict(case["stock"])
#             return case["question"]                       a user's text, messages, or an Observation
#
#         def look(self, item: str) -> int:
#             """How many of an item there are."""
#             return self.stock[item]
#
#         tools = (look, search, mcp_tools(url=...))        methods, functions, Tools, ToolBoxes
#
#         def score(self, episode):
#             return float(episode.answer == "4")
#
# Each turn's calls are answered by a `tool` message each, in their order. Functions and MCP tools run at once; the
# environment's own methods one after another, in the episode's thread, so that parallel calls change its state in the
# order in which they were written. Calls that failed say why, and so do those that could not be read. The episode is
# done when a message has no call. The numbers `tool_errors` and `tool_<outcome>` are logged (`tools.CallOutcome`).
# ----------------------------------------------------------------------------------------------------------------------

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
        """What the policy is asked: a user's text, messages, or an Observation. May be async."""
        raise EnvError(
            f"{type(self).__name__} has no first_message(case, seed)", hint="write it; it returns the question"
        )

    def reset(self, case: Mapping[str, Any], seed: int) -> Any:
        """The observation that begins an episode, with the tools."""
        value = self.first_message(case, seed)
        return self._offer_when_there(value) if isawaitable(value) else self.offer(value)

    def offer(self, said: Observation | Sequence[Message] | str) -> Observation:
        """`said` with the tools, and any that an Observation brings. Raises ConfigError for what is no tool."""
        self.toolbox = ToolBox(map(self._bound, self.tools))
        more: Sequence[Mapping[str, Any]] = ()
        if isinstance(said, Observation):
            said, more = said.messages, said.tools
        messages = [Message(role="user", content=said)] if isinstance(said, str) else said
        return Observation(messages=messages, tools=(*self.toolbox.definitions, *more))

    async def step(self, message: Message) -> StepResult:
        """The answers to a message's calls; done when it has none."""
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
        """A function of the class as the method that it is; a method as a tool that runs in the episode's thread."""
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
    """The answer to a call that could not be read; its id is one that every chat template takes."""
    message = tool_message(f"Error: {report}", call_id=f"bad{index:06d}", name="malformed_call")
    return ToolResult(message, CallOutcome.MALFORMED)
