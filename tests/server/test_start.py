"""What a server begins with: an adapter of a run, copied into its store, and the run's pages under /run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from starlette.testclient import TestClient

from groupwise.config.serve import serve_config
from groupwise.errors import AdapterError
from groupwise.server.assemble import begin_with
from groupwise.server.guard import Gate
from groupwise.server.run_app import WithRun
from groupwise.store.locate import Located
from groupwise.types import PolicyVersion
from run_place import make_run
from whole_server import whole
from wording import raises


@pytest.fixture
def server(tmp_path, model_dir):
    with whole(tmp_path / "state", model_dir) as running:
        yield running


@pytest.fixture
def adapters(make_base, make_adapter):
    base = make_base("qwen3", dtype=torch.float32, context=256)
    return [Located(version=PolicyVersion("toy", 7 + seed), directory=make_adapter(base, seed=seed)) for seed in (0, 1)]


def test_it_keeps_its_name_and_number_and_is_taken_once(server, adapters):
    store, (seven, eight) = server.server.store, adapters
    assert str(begin_with(server.server, seven, always=False)) == "toy@7" == str(store.active)
    store.activate(PolicyVersion.base())
    assert str(begin_with(server.server, seven, always=False)) == "toy@7"  # is here already: what was active stays so
    assert store.active.is_base
    begin_with(server.server, seven, always=True)
    assert str(store.active) == "toy@7"
    assert str(begin_with(server.server, eight, always=False)) == "toy@8" == str(store.active)
    other = Located(version=PolicyVersion("toy", 7), directory=eight.directory)
    assert str(begin_with(server.server, other, always=False)) == "toy@8"  # the same weights
    assert [str(version) for version in store.versions("toy")] == ["toy@7", "toy@8"]


def test_a_number_that_is_taken_by_other_weights_is_not_given_twice(server, adapters):
    seven, eight = adapters
    begin_with(server.server, seven, always=False)
    other = Located(version=PolicyVersion("toy", 7), directory=eight.directory)
    assert str(begin_with(server.server, other, always=False)) == "toy@8"


def test_an_adapter_of_another_model_is_refused(server, adapters):
    wrong = Located(version=adapters[0].version, directory=adapters[0].directory, base_model="x", base_hash="0" * 64)
    with raises(AdapterError):
        begin_with(server.server, wrong, always=False)
    assert not server.server.store.names()


def test_the_run_has_its_pages_beside_the_servers(server, tmp_path):
    run = make_run(tmp_path / "runs" / "toy-1")
    before = sorted((path, path.stat().st_mtime_ns) for path in Path(run).rglob("*"))
    assert server.http.get("/v1/config").json()["run"] is None
    served = PolicyVersion("toy", 7)
    app = WithRun(server.app, Path(run), serve_config({"api_key": "k"}), gate=Gate("ready"), served=served)
    http = TestClient(app, base_url="http://127.0.0.1:8420", follow_redirects=False)
    assert http.get("/run").headers["location"] == "run/ui/"
    assert http.get("/run/", headers={"accept": "text/html"}).headers["location"] == "ui/"
    assert "text/html" in http.get("/run/ui/").headers["content-type"]
    assert http.get("/run/v1/runs").status_code == 401
    told = http.get("/run/v1/runs", headers={"authorization": "Bearer k"}).json()
    assert [each["run"] for each in told["runs"]] == ["toy-1"] == [http.get("/v1/config").json()["run"]]
    assert told["served"] == "toy@7"
    assert http.get("/v1/adapters").json()["available"] == []  # the server's own routes are where they were
    assert http.get("/", headers={"accept": "text/html,*/*;q=0.8"}).headers["location"] == "ui/"
    assert http.get("/", headers={"accept": "*/*"}).headers["location"] == "ui/"
    assert sorted((path, path.stat().st_mtime_ns) for path in Path(run).rglob("*")) == before
