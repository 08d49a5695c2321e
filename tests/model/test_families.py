"""One family of each kind of model: sampler, trainer and PEFT agree on an adapter, and the gradient is transformers'.
`tests/slow/test_models.py` has all families."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, Qwen3NextConfig

from family_checks import GROUPS, agreement, gradient_gap
from groupwise.errors import ModelError
from groupwise.model import packed_check
from groupwise.model.packed_check import plain_forward_gap, turn_plain, ways_of
from model_families import FAMILIES
from slow_cases import slow_but
from wording import raises

DOCS = Path(__file__).parents[2] / "docs"
HOW = "if this is meant, write docs/models.json anew (the head of tests/slow/test_models.py says how)"
PACKED = ("qwen3_moe", "gemma4", "smollm3", "gpt_neox")
PLAIN = ("gpt_oss", "llama4_text", "deepseek_v3", "qwen3_next", "lfm2", "falcon_h1", "granitemoehybrid", "mamba")


@pytest.mark.parametrize(
    "family", slow_but({"qwen3_moe", "gemma4", "gpt_oss", "deepseek_v3", "falcon_h1"}, of=(*PACKED, *PLAIN))
)
def test_sampler_trainer_and_peft_agree_on_an_adapter(make_base, tmp_path: Path, family: str) -> None:
    """On prompts of several lengths, in float32; where the model cannot run packed, by its own forward."""
    base, again = (make_base(family, dtype=torch.float32) for _ in range(2))
    found = agreement(base, again, tmp_path)
    assert found.gap < FAMILIES[family].rounding and found.peft_gap < 1e-4
    measured = ("gap", "peft_gap")
    known = json.loads((DOCS / "models.json").read_text(encoding="utf-8"))["families"][family]
    for name, value in asdict(found).items():
        assert name in measured or known[name] == (list(value) if name == "targets" else value), HOW


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_next", "deepseek_v3", "falcon_h1", "mamba"])
def test_a_configuration_says_how_its_model_will_run(make_base, family: str) -> None:
    """Tried on a small random model of it, with the outcome that the model itself has."""
    found = ways_of(make_base(family).model.config)
    known = json.loads((DOCS / "models.json").read_text(encoding="utf-8"))["families"][family]
    assert found.architecture == known["class"] and sorted(found.adapted) == known["targets"]
    assert (found.why_not_packed is None) == (known["trained"] == "packed")
    assert (found.why_not_cached is None) == (known["sampled"] != "own forward, no cache")
    assert ("in packed rows" in str(found)) == (known["trained"] == "packed")


def test_a_model_that_looks_ahead_is_refused() -> None:
    """Beyond its window Doge's attention picks the keys that matter among all, also those of later tokens."""
    config = CONFIG_MAPPING["doge"]()
    small = packed_check._small_model(config)
    assert plain_forward_gap(small) > 0.5
    with pytest.raises(ModelError):
        turn_plain(small)
    with pytest.raises(ModelError):
        ways_of(config)


@pytest.mark.long
@pytest.mark.parametrize("family", slow_but(["deepseek_v32"], of=("deepseek_v32", "glm_moe_dsa")))
def test_sparse_attention_is_judged_by_what_it_does(family: str) -> None:
    """Their indexer looked ahead in some versions of transformers and does not in others."""
    config = CONFIG_MAPPING[family]()
    small = packed_check._small_model(config)
    causal = plain_forward_gap(small) <= packed_check.packed_tolerance(small)
    if causal:
        assert ways_of(config).why_not_packed is not None
    else:
        with pytest.raises(ModelError):
            ways_of(config)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "deepseek_v3", "mamba"])
def test_what_follows_a_row_changes_nothing_in_it(make_base, family: str) -> None:
    model = make_base(family, dtype=torch.float64).model
    assert plain_forward_gap(model) <= packed_check.packed_tolerance(model)


def test_the_small_model_of_a_large_configuration_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 80 billion parameters, of which a four-hundredth is made."""
    config, made = Qwen3NextConfig(), []
    monkeypatch.setattr(packed_check, "head_gap", lambda model: made.append(model) or 0.0)
    monkeypatch.setattr(packed_check, "why_not_packed", lambda model: "this test says so")
    monkeypatch.setattr(packed_check, "why_not_cached", lambda model: None)
    assert ways_of(config).architecture == "Qwen3NextForCausalLM"
    assert made and all(sum(p.numel() for p in model.parameters()) < 2e8 for model in made)
    assert config == Qwen3NextConfig()


@pytest.mark.parametrize("kind", ["falcon_h1", "bamba", "mamba", "mamba2"])
def test_the_small_model_of_a_state_space_model_is_small(kind: str) -> None:
    """Of the sizes of published ones, whose heads make up a multiple of the hidden size."""
    model = packed_check._small_model(CONFIG_MAPPING[kind]())
    assert sum(p.numel() for p in model.parameters()) < 3e7


def test_a_model_that_cannot_be_made_small_is_not_tried(make_base, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_check, "_MOST_PARAMETERS", 1000)
    with raises(ValueError):
        ways_of(make_base("qwen3", context=80).model.config)  # which no other test tries


def test_the_page_of_models_is_what_the_script_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    import generate_models

    data = json.loads(generate_models.DATA.read_text(encoding="utf-8"))["families"]
    assert list(data) == list(FAMILIES) and {key: row["name"] for key, row in data.items()} == {
        key: family.name for key, family in FAMILIES.items()
    }, HOW
    text = generate_models.TARGET.read_text(encoding="utf-8")
    assert generate_models.page(text) == text, "run: python docs/generate_models.py"
    for row in data.values():
        assert f"| {row['name']} | `{row['class']}` | {row['sampled']} | {row['trained']} |" in text


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "qwen3_next"])
def test_the_gradient_is_that_of_transformers_and_peft(make_base, make_samples, tmp_path: Path, family: str) -> None:
    """Packed or padded rows of several samples against one row after another, in float64."""
    base, again = (make_base(family) for _ in range(2))
    assert gradient_gap(base, again, make_samples(GROUPS), tmp_path) < 1e-6
