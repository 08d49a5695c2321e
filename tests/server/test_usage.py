"""What named keys used, and their bounds: counted, kept, refused; over a real server too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest

from groupwise.errors import StorageError
from groupwise.server import admin, chat, rollouts, usage
from groupwise.server.metrics import Recorder
from groupwise.server.usage import DAYS, KeyUsage, QuotaError, RateLimitError
from groupwise.store.keys import Key, KeyFile
from processes import becomes
from serving import served
from wording import raises

CHAT = {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "max_tokens": 4, "ignore_eos": True}


def key(name: str = "app", *, a_minute: int | None = None, a_day: int | None = None) -> Key:
    return Key(name=name, role="sample", digest="", made="", requests_per_minute=a_minute, tokens_per_day=a_day)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """`clock(s)`: so many seconds pass."""
    now = [1000.0]
    monkeypatch.setattr(usage.time, "monotonic", lambda: now[0])

    def passes(seconds: float) -> None:
        now[0] += seconds

    return passes


@pytest.fixture
def book(tmp_path: Path) -> KeyUsage:
    return KeyUsage(tmp_path / "usage.json")


def test_a_minute_s_requests_and_then_one_each_share_of_it(clock: Callable[[float], None], book: KeyUsage) -> None:
    app = key(a_minute=6)
    for _ in range(6):
        book.check_rate(app)
    with raises(RateLimitError, code="rate_limited") as refused:
        book.check_rate(app)
    assert refused.value.retry_after == pytest.approx(10)
    clock(10)
    book.check_rate(app)
    with raises(RateLimitError):
        book.check_rate(app)
    clock(3600)  # what was not used is not saved up
    for _ in range(6):
        book.check_rate(app)
    with raises(RateLimitError):
        book.check_rate(app)
    book.check_rate(key("other", a_minute=1))
    for _ in range(1000):
        book.check_rate(key("unbounded"))


def test_a_day_s_tokens_are_of_prompts_and_completions(book: KeyUsage, monkeypatch: pytest.MonkeyPatch) -> None:
    app = key(a_day=100)
    book.sampled(app, 60, 39)
    book.check_tokens(app)
    book.sampled(app, 0, 1)
    with raises(QuotaError, code="quota_exceeded") as refused:
        book.check_tokens(app)
    assert 0 < refused.value.retry_after <= 86400
    book.check_tokens(key("other", a_day=100))
    book.check_tokens(key("app"))
    monkeypatch.setattr(usage, "_day", lambda: "2100-01-01")
    book.check_tokens(app)


def test_counts_outlive_the_server(tmp_path: Path) -> None:
    first = KeyUsage(tmp_path / "usage.json")
    first.sampled(key(), 3, 5)
    first.save()
    second = KeyUsage(tmp_path / "usage.json")
    second.sampled(key(), 10, 20)
    (day,) = second.days().values()
    assert day["app"].model_dump() == {"requests": 2, "prompt_tokens": 13, "completion_tokens": 25}
    recorder = Recorder(model_name="tiny")
    recorder.watch(second.samples)
    told = recorder.exposition().decode()
    for line in ("requests_today", 2), ("prompt_tokens_today", 13), ("completion_tokens_today", 25):
        assert f'groupwise_key_{line[0]}{{key="app"}} {line[1]}.0' in told


def test_what_a_slow_thread_has_does_not_replace_newer_counts(
    tmp_path: Path, clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counts of a few seconds ago are on their way to the disk when the server ends, and come there last."""
    book, late = KeyUsage(tmp_path / "usage.json"), list[Callable[[], None]]()

    class Late:
        def __init__(self, *, target: Callable[..., None], args: tuple[object, ...], name: str):
            late.append(lambda: target(*args))

        def start(self) -> None:
            pass

    monkeypatch.setattr(usage.threading, "Thread", Late)
    clock(usage.SAVE_S + 1)
    book.sampled(key(), 1, 1)
    book.sampled(key(), 10, 20)
    book.save()
    (write,) = late
    write()
    (day,) = KeyUsage(tmp_path / "usage.json").days().values()
    assert day["app"].tokens == 32


