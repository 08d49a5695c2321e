"""Datums of the Tinker wire -> datums of the SDK, and log-probabilities back.

    tokens      model_input's chunks of text, one after the other; the last target closes the sequence
    targets     target_tokens; where they are padding (zeros before the completion), what follows, with weight 0
    values      weights of cross_entropy; logprobs and advantages of the other losses; sequence_ratio_mask of gspo

Losses are those of `sdk.losses`, sums over all positions. What is not supported is refused with what to do instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from groupwise.errors import RequestError
from groupwise.sdk.datums import TARGETS, Datum
from groupwise.sdk.losses import BUILT_IN, CROSS_ENTROPY
from groupwise.server.envelope import echo
from groupwise.server.tinker_proto import BFLOAT16, FLOAT32, INT32, INT64, ForwardBackwardOutput

SEQUENCE_MASK = "sequence_ratio_mask"
ANCHORED = ("dro", "gspo")  # these read the log-probabilities of every position, so that padding is left out
COUNTED = ("mismatch/dropped_tokens",)
MOST_TOKENS = 1 << 22  # of one sequence, before anybody looks at the model's context

_TYPES = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8"), INT32: np.dtype("<i4")}


def loss_config(message: Any) -> dict[str, float]:
    """The loss's knobs. Raises RequestError: a loss or a knob that there is not."""
    name = message.loss_fn
    if name not in BUILT_IN:
        hint = f"use one of {', '.join(BUILT_IN)}, or forward_backward_custom with a function of yours"
        if name == "stable_reinforce":
            hint = "its formula is not published: use importance_sampling or cispo; " + hint
        raise RequestError(f"there is no loss {echo(name)}", hint=hint, param="loss_fn")
    config: dict[str, float] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        if value.HasField("text"):
            raise RequestError(f"{echo(key)} of {name} is a text; its knobs are numbers", param="loss_fn_config")
        config[key] = value.number
    return config


def datums_of(message: Any) -> list[Datum]:
    """The datums of a ForwardBackwardRequest, as its loss reads them.

    Raises:
        RequestError: images, sparse or two-dimensional tensors, a value that this loss does not have.
        DataError: as `Datum`.
    """
    return [_datum(each, message.loss_fn, where=f"data[{i}]") for i, each in enumerate(message.data)]


def weights_of_wire(message: Any) -> list[tuple[float, ...]]:
    """The weights of every datum, for a forward that reports its loss; none are zeros."""
    found = []
    for i, each in enumerate(message.data):
        values = _array(each.loss_fn_inputs["weights"], f"data[{i}]") if "weights" in each.loss_fn_inputs else []
        found.append(tuple(values))
    return found


def _datum(message: Any, loss: str, *, where: str) -> Datum:
    tokens = _tokens(message.model_input, where)
    inputs = {name: _array(tensor, f"{where}.{name}") for name, tensor in message.loss_fn_inputs.items()}
    wanted = _wanted(loss)
    if unknown := sorted(set(inputs) - set(wanted)):
        raise RequestError(
            f"{where} has {echo(unknown[0])}, which {loss} does not read here; it reads {', '.join(wanted)}",
            hint="leave it out; thresholds go into loss_fn_config, per-token ones into forward_backward_custom",
        )
    if TARGETS in inputs and any(isinstance(target, float) for target in inputs[TARGETS]):
        raise RequestError(f"{where}.{TARGETS} is of a float type", hint="targets are int64")
    if loss == CROSS_ENTROPY:
        inputs.setdefault("weights", [0.0] * len(tokens))
    if loss == "gspo":
        inputs["mask"] = _ratio_mask(inputs, where)
    elif loss not in ANCHORED:
        _replace_padding(tokens, inputs, "weights" if loss == CROSS_ENTROPY else "advantages")
    return Datum(model_input=tokens, loss_fn_inputs=inputs)


def _wanted(loss: str) -> tuple[str, ...]:
    if loss == CROSS_ENTROPY:
        return (TARGETS, "weights")
    return (TARGETS, "logprobs", "advantages", *((SEQUENCE_MASK,) if loss == "gspo" else ()))


