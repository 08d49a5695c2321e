"""A mixture of experts from the configuration to the adapter: a run, and a job of a server. What comes out loads in
PEFT, with the log-probabilities of learner and engine."""

from __future__ import annotations

import itertools
import json
from contextlib import closing
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from cli_project import Project, cli, save_model
from groupwise.bridges.tinker.schema import Lora
from groupwise.bridges.tinker.training import lora_of, targets_of
from groupwise.config.lora import LoraSpec
from groupwise.engine.local import LocalEngine
from groupwise.engine.vllm.handshake import linear_names
from groupwise.errors import FieldError
from groupwise.model.adaptable import adaptable_modules, adapted_modules
from groupwise.model.load import load_model
from groupwise.store.files import adapted_names, check_adapter
from groupwise.store.merge import MergeMode, WeightedAdapter, merge_adapters
from groupwise.train.learner import Learner
from groupwise.types import PolicyVersion, Sample, SamplingParams, SamplingRequest
from whole_server import whole
from wording import raises

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
    targets = tuple(adapted_names(adapter))
    base, version = load_model(str(model), dtype="float32"), PolicyVersion("math", 1)
    expected = of_peft(model, adapter)
    learner = Learner(base, lora=LoraSpec(rank=2, alpha=4.0, targets=targets))
    learner.load_adapter(adapter)
    sample = Sample(prompt_ids=PROMPT, completion_ids=COMPLETION, mask=(1,) * len(COMPLETION), advantage=0.0)
    assert learner.forward([sample])[0] == pytest.approx(expected, abs=1e-4)
    assert learner.forward([sample], reference=True)[0] != pytest.approx(expected, abs=1e-3)
    with closing(LocalEngine(base, max_rows=4)) as engine:
        engine.load(version, adapter)
        assert engine.score(PROMPT, COMPLETION, version) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("targets", [pytest.param("all-linear", marks=pytest.mark.slow), "experts"])
def test_a_run(mixture_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, targets: str):
    monkeypatch.chdir(tmp_path)
    project = Project.make(tmp_path, model=mixture_dir)
    options = ("train.steps=2", "train.learning_rate=0.1", f"train.lora.targets={targets}")
    result = cli("run", project.config, "run_dir=out", *options)
    assert result.exit_code == 0, result.output
    assert_all_agree(mixture_dir, tmp_path / "out" / "adapters" / "toy" / "v000002")


@pytest.mark.parametrize(
    "targets", [pytest.param("all-linear", marks=pytest.mark.slow), ["all-linear", "experts"]], ids=str
)
def test_a_job_of_a_server(mixture_dir: Path, tmp_path: Path, targets):
    with whole(tmp_path / "state", mixture_dir) as server:
        parts = server.server
        message = {"role": "user", "content": "2 + 2?"}
        completions = [{"text": "4", "reward": 1.0}, {"text": "five", "reward": 0.0}]
        config = {"output_name": "math", "lora_rank": 2, "lora_alpha": 4.0, "learning_rate": 0.1}
        config["target_modules"] = targets
        body = {"groups": [{"messages": [message], "completions": completions}], "config": config}
        refused = server.http.post(
            "/v1/train/grpo", json=body | {"config": config | {"target_modules": ["gate_up_proj"]}}
        )
        assert refused.status_code == 400 and "experts.gate_up_proj" in refused.json()["error"]["message"]
        for _ in range(2):  # the second continues the first
            answer = server.http.post("/v1/train/grpo", json=body)
            assert answer.status_code in (200, 202), answer.text
            job = server.train()
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


# ---- adapters of experts and routers ----

BETWEEN = pytest.mark.filterwarnings("ignore:.*in packed rows.*:UserWarning")
OF_PEFT = {  # as PEFT alone makes them: (family, options)
    "experts": ("qwen3_moe", {"target_modules": [], "target_parameters": ["gate_up_proj", "down_proj"]}),
    "transposed": ("gpt_oss", {"target_modules": [], "target_parameters": ["experts.down_proj"]}),
    "all-linear": ("qwen3_moe", {"target_modules": "all-linear"}),  # it adds the experts and the router
    "w1, w2, w3": ("mixtral", {"target_modules": ["w1", "w2", "w3", "q_proj"]}),  # names of older transformers
    "patterns": (
        "olmoe",
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["experts.gate_up_proj", "gate.weight"],
            "rank_pattern": {"gate_up_proj": 3, "q_proj": 1},
            "alpha_pattern": {r".*1\.mlp\.experts.*": 9},
            "use_rslora": True,
        },
    ),
}


