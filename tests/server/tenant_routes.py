"""What one tenant's key tries on every route, with another's things, and what it gets: a row for each route of the app.

SAME      it names another's thing: the answer is that for a thing that does not exist, to the letter
OWN       it lists or makes what is its own: the answer is what it was before the other had anything
OWNERS    403: the owner's alone
NOTHING   nothing that belongs to anybody is named or told
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fastapi import FastAPI

Kind = Literal["same", "own", "owners", "nothing"]


@dataclass(frozen=True)
class Row:
    """A route and what is sent to it. In path and body THING stands for another's thing of the kind `thing`, MINE for a
    session of the sender's own, MODEL for the served model."""

    route: str  # "GET /v1/adapters/{name}"
    kind: Kind
    thing: str = ""
    path: str = ""
    body: Any = None
    status: int = 404

    @property
    def method(self) -> str:
        return self.route.partition(" ")[0]

    @property
    def asked(self) -> str:
        return self.path or self.route.partition(" ")[2]


MESSAGES = [{"role": "user", "content": "What is 2+2?"}]
GROUP = {"messages": MESSAGES, "completions": [{"text": "4", "reward": 1}, {"text": "5", "reward": 0}]}
RATED = {"completions": [{"rollout_id": "THING", "reward": 1}, {"text": "5", "reward": 0}], "messages": MESSAGES}
TOKENS = {"type": "encoded_text", "tokens": [1, 2, 3]}
TRL = (
    *("/generate/", "/chat/", "/set_lora_adapter/", "/clear_lora_adapter/", "/v1/load_lora_adapter"),
    *("/v1/unload_lora_adapter", "/reset_prefix_cache/", "/reset_prefix_cache", "/init_communicator/"),
    *("/update_named_param/", "/batch_update_named_params/", "/http_update_weights/", "/close_communicator/"),
)
RUN = "/api/v1/training_runs/{run}"
NAMED = f"{RUN}/checkpoints/{{kind}}/{{name}}"
A_CHECKPOINT = "/api/v1/training_runs/THING/checkpoints/sampler_weights/kept"

