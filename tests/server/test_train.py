"""/v1/train/* over a real socket: the wire's shapes, the queue, the event stream, and what a client can do wrong."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import pytest
import uvicorn
from fastapi import FastAPI

from groupwise.config.serve import ServeConfig
from groupwise.errors import StorageError
from groupwise.model.load import LoadedModel, load_model
from groupwise.server import event_stream as events
from groupwise.server import submit, train
from groupwise.server.assemble import server_over
from groupwise.server.errors import add_handlers
from groupwise.server.quotas import Quotas
from groupwise.server.reader import Reader, TextModel
from groupwise.server.schema_train import SftRequest
from groupwise.server.state import Parts
from groupwise.store.adapters import AdapterStore
from groupwise.store.feedback import FeedbackLog
from groupwise.store.files import Provenance
from groupwise.store.job_payload import parse_payload
from groupwise.store.keys import KeyFile
from groupwise.store.ledger import JobState, Ledger, RolloutRecord
from groupwise.store.tenants import OWNER
from seed_page import SCORED
from wording import wording

SEED_PAGE = json.loads(SCORED)
CHAT = {"messages": [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]}
KILN_STATUS = {"job_id", "state", "progress", "current_loss", "adapter_name", "started_at", "elapsed_secs"}


@dataclass
class Web:
    """The train routes on a real socket; each test gives them a state of its own."""

    app: FastAPI
    http: httpx2.Client


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    app = FastAPI()
    app.include_router(train.router)
    add_handlers(app)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as http:
        yield Web(app, http)
    server.should_exit = server.force_exit = True
    thread.join(10)


class Site:
    """The server behind the routes: a ledger and a store of its own, the starter, and a client."""

    def __init__(self, web: Web, state: Path, base: LoadedModel, **config: Any):
        self.http, self.ledger = web.http, Ledger(state / "ledger.db")
        self.words: dict[str, str] = {}
        self.worker = SimpleNamespace(state="running")
        settings = ServeConfig(state_dir=state, **{"min_free_bytes": 0} | config)
        parts = Parts(  # the routes here use no engine, and of the supervisor only a crash's last words
            config=settings,
            base=base,
            engine=cast(Any, None),
            store=AdapterStore(state / "adapters"),
            ledger=self.ledger,
            policies=cast(Any, None),
            recorder=cast(Any, None),
            feedback=FeedbackLog(self.ledger),
            quotas=Quotas(KeyFile(state), OWNER, state),
        )
        supervisor = cast(Any, SimpleNamespace(last_words=self.words.get, status=self.worker))
        reader = Reader(TextModel.of(base), settings)
        web.app.state.server = server_over(parts, reader=reader, supervisor=supervisor)

    def submit(self, kind: str = "grpo", **changes: Any) -> dict[str, Any]:
        body = {"grpo": SEED_PAGE, "sft": {"examples": [CHAT]}}[kind] | changes
        answer = self.http.post(f"/v1/train/{kind}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def get(self, path: str) -> Any:
        answer = self.http.get(f"/v1/train/{path}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def error(self, answer: httpx2.Response, status: int) -> dict[str, Any]:
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert error.keys() == {"message", "type", "param", "code", "hint"}
        return error


@pytest.fixture(scope="module")
def base() -> LoadedModel:
    return load_model("starter", device="cpu")


@pytest.fixture
def make_site(web: Web, tmp_path: Path, base: LoadedModel) -> Iterator[Callable[..., Site]]:
    made: list[Site] = []

    def make(**config: Any) -> Site:
        made.append(Site(web, tmp_path, base, **config))
        return made[-1]

    yield make
    for site in made:
        site.ledger.close()


@pytest.fixture
def site(make_site: Callable[..., Site]) -> Site:
    return make_site()


# ---- submitting ----


def test_the_served_models_name_is_taken(site: Site) -> None:
    """Or `model: starter` would mean the active policy and the adapter both."""
    answer = site.http.post("/v1/train/grpo", json=SEED_PAGE | {"config": {"output_name": "starter"}})
    error = site.error(answer, 400)
    assert (error["code"], error["param"]) == ("invalid_adapter", "config.output_name")
    wording(error)
    assert site.get("status") == []


def test_the_seed_pages_example_is_queued_at_once(site: Site) -> None:
    answer = site.submit()
    assert answer["state"] == "queued"
    assert answer["message"] == "Queued GRPO training with 1 groups (4 completions, position 1 in queue)"
    assert (answer["adapter_name"], answer["position"], answer["warnings"]) == ("math-correctness", 1, [])
    job = site.ledger.job(answer["job_id"])
    assert (job.kind, job.state, job.steps, job.auto_load) == ("grpo", JobState.QUEUED, 1, True)
    payload = parse_payload("grpo", site.ledger.payload(job.id))
    assert len(payload.groups[0].completions) == 4


def test_conversations_are_queued_behind_it(site: Site) -> None:
    site.submit()
    answer = site.submit("sft", config={"auto_load": False})
    assert answer["message"] == "Queued SFT training with 1 examples (position 2 in queue)"
    job = site.ledger.job(answer["job_id"])
    assert (job.kind, job.auto_load) == ("sft", False)


def test_a_made_up_name_is_the_beginning_of_the_jobs_id(site: Site) -> None:
    for kind in ("grpo", "sft"):
        answer = site.submit(kind, config={})
        assert answer["adapter_name"] == f"{kind}-{answer['job_id'][:8]}"
        assert site.ledger.job(answer["job_id"]).config["output_name"] == answer["adapter_name"]


def test_a_rollout_id_and_a_reward_are_enough(site: Site) -> None:
    facts = {"prompt_ids": (5, 6), "version": "base", "temperature": 1.0, "finish_reason": "stop", "text": "x"}
    records = [RolloutRecord(id=id, completion_ids=(7, i), logprobs=(-1.0, -2.0), **facts) for i, id in enumerate("ab")]
    site.ledger.save_rollouts(records)
    completions = [{"rollout_id": "a", "reward": 1}, {"rollout_id": "b", "reward": 0}]
    answer = site.submit(groups=[{"completions": completions}])
    (group,) = parse_payload("grpo", site.ledger.payload(answer["job_id"])).groups
    assert group.prompt_ids == (5, 6)
    assert [(c.ids, c.logprobs, c.reward) for c in group.completions] == [
        ((7, 0), (-1.0, -2.0), 1.0),
        ((7, 1), (-1.0, -2.0), 0.0),
    ]


def test_the_same_key_gives_the_same_job(site: Site) -> None:
    headers = {"idempotency-key": "abc"}
    first = site.http.post("/v1/train/grpo", json=SEED_PAGE, headers=headers).json()
    again = site.http.post("/v1/train/grpo", json=SEED_PAGE, headers=headers).json()
    assert again["job_id"] == first["job_id"] and "before" in again["message"]
    assert len(site.ledger.jobs()) == 1
    other = SEED_PAGE | {"config": {}}
    error = site.error(site.http.post("/v1/train/grpo", json=other, headers=headers), 409)
    assert error["code"] == "idempotency_conflict"
    sft = site.http.post("/v1/train/sft", json={"examples": [CHAT]}, headers=headers)
    assert site.error(sft, 409)["code"] == "idempotency_conflict"
    assert site.submit()["job_id"] != first["job_id"]


def test_a_known_key_is_answered_before_anything_is_checked_again(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    site, headers = make_site(max_queued_jobs=1), {"idempotency-key": "abc"}
    first = site.http.post("/v1/train/grpo", json=SEED_PAGE, headers=headers).json()

    def refuse(*_: Any, **__: Any) -> None:
        raise StorageError("the disk is full")

    monkeypatch.setattr(train, "check_room", refuse)  # and the queue is full, and the request is no longer valid:
    monkeypatch.setattr(submit, "GrpoRequest", SftRequest)
    again = site.http.post("/v1/train/grpo", json=SEED_PAGE, headers=headers)
    assert again.status_code == 200 and again.json()["job_id"] == first["job_id"]
    invalid = site.http.post("/v1/train/grpo", json={"groups": "none"}, headers=headers)
    assert site.error(invalid, 409)["code"] == "idempotency_conflict"
    assert site.http.post("/v1/train/grpo", json=SEED_PAGE).status_code == 400


def test_a_queued_job_is_answered_although_its_queue_cannot_be_read(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error would have a client without a key post the job a second time."""

    def locked() -> None:
        raise StorageError("the ledger is locked")

    monkeypatch.setattr(site.ledger, "unfinished", locked)
    answer = site.submit()
    assert (answer["state"], answer["waits"], answer["deadline"]) == ("queued", None, None)
    assert [job.id for job in site.ledger.jobs()] == [answer["job_id"]]


