"""The ways to run vLLM that `vllm_rollouts.py` measures, each a tree of processes of its own that can be held still.

    single           `vllm.LLM` in one process, asked over a Unix socket (`vllm_side.py`), all threads bound
    workers          ... with its engine and worker processes
    server           the OpenAI server over HTTP, with threads as it binds them itself: it keeps a core free
    server-bound     ... with all threads bound
    merged           as `single`, of a model into whose weights the adapter was merged, eager
    merged-compiled  ... through torch.compile, which vLLM leaves out on a CPU where there are adapters

`generate` of each takes and returns what the local engine's does, so that the same lines of code ask both.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any, NoReturn

from peft import PeftModel
from subjects import save_adapter
from transformers import AutoModelForCausalLM

from groupwise.config.engine import VllmConfig
from groupwise.engine.vllm.answers import Sampled
from groupwise.engine.vllm.client import ServerLost, VllmServer, sampling_body
from groupwise.engine.vllm.open import shape_of
from groupwise.engine.vllm.server import ServerLaunch, ServerProcess, Shape, engine_options, launch_of
from groupwise.model.load import LoadedModel
from groupwise.types import Completion, FinishReason, SamplingRequest

SIDE = Path(__file__).with_name("vllm_side.py")
WITH_ADAPTER = ("single", "workers", "server", "server-bound")
MERGED = ("merged", "merged-compiled")
MODES = (*WITH_ADAPTER, *MERGED)
SERVERS = ("server", "server-bound")
IN_ONE_PROCESS = ("single", *MERGED)
RANK = 16
POLICY = "policy"  # the adapter's name
START_S, ANSWER_S = 600.0, 3600.0
OF_THREADS = ("OMP_", "KMP_", "GOMP_", "VLLM_CPU_")  # variables of this process that vLLM shall not inherit
OF_REQUESTS = ("prompt", "n", "max_tokens", "temperature", "seed", "ignore_eos", "logprobs")  # to `vllm.LLM`


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is served: a model with its rows and targets, and directories of an adapter and of both merged.

    `cache_bytes` are those of the keys and values of a token; a row has `context` tokens at most.
    """

    shape: Shape
    adapter: Path
    merged: Path
    cache_bytes: int
    context: int

    def cache_gib(self, block: int) -> int:
        """For all rows at once, in blocks of so many tokens: no row is ever put off."""
        return 1 + math.ceil(self.shape.rows * block * math.ceil(self.context / block) * self.cache_bytes / 2**30)


def subject_of(base: LoadedModel, folder: Path, *, rows: int, context: int) -> Subject:
    """Write the model, an adapter that moves it, and the model with the adapter in its weights."""
    model, adapter, merged = (folder / name for name in ("model", "adapter", "merged"))
    adapter.mkdir()
    base.model.save_pretrained(model)
    save_adapter(base, adapter)
    both: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model, dtype="float32"), adapter)
    both.merge_and_unload().save_pretrained(merged)
    for each in (model, merged):
        base.tokenizer.save_pretrained(each)
    config: Any = base.model.config
    return Subject(
        shape=shape_of(
            str(model), base.model, rank=RANK, targets="all-linear", rows=rows, device="cpu", cast_lm_head="auto"
        ),
        adapter=adapter,
        merged=merged,
        cache_bytes=2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim,
        context=context,
    )


@dataclass(frozen=True, kw_only=True)
class Vllm:
    """Its interpreter, its threads, the tokens of a block of its cache, and a folder for logs and sockets."""

    python: Path
    threads: int
    block: int
    folder: Path


class Tree:
    """A program and all processes below it, which end with it or with this process."""

    def __init__(self, mode: str, launch: ServerLaunch):
        self.mode, self._launch, self._process = mode, launch, ServerProcess(launch)

    def wait_until(self, up: Callable[[], bool]) -> None:
        """Exits with the program's last words if it ends instead, or takes too long."""
        deadline = time.monotonic() + START_S
        while not up():
            if self._process.ended or time.monotonic() > deadline:
                self.died()
            time.sleep(0.2)

    def hold(self) -> None:
        """Stop every process of it: none takes time of a core."""
        self._signal(signal.SIGSTOP)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """It goes on in here, and is held again after."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.hold()

    def died(self) -> NoReturn:
        self._process.wait(10)
        sys.exit(f"{self.mode}: {self._process.ended or f'vLLM does not answer; {self._launch.log} says more'}")

    def end(self) -> None:
        self._process.stop()

    def _signal(self, number: int) -> None:
        """All are in the program's group. One that has died is none of it."""
        keeper = self._process.pid
        with suppress(OSError):
            for program in Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split():
                os.killpg(int(program), number)


