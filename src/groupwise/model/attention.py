"""Attention over packed rows: each prompt is there once, and all completions of its group attend to it.

A micro-batch is ONE row of S tokens: all prompts, one after the other, then all completions. The model's linear layers,
norms and MLPs see only that row, so a prompt costs its tokens once however many completions it has, and nothing is
padded. Only attention must know which tokens attend to which, and this file computes that:

    prompt token i            attends to   prompt tokens <= i of its prompt
    completion token i        attends to   all tokens of its prompt  and  completion tokens <= i of its completion
    token i of an image       attends to   the rest of its image, too, where the model has it so (`see_ahead`; Gemma)

For a completion the two key sets are scored separately, the prompt's keys for all G completions of the group as one
batched product (no copy of the prompt's keys is ever made), and merged exactly by their log-sum-exp:

    out = (exp(s_p - m) V_p + exp(s_c - m) V_c) / (sum exp(s_p - m) + sum exp(s_c - m)),     m = max(s_p, s_c)

which is softmax over the concatenation. The online-softmax identity: Milakov & Gimelshein 2018, arXiv 1805.02867;
sharing a prefix in the forward: arXiv 2402.05099 (Hydragen).

`attention` is registered with transformers under the name `ATTENTION`; a model whose config names it calls it in every
layer and passes on the `layout` keyword given to the model's forward. `mask` is registered with it: through `mask` the
model says what each layer's mask is like. Sliding windows (Gemma, Mistral), score soft-capping (Gemma 2), attention
sinks (gpt-oss) and values of another size than keys (DeepSeek's MLA) are honoured. Whatever else a layer asks for, such
as chunks or its own mask, raises NotImplementedError.

For that, heads come before tokens and groups before both: queries are gathered into [P, K, G, R, C, D], so that a
prompt's [G*R*C, D] and a completion's [R*C, D] are views of the same memory.

Shapes: S packed tokens, P prompts, G completions per prompt (padded to the largest group), L longest prompt,
C longest completion, H query heads, K key-value heads, R = H / K, D head size (values may have another).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from groupwise.model.products import product
from groupwise.model.recurrence import Segments, States, segments_of_groups
from groupwise.model.transfer import on_device

ATTENTION = "groupwise"

CPU_FUSED_FROM = 256  # tokens from which the fused CPU kernel's backward beats two matrix products and a softmax


@dataclass(frozen=True)
class Scoring:
    """The parameters of a layer's attention scores: `scaling` of q.k, sliding `window` in tokens (None: all), `softcap`
    of the scores, learned `sinks` [H]: a logit of each head that is in its softmax and has no value (gpt-oss, arXiv
    2508.10925)."""

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = field(default=None, compare=False)

    def factors(self, dtype: torch.dtype) -> tuple[float, float]:
        """Return what queries of this type are multiplied with, and what their products with keys are: `scaling` and 1,
        but for 16 bits, to which a scaled query would be rounded, 1 and `scaling`."""
        return (1.0, self.scaling) if dtype.itemsize == 2 else (self.scaling, 1.0)

    def scaled(self, query: Tensor) -> Tensor:
        """Return the query as it is multiplied with keys."""
        factor, _ = self.factors(query.dtype)
        return query if factor == 1 else query * factor

    def products(self, query: Tensor, key: Tensor) -> Tensor:
        """Scaled queries [..., N, D] and keys as columns [..., D, T] -> products [..., N, T]; of 16 bits in float32."""
        scores, (_, factor) = product(query, key), self.factors(query.dtype)
        return scores if factor == 1 else scores.mul_(factor)

    def capped(self, products: Tensor) -> Tensor:
        """Return the scores, not masked."""
        return products if self.softcap is None else self.softcap * torch.tanh(products / self.softcap)

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """Scaled queries [..., N, D] and keys as columns [..., D, T] -> scores [..., N, T], not masked."""
        return self.capped(self.products(query, key))

    def sinks_of(self, K: int, repeats: int = 1) -> Tensor | None:
        """Return the sinks of the R heads of each key-value head, each `repeats` times -> [K, R * repeats, 1]."""
        return None if self.sinks is None else self.sinks.view(K, -1).repeat_interleave(repeats, 1)[..., None]


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """exp(scores) / (sum exp(scores) + exp(sinks)) over the last dimension [..., T]; `sinks` broadcasts to [..., 1]."""
    if sinks is None:
        return scores.softmax(-1)
    sinks = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


class Layout(Protocol):
    """The layout of the S tokens of one packed row: which tokens each attends to, and from which state it starts in
    recurrent layers."""

    @property
    def states(self) -> States: ...

    def attend(self, layer: int, query_SHD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scoring: Scoring) -> Tensor:
        """Return the attention output [S, H, D], D as `value` has it."""
        ...

    def see_ahead(self, ahead_S: Tensor, *, in_windows: bool = False) -> None:
        """Let each token see so many tokens behind itself, those of its image; `in_windows`: only in layers that have a
        sliding window."""
        ...


@dataclass(frozen=True)
class Window:
    """The mask of a layer with a sliding window: a token sees itself and the `length - 1` tokens before it."""

    length: int

    def __getitem__(self, tokens: tuple[slice, ...]) -> Window:
        """Return the mask of all tokens: Gemma 4 leaves out, where layers share keys and values, those whose logits are
        not asked for, and none is."""
        if any(each not in (slice(None), slice(0, None)) for each in tokens):
            raise NotImplementedError("a mask of a part of the tokens is not supported")
        return self


def mask(
    *,
    config: Any,
    local_size: int | None = None,
    use_vmap: bool = False,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Window | None:
    """Return what transformers calls to make a kind of layer's mask: which tokens stand where is the layout's affair,
    so that only the kind is left. None: causal.

    transformers gives `local_size` for windows and for chunks, which it reads from the configuration, and has
    `use_vmap` set where a model changes the rule with its own function.
    """
    padded = attention_mask is not None and not bool(attention_mask.all())
    if use_vmap or padded or "allow_is_bidirectional_skip" in kwargs:
        raise NotImplementedError("a mask that is neither causal nor a sliding window is not supported")
    if local_size is None:
        return None
    if local_size in (getattr(config, "attention_chunk_size", None), None):
        raise NotImplementedError(f"attention within chunks of {local_size} tokens is not supported")
    return Window(local_size)


NO_MATTER = ("position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states")


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Window | Tensor | None,
    *,
    scaling: float | None = None,
    layout: Layout | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention; transformers calls this in each layer: query [1, H, S, D], key and value [1, K, S, D] -> [1,
    S, H, D].

    Raises:
        NotImplementedError: the layer asks for something that a layout does not compute.
    """
    if layout is None:
        raise ValueError(
            f"attention '{ATTENTION}' needs layout=...; call the model through train.logprobs or an engine"
        )
    if not (attention_mask is None or isinstance(attention_mask, Window)):
        raise NotImplementedError("a mask that the model makes itself is not supported")
    window = None if attention_mask is None else attention_mask.length
    if sliding_window not in (None, window):
        raise NotImplementedError(f"a sliding window of {sliding_window} with a mask of {window} is not supported")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise NotImplementedError("attention that is not causal is not supported")
    if dropout:
        raise NotImplementedError("dropout of attention weights is not supported")
    if unknown := [name for name, x in kwargs.items() if x is not None and name not in NO_MATTER]:
        raise NotImplementedError(f"the attention argument {unknown[0]!r} is not supported")
    scoring = Scoring(query.shape[-1] ** -0.5 if scaling is None else scaling, window, softcap, s_aux)
    layer: Any = module.layer_idx
    query_SHD, key_SKD, value_SKD = (x[0].transpose(0, 1) for x in (query, key, value))
    out_SHD = layout.attend(layer, query_SHD, key_SKD, value_SKD, scoring)
    return out_SHD.unsqueeze(0), None


