"""Attention over packed groups: every prompt once, all completions of a group attending to it.

A micro-batch is ONE row of S tokens: all prompts, one after the other, then all completions. The model's linear layers,
norms and MLPs see only that row, so a prompt costs its tokens once however many completions it has, and nothing is
padded. Attention alone must know who may look at whom, and this file is that knowledge:

    prompt token i            attends to   prompt tokens <= i of its prompt
    completion token i        attends to   all tokens of its prompt  and  completion tokens <= i of its completion

For a completion the two key sets are scored separately, the prompt's keys for all G completions of the group as one
batched product (no copy of the prompt's keys is ever made), and merged exactly by their log-sum-exp:

    out = (exp(s_p - m) V_p + exp(s_c - m) V_c) / (sum exp(s_p - m) + sum exp(s_c - m)),     m = max(s_p, s_c)

which is softmax over the concatenation. The online-softmax identity: Milakov & Gimelshein 2018, arXiv 1805.02867;
sharing a prefix in the forward: arXiv 2402.05099 (Hydragen).

`attention` is registered with transformers under the name `ATTENTION`; a model whose config names it calls it in every
layer and passes on the `layout` keyword given to the model's forward. Sliding windows (Gemma, Mistral) and score
soft-capping (Gemma 2) are honoured; attention sinks are not and raise.

Shapes: S packed tokens, P prompts, G completions per prompt (padded to the largest group), L longest prompt,
C longest completion, H query heads, K key-value heads, R = H / K, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

ATTENTION = "groupwise"
CPU_FUSED_FROM = 256  # tokens from which the fused CPU kernel's backward beats two matrix products and a softmax


@dataclass(frozen=True)
class Scoring:
    """How a layer scores: `scaling` of q.k, sliding `window` in tokens (None: all), `softcap` of the scores."""

    scaling: float
    window: int | None = None
    softcap: float | None = None

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """[..., i, D] x [..., j, D] -> [..., i, j], scaled and capped, not masked; float32 for 16-bit inputs."""
        return self.finished(self.scaled(query) @ key.transpose(-1, -2))

    def scaled(self, query: Tensor) -> Tensor:
        """The query as it is multiplied with keys."""
        return query * self.scaling

    def finished(self, products: Tensor) -> Tensor:
        """Products of scaled queries and keys -> scores."""
        scores = products.float() if products.itemsize == 2 else products  # a softmax in 16 bits is off by a percent
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)


class Layout(Protocol):
    """Who attends to whom among the S tokens of one packed row."""

    def attend(self, layer: int, query_SHD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scoring: Scoring) -> Tensor:
        """-> the attention output [S, H, D]."""
        ...


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    layout: Layout | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls in each layer: query [1, H, S, D], key and value [1, K, S, D] -> [1, S, H, D]."""
    if layout is None:
        raise ValueError(
            f"attention '{ATTENTION}' needs layout=...; call the model through train.logprobs or an engine"
        )
    if kwargs.get("s_aux") is not None:
        raise NotImplementedError("attention sinks are not supported by the packed forward")
    scoring = Scoring(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap)
    layer: Any = module.layer_idx
    query_SHD, key_SKD, value_SKD = (x[0].transpose(0, 1) for x in (query, key, value))
    out_SHD = layout.attend(layer, query_SHD, key_SKD, value_SKD, scoring)
    return out_SHD.unsqueeze(0), None


AttentionInterface.register(ATTENTION, attention)


