"""`groupwise logs ...`: what people have logged of a model, as prompts to learn from (docs/logs.md).

groupwise logs import requests.jsonl --to from-logs                            # OpenAI's and Anthropic's requests
groupwise logs import traces/ --to from-logs --outcomes thumbs.csv             # spans, exports of Langfuse, LangSmith
groupwise logs rules                                                           # what is masked
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from groupwise.cli.frame import OPTIONS, AsJson, Debug, examples, print_table
from groupwise.cli.output import print_json, print_line
from groupwise.errors import ConfigError

if TYPE_CHECKING:
    from groupwise.store.masking import Rule

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
