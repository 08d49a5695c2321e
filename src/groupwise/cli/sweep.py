"""`groupwise run` of several runs: what is said before they start, and what came of them.

The table has a row for each run; below it stands which is best on the held-out prompts, and its difference from each
other, prompt by prompt.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from groupwise.cli.frame import print_table, quiet_libraries
from groupwise.cli.output import json_alone, print_json, print_line, say, stdout
from groupwise.errors import GroupwiseError, Interrupted, TrainingError
from groupwise.platform import importing

if TYPE_CHECKING:
    from groupwise.config.run import RunConfig
    from groupwise.run.ranking import Ranking
    from groupwise.run.sweep import Heat, Outcome


def run_several(configs: Mapping[str, RunConfig], *, as_json: bool) -> None:
    """Train these runs, by their labels, and print what came of each. Ends with the exit code of the first that failed,
    or of what was interrupted, or that one learned nothing.

    Raises GroupwiseError where one of them cannot be planned; nothing was begun.
    """
    from groupwise.run.plan import RunPlan, make_plan
    from groupwise.store.rundir import as_they_continue

    plans = dict[str, RunPlan]()
    for label, config in as_they_continue(configs).items():
        try:
            plans[label] = make_plan(config)
        except GroupwiseError:
            say(f"of the run {label}:")
            raise
    quiet_libraries()
    with importing():
        from groupwise.run.ranking import rank
        from groupwise.run.sweep import SweptRun, heats, run_sweep
        from groupwise.run.sweep_display import open_sweep_display

    runs = [SweptRun(label=label, plan=plan) for label, plan in plans.items()]
    groups = heats(runs)
    for line in announced(groups):
        say(line)
    steps = {run.label: run.config.train.steps for run in runs}
    with json_alone(as_json), open_sweep_display(steps) as shown:
        of = {outcome.run.label: outcome for outcome in run_sweep(groups, shown=shown)}
    outcomes = [of[run.label] for run in runs]
    ranking = rank(outcomes)
    print_json(sweep_as_json(outcomes, ranking)) if as_json else print_sweep(outcomes, ranking)
    if (code := exit_code(outcomes)) != 0:
        raise typer.Exit(code)


def announced(groups: Sequence[Heat]) -> list[str]:
    """Return lines that say which runs train together, and why the other runs do not."""
    count = sum(len(heat.runs) for heat in groups)
    if len(groups) == 1:
        (heat,) = groups
        return [f"{count} runs beside each other, over one base model: {', '.join(run.label for run in heat.runs)}"]
    lines = [f"{count} runs, in {len(groups)} turns, one after another:"]
    for number, heat in enumerate(groups, 1):
        names = ", ".join(run.label for run in heat.runs)
        why = "" if heat.why is None else f": {heat.why}"
        how = f"by itself{why}" if len(heat.runs) == 1 else "beside each other, over one base model"
        lines.append(f"  {number}. {names}  ({how})")
    return lines


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """Return the command's exit code; show failures that are not messages to the user on stderr."""
    for outcome in outcomes:
        if outcome.error is not None and not isinstance(outcome.error, GroupwiseError):
            traceback.print_exception(outcome.error)
    failed = [each.error for each in outcomes if each.error is not None]
    if failed:
        return failed[0].exit_code if isinstance(failed[0], GroupwiseError) else 1
    if any(each.result is None or each.result.interrupted for each in outcomes):
        return Interrupted.exit_code
    return 0 if all(each.result is not None and each.result.trained for each in outcomes) else TrainingError.exit_code


def sweep_as_json(outcomes: Sequence[Outcome], ranking: Ranking) -> dict[str, Any]:
    """Return all runs as an object: each as `groupwise run --json` says it, with its label, or with its error."""
    from groupwise.cli.print import run_as_json, tests_as_json

    runs = list[dict[str, Any]]()
    for each in outcomes:
        told = {} if each.result is None else run_as_json(each.run.config, each.result)
        error = each.error
        if isinstance(error, GroupwiseError):
            told = {"error": error.as_dict()}
        elif error is not None:
            told = {"error": {"code": "internal_error", "message": f"{type(error).__name__}: {error}"}}
        runs.append({"run": each.run.label, **told})
    best = None if ranking.best is None else ranking.best.run.label
    paired = tests_as_json(ranking.against)
    return {"runs": runs, "best": best, "measure": ranking.measure, "paired": paired, "why_none": ranking.why}


def print_sweep(outcomes: Sequence[Outcome], ranking: Ranking) -> None:
    """Print a row for each run, and the best."""
    from groupwise.cli.print import overall_rows, print_tests, why_untrained

    of = {each.run.label: overall_rows(each.run.config, each.result) for each in outcomes if each.result is not None}
    metrics = list(dict.fromkeys(metric for every in of.values() for metric, _, _ in every))
    rows = [("run", "steps", *metrics, "directory")]
    for each in outcomes:
        values = {metric: (before, after) for metric, before, after in of.get(each.run.label, ())}
        cells = [_change(*values[metric]) if metric in values else "-" for metric in metrics]
        done, total = (0 if each.result is None else each.result.steps), each.run.config.train.steps
        rows.append((each.run.label, f"{done}/{total}", *cells, _where(each)))
    print_table(rows)
    for each in outcomes:
        if each.error is not None:
            say(f"error: {each.run.label}: {each.error}")
        elif each.result is not None and not each.result.trained:
            say(f"error: {each.run.label}: nothing was trained, because {why_untrained(each.result)}")
    print_line("")
    if ranking.best is None:
        return print_line(f"no run is called the best: {ranking.why}")
    print_line(f"best  {ranking.best.run.label}  {_where(ranking.best)}")
    others = f"each other, by {ranking.measure}"
    print_tests(stdout(), ranking.against, policy=ranking.best.run.label, against=others)


def _change(before: float, after: float) -> str:
    return " -> ".join("-" if math.isnan(value) else f"{value:.3f}" for value in (before, after))


def _where(outcome: Outcome) -> str:
    if outcome.result is not None:
        return str(outcome.result.run_dir)
    return "not begun" if outcome.error is None else "failed"
