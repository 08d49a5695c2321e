"""The configuration of `groupwise serve`: the model, the address, the state directory, every limit with its default.

    serve_config    a mapping (command line or YAML) and the environment -> ServeConfig

Secrets come from the environment (GROUPWISE_API_KEY, GROUPWISE_WEBHOOK_SECRET) or the command line, and are never
shown or dumped. A limit that a request breaks is named in the error with its value.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, field_validator, model_validator

from groupwise.config.chat import ChatConfig
from groupwise.config.engine import Engine, VllmConfig
from groupwise.config.images import ImagesConfig
from groupwise.config.learn import GateConfig, LearnConfig, RatersConfig
from groupwise.config.section import Folder, Section, Text, Texts, conflict
from groupwise.config.structured import StructuredOutputsConfig
from groupwise.config.yaml import Document, key_paths, validate
from groupwise.errors import ConfigError

MIB, GIB = 1 << 20, 1 << 30
MOST_MESSAGES = 1 << 16  # of one conversation, whatever is configured
SECRETS = {"api_key": "GROUPWISE_API_KEY", "webhook_secret": "GROUPWISE_WEBHOOK_SECRET"}

# What other servers call our keys; only for "did you mean".
OTHER_NAMES = {
    "model_path": "model",
    "served_model_id": "served_model_name",
    "adapter_dir": "state_dir",
    "allowed_media_domains": "images.allowed_hosts",
    "request_timeout_secs": "request_timeout_s",
    "shutdown_timeout_secs": "shutdown_timeout_s",
    "training_webhook_url": "webhook_url",
    "max_num_seqs": "batch_rows",
    "max_loras": "max_loaded_adapters",
    "max_tokens": "max_tokens_default",
    **{key: f"`{key}` in each request" for key in ("temperature", "top_p", "top_k")},
}


def _secret(value: Any) -> Any:
    """Return a secret that is wrong must not be shown in the error either."""
    if value is None or (isinstance(value, str) and re.fullmatch(r"[!-~]{1,4096}", value)):
        return value
    raise ValueError("a secret is a string of 1 to 4096 printable ASCII characters without spaces (not shown here)")


Secret = Annotated[str | None, BeforeValidator(_secret)]
Bytes = Annotated[int, Field(ge=1, le=1 << 40)]
Seconds = Annotated[float, Field(gt=0, le=86400)]


class ServeConfig(Section):
    """Holds the configuration of a server. Instances are immutable; `serve_config` makes them."""

    model: Text = "starter"
    """`starter` or `starter-vl`, which sees (both are in the package), a Hugging Face name, or a directory."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto` is float32 on a CPU and bfloat16 on a GPU."""
    quantization: Literal["nf4", "int8"] | None = None
    """The base model's weights in 4 bits (`nf4`, QLoRA) or 8 (`int8`), quantised by bitsandbytes while loading;
    adapters and everything else stay in `dtype`. Needs `pip install 'groupwise[quantized]'`. null: in `dtype`."""
    cast_lm_head: Literal["auto", "float32", "none"] = "auto"
    """`float32` keeps the logits of a 16-bit model in float32, in training and in the local engine: its own type rounds
    them, by up to 0.06 nats. `auto` does so on a CUDA GPU, where it takes no longer; `none` does not."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:[0-9]+)?)$")] = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    host: Text = "127.0.0.1"
    """The address to listen on. One that is not loopback needs an API key."""
    port: int = Field(default=8420, ge=0, le=65535)
    """The port; 0 takes a free one."""
    state_dir: Folder = Path("groupwise-state")
    """The directory of jobs, checkpoints and adapters; one server at a time may use it."""
    served_model_name: Annotated[str, Field(pattern=r"^[\w./:-]{1,128}$")] | None = None
    """The base model's name in the API; null is the last part of `model`, in lower case."""
    api_key: Secret = Field(default=None, exclude=True, repr=False)
    """The key that every route but /health asks for; null asks for none. From GROUPWISE_API_KEY."""
    allowed_hosts: Texts = ()
    """Names besides localhost that a request's Host may have. Checked when listening on loopback, or when given."""
    cors_origins: Texts = ()
    """Web pages of these origins may call the API; none by default."""
    webhook_url: Text | None = None
    """Told when a job completes, fails or is cancelled."""
    webhook_secret: Secret = Field(default=None, exclude=True, repr=False)
    """Signs what is posted to `webhook_url`. From GROUPWISE_WEBHOOK_SECRET."""

    request_timeout_s: Seconds = 600.0
    """Longest that one request may take."""
    first_token_timeout_s: Seconds = 120.0
    """Longest wait for the first token, and for a place when `max_concurrent` requests are being answered."""
    shutdown_timeout_s: Seconds = 30.0
    """The seconds after SIGTERM in which requests in flight may end and the worker may save."""
    header_timeout_s: Seconds = 10.0
    """A connection on which no whole request head arrives for this long is closed."""
    body_timeout_s: Seconds = 30.0
    """The seconds in which a body must arrive, in addition to one for each MiB."""

    chat_body_bytes: Bytes = 8 * MIB
    """Largest body of any route but those for training and uploads."""
    train_body_bytes: Bytes = 64 * MIB
    """Largest body of /v1/train/grpo and /v1/train/sft."""
    upload_bytes: Bytes = 2 * GIB
    """Largest adapter upload."""
    bodies_bytes: Bytes = 512 * MIB
    """Bytes of the bodies over 64 KiB that are being received or answered; further ones wait, then are told to try
    again."""
    reading_bytes: Bytes = 2 * GIB
    """Most memory that the process may take that parses and tokenises one long body; 256 MiB and 24 times the body's
    bytes where that is less and the model reads text only."""
    max_messages: int = Field(default=2048, ge=1, le=MOST_MESSAGES)
    """Messages in one conversation."""
    max_tools: int = Field(default=128, ge=1)
    """Tools of one request."""
    max_n: int = Field(default=128, ge=1)
    """Completions of one prompt."""
    max_top_logprobs: int = Field(default=20, ge=0)
    """The most alternatives that are reported with each token."""
    max_stop: int = Field(default=16, ge=1)
    """Stop strings of one request."""
    max_batch_completions: int = Field(default=1024, ge=1)
    """Prompts times n of one batch request."""
    max_tokens_default: int = Field(default=2048, ge=1)
    """Longest completion where the request does not say; less where the context is full before."""
    max_concurrent: int = Field(default=256, ge=1)
    """Requests that are answered at once."""
    max_waiting: int = Field(default=1024, ge=0)
    """Requests that wait for a place; further ones are told to try again."""
    max_connections: int = Field(default=4096, ge=1)
    """Open connections; beyond it the oldest one without a whole request head is closed."""
    max_queued_jobs: int = Field(default=32, ge=1)
    """Training jobs that wait."""
    max_loaded_adapters: int = Field(default=8, ge=1)
    """Adapter versions in memory at once, besides the active one; while all are in use requests for another one wait
    their turn, up to half of `max_concurrent`."""
    keep_versions: int | None = Field(default=10, ge=1)
    """The number of versions made by jobs that are kept of each adapter; older ones are removed once they are not
    needed. null: all."""
    rollout_bytes: int = Field(default=4 * GIB, ge=MIB, le=1 << 50)
    """The bytes of sampled rollouts that are kept, so that jobs can name them, for 7 days and at most a million; the
    oldest go first."""
    keep_answers: bool = True
    """Keep what chats and other requests were answered among the rollouts, so that feedback can name them by the
    answer's id; false keeps only what /v1/completions/batch sampled."""
    images: ImagesConfig = ImagesConfig()
    """The addresses from which images of requests may be fetched."""
    learn: LearnConfig | None = None
    """Train by itself on feedback (docs/learn.md); null: only on what is posted."""
    gate: GateConfig | None = None
    """The tests that versions made by jobs must pass to become active (docs/learn.md); null: only their own checks."""
    raters: RatersConfig | None = None
    """Known prompts by which raters are judged (docs/learn.md); null: every rater counts."""
    folder: Folder = Path(".")
    """The folder in which the modules and files that `learn` and `gate` name are looked up; with --config, the
    file's."""
    min_free_bytes: int = Field(default=GIB, ge=0)
    """Free disk space below which the server says that it is not ready and takes no jobs."""
    worker_threads: int | None = Field(default=None, ge=1)
    """Threads of the training worker; null is torch's own choice."""
    system: Text | None = None
    """The system message of chats that have none. `groupwise serve RUN` takes it from the run's `data.system`."""
    chat: ChatConfig = ChatConfig()
    """How conversations become tokens; a request's `chat_template_kwargs` override this. `groupwise serve RUN` takes it
    from the run's `chat`."""
    structured_outputs: StructuredOutputsConfig | None = None
    """The required form of replies to chats that do not ask for their own (`response_format: {"type": "text"}` does).
    `groupwise serve RUN` takes it from the run's `rollout`."""
    trainer_routes: bool = False
    """Answer the routes by which TRL's and Axolotl's trainers use a vLLM server (docs/vllm.md). Who may call them may
    name directories of this machine."""
    tinker: bool = False
    """Speak the Tinker API under /api/v1: clients train adapters in this process, call by call (docs/tinker.md)."""
    tinker_models: int = Field(default=16, ge=1)
    """Adapters that Tinker clients train at once; each has its optimizer in memory."""
    tinker_snapshots: int = Field(default=8, ge=1)
    """Snapshots without a name that are kept of each Tinker model: those last sampled from, and what is in flight."""
    tinker_pending: int = Field(default=4096, ge=1)
    """Requests of Tinker clients whose answers are not there yet; further ones are told to try again."""
    tinker_body_bytes: Bytes = 64 * MIB
    """Largest body of /api/v1/forward_backward and /api/v1/forward."""
    tinker_mask_bytes: Bytes = 256 * MIB
    """Memory for what the tokens of completions could be that Tinker clients sampled with top_p or top_k, with which
    these are trained when they come back; the oldest go first."""
    tinker_gap_s: Seconds = 120.0
    """The seconds for which a request waits for one with an earlier number."""
    tinker_idle_s: Seconds = 600.0
    """A Tinker session that is not heard of for this long ends, and its models with it."""
    tinker_other_models: dict[Annotated[str, Field(pattern=r"^[\w./:-]{1,128}$")], Text] = Field(default_factory=dict)
    """Further base models that Tinker clients can sample from, such as teachers, opponents and graders, and do not
    train: the name by which they ask for one -> the model, as `model`. Each has its weights in memory, but the served
    model under another name, which costs nothing."""
    tinker_stable_reinforce: Literal["importance_sampling", "ppo", "cispo", "dro"] | None = None
    """The loss that is trained where a Tinker client asks for `stable_reinforce`, whose formula is not published: not
    the same loss, and the log says so. null refuses it."""
    engine: Engine = "local"
    """The engine that samples: `local`, in this process over the model's own weights, or `vllm` (docs/vllm.md)."""
    vllm: VllmConfig = VllmConfig()
    """How vLLM is reached or run; vllm.mode is `server`."""
    batch_rows: int = Field(default=256, ge=1, le=65536)
    """Completions decoded at once."""
    paced_rows: int | None = Field(default=None, ge=1, le=65536)
    """The number of rows that batches, jobs and gates may use while interactive requests run, and for five seconds
    after: a step with more rows takes longer. null: 16 on a CPU, no bound on a GPU, where the difference is small."""
    cache_gb: float | None = Field(default=None, gt=0)
    """GiB that keys and values may take; requests wait where those in flight could need more before they end. null: on
    a GPU half of the memory that is free once the model is there, on a CPU what `batch_rows` completions need."""
    prefix_cache_mb: int = Field(default=1024, ge=0)
    """MiB of keys and values kept of conversations, so that their next turn computes only what is new; 0 keeps none."""
    draft_tokens: int = Field(default=0, ge=0, le=32)
    """Most tokens guessed from earlier text and checked in one step while few completions are decoded (prompt-lookup
    decoding): the same answers, sooner where they repeat their prompts; 0 guesses none."""

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if not re.fullmatch(r"https?://[^/\s*]+", origin):
                raise ValueError(f"{origin[:80]!r} is not an origin; write it as in 'https://app.example.com'")
        return origins

    @model_validator(mode="after")
    def _is_guarded(self) -> ServeConfig:
        if not is_loopback(self.host) and self.api_key is None:
            raise ValueError(
                f"host {self.host!r} can be reached from other machines, so an API key is needed: "
                f"set {SECRETS['api_key']}, or listen on 127.0.0.1"
            )
        return self

    @model_validator(mode="after")
    def _check_engine(self) -> ServeConfig:
        """Refuse a knob of the engine that does not sample."""
        if self.engine == "local" and self.vllm != VllmConfig():
            raise conflict("vllm", "does nothing with engine local; set engine to vllm, or leave it out")
        if self.engine == "vllm":
            if self.quantization is not None:
                message = f"{self.quantization} is the local engine's: vLLM would sample from other weights than train"
                raise conflict("quantization", f"{message}; leave one of the two out")
            if self.vllm.mode != "server":
                raise conflict("vllm", "mode", "is colocate; a live server's vLLM is in processes of its own: server")
            if self.vllm.sleep:
                message = "is of runs, whose learners take turns with vLLM; a live server samples at any time"
                raise conflict("vllm", "sleep", f"{message}: leave it out, and give vLLM GPUs of its own (vllm.gpus)")
            for key, only in (("push", "adapter"), ("quantization", None)):
                if (value := getattr(self.vllm, key)) != only:
                    message = f"{value} is of runs; a live server's versions are adapters over weights as they are"
                    raise conflict("vllm", key, f"{message}; leave it out")
            for key in ("cache_gb", "draft_tokens", "prefix_cache_mb"):
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise conflict(key, "is the local engine's, and engine is vllm; leave it out")
        return self

    @model_validator(mode="after")
    def _check_learning(self) -> ServeConfig:
        if self.learn is not None and self.learn.adapter == self.served_name:
            message = f"{self.learn.adapter!r} is what requests call the served model; choose another name"
            raise conflict("learn", "adapter", message)
        if self.learn is not None and self.learn.proven is not None:
            if self.learn.max_share is None:
                raise conflict("learn", "proven", "says who is a rater to learn.max_share, which is left out; set both")
            if self.raters is None:
                raise conflict("learn", "proven", "counts known prompts, and raters, which has them, is left out")
        if self.gate is not None and self.gate.canary is not None and not self.keep_answers:
            raise conflict("keep_answers", "is false, and gate.canary looks at feedback on answers; leave one out")
        return self

    @property
    def served_name(self) -> str:
        """Return the base model's name in the API."""
        return self.served_model_name or re.sub(r"[^\w.:-]", "-", Path(self.model).name.lower()) or "model"

    def public(self) -> dict[str, Any]:
        """Return every setting that may be shown, as JSON. Of a webhook, whose path is often a secret, only the host
        is."""
        shown = self.model_dump(mode="json")
        if self.webhook_url is not None:
            shown["webhook_url"] = f"{urlsplit(self.webhook_url).hostname}/..."
        return shown


