"""The check of a server's log-probabilities: how often it stops what is well, and how often it misses what is not.

Simulated, 24 tokens a check and 192 more where it doubts: a token's difference (server less trainer, nats) is drawn as
rounding makes it, in a dense model and in a mixture whose routers choose otherwise now and then, or as faults do.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from groupwise.engine.vllm.answers import Sampled
from groupwise.engine.vllm.gaps import Gaps
from groupwise.types import PolicyVersion

TOLERANCE, VERSIONS, RUNS = 0.1, 50, 200
Draw = Callable[[random.Random], float]


def dense(rng: random.Random) -> float:
    return rng.gauss(0, 0.03)


def mixture(rng: random.Random) -> float:
    """0.12 nats in the mean: every tenth token has other experts."""
    return rng.gauss(0, 0.9) if rng.random() < 0.1 else rng.gauss(0, 0.06)


def rough_mixture(rng: random.Random) -> float:
    """0.19 nats in the mean."""
    return rng.gauss(0, 1.0) if rng.random() < 0.17 else rng.gauss(0, 0.08)


def untempered(rng: random.Random) -> float:
    """What a server says at temperature 1 of tokens that are likely and were drawn at 0.5: always less."""
    return -rng.expovariate(1 / 0.35)


def another_model(rng: random.Random) -> float:
    """It thinks more of what it samples than the trainer does: 0.5 nats of divergence."""
    return rng.gauss(0.5, 0.8)


class Simulated:
    """A server and a trainer that are apart by what is drawn."""

    url = "simulated"

    def __init__(self, draw: Draw, seed: int):
        self.draw, self._rng = draw, random.Random(seed)

    async def complete(self, name: str, body: Any) -> list[Sampled]:
        ids = tuple(range(body["max_tokens"]))
        said = [tuple(self.draw(self._rng) for _ in ids) for _ in range(body["n"])]
        return [Sampled(token_ids=ids, logprobs=each, finish_reason="length") for each in said]


TRAINER: Any = SimpleNamespace(score=lambda prompt, ids, version, temperature: [0.0] * len(ids))


@pytest.fixture(autouse=True)
def scored_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of checks, whose trainer takes no time, in no thread of their own."""

    async def at_once(function: Any, *args: Any, **options: Any) -> Any:
        return function(*args, **options)

    monkeypatch.setattr(asyncio, "to_thread", at_once)


async def check(gaps: Gaps, server: Any) -> bool:
    return await gaps.too_far(server, "v", PolicyVersion("v", 1), (1, 2)) is None


def passed(draw: Draw, *, rounded: bool, seed: int, checks: int = VERSIONS, before: Draw | None = None) -> bool:
    """Whether every check of a run passes; `before` is what 10 checks before them drew."""

    async def run() -> bool:
        gaps, server = Gaps(TRAINER, tolerance=TOLERANCE, rounded=rounded), Simulated(before or draw, seed)
        for _ in range(10 if before else 0):
            await check(gaps, server)
        server.draw = draw
        for _ in range(checks):
            if not await check(gaps, server):
                return False
        return True

    return asyncio.run(run())


def share(draw: Draw, *, rounded: bool = True, **how: Any) -> float:
    """Of the runs, those whose every check passes."""
    return sum(passed(draw, rounded=rounded, seed=seed, **how) for seed in range(RUNS)) / RUNS


@pytest.mark.parametrize(
    ("draw", "fixed", "least"), [(dense, 1.0, 1.0), (mixture, 0.0, 0.98), (rough_mixture, 0.0, 0.95)]
)
def test_runs_of_fifty_versions_that_are_well_go_on(draw: Draw, fixed: float, least: float) -> None:
    """A fixed 0.1 nats ends every run of a mixture."""
    assert share(draw, rounded=False) == fixed
    assert share(draw) >= least


@pytest.mark.parametrize("draw", [untempered, another_model])
@pytest.mark.parametrize("before", [None, dense, mixture])
def test_what_is_not_the_model_is_found_at_the_first_check(draw: Draw, before: Draw | None) -> None:
    assert share(draw, checks=1, before=before) <= 0.01


def test_what_is_no_number_and_what_somebody_set_are_strict() -> None:
    assert not passed(lambda rng: float("nan"), rounded=True, seed=0)
    assert not passed(mixture, rounded=False, seed=0, before=mixture)
    assert Gaps(TRAINER, tolerance=1e-4, rounded=False).limit == 1e-4


def test_the_limit_follows_what_was_seen_up_to_an_end(caplog: pytest.LogCaptureFixture) -> None:
    async def limits(draw: Draw) -> tuple[float, float]:
        gaps = Gaps(TRAINER, tolerance=TOLERANCE, rounded=True)
        first = gaps.limit
        for seed in range(20):
            assert await check(gaps, Simulated(draw, seed))
        return first, gaps.limit

    assert asyncio.run(limits(dense)) == (5 * TOLERANCE, TOLERANCE) and not caplog.records
    first, after = asyncio.run(limits(lambda rng: rng.choice((-0.11, 0.11))))
    assert first == 5 * TOLERANCE and after == pytest.approx(0.33) and len(caplog.records) == 20
