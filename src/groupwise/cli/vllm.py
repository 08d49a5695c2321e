"""`groupwise vllm-serve`: vLLM for a run, in a process tree of its own.

    groupwise vllm-serve my.yaml                                    # on one GPU, or here in its own terminal
    groupwise run my.yaml engine=vllm vllm.urls=[http://localhost:8000]

The server is what the run's own would be (docs/vllm.md): the model, the type and the adapters' rank are the file's.
It is started again when it dies, and it goes, with every process of vLLM's, when this command does, however it ends.
"""

from __future__ import annotations

from typing import Annotated

import typer

from groupwise.cli.frame import Debug, Set, examples
from groupwise.cli.output import say

DEFAULT_PORT = 8000  # vLLM's


def add_vllm(app: typer.Typer) -> None:
    """Make the command part of `groupwise`."""
    shown = examples("groupwise vllm-serve my_run.yaml", "groupwise vllm-serve my.yaml vllm.port=8001")
    app.command(name="vllm-serve", epilog=shown)(vllm_serve)


def vllm_serve(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="The run's YAML file.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Overrides, such as vllm.port=8001.", show_default=False),
    ] = None,
    set_: Set = None,
    debug: Debug = False,
) -> None:
    """Start vLLM for the runs of CONFIG and keep it alive; Ctrl-C ends it."""
    from groupwise.run.importing import read_words

    loaded = read_words([config, "engine=vllm", *(overrides or ()), *(set_ or ())])
    from groupwise.engine.vllm.open import read_launch
    from groupwise.engine.vllm.server import keep_up

    launch = read_launch(loaded.runnable(), port=loaded.config.vllm.port or DEFAULT_PORT)
    say(f"starting vLLM; when it is up: groupwise run {config} engine=vllm vllm.urls=[{launch.url}]")
    keep_up(launch, say=say)
