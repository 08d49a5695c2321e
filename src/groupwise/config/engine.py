"""The configuration's `engine` and `vllm` sections: which engine samples, and how vLLM is reached or started."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from groupwise.config.section import Place, Section, Text, Texts, conflict

Engine = Literal["local", "vllm"]

OWN_SHARE = 0.9  # of a GPU's memory, where vLLM has it to itself

OF_SERVERS = ("urls", "servers", "python", "host", "port", "gpus", "arguments", "environment", "log", "transfer")
"""Keys of `vllm` that say how a server is reached or started."""

SERVED_BY = (
    *("urls", "servers", "python", "host", "port", "gpus", "log", "tensor_parallel_size", "adapter_dir", "transfer"),
)
"""Keys of `vllm` that may change between a run and its resumption: which servers sample, and where."""


class VllmConfig(Section):
    """vLLM as the engine. Launch options act where a server is started: by `groupwise vllm-serve`, or by the run itself
    where there are no `urls`."""

    mode: Literal["server", "colocate"] = "server"
    """`server`: vLLM in its own processes, asked over HTTP. `colocate`: in this process, on the trainer's device."""
    urls: Texts = ()
    """Servers to sample from, with or without /v1; none starts one, which ends with the run."""
    servers: int | None = Field(default=None, ge=1, le=4096)
    """The number of servers to start, each on `tensor_parallel_size` GPUs of one machine; null is as many as fit on the
    GPUs that no learner uses, or one if there are none."""
    python: Text | None = None
    """The interpreter of vLLM's environment, as in .venv-vllm/bin/python; null is the one that runs this."""
    host: Text = "127.0.0.1"
    """The address on which a started server listens. It has no keys: keep it on this machine, or in a network of your
    own."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """... and its port, of several servers that of the first, and so on; null is a free one, or 8000 for `groupwise
    vllm-serve`."""
    gpus: Text | None = None
    """The GPUs that servers get, on each machine, as CUDA_VISIBLE_DEVICES names them: "2,3". null is, where a run
    starts servers, those that no learner uses, else the learner's own; elsewhere all that this process sees."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """The share of the GPU's memory that vLLM takes. null is 0.9, but on the learner's own GPU what training leaves in
    its worst batch (`groupwise check FILE --gpus 1x80` says how much)."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs that share one copy of the model."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Tokens of a prompt and its completion together; null is what the model's context holds."""
    max_loras: int = Field(default=4, ge=3)
    """Adapters that vLLM holds at once: the newest version, those of requests in flight, one that stands for the base.
    It must be true of servers in `urls` as well."""
    max_lora_rank: int | None = Field(default=None, ge=1)
    """Largest rank of an adapter; null is the run's own, 32 for `groupwise serve`. True of servers in `urls` too."""
    push: Literal["adapter", "merged"] = "adapter"
    """How vLLM gets a version: `adapter`, as LoRA that it applies itself; `merged`, a checkpoint of the base with the
    adapter merged into it, for models whose adapters vLLM cannot serve."""
    transfer: Literal["auto", "file"] = "auto"
    """How whole models get to servers: `auto`, from the learner's memory if the server was started for that, over NCCL,
    or in place if both are on one GPU; `file`, as checkpoints that the servers read."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto` is the trainer's."""
    quantization: Literal["fp8"] | None = None
    """`fp8`: vLLM rounds its linear layers to 8-bit floats while it loads them, and their inputs while it runs. null:
    neither. True of servers in `urls` as well."""
    enable_prefix_caching: bool = True
    """Compute the beginning that prompts have in common once."""
    enforce_eager: bool = False
    """Start without CUDA graphs and compilation: sooner, and slower then."""
    arguments: Texts = ()
    """Further arguments of vLLM's server, as in ["--max-num-batched-tokens", "8192"]."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of the server, as in {VLLM_CPU_KVCACHE_SPACE: "2"}."""
    log: Text | None = None
    """A file to which a server that is started adds what it says, of several with its number (`vllm-0.log`); null is
    this process's stderr."""
    sleep: bool = False
    """Take turns with the learners: give the memory back before training begins, and with `colocate` while nothing is
    sampled. Servers that sleep are on the learners' own GPUs. Where sampling runs ahead of training there may be no
    such time."""
    adapter_dir: Place | None = None
    """The directory through which vLLM reads versions; a server on another machine must see it under the same path.
    null is a temporary directory."""
    tolerance: float | None = Field(default=None, gt=0)
    """Nats by which vLLM's log-probabilities may be off in the mean when a server or a version is checked; null is 1e-4
    in float32, and in 16 bits 0.1 or, with a warning, up to 0.5 where they are off by as much all along."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds for a server to be ready."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds for which a server may read and sample no token while it is asked for some; then what it was asked for
    goes to another, or to the same one again. A request may take longer, in its queue too."""
    health_interval_s: float = Field(default=2.0, gt=0)
    """Seconds between looks whether a server is alive."""
    recovery_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds that requests wait for a server that died; then the run fails."""
    sync_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds for one attempt to hand a version to a server."""
    sync_retries: int = Field(default=2, ge=0)
    """Attempts after the first one that failed; then the run fails."""

    @model_validator(mode="after")
    def _acts(self) -> VllmConfig:
        if self.mode == "colocate":
            for key in OF_SERVERS:
                if getattr(self, key) != type(self).model_fields[key].get_default(call_default_factory=True):
                    raise conflict(key, "belongs to a server; with mode colocate vLLM is in this process")
        elif self.urls and self.servers is not None:
            raise conflict("servers", f"{self.servers} are not started where `urls` name those that there are")
        elif self.sleep and (self.urls or self.gpus is not None):
            raise conflict("sleep", "is of servers that a run starts on its learners' GPUs; leave urls and gpus out")
        return self

    @property
    def starts_servers(self) -> bool:
        """Return whether servers are started: vLLM is in its own processes, and none that run are named."""
        return self.mode == "server" and not self.urls

    def check_turns(self, *, meanwhile: bool) -> None:
        """Refuse, as a conflict of the whole configuration, servers that sleep where a run samples while it trains."""
        if self.sleep and self.mode == "server" and meanwhile:
            message = "servers that sleep while the learners on their GPUs train cannot sample meanwhile"
            hint = "set weight_sync_interval 1, max_staleness 0 and stream_groups 0, or sleep: false"
            raise conflict("vllm", "sleep", f"{message}; {hint}")

    def rounds(self, dtype: str) -> bool:
        """Return whether vLLM's weights are rounded ones of a trainer's in `dtype` (`auto`, `float32`, `bfloat16`)."""
        return (
            self.quantization is not None
            or self.dtype not in ("auto", "float32", dtype)
            or (self.push == "merged" and dtype != "float32")  # the sum of weights and adapter is rounded there
        )
