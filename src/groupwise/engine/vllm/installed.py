"""Finds vLLM before anything is loaded for it: the interpreter that starts it, and whether that one has it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from groupwise.config.engine import VllmConfig
from groupwise.config.run import RunConfig
from groupwise.config.serve import ServeConfig
from groupwise.errors import ConfigError

if TYPE_CHECKING:
    import torch

_LOOK = "import sys; from importlib.util import find_spec; sys.exit(find_spec('vllm') is None)"
_LOOK_S = 60.0


def check_installed(config: RunConfig | ServeConfig) -> None:
    """Raise ConfigError where a run or a server would start vLLM, or have it in its process, and it is not installed
    there."""
    if config.engine != "vllm" or config.vllm.urls:
        return
    if config.vllm.mode == "colocate":
        there, where = find_spec("vllm") is not None, sys.executable
    else:
        where = interpreter(config.vllm)
        there = subprocess.run([where, "-c", _LOOK], capture_output=True, timeout=_LOOK_S, check=False).returncode == 0
    if not there:
        raise ConfigError(
            f"engine is vllm, and {where} has no vLLM",
            hint="install vLLM in an environment of its own and name its interpreter, vllm.python=DIR/bin/python; or "
            "name a server that runs, vllm.urls=[http://HOST:8000]; or set engine=local",
            field="engine",
        )


def faster_with_vllm(config: RunConfig, device: torch.device) -> str | None:
    """Return a note if the local engine samples this run on a GPU, and vLLM, which is faster there, is installed and
    could sample it; else None. Groupwise does not choose the engine itself: the engines' log-probabilities differ by
    rounding, and vLLM is a separate server on the GPU."""
    on_gpu = device.type == "cuda"  # gpu-aware
    if config.engine != "local" or config.never_samples or not on_gpu or find_spec("vllm") is None:
        return None
    try:
        RunConfig.model_validate(config.model_dump() | {"engine": "vllm"})
    except ValueError:
        return None
    return "engine local samples, in this process; vLLM is installed here, and is faster on a GPU: engine=vllm"


def interpreter(config: VllmConfig) -> str:
    """Return the interpreter that starts a server. Raises ConfigError if it is none."""
    named = config.python or sys.executable
    path = Path(named).absolute()  # not resolved: a virtual environment's interpreter is a link
    if not os.access(path, os.X_OK):
        raise ConfigError(
            f"vllm.python is {named!r}, which is no interpreter",
            hint="name the one of vLLM's environment, as in .venv-vllm/bin/python",
            field="vllm.python",
        )
    return str(path)
