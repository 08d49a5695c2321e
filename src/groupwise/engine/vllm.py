"""vLLM as the engine: a `Sampler` over one or more servers.

One thread runs an event loop that holds all connections (`vllm_fleet`). A sampling request is one HTTP request, so that
a group is on one server, where its prompt is computed once; completion j draws from a seed that follows from the
request's and j. vLLM's random numbers depend on the batch in ways that ours do not: a seeded run is repeatable only as
far as vLLM is.

Prompts that do not fit, token ids that there are not, and options that vLLM cannot honour are refused here, before
anything is sent. A version is usable when every server has it and has proved it (`vllm_sync`).
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from groupwise.config.engine import VllmConfig
from groupwise.engine.sampling import completion_seed
from groupwise.engine.vllm_fleet import Fleet
from groupwise.engine.vllm_handshake import Accepted, Handshake
from groupwise.engine.vllm_http import Sampled, Server, sampling_body
from groupwise.engine.vllm_server import Launch
from groupwise.engine.vllm_sync import Lease, Leases, Published, Reference, Shelf, publish, reload
from groupwise.errors import (
    AdapterNotFoundError,
    ConfigError,
    ContextLengthError,
    EngineError,
    GroupwiseError,
    ModelError,
)
from groupwise.model.chat import closing_ids, decode, stopped_text
from groupwise.model.load import LoadedModel
from groupwise.model.packed_check import packed_tolerance
from groupwise.types import Completion, FinishReason, PolicyVersion, SamplingParams, SamplingRequest

SEEDS = (1 << 62) - 1  # vLLM's are 63 bits wide, and completion j adds j
CLOSE_S = 60.0

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A request that was accepted: what is sent, to whom (None: the base)."""

    request: SamplingRequest
    body: dict[str, Any]
    lease: Lease | None

    @property
    def name(self) -> str | None:
        return None if self.lease is None else self.lease.published.name


