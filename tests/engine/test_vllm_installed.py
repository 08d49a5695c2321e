"""Whether vLLM is there is seen before a model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from groupwise.config.run import RunConfig, parse_config
from groupwise.engine.vllm.installed import check_installed
from groupwise.errors import ConfigError


def config(engine: str = "vllm", **vllm: Any) -> RunConfig:
    data = {"data": {"source": "x.jsonl"}, "rewards": ["m:f"], "engine": engine}
    return parse_config(data | ({"vllm": vllm} if vllm else {}))


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
