"""`hf://OWNER/NAME`: an adapter on the hub wherever one is named, from a hub that answers as the real one does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import close_session

from cli_project import Project, cli
from fake_hub import FakeHub, Refusal, asked_here, fake_hub
from groupwise.errors import AdapterError, AdapterNotFoundError, ConfigError, GroupwiseError, HubError
from groupwise.store.hub_adapters import MANNER, base_of, download_adapter
from groupwise.store.hub_errors import explained
from groupwise.store.locate import find_adapter, find_policy, find_version
from wording import raises


@pytest.fixture
def hub(tmp_path) -> Iterator[FakeHub]:
    with fake_hub() as hub, asked_here(hub, tmp_path / "hf"):
        yield hub


@pytest.fixture
def files(make_base, make_adapter) -> dict[str, bytes]:
    """What PEFT saves of an adapter."""
    directory = make_adapter(make_base("qwen3", dtype=torch.float32, context=256))
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_it_is_downloaded_once_as_plain_files(hub, files):
    hub.add("me/sums", **files)
    found = [find_adapter("hf://me/sums") for _ in range(2)]
    assert str(found[0].version) == "sums@1" and found[0] == found[1]
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        path = found[0].directory / name
        assert path.read_bytes() == files[name] and not path.is_symlink()
    assert hub.sent("GET", "/resolve/") == 2 and found[0].run_dir is None and found[0].store is None


def test_its_base_is_what_it_names(hub, files):
    config = json.loads(files["adapter_config.json"]) | {"base_model_name_or_path": "some/model"}
    hub.add("me/sums", **(files | {"adapter_config.json": json.dumps(config).encode()}))
    assert find_policy("hf://me/sums").model == "some/model"
    nameless = files | {"adapter_config.json": json.dumps(config | {"base_model_name_or_path": None}).encode()}
    hub.add("me/nameless", **nameless)
    assert base_of(download_adapter("hf://me/nameless")) is None
    with raises(AdapterError, words=False):
        find_policy("hf://me/nameless")


def test_how_it_was_asked_comes_with_it(hub, files):
    config = json.loads(files["adapter_config.json"]) | {"base_model_name_or_path": "some/model"}
    files |= {"adapter_config.json": json.dumps(config).encode()}
    said = {"system": "Be brief.", "chat": {"template_kwargs": {"enable_thinking": False}}}
    hub.add("me/sums", **(files | {MANNER: json.dumps(said | {"other": 1}).encode()}))
    hub.add("me/plain", **files)
    hub.add("me/torn", **(files | {MANNER: b"{"}))
    assert find_policy("hf://me/sums").manner == said
    assert find_policy("hf://me/plain").manner == find_policy("hf://me/torn").manner == {}


def test_a_revision_is_that_commit_and_a_branch_its_newest(hub, files):
    repo = hub.add("me/sums", **files)
    first = repo.commits[-1][0]
    config = json.loads(files["adapter_config.json"]) | {"lora_alpha": 99}
    repo.commit("other", {"adapter_config.json": json.dumps(config).encode()})
    alphas = [
        json.loads((find_adapter(f"hf://me/sums{at}").directory / "adapter_config.json").read_text())["lora_alpha"]
        for at in ("", f"@{first}", "@main")
    ]
    assert alphas[0] == alphas[2] == 99 != alphas[1]


def test_where_the_hub_is_away_what_is_cached_counts(hub, files):
    hub.add("me/sums", **files)
    found = find_adapter("hf://me/sums")
    hub.close()
    close_session()  # else a connection that is open still is
    assert find_adapter("hf://me/sums") == found
    with raises(HubError, kind="away"):
        find_adapter("hf://me/other")


def test_a_server_error_is_no_missing_adapter(hub):
    hub.plan("GET", "/api/models/", *[Refusal(status=503)] * 9)
    with raises(HubError, kind="away") as caught:
        find_adapter("hf://me/sums")
    assert caught.value.exit_code == 75


@pytest.mark.parametrize("name", ["hf://", "hf://sums", "hf://me/sums/more", "hf://me/sums@", "hf://me/su ms"])
def test_what_is_no_such_name(hub, name):
    with raises(ConfigError):
        find_adapter(name)
    assert not hub.seen


def test_what_is_not_there(hub, files):
    hub.add("me/sums", **files)
    for name in ("hf://me/nothing", "hf://me/sums@nothing"):
        with raises(HubError, kind="not_found") as caught:
            find_version(name)
        assert caught.value.exit_code == 2


def test_a_private_one_needs_the_token(hub, files, monkeypatch):
    hub.add("me/sums", **files)
    monkeypatch.delenv("HF_TOKEN")
    with raises(HubError, kind="not_found"):
        find_adapter("hf://me/sums")


def test_what_holds_no_adapter(hub, files):
    hub.add("me/model", **{"config.json": b"{}", "model.safetensors": b"x"})
    hub.add("me/pickle", **{"adapter_config.json": files["adapter_config.json"], "adapter_model.bin": b"x"})
    hub.add("me/broken", **(files | {"adapter_model.safetensors": b"x" * 64}))
    for name in ("model", "pickle", "broken"):
        with raises(AdapterError, words=name != "broken"):
            find_adapter(f"hf://me/{name}")


def test_a_repository_called_base_is_no_base(hub, files):
    hub.add("me/base", **files)
    assert str(find_adapter("hf://me/base").version) == "me-base@1"


def test_errors_of_ours_pass_and_others_are_explained():
    ours = AdapterNotFoundError("x")
    with raises(GroupwiseError, words=False) as caught, explained("doing", repo="a/b"):
        raise ours
    assert caught.value is ours
    with raises(HubError, kind=None), explained("doing something with", repo="a/b"):
        raise KeyError("a field of tomorrow")


def test_a_run_starts_from_it(hub, files, tmp_path: Path, model_dir, monkeypatch):
    """`adapters.start: hf://...`, in a run over the model of the adapter."""
    hub.add("me/sums", **files)
    project = Project.make(tmp_path, model=model_dir)
    monkeypatch.chdir(tmp_path)
    words = ("adapters.start=hf://me/sums", "train.steps=1", "run_dir=out", "train.lora.rank=3", "train.lora.alpha=6")
    done = cli("run", project.config, *words)
    assert done.exit_code == 0, done.output
    assert hub.sent("GET", "/resolve/") == 2 and find_policy("out").adapter is not None
