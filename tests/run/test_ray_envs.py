"""Environments in actors, here without Ray: the actor's own work, and episodes whose actors are threads that can be
ended. `tests/slow/test_ray.py` has the real ones."""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from groupwise.config.run import RunConfig, parse_config
from groupwise.engine.worker_group import WorkerLost
from groupwise.errors import ClusterError, EnvError
from groupwise.run import ray_envs
from groupwise.run.assemble import RemoteBackends, local_engine, open_components
from groupwise.run.plan import make_plan
from groupwise.run.ray_envs import EnvActor, RayEnvs
from groupwise.tasks.env import Episode, StepResult
from groupwise.tasks.env_loading import load_factory
from groupwise.tasks.rollout_sources import Environments, EpisodeRollouts, play_all
from groupwise.types import PolicyVersion, Prompt, RolloutGroup, SamplingParams
from processes import becomes
from wording import raises

ENVS = '''
import os, sqlite3, threading, time

from groupwise.tasks.env import StepResult
from groupwise.tasks.tool_env import ToolEnv


class Counts:
    """Two turns; minds its thread."""

    def reset(self, case, seed):
        self.database, self.left = sqlite3.connect(":memory:"), 2
        return f"{case['number']} + {seed % 7} ="

    def step(self, message):
        self.database.execute("select 1")
        self.left -= 1
        return [{"role": "user", "content": "And?"}], len(message["content"]) / 8, not self.left, {"left": self.left}

    def score(self, episode):
        return 0.5 if episode.stop == "done" else None

    def close(self):
        self.database.close()


class WithCases(Counts):
    def cases(self):
        return [{"number": 4}]


class Shop(ToolEnv):
    def first_message(self, case, seed):
        self.thread_of = threading.get_ident()
        return "How many?"

    def look(self, item: str) -> str:
        """How many of an item there are."""
        return f"{item}: {threading.get_ident() == self.thread_of}"

    tools = (look,)


class Bad(Counts):
    def reset(self, case, seed):
        if case["number"] == 1:
            raise ConnectionError("no database")
        return super().reset(case, seed)

    def step(self, message):
        time.sleep(60)


class Deadly(Counts):
    def reset(self, case, seed):
        self.number = case["number"]
        return super().reset(case, seed)

    def step(self, message):
        if self.number == 1:
            os._exit(3)
        return super().step(message)
'''


class Thread:
    """An `EnvActor` in a thread of its own that can be ended, as a `Worker`."""

    def __init__(self) -> None:
        self.actor, self.alive, self._lock = EnvActor(), True, threading.Lock()
        self._open: list[Future[Any]] = []
        self._asked: list[Coroutine[Any, Any, Any]] = []
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def ask(self, method: str, *arguments: Any) -> Future[Any]:
        arguments = pickle.loads(pickle.dumps(arguments))

        async def asked() -> Any:
            answer = getattr(self.actor, method)(*arguments)
            return pickle.loads(pickle.dumps(await answer if asyncio.iscoroutine(answer) else answer))

        with self._lock:  # no call is lost between the two lists that `end` goes through
            if self.alive:
                self._asked.append(asked())
                self._open.append(asyncio.run_coroutine_threadsafe(self._asked[-1], self._loop))
                return self._open[-1]
        lost: Future[Any] = Future()
        lost.set_exception(WorkerLost("it was killed"))
        return lost

    def end(self) -> None:
        with self._lock:
            self.alive = False
        for future in self._open:
            with suppress(Exception):
                future.set_exception(WorkerLost("it was killed"))
        self._loop.call_soon_threadsafe(self._loop.stop)
        for each in self._asked:  # what was asked just now does not begin
            with suppress(ValueError):
                if inspect.getcoroutinestate(each) == inspect.CORO_CREATED:
                    each.close()


