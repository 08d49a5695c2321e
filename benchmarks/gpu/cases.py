"""A part is a list of named cases. This runs those that have no result yet, and writes each result as it comes.

A part is a module beside this one with

    cases(setting) -> {name: function}     in order; the function returns what is written: "row" or "rows" (what the
                                           table shows), and whatever else is worth keeping

FOLDER/<part>.json has what ran it ("about"), all names ("listed"), and for each case that was run a "result", or "why"
there is none with the "error" or how often it was stopped at the part's limit. Cases that have not been tried come
first, then those that were stopped or failed. A case that cannot be run for want of a package has a result which says
so.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from step_vs_trl import machine, version_of

from gpu.__main__ import GO_ON

ROOT = Path(__file__).resolve().parents[2]
STOPS = 2  # times that a case is stopped before it is left
READ = ("src/groupwise", "benchmarks", "tests/gpu", "tools", "configs")  # what results depend on
PACKAGES = ("torch", "transformers", "peft", "triton", "trl", "vllm", "bitsandbytes")

Result = dict[str, Any]
Cases = Mapping[str, Callable[[], Result]]


@dataclass(frozen=True)
class Setting:
    """`smoke`: tiny sizes. On a GPU models are in bfloat16. What failed in this `call` is not tried again in it."""

    device: str
    smoke: bool
    out: Path
    call: str = ""

    @property
    def dtype(self) -> str:
        return "float32" if self.device == "cpu" else "bfloat16"

    def of(self, size: Any, smoke: Any) -> Any:
        """The one, or the other in a smoke run."""
        return smoke if self.smoke else size

    def synchronize(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


def missing(*packages: str) -> Result | None:
    """The result of a case that needs packages of which one is not there."""
    absent = [name for name in packages if find_spec(name) is None]
    return {"row": {"note": f"{' and '.join(absent)} not installed"}} if absent else None


def run_cases(part: str, setting: Setting) -> int:
    """Run what has no result; 0 if then all have one, `GO_ON` if this process must end before that, else 1."""
    path, about = setting.out / f"{part}.json", about_this(setting)
    cases = cases_of(part, setting)
    found = json.loads(path.read_text()) if path.exists() else {}
    if same(found.get("about", {})) != same(about):
        found = {"part": part, "cases": {}}
    found |= {"about": about, "listed": list(cases)}
    for name in order_of(list(cases), found["cases"], setting.call):
        write(path, {**found, "running": name})
        before = found["cases"].get(name, {})
        found["cases"][name] = tried(name, cases[name], before, setting)
        write(path, found)
        if breaks(found["cases"][name]):
            return GO_ON
    write(path, found)
    return int(any("result" not in found["cases"].get(name, {}) for name in cases))


def cases_of(part: str, setting: Setting) -> Cases:
    """The part's; if it cannot be imported, one that says why."""
    try:
        return importlib.import_module(f"gpu.{part}").cases(setting)
    except Exception as error:
        failed = error

        def fail() -> Result:
            raise failed

        return {"import": fail}


def order_of(names: list[str], done: Mapping[str, Any], call: str) -> list[str]:
    """Those that are to be run: what was not tried, then what was stopped or failed in an earlier call."""
    open_ = [n for n in names if n in done and "result" not in done[n] and done[n].get("stops", 0) < STOPS]
    return [*(n for n in names if n not in done), *(n for n in open_ if done[n].get("call") != call)]


def tried(name: str, case: Callable[[], Result], before: Mapping[str, Any], setting: Setting) -> dict[str, Any]:
    """A case's entry."""
    print(f"   {name}", flush=True)
    started = time.monotonic()
    if setting.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    try:
        result = case()
    except (Exception, SystemExit) as error:  # whatever it is, the rest goes on
        why = f"{type(error).__name__}: {error}"
        print(f"   {name}: {why}", flush=True)
        return {
            "why": why,
            "error": traceback.format_exc(),
            "fatal": "CUDA error" in why,
            "call": setting.call,
            **kept(before),
        }
    finally:
        gc.collect()
        if setting.device != "cpu" and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    return {"result": result, "seconds": round(time.monotonic() - started, 1)}


def kept(before: Mapping[str, Any]) -> dict[str, Any]:
    return {"stops": before["stops"]} if "stops" in before else {}


def breaks(entry: Mapping[str, Any]) -> bool:
    """After an error of CUDA itself nothing else runs in this process."""
    return bool(entry.get("fatal"))


def write(path: Path, found: Mapping[str, Any]) -> None:
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(found, indent=1) + "\n")
    os.replace(temporary, path)


# -- what results depend on --------------------------------------------------------------------------------------------


def about_this(setting: Setting) -> dict[str, Any]:
    """The code, the device, the versions. Results of others are not gone on from."""
    if setting.device != "cpu" and not torch.cuda.is_available():
        sys.exit("torch sees no CUDA GPU here; --smoke --device cpu runs tiny sizes on a CPU")
    device = machine(0)["cpu"] if setting.device == "cpu" else torch.cuda.get_device_name()
    versions = {name: version for name in PACKAGES if (version := version_of(name))}
    return {
        "device": device,
        **versions,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": commit(),
        "code": fingerprint(),
        "smoke": setting.smoke,
    }


def same(about: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same for results to be gone on from: a commit may change nothing that they depend on."""
    return {name: value for name, value in about.items() if name != "commit"}


def commit() -> str | None:
    """Of the checkout; None of files without one."""
    try:
        told = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return told.stdout.strip() or None


def fingerprint() -> str:
    """Of the files that results depend on, also where they are not committed."""
    digest = hashlib.sha256()
    for folder in READ:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".yaml"):
                digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
