"""`groupwise serve [MODEL|RUN]`: a model, or what a run trained, over HTTP and in a browser.

    groupwise serve                                # the starter
    groupwise serve arithmetic                     # what the newest run of this name trained, and the run's pages
    groupwise serve runs/arithmetic-1@80           # version 80 of a run
    groupwise serve Qwen/Qwen3-0.6B --adapter DIR  # a model and an adapter in PEFT's layout
    groupwise serve hf://me/arithmetic             # an adapter on the Hugging Face hub, over the model that it names

A run is only read: its adapter is copied into the server's state directory, where jobs add to it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from groupwise.cli.frame import ApiKey, Debug, examples
from groupwise.cli.output import say
from groupwise.errors import AdapterNotFoundError, ConfigError, ModelError
from groupwise.platform import check_device

STATE = Path("groupwise-state", "runs")  # of servers of runs: a directory each

if TYPE_CHECKING:
    from groupwise.config.serve import ServeConfig
    from groupwise.config.yaml import Document
    from groupwise.server.app import Start
    from groupwise.store.locate import TrainedPolicy


def add_to(app: typer.Typer) -> None:
    """Make the command part of `groupwise`."""
    app.command(
        epilog=examples(
            "groupwise serve",
            "groupwise serve arithmetic",
            "groupwise serve runs/arithmetic-20260101T120000Z@80 --port 8500",
            "groupwise serve Qwen/Qwen3-0.6B --state-dir /var/lib/groupwise max_queued_jobs=8",
            "groupwise serve Qwen/Qwen3-4B --engine vllm --set vllm.gpus=1",
            "groupwise serve --config server.yaml",
        ),
    )(serve)


def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL|RUN",
            help="`starter`, a model's directory or Hugging Face name; or a run (its directory, its name, RUN@N): its "
            "model with its newest adapter. Default: the `model` of --config, or `starter`.",
            show_default=False,
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Settings (docs/server.md lists them); --set KEY=VALUE is the same.",
            show_default=False,
        ),
    ] = None,
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="FILE", help="Settings as YAML (docs/server.md lists them); options win over them."
        ),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(
            metavar="ADAPTER",
            help="Begin with this adapter active: a run, RUN@N, a PEFT directory, or hf://OWNER/NAME.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Where to listen; other than loopback needs an API key.")] = None,
    port: Annotated[int | None, typer.Option(help="Default: 8420; 0 takes a free one.")] = None,
    state_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Jobs and adapters; one server each.")] = None,
    served_model_name: Annotated[str | None, typer.Option(metavar="NAME", help="The model's name in the API.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32 or bfloat16.")] = None,
    quantization: Annotated[
        str | None, typer.Option(help="nf4 or int8: the base in 4 or 8 bits (docs/scale.md).", show_default=False)
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")] = None,
    batch_rows: Annotated[int | None, typer.Option(help="Completions decoded at once.")] = None,
    engine: Annotated[str | None, typer.Option(help="What samples: local, or vllm (docs/vllm.md).")] = None,
    worker_threads: Annotated[int | None, typer.Option(help="Threads of the training worker.")] = None,
    webhook_url: Annotated[str | None, typer.Option(metavar="URL", help="Told when a job ends.")] = None,
    tinker: Annotated[bool | None, typer.Option("--tinker", help="Speak the Tinker API too (docs/tinker.md).")] = None,
    trainer_routes: Annotated[
        bool | None, typer.Option("--trainer-routes", help="Be the vLLM server of TRL's and Axolotl's trainers.")
    ] = None,
    repair_ledger: Annotated[
        bool, typer.Option("--repair-ledger", help="First put a damaged ledger together again; its file is kept.")
    ] = False,
    open_: Annotated[bool, typer.Option("--open", help="Open the web interface in a browser when it answers.")] = False,
    api_key: ApiKey = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="May be repeated.")] = None,
    debug: Debug = False,
) -> None:
    """Serve a model, or what a run trained, over HTTP and in a browser: chat, score, train, swap adapters."""
    # threads that wait for each other give up the core: on two cores a server with its training worker was 50 times
    # slower while the threads spun
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    document = _read_settings(config_file)
    model, given = _words(model, [*(overrides or ()), *(set_ or ())])
    model = model or str(document.data.get("model") or "starter")
    policy = served_run(model) if adapter is None else None
    start = start_of(model, adapter, policy)
    document.data["model"] = model if policy is None else policy.model
    for text in given:
        document.override(text, shorthand={})
    if policy is not None and policy.run_dir is not None:
        state_dir = state_dir or STATE / policy.run_dir.name
        if policy.adapter is None:  # the model's directory is called `model`
            served_model_name = served_model_name or re.sub(r"[^\w.:-]", "-", policy.run_dir.name)[:128]
    if policy is not None:
        _ask_as_trained(document, policy)
    flags = {
        "host": host,
        "port": port,
        "state_dir": state_dir,
        "served_model_name": served_model_name,
        "dtype": dtype,
        "quantization": quantization if policy is None else quantization or policy.quantization,
        "device": device,
        "batch_rows": batch_rows,
        "engine": engine,
        "worker_threads": worker_threads,
        "webhook_url": webhook_url,
        "api_key": api_key,
        "tinker": tinker,
        "trainer_routes": trainer_routes,
    }
    from groupwise.config.serve import serve_config

    document.data.update({key: value for key, value in flags.items() if value is not None})
    config = _there(serve_config(document))
    from groupwise.server.app import serve as serve_until_stopped  # imports nothing heavy before it has the port

    with _nor_a_run(model, policy):
        serve_until_stopped(config, repair_ledger=repair_ledger, start=start, ready=open_in_browser if open_ else None)


@contextmanager
def _nor_a_run(model: str, policy: TrainedPolicy | None) -> Iterator[None]:
    """Add to the error about a missing model that there is no run of this name, either."""
    try:
        yield
    except ModelError as error:
        if policy is None and not Path(model).exists():
            error.hint = f"{error.hint or 'name a model'}; nor is there a run {model!r}"
        raise


def _words(model: str | None, overrides: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    """Return the model that is named, and the settings; the first word is one of these where it is `KEY=VALUE`."""
    if model and "=" in model and not Path(model).exists():
        return None, [model, *overrides]
    return model, overrides


def _there(config: ServeConfig) -> ServeConfig:
    """Return the settings. Raises ModelError or ConfigError where the device or vLLM is not here, before a port is
    taken or anything is loaded."""
    from groupwise.engine.vllm.installed import check_installed

    check_device(config.device)
    check_installed(config)
    return config


def _read_settings(path: Path | None) -> Document:
    """Return the settings of --config; relative paths in them begin at the file's folder. Raises ConfigError."""
    from groupwise.config.yaml import Document

    if path is None:
        return Document({}, "the command line")
    document = Document.read(path)
    document.data.setdefault("folder", str(path.parent))
    return document


