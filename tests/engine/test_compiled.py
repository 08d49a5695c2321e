"""Compiled decode steps against uncompiled ones: rows that finish, versions that change, compilers that fail."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from itertools import chain, product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from groupwise.config.run import parse_config
from groupwise.engine.compiled import Compiled, Functions, compiles
from groupwise.engine.graphs import bucket_of, tensors_in
from groupwise.engine.local import LocalEngine
from groupwise.engine.multi_lora import AdapterBank, read_adapter
from groupwise.errors import ConfigError
from groupwise.model.attention import SharedPrompts
from groupwise.model.backbone import Backbone
from groupwise.model.load import share_weights
from groupwise.run.assemble import local_engine
from groupwise.types import Completion, PolicyVersion, SamplingParams, SamplingRequest
from wording import raises, warns

BASE = PolicyVersion.base()
FIRST, SECOND, WIDER = (PolicyVersion(name, 1) for name in ("first", "second", "wider"))
has_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")


@pytest.fixture
def engines(make_base) -> Iterator[Callable[..., tuple[LocalEngine, LocalEngine]]]:
    """Two engines on the same weights, the first uncompiled."""
    opened: list[LocalEngine] = []

    def make(architecture: str = "qwen3") -> tuple[LocalEngine, LocalEngine]:
        base = make_base(architecture, dtype=torch.float32)
        plain, compiled = (LocalEngine(base, max_rows=16, compile=compile) for compile in (False, True))
        opened.extend((plain, compiled))
        return plain, compiled

    yield make
    for engine in opened:
        engine.close()


def asked(version: PolicyVersion = BASE, *, rows: tuple[int, ...] = (3, 1, 4)) -> list[SamplingRequest]:
    """Groups of so many greedy completions; each group ends two tokens after the one before it."""
    return [
        SamplingRequest(
            prompt_ids=tuple((7 * i + p) % 250 for i in range(3 + p)),
            n=n,
            version=version,
            params=SamplingParams(max_tokens=4 + 2 * p, temperature=0.0, seed=p, ignore_eos=True),
        )
        for p, n in enumerate(rows)
    ]


def assert_same(mine: list[list[Completion]], theirs: list[list[Completion]]) -> None:
    for one, other in zip(chain(*mine), chain(*theirs), strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.slow
@has_compiler
def test_the_same_tokens_from_one_compilation(engines, make_base, make_adapter):
    """8, 5, 4 rows and at last a single one; then the base, and other versions; of another rank where it is merged."""
    torch._dynamo.reset()
    counters.clear()
    plain, compiled = engines()
    base = make_base(dtype=torch.float32)
    for version, options in ((FIRST, {"seed": 1}), (SECOND, {"seed": 2}), (WIDER, {"seed": 3, "rank": 5})):
        directory = make_adapter(base, **options)
        for engine in (plain, compiled):
            engine.load(version, directory)
    said = []
    for version in (FIRST, SECOND, BASE, WIDER, FIRST):
        groups = compiled.generate(asked(version))
        assert_same(groups, plain.generate(asked(version)))
        said.append(str([group[0].token_ids for group in groups]))
    assert len(set(said)) == 4 and said[0] == said[-1]
    alone = asked(rows=(1,))
    assert_same(compiled.generate(alone), plain.generate(alone))
    both = [*asked(FIRST), *asked(BASE)]  # several policies in a batch: uncompiled
    assert_same(compiled.generate(both), plain.generate(both))
    assert compiled._lanes[0].decoder.steps.why_not is None
    assert counters["stats"]["unique_graphs"] == 3 and not counters["graph_break"]
    assert len(compiled._lanes[0].decoder.steps._seen) == 1


# ---- what stands in its way ----


def test_a_compiler_that_raises_costs_no_row(engines, monkeypatch):
    """In the midst of a step, whose first layer has its keys and values already."""

    def broken(functions: Functions, function: Callable[..., Any], *arguments: Any) -> Any:
        if function.__name__ == "_between":
            raise RuntimeError("no compiler here\nand a long story")
        return function(*arguments)

    monkeypatch.setattr(Functions, "__call__", broken)
    plain, compiled = engines()
    with warns():
        groups = compiled.generate(asked())
    assert_same(groups, plain.generate(asked()))
    assert compiled._lanes[0].decoder.steps.why_not == "RuntimeError: no compiler here"
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # it is said once
        assert_same(compiled.generate(asked()), groups)


@pytest.mark.parametrize("wrong", [lambda x: x + 0.1, lambda x: x * float("nan")])
def test_a_compiler_that_computes_something_else(engines, monkeypatch, wrong: Callable[[Tensor], Tensor]):
    def call(functions: Functions, function: Callable[..., Any], *arguments: Any) -> Any:
        out = function(*arguments)
        return wrong(out) if isinstance(out, Tensor) else out

    monkeypatch.setattr(Functions, "__call__", call)
    plain, compiled = engines("llama")
    with warns():
        groups = compiled.generate(asked())
    assert_same(groups, plain.generate(asked()))


def test_a_model_of_another_family(engines):
    with warns():
        plain, compiled = engines("gemma3")
    assert_same(compiled.generate(asked()), plain.generate(asked()))


# ---- recordings, by a recorder that calls the function again ----


def again(function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """What CUDA graphs do: run on what the buffers hold now, and write over the outputs."""
    outputs = function()

    def replay() -> None:
        new = [x.clone() for x in tensors_in(function())]
        for mine, x in zip(tensors_in(outputs), new, strict=True):
            mine.copy_(x)

    return replay, outputs


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@torch.inference_mode()
def test_recorded_steps(make_base, make_adapter, monkeypatch, merged: bool, architecture: str):
    """Rows of several buckets and two versions by turns, merged and as 16 bits have it; parameters stay in place."""
    monkeypatch.setattr(Functions, "__call__", lambda self, function, *arguments: function(*arguments))
    base = make_base(architecture, dtype=torch.float32)
    model: Any = share_weights(base.model)
    bank = AdapterBank(model)
    if not merged:
        bank._merges = False
    backbone = Backbone(model, bank.project)
    compiled = Compiled(backbone, bank, 1, False, record=again)
    versions = [read_adapter(make_adapter(base, seed=seed), device=base.device) for seed in (1, 2)]
    for step, (rows, which) in enumerate([(5, 0), (5, 1), (3, 1), (1, 0), (6, 0), (5, 1), (2, 1), (5, 0)]):
        ids, positions = torch.arange(rows) * 3 + step, torch.arange(rows) + step
        layout = SharedPrompts([1] * rows, device=base.device)  # each attends to itself
        bank.select([versions[which]] * rows)
        mine, theirs = compiled(ids, positions, layout).clone(), backbone(ids, positions, layout)
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
        assert compiled.why_not is None
    graphs: Any = compiled._graphs
    assert sorted(rows for _, rows in graphs._recorded) == [2, 3, 6]
    stay = {parameter.data_ptr() for parameter in model.parameters()}
    (place,) = graphs._places.values()
    copied = {x.data_ptr() for x in tensors_in(place.weights)} - stay
    assert copied and not copied & {x.data_ptr() for x in tensors_in(place.holds)}


def test_buckets():
    buckets = [bucket_of(rows) for rows in range(1, 400)]
    assert sorted(set(buckets)) == [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    assert all(rows <= bucket <= max(2, rows * 3 / 2) for rows, bucket in enumerate(buckets, 1))


# ---- the configuration ----


def test_where_nobody_says_it_is_for_gpus_and_models_that_can_be_compiled(make_base):
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    lean, other = (Backbone(make_base(name, dtype=torch.float32).model) for name in ("qwen3", "gemma3"))
    cases = product((None, True, False), (gpu, cpu), (lean, other))
    assert [compiles(*case) for case in cases] == [True, False, False, False, *[True] * 4, *[False] * 4]


def test_the_configuration_asks_for_it(make_base):
    keys: dict[str, Any] = {"data": {"source": "p.jsonl"}, "rewards": ["m:f"]}
    base = make_base("gemma3", dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert local_engine(parse_config(keys), base)._lanes[0].decoder.steps.__class__ is Backbone
    with warns():
        engine = local_engine(parse_config(keys | {"rollout": {"compile": True}}), base)
    assert isinstance(engine._lanes[0].decoder.steps, Compiled)
    with raises(ConfigError, field="rollout.compile", kind="conflict"):
        parse_config(keys | {"engine": "vllm", "rollout": {"compile": True}})
