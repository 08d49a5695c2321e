"""One fused sampling step for a whole batch: logits in, one token per row and its log-probability out.

Each row has its own temperature, top-k, top-p, min-p and seed. Randomness is counter-based: the uniform of token t of a
completion is a hash of (seed, t) and nothing else, so a completion does not depend on what shares its batch. A token is
drawn by inverting the cumulative distribution at that uniform.

The reported log-probability is that of the whole temperature-scaled distribution, before top-k, top-p and min-p: it is
what the trainer's forward computes (at temperature 0, the untempered distribution's).

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

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
    """The seed of completion `index` of a request with `seed`."""
    with np.errstate(over="ignore"):
        both = np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64) * _MIX_1 + np.uint64(index)
        return int(_mix(both)[0])


@dataclass(frozen=True)
class RowParams:
    """Sampling parameters of the B rows, as tensors (float64, int64). `truncated` says whether any row uses top-k,
    top-p or min-p."""

    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor
    truncated: bool


def sample_tokens(logits_BV: Tensor, params: RowParams, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """-> (token_B int64, logprob_B in the logits' type). `uniform_B` is float64 in [0, 1)."""
    greedy_B = params.temperature_B == 0
    scale_B = torch.where(greedy_B, 1.0, params.temperature_B.clamp(min=COLDEST)).to(logits_BV.dtype)
    logprobs_BV = (logits_BV / scale_B[:, None]).log_softmax(-1)
    probs_BV = logprobs_BV.double().exp()
    if params.truncated:
        probs_BV = truncate(probs_BV, params)
    cumulative_BV = probs_BV.cumsum(-1)
    total_B1 = cumulative_BV[:, -1:].contiguous()
    token_B1 = torch.searchsorted(cumulative_BV, uniform_B[:, None] * total_B1, right=True)
    # rounding may point one past the last token that has any probability
    last_B1 = torch.searchsorted(cumulative_BV, total_B1)
    token_B = torch.minimum(token_B1, last_B1)[:, 0].clamp(max=logits_BV.shape[-1] - 1)  # NaN logits stay in range
    if bool(greedy_B.any()):
        token_B = torch.where(greedy_B, logits_BV.argmax(-1), token_B)
    return token_B, logprobs_BV.gather(-1, token_B[:, None])[:, 0]


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
