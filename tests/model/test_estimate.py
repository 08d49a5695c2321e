"""The arithmetic by hand; what passes take is measured in test_activations."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, MambaConfig, Qwen3Config

from groupwise.config.run import RunConfig, parse_config
from groupwise.engine import multi_lora as lora
from groupwise.errors import ConfigError
from groupwise.model import activations, attention
from groupwise.model.activations import ModelSize
from groupwise.model.memory import (
    GIB,
    MERGED_BYTES,
    PADDING,
    Load,
    Memory,
    fitting_tokens,
    longest_sample,
    memory,
    step_size,
)
from groupwise.model.packed_check import cache_bytes
from groupwise.model.packing import MAX_PADDING
from groupwise.train.forward import TILE_VALUES, TILE_VALUES_GPU
from wording import raises

QWEN = ModelSize(
    parameters=600_000_000,
    value_bytes=2,
    layers=28,
    hidden=1024,
    intermediate=3072,
    heads=16,
    kv_heads=8,
    head_dim=128,
    vocabulary=151_936,
)
LOAD = Load(model=QWEN, trained=10, longest_prompt=28)


def config(**sections) -> RunConfig:
    return parse_config({"data": {"source": "x.jsonl"}, "rewards": ["m:f"], **sections})


def test_the_constants_of_others_are_theirs():
    assert (PADDING, MERGED_BYTES) == (MAX_PADDING, lora.MERGED_BYTES)
    assert (activations.TILE_BYTES, activations.FUSED_FROM) == (TILE_VALUES * 4, attention.CPU_FUSED_FROM)
    assert activations.TILE_BYTES_GPU == TILE_VALUES_GPU * 4


def test_a_step_by_hand():
    run = config(
        rollout={"prompts_per_step": 32, "group_size": 8, "max_tokens": 100, "batch_rows": 100},
        train={"steps": 50, "minibatches": 2, "micro_tokens": 1000},
    )
    step = step_size(run, prompt_tokens=20.0, completion_tokens=10.0, rows=400)
    assert (step.prompts, step.completions, step.max_tokens) == (32, 256, 25_600)
    assert step.tokens == 32 * 20 + 256 * 10
    assert step.decode_waves == 3
    assert (step.forwards, step.optimizer_steps) == (4, 2)  # 3200 tokens: two minibatches of 1600, each in two parts
    assert step.epochs == 4.0
    twice = run.model_copy(update={"train": run.train.model_copy(update={"passes": 3})})
    step = step_size(twice, prompt_tokens=20.0, completion_tokens=10.0, rows=400)
    assert (step.forwards, step.optimizer_steps) == (12, 6)


def test_a_step_in_padded_rows_has_every_prompt_in_every_row():
    run = config(rollout={"prompts_per_step": 32, "group_size": 8}, train={"micro_tokens": 1000})
    sizes = {"prompt_tokens": 20.0, "completion_tokens": 10.0, "rows": 400}
    assert step_size(run, **sizes).tokens == 32 * 20 + 256 * 10
    padded = step_size(run, **sizes, packed=False)
    assert (padded.tokens, padded.forwards) == (256 * 30, 8)


def test_padded_rows_take_what_their_attention_takes():
    """Their grid is the budget; eager attention keeps all scores, which a fused kernel does not."""
    run = config(rollout={"max_tokens": 500}, train={"micro_tokens": 4096})
    load = replace(LOAD, model=replace(QWEN, lean=False), packed=False)
    padded, eager = memory(run, load), memory(run, replace(load, eager=True))
    scores = 4096 * (28 + 500) * QWEN.heads * QWEN.layers
    assert eager.activations - padded.activations > 6 * scores  # in float32, and as they are multiplied in bfloat16
    more = memory(run, load, micro_tokens=8192)
    assert 1.8 < more.activations / padded.activations < 2.2


def test_the_size_of_a_model_from_its_config():
    grouped = Qwen3Config(
        hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=50
    )
    size = ModelSize.of(grouped, parameters=1, value_bytes=4)
    assert (size.hidden, size.intermediate, size.heads, size.kv_heads, size.head_dim) == (64, 96, 4, 2, 8)
    old = ModelSize.of(GPT2Config(n_embd=64, n_head=4, n_layer=3), parameters=1, value_bytes=4)
    assert (old.layers, old.hidden, old.intermediate, old.kv_heads, old.head_dim) == (3, 64, 256, 4, 16)


def test_weights_adapter_and_keys_and_values_by_hand():
    run = config(rollout={"max_tokens": 100, "batch_rows": 10})
    needed = memory(run, replace(LOAD, trained=1000))
    assert needed.weights == 1_200_000_000
    assert (needed.reference, needed.merged) == (0, 0)
    assert needed.trained == 1000 * 4 * 6  # weight, gradient, two moments, two versions in the engine
    assert needed.kv_cache == 2 * 28 * 8 * 128 * 160 * 10 * 2  # 128 tokens in 10 rows, and a quarter more
    parts = needed.process + needed.weights + needed.trained + needed.kv_cache + needed.activations
    assert needed.total == parts
    small = config(rollout={"max_tokens": 100, "prompts_per_step": 2, "group_size": 4, "refill": 1.0})
    assert memory(small, LOAD).kv_cache == 2 * 28 * 8 * 128 * 160 * 8 * 2  # no more rows than are sampled in a step
    assert memory(run, replace(LOAD, gpu=True)).process == 0


def test_evaluations_that_may_say_more_need_keys_and_values_for_it():
    """Twice the tokens of 128 in evaluations: of samples and activations nothing changes."""
    rollout = {"max_tokens": 100, "batch_rows": 10}
    held_out = {"data": {"source": "x.jsonl"}}
    run, longer, shorter = (
        config(rollout=rollout, eval={**held_out, **more}) for more in ({}, {"max_tokens": 228}, {"max_tokens": 5})
    )
    alike, more = memory(run, LOAD), memory(longer, LOAD)
    assert more.kv_cache == 2 * alike.kv_cache and memory(shorter, LOAD) == alike
    assert more.total - more.kv_cache == alike.total - alike.kv_cache


@pytest.mark.parametrize(
    ("family", "token", "row"),
    [  # in float32: keys and values of one attention layer, 2 heads of 8 values; and the states of the other layer
        ("qwen3_next", 2 * 2 * 8 * 4, (2 * 2 * 8 + 4 * 8) * 4 * 4 + 4 * 8 * 8 * 4),  # convolution, delta net
        ("lfm2", 2 * 2 * 8 * 4, 32 * 3 * 4),  # a convolution over three tokens
        ("deepseek_v3", 2 * (16 + 8) * 4, 0),  # two layers: what keys and values are made of, and rotary keys
        ("gpt_oss", 2 * 2 * 2 * 8 * 4, 0),
    ],
)
def test_a_models_own_cache_takes_what_its_tensors_take(make_base, family: str, token: int, row: int):
    model = make_base(family, dtype=torch.float32).model
    assert cache_bytes(model) == (token, row)
    rows, length = 3, 11
    cache = model(input_ids=torch.arange(length).repeat(rows, 1), use_cache=True).past_key_values
    names = ("keys", "values", "conv_states", "recurrent_states")
    held = [getattr(layer, name, None) for layer in cache.layers for name in names]
    states = [x for each in held for x in (each.values() if isinstance(each, dict) else [each])]
    real = sum(x.numel() * x.element_size() for x in states if isinstance(x, torch.Tensor))
    windows = family == "gpt_oss"  # a window keeps less, which the estimate does not count on
    counted = rows * (length * token + row)
    assert real < counted if windows else real == counted
    run = config(rollout={"prompts_per_step": rows, "group_size": 2, "max_tokens": 6, "batch_rows": rows})
    size = ModelSize.of(model.config, parameters=1, value_bytes=4)
    load = Load(model=size, trained=1, longest_prompt=5, packed=False, own_cache=(token, row))
    assert memory(run, load).kv_cache == counted


def test_a_model_without_attention_has_a_size():
    assert ModelSize.of(MambaConfig(hidden_size=64), parameters=1, value_bytes=4).hidden == 64


def test_with_vllm_the_trainer_keeps_no_keys_and_values_and_vllm_counts_where_it_is_in_this_process():
    keys = {"rollout": {"max_tokens": 100, "batch_rows": 256}}
    local, served = (memory(config(engine=engine, **keys), LOAD) for engine in ("local", "vllm"))
    assert (served.kv_cache, served.vllm, local.vllm) == (0, 0, 0)
    assert served.total == local.total - local.kv_cache
    run = config(engine="vllm", vllm={"mode": "colocate"}, train={"memory_gb": 4.0}, **keys)
    beside = replace(LOAD, colocated=3 * GIB)
    assert memory(run, beside).total == served.total + 3 * GIB
    with raises(ConfigError) as error:
        fitting_tokens(run, beside)
    assert "kv cache" not in str(error.value)
    hint = str(error.value.hint)
    assert "batch_rows" not in hint and hint.endswith("or lower vllm.gpu_memory_utilization")


def test_merged_weights_while_there_is_room_for_them():
    linear = 4 * (2 * 64 * (64 + 32) + 3 * 64 * 128)
    tiny = ModelSize(
        parameters=10,
        value_bytes=4,
        layers=1,
        hidden=64,
        intermediate=128,
        heads=4,
        kv_heads=2,
        head_dim=16,
        vocabulary=9,
    )
    assert memory(config(), replace(LOAD, model=tiny)).merged == 2 * linear
    assert memory(config(train={"lora": None}), replace(LOAD, model=tiny)).merged == linear
    assert memory(config(), replace(LOAD, model=replace(QWEN, value_bytes=4))).merged == 0  # 1.8 GB


def test_full_parameter_training_keeps_gradients_moments_and_perhaps_a_reference():
    load = replace(LOAD, trained=QWEN.parameters, longest_prompt=8, keeps_reference=True)
    needed = memory(config(train={"lora": None}), load)
    assert needed.trained == 3 * needed.weights
    assert needed.reference == needed.weights


def test_the_tokens_of_a_pass_follow_from_the_budget():
    run = config(rollout={"max_tokens": 200})
    whole = memory(run, LOAD)
    assert fitting_tokens(run, LOAD) == 8192
    plenty = config(rollout={"max_tokens": 200}, train={"memory_gb": whole.total / GIB + 0.01})
    assert fitting_tokens(plenty, LOAD) == 8192
    fixed = whole.total - whole.activations
    budget = (fixed + 0.3 * whole.activations) / GIB
    tight = config(rollout={"max_tokens": 200}, train={"memory_gb": budget})
    tokens = fitting_tokens(tight, LOAD)
    assert 228 < tokens < 8192
    used, beyond = (memory(tight, LOAD, micro_tokens=n).total for n in (tokens, tokens + 1))
    assert used <= budget * GIB < beyond
    bounded = config(rollout={"max_tokens": 200}, train={"memory_gb": budget, "micro_tokens": tokens // 2})
    assert fitting_tokens(bounded, LOAD) == tokens // 2
    lighter = {"memory_gb": budget, "gradient_checkpointing": True}
    assert fitting_tokens(config(rollout={"max_tokens": 200}, train=lighter), LOAD) > tokens
    assert fitting_tokens(run, replace(LOAD, free=int(budget * GIB))) == tokens, "what a GPU has free is a budget too"
    assert fitting_tokens(tight, replace(LOAD, free=whole.total)) == tokens, "and train.memory_gb is the user's"
    assert fitting_tokens(run, replace(LOAD, free=1)) == 228, "one sample is tried all the same: it is an estimate"


def test_a_budget_for_not_even_one_sample_is_refused_with_the_arithmetic_and_what_would_do():
    rollout = {"max_tokens": 200, "group_size": 2, "batch_rows": 16}
    needed = memory(config(rollout=rollout, train={"micro_tokens": 228}), LOAD)
    budget = round((needed.total - 1) / GIB - 0.1, 2)
    with pytest.raises(ConfigError) as error:
        fitting_tokens(config(rollout=rollout, train={"memory_gb": budget}), LOAD)
    message, hint = str(error.value), str(error.value.hint)
    assert f"{budget:g} does not suffice for one sample of 228 tokens (prompt 28, completion 200)" in message
    assert f"{needed.total / GIB:.2f} GiB" in message and f"weights {needed.weights / GIB:.2f} GiB" in message
    ways = hint.removeprefix("set one of: ").split("; ")
    assert ways[0] == "train.gradient_checkpointing: true" and len(ways) >= 3
    for way in ways:  # each of them by itself is enough
        (key, value), sections = way.split(": "), {"rollout": dict(rollout), "train": {"memory_gb": budget}}
        section, name = key.split(".")
        sections[section][name] = True if value == "true" else float(value) if "." in value else int(value)
        assert fitting_tokens(config(**sections), LOAD) >= 1
    with pytest.raises(ConfigError) as error:  # nothing but more memory
        fitting_tokens(config(rollout=rollout, train={"memory_gb": 0.5}), LOAD)
    assert str(error.value.hint).startswith("set one of: train.memory_gb: ")


positive = st.integers(1, 64)


@settings(max_examples=40)
@given(prompts=positive, group=st.integers(2, 16), length=st.integers(1, 512), micro=st.integers(1, 1 << 16))
def test_more_of_anything_never_needs_less(prompts, group, length, micro):
    def needed(*, checkpointing: bool = False, **more: int) -> Memory:
        rollout = {"prompts_per_step": prompts, "group_size": group, "max_tokens": length}
        train = {"micro_tokens": micro, "gradient_checkpointing": checkpointing}
        for key, value in more.items():
            (rollout if key in rollout else train)[key] += value
        return memory(config(rollout=rollout, train=train), replace(LOAD, longest_prompt=20))

    least = needed()
    for key in ("prompts_per_step", "group_size", "max_tokens", "micro_tokens"):
        assert needed(**{key: 7}).total >= least.total
    assert needed(checkpointing=True).activations < least.activations


def test_fully_sharded_weights_by_hand():
    def parts(lora: dict | None, *, devices: int = 4, load: Load = LOAD, **train) -> Memory:
        train = {"devices": devices, "parallel": "fsdp", "lora": lora, **train}
        return memory(config(train=train), replace(load, trained=QWEN.parameters if lora is None else 10))

    layer = 1024 * (2 * (2048 + 1024) + 3 * 3072)
    rest = 600_000_000 - 28 * layer  # embeddings
    gathered = rest + max(rest, 2 * layer)
    sharded, alone = parts({"rank": 8}), parts({"rank": 8}, devices=1)
    assert (alone.shards, sharded.shards) == (0, (150_000_000 + gathered) * 2)
    assert (sharded.weights, sharded.trained) == (alone.weights, alone.trained)  # the engine's, and a whole adapter
    assert parts(None).trained * 4 == parts(None, devices=1).trained == 600_000_000 * 2 * 3
    on_gpus = parts(None, cpu_offload=True, load=replace(LOAD, gpu=True))
    assert (on_gpus.shards, on_gpus.trained) == (gathered * 2, 0)
    assert parts(None, cpu_offload=True).trained == parts(None).trained  # on a CPU it is the same memory


def test_the_longest_sample_that_fits_is_said():
    load = Load(model=QWEN, trained=10_000_000, longest_prompt=100)
    run = config(rollout={"max_tokens": 60_000}, train={"memory_gb": 12.0})
    longest = longest_sample(run, load)
    assert 100 < longest < 60_100
    with raises(ConfigError):
        fitting_tokens(run, load)
    fits, too_long = (
        config(rollout={"max_tokens": n}, train={"memory_gb": 12.0}) for n in (longest - 100, longest - 99)
    )
    assert fitting_tokens(fits, load) >= 1
    with raises(ConfigError):
        fitting_tokens(too_long, load)
    assert longest_sample(config(train={"memory_gb": 0.1}), load) == 0


@pytest.mark.parametrize(("packed", "least"), [(True, 100 + 2 * 20_000), (False, 2 * (100 + 20_000))])
def test_a_pair_is_never_cut(packed: bool, least: int):
    load = Load(model=QWEN, trained=10_000_000, longest_prompt=100, packed=packed)
    run = config(kind="dpo", rewards=[], rollout={"max_tokens": 20_000}, train={"memory_gb": 12.0})
    with raises(ConfigError) as refused:
        fitting_tokens(run, load)
    assert f"one pair of {least} tokens" in str(refused.value)
    most = longest_sample(run, load) - 100
    examples = run.model_copy(update={"kind": "sft"})
    assert 0 < most < longest_sample(examples, load) - 100
    shorter = config(kind="dpo", rewards=[], rollout={"max_tokens": most}, train={"memory_gb": 12.0})
    assert fitting_tokens(shorter, load) >= (100 + 2 * most if packed else 2 * (100 + most))
