"""Agents: programs that play one episode through an OpenAI client; loads, records and trains them.

    async def agent(case, *, client, model):
        answer = await client.chat.completions.create(model=model, messages=[...], tools=[...])
        ...
        return 1.0

It is called once for each episode, by name, with those of `case`, `client`, `base_url`, `api_key`, `model`, `seed` and
`episode` that it takes, and with `env.args`. `case` is a row of the dataset, `seed` the same for the episodes of a
group; `episode` is told what single turns were worth (`EpisodeCredit`). It may be async (it runs in the run's event
loop and must not block it) or not (it runs in its own thread). The key stands for the episode: give it to the
processes and sub-agents that belong to it, and to nothing else. `client` is an `AsyncOpenAI` (an `OpenAI`, where the
agent is not async) with that URL and key, on connections that all episodes share: a client that an agent makes itself
reads the certificates of the machine each time, some 70 ms. What it returns is

    a number                        the episode's reward
    {"reward": .., "metrics": {}}   the same; the numbers are logged as `env/<name>`
    {"turn_rewards": [..]}          alone or with these: a reward for each answer, in order, None for no reward
    None                            the configuration's `rewards` score the episode

and rewards of turns are added to the episode's, as in an environment.

A class is made once, with `env.args`; its instance is the agent (`__call__`) and may have `cases()` and `eval_cases()`,
the datasets. Both may be async.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.config.load import load_object, with_folder
from groupwise.config.run import EnvConfig
from groupwise.errors import ConfigError, EnvError, GroupwiseError
from groupwise.tasks.env import reward_of
from groupwise.tasks.env_kind import EnvKind, PlayParts
from groupwise.tasks.env_loading import EnvFactory
from groupwise.types import Prompt, Rollout

if TYPE_CHECKING:
    from groupwise.model.load import LoadedModel
    from groupwise.tasks.check.opening import CheckRequest
    from groupwise.tasks.check.play import Opened
    from groupwise.tasks.rollout_sources import RolloutSource

CLIENT, EPISODE = "client", "episode"

OFFERED = ("case", "base_url", "api_key", "model", "seed", CLIENT, EPISODE)

NEEDED = ("base_url", "api_key")  # or the client


@dataclass(frozen=True, kw_only=True)
class Agent(EnvKind):
    """A loaded agent; `takes` are the keyword arguments, of those in `OFFERED`, that it is called with.

    Args:
        extra_s: seconds that a call may take beyond `env.timeout_s`, which it then keeps itself.
        columns: names of the `Rollout.columns` that it adds for reward functions.
        check_cases: raises ConfigError for cases that cannot be played, before the first is.
        after_scoring: is told of each rollout once the reward functions have seen it.
        on_close: is called when no more episodes are played for now.
    """

    name: str
    function: Callable[..., Any]
    takes: tuple[str, ...]
    args: Mapping[str, Any] = field(default_factory=dict)
    extra_s: float = 0.0
    columns: tuple[str, ...] | None = ()
    check_cases: Callable[[Sequence[Prompt]], None] = lambda cases: None
    after_scoring: Callable[[Rollout], None] = lambda rollout: None
    on_close: Callable[[], None] = lambda: None

    def bound(self, **offered: Any) -> Callable[[], Any]:
        """Return the call of one episode, without arguments; a coroutine function where the agent is async."""
        given = {**self.args, **{name: offered[name] for name in self.takes}}
        if not is_async(self.function):
            return lambda: self.function(**given)

        async def play() -> Any:
            return await self.function(**given)

        return play

    def cases(self, *, held_out: bool = False) -> list[Prompt] | None:
        """Return the dataset that it brings, as `EnvFactory.cases`; None if it brings none."""
        found = EnvFactory(name=self.name, make_one=lambda: self.function, args={}).cases(held_out=held_out)
        return None if found is None else self.check(found, self.name)

    def check(self, prompts: Sequence[Prompt], source: str) -> list[Prompt]:
        """See the base class."""
        self.check_cases(prompts)
        return list(prompts)

    def on_scored(self, rollout: Rollout) -> None:
        """See the base class."""
        self.after_scoring(rollout)

    def open_play(self, parts: PlayParts) -> RolloutSource:
        """Return how a case becomes a group of episodes that the agent plays."""
        from groupwise.tasks.agent_rollouts import AgentRollouts

        tokenizer, recorded = parts.base.tokenizer, parts.recorded
        return AgentRollouts(parts.engine, tokenizer, self, parts.config, scored=parts.scored, recorded=recorded)

    def open_check(self, wanted: CheckRequest, base: LoadedModel | None, say: Callable[[str], None]) -> Opened:
        """See the base class."""
        from groupwise.tasks.check.opening import open_agent

        return open_agent(self, wanted, base)


@dataclass(frozen=True, kw_only=True)
class AgentResult:
    """Result of an agent's episode.

    Args:
        turn_rewards: additional rewards of the answers, in order; empty for none.
        columns: columns for reward functions, by name.
        stop: why the episode ended, where that was not the agent's own doing.
        failure: it failed, and is worth what `env.on_error` says.
        ending: how the episode ended, for messages.
    """

    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: tuple[float | None, ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)
    stop: str | None = None
    failure: EnvError | None = None
    ending: str = ""


def load_agent(config: EnvConfig, *, folder: str | Path | None = None) -> EnvKind:
    """Return the agent that the configuration names. A class is made here; one that is an `EnvKind` plays as that.

    Raises LoadError for what cannot be imported, ConfigError for what cannot be called as agents are, EnvError for a
    class that fails.
    """
    assert config.agent is not None  # else there is an environment or a harness
    made: Any = load_object(config.agent, folder=folder)
    name, args = config.agent.replace(":", ".").rpartition(".")[2], dict(config.args)
    if inspect.isclass(made):
        made, args = _instance(made, name, with_folder(made, args, folder), config.agent), {}
    if isinstance(made, EnvKind):
        return made.configured(config)
    return Agent(name=name, function=made, takes=_takes(made, args, config.agent), args=args)


def outcome_of(value: Any, agent: str) -> AgentResult:
    """Check what an agent returned. Raises EnvError."""
    if isinstance(value, AgentResult):
        return value
    if value is None:
        return AgentResult()
    if not isinstance(value, Mapping):
        return AgentResult(reward=reward_of(value, agent))
    if "reward" not in value and "turn_rewards" not in value:
        raise EnvError(
            f"{agent} returned an object with {', '.join(map(repr, value)) or 'nothing'} and no reward",
            hint='return {"reward": 1.0, "metrics": {...}, "turn_rewards": [...]}, a number, or None',
        )
    reward, metrics = value.get("reward"), value.get("metrics") or {}
    if not isinstance(metrics, Mapping):
        raise EnvError(f"{agent} returned metrics of type {type(metrics).__name__}; they are numbers by name")
    numbers = {str(name): float(each) for name, each in metrics.items() if isinstance(each, int | float)}
    return AgentResult(
        reward=None if reward is None else reward_of(reward, agent),
        metrics={name: number for name, number in numbers.items() if math.isfinite(number)},
        turn_rewards=_turn_rewards(value.get("turn_rewards"), agent),
    )


def _turn_rewards(value: Any, agent: str) -> tuple[float | None, ...]:
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise EnvError(f"{agent} returned turn_rewards of type {type(value).__name__}; they are a list of numbers")
    return tuple(None if each is None else reward_of(each, agent) for each in value)


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether calling it gives a coroutine; an object is asked for its `__call__`."""
    called = function if inspect.isroutine(function) else type(function).__call__
    return inspect.iscoroutinefunction(called)


