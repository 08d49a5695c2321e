"""Keys with roles: who may do what, on every route of the server, without a restart."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.routing import Route
from starlette.testclient import TestClient

from groupwise.config.serve import ServeConfig
from groupwise.server.errors import add_handlers
from groupwise.server.guard import Gate, Guard
from groupwise.server.metrics import Recorder
from groupwise.server.roles import may, needed
from groupwise.store.keys import FILE, ROLES, KeyFile, Role

OWNER = "the-owners-key"

# what keys of each role may do, as a newcomer would expect it
ROWS: list[tuple[str, str, set[Role]]] = [
    ("POST", "/v1/chat/completions", {"sample", "train", "admin"}),
    ("POST", "/v1/completions", {"sample", "train", "admin"}),
    ("POST", "/v1/completions/batch", {"sample", "train", "admin"}),
    ("POST", "/v1/messages", {"sample", "train", "admin"}),
    ("POST", "/v1/messages/count_tokens", {"sample", "train", "admin"}),
    ("POST", "/v1/responses", {"sample", "train", "admin"}),
    ("GET", "/v1/responses/resp_1", {"sample", "train", "admin"}),
    ("GET", "/v1/models", {"sample", "train", "admin"}),
    ("POST", "/v1/feedback", {"sample", "train", "admin"}),
    ("GET", "/v1/feedback", {"read", "train", "admin"}),
    ("GET", "/v1/rollouts", {"read", "train", "admin"}),
    ("GET", "/v1/images/abc", {"read", "train", "admin"}),
    ("GET", "/v1/train/status", {"read", "train", "admin"}),
    ("GET", "/v1/adapters/a/download", {"read", "train", "admin"}),
    ("GET", "/v1/config", {"read", "train", "admin"}),
    ("GET", "/metrics", {"read", "train", "admin"}),
    ("GET", "/v1/events", {"read", "train", "admin"}),
    ("POST", "/v1/train/grpo", {"train", "admin"}),
    ("DELETE", "/v1/train/queue/job_1", {"train", "admin"}),
    ("POST", "/v1/adapters/upload", {"train", "admin"}),
    ("POST", "/v1/adapters/a/activate", {"train", "admin"}),
    ("DELETE", "/v1/adapters/a", {"train", "admin"}),
    ("POST", "/api/v1/forward_backward", {"train", "admin"}),
    ("GET", "/api/v1/healthz", {"train", "admin"}),
    ("POST", "/oai/api/v1/chat/completions", {"sample", "train", "admin"}),
    ("POST", "/v1/learn/promote", {"admin"}),
    ("POST", "/v1/learn/pause", {"admin"}),
    ("POST", "/generate", {"admin"}),
    ("PUT", "/a/route/of/tomorrow", {"admin"}),
]


@pytest.mark.parametrize(("method", "path", "roles"), ROWS)
def test_what_a_role_may_do(method: str, path: str, roles: set[Role]) -> None:
    assert {role for role in ROLES if may(role, method, path)} == roles


def test_no_route_that_changes_something_is_for_who_only_reads_or_samples() -> None:
    """Also not one that is added tomorrow, in whatever room."""
    from groupwise.server import adapters, admin, feedback, learn, train

    for module in (adapters, admin, feedback, learn, train):
        for route in module.router.routes:
            assert isinstance(route, Route)
            for method in (route.methods or set()) - {"GET", "HEAD"}:
                assert not may("read", method, route.path), route.path
                assert needed(method, route.path) != "sample" or route.path == "/v1/feedback", route.path


class Site:
    """A small application behind the guard."""

    def __init__(self, state_dir: Path, api_key: str | None):
        config = ServeConfig(state_dir=state_dir, api_key=api_key)
        self.keys = KeyFile(state_dir)
        app = FastAPI()
        add_handlers(app, without={})

        @app.get("/health")
        async def health(request: Request) -> dict[str, bool]:
            return {"trusted": request.state.trusted}

        @app.get("/v1/models")
        async def models(request: Request) -> dict[str, str]:
            return {"sender": request.state.sender}

        @app.get("/api/v1/links/{secret}")
        async def link(secret: str) -> dict[str, str]:
            return {}

        @app.post("/v1/train/grpo")
        @app.post("/api/v1/forward")
        @app.post("/v1/messages")
        async def post() -> dict[str, str]:
            return {}

        asgi = Guard(app, config=config, gate=Gate("ready"), recorder=Recorder(model_name="tiny"))
        self.http = TestClient(asgi, base_url="http://127.0.0.1:8420")

    def status(self, method: str, path: str, key: str | None = None, *, header: str = "authorization") -> int:
        value = f"Bearer {key}" if header == "authorization" else key
        return self.http.request(
            method, path, headers={} if value is None or key is None else {header: value}
        ).status_code


@pytest.fixture(params=[OWNER, None], ids=["with the owner's key", "without"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Site:
    return Site(tmp_path, request.param)


def test_without_any_key_everybody_is_the_owner_until_there_is_one(tmp_path: Path) -> None:
    site = Site(tmp_path, None)
    assert site.status("POST", "/v1/train/grpo") == 200
    key = site.keys.add("app", role="sample")
    assert site.status("GET", "/v1/models") == 401
    assert site.status("GET", "/v1/models", key) == 200
    site.keys.revoke("app")
    assert site.status("POST", "/v1/train/grpo") == 200


def test_a_key_does_what_its_role_says(site: Site) -> None:
    key = site.keys.add("app", role="sample")
    assert site.status("GET", "/v1/models", key) == 200
    refused = site.http.post("/v1/train/grpo", headers={"authorization": f"Bearer {key}"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "role_too_small")
    assert refused.json()["error"]["type"] == "permission_error"
    assert key not in refused.text
    anthropic = site.keys.add("reader", role="read")
    refused = site.http.post("/v1/messages", headers={"x-api-key": anthropic})
    assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")


def test_the_remedy_works(site: Site) -> None:
    key = site.keys.add("app", role="train")
    assert site.status("POST", "/v1/train/grpo", key) == 200


def test_a_turned_key_is_refused_and_the_new_one_taken(site: Site) -> None:
    old = site.keys.add("app", role="sample")
    assert site.status("GET", "/v1/models", old) == 200
    new = site.keys.turn("app")
    assert [site.status("GET", "/v1/models", key) for key in (old, new)] == [401, 200]


def test_tinkers_clients_send_it_in_their_form(site: Site) -> None:
    key = site.keys.add("trainer", role="train")
    assert site.status("POST", "/api/v1/forward", f"tml-{key}", header="x-api-key") == 200
    assert site.status("POST", "/v1/train/grpo", f"tml-{key}", header="x-api-key") == 401


def test_a_link_has_a_secret_of_its_own_whatever_key_comes_with_it(site: Site) -> None:
    key = site.keys.add("app", role="sample")
    assert site.status("GET", "/api/v1/links/abc") == site.status("GET", "/api/v1/links/abc", key) == 200


@pytest.mark.parametrize("given", ["", "gwk_", "x" * 4096, "ä", "Bearer"])
def test_what_is_no_key(site: Site, given: str) -> None:
    site.keys.add("app", role="admin")
    headers = {"authorization": f"Bearer {given}".encode()}
    assert site.http.get("/v1/models", headers=headers).status_code == 401


def test_health_tells_what_is_inside_to_who_may_read(site: Site) -> None:
    keys = {role: site.keys.add(role, role=role) for role in ROLES}
    told = {}
    for role, key in keys.items():
        told[role] = site.http.get("/health", headers={"authorization": f"Bearer {key}"}).json()["trusted"]
    assert told == {"sample": False, "read": True, "train": True, "admin": True}
    assert site.http.get("/health").json() == {"trusted": False}


def test_a_key_is_a_sender_whatever_its_address_and_has_a_name_in_the_log(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    key = site.keys.add("app", role="sample")
    with caplog.at_level(logging.INFO, logger="groupwise.access"):
        answer = site.http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
    assert answer.json() == {"sender": "key app"}
    assert caplog.messages[-1].endswith(" key app") and key not in caplog.text


def test_a_damaged_file_keeps_all_out_but_the_owner(tmp_path: Path) -> None:
    site = Site(tmp_path, OWNER)
    key = site.keys.add("app", role="admin")
    (tmp_path / FILE).write_text("[")
    assert site.status("GET", "/v1/models", OWNER) == 200
    assert site.status("GET", "/v1/models", key) == 507
    assert site.status("GET", "/health") == site.status("GET", "/health", key) == 200


def test_a_damaged_file_lets_nobody_in_where_there_is_no_owner_s_key(tmp_path: Path) -> None:
    site = Site(tmp_path, None)
    site.keys.add("app", role="admin")
    (tmp_path / FILE).write_text("[")
    assert [site.status("GET", path) for path in ("/v1/models", "/health")] == [507, 200]