def is_loopback(host: str) -> bool:
    """Return whether an address (or "localhost") is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def serve_config(data: Mapping[str, Any] | Document, *, environ: Mapping[str, str] = os.environ) -> ServeConfig:
    """Check `data` and take the secrets that it does not have from `environ`; an empty variable counts as not set.

    Raises ConfigError with every problem: key, value, what is valid. A public address without an API key is one.
    """
    document = data if isinstance(data, Document) else None
    if document is None:
        if not isinstance(data, Mapping):
            raise ConfigError(f"the server's configuration is a {type(data).__name__}; it must be a mapping")
        document = Document(dict(data), "the server's configuration")
    given = {key: environ[name] for key, name in SECRETS.items() if environ.get(name)}
    given |= {key: value for key, value in document.data.items() if key not in SECRETS or value is not None}
    return validate(replace(document, data=given), ServeConfig, other_names=OTHER_NAMES, elsewhere=_of_a_run)


def _of_a_run(name: str, value: str) -> str:
    """Return what a key of a run's configuration is to a server, or "" where no run has it either."""
    from groupwise.config.other_names import OTHER_NAMES as OF_RUNS
    from groupwise.config.run import RunConfig

    named = {path[-1]: ".".join(path) for path in reversed(list(key_paths(RunConfig)))}
    key = OF_RUNS.get(name, name)
    key = key if key in named.values() else named.get(key)
    return (
        f"{key} is a run's (groupwise run FILE {key}{value}); what a server trains is said with each job" if key else ""
    )
