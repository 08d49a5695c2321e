"""`groupwise eval`: the rewards of the base model or of one adapter, on the prompts that a configuration names.

Prompts, samples, `eval.k`, `eval.success` and the processes in which rewards run are those of a run's own evaluations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext

from groupwise.config.run import RunConfig
from groupwise.model.load import load_model
from groupwise.platform import run_coroutine
from groupwise.rewards.base import Scorer
from groupwise.run.assemble import local_engine, open_envs, open_play, open_scorer
from groupwise.run.evaluate import SUCCESS, Evaluation, checked_modes, evaluate, prepare_all
from groupwise.run.plan import RunPlan, make_plan
from groupwise.store.rundir import Located, find_adapter
from groupwise.types import PolicyVersion, Prompt


def assess(
    config: RunConfig,
    *,
    plan: RunPlan | None = None,
    adapter: str | None = None,
    modes: Sequence[str] = (),
    note: Callable[[str], None],
) -> tuple[Mapping[str, Evaluation], str]:
    """Evaluations by mode, and what was evaluated in words. `adapter` is as `store.rundir.find_adapter` takes it;
    `plan` is that of the configuration, if it was made already.

    Raises ConfigError for an unknown mode, AdapterNotFoundError or AdapterError, ContextLengthError for a prompt that
    fills the context.
    """
    modes = checked_modes(config, modes)
    located = None if adapter is None else find_adapter(adapter)
    plan = plan or make_plan(config)
    prompts = plan.eval_prompts
    if config.eval is None:
        prompts = tuple(plan.source.all())
        note(f"no eval.data in the configuration: evaluating on all {len(prompts)} training prompts")
    held = nullcontext() if located is None else located.held()  # no run removes it meanwhile
    with held, closing(open_scorer(plan)) as scorer:
        return _assessed(plan, prompts, scorer, modes=tuple(dict.fromkeys(modes)), located=located, note=note)


def _assessed(
    plan: RunPlan,
    prompts: Sequence[Prompt],
    scorer: Scorer,
    *,
    modes: Sequence[str],
    located: Located | None,
    note: Callable[[str], None],
) -> tuple[Mapping[str, Evaluation], str]:
    config = plan.config
    base = load_model(config.model, device=config.device, dtype=config.dtype, quantization=config.quantization)
    with closing(local_engine(config, base)) as engine:
        version, policy = PolicyVersion.base(), f"{config.model}, no adapter"
        if located is not None:
            located.check_base(base.hash)
            engine.load(located.version, located.directory)
            version, policy = located.version, str(located.directory)
        with closing(open_play(plan, base, engine, open_envs(plan))) as play:
            result = run_coroutine(
                evaluate(
                    play,
                    prepare_all(prompts, play, context=base.context_length),
                    scorer,
                    version=version,
                    params=config.rollout.sampling(),
                    modes=modes,
                    seed=config.seed,
                    k=1 if config.eval is None else config.eval.k,
                    success=SUCCESS if config.eval is None else config.eval.success,
                )
            )
    for each in result.values():
        if (failures := each.failures()) is not None:
            note(failures)
    return result, policy
