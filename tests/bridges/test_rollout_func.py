"""Rollout functions as TRL's documentation has them: what they get, what of theirs is trained, what is refused."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from groupwise.algo.samples import segments_of
from groupwise.bridges.trl.rollout_func import RolloutFunc
from groupwise.bridges.trl.rollout_func_rollouts import RolloutFuncRollouts
from groupwise.config.run import EnvConfig
from groupwise.errors import AdapterNotFoundError, ConfigError, DataError, EnvError, LoadError
from groupwise.rewards.base import score
from groupwise.rewards.call import RewardFunction
from groupwise.store.tracking import read_metrics
from groupwise.tasks.agents import load_agent
from groupwise.tasks.rollout_sources import play_all
from groupwise.types import FinishReason, PolicyVersion, Prompt, RolloutGroup, SamplingParams
from peers import peer
from starter_run import starter_run
from wording import raises, wording

trl = peer("trl")

BASE = PolicyVersion.base()
KEYS = ("prompt_ids", "completion_ids", "logprobs")
PARAMS = SamplingParams(max_tokens=12)
ASKED: Any = ({"role": "user", "content": "What is 47 + 138?"},)
CHATS = [Prompt(id="a", messages=ASKED), Prompt(id="b", messages=ASKED)]

CODE = '''
def rollout_func(prompts, trainer):
    """Two turns: the policy is told to go on, and env_mask says who spoke."""
    tokenizer = trainer.processing_class
    first = trainer.generate(prompts)
    told = tokenizer("<|im_end|>\\n<|im_start|>user\\nSure?<|im_end|>\\n<|im_start|>assistant\\n")["input_ids"]
    second = trainer.generate([a["prompt_ids"] + a["completion_ids"] + told for a in first], max_tokens=8)
    pairs = list(zip(first, second))
    return {
        "prompt_ids": [a["prompt_ids"] for a, b in pairs],
        "completion_ids": [a["completion_ids"] + told + b["completion_ids"] for a, b in pairs],
        "logprobs": [a["logprobs"] + [0.0] * len(told) + b["logprobs"] for a, b in pairs],
        "env_mask": [
            [1] * len(a["completion_ids"]) + [0] * len(told) + [1] * len(b["completion_ids"]) for a, b in pairs
        ],
        "env_reward": [float(len(b["text"]) % 2) for a, b in pairs],
    }

def old(prompts, args, processing_class):
    pass

async def later(prompts, trainer):
    pass

def from_environment(completions, env_reward):
    return env_reward
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_rollouts.py").write_text(CODE, encoding="utf-8")
    return tmp_path


def columns(said: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {key: [each[key] for each in said] for key in KEYS} | more


def single(prompts, trainer):
    return columns(trainer.generate(prompts))


class Given(RolloutFunc):
    """One that is there already, and need not be imported."""

    def __init__(self, function: Callable[[Any, Any], Any]):
        self.name, self._function = "given", function


Play = Callable[..., list[RolloutGroup]]


@pytest.fixture
def play(starter, starter_engine) -> Play:
    """`play(function, prompts=..., n=2, on_error=..., ...)`: the groups that it plays with the starter."""

    def played(function, *, prompts=CHATS, n=2, params=PARAMS, version=BASE, note=None, **options):
        config = EnvConfig(agent="tests:given", **options)
        note = note or (lambda message: None)
        made = RolloutFuncRollouts(starter_engine, starter, Given(function), config, run=PARAMS, scored=True, note=note)
        prompts, seeds = [made.prepare(prompt) for prompt in prompts], list(range(len(prompts)))
        return asyncio.run(play_all(made, prompts, seeds=seeds, n=n, params=params, version=version))

    return played


def ids_of(groups: list[RolloutGroup]) -> list[tuple[int, ...]]:
    return [turn.completion.token_ids for group in groups for rollout in group.rollouts for turn in rollout.turns]


def scored(starter_engine, segment) -> list[float]:
    """Log-probabilities of a segment's completion under the base model, by a forward of its own."""
    return list(starter_engine.score(segment.prompt_ids, segment.completion_ids, BASE))


