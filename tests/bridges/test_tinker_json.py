"""What packages before 0.25 send and read in JSON, as those do: the numbers are protobuf's."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("google.protobuf")

from groupwise.bridges.tinker.json_requests import output_as_json
from groupwise.bridges.tinker.proto import ForwardBackwardOutput
from tinker_wire import Datum, Wire, datum, snapshot, supervised

ACCEPT = {"accept": "application/json"}


def batch(data: Sequence[Datum], loss: str = "cross_entropy", **more: Any) -> dict[str, Any]:
    """A ForwardBackwardInput as tinker 0.16 writes it."""

    def tensor(name: str, row: Sequence[Any]) -> dict[str, Any]:
        array = np.asarray(row)
        dtype = "int64" if name == "target_tokens" else "float32"
        return {"data": array.ravel().tolist(), "dtype": dtype, "shape": list(array.shape)}

    datums = [
        {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
            "loss_fn_inputs": {name: tensor(name, row) for name, row in values.items()},
        }
        for tokens, values in data
    ]
    return {"data": datums, "loss_fn": loss, **more}


def answer(wire: Wire, route: str, **body: Any) -> Any:
    """The answer, to a client that takes JSON alone."""
    id = wire.ok(route, **body)["request_id"]
    while True:
        given = wire.http.post("/api/v1/retrieve_future", json={"request_id": id}, headers=ACCEPT)
        assert given.status_code == 200 and given.headers["content-type"] == "application/json"
        if given.json().get("type") != "try_again":
            return given.json()


def test_a_gradient_over_json_is_that_over_protobuf(wire: Wire) -> None:
    one, other = wire.model(0), wire.model(1)
    data = supervised(1)
    rows, metrics = wire.backward_answer(one, 1, data)
    found = answer(wire, "forward_backward", model_id=other, seq_id=1, forward_backward_input=batch(data))
    assert found["metrics"] == pytest.approx(metrics)
    for row, output in zip(rows, found["loss_fn_outputs"], strict=True):
        assert output["logprobs"]["data"] == row.tolist() and output["logprobs"]["shape"] == [len(row)]
    assert np.array_equal(wire.gradient(one), wire.gradient(other))
    again = answer(wire, "forward", model_id=other, seq_id=2, forward_input=batch(data))
    assert again["metrics"]["loss:sum"] == pytest.approx(metrics["loss:sum"])
    assert np.array_equal(wire.gradient(one), wire.gradient(other))  # a forward adds none
    narrow = {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01}
    policy = [datum([5, 6, 7], logprobs=[-1.0, -2.0], advantages=[1.0, -1.0])]
    clipped = wire.backward_answer(one, 2, policy, "ppo", config=narrow, forward_only=True)[1]
    found = answer(wire, "forward", model_id=other, seq_id=3, forward_input=batch(policy, "ppo", loss_fn_config=narrow))
    assert found["metrics"] == pytest.approx(clipped)


def test_several_targets_and_positions_that_are_left_out_come_back_in_json(wire: Wire) -> None:
    model = wire.model()
    wide = ([5, 6, 7], {"target_tokens": [[6, 9], [7, 8], [2, 0]], "weights": [[0.5, 0.5]] * 3})
    found = answer(wire, "forward", model_id=model, seq_id=1, forward_input=batch([wide]))
    assert found["loss_fn_outputs"][0]["logprobs"]["shape"] == [3, 2]
    padded = [([5, 6, 7], {"target_tokens": [0, 7, 2], "logprobs": [0, -1, -1], "advantages": [0, 1, 1]})]
    found = answer(wire, "forward_backward", model_id=model, seq_id=2, forward_backward_input=batch(padded, "dro"))
    first, *others = found["loss_fn_outputs"][0]["logprobs"]["data"]
    assert math.isnan(first) and all(value < 0 for value in others)
    assert output_as_json(ForwardBackwardOutput().SerializeToString())["loss_fn_outputs"] == []


def test_samples_in_json(wire: Wire) -> None:
    sampler = snapshot(wire, wire.model(), 1, 0)["sampling_session_id"]
    body = {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
        "sampling_params": {"max_tokens": 4, "seed": 1, "stop": []},
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 2,
    }
    found = answer(wire, "asample", **body)
    assert [each["stop_reason"] for each in found["sequences"]] == ["length"] * 2
    assert all(len(each["tokens"]) == len(each["logprobs"]) == 4 for each in found["sequences"])
    assert found["prompt_logprobs"][0] is None and all(value < 0 for value in found["prompt_logprobs"][1:])
    first, *tops = found["topk_prompt_logprobs"]
    assert first is None and all(len(row) == 2 and row[0][1] >= row[1][1] for row in tops)
    own = {"data": [6, -1, 7, -1], "dtype": "int64", "shape": [2, 2]}
    dense = answer(wire, "asample", **body | {"seq_id": 1, "target_prompt_logprobs": own})
    values = [found["prompt_logprobs"][1], 0, found["prompt_logprobs"][2], 0]
    assert dense["target_prompt_logprobs"] == {"data": values, "dtype": "float32", "shape": [2, 2]}
    indices = {"sparse_crow_indices": [0, 0, 1], "sparse_col_indices": [1]}
    listed = {"data": [7], "dtype": "int64", "shape": [2, 2], **indices}
    sparse = answer(wire, "asample", **body | {"seq_id": 2, "target_prompt_logprobs": listed})
    assert sparse["target_prompt_logprobs"] == {"data": values[2:3], "dtype": "float32", "shape": [2, 2], **indices}


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"data": [{"model_input": {"chunks": [{"tokens": [1]}]}, "loss_fn_inputs": {"x": 7}}]}, "must be"),
        ({"loss_fn": 7}, "loss_fn"),
        ({"loss_fn": "stable_reinforce"}, "not published"),
        ({"loss_fn_config": {"clip_low_threshold": "x"}}, "must be a valid number"),
        ({"data": []}, "no datums"),
    ],
)
def test_what_is_wrong_with_a_body_is_its_numbers_answer(wire: Wire, change: dict[str, Any], wanted: str) -> None:
    model = wire.model()
    body = batch([datum([5, 6, 7], weights=[1, 1])]) | change
    told = answer(wire, "forward_backward", model_id=model, seq_id=1, forward_backward_input=body)
    assert told["category"] == "user" and wanted in told["error"], told
    wire.backward_answer(model, 2, supervised(2))


def test_fractions_images_and_other_bodies_are_refused(wire: Wire) -> None:
    model = wire.model()
    halves = batch([([5, 6], {"target_tokens": [6.5, 7], "weights": [1, 1]})])
    told = answer(wire, "forward_backward", model_id=model, seq_id=1, forward_backward_input=halves)
    assert "data[0].target_tokens is of type int64 and has a fraction" in told["error"]
    image = batch([datum([5, 6, 7], weights=[1, 1])])
    image["data"][0]["model_input"]["chunks"] = [{"type": "image", "data": "x", "format": "png"}]
    told = answer(wire, "forward", model_id=model, seq_id=2, forward_input=image)
    assert told["code"] == "invalid_image"
    image["data"][0]["model_input"]["chunks"][0]["data"] = ""
    told = answer(wire, "forward", model_id=model, seq_id=3, forward_input=image)
    assert told["code"] == "unsupported_content"
    given = wire.http.post("/api/v1/forward_backward", content=b"x", headers={"content-type": "text/plain"})
    assert given.status_code == 415 and "application/x-protobuf" in given.text and "application/json" in given.text


def test_who_is_asked_to_sends_protobuf(wire: Wire) -> None:
    """Packages 0.23 and 0.24 do as `client/config` says; the later ones no longer ask."""
    for route in ("client/config", "client/dynamic_config"):
        flags = wire.ok(route, sdk_version="0.24.1")
        assert flags["proto_write_fwdbwd"] is True and flags["fwd_via_fwdbwd"] is True
