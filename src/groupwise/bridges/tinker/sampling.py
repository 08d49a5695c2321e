"""Sampling over the Tinker wire: from the base model, from a checkpoint, or from a snapshot of a model in training.

    Samplers.create      a sampling session: which weights
    Samplers.snapshot    a model's weights as they are now, as their own version, which training does not change
    Samplers.sample      completions, and log-probabilities of the prompt

A snapshot under a name is a version in the server's adapter store, and chats can name it. One without is for its
sampling session only, and goes with it, or when newer ones have been sampled from since (`tinker_snapshots`).
Completions of all of them are decoded together, and with those of chats.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from groupwise.bridges.tinker import schema as bodies
from groupwise.bridges.tinker.checkpoints import SAMPLER_WEIGHTS, TinkerCheckpoints, check_checkpoint_name
from groupwise.bridges.tinker.chunks import chunks_of_body, written_out
from groupwise.bridges.tinker.datums import sequence_ids
from groupwise.bridges.tinker.futures import FutureResult, Futures, answer
from groupwise.bridges.tinker.json_requests import samples_as_json
from groupwise.bridges.tinker.proto import FLOAT32, LENGTH, STOP, SampleResponse
from groupwise.bridges.tinker.sessions import GO_ON, SessionGoneError
from groupwise.bridges.tinker.training import Models, TrainedModel, tokenizer_of
from groupwise.config.serve import ServeConfig
from groupwise.engine.local import LocalEngine
from groupwise.errors import ConflictError, DeadlineError, GroupwiseError, OverloadedError, RequestError
from groupwise.model.image_tokens import is_of_image, vision_of
from groupwise.model.load import load_model
from groupwise.sampler import LiveEngine
from groupwise.sdk.trainer import TrainingClient
from groupwise.server.errors import echo
from groupwise.server.generate import Generation
from groupwise.server.images import folder_of
from groupwise.server.policies import Policies
from groupwise.server.sampling import ScoreThreads
from groupwise.server.state import Parts
from groupwise.store.adapters import AdapterStore
from groupwise.store.files import Provenance
from groupwise.types import Completion, FinishReason, PolicyVersion, SamplingParams, SamplingRequest

if TYPE_CHECKING:
    from groupwise.model.vision import Vision

NO_TOKEN, NO_LOGPROB = 0, -99999.0  # where a place has fewer alternatives than were asked for
SNAPSHOT, INFLIGHT = "snapshot", "inflight"
WAIT_S = 0.2  # between attempts to load an adapter while all places are in use

log = logging.getLogger(__name__)

Top = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class SampledModel:
    """A base model that is sampled from: its engine, its policies, its eyes, and the name by which clients load its
    tokenizer."""

    engine: LiveEngine
    policies: Policies
    vision: Vision | None
    tokenizer: str


@dataclass(eq=False)
class SamplingSession:
    """A sampling session. `version` changes for `inflight` ones only, which follow their model. `used` is when it was
    last sampled from (monotonic), `removed` whether its snapshot gave way to newer ones."""

    id: str
    session: str
    engine: LiveEngine
    policies: Policies
    vision: Vision | None
    version: PolicyVersion
    base_model: str  # by which the client loads the tokenizer
    model_path: str | None = None
    model: str | None = None  # whose snapshot it is
    follows: bool = False
    used: float = field(default_factory=time.monotonic)
    running: int = 0  # requests
    removed: bool = False


class Samplers:
    """All sampling sessions of a server."""

    def __init__(self, parts: Parts, models: Models, futures: Futures, checkpoints: TinkerCheckpoints, *, root: Path):
        self._parts, self._models, self._futures, self._checkpoints = parts, models, futures, checkpoints
        shutil.rmtree(root / "snapshots", ignore_errors=True)  # of sessions of another process
        self._store = AdapterStore(root / "snapshots")
        self._snapshots = Policies(
            self._store,
            parts.engine,
            base=parts.base,
            served_name=parts.config.served_name,
            max_loaded=parts.config.max_loaded_adapters,
        )
        self._served = _served(parts)
        self._scoring = ScoreThreads()
        self.others = _other_models(parts, self._store)
        self._by_id: dict[str, SamplingSession] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    # -- which weights ---------------------------------------------------------------------------------------------

    def find(self, id: str | None) -> SamplingSession:
        """Raise SessionGoneError."""
        if (sampler := self._by_id.get(id or "")) is None:
            raise SessionGoneError(f"there is no sampling session {echo(id)}", hint=GO_ON)
        return sampler

    def of(self, session: str) -> list[str]:
        return [each.id for each in self._by_id.values() if each.session == session]

    async def create(self, body: bodies.CreateSampler) -> SamplingSession:
        """Make a sampler of the base model or a checkpoint. Raises RequestError, CheckpointNotFoundError,
        AdapterNotFoundError."""
        id = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
        if id in self._by_id:
            return self._by_id[id]
        other = self.others.get(body.base_model or "") if body.model_path is None else None
        if other is None:
            self._models.check_base(body.base_model)
            other = self._served
        version = PolicyVersion.base()
        if body.model_path is not None:
            found = await asyncio.to_thread(self._checkpoints.find_sampler, body.model_path)
            version = other.policies.resolve(adapter=found.version)
        sampler = SamplingSession(
            id, body.session_id, other.engine, other.policies, other.vision, version, other.tokenizer, body.model_path
        )
        return self._by_id.setdefault(id, sampler)

    async def snapshot(self, model: TrainedModel, body: bodies.SaveForSampler) -> FutureResult:
        """Return the model's weights as they are now, under a name or for a sampling session."""
        if body.kind not in (SNAPSHOT, INFLIGHT):
            raise RequestError(f"kind is {echo(body.kind)}; it is {SNAPSHOT} or {INFLIGHT}", field="kind")
        if body.path is not None:
            check_checkpoint_name(body.path)
            if await asyncio.to_thread(self._checkpoints.exists, model.id, SAMPLER_WEIGHTS, body.path):
                raise ConflictError(f"there is a checkpoint {body.path!r} of this run", hint="choose another name")
        elif body.sampling_session_seq_id is None:
            raise RequestError("there is neither a path nor a sampling_session_seq_id", field="path")
        version = await self._published(model, named=body.path is not None)
        path = await self._recorded(model, body, version) if body.path is not None else None
        policies, id = (self._snapshots if path is None else self._parts.policies), None
        if body.sampling_session_seq_id is not None:
            id = f"{model.session}:sample:{body.sampling_session_seq_id}"
            base = self._served
            made = SamplingSession(id, model.session, base.engine, policies, base.vision, version, base.tokenizer, path)
            made.model, made.follows = model.id, body.kind == INFLIGHT
            if not self._models.is_there(model):
                await self._discard(made)
                raise SessionGoneError("the session has ended", hint=GO_ON)
            self._by_id[id] = made
        if body.kind == INFLIGHT:
            await self._follow(model.id, policies, version)
        await self._make_room(model.id)
        return answer(type="save_weights_for_sampler", path=path, sampling_session_id=id)

    async def drop(self, session: str) -> None:
        """Let go of a session's sampling sessions, of what they sample, and of their snapshots."""
        for id in self.of(session):
            running = [task for request, task in self._tasks.items() if request.startswith(f"{id}:")]
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            if not (gone := self._by_id.pop(id)).removed:
                await self._discard(gone)

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        self._scoring.close()
        self._snapshots.close()
        for other in self.others.values():
            if other.engine is not self._parts.engine:
                other.policies.close()
                other.engine.close()

    # -- samples ---------------------------------------------------------------------------------------------------

    def submit(self, body: bodies.SampleBody) -> dict[str, Any]:
        """Begin to sample -> the request's id and those of its sequences. Raises RequestError, OverloadedError."""
        sampler = self.find(body.sampling_session_id)
        if sampler.removed:
            most = self._parts.config.tinker_snapshots
            raise SessionGoneError(
                f"the snapshot of {sampler.id} is gone: {most} others were sampled from since (tinker_snapshots)",
                hint="keep one for longer under a name: save_weights_for_sampler, then create_sampling_client",
            )
        if body.seq_id is None:
            raise RequestError("seq_id is missing", field="seq_id")
        if body.num_samples > self._parts.config.max_n:
            most = self._parts.config.max_n
            raise RequestError(f"num_samples is {body.num_samples}; the most is {most} (max_n)", field="num_samples")
        id = f"{sampler.id}:{body.seq_id}"
        size = body.prompt.held
        if body.target_prompt_logprobs is not None:
            size += bodies.HELD_BY_TOKEN * len(body.target_prompt_logprobs.data)
        future, is_new = self._futures.begin(id, size=size)
        if is_new:
            settled = self._futures.settle(future, lambda: self._sample(sampler, body))
            self._tasks[id] = task = asyncio.create_task(settled)
            sampler.running += 1
            sampler.used = time.monotonic()
            task.add_done_callback(lambda _: self._ended(id, sampler))
        given = body.sampling_params
        narrowed = given.temperature > 0 and (given.top_p < 1 or given.top_k > 0)
        sequences = sequence_ids(id, body.num_samples, narrowed=narrowed)
        return {"request_id": id, "sample_sequence_ids": sequences}

    def _ended(self, id: str, sampler: SamplingSession) -> None:
        self._tasks.pop(id, None)
        sampler.running -= 1
        sampler.used = time.monotonic()

    def cancel(self, id: str) -> None:
        """Sample no more for this request, if it still runs."""
        if (task := self._tasks.get(id)) is not None:
            task.cancel()

    async def _sample(self, sampler: SamplingSession, body: bodies.SampleBody) -> FutureResult:
        seconds = self._parts.config.request_timeout_s
        try:
            async with asyncio.timeout(seconds):
                request = await asyncio.to_thread(self._request, sampler, body)
                while True:
                    try:
                        return await self._sampled(sampler, body, request)
                    except OverloadedError:  # as many adapters as may be loaded are in use
                        await asyncio.sleep(WAIT_S)
        except TimeoutError as error:
            message = f"the samples were not whole after {seconds:g} seconds (request_timeout_s)"
            raise DeadlineError(message, hint="ask for fewer or shorter ones at once") from error

    async def _sampled(
        self, sampler: SamplingSession, body: bodies.SampleBody, request: Callable[[PolicyVersion], SamplingRequest]
    ) -> FutureResult:
        version = None if sampler.version.is_base else str(sampler.version)
        async with sampler.policies.lease(adapter=version or "base") as leased:
            asked = request(leased)
            scored = await self._scoring.run(partial(_scored, sampler.engine, body, asked))
            completions = await self._completions(sampler.engine, asked, scored=scored is not None)
        for completion in completions:
            self._models.masks.remember(asked.prompt_ids, completion)
        return FutureResult(await asyncio.to_thread(encode_samples, completions, scored, body), as_json=samples_as_json)

    async def _completions(self, engine: LiveEngine, asked: SamplingRequest, *, scored: bool) -> Sequence[Completion]:
        """Return the completions; where a prompt that is to be scored leaves no room, they are empty and cut."""
        if scored and len(asked.prompt_ids) == engine.context_length:
            cut = {"text": "", "finish_reason": FinishReason.LENGTH, "version": asked.version}
            return [Completion(token_ids=(), logprobs=(), **cut)] * asked.n
        generation = Generation(engine, [asked], timeout_s=self._parts.config.request_timeout_s)
        try:
            (completions,) = await generation.completions()
        finally:
            generation.cancel()
        return completions

    def _request(self, sampler: SamplingSession, body: bodies.SampleBody) -> Callable[[PolicyVersion], SamplingRequest]:
        """Return what the engine is asked for, but for the version. Raises RequestError for what is not supported."""
        given, config = body.sampling_params, self._parts.config
        _check_supported(body, config)
        pieces, most = chunks_of_body(body.prompt.chunks, "prompt"), sampler.engine.context_length
        ids = tuple(written_out(pieces, sampler.vision, where="prompt", most=most))
        if body.prompt_logprobs_last_n is not None:
            _check_last(body.prompt_logprobs_last_n, body, tokens=len(ids))
        stops = (given.stop,) if isinstance(given.stop, str) else given.stop or ()
        try:
            params = SamplingParams(
                max_tokens=given.max_tokens or config.max_tokens_default,
                temperature=given.temperature,
                top_p=given.top_p,
                top_k=max(given.top_k, 0),
                stop=tuple(stop for stop in stops if isinstance(stop, str)),
                stop_ids=tuple(stop for stop in stops if isinstance(stop, int)),
                seed=given.seed,
                ignore_eos=given.stop == (),
                top_logprobs=body.topk_sample_logprobs,
            )
        except ValueError as error:
            raise RequestError(str(error), field="sampling_params") from None
        return lambda version: SamplingRequest(prompt_ids=ids, params=params, n=body.num_samples, version=version)

    # -- snapshots -------------------------------------------------------------------------------------------------

    async def _published(self, model: TrainedModel, *, named: bool) -> PolicyVersion:
        """Return the model's weights as a new version, in the server's store or in that of snapshots. One engine has
        both, so that their names differ."""
        base, store = self._models.base, self._parts.store if named else self._store
        name = f"{'tinker' if named else 'snapshot'}-{hashlib.sha256(model.id.encode()).hexdigest()[:12]}"

        def publish(trainer: TrainingClient) -> PolicyVersion:
            info = Provenance(
                base_model=base.name, base_hash=base.hash, quantization=base.quantization, step=trainer.learner.steps
            )
            return store.publish(name, trainer.learner.save_adapter, info=info)

        return await self._models.in_training(model, publish)

    async def _recorded(self, model: TrainedModel, body: bodies.SaveForSampler, version: PolicyVersion) -> str:
        assert body.path is not None
        size = sum(each.stat().st_size for each in self._parts.store.path(version).iterdir())
        saved = self._models.checkpoint(model, SAMPLER_WEIGHTS, body.path, body, version=str(version), size_bytes=size)
        try:
            await asyncio.to_thread(self._checkpoints.record, saved)
        except GroupwiseError:  # a version that no checkpoint names would stay for good
            recorded = await asyncio.to_thread(self._checkpoints.list, model.id)
            if saved.version not in [each.version for each in recorded]:
                with suppress(GroupwiseError):
                    await self._parts.policies.delete([version])
            raise
        return saved.path

    async def _follow(self, model: str, policies: Policies, version: PolicyVersion) -> None:
        """Have samplers that follow the model sample from `version` from now on."""
        for sampler in [each for each in self._by_id.values() if each.follows and each.model == model]:
            if sampler.version != version:
                before = replace(sampler)
                sampler.policies, sampler.version = policies, version
                await self._discard(before)

    async def _make_room(self, model: str) -> None:
        """Remove the model's snapshots that were used longest ago, but for those that are being sampled from."""
        own = [each for each in self._by_id.values() if each.model == model and each.policies is self._snapshots]
        there = [each for each in own if not each.follows and not each.removed]
        surplus = max(len(there) - self._parts.config.tinker_snapshots, 0)
        idle = sorted((each for each in there if not each.running), key=lambda each: each.used)
        for sampler in idle[:surplus]:
            sampler.removed = True  # no new sampling begins from it
            sampler.removed = await self._discard(sampler)

    async def _discard(self, gone: SamplingSession) -> bool:
        """Remove a snapshot that no session samples from any more. Return whether it is gone."""
        others = (each for each in self._by_id.values() if each is not gone and not each.removed)
        used = any(each.version == gone.version and each.policies is gone.policies for each in others)
        if gone.policies is self._snapshots and not used:
            try:
                await self._snapshots.delete([gone.version])
            except GroupwiseError as error:  # it goes at the next start
                log.warning("the snapshot %s was not removed: %s", gone.version, error)
                return False
        return True


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities (nats) of a prompt: of each of its tokens (NaN where not asked for, and of images), of the
    likeliest in their places, and of every id in the request's `target_prompt_logprobs` (0 for -1)."""

    logprobs: Sequence[float]
    top: Sequence[Top]
    targets: Any


