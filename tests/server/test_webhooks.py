"""Webhooks: every end is told, once as a rule and at least once always, and to nobody but the operator's URL."""

import asyncio
import hashlib
import hmac
import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from groupwise.errors import ConfigError
from groupwise.server import webhooks
from groupwise.server.webhooks import Webhooks
from groupwise.store.adapters import AdapterStore
from groupwise.store.feedback import FeedbackLog
from groupwise.store.ledger import Ledger
from wording import raises

KILN_KEYS = {"job_id", "job_type", "status", "adapter_name", "adapter_path", "error", "timestamp"}


class Receiver:
    """A real HTTP server. `answers` are the statuses of its next answers, 200 after that; `hold` delays them."""

    def __init__(self, *answers: int, location: str | None = None, drip: bool = False):
        self.answers, self.location, self.drip = list(answers), location, drip
        self.requests: list[tuple[dict[str, str], bytes]] = []
        self.released = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.requests.append(({k.lower(): v for k, v in self.headers.items()}, body))
                if receiver.drip:
                    self.wfile.write(b"HTTP/1.1 200 OK\r\n")
                    while not receiver.released.wait(0.05):
                        with suppress(OSError):
                            self.wfile.write(b"x-drip: 1\r\n")
                    return
                self.send_response(receiver.answers.pop(0) if receiver.answers else 200)
                if receiver.location:
                    self.send_header("location", receiver.location)
                self.send_header("content-length", "0")
                self.end_headers()

            def do_GET(self) -> None:
                self.do_POST()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook?token=hush"

    @property
    def bodies(self) -> list[dict]:
        return [json.loads(body) for _, body in self.requests]

    def __enter__(self) -> "Receiver":
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(tmp_path / "ledger.db")
    yield ledger
    ledger.close()


def submit(ledger: Ledger, *, adapter: str = "math") -> str:
    options = {"config": {}, "summary": {}, "payload": b"{}", "steps": 2, "auto_load": False}
    return ledger.submit(kind="grpo", adapter=adapter, **options)[0].id


def fail(ledger: Ledger, message: str = "it diverged") -> str:
    id = submit(ledger)
    lease = ledger.lease("w")
    assert lease is not None
    ledger.fail(lease, {"code": "training_failed", "message": message, "hint": None})
    return id


def make(ledger: Ledger, url: str, **options) -> Webhooks:
    store = AdapterStore(ledger.path.parent / "adapters")
    defaults = {"record": ledger.path.parent / "webhooks.json", "poll_s": 0.02, "first_delay_s": 0.02}
    return Webhooks(ledger, store, url=url, **defaults | options)


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "waited 120 s in vain"
        await asyncio.sleep(0.01)


