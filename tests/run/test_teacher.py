"""Teachers in runs of the starter: what is learned from each kind, what is refused, and that a run goes on exactly."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from groupwise.algo.samples import samples_of
from groupwise.config.run import STARTER_DIR
from groupwise.config.teacher import TeacherConfig
from groupwise.errors import ConfigError, ContextLengthError
from groupwise.model.chat import encode_prompt
from groupwise.run import teacher as teacher_module
from groupwise.run.check import check
from groupwise.run.loop import run_loop
from groupwise.run.plan import make_plan
from groupwise.run.teacher import EndpointTeacher, Teacher, with_context
from groupwise.server import chat, completions
from groupwise.store.rollouts import group_from_json, group_to_json
from groupwise.types import (
    Completion,
    FinishReason,
    Message,
    PolicyVersion,
    Prompt,
    Rollout,
    RolloutGroup,
    SequenceScores,
    Turn,
)
from running_jobs import Dies, adapter_bytes, config, metrics_of, rollouts_of
from serving import Served, served, starter
from slow_cases import long_case
from wording import raises


@pytest.fixture(scope="module")
def better(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a run that trained an adapter, which is a teacher."""
    folder = tmp_path_factory.mktemp("better")
    return str(run_loop(config(folder, train={"steps": 4, "learning_rate": 3e-3})).run_dir)


SELF = {"self": True, "loss": "sdpo"}


@pytest.mark.parametrize("top_k", [long_case(0), 8])
def test_the_policy_becomes_like_its_teacher(tmp_path: Path, better: str, top_k: int):
    """Without any reward: the divergence falls to a part of what it was."""
    teacher = {"adapter": better, "top_k": top_k}
    sections = {"teacher": teacher, "rewards": [], "train": {"steps": 8, "learning_rate": 2e-3}}
    sections["rollout"] = {"prompts_per_step": 8}
    result = run_loop(config(tmp_path, **sections, algo={"policy_loss": "importance_sampling"}))
    steps = metrics_of(result.run_dir)
    kl = [step["loss/soft_kl"] if top_k else step["teacher/kl"] for step in steps]
    assert sum(kl[-4:]) < 0.7 * sum(kl[:4]) and all(step["teacher/scored_frac"] == 1 for step in steps)
    assert steps[0]["rollout/excluded_frac"] == 0 and "reward/mean" not in steps[0]
    assert ("loss/soft_kl" in steps[0]) == bool(top_k)


def test_a_teacher_beside_rewards(tmp_path: Path, better: str):
    """Advantages of both, and with reward_weight 0 only the teacher's while rewards are still measured."""
    runs = {}
    for weight in (1.0, 0.0):
        teacher = {"adapter": better, "reward_weight": weight}
        run = run_loop(config(tmp_path / str(weight), teacher=teacher, train={"steps": 1})).run_dir
        (runs[weight],) = metrics_of(run)
        advantages = [r["advantage"] for group in rollouts_of(run) for r in group["rollouts"]]
        assert any(advantages) == bool(weight)
    assert runs[1.0]["reward/mean"] == runs[0.0]["reward/mean"]
    assert runs[1.0]["train/advantage_abs_mean"] > runs[0.0]["train/advantage_abs_mean"] > 0


def test_the_policy_learns_what_its_teacher_says(tmp_path: Path, better: str):
    """Without any reward, on the same four prompts in each step: the teacher samples everything, the policy nothing,
    and the teacher's likeliest answers become likelier."""
    teacher = {"adapter": better, "loss": "sft", "temperature": 0.0}
    sections = {"teacher": teacher, "rewards": [], "train": {"steps": 5, "learning_rate": 5e-3, "warmup_steps": 0}}
    few = {"args": {"skill": ["add"], "style": "bare", "n": 4}}
    run = run_loop(config(tmp_path, **sections, data=few, rollout={"group_size": 2})).run_dir
    steps = metrics_of(run)
    assert steps[-1]["loss/cross_entropy"] < 0.5 * steps[0]["loss/cross_entropy"]
    assert all(step["teacher/demonstrations"] == step["train/samples"] == 8 for step in steps)
    assert all(step["teacher/demonstrated_tokens"] == step["rollout/tokens"] for step in steps)
    assert steps[0]["rollout/excluded_frac"] == 0 and not {"loss/policy", "kl/mean", "reward/mean"} & set(steps[0])
    versions = {turn["version"] for group in rollouts_of(run) for r in group["rollouts"] for turn in r["turns"]}
    assert versions == {"teacher@1"}


