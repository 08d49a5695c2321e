"""/api/v1: the Tinker API (tinker 0.8 to 0.38), so that its package trains and samples on this server unchanged.

    TINKER_BASE_URL=http://127.0.0.1:8420 TINKER_API_KEY=tml-local python my_loop.py

A request is answered at once with an id, and /retrieve_future with its answer when there is one. What is wrong with
one becomes its answer, with category `user`; only what names no request (an unknown session, a body that cannot be
read) is an error of HTTP. These routes are Tinker's and not in /openapi.json; docs/tinker.md says what they do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import formatdate
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import FileResponse

from groupwise.bridges.tinker import schema as bodies
from groupwise.bridges.tinker.checkpoints import (
    SAMPLER_WEIGHTS,
    Checkpoint,
    CheckpointNotFoundError,
    TinkerCheckpoints,
)
from groupwise.bridges.tinker.downloads import ARCHIVE, Downloads, Link
from groupwise.bridges.tinker.futures import JSON, PROTOBUF, FutureResult, Futures, answer
from groupwise.bridges.tinker.json_requests import ForwardBackwardBody, ForwardBody, message_of
from groupwise.bridges.tinker.proto import DecodeError, ForwardBackwardRequest
from groupwise.bridges.tinker.sampling import Samplers
from groupwise.bridges.tinker.sessions import HeartbeatGoneError, SessionGoneError, Sessions
from groupwise.bridges.tinker.training import (
    ATTENTION,
    MLP,
    Models,
    TrainedModel,
    check_optimizer,
    lora_of,
    tokenizer_of,
    trains,
)
from groupwise.errors import GroupwiseError, MediaTypeError, RequestError
from groupwise.server import admin, chat, completions
from groupwise.server.bodies import read_body
from groupwise.server.errors import echo
from groupwise.server.guard import OPENAI_PREFIX
from groupwise.server.state import Parts, opened, seen
from groupwise.types import PolicyVersion

if TYPE_CHECKING:
    from fastapi import FastAPI

POLL_S = 10.0  # the longest that /retrieve_future waits
PAGE = 100  # checkpoints or runs of one listing, where the request does not say
AT_ONCE = 2000  # samples that one client may have under way
NAME = "tinker"  # in `Server.more`, and of the entry point
SILENT_S = 60.0  # six heartbeats; a session that misses them goes when its models are in the way

S = TypeVar("S", bound=bodies.Sequenced)


async def _whose(http: Request) -> None:
    """Find the sender's own sessions, models and checkpoints before every route."""
    http.state.tinker = (await seen(http)).more[NAME]


router = APIRouter(prefix="/api/v1", include_in_schema=False, dependencies=[Depends(_whose)])


class FutureGoneError(GroupwiseError, LookupError):
    """No such request, or its answer is forgotten: the package sends the request again."""

    code, status, exit_code = "future_gone", 410, 2