def _scored(engine: LiveEngine, body: bodies.SampleBody, asked: SamplingRequest) -> PromptScores | None:
    """Return what was asked for of the prompt, from one forward. Raises RequestError: target_prompt_logprobs is
    wrong."""
    ids, given, last = asked.prompt_ids, body.target_prompt_logprobs, 0
    if body.prompt_logprobs or body.topk_prompt_logprobs:
        last = body.prompt_logprobs_last_n or len(ids) - 1
    elif given is None:
        return None
    first = len(ids) - last
    place_C, id_C = _target_cells(given, len(ids), engine.vocabulary)
    asked_C = id_C >= 0
    cells = place_C[asked_C].tolist(), id_C[asked_C].tolist()
    scores = engine.score_sequence(ids, asked.version, first=first, top=body.topk_prompt_logprobs, cells=cells)
    targets_C = np.zeros(len(id_C), "<f4")
    targets_C[asked_C] = scores.cells
    logprobs = [math.nan if is_of_image(ids[first + i]) else each for i, each in enumerate(scores.logprobs)]
    return PromptScores([*[math.nan] * first, *logprobs], [*[()] * first, *scores.top], targets_C)


def _target_cells(given: bodies.TargetIds | None, tokens: int, vocabulary: int) -> tuple[Any, Any]:
    """Return the places in a prompt of `tokens` tokens and the ids that are listed for them, both [C], in the order of
    `data`;
    -1 asks for nothing. Raises RequestError: the shape is not that of the prompt, or an id is not of the model."""
    if given is None:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    name, (rows, width) = "target_prompt_logprobs", given.shape
    if rows != max(tokens - 1, 0):
        raise RequestError(
            f"{name} has the shape {[rows, width]}; of a prompt of {tokens} tokens it is [{max(tokens - 1, 0)}, K]",
            hint="give a row for each token but the first, with -1 where nothing is asked for",
            field=name,
        )
    id_C, ends, columns = np.asarray(given.data, np.int64), given.sparse_crow_indices, given.sparse_col_indices
    if ends is None and columns is None:
        row_C = np.repeat(np.arange(rows), width) if len(id_C) == rows * width else None
    else:
        row_C = _rows_of_csr(ends or (), columns or (), shape=given.shape, count=len(id_C))
    if row_C is None:
        raise RequestError(
            f"{name} has {len(id_C)} ids, which with its indices make no tensor of shape {[rows, width]}",
            hint="send what TensorData.from_torch or TensorData.from_torch_sparse makes",
            field=name,
        )
    if len(id_C) and (worst := int(id_C.max())) >= vocabulary:
        raise RequestError(
            f"{name} has the token id {worst}; this model has the ids 0 to {vocabulary - 1}, and -1 asks for nothing",
            hint="encode the targets with this model's tokenizer",
            field=name,
        )
    return row_C + 1, id_C


