"""The HTTP client of one vLLM server: the routes that a run needs, and how their failures are classified.

    POST /v1/completions            token ids in; token ids and log-probabilities of the sampled tokens out, at once
                                    or (`stream`) as server-sent events
    POST /inference/v1/generate     the same of a prompt with images (`vllm.images`)
    POST /v1/load_lora_adapter      {lora_name, lora_path}; a name that is there already is a success: see vllm.publish
    POST /v1/unload_lora_adapter    {lora_name}
    POST /collective_rpc            reload_weights {weights_path}: reloads all weights; only with VLLM_SERVER_DEV_MODE
    POST /reset_prefix_cache        ... then the cached prompts must go
    POST /reset_encoder_cache       ... and the cached features of images
    POST /update_weight_version     ... and the weights get a name, which GET /weight_info returns
    POST /init_weight_transfer_engine, /start_weight_update, /update_weights, /finish_weight_update
                                    weights that are sent (`vllm.transfer`), with VLLM_SERVER_DEV_MODE, as are
    GET  /server_info, /get_world_size     how a server takes them, and how many workers it has
    POST /tokenize                  a conversation through the server's tokenizer and chat template
    GET  /v1/models, /version, /health; /metrics, whose counts of tokens tell a server that is busy from one that hangs

A request may wait in vLLM's queue and sample for as long as the server makes progress: its counts grow, or it answers
any request. A server without progress for `vllm.request_timeout_s` counts as lost.

There are two kinds of failures, and only the first is worth another attempt at another server:

    ServerLost      the server is away, hangs, or dies: no answer, part of one, or a 5xx that is not about the request
    EngineError     the server refused the request

Every option that affects sampling is sent, so that no default of a server matters.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import httpx2

from groupwise.config.addresses import has_certificate, is_server_url
from groupwise.engine.vllm.answers import Sampled, read_answer
from groupwise.engine.vllm.images import GENERATE, Images, generate_body, read_generated
from groupwise.errors import ConfigError, EngineError
from groupwise.types import SamplingParams

HEALTH_S = 5.0  # for an answer to /health
ASK_S = 60.0  # for what samples nothing
COMPLETIONS = "/v1/completions"
SLEEP_S = 120.0  # to give a GPU's memory back, or take it
LOOK_S = 30.0  # between looks whether a server moves, or a quarter of the time that it may stand still
_TOKENS = re.compile(r"^vllm:(?:prompt|generation)_tokens_total(?:\{[^\n]*\})? (\S+)", re.MULTILINE)
SAID = 300  # characters of an answer that are quoted
_KINDS = {  # kind -> what vLLM says of it
    "already_loaded": "already been loaded",
    "not_loaded": "cannot be found",
    "grammar": "Grammar error",
    "image_missing": "Cache miss for image",
}

T = TypeVar("T")


class ServerLost(EngineError):
    """A server is away, hangs (`silent`) or dies; the same request may be answered by another, or by this one when it
    is back."""

    def __init__(self, message: str, *, silent: bool = False):
        super().__init__(message)
        self.silent = silent


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """Facts that a server reports about itself. `name` is the model name to which requests for the base model are
    addressed."""

    version: str
    name: str
    context_length: int


@dataclass(frozen=True, kw_only=True)
class TakesWeights:
    """The way in which a server takes weights that are sent to it: by the `backend` that it was started with (None: not
    at all), in the type, by torch's name, in which it keeps them (None: it rounds them in its own ways)."""

    backend: str | None
    dtype: str | None


def server_url(text: str) -> str:
    """Return the URL without the /v1 that many clients write: "http://gpu:8000" for "http://gpu:8000/v1/". Raises
    ConfigError."""
    url = text.strip().rstrip("/").removesuffix("/v1")
    if not is_server_url(url):
        raise ConfigError(f"vllm.urls: {text!r} is no address; write it as in http://localhost:8000")
    return url