class Tinker:
    """Holds the state of the Tinker API in a server."""

    def __init__(self, parts: Parts):
        config = parts.config
        root = config.state_dir.absolute() / "tinker"
        self.parts = parts
        self.checkpoints = TinkerCheckpoints(root, admit=parts.quotas.check_bytes)
        self.futures = Futures(most=config.tinker_pending, without=str(config.state_dir.absolute()))
        self.models = Models(
            parts.base, self.futures, self.checkpoints, config=config, make_room=self._end_silent_sessions
        )
        self.samplers = Samplers(parts, self.models, self.futures, self.checkpoints, root=root)
        self.downloads = Downloads(root / "exports", self.models, self.checkpoints, parts.store)
        self.sessions = Sessions(idle_s=config.tinker_idle_s, ended=self._ended)

    async def _ended(self, session: str) -> None:
        self.models.drop(session)
        await self.samplers.drop(session)
        self.futures.forget(session)

    async def _end_silent_sessions(self) -> None:
        """End, where as many models are trained as may be, sessions of clients that are gone, the longest gone
        first."""
        for session in self.sessions.silent(SILENT_S):
            if self.models.are_full and self.models.of(session.id):
                await self.sessions.end(session.id)

    def policy_of(self, name: str) -> str | None:
        """Return what one of Tinker's names stands for: a path of a checkpoint for sampling, also after its base model
        and a semicolon, or the base model's own; None for others. Raises RequestError, CheckpointNotFoundError."""
        base, _, path = name.rpartition(";")
        if path.startswith("tinker://"):
            self.models.check_base(base or None)
            return self.checkpoints.find_sampler(path).version
        return "base" if "/" in name and tokenizer_of(name) == self.models.tokenizer else None

    async def remove_expired(self) -> None:
        """Delete the checkpoints that are past their time to live."""
        for checkpoint in await asyncio.to_thread(lambda: [*self.checkpoints.expired()]):
            with suppress(GroupwiseError):
                await self.delete(checkpoint)

    async def delete(self, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint. Raises AdapterInUseError, StorageError."""
        if checkpoint.version is not None:
            with suppress(LookupError):  # deleted in the store already
                await self.parts.policies.delete([PolicyVersion.parse(checkpoint.version)])
        await asyncio.to_thread(self.checkpoints.delete, checkpoint)

    def close(self) -> None:
        """End what runs. For tests: a process that ends needs none of it."""
        self.sessions.close()
        self.samplers.close()
        self.models.close()


def make(parts: Parts) -> Tinker:
    """Return the routes' state for the owner or a tenant, whose policies then have Tinker's names, too."""
    tinker = Tinker(parts)
    parts.policies.elsewhere = tinker.policy_of
    return tinker


def mount(app: FastAPI) -> None:
    """Add the routes to an application, and those for OpenAI's clients where Tinker has them."""
    app.include_router(router)
    for openai in (chat.router, completions.router):  # at /v1
        app.include_router(openai, prefix=OPENAI_PREFIX, include_in_schema=False)
    app.add_api_route(f"{OPENAI_PREFIX}/v1/models", admin.models, include_in_schema=False)


def tinker_of(request: Request) -> Tinker:
    return cast("Tinker", request.state.tinker)


# ---- the client and its session ----
@router.get("/healthz")
async def healthz() -> Any:
    return {"status": "ok"}


@router.post("/client/config")
async def client_config(http: Request) -> Any:
    """Tell a package what it asks before everything else. Those of 0.23 and 0.24 send protobuf only if they are told
    to."""
    return {
        "sample_max_concurrent_requests": min(AT_ONCE, tinker_of(http).parts.config.tinker_pending),
        "proto_write_fwdbwd": True,
        "fwd_via_fwdbwd": True,
    }


@router.post("/client/dynamic_config")
async def dynamic_config(http: Request) -> Any:
    """Answer as `client_config` does: none of it changes."""
    return await client_config(http)


@router.post("/telemetry")
async def telemetry(http: Request) -> Any:
    """Accept telemetry and discard it."""
    return {"status": "accepted"}


@router.get("/get_server_capabilities")
async def capabilities(http: Request) -> Any:
    """List the model that is trained, by all its names: the last is where a client on this machine finds its tokenizer;
    then those that are only sampled from."""
    models, others = tinker_of(http).models, tinker_of(http).samplers.others
    lengths = dict.fromkeys((models.name, models.base.name, models.tokenizer), models.base.context_length)
    about = {"sampleable": True, "trainable": True}
    trained = [{"model_name": name, "max_context_length": most, **about} for name, most in lengths.items()]
    sampled = [
        {**about, "model_name": name, "max_context_length": other.engine.context_length, "trainable": False}
        for name, other in others.items()
        if name not in lengths
    ]
    return {"supported_models": trained + sampled}


@router.post("/create_session")
async def create_session(http: Request) -> Any:
    body = await read_body(http, bodies.CreateSession)
    await tinker_of(http).remove_expired()
    about = {"user_metadata": bodies.check_metadata(body.user_metadata), "display_name": body.display_name}
    return {"type": "create_session", "session_id": tinker_of(http).sessions.create(**about).id}


@router.post("/session_heartbeat")
async def heartbeat(http: Request) -> Any:
    body = await read_body(http, bodies.Heartbeat)
    tinker_of(http).sessions.touch(body.session_id, error=HeartbeatGoneError)
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session}/finish")
async def finish(http: Request, session: str) -> Any:
    tinker_of(http).sessions.touch(session)
    await tinker_of(http).sessions.end(session)
    return {}


