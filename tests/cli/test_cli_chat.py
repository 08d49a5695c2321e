"""`groupwise chat RUN` and `groupwise serve RUN`: what a run trained, in this process and behind a server."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from cli_project import cli
from groupwise.cli.chat import _shown
from groupwise.cli.main import app
from groupwise.model.load import load_model
from groupwise.sdk import drivers, transport
from groupwise.store.adapters import AdapterStore
from groupwise.store.files import Provenance
from groupwise.types import PolicyVersion
from image_host import image_host, png, reply
from wording import wording

SUM = "What is 2 + 3?"


@pytest.fixture(scope="module")
def run(model_dir, make_base, make_adapter, tmp_path_factory) -> Path:
    """A run of two versions of `toy`, the second active."""
    run = tmp_path_factory.mktemp("place") / "runs" / "toy-20260101T000000Z"
    info = Provenance(base_model=str(model_dir), base_hash=load_model(str(model_dir)).hash)
    store = AdapterStore(run / "adapters")
    for seed in (1, 2):
        adapter = make_adapter(make_base("qwen3", dtype=torch.float32, context=256), seed=seed)
        store.publish("toy", lambda to, adapter=adapter: shutil.copytree(adapter, to, dirs_exist_ok=True), info=info)
    store.activate(PolicyVersion("toy", 2))
    (run / "config.yaml").write_text(f"name: toy\nmodel: {model_dir}\n")
    (run / "metrics.jsonl").write_text("")
    return run


@pytest.fixture(autouse=True)
def place(run, monkeypatch):
    """Where the run is under runs/; no server answers."""
    monkeypatch.chdir(run.parents[1])
    monkeypatch.setattr(transport, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(drivers, "DEFAULT_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("GROUPWISE_URL", raising=False)


def answer(*words: str | int) -> dict:
    asked = cli("chat", *words, SUM, "--json", "--temperature", 0, "--max-tokens", 6)
    assert asked.exit_code == 0, asked.stderr
    return json.loads(asked.stdout)


def test_one_answer_of_each_name_of_a_policy(run):
    newest = answer("toy")
    assert newest["version"] == "toy@2" and newest["completion_tokens"] == 6 and newest["finish_reason"] == "length"
    for name in (str(run), "runs/toy-20260101T000000Z", "toy@2", f"{run}/toy@2", str(run / "adapters/toy/v000002")):
        assert answer(name) == newest, name
    assert answer("toy@1")["version"] == "toy@1"
    assert answer("toy@1")["text"] != newest["text"]


def test_a_conversation_is_streamed_and_remembered(monkeypatch):
    """What is typed is asked turn by turn, after everything before it."""
    from groupwise.model import chat as encoding

    asked = []
    encode = encoding.encode_prompt

    def seen(prompt, tokenizer, **options):
        encoded = encode(prompt, tokenizer, **options)
        asked.append((prompt.messages, encoding.decode(encoded.token_ids, tokenizer, ends=())))
        return encoded

    monkeypatch.setattr(encoding, "encode_prompt", seen)
    monkeypatch.setattr("groupwise.cli.chat._typed", lambda: iter(["One", "Two"]))
    said = cli("chat", "toy", "--system", "Be brief.", "--seed", 1, "--max-tokens", 4)
    assert said.exit_code == 0, said.stderr
    assert [message["role"] for message in asked[1][0]] == ["system", "user", "assistant", "user"]
    assert asked[1][0][2]["content"].strip() in said.stdout
    assert said.stderr.count("(toy@2: cut at its longest") == 2


def test_stdin_is_the_message():
    said = CliRunner().invoke(app, ["chat", "toy", "--max-tokens", "3", "--json"], input=SUM)
    assert said.exit_code == 0 and json.loads(said.stdout)["version"] == "toy@2"


def test_a_word_that_is_no_run_is_a_message_and_the_error_says_both():
    gone = cli("chat", "tov")
    assert gone.exit_code == 75
    wording(gone.stderr)
    assert "nor is there" not in cli("chat", SUM).stderr


@pytest.mark.parametrize(
    "words",
    [
        ["nothing", SUM],
        ["toy@7", SUM],
        ["toy", SUM, "--url", "http://127.0.0.1:9"],
        ["toy", SUM, "--adapter", "toy@1"],
        ["toy", SUM, "--temperature", "-1"],
        ["toy", "long " * 400],
        ["toy", SUM, "--image", "nothing.png"],
        ["toy", SUM, "--image", "red.png"],  # to a model that reads text
        ["toy", SUM, "--image", "http://127.0.0.1:9/red.png"],  # where nobody answers
        ["toy", SUM, "--image", "https://user@images.example.com/red.png"],
    ],
)
def test_what_cannot_be_is_said(words):
    Image.new("RGB", (8, 8), (255, 0, 0)).save("red.png")
    refused = cli("chat", *words)
    assert refused.exit_code in (1, 2), refused.stderr
    wording(f"\n{refused.stderr}".rpartition("\nerror: ")[2])


def test_an_image_at_an_address_that_is_typed_is_fetched():
    with image_host() as host:
        host.pages["/dots.png"] = reply(png(7))
        assert _shown(f"http://127.0.0.1:{host.port}/dots.png").data == png(7)
    Path("dots.png").write_bytes(png(7))
    assert _shown("dots.png").digest == _shown(Path("dots.png").absolute().as_uri()).digest


# ---- serve ----


@pytest.fixture
def served(monkeypatch):
    """What `groupwise serve` would begin with."""
    seen = []
    monkeypatch.setattr("groupwise.server.app.serve", lambda config, **how: seen.append((config, how["start"])))
    return seen


def test_serve_takes_the_model_and_the_adapter_of_a_run(served, run, model_dir):
    for words in (["toy"], ["toy@1"], [str(model_dir)], [str(model_dir), "--adapter", "toy@1", "--state-dir", "s"]):
        assert cli("serve", *words).exit_code == 0
    (newest, first), (_, named), (_, plain), (other, beside) = served
    assert newest.model == str(model_dir) and newest.state_dir == Path("groupwise-state/runs/toy-20260101T000000Z")
    assert (str(first.adapter.version), first.always, first.run_dir) == ("toy@2", False, run)
    assert (str(named.adapter.version), named.always) == ("toy@1", True)
    assert plain.adapter is None and plain.run_dir is None
    assert (str(beside.adapter.version), beside.run_dir, other.state_dir) == ("toy@1", None, Path("s"))


def test_serve_of_a_run_that_trained_all_parameters(served, run, model_dir):
    whole = run.parent / "whole"
    shutil.copytree(model_dir, whole / "model")
    assert cli("serve", "whole").exit_code == 0
    config, start = served[0]
    assert (config.model, config.served_name, start.adapter) == ("runs/whole/model", "whole", None)
    assert start.run_dir == Path("runs/whole")


def test_serve_refuses_a_version_that_is_not_there(served):
    refused = cli("serve", "toy@9")
    assert refused.exit_code == 2 and not served
    wording(refused.stderr)


@pytest.mark.parametrize(("system", "roles"), [((), ["system", "user"]), (("--system", ""), ["user"])])
def test_a_run_is_asked_as_it_was_trained(run, monkeypatch, tmp_path, system, roles):
    """With the system message and the template of its prompts; replies have the form that its completions had."""
    from groupwise.model import chat as encoding

    asked = []
    encode = encoding.encode_prompt

    def seen(prompt, tokenizer, **options):
        encoded = encode(prompt, tokenizer, **options)
        asked.append((prompt.messages, encoding.decode(encoded.token_ids, tokenizer, ends=())))
        return encoded

    monkeypatch.setattr(encoding, "encode_prompt", seen)
    saved = run / "config.yaml"
    before = saved.read_text()
    rollout = "rollout: {structured_outputs: {choice: [yes it is, no]}}"
    chat = "chat: {template: own.jinja}\nfolder: " + str(tmp_path)
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}it: ")
    saved.write_text(f"{before}data: {{source: p.jsonl, system: Be brief.}}\n{rollout}\n{chat}\nnot_a_key: 5\n")
    try:
        said = cli("chat", "toy", SUM, *system, "--json", "--seed", 1)
    finally:
        saved.write_text(before)
    assert json.loads(said.stdout)["text"].strip() in ("yes it is", "no"), said.stderr
    assert [message["role"] for message in asked[0][0]] == roles
    assert asked[0][1].endswith("it: ") and asked[0][1].startswith(f"{roles[0]}: ")
