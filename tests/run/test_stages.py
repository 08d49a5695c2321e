"""Supervised runs (`kind: sft`), and runs that come before a run (`stages`)."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from groupwise.config.run import RunConfig
from groupwise.config.stages import stage_config
from groupwise.errors import ConfigError, DataError
from groupwise.model.chat import encode_prompt
from groupwise.model.load import plain_attention
from groupwise.run.check import check
from groupwise.run.evaluate import Evaluation, load_evaluations
from groupwise.run.loop import RunResult, run_loop
from groupwise.run.stop_request import StopRequest
from groupwise.store.checkpoint import read
from groupwise.store.tracking import read_metrics
from groupwise.tasks.answers import answer_turns
from running_jobs import Dies, DiesAfter, adapter_bytes, from_file, metrics_of, rollouts_of
from slow_cases import long_case
from wording import raises, wording

ROWS = [
    {"prompt": f"Spell {word} backwards.", "answer": word[::-1]} for word in ("abc", "bad", "cab", "dab", "fed", "bee")
]


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., RunConfig]:
    """`file(kind="sft", ...)`: a run in `tmp_path` with its examples; sections are merged into it."""
    return file_in(tmp_path)


def file_in(folder: Path) -> Callable[..., RunConfig]:
    rollout = {"prompts_per_step": 3, "group_size": 4, "max_tokens": 8, "refill": 1.0}
    return from_file(folder, ROWS, rewards=["groupwise.rewards.text:exact_match"], rollout=rollout)


def test_examples_longer_than_the_context_are_passed_over_and_counted(file, tmp_path: Path):
    """Of six examples two are too long: each epoch passes over them, and one line says so."""
    rows = [*ROWS[:4], *({"prompt": "Say it.", "answer": "la " * 4000} for _ in range(2))]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = file(kind="sft", rewards=None, rollout={"prompts_per_step": 4})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run_loop(config)
    assert len([each for each in caught if "rows.jsonl:" in str(each.message)]) == 1
    steps = [row for row in read_metrics(result.run_dir / "metrics.jsonl") if "data/too_long" in row]
    assert all(row["teacher/demonstrations"] == 4 for row in steps)
    assert 6 <= sum(row["data/too_long"] for row in steps) <= 8  # of four epochs, less what the last did not come to
    (said,) = [each for each in check(config).warnings if "rows.jsonl:5" in each]
    assert said.startswith("2 of the first 6 examples")
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[-1]) + "\n")
    with pytest.raises(ConfigError) as refused:
        check(config)
    assert refused.value.field == "data"
    with pytest.raises(DataError), pytest.warns(UserWarning, match=r"rows\.jsonl:1"):
        run_loop(config)


@pytest.mark.parametrize("streaming", [False, True])
def test_examples_of_several_sources(file, tmp_path: Path, streaming: bool):
    """Three of four examples are of the second source, which has the fewest; the first is renamed, cut and filtered."""
    (tmp_path / "asked.jsonl").write_text(
        "".join(json.dumps({"q": row["prompt"], "answer": row["answer"]}) + "\n" for row in ROWS)
    )
    (tmp_path / "few.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    (tmp_path / "my_filters.py").write_text("def short(row): return 'bad' not in row['prompt']\n")
    renamed = {"columns": {"prompt": "q"}, "split": "train[:4]", "filter": "my_filters:short"}
    sources = [{"source": "asked.jsonl", "weight": 1, **renamed}, {"source": "few.jsonl", "weight": 3}]
    data = {"source": None, "sources": sources, "streaming": streaming}
    held_out = {
        "data": {"sources": [{"source": "rows.jsonl"}, {"source": "few.jsonl"}]},
        "every": 0,
        "modes": ["greedy"],
    }
    eval_by = {**held_out, "by": "data_source"}
    config = file(kind="sft", data=data, rollout={"prompts_per_step": 4}, eval=eval_by)
    result = run_loop(config)
    drawn = [group["prompt"]["columns"]["data_source"] for group in rollouts_of(result.run_dir)]
    assert (drawn.count("few.jsonl"), drawn.count("asked.jsonl")) == (12, 4)
    evaluated = load_evaluations(result.run_dir, 4)["greedy"].metrics(by="data_source")
    assert {"eval/greedy/rows.jsonl/reward", "eval/greedy/few.jsonl/reward"} <= evaluated.keys()
    asked, few = check(config).plan.source.counts
    assert (asked.rows, asked.filtered, asked.used, asked.share, asked.whole) == (4, 1, 3, 0.25, True)
    assert (few.rows, few.filtered, few.used, few.share) == (1, 0, 1, 0.75)


STAGE = {"name": "examples", "kind": "sft", "train": {"steps": 3, "learning_rate": 5e-3}}


def test_the_datasets_answers_become_likelier(file):
    """Nothing is sampled but what evaluates; the loss is the mean cross-entropy over the answers' tokens."""
    result = run_loop(file(kind="sft", eval={"data": {"source": "rows.jsonl"}, "every": 0}, train={"steps": 8}))
    rows = [row for row in read_metrics(result.run_dir / "metrics.jsonl") if "loss/cross_entropy" in row]
    losses = [row["loss/cross_entropy"] for row in rows]
    assert len(losses) == 8 and losses[-1] < 0.7 * losses[0]
    assert all(
        row["rollout/count"] == 0 and row["teacher/demonstrations"] == 3 and row["perf/tok_s"] > 0 for row in rows
    )
    assert result.trained and set(load_evaluations(result.run_dir, 8)) == {"greedy", "sampled"}
    found = [event["finding"]["id"] for event in events(result.run_dir) if "finding" in event]
    assert not [each for each in found if each.startswith(("reward", "group"))]  # nothing of what was not sampled


