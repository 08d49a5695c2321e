"""The command line: `groupwise run | check | eval | adapters | starter | doctor`.

Data goes to stdout, progress and messages to stderr; `--json` prints one object instead of text. What a user can cause
ends with a message that says what to do and with the error's exit code (see `errors`), without a traceback unless
`--debug` asks for it. Modules are imported inside the commands: `groupwise --help` must not wait for torch.
"""

from __future__ import annotations

import json
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from groupwise.errors import GroupwiseError, Interrupted
from groupwise.output import finite, print_json, print_pairs, say, stdout

if TYPE_CHECKING:
    from groupwise.adapters import AdapterStore
    from groupwise.config import RunConfig

EXIT_CODES = (
    "Exit codes: 0 done; 1 the run failed; 2 the configuration or the command line is wrong; 3 the model or something "
    "else that start-up needs is missing; 75 temporary, such as a full disk: try again; 130 interrupted, with "
    "everything saved."
)


class _Group(TyperGroup):
    """Turns errors into messages and exit codes."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except GroupwiseError as error:
            if ctx.meta.get("debug"):
                traceback.print_exc()
            else:
                say(f"error: {error}")
            if ctx.meta.get("as_json"):
                print_json({"error": error.as_dict()})
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt:
            say("stopped")
            raise typer.Exit(Interrupted.exit_code) from None


def _remember(context: typer.Context, parameter: typer.CallbackParam, value: Any) -> Any:
    """Tell `_Group` of an option that concerns errors."""
    context.meta[parameter.name] = value
    return value


def _examples(*lines: str) -> str:
    return "\n\n".join(("Examples:", *lines))


Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Overrides, such as train.steps=10.", show_default=False),
]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="The same as KEY=VALUE; may be repeated.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.", callback=_remember)]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.", callback=_remember)]
Run = Annotated[Path | None, typer.Option("--run", metavar="DIR", help="A run; default: the newest one in runs/.")]
Store = Annotated[Path | None, typer.Option("--store", metavar="DIR", help="An adapter store outside a run.")]

_OPTIONS: dict[str, Any] = {
    "cls": _Group,
    "no_args_is_help": True,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
app = typer.Typer(epilog=EXIT_CODES, **_OPTIONS)
adapters = typer.Typer(help="List, show, activate, roll back and export adapter versions.", **_OPTIONS)
starter = typer.Typer(help="The small model in the package: what it can do, and how it is made.", **_OPTIONS)
app.add_typer(adapters, name="adapters")
app.add_typer(starter, name="starter")


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
    epilog=_examples(
        "groupwise run configs/arithmetic.yaml",
        "groupwise run configs/arithmetic.yaml train.steps=20 algo.policy_loss=dapo",
    )
)
def run(
    config: Config, overrides: Overrides = None, set_: Set = None, as_json: AsJson = False, debug: Debug = False
) -> None:
    """Train as CONFIG says; Ctrl-C finishes the step, saves and evaluates."""
    loaded = _load(config, overrides, set_)
    from groupwise.loop import run as train
    from groupwise.summary import print_run, run_as_json

    result = train(loaded)
    if as_json:
        print_json(run_as_json(loaded, result))
    else:
        print_run(stdout(), loaded, result)
    if result.interrupted:
        raise typer.Exit(Interrupted.exit_code)


@app.command(epilog=_examples("groupwise check configs/arithmetic.yaml", "groupwise check my.yaml --json"))
def check(
    config: Config, overrides: Overrides = None, set_: Set = None, as_json: AsJson = False, debug: Debug = False
) -> None:
    """Load everything and score a few completions; trains nothing, writes nothing."""
    loaded = _load(config, overrides, set_)
    from groupwise.check import check as try_out
    from groupwise.summary import check_as_json, print_check

    report = try_out(loaded, on_phase=lambda phase: say(f"{phase} ..."))
    if as_json:
        print_json(check_as_json(report))
    else:
        print_check(stdout(), report)


@app.command(
    name="eval",
    epilog=_examples(
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
    """The mean reward of the base model or an adapter on CONFIG's evaluation prompts."""
    loaded = _load(config, overrides, set_)
    from groupwise.assess import assess
    from groupwise.summary import evaluation_as_json, print_evaluation

    result, policy = assess(loaded, adapter=adapter, modes=tuple(mode or ()), note=say)
    by = None if loaded.eval is None else loaded.eval.by
    if as_json:
        print_json(evaluation_as_json(result, policy=policy, by=by))
    else:
        print_evaluation(stdout(), result, policy=policy, by=by)


@app.command()
def doctor(as_json: AsJson = False, debug: Debug = False) -> None:
    """Look whether everything is here that a run needs; exits with 1 if not."""
    _quiet_libraries()
    from rich.text import Text

    from groupwise.doctor import examine

    styles = {"ok": "green", "warn": "yellow", "fail": "red", "absent": "dim"}
    console, findings = stdout(), []
    for finding in examine():
        findings.append(finding)
        if not as_json:
            console.print(
                Text.assemble((f"{finding.status:<7}", styles[finding.status]), f"{finding.name}: {finding.detail}"),
                soft_wrap=True,
            )
            if finding.remedy:
                console.print(f"       -> {finding.remedy}", markup=False, soft_wrap=True)
    failed = [finding.name for finding in findings if finding.status == "fail"]
    if as_json:
        print_json({"ok": not failed, "checks": [vars(finding) for finding in findings]})
    if failed:
        raise typer.Exit(1)


# ---- adapters ----


