"""A base in 4 or 8 bits: what is quantised, that sampler and trainer compute with the same weights, gradients."""

from __future__ import annotations

import copy
import io
from contextlib import closing
from pathlib import Path

import peft
import pytest
import torch
from torch import nn

from cli_project import save_model
from groupwise.algo.loss import resolve_loss
from groupwise.config.lora import LoraSpec
from groupwise.config.run import parse_config
from groupwise.config.serve import serve_config
from groupwise.engine.local import LocalEngine
from groupwise.errors import ConfigError, ModelError
from groupwise.model.load import LoadedModel, load_model, share_weights, wrap_model
from groupwise.model.memory import memory
from groupwise.model.quantized import FourBitLinear, QuantizedLinear, dequantize, parameter_count, quantized_layers
from groupwise.run import worker
from groupwise.run.job_queue import load_base
from groupwise.run.loop import run_loop
from groupwise.run.memory_budget import load_of
from groupwise.server.supervisor import worker_command
from groupwise.store.adapters import AdapterStore
from groupwise.store.mapped_weights import is_mapped, map_weights
from groupwise.train.data_parallel import DataParallel
from groupwise.train.fully_sharded import FullySharded
from groupwise.train.learner import Learner
from groupwise.train.lora import lora_tensors
from groupwise.types import PolicyVersion, Sample, SamplingParams, SamplingRequest
from job_place import Place, groups
from rank_pairs import on_ranks
from running_jobs import Dies, adapter_bytes, config, metrics_of
from wording import raises

FAMILIES = ("qwen3", "llama", "gemma3", "qwen3_moe", "gpt_oss", "qwen3_next")
KINDS = ("nf4", "int8")
GRPO = resolve_loss("grpo", kl="k3", kl_coeff=0.1)


@pytest.fixture
def bitsandbytes():
    """Skips where the package is not installed."""
    return pytest.importorskip("bitsandbytes")


@pytest.fixture(scope="module")
def load(make_base, tmp_path_factory: pytest.TempPathFactory):
    """`load("qwen3", "nf4")`: a tiny random model, saved and loaded as a user would have it."""
    places: dict[str, Path] = {}

    def make(family: str, kind: str | None, dtype: str = "float32") -> LoadedModel:
        if family not in places:
            base = make_base(family, dtype=torch.float32, context=128)
            places[family] = save_model(base, tmp_path_factory.mktemp(family))
        return load_model(str(places[family]), device="cpu", dtype=dtype, quantization=kind)

    return make


def dequantized(base: LoadedModel) -> LoadedModel:
    """An ordinary model with the same weights."""
    model = copy.deepcopy(base.model)
    dequantize(model, model.dtype)
    return wrap_model(model, base.tokenizer, name=base.name)


def asked(version: PolicyVersion, prompt: tuple[int, ...] = (5, 6, 7), *, n: int = 3) -> SamplingRequest:
    return SamplingRequest(prompt_ids=prompt, n=n, params=SamplingParams(max_tokens=12, seed=1), version=version)


# -- what is quantised -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_linear_layers_are_quantised_and_nothing_else(bitsandbytes, load, family: str, kind: str) -> None:
    plain, base = load(family, None), load(family, kind)
    modules = dict(base.model.named_modules())
    quantised = {name for name, module in modules.items() if isinstance(module, QuantizedLinear)}
    routed = {name for name in quantised if "router" in name or name.endswith(("mlp.gate", "shared_expert_gate"))}
    assert quantised == set(plain.adaptable.all_linear) and not routed
    assert type(base.model.get_output_embeddings()) is nn.Linear
    assert base.quantization == kind and plain.quantization is None and base.hash != plain.hash
    assert base.adaptable.all_linear == plain.adaptable.all_linear
    assert (
        parameter_count(base.model) == parameter_count(plain.model) == sum(p.numel() for p in plain.model.parameters())
    )
    for name, module in modules.items():
        if isinstance(module, QuantizedLinear):
            weight = plain.model.get_submodule(name).weight
            worst = {"nf4": 0.17, "int8": 0.006}[kind] * weight.abs().max()  # half the widest step of the levels
            assert float((module.dequantized(torch.float32) - weight).abs().max()) <= worst
            assert torch.equal(module.dequantized(torch.float64).float(), module.dequantized(torch.float32))