def test_the_same_key_at_the_same_time_makes_one_job(site: Site) -> None:
    async def burst() -> list[str]:
        async with httpx2.AsyncClient(base_url=site.http.base_url, timeout=120) as http:
            posts = [http.post("/v1/train/grpo", json=SEED_PAGE, headers={"idempotency-key": "k"}) for _ in range(8)]
            return [answer.json()["job_id"] for answer in await asyncio.gather(*posts)]

    assert len(set(asyncio.run(burst()))) == 1
    assert len(site.ledger.jobs()) == 1


def test_a_full_queue_says_when_to_come_back(make_site: Callable[..., Site]) -> None:
    site = make_site(max_queued_jobs=2)
    site.submit()
    site.submit()
    answer = site.http.post("/v1/train/grpo", json=SEED_PAGE)
    assert site.error(answer, 429)["code"] == "queue_full"
    assert int(answer.headers["retry-after"]) >= 1
    assert len(site.ledger.jobs()) == 2


def test_low_disk_space_is_said_before_anything_is_stored(make_site: Callable[..., Site], tmp_path: Path) -> None:
    site = make_site(min_free_bytes=1 << 60)
    answer = site.http.post("/v1/train/grpo", json=SEED_PAGE)
    error = site.error(answer, 507)
    assert error["code"] == "storage_full"
    wording(error)
    assert answer.headers["x-should-retry"] == "false"
    assert site.ledger.jobs() == [] and not list((tmp_path / "spool").iterdir())