@adapters.command("list")
def list_adapters(run: Run = None, store: Store = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """Every version, the active one marked."""
    opened = _open_store(run, store)
    infos, active = opened.list(), opened.active
    if as_json:
        versions = [_info_as_json(info) for info in infos]
        return print_json({"store": str(opened.root), "active": str(active), "versions": versions})
    rows = [("", "version", "step", "parent", "reward", "created")]
    for info in infos:
        reward = info.metrics.get("reward/mean")
        shown = "" if reward is None else f"{reward:.3f}"
        mark = "*" if info.version == active else ""
        rows.append((mark, str(info.version), str(info.step), str(info.parent), shown, info.created))
    print_pairs(rows)
    say(f"* is active: {active}; store {opened.root}")


@adapters.command()
def show(
    name: Annotated[str, typer.Argument(metavar="NAME[@N]", help="A version, or a name for its newest one.")],
    run: Run = None,
    store: Store = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Where a version came from, and its files."""
    opened = _open_store(run, store)
    version = opened.resolve(name)
    path = opened.path(version)
    described = _info_as_json(opened.info(version)) | {"path": str(path), "active": version == opened.active}
    if as_json:
        return print_json(described)
    for key, value in described.items():
        print(f"{key:<12} {json.dumps(value) if isinstance(value, dict) else value}")


@adapters.command()
def activate(
    name: Annotated[str, typer.Argument(metavar="NAME[@N]", help="A version, or `base`.")],
    run: Run = None,
    store: Store = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Make a version the active one."""
    opened = _open_store(run, store)
    opened.activate(opened.resolve(name))
    _print_active(opened, as_json=as_json)


@adapters.command()
def rollback(run: Run = None, store: Store = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """Go back to the version that was active before."""
    opened = _open_store(run, store)
    opened.rollback()
    _print_active(opened, as_json=as_json)


@adapters.command()
def export(
    name: Annotated[str, typer.Argument(metavar="NAME[@N]", help="A version, or a name for its newest one.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new directory.")],
    run: Run = None,
    store: Store = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Copy a version to DIR as a plain PEFT directory."""
    opened = _open_store(run, store)
    version = opened.resolve(name)
    path = opened.export(version, directory)
    if as_json:
        return print_json({"version": str(version), "path": str(path)})
    print(path)


# ---- the starter ----


@starter.command()
def info(
    measure: Annotated[bool, typer.Option("--measure", help="Measure it now instead of reading the report.")] = False,
    problems: Annotated[int, typer.Option(min=1, help="Held-out problems a row, with --measure.")] = 300,
    directory: Annotated[Path | None, typer.Option("--dir", help="A model that `build` made; default: ours.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """What the starter can do: its accuracy on held-out problems, skill by skill."""
    from groupwise.starter.report import STARTER_DIR, describe, read_report

    path = directory or STARTER_DIR
    if measure:
        _quiet_libraries()
        from groupwise.starter.measure import measure_starter

        report = measure_starter(path, problems=problems, note=say)
    else:
        report = read_report(path)
    if as_json:
        return print_json(report)
    print_pairs(describe(report))


@starter.command()
def build(
    out: Annotated[Path, typer.Option(metavar="DIR", help="A new directory for the model.")] = Path("starter-model"),
    steps: Annotated[
        int | None, typer.Option(min=1, help="At most this many steps a lesson; default: the recipe's.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the data and the weights.")] = 0,
    problems: Annotated[int, typer.Option(min=1, help="Held-out problems a row of the report.")] = 300,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Train the starter from scratch, about an hour on two CPU cores, and measure it."""
    _quiet_libraries()
    from groupwise.errors import ConfigError
    from groupwise.starter.build import BuildSpec, build_starter
    from groupwise.starter.measure import measure_starter
    from groupwise.starter.report import describe, write_report

    if (out / "config.json").exists():
        raise ConfigError(f"{out} holds a model already", hint="name another directory with --out, or remove it first")
    spec = BuildSpec(seed=seed)
    if steps is not None:
        spec = replace(spec, lessons=tuple(replace(each, steps=min(steps, each.steps)) for each in spec.lessons))
    build_starter(out, spec, report=say)
    report = measure_starter(out, problems=problems, note=say)
    write_report(out, report)
    if as_json:
        return print_json(report)
    print_pairs(describe(report))


# ---- shared ----


def _load(path: Path, overrides: Sequence[str] | None, more: Sequence[str] | None) -> RunConfig:
    from groupwise.config import load_config

    config = load_config(path, [*(overrides or ()), *(more or ())])
    _quiet_libraries()
    return config


def _quiet_libraries() -> None:
    """Of the libraries only warnings are shown, a line each, and the progress of downloads."""
    from transformers.utils import logging

    warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}")
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _open_store(run: Path | None, store: Path | None) -> AdapterStore:
    from groupwise.locate import open_store

    opened = open_store(run=run, store=store)
    for warning in opened.warnings:
        say(f"warning: {warning}")
    return opened


def _info_as_json(info: Any) -> dict[str, Any]:
    return {
        "version": str(info.version),
        "created": info.created,
        "step": info.step,
        "parent": str(info.parent),
        "base_model": info.base_model,
        "base_hash": info.base_hash,
        "config_hash": info.config_hash,
        "metrics": {key: finite(value) for key, value in info.metrics.items()},
        "files": {name: size for name, (size, _) in info.files.items()},
    }


def _print_active(store: AdapterStore, *, as_json: bool) -> None:
    if as_json:
        print_json({"store": str(store.root), "active": str(store.active)})
    else:
        print(store.active)
