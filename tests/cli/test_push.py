"""`groupwise push`: a card of what was measured, the files, and what goes wrong on the way to a hub that answers as the
real one does (`fake_hub`); what was pushed is loaded back and answers the same."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from huggingface_hub import ModelCard, metadata_load
from transformers import Qwen2_5_VLConfig

from cli_project import Project, cli
from fake_hub import TOKEN, FakeHub, Refusal, asked_here, fake_hub
from groupwise.cli.push.card import model_card
from groupwise.cli.push.contents import Wanted, checked_format, contents
from groupwise.cli.push.facts import Base, read_facts
from groupwise.cli.push.space import TEMPLATE, space_files
from groupwise.config.run import STARTER_DIR
from groupwise.errors import ConfigError, HubError
from groupwise.run.evaluate import load_evaluations, paired
from groupwise.store.adapters import AdapterStore
from groupwise.store.locate import find_policy
from groupwise.store.masking import MASK, Masking
from starter_run import starter_run
from wording import raises, wording

KEY = "sk-" + "k" * 40
OPENING = "Reply with just the number."


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A run of three steps, whose prompts, rewards and configuration hold what must not go up."""
    folder = tmp_path_factory.mktemp("push")
    rows = [{"prompt": f"What is {i} + 1? {KEY}", "answer": str(i + 1), "place": str(folder)} for i in range(4)]
    for name in ("prompts.jsonl", "held_out.jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "push_rewards.py").write_text(
        "def length(completions, api_key=None, **columns):\n"
        "    return [float(len(completion[0]['content'])) for completion in completions]\n"
    )
    starter_run(
        folder,
        name="sums",
        data={"source": str(folder / "prompts.jsonl"), "system": OPENING},
        eval={"data": {"source": "held_out.jsonl"}, "k": 2},
        rewards=[{"function": "push_rewards:length", "args": {"api_key": "mine-alone"}}],
        scoring={"workers": 0},
        rollout={"prompts_per_step": 4, "group_size": 4, "max_tokens": 6},
        train={"steps": 3, "learning_rate": 1e-2, "lora": {"rank": 4, "alpha": 8}},
    )
    return folder / "run"


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[FakeHub]:
    monkeypatch.chdir(tmp_path)
    with fake_hub() as hub, asked_here(hub, tmp_path / "hf"):
        yield hub


def pushed(hub: FakeHub, kind: str = "model", name: str = "me/sums") -> dict[str, bytes]:
    return hub.repos[kind, name].files


# ---- the dry run ----