def test_warnings_come_with_the_answer_and_stay_with_the_job(site: Site) -> None:
    flat = {"messages": CHAT["messages"][:1], "completions": [{"text": "4", "reward": 1}, {"text": "4 ", "reward": 1}]}
    answer = site.submit(groups=[*SEED_PAGE["groups"], flat, flat])
    (warning,) = answer["warnings"]
    assert "groups[1], groups[2]" in warning
    assert site.get(f"status/{answer['job_id']}")["warnings"] == [warning]


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({**SEED_PAGE, "learning_rate": 1e-5}, "learning_rate", "invalid_value"),
        ({**SEED_PAGE, "config": {"epochs": 3}}, "config.epochs", "invalid_value"),
        ({"groups": []}, "groups", "invalid_value"),
        ({}, "groups", "invalid_value"),
        ([], None, "invalid_value"),
    ],
)
def test_refusals_come_in_the_envelope_and_store_nothing(site: Site, body: Any, param: str | None, code: str) -> None:
    error = site.error(site.http.post("/v1/train/grpo", json=body), 400)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert site.ledger.jobs() == []


def test_misplaced_options_are_told_where_they_go(site: Site) -> None:
    top = site.error(site.http.post("/v1/train/grpo", json={**SEED_PAGE, "learning_rate": 1e-5}), 400)
    assert "config.learning_rate" in top["hint"] and "under config" in top["hint"]
    epochs = site.error(site.http.post("/v1/train/grpo", json={**SEED_PAGE, "config": {"epochs": 3}}), 400)
    assert "GRPO does not use epochs" in epochs["hint"] and "iterations" in epochs["hint"]