# ---- what it gets, and what is trained ----
def test_one_call_gets_all_prompts_repeated_and_its_samples_are_the_rollouts(play, starter, starter_engine):
    seen = []

    def function(prompts, trainer):
        seen.append((prompts, threading.current_thread()))
        prompts[0].append("changed")  # the dataset's is another list
        prompts[0].pop()
        return single(prompts, trainer)

    groups = play(function, n=3)
    ((prompts, thread),) = seen
    assert prompts == [list(ASKED)] * 6 and thread is not threading.main_thread()
    assert [len(group.rollouts) for group in groups] == [3, 3] and len(set(ids_of(groups))) > 1
    for group in groups:
        for rollout in group.rollouts:
            (turn,), (segment,) = rollout.turns, segments_of(rollout.turns)
            assert segment.prompt_ids == group.prompt.token_ids and set(segment.mask) == {1}
            assert list(segment.logprobs) == pytest.approx(scored(starter_engine, segment), abs=1e-4)
            assert turn.completion.version == BASE and rollout.info["foreign_tokens"] == 0
            text = starter.tokenizer.decode(list(turn.completion.token_ids), skip_special_tokens=True)
            assert rollout.messages == ({"role": "assistant", "content": text},) and rollout.stop == "done"
            cut = turn.completion.finish_reason is FinishReason.LENGTH
            assert cut == (turn.completion.token_ids[-1] not in starter.eos_ids)
    assert ids_of(play(function, n=3)) == ids_of(groups)  # the same seeds say the same


def test_env_mask_is_the_mask_and_every_stretch_has_its_context(play, folder, starter_engine):
    groups = play(RolloutFunc("my_rollouts:rollout_func", str(folder)))
    for group in groups:
        for rollout in group.rollouts:
            first, second = rollout.turns
            (segment,) = segments_of(rollout.turns)
            between = len(second.prompt_ids) - len(first.prompt_ids) - len(first.completion.token_ids)
            lengths = len(first.completion.token_ids), between, len(second.completion.token_ids)
            assert between > 5 and segment.mask == (1,) * lengths[0] + (0,) * between + (1,) * lengths[2]
            exact = [a * b for a, b in zip(scored(starter_engine, segment), segment.mask, strict=True)]
            assert list(segment.logprobs) == pytest.approx(exact, abs=1e-4)
            assert rollout.info["foreign_tokens"] == 0 and "Sure?" in str(rollout.messages[0]["content"])
    (only,) = play(RolloutFunc("my_rollouts:rollout_func", str(folder)), prompts=CHATS[:1], n=1, train_turns="first")
    assert [turn.trained for turn in only.rollouts[0].turns] == [True, False]


def test_the_ways_to_ask_are_one_policy(play):
    """Ours, and those of TRL's vLLM client and generation, in the forms in which TRL's helpers call them."""

    def client(prompts, trainer):
        options = {"n": 1, "temperature": trainer.temperature, "top_k": -1, "top_p": trainer.top_p, "min_p": 0.0}
        options |= {"max_tokens": trainer.max_completion_length, "repetition_penalty": trainer.repetition_penalty}
        kwargs = {"chat_template_kwargs": trainer.chat_template_kwargs, "tools": trainer.tools or None}
        said = trainer.vllm_generation.vllm_client.chat(messages=prompts, **options, **kwargs, chat_template=None)
        assert all(float(each) == each[0] for row in said["logprobs"] for each in row)
        assert [[ids[0] for ids in row] for row in said["logprob_token_ids"]] == said["completion_ids"]
        return {key: said[key] for key in KEYS}

    def texts(prompts, trainer):
        template = trainer.processing_class.apply_chat_template
        prompts = [template(each, tokenize=False, add_generation_prompt=True) for each in prompts]
        said = trainer.vllm_client.generate(prompts=prompts)
        return {key: said[key] for key in KEYS}

    def generation(prompts, trainer):
        template = trainer.processing_class.apply_chat_template
        ids = [template(each, add_generation_prompt=True, return_dict=False) for each in prompts]
        prompt_ids, completion_ids, logprobs, _ = trainer.vllm_generation.generate(
            prompts=ids, images=None, num_generations=trainer.num_generations
        )
        flat = [[each[0] for each in row] for row in logprobs]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": flat}

    asked = [play(function) for function in (single, client, texts, generation)]
    assert all(groups == asked[0] for groups in asked) and ids_of(asked[0])


