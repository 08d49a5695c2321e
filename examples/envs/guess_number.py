"""Guess a number in a few turns: the policy hears "higher" or "lower" and has to use it.

    groupwise run examples/envs/guess_number.yaml

Each turn has a reward: what the guess narrowed down, as a share of what was left; finding the number is worth the rest.
An episode's score is between 0 and 1, and 1 only if the number was found.
"""

import re

from groupwise.envs import StepResult


class GuessNumber:
    """Numbers from 1 to `highest`, `guesses` guesses. `seed` draws the number, the same for a whole group."""

    def __init__(self, highest: int = 10, guesses: int = 5, train: int = 2000, held_out: int = 128):
        self.highest, self.guesses, self.train, self.held_out = highest, guesses, train, held_out

    def cases(self):
        return [{"secret": 1 + number % self.highest} for number in range(self.train)]

    def eval_cases(self):
        return [{"secret": 1 + number % self.highest} for number in range(self.held_out)]

    def reset(self, case, seed):
        self.secret, self.low, self.high, self.made = case["secret"], 1, self.highest, 0
        return f"Find a number from 1 to {self.highest}. Reply with just the number."

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
        return 0.5 * (1 - (self.high - self.low + 1) / self.highest)