class SharedPrompts:
    """The layout of a micro-batch: P prompts, then B completions, each belonging to one prompt.

    Args:
        prompt_lengths: tokens of each prompt; 0 is allowed (supervised data without a prompt).
        completion_lengths: tokens of each completion; 0 is allowed.
        prompt_of_row: for each completion the index of its prompt, ascending.

    Example: two prompts of 3 and 2 tokens, the first with two completions (2 and 1 tokens), the second with one (2):
        SharedPrompts([3, 2], [2, 1, 2], [0, 0, 1])    packed row: a a a b b | A A | B | C C    (S = 10)
    """

    def __init__(
        self,
        prompt_lengths: Sequence[int],
        completion_lengths: Sequence[int] = (),
        prompt_of_row: Sequence[int] = (),
        *,
        device: torch.device | str = "cpu",
    ):
        self.P = len(prompt_lengths)
        self.L = max(prompt_lengths, default=0)
        self.C = max(completion_lengths, default=0)
        self.prompt_tokens = sum(prompt_lengths)
        members = [0] * self.P
        place_of_row = []
        for prompt in prompt_of_row:
            place_of_row.append((prompt, members[prompt]))
            members[prompt] += 1
        self.G = max(members, default=0)
        self.prompt_slots = _slots([(p, n) for p, n in enumerate(prompt_lengths)], self.L, self.P, device)
        places = [(p * self.G + g, n) for (p, g), n in zip(place_of_row, completion_lengths, strict=True)]
        self.completion_slots = _slots(places, self.C, self.P * self.G, device)
        self.lengths_P = torch.tensor(prompt_lengths, dtype=torch.long, device=device)
        self.ragged = len(set(prompt_lengths)) > 1
        at_L, at_C = torch.arange(self.L, device=device), torch.arange(self.C, device=device)
        self.padding_PL = at_L >= self.lengths_P[:, None]  # True: not a token of this prompt
        self.gap_LL = at_L[:, None] - at_L  # query position - key position
        self.gap_CC = at_C[:, None] - at_C
        self.gap_PCL = self.lengths_P[:, None, None] + at_C[None, :, None] - at_L

    def attend(self, layer: int, query_SHD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scoring: Scoring) -> Tensor:
        split = self.prompt_tokens
        query_SHD, key_SKD = (x.to(value_SKD.dtype) for x in (query_SHD, key_SKD))  # autocast rotates in float32
        out = []
        query_PLHD, key_PLKD, value_PLKD = (
            spread(x[:split], self.prompt_slots, self.P, self.L) for x in (query_SHD, key_SKD, value_SKD)
        )
        if self.L:
            out_PLHD = _causal(query_PLHD, key_PLKD, value_PLKD, self.gap_LL, scoring)
            out.append(_collect(out_PLHD, self.prompt_slots))
        if self.C:
            query_BCHD, key_BCKD, value_BCKD = (
                spread(x[split:], self.completion_slots, self.P * self.G, self.C)
                for x in (query_SHD, key_SKD, value_SKD)
            )
            if self.L:
                out_BCHD = self._completions(query_BCHD, key_BCKD, value_BCKD, key_PLKD, value_PLKD, scoring)
            else:
                out_BCHD = _causal(query_BCHD, key_BCKD, value_BCKD, self.gap_CC, scoring)
            out.append(_collect(out_BCHD, self.completion_slots))
        return torch.cat(out)

    def _completions(
        self, query: Tensor, key: Tensor, value: Tensor, key_PLKD: Tensor, value_PLKD: Tensor, scoring: Scoring
    ) -> Tensor:
        """query [P*G, C, H, D], key and value [P*G, C, K, D] -> [P*G, C, H, D]."""
        P, G, C, K, D = self.P, self.G, self.C, key.shape[2], key.shape[3]
        query_BKRCD = scoring.scaled(query).view(P * G, C, K, -1, D).permute(0, 2, 3, 1, 4)
        mask_prompt = None
        if self.ragged or scoring.window is not None:
            mask_prompt = mask_of(self._hidden_prompt(scoring.window))
        mask_own = mask_of(_hidden(self.gap_CC, scoring.window))
        heads = (key.transpose(1, 2), value.transpose(1, 2), key_PLKD.transpose(1, 2), value_PLKD.transpose(1, 2))
        if scoring.softcap is None:
            out_BKRCD = _Merged.apply(query_BKRCD, *heads, mask_own, mask_prompt)
        else:
            out_BKRCD, *_ = _merge(query_BKRCD, *heads, mask_own, mask_prompt, scoring)
        return out_BKRCD.permute(0, 3, 1, 2, 4).reshape(P * G, C, -1, D)  # type: ignore[union-attr]

    def _hidden_prompt(self, window: int | None) -> Tensor:
        """[P, 1, 1, 1 or C, L], True where a completion token may not see a prompt key."""
        hidden = self.padding_PL[:, None, :]
        if window is not None:
            hidden = hidden | (self.gap_PCL >= window)
        return hidden[:, None, None]


