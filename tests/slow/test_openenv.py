"""An environment on a real OpenEnv server, its own client and actions: played and trained.

`openenv-core` brings a web interface, so it has a virtual environment of its own: install this package and it into one,
and run `pytest tests/slow/test_openenv.py -m slow` with its Python.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("openenv.core")

from groupwise.config import parse_config
from groupwise.envs.openenv import OpenEnvironment
from groupwise.loop import run
from groupwise.tracking import read_metrics

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


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[tuple[Path, str]]:
    folder = tmp_path_factory.mktemp("openenv")
    for name, code in (("guess_models", MODELS), ("guess_server", SERVER), ("guess_client", CLIENT)):
        (folder / f"{name}.py").write_text(code, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "guess_server.py", str(port)], cwd=folder)
    for _ in range(300):
        assert process.poll() is None
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            break
        except OSError:
            time.sleep(0.1)
    yield folder, f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(timeout=20)


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
        "env": {"environment": "groupwise.envs.openenv:OpenEnvironment", "args": args},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_tokens": 24},
        "train": {"steps": 2},
    }
    result = run(parse_config(settings))
    rows = [row for row in read_metrics(result.run_dir / "metrics.jsonl") if "reward/mean" in row]
    assert len(rows) == 2 and all(row["env/failed_frac"] == 0 and row["rollout/turns_mean"] >= 1 for row in rows)
    assert any(row["reward/mean"] > 0 for row in rows)
