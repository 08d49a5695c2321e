"""`groupwise improve`: train on the logs of a model, and answer whether to replace it: replace, keep, or not known.

groupwise improve requests.jsonl --model starter --to improved     # trains, and asks for answers that are verified
groupwise improve --to improved --truth improved/verify.jsonl      # answers
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from groupwise.cli.findings import json_options
from groupwise.cli.frame import AsJson, Debug, Set, examples, quiet_libraries
from groupwise.cli.output import json_alone, print_json, print_line, say
from groupwise.errors import ConfigError

SHOWN = 100  # characters of a prompt or an answer in a line


def add_to(app: typer.Typer) -> None:
    """Make the command part of `groupwise`."""
    app.command(
        epilog=examples(
            "groupwise improve requests.jsonl --model starter --to improved",
            "groupwise improve traces/ --outcomes thumbs.csv --model Qwen/Qwen3-0.6B --to improved train.steps=200",
            "groupwise improve --to improved --truth improved/verify.jsonl",
        )
    )(improve)


def improve(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[LOGS]... [KEY=VALUE]...",
            help="Logs as `logs import` reads them, or the folder of an import; and overrides of the run.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The model that you run.", show_default=False)
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="FOLDER", help="The folder to write to.", show_default=False),
    ] = None,
    truth: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Prompts with verified answers, such as FOLDER/verify.jsonl filled in."),
    ] = None,
    outcomes: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Outcomes by id, as of `logs import`.", show_default=False)
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(metavar="REWARD", help="module:function, if no ready reward fits: one that `logs judge` accepts."),
    ] = None,
    args: Annotated[str, typer.Option("--args", metavar="JSON", help="Options of --reward.")] = "{}",
    gain: Annotated[float, typer.Option(metavar="SHARE", help="The least gain for which to replace the model.")] = 0.05,
    set_: Set = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Train on the logs of your model, and say whether to replace it: replace, keep, or not known.

    Without verified answers (--truth) the answer is never `replace`, because a log alone cannot show that a version is
    better. The command then writes the prompts to verify; the same command with --truth answers without training again.
    """
    if to is None:
        hint = "groupwise improve requests.jsonl --model starter --to improved"
        raise ConfigError("--to is left out: the folder for the run and the answer", hint=hint, field="--to")
    given = words or []
    overrides = [each for each in given if "=" in each and not Path(each).exists()]
    quiet_libraries()
    from groupwise.run.improve import Wanted, improve

    wanted = Wanted(
        to=to,
        sources=[Path(each) for each in given if each not in overrides],
        model=model,
        outcomes=outcomes,
        truth=truth,
        reward=reward,
        options=json_options(args),
        gain=gain,
        overrides=[*overrides, *(set_ or ())],
    )
    with json_alone(as_json):
        result = improve(wanted, note=say)
    page(result, to / "report.md")
    if as_json:
        return print_json(result)
    for line in lines(result):
        print_line(line)
    print_line(f"written   {to / 'report.md'}, {to / 'answer.json'}")


# ---- in words ----
def lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the answer with what it rests on, a line each."""
    first, *more = result["why"]
    yield f"answer    {result['answer']}: {first}"
    yield from (f"          {each}" for each in more)
    prompts = result["prompts"]
    trained = f"on {prompts['trained']} prompts, scored by {result['reward']}" if result["version"] else "nothing"
    yield f"trained   {trained}; {prompts['heldout']} prompts held out, {prompts['reserved']} reserved for verification"
    if result["version"]:
        yield f"version   {result['version']}, compared with {result['model']}"
    if (found := result["verified"]) is not None:
        look = f"look {found['look']}, " if found["look"] > 1 else ""
        yield f"verified  {_compared(found)} ({look}each bound at {1 - found['alpha']:.1%})"
        left = {"not filled in": found["unfilled"], "repeated": found["twice"], "trained on": found["trained_on"]}
        if any(left.values()):
            said = ", ".join(f"{count} {why}" for why, count in left.items() if count)
            yield f"          rows left out of {found['rows']}: {said}"
    if (found := result["logged"]) is not None:
        yield f"by log    {_compared(found)}; it is only as right as the log's answers"
    if (found := result["audit"]) is not None:
        wrong = f"{found['wrong']} of {found['checked']} checked answers of the log are wrong"
        yield f"audit     {wrong}; of all that it was trained on, at most {found['most']:.0%}"
        if (learned := found["learned"])["checked"]:
            yield f"          {learned['wrong']} of {learned['checked']} are wrong of those from which it learned most"
    if (cost := result["cost"]) is not None:
        measured = f"; evaluation: {cost['measured_tokens']:,} in {cost['measure_minutes']:.1f} minutes"
        said = f"training: {cost['trained_tokens']:,} tokens sampled in {cost['train_minutes']:.1f} minutes"
        yield f"cost      {said}{measured if cost['measured_tokens'] else ''}"
    for name in ("better", "worse"):
        for each in result[name]:
            said = f"{_short(each['prompt'])!r}: right is {_short(each['right'])!r}"
            yield f"{name:<10}{said}, before {_short(each['before'])!r}, after {_short(each['after'])!r}"
    yield from (f"needs     {each}" for each in result["needs"])


def _compared(found: Mapping[str, Any]) -> str:
    interval = f"{100 * found['difference']:+.1f} points ({100 * found['low']:+.1f} to {100 * found['high']:+.1f})"
    return f"{found['old']:.1%} before, {found['new']:.1%} after on {found['prompts']} prompts: {interval}"


def _short(text: Any) -> str:
    said = " ".join(str(text).split())
    return said if len(said) <= SHOWN else f"{said[:SHOWN]}..."


def page(result: Mapping[str, Any], path: Path) -> None:
    """Write the answer as a page."""
    from groupwise.store import files

    said = ["# Replace the model?", "", f"**{result['answer']}**: {'; '.join(result['why'])}.", ""]
    said += ["```text", *lines(result), "```", ""]
    for name, head in (("better", "Where it is better"), ("worse", "Where it is worse")):
        if result[name]:
            said += [f"## {head}", "", "| prompt | right | before | after |", "|---|---|---|---|"]
            said += [
                "| " + " | ".join(_cell(each[key]) for key in ("prompt", "right", "before", "after")) + " |"
                for each in result[name]
            ] + [""]
    if result["needs"]:
        said += ["## To know more", "", *(f"- {each}" for each in result["needs"]), ""]
    with files.writing(f"writing {path}"):
        files.replace(path, "\n".join(said), mode=0o600)


def _cell(text: Any) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")