def _ask_as_trained(document: Document, policy: TrainedPolicy) -> None:
    """Set missing settings to those of the prompts and completions on which the model was trained."""
    from groupwise.config.yaml import inline

    for key, value in policy.manner.items():
        if key not in document.data:
            document.data[key] = value
            say(f"as in the run: {key} {inline(value)}")


def served_run(text: str) -> TrainedPolicy | None:
    """Return the run or version that `text` names; None where it names a model. Raises ConfigError for a file of
    settings."""
    from groupwise.config.run import PACKAGED
    from groupwise.store.locate import UNTRAINED, find_policy

    path = Path(text)
    if path.suffix in (".yaml", ".yml") and path.is_file():
        raise ConfigError(
            f"{text} is a file of settings, and what is served is a model or a run",
            hint=f"a server's settings: groupwise serve --config {text}; of a run that it began: groupwise serve RUN",
        )
    if text in PACKAGED or ((path / "config.json").is_file() and not (path / "adapter_config.json").exists()):
        return None
    try:
        return find_policy(text)
    except AdapterNotFoundError as error:
        if error.kind == UNTRAINED or "@" in text or (path / "config.yaml").is_file():  # no model is called so
            raise
        return None


def start_of(model: str, adapter: str | None, policy: TrainedPolicy | None) -> Start:
    """Return the adapter that is active first. One that is named by its version stays chosen when the server begins
    again."""
    from groupwise.server.app import Start
    from groupwise.store.locate import find_adapter

    if adapter is not None:
        return Start(adapter=find_adapter(adapter), always=True)
    if policy is None:
        return Start()
    return Start(adapter=policy.adapter, always="@" in model or policy.run_dir is None, run_dir=policy.run_dir)


def open_in_browser(url: str) -> bool:
    """Open a page where there is a desktop to open it on; returns whether it was tried."""
    import webbrowser

    has_desktop = sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    if not (sys.stderr.isatty() and has_desktop):
        return False
    return webbrowser.open(url)