@router.get("/sessions")
async def sessions(http: Request) -> Any:
    return {"sessions": tinker_of(http).sessions.ids}


@router.get("/sessions/{session}")
async def session(http: Request, session: str) -> Any:
    tinker = tinker_of(http)
    found = tinker.sessions.touch(session)
    runs = [model.id for model in tinker.models.of(session)]
    about = {"user_metadata": found.user_metadata, "display_name": found.display_name}
    return {"training_run_ids": runs, "sampler_ids": tinker.samplers.of(session), **about}


# ---- models ----
@router.post("/create_model")
async def create_model(http: Request) -> Any:
    tinker, body = tinker_of(http), await read_body(http, bodies.CreateModel)
    tinker.sessions.touch(body.session_id)
    tinker.models.check_base(body.base_model)
    check_optimizer(body.optimizer_config)
    seed = 0 if body.lora_config is None else body.lora_config.seed or 0
    metadata = bodies.check_metadata(body.user_metadata)
    lora = lora_of(body.lora_config)
    return tinker.models.create(body.session_id, body.model_seq_id, lora, seed=seed, user_metadata=metadata)


@router.post("/load_weights")
async def load_weights(http: Request) -> Any:
    tinker = tinker_of(http)
    try:
        body = await read_body(http, bodies.LoadWeights)
    except (RequestError, MediaTypeError) as error:
        return await _refused(http, error)
    if body.model_id is not None and body.seq_id is not None:
        model = tinker.models.find(body.model_id)
        return tinker.models.request(model, body.seq_id, lambda: tinker.models.load_weights(model, body))
    check_optimizer(body.optimizer_config)
    tinker.models.check_base(body.base_model)
    if body.session_id is None or body.model_seq_id is None:
        raise RequestError("there is neither session_id with model_seq_id nor model_id with seq_id")
    tinker.sessions.touch(body.session_id)
    saved = await asyncio.to_thread(tinker.checkpoints.find_state, body.path)
    load, metadata = {"saved": saved, "optimizer": body.optimizer}, bodies.check_metadata(body.user_metadata)
    return tinker.models.create(body.session_id, body.model_seq_id, saved.lora, load=load, user_metadata=metadata)


@router.post("/get_info")
async def get_info(http: Request) -> Any:
    tinker = tinker_of(http)
    model = tinker.models.find((await read_body(http, bodies.OfModel)).model_id)
    base = tinker.models.base
    arch = getattr(base.model.config, "model_type", None)
    return {
        "type": "get_info",
        "model_data": {"arch": arch, "model_name": base.name, "tokenizer_id": tinker.models.tokenizer},
        "model_id": model.id,
        "is_lora": True,
        "lora_rank": model.lora["rank"],
        "model_name": base.name,
    }


