"""Algorithms of one's own: what the hooks get, what comes of what they return, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from groupwise.algo.algorithm import Algorithm, FunctionAlgorithm, group_advantages, load_algorithm, with_token_weights
from groupwise.algo.credit import with_advantages
from groupwise.algo.samples import samples_of
from groupwise.config.algo import RunAlgoConfig
from groupwise.errors import ConfigError, TrainingError
from groupwise.types import Completion, FinishReason, Prompt, Rollout, RolloutGroup, Sample, Turn
from wording import raises


def rollout(reward: float | None, tokens: tuple[int, ...] = (5, 6)) -> Rollout:
    said = Completion(token_ids=tokens, logprobs=(-0.5,) * len(tokens), text="", finish_reason=FinishReason.STOP)
    return Rollout(turns=(Turn((1, 2), said),), reward=reward)


def group(*rewards: float | None) -> RolloutGroup:
    return RolloutGroup(prompt=Prompt(id="0", token_ids=(1, 2)), rollouts=tuple(map(rollout, rewards)))


def ranks(rewards: Sequence[float], rollouts: Sequence[Rollout]) -> list[float]:
    assert [r.reward for r in rollouts] == list(rewards)
    return [float(sorted(rewards).index(each)) for each in rewards]


def test_it_sees_what_could_be_scored_and_the_others_have_no_advantage():
    algorithm = FunctionAlgorithm(ranks)
    assert group_advantages(algorithm, group(3.0, None, 1.0, 2.0, math.nan)) == [2.0, None, 0.0, 1.0, None]


def test_a_group_without_a_difference_is_not_shown():
    algorithm = FunctionAlgorithm(lambda rewards, rollouts: 1 / 0)
    assert group_advantages(algorithm, group(1.0, 1.0, None)) == [0.0, 0.0, None]
    assert group_advantages(algorithm, group(1.0, None)) == [None, None]


def test_it_takes_the_place_of_the_formulas_whatever_else_is_in_the_batch():
    spec = RunAlgoConfig(algorithm="x", mask_truncated=True, truncated_votes=False)
    found = with_advantages([group(1.0, 0.0)], spec, beside=[group(9.0, 0.0)], algorithm=FunctionAlgorithm(ranks))
    assert [[r.advantage for r in each.rollouts] for each in found] == [[1.0, 0.0]]


@pytest.mark.parametrize(
    "returned",
    [[1.0], [1.0, math.inf], [0.0, math.nan], None, 1.0, ["a", "b"]],
    ids=["too few", "infinite", "not a number", "nothing", "one number", "texts"],
)
def test_what_is_no_advantage_is_an_error(returned: Any):
    with pytest.raises(TrainingError) as caught:
        group_advantages(FunctionAlgorithm(lambda rewards, rollouts: returned), group(1.0, 0.0))
    assert caught.value.code == TrainingError.code and (caught.value.hint or caught.value.__cause__)


def test_an_error_of_its_own_says_which_hook():
    with pytest.raises(TrainingError) as caught:
        group_advantages(FunctionAlgorithm(lambda rewards, rollouts: rewards[9]), group(1.0, 0.0))
    assert isinstance(caught.value.__cause__, IndexError)


class LastToken(Algorithm):
    def advantages(self, rewards: Sequence[float], rollouts: Sequence[Rollout]) -> list[float]:
        return ranks(rewards, rollouts)

    def token_weights(self, rollout: Rollout, sample: Sample) -> list[float] | None:
        return [0.0] * (len(sample.completion_ids) - 1) + [2.0] if rollout.reward else None


def test_weights_of_tokens_multiply_the_advantage():
    """Those of a turn's own advantages too; None leaves a sample as it is."""
    weighed = with_advantages([group(3.0, 0.0)], RunAlgoConfig(algorithm="x"), algorithm=LastToken())
    samples = with_token_weights(samples_of(weighed), weighed, LastToken())
    assert [(s.advantage, s.weights) for s in samples] == [(1.0, (0.0, 2.0)), (0.0, None)]


def test_as_many_weights_as_tokens():
    class Short(LastToken):
        def token_weights(self, rollout: Rollout, sample: Sample) -> list[float]:
            return [1.0]

    weighed = with_advantages([group(3.0, 0.0)], RunAlgoConfig(algorithm="x"), algorithm=Short())
    with pytest.raises(TrainingError):
        with_token_weights(samples_of(weighed), weighed, Short())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("credit", "turn"),
        ("aggregation", "normalize_then_sum"),
        ("kl_in", "reward"),
        ("advantage", "mean"),
        ("advantage_ddof", 0),
    ],
)
def test_what_does_not_go_with_an_algorithm_is_refused(key: str, value: str):
    with raises(ValueError):
        RunAlgoConfig(**{"algorithm": "x", key: value, "kl": "k1", "kl_coeff": 0.1})


def test_a_class_an_instance_or_a_function_is_loaded_by_its_name(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "from groupwise.algo.algorithm import Algorithm\n\n\nclass One(Algorithm):\n    pass\n\n\n"
        "def two(rewards, rollouts):\n    return rewards\n"
    )
    assert type(load_algorithm("mine.py:One", folder=tmp_path)).__name__ == "One"
    assert load_algorithm("mine:two", folder=tmp_path).advantages([1.0], []) == [1.0]
    with pytest.raises(ConfigError) as caught:
        load_algorithm("max-rl")
    assert caught.value.field == "algorithm"
