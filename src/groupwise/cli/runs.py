"""`groupwise health [RUN]` and `groupwise report RUN`: commands that read run directories.

    groupwise health runs/arithmetic-20260101T120000Z    # or: arithmetic, the newest run of that name
    groupwise health                                     # how the server is
    groupwise report arithmetic                          # one page with everything that it did: report.html in it

No torch here: a run is judged by its `metrics.jsonl` and `config.yaml`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from groupwise.cli.frame import ApiKey, AsJson, Debug, Url, examples, open_client, print_answer, print_table
from groupwise.cli.output import print_json, print_line, say
from groupwise.errors import ConfigError

if TYPE_CHECKING:
    from groupwise.config.run import RunConfig
    from groupwise.run.health import Finding
    from groupwise.run.health_report import Report

METRICS, CONFIG = "metrics.jsonl", "config.yaml"
Run = Annotated[
    str | None,
    typer.Argument(metavar="RUN", help="A run's directory, or its name under runs/.", show_default="the server"),
]


def add_to(app: typer.Typer) -> None:
    """Make these commands part of `groupwise`."""
    app.command(
        epilog=examples("groupwise health arithmetic", "groupwise health runs/my-run --json", "groupwise health")
    )(health)
    app.command(
        name="report",
        epilog=examples(
            "groupwise report arithmetic",
            "groupwise report runs/my-run --compare runs/my-run-2 --out both.html",
        ),
    )(report_)


def health(
    run: Run = None, url: Url = None, api_key: ApiKey = None, as_json: AsJson = False, debug: Debug = False
) -> None:
    """Say what is wrong with a run, why, and what to do; without RUN: how the server is.

    Exits with 1 while an error of the run stands, and with 75 if no server answers.
    """
    if run is None:
        return _server_health(url, api_key, as_json=as_json)
    if url is not None or api_key is not None:
        raise ConfigError(
            f"a run on disk has no server, and both RUN ({run!r}) and a server are given",
            hint="leave RUN out for the server's health, or --url and --api-key for the run's",
        )
    from groupwise.run.health_report import examine
    from groupwise.store.locate import find_run
    from groupwise.store.tracking import read_metrics

    run_dir = find_run(run)
    config = _config(run_dir)
    report = examine(read_metrics(run_dir / METRICS), config=config)
    if as_json:
        print_json({"run": str(run_dir), **report.as_dict()})
    else:
        _print_report(report, run_dir, config)
    if report.status == "error":
        raise typer.Exit(1)


def report_(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's directory, or its name under runs/.")],
    compare: Annotated[
        list[str] | None, typer.Option("--compare", metavar="RUN", help="Another run beside it; may be repeated.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page.", show_default="report.html in the run's directory")
    ] = None,
    step: Annotated[
        list[int] | None,
        typer.Option(
            "--step",
            metavar="N",
            help="Only this step's completions; may be repeated.",
            show_default="as many steps as fit",
        ),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write the web interface with what it shows of a run into one HTML file, which opens without a server.

    It holds curves, evaluations, findings, completions and configuration, and loads nothing."""
    from groupwise.cli.report.build import report
    from groupwise.store.locate import find_run

    run_dir, *others = map(find_run, [run, *(compare or ())])
    written = report(run_dir, compare=others, out=out, steps=step or ())
    if as_json:
        return print_json(written.as_dict())
    for note in written.notes:
        say(note)
    print_line(str(written.page))


# ---- a run ----


def _config(run_dir: Path) -> RunConfig | None:
    """Return the run's configuration; None, and a word about it, where this version cannot read it."""
    from groupwise.config.run import load_config

    try:
        return load_config(run_dir / CONFIG)
    except ConfigError as error:
        say(f"remedies are given in words, because the run's configuration cannot be read: {error.message}")
        return None


def _print_report(report: Report, run_dir: Path, config: RunConfig | None) -> None:
    steps = "nothing recorded" if report.last_step is None else f"{report.last_step} steps"
    standing, over = len(report.standing), len(report.findings) - len(report.standing)
    found = f"{standing} wrong now, {over} over" if report.findings else "nothing is wrong"
    print_line(f"{run_dir}  {steps}  {report.status}: {found}")
    if report.findings:
        print_line("")
        print_table([("finding", "severity", "steps", "measured", "value", "limit"), *map(_row, report.findings)])
    for finding in report.standing:
        for line in _paragraph(finding, run_dir, config):
            print_line(line)
    if report.notes:
        print_line("")
    for note in report.notes:
        print_line(f"step {note.step}: {note.text}")


def _row(finding: Finding) -> tuple[str, ...]:
    steps = f"{finding.began} to {'now' if finding.ended is None else finding.ended}"
    measured = f"{finding.metric}, {finding.of.replace('_', ' ')} of {finding.window}"
    limit = f"{finding.op} {finding.threshold:.4g}"
    return (finding.label, finding.severity, steps, measured, f"{finding.value:.3g}", limit)


def _paragraph(finding: Finding, run_dir: Path, config: RunConfig | None) -> Iterator[str]:
    """Yield what it means and what to do, with commands to copy."""
    yield ""
    yield f"{finding.label}: {finding.says}"
    yield f"  cause  {finding.cause}"
    elsewhere = ["run_dir=null"] if config is not None and config.run_dir is not None else []  # that one is taken
    for advice in finding.advice:
        yield f"  try    {advice.text}"
        if advice.overrides:
            words = ["groupwise", "run", str(run_dir / CONFIG), *advice.overrides, *elsewhere]
            yield f"           {shlex.join(words)}"


# ---- a server ----


def _server_health(url: str | None, api_key: str | None, *, as_json: bool) -> None:
    with open_client(url, api_key) as client:
        state = client.health()
        where = client.url
    if as_json:
        return print_answer(state)
    rows = [
        ("server", f"{where} is {state.status}"),
        ("version", state.version),
        ("up", f"{state.uptime_seconds:.0f} s"),
    ]
    rows += [("model", f"{state.model} on {state.backend}")] if state.model else []
    rows += [("active", state.active_version)] if state.active_version else []
    if state.training is not None:
        job = state.training.get("active_job")
        running = f"{job['job_id']} {job['progress']:.0%}" if job else "idle"
        rows.append(("training", f"{running}, {state.training.get('queued', 0)} queued"))
    for check in state.checks or ():
        rows.append((check.name, "ok" if check.passed else f"failed: {check.detail or ''}"))
    print_table(rows)
