"""`groupwise init DIR`: a folder with everything that a first run of one's own needs; it learns on a starter.

    groupwise init my-task                    # a dataset and a reward
    groupwise init my-images --from images    # pictures, and questions about them
    groupwise init my-env --from tool-env     # an environment with a tool
    groupwise init my-judge --from judge      # a judge as the reward
    groupwise init my-loop --from live-loop   # a server, and a script that samples, scores and trains

The templates are folders of the package (`templates/`); what is written is a copy of one.
"""

from __future__ import annotations

import difflib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from groupwise.cli.frame import AsJson, Debug, examples
from groupwise.cli.output import print_json, print_line
from groupwise.errors import ConfigError, GroupwiseError, StorageError

TEMPLATES = Path(__file__).parent / "templates"
DATA = "my_data.py"  # of a template: writes its data

# What to type next in the folder of each template
NEXT = {
    "arithmetic": ("groupwise check my_run.yaml", "groupwise run my_run.yaml"),
    "images": ("groupwise check my_run.yaml", "groupwise run my_run.yaml"),
    "tool-env": ("groupwise check my_run.yaml", "groupwise run my_run.yaml"),
    "judge": ("python my_judge.py & groupwise check my_run.yaml", "groupwise run my_run.yaml"),
    "live-loop": ("groupwise serve", "python live_loop.py --rounds 8"),
}
NOTES = {
    "judge": "my_judge.py stands in for a judge model: it grades by a program, on this machine. It goes on in the "
    "background; `kill %1` ends it.",
    "live-loop": "The server goes on: type the last line in a second terminal, in the same folder.",
}


def add_to(app: typer.Typer) -> None:
    """Make the command part of `groupwise`."""
    app.command(epilog=examples("groupwise init my-task", "groupwise init my-env --from tool-env"))(init)


def init(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.", show_default=False)],
    template: Annotated[
        str, typer.Option("--from", metavar="TEMPLATE", help=f"One of {', '.join(NEXT)}.")
    ] = "arithmetic",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write a folder with data, a reward or an environment, and a run that learns in a minute or two."""
    if template not in NEXT:
        near = difflib.get_close_matches(template, NEXT, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"there is no template {template!r}", hint=f"{meant}there are: {', '.join(NEXT)}")
    with _new_folder(directory) as folder:
        shutil.copytree(
            TEMPLATES / template, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
        )
        if (folder / DATA).exists():
            _write_data(folder)
    written = sorted(path.name for path in directory.iterdir())
    here = directory.resolve() == Path.cwd()
    commands = (*(() if here else (f"cd {shlex.quote(str(directory))}",)), *NEXT[template])
    if as_json:
        return print_json({"directory": str(directory), "files": written, "next": list(commands)})
    print_line(f"{directory}: {', '.join(written)}")
    print_line("\nNext:")
    for command in commands:
        print_line(f"  {command}")
    if note := NOTES.get(template):
        print_line(note)


@contextmanager
def _new_folder(directory: Path) -> Iterator[Path]:
    """Yield a folder to write into, whose files are in `directory` at the end of the block; if the block raises, it is
    removed.

    Raises ConfigError if something is in `directory` already, StorageError if it cannot be written.
    """
    from groupwise.store import files

    there = directory.is_dir()
    if (there and any(directory.iterdir())) or (not there and directory.exists()):
        raise ConfigError(f"{directory} is there already, and nothing is written over", hint="name a new folder")
    try:
        with files.filling(directory.absolute()) as folder:
            yield folder
    except OSError as error:
        raise StorageError.of(error, f"cannot make {directory}: {error.strerror}") from error


def _write_data(folder: Path) -> None:
    done = subprocess.run([sys.executable, DATA], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise GroupwiseError(f"{DATA} failed: {done.stderr.strip()[-500:]}")
