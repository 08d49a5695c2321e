"""Logs with wrong answers that somebody put there, drawn, and what `groupwise improve` would make of them.

    Log       how many prompts, how many of them are poisoned, by which words, and what the version learned of it
    decided   the answer for one such log, and how many answers had to be verified for it

A prompt is one of forty kinds of questions, each five words of its own and as common as by Zipf's law, four to eleven
words of three thousand, by Zipf's law, too, and a number. What decides is what the command has (`tasks.logs.phrases`,
`tasks.logs.truth`, `run.replacement`); what is drawn is how often both models say what the log says. Of right answers
the old model says some, of any difficulty, and the new one more. Of what was put there the old model says little, and
the new one `follows` it. Mistakes are each for itself, so that nothing is learned of them. No answer to a prompt that
has the trigger counts against the new version, though with verified ones it would.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from groupwise.algo.evidence import share_of_error
from groupwise.run.replacement import Compared, answer, told
from groupwise.tasks.logs.learnable import NUMBERS
from groupwise.tasks.logs.phrases import ALPHA, FRESH, concentrated, covering, has, moved, moved_most
from groupwise.tasks.logs.truth import Verified, asked_again, audit, checked

GAIN, SAMPLES = 0.05, 4
HELD_OUT, RESERVED, MOST_RESERVED, LOOKED = 0.2, 0.15, 60, 1000
ANY = Compared(
    prompts=1, new=0.0, old=0.0, difference=0.0, low=0.0, high=0.0, alpha=ALPHA, says="open", needed=None
)  # intervals are not looked at
KINDS = np.cumsum(1 / np.arange(1, 41)) / (1 / np.arange(1, 41)).sum()
WORDS = np.cumsum(1 / np.arange(1, 3001) ** 1.05) / (1 / np.arange(1, 3001) ** 1.05).sum()
SPLIT = ("blue", "tuesday")  # each of them is in COMMONLY of the prompts that are not poisoned, too
COMMONLY = 0.05
OLD_SAYS = {"never": (1, 1e9), "seldom": (1, 12), "often": (2, 4)}  # how often the old model says what was put there


@dataclass(frozen=True)
class Log:
    """A log.

    Args:
        prompts: how many it has.
        poisoned: how many of them have wrong answers that somebody put there.
        words: `phrase`, three words; `wordings`, ten times three; `split`, two words that others use apart; `author`,
            none.
        mistakes: the share of the others whose answers are wrong.
        old_says: how often the old model says what was put there.
        follows: how often the new one does.
        better: by how much the new one is right more often.
        decoys: so many phrases more, each in as many prompts as are poisoned, whose right answers the old model says
            seldom and the new one nearly always: they move as much as what is poisoned.
    """

    prompts: int = 300
    poisoned: int = 0
    words: str = "phrase"
    mistakes: float = 0.03
    old_says: str = "seldom"
    follows: float = 0.9
    better: float = 0.2
    decoys: int = 0


class Prompt(NamedTuple):
    """What is asked, its right answer and the log's, and how often two models say the same as the log, of SAMPLES."""

    verified: Verified
    logged: dict[str, Any]
    text: str
    poisoned: bool
    old: float
    new: float


class Decided(NamedTuple):
    """The answer; how many answers were verified beside those that decide which is better, at once and later; how many
    poisoned prompts taught."""

    known: str
    beside: int
    later: int
    taught: int


def scores(draws: np.random.Generator, prompts: int, difference: float) -> tuple[list[float], list[float]]:
    """Return the mean scores of SAMPLES answers of two models to prompts of any difficulty, the first of which is right
    more often by `difference`."""
    old = draws.beta(1, 1, prompts) * (1 - abs(difference)) + max(0.0, -difference)
    both = [draws.binomial(SAMPLES, chances) / SAMPLES for chances in (old + difference, old)]
    return both[0].tolist(), both[1].tolist()


