"""The one forward: packed micro-batch -> log-probability (and entropy) of every loss token, with gradients.

Two things make it cheap. The backbone runs each prompt once for its whole group (`model.attention`). And the LM head
runs only at the positions that predict a loss token, in tiles of tokens, fused with the softmax: for hidden state h,
weight W and temperature T

    z = W h / T      logprob = z[target] - logsumexp(z)      entropy = logsumexp(z) - sum_v p_v z_v

Forward keeps h, logsumexp and entropy, N numbers each; backward computes the tile's z again and applies

    d logprob / dz = onehot(target) - p            d entropy / dz_v = -p_v (z_v - logsumexp + entropy)

so a [N, V] tensor exists for one tile at a time only. (The idea: Liger kernel, arXiv 2410.10989.) Where several tokens
are asked for in one place (soft targets), their gradients add up: sum_k g_k (onehot(k) - p).

All tokens but the K soft targets are one outcome more, whose log-probability is a separate logsumexp. As 1 - the sum
of theirs it would be a difference of nearly equal numbers where the policy is sure of itself: float32 knows it to 1e-7.

    rest = log sum_{v not in K} exp z_v - logsumexp(z)        d rest / dz_v = [v not in K] p_v / exp(rest) - p_v

A token that was drawn from a part K of the vocabulary (top_p, top_k, min_p, a grammar: `Sample.kept`) has the
log-probability of the distribution that it was drawn from, and so has every sum over v above only v in K:

    logprob = z[target] - log sum_{v in K} exp z_v          p_v = 0 outside of K

K is what the sampler kept, a constant: nothing is differentiated through its choice. Only a tile with such tokens has a
mask, [tile, V].

`plain_logprobs` is the same quantity by the model's own attention on padded rows: what runs, loudly, where a model
cannot run packed (`packed_check`).

Shapes: S packed tokens, N loss tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from groupwise.model.backbone import Backbone, decoder_inputs, decoder_of
from groupwise.model.head import Head
from groupwise.model.image_tokens import FIRST, vision_of
from groupwise.model.load import plain_attention
from groupwise.model.packing import KeptRanges, MicroBatch, Padded
from groupwise.train.context_parallel import ContextGroup, Ulysses
from groupwise.train.lora import project_with_lora

TILE_VALUES = 1 << 20  # logits per tile: 4 MiB in float32, which stay in a CPU's cache
TILE_VALUES_GPU = 1 << 26  # 256 MiB: 442 tokens of 152k; with 6, as of a CPU, each would read the whole head again


class _FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        head: Head,
        target_NK: Tensor,
        temperature: float,
        kept: KeptRanges | None,
        rest: bool,
    ):
        exact = torch.float64 if hidden_NH.dtype == torch.float64 else torch.float32
        entropy_N, lse_N = (hidden_NH.new_empty(len(target_NK), dtype=exact) for _ in range(2))
        tokens, columns = target_NK.shape
        logprob_NK = hidden_NH.new_empty((tokens, columns + rest), dtype=exact)
        for tile in _tiles(weight_VH, len(target_NK)):
            z = head.logits(hidden_NH[tile])
            z = z if temperature == 1 else z.div_(temperature)
            dropped = None if kept is None else kept.dropped(tile, weight_VH.shape[0])
            drawn = z if dropped is None else z.masked_fill(dropped, -math.inf)
            lse = drawn.logsumexp(-1)
            lse_N[tile] = lse
            logprob_NK[tile, :columns] = drawn.gather(-1, target_NK[tile]) - lse[:, None]
            p = (z - lse[:, None]).exp_()
            p = p if dropped is None else p.masked_fill_(dropped, 0)
            entropy_N[tile] = lse - p.mul_(z).sum(-1)
            if rest:
                drawn = drawn.scatter(-1, target_NK[tile, 1:], -math.inf)
                logprob_NK[tile, columns] = drawn.logsumexp(-1) - lse
        rest_N = logprob_NK[:, columns].clone() if rest else None
        ctx.save_for_backward(hidden_NH, weight_VH, target_NK, lse_N, entropy_N, rest_N)
        ctx.head, ctx.temperature, ctx.autocast = head, temperature, _autocast_type(hidden_NH.device.type)
        ctx.kept = kept
        ctx.set_materialize_grads(False)
        return logprob_NK, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Any):
        grad_logprob_NK, grad_entropy_N = grads  # None: not a term of the loss, which need not be asked of the device
        hidden_NH, weight_VH, target_NK, lse_N, entropy_N, rest_N = ctx.saved_tensors
        columns = target_NK.shape[1]
        if grad_logprob_NK is None:
            shape = len(target_NK), columns + (rest_N is not None)
            grad_logprob_NK = torch.zeros(shape, dtype=lse_N.dtype, device=lse_N.device)
        if rest_N is not None:  # where there are no other tokens, their outcome has no gradient
            none_N = ~rest_N.isfinite()
            grad_logprob_NK, rest_N = grad_logprob_NK.clone(), rest_N.masked_fill(none_N, 0)
            grad_logprob_NK[:, columns].masked_fill_(none_N, 0)
        grad_logprob_N = grad_logprob_NK.sum(1)
        head: Head = ctx.head
        grad_hidden_NH = torch.empty_like(hidden_NH)
        grad_weight_VH = torch.zeros_like(weight_VH) if ctx.needs_input_grad[1] else None
        grad_bias_V = torch.zeros_like(head.bias_V) if head.bias_V is not None and ctx.needs_input_grad[2] else None
        for tile in _tiles(weight_VH, len(target_NK)):
            with torch.autocast(hidden_NH.device.type, dtype=ctx.autocast, enabled=ctx.autocast is not None):
                logits = head.logits(hidden_NH[tile])  # rounded as in the forward pass, or p would not sum to 1
            z = logits / ctx.temperature if ctx.temperature != 1 else logits
            p = (z - lse_N[tile, None]).exp_()
            dropped = None if ctx.kept is None else ctx.kept.dropped(tile, weight_VH.shape[0])
            p = p if dropped is None else p.masked_fill_(dropped, 0)
            slope = grad_logprob_N[tile, None] * (head.scale / ctx.temperature)
            others = None
            if rest_N is not None:
                others = (z if dropped is None else z.masked_fill(dropped, -math.inf)).scatter(
                    1, target_NK[tile, 1:], -math.inf
                )
                others = others.sub_((lse_N + rest_N)[tile, None]).exp_()
                others.mul_(grad_logprob_NK[tile, columns, None] * (head.scale / ctx.temperature))
            if grad_entropy_N is not None:
                z = (z - (lse_N - entropy_N)[tile, None]).mul_(grad_entropy_N[tile, None])
                grad = p.mul_(z.add_(grad_logprob_N[tile, None])).mul_(-head.scale / ctx.temperature)
            else:
                grad = p.mul_(-slope)
            grad.scatter_add_(1, target_NK[tile], grad_logprob_NK[tile, :columns] * (head.scale / ctx.temperature))
            grad = grad if others is None else grad.add_(others)
            if head.softcap is not None:
                grad *= 1 - (logits / head.softcap) ** 2
            grad = grad.to(weight_VH.dtype)
            grad_hidden_NH[tile] = (grad @ weight_VH).to(hidden_NH.dtype)
            if grad_weight_VH is not None:
                grad_weight_VH += grad.T @ hidden_NH[tile]
            if grad_bias_V is not None:
                grad_bias_V += grad.sum(0)
        return grad_hidden_NH, grad_weight_VH, grad_bias_V, None, None, None, None, None


def _autocast_type(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _tiles(weight_VH: Tensor, tokens: int) -> list[slice]:
    size = max(1, (TILE_VALUES_GPU if weight_VH.is_cuda else TILE_VALUES) // weight_VH.shape[0])  # gpu-aware
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def fused_logprobs(
    hidden_NH: Tensor,
    head: Head,
    target_N: Tensor,
    *,
    temperature: float = 1.0,
    kept: KeptRanges | None = None,
    rest: bool = False,
) -> tuple[Tensor, Tensor]:
    """(log-probability, entropy), both [N] in nats, of `target_N` under softmax(head(hidden) / temperature), restricted
    to what was `kept`.

    With `target_N` [N, K] the log-probabilities are of K tokens in each place, [N, K]; with `rest` there is one column
    more, of all tokens together that are not among `target_N[:, 1:]` (-inf where there are none).

    Gradients flow to `hidden_NH` and to the head's weight and bias (when they require them).
    """
    target_NK = target_N[:, None] if target_N.ndim == 1 else target_N
    logprob_NK, entropy_N = _FusedHead.apply(  # type: ignore[misc]
        hidden_NH, head.weight_VH, head.bias_V, head, target_NK, temperature, kept, rest
    )
    # FSDP needs tensors that are not views of others
    return logprob_NK[:, 0].clone() if target_N.ndim == 1 else logprob_NK, entropy_N


def _logprobs(
    hidden_NH: Tensor, model: PreTrainedModel, batch: MicroBatch, temperature: float, own: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropy of the loss tokens, or of the tokens `own` of this process, and of their
    soft targets if there are any. For an image's tokens, which are never sampled, they are those of token 0."""
    id_NK, _ = batch.soft_targets
    taught, target_N = id_NK.shape[1] > 0, batch.target_N
    if vision_of(model) is not None:
        target_N = target_N.masked_fill(target_N >= FIRST, 0)
    target_N = torch.cat([target_N[:, None], id_NK], dim=1) if taught else target_N
    target_N = target_N if own is None else target_N[own]
    head, kept = Head.of(model), batch.kept(None if own is None else own.tolist())
    return fused_logprobs(hidden_NH, head, target_N, temperature=temperature, kept=kept, rest=taught)


