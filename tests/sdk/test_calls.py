"""The client against a server of the wire format with real sockets; every test runs blocking and on asyncio."""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

import groupwise
from groupwise.errors import ConfigError, DeadlineError, JobFailedError, RemoteError, RequestError, StorageError
from groupwise.sdk import client as client_module
from groupwise.sdk import transport as client_http
from groupwise.sdk.client import AsyncClient, Client
from groupwise.sdk.drivers import connection, server_url
from groupwise.sdk.transport import EventReader, encode
from groupwise.sdk.types import SampledGroup, TrainStatus, as_json, read
from image_host import certificate_of, image_host
from wire_server import Fault, WireServer, wire_server
from wording import raises

BUSY = Fault(status=429, headers={"retry-after": "0"})
SUM = "What is 2 + 3?"


class OnAsyncio:
    """An AsyncClient (or its adapters) with a blocking face, so that one test serves both."""

    def __init__(self, inner: Any, loop: asyncio.AbstractEventLoop):
        self._inner, self._loop = inner, loop

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name == "adapters":
            return OnAsyncio(value, self._loop)
        if not callable(value):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            made = value(*args, **kwargs)
            return self._iterate(made) if inspect.isasyncgen(made) else self._loop.run_until_complete(made)

        return call

    def _iterate(self, items: Any) -> Iterator[Any]:
        try:
            while True:
                try:
                    yield self._loop.run_until_complete(anext(items))
                except StopAsyncIteration:
                    return
        finally:
            self._loop.run_until_complete(items.aclose())


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is waited for between tries."""
    monkeypatch.setattr(client_http, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(client_module, "AGAIN_S", 0.01)


@pytest.fixture
def server() -> Iterator[WireServer]:
    with wire_server() as running:
        yield running


@pytest.fixture(params=["blocking", "asyncio"])
def make(request: pytest.FixtureRequest) -> Iterator[Any]:
    """`make(url, ...)`: a client of one kind or the other."""
    loop, made = asyncio.new_event_loop(), []

    def make_client(url: str, **options: Any) -> Any:
        client = Client(url, **options) if request.param == "blocking" else OnAsyncio(AsyncClient(url, **options), loop)
        made.append(client)
        return client

    yield make_client
    for client in made:
        client.close()
    loop.close()


@pytest.fixture
def client(make, server) -> Any:
    return make(server.url)


# ---- sampling ----


def test_a_sample_is_groups_in_the_order_of_the_prompts(client, server):
    groups = client.sample([SUM, [{"role": "user", "content": "What is 10 + 20?"}]], n=3, max_tokens=9, seed=None)
    assert server.of("POST", "/v1/completions/batch")[0].json == {
        "prompts": [[{"role": "user", "content": SUM}], [{"role": "user", "content": "What is 10 + 20?"}]],
        "n": 3,
        "max_tokens": 9,
    }
    assert [group.texts for group in groups] == [["5", "6", "6"], ["30", "31", "31"]]
    assert [c.rollout_id for c in groups[1].completions] == ["rollout-1-0", "rollout-1-1", "rollout-1-2"]
    assert groups[0].completions[0].adapter == "base" and groups[0].completions[0].usage.total_tokens == 7
    assert groups[0].completions[0].token_ids is None


def test_token_ids_and_logprobs_come_on_request(client):
    completion = client.sample(SUM, n=1, return_token_ids=True, logprobs=True)[0].completions[0]
    assert completion.token_ids == [7, 2] and completion.prompt_token_ids == [5, 10]
    assert completion.logprobs == [-0.5, -0.25]


def test_scores_name_rollouts_or_send_texts_and_leave_out_what_failed(client):
    group = client.sample(SUM, n=3)[0]
    asked = [{"role": "user", "content": SUM}]
    assert group.scored([1, None, 0.5]) == {
        "messages": asked,
        "completions": [{"rollout_id": "rollout-0-0", "reward": 1.0}, {"rollout_id": "rollout-0-2", "reward": 0.5}],
    }
    assert group.scored([1, float("nan"), 0], text_only=True)["completions"] == [
        {"text": "5", "reward": 1.0},
        {"text": "6", "reward": 0.0},
    ]
    with raises(RequestError):
        group.scored([1.0, 0.0])


def test_a_chat(client, server):
    reply = client.chat(SUM, n=2, temperature=0)
    assert reply.text == "5" and [choice.message.content for choice in reply.choices] == ["5", "6"]
    assert reply.system_fingerprint == "base" and reply.usage.completion_tokens == 2
    assert server.seen[0].json["temperature"] == 0 and "stream" not in server.seen[0].json


def test_a_streamed_chat_is_the_same_text(client):
    deltas = list(client.chat_stream("What is 123 + 456?"))
    assert "".join(delta.text for delta in deltas) == "579" and len(deltas) == 5
    assert deltas[-1].finish_reason == "stop" and {delta.version for delta in deltas} == {"base"}


def test_a_stream_that_is_dropped_is_closed(client, server):
    stream = client.chat_stream("What is 123 + 456?")
    next(stream)
    stream.close()
    assert client.chat(SUM).text == "5"


@pytest.mark.parametrize(
    ("said", "code", "begun"),
    [("12 + 30 fail", "engine_unavailable", "4"), ("12 + 30 stop short", "connection_lost", "42")],
)
def test_a_stream_that_fails_says_so_after_what_it_had(client, said, code, begun):
    stream, text = client.chat_stream(said), ""
    while text != begun:
        text += next(stream).text
    with pytest.raises(RemoteError) as caught:
        list(stream)
    assert caught.value.code == code


def test_what_cannot_be_meant_is_refused_before_it_is_sent(client, server):
    with raises(RequestError) as caught:
        client.chat(SUM, temprature=1)
    assert caught.value.hint == "did you mean temperature?"
    with raises(RequestError):
        client.sample([{"role": "user", "content": SUM}])
    with raises(RequestError):
        client.train_grpo([{"messages": [], "completions": [{"text": "a", "reward": float("nan")}]}])
    assert not server.seen


# ---- what is sent again, and what is not ----


def test_a_get_is_repeated_whatever_happened(client, server):
    server.plan("GET", "/v1/models", Fault(cut=True), Fault(keep=10), Fault(status=503))
    assert [model.id for model in client.models()] == ["toy"]
    assert len(server.seen) == 4


def test_sampling_is_repeated_where_the_server_refused_it(make, server):
    notes: list[str] = []
    server.plan(
        "POST", "/v1/completions/batch", BUSY, Fault(status=503, headers={"retry-after": "0"}, code="not_ready")
    )
    assert len(make(server.url, note=notes.append).sample(SUM, n=2)[0].completions) == 2
    assert len(server.seen) == 3
    assert notes[0].startswith("planned overloaded; again in") and notes[1].startswith("planned not_ready")


def test_an_error_says_which_field_the_server_means(client, server):
    words = {"message": "n is 0", "type": "t", "param": "n", "code": "invalid_value", "hint": None}
    server.plan("POST", "/v1/completions/batch", Fault(status=400, body=json.dumps({"error": words}).encode()))
    with pytest.raises(RemoteError) as caught:
        client.sample(SUM)
    assert (caught.value.field, caught.value.as_dict()["field"]) == ("n", "n")


@pytest.mark.parametrize(
    "fault",
    [
        Fault(late=True),
        Fault(cut=True),
        Fault(status=503, code="not_ready"),
        Fault(status=500),
        Fault(status=429, headers={"retry-after": "0", "x-should-retry": "false"}),
        Fault(status=504, headers={"retry-after": "0"}),
        Fault(status=429, headers={"retry-after": "3600"}),
    ],
    ids=["answer lost", "cut", "503", "500", "do not retry", "504", "an hour"],
)
def test_sampling_is_not_repeated_where_it_may_have_been_done(client, server, fault):
    server.plan("POST", "/v1/completions/batch", fault)
    with raises(RemoteError) as caught:
        client.sample(SUM)
    assert len(server.seen) == 1
    if fault.status is None:
        assert caught.value.code == "connection_lost"
        assert caught.value.exit_code == 75


def test_a_job_is_queued_once_however_often_it_was_sent(client, server):
    server.plan("POST", "/v1/train/grpo", Fault(late=True), Fault(status=503), BUSY)
    job = client.train_grpo([{"messages": [], "completions": []}], output_name="math", learning_rate=1e-4)
    sent = server.of("POST", "/v1/train/grpo")
    assert len(sent) == 4 and list(server.jobs) == [job.job_id]
    assert len({each.headers["idempotency-key"] for each in sent}) == 1 and len({each.raw for each in sent}) == 1
    assert sent[0].json["config"] == {"output_name": "math", "learning_rate": 1e-4}
    other = client.train_sft([{"messages": []}], idempotency_key="mine")
    assert other.job_id != job.job_id and server.seen[-1].headers["idempotency-key"] == "mine"
    assert len({each.headers["idempotency-key"] for each in server.of("POST", "/v1/train")}) == 2


def test_deleting_is_not_repeated_when_its_answer_was_lost(client, server):
    server.versions["math"] = 1
    server.plan("DELETE", "/v1/adapters/math", Fault(late=True))
    with raises(RemoteError):
        client.adapters.delete("math")
    assert len(server.seen) == 1


def test_a_server_that_is_not_there(make):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with raises(RemoteError) as caught:
            make(url, retries=1).train_grpo([])
    assert (caught.value.code, caught.value.exit_code) == ("unreachable", 75)


# ---- deadlines ----


def test_a_call_ends_at_its_deadline(client, server):
    server.plan("GET", "/v1/models", *[Fault(stall=5.0, cut=True)] * 9)
    began = time.monotonic()
    with raises(RemoteError) as caught:
        client.models(timeout=0.3)
    assert time.monotonic() - began < 9 * 5 and caught.value.code == "timeout"


def test_a_retry_that_would_come_too_late_is_not_waited_for(client, server):
    server.plan("POST", "/v1/train/grpo", Fault(status=429, headers={"retry-after": "3600"}, code="queue_full"))
    with raises(RemoteError) as caught:
        client.train_grpo([], timeout=120)
    assert caught.value.exit_code == 75


# ---- errors ----


def test_an_error_has_the_words_of_the_server(client, server):
    server.plan("POST", "/v1/chat", Fault(status=400, code="context_length_exceeded"))
    with pytest.raises(RemoteError) as caught:
        client.chat(SUM)
    error = caught.value
    assert (error.message, error.code, error.hint) == (
        "planned context_length_exceeded",
        "context_length_exceeded",
        "rest",
    )
    assert (error.status, error.request_id, error.exit_code) == (400, "req-7", 2)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=404, body=b"<h1>nginx</h1>"),
        Fault(status=404, body=b'{"detail": "Not Found"}'),
        Fault(status=400, body=b""),
        Fault(status=307, headers={"location": "http://elsewhere/"}, body=b""),
        Fault(status=200, body=b"<html>"),
        Fault(status=200, body=b'{"object": "list"}'),
        Fault(status=200, body=b"[]"),
        Fault(status=200, body=b'{"data": [{"id": 7}]}'),
    ],
)
def test_something_else_than_a_groupwise_server(client, server, fault):
    server.plan("GET", "/v1/models", fault)
    with raises(RemoteError):
        client.models()
    assert len(server.seen) == 1


def test_the_api_key(make):
    with wire_server(api_key="s3cret") as server:
        client = make(server.url, api_key=" s3cret\n")
        assert client.models() and "s3cret" not in repr(client)
        stranger = make(server.url, api_key="")
        assert stranger.health().status == "ok"
        with raises(RemoteError) as caught:
            stranger.models()
        assert caught.value.exit_code == 4
    with raises(ConfigError) as caught:
        make(server.url, api_key="two words")
    assert "two words" not in str(caught.value)


def test_the_key_and_the_url_come_from_the_environment(make, monkeypatch):
    with wire_server(api_key="s3cret") as server:
        monkeypatch.setenv("GROUPWISE_API_KEY", "s3cret")
        monkeypatch.setenv("GROUPWISE_URL", server.url)
        assert make(None).models()


def test_a_proxy_is_not_asked_for_this_machine(make, server, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert make(server.url).health().status == "ok"


@pytest.mark.parametrize("scheme", ["https", "HTTPS"])
def test_a_key_is_not_sent_to_who_cannot_prove_to_be_the_server(tmp_path, scheme: str):
    certificate = certificate_of(tmp_path, "localhost")
    with image_host(certificate=certificate) as host:
        options = connection(server_url(f"{scheme}://localhost:{host.port}"), "s3cret")
        with httpx2.Client(**options) as client, pytest.raises(httpx2.ConnectError):
            client.get("/health")
        assert not host.asked


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("host:8420", "http://host:8420"),
        ("https://host/prefix/", "https://host/prefix"),
        ("http://host:1/v1", "http://host:1"),
        ("http://[::1]:8420", "http://[::1]:8420"),
    ],
)
def test_urls(given, url):
    assert server_url(given) == url


@pytest.mark.parametrize("given", ["ftp://host", "http://", "http://host:port", "http://host:99999"])
def test_urls_that_are_none(given):
    with raises(ConfigError):
        server_url(given)


# ---- jobs ----


def submit(client: Any, **config: Any) -> Any:
    return client.train_grpo([{"messages": [], "completions": []}], output_name="math", **config)


def test_jobs_are_typed(client, server):
    submitted = submit(client, seed=13)
    assert (submitted.state, submitted.adapter_name, submitted.position) == ("queued", "math", 1)
    assert submitted.warnings == ["2 of 3 groups have equal rewards"]
    job = client.wait(submitted.job_id, timeout=120)
    assert isinstance(job, TrainStatus) and job == client.status(job.job_id) == client.jobs()[0]
    assert (job.state, job.adapter_version, job.current_loss, job.progress) == ("completed", "math@1", -0.25, 1.0)
    assert job.created_at == "2026-01-02T03:04:05Z"
    assert job.metrics["reward/mean"] == 0.5 and client.metrics(job.job_id)[0]["loss/policy"] == -0.25


def test_a_round_trip_of_json():
    group = {"messages": [{"role": "user", "content": "a"}], "tools": []}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    completion = {"text": "b", "finish_reason": "stop", "prompt_index": 0, "completion_index": 0, "adapter": "math@2"}
    completion |= {"rollout_id": "rollout-0", "usage": usage}
    dumped = as_json(read(SampledGroup, group | {"completions": [completion]}))
    assert dumped["messages"] == group["messages"]
    assert {key: dumped["completions"][0][key] for key in completion} == completion


def test_waiting_tells_each_event_once_and_in_order(client, server):
    events: list[Any] = []
    client.wait(submit(client).job_id, timeout=120, on_event=events.append)
    assert [event.seq for event in events] == [1, 2, 3, 4]
    assert [event.message or event.kind for event in events] == ["queued", "running", "metrics", "completed"]
    assert events[2].data["reward/mean"] == 0.5
    assert list(client.events(next(iter(server.jobs)), after=2)) == events[2:]


def test_waiting_survives_broken_streams_and_a_server_that_restarts(client, server):
    job = submit(client)
    away = [Fault(status=502), Fault(cut=True), Fault(status=503), Fault(cut=True)]
    server.plan("GET", "/v1/train/events", Fault(cut=True), Fault(status=503, code="shutting_down"), Fault(keep=7))
    server.plan("GET", "/v1/train/status", *away)
    events: list[Any] = []
    assert client.wait(job.job_id, timeout=120, on_event=events.append).state == "completed"
    assert [event.seq for event in events] == [1, 2, 3, 4]


def test_waiting_goes_on_where_it_was_when_the_stream_is_silent(client, server, monkeypatch):
    monkeypatch.setattr(client_module, "QUIET_S", 0.1)
    server.next_outcome = "running"
    job, events = submit(client), []

    def complete_when_opened_anew() -> None:
        while len(server.of("GET", "/v1/train/events")) < 3:
            time.sleep(0.01)
        server.jobs[job.job_id].outcome = "completed"

    threading.Thread(target=complete_when_opened_anew, daemon=True).start()
    client.wait(job.job_id, timeout=30, on_event=events.append)
    assert [event.seq for event in events] == [1, 2, 3, 4]
    opened = server.of("GET", "/v1/train/events")
    assert "last-event-id" not in opened[0].headers and opened[-1].headers["last-event-id"] == "3"


def test_waiting_ends_when_the_server_stays_away(client, server, monkeypatch):
    monkeypatch.setattr(client_module, "OUTAGE_S", 0.2)
    job = submit(client)
    server.plan("GET", "/v1/train", *[Fault(cut=True)] * 99)
    with raises(RemoteError):
        client.wait(job.job_id, timeout=120)


def test_waiting_ends_at_its_deadline(client, server):
    server.next_outcome = "running"
    job = submit(client)
    began = time.monotonic()
    with raises(DeadlineError) as caught:
        client.wait(job.job_id, timeout=0.4)
    assert time.monotonic() - began < 120 and caught.value.exit_code == 75


def test_a_job_that_fails_or_is_cancelled_is_an_error_of_its_own(client, server):
    server.next_outcome = "failed"
    with raises(JobFailedError) as caught:
        client.wait(submit(client).job_id, timeout=120)
    assert caught.value.exit_code == 5 and caught.value.hint == "lower the rate"
    job = submit(client)
    assert client.cancel(job.job_id).status == "cancelled"
    with raises(JobFailedError):
        client.wait(job.job_id, timeout=120)
    with raises(RemoteError) as refused:
        client.cancel(job.job_id)
    assert refused.value.code == "not_cancellable"


def test_waiting_for_a_job_that_never_was(client):
    with raises(RemoteError) as caught:
        client.wait("nothing/../here", timeout=120)
    assert caught.value.exit_code == 2


def test_the_whole_loop(client, server):
    for expected in (1 / 8, 3 / 8, 5 / 8):
        groups = client.sample([SUM], n=8)
        rewards = [float(text == "5") for text in groups[0].texts]
        assert sum(rewards) / 8 == expected
        client.wait(client.train_grpo([groups[0].scored(rewards)], output_name="math").job_id, timeout=120)
    assert server.active == "math@3" and client.health().active_version == "math@3"


# ---- adapters ----


@pytest.fixture
def peft_directory(tmp_path: Path) -> Path:
    directory = tmp_path / "peft"
    directory.mkdir()
    (directory / "adapter_config.json").write_text('{"r": 2}')
    (directory / "adapter_model.safetensors").write_bytes(b"\0" * 3000)
    return directory


def test_adapters_go_up_and_come_down(client, server, peft_directory, tmp_path):
    server.plan("POST", "/v1/adapters/upload", BUSY)
    uploaded = client.adapters.upload("mine", peft_directory)
    assert uploaded.version == "mine@1" and uploaded.size_bytes == len(server.archives["mine"])
    assert uploaded.files == ["adapter_config.json", "adapter_model.safetensors"]
    target = client.adapters.download("mine", tmp_path / "mine.tar.gz")
    assert target.read_bytes() == server.archives["mine"]
    with tarfile.open(target) as archive:
        assert archive.extractfile("mine/adapter_config.json").read() == b'{"r": 2}'
    again = client.adapters.upload("mine", target, new_version=True)
    assert again.version == "mine@2" and server.archives["mine"] == target.read_bytes()
    assert b'name="new_version"' in server.seen[-1].raw


def test_a_download_is_whole_or_not_there(client, server, tmp_path):
    server.archives["mine"] = b"archive"
    server.plan("GET", "/v1/adapters/mine/download", Fault(keep=100))
    with raises(RemoteError):
        client.adapters.download("mine", tmp_path / "mine.tar.gz")
    assert not list(tmp_path.iterdir())
    with raises(StorageError):
        client.adapters.download("mine", tmp_path / "nowhere" / "mine.tar.gz")
    with raises(groupwise.GroupwiseError):
        client.adapters.upload("mine", tmp_path / "nothing")


def test_adapters_are_listed_shown_activated_and_merged(client, server):
    client.wait(submit(client).job_id, timeout=120)
    listed = client.adapters.list()
    assert (listed.active, listed.active_version) == ("math", "math@1")
    assert [(a.name, a.versions, a.size_bytes) for a in listed.available] == [("math", ["math@1"], 3 << 20)]
    shown = client.adapters.show("math")
    assert shown.history[0].step == 4 and shown.history[0].metrics["reward/mean"] == 0.5
    assert client.adapters.note("math@1", "good at sums").note == "good at sums"
    assert client.adapters.show("math").history[0].note == client.adapters.list().available[0].notes["math@1"]
    assert client.adapters.note("math@1", None).note is None
    assert client.adapters.activate("base").version == "base"
    assert client.adapters.rollback().version == "math@1"
    assert client.adapters.activate("math@1").version == "math@1"
    merged = client.adapters.merge({"math": 0.5, "math@1": 0.5}, "both", mode="ties", density=0.3)
    assert merged.version == "both@1" and merged.output_name == "both"
    assert server.seen[-1].json == {
        "output_name": "both",
        "mode": "ties",
        "density": 0.3,
        "sources": [{"name": "math", "weight": 0.5}, {"name": "math@1", "weight": 0.5}],
    }
    assert client.adapters.delete("math").versions == ["math@1"]
    with raises(RemoteError):
        client.adapters.show("../x")


# ---- only one of the two kinds ----


def test_many_wait_at_once_on_asyncio(server):
    seen: list[str] = []

    async def note(event: Any) -> None:
        await asyncio.sleep(0)
        seen.append(event.kind)

    async def all_of_them() -> list[TrainStatus]:
        async with AsyncClient(server.url) as client:
            jobs = [await client.train_grpo([], output_name=f"a{i}") for i in range(12)]
            return await asyncio.gather(*(client.wait(job.job_id, timeout=120, on_event=note) for job in jobs))

    assert [job.adapter_version for job in asyncio.run(all_of_them())] == [f"a{i}@1" for i in range(12)]
    assert seen.count("metrics") == 12


def test_a_task_that_is_cancelled_stops_waiting(server):
    server.next_outcome = "running"

    async def impatient() -> None:
        async with AsyncClient(server.url) as client:
            job = await client.train_grpo([])
            await asyncio.wait_for(client.wait(job.job_id), timeout=0.3)

    with pytest.raises(TimeoutError):
        asyncio.run(impatient())


def test_threads_share_a_client(server):
    results: list[str] = []
    with Client(server.url) as client:
        threads = [threading.Thread(target=lambda: results.append(client.chat(SUM).text)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == ["5"] * 8


def test_both_clients_have_the_same_calls_and_say_what_they_do():
    def calls(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert calls(Client) == calls(AsyncClient) >= {"chat", "chat_stream", "sample", "wait", "events", "health"}
    with Client("http://host") as client:
        for name in calls(Client) - {"url"}:
            assert inspect.getdoc(getattr(client, name)), name
        assert "timeout" in inspect.signature(client.wait).parameters


def test_the_client_needs_no_torch():
    code = "import sys, groupwise; groupwise.Client('http://host').close(); groupwise.AsyncClient('http://host')\n"
    heavy = "{'torch', 'transformers', 'peft', 'numpy', 'fastapi'} & set(sys.modules)"
    ran = subprocess.run([sys.executable, "-c", f"{code}assert not {heavy}, {heavy}"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


# ---- bodies ----


def test_events_come_whole_however_their_bytes_are_cut():
    stream = ": ping\n\nid: 1\ndata: a\ndata: ü\r\n\r\nevent: x\nid: 22\ndata:b\n\n\ndata: unfinished".encode()
    whole = list(EventReader().push(stream))
    assert whole == ["a\nü", "b"]
    for size in (1, 2, 3, 7):
        reader = EventReader()
        pieces = [stream[i : i + size] for i in range(0, len(stream), size)]
        assert [event for piece in pieces for event in reader.push(piece)] == whole
        assert reader.last_id == "22"


def test_bodies_are_strict_json():
    assert encode({"text": "ü", "reward": 1e-5}) == '{"text": "ü", "reward": 1e-05}'.encode()
    for body in ({"reward": float("inf")}, {"text": "\ud800"}, {"x": object()}):
        with raises(RequestError):
            encode(body)
