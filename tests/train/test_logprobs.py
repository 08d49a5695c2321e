"""The one forward: packed = padded = alone in values and gradients, for all architectures; fused head = naive head."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from groupwise.errors import TrainingError
from groupwise.model.head import Head
from groupwise.model.load import LoadedModel, share_weights
from groupwise.model.packed_check import packed_forward_gap, why_not_packed
from groupwise.model.packing import KeptRanges, MicroBatch, micro_batches, pack, pack_tree, padded_batches
from groupwise.recorded import BITMAP, DROPPED, KEPT, mask_entry
from groupwise.train import forward as logprobs
from groupwise.train.forward import fused_logprobs, packed_logprobs, plain_logprobs
from wording import raises

GROUPS = ((5, (4, 1, 6)), (0, (5, 3)), (9, (2,)), (3, (7, 0, 3, 2)))  # (prompt, completions); holes and an empty one
GROUP_WITHOUT_PROMPT = [3, 4]
LAYERS = {  # families, and weights of the layers that are meant
    "gpt_oss": "sinks",
    "deepseek_v3": "kv_b_proj",
    "lfm2": "conv.conv",
    "qwen3_next": "linear_attn",
    "qwen3_5_text": "linear_attn",
    "falcon_h1": "mamba",
    "granitemoehybrid": "mamba",
}
EXACT = ("sinks", "kv_b_proj", "conv.conv")


@pytest.fixture
def base(make_base, architecture: str) -> LoadedModel:
    return make_base(architecture)


def tolerance(base: LoadedModel) -> dict[str, float]:
    """Gemma 2's own attention, the reference here, takes its softmax in float32."""
    return {"rtol": 1e-5, "atol": 2e-6} if "gemma2" in base.name else {"rtol": 1e-9, "atol": 1e-10}


def run(model, forward, batches: Iterable[MicroBatch], *, temperature: float = 1.0):
    """(logprob, entropy) of all loss tokens in the samples' order, and the gradients of a function of all of them."""
    model.zero_grad()
    values: dict[int, list[torch.Tensor]] = {}
    for batch in batches:
        if len(batch.target_N):
            logprobs_N, entropy_N = forward(model, batch, temperature=temperature)
            ((logprobs_N + 0.3 * entropy_N) * torch.sin(1.0 + batch.target_N)).sum().backward()
            for row, pair in zip(batch.row_N.tolist(), torch.stack((logprobs_N, entropy_N), -1), strict=True):
                values.setdefault(batch.rows[row], []).append(pair.detach())
    flat = torch.stack([pair for row in sorted(values) for pair in values[row]])
    return flat, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_equals_the_models_own_forward(base: LoadedModel, make_samples, temperature: float):
    model = share_weights(base.model).requires_grad_(True)
    batches = list(micro_batches(make_samples(GROUPS), token_budget=1000))
    assert len(batches) == 1
    packed, grads = run(model, packed_logprobs, batches, temperature=temperature)
    padded = padded_batches(make_samples(GROUPS), token_budget=40)
    plain, plain_grads = run(model, plain_logprobs, padded, temperature=temperature)
    assert len(packed) == sum(sum(s.mask) for s in make_samples(GROUPS))
    torch.testing.assert_close(packed, plain, **tolerance(base))
    assert grads.keys() == plain_grads.keys() and len(grads) > 10
    for name, grad in grads.items():
        bound = tolerance(base)["atol"] * max(1.0, float(plain_grads[name].abs().max()))
        torch.testing.assert_close(grad, plain_grads[name], rtol=tolerance(base)["rtol"], atol=bound)


