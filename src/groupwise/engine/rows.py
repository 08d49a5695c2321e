"""The rows (completions) that an engine decodes at a time: their requests, and their state as tensors.

A *row* is one completion being decoded. Lines 0..active-1 are in use: rows are added behind the last, and when some are
done the last ones move into their places, so that a step always works on one dense block. What a step needs to know
about all rows together (does any have stop strings, is any greedy, which adapters are there) is worked out when rows
come and go and not at every step.

Shapes: B active rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from itertools import filterfalse
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from groupwise.engine.grammar import MatchTime
from groupwise.engine.kv_cache import PromptKey
from groupwise.engine.multi_lora import AdapterWeights
from groupwise.engine.ngrams import History, Ngrams, ngrams_of
from groupwise.engine.sampling import RowParams, completion_seed
from groupwise.model.image_tokens import is_of_image
from groupwise.model.load import widest_float
from groupwise.model.transfer import on_device
from groupwise.recorded import MaskEntry, RoutedExperts, SamplingMask
from groupwise.sampler import TokenSink
from groupwise.types import LEAVES_OUT, Completion, PolicyVersion, SamplingRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher


@dataclass
class PendingRequest:
    """A submitted request: its future, and the completions that are done.

    `weights` are those of `version`, which samples it now; what is kept of a conversation is found, and kept again,
    under `owner`. `grammar` is the compiled one of a request that has one."""

    request: SamplingRequest
    version: PolicyVersion
    weights: AdapterWeights | None
    owner: object
    max_tokens: int
    seed: int
    on_token: TokenSink | None = None
    grammar: LLMatcher | None = None
    following: int = 0  # the rotary position of the first token that is sampled
    future: Future[list[Completion]] = field(default_factory=Future)
    done: dict[int, Completion] = field(default_factory=dict)
    started: int = 0  # completions that have been given a row
    cached: int = 0  # tokens of the prompt that were known when it was
    match_time: MatchTime = field(default_factory=MatchTime)

    @property
    def prompt(self) -> PromptKey:
        """Return the prompt's key in the KV cache: the weights, the token ids, and the owner of a private prompt."""
        return id(self.weights), tuple(self.request.prompt_ids), self.request.apart

    def follow(self, version: PolicyVersion, weights: AdapterWeights | None, *, recompute: bool) -> None:
        """Go on under a newer version. Unless keys and values are computed again, what was kept of its conversation
        stays known: to the requests that ask for the version which this one asked for, and to no others."""
        self.version, self.weights = version, weights
        if recompute:
            self.owner = weights

    @cached_property
    def prompt_words(self) -> Tensor:
        """Return the distinct token ids of the prompt, sorted (for the repetition penalty)."""
        return torch.tensor(sorted({*filterfalse(is_of_image, self.request.prompt_ids)}), dtype=torch.long)

    @cached_property
    def ngrams(self) -> Ngrams:
        """Return the n-grams of the prompt."""
        return ngrams_of(self.request.prompt_ids)

    def settle(self, outcome: list[Completion] | Exception) -> None:
        """Resolve the future with the completions or an error, unless it was cancelled."""
        if self.future.done() or not self.future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, Exception):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


@dataclass
class Row:
    """Holds the completion in a row: the `index`-th of `job`. The first `shared` tokens of its prompt are in the
    cache's `slot`, the others in the row. With a grammar, `matcher` has read the completion so far."""

    job: PendingRequest
    index: int
    slot: int
    shared: int
    version: PolicyVersion  # that drew the first token
    switches: list[tuple[int, PolicyVersion]] = field(default_factory=list)  # and from where on newer ones did
    matcher: LLMatcher | None = None
    alternatives: list[tuple[tuple[int, float], ...]] = field(default_factory=list)  # with top_logprobs
    routed_PLK: Tensor | None = None  # the experts of the prompt's tokens, where they are recorded
    kept: list[MaskEntry] = field(default_factory=list)  # what each token could be, where that is recorded
    kept_logprobs: list[float] = field(default_factory=list)

    @cached_property
    def history(self) -> History:
        """Return the n-gram index of this row, with the part of the completion that was added to it."""
        return History(self.job.request.prompt_ids, self.job.ngrams)

    def keep(self, entry: MaskEntry, logprob: float) -> None:
        """Record what the next token could be, and its log-probability under the policy restricted to that."""
        self.kept.append(entry)
        self.kept_logprobs.append(logprob)

    def sampling_mask(self, vocabulary: int) -> SamplingMask | None:
        """Return what all tokens could be; None where nothing was to be left out, and nothing was."""
        if not self.kept:
            return None
        mask = SamplingMask.of_entries(vocabulary, self.kept)
        asked = any(name in LEAVES_OUT for name in self.job.request.params.reshaped)
        return mask if asked or not mask.is_whole else None

    @property
    def watched(self) -> bool:
        """Return whether Python must look at every token: for stop strings or ids, streaming, or top logprobs."""
        params = self.job.request.params
        return bool(params.stop or params.stop_ids or params.top_logprobs or self.job.on_token)


