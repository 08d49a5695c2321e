"""The plain decoder: models that cannot run packed, sampled by their own forward under the same contract."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import transformers
from packaging.version import Version

from groupwise.engine.local import LocalEngine
from groupwise.engine.plain import PlainDecoder
from groupwise.errors import ModelError
from groupwise.model.packed_check import cached_forward_gap, why_not_cached
from groupwise.train.learner import Learner
from groupwise.types import Completion, FinishReason, PolicyVersion, Sample, SamplingParams, SamplingRequest
from wording import raises, warns

BASE, FIRST, SECOND = PolicyVersion.base(), PolicyVersion("first", 1), PolicyVersion("second", 3)
pytestmark = pytest.mark.filterwarnings("ignore:.*(packed rows|recurrent layers).*:UserWarning")


@pytest.fixture
def open_engine(make_base, monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """`open_engine("qwen3")`: an engine that takes the model to be one that cannot run packed."""
    opened: list[LocalEngine] = []

    def make(architecture: str = "qwen3", *, packed: bool = False, cached: bool = True, **options) -> LocalEngine:
        with monkeypatch.context() as patch:
            if not packed:
                patch.setattr("groupwise.engine.local.why_twin_not_packed", lambda base, twin: "this test says so")
            if not cached:
                patch.setattr("groupwise.engine.local.why_not_cached", lambda model: "this test says so")
            opened.append(LocalEngine(make_base(architecture, dtype=torch.float64), **{"lanes": 1} | options))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


def request(prompt: int = 0, *, n: int = 1, version: PolicyVersion = BASE, interactive: bool = False, **params):
    ids = tuple((7 * i + prompt) % 250 for i in range(3 + prompt % 5))
    params = {"max_tokens": 8, "seed": 5, "ignore_eos": True} | params
    return SamplingRequest(
        prompt_ids=ids, n=n, version=version, params=SamplingParams(**params), interactive=interactive
    )


def told(groups: list[list[Completion]]) -> list:
    return [[(c.token_ids, c.finish_reason, c.text) for c in group] for group in groups]


def logprobs(groups: list[list[Completion]]) -> list[float]:
    return [x for group in groups for c in group for x in c.logprobs]


@pytest.mark.parametrize(
    ("family", "cached"),
    [
        ("qwen3", True),
        ("qwen3", False),
        ("gpt_oss", True),
        ("deepseek_v3", True),
        ("lfm2", True),
        pytest.param("qwen3_next", True, marks=pytest.mark.slow),
        ("qwen3_5_text", True),
        pytest.param("falcon_h1", True, marks=pytest.mark.slow),
        pytest.param("granitemoehybrid", True, marks=pytest.mark.slow),
    ],
)
def test_the_same_as_packed(open_engine, make_base, make_adapter, family: str, cached: bool) -> None:
    """Tokens, log-probabilities, reasons, versions and texts; several policies, lengths, temperatures and stops."""
    plain, packed = open_engine(family, max_rows=16, cached=cached), open_engine(family, max_rows=16, packed=True)
    assert packed.packed and not plain.packed
    for version, seed in ((FIRST, 1), (SECOND, 2)):
        directory = make_adapter(make_base(family), seed=seed, rank=1 + seed)
        plain.load(version, directory)
        packed.load(version, directory)
    asked = [
        *(request(p, n=1 + p % 3, version=(BASE, FIRST, SECOND)[p % 3], temperature=0.8, seed=p) for p in range(9)),
        request(4, n=2, temperature=0.0, max_tokens=20),
        request(6, n=12, temperature=1.5, max_tokens=30, ignore_eos=False),
        request(7, n=4, max_tokens=30, stop_ids=(7, 11, 200), top_logprobs=2),
        request(8, n=2, repetition_penalty=1.3, max_tokens=12),
    ]
    ours, theirs = plain.generate(asked), packed.generate(asked)
    assert told(ours) == told(theirs)
    rounded = 1e-9 if family in ("qwen3", "gpt_oss", "lfm2") else 1e-6  # float32 routers and recurrences in any type
    assert logprobs(ours) == pytest.approx(logprobs(theirs), abs=rounded)
    assert FinishReason.STOP in {c.finish_reason for group in ours for c in group}
    assert [[c.version for c in group] for group in ours] == [[each.version] * each.n for each in asked]
    assert plain.stats()["running"] == plain.stats()["waiting"] == 0


def test_a_prompt_is_run_once_for_its_group_and_requests_of_one_length_together(open_engine) -> None:
    engine, seen = open_engine(max_rows=16), []
    engine._model.get_input_embeddings().register_forward_hook(
        lambda module, args, _: seen.append(tuple(args[0].shape))
    )
    engine.generate([request(0, n=4, max_tokens=3), request(5, n=2, max_tokens=3), request(0, n=2, max_tokens=3)])
    assert seen == [(2, 3), (8, 1), (8, 1)]  # two prompts of three tokens; then all rows, token by token


def test_rows_come_and_go(open_engine) -> None:
    """Few rows and many requests of uneven lengths get what they get alone; a cancelled one frees its rows."""
    engine = open_engine(max_rows=5)
    asked = [request(p, n=1 + p % 4, max_tokens=3 + 4 * (p % 3), seed=p) for p in range(12)]
    assert told(engine.generate(asked)) == [told(engine.generate([each]))[0] for each in asked]
    first, second = engine.submit([request(1, n=5, max_tokens=40), request(2, n=1)])
    first.cancel()
    assert len(second.result(timeout=60)) == 1 and first.cancelled()
    heard = []
    engine.submit([request(3, n=2)], on_token=lambda row, token, *_: heard.append((row, token)))[0].result(timeout=60)
    assert len(heard) == 16


def test_an_error_inside_reaches_the_caller_and_the_engine_goes_on(open_engine, monkeypatch) -> None:
    engine = open_engine(max_rows=4)
    expected = told(engine.generate([request(n=2)]))
    with monkeypatch.context() as patch:
        patch.setattr(PlainDecoder, "decode", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.generate([request(n=2)])
    assert told(asyncio.run(engine.sample([request(n=2)]))) == expected


def test_a_cache_that_is_wrong_is_found_out_and_not_used(make_base, monkeypatch) -> None:
    base = make_base("llama4_text", dtype=torch.float64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = LocalEngine(base, max_rows=4)
    assert "by its own forward and cache instead" in str(caught[-1].message)
    expected = engine.generate([request(n=2, max_tokens=6)])
    engine.close()
    from transformers import DynamicCache

    kept = DynamicCache.reorder_cache
    monkeypatch.setattr(DynamicCache, "reorder_cache", lambda self, rows: kept(self, rows.flip(0) * 0))
    assert cached_forward_gap(engine._model) > 1e-3 and "its cache changes" in str(why_not_cached(engine._model))
    with warns():
        engine = LocalEngine(base, max_rows=4)
    assert told(engine.generate([request(n=2, max_tokens=6)])) == told(expected)
    engine.close()


def test_a_head_that_is_not_the_models_is_refused(make_base, monkeypatch) -> None:
    base = make_base("llama4_text", dtype=torch.float64)
    monkeypatch.setattr("groupwise.model.packed_check.head_gap", lambda model: 0.5)
    with raises(ModelError):
        LocalEngine(base)


def test_what_a_recurrent_model_cannot_have_is_said_once(make_base) -> None:
    """A request that asks for its conversation to be kept, and that of the next turn, are answered all the same."""
    base = make_base("lfm2", dtype=torch.float64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = LocalEngine(base, max_rows=4, draft_tokens=3, compile=True)
    (said,) = [str(warning.message) for warning in caught if "recurrent" in str(warning.message)]
    assert "conversations are not kept" in said and said.endswith("draft_tokens has no effect; compile has no effect")
    first = replace(request(2, max_tokens=9), cache=True)
    ((one,),) = engine.generate([first])
    turn = replace(first, prompt_ids=(*first.prompt_ids, *one.token_ids, 5, 6, 7))
    ((two,),) = engine.generate([turn])
    assert two.cached_tokens == 0
    assert two.logprobs == pytest.approx(engine.score(turn.prompt_ids, two.token_ids, BASE), abs=1e-9)
    engine.close()


@pytest.mark.skipif(Version(transformers.__version__) >= Version("5.23"), reason="Gemma 2 runs packed there")
def test_gemma_2_of_an_older_transformers_is_sampled_and_trained_in_plain_rows(make_base) -> None:
    """As docs/start.md says: correct, slow, and with a warning."""
    base = make_base("gemma2", dtype=torch.float64)
    with pytest.warns(UserWarning, match="packed rows"):
        engine, learner = LocalEngine(base), Learner(base)
    assert not engine.packed and not learner.packed
    (completion,) = engine.generate([request()])[0]
    engine.close()
    sample = Sample(prompt_ids=request().prompt_ids, completion_ids=completion.token_ids, mask=(1,) * 8)
    assert learner.forward([sample])[0] == pytest.approx(list(completion.logprobs), abs=1e-9)
