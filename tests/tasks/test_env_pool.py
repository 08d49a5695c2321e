"""Environments in processes: what goes wrong in one costs its own episode, and changes nothing for the others."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from groupwise.config.run import EnvConfig
from groupwise.engine.local import LocalEngine
from groupwise.tasks.env_loading import load_factory
from groupwise.tasks.env_pool import EnvPool
from groupwise.tasks.rollout_sources import EpisodeRollouts, play_all
from groupwise.types import PolicyVersion, Prompt, Rollout, SamplingParams
from processes import becomes, descendants
from slow_cases import slow_but

HERE = Path(__file__).parent
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks things up in /proc")
Play = Callable[..., list[Rollout]]


def config_of(name: str, **options: Any) -> EnvConfig:
    return EnvConfig(environment=f"unruly_envs:{name}", **{"step_timeout_s": 60.0, "workers": 2, **options})


@pytest.fixture
def pool_of(request: pytest.FixtureRequest) -> Callable[[EnvConfig], EnvPool]:
    def make(config: EnvConfig) -> EnvPool:
        pool = EnvPool(config, name=str(config.environment).partition(":")[2], folder=HERE)
        request.addfinalizer(pool.close)
        return pool

    return make


@pytest.fixture
def rollouts(starter_engine: LocalEngine, starter, pool_of) -> Play:
    """The rollouts of one episode for each case, in order; `here` plays them in this process."""

    def played(
        name: str, *cases: dict[str, Any], n: int = 1, here: bool = False, pool: EnvPool | None = None, **options
    ):
        config = config_of(name, **options)
        made = load_factory(config, folder=HERE) if here else pool or pool_of(config)
        play = EpisodeRollouts(starter_engine, starter.tokenizer, made, config)
        prompts = [Prompt(id=str(at), columns={"number": at, **case}) for at, case in enumerate(cases)]
        params = SamplingParams(max_tokens=24, temperature=0.5)
        options = {"n": n, "params": params, "version": PolicyVersion.base()}
        groups = asyncio.run(play_all(play, prompts, seeds=list(range(len(prompts))), **options))
        return [rollout for group in groups for rollout in group.rollouts]

    return played


def told(rollout: Rollout) -> Any:
    """What there is to compare: texts, not log-probabilities, which other batches round otherwise."""
    said = [(message["role"], message.get("content")) for message in rollout.messages]
    return said, rollout.rewards, rollout.stop, rollout.error, rollout.info


# ---- the same with and without ----


@pytest.mark.parametrize("name", slow_but({"Odd"}, of=("Steady", "Aio", "Shop", "Odd", "Broken")))
def test_episodes_are_the_same_in_processes_and_here(rollouts: Play, name: str) -> None:
    cases = [{}, {}, {"kind": "raise"}, {"kind": "raise", "when": 1}]
    ours, theirs = rollouts(name, *cases, n=2), rollouts(name, *cases, n=2, here=True)
    assert list(map(told, ours)) == list(map(told, theirs))


@pytest.mark.slow
@linux
def test_episodes_are_in_a_few_processes_that_are_not_this_one(rollouts: Play, tmp_path: Path) -> None:
    rollouts("Steady", *({} for _ in range(8)), args={"diary": str(tmp_path)})
    lines = [line.split(" ", 1) for path in tmp_path.iterdir() for line in path.read_text().splitlines()]
    processes = Counter(line[0] for line in lines)
    assert len(processes) == 2 and str(os.getpid()) not in processes  # and both have their share
    assert Counter(line[1] for line in lines) == {"reset": 8, "step 1": 8, "step 2": 8, "step 3": 8, "close": 8}


def test_what_an_environment_shows_is_heard_while_others_are_asked(pool_of) -> None:
    """Cases and what is shown of them are each more than a socket holds."""
    pool = pool_of(config_of("Reads", workers=1))

    async def shown(number: int) -> str:
        env = await pool.make()
        observation = await env.reset({"document": f"{number} " * 15_000}, number)
        await env.close()
        return observation.messages[0]["content"].partition(" ")[0]

    async def together() -> list[str]:
        async with asyncio.timeout(20.0):
            return await asyncio.gather(*map(shown, range(64)))

    assert asyncio.run(together()) == [str(number) for number in range(64)]


# ---- what goes wrong ----

WRONG = {
    "exit": ("exit", "Steady.step ended its worker (exit status 3); it last printed: 'about to exit'"),
    "crash": ("crash", "Steady.step killed its worker (signal 11, SIGSEGV)"),
    "kill": ("kill", "Steady.step killed its worker (signal 9, SIGKILL"),
    "loop": ("loop", "Steady.step took longer than 3 s"),
    "hold the lock": ("hold the lock", "Steady.step took longer than 3 s"),
    "raise": ("raise", "Steady.step raised ValueError: no luck"),
}


@linux
@pytest.mark.parametrize("name", slow_but({"crash", "raise"}, of=WRONG, long={"loop"}))
def test_it_costs_its_own_episode_and_no_other(rollouts: Play, name: str) -> None:
    """The others, which were in the same process, are what they are without it."""
    kind, cause = WRONG[name]
    cases: list[dict[str, Any]] = [{} for _ in range(4)]
    whole = rollouts("Steady", *cases, here=True)
    cases[1] = {"kind": kind}
    played = rollouts("Steady", *cases, workers=1, step_timeout_s=3.0)
    assert cause in str(played[1].error) and played[1].reward is None and played[1].stop == "error"
    kinds = {"loop": "timeout", "hold the lock": "timeout", "raise": "exception"}
    assert played[1].error_kind == kinds.get(kind)  # of a process that ended nobody knows more
    assert [told(played[at]) for at in (0, 2, 3)] == [told(whole[at]) for at in (0, 2, 3)]


@pytest.mark.slow
@linux
def test_an_async_method_that_never_lets_go(rollouts: Play) -> None:
    """It stops the whole process; the others go on elsewhere."""
    whole = rollouts("Aio", {}, {}, {}, here=True)
    played = rollouts("Aio", {}, {"kind": "loop"}, {}, workers=1, step_timeout_s=3.0)
    assert "Aio.step took longer than 3 s" in str(played[1].error)
    assert [told(played[at]) for at in (0, 2)] == [told(whole[at]) for at in (0, 2)]


@pytest.mark.slow
@linux
def test_a_process_that_ends_while_nothing_is_asked_of_it(rollouts: Play, tmp_path: Path) -> None:
    """Its episodes are played again from the beginning, with the same messages, and come out the same."""
    cases: list[dict[str, Any]] = [{"kind": "exit later", "when": 1}, {}, {}]
    played = rollouts("Steady", *cases, workers=1, args={"diary": str(tmp_path)})
    whole = rollouts("Steady", {}, {}, {}, here=True)
    assert [told(played[at]) for at in (1, 2)] == [told(whole[at]) for at in (1, 2)]
    notes = (tmp_path / "1").read_text().splitlines()
    assert sum(line.endswith("reset") for line in notes) >= 2 and len({line.split()[0] for line in notes}) >= 2


@pytest.mark.slow
@linux
def test_what_does_not_come_out_the_same_again_is_an_error(rollouts: Play) -> None:
    played = rollouts("Forgetful", {"kind": "exit"}, {"when": 9}, workers=1)
    assert "exit status 3" in str(played[0].error) or "came out otherwise" in str(played[0].error)
    assert "lost, and played again reset came out otherwise" in str(played[1].error)


@linux
@pytest.mark.slow
def test_when_it_is_everybodys_doing_it_is_not_asked_whose(rollouts: Play, tmp_path: Path) -> None:
    """A step of many episodes that all end their process costs some processes, not one for each."""
    played = rollouts("Steady", *({"kind": "exit", "when": 1} for _ in range(24)), args={"diary": str(tmp_path)})
    assert [rollout.error for rollout in played if "exit status 3" not in str(rollout.error)] == []
    used = {line.split()[0] for path in tmp_path.iterdir() for line in path.read_text().splitlines()}
    assert len(used) < 20  # 8 are asked by themselves, each in a process of its own


@pytest.mark.slow
@linux
def test_a_process_with_a_thread_that_loops_takes_no_new_episodes_and_ends(rollouts: Play, pool_of, tmp_path) -> None:
    pool = pool_of(config_of("Steady", workers=1, step_timeout_s=3.0, args={"diary": str(tmp_path)}))
    here = set(descendants(os.getpid()))
    [failed] = rollouts("Steady", {"kind": "loop"}, pool=pool, step_timeout_s=3.0)
    assert "took longer than 3 s" in str(failed.error)
    [fine] = rollouts("Steady", {"number": 7}, pool=pool)
    assert fine.error is None
    first, second = ((tmp_path / name).read_text().split()[0] for name in ("0", "7"))
    assert first != second and becomes(lambda: not Path(f"/proc/{first}").exists())
    pool.close()
    assert becomes(lambda: set(descendants(os.getpid())) <= here)


@pytest.mark.slow
def test_what_cannot_be_loaded_in_the_process_is_said(rollouts: Play) -> None:
    [rollout] = rollouts("NotThere", {})
    assert "could not be called: its worker could not load the code: " in str(rollout.error)
    assert "NotThere" in str(rollout.error)
