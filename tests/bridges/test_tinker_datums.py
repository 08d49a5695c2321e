"""Datums of the wire as those of the SDK: what is padding, what each loss reads, and what is refused."""

from typing import Any, get_args

import numpy as np
import pytest

from wording import raises

pytest.importorskip("google.protobuf")

from groupwise.bridges.tinker.datums import (
    UNOFFERED,
    datums_of,
    encode_output,
    loss_config,
    widths_of,
    wire_metrics,
)
from groupwise.bridges.tinker.proto import ForwardBackwardRequest
from groupwise.errors import GroupwiseError, RequestError
from groupwise.sdk.losses import BUILT_IN
from tinker_wire import datum, read_output, request

TOKENS = [5, 6, 7, 2]


def one(loss: str, *, targets: list[int] | None = None, **values: list[float]) -> Any:
    tokens, inputs = datum(TOKENS, **values)
    if targets is not None:
        inputs["target_tokens"] = targets
    (made,) = datums_of(request("m", 1, [(tokens, inputs)], loss))
    return made


def test_a_datum_is_what_was_sent() -> None:
    made = one("cross_entropy", weights=[0, -1.5, 2])
    assert made.tokens == tuple(TOKENS) and made.loss_fn_inputs["weights"] == (0, -1.5, 2)
    assert made.mask == (1, 1, 1)  # every position has a log-probability


def test_targets_are_what_was_sent() -> None:
    padded = one("importance_sampling", targets=[0, 7, 2], advantages=[0, 1, 1], logprobs=[0, -1, -1])
    assert padded.targets == (0, 7, 2) and padded.tokens == tuple(TOKENS) and padded.mask == (1, 1, 1)
    others = one("cross_entropy", targets=[9, 0, 4], weights=[1, 0, -1])
    assert others.targets == (9, 0, 4) and others.tokens == (5, 6, 7, 4) and others.mask == (1, 1, 1)
    dro = one("dro", targets=[0, 7, 2], advantages=[0, 1, 1], logprobs=[0, -1, -1])
    assert dro.mask == (0, 1, 1)  # its penalty reads every position


def test_several_targets_a_position_are_a_datum_each() -> None:
    targets, weights = [[6, 9], [7, 8], [2, 0]], [[0.5, 0.25], [1, 0], [0.5, 0.5]]
    wide = ([5, 6, 7], {"target_tokens": targets, "weights": weights})
    message = request("m", 1, [datum(TOKENS, weights=[1, 1, 1]), wide])
    _, first, second = datums_of(message)
    assert (first.targets, second.targets) == ((6, 7, 2), (9, 8, 0))
    assert first.loss_fn_inputs["weights"] == (0.5, 1, 0.5) and second.loss_fn_inputs["weights"] == (0.25, 0, 0.5)
    assert widths_of(message) == [None, 2]
    (_, unweighted) = datums_of(request("m", 1, [([5, 6, 7], {"target_tokens": targets})]))
    assert unweighted.loss_fn_inputs["weights"] == (1, 1, 1)


@pytest.mark.parametrize(
    ("loss", "values"),
    [
        ("cross_entropy", {"weights": [1, 1, 1]}),
        ("cross_entropy", {"weights": [[1], [1], [1]]}),
        ("cross_entropy", {"target_tokens": [[6] * 33] * 3}),
        ("cross_entropy", {"target_tokens": [[], [], []]}),
        ("cross_entropy", {"target_tokens": [[6, 7]] * 2}),
        ("cross_entropy", {"target_tokens": [[6, -7]] * 3}),
        ("importance_sampling", {"advantages": [1, 1, 1], "logprobs": [0, 0, 0]}),
    ],
)
def test_several_targets_that_do_not_fit_are_refused(loss: str, values: dict[str, Any]) -> None:
    with raises(GroupwiseError) as refused:
        datums_of(request("m", 1, [([5, 6, 7], {"target_tokens": [[6, 9], [7, 8], [2, 0]], **values})], loss))
    assert refused.value.status == 400


def test_gspo_reads_its_mask() -> None:
    made = one("gspo", advantages=[0, 1, 0], logprobs=[0, -1, -1], sequence_ratio_mask=[0, 1, 1])
    assert made.mask == (0, 1, 1)


@pytest.mark.parametrize(
    ("loss", "values"),
    [
        ("ppo", {"weights": [1, 1, 1]}),
        ("ppo", {"clip_low_threshold": [1, 1, 1]}),
        ("gspo", {"advantages": [0, 1, 1], "logprobs": [0, 0, 0]}),
        ("gspo", {"advantages": [1, 1, 1], "logprobs": [0, 0, 0], "sequence_ratio_mask": [0, 1, 1]}),
        ("cross_entropy", {"targets": [6, 7], "weights": [1, 1, 1]}),
        ("cross_entropy", {"targets": [-100, 7, 2], "weights": [0, 1, 1]}),
        ("cross_entropy", {"weights": [1, 1]}),
        ("ppo", {"advantages": [1, 1, 1]}),
        ("ppo", {"logprobs": [0, 0, 0]}),
        (
            "gspo",
            {"advantages": [0, 1, 1], "logprobs": [0, 0, 0], "sequence_ratio_mask": [0, 1]},
        ),
        ("cross_entropy", {"weights": [1, float("nan"), 1]}),
        ("importance_sampling", {"advantages": [1, float("inf"), 1], "logprobs": [0, 0, 0]}),
        ("cross_entropy", {"targets": [6, 7, -1], "weights": [1, 1, 1]}),
    ],
)
def test_what_cannot_be_trained_is_refused(loss: str, values: dict[str, Any]) -> None:
    with raises(GroupwiseError) as refused:
        one(loss, **values)
    assert refused.value.status == 400
    assert "build_grpo_datums" not in str(refused.value) and "N - 1" not in str(refused.value)


