"""Numbers about requests: each counted once, windows bounded, Prometheus's own parser reads what is exposed."""

import time
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from groupwise.server import metrics as module
from groupwise.server.metrics import RECENT, Recorder, Sample


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module.time, "monotonic", clock)
    return clock


@pytest.fixture
def recorder(clock: Clock) -> Recorder:
    return Recorder(model_name="tiny", version="9.9")


def samples(recorder: Recorder) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(recorder.exposition().decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def value(recorder: Recorder, name: str, **labels: str) -> float:
    return samples(recorder)[f"groupwise_{name}", tuple(sorted(labels.items()))]


def test_a_streamed_request(recorder: Recorder, clock: Clock) -> None:
    record = recorder.request_started("/v1/x", model="m", adapter="math@3", prompt="p" * 200, streamed=True)
    assert value(recorder, "num_requests_in_progress", model_name="tiny") == 1
    for wait in (0.5, 0.02, 0.04):
        clock.now += wait
        recorder.tokens(record)
    clock.now += 0.1
    recorder.finished(record, finish_reason="stop", prompt_tokens=7, completion="c" * 300)
    name = {"model_name": "tiny"}
    assert value(recorder, "num_requests_in_progress", **name) == 0
    assert value(recorder, "prompt_tokens_total", **name) == 7
    assert value(recorder, "generation_tokens_total", **name) == 3
    assert value(recorder, "request_success_total", **name, finished_reason="stop") == 1
    assert value(recorder, "time_to_first_token_seconds_sum", **name) == pytest.approx(0.5)
    assert value(recorder, "inter_token_latency_seconds_sum", **name) == pytest.approx(0.06)
    assert value(recorder, "inter_token_latency_seconds_count", **name) == 2
    assert value(recorder, "e2e_request_latency_seconds_sum", **name) == pytest.approx(0.66)
    (recent,) = recorder.recent()
    assert (recent["adapter"], recent["finish_reason"], recent["streamed"]) == ("math@3", "stop", True)
    assert recent["duration_ms"] == pytest.approx(660)
    assert recent["prompt_preview"] == "p" * 120 + "…" and recent["completion_preview"] == "c" * 200 + "…"


def test_a_request_ends_once(recorder: Recorder) -> None:
    record = recorder.request_started("/v1/x")
    recorder.finished(record, finish_reason="stop", completion_tokens=5)
    recorder.finished(record, finish_reason="error", completion_tokens=5)
    recorder.tokens(record)
    assert value(recorder, "generation_tokens_total", model_name="tiny") == 5
    assert [entry["finish_reason"] for entry in recorder.recent()] == ["stop"]


def test_decode_stats_are_of_the_last_minute(recorder: Recorder, clock: Clock) -> None:
    old = recorder.request_started("/v1/x")
    recorder.tokens(old, 1000)
    clock.now += 61
    record = recorder.request_started("/v1/x")
    for gap in (0.0, *[0.01] * 98, 0.5):
        clock.now += gap
        recorder.tokens(record)
    stats = recorder.decode_stats()
    assert (stats["sample_count"], stats["window_secs"]) == (99, 60.0)
    assert stats["p50_itl_ms"] == pytest.approx(10) and stats["p99_itl_ms"] == pytest.approx(500)
    assert stats["mean_itl_ms"] == pytest.approx(1000 * (0.98 + 0.5) / 99)
    assert stats["tok_per_sec"] == pytest.approx(100 / (0.98 + 0.5))


def test_without_tokens_there_are_no_gaps(recorder: Recorder) -> None:
    stats = recorder.decode_stats()
    assert stats.pop("window_secs") == 60 and set(stats.values()) == {0}  # numbers, as clients read them


def test_an_unstreamed_answer_counts_towards_the_speed(recorder: Recorder, clock: Clock) -> None:
    record = recorder.request_started("/v1/x")
    clock.now += 2
    recorder.finished(record, finish_reason="length", completion_tokens=50)
    clock.now += 5
    assert recorder.decode_stats()["tok_per_sec"] == pytest.approx(10)


def test_the_latest_requests_are_kept_newest_first(recorder: Recorder) -> None:
    for i in range(RECENT + 20):
        recorder.finished(recorder.request_started(f"/{i}"), finish_reason="stop")
    assert [entry["route"] for entry in recorder.recent()] == [f"/{i}" for i in range(RECENT + 19, 19, -1)]


def test_watched_gauges_are_asked_for_when_they_are_read(recorder: Recorder) -> None:
    jobs = {"queued": 1.0}

    def source() -> Iterator[Sample]:
        for state, count in jobs.items():
            yield "jobs", {"state": state}, count

    recorder.watch(source)
    assert value(recorder, "jobs", state="queued") == 1
    assert "# HELP groupwise_jobs Training jobs that are kept, by state.\n" in recorder.exposition().decode()
    jobs |= {"queued": 0.0, "running": 1.0}
    assert (value(recorder, "jobs", state="queued"), value(recorder, "jobs", state="running")) == (0, 1)


def test_odd_methods_and_swaps(recorder: Recorder) -> None:
    recorder.http("/x", "EVIL\n", 405, 0.1)
    recorder.swapped(ok=True, seconds=0.2)
    recorder.swapped(ok=False, seconds=0.2)
    assert value(recorder, "http_requests_total", handler="/x", method="OTHER", status="405") == 1
    assert value(recorder, "adapter_swaps_total", result="refused") == 1
    assert value(recorder, "build_info", version="9.9") == 1


def test_times_of_day_are_the_wall_clocks(recorder: Recorder) -> None:
    recorder.finished(recorder.request_started("/x"), finish_reason="stop")
    assert recorder.recent()[0]["timestamp_unix_ms"] == pytest.approx(1000 * time.time(), abs=60_000)