class Threads:
    """A place where they are started."""

    def __init__(self, folder: Path):
        self.folder, self.started = str(folder), list[Thread]()

    def start(self, kind: type, **options: Any) -> Thread:
        assert kind is EnvActor and options["max_concurrency"] >= 256
        self.started.append(Thread())
        return self.started[-1]

    @property
    def held(self) -> list[int]:
        return [len(each.actor._played) for each in self.started if each.alive]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Threads:
    monkeypatch.setattr(ray_envs, "Actor", lambda started: started)
    monkeypatch.chdir(tmp_path)  # as actors do
    (tmp_path / "envs_away.py").write_text(ENVS)
    return Threads(tmp_path)


@pytest.fixture
def away(place: Threads) -> Iterator[Callable[..., RayEnvs]]:
    opened: list[RayEnvs] = []

    def opens(name: str = "Counts", **keys: Any) -> RayEnvs:
        run = run_of(Path(place.folder), name, **keys)
        assert run.env is not None
        opened.append(RayEnvs(run, load_factory(run.env, folder=run.folder), place=place))  # type: ignore[arg-type]
        return opened[-1]

    yield opens
    for each in opened:
        each.close()


def run_of(
    folder: Path, name: str, *, env_workers: int = 2, restarts: int = 3, workers: int = 0, **env: Any
) -> RunConfig:
    launcher = {"kind": "ray", "env_workers": env_workers, "restarts": restarts, "start_timeout_s": 20}
    env = {"environment": f"envs_away:{name}", "workers": workers, "stop_at_cut": False, **env}
    return parse_config({"model": "starter", "launcher": launcher, "env": env, "folder": str(folder)})


def play(engine: Any, tokenizer: Any, envs: Environments, run: RunConfig, *, numbers: int = 3) -> list[RolloutGroup]:
    assert run.env is not None
    prompts = [Prompt(id=f"case:{n}", columns={"number": n}) for n in range(numbers)]
    params, seeds = SamplingParams(max_tokens=6), list(range(numbers))
    episodes = EpisodeRollouts(engine, tokenizer, envs, run.env)
    return asyncio.run(play_all(episodes, prompts, seeds=seeds, n=4, params=params, version=PolicyVersion.base()))


def told(group: RolloutGroup) -> list[Any]:
    """What was said and what it was worth; log-probabilities differ by rounding from one batch to another."""
    return [group.prompt.messages, *((each.messages, each.reward, each.stop, each.info) for each in group.rollouts)]


def test_episodes_in_actors_are_those_in_the_learner(place: Threads, away, starter, starter_engine) -> None:
    run = run_of(Path(place.folder), "Counts")
    assert run.env is not None
    here = load_factory(run.env, folder=run.folder)
    with closing(here):
        expected = play(starter_engine, starter.tokenizer, here, run)
    assert list(map(told, play(starter_engine, starter.tokenizer, away(), run))) == list(map(told, expected))
    assert all(rollout.reward is not None for group in expected for rollout in group.rollouts)
    assert len(place.started) == 2 and place.held == [0, 0]  # all were closed


def test_a_run_opens_them_and_ends_them_with_itself(place: Threads) -> None:
    run = run_of(Path(place.folder), "WithCases")
    remote = RemoteBackends(
        engine=local_engine,
        rewards=lambda config, specs: pytest.fail("there are no rewards"),
        envs=lambda config, factory: RayEnvs(config, factory, place=place),  # type: ignore[arg-type]
    )
    with open_components(make_plan(run), remote=remote) as parts:
        assert becomes(lambda: len(place.started) == 2)
        groups = asyncio.run(
            play_all(
                parts.play,
                [Prompt(id="case:0", columns={"number": 4})],
                seeds=[1],
                n=2,
                params=SamplingParams(max_tokens=6),
                version=PolicyVersion.base(),
            )
        )
        assert [each.stop for each in groups[0].rollouts] == ["done", "done"]
    assert not any(each.alive for each in place.started)


def test_they_are_shared_out_and_stay_where_they_began(place: Threads, away) -> None:
    envs = away()
    played = [envs.make() for _ in range(4)]

    async def begun() -> list[Any]:
        await asyncio.gather(*(each.reset({"number": 1}, 3) for each in played))
        held = place.held
        said = [await each.step({"role": "assistant", "content": "4"}) for each in played]
        return [held, *said]

    held, *said = asyncio.run(begun())
    assert held == [2, 2]
    assert said == [StepResult(messages=({"role": "user", "content": "And?"},), reward=0.125, info={"left": 1.0})] * 4


