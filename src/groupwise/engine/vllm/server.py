"""Starts and stops a vLLM server: its command line, waiting for it, and killing its whole process tree.

    owner -> keeper (sandbox_keeper.py, no box) -> API server -> EngineCore -> workers

vLLM's own engine processes outlive an API server that is killed. So a keeper stands between: it is the parent of every
orphan below it (PR_SET_CHILD_SUBREAPER) and ends them all when the API server ends, when it is told to, or when the
owner is gone, however that died. If the keeper itself is killed, the kernel kills the API server (PR_SET_PDEATHSIG) and
the owner kills the rest, which are all in one session. Only processes of this tree are ever touched, never by name.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from groupwise import platform
from groupwise.config.engine import OWN_SHARE, VllmConfig
from groupwise.config.serve import is_loopback
from groupwise.engine.vllm.installed import interpreter
from groupwise.errors import ConfigError
from groupwise.rewards.sandbox import Box, SandboxError, trusted

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM's kernels have
FOR_EVER_S = 1e8
QUICK_S, QUICK_ENDS = 60.0, 3  # so soon, so often: such a server is not started again
CPU_BATCHED_TOKENS = 4096
LAST_BYTES = 2000  # of the log, in messages
GLOO = "groupwise_gloo"  # a module that vLLM imports, and where it is
PLUGIN = Path(__file__).parent.parent / "vllm_plugin"
TRANSFER_FLAGS = ("--weight-transfer-config", "--worker-extension-cls")  # of `vllm.arguments`, that come before ours
NOT_PASSED_ON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")  # of this environment, which need not be vLLM's


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The facts about a run that vLLM is started with: its model, `targets` and `rank` of its adapters, `rows`
    completions at once."""

    model: str
    dtype: str
    context_length: int
    rank: int
    targets: tuple[str, ...]
    rows: int
    cpu: bool = False
    float32_head: bool = False  # logits are the trainer's, whose LM head keeps float32
    sees: bool = False  # it is given images, too
    reloads: bool = False  # versions are whole models: the server reads them again and again, and serves no adapters


@dataclass(frozen=True, kw_only=True)
class ServerLaunch:
    """The command line and environment that start a server. `log` is a file, None for this process's stderr."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    url: str
    log: Path | None = None


def engine_options(config: VllmConfig, shape: Shape) -> dict[str, Any]:
    """Return the options of vLLM's engine, as `vllm.LLM` takes them. Raises ConfigError: the rank is too large."""
    context = min(config.max_model_len or shape.context_length, shape.context_length)
    options = {
        "model": shape.model,
        "served_model_name": "base",
        "generation_config": "vllm",  # no sampling options of the model's own
        "dtype": shape.dtype if config.dtype == "auto" else config.dtype,
        "max_model_len": context,
        "max_num_seqs": shape.rows,
        "logprobs_mode": "processed_logprobs",
        "gpu_memory_utilization": config.gpu_memory_utilization or OWN_SHARE,
        "tensor_parallel_size": config.tensor_parallel_size,
        "enable_prefix_caching": config.enable_prefix_caching,
        "enforce_eager": config.enforce_eager or (shape.reloads and shape.cpu),  # compiled for a minute, for nothing
        "structured_outputs_config": {"backend": "guidance"},  # what reads `vllm.grammar`; an engine has one for all
    }
    if not shape.reloads:
        options |= {
            "enable_lora": True,
            "max_loras": config.max_loras,
            "max_lora_rank": rank_of(shape.rank),
            "max_cpu_loras": 2 * config.max_loras,  # a swap evicts nothing that is in flight
            "lora_target_modules": list(shape.targets),
        }
    if config.sleep:
        options["enable_sleep_mode"] = True
    if shape.float32_head and options["dtype"] != "float32":  # a generating model's head is in 16 bits otherwise
        options["hf_overrides"] = {"head_dtype": "float32"}
    if config.quantization is not None:
        options["quantization"] = config.quantization
    if shape.cpu:  # there a seeded request whose prompt is cut into chunks ends the engine (0.32: no offset to go back)
        options |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(context, CPU_BATCHED_TOKENS)}
    return options


def transfer_backend(config: VllmConfig, shape: Shape, *, beside_rank_0: bool) -> str | None:
    """Return the way by which a server is to take whole models (`vllm.links`), as `config` and its place have it; None:
    it reads files."""
    own = any(each.partition("=")[0] in TRANSFER_FLAGS for each in config.arguments)
    if not shape.reloads or config.transfer == "file" or config.mode == "colocate" or own:
        return None
    if shape.cpu:
        return GLOO
    if not beside_rank_0:
        return "nccl"
    alone = config.tensor_parallel_size == 1 and is_loopback(config.host)  # it unpickles what it is told
    return "ipc" if alone else None


