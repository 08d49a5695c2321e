"""What the host waits for the GPU for while it decodes, on a simulated one; and that looking seldom changes nothing."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from groupwise.engine import decoder as module
from groupwise.engine.decoder import SETTLED_EVERY
from groupwise.engine.local import LocalEngine
from groupwise.types import Completion, FinishReason, PolicyVersion, SamplingParams, SamplingRequest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from simulated_gpu import SimulatedGpu

from slow_cases import slow_but

BASE, FIRST, SECOND = PolicyVersion.base(), PolicyVersion("first", 1), PolicyVersion("second", 1)
MOST_WAITS_OF_ADMISSION = 0  # of a batch of prompts, and the first token of each completion
MOST_WAITS_OF_AN_END = 2 + 1  # of rows that are finished, however many: their ids and logprobs, and which they are
MOST_WAITS_OF_WHAT_WAS_KEPT = 5  # each time it is looked at, however many tokens: how many, ids (2), bits, logprobs
NARROWED: list[dict[str, Any]] = [
    {"top_p": 0.8, "min_p": 0.001},
    {"top_k": 60},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.3},
    {"min_tokens": 3, "ignore_eos": False, "logit_bias": ((7, 2.0), (9, -100.0))},
]


LONG_NARROWED = [*NARROWED[:-1], {**NARROWED[-1], "min_tokens": 3 * SETTLED_EVERY}]


def asked(*, n: int = 4, versions: tuple[PolicyVersion, ...] = (BASE,), **options: Any) -> list[SamplingRequest]:
    """Groups with prompts of several lengths."""
    params = SamplingParams(**{"max_tokens": 4 * SETTLED_EVERY, "seed": 1, "ignore_eos": True} | options)
    return [
        SamplingRequest(prompt_ids=tuple(range(5, 9 + 2 * p)), n=n, version=versions[p % len(versions)], params=params)
        for p in range(3)
    ]


@contextmanager
def on_simulated_gpu(base: Any, adapters: dict[PolicyVersion, Path]) -> Iterator[tuple[SimulatedGpu, LocalEngine, Any]]:
    gpu = SimulatedGpu()
    with gpu, torch.no_grad():
        gpu.move(base.model)
        engine = LocalEngine(base, max_rows=16, compile=False)
        for version, directory in adapters.items():
            engine.load(version, directory)
        yield gpu, engine, engine._lanes[0].decoder


def submitted(engine: LocalEngine, requests: list[SamplingRequest]) -> deque[Any]:
    return deque(engine._job(request, None) for request in requests)


@pytest.mark.parametrize("policies", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_decoding_waits_once_in_some_steps(make_base, make_adapter, policies: int):
    """Also with rows of several policies, whose places in the batch do not change while no row comes or goes."""
    base = make_base(dtype=torch.float32)
    adapters = {version: make_adapter(base, seed=s) for s, version in enumerate((FIRST, SECOND)[:policies])}
    with on_simulated_gpu(base, adapters) as (gpu, engine, decoder):
        jobs = submitted(engine, asked(versions=tuple(adapters)))
        futures = [job.future for job in jobs]
        with gpu.counting() as counts:
            decoder.admit(deque(), jobs)
        assert counts.waits <= MOST_WAITS_OF_ADMISSION, counts.waited
        with gpu.counting() as counts:
            for _ in range(2 * SETTLED_EVERY):
                decoder.decode()
        assert counts.launches > 100 and counts.waits <= 2, counts.waited
        with gpu.counting() as counts:
            for _ in range(2 * SETTLED_EVERY - 1):
                decoder.decode()
        assert counts.waits <= 1 + MOST_WAITS_OF_AN_END, counts.waited
        assert [len(future.result(timeout=0)) for future in futures] == [4, 4, 4]


@pytest.mark.parametrize("options", slow_but(LONG_NARROWED[::3], of=LONG_NARROWED))
def test_what_is_left_out_is_looked_at_once_in_some_steps(make_base, options: dict[str, Any]):
    """What each token could be stays on the device as long as tokens do."""
    with on_simulated_gpu(make_base(dtype=torch.float32), {}) as (gpu, engine, decoder):
        jobs = submitted(engine, asked(n=2, **options))
        with gpu.counting() as counts:
            decoder.admit(deque(), jobs)
        assert counts.waits <= MOST_WAITS_OF_ADMISSION, counts.waited
        with gpu.counting() as counts:
            for _ in range(2 * SETTLED_EVERY):
                decoder.decode()
        assert 2 < counts.waits <= 2 * (1 + MOST_WAITS_OF_WHAT_WAS_KEPT), counts.waited
        assert decoder.active == 6 and {len(row.kept) for row in decoder.rows.owners} == {2 * SETTLED_EVERY}


def test_what_is_left_out_does_not_fill_the_device(make_base, monkeypatch):
    """Beyond a bound it is read, also where its rows are given up before they have ended."""
    with on_simulated_gpu(make_base(), {}) as (_, engine, decoder):
        jobs = submitted(engine, asked(top_p=0.8))
        futures = [job.future for job in jobs]
        decoder.admit(deque(), jobs)
        vocabulary = engine.vocabulary
        assert [kept.kept_BV.shape for _, kept in decoder._unread] == [(12, vocabulary)]
        monkeypatch.setattr(module, "MOST_UNREAD", 2 * 12 * vocabulary)
        unread = []
        for _ in range(4):
            decoder.decode()
            unread.append(len(decoder._unread))
        assert unread == [2, 0, 1, 2]
        for future in futures:
            future.cancel()
        decoder.drop_cancelled()
        assert not decoder.active and not decoder._unread


@pytest.mark.parametrize("options", [{}, {"top_p": 0.8, "frequency_penalty": 0.3, "max_tokens": 12}])
def test_a_simulated_gpu_says_what_a_cpu_says(make_base, options: dict[str, Any]):
    """End tokens too, which are seen late there."""
    requests = asked(n=2, ignore_eos=False, **options)
    with closing(LocalEngine(make_base(), max_rows=16, lanes=1, compile=False)) as engine:
        expected = engine.generate(requests)
    with on_simulated_gpu(make_base(), {}) as (_, engine, decoder):
        jobs = submitted(engine, requests)
        futures = [job.future for job in jobs]
        decoder.admit(deque(), jobs)
        while decoder.active:
            decoder.decode()
        assert_same([future.result(timeout=0) for future in futures], expected)


@pytest.mark.parametrize("options", [{}, {"stop_ids": (17,)}, *NARROWED])
def test_looking_seldom_changes_no_completion(make_base, options: dict[str, Any]):
    """Rows end in between, by an end token, by their limit and at the same time as others; the rest goes on."""
    base, ends = make_base(), set[FinishReason]()
    for limit in (SETTLED_EVERY - 1, 4 * SETTLED_EVERY):
        said = []
        for every in (1, SETTLED_EVERY):
            with closing(
                LocalEngine(base, max_rows=6, lanes=1, compile=False)
            ) as engine:  # fewer than there are: some wait
                engine._lanes[0].decoder.most_unsettled = every  # type: ignore[attr-defined]
                said.append(engine.generate(asked(**options | {"max_tokens": limit, "ignore_eos": False})))
        assert_same(*said)
        ends |= {each.finish_reason for group in said[0] for each in group}
    assert ends == {FinishReason.STOP, FinishReason.LENGTH}


def assert_same(mine: list[list[Completion]], theirs: list[list[Completion]]) -> None:
    for one, other in zip(chain(*mine), chain(*theirs), strict=True):
        assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-9)
        assert one.kept == other.kept and one.kept_logprobs == pytest.approx(other.kept_logprobs, abs=1e-9)
        assert one.kept is None or len(one.kept) == len(one.kept_logprobs) == len(one.token_ids)
