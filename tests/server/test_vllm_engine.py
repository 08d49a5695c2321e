"""The live server whose completions vLLM samples: the same routes, streams, swaps and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from groupwise.config.serve import serve_config
from groupwise.errors import ConfigError
from groupwise.model.load import load_model
from groupwise.types import PolicyVersion
from processes import becomes
from vllm_peer import Peer, serving
from whole_server import Whole, whole
from wording import raises, wording

ASK = {"messages": [{"role": "user", "content": "2+2"}], "max_tokens": 6, "temperature": 0, "logprobs": True}
QUICK = {"max_loras": 3, "health_interval_s": 0.1, "recovery_timeout_s": 0.5, "sync_retries": 0}


@pytest.fixture(scope="module")
def peer(model_dir: Path) -> Iterator[Peer]:
    with serving(load_model(str(model_dir), device="cpu", dtype="float32")) as peer:
        yield peer


@pytest.fixture(scope="module")
def site(model_dir: Path, peer: Peer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    vllm = {"urls": [peer.url], **QUICK}
    with whole(tmp_path_factory.mktemp("state"), model_dir, engine="vllm", vllm=vllm) as site:
        yield site


@pytest.fixture(scope="module")
def here(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    """The same server with the local engine."""
    with whole(tmp_path_factory.mktemp("state"), model_dir) as site:
        yield site


@pytest.fixture(scope="module")
def adapter(make_base, make_adapter) -> Path:
    return make_adapter(make_base("qwen3", dtype=torch.float32, context=256), seed=4)


def chat(site: Whole, **options: Any) -> Any:
    answer = site.http.post("/v1/chat/completions", json={**ASK, "return_token_ids": True, **options})
    assert answer.status_code == 200, answer.text
    return answer.json()


def logprobs_of(choice: Any) -> list[float]:
    return [each["logprob"] for each in choice["logprobs"]["content"]]


@pytest.mark.parametrize(
    "options", [{}, {"top_logprobs": 2}, {"temperature": 0.7, "top_k": 1, "seed": 3}, {"stop": ["e"], "max_tokens": 40}]
)
def test_an_answer_is_that_of_the_local_engine(site: Whole, here: Whole, options: dict[str, Any]) -> None:
    (ours,), (local,) = chat(site, **options)["choices"], chat(here, **options)["choices"]
    assert ours["token_ids"] == local["token_ids"] and ours["message"] == local["message"]
    assert ours["finish_reason"] == local["finish_reason"]
    assert logprobs_of(ours) == pytest.approx(logprobs_of(local), abs=1e-4)
    for mine, theirs in zip(ours["logprobs"]["content"], local["logprobs"]["content"], strict=True):
        assert [each["token"] for each in mine["top_logprobs"]] == [each["token"] for each in theirs["top_logprobs"]]


def test_a_stream_comes_token_by_token(site: Whole) -> None:
    whole_text = chat(site)["choices"][0]["message"]["content"]
    with site.http.stream("POST", "/v1/chat/completions", json={**ASK, "stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    deltas = [choice["delta"].get("content") or "" for line in lines for choice in json.loads(line)["choices"]]
    assert "".join(deltas) == whole_text and sum(map(bool, deltas)) > 1


def test_a_swap_changes_what_answers_and_sums_are_served(site: Whole, here: Whole, adapter: Path, peer: Peer) -> None:
    for each in (site, here):
        each.http.portal.call(each.server.policies.swap, each.publish(adapter, "math"))
    try:
        for options in ({}, {"model": "base"}, {"adapters": [{"name": "math@1", "scale": 0.5}]}):
            (ours,), (local,) = (chat(each, **options)["choices"] for each in (site, here))
            assert ours["token_ids"] == local["token_ids"]
            assert logprobs_of(ours) == pytest.approx(logprobs_of(local), abs=1e-4)
    finally:
        for each in (site, here):
            each.http.portal.call(each.server.policies.swap, PolicyVersion.base())
    assert any(name.startswith("math-v1-") for name in peer.ever)


def test_groups_for_training_come_with_their_logprobs(site: Whole, here: Whole) -> None:
    asked = {"n": 4, "max_tokens": 6, "seed": 1, "return_token_ids": True, "logprobs": True}
    answer = site.http.post("/v1/completions/batch", json={"prompts": [ASK["messages"]], **asked})
    assert answer.status_code == 200, answer.text
    for each in answer.json()["completions"]:
        score = here.server.engine.score
        scored = score(each["prompt_token_ids"], each["token_ids"], PolicyVersion.base())
        assert each["logprobs"] == pytest.approx(scored, abs=1e-4)


def test_a_server_that_is_away_is_said_and_waited_for(site: Whole, peer: Peer, adapter: Path) -> None:
    assert site.http.get("/ready").status_code == 200
    peer.die()
    try:
        assert becomes(lambda: site.http.get("/ready").status_code == 503)
        assert f"vLLM at {peer.url}" in site.http.get("/ready").json()["error"]["message"]
        checks = {check["name"]: check for check in site.http.get("/v1/health").json()["checks"]}
        assert not checks["model_loaded"]["pass"]
        answer = site.http.post("/v1/chat/completions", json=ASK)
        assert answer.status_code == 502 and answer.json()["error"]["code"] == "engine_failed"
        version = site.publish(adapter, "late")
        refused = site.http.post("/v1/adapters/late/activate", json={"version": version.number})
        assert refused.status_code == 503
        wording(refused.json()["error"])
    finally:
        peer.start()
    assert becomes(lambda: site.http.get("/ready").status_code == 200)
    assert chat(site)["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"vllm": {"max_loras": 5}}, "vllm"),
        ({"engine": "vllm", "vllm": {"mode": "colocate"}}, "vllm.mode"),
        ({"engine": "vllm", "vllm": {"sleep": True}}, "vllm.sleep"),
        ({"engine": "vllm", "draft_tokens": 4}, "draft_tokens"),
        ({"engine": "vlm"}, "engine"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(settings: dict[str, Any], field: str) -> None:
    with raises(ConfigError, field=field):
        serve_config(settings, environ={})
