"""Two word tasks of several turns that the field measures on, as environments: Wordle, and names sorted by letters.

    env: {environment: groupwise.tasks.word_games:Wordle}
    env: {environment: groupwise.tasks.word_games:AlphabetSort}

Neither needs a download. For comparison with published curves, give Wordle the words of the run that is compared with
(`args: {words: words.txt}`), and AlphabetSort its names (`args: {names: names.txt}`), a line each.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from groupwise.errors import DataError
from groupwise.rewards.text import tagged
from groupwise.tasks.env import StepResult
from groupwise.types import Message

OWN = Path(__file__).parent / "word_lists"
HELD_OUT = 10  # one case of so many is held out for evaluation
LETTERS = 5


class Wordle:
    """Find a word of five letters in six guesses; after each, every letter is green (G: in its place), yellow (Y: in
    another place) or grey (X: in none).

    An episode is worth 1 if the word is found, and otherwise up to 0.5 by the greens and half the yellows of its best
    guess. A guess is what stands in `<guess></guess>`, or is the whole reply.

    Args:
        words: a file with a word a line, from `folder` on; by default 463 common words.
        guesses: the number of guesses.

    Raises DataError for a file that is not there or has other lines.
    """

    def __init__(self, words: str | None = None, guesses: int = 6, folder: str = "."):
        self._words = _lines(words, folder, own="words.txt")
        self._guesses = guesses
        if wrong := next((each for each in self._words if not re.fullmatch(f"[a-z]{{{LETTERS}}}", each)), None):
            raise DataError(f"{words}: {wrong!r} is no word of five letters a to z", hint="one word a line")

    def cases(self) -> list[dict[str, Any]]:
        """Return nine of ten words."""
        return [{"word": each} for i, each in enumerate(self._words) if i % HELD_OUT]

    def eval_cases(self) -> list[dict[str, Any]]:
        """Return the tenth."""
        return [{"word": each} for each in self._words[::HELD_OUT]]

    def reset(self, case: Mapping[str, Any], seed: int) -> str:
        """Return the rules."""
        self._word, self._made, self._best = str(case["word"]), 0, 0.0
        return (
            f"Guess a word of five letters; you have {self._guesses} guesses. After each you are told of every letter: "
            "G, it is in its place; Y, it is in another place; X, it is not there. Reply with <guess>word</guess>."
        )

    def step(self, message: Message) -> StepResult:
        """Return the feedback on the guess."""
        said = str(message.get("content") or "").rpartition("</think>")[2]
        guess = (tagged(said, "guess") or said).strip().strip("[].").lower()
        self._made += 1
        if guess == self._word:
            return StepResult(reward=1.0, done=True, info={"solved": 1.0, "guesses": self._made})
        if len(guess) == LETTERS and guess.isascii() and guess.isalpha():
            colours = feedback(guess, self._word)
            self._best = max(self._best, 0.5 * (colours.count("G") + colours.count("Y") / 2) / LETTERS)
            told = f"{' '.join(guess.upper())}\n{' '.join(colours)}"
        else:
            told = f"That is no word of five letters. Reply with <guess>word</guess>.\n{' '.join('X' * LETTERS)}"
        left = self._guesses - self._made
        if left == 0:
            return StepResult(reward=self._best, done=True, info={"solved": 0.0, "guesses": self._made})
        return StepResult(messages=[{"role": "user", "content": f"{told}\n{left} guess{'es' * (left > 1)} left."}])


def feedback(guess: str, word: str) -> str:
    """Return the colours of a guess: each letter of the word colours one letter, those in their place first.

    >>> feedback("speed", "eerie")
    'XXYYX'
    """
    left = Counter(b for a, b in zip(guess, word, strict=True) if a != b)
    colours = []
    for a, b in zip(guess, word, strict=True):
        colour = "G" if a == b else "Y" if left[a] > 0 else "X"
        left[a] -= colour == "Y"
        colours.append(colour)
    return "".join(colours)


class AlphabetSort:
    """Sort names; then, in each further turn, more of them into the list so far.

    Each turn is worth how alike its list and the right one are (the ratio of `difflib`, to the power of `power`), and
    an episode the mean of its turns. A list, a name a line, is what stands in `<sorted></sorted>`, or the whole reply.

    Args:
        names: a file with a name a line, from `folder` on; by default four hundred made-up ones.
        turns, most: the number of turns in an episode, and the most names in a turn.
        size: the number of episodes.
        power: the exponent of the likeness; above 1, nearly right answers get less.

    Raises DataError for a file that is not there or is empty.
    """

    def __init__(
        self,
        names: str | None = None,
        turns: int = 3,
        most: int = 5,
        size: int = 2000,
        power: float = 4.0,
        folder: str = ".",
    ):
        self._names = _lines(names, folder, own="names.txt")
        self._turns, self._most, self._size, self._power = turns, most, size, power

    def cases(self) -> list[dict[str, Any]]:
        """Return nine of ten episodes."""
        return [{"number": number} for number in range(self._size) if number % HELD_OUT]

    def eval_cases(self) -> list[dict[str, Any]]:
        """Return the tenth."""
        return [{"number": number} for number in range(0, self._size, HELD_OUT)]

    def reset(self, case: Mapping[str, Any], seed: int) -> str:
        """Return the first names."""
        drawn = random.Random(int(case["number"]))
        counts = [drawn.randint(2, max(2, self._most)) for _ in range(self._turns)]
        names = drawn.sample(self._names, min(sum(counts), len(self._names)))
        self._batches = [names[sum(counts[:i]) : sum(counts[: i + 1])] for i in range(self._turns)]
        self._so_far = list[str]()
        return (
            "Sort these names by their letters, a name a line, in <sorted> </sorted> tags:\n"
            f"{self._next()}\nLater there are more, which go into the same list."
        )

    def step(self, message: Message) -> StepResult:
        """Return how alike the lists are, and the next names."""
        said = str(message.get("content") or "").rpartition("</think>")[2]
        lines = [each.strip() for each in (tagged(said, "sorted") or said).strip().splitlines() if each.strip()]
        right = sorted(self._so_far, key=str.casefold)
        alike = SequenceMatcher(None, "\n".join(lines[: 2 * len(right)]), "\n".join(right), autojunk=False).ratio()
        reward = alike**self._power / self._turns * (len(lines) <= 2 * len(right))
        info = {"exact": float(lines == right)}
        if not self._batches:
            return StepResult(reward=reward, done=True, info=info)
        more = f"Now put these into the list, and give the whole list:\n{self._next()}"
        return StepResult(messages=[{"role": "user", "content": more}], reward=reward, info=info)

    def _next(self) -> str:
        names = self._batches.pop(0)
        self._so_far += names
        return "\n".join(names)


def _lines(name: str | None, folder: str, *, own: str) -> list[str]:
    """Return the lines of a file, or of our own."""
    path = OWN / own if name is None else Path(folder) / Path(name).expanduser()
    try:
        lines = [each.strip() for each in path.read_text().splitlines() if each.strip()]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", hint="a file with one entry a line") from None
    if not lines:
        raise DataError(f"{path} is empty", hint="a file with one entry a line")
    return lines
