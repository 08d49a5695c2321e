"""Episodes of several players, all of whom are the policy: who is told what, whose reward is whose, what is refused."""

from __future__ import annotations

import asyncio
import io
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from cli_project import cli
from episodes import config, play
from groupwise.algo.credit import with_advantages
from groupwise.algo.samples import samples_of
from groupwise.config.algo import CreditConfig
from groupwise.config.run import EnvConfig, load_config
from groupwise.errors import ConfigError
from groupwise.run.assemble import open_envs, open_play
from groupwise.run.loop import run_loop
from groupwise.run.plan import make_plan
from groupwise.store.tracking import read_metrics, read_rollouts
from groupwise.tasks.env import MoveResult, Observation
from groupwise.tasks.env_loading import load_factory
from groupwise.tasks.rollout_sources import play_all
from groupwise.tasks.self_play import Match
from groupwise.types import PolicyVersion, SamplingParams
from running_jobs import Dies, adapter_bytes, metrics_of, rollouts_of
from wording import raises

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "envs"
PARAMS = SamplingParams(max_tokens=4)
GAME = partial(Match, players=("a", "b"))
LOOSE = config(stop_at_cut=False, max_turns=8)


class Talk:
    """Three moves: a, b, a. Each move is worth its number; the other player is told of it."""

    players = ("a", "b")

    def reset(self, case, seed):
        self.said = []
        return {"a": Observation(messages=[{"role": "user", "content": "1+1="}], state="start"), "b": "You are b."}

    def step(self, player, message):
        self.said.append(player)
        other = "b" if player == "a" else "a"
        told = {other: f"{player} moved."}
        done = len(self.said) == 3
        return MoveResult(
            messages=told, rewards={player: float(len(self.said))}, done=done, state=f"after {len(self.said)}"
        )

    def score(self, episodes):
        assert {name: len(each.rewards) for name, each in episodes.items()} == {"a": 2, "b": 1}
        assert episodes["b"].messages[0]["content"] == "You are b.\na moved." and episodes["a"].stop == "done"
        return {"b": 10.0}


def test_each_player_has_its_own_conversation_and_reward(starter_engine, starter):
    [group] = play(starter_engine, starter.tokenizer, Talk, n=3, params=PARAMS, env=LOOSE, player=GAME)
    for rollout in group.rollouts:
        assert [(turn.role, turn.reward) for turn in rollout.turns] == [("a", 1.0), ("a", 3.0), ("b", 2.0)]
        assert [turn.state for turn in rollout.turns] == ["start", "after 2", "after 1"]
        assert rollout.role_rewards == {"a": 4.0, "b": 12.0} and rollout.reward == 8.0
        first, second, other = (turn.prompt_ids for turn in rollout.turns)
        assert second[: len(first)] == first and other[: len(first)] != first
        assert "You are b" in starter.tokenizer.decode(other) and "You are b" not in starter.tokenizer.decode(second)
        assert rollout.info["turns"] == 3.0 and rollout.stop == "done"
    assert group.prompt.messages is not None and group.prompt.messages[0]["content"] == "1+1="
    assert len({rollout.turns[1].completion.token_ids for rollout in group.rollouts}) > 1  # seeds of their own


def test_an_episode_of_two_is_two_segments_of_one_sequence(starter_engine, starter):
    class Wins(Talk):
        def score(self, episodes):
            said = len(episodes["a"].messages[1]["content"])
            return {"a": said, "b": -said}

    [group] = play(starter_engine, starter.tokenizer, Wins, n=4, seed=3, params=PARAMS, env=LOOSE, player=GAME)
    (done,) = with_advantages([group], CreditConfig(advantage="mean"))
    samples = samples_of([done])
    assert [sample.continues for sample in samples] == [False, True] * 4
    for rollout in done.rollouts:
        ours = {turn.role: turn.advantage for turn in rollout.turns}
        assert ours["a"] == pytest.approx(-ours["b"])


class Wrong(Talk):
    score = None

    def __init__(self, returned):
        self.returned = returned

    def step(self, player, message):
        return self.returned


class Opens(Talk):
    def __init__(self, returned):
        self.returned = returned

    def reset(self, case, seed):
        return self.returned


@pytest.mark.parametrize(
    ("made", "returned", "said"),
    [
        (Wrong, None, "step returned None; return a MoveResult"),
        (Wrong, MoveResult(rewards={"c": 1.0}), "step named the player 'c'; the players are a, b"),
        (Wrong, MoveResult(next="z"), "step named the player 'z'"),
        (Wrong, MoveResult(rewards={"a": float("nan")}), "a reward is a finite number"),
        (Wrong, MoveResult(next="a"), "'a' is to speak again and was told nothing"),
        (Wrong, MoveResult(done=True), "gave no player a reward in the whole episode"),
        (Wrong, MoveResult(done="yes"), "it is true or false"),
        (Opens, "hello", "return what each player is told, by its name"),
        (Opens, {"c": "hello"}, "reset named the player 'c'"),
        (Opens, {"a": []}, "reset returned no messages"),
    ],
)
def test_what_breaks_the_contract_is_the_episodes_error(starter_engine, starter, made, returned, said):
    [group] = play(starter_engine, starter.tokenizer, made, params=PARAMS, env=LOOSE, player=GAME, returned=returned)
    for rollout in group.rollouts:
        assert said in (rollout.error or "")
        assert rollout.reward is None and not rollout.role_rewards


