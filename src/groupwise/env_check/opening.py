"""An environment by its name, ready to be played: its cases, a tokenizer, and a model where one is wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from groupwise.config.run import DatasetConfig, EnvConfig
from groupwise.data import open_prompts
from groupwise.env_check.trial import Opened
from groupwise.env_check.watch import Watch, WatchedLegacyEnv
from groupwise.envs.call import OwnThread
from groupwise.envs.load import EnvFactory, load_env
from groupwise.errors import EnvError
from groupwise.legacy_play import LegacyEpisodes
from groupwise.model.load import LoadedModel, load_model, load_tokenizer
from groupwise.play import Episodes
from groupwise.types import Prompt, Sampler, SamplingParams

METHODS_AN_EPISODE = 6  # so many times a method's time for a whole episode that is one method
CONTEXT = 8192  # tokens, of a model that is not loaded and whose tokenizer does not say
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is to be checked: `env` as in a run, and what it is played with. `model` plays unless `scripts_only`; its
    tokenizer and template are used in any case."""

    env: EnvConfig
    params: SamplingParams
    folder: Path = Path()
    data: str | None = None
    model: str = "starter"
    scripts_only: bool = False


@contextmanager
def opened(
    wanted: Wanted, *, say: Callable[[str], None], engine_of: Callable[[LoadedModel], Sampler]
) -> Iterator[tuple[Opened, Sampler | None]]:
    """The environment, and the engine of the model that plays it, which `engine_of` makes of the loaded model.

    Raises LoadError and ConfigError for what is no environment, DataError and EnvError for cases that cannot be had,
    ModelError.
    """
    factory = load_env(wanted.env, folder=wanted.folder)
    base = None
    if factory.legacy or not wanted.scripts_only:  # code that is given the model may ask it for its configuration
        say(f"loading {wanted.model} ...")
        base = load_model(wanted.model, device="cpu" if wanted.scripts_only else "auto", dtype="auto")
    engine = None if base is None or wanted.scripts_only else engine_of(base)
    try:
        if factory.legacy:
            assert base is not None
            yield _legacy(wanted, factory, base, say), engine
        else:
            yield _modern(wanted, factory, base, say), engine
    finally:
        if engine is not None:
            engine.close()


def _modern(wanted: Wanted, factory: EnvFactory, base: LoadedModel | None, say: Callable[[str], None]) -> Opened:
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
        make_play=lambda sampler: Episodes(sampler, tokenizer, factory, wanted.env),
        prompts=prompts,
        held_out=held_out,
        tokenizer=tokenizer,
        context=base.context_length if base is not None else min(longest, CONTEXT),
        params=wanted.params,
        calls=watch.calls,
        notes=notes,
    )


def _legacy(wanted: Wanted, factory: EnvFactory, base: LoadedModel, say: Callable[[str], None]) -> Opened:
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
        make_play=lambda sampler: LegacyEpisodes(sampler, base, env, run=wanted.params, note=notes.append),
        prompts=prompts,
        tokenizer=base.tokenizer,
        context=base.context_length,
        params=wanted.params,
        calls=watch.calls,
        steps=False,
        notes=notes,
    )


def _rows(wanted: Wanted) -> Sequence[Prompt] | None:
    if wanted.data is None:
        return None
    return open_prompts(DatasetConfig(source=wanted.data), folder=wanted.folder).all()


def _in_time(function: Callable[[], T], what: str, wanted: Wanted) -> T:
    """Its result. Raises EnvError where it takes longer than a method may, and what it raises."""

    async def called() -> Any:
        thread = OwnThread("cases")
        try:
            return await thread.call(function, timeout_s=wanted.env.step_timeout_s, what=what)
        finally:
            thread.close()

    return asyncio.run(called())
