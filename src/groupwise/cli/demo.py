"""`groupwise demo`: train the starter model on arithmetic, then chat with the result in a browser.

    groupwise demo                     # about two minutes on two CPU cores; nothing is downloaded
    groupwise demo --steps 20          # shorter; overrides such as rollout.group_size=16 work as in `groupwise run`

The configuration is `templates/demo/arithmetic.yaml` of the package, of which `configs/arithmetic.yaml` of the
repository is a copy. The run goes into ./runs, the server's state into ./groupwise-state.
"""

from __future__ import annotations

import os
import shlex
import sys
from typing import Annotated

import typer

from groupwise.cli.frame import Debug, examples, quiet_libraries
from groupwise.cli.init import TEMPLATES
from groupwise.cli.output import say, stdout
from groupwise.errors import Interrupted
from groupwise.platform import importing

CONFIG = TEMPLATES / "demo" / "arithmetic.yaml"
HOST, PORT = "127.0.0.1", 8420


def add_to(app: typer.Typer) -> None:
    """Make the command part of `groupwise`."""
    app.command(epilog=examples("groupwise demo", "groupwise demo --steps 20 --no-serve", "groupwise demo seed=1"))(
        demo
    )


def demo(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Overrides, as in `groupwise run`.", show_default=False),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="The same as train.steps=N; default: 110.")] = None,
    serve: Annotated[
        bool | None,
        typer.Option(
            "--serve/--no-serve", help="Serve the trained model afterwards.", show_default="serve on a terminal"
        ),
    ] = None,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="Open the served model in a browser.")] = True,
    port: Annotated[int | None, typer.Option(help=f"Default: {PORT}, or a free one if that is taken.")] = None,
    debug: Debug = False,
) -> None:
    """Train the starter model on arithmetic, show its answers before and after, and chat with it in a browser."""
    from groupwise.run.importing import read_words

    given = [f"train.steps={steps}"] if steps is not None else []
    config = read_words([str(CONFIG), *(overrides or ()), *given]).runnable()
    quiet_libraries()
    from groupwise.cli.print import print_run

    with importing():
        from groupwise.run.loop import run_loop

    say(f"Training the starter (1.8M parameters) on sums for {config.train.steps} steps. Ctrl-C stops cleanly.")
    result = run_loop(config)
    print_run(stdout(), config, result, extremes=True)
    if result.interrupted:
        raise typer.Exit(Interrupted.exit_code)
    if serve is False or result.version.is_base:
        return
    if serve is None and not (sys.stdin.isatty() and sys.stderr.isatty()):  # no user can end it
        say(f"\nNot on a terminal, so no server is started. To chat with the model on http://{HOST}:{PORT}/ui/, run")
        return say(f"  groupwise serve {shlex.quote(str(result.run_dir))}")
    say("\nServing the trained model; Ctrl-C stops the server. `--no-serve` skips this.")
    words = ["serve", str(result.run_dir), "--port", str(_free_port() if port is None else port)]
    sys.stdout.flush()
    # a process without the run's memory and threads; signals and the exit code are its own
    os.execv(sys.executable, [sys.executable, "-m", "groupwise", *words, *(["--open"] if open_ else [])])


def _free_port() -> int:
    """Return the default port, or 0 (any free port) if the default is taken."""
    from groupwise.server.listen import StartError, bind

    try:
        bind(HOST, PORT).close()
    except StartError:
        return 0
    return PORT
