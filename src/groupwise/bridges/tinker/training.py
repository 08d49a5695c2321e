"""Models of the Tinker wire: each an adapter being trained by the SDK's `TrainingService`, over the served base model.

    Models      makes, finds and drops them; their requests run in the order of their numbers
    Model       one of them: forward_backward, optim_step, save_weights, load_weights

They train in threads of the server's process, at a lower priority than what is served: each in one of its own where the
base is small, so that a micro-batch leaves room for others, and small micro-batches of several together
(`train.together`); else all in one, one call at a time. Nothing waits for them in the threads that all routes share.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from groupwise.bridges.tinker import schema as bodies
from groupwise.bridges.tinker.checkpoints import WEIGHTS, Checkpoint, TinkerCheckpoints, check_checkpoint_name
from groupwise.bridges.tinker.datums import (
    STABLE_REINFORCE,
    SampledMasks,
    datums_of,
    encode_output,
    loss_config,
    narrowed_runs,
    stand_in,
    widths_of,
    wire_metrics,
)
from groupwise.bridges.tinker.futures import Future, FutureResult, Futures, Turns, answer
from groupwise.bridges.tinker.json_requests import output_as_json
from groupwise.bridges.tinker.sessions import GO_ON, SessionGoneError
from groupwise.config.hub import model_path
from groupwise.config.lora import ALL_LINEAR, EXPERTS, LoraSpec
from groupwise.config.serve import ServeConfig
from groupwise.errors import ConfigError, ConflictError, OverloadedError, RequestError
from groupwise.model.image_tokens import vision_of
from groupwise.model.load import LoadedModel
from groupwise.model.targets import AdaptableModules
from groupwise.sdk import state
from groupwise.sdk.datums import Datum
from groupwise.sdk.losses import CROSS_ENTROPY, datum_loss, weights_of
from groupwise.sdk.pending import Pending
from groupwise.sdk.trainer import AdamParams, ForwardBackwardOutput, TrainingClient, TrainingService
from groupwise.server.errors import echo
from groupwise.store import files
from groupwise.train.together import JointPasses

ALPHA = 32.0  # of every adapter, whatever its rank
PLACE_S = 75.0  # a while more than a session that is gone is given
NICE = 10  # below what is served
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(eq=False)
class TrainedModel:
    """An adapter that a client trains, with its session and its request order. `client` is None until the adapter has
    been made."""

    id: str
    session: str
    lora: Mapping[str, Any]  # rank and targets
    turns: Turns
    user_metadata: dict[str, str] | None = None
    client: TrainingClient | None = None
    has_place: bool = False
    has_stand_in: bool = False  # another loss is trained than it asked for, and the log says so
    last_seen: float = field(default_factory=time.time)

    @property
    def trainer(self) -> TrainingClient:
        """Return the adapter's training client. Raises SessionGoneError if the adapter could not be made."""
        if self.client is None:
            raise SessionGoneError(f"the model {self.id} was not made", hint=GO_ON)
        return self.client


def lora_of(config: bodies.Lora | None) -> dict[str, Any]:
    """Rank and targets of the adapter that a client asks for. Raises RequestError."""
    config = config or bodies.Lora(rank=32)
    if not (config.train_attn or config.train_mlp):
        raise RequestError("train_attn and train_mlp are both false: there is nothing to train", field="lora_config")
    both = config.train_attn and config.train_mlp
    return {"rank": config.rank, "targets": "all-linear" if both else ATTENTION if config.train_attn else MLP}


def targets_of(lora: Mapping[str, Any], adaptable: AdaptableModules) -> str | tuple[str, ...]:
    """Return the modules of a model that an adapter changes: in a mixture the MLP is its experts, too, as Tinker's
    `train_mlp` has it."""
    targets = lora["targets"]
    if targets == ATTENTION or not any(adaptable.experts.values()):
        return targets if targets == ALL_LINEAR else tuple(targets)
    dense = [ALL_LINEAR] if targets == ALL_LINEAR else [name for name in MLP if adaptable.has(name)]
    return (*dense, EXPERTS)


def tokenizer_of(base: str) -> str:
    """Return the name by which a client on this machine can load the base model's tokenizer: the hub's, or a whole
    path.

    The package takes a name of three parts for one of the hub and leaves the last out, so that a path of three gets an
    empty one more.
    """
    path = Path(model_path(base))
    if not path.is_dir():
        return base
    text = str(path.absolute())
    return f"/{text}" if text.count("/") == 2 else text


def check_optimizer(optimizer: bodies.Optimizer | None) -> None:
    """Raise RequestError unless it is AdamW."""
    if optimizer is not None and optimizer.type != "adamw":
        hint = "leave optimizer_config out"
        raise RequestError(f"the optimizer {echo(optimizer.type)} is not here; adamw is", hint=hint)