def test_what_functions_read_of_the_trainer(play, starter):
    seen = []

    def function(prompts, trainer):
        args = trainer.args
        seen.append((args.max_completion_length, args.temperature, args.top_p, args.top_k, args.min_p))
        seen.append((trainer.num_generations, args.num_generations, trainer.state.global_step, trainer.vllm_mode))
        assert trainer.processing_class is starter.tokenizer and trainer.accelerator.device == starter.device
        assert trainer.accelerator.is_main_process and not hasattr(trainer, "_own")
        own = ((trainer, "processing_class"), (args, "max_prompt_length"), (trainer.accelerator, "device"))
        for thing, name in own:  # which the others do not have
            with raises(AttributeError) as refused:
                _ = thing.model
            assert name in str(refused.value)
        return single(prompts, trainer)

    params = SamplingParams(max_tokens=12, temperature=0.0)
    groups = play(function, n=1, params=params)
    assert seen == [(12, 0.0, 1.0, 0, 0.0), (1, 1, 0, "server")]
    assert len(set(ids_of(groups))) == 1  # greedy


def test_its_names_are_those_of_trls_trainer():
    source = inspect.getsource(trl.GRPOTrainer.__init__)
    for name in ("temperature", "top_p", "top_k", "min_p", "num_generations", "max_completion_length", "use_vllm"):
        assert f"self.{name} = " in source


def test_prompts_that_are_text(play, starter_engine):
    (group,) = play(single, prompts=[Prompt(id="t", text="47 + 138 =")], n=2)
    (segment,) = segments_of(group.rollouts[0].turns)
    assert list(segment.logprobs) == pytest.approx(scored(starter_engine, segment), abs=1e-4)
    with raises(DataError):
        play(single, prompts=[Prompt(id="x", columns={"a": 1})])


def test_what_was_sampled_otherwise_or_elsewhere(play):
    notes: list[str] = []

    def hotter(prompts, trainer):
        return columns(trainer.generate(prompts, generation_overrides={"temperature": 0.5, "max_tokens": 4}))

    groups = play(hotter, note=notes.append)
    assert all(not turn.trained for group in groups for rollout in group.rollouts for turn in rollout.turns)
    assert max(map(len, ids_of(groups))) <= 4 and "temperature=0.5 is not trained" in notes[0] and len(notes) == 1

    def narrower(prompts, trainer):
        return columns(trainer.generate(prompts, generation_overrides={"top_k": 3, "max_tokens": 4}))

    for group in play(narrower, note=notes.append):
        for turn in (turn for rollout in group.rollouts for turn in rollout.turns):
            assert turn.trained and len(turn.completion.kept) == len(turn.completion.token_ids)
            assert turn.completion.kept.array().sum(-1).max() <= 3
    assert len(notes) == 1

    def elsewhere(prompts, trainer):
        size = len(prompts)
        return {"prompt_ids": [[5, 6]] * size, "completion_ids": [[7, 8, 9]] * size, "logprobs": [[-1.0] * 3] * size}

    (rollout, _), _ = [group.rollouts for group in play(elsewhere, note=notes.append)]
    assert rollout.info["foreign_tokens"] == 3 and rollout.turns[0].trained and "did not sample" in notes[1]
    assert rollout.turns[0].completion.finish_reason is FinishReason.LENGTH


# ---- what reward functions get ----
def test_other_fields_are_columns_of_reward_functions(play):
    """As in TRL: a list has an entry for each completion, anything else is the same for all."""
    seen = []

    def function(prompts, trainer):
        return columns(trainer.generate(prompts), env_reward=[0.0, 1.0, 2.0, 3.0], level="easy")

    def reward(completions, env_reward, level, question, **others):
        seen.append((completions, level, question, others["completion_ids"]))
        return env_reward

    prompts = [replace(CHATS[0], columns={"question": "?"}), Prompt(id="t", text="47 + 138 =", columns={"question": 1})]
    groups = play(function, prompts=prompts)
    groups = asyncio.run(score(groups, [RewardFunction(name="reward", function=reward, args={})]))
    assert [[rollout.reward for rollout in group.rollouts] for group in groups] == [[0.0, 1.0], [2.0, 3.0]]
    (chats, *given), (texts, *_) = seen
    assert given[:2] == [["easy"] * 2, ["?"] * 2]
    assert chats == [[dict(rollout.messages[0])] for rollout in groups[0].rollouts]
    assert texts == [dict(rollout.messages[0])["content"] for rollout in groups[1].rollouts]
    ((bad, *_), _) = [group.rollouts for group in play(broken(env_reward=[1.0]))]
    assert "env_reward of 1 for 4 prompts" in str(bad.error)