def _rows_of_csr(ends: Sequence[int], columns: Sequence[int], *, shape: tuple[int, int], count: int) -> Any:
    """Return the row of each of `count` values of a compressed sparse row tensor, or None where its indices are not of
    one."""
    end_R, column_C = np.asarray(ends, np.int64), np.asarray(columns, np.int64)
    lengths_R = np.diff(end_R)
    counted = len(end_R) == shape[0] + 1 and end_R[0] == 0 and end_R[-1] == len(column_C) == count
    if not counted or (lengths_R < 0).any() or (column_C >= shape[1]).any():
        return None
    row_C = np.repeat(np.arange(shape[0]), lengths_R)
    is_ordered = (np.diff(row_C) > 0) | (np.diff(column_C) > 0)  # each column of a row once, as torch has it
    return row_C if is_ordered.all() else None


def _served(parts: Parts) -> SampledModel:
    """Return the model that is served."""
    name, vision = tokenizer_of(parts.base.name), vision_of(parts.base.tokenizer)
    return SampledModel(parts.engine, parts.policies, vision, name)


def _other_models(parts: Parts, store: AdapterStore) -> dict[str, SampledModel]:
    """Return the models of `tinker_other_models`, by the names that clients ask for; `store` has no adapter of theirs.

    Raises ModelError, EngineError: one cannot be loaded, or sampled from.
    """
    config, others, served = parts.config, dict[str, SampledModel](), _served(parts)
    by_source = {config.model: served, served.tokenizer: served}
    for name, source in config.tinker_other_models.items():
        if (found := by_source.get(source) or by_source.get(tokenizer_of(source))) is None:
            base = load_model(source, device=config.device, dtype=config.dtype)
            engine = LocalEngine(base, max_rows=config.batch_rows, prefix_cache_mb=config.prefix_cache_mb)
            policies = Policies(store, engine, base=base, served_name=name)
            if (vision := vision_of(base.tokenizer)) is not None:
                vision.keep_in(folder_of(config))
            found = by_source[source] = SampledModel(engine, policies, vision, tokenizer_of(source))
        others[name] = found
    return others


