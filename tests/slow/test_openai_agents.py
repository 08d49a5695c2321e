"""OpenAI's agents, unchanged, with a tool: on /v1/responses of a live server and in an episode, and the example.

pip install openai-agents; pytest -m slow tests/slow/test_openai_agents.py     a minute
"""

from __future__ import annotations

import asyncio
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from episodes import Recorder, sampled, trained
from groupwise.algo.samples import segments_of
from groupwise.config.run import EnvConfig
from groupwise.engine.local import LocalEngine
from groupwise.run.config_file import load_config
from groupwise.run.loop import run_loop
from groupwise.server import responses
from groupwise.store.tracking import read_metrics
from groupwise.tasks.agent_rollouts import AgentRollouts
from groupwise.tasks.agents import Agent as Played
from groupwise.tasks.agents import load_agent
from groupwise.tasks.rollout_sources import play_all
from groupwise.tasks.starter.tasks import calculate
from groupwise.types import PolicyVersion, Prompt, SamplingParams
from serving import served, starter

agents = pytest.importorskip("agents", reason="pip install openai-agents")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

EXAMPLE = Path(__file__).parents[2] / "examples" / "envs" / "openai_agents_calculator.yaml"
ASKED = "Use the calculator: 47 * 12"


def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression.

    Args:
        expression: what to evaluate
    """
    return str(calculate(expression))


async def answer(base_url: str, api_key: str, *, stream: bool) -> Any:
    agents.set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        model = agents.OpenAIResponsesModel(model="starter", openai_client=client)
        tool = agents.function_tool(calculator)
        settings = agents.ModelSettings(temperature=0)
        agent = agents.Agent(name="agent", model=model, tools=[tool], model_settings=settings)
        if not stream:
            return (await agents.Runner.run(agent, ASKED)).final_output
        run = agents.Runner.run_streamed(agent, ASKED)
        async for _ in run.stream_events():
            pass
        return run.final_output


@pytest.mark.parametrize("stream", [False, True])
def test_on_a_live_server(tmp_path: Path, stream: bool) -> None:
    with served(tmp_path / "state", [responses.router]) as api:
        assert asyncio.run(answer(f"{api.url}/v1", "none", stream=stream)) == "564"


@pytest.mark.parametrize("stream", [False, True])
def test_in_an_episode(stream: bool) -> None:
    async def play(base_url: str, api_key: str) -> float:
        return float(await answer(base_url, api_key, stream=stream) == "564")

    engine = LocalEngine(starter(), max_rows=8)
    played = Played(name="agent", function=play, takes=("base_url", "api_key"))
    source = AgentRollouts(engine, starter().tokenizer, played, EnvConfig(agent="tests:agent"), scored=False)
    params = SamplingParams(max_tokens=48, temperature=0.0)
    prompts = [Prompt(id="case:0", columns={"question": ASKED})]
    try:
        groups = play_all(source, prompts, seeds=[5], n=1, params=params, version=PolicyVersion.base())
        (group,) = asyncio.run(groups)
    finally:
        source.close()
        engine.close()
    (rollout,) = group.rollouts
    assert rollout.reward == 1.0 and len(rollout.turns) == 2 and rollout.info["tool_calls"] == 1
    assert len(segments_of(rollout.turns)) == 1


# ---- the example ----


def test_the_example_is_trained_on_what_was_sampled() -> None:
    """Every token that the engine sampled is trained once, behind what the engine saw before it."""
    config = load_config(EXAMPLE)
    assert config.env is not None
    agent = load_agent(config.env, folder=config.folder)
    engine = LocalEngine(starter(), max_rows=32)
    recorder = Recorder(engine)
    source = AgentRollouts(recorder, starter().tokenizer, agent, config.env, scored=False)
    params, cases = SamplingParams(max_tokens=config.rollout.max_tokens), (agent.cases() or [])[:4]
    try:
        played = play_all(source, cases, seeds=range(4), n=8, params=params, version=PolicyVersion.base())
        rollouts = [rollout for group in asyncio.run(played) for rollout in group.rollouts]
    finally:
        source.close()
        engine.close()
    assert sorted(chain.from_iterable(map(trained, rollouts))) == sampled(recorder)
    assert not any(rollout.error for rollout in rollouts) and {rollout.reward for rollout in rollouts} == {0.0, 1.0}
    for rollout in rollouts:  # its history is always gone on from
        assert len(segments_of(rollout.turns)) == 1 and len(rollout.turns) <= 1 + rollout.info["tool_calls"]
    assert sum(rollout.info["tool_calls"] for rollout in rollouts) >= len(rollouts) / 2


def test_the_example_runs(tmp_path: Path) -> None:
    short = ["train.steps=2", "rollout.prompts_per_step=8", "eval.limit=32"]
    result = run_loop(load_config(EXAMPLE, [f"run_dir={tmp_path / 'run'}", *short]))
    steps = [row for row in read_metrics(result.run_dir / "metrics.jsonl") if "reward/mean" in row]
    assert result.version == PolicyVersion("openai-agents-calculator", 2) and len(steps) == 2
    for row in steps:
        assert (
            row["env/failed_frac"] == row["env/forks"] == 0 and row["env/tool_calls"] > 0.5 and row["reward/mean"] > 0
        )
    assert set(result.after) == {"greedy", "sampled"}
