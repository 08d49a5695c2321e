"""Groups of episodes that agents play: a `RolloutSource`, as `rollout_sources.EpisodeRollouts` is for environments."""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from groupwise.config.run import EnvConfig
from groupwise.sampler import Sampler
from groupwise.tasks.agent_episode import AgentEpisode
from groupwise.tasks.agent_session import AgentSession
from groupwise.tasks.agents import Agent
from groupwise.tasks.env_kind import warn
from groupwise.tasks.rollout_sources import Slots, case_of, together
from groupwise.types import PolicyVersion, Prompt, RolloutGroup, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from groupwise.tasks.endpoint import Endpoint


class AgentRollouts:
    """Each prompt is a case that the agent plays `n` times. Close it, or let go of it.

    Args:
        scored: reward functions score the episodes too, so that an agent need not.
        recorded: the engine records which tokens were left to draw from (`AgentSession`).
        note: is told once of each parameter that agents send and that changes nothing.
    """

    def __init__(
        self,
        sampler: Sampler,
        tokenizer: PreTrainedTokenizerBase,
        agent: Agent,
        config: EnvConfig,
        *,
        scored: bool,
        recorded: bool = True,
        note: Callable[[str], None] = warn,
    ):
        self._sampler, self._tokenizer, self._recorded = sampler, tokenizer, recorded
        self._agent, self._config, self._scored, self._tell = agent, config, scored, note
        self._noted: set[str] = set()
        self._slots = Slots(config.concurrency)
        self._endpoint: Endpoint | None = None

    def prepare(self, prompt: Prompt) -> Prompt:
        """Returns the prompt unchanged, since the agent decides what the policy is asked."""
        return prompt

    def begin(
        self, prompts: Sequence[Prompt], *, seeds: Sequence[int], n: int, params: SamplingParams, version: PolicyVersion
    ) -> list[Awaitable[RolloutGroup]]:
        """See `RolloutSource.begin`."""
        if self._endpoint is None:
            from groupwise.tasks.endpoint import Endpoint  # a web server, for runs that need one

            self._endpoint = Endpoint(self._tokenizer)
            weakref.finalize(self, self._endpoint.stop)
        return [
            self._group(prompt, self._endpoint, seed=seed, n=n, params=params, version=version)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]

    def close(self) -> None:
        """Close the endpoint."""
        self._agent.on_close()
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None

    async def _group(
        self, prompt: Prompt, endpoint: Endpoint, *, seed: int, n: int, params: SamplingParams, version: PolicyVersion
    ) -> RolloutGroup:
        sessions = [
            AgentSession(
                sampler=self._sampler,
                tokenizer=self._tokenizer,
                config=self._config,
                params=params,
                version=version,
                seed=seed,
                number=number,
                recorded=self._recorded,
            )
            for number in range(n)
        ]
        async with self._slots.take(n):
            played = await together([self._episode(prompt, session, endpoint).play() for session in sessions])
        self._say_ignored({name for session in sessions for name in session.ignored_names})
        if (first := next((first for _, first in played if first is not None), None)) is not None:
            messages, tools, token_ids = first
            prompt = replace(prompt, messages=messages, tools=tools, token_ids=token_ids)
        return RolloutGroup(prompt=prompt, rollouts=tuple(rollout for rollout, _ in played))

    def _say_ignored(self, names: set[str]) -> None:
        if new := sorted(names - self._noted):
            self._noted |= names
            self._tell(
                f"{self._agent.name} asks with {', '.join(new)}, which change nothing: how the policy samples is the "
                "run's, whose distribution is trained (env/ignored_parameters counts such requests)"
            )

    def _episode(self, prompt: Prompt, session: AgentSession, endpoint: Endpoint) -> AgentEpisode:
        return AgentEpisode(
            agent=self._agent, case=case_of(prompt), session=session, endpoint=endpoint, scored=self._scored
        )
