"""vLLM as the engine: a `Sampler` over one or more servers.

One thread runs an event loop that holds all connections (`vllm.fleet`). A sampling request is one HTTP request, so that
a group is on one server, where its prompt is computed once; completion j draws from a seed that follows from the
request's and j. vLLM's random numbers depend on the batch in ways that ours do not: a seeded run is repeatable only as
far as vLLM is.

Prompts that do not fit, token ids that there are not, and options that vLLM cannot honour are refused here, before
anything is sent. A version is usable when every server has it and has proved it (`vllm.publish`).

With in-flight updates each completion is a separate request, whose tokens arrive as they are sampled. When a version is
replaced, the request is cancelled, and the new version continues from the tokens received so far: keys and values are
recomputed. (vLLM can reload an adapter in place, but 0.32 then continues with the old one's cached prompts.) A
completion with a grammar ends under its version: vLLM cannot begin in the middle of a grammar.

Completions under a grammar are trained as with the local engine: the allowed tokens at each position are computed here
(`vllm.grammar`), and the reference scores log-probabilities of the whole distribution.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import threading
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from groupwise.config.engine import VllmConfig
from groupwise.engine.sampling import completion_seed
from groupwise.engine.vllm.answers import Sampled
from groupwise.engine.vllm.client import ServerLost, VllmServer, sampling_body
from groupwise.engine.vllm.fleet import Fleet
from groupwise.engine.vllm.gaps import Gaps
from groupwise.engine.vllm.grammar import VllmGrammars
from groupwise.engine.vllm.handshake import Accepted, Handshake
from groupwise.engine.vllm.images import images_of
from groupwise.engine.vllm.publish import Leases, LoadedAdapter, Published, Shelf, TrainerScores, publish
from groupwise.engine.vllm.server import StartServer
from groupwise.engine.vllm.transfer import Transfers
from groupwise.engine.vllm.whole_models import WholeModel, WholeModels
from groupwise.errors import (
    AdapterNotFoundError,
    ConfigError,
    ContextLengthError,
    EngineError,
    GrammarError,
    GroupwiseError,
    ModelError,
)
from groupwise.model.chat import closing_ids, decode, stopped_text
from groupwise.model.checkpoint_tensors import TakeTensor, checkpoint_tensors
from groupwise.model.image_tokens import vision_of
from groupwise.model.load import LoadedModel
from groupwise.model.packed_check import packed_tolerance
from groupwise.sampler import TokenSink
from groupwise.types import Completion, FinishReason, Grammar, PolicyVersion, SamplingParams, SamplingRequest

if TYPE_CHECKING:
    from groupwise.engine.vllm.colocate import InProcess

log = logging.getLogger(__name__)

SEEDS = (1 << 62) - 1  # vLLM's are 63 bits wide, and completion j adds j

CLOSE_S = 60.0

ANOTHER = 1_000_003  # between the seed of a completion and those of its continuations

ROUNDED_TOLERANCE, FP8_TOLERANCE = 0.1, 0.3  # nats

TOLD_AT_ONCE = 16  # tokens in an event of a completion that newer versions continue: it has no reader
MOST_BYTES = 4  # of a character, each of which may be a token of its own

CHECKED = 8  # tokens whose log-probabilities are compared when a kind of grammar is first used

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class QueuedRequest:
    """A request that was accepted: what is sent, to whom (None: the base)."""

    request: SamplingRequest
    body: dict[str, Any]
    lease: LoadedAdapter | None

    @property
    def name(self) -> str | None:
        return None if self.lease is None else self.lease.published.name


class VllmEngine:
    """Samples from vLLM servers; a `Sampler`. Returns when every server is up and accepted.

    Args:
        base: the trainer's model; versions are adapters of it.
        reference: scores with it (the local engine); closed with this.
        targets: the modules that adapters change, by the last part of their names.
        starts: servers to start where `config.urls` names none.
        colocated: vLLM in this process, in place of servers.
        reloads: all parameters are trained, and `adopt` hands over whole models.
        write: writes the weights of `base` as they are now into a directory; None: its model has them.
        stream: gives every tensor of them, by its name in the checkpoint; None: as with `write`.
        device: the device from which weights are sent (None: the base's).
        merge: `load` hands over whole models too, which this makes of an adapter's directory (None: the base alone).
        patient, rows: see `vllm.fleet`.
        in_flight_updates: versions may be replaced under completions (`replace`).
        before_waking: has the learners give memory back that they do not use, before servers that slept take it.
        say: is told now and then which servers are waited for, and why.

    Raises:
        EngineError: a server does not come up, or is not one of this model.
    """

    def __init__(
        self,
        config: VllmConfig,
        base: LoadedModel,
        reference: TrainerScores,
        *,
        targets: Sequence[str],
        starts: Sequence[StartServer] = (),
        colocated: InProcess | None = None,
        reloads: bool = False,
        merge: Callable[[Path | None], PreTrainedModel] | None = None,
        write: Callable[[Path], None] | None = None,
        stream: Callable[[TakeTensor], None] | None = None,
        device: torch.device | None = None,
        patient: bool = False,
        rows: int | None = None,
        in_flight_updates: bool = False,
        before_waking: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = lambda text: None,
    ):
        self._config, self._base, self._reference = config, base, reference
        self._eos_ids, self._ends = base.eos_ids, closing_ids(base.tokenizer)
        tolerance = config.tolerance or _tolerance(config, base.model)
        strict = config.tolerance is not None or tolerance < ROUNDED_TOLERANCE
        self._vision = vision_of(base.model)
        self._gaps = Gaps(reference, tolerance=tolerance, rounded=not strict, vision=self._vision)
        self._shelf = Shelf(None if config.adapter_dir is None else Path(config.adapter_dir))
        self._leases = Leases()
        self._grammars = VllmGrammars(base)
        self._proven: set[tuple[Any, ...]] = set()  # kinds of grammars that vLLM keeps to as is thought here
        self._follows, self._colocated = in_flight_updates, colocated
        self._replaced: dict[PolicyVersion, PolicyVersion] = {}
        self._following: set[_FollowedCompletion] = set()  # in the loop's thread
        self._merge = merge
        self._trained = _as_it_is(base.model) if write is None or stream is None else WholeModel(write, stream)
        self._whole: WholeModels | None = None
        self._handshake = Handshake(
            base,
            self._gaps,
            self._shelf,
            targets=None if reloads or merge else targets,
            slots=config.max_loras,
            timeout=config.sync_timeout_s,
        )
        self._context = base.context_length
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="groupwise-vllm", daemon=True)
        self._thread.start()
        try:
            if reloads or merge:
                self._whole = self._whole_models(base.device if device is None else device)
            self._fleet = self._wait(self._opened(starts, colocated, before_waking, patient, rows, say))
            if self._whole is not None and colocated is None:
                for line in self._whole.ways():
                    say(line)
        except BaseException:
            self._stop()
            raise

    # -- the Sampler protocol ------------------------------------------------------------------------------------------

    @property
    def context_length(self) -> int:
        return self._context

    def submit(self, requests: Sequence[SamplingRequest]) -> list[Future[list[Completion]]]:
        return self._submitted(requests, self._followed if self._follows else self._answer)

    def _submitted(
        self,
        requests: Sequence[SamplingRequest],
        answer: Callable[[QueuedRequest], Coroutine[Any, Any, list[Completion]]],
    ) -> list[Future[list[Completion]]]:
        if self._whole is not None and not self._whole.stands:
            self._loop.call_soon_threadsafe(self._whole.stand)
        requests = [replace(each, version=self._replaced.get(each.version, each.version)) for each in requests]
        bodies = [self._checked(request) for request in requests]
        futures = []
        for request, body in zip(requests, bodies, strict=True):
            whole = self._is_whole(request.version)
            lease = None if whole else self._leases.take(request.version)
            if lease is None and not whole:
                raise self._not_loaded(request.version)
            job = QueuedRequest(request=request, body=body, lease=lease)
            future = asyncio.run_coroutine_threadsafe(answer(job), self._loop)
            if lease is not None:
                future.add_done_callback(lambda _, lease=lease: self._give_back(lease))
            futures.append(future)
        return futures

    async def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Completion]]:
        return list(await asyncio.gather(*(asyncio.wrap_future(future) for future in self.submit(requests))))

    def load(self, version: PolicyVersion, directory: Path) -> None:
        """See `Sampler.load`. Raises EngineError when a server does not take it, or takes another, every time."""
        if version.is_base or version in self._leases:
            return
        self._reference.load(version, directory)
        try:
            if self._merge is not None:
                return self._push(version, _merged(self._merge, directory))
            self._hand_over(version, lambda: self._publish_copy(version, directory))
        except EngineError:
            self._reference.unload(version)
            raise

    def adopt(self, version: PolicyVersion) -> None:
        """See `Sampler.adopt`. Raises EngineError when a server does not take the weights, every time."""
        if self._whole is None:
            raise ConfigError(f"{version} is a whole model, and this engine was opened for adapters")
        self._reference.adopt(version)
        self._push(version, self._trained)

    def _push(self, version: PolicyVersion, model: WholeModel) -> None:
        """Have every server take a whole model in place of the one it has. Raises EngineError, StorageError."""
        whole = self._whole
        assert whole is not None
        before = whole.replace(version, model)
        self._loop.call_soon_threadsafe(whole.stand)
        whole.send(self._wait(self._fleet.awake()))
        self._hand_over(version, lambda: self._wait(self._fleet.everywhere(whole.give)))
        self._shelf.remove(before)

    def replace(self, old: PolicyVersion, new: PolicyVersion, *, recompute: bool) -> None:
        """See `UpdatesInFlight.replace`: requests under way are given up, and continue with `new` where they were."""
        self.check_replaceable(recompute=recompute)
        if not self._is_whole(new) and new not in self._leases:
            raise self._not_loaded(new)
        self._replaced.update({each: new for each, by in self._replaced.items() if by == old} | {old: new})
        self._wait(self._replace(old, new))

    def check_replaceable(self, *, recompute: bool) -> None:
        """See `UpdatesInFlight.check_replaceable`."""
        if not (recompute and self._follows):
            raise ConfigError(
                "vLLM takes a new version into completions under way only by reading their texts again",
                hint="set rollout.in_flight_updates=true rollout.in_flight_cache=recompute",
                field="rollout.in_flight_cache",
            )

    async def _replace(self, old: PolicyVersion, new: PolicyVersion) -> None:
        for each in self._following:
            if each.version == old:
                each.follow(new)

    def unload(self, version: PolicyVersion) -> None:
        self._replaced.pop(version, None)
        if self._whole is not None:
            return self._reference.unload(version)
        lease = self._leases.retire(version)
        if lease is not None:
            self._let_go(lease)

    async def rest(self) -> None:
        """See `GivesMemoryBack.rest`: a vLLM on the learners' GPUs sleeps where `vllm.sleep` says so."""
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._rest(), self._loop))

    async def _rest(self) -> None:
        await (self._fleet.rest() if self._colocated is None else self._colocated.rest())
        if self._whole is not None and not self._fleet.samples:
            await self._whole.begin_training()

    def close(self) -> None:
        if self._loop.is_closed():
            return
        with suppress(GroupwiseError, TimeoutError):
            self._wait(self._closed(), timeout=CLOSE_S)
        self._stop()

    # -- and what this engine can besides ------------------------------------------------------------------------------

    @property
    def servers(self) -> dict[str, Accepted | None]:
        """Return the properties of each server, None for one that is away."""
        return {member.name: member.accepted for member in self._fleet.members}

    def generate(self, requests: Sequence[SamplingRequest]) -> list[list[Completion]]:
        """Sample as `sample` does, for callers without an event loop."""
        return [future.result() for future in self.submit(requests)]

    # -- requests ------------------------------------------------------------------------------------------------------

    def _checked(self, request: SamplingRequest) -> dict[str, Any]:
        """Return what is sent for a request.

        Raises:
            ConfigError, ContextLengthError, ModelError, AdapterNotFoundError, GrammarError, DataError
        """
        prompt, params, length = request.prompt_ids, request.params, len(request.prompt_ids)
        if request.n < 1:
            raise ConfigError(f"n is {request.n}; a request is for at least 1 completion", field="n")
        if not length:
            raise ContextLengthError("the prompt has no tokens", hint="give at least one token id", kind="empty")
        shown = images_of(prompt, self._vision)
        read = shown.get("prompt", prompt)
        if not 0 <= min(read) <= max(read) < self._base.vocabulary:
            raise ModelError(
                f"the prompt has token ids from {min(read)} to {max(read)}; this model has the ids 0 to "
                f"{self._base.vocabulary - 1}",
                hint="encode the prompt with this model's tokenizer",
            )
        if length >= self._context:
            raise ContextLengthError(
                f"the prompt has {length} tokens and vLLM's context is {self._context}: no room for a single new token",
                hint="shorten the prompt, or raise vllm.max_model_len",
            )
        if not self._is_whole(request.version) and request.version not in self._leases:
            raise self._not_loaded(request.version)
        self._check_supported(params)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        body = sampling_body(
            prompt,
            params,
            n=request.n if params.temperature > 0 else 1,  # greedy ones are all the same, and vLLM refuses them
            max_tokens=min(params.max_tokens, self._context - length),
            seed=completion_seed(seed, 0) & SEEDS,
            eos_ids=self._eos_ids,
            structured_outputs=None if params.grammar is None else self._grammars.option(params.grammar),
            apart=request.apart,
        )
        return body | shown

    def _check_supported(self, params: SamplingParams) -> None:
        """Raise ConfigError for what no trainer can use."""
        if unknown := [name for name in params.reshaped if name != "grammar"]:
            name = unknown[0]
            raise ConfigError(
                f"{name} is {getattr(params, name)}: vLLM gives the log-probabilities of what it makes of the "
                "distribution, and does not report which tokens it leaves, so the trainer could not compute them",
                hint=f"turn {name} off, or sample with engine: local",
                field=name,
            )

    def _is_whole(self, version: PolicyVersion) -> bool:
        """Return whether it is the servers' own weights, without an adapter."""
        if self._whole is not None and self._whole.newest.version == version:
            return True
        return version.is_base and self._merge is None

    def _not_loaded(self, version: PolicyVersion) -> AdapterNotFoundError:
        return AdapterNotFoundError(f"adapter version {str(version)!r} is not loaded")

    def prepare(self, grammar: Grammar, *, sender: str = "") -> Future[Any]:
        """See `LiveEngine.prepare`: here. vLLM compiles what it is sent when it gets the request."""
        return self._grammars.prepare(grammar, sender=sender)

    async def _answer(self, job: QueuedRequest) -> list[Completion]:
        request, grammar = job.request, job.request.params.grammar
        try:
            sampled = await self._fleet.send(
                job.name,
                lambda server, model: server.complete(model, job.body),
                rows=job.body["n"],
                conversation=request.conversation,
            )
        except EngineError as error:
            if grammar is None:
                raise
            raise _grammar_refused(grammar, error) from error
        sampled = sampled * request.n if len(sampled) < request.n else sampled
        completions = [self._completion(each, request) for each in sampled]
        if not request.params.reshaped:
            return completions
        return [await asyncio.to_thread(self._scored, request, each) for each in completions]

    def _scored(self, request: SamplingRequest, drawn: Completion) -> Completion:
        """Return completions with the log-probabilities of the whole distribution. Where a grammar alone changed it,
        vLLM's own are those of the part that each token was drawn from, which is recorded. Raises EngineError."""
        params, ids = request.params, drawn.token_ids
        score = partial(self._reference.score_top, temperature=params.temperature, top=params.top_logprobs)
        logprobs, tops = zip(*score(request.prompt_ids, ids, request.version), strict=True)
        whole = replace(drawn, logprobs=logprobs, top_logprobs=tops if params.top_logprobs else ())
        if params.grammar is None or params.reshaped != ("grammar",) or params.temperature <= 0:
            return whole
        said = replace(whole, kept=self._grammars.mask(params.grammar, ids), kept_logprobs=drawn.logprobs)
        self._check_mask(params.grammar, request, said)
        return said

    def _check_mask(self, grammar: Grammar, request: SamplingRequest, said: Completion) -> None:
        """Check that vLLM drew from the tokens that are recorded, once for each kind of grammar. Raises EngineError."""
        kind = (grammar.kind, grammar.thoughts, grammar.lenient, bool(grammar.parts))
        if kind in self._proven:
            return
        assert said.kept is not None
        ids, vocabulary = said.token_ids[:CHECKED], self._base.vocabulary
        score = partial(self._reference.score_top, temperature=request.params.temperature, top=vocabulary)
        differences = []
        rows = zip(score(request.prompt_ids, ids, request.version), said.kept.array(), said.kept_logprobs, strict=False)
        for (logprob, every), kept_V, theirs in rows:
            left = math.log(math.fsum(math.exp(each) for token, each in every if kept_V[token]))
            differences.append(abs(logprob - left - theirs))
        off = sum(differences) / len(differences)
        if not off <= self._gaps.limit:
            raise EngineError(
                f"vLLM's log-probabilities under {grammar.field} ({grammar.kind}) are off by {off:.3g} nats in the "
                f"mean (at most {self._gaps.limit:.3g}): it keeps to another grammar than is recorded",
                hint="sample with engine: local, or use another llguidance in vLLM's environment",
            )
        self._proven.add(kind)

    async def _followed(self, job: QueuedRequest) -> list[Completion]:
        """See `_answer`, by the versions that stand for the one that was asked, as they come; a text under a grammar,
        which cannot be taken up in its middle, by the one that begins it."""
        if job.request.params.grammar is not None:
            return await self._answer(job)
        version = self._replaced.get(job.request.version, job.request.version)
        rows = [_FollowedCompletion(self, job, index, version) for index in range(job.request.n)]
        self._following.update(rows)
        sampling = [asyncio.create_task(self._followed_row(row, job.request)) for row in rows]
        try:
            return await asyncio.gather(*sampling)
        finally:
            for task in sampling:
                task.cancel()
            self._following.difference_update(rows)

    async def _followed_row(self, row: _FollowedCompletion, request: SamplingRequest) -> Completion:
        while True:
            version, lease = row.version, self._leases.take(row.version)
            if lease is None and not self._is_whole(version):
                raise self._not_loaded(version)
            row.asking = asyncio.create_task(
                self._fleet.send(lease and lease.published.name, row.ask, conversation=request.conversation)
            )
            try:
                await asyncio.wait({row.asking})
                if not row.asking.cancelled():
                    sampled = row.asking.result()
                    (_, first), *later = [span for span in row.spans if span[0] < len(sampled.token_ids)]
                    return replace(self._completion(sampled, request), version=first, switches=tuple(later))
            finally:
                row.asking.cancel()
                if lease is not None:
                    self._give_back(lease)

    def has_stopped(self, ids: Sequence[int], params: SamplingParams) -> bool:
        """Return whether these tokens hold a stop string."""
        return any(stop in self._base.tokenizer.decode(list(ids)) for stop in params.stop)

    def _completion(self, sampled: Sampled, request: SamplingRequest) -> Completion:
        return completion_of(sampled, request, self._base.tokenizer, ends=self._ends)

    # -- versions ------------------------------------------------------------------------------------------------------

    def _hand_over(self, version: PolicyVersion, attempt: Callable[[], None]) -> None:
        """Hand over, as often as `sync_retries` allow. Raises EngineError with the last cause."""
        cause: EngineError | None = None
        for _ in range(1 + self._config.sync_retries):
            try:
                return attempt()
            except EngineError as error:
                cause = error
        assert cause is not None
        raise EngineError(
            f"version {version} could not be handed to vLLM in {1 + self._config.sync_retries} attempts; the last one: "
            f"{cause.message}",
            hint="see to the server and go on with resume=auto",
            kind=cause.kind,
        )

    def _publish_copy(self, version: PolicyVersion, directory: Path) -> None:
        """Publish a copy of the version under a separate name. If publishing fails, the name is forgotten."""
        published = self._shelf.put(version, directory)
        self._leases.add(published)
        try:
            self._wait(self._publish(published))
        except EngineError:
            self._leases.retire(version)
            self._forget(published)
            raise

    async def _publish(self, published: Published) -> None:
        await self._fleet.where_up(lambda server: self._prove(server, published))

    async def _prove(self, server: VllmServer, published: Published) -> None:
        await publish(
            server,
            published,
            self._gaps,
            self._handshake.prompt,
            timeout=self._config.sync_timeout_s,
        )

    def _give_back(self, lease: LoadedAdapter) -> None:
        if self._leases.give_back(lease):
            self._let_go(lease)

    def _let_go(self, lease: LoadedAdapter) -> None:
        """Forget a version that no request samples from any more."""
        if lease.published.version not in self._leases:  # loaded again meanwhile
            self._reference.unload(lease.published.version)
        self._forget(lease.published)

    def _forget(self, published: Published) -> None:
        """Unload it wherever it is, then remove its files."""

        async def forget() -> None:
            await self._fleet.forget(published)
            self._shelf.remove(published)

        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(forget(), self._loop)

    # -- servers -------------------------------------------------------------------------------------------------------

    async def _opened(
        self,
        starts: Sequence[StartServer],
        colocated: InProcess | None,
        before_waking: Callable[[], None],
        patient: bool,
        rows: int | None,
        say: Callable[[str], None],
    ) -> Fleet:
        how: dict[str, Any] = {"colocated": colocated, "patient": patient, "rows": rows, "before_waking": before_waking}
        fleet = Fleet(self._config, prepare=self._prepare, starts=starts, **how)
        try:
            await fleet.open(say=say)
            await fleet.rest()
        except BaseException:
            await fleet.close()
            raise
        accepted = [member.accepted for member in fleet.members if member.accepted]
        self._context = min(self._base.context_length, *(each.facts.context_length for each in accepted))
        return fleet

    async def _prepare(self, server: VllmServer) -> Accepted:
        """Accept a server and give it all versions in use. Raises ServerLost, EngineError."""
        if self._whole is None:
            return await self._accept(server, PolicyVersion.base())
        async with self._whole.standing():
            await self._whole.begin(server)
            merged = self._merge is not None  # else the reference has the newest as its base
            return await self._accept(server, self._whole.newest.version if merged else PolicyVersion.base())

    async def _accept(self, server: VllmServer, version: PolicyVersion) -> Accepted:
        accepted = await self._handshake(server, version)
        if accepted.blind is not None and self._vision is not None and self._vision.blind is None:
            self._vision.blind = accepted.blind
            log.warning("vLLM is given no images: %s", accepted.blind)
        given: set[str] = set()
        while missing := [each for each in self._leases.alive if each.name not in given]:  # also what came meanwhile
            for published in missing:
                given.add(published.name)
                try:
                    await self._prove(server, published)
                except ServerLost:
                    raise
                except EngineError:
                    if published in self._leases.alive:  # else it was let go meanwhile, with its files
                        raise
        return accepted

    def _whole_models(self, device: torch.device) -> WholeModels:
        """Return who hands whole models over, beginning with the base."""
        config = self._config
        transfers = Transfers(
            config.transfer,
            device=device,
            timeout_s=config.sync_timeout_s,
            run=lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, self._loop),
            give_up=lambda server, why: self._fleet.give_up(server, why),
        )
        return WholeModels(
            transfers,
            self._shelf,
            self._gaps,
            first=self._trained if self._merge is None else _merged(self._merge, None),
            trains=self._merge is None,
            prompt=self._handshake.prompt,
            timeout=config.sync_timeout_s,
        )

    async def _closed(self) -> None:
        zero = self._handshake.zero
        await self._fleet.close((*self._leases.alive, *([] if zero is None else [zero])))

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _wait(self, coroutine: Coroutine[Any, Any, T], *, timeout: float | None = None) -> T:
        """Run it in the loop, from another thread."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout)
        except BaseException:
            future.cancel()
            raise

    def _stop(self) -> None:
        """End what is under way and the thread."""

        async def cancel_all() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        with suppress(TimeoutError):
            self._wait(cancel_all(), timeout=CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        self._loop.close()
        self._reference.close()
        self._grammars.close()
        self._shelf.close()


def completion_of(
    sampled: Sampled,
    request: SamplingRequest,
    tokenizer: PreTrainedTokenizerBase,
    *,
    ends: Collection[int | None],
) -> Completion:
    """Return vLLM's answer to a request as a completion, its text without the stop string or the stop id that
    ended it. `ends`: `closing_ids(tokenizer)`."""
    ids, params = sampled.token_ids, request.params
    text = stopped_text(ids, params, tokenizer, ends=ends) if ids else ""
    return Completion(
        token_ids=ids,
        logprobs=sampled.logprobs,
        text=decode(ids, tokenizer, ends=ends) if text is None else text,
        finish_reason=FinishReason.STOP if sampled.finish_reason == "stop" else FinishReason.LENGTH,
        version=request.version,
        top_logprobs=sampled.tops,
    )


def _as_it_is(model: PreTrainedModel) -> WholeModel:
    """Return a model as it is when it is handed over."""

    def stream(take: TakeTensor) -> None:
        for name, tensor in checkpoint_tensors(model):
            take(name, tensor)

    return WholeModel(model.save_pretrained, stream)


def _merged(merge: Callable[[Path | None], PreTrainedModel], adapter: Path | None) -> WholeModel:
    """Return the base with an adapter merged into it, made when it is handed over."""
    return WholeModel(
        lambda directory: merge(adapter).save_pretrained(directory), lambda take: _as_it_is(merge(adapter)).stream(take)
    )


def _tolerance(config: VllmConfig, model: PreTrainedModel) -> float:
    """Return the default tolerance of the mean log-probability's difference, in nats."""
    if config.quantization is not None:
        return FP8_TOLERANCE
    return ROUNDED_TOLERANCE if config.dtype in ("bfloat16", "float16") else packed_tolerance(model)