def test_not_json_and_not_a_number_are_refused(site: Site) -> None:
    headers = {"content-type": "application/json"}
    for raw in (b"{", b'{"groups": NaN}', b"\xff", json.dumps(SEED_PAGE).replace("0.8", "Infinity").encode()):
        answer = site.http.post("/v1/train/grpo", content=raw, headers=headers)
        assert site.error(answer, 400)["code"] == "invalid_json"


# ---- looking ----


def run(site: Site, *, steps: int = 2) -> None:
    """The oldest waiting job as a worker does it, without an adapter."""
    lease = site.ledger.lease("w")
    assert lease is not None
    for step in range(1, steps + 1):
        metrics = {"loss/policy": -0.5 / step, "reward/mean": 0.25 * step, "loss/kl": 0.01}
        site.ledger.progress(lease, phase="training", step=step, metrics=metrics)
    site.ledger.published(lease, "math@1")


def test_a_status_has_what_kiln_has_and_more(site: Site) -> None:
    id = site.submit(config={"iterations": 2, "output_name": "math"})["job_id"]
    waiting = site.get(f"status/{id}")
    assert waiting.keys() >= KILN_STATUS
    assert (waiting["state"], waiting["phase"], waiting["progress"], waiting["current_loss"]) == (
        "queued",
        "waiting",
        0.0,
        None,
    )
    assert (waiting["kind"], waiting["steps"], waiting["started_at"], waiting["position"]) == ("grpo", 2, None, 1)
    assert waiting["duration_secs"] is None
    run(site)
    job = site.ledger.complete(id)
    done = site.get(f"status/{id}")
    assert (done["state"], done["phase"], done["progress"], done["step"]) == ("completed", "done", 1.0, 2)
    assert (done["current_loss"], done["adapter_name"], done["adapter_version"]) == (-0.25, "math", "math@1")
    assert done["metrics"]["reward/mean"] == 0.5 and done["error"] is None
    assert done["config"]["iterations"] == 2 and done["summary"]["completions"] == 4
    assert "iterations" in done["changed"] and "seed" not in done["changed"] and "changed" not in done["summary"]
    assert job.finished_at is not None
    assert done["elapsed_secs"] == pytest.approx(job.finished_at - job.created_at, abs=1e-3)
    assert job.started_at is not None
    assert done["duration_secs"] == pytest.approx(job.finished_at - job.started_at, abs=1e-3)
    times = [done["created_at"], done["started_at"], done["finished_at"]]
    assert times == sorted(times) and all(text.endswith("Z") and "T" in text for text in times)


def test_a_status_shows_what_acts_where_the_request_said_nothing(site: Site, base: LoadedModel, make_adapter) -> None:
    """Of a fresh adapter, of one that is continued, and of one that a job ahead has yet to make."""
    names = ("lora_rank", "lora_alpha", "target_modules", "checkpoint_interval", "kl")

    def shown(**config: Any) -> list[Any]:
        acting = site.get(f"status/{site.submit(config=config)['job_id']}")["config"]
        return [acting[name] for name in names]

    store = train_store(site)
    store.import_(make_adapter(base), "math", info=Provenance(base_model="starter", base_hash=base.hash))
    assert shown() == [16, 32.0, "all-linear", 10, "k3"]
    assert shown(lora_rank=4, kl_coeff=0, checkpoint_interval=2) == [4, 32.0, "all-linear", 2, None]
    rank, alpha, targets, *_ = shown(base_adapter="math", output_name="other")
    assert (rank, alpha) == (3, 6.0) and "q_proj" in targets
    assert shown(output_name="other")[:3] == [None] * 3  # what the job ahead makes is not there yet
    lease = site.ledger.lease("w")
    assert lease is not None
    site.ledger.settled(lease, {"lora_rank": 5})
    assert site.get(f"status/{lease.job.id}")["config"]["lora_rank"] == 5


