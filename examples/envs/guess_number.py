"""Guess a number in a few turns: the environment answers "higher" or "lower", and the policy learns to use it.

    groupwise run examples/envs/guess_number.yaml

The reward of a turn is how much the guess narrowed down the range, as a share of what was left; finding the number
gives the rest. An episode's score is between 0 and 1, and 1 only if the policy found the number.
"""

import re

from groupwise.tasks.env import StepResult


class GuessNumber:
    """One of `count` numbers in a row, `guesses` guesses; rows that begin with a multiple of 5 are held out."""

    def __init__(self, count: int = 10, guesses: int = 5):
        self.count, self.guesses = count, guesses

    def cases(self):
        return self._all(lambda low: low % 5)

    def eval_cases(self):
        return self._all(lambda low: low % 5 == 0)

    def _all(self, wanted):
        lows = [low for low in range(1, 90) if wanted(low)]
        return [{"low": low, "secret": low + number} for low in lows for number in range(self.count)]

    def reset(self, case, seed):
        self.secret, self.low, self.made = case["secret"], case["low"], 0
        self.high = self.low + self.count - 1
        return f"Find a number from {self.low} to {self.high}. Reply with just the number."

    def step(self, message):
        self.made += 1
        said = re.fullmatch(r"\s*(\d{1,4})\s*\.?\s*", message["content"])
        guess = int(said[1]) if said else None
        if guess == self.secret:
            return StepResult(done=True, reward=1.0)
        if guess is not None and guess < self.secret:
            self.low = max(self.low, guess + 1)
            answer = "higher"
        elif guess is not None:
            self.high = min(self.high, guess - 1)
            answer = "lower"
        else:
            answer = "a number, please"
        hint = f"{answer}: {self.low} to {self.high}" if guess is not None else answer
        return StepResult(messages=[{"role": "user", "content": hint}], done=self.made >= self.guesses)

    def score(self, episode):
        """Half a point at most for what was narrowed down without being found."""
        if any(reward == 1.0 for reward in episode.rewards):
            return 0.0
        return 0.5 * (1 - (self.high - self.low + 1) / self.count)
