"""vLLM behind the live server: what `groupwise serve --engine vllm` samples with.

The servers are those of a run (`vllm`): a version gets its own name, proves itself, and is leased while requests
use it. A live server asks for more:

    streams        each completion is its own request, whose tokens are heard as they come. When its server is
                   lost the rest is asked of the next one, as the continuation of what was heard: what a client has
                   read stays read, and token by token the distribution is the same
    top_k, top_p,  vLLM gives the log-probabilities of what they make of the distribution. The tokens are scored once
    min_p,         more here, so that what is reported is that of the policy's own; such a stream comes in one piece
    penalties,
    grammars
    scoring        is the local engine's: of prompts, of canaries
    sums           of adapters are merged into one of all their ranks (`adapter_merge`), which is exact

A server that does not come back fails the requests that wait for it, and is looked for again and again.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from groupwise.config.engine import VllmConfig
from groupwise.engine.local import LocalEngine
from groupwise.engine.vllm.engine import CompletionStream, QueuedRequest, VllmEngine, tell
from groupwise.engine.vllm.open import shape_of, starts_here
from groupwise.engine.vllm.publish import FILES
from groupwise.engine.vllm.server import rank_of
from groupwise.errors import (
    AdapterError,
    DeviceLostError,
    EngineError,
    NotReadyError,
)
from groupwise.model.load import LoadedModel
from groupwise.sampler import Scores, TokenSink
from groupwise.store.merge import MergeMode, WeightedAdapter, merge_adapters
from groupwise.types import Completion, PolicyVersion, SamplingParams, SamplingRequest, SequenceScores

RANK = 32  # of the largest adapter, where vllm.max_lora_rank does not say


class LiveVllm(VllmEngine, Scores):
    """A `LiveEngine` over vLLM servers. Raises as `VllmEngine`."""

    def __init__(self, config: VllmConfig, base: LoadedModel, local: LocalEngine, *, most_rank: int, **how: Any):
        self._local, self._most_rank = local, most_rank
        self._counting, self._unfinished = threading.Lock(), 0
        super().__init__(config, base, local, patient=True, **how)

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(
        self, requests: Sequence[SamplingRequest], *, on_token: TokenSink | None = None
    ) -> list[Future[list[Completion]]]:
        answer = self._answer if on_token is None else partial(self._streamed, on_token)
        futures = self._submitted(requests, answer)
        for request, future in zip(requests, futures, strict=True):
            self._count(request.n)
            future.add_done_callback(lambda _, n=request.n: self._count(-n))
        return futures

    def _check_supported(self, params: SamplingParams) -> None:
        """Do nothing: every request is supported."""

    async def _streamed(self, on_token: TokenSink, job: QueuedRequest) -> list[Completion]:
        request = job.request
        if request.params.reshaped:
            completions = await self._answer(job)
            for index, each in enumerate(completions):
                tell(on_token, index, each.token_ids, each.logprobs, each.top_logprobs)
            return completions
        rows = [CompletionStream(self, job, index, on_token) for index in range(request.n)]
        send = partial(self._fleet.send, job.name, conversation=request.conversation)
        sending = [asyncio.create_task(send(row.ask)) for row in rows]
        try:
            return [self._completion(each, request) for each in await asyncio.gather(*sending)]
        finally:
            for task in sending:
                task.cancel()

    def _count(self, change: int) -> None:
        with self._counting:
            self._unfinished += change

    # -- versions ------------------------------------------------------------------------------------------------------

    def load(self, version: PolicyVersion, directory: Path) -> None:
        rank, patterns = 0, list[str]()
        with suppress(OSError, ValueError, TypeError, KeyError, OverflowError):  # what cannot be read is refused below
            config = json.loads((directory / FILES[0]).read_text())
            patterns = [key for key in ("alpha_pattern", "rank_pattern", "use_dora") if config.get(key)]
            rank = int(config["r"])
        if "use_dora" in patterns:
            raise AdapterError(
                f"{version} is trained with DoRA, which vLLM does not serve", hint="serve it with engine local"
            )
        if patterns:
            raise AdapterError(
                f"{version} has a {patterns[0]}, and vLLM scales every module alike: it would compute something else",
                hint="serve it with engine local; a merge of it alone has one scale: POST /v1/adapters/merge there",
            )
        if rank > self._most_rank:
            raise AdapterError(
                f"{version} has rank {rank}; vLLM takes adapters up to rank {self._most_rank} here",
                hint="start the server with a larger vllm.max_lora_rank",
            )
        try:
            super().load(version, directory)
        except EngineError as error:
            if self.unavailable_reason is None:
                raise
            raise NotReadyError(f"{version} cannot be loaded: {error.message}", hint=error.hint) from error

    def load_composed(self, version: PolicyVersion, parts: Sequence[tuple[Path, float]]) -> None:
        with TemporaryDirectory(prefix="groupwise-sum-") as place:
            merge_adapters([WeightedAdapter(path, scale) for path, scale in parts], Path(place), mode=MergeMode.CONCAT)
            self.load(version, Path(place))

    # -- and what the local engine does --------------------------------------------------------------------------------

    def score_sequence(self, ids: Sequence[int], version: PolicyVersion, **what: Any) -> SequenceScores:
        return self._local.score_sequence(ids, version, **what)

    @property
    def vocabulary(self) -> int:
        return self._local.vocabulary

    # -- how it is -----------------------------------------------------------------------------------------------------

    @property
    def lost(self) -> DeviceLostError | None:
        return self._local.lost

    @property
    def unavailable_reason(self) -> str | None:
        if self.lost is not None:
            return self.lost.message
        if self._fleet.up:
            return None
        return "; ".join(f"vLLM at {member.name}: {member.why}" for member in self._fleet.members)

    def stats(self) -> Mapping[str, int]:
        """Return the counts of requests. vLLM does not say which it has begun, so all requests that it has count as
        `running`."""
        running = self._unfinished if self._fleet.up else 0
        return {"running": running, "waiting": self._unfinished - running, "adapters": len(self._leases.versions)}


def open_live(
    config: VllmConfig, base: LoadedModel, *, model: str, device: str, rows: int, cast_lm_head: str
) -> LiveVllm:
    """Return the engine of a server of `model`, `rows` completions at once. Raises EngineError, ConfigError."""
    rank = config.max_lora_rank or RANK
    shape = shape_of(
        model, base.model, rank=rank, targets="all-linear", rows=rows, device=device, cast_lm_head=cast_lm_head
    )
    return LiveVllm(
        config,
        base,
        LocalEngine(base, max_rows=1, prefix_cache_mb=0),
        most_rank=rank_of(rank),
        targets=shape.targets,
        starts=[] if config.urls else starts_here(config, shape, None),
    )
