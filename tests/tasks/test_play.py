"""Groups from prompts, with the real engine: what is admitted together, what goes on at once, what stops everything."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from typing import Any

import pytest

from episodes import Bad, Echo, Slow, cases, config, factory, play
from groupwise.algo.credit import with_advantages
from groupwise.algo.samples import samples_of
from groupwise.config.algo import AdvantageConfig
from groupwise.engine.local import LocalEngine
from groupwise.errors import ContextLengthError
from groupwise.model.chat import encode_prompt
from groupwise.tasks.env import Observation
from groupwise.tasks.rollout_sources import EpisodeRollouts, Lockstep, SingleTurnRollouts, Slots, play_all, together
from groupwise.types import PolicyVersion, Prompt, SamplingParams, SamplingRequest
from wording import raises

BASE = PolicyVersion.base()


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
            SingleTurnRollouts(engine, starter.tokenizer),
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
    # one group may be in its second turn before the other's first
    asked = sorted(request.n for request in engine.requests)
    assert asked[-2:] == [4, 4] and set(asked[:-2]) == {1}


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
    """32 episodes with a tool each, 16 at once."""
    together = threading.Barrier(16, timeout=300)  # nobody goes on before sixteen are there
    groups = play(
        engine,
        starter.tokenizer,
        Slow,
        wait=together.wait,
        n=4,
        prompts=cases(*[{}] * 8),
        params=SamplingParams(max_tokens=24),
        env=config(concurrency=16),
    )
    assert all(rollout.error is None for group in groups for rollout in group.rollouts)


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


class Dawdles(Echo):
    """Takes a time of its own, by chance, for each call; some episodes are over sooner, and some fail."""

    waits = random.Random()

    def reset(self, case, seed):
        time.sleep(self.waits.random() * 0.02)
        self.turns, self.number = 2 + case["number"] % 3, case["number"]
        return f"What is {case['number']} + 1?"

    def step(self, message):
        time.sleep(self.waits.random() * 0.02)
        if self.number == 3 and self.taken == 1:
            raise ValueError("no luck")
        return super().step(message)


def test_in_lockstep_everything_is_the_same_to_the_last_bit_whatever_time_tools_take(starter):
    """Also with fewer slots than episodes: who comes next joins before the next round begins."""

    def played(seed: int, **options) -> list[Any]:
        Dawdles.waits.seed(seed)
        engine = LocalEngine(starter)
        try:
            prompts = cases(*({"number": number} for number in range(6)))
            env = config(lockstep=True, step_timeout_s=20.0, **options)
            params = SamplingParams(max_tokens=8)
            return [
                [(turn.prompt_ids, turn.completion.token_ids, turn.completion.logprobs) for turn in rollout.turns]
                for group in play(engine, starter.tokenizer, Dawdles, n=2, prompts=prompts, env=env, params=params)
                for rollout in group.rollouts
            ]
        finally:
            engine.close()

    for options in ({}, {"concurrency": 5}):
        first, *others = (played(seed, **options) for seed in range(3))
        assert all(other == first for other in others)
        assert {len(turns) for turns in first} >= {2, 3, 4}


def test_a_round_waits_for_all_and_goes_on_without_those_that_gave_up(engine):
    """Requests are submitted together and in the order of their seeds; whoever leaves is not waited for."""

    def request(seed: int) -> SamplingRequest:
        return SamplingRequest(prompt_ids=(1, 2), params=SamplingParams(max_tokens=2, seed=seed), version=BASE)

    async def rounds() -> None:
        lockstep = Lockstep(engine)
        lockstep.join(3)
        late = lockstep.submit([request(9)])[0]
        soon = asyncio.wrap_future(lockstep.submit([request(4)])[0])
        await asyncio.sleep(0.05)
        assert engine.requests == []  # one has said nothing yet
        lockstep.leave(1)
        (completion,) = await soon
        assert [each.params.seed for each in engine.requests] == [4, 9] and len(late.result()) == 1
        assert len(completion.token_ids) == 2
        given_up, other = lockstep.submit([request(1)])[0], lockstep.submit([request(2)])[0]
        assert given_up.cancel() or given_up.done()
        lockstep.leave(1)
        await asyncio.wrap_future(other)

    asyncio.run(rounds())


def test_what_one_request_is_refused_for_is_its_own(engine, starter):
    """In a round, too."""

    async def both() -> list[Any]:
        lockstep = Lockstep(engine)
        lockstep.join(2)
        long = SamplingRequest(prompt_ids=(1,) * 10_000, params=SamplingParams(max_tokens=2, seed=1), version=BASE)
        fine = SamplingRequest(prompt_ids=(1, 2), params=SamplingParams(max_tokens=2, seed=2), version=BASE)
        futures = [*lockstep.submit([long]), *lockstep.submit([fine])]
        return await asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)

    refused, answered = asyncio.run(both())
    assert isinstance(refused, ContextLengthError) and len(answered) == 1


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
    [group] = with_advantages(groups, AdvantageConfig())
    failed = [rollout for rollout in group.rollouts if rollout.advantage is None]
    assert len(failed) == 2
    assert all(rollout.turns == () and "ZeroDivisionError" in rollout.error for rollout in failed)
    assert len(samples_of([group])) == 2
    assert group.prompt.messages == ({"role": "user", "content": "1+1="},)


@pytest.mark.parametrize("fails", ["engine", "cancelled"])
def test_environments_are_closed_where_the_first_turn_never_came(starter_engine, starter, fails: str):
    """Begun and never played: an engine that fails, or a run that ends, leaves none of them open."""
    made: list[Echo] = []

    def make() -> Echo:
        made.append(Echo())
        return made[-1]

    class Never(Counting):
        async def sample(self, requests):
            if fails == "engine":
                raise RuntimeError("the engine is gone")
            await asyncio.sleep(30)

    episodes = EpisodeRollouts(Never(starter_engine), starter.tokenizer, factory(make), config())

    async def run() -> None:
        given = play_all(episodes, cases({}), seeds=[0], n=3, params=SamplingParams(max_tokens=6), version=BASE)
        task = asyncio.ensure_future(given)
        while not all("reset" in each.calls for each in made) or len(made) < 3:
            await asyncio.sleep(0.001)
        if fails == "cancelled":
            await asyncio.sleep(0.01)
            task.cancel()
        await task

    with pytest.raises(RuntimeError if fails == "engine" else asyncio.CancelledError):
        asyncio.run(run())
    assert [each.calls for each in made] == [["reset", "close"]] * 3


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

    with raises(ValueError):
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
    assert EpisodeRollouts(engine, starter.tokenizer, factory(Echo), config()).prepare(prompt) is prompt
