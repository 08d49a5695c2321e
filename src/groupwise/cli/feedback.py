"""`groupwise feedback ...`: what people said of a server's answers: said, listed, and as rows that a run learns.

    groupwise feedback give ID --thumb up                  # of a chat's or a completion's id; --score, --correction
    groupwise feedback list                                # newest first
    groupwise feedback export pairs.jsonl                  # kind: dpo    prompt, chosen, rejected
    groupwise feedback export examples.jsonl --examples    # kind: sft    prompt, completion

A pair comes of a comparison, of a correction (better than what it corrects), and of two answers to one prompt with
other mean scores. An example is a correction, or an answer whose mean score is above a half. Of one user the last word
counts, and an answer that was cut off is never what is to be learned. A prompt is exported as the token ids that were
asked: it is learned in the form in which it was answered.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import permutations
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from groupwise.cli.frame import OPTIONS, ApiKey, AsJson, Debug, Url, examples, open_client, print_answer, print_table
from groupwise.cli.output import print_line
from groupwise.errors import ConfigError, DataError, RemoteError

if TYPE_CHECKING:
    from groupwise.sdk.client import Client
    from groupwise.sdk.types import FeedbackAnswer

PAGE = 1000  # ratings that are asked for at once
FORGOTTEN = "rollout_not_found"

app = typer.Typer(help="What people said of a server's answers.", **OPTIONS)


class Thumb(StrEnum):
    """A rating in one word."""

    UP = "up"
    DOWN = "down"


class Said(NamedTuple):
    """An answer that a server keeps. `whole`: it was not cut off, so that it can be learned with its end."""

    prompt_ids: tuple[int, ...]
    prompt: str
    text: str
    whole: bool


@app.command(
    epilog=examples(
        "groupwise feedback give ID --thumb up", 'groupwise feedback give ID --score 0 --correction "It is 185."'
    )
)
def give(
    rollout_id: Annotated[str, typer.Argument(metavar="ID", help="Of an answer: a chat's `id`, a `rollout_id`.")],
    score: Annotated[float | None, typer.Option(metavar="0..1", help="How good it is.")] = None,
    thumb: Annotated[Thumb | None, typer.Option(help="up or down: 1 or 0.")] = None,
    correction: Annotated[str | None, typer.Option(metavar="TEXT", help="What should have been said.")] = None,
    better_than: Annotated[str | None, typer.Option(metavar="ID", help="A worse answer to the same prompt.")] = None,
    user: Annotated[str | None, typer.Option(metavar="NAME", help="Who says it.")] = None,
    comment: Annotated[str | None, typer.Option(metavar="TEXT", help="For people; nothing is learned of it.")] = None,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Say how good an answer of a server was."""
    with open_client(url, api_key) as client:
        said = client.feedback(
            rollout_id,
            score=score,
            thumb=None if thumb is None else thumb.value,
            correction=correction,
            better_than=better_than,
            user=user,
            comment=comment,
        )
    print_answer(said) if as_json else print_table([_row(said)])


@app.command("list", epilog=examples("groupwise feedback list", "groupwise feedback list --limit 1000 --json"))
def list_feedback(
    limit: Annotated[int, typer.Option(min=1, max=PAGE, help="So many of the newest.")] = 50,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List what was said of a server's answers, newest first."""
    with open_client(url, api_key) as client:
        page = client.list_feedback(limit=limit)
    if as_json:
        return print_answer(page)
    print_table([("answer", "version", "score", "said", "user"), *map(_row, page.feedback)])


def _row(said: FeedbackAnswer) -> tuple[str, ...]:
    words = [f"better than {said.better_than}"] if said.better_than else []
    words += [f"correction: {said.correction}"] if said.correction else []
    score = "" if said.score is None else f"{said.score:g}"
    return said.rollout_id, str(said.version or ""), score, " ".join("; ".join(words).split()), said.user or ""


@app.command(
    epilog=examples("groupwise feedback export pairs.jsonl", "groupwise feedback export examples.jsonl --examples")
)
def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The JSONL file to write; it must not exist.")],
    as_examples: Annotated[
        bool, typer.Option("--examples", help="Good answers and corrections (kind: sft) instead of pairs (kind: dpo).")
    ] = False,
    url: Url = None,
    api_key: ApiKey = None,
    debug: Debug = False,
) -> None:
    """Write a server's thumbs, scores, corrections and comparisons as preference pairs, or as examples."""
    if file.exists():  # said before the server is asked for everything
        raise ConfigError(f"{file} exists already", hint="name another file, or remove it first")
    with open_client(url, api_key) as client:
        ratings = list(_ratings(client))
        said, forgotten = _answers(client, ratings)
    rows = list(_examples(ratings, said) if as_examples else _pairs(ratings, said))
    what, need = "pairs", "a comparison, a correction, or two scores of one prompt"
    if as_examples:
        what, need = "examples", "a thumb up, or a correction"
    lost = f"; {forgotten} answers are no longer kept" if forgotten else ""
    if not rows:
        raise DataError(f"{len(ratings)} ratings come to no {what}: they need {need}{lost}")
    from groupwise.store import files

    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    files.write_new(file, text, mode=0o600)  # what people asked is for the eyes of its owner
    print_line(f"{len(rows)} {what} of {len(ratings)} ratings in {file}{lost}")
    print_line(f"to learn them: kind: {'sft' if as_examples else 'dpo'}, data: {{source: {file}}}")


