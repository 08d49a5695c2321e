"""What the server spools and the worker reads."""

import json
from base64 import b64encode

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from groupwise.errors import DataError
from groupwise.recorded import KEPT, RoutedExperts, SamplingMask
from groupwise.store.job_payload import EncodedCompletion, EncodedGroup, GrpoPayload, dump_payload, parse_payload
from wording import raises

numbers = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def completions(draw) -> EncodedCompletion:
    ids = tuple(draw(st.lists(st.integers(0, 1 << 20), max_size=4)))
    logprobs = draw(st.none() | st.lists(numbers, min_size=len(ids), max_size=len(ids)).map(tuple))
    kept = b64encode(SamplingMask.whole(1 << 21, len(ids)).to_bytes()) if logprobs and draw(st.booleans()) else None
    experts = draw(st.lists(st.integers(-1, 300), min_size=2 * len(ids), max_size=2 * len(ids)))
    routed = RoutedExperts.of(np.array(experts, "int16").reshape(len(ids), 1, 2)) if draw(st.booleans()) else None
    data = None if routed is None else b64encode(routed.to_bytes())
    one = EncodedCompletion(ids=ids, logprobs=logprobs, reward=draw(numbers), kept=kept, routed_experts=data)
    assert one.routing == routed
    return one


@given(st.lists(completions(), max_size=3), st.floats(0.01, 10))
def test_numbers_come_back_exactly(found, temperature):
    payload = GrpoPayload(groups=(EncodedGroup(prompt_ids=(1, 2), completions=tuple(found)),), temperature=temperature)
    assert parse_payload("grpo", dump_payload(payload)) == payload


def test_plain_json_is_read_and_the_temperature_is_1_unless_recorded():
    completion = {"ids": [3, 4], "logprobs": None, "reward": 1}
    raw = {"groups": [{"prompt_ids": [1], "completions": [completion]}]}
    payload = parse_payload("grpo", json.dumps(raw).encode())
    assert payload.temperature == 1.0 and payload.groups[0].completions[0].ids == (3, 4)
    example = {"prompt_ids": [1], "completion_ids": [2, 3], "mask": [1, 0]}
    assert parse_payload("sft", json.dumps({"examples": [example]}).encode()).examples[0].mask == (1, 0)


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        ("grpo", b"{"),
        ("grpo", b'{"groups": [{"prompt_ids": [], "completions": []}]}'),
        ("grpo", b'{"groups": [{"prompt_ids": [-1], "completions": []}]}'),
        ("grpo", b'{"groups": [{"prompt_ids": [1.0], "completions": []}]}'),
        ("grpo", b'{"groups": [{"prompt_ids": [1], "completions": [{"ids": [1], "reward": NaN}]}]}'),
        ("grpo", b'{"groups": [{"prompt_ids": [1], "completions": [{"ids": [1], "logprobs": [], "reward": 1}]}]}'),
        ("sft", b'{"examples": [{"prompt_ids": [1], "completion_ids": [2], "mask": [1, 1]}]}'),
        ("sft", b'{"examples": [{"prompt_ids": [1], "completion_ids": [2], "mask": [2]}]}'),
        ("sft", b'{"groups": []}'),
    ],
)
def test_what_is_no_payload_is_refused_by_its_place(kind, raw):
    with raises(DataError):
        parse_payload(kind, raw)


@pytest.mark.parametrize(
    ("ids", "logprobs"),
    [((1, 5), (0.0, 0.0)), ((1,), (0.0,)), ((1, 2), None)],
)
def test_what_was_kept_is_of_the_tokens(ids, logprobs):
    mask = SamplingMask.of_entries(9, [(KEPT, np.array([1, 3])), (KEPT, np.array([2]))])
    assert EncodedCompletion(ids=(3, 2), logprobs=(0.0, 0.0), reward=1.0, kept=b64encode(mask.to_bytes()))
    with raises(ValidationError):
        EncodedCompletion(ids=ids, logprobs=logprobs, reward=1.0, kept=b64encode(mask.to_bytes()))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"kept" + bytes(12),
        RoutedExperts((3, 1, 2), bytes(5)).to_bytes(),
        RoutedExperts((3, 0, 2), b"").to_bytes(),
        RoutedExperts((-1, 1, 2), b"").to_bytes(),
        RoutedExperts((1, 1, 2), b"\x80\x00").to_bytes(),
        RoutedExperts((4, 1, 2), bytes(8)).to_bytes(),
    ],
)
def test_routed_experts_are_of_the_tokens(data):
    def group(data: bytes) -> EncodedGroup:
        completion = EncodedCompletion(ids=(3, 2), reward=1.0, routed_experts=b64encode(data))
        return EncodedGroup(prompt_ids=(1,), completions=(completion,))

    assert group(RoutedExperts((2, 1, 2), bytes(4)).to_bytes()).completions[0].routing.shape == (2, 1, 2)
    with raises(ValidationError):
        group(data)