def test_a_text_prompts_completion_is_all_of_it(play):
    """What the environment said within is decoded too, as TRL does."""

    def function(prompts, trainer):
        said = trainer.generate(prompts)
        told = trainer.processing_class(" Again:")["input_ids"]
        return {
            "prompt_ids": [each["prompt_ids"] for each in said],
            "completion_ids": [[*each["completion_ids"], *told, told[0]] for each in said],
            "logprobs": [[*each["logprobs"], *([0.0] * len(told)), -9.0] for each in said],
            "env_mask": [[*([1] * len(each["completion_ids"])), *([0] * len(told)), 1] for each in said],
        }

    seen = []

    def reward(completions):
        seen.extend(completions)
        return [0.0] * len(completions)

    groups = play(function, prompts=[Prompt(id="t", text="47 + 138 =")])
    asyncio.run(score(groups, [RewardFunction(name="reward", function=reward, args={})]))
    assert len(seen) == 2 and all(" Again:" in text for text in seen)


# ---- what is wrong ----
def broken(**change: Any):
    """A function whose output is changed: a callable of the good value, or a value; of each entry by `entry`."""

    def function(prompts, trainer):
        output = {**single(prompts, trainer), "env_mask": None}
        for key, value in change.items():
            output[key] = value(output[key]) if callable(value) else value
        return output

    return function


WRONG = {
    "nothing": lambda prompts, trainer: None,
    "a part": lambda prompts, trainer: {"prompt_ids": []},
    "an exception": lambda prompts, trainer: 1 / 0,
    "no such module": lambda prompts, trainer: __import__("trl.experimental.openenv"),
    "an unknown option": lambda prompts, trainer: trainer.generate(prompts, best_of=2),
    "no prompt": lambda prompts, trainer: trainer.generate([7]),
    "a long prompt": lambda prompts, trainer: trainer.generate([[5] * 4096]),
    "the model": lambda prompts, trainer: trainer.model,
    "too few logprobs": broken(logprobs=lambda rows: rows[1:]),
    "too few masks": broken(env_mask=lambda _: [[1]]),
    "a number": broken(prompt_ids=7),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_the_whole_is_the_error_of_all(play, case):
    groups = play(WRONG[case])
    for group in groups:
        for rollout in group.rollouts:
            assert rollout.reward is None and not rollout.turns and rollout.stop == "error"
            assert rollout.info["failed"] == 1
            wording(rollout.error)
    with raises(EnvError):
        play(WRONG[case], on_error="stop")


def second(change):
    return lambda rows: [rows[0], change(rows[1]), *rows[2:]]


@pytest.mark.parametrize(
    "change",
    [
        {"logprobs": second(lambda row: row[1:])},
        {"logprobs": second(lambda row: [float("nan"), *row[1:]])},
        {"logprobs": second(lambda row: [0.7, *row[1:]])},
        {"logprobs": second(lambda row: [None, *row[1:]])},
        {"completion_ids": second(lambda row: [])},
        {"completion_ids": second(lambda row: [10**6, *row[1:]])},
        {"completion_ids": second(lambda row: ["a", *row[1:]])},
        {"prompt_ids": second(lambda row: "text")},
        {"prompt_ids": second(lambda row: [5] * 4096)},
    ],
)
def test_what_is_wrong_with_one_entry_is_its_rollouts_error(play, change):
    first, bad, *others = [rollout for group in play(broken(**change)) for rollout in group.rollouts]
    assert all(each.error is None and each.turns for each in (first, *others)) and not bad.turns
    with raises(EnvError):
        raise EnvError(str(bad.error))


def test_masks_that_are_none(play):
    def masked(entry):
        return lambda prompts, trainer: single(prompts, trainer) | {"env_mask": [[entry] * 3] * len(prompts)}

    def short(prompts, trainer):
        return columns(trainer.generate(prompts, max_tokens=1), env_mask=[[0], [2], [1], [True]])

    zeros, unclear, *fine = [rollout for group in play(short) for rollout in group.rollouts]
    assert "env_mask of zeros" in str(zeros.error) and "env_mask with 2" in str(unclear.error)
    assert all(each.error is None and len(each.turns[0].completion.token_ids) == 1 for each in fine)
    (rollout, *_) = play(masked(1))[0].rollouts
    assert "env_mask of 3 for" in str(rollout.error)


def test_arrays_and_tensors_are_lists(play):
    def arrays(prompts, trainer):
        said = single(prompts, trainer)
        return {
            "prompt_ids": [torch.tensor(each) for each in said["prompt_ids"]],
            "completion_ids": [np.array(each) for each in said["completion_ids"]],
            "logprobs": [list(np.array(each, dtype=np.float64)) for each in said["logprobs"]],
        }

    assert play(arrays) == play(single)


def test_one_that_hangs_is_given_up_and_one_that_asks_is_not(play):
    release = threading.Event()

    def hangs(prompts, trainer):
        release.wait(20)

    def slow(prompts, trainer):
        for _ in range(3):
            time.sleep(0.4)
            trainer.generate(prompts)
        time.sleep(0.4)
        return single(prompts, trainer)

    try:
        (group,) = play(hangs, prompts=CHATS[:1], timeout_s=0.3)
    finally:
        release.set()
    assert "given took longer than env.timeout_s = 0.3 s without asking" in str(group.rollouts[0].error)
    assert group.rollouts[0].error_kind == "timeout"
    assert all(rollout.error is None for group in play(slow, timeout_s=1.5) for rollout in group.rollouts)


def test_the_engines_failure_is_raised_even_where_the_function_hides_it(play):
    def hides(prompts, trainer):
        try:
            return single(prompts, trainer)
        except Exception:
            return None

    with pytest.raises(AdapterNotFoundError):
        play(hides, version=PolicyVersion("nobody", 7))


def test_the_event_loop_goes_on_and_calls_are_made_one_at_a_time(starter, starter_engine):
    inside: list[int] = []
    most: list[int] = []

    def function(prompts, trainer):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.1)
        said = single(prompts, trainer)
        inside.pop()
        return said

    async def both() -> int:
        config = EnvConfig(agent="tests:given")
        made = RolloutFuncRollouts(starter_engine, starter, Given(function), config, run=PARAMS, scored=True)
        begun = [each for prompt in CHATS for each in made.begin([prompt], seeds=[1], n=2, params=PARAMS, version=BASE)]
        played, ticks = asyncio.gather(*begun), 0
        while not played.done():
            await asyncio.sleep(0.01)
            ticks += 1
        await played
        return ticks

    assert asyncio.run(both()) >= 10 and most == [1, 1]


