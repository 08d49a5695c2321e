"""Episodes that an agent plays with the starter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from episodes import Recorder
from groupwise.config.run import EnvConfig
from groupwise.engine.local import LocalEngine
from groupwise.model.load import LoadedModel
from groupwise.tasks.agent_rollouts import AgentRollouts
from groupwise.tasks.agents import NEEDED, Agent
from groupwise.tasks.rollout_sources import play_all
from groupwise.types import PolicyVersion, Prompt, Rollout, RolloutGroup, SamplingParams

Played = Callable[..., list[Rollout]]


@pytest.fixture
def recorder(starter_engine: LocalEngine) -> Recorder:
    return Recorder(starter_engine)


@pytest.fixture
def play_group(recorder: Recorder, starter: LoadedModel) -> Iterator[Callable[..., RolloutGroup]]:
    """`play_group(agent, n=2, takes=..., max_turns=3, ...)`: what `agent` plays; other options are `env`'s."""
    opened: list[AgentRollouts] = []

    def run(
        agent: Callable[..., Any],
        *,
        n: int = 1,
        case: dict[str, Any] | None = None,
        takes: tuple[str, ...] = (*NEEDED, "case", "model", "seed"),
        params: SamplingParams | None = None,
        scored: bool = False,
        recorded: bool = True,
        sampler: Any = recorder,
        tokenizer: Any = None,
        **options: Any,
    ) -> RolloutGroup:
        config = EnvConfig(agent="tests:agent", **options)
        made = Agent(name="agent", function=agent, takes=takes)
        opened.append(
            AgentRollouts(sampler, tokenizer or starter.tokenizer, made, config, scored=scored, recorded=recorded)
        )
        groups = play_all(
            opened[-1],
            [Prompt(id="case:0", columns=case or {"question": "What is 47 + 138?"})],
            seeds=[5],
            n=n,
            params=params or SamplingParams(max_tokens=48),
            version=PolicyVersion.base(),
        )
        (group,) = asyncio.run(groups)
        return group

    yield run
    for play in opened:
        play.close()
