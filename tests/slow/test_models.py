"""Every family of models, whole: sampler, trainer and PEFT agree, the gradient is transformers', and a run, a server's
job and a loop of the SDK train it, each to an adapter that PEFT loads.

docs/models.json has what is found here, and docs/models.md shows it. After a change that is meant:

    GROUPWISE_WRITE_MODELS=1 pytest -m slow tests/slow/test_models.py && python docs/generate_models.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from cli_project import Project, cli, save_model
from family_checks import GROUPS, LORA, agreement, gradient_gap, template_facts
from groupwise.model.load import LoadedModel
from groupwise.model.packed_check import ways_of
from groupwise.sdk.datums import datum_of
from groupwise.sdk.trainer import AdamParams, TrainingService
from groupwise.types import PolicyVersion
from model_families import FAMILIES, TEMPLATES
from whole_server import whole

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*(in packed rows|recurrent layers).*:UserWarning")]

DATA = Path(__file__).parents[2] / "docs" / "models.json"
MEASURED = ("gap", "peft_gap", "gradient")  # which rounding decides: bounded, not compared
PACKAGES = ("transformers", "peft", "torch")


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, dict[str, Any]]]:
    """What is found, by family; written at the end, if that is asked for."""
    rows: dict[str, dict[str, Any]] = {}
    yield rows
    if os.environ.get("GROUPWISE_WRITE_MODELS") == "1":
        before = json.loads(DATA.read_text(encoding="utf-8"))["families"] if DATA.exists() else {}
        data = {
            "versions": {name: version(name).partition("+")[0] for name in PACKAGES},
            "families": {key: (before | rows)[key] for key in FAMILIES if key in before | rows},
        }
        DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family(
    make_base, make_samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: dict[str, Any], family: str
) -> None:
    def base(dtype: torch.dtype = torch.float32, context: int = 64) -> LoadedModel:
        return make_base(family, dtype=dtype, context=context)

    for name in ("agreement", "gradient", "run", "job"):
        (tmp_path / name).mkdir()
    agreed = agreement(base(), base(), tmp_path / "agreement")
    gradient = gradient_gap(base(torch.float64), base(torch.float64), make_samples(GROUPS), tmp_path / "gradient")
    assert agreed.gap < FAMILIES[family].rounding and agreed.peft_gap < 1e-4 and gradient < 1e-6
    ways = ways_of(base().model.config)  # what `groupwise check` says before anything is loaded
    assert (ways.why_not_packed is None) == (agreed.trained == "packed") and set(ways.adapted) == set(agreed.targets)
    assert (ways.why_not_cached is None) == (agreed.sampled != "own forward, no cache")
    model = save_model(base(context=256), tmp_path / "model")
    for adapter in (
        a_run(model, tmp_path / "run", monkeypatch),
        a_job(model, tmp_path / "job"),
        by_hand(base, tmp_path),
    ):
        loaded = peft.PeftModel.from_pretrained(base(context=256).model, str(adapter))
        trained = [tensor for name, tensor in loaded.named_parameters() if "lora_B" in name]
        assert any(bool(tensor.any()) for tensor in trained)
    row = {
        "name": FAMILIES[family].name,
        "class": type(base().model).__name__,
        **asdict(agreed),
        "targets": list(agreed.targets),
        "gradient": gradient,
        "trained_by": ["run", "job", "SDK"],
        **template_facts(TEMPLATES.get(family)),
    }
    row |= {name: float(f"{row[name]:.0e}") for name in MEASURED}
    found[family] = row
    if os.environ.get("GROUPWISE_WRITE_MODELS") != "1":
        known = json.loads(DATA.read_text(encoding="utf-8"))["families"][family]
        assert {k: v for k, v in row.items() if k not in MEASURED} == {
            k: v for k, v in known.items() if k not in MEASURED
        }, "if this is meant, write docs/models.json anew (the head of this file says how)"


def a_run(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two steps of `groupwise run`. -> The adapter."""
    monkeypatch.chdir(folder)
    config = Project.make(folder, model=model).config
    result = cli("run", config, "run_dir=out", "train.steps=2", "train.learning_rate=0.1", "eval=null")
    assert result.exit_code == 0, result.output
    steps = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    gaps = [step["mismatch/kl"] for step in steps if "mismatch/kl" in step]
    assert gaps and all(abs(gap) < 1e-4 for gap in gaps)
    return folder / "out" / "adapters" / "toy" / "v000002"


def a_job(model: Path, folder: Path) -> Path:
    """A group posted to a server, trained, and sampled from. -> The adapter."""
    message = {"role": "user", "content": "2 + 2?"}
    completions = [{"text": "4", "reward": 1.0}, {"text": "five", "reward": 0.0}]
    config = {"output_name": "math", "lora_rank": 2, "lora_alpha": 4.0, "learning_rate": 0.1}
    with whole(folder / "state", model) as server:
        parts = server.server
        body = {"groups": [{"messages": [message], "completions": completions}], "config": config}
        answer = server.http.post("/v1/train/grpo", json=body)
        assert answer.status_code in (200, 202), answer.text
        server.train()
        asked = {"model": "math@1", "messages": [message], "max_tokens": 4}
        reply = server.http.post("/v1/chat/completions", json=asked)
        assert (reply.status_code, reply.json().get("model")) == (200, "math@1"), reply.text
        return parts.store.path(PolicyVersion("math", 1))


def by_hand(base: Any, folder: Path) -> Path:
    """The SDK's verbs, in process. -> The adapter."""
    data = [datum_of((5, 6, 7, 8, 20, 21 + i), prompt_len=4) for i in range(3)]
    with closing(TrainingService(base(context=256), threads=1)) as service:
        client = service.create_training_client(lora=LORA)
        for _ in range(2):
            client.forward_backward(data, "cross_entropy")
            client.optim_step(AdamParams(learning_rate=0.1)).result()
        target = folder / "by_hand"
        target.mkdir()
        client.learner.save_adapter(target)
    return target
