"""The adapter routes over a real store and engine: what PEFT made is served, what is served PEFT loads, and nothing is
believed before it has been looked at."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from fastapi import FastAPI
from safetensors.torch import load_file, save_file
from starlette.testclient import TestClient

from groupwise.config.serve import ServeConfig
from groupwise.engine.local import LocalEngine
from groupwise.model.load import LoadedModel
from groupwise.server import adapters
from groupwise.server.errors import add_handlers
from groupwise.server.policies import Policies
from groupwise.server.storage import StorageProbe
from groupwise.store.adapters import AdapterStore
from groupwise.store.feedback import FeedbackLog
from groupwise.store.files import CONFIG, WEIGHTS, Provenance
from groupwise.store.ledger import Ledger
from groupwise.store.merge import MergeMode, WeightedAdapter, merge_adapters
from groupwise.types import PolicyVersion, SamplingParams, SamplingRequest
from wording import wording

IDS = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3)
HALF = 4


@dataclass
class Api:
    """A client, and the parts behind it."""

    client: TestClient
    store: AdapterStore
    engine: LocalEngine
    policies: Policies
    ledger: Ledger
    feedback: FeedbackLog
    base: LoadedModel
    make_base: Any
    root: Path

    def json(self, method: str, path: str, *, status: int = 200, **options) -> dict:
        """A call whose answer has the status; an error has all five keys of the envelope."""
        answer = self.client.request(method, f"/v1/adapters{path}", **options)
        assert answer.status_code == status, answer.text
        body = answer.json()
        if status >= 400:
            assert set(body["error"]) == {"message", "type", "param", "code", "hint"}
            assert str(self.root) not in answer.text and len(answer.text) < 1500
            return body["error"]
        return body

    def upload(self, name: str, archive: bytes, *, status: int = 200, **fields: str) -> dict:
        files = {"archive": ("adapter.tar.gz", archive, "application/gzip")}
        return self.json("POST", "/upload", status=status, data={"name": name, **fields}, files=files)

    def scored(self, text: str) -> torch.Tensor:
        """Log-probabilities of the second part of IDS by a version that the server serves."""
        version = self.policies.resolve(adapter=text)
        if version not in self.policies.in_use and not version.is_base:
            self.json("POST", "/load", json={"name": text})
        return torch.tensor(self.engine.score(IDS[:HALF], IDS[HALF:], version), dtype=torch.float64)

    def of_peft(self, directory: Path) -> torch.Tensor:
        """The same by PEFT, over a base of its own."""
        model = peft.PeftModel.from_pretrained(self.make_base().model, str(directory), autocast_adapter_dtype=False)
        with torch.no_grad():
            logp = model(input_ids=torch.tensor([IDS])).logits[0].log_softmax(-1)
        return torch.stack([logp[t - 1, IDS[t]] for t in range(HALF, len(IDS))]).double()


@pytest.fixture(scope="module")
def base(make_base) -> LoadedModel:
    return make_base()


@pytest.fixture(scope="module")
def engine(base: LoadedModel) -> Iterator[LocalEngine]:
    engine = LocalEngine(base)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    """The routes on one event loop; `api` puts a new server's parts behind them for every test."""
    app = FastAPI()
    app.include_router(adapters.router)
    add_handlers(app)
    app.state.config = ServeConfig(min_free_bytes=0)
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def api(make_base, base: LoadedModel, engine: LocalEngine, client: TestClient, tmp_path: Path) -> Iterator[Api]:
    store = AdapterStore(tmp_path / "adapters")
    policies = Policies(store, engine, base=base, served_name="tiny", max_loaded=4)
    state: Any = client.app
    state = state.state
    ledger = Ledger(tmp_path / "ledger.db")
    feedback = FeedbackLog(ledger)
    parts = {"base": base, "engine": engine, "store": store, "policies": policies, "ledger": ledger}
    parts["feedback"] = feedback
    state.server = SimpleNamespace(config=state.config, storage=StorageProbe(tmp_path), **parts)
    yield Api(client, store, engine, policies, ledger, feedback, base, make_base, tmp_path)
    policies.close()
    ledger.close()
    for version in policies.in_use:
        engine.unload(version)
    assert engine.stats()["adapters"] == 0


