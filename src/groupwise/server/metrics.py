"""The server's Prometheus metrics, decoding speed, and list of recent requests.

    record = recorder.request_started("/v1/chat/completions", model="math@3", prompt="What is ...")
    recorder.tokens(record)                       once for each token, or each few, as they are sent
    recorder.finished(record, finish_reason="stop", prompt_tokens=35, completion_tokens=12)

Everything is kept in memory and bounded. Labels hold route templates, statuses and version names, never a raw path or
anything that a request made up; previews of prompts and completions are in `recent` only.

Base names are vLLM's under our prefix, so that its dashboards port by replacing `vllm:` with `groupwise_`. What others
count (engine, ledger, store) is asked for when metrics are read: `watch` names the callables that know.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

WINDOW_S = 60.0
RECENT = 100
MAX_SAMPLES = 65536  # of the window; more tokens than that in a minute are thinned out from its far end
PROMPT_PREVIEW, COMPLETION_PREVIEW = 120, 200

_LATENCY = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_GAP = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_TOKENS = tuple(2.0**i for i in range(18))
_SWAP = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 120)

HELP = {  # of the gauges that others know
    "num_requests_running": "Completions being decoded.",
    "num_requests_waiting": "Completions that wait for a row.",
    "num_requests_waiting_for_adapters": "Requests that wait for room for their adapter.",
    "adapter_versions_loaded": "Adapters in the engine.",
    "adapter_active_info": "The version that answers requests which name none.",
    "canary_share": "Share of the requests that the version on trial answers; 0 without one.",
    "shadow_share": "Share of the requests that the version on trial answers once more, unseen; 0 without one.",
    "feedback_kept": "Feedback that is kept, by what became of it.",
    "learn_transitions": "What automatic training, gates and canaries did, by kind; of those that are kept.",
    "disk_free_bytes": "Free space where the state directory is.",
    "key_requests_today": "Requests that sampled, of a named key, since midnight UTC.",
    "key_prompt_tokens_today": "Prompt tokens of a named key since midnight UTC.",
    "key_completion_tokens_today": "Tokens sampled for a named key since midnight UTC.",
    "ready": "1 if /ready is 200.",
    "worker_restarts": "Starts of the training worker after its first.",
    "jobs": "Training jobs that are kept, by state.",
    "training_active": "1 while a job runs.",
    "train_step": "Steps that the running job of an adapter has made.",
    "train_progress": "Of the running job of an adapter, 0 to 1.",
    "train_metric": "Of the last step of the running job of an adapter.",
}

Sample = tuple[str, Mapping[str, str], float]  # a gauge's name without prefix, its labels, its value


@dataclass
class RequestRecord:
    """A request that is being answered. Its fields are the recorder's."""

    id: str
    request_id: str
    route: str
    model: str
    adapter: str
    prompt: str
    streamed: bool
    began: float
    wall: float
    last: float | None = None  # when its latest token came
    count: int = 0
    over: bool = False
    also: RequestRecord | None = None  # in the whole server's numbers, where this is in a tenant's


@dataclass(frozen=True)
class _Tokens:
    at: float
    count: int
    gap: float | None  # seconds since the token before, for each


class _Watched(Collector):
    """Collects gauges whose values other parts of the server provide, through `sources`."""

    def __init__(self) -> None:
        self.sources: list[Callable[[], Iterable[Sample]]] = []

    def collect(self) -> Iterable[Metric]:
        families: dict[str, GaugeMetricFamily] = {}
        for source in self.sources:
            for name, labels, value in source():
                if name not in families:
                    families[name] = GaugeMetricFamily(f"groupwise_{name}", HELP.get(name, name), labels=tuple(labels))
                families[name].add_metric(tuple(labels.values()), value)
        return families.values()