@router.post("/forward_backward")
async def forward_backward(http: Request) -> Any:
    """Accumulate a gradient. The body is protobuf, from packages before 0.23 JSON."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == JSON:
        return await _in_turn(http, ForwardBackwardBody, _from_json(tinker_of(http)))
    if kind != PROTOBUF:
        hint = f"send {PROTOBUF}, as tinker 0.23 and later do, or {JSON}"
        raise MediaTypeError(f"the content type is {echo(kind) if kind else 'missing'}", hint=hint)
    models, raw = tinker_of(http).models, await http.body()
    message = ForwardBackwardRequest()
    try:
        await asyncio.to_thread(message.ParseFromString, raw)
    except DecodeError as error:
        raise RequestError(
            f"the body is no ForwardBackwardRequest: {echo(str(error))}", hint="send protobuf, as tinker 0.38 does"
        ) from None
    model = models.find(message.model_id)
    if message.seq_id < 1:
        raise RequestError(f"seq_id is {message.seq_id}; it counts from 1", field="seq_id")
    work = partial(models.forward_backward, model, message)
    return models.request(model, message.seq_id, work, size=bodies.HELD_BY_BYTE * len(raw))


@router.post("/forward")
async def forward(http: Request) -> Any:
    """Answer packages before 0.23; later ones send `forward_only` to /forward_backward."""
    return await _in_turn(http, ForwardBody, _from_json(tinker_of(http)))


def _from_json(tinker: Tinker) -> Callable[[TrainedModel, ForwardBackwardBody | ForwardBody], Awaitable[FutureResult]]:
    async def work(model: TrainedModel, body: ForwardBackwardBody | ForwardBody) -> FutureResult:
        return await tinker.models.forward_backward(model, await asyncio.to_thread(message_of, body))

    return work


@router.post("/optim_step")
async def optim_step(http: Request) -> Any:
    return await _in_turn(http, bodies.OptimStep, tinker_of(http).models.optim_step)


@router.post("/save_weights")
async def save_weights(http: Request) -> Any:
    return await _in_turn(http, bodies.SaveWeights, tinker_of(http).models.save_weights)


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(http: Request) -> Any:
    return await _in_turn(http, bodies.SaveForSampler, tinker_of(http).samplers.snapshot)


@router.post("/save_weights_external")
async def save_weights_external(http: Request) -> Any:
    return await _in_turn(http, bodies.SaveExternal, tinker_of(http).downloads.save_external)


async def _in_turn(
    http: Request, kind: type[S], work: Callable[[TrainedModel, S], Awaitable[FutureResult]]
) -> dict[str, str]:
    """Return a request that runs when its number comes -> its id."""
    try:
        body = await read_body(http, kind)
    except (RequestError, MediaTypeError) as error:
        return await _refused(http, error)
    models, size = tinker_of(http).models, bodies.HELD_BY_BYTE * len(await http.body())
    model = models.find(body.model_id)
    return models.request(model, body.seq_id, partial(work, model, body), size=size)


async def _refused(http: Request, error: GroupwiseError) -> dict[str, str]:
    """Return a refusal as the answer of the number that the client gave to the request: without one, all later requests
    would wait for it. Raises `error` where model and number cannot be read."""
    if (place := bodies.place_of(await http.body())) is None:
        raise error
    models = tinker_of(http).models

    async def refuse() -> FutureResult:
        raise error

    return models.request(models.find(place.model_id), place.seq_id, refuse)


# ---- sampling ----
@router.post("/create_sampling_session")
async def create_sampling_session(http: Request) -> Any:
    tinker, body = tinker_of(http), await read_body(http, bodies.CreateSampler)
    tinker.sessions.touch(body.session_id)
    sampler = await tinker.samplers.create(body)
    return {"type": "create_sampling_session", "sampling_session_id": sampler.id}


@router.get("/samplers/{sampler}")
async def sampler(http: Request, sampler: str) -> Any:
    found = tinker_of(http).samplers.find(sampler)
    return {"sampler_id": found.id, "base_model": found.base_model, "model_path": found.model_path}


@router.post("/asample")
async def asample(http: Request) -> Any:
    return tinker_of(http).samplers.submit(await read_body(http, bodies.SampleBody))


@router.post("/cancel_future")
async def cancel_future(http: Request) -> Any:
    tinker_of(http).samplers.cancel((await read_body(http, bodies.Retrieve)).request_id)
    return {}


@router.post("/retrieve_future")
async def retrieve_future(http: Request) -> Response:
    tinker, id = tinker_of(http), (await read_body(http, bodies.Retrieve)).request_id
    if (future := tinker.futures.find(id)) is None:
        raise FutureGoneError(f"there is no request {echo(id)}, or its answer is forgotten", hint="send it again")
    found = await tinker.futures.wait(id, seconds=POLL_S)
    if found is None:
        state = {"queue_state": "paused_capacity", "queue_state_reason": future.paused} if future.paused else {}
        found = answer(type="try_again", request_id=id, **({"queue_state": "active"} | state))
    if not any(kind in http.headers.get("accept", "*/*") for kind in ("protobuf", "*/*")):
        found = await asyncio.to_thread(found.plain)
    return Response(found.body, media_type=found.media)


# ---- what was saved ----
@router.post("/weights_info")
async def weights_info(http: Request) -> Any:
    body = await read_body(http, bodies.TinkerPath)
    saved = await asyncio.to_thread(tinker_of(http).checkpoints.find, body.tinker_path)
    about = {"base_model": saved.base_model, "is_lora": True, "lora_rank": saved.lora["rank"]}
    return about | {
        "train_unembed": False,
        "train_mlp": trains(saved.lora, MLP),
        "train_attn": trains(saved.lora, ATTENTION),
    }


@router.get("/checkpoints")
async def checkpoints(http: Request, limit: int = PAGE, offset: int = 0) -> Any:
    found = await asyncio.to_thread(tinker_of(http).checkpoints.list)
    page, cursor = _page(found, limit, offset)
    return {"checkpoints": [each.public() for each in page], "cursor": cursor}


@router.get("/training_runs")
async def training_runs(http: Request, limit: int = PAGE, offset: int = 0) -> Any:
    runs = await _runs(tinker_of(http))
    page, cursor = _page(list(runs.values()), limit, offset)
    return {"training_runs": page, "cursor": cursor}


@router.get("/training_runs/{run}")
async def training_run(http: Request, run: str) -> Any:
    if (found := (await _runs(tinker_of(http))).get(run)) is None:
        raise SessionGoneError(f"there is no training run {echo(run)}", hint="GET /api/v1/training_runs lists them")
    return found


@router.get("/training_runs/{run}/checkpoints")
async def run_checkpoints(http: Request, run: str) -> Any:
    found = await asyncio.to_thread(tinker_of(http).checkpoints.list, run)
    return {"checkpoints": [each.public() for each in found]}


@router.delete("/training_runs/{run}/checkpoints/{kind}/{name}")
async def delete_checkpoint(http: Request, run: str, kind: str, name: str) -> Response:
    tinker = tinker_of(http)
    await tinker.delete(await asyncio.to_thread(tinker.checkpoints.find, f"tinker://{run}/{kind}/{name}"))
    return Response(status_code=204)


@router.put("/training_runs/{run}/checkpoints/{kind}/{name}/ttl")
async def set_ttl(http: Request, run: str, kind: str, name: str) -> Any:
    body, store = await read_body(http, bodies.Ttl), tinker_of(http).checkpoints
    return (await asyncio.to_thread(store.keep_for, f"tinker://{run}/{kind}/{name}", body.ttl_seconds)).public()


@router.post("/training_runs/{run}/checkpoints/{kind}/{name}/publish")
async def publish(http: Request, run: str, kind: str, name: str) -> Response:
    """Mark a checkpoint as published in the listings. The mark changes no access: a client with the server's key can
    read every checkpoint."""
    await asyncio.to_thread(tinker_of(http).checkpoints.publish, f"tinker://{run}/{kind}/{name}", True)
    return Response(status_code=204)


@router.delete("/training_runs/{run}/checkpoints/{kind}/{name}/publish")
async def unpublish(http: Request, run: str, kind: str, name: str) -> Response:
    await asyncio.to_thread(tinker_of(http).checkpoints.publish, f"tinker://{run}/{kind}/{name}", False)
    return Response(status_code=204)


@router.get("/training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls")
async def external_weights_urls(http: Request, run: str, kind: str, name: str) -> Any:
    link, names = await tinker_of(http).downloads.files(f"tinker://{run}/{kind}/{name}")
    urls = {each: _address(http, link, each) for each in names}
    return {"urls": urls, "expires": datetime.fromtimestamp(link.until, UTC).isoformat()}


@router.get("/training_runs/{run}/checkpoints/{kind}/{name}/archive")
async def archive(http: Request, run: str, kind: str, name: str) -> Response:
    """Say where the archive is, as packages up to 0.25 expect it: a redirection that they do not follow themselves."""
    link = await tinker_of(http).downloads.archive(f"tinker://{run}/{kind}/{name}")
    expires = formatdate(link.until, usegmt=True)
    return Response(status_code=302, headers={"location": _address(http, link, ARCHIVE), "expires": expires})


@router.get("/links/{token}/{name}")
async def download(http: Request, token: str, name: str) -> FileResponse:
    for server in opened(http):  # the secret says whose it is
        with suppress(CheckpointNotFoundError):
            found = cast("Tinker", server.more[NAME]).downloads.find(token, name)
            return FileResponse(found, media_type="application/octet-stream")
    raise CheckpointNotFoundError("there is nothing at this address any more", hint="ask for a new one")


@router.get("/billing/usage/checkpoints/current")
async def storage(http: Request) -> Any:
    """Count what checkpoints take on the disk. It costs what the disk costs."""
    sizes = [each.size_bytes for each in await asyncio.to_thread(tinker_of(http).checkpoints.list)]
    used = {"checkpoint_count": len(sizes), "size_bytes": sum(sizes), "size_gigabytes": sum(sizes) / 1e9}
    return {"data": [used] if sizes else []}


# ---- what has no meaning on a server of one's own ----
NOT_OFFERED = {
    "GET /billing/usage/events": ("nothing is billed here", "/metrics counts tokens and requests"),
    "GET /audit": ("no audit log is kept", "the server's log has its requests"),
    "PUT /sessions/{session}/project": ("there are no projects", "leave project_id out"),
    "POST /copy_weights": ("there are no projects to copy into", "load the path, and save it under a new name"),
    "GET /sessions/{session}/trace_export": ("sessions are not traced", "the server's log has its requests"),
    "POST /sessions/search": ("sessions are not kept after their end", "GET /api/v1/sessions lists those that live"),
    "POST /create_custom_loss": ("losses of your own run in the client", "use forward_backward_custom"),
    "POST /auth/token": ("there are no accounts", "send the server's key as TINKER_API_KEY=tml-<key>"),
    "GET /auth/apikey/me": ("there are no accounts", "`groupwise keys list` on the server's machine shows its keys"),
}


class NotOfferedError(GroupwiseError):
    """The route of Tinker's has no meaning on this server."""

    code, status, exit_code = "not_offered", 404, 2


