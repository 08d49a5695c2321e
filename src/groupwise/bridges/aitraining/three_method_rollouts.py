"""Prompts -> groups, in an environment of three methods: the policy answers each prompt, `score_episode` does the rest.

    prompt --(n completions, as in a single turn)--> each: score_episode(model, tokenizer, completion, case_idx)
                                                              model.generate, model.chat: more turns, recorded too

The first turns of prompts that are begun together are admitted together, those of a group in one request. Episodes
are scored at once, `env.concurrency` of them, each in its own thread, and what they ask of the policy meanwhile
is decoded in the engine's one batch.

An episode always ends in a rollout. What `score_episode` raises, or returns that is no number, and an episode that
takes longer than `env.timeout_s`, are its `error`, which `env.on_error` prices; None leaves it out of its group. A
limit on the policy (`env.max_turns`, `env.max_tokens`, the context) is raised in `score_episode`: one that lets it
pass ends the episode, with that as its `stop` and the reward 0. So does the time, if it is over while the policy
speaks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from groupwise.bridges.aitraining.recording import LimitReached, Origin, RecordingPolicy
from groupwise.bridges.aitraining.three_method import CASE, LegacyEnv
from groupwise.errors import EnvError, GroupwiseError
from groupwise.model.chat import encode_prompt
from groupwise.sampler import Sampler
from groupwise.tasks.env import REWARD, priced, told_of
from groupwise.tasks.env_kind import warn
from groupwise.tasks.own_thread import OwnThread
from groupwise.tasks.rollout_sources import Lockstep, Slots, together
from groupwise.types import (
    Completion,
    FinishReason,
    Message,
    PolicyVersion,
    Prompt,
    Rollout,
    RolloutGroup,
    SamplingParams,
    SamplingRequest,
    Turn,
    conversation_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from groupwise.model.load import LoadedModel


@dataclass(frozen=True, kw_only=True)
class _Mode:
    """The sampling parameters, version and seed of a group."""

    params: SamplingParams
    version: PolicyVersion
    seed: int


class ThreeMethodRollouts:
    """Plays prompts in a `LegacyEnv`; a `RolloutSource`.

    Args:
        run: training's sampling parameters; text that an environment generates with others is not trained.
        note: is told once of each thing that is odd.
    """

    def __init__(
        self,
        sampler: Sampler,
        base: LoadedModel,
        env: LegacyEnv,
        *,
        run: SamplingParams,
        note: Callable[[str], None] = warn,
    ):
        self._sampler, self._env, self._config = sampler, env, env.config
        self._noted: set[str] = set()
        self._tell = note
        self._rounds = Lockstep(sampler) if env.config.lockstep else None
        self._origin = Origin(
            sampler=self._rounds or sampler,
            base=base,
            tokenizer=env.tokenizer,
            config=env.config,
            run=run,
            note=self._note,
        )
        self._slots = Slots(env.config.concurrency, rounds=self._rounds)

    def prepare(self, prompt: Prompt) -> Prompt:
        """Return the prompt with its token ids."""
        return encode_prompt(prompt, self._env.tokenizer)

    def begin(
        self, prompts: Sequence[Prompt], *, seeds: Sequence[int], n: int, params: SamplingParams, version: PolicyVersion
    ) -> list[Awaitable[RolloutGroup]]:
        """See `RolloutSource.begin`."""
        modes = [_Mode(params=params, version=version, seed=seed) for seed in seeds]
        most = min(params.max_tokens, self._config.max_tokens or params.max_tokens)
        requests = [
            SamplingRequest(
                prompt_ids=prompt.token_ids,
                params=replace(params, max_tokens=most, seed=mode.seed),
                n=n,
                version=version,
                cache=self._config.max_turns > 1,
                conversation=conversation_of(mode.seed),
            )
            for prompt, mode in zip(prompts, modes, strict=True)
        ]
        futures = self._sampler.submit(requests)
        everything = None if self._rounds is None else asyncio.gather(*map(asyncio.wrap_future, futures))

        async def group(prompt: Prompt, at: int) -> RolloutGroup:
            if everything is not None:  # in rounds the first turns of all come before what follows on any
                await asyncio.shield(everything)
            said = await asyncio.wrap_future(futures[at])
            episodes = [self._in_turn(prompt, first, number, modes[at]) for number, first in enumerate(said)]
            return RolloutGroup(prompt=prompt, rollouts=tuple(await together(episodes)))

        return [group(prompt, at) for at, prompt in enumerate(prompts)]

    def close(self) -> None:
        """Do nothing: the source holds no resources."""

    async def _in_turn(self, prompt: Prompt, first: Completion, number: int, mode: _Mode) -> Rollout:
        async with self._slots.take(1):
            return await self._episode(prompt, first, number, mode)

    async def _episode(self, prompt: Prompt, first: Completion, number: int, mode: _Mode) -> Rollout:
        policy = RecordingPolicy(
            self._origin, prompt, first, params=mode.params, version=mode.version, seed=mode.seed, number=number
        )
        reward, failed = None, None
        try:
            if first.finish_reason is FinishReason.ABORT:
                raise EnvError("the completion was aborted")
            reward = await self._scored(prompt, first, policy)
        except EnvError as raised:
            if isinstance(raised.__cause__, TimeoutError) and policy.asking:
                policy.limit = "timeout"
            limit = policy.limit == "timeout" or _is_limit(raised)
            reward, failed = (0.0, None) if limit else (None, raised)
        finally:
            policy.close()
        if policy.failure is not None:  # the engine's, not the environment's
            raise policy.failure
        return self._rollout(policy, reward, failed)

    async def _scored(self, prompt: Prompt, first: Completion, policy: RecordingPolicy) -> float | None:
        """Return what `score_episode` returns. Raises EnvError, whatever the method raises."""
        said = first.text if prompt.messages is None else [{"role": "assistant", "content": first.text}]
        what, thread, env = f"{self._env.name}.score_episode", OwnThread(), self._env

        def score() -> float | None:
            return env.score(env.instance(), model=policy, completion=said, case=prompt.columns[CASE])

        try:
            reward = await thread.call(score, timeout_s=self._config.timeout_s, what=what)
        except EnvError:
            raise
        except Exception as error:
            told = error.message if isinstance(error, GroupwiseError) else None
            raise EnvError.raised(what, error, told) from error
        finally:
            thread.close()
        if reward is not None and not 0 <= reward <= 1:
            self._note(f"{what} returned {reward:g}: a score outside 0 to 1 is taken as it is", once=f"{what} outside")
        return reward

    def _rollout(self, policy: RecordingPolicy, reward: float | None, failed: EnvError | None) -> Rollout:
        turns = policy.turns
        played = Rollout(
            turns=turns,
            reward=reward,
            error=None if failed is None else told_of(self._env.name, failed),
            error_kind=None if failed is None else failed.kind,
            messages=tuple(_messages(turns, self._env.tokenizer)),
            stop=policy.limit or "done",
            info={"forks": float(policy.forks), "untrained": float(sum(not turn.trained for turn in turns))},
        )
        rollout = priced(played, self._config)
        return replace(rollout, rewards={REWARD: rollout.reward})  # None too: only the environment was asked

    def _note(self, message: str, *, once: str | None = None) -> None:
        key = once or message
        if key not in self._noted:
            self._noted.add(key)
            self._tell(message)


def _is_limit(error: BaseException | None) -> bool:
    """Return whether a limit on the policy is behind it, in whatever the environment made of that."""
    while error is not None and not isinstance(error, LimitReached):
        error = error.__cause__ or error.__context__
    return error is not None


def _messages(turns: Sequence[Turn], tokenizer: PreTrainedTokenizerBase) -> list[Message]:
    """Return what was said after the prompt. What the policy heard in between is text: the roles are the
    environment's."""
    messages: list[Message] = []
    seen = turns[0].prompt_ids
    for turn in turns:
        start = len(seen) if turn.prompt_ids[: len(seen)] == seen else 0
        if heard := turn.prompt_ids[start:]:
            messages.append({"role": "environment", "content": str(tokenizer.decode(list(heard)))})
        messages.append({"role": "assistant", "content": turn.completion.text})
        seen = turn.prompt_ids + turn.completion.token_ids
    return messages
