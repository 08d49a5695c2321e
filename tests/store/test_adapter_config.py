"""What PEFT's configuration makes of an adapter's tensors: as PEFT has it, or refused; and whatever it says, soon."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path

import peft
import pytest
import regex
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file

from groupwise.engine.multi_lora import AdapterBank, read_adapter
from groupwise.errors import AdapterError
from groupwise.store import adapter_config
from groupwise.store.adapter_config import MAX_ALPHA, applied_scales, check_config
from groupwise.store.files import CONFIG, WEIGHTS, check_adapter
from wording import raises

PLAIN = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
Q = "model.layers.{}.self_attn.q_proj"


def refusal(ranks: dict[str, int], **options) -> str | None:
    config = PLAIN | options
    try:
        check_config(config)
        applied_scales(config, ranks)
    except AdapterError as error:
        return error.message
    return None


# ---- as PEFT has it ----
NAMES = st.sampled_from(
    ["q_proj", "v_proj", "self_attn.q_proj", "0.self_attn.v_proj", "model.layers.1.mlp.up_proj", "up_proj", "o_proj"]
)
KEYS = st.one_of(
    NAMES,
    st.sampled_from(
        ["^model.layers.0.self_attn.q_proj", "q.proj", "^q_proj", "layers.1.self_attn.q_proj", "proj", "."]
    ),
    st.sampled_from([r"layers.1.*.q_proj", r".*", r"(q|v)_proj", r"model\.layers\.\d\.self_attn\.[qv]_proj"]),
    st.sampled_from([".self_attn.q_proj", "....", "model.layers...self_attn.v_proj", "1.self.attn.q_proj"]),
)
OPTIONS = st.fixed_dictionaries(
    {
        "target_modules": st.one_of(
            st.just("all-linear"),
            st.lists(NAMES, max_size=3),
            st.sampled_from([r".*_proj", r".*layers\.0\..*_proj", r"model\.layers\.\d+\.self_attn\.(q|v)_proj"]),
        )
    },
    optional={
        "exclude_modules": st.one_of(st.lists(NAMES, max_size=2), st.sampled_from([r".*layers\.1.*", r".*q_proj"])),
        "layers_to_transform": st.sampled_from([0, 1, [0], [0, 1], [], [5]]),
        "layers_pattern": st.sampled_from(["layers", "blocks", ["h", "layers"], []]),
        "rank_pattern": st.dictionaries(KEYS, st.integers(1, 3), max_size=3),
        "alpha_pattern": st.dictionaries(KEYS, st.integers(1, 9), max_size=3),
        "use_rslora": st.booleans(),
        "target_parameters": st.lists(NAMES.map("{}.weight".format), max_size=2),
        "r": st.integers(1, 3),
    },
)


def adapted_by_peft(model, options: dict) -> dict[str, tuple[int, float]] | None:
    """Module -> (rank, scale), of what PEFT injects; None where it refuses the configuration."""
    try:
        config = peft.LoraConfig(**({"r": 2, "lora_alpha": 4, "task_type": "CAUSAL_LM"} | options))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            peft.inject_adapter_in_model(config, model)
    except ValueError:
        return None
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]
    return {name: (module.r["default"], module.scaling["default"]) for name, module in layers}


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(options=OPTIONS, saved=st.sets(NAMES, min_size=1, max_size=2), data=st.data())
def test_a_scale_is_pefts_or_the_adapter_is_refused(make_base, options, saved, data):
    """`saved`: the modules whose tensors are in the file, of the rank that PEFT expects, or of another. A weight
    that is named twice and has no tensors there is PEFT's to refuse: it changes nothing of what is served."""
    model = copy.deepcopy(make_base().model)
    linear = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear and name != "lm_head"]
    files = [name for name in linear if any(name == each or name.endswith(f".{each}") for each in saved)]
    assume({weight.removesuffix(".weight") for weight in options.get("target_parameters", ())} <= saved)
    theirs = adapted_by_peft(model, options)
    ranks = {name: (theirs or {}).get(name, (2, 0))[0] for name in files}
    if ranks and data.draw(st.integers(0, 3)) == 0:
        ranks[files[0]] += 1
    config = PLAIN | {"r": 2} | options
    try:
        check_config(config)
        ours = applied_scales(config, ranks)
    except AdapterError:
        assert theirs is None or any(theirs.get(name, (0, 0))[0] != rank for name, rank in ranks.items())
    else:
        assert theirs is not None
        assert {name: theirs[name] for name in files} == {name: (ranks[name], ours[name]) for name in files}


