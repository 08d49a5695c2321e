"""Rewards that hang, crash, fork, print a gigabyte or return nonsense: the run goes on, and says what happened."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
COMMON = """
name: unruly
folder: {folder}
data: {{source: "groupwise.tasks.starter.tasks:prompts", args: {{skill: [add], style: bare, n: 64}}}}
rewards: ["unruly_run:{function}"]
scoring: {{workers: 2, timeout_s: {timeout}}}
rollout: {{prompts_per_step: 16, group_size: 4, max_tokens: 8, refill: 1.0}}
train: {{steps: 3, lora: {{rank: 4}}}}
run_dir: {run_dir}
"""


def started(tmp_path: Path, **values) -> subprocess.CompletedProcess[str]:
    config = tmp_path / "config.yaml"
    config.write_text(COMMON.format(folder=HERE, run_dir=tmp_path / "run", **values))
    command = [sys.executable, "-m", "groupwise", "run", str(config)]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)


def test_the_run_goes_on(tmp_path: Path) -> None:
    done = started(tmp_path, function="now_and_then", timeout=1.0)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    kinds = {key.rsplit("/", 1)[1] for line in lines for key in line if key.startswith("reward/now_and_then/failed/")}
    assert {"timeout", "crash", "exception"} <= kinds and len(kinds) >= 4
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["rollout/groups_trained"] >= 3 for line in lines)
    processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in processes and "unruly_run" not in processes


def test_when_all_fail_it_stops_within_a_minute_with_the_cause(tmp_path: Path) -> None:
    began = time.monotonic()
    done = started(tmp_path, function="always_hangs", timeout=5.0)
    assert done.returncode == 1
    assert (
        "no reward for any of" in done.stderr
        and "always_hangs" in done.stderr
        and "did not answer within 20 s" in done.stderr
    )
    assert time.monotonic() - began < 90  # with starting and loading
