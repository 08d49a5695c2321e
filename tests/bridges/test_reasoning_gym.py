"""Problems of the package `reasoning-gym`: as prompts, scored by their generators, with rising difficulty."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import subprocess
import sys

import pytest

from groupwise.bridges.reasoning_gym import problems as adapter
from groupwise.bridges.reasoning_gym.difficulty import AdaptiveDifficulty
from groupwise.bridges.reasoning_gym.reward import answer_of, score_answer
from groupwise.config.data import SCORE_ANSWER, DataConfig, DatasetConfig
from groupwise.config.run import parse_config
from groupwise.errors import ConfigError, DataError
from groupwise.run.loop import run_loop
from groupwise.store.tracking import read_metrics
from groupwise.tasks.prompts import open_prompts
from groupwise.types import Rollout, RolloutGroup
from prompt_streams import take
from running_jobs import Dies, adapter_bytes, metrics_of, rollouts_of
from wording import raises

TASKS = {"chain_sum": {"min_terms": 2, "max_terms": 3, "max_digits": 2}, "spell_backward": {}}


def generated(**options) -> DataConfig:
    return DataConfig.model_validate({"source": "reasoning-gym", "tasks": TASKS, "size": 12} | options)


def test_the_package_is_there_before_the_first_score_is_waited_for():
    program = (
        "import sys; from groupwise.config.rewards import RewardConfig;"
        "from groupwise.rewards.base import load_rewards;"
        f"load_rewards([RewardConfig(function={SCORE_ANSWER!r})]); print('reasoning_gym' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert said.stdout.strip() == "True"


# ---- the configuration ----


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"source": "reasoning-gym"}, "required with source reasoning-gym"),
        ({"source": "rows.jsonl", "tasks": TASKS}, "acts with source reasoning-gym only"),
        ({"source": "rows.jsonl", "seed": 0}, "acts with sample, or source reasoning-gym"),
        ({"source": "reasoning-gym", "tasks": TASKS, "split": "train"}, "acts on files and Hugging Face datasets"),
        ({"source": "reasoning-gym", "tasks": TASKS, "args": {"n": 1}}, "does not act with 'reasoning-gym'"),
        ({"source": "reasoning-gym", "tasks": {"gcd": {"weight": 0}}}, "a number above 0"),
        ({"source": "reasoning-gym", "tasks": {"gcd": {"weight": "2"}}}, "a number above 0"),
        ({"source": "rows.jsonl", "difficulty": {"gcd": {"parameter": "a", "levels": [1, 2]}}}, "is no task"),
        (
            {"source": "reasoning-gym", "tasks": TASKS, "difficulty": {"gcd": {"parameter": "a", "levels": [1, 2]}}},
            "is no task of this run; data.tasks has chain_sum, spell_backward",
        ),
        (
            {
                "source": "reasoning-gym",
                "tasks": TASKS,
                "difficulty": {"chain_sum": {"parameter": "max_terms", "levels": [3, 4]}},
            },
            "max_terms is given here",
        ),
    ],
)
def test_refusals(data, message):
    with pytest.raises(ConfigError) as caught:
        parse_config({"data": data})
    assert message in str(caught.value)


def test_its_reward_is_the_default_and_has_a_short_name():
    said = {"source": "reasoning-gym", "tasks": ["chain_sum"]}
    [reward] = parse_config({"data": said}).rewards
    assert (reward.function, reward.name, reward.weight) == (SCORE_ANSWER, "reasoning-gym", 1.0)
    both = [{"function": "reasoning-gym", "weight": 2.0, "args": {"strict": True}}, "my_rewards:brief"]
    first, second = parse_config({"data": said, "rewards": both}).rewards
    assert (first.function, first.weight, first.args) == (SCORE_ANSWER, 2.0, {"strict": True})
    assert second.function == "my_rewards:brief"


def test_without_the_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    adapter.generator.cache_clear()
    with raises(ConfigError) as caught:
        open_prompts(generated())
    assert caught.value.hint == "pip install 'groupwise[reasoning-gym]'"


def test_the_answer_of_a_reply():
    assert answer_of("<answer>1</answer> no, <answer>\n2 </answer>") == "2"
    assert answer_of("<think><answer>1</answer></think>3") == "3"
    assert answer_of("<sum>4</sum>", tag="sum", strict=True) == "4"
    assert answer_of("4", strict=True) is None


# ---- with the package ----


@pytest.fixture(scope="module")
def package():
    return pytest.importorskip("reasoning_gym")


def test_tasks_are_mixed_by_weight_and_the_same_for_a_seed(package):
    config = generated(tasks={"chain_sum": {"weight": 3}, "spell_backward": {}}, system="Be brief.")
    prompts = open_prompts(config).known
    assert [prompt.columns["task"] for prompt in prompts].count("chain_sum") == 9
    assert {prompt.columns["task"] for prompt in prompts[:4]} == {"chain_sum", "spell_backward"}
    assert [each.messages for each in open_prompts(config).known] == [each.messages for each in prompts]
    assert len({prompt.id for prompt in prompts}) == 12
    assert prompts[0].messages is not None and [each["role"] for each in prompts[0].messages] == ["system", "user"]


def test_neighbouring_seeds_share_no_problems(package):
    """The package draws problem i of seed s from s + i."""
    tasks = {"chain_sum": {"min_digits": 6, "max_digits": 8}}

    def questions(config) -> set[str]:
        return {prompt.columns["question"] for prompt in open_prompts(config).known}

    first, second = questions(generated(tasks=tasks, seed=4)), questions(generated(tasks=tasks, seed=5))
    assert len(first) == 12 and not first & second
    held_out = DatasetConfig(source="reasoning-gym", tasks=tasks, size=12)
    assert not questions(generated(tasks=tasks)) & questions(held_out)


@pytest.mark.parametrize(
    ("tasks", "hint"),
    [
        ({"chainsum": {}}, "chain_sum"),
        ({"chain_sum": {"max_term": 3}}, "max_terms"),
        ({"chain_sum": {"seed": 3}}, "data.seed"),
        ({"chain_sum": {"min_terms": 4, "max_terms": 3}}, None),
    ],
)
def test_what_a_generator_refuses(package, tasks, hint):
    with raises(ConfigError) as caught:
        open_prompts(generated(tasks=tasks))
    assert (hint or "") in str(caught.value.hint or "")


def scored(prompt, replies, **options) -> tuple[list[float], list]:
    logged: list = []
    columns = {name: [value] * len(replies) for name, value in prompt.columns.items() if name != "level"}
    completions = [[{"role": "assistant", "content": reply}] for reply in replies]
    scores = score_answer(completions, **columns, log_metric=lambda *each: logged.append(each), **options)
    return scores, logged


def test_the_score_is_the_generators_own(package):
    for prompt in open_prompts(generated(tasks={"chain_sum": {}, "number_sorting": {}, "arc_1d": {}})).known:
        answer, task = prompt.columns["answer"], prompt.columns["task"]
        scores, logged = scored(prompt, [answer, f"<answer> {answer} </answer>", "nothing"])
        assert scores[:2] == [1.0, 1.0] and scores[2] < 0.1
        assert logged == [(task, scores[0]), (task, scores[1]), (task, scores[2]), ("unreadable", 0.0)]
        assert scored(prompt, [answer], strict=True)[0][0] < 0.1


def test_columns_that_json_would_change_still_score(package):
    """arc_agi and rearc keep grids as tuples, which are compared."""
    [prompt] = open_prompts(generated(tasks={"rearc": {}}, size=1)).known
    assert scored(prompt, [prompt.columns["answer"]])[0] == [1.0]


# ---- difficulty ----

RULE = {"chain_sum": {"parameter": "max_terms", "levels": [2, 4, 6], "band": [0.25, 0.75], "groups": 2}}
RISING = {"tasks": {"chain_sum": {"min_terms": 2}}, "difficulty": RULE}


def adaptive() -> AdaptiveDifficulty:
    config = generated(**RISING)
    return AdaptiveDifficulty(open_prompts(config, seed=3), config)


def answered(prompt, reward: float | None) -> RolloutGroup:
    return RolloutGroup(prompt=prompt, rollouts=(Rollout(turns=(), reward=reward),) * 2)


def terms(prompt) -> int:
    return prompt.columns["metadata"]["num_terms"]


def test_the_level_follows_the_pass_rate(package):
    stream = adaptive()

    def play(reward: float) -> float:
        stream.observe([answered(prompt, reward) for prompt in take(stream, 2)])
        return stream.metrics()["difficulty/chain_sum/level"]

    assert [play(reward) for reward in (0.5, 1.0, 1.0, 1.0, 0.3, 0.0, 0.0, 0.0)] == [0, 1, 2, 2, 2, 1, 0, 0]
    assert stream.metrics()["difficulty/chain_sum/rate"] == 0.0


def test_problems_are_drawn_at_the_present_level_and_late_groups_say_nothing(package):
    stream = adaptive()
    easy = take(stream, 6)
    assert {terms(prompt) for prompt in easy} == {2}
    stream.observe([answered(prompt, 1.0) for prompt in easy[:2]])
    stream.observe([answered(prompt, 0.0) for prompt in easy[2:]] + [answered(easy[0], None)])
    assert stream.metrics()["difficulty/chain_sum/level"] == 1
    harder = take(stream, 6)
    assert max(terms(prompt) for prompt in harder) > 2 and {prompt.columns["level"] for prompt in harder} == {1}
    assert stream.prompt(harder[0].id).messages == harder[0].messages
    with raises(DataError):
        stream.prompt("other/0/99")


def test_a_restored_stream_goes_on_with_the_same_problems(package):
    stream = adaptive()
    [waiting] = stream.issue(1)
    stream.observe([answered(prompt, 1.0) for prompt in take(stream, 2)])
    stream.observe([answered(prompt, 1.0) for prompt in take(stream, 1)])  # of the next level, one of two
    other = adaptive()
    other.restore(json.loads(json.dumps(stream.cursor)))
    [again] = other.issue(1)
    assert again.again and again.prompt == waiting.prompt and terms(again.prompt) == 2
    assert [each.messages for each in take(other, 14)] == [each.messages for each in take(stream, 14)]
    assert other.metrics() == stream.metrics() and other.cursor["difficulty"]["seen"] == {"chain_sum": [1.0]}


def test_a_cursor_of_other_levels_is_refused(package):
    with raises(DataError):
        adaptive().restore(open_prompts(generated(**RISING)).cursor)
    cursor = adaptive().cursor
    cursor["difficulty"]["level"] = {"chain_sum": 3}
    with raises(DataError):
        adaptive().restore(cursor)


# ---- in a run ----


def settings(folder, **sections) -> dict:
    data = {"source": "reasoning-gym", "tasks": {"chain_sum": {"max_digits": 1}, "spell_backward": {}}, "size": 64}
    rule = {"parameter": "max_terms", "levels": [2, 3, 4], "band": [0.01, 0.02], "groups": 1}
    return {
        "name": "gym",
        "dtype": "float32",
        "device": "cpu",
        "output_dir": str(folder / "runs"),
        "data": {**data, "difficulty": {"chain_sum": rule}},
        "eval": {"data": {**data, "size": 4}, "by": "task", "modes": ["greedy"]},
        "scoring": {"workers": 0},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_tokens": 8},
        "train": {"steps": 4, "learning_rate": 1.0e-3},
        "checkpoint": {"every": 1},
        **sections,
    }


@pytest.mark.slow
def test_a_run_that_died_goes_on_bit_for_bit(package, tmp_path):
    whole = run_loop(parse_config(settings(tmp_path / "whole"))).run_dir
    with pytest.raises(Dies.Now):
        run_loop(parse_config(settings(tmp_path, resume="auto")), display=Dies(3, total=4, stream=io.StringIO()))
    result = run_loop(parse_config(settings(tmp_path, resume="auto")))
    assert metrics_of(result.run_dir) == metrics_of(whole) and rollouts_of(result.run_dir) == rollouts_of(whole)
    assert adapter_bytes(result.run_dir) == adapter_bytes(whole) != {}
    rows = [row for row in read_metrics(whole / "metrics.jsonl") if "reward/mean" in row]
    assert len(rows) == 4 and all(math.isfinite(row["reward/reasoning-gym/log/spell_backward"]) for row in rows)
    assert rows[-1]["difficulty/chain_sum/level"] > 0
    evaluated = [row for row in read_metrics(whole / "metrics.jsonl") if "eval/greedy/chain_sum/reward" in row]
    assert len(evaluated) == 2