class Llm:
    """`vllm.LLM`."""

    def __init__(self, tree: Tree, socket: Path):
        self._tree = tree
        tree.wait_until(socket.exists)
        self._line = Client(str(socket), family="AF_UNIX")

    def generate(self, requests: Sequence[SamplingRequest]) -> list[list[Completion]]:
        """All at once. Exits if vLLM dies."""
        asked = [_body(request) for request in requests]
        try:
            with self._tree.awake():
                self._line.send([{name: body[name] for name in OF_REQUESTS} for body in asked])
                answers = self._line.recv()
        except (EOFError, OSError):
            self._tree.died()
        return [[_completion(*each) for each in answer] for answer in answers]

    def close(self) -> None:
        self._line.close()


class OpenAI:
    """vLLM's server."""

    def __init__(self, tree: Tree, url: str, adapter: Path):
        self._tree, self._server, self._loop = tree, VllmServer(url, request_timeout_s=ANSWER_S), asyncio.Runner()
        tree.wait_until(self._is_up)
        self._loop.run(self._server.load(POLICY, str(adapter), timeout=START_S))

    def generate(self, requests: Sequence[SamplingRequest]) -> list[list[Completion]]:
        """All at once. Exits if vLLM dies."""

        async def all_of_them() -> list[list[Sampled]]:
            return await asyncio.gather(*(self._server.complete(POLICY, _body(request)) for request in requests))

        try:
            with self._tree.awake():
                answers = self._loop.run(all_of_them())
        except ServerLost:
            self._tree.died()
        return [[_completion(each.token_ids, each.logprobs) for each in answer] for answer in answers]

    def close(self) -> None:
        self._loop.run(self._server.close())
        self._loop.close()

    def _is_up(self) -> bool:
        try:
            self._loop.run(self._server.health())
        except ServerLost:
            return False
        return True


@contextmanager
def started(mode: str, subject: Subject, vllm: Vllm) -> Iterator[Llm | OpenAI]:
    """vLLM in this mode, up and held. Exits if it does not start."""
    launch, socket = launch_in(mode, subject, vllm), vllm.folder / f"{mode}.socket"
    if mode not in SERVERS:
        options = {"llm": options_in(mode, subject, vllm), "adapter": None if mode in MERGED else str(subject.adapter)}
        launch = replace(launch, argv=(str(vllm.python), str(SIDE), str(socket), json.dumps(options)))
    tree = Tree(mode, launch)
    try:
        with closing(OpenAI(tree, launch.url, subject.adapter) if mode in SERVERS else Llm(tree, socket)) as peer:
            tree.hold()
            yield peer
    finally:
        tree.end()


def launch_in(mode: str, subject: Subject, vllm: Vllm) -> ServerLaunch:
    """The server of this mode; its environment is that of `vllm.LLM` too."""
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in _of_cache(vllm).items()]
    config = VllmConfig(python=str(vllm.python), arguments=tuple(arguments), log=str(vllm.folder / f"{mode}.log"))
    launch = launch_of(config, _shape(mode, subject))
    environment = {name: value for name, value in launch.environment.items() if not name.startswith(OF_THREADS)}
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(subject.cache_gib(vllm.block)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if mode in IN_ONE_PROCESS else "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",  # a server that is held for minutes keeps its connections
    }
    if mode != "server":
        bound = f"0-{vllm.threads - 1}"
        environment |= {"OMP_NUM_THREADS": str(vllm.threads), "VLLM_CPU_OMP_THREADS_BIND": bound}
    return replace(launch, environment=environment)


def options_in(mode: str, subject: Subject, vllm: Vllm) -> dict[str, Any]:
    """Of `vllm.LLM`."""
    options = engine_options(VllmConfig(enforce_eager=mode == "merged"), _shape(mode, subject)) | _of_cache(vllm)
    if mode in MERGED:
        options = {name: value for name, value in options.items() if "lora" not in name}
    return options | {"seed": 0}


def _of_cache(vllm: Vllm) -> dict[str, int]:
    """One adapter, and blocks small enough that the rows of a group share a part of their prompt."""
    return {"max_loras": 1, "max_cpu_loras": 1, "block_size": vllm.block}


def _shape(mode: str, subject: Subject) -> Shape:
    return replace(subject.shape, model=str(subject.merged)) if mode in MERGED else subject.shape


def _body(request: SamplingRequest) -> dict[str, Any]:
    """What is asked. Completion j draws from seed + j: no two prompts share a seed."""
    params = request.params
    seed = (params.seed or 0) * request.n
    return sampling_body(request.prompt_ids, params, n=request.n, max_tokens=params.max_tokens, seed=seed, eos_ids=())


def _completion(ids: Sequence[int], logprobs: Sequence[float]) -> Completion:
    return Completion(token_ids=tuple(ids), logprobs=tuple(logprobs), text="", finish_reason=FinishReason.LENGTH)