def of_tokens_alone(logprobs: Tensor) -> Tensor:
    """[N] of [N], or of [N, 1 + K + 1] with soft targets and the rest behind."""
    return logprobs if logprobs.ndim == 1 else logprobs[:, 0]


def packed_logprobs(
    model: PreTrainedModel, batch: MicroBatch, *, temperature: float = 1.0, context: ContextGroup | None = None
) -> tuple[Tensor, Tensor]:
    """Return the one forward. -> (logprobs_N, entropy_N), float32 (float64 for a float64 model); of a micro-batch with
    soft targets logprobs [N, 1 + K + 1]: those of the loss tokens, of their soft targets, and of all other tokens as
    one. With `context` its ranks compute it together."""
    assert not isinstance(batch.layout, Padded)
    positions_S = read_positions(model, batch)
    backbone = Backbone(model, project_with_lora)
    if context is None:
        hidden_SH = backbone(batch.input_ids_S, positions_S, batch.layout)
        return logprobs_of_hidden(hidden_SH, model, batch, temperature=temperature)
    ids_S, N = batch.input_ids_S, len(batch.source_N)
    layout = Ulysses(batch.layout, len(ids_S), context)
    hidden_SH = backbone(context.tokens(ids_S), context.tokens(positions_S), layout)
    own, places = context.mine(batch.source_N)
    every = _logprobs(hidden_SH.index_select(0, places), model, batch, temperature, own)
    logprobs_N, entropy_N = (context.whole(own, values, N) for values in every)
    return logprobs_N, entropy_N


