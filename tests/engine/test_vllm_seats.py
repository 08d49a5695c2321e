"""Which GPUs vLLM's servers get: none of a learner's, each server on one machine, as many as fit or are asked for."""

from __future__ import annotations

from typing import Any

import pytest

from groupwise.config.engine import VllmConfig
from groupwise.engine.vllm.seats import Seat, Seats, seated, seats_of
from groupwise.errors import ConfigError
from wording import raises

EIGHT = [str(number) for number in range(8)]


def gpus(seats: Seats) -> list[tuple[int, str]]:
    return [(seat.node, ",".join(seat.gpus)) for seat in seats.servers]


@pytest.mark.parametrize(
    ("vllm", "where", "expected"),
    [
        ({}, {"learners": 6, "visible": EIGHT}, [(0, "6"), (0, "7")]),
        ({"tensor_parallel_size": 2}, {"learners": 3, "visible": EIGHT}, [(0, "3,4"), (0, "5,6")]),  # one is left
        ({"servers": 1}, {"learners": 6, "visible": EIGHT}, [(0, "6")]),
        ({}, {"learners": 1, "visible": ["3", "5"], "first": 1}, [(0, "3")]),  # device: cuda:1
        ({"gpus": "4, 6"}, {"learners": 8, "visible": EIGHT}, [(0, "4"), (0, "6")]),
        ({"gpus": "4,6", "tensor_parallel_size": 2}, {"learners": 0, "visible": ()}, [(0, "4,6")]),
        (
            {"servers": 3, "tensor_parallel_size": 2},
            {"learners": 4, "visible": EIGHT, "nodes": 2},
            [(0, "4,5"), (1, "4,5"), (0, "6,7")],
        ),
        ({}, {"learners": 7, "visible": EIGHT, "nodes": 3}, [(0, "7"), (1, "7"), (2, "7")]),
        ({"servers": 3}, {"learners": 1, "visible": (), "nodes": 2}, [(0, ""), (1, ""), (0, "")]),  # CPUs
        ({}, {"learners": 2, "visible": ()}, [(0, "")]),
    ],
)
def test_servers_get_what_no_learner_uses(vllm: dict[str, Any], where: dict[str, Any], expected: list) -> None:
    seats = seats_of(VllmConfig(**vllm), **where)
    assert gpus(seats) == expected and not seats.shared
    assert [seat.number for seat in seats.servers] == list(range(len(expected)))
    assert seats.gpus == sum(len(seat.gpus) for seat in seats.servers)


def test_one_server_shares_a_gpu_where_all_train() -> None:
    seats = seats_of(VllmConfig(), learners=2, visible=["4", "5"])
    assert gpus(seats) == [(0, "4")] and seats.shared and seats.gpus == 0


def test_who_is_on_the_gpu_of_rank_0() -> None:
    """That of the first learner of the first machine: NCCL has no two ranks on one GPU."""

    def beside(where: dict[str, Any], **vllm: Any) -> list[bool]:
        return [seat.beside_rank_0 for seat in seats_of(VllmConfig(**vllm), **where).servers]

    assert beside({"learners": 2, "visible": ["4", "5"]}) == [True]
    assert beside({"learners": 2, "visible": EIGHT}) == [False] * 6
    sleeping = {"learners": 4, "visible": EIGHT, "first": 2, "nodes": 2}
    assert beside(sleeping, sleep=True, tensor_parallel_size=2) == [True, False, False, False]
    assert beside({"learners": 2, "visible": EIGHT}, gpus="0,7") == [True, False]
    assert beside({"learners": 1, "visible": ()}) == [False]


def test_servers_that_sleep_are_on_the_learners_gpus() -> None:
    seats = seats_of(VllmConfig(sleep=True, tensor_parallel_size=2), learners=4, visible=EIGHT, first=2, nodes=2)
    assert gpus(seats) == [(0, "2,3"), (1, "2,3"), (0, "4,5"), (1, "4,5")] and seats.shared and seats.gpus == 0
    with raises(ConfigError, field="vllm.sleep"):
        seats_of(VllmConfig(sleep=True), learners=1, visible=())


@pytest.mark.parametrize(
    ("vllm", "learners", "visible"),
    [
        ({"sleep": True, "servers": 3}, 2, EIGHT),
        ({"tensor_parallel_size": 4}, 6, EIGHT),
        ({"servers": 3}, 6, EIGHT),
        ({"servers": 2}, 8, EIGHT),  # none is free: one could share, two cannot
        ({"tensor_parallel_size": 2}, 1, ["0"]),
        ({"gpus": "7", "tensor_parallel_size": 2}, 1, EIGHT),
    ],
)
def test_too_few_gpus_are_an_error(vllm: dict[str, Any], learners: int, visible: list[str]) -> None:
    with raises(ConfigError, field="vllm.servers"):
        seats_of(VllmConfig(**vllm), learners=learners, visible=visible)


@pytest.mark.parametrize(
    ("log", "expected"),
    [("logs/vllm.log", "logs/vllm-3.log"), ("logs.d/vllm", "logs.d/vllm-3"), (None, None)],
)
def test_each_of_several_has_a_port_and_a_log_of_its_own(log: str | None, expected: str | None) -> None:
    config, seat = VllmConfig(port=8000, log=log), Seat(number=3, gpus=("6", "7"))
    several, one = seated(config, seat, alone=False), seated(config, seat, alone=True)
    assert (several.port, several.log, several.gpus) == (8003, expected, "6,7")
    assert (one.port, one.log) == (8000, log)
    assert seated(VllmConfig(gpus="1"), Seat(number=0), alone=True).gpus == "1"
