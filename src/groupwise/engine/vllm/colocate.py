"""vLLM inside the trainer's process, with a share of its device's memory; same interface as a server.

One thread owns vLLM's engine: it takes what is asked between two of the engine's steps. With `vllm.sleep` it gives the
weights' and the cache's memory back while nothing is asked (vLLM's sleep level 1): before training begins (`rest`), and
else after a second. It wakes up when something is asked, once what the trainer's allocator keeps unused went back.

vLLM must be importable here: `pip install vllm` in the trainer's environment.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch

from groupwise.config.engine import VllmConfig
from groupwise.engine.vllm.answers import Sampled, likeliest
from groupwise.engine.vllm.client import ServerFacts, TakesWeights, VllmServer, kind_of
from groupwise.engine.vllm.images import Images
from groupwise.engine.vllm.server import Shape, engine_options
from groupwise.errors import EngineError, ModelError

IDLE_S = 1.0  # without a request, after which it sleeps
CLOSE_S = 30.0
OPTIONS = (  # of a completion that mean the same in vLLM's SamplingParams
    *("n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "seed", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "logprobs"),
)


class InProcess(VllmServer):
    """A `VllmServer` without HTTP. Raises ModelError where vLLM cannot be imported."""

    def __init__(self, config: VllmConfig, shape: Shape):
        self.url = "vLLM in this process"
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read when vLLM is imported
        try:
            self._vllm: Any = import_module("vllm")
            import_module("vllm.lora.request")
        except ImportError as error:
            raise ModelError(
                f"vllm.mode is colocate, and vLLM cannot be imported here: {error}",
                hint="install it in this environment, or use vllm.mode: server with vllm.python",
            ) from error
        self._options, self._sleeps = engine_options(config, shape) | {"seed": 0}, config.sleep
        self._asleep, self._shown = False, set[str]()
        self.weights, self.updating = None, False
        self._adapters: dict[str, Any] = {}
        self._numbers = itertools.count(1)
        self._asked: queue.Queue[tuple[Callable[[], Any], Future[Any]] | None] = queue.Queue()
        self._waiting: dict[str, Future[Any]] = {}  # by request
        self._failed: Exception | None = None
        self._llm: Any = None
        self._thread = threading.Thread(target=self._work, name="groupwise-vllm-engine", daemon=True)
        self._thread.start()

    # -- what a server answers -----------------------------------------------------------------------------------------

    async def close(self) -> None:
        self._asked.put(None)
        await asyncio.to_thread(self._thread.join, CLOSE_S)

    async def health(self) -> None:
        if self._failed is not None:
            raise EngineError(f"{self.url} failed: {self._failed!r}") from self._failed

    async def adapters(self) -> set[str]:
        return set(self._adapters)

    async def facts(self) -> ServerFacts:
        context = await self._do(lambda: self._llm.llm_engine.model_config.max_model_len)
        return ServerFacts(version=self._vllm.__version__, name="base", context_length=context)

    async def tokenize(self, model: str, asked: str | Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        def encoded() -> tuple[int, ...]:
            tokenizer = self._llm.get_tokenizer()
            if isinstance(asked, str):
                return tuple(tokenizer.encode(asked))
            text = tokenizer.apply_chat_template(list(asked), add_generation_prompt=True, tokenize=False)
            return tuple(tokenizer.encode(text, add_special_tokens=False))

        return await self._do(encoded)

    async def complete(self, model: str, body: Mapping[str, Any]) -> list[Sampled]:
        number = str(next(self._numbers))
        answered: Future[Any] = Future()
        images: Images | None = body.get("images")

        def begin() -> None:
            params = self._vllm.SamplingParams(
                **{name: body[name] for name in OPTIONS},
                **self._structured(body["structured_outputs"]),
                detokenize=bool(body["stop"]),
                output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
            )
            prompt: dict[str, Any] = {"prompt_token_ids": list(body["prompt"])}
            if images is not None:
                prompt["multi_modal_data"] = {"image": [each.pixels() for each in images.pictures]}
                prompt["multi_modal_uuids"] = {"image": [each.digest for each in images.pictures]}
            adapter = None if model == "base" else self._adapters[model]
            self._llm.llm_engine.add_request(number, prompt, params, lora_request=adapter)
            self._waiting[number] = answered  # what is refused has no answer to wait for

        def give_up() -> None:
            if self._waiting.pop(number, None) is not None:
                self._llm.llm_engine.abort_request([number])

        try:
            await self._do(begin)
            output = await asyncio.wrap_future(answered)
        except asyncio.CancelledError:
            await self._do(give_up)
            raise
        if images is not None:
            images.check(body["prompt"], output.prompt_token_ids, self.url)
            self._shown |= images.names
        return [_sampled(each, top=body["logprobs"]) for each in sorted(output.outputs, key=lambda each: each.index)]

    def _structured(self, asked: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return `structured_outputs` in the form of vLLM's SamplingParams."""
        if asked is None:
            return {}
        return {"structured_outputs": self._vllm.sampling_params.StructuredOutputsParams(**asked)}

    async def load(self, name: str, path: str, *, timeout: float) -> None:
        def add() -> None:
            adapter = self._vllm.lora.request.LoRARequest(name, next(self._numbers), path)
            self._llm.llm_engine.add_lora(adapter)
            self._adapters[name] = adapter

        if name not in self._adapters:
            await self._do(add)

    async def unload(self, name: str) -> None:
        adapter = self._adapters.pop(name, None)
        if adapter is not None:
            await self._do(lambda: self._llm.llm_engine.remove_lora(adapter.lora_int_id))

    async def reload(self, path: str, *, timeout: float) -> None:
        def read() -> None:
            self._llm.apply_model(_forget_cpu_kernels)
            self._llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
            self._llm.reset_prefix_cache()
            if self._shown:
                self._llm.llm_engine.reset_encoder_cache()

        await self._do(read)
        self.weights = path

    async def taking(self) -> TakesWeights:
        return TakesWeights(backend=None, dtype=None)

    async def holds(self, label: str) -> bool:
        return self.weights == label

    async def rest(self) -> None:
        """Sleep, if it may and nothing is asked, and return when the memory is given back."""
        if self._sleeps:
            await self._do(self._sleep)

    async def remembers(self, base: str) -> bool:
        return True  # it lives and dies with this process

    # -- the thread ----------------------------------------------------------------------------------------------------

    async def _do(self, function: Callable[[], Any]) -> Any:
        """Run it in the engine's thread. Raises EngineError."""
        await self.health()
        future: Future[Any] = Future()
        self._asked.put((function, future))
        try:
            return await asyncio.wrap_future(future)
        except Exception as error:  # vLLM's own, of many kinds
            raise error if isinstance(error, EngineError) else _refused(self.url, error) from error

    def _work(self) -> None:
        try:
            self._llm = self._vllm.LLM(**self._options)
            self._serve()
        except Exception as error:  # the boundary of the thread: the callers that wait must get the error
            self._failed = error
        ended = EngineError(f"{self.url} has ended: {self._failed!r}")
        ended.__cause__ = self._failed
        for future in self._waiting.values():
            with suppress(InvalidStateError):  # given up
                future.set_exception(ended)
        while self._failed is not None and (asked := self._asked.get()) is not None:
            if asked[1].set_running_or_notify_cancel():
                asked[1].set_exception(ended)

    def _serve(self) -> None:
        engine = self._llm.llm_engine
        while True:
            busy = bool(self._waiting)
            with suppress(queue.Empty):
                asked = self._asked.get(timeout=None if self._asleep or not self._sleeps else IDLE_S, block=not busy)
                if asked is None:
                    return
                if self._asleep and asked[0] != self._sleep:
                    self._wake()
                _answer(*asked)
                continue
            if not busy:
                self._sleep()
                continue
            for output in engine.step():
                if output.finished and (future := self._waiting.pop(output.request_id, None)) is not None:
                    with suppress(InvalidStateError):  # given up
                        future.set_result(output)

    def _sleep(self) -> None:
        if not self._asleep and not self._waiting:
            self._llm.sleep(level=1)
            self._asleep = True

    def _wake(self) -> None:
        if torch.cuda.is_available():  # gpu-only: memory that torch keeps for the trainer is none that vLLM could take
            torch.cuda.empty_cache()
        self._llm.wake_up()
        self._asleep = False


def _forget_cpu_kernels(model: Any) -> None:
    """Remove the experts' kernels on CPUs, so that vLLM makes them again after a reload of the weights. vLLM 0.32 packs
    the weights for a kernel only when it makes the kernel."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None and next(module.parameters()).device.type == "cpu":
            method.moe_kernel = None


def _answer(function: Callable[[], Any], future: Future[Any]) -> None:
    """Do what is asked, unless the caller has given it up by now."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except Exception as error:  # the caller's, through its future
        future.set_exception(error)


def _refused(url: str, error: Exception) -> EngineError:
    return EngineError(f"{url}: {error!r}", kind=kind_of(str(error)))


def _sampled(output: Any, *, top: int) -> Sampled:
    ids = tuple(output.token_ids)
    logprobs = tuple(at[token].logprob for token, at in zip(ids, output.logprobs, strict=True))
    tops = tuple(likeliest(((id, each.logprob) for id, each in at.items()), top) for at in output.logprobs)
    return Sampled(token_ids=ids, logprobs=logprobs, finish_reason=output.finish_reason, tops=tops if top else ())
