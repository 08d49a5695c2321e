"""Sampling with base weights that are rounded, or laid out for the CPU: what is computed, what it depends on, what is
trained of it, what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from groupwise.config.run import parse_config
from groupwise.engine import multi_lora
from groupwise.engine.cpu_weights import KINDS, Float32Matrix, Int8Matrix, lays_out, unavailable
from groupwise.engine.local import LocalEngine
from groupwise.errors import ConfigError
from groupwise.model.packed_check import packed_tolerance
from groupwise.run.plan import make_plan
from groupwise.store.tracking import read_metrics
from groupwise.types import Completion, PolicyVersion, SamplingParams, SamplingRequest
from starter_run import starter_run
from wording import raises

BASE, FIRST, SECOND = PolicyVersion.base(), PolicyVersion("first", 1), PolicyVersion("second", 1)
HAS = torch.cpu.get_capabilities()
WHY_NOT = {kind: unavailable(kind) for kind in KINDS}
of_kind = {kind: pytest.mark.skipif(bool(why), reason=why) for kind, why in WHY_NOT.items()}
each_kind = pytest.mark.parametrize("kind", [pytest.param(kind, marks=mark) for kind, mark in of_kind.items()])


@pytest.fixture
def open_engine() -> Iterator[Callable[..., LocalEngine]]:
    opened: list[LocalEngine] = []

    def make(base: Any, **options: Any) -> LocalEngine:
        opened.append(LocalEngine(base, max_rows=16, **options))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


def asked(version: PolicyVersion = BASE, *, seed: int = 0, n: int = 2) -> SamplingRequest:
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=seed, ignore_eos=True)
    return SamplingRequest(prompt_ids=tuple(range(3 + seed, 12 + seed)), n=n, version=version, params=params)


def said(groups: list[list[Completion]]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in chain(*groups)]


def gap(engine: LocalEngine, exact: LocalEngine, version: PolicyVersion) -> float:
    """The mean absolute gap between what `engine` reports of its samples and the log-probabilities of `exact`."""
    gaps = []
    for seed in range(3):
        request = asked(version, seed=seed)
        for completion in engine.generate([request])[0]:
            scored = exact.score(request.prompt_ids, completion.token_ids, version)
            gaps += [abs(a - b) for a, b in zip(completion.logprobs, scored, strict=True)]
    return sum(gaps) / len(gaps)


# ---- products ----


@of_kind["int8"]
def test_int8_is_the_product_of_rounded_weights_and_rounded_inputs():
    torch.manual_seed(0)
    x, matrix = torch.randn(5, 48), torch.randn(48, 32)
    x[3] = 0
    scale, step = matrix.abs().amax(0) / 127, x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    whole_x, whole = (x.double() / step + 0.5).floor(), (matrix / scale).round().double()
    exact = (whole_x @ whole * step * scale).float()
    product = Int8Matrix(matrix).times(x)
    torch.testing.assert_close(product, exact, rtol=1e-5, atol=1e-5)
    assert 1e-3 < float((product - x @ matrix).norm() / (x @ matrix).norm()) < 2e-2


@of_kind["int8"]
def test_a_tokens_int8_product_is_the_same_whatever_else_is_in_the_batch():
    torch.manual_seed(0)
    x, matrix = torch.randn(70, 48), Int8Matrix(torch.randn(48, 32))
    x[1] *= 1000
    every = matrix.times(x)
    for row in (0, 1, 69):
        assert torch.equal(matrix.times(x[row : row + 1])[0], every[row])


def test_a_tokens_float32_product_is_torchs_whatever_else_is_in_the_batch():
    torch.manual_seed(0)
    x, matrix = torch.randn(70, 512), torch.randn(512, 1024) / 512**0.5
    laid_out = Float32Matrix(matrix)
    every = laid_out.times(x)
    torch.testing.assert_close(every, x @ matrix, rtol=1e-5, atol=1e-5)
    for rows in (2, 3, 4, 33):
        assert torch.equal(laid_out.times(x[:rows]), every[:rows])


# ---- the engine ----


@each_kind
@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama"])
def test_the_gap_to_the_exact_policy_is_that_of_rounding(
    open_engine, make_base, make_adapter, kind: str, architecture: str
):
    base = make_base(architecture, dtype=torch.float32)
    exact, rounded = open_engine(base), open_engine(base, dtype=kind)
    for engine in (exact, rounded):
        engine.load(FIRST, make_adapter(base, seed=1))
    for version in (BASE, FIRST):
        assert gap(exact, exact, version) < 1e-5
        assert 1e-5 < gap(rounded, exact, version) < 0.3  # of random weights, and an adapter as large
        assert gap(rounded, rounded, version) < (1e-4 if kind == "int8" else 0.05)


@each_kind
def test_policies_that_share_a_batch_say_what_they_say_alone(open_engine, make_base, make_adapter, kind: str):
    base = make_base(dtype=torch.float32)
    engine = open_engine(base, dtype=kind)
    engine.load(FIRST, make_adapter(base, seed=1))
    engine.load(SECOND, make_adapter(base, seed=2, rank=5))
    requests = [asked(FIRST, seed=1), asked(BASE, seed=2), asked(SECOND, seed=3)]
    together = engine.generate(requests)
    alone = [engine.generate([request])[0] for request in requests]
    assert said(together) == said(alone)
    for one, other in zip(chain(*together), chain(*alone), strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4 if kind == "int8" else 0.05)


@each_kind
def test_adapters_are_not_rounded(open_engine, make_base, make_adapter, kind: str):
    """Neither where a policy has the batch to itself nor where it shares it: also what is far below a step between two
    rounded weights."""
    base = make_base(dtype=torch.float32)
    engine = open_engine(base, dtype=kind)
    bank, attention = engine._shared.bank, engine._model.model.layers[0].self_attn
    modules = (attention.q_proj, attention.k_proj, attention.v_proj)
    engine.load(FIRST, make_adapter(base, seed=1))
    weights = engine._adapters[FIRST]
    for _, b in weights.pairs.values():
        b.mul_(1e-4)
    x = torch.randn(6, modules[0].in_features, generator=torch.Generator().manual_seed(0))
    pairs = [weights.pairs[f"model.layers.0.self_attn.{name}_proj"] for name in "qkv"]
    exact = torch.cat([x @ a @ b for a, b in pairs], -1)
    bank.select([None] * 6)
    rounded = bank.project(modules, x)
    for owners in ([weights] * 6, [weights, None] * 3):
        bank.select(owners)
        mine = torch.tensor([owner is weights for owner in owners])
        added = bank.project(modules, x) - rounded
        assert float(exact.abs().max()) > 1e-5 and not added[~mine].any()
        torch.testing.assert_close(added[mine], exact[mine], rtol=1e-2, atol=1e-6)


@each_kind
def test_weights_that_are_trained_themselves_are_rounded_anew(open_engine, make_base, kind: str):
    base = make_base(dtype=torch.float32)
    engine = open_engine(base, dtype=kind)
    before = engine.score((1, 2, 3), (4, 5, 6), BASE)
    with torch.no_grad():
        for layer in base.model.model.layers:
            layer.mlp.down_proj.weight.mul_(-2)
    engine.adopt(FIRST)
    after, exact = (each.score((1, 2, 3), (4, 5, 6), BASE) for each in (engine, open_engine(base)))
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 0.02
    assert after == pytest.approx(exact, abs=0.1)


# ---- float32 weights that are laid out ----


@pytest.fixture
def laid_out(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """All merged weights are laid out, on any CPU -> the rows of each product with them."""
    times, rows = Float32Matrix.times, list[int]()

    def counted(self: Float32Matrix, x: torch.Tensor) -> torch.Tensor:
        rows.append(len(x))
        return times(self, x)

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: AMD)
    monkeypatch.setattr(multi_lora, "LAID_OUT_BYTES", 1)
    monkeypatch.setattr(Float32Matrix, "times", counted)
    return rows


AMD = dict(HAS) | {"avx512_f": True, "cpu_name": "AMD EPYC"}


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen2"])
def test_laid_out_weights_are_the_same_policy(
    open_engine, make_base, make_adapter, laid_out, monkeypatch, architecture: str, twice: bool, dora: bool
):
    """Alone in a batch, with one row and with several, and beside another policy; with room for a plain copy besides,
    and without."""
    base = make_base(architecture, dtype=torch.float32)
    if not twice:
        linear = [module.weight.nbytes for module in base.model.model.modules() if isinstance(module, torch.nn.Linear)]
        monkeypatch.setattr(multi_lora, "MERGED_BYTES", sum(linear))
    engine = open_engine(base)
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    exact = open_engine(base)
    for each in (engine, exact):
        each.load(FIRST, make_adapter(base, seed=1, dora=dora))
        each.load(SECOND, make_adapter(base, seed=2, rank=5))
    for requests in (
        [asked(BASE, n=1)], [asked(BASE, n=4)], [asked(FIRST, n=1)], [asked(FIRST, n=4)], [asked(FIRST), asked(SECOND)]
    ):  # fmt: skip
        laid_out.clear()
        mine = engine.generate(requests)
        rows = set(laid_out)
        laid_out.clear()
        theirs = exact.generate(requests)
        assert not laid_out and said(mine) == said(theirs)
        for one, other in zip(chain(*mine), chain(*theirs), strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=packed_tolerance(base.model))
        alone = len({request.version for request in requests}) == 1
        single = dora and not twice and requests[0].version == FIRST
        assert (requests[0].n in rows) == (alone and (requests[0].n > 1 or single))


def test_weights_that_are_trained_themselves_are_laid_out_anew(open_engine, make_base, laid_out, monkeypatch):
    base = make_base(dtype=torch.float32)
    engine = open_engine(base)
    before = engine.score((1, 2, 3), (4, 5, 6), BASE)
    with torch.no_grad():
        for layer in base.model.model.layers:
            layer.mlp.down_proj.weight.mul_(-2)
    engine.adopt(FIRST)
    after = engine.score((1, 2, 3), (4, 5, 6), BASE)
    assert laid_out and max(abs(a - b) for a, b in zip(before, after, strict=True)) > 0.02
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    assert after == pytest.approx(open_engine(base).score((1, 2, 3), (4, 5, 6), BASE), abs=1e-5)


@pytest.mark.parametrize(
    ("capabilities", "dtype", "expected"),
    [
        (AMD, torch.float32, True),
        (AMD, torch.bfloat16, False),
        (AMD | {"avx512_f": False}, torch.float32, False),
        (AMD | {"cpu_name": "Intel(R) Xeon(R) Platinum 8488C"}, torch.float32, False),
        ({}, torch.float32, False),  # not an x86
    ],
)
def test_where_weights_are_laid_out(make_base, monkeypatch, capabilities: dict[str, Any], dtype: Any, expected: bool):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert lays_out(make_base("qwen3", dtype=dtype).model) == expected


def test_compiled_steps_have_plain_weights(open_engine, make_base, laid_out):
    base = make_base(dtype=torch.float32)
    assert open_engine(base, compile=True)._shared.bank._lay_out is None
    assert open_engine(base)._shared.bank._lay_out is Float32Matrix


# ---- in a run ----


def rows(folder: Path) -> dict[str, Any]:
    """The settings of a run of a few sums."""
    (folder / "rows.jsonl").write_text("".join(f'{{"prompt": "{i} + 2 =", "answer": "{i + 2}"}}\n' for i in range(8)))
    (folder / "odd.py").write_text(
        "def odd(completions, **_):\n    return [float(sum(map(ord, str(each))) % 2) for each in completions]\n"
    )
    return {"data": {"source": "rows.jsonl"}, "rewards": ["odd:odd"]}


@each_kind
def test_a_run_corrects_for_the_gap_and_shows_it(tmp_path: Path, kind: str):
    rollout = {"prompts_per_step": 4, "group_size": 4, "max_tokens": 8, "dtype": kind}
    train = {"steps": 2}
    starter_run(
        tmp_path, name="rounded", **rows(tmp_path), rollout=rollout, train=train,
        algo={"correction": "tis_token", "anchor": "old"},
    )  # fmt: skip
    steps = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "mismatch/logprob_diff_mean" in row]
    assert len(steps) == 2
    for row in steps:
        assert 1e-4 < row["mismatch/logprob_diff_mean"] < 0.1
        assert row["mismatch/weight_mean"] != 1.0


def test_a_loss_that_does_not_see_the_gap_is_warned_of(tmp_path: Path):
    def warned(algo: dict[str, Any], **rollout: Any) -> list[str]:
        keys = rows(tmp_path) | {"folder": str(tmp_path), "algo": algo, "rollout": rollout}
        return make_plan(parse_config(keys)).warnings

    loss = {"policy_loss": "grpo", "anchor": "old"}
    assert not warned(loss)
    (warning,) = warned(loss, dtype="int8")
    assert "of another policy: that gap is not corrected; set algo.correction" in warning
    assert not warned(loss | {"correction": "tis_token"}, dtype="int8")


# ---- what is refused ----


@pytest.mark.parametrize(
    "keys",
    [
        {"rollout": {"dtype": "int4"}},
        {"rollout": {"dtype": "int8", "compile": True}},
        {"rollout": {"dtype": "int8"}, "engine": "vllm"},
        {"rollout": {"dtype": "int8"}, "quantization": "nf4"},
    ],
)
def test_configurations_with_which_it_does_not_go(keys: dict[str, Any]):
    with raises(ConfigError, field="rollout.dtype"):
        parse_config({"data": {"source": "p.jsonl"}, "rewards": ["m:f"], **keys})


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        ("gemma3", torch.float32),
        ("qwen3", torch.bfloat16),
    ],
)
def test_models_with_which_it_cannot_be_had(open_engine, make_base, architecture: str, dtype: Any):
    with raises(ConfigError, field="rollout.dtype"):
        open_engine(make_base(architecture, dtype=dtype), dtype="int8")


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_cpu_without_the_instructions(open_engine, make_base, monkeypatch, kind: str):
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    with raises(ConfigError, field="rollout.dtype"):
        open_engine(make_base(dtype=torch.float32), dtype=kind)


def test_instructions_that_sum_in_too_few_bits(monkeypatch):
    """oneDNN does so where ONEDNN_MAX_CPU_ISA names older ones than the CPU has."""

    class Saturating(Int8Matrix):
        def times(self, x: torch.Tensor) -> torch.Tensor:
            return super().times(x).clamp(max=0.5)

    class Refusing(Int8Matrix):
        def times(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("mkldnn_reorder_linear_weight: needs the cpu support avx512bw")

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_vnni": True, "avx512_bf16": True})
    for kind in (Saturating, Refusing):
        monkeypatch.setitem(KINDS, "int8", kind)
        assert unavailable("int8")


@of_kind["int8"]
def test_compiled_steps_do_not_go_with_it(open_engine, make_base):
    with raises(ConfigError):
        open_engine(make_base(dtype=torch.float32), dtype="int8", compile=True)