def test_bits_of_a_weight(bitsandbytes) -> None:
    """Bytes of the starter's matrices: half a byte and a 64th of one, and one."""
    matrices = {kind: load_model("starter", device="cpu", quantization=kind) for kind in KINDS}
    values = sum(layer.in_features * layer.out_features for layer in quantized_layers(matrices["nf4"].model))
    for kind, expected in (("nf4", 0.5 + 1 / 64), ("int8", 1.0)):
        stored = sum(
            p.numel() * p.itemsize for layer in quantized_layers(matrices[kind].model) for p in layer.parameters()
        )
        assert stored / values == pytest.approx(expected, abs=0.05)  # and the scales of scales, the levels


def test_levels_are_those_of_bitsandbytes(bitsandbytes) -> None:
    """Quantising and dequantising by the package's own functions gives the very same weights."""
    functional = bitsandbytes.functional
    plain, base = (load_model("starter", device="cpu", quantization=kind).model for kind in (None, "nf4"))
    name = "model.layers.0.mlp.down_proj"
    packed, state = functional.quantize_4bit(
        plain.get_submodule(name).weight.data, quant_type="nf4", compress_statistics=True
    )
    expected = functional.dequantize_4bit(packed, state)
    assert torch.equal(base.get_submodule(name).dequantized(torch.float32), expected)


@pytest.mark.parametrize("shape", [(96, 32), (64, 160), (7, 33), (5, 64)], ids=str)
def test_rows_that_are_not_whole_blocks(bitsandbytes, shape: tuple[int, int]) -> None:
    """Against the table of levels, block by block, whatever the width of a row is."""
    layer = bitsandbytes.nn.Linear4bit(shape[1], shape[0], bias=False, quant_type="nf4", compress_statistics=False)
    layer.weight = bitsandbytes.nn.Params4bit(
        torch.randn(shape), requires_grad=False, quant_type="nf4", compress_statistics=False
    )
    layer = FourBitLinear(layer.to("cpu"))
    packed, count = layer.weight.view(-1), shape[0] * shape[1]
    index = torch.stack([packed >> 4, packed & 15], -1).view(-1)[:count].long()
    expected = layer.code[index] * layer.absmax.repeat_interleave(64)[:count]
    assert torch.equal(layer.dequantized(torch.float32), expected.view(shape))


def test_without_the_package_the_error_names_the_extra(monkeypatch) -> None:
    monkeypatch.setattr("groupwise.model.quantized.importlib.util.find_spec", lambda name: None)
    for kind in KINDS:
        with raises(ModelError) as caught:
            load_model("starter", quantization=kind)
        assert caught.value.hint == "pip install 'groupwise[quantized]'"


def test_a_model_without_linear_layers_is_refused(bitsandbytes, load) -> None:
    with raises(ModelError):
        load("gpt2", "nf4")