@pytest.fixture(scope="module")
def directories(base: LoadedModel, make_adapter) -> list[Path]:
    return [make_adapter(base, seed=seed) for seed in range(3)]


@pytest.fixture
def published(api: Api, directories: list[Path]) -> list[Path]:
    """math@1, math@2 and sql@1, as a job would have published them; their directories."""
    for i, name in enumerate(("math", "math", "sql")):
        parent = PolicyVersion("math", 1) if i == 1 else PolicyVersion.base()
        metrics = {"reward/mean": 0.25 * i, "kl": float("nan")}
        info = Provenance(
            base_model="tiny", base_hash=api.base.hash, parent=parent, step=10 * i, metrics=metrics, job=f"job-{i}"
        )
        api.store.import_(directories[i], name, info=info)
    return directories


def test_a_version_has_its_own_held_out_reward_as_it_was_judged_last(api: Api, published):
    for kind, version, reward in (
        ("gate_refused", "math@1", 0.25),
        ("gate_passed", "math@1", 0.75),
        ("gate_passed", "math@20", 0.5),
        ("prompts_worn", "math@2", 1.0),
    ):
        api.feedback.note(kind, kind, data={"version": version, "reward": reward})
    api.feedback.note("gate_refused", "no prompt could be scored", data={"version": "math@2"})
    assert [each["held_out"] for each in api.json("GET", "/math")["history"]] == [0.75, None]


