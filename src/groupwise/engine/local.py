"""The in-process engine: continuous batching over one torch model, on a CPU or a GPU.

    submit -> waiting -> admit (prefill the prompt ONCE, copy its keys and values to n rows) -> decode -> finished

A *row* is one completion being decoded. Rows 0..active-1 are in use; when some finish, the last ones move into their
places, so a decode step always works on one dense block: one forward of `active` tokens, one fused sampling step, and
bookkeeping in tensors. Python runs per *finished* row, and per row and token only where a request has stop strings.
Waiting requests are admitted in order, each as soon as enough rows are free: its n, or an eighth of all rows where n is
more, so that a prompt is not prefilled again for every row that falls free.

One thread owns the model and everything above; `submit` hands it requests and returns futures. Requests submitted
together are admitted together, in order, so a seeded batch on an idle engine is reproducible bit for bit. Cancelling a
future frees its rows before the next token.

Shapes: B active rows, S packed tokens, V vocabulary.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from groupwise.chat import decode
from groupwise.engine.cache import Decode, KeyValueCache, Prefill
from groupwise.engine.lora import AdapterBank, AdapterWeights, read_adapter
from groupwise.engine.sampling import RowParams, completion_seed, sample_tokens, uniforms
from groupwise.errors import AdapterNotFoundError, ConfigError, ContextLengthError, GroupwiseError, ModelError
from groupwise.model import Head, LoadedModel, backbone, packed_forward_gap, packed_tolerance, share_weights
from groupwise.types import Completion, FinishReason, PolicyVersion, SamplingRequest

PREFILL_TOKENS = 8192  # prompt tokens prefilled in one forward, counting the padding to the longest of them


@dataclass
class _Job:
    """A submitted request: its future, and the completions that are done."""

    request: SamplingRequest
    weights: AdapterWeights | None
    max_tokens: int
    seed: int
    future: Future[list[Completion]] = field(default_factory=Future)
    done: dict[int, Completion] = field(default_factory=dict)
    started: int = 0  # completions that have been given a row

    def settle(self, outcome: list[Completion] | Exception) -> None:
        """Answer whoever waits, unless nobody does any more."""
        if self.future.done() or not self.future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, Exception):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


class _Rows:
    """The state of the rows, as tensors with a line per row; lines 0..active-1 are in use."""

    def __init__(self, rows: int, device: torch.device):
        self.active = 0
        self.jobs: list[tuple[_Job, int] | None] = [None] * rows  # (request, completion index)

        def column(dtype: torch.dtype) -> Tensor:
            return torch.zeros(rows, dtype=dtype, device=device)

        self.token, self.position = column(torch.long), column(torch.long)
        self.count, self.limit = column(torch.long), column(torch.long)
        self.temperature, self.top_p, self.min_p = (column(torch.float64) for _ in range(3))
        self.top_k = column(torch.long)
        self.watch_eos, self.watch_stop = column(torch.bool), column(torch.bool)
        self.seed = np.zeros(rows, dtype=np.uint64)
        self.tokens = torch.zeros(rows, 0, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(rows, 0, dtype=torch.float64, device=device)

    def reserve(self, length: int) -> None:
        """Make room for completions of `length` tokens."""
        missing = length - self.tokens.shape[1]
        if missing > 0:
            self.tokens = torch.nn.functional.pad(self.tokens, (0, missing))
            self.logprobs = torch.nn.functional.pad(self.logprobs, (0, missing))

    def columns(self) -> tuple[Tensor, ...]:
        return (
            self.token, self.position, self.count, self.limit, self.temperature, self.top_p, self.min_p, self.top_k,
            self.watch_eos, self.watch_stop, self.tokens, self.logprobs,
        )  # fmt: skip

    def params(self) -> RowParams:
        n = self.active
        truncated = bool((self.top_k[:n] > 0).any() or (self.top_p[:n] < 1).any() or (self.min_p[:n] > 0).any())
        return RowParams(self.temperature[:n], self.top_k[:n], self.top_p[:n], self.min_p[:n], truncated)


class LocalEngine:
    """Samples from a `LoadedModel` and any number of adapter versions over it; a `Sampler`.

    Args:
        base: the model; the engine works on a module tree of its own over the same weights.
        max_rows: completions decoded at once. Memory: 2 x layers x K x D values per row and token.

    Raises:
        ModelError: this architecture cannot run packed (the check of `model.packed_forward_gap` failed).
    """

    def __init__(self, base: LoadedModel, *, max_rows: int = 256):
        self._base, self._model = base, share_weights(base.model)
        gap, tolerance = packed_forward_gap(self._model), packed_tolerance(self._model)
        if not gap <= tolerance:
            raise ModelError(
                f"{type(self._model).__name__} cannot run in the local engine: its packed forward differs from its own "
                f"by {gap:.3g} nats (tolerance {tolerance:g})",
                hint="sample it with another engine",
            )
        self.max_rows = max_rows
        self._head, self._bank = Head.of(self._model), AdapterBank(self._model)
        self._adapters: dict[PolicyVersion, AdapterWeights | None] = {}  # None: the base weights
        self._rows = _Rows(max_rows, base.device)
        self._cache = KeyValueCache(max_rows)
        self._eos = torch.tensor(base.eos_ids, dtype=torch.long, device=base.device)
        embedding: Any = self._model.get_input_embeddings()
        self._vocabulary = int(embedding.weight.shape[0])
        self._waiting: deque[_Job] = deque()
        self._wakeup = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None

    # -- the Sampler protocol -----------------------------------------------------------------------------------------

    @property
    def context_length(self) -> int:
        return self._base.context_length

    async def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Completion]]:
        return list(await asyncio.gather(*(asyncio.wrap_future(future) for future in self.submit(requests))))

    def generate(self, requests: Sequence[SamplingRequest]) -> list[list[Completion]]:
        """`sample` for callers without an event loop."""
        return [future.result() for future in self.submit(requests)]

    def submit(self, requests: Sequence[SamplingRequest]) -> list[Future[list[Completion]]]:
        """Queue requests, admitted together and in order; a future of `n` completions for each."""
        jobs = [self._job(request) for request in requests]
        with self._wakeup:
            if self._closing:
                raise GroupwiseError("the engine is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="groupwise-engine", daemon=True)
                self._thread.start()
            self._waiting.extend(jobs)
            self._wakeup.notify()
        return [job.future for job in jobs]

    def load(self, version: PolicyVersion, directory: Path) -> None:
        if version not in self._adapters and not version.is_base:
            weights = read_adapter(directory, device=self._base.device)
            self._bank.prepare(weights)
            self._adapters[version] = weights

    def adopt(self, version: PolicyVersion) -> None:
        self._adapters[version] = None

    def unload(self, version: PolicyVersion) -> None:
        self._adapters.pop(version, None)  # rows in flight keep the weights they were admitted with

    def close(self) -> None:
        with self._wakeup:
            self._closing = True
            self._wakeup.notify()
        if self._thread is not None:
            self._thread.join(timeout=30)

    # -- admission ----------------------------------------------------------------------------------------------------

    def _job(self, request: SamplingRequest) -> _Job:
        prompt, context = len(request.prompt_ids), self.context_length
        if request.n < 1:
            raise ConfigError(f"n is {request.n}; a request is for at least 1 completion")
        if not prompt:
            raise ContextLengthError("the prompt has no tokens", hint="give at least one token id")
        if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < self._vocabulary:
            worst = max(request.prompt_ids, key=lambda token: abs(token - self._vocabulary / 2))
            raise ModelError(
                f"the prompt has the token id {worst}; this model has the ids 0 to {self._vocabulary - 1}",
                hint="encode the prompt with this model's tokenizer",
            )
        if prompt >= context:
            raise ContextLengthError(
                f"the prompt has {prompt} tokens and the model's context is {context}: no room for a single new token",
                hint="shorten the prompt",
            )
        if not request.version.is_base and request.version not in self._adapters:
            loaded = ", ".join(map(str, sorted(self._adapters))) or "none"
            raise AdapterNotFoundError(f"adapter version {str(request.version)!r} is not loaded; loaded: {loaded}")
        seed = secrets.randbits(63) if request.params.seed is None else request.params.seed
        weights = None if request.version.is_base else self._adapters[request.version]
        return _Job(request, weights, min(request.params.max_tokens, context - prompt), seed)

    def _admit(self) -> None:
        """Give waiting completions the free rows, in order, and prefill their prompts."""
        admitted: list[tuple[_Job, list[int]]] = []
        longest = 0
        while self._waiting:
            job = self._waiting[0]
            missing, free = job.request.n - job.started, self.max_rows - self._rows.active
            longest = max(longest, len(job.request.prompt_ids))
            full = free < min(missing, max(1, self.max_rows // 8))
            if full or (admitted and (len(admitted) + 1) * longest > PREFILL_TOKENS):
                break
            admitted.append((job, self._occupy(job, min(missing, free))))
            if job.started == job.request.n:
                self._waiting.popleft()
        if admitted:
            self._prefill(admitted)

    def _occupy(self, job: _Job, n: int) -> list[int]:
        """Give the next `n` completions of `job` the next `n` free rows."""
        rows, params = self._rows, job.request.params
        new = range(rows.active, rows.active + n)
        at = slice(new.start, new.stop)
        rows.active += n
        rows.count[at], rows.limit[at], rows.position[at] = 0, job.max_tokens, len(job.request.prompt_ids)
        rows.temperature[at], rows.top_p[at], rows.min_p[at] = params.temperature, params.top_p, params.min_p
        rows.top_k[at], rows.watch_eos[at] = params.top_k, not params.ignore_eos
        rows.watch_stop[at] = bool(params.stop or params.stop_ids)
        for row in new:
            rows.jobs[row] = (job, job.started)
            rows.seed[row] = completion_seed(job.seed, job.started)
            job.started += 1
        return list(new)

    def _prefill(self, admitted: Sequence[tuple[_Job, list[int]]]) -> None:
        prompts = [job.request.prompt_ids for job, _ in admitted]
        lengths = [len(prompt) for prompt in prompts]
        self._cache.reserve(self._rows.active, max(lengths))
        self._rows.reserve(max(job.max_tokens for job, _ in admitted))
        layout = Prefill(self._cache, lengths, [rows for _, rows in admitted], self._base.device)
        owners = [job.weights for (job, _), length in zip(admitted, lengths, strict=True) for _ in range(length)]
        hidden_SH = self._forward(
            [token for prompt in prompts for token in prompt], [i for n in lengths for i in range(n)], layout, owners
        )
        last = torch.tensor(lengths, device=hidden_SH.device).cumsum(0) - 1
        per_row = torch.tensor([p for p, (_, rows) in enumerate(admitted) for _ in rows], device=hidden_SH.device)
        logits_BV = self._head.logits(hidden_SH[last])[per_row]
        self._advance(torch.tensor([row for _, rows in admitted for row in rows], device=hidden_SH.device), logits_BV)

    # -- decoding -----------------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        rows, n = self._rows, self._rows.active
        # the token sampled last has not been seen by the model yet: it goes in at `position`, which then moves on
        owners = [entry[0].weights for entry in rows.jobs[:n] if entry is not None]
        layout = Decode(self._cache, rows.position[:n])
        hidden_BH = self._forward(rows.token[:n], rows.position[:n], layout, owners)
        rows.position[:n] += 1
        self._advance(torch.arange(n, device=hidden_BH.device), self._head.logits(hidden_BH))

    def _forward(
        self,
        token_S: Tensor | Sequence[int],
        position_S: Tensor | Sequence[int],
        layout: Prefill | Decode,
        owners: Sequence[AdapterWeights | None],
    ) -> Tensor:
        """Last hidden states [S, hidden] of one packed row, each token under its owner's adapter."""
        device = self._base.device
        token_S, position_S = (torch.as_tensor(x, dtype=torch.long, device=device) for x in (token_S, position_S))
        distinct = {id(weights): weights for weights in owners}
        selected = []
        for key, weights in distinct.items():
            if weights is not None:
                mine = [i for i, owner in enumerate(owners) if id(owner) == key] if len(distinct) > 1 else None
                selected.append((weights, None if mine is None else torch.tensor(mine, device=device)))
        self._bank.select(selected)
        out = backbone(self._model)(
            input_ids=token_S[None], position_ids=position_S[None], layout=layout, use_cache=False
        )
        return out.last_hidden_state[0]

    def _advance(self, row_B: Tensor, logits_BV: Tensor) -> None:
        """Sample the next token of rows `row_B`, record it, and retire the rows it finishes."""
        rows = self._rows
        picked = row_B.cpu().numpy()
        uniform_B = torch.from_numpy(uniforms(rows.seed[picked], rows.count[row_B].cpu().numpy())).to(row_B.device)
        params = rows.params()
        params = RowParams(
            params.temperature_B[row_B],
            params.top_k_B[row_B],
            params.top_p_B[row_B],
            params.min_p_B[row_B],
            params.truncated,
        )
        token_B, logprob_B = sample_tokens(logits_BV, params, uniform_B)
        rows.token[row_B] = token_B
        rows.tokens[row_B, rows.count[row_B]] = token_B
        rows.logprobs[row_B, rows.count[row_B]] = logprob_B.double()
        rows.count[row_B] += 1
        stopped_B = rows.watch_eos[row_B] & torch.isin(token_B, self._eos)
        finished_B = stopped_B | (rows.count[row_B] >= rows.limit[row_B])
        extra = self._stopped_by_request(picked.tolist(), token_B)
        if extra or bool(finished_B.any()):
            reasons = dict.fromkeys(row_B[finished_B].tolist(), FinishReason.LENGTH)
            reasons |= dict.fromkeys(row_B[stopped_B].tolist(), FinishReason.STOP)
            self._retire(reasons | dict.fromkeys(extra, FinishReason.STOP), extra)

    def _stopped_by_request(self, picked: list[int], token_B: Tensor) -> dict[int, str]:
        """Rows ended by a stop id or stop string of their own: row -> the text before it."""
        stopped: dict[int, str] = {}
        if not bool(self._rows.watch_stop[: self._rows.active].any()):
            return stopped
        for row, token in zip(picked, token_B.tolist(), strict=True):
            entry = self._rows.jobs[row]
            assert entry is not None
            params = entry[0].request.params
            if not params.stop and token not in params.stop_ids:
                continue
            ids = self._rows.tokens[row, : int(self._rows.count[row])].tolist()
            by_id = token in params.stop_ids
            text = decode(ids[:-1] if by_id else ids, self._base.tokenizer)
            at = [text.find(stop) for stop in params.stop if stop in text]
            if by_id or at:
                stopped[row] = text[: min(at, default=len(text))]
        return stopped

    def _retire(self, reasons: dict[int, FinishReason], cut: dict[int, str]) -> None:
        """Make the completions of finished rows, whose text is `cut` or else all of it, and free the rows."""
        rows = self._rows
        for row, reason in reasons.items():
            entry = rows.jobs[row]
            assert entry is not None
            job, index = entry
            count = int(rows.count[row])
            ids = tuple(rows.tokens[row, :count].tolist())
            text = cut.get(row)
            job.done[index] = Completion(
                token_ids=ids,
                logprobs=tuple(rows.logprobs[row, :count].tolist()),
                text=decode(ids, self._base.tokenizer) if text is None else text,
                finish_reason=reason,
                version=job.request.version,
            )
            if len(job.done) == job.request.n:
                job.settle([job.done[i] for i in range(job.request.n)])
        self._close_gaps(reasons)

    def _drop_cancelled(self) -> None:
        """Forget requests whose future was cancelled: whoever asked has gone away."""
        while self._waiting and self._waiting[0].future.cancelled():
            self._waiting.popleft()
        entries = self._rows.jobs[: self._rows.active]
        self._close_gaps({row for row, entry in enumerate(entries) if entry and entry[0].future.cancelled()})

    def _close_gaps(self, finished: Collection[int]) -> None:
        """Move the last active rows into the finished ones' places."""
        rows = self._rows
        active = rows.active - len(finished)
        holes = sorted(row for row in finished if row < active)
        movers = [row for row in range(active, rows.active) if row not in finished]
        rows.active = active
        if holes:
            source, target = (torch.tensor(x, device=self._base.device) for x in (movers, holes))
            self._cache.move(source, target, int(rows.position[source].max()))
            for column in rows.columns():
                column[target] = column[source]
            rows.seed[holes] = rows.seed[movers]
            for hole, mover in zip(holes, movers, strict=True):
                rows.jobs[hole] = rows.jobs[mover]
        rows.jobs[active : active + len(finished)] = [None] * len(finished)

    # -- the thread ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _work(self) -> None:
        while True:
            with self._wakeup:
                self._wakeup.wait_for(lambda: self._closing or self._waiting or self._rows.active)
                if self._closing:
                    return self._fail(GroupwiseError("the engine was closed"))
            try:
                self._drop_cancelled()
                self._admit()
                if self._rows.active:
                    self._decode()
            except Exception as error:  # the boundary of the thread: whoever waits must hear of it
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Fail every request, waiting or in flight."""
        with self._wakeup:
            jobs = {
                id(job): job for job in (*self._waiting, *(e[0] for e in self._rows.jobs[: self._rows.active] if e))
            }
            self._waiting.clear()
            self._rows.active = 0
        for job in jobs.values():
            job.settle(error)
