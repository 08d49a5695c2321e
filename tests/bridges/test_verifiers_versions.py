"""What the adapters do without `verifiers`: name the versions that they know, and wait for tools that tasks share."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from groupwise.bridges.verifiers.before_0_4 import VerifiersAgent
from groupwise.bridges.verifiers.tasksets import TasksetAgent
from groupwise.errors import ConfigError
from wording import raises


@pytest.mark.skipif(importlib.util.find_spec("verifiers") is not None, reason="it is installed")
def test_none_is_installed():
    with raises(ConfigError):
        VerifiersAgent("wordle")
    with raises(ConfigError):
        TasksetAgent("wordle-v1")


@pytest.mark.parametrize("version", ["0.3.1", "0.5.0"])
def test_tasksets_of_a_version_that_is_not_known(tmp_path, monkeypatch, version):
    (tmp_path / "verifiers").mkdir()
    (tmp_path / "verifiers" / "__init__.py").write_text(f'__version__ = "{version}"\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "verifiers", raising=False)
    try:
        with raises(ConfigError):
            TasksetAgent("wordle-v1")
    finally:
        sys.modules.pop("verifiers", None)


@pytest.mark.parametrize("environment", ["wordle", "my_environments:load_environment"])
def test_one_without_such_environments(tmp_path, monkeypatch, environment):
    """As 0.4 is: a package that has a version and no `load_environment`."""
    (tmp_path / "verifiers").mkdir()
    (tmp_path / "verifiers" / "__init__.py").write_text('__version__ = "0.4.0"\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "verifiers", raising=False)
    try:
        with raises(ConfigError):
            VerifiersAgent(environment)
    finally:
        sys.modules.pop("verifiers", None)


class Shared:
    """An environment whose tasks share tool servers, as `TasksetAgent` uses it; the first start fails."""

    def __init__(self) -> None:
        self.taskset = self
        self.config, self.starts, self.serves = None, 0, asyncio.Event()

    def toolsets(self, config: Any) -> list[str]:
        return ["search"]

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        self.starts += 1
        await asyncio.sleep(0)
        if self.starts == 1:
            raise OSError("the port is in use")
        self.serves.set()
        yield
        self.serves.clear()


def test_every_episode_waits_for_the_tools_that_tasks_share() -> None:
    """Only the first did; the others played without them, and went on to when their start failed."""
    agent: Any = object.__new__(TasksetAgent)
    agent._serving = {}

    async def episode(env: Shared) -> bool:
        await agent._shared_tools(env)
        return env.serves.is_set()

    async def episodes(env: Shared) -> tuple[list[Any], list[Any]]:
        failed = await asyncio.gather(*(episode(env) for _ in range(3)), return_exceptions=True)
        given_up = asyncio.create_task(episode(env))
        await asyncio.sleep(0)
        given_up.cancel()
        return failed, await asyncio.gather(*(episode(env) for _ in range(3)))

    env = Shared()
    failed, served = asyncio.run(episodes(env))
    assert [type(each) for each in failed] == [OSError] * 3
    assert served == [True] * 3 and env.starts == 2
    again = Shared()
    again.starts, agent._serving = 1, {id(again): agent._serving[id(env)]}  # held in a loop that has ended
    assert asyncio.run(episode(again)) and again.starts == 2
