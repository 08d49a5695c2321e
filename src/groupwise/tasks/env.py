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

A message's content is a text, or a list of parts, {"type": "text", "text": ..} and, where the model sees,
{"type": "image", "image": ..}; what an image may be, `pictures.read_picture` says.

An episode's reward is the sum of its turns' rewards and its score. `case` is a row of the dataset: its columns by name.
Everything random must come from `seed`, which is the same for the episodes of one group: then they differ by what the
policy did, and by nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from groupwise.errors import DataError, EnvError, GroupwiseError
from groupwise.pictures import text_of
from groupwise.tasks.row_images import read_images
from groupwise.types import MAX_REWARD, Message, Rollout, last_answer

if TYPE_CHECKING:
    from groupwise.config.run import EnvConfig

REWARD = "env"  # the name of an environment's reward among those of reward functions

ROLES = ("system", "developer", "user", "assistant", "tool")

SAYING = ("system", "developer", "user", "tool")  # the assistant's turns are the policy's


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The beginning of an episode: messages up to where the assistant speaks, and tools it may call, in OpenAI's form.

    `state` names the state in which the policy now speaks, for `algo.credit: gigpo`: episodes of a group are compared
    turn by turn where they are in the same one. None: what it was told is its name.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    state: str | None = None


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of a turn: messages that the policy hears next, a reward for the turn, whether the episode is over.

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
    """Holds the result of a player's turn in a game of several players (`self_play`): by player, the messages that it
    gets next, and its reward, which counts for the last turn that it took. `next` names the next player (None: the next
    in `players`), and `state` its situation (as `Observation.state`)."""

    messages: Mapping[str, Any] = field(default_factory=dict)
    rewards: Mapping[str, float] = field(default_factory=dict)
    next: str | None = None
    done: bool = False
    info: Mapping[str, float] = field(default_factory=dict)
    state: str | None = None


@dataclass(frozen=True, kw_only=True)
class Episode:
    """An episode that is over, as `score` gets it: all messages, the first observation's included, and how it ended.

    `stop` is "done", or the limit that ended it: "max_turns", "max_tokens", "max_tool_calls", "context", "timeout".
    """

    case: Mapping[str, Any]
    seed: int
    messages: tuple[Message, ...]
    rewards: tuple[float | None, ...]  # one per turn
    stop: str

    @property
    def answer(self) -> str:
        """Return the text of the assistant's last message; "" without one."""
        return last_answer(self.messages)


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
            raise EnvError(f"step returned {shortened(value)}; return a StepResult, messages or a text")
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
        raise EnvError(f"reset returned {shortened(value)}; return what each player is told, by its name")
    return {_player(player, players, "reset"): observation_of(told, limit=limit) for player, told in value.items()}


def move_result_of(value: Any, players: Sequence[str], *, limit: int) -> MoveResult:
    """Check what `step` of a game returned. Raises EnvError."""
    if not isinstance(value, MoveResult):
        raise EnvError(f"step returned {shortened(value)}; return a MoveResult")
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
        raise EnvError(f"{method} returned {shortened(value)}; rewards are an object, a number by player")
    return {_player(player, players, method): reward_of(reward, method) for player, reward in (value or {}).items()}


def _player(name: Any, players: Sequence[str], method: str) -> str:
    if name not in players:
        raise EnvError(f"{method} named the player {shortened(name)}; the players are {', '.join(players)}")
    return name


def messages_of(value: Any, method: str, *, limit: int, roles: Sequence[str]) -> tuple[Message, ...]:
    """Checked messages; a text is a user's message. Raises EnvError."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    elif isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, Sequence):
        raise EnvError(f"{method} returned {shortened(value)}; messages are a text or a list of objects with a role")
    size, checked = 0, []
    for message in value:
        if not isinstance(message, Mapping) or message.get("role") not in roles:
            role = message.get("role") if isinstance(message, Mapping) else message
            raise EnvError(f"{method} returned a message of role {shortened(role)}; the roles are {', '.join(roles)}")
        content = message.get("content")
        if not isinstance(content, str | list | None):
            raise EnvError(
                f"{method} returned a message with the content {shortened(content)}; it must be a text or a list of "
                "parts, which are texts and images"
            )
        try:
            read = read_images(message, where=f"{method} returned an image, which")
        except DataError as error:
            raise EnvError(error.message, hint=error.hint) from error
        size += len(text_of(read.get("content")))
        checked.append(dict(read))
    if size > limit:
        raise EnvError(
            f"{method} returned {size:,} characters; env.max_characters is {limit:,}", hint="shorten it, or raise that"
        )
    return tuple(checked)


def state_of(value: Any, method: str) -> str | None:
    """Check the name of a state. Raises EnvError."""
    if value is not None and not isinstance(value, str):
        raise EnvError(f"{method} returned the state {shortened(value)}; a state's name is a text")
    return value


def reward_of(value: Any, method: str, *, did: str = "returned") -> float:
    """Check a reward: a finite float of sensible size. Raises EnvError."""
    try:
        number = float(value) if not isinstance(value, str | bytes) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not abs(number) <= MAX_REWARD:
        message = f"{method} {did} {shortened(value)}; a reward is a finite number within {MAX_REWARD:g} of 0"
        raise EnvError(message, field=method)
    return number


def done_of(value: Any) -> bool:
    """Check whether an episode is over. Raises EnvError."""
    if not isinstance(value, bool | int) or isinstance(value, float):
        raise EnvError(f"step returned done={shortened(value)}; it is true or false")
    return bool(value)


def numbers_of(info: Any) -> dict[str, float]:
    """Return the numbers of `info` that are finite. Raises EnvError if `info` is not a mapping."""
    if not isinstance(info, Mapping):
        raise EnvError(f"step returned info={shortened(info)}; it is an object of numbers by name")
    numbers = {str(name): value for name, value in info.items() if isinstance(value, int | float)}
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}


def shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}... ({type(value).__name__})"


def told_of(name: str, error: GroupwiseError) -> str:
    """Return the error's message as one of the environment `name`, which stands before it unless it names its
    method."""
    return error.message if (error.field or "").startswith(name) else f"{name}: {error.message}"


def priced(played: Rollout, config: EnvConfig) -> Rollout:
    """Return the episode with its `reward` set; for one with an `error`, what `env.on_error` prescribes.

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
