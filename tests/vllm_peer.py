"""A small HTTP server with real sockets that speaks the part of vLLM's API that `engine.vllm` uses, and samples with
our local engine: what it answers is what a model says, under the adapters that were loaded. Faults are switched on.

It counts seeds as vLLM does (completion j has seed + j), refuses what vLLM refuses, keeps an adapter's files read until
it is unloaded, and gives log-probabilities of what top_k leaves, as with `processed_logprobs`.
"""

from __future__ import annotations

import json
import math
import queue
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from groupwise.engine.local import LocalEngine
from groupwise.engine.vllm_plugin import groupwise_gloo
from groupwise.errors import AdapterError
from groupwise.model.chat import encode_prompt
from groupwise.model.image_tokens import vision_of
from groupwise.model.load import LoadedModel, load_model
from groupwise.pictures import Picture, read_picture
from groupwise.types import Grammar, PolicyVersion, Prompt, SamplingParams, SamplingRequest

BASE = "base"
TRANSFER_ROUTES = (
    *("server_info", "get_world_size", "init_weight_transfer_engine", "start_weight_update", "update_weights"),
    "finish_weight_update",
)


@dataclass
class Faults:
    """What goes wrong, until it is put back."""

    raw_logprobs: bool = False  # as vLLM's default: those at temperature 1
    mixes: bool = False  # as vLLM 0.32 on CPUs: rows of the base get an adapter of the batch
    stale: bool = False  # a version that is loaded answers as the one loaded before it
    load_status: int | None = None  # of /v1/load_lora_adapter
    hangs: bool = False  # /health and everything else is not answered
    cut: int = 0  # so many completions are ended in the midst of the answer
    cut_stream: int | None = None  # the next stream ends after so many tokens, without a last word
    hold_stream: int | None = None  # streams stop after so many tokens and wait
    other_template: bool = False
    keeps_to: str | None = None  # another grammar than it is asked for
    keeps_weights: bool = False  # a checkpoint that it is told to read changes nothing
    slow_s: float = 0.0  # before a completion is sampled; tokens are counted meanwhile
    stuck: bool = False  # ... and none: its engine hangs, and the server about it does not
    at_once: int | None = None  # requests that it works on; the others wait in its queue
    counts: bool = True  # it has /metrics
    scale_out: bool = True  # ... and /inference/v1/generate
    keeps_images: bool = True  # by their names
    sees_less: bool = False  # its processor cuts images otherwise
    transfer: str | None = groupwise_gloo.BACKEND  # how it was started to take weights that are sent to it
    old: bool = False  # an older vLLM, which knows no such routes
    refuses: str | None = None  # the route of a transfer that it answers 500 to, each time
    dies_in: str | None = None  # ... that it dies in, without an answer
    hangs_in: str | None = None  # ... from which on its engine does nothing any more, and the server about it does
    silent: bool = False  # it does not say in which type it keeps weights
    quantization: str | None = None  # ... or rounds them in a way of its own
    bends: float = 0.0  # added to what it is sent


class Refused(Exception):
    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


