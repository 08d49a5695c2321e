"""`groupwise improve`: a log through the whole command, with a tiny model; what is asked again, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli_project import cli
from wording import wording

QUICK = ("train.steps=1", "rollout.prompts_per_step=8", "rollout.group_size=4", "rollout.max_tokens=6", "eval.k=2")
FEW = "eval.data.limit=4"


def write_log(
    folder: Path,
    *,
    requests: int = 60,
    wrong: Callable[[int], bool] = lambda number: False,
    asked: Callable[[int], str | None] = lambda number: f"What is {number} plus {3 * number}?",
) -> None:
    rows = [
        {
            "request": {"messages": [{"role": "user", "content": asked(n)}]},
            "response": {"id": f"r{n}", "choices": [{"message": {"role": "assistant", "content": str(4 * n + 2)}}]},
            "edited": str(4 * n + wrong(n)),
            "time": 1777636800 + n,
        }
        for n in range(requests)
    ]
    (folder / "log.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def fill_in(path: Path, answer: Callable[[int], Any] = lambda number: 4 * number) -> list[dict[str, Any]]:
    """Write the right answers into a file that is to be verified."""
    rows = [json.loads(line) for line in lines_of(path)]
    filled = [row | {"answer": answer(int(row["prompt"][-1]["content"].split()[2]))} for row in rows]
    path.write_text("".join(json.dumps(each) + "\n" for each in filled))
    return rows


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path)


@pytest.mark.long
def test_a_log_is_never_replace_by_itself_and_verified_answers_decide(tmp_path: Path) -> None:
    write_log(tmp_path, asked=lambda n: f"What is {n} plus\u2028{3 * n}?")  # which is no end of a row
    told = cli("improve", "log.jsonl", "--model", "starter", "--to", "to", *QUICK, FEW, "--json")
    assert told.exit_code == 0, told.output
    first = json.loads(told.stdout)
    assert first["answer"] in ("not known", "keep") and first["verified"] is None
    assert first["reward"] == "groupwise.rewards.math:number_match"
    assert first["prompts"] == {"trained": 41, "reserved": 7, "heldout": 12}
    assert first["logged"]["prompts"] == 4 and first["cost"]["trained_tokens"] > 0
    assert json.loads((tmp_path / "to" / "answer.json").read_text()) == first
    version, made = first["version"], (tmp_path / "to" / "run" / "metrics.jsonl").stat().st_mtime_ns

    trained = [json.loads(line) for line in lines_of(tmp_path / "to" / "train.jsonl")]
    verify = fill_in(tmp_path / "to" / "verify.jsonl")
    assert all(row["answer"] == "" and set(row) == {"prompt", "answer"} for row in verify)
    taught = [row for row in verify if row["prompt"] in [each["prompt"] for each in trained]]
    assert len(verify) - len(taught) == 19 and len(taught) <= 15 and first["verify"]["rows"] == len(verify)
    assert first["cost"]["measured_tokens"] > 0  # both models were sampled on what taught

    told = cli("improve", "--to", "to", "--truth", "to/verify.jsonl", "--json")
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout)
    assert found["version"] == version and (tmp_path / "to" / "run" / "metrics.jsonl").stat().st_mtime_ns == made
    assert found["verified"]["prompts"] == 19 and found["verified"]["look"] == 1
    assert found["audit"]["checked"] == 7 and found["audit"]["wrong"] == 0 and found["verified"]["trained_on"] == 0
    assert found["audit"]["learned"] == {"prompts": len(taught), "checked": len(taught), "wrong": 0}
    assert found["answer"] != "replace"  # seven of the log's answers are too few to trust it
    page = (tmp_path / "to" / "report.md").read_text()
    assert found["answer"] in page and "```text" in page

    told = cli("improve", "--to", "to", "--truth", "to/verify.jsonl")
    assert told.exit_code == 0 and "answer    " in told.stdout and "verified  " in told.stdout
    assert json.loads((tmp_path / "to" / "answer.json").read_text())["verified"]["look"] == 1  # the same look
    rows = lines_of(tmp_path / "to" / "verify.jsonl")
    (tmp_path / "to" / "verify.jsonl").write_text("\n".join(rows[:15]) + "\n")  # other answers are another look
    told = cli("improve", "--to", "to", "--truth", "to/verify.jsonl", "--json")
    assert json.loads(told.stdout)["verified"]["look"] == 2

    seen = [{"prompt": row["prompt"], "answer": row["answer"]} for row in trained[:3]]
    (tmp_path / "seen.jsonl").write_text("".join(json.dumps(each) + "\n" for each in seen))
    told = cli("improve", "--to", "to", "--truth", "seen.jsonl")
    assert told.exit_code == 2
    wording(told.stderr[told.stderr.index("error:") :])


@pytest.mark.long
def test_the_version_that_it_starts_from_is_compared_with_whatever_its_name_means_later(tmp_path: Path) -> None:
    quick = ("--model", "starter", *QUICK, FEW, "--json")
    assert cli("improve", "log.jsonl", "--to", "one", *quick).exit_code == 0
    runs, begun = tmp_path / "runs", tmp_path / "runs" / "math-20260101T000000Z"
    shutil.copytree(tmp_path / "one" / "run", begun)
    assert cli("improve", "log.jsonl", "--to", "two", "adapters.start=math", *quick).exit_code == 0
    shutil.copytree(begun, newer := runs / "math-20270101T000000Z")
    for sidecar in newer.glob("adapters/*/v*/groupwise.json"):
        sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | {"base_hash": "0" * 64}))  # of another model
    fill_in(tmp_path / "two" / "verify.jsonl")
    told = cli("improve", "--to", "two", "--truth", "two/verify.jsonl", "--json")
    assert told.exit_code == 0, told.output
    assert str(begun) in json.loads((tmp_path / "two" / "improve.json").read_text())["start"]


def test_verified_prompts_are_not_trained_on_and_are_compared_by_a_rule(tmp_path: Path) -> None:
    """By a reward of one's own that the outcomes of the log believe."""
    (tmp_path / "my_rewards.py").write_text(
        "def sums(completions, prompts):\n"
        "    asked = [[int(word) for word in p[-1]['content'].strip('?').split() if word.isdigit()] for p in prompts]\n"
        "    said = [str(sum(numbers)) in c[0]['content'] for numbers, c in zip(asked, completions)]\n"
        "    return [right + len(c[0]['content']) / 1000 for right, c in zip(said, completions)]\n"
    )
    rows = [{"prompt": f"What is {n} plus {3 * n}?", "answer": 4 * n} for n in range(0, 60, 4)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    more = ("--truth", "mine.jsonl", "--reward", "my_rewards:sums", "--gain", "0.1")
    told = cli("improve", "log.jsonl", "--model", "starter", "--to", "to", *more, *QUICK, "--json")
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout)
    trained = (tmp_path / "to" / "train.jsonl").read_text()
    assert not [row for row in rows if row["prompt"] in trained]
    assert found["reward"] == "my_rewards:sums" and found["verified"]["compared_by"].endswith("number_match")
    assert found["verified"]["trained_on"] == 0 and found["verified"]["prompts"] == 15
    assert found["audit"]["checked"] == 12  # of those that the import did not hold out


