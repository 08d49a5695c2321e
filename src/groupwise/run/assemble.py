"""A configuration -> the parts of a run, opened and checked in the order that fails fastest.

Rewards and data are loaded before the model, so that a typo costs a second and not a download.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from groupwise.config.run import RunConfig
from groupwise.engine.local import NO_TURNS, LocalEngine
from groupwise.engine.vllm.installed import faster_with_vllm
from groupwise.errors import ConfigError, GrammarError
from groupwise.model.load import LoadedModel
from groupwise.model.memory import GIB, Load, fitting_tokens
from groupwise.platform import run_coroutine, spared, trim_memory
from groupwise.rewards.base import RewardWorkers, load_rewards
from groupwise.rewards.call import RewardSpec
from groupwise.rewards.classifier import load_models, reward_model, reward_models
from groupwise.rewards.pool import RewardPool
from groupwise.rewards.scorer import Scorer
from groupwise.run.batches import Batches, Pace
from groupwise.run.collect import Score
from groupwise.run.curriculum import Curriculum
from groupwise.run.evaluate import prepare_all
from groupwise.run.learner_scores import LearnerScores
from groupwise.run.memory_budget import load_of, longest_prompt, within_context
from groupwise.run.open_base import open_base
from groupwise.run.open_teacher import open_teacher
from groupwise.run.plan import RunPlan
from groupwise.run.replay import ReplayBuffer, RerollQueue, total_reward
from groupwise.run.teacher import Teacher, TeacherRollouts, taught
from groupwise.sampler import Sampler, UpdatesInFlight
from groupwise.tasks.answers import AnswerRollouts
from groupwise.tasks.data_source import data_source
from groupwise.tasks.env_kind import EnvKind, PlayParts
from groupwise.tasks.prompt_stream import PromptSource, PromptStream
from groupwise.tasks.rollout_sources import Environments, RolloutSource, SingleTurnRollouts
from groupwise.tasks.structured import free_reply, with_thoughts
from groupwise.train.learner import Learner
from groupwise.train.reference import ReferenceSpec
from groupwise.train.together import Joined, JointPasses
from groupwise.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from groupwise.engine.vllm.open import Starters
    from groupwise.model.parts import Parts
    from groupwise.train.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class Components:
    """The machines of a run."""

    base: LoadedModel
    engine: Sampler
    play: RolloutSource
    rollouts: RolloutSource  # that of the steps: `play`, with a teacher's completions, or the dataset's answers
    learner: Learner
    batches: Batches
    scorer: Scorer
    teacher: Teacher | None
    eval_prompts: tuple[Prompt, ...]
    load: Load | None  # what the memory that the run may take was compared with
    settings: ExitStack  # the process's, put back at last; for runs trained together, their opener does that

    def __enter__(self) -> Components:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine, the reward workers, and what environments or agents are played with."""
        self.play.close()
        if self.teacher is not None:
            self.teacher.close()
        self.engine.close()
        self.scorer.close()
        self.settings.close()
        trim_memory()  # of the engine's thread


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Holds the things that runs trained together share: the base model (None: the first run loads it), torch's threads
    for each run, and the joint passes of their learners."""

    base: LoadedModel | None
    threads: int
    passes: JointPasses


@dataclass(frozen=True, kw_only=True)
class RemoteBackends:
    """The parts of a run that live in other processes: its engine, or the starters of its vLLM servers; its reward
    workers; and, where `envs` is given, its environments."""

    engine: Callable[[RunConfig, LoadedModel], Sampler] | None
    rewards: Callable[[RunConfig, Sequence[RewardSpec]], RewardWorkers]
    servers: Callable[[RunConfig], Starters] | None = None
    envs: Callable[[RunConfig, EnvKind], Environments] | None = None


def open_components(
    plan: RunPlan,
    *,
    on_phase: Callable[[str], None] = lambda phase: None,
    say: Callable[[str], None] = lambda text: None,
    ranks: Ranks | None = None,
    remote: RemoteBackends | None = None,
    beside: Beside | None = None,
) -> Components:
    """Load the model and make engine, learner, reward workers and batches. Use it in a `with`, or close it.

    With `ranks` the learner leads the other processes' learners; `remote` replaces the engine, the reward workers and
    perhaps the environments. `say` reports long waits. Engine and learner make their own module trees over the base, so
    that runs trained together (`beside`) share one base.

    Until the components are closed the calling thread computes with one thread: only one thread of a process has
    OpenMP's helpers, and that is the engine's (`LocalEngine`).

    Raises ModelError, ConfigError, ContextLengthError.
    """
    config, threads = plan.config, torch.get_num_threads() if beside is None else beside.threads
    with ExitStack() as opened:  # what is undone if a later part cannot be opened
        if beside is None:
            opened.callback(torch.set_num_threads, threads)
        torch.set_num_threads(1)
        on_phase("loading")
        scorer = open_scorer(plan, remote=remote)  # its processes start meanwhile, and those of environments
        opened.callback(scorer.close)
        if (envs := open_envs(plan, remote=remote)) is not None:
            opened.callback(envs.close)
        if beside is not None and beside.base is not None:
            base, parts = beside.base, None
        else:
            base, parts = open_base(config, ranks, remote=remote is not None and remote.engine is not None)
        learner = open_learner(config, base, threads=threads, ranks=ranks, parts=parts, beside=beside)
        base = learner.base
        if plan.keeps_reference:
            learner.keep_reference()
        starters = None
        if config.engine == "vllm":
            from groupwise.run.vllm_servers import open_servers

            config, starters = open_servers(config, learner.device, ranks, remote)
            on_phase("waiting for vLLM")
        elif remote is None and (faster := faster_with_vllm(config, learner.device)) is not None:
            say(faster)
        if remote is not None and remote.engine is not None:
            engine = remote.engine(config, base)
        else:
            engine = open_engine(
                config, base, threads=threads, beside=beside, learner=learner, starters=starters, say=say
            )
        opened.callback(engine.close)
        check_in_flight(config, engine)
        check_grammar(config, engine, base.tokenizer)
        play = open_play(plan, base, engine, envs)
        if config.teacher is not None and not config.teacher.chooses:
            on_phase("loading the teacher")
        teacher = open_teacher(plan, base, engine, threads=threads)
        if teacher is not None:
            opened.callback(teacher.close)
        limited = config.train.memory_gb is not None or learner.device.type == "cuda"  # gpu-aware
        load = _fitted(replace(plan, config=config), base, learner, play, teacher, engine) if limited else None
        eval_prompts = tuple(prepare_all(plan.eval_prompts, play, context=engine.context_length))
        rollouts = play
        if config.supervised:
            rollouts = AnswerRollouts(play, base.tokenizer, context=base.context_length)
        if teacher is not None and teacher.config.loss == "sft":
            rollouts = TeacherRollouts(config, teacher, play)
        batches = _batches(plan, engine, rollouts, taught(scorer, teacher, config))
        settings = ExitStack() if beside is not None else _of_process(threads)
        opened.pop_all()
    return Components(
        base=base,
        engine=engine,
        play=play,
        rollouts=rollouts,
        learner=learner,
        batches=batches,
        scorer=scorer,
        teacher=teacher,
        eval_prompts=eval_prompts,
        load=load,
        settings=settings,
    )


def _of_process(threads: int) -> ExitStack:
    """Exempt the objects that are here from garbage collection, which would cost a step some percent, and return the
    stack that ends this when it is closed, and gives torch back its `threads`."""
    settings = ExitStack()
    settings.callback(torch.set_num_threads, threads)
    settings.enter_context(spared())
    return settings


def open_engine(
    config: RunConfig,
    base: LoadedModel,
    *,
    threads: int,
    beside: Beside | None = None,
    learner: Learner | None = None,
    starters: Starters | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Sampler:
    """Return the run's sampler. With vLLM, versions are checked against the local engine, or against the `learner` if
    no process has the whole base (`RunConfig.keeps_base`); `starters` start its servers, and `say` reports the wait for
    them. The local engine takes turns with the engines of the runs trained together with this one (`beside`)."""
    apart = learner if base.device.type == "meta" else None
    scores = None if apart is None else LearnerScores(apart)
    if scores is not None and config.never_samples:
        return scores
    own = None if os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive" else threads
    if config.engine == "local":
        return local_engine(config, base, threads=own, beside=beside)
    from groupwise.engine.vllm.open import open_vllm
    from groupwise.run.vllm_servers import give_unused_back

    return open_vllm(
        config,
        base,
        scores or LocalEngine(base, max_rows=1, prefix_cache_mb=0, threads=own),
        starters=starters,
        write=None if apart is None else apart.save_adapter,
        stream=None if apart is None else apart.stream_weights,
        device=None if apart is None else apart.device,
        before_waking=partial(give_unused_back, config, base.device if apart is None else apart.device),
        say=say,
    )


def local_engine(
    config: RunConfig, base: LoadedModel, *, threads: int | None = None, beside: Beside | None = None
) -> LocalEngine:
    """Return the local engine, as `rollout` says."""
    rollout = config.rollout
    return LocalEngine(
        base,
        max_rows=rollout.batch_rows,
        prefix_cache_mb=rollout.prefix_cache_mb,
        draft_tokens=rollout.draft_tokens,
        compile=rollout.compile,
        dtype=rollout.dtype,
        threads=threads,
        turns=NO_TURNS if beside is None else beside.passes.turns,
        record_routing=True,
        cache_bytes=None if rollout.cache_gb is None else int(rollout.cache_gb * GIB),
    )


def check_in_flight(config: RunConfig, engine: Sampler) -> None:
    """Raise ConfigError where `rollout.in_flight_updates` is true and the engine cannot do it."""
    if not config.rollout.in_flight_updates:
        return
    if not isinstance(engine, UpdatesInFlight):
        raise ConfigError(
            "rollout.in_flight_updates is true, but engines that are actors of Ray finish a completion with the "
            "version that began it",
            hint="leave it out, or use another launcher",
            field="rollout.in_flight_updates",
        )
    engine.check_replaceable(recompute=config.rollout.in_flight_cache == "recompute")


def check_grammar(config: RunConfig, engine: Sampler, tokenizer: PreTrainedTokenizerBase) -> None:
    """Compile what completions must be, for this model's vocabulary. Raises ConfigError where that cannot be done."""
    rollout, grammar = config.rollout, config.rollout.grammar
    if rollout.thinking_budget is not None:
        grammar = with_thoughts(grammar or free_reply(), tokenizer, "begun", tokens=rollout.thinking_budget)
    if grammar is None or not isinstance(engine, LocalEngine):  # actors of Ray say so with the first completion
        return
    try:
        engine.prepare(grammar).result()
    except GrammarError as error:
        raise ConfigError(error.message, hint=error.hint, field=error.field or grammar.field) from None


