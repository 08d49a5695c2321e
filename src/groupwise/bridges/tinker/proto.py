"""The protobuf messages of the Tinker API (tinker 0.38), as classes made from a table; no generated code.

    ForwardBackwardRequest     what POST /api/v1/forward_backward brings
    ForwardBackwardOutput      log-probabilities of every datum, and metrics
    SampleResponse             completions, and log-probabilities of the prompt

A line of the table is `number name type`; `*` is repeated, `{type}` a map from strings. Numbers and types are those
of the wire. Arrays are little-endian bytes: tokens int32, log-probabilities float32, offsets and indices int64.
"""

from __future__ import annotations

from typing import Any

from groupwise.errors import ConfigError

try:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    from google.protobuf.message import DecodeError as DecodeError
except ImportError as error:
    raise ConfigError(
        f"tinker is on, and protobuf, which its wire needs, is not installed ({error})",
        hint="pip install 'groupwise[tinker]'",
    ) from error

FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4  # DType

STOP, LENGTH = 0, 1  # stop_reason

_PACKAGE = "groupwise.tinker"

_MESSAGES = {
    "ForwardBackwardRequest": (
        "1 model_id string, 2 seq_id int32, 3 data *Datum, 4 loss_fn string, 5 loss_fn_config {double}, "
        "6 forward_only bool, 7 loss_fn_config_v2 {LossConfigValue}"
    ),
    "LossConfigValue": "1 number double, 2 text string",
    "Datum": "1 model_input *Chunk, 2 loss_fn_inputs {Tensor}, 4 loss_fn_input_spans *ProvenanceSpan",
    "ProvenanceSpan": "1 prompt_tokens Span, 2 sampled_tokens Span",
    "Span": "1 sequence_id string, 2 offset int64, 3 length int64",
    "Chunk": "1 encoded_text EncodedTextChunk, 2 image ImageChunk, 3 dmel Other",
    "ImageChunk": "1 data bytes, 2 format string, 3 expected_tokens int32, 4 override_dimensions Other",
    "EncodedTextChunk": "1 tokens bytes",
    "Other": "",
    "Tensor": "1 dense bytes, 2 sparse_csr SparseCsr, 3 dtype int32, 4 shape *int64",
    "SparseCsr": "1 values bytes, 2 crow_indices bytes, 3 col_indices bytes",
    "ForwardBackwardOutput": "1 loss_fn_output_type string, 2 loss_fn_outputs *ArrayRecord, 3 metrics {double}",
    "ArrayRecord": "1 type_tag string, 2 fields {BatchedTensor}, 3 num_datums int64",
    "BatchedTensor": "1 data bytes, 2 offsets bytes, 3 dtype int32, 4 trailing_shape *int64",
    "SampleResponse": (
        "1 sequences *SampledSequence, 2 prompt_logprobs bytes, 3 topk_prompt_logprobs TopkLogprobs, "
        "4 prompt_cache_hit_tokens int32, 5 target_prompt_logprobs Tensor"
    ),
    "SampledSequence": "1 stop_reason int32, 2 tokens bytes, 3 logprobs bytes, 4 topk_sampled_logprobs TopkLogprobs",
    "TopkLogprobs": "1 token_ids bytes, 2 logprobs bytes, 3 k int32, 4 length int32",
}

_Field = descriptor_pb2.FieldDescriptorProto

_SCALARS = {
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
    "bool": _Field.TYPE_BOOL,
    "double": _Field.TYPE_DOUBLE,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
}


def _add_field(message: Any, number: int, name: str, kind: str, *, within: str) -> None:
    repeated = kind.startswith(("*", "{"))
    if kind.startswith("{"):  # a map is a repeated message of keys and values
        entry = message.nested_type.add(name="".join(map(str.title, name.split("_"))) + "Entry")
        entry.options.map_entry = True
        _add_field(entry, 1, "key", "string", within=within)
        _add_field(entry, 2, "value", kind.strip("{}"), within=within)
        kind = f"{within}.{entry.name}"
    kind = kind.lstrip("*")
    label = _Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL
    field = message.field.add(name=name, number=number, label=label)
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"


def _make() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="groupwise/tinker.proto", package=_PACKAGE, syntax="proto2")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for line in filter(None, fields.split(", ")):
            number, field, kind = line.split()
            _add_field(message, int(number), field, kind, within=name)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)  # pyright: ignore[reportAttributeAccessIssue]
    classes = message_factory.GetMessageClassesForFiles([file.name], pool)
    return {name.removeprefix(f"{_PACKAGE}."): made for name, made in classes.items()}


_CLASSES = _make()

ForwardBackwardRequest: Any = _CLASSES["ForwardBackwardRequest"]

ForwardBackwardOutput: Any = _CLASSES["ForwardBackwardOutput"]

SampleResponse: Any = _CLASSES["SampleResponse"]