def test_a_limit_ends_the_game_for_all(starter_engine, starter):
    class Endless(Talk):
        score = None

        def step(self, player, message):
            return MoveResult(messages={"b" if player == "a" else "a": "Go on."})

    env = config(stop_at_cut=False, max_turns=5)
    [group] = play(starter_engine, starter.tokenizer, Endless, params=PARAMS, env=env, player=GAME)
    for rollout in group.rollouts:
        assert rollout.stop == "max_turns" and len(rollout.turns) == 5
        assert rollout.role_rewards == {"a": 0.0, "b": 0.0} and rollout.reward == 0.0


# ---- the example, from its YAML ----


def nim(*overrides: str):
    return load_config(EXAMPLES / "nim.yaml", overrides)


SMALL = ("rollout.prompts_per_step=2", "rollout.group_size=4", "eval=null", "train.steps=3", "checkpoint.every=1")
SMALL += (
    "rollout.replay={size: 4, share: 0.5}",
    "rollout.refill=1",
    "train.lora={rank: 2}",
    "env.lockstep=true",
    "rollout.max_tokens=2",
)


@pytest.mark.slow
def test_nim_is_played_trained_and_goes_on_bit_for_bit(tmp_path):
    """From its YAML alone, its environments in processes; a run that died in its second step and goes on has the
    numbers of one that did not."""
    whole = run_loop(nim(*SMALL, f"output_dir={tmp_path}/whole")).run_dir
    again = nim(*SMALL, f"output_dir={tmp_path}/parts", "resume=auto")
    with pytest.raises(Dies.Now):
        run_loop(again, display=Dies(2, total=3, stream=io.StringIO()))
    parts = run_loop(again).run_dir
    assert metrics_of(parts) == metrics_of(whole) and rollouts_of(parts) == rollouts_of(whole)
    assert adapter_bytes(parts) == adapter_bytes(whole) != {}
    for line in read_metrics(whole / "metrics.jsonl"):
        assert line.keys() >= {"role/first/reward", "turn/advantage_std", "gigpo/anchor_share", "gigpo/anchor_size"}
    groups = read_rollouts(whole / "rollouts/step_000001.jsonl")
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    assert {turn.role for turn in turns} <= {"first", "second"} and any(turn.advantage for turn in turns)
    assert all(set(rollout.role_rewards) == {"first", "second"} for rollout in rollouts)


def test_a_game_is_the_same_wherever_it_is_played(starter_engine, starter):
    """In this process, or with its environment in another."""
    found = []
    for workers in (0, 1):
        plan = make_plan(nim(f"env.workers={workers}"))
        with closing(open_play(plan, starter, starter_engine, open_envs(plan))) as played:
            prompts = plan.source.known[3:5]
            work = play_all(played, prompts, seeds=[1, 2], n=3, params=PARAMS, version=PolicyVersion.base())
            rollouts = [rollout for group in asyncio.run(work) for rollout in group.rollouts]
        assert not any(rollout.error for rollout in rollouts)
        turns = [[(t.role, t.reward, t.state, t.completion.token_ids) for t in each.turns] for each in rollouts]
        found.append((turns, [each.role_rewards for each in rollouts], [each.messages for each in rollouts]))
    assert found[0] == found[1]


def test_what_reads_one_reward_of_an_episode_is_refused():
    make_plan(nim())
    for field, given in (("rewards", "[groupwise.rewards.format:json_format]"), ("rollout.reroll", "{max_groups: 1}")):
        with raises(ConfigError, field=field):
            make_plan(nim(f"{field}={given}"))
    with raises(ConfigError, field="algo.aggregation"):
        make_plan(nim("algo.aggregation=normalize_then_sum", "algo.credit=episode"))


@pytest.mark.parametrize("players", [("one",), "ab", ("a", "a"), (1, 2)])
def test_players_are_two_names_or_more(players, tmp_path):
    text = (
        f"class Game:\n    players = {players!r}\n    def reset(self, case, seed): ...\n    def step(self, p, m): ...\n"
    )
    (tmp_path / "game.py").write_text(text, encoding="utf-8")
    wanted = EnvConfig(environment="game:Game", workers=0)
    with raises(ConfigError):
        load_factory(wanted, folder=tmp_path)


def test_env_check_says_that_it_plays_one():
    checked = cli("env", "check", "nim:Nim", "--folder", str(EXAMPLES), "--no-model")
    assert checked.exit_code and "env check plays one player, and Nim has 2" in checked.stderr
