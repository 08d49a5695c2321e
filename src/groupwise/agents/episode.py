"""One episode that an agent plays: one call of it, and what it asked the policy meanwhile.

Whatever the agent does, the episode ends in a rollout:

    it returns                      its reward; None leaves that to reward functions
    it raises                       the rollout's `error` (`env.on_error` says what that is worth)
    it is at a limit                `stop`; reward 0 if it gives none or raises then (`session`)
    it asks nothing                 an error: there is nothing to train
    `env.timeout_s` have passed     while the policy speaks "timeout" and reward 0, otherwise an error: the agent hangs
    the policy cannot be asked      no fault of the agent's: the exception is raised, and the run ends

The trained tokens are those that were sampled, in the contexts in which they were (`conversations`). Of several
conversations, reward functions see the one that was answered last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from groupwise.agents.conversations import Conversations, Opening
from groupwise.agents.load import CLIENT, Agent, Outcome, is_async, outcome_of
from groupwise.agents.protocol import MODEL
from groupwise.agents.session import Session
from groupwise.algo.samples import segments_of
from groupwise.envs.base import priced
from groupwise.envs.call import OwnThread
from groupwise.errors import EnvError
from groupwise.types import Rollout

if TYPE_CHECKING:
    from groupwise.agents.endpoint import Endpoint

GRACE_S = 1.0  # in which an agent that was cancelled may clean up


@dataclass(frozen=True, kw_only=True)
class AgentEpisode:
    """An episode to be played. `scored`: reward functions score it too, so that the agent need not."""

    agent: Agent
    case: Mapping[str, Any]
    session: Session
    endpoint: Endpoint
    scored: bool

    async def play(self) -> tuple[Rollout, Opening | None]:
        """The rollout, and what the policy was first asked, if anything.

        Raises EnvError if the agent fails and `env.on_error` is stop, and what the engine raised if that failed.
        """
        session, outcome, error = self.session, Outcome(), None
        async with self.endpoint.open(session) as key:
            try:
                outcome = await self._outcome(key)
            except EnvError as failure:
                error = failure.message
            said = await self.endpoint.end(session)
        reward = outcome.reward
        if session.stop is not None:
            reward, error = reward or 0.0, None
        if error is None and not said.answered:
            error = f"{self.agent.name} never asked the policy: there is nothing to train"
        if error is None and reward is None and not self.scored:
            error = f"{self.agent.name} returned no reward, and the configuration has no reward functions"
        return priced(self._rollout(said, outcome, reward, error), session.config), said.opening

    def _rollout(self, said: Conversations, outcome: Outcome, reward: float | None, error: str | None) -> Rollout:
        info = {
            "tool_calls": float(said.calls),
            "forks": float(max(0, len(segments_of(said.turns())) - 1)),
            "ignored_parameters": float(self.session.ignored),
        }
        return Rollout(
            turns=said.turns(only_first=self.session.config.train_turns == "first"),
            reward=reward,
            error=error,
            messages=said.latest,
            stop=self.session.stop or "done",
            info={**outcome.metrics, **info},
        )

    async def _outcome(self, key: str) -> Outcome:
        """What the agent returns. Raises EnvError for all that is its fault."""
        limit_s, failed = self.session.config.timeout_s, asyncio.wrap_future(self.session.failed)
        agent = asyncio.ensure_future(self._call(key))
        try:
            await asyncio.wait({agent, failed}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if self.session.failed.done():
                self.session.failed.result()
            if agent.done():
                return agent.result()
            if not self.session.under_way:
                raise EnvError(f"{self.agent.name} had not returned after {limit_s:g} s, and the policy was not asked")
            self.session.stop = self.session.stop or "timeout"
            return Outcome()
        finally:
            failed.cancel()
            agent.cancel()
            await asyncio.wait({agent}, timeout=GRACE_S)
            if agent.done() and not agent.cancelled():
                agent.exception()  # seen

    async def _call(self, key: str) -> Outcome:
        """One call of the agent. SystemExit is its failure too, not the end of the process."""
        name, thread = self.agent.name, OwnThread(self.agent.name)
        offered = {
            "case": dict(self.case),
            "base_url": self.endpoint.base_url,
            "api_key": key,
            "model": MODEL,
            "seed": self.session.seed,
        }
        if CLIENT in self.agent.takes:
            make = self.endpoint.async_client if is_async(self.agent.function) else self.endpoint.client
            offered[CLIENT] = make(key)
        play = self.agent.bound(**offered)
        try:
            return outcome_of(await thread.call(play, timeout_s=None, what=name), name)
        except EnvError:
            raise
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise EnvError(f"{name} cancelled itself") from error
        except (Exception, SystemExit) as error:
            raise EnvError(f"{name} raised {type(error).__name__}: {error}") from error
        finally:
            thread.close()
