"""`groupwise logs ...`: what people have logged of a model, as prompts to learn from (docs/logs.md).

groupwise logs import requests.jsonl --to from-logs                            # OpenAI's and Anthropic's requests
groupwise logs import traces/ --to from-logs --outcomes thumbs.csv             # spans, exports of Langfuse, LangSmith
groupwise logs rules                                                           # what is masked
groupwise logs judge from-logs groupwise.rewards.judge:judge --args '{...}'    # may this judge be believed?
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from groupwise.cli.frame import OPTIONS, AsJson, Debug, examples, print_table
from groupwise.cli.output import json_alone, print_json, print_line
from groupwise.errors import ConfigError

if TYPE_CHECKING:
    from groupwise.store.masking import Rule
    from groupwise.tasks.logs.calibration import Bias, Calibration, Graded, Share

app = typer.Typer(help="Logs of a model's requests, as prompts to learn from.", **OPTIONS)


@app.command(
    "import",
    epilog=examples(
        "groupwise logs import requests.jsonl --to from-logs",
        "groupwise logs import traces/ --to from-logs --outcomes thumbs.csv",
        "groupwise logs import requests.jsonl --to from-logs --mask 'customer=CUST-[0-9]+' --keep ip_address",
    ),
)
def import_(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE...",
            help="Files (JSON lines, JSON, CSV, Parquet; .gz), folders of them, or the directory of a run.",
            show_default=False,
        ),
    ],
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="FOLDER", help="Where the rows and the report go.", show_default=False),
    ] = None,
    outcomes: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Outcomes by id: thumb, resolved, retried, score, edited.", show_default=False
        ),
    ] = None,
    turns: Annotated[
        str, typer.Option(metavar="last|each", help="A prompt before each request's answer, or each turn's.")
    ] = "last",
    heldout: Annotated[float, typer.Option(metavar="SHARE", help="How much is held out, 0 to 1.")] = 0.2,
    alike: Annotated[
        float, typer.Option(metavar="SHARE", help="Prompts that share so much of their words are one.")
    ] = 0.8,
    mask: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=REGEX", help="Mask this, too; may be repeated.", show_default=False),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE", help="Do not mask personal data by this rule; may be repeated.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Turn logs into prompts, examples and pairs, masked, without duplicates, split; and say what can be learned.

    The logs are only read. What each rule masks: groupwise logs rules.
    """
    from groupwise.store.masking import Masking
    from groupwise.tasks.logs.importing import ImportConfig, check_free, import_logs, write
    from groupwise.tasks.logs.report import lines

    if to is None:
        hint = "groupwise logs import requests.jsonl --to from-logs"
        raise ConfigError("--to is left out: the folder that the rows go to", hint=hint, field="--to")
    config = ImportConfig(turns=turns, heldout=heldout, alike=alike, outcomes=outcomes)
    masking = Masking(rules=_rules(mask or (), keep or ()))
    check_free(to)
    imported = import_logs(sources, config, masking=masking)
    written = write(imported, to)
    if as_json:
        return print_json({"folder": str(to), "files": written, "report": imported.report})
    for line in lines(imported.report):
        print_line(line)
    print_line(f"written   {to}: {', '.join(written)}")