def _grammar_refused(grammar: Grammar, error: EngineError) -> GroupwiseError:
    """Return what a failure of a request with a grammar is: of the grammar, or of a server whose first one was
    another's."""
    if error.kind == "grammar":
        message = f"{grammar.field} is none that vLLM keeps to: {error.message}"
        return GrammarError(message, hint="sample with engine: local", field=grammar.field)
    return EngineError(
        f"a request with {grammar.field}: {error.message}",
        hint="a vLLM server keeps to all grammars with the library of the first one that it was sent; start it with "
        '--structured-outputs-config \'{"backend": "guidance"}\', as `groupwise vllm-serve` does',
    )


class _Stopped(Exception):
    """A stop string is whole that a continuation's server saw only the end of."""


class CompletionStream:
    """Streams one completion of a request. If its server is lost, another one continues from the tokens received so
    far. A server looks for stop strings in what it samples itself: those that begin in what was received before are
    looked for here."""

    def __init__(self, engine: VllmEngine, job: QueuedRequest, index: int, on_token: TokenSink):
        self._engine, self._params, self._index, self._on_token = engine, job.request.params, index, on_token
        self._body = {**job.body, "n": 1, "seed": (job.body["seed"] + index) & SEEDS}
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._tops: list[tuple[tuple[int, float], ...]] = []
        self._watched = 0  # tokens, within which a stop string ends that began before the present request

    async def ask(self, server: VllmServer, model: str, hear: Callable[[Sampled], None] | None = None) -> Sampled:
        """Request the tokens that are still missing, and return the whole completion. Raises ServerLost,
        EngineError."""
        self._watched = len(self._ids) + MOST_BYTES * max(map(len, self._params.stop), default=0) if self._ids else 0
        try:
            reason = self._end() or await server.stream(model, self._rest(), hear or self._hear)
        except _Stopped:
            reason = "stop"
        tops = tuple(self._tops) if self._params.top_logprobs else ()
        return Sampled(token_ids=tuple(self._ids), logprobs=tuple(self._logprobs), finish_reason=reason, tops=tops)

    def _end(self) -> str | None:
        """Return why nothing is missing: the last that was heard before its server was lost was the end."""
        ids = self._ids
        if ids and (ids[-1] in self._body["stop_token_ids"] or self._engine.has_stopped(ids, self._params)):
            return "stop"
        return "length" if len(ids) == self._body["max_tokens"] else None

    def _rest(self) -> Mapping[str, Any]:
        heard, body = len(self._ids), self._body
        return {
            **body,
            "prompt": [*body["prompt"], *self._ids],
            "max_tokens": body["max_tokens"] - heard,
            "seed": (body["seed"] + ANOTHER * heard) & SEEDS,
        }

    def _hear(self, piece: Sampled) -> None:
        heard, count = len(self._ids), len(piece.token_ids)
        ends = (
            k for k in range(1, min(count, self._watched - heard) + 1)
            if self._engine.has_stopped([*self._ids, *piece.token_ids[:k]], self._params)
        )  # fmt: skip
        end = next(ends, None)
        ids, logprobs, tops = piece.token_ids[:end], piece.logprobs[:end], piece.tops[:end]
        self._ids += ids
        self._logprobs += logprobs
        self._tops += tops
        tell(self._on_token, self._index, ids, logprobs, tops)
        if end is not None:
            raise _Stopped