@dataclass
class Peer:
    """One server; `port` stays the same when it is ended and started again."""

    base: LoadedModel
    context: int | None = None
    port: int = 0
    faults: Faults = field(default_factory=Faults)
    loaded: dict[str, PolicyVersion] = field(default_factory=dict)
    ever: list[str] = field(default_factory=list)  # names of adapters, in the order in which they came
    seen: list[dict[str, Any]] = field(default_factory=list)  # bodies of completions
    checkpoints: list[Path] = field(default_factory=list)  # that it was told to read
    images: list[str] = field(default_factory=list)  # names of those whose pixels came, in that order
    sent: list[dict[str, Tensor]] = field(default_factory=list)  # all that was sent, by version
    chunks: list[int] = field(default_factory=list)  # bytes of each request of a transfer

    def __post_init__(self) -> None:
        self._flying: list[PolicyVersion] = []
        self.most_flying, self._tokens, self._turn = 0, 0, threading.Condition()
        self._working, self.slept, self._reads = 0, 0, count(1)
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen, with no adapters: what there was died with the process."""
        self.loaded, self.paths, self.label, self.asleep = {}, dict[str, Path](), "default", False
        self._pictures = dict[str, Picture]()  # by name
        self._updates, self._arrived, self._stuck = False, dict[str, Tensor](), False
        self.engine = LocalEngine(self.base, max_rows=64)
        peer = self

        class Handler(_Handler):
            pass

        Handler.peer = peer
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def die(self) -> None:
        """Close every connection, whatever is on it, and listen no more."""
        self._server.shutdown()
        self._server.server_close()
        with self._lock:
            for connection in list(self._open):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self.engine.close()

    # -- routes --------------------------------------------------------------------------------------------------------

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        while self.faults.hangs:
            time.sleep(0.05)
        route = path.partition("?")[0].strip("/")
        if route in TRANSFER_ROUTES:
            self._at(route)
        while self._stuck and route != "health" and self.faults.hangs_in:
            time.sleep(0.02)
        return getattr(self, "do_" + route.replace("/", "_"))(body)

    def _at(self, route: str) -> None:
        """What becomes of a request about weights that are sent."""
        if self.faults.old:
            raise Refused(404, "Not Found")
        if route == self.faults.refuses:
            raise Refused(500, f"{route} failed")
        if route == self.faults.dies_in:
            self.faults.dies_in = None
            self.die()
            raise ConnectionError
        self._stuck |= route == self.faults.hangs_in

    def do_health(self, body: dict[str, Any]) -> Any:
        return {}

    def do_metrics(self, body: dict[str, Any]) -> Any:
        if not self.faults.counts:
            raise Refused(404, "Not Found")
        return f'vllm:generation_tokens_total{{engine="0",model_name="{BASE}"}} {float(self._tokens)}\n'

    def do_version(self, body: dict[str, Any]) -> Any:
        return {"version": "0.32.0"}

    def do_v1_models(self, body: dict[str, Any]) -> Any:
        context = self.context or self.base.context_length
        base = {"id": BASE, "parent": None, "max_model_len": context}
        return {"data": [base, *({"id": name, "parent": BASE, "max_model_len": None} for name in self.loaded)]}

    def do_tokenize(self, body: dict[str, Any]) -> Any:
        asked = (
            Prompt(id="", messages=tuple(body["messages"]))
            if "messages" in body
            else Prompt(id="", text=body["prompt"])
        )
        ids = list(encode_prompt(asked, self.base.tokenizer).token_ids)
        return {"tokens": ids[1:] if self.faults.other_template else ids}

    def do_v1_load_lora_adapter(self, body: dict[str, Any]) -> Any:
        name, path = body["lora_name"], Path(body["lora_path"])
        if self.faults.load_status is not None:
            raise Refused(self.faults.load_status, "could not load")
        if name in self.loaded:
            raise Refused(400, f"The lora adapter '{name}' has already been loaded.")
        version = PolicyVersion(name, 1)
        try:
            self.engine.load(version, path)
        except AdapterError as error:
            raise Refused(404, str(error)) from None
        last = list(self.loaded.values())[-1:] or [PolicyVersion.base()]
        self.loaded[name] = last[0] if self.faults.stale else version
        self.paths[name] = path
        self.ever.append(name)
        return f"Success: LoRA adapter '{name}' added successfully."

    def do_v1_unload_lora_adapter(self, body: dict[str, Any]) -> Any:
        self.paths.pop(body["lora_name"], None)
        if self.loaded.pop(body["lora_name"], None) is None:
            raise Refused(404, f"The lora adapter '{body['lora_name']}' cannot be found.")
        return "removed"

    def do_collective_rpc(self, body: dict[str, Any]) -> Any:
        self.checkpoints.append(Path(body["kwargs"]["weights_path"]))
        if not self.faults.keeps_weights:
            read = _weights(self.checkpoints[-1], self.base)
            self._load(read | self._arrived)  # what an update that broke off has left is in the way, as in vLLM
        return {"results": [None]}

    def _load(self, weights: dict[str, Tensor]) -> None:
        self.base.model.load_state_dict(weights, strict=False)
        self.base.model.tie_weights()
        self.engine.adopt(PolicyVersion("read", next(self._reads)))  # sums with the old ones are forgotten
        for name, path in self.paths.items():
            self.engine.unload(self.loaded[name])
            self.engine.load(self.loaded[name], path)

    # -- weights that are sent -----------------------------------------------------------------------------------------

    def do_server_info(self, body: dict[str, Any]) -> Any:
        backend = self.faults.transfer
        model = {"dtype": str(self.base.model.dtype), "quantization": self.faults.quantization}
        config = {"weight_transfer_config": backend and {"backend": backend}}
        return {"vllm_config": config if self.faults.silent else {**config, "model_config": model}, "vllm_env": {}}

    def do_get_world_size(self, body: dict[str, Any]) -> Any:
        return {"world_size": 1}

    def do_init_weight_transfer_engine(self, body: dict[str, Any]) -> Any:
        told = dict(body["init_info"])
        rank = told.pop("rank_offset")
        self._group = groupwise_gloo.join(groupwise_gloo.Meeting(**told), rank)
        return {"message": "Weight transfer initialized"}

    def do_start_weight_update(self, body: dict[str, Any]) -> Any:
        if self._updates:
            raise Refused(500, "start_weight_update called while a weight update is already active")
        self._updates = True
        return {"message": "Weight update started"}

    def do_update_weights(self, body: dict[str, Any]) -> Any:
        if not self._updates:
            raise Refused(500, "start_weight_update must be called before update_weights.")
        told = body["update_info"]
        try:
            packed, sizes, dtypes = groupwise_gloo.receive(self._group, told["dtype_names"], told["shapes"])
        except RuntimeError as error:
            self._updates = False  # and what has arrived stays, as in vLLM
            raise Refused(500, str(error)) from None
        self.chunks.append(packed.numel())
        for name, shape, dtype, part in zip(told["names"], told["shapes"], dtypes, packed.split(sizes), strict=True):
            self._arrived[name] = part.view(dtype).view(shape) + self.faults.bends
        return {"message": "Weights updated"}

    def do_finish_weight_update(self, body: dict[str, Any]) -> Any:
        if not self._updates:
            raise Refused(500, "finish_weight_update called without a matching start_weight_update.")
        arrived, self._updates, self._arrived = self._arrived, False, {}
        self._load(_in_memory(arrived, self.base))
        if body.get("weight_version") is not None:
            self.label = body["weight_version"]
            self.sent.append(arrived)
        return {"message": "Weight update finished"}

    def do_update_weight_version(self, body: dict[str, Any]) -> Any:
        self.label = body["new_version"]
        return {"success": True, "new_version": self.label}

    def do_weight_info(self, body: dict[str, Any]) -> Any:
        return {"weight_version": self.label}

    def do_reset_encoder_cache(self, body: dict[str, Any]) -> Any:
        vision = vision_of(self.base.model)
        assert vision is not None
        vision._features.clear()
        return ""

    def do_sleep(self, body: dict[str, Any]) -> Any:
        if self._flying:
            raise Refused(500, "it samples")
        self.asleep = True
        self.slept += 1
        return ""

    def do_wake_up(self, body: dict[str, Any]) -> Any:
        self.asleep = False
        return ""

    def do_reset_prefix_cache(self, body: dict[str, Any]) -> Any:
        return {"success": True}

    def do_v1_completions(self, body: dict[str, Any]) -> Any:
        self.seen.append(body)
        if self.asleep:  # vLLM's would wait until it is woken
            raise Refused(500, "asleep")
        model, prompt, n, temperature = body["model"], tuple(body["prompt"]), body["n"], body["temperature"]
        if model != BASE and model not in self.loaded:
            raise Refused(404, f"The model `{model}` does not exist.")
        if n > 1 and temperature == 0:
            raise Refused(400, "n must be 1 when using greedy sampling")
        if len(prompt) + body["max_tokens"] > (self.context or self.base.context_length):
            raise Refused(400, "This model's maximum context length is less")
        version = asked = self.loaded.get(model, PolicyVersion.base())
        self._flying.append(asked)
        self.most_flying = max(self.most_flying, len(self._flying))
        if body.get("stream"):
            return self._stream(body, prompt, asked)
        try:
            self._work(self.faults.slow_s + 0.004 * body["max_tokens"])  # so that requests overlap, as in a batch
            if model == BASE and self.faults.mixes:
                version = ([each for each in self._flying if not each.is_base] or [version])[-1]
            return {"choices": self._sample(body, prompt, version)}
        finally:
            self._flying.remove(asked)

    def do_inference_v1_generate(self, body: dict[str, Any]) -> Any:
        if not self.faults.scale_out:
            raise Refused(403, "The scale-out endpoints are disabled; pass --enable-scale-out")
        vision = vision_of(self.base.model)
        assert vision is not None
        pictures = list[Picture]()
        for i, part in enumerate(body["content_parts"]):
            if "url" in part:
                self._pictures[part["uuid"]] = read_picture(part["url"])
                self.images.append(part["uuid"])
            if part["uuid"] not in self._pictures:
                raise Refused(400, f"Cache miss for image at index {i} but data is not provided.")
            pictures.append(self._pictures[part["uuid"]])
        if not self.faults.keeps_images:
            self._pictures.clear()
        if self.faults.sees_less:
            pictures = [read_picture(each.pixels().resize((30, 30))) for each in pictures]
        prompt = vision.expand(body["token_ids"], pictures)
        read = {"prompt_token_ids": vision.placeholders(prompt)}
        params = {"logit_bias": None, "structured_outputs": None, **body["sampling_params"]}
        answer = self.do_v1_completions({**body, **params, "prompt": prompt})
        if isinstance(answer, Iterator):
            return ({**_generated(event), **(read if i == 0 else {})} for i, event in enumerate(answer))
        return _generated(answer) | read

    def _work(self, seconds: float) -> None:
        """Take as long, as one of `at_once` requests, and count tokens meanwhile unless it is `stuck`."""
        with self._turn:
            self._turn.wait_for(lambda: self.faults.at_once is None or self._working < self.faults.at_once)
            self._working += 1
        try:
            until = time.monotonic() + seconds
            while self.faults.stuck or time.monotonic() < until:
                time.sleep(min(0.02, max(0.0, until - time.monotonic())) or 0.02)
                self._tokens += not self.faults.stuck
        finally:
            with self._turn:
                self._working -= 1
                self._turn.notify_all()

    def _stream(self, body: dict[str, Any], prompt: tuple[int, ...], version: PolicyVersion) -> Iterator[Any]:
        """The events of one completion as it is sampled."""
        heard: queue.Queue[Any] = queue.Queue()
        request = self._request(body, prompt, version, 0)
        (future,) = self.engine.submit([request], on_token=lambda *token: heard.put(token))
        future.add_done_callback(lambda _: heard.put(None))
        cut, self.faults.cut_stream = self.faults.cut_stream, None
        every, told = body.get("stream_interval") or 1, list[Any]()
        try:
            said = 0
            while (token := heard.get()) is not None:
                if told and self._holds(said):
                    yield _pieces(told, None)
                self._hold(said)
                said += 1
                if cut == 0:
                    return
                cut = None if cut is None else cut - 1
                told.append(token)
                if said == 1 or len(told) == every:
                    yield _pieces(told, None)
            if told and self._holds(said):
                yield _pieces(told, None)
            self._hold(said)
            yield _pieces(told, future.result()[0].finish_reason.value)
        finally:
            future.cancel()
            self._flying.remove(version)

    def _hold(self, said: int) -> None:
        while self._holds(said):
            time.sleep(0.01)

    def _holds(self, said: int) -> bool:
        return self.faults.hold_stream is not None and said >= self.faults.hold_stream

    def _request(
        self, body: dict[str, Any], prompt: tuple[int, ...], version: PolicyVersion, j: int
    ) -> SamplingRequest:
        eos, grammar = set(self.base.eos_ids), body["structured_outputs"]
        params = SamplingParams(
            max_tokens=body["max_tokens"],
            temperature=body["temperature"],
            top_k=body["top_k"],
            stop=tuple(body["stop"]),
            stop_ids=tuple(token for token in body["stop_token_ids"] if token not in eos),
            ignore_eos=body["ignore_eos"],
            top_logprobs=body["logprobs"],
            repetition_penalty=body["repetition_penalty"],
            presence_penalty=body["presence_penalty"],
            frequency_penalty=body["frequency_penalty"],
            logit_bias=tuple((int(token), bias) for token, bias in (body["logit_bias"] or {}).items()),
            min_tokens=body["min_tokens"],
            grammar=grammar and Grammar.lark(self.faults.keeps_to or grammar["grammar"]),
            seed=(body["seed"] + j) & (2**63 - 1),
        )
        return SamplingRequest(prompt_ids=prompt, version=version, params=params)

    def _sample(self, body: dict[str, Any], prompt: tuple[int, ...], version: PolicyVersion) -> list[dict[str, Any]]:
        requests = [self._request(body, prompt, version, j) for j in range(body["n"])]
        choices = []
        for j, (completion,) in enumerate(self.engine.generate(requests)):
            logprobs = completion.behaviour_logprobs
            if self.faults.raw_logprobs:
                logprobs = self.engine.score(prompt, completion.token_ids, version)
            if body["repetition_penalty"] != 1:
                logprobs = [-9.0] * len(logprobs)  # of the distribution after it, which is another one
            if body["top_k"]:
                logprobs = self._narrowed(prompt, completion.token_ids, version, body)
            reason = completion.finish_reason.value
            tops = completion.top_logprobs
            choices.append(_choice(j, completion.token_ids, logprobs, tops, reason)["choices"][0])
        return choices

    def _narrowed(self, prompt: Any, ids: Any, version: PolicyVersion, body: dict[str, Any]) -> list[float]:
        scored = self.engine.score_top(prompt, ids, version, temperature=body["temperature"], top=body["top_k"])
        return [logprob - math.log(sum(math.exp(each) for _, each in top)) for logprob, top in scored]


def _weights(checkpoint: Path, base: LoadedModel) -> dict[str, Any]:
    """Of a model, by the names that it has in memory; in the files of one that sees they are others."""
    if vision_of(base.model) is None:
        return load_file(checkpoint / "model.safetensors")
    return type(base.model).from_pretrained(checkpoint, dtype=base.model.dtype).state_dict()


def _in_memory(arrived: dict[str, Tensor], base: LoadedModel) -> dict[str, Any]:
    """Of what was sent by the names of files, the same by the names that it has in memory."""
    if not arrived or vision_of(base.model) is None:
        return arrived
    with TemporaryDirectory() as folder:
        save_file(
            {name: each.contiguous() for name, each in arrived.items()}, f"{folder}/model.safetensors", {"format": "pt"}
        )
        base.model.config.save_pretrained(folder)
        return _weights(Path(folder), base)


def _generated(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer of /v1/completions as /inference/v1/generate has it."""
    choices = []
    for choice in answer["choices"]:
        told = zip(
            choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"], strict=True
        )
        content = [
            {
                "token_id": token,
                "logprob": logprob,
                "top_logprobs": [
                    {"token_id": int(name.removeprefix("token_id:")), "logprob": at} for name, at in top.items()
                ],
            }
            for token, logprob, top in told
        ]
        choices.append({**choice, "logprobs": {"content": content}})
    return {"choices": choices}


