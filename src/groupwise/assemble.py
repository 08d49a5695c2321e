"""A configuration -> the parts of a run, opened and checked in the order that fails fastest.

Rewards and data are loaded before the model, so that a typo costs a second and not a download.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from groupwise.algo.advantage import AdvantageSpec
from groupwise.algo.loss_spec import LossSpec, loss_of
from groupwise.config import RunConfig, dump_resolved
from groupwise.data import PromptSource, open_prompts
from groupwise.engine.local import LocalEngine
from groupwise.evaluate import encode_all
from groupwise.model import LoadedModel, load_model
from groupwise.rewards.base import RewardFunction, check_columns, load_rewards
from groupwise.rollout import Collector
from groupwise.train.learner import Learner, OptimizerSpec
from groupwise.train.lora import LoraSpec
from groupwise.types import Prompt


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What can be known without the model: the functions, the prompts, the loss."""

    config: RunConfig
    rewards: tuple[RewardFunction, ...]
    source: PromptSource
    eval_prompts: tuple[Prompt, ...]
    loss: LossSpec
    advantage: AdvantageSpec

    @cached_property
    def config_hash(self) -> str:
        return hashlib.sha256(dump_resolved(self.config).encode()).hexdigest()[:16]

    @property
    def reward_weights(self) -> Mapping[str, float]:
        return {function.name: function.weight for function in self.rewards}

    @property
    def keep_flat(self) -> bool:
        """Whether groups of equal rewards still have a gradient, through another term of the loss."""
        return self.loss.reads_reference or self.loss.reads_entropy


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The machines of a run."""

    base: LoadedModel
    engine: LocalEngine
    learner: Learner
    collector: Collector
    eval_prompts: tuple[Prompt, ...]


def make_plan(config: RunConfig, *, rewards: Sequence[RewardFunction] | None = None) -> Plan:
    """Load rewards and data and resolve the loss. Raises ConfigError, LoadError or DataError."""
    functions = tuple(rewards or load_rewards(config.rewards, folder=config.folder))
    source = open_prompts(config.data, folder=config.folder, seed=config.seed)
    prompts = source.all()
    held_out = [] if config.eval is None else open_prompts(config.eval.data, folder=config.folder).all()
    check_columns(functions, [*prompts, *held_out])
    return Plan(
        config=config,
        rewards=functions,
        source=source,
        eval_prompts=tuple(held_out),
        loss=loss_of(config.algo, max_tokens=config.rollout.max_tokens),
        advantage=AdvantageSpec(
            kind=config.algo.advantage, eps=config.algo.advantage_eps, aggregation=config.algo.aggregation
        ),
    )


def open_parts(plan: Plan, *, on_phase: Callable[[str], None] = lambda phase: None) -> Parts:
    """Load the model and make engine, learner and collector. Raises ModelError, ConfigError, ContextLengthError."""
    config, lora = plan.config, plan.config.train.lora
    on_phase("loading")
    base = load_model(config.model, device=config.device, dtype=config.dtype)
    learner = Learner(
        base,
        lora=None
        if lora is None
        else LoraSpec(rank=lora.rank, alpha=lora.alpha, dropout=lora.dropout, targets=lora.targets),
        optimizer=OptimizerSpec(
            betas=config.train.betas,
            weight_decay=config.train.weight_decay,
            max_grad_norm=config.train.max_grad_norm,
        ),
        micro_tokens=config.train.micro_tokens,
        gradient_checkpointing=config.train.gradient_checkpointing,
        seed=config.seed,
    )
    if plan.loss.reads_reference:
        learner.keep_reference()
    engine = LocalEngine(base, max_rows=config.rollout.batch_rows)
    collector = Collector(
        source=plan.source,
        sampler=engine,
        rewards=plan.rewards,
        base=base,
        params=config.rollout.sampling(),
        prompts_per_step=config.rollout.prompts_per_step,
        group_size=config.rollout.group_size,
        refill=config.rollout.refill,
        seed=config.seed,
        advantage=plan.advantage,
        keep_flat=plan.keep_flat,
        on_phase=on_phase,
    )
    return Parts(
        base=base,
        engine=engine,
        learner=learner,
        collector=collector,
        eval_prompts=tuple(encode_all(plan.eval_prompts, base)),
    )
