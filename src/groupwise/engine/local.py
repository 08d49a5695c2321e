"""The in-process engine: continuous batching over one torch model, on a CPU or a GPU.

    submit -> waiting -> admit (prefill the prompt ONCE, for all its completions) -> decode -> finished

A decode step is one forward of a token per active row (`rows`), or of several where drafts are checked (`lookup`), one
fused sampling step (`sampling`), and bookkeeping in tensors. Python runs per *finished* row, and per row and token only
for drafts and where a request has stop strings, a stream or alternatives to report. Waiting requests are admitted in
order, interactive ones first, each as soon as enough rows are free: its n, or an eighth of all rows where n is more, so
that a prompt is not prefilled again for every row that falls free. The next turn of a conversation goes on from the
keys and values of the last (`prefix_cache`).

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
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupwise.engine.compiled import Compiled
from groupwise.engine.kv_cache import (
    Apart,
    Extend,
    Grid,
    Kept,
    KeyValueCache,
    Prefill,
    Prefilled,
    PrefixCache,
    PromptKey,
    parts_of,
)
from groupwise.engine.lookup import Lookup
from groupwise.engine.multi_lora import AdapterBank, AdapterWeights, add_adapters, read_adapter
from groupwise.engine.rows import PendingRequest, Rows
from groupwise.engine.sampling import reshape, sample_tokens, scaled_logprobs, uniforms
from groupwise.errors import AdapterNotFoundError, ConfigError, ContextLengthError, GroupwiseError, ModelError
from groupwise.model.attention import Layout, SharedPrompts
from groupwise.model.backbone import Backbone
from groupwise.model.chat import closing_ids, decode, stopped_text
from groupwise.model.load import Head, LoadedModel, share_weights
from groupwise.model.packed_check import why_not_packed
from groupwise.types import Completion, FinishReason, PolicyVersion, SamplingRequest, TokenSink

# ----------------------------------------------------------------------------------------------------------------------
# Requests that are being given rows, and what of their prompts need not be computed: it was kept of earlier turns.
# ----------------------------------------------------------------------------------------------------------------------

EXTEND_TOKENS = 512  # of a conversation that goes on, in one forward; of several 4 times as many, padding included
MOST_HELD = 512  # tokens that a row holds of a conversation; or as many as its opening has, where that is more


@dataclass(frozen=True)
class Admitted:
    """A request that gets `n` rows, with nothing of its prompt cached."""

    job: PendingRequest
    n: int


@dataclass(frozen=True)
class GoingOn(Admitted):
    """A request that gets a row and whose first `known` prompt tokens are cached in `past`."""

    past: Kept
    known: int

    @property
    def shared(self) -> int:
        """How many of the known tokens are in the opening shared with other conversations."""
        return min(self.known, self.past.shared)

    @property
    def new(self) -> int:
        """Prompt tokens that are still to be computed."""
        return len(self.job.request.prompt_ids) - self.known

    def piece(self, start: int, size: int) -> range:
        """The positions of up to `size` new tokens from the `start`-th on."""
        end = len(self.job.request.prompt_ids)
        return range(min(self.known + start, end), min(self.known + start + size, end))


def admitted(job: PendingRequest, n: int, past: tuple[Kept, int] | None) -> Admitted:
    """Combine a request with what `known_of` found in the cache; too long a private part becomes an opening of its
    own."""
    if past is None:
        return Admitted(job, n)
    kept, known = past
    if kept.own and len(job.request.prompt_ids) - kept.shared > max(MOST_HELD, kept.shared):
        kept = kept.folded()
    return GoingOn(job, n, kept, known)


def known_of(job: PendingRequest, cache: PrefixCache) -> tuple[Kept, int] | None:
    """The cached conversation that the prompt continues, and how many tokens are known; None without one."""
    request = job.request
    return cache.find(job.weights, request.prompt_ids) if request.cache and request.n == 1 else None


def together(going: Sequence[GoingOn]) -> Iterator[list[GoingOn]]:
    """Batches of requests for one forward each, sorted by new tokens so that there is little padding."""
    batch: list[GoingOn] = []
    for each in sorted(going, key=lambda each: each.new):
        if batch and (len(batch) + 1) * min(each.new, EXTEND_TOKENS) > 4 * EXTEND_TOKENS:
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch


def pieces_of(going: Sequence[GoingOn]) -> Iterator[list[range]]:
    """For each forward of a batch, the positions of each request that it computes: EXTEND_TOKENS at most."""
    for start in range(0, max(each.new for each in going), EXTEND_TOKENS):
        yield [each.piece(start, EXTEND_TOKENS) for each in going]


PREFILL_TOKENS = 8192  # prompt tokens prefilled in one forward, counting the padding to the longest of them
SORT_EVERY, MOST_BEYOND = 16, 1.5  # decode steps; tokens read per token there is, beyond which rows are sorted
SCORED_AT_ONCE = 512  # positions: their logits, [positions, vocabulary], exist at the same time
# On a CPU a small model's step is over before a second thread has woken up for each of its operations: it runs on one
# thread while its weights fit a cache and its products come to less than this.
CACHED_BYTES, ONE_THREAD_FLOPS = 32 << 20, 1 << 30


class LocalEngine:
    """Samples from a `LoadedModel` and any number of adapter versions over it; a `Sampler`.

    Args:
        base: the model; the engine works on a module tree of its own over the same weights.
        max_rows: completions decoded at once. Memory: 2 x layers x K x D values per row and token.
        reserved_rows: how many of them only interactive requests may use.
        prefix_cache_mb: MiB of keys and values kept after requests that asked for it (`SamplingRequest.cache`).
        draft_tokens: most tokens of a row that are guessed and checked in one step (`lookup`); 0 guesses none.
        compile: compile the dense parts of decode steps (`compiled`). A warning says where that cannot be.
        threads: of torch. None: as many as torch has here, but one for the steps of a small model. Its operations take
            less time than it takes to wake OpenMP's helpers, which go to sleep between any two where several threads of
            a process have some, or OMP_WAIT_POLICY is passive. A number is for where nobody else has any.

    Raises:
        ConfigError: reserved_rows or draft_tokens is out of range.
        ModelError: this architecture cannot run packed (`packed_check.why_not_packed`).
    """

    def __init__(
        self,
        base: LoadedModel,
        *,
        max_rows: int = 256,
        reserved_rows: int = 0,
        prefix_cache_mb: int = 1024,
        draft_tokens: int = 0,
        compile: bool = False,
        threads: int | None = None,
    ):
        self._base, self._model = base, share_weights(base.model)
        if why := why_not_packed(self._model):
            raise ModelError(
                f"{type(self._model).__name__} cannot run in the local engine: {why}",
                hint="use a model whose layers attend to all earlier tokens or to a sliding window",
            )
        if not 0 <= reserved_rows < max_rows:
            raise ConfigError(f"reserved_rows is {reserved_rows}; it must be at least 0 and less than {max_rows}")
        self.max_rows, self.reserved_rows = max_rows, reserved_rows
        self._head, self._bank = Head.of(self._model), AdapterBank(self._model)
        self._backbone = Backbone(self._model, self._bank.project)
        self._adapters: dict[PolicyVersion, AdapterWeights | None] = {}  # None: the base weights
        self._rows, self._cache = Rows(max_rows, base.device), KeyValueCache(max_rows)
        self._past, self._lookup = PrefixCache(prefix_cache_mb << 20), Lookup(draft_tokens, base.device)
        self._since_sorted = 0  # decode steps
        self._grid: Grid | None = None  # None: rows have come or gone since it was made
        self._eos_ids = base.eos_ids
        self._eos = torch.tensor(self._eos_ids, dtype=torch.long, device=base.device)
        self._ends = closing_ids(base.tokenizer)
        embedding: Any = self._model.get_input_embeddings()
        self._vocabulary = int(embedding.weight.shape[0])
        self._threads = threads or torch.get_num_threads()
        weights = [weight for weight in self._model.parameters() if weight.ndim == 2]
        self._flops = 2 * sum(weight.numel() for weight in weights)  # of a token
        size = sum(weight.numel() * weight.itemsize for weight in weights)
        self._small = threads is None and size <= CACHED_BYTES and base.device.type == "cpu"
        self._steps = Compiled(self._backbone, self._bank, self._threads, self._small) if compile else self._backbone
        self._urgent: deque[PendingRequest] = deque()
        self._waiting: deque[PendingRequest] = deque()
        self._admitted: list[Admitted] = []  # in the midst of being given rows
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._wakeup = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None

    # -- the Sampler protocol -----------------------------------------------------------------------------------------

    @property
    def context_length(self) -> int:
        return self._base.context_length

    async def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Completion]]:
        return list(await asyncio.gather(*(asyncio.wrap_future(future) for future in self.submit(requests))))

    def load(self, version: PolicyVersion, directory: Path) -> None:
        if version not in self._adapters and not version.is_base:
            weights = read_adapter(directory, device=self._base.device)
            self._bank.prepare(weights)
            self._adapters[version] = weights

    def adopt(self, version: PolicyVersion) -> None:
        self._adapters[version] = None
        self._call_soon(lambda: self._forget(None))

    def unload(self, version: PolicyVersion) -> None:
        weights = self._adapters.pop(version, None)  # rows in flight keep the weights they were admitted with
        if weights is not None:
            self._call_soon(lambda: self._forget(weights))

    def close(self) -> None:
        with self._wakeup:
            self._closing = True
            self._wakeup.notify()
        if self._thread is not None:
            self._thread.join(timeout=30)

    # -- and what this engine can besides ------------------------------------------------------------------------------

    def generate(self, requests: Sequence[SamplingRequest]) -> list[list[Completion]]:
        """`sample` for callers without an event loop."""
        return [future.result() for future in self.submit(requests)]

    def submit(
        self, requests: Sequence[SamplingRequest], *, on_token: TokenSink | None = None
    ) -> list[Future[list[Completion]]]:
        """Queue requests, admitted together and in order; a future of `n` completions for each.

        `on_token` hears of every token as it is sampled, in the engine's thread, and must return at once.
        """
        jobs = [self._job(request, on_token) for request in requests]
        with self._wakeup:
            self._start()
            for job in jobs:
                (self._urgent if job.request.interactive else self._waiting).append(job)
            self._wakeup.notify()
        return [job.future for job in jobs]

    def score(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        version: PolicyVersion,
        *,
        temperature: float = 1.0,
    ) -> tuple[float, ...]:
        """Log-probability (nats) of each completion token after the prompt, under `version`.

        Raises:
            AdapterNotFoundError, ContextLengthError, ModelError: as `sample`.
        """
        scored = self.score_top(prompt_ids, completion_ids, version, temperature=temperature, top=0)
        return tuple(logprob for logprob, _ in scored)

    def score_top(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        version: PolicyVersion,
        *,
        temperature: float = 1.0,
        top: int,
    ) -> tuple[tuple[float, tuple[tuple[int, float], ...]], ...]:
        """As `score`; beside each log-probability those of the `top` likeliest tokens in its place, by their ids."""
        ids = (*prompt_ids, *completion_ids)
        weights = self._check(ids[:-1] if completion_ids else ids, version)
        self._check_ids(ids)  # the last is not read, and must be there all the same

        def run() -> tuple[tuple[float, tuple[tuple[int, float], ...]], ...]:
            layout = SharedPrompts([len(ids)], device=self._base.device)
            hidden_SH = self._forward(ids, range(len(ids)), layout, [weights] * len(ids))
            temperature_1 = torch.tensor([temperature], dtype=torch.float64, device=hidden_SH.device)
            scored = []
            for at in range(len(prompt_ids) - 1, len(ids) - 1, SCORED_AT_ONCE):
                target_T = torch.tensor(ids[at + 1 : at + 1 + SCORED_AT_ONCE], device=hidden_SH.device)
                logits_TV = self._head.logits(hidden_SH[at : at + len(target_T)])
                logprobs_TV = scaled_logprobs(logits_TV, temperature_1)
                best = logprobs_TV.topk(top)
                tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
                pairs = [tuple(zip(*each, strict=True)) for each in tops]
                scored += zip(logprobs_TV.gather(1, target_T[:, None])[:, 0].tolist(), pairs, strict=True)
            return tuple(scored)

        if not completion_ids:
            return ()
        with self._wakeup:
            self._start()
        return self._call_soon(run).result()

    def load_composed(self, version: PolicyVersion, parts: Sequence[tuple[Path, float]]) -> None:
        """Make the weighted sum of saved adapters available under `version`. Raises AdapterError as `load` does."""
        if version not in self._adapters:
            weights = add_adapters([(read_adapter(path, device=self._base.device), scale) for path, scale in parts])
            self._bank.prepare(weights)
            self._adapters[version] = weights

    @property
    def unavailable_reason(self) -> None:
        """Always None: the engine is in this process."""
        return None

    def stats(self) -> dict[str, int]:
        """Completions being decoded, completions waiting for a row, and adapters loaded; with `draft_tokens` also how
        many tokens were drafted and accepted so far."""
        waiting = sum(job.request.n - job.started for job in (*self._urgent, *self._waiting))
        stats = {"running": self._rows.active, "waiting": waiting, "adapters": len(self._adapters)}
        return stats | self._lookup.stats()

    # -- admission ----------------------------------------------------------------------------------------------------

    def _job(self, request: SamplingRequest, on_token: TokenSink | None) -> PendingRequest:
        if request.n < 1:
            raise ConfigError(f"n is {request.n}; a request is for at least 1 completion")
        weights = self._check(request.prompt_ids, request.version)
        room = self.context_length - len(request.prompt_ids)
        seed = secrets.randbits(63) if request.params.seed is None else request.params.seed
        return PendingRequest(request, weights, min(request.params.max_tokens, room), seed, on_token)

    def _check(self, prompt_ids: Sequence[int], version: PolicyVersion) -> AdapterWeights | None:
        """The weights of `version`. Raises if the prompt cannot be run or the version is not there."""
        prompt, context = len(prompt_ids), self.context_length
        if not prompt:
            raise ContextLengthError("the prompt has no tokens", hint="give at least one token id")
        self._check_ids(prompt_ids)
        if prompt >= context:
            raise ContextLengthError(
                f"the prompt has {prompt} tokens and the model's context is {context}: no room for a single new token",
                hint="shorten the prompt",
            )
        if not version.is_base and version not in self._adapters:
            loaded = ", ".join(map(str, sorted(self._adapters))) or "none"
            raise AdapterNotFoundError(f"adapter version {str(version)!r} is not loaded; loaded: {loaded}")
        return None if version.is_base else self._adapters[version]

    def _check_ids(self, ids: Sequence[int]) -> None:
        if not 0 <= min(ids) <= max(ids) < self._vocabulary:
            worst = max(ids, key=lambda token: abs(token - self._vocabulary / 2))
            raise ModelError(
                f"the prompt has the token id {worst}; this model has the ids 0 to {self._vocabulary - 1}",
                hint="encode the prompt with this model's tokenizer",
            )

    def _admit(self) -> None:
        """Give waiting completions the free rows, in order, and prefill their prompts."""
        self._admitted = []
        free, computed, longest = self.max_rows - self._rows.active, 0, 0  # rows; prompts in this forward
        slots, new = dict[PromptKey, int](), set[PromptKey]()  # of prompts that are there; prompts that are not yet
        for queue, kept in ((self._urgent, 0), (self._waiting, self.reserved_rows)):
            while queue:
                job, most = queue[0], self.max_rows - kept
                missing = job.request.n - job.started
                if free - kept < min(missing, max(1, most // 8)):
                    break
                past = known_of(job, self._past)
                slots = slots or self._cache.whole()
                there = job.prompt in slots or job.prompt in new
                if not job.started:
                    job.cached = past[1] if past else len(job.request.prompt_ids) if there else 0
                if past or not there:
                    longest = max(longest, len(job.request.prompt_ids) - (past[1] if past else 0))
                    if self._admitted and (computed + 1) * longest > PREFILL_TOKENS:
                        break
                    computed += 1
                    new |= set() if past else {job.prompt}
                n = min(missing, free - kept)
                free -= n
                self._admitted.append(admitted(job, n, past))
                if n == missing:
                    queue.popleft()
                else:
                    break  # its next completions follow when these rows are taken
        if anew := [each for each in self._admitted if not isinstance(each, GoingOn)]:
            self._prefill(anew, slots)
        for going in together([each for each in self._admitted if isinstance(each, GoingOn)]):
            self._extend(going)
        self._admitted = []

    def _prefill(self, anew: Sequence[Admitted], slots: dict[PromptKey, int]) -> None:
        """Run the prompts that are in none of the slots yet, and sample the first token of every completion."""
        rows, cache, first = self._rows, self._cache, self._rows.active
        jobs = [job for key, job in {each.job.prompt: each.job for each in anew}.items() if key not in slots]
        new = cache.add_prompts([len(job.request.prompt_ids) for job in jobs])
        slots = slots | dict(zip((job.prompt for job in jobs), new, strict=True))
        for each in anew:
            rows.add(each.job, each.n, slot=slots[each.job.prompt], shared=len(each.job.request.prompt_ids))
        self._grid = None
        cache.rows.reserve(rows.active, 1)
        rows.reserve(max(each.job.max_tokens for each in anew))
        if jobs:
            self._run_prompts(jobs, new)
        at = slice(first, rows.active)
        used = {row.slot: cache.prefilled[row.slot] for row in rows.owners[at]}
        hidden_PH = torch.stack([there.hidden_H for there in used.values() if there is not None])
        place = {slot: p for p, slot in enumerate(used)}
        per_row = torch.tensor([place[row.slot] for row in rows.owners[at]], device=hidden_PH.device)
        self._advance(at, self._head.logits(hidden_PH)[per_row])

    def _run_prompts(self, jobs: Sequence[PendingRequest], slots: range) -> None:
        """Fill the slots, and note whose prompts are there and what predicts their next tokens."""
        prompts = [job.request.prompt_ids for job in jobs]
        owners = [job.weights for job in jobs for _ in job.request.prompt_ids]
        positions = [position for prompt in prompts for position in range(len(prompt))]
        layout = Prefill(self._cache, slots, self._base.device)
        hidden_SH = self._forward(list(chain(*prompts)), positions, layout, owners)
        last = torch.tensor([len(prompt) for prompt in prompts], device=hidden_SH.device).cumsum(0) - 1
        for slot, job, hidden_H in zip(slots, jobs, hidden_SH[last], strict=True):
            self._cache.prefilled[slot] = Prefilled(job.weights, job.prompt[1], hidden_H)

    def _extend(self, going: Sequence[GoingOn]) -> None:
        """Give conversations back what was kept of them, run what is new and sample its next tokens."""
        rows, cache, first = self._rows, self._cache, self._rows.active
        for each in going:
            rows.add(each.job, 1, slot=cache.slot_of(each.past.opening), shared=each.shared)
        self._grid = None
        rows.reserve(max(each.job.max_tokens for each in going))
        at = slice(first, rows.active)
        cache.rows.reserve(rows.active, int(rows.held[at].max()))
        for row, each in enumerate(going, first):
            cache.hold(row, each.past.own, each.known - each.shared)
        grid = Apart(*self._places(at), self._base.device)
        last: list[Tensor] = [torch.empty(0)] * len(going)
        for pieces in pieces_of(going):
            held = [piece.start - each.shared for each, piece in zip(going, pieces, strict=True)]
            layout = Extend(cache, grid, at, torch.tensor(held, device=self._base.device), [len(p) for p in pieces])
            ids = [each.job.request.prompt_ids[i] for each, piece in zip(going, pieces, strict=True) for i in piece]
            owners = [each.job.weights for each, piece in zip(going, pieces, strict=True) for _ in piece]
            hidden_SH = self._forward(ids, list(chain(*pieces)), layout, owners)
            for b, mine in enumerate(hidden_SH.split([len(piece) for piece in pieces])):
                last[b] = mine[-1] if len(mine) else last[b]
        self._advance(at, self._head.logits(torch.stack(last)))

    def _sort(self) -> None:
        """Put the rows in order of their lengths where, as they stand, much would be read beyond the end of many."""
        if self._since_sorted < SORT_EVERY:
            return
        rows = self._rows
        lengths_B = (rows.held + rows.count)[: rows.active]
        read = sum(longest * (part.stop - part.start) for part, longest in parts_of(lengths_B.tolist()))
        if read > MOST_BEYOND * int(lengths_B.sum()):
            order = lengths_B.argsort(stable=True)
            self._cache.sort(order, int(lengths_B.max()))
            rows.sort(order)
            self._since_sorted = 0

    def _places(self, at: slice) -> tuple[list[int], list[int], list[int]]:
        """The slots of rows, how much of them each has, and the lengths of all slots."""
        owners = self._rows.owners[at]
        return [row.slot for row in owners], [row.shared for row in owners], self._cache.lengths

    # -- decoding -----------------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        rows, every = self._rows, slice(0, self._rows.active)
        self._since_sorted += 1
        if self._grid is None:
            self._sort()
            self._grid = Grid(*self._places(every), self._base.device)
        # the token sampled last has not been seen by the model yet: it goes in at `position`, which then moves on
        held_B = rows.held[every] + rows.count[every] - 1
        drafts = self._lookup.drafts(rows)
        if drafts is not None:
            layout = Extend(self._cache, self._grid, every, held_B, [1 + len(draft) for draft in drafts])
            return self._check_drafts(drafts, layout)
        layout = Extend(self._cache, self._grid, every, held_B)
        hidden_BH = self._forward(rows.token[every], rows.position[every], layout, rows.weights, self._steps)
        rows.position[every] += 1
        self._advance(every, self._head.logits(hidden_BH))

    def _check_drafts(self, drafts: Sequence[Sequence[int]], layout: Extend) -> None:
        """Run each row's last token and its draft, draw a token after each, record those that stand, retire rows."""
        rows, row_S, t_S = self._rows, layout.row_S, layout.t_S
        ids = [token for row, draft in zip(rows.owners, drafts, strict=True) for token in (row.history.ids[-1], *draft)]
        owners = [weights for weights, draft in zip(rows.weights, drafts, strict=True) for _ in range(1 + len(draft))]
        logits_SV = self._head.logits(self._forward(ids, rows.position[row_S] + t_S, layout, owners))
        place_S = rows.count[row_S] + t_S
        token_S, logprob_S = self._draw(row_S, place_S, logits_SV)
        rows.tokens[row_S, place_S], rows.logprobs[row_S, place_S] = token_S, logprob_S.double()

        def watch(i: int, count: int, s: int) -> str | None:
            return self._watch(i, count, float(logprob_S[s]), logits_SV[s])

        lengths, reasons, cut = self._lookup.settle(rows, drafts, token_S.tolist(), self._eos_ids, watch)
        every = slice(0, rows.active)
        length_B = torch.tensor(lengths, device=row_S.device)
        rows.count[every] += length_B
        rows.position[every] += length_B
        rows.token[every] = rows.tokens[torch.arange(rows.active, device=row_S.device), rows.count[every] - 1]
        self._retire(reasons, cut)

    def _forward(
        self,
        token_S: Tensor | Sequence[int],
        position_S: Tensor | Sequence[int],
        layout: Layout,
        owners: Sequence[AdapterWeights | None],
        run: Callable[[Tensor, Tensor, Layout], Tensor] | None = None,
    ) -> Tensor:
        """Last hidden states [S, hidden] of one packed row, each token under its owner's adapter."""
        device = self._base.device
        token_S, position_S = (torch.as_tensor(x, dtype=torch.long, device=device) for x in (token_S, position_S))
        if self._small:
            alone = len(owners) * self._flops < ONE_THREAD_FLOPS
            torch.set_num_threads(1 if alone else self._threads)  # of this thread of Python's
        self._bank.select(owners)
        return (run or self._backbone)(token_S, position_S, layout)

    def _advance(self, at: slice, logits_BV: Tensor) -> None:
        """Sample the next token of the rows `at`, record it, and retire the rows it finishes."""
        rows = self._rows
        count_B = rows.count[at]
        token_B, logprob_B = self._draw(at, count_B, logits_BV)
        row_B = torch.arange(at.start, at.stop, device=count_B.device)
        rows.token[at] = token_B
        rows.tokens[row_B, count_B] = token_B
        rows.logprobs[row_B, count_B] = logprob_B.double()
        rows.count[at] += 1
        stopped_B = rows.watch_eos[at] & (token_B[:, None] == self._eos).any(-1)
        finished_B = stopped_B | (rows.count[at] >= rows.limit[at])
        extra: dict[int, str] = {}
        for i in (row for row in rows.watched if at.start <= row < at.stop):
            b = i - at.start
            text = self._watch(i, int(rows.count[i]), float(logprob_B[b]), logits_BV[b])
            if text is not None:
                extra[i] = text
        if extra or bool(finished_B.any()):
            reasons = dict.fromkeys(row_B[finished_B].tolist(), FinishReason.LENGTH)
            reasons |= dict.fromkeys(row_B[stopped_B].tolist(), FinishReason.STOP)
            self._retire(reasons | dict.fromkeys(extra, FinishReason.STOP), extra)

    def _draw(self, at: slice | Tensor, place_S: Tensor, logits_SV: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens in these places of the completions in the rows `at`, and their log-probabilities."""
        seed_S = self._rows.seed[at if isinstance(at, slice) else at.cpu().numpy()]
        uniform_S = torch.from_numpy(uniforms(seed_S, place_S.cpu().numpy())).to(place_S.device)
        drawn_SV = self._reshaped(at, place_S, logits_SV) if self._rows.reshaped else None
        return sample_tokens(logits_SV, self._rows.params(at), uniform_S, drawn_BV=drawn_SV)

    def _reshaped(self, at: slice | Tensor, place_S: Tensor, logits_SV: Tensor) -> Tensor:
        """The logits that are drawn from, where some of the rows change theirs."""
        rows, drawn_SV = self._rows, logits_SV.clone()
        owners = range(at.start, at.stop) if isinstance(at, slice) else at.tolist()
        for s, (i, place) in enumerate(zip(owners, place_S.tolist(), strict=True)):
            if i in rows.reshaped:
                job = rows.owners[i].job
                params, prompt_P = job.request.params, job.prompt_words.to(logits_SV.device)
                ends = (*(() if params.ignore_eos else self._eos_ids), *params.stop_ids)
                said_T = rows.tokens[i, :place]  # with drafts among them where nothing depends on what was said
                drawn_SV[s] = reshape(logits_SV[s], params, prompt_P=prompt_P, said_T=said_T, ends=ends)
        return drawn_SV

    def _watch(self, i: int, count: int, logprob: float, logits_V: Tensor) -> str | None:
        """Tell the stream of a row's latest token, the `count`-th, and keep its alternatives; the text before a stop of
        its own, where one ends it."""
        row, tokens = self._rows.owners[i], self._rows.tokens[i, :count]
        params, token = row.job.request.params, int(tokens[-1])
        top: tuple[tuple[int, float], ...] = ()
        if params.top_logprobs:
            best = scaled_logprobs(logits_V[None], self._rows.temperature[i : i + 1])[0].topk(params.top_logprobs)
            top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
            row.alternatives.append(top)
        if row.job.on_token is not None:
            row.job.on_token(row.index, token, logprob, top)
        if not params.stop and token not in params.stop_ids:
            return None
        return stopped_text(tokens.tolist(), params, self._base.tokenizer, ends=self._ends)

    def _retire(self, reasons: dict[int, FinishReason], cut: dict[int, str]) -> None:
        """Make the completions of finished rows, whose text is `cut` or else all of it, and free the rows."""
        rows = self._rows
        for i, reason in reasons.items():
            row, count, text = rows.owners[i], int(rows.count[i]), cut.get(i)
            job, ids = row.job, tuple(rows.tokens[i, :count].tolist())
            job.done[row.index] = Completion(
                token_ids=ids,
                logprobs=tuple(rows.logprobs[i, :count].tolist()),
                text=decode(ids, self._base.tokenizer, ends=self._ends) if text is None else text,
                finish_reason=reason,
                version=job.request.version,
                top_logprobs=tuple(row.alternatives),
                cached_tokens=job.cached,
            )
            if job.request.cache and self._past.most_bytes:  # the token sampled last was never seen by the model
                seen = (*job.request.prompt_ids, *ids[:-1])
                own = self._cache.held(i, int(rows.held[i]) + count - 1)
                self._past.add(Kept(job.weights, seen, self._cache.opening(row.slot), row.shared, own))
            if len(job.done) == job.request.n:
                job.settle([job.done[j] for j in range(job.request.n)])
        self._free(reasons)

    def _drop_cancelled(self) -> None:
        """Forget requests whose future was cancelled: whoever asked has gone away."""
        for queue in (self._urgent, self._waiting):
            while queue and queue[0].future.cancelled():
                queue.popleft()
        self._free({i for i, row in enumerate(self._rows.owners) if row.job.future.cancelled()})

    def _free(self, finished: Collection[int]) -> None:
        """Give up rows, and the slots of prompts that have no row left."""
        if not finished:
            return
        rows = self._rows
        left = {row.slot for i, row in enumerate(rows.owners) if i not in finished}
        moved = rows.remove(finished)
        if moved is not None:
            source, target = moved
            self._cache.rows.move(source, target, int((rows.held + rows.count)[source].max()))
        for slot in sorted(set(range(len(self._cache.lengths))) - left, reverse=True):
            replaced = self._cache.drop_prompt(slot)
            for row in rows.owners:
                if replaced is not None and row.slot == replaced:
                    row.slot = slot
        self._grid = None

    def _forget(self, weights: AdapterWeights | None) -> None:
        """Drop what was made from weights that are unloaded, or from base weights that have changed."""
        self._bank.forget(weights)
        self._past.forget(weights)
        self._cache.forget(weights)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start the thread on first use. The lock is held."""
        if self._closing:
            raise GroupwiseError("the engine is closed")
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="groupwise-engine", daemon=True)
            self._thread.start()

    def _call_soon(self, function: Callable[[], Any]) -> Future[Any]:
        """Run `function` in the thread, between two steps and before what is submitted later."""
        future: Future[Any] = Future()
        with self._wakeup:
            self._calls.append((function, future))
            self._wakeup.notify()
        return future

    @torch.inference_mode()
    def _work(self) -> None:
        torch.set_num_threads(self._threads)  # a new thread has as many as whoever set them last
        while True:
            with self._wakeup:
                self._wakeup.wait_for(
                    lambda: self._closing or self._calls or self._urgent or self._waiting or self._rows.active
                )
                if self._closing:
                    return self._fail(GroupwiseError("the engine was closed"))
            while self._calls:
                _answer(*self._calls.popleft())
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
            taken = [each.job for each in self._admitted] + [row.job for row in self._rows.owners]
            jobs = {id(job): job for job in (*self._urgent, *self._waiting, *taken)}
            calls = list(self._calls)
            for queue in (self._urgent, self._waiting, self._calls):
                queue.clear()
            self._cache.clear()
            self._rows = Rows(self.max_rows, self._base.device)
            self._grid, self._admitted = None, []
            self._past.clear()
        for job in jobs.values():
            job.settle(error)
        for _, future in calls:
            future.set_exception(error)


def _answer(function: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(function())
    except Exception as error:  # belongs to whoever asked
        future.set_exception(error)
