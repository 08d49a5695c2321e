"""What the tests of episodes share: environments that behave, and ones that do not; what an engine sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from groupwise.algo.samples import segments_of
from groupwise.config.run import EnvConfig
from groupwise.engine.local import LocalEngine
from groupwise.sampler import TokenSink
from groupwise.tasks.env import Observation, StepResult
from groupwise.tasks.env_loading import EnvFactory
from groupwise.tasks.episode import Player
from groupwise.tasks.rollout_sources import EpisodeRollouts, play_all
from groupwise.types import PolicyVersion, Prompt, Rollout, RolloutGroup, SamplingParams, SamplingRequest


class Echo:
    """Two turns; the first is worth 0.25, the score 0.5. Remembers what was called."""

    def __init__(self, turns: int = 2):
        self.turns, self.taken, self.calls = turns, 0, []

    def reset(self, case, seed):
        self.calls.append("reset")
        return f"{case.get('question', '1+1=')}"

    def step(self, message):
        self.calls.append("step")
        self.taken += 1
        return StepResult(
            messages=[] if self.taken == self.turns else [{"role": "user", "content": "Again."}],
            reward=0.25 if self.taken == 1 else None,
            done=self.taken == self.turns,
            info={"length": len(message["content"])},
        )

    def score(self, episode):
        assert len(episode.rewards) == self.taken and episode.messages[0]["role"] == "user"
        return 0.5

    def close(self):
        self.calls.append("close")


class AsyncEcho(Echo):
    """The same with async methods."""

    async def reset(self, case, seed):
        await asyncio.sleep(0)
        return Observation(messages=[{"role": "user", "content": "1+1="}])

    async def step(self, message):
        await asyncio.sleep(0)
        return super().step(message)

    async def score(self, episode):
        return super().score(episode)

    async def close(self):
        super().close()


class Bad(Echo):
    """Misbehaves in episodes of cases whose `bad` is True: `do` is called in the method `where`."""

    def __init__(self, where: str, do: Callable[[], Any]):
        super().__init__()
        self.where, self.do, self.bad = where, do, False

    def reset(self, case, seed):
        self.bad = case.get("bad", True)
        return self.do() if self.bad and self.where == "reset" else super().reset(case, seed)

    def step(self, message):
        return self.do() if self.bad and self.where == "step" else super().step(message)

    def score(self, episode):
        return self.do() if self.bad and self.where == "score" else super().score(episode)

    def close(self):
        return self.do() if self.bad and self.where == "close" else super().close()


class Slow(Echo):
    """A tool that takes a while, as a blocking call."""

    def __init__(self, wait: Callable[[], object]):
        super().__init__(turns=1)
        self.wait = wait

    def step(self, message):
        self.wait()
        return super().step(message)


def config(**options: Any) -> EnvConfig:
    return EnvConfig.model_validate({"environment": "tests:Env", **options})


def factory(made: Callable[..., Any], **args: Any) -> EnvFactory:
    return EnvFactory(name=getattr(made, "__name__", "Env"), make_one=made, args=args)


def cases(*columns: dict[str, Any]) -> list[Prompt]:
    return [Prompt(id=f"case:{i}", columns=each) for i, each in enumerate(columns)]


def play(
    engine: LocalEngine,
    tokenizer: Any,
    made: Callable[..., Any],
    *,
    n: int = 2,
    prompts: Sequence[Prompt] = (),
    seed: int = 0,
    params: SamplingParams | None = None,
    env: EnvConfig | None = None,
    player: Callable[..., Player] | None = None,
    **args: Any,
) -> list[RolloutGroup]:
    """Groups of `n` episodes, played to their ends with the base model."""
    prompts = prompts or cases({})
    episodes = EpisodeRollouts(engine, tokenizer, factory(made, **args), env or config(), player=player)
    return asyncio.run(
        play_all(
            episodes,
            prompts,
            seeds=[seed + i for i in range(len(prompts))],
            n=n,
            params=params or SamplingParams(max_tokens=6),
            version=PolicyVersion.base(),
        )
    )


# ---- what was sampled, and what is trained ----
class Recorder:
    """The engine, and what it was asked and answered, in the order of the answers."""

    def __init__(self, engine: LocalEngine):
        self.engine, self.turns = engine, []
        self.context_length = engine.context_length

    async def sample(self, requests: list[SamplingRequest]):
        answers = await self.engine.sample(requests)
        self.turns += [(request, c) for request, (c,) in zip(requests, answers, strict=True)]
        return answers

    def submit(self, requests: list[SamplingRequest], *, on_token: TokenSink | None = None):
        futures = self.engine.submit(requests, on_token=on_token)
        for request, future in zip(requests, futures, strict=True):
            future.add_done_callback(
                lambda done, request=request: done.cancelled() or self.turns.append((request, done.result()[0]))
            )
        return futures


def trained(rollout: Rollout) -> list[tuple[tuple[int, ...], int, float]]:
    """Each trained token: all that stands before it, itself, and its log-probability."""
    found = []
    for each in segments_of(rollout.turns):
        for t, (token, mask, logprob) in enumerate(zip(each.completion_ids, each.mask, each.logprobs, strict=True)):
            assert mask or logprob == 0.0
            if mask:
                found.append(((*each.prompt_ids, *each.completion_ids[:t]), token, logprob))
    return sorted(found)


def sampled(recorder: Recorder) -> list[tuple[tuple[int, ...], int, float]]:
    """The same of what the engine sampled, as it saw it."""
    return sorted(
        ((*request.prompt_ids, *said.token_ids[:t]), token, logprob)
        for request, said in recorder.turns
        for t, (token, logprob) in enumerate(zip(said.token_ids, said.behaviour_logprobs, strict=True))
    )
