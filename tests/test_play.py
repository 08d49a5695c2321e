"""Groups from prompts, with the real engine: what is admitted together, what goes on at once, what stops everything."""

from __future__ import annotations

import asyncio
import time

import pytest

from episodes import Bad, Echo, Slow, cases, config, factory, play
from groupwise.algo.advantage import AdvantageSpec, with_advantages
from groupwise.chat import encode_prompt
from groupwise.engine.local import LocalEngine
from groupwise.envs.base import Observation
from groupwise.play import Episodes, SingleTurn, Slots, play_all, together
from groupwise.rollout import samples_of
from groupwise.types import PolicyVersion, Prompt, SamplingParams


class Counting:
    """An engine that remembers what it was asked."""

    def __init__(self, engine: LocalEngine):
        self._engine, self.context_length = engine, engine.context_length
        self.requests = []

    def submit(self, requests):
        self.requests += requests
        return self._engine.submit(requests)

    async def sample(self, requests):
        self.requests += requests
        return await self._engine.sample(requests)


@pytest.fixture
def engine(starter_engine) -> Counting:
    return Counting(starter_engine)


def test_a_prompt_asked_once_is_an_episode_of_one_turn(engine, starter):
    """The same completions, whichever way they were played: seeds mean the same in both."""

    class Once(Echo):
        def __init__(self):
            super().__init__(turns=1)

        def reset(self, case, seed):
            return "What is 4 + 5?"

    params = SamplingParams(max_tokens=12)
    [group] = play(engine, starter.tokenizer, Once, n=4, seed=7, params=params)
    asked = Prompt(id="x", messages=({"role": "user", "content": "What is 4 + 5?"},))
    [single] = asyncio.run(
        play_all(
            SingleTurn(engine, starter.tokenizer),
            [encode_prompt(asked, starter.tokenizer)],
            seeds=[7],
            n=4,
            params=params,
            version=PolicyVersion.base(),
        )
    )
    assert [r.turns[0].completion for r in group.rollouts] == [r.turns[0].completion for r in single.rollouts]
    assert group.prompt.token_ids == single.prompt.token_ids


def test_the_first_turns_of_a_group_share_their_prompt(engine, starter):
    prompts = cases({}, {"question": "2+2="})
    play(engine, starter.tokenizer, Echo, n=4, prompts=prompts, params=SamplingParams(max_tokens=24))
    assert [request.n for request in engine.requests[:2]] == [4, 4]
    assert all(request.n == 1 for request in engine.requests[2:])


def test_observations_may_differ_within_a_group(engine, starter):
    seen = []

    class Differs(Echo):
        def reset(self, case, seed):
            seen.append(seed)
            return Observation(messages=[{"role": "user", "content": f"{len(seen)}+1="}])

    [group] = play(engine, starter.tokenizer, Differs, n=3, seed=5, params=SamplingParams(max_tokens=24))
    assert seen == [5, 5, 5]
    assert len({rollout.turns[0].prompt_ids for rollout in group.rollouts}) == 3


def test_slow_environments_do_not_wait_for_each_other(engine, starter):
    """32 episodes of a second each, 16 at once: about two seconds, not 32."""
    started = time.monotonic()
    groups = play(
        engine,
        starter.tokenizer,
        Slow,
        seconds=1.0,
        n=4,
        prompts=cases(*[{}] * 8),
        params=SamplingParams(max_tokens=24),
        env=config(concurrency=16),
    )
    assert all(rollout.error is None for group in groups for rollout in group.rollouts)
    assert 2.0 <= time.monotonic() - started < 10.0


def test_slots_count_episodes_whatever_the_sizes_of_their_groups():
    """An evaluation of single episodes and training in groups share one limit; who is given up gives back."""
    under_way, most = 0, []

    async def group(slots: Slots, n: int) -> None:
        nonlocal under_way
        async with slots.take(n):
            under_way += n
            most.append(under_way)
            await asyncio.sleep(0.01)
            under_way -= n

    async def all_of_them() -> None:
        slots = Slots(4)
        given_up = [asyncio.create_task(group(slots, 3)) for _ in range(3)]
        await asyncio.sleep(0)
        for task in given_up:
            task.cancel()
        await asyncio.gather(*given_up, return_exceptions=True)
        nonlocal under_way
        under_way = 0
        await asyncio.gather(*(group(slots, n) for n in (1, 1, 4, 2, 2, 1, 3)))
        async with slots.take(9):  # more than there are: all of them
            most.append(4)

    asyncio.run(all_of_them())
    assert max(most) == 4 and len(most) >= 8


def test_failed_episodes_enter_no_statistic(engine, starter):
    """A group in which some episodes failed: the others are compared, and only they are trained."""
    played = []

    class Sometimes(Bad):
        def __init__(self):
            super().__init__("reset", lambda: 1 / 0)
            played.append(self)

        def reset(self, case, seed):
            return super().reset({"bad": played.index(self) % 2 == 0}, seed)

        def score(self, episode):
            return float(len(episode.answer))

    groups = play(engine, starter.tokenizer, Sometimes, n=4, params=SamplingParams(max_tokens=24))
    [group] = with_advantages(groups, AdvantageSpec())
    failed = [rollout for rollout in group.rollouts if rollout.advantage is None]
    assert len(failed) == 2
    assert all(rollout.turns == () and "ZeroDivisionError" in rollout.error for rollout in failed)
    assert len(samples_of([group])) == 2
    assert group.prompt.messages == ({"role": "user", "content": "1+1="},)


def test_what_is_given_up_is_over():
    """When one fails, the others are cancelled before the failure is raised."""
    over = []

    async def waits():
        try:
            await asyncio.sleep(30)
        finally:
            over.append(True)

    async def fails():
        await asyncio.sleep(0)
        raise ValueError("one")

    with pytest.raises(ValueError, match="one"):
        asyncio.run(together([waits(), fails(), waits()]))
    assert over == [True, True]


def test_a_row_of_a_dataset_is_a_case(engine, starter):
    seen = {}

    class Sees(Echo):
        def reset(self, case, seed):
            seen.update(case)
            return case["prompt"]

    prompt = Prompt(id="1", messages=({"role": "user", "content": "1+1="},), columns={"answer": "2"})
    play(engine, starter.tokenizer, Sees, prompts=[prompt], params=SamplingParams(max_tokens=24))
    assert seen == {"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}


def test_preparing_a_case_changes_nothing(engine, starter):
    prompt = cases({"a": 1})[0]
    assert Episodes(engine, starter.tokenizer, factory(Echo), config()).prepare(prompt) is prompt
