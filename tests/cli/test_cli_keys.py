"""`groupwise keys`, and that the server of the state directory takes what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from groupwise.cli.main import app
from groupwise.server.listen import LOCK, own
from groupwise.store.keys import ROLES, KeyFile


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`keys("list")`: a command in an empty directory."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(app, ["keys", *words])


def test_a_key_s_life(keys, tmp_path: Path) -> None:
    there = KeyFile(tmp_path / "groupwise-state")
    made = keys("add", "phone-app", "--role", "sample")
    assert made.exit_code == 0
    key = made.stdout.strip()
    found = there.find(key)
    assert found is not None and (found.name, found.role) == ("phone-app", "sample")
    listed = keys("list", "--json")
    (row,) = json.loads(listed.stdout)
    assert (row["name"], row["role"], "digest" in row) == ("phone-app", "sample", False)
    assert key not in keys("list").stdout and "phone-app" in keys("list").stdout
    turned = json.loads(keys("turn", "phone-app", "--json").stdout)
    assert turned["name"] == "phone-app" and there.find(turned["key"]) is not None and there.find(key) is None
    assert keys("revoke", "phone-app").exit_code == 0
    assert there.all() == [] and json.loads(keys("list", "--json").stdout) == []


def test_a_key_is_for_the_server_that_runs_here_whose_state_is_in_a_folder_of_its_run(keys, tmp_path: Path) -> None:
    """As `groupwise serve RUN` has it. In the folder of another server the key would protect nothing."""
    places = [tmp_path / "groupwise-state" / "runs" / name for name in ("math-1", "math-2")]
    places[0].mkdir(parents=True)
    (places[0] / LOCK).touch()
    assert KeyFile(places[0]).find(keys("add", "a", "--role", "read").stdout.strip()) is not None
    places[1].mkdir()
    (places[1] / LOCK).touch()
    refused = keys("add", "b", "--role", "read", "--json")  # of either, and neither runs
    assert refused.exit_code == 2 and json.loads(refused.stdout)["error"]["field"] == "--state-dir"
    with own(places[1]):
        assert KeyFile(places[1]).find(keys("add", "b", "--role", "read").stdout.strip()) is not None
        assert [row["name"] for row in json.loads(keys("list", "--json").stdout)] == ["b"]
    assert not (tmp_path / "groupwise-state" / "keys.json").exists()


@pytest.mark.parametrize("role", ROLES)
def test_every_role(keys, tmp_path: Path, role: str) -> None:
    made = keys("add", "a", "--role", role, "--state-dir", "elsewhere")
    found = KeyFile(tmp_path / "elsewhere").find(made.stdout.strip())
    assert found is not None and found.role == role


@pytest.mark.parametrize(
    "words",
    [("add", "a", "--role", "king"), ("add", "a b", "--role", "read"), ("turn", "a"), ("revoke", "a"), ("add", "a")],
)
def test_what_is_wrong_changes_nothing(keys, tmp_path: Path, words: tuple[str, ...]) -> None:
    assert keys(*words).exit_code == 2
    assert KeyFile(tmp_path / "groupwise-state").all() == []


def test_a_tenants_key_and_the_log_of_what_was_done(keys, tmp_path: Path) -> None:
    made = keys("add", "acme-app", "--role", "train", "--tenant", "acme", "--adapters", "3", "--jobs", "2")
    assert made.exit_code == 0, made.stderr
    (row,) = json.loads(keys("list", "--json").stdout)
    assert (row["tenant"], row["adapters"], row["bytes"], row["jobs"]) == ("acme", 3, None, 2)
    keys("turn", "acme-app")
    keys("revoke", "acme-app")
    done = json.loads(keys("log", "--json").stdout)
    assert [(each["method"], each["things"]["key"]) for each in done] == [
        ("revoke", "acme:acme-app"),
        ("turn", "acme:acme-app"),
        ("add", "acme:acme-app"),
    ]
    assert made.stdout.strip() not in json.dumps(done)
    assert "acme:acme-app" in keys("log", "--limit", "1").stdout
    assert json.loads(keys("log", "--tenant", "acme", "--json").stdout) == []  # with its keys nothing was changed


@pytest.mark.parametrize("words", [("--role", "admin"), ("--role", "read", "--adapters", "0"), ("--role", "x")])
def test_what_a_tenants_key_cannot_be(keys, tmp_path: Path, words: tuple[str, ...]) -> None:
    assert keys("add", "app", "--tenant", "acme", *words).exit_code == 2
    assert keys("add", "app", "--tenant", "", "--role", "read").exit_code == 2  # it would be the owner's
    assert keys("add", "app", "--role", "train", "--jobs", "2").exit_code == 2
    assert KeyFile(tmp_path / "groupwise-state").all() == []
