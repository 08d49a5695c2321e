"""Groups of episodes in three-method environments, on a real engine: rewards, failures, limits, concurrency, a run."""

from __future__ import annotations

import asyncio
import copy
import math
import random
import threading
import time
from dataclasses import replace

import pytest
import torch

from cli_project import cli, save_model
from groupwise.algo.samples import samples_of
from groupwise.bridges.aitraining.three_method import LegacyEnv
from groupwise.bridges.aitraining.three_method_rollouts import ThreeMethodRollouts
from groupwise.config.run import EnvConfig
from groupwise.engine.local import LocalEngine
from groupwise.errors import AdapterNotFoundError, EnvError
from groupwise.store.tracking import read_metrics
from groupwise.tasks.env_loading import EnvFactory
from groupwise.tasks.rollout_sources import play_all
from groupwise.types import PolicyVersion, RolloutGroup, SamplingParams
from wording import raises, wording

RUN = SamplingParams(max_tokens=6)
G = 4


class Match:
    """The page's example: the score is whether a word is there."""

    def build_dataset(self, tokenizer):
        return [{"prompt": f"Say {word}", "case_idx": i} for i, word in enumerate(["a", "b", "c"])]

    def score_episode(self, model, tokenizer, completion, case_idx):
        assert isinstance(completion, str)
        return float("e" in completion)


class Talk:
    """Two more turns, one by ids and one by messages."""

    def build_dataset(self, tokenizer):
        self.asked = ["What is 7?", "What is 8?"]
        return [{"prompt": [{"role": "user", "content": each}], "case_idx": i} for i, each in enumerate(self.asked)]

    def score_episode(self, model, tokenizer, completion, case_idx):
        talk = [{"role": "user", "content": self.asked[case_idx]}, *completion, {"role": "user", "content": "Sure?"}]
        text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False).to(model.device)
        out = model.generate(**inputs, max_new_tokens=5)
        said = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :]) + model.chat(talk[:1], max_new_tokens=4)
        return said.count("e") / 10


@pytest.fixture
def play(tiny, tiny_engine):
    def run(kind, *, seed=0, notes=None, **config) -> list[RolloutGroup]:
        factory = EnvFactory(name=kind.__name__, make_one=kind, args={})
        env = LegacyEnv(factory, EnvConfig(environment="m:E", **config), tiny.tokenizer, note=lambda text: None)
        note = (lambda text: None) if notes is None else notes.append
        episodes = ThreeMethodRollouts(tiny_engine, tiny, env, run=RUN, note=note)
        prompts = [episodes.prepare(prompt) for prompt in env.cases()]
        seeds = [seed + i for i in range(len(prompts))]
        return asyncio.run(play_all(episodes, prompts, seeds=seeds, n=G, params=RUN, version=PolicyVersion.base()))

    return run


def scored_by(value):
    """An environment whose first episode of each case is scored by `value()`, the others by 0.5."""

    class Odd(Match):
        def build_dataset(self, tokenizer):
            self.lock, self.seen = threading.Lock(), []
            return super().build_dataset(tokenizer)

        def score_episode(self, model, tokenizer, completion, case_idx):
            with self.lock:
                first = case_idx not in self.seen
                self.seen.append(case_idx)
            return value() if first else 0.5

    return Odd


def test_groups_are_those_of_a_single_turn_with_the_environments_reward(play, tiny_engine):
    groups = play(Match)
    assert [len(group.rollouts) for group in groups] == [G] * 3
    for group in groups:
        assert group.prompt.text is not None
        for rollout in group.rollouts:
            assert rollout.reward == float("e" in rollout.completion.text) == rollout.rewards["env"]
            assert rollout.stop == "done" and rollout.error is None and len(rollout.turns) == 1
            assert rollout.info == {"turns": 1, "forks": 0, "untrained": 0, "failed": 0}
            scored = tiny_engine.score(group.prompt.token_ids, rollout.completion.token_ids, PolicyVersion.base())
            assert rollout.completion.logprobs == pytest.approx(scored, abs=1e-4)


def test_later_turns_are_recorded_and_become_samples(play):
    groups = play(Talk)
    rollouts = [replace(rollout, advantage=1.0) for group in groups for rollout in group.rollouts]
    assert {len(rollout.turns) for rollout in rollouts} == {3}
    for rollout in rollouts:
        said = sum(len(turn.completion.token_ids) for turn in rollout.turns)
        samples = samples_of([replace(groups[0], rollouts=(rollout,))])
        assert sum(sum(sample.mask) for sample in samples) == said
        assert len(samples) == 1 + rollout.info["forks"]
        assert [each["role"] for each in rollout.messages[:3]] == ["assistant", "environment", "assistant"]
    first = [replace(rollout, advantage=1.0) for group in play(Talk, train_turns="first") for rollout in group.rollouts]
    for rollout in first:
        (sample,) = samples_of([replace(groups[0], rollouts=(rollout,))])
        assert sample.completion_ids == rollout.turns[0].completion.token_ids