def test_demonstrations_beside_rewards(tmp_path: Path, better: str):
    """The policy samples its groups as ever; of the teacher's completions those are learned that are right."""
    teacher = {"adapter": better, "loss": "sft", "completions": 3, "least_reward": 1.0}
    run = run_loop(config(tmp_path, teacher=teacher, train={"steps": 2})).run_dir
    plain = run_loop(config(tmp_path / "plain", train={"steps": 2}, rollout={"refill": 1.0})).run_dir
    groups = [group_from_json(raw) for raw in rollouts_of(run)]
    ids = [[r.completion.token_ids for r in group.rollouts] for group in groups[:4]]
    assert ids == [[r.completion.token_ids for r in group_from_json(raw).rollouts] for raw in rollouts_of(plain)[:4]]
    shown = [each for group in groups for each in group.demonstrations]
    assert shown and all(each.reward == 1.0 and str(each.completion.version) == "teacher@1" for each in shown)
    steps = metrics_of(run)
    assert sum(step["teacher/demonstrations"] for step in steps) == len(shown) < 3 * len(groups)
    assert all({"loss/policy", "loss/cross_entropy"} <= set(step) for step in steps)
    assert all(
        json.loads(json.dumps(group_to_json(group))) == raw for group, raw in zip(groups, rollouts_of(run), strict=True)
    )


def test_with_reward_weight_0_rewards_are_those_of_the_teachers_completions(tmp_path: Path, better: str):
    """They choose what is learned; a coefficient is one of the gradient."""
    norms = {}
    for coefficient in (1.0, 0.5):
        teacher = {
            "adapter": better,
            "loss": "sft",
            "reward_weight": 0.0,
            "least_reward": 1.0,
            "coefficient": coefficient,
        }
        run = run_loop(config(tmp_path / str(coefficient), teacher=teacher, train={"steps": 1})).run_dir
        (step,) = metrics_of(run)
        norms[coefficient] = step["optim/grad_norm"]
        assert step["teacher/demonstrations"] == 16 * step["reward/mean"] > 0
    assert norms[0.5] == pytest.approx(0.5 * norms[1.0], rel=1e-4)


OWN_BEST = {"self": True, "loss": "sft", "best": 1, "least_reward": 1.0, "reward_weight": 0.0}


def test_the_policy_learns_the_best_of_what_it_samples(tmp_path: Path):
    """Rejection sampling: one right completion of each prompt is learned, and the rewards have no gradient."""
    run = run_loop(config(tmp_path, teacher=OWN_BEST, train={"steps": 2})).run_dir
    groups = [group_from_json(raw) for raw in rollouts_of(run)]
    assert groups and all(len(group.demonstrations) <= 1 for group in groups)
    chosen = [(group, group.demonstrations[0]) for group in groups if group.demonstrations]
    assert all(best.reward == 1.0 for _, best in chosen)
    assert all(group.demonstrations for group in groups if any(each.reward == 1.0 for each in group.rollouts))
    for group, best in chosen:
        assert best.completion.token_ids in [each.completion.token_ids for each in group.rollouts]
    steps = metrics_of(run)
    assert sum(step["teacher/demonstrations"] for step in steps) == len(chosen) > 0
    assert all("loss/cross_entropy" in step and "loss/policy" not in step for step in steps)


def test_it_may_learn_its_best_beside_rewards(tmp_path: Path):
    teacher = {**OWN_BEST, "reward_weight": 1.0}
    (step,) = metrics_of(run_loop(config(tmp_path, teacher=teacher, train={"steps": 1})).run_dir)
    assert {"loss/policy", "loss/cross_entropy"} <= set(step)