def trains(lora: Mapping[str, Any], modules: Collection[str]) -> bool:
    """Return whether an adapter changes these modules."""
    return lora["targets"] == "all-linear" or set(modules) <= set(lora["targets"])


class Models:
    """All models of a server. At most `most` at once, each with an adapter and its optimizer in memory."""

    def __init__(
        self,
        base: LoadedModel,
        futures: Futures,
        checkpoints: TinkerCheckpoints,
        *,
        config: ServeConfig,
        make_room: Callable[[], Awaitable[None]],
    ):
        self.base, self.name, self.tokenizer = base, config.served_name, tokenizer_of(base.name)
        self._most, self._gap_s, self._make_room = config.tinker_models, config.tinker_gap_s, make_room
        self.masks = SampledMasks(most=config.tinker_mask_bytes)
        self._others = config.tinker_other_models
        self._threads, self._stable_reinforce = config.worker_threads, config.tinker_stable_reinforce
        self._passes = JointPasses(at_once=self._threads or torch.get_num_threads())
        self._futures, self._checkpoints = futures, checkpoints
        self._by_id: dict[str, TrainedModel] = {}
        self._shared: TrainingService | None = None
        self._making = ThreadPoolExecutor(1, "groupwise-tinker")  # makes a model after another

    # -- which -----------------------------------------------------------------------------------------------------

    def find(self, id: str) -> TrainedModel:
        """Raise SessionGoneError."""
        if (model := self._by_id.get(id)) is None:
            raise SessionGoneError(
                f"there is no model {echo(id)}: it ended, or the server was started anew", hint=GO_ON
            )
        model.last_seen = time.time()
        return model

    @property
    def are_full(self) -> bool:
        """Return whether as many are trained as may be."""
        return sum(model.has_place for model in self._by_id.values()) >= self._most

    def is_there(self, model: TrainedModel) -> bool:
        """Return whether its session lives."""
        return model.id in self._by_id

    def of(self, session: str | None = None) -> list[TrainedModel]:
        """Return those of a session, or all."""
        return [each for each in self._by_id.values() if session in (None, each.session)]

    def drop(self, session: str) -> None:
        """Let go of a session's models."""
        for model in self.of(session):
            model.turns.close()
            del self._by_id[model.id]
            if model.client is not None and model.client.service is not self._shared:
                model.client.service.close(wait=False)

    def close(self) -> None:
        """Finish what runs, and end the threads."""
        services = {model.client.service for model in self.of() if model.client is not None}
        for session in {model.session for model in self.of()}:
            self.drop(session)
        for service in services | ({self._shared} if self._shared else set()):
            service.close()
        self._making.shutdown(wait=False, cancel_futures=True)

    def check_base(self, name: str | None) -> None:
        """Raise RequestError unless `name` is the model that is served, the one whose adapters there are."""
        if name is not None and name != self.name and tokenizer_of(name) != self.tokenizer:
            hint = f"this server has {self.name!r} ({self.base.name})"
            if name in self._others:
                raise RequestError(
                    f"{name!r} is only sampled from (tinker_other_models)", hint=hint, field="base_model"
                )
            if self._others:
                hint += f"; to sample from also {', '.join(self._others)}"
            raise RequestError(f"there is no base model {echo(name)}", hint=hint, field="base_model")

    # -- requests --------------------------------------------------------------------------------------------------

    def create(
        self, session: str, number: int, lora: Mapping[str, Any], *, seed: int = 0, **options: Any
    ) -> dict[str, str]:
        """Return a fresh adapter, or one from a checkpoint (`load`, as `_load`'s arguments) -> the request's id."""
        id, load = f"{session}:train:{number}", options.pop("load", None)
        future, is_new = self._futures.begin(f"{id}:0")
        if not is_new:
            return {"request_id": future.id, "model_id": id}
        model = TrainedModel(id, session, lora, Turns(self._futures, gap_s=self._gap_s), **options)
        self._by_id[id] = model

        async def work() -> FutureResult:
            try:
                await self._take_place(model, future)
                model.client = await self._made(id, lora, seed=seed)
                if load is None:
                    return answer(type="create_model", model_id=id)
                return await self._load(model, **load)
            except BaseException:
                self._by_id.pop(id, None)
                raise

        model.turns.add(0, future, work)
        return {"request_id": future.id, "model_id": id}

    async def _take_place(self, model: TrainedModel, future: Future) -> None:
        """Wait for a place, for as long as a client that is gone may take to fall silent."""
        until = time.monotonic() + PLACE_S
        busy = f"{self._most} models are in training, as many as may be (tinker_models)"
        while self.is_there(model):
            if self.are_full:
                await self._make_room()
            if not self.are_full:
                model.has_place, future.paused = True, None
                return
            if time.monotonic() > until:
                hint = "end another client, start the server with more, or try again when one has ended"
                raise OverloadedError(busy, hint=hint)
            future.paused = busy
            await asyncio.sleep(min(1.0, PLACE_S))
        raise SessionGoneError("the session has ended", hint=GO_ON)

    def request(self, model: TrainedModel, number: int, work: Callable[[], Any], *, size: int = 0) -> dict[str, str]:
        """Run `work` when `number`'s turn comes -> the request's id."""
        due = number == model.turns.due
        future, is_new = self._futures.begin(f"{model.id}:{number}", size=size, due=due)
        if is_new:
            model.turns.add(number, future, work)
        return {"request_id": future.id, "model_id": model.id}

    async def forward_backward(self, model: TrainedModel, message: Any) -> FutureResult:
        """Return log-probabilities and, unless `forward_only`, a gradient that is added to what there is."""
        if stand_in(message, self._stable_reinforce) and not model.has_stand_in:
            model.has_stand_in = True
            log.warning("%s asks for %s, and trains %s", model.id, STABLE_REINFORCE, self._stable_reinforce)
        config, data, pending = await asyncio.to_thread(self._begun, model.trainer, message)
        told = await asyncio.to_thread(_told, message, data, config, await pending)
        return FutureResult(told, as_json=output_as_json)

    async def optim_step(self, model: TrainedModel, body: bodies.OptimStep) -> FutureResult:
        if (gap := model.turns.forgive()) is not None:
            await model.trainer.zero_grad()
            raise RequestError(
                f"{gap}, so that the batch may lack a part: no step was made, and the gradient is forgotten",
                hint="send the whole batch again",
            )
        if body.adam_params is None:
            kind = (body.optimizer_params or {}).get("type")
            raise RequestError(f"the optimizer {echo(kind)} is not here", hint="use AdamParams", field="optim_params")
        adam = AdamParams(**body.adam_params.model_dump())
        result = await model.trainer.optim_step(adam)
        metrics = {"grad_norm:mean": result.grad_norm, "refused:sum": float(not result.applied)}
        return answer(type="optim_step", metrics={name: v for name, v in metrics.items() if math.isfinite(v)})

    async def save_weights(self, model: TrainedModel, body: bodies.SaveWeights) -> FutureResult:
        name = body.path or f"{body.seq_id:06d}"
        check_checkpoint_name(name)
        if not body.overwrite and await asyncio.to_thread(self._checkpoints.exists, model.id, WEIGHTS, name):
            raise ConflictError(f"there is a checkpoint {name!r} of this run", hint="set overwrite, or another name")
        directory = await asyncio.to_thread(self._checkpoints.new_state, model.id, WEIGHTS, name)
        await self.in_training(model, lambda trainer: state.save(trainer.learner, directory, extra={}))
        saved = self.checkpoint(model, WEIGHTS, name, body, state=directory.name)
        await asyncio.to_thread(self._checkpoints.record, saved)
        return answer(type="save_weights", path=saved.path)

    async def load_weights(self, model: TrainedModel, body: bodies.LoadWeights) -> FutureResult:
        self.check_base(body.base_model)
        check_optimizer(body.optimizer_config)
        saved = await asyncio.to_thread(self._checkpoints.find_state, body.path)
        if saved.lora != dict(model.lora):
            raise ConflictError(f"{body.path} has an adapter of {saved.lora}, and the model {dict(model.lora)}")
        loaded = await self._load(model, saved=saved, optimizer=body.optimizer)
        model.turns.forgive()  # the gradient of which a part may be missing is forgotten
        return loaded

    def checkpoint(
        self,
        model: TrainedModel,
        kind: str,
        name: str,
        body: bodies.SaveWeights | bodies.SaveForSampler | bodies.SaveExternal,
        **more: Any,
    ) -> Checkpoint:
        """Return the record of a checkpoint."""
        return Checkpoint(
            run=model.id,
            kind=kind,
            name=name,
            base_model=self.base.name,
            lora=dict(model.lora),
            expires=None if body.ttl_seconds is None else time.time() + body.ttl_seconds,
            user_metadata=bodies.check_metadata(body.user_metadata),
            **more,
        )

    async def write_adapter(self, saved: Checkpoint, directory: Path) -> None:
        """Write the adapter of a state, as PEFT has it. Raises StorageError, and ConfigError for another base
        model's."""
        client = await self._made(f"{saved.path} to take away", saved.lora)

        def write() -> None:
            client.load_now(self._checkpoints.directory(saved))
            with files.writing(f"writing the adapter of {saved.path}"):
                directory.mkdir(parents=True)
                client.learner.save_adapter(directory)

        try:
            await client.service.submit(write)
        finally:
            if client.service is not self._shared:
                client.service.close(wait=False)

    async def in_training(self, model: TrainedModel, work: Callable[[TrainingClient], T]) -> T:
        """Run `work` between two of the model's requests, in the training thread."""
        trainer = model.trainer
        return await trainer.service.submit(lambda: work(trainer))

    async def _made(self, name: str, lora: Mapping[str, Any], *, seed: int = 0) -> TrainingClient:
        """Return a new policy, made behind those that are asked for already."""
        return await asyncio.wrap_future(self._making.submit(self._client, name, lora, seed=seed))

    # -- in threads ------------------------------------------------------------------------------------------------

    def _client(self, name: str, lora: Mapping[str, Any], *, seed: int = 0) -> TrainingClient:
        spec = LoraSpec(rank=lora["rank"], alpha=ALPHA, targets=targets_of(lora, self.base.adaptable))
        service = self._shared
        if service is None:
            service = TrainingService(self.base, threads=self._threads, passes=self._passes)
            service.submit(_lower_priority).result()
        try:
            client = service.create_training_client(name=name, lora=spec, seed=seed)
        except BaseException as error:
            if service is not self._shared:
                service.close()
            if isinstance(error, ConfigError) and spec.targets != "all-linear":
                kind = type(self.base.model).__name__
                wrong = f"{kind} does not name its attention and its MLP as Llama does ({', '.join(spec.targets)})"
                raise RequestError(wrong, hint="leave train_attn and train_mlp true") from None
            raise
        if not client.learner.computes_alone:
            self._shared = service
        return client

    async def _load(self, model: TrainedModel, *, saved: Checkpoint, optimizer: bool) -> FutureResult:
        directory = self._checkpoints.directory(saved)
        try:
            await self.in_training(model, lambda trainer: _load_state(trainer, directory, optimizer=optimizer))
        except ConfigError:
            raise ConflictError(
                f"{saved.path} was trained over {saved.base_model!r}, and this server has {self.base.name!r}",
                hint="serve the model that it was trained over",
            ) from None
        return answer(type="load_weights", path=saved.path, model_id=model.id)

    def _begun(
        self, trainer: TrainingClient, message: Any
    ) -> tuple[Mapping[str, float], list[Datum], Pending[ForwardBackwardOutput]]:
        """Return the loss's numbers, the data, and what is computed of them: no thread waits for it."""
        config, data = loss_config(message), self._datums(message)
        if message.forward_only:
            return config, data, trainer.forward(data)
        return config, data, trainer.forward_backward(data, message.loss_fn, config)

    def _datums(self, message: Any) -> list[Datum]:
        data = datums_of(message, vision=vision_of(self.base.tokenizer), most=self.base.context_length)
        if message.loss_fn == CROSS_ENTROPY:
            return data
        each = enumerate(zip(message.data, data, strict=True))
        return [
            self.masks.attach(datum, narrowed_runs(given, message.loss_fn, where=f"data[{i}]"))
            for i, (given, datum) in each
        ]


