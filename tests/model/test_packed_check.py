"""Models whose attention depends on length: right in packed rows, or known not to be before any use."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import closing

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Qwen2MoeConfig
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.ministral3 import modeling_ministral3

from groupwise.engine.local import LocalEngine
from groupwise.errors import ContextLengthError, ModelError
from groupwise.model import packed_check
from groupwise.model.activations import ModelSize
from groupwise.model.attention import ATTENTION
from groupwise.model.load import LoadedModel, longest_row, share_weights
from groupwise.model.packed_check import (
    LENGTH,
    LONG,
    SHORT,
    head_gap,
    packed_forward_gap,
    small_twin,
    ways_of,
    why_not_packed,
)
from groupwise.train.learner import Learner
from groupwise.types import PolicyVersion, SamplingParams, SamplingRequest
from wording import raises, warns

BEYOND = 12  # tokens: more than any row of SHORT, fewer than the rows below
GROUPS = ((15, (9, 21, 4)), (6, (14,)), (2, (3, 17)))
SLIDING = {"sliding_window": BEYOND, "layer_types": ["sliding_attention", "full_attention"]}
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [7.0] * 4}
DYNAMIC_ROPE = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
FAMILIES = {
    "qwen2_moe": {"use_sliding_window": True, **SLIDING},
    "qwen2": {"use_sliding_window": True, **SLIDING},
    "mistral": {"sliding_window": BEYOND},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": BEYOND,
            "llama_4_scaling_beta": 0.5,
        }
    },
    "llama4_text": {"attention_chunk_size": BEYOND, "floor_scale": BEYOND, "attn_temperature_tuning": True},
    "gpt_oss": {"sliding_window": BEYOND},
    "deepseek_v3": {},
}
UNPACKED = {"llama4_text": "chunks of 12 tokens"}


def own_logprobs(base: LoadedModel, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
    """By transformers' forward on this row alone."""
    with torch.no_grad():
        logits = base.model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[range(len(completion)), list(completion)].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_beyond_the_lengths_of_a_configuration(make_base, make_samples, family: str):
    base, samples = make_base(family, **FAMILIES[family]), make_samples(GROUPS, holes=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        learner = Learner(base)
    said = " ".join(str(warning.message) for warning in caught)
    assert learner.packed == (family not in UNPACKED) and UNPACKED.get(family, "") in said
    for sample, mine in zip(samples, learner.forward(samples), strict=True):
        assert mine == pytest.approx(own_logprobs(base, sample.prompt_ids, sample.completion_ids), abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_samples_beyond_them(make_base, family: str):
    base = make_base(family, **FAMILIES[family])
    prompt = tuple(range(3, 20))
    request = SamplingRequest(
        prompt_ids=prompt, n=2, params=SamplingParams(max_tokens=20, seed=1), version=PolicyVersion.base()
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = LocalEngine(base, max_rows=4)
    said = " ".join(str(warning.message) for warning in caught)
    assert engine.packed == (family not in UNPACKED) and UNPACKED.get(family, "") in said
    with closing(engine):
        (completions,) = engine.generate([request])
    for completion in completions:
        assert completion.logprobs == pytest.approx(own_logprobs(base, prompt, completion.token_ids), abs=1e-4)


def test_a_mask_that_is_wrong_only_beyond_a_length_is_found_out(make_base, make_samples, monkeypatch):
    base, samples = make_base("qwen2_moe", **FAMILIES["qwen2_moe"]), make_samples(GROUPS, holes=False)
    monkeypatch.setattr("groupwise.model.packed_check._WHY", {})  # the code is another from here on
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, ATTENTION, lambda **options: None)
    assert packed_forward_gap(share_weights(base.model), rows=SHORT) < 1e-6
    with warns():
        learner = Learner(base)
    for sample, mine in zip(samples, learner.forward(samples), strict=True):
        assert mine == pytest.approx(own_logprobs(base, sample.prompt_ids, sample.completion_ids), abs=1e-5)
    with warns():
        LocalEngine(base)


def test_a_scale_that_counts_places_in_the_packed_row_is_found_out(make_base, monkeypatch):
    """As Llama 4's does; beyond a length that no short row reaches, packed or not."""
    rope = FAMILIES["ministral3"]["rope_parameters"] | {"original_max_position_embeddings": 64}
    base = make_base("ministral3", context=128, rope_parameters=rope)
    plain = modeling_ministral3.get_llama_4_attn_scale
    places = lambda x: torch.arange(x.shape[-1])[None].expand_as(x)  # noqa: E731
    assert why_not_packed(share_weights(base.model)) is None
    monkeypatch.setattr(modeling_ministral3, "get_llama_4_attn_scale", lambda x, *rest: plain(places(x), *rest))
    assert packed_forward_gap(share_weights(base.model), rows=SHORT) < 1e-6
    assert "beyond the lengths" in str(why_not_packed(share_weights(base.model)))


# ---- ropes that depend on the length of the row ----


GROWING = {
    "phi3": {"context": 64, "original_max_position_embeddings": BEYOND, "rope_parameters": LONG_ROPE},
    "mistral": {"context": BEYOND, "sliding_window": None, "rope_parameters": DYNAMIC_ROPE},
}


@pytest.mark.parametrize("family", GROWING)
def test_a_rope_that_depends_on_the_row_ends_the_context(make_base, make_samples, family: str):
    """Up to there packed rows are right, beside any others; a longer row is refused by everybody."""
    base = make_base(family, **GROWING[family])
    assert base.context_length == longest_row(base.model.config) == BEYOND
    learner = Learner(base)
    assert learner.packed
    fits = make_samples(((5, (7, 2)), (9, (3,)), (1, (11,))), holes=False)
    for sample, mine in zip(fits, learner.forward(fits), strict=True):
        assert mine == pytest.approx(own_logprobs(base, sample.prompt_ids, sample.completion_ids), abs=1e-5)
    before = [parameter.grad for parameter in learner.parameters]
    (longer,) = make_samples(((5, (9,)),), holes=False)
    with raises(ContextLengthError):
        learner.forward_backward_supervised([*fits, longer])
    assert [parameter.grad for parameter in learner.parameters] == before
    with closing(LocalEngine(base, max_rows=2)) as engine:
        assert engine.context_length == BEYOND
        request = SamplingRequest(
            prompt_ids=tuple(range(3, 9)),
            n=2,
            params=SamplingParams(max_tokens=50, seed=3),
            version=PolicyVersion.base(),
        )
        for completion in engine.generate([request])[0]:
            assert len(completion.token_ids) <= BEYOND - 6
            expected = own_logprobs(base, request.prompt_ids, completion.token_ids)
            assert completion.logprobs == pytest.approx(expected, abs=1e-5)
        with pytest.raises(ContextLengthError):
            engine.score(tuple(range(BEYOND)), (1, 2), PolicyVersion.base())


def test_static_ropes_do_not_end_the_context(make_base):
    for rope in (
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "default"},
    ):
        base = make_base("mistral", context=64, rope_parameters={"rope_theta": 10000.0, **rope})
        assert base.context_length == 64 and longest_row(base.model.config) is None


# ---- the small model ----


def test_the_small_model_is_small_and_has_every_kind_of_layer():
    """Of a model of 57 billion parameters whose last layers have windows."""
    config = Qwen2MoeConfig(
        hidden_size=3584,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        use_sliding_window=True,
        sliding_window=32768,
        max_window_layers=21,
        vocab_size=151936,
    )
    with torch.device("meta"):
        twin = small_twin(share_weights(AutoModelForCausalLM.from_config(config)))
    assert sum(parameter.numel() for parameter in twin.parameters()) < 10_000_000
    assert sorted(twin.config.layer_types) == ["full_attention", "sliding_attention"]
    assert twin.config.sliding_window == LENGTH
    assert twin.model.layers[0].self_attn.head_dim == 128


def test_the_small_model_has_layers_that_share_keys_and_values_and_heads_of_their_own():
    """Of Gemma 4 E2B's sizes, with what hears, and Gemma 4 26B's."""
    e2b = CONFIG_MAPPING["gemma4"](
        text_config={
            "num_hidden_layers": 35,
            "num_kv_shared_layers": 20,
            "num_key_value_heads": 1,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        },
        vision_config={},
        audio_config={},
    )
    small = packed_check._small_model(e2b)
    layers = small.get_decoder().layers
    assert [each.self_attn.is_kv_shared_layer for each in layers] == [False, False, True, True]
    assert [each.self_attn.head_dim for each in layers] == [256, 512, 256, 512]
    assert why_not_packed(small) is None
    wide = {"num_global_key_value_heads": 2, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0}
    other = CONFIG_MAPPING["gemma4"](text_config={"use_bidirectional_attention": "vision", **wide}, vision_config={})
    size = ModelSize.of(other.get_text_config(), parameters=1, value_bytes=4)
    assert (size.kv_heads, size.head_dim) == (4, 512)
    assert ways_of(other).why_not_packed is None


def test_the_small_model_has_a_small_tower():
    """Of Qwen2.5-VL-3B, whose own has 670 million parameters."""
    text = {"hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16, "num_key_value_heads": 2}
    tower = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    config = CONFIG_MAPPING["qwen2_5_vl"](text_config={**text, "rope_parameters": rope}, vision_config=tower)
    small = packed_check._small_model(config)
    assert sum(parameter.numel() for parameter in small.parameters()) < 5e7
    assert ways_of(config).why_not_packed is None


def test_a_small_model_with_state_spaces_is_made_of_what_fits_together(make_base):
    """Their heads are a multiple of the hidden size, which is smaller here."""
    wide = {"hidden_size": 64, "num_attention_heads": 8, "mamba_n_heads": 16}
    model = share_weights(make_base("granitemoehybrid", **wide).model)
    assert small_twin(model).config.hidden_size == 32
    assert why_not_packed(model) is None


def test_all_rows_of_the_check_are_beyond_its_lengths():
    prompts, completions = LONG
    assert min(prompts[p] + n for p, n in completions) > 2 * LENGTH


def test_a_model_without_lengths_needs_no_small_one(make_base, monkeypatch):
    monkeypatch.setattr("groupwise.model.packed_check.small_twin", lambda model: pytest.fail("it was made"))
    assert why_not_packed(share_weights(make_base("qwen3").model)) is None


def test_a_small_model_that_cannot_be_made_is_no_proof(make_base, monkeypatch):
    def fails(model):
        raise AttributeError("no such thing")

    monkeypatch.setattr("groupwise.model.packed_check.small_twin", fails)
    why = str(why_not_packed(share_weights(make_base("mistral", sliding_window=BEYOND).model)))
    assert "cannot be tried (AttributeError: no such thing)" in why


@pytest.mark.parametrize(("family", "seed"), [("minimax_m2", 2), ("qwen2_moe", 4), ("mixtral", 0)])
def test_a_mixture_in_16_bits_is_not_refused_for_its_rounding(make_base, family: str, seed: int):
    """Of the first, rounding changes the choice of experts: 0.27 nats, where 0.1 is what rounding else explains."""
    model = share_weights(make_base(family, dtype=torch.bfloat16, seed=seed).model)
    assert why_not_packed(model) is None


def test_a_mixture_in_16_bits_that_cannot_be_packed_is(make_base):
    base = make_base("llama4_text", dtype=torch.bfloat16, moe_layers=[0, 1])
    assert "chunks of 4 tokens" in str(why_not_packed(share_weights(base.model)))


# ---- the LM head ----


@pytest.mark.filterwarnings("ignore:.*cannot be trained in packed rows:UserWarning")
def test_a_model_that_does_more_than_its_head_is_refused(make_base):
    base = make_base("llama4_text")
    assert head_gap(share_weights(base.model)) < 1e-9
    plain = type(base.model).forward

    def sharper(model, *arguments, **options):
        out = plain(model, *arguments, **options)
        out.logits = 1.5 * out.logits
        return out

    base.model.__class__ = type("Llama4ForCausalLM", (type(base.model),), {"forward": sharper})
    assert head_gap(share_weights(base.model)) > 0.01
    with raises(ModelError):
        Learner(base)
