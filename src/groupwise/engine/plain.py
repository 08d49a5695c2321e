"""The decoder of any model that transformers can run: by its own forward and its own cache.

    admit     requests that wait, whose policy is the same and whose prompts are equally long, become one batch: each
              distinct prompt is run once, and its cache given to all completions of it
    decode    one forward of a token per row, batch by batch

All rows of a batch are equally long from the first token to the last, so nothing is padded and no state (of a gated
delta net, of a convolution) ever sees a token that is not there. Rows that are finished leave the cache.

What a cache does is the model's own affair, and `packed_check.why_not_cached` compares it with the whole row's forward
before its first use. Where they differ, or there is no cache, every token costs a forward of all tokens before it.

Shapes: B rows, P prompts, T their tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from groupwise.engine.decoder import PREFILL_TOKENS, DecodedRows, EngineModel, Queue
from groupwise.engine.multi_lora import AdapterWeights
from groupwise.engine.rows import PendingRequest
from groupwise.model.backbone import decoder_of
from groupwise.model.transfer import on_device
from groupwise.types import PolicyVersion


class PlainDecoder:
    """Decodes in batches of equally long rows.

    Args:
        cached: whether the model's own cache is used.
    """

    def __init__(self, shared: EngineModel, *, cached: bool):
        self.shared, self.cached = shared, cached
        self._batches: list[PlainBatch] = []
        self._begun: list[tuple[PendingRequest, int]] = []  # in the midst of being given rows

    @property
    def active(self) -> int:
        """Rows in use."""
        return sum(batch.active for batch in self._batches)

    def stats(self) -> dict[str, int]:
        """Return no statistics: this decoder has none of its own."""
        return {}

    def admit(self, urgent: Queue, waiting: Queue) -> bool:
        """Give requests the free rows, in order; those that fit together are batches. Whether any got rows."""
        for queue in (urgent, waiting):
            while queue and (n := self.shared.budget.take(queue[0])):
                job = queue[0]
                self._begun.append((job, n))
                if n < job.request.n - job.started:
                    break  # its next completions follow when these rows are taken
                queue.popleft()
        batches = list(_alike(self._begun))
        for alike in batches:
            batch = PlainBatch(self.shared, alike, cached=self.cached)
            self._batches.append(batch)
            self._begun = [each for each in self._begun if each not in alike]
            batch.begin(alike)
        self._drop_empty()
        return bool(batches)

    def decode(self) -> None:
        """Compute one token of every row."""
        for batch in self._batches:
            batch.decode()
        self._drop_empty()

    def drop_cancelled(self) -> None:
        """Free the rows of requests whose future was cancelled, or failed."""
        for batch in self._batches:
            batch.drop_cancelled()
        self._drop_empty()

    def hidden(self, ids: Sequence[int], weights: AdapterWeights | None) -> Tensor:
        """Return the last hidden states [S, hidden] of one row of tokens."""
        self.shared.bank.select([weights])
        ids_1T = on_device([list(ids)], self.shared.device)
        return decoder_of(self.shared.model)(input_ids=ids_1T, use_cache=False).last_hidden_state[0]

    def hidden_before(
        self, prompt_ids: Sequence[int], completions: Sequence[Sequence[int]], weights: AdapterWeights | None
    ) -> list[Tensor]:
        """See `Decoder.hidden_before`, a row after another."""
        first = len(prompt_ids) - 1
        return [self.hidden((*prompt_ids, *ids[:-1]), weights)[first:] for ids in completions]

    def follow(
        self, old: PolicyVersion, new: PolicyVersion, weights: AdapterWeights | None, *, recompute: bool
    ) -> None:
        """See `Decoder.follow`. Without a cache everything is computed again at every step, whatever is asked."""
        for batch in self._batches:
            batch.follow(old, new, weights, recompute=recompute)

    def forget(self, weights: AdapterWeights | None) -> None:
        """Do nothing: only rows keep state, and they continue under the weights with which they were admitted."""

    def rest(self) -> None:
        """Do nothing: only rows keep state."""

    def clear(self) -> list[PendingRequest]:
        """Free everything after a failure. Returns the requests that had rows, or were being given some."""
        taken = [*self._begun, *((row.job, 1) for batch in self._batches for row in batch.rows.owners)]
        for job, n in taken:
            self.shared.budget.give(job, n)
        self._batches, self._begun = [], []
        return [job for job, _ in taken]

    def _drop_empty(self) -> None:
        self._batches = [batch for batch in self._batches if batch.active]


def _alike(taken: Sequence[tuple[PendingRequest, int]]) -> Iterator[list[tuple[PendingRequest, int]]]:
    """Yield requests of one policy with equally long prompts, as many as fit into the tokens of a forward."""
    groups: dict[tuple[int, int], list[tuple[PendingRequest, int]]] = {}
    for job, n in taken:
        groups.setdefault((id(job.weights), len(job.request.prompt_ids)), []).append((job, n))
    for (_, length), group in groups.items():
        size = max(1, PREFILL_TOKENS // length)
        for start in range(0, len(group), size):
            yield group[start : start + size]


class PlainBatch(DecodedRows):
    """Rows of one policy that are equally long, with the model's cache of them."""

    def __init__(self, shared: EngineModel, jobs: Sequence[tuple[PendingRequest, int]], *, cached: bool):
        super().__init__(shared, sum(n for _, n in jobs))
        self._weights, self._cached = jobs[0][0].weights, cached
        self._own: Any = decoder_of(shared.model)
        self._cache: Any = None  # of transformers; None: nothing was run yet, or nothing is kept
        self._ids_BT = torch.zeros(0, 0, dtype=torch.long, device=shared.device)  # without a cache: all tokens so far

    def begin(self, jobs: Sequence[tuple[PendingRequest, int]]) -> None:
        """Run each distinct prompt once, and sample the first token of every completion."""
        places: dict[tuple[tuple[int, ...], str], int] = {}
        row_prompt: list[int] = []
        for job, n in jobs:
            known = job.prompt[1:] in places
            row_prompt += [places.setdefault(job.prompt[1:], len(places))] * n
            if not job.started:
                job.cached = len(job.request.prompt_ids) if known else 0
            self.rows.add(job, n, slot=0, shared=len(job.request.prompt_ids))
        self.rows.reserve(max(job.max_tokens for job, _ in jobs))
        prompts_PT = on_device([list(ids) for ids, _ in places], self.shared.device)
        row_B = on_device(row_prompt, self.shared.device)
        hidden_PH = self._run(prompts_PT)
        if self.chosen_SLK is not None:
            of_prompts = self.chosen_SLK.split(prompts_PT.shape[1])
            for row, prompt in zip(self.rows.owners, row_prompt, strict=True):
                row.routed_PLK = of_prompts[prompt]
        self._ids_BT = prompts_PT
        self._select(row_B)
        self.advance(slice(0, self.rows.active), self.shared.head.logits(hidden_PH)[row_B])

    def decode(self) -> None:
        """Run one forward of the token sampled last; without a cache, of all tokens so far."""
        rows, every = self.rows, slice(0, self.rows.active)
        ids_BT = rows.token[every, None]
        if not self._cached:
            ids_BT = self._ids_BT = torch.cat([self._ids_BT, ids_BT], 1)
        hidden_BH = self._run(ids_BT)
        if self.chosen_SLK is not None:
            last_BLK = self.chosen_SLK.view(rows.active, -1, *self.chosen_SLK.shape[1:])[:, -1]
            rows.route(np.arange(rows.active), rows.on_host.count[every] - 1, last_BLK)
        self.advance(every, self.shared.head.logits(hidden_BH))

    def follow(
        self, old: PolicyVersion, new: PolicyVersion, weights: AdapterWeights | None, *, recompute: bool
    ) -> None:
        """See `Decoder.follow`: all rows, which are of one policy, or none."""
        self.settle()  # what has ended was said by the old one
        rows = self.rows
        if not rows.follow(old, new, weights, recompute=recompute):
            return
        self._weights = weights
        if recompute and self._cached:
            said = int(rows.on_host.count[0]) - 1
            texts = [
                (*row.job.request.prompt_ids, *rows.tokens[i, :said].tolist()) for i, row in enumerate(rows.owners)
            ]
            self._cache = None
            self._run(on_device(texts, self.shared.device))

    def free(self, finished: Collection[int]) -> None:
        """Take finished rows out of the cache."""
        if not finished:
            return
        for i in finished:
            self.shared.budget.give(self.rows.owners[i].job, 1)
        kept = np.arange(self.rows.active)
        if (moved := self.rows.remove(finished)) is not None:
            kept[moved.holes] = moved.movers
        self._select(on_device(kept[: self.rows.active], self.shared.device))

    def _run(self, ids_BT: Tensor) -> Tensor:
        """Return the last hidden state [B, hidden] of each row, whose next tokens these are."""
        self.shared.bank.select([self._weights])
        with self.recording():
            if not self._cached:
                return self._own(input_ids=ids_BT, use_cache=False).last_hidden_state[:, -1]
            out = self._own(input_ids=ids_BT, past_key_values=self._cache, use_cache=True)
        self._cache = out.past_key_values
        return out.last_hidden_state[:, -1]

    def _select(self, row_B: Tensor) -> None:
        """Make the cache that of these of its rows, in this order; a row may be there more than once, or not at all."""
        if not self._cached:
            self._ids_BT = self._ids_BT[row_B]
        elif len(row_B):
            self._cache.reorder_cache(row_B)
        else:
            self._cache = None
