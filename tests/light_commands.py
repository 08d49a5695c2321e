"""`groupwise` commands in processes that have not imported torch: `python -m light_commands` has imported what all
commands need (a second), and forks for each line of JSON {"arguments", "folder", "environment", "user"} that it reads.
It answers with a line {"code", "stdout", "stderr", "torch"}; the last says whether the command imported torch."""

from __future__ import annotations

import gc
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer.main

from command_tree import build_once

PRELOADED = tuple(
    f"groupwise.{name}"
    for name in (
        *("cli.main", "cli.print", "run.config_file", "run.plan", "run.evaluate", "sdk.client"),
        *("server.runs", "server.app"),
    )
)
NOBODY = 65534


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str
    torch: bool


class LightCommands:
    """The process that forks, from its client's side."""

    def __init__(self, process: subprocess.Popen[str]):
        self._process = process

    def __call__(
        self, *arguments: object, folder: Path, environment: Mapping[str, str] | None = None, nobody: bool = False
    ) -> Ended:
        """Run `groupwise ARGUMENTS...` in `folder`; with `nobody` as a user who may write nothing, where root asks."""
        words = [str(each) for each in arguments]
        asked = {"arguments": words, "folder": str(folder), "environment": dict(environment or {}), "nobody": nobody}
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        return Ended(**json.loads(self._process.stdout.readline()))


@contextmanager
def light_commands() -> Iterator[LightCommands]:
    """Ends with the block."""
    command = [sys.executable, "-m", "light_commands"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield LightCommands(process)
        assert process.stdin is not None
        process.stdin.close()


def _main() -> None:
    import importlib

    for name in PRELOADED:
        importlib.import_module(name)
    build_once()
    typer.main.get_command(importlib.import_module("groupwise.cli.main").app)
    gc.freeze()  # or each fork would look for garbage among all of it, and copy it so
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)


def _run(asked: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, tempfile.TemporaryFile() as facts:
        if (child := os.fork()) == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            _be(asked, facts.fileno())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = []
        for file in (out, err, facts):
            file.seek(0)
            texts.append(file.read().decode())
    return {"code": code, "stdout": texts[0], "stderr": texts[1], "torch": texts[2] == "torch"}


def _be(asked: dict[str, Any], facts: int) -> None:
    """Never returns."""
    code = 70
    try:
        sys.stdin = io.StringIO()
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        os.environ.update(asked["environment"])
        os.chdir(asked["folder"])
        if asked["nobody"] and os.geteuid() == 0:
            os.seteuid(NOBODY)
        from groupwise.cli.main import main

        sys.argv = ["groupwise", *asked["arguments"]]
        try:
            main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(facts, b"torch" if "torch" in sys.modules else b"no")
        os._exit(code)


if __name__ == "__main__":
    _main()
