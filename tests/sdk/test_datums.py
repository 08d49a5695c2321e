"""One sequence as the trainer takes it, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from groupwise.errors import DataError
from groupwise.sdk.datums import Datum, build_grpo_datums, compute_advantages, datum_of
from wording import raises

TOKENS = (5, 6, 7, 2)


def datum(tokens: Sequence[int] = TOKENS, **values: Any) -> Datum:
    return Datum(model_input=tokens[:-1], loss_fn_inputs={"target_tokens": tokens[1:], **values})


def test_tokens_are_shifted_by_one() -> None:
    made = datum_of(TOKENS, prompt_len=2)
    assert made.model_input == (5, 6, 7) and made.targets == (6, 7, 2) and made.tokens == TOKENS
    assert made.loss_fn_inputs["weights"] == (0.0, 1.0, 1.0) and made.loss_tokens == 2


def test_tensors_and_arrays_are_taken() -> None:
    ids = torch.tensor(TOKENS)
    made = Datum(
        model_input=ids[:-1], loss_fn_inputs={"target_tokens": np.array(TOKENS[1:]), "advantages": torch.zeros(3)}
    )
    assert made.tokens == TOKENS


def test_the_sample_shares_its_prompt_and_keeps_its_values() -> None:
    made = datum(mask=[0, 1, 1], advantages=[0, 0.5, -0.5], logprobs=[math.nan, -0.1, -0.2])
    sample = made.sample("advantages")
    assert (sample.prompt_ids, sample.completion_ids, sample.mask) == ((5, 6), (7, 2), (1, 1))
    assert sample.weights == (0.5, -0.5) and sample.behaviour_logprobs == (-0.1, -0.2)
    assert sample.targets == (7, 2) and made.whole().targets == (6, 7, 2)


def test_without_a_mask_every_target_is_trained() -> None:
    assert datum(advantages=[0.0, 1.0, 1.0]).sample("advantages").prompt_ids == (5,)


def test_padded_targets_are_not_trained_without_a_mask() -> None:
    padded = Datum(model_input=(5, 6, 7), loss_fn_inputs={"target_tokens": (0, 7, 2), "advantages": (0.0, 1.0, 1.0)})
    assert padded.mask == (0, 1, 1) and padded.tokens == TOKENS and padded.loss_tokens == 2
    assert padded.having(mask=(1, 1, 0)).mask == (1, 1, 0)
    assert padded.having(logprobs=(math.nan, -1.0, -1.0)).skipped == 1
    alone = padded.having(advantages=None)
    assert alone.mask == (1, 1, 1)  # nothing says that it has no weight


def test_any_token_is_a_target() -> None:
    made = Datum(model_input=(5, 6, 7), loss_fn_inputs={"target_tokens": (6, 9, 4), "weights": (0.0, -0.5, 1.0)})
    assert made.mask == (1, 1, 1) and made.loss_tokens == 2
    masked = made.having(mask=(0, 1, 1))
    sample = masked.sample("weights")
    assert (sample.prompt_ids, sample.completion_ids, sample.targets) == ((5, 6), (7, 4), (9, 4))
    (built,) = build_grpo_datums([masked], [2.0], [(-0.1, -0.2)], 2)
    assert built.targets == (6, 9, 4) and built.loss_fn_inputs["advantages"] == (0.0, 2.0, 2.0)


@pytest.mark.parametrize(
    "values",
    [
        {"advantages": [1.0, 1.0]},
        {"weights": [1.0] * 4},
        {"advantages": [0.0, math.nan, 1.0]},
        {"advantages": [0.0, math.inf, 1.0]},
        {"weights": [math.nan, 0.0, 1.0]},
        {"logprobs": [-0.1, -0.1, math.nan]},
        {"rewards": [1.0] * 3},
    ],
)
def test_what_cannot_be_trained_is_refused(values: dict[str, Any]) -> None:
    with raises(DataError):
        datum(**values)


def test_an_empty_datum_is_refused() -> None:
    with raises(DataError):
        Datum(model_input=(), loss_fn_inputs={"target_tokens": ()})
    with raises(DataError):
        datum_of((5,), prompt_len=1)
    with raises(DataError):
        Datum(model_input=(5,), loss_fn_inputs={})
    with raises(DataError):
        datum((5, -1, 6))


def test_advantages_are_the_recipes() -> None:
    assert compute_advantages([1, 0, 0, 0]) == pytest.approx([1.5, -0.5, -0.5, -0.5])
    assert compute_advantages([1.0, None, 0.0]) == [pytest.approx(0.7071068), None, pytest.approx(-0.7071068)]
    assert compute_advantages([1.0, 1.0]) == [0.0, 0.0]
    assert compute_advantages([1, 0, 0, 0], ddof=0) == pytest.approx([3**0.5, *[-(3**-0.5)] * 3])


def test_built_datums_carry_everything_aligned() -> None:
    (built,) = build_grpo_datums(
        [datum_of(TOKENS, prompt_len=2)],
        [0.5],
        [(None, None, -0.1, -0.2)],
        2,
        old_policy_logprobs=[(-3.0, -0.3, -0.4)],
        ref_logprobs=[(-0.5, -0.6)],
    )
    inputs = built.loss_fn_inputs
    assert inputs["advantages"] == (0.0, 0.5, 0.5) and built.mask == (0, 1, 1) and "weights" not in inputs
    assert inputs["logprobs"][1:] == (-0.1, -0.2) and math.isnan(inputs["logprobs"][0])
    assert inputs["old_logprobs"] == (-3.0, -0.3, -0.4) and inputs["reference_logprobs"][1:] == (-0.5, -0.6)


def test_advantages_and_lengths_may_be_tensors_and_arrays() -> None:
    data = [datum_of((5, 6, 7), prompt_len=2), datum_of((5, 6, 8), prompt_len=2)]
    sampler, plain = [[-1.0], [-2.0]], [0.5, -0.5]
    expected = build_grpo_datums(data, plain, sampler, 2)
    for advantages, lengths in ((torch.tensor(plain), np.int64(2)), (np.array(plain), torch.tensor([2, 2]))):
        assert build_grpo_datums(data, advantages, sampler, lengths) == expected  # pyright: ignore[reportArgumentType]


def test_a_tool_result_in_the_completion_stays_untrained() -> None:
    (built,) = build_grpo_datums([datum(weights=[1, 0, 1])], [1.0], [(None, -1.0, -1.0, -1.0)], [1])
    assert built.mask == (1, 0, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"advantages": []},
        {"prompt_lens": [2, 2]},
        {"inf_logprobs": [(-0.1,)]},
        {"inf_logprobs": [(None, None, None, -0.2)]},
        {"advantages": [math.nan]},
        {"advantages": [None]},
    ],
)
def test_building_refuses_what_disagrees(changes: dict[str, Any]) -> None:
    given: dict[str, Any] = {
        "data": [datum_of(TOKENS, prompt_len=2)],
        "advantages": [1.0],
        "inf_logprobs": [(-0.1, -0.2)],
        "prompt_lens": 2,
    }
    build_grpo_datums(**given)
    with raises(DataError):
        build_grpo_datums(**(given | changes))


@pytest.mark.parametrize(
    ("model_input", "inputs"),
    [
        (None, {"target_tokens": [1]}),
        ("abc", {"target_tokens": [1, 2, 3]}),
        ([1, 2], [1]),
        ([1, 2], {"target_tokens": 7}),
        ([1, 2], {"target_tokens": [1, 2], "weights": ["a", 1]}),
        ([1, 2], {"target_tokens": [1, 2], "weights": [1, None]}),
        ([True, 2], {"target_tokens": [1, 2]}),
        ([1, 2], {"target_tokens": [1, 2], "mask": [[1], [1]]}),
    ],
)
def test_what_is_no_list_of_numbers_is_told_so(model_input: Any, inputs: Any) -> None:
    with raises(DataError):
        Datum(model_input=model_input, loss_fn_inputs=inputs)


def test_rewards_that_are_no_numbers_are_told_so() -> None:
    with raises(DataError):
        compute_advantages([1.0, "a"])  # pyright: ignore[reportArgumentType]
