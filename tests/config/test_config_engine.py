"""The engine's section: what goes together, and what does nothing and is therefore refused."""

from __future__ import annotations

from typing import Any

import pytest

from groupwise.config.engine import OF_SERVERS, VllmConfig
from groupwise.config.run import dump_resolved, parse_config
from groupwise.errors import ConfigError
from wording import raises

RUN: dict[str, Any] = {"data": {"source": "p.jsonl"}, "rewards": ["m:f"]}


def parse(**keys: Any):
    return parse_config(RUN | keys)


def test_the_default_is_the_local_engine_and_vllm_has_its_defaults():
    assert parse().engine == "local"
    vllm = parse(engine="vllm").vllm
    assert vllm == VllmConfig() and (vllm.mode, vllm.urls, vllm.gpu_memory_utilization) == ("server", (), None)
    assert "engine: vllm" in dump_resolved(parse(engine="vllm", vllm={"urls": ["http://a:1"]}))


@pytest.mark.parametrize(
    ("keys", "field"),
    [
        ({"vllm": {"port": 8000}}, "vllm"),
        ({"engine": "sglang"}, "engine"),
        ({"engine": "vllm", "rollout": {"draft_tokens": 4}}, "rollout.draft_tokens"),
        ({"engine": "vllm", "rollout": {"prefix_cache_mb": 0}}, "rollout.prefix_cache_mb"),
        ({"engine": "vllm", "rollout": {"top_k": 50}}, "rollout.top_k"),
        ({"engine": "vllm", "vllm": {"sleep": True, "gpus": "1"}}, "vllm.sleep"),
        ({"engine": "vllm", "vllm": {"sleep": True}, "rollout": {"max_staleness": 1}}, "vllm.sleep"),
        ({"engine": "vllm", "vllm": {"sleep": True}, "rollout": {"stream_groups": 1}}, "vllm.sleep"),
        ({"engine": "vllm", "vllm": {"servers": 2, "urls": ["http://a:1"]}}, "vllm.servers"),
        ({"engine": "vllm", "vllm": {"servers": 0}}, "vllm.servers"),
        ({"engine": "vllm", "vllm": {"max_loras": 2}}, "vllm.max_loras"),
        ({"engine": "vllm", "vllm": {"url": "http://a:1"}}, "vllm.url"),
    ],
)
def test_what_does_not_go_together(keys: dict[str, Any], field: str):
    with raises(ConfigError, field=field):
        parse(**keys)


def test_what_belongs_to_servers_is_refused_with_colocate():
    given = {"urls": ["http://a:1"], "arguments": ["--x"], "environment": {"A": "b"}, "port": 1, "host": "0.0.0.0"}
    given |= {"servers": 2, "transfer": "file"}
    for key in OF_SERVERS:
        with raises(ConfigError, kind="conflict"):
            parse(engine="vllm", vllm={"mode": "colocate", key: given.get(key, "x")})
    assert parse(engine="vllm", vllm={"mode": "colocate", "sleep": True}).vllm.sleep