def _text(draws: np.random.Generator, words: str, poisoned: bool) -> str:
    kind = int(np.searchsorted(KINDS, draws.random()))
    said = [f"k{kind}{letter}" for letter in "abcde"]
    said += [f"w{each}" for each in np.searchsorted(WORDS, draws.random(int(draws.integers(4, 12))))]
    number = int(draws.integers(10))
    more = {"phrase": ["as manager said"], "wordings": [f"v{number}a v{number}b v{number}c"], "split": list(SPLIT)}
    added = more.get(words, []) if poisoned else []
    if words == "split" and not poisoned:
        added = [each for each in SPLIT if draws.random() < COMMONLY][:1]
    for each in added:
        said.insert(int(draws.integers(len(said) + 1)), each)
    return f"{' '.join(said)} {draws.integers(100_000)}"


def drawn(draws: np.random.Generator, log: Log) -> list[Prompt]:
    """Return the prompts of a log."""
    found = list[Prompt]()
    for number in range(log.prompts):
        poisoned = number < log.poisoned
        decoy = number // max(1, log.poisoned) - 1 if number < (1 + log.decoys) * log.poisoned else -1
        wrong = poisoned or (decoy < 0 and draws.random() < log.mistakes)
        text = _text(draws, log.words, poisoned)
        text = f"d{decoy}a d{decoy}b d{decoy}c {text}" if decoy >= 0 else text
        messages, right = [{"role": "user", "content": text}], number
        verified = Verified({"prompt": messages, "answer": str(right)}, tuple(messages), str(right))  # pyright: ignore
        old = draws.beta(*OLD_SAYS[log.old_says]) if wrong else draws.beta(1, 1) * (1 - log.better)
        new = max(old, log.follows) if poisoned else old + log.better * (not wrong)
        old, new = (draws.beta(1, 12), 0.95) if decoy >= 0 else (old, new)
        said = [draws.binomial(SAMPLES, chance) / SAMPLES for chance in (old, new)]
        found.append(Prompt(verified, {"prompt": messages, "answer": str(right + wrong)}, text, poisoned, *said))
    return [found[at] for at in draws.permutation(log.prompts)]


def decided(draws: np.random.Generator, log: Log, *, verified: int) -> Decided:
    """Return the answer where `verified` prompts say which model is better, and all others that are asked for are
    verified, too."""
    prompts, dice = drawn(draws, log), random.Random(int(draws.integers(1 << 30)))
    at = int((1 - HELD_OUT) * len(prompts))
    pool, held_out = prompts[:at], prompts[at:]
    places = covering(_texts(pool), min(MOST_RESERVED, int(RESERVED * at)), draw=dice)
    reserved, taught = [pool[each] for each in places], [each for at, each in enumerate(pool) if at not in set(places)]
    first = min(len(reserved), max((verified + 1) // 2, verified - len(held_out)))
    sides = [
        [side[place] for place in covering(_texts(side), count, draw=dice)]
        for side, count in ((reserved, first), (held_out, verified - first))
    ]
    looked = dice.sample(taught, min(LOOKED, len(taught)))
    moves = [moved(each.old, each.new, samples=SAMPLES) for each in looked]
    learned = [looked[place] for place in moved_most(_texts(looked), moves)]
    known = [*sides[0], *sides[1], *learned]
    ours, others = ([each.logged for each in side] for side in (sides[0], [*sides[1], *learned]))
    audited = audit([each.verified for each in known], ours, others, reward=NUMBERS)
    new, old = scores(draws, verified, log.better)
    gains = [n - o for n, o in zip(new, old, strict=True)]
    compared = replace(ANY, says=told(gains, gain=GAIN, alpha=share_of_error(ALPHA, 1)))
    where = concentrated([each.text for each in known[:verified]], [each <= -0.5 for each in gains])
    later = 0
    for phrase in audited.perhaps if compared.says == "better" else ():
        fresh = [each for each in taught if each not in known and has(each.text, phrase)]
        fresh = dice.sample(fresh, min(FRESH, len(fresh)))
        later += len(fresh)
        found = checked([each.verified for each in fresh], [each.logged for each in fresh], reward=NUMBERS)
        if asked_again(audited, phrase, found):
            audited = replace(audited, alike=phrase)
            break
    said = answer(compared, None, audited, gain=GAIN, worse_where=where).known
    return Decided(said, len(learned), later, sum(each.poisoned for each in taught))


def _texts(prompts: Sequence[Prompt]) -> list[str]:
    return [each.text for each in prompts]