def train_store(site: Site) -> AdapterStore:
    return AdapterStore(site.ledger.path.parent / "adapters")


def test_a_status_says_why_a_version_was_not_made_active_and_how_to_do_it(site: Site) -> None:
    id = site.submit(config={"output_name": "math"})["job_id"]
    lease = site.ledger.lease("w")
    assert lease is not None
    site.ledger.published(lease, "math@4", unhealthy="it fell apart (policy.destroyed)")
    done = site.get(f"status/{id}")
    assert (done["state"], done["phase"], done["adapter_version"]) == ("completed", "done", "math@4")
    assert done["unhealthy"] == "it fell apart (policy.destroyed)" and done["error"] is None
    (warning,) = done["warnings"]
    assert warning.startswith("math@4 is stored and was not made active") and done["unhealthy"] in warning
    assert 'POST /v1/adapters/math/activate {"version": 4}' in warning
    assert f"GET /v1/train/health/{id}" in warning
    last = site.ledger.events(id)[-1]
    assert (last.kind, last.level) == ("state", "warning") and "math@4 was not made active" in last.message


def test_the_list_begins_with_what_runs(site: Site) -> None:
    ids = [site.submit()["job_id"] for _ in range(5)]
    for _ in range(2):  # the first two come to an end
        lease = site.ledger.lease("w")
        assert lease is not None
        site.ledger.fail(lease, {"code": "training_failed", "message": "diverged", "hint": None})
    assert site.ledger.lease("w") is not None
    order = [job["job_id"] for job in site.get("status")]
    assert order == [ids[2], ids[3], ids[4], ids[1], ids[0]]
    queue = site.get("queue")
    assert queue["running"]["job_id"] == ids[2]
    assert [(job["job_id"], job["position"]) for job in queue["queued"]] == [(ids[3], 1), (ids[4], 2)]
    assert queue["queued"][0].keys() == {"job_id", "job_type", "adapter_name", "position", "waits"}
    assert [job["waits"]["job_id"] for job in queue["queued"]] == [ids[2], ids[3]]
    assert [job["job_id"] for job in queue["completed"]] == [ids[1], ids[0]]
    assert queue["completed"][0]["error"] == {"code": "training_failed", "message": "diverged", "hint": None}


def test_a_job_that_waits_says_why_and_for_how_long(site: Site) -> None:
    one, other = site.submit(), site.submit(config={**SEED_PAGE["config"], "output_name": "sql", "weight": 4})
    assert [each["waits"]["reason"] for each in (one, other)] == ["turn", "turn"]
    assert one["waits"]["about_seconds"] == 0.0
    leases = [site.ledger.lease("w"), site.ledger.lease("w")]
    assert {lease.job.weight for lease in leases if lease} == {1, 4}
    for lease in leases:
        assert lease is not None
        site.ledger.progress(lease, phase="training", step=0, metrics={"time/step_s": 3.0}, tokens=9)
    next_one = site.submit()["waits"]
    assert (next_one["reason"], next_one["job_id"]) == ("adapter", one["job_id"])
    assert next_one["about_seconds"] == 3.0 * site.get(f"status/{one['job_id']}")["steps"]
    status = site.get(f"status/{one['job_id']}")
    assert status["waits"] is None and status["config"]["weight"] == 1
    queue = site.get("queue")
    assert {queue["running"]["job_id"], *(job["job_id"] for job in queue["beside"])} == {one["job_id"], other["job_id"]}


