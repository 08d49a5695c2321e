"""Gradient checkpointing where samples share tokens: the same numbers, and less memory."""

import pytest
import torch
from learner_cases import SPECS, gradients, on_policy
from test_prefix_tree import episodes

from groupwise.algo.loss import resolve_loss
from groupwise.config.lora import LoraSpec
from groupwise.errors import ConfigError
from groupwise.model.attention import SharedPrompts
from groupwise.model.backbone import offloaded_checkpoint
from groupwise.model.packing import micro_batches
from groupwise.model.prefix_tree import PrefixTree
from groupwise.train.learner import Learner
from groupwise.train.strategy import SingleProcess
from groupwise.types import Sample
from wording import raises


@pytest.fixture(params=["shared prompts", "prefix tree"])
def samples(request: pytest.FixtureRequest, make_samples) -> list[Sample]:
    if request.param == "shared prompts":
        chosen, layout = make_samples([(20, [16, 12, 14]), (12, [15, 16])]), SharedPrompts
    else:
        chosen, layout = episodes(), PrefixTree
    assert {type(batch.layout) for batch in micro_batches(chosen, token_budget=4096)} == {layout}
    return chosen


def kept(learner: Learner, samples: list[Sample]) -> tuple[int, dict[str, float]]:
    """(bytes saved for the backward pass and still there when it begins, metrics of the pass)."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in learner.model.parameters()}
    storages: dict[int, int] = {}
    backward = False

    def keep(x: torch.Tensor) -> torch.Tensor:
        if not backward and x.untyped_storage().data_ptr() not in weights:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    def read(x: torch.Tensor) -> torch.Tensor:
        nonlocal backward
        backward = True
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, read):
        metrics = learner.forward_backward(samples, SPECS["grpo with k3"])
    return sum(storages.values()), metrics


@pytest.mark.parametrize("lora", ["adapter", "all parameters"])
def test_it_changes_nothing_but_the_memory(make_learner, samples, lora: str):
    chosen = {} if lora == "adapter" else {"lora": None}
    found = []
    for on in (False, True):
        learner = make_learner(gradient_checkpointing=on, micro_tokens=4096, threads=1, **chosen)  # hooks see one
        if lora != "adapter":
            learner.keep_reference()
        size, metrics = kept(learner, on_policy(learner, samples))
        found.append((size, metrics, gradients(learner)))
    (plain_size, plain_metrics, plain), (size, metrics, checkpointed) = found
    assert metrics == pytest.approx(plain_metrics, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(checkpointed, plain, rtol=1e-9, atol=1e-12)
    assert size < plain_size / 3  # of a model with two layers


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_offloaded_inputs_of_layers(make_base, make_samples, monkeypatch, architecture: str) -> None:
    """The same gradients, and every layer's input was packed away; without a GPU it is refused, since nothing would
    be."""
    samples, base = make_samples(((5, (4, 6)), (3, (7,)))), make_base(architecture, dtype=torch.float32)
    with raises(ConfigError):
        Learner(base, gradient_checkpointing="offload")
    shapes: list[tuple[int, ...]] = []
    own = torch.autograd.graph.save_on_cpu

    def counted(**options):
        hooks = own(**options)
        pack = hooks.pack_hook
        hooks.pack_hook = lambda tensor: shapes.append(tuple(tensor.shape)) or pack(tensor)
        return hooks

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", counted)
    gradients = []
    for offload in (False, True):
        learner = Learner(base, lora=LoraSpec(rank=2), gradient_checkpointing=True)
        if offload:
            learner.model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=offloaded_checkpoint)
        learner.forward_backward(samples, resolve_loss("grpo"))
        gradients.append([p.grad for p in learner.parameters])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    hidden = base.model.config.get_text_config().hidden_size
    layers = base.model.config.get_text_config().num_hidden_layers
    assert sum(shape[-1] == hidden and len(shape) >= 2 for shape in shapes) >= layers


def test_offload_asks_for_the_device_that_computes_not_for_where_the_model_is_now(make_base) -> None:
    """With FSDP ranks from 1 on have the model on the CPU until it is cut."""

    class Cut(Exception):
        pass

    class OnAGpu(SingleProcess):
        def device(self, base):
            return torch.device("cuda", 1)

        def shard(self, learner):
            raise Cut

    with pytest.raises(Cut):
        Learner(make_base(), gradient_checkpointing="offload", attention="merged", strategy=OnAGpu())