@pytest.mark.parametrize("family", LAYERS)
def test_other_kinds_of_layers_as_groups_and_as_trees(make_base, make_samples, family: str):
    """All weights are trained, those too that only such a layer has."""
    base, samples = make_base(family), make_samples(GROUPS)
    rounded = 1e-6 if LAYERS[family] in EXACT else 1e-4  # transformers' recurrences are float32 in any type
    model = share_weights(base.model).requires_grad_(True)
    assert why_not_packed(model) is None
    plain, plain_grads = run(model, plain_logprobs, padded_batches(samples, token_budget=40))
    with_prompt = [row for row, sample in enumerate(samples) if sample.prompt_ids]
    for batches in (
        list(micro_batches(samples, token_budget=1000)),
        [pack_tree(samples, with_prompt, device="cpu"), pack(samples, [GROUP_WITHOUT_PROMPT], device="cpu")],
    ):
        packed, grads = run(model, packed_logprobs, batches)
        torch.testing.assert_close(packed, plain, rtol=rounded, atol=rounded)
        assert grads.keys() == plain_grads.keys() and grads.keys() >= {
            name for name, _ in model.named_parameters() if LAYERS[family] in name
        }
        for name, grad in grads.items():
            bound = rounded * max(1.0, float(plain_grads[name].abs().max()))
            torch.testing.assert_close(
                grad, plain_grads[name], rtol=rounded, atol=bound, msg=lambda said, name=name: f"{name}: {said}"
            )


def test_alone_in_a_row_without_our_attention(base: LoadedModel, make_samples):
    """The reference is not our code at all: transformers' forward on one sample, with the softmax written out."""
    model, samples = share_weights(base.model), make_samples(GROUPS)
    (batch,) = micro_batches(samples, token_budget=1000)
    with torch.no_grad():
        packed, entropy = packed_logprobs(model, batch)
        expected = []
        for sample in batch.samples:
            ids = (*sample.prompt_ids, *sample.completion_ids)
            logp = base.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            start = len(sample.prompt_ids)
            for t, trained in enumerate(sample.mask):
                if trained:
                    at = logp[start + t - 1]
                    expected.append((float(at[sample.completion_ids[t]]), float(-(at.exp() * at).sum())))
    torch.testing.assert_close(
        torch.stack((packed, entropy), -1), torch.tensor(expected, dtype=torch.float64), **tolerance(base)
    )


def test_sharing_and_cutting_change_nothing(base: LoadedModel, make_samples):
    """One micro-batch with shared prompts, one per sample, and a shared prompt cut in two: equal but for rounding."""
    model = share_weights(base.model).requires_grad_(True)
    samples = make_samples(GROUPS)
    runs = [run(model, packed_logprobs, micro_batches(samples, token_budget=budget)) for budget in (1000, 12, 1)]
    for values, grads in runs[1:]:
        torch.testing.assert_close(values, runs[0][0], rtol=1e-9, atol=1e-10)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, runs[0][1][name], rtol=1e-8, atol=1e-9)


def test_tokens_of_other_rows_are_not_seen(base: LoadedModel, make_samples):
    """Changing one completion changes no logprob of another, nor of the same one before the change."""
    model, samples = share_weights(base.model), make_samples(((5, (6, 6)),), holes=False)
    changed = replace(samples[0], completion_ids=(*samples[0].completion_ids[:3], 7, *samples[0].completion_ids[4:]))
    with torch.no_grad():
        before, after = (
            packed_logprobs(model, next(micro_batches([first, samples[1]], token_budget=99)))[0]
            for first in (samples[0], changed)
        )
    same = before == after
    assert same.tolist() == [True] * 3 + [False] * 3 + [True] * 6


def test_gap_of_a_wrong_attention_is_seen(base: LoadedModel, monkeypatch: pytest.MonkeyPatch):
    model = share_weights(base.model)
    assert packed_forward_gap(model) < 1e-6
    from groupwise.model import attention

    monkeypatch.setattr(attention, "_hidden", lambda gap, *of: gap < -1)  # one token of the future
    assert packed_forward_gap(model) > 0.05


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2"])
def test_16_bits_pass_the_check(make_base, architecture: str):
    from groupwise.model.packed_check import packed_tolerance

    for seed in range(3):
        model = share_weights(make_base(architecture, dtype=torch.bfloat16, seed=seed).model)
        assert 1e-4 < packed_forward_gap(model) < packed_tolerance(model) / 1.5


