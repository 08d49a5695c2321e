"""`groupwise logs`: what is asked for on the command line, what is printed, what is refused before anything is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_project import cli
from groupwise.store.masking import PERSONAL, SECRETS
from judge_peer import Said, judges
from wording import wording

ROW = {
    "id": "r1",
    "request": {"messages": [{"role": "user", "content": "I am CUST-123 at 203.0.113.7, bob@example.com: open?"}]},
    "response": {"choices": [{"message": {"role": "assistant", "content": "Yes."}}]},
}


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps(ROW) + "\nbroken\n")
    return path


def test_logs_become_rows_and_a_report(log: Path, tmp_path: Path):
    before = log.read_bytes()
    told = cli("logs", "import", "requests.jsonl", "--to", "from-logs")
    assert told.exit_code == 0, told.output
    assert "email 1" in told.stdout and "requests.jsonl:2" in told.stdout and "train.jsonl" in told.stdout
    (row,) = map(json.loads, (tmp_path / "from-logs" / "train.jsonl").read_text().splitlines())
    assert row["prompt"][0]["content"] == "I am CUST-123 at [ip], [email]: open?" and row["logged"] == "Yes."
    assert log.read_bytes() == before


def test_json_has_the_report_and_the_files(tmp_path: Path):
    told = cli("logs", "import", "requests.jsonl", "--to", "to", "--turns", "each", "--heldout", "0.5", "--json")
    answer = json.loads(told.stdout)
    assert answer["files"] == ["train.jsonl", "report.json", "report.md"]
    assert answer["report"] == json.loads((tmp_path / "to" / "report.json").read_text())


def test_masks_of_ones_own_and_rules_that_are_left_out(tmp_path: Path):
    more = ("--mask", "customer=CUST-[0-9]+", "--keep", "ip_address", "--alike", "1", "--json")
    told = cli("logs", "import", "requests.jsonl", "--to", "to", *more)
    assert told.exit_code == 0, told.output
    row = json.loads((tmp_path / "to" / "train.jsonl").read_text())
    assert row["prompt"][0]["content"] == "I am [customer] at 203.0.113.7, [email]: open?"
    counts = {each["rule"]: each["count"] for each in json.loads(told.stdout)["report"]["masked"]}
    assert counts["customer"] == 1 and "ip_address" not in counts


@pytest.mark.parametrize(
    "arguments",
    [
        ("requests.jsonl",),
        ("requests.jsonl", "--to", "."),
        ("absent.jsonl", "--to", "to"),
        ("requests.jsonl", "--to", "to", "--keep", "sk_key"),
        ("requests.jsonl", "--to", "to", "--mask", "CUST-[0-9]+"),
        ("requests.jsonl", "--to", "to", "--mask", "email=x"),
        ("requests.jsonl", "--to", "to", "--mask", "customer=CUST-(["),
        ("requests.jsonl", "--to", "to", "--mask", "customer=(CUST)"),
        ("requests.jsonl", "--to", "to", "--mask", "customer="),
        ("requests.jsonl", "--to", "to", "--turns", "all"),
        ("requests.jsonl", "--to", "to", "--outcomes", "absent.csv"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_written(arguments: tuple[str, ...], tmp_path: Path):
    told = cli("logs", "import", *arguments)
    assert told.exit_code == 2 and not (tmp_path / "to").exists()
    wording(told.stderr)


def test_the_rules_are_shown():
    shown = cli("logs", "rules").stdout
    assert all(rule.name in shown for rule in (*SECRETS, *PERSONAL))
    rules = json.loads(cli("logs", "rules", "--json").stdout)["rules"]
    assert [each["rule"] for each in rules] == [rule.name for rule in (*SECRETS, *PERSONAL)]


# ---- judges ----
@pytest.fixture
def rated(tmp_path: Path) -> Path:
    """What an import of 80 rated answers wrote: those that begin with "yes" are good."""
    with (tmp_path / "rated.jsonl").open("w") as file:
        for number in range(80):
            said = f"{'yes' if number % 2 else 'no'} {number}"
            response = {
                "id": f"r{number}",
                "model": "m",
                "choices": [{"message": {"role": "assistant", "content": said}}],
            }
            asked = {"messages": [{"role": "user", "content": f"What of {number} and {number}?"}]}
            row = {"request": asked, "response": response, "thumb": "up" if number % 2 else "down"}
            file.write(json.dumps(row) + "\n")
    told = cli("logs", "import", "rated.jsonl", "--to", "rated")
    assert told.exit_code == 0, told.output
    return tmp_path / "rated"


def test_a_judge_over_http_is_believed_where_it_agrees(rated: Path):
    def says(body: dict, before: int) -> Said:
        reply = body["messages"][1]["content"].partition("--- reply")[2]
        return Said(json.dumps({"reason": "so", "score": 9 if "yes" in reply else 2}))

    with judges() as start:
        options = {"base_url": start(says).url, "model": "m", "rubric": "Is it yes?", "api_key_env": None}
        command = ("logs", "judge", rated, "groupwise.rewards.judge:judge", "--args", json.dumps(options))
        told = cli(*command, "--json")
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout)
    assert found["believed"] and 0.2 < found["threshold"] < 0.9 and found["balanced"] == 1.0 and found["failed"] == 0


def test_a_reward_that_does_not_agree_is_refused(rated: Path, tmp_path: Path):
    (tmp_path / "my_rewards.py").write_text(
        "def long(completions):\n    return [len(c[0]['content']) > 4 for c in completions]\n"
    )
    told = cli("logs", "judge", rated, "my_rewards:long")
    assert told.exit_code == 1 and "refused" in told.stdout
    for arguments in (
        ("groupwise.rewards.text:exact_match",),
        ("my_rewards:short",),
        ("my_rewards:long", "--args", "["),
    ):
        told = cli("logs", "judge", rated, *arguments)
        assert told.exit_code == 2
        wording(told.stderr)
