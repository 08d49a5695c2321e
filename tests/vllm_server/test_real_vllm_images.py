"""A model that sees with vLLM as the sampler: short runs on prompts with images, tiny random weights, in float32.

    pytest -m slow tests/vllm_server/test_real_vllm_images.py      a minute for each on a quiet machine

It is an Idefics3: vLLM 0.32 imports every other family that sees here with torchvision alone, and beside its CPU build
(`make vllm` installs it) there is none that could be loaded. docs/images.md has what was found.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_real_vllm import CLOSE, ENVIRONMENT, PYTHON, pytestmark  # noqa: F401  (what it needs, this needs)

from seeing_models import drawn, save_seeing

HEAD = 32  # features, which vLLM's attention on CPUs needs
SIZES = {"hidden_size": 4 * HEAD, "head_dim": HEAD}
REWARD = """
def seen(completions, image, **columns):
    return [len(said[-1]["content"]) % 7 / 7 for said in completions]
"""
RUNS = {
    "adapter": ["train.learning_rate=0.01"],
    "all": ["train.lora=null", "train.parameters=all", "train.learning_rate=0.001"],
    "merged": ["vllm.push=merged", "train.lora.targets=[vision, all-linear]", "train.learning_rate=0.01"],
}


@pytest.mark.parametrize("what", RUNS)
def test_what_vllm_samples_after_an_image_is_the_trainers(tmp_path: Path, what: str) -> None:
    """Of each version, whatever it changes."""
    save_seeing("idefics3", tmp_path / "model", text=SIZES)
    for i in range(3):
        drawn(84, 56, seed=i).save(tmp_path / f"{i}.png")
    rows = [{"prompt": "How many?", "image": f"{i % 3}.png"} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "rewards_that_see.py").write_text(REWARD)
    settings = {
        "model": str(tmp_path / "model"),
        "dtype": "float32",
        "device": "cpu",
        "data": {"source": "rows.jsonl"},
        "rewards": ["rewards_that_see:seen"],
        "rollout": {"prompts_per_step": 3, "group_size": 4, "max_tokens": 8, "max_staleness": 0},
        "train": {"steps": 3, "warmup_steps": 1},
        "engine": "vllm",
        "vllm": {"python": str(PYTHON), "environment": ENVIRONMENT, "start_timeout_s": 600},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    words = [sys.executable, "-m", "groupwise", "run", "run.yaml", "run_dir=run", *RUNS[what]]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    gaps = [each["mismatch/logprob_diff_max"] for each in steps if "mismatch/logprob_diff_max" in each]
    print(what, "largest mismatch", max(gaps))
    assert len(gaps) == 3 and max(gaps) < CLOSE
