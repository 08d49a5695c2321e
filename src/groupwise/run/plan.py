"""Plans a run without its model: loads the reward functions, the prompts and the environment, and resolves the loss.

A plan is made before torch is imported and before a model is loaded or downloaded, so that a mistake in the
configuration, the data or the rewards is told within a second or two.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from groupwise.algo.algorithm import Algorithm, load_algorithm
from groupwise.config.hub import check_model
from groupwise.config.load import load_object
from groupwise.config.loss import LossSpec, loss_of
from groupwise.config.run import RunConfig, identity, resolved
from groupwise.config.teacher import BEST_COMPLETION, TeacherConfig
from groupwise.errors import ConfigError, DataError, GrammarError, GroupwiseError
from groupwise.rewards.base import check_columns, load_rewards, reward_names
from groupwise.rewards.call import RewardFunction
from groupwise.rewards.math import final_answer, final_number
from groupwise.store.trackers import check_installed
from groupwise.tasks.env_kind import EnvKind
from groupwise.tasks.load_env_kind import load_env_kind
from groupwise.tasks.prompt_stream import PromptSource
from groupwise.tasks.prompts import open_prompts
from groupwise.tasks.streamed_prompts import StreamedPrompts
from groupwise.types import Prompt

ANSWERS: Mapping[str, Callable[[str], object]] = {"final": final_answer, "number": final_number}  # of `eval.answer`


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The parts of a run that need no model: reward functions, prompts, environment, loss."""

    config: RunConfig
    rewards: tuple[RewardFunction, ...]
    eval_rewards: tuple[RewardFunction, ...]  # what evaluations count by; empty where that is `rewards`
    env: EnvKind | None
    source: PromptSource | StreamedPrompts
    eval_prompts: tuple[Prompt, ...]  # what evaluations sample completions of
    eval_answers: tuple[Prompt, ...]  # with kind sft and dpo: the held-out rows, whose loss evaluations compute
    answer: Callable[[str], object]
    loss: LossSpec
    algorithm: Algorithm | None

    @cached_property
    def config_hash(self) -> str:
        """Return a digest of what makes it this run: the same when it is resumed, wherever and on however many
        devices."""
        return hashlib.sha256(json.dumps(identity(resolved(self.config)), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def rows(self) -> int | None:
        """Return how many prompts an epoch has; None where they are streamed."""
        return len(self.source) if isinstance(self.source, PromptSource) else None

    @property
    def reward_weights(self) -> Mapping[str, float]:
        return {function.name: function.weight for function in self.rewards}

    @property
    def keep_flat(self) -> bool:
        """Return whether groups of equal rewards still have a gradient, through another term of the loss."""
        train = self.config.train
        stale = self.config.may_be_stale
        return self.kl_coeff is not None or self.loss.needs_flat(train.minibatches * train.passes, stale=stale)

    @property
    def warnings(self) -> list[str]:
        """Return warnings about accepted settings that bias training."""
        train = self.config.train
        return self.loss.off_policy_warnings(train.minibatches * train.passes, stale=self.config.may_be_stale)

    @property
    def reads_reference(self) -> bool:
        """See `RunConfig.reads_reference`."""
        return self.config.reads_reference

    @property
    def keeps_reference(self) -> bool:
        """Return whether the learner keeps a reference: where it is read, and to measure how far a run is from its
        stages."""
        return self.reads_reference or bool(self.config.stages)

    @property
    def kl_coeff(self) -> float | None:
        """Return the KL's weight in the reward (`kl_in: reward`); None if the KL is not in the reward."""
        return self.config.algo.kl_coeff if self.config.algo.kl_in == "reward" else None


def make_plan(config: RunConfig, *, rewards: Sequence[RewardFunction] | None = None) -> RunPlan:
    """Load rewards and data, resolve the loss, and look for the model. Raises ConfigError, LoadError, DataError or
    ModelError."""
    functions = tuple(rewards or load_rewards(config.rewards, folder=config.folder))
    counted = _eval_rewards(config)
    env = _env(config)
    _check_grammar(config, env)
    source = _source(config, env)
    prompts, held_out = source.known, _held_out(config, env)
    added = () if env is None else env.columns
    if added is not None:
        scored = held_out if config.supervised else [*prompts, *held_out]
        check_columns(functions, _with_columns(scored, added))
        check_columns(counted, _with_columns(held_out, added))
    _check_reroll(config, functions)
    without_kl = config.algo.model_copy(update={"kl": None, "kl_coeff": None})
    loss = loss_of(
        config.algo if config.algo.kl_in == "loss" else without_kl,
        max_tokens=config.rollout.max_tokens,
        stale=config.may_be_stale,
        dropout=config.train.lora is not None and config.train.lora.dropout > 0,
        folder=config.folder,
    )
    if config.teacher is not None:
        loss = _with_teacher(loss, config.teacher, [*prompts] if env is None else None)
    if config.rollout.stream_groups and not loss.streams:
        raise ConfigError(
            f"rollout.stream_groups does not go with an entropy bonus and reduction {loss.reduction!r}",
            hint="set algo.reduction: token_mean, or take the batch whole (rollout.stream_groups: 0)",
        )
    check_installed(config.tracking)
    check_model(config.model)
    return RunPlan(
        config=config,
        rewards=functions,
        eval_rewards=counted,
        env=env,
        source=source,
        eval_prompts=tuple(held_out),
        eval_answers=_held_out_answers(config),
        answer=_answer(config),
        loss=loss,
        algorithm=None if (name := config.algo.algorithm) is None else load_algorithm(name, folder=config.folder),
    )


def _with_teacher(loss: LossSpec, teacher: TeacherConfig, prompts: Sequence[Prompt] | None) -> LossSpec:
    """Return the loss with the teacher's term. Raises ConfigError where no prompt has the column of its context,
    ModelError where its model cannot be loaded."""
    column = teacher.context
    if prompts and column not in (None, BEST_COMPLETION) and not any(prompt.columns.get(column) for prompt in prompts):
        held = ", ".join(map(repr, dict.fromkeys(name for prompt in prompts for name in prompt.columns))) or "none"
        raise ConfigError(
            f"no prompt has anything in the column {column!r}, which is to be the teacher's context; columns: {held}",
            hint=f"name a column, or {BEST_COMPLETION}",
            field="teacher.context",
        )
    if teacher.model is not None and teacher.base_url is None:
        check_model(teacher.model)
    return replace(loss, soft_kl=teacher.divergence, soft_kl_coeff=teacher.coefficient) if teacher.top_k else loss


def _with_columns(prompts: Sequence[Prompt], added: Sequence[str]) -> list[Prompt]:
    """Return the prompts with the columns that what plays the episodes adds."""
    new = dict.fromkeys(added)
    return [replace(prompt, columns={**prompt.columns, **new}) for prompt in prompts] if new else list(prompts)


def _env(config: RunConfig) -> EnvKind | None:
    """Return what plays the episodes, if the configuration names something."""
    if config.env is None:
        return None
    env = load_env_kind(config.env, folder=Path(config.folder), model=config.model, scored=bool(config.rewards))
    if env.players:
        _check_self_play(config, env)
    return env


def _check_self_play(config: RunConfig, env: EnvKind) -> None:
    """Raise ConfigError for what reads one reward of an episode, where each player has its own."""
    wrong = {
        "rewards": bool(config.rewards),
        "eval.rewards": config.eval is not None and bool(config.eval.rewards),
        "algo.aggregation": config.algo.aggregation != "sum_then_normalize",
        "rollout.reroll": config.rollout.reroll.max_groups > 0,
    }
    for field in (field for field, given in wrong.items() if given):
        raise ConfigError(
            f"{field} does not go with {env.name}, whose players ({', '.join(env.players)}) each have a reward",
            hint="leave it out; rewards come from step and score",
            field=field,
        )


def _source(config: RunConfig, env: EnvKind | None) -> PromptSource | StreamedPrompts:
    """Return the prompts to train on: the configuration's, or the environment's own cases."""
    if config.data is not None:
        if env is not None and env.makes_prompts:
            method = env.case_methods[0].partition("(")[0]
            raise ConfigError(f"data does not go with {env.name}, whose {method} makes the prompts; remove it")
        source = open_prompts(
            config.data, folder=config.folder, seed=config.seed, cases=_takes_cases(env), kind=config.kind
        )
        if env is not None:
            env.check(source.known, config.data.label)
        return source
    assert env is not None
    if (cases := env.cases()) is None:
        method = env.case_methods[0]
        raise ConfigError(
            f"there is no data: {env.name} has no method {method.partition('(')[0]}",
            hint=f"write {method}, or set data.source",
        )
    return PromptSource(cases, seed=config.seed)


def _takes_cases(env: EnvKind | None) -> bool:
    """Return whether a row needs no prompt: what the policy is asked, this says."""
    return env is not None and env.takes_cases


def _held_out(config: RunConfig, env: EnvKind | None) -> list[Prompt]:
    """Return the prompts to evaluate on."""
    if config.eval is None or not config.samples_evaluations:
        return []
    if config.eval.data is not None:
        prompts = open_prompts(config.eval.data, folder=config.folder, cases=_takes_cases(env)).known
        return list(prompts) if env is None else env.check(prompts, config.eval.data.label)
    assert env is not None
    if (cases := env.cases(held_out=True)) is None:
        method = env.case_methods[1]
        raise ConfigError(
            f"eval has no data: {env.name} has no method {method.partition('(')[0]}",
            hint=f"write {method}, set eval.data.source, or remove eval",
        )
    return cases[: config.eval.limit]


def _held_out_answers(config: RunConfig) -> tuple[Prompt, ...]:
    """Return the held-out rows with their answers or pairs. There are none where rows without them are evaluated by
    rewards. Raises DataError for such a row where there are no rewards."""
    if config.eval is None or config.eval.data is None or not config.supervised:
        return ()
    try:
        return tuple(open_prompts(config.eval.data, folder=config.folder, kind=config.kind).known)
    except DataError:
        if config.samples_evaluations and config.eval.best != "loss":
            return ()
        raise


def _eval_rewards(config: RunConfig) -> tuple[RewardFunction, ...]:
    """Return the functions of `eval.rewards`, under names that no reward of the run has: both run in the same
    processes."""
    if config.eval is None:
        return ()
    own = config.eval.rewards
    names = reward_names([*config.rewards, *own])[len(config.rewards) :]
    named = [spec.model_copy(update={"name": name}) for spec, name in zip(own, names, strict=True)]
    return load_rewards(named, folder=config.folder)


def _answer(config: RunConfig) -> Callable[[str], object]:
    """Return what `eval.answer` names: what a completion's text votes for in maj@k."""
    name = (config.eval and config.eval.answer) or "final"
    if name in ANSWERS:
        return ANSWERS[name]
    if not re.search(r"[.:]", name):
        known = ", ".join(ANSWERS)
        raise ConfigError(f"eval.answer {name!r} does not exist; valid: {known}, module:function", field="eval.answer")
    return load_object(name, folder=config.folder)


def _check_reroll(config: RunConfig, functions: Sequence[RewardFunction]) -> None:
    names, chosen = [function.name for function in functions], config.rollout.reroll.reward
    if chosen is not None and chosen not in names:
        raise ConfigError(f"rollout.reroll.reward {chosen!r} is no reward of this run; it has {', '.join(names)}")


def _check_grammar(config: RunConfig, env: EnvKind | None) -> None:
    """Raise ConfigError where what completions must be is wrong, or cannot be asked of what plays the episodes."""
    if (grammar := config.rollout.grammar) is None:
        return
    if env is not None and env.own_texts:
        raise ConfigError(
            f"{grammar.field} does not go with {env.name}, which generates text of its own choice: that need not be "
            "the answer whose form is asked for",
            hint="leave it out, or write an environment with reset and step",
            field=grammar.field,
        )
    from groupwise.engine.grammar import check_grammar  # numpy, and a library for runs that need it

    try:
        check_grammar(grammar)
    except GrammarError as error:
        raise ConfigError(error.message, hint=error.hint, field=error.field) from None


def plan_or_all_problems(config: RunConfig) -> RunPlan:
    """Return `make_plan`'s plan, with an error that names the problems of all parts and not only of the first."""
    try:
        return make_plan(config)
    except GroupwiseError as error:
        raise _all_problems(config, error) from error


def _all_problems(config: RunConfig, first: GroupwiseError) -> GroupwiseError:
    """Return one error that names what is wrong with each part that can be opened by itself; `first` if there is only
    that."""
    attempts: list[Callable[[], object]] = [
        lambda: load_rewards(config.rewards, folder=config.folder),
        lambda: _eval_rewards(config),
        lambda: (
            config.data
            and open_prompts(config.data, folder=config.folder, cases=config.env is not None, kind=config.kind)
        ),
        lambda: _held_out_answers(config),
        lambda: (
            config.samples_evaluations
            and config.eval
            and config.eval.data
            and open_prompts(config.eval.data, folder=config.folder, cases=config.env is not None)
        ),
        lambda: _answer(config),
        lambda: loss_of(config.algo, max_tokens=config.rollout.max_tokens, folder=config.folder),
    ]
    problems: list[GroupwiseError] = []
    for attempt in attempts:
        try:
            attempt()
        except GroupwiseError as error:
            problems.append(error)
    if len(problems) < 2:
        return first
    return ConfigError(f"{len(problems)} problems:" + "".join(f"\n  - {_indented(problem)}" for problem in problems))


def _indented(problem: GroupwiseError) -> str:
    return str(problem).replace("\n", "\n    ")
