"""One fused sampling step for a whole batch: logits in, one token per row and its log-probability out.

Each row has its own temperature, top-k, top-p, min-p, penalties and seed. Randomness is counter-based: the uniform of
token t of a completion is a hash of (seed, t) and nothing else, so a completion does not depend on what shares its
batch. A token is drawn by inverting the cumulative distribution at that uniform.

The reported log-probability is that of the whole temperature-scaled distribution of the policy, before penalties,
biases and a grammar's mask and before top-k, top-p and min-p (at temperature 0, the untempered distribution's). Where
these, or logits of -inf, leave a part of the vocabulary, that part is reported too, and the log-probability under the
same distribution restricted to it (`KeptRows`), which is what the trainer's forward then computes.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from groupwise.model.transfer import on_device
from groupwise.recorded import DROPPED, KEPT, MaskEntry, mask_entry, words_of
from groupwise.types import SamplingParams

COLDEST = 1e-5  # a lower temperature is this one: the division must not overflow

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def uniforms(seed_B: np.ndarray, counter_B: np.ndarray) -> np.ndarray:
    """SplitMix64 (Steele et al. 2014) of seed and counter -> float64 in [0, 1)."""
    with np.errstate(over="ignore"):
        z = _mix(seed_B.astype(np.uint64) + _GOLDEN) + _GOLDEN * (counter_B.astype(np.uint64) + np.uint64(1))
        return (_mix(z) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def completion_seed(seed: int, index: int) -> int:
    """Return the seed of completion `index` of a request with `seed`."""
    with np.errstate(over="ignore"):
        both = np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64) * _MIX_1 + np.uint64(index)
        return int(_mix(both)[0])


@dataclass(frozen=True)
class RowParams:
    """Sampling parameters of the B rows, as tensors (int64, and the device's widest float). `truncated` says whether
    any row may use top-k, top-p or min-p, `greedy` whether any may have temperature 0."""

    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor
    truncated: bool
    greedy: bool = True

    @property
    def narrowed_B(self) -> Tensor:
        """Return whether top-k, top-p or min-p of a row may leave tokens out."""
        return (self.top_k_B > 0) | (self.top_p_B < 1) | (self.min_p_B > 0)


@dataclass(frozen=True)
class KeptRows:
    """The part of the vocabulary that the tokens of B rows could be drawn from (bools), and the log-probability of each
    token under the policy's tempered distribution restricted to that part: z_a / T - log sum_{v kept} exp(z_v / T)."""

    kept_BV: Tensor
    logprob_B: Tensor

    def of(self, rows: Sequence[int]) -> KeptRows:
        """Return those of some of the rows, ascending."""
        if len(rows) == len(self.logprob_B):
            return self
        at = on_device(rows, self.logprob_B.device)
        return KeptRows(self.kept_BV[at], self.logprob_B[at])


def sample_tokens(
    logits_BV: Tensor, params: RowParams, uniform_B: Tensor, *, drawn_BV: Tensor | None = None
) -> tuple[Tensor, Tensor, KeptRows | None]:
    """Return (token_B int64, logprob_B in the logits' type, what was kept where any row may be narrowed). `uniform_B`
    is in [0, 1), in the widest float of the device, in which probabilities are summed. `drawn_BV` are the logits that
    tokens are drawn from, where they are not the policy's (`reshape`; -inf for what a grammar does not allow)."""
    logprobs_BV = scaled_logprobs(logits_BV, params.temperature_B)
    wanted_BV = logits_BV if drawn_BV is None else drawn_BV
    probs_BV = (logprobs_BV if drawn_BV is None else scaled_logprobs(drawn_BV, params.temperature_B)).exp()
    if params.truncated:
        probs_BV = truncate(probs_BV.to(uniform_B.dtype), params)
    token_B = _draw(probs_BV, uniform_B)
    if params.greedy:
        token_B = torch.where(params.temperature_B == 0, wanted_BV.argmax(-1), token_B)
    logprob_B = logprobs_BV.gather(-1, token_B[:, None])[:, 0]
    if not params.truncated and drawn_BV is None:
        return token_B, logprob_B, None
    kept_BV = wanted_BV > -math.inf
    if params.truncated:
        kept_BV &= (probs_BV > 0) | ~params.narrowed_B[:, None]
    kept_BV |= ~kept_BV.any(-1, keepdim=True)  # NaN logits, which leave nothing
    total_B = logprobs_BV.masked_fill(~kept_BV, -math.inf).logsumexp(-1)
    return token_B, logprob_B, KeptRows(kept_BV, (logprob_B - total_B).clamp(max=0))


def mask_entries(kept_SV: Tensor) -> list[MaskEntry]:
    """Return the entry of each row in a `SamplingMask`; of a large part only bits leave the device, of others their
    ids."""
    vocabulary, device = kept_SV.shape[1], kept_SV.device
    count_S = kept_SV.sum(-1).cpu().numpy()
    few_S = count_S <= vocabulary - count_S
    size_S = np.where(few_S, count_S, vocabulary - count_S)
    listed_S = size_S <= words_of(vocabulary)
    listed, others = np.flatnonzero(listed_S), np.flatnonzero(~listed_S)
    listed_LV = kept_SV if not len(others) else kept_SV[on_device(listed, device)]
    ids = (listed_LV == on_device(few_S[listed], device)[:, None]).nonzero()[:, 1].to("cpu", torch.int32).numpy()
    ids_of_row = iter(np.split(ids, size_S[listed].cumsum()[:-1]))
    bits_of_row = iter(kept_SV[on_device(others, device)].cpu().numpy() if len(others) else ())
    return [
        (KEPT if few else DROPPED, next(ids_of_row)) if is_listed else mask_entry(next(bits_of_row), most=-1)
        for is_listed, few in zip(listed_S, few_S, strict=True)
    ]


def reshape(
    logits_V: Tensor, params: SamplingParams, *, prompt_P: Tensor, said_T: Tensor, ends: Sequence[int]
) -> Tensor:
    """Return the logits that a row's next token is drawn from, in the order in which vLLM applies them.

        min_tokens            `ends` cannot be drawn before so many tokens
        logit_bias            is added
        repetition_penalty    r: of each token of prompt or completion, l / r where l > 0, else l * r (Keskar et al.
                              2019, CTRL, arXiv 1909.05858, section 4.1)
        frequency_penalty     times how often the completion has the token, is subtracted
        presence_penalty      is subtracted for each token that the completion has

    `prompt_P` are the ids of the prompt, each at least once, `said_T` those of the completion so far.
    """
    shaped_V, device = logits_V.clone(), logits_V.device
    if len(said_T) < params.min_tokens and ends:
        shaped_V.index_fill_(0, on_device(ends, device), -math.inf)
    if params.logit_bias:
        ids, added = zip(*params.logit_bias, strict=True)
        shaped_V[on_device(ids, device)] += on_device(added, device, shaped_V.dtype)
    if params.repetition_penalty != 1:
        seen = torch.cat((prompt_P, said_T))  # an id that is there twice is given the same logit twice
        at = shaped_V[seen]
        shaped_V[seen] = torch.where(at > 0, at / params.repetition_penalty, at * params.repetition_penalty)
    if params.frequency_penalty or params.presence_penalty:
        count_V = torch.zeros_like(shaped_V, dtype=torch.int32)
        counts = count_V.index_add_(0, said_T, torch.ones_like(said_T, dtype=torch.int32))[said_T].to(shaped_V.dtype)
        shaped_V[said_T] = shaped_V[said_T] - (params.frequency_penalty * counts + params.presence_penalty)
    return shaped_V


def _draw(probs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Return the tokens at which the cumulative distributions, in the type of `uniform_B`, pass it.

    In two steps, first among blocks of about sqrt(V) tokens and then in one: a running sum is slow, and so is short.
    """
    B, V = probs_BV.shape
    width = math.isqrt(V - 1) + 1
    if V % width:
        probs_BV = torch.nn.functional.pad(probs_BV, (0, width - V % width))
    blocks = probs_BV.view(B, -1, width)
    upto = blocks.sum(-1).to(uniform_B.dtype).cumsum(-1)
    target_B1 = uniform_B[:, None] * upto[:, -1:]
    block_B1 = _passed(upto, target_B1)
    before_B1 = upto.gather(1, (block_B1 - 1).clamp(min=0)).masked_fill(block_B1 == 0, 0.0)
    within = blocks[torch.arange(B, device=blocks.device), block_B1[:, 0]].cumsum(-1, dtype=uniform_B.dtype)
    token_B1 = block_B1 * width + _passed(within, (target_B1 - before_B1).clamp(min=0))
    return token_B1[:, 0].clamp(max=V - 1)  # NaN logits stay in range


def _passed(cumulative_BN: Tensor, target_B1: Tensor) -> Tensor:
    """Return the first index above the target; where rounding says none is, the last that adds anything."""
    total_B1 = cumulative_BN[:, -1:].contiguous()
    index_B1 = torch.searchsorted(cumulative_BN, target_B1, right=True)
    last_B1 = torch.searchsorted(cumulative_BN, total_B1)
    return torch.minimum(index_B1, last_B1).clamp(max=cumulative_BN.shape[1] - 1)


def scaled_logprobs(logits_BV: Tensor, temperature_B: Tensor) -> Tensor:
    """log softmax(logits / temperature); the untempered one where the temperature is 0."""
    scale_B = torch.where(temperature_B == 0, 1.0, temperature_B.clamp(min=COLDEST)).to(logits_BV.dtype)
    return (logits_BV / scale_B[:, None]).log_softmax(-1)


def truncate(probs_BV: Tensor, params: RowParams) -> Tensor:
    """Zero what top-k, then top-p (of what top-k left), then min-p exclude. The most likely token always stays."""
    sorted_BV, order_BV = probs_BV.sort(-1, descending=True)
    rank_V = torch.arange(probs_BV.shape[-1], device=probs_BV.device)
    top_k_B1 = torch.where(params.top_k_B > 0, params.top_k_B, probs_BV.shape[-1])[:, None]
    sorted_BV = sorted_BV.masked_fill(rank_V >= top_k_B1, 0.0)
    before_BV = sorted_BV.cumsum(-1) - sorted_BV
    limit_B1 = params.top_p_B[:, None] * sorted_BV.sum(-1, keepdim=True)
    floor_B1 = params.min_p_B[:, None] * sorted_BV[:, :1]
    narrowed_B1 = params.top_p_B[:, None] < 1
    dropped_BV = (narrowed_B1 & (before_BV >= limit_B1)) | (sorted_BV < floor_B1)
    dropped_BV[:, 0] = False
    return torch.zeros_like(probs_BV).scatter(-1, order_BV, sorted_BV.masked_fill(dropped_BV, 0.0))
