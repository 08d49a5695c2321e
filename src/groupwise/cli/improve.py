"""`groupwise improve`: from the logs of a model to an answer: replace it by what they teach, keep it, or not known.

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
            help="Logs as `logs import` reads them, or what it wrote; and overrides of the run.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The model that you have.", show_default=False)
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FOLDER", help="Where everything is kept.", show_default=False)
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
        typer.Option(metavar="REWARD", help="module:function, where no rule fits: a judge that `logs judge` believes."),
    ] = None,
    args: Annotated[str, typer.Option("--args", metavar="JSON", help="Options of --reward.")] = "{}",
    gain: Annotated[float, typer.Option(metavar="SHARE", help="By how much better a replacement must be.")] = 0.05,
    set_: Set = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Train on what logs teach, and say whether to replace the model that you have: replace, keep, or not known.

    Without verified answers (--truth) it is never `replace`, as a log cannot vouch for itself: it then writes which
    prompts to verify, and the same command with them answers, without training again.
    """
    if to is None:
        hint = "groupwise improve requests.jsonl --model starter --to improved"
        raise ConfigError("--to is left out: the folder that everything is kept in", hint=hint, field="--to")
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
    taught = f"{prompts['trained']} prompts, scored by {result['reward']}" if result["version"] else "nothing"
    yield f"taught    {taught}; {prompts['heldout']} held out, {prompts['reserved']} reserved"
    if result["version"]:
        yield f"version   {result['version']}, beside {result['model']}"
    if (found := result["verified"]) is not None:
        look = f"look {found['look']}, " if found["look"] > 1 else ""
        yield f"verified  {_compared(found)} ({look}each end at {1 - found['alpha']:.1%})"
        left = {"not filled in": found["unfilled"], "nearly twice": found["twice"], "trained on": found["trained_on"]}
        if any(left.values()):
            said = ", ".join(f"{count} {why}" for why, count in left.items() if count)
            yield f"          of {found['rows']} rows left out: {said}"
    if (found := result["logged"]) is not None:
        yield f"log says  {_compared(found)}; who wrote the log decides this"
    if (found := result["audit"]) is not None:
        wrong = f"{found['wrong']} of {found['checked']} of the log's answers are wrong"
        yield f"audit     {wrong}; of all that taught at most {found['most']:.0%}"
        if (learned := found["learned"])["checked"]:
            yield f"          and {learned['wrong']} of {learned['checked']} of those from which it learned most"
    if (cost := result["cost"]) is not None:
        measured = f", measured {cost['measured_tokens']:,} in {cost['measure_minutes']:.1f}"
        said = f"{cost['trained_tokens']:,} tokens sampled in {cost['train_minutes']:.1f} minutes"
        yield f"cost      {said}{measured if cost['measured_tokens'] else ''}"
    for name in ("better", "worse"):
        for each in result[name]:
            said = f"{_short(each['prompt'])!r} right {_short(each['right'])!r}"
            yield f"{name:<10}{said}; before {_short(each['before'])!r}, after {_short(each['after'])!r}"
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