def test_a_lost_actor_costs_the_episodes_that_it_had(place: Threads, away, starter, starter_engine) -> None:
    run, envs, ended = run_of(Path(place.folder), "Counts"), away(), list[int]()

    class Watched:
        """The engine; the second time that it is asked, an actor is lost."""

        context_length = starter_engine.context_length
        asked = 0

        async def sample(self, requests: Any) -> Any:
            self.asked += 1
            if self.asked == 4:
                ended.append(len(place.started[0].actor._played))
                place.started[0].end()
            return await starter_engine.sample(requests)

    groups = play(Watched(), starter.tokenizer, envs, run)
    failed = [rollout for group in groups for rollout in group.rollouts if rollout.error is not None]
    assert 0 < len(failed) == ended[0] < 12
    assert all("the environment worker that had this episode was lost" in str(each.error) for each in failed)
    again = play(starter_engine, starter.tokenizer, envs, run)  # another has taken its place
    assert not [rollout for group in again for rollout in group.rollouts if rollout.error is not None]
    assert len(place.started) == 3


@pytest.mark.slow
def test_an_environment_that_ends_its_process_does_not_take_the_actor_with_it(
    place: Threads, away, starter, starter_engine
) -> None:
    """Actors have processes for them: its episodes fail, and those beside them go on."""
    run, envs = run_of(Path(place.folder), "Deadly", workers=1), away("Deadly", env_workers=1, workers=1)
    groups = play(starter_engine, starter.tokenizer, envs, run)
    errors = [[rollout.error for rollout in group.rollouts] for group in groups]
    assert all("Deadly.step ended its worker (exit status 3)" in str(error) for error in errors[1])
    assert errors[0] == errors[2] == [None] * 4 and len(place.started) == 1
    place.started[0].actor._pool.close()  # type: ignore[union-attr]


def test_actors_that_are_lost_too_often_end_the_run(place: Threads, away, starter, starter_engine) -> None:
    envs = away(env_workers=1, restarts=0)
    assert becomes(lambda: place.started)
    place.started[0].end()
    with raises(ClusterError):
        play(starter_engine, starter.tokenizer, envs, run_of(Path(place.folder), "Counts"))


def opened(place: Threads, name: str, **env: Any) -> EnvActor:
    run = run_of(Path(place.folder), name, **env)
    assert run.env is not None
    actor = EnvActor()
    actor.open(run.env, run.folder, os.getcwd())
    return actor


def test_what_fails_in_an_actor_is_named_as_without_ray(place: Threads) -> None:
    actor = opened(place, "Bad", step_timeout_s=0.3)

    async def asked() -> None:
        with raises(EnvError, field="Bad.reset", kind="exception"):
            await actor.reset(1, {"number": 1}, 0)
        await actor.reset(2, {"number": 2}, 0)
        with raises(EnvError, field="Bad.step", kind="timeout"):
            await actor.step(2, {"role": "assistant", "content": "4"})
        with raises(EnvError):
            await actor.step(3, {"role": "assistant", "content": "4"})
        await actor.close(3)

    asyncio.run(asked())


def test_tools_run_in_the_episodes_thread_and_a_missing_score_is_none(place: Threads) -> None:
    actor = opened(place, "Shop")
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"item": "x"}'}}

    async def asked() -> tuple[Any, ...]:
        seen = await actor.reset(0, {}, 0)
        said = await actor.step(0, {"role": "assistant", "content": "", "tool_calls": [call]})
        scored = await actor.score(0, Episode(case={}, seed=0, messages=(), rewards=(), stop="done"))
        await actor.close(0)
        return seen, said, scored

    seen, said, scored = asyncio.run(asked())
    assert seen.tools[0]["function"]["name"] == "look"
    assert said.messages[0]["content"] == "x: True" and scored is None and not actor._played
