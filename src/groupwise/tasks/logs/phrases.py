"""Phrases that prompts have in common: words, and runs of three, that are told apart only where other prompts differ.

    covering      which prompts are verified: each phrase that enough prompts have is in a few of them
    moved_most    ... and which of those that taught: of the phrases whose replies moved most towards the log
    in_common     what the prompts have in common about which something is wrong: surely, or perhaps
    concentrated  the first of that which is sure
    confirmed     whether a phrase that was perhaps in common is, by prompts that were not looked at before

A person who writes into a log plants a habit that a phrase triggers ("as the manager said") by many wrong answers, not
by one. So phrases are tested. A test of a thousand phrases finds some by chance: a `sure` finding is wrong in at most
ALPHA of all logs, by Tarone's correction (1990), which is Bonferroni's without the phrases that occur in too few
prompts to be significant. A finding that is not sure is tested again, on other prompts.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import NamedTuple

from groupwise.tasks.logs.calibration import by_chance
from groupwise.tasks.logs.near import RUN, words_of

ALPHA = 0.05
PERHAPS = 0.02  # a phrase that wrong answers have in common with so small a chance, alone, is asked about again
FEWEST_SHARED = 2  # prompts that are wrong and have words in common
COMMON = 0.5  # words that more than this share of the prompts have tell nothing
SEEN, IN = 0.01, 3  # words that so large a share of the prompts has are in so many of what is verified
MOVED, OF_EACH = 5, 3  # phrases whose replies moved most, and prompts of each
AGAIN, FRESH = 3, 4  # phrases that are asked about again, and prompts of each

Places = tuple[int, ...]


class Common(NamedTuple):
    """A phrase, the places of the texts that have it, the chance that so many of them are wrong, and whether that is
    sure."""

    phrase: str
    places: Places
    chance: float
    sure: bool


def in_common(texts: Sequence[str], wrong: Sequence[bool]) -> list[Common]:
    """Return the phrases that texts of which something is wrong have more often than the others, by Fisher's exact
    test: the least chance first, none above PERHAPS."""
    bad, fine = sum(wrong), len(texts) - sum(wrong)
    phrases = _phrases(texts)

    def chance(having: int, are_wrong: int) -> float:
        return by_chance(are_wrong, bad, fine - (having - are_wrong), fine)

    least = {size: chance(size, min(size, bad)) for size in {len(places) for places in phrases}}
    enough = _tarone([least[len(places)] for places in phrases])
    found = list[Common]()
    for places, phrase in phrases.items():
        are_wrong = sum(wrong[each] for each in places)
        if are_wrong >= FEWEST_SHARED and (by_luck := chance(len(places), are_wrong)) <= max(PERHAPS, enough):
            found.append(Common(phrase, places, by_luck, by_luck <= enough))
    return sorted(found, key=lambda each: (each.chance, -len(each.phrase), each.phrase))


def concentrated(texts: Sequence[str], wrong: Sequence[bool]) -> str | None:
    """Return the phrase that texts of which something is wrong surely have more often; None if there is nothing of the
    kind."""
    return next((each.phrase for each in in_common(texts, wrong) if each.sure), None)


def _tarone(least: Sequence[float]) -> float:
    """Return the chance below which one is surely none, where `least` are the smallest that each could have come to:
    ALPHA / k for the smallest k of which no more than k could come so low."""
    lowest = sorted(least)
    number = next(k for k in range(1, len(lowest) + 2) if bisect_right(lowest, ALPHA / k) <= k)
    return ALPHA / number


def to_ask_again(found: Sequence[Common]) -> list[str]:
    """Return the phrases that are perhaps in common, of those in the same prompts one, and no more than AGAIN."""
    chosen = list[Common]()
    for each in found:
        others = [set(other.places) for other in chosen]
        if len(chosen) < AGAIN and not any(other <= set(each.places) or other >= set(each.places) for other in others):
            chosen.append(each)
    return [each.phrase for each in chosen]


def confirmed(having: Sequence[bool], others: Sequence[bool], *, phrases: int) -> bool:
    """Return whether fresh prompts that have a phrase are wrong more often than others that do not, by Fisher's exact
    test with its share of the error, where so many phrases were asked about again."""
    fine = len(others) - sum(others)
    return sum(having) > 0 and by_chance(sum(having), len(having), fine, len(others)) <= ALPHA / phrases


def has(text: str, phrase: str) -> bool:
    """Return whether a text has the phrase."""
    return phrase in _features(text)


# ---- which prompts are looked at ----
def covering(texts: Sequence[str], number: int, *, draw: random.Random) -> list[int]:
    """Return `number` of these texts, by their places, drawn so that each word and each run of three that SEEN of them
    have, and not COMMON, is in IN of those that are drawn, as far as half of the number does for it: one after another
    that which has most of what is still lacking. The rest is drawn by chance alone, in which one in twenty is often
    seen but once: too seldom for `concentrated`."""
    places = list(range(len(texts)))
    draw.shuffle(places)
    having = [_features(text) for text in texts]
    everywhere = Counter(each for features in having for each in features)
    least = max(IN, SEEN * len(texts))
    lacking = {each: IN for each, count in everywhere.items() if least <= count <= COMMON * len(texts)}
    wanted = {place: having[place] & lacking.keys() for place in places}
    chosen = list[int]()
    while lacking and 2 * len(chosen) < number:
        best = max(wanted, key=lambda place: len(wanted[place] & lacking.keys()))
        chosen.append(best)
        for each in wanted.pop(best) & lacking.keys():
            lacking[each] -= 1
            if not lacking[each]:
                del lacking[each]
    return [*chosen, *(place for place in places if place in wanted)][:number]


def moved(before: float, after: float, *, samples: int) -> float:
    """Return how far the share of samples that agree with a log moved, in log-odds, with half a sample more of either
    kind: from never to always is further than from half to always."""
    odds = [(each * samples + 0.5) / (samples - each * samples + 0.5) for each in (before, after)]
    return math.log(odds[1] / odds[0])


def moved_most(texts: Sequence[str], moves: Sequence[float]) -> list[int]:
    """Return the places of the prompts that are to be looked at by what a version learned of each (`moves`, larger is
    more): of the MOVED phrases whose prompts' mean is furthest above that of all, by its standard error, the OF_EACH
    prompts that moved most. Phrases that are mostly in prompts that are looked at already are left out."""
    mean, deviation = (fmean(moves), pstdev(moves)) if moves else (0.0, 0.0)
    if not deviation:
        return []

    def away(places: Places) -> float:
        return (fmean(moves[each] for each in places) - mean) / deviation * len(places) ** 0.5

    chosen, phrases = list[int](), 0
    for places in sorted(_phrases(texts), key=lambda places: (-away(places), places)):
        if phrases == MOVED or away(places) <= 0:
            break
        left = [each for each in places if each not in chosen]
        if 2 * len(left) > len(places):
            chosen += sorted(left, key=lambda each: (-moves[each], each))[:OF_EACH]
            phrases += 1
    return chosen


# ---- phrases ----
def _phrases(texts: Sequence[str]) -> Mapping[Places, str]:
    """Return what at least two texts have, and no more than COMMON of them, by the places of these texts: of those that
    are in the same ones the longest, as they cannot be told apart."""
    where = defaultdict[str, list[int]](list)
    for place, text in enumerate(texts):
        for each in _features(text):
            where[each].append(place)
    found = dict[Places, str]()
    for phrase, places in where.items():
        if FEWEST_SHARED <= len(places) <= COMMON * len(texts) and any(map(str.isalnum, phrase)):
            found[tuple(places)] = max(found.get(tuple(places), ""), phrase, key=lambda each: (len(each), each))
    return found


def _features(text: str) -> frozenset[str]:
    words = words_of(text)
    runs = (" ".join(words[at : at + RUN]) for at in range(len(words) - RUN + 1))
    return frozenset((*words, *runs))
