"""`groupwise run` from one end to the other on a tiny model: what it writes, what it prints, and Ctrl-C."""

import json
import math
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from cli_project import Project, cli
from forked import ONE_SERVER, forked
from groupwise.cli.print import overall_rows
from groupwise.config.run import load_config, parse_config
from groupwise.engine.local import LocalEngine
from groupwise.model.load import load_model
from groupwise.run.loop import RunResult
from groupwise.store.adapters import AdapterStore
from groupwise.store.tracking import read_metrics, read_rollouts
from groupwise.types import PolicyVersion, SamplingParams, SamplingRequest
from threads import THREADS
from wording import wording


@pytest.fixture(scope="module")
def finished(model_dir, tmp_path_factory):
    """A finished run: (project, the result as JSON)."""
    project = Project.make(tmp_path_factory.mktemp("finished"), model=model_dir)
    before = Path.cwd()
    os.chdir(project.folder)
    try:
        result = cli("run", project.config, "run_dir=out", "scoring.workers=2", "--json")
    finally:
        os.chdir(before)
    assert result.exit_code == 0, result.stderr
    return project, json.loads(result.stdout), result.stderr


# ---- what a run leaves ----


def test_the_result_says_where_everything_is(finished):
    project, result, _ = finished
    assert result["version"] == "toy@3" and result["steps"] == 3 and not result["interrupted"]
    assert result["run_dir"] == "out" and result["adapter"] == "out/adapters/toy/v000003"
    assert (project.folder / result["adapter"] / "adapter_model.safetensors").is_file()
    metrics = [each["metric"] for each in result["comparison"]]
    assert metrics[0] == "greedy/reward" and "sampled/odd/reward" in metrics and len(metrics) == 6
    assert all(set(each) == {"metric", "before", "after"} for each in result["comparison"])


def test_progress_is_on_stderr(finished):
    _, _, stderr = finished
    lines = stderr.splitlines()
    assert sum(re.match(r"step \d+/", line) is not None for line in lines) == 3
    assert [line.split(",")[0] for line in lines if line.startswith("evaluation")] == [
        "evaluation at step 0",
        "evaluation at step 2",
        "evaluation at step 3",
    ]


def test_the_saved_config_is_the_same_run(finished):
    project, _, _ = finished
    asked = load_config(project.config, [f"run_dir={project.folder / 'out'}", "scoring.workers=2"])
    saved = load_config(project.folder / "out" / "config.yaml")
    assert saved.model_copy(update={"run_dir": asked.run_dir}) == asked


def test_metrics_and_rollouts_are_those_of_three_steps(finished):
    project, _, _ = finished
    lines = read_metrics(project.folder / "out" / "metrics.jsonl")
    trained = [line for line in lines if "reward/mean" in line]
    assert [line["step"] for line in trained] == [1, 2, 3]
    for line in trained:
        assert line["rollout/count"] >= 6 and line["optim/refused"] == 0 and line["optim/lr"] >= 0
    assert [line["optim/lr"] > 0 for line in trained] == [False, True, True]  # as transformers warms up
    for step in (1, 2, 3):
        groups = read_rollouts(project.folder / "out" / "rollouts" / f"step_{step:06d}.jsonl")
        parent = PolicyVersion("toy", step - 1) if step > 1 else PolicyVersion.base()
        assert {rollout.completion.version for group in groups for rollout in group.rollouts} == {parent}
        assert any(rollout.advantage for group in groups for rollout in group.rollouts)


def test_versions_follow_each_other_and_the_last_is_active(finished):
    project, _, _ = finished
    store = AdapterStore(project.folder / "out" / "adapters")
    assert store.active == PolicyVersion("toy", 3) and not store.warnings
    infos = store.list()
    assert [info.version.number for info in infos] == [1, 2, 3]
    assert [str(info.parent) for info in infos] == ["base", "toy@1", "toy@2"]


@pytest.mark.slow
def test_the_adapter_is_what_was_evaluated_at_the_end(finished, monkeypatch):
    project, result, _ = finished
    monkeypatch.chdir(project.folder)
    again = cli("eval", "out/config.yaml", "--adapter", "out/toy@3", "--json")
    assert again.exit_code == 0, again.stderr
    after = {f"eval/{each['metric']}": each["after"] for each in result["comparison"]}
    metrics = json.loads(again.stdout)["metrics"]
    assert {key: metrics[key] for key in after} == pytest.approx(after)