# ---- the configuration ----
def load(folder: Path, function: str, **options: Any):
    config = EnvConfig(agent="groupwise.bridges.trl.rollout_func:RolloutFunc", args={"function": function}, **options)
    return load_agent(config, folder=folder)


def test_what_the_configuration_refuses(folder, starter, starter_engine):
    assert load(folder, "my_rollouts:rollout_func").name == "rollout_func"
    with raises(ConfigError):
        load(folder, "my_rollouts:old")
    with raises(ConfigError):
        load(folder, "my_rollouts:later")
    with pytest.raises(LoadError):
        load(folder, "my_rollouts:nothing")
    with raises(ConfigError):
        load(folder, "my_rollouts:rollout_func", max_turns=3)
    with raises(ConfigError):
        RolloutFuncRollouts(starter_engine, starter, Given(single), EnvConfig(agent="a:b"), run=PARAMS, scored=False)


def test_two_steps_with_the_starter(folder):
    rows = [{"prompt": [{"role": "user", "content": f"What is {40 + i} + 13?"}]} for i in range(8)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    result = starter_run(
        folder,
        name="rolled",
        data={"source": "rows.jsonl"},
        rewards=["my_rollouts:from_environment"],
        env={
            "agent": "groupwise.bridges.trl.rollout_func:RolloutFunc",
            "args": {"function": "my_rollouts:rollout_func"},
        },
        rollout={"prompts_per_step": 4, "group_size": 4, "max_tokens": 16},
        train={"steps": 2},
    )
    assert result.version.number == 2
    lines = [row for row in read_metrics(result.run_dir / "metrics.jsonl") if "reward/mean" in row]
    assert len(lines) == 2 and all(0 < row["reward/mean"] < 1 for row in lines)
    assert all(row["env/failed_frac"] == 0 and row["env/foreign_tokens"] == 0 for row in lines)
    assert all(row["rollout/turns_mean"] == 2 for row in lines)
