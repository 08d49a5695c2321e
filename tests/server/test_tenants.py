"""Two tenants of one server: what the one has, the other cannot see, name, count or change; on every route there is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("google.protobuf")

from groupwise.bridges.tinker.routes import NOT_OFFERED
from groupwise.errors import StorageError
from groupwise.server.quotas import bytes_in
from groupwise.server.tenants import Tenants
from groupwise.store import files
from groupwise.store.files import Provenance
from groupwise.store.keys import KeyFile
from groupwise.store.tenants import home_of
from server.tenant_routes import ROWS, Row, routes_of
from tinker_wire import tinker_site
from whole_server import Whole

OWNER = "the-owners-key"
CLOCKS = ("uptime_seconds", "created", "elapsed_secs", "duration_secs", "free_gb")
NOT_OFFERED_ROUTES = {route.replace(" /", " /api/v1/") for route in NOT_OFFERED}


@dataclass
class Tenant:
    """A tenant's key, as a client of the server."""

    site: Whole
    name: str
    key: str
    things: dict[str, str] = field(default_factory=dict)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        given: dict[str, Any] = {} if body is None else {"json": body}
        key = f"tml-{self.key}" if path.startswith(("/api/v1", "/oai")) else self.key
        about = {"authorization": f"Bearer {key}", "x-request-id": "r", **headers}
        return self.site.http.request(method, path, headers=about, **given)

    def ok(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        answer = self.ask(method, path, body, **headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def future(self, path: str, body: Any) -> Any:
        id = self.ok("POST", f"/api/v1/{path}", body)["request_id"]
        answer = {"type": "try_again"}
        while answer.get("type") == "try_again":
            answer = self.ok("POST", "/api/v1/retrieve_future", {"request_id": id}, accept="application/json")
        return {"id": id, **answer}

    def session(self) -> str:
        return self.ok("POST", "/api/v1/create_session", {"tags": [], "sdk_version": "0.38.0"})["session_id"]

    def train(self, said: str = "?", idempotency_key: str = "", **config: Any) -> Any:
        """The answer to a job of one small group."""
        completions = [{"text": "secret", "reward": 1}, {"text": "b", "reward": 0}]
        group = {"messages": [{"role": "user", "content": said}], "completions": completions}
        headers = {"idempotency-key": idempotency_key} if idempotency_key else {}
        return self.ask("POST", "/v1/train/grpo", {"groups": [group], "config": config}, **headers)

    @property
    def server(self) -> Any:
        tenants, portal = self.site.server.tenants, self.site.http.portal
        assert tenants is not None and portal is not None
        return portal.call(tenants.of, self.name)

    def publish(self, directory: Path, name: str) -> str:
        base = self.site.server.base
        info = Provenance(base_model=base.name, base_hash=base.hash)
        return str(self.server.store.import_(directory, name, info=info))


@pytest.fixture(scope="module")
def site(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    state_dir = tmp_path_factory.mktemp("state")
    with tinker_site(state_dir, model_dir, api_key=OWNER, trainer_routes=True) as site:
        yield site


def tenant(site: Whole, name: str, **bounds: int) -> Tenant:
    key = KeyFile(site.server.config.state_dir.absolute()).add(f"{name}-app", role="train", tenant=name, **bounds)
    return Tenant(site, name, key)


def having_everything(site: Whole, name: str, adapter: Path) -> Tenant:
    """A tenant that has one of each thing, every one of which says "secret" where it can."""
    it = tenant(site, name)
    it.publish(adapter, "secret-adapter")
    model = site.server.config.served_name
    it.ok("POST", "/v1/adapters/secret-adapter/activate")
    say = [{"role": "user", "content": "the secret question"}]
    it.things |= {"adapter": "secret-adapter", "version": "secret-adapter@1"}
    batch = it.ok("POST", "/v1/completions/batch", {"prompts": [say], "n": 2, "max_tokens": 2})
    it.things["rollout"] = batch["completions"][0]["rollout_id"]
    it.things["chat"] = it.ok("POST", "/v1/chat/completions", {"messages": say, "max_tokens": 2})["id"]
    asked = {"input": "the secret question", "max_output_tokens": 2}
    it.things["response"] = it.ok("POST", "/v1/responses", asked)["id"]
    rated = {"rollout_id": it.things["rollout"], "score": 1, "comment": "secret"}
    it.things["feedback"] = it.ok("POST", "/v1/feedback", rated)["id"]
    it.things["job"] = it.train("the secret question", "k", output_name="secret-adapter").json()["job_id"]
    session = it.session()
    fresh = {"session_id": session, "model_seq_id": 0, "base_model": model, "lora_config": {"rank": 4}}
    made = it.future("create_model", fresh)
    kept = {"model_id": made["model_id"], "seq_id": 1, "path": "kept", "sampling_session_seq_id": 0}
    it.things["sampler"] = it.future("save_weights_for_sampler", kept)["sampling_session_id"]
    it.future("save_weights", {"model_id": made["model_id"], "seq_id": 2, "path": "kept"})
    it.things |= {"session": session, "model": made["model_id"], "checkpoint": made["model_id"], "future": made["id"]}
    return it


LISTS = [row for row in ROWS if row.kind == "own" and row.route != "GET /v1/events"]  # whose events are such lists
NAMED = [row for row in ROWS if row.kind == "same"]


@dataclass(frozen=True)
class Pair:
    """A tenant that has everything, another one, and what the other was answered before, by route."""

    rich: Tenant
    other: Tenant
    before: dict[str, Any]


@pytest.fixture(scope="module")
def pair(site: Whole, make_adapter: Callable[..., Path]) -> Iterator[Pair]:
    other = tenant(site, "globex")
    other.things["session"] = other.session()
    before = {row.route: steady(ask(other, row)) for row in LISTS}
    rich = having_everything(site, "acme", make_adapter(site.server.base))
    yield Pair(rich, other, before)
    assert site.http.portal is not None
    for each in (rich, other):
        site.http.portal.call(_close, each.server)


async def _close(server: Any) -> None:
    server.more["tinker"].close()


def ask(it: Tenant, row: Row, thing: str = "") -> Any:
    def filled(text: str) -> str:
        for word, meant in {"THING": thing, "MINE": it.things.get("session", "")}.items():
            text = text.replace(word, meant)
        return text.replace("MODEL", it.site.server.config.served_name)

    body = None if row.body is None else json.loads(filled(json.dumps(row.body)))
    return it.ask(row.method, filled(row.asked), body)


def steady(answer: Any) -> Any:
    """A status and a body, without the clocks in it."""

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: without(v) for k, v in value.items() if k not in CLOCKS}
        return [without(each) for each in value] if isinstance(value, list) else value

    return answer.status_code, without(answer.json())


def test_every_route_of_the_server_has_a_decision(site: Whole) -> None:
    """A new route fails here until somebody says what another tenant gets there."""
    decided = {row.route for row in ROWS} | NOT_OFFERED_ROUTES
    assert routes_of(site.app) - decided == set()
    assert decided - routes_of(site.app) == set()


FAKES = {
    "adapter": "absent-adapter",
    "version": "absent-adapter@1",
    "rollout": "rollout-" + "0" * 24,
    "response": "resp_" + "0" * 24,
    "job": "0" * 32,
    "session": "0" * 32,
    "model": "0" * 32 + ":train:0",
    "checkpoint": "0" * 32 + ":train:0",
    "future": "0" * 32 + ":train:0:0",
    "sampler": "0" * 32 + ":sample:0",
    "digest": "0" * 64,
}


@pytest.mark.parametrize("row", NAMED, ids=lambda row: f"{row.route} {row.thing}")
def test_anothers_thing_is_the_404_of_a_thing_that_does_not_exist(pair: Pair, row: Row) -> None:
    theirs, none = pair.rich.things.get(row.thing, "f" * 64), FAKES[row.thing]
    found, absent = ask(pair.other, row, theirs), ask(pair.other, row, none)
    assert found.status_code == row.status, found.text
    told = [answer.text.replace(thing, "THING") for answer, thing in ((found, theirs), (absent, none))]
    assert (found.status_code, told[0]) == (absent.status_code, told[1])
    assert {name for name, _ in found.headers.items()} == {name for name, _ in absent.headers.items()}


@pytest.mark.parametrize("row", LISTS, ids=lambda row: row.route)
def test_what_is_listed_is_what_it_was_before_the_other_had_anything(pair: Pair, row: Row) -> None:
    answer = ask(pair.other, row)
    assert answer.status_code == row.status
    assert "acme" not in answer.text
    if row.route != "GET /v1/audit":  # which has what this file tried, and the names that it typed
        assert steady(answer) == pair.before[row.route]
        assert "secret" not in answer.text
        assert not any(thing in answer.text for thing in pair.rich.things.values())


@pytest.mark.parametrize("row", [row for row in ROWS if row.kind == "owners"], ids=lambda row: row.route)
def test_what_is_the_owners_is_refused_before_it_is_looked_at(pair: Pair, row: Row) -> None:
    answer = ask(pair.other, row)
    assert (answer.status_code, answer.json()["error"]["code"] in ("owners_only", "role_too_small")) == (403, True)


@pytest.mark.parametrize("row", [row for row in ROWS if row.kind == "nothing"], ids=lambda row: row.route)
def test_what_names_nobodys_thing_tells_of_none(pair: Pair, row: Row) -> None:
    answer = ask(pair.other, row)
    assert answer.status_code == row.status, answer.text
    if row.route != "GET /openapi.json":
        assert "secret" not in answer.text and "acme" not in answer.text


def test_the_table_in_the_pages_is_this_one() -> None:
    page = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
    rows = [f"| `{row.route}` | {row.thing or '-'} | {SAID[row.kind].format(status=row.status)} |" for row in ROWS]
    missing = [row for row in rows if row not in page]
    assert not missing, "docs/server.md lacks:\n" + "\n".join(missing)


SAID = {
    "same": "{status}, as for one that does not exist",
    "own": "its own",
    "owners": "{status}",
    "nothing": "no tenant's data",
}


# ---- the same words for both ----
def test_two_tenants_have_an_adapter_of_one_name_and_an_idempotency_key_of_one_text(
    pair: Pair, make_adapter: Callable[..., Path]
) -> None:
    third = tenant(pair.other.site, "umbrella")
    assert third.publish(make_adapter(pair.other.site.server.base, seed=5), "secret-adapter") == "secret-adapter@1"
    asked = {"model": "secret-adapter", "prompt": [1, 2, 3], "max_tokens": 0, "echo": True, "logprobs": 0}
    answers = [each.ok("POST", "/v1/completions", asked)["choices"][0]["logprobs"] for each in (third, pair.rich)]
    assert answers[0]["token_logprobs"] != answers[1]["token_logprobs"]  # both in one engine, each by its own weights
    job = third.train(idempotency_key="k").json()
    assert job["job_id"] != pair.rich.things["job"] and job["position"] == 1


def test_the_owner_sees_his_own_and_by_one_header_what_a_tenant_sees(pair: Pair) -> None:
    site, owner = pair.rich.site, Tenant(pair.rich.site, "", OWNER)
    assert owner.ok("GET", "/v1/adapters")["available"] == [] and owner.ok("GET", "/v1/train/status") == []
    named = {"x-groupwise-tenant": "acme"}
    assert owner.ok("GET", "/v1/adapters", **named)["active"] == "secret-adapter"
    assert owner.ok("GET", f"/v1/train/status/{pair.rich.things['job']}", **named)["state"] == "queued"
    assert owner.ask("GET", "/v1/adapters", **{"x-groupwise-tenant": "nobody"}).status_code == 404
    assert owner.ask("GET", "/v1/adapters", **{"x-groupwise-tenant": "../acme"}).status_code == 400
    listed = owner.ok("GET", "/v1/tenants")["tenants"]["acme"]
    assert listed["adapters"][0] == "secret-adapter" and listed["jobs_waiting"] == 1 and listed["bytes"] > 0
    assert listed["weight"] == 1
    assert not home_of(site.server.config.state_dir, "nobody").exists()


@pytest.mark.parametrize("named", ["acme", "globex", ""])
def test_no_key_but_the_owners_names_a_tenant(pair: Pair, named: str) -> None:
    answer = pair.other.ask("GET", "/v1/adapters", **{"x-groupwise-tenant": named})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "owners_only")
    reader = KeyFile(pair.other.site.server.config.state_dir.absolute())
    key = reader.add(f"reader{named}", role="read")
    answer = Tenant(pair.other.site, "", key).ask("GET", "/v1/adapters", **{"x-groupwise-tenant": named})
    assert answer.status_code == 403


def test_what_is_recorded_of_a_tenant_is_in_the_servers_numbers_and_the_owners_list(pair: Pair) -> None:
    owner = Tenant(pair.rich.site, "", OWNER)
    assert any(each["adapter"] == "acme:secret-adapter@1" for each in owner.ok("GET", "/v1/stats/recent-requests"))
    assert {each["adapter"] for each in pair.rich.ok("GET", "/v1/stats/recent-requests")} == {"secret-adapter@1"}
    assert 'key="acme:acme-app"' in owner.ask("GET", "/metrics").text
    today = next(iter(owner.ok("GET", "/v1/usage")["days"].values()))
    assert "acme:acme-app" in today
    assert set(next(iter(pair.rich.ok("GET", "/v1/usage")["days"].values()))) == {"acme-app"}


# ---- the log ----
def test_the_log_says_who_changed_what_and_nothing_that_was_said(pair: Pair) -> None:
    changes = pair.rich.ok("GET", "/v1/audit?limit=1000")["changes"]
    posted = next(each for each in changes if each["route"] == "/v1/train/grpo")
    assert (posted["who"], posted["tenant"], posted["method"], posted["status"]) == (
        "acme:acme-app",
        "acme",
        "POST",
        200,
    )
    assert posted["things"] == {"job": pair.rich.things["job"], "adapter": "secret-adapter"}
    activated = next(each for each in changes if each["route"].endswith("/activate"))
    assert activated["things"] == {"name": "secret-adapter"}
    path = home_of(pair.rich.site.server.config.state_dir, "acme") / "audit.jsonl"
    text = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert "secret question" not in text and pair.rich.key not in text and "chat/completions" not in text


# ---- quotas ----
def test_quotas_are_told_with_their_number_and_a_remedy(site: Whole, make_adapter: Callable[..., Path]) -> None:
    small = tenant(site, "small", adapters=1, jobs=1)
    small.publish(make_adapter(site.server.base), "one")
    refused = small.train(output_name="two")
    assert (refused.status_code, refused.json()["error"]["code"]) == (507, "tenant_full")
    assert "may have 1" in refused.json()["error"]["message"] and refused.json()["error"]["hint"]
    assert small.train(output_name="one").status_code == 200
    refused = small.train(output_name="one")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")
    assert int(refused.headers["retry-after"]) > 0
    sources = [{"name": "one", "weight": 1}, {"name": "one@1", "weight": 1}]
    merged = small.ask("POST", "/v1/adapters/merge", {"output_name": "two", "sources": sources})
    assert (merged.status_code, merged.json()["error"]["code"]) == (507, "tenant_full")
    assert site.http.get("/ready").status_code == 200  # the disk is not full for the others


def test_the_bytes_of_a_tenant_are_bounded(site: Whole, make_adapter: Callable[..., Path]) -> None:
    adapter = make_adapter(site.server.base)
    light = tenant(site, "light", bytes=(adapter / "adapter_model.safetensors").stat().st_size)
    light.publish(adapter, "one")
    refused = light.train()
    assert (refused.status_code, refused.json()["error"]["code"]) == (507, "tenant_full")
    assert light.ask("DELETE", "/v1/adapters/one").status_code == 200
    assert light.train().status_code == 200


def test_what_a_client_of_tinkers_saves_is_bounded_too(site: Whole) -> None:
    full = tenant(site, "filling", bytes=1)
    fresh = {"session_id": full.session(), "model_seq_id": 0, "base_model": site.server.config.served_name}
    model = full.future("create_model", {**fresh, "lora_config": {"rank": 4}})["model_id"]
    home = home_of(site.server.config.state_dir, "filling")
    first = {"model_id": model, "seq_id": 1, "path": "one"}
    assert full.future("save_weights", first)["path"] == f"tinker://{model}/weights/one"
    kept = bytes_in(home)
    for seq, route in enumerate(("save_weights", "save_weights_external"), start=2):
        refused = full.future(route, {"model_id": model, "seq_id": seq, "path": "two"})
        assert (refused["code"], refused["category"]) == ("tenant_full", "user"), refused
    assert bytes_in(home) == kept > 1


def test_a_list_of_the_tenants_changes_nothing_of_theirs(site: Whole, make_adapter: Callable[..., Path]) -> None:
    """It neither opens their stores, which repairs them, nor waits for who has one locked."""
    listed = tenant(site, "listed")
    listed.publish(make_adapter(site.server.base), "one")
    root = home_of(site.server.config.state_dir, "listed") / "adapters"
    weights = root / "one" / "v000001" / "adapter_model.safetensors"
    whole_bytes = weights.read_bytes()
    weights.write_bytes(b"half")
    with files.locked(root), ThreadPoolExecutor(1) as clients:
        shown = clients.submit(site.http.get, "/v1/tenants").result(timeout=20).json()["tenants"]["listed"]
    assert shown["adapters"] == ["one"] and shown["bytes"] == bytes_in(root.parent) and weights.exists()
    weights.write_bytes(whole_bytes)


def test_who_asks_again_while_others_hear_of_a_failure_begins_a_tenant_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second view of it would have policies and a clean-up of its own."""
    begun = list[str]()

    async def begin(tenants: Tenants, tenant: str) -> object:
        begun.append(tenant)
        await asyncio.sleep(0)
        if len(begun) == 1:
            raise StorageError("the disk is full")
        return object()

    monkeypatch.setattr(Tenants, "_begin", begin)
    server = SimpleNamespace(config=SimpleNamespace(state_dir=tmp_path))
    tenants = Tenants(server, None, more={})  # pyright: ignore[reportArgumentType]

    async def asks() -> object:
        try:
            return await tenants.of("acme")
        except StorageError:
            return await tenants.of("acme")

    async def together() -> list[object]:
        return await asyncio.gather(asks(), asks())

    one, other = asyncio.run(together())
    assert one is other and begun == ["acme", "acme"]
