"""`groupwise env ...`: whether an environment is fit to train in."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from groupwise.cli.findings import json_options, print_findings
from groupwise.cli.frame import OPTIONS, AsJson, Debug, examples, print_table, quiet_libraries
from groupwise.cli.output import finite, print_json, print_line, say, stdout
from groupwise.errors import ConfigError, DataError, EnvError

if TYPE_CHECKING:
    from groupwise.config.data import DatasetConfig
    from groupwise.config.run import EnvConfig
    from groupwise.tasks.check.judge import EnvReport
    from groupwise.tasks.check.opening import CheckRequest

ROWS = 32  # of the engine that plays the episodes

envs_app = typer.Typer(help="Environments: is one fit to train in?", **OPTIONS)


@envs_app.callback()
def env() -> None:
    """Environments: is one fit to train in?"""


@envs_app.command(
    epilog=examples(
        "groupwise env check calculator:Calculator --folder examples/envs",
        "groupwise env check my_envs:Shop --args '{\"items\": 20}' --no-model",
        "groupwise env check my_envs:Shop --data cases.jsonl --set max_turns=4 --json",
        "groupwise env check repair.yaml --episodes 2",
    )
)
def check(
    name: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:CLASS|FILE",
            help="The environment, as env.environment in a run; or a run's YAML file, whose env may be an agent or a "
            "harness too.",
        ),
    ],
    args: Annotated[
        str | None, typer.Option("--args", metavar="JSON", help="Its arguments, as env.args in a run.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", metavar="DIR", help="Where the module is; default: here.")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", metavar="SOURCE", help="Its cases, as data.source in a run.")
    ] = None,
    episodes: Annotated[int, typer.Option("--episodes", metavar="N", min=1, help="How many the model plays.")] = 8,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="Who plays them, and whose chat template is used; default: the file's, starter.",
        ),
    ] = None,
    no_model: Annotated[bool, typer.Option("--no-model", help="Only canned replies; no model is loaded.")] = False,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", min=1, help="Of a turn, as rollout.max_tokens; default: the file's, 128."),
    ] = None,
    deadline: Annotated[
        float | None,
        typer.Option(
            "--deadline", metavar="SECONDS", min=0.01, help="Of a method, as env.step_timeout_s; default: 10."
        ),
    ] = None,
    best: Annotated[float, typer.Option("--best", help="What an episode is worth in which all is right.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any other key of a run's `env`; may be repeated."),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Play an environment before anything is trained in it: with canned replies, and with a model.

    Does it keep the contract, is it the same for the same seed, can it be had without doing the task? Then one whole
    episode is shown, the trained tokens in green. Exit code 1 where it has an error; warnings are for you to judge.
    """
    from groupwise.config.yaml import FILES

    quiet_libraries()
    with redirect_stdout(sys.stderr):  # whatever its code prints
        if name.endswith(FILES):
            given = {"args": args, "folder": folder, "deadline": deadline}
            wanted = _of_run(Path(name), given=given, overrides=set_ or ())
        else:
            config = _config(name, args=args or "{}", deadline=deadline or 10.0, overrides=set_ or ())
            wanted = _of_environment(config, folder or Path())
        if data is not None:
            wanted = replace(wanted, data=_dataset(data))
        if max_tokens is not None:
            wanted = replace(wanted, params=replace(wanted.params, max_tokens=max_tokens))
        wanted = replace(wanted, model=model or wanted.model, scripts_only=no_model)
        report = _check(wanted, episodes=episodes, best=best, seed=seed)
    tokenizer = _tokenizer(wanted.model) if report.shown is not None else None
    print_json(_env_json(report, tokenizer)) if as_json else _print_env(report, tokenizer)
    if report.verdict == "error":
        raise typer.Exit(1)


def _of_environment(config: EnvConfig, folder: Path) -> CheckRequest:
    from groupwise.tasks.check.opening import CheckRequest
    from groupwise.types import SamplingParams

    return CheckRequest(env=config, folder=folder, params=SamplingParams(max_tokens=128))


def _of_run(path: Path, *, given: Mapping[str, Any], overrides: Sequence[str]) -> CheckRequest:
    """Return what a run's file says. Raises ConfigError for one without `env`, and for options that it has an answer
    to."""
    from groupwise.run.config_file import load_config
    from groupwise.tasks.check.opening import CheckRequest

    for option in (option for option, value in given.items() if value is not None):
        message = f"--{option} does nothing for a run's file, which says that itself"
        raise ConfigError(message, hint="change a key of its env with --set KEY=VALUE")
    config = load_config(path, [f"env.{text}" for text in overrides])
    if config.env is None:
        raise ConfigError(
            f"{path} has no env: there is nothing that plays episodes", hint="add env, or check its rewards"
        )
    return CheckRequest(
        env=config.env,
        folder=Path(config.folder),
        data=config.data,
        model=config.model,
        chat=config.chat,
        params=config.rollout.sampling(),
        scored=bool(config.rewards),
    )


