"""The in-process engine: continuous batching over one torch model, on a CPU or a GPU.

    submit -> waiting -> admit (a prompt runs ONCE, for all its completions) -> decode, decode, ... -> finished

Requests wait in order, interactive ones first, and each is given rows as soon as enough are free. A `Decoder` does the
rest: that of the packed forward (`packed`) or, for models that it cannot run, one that runs any model by its own
forward (`plain`). On a CPU there are several decoders, *lanes*, each in its own thread with its share of torch's,
and as many are used as the work at hand pays for: an operation that is shared out among threads ends when the last of
them has been given a core, and a step is hundreds of operations (docs/performance.md has what it brings).

A lane's thread owns its decoder; `submit` hands requests to the lane with the fewest completions to make, and returns
futures. Requests submitted together to an idle engine come to the same lanes, and are admitted together and in order,
so a seeded batch is reproducible bit for bit. Cancelling a future frees its rows before the next token.

An error inside fails the requests at hand, and the engine continues; one after which the device is lost to the process
(`model.lost_device`) fails all that ever come, and `lost` says so: a server ends then and is started again.

Interactive requests have their own lanes, and while there are any the other lanes pause for most of the time: a
batch loses the time in which interactive requests run, and these are hardly slower for the batch. With one decoder for
all (on a GPU, in compiled code, by the model's own forward) both share its steps.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupwise.engine.cpu_weights import check_rounded
from groupwise.engine.decoder import PREFILL_TOKENS, Decoder, EngineModel, Queue, RowBudget
from groupwise.engine.grammar import GrammarCompiler
from groupwise.engine.multi_lora import AdapterWeights, add_adapters, read_adapter
from groupwise.engine.packed import PackedDecoder
from groupwise.engine.plain import PlainDecoder
from groupwise.engine.prefix_cache import PrefixCache
from groupwise.engine.rows import PendingRequest
from groupwise.engine.sampling import scaled_logprobs
from groupwise.errors import (
    AdapterNotFoundError,
    ConfigError,
    ContextLengthError,
    DeviceLostError,
    EngineError,
    GroupwiseError,
    ModelError,
)
from groupwise.model.activations import ModelSize
from groupwise.model.image_tokens import is_of_image, vision_of
from groupwise.model.load import LoadedModel, share_weights, widest_float
from groupwise.model.lost_device import lost_device
from groupwise.model.memory import CACHE_SHARE, cache_token_bytes
from groupwise.model.packed_check import PLAIN_COST, look, turn_plain, why_not_cached, why_twin_not_packed
from groupwise.model.recurrent_layers import is_recurrent
from groupwise.model.transfer import on_device
from groupwise.pictures import Picture
from groupwise.platform import trim_memory
from groupwise.sampler import Scores, TokenSink
from groupwise.types import Completion, Grammar, PolicyVersion, SamplingParams, SamplingRequest, SequenceScores

SCORED_AT_ONCE = 512  # positions: their logits, [positions, vocabulary], exist at the same time
LANE_FLOPS, LANE_ROWS = 4e8, 4  # of a step of a lane, at least
REST_S = 20.0  # without work, a lane keeps the memory of its rows so long
BATCH_PAUSE_FACTOR = 4.0  # pause of a batch lane, in durations of its last step, while interactive requests run


@dataclass(eq=False)
class DecoderLane:
    """A decoder and its work. `load` counts submitted completions that are not done. `free_when_starved` is how many
    rows were free when the lane got none; None while it has rows, or has not asked since. `paused_until` is the time
    (`time.monotonic`) when its pause for interactive requests ends."""

    decoder: Decoder
    urgent: Queue = field(default_factory=deque)
    waiting: Queue = field(default_factory=deque)
    calls: deque[tuple[Callable[[], Any], Future[Any]]] = field(default_factory=deque)
    load: int = 0
    free_when_starved: int | None = None
    paused_until: float = 0.0


@dataclass(eq=False)
class Lanes:
    """Lanes for one kind of requests, which share torch's threads. Requests are handed to the first `used` now."""

    every: list[DecoderLane] = field(default_factory=list)
    used: int = 1

    @property
    def load(self) -> int:
        return sum(lane.load for lane in self.every)


NO_TURNS = nullcontext()  # for an engine that computes alone in its process


