"""Prompt-lookup speculative decoding: several tokens a forward, the same tokens as plain decoding.

Much of what is written was read before: a document that is edited, JSON keys, a table, a loop. Where the last tokens of
a row have occurred before, what followed them then is its *draft* (Saxena 2023, "Prompt lookup decoding"; `ngrams`).
One forward then runs the row's last token x and the draft, and a token is drawn after each of them:

    runs     x    d1   d2   d3            drawn tokens stand up to the first that is not what was drafted, with it:
    draws    y0   y1   y2   y3            here y0 = d1, y1 = d2, y2 != d3, so y0 y1 y2 stand and y3 does not

The output is that of plain decoding, token by token. Plain decoding draws token t as y_t = f(logits_t, u_t): the
cumulative distribution (after temperature, top-k, top-p, min-p) inverted at a uniform that is a hash of the seed and t
(`sampling`). Here y_t is drawn by the same f, at the same u_t, from the logits after x and the drafts before t. It
stands only if those drafts equal the tokens drawn before it; so by induction over t the logits, and with them y_t and
its log-probability, are those of plain decoding. Drafts decide how many tokens a step brings, never which. That is more
than the rejection scheme of speculative sampling promises (Leviathan et al. 2023, arXiv 2211.17192), which keeps the
distribution but not the draw; a draft stands as often as there, with its probability under the model. Equal means up to
rounding: a forward of more tokens, like any other batch, may add in another order.

Keys and values of drafts that did not stand lie behind the row's count. Whatever reads a row ends there or masks what
is beyond, and the next forward writes over them, starting at the count.

What a penalty or a grammar does to token t depends on the drafts before it; completions with either have none.

A step of more tokens saves time while it is bound by starting operations or by reading weights, and no longer once it
is bound by its products: drafts are cut so that a step runs at most `MOST_RUN` tokens, and many rows have none. Nor are
few drafts checked among many rows: with fewer than `LEAST_DRAFTED` for each row a step is run without.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import takewhile

import torch

from groupwise.engine.rows import Rows
from groupwise.errors import ConfigError
from groupwise.model.image_tokens import is_of_image
from groupwise.types import FinishReason

# (row, tokens of its completion up to here, place among what was drawn) -> the text, where this token ends it
Watch = Callable[[int, int, int], str | None]

MOST_DRAFTED = 32  # tokens of a row
LEAST_DRAFTED = 1.0  # tokens per row of a step
MOST_RUN, MOST_RUN_CPU = 256, 64  # tokens of a step, drafts included


class Lookup:
    """Drafts up to `most` tokens for each row, and counts how many are accepted; 0 turns drafting off.

    Raises:
        ConfigError: `most` is out of range.
    """

    def __init__(self, most: int, device: torch.device):
        if not 0 <= most <= MOST_DRAFTED:
            raise ConfigError(f"draft_tokens is {most}; it must be 0 (off) to {MOST_DRAFTED}")
        self.most, self.most_run = most, MOST_RUN_CPU if device.type == "cpu" else MOST_RUN
        self._drafted = self._accepted = 0  # tokens

    def drafts(self, rows: Rows) -> list[list[int]] | None:
        """Return a draft (maybe empty) for each active row, or None if drafting is not worth it in this step."""
        most = min(self.most, self.most_run // rows.active - 1)
        if most < 1:
            return None
        drafts = []
        state = torch.stack((rows.count[: rows.active], rows.token[: rows.active])).tolist()
        for i, (row, count, token) in enumerate(zip(rows.owners, *state, strict=True)):
            history = row.history
            if count - history.said == 1:
                history.add((token,))
            elif count > history.said:
                history.add(rows.tokens[i, history.said : count].tolist())
            params = row.job.request.params
            alone = (
                params.grammar or params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
            )
            guessed = [] if alone else history.draft(min(most, row.job.max_tokens - count - 1))
            drafts.append([*takewhile(lambda token: not is_of_image(token), guessed)])  # images are never sampled
        drafted = sum(map(len, drafts))
        return drafts if drafted and drafted >= LEAST_DRAFTED * rows.active else None

    def settle(
        self, rows: Rows, drafts: Sequence[Sequence[int]], drawn: Sequence[int], ends: Collection[int], watch: Watch
    ) -> tuple[list[int], dict[int, FinishReason], dict[int, str]]:
        """Accept or reject drafted tokens, given the tokens that the model drew at each position.

        Args:
            drawn: the drawn tokens of all rows, concatenated.
            ends: ids that end a completion.
            watch: called with every accepted token of a watched row; returns the text if it ends the completion.

        Returns:
            For each row how many tokens are accepted; why rows are finished; the text of those that `watch` ended.
        """
        lengths, reasons, cut, start = [], {}, {}, 0
        for i, (row, draft) in enumerate(zip(rows.owners, drafts, strict=True)):
            mine, history, job = drawn[start : start + 1 + len(draft)], row.history, row.job
            last = () if job.request.params.ignore_eos else ends
            length = standing(mine, draft, last)
            for t in range(length) if row.watched else ():
                text = watch(i, history.said + t + 1, start + t)
                if text is not None:
                    length, cut[i] = t + 1, text
                    break
            history.add(mine[:length])
            if draft:
                history.judge(length - 1)
            if i in cut or mine[length - 1] in last:
                reasons[i] = FinishReason.STOP
            elif history.said == job.max_tokens:
                reasons[i] = FinishReason.LENGTH
            lengths.append(length)
            start += len(mine)
        self._drafted += len(drawn) - rows.active
        self._accepted += sum(lengths) - rows.active
        return lengths, reasons, cut

    def stats(self) -> dict[str, int]:
        """Return tokens drafted and accepted; nothing where drafts are off."""
        return {"drafted": self._drafted, "accepted": self._accepted} if self.most else {}


def standing(drawn: Sequence[int], draft: Sequence[int], ends: Collection[int]) -> int:
    """Return how many of the drawn tokens are valid: up to the first that differs from the draft, or that is one of
    `ends`."""
    for i, token in enumerate(drawn[:-1]):
        if token != draft[i] or token in ends:
            return i + 1
    return len(drawn)
