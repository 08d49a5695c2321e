"""Health, readiness, metrics, models, configuration and history of a whole server."""

import errno
import json
import os
import re
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from groupwise import __version__
from groupwise.errors import StorageFullError
from groupwise.model.load import LoadedModel
from groupwise.platform import memory_bytes
from groupwise.server import storage
from groupwise.types import PolicyVersion
from whole_server import Whole, whole
from wording import wording

KEY = "sk-planted-0123456789"
CHAT = {"messages": [{"role": "user", "content": "What is 2+2?"}], "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def site(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    with whole(tmp_path_factory.mktemp("state"), model_dir, api_key=KEY, served_model_name="tiny") as site:
        yield site


@pytest.fixture(scope="module")
def versions(site: Whole, make_adapter: Callable[..., Path]) -> list[PolicyVersion]:
    base: LoadedModel = site.server.base
    directory = make_adapter(base, seed=1)
    first = site.publish(directory, "math", step=1)
    return [first, site.publish(directory, "math", parent=first), site.publish(directory, "sql")]


def test_health_tells_strangers_only_that_it_lives(site: Whole) -> None:
    stranger = site.http.get("/health", headers={"authorization": "Bearer wrong"}).json()
    assert set(stranger) == {"status", "version", "uptime_seconds", "active_adapter", "gpu_memory"}
    assert stranger["status"] == "ok" and stranger["version"] == __version__ and stranger["active_adapter"] is None
    assert site.http.get("/v1/health", headers={"authorization": "Bearer wrong"}).status_code == 401


def test_health_tells_who_has_the_key_everything(site: Whole, versions: list[PolicyVersion]) -> None:
    health = site.http.get("/health").json()
    assert health["status"] == "ok" and health["model"] == "tiny" and health["backend"] == "cpu"
    assert health["active_version"] == "base" and health["adapters_loaded"] == 0 and health["images"] is False
    assert health["scheduler"]["running"] == 0 and health["training"] == {"active_job": None, "queued": 0}
    checks = {check["name"]: check["pass"] for check in health["checks"]}
    names = ("model_loaded", "ledger", "storage", "disk_space", "training_worker")
    assert checks == dict.fromkeys(names, True)
    assert set(site.http.get("/v1/health").json()) == set(health)
    chat = {"model": str(versions[0]), "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    assert site.http.post("/v1/chat/completions", json=chat).status_code == 200
    assert site.http.get("/health").json()["adapters_loaded"] == 1  # of the three versions in the store


def test_jobs_that_wait_and_all_that_run_show(site: Whole) -> None:
    ledger = site.server.ledger
    options = {"kind": "grpo", "config": {}, "summary": {}, "payload": b"{}", "steps": 3, "auto_load": True}
    submitted = [ledger.submit(adapter=name, **options)[0] for name in ("x", "y")]
    try:
        assert site.http.get("/health").json()["training"]["queued"] == 2
        assert metric(site, "groupwise_jobs", state="queued") == 2
        leases = [lease for _ in submitted if (lease := ledger.lease("w")) is not None]
        for step, lease in enumerate(leases, 1):
            ledger.progress(lease, phase="training", step=step, metrics={"loss/policy": step / 4})
        job = site.http.get("/health").json()["training"]["active_job"]
        assert job["job_id"] in {each.id for each in submitted} and 0 < job["progress"] < 1
        assert metric(site, "groupwise_training_active") == 1
        for step, lease in enumerate(leases, 1):
            whose = {"adapter": lease.job.adapter, "tenant": ""}
            assert metric(site, "groupwise_train_step", **whose) == step
            assert metric(site, "groupwise_train_metric", **whose, metric="loss/policy") == step / 4
        assert len(leases) == 2
        for lease in leases:
            ledger.fail(lease, {"code": "x", "message": "y"})
    finally:
        assert metric(site, "groupwise_jobs", state="failed") == 2


def test_a_full_disk_is_not_ready(model_dir: Path, tmp_path: Path) -> None:
    with whole(tmp_path, model_dir, min_free_bytes=1 << 60) as site:
        response = site.http.get("/ready")
        assert response.status_code == 503
        wording(response.json()["error"])
        assert int(response.headers["retry-after"]) >= 1
        health = site.http.get("/health")
        assert health.status_code == 200 and health.json()["status"] == "degraded"
        assert metric(site, "groupwise_ready") == 0


def test_a_lost_ledger_is_not_ready(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from groupwise.errors import StorageError

    def broken(*_: Any, **__: Any) -> Any:
        raise StorageError("the disk is gone")

    with whole(tmp_path, model_dir) as site:
        assert site.http.get("/ready").json() == {"ready": True}
        monkeypatch.setattr(site.server.ledger, "jobs", broken)
        assert "the disk is gone" in site.http.get("/ready").json()["error"]["message"]
        assert site.http.get("/health").json()["status"] == "degraded"
        assert site.http.get("/metrics").status_code == 200


@contextmanager
def nobody() -> Iterator[None]:
    """Within: a user whom permissions concern."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that everybody may use."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o777)
        yield Path(directory)


@pytest.mark.parametrize("directory", ["adapters", "spool", "."])
def test_a_directory_that_may_not_be_written_is_not_ready(
    model_dir: Path, public: Path, monkeypatch: pytest.MonkeyPatch, directory: str
) -> None:
    monkeypatch.setattr(storage, "PROBE_S", 0.0)
    state = public / "state"
    with whole(state, model_dir) as site:
        for path in (state, state / "spool", state / "adapters"):
            path.chmod(0o777)
        with nobody():
            assert site.http.get("/ready").json() == {"ready": True}
        (state / directory).chmod(0o555)
        with nobody():
            error = site.http.get("/ready")
            assert error.status_code == 503
            wording(error.json()["error"])
            health = site.http.get("/health")
            assert health.status_code == 200 and health.json()["status"] == "degraded"
        (state / directory).chmod(0o777)
        assert site.http.get("/ready").json() == {"ready": True}


def test_adapters_that_cannot_be_read_are_a_507_and_not_ready(
    model_dir: Path, public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "PROBE_S", 0.0)
    with whole(public / "state", model_dir) as site:
        (public / "state" / "adapters").chmod(0o000)
        with nobody():
            for route in ("/v1/adapters", "/v1/models"):
                answer = site.http.get(route)
                assert (answer.status_code, answer.json()["error"]["code"]) == (507, "storage_denied")
            assert site.http.get("/ready").status_code == 503
            health = site.http.get("/health")
            assert health.status_code == 200 and health.json()["status"] == "degraded"
            chat = {"messages": [{"role": "user", "content": "2+2?"}], "max_tokens": 2}
            assert site.http.post("/v1/chat/completions", json=chat).status_code == 200  # the base is in memory


def test_what_could_not_be_kept_is_not_called_well(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a small file can still be written; for a while, and then well again."""
    monkeypatch.setattr(storage, "PROBE_S", 0.0)
    with whole(tmp_path, model_dir) as site:

        def full(*args: object) -> None:
            raise StorageFullError("no space left")

        assert site.http.get("/ready").status_code == 200
        with monkeypatch.context() as patch:
            patch.setattr(type(site.app.state.server.store), "list", full)
            assert site.http.get("/v1/adapters").json()["error"]["code"] == "storage_full"
        assert site.http.get("/v1/adapters").status_code == 200
        assert "storage_full" in site.http.get("/ready").json()["error"]["message"]
        monkeypatch.setattr(storage, "FAILED_S", 0.0)
        assert site.http.get("/ready").json() == {"ready": True}


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_a_disk_that_fails_is_not_ready(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(storage, "PROBE_S", 0.0)
    with whole(tmp_path, model_dir) as site:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            assert os.strerror(code) in site.http.get("/ready").json()["error"]["message"]
            assert metric(site, "groupwise_ready") == 0
        assert site.http.get("/ready").json() == {"ready": True}
        assert not list(tmp_path.rglob(".staging-*"))


def test_a_damaged_ledger_is_not_ready_and_no_route_answers_500(model_dir: Path, tmp_path: Path) -> None:
    with whole(tmp_path, model_dir) as site:
        options = {"config": {"note": "x" * 3000}, "summary": {"warnings": []}, "payload": b"{}", "steps": 1}
        jobs = [site.server.ledger.submit(kind="grpo", adapter="a", auto_load=True, **options)[0] for _ in range(8)]
        with sqlite3.connect(tmp_path / "ledger.db") as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        data = (tmp_path / "ledger.db").read_bytes()
        (tmp_path / "ledger.db").write_bytes(data[:4096] + bytes(255 - byte for byte in data[4096:]))
        routes = ["/v1/train/status", "/v1/train/queue", "/v1/rollouts", "/v1/health", "/metrics", "/v1/models"]
        routes += [f"/v1/train/{what}/{jobs[3].id}" for what in ("status", "metrics", "events")]
        answers = {route: site.http.get(route) for route in routes}
        assert {answer.status_code for answer in answers.values()} <= {200, 503}
        told = answers["/v1/train/status"]
        assert (told.status_code, told.json()["error"]["code"]) == (503, "ledger_damaged")
        assert told.headers["x-should-retry"] == "false"
        wording(told.json()["error"])
        body = {"examples": [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]}
        assert site.http.post("/v1/train/sft", json=body).json()["error"]["code"] == "ledger_damaged"
        assert site.http.post(f"/v1/train/cancel/{jobs[3].id}").json()["error"]["code"] == "ledger_damaged"
        assert site.http.get("/ready").status_code == 503
        assert site.http.get("/health").json()["status"] == "degraded"


# ---- metrics ----
def metric(site: Whole, name: str, /, **labels: str) -> float:
    families = text_string_to_metric_families(site.http.get("/metrics").text)
    (found,) = [s.value for family in families for s in family.samples if (s.name, s.labels) == (name, labels)]
    return found


def test_metrics_are_prometheus(site: Whole) -> None:
    response = site.http.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    names = {s.name for family in text_string_to_metric_families(response.text) for s in family.samples}
    assert all(name.startswith("groupwise_") for name in names)
    for name in ("num_requests_running", "num_requests_waiting", "adapter_active_info", "ready", "disk_free_bytes"):
        assert f"groupwise_{name}" in names
    assert metric(site, "groupwise_adapter_active_info", name="base", version="0") == 1
    for line in site.http.get("/metrics").text.splitlines():
        assert not re.match(r"# HELP groupwise_(\w+) \1$", line), f"says nothing: {line}"


def test_a_chat_is_counted_and_remembered(site: Whole) -> None:
    site.http.post("/v1/chat/completions", json=CHAT)
    before = metric(site, "groupwise_generation_tokens_total", model_name="tiny")
    answer = site.http.post("/v1/chat/completions", json=CHAT).json()
    after = metric(site, "groupwise_generation_tokens_total", model_name="tiny")
    assert after - before == answer["usage"]["completion_tokens"]
    newest = site.http.get("/v1/stats/recent-requests").json()[0]
    assert newest["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert newest["adapter"] == "base" and "2+2" in newest["prompt_preview"] and newest["duration_ms"] > 0
    assert site.http.get("/v1/stats/decode").json()["tok_per_sec"] > 0


# ---- models ----
def test_models_are_the_base_and_every_version_and_name(site: Whole, versions: list[PolicyVersion]) -> None:
    cards = {card["id"]: card for card in site.http.get("/v1/models").json()["data"]}
    assert set(cards) == {"tiny", "base", "math", "math@1", "math@2", "sql", "sql@1"}
    assert (cards["math"]["root"], cards["math@2"]["parent"], cards["sql"]["root"]) == ("math@2", "math@1", "sql@1")
    assert cards["tiny"]["root"] == "base"
    for card in cards.values():
        assert card["object"] == "model" and card["max_model_len"] == 256 and card["created"] > 1.7e9
    for name in cards:
        assert site.http.get(f"/v1/models/{name}").json() == cards[name]


def test_a_name_stands_for_its_active_version(site: Whole, versions: list[PolicyVersion]) -> None:
    assert site.http.post("/v1/adapters/load", json={"name": "math@1"}).status_code == 200
    try:
        cards = {card["id"]: card for card in site.http.get("/v1/models").json()["data"]}
        assert cards["math"]["root"] == cards["tiny"]["root"] == "math@1"
        assert site.http.get("/health").json()["active_adapter"] == "math"
        assert metric(site, "groupwise_adapter_swaps_total", result="ok") == 1
        answer = site.http.post("/v1/chat/completions", json=CHAT)
        assert answer.headers["x-adapter-version"] == "math@1"
    finally:
        site.http.post("/v1/adapters/unload")


@pytest.mark.parametrize("name", ["nope", "math@9", "a/b", "%2e%2e", "a%00b", "x" * 500])
def test_an_unknown_model_is_404(site: Whole, name: str) -> None:
    response = site.http.get(f"/v1/models/{name}")
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (404, "model_not_found")
    assert error["param"] == "model" and len(error["message"]) < 200


def test_a_recent_request_goes_by_the_ids_of_its_answer(site: Whole) -> None:
    answer = site.http.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "mine-1"})
    batch = site.http.post("/v1/completions/batch", json={"prompts": [CHAT["messages"]], "max_tokens": 1})
    newest, before, *_ = site.http.get("/v1/stats/recent-requests").json()
    assert (before["id"], before["request_id"]) == (answer.json()["id"], "mine-1")
    assert (newest["id"], newest["request_id"]) == (batch.json()["id"], batch.headers["x-request-id"])


# ---- configuration ----
def test_the_configuration_shows_without_its_secrets(site: Whole) -> None:
    response = site.http.get("/v1/config")
    shown = response.json()
    assert KEY not in response.text
    assert (shown["dtype"], shown["device"], shown["context_length"]) == ("float32", "cpu", 256)
    assert shown["config"]["max_n"] == 128 and re.fullmatch(r"[0-9a-f]{64}", shown["base_hash"])


def test_the_configuration_shows_memory_and_what_a_job_trains_with_that_says_nothing(site: Whole) -> None:
    shown = site.http.get("/v1/config").json()
    weights = sum(each.nbytes for each in site.server.base.model.parameters()) / 1e9
    assert shown["memory"]["model_gb"] == pytest.approx(weights) and shown["memory"]["free_gb"] is None
    assert shown["memory"]["total_gb"] == memory_bytes() / 1e9
    grpo, sft = shown["training"]["grpo"], shown["training"]["sft"]
    assert (grpo["lora_rank"], grpo["target_modules"], grpo["micro_tokens"]) == (16, "all-linear", 8192)
    assert (grpo["kl"], grpo["kl_coeff"], sft["epochs"], sft["learning_rate"]) == ("k3", 0.1, 3, 1e-4)
    assert "kl" not in sft


def test_an_error_names_no_directory_of_the_machine(model_dir: Path, tmp_path: Path, make_adapter: Any) -> None:
    with whole(tmp_path, model_dir) as site:
        version = site.publish(make_adapter(site.server.base, seed=1), "math")
        (site.server.store.path(version) / "adapter_model.safetensors").write_bytes(b"not any more")
        answer = site.http.post("/v1/adapters/math/activate")
        said = answer.json()["error"]
    assert (answer.status_code, said["code"]) == (409, "swap_refused")
    wording(said)
    assert str(tmp_path) not in answer.text and str(model_dir) not in answer.text


# ---- HEAD ----
STREAM = "/v1/events"  # without an end; test_live.py reads it


def test_whatever_can_be_read_answers_head(site: Whole) -> None:
    """As load balancers and monitors ask."""
    paths = [
        path for path, operations in site.app.openapi()["paths"].items() if "get" in operations and "{" not in path
    ]
    assert {"/health", "/ready", "/metrics", "/v1/models", "/v1/train/status"} <= set(paths)
    paths.remove(STREAM)
    assert site.http.head(STREAM).headers["content-type"].startswith("text/event-stream")
    for path in paths:
        get, head = site.http.get(path), site.http.head(path)
        assert (head.status_code, head.content, set(head.headers)) == (200, b"", set(get.headers)), path
        assert head.headers["content-type"] == get.headers["content-type"]
    site.http.headers["authorization"], key = "Bearer wrong", site.http.headers["authorization"]
    try:
        assert site.http.head("/v1/models").status_code == 401 and site.http.head("/health").status_code == 200
    finally:
        site.http.headers["authorization"] = key


def test_the_key_is_in_no_answer(site: Whole) -> None:
    for path in site.app.openapi()["paths"]:
        if "get" in site.app.openapi()["paths"][path] and "{" not in path and path != STREAM:
            assert KEY not in site.http.get(path).text
    assert KEY not in json.dumps(site.app.openapi())
