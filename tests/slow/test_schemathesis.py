"""Everything that the API's document allows, and much that it forbids, sent to the whole application over HTTP.

    pytest -m slow tests/slow/test_schemathesis.py     some minutes

Schemathesis makes the requests from the document and holds the answers against it. Two of its checks are off.

`allow_header_conformance` looks at one path of the document: /v1/adapters/load has GET and DELETE, too, as an adapter
may be called "load" and be meant by /v1/adapters/{name}; `Allow` says so.

`positive_data_acceptance`: JSON Schema cannot say what depends on several fields (`stream_options` needs `stream`,
`max_tokens: 0` needs `echo`, a completion has one of `text`, `rollout_id` and `token_ids`), on the tokenizer and the
context, or on what is in the store, so some of what the document allows is rightly refused.

On top of its checks are ours: `is_orderly`.
"""

from __future__ import annotations

import json
import re
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.config import SchemathesisConfig
from schemathesis.generation.hypothesis.builder import HypothesisTestConfig, HypothesisTestMode, create_test
from schemathesis.specs.openapi.checks import allow_header_conformance, positive_data_acceptance

from groupwise.model.load import load_model
from raw_http import listening
from whole_server import Whole, whole

from .marked import save_marked

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

EXAMPLES = 100  # of each operation, besides the boundary cases that schemathesis always tries
LONGEST_ECHO = 200
ENVELOPE = {"message", "type", "param", "code", "hint"}
INTERNAL = re.compile(r'Traceback|File "|site-packages|\.py\b|/tmp/|/home/|/root/|/usr/lib')
NOT_MEANT = [allow_header_conformance, positive_data_acceptance]
SETTINGS = settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
LIMITS = {
    "max_n": 3,
    "max_batch_completions": 6,
    "max_tokens_default": 8,
    "max_queued_jobs": 1 << 20,
    "max_connections": 512,
}

tried: Counter[str] = Counter()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    """The application with two adapters, one of them active, and jobs that have ended, wait, and are cancelled."""
    root = tmp_path_factory.mktemp("site")
    with whole(root / "state", Path("starter"), **LIMITS) as site:
        for name in ("math", "sql"):
            site.publish(save_marked(load_model("starter"), "a", root / name, prompts=["2 + 2"], tokens=8), name)
        yield site


@pytest.fixture(scope="module")
def schema(site: Whole) -> Iterator[Any]:
    """The document, with names of what exists as examples."""
    jobs = [_submit(site), _submit(site)]
    assert site.http.post(f"/v1/train/cancel/{jobs[0]}").status_code == 200
    document = site.http.get("/openapi.json").json()
    known = {"job_id": jobs, "name": ["math", "sql@1", "base"], "model": ["starter", "math@1"]}
    for item in document["paths"].values():
        for operation in item.values():
            for parameter in operation.get("parameters", ()):
                for value in known.get(parameter["name"], ()):
                    parameter.setdefault("examples", {})[value] = {"value": value}
    with listening(site.app, site.server.config) as port:
        config = SchemathesisConfig.from_dict(
            {"base-url": f"http://127.0.0.1:{port}", "max-stream-events": 20, "request-timeout": 3.0}
        )
        yield schemathesis.openapi.from_dict(document, config=config)
    assert site.http.get("/ready").status_code == 200


def _submit(site: Whole) -> str:
    conversation = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]
    body = {"examples": [{"messages": conversation}], "config": {"output_name": "seeded"}}
    return site.http.post("/v1/train/sft", json=body).json()["job_id"]


def test_every_operation_is_as_the_document_says(schema: Any) -> None:
    began, failures = time.monotonic(), []
    for each in schema.get_all_operations():
        operation = each.ok()
        config = HypothesisTestConfig(project=schema.config, modes=list(HypothesisTestMode), settings=SETTINGS)
        try:
            create_test(operation=operation, test_func=_is_answered_well, config=config)()
        except (Exception, BaseExceptionGroup) as failure:
            failures.append(f"{operation.label}: {''.join(traceback.format_exception(failure, limit=-1))}")
    print(f"\n{sum(tried.values())} requests to {len(tried)} operations in {time.monotonic() - began:.0f} s: {tried}")
    assert not failures, f"{len(failures)} operations\n" + "\n\n".join(each[:6000] for each in failures)
    assert len(tried) == len(list(schema.get_all_operations()))


def _is_answered_well(case: schemathesis.Case) -> None:
    tried[case.operation.label] += 1
    response = case.call(timeout=2.0 if "/events" in case.operation.path else 60.0)
    case.validate_response(response, excluded_checks=NOT_MEANT, additional_checks=[is_orderly])


def is_orderly(ctx: Any, response: Any, case: schemathesis.Case) -> None:
    """No error of the server's own, the envelope, the request id, no long echo, nothing of the inside."""
    assert response.status_code < 500, response.text[:2000]
    assert response.headers.get("x-request-id"), dict(response.headers)
    if response.status_code < 400:
        return
    assert not INTERNAL.search(response.text), response.text[:2000]
    if response.request.method == "HEAD":
        return
    error = json.loads(response.content)["error"]
    assert set(error) == ENVELOPE and error["message"] and error["code"], error
    said = [error[key] for key in ("message", "param", "hint") if error[key]]
    sent = [case.body, case.path_parameters, case.query, dict(case.headers or {}), dict(case.cookies or {})]
    for text in _texts(sent):
        for begin in range(max(0, len(text) - LONGEST_ECHO)):
            piece = text[begin : begin + LONGEST_ECHO + 1]
            assert not any(piece in each for each in said), f"{len(text)} characters are repeated: {error}"


def _texts(value: Any) -> Iterator[str]:
    """Every string in what was sent that is too long to be repeated, keys too."""
    if isinstance(value, str) and len(value) > LONGEST_ECHO:
        yield value
    elif isinstance(value, dict):
        yield from _texts([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
