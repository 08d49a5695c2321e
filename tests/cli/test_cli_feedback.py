"""`groupwise feedback export`, against a whole server: which ratings make which pairs and examples, and that they are
learned in the form in which they were asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli_project import cli
from groupwise import Client
from groupwise.config.data import DataConfig, RunKind
from groupwise.model.chat import encode_prompt
from groupwise.model.load import load_tokenizer
from groupwise.tasks.answers import answer_turns
from groupwise.tasks.prompts import open_prompts
from serving import running
from whole_server import whole
from wording import wording

STOPS = [*range(60, 76)]  # tokens that end an answer, of the 280 that the model draws from


@pytest.fixture
def client(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.chdir(tmp_path)
    with whole(tmp_path / "state", model_dir) as site, running(site.app) as port:
        url = f"http://127.0.0.1:{port}"
        monkeypatch.setenv("GROUPWISE_URL", url)
        with Client(url) as client:
            yield client


def rows(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def test_ratings_become_pairs_and_examples(client: Client, model_dir: Path, tmp_path: Path):
    first, second = (
        client.sample([prompt], n=3, max_tokens=100, seed=1, stop_token_ids=STOPS)[0].completions
        for prompt in ("One?", "Two?")
    )
    assert all(each.finish_reason == "stop" for each in (*first, *second))
    a, b, c = (str(each.rollout_id) for each in first)
    client.feedback(b, better_than=a, user="ann")
    client.feedback(a, better_than=b, user="ann")  # she has thought again
    client.feedback(c, correction="one", user="ann")
    client.feedback(str(second[0].rollout_id), thumb="up", user="ann")
    client.feedback(str(second[1].rollout_id), thumb="down", user="bob")
    client.feedback(str(second[2].rollout_id), thumb="up", user="bob")
    client.feedback(str(second[2].rollout_id), thumb="down", user="bob")
    told = cli("feedback", "export", "pairs.jsonl")
    assert told.exit_code == 0, told.output
    texts = {(row["chosen"], row["rejected"]) for row in rows("pairs.jsonl")}
    one, two, three = (each.text for each in second)
    expected = {(first[0].text, first[1].text), ("one", first[2].text), (one, two), (one, three)}
    assert texts == {(chosen, rejected) for chosen, rejected in expected if chosen != rejected}
    assert cli("feedback", "export", "examples.jsonl", "--examples").exit_code == 0
    assert {row["completion"] for row in rows("examples.jsonl")} == {"one", one}
    # what is learned stands behind the very tokens that were asked
    tokenizer = load_tokenizer(str(model_dir))
    asked = {row["chosen"]: tuple(row["prompt_token_ids"]) for row in rows("pairs.jsonl")}
    learned: list[tuple[str, RunKind]] = [("pairs.jsonl", "dpo"), ("examples.jsonl", "sft")]
    for file, kind in learned:
        for prompt in open_prompts(DataConfig(source=file), folder=tmp_path, kind=kind).known:
            text = prompt.answer[0].get("content")
            (turn,) = answer_turns(encode_prompt(prompt, tokenizer), tokenizer)
            assert turn.prompt_ids == asked[str(text)] and turn.completion.text == text


def test_what_was_cut_off_is_nothing_to_learn(client: Client):
    """It would be learned with an end that it has not."""
    a, b = client.sample(["One?"], n=2, max_tokens=4, ignore_eos=True)[0].completions
    assert (a.finish_reason, b.finish_reason) == ("length", "length")
    client.feedback(str(a.rollout_id), better_than=str(b.rollout_id), user="ann")
    client.feedback(str(a.rollout_id), thumb="up", user="ann")
    client.feedback(str(b.rollout_id), thumb="down", user="ann")
    assert cli("feedback", "export", "pairs.jsonl").exit_code == 2
    assert cli("feedback", "export", "examples.jsonl", "--examples").exit_code == 2
    client.feedback(str(a.rollout_id), correction="one", user="ann")
    assert cli("feedback", "export", "pairs.jsonl").exit_code == 0
    (row,) = rows("pairs.jsonl")
    assert (row["chosen"], row["rejected"]) == ("one", a.text) and Path("pairs.jsonl").stat().st_mode & 0o077 == 0


def test_what_cannot_be_exported_is_said(client: Client, tmp_path: Path):
    told = cli("feedback", "export", "pairs.jsonl")
    assert told.exit_code == 2 and not Path("pairs.jsonl").exists()
    wording(told.stderr)
    Path("pairs.jsonl").write_text("mine")
    told = cli("feedback", "export", "pairs.jsonl")
    assert told.exit_code != 0 and Path("pairs.jsonl").read_text() == "mine"
    wording(told.stderr)
    (answer,) = client.sample(["One?"], n=1, max_tokens=4)[0].completions
    client.feedback(str(answer.rollout_id), thumb="down")
    told = cli("feedback", "export", "examples.jsonl", "--examples")
    assert told.exit_code == 2
    wording(told.stderr)


def test_a_rating_is_given_and_listed(client: Client):
    (answer,) = client.sample(["One?"], n=1, max_tokens=4, seed=1)[0].completions
    given = cli("feedback", "give", str(answer.rollout_id), "--thumb", "up", "--user", "ann", "--json")
    assert given.exit_code == 0 and json.loads(given.stdout)["score"] == 1.0
    listed = cli("feedback", "list")
    assert listed.exit_code == 0 and str(answer.rollout_id) in listed.stdout and "ann" in listed.stdout
    assert cli("feedback", "give", "nobody", "--score", "0.5").exit_code == 2


def test_a_server_says_whether_it_learns_by_itself(client: Client):
    status = cli("learn", "status", "--json")
    assert status.exit_code == 0 and json.loads(status.stdout) == client.learning().model_dump(mode="json")
    assert not client.learning().enabled and "groupwise serve --config" in cli("learn", "status").stdout
    for verb in ("pause", "resume", "promote", "reject"):
        assert cli("learn", verb).exit_code == 2  # without `learn` in its configuration there is nothing of it
    assert cli("learn", "trust", "ann").exit_code == 2
