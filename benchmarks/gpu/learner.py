"""Training alone: tokens a second, share of what the GPU multiplies, memory; FlexAttention beside sdpa.

A step is forward, backward and AdamW of LoRA of rank 16 on all linear layers, over frozen bfloat16 weights.

    sequence    one row without a prompt, so that `merged` is torch's sdpa (causal), and flex its own kernels
    groups      prompts of 512 tokens with 16 completions of 992 each

Useful operations are those of `limits.py`: no gradients of frozen weights, nothing that is computed a second time.
Shares are of the GPU's published bfloat16 rate (`PEAKS`), and of a product of 8192 x 8192 x 8192 measured here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from limits import attention_flops, products_of
from subjects import Shape, load, random_ids, samples_of
from torch.nn.functional import scaled_dot_product_attention

from gpu.cases import Cases, Result, Setting
from groupwise.algo.loss import resolve_loss
from groupwise.model.attention import Scoring, SharedPrompts
from groupwise.model.flex import Forest
from groupwise.train.learner import Learner
from groupwise.types import Sample

# TFLOP/s of dense bfloat16 products, from the makers' data sheets, by the device's name
PEAKS = {
    "H200": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "B200": 2250.0,
    "A100": 312.0,
    "L40S": 362.0,
    "4090": 165.2,
}
# of prime-rl, one H100, LoRA of rank 16, its README of 2026-01-15: tokens/s and GiB, by model and tokens a sequence
PRIME_RL = {
    ("0.6B", 16_384): (13_342, 5.1),
    ("0.6B", 65_536): (9_967, 11.5),
    ("4B", 16_384): (6_229, 23.3),
    ("4B", 65_536): (4_164, 42.0),
}
GIB = 1 << 30
MERGED, FLEX = "merged", "flex"


def cases(setting: Setting) -> Cases:
    every: dict[str, Callable[[], Result]] = {"product": lambda: product(setting)}
    every["attention"] = lambda: attention(setting)
    for name, model, shape, way, checkpointed in listed(setting):
        every[name] = lambda m=model, s=shape, w=way, c=checkpointed: training(m, s, w, c, setting)
    return every


def listed(setting: Setting) -> Iterator[tuple[str, str, Shape, str, bool]]:
    """Name, model, shape, attention, whether layers are checkpointed; what says most comes first."""
    short, long = setting.of((16_384, 65_536), (64, 128))
    small, large, mixture, recurrent = setting.of(
        ("0.6B", "4B", "moe", "qwen3.5"), ("tiny", "tiny", "tiny-moe", "tiny-qwen3.5")
    )
    prompt, group = setting.of((512, 16), (16, 3))
    sequence = {tokens: Shape(0, tokens, 1, 1) for tokens in (short, long)}
    groups = {tokens: Shape(prompt, (short - prompt) // group, group, tokens // short) for tokens in (short, long)}
    ways: list[tuple[str, dict[int, Shape], int, str, bool]] = [
        (small, sequence, short, FLEX, True),
        (small, sequence, short, MERGED, True),
        (small, groups, short, FLEX, False),
        (small, groups, short, MERGED, False),
        (large, sequence, short, FLEX, True),
        (large, sequence, short, MERGED, True),
        (large, groups, short, FLEX, True),
        (mixture, groups, short, MERGED, True),
        (recurrent, groups, short, MERGED, True),
        (small, sequence, short, FLEX, False),
        (small, sequence, long, FLEX, True),
        (small, groups, long, FLEX, True),
        (large, sequence, long, FLEX, True),
    ]
    for i, (model, shapes, tokens, way, checkpointed) in enumerate(ways):
        kind = "sequence" if shapes is sequence else "groups"
        mark = ", checkpointed" if checkpointed else ""
        again = f" ({i})" if setting.smoke else ""  # the same tiny model stands for two
        yield f"{model} {kind} {tokens}, {way}{mark}{again}", model, shapes[tokens], way, checkpointed


def training(model: str, shape: Shape, way: str, checkpointed: bool, setting: Setting) -> Result:
    """Seconds of a step and what follows from them."""
    base = load(model, device=setting.device, dtype=setting.dtype)
    learner = Learner(base, attention=way, micro_tokens=shape.packed, gradient_checkpointing=checkpointed)  # type: ignore[arg-type]
    samples, spec = batch_of(shape), resolve_loss("grpo")

    def step() -> None:
        learner.forward_backward(samples, spec)
        learner.optim_step(learning_rate=1e-5)

    seconds = seconds_of(step, setting, warm=2, repeats=setting.of(4, 2))
    row: dict[str, Any] = {"tokens/s": shape.packed / seconds, "seconds": seconds}
    if setting.device != "cpu":
        row["peak GiB"] = torch.cuda.max_memory_allocated() / GIB
    if model in ("0.6B", "4B", "tiny"):
        products = products_of(base, shape.packed, shape.rows * shape.completion)
        useful = sum(each.flops for each in products) + attention_flops(base, shape)
        row["TFLOP/s"] = useful / seconds / 1e12
        row |= {f"share of {name}": row["TFLOP/s"] / rate for name, rate in rates(setting).items()}
    if shape.group == 1 and (model, shape.packed) in PRIME_RL:
        rate, memory = PRIME_RL[model, shape.packed]
        row |= {"prime-rl tokens/s": rate, "prime-rl GiB": memory, "times prime-rl": row["tokens/s"] / rate}
    if learner.why_not_flex is not None:
        row["note"] = f"merged was used: {learner.why_not_flex}"
    return {"row": row}


def batch_of(shape: Shape) -> list[Sample]:
    """A sequence's first token is predicted by nothing, and no loss token."""
    if shape.prompt:
        return samples_of(shape)
    mask, said = (0, *(1,) * (shape.completion - 1)), (-6.9,) * shape.completion
    ids = random_ids(shape.completion, seed=0)
    return [Sample(prompt_ids=(), completion_ids=ids, mask=mask, behaviour_logprobs=said, advantage=1.0)]


