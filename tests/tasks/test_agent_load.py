"""What an agent may look like, what it may return, and what the configuration refuses."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from groupwise.config.run import EnvConfig, parse_config
from groupwise.errors import ConfigError, EnvError, LoadError
from groupwise.tasks.agents import AgentResult, is_async, load_agent, outcome_of
from wording import raises

CODE = """
async def plain(case, *, base_url, api_key, model):
    return 1.0

def short(base_url, api_key, level=1):
    return level

async def with_client(case, client, model):
    return 1.0

async def with_credit(case, client, episode):
    episode.reward(1.0)

def takes_all(**given):
    return given

def no_key(case, model):
    return 1.0

def wants_more(base_url, api_key, tools):
    return 1.0

class Agent:
    def __init__(self, level=1):
        if level < 0:
            raise ValueError("below 0")
        self.level = level

    def cases(self):
        return [{"n": i} for i in range(self.level)]

    async def eval_cases(self):
        return [{"n": -1}]

    async def __call__(self, case, base_url, api_key):
        return self.level

class NotCallable:
    pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_agents.py").write_text(CODE, encoding="utf-8")
    return tmp_path


def load(folder: Path, name: str, **args):
    return load_agent(EnvConfig(agent=f"my_agents:{name}", args=args), folder=folder)


GIVEN = {"case": {"n": 1}, "base_url": "http://x", "api_key": "k", "model": "policy", "seed": 3}


def test_functions_get_what_they_take(folder):
    assert load(folder, "plain").takes == ("case", "base_url", "api_key", "model")
    assert is_async(load(folder, "plain").function) and asyncio.run(load(folder, "plain").bound(**GIVEN)()) == 1.0
    assert load(folder, "short", level=4).bound(**GIVEN)() == 4
    assert load(folder, "takes_all", more=5).bound(**GIVEN)() == {**GIVEN, "more": 5}
    assert load(folder, "with_client").takes == ("case", "model", "client")  # without URL and key
    assert load(folder, "with_credit").takes == ("case", "client", "episode")
    assert load(folder, "plain").cases() is None


def test_a_client_needs_its_package(folder, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises(ConfigError):
        load(folder, "with_client")


def test_a_class_is_made_once_and_brings_its_cases(folder):
    agent = load(folder, "Agent", level=2)
    assert (agent.name, agent.takes, is_async(agent.function)) == ("Agent", ("case", "base_url", "api_key"), True)
    assert asyncio.run(agent.bound(**GIVEN)()) == 2
    cases, held_out = agent.cases(), agent.cases(held_out=True)
    assert cases is not None and [dict(prompt.columns) for prompt in cases] == [{"n": 0}, {"n": 1}]
    assert held_out is not None and [dict(prompt.columns) for prompt in held_out] == [{"n": -1}]


@pytest.mark.parametrize(
    ("name", "args", "error"),
    [
        ("no_key", {}, ConfigError),
        ("wants_more", {}, ConfigError),
        ("short", {"levle": 1}, ConfigError),
        ("Agent", {"levle": 1}, ConfigError),
        ("Agent", {"level": -1}, EnvError),
        ("NotCallable", {}, ConfigError),
        ("nothing", {}, LoadError),
    ],
)
def test_what_cannot_be_an_agent(folder, name, args, error):
    with raises(error):
        load(folder, name, **args)


def test_what_an_agent_may_return():
    assert outcome_of(None, "agent") == AgentResult()
    assert outcome_of(True, "agent") == AgentResult(reward=1.0)
    returned = {"reward": 2, "metrics": {"hits": 3, "text": "x", "bad": float("nan")}}
    assert outcome_of(returned, "agent") == AgentResult(reward=2.0, metrics={"hits": 3.0})
    assert outcome_of({"reward": None}, "agent") == AgentResult()
    assert outcome_of({"turn_rewards": [1, None]}, "agent") == AgentResult(turn_rewards=(1.0, None))
    bad = ("1.0", float("inf"), [1.0], {"metrics": {}}, {"reward": "good"}, {"reward": 1, "metrics": [1]})
    for value in (*bad, {"turn_rewards": 1.0}, {"turn_rewards": "12"}, {"turn_rewards": [float("nan")]}):
        with raises(EnvError):
            outcome_of(value, "agent")


@pytest.mark.parametrize(
    ("env", "field"),
    [
        ({}, "env.environment"),
        ({"environment": "a:B", "agent": "a:b"}, "env.environment"),
        ({"agent": "a:b", "stop_at_cut": False}, "env.stop_at_cut"),
        ({"agent": "a:b", "step_timeout_s": 2.0}, "env.step_timeout_s"),
    ],
)
def test_a_run_has_one_player(env, field: str):
    with raises(ConfigError, field=field, kind="conflict"):
        parse_config({"name": "toy", "model": "starter", "env": env})
