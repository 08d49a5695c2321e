"""The command line: `groupwise run | check | eval | import | serve | chat | train | adapters | health | ...`.

What talks to a server is in `cli_remote`, what reads the directories of runs in `cli_runs` and `cli_ui`, and what is
done with adapters, here or on a server, in `cli_adapters`.

Data goes to stdout, progress and messages to stderr; `--json` prints one object instead of text. What a user can cause
ends with a message that says what to do and with the error's exit code (see `errors`), without a traceback unless
`--debug` asks for it. Modules are imported inside the commands: `groupwise --help` must not wait for torch.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from groupwise import (
    cli_adapters,
    cli_envs,
    cli_launch,
    cli_profiles,
    cli_remote,
    cli_rewards,
    cli_runs,
    cli_ui,
    cli_vllm,
)
from groupwise.cli_frame import EXIT_CODES, OPTIONS, ApiKey, AsJson, Debug, Set, examples
from groupwise.config.launch import world
from groupwise.errors import ConfigError, Interrupted
from groupwise.output import print_json, say, stdout

if TYPE_CHECKING:
    from groupwise.config.run import RunConfig
    from groupwise.run.config_file import LoadedRun

Config = Annotated[
    str, typer.Argument(metavar="CONFIG", help="The run's YAML file, or aitraining's flags.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Overrides, such as train.steps=10.", show_default=False),
]

FLAGS = {"help_option_names": ["-h", "--help"], "ignore_unknown_options": True}  # --rl-env-module and others

app = typer.Typer(epilog=EXIT_CODES, **OPTIONS)
cli_remote.add_to(app)
cli_launch.add_launch(app)
cli_runs.add_to(app)
cli_ui.add_ui(app)
cli_profiles.add_profiles(app)
cli_vllm.add_vllm(app)
app.add_typer(cli_adapters.app, name="adapters")
app.add_typer(cli_rewards.rewards_app, name="rewards")
app.add_typer(cli_envs.envs_app, name="env")


def main() -> None:
    """The `groupwise` command."""
    app(prog_name="groupwise")


def _show_version(value: bool) -> None:
    if value:
        from groupwise import __version__

        print(f"groupwise {__version__}")
        raise typer.Exit


@app.callback()
def groupwise(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """GRPO post-training you can start on a laptop and keep when you have a cluster."""


# ---- the run and what belongs to it ----


@app.command(
    context_settings=FLAGS,
    epilog=examples(
        "groupwise run configs/arithmetic.yaml",
        "groupwise run configs/arithmetic.yaml train.steps=20 algo.policy_loss=dapo",
        "groupwise run --model Qwen/Qwen3-0.6B --rl-env-module my_envs.hotel --rl-env-class HotelEnv --peft",
    ),
)
def run(
    config: Config, overrides: Overrides = None, set_: Set = None, as_json: AsJson = False, debug: Debug = False
) -> None:
    """Train as CONFIG says; Ctrl-C finishes the step, saves and evaluates.

    CONFIG may also be Axolotl's or TRL's; overrides are in its own words (docs/migrating.md). In its place aitraining's
    flags name an environment: --rl-env-module, --rl-env-class, --rl-env-config and the others.
    """
    loaded = _load(config, overrides, set_)
    from groupwise.run.loop import run as train
    from groupwise.summary import print_run, run_as_json

    result = train(loaded)
    if world().leads:
        print_json(run_as_json(loaded, result)) if as_json else print_run(stdout(), loaded, result)
    if result.interrupted:
        raise typer.Exit(Interrupted.exit_code)


@app.command(
    context_settings=FLAGS,
    epilog=examples(
        "groupwise check configs/arithmetic.yaml",
        "groupwise check my.yaml --json",
        "groupwise check axolotl.yaml --origins",
    ),
)
def check(
    config: Config,
    overrides: Overrides = None,
    origins: Annotated[
        bool, typer.Option("--origins", help="Only show every effective value and where it comes from; tries nothing.")
    ] = False,
    set_: Set = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Load everything and score a few completions; trains nothing, writes nothing."""
    loaded = _read(config, overrides, set_)
    from groupwise.run.check import check as try_out
    from groupwise.summary import check_as_json, notes_as_json, origins_as_json, print_check, print_origins

    if origins:
        print_json(notes_as_json(loaded) | origins_as_json(loaded)) if as_json else print_origins(stdout(), loaded)
    else:
        report = try_out(loaded.config, on_phase=lambda phase: say(f"{phase} ..."))
        print_json(check_as_json(report, loaded)) if as_json else print_check(stdout(), report, loaded)
    try:
        loaded.runnable()
    except ConfigError as error:  # what `run` refuses comes last, and --json stays one object
        say(f"error: {error}")
        raise typer.Exit(error.exit_code) from None


