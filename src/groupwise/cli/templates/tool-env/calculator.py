"""An environment with a calculator: the policy finds numbers and operation in a text, calls the tool, and answers.

    groupwise env check calculator:Calculator    # plays it without training, and reports problems
    groupwise run my_run.yaml                    # examples/envs/calculator.yaml in the repository

An episode has two turns and one reward at the end: after a wrong expression the answer cannot be right, and a right
expression gets no reward until the policy says its result.
"""

import random
import re

from groupwise.tasks.tool_env import ToolEnv

QUESTIONS = {
    "minus": ("{a} minus {b}", "-"),
    "more": ("What is {a} and {b} more?", "+"),
    "without": ("How much is {a} without {b}?", "-"),
    "less": ("What is {a} less {b}?", "-"),
    "reduced": ("{a} reduced by {b}?", "-"),
    "times": ("{a} times as much as {b}?", "*"),
}


class Calculator(ToolEnv):
    """Questions about two numbers below `below`; where their sum is a multiple of 7 they are held out."""

    def __init__(self, below: int = 100, train: int = 4000, held_out: int = 256):
        self.below, self.train, self.held_out = below, train, held_out

    def cases(self):
        return self._drawn(0, self.train, held_out=False)

    def eval_cases(self):
        return self._drawn(1, self.held_out, held_out=True)

    def _drawn(self, seed, count, *, held_out):
        draw, cases = random.Random(seed), []
        while len(cases) < count:
            b, a = sorted(draw.randrange(10, self.below) for _ in range(2))
            if ((a + b) % 7 == 0) == held_out:
                cases.append({"kind": draw.choice(list(QUESTIONS)), "a": a, "b": b})
        return cases

    def first_message(self, case, seed):
        question, operation = QUESTIONS[case["kind"]]
        self.answer = self.calculator(f"{case['a']}{operation}{case['b']}")
        return question.format(**case)

    def calculator(self, expression: str) -> str:
        """Evaluate arithmetic."""
        match = re.fullmatch(r"\s*(-?\d{1,9})\s*([+*-])\s*(-?\d{1,9})\s*", expression)
        if match is None:
            raise ValueError("two numbers and one of + - * between them, please")
        a, b = int(match[1]), int(match[3])
        return str({"+": a + b, "-": a - b, "*": a * b}[match[2]])

    tools = (calculator,)

    def score(self, episode):
        return float(re.sub(r"[^\d-]", "", episode.answer) == self.answer)
