"""The engine's section: what goes together, and what does nothing and is therefore refused."""

from __future__ import annotations

from typing import Any

import pytest

from groupwise.config.engine import OF_SERVERS, VllmConfig
from groupwise.config.run import dump_resolved, parse_config
from groupwise.errors import ConfigError

RUN: dict[str, Any] = {"data": {"source": "p.jsonl"}, "rewards": ["m:f"]}


def parse(**keys: Any):
    return parse_config(RUN | keys)


def test_the_default_is_the_local_engine_and_vllm_has_its_defaults():
    assert parse().engine == "local"
    vllm = parse(engine="vllm").vllm
    assert vllm == VllmConfig() and (vllm.mode, vllm.urls, vllm.gpu_memory_utilization) == ("server", (), None)
    assert "engine: vllm" in dump_resolved(parse(engine="vllm", vllm={"urls": ["http://a:1"]}))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"vllm": {"port": 8000}}, "vllm: .*does nothing with engine local"),
        ({"engine": "sglang"}, "engine"),
        ({"engine": "vllm", "rollout": {"draft_tokens": 4}}, r"rollout\.draft_tokens: .*is the local engine's"),
        ({"engine": "vllm", "rollout": {"prefix_cache_mb": 0}}, r"rollout\.prefix_cache_mb"),
        ({"engine": "vllm", "rollout": {"top_k": 50}}, r"rollout\.top_k: .*Set it to 0 \(off\)"),
        ({"engine": "vllm", "vllm": {"sleep": True}}, r"vllm\.sleep: .*mode colocate only"),
        ({"engine": "vllm", "vllm": {"max_loras": 2}}, r"vllm\.max_loras"),
        ({"engine": "vllm", "vllm": {"url": "http://a:1"}}, r"vllm\.url: .*did you mean vllm\.urls"),
    ],
)
def test_what_does_not_go_together(keys: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        parse(**keys)


def test_what_belongs_to_servers_is_refused_with_colocate():
    given = {"urls": ["http://a:1"], "arguments": ["--x"], "environment": {"A": "b"}, "port": 1, "host": "0.0.0.0"}
    for key in OF_SERVERS:
        with pytest.raises(ConfigError, match=rf"vllm\.{key}: .*in this process"):
            parse(engine="vllm", vllm={"mode": "colocate", key: given.get(key, "x")})
    assert parse(engine="vllm", vllm={"mode": "colocate", "sleep": True}).vllm.sleep