def _check_replay(config: RunConfig, learner: Learner) -> None:
    """Raise ConfigError where `train.router_replay` is true and cannot act."""
    if not config.train.router_replay:
        return
    kind = type(learner.base.model).__name__
    if not learner.routes:
        why, hint = f"{kind} has no routers of experts", "leave it out"
    elif config.engine != "local":
        why, hint = (
            f"engine {config.engine} does not record the experts of a token",
            "set engine=local, or leave it out",
        )
    else:
        return
    raise ConfigError(f"train.router_replay is true, but {why}", hint=hint, field="train.router_replay")


def _fitted(
    plan: RunPlan,
    base: LoadedModel,
    learner: Learner,
    play: RolloutSource,
    teacher: Teacher | None,
    engine: Sampler,
) -> Load:
    """Give the learner micro-batches for which `train.memory_gb`, or what a GPU has free, suffices. Raises ConfigError
    where `train.memory_gb` suffices for none."""
    prompts = plan.source.known
    config = within_context(plan.config, context=base.context_length)
    longest = longest_prompt(config, prompts, play, context=base.context_length)
    load = load_of(
        config,
        base,
        learner,
        longest_prompt=longest,
        reads_reference=plan.reads_reference,
        teacher=teacher,
        engine=engine,
    )
    learner.set_micro_tokens(fitting_tokens(config, load))
    return load