def test_a_checkpoint_that_was_saved_quantised_is_loaded_as_it_is(bitsandbytes, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from groupwise.config.run import STARTER_DIR

    options = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model = AutoModelForCausalLM.from_pretrained(STARTER_DIR, quantization_config=options, device_map={"": "cpu"})
    model.save_pretrained(tmp_path)
    load_model("starter").tokenizer.save_pretrained(tmp_path)
    base = load_model(str(tmp_path), device="cpu")
    assert base.quantization == "nf4"
    mine, theirs = (list(quantized_layers(each.model)) for each in (base, load_model("starter", quantization="nf4")))
    assert len(mine) == len(theirs) and all(
        torch.equal(a.dequantized(torch.float32), b.dequantized(torch.float32))
        for a, b in zip(mine, theirs, strict=True)
    )
    with raises(ModelError):
        load_model(str(tmp_path), quantization="int8")


def test_other_quantised_checkpoints_are_refused(make_base, tmp_path: Path) -> None:
    base = make_base("qwen3", dtype=torch.float32)
    base.model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    base.model.config.save_pretrained(tmp_path)
    with raises(ModelError):
        load_model(str(tmp_path))


# -- it computes as an ordinary model with these weights ---------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:.*recurrent layers.*:UserWarning")
def test_loss_and_gradients_are_those_of_the_dequantised_weights(
    bitsandbytes, load, make_samples, family: str, kind: str
) -> None:
    base = load(family, kind)
    samples, results = make_samples(((5, (4, 6)), (3, (7,)))), []
    for each in (base, dequantized(base)):
        learner = Learner(each, lora=LoraSpec(rank=4), seed=3)
        for name, tensor in lora_tensors(learner.model).items():
            if "lora_B" in name:
                tensor.data.copy_(torch.linspace(-0.1, 0.1, tensor.numel()).view_as(tensor))
        logprobs = torch.tensor([x for row in learner.forward(samples) for x in row])
        learner.forward_backward(samples, GRPO)
        results.append((learner.packed, logprobs, [p.grad for p in learner.parameters]))
    (packed, mine, gradients), (expected_packed, expected, expected_gradients) = results
    assert packed == expected_packed
    assert torch.allclose(mine, expected, atol=1e-5)
    scale = max(float(g.abs().max()) for g in expected_gradients)
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        assert float((gradient - wanted).abs().max()) <= 1e-5 * max(scale, 1.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:.*recurrent layers.*:UserWarning")
def test_sampler_and_trainer_agree(bitsandbytes, load, make_adapter, family: str, kind: str) -> None:
    """Also where adapters and the base share a batch: nothing of a row depends on what is beside it."""
    base = load(family, kind)
    directories = {PolicyVersion("a", n): make_adapter(base, seed=n) for n in (1, 2)}
    requests = [asked(version) for version in (*directories, PolicyVersion.base())]
    with closing(LocalEngine(base, max_rows=16)) as engine:
        for version, directory in directories.items():
            engine.load(version, directory)
        groups = engine.generate(requests)
        alone = [engine.generate([request])[0] for request in requests]
    for request, group, same in zip(requests, groups, alone, strict=True):
        assert [c.token_ids for c in group] == [c.token_ids for c in same]
        learner = Learner(base, lora=LoraSpec(rank=3, alpha=6.0))
        if not request.version.is_base:
            learner.load_adapter(directories[request.version])
        samples = [
            Sample(
                prompt_ids=request.prompt_ids, completion_ids=c.token_ids, mask=(1,) * len(c.token_ids), advantage=0.0
            )
            for c in group
        ]
        for completion, logprobs in zip(group, learner.forward(samples), strict=True):
            assert logprobs == pytest.approx(completion.logprobs, abs=1e-4)


@pytest.mark.parametrize("options", [{}, {"dropout": 0.1}], ids=str)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_trains_in_bfloat16(bitsandbytes, load, make_samples, checkpointing: bool, options: dict) -> None:
    """PEFT's own way through the layers: adapters are float32, the base's products 16 bits."""
    base, samples = load("qwen3", "nf4", "bfloat16"), make_samples(((5, (4, 6)), (3, (7,))))
    learner = Learner(base, lora=LoraSpec(rank=4, **options), gradient_checkpointing=checkpointing)
    before = learner.forward(samples)
    metrics = learner.step(samples, resolve_loss("grpo"), learning_rate=1e-2)
    assert metrics["optim/grad_norm"] > 0 and learner.forward(samples) != before
    assert {p.dtype for p in learner.parameters} == {torch.float32}


def test_checkpointed_and_autocast_gradients(bitsandbytes, load, make_samples) -> None:
    base, samples, gradients = load("qwen3", "nf4"), make_samples(((5, (4, 6)), (3, (7,)))), []
    for options in ({}, {"gradient_checkpointing": True}, {"autocast": torch.bfloat16}):
        learner = Learner(base, lora=LoraSpec(rank=4), **options)
        learner.forward_backward(samples, GRPO)
        gradients.append(torch.cat([p.grad.flatten() for p in learner.parameters]))
    exact, checkpointed, mixed = gradients
    assert torch.allclose(checkpointed, exact, atol=1e-6)
    assert float(torch.cosine_similarity(mixed, exact, dim=0)) > 0.99


def test_backward_keeps_no_dequantised_weights(bitsandbytes, load) -> None:
    """What autograd holds of a layer is its input, not a matrix in full width for each layer."""
    model = load("qwen3", "nf4").model
    layer = next(quantized_layers(model))
    kept: list[torch.Tensor] = []
    x = torch.randn(3, layer.in_features, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = layer(x)
    assert not [tensor for tensor in kept if tensor.numel() >= layer.in_features * layer.out_features]
    y.sum().backward()
    assert torch.allclose(x.grad, layer.dequantized(torch.float32).sum(0).expand(3, -1), atol=1e-5)


# -- weights are there once, and are published, resumed, shared --------------------------------------------------------


def test_engine_and_learner_share_the_bits(bitsandbytes, load) -> None:
    base = load("qwen3", "nf4")
    twin = share_weights(base.model)
    mine, theirs = dict(base.model.named_parameters()), dict(twin.named_parameters())
    assert mine.keys() == theirs.keys() and all(mine[name] is theirs[name] for name in mine)


def test_processes_map_the_same_file(bitsandbytes, load, tmp_path: Path) -> None:
    base, other = load("qwen3", "nf4"), load("qwen3", "nf4")
    expected = [layer.dequantized(torch.float32) for layer in quantized_layers(base.model)]
    assert map_weights(base, tmp_path) and map_weights(other, tmp_path) and is_mapped(other.model)
    assert len(list(tmp_path.glob("base-*.safetensors"))) == 1
    mapped = [layer.dequantized(torch.float32) for layer in quantized_layers(other.model)]
    assert all(torch.equal(a, b) for a, b in zip(mapped, expected, strict=True))


def test_peft_loads_what_is_published(bitsandbytes, load, make_samples, tmp_path: Path) -> None:
    base, (sample,) = load("qwen3", "nf4"), make_samples(((4, (6,)),), holes=False)
    learner = Learner(base, lora=LoraSpec(rank=4))
    learner.step([sample], resolve_loss("grpo"), learning_rate=1e-2)
    learner.save_adapter(tmp_path)
    theirs = peft.PeftModel.from_pretrained(dequantized(base).model, str(tmp_path))
    ids = torch.tensor([(*sample.prompt_ids, *sample.completion_ids)])
    with torch.no_grad():
        logp = theirs(input_ids=ids).logits[0].log_softmax(-1)
    assert learner.forward([sample])[0] == pytest.approx(
        [float(logp[t - 1, ids[0, t]]) for t in range(4, 10)], abs=1e-5
    )


def test_a_run_is_resumed_with_the_same_bytes(bitsandbytes, tmp_path: Path) -> None:
    whole = run_loop(config(tmp_path / "whole", quantization="nf4")).run_dir
    display = Dies(4, total=6, stream=io.StringIO())
    with pytest.raises(Dies.Now):
        run_loop(config(tmp_path / "dies", resume="auto", quantization="nf4"), display=display)
    resumed = run_loop(config(tmp_path / "dies", resume="auto", quantization="nf4")).run_dir
    assert adapter_bytes(resumed) == adapter_bytes(whole)
    assert len(metrics_of(whole)) == 6 and all(row["mismatch/logprob_diff_mean"] < 1e-5 for row in metrics_of(whole))
    store = AdapterStore(whole / "adapters")
    info = store.info(store.active)
    assert info.quantization == "nf4" and info.base_hash == load_model("starter", quantization="nf4").hash


# -- what does not go together -----------------------------------------------------------------------------------------

BASE = {"data": {"source": "x.jsonl"}, "rewards": ["length"], "quantization": "nf4"}


@pytest.mark.parametrize(
    "change",
    [
        {"train": {"lora": None}},
        {"engine": "vllm"},
        {"train": {"parallel": "fsdp"}},
        {"quantization": "int4"},
    ],
)
def test_refused_in_a_run(change: dict) -> None:
    with raises(ConfigError, field="quantization"):
        parse_config(BASE | change)


def test_refused_by_a_server_and_by_a_learner(bitsandbytes, load) -> None:
    with raises(ConfigError):
        serve_config({"quantization": "int8", "engine": "vllm"})
    with raises(ConfigError):
        Learner(load("qwen3", "nf4"), lora=None)


def test_compiling_says_why_not(bitsandbytes, load) -> None:
    base = load("qwen3", "nf4")
    with (
        pytest.warns(UserWarning, match="rollout.compile cannot be used .* the weights are quantised"),
        closing(LocalEngine(base, max_rows=4, compile=True)) as engine,
    ):
        assert len(engine.generate([asked(PolicyVersion.base())])[0]) == 3


# -- jobs of a server, ranks, memory -----------------------------------------------------------------------------------


def test_a_job_of_a_server_publishes_for_the_same_base(bitsandbytes, load, tmp_path: Path) -> None:
    base = load("qwen3", "nf4")
    place = Place(tmp_path, base)
    version = place.version(place.do(groups()))
    info = place.store.info(version)
    assert (info.quantization, info.base_hash) == ("nf4", base.hash)
    with closing(LocalEngine(base, max_rows=4)) as engine:
        engine.load(version, place.store.path(version))
        assert len(engine.generate([asked(version)])[0]) == 3


def test_the_worker_is_told_and_shares_the_weights(bitsandbytes, load, tmp_path: Path) -> None:
    words = worker_command(state_dir=tmp_path, model="starter", dtype="auto", device="cpu", quantization="nf4")
    options = worker._options(words[3:])
    loaded, shared = load_base(
        options.model, dtype="float32", device="cpu", weights=None, owner=0, quantization=options.quantization
    )
    assert loaded.quantization == "nf4" and not shared
    assert "--quantization" not in worker_command(state_dir=tmp_path, model="starter", dtype="auto", device="cpu")


def test_two_ranks_train_what_one_trains(bitsandbytes, load, make_samples) -> None:
    base, samples = load("qwen3", "nf4"), make_samples(((5, (4, 6)), (3, (7,)), (2, (3, 5))))

    def trained(strategy=None):
        learner = Learner(base, lora=LoraSpec(rank=4), seed=1, strategy=strategy)
        for _ in range(2):
            learner.step(samples, GRPO, learning_rate=1e-2)
        return [p.detach().clone() for p in learner.parameters]

    alone = trained()
    for theirs in on_ranks(lambda ranks: trained(DataParallel(ranks))):
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(theirs, alone, strict=True))


def test_fsdp_says_why_not(bitsandbytes, load) -> None:
    base = load("qwen3", "nf4")

    def work(ranks):
        with raises(ConfigError):
            Learner(base, strategy=FullySharded(ranks))
        return True

    assert on_ranks(work) == [True, True]


def test_the_estimate_counts_what_is_stored(bitsandbytes) -> None:
    loads = {}
    run = parse_config({"data": {"source": "x.jsonl"}, "rewards": ["length"]})
    for kind in (None, *KINDS):
        base = load_model("starter", device="cpu", quantization=kind)
        loads[kind] = load_of(run, base, Learner(base), longest_prompt=32, reads_reference=False)
        stored = sum(p.numel() * p.itemsize for p in base.model.parameters())
        assert memory(run, loads[kind]).weights == stored
        assert loads[kind].model.parameters == loads[None].model.parameters
        largest = max((q.in_features * q.out_features * 4 for q in quantized_layers(base.model)), default=0)
        assert loads[kind].model.product == largest
    assert memory(run, loads["nf4"]).weights < memory(run, loads["int8"]).weights < memory(run, loads[None]).weights
    assert memory(run, loads["nf4"]).merged == 0 < memory(run, loads[None]).merged
