"""Datums of the wire as those of the SDK: what is padding, what each loss reads, and what is refused."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("google.protobuf")

from groupwise.errors import GroupwiseError, RequestError
from groupwise.server.tinker_datums import datums_of, encode_output, loss_config, wire_metrics
from groupwise.server.tinker_proto import ForwardBackwardRequest
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


def test_padding_is_what_follows_with_no_weight() -> None:
    padded = one("importance_sampling", targets=[0, 7, 2], advantages=[0, 1, 1], logprobs=[0, -1, -1])
    assert padded.targets == (6, 7, 2) and padded.mask == (1, 1, 1)
    dro = one("dro", targets=[0, 7, 2], advantages=[0, 1, 1], logprobs=[0, -1, -1])
    assert dro.mask == (0, 1, 1)  # its penalty reads every position


def test_gspo_reads_its_mask() -> None:
    made = one("gspo", advantages=[0, 1, 0], logprobs=[0, -1, -1], sequence_ratio_mask=[0, 1, 1])
    assert made.mask == (0, 1, 1)


@pytest.mark.parametrize(
    ("loss", "values", "wanted"),
    [
        ("ppo", {"weights": [1, 1, 1]}, "ppo does not read"),
        ("ppo", {"clip_low_threshold": [1, 1, 1]}, "does not read"),
        ("gspo", {"advantages": [0, 1, 1], "logprobs": [0, 0, 0]}, "sequence_ratio_mask"),
        ("gspo", {"advantages": [1, 1, 1], "logprobs": [0, 0, 0], "sequence_ratio_mask": [0, 1, 1]}, "outside"),
        ("cross_entropy", {"targets": [0, 7, 2], "weights": [1, 1, 1]}, "cannot be trained"),
        ("cross_entropy", {"weights": [1, 1]}, "2 entries"),
        ("cross_entropy", {"weights": [1, float("nan"), 1]}, "nan"),
        ("importance_sampling", {"advantages": [1, float("inf"), 1], "logprobs": [0, 0, 0]}, "inf"),
        ("cross_entropy", {"targets": [6, 7, -1], "weights": [1, 1, 1]}, "-1 is not a token"),
    ],
)
def test_what_cannot_be_trained_is_refused(loss: str, values: dict[str, Any], wanted: str) -> None:
    with pytest.raises(GroupwiseError, match=wanted) as refused:
        one(loss, **values)
    assert refused.value.status == 400


def test_images_sparse_and_wide_tensors_are_refused() -> None:
    def refused(change: Any, wanted: str) -> None:
        message = request("m", 1, [datum(TOKENS, weights=[1, 1, 1])])
        change(message.data[0])
        with pytest.raises(RequestError, match=wanted):
            datums_of(message)

    refused(lambda d: d.model_input.add().image.SetInParent(), "an image")
    refused(lambda d: d.model_input.add().dmel.SetInParent(), "audio")
    refused(lambda d: d.loss_fn_inputs["weights"].sparse_csr.SetInParent(), "sparse")
    refused(lambda d: d.loss_fn_inputs["target_tokens"].shape.append(2), "2 dimensions")
    refused(lambda d: setattr(d.loss_fn_inputs["weights"], "dtype", 4), "bfloat16")
    refused(lambda d: setattr(d.loss_fn_inputs["weights"], "dense", b"123"), "3 bytes")
    refused(lambda d: setattr(d.model_input[0].encoded_text, "tokens", b"123"), "3 bytes of tokens")


def test_losses_and_knobs() -> None:
    assert loss_config(request("m", 1, [], "ppo", {"clip_low_threshold": 0.9})) == {"clip_low_threshold": 0.9}
    with pytest.raises(RequestError, match="not published"):
        loss_config(request("m", 1, [], "stable_reinforce"))
    text = ForwardBackwardRequest(loss_fn="ppo")
    text.loss_fn_config_v2["x"].text = "y"
    with pytest.raises(RequestError, match="is a text"):
        loss_config(text)


def test_output_goes_back_and_says_how_metrics_combine() -> None:
    rows = [(-1.0, -2.0), (-3.0,)]
    metrics = {"loss/policy": 7.0, "a/ratio_max": 2.0, "a/ratio_min": 1.0, "a/mean": 3.0}
    logprobs, found = read_output(encode_output(rows, wire_metrics(metrics, loss=7.0)))
    assert [row.tolist() for row in logprobs] == [list(row) for row in rows]
    assert found == {"loss:sum": 7.0, "a/ratio_max:max": 2.0, "a/ratio_min:min": 1.0, "a/mean:mean": 3.0}
    assert np.isclose(found["loss:sum"], 7.0)