def test_a_dry_run_prints_cards_and_files_and_asks_nobody(made, hub, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    done = cli("push", made, "--to", "me/sums", "--dry-run", "--dataset", "--json")
    assert done.exit_code == 0 and not hub.seen
    model, dataset = json.loads(done.stdout)["repositories"]
    assert (model["kind"], dataset["kind"]) == ("model", "dataset") and not model["public"]
    assert set(model["files"]) == {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "groupwise_chat.json",
    }
    weights = made / "adapters" / "sums" / "v000003" / "adapter_model.safetensors"
    assert model["files"]["adapter_model.safetensors"] == weights.stat().st_size
    assert model["files"]["README.md"] == len(model["card"].encode())
    text = cli("push", made, "--to", "me/sums", "--dry-run").stdout
    assert "adapter_model.safetensors" in text and model["card"].splitlines()[-1] in text


def test_the_card_has_the_numbers_of_the_run(made):
    facts = read_facts(find_policy(str(made)))
    card = model_card(facts, repo="me/sums", format="peft", masking=Masking({}))
    before, after = (load_evaluations(made, step) for step in (0, 3))
    assert str(after["greedy"].version) == facts.version == "sums@3"
    for mode, measure in (("greedy", "reward"), ("sampled", "reward"), ("sampled", "pass@2")):
        numbers = [(each[mode].measured(measure), each[mode].standard_error(measure)) for each in (before, after)]
        test = paired(after[mode].values(measure), before[mode].values(measure))
        numbers.append((test.difference, test.standard_error))
        cells = " | ".join(f"{value:.4f} ± {error:.4f}" for value, error in numbers)
        assert f"| {mode} | {measure} | {cells} | {test.p_value:.2g} |" in card
    assert "On 4 held-out prompts (`held_out.jsonl`)" in card
    metrics = [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()]
    trained = [line["reward/mean"] for line in metrics if "reward/mean" in line]
    assert f"{trained[0]:.3f}" in card and f"{trained[-1]:.3f}" in card
    assert all(
        said in card for said in ("rank 4, alpha 8", "`push_rewards:length`", "3 steps", "seed 0", "groupwise 0")
    )
    assert "hf://me/sums" in card and OPENING in card
    head = ModelCard(card).data.to_dict()
    assert (head["library_name"], head["license"], head["pipeline_tag"]) == ("peft", "apache-2.0", "text-generation")
    assert "base_model" not in head  # the starter is not on the hub
    code = card.partition("```python\n")[2].partition("```")[0]
    ast.parse(code)


def test_what_was_not_measured_is_said_to_be_so(made, tmp_path):
    shutil.copytree(made, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "evaluations")
    card = model_card(read_facts(find_policy(str(tmp_path / "run"))), repo="a/b", format="peft", masking=Masking({}))
    assert "Nothing was measured" in card and "| before |" not in card


def test_a_base_on_the_hub_and_one_from_a_directory(made, tmp_path):
    facts = read_facts(find_policy(str(made)), base_model="Qwen/Qwen3-0.6B")
    assert facts.base == Base(name="Qwen/Qwen3-0.6B", hub="Qwen/Qwen3-0.6B", license=None)
    card = model_card(facts, repo="a/b", format="peft", masking=Masking({}))
    head = ModelCard(card).data.to_dict()
    assert head["base_model"] == "Qwen/Qwen3-0.6B" and head["base_model_relation"] == "adapter"
    model = tmp_path / "my-model"
    model.mkdir()
    (model / "README.md").write_text("---\nlicense: mit\n---\n")
    shutil.copytree(made, tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("model: starter", f"model: {model}"))
    policy = find_policy(str(tmp_path / "run"))
    assert read_facts(policy).base == Base(name="my-model", hub=None, license="mit")
    assert read_facts(policy, base_model="me/my-model").base == Base(
        name="me/my-model", hub="me/my-model", license="mit"
    )
    [model_repo] = contents(read_facts(policy), Wanted(repo="a/b"), scratch=tmp_path, masking=Masking({}), note=print)
    told = json.loads(bytes(model_repo.files["adapter_config.json"]))  # pyright: ignore[reportArgumentType]
    assert told["base_model_name_or_path"] == "my-model"  # not where it lies on this machine


def test_a_model_of_images_is_loaded_by_its_class(made, tmp_path):
    model = tmp_path / "sees"
    Qwen2_5_VLConfig().save_pretrained(model)
    shutil.copytree(made, tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("model: starter", f"model: {model}"))
    facts = read_facts(find_policy(str(tmp_path / "run")), base_model="some/base")
    assert facts.loaded_by == "AutoModelForImageTextToText"
    card = model_card(facts, repo="a/b", format="peft", masking=Masking({}))
    assert 'base = AutoModelForImageTextToText.from_pretrained("some/base")' in card and "Causal" not in card
    settings = json.loads(space_files(facts, repo="a/b", format="peft")["settings.json"])
    assert settings["loaded_by"] == "AutoModelForImageTextToText"


def test_what_was_chosen_by_the_measure_has_the_numbers_of_other_seeds(made, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(made, run)
    config = run / "config.yaml"
    config.write_text(re.sub(r"(?m)^  best: .*$", "  best: sampled", config.read_text()))
    chosen = read_facts(find_policy(str(run)))
    assert not chosen.again and "flatters" in model_card(chosen, repo="a/b", format="peft", masking=Masking({}))
    for path in (run / "evaluations").glob("step_000000.*"):  # other numbers: those before training
        version = (run / "evaluations" / path.name.replace("000000", "000003")).read_text().partition("\n")[0]
        told = "\n".join((version, path.read_text().partition("\n")[2]))
        (run / "evaluations" / path.name.replace("step_000000", "again_000003")).write_text(told)
    facts = read_facts(find_policy(str(run)))
    before, after = (facts.__dict__[when]["sampled"].measured("reward") for when in ("before", "after"))
    assert facts.again and before == after != chosen.after["sampled"].measured("reward")
    card = model_card(facts, repo="a/b", format="peft", masking=Masking({}))
    assert "other seeds" in card and "flatters" not in card


# ---- what must not go up ----


def test_no_secret_and_no_place_of_this_machine_goes_up(made, hub, monkeypatch):
    monkeypatch.setenv("SOME_PASSWORD", "What is 2 + 1?")
    done = cli("push", made, "--to", "me/sums", "--dataset", "--format", "merged", "--space")
    assert done.exit_code == 0
    wording(done.stderr)
    for repo in hub.repos.values():
        for name, content in repo.files.items():
            if name.endswith(".parquet"):
                rows = pyarrow.parquet.read_table(pyarrow.BufferReader(content)).to_pylist()
                content = json.dumps(rows).encode()
            for secret in (KEY, "mine-alone", "What is 2 + 1?", TOKEN):
                assert secret.encode() not in content, (repo.kind, name)
            if not name.endswith(".parquet"):
                assert str(made.parent).encode() not in content, (repo.kind, name)


# ---- what goes up ----


def test_the_adapter_goes_up_in_one_commit_private(made, hub):
    done = cli("push", made, "--to", "me/sums", "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["addresses"] == [f"{hub.url}/me/sums"]
    repo = hub.repos["model", "me/sums"]
    assert repo.private and len(repo.commits) == 2
    directory = made / "adapters" / "sums" / "v000003"
    assert pushed(hub)["adapter_model.safetensors"] == (directory / "adapter_model.safetensors").read_bytes()
    ours = json.loads((directory / "adapter_config.json").read_text())
    assert json.loads(pushed(hub)["adapter_config.json"]) == ours


def test_pushed_again_nothing_is_sent_and_nothing_committed(made, hub):
    for _ in range(2):
        assert cli("push", made, "--to", "me/sums", "--dataset").exit_code == 0
    assert hub.sent("PUT", "/lfs/") == 2 and hub.sent("POST", "/commit/") == 2
    assert cli("push", f"{made}@2", "--to", "me/sums").exit_code == 0  # another version is another commit
    assert hub.sent("POST", "/commit/") == 3


def test_public_is_public(made, hub):
    assert cli("push", made, "--to", "my-lab/sums", "--public").exit_code == 0
    assert not hub.repos["model", "my-lab/sums"].private


def test_the_licence_is_that_of_the_base_on_the_hub(made, hub):
    hub.add("some/base", private=False, **{"README.md": b"---\nlicense: gemma\n---\n"})
    assert cli("push", made, "--to", "me/sums", "--base-model", "some/base").exit_code == 0
    card = pushed(hub)["README.md"].decode()
    assert ModelCard(card).data.to_dict()["license"] == "gemma" and "`gemma`" in card
    assert cli("push", made, "--to", "me/other", "--base-model", "no/base").exit_code == 0
    assert "license" not in ModelCard(pushed(hub, name="me/other")["README.md"].decode()).data.to_dict()


def test_the_rollouts_are_a_dataset(made, hub):
    assert cli("push", made, "--to", "me/sums", "--dataset").exit_code == 0
    files = pushed(hub, "dataset")
    [path] = [name for name in files if name.endswith(".parquet")]
    table = pyarrow.parquet.read_table(pyarrow.BufferReader(files[path]))
    rows = table.to_pylist()
    groups = [line for path in (made / "rollouts").iterdir() for line in path.read_text().splitlines()]
    assert len(rows) == 4 * len(groups) and {row["step"] for row in rows} == {1, 2, 3}
    kept = [json.loads(line) for line in (made / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    first = [row for row in rows if row["step"] == 1 and row["group"] == 0]
    assert [row["completion"] for row in first] == [each["turns"][0]["text"] for each in kept[0]["rollouts"]]
    assert [row["reward"] for row in first] == [each["reward"] for each in kept[0]["rollouts"]]
    assert [row["advantage"] for row in first] == [each["advantage"] for each in kept[0]["rollouts"]]
    assert json.loads(first[0]["rewards"]) == kept[0]["rollouts"][0]["rewards"]
    assert first[0]["prompt"][-1]["content"] == kept[0]["prompt"]["messages"][-1]["content"].replace(KEY, MASK)
    card = files["README.md"].decode()
    assert all(f"| `{name}` |" in card for name in table.column_names)


@pytest.mark.parametrize("format", ["merged", "gguf"])
def test_a_whole_model_goes_up(made, hub, tmp_path, format):
    if format == "gguf":
        pytest.importorskip("gguf")
    assert cli("push", made, "--to", "me/sums", "--format", format).exit_code == 0
    files = pushed(hub)
    if format == "gguf":
        assert files["sums-float32.gguf"][:4] == b"GGUF" and b"sums-float32.gguf" in files["README.md"]
        return
    from transformers import AutoModelForCausalLM

    merged: Any = AutoModelForCausalLM.from_pretrained("me/sums")
    ids = torch.arange(20, 40)[None]
    adapted = _adapted(made / "adapters" / "sums" / "v000003")
    torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=1e-4, atol=1e-4)


# ---- loaded back ----


def _adapted(name: Path | str) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(STARTER_DIR), str(name)).eval()


def test_pefts_own_loader_gets_the_same_adapter_from_the_hub(made, hub):
    assert cli("push", made, "--to", "me/sums").exit_code == 0
    ids = torch.arange(20, 40)[None]
    with torch.inference_mode():
        here, there = (_adapted(name)(ids).logits for name in (made / "adapters/sums/v000003", "me/sums"))
    assert torch.equal(here, there)


def test_chat_with_what_was_pushed_answers_as_the_run_does(made, hub):
    assert cli("push", made, "--to", "me/sums").exit_code == 0
    asked = ("What is 2 + 3?", "--temperature", "0", "--json")
    here, there = (json.loads(cli("chat", name, *asked).stdout) for name in (str(made), "hf://me/sums"))
    assert here["text"] == there["text"] and here["version"] == "sums@3" and there["version"] == "sums@1"


def test_the_space_answers_with_the_model_that_was_pushed(made, hub, tmp_path):
    assert cli("push", made, "--to", "me/sums", "--format", "merged", "--space").exit_code == 0
    files = pushed(hub, "space")
    assert {path.name for path in TEMPLATE.iterdir() if path.is_file()} < set(files)
    folder = tmp_path / "space"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    settings = json.loads(files["settings.json"])
    assert settings["model"] == "me/sums" and settings["base"] is None and settings["system"] == OPENING
    assert metadata_load(folder / "README.md")["sdk"] == "gradio"  # pyright: ignore[reportOptionalSubscript]
    spec = importlib.util.spec_from_file_location("pushed_space", folder / "app.py")
    assert spec is not None and spec.loader is not None
    app = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(app)
    said = app.reply("What is 2 + 3?", [])
    own = json.loads(cli("chat", str(made), "What is 2 + 3?", "--temperature", "0", "--json").stdout)["text"]
    assert said == own
    history = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, {"role": "assistant", "content": "ho"}]
    assert isinstance(app.reply("and?", history), str)


def test_a_space_over_an_adapter_names_its_base(made):
    facts = read_facts(find_policy(str(made)), base_model="some/base")
    settings = json.loads(space_files(facts, repo="a/b", format="peft")["settings.json"])
    assert (settings["model"], settings["base"]) == ("a/b", "some/base")


# ---- what is refused ----


def refused(*words: Any, code: int, error: str, kind: str | None = None, field: str | None = None) -> str:
    """The message of a command that ends so."""
    done = cli("push", *words, "--json")
    assert done.exit_code == code, done.output
    told = json.loads(done.stdout)["error"]
    assert (told["code"], told["kind"], told["field"]) == (error, kind, field) and told["hint"]
    wording(done.stderr)
    return done.stderr


@pytest.mark.parametrize(
    "to", [[], ["--to", "sums"], ["--to", "a b/c"], ["--to", "a/b/c"], ["--to", "https://example.com/a/b"]]
)
def test_a_name_that_is_none(made, hub, to):
    refused(made, *to, code=2, error="invalid_config", field="--to")
    assert not hub.seen


@pytest.mark.parametrize("to", ["hf://me/sums", "https://huggingface.co/me/sums/"])
def test_a_name_as_it_is_copied(made, hub, to):
    assert cli("push", made, "--to", to).exit_code == 0
    assert ("model", "me/sums") in hub.repos


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--dtype", "float16"], "--dtype"),
        (["--format", "merged", "--dtype", "q8_0"], "--dtype"),
        (["--format", "gguf", "--dtype", "q4_k_m"], "--dtype"),
        (["--space"], "--space"),
        (["--format", "gguf", "--space"], "--space"),
        (["--base-model", "somewhere"], "--base-model"),
    ],
)
def test_what_does_not_go_together(made, hub, words, field):
    refused(made, "--to", "me/sums", *words, code=2, error="invalid_config", field=field)
    assert not hub.seen


