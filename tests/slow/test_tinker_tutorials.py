"""The tutorials of tinker-cookbook, unmodified, against a server of the starter.

`TINKER_TUTORIALS` names the folder `tutorials` of a checkout of tinker-cookbook (they were run at 9dfcc3a2, of August
2026, with the package 0.6.1). Install that package and marimo, matplotlib, math-verify and pylatexenc into a virtual
environment with this one, and run `pytest tests/slow/test_tinker_tutorials.py -m slow` with its Python. Where they run,
directories stand in for what they get from the hub: the starter for their models, sums for GSM8K.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("tinker_cookbook")
pytest.importorskip("marimo")

from crash.place import Place, a_place
from groupwise.config.run import STARTER_DIR

TUTORIALS = os.environ.get("TINKER_TUTORIALS")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not TUTORIALS, reason="TINKER_TUTORIALS names no folder")]

MODELS = {
    "Qwen/Qwen3.5-9B-Base": ["101_hello_tinker", "104_first_rl"],
    "Qwen/Qwen3.5-4B": [
        "103_async_patterns",
        "201_rendering",
        "202_loss_functions",
        "203_completers",
        "205_evaluations",
        "301_cookbook_abstractions",
        "302_custom_environment",
        "303_sft_with_config",
        "304_rl_with_config",
        "401_sl_hyperparams",
        "402_rl_hyperparams",
        "403_dpo_preferences",
        "404_sequence_extension",
        "405_multi_agent",
    ],
}
SAVED = Path("/tmp/tinker-tutorials")  # of 303 and 304, wherever they run: they would go on from what another run saved
STAND_INS = [*MODELS, "Qwen/Qwen3.6-35B-A3B", "moonshotai/Kimi-K2.6"]
# Where one stops, and on whose side: a second base model; the package's own refusal to download what is for sampling.
STOP = {
    "102_first_sft": "there is no base model 'moonshotai/Kimi-K2.6'",
    "204_weights": "Sampler checkpoints cannot be downloaded",
}


@pytest.fixture(scope="module", params=[*MODELS])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    settings = ("tinker=true", f"served_model_name={request.param}")
    with a_place(tmp_path_factory.mktemp("place"), settings=settings) as place:
        place.start()
        place.await_ready()
        yield place


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tutorials run, with what stands in for the hub."""
    folder = tmp_path_factory.mktemp("folder")
    shutil.rmtree(SAVED, ignore_errors=True)
    for name in STAND_INS:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(STARTER_DIR)
    rng, gsm8k = random.Random(0), folder / "openai" / "gsm8k"
    (gsm8k / "main").mkdir(parents=True)
    pairs = [(rng.randint(1, 99), rng.randint(1, 99)) for _ in range(400)]
    rows = [{"question": f"What is {a} + {b}?", "answer": f"It is #### {a + b}"} for a, b in pairs]
    for split in ("train", "test"):
        (gsm8k / "main" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = "".join(f"  - split: {split}\n    path: main/{split}.jsonl\n" for split in ("train", "test"))
    (gsm8k / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n")
    return folder


def run(place: Place, folder: Path, tutorial: str) -> subprocess.CompletedProcess[str]:
    env = {"TINKER_BASE_URL": place.url, "TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0"}
    env |= {"HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg", "TMPDIR": str(folder)}
    command = [sys.executable, str(Path(TUTORIALS or "") / f"{tutorial}.py")]
    return subprocess.run(command, cwd=folder, env=os.environ | env, capture_output=True, text=True, timeout=900)


def test_tutorials_run_to_their_end(place: Place, folder: Path, request: pytest.FixtureRequest) -> None:
    ends = {tutorial: run(place, folder, tutorial) for tutorial in MODELS[request.node.callspec.params["place"]]}
    failed = {tutorial: ran.stderr[-2000:] for tutorial, ran in ends.items() if ran.returncode}
    assert not failed, failed


@pytest.mark.parametrize("place", ["Qwen/Qwen3.5-4B"], indirect=True)
@pytest.mark.parametrize("tutorial", [*STOP])
def test_what_stops_a_tutorial(place: Place, folder: Path, tutorial: str) -> None:
    ran = run(place, folder, tutorial)
    assert ran.returncode and STOP[tutorial] in ran.stderr, ran.stderr[-2000:]
