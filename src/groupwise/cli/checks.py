"""`groupwise rewards ...`: which rewards the package has, and whether a reward is fit to train on."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from groupwise.cli.frame import (
    OPTIONS,
    AsJson,
    Debug,
    examples,
    finite,
    print_json,
    print_line,
    print_table,
    quiet_libraries,
    say,
    stdout,
)
from groupwise.errors import ConfigError, DataError, EnvError, LoadError

if TYPE_CHECKING:
    from groupwise.config.data import DatasetConfig
    from groupwise.config.run import EnvConfig
    from groupwise.rewards.base import RewardFunction
    from groupwise.rewards.check import CheckResult, ProbePrompt, RewardCheckReport
    from groupwise.tasks.check.judge import EnvReport
    from groupwise.tasks.check.play import CheckRequest

rewards_app = typer.Typer(help="The rewards in the package, and what is wrong with yours.", **OPTIONS)


@rewards_app.command("list", epilog=examples("groupwise rewards list", "groupwise rewards list --json"))
def list_rewards(as_json: AsJson = False, debug: Debug = False) -> None:
    """Every reward in the package: what to write under `rewards:`, and what it gives."""
    from groupwise.rewards.check import built_in

    found = list(built_in())
    if as_json:
        return print_json({"rewards": [{"function": reference, "gives": gives} for reference, gives in found]})
    module = ""
    for reference, gives in found:
        if module != (module := reference.partition(":")[0]):
            print_line(module)
        print_line(f"  {reference.partition(':')[2]:<28} {gives}")


@rewards_app.command(
    epilog=examples(
        "groupwise rewards lint my_rewards",
        "groupwise rewards lint my_rewards:exact --data prompts.jsonl",
        'groupwise rewards lint groupwise.rewards.format:regex_match --args \'{"pattern": "[0-9]+"}\'',
    )
)
def lint(
    name: Annotated[str, typer.Argument(metavar="MODULE[:FUNCTION]", help="One reward, or every one of a module.")],
    folder: Annotated[
        Path, typer.Option("--folder", metavar="DIR", help="Where the module is; default: here.")
    ] = Path(),
    args: Annotated[str, typer.Option("--args", metavar="JSON", help="Options, as under `args` in a run.")] = "{}",
    data: Annotated[
        str | None, typer.Option("--data", metavar="SOURCE", help="Rows to try it on, as `data.source` in a run.")
    ] = None,
    gold: Annotated[
        str | None, typer.Option("--gold", metavar="COLUMN", help="Which column of them is the expected answer.")
    ] = None,
    rows: Annotated[int, typer.Option("--rows", metavar="N", min=1, help="How many of them.")] = 3,
    deadline: Annotated[
        float, typer.Option("--deadline", metavar="SECONDS", min=0.01, help="Per completion; then it is killed.")
    ] = 10.0,
    probes: Annotated[bool, typer.Option("--probes", help="Also print what every probe got, on every row.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Try a reward on right and wrong answers and on what policies find: does it keep the contract, can it be had?

    Exit code 1 where it has an error; warnings are for you to judge. It is called a few hundred times.
    """
    with redirect_stdout(sys.stderr):  # whatever reward code prints
        functions, lacking = _load(name, folder=folder, options=_options(args))
        chosen = _rows(data, folder=folder, gold=gold, count=rows)
        reports = _lint(functions, folder=folder, rows=chosen, deadline=deadline)
    if as_json:
        print_json({"rewards": [_rewards_json(each) for each in reports], "skipped": lacking})
    else:
        _print_rewards(reports, lacking, probes=probes)
    if any(report.verdict == "error" for report in reports):
        raise typer.Exit(1)


def _options(text: str, *, example: str = '{"tag": "answer"}') -> dict[str, Any]:
    """`--args` as a mapping. Raises ConfigError."""
    try:
        options = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--args is not JSON: {error}", hint=f"as in --args '{example}'") from None
    if not isinstance(options, dict):
        raise ConfigError(f"--args is a {type(options).__name__}; it must be an object of options by name")
    return options