def test_what_the_engine_computes_is_what_peft_computes(make_base, tmp_path: Path):
    torch.manual_seed(0)
    patterns = {"rank_pattern": {"0.self_attn.v_proj": 3}, "alpha_pattern": {"^model.layers.1.self_attn.v_proj": 5}}
    options = {"layers_to_transform": [0, 1], "layers_pattern": "layers", "exclude_modules": ["mlp.up_proj"]}
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **patterns, **options)
    model = peft.get_peft_model(make_base().model, config)
    model.save_pretrained(str(tmp_path))
    check_adapter(tmp_path)
    weights = read_adapter(tmp_path, device=torch.device("cpu"))
    assert len(weights.pairs) == 4
    for name, (a, b) in weights.pairs.items():
        assert torch.allclose(
            (a @ b).T.double(), model.base_model.model.get_submodule(name).get_delta_weight("default")
        )


# ---- refused ----
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layers_to_transform": [0]}, "'model.layers.1.self_attn.q_proj': its layer is not in layers_to_transform"),
        ({"layers_to_transform": [0, 1], "layers_pattern": "h"}, "its layer is not in layers_to_transform"),
        ({"exclude_modules": ["1.self_attn.q_proj"]}, "exclude_modules names it"),
        ({"exclude_modules": r".*layers\.1.*"}, "exclude_modules names it"),
        ({"target_modules": ["v_proj"]}, "target_modules does not name it"),
        ({"target_modules": r".*\.v_proj"}, "target_modules does not name it"),
        ({"target_modules": None}, "target_modules is 'None'; it must say which modules"),
        ({"target_modules": []}, "target_modules is '[]'"),
        ({"target_modules": {"q_proj": 1}}, "it must be a list of names"),
        ({"target_modules": "(q_proj"}, "which is no regular expression"),
        ({"target_modules": "q_proj", "layers_to_transform": [0]}, "PEFT takes only one of the two"),
        ({"layers_pattern": "layers"}, "is set without layers_to_transform"),
        ({"layers_pattern": "(a+)+$", "layers_to_transform": 0}, "layers_pattern has '(a+)+$'"),
        ({"layers_to_transform": ["0"]}, "must be a list of the layers' numbers"),
        ({"rank_pattern": {"0.self_attn.q_proj": 3}}, "have rank 2 but r in adapter_config.json is 3"),
        ({"rank_pattern": {"q_proj": 2.5}}, "it must be a positive whole number"),
        ({"rank_pattern": {"q_proj": 0}}, "it must be a positive whole number"),
        ({"alpha_pattern": {"q_proj": 1e308}}, "it must be positive, up to 1e+06"),
        ({"alpha_pattern": {"q" * 600: 1}}, "a key has at most 512 characters"),
        ({"alpha_pattern": {"(q_proj": 1}}, "alpha_pattern has '(.*\\\\.)?((q_proj)', which is no regular expression"),
        ({"alpha_pattern": {f"q.*{i}": 1 for i in range(65)}}, "has more than 64 regular expressions"),
        ({"lora_alpha": 1e308}, "must be a positive number up to 1e+06"),
        ({"lora_alpha": True}, "lora_alpha is 'True'"),
        ({"modules_to_save": ["lm_head"]}, "whole layers are not served"),
        ({"bias": "all"}, "biases are not served"),
        ({"target_parameters": ["q_proj"]}, "only weights of linear layers, of routers and of fused experts"),
        ({"target_parameters": ["q_proj.weight"]}, "PEFT takes only one of the two"),
        ({"target_modules": [], "target_parameters": ["v_proj.weight"]}, "target_modules does not name it"),
        ({"lora_bias": True}, "'lora_bias' is set"),
        ({"init_lora_weights": "pissa"}, "changes the base weights"),
        ({"init_lora_weights": 1}, "changes the base weights"),
    ],
)
def test_what_peft_would_compute_otherwise_is_refused(options, said):
    assert said in (refusal({Q.format(0): 2, Q.format(1): 2}, **options) or "it was accepted")


def test_what_peft_computes_alike_is_taken():
    ranks = {Q.format(0): 2, Q.format(1): 2}
    for options in (
        {"layers_to_transform": [0, 1]},
        {"layers_to_transform": []},
        {"exclude_modules": ["v_proj"]},
        {"target_modules": "all-linear"},
        {"lora_alpha": MAX_ALPHA},
        {"r": 3, "rank_pattern": {"q_proj": 2}},
        {"init_lora_weights": "eva", "eva_config": None},
        {"use_rslora": True},
    ):
        assert refusal(ranks, **options) is None, options


def test_patterns_go_by_the_name_of_the_weight_where_the_weight_is_named():
    by_weight = {"target_modules": [], "target_parameters": ["q_proj.weight"], "layers_to_transform": [0]}
    assert refusal({Q.format(1): 2}, **by_weight) is None
    assert "have rank 2 but r" in (refusal({Q.format(1): 2}, **by_weight, rank_pattern={"q_proj.weight": 3}) or "")
    assert refusal({Q.format(1): 2}, **by_weight, rank_pattern={"q_proj": 3}) is None