# ---- the fused head ----

HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.25},
    "softcap": {"softcap": 1.5},
    "all": {"bias": True, "scale": 1.7, "softcap": 2.5},
}


def a_head(*, bias: bool = False, scale: float = 1.0, softcap: float | None = None, V: int = 11, H: int = 4) -> Head:
    g = torch.Generator().manual_seed(3)
    weight = torch.randn(V, H, generator=g, dtype=torch.float64, requires_grad=True)
    bias_V = torch.randn(V, generator=g, dtype=torch.float64, requires_grad=True) if bias else None
    return Head(weight, bias_V, scale, softcap)


def naive(hidden_NH, weight_VH, bias_V, head: Head, target_N, temperature: float):
    logits = torch.nn.functional.linear(hidden_NH, weight_VH, bias_V) * head.scale
    logits = logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)
    logp = (logits / temperature).log_softmax(-1)
    return logp.gather(-1, target_N[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("kind", HEADS)
def test_fused_head(kind: str, temperature: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logprobs, "TILE_VALUES", 3 * 11 + 5)  # tiles of 3 tokens, the last of 1
    head, target_N = a_head(**HEADS[kind]), torch.tensor([0, 10, 5, 5, 2, 9, 1])
    hidden = torch.randn(7, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)

    def fused(hidden_NH, weight_VH, *bias):
        mine = Head(weight_VH, bias[0] if bias else None, head.scale, head.softcap)
        return fused_logprobs(hidden_NH, mine, target_N, temperature=temperature)

    inputs = (hidden, head.weight_VH) if head.bias_V is None else (hidden, head.weight_VH, head.bias_V)
    expected = naive(hidden, head.weight_VH, head.bias_V, head, target_N, temperature)
    for got, want in zip(fused(*inputs), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
    assert torch.autograd.gradcheck(fused, inputs)
    assert torch.autograd.gradcheck(lambda *x: fused(*x)[0], inputs)  # the entropy without a gradient


PARTS = torch.ones(7, 11, dtype=torch.bool)  # what each token could be: listed, left out, as bits, one, anything
PARTS[0, 3:10] = PARTS[1, [0, 1]] = PARTS[3, 6:] = False
PARTS[2, ::2], PARTS[2, 5], PARTS[4] = False, True, torch.arange(11) == 2


def entries_of(kept: torch.Tensor):
    return [mask_entry(row, most=3) for row in kept.numpy()]


@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.slow), 0.6])
@pytest.mark.parametrize("kind", HEADS)
def test_fused_head_restricted_to_what_was_kept(kind: str, temperature: float, monkeypatch: pytest.MonkeyPatch):
    """The log-probability, the entropy and both gradients of the distribution over what was kept, and no NaN from
    what was not, however likely that is."""
    monkeypatch.setattr(logprobs, "TILE_VALUES", 3 * 11 + 5)
    head, target_N = a_head(**HEADS[kind]), torch.tensor([0, 10, 5, 5, 2, 9, 1])
    hidden = torch.randn(7, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    kept = KeptRanges(entries_of(PARTS), 11, torch.device("cpu"))

    def fused(hidden_NH, weight_VH, *bias):
        mine = Head(weight_VH, bias[0] if bias else None, head.scale, head.softcap)
        return fused_logprobs(hidden_NH, mine, target_N, temperature=temperature, kept=kept)

    inputs = (hidden, head.weight_VH) if head.bias_V is None else (hidden, head.weight_VH, head.bias_V)
    logits = Head(head.weight_VH, head.bias_V, head.scale, head.softcap).logits(hidden).double() / temperature
    logp = logits.masked_fill(~PARTS, -torch.inf).log_softmax(-1)
    entropy = -(logp.exp() * logp.masked_fill(~PARTS, 0)).sum(-1)
    for got, want in zip(fused(*inputs), (logp.gather(-1, target_N[:, None])[:, 0], entropy), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
    assert torch.autograd.gradcheck(fused, inputs)
    assert torch.autograd.gradcheck(lambda *x: fused(*x)[0], inputs)
    assert {kind for kind, _ in entries_of(PARTS)} == {KEPT, DROPPED, BITMAP}


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("cut", [False, True])
def test_all_other_tokens_are_one_outcome(cut: bool, temperature: float, monkeypatch: pytest.MonkeyPatch):
    """Log-probabilities of each token's soft targets and of the rest, and their gradients; twice the same target, and
    a token that could be nothing but its targets."""
    monkeypatch.setattr(logprobs, "TILE_VALUES", 3 * 11 + 5)
    head = a_head(**HEADS["softcap"])
    target_NK = torch.tensor([[0, 2, 1], [10, 10, 3], [5, 1, 1], [5, 0, 2], [2, 2, 2], [9, 9, 0], [1, 0, 10]])
    hidden = torch.randn(7, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    kept = KeptRanges(entries_of(PARTS), 11, torch.device("cpu")) if cut else None

    def fused(hidden_NH, weight_VH):
        mine = Head(weight_VH, head.bias_V, head.scale, head.softcap)
        return fused_logprobs(hidden_NH, mine, target_NK, temperature=temperature, kept=kept, rest=True)

    logits = Head(head.weight_VH, head.bias_V, head.scale, head.softcap).logits(hidden).double() / temperature
    logp = (logits.masked_fill(~PARTS, -torch.inf) if cut else logits).log_softmax(-1)
    rest = logp.scatter(1, target_NK[:, 1:], -torch.inf).logsumexp(-1, keepdim=True)
    expected = torch.cat([logp.gather(1, target_NK), rest], dim=1)
    torch.testing.assert_close(fused(hidden, head.weight_VH)[0], expected, rtol=1e-12, atol=1e-13)
    assert bool(rest.isinf().any()) == cut
    assert torch.autograd.gradcheck(lambda *x: fused(*x)[0].clamp(min=-100), (hidden, head.weight_VH))


def test_what_was_left_out_may_be_likely():
    """A grammar may leave out what is e^200 times as likely as all that it keeps: in float32 its exponential is
    infinite."""
    head = Head(torch.tensor([[200.0], [0.0], [1.0]], requires_grad=True), None, 1.0, None)
    kept = KeptRanges(entries_of(torch.tensor([[False, True, True]])), 3, torch.device("cpu"))
    hidden = torch.ones(1, 1, requires_grad=True)
    logprob, entropy = fused_logprobs(hidden, head, torch.tensor([2]), kept=kept)
    (logprob + entropy).sum().backward()
    assert logprob.tolist()[0] == pytest.approx(-math.log(1 + math.exp(-1)), abs=1e-6)
    assert hidden.grad.isfinite().all() and head.weight_VH.grad.isfinite().all()
    assert float(head.weight_VH.grad[0]) == 0


def test_another_vocabulary_is_refused():
    kept = KeptRanges(entries_of(PARTS), 11, torch.device("cpu"))
    with raises(TrainingError):
        fused_logprobs(torch.zeros(7, 4), Head(torch.zeros(12, 4), None, 1.0, None), torch.zeros(7).long(), kept=kept)


def test_tied_weight_gets_both_gradients(make_base, make_samples):
    """With tied embeddings the head's gradient adds to the embedding's in one tensor."""
    base = make_base("qwen3")
    model = share_weights(base.model).requires_grad_(True)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    batches = list(micro_batches(make_samples(GROUPS), token_budget=1000))
    _, grads = run(model, packed_logprobs, batches)
    used = {i for s in make_samples(GROUPS) for i in (*s.prompt_ids, *s.completion_ids)}
    unused = next(i for i in range(280) if i not in used)
    assert grads["model.embed_tokens.weight"][unused].any()  # only the head's gradient reaches a token not in the batch


class Sizes(TorchDispatchMode):
    """Records how many elements the largest tensor made within has."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = out if isinstance(out, tuple | list) else (out,)
        self.largest = max(self.largest, *(x.numel() for x in tensors if isinstance(x, torch.Tensor)), 0)
        return out


def test_logits_of_all_tokens_never_exist(monkeypatch: pytest.MonkeyPatch):
    N, V, H = 96, 500, 4
    monkeypatch.setattr(logprobs, "TILE_VALUES", 8 * V)
    head = a_head(V=V, H=H)
    hidden = torch.randn(N, H, dtype=torch.float64, requires_grad=True)
    target_N = torch.arange(N)
    with Sizes() as fused:
        logprobs_N, entropy_N = fused_logprobs(hidden, head, target_N)
        (logprobs_N.sum() + entropy_N.sum()).backward()
    with Sizes() as whole:
        naive(hidden, head.weight_VH, None, head, target_N, 1.0)[0].sum().backward()
    assert whole.largest == N * V
    assert fused.largest == 8 * V
    few = torch.zeros(N, V, dtype=torch.bool).scatter_(1, target_N[:, None], True)
    few[: N // 2, 7] = True
    kept = KeptRanges([mask_entry(row) for row in few.numpy()], V, torch.device("cpu"))
    with Sizes() as restricted:
        logprobs_N, entropy_N = fused_logprobs(hidden, head, target_N, kept=kept)
        (logprobs_N.sum() + entropy_N.sum()).backward()
    assert restricted.largest == 8 * V


def test_autocast_probabilities_sum_to_one():
    """The backward pass recomputes the logits as the forward rounded them: else the gradient of a constant is not 0."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 32, generator=g, requires_grad=True)
    weight = torch.randn(40, 32, generator=g, requires_grad=True)
    bias = torch.zeros(40, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        logprobs_N, _ = fused_logprobs(hidden, Head(weight, bias, 1.0, None), torch.arange(5))
    assert logprobs_N.dtype == torch.float32
    logprobs_N.sum().backward()
    assert abs(float(bias.grad.sum())) < 1e-5  # sum over the vocabulary of onehot - p


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_a_head_in_float32_rounds_no_logits(bias: bool):
    """Under autocast, too, which would round both factors."""
    g = torch.Generator().manual_seed(0)
    weight, hidden = (torch.randn(n, 64, generator=g).bfloat16() for n in (300, 7))
    bias_V = torch.randn(300, generator=g).bfloat16() if bias else None
    exact = torch.nn.functional.linear(hidden.double(), weight.double(), None if bias_V is None else bias_V.double())
    gaps = []
    for in_float32 in (False, True):
        head = Head(weight, bias_V, 1.0, None, in_float32)
        with torch.autocast("cpu", torch.bfloat16):
            logits = head.logits(hidden)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, head.logits(hidden), rtol=0, atol=0)
        gaps.append(float((logits - exact).abs().max()))
    assert gaps[1] < 1e-4 < 0.02 < gaps[0]


def test_a_head_in_float32_and_its_gradient():
    """The log-probability to float32, the gradient to the 16 bits that hidden states have."""
    g = torch.Generator().manual_seed(0)
    weight, hidden = torch.randn(40, 32, generator=g).bfloat16(), torch.randn(5, 32, generator=g).bfloat16()
    exact, mine = hidden.double().requires_grad_(), hidden.clone().requires_grad_()
    wanted_N = (exact @ weight.double().T).log_softmax(-1)[range(5), range(5)]
    logprobs_N, _ = fused_logprobs(mine, Head(weight, None, 1.0, None, True), torch.arange(5))
    torch.testing.assert_close(logprobs_N.double(), wanted_N, rtol=0, atol=1e-4)
    (gradient,) = torch.autograd.grad(logprobs_N.sum(), mine)
    (wanted,) = torch.autograd.grad(wanted_N.sum(), exact)
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient.double(), wanted, rtol=0.02, atol=0.02)
