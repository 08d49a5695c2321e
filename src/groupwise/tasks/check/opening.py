"""An environment by its name, ready to be played: its cases, a tokenizer, and a model where one is wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from groupwise.config.chat import ChatConfig
from groupwise.config.data import DatasetConfig
from groupwise.config.run import EnvConfig
from groupwise.errors import ConfigError, EnvError
from groupwise.model.chat import configure_chat
from groupwise.model.load import LoadedModel, load_model, load_tokenizer
from groupwise.sampler import Sampler
from groupwise.tasks.agent_rollouts import AgentRollouts
from groupwise.tasks.agents import Agent
from groupwise.tasks.check.play import Opened
from groupwise.tasks.check.watch import Watch
from groupwise.tasks.env_loading import EnvFactory
from groupwise.tasks.load_env_kind import load_env_kind
from groupwise.tasks.own_thread import OwnThread
from groupwise.tasks.prompts import open_prompts
from groupwise.tasks.rollout_sources import EpisodeRollouts
from groupwise.types import Prompt, SamplingParams

CONTEXT = 8192  # tokens, of a model that is not loaded and whose tokenizer does not say

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class CheckRequest:
    """An environment to check: `env` as in a run, and the policies to play it with. `model` plays unless
    `scripts_only`; its tokenizer is used in any case, with the chat template that `chat` says. `scored`: the run has
    reward functions, which the check does not call."""

    env: EnvConfig
    params: SamplingParams
    folder: Path = Path()
    data: DatasetConfig | None = None
    model: str = "starter"
    chat: ChatConfig = field(default_factory=ChatConfig)
    scripts_only: bool = False
    scored: bool = False

    @property
    def name(self) -> str:
        """Return the name of the checked environment, for people."""
        return (self.env.environment or self.env.agent or "the harness").rpartition(":")[2]


@contextmanager
def opened(
    wanted: CheckRequest, *, say: Callable[[str], None], engine_of: Callable[[LoadedModel], Sampler]
) -> Iterator[tuple[Opened, Sampler | None]]:
    """Yield the environment, and the engine of the model that plays it, which `engine_of` makes of the loaded model.

    Raises LoadError and ConfigError if it is not an environment, DataError and EnvError if its cases cannot be made,
    ModelError.
    """
    kind = load_env_kind(wanted.env, folder=wanted.folder, model=wanted.model, scored=wanted.scored)
    base = None
    if kind.needs_model or not wanted.scripts_only:
        say(f"loading {wanted.model} ...")
        base = load_model(wanted.model, device="cpu" if wanted.scripts_only else "auto", dtype="auto")
        configure_chat(base.tokenizer, wanted.chat, folder=wanted.folder)
    engine = None if base is None or wanted.scripts_only else engine_of(base)
    try:
        yield kind.open_check(wanted, base, say), engine
    finally:
        if engine is not None:
            engine.close()


def open_agent(agent: Agent, wanted: CheckRequest, base: LoadedModel | None) -> Opened:
    """Return an agent or a harness, ready to play. Raises EnvError where there are no cases."""
    tokenizer = load_tokenizer(wanted.model, chat=wanted.chat, folder=wanted.folder) if base is None else base.tokenizer
    prompts = rows_of(wanted) or agent.cases()
    if prompts is None:
        raise EnvError(f"there are no cases: {agent.name} has no method cases", hint="give --data")
    agent.check(prompts, agent.name)
    notes = list[str]()
    if wanted.scored:
        notes.append("the run's reward functions are not called here: groupwise rewards lint")
    return Opened(
        name=agent.name,
        make_play=lambda sampler: AgentRollouts(
            sampler, tokenizer, agent, wanted.env, scored=wanted.scored, note=notes.append
        ),
        prompts=prompts,
        tokenizer=tokenizer,
        context=base.context_length if base is not None else min(tokenizer.model_max_length, CONTEXT),
        params=wanted.params,
        calls=(),
        steps=False,
        plays_alone=True,
        notes=notes,
    )


def open_factory(
    factory: EnvFactory, wanted: CheckRequest, base: LoadedModel | None, say: Callable[[str], None]
) -> Opened:
    """Return an environment with reset and step, watched and ready to play. Raises ConfigError, EnvError, DataError."""
    if factory.players:
        hint = "try it in a short run: groupwise run CONFIG train.steps=2"
        raise ConfigError(f"env check plays one player, and {factory.name} has {len(factory.players)}", hint=hint)
    watch = Watch()
    factory = watch.of(factory)
    tokenizer = load_tokenizer(wanted.model, chat=wanted.chat, folder=wanted.folder) if base is None else base.tokenizer
    say("reading its cases ...")
    prompts = rows_of(wanted) or in_time(factory.cases, f"{factory.name}.cases", wanted)
    if prompts is None:
        raise EnvError(f"there are no cases: {factory.name} has no method cases", hint="write it, or give --data")
    notes, held_out = list[str](), None
    try:
        held_out = in_time(lambda: factory.cases(held_out=True), f"{factory.name}.eval_cases", wanted)
    except EnvError as error:
        notes.append(error.message)
    longest = tokenizer.model_max_length
    return Opened(
        name=factory.name,
        make_play=lambda sampler: EpisodeRollouts(sampler, tokenizer, factory, wanted.env),
        prompts=prompts,
        held_out=held_out,
        tokenizer=tokenizer,
        context=base.context_length if base is not None else min(longest, CONTEXT),
        params=wanted.params,
        calls=watch.calls,
        notes=notes,
    )


def rows_of(wanted: CheckRequest) -> Sequence[Prompt] | None:
    """Return the prompts of `wanted.data`; None without. Raises DataError."""
    if wanted.data is None:
        return None
    return open_prompts(wanted.data, folder=wanted.folder, cases=True).known


def in_time(function: Callable[[], T], what: str, wanted: CheckRequest) -> T:
    """Return its result. Raises EnvError where it takes longer than a method may, and what it raises."""

    async def called() -> Any:
        thread = OwnThread("cases")
        try:
            return await thread.call(function, timeout_s=wanted.env.step_timeout_s, what=what)
        finally:
            thread.close()

    return asyncio.run(called())
