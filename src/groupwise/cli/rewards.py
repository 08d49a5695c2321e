"""`groupwise rewards ...`: which rewards the package has, and whether a reward is fit to train on."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from groupwise.cli.findings import json_options, print_findings
from groupwise.cli.frame import OPTIONS, AsJson, Debug, examples, print_table
from groupwise.cli.output import print_json, print_line, say
from groupwise.errors import ConfigError, LoadError
from groupwise.pictures import text_of

if TYPE_CHECKING:
    from groupwise.config.data import DatasetConfig
    from groupwise.rewards.call import RewardFunction
    from groupwise.rewards.check import RewardCheckReport
    from groupwise.rewards.probes import ProbePrompt

rewards_app = typer.Typer(help="The rewards in the package, and what is wrong with yours.", **OPTIONS)


@rewards_app.command("list", epilog=examples("groupwise rewards list", "groupwise rewards list --json"))
def list_rewards(as_json: AsJson = False, debug: Debug = False) -> None:
    """List every reward in the package: what to write under `rewards:`, and what it gives."""
    from groupwise.rewards.catalogue import built_in

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
        "groupwise rewards lint my_rewards:exact --data prompts.jsonl data.prompt_key=question",
        'groupwise rewards lint groupwise.rewards.format:regex_match --args \'{"pattern": "[0-9]+"}\'',
    )
)
def lint(
    name: Annotated[str, typer.Argument(metavar="MODULE[:FUNCTION]", help="One reward, or every one of a module.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", help="How --data is read, as in data.prompt_key=question.", show_default=False
        ),
    ] = None,
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
        functions, lacking = _load(name, folder=folder, options=json_options(args))
        chosen = _rows(data, overrides or (), folder=folder, gold=gold, count=rows)
        reports = _lint(functions, folder=folder, rows=chosen, deadline=deadline)
    if as_json:
        print_json({"rewards": [_rewards_json(each) for each in reports], "skipped": lacking})
    else:
        _print_rewards(reports, lacking, probes=probes)
    if any(report.verdict == "error" for report in reports):
        raise typer.Exit(1)


def _load(name: str, *, folder: Path, options: dict[str, Any]) -> tuple[Sequence[RewardFunction], dict[str, list[str]]]:
    """Return the functions, and by reference the options that those of a module lack without which they cannot be
    called."""
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
    """Return functions by reference: the named one, or all of the module."""
    from groupwise.config.load import load_object
    from groupwise.rewards.catalogue import functions_in

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


def _rows(
    source: str | None, overrides: Sequence[str], *, folder: Path, gold: str | None, count: int
) -> Sequence[ProbePrompt]:
    """Return the built-in rows, or the first of a dataset: the wrong answer to one is the right one to another."""
    from groupwise.rewards.probes import GOLD, ROWS, ProbePrompt
    from groupwise.tasks.prompts import open_prompts

    if source is None:
        for option, value in (("--gold", gold), ("the override", overrides and overrides[0])):
            if value:
                raise ConfigError(f"{option} {value!r} does nothing without --data")
        return ROWS
    prompts = open_prompts(_dataset(source, overrides, limit=max(count, 64)), folder=folder).known
    column = gold or next((each for each in GOLD if each in prompts[0].columns), None)
    if column is not None and (without := [each.id for each in prompts[:count] if column not in each.columns]):
        raise ConfigError(f"{without[0]} has no column {column!r}; it has {', '.join(prompts[0].columns) or 'none'}")
    golds = [each.columns.get(column, "an answer") if column else "an answer" for each in prompts]
    return [
        ProbePrompt(
            prompt=prompt.text or text_of((prompt.messages or ({},))[-1].get("content")),
            gold=golds[index],
            wrong=next((other for other in golds[index + 1 :] + golds if other != golds[index]), f"not {golds[index]}"),
            columns=prompt.columns,
            gold_columns=() if column is None else (column,),
        )
        for index, prompt in enumerate(prompts[:count])
    ]


def _dataset(source: str, overrides: Sequence[str], *, limit: int) -> DatasetConfig:
    """Return what --data and the overrides behind it say, which are in the words of a run: data.KEY=VALUE."""
    from pydantic import create_model

    from groupwise.config.data import DatasetConfig
    from groupwise.config.section import Section
    from groupwise.config.yaml import Document, validate

    document = Document({"data": {"source": source, "limit": limit}}, "the command line")
    for text in overrides:
        document.override(text, shorthand={})
    rows: Any = create_model("Rows", __base__=Section, data=(DatasetConfig, ...))  # at the place that it has in a run
    return validate(document, rows, other_names={}).data


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
    """Print a verdict and the findings for each, and with `probes` what every probe got."""
    for report in reports:
        hack = (
            "" if report.hack is None else f"; from a wrong to a right answer, junk gets {report.hack:.0%} of the way"
        )
        print_findings(report, f"{report.p95_ms:.1f} ms a call{hack}")
        if probes:
            print_line("")
            print_table(_table(report))
            print_line("")
    for reference, missing in lacking.items():
        print_line(f"{reference}: skipped, it needs {', '.join(missing)} (--args)")


def _table(report: RewardCheckReport) -> list[list[str]]:
    """Return a line a probe, a column a row."""
    count = max(each.row for each in report.tried) + 1
    lines: dict[str, list[str]] = {}
    for each in report.tried:
        shown = f"{each.value:g}" if isinstance(each.value, float) else "-" if each.value is None else "failed"
        lines.setdefault(each.probe, [""] * count)[each.row] = shown
    head = ["probe", *(f"row {number + 1}" for number in range(count))]
    return [head, *([probe, *values] for probe, values in lines.items())]
