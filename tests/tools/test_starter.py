"""tools/starter.py: the starter is measured, and made anew."""

from __future__ import annotations

import functools
import json
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from groupwise.engine.local import LocalEngine
from groupwise.model.chat import encode_prompt
from groupwise.model.load import load_model
from groupwise.store.rundir import owned
from groupwise.types import Prompt, SamplingParams, SamplingRequest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import starter


def tool(*arguments: object) -> Result:
    """`python tools/starter.py ARGUMENTS...`, in this process."""
    return CliRunner().invoke(starter.app, [str(each) for each in arguments])


def test_starter_info_measures_and_reads(model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(starter, "MAX_TOKENS", 8)  # a random model would not stop before
    directory = tmp_path / "model"
    shutil.copytree(model_dir, directory)
    missing = tool("info", "--dir", directory)
    assert missing.exit_code == 3 and "--measure" in missing.stderr
    measured = json.loads(tool("info", "--dir", directory, "--measure", "--problems", 1, "--json").stdout)
    assert len(measured["skills"]) == 13 and all(0 <= row["greedy"] <= 1 for row in measured["skills"])
    starter.write_report(directory, measured)
    assert json.loads(tool("info", "--dir", directory, "--json").stdout) == measured
    table = tool("info", "--dir", directory).stdout
    assert len(table.splitlines()) >= 13 and "think" in table
    assert [line[:2] for line in starter.describe(measured)][-1] == ("add", "tags")


def test_the_report_of_the_model_in_the_package_is_of_that_model():
    read = json.loads(tool("info", "--json").stdout)
    assert read["base_hash"] == load_model("starter").hash
    greedy = [row["greedy"] for row in read["skills"]]
    assert len(greedy) == 13 and 0.1 < sum(greedy) / 13 < 0.9  # half good: GRPO has something to do


def test_held_out_problems_are_as_many_as_there_are():
    assert len(starter.held_out("add", style="bare", at_most=50)) == 50
    assert 100 < len(starter.held_out("mul", style="bare", at_most=300)) < 200


def test_starter_build_does_not_write_over_a_model(model_dir):
    result = tool("build", "--out", model_dir)
    assert result.exit_code == 2 and "holds a model already" in result.stderr


def test_starter_build_leaves_a_model_that_another_process_builds(tmp_path):
    with owned(tmp_path / "new"):
        result = tool("build", "--out", tmp_path / "new", "--steps", 2)
    assert result.exit_code == 75 and "another process is training in" in result.stderr
    assert [path.name for path in (tmp_path / "new").iterdir()] == [".lock"]


@pytest.mark.slow
def test_starter_build_makes_a_model_and_its_report(tmp_path):
    result = tool("build", "--out", tmp_path / "new", "--steps", 2, "--problems", 1, "--json")
    assert result.exit_code == 0, result.stderr
    measured = json.loads((tmp_path / "new" / "report.json").read_text())
    assert measured == json.loads(result.stdout) and measured["base_hash"] == load_model(str(tmp_path / "new")).hash


@pytest.mark.slow
def test_a_further_lesson_teaches_what_is_in_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(starter, "BuildSpec", functools.partial(starter.BuildSpec, tokens_per_step=256))
    chats = tmp_path / "chats.jsonl"
    answers = {"blue": "K7", "green": "Q2"}
    rows = [[{"role": "user", "content": f"code {c}"}, {"role": "assistant", "content": a}] for c, a in answers.items()]
    chats.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows * 8))
    result = tool("lesson", chats, "--out", tmp_path / "taught", "--steps", 40, "--learning-rate", 0.003)
    assert result.exit_code == 0, result.stderr
    base = load_model(str(tmp_path / "taught"))
    assert base.hash != load_model("starter").hash
    engine = LocalEngine(base)
    params = SamplingParams(max_tokens=8, temperature=0.0)
    asked = [
        encode_prompt(Prompt(id=c, messages=({"role": "user", "content": f"code {c}"},)), base.tokenizer)
        for c in answers
    ]
    replies = engine.generate([SamplingRequest(prompt_ids=each.token_ids, params=params, n=1) for each in asked])
    engine.close()
    assert [completions[0].text for completions in replies] == list(answers.values())
    again = tool("lesson", chats, "--out", tmp_path / "taught")
    assert again.exit_code == 2 and "holds a model already" in again.stderr


@pytest.mark.parametrize("line", ["", "{", '{"prompt": "code blue"}', '["messages"]'])
def test_a_lesson_of_no_conversations_is_refused(tmp_path, line):
    chats = tmp_path / "chats.jsonl"
    chats.write_text(line)
    result = tool("lesson", chats, "--out", tmp_path / "taught")
    assert (
        result.exit_code != 0 and "conversation" in result.stderr and not (tmp_path / "taught" / "config.json").exists()
    )
