"""Games of the package `textarena`, by name and unchanged, as environments.

    env:
      environment: textarena:GuessTheNumber-v0
      args: {max_number: 10}             the game's own arguments, and those of `TextArenaGame`
      max_turns: 20                      no less than the game's

The policy is told the game's instructions, and after each of its turns what is new to it, without its own moves. A
turn's text is the move, as the game parses it; a move without brackets gets them where the game's registered wrappers
do that. The reward is what the game gives the player at its end; an episode that a limit of the run ends has 0.

Other players are an `opponent`: a function from the text that such a player has seen to its move, or a class of
`textarena.Agent`, made once an episode. Needs `pip install 'groupwise[textarena]'`; the games with words also need data
of NLTK (`python -m nltk.downloader words averaged_perceptron_tagger_eng`).

Games draw from the global generators of `random` and NumPy. Each episode has its own states of these, which are put
in place while the game computes, so that episodes of one process do not disturb each other and a seed is one game. One
episode computes at a time, therefore; an opponent that takes its time and draws nothing, such as a model behind an API,
is asked by all of them at once.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy

from groupwise.errors import ConfigError, EnvError
from groupwise.tasks.env import StepResult
from groupwise.tasks.env_loading import load_once
from groupwise.types import Message

HELD_OUT = 1 << 30  # the seeds of evaluation begin here
SLOW_S = 0.25  # a move of an opponent that is worth not to be waited for by other episodes
_DRAWING = threading.Lock()  # the global generators are the process's
_free: dict[str, bool] = {}  # by opponent: whether it was slow before it drew anything from them; unknown at first


class TextArenaGame:
    """Makes an environment from a TextArena game: the policy plays one player, `opponent` plays all others.

    Args:
        game: the game's name, as `textarena.make` takes it.
        episodes: the number of games in `cases`; each has its own seed.
        eval_episodes: the number of games in `eval_cases`.
        opponent: plays all other players; `module:function`, or `module:Class` of an agent.
        players: the number of players; by default 1 without an opponent, otherwise 2.
        seat: the number of the player that the policy is.
        folder: a folder in which the opponent's module may be; the configuration's.
        options: the game's own arguments.

    Raises:
        ConfigError: the package is missing, there is no game of this name, or the game does not take these arguments.
    """

    named_by = "game"  # the argument that is the name in `env.environment`

    def __init__(
        self,
        game: str,
        *,
        episodes: int = 1000,
        eval_episodes: int = 64,
        opponent: str | None = None,
        players: int | None = None,
        seat: int = 0,
        folder: str | None = None,
        **options: Any,
    ):
        self._players = players or (1 if opponent is None else 2)
        if not 0 <= seat < self._players:
            raise ConfigError(f"env.args.seat is {seat}; the players are 0 to {self._players - 1}")
        self._name, self._episodes, self._eval_episodes, self._seat = game, episodes, eval_episodes, seat
        self._opponent = None if opponent is None else _agent(opponent, folder)
        self._opponent_name = f"{folder}:{opponent}"
        self._states = _Generators()
        with self._states.in_place():
            self._game = _made(game, options)
        self._heard: dict[int, str] = {}  # what the other players have seen so far

    def cases(self) -> list[dict[str, Any]]:
        """Return games by their seed; begin the first one, so that missing parts are known before a model is loaded."""
        self.reset({"seed": 0}, 0)
        return [{"seed": number} for number in range(self._episodes)]

    def eval_cases(self) -> list[dict[str, Any]]:
        """Return games with other seeds."""
        return [{"seed": HELD_OUT + number} for number in range(self._eval_episodes)]

    def reset(self, case: Mapping[str, Any], seed: int) -> str:
        """Begin the game of the case's `seed` (of the run's, where the case has none)."""
        drawn = int(case.get("seed", seed)) % (1 << 32)
        self._heard = {}
        try:
            with self._states.in_place(seed=drawn):
                self._game.reset(num_players=self._players, seed=drawn)
        except AssertionError as error:
            hint = "give env.args.opponent, and env.args.players if they are more than two"
            raise ConfigError(f"{self._name} is not a game of {self._players}: {error}", hint=hint) from error
        except LookupError as error:  # NLTK's, many lines long
            raise EnvError(f"{self._name} needs data that is not here: {str(error).strip()[:400]}") from error
        said = self._told()
        if said is None:
            raise EnvError(f"{self._name} was over before player {self._seat} could move")
        return said

    def step(self, message: Message) -> StepResult:
        """Return the policy's move, and those of the others up to its next turn."""
        self._move(str(message.get("content") or ""))
        said = self._told()
        if said is None:
            rewards, info = self._game.close()
            own = (info or {}).get(self._seat, {})
            numbers = {name: float(own[name]) for name in ("invalid_move", "turn_count") if name in own}
            return StepResult(reward=float((rewards or {}).get(self._seat, 0.0)), done=True, info=numbers)
        return StepResult(messages=[Message(role="user", content=said)])

    # ---- inside ----
    def _move(self, action: str) -> None:
        with self._states.in_place():
            self._game.step(action=action)

    def _told(self) -> str | None:
        """Return what is new to the policy, once it is its turn; None where the game is over."""
        while not self._game.state.done:
            player, seen = self._game.get_observation()
            text = self._text(player, seen)
            if player == self._seat:
                return text or "Your turn."
            self._heard[player] = f"{self._heard.get(player, '')}\n{text}".strip()
            self._move(self._others_move(self._heard[player]))
        return None

    def _others_move(self, heard: str) -> str:
        """Return the opponent's move."""
        assert self._opponent is not None  # else there is one player
        if not _free.get(self._opponent_name):
            with self._states.in_place():
                if not _free.get(self._opponent_name):  # which may have become known while this waited
                    before, began = self._states.now(), time.monotonic()
                    action = str(self._opponent(heard))
                    if self._states.now() != before:
                        _free.setdefault(self._opponent_name, False)
                    elif time.monotonic() - began > SLOW_S:
                        _free.setdefault(self._opponent_name, True)
                    return action
        return str(self._opponent(heard))

    def _text(self, player: int, seen: Any) -> str:
        """Return observations (sender, text, kind) as one text, without the player's own moves."""
        names = self._game.state.role_mapping
        lines = []
        for sender, text, *_ in seen or ():
            if sender != player:
                lines.append(text if sender < 0 else f"[{names.get(sender, f'Player {sender}')}] {text}")
        return "\n".join(lines).strip()


