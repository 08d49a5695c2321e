"""Self-play: an environment with several players, all of whom are the policy.

    class Nim:
        players = ("first", "second")                               this makes it a game of several players
        def reset(self, case, seed):                                what each is told; who is named first speaks first
            return {"first": "7 stones. Take 1 to 3.", "second": "You are second."}
        def step(self, player, message):                            what this player said
            return MoveResult(messages={"second": "5 stones."}, rewards={"first": 0.1}, done=False)
        def score(self, episodes): return {"first": 1.0}            optional, at the end
        def cases(self): ...                                        as of any environment; and close, eval_cases

Each player has its own conversation, and sees nothing of the others'. What a player is told waits until it speaks;
texts that follow each other are one user's message. After a move it is the turn of `MoveResult.next`, or of the next in
`players`, round and round.

A player's reward is the sum of what its moves and `score` gave it, 0 if nothing did. A rollout has the turns of all
players, one player's after another's, each with its role; `algo/advantage.py` compares a role with the same role in the
other episodes of the group, so that both sides learn from one game, each from its own reward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from groupwise.errors import ClusterError, EnvError, GroupwiseError
from groupwise.tasks.env import Episode, MoveResult, Observation, move_result_of, openings_of, rewards_of
from groupwise.tasks.episode import Player
from groupwise.tasks.transcript import Transcript
from groupwise.types import Message, Rollout, Turn


@dataclass(kw_only=True, eq=False)
class Match(Player):
    """An episode of several players in progress. `transcript` is that of the player who speaks.

    Args:
        players: all of them, in the order of turns.
    """

    players: tuple[str, ...]
    _transcripts: dict[str, Transcript] = field(default_factory=dict)
    _openings: dict[str, Observation] = field(default_factory=dict)
    _told: dict[str, list[Message]] = field(default_factory=dict)  # of each player, since it last spoke
    _given: dict[str, list[float]] = field(default_factory=dict)
    _turn: str = ""  # whose it is
    _scored: bool = False

    async def begin(self) -> None:
        """Make and reset the environment: `transcript` is there, of the player who begins, or `error`."""
        try:
            self._env = await self._made()
            value = await self._call(self._env.reset, dict(self.case), self.seed, what=f"{self.name}.reset")
            self._openings = openings_of(value, self.players, limit=self.config.max_characters)
            self._begin_turn(next(iter(self._openings)), None)
        except ClusterError:
            raise
        except GroupwiseError as error:
            self._fail(error)

    @property
    def opening(self) -> Transcript | None:
        """Return the transcript of the player that began."""
        return next(iter(self._transcripts.values()), None)

    @property
    def taken(self) -> int:
        """Turns of all players so far."""
        return sum(len(each.turns) for each in self._transcripts.values())

    @property
    def said(self) -> int:
        """Return the number of all players' tokens so far."""
        return sum(each.said for each in self._transcripts.values())

    # -- turns ---------------------------------------------------------------------------------------------------------

    async def _step(self, message: Message) -> str | None:
        value = await self._call(self._env.step, self._turn, message, what=f"{self.name}.step")
        moved: MoveResult = move_result_of(value, self.players, limit=self.config.max_characters)
        for player, reward in moved.rewards.items():
            self._give(player, reward)
        for name, number in moved.info.items():
            self._info.setdefault(name, []).append(number)
        for player, told in moved.messages.items():
            self._told.setdefault(player, []).extend(told)
        if moved.done:
            for player, transcript in self._transcripts.items():
                transcript.messages += self._told.pop(player, [])
            return "done"
        after = self.players[(self.players.index(self._turn) + 1) % len(self.players)]
        self._begin_turn(moved.next or after, moved.state)
        return None

    def _begin_turn(self, player: str, state: str | None) -> None:
        """Begin this player's turn: set `transcript` to its own, with the messages since its last turn."""
        told = self._told.pop(player, [])
        transcript, opening = self._transcripts.get(player), self._openings.get(player)
        if transcript is None:
            begun = [*(() if opening is None else opening.messages), *told]
            if not begun:
                raise EnvError(f"{player!r} is to speak and was told nothing; reset or step tells it something")
            tools = [dict(tool) for tool in (() if opening is None else opening.tools)]
            transcript = Transcript(_joined(begun), self.tokenizer, tools=tools)
            state = opening.state if state is None and opening is not None and not told else state
            self._transcripts[player] = transcript
        elif not told:
            raise EnvError(f"{player!r} is to speak again and was told nothing; return messages for it from step")
        else:
            transcript.hear(_joined(told))
        self._turn, self._state, self.transcript = player, state, transcript

    def _give(self, player: str, reward: float) -> None:
        """Give a reward for this player, and for its last turn if it has taken one."""
        self._given.setdefault(player, []).append(reward)
        transcript = self._transcripts.get(player)
        if transcript is not None and transcript.turns:
            transcript.reward((transcript.turns[-1].reward or 0.0) + reward)

    # -- the end -------------------------------------------------------------------------------------------------------

    async def _reward(self, stop: str) -> float:
        self._check_turns(stop)
        if callable(score := getattr(self._env, "score", None)):
            value = await self._call(score, self._episodes(stop), what=f"{self.name}.score")
            for player, reward in rewards_of(value, self.players, f"{self.name}.score").items():
                self._given.setdefault(player, []).append(reward)
        if not self._given and stop == "done":
            hint = "return rewards from step, or write score(episodes)"
            raise EnvError(f"{self.name} gave no player a reward in the whole episode", hint=hint, field=self.name)
        self._scored = True
        return math.fsum(self._rewards_of_roles().values()) / len(self.players)

    def _rewards_of_roles(self) -> dict[str, float]:
        return {player: math.fsum(self._given.get(player, ())) for player in self.players}

    def _episodes(self, stop: str) -> dict[str, Episode]:
        """Return what `score` gets: the episode as each player that spoke saw it."""
        return {
            player: Episode(
                case=dict(self.case),
                seed=self.seed,
                messages=tuple(transcript.messages),
                rewards=tuple(turn.reward for turn in transcript.turns),
                stop=stop,
            )
            for player, transcript in self._transcripts.items()
        }

    def _rollout(self, stop: str, reward: float | None) -> Rollout:
        alone = super()._rollout(stop, reward)
        turns: list[Turn] = []
        messages: list[Message] = []
        for player, transcript in self._transcripts.items():
            turns += [replace(turn, role=player) for turn in transcript.turns]
            begun = transcript.begun if transcript is self.opening else 0
            messages += transcript.messages[begun:]
        info = {**alone.info, "forks": float(sum(each.forks for each in self._transcripts.values()))}
        rewards = self._rewards_of_roles() if self._scored and self.error is None else {}
        return replace(alone, turns=tuple(turns), messages=tuple(messages), info=info, role_rewards=rewards)


def _joined(messages: Sequence[Message]) -> list[Message]:
    """Return the messages, with texts of users that follow each other as one: many templates take no two in a row."""
    joined: list[Message] = []
    for message in messages:
        last = joined[-1] if joined else None
        texts = [each.get("content") for each in (last, message) if each is not None]
        if len(texts) == 2 and all(isinstance(text, str) for text in texts) and _users(last, message):
            joined[-1] = {**message, "content": f"{texts[0]}\n{texts[1]}"}
        else:
            joined.append(message)
    return joined


def _users(*messages: Message | None) -> bool:
    return all(message is not None and message["role"] == "user" for message in messages)
