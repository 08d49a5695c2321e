"""The Llama family's second way through the model, against the model's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from groupwise.config.lora import LoraSpec
from groupwise.model.attention import SharedPrompts
from groupwise.model.backbone import Backbone, adapter_dtype, norm, project_plainly
from groupwise.model.load import share_weights
from groupwise.train.lora import adapter_off, add_lora, project_with_lora

LAYOUT = ([5, 3], [4, 2, 6], [0, 0, 1])
TOKENS = sum(LAYOUT[0]) + sum(LAYOUT[1])


def packed(vocabulary: int) -> tuple[Tensor, Tensor, SharedPrompts]:
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (TOKENS,), generator=g)
    prompts, completions, owner = LAYOUT
    positions = [i for n in prompts for i in range(n)]
    positions += [prompts[p] + i for n, p in zip(completions, owner, strict=True) for i in range(n)]
    return ids, torch.tensor(positions), SharedPrompts(*LAYOUT)


def both(model, project=project_plainly) -> tuple[Backbone, Backbone]:
    """The lean way and the model's own."""
    lean, own = Backbone(model, project), Backbone(model)
    assert lean.lean
    own.lean = False
    return lean, own


def assert_near(x: Tensor, expected: Tensor) -> None:
    """Equal but for the rounding of float32, in which the norms of both are."""
    assert expected.norm() > 0
    assert (x - expected).norm() <= 2e-5 * expected.norm(), ((x - expected).norm() / expected.norm(), x.shape)


def gradients(backbone: Backbone, model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    ids, positions, layout = packed(model.config.vocab_size)  # pyright: ignore
    hidden = backbone(ids, positions, layout)
    weight = torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).view_as(hidden)
    model.zero_grad()
    (hidden * weight).sum().backward()
    return hidden.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("project", [project_plainly, project_with_lora])
def test_adapter_gradients(make_base, architecture: str, dtype: torch.dtype, project) -> None:
    """Hidden states and the gradient of every LoRA parameter, with PEFT's products and with the fused one."""
    model = share_weights(make_base(architecture, dtype=dtype).model)
    add_lora(model, LoraSpec(rank=4), seed=0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, dtype=dtype, generator=torch.Generator().manual_seed(1)) / 5
    lean, own = both(model, project)
    hidden, mine = gradients(lean, model)
    expected_hidden, expected = gradients(own, model)
    assert_near(hidden, expected_hidden)
    assert mine.keys() == expected.keys() and len(mine) == 2 * 7 * model.config.num_hidden_layers
    for name in expected:
        assert_near(mine[name], expected[name])
    with adapter_off(model), torch.no_grad():
        ids, positions, layout = packed(model.config.vocab_size)
        assert_near(lean(ids, positions, layout), own(ids, positions, layout))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_adapters_over_16_bits(make_base, monkeypatch, dtype: torch.dtype, device: str) -> None:
    """As near to float32 as PEFT's and transformers' own, forward and backward, and inputs are kept in 16 bits; also
    with the types that a GPU multiplies."""
    beside = adapter_dtype(torch.device(device), dtype)
    assert (beside == torch.bfloat16) == (device == "cuda" and dtype == torch.bfloat16)
    monkeypatch.setattr("groupwise.train.lora.adapter_dtype", lambda *_: beside)
    exact = share_weights(make_base("qwen3", dtype=torch.float32).model)
    narrow = share_weights(make_base("qwen3", dtype=torch.float32).model.to(dtype))
    for model in (exact, narrow):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(dtype))  # the same weights in both
        add_lora(model, LoraSpec(rank=4), seed=0)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) / 5
    lean, own = both(narrow, project_with_lora)
    hidden, wanted = gradients(both(exact, project_with_lora)[0], exact)
    off = []
    for backbone in (lean, own):
        own_hidden, found = gradients(backbone, narrow)
        assert own_hidden.dtype == dtype and found.keys() == wanted.keys()
        assert all(gradient.dtype == torch.float32 for gradient in found.values())
        off.append(
            (
                float((own_hidden.float() - hidden).norm() / hidden.norm()),
                sum(float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted) / len(wanted),
            )
        )
    # between processors the model's own error differs by 14 %, and its gradients' too
    assert 0 < off[0][0] < 1.25 * off[1][0] and 0 < off[0][1] < 1.25 * off[1][1], off


def test_norms_of_16_bits_are_those_of_the_model(make_base) -> None:
    """Values and gradients, to a rounding of the last bit in a few of a thousand."""
    module = make_base("qwen3", dtype=torch.float32).model.model.norm.to(torch.bfloat16).requires_grad_(False)
    g = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(64, module.weight.shape[0], generator=g)).bfloat16()
    torch.nn.init.uniform_(module.weight, 0.5, 2.0, generator=g)
    with torch.no_grad():
        expected = module(x)
        assert (norm(module, x) != expected).float().mean() < 5e-3
    grads = []
    for normed in (norm, lambda module, x: module(x)):
        leaf = x.clone().requires_grad_(True)
        y = normed(module, leaf)
        assert y.dtype == torch.bfloat16 and (y != expected).float().mean() < 5e-3
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16())
        grads.append(leaf.grad)
    assert grads[0].dtype == torch.bfloat16
    torch.testing.assert_close(grads[0].float(), grads[1].float(), rtol=0.02, atol=0.02)


def test_all_parameters(make_base) -> None:
    """Where the weights themselves train, those of norms and embeddings too, nothing is left out."""
    model = share_weights(make_base("qwen3").model).requires_grad_(True)
    lean, own = both(model, project_with_lora)
    _, mine = gradients(lean, model)
    _, expected = gradients(own, model)
    assert mine.keys() == expected.keys()
    for name in expected:
        assert_near(mine[name], expected[name])
    model.requires_grad_(False)


def test_gradient_checkpointing_changes_nothing(make_base) -> None:
    model = share_weights(make_base("qwen3").model)
    add_lora(model, LoraSpec(rank=4), seed=0)
    lean, _ = both(model, project_with_lora)
    _, plain = gradients(lean, model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    _, saving = gradients(lean, model)
    assert plain.keys() == saving.keys()
    for name in plain:
        assert torch.equal(plain[name], saving[name]), name


def test_dropout_is_not_left_out(make_base) -> None:
    model = share_weights(make_base("qwen3").model)
    add_lora(model, LoraSpec(rank=4, dropout=0.5), seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    lean, _ = both(model, project_with_lora)
    model.train()
    ids, positions, layout = packed(model.config.vocab_size)
    assert not torch.equal(lean(ids, positions, layout), lean(ids, positions, layout))


@pytest.mark.parametrize("architecture", ["gemma3", "gpt2"])
def test_other_families_run_as_they_are(make_base, architecture: str) -> None:
    assert not Backbone(share_weights(make_base(architecture).model)).lean