@app.command(
    epilog=examples(
        "groupwise logs judge from-logs my_rewards:polite",
        "groupwise logs judge from-logs groupwise.rewards.judge:judge --args "
        '\'{"base_url": "http://127.0.0.1:8000/v1", "model": "Qwen/Qwen3-8B", "rubric": "Is it right and brief?"}\'',
    )
)
def judge(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="What `import` wrote, with outcomes.", show_default=False)
    ],
    reward: Annotated[
        str, typer.Argument(metavar="REWARD", help="module:function, as under `rewards` in a run.", show_default=False)
    ],
    args: Annotated[str, typer.Option("--args", metavar="JSON", help="Options, as under `args` in a run.")] = "{}",
    code: Annotated[
        Path, typer.Option("--folder", metavar="DIR", help="Where the reward's module is; default: here.")
    ] = Path(),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Compare a judge, or any reward, with the outcomes of a log: is it right more often than by chance?

    Exit code 1 where it is not, or too little is known. A judge is asked once about each answer with a score, and once
    more where a prompt has several.
    """
    from groupwise.cli.findings import json_options
    from groupwise.rewards.member import load_members
    from groupwise.tasks.logs.calibration import calibrate
    from groupwise.tasks.logs.judging import grade, read_scored

    options = json_options(args)
    prompts = read_scored(folder)
    (function,) = load_members([{"function": reward, "args": options}], folder=code)
    if missing := function.missing({"answer"} if all("answer" in each.columns for each in prompts) else ()):
        hint = "give it under --args; of `answer`, the log must have one in every row"
        raise ConfigError(f"{reward} needs {' and '.join(map(repr, missing))}", hint=hint, field="--args")
    with json_alone(as_json):
        model = options.get("model")
        graded, failed = grade(prompts, function, model=model if isinstance(model, str) else None)
    found = calibrate(graded)
    if as_json:
        print_json({"believed": False, "failed": failed} if found is None else asdict(found) | {"failed": failed})
    else:
        for line in _calibration(found, graded, failed):
            print_line(line)
    if found is None or not found.believed:
        raise typer.Exit(1)


def _calibration(found: Calibration | None, graded: Sequence[Graded], failed: int) -> Iterator[str]:
    good = sum(each.good for each in graded)
    lost = f", {failed} more got no grade" if failed else ""
    yield f"answers    {len(graded)} graded, {good} of them good by their outcomes{lost}"
    if found is None:
        yield "verdict    not known: both halves of the prompts need good and bad answers"
        return
    chosen = f"chosen on {found.chosen_on} answers, tested on the others"
    yield f"threshold  above {found.threshold:.3g} is a good grade; {chosen}"
    yield f"good       {_interval(found.good_seen)} get a good grade"
    yield f"bad        {_interval(found.bad_seen)} get a bad grade"
    yield f"agrees     {_interval(found.agrees)}; always giving the commoner verdict: {found.base_rate:.0%}"
    yield f"length     {_bias(found.length_bias, 'longer answers', 'shorter ones')}"
    yield f"own style  {_bias(found.own_bias, 'answers of its own model', 'others')}"
    if found.place_bias is None:
        yield "place      not known: no prompt has two answers with a score"
    else:
        place = found.place_bias
        yield (
            f"place      answers in the first half of those shown together are graded {place.value:+.3f} "
            f"({place.low:+.3f} to {place.high:+.3f}); {found.turned_verdicts} of {place.of} verdicts depend on it"
        )
    yield f"verdict    {'believed' if found.believed else 'refused'}: {found.reason}"


def _interval(share: Share) -> str:
    return f"{share.value:.0%} ({share.low:.0%} to {share.high:.0%}) of {share.of}"


def _bias(bias: Bias | None, one: str, other: str) -> str:
    if bias is None:
        return f"not known: there are no {one} to compare with {other} that are as good"
    found = "BIASED: " if bias.found else ""
    points = f"{100 * bias.difference:+.0f} points ({100 * bias.low:+.0f} to {100 * bias.high:+.0f})"
    return f"{found}{one} get a good grade {points} more often than equally good {other}"


@app.command(epilog=examples("groupwise logs rules", "groupwise logs rules --json"))
def rules(as_json: AsJson = False, debug: Debug = False) -> None:
    """List what is masked: keys and tokens always, personal data unless --keep names its rule."""
    from groupwise.store.masking import PERSONAL, SECRETS

    listed = [(rule, kind) for kind, rules in (("secret", SECRETS), ("personal", PERSONAL)) for rule in rules]
    if as_json:
        rows = [{"rule": rule.name, "kind": kind, "says": rule.says, "shape": rule.shape} for rule, kind in listed]
        return print_json({"rules": rows})
    print_table([("rule", "kind", "masks"), *((rule.name, kind, rule.says) for rule, kind in listed)])


def _rules(more: Sequence[str], keep: Sequence[str]) -> list[Rule]:
    """Return the rules of an import: what is asked for first, secrets, and personal data that is not to be kept."""
    from groupwise.store.masking import PERSONAL, SECRETS, Rule

    personal = {rule.name: rule for rule in PERSONAL}
    for name in keep:
        if name not in personal:
            held = ", ".join(personal)
            raise ConfigError(f"--keep is {name!r}; personal data is masked by {held}", field="--keep")
    found: list[Rule] = []
    for each in more:
        name, equals, shape = each.partition("=")
        taken = {rule.name for rule in (*SECRETS, *PERSONAL, *found)}
        if not equals or not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in taken:
            hint = "--mask 'customer=CUST-[0-9]+'; the name is of small letters, digits and _, and of no other rule"
            raise ConfigError(f"--mask is {each!r}; it must be NAME=REGEX", hint=hint, field="--mask")
        try:
            groups = re.compile(shape).groups
        except re.error as error:
            raise ConfigError(f"--mask {name}: {shape!r} is no regular expression: {error}", field="--mask") from None
        if groups or not shape:
            message = (
                f"--mask {name}: {shape!r} has groups; write (?:...) for (...)" if groups else f"--mask {name} is empty"
            )
            raise ConfigError(message, field="--mask")
        found.append(Rule(name, shape, shape, f"[{name}]"))
    return [*found, *SECRETS, *(rule for name, rule in personal.items() if name not in keep)]