class Recorder:
    """Records a server's metrics. Call the methods in the event loop; `exposition` may run in a thread."""

    def __init__(self, *, model_name: str, version: str = ""):
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self._window: deque[_Tokens] = deque(maxlen=MAX_SAMPLES)
        self._watched = _Watched()
        self.registry.register(self._watched)
        Info("groupwise_build", "Which build this is.", registry=self.registry).info({"version": version})
        self._http = self._counter("http_requests", "Requests answered.", "handler", "method", "status")
        self._http_seconds = self._histogram("http_request_duration_seconds", "Of whole answers.", _LATENCY, "handler")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens taken in.", "model_name")
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens looked up.", "model_name")
        self._hits = self._counter("prefix_cache_hits", "Of them, those that were known already.", "model_name")
        self._generation_tokens = self._counter("generation_tokens", "Tokens sampled.", "model_name")
        self._success = self._counter("request_success", "Finished requests.", "model_name", "finished_reason")
        self._in_progress = Gauge(
            "groupwise_num_requests_in_progress", "Being answered.", ["model_name"], registry=self.registry
        )
        self._ttft = self._histogram("time_to_first_token_seconds", "From arrival.", _LATENCY, "model_name")
        self._gap = self._histogram("inter_token_latency_seconds", "Between tokens.", _TOKEN_GAP, "model_name")
        self._whole = self._histogram("e2e_request_latency_seconds", "From arrival to end.", _LATENCY, "model_name")
        self._prompt_length = self._histogram("request_prompt_tokens", "Of a request.", _TOKENS, "model_name")
        self._length = self._histogram("request_generation_tokens", "Of a request.", _TOKENS, "model_name")
        self._feedback = self._counter("feedback", "Feedback that was kept.", "kind")
        self._shadow = self._counter("shadow_requests", "Requests of a shadow, by what became of them.", "result")
        self._shadow_tokens = self._counter("shadow_tokens", "Tokens that a version sampled as a shadow.")
        self._swaps = self._counter("adapter_swaps", "Changes of the active version.", "result")
        self._swap_seconds = self._histogram("adapter_swap_seconds", "Load, verify, activate.", _SWAP)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"groupwise_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(f"groupwise_{name}", text, labels, buckets=buckets, registry=self.registry)

    # --- requests that sample ---

    def request_started(
        self,
        route: str,
        *,
        id: str = "",
        request_id: str = "",
        model: str = "",
        adapter: str = "base",
        prompt: str = "",
        streamed: bool = False,
    ) -> RequestRecord:
        """Count a request as admitted. `route` is its template, `id` its answer's, `request_id` what its answer's
        header and the log call it, `adapter` the version that answers it."""
        self._in_progress.labels(self._model_name).inc()
        preview = _preview(prompt, PROMPT_PREVIEW)
        return RequestRecord(
            id, request_id, route, model, adapter, preview, streamed, began=time.monotonic(), wall=time.time()
        )

    def tokens(self, record: RequestRecord, count: int = 1) -> None:
        """Record `count` tokens that have just been sampled."""
        if record.over or count < 1:
            return
        now, gap = time.monotonic(), None
        if record.last is None:
            self._ttft.labels(self._model_name).observe(now - record.began)
        else:
            gap = (now - record.last) / count
            self._gap.labels(self._model_name).observe(gap)
        record.last, record.count = now, record.count + count
        self._window.append(_Tokens(now, count, gap))

    def finished(
        self,
        record: RequestRecord,
        *,
        finish_reason: str,
        prompt_tokens: int = 0,
        completion_tokens: int | None = None,
        cached_tokens: int | None = None,
        completion: str = "",
    ) -> None:
        """Record the request's end: stop, length, tool_calls, or timeout, error, client_disconnect. Only the first call
        counts."""
        if record.over:
            return
        record.over, now = True, time.monotonic()
        total = record.count if completion_tokens is None else completion_tokens
        if total > record.count:  # an answer that was not streamed
            self._window.append(_Tokens(now, total - record.count, None))
        model = self._model_name
        self._in_progress.labels(model).dec()
        self._prompt_tokens.labels(model).inc(prompt_tokens)
        if cached_tokens is not None:
            self._queries.labels(model).inc(prompt_tokens)
            self._hits.labels(model).inc(cached_tokens)
        self._generation_tokens.labels(model).inc(total)
        self._success.labels(model, finish_reason).inc()
        self._whole.labels(model).observe(now - record.began)
        self._prompt_length.labels(model).observe(prompt_tokens)
        self._length.labels(model).observe(total)
        self._recent.appendleft(
            {
                "id": record.id,
                "request_id": record.request_id,
                "timestamp_unix_ms": int(1000 * record.wall),
                "route": record.route,
                "model": record.model,
                "adapter": record.adapter,
                "prompt_preview": record.prompt,
                "completion_preview": _preview(completion, COMPLETION_PREVIEW),
                "prompt_tokens": prompt_tokens,
                "completion_tokens": total,
                "duration_ms": round(1000 * (now - record.began), 3),
                "streamed": record.streamed,
                "finish_reason": finish_reason,
            }
        )

    def recent(self) -> list[dict[str, Any]]:
        """Return the latest requests that sampled, newest first."""
        return list(self._recent)

    def decode_stats(self) -> dict[str, float | int]:
        """Return the last minute: tokens a second over all requests, and the gaps between the tokens of a stream; all 0
        where `sample_count` is."""
        now = time.monotonic()
        while self._window and self._window[0].at < now - WINDOW_S:
            self._window.popleft()
        gaps = sorted(gap for tokens in self._window if (gap := tokens.gap) is not None)
        seconds = max(now - self._window[0].at, 1.0) if self._window else WINDOW_S
        return {
            "tok_per_sec": sum(tokens.count for tokens in self._window) / seconds,
            "p50_itl_ms": _quantile(gaps, 0.5),
            "p99_itl_ms": _quantile(gaps, 0.99),
            "mean_itl_ms": 1000 * sum(gaps) / len(gaps) if gaps else 0.0,
            "sample_count": len(gaps),
            "window_secs": WINDOW_S,
        }

    # --- the rest ---

    def rated(self, *, score: float | None) -> None:
        """Record stored feedback: a good score (0.5 or more), a poor one, or none."""
        self._feedback.labels("no_score" if score is None else "good" if score >= 0.5 else "poor").inc()

    def shadowed(self, result: str, *, tokens: int = 0) -> None:
        """Count that a request of a shadow was answered, failed or dropped."""
        self._shadow.labels(result).inc()
        self._shadow_tokens.inc(tokens)

    def http(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Count that a request was answered. `handler` is the route's template."""
        method = method if method in ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS") else "OTHER"
        self._http.labels(handler, method, str(status)).inc()
        self._http_seconds.labels(handler).observe(seconds)

    def swapped(self, *, ok: bool, seconds: float) -> None:
        """Count that the active version was changed, or a change was refused."""
        self._swaps.labels("ok" if ok else "refused").inc()
        self._swap_seconds.observe(seconds)

    def watch(self, source: Callable[[], Iterable[Sample]]) -> None:
        """Ask `source` for gauges whenever metrics are read. It runs in a thread and must not raise."""
        self._watched.sources.append(source)

    def exposition(self) -> bytes:
        """Return the metrics in Prometheus's text format, version 0.0.4."""
        return generate_latest(self.registry)


def _preview(text: str, length: int) -> str:
    return text if len(text) <= length else text[:length] + "…"


def _quantile(values: Sequence[float], q: float) -> float:
    """Return it in milliseconds; the nearest rank of sorted `values`, 0 where there are none."""
    return 1000 * values[max(0, math.ceil(q * len(values)) - 1)] if values else 0.0