def sampling_body(
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    n: int,
    max_tokens: int,
    seed: int,
    eos_ids: Sequence[int],
    structured_outputs: Mapping[str, Any] | None = None,
    apart: str = "",
) -> dict[str, Any]:
    """Return the options of /v1/completions. Completion j draws from `seed` + j; `structured_outputs` are
    `params.grammar` as vLLM takes it. vLLM's cache of prompts is apart for `SamplingRequest.apart`."""
    narrowed = params.temperature > 0
    return {
        **({"cache_salt": apart} if apart else {}),
        "prompt": list(prompt_ids),
        "n": n,
        "max_tokens": max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p if narrowed else 1.0,
        "top_k": params.top_k if narrowed else 0,
        "min_p": params.min_p if narrowed else 0.0,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "logit_bias": {str(token): bias for token, bias in params.logit_bias} or None,
        "min_tokens": params.min_tokens,
        "structured_outputs": structured_outputs,
        "seed": seed,
        "stop": list(params.stop),
        "stop_token_ids": [*([] if params.ignore_eos else eos_ids), *params.stop_ids],
        "ignore_eos": params.ignore_eos,
        "skip_special_tokens": False,
        "add_special_tokens": False,
        "logprobs": params.top_logprobs,
        "return_token_ids": True,
        "return_tokens_as_token_ids": params.top_logprobs > 0,  # so that alternatives have ids, not texts
    }


