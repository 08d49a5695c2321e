"""A mixture of experts from the configuration to the adapter: a run, and a job of a server. What comes out loads in
PEFT, with the log-probabilities of learner and engine."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from cli_project import Project, cli, save_model
from groupwise.config.run import LoraSpec
from groupwise.engine.local import LocalEngine
from groupwise.errors import AdapterError
from groupwise.model.load import load_model
from groupwise.run.job import WorkerContext
from groupwise.run.job_queue import LeaseHeartbeat, Worker
from groupwise.train.learner import Learner
from groupwise.types import PolicyVersion, Sample
from whole_server import whole

PROMPT, COMPLETION = (5, 6, 7, 8), (20, 21, 22, 23, 24)


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen2_moe"])
def mixture_dir(make_base, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A tiny mixture with its tokenizer, saved as a user would have it."""
    base = make_base(request.param, dtype=torch.float32, context=256)
    return save_model(base, tmp_path_factory.mktemp("mixture"))


def of_peft(model: Path, adapter: Path) -> list[float]:
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(whole, str(adapter)).eval()
    with torch.no_grad():
        logits = adapted(input_ids=torch.tensor([PROMPT + COMPLETION])).logits[0, len(PROMPT) - 1 : -1]
    return logits.log_softmax(-1)[range(len(COMPLETION)), COMPLETION].tolist()


def assert_all_agree(model: Path, adapter: Path) -> None:
    """PEFT, the learner and the engine; and the adapter changes something."""
    base, version = load_model(str(model), dtype="float32"), PolicyVersion("math", 1)
    expected = of_peft(model, adapter)
    learner = Learner(base, lora=LoraSpec(rank=2, alpha=4.0))
    learner.load_adapter(adapter)
    sample = Sample(prompt_ids=PROMPT, completion_ids=COMPLETION, mask=(1,) * len(COMPLETION), advantage=0.0)
    assert learner.forward([sample])[0] == pytest.approx(expected, abs=1e-4)
    assert learner.forward([sample], reference=True)[0] != pytest.approx(expected, abs=1e-3)
    with closing(LocalEngine(base, max_rows=4)) as engine:
        engine.load(version, adapter)
        assert engine.score(PROMPT, COMPLETION, version) == pytest.approx(expected, abs=1e-4)


def test_a_run(mixture_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    project = Project.make(tmp_path, model=mixture_dir)
    result = cli("run", project.config, "run_dir=out", "train.steps=2", "train.learning_rate=0.1")
    assert result.exit_code == 0, result.output
    assert_all_agree(mixture_dir, tmp_path / "out" / "adapters" / "toy" / "v000002")


def test_a_job_of_a_server(mixture_dir: Path, tmp_path: Path):
    with whole(tmp_path / "state", mixture_dir) as server:
        parts = server.server
        message = {"role": "user", "content": "2 + 2?"}
        completions = [{"text": "4", "reward": 1.0}, {"text": "five", "reward": 0.0}]
        config = {"output_name": "math", "lora_rank": 2, "lora_alpha": 4.0, "learning_rate": 0.1}
        body = {"groups": [{"messages": [message], "completions": completions}], "config": config}
        refused = server.http.post("/v1/train/grpo", json=body | {"config": config | {"target_modules": ["experts"]}})
        assert refused.status_code == 400 and "fused into one tensor" in refused.json()["error"]["message"]
        for _ in range(2):  # the second continues the first
            answer = server.http.post("/v1/train/grpo", json=body)
            assert answer.status_code in (200, 202), answer.text
            place = WorkerContext(base=parts.base, ledger=parts.ledger, store=parts.store, state_dir=tmp_path / "state")
            lease = parts.ledger.lease("worker")
            assert lease is not None
            Worker(place, LeaseHeartbeat(parts.ledger), name="worker").do(lease)
            job = parts.ledger.job(lease.job.id)
            assert job.error is None, job.error
        assert job.version == "math@2"
        assert_all_agree(mixture_dir, parts.store.path(PolicyVersion("math", 2)))
        body = {"model": "math@2", "messages": [message], "max_tokens": 4}
        reply = server.http.post("/v1/chat/completions", json=body)
        assert (reply.status_code, reply.json().get("model")) == (200, "math@2"), reply.text


@pytest.mark.filterwarnings("ignore:.*in packed rows.*:UserWarning")
@pytest.mark.parametrize("family", ["llama4_text", "mamba"])
def test_what_cannot_run_packed_is_served_and_trained(make_base, tmp_path: Path, monkeypatch, family: str):
    """A server answers with it, and a run ends with adapters that PEFT loads; sampler and trainer agree."""
    model = save_model(make_base(family, dtype=torch.float32, context=256), tmp_path / "model")
    with whole(tmp_path / "state", model) as server:
        body = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        reply = server.http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] > 0, reply.text
    monkeypatch.chdir(tmp_path)
    result = cli("run", Project.make(tmp_path, model=model).config, "run_dir=out", "train.steps=2")
    assert result.exit_code == 0, result.output
    steps = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    assert all(abs(step["mismatch/kl"]) < 1e-4 for step in steps if "mismatch/kl" in step)
    (adapter,) = tmp_path.glob("out/adapters/*/v000002")
    peft.PeftModel.from_pretrained(make_base(family, dtype=torch.float32, context=256).model, str(adapter))


@pytest.mark.filterwarnings("ignore:The following .* keys did not match:RuntimeWarning")
def test_an_adapter_of_fused_experts_is_not_served(make_base, tmp_path: Path):
    """As PEFT makes it for a mixture where it is told all-linear."""
    base = make_base("qwen3_moe")
    model = peft.get_peft_model(make_base("qwen3_moe").model, peft.LoraConfig(r=2, target_modules="all-linear"))
    model.save_pretrained(str(tmp_path))
    refused = pytest.raises(AdapterError, match="only the weights of linear layers can be adapted")
    with closing(LocalEngine(base, max_rows=2)) as engine, refused:
        engine.load(PolicyVersion("theirs", 1), tmp_path)