def test_every_way_in_refuses_it(tmp_path: Path):
    """Not only an upload: a directory that is imported, a version that the engine loads."""
    key = f"base_model.model.{Q.format(0)}.lora_{{}}.weight"
    save_file({key.format("A"): torch.ones(2, 8), key.format("B"): torch.ones(8, 2)}, tmp_path / WEIGHTS)
    (tmp_path / CONFIG).write_text(json.dumps(PLAIN | {"layers_to_transform": [7]}))
    for read in (check_adapter, lambda path: read_adapter(path, device=torch.device("cpu"))):
        with raises(AdapterError):
            read(tmp_path)


@pytest.mark.parametrize("key", ["lora_embedding_A", "lora_magnitude_vector.weight", "lora_A.default.weight", "weight"])
def test_tensors_that_are_no_halves_are_refused(tmp_path: Path, key: str):
    name = f"base_model.model.{Q.format(0)}"
    tensors = {f"{name}.lora_A.weight": torch.ones(2, 8), f"{name}.lora_B.weight": torch.ones(8, 2)}
    save_file(tensors | {f"{name}.{key}": torch.ones(2, 2)}, tmp_path / WEIGHTS)
    (tmp_path / CONFIG).write_text(json.dumps(PLAIN))
    with raises(AdapterError):
        check_adapter(tmp_path)


def test_an_embedding_is_no_linear_module(make_base):
    """It has a weight of two dimensions as well, and PEFT adapts it in another way."""
    model = make_base().model
    outer, inner = model.get_input_embeddings().weight.shape
    weights = type("Weights", (), {"pairs": {"model.embed_tokens": (torch.ones(outer, 2), torch.ones(2, inner))}})()
    with raises(AdapterError):
        AdapterBank(model).prepare(weights)


# ---- soon ----
def test_patterns_and_modules_do_not_multiply(monkeypatch):
    """45,000 patterns for 2,000 modules once took minutes: each name was tried with each expression."""
    modules = {f"model.layers.{i}.self_attn.q_proj": 2 for i in range(2000)}
    many = {f"model.layers.{i}.self_attn.v_proj": 8 for i in range(45_000)} | {"layers.7.self_attn.q_proj": 16}
    looked, hits = [0], adapter_config._Patterns._hits

    def counted(self, text, *, whole):
        looked[0] += len(self._shapes.get(len(text), ()))
        return hits(self, text, whole=whole)

    monkeypatch.setattr(adapter_config._Patterns, "_hits", counted)
    config = PLAIN | {"alpha_pattern": many, "rank_pattern": dict.fromkeys(many, 2)}
    check_config(config)
    scales = applied_scales(config, modules)
    assert scales["model.layers.7.self_attn.q_proj"] == 8.0 and set(scales.values()) == {2.0, 8.0}
    assert looked[0] < 20 * len(modules)


def test_patterns_of_all_shapes_are_refused():
    odd = {"".join("." if i >> b & 1 else "x" for b in range(12)): 8 for i in range(1024)}
    assert "more than 256 shapes" in (refusal({Q.format(0): 2}, alpha_pattern=odd) or "")


def test_expressions_and_modules_do_not_multiply(monkeypatch):
    """64 expressions that are each quick, for 32,768 modules, once took 47 s of a processor: the time for all together
    was up, and each was still tried."""
    monkeypatch.setattr(adapter_config, "MATCHING_S", 0.02)
    tried, fullmatch = [0], regex.fullmatch

    def counted(*args, **kwargs):
        tried[0] += 1
        return fullmatch(*args, **kwargs)

    monkeypatch.setattr(adapter_config.regex, "fullmatch", counted)
    quick = {f"(model|x)[.](layers|y)[.]([0-9]+){{1,3}}[.]k{i}": 2 for i in range(64)}
    modules = {f"model.layers.{i}.self_attn.q_proj": 2 for i in range(2000)}
    for option in ("rank_pattern", "alpha_pattern"):
        said = refusal(modules, target_modules="all-linear", **{option: quick})
        assert "takes too long to match" in (said or "") and option in (said or "")
    assert 0 < tried[0] < 64 * len(modules)


def test_an_expression_that_would_take_for_ever_is_given_up(monkeypatch):
    monkeypatch.setattr(adapter_config, "MATCHING_S", 0.2)
    name = "a" * 60 + "!"
    for options in (
        {"target_modules": r"(a|aa)+[^a!]"},
        {"target_modules": [name], "exclude_modules": r"(a|aa)+[^a!]"},
        {"target_modules": [name], "alpha_pattern": {r"(a|aa)+[^a!]": 3}},
    ):
        assert "takes too long to match" in (refusal({name: 2}, **options) or "")
    assert "the limit is 8,192" in (refusal({Q.format(0): 2}, target_modules="a" * 9000) or "")
