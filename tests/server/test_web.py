"""The web interface's files: what is committed is what the sources build, and how it is served."""

import hashlib
import re
from pathlib import Path
from typing import Any, cast

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from groupwise.config.serve import ServeConfig
from groupwise.server.app import build_app
from groupwise.server.assemble import server_over
from groupwise.server.guard import Gate
from groupwise.server.metrics import Recorder
from groupwise.server.run_app import build_run_app
from groupwise.server.state import Parts
from groupwise.server.ui import BUILT, POLICY, built_files
from wording import wording

ROOT = Path(__file__).parent.parent.parent
SOURCES = ROOT / "ui"
MOST_BYTES = 400_000  # gzipped, all of it
NOT_REQUESTS = {"http://www.w3.org", "https://svelte.dev"}  # XML's namespaces, and where Svelte's errors are explained
BROWSER = {"accept": "text/html,application/xhtml+xml"}


@pytest.fixture(scope="module")
def app() -> FastAPI:
    nothing, config = cast(Any, None), ServeConfig(api_key="sk-planted")
    names = ("base", "engine", "store", "ledger", "policies", "feedback", "quotas")
    none: dict[str, Any] = dict.fromkeys(names, nothing)
    parts = Parts(config=config, recorder=Recorder(model_name="m"), **none)
    return build_app(server_over(parts, reader=nothing, supervisor=nothing), gate=Gate("loading"))


@pytest.fixture(scope="module")
def http(app: FastAPI) -> TestClient:
    return TestClient(app, base_url="http://127.0.0.1:8420", follow_redirects=False)


# ---- what is committed ----
def test_the_build_is_of_these_sources() -> None:
    names = ["index.html", "package.json", "package-lock.json", "stamp.ts", "svelte.config.js", "tsconfig.json"]
    names.append("vite.config.ts")
    folders = [path for folder in ("public", "src") for path in (SOURCES / folder).rglob("*") if path.is_file()]
    whole = hashlib.sha256()
    for name in sorted([*names, *(path.relative_to(SOURCES).as_posix() for path in folders)]):
        content = hashlib.sha256((SOURCES / name).read_bytes()).hexdigest()
        whole.update(f"{name}\0{content}\n".encode())
    stale = "ui/ was changed and not built: cd ui && npm ci && npm run build"
    assert (BUILT / "sources.sha256").read_text() == whole.hexdigest() + "\n", stale


def test_it_is_small() -> None:
    assert 10_000 < sum(len(file.zipped) for file in built_files().values()) < MOST_BYTES


def test_nothing_comes_from_elsewhere() -> None:
    for name, file in built_files().items():
        origins = set(re.findall(r"\b(?:https?|wss?)://[\w.-]+", file.content.decode(errors="replace")))
        assert origins <= NOT_REQUESTS, (name, origins)


def test_the_page_obeys_its_own_policy() -> None:
    page = built_files()["index.html"].content.decode()
    assert "'unsafe" not in POLICY and POLICY.startswith("default-src 'self'")
    assert re.findall(r"<script(?![^>]*\bsrc=)", page) == [] and "<style" not in page and " style=" not in page
    assert not re.search(r"\son\w+=", page)
    scripts = [file.content.decode() for name, file in built_files().items() if name.endswith(".js")]
    assert scripts and not any(re.search(r"\beval\(|new Function\(", script) for script in scripts)


def test_no_source_file_is_long_or_makes_html_of_text() -> None:
    sources = [path for path in (SOURCES / "src").rglob("*") if path.is_file() and path.name != "schema.d.ts"]
    assert len(sources) > 30
    for path in sources:
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") <= 400, path
        assert "{@html" not in text and "innerHTML" not in text, path


def test_it_asks_only_for_what_is_documented(app: FastAPI) -> None:
    """By `groupwise serve`, or by `groupwise ui`."""
    paths = {**app.openapi()["paths"], **build_run_app({}, ServeConfig()).openapi()["paths"]}
    documented = {re.sub(r"\{[^}]*\}", "*", path) for path in paths}
    asked: set[str] = set()
    for path in (SOURCES / "src").rglob("*"):
        if path.is_file() and path.name != "schema.d.ts":
            found = re.findall(r"""["`](v1/(?:[\w/-]|\$\{[^`]*?\)\})*)""", path.read_text(encoding="utf-8"))
            asked |= {"/" + re.sub(r"\$\{.*?\)\}", "*", each) for each in found}
    assert {"/v1/events", "/v1/train/grpo", "/v1/adapters/*/activate", "/v1/rollouts/*"} <= asked
    assert {"/v1/runs/*", "/v1/runs/*/metrics", "/v1/runs/*/rollouts/*", "/v1/events/*", "/v1/diff"} <= asked
    assert asked <= documented