class _Generators:
    """The states of Python's and NumPy's global generators that belong to one episode."""

    def __init__(self) -> None:
        self._own = random.Random(0).getstate(), numpy.random.RandomState(0).get_state()

    @staticmethod
    def now() -> tuple[Any, bytes]:
        """Return the global generators' states, to be compared."""
        told: Any = numpy.random.get_state()
        kind, keys, *rest = told
        return (random.getstate(), kind, *rest), keys.tobytes()

    @contextmanager
    def in_place(self, *, seed: int | None = None) -> Iterator[None]:
        """Use this episode's states in the global generators inside the block; a `seed` restarts them."""
        with _DRAWING:
            kept = random.getstate(), numpy.random.get_state()
            if seed is not None:
                self._own = random.Random(seed).getstate(), numpy.random.RandomState(seed).get_state()
            random.setstate(self._own[0])
            numpy.random.set_state(self._own[1])
            try:
                yield
            finally:
                self._own = random.getstate(), numpy.random.get_state()
                random.setstate(kept[0])
                numpy.random.set_state(kept[1])


def _made(name: str, options: Mapping[str, Any]) -> Any:
    """Return the game with the wrappers that are about moves; those about observations repeat what was said before."""
    if importlib.util.find_spec("textarena") is None:
        raise ConfigError("textarena is not installed", hint="pip install 'groupwise[textarena]'")
    package: Any = importlib.import_module("textarena")
    known = importlib.import_module("textarena.envs.registration").ENV_REGISTRY
    if name not in known:
        similar = difflib.get_close_matches(name, known, n=3)
        hint = f"did you mean {' or '.join(similar)}?" if similar else "textarena.pprint_registry_detailed() lists them"
        raise ConfigError(f"textarena has no game {name!r}", hint=hint)
    try:
        layer = package.make(name, **options)
    except TypeError as error:
        raise ConfigError(f"env.args does not fit the game {name}: {error}") from error
    except LookupError as error:  # NLTK's, many lines long
        raise ConfigError(f"{name} needs data that is not here: {str(error).strip()[:400]}") from error
    wrappers = []
    while isinstance(layer, package.Wrapper):
        wrappers.append(type(layer))
        layer = layer.env
    for wrapper in reversed(wrappers):
        layer = wrapper(layer) if issubclass(wrapper, package.ActionWrapper) else layer
    return layer


def _agent(reference: str, folder: str | None) -> Callable[[str], str]:
    made: Any = load_once(reference, folder=folder)
    agent: Any = made() if inspect.isclass(made) else made
    return agent