def test_a_deadline_is_told_of_in_the_answer_and_the_status(site: Site) -> None:
    config = {**SEED_PAGE["config"], "deadline": 3600}
    job = site.submit(config=config)
    assert job["deadline"].keys() == {"at", "outlook", "message", "about_seconds"}
    assert (job["deadline"]["outlook"], job["deadline"]["about_seconds"]) == ("unknown", None)
    lease = site.ledger.lease("w")
    assert lease is not None and lease.job.deadline is not None
    site.ledger.progress(lease, phase="training", step=1, metrics={"time/step_s": 3.0}, tokens=64)
    status = site.get(f"status/{job['job_id']}")
    assert status["deadline"]["at"] == job["deadline"]["at"] and status["config"]["deadline"] == 3600
    left = 3.0 * (status["steps"] - 1)
    assert (status["deadline"]["outlook"], status["deadline"]["about_seconds"]) == ("in_time", left)
    site.ledger.published(lease, "math@1")
    site.ledger.complete(job["job_id"])
    assert [each["deadline"]["outlook"] for each in site.get("queue")["completed"]] == ["met"]
    assert site.submit()["deadline"] is None


@pytest.mark.parametrize(
    "deadline", ["2020-01-31T18:00:00Z", "2999-01-31T18:00:00+02:00", "2030-01-31T18:00:00", 0, "x"]
)
def test_a_deadline_that_is_none_is_refused(site: Site, deadline: object) -> None:
    body = {**SEED_PAGE, "config": {**SEED_PAGE["config"], "deadline": deadline}}
    error = site.error(site.http.post("/v1/train/grpo", json=body), 400)
    assert error["param"] == "config.deadline" and site.ledger.jobs() == []


def test_an_idle_server_has_empty_lists(site: Site) -> None:
    assert site.get("status") == []
    assert site.get("queue") == {"running": None, "beside": [], "queued": [], "completed": []}


def test_a_job_that_killed_its_workers_shows_the_last_words(site: Site) -> None:
    id = site.submit()["job_id"]
    for _ in range(3):
        assert site.ledger.lease("w") is not None
        site.ledger.expire("w")
    site.words[id] = "Killed: line 42"
    error = site.get(f"status/{id}")["error"]
    assert (error["code"], error["log"]) == ("crashed_repeatedly", "Killed: line 42")


def test_what_a_job_says_of_the_disk_names_no_directory_of_the_machine(site: Site, tmp_path: Path) -> None:
    id = site.submit()["job_id"]
    lease = site.ledger.lease("w")
    assert lease is not None
    hint = f"look into {tmp_path}/logs/worker.log"
    site.ledger.fail(lease, {"code": "storage", "message": f"{tmp_path} is full", "hint": hint})
    error = site.get(f"status/{id}")["error"]
    assert (error["message"], error["hint"]) == ("<state_dir> is full", "look into <state_dir>/logs/worker.log")
    told = site.http.get(f"/v1/train/events/{id}").text
    assert str(tmp_path) not in told and told.count("<state_dir> is full") == 2  # the message, and the error in data


def test_metrics_have_a_line_a_step(site: Site) -> None:
    id = site.submit()["job_id"]
    assert site.get(f"metrics/{id}") == {"job_id": id, "steps": []}
    run(site, steps=3)
    steps = site.get(f"metrics/{id}")["steps"]
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert [step["reward/mean"] for step in steps] == [0.25, 0.5, 0.75]
    assert all(step["time"].endswith("Z") for step in steps)


@pytest.mark.parametrize("path", ["status", "events", "metrics"])
def test_a_job_that_is_not_there_is_404(site: Site, path: str) -> None:
    for id in ("0" * 32, "nonsense", "..%2f..", "%00", "x" * 5000):
        assert site.error(site.http.get(f"/v1/train/{path}/{id}"), 404)["code"] in ("job_not_found", "route_not_found")


# ---- following ----


Event = dict[str, Any]


def read_events(response: httpx2.Response, on_event: Callable[[Event], None] = lambda event: None) -> list[Event]:
    """The stream to its end: [{"id", "kind", ...}]."""
    found: list[Event] = []
    id = 0
    for line in response.iter_lines():
        if line.startswith("id: "):
            id = int(line[4:])
        elif line.startswith("data: "):
            found.append({"id": id, **json.loads(line[6:])})
            on_event(found[-1])
    return found


