"""Environments for TRL's `environment_factory` play and train here without a change to their code."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from groupwise.bridges.trl.environment import TrlEnvironment
from groupwise.config.run import EnvConfig
from groupwise.errors import ConfigError, EnvError, LoadError
from groupwise.store.tracking import read_metrics
from groupwise.tasks.env import Episode
from groupwise.tasks.env_loading import load_factory
from starter_run import starter_run
from wording import raises

CODE = '''
class Calculating:
    """As TRL's documentation has them: reset, tools with docstrings, get_reward."""

    def __init__(self):
        self.wanted = None

    def reset(self, prompt, a, b, **kwargs) -> str | None:
        self.wanted, self.shown = a * b, False
        return f" {a} * {b}"

    def calculator(self, expression: str) -> str:
        """Evaluate a product.

        Args:
            expression: As in 47*12.

        Returns:
            The product.
        """
        a, b = expression.split("*")
        self.shown = int(a) * int(b) == self.wanted
        return str(int(a) * int(b))

    def get_reward(self) -> float:
        return float(self.shown)

    def _hidden(self):
        raise AssertionError


class Slow(Calculating):
    async def reset(self, **row):
        self.row = row

    async def calculator(self, expression: str) -> int:
        """Count.

        Args:
            expression: Anything.
        """
        return len(expression)

    get_reward = None


class NoReset:
    pass


def lookup(word: str) -> str:
    """Look up.

    Args:
        word: What.
    """
    return word.upper()
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "trl_environments.py").write_text(CODE, encoding="utf-8")
    return tmp_path


def make(folder: Path, factory: Any = "trl_environments:Calculating", **args: Any) -> TrlEnvironment:
    return TrlEnvironment(factory, folder=str(folder), **args)


CASE = {"prompt": [{"role": "user", "content": "Use the calculator:"}], "a": 47, "b": 12}


def called(expression: str) -> dict[str, Any]:
    call = {
        "id": "call_0",
        "type": "function",
        "function": {"name": "calculator", "arguments": {"expression": expression}},
    }
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def over(**fields: Any) -> Episode:
    return Episode(case=CASE, seed=0, messages=(), rewards=(), stop="done", **fields)


def test_an_episode(folder):
    async def play() -> None:
        env = make(folder)
        seen = await env.reset(CASE, 0)
        assert seen.messages == [{"role": "user", "content": "Use the calculator: 47 * 12"}]
        assert [tool["function"]["name"] for tool in seen.tools] == ["calculator"]
        assert seen.tools[0]["function"]["parameters"]["properties"]["expression"]["description"] == "As in 47*12."
        answered = await env.step(called("47*12"))  # type: ignore[arg-type]
        assert [message["content"] for message in answered.messages] == ["564"] and not answered.done
        wrong = await env.step(called("47"))  # type: ignore[arg-type]
        assert "Error: calculator raised ValueError" in str(wrong.messages[0]["content"])
        assert (await env.step({"role": "assistant", "content": "564"})).done
        assert await env.score(over()) == 1.0
        env.close()

    asyncio.run(play())
    assert "As in" not in CASE["prompt"][0]["content"]  # and the row is as it was


def test_async_methods_several_factories_and_other_tools(folder):
    async def play() -> None:
        named = {"fast": "trl_environments:Calculating", "slow": "trl_environments:Slow"}
        env = make(folder, named, tools=["trl_environments:lookup"])
        seen = await env.reset({"environment": "slow", "n": 3}, 0)
        assert seen.messages == [{"role": "user", "content": ""}] and env._played.row == {"n": 3}
        assert sorted(tool["function"]["name"] for tool in seen.tools) == ["calculator", "lookup"]
        assert (await env.step(called("abc"))).messages[0]["content"] == "3"  # type: ignore[arg-type]
        assert await env.score(over()) == 0.0
        with raises(EnvError):
            await env.reset({"environment": "other"}, 0)
        env.close()

    asyncio.run(play())


def test_what_is_none(folder):
    with pytest.raises(LoadError):
        make(folder, "trl_environments:Nothing")
    with raises(ConfigError):
        asyncio.run(make(folder, "trl_environments:NoReset").reset(CASE, 0))


def test_a_run_finds_it_beside_the_configuration_and_trains(folder):
    rows = [{"prompt": "Use the calculator:", "a": 40 + i, "b": 3 + i} for i in range(8)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    env = {
        "environment": "groupwise.bridges.trl.environment:TrlEnvironment",
        "args": {"factory": "trl_environments:Calculating"},
    }
    assert load_factory(EnvConfig(**env), folder=folder).args["folder"] == str(folder)
    result = starter_run(
        folder,
        name="trl",
        data={"source": "rows.jsonl"},
        env={**env, "max_turns": 3},
        rollout={"prompts_per_step": 4, "group_size": 4, "max_tokens": 40},
        train={"steps": 1},
    )
    (row,) = read_metrics(result.run_dir / "metrics.jsonl")
    assert row["env/failed_frac"] == 0 and row["env/tools"] == 1 and row["env/tool_calls"] > 0
    assert 0 < row["reward/mean"] <= 1
