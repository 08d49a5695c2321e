"""What `groupwise init` writes learns, as its README says: the reward of the last steps is above that of the first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean

import pytest

from groupwise.cli.init import TEMPLATES
from groupwise.store.tracking import read_metrics

pytestmark = pytest.mark.slow


def groupwise(*words: str, folder: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "groupwise", *words], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def rewards(folder: Path) -> list[float]:
    (metrics,) = folder.glob("runs/*/metrics.jsonl")
    return [line["reward/mean"] for line in read_metrics(metrics) if "reward/mean" in line]


@pytest.mark.parametrize(("template", "by"), [("arithmetic", 0.2), ("images", 0.05), ("tool-env", 0.2), ("judge", 0.2)])
def test_the_reward_rises(template, by, tmp_path):
    groupwise("init", "mine", "--from", template, folder=tmp_path)
    folder, began, judge = tmp_path / "mine", time.monotonic(), None
    if template == "judge":
        judge = subprocess.Popen([sys.executable, "my_judge.py"], cwd=folder)
    try:
        groupwise("run", "my_run.yaml", folder=folder)
    finally:
        if judge is not None:
            judge.send_signal(signal.SIGINT)
            assert judge.wait(timeout=60) == 0
    found = rewards(folder)
    print(f"{template}: {fmean(found[:3]):.3f} to {fmean(found[-5:]):.3f} in {time.monotonic() - began:.0f} s")
    assert fmean(found[-5:]) > fmean(found[:3]) + by


def test_the_live_loop_learns(tmp_path):
    groupwise("init", "mine", "--from", "live-loop", folder=tmp_path)
    assert (tmp_path / "mine" / "live_loop.py").read_bytes() == (TEMPLATES / "live-loop/live_loop.py").read_bytes()
    command = [sys.executable, "-m", "groupwise", "serve", "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path / "mine", stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        url = next(line.split()[-1] for line in server.stderr if line.startswith("ready on"))
        loop = [sys.executable, "live_loop.py", "--rounds", "8"]
        environment = {**os.environ, "GROUPWISE_URL": url}
        ran = subprocess.run(loop, cwd=tmp_path / "mine", env=environment, capture_output=True, text=True)
        server.send_signal(signal.SIGINT)
        server.communicate()
    assert ran.returncode == 0, ran.stderr
    means = [float(line.split("mean reward ")[1].split()[0]) for line in ran.stdout.splitlines() if "mean" in line]
    print(ran.stdout)
    assert fmean(means[-2:]) > fmean(means[:2]) + 0.1
