"""lm-eval and inspect-ai measure a trained version through `groupwise eval`, each with a Python that has it.

    GROUPWISE_LM_EVAL_PYTHON, GROUPWISE_INSPECT_PYTHON    those Pythons; without them this one, if it has them

`pip install 'lm_eval[api]' transformers torch` and `pip install inspect-ai openai` make them. Nothing is downloaded:
the tasks are rows of a file here.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from groupwise.errors import ConfigError
from groupwise.run.suite import Metric, SuiteRun, Target, run_suite
from groupwise.store.export import export_model
from groupwise.store.locate import find_adapter, find_policy
from wording import raises

pytestmark = pytest.mark.slow

RUN = """
name: sums
model: starter
data: {source: rows.jsonl}
rewards: ["groupwise.rewards.text:exact_match"]
rollout: {prompts_per_step: 8, group_size: 8, max_tokens: 8}
train: {steps: 3, learning_rate: 2.0e-3}
"""
CHOICE = """
task: sums_choice
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
TEXT = """
task: sums_text
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
"""
INSPECT = """
import json
from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import match
from inspect_ai.solver import generate


@task
def sums():
    rows = map(json.loads, (Path(__file__).parent / "rows.jsonl").read_text().splitlines())
    samples = [Sample(input=row["prompt"], target=row["answer"]) for row in rows]
    return Task(dataset=MemoryDataset(samples), solver=generate(), scorer=match())
"""
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def python_with(package: str, variable: str) -> str:
    """The Python that has the suite; the test is skipped without."""
    python = os.environ.get(variable, sys.executable)
    if subprocess.run([python, "-c", f"import {package}"], capture_output=True, check=False).returncode:
        pytest.skip(f"{python} has no {package}; {variable} may name a Python that has")
    return python


