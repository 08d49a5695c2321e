"""Which log-probability is of which token: three orders in, one out, and nothing filled in."""

from __future__ import annotations

import math

import pytest

from groupwise.errors import DataError
from groupwise.sdk.alignment import aligned, check_known
from wording import raises

TRAINER = (-0.1, -0.2, -0.3, -0.4)  # of 5 tokens, 3 of them the prompt


def test_every_order_becomes_the_trainers() -> None:
    assert aligned(TRAINER, tokens=5, prompt_len=3) == TRAINER
    inference = (None, *TRAINER)
    assert aligned(inference, tokens=5, prompt_len=3) == TRAINER == inference[1:]  # the rule as it is taught
    alone = aligned(TRAINER[2:], tokens=5, prompt_len=3)
    assert alone[2:] == TRAINER[2:] and all(map(math.isnan, alone[:2]))  # nobody computed them: not 0


def test_a_prompt_of_one_token_has_no_unknown() -> None:
    assert aligned([-0.5, -0.1], tokens=3, prompt_len=1) == (-0.5, -0.1)


@pytest.mark.parametrize("given", [0, 1, 3, 6])
def test_another_length_is_refused_and_says_what_would_do(given: int) -> None:
    with raises(DataError):
        aligned([-0.1] * given, tokens=5, prompt_len=3, what="inf_logprobs[2]")


def test_n_entries_without_none_first_are_not_guessed_at() -> None:
    with raises(DataError):
        aligned([0.0, *TRAINER], tokens=5, prompt_len=3)


@pytest.mark.parametrize("prompt_len", [0, 6])
def test_a_prompt_is_some_of_the_tokens(prompt_len: int) -> None:
    with raises(DataError):
        aligned(TRAINER, tokens=5, prompt_len=prompt_len)


def test_what_is_trained_must_be_known() -> None:
    check_known((math.nan, -0.1), (0, 1), what="logprobs")
    with raises(DataError):
        check_known((-0.1, math.nan), (0, 1), what="logprobs")
