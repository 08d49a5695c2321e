"""The arithmetic by hand, and the memory parts against what torch really keeps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, Qwen3Config

from groupwise.algo.loss import resolve_loss
from groupwise.config import RunConfig, parse_config
from groupwise.estimate import Memory, ModelSize, activation_values, memory, step_size
from groupwise.train.learner import Learner
from groupwise.train.lora import LoraSpec

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


def config(**sections) -> RunConfig:
    return parse_config({"data": {"source": "x.jsonl"}, "rewards": ["m:f"], **sections})


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
    needed = memory(run, QWEN, trained=1000, longest_prompt=28)
    assert needed.weights == 1_200_000_000
    assert needed.reference == 0
    assert needed.trained == 1000 * 4 * 6  # weight, gradient, two moments, two versions in the engine
    assert needed.kv_cache == 2 * 28 * 8 * 128 * 128 * 10 * 2  # 128 tokens in 10 rows
    assert needed.total == needed.weights + needed.trained + needed.kv_cache + needed.activations


def test_full_parameter_training_keeps_gradients_moments_and_perhaps_a_reference():
    needed = memory(config(train={"lora": None}), QWEN, trained=QWEN.parameters, longest_prompt=8, keeps_reference=True)
    assert needed.trained == 3 * needed.weights
    assert needed.reference == needed.weights


@pytest.mark.parametrize("lora", [LoraSpec(rank=4), None], ids=["adapter", "all parameters"])
@pytest.mark.parametrize(("prompt", "completion"), [(20, 16), (40, 80)])
def test_activations_are_what_autograd_keeps(make_base, make_samples, lora, prompt, completion):
    base = make_base("qwen3", dtype=torch.float32, context=256)
    learner = Learner(base, lora=lora, micro_tokens=1 << 20)
    samples = make_samples([(prompt, [completion] * 8)] * 4, holes=False)
    weights = {parameter.untyped_storage().data_ptr() for parameter in learner.model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in weights:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        learner.forward_backward(samples, resolve_loss("grpo"))
    measured = sum(x.untyped_storage().nbytes() for x in kept.values())
    size = ModelSize.of(base.model.config, parameters=0, value_bytes=4)
    tokens = 4 * (prompt + 8 * completion)
    estimate = size.layers * tokens * activation_values(size, keys=prompt + completion) * size.value_bytes
    assert 0.75 < estimate / measured < 1.33


positive = st.integers(1, 64)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(prompts=positive, group=st.integers(2, 16), length=st.integers(1, 512), micro=st.integers(1, 1 << 16))
def test_more_of_anything_never_needs_less(prompts, group, length, micro):
    def needed(*, checkpointing: bool = False, **more: int) -> Memory:
        rollout = {"prompts_per_step": prompts, "group_size": group, "max_tokens": length}
        train = {"micro_tokens": micro, "gradient_checkpointing": checkpointing}
        for key, value in more.items():
            (rollout if key in rollout else train)[key] += value
        return memory(config(rollout=rollout, train=train), QWEN, trained=10, longest_prompt=20)

    least = needed()
    for key in ("prompts_per_step", "group_size", "max_tokens", "micro_tokens"):
        assert needed(**{key: 7}).total >= least.total
    assert needed(checkpointing=True).activations < least.activations