def groupwise(*words: object, folder: Path = Path(".")) -> Any:
    """What `groupwise ... --json` answers."""
    command = [sys.executable, "-m", "groupwise", *map(str, words), "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **OFFLINE}, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with rows, tasks and a run of three steps."""
    folder: Path = tmp_path_factory.mktemp("suites")
    draw, rows = random.Random(0), []
    for _ in range(40):
        a, b = draw.randint(1, 49), draw.randint(1, 49)
        choices = [str(a + b + each) for each in (0, *draw.sample([-10, -2, -1, 1, 2, 10, 11], 3))]
        draw.shuffle(choices)
        asked = f"What is {a} + {b}? Reply with just the number."
        rows.append({"prompt": asked, "answer": str(a + b), "choices": choices, "gold": choices.index(str(a + b))})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tasks").mkdir()
    (folder / "tasks/choice.yaml").write_text(CHOICE % (folder / "rows.jsonl"))
    (folder / "tasks/text.yaml").write_text(TEXT % (folder / "rows.jsonl"))
    (folder / "sums.py").write_text(INSPECT)
    (folder / "run.yaml").write_text(RUN)
    groupwise("run", "run.yaml", folder=folder)
    return folder


@pytest.fixture
def trained(place, monkeypatch) -> Path:
    """The same, as the working directory."""
    monkeypatch.chdir(place)
    return place


def samples_of(folder: Path, task: str) -> list[Any]:
    """What lm-eval logged of each sample (--log_samples), in order."""
    [path] = folder.rglob(f"samples_{task}_*.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row["filtered_resps"] for row in sorted(rows, key=lambda row: row["doc_id"])]


def test_lm_eval_measures_what_transformers_does(trained):
    """By log-probabilities of texts (echo) and by generated ones: through our endpoint, over base and adapter, as with
    lm-eval's own model on the merged weights. The log-probabilities themselves agree to 1e-4."""
    python = python_with("lm_eval, transformers, torch", "GROUPWISE_LM_EVAL_PYTHON")
    common = ("--tasks", "sums_choice,sums_text", "--suite-args", "--log_samples")
    measured = groupwise(
        *("eval", "--suite", "lm-eval", "--adapter", "sums", "--python", python),
        *("--include-path", "tasks", "--output", "ours", *common),
    )
    export_model(find_policy("sums"), Path("merged"), format="merged", dtype="float32")
    command = [python, "-m", "lm_eval", "--model", "hf", "--model_args", "pretrained=merged,dtype=float32"]
    words = ["--device", "cpu", "--tasks", "sums_choice,sums_text", "--include_path", "tasks", "--log_samples"]
    subprocess.run([*command, *words, "--output_path", "theirs"], env={**os.environ, **OFFLINE}, check=True)
    theirs = json.loads(next(Path("theirs").rglob("results_*.json")).read_text())["results"]
    for name, metric in measured["metrics"].items():
        task, kind = name.split("/")
        assert abs(metric["value"] - theirs[task][f"{kind},none"]) <= metric["stderr"], name
    assert set(measured["metrics"]) == {"sums_choice/acc", "sums_choice/acc_norm", "sums_text/exact_match"}
    pairs = zip(*(samples_of(Path(side), "sums_choice") for side in ("ours", "theirs")), strict=True)
    for ours, others in pairs:
        assert [float(logprob) for logprob, _ in ours] == pytest.approx([float(each) for each, _ in others], abs=1e-4)
        assert [greedy for _, greedy in ours] == [greedy for _, greedy in others]
    assert samples_of(Path("ours"), "sums_text") == samples_of(Path("theirs"), "sums_text")
    [kept] = groupwise("adapters", "show", "sums", "--run", "sums")["evaluations"]
    assert kept["metrics"] == measured["metrics"] and kept["suite"] == "lm-eval" and measured["recorded"]


def test_lm_eval_by_the_chat_template(trained):
    """Of a base model, which is no version and keeps nothing; the starter knows chats, and answers most sums."""
    python = python_with("lm_eval", "GROUPWISE_LM_EVAL_PYTHON")
    words = ("--chat", "--tasks", "sums_text", "--include-path", "tasks", "--limit", 20, "--python", python)
    measured = groupwise("eval", "run.yaml", "--suite", "lm-eval", *words)
    metric = measured["metrics"]["sums_text/exact_match"]
    assert metric["value"] > 0.3 and metric["samples"] == 20
    assert (measured["version"], measured["chat"], measured["recorded"]) == ("base", True, False)


def test_inspect_evaluates_a_version(trained):
    python = python_with("inspect_ai, openai", "GROUPWISE_INSPECT_PYTHON")
    words = ("--tasks", "sums.py", "--limit", 20, "--python", python, "--suite-args", "--temperature 0 --max-tokens 8")
    measured = groupwise("eval", "--suite", "inspect", "--adapter", "sums@2", *words)
    metric = measured["metrics"]["sums/match/accuracy"]
    assert metric["value"] > 0.3 and metric["samples"] == 20 and metric["stderr"] > 0
    store = find_adapter("sums@2").store
    assert store is not None and [each["suite"] for each in store.evaluations(store.resolve("sums@2"))] == ["inspect"]
    [folder] = Path("runs").glob("*/suites/sums@2-inspect-*")
    assert list(folder.glob("*.json"))


# ---- without either ----


@pytest.fixture
def stand_in(tmp_path):
    """A Python that has packages of the suite's names, of which `inspect_ai` does what its `said` is."""

    def made(said: str) -> str:
        for name in ("inspect_ai", "openai"):
            (tmp_path / "packages" / name).mkdir(parents=True)
            (tmp_path / "packages" / name / "__init__.py").touch()
        (tmp_path / "packages" / "inspect_ai" / "__main__.py").write_text(said)
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "packages"} exec {sys.executable} "$@"\n')
        python.chmod(0o755)
        return str(python)

    return made


SAYS = """
import json, os, sys, urllib.request
url, key = os.environ["GROUPWISE_BASE_URL"], os.environ["GROUPWISE_API_KEY"]
asked = json.dumps({"model": "base", "prompt": "2 + 3 =", "max_tokens": 1}).encode()
headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
answer = json.load(urllib.request.urlopen(urllib.request.Request(url + "/completions", asked, headers)))
score = {"name": "said", "scored_samples": 1, "metrics": {"tokens": {"value": answer["usage"]["completion_tokens"]}}}
folder = sys.argv[sys.argv.index("--log-dir") + 1]
log = {"status": "success", "eval": {"task": "one"}, "results": {"scores": [score]}}
open(folder + "/log.json", "w").write(json.dumps(log))
print("on stdout", url)
"""


def test_a_suite_talks_to_an_endpoint_that_goes_with_it(tmp_path, stand_in, capfd):
    """A program in the suite's place asks the endpoint that its environment names, and what it writes is read; its
    stdout is not ours."""
    said: list[str] = []
    run = SuiteRun(suite="inspect", tasks=("one",), output=tmp_path / "out", python=stand_in(SAYS))
    target = Target(model="starter", tokenizer="starter")
    result = run_suite(run, target, say=said.append)
    assert result.metrics == {"one/said/tokens": Metric(value=1.0, samples=1)}
    out, err = capfd.readouterr()
    assert out == "" and "on stdout" in err
    url = err.split("on stdout ")[1].split()[0]
    assert said == [f"serving base over starter on {url.removesuffix('/v1')}"]
    with raises(ConfigError):
        run_suite(run, target, say=said.append)