def test_a_job_can_be_followed_while_it_runs_to_its_end(site: Site) -> None:
    id = site.submit()["job_id"]
    acts = iter([lambda: run(site), lambda: site.ledger.complete(id)])

    def go_on(event: Event) -> None:
        """Each next thing happens only after the one before has arrived: nothing is held back until the end."""
        state = event["data"].get("state"), event["data"].get("phase")
        if state in (("queued", "waiting"), ("running", "swapping")):
            next(acts)()

    with site.http.stream("GET", f"/v1/train/events/{id}") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        found = read_events(response, go_on)
    assert [event["id"] for event in found] == sorted({event["id"] for event in found})
    assert [event["data"]["step"] for event in found if event["kind"] == "metrics"] == [1, 2]
    assert found[-1]["data"]["state"] == "completed"
    assert {"kind", "at", "level", "message", "data", "id"} == found[0].keys()


def test_whoever_comes_back_misses_nothing_and_gets_nothing_twice(site: Site) -> None:
    id = site.submit()["job_id"]
    run(site)
    site.ledger.complete(id)
    everything = read_events(site.http.get(f"/v1/train/events/{id}"))
    middle = everything[2]["id"]
    by_header = read_events(site.http.get(f"/v1/train/events/{id}", headers={"last-event-id": str(middle)}))
    by_query = read_events(site.http.get(f"/v1/train/events/{id}", params={"after": middle}))
    assert by_header == by_query == everything[3:]
    last = {"last-event-id": str(everything[-1]["id"])}
    assert site.http.get(f"/v1/train/events/{id}", headers=last).status_code == 204  # an EventSource then stops


def test_long_histories_come_whole(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "PAGE", 7)
    id = site.submit()["job_id"]
    run(site, steps=40)
    site.ledger.complete(id)
    found = read_events(site.http.get(f"/v1/train/events/{id}"))
    assert [event["data"]["step"] for event in found if event["kind"] == "metrics"] == list(range(1, 41))


