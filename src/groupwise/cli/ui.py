"""`groupwise ui RUN [RUN ...]`: the web interface over the directories of runs, finished or going on.

    groupwise ui arithmetic                       # the newest run of that name under runs/
    groupwise ui runs/lr-*                        # several, to compare; seeds of one configuration are drawn as a
    band

No model is loaded and nothing is written; a run in progress is followed as it writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from groupwise.cli.frame import ApiKey, Debug, examples
from groupwise.cli.output import say

PORT = 8421  # the next after `groupwise serve`'s, 8420


def add_ui(app: typer.Typer) -> None:
    """Make the command part of `groupwise`."""
    app.command(
        epilog=examples("groupwise ui arithmetic", "groupwise ui runs/arithmetic-*", "groupwise ui a b --port 0")
    )(ui)


def ui(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Directories of runs, or their names under runs/.")
    ],
    host: Annotated[str | None, typer.Option(help="Where to listen; other than loopback needs an API key.")] = None,
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = PORT,
    api_key: ApiKey = None,
    debug: Debug = False,
) -> None:
    """Look at runs in a browser: curves, seeds as bands, configurations, completions token by token, findings."""
    from groupwise.config.serve import serve_config
    from groupwise.server.run_app import serve_runs
    from groupwise.server.run_files import open_runs, with_stages

    given = {"host": host, "port": port, "api_key": api_key}
    config = serve_config({key: value for key, value in given.items() if value is not None})
    serve_runs(with_stages(open_runs([_directory(text) for text in runs])), config, announce=say)


def _directory(text: str) -> Path:
    """Return what is a directory is meant; otherwise a name under runs/."""
    from groupwise.store.locate import find_run

    return Path(text) if Path(text).is_dir() else find_run(text)
