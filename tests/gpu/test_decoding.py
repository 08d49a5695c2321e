"""Decode steps replayed as CUDA graphs, and several adapters in one batch: the tokens of plain steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from groupwise.engine.local import LocalEngine
from groupwise.model.load import LoadedModel, load_model
from groupwise.train.learner import Learner
from groupwise.types import Completion, PolicyVersion, SamplingParams, SamplingRequest

BASE = PolicyVersion.base()
FIRST, SECOND = (PolicyVersion("policy", number) for number in (1, 2))
Answers = list[list[Completion]]


@pytest.fixture(scope="module")
def base() -> LoadedModel:
    return load_model("starter", device="cuda", dtype="float32")


@pytest.fixture(scope="module")
def adapters(base: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> dict[PolicyVersion, Path]:
    """Two that change what is sampled."""
    found = {}
    for version in (FIRST, SECOND):
        learner, folder = Learner(base), tmp_path_factory.mktemp(f"adapter{version.number}")
        draw = torch.Generator(base.device).manual_seed(version.number)
        with torch.no_grad():
            for weight in learner.parameters:
                weight.normal_(std=0.05, generator=draw)
        learner.save_adapter(folder)
        found[version] = folder
    return found


@contextmanager
def engine(base: LoadedModel, adapters: dict[PolicyVersion, Path], **options: Any) -> Iterator[LocalEngine]:
    with closing(LocalEngine(base, max_rows=32, **options)) as opened:
        for version, folder in adapters.items():
            opened.load(version, folder)
        yield opened


def asked(version: PolicyVersion, rows: Sequence[int], *, temperature: float = 0.0) -> list[SamplingRequest]:
    """Groups of so many completions; each group ends some tokens after the one before it, so that rows become fewer."""
    return [
        SamplingRequest(
            prompt_ids=tuple((7 * i + p) % 1000 for i in range(9 + p)),
            n=n,
            version=version,
            params=SamplingParams(max_tokens=6 + 5 * p, temperature=temperature, seed=p, ignore_eos=True),
        )
        for p, n in enumerate(rows)
    ]


def assert_same(mine: Answers, theirs: Answers, *, close: float = 1e-3) -> None:
    for one, other in zip(mine, theirs, strict=True):
        assert [c.token_ids for c in one] == [c.token_ids for c in other]
        for a, b in zip(one, other, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=close)


def test_graphs_sample_what_plain_steps_do(base, adapters):
    """Versions by turns, whose weights are copied to where the graphs read them; numbers of rows of several buckets."""
    with engine(base, adapters) as plain, engine(base, adapters, compile=True) as graphs:
        for version in (BASE, FIRST, SECOND, FIRST, BASE):
            requests = asked(version, (3, 1, 4))
            assert_same(graphs.generate(requests), plain.generate(requests))
        steps: Any = graphs._lanes[0].decoder.steps  # pyright: ignore
        assert steps.why_not is None
        assert len(steps._graphs._recorded) >= 3, "several numbers of rows were recorded"


def test_the_versions_differ(base, adapters):
    """Or the tests here would show nothing."""
    with engine(base, adapters) as plain:
        first, second, none = (plain.generate(asked(v, (2, 2))) for v in (FIRST, SECOND, BASE))
    tokens = [[c.token_ids for each in answers for c in each] for answers in (first, second, none)]
    assert tokens[0] != tokens[1] != tokens[2] != tokens[0]


@pytest.mark.parametrize("compiled", [False, True])
def test_several_adapters_in_a_batch_sample_what_each_does_alone(base, adapters, compiled: bool):
    with engine(base, adapters, compile=compiled) as both:
        alone = [both.generate(asked(version, (2, 3))) for version in (BASE, FIRST, SECOND)]
        together = both.generate([request for v in (BASE, FIRST, SECOND) for request in asked(v, (2, 3))])
    assert_same(together, [answer for answers in alone for answer in answers])


def test_what_is_seeded_is_sampled_again(base, adapters):
    with engine(base, adapters) as plain:
        once, again = (plain.generate(asked(FIRST, (4, 4), temperature=1.0)) for _ in range(2))
    assert_same(once, again, close=0.0)
