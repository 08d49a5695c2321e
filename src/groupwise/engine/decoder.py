"""The common part of all decoders: the model, the rows that are decoded, sampling each row's next token, and completing
rows that are finished.

    PackedDecoder    all its rows in one packed forward over its own cache, prompts shared (`packed`)
    PlainDecoder     any model that transformers can run, by its own forward and cache (`plain`)

A decoder belongs to one thread. `admit` gives waiting requests rows and runs their prompts, `decode` is one step of all
rows: hidden states, logits, a token and its log-probability for each row (`advance`), and the completions of those that
are finished.

Shapes: B rows, S tokens, V vocabulary.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from groupwise.engine.cpu_weights import Float32Matrix, RoundedLayers, lays_out
from groupwise.engine.grammar import allowed_tokens, failed
from groupwise.engine.multi_lora import AdapterBank, AdapterWeights
from groupwise.engine.rows import NEVER, PendingRequest, Row, Rows
from groupwise.engine.sampling import KeptRows, mask_entries, reshape, sample_tokens, scaled_logprobs, uniforms
from groupwise.model.chat import closing_ids, decode, stopped_text
from groupwise.model.head import Head
from groupwise.model.load import LoadedModel
from groupwise.model.mixture import Routers
from groupwise.model.quantized import quantized_layers
from groupwise.model.transfer import on_device
from groupwise.types import Completion, FinishReason, PolicyVersion

PREFILL_TOKENS = 8192  # prompt tokens prefilled in one forward, counting the padding to the longest of them
CACHED_BYTES = 32 << 20  # of weights: a model that is small, on a CPU
PACED_S = 5.0
SETTLED_EVERY = 8  # steps on a GPU, after which the host waits for it to see which rows have ended
MOST_UNREAD = 1 << 27  # bytes of what tokens could be, from which on it does not wait so long

Queue = deque[PendingRequest]


class EngineModel:
    """The model that all decoders of an engine share: a module tree of the engine's own over the base model's weights,
    the LM head, the budget of rows, and the adapters (`bank`), as hooks where the model runs as transformers wrote it
    (`hooked`). `dtype`: linear layers are multiplied with in this type (`rounded`). `compiled`: compiled steps need its
    weights as plain tensors."""

    def __init__(
        self,
        base: LoadedModel,
        model: PreTrainedModel,
        budget: RowBudget,
        *,
        hooked: bool,
        records: bool = False,
        dtype: str | None = None,
        compiled: bool = False,
    ):
        rounded = None if dtype is None else partial(RoundedLayers, dtype)
        lay_out = Float32Matrix if lays_out(model) and not compiled else None
        self.routers = Routers(model) if records else None
        self.base, self.model, self.device, self.budget = base, model, base.device, budget
        self.head, self.bank = Head.of(model), AdapterBank(model, hooked=hooked, rounded=rounded, lay_out=lay_out)
        self.vocabulary = int(self.head.weight_VH.shape[0])
        self.eos_ids = base.eos_ids
        self.eos = torch.tensor(self.eos_ids, dtype=torch.long, device=base.device)
        self.ends = closing_ids(base.tokenizer)
        products = [weight for weight in model.parameters() if weight.ndim == 2]
        size = sum(weight.numel() * weight.itemsize for weight in products)
        packed = sum(layer.weight.numel() for layer in quantized_layers(model) if layer.weight.ndim == 2)
        whole = sum(layer.in_features * layer.out_features for layer in quantized_layers(model))
        self.flops = 2 * (sum(weight.numel() for weight in products) - packed + whole)  # of a token
        self.small = base.device.type == "cpu" and size <= CACHED_BYTES


class Decoder(Protocol):
    """Decodes the rows of one engine, step by step, in the engine's thread."""

    @property
    def active(self) -> int:
        """Rows in use."""
        ...

    def admit(self, urgent: Queue, waiting: Queue) -> bool:
        """Give requests the free rows, in order, `urgent` ones first, and run their prompts. `PendingRequest.started`
        counts the completions that have rows; requests all of whose have leave their queue. Returns whether any got
        rows."""
        ...

    def decode(self) -> None:
        """Compute one step of all rows; there is at least one."""
        ...

    def drop_cancelled(self) -> None:
        """Free the rows of requests whose future was cancelled, or failed."""
        ...

    def hidden(self, ids: Sequence[int], weights: AdapterWeights | None) -> Tensor:
        """Return the last hidden states [S, hidden] of one row of tokens."""
        ...

    def hidden_before(
        self, prompt_ids: Sequence[int], completions: Sequence[Sequence[int]], weights: AdapterWeights | None
    ) -> list[Tensor]:
        """Return for each completion of a prompt the last hidden states [T, hidden] that predict its tokens, none of
        which is empty."""
        ...

    def follow(
        self, old: PolicyVersion, new: PolicyVersion, weights: AdapterWeights | None, *, recompute: bool
    ) -> None:
        """Between two steps: the rows of version `old` continue under `new`, whose weights these are, with the keys and
        values that they have, or with those that the new weights `recompute` of all that they read and said."""
        ...

    def forget(self, weights: AdapterWeights | None) -> None:
        """Drop what was made from weights that are unloaded, or from base weights that have changed (None)."""
        ...

    def rest(self) -> None:
        """Give back the memory that is kept for the next rows. There are none now."""
        ...

    def clear(self) -> list[PendingRequest]:
        """Free everything after a failure. Returns the requests that had rows, or were being given some."""
        ...

    def stats(self) -> dict[str, int]:
        """Counts of the decoder's own."""
        ...