def archive_of(directory: Path, *, top: str = "math", **replaced: bytes) -> bytes:
    """A tar.gz of a directory; `config` and `weights` replace the files."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", compresslevel=1) as archive:
        for path in sorted(directory.iterdir()):
            data = replaced.get({CONFIG: "config", WEIGHTS: "weights"}.get(path.name, ""), path.read_bytes())
            info = tarfile.TarInfo(f"{top}/{path.name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def peft_adapter(make_base, directory: Path, *, seed: int = 0, **options) -> Path:
    """What PEFT trains and saves."""
    torch.manual_seed(seed)
    options = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]} | options
    model = peft.get_peft_model(make_base().model, peft.LoraConfig(init_lora_weights=False, **options))
    model.save_pretrained(str(directory))
    return directory


# --- PEFT ---


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"target_modules": "all-linear"},
        {"use_rslora": True},
        {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"layers.1.mlp.down_proj": 11}},
        {"layers_to_transform": [1]},
        {"target_modules": r".*\.(q|v)_proj"},
    ],
    ids=str,
)
def test_an_adapter_made_by_peft_uploads_serves_and_gives_pefts_logits(api: Api, options: dict):
    directory = peft_adapter(api.make_base, api.root / "saved", **options)
    (directory / "README.md").write_text("---\nlibrary_name: peft\n---\n")
    answer = api.upload("theirs", archive_of(directory))
    assert answer == {
        "name": "theirs",
        "version": "theirs@1",
        "size_bytes": sum((directory / name).stat().st_size for name in (CONFIG, WEIGHTS)),
        "files": [CONFIG, WEIGHTS],
    }
    info = api.store.info(PolicyVersion("theirs", 1))
    assert (info.base_hash, info.base_model) == (api.base.hash, api.base.name)
    torch.testing.assert_close(api.scored("theirs"), api.of_peft(directory), atol=1e-9, rtol=0)
    assert not torch.allclose(api.scored("theirs"), api.scored("base"), atol=1e-2)


def test_a_download_loads_in_peft_with_the_served_logits(api: Api, published, tmp_path: Path):
    served = {}
    for text, version in (("math", "math@2"), ("math@1", "math@1"), ("sql", "sql@1")):
        answer = api.client.get(f"/v1/adapters/{text}/download")
        assert answer.status_code == 200 and answer.headers["content-type"] == "application/gzip"
        assert answer.headers["content-disposition"] == f'attachment; filename="{text}.tar.gz"'
        assert answer.headers["x-adapter-version"] == version
        with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
            assert archive.getnames() == [f"{text}/{CONFIG}", f"{text}/{WEIGHTS}"]
            archive.extractall(tmp_path / "unpacked", filter="data")
        served[text] = api.scored(text)
        torch.testing.assert_close(api.of_peft(tmp_path / "unpacked" / text), served[text], atol=1e-9, rtol=0)
    assert not torch.allclose(served["math"], served["math@1"], atol=1e-2)


def test_a_download_uploads_again_elsewhere(api: Api, published):
    archive = api.client.get("/v1/adapters/math@1/download").content
    assert api.upload("copy", archive)["version"] == "copy@1"
    torch.testing.assert_close(api.scored("copy"), api.scored("math@1"), atol=0, rtol=0)


# --- uploads that are not taken ---


@pytest.mark.parametrize(
    "made_for",
    ["Other/Model", "/home/me/models/other-model/", r"C:\models\other", "/hub/models--Other--Model/snapshots/0a1b2c"],
)
def test_an_adapter_made_for_another_model_is_refused_though_its_shapes_fit(api: Api, directories, made_for: str):
    config = json.loads((directories[0] / CONFIG).read_bytes()) | {"base_model_name_or_path": made_for}
    archive = archive_of(directories[0], config=json.dumps(config).encode())
    error = api.upload("mine", archive, status=400)
    assert error["code"] == "invalid_adapter"
    assert made_for not in error["message"].replace("Other/Model", "")
    wording(error)
    assert api.store.versions("mine") == ()
    assert api.upload("mine", archive, any_base="true")["version"] == "mine@1"
    assert api.upload("mine", archive, status=400, any_base="yes")["param"] == "any_base"


@pytest.mark.parametrize(
    "made_for", [None, "", "Owner/Tiny-Qwen3", "/models/tiny-qwen3/", "/hub/models--Owner--tiny-qwen3/snapshots/0a1b2c"]
)
def test_the_served_model_may_have_another_owner_or_folder(api: Api, directories, made_for: str | None):
    config = json.loads((directories[0] / CONFIG).read_bytes()) | {"base_model_name_or_path": made_for}
    assert api.upload("mine", archive_of(directories[0], config=json.dumps(config).encode()))["version"] == "mine@1"


def test_an_adapter_that_does_not_fit_is_refused_with_tensor_and_shapes(api: Api, published):
    """From another base model, though the upload cannot say so: the engine is asked."""
    tensors = load_file(published[0] / WEIGHTS)
    key = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    narrow = {k: t[:, :-2].contiguous() if k == key else t for k, t in tensors.items()}
    renamed = {k.replace("layers.1.", "layers.7."): t for k, t in tensors.items()}
    head = tensors | {
        f"base_model.model.lm_head.lora_{half}.weight": torch.ones(shape, dtype=torch.float64)
        for half, shape in (("A", (3, 32)), ("B", (280, 3)))
    }
    everything = json.loads((published[0] / CONFIG).read_bytes()) | {"target_modules": "all-linear"}
    for wrong, named in (
        (narrow, "targets 'model.layers.0.mlp.up_proj' with shape (30, 48); this model has (32, 48)"),
        (renamed, "targets 'model.layers.7."),
        (head, "targets 'lm_head'"),
    ):
        save_file(wrong, api.root / WEIGHTS)
        files = {"weights": (api.root / WEIGHTS).read_bytes(), "config": json.dumps(everything).encode()}
        error = api.upload("new", archive_of(published[0], **files), status=400)
        assert error["code"] == "invalid_adapter" and named in error["message"]
    assert api.store.versions("new") == () and api.policies.in_use == {}


def test_modules_of_another_model_are_refused_before_they_are_loaded(api: Api, published, monkeypatch):
    """65,536 tensors are loaded in one call that keeps Python's lock: all other requests waited more than a second."""
    monkeypatch.setattr(api.policies, "verify_files", lambda directory: pytest.fail("it was loaded"))
    tensors = load_file(published[0] / WEIGHTS)
    key = "base_model.model.model.layers.0.mlp.up_proj.lora_{}.weight"
    more = {
        key.replace("0", str(i)).format(half): tensors[key.format(half)].clone() for i in range(50) for half in "AB"
    }
    save_file(tensors | more, api.root / WEIGHTS)
    error = api.upload("new", archive_of(published[0], weights=(api.root / WEIGHTS).read_bytes()), status=400)
    assert error["code"] == "invalid_adapter" and error["hint"]
    wording(error)
    assert api.store.versions("new") == ()