def logprobs_of_hidden(
    hidden_SH: Tensor, model: PreTrainedModel, batch: MicroBatch, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return `packed_logprobs`' result from the last hidden states of a micro-batch's packed row."""
    return _logprobs(hidden_SH.index_select(0, batch.source_N), model, batch, temperature)


def read_positions(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """Return where each token of a packed row stands, as `_rotary_positions`. The last token of the longest row is a
    target only: nothing reads it, and there may be no position for it."""
    longest = max((len(s.prompt_ids) + len(s.completion_ids) for s in batch.samples), default=0)  # none: an idle rank
    return _rotary_positions(model, batch).clamp(max=max(longest - 2, 0))


def _rotary_positions(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """Return where each token of a micro-batch stands: [S], or [3, S] of a model that sees with M-RoPE."""
    vision = vision_of(model)
    if vision is None or vision.axes == 1:
        return batch.positions_S
    where_AS = batch.positions_S.repeat(vision.axes, 1)
    for sample, parts in zip(batch.samples, batch.places, strict=True):
        places = torch.cat([torch.as_tensor(part, dtype=torch.long) for part in parts])
        mine = vision.positions_of([(*sample.prompt_ids, *sample.completion_ids)])
        where_AS[:, places] = mine.to(where_AS.device)
    return where_AS


def plain_logprobs(model: PreTrainedModel, batch: MicroBatch, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the same for a micro-batch of padded rows, by the model's own forward up to the LM head."""
    assert isinstance(batch.layout, Padded)
    width = batch.layout.width
    ids_BT = batch.input_ids_S.view(-1, width)[:, :-1]  # the last token of the longest row is a target only
    told = decoder_inputs(model, ids_BT)
    if (vision := vision_of(model)) is not None and vision.axes > 1:
        told["position_ids"] = _rotary_positions(model, batch).view(vision.axes, -1, width)[..., :-1]
    with plain_attention(model):  # causal: nothing looks at the padding
        hidden_BTH = decoder_of(model)(**told, use_cache=False).last_hidden_state
    hidden_NH = hidden_BTH[batch.source_N // width, batch.source_N % width]
    return _logprobs(hidden_NH, model, batch, temperature)
