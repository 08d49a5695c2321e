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
            says += f"; it pays the answers in the log {rule['paid']:.2f} on average"
        if rule["good"] is not None and rule["bad"] is not None:
            says += f", {rule['good']:.2f} for good ones and {rule['bad']:.2f} for the others"
        yaml = GRPO.format(reward=f'"{rule["reward"]}"')
        can.append({"kind": "grpo", "rows": rule["prompts"], "says": says, "yaml": yaml})
    if examples["train"]:
        says = "edited answers, and those with a score above a half, to imitate"
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
        yield "no answer has an outcome: nothing says which were good. --outcomes FILE joins thumbs, resolved, edited"
    if outcomes["unmatched"]:
        yield f"{outcomes['unmatched']} outcomes have an id that no answer, trace or conversation in the logs has"
    if outcomes["raters"] > 1 and outcomes["largest_rater"] > MOST_OF_ONE:
        yield (
            f"one of {outcomes['raters']} users gave {outcomes['largest_rater']:.0%} of the outcomes: what is learned "
            "is what that one wants"
        )
    if (
        outcomes["scored_again"] >= FEW_AGAIN
        and outcomes["contradicted"] > MOST_CONTRADICTED * outcomes["scored_again"]
    ):
        yield (
            f"of {outcomes['scored_again']} answers with several scores {outcomes['contradicted']} are called good and "
            "bad: raters want different things, or somebody means harm"
        )
    for name, (low, high) in outcomes["no_scale"].items():
        yield f"outcome {name!r} has values from {low:g} to {high:g}, and no scale that is known: give it as 0 to 1"
    if not learn["rules"]:
        judge = "a judge that nothing confirms"
        if outcomes["answers"]:
            judge = "a judge that agrees with the outcomes (groupwise logs judge)"
        yield f"no ready reward applies (GRPO needs one): write it, or take {judge}"
    if outcomes["answers"] and min(scored["good"], scored["bad"]) < FEW_SCORED:
        yield (
            f"{scored['good']} answers to train on are good and {scored['bad']} are not: to see whether a judge "
            f"agrees, it takes {FEW_SCORED} of each and more"
        )
    if learn["pairs"]["train"] and learn["pairs"]["train"] < FEW_PAIRS:
        yield f"{learn['pairs']['train']} pairs are few; {FEW_PAIRS} and more are usual"
    if held == 0:
        yield "nothing is held out: one user, conversation or trace has most of the log. Log who asked, or longer"
    elif held < FEW_HELD_OUT:
        yield f"{held} held-out prompts tell only large differences ({_tells(held)}); log for longer"
    if prompts["largest_group"] > LARGE:
        yield (
            f"one group (of a user, a conversation, a trace) has {prompts['largest_group']:.0%} of all exchanges: does "
            "the field for users name the users?"
        )
    if prompts["train_later_than_heldout"]:
        yield (
            f"{prompts['train_later_than_heldout']} prompts to train on were asked after the first that is held out, "
            "by users who had begun before: what changes with time is in both"
        )


def _tells(prompts: int) -> str:
    """Return what so many prompts can decide where no answer differs (`algo.evidence`)."""
    worse = -lower_bound([0.0] * prompts, alpha=ALPHA, worst=-1.0)
    return f"one that answers all as before may be {worse:.2f} worse"


# ---- as text ----
def lines(report: Mapping[str, Any]) -> list[str]:
    """Return the report, a line each."""
    read, prompts, outcomes = report["read"], report["prompts"], report["outcomes"]
    systems = ", ".join(f"{name}: {count}" for name, count in read["formats"].items())
    said = [f"read      {read['rows']} rows of {read['files']} file{'s' * (read['files'] != 1)} ({systems})"]
    said.append(f"answers   {read['exchanges']}{_when(read)}, {_who(read)}")
    if read["logged_twice"]:
        said.append(f"          {read['logged_twice']} more were logged twice")
    if read["bad"]:
        said.append(f"left out  {read['bad']}")
        said += [f"          {each['count']} x {each['reason']} ({each['places'][0]})" for each in read["reasons"][:5]]
    masked = [f"{each['rule']} {each['count']}" for each in report["masked"] if each["count"]]
    said.append(f"masked    {', '.join(masked) or 'nothing was found'}")
    named = [f"{name} {each['count']} (mean {each['mean']:.2f})" for name, each in outcomes["names"].items()]
    named += [f"edited {outcomes['edited']}"] if outcomes["edited"] else []
    said.append(f"outcomes  of {outcomes['answers']} answers: {', '.join(named) or 'none'}")
    said.append(
        f"prompts   {prompts['distinct']} of {prompts['asked']} that were asked; {prompts['near_duplicates']} are "
        f"nearly the same as others; {prompts['train']} to train on, {prompts['heldout']} held out"
    )
    if prompts["asked_by_both_sides"]:
        said.append(f"          {prompts['asked_by_both_sides']} were asked on both sides, and given to one by lot")
    for each in report["says"]["can"]:
        said.append(f"can       {each['kind']}, {each['rows']} rows: {each['says']}")
    said += [f"lacks     {each}" for each in report["says"]["lacks"]]
    return said


def _when(read: Mapping[str, Any]) -> str:
    if read["first"] is None:
        return ", without a time (their order counts)"
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
        "Names, addresses of the post and what only its context gives away have no rule: look through the rows.",
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
