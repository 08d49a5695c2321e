"""What a body asks for as sampling parameters: defaults, the context's room, seeds."""

from __future__ import annotations

import pytest

from groupwise.engine.sampling import completion_seed
from groupwise.errors import ContextLengthError, RequestError
from groupwise.server.sampling import prompt_seed, sampling_params, truncated
from groupwise.server.schema_openai import ChatRequest
from groupwise.types import SamplingParams
from wording import raises

HELLO = [{"role": "user", "content": "Hello"}]


def params(prompt: int, *, index: int = 0, **body) -> SamplingParams:
    asked = ChatRequest.model_validate({"messages": HELLO, **body}, strict=False)
    return sampling_params(asked, [1] * prompt, context=100, most_tokens=50, index=index)


def test_defaults_are_openais() -> None:
    assert params(10) == SamplingParams(max_tokens=50, temperature=1.0, top_p=1.0, seed=None)


def test_everything_is_passed_on() -> None:
    body = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "stop": "x", "stop_token_ids": [3], "seed": 5}
    expected = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "stop": ("x",), "stop_ids": (3,), "seed": 5}
    assert params(10, ignore_eos=True, **body) == SamplingParams(max_tokens=50, ignore_eos=True, **expected)
    assert params(10, temperature=0.0).temperature == 0.0


def test_changes_of_the_logits_are_passed_on() -> None:
    body = {"presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.2, "min_tokens": 3}
    made = params(10, logit_bias={"7": 2, "9": -100}, include_stop_str_in_output=True, top_k=-1, **body)
    changes = {**body, "logit_bias": ((7, 2.0), (9, -100.0)), "include_stop": True}
    assert made == SamplingParams(max_tokens=50, **changes)
    assert made.reshaped == ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens")
    assert params(10, top_p=0.5, temperature=0).reshaped == () != params(10, top_p=0.5).reshaped


def test_a_least_length_above_the_longest_is_refused() -> None:
    with raises(RequestError, field="min_tokens"):
        params(10, min_tokens=8, max_tokens=7)
    with raises(RequestError, field="min_tokens"):
        params(99, min_tokens=2)


@pytest.mark.parametrize(
    ("keep", "max_tokens", "length"), [(None, None, 90), (30, None, 30), (200, None, 90), (-1, 40, 60), (-1, None, 90)]
)
def test_a_prompt_is_cut_from_the_left(keep: int | None, max_tokens: int | None, length: int) -> None:
    body = {"messages": HELLO, "truncate_prompt_tokens": keep, "max_tokens": max_tokens}
    asked = ChatRequest.model_validate(body, strict=False)
    assert truncated(asked, range(90), context=100) == range(90 - length, 90)


@pytest.mark.parametrize(
    ("prompt", "body", "expected"),
    [
        (10, {}, 50),
        (80, {}, 20),
        (99, {}, 1),
        (10, {"max_tokens": 90}, 90),
        (10, {"max_completion_tokens": 7}, 7),
        (10, {"max_tokens": 9, "max_completion_tokens": 7}, 7),
    ],
)
def test_how_long_a_completion_may_be(prompt: int, body: dict, expected: int) -> None:
    assert params(prompt, **body).max_tokens == expected


@pytest.mark.parametrize(("prompt", "body", "requested"), [(100, {}, 101), (10, {"max_tokens": 91}, 101)])
def test_what_does_not_fit_is_refused_in_the_words_that_clients_look_for(prompt, body, requested) -> None:
    message = f"^This model's maximum context length is 100 tokens. However, you requested {requested} tokens"
    with pytest.raises(ContextLengthError, match=message):
        params(prompt, **body)


def test_every_completion_of_a_batch_draws_apart() -> None:
    """And those of neighbouring seeds too: rounds are often seeded 1, 2, 3, ..."""
    seeds = [prompt_seed(seed, p) for seed in range(8) for p in range(64)]
    draws = {completion_seed(seed, j) for seed in seeds for j in range(16)}
    assert len(draws) == 8 * 64 * 16
    assert params(10, seed=9).seed == 9 and params(10, seed=9, index=1).seed == prompt_seed(9, 1) != 9
    assert params(10, index=1).seed is None