@dataclass(frozen=True)
class Replaced:
    """The version that samples in the place of another (`LocalEngine.replace`), and its weights."""

    version: PolicyVersion
    weights: AdapterWeights | None
    recompute: bool


@cache
def _owner_apart(apart: str) -> object:
    """Return whose conversations with the base model are those of requests with this `apart`."""
    return object()


class LocalEngine(Scores):
    """Samples from a `LoadedModel` and any number of adapter versions over it; a `Sampler`.

    Args:
        base: the model; the engine works on its own module tree over the same weights.
        max_rows: the most completions decoded at once, if `cache_bytes` has room for them.
        cache_bytes: bytes of keys and values, for all lanes together, in the packed forward only. A request waits if
            the requests in flight could need the rest before they end; a request alone is never refused. None: on a GPU
            half of the memory that is free now, on a CPU as much as `max_rows` need.
        reserved_rows: the number of rows that only interactive requests may use.
        paced_rows: the number of rows that batches may use while interactive requests run (`RowBudget`); None: all
            others.
        prefix_cache_mb: MiB of keys and values kept after requests that asked for it (`SamplingRequest.cache`).
        draft_tokens: the most tokens of a row that are guessed and checked in one step (`lookup`); 0: no guesses.
        compile: compile the dense parts of decode steps (`compiled`); a warning says if that is not possible. None: on
            a CUDA GPU, for models that can be compiled.
        dtype: multiply with the base's linear layers rounded to `bfloat16` or `int8` (`rounded`); None: unrounded.
        threads: torch's threads, for all lanes together. None: torch's own number.
        record_routing: for a mixture, record the experts of each token (`Completion.routed_experts`).
        turns: entered for each step of a decoder, if other engines and learners share the processors with this one.
        lanes: the most decoders that run at the same time, and as many for interactive requests. None: as many as
            threads, on a CPU in packed rows.

    Warns if there are no drafts, no compiled steps and no kept conversations: with recurrent layers
    (`model.recurrence`), and if the model can only run by its own forward (`packed_check.why_not_packed`).

    Raises:
        ConfigError: reserved_rows, paced_rows, lanes or draft_tokens is out of range, or dtype cannot be had here, or
            with compile.
        ModelError: the model's logits are not those of its LM head on its last hidden states.
    """

    def __init__(
        self,
        base: LoadedModel,
        *,
        max_rows: int = 256,
        reserved_rows: int = 0,
        paced_rows: int | None = None,
        prefix_cache_mb: int = 1024,
        draft_tokens: int = 0,
        compile: bool | None = None,
        dtype: str | None = None,
        threads: int | None = None,
        lanes: int | None = None,
        record_routing: bool = False,
        cache_bytes: int | None = None,
        turns: AbstractContextManager[object] = NO_TURNS,
    ):
        if not 0 <= reserved_rows < max_rows:
            raise ConfigError(f"reserved_rows is {reserved_rows}; it must be at least 0 and less than {max_rows}")
        if paced_rows is not None and paced_rows < 1:
            raise ConfigError(f"paced_rows is {paced_rows}; it must be at least 1")
        if lanes is not None and not 1 <= lanes <= max_rows:
            raise ConfigError(f"lanes is {lanes}; it must be 1 to max_rows, which is {max_rows}")
        if dtype is not None:
            check_rounded(dtype, base.model)
            if compile:
                raise ConfigError("dtype cannot be had with compile: compiled steps take weights in float32")
        self._base, self._model, self._turns = base, share_weights(base.model), turns
        self.max_rows, self.reserved_rows = max_rows, reserved_rows
        why = why_twin_not_packed(base, self._model)
        self.packed = why is None
        look(self._model, why)
        self._budget = RowBudget(max_rows, reserved_rows, paced_rows)
        if dtype is not None and why is not None:
            raise ConfigError(f"rollout.dtype={dtype} cannot be had: {why}", hint="leave it out", field="rollout.dtype")
        self._shared = EngineModel(
            base,
            self._model,
            self._budget,
            hooked=not self.packed,
            records=record_routing,
            dtype=dtype,
            compiled=bool(compile),
        )
        self._adapters: dict[PolicyVersion, AdapterWeights | None] = {}  # None: the base weights
        self._replaced: dict[PolicyVersion, Replaced] = {}  # versions that newer ones sample for
        unused = [name for name, value in (("draft_tokens", draft_tokens), ("compile", compile)) if value]
        if self.packed and is_recurrent(self._model):
            self._say_recurrent(unused)
            draft_tokens, prefix_cache_mb, compile = 0, 0, False
        self._past = PrefixCache(prefix_cache_mb << 20)
        embedding: Any = self._model.get_input_embeddings()
        self._vocabulary = int(embedding.weight.shape[0])
        self._grammars = GrammarCompiler(base.tokenizer, vocabulary=self._vocabulary, eos_ids=base.eos_ids)
        self._threads = threads or torch.get_num_threads()
        cached = why is None or self._check_plain(why, unused=unused)
        if cache_bytes is None and base.device.type == "cuda":
            # gpu-seen: how much of the memory is free
            cache_bytes = int(CACHE_SHARE * torch.cuda.mem_get_info(base.device)[0])
        self.cache_bytes = cache_bytes
        size = ModelSize.of(self._model.config.get_text_config(), parameters=0, value_bytes=self._model.dtype.itemsize)
        tokens = math.inf if cache_bytes is None else cache_bytes / cache_token_bytes(size)

        several = self.packed and base.device.type == "cpu" and not compile
        count = min(lanes or self._threads, max_rows) if several else 1

        def decoder(beside: Lanes) -> Decoder:
            if not self.packed:
                return PlainDecoder(self._shared, cached=cached)
            return PackedDecoder(
                self._shared,
                past=self._past,
                draft_tokens=draft_tokens,
                compile=compile,
                threads=lambda: max(1, self._threads // beside.used),
                cache_tokens=tokens / (2 * count if several else 1),
            )

        def side_by_side(count: int) -> Lanes:
            made = Lanes()
            made.every += [DecoderLane(decoder(made)) for _ in range(count)]
            return made

        self._batches = side_by_side(count)
        self._interactive = side_by_side(count) if several else self._batches
        self._lanes = [*self._batches.every, *(self._interactive.every if several else ())]
        self._wakeup = threading.Condition()
        self._closing, self._decoding = False, ThreadPoolExecutor(1, thread_name_prefix="groupwise-images")
        self._lost: DeviceLostError | None = None
        self._workers: list[threading.Thread] = []

    def _say_recurrent(self, unused: Sequence[str]) -> None:
        """Say what cannot be had of a model whose layers keep the state after the last token and none before it, and
        which options are not used then."""
        warnings.warn(
            f"{type(self._model).__name__} has recurrent layers: conversations are not kept between requests, each "
            f"prompt is run whole{''.join(f'; {name} has no effect' for name in unused)}",
            stacklevel=3,
        )

    def _check_plain(self, why: str, *, unused: Sequence[str]) -> bool:
        """Say that the model runs by its own forward, and which options are not used then; whether by its own cache,
        too."""
        model, name = self._model, type(self._model).__name__
        turn_plain(model)
        uncached = why_not_cached(model)
        how = f"its own forward and cache instead, which is correct and {PLAIN_COST}"
        if uncached is not None:
            how = f"a forward of the whole row a token ({uncached}) instead, which is correct and slow"
        warnings.warn(
            f"{name} cannot be sampled in packed rows: {why}; it is sampled by {how}"
            f"{''.join(f'; {name} has no effect' for name in unused)}",
            stacklevel=3,
        )
        return uncached is None

    # -- the Sampler protocol -----------------------------------------------------------------------------------------

    @property
    def context_length(self) -> int:
        return self._base.context_length

    @property
    def vocabulary(self) -> int:
        """See `LiveEngine.vocabulary`."""
        return self._vocabulary

    async def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Completion]]:
        return list(await asyncio.gather(*(asyncio.wrap_future(future) for future in self.submit(requests))))

    def load(self, version: PolicyVersion, directory: Path) -> None:
        if version not in self._adapters and not version.is_base:
            weights = read_adapter(directory, device=self._base.device)
            self._shared.bank.prepare(weights)
            self._adapters[version] = weights

    def adopt(self, version: PolicyVersion) -> None:
        self._adapters[version] = None
        if (vision := vision_of(self._model)) is not None:
            vision.changed()
        self._forget(None)

    def replace(self, old: PolicyVersion, new: PolicyVersion, *, recompute: bool) -> None:
        """See `UpdatesInFlight.replace`; it happens between two steps of each lane. A shared prompt is computed again
        for completions that begin later, in either case: only those that have begun continue from kept ones. So do
        the later turns of a conversation, among the requests of `old`."""
        self.check_replaceable(recompute=recompute)
        weights = self._weights_of(new)
        with self._wakeup:
            now = Replaced(new, weights, recompute)
            self._replaced.update({each: now for each, by in self._replaced.items() if by.version == old})
            self._replaced[old] = now
            lanes = self._lanes if self._workers else []
        moved = [self._call_soon(lambda lane=lane: self._follow(lane, old, now), lane) for lane in lanes]
        for each in moved:
            each.result()

    def check_replaceable(self, *, recompute: bool) -> None:
        """Raise ConfigError where the keys and values of completions under way cannot be treated so."""
        vision = vision_of(self._model)
        if recompute and vision is not None and vision.both_ways:
            raise ConfigError(
                f"tokens of an image see each other in {type(self._model).__name__}, so that completions under way are "
                "not computed again in pieces",
                hint="set rollout.in_flight_cache=keep",
                field="rollout.in_flight_cache",
            )
        if recompute and self.packed and is_recurrent(self._model):
            raise ConfigError(
                f"{type(self._model).__name__} has recurrent layers, whose state cannot be computed again for "
                "completions under way",
                hint="set rollout.in_flight_cache=keep",
                field="rollout.in_flight_cache",
            )

    def unload(self, version: PolicyVersion) -> None:
        self._replaced.pop(version, None)
        weights = self._adapters.pop(version, None)  # rows in flight keep the weights they were admitted with
        if weights is not None:
            self._forget(weights)

    def close(self) -> None:
        with self._wakeup:
            self._closing = True
            self._wakeup.notify_all()
        self._grammars.close()
        self._decoding.shutdown(wait=True)
        for worker in self._workers:
            worker.join(timeout=30)

    # -- and what this engine can besides ------------------------------------------------------------------------------

    def generate(self, requests: Sequence[SamplingRequest]) -> list[list[Completion]]:
        """Sample as `sample` does, for callers without an event loop."""
        return [future.result() for future in self.submit(requests)]

    def submit(
        self, requests: Sequence[SamplingRequest], *, on_token: TokenSink | None = None
    ) -> list[Future[list[Completion]]]:
        """Queue requests, admitted together and in order; a future of `n` completions for each.

        `on_token` hears of every token as it is sampled, in a thread of the engine's, and must return at once. This
        waits for a grammar that was not `prepare`d before. Raises as `Sampler.sample`.
        """
        jobs = [self._job(request, on_token) for request in requests]
        if any(map(self._unprepared, jobs)):
            self._decoding.submit(self._decode_first, jobs)
        else:
            self._queue(jobs)
        return [job.future for job in jobs]

    def _queue(self, jobs: Sequence[PendingRequest]) -> None:
        with self._wakeup:
            self._start()
            self._hand([job for job in jobs if job.request.interactive], self._interactive)
            self._hand([job for job in jobs if not job.request.interactive], self._batches)
            self._wakeup.notify_all()

    def _unprepared(self, job: PendingRequest) -> list[Picture]:
        """Return the images of a request that are still to be decoded: the second that a large one takes would be a
        second of all who wait."""
        vision = vision_of(self._model)
        return [] if vision is None else vision.unprepared(job.request.prompt_ids)

    def _decode_first(self, jobs: Sequence[PendingRequest]) -> None:
        """Queue requests when their images are decoded. One with an image that cannot be fails here, alone: in a step
        it would fail all that are computed with it."""
        vision = vision_of(self._model)
        assert vision is not None
        ready = list[PendingRequest]()
        for job in jobs:
            try:
                for picture in self._unprepared(job):  # not those of the jobs before it
                    vision.prepare(picture)
                ready.append(job)
            except Exception as error:  # the boundary of the thread: the waiting request fails
                job.settle(error)
        try:
            self._queue(ready)
        except Exception as error:  # the engine was closed, or is lost: the waiting requests fail
            for job in ready:
                job.settle(error)

    def _hand(self, jobs: Sequence[PendingRequest], lanes: Lanes) -> None:
        """Hand requests to as many of the lanes as the work pays for. The lock is held."""
        if not jobs:
            return
        load = min(self.max_rows, lanes.load + sum(job.request.n for job in jobs))
        pays = int(min(load // LANE_ROWS, load * self._shared.flops // LANE_FLOPS))
        lanes.used = max(1, min(len(lanes.every), pays))
        for job in jobs:
            if (by := self._replaced.get(job.version)) is not None:
                job.follow(by.version, by.weights, recompute=by.recompute)
            lane = min(lanes.every[: lanes.used], key=lambda lane: lane.load)
            lane.load, lane.free_when_starved = lane.load + job.request.n, None
            job.future.add_done_callback(lambda _, lane=lane, n=job.request.n: self._unload_lane(lane, n))
            (lane.urgent if job.request.interactive else lane.waiting).append(job)

    def _unload_lane(self, lane: DecoderLane, n: int) -> None:
        with self._wakeup:
            lane.load -= n
            if not self._interactive.load:
                self._wakeup.notify_all()  # batches continue

    def score_sequence(
        self,
        ids: Sequence[int],
        version: PolicyVersion,
        *,
        first: int,
        top: int = 0,
        cells: tuple[Sequence[int], Sequence[int]] = ((), ()),
        temperature: float = 1.0,
    ) -> SequenceScores:
        """See `Scores.score_sequence`. The LM head runs for the requested places only, a chunk at a time. At
        the places of an image, which no policy samples, token 0 is scored."""
        ids, (cell_places, cell_ids) = tuple(ids), cells
        places = sorted({*range(first, len(ids)), *cell_places})
        if places and not 1 <= places[0] <= places[-1] < len(ids):
            wrong = places[0] if places[0] < 1 else places[-1]
            raise ValueError(f"place {wrong} of {len(ids)} tokens has no log-probability: those of 1 and later have")
        weights = self._check(ids[:-1] if places else ids, version)
        self._check_ids(ids)  # the last is not read, and must be there all the same
        self._check_ids(cell_ids)
        if not places:
            return SequenceScores(logprobs=(), top=())

        def run() -> SequenceScores:
            hidden_SH = self._lanes[0].decoder.hidden(ids, weights)
            return self._scores_at(places, hidden_SH, ids, first=first, top=top, cells=cells, temperature=temperature)

        with self._wakeup:
            self._start()
        return self._call_soon(run, self._lanes[0]).result()

    def score_group(
        self,
        prompt_ids: Sequence[int],
        completions: Sequence[Sequence[int]],
        version: PolicyVersion,
        *,
        top: int = 0,
        temperature: float = 1.0,
    ) -> list[SequenceScores]:
        """Return log-probabilities of the tokens of several completions of one prompt, which is run once for as many of
        them as one forward may have tokens; with the `top` likeliest in the place of each. Raises as `sample`."""
        weights, prompt = self._check(tuple(prompt_ids), version), tuple(prompt_ids)
        longest = max(map(len, completions), default=0)
        if len(prompt) + longest > self.context_length:
            raise ContextLengthError(
                f"a prompt of {len(prompt)} tokens and a completion of {longest} do not fit into the context of "
                f"{self.context_length} tokens of {self._base.name}",
                hint="lower rollout.max_tokens or rollout.max_prompt_tokens",
            )
        if top > self._vocabulary:
            raise ConfigError(f"{top} likeliest tokens are asked for, and the model has {self._vocabulary}")
        self._check_ids([token for ids in completions for token in ids])
        parts = _parts([len(ids) for ids in completions], most=max(PREFILL_TOKENS - len(prompt), 1))

        def run() -> list[SequenceScores]:
            scores: list[SequenceScores] = []
            for part in parts:
                rows = [completions[i] for i in part]
                hidden = self._lanes[0].decoder.hidden_before(prompt, [ids for ids in rows if ids], weights)
                rest = iter(hidden)
                empty = SequenceScores(logprobs=(), top=())
                scores += [self._scores_of(ids, next(rest), top, temperature) if ids else empty for ids in rows]
            return scores

        with self._wakeup:
            self._start()
        return self._call_soon(run, self._lanes[0]).result()

    def _scores_of(self, ids: Sequence[int], hidden_TH: Tensor, top: int, temperature: float) -> SequenceScores:
        """Return the scores of the tokens `ids`, which these hidden states predict."""
        logprobs, tops = list[float](), list[Any]()
        id_T = on_device(ids, hidden_TH.device)
        scale_1 = on_device([temperature], hidden_TH.device, widest_float(self._base.device))
        for start in range(0, len(ids), SCORED_AT_ONCE):
            part = slice(start, start + SCORED_AT_ONCE)
            logprobs_TV = scaled_logprobs(self._shared.head.logits(hidden_TH[part]), scale_1)
            logprobs += logprobs_TV.gather(1, id_T[part][:, None])[:, 0].tolist()
            best = logprobs_TV.topk(top)
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            tops += [tuple(zip(*each, strict=True)) for each in pairs]
        return SequenceScores(logprobs=tuple(logprobs), top=tuple(tops))

    def _scores_at(
        self,
        places: Sequence[int],
        hidden_SH: Tensor,
        ids: Sequence[int],
        *,
        first: int,
        top: int,
        cells: tuple[Sequence[int], Sequence[int]],
        temperature: float,
    ) -> SequenceScores:
        """Return what `score_sequence` tells of `places`, in ascending order, from the hidden states of all tokens."""
        device = hidden_SH.device
        place_P = on_device(places, device)
        id_S = on_device([0 if is_of_image(token) else token for token in ids], device)
        cell_place_C, cell_id_C = (on_device(each, device, torch.long) for each in cells)
        cell_row_C = torch.searchsorted(place_P, cell_place_C)
        temperature_1 = on_device([temperature], device, widest_float(self._base.device))
        logprobs, tops, cells_C = list[float](), list[Any](), torch.empty(len(cell_id_C), dtype=temperature_1.dtype)
        for start in range(0, len(places), SCORED_AT_ONCE):
            part_T = place_P[start : start + SCORED_AT_ONCE]
            logprobs_TV = scaled_logprobs(self._shared.head.logits(hidden_SH[part_T - 1]), temperature_1)
            inside_C = ((cell_row_C >= start) & (cell_row_C < start + len(part_T))).nonzero()[:, 0]
            found_C = logprobs_TV[cell_row_C[inside_C] - start, cell_id_C[inside_C]]
            cells_C[inside_C.cpu()] = found_C.to(cells_C)
            part_T = part_T[part_T >= first]
            logprobs_TV = logprobs_TV[len(logprobs_TV) - len(part_T) :]
            logprobs += logprobs_TV.gather(1, id_S[part_T][:, None])[:, 0].tolist()
            best = logprobs_TV.topk(top)
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            tops += [tuple(zip(*each, strict=True)) for each in pairs]
        return SequenceScores(logprobs=tuple(logprobs), top=tuple(tops), cells=tuple(cells_C.tolist()))

    def prepare(self, grammar: Grammar, *, sender: str = "") -> Future[Any]:
        """See `LiveEngine.prepare`."""
        return self._grammars.prepare(grammar, sender=sender)

    def load_composed(self, version: PolicyVersion, parts: Sequence[tuple[Path, float]]) -> None:
        """Make the weighted sum of saved adapters available under `version`. Raises AdapterError as `load` does."""
        if version not in self._adapters:
            weights = add_adapters([(read_adapter(path, device=self._base.device), scale) for path, scale in parts])
            self._shared.bank.prepare(weights)
            self._adapters[version] = weights

    @property
    def lost(self) -> DeviceLostError | None:
        """See `LiveEngine.lost`."""
        return self._lost

    @property
    def unavailable_reason(self) -> str | None:
        """See `LiveEngine.unavailable_reason`: that the device is lost. It does not come back in this process."""
        return None if self._lost is None else self._lost.message

    def stats(self) -> dict[str, int]:
        """Return completions being decoded, completions waiting for a row, and adapters loaded; with `draft_tokens`
        also how many tokens were drafted and accepted so far."""
        queued = [job for lane in self._lanes for job in (*lane.urgent, *lane.waiting)]
        stats = {
            "running": sum(lane.decoder.active for lane in self._lanes),
            "waiting": sum(job.request.n - job.started for job in queued),
            "adapters": len(self._adapters),
        }
        for lane in self._lanes:
            for name, count in lane.decoder.stats().items():
                stats[name] = stats.get(name, 0) + count
        return stats

    # -- what is asked for --------------------------------------------------------------------------------------------

    def _job(self, request: SamplingRequest, on_token: TokenSink | None) -> PendingRequest:
        if request.n < 1:
            raise ConfigError(f"n is {request.n}; a request is for at least 1 completion", field="n")
        self._check_params(request.params)
        weights = self._check(request.prompt_ids, request.version)
        room = self.context_length - len(request.prompt_ids)
        seed = secrets.randbits(63) if request.params.seed is None else request.params.seed
        most = min(request.params.max_tokens, room)
        grammar = None if request.params.grammar is None else self._grammars.matcher(request.params.grammar)
        vision, prompt = vision_of(self._model), request.prompt_ids
        following = len(prompt) if vision is None else vision.following(prompt)
        if vision is not None:
            vision.pictures(prompt)  # raises for one that is not known
        owner = _owner_apart(request.apart) if weights is None and request.apart else weights
        return PendingRequest(request, request.version, weights, owner, most, seed, on_token, grammar, following)

    def _check(self, prompt_ids: Sequence[int], version: PolicyVersion) -> AdapterWeights | None:
        """Return the weights of `version`. Raises if the prompt cannot be run or the version is not there."""
        prompt, context = len(prompt_ids), self.context_length
        if not prompt:
            raise ContextLengthError("the prompt has no tokens", hint="give at least one token id", kind="empty")
        self._check_ids(prompt_ids)
        if prompt >= context:
            raise ContextLengthError(
                f"the prompt has {prompt} tokens and the model's context is {context}: no room for a single new token",
                hint="shorten the prompt",
            )
        return self._weights_of(version)

    def _check_params(self, params: SamplingParams) -> None:
        """Raise ConfigError for tokens that the model does not have: in a step they would fail all of its rows."""
        wrong = next((token for token, _ in params.logit_bias if not 0 <= token < self._vocabulary), None)
        if wrong is not None:
            message = f"logit_bias has the token id {wrong}; this model has the ids 0 to {self._vocabulary - 1}"
            raise ConfigError(message, hint="give ids of this model's tokenizer", field="logit_bias")
        if (top := params.top_logprobs) > self._vocabulary:
            message = f"top_logprobs is {top}, and the model has {self._vocabulary} tokens"
            raise ConfigError(message, field="top_logprobs")

    def _weights_of(self, version: PolicyVersion) -> AdapterWeights | None:
        if not version.is_base and version not in self._adapters:
            raise AdapterNotFoundError(f"adapter version {str(version)!r} is not loaded")
        return None if version.is_base else self._adapters[version]

    def _check_ids(self, ids: Sequence[int]) -> None:
        if (vision := vision_of(self._model)) is not None:
            ids = vision.placeholders(ids)
        if ids and not 0 <= min(ids) <= max(ids) < self._vocabulary:
            worst = max(ids, key=lambda token: abs(token - self._vocabulary / 2))
            raise ModelError(
                f"the prompt has the token id {worst}; this model has the ids 0 to {self._vocabulary - 1}",
                hint="encode the prompt with this model's tokenizer",
            )

    def _follow(self, lane: DecoderLane, old: PolicyVersion, by: Replaced) -> None:
        """Have everything in a lane that is of version `old` continue under the one by which it is replaced."""
        lane.decoder.follow(old, by.version, by.weights, recompute=by.recompute)
        with self._wakeup:
            for job in (*lane.urgent, *lane.waiting):
                if job.version == old:
                    job.follow(by.version, by.weights, recompute=by.recompute)

    def _forget(self, weights: AdapterWeights | None) -> None:
        """Drop what was made from weights that are unloaded, or from base weights that have changed."""
        self._shared.bank.forget(weights)
        self._past.forget(weights)
        for lane in self._lanes:
            self._call_soon(lambda lane=lane: lane.decoder.forget(weights), lane)

    # -- the threads --------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start the threads on first use. The lock is held."""
        if self._closing:
            raise GroupwiseError("the engine is closed")
        if self._lost is not None:
            raise self._lost
        if not self._workers:
            self._workers = [
                threading.Thread(target=self._work, args=(lane,), name="groupwise-engine", daemon=True)
                for lane in self._lanes
            ]
            for worker in self._workers:
                worker.start()

    def _call_soon(self, function: Callable[[], Any], lane: DecoderLane) -> Future[Any]:
        """Run `function` in the lane's thread, between two steps and before what is submitted later."""
        future: Future[Any] = Future()
        with self._wakeup:
            if self._closing:  # no lane would run it
                future.set_exception(GroupwiseError("the engine is closed"))
            else:
                lane.calls.append((function, future))
            self._wakeup.notify_all()
        return future

    @torch.inference_mode()
    def _work(self, lane: DecoderLane) -> None:
        lanes = self._batches if lane in self._batches.every else self._interactive
        torch.set_num_threads(max(1, self._threads // lanes.used))  # a new thread has as many as were set last
        decoder, gives_way, rests = lane.decoder, lanes is not self._interactive, True
        while True:
            with self._wakeup:
                asked = self._wakeup.wait_for(
                    lambda: self._closing or lane.calls or self._has_work(lane), timeout=None if rests else REST_S
                )
            if not asked:
                rests = True
                if not decoder.active:
                    decoder.rest()
                    trim_memory()
                continue
            rests = False
            with self._wakeup:
                if gives_way and (still := lane.paused_until - time.monotonic()) > 0:
                    self._wakeup.wait_for(
                        lambda: self._closing or lane.calls or not self._interactive_runs(), timeout=still
                    )
                if self._closing:
                    return self._fail(lane, GroupwiseError("the engine was closed"))
            if lane.calls:
                while lane.calls:
                    self._answer(*lane.calls.popleft())
                continue
            free, began = self._budget.free, time.monotonic()
            try:
                with self._turns:
                    self._drop_cancelled(lane)
                    got = decoder.admit(lane.urgent, lane.waiting)
                    lane.free_when_starved = None if got or decoder.active else free
                    if decoder.active:
                        decoder.decode()
            except Exception as error:  # the boundary of the thread: the waiting requests fail
                self._fail(lane, error)
            now = time.monotonic()
            lane.paused_until = now + BATCH_PAUSE_FACTOR * (now - began)
            if any(other.free_when_starved is not None for other in self._lanes):
                with self._wakeup:
                    self._wakeup.notify_all()  # rows may have been given back, even within this turn

    def _interactive_runs(self) -> bool:
        """Return whether interactive requests have rows, or may get some now. While they wait for rows, batches run."""
        return any(lane.load and lane.free_when_starved is None for lane in self._interactive.every)

    def _has_work(self, lane: DecoderLane) -> bool:
        """Return whether a lane has rows, or requests that may get some now."""
        waits = bool(lane.urgent or lane.waiting)
        return lane.decoder.active > 0 or (waits and self._budget.free != lane.free_when_starved)

    def _drop_cancelled(self, lane: DecoderLane) -> None:
        """Forget requests whose future was cancelled (the client has gone away) or failed."""
        for queue in (lane.urgent, lane.waiting):
            while queue and queue[0].future.done():
                queue.popleft()
        lane.decoder.drop_cancelled()

    def _answer(self, function: Callable[[], Any], future: Future[Any]) -> None:
        try:
            future.set_result(function())
        except Exception as error:  # the caller's
            future.set_exception(self._noted(error))

    def _noted(self, error: Exception) -> Exception:
        """Return the error, or that the device is lost, which is the end of this engine."""
        if (lost := lost_device(error, self._base.device)) is None:
            return error
        self._lost = self._lost or lost
        return lost

    def _fail(self, lane: DecoderLane, error: Exception) -> None:
        """Fail every request of the lane, waiting or in flight."""
        error = self._noted(error)
        if isinstance(error, torch.OutOfMemoryError):
            error = EngineError(
                f"the engine ran out of memory: {str(error).splitlines()[0]}",
                hint="set rollout.cache_gb (a server: cache_gb) lower, or lower batch_rows, max_tokens or micro_tokens",
            )
        with self._wakeup:
            taken = lane.decoder.clear()
            jobs = {id(job): job for job in (*lane.urgent, *lane.waiting, *taken)}
            calls = list(lane.calls)
            for queue in (lane.urgent, lane.waiting, lane.calls):
                queue.clear()
            self._past.clear()
        for job in jobs.values():
            job.settle(error)
        for _, future in calls:
            future.set_exception(error)


def _parts(lengths: Sequence[int], *, most: int) -> list[list[int]]:
    """Return the places of `lengths` in order, in parts of `most` tokens together, or of one that alone has more."""
    parts: list[list[int]] = []
    used = 0
    for place, length in enumerate(lengths):
        if not parts or used + length > most:
            parts.append([])
            used = 0
        parts[-1].append(place)
        used += length
    return parts