def test_weights_that_overflow_when_computed_with(api: Api, published):
    tensors = {k: torch.full_like(t, 1e300) for k, t in load_file(published[0] / WEIGHTS).items()}
    save_file(tensors, api.root / WEIGHTS)
    error = api.upload("new", archive_of(published[0], weights=(api.root / WEIGHTS).read_bytes()), status=400)
    assert api.store.versions("new") == ()
    wording(error)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"r": 10**9}, "r is '1000000000'"),
        ({"lora_alpha": -1}, "lora_alpha is '-1'"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens"),
        ({"alpha_pattern": {"(.*x": 1}}, "alpha_pattern"),
        ({"peft_type": "PREFIX_TUNING"}, "peft_type"),
    ],
)
def test_configurations_that_are_refused(api: Api, published, changes: dict, named: str):
    config = json.dumps(json.loads((published[0] / CONFIG).read_text()) | changes).encode()
    assert named in api.upload("new", archive_of(published[0], config=config), status=400)["message"]
    assert api.store.versions("new") == ()


def test_archives_that_are_attacks(api: Api, published):
    """One of each kind through the route; the reader's own tests have the rest."""

    def with_member(name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"") -> bytes:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w:gz") as archive:
            info = tarfile.TarInfo(name)
            info.type, info.size, info.linkname = kind, len(data), "/etc/passwd"
            archive.addfile(info, io.BytesIO(data))
            archive.add(published[0], "math")
        return out.getvalue()

    before = sorted(api.root.rglob("*"))
    for archive in (
        with_member("../../escape"),
        with_member("/tmp/escape"),
        with_member("math/link", tarfile.SYMTYPE),
        with_member("math/link", tarfile.LNKTYPE),
        with_member("math/fifo", tarfile.FIFOTYPE),
        with_member("math/optimizer.pt", data=b"\x80\4."),
        with_member(f"math/{CONFIG}", data=b"{}"),
        b"PK\3\4 not a tar.gz",
        b"",
    ):
        assert api.upload("new", archive, status=400)["code"] == "invalid_adapter"
    assert sorted(api.root.rglob("*")) == before


@pytest.mark.parametrize(
    "name", ["", "..", "../x", "a/b", "/etc", "base", "x" * 65, "a\0b", "ä", "a@1", " a", "-a", "C:\\", "starter"]
)
def test_names_that_are_refused(api: Api, published, name: str):
    """The same rule for every route that takes a name. `starter` is what requests call the served model."""
    assert api.upload(name, archive_of(published[0]), status=400)["code"] in ("invalid_adapter", "invalid_value")
    body = {"sources": [{"name": "math", "weight": 1}], "output_name": name}
    api.json("POST", "/merge", status=400, json=body)
    assert api.store.names() == ("math", "sql")


@pytest.mark.parametrize(
    "name", ["..", "%2e%2e", "%2e%2e%2fx", "a%00b", "%00", "x" * 300, "math@", "math@0", "math@x", "%C3%A4"]
)
def test_paths_with_names_that_are_none(api: Api, published, name: str):
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/download"), ("POST", "/activate")):
        answer = api.client.request(method, f"/v1/adapters/{name}{path}")
        assert answer.status_code in (400, 404, 405, 307), (method, path, answer.text)
        assert "passwd" not in answer.text and str(api.root) not in answer.text
    assert api.store.versions("math") == (PolicyVersion("math", 1), PolicyVersion("math", 2))


def test_a_number_of_another_script_is_not_put_into_a_header(api: Api, published):
    """U+0663 is a digit to Python, and no byte of a header."""
    assert api.client.get("/v1/adapters/math@%D9%A3/download").status_code == 404
    answer = api.client.get("/v1/adapters/math@%D9%A1/download")
    assert answer.headers["content-disposition"] == 'attachment; filename="math@1.tar.gz"'


