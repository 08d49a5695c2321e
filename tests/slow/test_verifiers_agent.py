"""Environments written against the documentation of `verifiers` train here unchanged: a ToolEnv and a MultiTurnEnv.

The package pins an older `datasets` or `mcp`, so it has a virtual environment of its own: install this package and
`verifiers>=0.1.14,<0.4` into one, and run `pytest tests/slow/test_verifiers_agent.py -m slow` with its Python.
"""

from __future__ import annotations

import json
import math
import signal
from importlib.metadata import version
from pathlib import Path

import pytest

from wording import raises

pytest.importorskip("verifiers")
if tuple(map(int, version("verifiers").split(".")[:2])) >= (0, 4):
    pytest.skip("verifiers from 0.4 on has other environments", allow_module_level=True)

from groupwise.algo.samples import segments_of
from groupwise.config.run import EnvConfig, parse_config
from groupwise.errors import ConfigError
from groupwise.run.loop import run_loop
from groupwise.store.rollouts import group_from_json
from groupwise.store.tracking import read_metrics
from groupwise.tasks.agents import load_agent

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

ENVIRONMENTS = '''
import re
import verifiers as vf
from datasets import Dataset


def rows(n):
    return [{"question": f"Use the calculator: {a} * {a + 3}", "answer": str(a * (a + 3))} for a in range(11, 11 + n)]


async def calculator(expression: str) -> str:
    """Evaluate a product.

    Args:
        expression: as in "47*12".
    """
    a, b = re.fullmatch(r"(\\d+)\\*(\\d+)", expression).groups()
    return str(int(a) * int(b))


def load_environment(n: int = 8, **kwargs) -> vf.Environment:
    async def correct(completion, answer) -> float:
        return 1.0 if answer in (completion[-1].content or "") else 0.0

    async def brief(completion) -> float:
        return 1.0 / len(completion)

    rubric = vf.Rubric(funcs=[correct, brief], weights=[1.0, 0.1])
    return vf.ToolEnv(tools=[calculator], max_turns=4, dataset=Dataset.from_list(rows(n)),
                      eval_dataset=Dataset.from_list(rows(2)), rubric=rubric, **kwargs)


class TwiceEnv(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [vf.UserMessage(content="Are you sure?")]

    @vf.stop
    async def asked_twice(self, state) -> bool:
        return len(state["trajectory"]) >= 2


def load_twice():
    async def length(completion) -> float:
        return float(len(completion[-1].content or "") % 3)

    return TwiceEnv(dataset=Dataset.from_list([{"question": "What is 3 + 4?", "answer": "7"}] * 4),
                    rubric=vf.Rubric(funcs=[length]))


def load_failing():
    class Failing(TwiceEnv):
        async def env_response(self, messages, state, **kwargs):
            raise vf.ToolError("the tool is broken")

    return Failing(dataset=Dataset.from_list([{"question": "1 + 1", "answer": "2"}]), rubric=vf.Rubric(funcs=[]))


def load_group():
    async def best(completions) -> list[float]:
        return [1.0 for _ in completions]

    rows = Dataset.from_list([{"question": "1", "answer": "2"}])
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[best]))
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "vf_environments.py").write_text(ENVIRONMENTS, encoding="utf-8")
    return tmp_path


def settings(folder: Path, environment: str, **env) -> dict:
    args = {"environment": f"vf_environments:{environment}", **env.pop("args", {})}
    return {
        "name": "vf",
        "model": "starter",
        "dtype": "float32",
        "device": "cpu",
        "folder": str(folder),
        "output_dir": str(folder / "runs"),
        "env": {"agent": "groupwise.bridges.verifiers.before_0_4:VerifiersAgent", "args": args, **env},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_tokens": 48},
        "train": {"steps": 2, "learning_rate": 1.0e-4},
    }


@pytest.mark.parametrize("environment", ["load_environment", "load_twice"])
def test_two_steps_with_the_starter(folder, environment):
    before = signal.getsignal(signal.SIGINT)
    result = run_loop(parse_config(settings(folder, environment)))
    assert signal.getsignal(signal.SIGINT) is before
    assert result.version.number >= 1
    rows = [row for row in read_metrics(result.run_dir / "metrics.jsonl") if "reward/mean" in row]
    assert len(rows) == 2 and all(math.isfinite(row["reward/mean"]) for row in rows)
    lines = [line for path in (result.run_dir / "rollouts").iterdir() for line in path.read_text().splitlines()]
    groups = [group_from_json(json.loads(line)) for line in lines]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert all(rollout.error is None and len(segments_of(rollout.turns)) == 1 for rollout in rollouts)
    assert max(len(rollout.turns) for rollout in rollouts) >= 2
    assert all("num_turns" in rollout.info for rollout in rollouts)  # a number of the rubric's


def test_its_datasets_are_the_cases(folder):
    config = EnvConfig(
        agent="groupwise.bridges.verifiers.before_0_4:VerifiersAgent",
        args={"environment": "vf_environments:load_environment", "args": {"n": 5}},
    )
    agent = load_agent(config, folder=folder)
    cases, held_out = agent.cases(), agent.cases(held_out=True)
    assert cases is not None and held_out is not None
    assert (len(cases), len(held_out)) == (5, 2) and cases[0].columns["answer"] == "154"


def test_group_rewards_are_refused(folder):
    config = EnvConfig(
        agent="groupwise.bridges.verifiers.before_0_4:VerifiersAgent",
        args={"environment": "vf_environments:load_group"},
    )
    with raises(ConfigError):
        load_agent(config, folder=folder)