def seconds_of(function: Callable[[], object], setting: Setting, *, warm: int = 3, repeats: int = 10) -> float:
    """Median of a call, with all that it started on the device; the peak of memory is of these calls."""
    for _ in range(warm):
        function()
    setting.synchronize()
    if setting.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        setting.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


# -- what the GPU can --------------------------------------------------------------------------------------------------


def product(setting: Setting) -> Result:
    rate = product_rate(setting)
    published = published_rate(setting)
    return {"row": {"TFLOP/s": rate / 1e12, "note": f"published: {published or 'not known'} TFLOP/s"}}


def product_rate(setting: Setting) -> float:
    """Operations a second of a square product."""
    n = setting.of(8192, 256)
    a, b = (torch.randn(n, n, device=setting.device).to(getattr(torch, setting.dtype)) for _ in range(2))
    return 2 * n**3 / seconds_of(lambda: a @ b, setting)


def published_rate(setting: Setting) -> float | None:
    """TFLOP/s by the device's name."""
    if setting.device == "cpu":
        return None
    device = torch.cuda.get_device_name()
    return next((rate for name, rate in PEAKS.items() if name in device), None)


_rates: dict[str, float] = {}


def rates(setting: Setting) -> dict[str, float]:
    """TFLOP/s that shares are of; measured once a process."""
    if not _rates:
        _rates["the product"] = product_rate(setting) / 1e12
        if published := published_rate(setting):
            _rates["the published"] = published
    return _rates


def attention(setting: Setting) -> Result:
    """A layer's attention alone, forward and backward, over one sequence: flex, `merged`, and sdpa as torch has it."""
    tokens, (H, K, D) = setting.of(16_384, 64), setting.of((16, 8, 128), (4, 2, 16))
    dtype, scoring = getattr(torch, setting.dtype), Scoring(D**-0.5)
    shapes = ((H, D), (K, D), (K, D))
    q, k, v = (torch.randn(tokens, *each, device=setting.device, dtype=dtype).requires_grad_() for each in shapes)
    layouts: dict[str, Any] = {MERGED: SharedPrompts([0], [tokens], [0], device=setting.device)}
    if setting.device != "cpu":
        layouts = {FLEX: Forest.of_groups([0], [tokens], [0], device=setting.device), **layouts}

    def sdpa() -> torch.Tensor:
        heads = (x.transpose(0, 1)[None] for x in (q, k, v))
        return scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)

    ways: dict[str, Callable[[], torch.Tensor]] = {
        name: lambda layout=layout: layout.attend(0, q, k, v, scoring) for name, layout in layouts.items()
    }
    rows = []
    for name, way in {**ways, "sdpa": sdpa}.items():

        def both(way: Callable[[], torch.Tensor] = way) -> None:
            out = way()
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

        seconds = seconds_of(both, setting)
        flops = 12 * D * H * tokens * (tokens + 1) // 2
        rows.append({"attention": name, "seconds": seconds, "TFLOP/s": flops / seconds / 1e12})
    fastest = min(rows, key=lambda row: row["seconds"])["attention"]
    return {"rows": [row | ({"note": "the fastest"} if row["attention"] == fastest else {}) for row in rows]}