def test_its_gradient_is_that_of_the_mean_cross_entropy(file, starter):
    """Against a plain forward of the model, a row at a time."""
    from groupwise.train.learner import Learner

    config = file(kind="sft", rewards=None, train={"steps": 1, "lora": {"rank": 4}})
    source = config.data
    assert source is not None
    learner = Learner(starter, lora=config.train.lora)
    with torch.no_grad():
        for parameter in learner.parameters:
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    from groupwise.algo.distillation import demonstrations
    from groupwise.tasks.prompts import open_prompts
    from groupwise.types import Rollout, RolloutGroup

    groups = []
    for prompt in open_prompts(source, folder=config.folder, kind="sft").known:
        prompt = encode_prompt(prompt, starter.tokenizer)
        turns = answer_turns(prompt, starter.tokenizer)
        groups.append(RolloutGroup(prompt=prompt, rollouts=(), demonstrations=(Rollout(turns=turns),)))
    samples = demonstrations(groups)
    metrics = learner.forward_backward_supervised(samples)
    mine = [parameter.grad.clone() for parameter in learner.parameters]
    learner.zero_grad()
    total, tokens = torch.zeros(()), 0
    for sample in samples:
        ids = torch.tensor([(*sample.prompt_ids, *sample.completion_ids)])
        with plain_attention(learner.model):
            logits = learner.model(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 : -1]
        total = total + torch.nn.functional.cross_entropy(logits, torch.tensor(sample.completion_ids), reduction="sum")
        tokens += len(sample.completion_ids)
    (total / tokens).backward()
    assert metrics["loss/cross_entropy"] == pytest.approx(float(total.detach()) / tokens, rel=1e-5)
    for grad, parameter in zip(mine, learner.parameters, strict=True):
        torch.testing.assert_close(grad, parameter.grad, rtol=1e-3, atol=1e-6)


def events(run_dir: Path) -> list[dict[str, Any]]:
    file = run_dir / "health.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def texts(evaluation: Evaluation) -> list[str]:
    return [rollout.completion.text for group in evaluation.groups for rollout in group.rollouts]


@pytest.mark.long
def test_a_run_goes_on_from_its_stages(file):
    rewards, evaluated = ["running_jobs:says_a"], {"data": {"source": "rows.jsonl"}}
    result = run_loop(file(stages=[STAGE, {**STAGE, "name": "again"}], rewards=rewards, eval=evaluated))
    first, second = (result.run_dir / "stages" / name for name in ("examples", "again"))
    assert [len(metrics_of(run)) for run in (first, second)] == [3 + 2, 3 + 2]  # steps, evaluations before and after
    for before, after in ((first, second), (second, result.run_dir)):  # what one leaves is what the next begins with
        step = read(next((before / "checkpoints").iterdir())).step
        left, begun = (load_evaluations(run, at)["greedy"] for run, at in ((before, step), (after, 0)))
        assert left.mean() == begun.mean() and texts(left) == texts(begun)
    assert result.steps == 4 and result.version.number > 0
    kl = [row["kl/mean"] for row in read_metrics(result.run_dir / "metrics.jsonl") if "kl/mean" in row]
    assert kl and kl[0] == pytest.approx(0, abs=1e-9)  # from what the stages left


TWICE = [STAGE, {**STAGE, "name": "again", "train": {"steps": 4, "learning_rate": 1e-3}}]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """A run with two stages that nothing disturbed."""
    return run_loop(file_in(tmp_path_factory.mktemp("whole"))(stages=TWICE))


