"""Episodes with the real engine: turns, rewards, limits, and environments that break their promises."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from episodes import AsyncEcho, Bad, Echo, Recorder, cases, config, factory, play
from groupwise.algo.samples import segments_of
from groupwise.errors import EnvError
from groupwise.tasks.env import StepResult
from groupwise.tasks.env_worker import EnvHost, HostedEnv, HostRequest
from groupwise.tasks.episode import Player
from groupwise.types import SamplingParams
from wording import raises

NEVER = threading.Event()


@pytest.fixture
def rollouts(starter_engine, starter) -> Callable[..., list[Any]]:
    def played(made, **options):
        options.setdefault("params", SamplingParams(max_tokens=24))
        groups = play(starter_engine, starter.tokenizer, made, **options)
        return [rollout for group in groups for rollout in group.rollouts]

    return played


@pytest.mark.parametrize("made", [Echo, AsyncEcho])
def test_an_episode(rollouts, made):
    """Turn rewards and the score add up; what was said is recorded; all that was sampled is one trained segment."""
    for rollout in rollouts(made):
        assert rollout.error is None and rollout.stop == "done"
        assert rollout.reward == 0.75 and rollout.rewards == {"env": 0.75}
        assert [turn.reward for turn in rollout.turns] == [0.25, None]
        assert [message["role"] for message in rollout.messages] == ["assistant", "user", "assistant"]
        said = sum(len(turn.completion.text) for turn in rollout.turns)
        assert rollout.info["turns"] == 2 and rollout.info["length"] == said
        [segment] = segments_of(rollout.turns)
        assert sum(segment.mask) == sum(len(turn.completion.token_ids) for turn in rollout.turns)


def test_the_instance_is_closed_whatever_happens(rollouts):
    made: list[Echo] = []

    class Kept(Echo):
        def __init__(self):
            super().__init__()
            made.append(self)

        def step(self, message):
            if len(made) == 2:
                raise ValueError("one of them")
            return super().step(message)

    rollouts(Kept)
    assert len(made) == 2 and all(each.calls[-1] == "close" for each in made)


@pytest.mark.parametrize("kind", [Echo, AsyncEcho])
@pytest.mark.parametrize("hosted", [False, True])
@pytest.mark.parametrize("ends", ["cancelled", "timeout"])
def test_an_instance_that_is_made_too_late_is_closed(starter, kind: type[Echo], hosted: bool, ends: str):
    """Whether the episode was given up or had its time while `make` was running."""
    making, go_on, closed = (threading.Event() for _ in range(3))

    class Late(kind):
        def __init__(self):
            super().__init__()
            making.set()
            go_on.wait(3)

        async def close(self):
            closed.set()

    limited = config(step_timeout_s=0.2 if ends == "timeout" else 60)

    async def episode() -> None:
        host = EnvHost(HostRequest.of(limited), factory(Late))
        player = Player(
            make=partial(HostedEnv, host, 1) if hosted else Late,
            name="Late",
            case={},
            seed=0,
            config=limited.model_copy(update={"step_timeout_s": 60}) if hosted else limited,
            params=SamplingParams(),
            tokenizer=starter.tokenizer,
            context=64,
            speak=None,
        )
        begun = asyncio.ensure_future(player.begin())
        await asyncio.to_thread(making.wait, 10)
        if ends == "cancelled":
            begun.cancel()
        await asyncio.wait([begun])
        await player.close()
        assert (player.error is None) == (ends == "cancelled")
        go_on.set()

    asyncio.run(episode())
    assert closed.wait(2)


def test_turns_of_an_episode_are_a_conversation_of_its_group(starter_engine, starter):
    """So that one of several servers has them all: the first turns, which are one request, and then each its own."""
    asked: list[str] = []

    class Heard(Recorder):
        async def sample(self, requests):
            asked.extend(request.conversation for request in requests)
            return await self.engine.sample(requests)

    whole = SamplingParams(max_tokens=24)
    play(Heard(starter_engine), starter.tokenizer, Echo, n=2, seed=7, prompts=cases({}, {}), params=whole)
    assert sorted(asked) == ["7", "7/0", "7/1", "8", "8/0", "8/1"]


def test_episodes_follow_from_their_seeds(rollouts):
    def texts(**options):
        return [[turn.completion.text for turn in rollout.turns] for rollout in rollouts(Echo, n=4, **options)]

    first = texts(seed=1)
    assert first == texts(seed=1) and first != texts(seed=2)
    assert len({tuple(each) for each in first}) > 1


# ---- limits ----


class Talker(Echo):
    """Never done, and gives nothing but a score, if at all."""

    def step(self, message):
        return [{"role": "user", "content": "Go on. " * self.turns}]

    def score(self, episode):
        return None


def test_turns_are_limited(rollouts):
    for rollout in rollouts(Talker, env=config(max_turns=3)):
        assert rollout.stop == "max_turns" and len(rollout.turns) == 3
        assert rollout.reward == 0.0  # the environment gave nothing: the policy has no excuse
        assert rollout.messages[-1]["role"] == "user"


def test_tokens_are_limited(rollouts):
    cut = SamplingParams(max_tokens=5, ignore_eos=True)
    for rollout in rollouts(Talker, params=cut):
        assert rollout.stop == "max_tokens" and len(rollout.turns) == 1
    for rollout in rollouts(Talker, params=cut, env=config(stop_at_cut=False, max_tokens=12)):
        assert rollout.stop == "max_tokens" and [len(t.completion.token_ids) for t in rollout.turns] == [5, 5, 2]


def test_the_context_is_limited(rollouts, starter):
    for rollout in rollouts(Talker, turns=60, env=config(max_turns=100)):
        assert rollout.stop == "context"
        last = rollout.turns[-1]
        assert len(last.prompt_ids) + len(last.completion.token_ids) <= starter.context_length


def test_time_is_limited(rollouts):
    class Waits(Talker):
        def step(self, message):
            time.sleep(0.3)
            return super().step(message)

    for rollout in rollouts(Waits, env=config(max_turns=50, timeout_s=1.0)):
        assert rollout.stop == "timeout" and rollout.reward == 0.0 and len(rollout.turns) < 10


def test_tool_calls_are_limited(rollouts):
    schema = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
    function = {"name": "calculator", "description": "Evaluate arithmetic.", "parameters": schema}
    tool = {"type": "function", "function": function}

    class Calls(Talker):
        def reset(self, case, seed):
            from groupwise.tasks.env import Observation

            return Observation(messages=[{"role": "user", "content": "What is 47 + 138?"}], tools=[tool])

    ran = rollouts(Calls, params=SamplingParams(max_tokens=48, temperature=0.2), env=config(max_tool_calls=2), n=4)
    assert all(rollout.info["tool_calls"] <= 3 for rollout in ran)
    assert any(rollout.messages[0].get("tool_calls") for rollout in ran)


def test_the_first_turn_only(rollouts):
    for rollout in rollouts(Echo, env=config(train_turns="first")):
        assert [turn.trained for turn in rollout.turns] == [True, False]
        [segment] = segments_of(rollout.turns)
        assert segment.completion_ids == rollout.turns[0].completion.token_ids and all(segment.mask)


# ---- environments that break their promises ----


def fail() -> Any:
    raise ValueError("no luck")


def hang() -> Any:
    NEVER.wait(30)


BREAKS = {
    "raises": ("step", fail, "Bad.step raised ValueError: no luck"),
    "raises in reset": ("reset", fail, "Bad.reset raised ValueError: no luck"),
    "raises in score": ("score", fail, "Bad.score raised ValueError: no luck"),
    "raises in close": ("close", fail, "Bad.close raised ValueError: no luck"),
    "exits": ("step", lambda: exit(3), "SystemExit: 3"),
    "stops iterating": ("step", lambda: next(iter(())), "StopIteration"),
    "times out itself": ("step", lambda: (_ for _ in ()).throw(TimeoutError("http")), "raised TimeoutError: http"),
    "hangs": ("step", hang, "Bad.step took longer than 0.3 s"),
    "hangs in reset": ("reset", hang, "Bad.reset took longer than 0.3 s"),
    "nan": ("score", lambda: math.nan, "returned nan; a reward is a finite number"),
    "huge": ("score", lambda: 1e200, "returned 1e+200; a reward is a finite number within 1e+100 of 0"),
    "a string": ("score", lambda: "good", "returned 'good'; a reward is a finite number"),
    "a reward that is a string": ("step", lambda: ([], "1", True), "returned '1'; a reward is a finite number"),
    "an unknown role": ("step", lambda: [{"role": "wizard", "content": "x"}], "role 'wizard'; the roles are"),
    "the assistant's role": ("step", lambda: [{"role": "assistant", "content": "x"}], "role 'assistant'"),
    "no role": ("reset", lambda: [{"content": "x"}], "role None"),
    "a number": ("step", lambda: 3, "step returned 3; return a StepResult"),
    "a number in reset": ("reset", lambda: 3, "reset returned 3; messages are a text or a list"),
    "nothing to answer to": ("step", list, "no messages and is not done"),
    "no first message": ("reset", list, "reset returned no messages"),
    "a megabyte": ("step", lambda: "x" * 1_000_000, "1,000,000 characters; env.max_characters is 200,000"),
    "bytes": ("step", lambda: [{"role": "user", "content": b"x"}], "the content b'x'; it must be a text"),
    "no reward at all": ("score", lambda: None, None),
}


@pytest.mark.parametrize(("where", "do", "cause"), BREAKS.values(), ids=BREAKS)
def test_an_environment_that_breaks_its_promises(rollouts, where, do, cause):
    """Its episode is excluded with the cause; the one beside it goes on."""
    bad, good = rollouts(
        Bad, where=where, do=do, n=1, prompts=cases({"bad": True}, {"bad": False}), env=config(step_timeout_s=0.3)
    )
    assert good.error is None and good.reward == 0.75
    if cause is None:  # the turn's reward is one
        assert bad.reward == 0.25
    elif where == "close":
        assert bad.reward == 0.75  # it was scored before
    else:
        assert cause in bad.error and bad.reward is None and bad.rewards == {} and bad.stop == "error"
        assert bad.info["failed"] == 1.0
        kind = "timeout" if do is hang else "exception" if "raised" in cause or "SystemExit" in cause else None
        assert bad.error_kind == (kind or ("exception" if cause == "StopIteration" else None))


def test_an_episode_without_any_reward_is_excluded(rollouts):
    class Silent(Echo):
        score = None

        def step(self, message):
            return StepResult(done=True)

    [rollout] = rollouts(Silent, n=1)
    assert "gave no reward in the whole episode" in rollout.error and rollout.reward is None


def test_what_a_failed_episode_is_worth(rollouts):
    options = {"where": "step", "do": fail, "n": 2}
    zero = rollouts(Bad, **options, env=config(on_error="zero"))
    assert [(each.reward, each.error, each.info["failed"]) for each in zero] == [(0.0, None, 1.0)] * 2
    with raises(EnvError, kind="exception"):
        rollouts(Bad, **options, env=config(on_error="stop"))
    with raises(EnvError, kind="exception"):
        rollouts(Bad, where="close", do=fail, env=config(on_error="stop"))


def test_an_engine_that_fails_is_no_fault_of_the_environment(starter_engine, starter):
    class Broken:
        context_length = starter_engine.context_length
        asked = 0

        async def sample(self, requests):
            self.asked += 1
            if self.asked > 1:
                raise RuntimeError("the engine is gone")
            return await starter_engine.sample(requests)

    with raises(RuntimeError):
        play(Broken(), starter.tokenizer, Echo, params=SamplingParams(max_tokens=24, temperature=0.01))


def test_the_same_thread_for_all_calls(rollouts):
    class Threads(Echo):
        def __init__(self):
            super().__init__()
            self.thread = threading.get_ident()

        def step(self, message):
            assert threading.get_ident() == self.thread
            return super().step(message)

    assert [rollout.error for rollout in rollouts(Threads)] == [None, None]


def test_replays_equal(rollouts):
    """Rollouts of episodes are values: they compare by what they hold."""
    rollouts(Echo, n=1)  # whose conversation the engine keeps, so that both of the next go on from it
    one, other = rollouts(Echo, n=1), rollouts(Echo, n=1)
    assert one == other and replace(one[0], stop="x") != other[0]
