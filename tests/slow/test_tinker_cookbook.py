"""Recipes of tinker-cookbook, unmodified, against a server of the starter.

Install `tinker-cookbook[math-rl]` (0.6.1 is what was run) into a virtual environment with this package, and run
`pytest tests/slow/test_tinker_cookbook.py -m slow` with its Python; `benchmarks/tinker_recipes.py` runs all recipes
that need no network. They get their models' tokenizers and their data from the Hugging Face hub by name; here
directories of those names, in the folder where the recipes run, stand in for them: the starter for Qwen/Qwen3-8B, sums
for GSM8K and for No Robots. `stable_reinforce`, the default loss of several, is trained as `cispo`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tinker_cookbook")
pytest.importorskip("math_verify")

from crash.place import Place, a_place
from groupwise.config.run import STARTER_DIR

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

MODEL, OTHER = "Qwen/Qwen3-8B", "Qwen/Qwen3.5-9B"
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."  # of rl_loop
Recipe = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    second = tmp_path_factory.mktemp("second") / "model"
    shutil.copytree(STARTER_DIR, second)
    settings = ("tinker=true", f"served_model_name={MODEL}", "tinker_stable_reinforce=cispo")
    settings += (f"tinker_other_models={json.dumps({OTHER: str(second)})}",)
    with a_place(tmp_path_factory.mktemp("place"), settings=settings) as place:
        place.start()
        place.await_ready()
        yield place


@pytest.fixture
def recipe(place: Place, tmp_path: Path) -> Recipe:
    """Runs a recipe in `tmp_path` -> the metrics of its steps."""
    for name in (MODEL, OTHER):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(STARTER_DIR)
    env = {"TINKER_BASE_URL": place.url, "TINKER_API_KEY": "tml-local", "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"}

    def run(name: str, log: str, **options: object) -> list[dict[str, Any]]:
        given = {"model_name": MODEL, "log_path": tmp_path / log, "lora_rank": 8, **options}
        command = [sys.executable, "-m", f"tinker_cookbook.recipes.{name}", *(f"{k}={v}" for k, v in given.items())]
        ran = subprocess.run(command, cwd=tmp_path, env=os.environ | env, capture_output=True, text=True, timeout=900)
        assert ran.returncode == 0, ran.stderr[-4000:]
        return [json.loads(line) for line in (tmp_path / log / "metrics.jsonl").read_text().splitlines()]

    return run


def column(metrics: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [step[name] for step in metrics if name in step]


def write(path: Path, rows: Sequence[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sums(count: int) -> list[tuple[str, int]]:
    rng = random.Random(0)
    pairs = [(rng.randint(1, 3), rng.randint(1, 3)) for _ in range(count)]
    return [(f"What is {a} + {b}?", a + b) for a, b in pairs]


@pytest.mark.parametrize("options", [{}, {"loss_fn": "importance_sampling"}, {"max_steps_off_policy": 1}], ids=str)
def test_math_rl_on_its_arithmetic(recipe: Recipe, options: dict[str, object]) -> None:
    metrics = recipe(
        "math_rl.train",
        "math",
        renderer_name="qwen3",
        env="arithmetic",
        groups_per_batch=16,
        group_size=8,
        max_tokens=24,
        learning_rate=1e-3,
        compute_post_kl=True,
        max_steps=3,
        save_every=2,
        eval_every=0,
        **options,
    )
    rewards = column(metrics, "env/all/reward/total")
    assert len(rewards) == 3 and min(rewards) > 0.3, rewards  # the starter adds, so that groups are mixed
    assert min(column(metrics, "grad_norm:mean")) > 0 and max(column(metrics, "refused:sum")) == 0
    assert max(map(abs, column(metrics, "optim/kl_sample_train_v1"))) < 1e-4  # the sampler's are the trainer's
    if "max_steps_off_policy" not in options:
        assert max(map(abs, column(metrics, "kl_pre_post_v1"))) > 0  # and the step moved it


def test_twenty_questions_are_answered_by_a_second_model_of_the_server(recipe: Recipe, place: Place) -> None:
    options = {"group_size": 4, "batch_size": 2, "max_tokens": 8, "max_steps": 1, "eval_every": 0, "save_every": 0}
    metrics = recipe("multiplayer_rl.twenty_questions.train", "twenty", renderer_name="qwen3", **options)
    assert column(metrics, "env/all/turns_per_episode")[0] == 20  # the starter guesses nothing
    assert max(column(metrics, "refused:sum")) == 0


def test_chat_sl_on_a_file_of_conversations(recipe: Recipe, tmp_path: Path) -> None:
    rows = [(f"{question} Say it in words.", f"It is {answer}, of course.") for question, answer in sums(256)]
    write(tmp_path / "talk.jsonl", [{"messages": [user(q), assistant(a)]} for q, a in rows])
    metrics = recipe(
        "chat_sl.train",
        "chat",
        dataset=tmp_path / "talk.jsonl",
        renderer_name="qwen3_disable_thinking",
        batch_size=32,
        max_length=256,
        learning_rate=3e-3,
        max_steps=6,
        eval_every=0,
        save_every=0,
    )
    losses = column(metrics, "train_mean_nll")
    assert len(losses) == 6 and losses[-1] < 0.7 * losses[0], losses


def test_sl_loop_then_rl_loop_from_its_state(recipe: Recipe, tmp_path: Path) -> None:
    """rl_loop goes on from a state in its log, as after an interruption. It skips batches without a reward, as the
    starter's are after so short a lesson in boxing answers."""
    asked = sums(32 * 30)
    example = [user("How many r's are in strawberry?" + SUFFIX), assistant("\\boxed{3}")]  # rl_loop's
    talks = [[*example, user(question + SUFFIX), assistant(f"\\boxed{{{answer}}}")] for question, answer in asked]
    write(tmp_path / "HuggingFaceH4" / "no_robots" / "train.jsonl", [{"messages": talk} for talk in talks])
    losses = column(recipe("sl_loop", "sl", batch_size=32, learning_rate=5e-3, max_steps=30), "train_mean_nll")
    assert losses[-1] < 0.5 * losses[0], losses

    gsm8k = tmp_path / "openai" / "gsm8k"
    write(gsm8k / "main" / "train.jsonl", [{"question": q, "answer": f"#### {a}"} for q, a in asked])
    (gsm8k / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train.jsonl\n---\n"
    )
    saved = json.loads((tmp_path / "sl" / "checkpoints.jsonl").read_text().splitlines()[-1])
    write(tmp_path / "rl" / "checkpoints.jsonl", [{"name": "warm", "batch": 0, "state_path": saved["state_path"]}])
    options = {"batch_size": 16, "group_size": 8, "learning_rate": 3e-4, "max_tokens": 32, "max_steps": 6}
    metrics = recipe("rl_loop", "rl", **options)
    assert len(column(metrics, "reward/total")) == 6
    ended = json.loads((tmp_path / "rl" / "checkpoints.jsonl").read_text().splitlines()[-1])
    assert ended["name"] == "final" and {"state_path", "sampler_path"} <= ended.keys()


@pytest.mark.parametrize("reverse", [False, True])
def test_sdft_of_the_tokens_that_the_teacher_holds_likely(recipe: Recipe, tmp_path: Path, reverse: bool) -> None:
    """Several targets a position; the reverse KL is a loss of the client's. The teacher is the starter that has been
    shown an answer; the recipe leaves out what it says to the first three tokens, so that answers have to be longer.
    """
    rows = [
        {"instruction": f"What is {n} + {n + 1234}?", "output": f"It is {2 * n + 1234}."} for n in range(5000, 5064)
    ]
    write(tmp_path / "tangqiaoyu" / "ToolAlpaca" / "train.jsonl", rows)
    metrics = recipe(
        "sdft.train",
        "sdft",
        renderer_name="qwen3_disable_thinking",
        dataset="toolalpaca",
        topk=5,
        reverse=reverse,
        groups_per_batch=16,
        max_tokens=32,
        learning_rate=1e-3,
        max_steps=3,
        eval_every=0,
        save_every=0,
    )
    assert len(metrics) == 3 and min(column(metrics, "grad_norm:mean")) > 0
    assert max(column(metrics, "refused:sum")) == 0 and column(metrics, "sdft/topk") == [5] * 3


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