NEVER = 1 << 62  # tokens


class OnHost:
    """Keeps copies on the host of values that change by rule (each step adds a token to each row), so that reading them
    does not wait for the device: for each row the number of sampled tokens, its limit, the number of prompt tokens that
    the row holds itself, and its seed."""

    def __init__(self, most: int):
        self.count, self.limit, self.held = (np.zeros(most, dtype=np.int64) for _ in range(3))
        self.seed = np.zeros(most, dtype=np.uint64)

    def lengths(self, at: slice | Sequence[int]) -> np.ndarray:
        """Return for each row the number of tokens whose keys and values it holds itself, once all sampled tokens have
        been run."""
        return self.held[at] + self.count[at]

    def take(self, target: slice | Sequence[int], source: Sequence[int]) -> None:
        """Copy lines."""
        for column in (self.count, self.limit, self.held, self.seed):
            column[target] = column[source]


class Moved(NamedTuple):
    """Rows that were moved into others' places, as places on the host and on the device; the longest holds `longest`
    tokens itself."""

    movers: list[int]
    holes: list[int]
    source: Tensor
    target: Tensor
    longest: int


class Rows:
    """Holds the decoding state of up to `most` rows, as tensors, and the copies on the host (`on_host`).

    The host learns that a row's token ended it only in `DecodedRows.settle`: `ended` has the number of tokens at the
    end, NEVER if the row has not ended."""

    def __init__(self, most: int, device: torch.device):
        self.most, self.device = most, device
        self.owners: list[Row] = []

        def column(dtype: torch.dtype) -> Tensor:
            return torch.zeros(most, dtype=dtype, device=device)

        self.token, self.position = column(torch.long), column(torch.long)
        self.count, self.ended = column(torch.long), column(torch.long)
        self.temperature, self.top_p, self.min_p = (column(widest_float(device)) for _ in range(3))
        self.top_k = column(torch.long)
        self.watch_eos = column(torch.bool)
        self.on_host = OnHost(most)
        self.tokens = torch.zeros(most, 0, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(most, 0, dtype=widest_float(device), device=device)
        self.routed = torch.zeros(most, 0, 0, 0, dtype=torch.int16)  # experts [rows, tokens, layers, K]
        self._note()

    @property
    def active(self) -> int:
        return len(self.owners)

    def reserve(self, length: int) -> None:
        """Make room for completions of `length` tokens."""
        missing = length - self.tokens.shape[1]
        if missing > 0:
            pad = torch.nn.functional.pad
            tokens, logprobs = pad(self.tokens, (0, missing)), pad(self.logprobs, (0, missing))
            routed = pad(self.routed, (0, 0, 0, 0, 0, missing))
            self.tokens, self.logprobs, self.routed = tokens, logprobs, routed  # all, or none where memory runs out

    def route(self, row_S: np.ndarray, place_S: np.ndarray, chosen_SLK: Tensor) -> None:
        """Record the experts of completions' tokens."""
        if self.routed.shape[2:] != chosen_SLK.shape[1:]:
            self.routed = torch.zeros(*self.tokens.shape, *chosen_SLK.shape[1:], dtype=torch.int16)
        self.routed[row_S, place_S] = chosen_SLK

    def routed_experts(self, row: int, count: int) -> RoutedExperts | None:
        """Return those of a row's prompt and of its `count` tokens but the last, which the model has not seen."""
        prompt_PLK = self.owners[row].routed_PLK
        if prompt_PLK is None:
            return None
        said = self.routed[row, : count - 1] if count > 1 else prompt_PLK[:0]
        return RoutedExperts.of(torch.cat([prompt_PLK, said]).numpy())

    def add(self, job: PendingRequest, n: int, *, slot: int, shared: int) -> None:
        """Give the next `n` completions of `job` the next `n` rows; `shared` tokens of the prompt are in the slot."""
        params = job.request.params
        at = slice(self.active, self.active + n)
        known, prompt = self.on_host, len(job.request.prompt_ids)
        self.count[at], self.ended[at], self.position[at] = 0, NEVER, job.following
        known.count[at], known.limit[at], known.held[at] = 0, job.max_tokens, prompt - shared
        self.temperature[at], self.top_p[at], self.min_p[at] = params.temperature, params.top_p, params.min_p
        self.top_k[at], self.watch_eos[at] = params.top_k, not params.ignore_eos
        for row in range(at.start, at.stop):
            matcher = None if job.grammar is None else job.grammar.deep_copy()
            self.owners.append(Row(job, job.started, slot, shared, job.version, matcher=matcher))
            known.seed[row] = completion_seed(job.seed, job.started)
            job.started += 1
        self._note()

    def follow(
        self, old: PolicyVersion, new: PolicyVersion, weights: AdapterWeights | None, *, recompute: bool
    ) -> list[int]:
        """Have the rows of version `old` continue under `new` from their next token on. Returns which they are."""
        moved = [i for i, row in enumerate(self.owners) if row.job.version == old]
        for i in moved:
            row, at = self.owners[i], int(self.on_host.count[i])
            row.switches = [*(each for each in row.switches if each[0] < at), (at, new)]
        for i in moved:
            self.owners[i].job.follow(new, weights, recompute=recompute)
        self._note()
        return moved

    def params(self, at: slice | Tensor) -> RowParams:
        """Return the sampling parameters of some of the rows."""
        columns = (self.temperature[at], self.top_k[at], self.top_p[at], self.min_p[at])
        return RowParams(*columns, truncated=self.truncated, greedy=self.greedy)

    def remove(self, finished: Collection[int]) -> Moved | None:
        """Move the last rows into the finished ones' places; None when nothing had to move."""
        active = self.active - len(finished)
        holes = sorted(row for row in finished if row < active)
        movers = [row for row in range(active, self.active) if row not in finished]
        moved = None
        if holes:
            source, target = (on_device(lines, self.device) for lines in (movers, holes))
            for column in self._columns():
                column[target] = column[source]
            self.routed[holes] = self.routed[movers]
            self.on_host.take(holes, movers)
            moved = Moved(movers, holes, source, target, int(self.on_host.lengths(movers).max()))
            for hole, mover in zip(holes, movers, strict=True):
                self.owners[hole] = self.owners[mover]
        del self.owners[active:]
        self._note()
        return moved

    def sort(self, order: Sequence[int]) -> Tensor:
        """Put row `order[i]` in place i; the order as a tensor of the device."""
        every, order_B = slice(0, self.active), on_device(order, self.device)
        for column in self._columns():
            column[every] = column[order_B]
        self.routed[every] = self.routed[order]
        self.on_host.take(every, order)
        self.owners = [self.owners[row] for row in order]
        self._note()
        return order_B

    def _columns(self) -> tuple[Tensor, ...]:
        return (
            self.token, self.position, self.count, self.ended, self.temperature, self.top_p, self.min_p, self.top_k,
            self.watch_eos, self.tokens, self.logprobs,
        )  # fmt: skip

    def _note(self) -> None:
        """Compute the facts about all rows that the next steps need."""
        every = [row.job.request.params for row in self.owners]
        self.greedy = any(p.temperature == 0 for p in every)
        narrowed = {i for i, p in enumerate(every) if p.top_k > 0 or p.top_p < 1 or p.min_p > 0}
        self.watched = [i for i, row in enumerate(self.owners) if row.watched]
        self.reshaped = frozenset(i for i, p in enumerate(every) if p.changes_logits)
        self.matchers = {i: row.matcher for i, row in enumerate(self.owners) if row.matcher is not None}
        self.truncated = bool(narrowed)
        self.recorded = sorted(i for i in narrowed | self.reshaped | self.matchers.keys() if every[i].temperature > 0)
        self.weights = [row.job.weights for row in self.owners]
