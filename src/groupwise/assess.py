"""`groupwise eval`: the mean rewards of the base model or of one adapter, on the prompts that a configuration names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from groupwise.assemble import local_engine, make_plan, open_play
from groupwise.config import RunConfig
from groupwise.errors import ConfigError
from groupwise.evaluate import Evaluation, evaluate, prepare_all
from groupwise.locate import find_adapter
from groupwise.model import load_model
from groupwise.types import PolicyVersion

MODES = ("greedy", "sampled")


def assess(
    config: RunConfig, *, adapter: str | None = None, modes: Sequence[str] = (), note: Callable[[str], None]
) -> tuple[Mapping[str, Evaluation], str]:
    """Evaluations by mode, and what was evaluated in words. `adapter` is as `locate.find_adapter` takes it.

    Raises ConfigError for an unknown mode, AdapterNotFoundError or AdapterError, ContextLengthError for a prompt that
    fills the context.
    """
    modes = tuple(modes) or (MODES if config.eval is None else config.eval.modes)
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise ConfigError(f"--mode {unknown[0]!r} does not exist; valid: {', '.join(MODES)}")
    located = None if adapter is None else find_adapter(adapter)
    plan = make_plan(config)
    prompts = plan.eval_prompts
    if config.eval is None:
        prompts = tuple(plan.source.all())
        note(f"no eval.data in the configuration: evaluating on all {len(prompts)} training prompts")
    base = load_model(config.model, device=config.device, dtype=config.dtype)
    engine = local_engine(config, base)
    try:
        version, policy = PolicyVersion.base(), f"{config.model}, no adapter"
        if located is not None:
            located.check_base(base.hash)
            engine.load(located.version, located.directory)
            version, policy = located.version, str(located.directory)
        play = open_play(plan, base, engine)
        result = asyncio.run(
            evaluate(
                play,
                prepare_all(prompts, play, context=base.context_length),
                plan.rewards,
                version=version,
                params=config.rollout.sampling(),
                modes=tuple(dict.fromkeys(modes)),
                seed=config.seed,
            )
        )
    finally:
        engine.close()
    return result, policy
