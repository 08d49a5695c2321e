"""What is read of vLLM's answers is what `json.loads` reads, whether its lists are looked for or it is read whole."""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.engine.vllm import answers
from groupwise.engine.vllm.answers import Sampled, read_answer
from groupwise.store.number_texts import NumbersRead


@pytest.fixture(params=["as vLLM lays it out", "otherwise"])
def laid_out(request: pytest.FixtureRequest) -> Callable[..., bytes]:
    """Answers whose lists are looked for, and such that are read whole."""

    def said(*choices: dict[str, Any]) -> bytes:
        answer = {"id": "cmpl-1", "choices": choices, "usage": {"prompt_tokens": 3}}
        compact = request.param == "as vLLM lays it out"
        written = json.dumps(answer, separators=(",", ":") if compact else None, ensure_ascii=not compact).encode()
        assert (answers._listed(written) is not None) == (compact and choices[0]["index"] == 0)
        return written

    return said


def floats(count: int) -> list[float]:
    """Finite ones of every size, and float32s, as log-probabilities are."""
    draw = random.Random(0)
    drawn = [struct.unpack("<d", draw.randbytes(8))[0] for _ in range(count)]
    return [x for x in drawn if math.isfinite(x)] + [
        struct.unpack("<f", struct.pack("<f", -draw.expovariate(1)))[0] for _ in range(count)
    ]


def choice(index: int, ids: list[int], logprobs: list[Any], **more: Any) -> dict[str, Any]:
    """As vLLM 0.32 answers; texts that look like what is searched for."""
    texts = [f'"token_ids":[{id}], é\n' for id in ids]
    told = {"text_offset": list(range(len(ids))), "token_logprobs": logprobs, "tokens": texts}
    told |= {"top_logprobs": [{text: x} for text, x in zip(texts, logprobs, strict=True)]}
    rest = {"stop_reason": None, "prompt_logprobs": None, "routed_experts": None}
    return (
        {"index": index, "text": "".join(texts), "logprobs": told, "finish_reason": "stop", "token_ids": ids}
        | rest
        | more
    )


def said(*choices: dict[str, Any]) -> bytes:
    return json.dumps({"id": "cmpl-1", "choices": choices, "usage": {"prompt_tokens": 3}}).encode()


def test_numbers_are_those_of_the_answer_to_the_last_bit(laid_out: Callable[..., bytes]):
    logprobs = floats(5000)
    ids = [random.Random(1).randrange(1 << 31) for _ in logprobs]
    short, long = choice(1, ids[:2], logprobs[:2], finish_reason="length"), choice(0, ids, logprobs)
    for answer in (laid_out(long, short), laid_out(short, long)):
        found = read_answer(answer, top=0)
        assert [each.token_ids for each in found] == [tuple(ids), tuple(ids[:2])]
        assert struct.pack(f"<{len(ids)}d", *found[0].logprobs) == struct.pack(f"<{len(ids)}d", *logprobs)
        assert [each.finish_reason for each in found] == ["stop", "length"] and found[0].tops == ()


def test_what_was_looked_for_is_written_as_the_server_wrote_it():
    """To the character, where the server prints as Python does; and no choice is given another's numbers."""
    made = [choice(index, list(range(100 + index)), floats(50 + index)[: 100 + index]) for index in range(3)]
    for order in ([0, 1, 2], [0, 2, 1], [1, 0, 2]):
        answer = json.dumps({"choices": [made[index] for index in order]}, separators=(",", ":")).encode()
        listed = answers._listed(answer)
        assert (listed is not None) == (order == [0, 1, 2])
        for number, each in enumerate(read_answer(answer, top=0)):
            logprobs = made[number]["logprobs"]["token_logprobs"]
            assert (each.token_ids, each.logprobs) == (tuple(made[number]["token_ids"]), tuple(logprobs))
            for read, written in ((each.token_ids, made[number]["token_ids"]), (each.logprobs, logprobs)):
                assert isinstance(read, NumbersRead) == (listed is not None)
                assert listed is None or read.json.decode() == json.dumps(written, separators=(",", ":"))