@pytest.mark.parametrize(
    ("form", "status", "param"),
    [
        ({"data": {"name": "new"}}, 415, None),
        ({"json": {"name": "new"}}, 415, None),
        ({"data": {"name": "new"}, "files": {"file": ("a.tar.gz", b"x")}}, 400, None),
        ({"files": {"archive": ("a.tar.gz", b"x")}}, 400, "name"),
        ({"files": {"name": ("n", b"new"), "archive": ("a", b"x")}}, 400, None),
        ({"data": {"name": "new"}, "files": {"other": ("a", b"x")}}, 400, None),
        ({"files": {"name": (None, b"new"), "archive": (None, b"text")}}, 400, "archive"),
        ({"data": {"name": "new", "new_version": "yes"}, "files": {"archive": ("a", b"x")}}, 400, "new_version"),
        ({"data": {"name": ["a", "b"]}, "files": {"archive": ("a", b"x")}}, 400, "name"),
        ({"content": b"--x\r\ngarbage", "headers": {"content-type": "multipart/form-data; boundary=x"}}, 400, "name"),
        ({"content": b"", "headers": {"content-type": "multipart/form-data"}}, 400, None),
    ],
)
def test_forms_that_cannot_be_read(api: Api, form: dict, status: int, param: str | None):
    error = api.json("POST", "/upload", status=status, **form)
    assert error["param"] == param
    assert ("name and archive" if status == 400 else "multipart/form-data") in error["hint"]


def test_an_existing_name_needs_new_version(api: Api, published):
    archive = archive_of(published[2])
    error = api.upload("math", archive, status=409)
    assert error["code"] == "already_exists"
    wording(error)
    assert api.upload("math", archive, new_version="true")["version"] == "math@3"
    torch.testing.assert_close(api.scored("math@3"), api.scored("sql"), atol=0, rtol=0)


def test_two_uploads_of_one_name_at_once(api: Api, published):
    """Both find the name free, and one of them is too late: it is told so, not made version 2."""
    archive, answers = archive_of(published[0]), []

    def send() -> None:
        files = {"archive": ("a.tar.gz", archive)}
        answers.append(api.client.post("/v1/adapters/upload", data={"name": "new"}, files=files).status_code)

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [200, 409, 409, 409] and api.store.versions("new") == (PolicyVersion("new", 1),)


def test_a_disk_that_is_nearly_full(api: Api, published, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=-1))
    error = api.upload("new", archive_of(published[0]), status=507)
    assert error["code"] == "storage_full"
    wording(error)


# --- listing and showing ---


def test_list(api: Api, published):
    assert api.json("GET", "")["active"] is None
    api.json("POST", "/load", json={"name": "math@1"})
    body = api.json("GET", "")
    assert (body["active"], body["active_version"]) == ("math", "math@1")
    math, sql = body["available"]
    assert math | {"modified_at": "", "size_bytes": 0} == {
        "name": "math",
        "has_config": True,
        "has_weights": True,
        "size_bytes": 0,
        "modified_at": "",
        "files": [CONFIG, WEIGHTS],
        "versions": ["math@1", "math@2"],
        "active_version": "math@1",
        "notes": {},
    }
    made = datetime.strptime(math["modified_at"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    assert abs((datetime.now(UTC) - made).total_seconds()) < 600
    assert math["size_bytes"] == sum((published[1] / name).stat().st_size for name in (CONFIG, WEIGHTS))
    assert (sql["name"], sql["active_version"]) == ("sql", None)


def test_show(api: Api, published):
    api.json("POST", "/math/activate")
    body = api.json("GET", "/math")
    assert body["versions"] == ["math@1", "math@2"] and body["active_version"] == "math@2"
    first, second = body["history"]
    assert (first["version"], first["number"], first["active"], first["parent"]) == ("math@1", 1, False, "base")
    assert (second["active"], second["parent"], second["step"], second["job_id"]) == (True, "math@1", 10, "job-1")
    assert second["metrics"] == {"reward/mean": 0.25}  # NaN is no number in JSON
    assert [entry["version"] for entry in api.json("GET", "/math@1")["history"]] == ["math@1"]
    error = api.json("GET", "/nope", status=404)
    assert error["code"] == "adapter_not_found"
    wording(error)


def test_what_is_older_than_the_versions_that_are_kept_is_marked(api: Api, directories: list[Path]):
    for i in range(12):
        job = None if i == 1 else f"job-{i}"  # the second is somebody's own
        info = Provenance(base_model="tiny", base_hash=api.base.hash, job=job)
        api.store.import_(directories[0], "math", info=info)
    assert api.json("GET", "")["keep_versions"] == 10
    assert [each["version"] for each in api.json("GET", "/math")["history"] if each["surplus"]] == ["math@1"]
    assert [each["surplus"] for each in api.json("GET", "/math@1")["history"]] == [True]


def test_a_note_is_written_beside_a_version(api: Api, published):
    assert api.json("PUT", "/math@1/notes", json={"note": " good at sums "}) == {
        "version": "math@1",
        "note": "good at sums",
    }
    assert api.json("PUT", "/math/notes", json={"note": "weak at carries"})["version"] == "math@2"
    assert [each["note"] for each in api.json("GET", "/math")["history"]] == ["good at sums", "weak at carries"]
    listed = api.json("GET", "")["available"]
    assert [each["notes"] for each in listed] == [{"math@1": "good at sums", "math@2": "weak at carries"}, {}]
    assert api.json("PUT", "/math@1/notes", json={"note": None}) == {"version": "math@1", "note": None}
    assert [each["note"] for each in api.json("GET", "/math")["history"]] == [None, "weak at carries"]


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/math@1", {"note": "x" * 501}, 400, "500"),
        ("/math@1", {"note": "two\nlines"}, 400, "one line of text"),
        ("/math@1", {"note": 1}, 400, "note"),
        ("/math@1", {}, 400, "note"),
        ("/math@1", {"notes": "x"}, 400, "note"),
        ("/math@9", {"note": "x"}, 404, "math@9"),
        ("/nope", {"note": "x"}, 404, "nope"),
        ("/base", {"note": "x"}, 400, "base"),
    ],
)
def test_a_note_that_cannot_be_kept_is_refused(api: Api, published, path: str, body: dict, status: int, said: str):
    api.json("PUT", "/math@1/notes", json={"note": "before"})
    assert said in json.dumps(api.json("PUT", f"{path}/notes", json=body, status=status))
    assert api.store.notes() == {PolicyVersion("math", 1): "before"}


