"""A taskset as verifiers 0.4 documents it trains here unchanged, by its `null` and `bash` harnesses as processes.

The package and what it needs beside this one, and `uv`, go into a virtual environment of their own, with this package:
run `pytest tests/slow/test_verifiers_tasksets.py -m slow` with its Python. Harnesses fetch what they need with uv.
"""

from __future__ import annotations

import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from wording import raises

pytest.importorskip("verifiers")
if tuple(map(int, version("verifiers").split(".")[:2])) < (0, 4):
    pytest.skip("verifiers before 0.4 has other environments", allow_module_level=True)
if shutil.which("uv") is None:
    pytest.skip("its harnesses need uv", allow_module_level=True)

from groupwise.algo.samples import segments_of
from groupwise.config.run import EnvConfig, parse_config
from groupwise.errors import ConfigError
from groupwise.run.config_file import load_config
from groupwise.run.loop import run_loop
from groupwise.store.rollouts import group_from_json
from groupwise.store.tracking import read_metrics
from groupwise.tasks.agents import load_agent

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

AGENT = "groupwise.bridges.verifiers.tasksets:TasksetAgent"
TASKSET = """
import verifiers.v1 as vf


class SumsData(vf.TaskData):
    answer: str


class SumsTask(vf.Task[SumsData]):
    @vf.reward(weight=1.0)
    async def even(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) % 2)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    num_tasks: int = 5
    first: int = 1


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self) -> list[SumsTask]:
        numbers = range(self.config.first, self.config.first + self.config.num_tasks)
        return [SumsTask(SumsData(idx=n, prompt=f"What is {n} + 4?", answer=str(n + 4)), self.config.task)
                for n in numbers]


__all__ = ["SumsTaskset"]
"""
TWO_SEATS = (
    TASKSET
    + """

class PairConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()


class PairEnv(vf.Env[PairConfig]):
    async def run(self, task, agents):
        await agents.first.run(task)
        await agents.second.run(task)


__all__ = ["SumsTaskset", "PairEnv"]
"""
)