def _check_supported(body: bodies.SampleBody, config: ServeConfig) -> None:
    most_top, stability = config.max_top_logprobs, bool(body.record_stability_info)
    unsupported = {
        "prompt_alt_tokens_k": (body.prompt_alt_tokens_k > 0, "ask for topk_prompt_logprobs"),
        "record_stability_info": (  # the loss that stands in for stable_reinforce reads none
            stability and config.tinker_stable_reinforce is None,
            "train with importance_sampling or cispo, or start the server with tinker_stable_reinforce",
        ),
    }
    for name, (asked, hint) in unsupported.items():
        if asked:
            raise RequestError(f"{name} is not supported", hint=hint, field=name)
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        if getattr(body, name) > most_top:
            limit = f"the most is {most_top} (max_top_logprobs)"
            raise RequestError(f"{name} is {getattr(body, name)}; {limit}", field=name)


def _check_last(last: int, body: bodies.SampleBody, *, tokens: int) -> None:
    """Raise RequestError unless there are log-probabilities of this many tokens of a prompt to tell."""
    name = "prompt_logprobs_last_n"
    if not body.prompt_logprobs and not body.topk_prompt_logprobs:
        raise RequestError(f"{name} is {last} and needs prompt_logprobs", hint="ask for both", field=name)
    if last >= tokens:
        valid = f"1 to {tokens - 1}" if tokens > 1 else "none, as the first token has no log-probability"
        raise RequestError(f"{name} is {last}; of a prompt of {tokens} tokens it is {valid}", field=name)


