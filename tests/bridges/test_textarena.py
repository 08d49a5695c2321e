"""Games of the package `textarena`, unchanged, by their names: what the policy reads, its moves, rewards and seeds."""

from __future__ import annotations

import importlib.util
import math
import random
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from groupwise.bridges import textarena
from groupwise.bridges.textarena import TextArenaGame
from groupwise.config.run import EnvConfig, parse_config
from groupwise.errors import ConfigError
from groupwise.run.loop import run_loop
from groupwise.store.tracking import read_metrics
from groupwise.tasks.env import StepResult
from groupwise.tasks.env_loading import load_factory
from wording import raises

OPPONENT = '''
import random
import re
import threading
import time


class Anywhere:
    """Marks a free square, drawn from the global generator as agents do."""

    def __call__(self, observation):
        return random.choice(re.findall(r"\\[\\d\\]", observation.rpartition("Available Moves")[2]))


def first_free(observation):
    return re.findall(r"\\[\\d\\]", observation.rpartition("Available Moves")[2])[0]


def sometimes(observation):
    """Draws a square, but takes the first of six."""
    free = re.findall(r"\\[\\d\\]", observation.rpartition("Available Moves")[2])
    return free[0] if len(free) == 6 else random.choice(free)


both, asked = threading.Barrier(2, timeout=5), []


def remote(observation):
    """Takes its time, and from the second move on as long as until another episode asks it, too."""
    asked.append(1)
    time.sleep(0.3) if len(asked) == 1 else both.wait()
    return first_free(observation)
'''


def say(text: str) -> dict:
    return {"role": "assistant", "content": text}


def heard(result: StepResult) -> str:
    assert not result.done
    return str(result.messages[0].get("content"))


def test_without_the_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with raises(ConfigError) as caught:
        load_factory(EnvConfig(environment="textarena:GuessTheNumber-v0")).cases()
    assert caught.value.hint == "pip install 'groupwise[textarena]'"


@pytest.fixture(scope="module", autouse=True)
def package():
    return pytest.importorskip("textarena")


def guess(**options) -> TextArenaGame:
    return TextArenaGame("GuessTheNumber-v0", **options)


def test_a_game_by_its_name():
    made = load_factory(EnvConfig(environment="textarena:GuessTheNumber-v0", args={"max_number": 4, "episodes": 3}))
    assert made.name == "GuessTheNumber-v0"
    cases, held_out = made.cases(), made.cases(held_out=True)
    assert cases is not None and held_out is not None and len(cases) == 3
    seeds = {case.columns["seed"] for case in cases}
    assert len(seeds) == 3 and seeds.isdisjoint({case.columns["seed"] for case in held_out})


def test_the_policy_hears_what_is_new_and_is_paid_at_the_end():
    env = guess(max_number=6)
    asked = env.reset({"seed": 3}, 0)
    assert "between 1 and 6" in asked
    secret = env._game.game_number
    wrong = secret % 6 + 1
    result = env.step(say(str(wrong)))  # the game's wrapper adds the brackets
    direction = "lower" if wrong > secret else "higher"
    assert heard(result) == f"The target number is {direction}." and result.reward is None
    assert "invalid move" in heard(env.step(say("[9]")))
    right = env.step(say(f"I say [{secret}]"))
    assert (right.reward, right.done) == (1.0, True) and right.info["invalid_move"] == 0.0


def test_a_seed_is_a_game_whatever_else_draws():
    first, second = guess(max_number=1000), guess(max_number=1000)
    first.reset({"seed": 11}, 0)
    before = random.getstate()
    second.reset({"seed": 12}, 0)
    assert random.getstate() == before
    other = second._game.game_number
    second.reset({"seed": 11}, 0)
    assert first._game.game_number == second._game.game_number != other


def tic_tac_toe(folder, opponent: str, **options) -> TextArenaGame:
    (folder / "ta_opponents.py").write_text(OPPONENT, encoding="utf-8")
    return TextArenaGame("TicTacToe-v0", opponent=f"ta_opponents:{opponent}", folder=str(folder), **options)