def run_until(hooks: Webhooks, condition: Callable[[], bool], *, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Run the deliveries until the condition holds (120 s at most), and stop as the server does."""

    async def main() -> None:
        task = asyncio.ensure_future(hooks.run())
        await until(lambda: hooks._settled is not None)  # what was finished before has been looked at
        meanwhile()
        await until(condition)
        await asyncio.sleep(0.1)  # what should not happen has time to
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_a_failed_job_is_told_with_its_reason(ledger: Ledger) -> None:
    with Receiver() as receiver:
        hooks = make(ledger, receiver.url)
        run_until(hooks, lambda: len(receiver.requests) == 1, meanwhile=lambda: fail(ledger) and None)
    (body,) = receiver.bodies
    assert body.keys() >= KILN_KEYS
    job = ledger.jobs()[0]
    assert (body["job_id"], body["job_type"], body["status"]) == (job.id, "grpo", "failed")
    assert (body["error"], body["error_code"]) == ("it diverged", "training_failed")
    assert (body["adapter_name"], body["adapter_path"], body["adapter_version"]) == ("math", None, None)
    assert body["timestamp"].endswith("Z") and body["timestamp"][:10] == time.strftime("%Y-%m-%d", time.gmtime())


def test_a_completed_job_is_told_with_the_path_of_its_version(ledger: Ledger, make_base, make_adapter) -> None:
    from groupwise.store.files import Provenance

    store = AdapterStore(ledger.path.parent / "adapters")
    version = store.import_(make_adapter(make_base()), "math", info=Provenance(base_model="tiny", base_hash="x"))

    def complete() -> None:
        submit(ledger)
        lease = ledger.lease("w")
        assert lease is not None
        ledger.progress(lease, phase="training", step=2, metrics={"reward/mean": 0.5, "kl": 0.25})
        ledger.published(lease, str(version))

    with Receiver() as receiver:
        run_until(make(ledger, receiver.url), lambda: len(receiver.requests) == 1, meanwhile=complete)
    (body,) = receiver.bodies
    assert (body["status"], body["error"], body["adapter_version"]) == ("completed", None, "math@1")
    assert Path(body["adapter_path"]) == store.path(version).absolute()
    assert (Path(body["adapter_path"]) / "adapter_model.safetensors").is_file()
    assert body["metrics"] == {"reward/mean": 0.5, "kl": 0.25} and (body["step"], body["steps"]) == (2, 2)


def test_the_end_of_the_only_job_is_told_though_nothing_is_submitted_after_it(ledger: Ledger) -> None:
    """A loop of submit, wait for the webhook, submit: each end is told while its job is still the newest one."""

    async def rounds() -> None:
        task = asyncio.ensure_future(hooks.run())
        for told in range(1, 4):
            submit(ledger)
            lease = ledger.lease("w")
            assert lease is not None
            await asyncio.sleep(0.1)  # several looks at the job while it runs
            ledger.fail(lease, {"code": "training_failed", "message": f"round {told}", "hint": None})
            await until(lambda told=told: len(receiver.requests) == told)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    with Receiver() as receiver:
        hooks = make(ledger, receiver.url)
        asyncio.run(rounds())
    assert [body["error"] for body in receiver.bodies] == ["round 1", "round 2", "round 3"]


def test_an_end_that_cannot_be_posted_does_not_keep_back_the_others(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug in what is told of one job costs that job's delivery, which is tried again, and no other's."""
    told = webhooks.payload

    def payload(job, *, path):
        if job.error["message"] == "first":
            raise ValueError("no such thing")
        return told(job, path=path)

    monkeypatch.setattr(webhooks, "payload", payload)
    with Receiver() as receiver:
        hooks = make(ledger, receiver.url)

        def meanwhile() -> None:
            fail(ledger, "first")
            fail(ledger, "second")

        run_until(hooks, lambda: bool(receiver.requests), meanwhile=meanwhile)
    assert [body["error"] for body in receiver.bodies] == ["second"]
    assert hooks.pending == 1 and "no such thing" in caplog.text


def test_why_a_version_was_not_made_active_is_told(ledger: Ledger) -> None:
    def complete() -> None:
        submit(ledger)
        lease = ledger.lease("w")
        assert lease is not None
        ledger.published(lease, "math@1", unhealthy="it fell apart")

    with Receiver() as receiver:
        run_until(make(ledger, receiver.url), lambda: bool(receiver.requests), meanwhile=complete)
    (body,) = receiver.bodies
    assert (body["status"], body["error"], body["unhealthy"]) == ("completed", None, "it fell apart")
    assert "groupwise adapters activate math@1" in body["warnings"][0]


def test_a_cancelled_job_is_told_too(ledger: Ledger) -> None:
    with Receiver() as receiver:
        hooks = make(ledger, receiver.url)
        run_until(hooks, lambda: bool(receiver.requests), meanwhile=lambda: ledger.cancel(submit(ledger)) and None)
    assert [body["status"] for body in receiver.bodies] == ["cancelled"]


def test_a_receiver_can_check_who_sent_it_and_when(ledger: Ledger) -> None:
    with Receiver() as receiver:
        hooks = make(ledger, receiver.url, secret="s3cret")
        run_until(hooks, lambda: bool(receiver.requests), meanwhile=lambda: fail(ledger) and None)
    headers, body = receiver.requests[0]
    timestamp = headers["x-groupwise-timestamp"]
    expected = hmac.new(b"s3cret", timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()
    assert headers["x-groupwise-signature"] == f"sha256={expected}"
    assert abs(int(timestamp) - time.time()) < 5
    assert headers["content-type"] == "application/json"
    assert "s3cret" not in str(headers)


def test_without_a_secret_there_is_no_signature(ledger: Ledger) -> None:
    with Receiver() as receiver:
        hooks = make(ledger, receiver.url)
        run_until(hooks, lambda: bool(receiver.requests), meanwhile=lambda: fail(ledger) and None)
    assert not [name for name in receiver.requests[0][0] if "signature" in name]


def test_what_was_not_taken_is_sent_again_until_it_is(ledger: Ledger) -> None:
    with Receiver(500, 404, 503) as receiver:
        hooks = make(ledger, receiver.url)
        run_until(hooks, lambda: len(receiver.requests) >= 4, meanwhile=lambda: fail(ledger) and None)
    assert len(receiver.requests) == 4  # and not once more after it was taken
    assert len({headers["x-groupwise-delivery"] for headers, _ in receiver.requests}) == 1
    assert len({body for _, body in receiver.requests}) == 1
    assert hooks.pending == 0


def test_the_pauses_grow(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[float] = []
    with Receiver(*[500] * 5) as receiver:
        hooks = make(ledger, receiver.url, first_delay_s=0.05, poll_s=0.005)
        attempt = hooks._attempt

        async def timed(*arguments: object):
            times.append(time.monotonic())
            return await attempt(*arguments)

        monkeypatch.setattr(hooks, "_attempt", timed)
        run_until(hooks, lambda: len(times) >= 5, meanwhile=lambda: fail(ledger) and None)
    pauses = [b - a for a, b in itertools.pairwise(times)]
    assert all(pause >= 0.05 * 2**k for k, pause in enumerate(pauses))


def test_a_redirect_is_not_followed(ledger: Ledger) -> None:
    with Receiver() as elsewhere, Receiver(302, 307, location=elsewhere.url) as receiver:
        hooks = make(ledger, receiver.url)
        run_until(hooks, lambda: len(receiver.requests) >= 3, meanwhile=lambda: fail(ledger) and None)
    assert elsewhere.requests == []
    assert len(receiver.requests) == 3  # twice refused as an answer, then taken


def test_an_answer_that_drips_is_cut_off(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte in time, the whole never: the limit is on the attempt, not on the next byte."""
    monkeypatch.setattr(webhooks, "ATTEMPT_S", 0.3)
    with Receiver(drip=True) as receiver:
        hooks = make(ledger, receiver.url)
        run_until(hooks, lambda: len(receiver.requests) >= 2, meanwhile=lambda: fail(ledger) and None)
    assert hooks.pending == 1


def test_a_restart_delivers_what_was_not_delivered_and_nothing_twice(ledger: Ledger) -> None:
    with Receiver() as nobody:
        url = nobody.url
    hooks = make(ledger, url)  # where nobody listens any more
    run_until(hooks, lambda: hooks.pending == 1, meanwhile=lambda: fail(ledger, "first") and None)
    fail(ledger, "second")  # while no server runs
    with Receiver() as receiver:
        run_until(make(ledger, receiver.url), lambda: len(receiver.requests) == 2)
        assert [body["error"] for body in receiver.bodies] == ["first", "second"]  # in the order of submission
        run_until(make(ledger, receiver.url), lambda: True)
        assert len(receiver.requests) == 2


def test_a_delivery_whose_record_was_lost_is_repeated(ledger: Ledger) -> None:
    """A kill between the receiver's 200 and the record: told again, never forgotten."""
    with Receiver() as receiver:
        hooks = make(ledger, receiver.url)
        run_until(hooks, lambda: True)  # the record of a first start
        before = (ledger.path.parent / "webhooks.json").read_bytes()
        run_until(hooks, lambda: bool(receiver.requests), meanwhile=lambda: fail(ledger) and None)
        (ledger.path.parent / "webhooks.json").write_bytes(before)
        run_until(make(ledger, receiver.url), lambda: len(receiver.requests) == 2)
    first, second = (headers["x-groupwise-delivery"] for headers, _ in receiver.requests)
    assert first == second


@pytest.mark.parametrize("record", [None, "torn {"])
def test_jobs_of_before_the_first_start_are_not_told(ledger: Ledger, record: str | None) -> None:
    fail(ledger, "long ago")
    if record is not None:
        (ledger.path.parent / "webhooks.json").write_text(record)
    with Receiver() as receiver:
        hooks = make(ledger, receiver.url)
        run_until(hooks, lambda: bool(receiver.requests), meanwhile=lambda: fail(ledger, "now") and None)
    assert [body["error"] for body in receiver.bodies] == ["now"]


def test_a_clock_that_is_set_gives_nothing_up(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 days ahead: the end of the job seems long ago, and has been told for less than a second."""
    now = time.time
    with Receiver(500, 500, 500) as receiver:
        hooks = make(ledger, receiver.url)

        def meanwhile() -> None:
            fail(ledger)
            monkeypatch.setattr(time, "time", lambda: now() + 40 * 24 * 3600)

        run_until(hooks, lambda: len(receiver.requests) == 4, meanwhile=meanwhile)
        assert hooks.pending == 0


def test_how_long_it_was_tried_adds_up_over_restarts(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    with Receiver(*[500] * 99) as receiver:
        hooks = make(ledger, receiver.url)
        run_until(hooks, lambda: len(receiver.requests) >= 2, meanwhile=lambda: fail(ledger) and None)
        assert hooks.pending == 1
        record = json.loads((ledger.path.parent / "webhooks.json").read_bytes())
        (id,) = record["tried_s"]
        assert 0 <= record["tried_s"][id] < 60
        record["tried_s"][id] = webhooks.KEEP_TRYING_S - 0.001
        (ledger.path.parent / "webhooks.json").write_text(json.dumps(record))
        again = make(ledger, receiver.url)
        run_until(again, lambda: again.pending == 0 and bool(again._settled))
        assert id in json.loads((ledger.path.parent / "webhooks.json").read_bytes())["settled"]


@pytest.mark.parametrize(
    "text", ['{"settled": [], "tried_s": {"a": "x"}}', '{"settled": 3, "tried_s": {}}', "[" * 9000]
)
def test_a_record_that_is_none_counts_as_lost(ledger: Ledger, text: str) -> None:
    (ledger.path.parent / "webhooks.json").write_text(text)
    fail(ledger, "long ago")
    with Receiver() as receiver:
        run_until(make(ledger, receiver.url), lambda: True)
        assert not receiver.requests


def test_it_gives_up_on_an_end_that_it_tried_for_a_day(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "KEEP_TRYING_S", 0.0)
    with Receiver(*[500] * 9) as receiver:
        hooks = make(ledger, receiver.url)
        run_until(hooks, lambda: bool(receiver.requests), meanwhile=lambda: fail(ledger) and None)
        assert (len(receiver.requests), hooks.pending) == (1, 0)
        run_until(make(ledger, receiver.url), lambda: True)
        assert len(receiver.requests) == 1


def test_a_full_disk_delays_the_record_and_stops_nothing(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    from groupwise.store import files as adapter_files

    replace, full = adapter_files.replace, threading.Event()

    def sometimes(path: Path, text: str) -> None:
        if full.is_set():
            raise OSError(28, "No space left on device")
        replace(path, text)

    monkeypatch.setattr(adapter_files, "replace", sometimes)

    def meanwhile() -> None:
        full.set()
        fail(ledger, "first")
        fail(ledger, "second")

    with Receiver() as receiver:
        run_until(make(ledger, receiver.url), lambda: len(receiver.requests) == 2, meanwhile=meanwhile)
    assert [body["error"] for body in receiver.bodies] == ["first", "second"]


def test_the_log_does_not_hold_what_the_url_keeps_secret(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    with Receiver() as nobody:
        url = nobody.url
    with caplog.at_level(logging.DEBUG, logger="groupwise"):
        hooks = make(ledger, url)
        run_until(hooks, lambda: "attempt 2" in caplog.text, meanwhile=lambda: fail(ledger) and None)
    ours = "\n".join(r.getMessage() for r in caplog.records if r.name.startswith("groupwise"))
    assert "ConnectError" in ours and "hush" not in ours


def test_polling_reads_no_job_whose_end_was_told(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        fail(ledger)
    looks, reads = [], []
    ended, job = ledger.ended, ledger.job
    monkeypatch.setattr(ledger, "ended", lambda: looks.append(1) or ended())
    monkeypatch.setattr(ledger, "job", lambda id: reads.append(id) or job(id))
    with Receiver() as receiver:
        run_until(make(ledger, receiver.url), lambda: len(looks) > 20, meanwhile=lambda: fail(ledger, "now") and None)
    assert reads == [ledger.jobs()[0].id]


@pytest.mark.parametrize("url", ["", "hooks", "/hook", "ftp://host/x", "file:///etc/passwd", "http://", "http://[::"])
def test_a_url_that_cannot_be_posted_to_is_refused(ledger: Ledger, url: str) -> None:
    with raises(ConfigError, field="webhook_url"):
        make(ledger, url)


def test_a_proxy_of_the_environment_is_not_used(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    with Receiver() as proxy, Receiver() as receiver:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        hooks = make(ledger, receiver.url)
        run_until(hooks, lambda: bool(receiver.requests), meanwhile=lambda: fail(ledger) and None)
    assert proxy.requests == []


def test_what_automatic_training_did_is_told_in_order_once_and_again_where_it_was_not_taken(ledger: Ledger) -> None:
    book = FeedbackLog(ledger)
    book.note("paused", "from before the first start")
    with Receiver(500, 200, 503) as receiver:
        hooks = make(ledger, receiver.url, secret="s")

        def notes() -> None:
            for kind in ("gate_refused", "paused"):
                book.note(kind, f"{kind}!", data={"version": "math@2"})

        run_until(hooks, lambda: book.setting(webhooks.TOLD) is not None)
        run_until(hooks, lambda: book.setting(webhooks.TOLD) == 3, meanwhile=notes)
        run_until(make(ledger, receiver.url), lambda: True)
    assert [body["event"] for body in receiver.bodies] == ["gate_refused"] * 2 + ["paused"] * 2
    (headers, _), body = receiver.requests[0], receiver.bodies[0]
    assert headers["x-groupwise-delivery"] == "transition-2" and headers["x-groupwise-signature"].startswith("sha256=")
    assert (body["seq"], body["message"], body["data"]) == (2, "gate_refused!", {"version": "math@2"})
