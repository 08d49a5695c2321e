"""The decoder of the packed forward: one token of each row, or one prompt after another, in one packed row of tokens.

    admit     prompts are prefilled ONCE, for all completions of theirs, and their keys and values shared (`kv_cache`)
    decode    one forward of a token per row (`rows`), or of several where drafts are checked (`lookup`), one fused
              sampling step (`sampling`), and bookkeeping in tensors

Python runs per *finished* row, and per row and token only for drafts and where a request has stop strings, a stream or
alternatives to report. The next turn of a conversation continues from the keys and values of the last (`PrefixCache`).

Shapes: B active rows, S packed tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from groupwise.engine.adapted_eyes import AdaptedEyes
from groupwise.engine.admission import (
    EXTEND_TOKENS,
    Admitted,
    GoingOn,
    admitted,
    consecutive,
    known_of,
    pieces_of,
    together,
)
from groupwise.engine.compiled import Compiled, compiles
from groupwise.engine.decoder import PREFILL_TOKENS, DecodedRows, EngineModel, Queue
from groupwise.engine.kv_cache import (
    PART,
    PART_GPU,
    Apart,
    CacheNeed,
    Extend,
    Grid,
    KeyValueCache,
    Prefill,
    Prefilled,
    PromptKey,
    parts_of,
)
from groupwise.engine.lookup import Lookup
from groupwise.engine.multi_lora import AdapterWeights
from groupwise.engine.prefix_cache import Kept, PrefixCache
from groupwise.engine.rows import PendingRequest, Row, Rows
from groupwise.model.attention import Layout, SharedPrompts
from groupwise.model.backbone import Backbone
from groupwise.model.image_tokens import vision_of
from groupwise.model.layer_settings import keys_from
from groupwise.model.transfer import on_device
from groupwise.types import PolicyVersion

SORT_EVERY, MOST_BEYOND = 16, 1.5  # decode steps; tokens read per token there is, beyond which rows are sorted

ONE_THREAD_FLOPS = 1 << 30  # of a forward of a small model, below which it is over before a second thread has woken up


class PackedDecoder(DecodedRows):
    """Decodes in packed rows.

    Args:
        past: the cache of conversations that may continue.
        draft_tokens: most tokens of a row that are guessed and checked in one step; 0 guesses none.
        compile: compile the dense parts of decode steps; None: where that is worth it (`compiled.compiles`).
        threads: returns torch's present number of threads in the calling thread.
    """

    def __init__(
        self,
        shared: EngineModel,
        *,
        past: PrefixCache,
        draft_tokens: int,
        compile: bool | None,
        threads: Callable[[], int],
        cache_tokens: float = math.inf,
    ):
        super().__init__(shared, shared.budget.most)
        self.past = past
        self._vision = vision_of(shared.model)
        self._both_ways = self._vision is not None and self._vision.both_ways
        see = None if self._vision is None else AdaptedEyes(shared.model, shared.bank, self._vision)
        self._backbone = Backbone(shared.model, shared.bank.project, see)
        owners = keys_from(shared.model.config.get_text_config())
        self.cache = KeyValueCache(shared.budget.most, cache_tokens, keys_from=owners)
        self.lookup = Lookup(draft_tokens, shared.device)
        self._since_sorted = 0  # decode steps
        self._grid: Grid | None = None  # None: rows have come or gone since it was made
        self._threads = threads
        if draft_tokens:
            self.most_unsettled = 1
        made = compiles(compile, shared.device, self._backbone)
        self.steps = Compiled(self._backbone, shared.bank, threads(), shared.small) if made else self._backbone
        self._admitted: list[Admitted] = []  # in the midst of being given rows

    def stats(self) -> dict[str, int]:
        """Return, with drafts, how many tokens were drafted and accepted so far."""
        return self.lookup.stats()

    def hidden(self, ids: Sequence[int], weights: AdapterWeights | None) -> Tensor:
        """Return the last hidden states [S, hidden] of one row of tokens."""
        layout = SharedPrompts([len(ids)], device=self.shared.device)
        return self._forward(ids, self._positions([(ids, range(len(ids)))]), layout, [weights] * len(ids))

    def hidden_before(
        self, prompt_ids: Sequence[int], completions: Sequence[Sequence[int]], weights: AdapterWeights | None
    ) -> list[Tensor]:
        """See `Decoder.hidden_before`; the prompt is run once, and the last token of a completion is not run."""
        rows, start = [ids[:-1] for ids in completions], len(prompt_ids)
        ids = [*prompt_ids, *(token for row in rows for token in row)]
        whole = [(prompt_ids, range(start)), *(((*prompt_ids, *row), range(start, start + len(row))) for row in rows)]
        positions = self._positions(whole)
        layout = SharedPrompts([start], [len(row) for row in rows], [0] * len(rows), device=self.shared.device)
        prompt_SH, *others = self._forward(ids, positions, layout, [weights] * len(ids)).split(
            [start, *(len(row) for row in rows)]
        )
        return [torch.cat([prompt_SH[-1:], row_TH]) for row_TH in others]

    # -- admission ----------------------------------------------------------------------------------------------------

    def admit(self, urgent: Queue, waiting: Queue) -> bool:
        """Give waiting completions the free rows that the cache has room for, in order, and prefill their prompts;
        whether there were any."""
        self._admitted = []
        if not (urgent or waiting):
            return False
        budget, computed, longest, need = self.shared.budget, 0, 0, self._need()  # prompts in this forward
        slots, new = dict[PromptKey, int](), set[PromptKey]()  # of prompts that are there; prompts that are not yet
        for queue in (urgent, waiting):
            while queue and (n := budget.take(queue[0])):
                job = queue[0]
                past = known_of(job, self.past)
                if past and self._both_ways and len(job.request.prompt_ids) - past[1] > EXTEND_TOKENS:
                    past = None  # in pieces, an image would be cut
                slots = slots or self.cache.whole()
                there = job.prompt in slots or job.prompt in new
                size = self._size(job, known=past is not None, there=there)
                fitting = self.cache.fitting(need, n, **size)
                budget.give(job, n - fitting)
                if not (n := fitting):
                    break  # until rows have ended
                if not job.started:
                    job.cached = past[1] if past else len(job.request.prompt_ids) if there else 0
                if past or not there:
                    longest = max(longest, len(job.request.prompt_ids) - (past[1] if past else 0))
                    if self._admitted and (computed + 1) * longest > PREFILL_TOKENS:
                        budget.give(job, n)
                        break
                    computed += 1
                    new |= set() if past else {job.prompt}
                self._admitted.append(admitted(job, n, past))
                need = need.with_rows(n, **size)
                if n < job.request.n - job.started:
                    break  # its next completions follow when these rows are taken
                queue.popleft()
        if self._admitted:
            held = self.rows.on_host.lengths(slice(0, self.rows.active))
            self.cache.prepare(need, rows=len(held), longest=int(held.max(initial=0)))
        if anew := [each for each in self._admitted if not isinstance(each, GoingOn)]:
            self._prefill(anew, slots)
        for going in together([each for each in self._admitted if isinstance(each, GoingOn)]):
            self._extend(going)
        got, self._admitted = bool(self._admitted), []
        return got

    def _need(self) -> CacheNeed:
        """Return what the rows that there are will have taken of the cache when they end."""
        if not self.rows.active:
            return CacheNeed()
        host, lengths = self.rows.on_host, self.cache.lengths
        own = host.held[: self.rows.active] + host.limit[: self.rows.active]
        return CacheNeed(self.rows.active, int(own.max()), len(lengths), max(lengths, default=0))

    def _size(self, job: PendingRequest, *, known: bool, there: bool) -> dict[str, int]:
        """Return what a row of a request takes: of its own, and of its prompt, where that is not `there`. A
        conversation that continues (`known`) may hold all of its prompt itself."""
        asked = len(job.request.prompt_ids)
        return {"own": job.max_tokens + (asked if known else 0), "prompt": asked, "slots": int(known or not there)}

    def _prefill(self, anew: Sequence[Admitted], slots: dict[PromptKey, int]) -> None:
        """Run the prompts that are in none of the slots yet, and sample the first token of every completion."""
        rows, cache, first = self.rows, self.cache, self.rows.active
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
        cache.begin(at, [row.slot for row in rows.owners[at]])
        used = {row.slot: cache.prefilled[row.slot] for row in rows.owners[at]}
        for row in rows.owners[at]:
            row.routed_PLK = None if (there := used[row.slot]) is None else there.routed_PLK
        hidden_PH = torch.stack([there.hidden_H for there in used.values() if there is not None])
        place = {slot: p for p, slot in enumerate(used)}
        per_row = on_device([place[row.slot] for row in rows.owners[at]], hidden_PH.device)
        self.advance(at, self.shared.head.logits(hidden_PH)[per_row])

    def _run_prompts(self, jobs: Sequence[PendingRequest], slots: range) -> None:
        """Fill the slots with whole prompts."""
        aparts = [job.request.apart for job in jobs]
        self._fill(slots, [job.prompt[1] for job in jobs], [job.weights for job in jobs], aparts)

    def _fill(
        self,
        slots: range,
        prompts: Sequence[tuple[int, ...]],
        weights: Sequence[AdapterWeights | None],
        aparts: Sequence[str],
    ) -> None:
        """Fill the slots with these tokens, and note whose they are and what predicts their next tokens."""
        owners = [each for each, prompt in zip(weights, prompts, strict=True) for _ in prompt]
        positions = self._positions([(prompt, range(len(prompt))) for prompt in prompts])
        layout = Prefill(self.cache, slots, self.shared.device)
        hidden_SH = self._forward(list(chain(*prompts)), positions, layout, owners)
        lengths, chosen_SLK = [len(prompt) for prompt in prompts], self.chosen_SLK
        last = on_device([end - 1 for end in accumulate(lengths)], hidden_SH.device)
        routed = [None] * len(prompts) if chosen_SLK is None else chosen_SLK.split(lengths)
        each = zip(weights, prompts, hidden_SH[last], routed, aparts, strict=True)
        for slot, prefilled in zip(slots, each, strict=True):
            self.cache.prefilled[slot] = Prefilled(*prefilled)

    def _extend(self, going: Sequence[GoingOn]) -> None:
        """Give conversations back what was kept of them, run what is new and sample its next tokens."""
        rows, cache, first = self.rows, self.cache, self.rows.active
        for each in going:
            rows.add(each.job, 1, slot=cache.slot_of(each.past.opening), shared=each.shared)
        self._grid = None
        rows.reserve(max(each.job.max_tokens for each in going))
        at = slice(first, rows.active)
        cache.rows.reserve(rows.active, int(rows.on_host.held[at].max()))
        for row, each in enumerate(going, first):
            cache.hold(row, each.past.own, each.known - each.shared)
        grid = Apart(*self._places(at), self.shared.device)
        last: list[Tensor] = [torch.empty(0)] * len(going)
        for pieces in pieces_of(going):
            held = [piece.start - each.shared for each, piece in zip(going, pieces, strict=True)]
            layout = Extend(cache, grid, at, held, [len(p) for p in pieces])
            ids = [each.job.request.prompt_ids[i] for each, piece in zip(going, pieces, strict=True) for i in piece]
            owners = [each.job.weights for each, piece in zip(going, pieces, strict=True) for _ in piece]
            asked = [(each.job.request.prompt_ids, piece) for each, piece in zip(going, pieces, strict=True)]
            hidden_SH = self._forward(ids, self._positions(asked), layout, owners)
            for b, mine in enumerate(hidden_SH.split([len(piece) for piece in pieces])):
                last[b] = mine[-1] if len(mine) else last[b]
            self._note_routes(rows.owners[at], pieces)
        self.advance(at, self.shared.head.logits(torch.stack(last)))

    # -- in-flight updates --------------------------------------------------------------------------------------------

    def follow(
        self, old: PolicyVersion, new: PolicyVersion, weights: AdapterWeights | None, *, recompute: bool
    ) -> None:
        """See `Decoder.follow`. Recorded experts stay those by which each token was first computed."""
        self.settle()  # what has ended was said by the old one
        moved = self.rows.follow(old, new, weights, recompute=recompute)
        if recompute and moved:
            self._refill_slots([self.rows.owners[i] for i in moved], weights)
            for at in consecutive(moved):
                self._rerun_own(at, weights)
            self._grid = None

    def _refill_slots(self, owners: Sequence[Row], weights: AdapterWeights | None) -> None:
        """Compute again what these rows have in slots, as far as any of them reads."""
        texts, aparts = dict[int, tuple[int, ...]](), dict[int, str]()
        for row in sorted(owners, key=lambda row: row.shared):
            texts[row.slot] = row.job.prompt[1][: row.shared]
            aparts[row.slot] = row.job.request.apart
        for slot, text in texts.items():
            self.cache.lengths[slot], self.cache.openings[slot] = len(text), None
        for several in consecutive(sorted(texts)):
            while several:
                longest = max(len(texts[slot]) for slot in several)
                now = several[: max(1, PREFILL_TOKENS // longest)]
                self._fill(now, [texts[slot] for slot in now], [weights] * len(now), [aparts[slot] for slot in now])
                several = several[len(now) :]

    def _rerun_own(self, at: range, weights: AdapterWeights | None) -> None:
        """Compute again what consecutive rows hold themselves: the rest of their prompts, and what they have said but
        for the last token, which the next step runs."""
        rows, cache = self.rows, self.cache
        most = max(1, 4 * EXTEND_TOKENS // max(1, int(rows.on_host.lengths(slice(at.start, at.stop)).max())))
        for start in range(at.start, at.stop, most):
            part = slice(start, min(start + most, at.stop))
            own = [
                (*row.job.request.prompt_ids[row.shared :], *rows.tokens[i, : rows.on_host.count[i] - 1].tolist())
                for i, row in enumerate(rows.owners[part], part.start)
            ]
            grid = Apart(*self._places(part), self.shared.device)
            for first in range(0, max(map(len, own)), EXTEND_TOKENS):
                pieces = [ids[first : first + EXTEND_TOKENS] for ids in own]
                held = [min(first, len(ids)) for ids in own]
                layout = Extend(cache, grid, part, held, list(map(len, pieces)))
                asked = [
                    (
                        (*row.job.prompt[1][: row.shared], *ids),
                        range(row.shared + at_own, row.shared + at_own + len(piece)),
                    )
                    for row, ids, at_own, piece in zip(rows.owners[part], own, held, pieces, strict=True)
                ]
                owners = [weights] * sum(map(len, pieces))
                self._forward(list(chain(*pieces)), self._positions(asked), layout, owners)

    def _note_routes(self, owners: Sequence[Row], pieces: Sequence[range]) -> None:
        """Record the experts of what is new in conversations; those of what was kept are not known."""
        if self.chosen_SLK is None:
            return
        for row, piece, chosen in zip(owners, pieces, self.chosen_SLK.split([len(p) for p in pieces]), strict=True):
            if row.routed_PLK is None:
                shape = (len(row.job.request.prompt_ids), *chosen.shape[1:])
                row.routed_PLK = torch.full(shape, -1, dtype=chosen.dtype)
            row.routed_PLK[piece.start : piece.stop] = chosen

    def _sort(self) -> None:
        """Put the rows in order of their lengths where, as they stand, much would be read beyond the end of many."""
        if self._since_sorted < SORT_EVERY:
            return
        rows = self.rows
        lengths_B = rows.on_host.lengths(slice(0, rows.active))
        size = PART if self.shared.device.type == "cpu" else PART_GPU
        read = sum(longest * (part.stop - part.start) for part, longest in parts_of(lengths_B.tolist(), size))
        if read > MOST_BEYOND * int(lengths_B.sum()):
            longest = int(lengths_B.max())
            self.cache.sort(rows.sort(lengths_B.argsort(kind="stable").tolist()), longest)
            self._since_sorted = 0

    def _places(self, at: slice) -> tuple[list[int], list[int], list[int]]:
        """Return the slots of rows, how much of them each has, and the lengths of all slots."""
        owners = self.rows.owners[at]
        return [row.slot for row in owners], [row.shared for row in owners], self.cache.lengths

    # -- decoding -----------------------------------------------------------------------------------------------------

    def decode(self) -> None:
        """Compute one step of all rows."""
        rows, every = self.rows, slice(0, self.rows.active)
        self._since_sorted += 1
        if self._grid is None:
            self._sort()
            self._grid = Grid(*self._places(every), self.shared.device)
        # the token sampled last has not been seen by the model yet: it goes in at `position`, which then moves on
        held_B = rows.on_host.lengths(every) - 1
        drafts = self.lookup.drafts(rows)
        if drafts is not None:
            layout = Extend(self.cache, self._grid, every, held_B, [1 + len(draft) for draft in drafts])
            return self._check_drafts(drafts, layout)
        layout = Extend(self.cache, self._grid, every, held_B)
        hidden_BH = self._forward(rows.token[every], rows.position[every], layout, rows.weights, self.steps)
        if self.chosen_SLK is not None:
            rows.route(np.arange(rows.active), rows.on_host.count[every] - 1, self.chosen_SLK)
        rows.position[every] += 1
        self.advance(every, self.shared.head.logits(hidden_BH))

    def _check_drafts(self, drafts: Sequence[Sequence[int]], layout: Extend) -> None:
        """Run each row's last token and its draft, draw a token after each, record those that stand, retire rows."""
        rows, row_S, t_S = self.rows, layout.row_S, layout.t_S
        ids = [token for row, draft in zip(rows.owners, drafts, strict=True) for token in (row.history.ids[-1], *draft)]
        owners = [weights for weights, draft in zip(rows.weights, drafts, strict=True) for _ in range(1 + len(draft))]
        logits_SV = self.shared.head.logits(self._forward(ids, rows.position[row_S] + t_S, layout, owners))
        place_S, places = rows.count[row_S] + t_S, rows.on_host.count[layout.lines] + layout.places
        if self.chosen_SLK is not None:
            rows.route(layout.lines, places - 1, self.chosen_SLK)
        token_S, logprob_S, kept = self.draw(row_S, layout.lines, places, logits_SV)
        rows.tokens[row_S, place_S], rows.logprobs[row_S, place_S] = token_S, logprob_S.to(rows.logprobs.dtype)

        def watch(i: int, count: int, s: int) -> str | None:
            return self.watch(i, count, float(logprob_S[s]), logits_SV[s])

        lengths, reasons, cut = self.lookup.settle(rows, drafts, token_S.tolist(), self.shared.eos_ids, watch)
        if kept is not None:
            starts = [0, *accumulate(1 + len(draft) for draft in drafts)]
            self.record(kept, {i: slice(starts[i], starts[i] + lengths[i]) for i in rows.recorded})
            self.read_kept()
        every = slice(0, rows.active)
        length_B = on_device(lengths, row_S.device)
        rows.count[every] += length_B
        rows.on_host.count[every] += lengths
        rows.position[every] += length_B
        rows.token[every] = rows.tokens[torch.arange(rows.active, device=row_S.device), rows.count[every] - 1]
        self.retire(reasons, cut)

    def _positions(self, rows: Sequence[tuple[Sequence[int], range]]) -> Tensor:
        """Return the rotary positions of parts of rows, one behind the other: [S], or [3, S]."""
        if self._vision is None:
            return torch.tensor([*chain(*(part for _, part in rows))], dtype=torch.long)
        return torch.cat([self._vision.positions_of([ids])[..., part.start : part.stop] for ids, part in rows], -1)

    def _forward(
        self,
        token_S: Tensor | Sequence[int],
        position_S: Tensor,
        layout: Layout,
        owners: Sequence[AdapterWeights | None],
        run: Callable[[Tensor, Tensor, Layout], Tensor] | None = None,
    ) -> Tensor:
        """Return the last hidden states [S, hidden] of one packed row, each token under its owner's adapter."""
        device = self.shared.device
        token_S = token_S if isinstance(token_S, Tensor) else on_device(token_S, device, torch.long)
        position_S = on_device(position_S, device)
        alone = self.shared.small and len(owners) * self.shared.flops < ONE_THREAD_FLOPS
        torch.set_num_threads(1 if alone else self._threads())  # of this thread of Python's
        self.shared.bank.select(owners)
        with self.recording():
            return (run or self._backbone)(token_S, position_S, layout)

    def keep(self, i: int, row: Row, ids: tuple[int, ...]) -> None:
        """Keep the keys and values of a finished row in `past`."""
        if self.past.most_bytes:
            own = self.cache.held(i, len(ids) - row.shared)
            self.past.add(Kept(row.job.owner, ids, self.cache.opening(row.slot), row.shared, own))

    def free(self, finished: Collection[int]) -> None:
        """Give up rows, and the slots of prompts that have no row left."""
        if not finished:
            return
        rows = self.rows
        for i in finished:
            self.shared.budget.give(rows.owners[i].job, 1)
        left = {row.slot for i, row in enumerate(rows.owners) if i not in finished}
        moved = rows.remove(finished)
        if moved is not None:
            self.cache.rows.move(moved.source, moved.target, moved.longest)
        for slot in sorted(set(range(len(self.cache.lengths))) - left, reverse=True):
            replaced = self.cache.drop_prompt(slot)
            for row in rows.owners:
                if replaced is not None and row.slot == replaced:
                    row.slot = slot
        self._grid = None
        if not rows.active and self.shared.device.type == "cuda":  # gpu-seen: memory of keys and values
            self.rest()  # until there are rows again

    def rest(self) -> None:
        """Give back the memory of keys and values. There are no rows now."""
        self.cache.release()

    def forget(self, weights: AdapterWeights | None) -> None:
        """Stop sharing prompts that were computed with weights that are unloaded, or that have changed."""
        self.cache.forget(weights)

    def clear(self) -> list[PendingRequest]:
        """Free everything after a failure. Returns the requests that had rows, or were being given some."""
        held = [*((each.job, each.missing) for each in self._admitted), *((row.job, 1) for row in self.rows.owners)]
        for job, n in held:
            self.shared.budget.give(job, n)
        taken = [each.job for each in self._admitted] + [row.job for row in self.rows.owners]
        self.cache.release()  # memory may be what was missing
        self.rows = Rows(self.rows.most, self.shared.device)
        self._grid, self._admitted, self._unread = None, [], []
        return taken
