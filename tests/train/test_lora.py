"""Adapters in PEFT's layout: what we write PEFT reads, with equal logits; what does not fit is refused."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import peft
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from groupwise.config.lora import LoraSpec
from groupwise.engine.local import LocalEngine
from groupwise.errors import AdapterError, ConfigError
from groupwise.model.load import share_weights
from groupwise.store.files import adapted_names, check_adapter
from groupwise.train.learner import Learner
from groupwise.train.lora import adapter_off, add_lora, load_lora, lora_tensors, save_lora
from groupwise.types import PolicyVersion
from slow_cases import slow_but
from wording import raises


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
    "targets",
    [
        ["q_proj", "qproj"],
        ["lm_head"],
        "q_proj",
        ["input_layernorm"],
        ["embed_tokens"],
        ["q_proj", "mlp"],
        ["q_proj.weight"],
    ],
)
def test_targets_that_cannot_be_adapted(make_base, targets):
    """A string that is not all-linear is refused before there is a model, by the class of the configuration."""
    with raises((ConfigError, ValidationError)):
        add_lora(share_weights(make_base().model), LoraSpec(targets=targets), seed=0)


# ---- mixtures of experts ----

ATTENTION, DENSE = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
DEFAULT = {
    "qwen3_moe": ATTENTION,
    "qwen2_moe": ATTENTION | DENSE,  # of its shared expert
    "mixtral": ATTENTION,
    "olmoe": ATTENTION,
    "minimax_m2": ATTENTION,
    "qwen3_next": ATTENTION | DENSE | {"in_proj_qkvz", "in_proj_ba", "out_proj"},
    "deepseek_v3": {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"} | DENSE,
    "gpt_oss": ATTENTION,
    "llama4_text": ATTENTION | DENSE,
}
PADDED = pytest.mark.filterwarnings("ignore:.*(in packed rows|recurrent layers).*:UserWarning")
ROUNDED = 1e-4  # routers and recurrences of some families are float32 in any type


@PADDED
@pytest.mark.parametrize("family", slow_but({"qwen3_moe", "gpt_oss", "deepseek_v3"}, of=DEFAULT))
@pytest.mark.parametrize("targets", ["all-linear", ["o_proj"], None])
def test_peft_loads_an_adapter_of_a_mixture(make_base, make_samples, tmp_path: Path, family: str, targets):
    """What it adapts, that `PeftModel.from_pretrained` adapts the same, and that log-probabilities are the learner's.
    `None`: all of the default, by name."""
    base = make_base(family)
    targets = sorted(DEFAULT[family]) if targets is None else targets
    learner = Learner(base, lora=LoraSpec(rank=3, alpha=6.0, targets=targets, dropout=0.1))
    names = {name.rpartition(".lora_")[0] for name in lora_tensors(learner.model)}
    assert {name.rpartition(".")[2] for name in names} == (set(targets) if targets == ["o_proj"] else DEFAULT[family])
    assert not any({"experts", "router", "gate", "shared_expert_gate"} & set(name.split(".")) for name in names)
    g = torch.Generator().manual_seed(0)
    for parameter in learner.parameters:
        parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=g))
    learner.save_adapter(tmp_path)
    check_adapter(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    for key in ("target_modules", "target_parameters"):
        assert saved[key] is None or saved[key] == sorted(set(saved[key]))
    theirs = peft.PeftModel.from_pretrained(make_base(family).model, str(tmp_path), autocast_adapter_dtype=False)
    adapted = {name.rpartition(".lora_")[0] for name, _ in theirs.named_parameters() if ".lora_A." in name}
    assert adapted == names
    samples = make_samples(((4, (6, 9)), (3, (5,))), holes=False)
    for sample, mine in zip(samples, learner.forward(samples), strict=True):
        ids = torch.tensor([(*sample.prompt_ids, *sample.completion_ids)])
        with torch.no_grad():
            logp = theirs(input_ids=ids).logits[0].log_softmax(-1)
        expected = [float(logp[t - 1, ids[0, t]]) for t in range(len(sample.prompt_ids), ids.shape[1])]
        assert mine == pytest.approx(expected, abs=ROUNDED)
    assert learner.forward(samples, reference=True)[0] != pytest.approx(learner.forward(samples)[0], abs=1e-2)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("qwen3_moe", ["q_proj", "down_proj"]),
        ("qwen3_moe", ["gate_up_proj"]),
        ("gpt_oss", ["experts.down_proj_bias"]),
        ("llama4_text", "experts"),
        ("llama4_text", ["lm_head"]),
    ],
)
def test_experts_and_routers_that_cannot_be_adapted(make_base, family: str, targets):
    model = share_weights(make_base(family).model)
    before = [name for name, _ in model.named_parameters()]
    with raises(ConfigError, field="train.lora.targets", kind="target"):
        add_lora(model, LoraSpec(targets=targets), seed=0)
    assert [name for name, _ in model.named_parameters()] == before


ROUTER = {"gpt_oss": "router"}
EXPERT_TARGETS = [
    "experts",
    ["all-linear", "experts"],
    ["experts.down_proj"],
    ["router", "o_proj"],
    ["experts", "router"],
]


@PADDED
@pytest.mark.parametrize("family", slow_but({"qwen3_moe", "gpt_oss"}, of=sorted(DEFAULT.keys() - {"llama4_text"})))
@pytest.mark.parametrize("targets", EXPERT_TARGETS, ids=str)
def test_peft_loads_an_adapter_of_experts_and_of_routers(make_base, make_samples, tmp_path: Path, family: str, targets):
    """In PEFT, the learner and the engine: the same log-probabilities, also after it was loaded again."""
    base, version = make_base(family), PolicyVersion("math", 1)
    targets = targets if targets == "experts" else [ROUTER.get(family, "gate") if x == "router" else x for x in targets]
    spec = LoraSpec(rank=3, alpha=6.0, targets=targets)
    learner = Learner(base, lora=spec)
    names = {name.rpartition(".lora_")[0] for name in lora_tensors(learner.model)}
    g = torch.Generator().manual_seed(0)
    for parameter in learner.parameters:
        parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=g))
    learner.save_adapter(tmp_path)
    check_adapter(tmp_path)
    theirs = peft.PeftModel.from_pretrained(make_base(family).model, str(tmp_path), autocast_adapter_dtype=False)
    assert {name.rpartition(".lora_")[0] for name, _ in theirs.named_parameters() if ".lora_A." in name} == names
    again = Learner(base, lora=spec.model_copy(update={"targets": tuple(adapted_names(tmp_path))}))
    again.load_adapter(tmp_path)
    samples = make_samples(((4, (6, 9)), (3, (5,))), holes=False)
    with closing(LocalEngine(base, max_rows=4)) as engine:
        engine.load(version, tmp_path)
        for sample, mine, loaded in zip(samples, learner.forward(samples), again.forward(samples), strict=True):
            ids = torch.tensor([(*sample.prompt_ids, *sample.completion_ids)])
            with torch.no_grad():
                logp = theirs(input_ids=ids).logits[0].log_softmax(-1)
            expected = [float(logp[t - 1, ids[0, t]]) for t in range(len(sample.prompt_ids), ids.shape[1])]
            assert mine == pytest.approx(expected, abs=ROUNDED) and loaded == mine
            scored = engine.score(sample.prompt_ids, sample.completion_ids, version)
            assert scored == pytest.approx(expected, abs=ROUNDED)
    assert learner.forward(samples, reference=True)[0] != pytest.approx(learner.forward(samples)[0], abs=1e-2)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])  # the two layouts of the parameters
def test_experts_and_routers_have_the_gradients_of_peft(make_base, tmp_path: Path, family: str):
    targets = ["experts", ROUTER.get(family, "gate")]
    model = make_base(family).model
    config = add_lora(model, LoraSpec(rank=3, alpha=6.0, targets=targets), seed=0)
    g = torch.Generator().manual_seed(0)
    for tensor in lora_tensors(model).values():
        tensor.data.copy_(0.3 * torch.randn(tensor.shape, generator=g))
    save_lora(model, config, tmp_path, base_name="tiny")
    theirs = peft.PeftModel.from_pretrained(
        make_base(family).model, str(tmp_path), is_trainable=True, autocast_adapter_dtype=False
    )
    ids = torch.arange(3, 14)[None]
    for each in (model, theirs):
        (
            each(input_ids=ids).logits.log_softmax(-1)[0, :-1] * torch.nn.functional.one_hot(ids[0, 1:], 280)
        ).sum().backward()
    gradients = {name.replace(".default.", "."): p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    mine = lora_tensors(model)
    assert (
        gradients.keys() == mine.keys() and len(mine) == 2 * 2 * 3
    )  # A and B, two layers, two parameters and a router
    for name, tensor in mine.items():
        assert tensor.grad is not None and tensor.grad.abs().max() > 0
        torch.testing.assert_close(tensor.grad, gradients[name], atol=1e-9, rtol=1e-6)


def test_dropout_acts_on_experts(make_base):
    """On the input of their adapters, while training only."""
    model = make_base("qwen3_moe").model
    add_lora(model, LoraSpec(rank=3, dropout=0.5, targets=["experts", "gate"]), seed=0)
    for tensor in lora_tensors(model).values():
        tensor.data.normal_()
    ids = torch.arange(3, 14)[None]
    with torch.no_grad():
        assert torch.equal(*(model.eval()(input_ids=ids).logits for _ in range(2)))
        assert not torch.equal(*(model.train()(input_ids=ids).logits for _ in range(2)))


def test_an_adapter_of_the_other_parameter_does_not_fit(make_base, tmp_path: Path):
    """Its tensors have the same names, and may have the same shapes: the targets say which parameter they are of."""
    base = make_base("mixtral", intermediate_size=32)
    model = share_weights(base.model)
    config = add_lora(model, LoraSpec(targets=["experts.down_proj"]), seed=0)
    save_lora(model, config, tmp_path, base_name="tiny")
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert saved["target_parameters"] == ["down_proj"]
    (tmp_path / "adapter_config.json").write_text(json.dumps(saved | {"target_parameters": ["gate_up_proj"]}))
    with raises(AdapterError):
        load_lora(model, config, tmp_path)


def test_experts_whose_forward_cannot_be_exchanged(make_base):
    model = make_base("llama4_text", moe_layers=[1]).model
    with raises(ConfigError, field="train.lora.targets", kind="target"):
        add_lora(model, LoraSpec(targets="experts"), seed=0)


@PADDED
def test_what_kernels_take_without_its_adapter_has_none(make_base, tmp_path: Path):
    """As PEFT has it."""
    base = make_base("mamba")
    learner = Learner(base, lora=LoraSpec(rank=2))
    assert {name.rpartition(".lora_")[0].rpartition(".")[2] for name in lora_tensors(learner.model)} == {
        "in_proj",
        "x_proj",
        "dt_proj",
    }
    learner.save_adapter(tmp_path)
    peft.PeftModel.from_pretrained(make_base("mamba").model, str(tmp_path))
    with raises(ConfigError, field="train.lora.targets", kind="target"):
        add_lora(share_weights(base.model), LoraSpec(targets=["in_proj", "out_proj"]), seed=0)


def test_a_router_that_is_a_linear_layer_is_adapted_where_it_is_named(make_base):
    model = share_weights(make_base("qwen2_moe").model)
    add_lora(model, LoraSpec(targets=["shared_expert_gate"]), seed=0)
    assert {name.split(".")[-3] for name in lora_tensors(model)} == {"shared_expert_gate"}


@pytest.mark.parametrize("spec", [LoraSpec(rank=4, alpha=7.0), LoraSpec(rank=3, alpha=7.0, targets=["q_proj"])])
def test_an_adapter_of_another_shape_is_refused(make_base, tmp_path: Path, spec: LoraSpec):
    model, config = an_adapted_model(make_base())
    save_lora(model, config, tmp_path, base_name="tiny")
    other, other_config = an_adapted_model(make_base(), spec=spec)
    before = [tensor.clone() for tensor in lora_tensors(other).values()]
    with raises(AdapterError):
        load_lora(other, other_config, tmp_path)
    assert all(map(torch.equal, before, lora_tensors(other).values()))


def test_an_adapter_of_another_scale_is_refused(make_base, tmp_path: Path):
    model, config = an_adapted_model(make_base())
    save_lora(model, config, tmp_path, base_name="tiny")
    other, other_config = an_adapted_model(make_base(), spec=LoraSpec(rank=3, alpha=14.0))
    with raises(AdapterError) as error:
        load_lora(other, other_config, tmp_path, alpha_field="lora_alpha")
    assert (error.value.field, error.value.hint) == ("lora_alpha", "set lora_alpha to the adapter's, 7.0")


def test_damaged_files(make_base, tmp_path: Path):
    model, config = an_adapted_model(make_base())
    with raises(AdapterError):
        load_lora(model, config, tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no")
    with raises(AdapterError):
        load_lora(model, config, tmp_path)