class VllmEngine:
    """Samples from vLLM servers; a `Sampler`. Returns when every server is up and accepted.

    Args:
        base: the trainer's model; versions are adapters of it.
        reference: scores with it (the local engine); closed with this.
        targets: the modules that adapters change, by the last part of their names.
        launches: servers to start where `config.urls` names none.
        colocated: vLLM in this process, in place of servers.
        reloads: all parameters are trained, and `adopt` hands over whole models.
        patient: see `vllm_fleet`.
        say: is told now and then which servers are waited for, and why.

    Raises:
        EngineError: a server does not come up, or is not one of this model.
    """

    def __init__(
        self,
        config: VllmConfig,
        base: LoadedModel,
        reference: Reference,
        *,
        targets: Sequence[str],
        launches: Sequence[Launch] = (),
        colocated: Server | None = None,
        reloads: bool = False,
        patient: bool = False,
        say: Callable[[str], None] = lambda text: None,
    ):
        self._config, self._base, self._reference = config, base, reference
        self._eos_ids, self._ends = base.eos_ids, closing_ids(base.tokenizer)
        self._tolerance = config.tolerance or packed_tolerance(base.model)
        self._shelf = Shelf(None if config.adapter_dir is None else Path(config.adapter_dir))
        self._leases = Leases()
        self._weights: Published | None = None  # those that servers must have, where they change
        self._handshake = Handshake(
            base,
            reference,
            self._shelf,
            targets=targets,
            slots=config.max_loras,
            tolerance=self._tolerance,
            timeout=config.sync_timeout_s,
        )
        self._context = base.context_length
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="groupwise-vllm", daemon=True)
        self._thread.start()
        try:
            if reloads:  # a server may have those of an earlier run
                self._weights = self._shelf.put_model(PolicyVersion.base(), base.model)
            self._fleet = self._wait(self._opened(launches, colocated, patient, say))
        except BaseException:
            self._stop()
            raise

    # -- the Sampler protocol ------------------------------------------------------------------------------------------

    @property
    def context_length(self) -> int:
        return self._context

    def submit(self, requests: Sequence[SamplingRequest]) -> list[Future[list[Completion]]]:
        return self._submitted(requests, self._answer)

    def _submitted(
        self, requests: Sequence[SamplingRequest], answer: Callable[[Job], Coroutine[Any, Any, list[Completion]]]
    ) -> list[Future[list[Completion]]]:
        bodies = [self._checked(request) for request in requests]
        futures = []
        for request, body in zip(requests, bodies, strict=True):
            whole = self._is_whole(request.version)
            lease = None if whole else self._leases.take(request.version)
            if lease is None and not whole:
                raise self._not_loaded(request.version)
            job = Job(request=request, body=body, lease=lease)
            future = asyncio.run_coroutine_threadsafe(answer(job), self._loop)
            if lease is not None:
                future.add_done_callback(lambda _, lease=lease: self._give_back(lease))
            futures.append(future)
        return futures

    async def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Completion]]:
        return list(await asyncio.gather(*(asyncio.wrap_future(future) for future in self.submit(requests))))

    def load(self, version: PolicyVersion, directory: Path) -> None:
        """As `Sampler.load`. Raises EngineError when a server does not take it, or takes another, every time."""
        if version.is_base or version in self._leases:
            return
        self._reference.load(version, directory)
        try:
            self._hand_over(version, lambda: self._publish_copy(version, directory))
        except EngineError:
            self._reference.unload(version)
            raise

    def adopt(self, version: PolicyVersion) -> None:
        """As `Sampler.adopt`. Raises EngineError when a server does not take the weights, every time."""
        if self._weights is None:
            raise ConfigError(f"{version} is a whole model, and this engine was opened for adapters")
        self._reference.adopt(version)
        before, self._weights = self._weights, self._shelf.put_model(version, self._base.model)
        self._hand_over(version, lambda: self._wait(self._fleet.everywhere(self._reload)))
        self._shelf.remove(before)

    def unload(self, version: PolicyVersion) -> None:
        if self._weights is not None:
            return self._reference.unload(version)
        lease = self._leases.retire(version)
        if lease is not None:
            self._let_go(lease)

    def close(self) -> None:
        if self._loop.is_closed():
            return
        with suppress(GroupwiseError, TimeoutError):
            self._wait(self._closed(), timeout=CLOSE_S)
        self._stop()

    # -- and what this engine can besides ------------------------------------------------------------------------------

    @property
    def servers(self) -> dict[str, Accepted | None]:
        """What was found out about each server; None: it is away."""
        return {member.server.url: member.accepted for member in self._fleet.members}

    def generate(self, requests: Sequence[SamplingRequest]) -> list[list[Completion]]:
        """`sample` for callers without an event loop."""
        return [future.result() for future in self.submit(requests)]

    # -- requests ------------------------------------------------------------------------------------------------------

    def _checked(self, request: SamplingRequest) -> dict[str, Any]:
        """What is sent for a request. Raises ConfigError, ContextLengthError, ModelError, AdapterNotFoundError."""
        prompt, params, length = request.prompt_ids, request.params, len(request.prompt_ids)
        if request.n < 1:
            raise ConfigError(f"n is {request.n}; a request is for at least 1 completion")
        if not length:
            raise ContextLengthError("the prompt has no tokens", hint="give at least one token id")
        if not 0 <= min(prompt) <= max(prompt) < self._base.vocabulary:
            raise ModelError(
                f"the prompt has token ids from {min(prompt)} to {max(prompt)}; this model has the ids 0 to "
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
        return sampling_body(
            prompt,
            params,
            n=request.n if params.temperature > 0 else 1,  # greedy ones are all the same, and vLLM refuses them
            max_tokens=min(params.max_tokens, self._context - length),
            seed=completion_seed(seed, 0) & SEEDS,
            eos_ids=self._eos_ids,
        )

    def _check_supported(self, params: SamplingParams) -> None:
        """Raises ConfigError for what no trainer can use."""
        if params.reshaped:
            name = params.reshaped[0]
            raise ConfigError(
                f"{name} is {getattr(params, name)}: vLLM gives the log-probabilities of what it makes of the "
                "distribution, and the trainer needs those of the policy's own",
                hint=f"turn {name} off, or sample with engine: local",
            )

    def _is_whole(self, version: PolicyVersion) -> bool:
        """Whether it is the servers' own weights, without an adapter."""
        return version.is_base or (self._weights is not None and self._weights.version == version)

    def _not_loaded(self, version: PolicyVersion) -> AdapterNotFoundError:
        loaded = ", ".join(map(str, self._leases.versions)) or "none"
        return AdapterNotFoundError(f"adapter version {str(version)!r} is not loaded; loaded: {loaded}")

    async def _answer(self, job: Job) -> list[Completion]:
        request = job.request
        sampled = await self._fleet.send(job.name, lambda server, model: server.complete(model, job.body))
        sampled = sampled * request.n if len(sampled) < request.n else sampled
        return [self._completion(each, request) for each in sampled]

    def _completion(self, sampled: Sampled, request: SamplingRequest) -> Completion:
        reason = FinishReason.STOP if sampled.finish_reason == "stop" else FinishReason.LENGTH
        return Completion(
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            text=self._text(sampled.token_ids, request.params),
            finish_reason=reason,
            version=request.version,
            top_logprobs=sampled.tops,
        )

    def _text(self, ids: Sequence[int], params: SamplingParams) -> str:
        """The text of a completion, without the stop string or the stop id that ended it."""
        text = stopped_text(ids, params, self._base.tokenizer, ends=self._ends) if ids else ""
        return decode(ids, self._base.tokenizer, ends=self._ends) if text is None else text

    # -- versions ------------------------------------------------------------------------------------------------------

    def _hand_over(self, version: PolicyVersion, attempt: Callable[[], None]) -> None:
        """As often as `sync_retries` allow. Raises EngineError with the last cause."""
        cause = ""
        for _ in range(1 + self._config.sync_retries):
            try:
                return attempt()
            except EngineError as error:
                cause = error.message
        raise EngineError(
            f"version {version} could not be handed to vLLM in {1 + self._config.sync_retries} attempts; the last one: "
            f"{cause}",
            hint="see to the server and go on with resume=auto",
        )

    def _publish_copy(self, version: PolicyVersion, directory: Path) -> None:
        """Under a name of its own, which nobody knows any more if it fails."""
        published = self._shelf.put(version, directory)
        self._leases.add(published)
        try:
            self._wait(self._publish(published))
        except EngineError:
            self._leases.retire(version)
            self._forget(published)
            raise

    async def _publish(self, published: Published) -> None:
        await self._fleet.everywhere(lambda server: self._prove(server, published))

    async def _prove(self, server: Server, published: Published) -> None:
        await publish(
            server,
            published,
            self._reference,
            self._handshake.prompt,
            tolerance=self._tolerance,
            timeout=self._config.sync_timeout_s,
        )

    async def _reload(self, server: Server) -> None:
        assert self._weights is not None
        await reload(
            server,
            self._weights,
            self._reference,
            self._handshake.prompt,
            zero=self._handshake.zero.name,
            tolerance=self._tolerance,
            timeout=self._config.sync_timeout_s,
        )

    def _give_back(self, lease: Lease) -> None:
        if self._leases.give_back(lease):
            self._let_go(lease)

    def _let_go(self, lease: Lease) -> None:
        """Nobody samples from a version any more."""
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
        self, launches: Sequence[Launch], colocated: Server | None, patient: bool, say: Callable[[str], None]
    ) -> Fleet:
        fleet = Fleet(self._config, prepare=self._prepare, launches=launches, colocated=colocated, patient=patient)
        try:
            await fleet.open(say=say)
        except BaseException:
            await fleet.close()
            raise
        accepted = [member.accepted for member in fleet.members if member.accepted]
        self._context = min(self._base.context_length, *(each.facts.context_length for each in accepted))
        return fleet

    async def _prepare(self, server: Server) -> Accepted:
        """Accept a server and give it all versions in use. Raises ServerLost, EngineError."""
        if self._weights is not None:
            await self._reload(server)
        accepted = await self._handshake(server)
        for published in self._leases.alive:
            await self._prove(server, published)
        return accepted

    async def _closed(self) -> None:
        for published in (*self._leases.alive, self._handshake.zero):
            await self._fleet.forget(published)
        await self._fleet.close()

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
        self._shelf.close()
