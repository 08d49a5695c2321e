"""The report of an import in words: what is there, what was masked, what can be learned, what is lacking.

judged        a report's numbers -> what can be learned, and what is lacking
lines         a report as lines, for a terminal
as_markdown   ... and as a page, with a configuration for each way of learning
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from groupwise.algo.evidence import lower_bound

FEW_HELD_OUT = 50
FEW_PAIRS = 100
FEW_SCORED = 40  # good and bad answers each, for a judge
MOST_OF_ONE = 0.3  # of the outcomes, by one user
FEW_AGAIN = 10  # answers with several scores
MOST_CONTRADICTED = 0.2  # of those
LARGE = 0.5  # of all exchanges, in one group
MOST_REASONS = 10
ALPHA = 0.05

GRPO = """\
name: from-logs
model: starter                     # yours
data: {{source: train.jsonl}}
eval: {{data: {{source: heldout.jsonl}}, every: 20}}
rewards: [{reward}]
"""
OTHER = """\
name: from-logs
kind: {kind}
model: starter                     # yours
data: {{source: train_{rows}.jsonl}}
"""
HELD_OUT = "eval: {{data: {{source: heldout_{rows}.jsonl}}, every: 20}}\n"


def judged(report: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return what can be learned, as {"kind", "rows", "says", "yaml"}, and what is lacking, as sentences."""
    learn, can = report["learn"], list[dict[str, Any]]()
    prompts, examples, pairs = (learn[name] for name in ("prompts", "examples", "pairs"))
    for rule in learn["rules"]:
        says = f"`{rule['reward']}` scores {rule['prompts']} of {prompts['train']} prompts"
        if rule["paid"] is not None:
            says += f"; the log's answers get {rule['paid']:.2f} on average"
        if rule["good"] is not None and rule["bad"] is not None:
            says += f", good ones {rule['good']:.2f} and the others {rule['bad']:.2f}"
        yaml = GRPO.format(reward=f'"{rule["reward"]}"')
        can.append({"kind": "grpo", "rows": rule["prompts"], "says": says, "yaml": yaml})
    if examples["train"]:
        says = "edited answers, and answers with a score above a half"
        can.append(
            {"kind": "sft", "rows": examples["train"], "says": says, "yaml": _other("sft", "examples", examples)}
        )
    if pairs["train"]:
        says = "pairs of a better and a worse answer"
        can.append({"kind": "dpo", "rows": pairs["train"], "says": says, "yaml": _other("dpo", "pairs", pairs)})
    return {"can": can, "lacks": list(_lacking(report))}


def _other(kind: str, rows: str, counts: Mapping[str, int]) -> str:
    return (OTHER + (HELD_OUT if counts["heldout"] else "")).format(kind=kind, rows=rows)


def _lacking(report: Mapping[str, Any]) -> Iterator[str]:
    learn, outcomes, prompts = report["learn"], report["outcomes"], report["prompts"]
    held, scored = learn["prompts"]["heldout"], learn["scored"]
    if not outcomes["answers"]:
        yield "no answer has an outcome that says whether it was good; --outcomes FILE joins thumbs, resolved, edited"
    if outcomes["unmatched"]:
        yield f"the ids of {outcomes['unmatched']} outcomes belong to no answer, trace or conversation in the logs"
    if outcomes["raters"] > 1 and outcomes["largest_rater"] > MOST_OF_ONE:
        yield (
            f"one of {outcomes['raters']} users gave {outcomes['largest_rater']:.0%} of the outcomes, so the model "
            "would learn what this user wants"
        )
    if (
        outcomes["scored_again"] >= FEW_AGAIN
        and outcomes["contradicted"] > MOST_CONTRADICTED * outcomes["scored_again"]
    ):
        yield (
            f"{outcomes['contradicted']} of {outcomes['scored_again']} answers with several scores are rated both good "
            "and bad: users want different things, or someone rates wrongly on purpose"
        )
    for name, (low, high) in outcomes["no_scale"].items():
        yield f"the scale of outcome {name!r} is unknown, its values are {low:g} to {high:g}: give values from 0 to 1"
    if not learn["rules"]:
        judge = "use a judge, although no outcome can confirm it"
        if outcomes["answers"]:
            judge = "use a judge that agrees with the outcomes (groupwise logs judge)"
        yield f"GRPO needs a reward, and no ready reward fits: write one, or {judge}"
    if outcomes["answers"] and min(scored["good"], scored["bad"]) < FEW_SCORED:
        yield (
            f"the training part has {scored['good']} good and {scored['bad']} bad answers; to see whether a judge "
            f"agrees with the outcomes, {FEW_SCORED} or more of each are needed"
        )
    if learn["pairs"]["train"] and learn["pairs"]["train"] < FEW_PAIRS:
        yield f"there are only {learn['pairs']['train']} pairs; {FEW_PAIRS} or more are usual"
    if held == 0:
        yield "nothing is held out: most of the log is of one user, conversation or trace. Log who asks, or log longer"
    elif held < FEW_HELD_OUT:
        yield f"{held} held-out prompts show only large differences ({_tells(held)}); log for longer"
    if prompts["largest_group"] > LARGE:
        yield (
            f"one user, conversation or trace has {prompts['largest_group']:.0%} of all requests; check that the field "
            "for users names the users"
        )
    if prompts["train_later_than_heldout"]:
        yield (
            f"{prompts['train_later_than_heldout']} prompts of the training part were asked after the first held-out "
            "prompt, by users who had asked before it, so the two parts are not separate in time"
        )