def test_a_damaged_version_is_left_out(api: Api, published):
    (api.store.path(PolicyVersion("math", 2)) / "groupwise.json").write_text("{")
    assert api.json("GET", "/math")["versions"] == ["math@1"]
    assert api.json("GET", "")["available"][0]["versions"] == ["math@1"]


# --- activating ---


def test_load_activate_roll_back_unload(api: Api, published):
    expected = {"math@1": published[0], "math@2": published[1], "sql@1": published[2]}

    def active() -> str:
        version = str(api.policies.active)
        assert api.json("GET", "")["active_version"] == version == str(api.store.active)
        if version != "base":
            torch.testing.assert_close(api.scored(version), api.of_peft(expected[version]), atol=1e-9, rtol=0)
        return version

    assert api.json("POST", "/load", json={"name": "math"}) == {"status": "loaded", "name": "math", "version": "math@2"}
    assert active() == "math@2"
    answer = api.json("POST", "/math/activate", json={"version": 1})
    assert answer == {"status": "activated", "name": "math", "version": "math@1"} and active() == "math@1"
    assert api.json("POST", "/math/activate", json={"version": None})["version"] == "math@2"
    assert api.json("POST", "/sql@1/activate")["version"] == "sql@1" and active() == "sql@1"
    answer = api.json("POST", "/rollback")
    assert answer == {"status": "rolled_back", "name": "math", "version": "math@2"} and active() == "math@2"
    assert api.json("POST", "/unload") == {"status": "unloaded"} and active() == "base"
    assert api.json("POST", "/unload", content=b"ignored") == {"status": "unloaded"}
    assert api.json("POST", "/base/activate")["version"] == "base"


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/load", {"name": "nope"}, 404, "adapter_not_found"),
        ("/load", {"name": "math@9"}, 404, "adapter_not_found"),
        ("/load", {"name": "../math"}, 400, "invalid_value"),
        ("/load", {"nam": "math"}, 400, "invalid_value"),
        ("/load", {}, 400, "invalid_value"),
        ("/math/activate", {"version": 9}, 404, "adapter_not_found"),
        ("/math/activate", {"version": 0}, 400, "invalid_value"),
        ("/math/activate", {"version": 10**30}, 400, "invalid_value"),
        ("/math@1/activate", {"version": 1}, 400, "invalid_value"),
        ("/base/activate", {"version": 1}, 400, "invalid_value"),
        ("/nope/activate", {}, 404, "adapter_not_found"),
        ("/rollback", {}, 400, "invalid_adapter"),
    ],
)
def test_activations_that_are_refused(api: Api, published, path: str, body: dict, status: int, code: str):
    assert api.json("POST", path, status=status, json=body)["code"] == code
    assert api.policies.active.is_base


