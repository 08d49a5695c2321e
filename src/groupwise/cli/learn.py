"""`groupwise learn ...`: a server that learns from ratings by itself (docs/learn.md), looked at and steered.

groupwise learn status      # what it does or waits for, the ratings, what is on trial, what happened lately
groupwise learn pause       # no more jobs by itself, also after a restart; resume makes them again
groupwise learn promote     # the version on trial goes live without waiting for more ratings; reject ends its trial
groupwise learn trust USER  # ratings of a rater who contradicted what is known count again
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from groupwise.cli.frame import OPTIONS, ApiKey, AsJson, Debug, Url, examples, open_client, print_answer, print_table
from groupwise.cli.output import print_line

if TYPE_CHECKING:
    from groupwise.sdk.types import LearnAnswer, LearnVerb

LATELY = 10  # of what happened, lines that are shown

app = typer.Typer(help="Learning from ratings on a server: what it does; pause, resume, promote, reject.", **OPTIONS)


@app.command(epilog=examples("groupwise learn status", "groupwise learn status --url http://host:8420 --json"))
def status(url: Url = None, api_key: ApiKey = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """Say what automatic training does, or why it does nothing, and what it did lately."""
    with open_client(url, api_key) as client:
        answer = client.learning()
    print_answer(answer) if as_json else _print(answer)


@app.command()
def pause(url: Url = None, api_key: ApiKey = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """Make no more jobs by itself, also after a restart."""
    _steer("pause", url, api_key, as_json=as_json)


@app.command()
def resume(url: Url = None, api_key: ApiKey = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """Make jobs again."""
    _steer("resume", url, api_key, as_json=as_json)


@app.command()
def promote(url: Url = None, api_key: ApiKey = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """Make the version that is on trial the active one."""
    _steer("promote", url, api_key, as_json=as_json)


@app.command()
def reject(url: Url = None, api_key: ApiKey = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """End the trial: the version stays in the store and answers no more requests."""
    _steer("reject", url, api_key, as_json=as_json)


@app.command(epilog=examples("groupwise learn trust ann", "groupwise learn trust ann --key phone-app"))
def trust(
    user: Annotated[str | None, typer.Argument(help="Their `user`; left out, those that name none.")] = None,
    key: Annotated[str | None, typer.Option(help="The name of the key that they came with.")] = None,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Let the ratings of a rater count again who is distrusted."""
    with open_client(url, api_key) as client:
        answer = client.trust_rater(user, key=key)
    print_answer(answer) if as_json else _print(answer)


def _steer(verb: LearnVerb, url: str | None, api_key: str | None, *, as_json: bool) -> None:
    with open_client(url, api_key) as client:
        answer = client.steer_learning(verb)
    print_answer(answer) if as_json else _print(answer)


def _print(answer: LearnAnswer) -> None:
    state = "off" if not answer.enabled else "paused" if answer.paused else "on"
    rows = [
        ("learning", f"{state}: {answer.reason}"),
        ("ratings", ", ".join(f"{count} {name}" for name, count in answer.counts.items()) or "none"),
        ("active", answer.active),
    ]
    if answer.after is not None:
        rows.append(("next job", f"{answer.ratings} of {answer.after} ratings that can be trained on"))
    if answer.job_id is not None:
        rows.append(("job", f"{answer.job_id}; groupwise train status {answer.job_id}"))
    if answer.trial is not None:
        share = f" of {answer.trial_share:.0%} of the requests" if answer.trial_share is not None else ""
        so_far, of = (
            (answer.trial_pairs, "pairs") if answer.trial_stage == "shadow" else (answer.trial_ratings, "ratings")
        )
        rows.append(
            ("on trial", f"{answer.trial}, {answer.trial_stage}{share}, {so_far} of at most {answer.trial_most} {of}")
        )
    print_table(rows)
    for rater in answer.raters[:LATELY]:
        who = f"{rater.user or 'without a user'}{f' of key {rater.key}' if rater.key else ''}"
        counts = "" if rater.counts else ", counts nowhere"
        print_line(f"rater {who}: agrees with {rater.agreed} of {rater.known} known prompts{counts}")
    for each in answer.transitions[:LATELY]:
        print_line(f"{each.at}  {each.kind}: {each.message}")
    if not answer.enabled:
        print_line("to switch it on: groupwise serve --config server.yaml, with a section `learn` (docs/learn.md)")