@BETWEEN
@pytest.mark.filterwarnings("ignore:The following .* keys did not match:RuntimeWarning")
@pytest.mark.parametrize("kind", OF_PEFT)
def test_adapters_that_peft_made_answer_as_in_peft(make_base, tmp_path: Path, kind: str):
    family, options = OF_PEFT[kind]
    torch.manual_seed(0)
    config = peft.LoraConfig(**({"r": 2, "lora_alpha": 4, "init_lora_weights": False} | options))
    made = peft.get_peft_model(make_base(family).model, config)
    made.save_pretrained(str(tmp_path))
    check_adapter(tmp_path)
    ids = torch.tensor([PROMPT + COMPLETION])
    with torch.no_grad():
        logp = made(input_ids=ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    expected = logp[range(len(COMPLETION)), COMPLETION].tolist()
    version = PolicyVersion("theirs", 1)
    with closing(LocalEngine(make_base(family), max_rows=2)) as engine:
        engine.load(version, tmp_path)
        assert engine.score(PROMPT, COMPLETION, version) == pytest.approx(expected, abs=1e-6)
        assert engine.score(PROMPT, COMPLETION, PolicyVersion.base()) != pytest.approx(expected, abs=1e-2)


def adapters_of(make_base, family: str, root: Path) -> list[Path]:
    """Adapters of different parts of a mixture."""
    targets = (["experts"], ["experts.down_proj", "o_proj"], ["router" if family == "gpt_oss" else "gate", "o_proj"])
    directories = []
    for i, each in enumerate(targets):
        torch.manual_seed(i)
        learner = Learner(make_base(family), lora=LoraSpec(rank=2 + i, alpha=6.0, targets=each))
        for parameter in learner.parameters:
            parameter.data.normal_(std=0.3)
        directories.append(root / str(i))
        directories[-1].mkdir()
        learner.save_adapter(directories[-1])
    return directories


@BETWEEN
@pytest.mark.parametrize(("family", "packed"), [("qwen3_moe", True), ("deepseek_v3", True), ("gpt_oss", False)])
def test_adapters_of_experts_in_one_batch(make_base, tmp_path: Path, monkeypatch, family: str, packed: bool):
    """With the base and with each other: every row gets what it would get alone (DeepSeek's router is float32)."""
    if not packed:
        monkeypatch.setattr("groupwise.engine.local.why_twin_not_packed", lambda base, twin: "this test says so")
    versions = [PolicyVersion("math", i) for i in (1, 2, 3)]
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    asked = [
        SamplingRequest(prompt_ids=(3, 4, 5 + i), n=2, version=version, params=greedy)
        for i, version in enumerate([*versions, PolicyVersion.base()])
    ]
    with closing(LocalEngine(make_base(family), max_rows=8)) as engine:
        assert engine.packed == packed
        for version, directory in zip(versions, adapters_of(make_base, family, tmp_path), strict=True):
            engine.load(version, directory)
        alone = [engine.submit([each])[0].result() for each in asked]
        together = [future.result() for future in engine.submit(asked)]
        assert [[c.token_ids for c in group] for group in together] == [[c.token_ids for c in group] for group in alone]
        for mine, theirs in zip(together, alone, strict=True):
            assert mine[0].logprobs == pytest.approx(theirs[0].logprobs, abs=1e-6)
        scores = [engine.score((3, 4), (7, 8, 9), version) for version in [*versions, PolicyVersion.base()]]
        assert all(one != pytest.approx(other, abs=1e-3) for one, other in itertools.combinations(scores, 2))


@pytest.mark.parametrize("mode", ["concat", "ties"])
def test_merged_adapters_of_experts(make_base, tmp_path: Path, mode: str):
    """In PEFT: with `concat` the weighted sum of their updates; with `ties` of one source and all entries, itself."""
    one, other, _ = adapters_of(make_base, "qwen3_moe", tmp_path)
    sources = [WeightedAdapter(one, 1.0), WeightedAdapter(other, 0.5)] if mode == "concat" else [WeightedAdapter(one)]
    (target := tmp_path / "merged").mkdir()
    merge_adapters(sources, target, mode=MergeMode(mode), density=None if mode == "concat" else 1.0)
    check_adapter(target)

    def weights(*directories: Path) -> dict[str, torch.Tensor]:
        model = make_base("qwen3_moe").model
        for directory in directories:
            adapted = peft.PeftModel.from_pretrained(model, str(directory), autocast_adapter_dtype=False)
            model = adapted.merge_and_unload()
        return dict(model.named_parameters())

    base, merged = weights(), weights(target)
    parts = [weights(source.directory) for source in sources]
    for name, weight in merged.items():
        sum_ = base[name] + sum(s.weight * (part[name] - base[name]) for s, part in zip(sources, parts, strict=True))
        torch.testing.assert_close(weight, sum_, atol=1e-6, rtol=1e-6)
    assert not torch.equal(
        merged["model.layers.0.mlp.experts.gate_up_proj"], base["model.layers.0.mlp.experts.gate_up_proj"]
    )


def test_vllm_is_not_told_of_experts(make_base):
    model = make_base("qwen3_moe").model
    assert linear_names(model, "all-linear") == ("k_proj", "o_proj", "q_proj", "v_proj")
    for targets in ("experts", ["all-linear", "experts"], ["gate"]):
        with raises(FieldError, field="train.lora.targets", kind="target"):
            linear_names(model, targets)


@pytest.mark.parametrize(
    ("family", "wanted", "attention"),
    [
        ("qwen3_moe", {"experts"}, False),
        ("qwen2_moe", {"experts", "shared_expert"}, False),
        ("qwen3_moe", {"experts", "self_attn"}, True),
        ("qwen3", {"mlp"}, False),
    ],
)
def test_what_tinker_calls_the_mlp_is_the_experts_too(make_base, family: str, wanted: set[str], attention: bool):
    lora = lora_of(Lora(rank=2, train_attn=attention, train_mlp=True))
    model = make_base(family).model
    names = adapted_modules(model, targets_of(lora, adaptable_modules(model)))
    assert {name.split(".")[-2] for name in names} == wanted