def test_peft_loads_the_adapter_as_the_closing_page_says(finished, monkeypatch):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    project, result, _ = finished
    monkeypatch.chdir(project.folder)
    base = load_model(load_config("out/config.yaml").model)
    engine = LocalEngine(base)
    engine.load(PolicyVersion("toy", 3), Path(result["adapter"]))
    prompt = tuple(range(20, 40))
    request = SamplingRequest(
        prompt_ids=prompt, params=SamplingParams(max_tokens=8, temperature=0), version=PolicyVersion("toy", 3)
    )
    completion = engine.generate([request])[0][0]
    engine.close()
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base.name), result["adapter"])
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    with torch.no_grad():
        logprobs = model(ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
    theirs = logprobs.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(completion.logprobs), theirs, atol=1e-4, rtol=0)


# ---- what it prints ----


def test_the_closing_page(project):
    result = cli("run", project.config, "train.steps=1", "--set", "run_dir=my run", "train.learning_rate=0.5")
    assert result.exit_code == 0, result.stderr
    text = result.stdout
    assert text.splitlines()[0].split() == ["metric", "before", "after", "change"]
    assert text.count("What is 2") == 2 and "answer: 2" in text  # eval.show completions side by side
    assert "run      my run" in text and "adapter  my run/adapters/toy/v000001  (toy@1)" in text
    following = text.split("Next:\n")[1].split("With transformers")[0].splitlines()
    assert following == [
        "  groupwise chat 'my run'",
        "  groupwise ui 'my run'",
        "  groupwise report 'my run'",
        "  groupwise serve 'my run'",
        "  groupwise eval 'my run/config.yaml' --adapter 'my run'",
        "  groupwise push 'my run' --to OWNER/toy --dry-run",
    ]
    for line in (following[0] + " Hello --max-tokens 3", *following[2:3], *following[4:]):  # each works as it stands
        pasted = cli(*shlex.split(line)[1:])
        assert pasted.exit_code == 0, pasted.stderr
    assert "PeftModel.from_pretrained(model, 'my run/adapters/toy/v000001')" in text


def test_without_eval_the_training_reward_is_compared(project):
    result = cli("run", project.config, "eval=null", "train.steps=2", "run_dir=out", "--json")
    comparison = json.loads(result.stdout)["comparison"]
    rewards = [line["reward/mean"] for line in read_metrics(Path("out/metrics.jsonl"))]
    assert [(each["before"], each["after"]) for each in comparison] == [(rewards[0], rewards[1])]


