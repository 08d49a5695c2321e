"""rsLoRA and DoRA: what is trained, published, served, merged and loaded by PEFT is one and the same."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from cli_project import save_model
from groupwise.algo.loss import resolve_loss
from groupwise.config.lora import LoraSpec
from groupwise.config.run import parse_config
from groupwise.engine.local import LocalEngine
from groupwise.errors import AdapterError, ConfigError
from groupwise.model.load import load_model
from groupwise.store.export import export_model
from groupwise.store.files import check_adapter
from groupwise.store.locate import Located, TrainedPolicy
from groupwise.train.learner import Learner
from groupwise.types import PolicyVersion, Sample, SamplingParams, SamplingRequest
from slow_cases import slow_but
from wording import raises

FAMILIES = ("qwen3", "llama", "gemma3", "gpt2")
DORA, RSLORA = LoraSpec(rank=3, alpha=6.0, use_dora=True), LoraSpec(rank=4, alpha=6.0, use_rslora=True)
SPECS = {"dora": DORA, "rslora": RSLORA, "both": DORA.model_copy(update={"use_rslora": True})}


def moved(base, spec: LoraSpec, *, seed: int = 0) -> Learner:
    """A learner whose adapter changes every logit, its magnitudes too."""
    learner, g = Learner(base, lora=spec, seed=seed), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in learner.parameters:
            noise = 0.3 * torch.randn(parameter.shape, generator=g)
            parameter.mul_(1 + noise) if parameter.ndim == 1 else parameter.copy_(noise)
    return learner


def saved(learner: Learner, directory: Path) -> Path:
    directory.mkdir(parents=True)
    learner.save_adapter(directory)
    check_adapter(directory)
    return directory


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("family", slow_but({"qwen3"}, of=FAMILIES))
def test_peft_loads_what_was_trained(make_base, make_samples, family: str, spec: LoraSpec, tmp_path: Path) -> None:
    base, samples = make_base(family), make_samples(((4, (6,)),), holes=False)
    learner = moved(base, spec)
    directory = saved(learner, tmp_path / "adapter")
    told = json.loads((directory / "adapter_config.json").read_text())
    assert (told["use_dora"], told["use_rslora"]) == (spec.use_dora, spec.use_rslora)
    magnitudes = [key for key in load_file(directory / "adapter_model.safetensors") if "magnitude" in key]
    assert bool(magnitudes) == spec.use_dora and all(key.endswith(".lora_magnitude_vector") for key in magnitudes)
    theirs = peft.PeftModel.from_pretrained(make_base(family).model, str(directory), autocast_adapter_dtype=False)
    ids = torch.tensor([(*samples[0].prompt_ids, *samples[0].completion_ids)])
    with torch.no_grad():
        logp = theirs(input_ids=ids).logits[0].log_softmax(-1)
    expected = [float(logp[t - 1, ids[0, t]]) for t in range(4, 10)]
    assert learner.forward(samples)[0] == pytest.approx(expected, abs=1e-7)
    assert learner.forward(samples, reference=True)[0] != pytest.approx(expected, abs=1e-2)
    again = Learner(base, lora=spec)
    again.load_adapter(directory)
    assert again.forward(samples)[0] == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("family", slow_but(FAMILIES[:2], of=FAMILIES))
def test_engine_samples_what_is_trained(make_base, family: str, spec: LoraSpec, tmp_path: Path) -> None:
    """Alone in a batch, where weights are merged, and beside plain LoRA and the base, where they are not."""
    base, prompt = make_base(family, dtype=torch.float32), (5, 6, 7)
    learners = {PolicyVersion("a", 1): moved(base, spec), PolicyVersion("b", 1): moved(base, LoraSpec(rank=2), seed=1)}
    params = SamplingParams(max_tokens=10, seed=3)
    with closing(LocalEngine(base, max_rows=16)) as engine:
        for version, learner in learners.items():
            engine.load(version, saved(learner, tmp_path / version.name))
        every = [*learners, PolicyVersion.base()]
        requests = [SamplingRequest(prompt_ids=prompt, n=2, params=params, version=version) for version in every]
        together = engine.generate(requests)
        alone = [engine.generate([request])[0] for request in requests]
    for version, *groups in zip(every, together, alone, strict=True):
        learner = learners.get(version, next(iter(learners.values())))
        for group in groups:
            samples = [
                Sample(prompt_ids=prompt, completion_ids=c.token_ids, mask=(1,) * len(c.token_ids), advantage=0.0)
                for c in group
            ]
            logprobs = learner.forward(samples, reference=version.is_base)
            for completion, mine in zip(group, logprobs, strict=True):
                assert mine == pytest.approx(completion.logprobs, abs=5e-4 if family == "gpt2" else 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_magnitudes_are_trained(make_base, make_samples, dtype: torch.dtype, checkpointing: bool) -> None:
    base, samples = make_base(dtype=dtype), make_samples(((5, (4, 6)), (3, (7,))))
    learner = Learner(base, lora=DORA, gradient_checkpointing=checkpointing)
    before = [p.detach().clone() for p in learner.parameters if p.ndim == 1]
    fresh, reference = learner.forward(samples), learner.forward(samples, reference=True)
    for mine, theirs in zip(fresh, reference, strict=True):  # m = |W| at the start: nothing is changed yet
        assert mine == pytest.approx(theirs, abs=1e-4 if dtype == torch.float32 else 0.2)
    learner.step(samples, resolve_loss("grpo"), learning_rate=1e-2)
    after = [p for p in learner.parameters if p.ndim == 1]
    assert len(before) == 14 and all(p.dtype == torch.float32 for p in after)
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_into_one_model(make_base, make_samples, family: str, tmp_path: Path) -> None:
    model = str(save_model(make_base(family, dtype=torch.float32), tmp_path / "model"))
    base, samples = load_model(model, device="cpu"), make_samples(((4, (6,)),), holes=False)
    learner = moved(base, DORA)
    located = Located(
        version=PolicyVersion("a", 1),
        directory=saved(learner, tmp_path / "adapter"),
        base_model=model,
        base_hash=base.hash,
    )
    export_model(TrainedPolicy(model=model, adapter=located, run_dir=None), tmp_path / "whole", format="merged")
    whole = Learner(load_model(str(tmp_path / "whole"), device="cpu"))
    assert whole.forward(samples)[0] == pytest.approx(learner.forward(samples)[0], abs=1e-4)


def test_what_dora_does_not_go_with(make_base, tmp_path: Path) -> None:
    run = {"data": {"source": "x.jsonl"}, "rewards": ["length"], "train": {"lora": {"use_dora": True}}}
    with raises(ConfigError, field="train.lora", kind="conflict"):
        parse_config(run | {"engine": "vllm"})
    with raises(ConfigError, field="train.lora", kind="conflict"):
        parse_config(run | {"quantization": "nf4"})
    with raises(ConfigError):
        Learner(make_base("qwen3_moe"), lora=LoraSpec(rank=2, use_dora=True, targets=("experts",)))
    base = make_base(dtype=torch.float32)
    directory = saved(moved(base, DORA), tmp_path / "a")
    with raises(AdapterError):
        Learner(base, lora=LoraSpec(rank=3, alpha=6.0)).load_adapter(directory)
    with (
        closing(LocalEngine(base, max_rows=2)) as engine,
        raises(AdapterError),
    ):
        engine.load_composed(PolicyVersion("sum", 1), [(directory, 1.0), (directory, 0.5)])
    weights = load_file(directory / "adapter_model.safetensors")
    weights.pop(next(key for key in weights if "magnitude" in key))
    save_file(weights, directory / "adapter_model.safetensors")
    with raises(AdapterError):
        check_adapter(directory)
