"""Whole runs from YAML whose episodes are played by programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from groupwise.errors import ConfigError, RewardError
from groupwise.run.config_file import load_config
from groupwise.run.loop import run_loop
from groupwise.run.plan import make_plan
from groupwise.store.tracking import read_metrics, read_rollouts
from wording import raises

AGENT = """
import json, os, sys, urllib.request

messages = [{"role": "user", "content": sys.argv[1]}]
body = json.dumps({"messages": messages, "model": os.environ["OPENAI_MODEL"]}).encode()
head = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, head)
with open("answer.txt", "w") as file:
    file.write(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""
REWARDS = """
import pathlib


def digits(completions, workspace, exit_status, answer):
    \"\"\"The workspace is there while it is scored.\"\"\"
    texts = [pathlib.Path(each, "answer.txt").read_text() for each in workspace]
    assert set(exit_status) == {0} and len(texts) == len(completions)
    return [0.1 * sum(letter.isdigit() for letter in text) + (text == answer[0]) for text in texts]
"""
RUN = """
name: harness
model: starter
device: cpu
dtype: float32
env:
  harness:
    command: [python, "{folder}/agent.py", "{question}"]
    score: {command: [grep, -q, "[0-9]", answer.txt]}
data: {source: rows.jsonl, shuffle: false}
eval: {data: {source: rows.jsonl, limit: 1}, every: 0, modes: [greedy]}
rewards: [my_rewards:digits]
rollout: {prompts_per_step: 2, group_size: 3, max_tokens: 8}
train: {steps: 1}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    (tmp_path / "run.yaml").write_text(RUN)
    rows = [{"question": f"What is {n} + 13?", "answer": str(n + 13)} for n in (40, 41)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


@pytest.mark.slow
def test_a_run_trains_on_what_programs_did(project: Path) -> None:
    result = run_loop(load_config(project / "run.yaml", [f"run_dir={project / 'run'}"]))
    row = next(each for each in read_metrics(result.run_dir / "metrics.jsonl") if "reward/mean" in each)
    assert row["env/failed_frac"] == row["env/program_failed"] == 0 and row["env/program_s"] > 0
    assert row["env/stop/done"] == 1 and row["optim/grad_norm"] > 0
    (file,) = (result.run_dir / "rollouts").glob("*.jsonl")
    kept = [rollout for group in read_rollouts(file) for rollout in group.rollouts]
    assert kept and all(rollout.columns["exit_status"] == 0 for rollout in kept)
    assert not any(Path(rollout.columns["workspace"]).exists() for rollout in kept)
    for rollout in kept:
        own, digits = rollout.rewards["env"], rollout.rewards["digits"]
        assert own is not None and digits is not None and rollout.reward == pytest.approx(own + digits)


def test_a_row_that_lacks_a_column_is_found_before_the_model_is_loaded(project: Path) -> None:
    (project / "rows.jsonl").write_text('{"question": "?", "answer": "1"}\n{"answer": "2"}\n')
    with raises(ConfigError, field="env.harness.command (row rows.jsonl:2)"):
        make_plan(load_config(project / "run.yaml"))


def test_a_program_that_always_fails_is_named_and_no_reward_function_is_blamed(project: Path) -> None:
    (project / "agent.py").write_text("raise SystemExit('no such option: -x')")
    with raises(RewardError) as found:
        run_loop(load_config(project / "run.yaml", [f"run_dir={project / 'run'}", "train.steps=8"]))
    assert "reward function" not in str(found.value.hint)