def _instance(made: type, name: str, args: Mapping[str, Any], reference: str) -> Any:
    try:
        inspect.signature(made).bind(**args)
    except TypeError as error:
        takes = ", ".join(inspect.signature(made).parameters) or "nothing"
        raise ConfigError(f"env.args does not fit {reference!r}, which takes {takes}: {error}") from None
    except ValueError:  # no signature to look at
        pass
    if not issubclass(made, EnvKind) and not any("__call__" in vars(one) for one in made.__mro__):
        raise ConfigError(f"env.agent {reference!r} is a class without __call__", hint="an agent can be called")
    try:
        return made(**args)
    except GroupwiseError:
        raise
    except Exception as error:
        raise EnvError.raised(f"{name}()", error) from error


def _takes(function: Callable[..., Any], args: Mapping[str, Any], reference: str) -> tuple[str, ...]:
    """Return those of `OFFERED` that it has parameters for. Raises ConfigError where it cannot be called so."""
    parameters = inspect.signature(function).parameters
    anything = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    takes = tuple(name for name in OFFERED if name in parameters or (anything and name not in (CLIENT, EPISODE)))
    listed = ", ".join(parameters) or "nothing"
    if CLIENT in takes and importlib.util.find_spec("openai") is None:
        message = f"env.agent {reference!r} takes a client, and openai is not installed"
        raise ConfigError(message, hint="pip install openai")
    if CLIENT not in takes and (missing := [name for name in NEEDED if name not in takes]):
        raise ConfigError(
            f"env.agent {reference!r} takes {listed}, and not {' and '.join(missing)}",
            hint="its head is `async def agent(case, *, client, model)`, or has base_url and api_key",
        )
    try:
        inspect.signature(function).bind(**dict.fromkeys(takes), **args)
    except TypeError as error:
        message = f"env.agent {reference!r} takes {listed}; {error}"
        raise ConfigError(message, hint="the others go to env.args") from None
    return takes
