"""Whether vLLM is there is seen before a model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from groupwise.config.run import RunConfig, parse_config
from groupwise.engine.vllm.installed import check_installed, faster_with_vllm
from groupwise.errors import ConfigError


def config(engine: str = "vllm", **vllm: Any) -> RunConfig:
    data = {"data": {"source": "x.jsonl"}, "rewards": ["m:f"], "engine": engine}
    return parse_config(data | ({"vllm": vllm} if vllm else {}))


def rollout(**rollout: Any) -> RunConfig:
    return parse_config({"data": {"source": "x.jsonl"}, "rewards": ["m:f"], "rollout": rollout})


def python(folder: Path, status: int) -> str:
    """An interpreter that ends with this status, whatever it is asked."""
    program = folder / f"python-{status}"
    program.write_text(f"#!/bin/sh\nexit {status}\n")
    program.chmod(0o755)
    return str(program)


def test_an_interpreter_without_vllm_is_refused(tmp_path: Path) -> None:
    check_installed(config(python=python(tmp_path, 0)))
    with pytest.raises(ConfigError) as caught:
        check_installed(config(python=python(tmp_path, 1)))
    assert caught.value.field == "engine"


def test_what_is_no_interpreter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check_installed(config(python=str(tmp_path / "nothing")))
    assert caught.value.field == "vllm.python"


def test_where_none_is_started_none_need_be_there() -> None:
    check_installed(config(urls=["http://localhost:8000"]))
    check_installed(config("local"))


def test_a_run_on_a_gpu_is_told_of_a_vllm_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    assert faster_with_vllm(config("local"), gpu) is None  # none is installed in the tests' environment
    monkeypatch.setattr("groupwise.engine.vllm.installed.find_spec", lambda name: name)
    assert "engine=vllm" in (faster_with_vllm(config("local"), gpu) or "")
    assert faster_with_vllm(config("local"), torch.device("cpu")) is None
    assert faster_with_vllm(config(urls=["http://localhost:8000"]), gpu) is None
    assert faster_with_vllm(rollout(compile=True), gpu) is None  # the local engine's own
    assert faster_with_vllm(rollout(top_k=20), gpu) is None  # what vLLM cannot do
