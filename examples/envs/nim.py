"""Nim against itself: two players, both the policy, take 1 to 3 stones in turn; the player who takes the last one wins.

    groupwise run examples/envs/nim.yaml

Each player has its own conversation and its own reward: 1 for the winner, 0 for the loser. An invalid move
loses, and the other player then gets 0.5. The best moves leave a multiple of 4, from which the next player loses.
"""

import re

from groupwise.tasks.env import MoveResult

OTHER = {"first": "second", "second": "first"}


class Nim:
    players = ("first", "second")

    def __init__(self, most: int = 9):
        self.most = most

    def cases(self):
        return [{"stones": stones} for stones in range(2, self.most + 1)]

    def eval_cases(self):
        return self.cases()

    def reset(self, case, seed):
        self.left = case["stones"]
        return {
            "first": f"{self.left} stones. Take 1, 2 or 3; who takes the last one wins. Reply with just the number."
        }

    def step(self, player, message):
        other, before = OTHER[player], self.left
        said = re.fullmatch(r"\s*([1-3])\s*\.?\s*", message["content"])
        taken = int(said[1]) if said else 0
        if not 1 <= taken <= before:
            return MoveResult(rewards={player: 0.0, other: 0.5}, done=True, info={"illegal": 1.0})
        self.left -= taken
        info = {"moves": 1.0, "best_moves": float(self.left % 4 == 0), "could_be_best": float(before % 4 != 0)}
        if not self.left:
            return MoveResult(rewards={player: 1.0, other: 0.0}, done=True, info=info)
        hint = f"{self.left} stones. Take 1, 2 or 3; who takes the last one wins. Reply with just the number."
        return MoveResult(messages={other: hint}, info=info, state=str(self.left))
