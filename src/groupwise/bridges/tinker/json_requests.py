"""JSON requests and responses for `tinker` packages before 0.25, which do not send protobuf.

    ForwardBackwardBody, ForwardBody    their bodies of /forward_backward and /forward
    message_of                          ... as the ForwardBackwardRequest that the others send
    output_as_json, samples_as_json     answers, for who does not accept protobuf

Numbers that are none (the log-probability of a position that a loss leaves out) are written as NaN, which Python's JSON
reads.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from groupwise.bridges.tinker.chunks import ImageBytes, chunks_of_body
from groupwise.bridges.tinker.proto import (
    FLOAT32,
    INT64,
    LENGTH,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    SampleResponse,
)
from groupwise.bridges.tinker.schema import Body, ModelInput, Sequenced
from groupwise.errors import RequestError

NO_TOP = -99999.0  # at or below it nothing was there


class TensorBody(Body):
    """Numbers of one dtype, flat."""

    data: tuple[float, ...]
    dtype: Literal["float32", "int64"]
    shape: tuple[Annotated[int, Field(ge=0)], ...] | None = None


class DatumBody(Body):
    """A sequence and the values of its targets."""

    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorBody]


class InputBody(Body):
    """A batch and its loss."""

    data: tuple[DatumBody, ...]
    loss_fn: str
    loss_fn_config: dict[str, float] | None = None


class ForwardBackwardBody(Sequenced):
    """The body of a request to accumulate a gradient."""

    forward_backward_input: InputBody


class ForwardBody(Sequenced):
    """The body of a request for log-probabilities only."""

    forward_input: InputBody


def message_of(body: ForwardBackwardBody | ForwardBody) -> Any:
    """Return the same request as protobuf. Raises RequestError: an int64 tensor has a fraction, or a chunk is none."""
    forward_only = isinstance(body, ForwardBody)
    given = body.forward_input if isinstance(body, ForwardBody) else body.forward_backward_input
    message = ForwardBackwardRequest(
        model_id=body.model_id, seq_id=body.seq_id, loss_fn=given.loss_fn, forward_only=forward_only
    )
    for name, value in (given.loss_fn_config or {}).items():
        message.loss_fn_config[name] = value
    for i, datum in enumerate(given.data):
        one = message.data.add()
        for piece in chunks_of_body(datum.model_input.chunks, f"data[{i}]"):
            chunk = one.model_input.add()
            if not isinstance(piece, ImageBytes):
                chunk.encoded_text.tokens = np.asarray(piece, "<i4").tobytes()
                continue
            chunk.image.data = piece.data
            if piece.expected_tokens is not None:
                chunk.image.expected_tokens = piece.expected_tokens
        for name, values in datum.loss_fn_inputs.items():
            _fill(one.loss_fn_inputs[name], values, where=f"data[{i}].{name}")
    return message


def _fill(tensor: Any, values: TensorBody, *, where: str) -> None:
    array = np.asarray(values.data)
    whole = values.dtype == "int64"
    if whole and (array % 1).any():
        raise RequestError(f"{where} is of type int64 and has a fraction", hint="say float32, or give whole numbers")
    tensor.dense, tensor.dtype = array.astype("<i8" if whole else "<f4").tobytes(), INT64 if whole else FLOAT32
    tensor.shape.extend((len(array),) if values.shape is None else values.shape)


# ---- answers ----
def output_as_json(raw: bytes) -> dict[str, Any]:
    """Return a ForwardBackwardOutput."""
    message, outputs = ForwardBackwardOutput.FromString(raw), []
    for record in message.loss_fn_outputs:
        field = record.fields["logprobs"]
        for start, end in pairwise(np.frombuffer(field.offsets, "<i8").tolist()):
            array = np.frombuffer(field.data[start:end], "<f4").reshape(-1, *field.trailing_shape)
            tensor = {"data": array.ravel().tolist(), "dtype": "float32", "shape": list(array.shape)}
            outputs.append({"logprobs": tensor})
    return {
        "loss_fn_output_type": message.loss_fn_output_type,
        "loss_fn_outputs": outputs,
        "metrics": dict(message.metrics),
    }


def samples_as_json(raw: bytes) -> dict[str, Any]:
    """Return a SampleResponse."""
    message = SampleResponse.FromString(raw)
    found: dict[str, Any] = {
        "type": "sample",
        "sequences": [
            {
                "stop_reason": "length" if each.stop_reason == LENGTH else "stop",
                "tokens": np.frombuffer(each.tokens, "<i4").tolist(),
                "logprobs": np.frombuffer(each.logprobs, "<f4").tolist(),
            }
            for each in message.sequences
        ],
    }
    if message.HasField("prompt_logprobs"):
        logprobs = np.frombuffer(message.prompt_logprobs, "<f4").tolist()
        found["prompt_logprobs"] = [None if value != value else value for value in logprobs]
    if message.HasField("topk_prompt_logprobs"):
        found["topk_prompt_logprobs"] = _top_as_json(message.topk_prompt_logprobs)
    if message.HasField("target_prompt_logprobs"):
        found["target_prompt_logprobs"] = _tensor_as_json(message.target_prompt_logprobs)
    return found


def _tensor_as_json(message: Any) -> dict[str, Any]:
    """Return a float32 tensor, dense or sparse."""
    csr = message.sparse_csr if message.HasField("sparse_csr") else None
    values = np.frombuffer(message.dense if csr is None else csr.values, "<f4").tolist()
    found = {"data": values, "dtype": "float32", "shape": list(message.shape)}
    if csr is not None:
        found["sparse_crow_indices"] = np.frombuffer(csr.crow_indices, "<i8").tolist()
        found["sparse_col_indices"] = np.frombuffer(csr.col_indices, "<i8").tolist()
    return found


def _top_as_json(message: Any) -> list[list[tuple[int, float]] | None]:
    ids = np.frombuffer(message.token_ids, "<i4").reshape(-1, message.k).tolist()
    logprobs = np.frombuffer(message.logprobs, "<f4").reshape(-1, message.k).tolist()
    rows = [zip(*each, strict=True) for each in zip(ids, logprobs, strict=True)]
    return [[(id, value) for id, value in row if value > NO_TOP] or None for row in rows]