def launch_of(
    config: VllmConfig, shape: Shape, *, port: int | None = None, beside_rank_0: bool = False
) -> ServerLaunch:
    """Return the server that `config` describes; `beside_rank_0`: on the GPU where rank 0 trains. Raises ConfigError:
    as `engine_options`, or there is no such interpreter."""
    port = port or config.port or free_port(config.host)
    argv = [interpreter(config), "-m", "vllm.entrypoints.openai.api_server", "--host", config.host, "--port", str(port)]
    for name, value in engine_options(config, shape).items():
        argv += _flag(name.replace("_", "-"), value)
    argv += ["--enable-scale-out"] if shape.sees else []  # the route of token ids and images
    environment = {name: value for name, value in os.environ.items() if name not in NOT_PASSED_ON}
    environment |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
    environment |= {"VLLM_SERVER_DEV_MODE": "1"} if shape.reloads or config.sleep else {}
    backend = transfer_backend(config, shape, beside_rank_0=beside_rank_0)
    if backend is not None:
        argv += _flag("weight-transfer-config", {"backend": backend})
    if backend == GLOO:
        argv += _flag("worker-extension-cls", f"{GLOO}.Extension")
        environment |= {"PYTHONPATH": str(PLUGIN)}
    environment |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if backend == "ipc" else {}
    environment |= {} if config.gpus is None else {"CUDA_VISIBLE_DEVICES": config.gpus}
    return ServerLaunch(
        argv=(*argv, *config.arguments),
        environment=environment | config.environment,
        url=f"http://{config.host}:{port}",
        log=None if config.log is None else Path(config.log).absolute(),
    )


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, dict):
        return [f"--{name}", json.dumps(value)]
    return [f"--{name}", *map(str, value if isinstance(value, list) else [value])]


def rank_of(rank: int) -> int:
    """Return the smallest rank of vLLM's that holds `rank`. Raises ConfigError."""
    fitting = [each for each in RANKS if each >= rank]
    if not fitting:
        raise ConfigError(f"train.lora.rank is {rank}; vLLM serves at most {RANKS[-1]}")
    return fitting[0]


def free_port(host: str) -> int:
    """Return a port on which no process listens at the moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


class RunningServer(Protocol):
    """A server that was started, here or on another machine."""

    @property
    def url(self) -> str | None:
        """Return where it listens; None: its machine has not said so yet."""
        ...

    @property
    def ended(self) -> str | None:
        """Return why it is over; None while it runs."""
        ...

    def stop(self) -> None:
        """End it with all its descendants, and return when it has."""
        ...


StartServer = Callable[[], RunningServer]
"""Starts a server in its place without waiting for it; called again when it has ended."""


class ServerProcess:
    """Starts a vLLM server on this machine at once, and watches the process: a `RunningServer`."""

    def __init__(self, launch: ServerLaunch):
        self.launch = launch
        self._ended = threading.Event()
        self._why = ""
        self._log_from = 0
        if launch.log is not None:
            launch.log.parent.mkdir(parents=True, exist_ok=True)
            self._log_from = launch.log.stat().st_size if launch.log.exists() else 0
        self._box = Box(_specification(launch))
        threading.Thread(target=self._wait, name="groupwise-vllm-server", daemon=True).start()

    @property
    def url(self) -> str:
        """Return where it listens."""
        return self.launch.url

    @property
    def ended(self) -> str | None:
        """Return how it ended, with what it said last; None while it runs."""
        return self._why if self._ended.is_set() else None

    @property
    def pid(self) -> int:
        """Return the keeper's process id."""
        return self._box.pid

    def wait(self, timeout: float | None = None) -> bool:
        """Return whether it has ended, by then."""
        return self._ended.wait(timeout)

    def stop(self) -> None:
        """End everything and return when it has."""
        self._box.end()
        self._ended.wait()
        self._box.close()

    def _wait(self) -> None:
        session = _session_below(self._box.pid)
        try:
            end = self._box.wait(timeout=FOR_EVER_S)
            how = end.get("setup") or (f"signal {end['signal']}" if end.get("signal") else f"status {end.get('exit')}")
        except SandboxError as error:  # the keeper itself was killed
            how = error.message
            if session is not None:
                platform.kill_session(session)
        self._why = f"vLLM ended with {how}{self._last_words()}"
        self._ended.set()

    def _last_words(self) -> str:
        log = self.launch.log
        if log is None or not log.exists():
            return ""
        with log.open("rb") as file:
            file.seek(max(self._log_from, log.stat().st_size - LAST_BYTES))
            return f"; the end of {log}:\n{file.read().decode('utf-8', 'replace').rstrip()}"


def keep_up(launch: ServerLaunch, *, say: Callable[[str], None]) -> None:
    """Run a server until this process is told to end (Ctrl-C, SIGTERM), and start it again when it ends by itself.

    Raises ConfigError when it ends soon after its start every time.
    """

    def ended(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before, quick = signal.signal(signal.SIGTERM, ended), 0
    server = ServerProcess(launch)
    try:
        while True:
            started = time.monotonic()
            while not server.wait(1.0):  # in pieces: a signal is heard between two
                pass
            quick = quick + 1 if time.monotonic() - started < QUICK_S else 1
            if quick == QUICK_ENDS:
                raise ConfigError(f"vLLM ended {quick} times within {QUICK_S:g} s of its start: {server.ended}")
            say(f"{server.ended}; starting it again")
            server.stop()
            server = ServerProcess(launch)
    finally:
        signal.signal(signal.SIGTERM, before)
        server.stop()


def _specification(launch: ServerLaunch) -> dict[str, Any]:
    """Return what the keeper is told: a trusted program without limits, whose output goes to the log."""
    log = platform.stderr_path() if launch.log is None else str(launch.log.absolute())
    argv = ["/bin/sh", "-c", 'log=$0; exec "$@" >>"$log" 2>&1', log, *launch.argv]
    return trusted(argv, env=launch.environment, limits={}, output_bytes=LAST_BYTES)


def _session_below(keeper: int) -> int | None:
    """Return the session that the keeper's program leads, once it is there."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if (session := platform.session_below(keeper)) is not None:
            return session
        time.sleep(0.01)
    return None