def test_against_a_fixed_opponent(tmp_path):
    env = tic_tac_toe(tmp_path, "first_free")
    assert "you will be 'O'" in env.reset({"seed": 1}, 0)
    assert "[Player 1]" in heard(env.step(say("[4]")))
    env.step(say("[2]"))
    won = env.step(say("[6]"))
    assert (won.reward, won.done) == (1.0, True)
    second = tic_tac_toe(tmp_path, "first_free", seat=1)
    asked = second.reset({"seed": 1}, 0)
    assert "you will be 'X'" in asked and "Player 0 placed" in asked


def test_a_random_opponent_plays_the_same_for_a_seed(tmp_path):
    def game(seed: int) -> list[str]:
        env = tic_tac_toe(tmp_path, "Anywhere")
        said = [env.reset({"seed": seed}, 0)]
        for move in range(9):
            random.random()  # what goes on elsewhere in the process
            result = env.step(say(f"[{move}]"))
            said.append(str(result))
            if result.done:
                break
        return said

    games = [game(seed) for seed in (1, 1, 2, 3)]
    assert games[0] == games[1] and len({str(each) for each in games}) > 1


def test_an_opponent_that_was_slow_after_it_drew_plays_the_same_for_a_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(textarena, "SLOW_S", -1.0)  # each move is slow

    def game(elsewhere: int) -> list[str]:
        env = tic_tac_toe(tmp_path, "sometimes")
        said = [env.reset({"seed": 3}, 0)]
        for _ in range(3):
            random.seed(elsewhere)  # what goes on in the process
            free = re.findall(r"\[\d\]", said[-1].rpartition("Available Moves")[2])
            result = env.step(say(free[-1]))
            said.append(str(result.messages[0].get("content")) if result.messages else str(result.reward))
            if result.done:
                break
        return said

    games = [game(elsewhere) for elsewhere in range(4)]
    assert len(games[0]) == 4 and games == [games[0]] * 4


def test_episodes_do_not_wait_for_each_others_slow_opponent(tmp_path):
    """As a model behind an API is, whose answers take seconds: with 64 episodes a turn took minutes."""
    games = [tic_tac_toe(tmp_path, "remote") for _ in range(2)]
    for game in games:
        game.reset({"seed": 1}, 0)
    assert "[Player 1]" in heard(games[0].step(say("[4]")))
    with ThreadPoolExecutor() as threads:
        answers = [threads.submit(game.step, say(move)) for game, move in zip(games, ("[2]", "[4]"), strict=True)]
        assert ["[Player 1]" in heard(each.result()) for each in answers] == [True, True]


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("GuesTheNumber-v0", {}),
        ("GuessTheNumber-v0", {"highest": 3}),
        ("GuessTheNumber-v0", {"seat": 1}),
        ("TicTacToe-v0", {}),
    ],
)
def test_refusals(name, args):
    with raises(ConfigError):
        load_factory(EnvConfig(environment=f"textarena:{name}", args=args)).cases()


@pytest.mark.long
@pytest.mark.parametrize(
    "environment",
    ["textarena:GuessTheNumber-v0", pytest.param("reasoning-gym:chain_sum", marks=pytest.mark.slow)],
)
def test_two_steps_with_the_starter(tmp_path, environment):
    if environment.startswith("reasoning-gym"):
        pytest.importorskip("reasoning_gym")
    args = {"episodes": 8} if environment.startswith("textarena") else {"size": 8, "max_terms": 2}
    settings = {
        "name": "games",
        "dtype": "float32",
        "device": "cpu",
        "run_dir": str(tmp_path / "run"),
        "env": {"environment": environment, "args": args, "workers": 1, "max_turns": 10, "step_timeout_s": 120},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_tokens": 8},
        "train": {"steps": 2, "learning_rate": 1.0e-3},
    }
    result = run_loop(parse_config(settings))
    rows = [row for row in read_metrics(result.run_dir / "metrics.jsonl") if "reward/mean" in row]
    assert len(rows) == 2 and all(math.isfinite(row["reward/mean"]) for row in rows)
    assert all(row["env/failed_frac"] == 0 for row in rows)