@pytest.mark.parametrize(
    ("chooses", "kept"),
    [
        ({"best": 1}, [2]),
        ({"best": 2}, [2, 0]),
        ({"best": 4}, [2, 0, 1]),
        ({"best": 4, "least_reward": 0.5}, [2, 0]),
        ({"least_reward": 0.5}, [0, 2, 3]),
        ({"least_reward": 2.0}, []),
    ],
)
def test_the_best_are_those_of_the_highest_rewards_and_each_is_learned_once(chooses: dict[str, Any], kept: list[int]):
    """The third and the fourth are the same completion."""
    said = [rollout(ids, reward=reward) for ids, reward in (((1,), 0.5), ((2,), 0.0), ((3,), 1.0), ((3,), 1.0))]
    failed = replace(rollout((4,), reward=None), error="it failed")
    assert chosen([*said, failed], chooses) == [said[i] for i in kept]


def test_of_equal_rewards_none_is_best_unless_it_is_good_enough():
    said = [rollout((i,), reward=1.0) for i in range(3)]
    assert chosen(said, {"best": 1}) == [] and chosen(said, {"best": 1, "least_reward": 1.0}) == said[:1]


def rollout(ids: tuple[int, ...], *, reward: float | None) -> Rollout:
    completion = Completion(token_ids=ids, logprobs=(0.0,), text="", finish_reason=FinishReason.STOP)
    return Rollout(turns=(Turn((9,), completion),), reward=reward)


def chosen(rollouts: list[Rollout], chooses: dict[str, Any]) -> list[Rollout]:
    async def scored(group: RolloutGroup) -> RolloutGroup:
        return group

    run = config(Path(), teacher={"self": True, "loss": "sft", **chooses})
    group = RolloutGroup(prompt=Prompt(id="p", text="?"), rollouts=tuple(rollouts))

    async def kept() -> RolloutGroup:
        return await teacher_module.taught(scored, None, run)(group)

    return list(asyncio.run(kept()).demonstrations)


def test_check_tries_what_the_policy_would_choose(tmp_path: Path):
    report = check(config(tmp_path, teacher={**OWN_BEST, "least_reward": 0.0}))
    assert report.trained_step.teacher["teacher/demonstrations"] > 0 and report.trained_step.grad_norm


def test_check_tries_a_teacher_that_samples(tmp_path: Path, better: str):
    for weight in (1.0, 0.0):
        report = check(config(tmp_path, teacher={"adapter": better, "loss": "sft", "reward_weight": weight}))
        told = report.trained_step.teacher
        assert told["teacher/demonstrations"] == 16 and report.trained_step.grad_norm


@pytest.mark.parametrize("context", ["answer", "best_completion"])
def test_the_policy_with_context_teaches_itself(tmp_path: Path, context: str):
    teacher = {**SELF, "context": context, "reward_weight": 0.0}
    result = run_loop(config(tmp_path, teacher=teacher, train={"steps": 3}))
    steps = metrics_of(result.run_dir)
    assert all(step["optim/grad_norm"] > 0 for step in steps if step["train/samples"])
    shares = {step["teacher/scored_frac"] for step in steps}
    assert shares == {1.0} if context == "answer" else 0 < max(shares) < 1


def test_another_model(tmp_path: Path):
    """The same model as its own teacher: nothing to learn before the first step."""
    run = run_loop(config(tmp_path, teacher={"model": "starter"}, rewards=[], train={"steps": 1})).run_dir
    (step,) = metrics_of(run)
    assert abs(step["teacher/kl"]) < 1e-4 and step["teacher/gap_max"] < 1e-3 and step["optim/grad_norm"] < 1e-2


def test_episodes_are_scored_as_one_text(tmp_path: Path, better: str):
    """Of an environment: what was heard between the turns has no part in it."""
    (tmp_path / "echo_env.py").write_text(
        "from groupwise.tasks.env import StepResult\n"
        "class Echo:\n"
        "    def cases(self):\n"
        "        return [{'n': n} for n in range(8)]\n"
        "    def reset(self, case, seed):\n"
        "        self.turns = 0\n"
        "        return f'{case[\"n\"]} + 1 ='\n"
        "    def step(self, message):\n"
        "        self.turns += 1\n"
        "        return StepResult(messages=[{'role': 'user', 'content': 'again'}], reward=0.0, done=self.turns == 2)\n"
    )
    environment = {"environment": "echo_env:Echo", "workers": 0, "max_turns": 2, "stop_at_cut": False}
    sections = {"data": None, "rewards": [], "env": environment, "folder": str(tmp_path)}
    run = run_loop(config(tmp_path, teacher={"adapter": better}, train={"steps": 1}, **sections)).run_dir
    (step,) = metrics_of(run)
    assert step["rollout/turns_mean"] == 2 and step["teacher/tokens"] == step["train/tokens"]
    for raw in rollouts_of(run):
        group = group_from_json(raw)
        for rollout, sample in zip(group.rollouts, samples_of([group]), strict=True):
            assert [len(each.logprobs) for each in rollout.teacher] == [len(sample.completion_ids)]