class _FollowedCompletion(CompletionStream):
    """Streams one completion that newer versions continue (`VllmEngine.replace`). `version` samples it now, `asking` is
    the request under way, and `spans` lists the versions with the first token that each sampled."""

    def __init__(self, engine: VllmEngine, job: QueuedRequest, index: int, version: PolicyVersion):
        super().__init__(engine, job, index, lambda *token: None)
        self._body["stream_interval"] = TOLD_AT_ONCE
        self.version = version
        self.asking: asyncio.Task[Sampled] | None = None
        self.spans: list[tuple[int, PolicyVersion]] = [(0, version)]

    def follow(self, version: PolicyVersion) -> None:
        """Sample by this version from the next token on. Tokens that the previous version still sends are ignored."""
        at = len(self._ids)
        self.spans = [*(span for span in self.spans if span[0] < at), (at, version)]
        self.version = version
        if self.asking is not None:
            self.asking.cancel()

    async def ask(self, server: VllmServer, model: str, hear: Callable[[Sampled], None] | None = None) -> Sampled:
        """See `CompletionStream.ask`, of the version that samples now."""
        return await super().ask(server, model, hear or partial(self._heard_of, self.version))

    def _heard_of(self, version: PolicyVersion, piece: Sampled) -> None:
        if self.version == version:
            self._hear(piece)


def tell(
    on_token: TokenSink,
    index: int,
    ids: Sequence[int],
    logprobs: Sequence[float],
    tops: Sequence[tuple[tuple[int, float], ...]],
) -> None:
    for each in zip(ids, logprobs, tops or ((),) * len(ids), strict=True):
        on_token(index, *each)
