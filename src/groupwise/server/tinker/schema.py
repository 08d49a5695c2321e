"""The JSON bodies of the Tinker API (tinker 0.38), as far as they are read; docs/tinker.md says what is not.

Fields that we do not know are left alone: newer packages send more. Fields that ask for something that is not supported
are here, so that they are refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from groupwise.errors import ConfigError, RequestError

Number = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]
SeqId = Annotated[int, Field(ge=1, le=(1 << 31) - 1)]
Id = Annotated[str, Field(min_length=1, max_length=256)]
Seconds = Annotated[int, Field(ge=1, le=10 * 366 * 86400)]
Metadata = dict[str, Any] | None
MOST_METADATA = 1 << 14  # characters, as text
MOST_TARGET_IDS = 1 << 22  # of one prompt


class Body(BaseModel):
    """What every body has in common."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), frozen=True)


class CreateSession(Body):
    """A client's life. All that belongs to it goes when it has been silent for long."""

    user_metadata: Metadata = None
    display_name: str | None = None


class Heartbeat(Body):
    """The client still lives."""

    session_id: Id


class Lora(Body):
    """The adapter to train. `train_unembed` is taken and not done: the LM head takes no adapter here."""

    rank: int = Field(ge=1, le=1024)
    seed: Number | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(Body):
    """The family of optimizers."""

    type: str = "adamw"


class CreateModel(Body):
    """A fresh adapter over the base model."""

    session_id: Id
    model_seq_id: Annotated[int, Field(ge=0, le=999_999_999)]
    base_model: Id
    user_metadata: Metadata = None
    lora_config: Lora | None = None
    optimizer_config: Optimizer = Optimizer()


class OfModel(Body):
    """A model, and nothing else."""

    model_id: Id


class Sequenced(Body):
    """One request of a model, in its place."""

    model_id: Id
    seq_id: SeqId


def place_of(raw: bytes) -> Sequenced | None:
    """Whose request this is and its number, if that much can be read of a body that is wrong otherwise."""
    try:
        return Sequenced.model_validate_json(raw)
    except ValidationError:
        return None


class Adam(Body):
    """AdamW (arXiv 1711.05101); `grad_clip_norm` 0 does not clip."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(Sequenced):
    """Apply what has been accumulated."""

    adam_params: Adam | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeights(Sequenced):
    """Save what training goes on from."""

    path: str | None = None
    ttl_seconds: Seconds | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveForSampler(Sequenced):
    """The weights as they are now, to sample from: under a name, or for a sampling session only."""

    path: str | None = None
    sampling_session_seq_id: Number | None = None
    kind: str = "snapshot"
    ttl_seconds: Seconds | None = None
    user_metadata: dict[str, str] | None = None


class SaveExternal(Sequenced):
    """Write the adapter as files to take away."""

    path: str
    ttl_seconds: Seconds | None = None
    age_encryption_recipients: Annotated[tuple[str, ...], Field(max_length=10)] | None = None
    user_metadata: dict[str, str] | None = None


class LoadWeights(Body):
    """A new model from a checkpoint (session and model_seq_id), or a checkpoint into a model (model_id and seq_id)."""

    path: str
    optimizer: bool
    model_id: Id | None = None
    seq_id: SeqId | None = None
    session_id: Id | None = None
    model_seq_id: Annotated[int, Field(ge=0, le=999_999_999)] | None = None
    base_model: str | None = None
    user_metadata: Metadata = None
    optimizer_config: Optimizer | None = None


class CreateSampler(Body):
    """Sample from the base model, or from a checkpoint."""

    session_id: Id
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None


class Chunk(Body):
    """A piece of a prompt."""

    type: str = "encoded_text"
    tokens: tuple[Annotated[int, Field(ge=0, le=(1 << 31) - 1)], ...] = ()


class ModelInput(Body):
    """Token ids, in pieces."""

    chunks: tuple[Chunk, ...]


class Params(Body):
    """How to sample. `stop`: texts, token ids, none at all (the model's own end is one then too), or () for never."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    stop: str | tuple[int, ...] | tuple[str, ...] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_k: int = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class TargetIds(Body):
    """Token ids to score at places of a prompt: row i of [tokens - 1, K] is about token i + 1. An id of -1 asks for
    nothing, and so does what a sparse tensor (CSR) does not list."""

    data: Annotated[tuple[Annotated[int, Field(ge=-1, le=(1 << 31) - 1)], ...], Field(max_length=MOST_TARGET_IDS)]
    dtype: Literal["int64"]
    shape: tuple[Number, Number]
    sparse_crow_indices: tuple[Number, ...] | None = None
    sparse_col_indices: tuple[Number, ...] | None = None


class SampleBody(Body):
    """Completions of one prompt."""

    num_samples: Annotated[int, Field(ge=1)] = 1
    prompt: ModelInput
    sampling_params: Params = Params()
    sampling_session_id: Id | None = None
    seq_id: Number | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0)] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    target_prompt_logprobs: TargetIds | None = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool | None = None


class Retrieve(Body):
    """The answer to a request."""

    request_id: Id


class TinkerPath(Body):
    """A checkpoint."""

    tinker_path: str


class Ttl(Body):
    """How much longer a checkpoint is kept, in seconds; none is for ever."""

    ttl_seconds: Seconds | None = None


def check_metadata(metadata: Metadata) -> dict[str, str] | None:
    """What a client wrote on its run or checkpoint, as short texts. Raises RequestError."""
    if metadata is None:
        return None
    texts = {str(key): str(value) for key, value in metadata.items()}
    if sum(len(key) + len(value) for key, value in texts.items()) > MOST_METADATA:
        raise RequestError(f"user_metadata has more than {MOST_METADATA} characters", field="user_metadata")
    return texts


# ----------------------------------------------------------------------------------------------------------------------
# The protobuf messages of the Tinker API (tinker 0.38), as classes made from a table; no generated code.
#
#     ForwardBackwardRequest     what POST /api/v1/forward_backward brings
#     ForwardBackwardOutput      log-probabilities of every datum, and metrics
#     SampleResponse             completions, and log-probabilities of the prompt
#
# A line of the table is `number name type`; `*` is repeated, `{type}` a map from strings. Numbers and types are those
# of the wire. Arrays are little-endian bytes: tokens int32, log-probabilities float32, offsets and indices int64.
# ----------------------------------------------------------------------------------------------------------------------

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
    "Chunk": "1 encoded_text EncodedTextChunk, 2 image Other, 3 dmel Other",
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