@app.command(
    name="import",
    context_settings=FLAGS,
    epilog=examples(
        "groupwise import axolotl.yaml -o native.yaml",
        "groupwise import --from aitraining --model Qwen/Qwen3-0.6B --rl-num-generations 8 --peft",
    ),
)
def import_(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE [KEY=VALUE]...", help="The file, and overrides in its words.", show_default=False),
    ] = None,
    system: Annotated[
        str | None, typer.Option("--from", metavar="SYSTEM", help="axolotl, trl or aitraining; default: as it looks.")
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="FILE", help="Write it there.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """A configuration of Axolotl, TRL or aitraining as one of Groupwise, with where each value came from.

    With `--from aitraining` the rest of the line may be its flags in place of a file.
    """
    from groupwise.run.config_file import import_run, written

    loaded = import_run(arguments or [], system=system)
    from groupwise.summary import notes_as_json

    text = written(loaded, out)
    if as_json:
        print_json(notes_as_json(loaded) | {"yaml": text})
    elif out is None:
        print(text, end="")
    for note in (*loaded.refused, *loaded.differs):
        say(f"note: {note}")


@app.command(
    name="eval",
    context_settings=FLAGS,
    epilog=examples(
        "groupwise eval configs/arithmetic.yaml",
        "groupwise eval configs/arithmetic.yaml --adapter runs/arithmetic-20260101T120000Z/arithmetic@80",
    ),
)
def eval_(
    config: Config,
    overrides: Overrides = None,
    adapter: Annotated[
        str | None,
        typer.Option(
            metavar="ADAPTER",
            help="RUN_DIR/NAME@N, RUN_DIR (its active version), NAME@N of the newest run, or a PEFT directory; "
            "default: the base model.",
            show_default=False,
        ),
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option("--mode", metavar="MODE", help="greedy or sampled; may be repeated; default: eval.modes."),
    ] = None,
    set_: Set = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """The mean reward of the base model or an adapter on CONFIG's evaluation prompts; pass@k where eval.k is more."""
    loaded = _load(config, overrides, set_)
    from groupwise.run.eval_adapter import assess
    from groupwise.summary import evaluation_as_json, print_evaluation

    result, policy = assess(loaded, adapter=adapter, modes=tuple(mode or ()), note=say)
    by = None if loaded.eval is None else loaded.eval.by
    if as_json:
        print_json(evaluation_as_json(result, policy=policy, by=by))
    else:
        print_evaluation(stdout(), result, policy=policy, by=by)


@app.command(
    epilog=examples(
        "groupwise serve",
        "groupwise serve Qwen/Qwen3-0.6B --port 8500 --state-dir /var/lib/groupwise --set max_queued_jobs=8",
        "groupwise serve Qwen/Qwen3-4B --engine vllm --set vllm.gpus=1",
    )
)
def serve(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="`starter`, a directory, or a Hugging Face name.")
    ] = "starter",
    host: Annotated[str | None, typer.Option(help="Where to listen; other than loopback needs an API key.")] = None,
    port: Annotated[int | None, typer.Option(help="Default: 8420; 0 takes a free one.")] = None,
    state_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Jobs and adapters; one server each.")] = None,
    served_model_name: Annotated[str | None, typer.Option(metavar="NAME", help="The model's name in the API.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32 or bfloat16.")] = None,
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
    api_key: ApiKey = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any other setting of server/config.py; may be repeated."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Serve a model: sample, score, train and swap adapters over HTTP, until SIGTERM or Ctrl-C."""
    # threads that wait for each other give up the core: on two cores a server beside its training worker was 50 times
    # slower while they spun
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from groupwise.config.yaml import Document

    document = Document({"model": model}, "the command line")
    for text in set_ or ():
        document.override(text, shorthand={})
    flags = {
        "host": host,
        "port": port,
        "state_dir": state_dir,
        "served_model_name": served_model_name,
        "dtype": dtype,
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

    config = serve_config(document.data | {key: value for key, value in flags.items() if value is not None})
    from groupwise.server.app import serve as serve_until_stopped  # imports nothing heavy before it has the port

    serve_until_stopped(config, repair_ledger=repair_ledger)


@app.command()
def doctor(as_json: AsJson = False, debug: Debug = False) -> None:
    """Look whether everything is here that a run needs; exits with 1 if not."""
    _quiet_libraries()
    from rich.text import Text

    from groupwise.doctor import examine

    styles = {"ok": "green", "warn": "yellow", "fail": "red", "absent": "dim"}
    console, findings = stdout(), []
    leads = world().leads
    for finding in examine():
        findings.append(finding)
        if not as_json and leads:
            console.print(
                Text.assemble((f"{finding.status:<7}", styles[finding.status]), f"{finding.name}: {finding.detail}"),
                soft_wrap=True,
            )
            if finding.remedy:
                console.print(f"       -> {finding.remedy}", markup=False, soft_wrap=True)
    failed = [finding.name for finding in findings if finding.status == "fail"]
    if as_json and leads:
        print_json({"ok": not failed, "checks": [vars(finding) for finding in findings]})
    if failed:
        raise typer.Exit(1)


# ---- shared ----


def _load(path: str, overrides: Sequence[str] | None, more: Sequence[str] | None) -> RunConfig:
    """The run; what of a file comes out otherwise than in the system that it was written for is said first."""
    loaded = _read(path, overrides, more)
    config = loaded.runnable()
    for note in loaded.differs:
        say(f"not as in {loaded.system}: {note}")
    return config


def _read(path: str, overrides: Sequence[str] | None, more: Sequence[str] | None) -> LoadedRun:
    from groupwise.run.config_file import read_words

    loaded = read_words([path, *(overrides or ()), *(more or ())])
    _quiet_libraries()
    return loaded


def _quiet_libraries() -> None:
    """Of the libraries only warnings are shown, a line each, and the progress of downloads."""
    from transformers.utils import logging

    warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