ROWS = [
    Row("GET /health", "nothing", status=200),
    Row("GET /ready", "nothing", status=200),
    Row("GET /openapi.json", "nothing", status=200),
    Row("GET /metrics", "owners", status=403),
    Row("GET /v1/health", "own", status=200),
    Row("GET /v1/config", "own", status=200),
    Row("GET /v1/stats/decode", "own", status=200),
    Row("GET /v1/stats/recent-requests", "own", status=200),
    Row("GET /v1/usage", "own", status=200),
    Row("GET /v1/audit", "own", status=200),
    Row("GET /v1/tenants", "owners", status=403),
    Row("GET /v1/metrics/definitions", "nothing", status=200),
    Row("GET /v1/events", "own", status=200),
    Row("GET /v1/models", "own", status=200),
    Row("GET /v1/models/{model:path}", "same", "adapter", "/v1/models/THING"),
    # sampling
    Row("POST /v1/chat/completions", "same", "adapter", body={"model": "THING", "messages": MESSAGES}),
    Row("POST /v1/completions", "same", "version", body={"model": "THING", "prompt": "2"}),
    Row("POST /v1/completions/batch", "same", "adapter", body={"adapter": "THING", "prompts": [MESSAGES], "n": 2}),
    Row("POST /v1/messages", "same", "adapter", body={"model": "THING", "messages": MESSAGES, "max_tokens": 2}),
    Row("POST /v1/messages/count_tokens", "nothing", body={"model": "x", "messages": MESSAGES}, status=200),
    Row("POST /v1/responses", "same", "response", body={"previous_response_id": "THING", "input": "?"}, status=400),
    Row("GET /v1/responses/{response_id}", "same", "response", "/v1/responses/THING"),
    Row("DELETE /v1/responses/{response_id}", "same", "response", "/v1/responses/THING"),
    # what was sampled, and what is said of it
    Row("GET /v1/rollouts", "same", "rollout", "/v1/rollouts?like=THING"),
    Row("GET /v1/rollouts", "same", "job", "/v1/rollouts?job=THING"),
    Row("GET /v1/rollouts", "own", status=200),
    Row("GET /v1/rollouts/facets", "own", status=200),
    Row("GET /v1/rollouts/{id}", "same", "rollout", "/v1/rollouts/THING"),
    Row("GET /v1/rollouts/{id}", "same", "job", "/v1/rollouts/THING.0.0"),
    Row("GET /v1/images/{digest}", "same", "digest", "/v1/images/THING"),
    Row("POST /v1/feedback", "same", "rollout", body={"rollout_id": "THING", "score": 1}),
    Row("GET /v1/feedback", "own", path="/v1/feedback", status=200),
    # learning
    Row("GET /v1/learn", "own", status=200),
    Row("GET /v1/learn/transitions", "own", status=200),
    *(
        Row(f"POST /v1/learn/{act}", "owners", status=403)
        for act in ("pause", "resume", "promote", "reject", "raters/trust")
    ),
    # training
    Row("POST /v1/train/grpo", "same", "rollout", body={"groups": [RATED]}, status=400),
    Row(
        "POST /v1/train/grpo",
        "same",
        "version",
        body={"groups": [GROUP], "config": {"base_adapter": "THING"}},
        status=400,
    ),
    Row(
        "POST /v1/train/sft",
        "same",
        "adapter",
        body={
            "examples": [{"messages": [*MESSAGES, {"role": "assistant", "content": "4"}]}],
            "config": {"base_adapter": "THING"},
        },
        status=400,
    ),
    Row("GET /v1/train/status", "own", status=200),
    Row("GET /v1/train/status", "same", "job", "/v1/train/status?before=THING"),
    Row("GET /v1/train/status/{job_id}", "same", "job", "/v1/train/status/THING"),
    Row("GET /v1/train/queue", "own", status=200),
    Row("GET /v1/train/metrics/{job_id}", "same", "job", "/v1/train/metrics/THING"),
    Row("GET /v1/train/events/{job_id}", "same", "job", "/v1/train/events/THING"),
    Row("GET /v1/train/health/{job_id}", "same", "job", "/v1/train/health/THING"),
    Row("DELETE /v1/train/queue/{job_id}", "same", "job", "/v1/train/queue/THING"),
    Row("POST /v1/train/cancel/{job_id}", "same", "job", "/v1/train/cancel/THING"),
    # adapters
    Row("GET /v1/adapters", "own", status=200),
    Row("GET /v1/adapters/{name}", "same", "adapter", "/v1/adapters/THING"),
    Row("PUT /v1/adapters/{name}/notes", "same", "adapter", "/v1/adapters/THING/notes", {"note": "mine"}),
    Row("POST /v1/adapters/load", "same", "adapter", body={"name": "THING"}),
    Row("POST /v1/adapters/unload", "own", status=200),
    Row("POST /v1/adapters/rollback", "own", status=200),
    Row("POST /v1/adapters/{name}/activate", "same", "version", "/v1/adapters/THING/activate"),
    Row("DELETE /v1/adapters/{name}", "same", "adapter", "/v1/adapters/THING"),
    Row("POST /v1/adapters/upload", "own", body="upload", status=415),
    Row("GET /v1/adapters/{name}/download", "same", "version", "/v1/adapters/THING/download"),
    Row(
        "POST /v1/adapters/merge",
        "same",
        "adapter",
        body={"output_name": "x", "sources": [{"name": "THING", "weight": 1}, {"name": "THING", "weight": 1}]},
    ),
    # TRL's routes, and OpenAI's where Tinker has them
    Row("GET /health/", "nothing", status=200),
    Row("GET /get_world_size/", "owners", status=403),
    *(Row(f"POST {path}", "owners", status=403) for path in TRL),
    Row("GET /oai/api/v1/models", "own", status=200),
    Row(
        "POST /oai/api/v1/chat/completions",
        "same",
        "checkpoint",
        "/oai/api/v1/chat/completions",
        {"model": "tinker://THING/sampler_weights/kept", "messages": MESSAGES},
    ),
    Row("POST /oai/api/v1/completions", "same", "adapter", body={"model": "THING", "prompt": "2"}),
    # Tinker
    Row("GET /api/v1/healthz", "nothing", status=200),
    *(
        Row(f"POST /api/v1/{each}", "nothing", body={}, status=200)
        for each in ("client/config", "client/dynamic_config", "telemetry")
    ),
    Row("GET /api/v1/get_server_capabilities", "nothing", status=200),
    Row("POST /api/v1/create_session", "nothing", body={"tags": [], "sdk_version": "0.38.0"}, status=200),
    Row("GET /api/v1/sessions", "own", status=200),
    Row("POST /api/v1/session_heartbeat", "same", "session", body={"session_id": "THING"}, status=410),
    Row("POST /api/v1/sessions/{session}/finish", "same", "session", "/api/v1/sessions/THING/finish", {}),
    Row("GET /api/v1/sessions/{session}", "same", "session", "/api/v1/sessions/THING"),
    Row(
        "POST /api/v1/create_model",
        "same",
        "session",
        body={"session_id": "THING", "model_seq_id": 0, "base_model": "MODEL", "lora_config": {"rank": 4}},
    ),
    Row(
        "POST /api/v1/load_weights",
        "same",
        "checkpoint",
        body={"path": "tinker://THING/weights/kept", "optimizer": True, "session_id": "MINE", "model_seq_id": 7},
    ),
    Row("POST /api/v1/get_info", "same", "model", body={"model_id": "THING"}),
    Row(
        "POST /api/v1/forward_backward",
        "same",
        "model",
        body={"model_id": "THING", "seq_id": 1, "forward_backward_input": {"data": [], "loss_fn": "cross_entropy"}},
    ),
    Row(
        "POST /api/v1/forward",
        "same",
        "model",
        body={"model_id": "THING", "seq_id": 1, "forward_input": {"data": [], "loss_fn": "cross_entropy"}},
    ),
    Row(
        "POST /api/v1/optim_step",
        "same",
        "model",
        body={"model_id": "THING", "seq_id": 1, "adam_params": {"learning_rate": 1}},
    ),
    Row("POST /api/v1/save_weights", "same", "model", body={"model_id": "THING", "seq_id": 1}),
    Row("POST /api/v1/save_weights_for_sampler", "same", "model", body={"model_id": "THING", "seq_id": 1, "path": "x"}),
    Row("POST /api/v1/save_weights_external", "same", "model", body={"model_id": "THING", "seq_id": 1, "path": "x"}),
    Row(
        "POST /api/v1/create_sampling_session",
        "same",
        "checkpoint",
        body={"session_id": "MINE", "sampling_session_seq_id": 9, "model_path": "tinker://THING/sampler_weights/kept"},
    ),
    Row("GET /api/v1/samplers/{sampler}", "same", "sampler", "/api/v1/samplers/THING"),
    Row(
        "POST /api/v1/asample",
        "same",
        "sampler",
        body={
            "sampling_session_id": "THING",
            "seq_id": 1,
            "num_samples": 1,
            "prompt": {"chunks": [TOKENS]},
            "sampling_params": {"max_tokens": 2},
        },
    ),
    Row("POST /api/v1/cancel_future", "same", "future", body={"request_id": "THING"}, status=200),
    Row("POST /api/v1/retrieve_future", "same", "future", body={"request_id": "THING"}, status=410),
    Row("POST /api/v1/weights_info", "same", "checkpoint", body={"tinker_path": "tinker://THING/sampler_weights/kept"}),
    Row("GET /api/v1/checkpoints", "own", status=200),
    Row("GET /api/v1/training_runs", "own", status=200),
    Row(f"GET {RUN}", "same", "checkpoint", "/api/v1/training_runs/THING"),
    Row(f"GET {RUN}/checkpoints", "same", "checkpoint", "/api/v1/training_runs/THING/checkpoints", status=200),
    Row(f"DELETE {NAMED}", "same", "checkpoint", A_CHECKPOINT),
    Row(f"PUT {NAMED}/ttl", "same", "checkpoint", f"{A_CHECKPOINT}/ttl", {"ttl_seconds": 1}),
    Row(f"POST {NAMED}/publish", "same", "checkpoint", f"{A_CHECKPOINT}/publish", {}),
    Row(f"DELETE {NAMED}/publish", "same", "checkpoint", f"{A_CHECKPOINT}/publish"),
    Row(f"GET {NAMED}/external_weights_urls", "same", "checkpoint", f"{A_CHECKPOINT}/external_weights_urls"),
    Row(f"GET {NAMED}/archive", "same", "checkpoint", f"{A_CHECKPOINT}/archive"),
    Row("GET /api/v1/links/{token}/{name}", "same", "digest", "/api/v1/links/THING/adapter.tar.gz"),
    Row("GET /api/v1/billing/usage/checkpoints/current", "own", status=200),
]


def routes_of(app: FastAPI) -> set[str]:
    """Every method and path of an application."""
    found: set[str] = set()
    for route in app.routes:
        effective = getattr(route, "effective_route_contexts", None)
        for each in [route] if effective is None else effective():
            methods = set(each.methods or ()) - {"HEAD"}
            found |= {f"{method} {each.path}" for method in methods}
    return found