def test_an_unhealthy_version_is_activated_by_its_number(api: Api, published, directories: list[Path]):
    info = Provenance(base_model="tiny", base_hash=api.base.hash, job="job-3", unhealthy="it fell apart")
    sick, alone = (api.store.import_(directories[2], name, info=info) for name in ("math", "alone"))
    assert [each["unhealthy"] for each in api.json("GET", "/math")["history"]] == [None, None, "it fell apart"]
    for path, body in (("/load", {"name": "math"}), ("/math/activate", {})):
        assert api.json("POST", path, json=body)["version"] == "math@2"
    for path, body in (("/load", {"name": "alone"}), ("/alone/activate", {})):
        wording(api.json("POST", path, json=body, status=404))
    for path, body, version in (
        ("/math/activate", {"version": 3}, sick),
        ("/load", {"name": "alone@1"}, alone),
        ("/math@3/activate", {}, sick),
    ):
        assert api.json("POST", path, json=body)["version"] == str(version) == str(api.policies.active)
    assert api.json("POST", "/math/activate")["version"] == "math@3"  # which is active: it stands for its name now


def test_an_activation_that_fails_leaves_the_old_one(api: Api, published, make_adapter):
    """A version of another base is in the store: a job that ran before the model was changed."""
    api.json("POST", "/load", json={"name": "sql"})
    info = Provenance(base_model="older-model", base_hash="another")
    api.store.import_(published[0], "old", info=info)
    error = api.json("POST", "/load", status=409, json={"name": "old"})
    assert error["code"] == "swap_refused"
    assert str(api.policies.active) == "sql@1"
    wording(error)


# --- deleting ---


def test_delete(api: Api, published):
    assert api.json("DELETE", "/math@1") == {"status": "deleted", "name": "math@1", "versions": ["math@1"]}
    assert api.json("DELETE", "/math") == {"status": "deleted", "name": "math", "versions": ["math@2"]}
    for path in ("/math", "/math@2"):
        assert api.json("DELETE", path, status=404)["code"] == "adapter_not_found"
    assert api.json("GET", "")["available"][0]["name"] == "sql"


def test_what_is_active_is_not_deleted(api: Api, published):
    api.json("POST", "/load", json={"name": "math@1"})
    for path in ("/math", "/math@1"):
        error = api.json("DELETE", path, status=409)
        assert error["code"] == "adapter_in_use"
        wording(error)
    assert api.client.delete("/v1/adapters/math").headers["x-should-retry"] == "false"
    assert len(api.store.versions("math")) == 2
    api.json("DELETE", "/math@2")
    api.json("POST", "/unload")
    api.json("DELETE", "/math")


def test_what_a_waiting_job_begins_from_is_not_deleted(api: Api, published):
    submission = {"summary": {}, "payload": b"{}", "steps": 1, "auto_load": True}
    job, _ = api.ledger.submit(kind="grpo", adapter="new", config={"base_adapter": "math@1"}, **submission)
    for path in ("/math@1", "/math"):
        error = api.json("DELETE", path, status=409)
        assert error["code"] == "adapter_in_use" and f"job {job.id} (queued) needs it" in error["message"]
    assert len(api.store.versions("math")) == 2
    api.json("DELETE", "/math@2")
    api.ledger.cancel(job.id)
    api.json("DELETE", "/math")


# --- merging ---