def open_envs(plan: RunPlan, *, remote: RemoteBackends | None = None) -> Environments | None:
    """Return the maker of episodes' environments, in `env.workers` processes if any; None if the run has no
    environment."""
    env, config = plan.env, plan.config.env
    if config is None or env is None:
        return None
    if env.in_workers and remote is not None and remote.envs is not None:
        return remote.envs(plan.config, env)
    return env.open_envs(config, Path(plan.config.folder))


def open_play(plan: RunPlan, base: LoadedModel, engine: Sampler, envs: Environments | None) -> RolloutSource:
    """Return how the run's prompts become groups; `envs` is what `open_envs` returned, which the play closes."""
    env, config = plan.env, plan.config.env
    if env is None or config is None:
        return SingleTurnRollouts(engine, base.tokenizer)
    parts = PlayParts(
        engine=engine,
        base=base,
        config=config,
        run=plan.config.rollout.sampling(),
        scored=bool(plan.rewards),
        recorded=plan.config.engine == "local",
        envs=envs,
    )
    return env.open_play(parts)


def open_learner(
    config: RunConfig,
    base: LoadedModel,
    *,
    threads: int,
    ranks: Ranks | None = None,
    parts: Parts | None = None,
    beside: Beside | None = None,
) -> Learner:
    """Return the learner of a run. It computes together with the learners of `beside`; with `ranks` it is this
    process's part of a learner on several processes, and reads `parts` if given. Raises ConfigError."""
    train, algo = config.train, config.algo
    strategy = None if beside is None else Joined(beside.passes)
    if ranks is not None:
        from groupwise.train.orders import strategy_of

        strategy = strategy_of(
            ranks,
            sharded=train.parallel == "fsdp",
            cpu_offload=train.cpu_offload,
            parts=parts,
            shard_size=train.shard_size,
            context_size=train.context_parallel_size,
        )
    learner = Learner(
        base,
        lora=train.lora,
        parameters=train.parameters,
        optimizer=train,
        micro_tokens=train.micro_tokens,
        gradient_checkpointing=train.gradient_checkpointing,
        autocast=torch.bfloat16 if train.mixed_precision else None,
        attention=train.attention,
        reference=ReferenceSpec(kind=config.reference, decay=algo.reference_decay, every=algo.reference_every),
        seed=config.seed,
        threads=threads,
        router_replay=train.router_replay is not False,
        strategy=strategy,
    )
    _check_replay(config, learner)
    if ranks is not None and ranks.leads:
        learner.check_alike()
    return learner


