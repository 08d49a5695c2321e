"""Every family that sees, whole: sampler, trainer and PEFT agree about an image, and a run, a server's job and a loop
of the SDK train it, each to an adapter that PEFT loads.

docs/models_seeing.json has what is found here, and docs/models.md shows it. After a change that is meant:

    GROUPWISE_WRITE_MODELS=1 pytest -m slow tests/slow/test_seeing_families.py && python docs/generate_models.py
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel

from groupwise.config.run import parse_config
from groupwise.run.loop import run_loop
from groupwise.sdk.config import DeployConfig, LoopConfig
from groupwise.sdk.datums import build_grpo_datums
from groupwise.sdk.infra import setup_infra
from groupwise.sdk.trainer import AdamParams
from groupwise.store.adapters import AdapterStore
from groupwise.types import PolicyVersion
from seeing_checks import ONE, row_of, user
from seeing_models import FAMILIES, load_seeing, save_seeing
from whole_server import whole

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.* has recurrent layers:UserWarning")]

DATA = Path(__file__).parents[2] / "docs" / "models_seeing.json"
MEASURED = ("gap", "peft_gap")  # which rounding decides: bounded, not compared
REWARDS = """
def lengths(completions, **columns):
    return [len(said[-1]["content"]) % 7 / 7 for said in completions]
"""


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, dict[str, Any]]]:
    """What is found, by family; written at the end, if that is asked for."""
    rows: dict[str, dict[str, Any]] = {}
    yield rows
    if os.environ.get("GROUPWISE_WRITE_MODELS") == "1":
        before = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}
        data = {name: (before | rows)[name] for name in FAMILIES if name in before | rows}
        DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_that_sees(tmp_path: Path, found: dict[str, Any], family: str) -> None:
    for name in ("agreement", "run", "job", "loop"):
        (tmp_path / name).mkdir()
    row = row_of(family, tmp_path / "agreement")
    assert row["gap"] < 1e-4 and row["peft_gap"] < 1e-4
    model = save_seeing(family, tmp_path / "model")
    for adapter in (
        a_run(model, tmp_path / "run"),
        a_job(model, tmp_path / "job"),
        a_loop(model, tmp_path / "loop"),
    ):
        loaded = PeftModel.from_pretrained(load_seeing(family, tmp_path / "again", dtype="float32").model, str(adapter))
        trained = [tensor for name, tensor in loaded.named_parameters() if "lora_B" in name]
        assert any(bool(tensor.any()) for tensor in trained)
    row |= {"trained_by": ["run", "job", "SDK"], **{name: float(f"{row[name]:.0e}") for name in MEASURED}}
    found[family] = row
    if os.environ.get("GROUPWISE_WRITE_MODELS") != "1":
        known = json.loads(DATA.read_text(encoding="utf-8"))[family]
        assert {k: v for k, v in row.items() if k not in MEASURED} == {
            k: v for k, v in known.items() if k not in MEASURED
        }, "if this is meant, write docs/models_seeing.json anew (the head of this file says how)"


def a_run(model: Path, folder: Path) -> Path:
    """Two steps over an image. -> The adapter."""
    (folder / "one.png").write_bytes(ONE.data)
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "How many?", "image": "one.png"}) + "\n")
    (folder / "rewards_of_lengths.py").write_text(REWARDS)
    settings = {
        "name": "seen",
        "model": str(model),
        "dtype": "float32",
        "device": "cpu",
        "output_dir": str(folder / "runs"),
        "data": {"source": "rows.jsonl"},
        "rewards": ["rewards_of_lengths.lengths"],
        "rollout": {"prompts_per_step": 1, "group_size": 8, "max_tokens": 8},
        "train": {"steps": 2, "learning_rate": 1e-2},
        "scoring": {"workers": 0},
        "folder": str(folder),
    }
    ran = run_loop(parse_config(settings))
    steps = [json.loads(line) for line in (ran.run_dir / "metrics.jsonl").read_text().splitlines()]
    gaps = [step["mismatch/logprob_diff_max"] for step in steps if "mismatch/logprob_diff_max" in step]
    assert gaps and max(gaps) < 1e-4
    return AdapterStore(ran.run_dir / "adapters").path(ran.version)


def a_job(model: Path, folder: Path) -> Path:
    """A group posted to a server, trained, and sampled from. -> The adapter."""
    url = f"data:image/png;base64,{base64.b64encode(ONE.data).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "How many?"}]
    message = {"role": "user", "content": content}
    completions = [{"text": "4", "reward": 1.0}, {"text": "five", "reward": 0.0}]
    config = {"output_name": "seen", "learning_rate": 1e-2}
    with whole(folder / "state", model) as site:
        body = {"groups": [{"messages": [message], "completions": completions}], "config": config}
        answer = site.http.post("/v1/train/grpo", json=body)
        assert answer.status_code in (200, 202), answer.text
        site.train()
        asked = {"model": "seen@1", "messages": [message], "max_tokens": 4}
        reply = site.http.post("/v1/chat/completions", json=asked)
        assert (reply.status_code, reply.json().get("model")) == (200, "seen@1"), reply.text
        return site.server.store.path(PolicyVersion("seen", 1))


def a_loop(model: Path, folder: Path) -> Path:
    """Two steps of the SDK's verbs. -> The adapter."""
    deployment = DeployConfig(tokenizer_model=str(model))
    config = LoopConfig(base_model=str(model), log_path=str(folder), deployment=deployment)
    with setup_infra(config, needs_reference=False, needs_inference=True) as infra:
        assert infra.sampler is not None and infra.weights is not None
        messages: Any = [user(ONE, "How many?")]
        version = PolicyVersion.base()
        for step in (1, 2):
            said = asyncio.run(infra.sampler.sample_with_tokens(messages, 2, max_tokens=5, seed=step))
            told = [each.inference_logprobs[1:] for each in said]
            lengths = [each.prompt_len for each in said]
            data = build_grpo_datums([each.datum() for each in said], [1.0, -1.0], told, lengths)
            infra.policy.forward_backward(data, "importance_sampling").result()
            infra.policy.optim_step(AdamParams(learning_rate=1e-2)).result()
            version = infra.weights.sync().result()
    return AdapterStore(folder / "adapters").path(version)