class RowBudget:
    """The rows that the decoders of an engine share: `most`, of which `reserved` are for interactive requests only.

    While interactive requests run, batches have `paced` rows: a step takes longer the more rows it has, and so does
    running the prompts of all that were admitted together. They count as running from the first row of an interactive
    request until `PACED_S` seconds after its last, as the same client may ask again."""

    def __init__(self, most: int, reserved: int, paced: int | None = None):
        self.most, self.reserved, self.free, self._lock = most, reserved, most, threading.Lock()
        self._paced = most if paced is None else paced
        self._batch = self._interactive = 0  # rows in use
        self._asked = -math.inf  # when an interactive request last had rows

    def take(self, job: PendingRequest) -> int:
        """Return how many rows a request gets now: all that it misses, or at least an eighth of all, so that a prompt
        is not run again for every row that falls free; else 0."""
        with self._lock:
            most, free, missing = self.most, self.free, job.request.n - job.started
            if not job.request.interactive:
                most = min(most - self.reserved, self._paced if self._somebody_waits() else most)
                free = min(free - self.reserved, most - self._batch)
            taken = min(missing, free) if free >= min(missing, max(1, most // 8)) else 0
            self._count(job, taken)
            return taken

    def give(self, job: PendingRequest, rows: int) -> None:
        """Take back the rows of a request that are free again."""
        with self._lock:
            self._count(job, -rows)

    def _count(self, job: PendingRequest, rows: int) -> None:
        self.free -= rows
        if not job.request.interactive:
            self._batch += rows
        elif rows:
            self._interactive, self._asked = self._interactive + rows, time.monotonic()

    def _somebody_waits(self) -> bool:
        return self._interactive > 0 or time.monotonic() - self._asked < PACED_S


class DecodedRows(ABC):
    """Rows that are decoded together: their state, and what is done with every token."""

    def __init__(self, shared: EngineModel, max_rows: int):
        self.shared, self.rows = shared, Rows(max_rows, shared.device)
        self.most_unsettled = SETTLED_EVERY if shared.device.type == "cuda" else 1  # gpu-aware
        self._unsettled = 0  # steps since the last look at which rows have ended
        self._unread: list[tuple[list[Row], KeptRows]] = []  # what the tokens of rows could be, still on the device
        self.chosen_SLK: Tensor | None = None  # experts of the last forward's tokens, where they are recorded

    @property
    def active(self) -> int:
        """Rows in use."""
        return self.rows.active

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around a forward: `chosen_SLK` is what its routers chose, int16 in the CPU's memory."""
        if self.shared.routers is None or not self.shared.routers.modules:
            yield
            return
        with self.shared.routers.watched() as seen:
            yield
        self.chosen_SLK = torch.stack([each.chosen_SK for each in seen], 1).to("cpu", torch.int16)

    def drop_cancelled(self) -> None:
        """Free the rows of requests whose future is done before they are: the caller cancelled it, or it failed."""
        gone = {i for i, row in enumerate(self.rows.owners) if row.job.future.done()}
        if gone:
            self.read_kept()
        self.free(gone)

    def advance(self, at: slice, logits_BV: Tensor) -> None:
        """Sample the next token of the rows `at` and record it. `settle` retires finished rows, after every few
        steps."""
        rows = self.rows
        count_B, owners, places = rows.count[at], range(at.start, at.stop), rows.on_host.count[at]
        token_B, logprob_B, kept = self.draw(at, owners, places, logits_BV)
        row_B = torch.arange(at.start, at.stop, device=count_B.device)
        rows.token[at] = token_B
        rows.tokens[row_B, count_B] = token_B
        rows.logprobs[row_B, count_B] = logprob_B.to(rows.logprobs.dtype)
        rows.count[at] += 1
        rows.on_host.count[at] += 1
        if kept is not None:
            mine = [i for i in rows.recorded if at.start <= i < at.stop]
            self.record(kept, {i: slice(i - at.start, i - at.start + 1) for i in mine})
        stopped_B = rows.watch_eos[at] & (token_B[:, None] == self.shared.eos).any(-1)
        rows.ended[at] = torch.minimum(rows.ended[at], count_B.masked_fill(~stopped_B, NEVER))  # count_B has it too now
        extra: dict[int, str] = {}
        for i in (row for row in rows.watched if at.start <= row < at.stop):
            b = i - at.start
            text = self.watch(i, int(rows.on_host.count[i]), float(logprob_B[b]), logits_BV[b])
            if text is not None:
                extra[i] = text
        self._unsettled += 1
        full = bool((rows.on_host.count[: rows.active] >= rows.on_host.limit[: rows.active]).any())
        unread = sum(kept.kept_BV.nbytes for _, kept in self._unread)
        if extra or full or self._unsettled >= self._settled_every or unread > MOST_UNREAD:
            self.settle(extra)

    @property
    def _settled_every(self) -> int:
        """Return the number of steps between two looks at which rows have ended: 1 if Python has to see every token."""
        rows = self.rows
        return 1 if rows.watched or rows.matchers else self.most_unsettled

    def settle(self, extra: Mapping[int, str] | None = None) -> None:
        """Retire the rows that are finished; those in `extra` with the text that is left of theirs. A row that ended
        some steps ago has said more since, which is thrown away."""
        rows, extra, self._unsettled = self.rows, extra or {}, 0
        self.read_kept()
        if not rows.active:
            return
        every = slice(0, rows.active)
        count_B, ended_B = rows.on_host.count[every], rows.ended[every].cpu().numpy()
        stopped_B = ended_B <= count_B
        finished = np.flatnonzero(stopped_B | (count_B >= rows.on_host.limit[every])).tolist()
        reasons = {i: FinishReason.STOP if stopped_B[i] else FinishReason.LENGTH for i in finished}
        for i in finished:
            rows.on_host.count[i] = min(count_B[i], ended_B[i])
        if reasons or extra:
            self.retire(reasons | dict.fromkeys(extra, FinishReason.STOP), dict(extra))

    def draw(
        self, at: slice | Tensor, owners: Sequence[int] | np.ndarray, places: np.ndarray, logits_SV: Tensor
    ) -> tuple[Tensor, Tensor, KeptRows | None]:
        """Return the tokens in these places of the completions in the rows `at`, which on the host are `owners`, their
        log-probabilities, and what they could be where that may not be the whole vocabulary."""
        rows = self.rows
        drawn = uniforms(rows.on_host.seed[at if isinstance(at, slice) else owners], places)
        uniform_S = on_device(drawn, logits_SV.device, rows.logprobs.dtype)
        drawn_SV = self._reshaped(owners, places, logits_SV) if rows.reshaped else None
        followed = {i: s for s, i in enumerate(owners) if i in rows.matchers} if rows.matchers else {}
        if followed:
            drawn_SV = self._in_grammar(followed, logits_SV, drawn_SV)
        token_S, logprob_S, kept = sample_tokens(logits_SV, rows.params(at), uniform_S, drawn_BV=drawn_SV)
        if followed:
            for i, token in zip(followed, token_S[list(followed.values())].tolist(), strict=True):
                began = time.thread_time()
                rows.matchers[i].consume_token(token)
                rows.owners[i].job.match_time.take(time.thread_time() - began, tokens=1)
        return token_S, logprob_S, kept

    def _in_grammar(self, followed: dict[int, int], logits_SV: Tensor, drawn_SV: Tensor | None) -> Tensor:
        """Return the logits that are drawn from, those of tokens that a row's grammar does not allow being -inf. Where
        the grammar allows only what something else has excluded (`min_tokens`) the grammar decides. A request whose
        matcher fails is settled with its error, and its rows are drawn for the last time."""
        matchers = [self.rows.matchers[i] for i in followed]
        began = time.perf_counter(), time.process_time()  # threads share the work, and others' programs may delay it
        allowed = allowed_tokens(matchers, logits_SV.shape[1])
        each_s = min(time.perf_counter() - began[0], time.process_time() - began[1]) / len(matchers)
        allowed_CV = on_device(torch.from_numpy(allowed), logits_SV.device)
        for i, matcher, allowed_V in zip(followed, matchers, allowed_CV, strict=True):
            job = self.rows.owners[i].job
            job.match_time.take(each_s)
            if matcher.is_error() or job.match_time.is_over:
                assert job.request.params.grammar is not None
                job.settle(failed(job.request.params.grammar, matcher))
                allowed_V[:] = True
        place_C = on_device(list(followed.values()), logits_SV.device)
        drawn_SV = logits_SV.clone() if drawn_SV is None else drawn_SV
        masked_CV = drawn_SV[place_C].masked_fill(~allowed_CV, -math.inf)
        none_C = masked_CV.isneginf().all(-1)
        masked_CV[none_C] = logits_SV[place_C][none_C].masked_fill(~allowed_CV[none_C], -math.inf)
        drawn_SV[place_C] = masked_CV
        return drawn_SV

    def record(self, kept: KeptRows, tokens: Mapping[int, slice]) -> None:
        """Record what the tokens of rows could be: `tokens` says which of those drawn are each row's. It stays on the
        device until it is read (`read_kept`)."""
        owners = [self.rows.owners[i] for i, mine in tokens.items() for _ in range(mine.start, mine.stop)]
        if owners:
            every = [s for mine in tokens.values() for s in range(mine.start, mine.stop)]
            self._unread.append((owners, kept.of(every)))

    def read_kept(self) -> None:
        """Give rows what their latest tokens could be."""
        if not self._unread:
            return
        owners = [row for mine, _ in self._unread for row in mine]
        every = [kept for _, kept in self._unread]
        kept_SV, logprob_S = (
            (every[0].kept_BV, every[0].logprob_B)
            if len(every) == 1
            else (torch.cat([kept.kept_BV for kept in every]), torch.cat([kept.logprob_B for kept in every]))
        )
        self._unread = []
        for row, entry, logprob in zip(owners, mask_entries(kept_SV), logprob_S.tolist(), strict=True):
            row.keep(entry, logprob)

    def _reshaped(self, owners: Sequence[int] | np.ndarray, places: np.ndarray, logits_SV: Tensor) -> Tensor:
        """Return the logits that are drawn from, where some of the rows change theirs."""
        rows, drawn_SV = self.rows, logits_SV.clone()
        for s, (i, place) in enumerate(zip(owners, places.tolist(), strict=True)):
            if i in rows.reshaped:
                job = rows.owners[i].job
                params, prompt_P = job.request.params, on_device(job.prompt_words, logits_SV.device)
                ends = [*(() if params.ignore_eos else self.shared.eos_ids), *params.stop_ids]
                ends = [token for token in ends if 0 <= token < self.shared.vocabulary]  # others are never drawn
                said_T = rows.tokens[i, :place]  # with drafts among them where nothing depends on what was said
                drawn_SV[s] = reshape(logits_SV[s], params, prompt_P=prompt_P, said_T=said_T, ends=ends)
        return drawn_SV

    def watch(self, i: int, count: int, logprob: float, logits_V: Tensor) -> str | None:
        """Tell the stream of a row's latest token, the `count`-th, and keep its alternatives; the text before a stop of
        its own, where one ends it."""
        row, tokens = self.rows.owners[i], self.rows.tokens[i, :count]
        params, token = row.job.request.params, int(tokens[-1])
        top: tuple[tuple[int, float], ...] = ()
        if params.top_logprobs:
            best = scaled_logprobs(logits_V[None], self.rows.temperature[i : i + 1])[0].topk(params.top_logprobs)
            top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
            row.alternatives.append(top)
        if row.job.on_token is not None:
            row.job.on_token(row.index, token, logprob, top)
        if not params.stop and token not in params.stop_ids:
            return None
        return stopped_text(tokens.tolist(), params, self.shared.base.tokenizer, ends=self.shared.ends)

    def retire(self, reasons: dict[int, FinishReason], cut: dict[int, str]) -> None:
        """Make the completions of finished rows, whose text is `cut` or else all of it, and free the rows."""
        if not reasons:
            return
        rows, done = self.rows, list(reasons)
        counts = rows.on_host.count[done].tolist()
        said, longest = on_device(done, rows.device), max(counts, default=0)
        every_id, every_logprob = (column[said, :longest].tolist() for column in (rows.tokens, rows.logprobs))
        whole = list[PendingRequest]()
        for (i, reason), count, mine, logprobs in zip(reasons.items(), counts, every_id, every_logprob, strict=True):
            row, text = rows.owners[i], cut.get(i)
            job, ids = row.job, tuple(mine[:count])
            del row.kept[count:], row.kept_logprobs[count:]
            kept = row.sampling_mask(self.shared.vocabulary)
            job.done[row.index] = Completion(
                token_ids=ids,
                logprobs=tuple(logprobs[:count]),
                text=decode(ids, self.shared.base.tokenizer, ends=self.shared.ends) if text is None else text,
                finish_reason=reason,
                version=row.version,
                switches=tuple(row.switches),
                top_logprobs=tuple(row.alternatives),
                cached_tokens=job.cached,
                routed_experts=rows.routed_experts(i, count),
                kept=kept,
                kept_logprobs=() if kept is None else tuple(row.kept_logprobs),
            )
            if job.request.cache:
                self.keep(i, row, (*job.request.prompt_ids, *ids[:-1]))  # the last was never seen by the model
            if len(job.done) == job.request.n:
                whole.append(job)
        try:
            self.free(reasons)
        finally:  # a caller that gets the last result finds the rows free
            for job in whole:
                job.settle([job.done[j] for j in range(job.request.n)])

    def keep(self, i: int, row: Row, ids: tuple[int, ...]) -> None:
        """Keep what was computed for the tokens `ids` of the `i`-th row, for the request that goes on from there; here
        nothing is kept."""
        return None

    @abstractmethod
    def free(self, finished: Collection[int]) -> None:
        """Give up rows, and whatever only they needed."""