def _merge(
    query_BKRCD: Tensor,
    key_BKCD: Tensor,
    value_BKCD: Tensor,
    key_PKLD: Tensor,
    value_PKLD: Tensor,
    mask_own: Tensor,
    mask_prompt: Tensor | None,
    scoring: Scoring,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> (attention of scaled queries over both key sets [B, K, R, C, D], and its exponentials: own [B, K, R, C, C],
    the prompt's [P, K, G*R*C, L], and their sum over both [B, K, R, C, 1])."""
    B, K, R, C, D = query_BKRCD.shape
    P, L = key_PKLD.shape[0], key_PKLD.shape[2]
    own = scoring.finished(query_BKRCD.reshape(B, K, R * C, D) @ key_BKCD.transpose(-1, -2)).view(B, K, R, C, C)
    own.add_(mask_own)
    shared = scoring.finished(_by_prompt(query_BKRCD, P) @ key_PKLD.transpose(-1, -2))
    if mask_prompt is not None:
        shared = shared.view(P, K, -1, C, L).add_(mask_prompt).view(P, K, -1, L)
    with torch.no_grad():
        top = torch.maximum(_by_row(shared.amax(-1, keepdim=True), own), own.amax(-1, keepdim=True))
    own, shared = own.sub_(top).exp_(), shared.sub_(_by_prompt(top, P)).exp_()
    total = own.sum(-1, keepdim=True) + _by_row(shared.sum(-1, keepdim=True), own)
    mixed = (own.view(B, K, R * C, C).to(value_BKCD.dtype) @ value_BKCD).view(B, K, R, C, D)
    mixed = mixed + _by_row(shared.to(value_PKLD.dtype) @ value_PKLD, own)
    return (mixed / total).to(value_BKCD.dtype), own, shared, total


class _Merged(torch.autograd.Function):
    """`_merge` without a softcap, and its gradient. With E the exponentials, Z their sum, O = E V / Z:

        dV = E^T (dO / Z)      dS = E * ((dO / Z) V^T - sum(dO * O) / Z)      dQ = dS K      dK = dS^T Q

    for each of the two key sets. (Autograd would come to the same with more passes over [G*R*C, L].)
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, *rest: Tensor | None) -> Tensor:
        out, own, shared, total = _merge(query, *rest, Scoring(1.0))  # type: ignore[arg-type]
        ctx.save_for_backward(query, *rest[:4], out, own, shared, total)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        query, key, value, prompt_key, prompt_value, out, own, shared, total = ctx.saved_tensors
        B, K, R, C, _ = query.shape
        P = prompt_key.shape[0]
        grad = grads[0].to(total.dtype) / total
        along = (grad * out).sum(-1, keepdim=True)
        grad = grad.to(value.dtype)
        flat, exact = (B, K, R * C, -1), total.dtype

        grad_own = (grad.reshape(flat) @ value.transpose(-1, -2)).to(exact).view(own.shape)
        grad_own = grad_own.sub_(along).mul_(own).to(value.dtype).view(flat)
        grad_value = own.view(flat).to(value.dtype).transpose(-1, -2) @ grad.reshape(flat)
        grad_key = grad_own.transpose(-1, -2) @ query.reshape(flat)
        grad_query = (grad_own @ key).view(query.shape)

        by_prompt = _by_prompt(grad, P)
        grad_shared = (by_prompt @ prompt_value.transpose(-1, -2)).to(exact)
        grad_shared = grad_shared.sub_(_by_prompt(along, P)).mul_(shared).to(value.dtype)
        grad_prompt_value = shared.to(value.dtype).transpose(-1, -2) @ by_prompt
        grad_prompt_key = grad_shared.transpose(-1, -2) @ _by_prompt(query, P)
        grad_query = grad_query + _by_row(grad_shared @ prompt_key, own)
        return grad_query, grad_key, grad_value, grad_prompt_key, grad_prompt_value, None, None


def _by_prompt(x_BKRCn: Tensor, P: int) -> Tensor:
    """[P*G, K, R, C, n] -> [P, K, R*G*C, n]."""
    B, K, R, C, n = x_BKRCn.shape
    return x_BKRCn.view(P, B // P, K, R, C, n).permute(0, 2, 3, 1, 4, 5).reshape(P, K, -1, n)


def _by_row(x_PKNn: Tensor, like: Tensor) -> Tensor:
    """[P, K, R*G*C, n] -> [P*G, K, R, C, n]; `like` [P*G, K, R, C, ...] has the sizes."""
    (B, K, R, C), (P, n) = like.shape[:4], (x_PKNn.shape[0], x_PKNn.shape[-1])
    return x_PKNn.view(P, K, R, B // P, C, n).permute(0, 3, 1, 2, 4, 5).reshape(B, K, R, C, n)


def _causal(query_BTHD: Tensor, key_BTKD: Tensor, value_BTKD: Tensor, gap_TT: Tensor, scoring: Scoring) -> Tensor:
    """Plain causal attention -> [B, T, H, D]. Lines are padded on the right, so causality alone hides the padding."""
    B, T, H, D = query_BTHD.shape
    K = key_BTKD.shape[2]
    key, value = key_BTKD.transpose(1, 2), value_BTKD.transpose(1, 2)
    plain = scoring.softcap is None and (scoring.window is None or scoring.window >= T)
    if plain and (query_BTHD.is_cuda or not torch.is_grad_enabled() or T > CPU_FUSED_FROM):
        out = scaled_dot_product_attention(
            query_BTHD.transpose(1, 2), key, value, is_causal=True, scale=scoring.scaling, enable_gqa=H > K
        )
        return out.transpose(1, 2)
    query_BKND = query_BTHD.view(B, T, K, H // K, D).permute(0, 2, 3, 1, 4).reshape(B, K, H // K * T, D)
    scores = scoring.scores(query_BKND, key).view(B, K, H // K, T, T)
    weights = (scores + mask_of(_hidden(gap_TT, scoring.window))).softmax(-1)
    out = (weights.view(B, K, H // K * T, T).to(value.dtype) @ value).view(B, H, T, D)
    return out.transpose(1, 2)


def _hidden(gap: Tensor, window: int | None) -> Tensor:
    hidden = gap < 0
    return hidden if window is None else hidden | (gap >= window)


def mask_of(hidden: Tensor) -> Tensor:
    """-inf where hidden, else 0; to be added to scores. Filling them in is many times slower on a CPU."""
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, float("-inf"))


def _slots(places: Sequence[tuple[int, int]], width: int, height: int, device: torch.device | str) -> Tensor | None:
    """Flat positions in a [height, width] grid of the tokens of lines (line, length); None when they fill it."""
    if sum(length for _, length in places) == width * height:
        return None
    lines = [torch.arange(length) + line * width for line, length in places]
    return torch.cat(lines).to(device) if lines else torch.zeros(0, dtype=torch.long, device=device)


def spread(x_SHD: Tensor, slots: Tensor | None, height: int, width: int) -> Tensor:
    """Packed tokens -> zero-padded [height, width, heads, D]."""
    if slots is not None:
        x_SHD = x_SHD.new_zeros(height * width, *x_SHD.shape[1:]).index_copy(0, slots, x_SHD)
    return x_SHD.reshape(height, width, *x_SHD.shape[1:])


def _collect(x: Tensor, slots: Tensor | None) -> Tensor:
    """The inverse of `spread`."""
    flat = x.reshape(-1, *x.shape[2:])
    return flat if slots is None else flat.index_select(0, slots)
