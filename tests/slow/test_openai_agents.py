"""OpenAI's agents, unchanged, with a tool, on /v1/responses of a live server and in an episode.

pip install openai-agents; pytest -m slow tests/slow/test_openai_agents.py     seconds
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from groupwise.algo.samples import segments_of
from groupwise.config.run import EnvConfig
from groupwise.engine.local import LocalEngine
from groupwise.server import responses
from groupwise.tasks.agents import Agent as Played
from groupwise.tasks.agents import AgentRollouts
from groupwise.tasks.episode import play_all
from groupwise.tasks.starter.tasks import calculate
from groupwise.types import PolicyVersion, Prompt, SamplingParams
from serving import served, starter

agents = pytest.importorskip("agents", reason="pip install openai-agents")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

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