def _refusing(route: str, why: str, hint: str) -> None:
    method, path = route.split()

    @router.api_route(path, methods=[method])
    async def refuse() -> None:
        raise NotOfferedError(f"{route.replace(' /', ' /api/v1/')} is not offered: {why}", hint=hint)


for _route, _why in NOT_OFFERED.items():
    _refusing(_route, *_why)


def _address(http: Request, link: Link, name: str) -> str:
    return f"{http.base_url}api/v1/links/{link.token}/{name}"


def _page(found: list[Any], limit: int, offset: int) -> tuple[list[Any], dict[str, int]]:
    limit, offset = max(1, min(limit, 1000)), max(0, offset)
    return found[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(found)}


async def _runs(tinker: Tinker) -> dict[str, dict[str, Any]]:
    """Return every run that has a checkpoint, and every model in training, the newest first."""
    runs: dict[str, dict[str, Any]] = {}
    owner = {"model_owner": "local", "is_lora": True, "base_model": tinker.models.base.name}
    for saved in await asyncio.to_thread(tinker.checkpoints.list):
        about = saved.public()
        first = {"training_run_id": saved.run, "lora_rank": saved.lora["rank"], "last_request_time": about["time"]}
        run = runs.setdefault(saved.run, {**owner, **first})
        run.setdefault("last_sampler_checkpoint" if saved.kind == SAMPLER_WEIGHTS else "last_checkpoint", about)
    for model in tinker.models.of():
        run = runs.setdefault(model.id, {**owner, "training_run_id": model.id, "lora_rank": model.lora["rank"]})
        run |= {"last_request_time": model.last_seen, "user_metadata": model.user_metadata}
    return runs
