"""Finds nearly equal prompts: those that share at least `alike` of their runs of three words (Jaccard's index).

    alike_ones  for each prompt the earlier one that stands for it, and the groups of prompts that are alike
    texts_of    the two texts of a conversation that are compared: its last messages, and all but the system's

All pairs that are so alike are found, and no others: two sets that share so much share one of the rarest elements of
each (prefix filtering: Bayardo, Ma and Srikant 2007), and only prompts that do are compared. Conversations are alike
where both their last messages and all their messages are. Runs of words that more than a fifth of all prompts have are
a template, and do not count.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from groupwise.tasks.logs.split import Together
from groupwise.types import Message

RUN = 3  # words
TEMPLATE_SHARE = 0.2  # of the prompts,
FEWEST = 50  # where there are so many
_SIGNS = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"  # of languages that write no blanks: each is a word
_WORD = re.compile(rf"[{_SIGNS}]|[^\W{_SIGNS}]+|[^\w\s]")


def texts_of(messages: Sequence[Message]) -> tuple[str, str]:
    """Return what was said last, after the assistant's last message, and all that was."""
    said = [(each["role"], _text(each)) for each in messages if each["role"] not in ("system", "developer")]
    begins = max((at + 1 for at, (role, _) in enumerate(said[:-1]) if role == "assistant"), default=0)
    return "\n".join(text for _, text in said[begins:]), "\n".join(text for _, text in said)


def _text(message: Message) -> str:
    calls = " ".join(str(call.get("function")) for call in message.get("tool_calls") or ())
    return f"{message.get('content') or ''} {calls}"


def words_of(text: str) -> list[str]:
    """Return the words and signs of a text, in small letters."""
    return _WORD.findall(text.lower())


def shingles(text: str) -> frozenset[int]:
    """Return the runs of three words of a text, as numbers; of a shorter text, all of it."""
    words = words_of(text)
    runs = [tuple(words[at : at + RUN]) for at in range(max(1, len(words) - RUN + 1))]
    return frozenset(hash(run) for run in runs)


def alike_ones(prompts: Sequence[Sequence[Message]], *, alike: float) -> tuple[dict[int, int], Together]:
    """Return for each prompt that is like an earlier one that was kept, that earlier one; and the groups of prompts
    that are alike, directly or through others. `alike` is above 0; 1 means the same runs of words."""
    texts = [texts_of(each) for each in prompts]
    last, whole = (_ranked([shingles(each[at]) for each in texts]) for at in (0, 1))
    having: dict[int, list[int]] = defaultdict(list)  # a rare element -> the prompts that have it
    kept_for, together = dict[int, int](), Together(len(prompts))
    for number, (mine, new) in enumerate(zip(whole, last, strict=True)):
        rarest = mine[: len(mine) - math.ceil(alike * len(mine)) + 1].tolist()
        for other in dict.fromkeys(other for each in rarest for other in having[each]):
            known = together.same(number, other)
            if known and (other in kept_for or number in kept_for):
                continue
            if _share(mine, whole[other], alike) and _share(new, last[other], alike):
                together.join(number, other)
                if other not in kept_for:
                    kept_for.setdefault(number, other)
        for each in rarest:
            having[each].append(number)
    return kept_for, together


def _ranked(sets: Sequence[frozenset[int]]) -> list[np.ndarray]:
    """Return sets as sorted numbers, the rarest element first, without what is a template's."""
    if not sets:
        return []
    lengths = [len(each) for each in sets]
    elements = np.fromiter((value for each in sets for value in each), dtype=np.int64, count=sum(lengths))
    _, places, counts = np.unique(elements, return_inverse=True, return_counts=True)
    rank = np.empty(len(counts), dtype=np.int64)
    order = np.argsort(counts, kind="stable")
    rank[order] = np.arange(len(counts))
    most = TEMPLATE_SHARE * len(sets) if len(sets) >= FEWEST else math.inf
    common = int(np.searchsorted(counts[order], most, side="right"))  # ranks from here on are a template's
    ranked = [np.sort(part) for part in np.split(rank[places], np.cumsum(lengths)[:-1])]
    without = [part[part < common] for part in ranked]
    return [some if len(some) else part for some, part in zip(without, ranked, strict=True)]


def _share(one: np.ndarray, other: np.ndarray, alike: float) -> bool:
    """Return whether two sets share so much of what is in either."""
    fewer, more = sorted((len(one), len(other)))
    if fewer < alike * more:
        return False
    both = len(np.intersect1d(one, other, assume_unique=True))
    return both >= alike * (fewer + more - both) - 1e-9