def test_images_sparse_and_wide_tensors_are_refused() -> None:
    def refused(change: Any, wanted: str) -> None:
        message = request("m", 1, [datum(TOKENS, weights=[1, 1, 1])])
        change(message.data[0])
        with raises(RequestError):
            datums_of(message)

    refused(lambda d: d.model_input.add().image.SetInParent(), "an image")  # for a model that reads text
    refused(lambda d: d.model_input.add().dmel.SetInParent(), "audio")
    refused(lambda d: d.loss_fn_inputs["weights"].sparse_csr.SetInParent(), r"not a sparse tensor of shape \[3\]")
    refused(lambda d: d.loss_fn_inputs["target_tokens"].shape.extend([1, 1]), "3 dimensions")
    refused(lambda d: d.loss_fn_inputs["target_tokens"].shape.append(2), r"24 bytes for shape \[3, 2\]")
    refused(lambda d: d.loss_fn_inputs.pop("target_tokens"), "no target_tokens")
    refused(lambda d: setattr(d.loss_fn_inputs["weights"], "dtype", 4), "bfloat16")
    refused(lambda d: setattr(d.loss_fn_inputs["weights"], "dense", b"123"), "3 bytes")
    refused(lambda d: setattr(d.model_input[0].encoded_text, "tokens", b"123"), "3 bytes of tokens")


def sparse(shape: list[int], values: list[float], ends: list[int], columns: list[int]) -> Any:
    """A request whose weights are sparse."""
    message = request("m", 1, [([5, 6, 7], {"target_tokens": [[6, 9], [7, 8], [2, 0]], "weights": [[0, 0]] * 3})])
    tensor = message.data[0].loss_fn_inputs["weights"]
    tensor.shape[:] = shape
    tensor.sparse_csr.values = np.asarray(values, "<f4").tobytes()
    tensor.sparse_csr.crow_indices = np.asarray(ends, "<i8").tobytes()
    tensor.sparse_csr.col_indices = np.asarray(columns, "<i8").tobytes()
    return message


def test_a_sparse_tensor_is_a_dense_one_with_gaps() -> None:
    first, second = datums_of(sparse([3, 2], [0.5, 2, -1], [0, 1, 1, 3], [1, 0, 1]))
    assert first.loss_fn_inputs["weights"] == (0, 0, 2) and second.loss_fn_inputs["weights"] == (0.5, 0, -1)


@pytest.mark.parametrize(
    "wrong",
    [
        ([3, 2], [1], [0, 1, 1, 2], [0]),  # one value too few
        ([3, 2], [1], [0, 1, 1], [0]),  # a row too few
        ([3, 2], [1], [0, 1, 1, 1], [2]),  # no such column
        ([3, 2], [1], [0, 1, 1, 1], [-1]),
        ([3, 2], [1], [0, 2, 1, 1], [0]),  # rows that run backwards
        ([3, 2], [1], [1, 1, 1, 2], [0]),
        ([3, 2], [], [], []),
        ([3, 1 << 40], [1], [0, 1, 1, 1], [0]),  # far too large
        ([-3, -2], [1], [0, 1, 1, 1], [0]),
    ],
)
def test_a_sparse_tensor_that_is_none_is_refused(wrong: Any) -> None:
    with raises(RequestError):
        datums_of(sparse(*wrong))


def test_losses_and_knobs() -> None:
    assert loss_config(request("m", 1, [], "ppo", {"clip_low_threshold": 0.9})) == {"clip_low_threshold": 0.9}
    with raises(RequestError, field="loss_fn"):
        loss_config(request("m", 1, [], "stable_reinforce"))
    text = ForwardBackwardRequest(loss_fn="ppo")
    text.loss_fn_config_v2["x"].text = "y"
    with raises(RequestError, field="loss_fn_config"):
        loss_config(text)


def test_every_loss_of_the_package_is_here_or_refused_with_a_reason() -> None:
    tinker = pytest.importorskip("tinker")
    assert {*get_args(tinker.types.LossFnType)} == {*BUILT_IN, *UNOFFERED}
    for name, reason in UNOFFERED.items():
        with pytest.raises(RequestError) as refused:
            loss_config(request("m", 1, [], name))
        assert reason in (refused.value.hint or "") and ", ".join(BUILT_IN) in (refused.value.hint or "")


def test_output_goes_back_and_says_how_metrics_combine() -> None:
    rows = [(-1.0, -2.0), (-3.0,), (-4.0, -5.0), (-6.0, -7.0), (-8.0,)]  # the third and fourth of one datum
    metrics = {"loss/policy": 7.0, "a/ratio_max": 2.0, "a/ratio_min": 1.0, "a/mean": 3.0}
    logprobs, found = read_output(encode_output(rows, wire_metrics(metrics, loss=7.0), [None, None, 2, None]))
    assert [row.tolist() for row in logprobs] == [[-1, -2], [-3], [[-4, -6], [-5, -7]], [-8]]
    assert found == {"loss:sum": 7.0, "a/ratio_max:max": 2.0, "a/ratio_min:min": 1.0, "a/mean:mean": 3.0}
    assert np.isclose(found["loss:sum"], 7.0)