def open_scorer(plan: RunPlan, *, remote: RemoteBackends | None = None) -> Scorer:
    """Return the run's rewards, in the processes that `scoring` configures; close the scorer at the end. The processes
    also have the rewards of `eval.rewards` (`Scorer.beside`), and load reward models now.

    Raises RewardError for a reward model that cannot be loaded.
    """
    own = [function.spec for function in (*plan.rewards, *plan.eval_rewards) if function.spec is not None]
    specs = [*own, *reward_models(own)]
    pool = _pool(plan, specs, remote)
    scorer = Scorer(plan.rewards, pool=pool, max_steps=plan.config.train.steps)
    if plan.env is not None:
        scorer.on_scored = plan.env.on_scored
    models = [each for each in load_rewards(specs, folder=plan.config.folder) if each.function is reward_model]
    try:
        if models:
            run_coroutine(load_models(models, group_size=plan.config.rollout.group_size, pool=pool))
    except BaseException:
        scorer.close()
        raise
    return scorer


def _pool(plan: RunPlan, specs: Sequence[RewardSpec], remote: RemoteBackends | None) -> RewardWorkers | None:
    """Return the reward workers; none where all functions were handed over as objects, which other processes cannot
    load."""
    scoring = plan.config.scoring
    if not scoring.workers or not specs:
        return None
    if remote is not None:
        return remote.rewards(plan.config, specs)
    pool = RewardPool(specs, folder=plan.config.folder, workers=scoring.workers, timeout_s=scoring.timeout_s)
    pool.warm([*plan.rewards, *plan.eval_rewards])
    return pool


def _held(plan: RunPlan) -> PromptSource:
    """Return the prompts of a run that does not stream them."""
    assert isinstance(plan.source, PromptSource)  # the configuration refuses it otherwise
    return plan.source


def _batches(plan: RunPlan, engine: Sampler, play: RolloutSource, score: Score) -> Batches:
    config, rollout = plan.config, plan.config.rollout
    curriculum = None if config.data is None else config.data.curriculum
    source: PromptStream = plan.source
    if config.data is not None and config.data.difficulty:
        source = data_source(config.data.origin).stream(_held(plan), config.data, plan.rewards)
    if curriculum is not None:
        source = Curriculum(
            _held(plan),
            filter=curriculum.filter,
            weight=curriculum.weight,
            min_seen=curriculum.min_seen,
            seed=config.seed,
        )
    replay, reroll = rollout.replay, rollout.reroll
    return Batches(
        source=source,
        play=play,
        score=score,
        context_length=engine.context_length,
        params=rollout.sampling(),
        group_size=rollout.group_size,
        pace=Pace.of(rollout, steps=config.train.steps),
        seed=config.seed,
        advantage=plan.config.algo,
        weights=plan.reward_weights,
        keep_flat=plan.keep_flat,
        max_prompt_tokens=rollout.max_prompt_tokens,
        replay=ReplayBuffer(replay.size, share=replay.share, max_age=replay.max_age, seed=config.seed),
        reroll=RerollQueue(
            reroll.max_groups,
            start=reroll.start,
            attempts=reroll.attempts,
            outcome=total_reward if reroll.reward is None else lambda rollout: rollout.rewards.get(reroll.reward or ""),
        ),
    )
