"""Runs the tests with the oldest or the newest libraries that pyproject.toml allows, in an environment of its own.

    python tools/floors.py oldest                     # every bound of pyproject.toml, exactly; then the quick tests
    python tools/floors.py newest                     # the newest of everything that the bounds allow
    python tools/floors.py oldest --pin transformers==5.20.0 -- tests/model
    python tools/floors.py oldest --torch-backend cpu # torch without CUDA, from PyTorch's own index

A bound that has not been tried is a guess. Those of transformers, tokenizers, safetensors and numpy were, by tests
of models, the learner and the engine; most others were not. Needs uv on the path or in this Python, and an index in
reach. An environment stays in build/floors and is used again until its pins change. Only
the libraries that a user gets are at their bounds: what runs the tests (pytest, TRL as a peer, ...) is whatever goes
with them. Exits with pytest's status.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "build" / "floors"
RESOLUTIONS = {"oldest": "lowest-direct", "newest": "highest"}
NOT_A_USERS = {"dev", "docs"}


def uv() -> list[str]:
    """Return the command of uv. Raises SystemExit where there is none."""
    if importlib.util.find_spec("uv"):
        return [sys.executable, "-m", "uv"]
    if found := shutil.which("uv"):
        return [found]
    raise SystemExit("uv is needed: pip install uv")


def pins_of(which: str, pins: list[str], backend: list[str]) -> str:
    """Return one `name==version` a line: what a user's installation has at that end of the bounds."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = [each for name in extras if name not in NOT_A_USERS for each in ("--extra", name)]
    PLACE.mkdir(parents=True, exist_ok=True)
    overrides = PLACE / f"{which}.overrides"
    overrides.write_text("\n".join(pins) + "\n")
    command = [*uv(), "pip", "compile", str(ROOT / "pyproject.toml"), "--resolution", RESOLUTIONS[which], *wanted]
    options = ["--override", str(overrides), "--no-strip-extras", "--no-header", "--no-annotate", "--quiet", *backend]
    return subprocess.run([*command, *options], check=True, text=True, stdout=subprocess.PIPE).stdout


def environment(which: str, pins: str, backend: list[str]) -> Path:
    """Return the Python of the environment with these pins, made where there is none."""
    place, made = PLACE / which, PLACE / f"{which}.pins"
    python = place / "bin" / "python"
    if python.exists() and made.exists() and made.read_text() == pins:
        return python
    made.unlink(missing_ok=True)
    subprocess.run([*uv(), "venv", "--quiet", "--clear", "--python", sys.executable, str(place)], check=True)
    wanted = PLACE / f"{which}.txt"
    wanted.write_text(pins)
    install = [*uv(), "pip", "install", "--quiet", "--python", str(python), *backend]
    subprocess.run([*install, "--override", str(wanted), "-e", f"{ROOT}[dev]"], check=True)
    made.write_text(pins)
    return python


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=sorted(RESOLUTIONS))
    parser.add_argument("--pin", action="append", default=[], metavar="NAME==VERSION", help="another version of one")
    parser.add_argument("--torch-backend", metavar="NAME", help="uv's: cpu, cu130, auto")
    parser.add_argument("tests", nargs="*", help="files and options of pytest; all quick tests by default")
    asked = parser.parse_args()
    backend = ["--torch-backend", asked.torch_backend] if asked.torch_backend else []
    pins = pins_of(asked.which, asked.pin, backend)
    print("\n".join(line for line in pins.splitlines() if line.startswith(("torch==", "transformers==", "peft=="))))
    python = environment(asked.which, pins, backend)
    tests = asked.tests or ["-q", "-n", str((os.cpu_count() or 1) + 2), "--dist", "loadgroup"]
    path = {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "VIRTUAL_ENV": str(python.parent.parent)}
    return subprocess.run(
        [str(python), "-m", "pytest", *tests], cwd=ROOT, env=os.environ | path, check=False
    ).returncode


if __name__ == "__main__":
    raise SystemExit(main())
