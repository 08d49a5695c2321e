"""docs/extending.md: its three packages, as pip leaves them where they are installed."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from forked import ONE_SERVER, ran

pytestmark = ONE_SERVER

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples" / "extensions"
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")


def install(name: str, site: Path) -> None:
    """Copy a package's files, and what pip writes of its entry points, into a folder of the import path."""
    project = tomllib.loads((EXAMPLES / name / "pyproject.toml").read_text())
    for file in project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]:
        shutil.copy(EXAMPLES / name / file, site / file)
    info = site / f"{project['project']['name'].replace('-', '_')}-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['project']['name']}\nVersion: 0.1.0\n")
    points = "".join(
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
        for group, entries in project["project"]["entry-points"].items()
    )
    (info / "entry_points.txt").write_text(points)


@pytest.fixture
def groupwise(tmp_path: Path):
    """`groupwise(name, *words)`: a command, with the example installed."""
    site = tmp_path / "site"
    site.mkdir()

    def run(name: str, *words: str) -> CompletedProcess[str]:
        if not any(site.glob("*.dist-info")):
            install(name, site)
        return ran("groupwise", *words, folder=tmp_path, environment={"PYTHONPATH": str(site)})

    return run


def metrics(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_the_page_shows_the_packages() -> None:
    files = [file for file in EXAMPLES.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert len(files) == 7
    for file in files:
        assert file.read_text() in PAGE, file


RUN = (
    "data: {source: prompts.jsonl}\nrewards: [groupwise.rewards.math:number_match]\nrun_dir: out\n"
    "rollout: {prompts_per_step: 4, group_size: 8, max_tokens: 6}\ntrain: {steps: 2, lora: {rank: 4}}\n"
    "scoring: {workers: 0}\n"
)


def test_an_algorithm(groupwise, tmp_path: Path) -> None:
    """A run of two steps learns from its advantages: those of the groups are (r - mean) / mean."""
    rows = [{"prompt": f"What is {i} + {i + 1}?", "answer": str(2 * i + 1)} for i in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.yaml").write_text(RUN)
    done = groupwise("maxrl", "run", "run.yaml", "algo.algorithm=forking-maxrl")
    assert done.returncode == 0, done.stdout + done.stderr
    groups: dict[tuple[int, int], list[tuple[float, float]]] = {}
    lines = [json.loads(line) for path in (tmp_path / "out" / "rollouts").glob("*.jsonl") for line in path.open()]
    for number, line in enumerate(lines):
        for rollout in line["rollouts"]:
            groups.setdefault((number, 0), []).append((rollout["reward"], rollout["advantage"]))
    assert any(len({reward for reward, _ in pairs}) > 1 for pairs in groups.values())
    for pairs in groups.values():
        mean = sum(reward for reward, _ in pairs) / len(pairs)
        for reward, advantage in pairs if len({reward for reward, _ in pairs}) > 1 else ():
            assert advantage == pytest.approx((reward - mean) / mean if mean else 0.0)


def test_an_algorithm_that_is_not_installed(groupwise, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "What is 2 + 3?", "answer": "5"}\n')
    (tmp_path / "run.yaml").write_text(RUN)
    refused = groupwise("maxrl", "run", "run.yaml", "algo.algorithm=maxrll")
    assert refused.returncode == 2 and "forking-maxrl, maxrl" in refused.stdout + refused.stderr


def test_a_kind_of_environment(groupwise, tmp_path: Path) -> None:
    (tmp_path / "my_envs.py").write_text(
        "class Lamp:\n    num_cases = 3\n\n    def reset(self, *, seed=None, options=None):\n"
        "        return f'Lamp {seed} is off. Say on.', {}\n\n    def step(self, action):\n"
        "        return 'done', float(len(action) % 2), True, False, {}\n"
    )
    (tmp_path / "run.yaml").write_text(
        'env: {environment: "my_envs:Lamp"}\nrun_dir: out\neval: {limit: 2}\n'
        "rollout: {prompts_per_step: 3, group_size: 4, max_tokens: 4}\ntrain: {steps: 1, lora: {rank: 4}}\n"
    )
    done = groupwise("gym_env", "run", "run.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert any(line.get("env/failed_frac") == 0 and line["env/stop/done"] > 0 for line in metrics(tmp_path / "out"))
    checked = groupwise("gym_env", "env", "check", "my_envs:Lamp", "--no-model")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_format_of_configurations(groupwise, tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text("def compute_score(completions, **columns):\n    return [0.0, 1.0] * 4\n")
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "verl.yaml").write_text(
        "data: {train_files: p.jsonl, train_batch_size: 1, max_response_length: 4}\n"
        "actor_rollout_ref: {model: {path: starter}, rollout: {n: 8}}\n"
        "custom_reward_function: {path: my_rewards.py}\nalgorithm: {adv_estimator: rloo}\n"
        "trainer: {total_training_steps: 1, nnodes: 1}\n"
    )
    done = groupwise("verl_format", "import", "verl.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verl" in done.stdout.splitlines()[0]
    assert "group_size: 8" in done.stdout and "advantage: leave_one_out" in done.stdout
    wrong = groupwise("verl_format", "check", "verl.yaml", "actor_rollout_ref.rollout.nn=3")
    assert wrong.returncode == 2 and "actor_rollout_ref.rollout.n" in wrong.stdout + wrong.stderr