TALK = """
import verifiers.v1 as vf


class TalkTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def even(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) % 2)

    @vf.metric
    async def exchanges(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class TalkTaskset(vf.Taskset[TalkTask, vf.TasksetConfig]):
    def load(self) -> list[TalkTask]:
        return [TalkTask(vf.TaskData(idx=n, prompt=None), self.config.task) for n in range(4)]


class TalkConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class TalkEnv(vf.Env[TalkConfig]):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as talk:
            said = await talk.turn(f"What is 30 + {10 + task.data.idx}?")
            for again in ("Sure?", "And again?"):
                if not said.terminated:
                    said = await talk.turn(again)


__all__ = ["TalkTaskset", "TalkEnv"]
"""
TOOL = """
import verifiers.v1 as vf


class CalculatorToolset(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    def calculator(self, expression: str) -> str:
        \"\"\"Evaluate arithmetic.\"\"\"
        a, b = expression.split("*")
        return str(int(a) * int(b))


if __name__ == "__main__":
    CalculatorToolset.run()
"""
WITH_TOOL = """
import verifiers.v1 as vf

from product_v1.servers.tool import CalculatorToolset


class ProductData(vf.TaskData):
    answer: str


class ProductTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class ProductTask(vf.Task[ProductData, vf.State, ProductTaskConfig]):
    @classmethod
    def toolsets(cls, config: ProductTaskConfig) -> list[vf.Toolset]:
        return [CalculatorToolset(config.tools)]

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)


class ProductConfig(vf.TasksetConfig):
    task: ProductTaskConfig = ProductTaskConfig()


class ProductTaskset(vf.Taskset[ProductTask, ProductConfig]):
    def load(self) -> list[ProductTask]:
        return [
            ProductTask(
                ProductData(idx=n, prompt=f"Use the calculator: {n} * 12", answer=str(n * 12)), self.config.task
            )
            for n in range(45, 49)
        ]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sums_v1.py").write_text(TASKSET, encoding="utf-8")
    (tmp_path / "pair_v1.py").write_text(TWO_SEATS, encoding="utf-8")
    (tmp_path / "talk_v1.py").write_text(TALK, encoding="utf-8")
    servers = tmp_path / "product_v1" / "servers"  # as `vf-init product-v1 -T` lays it out
    servers.mkdir(parents=True)
    (servers / "__init__.py").touch()
    (servers / "tool.py").write_text(TOOL, encoding="utf-8")
    (servers.parent / "taskset.py").write_text(WITH_TOOL, encoding="utf-8")
    exports = 'from product_v1.taskset import ProductTaskset\n\n__all__ = ["ProductTaskset"]\n'
    (servers.parent / "__init__.py").write_text(exports, encoding="utf-8")
    return tmp_path


def test_its_tasks_are_the_cases(folder):
    args = {"taskset": "sums-v1", "eval_config": {"taskset": {"first": 50, "num_tasks": 2}}}
    agent = load_agent(EnvConfig(agent=AGENT, args=args), folder=folder)
    cases, held_out = agent.cases(), agent.cases(held_out=True)
    assert cases is not None and [case.columns["answer"] for case in cases] == ["5", "6", "7", "8", "9"]
    assert held_out is not None and [case.columns["prompt"] for case in held_out] == [
        "What is 50 + 4?",
        "What is 51 + 4?",
    ]


@pytest.mark.parametrize(
    "args",
    [
        {"taskset": "no-such-v1"},
        {"taskset": "sums-v1", "config": {"taskset": {"nunber": 3}}},
        {"taskset": "pair-v1"},
    ],
)
def test_refusals(folder, args):
    with raises(ConfigError):
        load_agent(EnvConfig(agent=AGENT, args=args), folder=folder)


def played(folder: Path, taskset: str, config: dict[str, Any], *, max_tokens: int = 12) -> tuple[list[Any], list[Any]]:
    """Two steps: the lines of metrics, and the rollouts, of which every sampled token is trained in one segment."""
    settings = {
        "name": "vf4",
        "model": "starter",
        "dtype": "float32",
        "device": "cpu",
        "folder": str(folder),
        "run_dir": str(folder / "run"),
        "env": {"agent": AGENT, "args": {"taskset": taskset, "config": config}, "concurrency": 4, "timeout_s": 600},
        "rollout": {"prompts_per_step": 2, "group_size": 3, "max_tokens": max_tokens, "refill": 1.0},
        "train": {"steps": 2, "learning_rate": 1.0e-3},
    }
    result = run_loop(parse_config(settings))
    rows = [row for row in read_metrics(result.run_dir / "metrics.jsonl") if "reward/mean" in row]
    assert len(rows) == 2 and all(row["env/failed_frac"] == 0 and row["env/forks"] == 0 for row in rows)
    lines = [line for path in (result.run_dir / "rollouts").iterdir() for line in path.read_text().splitlines()]
    rollouts = [each for line in lines for each in group_from_json(json.loads(line)).rollouts]
    for rollout in rollouts:
        said = "".join(turn.completion.text for turn in rollout.turns)
        assert rollout.error is None and rollout.reward is not None
        [segment] = segments_of(rollout.turns)
        sampled = tuple(id for turn in rollout.turns for id in turn.completion.token_ids)
        trained = tuple(id for id, mask in zip(segment.completion_ids, segment.mask, strict=True) if mask)
        assert trained == sampled and (said == "" or sampled)
    return rows, rollouts


@pytest.mark.parametrize("harness", ["null", "bash"])
def test_two_steps_with_the_starter(folder, harness):
    played(folder, "sums-v1", {"taskset": {"num_tasks": 4}, "agent": {"harness": {"id": harness}}})


def test_two_steps_of_an_environment_of_several_turns(folder):
    """Its own `Env.run` holds the conversation, of three turns, each of which goes on from the last one's tokens."""
    rows, rollouts = played(folder, "talk-v1", {})
    assert [row["env/exchanges"] for row in rows] == [row["rollout/turns_mean"] for row in rows] == [3.0, 3.0]
    assert [len(rollout.turns) for rollout in rollouts] == [3] * 12
    for rollout in rollouts:
        heard = [message["content"] for message in rollout.messages if message["role"] == "user"]
        assert heard == ["Sure?", "And again?"]


def test_two_steps_of_a_taskset_with_a_tool(folder):
    """A toolset of the task's, an MCP server that the harness starts: its calls are answered, and train."""
    rows, rollouts = played(folder, "product-v1", {}, max_tokens=40)
    results = [message["content"] for each in rollouts for message in each.messages if message["role"] == "tool"]
    assert any(str(n * 12) in str(result) for result in results for n in range(45, 49)), results
    assert all(row["rollout/turns_mean"] > 1.0 for row in rows)
    assert max(row["reward/mean"] for row in rows) > 0


def test_a_file_of_prime_rl_trains(folder, monkeypatch):
    """As of mid 2026: taskset and harness beside the source's name, and the runtime inside the harness."""
    played = 'harness = { id = "null", runtime = { type = "subprocess" } }'
    (folder / "rl.toml").write_text(
        'max_steps = 2\n[model]\nname = "starter"\n[trainer.optim]\nlr = 1e-4\n[trainer.model.lora]\nrank = 4\n'
        "[orchestrator]\nbatch_size = 8\ngroup_size = 4\n[orchestrator.train.sampling]\nmax_completion_tokens = 8\n"
        f'[[orchestrator.train.env]]\nname = "sums"\ntaskset = {{ id = "sums-v1", num_tasks = 4 }}\n{played}\n'
        "[orchestrator.eval]\nnum_examples = 2\n"
        f'[[orchestrator.eval.env]]\ntaskset = {{ id = "sums-v1", num_tasks = 4, first = 50 }}\n{played}\n'
    )
    monkeypatch.chdir(folder)
    result = run_loop(load_config(folder / "rl.toml", ["run_dir=out"]))
    metrics = read_metrics(folder / "out" / "metrics.jsonl")
    assert result.steps == 2
    assert [each["rollout/count"] for each in metrics if "rollout/count" in each] == [8, 8]
    assert [each["step"] for each in metrics if "eval/sampled/reward" in each] == [0, 2]