def _ratings(client: Client) -> Iterator[FeedbackAnswer]:
    """Yield all ratings, newest first."""
    before: int | None = None
    while True:
        page = client.list_feedback(before=before, limit=PAGE)
        yield from page.feedback
        if page.next is None:
            return
        before = page.next


def _answers(client: Client, ratings: Sequence[FeedbackAnswer]) -> tuple[dict[str, Said], int]:
    """Return what was said, by id, and how many of the answers are forgotten."""
    said: dict[str, Said] = {}
    lost = 0
    for id in dict.fromkeys(id for each in ratings for id in (each.rollout_id, each.better_than) if id is not None):
        if id in said:
            continue
        try:
            kept = client.kept_answers(id)
        except RemoteError as error:
            if error.code != FORGOTTEN:
                raise
            lost += 1
            continue
        for each in kept.rollouts:
            whole = each.finish_reason != "length"
            said[each.id] = Said(tuple(kept.prompt_token_ids), kept.prompt, each.text, whole)
    return said, lost


def _last(ratings: Sequence[FeedbackAnswer], kind: str) -> list[FeedbackAnswer]:
    """Return of each user the last rating of an answer, or of two of them, that says something of this kind."""
    last: dict[Any, FeedbackAnswer] = {}
    for each in ratings:  # newest first
        if getattr(each, kind) is not None:
            of = frozenset((each.rollout_id, each.better_than)) if kind == "better_than" else each.rollout_id
            last.setdefault((of, each.user), each)
    return list(last.values())


def _scores(ratings: Sequence[FeedbackAnswer]) -> dict[str, float]:
    """Return the mean score of each answer that has any."""
    found: dict[str, list[float]] = defaultdict(list)
    for each in _last(ratings, "score"):
        found[each.rollout_id].append(each.score or 0.0)
    return {id: fmean(scores) for id, scores in found.items()}


def _pairs(ratings: Sequence[FeedbackAnswer], said: dict[str, Said]) -> Iterator[dict[str, Any]]:
    """Yield each pair once, without those whose two texts are the same, or whose better one was cut off."""
    found: list[tuple[str, str]] = []  # what is chosen, and the id of the rejected answer
    for each in _last(ratings, "better_than"):
        if each.rollout_id in said and each.better_than in said and said[each.rollout_id].whole:
            found.append((said[each.rollout_id].text, str(each.better_than)))
    found += [(str(each.correction), each.rollout_id) for each in _last(ratings, "correction")]
    by_prompt: dict[tuple[int, ...], list[tuple[str, float]]] = defaultdict(list)
    for id, score in _scores(ratings).items():
        if id in said:
            by_prompt[said[id].prompt_ids].append((id, score))
    for scored in by_prompt.values():
        better = [(a, b) for (a, high), (b, low) in permutations(scored, 2) if high > low]
        found += [(said[a].text, b) for a, b in better if said[a].whole]
    for chosen, id in dict.fromkeys(found):
        if id in said and chosen.strip() and said[id].text.strip() and chosen != said[id].text:
            worse = said[id]
            ids = list(worse.prompt_ids)
            yield {"prompt": worse.prompt, "prompt_token_ids": ids, "chosen": chosen, "rejected": worse.text}


def _examples(ratings: Sequence[FeedbackAnswer], said: dict[str, Said]) -> Iterator[dict[str, Any]]:
    """Yield each example once, without answers that were cut off."""
    found = [
        (each.rollout_id, str(each.correction)) for each in _last(ratings, "correction") if each.rollout_id in said
    ]
    good = [id for id, score in _scores(ratings).items() if id in said and score > 0.5]
    found += [(id, said[id].text) for id in good if said[id].whole]
    for ids, prompt, text in dict.fromkeys((said[id].prompt_ids, said[id].prompt, text) for id, text in found):
        if text.strip():
            yield {"prompt": prompt, "prompt_token_ids": list(ids), "completion": text}
