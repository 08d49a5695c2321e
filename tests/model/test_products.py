"""Products of 16-bit matrices whose sums stay in float32, and what that does for attention."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch

from groupwise.engine.kv_cache import Extend, Grid, KeyValueCache, Prefill
from groupwise.engine.local import LocalEngine
from groupwise.model import attention
from groupwise.model.attention import Scoring, SharedPrompts
from groupwise.model.load import load_model
from groupwise.model.prefix_tree import PrefixTree
from groupwise.model.products import product
from groupwise.train.learner import Learner
from groupwise.types import PolicyVersion, Sample, SamplingParams, SamplingRequest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from simulated_gpu import SimulatedGpu

HALF = [torch.bfloat16, torch.float16]


def factors(*, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    left, right = (torch.randn(shape, generator=g).to(dtype) for shape in ((2, 3, 5, 64), (2, 3, 7, 64)))
    return left, right


@pytest.mark.parametrize("dtype", HALF)
def test_sums_are_not_rounded(dtype: torch.dtype):
    left, right = factors(dtype=dtype)
    want = left.double() @ right.double().transpose(-1, -2)
    with torch.autocast("cpu", torch.bfloat16):
        got = product(left, right.transpose(-1, -2))
    assert got.dtype == torch.float32
    assert float((got - want).abs().max()) < 1e-5 < 1e-3 < float((left @ right.transpose(-1, -2) - want).abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_more_bits_are_multiplied_as_ever(dtype: torch.dtype):
    left, right = factors(dtype=dtype)
    assert product(left, right.transpose(-1, -2)).equal(left @ right.transpose(-1, -2))


@pytest.mark.parametrize("dtype", HALF)
def test_gradients_are_those_of_the_product(dtype: torch.dtype):
    left, right = (x.requires_grad_() for x in factors(dtype=dtype))
    slope = torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(1))
    mine = torch.autograd.grad((product(left, right.transpose(-1, -2)) * slope).sum(), (left, right))
    exact = [x.detach().double().requires_grad_() for x in (left, right)]
    theirs = torch.autograd.grad((exact[0] @ exact[1].transpose(-1, -2) * slope).sum(), exact)
    for one, other in zip(mine, theirs, strict=True):
        assert one.dtype == dtype
        assert float((one - other).norm() / other.norm()) < 0.01


@pytest.mark.parametrize("shape", [(5, 64), (3, 5, 64), (2, 3, 5, 64)])
def test_a_gpu_multiplies_them_in_one_kernel(shape: tuple[int, ...]):
    """Copies in float32 would be twice the memory of the factors."""
    left = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    with SimulatedGpu() as gpu, torch.no_grad():
        there = left.to("cuda")
        before = gpu.counts.operations.copy()
        got = product(there, there.transpose(-1, -2))
        assert gpu.counts.operations - before == {"mm" if left.ndim == 2 else "bmm": 1}
        assert got.cpu().equal(product(left, left.transpose(-1, -2)))


# ---- attention that is sure ----

H, K, D = 8, 4, 128
PROMPT, SAID = 40, 30


def sharp(tokens: int) -> list[torch.Tensor]:
    """Queries, keys and values of 16 bits, whose scores have a deviation of 8."""
    g = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(tokens, heads, D, generator=g).bfloat16() for heads in (H, K, K))
    return [query * 8, key, value]


def merged(query, key, value):
    return SharedPrompts([PROMPT], [SAID], [0]).attend(0, query, key, value, Scoring(D**-0.5))


def capped(query, key, value):
    """By the ops that autograd records."""
    return SharedPrompts([PROMPT], [SAID], [0]).attend(0, query, key, value, Scoring(D**-0.5, softcap=1e3))


def prefix_tree(query, key, value):
    tokens = PROMPT + SAID
    return PrefixTree([[*range(tokens)]], [tokens]).attend(0, query, key, value, Scoring(D**-0.5))


def decoded(query, key, value):
    """The prompt whole, then a token at a time."""
    cache, scoring = KeyValueCache(1), Scoring(D**-0.5)
    slots = cache.add_prompts([PROMPT])
    parts = [x.split([PROMPT, *(1,) * SAID]) for x in (query, key, value)]
    (first, *rest) = zip(*parts, strict=True)
    out = [Prefill(cache, slots, query.device).attend(0, *first, scoring)]
    cache.rows.reserve(1, 1)
    grid = Grid([0], [PROMPT], [PROMPT], query.device)
    out += [Extend(cache, grid, slice(0, 1), [i]).attend(0, *token, scoring) for i, token in enumerate(rest)]
    return torch.cat(out)


@pytest.mark.parametrize("attend", [merged, capped, prefix_tree, decoded])
def test_scores_of_16_bits_are_summed_in_float32(attend):
    """Scores and queries rounded to 16 bits are off by as much as the score is large, the output by 1 %."""
    inputs = sharp(PROMPT + SAID)
    exact = merged(*(x.double() for x in inputs))
    with torch.no_grad():
        assert float((attend(*inputs) - exact).norm() / exact.norm()) < 0.004


@pytest.mark.parametrize("attend", [merged, capped, prefix_tree])
def test_their_gradients_are_as_close(attend):
    inputs = [x.requires_grad_() for x in sharp(PROMPT + SAID)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    slope = torch.randn(PROMPT + SAID, H, D, generator=torch.Generator().manual_seed(1))
    mine = torch.autograd.grad((attend(*inputs) * slope).sum(), inputs)
    theirs = torch.autograd.grad((merged(*exact) * slope).sum(), exact)
    for one, other in zip(mine, theirs, strict=True):
        assert float((one - other).norm() / other.norm()) < 0.01


def rounded(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """As `@` has it."""
    return (left @ right).to(torch.promote_types(left.dtype, torch.float32))


def test_log_probabilities_are_closer_to_float64(monkeypatch: pytest.MonkeyPatch):
    """Those of the sampler and of the trainer; beside them, as they were with scores of 16 bits."""
    base = load_model("starter", device="cpu", dtype="bfloat16", cast_lm_head="float32")
    whole = load_model("starter", device="cpu", dtype="float64")
    whole.model.load_state_dict({name: x.double() for name, x in base.model.state_dict().items()})
    prompts = [tuple(base.tokenizer(f"What is {a} + {2 * a}?")["input_ids"]) for a in (7, 31, 118, 64)]
    params = SamplingParams(max_tokens=32, seed=3, ignore_eos=True)
    said = [SamplingRequest(prompt_ids=prompt, params=params, n=8, version=PolicyVersion.base()) for prompt in prompts]

    def error() -> tuple[float, float]:
        """Root of the mean square over 1,024 tokens, of the trainer's and the sampler's."""
        with closing(LocalEngine(base, max_rows=32)) as engine:
            groups = engine.generate(said)
        samples = [
            Sample(
                prompt_ids=prompt,
                completion_ids=c.token_ids,
                mask=(1,) * len(c.token_ids),
                behaviour_logprobs=c.logprobs,
            )
            for prompt, group in zip(prompts, groups, strict=True)
            for c in group
        ]
        trained, exact = (torch.tensor(Learner(each).forward(samples)) for each in (base, whole))
        sampled = torch.tensor([sample.behaviour_logprobs for sample in samples])
        return float((trained - exact).square().mean().sqrt()), float((sampled - exact).square().mean().sqrt())

    now = error()
    monkeypatch.setattr(attention, "product", rounded)
    monkeypatch.setattr(Scoring, "factors", lambda self, dtype: (self.scaling, 1.0))
    before = error()
    assert now[0] < 0.9 * before[0] and now[1] < 0.9 * before[1]