@pytest.mark.parametrize("mode", ["weighted_average", "ties", "concat"])
def test_merge(api: Api, published, mode: str):
    """The route's merge is `merge_adapters`'s, which has tests against PEFT, and it is served."""
    body = {
        "sources": [{"name": "math@1", "weight": 0.75}, {"name": "sql", "weight": 0.25}],
        "output_name": "both",
        **({} if mode == "weighted_average" else {"mode": mode}),
        **({"density": 0.5} if mode == "ties" else {}),
    }
    answer = api.json("POST", "/merge", json=body)
    assert answer == {
        "status": "merged",
        "output_name": "both",
        "version": "both@1",
        "mode": mode,
        "sources": body["sources"],
        "num_tensors": 28,
        **({"density": 0.5} if mode == "ties" else {}),
    }
    sources = [WeightedAdapter(published[0], 0.75), WeightedAdapter(published[2], 0.25)]
    (api.root / "expected").mkdir()
    merge_adapters(sources, api.root / "expected", mode=MergeMode(mode), density=0.5 if mode == "ties" else None)
    torch.testing.assert_close(api.scored("both"), api.of_peft(api.root / "expected"), atol=1e-9, rtol=0)
    note = json.loads((api.store.path(PolicyVersion("both", 1)) / "merge.json").read_text())
    assert note["sources"] == [{"version": "math@1", "weight": 0.75}, {"version": "sql@1", "weight": 0.25}]
    assert (note["mode"], note["rank"]) == (mode, 6)
    assert api.json("POST", "/merge", status=409, json=body)["code"] == "already_exists"


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"sources": []}, 400, "sources"),
        ({"sources": [{"name": "math", "weight": 1.0}] * 17}, 400, "sources"),
        ({"sources": [{"name": "math"}]}, 400, "sources[0].weight"),
        ({"sources": [{"name": "nope", "weight": 1.0}]}, 404, None),
        ({"sources": [{"name": "base", "weight": 1.0}]}, 400, None),
        ({"sources": [{"name": "math", "weight": -1.0}]}, 400, None),
        ({"sources": [{"name": "math", "weight": "1"}]}, 400, "sources[0].weight"),
        ({"adapters": []}, 400, "adapters"),
        ({"mode": "dare"}, 400, "mode"),
        ({"density": 0.5}, 400, "density"),
        ({"mode": "ties", "density": 0.0}, 400, "density"),
        ({"output_name": "../x"}, 400, "output_name"),
        ({"output_name": "base"}, 400, None),
        ({"output_name": "sql"}, 409, None),
    ],
)
def test_merges_that_are_refused(api: Api, published, change: dict, status: int, param: str | None):
    body = {"sources": [{"name": "math", "weight": 1.0}, {"name": "sql", "weight": 1.0}], "output_name": "both"}
    assert api.json("POST", "/merge", status=status, json=body | change)["param"] == param
    assert api.store.names() == ("math", "sql")


def test_a_merge_with_an_adapter_of_another_base(api: Api, published):
    api.store.import_(published[0], "old", info=Provenance(base_model="older-model", base_hash="another"))
    body = {"sources": [{"name": n, "weight": 1.0} for n in ("math", "old")], "output_name": "both"}
    assert "older-model" in api.json("POST", "/merge", status=400, json=body)["message"]


# --- the document ---


def test_the_document_says_what_the_routes_do(api: Api):
    paths = api.client.get("/openapi.json").json()["paths"]
    upload = paths["/v1/adapters/upload"]["post"]
    assert set(upload["requestBody"]["content"]["multipart/form-data"]["schema"]["required"]) == {"name", "archive"}
    assert {"400", "409", "415", "507"} <= set(upload["responses"])
    assert "application/gzip" in paths["/v1/adapters/{name}/download"]["get"]["responses"]["200"]["content"]
    routes = {(method, path) for path, methods in paths.items() for method in methods}
    assert routes == {
        ("get", "/v1/adapters"),
        ("get", "/v1/adapters/{name}"),
        ("delete", "/v1/adapters/{name}"),
        ("put", "/v1/adapters/{name}/notes"),
        ("get", "/v1/adapters/{name}/download"),
        ("post", "/v1/adapters/{name}/activate"),
        *(("post", f"/v1/adapters/{verb}") for verb in ("load", "unload", "rollback", "upload", "merge")),
    }


def test_requests_in_flight_outlive_their_adapter_being_unloaded(api: Api, published):
    """Unload in use: the request that began on it ends on it, with the same tokens as if nothing had happened."""
    api.json("POST", "/load", json={"name": "math"})
    params = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)
    asked = SamplingRequest(prompt_ids=IDS, params=params, version=api.policies.active)
    ((undisturbed,),) = api.engine.generate([asked])
    (future,) = api.engine.submit([asked])
    api.json("POST", "/unload")
    api.json("DELETE", "/math")
    assert future.result(30)[0].token_ids == undisturbed.token_ids