def _ratio_mask(inputs: dict[str, list[Any]], where: str) -> list[float]:
    """gspo's mask. An advantage outside it would be trained by a ratio that it is not a part of."""
    if SEQUENCE_MASK not in inputs:
        raise RequestError(f"{where} has no {SEQUENCE_MASK}, which gspo reads", hint="1 where the policy spoke")
    mask = [float(value != 0) for value in inputs.pop(SEQUENCE_MASK)]
    outside = zip(inputs.get("advantages", ()), mask, strict=False)
    if any(advantage and not inside for advantage, inside in outside):
        raise RequestError(f"{where} has an advantage outside its {SEQUENCE_MASK}", hint="set it to 0 there")
    return mask


def _replace_padding(tokens: Sequence[int], inputs: dict[str, list[Any]], weights: str) -> None:
    """Targets that are padding -> what follows: weight 0 there, and so the same loss, and a log-probability of what
    was said. A target that is neither is left to `Datum` to refuse."""
    targets, weight = inputs.get(TARGETS, []), inputs.get(weights, [])
    if len(targets) == len(weight) == len(tokens):
        for j in range(len(tokens) - 1):
            if weight[j] == 0:
                targets[j] = tokens[j + 1]


def _tokens(chunks: Sequence[Any], where: str) -> list[int]:
    """The ids of chunks of text."""
    tokens: list[int] = []
    for chunk in chunks:
        if not chunk.HasField("encoded_text"):
            kind = "an image" if chunk.HasField("image") else "audio" if chunk.HasField("dmel") else "an empty chunk"
            raise RequestError(f"{where} has {kind}; this model reads text only", hint="send encoded_text chunks")
        raw = chunk.encoded_text.tokens
        if len(raw) % 4:
            raise RequestError(f"{where} has {len(raw)} bytes of tokens; they are int32, four bytes each")
        tokens += np.frombuffer(raw, "<i4").tolist()
    if len(tokens) > MOST_TOKENS:
        raise RequestError(f"{where} has {len(tokens)} tokens; the most is {MOST_TOKENS}")
    return tokens


def _array(tensor: Any, where: str) -> list[Any]:
    """A dense tensor of one dimension."""
    if tensor.HasField("sparse_csr") or len(tensor.shape) > 1:
        raise RequestError(
            f"{where} is {'sparse' if tensor.HasField('sparse_csr') else f'of {len(tensor.shape)} dimensions'}; "
            "here each position has one target and one value",
            hint="give dense tensors of one dimension; several targets a position are not supported",
        )
    kind, raw = _TYPES.get(tensor.dtype), tensor.dense
    if kind is None:
        name = "bfloat16" if tensor.dtype == BFLOAT16 else str(tensor.dtype)
        raise RequestError(f"{where} is of type {name}; float32 and int64 are read", hint="convert it")
    if len(raw) % kind.itemsize or (tensor.shape and tensor.shape[0] * kind.itemsize != len(raw)):
        shape = list(tensor.shape)
        raise RequestError(f"{where} has {len(raw)} bytes for shape {shape} of {kind.itemsize} bytes each")
    return np.frombuffer(raw, kind).tolist()


# ---- and back ----
def encode_output(logprobs: Sequence[Sequence[float]], metrics: Mapping[str, float]) -> bytes:
    """Log-probabilities [N - 1] of every datum, and metrics as `name:reduction`, as a ForwardBackwardOutput."""
    message = ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(logprobs))
    lengths = np.array([0, *(len(row) for row in logprobs)], "<i8")
    field = record.fields["logprobs"]
    field.data = b"".join(np.asarray(row, "<f4").tobytes() for row in logprobs)
    field.offsets, field.dtype = (4 * lengths.cumsum()).astype("<i8").tobytes(), FLOAT32
    for name, value in metrics.items():
        message.metrics[name] = float(value)
    return message.SerializeToString()


def wire_metrics(metrics: Mapping[str, float], *, loss: float) -> dict[str, float]:
    """Our metrics under names that say how chunks combine; `loss:sum` is the loss itself."""
    named = {f"{name}:{_reduction(name)}": value for name, value in metrics.items() if name != "loss/policy"}
    return {"loss:sum": loss, **named}


def _reduction(name: str) -> str:
    if name.endswith(("_max", "/max")):
        return "max"
    if name.endswith(("_min", "/min")):
        return "min"
    return "sum" if name in COUNTED else "mean"