@pytest.mark.parametrize("after", [long_case(2), 3 + 2, long_case(3 + 4 + 2)])
def test_one_that_dies_in_a_stage_goes_on_there(file, tmp_path: Path, whole: RunResult, after: int):
    config = file(stages=TWICE, resume="auto")
    with pytest.raises(Dies.Now):
        run_loop(config, display=DiesAfter(after))
    again = run_loop(config)
    (only,) = (tmp_path / "runs").iterdir()
    assert again.run_dir == only and adapter_bytes(only) == adapter_bytes(whole.run_dir)
    for run in ("stages/examples", "stages/again", "."):
        assert metrics_of(only / run) == metrics_of(whole.run_dir / run)


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_stage_that_is_over_is_not_taken_for_that_of_another_configuration(file, tmp_path: Path, resume: str):
    """The first stage was finished, the second one killed, and then the first one's learning rate changed."""
    run_dir = tmp_path / "here"
    config = file(stages=TWICE, resume=resume, run_dir=str(run_dir))
    with pytest.raises(Dies.Now):
        run_loop(config, display=DiesAfter(3 + 2))
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    faster = [{**STAGE, "train": {"steps": 3, "learning_rate": 1e-2}}, TWICE[1]]
    with raises(ConfigError):
        run_loop(file(stages=faster, resume=resume, run_dir=str(run_dir)))
    assert before == {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


def test_a_stage_that_is_stopped_ends_the_run(file):
    stop = StopRequest()
    stop.requested = True
    result = run_loop(file(stages=[STAGE]), stop=stop)
    assert result.interrupted and result.run_dir.name == "examples" and result.steps == 1
    assert not (result.run_dir.parents[1] / "metrics.jsonl").exists()


def test_a_stage_is_the_file_with_its_changes(file):
    config = file(
        stages=[STAGE], algo={"policy_loss": "dapo"}, rollout={"stream_groups": 2}, chat={"template_kwargs": {}}
    )
    stage = stage_config(config, 0)
    assert (stage.kind, stage.train.steps, stage.train.learning_rate, stage.train.lora) == (
        "sft",
        3,
        5e-3,
        config.train.lora,
    )
    assert stage.algo.policy_loss == "grpo" and stage.rollout.stream_groups == 0  # of sampling alone
    assert stage.rollout.prompts_per_step == 3 and stage.rewards == config.rewards and not stage.stages


@pytest.mark.parametrize(
    ("sections", "field"),
    [
        ({"stages": [{"kind": "sft"}]}, "stages[0].name"),
        ({"stages": [STAGE, STAGE]}, "stages[1].name"),
        ({"stages": [{**STAGE, "resume": "auto"}]}, "stages[0].resume"),
        ({"stages": [{**STAGE, "train": {"stepz": 3}}]}, "stages[0]"),
        ({"stages": [STAGE], "adapters": {"start": "x"}}, "adapters.start"),
        ({"stages": [STAGE], "train": {"lora": None}}, "stages"),
        ({"kind": "sft", "algo": {"kl": "k3", "kl_coeff": 0.1}}, "algo.kl"),
        ({"kind": "sft", "rollout": {"stream_groups": 1}}, "rollout.stream_groups"),
        ({"kind": "sft", "data": None}, "data"),
        ({"kind": "sft", "rewards": None, "eval": {"data": {"source": "x.jsonl"}, "best": "sampled"}}, "eval.best"),
        ({"data": {"source": "rows.jsonl", "answer_key": "answer"}}, "data.answer_key"),
    ],
)
def test_what_cannot_be_is_refused(file, sections, field: str):
    with raises(ConfigError, field=field, kind="conflict"):
        file(**sections)


def test_what_is_wrong_with_a_stage_is_said_before_anything_is_trained(file, tmp_path: Path):
    with pytest.raises(DataError):
        run_loop(file(stages=[{**STAGE, "data": {"source": "none.jsonl"}}]))
    assert not (tmp_path / "runs").exists()


def test_check_tries_a_supervised_run(file):
    report = check(file(kind="sft", rewards=None))
    assert report.trained_step.grad_norm is not None and report.trained_step.grad_norm > 0
    assert report.trained_step.teacher["teacher/demonstrations"] > 0


def test_check_says_that_what_it_tries_is_from_before_the_stages(file):
    """The starter spells no word backwards, and the stage is what shows it."""
    config = file(stages=[STAGE], rewards=["groupwise.rewards.text:exact_match"])
    said = [warning for warning in check(config).warnings if "(examples)" in warning]
    (warning,) = said
    wording(warning)
