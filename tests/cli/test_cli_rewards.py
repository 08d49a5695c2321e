"""`groupwise rewards ...` in this process, with the pool's workers beside it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cli_project import cli
from groupwise.cli.rewards import rewards_app
from wording import wording

MINE = '''
def in_tag(completions, answer):
    """Right in its tag."""
    print("reward code may print")
    texts = [each[0]["content"].rpartition("<answer>")[2].partition("</answer>")[0].strip() for each in completions]
    return [None if not gold else float(text == gold) for text, gold in zip(texts, answer)]


def anywhere(completions, answer, *, amount):
    """Right somewhere."""
    return [None if not gold else amount * (gold in each[0]["content"]) for each, gold in zip(completions, answer)]


def broken(completions):
    return [1 / len(each[0]["content"]) for each in completions]
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def run(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(rewards_app, [str(each) for each in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_list():
    listed = run("list").stdout
    assert "groupwise.rewards.text\n" in listed
    assert any(line.split()[:2] == ["exact_match", "1"] for line in listed.splitlines())
    rewards = json.loads(run("list", "--json").stdout)["rewards"]
    assert {"function": "groupwise.rewards.text:exact_match", "gives": rewards[-1]["gives"]}.keys() == rewards[0].keys()
    assert "groupwise.rewards.math:number_match" in [each["function"] for each in rewards]


def test_lint_of_one_reward(folder):
    result = run("lint", "mine:in_tag", "--folder", folder)
    assert result.exit_code == 0
    [head] = result.stdout.splitlines()
    wording(head)
    result = run("lint", "mine:in_tag", "--folder", folder, "--probes")
    table = [
        line.split() for line in result.stdout.splitlines() if line.startswith(("right, <answer>", "wrong, <answer>"))
    ]
    assert table == [["right,", "<answer>", "1", "1", "1"], ["wrong,", "<answer>", "0", "0", "0"]]
    assert "reward code may print" not in result.stdout


def test_lint_of_a_module(folder):
    """Those that lack an option are skipped; an error is exit code 1; the probe is named that shows it."""
    result = run("lint", "mine", "--folder", folder, "--json")
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    assert [(each["function"], each["verdict"]) for each in answer["rewards"]] == [
        ("mine:in_tag", "ok"),
        ("mine:broken", "error"),
    ]
    assert answer["skipped"] == {"mine:anywhere": ["amount"]}
    broken = answer["rewards"][1]
    error = next(each for each in broken["findings"] if each["severity"] == "error")
    assert (error["check"], error["probe"]) == ("exception", "empty")
    wording(error)
    assert broken["hack"] is None and broken["p95_ms"] > 0
    empty = next(each for each in broken["probes"] if (each["row"], each["name"]) == (0, "empty"))
    assert empty["value"] is None and "ZeroDivisionError" in empty["failure"]


def test_options_and_rows_of_a_dataset(folder):
    rows = [{"prompt": f"Say {word}.", "spoken": word} for word in ("alpha", "beta", "gamma", "delta")]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "said.py").write_text(
        "def said(completions, spoken, *, amount):\n"
        "    return [None if not s else amount * (c[0]['content'] == s) for c, s in zip(completions, spoken)]\n"
    )
    given = ("--folder", folder, "--args", '{"amount": 2.5}', "--data", "rows.jsonl", "--rows", "2", "--json")
    result = run("lint", "said.said", *given, "--gold", "spoken")
    assert result.exit_code == 0
    [reward] = json.loads(result.stdout)["rewards"]
    assert (reward["verdict"], reward["hack"], reward["findings"]) == ("ok", 0.0, [])
    values = {(each["row"], each["kind"], each["name"]): each["value"] for each in reward["probes"]}
    assert values[0, "right", "bare"] == values[1, "right", "bare"] == 2.5
    assert values[0, "wrong", "bare"] == 0.0 and max(row for row, *_ in values) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["mine:nothing"],
        ["nothing"],
        ["json"],
        ["mine:anywhere"],
        ["mine:anywhere", "--args", "{"],
        ["mine:anywhere", "--args", "[1]"],
        ["mine", "--args", '{"size": 1}'],
        ["mine:in_tag", "--gold", "answer"],
        ["mine:in_tag", "--data", "rows.jsonl"],
        ["mine:in_tag", "--data", "rows.jsonl", "--gold", "x"],
    ],
)
def test_what_cannot_be_done_is_said(folder, arguments):
    if "--gold" in arguments and "--data" in arguments:
        (folder / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    result = run("lint", *arguments, "--folder", folder)
    assert result.exit_code == 2
    wording(result.stderr)


def test_rows_are_read_as_a_runs_are(tmp_path: Path) -> None:
    """What an error advises in a run's words can be said behind --data."""
    (tmp_path / "q.jsonl").write_text('{"question": "2 + 2?", "answer": "4"}\n{"question": "3 + 3?", "answer": "6"}\n')
    words = ("rewards", "lint", "groupwise.rewards.text:exact_match", "--folder", str(tmp_path), "--data", "q.jsonl")
    refused = cli(*words)
    assert refused.exit_code == 2
    wording(refused.stderr)
    read = cli(*words, "data.prompt_key=question", "--json")
    assert read.exit_code == 0, read.stderr
    assert cli(*words, "data.prompt_kye=question").exit_code == cli(*words[:5], "data.limit=1").exit_code == 2