@pytest.mark.long
def test_a_phrase_that_wrong_answers_perhaps_have_in_common_is_asked_about_again(tmp_path: Path) -> None:
    """Ten of eighty prompts have it, and wrong answers, as have two others; of the ten two are verified at first. Each
    prompt ends with a line separator (U+2028), which ends no row."""
    said = [f"What is {n} plus {3 * n}{', as the manager said' * (n % 8 == 4)}?\u2028" for n in range(80)]
    write_log(tmp_path, requests=80, wrong=lambda n: n % 8 == 4 or n in (31, 41), asked=said.__getitem__)
    told = cli("improve", "log.jsonl", "--model", "starter", "--to", "to", *QUICK, FEW, "--json")
    assert told.exit_code == 0, told.output
    kept = [text for text in said if "manager" in text][:2] + said[1:60:2]
    rows = (tmp_path / "to" / "train.jsonl").read_text()
    mine, path = tmp_path / "mine.jsonl", tmp_path / "to" / "verify.jsonl"
    mine.write_text("".join(map(answered, kept)))
    before = path.read_text()

    found = json.loads(cli("improve", "--to", "to", "--truth", "mine.jsonl", "--json").stdout)
    assert (found["audit"]["alike"], found["audit"]["perhaps"]) == (None, ["the manager said"])
    lines = path.read_text().removesuffix("\n").split("\n")
    assert path.read_text().startswith(before) and found["verify"]["rows"] == len(lines)
    written = [str(json.loads(line)["prompt"][-1]["content"]) for line in lines]
    more = [text for text in written if "manager" in text and f'"{text}"' in rows and text not in kept]
    assert len(more) >= 2 and len(set(written)) == len(written)

    mine.write_text("".join(map(answered, [*kept, *more])))
    found = json.loads(cli("improve", "--to", "to", "--truth", "mine.jsonl", "--json").stdout)
    assert found["audit"]["alike"] == "the manager said" and not found["audit"]["passed"]
    assert found["verify"]["rows"] == len(written) and found["verified"]["look"] == 1  # what taught compares nothing