ON_POLICY = {"replay": {"size": 8, "share": 0.5}, "refill": 2.0}


@pytest.mark.parametrize(
    ("teacher", "rollout"),
    [
        pytest.param({"top_k": 0}, ON_POLICY, marks=pytest.mark.slow),
        pytest.param({"top_k": 4, "divergence": "forward"}, {}, marks=pytest.mark.slow),
        ({**SELF, "context": "answer"}, ON_POLICY),
        long_case({"loss": "sft", "completions": 2}, {}),
        pytest.param({"loss": "sft", "reward_weight": 0.0}, {}, marks=pytest.mark.slow),
    ],
    ids=["sampled", "top_k", "self", "sft beside rewards", "sft alone"],
)
def test_it_goes_on_bit_for_bit(tmp_path: Path, better: str, teacher: dict, rollout: dict):
    """Also what the replay buffer holds of a teacher's."""
    teacher = teacher if "self" in teacher else {"adapter": better, **teacher}
    sections = {"teacher": teacher, "rollout": {"prompts_per_step": 2, "group_size": 4, "max_tokens": 8} | rollout}
    sections |= {"adapters": {"keep": 100}, "train": {"steps": 4}}
    whole = run_loop(config(tmp_path / "whole", **sections)).run_dir
    with pytest.raises(Dies.Now):
        run_loop(config(tmp_path, resume="auto", **sections), display=Dies(3, total=4, stream=io.StringIO()))
    again = run_loop(config(tmp_path, resume="auto", **sections)).run_dir
    assert metrics_of(again) == metrics_of(whole) and rollouts_of(again) == rollouts_of(whole)
    assert adapter_bytes(again) == adapter_bytes(whole) != {}


