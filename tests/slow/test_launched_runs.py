"""`groupwise launch` with real torchrun: two processes make the run of one, and a run goes on with another number."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from processes import becomes, descendants
from running_jobs import metrics_of

pytestmark = pytest.mark.slow

STEPS = 6
CONFIG = f"""
name: launched
data: {{source: "groupwise.tasks.starter.tasks:prompts", args: {{skill: [add], style: bare, n: 256}}}}
eval:
  data: {{source: "groupwise.tasks.starter.tasks:prompts", args: {{skill: [add], style: bare, n: 8, split: test}}}}
rewards: ["groupwise.rewards.text:exact_match"]
rollout: {{prompts_per_step: 8, group_size: 4, max_tokens: 8, refill: 1.0}}
algo: {{kl: k3, kl_coeff: 0.01}}
train: {{steps: {STEPS}, learning_rate: 1.0e-3, lora: {{rank: 4}}, deadline_s: 20}}
checkpoint: {{every: 1}}
resume: auto
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("launched")
    (folder / "config.yaml").write_text(CONFIG)
    return folder


def begin(place: Path, name: str, *overrides: str) -> subprocess.Popen[str]:
    several = any(word.startswith("train.devices") for word in overrides)
    words = [sys.executable, "-m", "groupwise", "launch" if several else "run", "config.yaml", f"run_dir={name}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*words, *overrides], cwd=place, text=True, **pipes)


def done(process: subprocess.Popen[str]) -> str:
    """What it printed, once it has finished well."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-3000:]
    return out


def adapter(run_dir: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "adapters" / "launched" / f"v{step:06d}" / "adapter_model.safetensors")


def newest(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(max(run_dir.glob("adapters/launched/v*")) / "adapter_model.safetensors")


def assert_near(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """In float32 Adam's first steps turn the sign of a rounding error into whole steps where a gradient is nothing."""
    assert ours.keys() == theirs.keys()
    near = torch.cat([((ours[key] - theirs[key]).abs() < 1e-4).flatten() for key in ours])
    assert near.float().mean() > 0.999


@pytest.fixture(scope="module")
def alone(place: Path) -> Path:
    done(begin(place, "alone"))
    return place / "alone"


def test_stages_are_run_one_after_another_in_the_same_processes(place: Path) -> None:
    """And again, where all of them are finished."""
    stages = "stages=[{name: shown, kind: sft, train: {steps: 2}}, {name: again, kind: sft, train: {steps: 1}}]"
    done(begin(place, "staged alone", stages))
    for _ in range(2):
        done(begin(place, "staged", stages, "train.devices=2"))
    for stage in ("shown", "again"):
        assert_near(*(newest(place / run / "stages" / stage) for run in ("staged", "staged alone")))
    assert newest(place / "staged").keys() == newest(place / "staged alone").keys()


@pytest.mark.parametrize(
    ("devices", "how"), [(2, "parallel=ddp"), (2, "parallel=fsdp"), (3, "context_parallel_size=3")]
)
def test_several_processes_make_the_run_of_one(place: Path, alone: Path, devices: int, how: str) -> None:
    """The starter has three query heads."""
    out = done(begin(place, how, f"train.devices={devices}", f"train.{how}"))
    assert out.count("Next:") == 1  # rank 0 alone speaks
    assert_near(adapter(place / how), adapter(alone))
    for mine, theirs in zip(metrics_of(place / how), metrics_of(alone), strict=True):
        assert mine.keys() == theirs.keys()
        for key in theirs.keys() & {"reward/mean", "loss/policy", "kl/mean", "optim/grad_norm"}:
            assert mine[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-5), key


def worker(torchrun: subprocess.Popen[str], rank: int) -> int:
    """The process of this rank."""
    for pid in descendants(torchrun.pid):
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"RANK={rank}".encode() in environment and b"groupwise" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise AssertionError(f"there is no rank {rank}")


def steps(run_dir: Path) -> int:
    return len(list((run_dir / "rollouts").glob("step_*.jsonl")))


def test_a_killed_rank_is_named_and_the_run_goes_on_with_one_and_with_two(place: Path, alone: Path) -> None:
    run_dir = place / "moved"
    process = begin(place, "moved", "train.devices=2")
    assert becomes(lambda: steps(run_dir) >= 2, within_s=120)
    os.kill(worker(process, 1), signal.SIGKILL)
    killed = time.monotonic()
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0 and time.monotonic() - killed < 60
    assert "rank 0 of 2 waited for" in err and "the run goes on from its last checkpoint" in err, err[-3000:]

    process = begin(place, "moved")
    had = steps(run_dir)
    assert becomes(lambda: steps(run_dir) > had, within_s=120)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 130
    assert had < steps(run_dir) < STEPS

    done(begin(place, "moved", "train.devices=2", "train.parallel=fsdp"))
    assert_near(adapter(run_dir), adapter(alone))


def test_ctrl_c_at_torchrun_is_a_clean_stop(place: Path) -> None:
    run_dir = place / "stopped"
    process = begin(place, "stopped", "train.devices=2")
    assert becomes(lambda: steps(run_dir) >= 1, within_s=120)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert "stopping after this step" in err
    at = steps(run_dir)
    assert (run_dir / "checkpoints" / f"step-{at:06d}" / "run.json").exists()
    done(begin(place, "stopped"))
    assert steps(run_dir) == STEPS
