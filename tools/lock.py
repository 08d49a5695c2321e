"""Writes the hashes of deploy/requirements.lock: `python tools/lock.py`, with uv on the path and an index in reach.

The versions are those that the file has; change one there, and run this again. The Dockerfile installs nothing whose
file has another hash. torch and what it brings are not in it: they come from the index of the device.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

LOCK = Path(__file__).parents[1] / "deploy" / "requirements.lock"
PYTHON = "3.11"


def main() -> None:
    lines = LOCK.read_text().splitlines()
    head = [line for line in lines if line.startswith("#")]
    pins = [line.split()[0] for line in lines if "==" in line and not line.startswith("#")]
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder) / "pins.in"
        wanted.write_text("\n".join(pins) + "\n")
        options = ["--no-deps", "--generate-hashes", "--no-header", "--no-annotate", "--python-version", PYTHON]
        command = ["uv", "pip", "compile", str(wanted), *options]
        done = subprocess.run(command, cwd=folder, check=True, text=True, stdout=subprocess.PIPE)
    LOCK.write_text("\n".join([*head, done.stdout.strip()]) + "\n")


if __name__ == "__main__":
    main()