def _load(name: str, *, folder: Path, options: dict[str, Any]) -> tuple[Sequence[RewardFunction], dict[str, list[str]]]:
    """The functions, and by reference the options that those of a module lack without which they cannot be called."""
    from groupwise.config.rewards import RewardConfig
    from groupwise.rewards.base import load_rewards
    from groupwise.rewards.check import needed_options

    found = _find(name, folder)
    if len(found) == 1:
        specs = [RewardConfig(function=reference, args=options) for reference in found]
    else:
        taken = {each: {*inspect.signature(function).parameters} for each, function in found.items()}
        if unknown := [option for option in options if not any(option in names for names in taken.values())]:
            raise ConfigError(f"no reward of {name!r} has the option {unknown[0]!r}")
        specs = [
            RewardConfig(function=reference, args={key: options[key] for key in options if key in taken[reference]})
            for reference in found
        ]
    needs = {
        each: needed_options(loaded) for each, loaded in zip(found, load_rewards(specs, folder=folder), strict=True)
    }
    lacking = {reference: missing for reference, missing in needs.items() if missing}
    if len(lacking) == len(found):
        reference, missing = next(iter(lacking.items()))
        example = json.dumps(dict.fromkeys(missing, "..."))
        raise ConfigError(f"{reference} needs {' and '.join(map(repr, missing))}", hint=f"give --args '{example}'")
    return load_rewards([spec for spec in specs if spec.function not in lacking], folder=folder), lacking


def _find(name: str, folder: Path) -> dict[str, Callable[..., Any]]:
    """Reference -> function: the one that is named, or all of the module."""
    from groupwise.config.load import load_object
    from groupwise.rewards.check import functions_in

    if ":" in name:
        return {name: load_object(name, folder=folder)}
    try:
        found = functions_in(name, folder=folder)
    except LoadError:
        if "." not in name:
            raise
        return {name: load_object(name, folder=folder)}  # package.module.function
    if not found:
        raise ConfigError(f"{name!r} has no reward: no public function of its own that takes `completions`")
    return found


def _rows(source: str | None, *, folder: Path, gold: str | None, count: int) -> Sequence[ProbePrompt]:
    """The built-in rows, or the first of a dataset: the wrong answer to one is the right one to another."""
    from groupwise.config.data import DatasetConfig
    from groupwise.rewards.check import GOLD, ROWS, ProbePrompt
    from groupwise.tasks.prompts import open_prompts

    if source is None:
        if gold is not None:
            raise ConfigError(f"--gold {gold!r} does nothing without --data")
        return ROWS
    prompts = open_prompts(DatasetConfig(source=source, limit=max(count, 64)), folder=folder).all()
    column = gold or next((each for each in GOLD if each in prompts[0].columns), None)
    if column is not None and (without := [each.id for each in prompts[:count] if column not in each.columns]):
        raise ConfigError(f"{without[0]} has no column {column!r}; it has {', '.join(prompts[0].columns) or 'none'}")
    golds = [each.columns.get(column, "an answer") if column else "an answer" for each in prompts]
    return [
        ProbePrompt(
            prompt=prompt.text or str((prompt.messages or ({},))[-1].get("content", "")),
            gold=golds[index],
            wrong=next((other for other in golds[index + 1 :] + golds if other != golds[index]), f"not {golds[index]}"),
            columns=prompt.columns,
            gold_columns=() if column is None else (column,),
        )
        for index, prompt in enumerate(prompts[:count])
    ]


def _lint(
    functions: Sequence[RewardFunction], *, folder: Path, rows: Sequence[ProbePrompt], deadline: float
) -> list[RewardCheckReport]:
    from groupwise.rewards.check import lint as lint_one
    from groupwise.rewards.pool import RewardPool

    async def lint_all() -> list[RewardCheckReport]:
        reports = []
        for function in functions:
            say(f"{function.name} ...")
            reports.append(await lint_one(function, rows=rows, pool=pool))
        return reports

    specs = [function.spec for function in functions if function.spec is not None]
    with RewardPool(specs, folder=folder, timeout_s=deadline) as pool:
        return asyncio.run(lint_all())


