"""Adapters in PEFT's layout: what we write PEFT reads, with equal logits; what does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file

from groupwise.adapter_files import check_adapter
from groupwise.errors import AdapterError, ConfigError
from groupwise.model import share_weights
from groupwise.train.learner import Learner
from groupwise.train.lora import LoraSpec, adapter_off, add_lora, load_lora, lora_tensors, save_lora


def an_adapted_model(base, *, seed: int = 0, spec: LoraSpec = LoraSpec(rank=3, alpha=7.0)):
    model = share_weights(base.model)
    config = add_lora(model, spec, seed=seed)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in lora_tensors(model).values():
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=g))
    return model, config


def test_peft_loads_what_save_adapter_wrote(make_base, make_adapter, make_samples, architecture: str, tmp_path: Path):
    base = make_base(architecture)
    directory = make_adapter(base)
    check_adapter(directory)
    learner = Learner(base, lora=LoraSpec(rank=3, alpha=6.0))
    learner.load_adapter(directory)
    theirs = peft.PeftModel.from_pretrained(make_base(architecture).model, str(directory), autocast_adapter_dtype=False)
    (sample,) = make_samples(((4, (6,)),), holes=False)
    ids = torch.tensor([(*sample.prompt_ids, *sample.completion_ids)])
    with torch.no_grad():
        logp = theirs(input_ids=ids).logits[0].log_softmax(-1)
    expected = [float(logp[t - 1, ids[0, t]]) for t in range(4, 10)]
    assert learner.forward([sample])[0] == pytest.approx(expected, abs=1e-5 if architecture == "gemma2" else 1e-9)
    assert learner.forward([sample], reference=True)[0] != pytest.approx(expected, abs=1e-2)


def test_round_trip(make_base, tmp_path: Path):
    base = make_base()
    model, config = an_adapted_model(base)
    save_lora(model, config, tmp_path, base_name="tiny")
    other, other_config = an_adapted_model(base, seed=1)
    load_lora(other, other_config, tmp_path)
    for (name, mine), theirs in zip(lora_tensors(model).items(), lora_tensors(other).values(), strict=True):
        assert name.startswith("base_model.model.model.layers.") and torch.equal(mine, theirs)


def test_layout(make_base, tmp_path: Path):
    model, config = an_adapted_model(make_base(dtype=torch.float32), spec=LoraSpec(targets=["q_proj", "down_proj"]))
    save_lora(model, config, tmp_path, base_name="tiny")
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (saved["peft_type"], saved["task_type"], saved["r"], saved["lora_alpha"]) == ("LORA", "CAUSAL_LM", 16, 32.0)
    assert saved["target_modules"] == ["down_proj", "q_proj"] and saved["base_model_name_or_path"] == "tiny"
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert len(tensors) == 2 * 2 * 2
    assert tensors["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"].shape == (16, 48)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


def test_all_linear_is_every_linear_layer_but_the_head(make_base, architecture: str):
    model, _ = an_adapted_model(make_base(architecture))
    names = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in lora_tensors(model)}
    gpt2 = {"c_attn", "c_proj", "c_fc"}
    others = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert names == (gpt2 if architecture == "gpt2" else others)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name, _ in model.named_parameters() if "lora_" in name
    }


def test_adapter_weights_of_a_16_bit_base_are_float32(make_base):
    model = share_weights(make_base(dtype=torch.bfloat16).model)
    add_lora(model, LoraSpec(), seed=0)
    assert {tensor.dtype for tensor in lora_tensors(model).values()} == {torch.float32}


def test_fresh_adapter_is_the_base_and_the_seed_fixes_it(make_base):
    models = [share_weights(make_base().model) for _ in range(3)]
    torch.rand(1)
    before = torch.random.get_rng_state()
    for model, seed in zip(models, (0, 0, 1), strict=True):
        add_lora(model, LoraSpec(rank=2), seed=seed)
    assert torch.equal(before, torch.random.get_rng_state())
    first, second, third = (list(lora_tensors(model).values()) for model in models)
    assert all(map(torch.equal, first, second)) and not torch.equal(first[0], third[0])
    assert not any(b.any() for name, b in lora_tensors(models[0]).items() if "lora_B" in name)


def test_adapter_off(make_base):
    base = make_base()
    model, _ = an_adapted_model(base)
    model.set_attn_implementation("sdpa")
    ids = torch.arange(8)[None]
    with adapter_off(model):
        torch.testing.assert_close(model(input_ids=ids).logits, base.model(input_ids=ids).logits)
    assert not torch.allclose(model(input_ids=ids).logits, base.model(input_ids=ids).logits)
    assert all(tensor.requires_grad for tensor in lora_tensors(model).values())


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_proj", "qproj"], "has no module 'qproj'"),
        (["lm_head"], "LM head"),
        ("q_proj", "all-linear"),
        (["input_layernorm"], "does not fit"),
    ],
)
def test_targets_that_cannot_be_adapted(make_base, targets, message: str):
    with pytest.raises(ConfigError, match=message):
        add_lora(share_weights(make_base().model), LoraSpec(targets=targets), seed=0)


@pytest.mark.parametrize("spec", [LoraSpec(rank=4, alpha=7.0), LoraSpec(rank=3, alpha=7.0, targets=["q_proj"])])
def test_an_adapter_of_another_shape_is_refused(make_base, tmp_path: Path, spec: LoraSpec):
    model, config = an_adapted_model(make_base())
    save_lora(model, config, tmp_path, base_name="tiny")
    other, other_config = an_adapted_model(make_base(), spec=spec)
    before = [tensor.clone() for tensor in lora_tensors(other).values()]
    with pytest.raises(AdapterError, match="does not fit"):
        load_lora(other, other_config, tmp_path)
    assert all(map(torch.equal, before, lora_tensors(other).values()))


def test_an_adapter_of_another_scale_is_refused(make_base, tmp_path: Path):
    model, config = an_adapted_model(make_base())
    save_lora(model, config, tmp_path, base_name="tiny")
    other, other_config = an_adapted_model(make_base(), spec=LoraSpec(rank=3, alpha=14.0))
    with pytest.raises(AdapterError, match=r"alpha 7.0; training is to use 14\.0"):
        load_lora(other, other_config, tmp_path)


def test_damaged_files(make_base, tmp_path: Path):
    model, config = an_adapted_model(make_base())
    with pytest.raises(AdapterError, match="cannot be read"):
        load_lora(model, config, tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no")
    with pytest.raises(AdapterError, match="cannot be read"):
        load_lora(model, config, tmp_path)