@pytest.mark.parametrize(("best", "after"), [(None, math.nan), ("loss", 1.5)])
def test_a_held_out_loss_that_was_not_finite_ends_the_closing_table_and_not_the_command(tmp_path, best, after):
    """metrics.jsonl has null for it."""
    losses = (2.0, 1.5, None)
    lines = [json.dumps({"step": step, "eval/loss": loss}) + "\n" for step, loss in enumerate(losses)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    rows = {"data": {"source": "rows.jsonl"}}
    config = parse_config({"kind": "sft", **rows, "eval": rows | ({"best": best} if best else {})})
    result = RunResult(
        run_dir=tmp_path,
        version=PolicyVersion("run", 2),
        newest=PolicyVersion("run", 2),
        steps=2,
        interrupted=False,
        before={},
        after={},
        trained=True,
        loaded_by="AutoModelForCausalLM",
    )
    ((_, before, said),) = overall_rows(config, result)
    assert before == 2.0 and said == pytest.approx(after, nan_ok=True)


def test_a_reward_that_never_differs_trains_nothing_and_says_so(project):
    flat = ("rewards[0]=my_rewards:constant", "train.steps=1")
    result = cli("run", project.config, *flat, "run_dir=out", "--json")
    left = json.loads(result.stdout)
    assert (result.exit_code, left["trained"], left["adapter"]) == (1, False, None)
    wording(result.stderr.rpartition("\nerror: ")[2])
    wording(cli("run", project.config, *flat).stdout.rpartition("\nadapter ")[2])


def test_a_tie_keeps_the_base_and_is_not_called_a_run_that_trained_nothing(project):
    """Where `eval.best` found no version that is better, the run's policy is the base for every command."""
    tie = ("eval.best=greedy", "eval.every=1", "eval.patience=2", "train.steps=9", "train.learning_rate=1e-12")
    result = cli("run", project.config, *tie, "run_dir=out", "--json")
    left = json.loads(result.stdout)
    assert result.exit_code == 0, result.stderr
    assert (left["trained"], left["adapter"], left["version"]) == (True, None, "base")
    assert (left["out_of_patience"], left["steps"]) == (True, 2)
    assert json.loads(cli("adapters", "list", "--run", "out", "--json").stdout)["active"] == "base"
    refused, named = cli("chat", "out", "Hello"), cli("chat", "out@2", "Hello")
    assert (refused.exit_code, named.exit_code) == (2, 0)
    wording(refused.stderr)
    wording(cli("run", project.config, *tie, "run_dir=again").stdout.rpartition("\nstopped ")[2])


def test_all_parameters_train_and_the_model_is_saved(project):
    result = cli("run", project.config, "train.lora=null", "train.steps=1", "run_dir=out", "--json")
    saved = json.loads(result.stdout)["adapter"]
    assert saved == "out/model"
    again = cli("eval", "out/config.yaml", f"model={saved}", "--json")
    assert again.exit_code == 0, again.stderr


def test_a_run_directory_is_not_used_twice(project):
    assert cli("run", project.config, "train.steps=1", "run_dir=out").exit_code == 0
    again = cli("run", project.config, "train.steps=1", "run_dir=out")
    assert again.exit_code == 2
    wording(again.stderr)


# ---- Ctrl-C ----


@dataclass
class Ended:
    returncode: int | None
    stdout: str
    stderr: str


Process = subprocess.Popen | ForkServerProcess


@contextmanager
def real(folder: Path, *arguments: str | Path) -> Iterator[subprocess.Popen]:
    """`python -m groupwise ARGUMENTS...`, as `forked` has it."""
    with (folder / "stdout").open("w") as stdout, (folder / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "groupwise", *map(str, arguments)],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": THREADS},
            stdout=stdout,
            stderr=stderr,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def status_of(process: Process) -> int | None:
    return process.exitcode if isinstance(process, ForkServerProcess) else process.poll()


def ended(project: Project, process: Process) -> Ended:
    """What came of a process that ends by itself."""
    until(lambda: status_of(process) is not None, project, process, ends=True)
    return Ended(status_of(process), *((project.folder / name).read_text() for name in ("stdout", "stderr")))


def interrupted(project: Project, flag: Path, *, signals: int, start: Callable[..., Any]) -> Ended:
    """A long run in a process of its own, interrupted while its second step is being scored."""
    rows = [json.loads(line) for line in (project.folder / "prompts.jsonl").read_text().splitlines()]
    (project.folder / "prompts.jsonl").write_text("".join(json.dumps(row | {"flag": str(flag)}) + "\n" for row in rows))
    (project.folder / "held_out.jsonl").write_text((project.folder / "prompts.jsonl").read_text())
    arguments = ["run", project.config, "rewards[0]=my_rewards:wait", "run_dir=out", "train.steps=500", "eval.every=0"]
    with start(*arguments, "scoring.workers=2", "eval.data.limit=1", "eval.modes=[greedy]") as process:
        until(lambda: "step 1/500" in metrics_of(project), project, process)
        flag.unlink()
        until(flag.exists, project, process)
        os.kill(process.pid, signal.SIGINT)
        if signals == 2:  # the second when the first has been heard: two that arrive together count as one
            until(lambda: "stopping after" in (project.folder / "stderr").read_text(), project, process)
            os.kill(process.pid, signal.SIGINT)
        return ended(project, process)


def metrics_of(project: Project) -> str:
    path = project.folder / "out" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return " ".join(f"step {json.loads(line)['step']}/500" for line in lines if "reward/mean" in line)


def until(condition, project: Project, process: Process, *, ends: bool = False, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert ends or status_of(process) is None, (project.folder / "stderr").read_text()
        assert time.monotonic() < deadline, f"waited {seconds} s"
        time.sleep(0.01)


@ONE_SERVER
def test_waiting_for_vllm_is_shown_and_ctrl_c_ends_it(project):
    """Nothing has been begun that could be finished: the first one ends it at once."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"  # where nobody answers
        arguments = ["run", project.config, "engine=vllm", f"vllm.urls=[{url}]"]
        with forked("groupwise", *arguments, folder=project.folder) as process:
            said = project.folder / "stderr"
            until(lambda: said.exists() and f"waiting for vLLM at {url}" in said.read_text(), project, process)
            os.kill(process.pid, signal.SIGINT)
            assert ended(project, process).returncode == 130


@pytest.mark.slow
def test_ctrl_c_finishes_the_step_saves_and_exits_with_130(project, tmp_path):
    ran = interrupted(project, tmp_path / "scoring", signals=1, start=partial(real, project.folder))
    assert ran.returncode == 130, ran.stderr
    assert "Traceback" not in ran.stderr and "evaluation at step" in ran.stderr
    assert "stopping after this step" in ran.stderr
    assert "of 500, as asked; everything is saved" in ran.stdout and "metric" in ran.stdout
    store = AdapterStore(project.folder / "out" / "adapters")
    steps = [line["step"] for line in read_metrics(project.folder / "out" / "metrics.jsonl") if "reward/mean" in line]
    assert steps[-1] < 500 and store.active.number == steps[-1] and not store.warnings
    engine = LocalEngine(load_model(load_config(project.config).model))
    engine.load(store.active, store.path(store.active))
    request = SamplingRequest(prompt_ids=(5, 6, 7), params=SamplingParams(max_tokens=2), version=store.active)
    assert engine.generate([request])[0][0].version == store.active
    engine.close()


def test_a_second_ctrl_c_stops_at_once(project, tmp_path):
    ran = interrupted(
        project, tmp_path / "scoring", signals=2, start=partial(forked, "groupwise", folder=project.folder)
    )
    assert ran.returncode == 130, ran.stderr
    assert "Traceback" not in ran.stderr and ran.stdout == "" and "stopped" in ran.stderr
    assert not AdapterStore(project.folder / "out" / "adapters").warnings


# ---- a loss function beside the configuration ----

LOSSES = """
import torch

def topr(tokens, ratio_N):
    weight_N = torch.where(tokens.advantages_N < 0, ratio_N.detach().clamp(max=1.0), 1.0)
    return -weight_N * tokens.advantages_N * tokens.logprobs_N

def plain(tokens, ratio_N):
    return -ratio_N * tokens.advantages_N

def summed(tokens, ratio_N):
    return plain(tokens, ratio_N).sum()
"""


@pytest.fixture
def with_losses(model_dir, tmp_path, monkeypatch) -> Project:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_losses.py").write_text(LOSSES, encoding="utf-8")
    return Project.make(tmp_path, model=model_dir)


def test_a_loss_function_of_ones_own_trains_as_the_preset_that_it_repeats(with_losses):
    weights = {}
    for loss in ("my_losses:plain", "importance_sampling", "my_losses.py:topr"):
        given = (f"algo.policy_loss={loss}", f"run_dir=run{len(weights)}", "eval=null", "algo.kl=k3", "train.steps=2")
        ran = cli("run", with_losses.config, *given)
        assert ran.exit_code == 0, ran.stderr
        adapter = Path(f"run{len(weights)}", "adapters/toy/v000002/adapter_model.safetensors")
        weights[loss] = adapter.read_bytes()
    assert weights["my_losses:plain"] == weights["importance_sampling"] != weights["my_losses.py:topr"]


@pytest.mark.parametrize("loss", ["my_losses:plian", "my_loses:plain", "my_losses.plain", "my_losses:summed"])
def test_a_loss_function_that_is_wrong(with_losses, loss: str):
    ran = cli("run", with_losses.config, f"algo.policy_loss={loss}", "eval=null", "train.steps=1")
    assert ran.exit_code != 0
    wording(re.sub(r"\[\d+\]", "[N]", f"\n{ran.stderr}".rpartition("\nerror: ")[2]))