def _tells(prompts: int) -> str:
    """Return what so many prompts can decide where no answer differs (`algo.evidence`)."""
    worse = -lower_bound([0.0] * prompts, alpha=ALPHA, worst=-1.0)
    return f"a model that scores the same on each may be up to {worse:.2f} worse"


# ---- as text ----
def lines(report: Mapping[str, Any]) -> list[str]:
    """Return the report, a line each."""
    read, prompts, outcomes = report["read"], report["prompts"], report["outcomes"]
    systems = ", ".join(f"{name}: {count}" for name, count in read["formats"].items())
    said = [f"read      {read['rows']} rows of {read['files']} file{'s' * (read['files'] != 1)} ({systems})"]
    said.append(f"answers   {read['exchanges']}{_when(read)}, {_who(read)}")
    if read["logged_twice"]:
        said.append(f"          {read['logged_twice']} more were logged before and count once")
    if read["bad"]:
        said.append(f"left out  {read['bad']}")
        said += [f"          {each['count']} x {each['reason']} ({each['places'][0]})" for each in read["reasons"][:5]]
    masked = [f"{each['rule']} {each['count']}" for each in report["masked"] if each["count"]]
    said.append(f"masked    {', '.join(masked) or 'nothing was found'}")
    named = [f"{name} {each['count']} (mean {each['mean']:.2f})" for name, each in outcomes["names"].items()]
    named += [f"edited {outcomes['edited']}"] if outcomes["edited"] else []
    said.append(f"outcomes  of {outcomes['answers']} answers: {', '.join(named) or 'none'}")
    said.append(
        f"prompts   {prompts['distinct']} different ones in {prompts['asked']} requests; {prompts['near_duplicates']} "
        f"nearly the same as others; {prompts['train']} to train on, {prompts['heldout']} held out"
    )
    if prompts["asked_by_both_sides"]:
        said.append(
            f"          {prompts['asked_by_both_sides']} belonged to both parts, and a random choice put each into one"
        )
    for each in report["says"]["can"]:
        said.append(f"possible  kind {each['kind']} on {each['rows']} rows: {each['says']}")
    said += [f"lacking   {each}" for each in report["says"]["lacks"]]
    return said


def _when(read: Mapping[str, Any]) -> str:
    if read["first"] is None:
        return ", without times (taken in the order of the files)"
    without = f", {read['without_time']} without a time" if read["without_time"] else ""
    return f" from {read['first']} to {read['last']}{without}"


def _who(read: Mapping[str, Any]) -> str:
    parts = [f"{read['users']} users", f"{read['conversations']} conversations"]
    parts += [f"{read['several_turns']} with turns before them"] if read["several_turns"] else []
    parts += [f"{read['with_tools']} with tools"] if read["with_tools"] else []
    parts += [f"{read['cut_off']} cut off"] if read["cut_off"] else []
    return ", ".join(parts)


def as_markdown(report: Mapping[str, Any]) -> str:
    """Return the report as a page."""
    said = ["# What is in the logs", "", "```text", *lines(report), "```", "", "## What was masked", ""]
    said += ["| rule | masks | places |", "|---|---|---|"]
    said += [f"| {each['rule']} | {_cell(each['says'])} | {each['count']} |" for each in report["masked"]]
    said += [
        "",
        "No rule masks names, postal addresses and what only its context gives away: look through the rows.",
        "",
    ]
    if reasons := report["read"]["reasons"][:MOST_REASONS]:
        said += ["## What was left out", "", "| rows | why | for example |", "|---|---|---|"]
        said += [f"| {each['count']} | {_cell(each['reason'])} | {', '.join(each['places'])} |" for each in reasons]
        said.append("")
    said += _ways(report["says"]["can"])
    if lacks := report["says"]["lacks"]:
        said += ["## What is lacking", "", *(f"- {each}" for each in lacks), ""]
    return "\n".join(said)


def _ways(can: Sequence[Mapping[str, Any]]) -> list[str]:
    said: list[str] = []
    for each in can:
        head = f"## To learn from {each['rows']} rows by `kind: {each['kind']}`"
        said += [head, "", f"{each['says']}.", "", "```yaml", each["yaml"].rstrip(), "```", ""]
    return said


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