def test_a_silent_stream_pings(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(train, "EVENTS_POLL_S", 0.02)
    id = site.submit()["job_id"]
    with site.http.stream("GET", f"/v1/train/events/{id}") as response:
        lines = response.iter_lines()
        assert any(line == ": ping" for line in lines)
    site.ledger.cancel(id)


def test_a_stopping_server_ends_the_streams_of_jobs_that_wait_for_the_next_one(site: Site) -> None:
    id = site.submit()["job_id"]

    def stop(event: Event) -> None:
        site.worker.state = "stopped"

    with site.http.stream("GET", f"/v1/train/events/{id}") as response:
        assert [event["data"]["state"] for event in read_events(response, stop)] == ["queued"]


@pytest.mark.parametrize(
    ("headers", "params"),
    [
        ({"last-event-id": "abc"}, {}),
        ({"last-event-id": "-1"}, {}),
        ({"last-event-id": "1" * 19}, {}),
        ({}, {"after": -1}),
        ({}, {"after": 10**18}),
    ],
)
def test_an_id_that_is_none_is_refused(site: Site, headers: dict[str, str], params: dict[str, int]) -> None:
    id = site.submit()["job_id"]
    answer = site.http.get(f"/v1/train/events/{id}", headers=headers, params=params)
    assert site.error(answer, 400)["code"] == "invalid_value"


@pytest.mark.parametrize("way", ["header", "query"])
def test_the_largest_id_there_can_be_is_one(site: Site, way: str) -> None:
    id = site.submit()["job_id"]
    site.ledger.cancel(id)
    last = str(10**18 - 1)
    options = {"headers": {"last-event-id": last}} if way == "header" else {"params": {"after": last}}
    assert site.http.get(f"/v1/train/events/{id}", **options).status_code == 204


def test_a_job_that_ran_out_of_memory_says_with_what_it_went_on(site: Site) -> None:
    id = site.submit()["job_id"]
    assert site.get(f"status/{id}")["warnings"] == []
    lease = site.ledger.lease("w")
    assert lease is not None
    site.ledger.measured(lease, largest=900, longest=100)
    site.ledger.shrink(lease, "memory ran out")
    (warning,) = site.get(f"status/{id}")["warnings"]
    assert "at most 450 tokens in a pass; config.micro_tokens is 8192" in warning


# ---- cancelling ----


@pytest.mark.parametrize(("method", "path"), [("DELETE", "queue"), ("POST", "cancel")])
def test_a_waiting_job_is_cancelled_at_once_and_a_running_one_is_asked_to_stop(
    site: Site, method: str, path: str
) -> None:
    running, waiting = site.submit()["job_id"], site.submit()["job_id"]
    lease = site.ledger.lease("w")
    assert lease is not None

    def cancel(id: str) -> httpx2.Response:
        return site.http.request(method, f"/v1/train/{path}/{id}")

    assert cancel(waiting).json() == {"job_id": waiting, "status": "cancelled"}
    assert site.get(f"status/{waiting}")["state"] == "cancelled"
    assert cancel(running).json() == {"job_id": running, "status": "cancelling"}
    status = site.get(f"status/{running}")
    assert status["state"] == "running" and status["cancel_requested"] is True
    site.ledger.cancelled(lease)
    again = cancel(running)
    assert site.error(again, 409)["code"] == "not_cancellable"
    assert again.headers["x-should-retry"] == "false"
    assert site.error(cancel("0" * 32), 404)["code"] == "job_not_found"


# ---- the document ----


def test_jobs_that_have_ended_are_listed_in_pages(site: Site) -> None:
    ids = [site.submit()["job_id"] for _ in range(6)]
    for id in ids[:5]:
        site.ledger.cancel(id)
    listed = lambda query: [each["job_id"] for each in site.get(f"status{query}")]  # noqa: E731
    assert listed("") == [ids[5], *reversed(ids[:5])]
    assert listed("?limit=2") == [ids[5], ids[4], ids[3]]  # one waits, and is always there
    assert listed(f"?limit=2&before={ids[3]}") == [ids[2], ids[1]]
    assert listed(f"?limit=2&before={ids[1]}") == [ids[0]] and listed(f"?before={ids[0]}") == []
    assert site.error(site.http.get("/v1/train/status?before=nothing"), 404)["code"] == "job_not_found"
    assert site.error(site.http.get("/v1/train/status?limit=1025"), 400)["param"] == "limit"


def test_the_routes_are_in_the_openapi_document(site: Site) -> None:
    document = site.http.get("/openapi.json").json()
    routes = {(path, method) for path, methods in document["paths"].items() for method in methods}
    assert routes == {
        ("/v1/train/grpo", "post"),
        ("/v1/train/sft", "post"),
        ("/v1/train/status", "get"),
        ("/v1/train/status/{job_id}", "get"),
        ("/v1/train/queue", "get"),
        ("/v1/train/queue/{job_id}", "delete"),
        ("/v1/train/cancel/{job_id}", "post"),
        ("/v1/train/events/{job_id}", "get"),
        ("/v1/train/metrics/{job_id}", "get"),
    }


def test_a_slow_tokenisation_does_not_hold_up_other_requests(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    read, waiting = train.read_grpo, threading.Event()

    def slowly(*arguments: Any, **options: Any):
        assert waiting.wait(120)
        return read(*arguments, **options)

    monkeypatch.setattr(train, "read_grpo", slowly)

    async def both() -> None:
        async with httpx2.AsyncClient(base_url=site.http.base_url, timeout=120) as http:
            submission = asyncio.ensure_future(http.post("/v1/train/grpo", json=SEED_PAGE))
            await asyncio.sleep(0.1)
            assert (await http.get("/v1/train/status")).json() == []
            waiting.set()
            assert (await submission).status_code == 200

    asyncio.run(both())