# ---- what is printed ----


def _rewards_json(report: RewardCheckReport) -> dict[str, Any]:
    return {
        "function": report.name,
        "verdict": report.verdict,
        "hack": report.hack,
        "p95_ms": report.p95_ms,
        "findings": [asdict(finding) for finding in report.findings],
        "probes": [
            {
                "row": each.row,
                "kind": each.kind,
                "name": each.name,
                "value": each.value if isinstance(each.value, float) else None,
                "failure": getattr(each.value, "cause", None),
            }
            for each in report.tried
        ],
    }


def _print_rewards(reports: Sequence[RewardCheckReport], lacking: Mapping[str, list[str]], *, probes: bool) -> None:
    """A verdict and the findings for each, and with `probes` what every probe got."""
    for report in reports:
        hack = (
            "" if report.hack is None else f"; from a wrong to a right answer, junk gets {report.hack:.0%} of the way"
        )
        _print_findings(report, f"{report.p95_ms:.1f} ms a call{hack}")
        if probes:
            print_line("")
            print_table(_table(report))
            print_line("")
    for reference, missing in lacking.items():
        print_line(f"{reference}: skipped, it needs {', '.join(missing)} (--args)")


def _print_findings(result: CheckResult, about: str) -> None:
    print_line(f"{result.name}: {result.verdict} ({about})")
    for finding in result.findings:
        probe = f"{finding.probe!r}: " if finding.probe else ""
        print_line(f"  {finding.severity:<8}{finding.check:<14}{probe}{finding.message}")


def _table(report: RewardCheckReport) -> list[list[str]]:
    """A line a probe, a column a row."""
    count = max(each.row for each in report.tried) + 1
    lines: dict[str, list[str]] = {}
    for each in report.tried:
        shown = f"{each.value:g}" if isinstance(each.value, float) else "-" if each.value is None else "failed"
        lines.setdefault(each.probe, [""] * count)[each.row] = shown
    head = ["probe", *(f"row {number + 1}" for number in range(count))]
    return [head, *([probe, *values] for probe, values in lines.items())]


# ----------------------------------------------------------------------------------------------------------------------
# `groupwise env ...`: whether an environment is fit to train in.
# ----------------------------------------------------------------------------------------------------------------------

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
    from groupwise.tasks.check.play import CheckRequest
    from groupwise.types import SamplingParams

    return CheckRequest(env=config, folder=folder, params=SamplingParams(max_tokens=128))


def _of_run(path: Path, *, given: Mapping[str, Any], overrides: Sequence[str]) -> CheckRequest:
    """What a run's file says. Raises ConfigError for one without `env`, and for options that it has an answer to."""
    from groupwise.run.config_file import load_config
    from groupwise.tasks.check.play import CheckRequest

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
        params=config.rollout.sampling(),
        scored=bool(config.rewards),
    )


def _dataset(source: str) -> DatasetConfig:
    from groupwise.config.data import DatasetConfig

    return DatasetConfig(source=source)


def _config(name: str, *, args: str, deadline: float, overrides: Sequence[str]) -> EnvConfig:
    """The `env` section of a run. Raises ConfigError."""
    from pydantic import ValidationError

    from groupwise.config.run import EnvConfig
    from groupwise.config.yaml import Document

    given = _options(args, example='{"items": 20}')
    document = Document({"environment": name, "args": given, "step_timeout_s": deadline}, "the command line")
    for text in overrides:
        document.override(text, shorthand={})
    try:
        return EnvConfig.model_validate(document.data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or name
        raise ConfigError(f"{key}: {first['msg']}", hint=f"the keys are {', '.join(EnvConfig.model_fields)}") from None


def _check(wanted: CheckRequest, *, episodes: int, best: float, seed: int) -> EnvReport:
    from groupwise.engine.local import LocalEngine
    from groupwise.tasks.check.judge import judge, refused
    from groupwise.tasks.check.play import opened, try_out

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
    from groupwise.tasks.check.judge import runs_of

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
    _print_findings(report, f"{report.cases} cases{tools}")
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
    from groupwise.tasks.check.judge import drawn, summary

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
