"""One episode that an agent plays: one call of it, and what it asked the policy meanwhile.

Whatever the agent does, the episode ends in a rollout:

    it returns                      its reward; None leaves that to reward functions
    it raises                       the rollout's `error` (`env.on_error` says what that is worth)
    it is at a limit                `stop`; reward 0 if it gives none or raises then (`session`)
    it asks nothing                 an error: there is nothing to train
    `env.timeout_s` have passed     while the policy speaks "timeout" and reward 0, otherwise an error: it hangs
    the policy cannot be asked      no fault of the agent's: the exception is raised, and the run ends

The trained tokens are those that were sampled, in the contexts in which they were (`conversations`). Of several
conversations, reward functions see the one that was answered last.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from groupwise.algo.samples import segments_of
from groupwise.errors import EnvError
from groupwise.tasks.agent_session import AgentSession
from groupwise.tasks.agents import CLIENT, EPISODE, Agent, AgentResult, is_async, outcome_of
from groupwise.tasks.conversations import Conversations, FirstRequest
from groupwise.tasks.env import priced, reward_of
from groupwise.tasks.openai import MODEL
from groupwise.tasks.own_thread import OwnThread
from groupwise.types import Rollout

if TYPE_CHECKING:
    from groupwise.tasks.endpoint import Endpoint

GRACE_S = 1.0  # in which an agent that was cancelled may clean up


@dataclass(frozen=True, kw_only=True)
class AgentEpisode:
    """An episode to be played. `scored`: reward functions score it too, so that the agent need not."""

    agent: Agent
    case: Mapping[str, Any]
    session: AgentSession
    endpoint: Endpoint
    scored: bool

    async def play(self) -> tuple[Rollout, FirstRequest | None]:
        """Return the rollout, and what the policy was first asked, if anything.

        Raises EnvError if the agent fails and `env.on_error` is stop, and what the engine raised if that failed.
        """
        session, outcome = self.session, AgentResult()
        error: EnvError | None = None
        async with self.endpoint.open(session) as key:
            try:
                outcome = await self._outcome(key)
            except EnvError as failure:
                error = failure
            said = await self.endpoint.end(session)
        session.stop = session.stop or outcome.stop
        reward, error = outcome.reward, error or outcome.failure
        if session.stop is not None:
            reward, error = reward or 0.0, None
        if error is None and (wrong := _give(outcome.turn_rewards, said, self.agent.name)) is not None:
            error = wrong
        given = [turn.reward for turn in said.turns() if turn.reward is not None]
        if error is None and given:
            reward = math.fsum([*given, reward or 0.0])
        if error is None and not said.answered:
            told = f"; {outcome.ending}" if outcome.ending else ""
            error = EnvError(f"{self.agent.name} never asked the policy: there is nothing to train{told}")
        if error is None and reward is None and not self.scored:
            error = EnvError(f"{self.agent.name} returned no reward, and the configuration has no reward functions")
        return priced(self._rollout(said, outcome, reward, error), session.config), said.first_request

    def _rollout(
        self, said: Conversations, outcome: AgentResult, reward: float | None, error: EnvError | None
    ) -> Rollout:
        info = {
            "tool_calls": float(said.calls),
            "forks": float(max(0, len(segments_of(said.turns())) - 1)),
            "ignored_parameters": float(self.session.ignored),
        }
        return Rollout(
            turns=said.turns(only_first=self.session.config.train_turns == "first"),
            reward=reward,
            error=None if error is None else error.message,
            error_kind=None if error is None else error.kind,
            messages=said.latest,
            stop=self.session.stop or "done",
            info={**outcome.metrics, **info},
            columns=outcome.columns,
        )

    async def _outcome(self, key: str) -> AgentResult:
        """Return what the agent returns. Raises EnvError for all that is its fault."""
        limit_s, failed = self.session.config.timeout_s + self.agent.extra_s, asyncio.wrap_future(self.session.failed)
        agent = asyncio.ensure_future(self._call(key))
        try:
            await asyncio.wait({agent, failed}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if self.session.failed.done():
                self.session.failed.result()
            if agent.done():
                return agent.result()
            if not self.session.under_way:
                message = f"{self.agent.name} had not returned after {limit_s:g} s, and the policy was not asked"
                raise EnvError(message, field=self.agent.name, kind="timeout")
            self.session.stop = self.session.stop or "timeout"
            return AgentResult()
        finally:
            failed.cancel()
            agent.cancel()
            await asyncio.wait({agent}, timeout=GRACE_S)
            if agent.done() and not agent.cancelled():
                agent.exception()  # seen

    async def _call(self, key: str) -> AgentResult:
        """Call the agent once. SystemExit is its failure too, not the end of the process."""
        name, thread = self.agent.name, OwnThread(self.agent.name)
        offered = {
            "case": dict(self.case),
            "base_url": self.endpoint.base_url,
            "api_key": key,
            "model": MODEL,
            "seed": self.session.seed,
        }
        if EPISODE in self.agent.takes:
            offered[EPISODE] = EpisodeCredit(self.session, self.agent.name)
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
            raise EnvError.raised(name, error) from error
        finally:
            thread.close()


@dataclass(frozen=True)
class EpisodeCredit:
    """The `episode` that an agent may take: it is told what single turns were worth, and in which state they are taken,
    which `algo.credit` reads.

        answer = await client.chat.completions.create(...)
        episode.reward(0.2)                 # to what was answered last
        episode.reward(0.2, answer.id)      # where several are asked at once

    Both may be called from any thread, and raise EnvError for a value that is none.
    """

    _session: AgentSession
    _agent: str

    def reward(self, value: float, answer: str | None = None) -> None:
        """Give a turn a reward: that of the answer with this id (of any dialect), or the one answered last. Several of
        a turn add up. The episode's reward is the sum of all of them and what the agent returns."""
        self._session.reward(reward_of(value, self._agent, did="gave a turn"), answer)

    def state(self, name: str) -> None:
        """Name the state in which the policy speaks next, equal for equal situations (GiGPO's anchor states). Without a
        name it is what the policy has heard since the answer that its request continues from."""
        if not isinstance(name, str):
            raise EnvError(f"{self._agent} named a state {name!r}; it is a text", field=self._agent)
        self._session.state = name


def _give(rewards: Sequence[float | None], said: Conversations, agent: str) -> EnvError | None:
    """Add the rewards that an agent returned to its turns, in the order of the answers; what is wrong with them."""
    if rewards and len(rewards) != len(said.answered):
        message = f"{agent} returned {len(rewards)} turn_rewards, and the policy answered {len(said.answered)} times"
        return EnvError(message, hint="one for each answer, in their order, null for none", field=agent)
    for node, value in zip(said.answered, rewards, strict=False):
        if value is not None:
            said.reward(node, value)
    return None