def test_in_lockstep_everything_is_the_same_to_the_last_bit_whatever_time_scoring_takes(tiny):
    """Later turns are sampled in rounds, of all episodes together."""
    waits = random.Random()

    class Dawdles(Talk):
        def score_episode(self, model, tokenizer, completion, case_idx):
            time.sleep(waits.random() * 0.03)
            return super().score_episode(model, tokenizer, completion, case_idx)

    def turns(seed: int):
        waits.seed(seed)
        factory = EnvFactory(name="Dawdles", make_one=Dawdles, args={})
        config = EnvConfig(environment="m:E", lockstep=True, concurrency=6)
        env = LegacyEnv(factory, config, tiny.tokenizer, note=lambda text: None)
        engine = LocalEngine(tiny)
        try:
            episodes = ThreeMethodRollouts(engine, tiny, env, run=RUN, note=lambda text: None)
            prompts = [episodes.prepare(prompt) for prompt in env.cases()]
            options = {"n": G, "params": RUN, "version": PolicyVersion.base()}
            groups = asyncio.run(play_all(episodes, prompts, seeds=[1, 2], **options))
        finally:
            engine.close()
        return [[(t.completion.token_ids, t.completion.logprobs) for t in r.turns] for g in groups for r in g.rollouts]

    first, *others = map(turns, range(3))
    assert all(other == first for other in others) and {len(each) for each in first} == {3}


def test_a_seed_says_what_is_sampled_whatever_else_is_under_way(play):
    def tokens(groups: list[RolloutGroup]) -> list[tuple[int, ...]]:
        return [turn.completion.token_ids for group in groups for rollout in group.rollouts for turn in rollout.turns]

    once = tokens(play(Talk))
    assert once == tokens(play(Talk, concurrency=1)) and once != tokens(play(Talk, seed=9))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: math.nan, "Odd.score_episode returned nan; a reward is a finite number"),
        (lambda: "good", "returned 'good'"),
        (lambda: 1 / 0, "Odd.score_episode raised ZeroDivisionError: division by zero"),
        (lambda: exec("raise SystemExit(3)"), "SystemExit: 3"),
        (lambda: time.sleep(20), "Odd.score_episode took longer than 1 s"),
    ],
)
def test_what_fails_is_its_episodes_own(play, value, message):
    for group in play(scored_by(value), timeout_s=1 if "longer" in message else 30):
        bad = [rollout for rollout in group.rollouts if rollout.error is not None]
        assert len(bad) == 1 and message in str(bad[0].error) and bad[0].reward is None and bad[0].stop == "error"
        kinds = {"took longer": "timeout", "raised": "exception", "SystemExit": "exception"}
        assert bad[0].error_kind == next((kind for words, kind in kinds.items() if words in message), None)
        assert [rollout.reward for rollout in group.rollouts if rollout.error is None] == [0.5] * (G - 1)


def test_on_error_says_what_a_failure_is_worth(play):
    zero = play(scored_by(lambda: 1 / 0), on_error="zero")[0].rollouts
    assert sorted(rollout.reward for rollout in zero if rollout.reward is not None) == [0.0] + [0.5] * (G - 1)
    assert sum(rollout.info["failed"] for rollout in zero) == 1 and all(rollout.error is None for rollout in zero)
    with raises(EnvError, kind="exception"):
        play(scored_by(lambda: 1 / 0), on_error="stop")


def test_none_leaves_an_episode_out(play):
    rollouts = play(scored_by(lambda: None))[0].rollouts
    (left_out,) = [rollout for rollout in rollouts if rollout.reward is None]
    assert left_out.error is None and left_out.rewards == {"env": None} and left_out.info["failed"] == 0


def test_scores_outside_0_to_1_are_taken_and_said_once(play):
    notes: list[str] = []
    groups = play(scored_by(lambda: 7), notes=notes)
    assert max(rollout.reward or 0 for group in groups for rollout in group.rollouts) == 7
    assert notes == ["Odd.score_episode returned 7: a score outside 0 to 1 is taken as it is"]


def test_a_limit_ends_the_episode_with_nothing_or_with_what_the_environment_gives(play):
    class Endless(Match):
        def score_episode(self, model, tokenizer, completion, case_idx):
            try:
                while True:
                    model.chat([{"role": "user", "content": "more"}], max_new_tokens=2)
            except Exception as error:
                if case_idx == 0:
                    raise RuntimeError("the customer has gone") from error
                return 0.75

    groups = play(Endless, max_turns=3)
    for group, reward in zip(groups, (0.0, 0.75, 0.75), strict=True):
        for rollout in group.rollouts:
            assert (rollout.reward, rollout.stop, rollout.error, len(rollout.turns)) == (reward, "max_turns", None, 3)


def test_a_policy_that_talks_until_the_time_is_over_has_failed(play):
    class Patient(Match):
        def score_episode(self, model, tokenizer, completion, case_idx):
            ids = tokenizer("7", return_tensors="pt")
            while True:
                model.generate(**ids, max_new_tokens=180)

    rollouts = [each for group in play(Patient, timeout_s=0.3, max_turns=4096) for each in group.rollouts]
    late = [(rollout.reward, rollout.error) for rollout in rollouts if rollout.stop == "timeout"]
    assert late == [(0.0, None)] * len(late) and len(late) > G  # some may be between two answers just then
    assert {rollout.stop for rollout in rollouts} <= {"timeout", "error"}