@pytest.mark.parametrize(("where", "script"), [("api", "api"), ("api/run", "api:runs")])
def test_its_types_are_the_servers(app: FastAPI, where: str, script: str) -> None:
    """`npm run api` writes them from /openapi.json of `groupwise serve`, `npm run api:runs` from that of the runs."""
    document = (app if script == "api" else build_run_app({}, ServeConfig())).openapi()
    text = (SOURCES / "src" / where / "schema.d.ts").read_text(encoding="utf-8")
    paths, _, schemas = text.partition("schemas: {")
    assert set(re.findall(r'^    "(/[^"]*)": \{', paths, re.MULTILINE)) == set(document["paths"])
    found = dict(re.findall(r"^        (\w+): \{\n(.*?)^        \};", schemas, re.MULTILINE | re.DOTALL))
    for name, schema in document["components"]["schemas"].items():
        fields = re.findall(r"^            (\w+)\??:", found[name], re.MULTILINE)
        assert fields == list(schema.get("properties", {})), f"{name} is another now: cd ui && npm run {script}"


# ---- how it is served ----
def test_the_page_needs_no_key_and_answers_while_the_model_loads(http: TestClient) -> None:
    page = http.get("/ui/")
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"] == POLICY and page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["cache-control"] == "no-cache" and page.headers["referrer-policy"] == "no-referrer"
    assert http.get("/v1/adapters").status_code == 401
    assert http.get("/v1/adapters", headers={"authorization": "Bearer sk-planted"}).status_code == 503


def test_what_the_page_is_made_of_is_kept_under_its_hash(http: TestClient) -> None:
    names = re.findall(r'(?:src|href)="\./(assets/[^"]+)"', http.get("/ui/").text)
    assert {Path(name).suffix for name in names} == {".js", ".css"}
    for name in names:
        asset = http.get(f"/ui/{name}", headers={"accept-encoding": "gzip"})
        assert asset.headers["cache-control"] == "public, max-age=31536000, immutable"
        assert asset.headers["content-encoding"] == "gzip" and asset.content == built_files()[name].content
        plain = http.get(f"/ui/{name}", headers={"accept-encoding": "identity"})
        assert "content-encoding" not in plain.headers and plain.content == asset.content


def test_a_page_that_is_known_is_not_sent_again(http: TestClient) -> None:
    etag = http.get("/ui/").headers["etag"]
    again = http.get("/ui/", headers={"if-none-match": etag})
    assert again.status_code == 304 and again.content == b"" and again.headers["etag"] == etag
    assert http.get("/ui/", headers={"if-none-match": '"other"'}).status_code == 200


def test_head_says_what_get_would(http: TestClient) -> None:
    get, head = (http.request(method, "/ui/", headers={"accept-encoding": "identity"}) for method in ("GET", "HEAD"))
    assert head.status_code == 200 and head.content == b"" and head.headers == get.headers
    assert int(head.headers["content-length"]) == len(get.content)


@pytest.mark.parametrize("path", ["none.js", "%2e%2e/web.py", "..%2fweb.py", "/", "assets", "%00", "/etc/passwd"])
def test_what_is_not_there_is_an_error_of_the_house(http: TestClient, path: str) -> None:
    answer = http.get(f"/ui/{path}")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "route_not_found"
    wording(answer.json()["error"])


def test_files_are_only_read(http: TestClient) -> None:
    answer = http.post("/ui/", json={})
    assert answer.status_code == 405 and answer.headers["allow"] == "GET, HEAD"
    assert answer.json()["error"]["code"] == "method_not_allowed"


def test_the_root_leads_to_it(http: TestClient) -> None:
    home, short = http.get("/", headers=BROWSER), http.get("/ui", headers=BROWSER)
    assert (home.status_code, home.headers["location"]) == (307, "ui/")
    assert (short.status_code, short.headers["location"]) == (308, "ui/")
    assert http.get("/").headers["location"] == http.head("/").headers["location"] == "ui/"
    assert http.post("/").status_code == 401
    assert http.get("/uix", headers=BROWSER).status_code == 401