def test_without_a_token(made, hub, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    refused(made, "--to", "me/sums", code=4, error="hub_failed", kind="no_token")
    assert not hub.seen


def test_with_a_token_that_is_not_valid(made, hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    said = refused(made, "--to", "me/sums", code=4, error="hub_failed", kind="refused")
    assert "hf_wrong" not in said and not hub.repos


def test_with_a_token_that_may_only_read(made, hub):
    hub.role = "read"
    refused(made, "--to", "me/sums", code=4, error="hub_failed", kind="refused")
    assert not hub.repos


def test_to_somebody_else(made, hub):
    hub.add("you/sums")
    refused(made, "--to", "you/sums", code=4, error="hub_failed", kind="refused", field="--to")
    assert len(hub.repos["model", "you/sums"].commits) == 1


@pytest.mark.parametrize("route", ["/api/repos/create", "/preupload/", "/commit/"])
def test_a_token_that_may_not_write_there(made, hub, route):
    hub.plan("POST", route, Refusal(status=403))
    refused(made, "--to", "my-lab/sums", code=4, error="hub_failed", kind="refused")
    assert cli("push", made, "--to", "my-lab/sums").exit_code == 0  # and later it goes on


def test_what_everybody_sees_gets_nothing_private(made, hub):
    hub.add("me/sums", private=False)
    refused(made, "--to", "me/sums", code=2, error="hub_failed", kind="taken", field="--to")
    assert len(hub.repos["model", "me/sums"].commits) == 1
    assert cli("push", made, "--to", "me/sums", "--public").exit_code == 0


def test_what_is_there_besides_stays_and_is_named(made, hub):
    hub.add("me/sums", **{"notes.txt": b"mine"})
    done = cli("push", made, "--to", "me/sums", "--public")
    assert done.exit_code == 0 and pushed(hub)["notes.txt"] == b"mine" and hub.repos["model", "me/sums"].private
    wording(done.stderr)


def test_nobody_answers(made, tmp_path):
    with fake_hub() as hub:
        pass
    with asked_here(hub, tmp_path):
        refused(made, "--to", "me/sums", code=75, error="hub_failed", kind="away")


def test_an_upload_that_is_cut_goes_on(made, hub):
    hub.plan("PUT", "/lfs/", *[Refusal(cut=True)] * 6)  # as often as the client tries by itself
    refused(made, "--to", "me/sums", code=75, error="hub_failed", kind="away")
    assert len(hub.repos["model", "me/sums"].commits) == 1  # there is none of it
    assert cli("push", made, "--to", "me/sums").exit_code == 0
    assert pushed(hub)["adapter_model.safetensors"] and hub.sent("PUT", "/lfs/") == 7


def test_a_commit_that_fails_sends_no_file_twice(made, hub):
    hub.plan("POST", "/commit/", Refusal(status=503))
    refused(made, "--to", "me/sums", code=75, error="hub_failed", kind="away")
    assert cli("push", made, "--to", "me/sums").exit_code == 0
    assert hub.sent("PUT", "/lfs/") == 1


def test_offline_is_said(made, hub, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused(made, "--to", "me/sums", code=75, error="hub_failed", kind="away")


def test_a_run_that_trained_nothing(made, hub, tmp_path):
    shutil.copytree(made, tmp_path / "untrained")
    shutil.rmtree(tmp_path / "untrained" / "adapters")
    refused(tmp_path / "untrained", "--to", "me/x", code=2, error="adapter_not_found", kind="untrained")
    chosen = tmp_path / "chosen"
    shutil.copytree(made, chosen)
    store = AdapterStore(chosen / "adapters")
    store.activate(replace(store.active, name="base", number=0))
    refused(chosen, "--to", "me/x", code=2, error="adapter_not_found", kind="untrained")


def test_no_run(hub, made, tmp_path):
    refused("nothing", "--to", "me/x", code=2, error="adapter_not_found")
    shutil.copytree(made / "adapters" / "sums" / "v000003", tmp_path / "apart")
    (tmp_path / "apart" / "groupwise.json").unlink()
    config = tmp_path / "apart" / "adapter_config.json"
    refused(config.parent, "--to", "me/x", code=1, error="invalid_adapter")


def test_a_run_of_all_parameters(hub, tmp_path, monkeypatch):
    project = Project.make(tmp_path, model="starter")
    monkeypatch.chdir(tmp_path)
    assert cli("run", project.config, "train.lora=null", "train.steps=1", "run_dir=all", "eval=null").exit_code == 0
    refused("all", "--to", "me/all", "--format", "peft", code=2, error="invalid_config", field="--format")
    assert cli("push", "all", "--to", "me/all").exit_code == 0
    files = pushed(hub, name="me/all")
    assert "model.safetensors" in files and b"All weights, trained from" in files["README.md"]


def test_a_run_without_rollouts_has_no_dataset(made, hub, tmp_path):
    shutil.copytree(made, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "rollouts")
    refused(tmp_path / "run", "--to", "me/x", "--dataset", code=2, error="invalid_config", field="--dataset")
    assert not hub.repos


def test_a_version_of_no_run_is_refused(made):
    policy = replace(find_policy(str(made)), run_dir=None)
    with raises(ConfigError, field="RUN", words=False):
        read_facts(policy)


def test_the_kind_of_an_error_is_its_exit_code():
    codes = {kind: HubError("x", kind=kind).exit_code for kind in (None, *HubError.EXIT_CODES)}
    assert codes == {None: 1, "no_token": 4, "refused": 4, "not_found": 2, "taken": 2, "away": 75}


def test_the_format_is_the_adapter_where_there_is_one(made):
    facts = read_facts(find_policy(str(made)))
    assert checked_format(facts, Wanted(repo="a/b")) == "peft"


# ---- processes ----


@pytest.mark.slow
def test_as_a_user_would_with_an_environment_alone(made, tmp_path):
    """HF_ENDPOINT, HF_TOKEN, and nothing patched: push, then chat and PEFT in processes of their own."""
    with fake_hub() as hub:
        told = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "hf")}
        environment = {**os.environ, **told}

        def process(*words: str) -> str:
            return subprocess.run(
                [sys.executable, *words], env=environment, cwd=tmp_path, check=True, capture_output=True, text=True
            ).stdout

        assert process("-m", "groupwise", "push", str(made), "--to", "me/sums").split() == [f"{hub.url}/me/sums"]
        asked = ("What is 2 + 3?", "--temperature", "0")
        here, there = (process("-m", "groupwise", "chat", name, *asked) for name in (str(made), "hf://me/sums"))
        assert here == there
        code = (
            "from peft import PeftModel; from transformers import AutoModelForCausalLM\n"
            "from groupwise.config.run import STARTER_DIR\n"
            "base = AutoModelForCausalLM.from_pretrained(STARTER_DIR)\n"
            "print(PeftModel.from_pretrained(base, 'me/sums').active_adapter)"
        )
        assert process("-c", code).split() == ["default"]