def test_an_engine_that_cannot_answer_is_not_the_environments_fault(play):
    class Swallows(Match):
        def score_episode(self, model, tokenizer, completion, case_idx):
            model._version = PolicyVersion("gone", 1)
            try:
                model.chat([{"role": "user", "content": "x"}])
            except Exception:
                return 1.0

    with raises(AdapterNotFoundError):
        play(Swallows)


def test_episodes_run_at_once(play):
    class Slow(Match):
        running = most = 0
        lock = threading.Lock()

        def score_episode(self, model, tokenizer, completion, case_idx):
            with Slow.lock:
                Slow.running += 1
                Slow.most = max(Slow.most, Slow.running)
            time.sleep(0.2)
            model.chat([{"role": "user", "content": "x"}], max_new_tokens=2)
            with Slow.lock:
                Slow.running -= 1
            return 1.0

    play(Slow)
    assert Slow.most == 3 * G
    Slow.most = 0
    play(Slow, concurrency=2)
    assert Slow.most == 2


def test_an_async_scorer_may_ask_the_policy(play):
    class Async(Match):
        async def score_episode(self, model, tokenizer, completion, case_idx):
            await asyncio.sleep(0.01)
            return len(model.chat([{"role": "user", "content": "x"}], max_new_tokens=2)) / 100

    assert all(len(rollout.turns) == 2 and rollout.error is None for group in play(Async) for rollout in group.rollouts)


def test_an_episode_that_was_given_up_asks_no_more(play):
    asked: list[str] = []

    class Late(Match):
        def score_episode(self, model, tokenizer, completion, case_idx):
            time.sleep(0.5)
            try:
                model.chat([{"role": "user", "content": "x"}])
            except EnvError as error:
                asked.append(type(error).__name__)
                raise
            return 1.0

    groups = play(Late, timeout_s=0.1)
    assert all(len(rollout.turns) == 1 for group in groups for rollout in group.rollouts)
    for _ in range(100):
        if len(asked) == 3 * G:
            break
        time.sleep(0.02)
    assert asked == ["PolicyClosedError"] * 3 * G


# ---- a run from the files of a user ----

SIMPLE_MATCH = """
from datasets import Dataset


class SimpleMatchEnv:
    def build_dataset(self, tokenizer):
        prompts = ["Say hello", "Greet me", "How do you greet?", "A friendly word"]
        return Dataset.from_dict({"prompt": prompts, "case_idx": list(range(4))})

    def score_episode(self, model, tokenizer, completion, case_idx):
        return 1.0 if "hello" in completion else 0.0

    def get_tools(self):
        return []


class Vowels(SimpleMatchEnv):
    def score_episode(self, model, tokenizer, completion, case_idx):
        text = completion + tokenizer.decode(
            model.generate(**tokenizer(completion + " and", return_tensors="pt"), max_new_tokens=4)[0]
        )
        return sum(text.count(vowel) for vowel in "aeiou") / (1 + len(text))
"""


@pytest.fixture
def gpt2(make_base, tmp_path, monkeypatch):
    """The working directory with the module, and a GPT-2 whose tokenizer has no chat template."""
    base = make_base("gpt2", dtype=torch.float32, context=96)
    tokenizer = copy.deepcopy(base.tokenizer)
    tokenizer.chat_template = None
    save_model(replace(base, tokenizer=tokenizer), tmp_path / "gpt2")
    (tmp_path / "my_env.py").write_text(SIMPLE_MATCH)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def flags(name: str, *more: str) -> list[str]:
    return [
        *("--model", "gpt2", "--rl-env-module", "my_env", "--rl-env-class", name, "--project-name", "match"),
        *("--peft", "--rl-max-new-tokens", "8", "--lr", "0.01", "run_dir=out", "--max-steps", "1", *more),
    ]


def test_simple_match_trains_a_step_on_a_gpt2_without_a_template(gpt2):
    result = cli("run", *flags("SimpleMatchEnv"))
    assert result.exit_code == 0, result.stderr
    (step,) = [line for line in read_metrics(gpt2 / "out" / "metrics.jsonl") if "reward/mean" in line]
    assert step["reward/mean"] == step["reward/env/mean"] and 0 <= step["reward/mean"] <= 1


def test_a_run_trains_on_all_turns_and_its_engine_agrees_with_the_trainer(gpt2):
    result = cli("run", *flags("Vowels", "eval.every=0", "eval.data.source=held_out.jsonl"))
    assert result.exit_code == 2
    wording(result.stderr)
    (gpt2 / "held_out.jsonl").write_text('{"prompt": "Hi", "case_idx": 2}\n')
    result = cli("run", *flags("Vowels", "eval.every=0", "eval.data.source=held_out.jsonl", "--rl-top-k", "0"))
    assert result.exit_code == 0, result.stderr
    (step,) = [line for line in read_metrics(gpt2 / "out" / "metrics.jsonl") if "train/tokens" in line]
    assert step["mismatch/logprob_diff_max"] < 1e-3 and step["train/tokens"] > 0