def _pieces(told: list[Any], reason: str | None) -> dict[str, Any]:
    """An event of the tokens that were not told yet, which are told now."""
    _, ids, logprobs, tops = map(list, zip(*told, strict=True)) if told else ([], [], [], [])
    told.clear()
    return _choice(0, ids, logprobs, tops, reason)


def _choice(index: int, ids: Any, logprobs: Any, tops: Any, reason: str | None) -> dict[str, Any]:
    """vLLM adds the sampled token to the likeliest ones."""
    named = [
        {f"token_id:{each}": at for each, at in [*top, (token, logprob)]}
        for token, logprob, top in zip(ids, logprobs, tops or [()] * len(ids), strict=True)
    ]
    told = {"token_logprobs": list(logprobs), "top_logprobs": named}
    return {"choices": [{"index": index, "token_ids": list(ids), "logprobs": told, "finish_reason": reason}]}


class _Handler(BaseHTTPRequestHandler):
    peer: Peer
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.peer._open.add(self.connection)

    def finish(self) -> None:
        self.peer._open.discard(self.connection)
        with suppress(OSError):
            super().finish()

    def handle(self) -> None:
        with suppress(OSError):  # the client has gone
            super().handle()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        data = self.rfile.read(int(self.headers.get("content-length", 0)))
        try:
            status, answer = 200, self.peer.answer(self.path, json.loads(data) if data else {})
        except Refused as refused:
            status, answer = refused.status, {"error": {"message": str(refused), "code": refused.status}}
            self.close_connection = status == 500  # without a word, as vLLM
        except AttributeError:
            status, answer = 404, {"detail": "Not Found"}
        except Exception:  # its engine was closed: it dies
            self.close_connection = True
            return
        if isinstance(answer, Iterator):
            return self._stream(answer)
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.path == "/v1/completions" and self.peer.faults.cut:
            self.peer.faults.cut -= 1
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
            return
        self.wfile.write(body)

    def _stream(self, events: Iterator[Any]) -> None:
        """Server-sent events until they end; a connection that is just closed is how vLLM's death looks."""
        self.close_connection = True
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        for event in events:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def serving(base: LoadedModel, **options: Any) -> Iterator[Peer]:
    """A peer, until the end of the block."""
    peer = Peer(base, **options)
    try:
        yield peer
    finally:
        peer.faults = Faults()
        peer.die()


def main() -> None:
    """As a process, with vLLM's command line: `vllm_peer.py --model DIR --host H --port P ...`."""
    options = dict(zip(sys.argv[1:], sys.argv[2:], strict=False))
    Peer(load_model(options["--model"], device="cpu", dtype="float32"), port=int(options["--port"]))
    print("listening", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
