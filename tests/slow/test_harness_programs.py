"""Programs that others wrote, unchanged, as the harness of runs: the recipes of docs/environments.md.

python -m venv /tmp/mini; /tmp/mini/bin/pip install mini-swe-agent mcp
python -m venv /tmp/agents; /tmp/agents/bin/pip install openai-agents
python -m venv /tmp/smol; /tmp/smol/bin/pip install smolagents openai
python -m venv /tmp/claude; /tmp/claude/bin/pip install claude-agent-sdk
export PATH=$PATH:/tmp/mini/bin AGENTS=/tmp/agents SMOL=/tmp/smol CLAUDE=/tmp/claude
pytest -m slow tests/slow/test_harness_programs.py     three minutes
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from groupwise.config.run import STARTER_DIR
from groupwise.rewards.sandbox import isolation
from groupwise.run.config_file import load_config
from groupwise.run.loop import run_loop
from groupwise.store.tracking import read_metrics
from running_jobs import groups_of

MINI, AGENTS = shutil.which("mini"), os.environ.get("AGENTS")
SMOL, CLAUDE = os.environ.get("SMOL"), os.environ.get("CLAUDE")
PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
ROW = {
    "issue": "add gives the wrong sum.",
    "files": {"totals.py": "def add(a, b):\n    return a - b\n"},
    "tests": {
        "test_totals.py": "import totals, unittest\nclass T(unittest.TestCase):\n"
        "    def test_add(self):\n        self.assertEqual(totals.add(1, 2), 3)\n"
    },
}
REWARDS = '''
import json, pathlib


def answered(completions, workspace):
    """Thousands of tokens that the program itself counted in its answers."""
    return [tokens(json.loads(pathlib.Path(each, "trajectory.json").read_text())) / 1000 for each in workspace]


def tokens(trajectory):
    answers = [message.get("extra", {}).get("response") for message in trajectory["messages"]]
    return sum(each["usage"]["completion_tokens"] for each in answers if each)
'''
# The starter reads 1024 tokens.
SHORT = """--config=agent.step_limit=3
      - --config=agent.instance_template={{ task }}
      - --config=model.format_error_template=No.
      - --config=model.model_kwargs.tool_choice=required"""
OVERRIDES = [
    "model=starter",
    "device=cpu",
    "dtype=float32",
    "env.max_turns=3",
    "env.timeout_s=240",
    "rewards=[my_rewards:answered]",
    "rollout.prompts_per_step=1",
    "rollout.group_size=2",
    "rollout.max_tokens=64",
    "train.steps=2",
]
pytestmark = [pytest.mark.slow]


def written(name: str) -> str:
    """A file of the page."""
    (block,) = re.findall(rf"^```\w+\n(# {name}\n.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return block


@pytest.mark.skipif(MINI is None, reason="pip install mini-swe-agent mcp, in an environment whose bin is in PATH")
@pytest.mark.parametrize("isolated", [True, False])
def test_mini_swe_agent_is_trained_on_what_it_was_answered(tmp_path: Path, isolated: bool) -> None:
    if isolated and not isolation().namespaces:
        pytest.skip("this machine allows no namespaces (groupwise doctor)")
    recipe = written("mini_swe.yaml").replace("/opt/mini", str(Path(MINI or "").parent.parent))
    (tmp_path / "run.yaml").write_text(recipe.replace("--config=agent.step_limit=16", SHORT))
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    (tmp_path / "issues.jsonl").write_text(json.dumps(ROW) + "\n")
    plain = [] if isolated else ["env.harness.isolated=false", "env.harness.show=[]"]
    overrides = [f"run_dir={tmp_path / 'run'}", *OVERRIDES, *plain]
    result = run_loop(load_config(tmp_path / "run.yaml", overrides))
    rows = [row for row in read_metrics(result.run_dir / "metrics.jsonl") if "train/tokens" in row]
    groups = groups_of(result.run_dir)
    assert len(groups) == len(rows) == 2
    for group, row in zip(groups, rows, strict=True):
        for rollout in group.rollouts:
            assert rollout.error is None and rollout.stop == "done" and len(rollout.turns) == 3, rollout.columns
            answered = rollout.rewards["answered"]
            assert answered is not None and rollout.rewards["env"] == 0.0
            assert round(1000 * answered) == sum(len(turn.completion.token_ids) for turn in rollout.turns)
            assert rollout.columns["exit_status"] == 0 and rollout.info["tool_calls"]
        said = [len(turn.completion.token_ids) for rollout in group.rollouts for turn in rollout.turns]
        learned = len({rollout.reward for rollout in group.rollouts}) > 1
        assert row["rollout/tokens"] == sum(said) and row["train/tokens"] == sum(said) * learned
        assert ROW["issue"] in str(group.prompt.messages) and "bash" in str(group.prompt.tools)
    assert any(row["train/tokens"] and row["optim/grad_norm"] > 0 for row in rows)


@pytest.mark.skipif(AGENTS is None, reason="pip install openai-agents, in an environment that $AGENTS names")
def test_openai_agents_are_trained_on_what_they_were_answered(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(written("solver.yaml").replace("/opt/agents", str(AGENTS)))
    (tmp_path / "solver.py").write_text(written("solver.py"))
    rows = [{"question": f"Use the calculator: {a} * 12", "answer": str(12 * a)} for a in (47, 31)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kept = [each for each in OVERRIDES if not each.startswith(("rewards", "env.max_turns"))]
    overrides = [f"run_dir={tmp_path / 'run'}", *kept, "rollout.group_size=4", "rollout.prompts_per_step=2"]
    result = run_loop(load_config(tmp_path / "run.yaml", overrides))
    rollouts = [rollout for group in groups_of(result.run_dir) for rollout in group.rollouts]
    ended = [rollout for rollout in rollouts if rollout.columns["exit_status"] == 0]
    assert len([*(result.run_dir / "rollouts").glob("*.jsonl")]) == 2 and len(ended) > len(rollouts) / 2
    for rollout in ended:
        counted = int(rollout.columns["stdout"].split()[-1])
        assert counted == sum(len(turn.completion.token_ids) for turn in rollout.turns)
    assert not any(rollout.error for rollout in rollouts)
    assert any(len(rollout.turns) == 2 and rollout.reward == 1.0 for rollout in ended)


COUNTED = """
def counted(completions, stdout):
    \"\"\"Hundreds of tokens that the program itself counted in its answers.\"\"\"
    return [int(each.split()[-1]) / 100 for each in stdout]
