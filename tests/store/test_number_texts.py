"""Long lists of numbers are written as `json.dumps` writes them, character by character."""

from __future__ import annotations

import json
import math
import pickle
import random
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.store.number_texts import LONG, NumbersRead, NumberTexts
from groupwise.store.rollouts import group_line, group_to_json
from groupwise.types import Completion, FinishReason, Prompt, Rollout, RolloutGroup, SequenceScores, Turn


def written(value: Any) -> tuple[str, bool]:
    """A list in JSON, and whether it left a mark in it."""
    numbers = NumberTexts()
    mark = numbers(value)
    return numbers.filled(json.dumps({"before": "x", "here": value if mark is None else mark})), mark is not None


def plainly(value: Any) -> str:
    return json.dumps({"before": "x", "here": value})


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=LONG))
@settings(max_examples=100)
def test_floats(values: list[float]):
    assert written(values) == (plainly(values), max(map(abs, values)) < 1e16)


@given(st.lists(st.floats(-1e-3, 1e-3), min_size=LONG))
@settings(max_examples=100)
def test_small_floats(values: list[float]):
    assert written(values) == (plainly(values), True)


@given(st.lists(st.integers(-(10**25), 10**25) | st.integers(0, 200_000), min_size=LONG))
@settings(max_examples=50)
def test_whole_numbers(values: list[int]):
    assert written(values) == written(tuple(values)) == (plainly(values), True)


def test_floats_of_every_size():
    draw = random.Random(0)
    drawn = [struct.unpack("<d", draw.randbytes(8))[0] for _ in range(50_000)]
    single = [struct.unpack("<f", struct.pack("<f", -math.exp(draw.gauss(-4, 5))))[0] for _ in range(50_000)]
    powers = [sign * 10.0**power for power in range(-320, 309) for sign in (1, -1)]
    edges = [0.0, -0.0, 1e-4, math.nextafter(1e-4, 0), 1e16, math.nextafter(1e16, 0), 123456789012345.6, 5e-324]
    values = [*filter(math.isfinite, drawn), *single, *powers, *edges, *map(float, range(1000))]
    most = [x for x in values if abs(x) < 1e16]
    ordinary = [x for x in most if x == 0 or abs(x) >= 1e-4]
    assert written(values) == (plainly(values), False)
    assert written(most) == (plainly(most), True) and written(ordinary) == (plainly(ordinary), True)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 1, True, None, "5"])
def test_others_are_left_to_json(odd: Any):
    values = [*[0.5] * LONG, odd]
    assert written(values) == (plainly(values), False)


def test_few_numbers_are_not_worth_a_mark():
    assert not written([1.0] * (LONG - 1))[1] and written([1] * LONG)[1] and written([1.0] * LONG)[1]


def test_a_text_cannot_stand_for_numbers():
    """Marks are drawn anew for each text; one of another is a text like any."""
    values, other = [0.5] * LONG, NumberTexts()([0.25] * LONG)
    numbers = NumberTexts()
    value = {"here": values, "said": other, "quoted": f'"{other}"'}
    assert numbers.filled(json.dumps({**value, "here": numbers(values)})) == json.dumps(value)


def test_a_line_of_a_long_group_is_its_json():
    """All lists that a group has, and log-probabilities of which one is infinite."""
    draw = random.Random(0)
    ids, logprobs = tuple(range(100)), tuple(-draw.expovariate(1e3) for _ in range(100))
    said = Completion(token_ids=ids, logprobs=logprobs, text='"a"\né', finish_reason=FinishReason.STOP)
    endless = replace(said, logprobs=(*logprobs[1:], -math.inf))
    rollout = Rollout(
        turns=(Turn(ids, said), Turn((*ids, 7), endless)),
        rewards={"right": 1.0},
        teacher=(SequenceScores(logprobs=logprobs, top=()),),
    )
    prompt = Prompt(id="1", text="a prompt", token_ids=ids)
    group = RolloutGroup(prompt=prompt, rollouts=(rollout, rollout), demonstrations=(rollout,))
    assert group_line(group) == json.dumps(group_to_json(group), allow_nan=False)
    assert len(group_line(group)) > 20_000


@pytest.mark.parametrize("values", [[5, 7] * LONG, [-0.5, -1e-05, -1.1920928955078125e-07, 0.0] * LONG])
def test_numbers_that_came_as_json_are_written_as_they_came(values: list[Any]):
    came = json.dumps(values, separators=(",", ":")).encode()
    read = NumbersRead.of(tuple(values), came)
    assert read == tuple(values) and written(read) == (plainly(values), True)
    in_other_digits = NumbersRead.of(tuple(values), came.replace(b"e-05", b"e-5"))
    assert json.loads(written(in_other_digits)[0]) == {"before": "x", "here": values}


@pytest.mark.parametrize("space", [" ", "\n", "\r", "\t"])
def test_json_that_would_break_a_line_is_not_kept(space: str):
    values = (1, 2) * LONG
    read = NumbersRead.of(values, json.dumps(values, separators=(f",{space}", ":")).encode())
    assert type(read) is tuple and written(read) == (plainly(values), True)


@pytest.mark.parametrize(
    "made", [lambda read: read[:LONG], lambda read: (*read, 3), lambda read: read * 2, lambda read: pickled(read)]
)
def test_what_is_made_of_numbers_that_were_read_has_forgotten_their_text(made: Callable[[Any], Any]):
    values = (1, 2) * LONG
    read = NumbersRead.of(values, json.dumps(values, separators=(",", ":")).encode())
    assert type(made(read)) is tuple and made(read) == made(values)


def pickled(values: Any) -> Any:
    return pickle.loads(pickle.dumps(values))