def test_old_days_go(book: KeyUsage, monkeypatch: pytest.MonkeyPatch) -> None:
    for day in range(40):
        monkeypatch.setattr(usage, "_day", lambda day=day: f"2026-{1 + day // 28:02}-{1 + day % 28:02}")
        book.sampled(key(), 1, 1)
    assert len(book.days()) == DAYS and list(book.days())[-1] == "2026-02-12"


@pytest.mark.parametrize("text", ["", "[]", '{"2026-01-01": {"a": {"requests": "x"}}}'])
def test_a_damaged_file_is_said_and_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "usage.json").write_text(text)
    with raises(StorageError, code="storage_failed"):
        KeyUsage(tmp_path / "usage.json")
    assert (tmp_path / "usage.json").read_text() == text


def test_no_request_fails_for_a_disk_that_takes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    book = KeyUsage(tmp_path / "gone" / "usage.json")
    book.sampled(key(), 1, 1)
    book.save()
    assert len(caplog.records) == 1 and book.days()


def test_over_a_server(tmp_path: Path) -> None:
    """What a key asks is counted with its tokens, until its bound; the owner is not counted."""
    keys = KeyFile(tmp_path)
    app = {"authorization": f"Bearer {keys.add('app', role='train', tokens_per_day=60)}"}
    slow = {"authorization": f"Bearer {keys.add('slow', role='read', requests_per_minute=1)}"}
    owner = {"authorization": "Bearer the-owner"}
    routers = (chat.router, rollouts.router, usage.router, admin.router)
    with (
        served(tmp_path, routers, api_key="the-owner") as site,
        httpx2.Client(base_url=site.url, timeout=120) as http,
    ):
        one = http.post("/v1/chat/completions", json=CHAT, headers=app).json()["usage"]
        lines = [line for line in _stream(http, app) if line.startswith("data: {")]
        streamed = json.loads(lines[-1][6:])["usage"]
        assert http.post("/v1/chat/completions", json=CHAT, headers=owner).status_code == 200
        (day,) = http.get("/v1/usage", headers=owner).json()["days"].values()
        assert day == {
            "app": {
                "requests": 2,
                "prompt_tokens": one["prompt_tokens"] + streamed["prompt_tokens"],
                "completion_tokens": one["completion_tokens"] + streamed["completion_tokens"],
            }
        }
        batch = {"prompts": [CHAT["messages"]], "n": 16, "max_tokens": 4, "ignore_eos": True}
        assert http.post("/v1/completions/batch", json=batch, headers=app).status_code == 200
        refused = http.post("/v1/chat/completions", json=CHAT, headers=app)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")
        assert int(refused.headers["retry-after"]) > 0
        assert [http.get("/v1/config", headers=slow).status_code for _ in range(2)] == [200, 429]


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_broken_off_is_charged(tmp_path: Path, stream: bool) -> None:
    """A key cannot get around its bound by asking for more than the deadline allows."""
    app = {"authorization": f"Bearer {KeyFile(tmp_path).add('app', role='train', tokens_per_day=1000)}"}
    with (
        served(tmp_path, [chat.router, usage.router], api_key="the-owner", request_timeout_s=0.3) as site,
        httpx2.Client(base_url=site.url, timeout=120) as http,
    ):
        body = {**CHAT, "max_tokens": 900, "n": 4, "stream": stream}
        answer = http.post("/v1/chat/completions", json=body, headers=app)
        assert answer.status_code == (200 if stream else 504) and "deadline_exceeded" in answer.text

        def used() -> dict[str, dict[str, int]]:
            days = http.get("/v1/usage", headers={"authorization": "Bearer the-owner"}).json()["days"]
            return next(iter(days.values()), {})

        assert becomes(lambda: "app" in used())  # once the answer has ended
        day = used()
        assert day["app"]["requests"] == 1 and 4 <= day["app"]["completion_tokens"] <= 3600
        assert site.server.recorder.recent()[0]["completion_tokens"] == day["app"]["completion_tokens"]


def _stream(http: httpx2.Client, headers: dict[str, str]) -> list[str]:
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    return http.post("/v1/chat/completions", json=body, headers=headers).text.splitlines()
