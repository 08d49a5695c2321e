"""Evaluation: the modes, the means and their breakdown, with the real engine."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator

import pytest
import torch

from groupwise.engine.local import LocalEngine
from groupwise.errors import ContextLengthError
from groupwise.evaluate import Evaluation, compare, encode_all, evaluate
from groupwise.rewards.base import RewardFunction
from groupwise.types import PolicyVersion, Prompt, SamplingParams

BASE = PolicyVersion.base()
PROMPTS = [Prompt(id=str(i), text=f"{i}+{i}=", columns={"skill": ("add", "sub")[i % 2], "gold": i}) for i in range(4)]


@pytest.fixture
def engine(make_base) -> Iterator[LocalEngine]:
    engine = LocalEngine(make_base(dtype=torch.float32))
    yield engine
    engine.close()


def gold(completions, gold):
    return [None if gold[0] == 3 else float(gold[0])]


def run(engine: LocalEngine, *, seed: int = 0, **params):
    return asyncio.run(
        evaluate(
            engine,
            encode_all(PROMPTS, engine._base),
            [RewardFunction(name="gold", function=gold, args={})],
            version=BASE,
            params=SamplingParams(max_tokens=6, temperature=1.3, top_k=50, **params),
            modes=("greedy", "sampled"),
            seed=seed,
        )
    )


def ids(evaluation: Evaluation) -> list[tuple[int, ...]]:
    return [group.rollouts[0].completion.token_ids for group in evaluation.groups]


def test_modes(engine):
    """Greedy is the likeliest continuation whatever the seed; sampled follows the parameters and the seed."""
    first, again, other = run(engine), run(engine), run(engine, seed=1)
    assert list(first) == ["greedy", "sampled"]
    for mode in first:
        assert ids(first[mode]) == ids(again[mode])
        assert first[mode].version == BASE and [len(g.rollouts) for g in first[mode].groups] == [1] * 4
    assert ids(first["greedy"]) == ids(other["greedy"])
    assert ids(first["sampled"]) != ids(other["sampled"])
    model = engine._base.model
    prompt = encode_all(PROMPTS, engine._base)[0].token_ids
    with torch.no_grad():
        assert ids(first["greedy"])[0][0] == int(model(input_ids=torch.tensor([prompt])).logits[0, -1].argmax())


def test_means(engine):
    """What cannot be scored is left out; a group without any reward is NaN, not zero."""
    greedy = run(engine)["greedy"]
    assert greedy.mean() == pytest.approx((0 + 1 + 2) / 3)
    assert greedy.mean(column="skill", value="sub") == 1.0
    assert math.isnan(greedy.mean(column="skill", value="mul"))
    assert greedy.metrics() == {"eval/greedy/reward": 1.0}
    assert greedy.metrics(by="skill") == {
        "eval/greedy/reward": 1.0,
        "eval/greedy/add/reward": 1.0,
        "eval/greedy/sub/reward": 1.0,
    }


def test_compare(engine):
    before = run(engine)
    rows = compare(before, before, by="skill")
    assert [row[0] for row in rows] == [
        f"{mode}{part}/reward" for mode in ("greedy", "sampled") for part in ("", "/add", "/sub")
    ]
    assert all(first == last for _, first, last in rows)


def test_a_prompt_that_fills_the_context(make_base):
    with pytest.raises(ContextLengthError, match="context is 64"):
        encode_all([*PROMPTS, Prompt(id="long", text="=" * 400)], make_base())