"""


@pytest.mark.filterwarnings("default")  # Claude Code asks to think
@pytest.mark.parametrize(("python", "program"), [(SMOL, "smol_solver.py"), (CLAUDE, "claude_solver.py")])
def test_long_prompted_agents_are_trained_on_what_they_were_answered(
    tmp_path: Path, python: str | None, program: str
) -> None:
    """Programs whose own messages are longer than the starter's context: it is given positions that it never saw."""
    if python is None:
        pytest.skip(f"install what {program} needs in an environment that $SMOL or $CLAUDE names")
    shutil.copytree(STARTER_DIR, tmp_path / "long")
    for name, key in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        file = tmp_path / "long" / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {key: 32768}))
    recipe = written("claude.yaml").replace("/opt/claude", python).replace("claude_solver.py", program)
    (tmp_path / "run.yaml").write_text(recipe)
    (tmp_path / program).write_text(written(program))
    (tmp_path / "my_rewards.py").write_text(COUNTED)
    (tmp_path / "questions.jsonl").write_text(json.dumps({"question": "Use the calculator: 47 * 12"}) + "\n")
    kept = [each for each in OVERRIDES if not each.startswith(("rewards", "model", "env.max_turns", "train"))]
    overrides = [f"run_dir={tmp_path / 'run'}", f"model={tmp_path / 'long'}", "rewards=[my_rewards:counted]", *kept]
    result = run_loop(load_config(tmp_path / "run.yaml", [*overrides, "train.steps=1"]))
    groups = groups_of(result.run_dir)  # also those without signal, which were replaced
    (row,) = [row for row in read_metrics(result.run_dir / "metrics.jsonl") if "train/tokens" in row]
    learned = 0
    for rollout in (each for group in groups for each in group.rollouts):
        assert rollout.error is None and rollout.columns["exit_status"] == 0, rollout.columns
        said = sum(len(turn.completion.token_ids) for turn in rollout.turns)
        assert rollout.rewards["counted"] == said / 100
        learned += said * bool(rollout.advantage)
    assert row["train/tokens"] == learned > 0