def answered(text: str) -> str:
    return json.dumps({"prompt": text, "answer": 4 * int(text.split()[2])}) + "\n"


@pytest.mark.parametrize("what", ["few", "no outcomes", "long"])
def test_where_nothing_can_be_learned_it_says_what_is_lacking(tmp_path: Path, what: str) -> None:
    write_log(tmp_path, requests=10 if what == "few" else 60)
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    for row in rows:
        if what == "no outcomes":
            del row["edited"]
        if what == "long":
            row["edited"] = f"It is {row['edited']}, as everybody who can add two numbers will tell you at once."
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    told = cli("improve", "log.jsonl", "--model", "starter", "--to", "to", "--json")
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout)
    assert found["answer"] == "not known" and found["version"] is None and found["why"] and found["needs"]
    assert not (tmp_path / "to" / "run").exists()
    wording("\n".join(found["why"]))


def test_a_reward_of_ones_own_teaches_only_if_it_is_believed(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text("def same(completions, **columns):\n    return [0.5] * len(completions)\n")
    told = cli("improve", "log.jsonl", "--model", "starter", "--to", "to", "--reward", "my_rewards:same", "--json")
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout)
    assert found["answer"] == "not known" and found["version"] is None
    wording("\n".join(found["why"]))


@pytest.mark.parametrize(
    "arguments",
    [
        ("log.jsonl", "--model", "starter"),
        ("--model", "starter", "--to", "to"),
        ("log.jsonl", "--to", "to"),
        ("log.jsonl", "--model", "starter", "--to", "."),
        ("absent.jsonl", "--model", "starter", "--to", "to"),
        ("log.jsonl", "--model", "starter", "--to", "to", "--gain", "0"),
        ("log.jsonl", "--model", "starter", "--to", "to", "data.source=mine.jsonl"),
        ("log.jsonl", "--model", "starter", "--to", "to", "train.lora=null"),
        ("log.jsonl", "--model", "starter", "--to", "to", "train.stepz=3"),
        ("log.jsonl", "--model", "starter", "--to", "to", "--truth", "absent.jsonl"),
        ("log.jsonl", "--model", "starter", "--to", "to", "--args", "["),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_left(arguments: tuple[str, ...], tmp_path: Path) -> None:
    told = cli("improve", *arguments)
    assert told.exit_code == 2 and not (tmp_path / "to").exists()
    wording(told.stderr)


def test_a_folder_is_about_one_log(tmp_path: Path) -> None:
    write_log(tmp_path, requests=10)
    assert cli("improve", "log.jsonl", "--model", "starter", "--to", "to").exit_code == 0
    for more in (("other.jsonl",), ("--model", "other"), ("train.steps=7",)):
        told = cli("improve", "--to", "to", *more)
        assert told.exit_code == 2
        wording(told.stderr)


def test_an_import_may_be_given_in_the_place_of_logs(tmp_path: Path) -> None:
    write_log(tmp_path, requests=10)
    assert cli("logs", "import", "log.jsonl", "--to", "from-logs").exit_code == 0
    told = cli("improve", "from-logs", "--model", "starter", "--to", "to", "--json")
    assert told.exit_code == 0 and json.loads(told.stdout)["answer"] == "not known"
    told = cli("improve", "from-logs", "--model", "starter", "--to", "other", "--outcomes", "log.jsonl")
    assert told.exit_code == 2
    wording(told.stderr)
