"""What an environment is: a class whose instances play one episode each.

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

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from groupwise.config.run import EnvConfig
from groupwise.errors import EnvError
from groupwise.types import MAX_REWARD, Message, Rollout

REWARD = "env"  # the name of an environment's reward among those of reward functions

ROLES = ("system", "developer", "user", "assistant", "tool")
SAYING = ("system", "developer", "user", "tool")  # the assistant's turns are the policy's


@dataclass(frozen=True, kw_only=True)
class Observation:
    """How an episode begins: messages up to where the assistant speaks, and tools it may call, in OpenAI's form."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What came of a turn: messages that the policy hears next, a reward for the turn, whether the episode is over.

    `info` are numbers to log, by name; their means over episodes are the metrics `env/<name>`.
    """

    messages: Sequence[Message] = ()
    reward: float | None = None
    done: bool = False
    info: Mapping[str, float] = field(default_factory=dict)


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
    """What `reset` returned. Raises EnvError; `limit` are the characters that messages may have together."""
    if isinstance(value, Observation):
        messages, tools = value.messages, value.tools
    else:
        messages, tools = value, ()
    checked = messages_of(messages, "reset", limit=limit, roles=ROLES)
    if not checked:
        raise EnvError("reset returned no messages", hint="return at least one: what the policy is asked")
    for tool in tools:
        if not isinstance(tool, Mapping) or not tool:
            raise EnvError(f"reset returned the tool {tool!r}; a tool is an object with a name and parameters")
    return Observation(messages=checked, tools=tuple(dict(tool) for tool in tools))


def step_result_of(value: Any, *, limit: int) -> StepResult:
    """What `step` returned. Raises EnvError."""
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
    if not isinstance(result.done, bool | int) or isinstance(result.done, float):
        raise EnvError(f"step returned done={_short(result.done)}; it is true or false")
    messages = messages_of(result.messages, "step", limit=limit, roles=SAYING)
    if not messages and not result.done:
        raise EnvError("step returned no messages and is not done: there is nothing the policy could answer to")
    reward = None if result.reward is None else reward_of(result.reward, "step")
    return StepResult(messages=messages, reward=reward, done=bool(result.done), info=_numbers(result.info))


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


def reward_of(value: Any, method: str) -> float:
    """A float of a size that can be compared. Raises EnvError."""
    try:
        number = float(value) if not isinstance(value, str | bytes) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not abs(number) <= MAX_REWARD:
        raise EnvError(f"{method} returned {_short(value)}; a reward is a finite number within {MAX_REWARD:g} of 0")
    return number


def _numbers(info: Any) -> dict[str, float]:
    if not isinstance(info, Mapping):
        raise EnvError(f"step returned info={_short(info)}; it is an object of numbers by name")
    numbers = {str(name): value for name, value in info.items() if isinstance(value, int | float)}
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}... ({type(value).__name__})"


def priced(played: Rollout, config: EnvConfig) -> Rollout:
    """A played episode with what it is worth: `reward`, or of one that has an `error` what `env.on_error` says.

    Raises EnvError where an error is to end the run.
    """
    reward, error, stop = played.reward, played.error, played.stop
    if error is not None:
        if config.on_error == "stop":
            raise EnvError(error, hint="env.on_error: exclude goes on without such episodes")
        reward, stop = 0.0 if config.on_error == "zero" and played.turns else None, "error"
    rewards, left = ({}, error) if reward is None else ({REWARD: reward}, None)
    info = {**played.info, "turns": float(len(played.turns)), "failed": float(error is not None)}
    return replace(played, rewards=rewards, reward=reward, error=left, stop=stop, info=info)