def _dataset(source: str) -> DatasetConfig:
    from groupwise.config.data import DatasetConfig

    return DatasetConfig(source=source)


def _config(name: str, *, args: str, deadline: float, overrides: Sequence[str]) -> EnvConfig:
    """Return the `env` section of a run. Raises ConfigError."""
    from groupwise.config.run import EnvConfig
    from groupwise.config.yaml import Document, validate

    given = json_options(args, example='{"items": 20}')
    document = Document({"environment": name, "args": given, "step_timeout_s": deadline}, "the command line")
    for text in overrides:
        document.override(text, shorthand={})
    return validate(document, EnvConfig, other_names={})


def _check(wanted: CheckRequest, *, episodes: int, best: float, seed: int) -> EnvReport:
    from groupwise.engine.local import LocalEngine
    from groupwise.tasks.check.judge import judge, refused
    from groupwise.tasks.check.opening import opened
    from groupwise.tasks.check.play import try_out

    try:
        with opened(wanted, say=say, engine_of=lambda base: LocalEngine(base, max_rows=ROWS)) as (environment, engine):
            say("playing ...")
            trial = asyncio.run(try_out(environment, engine=engine, episodes=episodes, seed=seed))
    except (EnvError, DataError) as error:
        return refused(wanted.name, str(error))
    return judge(trial, best=best)


def _tokenizer(model: str) -> Any:
    from groupwise.model.load import load_tokenizer

    return load_tokenizer(model)


# ---- what is printed ----
def _env_json(report: EnvReport, tokenizer: Any) -> dict[str, Any]:
    from groupwise.tasks.check.token_runs import runs_of

    shown = report.shown
    rollout = None if shown is None else shown.rollout
    return {
        "environment": report.name,
        "verdict": report.verdict,
        "cases": report.cases,
        "tools": list(report.tools),
        "findings": [asdict(finding) for finding in report.findings],
        "policies": [
            asdict(row) | {"low": finite(row.low), "mean": finite(row.mean), "high": finite(row.high)}
            for row in report.policies
        ],
        "methods": [asdict(row) for row in report.methods],
        "episode": None
        if shown is None or rollout is None
        else {
            "policy": shown.policy,
            "case": shown.case,
            "stop": rollout.stop,
            "reward": finite(rollout.reward),
            "turn_rewards": [finite(turn.reward) for turn in rollout.turns],
            "segments": [[asdict(run) for run in runs] for runs in runs_of(rollout, tokenizer)],
        },
    }


def _print_env(report: EnvReport, tokenizer: Any) -> None:
    tools = f", tools {', '.join(report.tools)}" if report.tools else ""
    print_findings(report, f"{report.cases} cases{tools}")
    if report.policies:
        print_line("")
        rows = [
            [
                row.policy,
                str(row.episodes),
                f"{row.turns:.1f}",
                *map(_number, (row.low, row.mean, row.high)),
                _ends(row),
            ]
            for row in report.policies
        ]
        print_table([["policy", "episodes", "turns", "least", "mean", "most", "ended by"], *rows])
    if report.methods:
        print_line("")
        rows = [
            [row.method, str(row.calls), f"{1000 * row.mean_s:.1f}", f"{1000 * row.max_s:.1f}", _trouble(row)]
            for row in report.methods
        ]
        print_table([["method", "calls", "mean ms", "most ms", ""], *rows])
    if report.shown is not None:
        _print_episode(report, tokenizer)


def _print_episode(report: EnvReport, tokenizer: Any) -> None:
    from groupwise.tasks.check.token_runs import drawn, summary

    assert report.shown is not None
    print_line("")
    print_line(f"One episode, of {report.shown.policy}, case {report.shown.case}: {summary(report.shown.rollout)}")
    console = stdout()
    for line in drawn(report.shown.rollout, tokenizer):
        console.print(line, soft_wrap=True)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _ends(row: Any) -> str:
    return ", ".join(f"{stop} {count}" for stop, count in row.stops.items())


def _trouble(row: Any) -> str:
    said = [f"{row.failed} raised" if row.failed else "", f"{row.hung} never returned" if row.hung else ""]
    return ", ".join(filter(None, said))
