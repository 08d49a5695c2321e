"""SIGKILL at twenty random moments of a run that goes on each time: nothing differs, is lost or is done twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from running_jobs import adapter_bytes, metrics_of, rollouts_of, sidecars_of

pytestmark = pytest.mark.slow

KILLS = 20
CONFIG = """
name: killed
data: {{source: "groupwise.tasks.starter.tasks:prompts", args: {{skill: [add], style: bare, n: 1024}}}}
eval:
  data: {{source: "groupwise.tasks.starter.tasks:prompts", args: {{skill: [add], style: bare, n: 8, split: test}}}}
  every: 4
rewards: ["groupwise.rewards.text:exact_match"]
rollout: {{prompts_per_step: 8, group_size: 4, max_tokens: 8, refill: 1.0{mode}}}
train: {{steps: {steps}, learning_rate: 1.0e-3, lora: {{rank: 4}}}}
checkpoint: {{every: 3}}
adapters: {{keep: 1000}}
output_dir: {folder}
resume: auto
"""


def command(config: Path) -> list[str]:
    return [sys.executable, "-m", "groupwise", "run", str(config)]


def killed_and_finished(tmp_path: Path, *, mode: str, steps: int) -> tuple[Path, int]:
    """A run that is killed again and again, then left to finish; its directory, and how often it was killed at work."""
    config, chance, kills = tmp_path / "config.yaml", random.Random(0), 0
    config.write_text(CONFIG.format(folder=tmp_path / "runs", mode=mode, steps=steps))
    while kills < KILLS:
        process = subprocess.Popen(command(config), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        metrics = tmp_path / "runs"
        before = work(metrics)
        while process.poll() is None and work(metrics) <= before:  # until it has written something
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 1.0))
        if process.poll() is not None:
            break  # it finished first
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        kills += 1
    done = subprocess.run(command(config), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return next((tmp_path / "runs").iterdir()), kills


def work(runs: Path) -> int:
    """Bytes of rollouts written by any run here: it grows with every step."""
    return sum(path.stat().st_size for path in runs.glob("*/metrics.jsonl"))


def test_on_policy_it_is_bit_identical(tmp_path: Path) -> None:
    steps = 100
    config = tmp_path / "whole.yaml"
    config.write_text(CONFIG.format(folder=tmp_path / "whole", mode="", steps=steps))
    subprocess.run(command(config), check=True, capture_output=True)
    whole = next((tmp_path / "whole").iterdir())
    run_dir, kills = killed_and_finished(tmp_path, mode="", steps=steps)
    assert kills == KILLS
    assert metrics_of(run_dir) == metrics_of(whole)
    assert rollouts_of(run_dir) == rollouts_of(whole)
    assert adapter_bytes(run_dir) == adapter_bytes(whole)
    assert sidecars_of(run_dir) == sidecars_of(whole)


IN_FLIGHT = ", max_staleness: 2, in_flight_updates: true"


@pytest.mark.parametrize("mode", [", max_staleness: 2", ", weight_sync_interval: 4", IN_FLIGHT])
def test_overlapped_every_prompt_is_trained_exactly_once(tmp_path: Path, mode: str) -> None:
    """100 steps of 8 are less than an epoch of 1024 prompts: each is drawn once, none is left out."""
    run_dir, kills = killed_and_finished(tmp_path, mode=mode, steps=100)
    assert kills == KILLS
    drawn = Counter(group["prompt"]["id"] for group in rollouts_of(run_dir))
    assert max(drawn.values()) == 1 and len(drawn) == 800