class VllmServer:
    """Sends requests to the vLLM server at a URL. A server that makes no progress on its completions for
    `request_timeout_s` is lost. Use an instance in one event loop."""

    def __init__(self, url: str, *, request_timeout_s: float):
        self.url, self._request_s = server_url(url), request_timeout_s
        self._moved = self._looked = -math.inf  # when it was last seen to move, and was looked at
        self._tokens: float | None = None  # read and sampled, when it was looked at
        self.weights: str | None = None  # what the weights are called that it was given
        self._reading, self.updating = asyncio.Lock(), False  # it reads weights, or is sent some
        self._shown = set[str]()  # names of images that it was sent
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx2.AsyncClient(
            limits=limits, trust_env=False, follow_redirects=False, verify=has_certificate(self.url)
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def health(self) -> None:
        """Raise ServerLost."""
        await self._ask("GET", "/health", timeout=HEALTH_S)

    async def adapters(self) -> set[str]:
        """Return the names of those that are loaded. Raises ServerLost, EngineError."""
        return {each["id"] for each in (await self._ask("GET", "/v1/models"))["data"] if each.get("parent")}

    async def facts(self) -> ServerFacts:
        """Raise ServerLost, EngineError."""
        listed = (await self._ask("GET", "/v1/models"))["data"]
        version = (await self._ask("GET", "/version"))["version"]
        bases = [each for each in listed if not each.get("parent")]
        if not bases or not isinstance(bases[0].get("max_model_len"), int):
            raise EngineError(f"{self.url} names no model with a context length; is it a vLLM server?")
        return ServerFacts(version=version, name=bases[0]["id"], context_length=bases[0]["max_model_len"])

    async def tokenize(self, model: str, asked: str | Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Return a text, or a conversation with the opening of the next turn, as the server would read it."""
        of = {"prompt": asked} if isinstance(asked, str) else {"messages": list(asked), "add_generation_prompt": True}
        return tuple((await self._ask("POST", "/tokenize", {"model": model, **of}))["tokens"])

    async def complete(self, model: str, body: Mapping[str, Any]) -> list[Sampled]:
        """Return the completions of `sampling_body`, in order. Raises ServerLost, EngineError."""

        async def send(path: str, asked: Mapping[str, Any]) -> bytes:
            return (await self._answered("POST", path, asked, timeout=None)).content

        said = await self._while_it_moves(self._showing(model, body, send))
        sampled = self._read(body, said)
        if len(sampled) != body["n"] or not all(each.is_whole for each in sampled):
            begins = said[:SAID].decode(errors="replace")
            raise EngineError(f"{self.url} answered {len(sampled)} of {body['n']} completions whole: {begins}")
        if any(each.finish_reason == "abort" for each in sampled):
            raise ServerLost(f"{self.url} aborted a request")
        return sampled

    async def stream(self, model: str, body: Mapping[str, Any], hear: Callable[[Sampled], None]) -> str:
        """`hear` of the tokens of one completion (`n` is 1) as they come. -> why it ended: "stop" or "length".

        Raises ServerLost, EngineError; what was heard by then was sampled.
        """

        async def send(path: str, asked: Mapping[str, Any]) -> str:
            return await self._stream(f"{self.url}{path}", {**asked, "stream": True}, body, hear)

        return await self._while_it_moves(self._showing(model, body, send))

    async def _showing(
        self, model: str, body: Mapping[str, Any], send: Callable[[str, Mapping[str, Any]], Awaitable[T]]
    ) -> T:
        """Send what is asked for: images that the server was sent by their names, and all of them once more where it
        has not kept one."""
        images: Images | None = body.get("images")
        if images is None:
            return await send(COMPLETIONS, {"model": model, **body})
        known = images.names & self._shown
        try:
            return await send(GENERATE, await asyncio.to_thread(generate_body, model, body, known))
        except EngineError as error:
            if error.kind != "image_missing" or not known:
                raise
        self._shown -= known
        return await send(GENERATE, await asyncio.to_thread(generate_body, model, body, ()))

    async def _stream(
        self, where: str, asked: Mapping[str, Any], body: Mapping[str, Any], hear: Callable[[Sampled], None]
    ) -> str:
        timeout = httpx2.Timeout(None, connect=self._request_s)
        async with (
            self._reaching(where, None),
            self._client.stream("POST", where, json=asked, timeout=timeout) as answer,
        ):
            if answer.status_code >= 300:
                await answer.aread()
                self._refused(answer.status_code, answer.text, where)
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                self._moved = time.monotonic()
                event = line.removeprefix("data: ")
                if event.startswith('{"error"'):
                    self._refused(int(json.loads(event)["error"].get("code") or 500), line, where)
                for piece in self._read(body, event):
                    if piece.token_ids and not piece.is_whole:
                        raise EngineError(f"{where} sampled tokens without log-probabilities: {line:.{SAID}}")
                    if piece.finish_reason == "abort":
                        raise ServerLost(f"{self.url} aborted a request")
                    hear(piece)
                    if piece.finish_reason is not None:
                        return piece.finish_reason
        raise ServerLost(f"{where} broke off in the midst of a completion")

    def _read(self, body: Mapping[str, Any], said: bytes | str) -> list[Sampled]:
        """Return the choices of an answer to `sampling_body`, or of an event of a stream. Raises EngineError, also
        where a prompt with images was read as another."""
        images: Images | None = body.get("images")
        try:
            if images is None:
                return read_answer(said, top=body["logprobs"])
            answer = json.loads(said)
            if (read := answer.get("prompt_token_ids")) is not None:
                images.check(body["prompt"], read, self.url)
                self._shown |= images.names
            return read_generated(answer, top=body["logprobs"])
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(
                f"{self.url} answered without token ids or log-probabilities ({' '.join(str(error).split()):.{SAID}})",
                hint="it must be vLLM 0.10 or newer, which knows return_token_ids",
            ) from None

    async def load(self, name: str, path: str, *, timeout: float) -> None:
        """Make the adapter in `path` available as `name`. Raises ServerLost, EngineError."""
        try:
            body = {"lora_name": name, "lora_path": path}
            await self._ask("POST", "/v1/load_lora_adapter", body, timeout=timeout)
        except EngineError as error:
            if error.kind != "already_loaded":
                raise

    async def unload(self, name: str) -> None:
        """Forget an adapter; requests that have begun continue. One that is not there is as well."""
        try:
            await self._ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        except EngineError as error:
            if error.kind != "not_loaded":
                raise

    async def reload(self, path: str, *, timeout: float) -> None:
        """Read all weights from the checkpoint in `path`. Nothing may be in flight. Raises ServerLost, EngineError."""
        async with self._reading:
            body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
            await self._ask("POST", "/collective_rpc", body, timeout=timeout)
            await self._forget_prompts()
            await self._ask("POST", "/update_weight_version", {"new_version": path})
            self.weights = path

    async def _forget_prompts(self) -> None:
        await self._ask("POST", "/reset_prefix_cache")
        if self._shown:
            await self._ask("POST", "/reset_encoder_cache")

    async def taking(self) -> TakesWeights:
        """Return how the server takes weights that are sent to it. Raises ServerLost, EngineError."""
        config = (await self._ask("GET", "/server_info?config_format=json"))["vllm_config"]
        model = config.get("model_config") or {}
        return TakesWeights(
            backend=(config.get("weight_transfer_config") or {}).get("backend"),
            dtype=None if model.get("quantization") else str(model.get("dtype")).removeprefix("torch."),
        )

    async def workers(self) -> int:
        """Return how many there are, each with a part of the weights. Raises ServerLost, EngineError."""
        return (await self._ask("GET", "/get_world_size"))["world_size"]

    async def meet(self, told: Mapping[str, Any], *, timeout: float) -> None:
        """Have the server's workers connect to the sender of weights. Raises ServerLost, EngineError."""
        await self._ask("POST", "/init_weight_transfer_engine", {"init_info": told}, timeout=timeout)

    async def start_update(self, *, timeout: float) -> None:
        """Begin to take weights. Nothing may be in flight until `finish_update`. Raises ServerLost, EngineError."""
        try:
            await self._ask("POST", "/start_weight_update", timeout=timeout)
        except ServerLost:
            self.updating = True  # for all that is known
            raise
        self.updating = True

    async def update(self, told: Mapping[str, Any], *, timeout: float) -> None:
        """Take these tensors, which are sent meanwhile. Raises ServerLost, EngineError."""
        await self._ask("POST", "/update_weights", {"update_info": told}, timeout=timeout)

    async def finish_update(self, label: str, *, timeout: float) -> None:
        """Use what was sent, which is called `label`. Raises ServerLost, EngineError."""
        await self._ask("POST", "/finish_weight_update", {"weight_version": label}, timeout=timeout)
        await self._forget_prompts()
        self.weights, self.updating = label, False

    async def leave_update(self, *, timeout: float) -> None:
        """End an update that broke off, whose weights are of no version; what is read after it is loaded as ever, which
        amid an update it is not. Raises ServerLost, EngineError."""

        async def ask(path: str) -> None:
            try:
                await self._ask("POST", path, {}, timeout=timeout)
            except ServerLost as error:  # after a 500 vLLM closes the connection without a word
                if error.silent:
                    raise
                await self._ask("POST", path, {}, timeout=timeout)

        try:
            await ask("/finish_weight_update")
        except ServerLost:
            raise
        except EngineError:  # vLLM has ended it, and not what it had begun with each layer
            await ask("/start_weight_update")
            await ask("/finish_weight_update")
        self.updating = False

    async def holds(self, label: str) -> bool:
        """Return whether its weights are called so. Raises ServerLost, EngineError."""
        return (await self._ask("GET", "/weight_info"))["weight_version"] == label

    async def sleep(self) -> None:
        """Give the GPU's memory back, but for what CUDA keeps; nothing may be in flight. Raises ServerLost,
        EngineError."""
        await self._ask("POST", "/sleep?level=1", timeout=SLEEP_S)

    async def wake(self) -> None:
        """Take the memory again. Raises ServerLost, EngineError."""
        await self._ask("POST", "/wake_up", timeout=SLEEP_S)

    async def remembers(self, base: str) -> bool:
        """Return whether it has what it was given last, and was not restarted since: the weights that it has read, or
        else the adapter `base`. Raises ServerLost, EngineError."""
        if self.updating:
            return True
        async with self._reading:
            if self.weights is not None:
                return await self.holds(self.weights)
        return base in await self.adapters()

    async def _while_it_moves(self, asking: Coroutine[Any, Any, T]) -> T:
        """Return what is asked for, however long it takes while the server moves. Raises ServerLost when it has not
        moved for the time that it may stand still, and as `asking`."""
        began, asked = time.monotonic(), asyncio.ensure_future(asking)
        try:
            while True:
                await asyncio.wait({asked}, timeout=min(LOOK_S, self._request_s / 4))
                if asked.done():
                    self._moved = time.monotonic()
                    return asked.result()
                await self._look()
                if time.monotonic() - max(began, self._moved) > self._request_s:
                    within = f"{self._request_s:g} s (vllm.request_timeout_s)"
                    raise ServerLost(f"{self.url} has read and sampled no token for {within}", silent=True)
        finally:
            asked.cancel()

    async def _look(self) -> None:
        """Find out whether the server has read or sampled tokens since the last look, for all requests at once. One
        that has no /metrics moves when it answers."""
        now = time.monotonic()
        if now - self._looked < min(LOOK_S, self._request_s / 4) / 2:
            return
        self._looked = now
        with suppress(EngineError, ValueError):
            said = await self._ask("GET", "/metrics", timeout=self._request_s)
            tokens = sum(map(float, _TOKENS.findall(str(said))))
            if self._tokens is not None and tokens != self._tokens:
                self._moved = time.monotonic()
            self._tokens = tokens

    async def _ask(self, method: str, path: str, body: Any = None, *, timeout: float | None = ASK_S) -> Any:
        """Return the answer's JSON, or its text."""
        answer = await self._answered(method, path, body, timeout=timeout)
        return answer.json() if answer.headers.get("content-type", "").startswith("application/json") else answer.text

    async def _answered(self, method: str, path: str, body: Any, *, timeout: float | None) -> httpx2.Response:
        """Return the answer, if it is yes."""
        where = f"{self.url}{path}"
        waits = httpx2.Timeout(timeout, pool=None, connect=timeout or self._request_s)
        async with self._reaching(where, timeout):
            answer = await self._client.request(method, where, json=body, timeout=waits)
        if answer.status_code >= 300:
            self._refused(answer.status_code, answer.text, where)
        return answer

    @asynccontextmanager
    async def _reaching(self, where: str, timeout: float | None) -> AsyncIterator[None]:
        """Raise what goes wrong on the way as ServerLost."""
        try:
            async with asyncio.timeout(timeout):
                yield
        except TimeoutError:
            raise ServerLost(f"{where} did not answer within {timeout:g} s", silent=True) from None
        except httpx2.HTTPError as error:
            raise ServerLost(f"{where} cannot be reached: {str(error) or type(error).__name__}") from None

    def _refused(self, status: int, text: str, where: str) -> NoReturn:
        said = " ".join(text.split())[:SAID]
        lacking = where.endswith(GENERATE) and (status == 403 or '"Not Found"' in said)
        restarted = status == 404 and where.endswith((COMPLETIONS, GENERATE))  # it does not know the adapter any more
        restarted = restarted and not lacking
        if restarted or status in (502, 503, 504) or "EngineDead" in said or "EngineCore" in said:
            raise ServerLost(f"{where} answered {status}: {said}")
        hint, kind = None, kind_of(said)
        if "lora_adapter" in where and (status == 403 or '"Not Found"' in said):
            hint = (
                "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, as `groupwise vllm-serve` does"
            )
            kind = "no_adapters"
        if lacking:
            hint, kind = "start it with --enable-scale-out (vLLM 0.32), as `groupwise vllm-serve` does", "no_images"
        if status == 404 and where.endswith(("/collective_rpc", "/update_weight_version", "/reset_encoder_cache")):
            hint = "it must be vLLM 0.32 or newer, with VLLM_SERVER_DEV_MODE=1, as `groupwise vllm-serve` starts it"
        raise EngineError(f"{where} answered {status}: {said}", hint=hint, kind=kind)


def kind_of(said: str) -> str | None:
    """Return which of the kinds of refusals that are told apart this is."""
    return next((kind for kind, words in _KINDS.items() if words in said), None)