def _told(message: Any, data: Sequence[Datum], config: Mapping[str, float], output: ForwardBackwardOutput) -> bytes:
    """Return the answer to a request whose result is there."""
    rows = output.logprobs
    if not message.forward_only:
        metrics = _metrics(data, rows, message.loss_fn, config)
        told = wire_metrics(metrics, loss=output.metrics.get("loss/policy", 0.0))
        return encode_output(rows, told, widths_of(message))
    if message.loss_fn == CROSS_ENTROPY:
        weights = [datum.loss_fn_inputs["weights"] for datum in data]
        loss = -sum(w * p for row, ws in zip(rows, weights, strict=True) for p, w in zip(row, ws, strict=True) if w)
    else:
        loss = float(datum_loss(data, [torch.tensor(row) for row in rows], message.loss_fn, config)[0])
    return encode_output(rows, wire_metrics({}, loss=loss), widths_of(message))


def _metrics(
    data: Sequence[Datum], logprobs: Sequence[Sequence[float]], loss: str, config: Mapping[str, float]
) -> dict[str, float]:
    """Return those of what weighs something: the mask of the wire has the prompt's part too, whatever it was filled
    with."""
    weights = weights_of(loss)
    counted = [[bool(w and m) for w, m in zip(d.loss_fn_inputs[weights], d.mask, strict=True)] for d in data]
    if not any(map(any, counted)):
        return {}
    return datum_loss(data, [torch.tensor(row) for row in logprobs], loss, config, counted=counted)[1]


def _load_state(trainer: TrainingClient, directory: Path, *, optimizer: bool) -> None:
    trainer.load_now(directory)
    if not optimizer:  # its moments restart from zero
        trainer.learner.optimizer.state.clear()


def _lower_priority() -> None:
    """Lower the priority of the thread that trains: what is served comes first. Threads that torch starts from it are
    as patient."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