AttentionInterface.register(ATTENTION, attention)

AttentionMaskInterface.register(ATTENTION, mask)


class Lines:
    """T packed tokens as padded lines, up to G for each of P prompts: what stands where.

    `place` and `collect` are one gather each. A padding cell holds a token of the same owner, its first: nothing that
    is collected sees it, but 0 times what is not finite would be seen.

    Args:
        lengths: tokens of each line; the lines stand one after another in the packed row.
        places: for each line, its prompt and its position among the lines of that prompt.
        owners: of each prompt, ascending from 0; None: all have one.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        places: Sequence[tuple[int, int]],
        P: int,
        *,
        owners: Sequence[int] | None = None,
        device: torch.device | str,
    ):
        self.P, self.G, self.width = P, max((g + 1 for _, g in places), default=0), max(lengths, default=0)
        lengths_B = torch.tensor(lengths, dtype=torch.long)
        starts_B = torch.tensor([(p * self.G + g) * self.width for p, g in places], dtype=torch.long)
        at_T = torch.arange(int(lengths_B.sum()))
        cell_T = at_T + (starts_B - lengths_B.cumsum(0) + lengths_B).repeat_interleave(lengths_B)
        token_N = torch.full((P * self.G * self.width,), -1).index_copy(0, cell_T, at_T)
        self._empty_N = on_device((token_N < 0).nonzero()[:, 0], device)
        first_P = torch.tensor(_first_tokens(lengths, places, owners or [0] * P), dtype=torch.long)
        token_N = torch.where(token_N < 0, first_P.repeat_interleave(self.G * self.width), token_N)
        self._cell_T, self._token_N = on_device(cell_T, device), on_device(token_N, device)
        self._indices: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def place(self, x_THD: Tensor, K: int, *, scale: float = 1.0) -> Tensor:
        """Return the tokens' heads, times `scale` -> [P, K, G, R, width, D]."""
        (T, H, D), (there, back, _) = x_THD.shape, self._indices_of(x_THD.shape[1], K)
        out = Moved.apply(x_THD.reshape(T * H, D), there, back, None, scale)
        return out.view(self.P, K, self.G, H // K, self.width, D)  # type: ignore[union-attr]

    def collect(self, x_PKGRCD: Tensor) -> Tensor:
        """Return the inverse of `place` -> [T, H, D]."""
        _, K, _, R, _, D = x_PKGRCD.shape
        there, back, empty = self._indices_of(K * R, K)
        out = Moved.apply(x_PKGRCD.reshape(-1, D), back, there, empty if len(empty) else None, 1.0)
        return out.view(-1, K * R, D)  # type: ignore[union-attr]

    def _indices_of(self, H: int, K: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return for H heads in K sets: which of T*H each cell holds, the cell of each of T*H, the cells that are
        empty."""
        if (H, K) not in self._indices:
            head_KR = torch.arange(H, device=self._token_N.device).view(K, 1, -1, 1)
            token_PGC = self._token_N.view(self.P, 1, self.G, 1, self.width)
            there = token_PGC * H + head_KR
            cells = torch.arange(there.numel(), device=there.device).view(there.shape)
            by_head_NH = cells.permute(0, 2, 4, 1, 3).reshape(-1, H)
            back, empty = by_head_NH[self._cell_T].view(-1), by_head_NH[self._empty_N].view(-1)
            self._indices[H, K] = there.view(-1), back, empty
        return self._indices[H, K]


def _first_tokens(lengths: Sequence[int], places: Sequence[tuple[int, int]], owners: Sequence[int]) -> list[int]:
    """Return for each prompt the first token of its owner; 0 where that has none."""
    first, at = dict[int, int](), 0
    for length, (prompt, _) in zip(lengths, places, strict=True):
        if length:
            first.setdefault(owners[prompt], at)
        at += length
    return [first.get(owner, 0) for owner in owners]


class Moved(torch.autograd.Function):
    """Rows of `x` at other places: `there` says which row each place gets, `back` the place of each row. The gradient
    goes the other way, 0 for the rows `unused`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Tensor, back: Tensor, unused: Tensor | None, scale: float) -> Tensor:
        ctx.indices, ctx.scale = (back, unused), scale
        return _gather(x, there, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        back, unused = ctx.indices
        grad = _gather(grads[0], back, ctx.scale)
        return grad if unused is None else grad.index_fill_(0, unused, 0.0), None, None, None, None


def _gather(x: Tensor, rows: Tensor, scale: float) -> Tensor:
    out = x.index_select(0, rows)
    return out if scale == 1 else out.mul_(scale)


class SharedPrompts:
    """The layout of a micro-batch: P prompts, then B completions, each belonging to one prompt.

    It holds numbers of tokens and of cells of padded lines, none of pairs of tokens: those are made with the scores.

    Args:
        prompt_lengths: tokens of each prompt; 0 is allowed (supervised data without a prompt).
        completion_lengths: tokens of each completion; 0 is allowed.
        prompt_of_row: for each completion the index of its prompt, ascending.
        owners: of each prompt, ascending from 0, where several learners have the micro-batch; they see nothing of each
            other, not even a number that is not finite.

    Example: two prompts of 3 and 2 tokens, the first with two completions (2 and 1 tokens), the second with one (2):
        SharedPrompts([3, 2], [2, 1, 2], [0, 0, 1])    packed row: a a a b b | A A | B | C C    (S = 10)
    """

    def __init__(
        self,
        prompt_lengths: Sequence[int],
        completion_lengths: Sequence[int] = (),
        prompt_of_row: Sequence[int] = (),
        *,
        owners: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ):
        P, members = len(prompt_lengths), [0] * len(prompt_lengths)
        places = []
        for prompt in prompt_of_row:
            places.append((prompt, members[prompt]))
            members[prompt] += 1
        self.prompts = Lines(prompt_lengths, [(p, 0) for p in range(P)], P, owners=owners, device=device)
        self.completions = Lines(completion_lengths, places, P, owners=owners, device=device)
        self.P, self.G, self.L, self.C = P, self.completions.G, self.prompts.width, self.completions.width
        self.split = sum(prompt_lengths)
        self.ragged = len(set(prompt_lengths)) > 1
        lengths_P11 = on_device(prompt_lengths, device, torch.long)[:, None, None]
        self.at_L, self.at_C = torch.arange(self.L, device=device), torch.arange(self.C, device=device)
        self.at_PC1 = lengths_P11 + self.at_C[:, None]  # of a completion's tokens, behind their prompts
        self.padding_P1L = self.at_L >= lengths_P11  # True: not a token of this prompt
        self._last_PL = self._last_PGC = None  # the last token of its line that each sees; None: itself
        self._in_windows = False
        self.lengths = (prompt_lengths, completion_lengths, prompt_of_row)
        self.states = Segments(partial(segments_of_groups, *self.lengths), device=device)

    def see_ahead(self, ahead_S: Tensor, *, in_windows: bool = False) -> None:
        """See `Layout.see_ahead`; an image is whole in its prompt or its completion."""
        self._in_windows = in_windows
        prompts, completions = ahead_S[: self.split, None, None], ahead_S[self.split :, None, None]
        if self.L:
            self._last_PL = self.at_L + self.prompts.place(prompts, 1)[:, 0, 0, 0, :, 0]
        if self.C:
            self._last_PGC = self.at_C + self.completions.place(completions, 1)[:, 0, :, 0, :, 0]

    def attend(self, layer: int, query_SHD: Tensor, key_SKD: Tensor, value_SKD: Tensor, scoring: Scoring) -> Tensor:
        query_SHD, key_SKD = (x.to(value_SKD.dtype) for x in (query_SHD, key_SKD))  # autocast rotates in float32
        scale, K, split, out = scoring.factors(value_SKD.dtype)[0], key_SKD.shape[1], self.split, []
        key_PKLD, value_PKLD = (self.prompts.place(x[:split], K)[:, :, 0, 0] for x in (key_SKD, value_SKD))
        if self.L:
            query, sinks = self.prompts.place(query_SHD[:split], K, scale=scale)[:, :, 0], scoring.sinks_of(K)
            mixed = _causal(query, key_PKLD, value_PKLD, self.at_L, scoring, sinks, self._last(self._last_PL, scoring))
            out.append(self.prompts.collect(mixed.unsqueeze(2)))
        if self.C:
            query = self.completions.place(query_SHD[split:], K, scale=scale)
            key, value = (self.completions.place(x[split:], K)[:, :, :, 0] for x in (key_SKD, value_SKD))
            if self.L:
                mixed = self._completions(query, key, value, key_PKLD, value_PKLD, scoring)
            else:
                flat_q, flat_k, flat_v = (x.flatten(0, 2).unsqueeze(1) for x in (query, key, value))
                sinks = scoring.sinks_of(K)
                if sinks is not None:
                    sinks = sinks[:, None].expand(*query.shape[:4], 1).flatten(0, 2).unsqueeze(1)
                last = self._last(self._last_PGC, scoring)
                last = None if last is None else last[:, None].expand(-1, K, -1, -1).flatten(0, 2)
                mixed = _causal(flat_q, flat_k, flat_v, self.at_C, scoring, sinks, last).view(*query.shape[:-1], -1)
            out.append(self.completions.collect(mixed))
        return torch.cat(out)

    def _completions(
        self, query: Tensor, key: Tensor, value: Tensor, key_PKLD: Tensor, value_PKLD: Tensor, scoring: Scoring
    ) -> Tensor:
        """[P, K, G, R, C, D] as `query`."""
        last_PGC = self._last(self._last_PGC, scoring)
        mask_own = mask_of(_hidden(self.at_C, scoring.window, last_PGC))
        mask_own = mask_own if last_PGC is None else mask_own[:, None, :, None]
        mask_prompt = None
        if self.ragged or scoring.window is not None:
            mask_prompt = mask_of(self._hidden_prompt(scoring.window))
        if scoring.softcap is None:
            inputs = (query, key, value, key_PKLD, value_PKLD, mask_own, mask_prompt, scoring.sinks, scoring)
            return _Merged.apply(*inputs)  # type: ignore[return-value]
        return _merge(query, key, value, key_PKLD, value_PKLD, mask_own, mask_prompt, scoring)[0]

    def _last(self, last: Tensor | None, scoring: Scoring) -> Tensor | None:
        """Return the last token that each sees in a layer; None: itself."""
        return None if self._in_windows and scoring.window is None else last

    def _hidden_prompt(self, window: int | None) -> Tensor:
        """[P, 1, 1, 1 or C, L], True where a completion token may not see a prompt key."""
        hidden_PCL = self.padding_P1L if window is None else self.padding_P1L | (self.at_L <= self.at_PC1 - window)
        return hidden_PCL[:, None, None]


def _merge(
    query_PKGRCD: Tensor,
    key_PKGCD: Tensor,
    value_PKGCD: Tensor,
    key_PKLD: Tensor,
    value_PKLD: Tensor,
    mask_own: Tensor,
    mask_prompt: Tensor | None,
    scoring: Scoring,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (attention of scaled queries over both key sets [P, K, G, R, C, D], and its exponentials: own
    [P, K, G, R, C, C], the prompt's [P, K, G*R*C, L], and their sum over both [P, K, G, R, C, 1])."""
    P, K, G, R, C, D = query_PKGRCD.shape
    rows, lines, wide = (P, K, G, R, C), (P, K, G, R * C), value_PKLD.shape[-1]
    sinks = None if scoring.sinks is None else scoring.sinks.view(K, 1, R, 1, 1)
    own = scoring.scores(query_PKGRCD.view(*lines, D), key_PKGCD.transpose(-1, -2)).view(*rows, C)
    own.add_(mask_own)
    shared = scoring.scores(query_PKGRCD.view(P, K, -1, D), key_PKLD.transpose(-1, -2))
    if mask_prompt is not None:
        shared.view(P, K, -1, C, shared.shape[-1]).add_(mask_prompt)
    with torch.no_grad():
        top = torch.maximum(shared.amax(-1).view(rows), own.amax(-1)).unsqueeze(-1)
        top = top if sinks is None else torch.maximum(top, sinks)
    own, shared = own.sub_(top).exp_(), shared.sub_(top.view(P, K, -1, 1)).exp_()
    total = (own.sum(-1) + shared.sum(-1).view(rows)).unsqueeze(-1)
    total = total if sinks is None else total + (sinks - top).exp()
    mixed = (shared.to(value_PKLD.dtype) @ value_PKLD).view(*lines, wide)
    mixed = mixed + own.view(*lines, C).to(value_PKGCD.dtype) @ value_PKGCD
    return (mixed.view(*rows, wide) / total).to(value_PKGCD.dtype), own, shared, total


class _Merged(torch.autograd.Function):
    """`_merge` without a softcap, and its gradient. With E the exponentials, Z their sum, O = E V / Z:

        dV = E^T (dO / Z)      dS = E * ((dO / Z) V^T - sum(dO * O) / Z)      dQ = dS K      dK = dS^T Q

    for each of the two key sets (dQ and dK times what products are multiplied with), and -sum(dO * O) E / Z for a sink,
    which is in Z and has no value. (Autograd would come to the same with more passes over [G*R*C, L].)
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, *rest: Any) -> Tensor:
        scoring: Scoring = rest[-1]
        out, own, shared, total = _merge(query, *rest[:6], scoring)  # pyright: ignore[reportCallIssue]
        ctx.save_for_backward(query, *rest[:4], out, own, shared, total)
        ctx.factor = scoring.factors(query.dtype)[1]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        query, key, value, prompt_key, prompt_value, out, own, shared, total = ctx.saved_tensors
        P, K, G, R, C, _ = query.shape
        lines, group = (P, K, G, R * C, -1), (P, K, G * R * C, -1)
        exact, coarse = total.dtype, value.dtype
        grad = grads[0].to(exact) / total
        along = (grad * out).sum(-1, keepdim=True)
        grad = grad.to(coarse)
        grad_sinks = None
        if ctx.needs_input_grad[7]:
            of_sinks = total - own.sum(-1, keepdim=True) - shared.sum(-1).view(total.shape)
            grad_sinks = (along * of_sinks).sum((0, 2, 4, 5)).neg().view(-1)

        slope = (grad.view(lines) @ value.transpose(-1, -2)).to(exact).sub_(along.view(lines)).mul_(own.view(lines))
        slope = slope.to(coarse)
        grad_value = own.view(lines).to(coarse).transpose(-1, -2) @ grad.view(lines)
        grad_key = slope.transpose(-1, -2) @ query.view(lines)
        grad_query = slope @ key

        slope = (grad.view(group) @ prompt_value.transpose(-1, -2)).to(exact).sub_(along.view(group)).mul_(shared)
        slope = slope.to(coarse)
        grad_prompt_value = shared.to(coarse).transpose(-1, -2) @ grad.view(group)
        grad_prompt_key = slope.transpose(-1, -2) @ query.view(group)
        grad_query = grad_query.view(group) + slope @ prompt_key
        if ctx.factor != 1:
            for each in (grad_query, grad_key, grad_prompt_key):
                each.mul_(ctx.factor)
        grad_query, of_prompt = grad_query.view(query.shape), (grad_prompt_key, grad_prompt_value)
        return grad_query, grad_key, grad_value, *of_prompt, None, None, grad_sinks, None


def _causal(
    query_BKRTD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    at_T: Tensor,
    scoring: Scoring,
    sinks: Tensor | None,
    last_BT: Tensor | None = None,
) -> Tensor:
    """Plain causal attention of scaled queries -> [B, K, R, T, D]; `sinks` [K, R, 1] or [B, K, R, 1]; `last_BT` is the
    last token that each sees, where that is not itself. Lines are padded on the right, so causality alone hides the
    padding."""
    B, K, R, T, D = query_BKRTD.shape
    whole = scoring.window is None or scoring.window >= T
    factor = scoring.factors(query_BKRTD.dtype)[1]
    plain = scoring.softcap is None and sinks is None and whole and last_BT is None  # torch's kernels know of no sinks
    # In 16 bits the two ways differ by hundredths of a nat, so a forward without a graph takes the one of training.
    unrecorded = not torch.is_grad_enabled() and query_BKRTD.itemsize > 2
    if plain and (query_BKRTD.is_cuda or unrecorded or T > CPU_FUSED_FROM):  # gpu-aware
        out_BHTD = scaled_dot_product_attention(
            query_BKRTD.view(B, K * R, T, D), key_BKTD, value_BKTD, is_causal=True, scale=factor, enable_gqa=R > 1
        )
        return out_BHTD.reshape(B, K, R, T, -1)
    scores = scoring.scores(query_BKRTD.view(B, K, R * T, D), key_BKTD.transpose(-1, -2))
    mask = mask_of(_hidden(at_T, scoring.window, last_BT))
    scores = scores.view(B, K, R, T, T) + (mask if last_BT is None else mask[:, None, None])
    weights = softmax(scores, None if sinks is None else sinks[..., None])
    return (weights.reshape(B, K, R * T, T).to(value_BKTD.dtype) @ value_BKTD).view(B, K, R, T, -1)


def _hidden(at_T: Tensor, window: int | None, last: Tensor | None = None) -> Tensor:
    """[T, T], or [..., T, T] of `last` [..., T], True where the token at a position (rows) may not see that at another
    (columns)."""
    hidden_TT = at_T > (at_T if last is None else last)[..., None]
    return hidden_TT if window is None else hidden_TT.logical_or_(at_T <= at_T[:, None] - window)


def mask_of(hidden: Tensor) -> Tensor:
    """Return -inf for hidden keys, else 0, to be added to scores. Filling scores in place is many times slower on a
    CPU."""
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, float("-inf"))
