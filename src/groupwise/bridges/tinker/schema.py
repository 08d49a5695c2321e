"""The JSON bodies of the Tinker API (tinker 0.38), as far as they are read; docs/tinker.md says what is not.

Fields that we do not know are left alone: newer packages send more. Fields that ask for something that is not supported
are here, so that they are refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from groupwise.errors import RequestError

Number = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]

SeqId = Annotated[int, Field(ge=1, le=(1 << 31) - 1)]

Id = Annotated[str, Field(min_length=1, max_length=256)]

Seconds = Annotated[int, Field(ge=1, le=10 * 366 * 86400)]

Metadata = dict[str, Any] | None

MOST_METADATA = 1 << 14  # characters, as text

HELD_BY_BYTE, HELD_BY_TOKEN = 4, 32  # bytes in memory of a byte of a request, and of a token in JSON, until it has run

TEXT = "encoded_text"  # type of chunks

MOST_TARGET_IDS = 1 << 22  # of one prompt


class Body(BaseModel):
    """Base of every body: fields that it does not know are ignored."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), frozen=True)


class CreateSession(Body):
    """Begins a client's session. Everything that belongs to the session is removed when the client has been silent for
    long."""

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
    """A request to a model, with its number in the model's sequence."""

    model_id: Id
    seq_id: SeqId


def place_of(raw: bytes) -> Sequenced | None:
    """Return model and number of a request whose body is wrong otherwise; None where they cannot be read either."""
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
    """Save what training continues from."""

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
    """A piece of a prompt: tokens of a text, an image's bytes in base64, or the address of one."""

    type: str = TEXT
    tokens: tuple[Annotated[int, Field(ge=0, le=(1 << 31) - 1)], ...] = ()
    data: str | None = None
    location: str | None = None
    expected_tokens: Number | None = None
    override_dimensions: Any = None


class ModelInput(Body):
    """Token ids and images, in pieces."""

    chunks: tuple[Chunk, ...]

    @property
    def held(self) -> int:
        """Return about how many bytes it takes in memory until it has run."""
        tokens = sum(len(chunk.tokens) for chunk in self.chunks)
        return HELD_BY_TOKEN * tokens + HELD_BY_BYTE * sum(len(chunk.data or "") for chunk in self.chunks)


class Params(Body):
    """Sampling parameters. `stop`: texts, token ids, none at all (the model's own end is one then too), or () for
    never."""

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
    """The tinker:// path of a checkpoint."""

    tinker_path: str


class Ttl(Body):
    """Seconds for which a checkpoint is still kept; none is for ever."""

    ttl_seconds: Seconds | None = None


def check_metadata(metadata: Metadata) -> dict[str, str] | None:
    """Return a client's metadata of its run or checkpoint, as short texts. Raises RequestError."""
    if metadata is None:
        return None
    texts = {str(key): str(value) for key, value in metadata.items()}
    if sum(len(key) + len(value) for key, value in texts.items()) > MOST_METADATA:
        raise RequestError(f"user_metadata has more than {MOST_METADATA} characters", field="user_metadata")
    return texts