LURES = [*'"{}[]:,\\', *(f'"{name}":' for name in ("token_ids", "token_logprobs", "finish_reason", "index", "text"))]
LURES += [
    "index",
    "token_ids",
    '{"index":1,"text":"',
    '"token_ids":[7]',
    '"finish_reason":"length"',
    '"token_ids',
    "\\",
]


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_what_was_sampled_is_not_taken_for_what_is_said(data: st.DataObject):
    """Tokens that are pieces of JSON with the very names that are looked for, as texts and as keys."""
    choices = []
    for index in range(data.draw(st.integers(1, 3))):
        texts = data.draw(st.lists(st.sampled_from(LURES), min_size=1, max_size=6))
        made = choice(index, list(range(len(texts))), [-0.5 - index] * len(texts))
        made["logprobs"] |= {"tokens": texts, "top_logprobs": [{text: 0} for text in texts]}
        choices.append(made | {"text": "".join(texts)})
    answer = json.dumps({"id": "1", "choices": choices}, separators=(",", ":")).encode()
    found = answers._listed(answer)
    assert found == read_answer(answer.decode(), top=0) and found is not None and len(found) == len(choices)


def test_whole_numbers_and_text_are_read_as_well():
    """-0 is what some servers write of -0.0; an event of a stream is a text."""
    found = read_answer(said(choice(0, [5, 6], [-1, 0], finish_reason=None)).decode(), top=0)
    assert found == [Sampled(token_ids=(5, 6), logprobs=(-1.0, 0.0), finish_reason=None)] and found[0].is_whole


def test_alternatives_are_named_by_their_ids():
    told = {
        "token_logprobs": [-0.5, -2.0],
        "top_logprobs": [{"token_id:7": -0.5}, {"token_id:8": -2.0, "token_id:9": -1.0}],
    }
    answer = said({"index": 0, "token_ids": [7, 8], "logprobs": told, "finish_reason": "length"})
    assert read_answer(answer, top=1)[0].tops == (((7, -0.5),), ((9, -1.0),))
    assert read_answer(answer, top=2)[0].tops == (((7, -0.5),), ((9, -1.0), (8, -2.0)))
    assert read_answer(answer, top=0)[0].tops == ()


@pytest.mark.parametrize("logprobs", [[None, -1.0], [-1.0], [-1.0, "NaN"], []])
def test_a_completion_without_a_number_for_each_token_is_not_whole(logprobs: list[Any]):
    answer = json.dumps(
        {
            "choices": [
                {"index": 0, "token_ids": [5, 6], "logprobs": {"token_logprobs": logprobs}, "finish_reason": "stop"}
            ]
        }
    ).replace('"NaN"', "-1e999")
    assert not read_answer(answer, top=0)[0].is_whole


@pytest.mark.parametrize("changed", [{"token_ids": None}, {"logprobs": None}, {"finish_reason": None}])
def test_a_choice_that_lacks_something_does_not_take_it_from_the_next(changed: dict[str, Any]):
    lacking = choice(0, [5], [-1.0]) | changed
    answer = json.dumps({"choices": [lacking, choice(1, [6], [-2.0])]}, separators=(",", ":")).encode()
    assert answers._listed(answer) is None


def test_no_tokens_need_no_logprobs_and_tokens_do():
    nothing = {"index": 0, "token_ids": [], "logprobs": None, "finish_reason": "length"}
    assert read_answer(said(nothing), top=0) == [Sampled(token_ids=(), logprobs=(), finish_reason="length")]
    assert not read_answer(said(nothing), top=0)[0].is_whole
    with pytest.raises(ValueError):
        read_answer(said({**nothing, "token_ids": [5]}), top=0)


@pytest.mark.parametrize("ids", [["5"], [5.5], [True], [None], "56", {"5": 6}])
def test_ids_are_whole_numbers(ids: Any):
    answer = said({"index": 0, "token_ids": ids, "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "stop"})
    with pytest.raises(ValueError):
        read_answer(answer, top=0)


@pytest.mark.parametrize("answer", [b"", b"{}", b"[1]", b'{"choices": [{"index": 0}]}', b'{"choices": [', b"\xff"])
def test_what_is_no_answer_is_an_error(answer: bytes):
    with pytest.raises(ValueError):
        read_answer(answer, top=0)
