"""An environment on a real OpenEnv server, its own client and actions: played and trained.

`openenv-core` brings a web interface, so it has a virtual environment of its own: install this package and it into one,
and run `pytest tests/slow/test_openenv.py -m slow` with its Python.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("openenv.core")

from groupwise.bridges.openenv import OpenEnvironment
from groupwise.config.run import parse_config
from groupwise.run.loop import run_loop
from groupwise.store.tracking import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

MODELS = """
from openenv.core.env_server.types import Action, Observation


class Guess(Action):
    message: str


class Heard(Observation):
    text: str = ""
"""
SERVER = """
import sys
import uvicorn
from guess_models import Guess, Heard
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import State


class Sums(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, a=3, **kwargs):
        self.a, self.left, self._state = a, 2, State(episode_id=episode_id)
        return Heard(text=f"What is {self.a} + 4?")

    def step(self, action, timeout_s=None, **kwargs):
        self.left -= 1
        right = str(self.a + 4) in action.message
        return Heard(text="Again.", reward=float(right), done=right or not self.left)

    @property
    def state(self):
        return self._state


app = create_fastapi_app(Sums, Guess, Heard, max_concurrent_envs=64)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""
CLIENT = """
from openenv.core.client_types import StepResult
from openenv.core.env_client import EnvClient
from openenv.core.env_server.types import State
from guess_models import Guess, Heard


class SumsClient(EnvClient[Guess, Heard, State]):
    def _step_payload(self, action):
        return {"message": action.message}

    def _parse_result(self, payload):
        heard = Heard(**payload["observation"], reward=payload["reward"], done=payload["done"])
        return StepResult(observation=heard, reward=payload["reward"], done=payload["done"])

    def _parse_state(self, payload):
        return State(**payload)
"""


@contextmanager
def serving(folder: Path, program: str) -> Iterator[str]:
    """Within: the program serves at this address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, program, str(port)], cwd=folder)
    for _ in range(300):
        assert process.poll() is None
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            break
        except OSError:
            time.sleep(0.1)
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(timeout=20)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[tuple[Path, str]]:
    folder = tmp_path_factory.mktemp("openenv")
    for name, code in (("guess_models", MODELS), ("guess_server", SERVER), ("guess_client", CLIENT)):
        (folder / f"{name}.py").write_text(code, encoding="utf-8")
    with serving(folder, "guess_server.py") as base_url:
        yield folder, base_url


def test_an_episode_with_the_generic_client(server):
    async def play() -> None:
        env = OpenEnvironment(base_url=server[1], instructions="Answer.")
        seen = await env.reset({"a": 5}, 1)
        assert list(seen.messages) == [{"role": "user", "content": "Answer.\n\nWhat is 5 + 4?"}]
        wrong = await env.step({"role": "assistant", "content": "7"})
        assert (wrong.messages[0].get("content"), wrong.reward, wrong.done) == ("Again.", 0.0, False)
        right = await env.step({"role": "assistant", "content": '{"message": "9"}'})
        assert (right.reward, right.done) == (1.0, True)
        await env.close()

    asyncio.run(play())


def test_a_typed_client_trains(server, tmp_path):
    folder, base_url = server
    args = {"base_url": base_url, "client": "guess_client:SumsClient", "action": "guess_models:Guess", "episodes": 8}
    settings = {
        "name": "openenv",
        "model": "starter",
        "device": "cpu",
        "dtype": "float32",
        "folder": str(folder),
        "run_dir": str(tmp_path / "run"),
        "env": {"environment": "groupwise.bridges.openenv:OpenEnvironment", "args": args},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_tokens": 24},
        "train": {"steps": 2},
    }
    result = run_loop(parse_config(settings))
    rows = [row for row in read_metrics(result.run_dir / "metrics.jsonl") if "reward/mean" in row]
    assert len(rows) == 2 and all(row["env/failed_frac"] == 0 and row["rollout/turns_mean"] >= 1 for row in rows)
    assert any(row["reward/mean"] > 0 for row in rows)


# ---- tools ----

TOOLS_SERVER = """
import sys
import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State


class Shelf(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        mcp = FastMCP("shelf")

        @mcp.tool
        def count(item: str) -> int:
            "How many there are."
            if item == "air":
                raise ValueError("not on the shelf")
            return len(item)

        super().__init__(mcp)
        self._state = State()

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation(done=False, reward=0.0, metadata={})

    def _step_impl(self, action, timeout_s=None, **kwargs):
        return Observation(done=False, reward=0.0)

    def step(self, action, timeout_s=None, **kwargs):
        heard = super().step(action, timeout_s=timeout_s, **kwargs)
        if isinstance(action, CallToolAction):
            heard.reward = 1.0
        return heard

    async def step_async(self, action, timeout_s=None, **kwargs):
        heard = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        if isinstance(action, CallToolAction):
            heard.reward = 1.0
        return heard

    @property
    def state(self):
        return self._state


app = create_fastapi_app(Shelf, CallToolAction, CallToolObservation, max_concurrent_envs=64)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""


@pytest.mark.parametrize("client", ["openenv.core.mcp_client:MCPToolClient", None])
def test_the_tools_of_a_server_are_called(tmp_path, client):
    (tmp_path / "shelf_server.py").write_text(TOOLS_SERVER, encoding="utf-8")

    async def play(base_url: str) -> None:
        env = OpenEnvironment(base_url=base_url, client=client, tools=None if client else True, instructions="Count.")
        seen = await env.reset({}, 1)
        assert [tool["function"]["name"] for tool in seen.tools] == ["count"]
        made = [
            {"id": item, "type": "function", "function": {"name": "count", "arguments": json.dumps({"item": item})}}
            for item in ("apple", "air")
        ]
        result = await env.step({"role": "assistant", "content": "", "tool_calls": made})
        assert result.messages[0].get("content") == "5" and result.messages[1].get("content", "").startswith("Error: ")
        assert (result.reward, result.done) == (2.0, False)
        assert (await env.step({"role": "assistant", "content": "5"})).done
        await env.close()

    with serving(tmp_path, "shelf_server.py") as base_url:
        asyncio.run(play(base_url))