def test_ahead_of_training_it_is_the_version_that_sampled(tmp_path: Path):
    """With sampling ahead of training the version is kept until its groups are scored."""
    rollout = {"prompts_per_step": 4, "group_size": 4, "max_tokens": 8, "max_staleness": 2}
    train = {"steps": 4}
    result = run_loop(config(tmp_path, teacher={**SELF, "context": "answer"}, rollout=rollout, train=train))
    assert result.steps == 4
    for step in metrics_of(result.run_dir):
        assert step["teacher/scored_frac"] == 1 and step["rollout/error_frac"] == 0


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A live server of the starter, whose answers to POST /v1/completions have `prompt_logprobs`."""
    with served(tmp_path_factory.mktemp("state"), [chat.router, completions.router]) as server:
        yield server


def endpoint(site: Served, **options) -> dict:
    return {"base_url": f"{site.url}/v1", "model": site.server.config.served_name, **options}


@pytest.mark.parametrize("top_k", [0, 3])
def test_a_server_is_the_teacher_that_it_serves(tmp_path: Path, better: str, site: Served, top_k: int):
    """Over HTTP the same as in this process."""
    steps = {}
    for name, teacher in {"there": endpoint(site), "here": {"model": "starter"}}.items():
        sections = {"teacher": {**teacher, "top_k": top_k}, "train": {"steps": 1}, "rewards": []}
        (steps[name],) = metrics_of(run_loop(config(tmp_path / name, adapters={"start": better}, **sections)).run_dir)
    here, there = steps["here"], steps["there"]
    assert abs(here["teacher/kl"]) > 0.01
    for metric in ("teacher/kl", "teacher/mass", "teacher/agreement", "teacher/tokens", "optim/grad_norm"):
        assert there[metric] == pytest.approx(here[metric], rel=1e-3), metric


def test_requests_of_all_groups_together_are_bounded(site: Served, monkeypatch: pytest.MonkeyPatch):
    """`concurrency` is of the server, not of a group."""
    backend, under_way, most = EndpointTeacher(TeacherConfig(**endpoint(site, concurrency=3))), 0, 0

    async def counted(http, ids):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.005)
        under_way -= 1
        return [None, *({str(id): {"logprob": -1.0}} for id in ids[1:])]

    async def three_groups() -> None:
        rows = [(number, 5) for number in range(4)]
        await asyncio.gather(*(backend.score((1, prompt), rows, PolicyVersion.base()) for prompt in range(3)))

    monkeypatch.setattr(backend, "_ask", counted)
    asyncio.run(three_groups())
    assert most == 3


@pytest.mark.parametrize(
    "options",
    [
        {"model": "another"},
        {"top_k": 21},
        {"base_url": "http://127.0.0.1:9/v1", "timeout_s": 0.2},
    ],
)
def test_a_server_that_cannot_be_asked(tmp_path: Path, site: Served, monkeypatch: pytest.MonkeyPatch, options: dict):
    monkeypatch.setattr(teacher_module, "FIRST_DELAY_S", 0.0)
    monkeypatch.setenv("OPENAI_API_KEY", "very-secret")
    with raises(ConfigError) as refused:
        run_loop(config(tmp_path, teacher=endpoint(site, **options), rewards=[]))
    assert refused.value.field == "teacher.base_url" and "very-secret" not in str(refused.value)


def test_a_server_with_another_tokenizer(site: Served):
    backend = EndpointTeacher(TeacherConfig(**endpoint(site)))
    tokenizer = starter().tokenizer

    class Shifted:
        """Gives each text the ids of another."""

        def __call__(self, text: str, **options) -> dict:
            return {"input_ids": [id + 1 for id in tokenizer(text, **options)["input_ids"]]}

        def decode(self, ids: list[int]) -> str:
            return str(tokenizer.decode([id - 1 for id in ids]))

    with raises(ConfigError, field="teacher.base_url"):
        asyncio.run(backend.check_tokenizer(cast(Any, Shifted())))
    asyncio.run(backend.check_tokenizer(tokenizer))


# ---- what is refused before the first step ----


def a_starter(folder: Path, **options) -> Path:
    """A copy of the starter, with other options in its configuration."""
    model = Path(shutil.copytree(STARTER_DIR, folder))
    written = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**written, **options}))
    return model


def test_another_tokenizer(tmp_path: Path):
    model = a_starter(tmp_path / "other")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[40:42]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    with raises(ConfigError) as refused:
        run_loop(config(tmp_path, teacher={"model": str(model)}, rewards=[]))
    assert refused.value.field == "teacher.model"


def test_a_context_that_does_not_fit(tmp_path: Path):
    model = a_starter(tmp_path / "short", max_position_embeddings=24)
    with raises(ConfigError, field="teacher"):
        run_loop(config(tmp_path, teacher={"model": str(model)}, rewards=[], rollout={"max_tokens": 20}))


def test_a_column_that_no_prompt_has(tmp_path: Path):
    with raises(ConfigError, field="teacher.context"):
        make_plan(config(tmp_path, teacher={**SELF, "context": "hints"}, rewards=[]))


def test_check_says_what_the_teacher_takes(tmp_path: Path, better: str):
    """Its weights are in the estimate, where they are not the policy's own; the step that is tried has its term."""
    whole = check(config(tmp_path, teacher={"model": "starter", "top_k": 2}, rewards=[]))
    assert whole.memory.teacher == whole.memory.weights > 0 and whole.trained_step.grad_norm is not None
    assert not whole.trained_step.made_up and abs(whole.trained_step.teacher["teacher/kl"]) < 1e-3
    assert not any("equal" in warning for warning in whole.warnings)
    assert check(config(tmp_path, teacher={"adapter": better}, rewards=[])).memory.teacher == 0


# ---- a group ----


