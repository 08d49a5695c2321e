"""`groupwise eval`: the rewards of the base model or of adapters, on the prompts that a configuration names.

Prompts, samples, `eval.k`, `eval.success` and the processes in which rewards run are those of a run's own evaluations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

from groupwise.config.run import RunConfig
from groupwise.engine.local import LocalEngine
from groupwise.model.load import LoadedModel, load_configured
from groupwise.platform import run_coroutine
from groupwise.rewards.scorer import Scorer
from groupwise.run.assemble import local_engine, open_envs, open_play, open_scorer
from groupwise.run.evaluate import SUCCESS, Evaluation, checked_modes, evaluate, prepare_all
from groupwise.run.plan import RunPlan, make_plan
from groupwise.store.locate import Located, find_version
from groupwise.tasks.rollout_sources import RolloutSource
from groupwise.types import PolicyVersion, Prompt


@dataclass(frozen=True)
class Assessed:
    """The evaluations of a policy by mode; `policy` says in words which one it is."""

    policy: str
    evaluations: Mapping[str, Evaluation]


def assess(
    config: RunConfig,
    *,
    plan: RunPlan | None = None,
    adapters: Sequence[str | None] = (None,),
    modes: Sequence[str] = (),
    note: Callable[[str], None],
) -> list[Assessed]:
    """Return the evaluations of each of `adapters` on the same prompts with the same seeds, by one model. An adapter is
    as `store.locate.find_adapter` takes it; None and "base" are the model alone. `plan` is that of the configuration,
    if it was made already.

    Raises ConfigError for an unknown mode, AdapterNotFoundError or AdapterError, ContextLengthError for a prompt that
    fills the context.
    """
    modes = checked_modes(config, modes)
    located = [find_version(adapter) for adapter in adapters]
    plan = plan or make_plan(config)
    prompts = plan.eval_prompts
    if config.eval is None:
        prompts = tuple(plan.source.known)
        which = "the first" if plan.rows is None else "all"
        note(f"no eval.data in the configuration: evaluating on {which} {len(prompts)} training prompts")
    with ExitStack() as stack:
        for each in filter(None, located):
            stack.enter_context(each.held())  # no run removes it meanwhile
        scorer = stack.enter_context(closing(open_scorer(plan)))
        base = load_configured(config)
        engine = stack.enter_context(closing(local_engine(config, base)))
        play = stack.enter_context(closing(open_play(plan, base, engine, open_envs(plan))))
        prepared = prepare_all(prompts, play, context=base.context_length)

        async def all_of_them() -> list[Assessed]:  # one loop: what plays the episodes may keep to it
            assessed = []
            for each in located:
                with _loaded(engine, base, each) as version:
                    policy = f"{config.model}, no adapter" if each is None else str(each.directory)
                    result = await _evaluated(plan, play, prepared, scorer, version=version, modes=modes)
                    assessed.append(Assessed(policy, result))
                for failures in filter(None, (mode.failures() for mode in result.values())):
                    note(failures)
            return assessed

        return run_coroutine(all_of_them())


@contextmanager
def _loaded(engine: LocalEngine, base: LoadedModel, located: Located | None) -> Iterator[PolicyVersion]:
    """Load the adapter into the engine for the block. Two compared adapters may have the same name and number."""
    if located is None:
        yield PolicyVersion.base()
        return
    located.check_base(base.hash)
    engine.load(located.version, located.directory)
    try:
        yield located.version
    finally:
        engine.unload(located.version)


async def _evaluated(
    plan: RunPlan,
    play: RolloutSource,
    prompts: Sequence[Prompt],
    scorer: Scorer,
    *,
    version: PolicyVersion,
    modes: Sequence[str],
) -> Mapping[str, Evaluation]:
    config = plan.config
    return await evaluate(
        play,
        prompts,
        scorer,
        version=version,
        params=config.eval_sampling(),
        modes=tuple(dict.fromkeys(modes)),
        seed=config.seed,
        k=1 if config.eval is None else config.eval.k,
        success=SUCCESS if config.eval is None else config.eval.success,
        answer=plan.answer,
        counted=scorer.beside(plan.eval_rewards),
    )