# ---- the answer ----
def encode_samples(completions: Sequence[Completion], scored: PromptScores | None, body: bodies.SampleBody) -> bytes:
    """Return a SampleResponse."""
    message = SampleResponse()
    for completion in completions:
        reason = LENGTH if completion.finish_reason == FinishReason.LENGTH else STOP
        sequence = message.sequences.add(stop_reason=reason, tokens=np.asarray(completion.token_ids, "<i4").tobytes())
        sequence.logprobs = np.asarray(completion.behaviour_logprobs, "<f4").tobytes()
        if body.topk_sample_logprobs:
            _encode_top(sequence.topk_sampled_logprobs, completion.top_logprobs, body.topk_sample_logprobs)
    if scored is not None and body.prompt_logprobs:
        message.prompt_logprobs = np.asarray(scored.logprobs, "<f4").tobytes()
    if scored is not None and body.topk_prompt_logprobs:
        _encode_top(message.topk_prompt_logprobs, scored.top, body.topk_prompt_logprobs)
    if scored is not None and body.target_prompt_logprobs is not None:
        _encode_targets(message.target_prompt_logprobs, scored.targets, body.target_prompt_logprobs)
    return message.SerializeToString()


def _encode_targets(message: Any, values_C: Any, given: bodies.TargetIds) -> None:
    """Log-probabilities in the shape and layout of the ids that were asked for."""
    message.dtype, raw = FLOAT32, values_C.tobytes()
    message.shape.extend(given.shape)
    if given.sparse_crow_indices is None:
        message.dense = raw
        return
    message.sparse_csr.values = raw
    message.sparse_csr.crow_indices = np.asarray(given.sparse_crow_indices, "<i8").tobytes()
    message.sparse_csr.col_indices = np.asarray(given.sparse_col_indices, "<i8").tobytes()


def _encode_top(message: Any, rows: Sequence[Top], k: int) -> None:
    """Encode rows of (id, log-probability), likeliest first, each padded to `k`."""
    filled = [[*row, *[(NO_TOKEN, NO_LOGPROB)] * (k - len(row))][:k] for row in rows]
    message.token_ids = np.asarray([[id for id, _ in row] for row in filled], "<i4").tobytes()
    message.logprobs = np.asarray([[logprob for _, logprob in row] for row in filled], "<f4").tobytes()
    message.k, message.length = k, len(filled)
