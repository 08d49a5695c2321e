"""An environment by its name, ready to be played: its cases, a tokenizer, and a model where one is wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from groupwise.config.data import DatasetConfig
from groupwise.config.run import EnvConfig
from groupwise.errors import ConfigError, EnvError
from groupwise.model.load import LoadedModel, load_model, load_tokenizer
from groupwise.sampler import Sampler
from groupwise.tasks.agent_rollouts import AgentRollouts
from groupwise.tasks.agents import Agent, load_agent
from groupwise.tasks.check.play import Opened
from groupwise.tasks.check.watch import Watch, WatchedLegacyEnv
from groupwise.tasks.compat.rollout_func import RolloutFunc
from groupwise.tasks.compat.three_method_rollouts import ThreeMethodRollouts
from groupwise.tasks.env_loading import EnvFactory, load_env
from groupwise.tasks.harness import load_harness
from groupwise.tasks.own_thread import OwnThread
from groupwise.tasks.prompts import open_prompts
from groupwise.tasks.rollout_sources import EpisodeRollouts
from groupwise.types import Prompt, SamplingParams

METHODS_AN_EPISODE = 6  # so many times a method's time for a whole episode that is one method

CONTEXT = 8192  # tokens, of a model that is not loaded and whose tokenizer does not say

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class CheckRequest:
    """What is to be checked: `env` as in a run, and what it is played with. `model` plays unless `scripts_only`; its
    tokenizer and template are used in any case. `scored`: the run has reward functions, which are not called here."""

    env: EnvConfig
    params: SamplingParams
    folder: Path = Path()
    data: DatasetConfig | None = None
    model: str = "starter"
    scripts_only: bool = False
    scored: bool = False

    @property
    def name(self) -> str:
        """What is checked, for people."""
        return (self.env.environment or self.env.agent or "the harness").rpartition(":")[2]


@contextmanager
def opened(
    wanted: CheckRequest, *, say: Callable[[str], None], engine_of: Callable[[LoadedModel], Sampler]
) -> Iterator[tuple[Opened, Sampler | None]]:
    """The environment, and the engine of the model that plays it, which `engine_of` makes of the loaded model.

    Raises LoadError and ConfigError for what is no environment, DataError and EnvError for cases that cannot be had,
    ModelError.
    """
    made = _agent(wanted) if wanted.env.environment is None else load_env(wanted.env, folder=wanted.folder)
    legacy = isinstance(made, EnvFactory) and made.legacy  # its code may ask the model for its configuration
    base = None
    if legacy or not wanted.scripts_only:
        say(f"loading {wanted.model} ...")
        base = load_model(wanted.model, device="cpu" if wanted.scripts_only else "auto", dtype="auto")
    engine = None if base is None or wanted.scripts_only else engine_of(base)
    try:
        if isinstance(made, Agent):
            yield _alone(wanted, made, base), engine
        elif base is not None and legacy:
            yield _legacy(wanted, made, base, say), engine
        else:
            yield _modern(wanted, made, base, say), engine
    finally:
        if engine is not None:
            engine.close()


def _agent(wanted: CheckRequest) -> Agent:
    """The agent or harness. Raises ConfigError for one that plays whole batches."""
    if wanted.env.harness is not None:
        return load_harness(wanted.env, folder=wanted.folder, scored=wanted.scored)
    agent = load_agent(wanted.env, folder=wanted.folder)
    if isinstance(agent.function, RolloutFunc):
        hint = "try it in a short run: groupwise run CONFIG train.steps=2"
        raise ConfigError(f"env check plays episodes, and {agent.name} plays whole batches", hint=hint)
    return agent


def _alone(wanted: CheckRequest, agent: Agent, base: LoadedModel | None) -> Opened:
    tokenizer = load_tokenizer(wanted.model) if base is None else base.tokenizer
    prompts = _rows(wanted) or agent.cases()
    if prompts is None:
        raise EnvError(f"there are no cases: {agent.name} has no method cases", hint="give --data")
    agent.check(prompts)
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


def _modern(wanted: CheckRequest, factory: EnvFactory, base: LoadedModel | None, say: Callable[[str], None]) -> Opened:
    if factory.players:
        hint = "try it in a short run: groupwise run CONFIG train.steps=2"
        raise ConfigError(f"env check plays one player, and {factory.name} has {len(factory.players)}", hint=hint)
    watch = Watch()
    factory = watch.of(factory)
    tokenizer = load_tokenizer(wanted.model) if base is None else base.tokenizer
    say("reading its cases ...")
    prompts = _rows(wanted) or _in_time(factory.cases, f"{factory.name}.cases", wanted)
    if prompts is None:
        raise EnvError(f"there are no cases: {factory.name} has no method cases", hint="write it, or give --data")
    notes, held_out = list[str](), None
    try:
        held_out = _in_time(lambda: factory.cases(held_out=True), f"{factory.name}.eval_cases", wanted)
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


def _legacy(wanted: CheckRequest, factory: EnvFactory, base: LoadedModel, say: Callable[[str], None]) -> Opened:
    watch, notes = Watch(), list[str]()
    config = wanted.env.model_copy(
        update={
            "step_timeout_s": EnvConfig.model_fields["step_timeout_s"].default,  # its one method has the episode's
            "timeout_s": min(wanted.env.timeout_s, METHODS_AN_EPISODE * wanted.env.step_timeout_s),
        }
    )
    say("making its dataset ...")
    env: WatchedLegacyEnv = _in_time(
        lambda: WatchedLegacyEnv(watch, factory, config, base.tokenizer, note=notes.append), factory.name, wanted
    )
    rows = _rows(wanted)
    if rows is None:
        prompts = _in_time(env.cases, f"{factory.name}.build_dataset", wanted)
    else:
        prompts = env.check(rows, str(wanted.data))
    assert prompts is not None
    return Opened(
        name=factory.name,
        make_play=lambda sampler: ThreeMethodRollouts(sampler, base, env, run=wanted.params, note=notes.append),
        prompts=prompts,
        tokenizer=base.tokenizer,
        context=base.context_length,
        params=wanted.params,
        calls=watch.calls,
        steps=False,
        notes=notes,
    )


def _rows(wanted: CheckRequest) -> Sequence[Prompt] | None:
    if wanted.data is None:
        return None
    return open_prompts(wanted.data, folder=wanted.folder, cases=True).all()


def _in_time(function: Callable[[], T], what: str, wanted: CheckRequest) -> T:
    """Its result. Raises EnvError where it takes longer than a method may, and what it raises."""

    async def called() -> Any:
        thread = OwnThread("cases")
        try:
            return await thread.call(function, timeout_s=wanted.env.step_timeout_s, what=what)
        finally:
            thread.close()

    return asyncio.run(called())