class Counting:
    """A teacher's backend that gives every token -1 and remembers what it was asked."""

    context_length, weights = None, 0

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[int, ...], list[tuple[int, ...]], str]] = []

    async def score(self, prompt_ids, completions, sampled_by):
        self.asked.append((prompt_ids, list(completions), str(sampled_by)))
        if len(prompt_ids) > 200:
            raise ContextLengthError("the prompt is too long")
        return [SequenceScores(logprobs=(-1.0,) * len(ids), top=((),) * len(ids)) for ids in completions]

    def close(self) -> None:
        pass


def group_of(tiny, rewards: tuple[float | None, ...], **columns) -> RolloutGroup:
    system: Message = {"role": "system", "content": "Be short."}
    messages = (system, Message(role="user", content="2+2= {context}"))
    prompt = encode_prompt(Prompt(id="0", messages=messages, columns=columns), tiny.tokenizer)
    rollouts = []
    for number, reward in enumerate(rewards):
        said = Completion(
            token_ids=(10 + number, 3),
            logprobs=(-0.5, -0.5),
            text=f"answer {number}",
            finish_reason=FinishReason.STOP,
            version=PolicyVersion("run", 3),
        )
        rollouts.append(Rollout(turns=(Turn(prompt.token_ids, said),), reward=reward))
    return RolloutGroup(prompt=prompt, rollouts=tuple(rollouts))


def taught(tiny, group: RolloutGroup, **options) -> tuple[RolloutGroup, Counting]:
    backend = Counting()
    found = asyncio.run(Teacher(TeacherConfig(**options), backend, tiny.tokenizer)(group))
    return found, backend


def test_a_group_is_asked_about_once(tiny):
    """And what has failed already is not."""
    group = group_of(tiny, (1.0, 0.0, None))
    group = replace(group, rollouts=(*group.rollouts[:2], replace(group.rollouts[2], error="lost")))
    found, backend = taught(tiny, group, adapter="x")
    assert backend.asked == [(group.prompt.token_ids, [(10, 3), (11, 3)], "run@3")]
    assert [len(each.teacher) for each in found.rollouts] == [1, 1, 0] and found.rollouts[2].error == "lost"
    assert group_from_json(json.loads(json.dumps(group_to_json(found)))) == found


def test_the_best_completion_is_for_those_that_are_worse(tiny):
    found, backend = taught(tiny, group_of(tiny, (1.0, 0.0, 0.5)), **SELF, context="best_completion")
    assert [len(each.teacher) for each in found.rollouts] == [0, 1, 1]
    ((prompt_ids, completions, _),) = backend.asked
    assert completions == [(11, 3), (12, 3)] and "answer 0" in tiny.tokenizer.decode(prompt_ids)
    found, _ = taught(tiny, group_of(tiny, (0.0, 0.0, None)), **SELF, context="best_completion")
    assert [len(each.teacher) for each in found.rollouts] == [0, 0, 1]  # the last could not be scored


def test_a_row_without_context(tiny):
    """The policy would be its own teacher there; another one reads the prompt as it is."""
    group = group_of(tiny, (1.0, 0.0), hint=None)
    assert taught(tiny, group, **SELF, context="hint")[1].asked == []
    ((prompt_ids, _, _),) = taught(tiny, group, adapter="x", context="hint")[1].asked
    assert prompt_ids == group.prompt.token_ids


def test_the_template_takes_texts_with_braces(tiny):
    prompt = group_of(tiny, (1.0, 0.0)).prompt
    said = with_context(prompt, "it is {prompt}", template="{prompt} Hint: {context}")
    assert said.messages is not None and said.messages[-1].get("content") == "2+2= {context} Hint: it is {prompt}"
    assert said.messages[0] == {"role": "system", "content": "Be short."} and said.token_ids == ()
    text = with_context(Prompt(id="1", text="2+2="), "4", template="{context}|{prompt}")
    assert text.text == "4|2+2=" and text.messages is None


def test_what_cannot_be_scored_is_left_out_and_says_why(tiny):
    found, _ = taught(tiny, group_of(tiny, (1.0, 0.0), hint="long " * 300), **SELF, context="hint")
    assert [each.error for each in found.rollouts] == ["the teacher could not score it: the prompt is too long"] * 2
    assert [each.reward for each in found.rollouts] == [None, None]
