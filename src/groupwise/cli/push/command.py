"""`groupwise push RUN --to OWNER/NAME`: the command line of `cli/push`.

groupwise push arithmetic --to me/arithmetic --dry-run     # the cards and the files, without network or token
groupwise push arithmetic --to me/arithmetic               # the run's adapter, in a private repository
groupwise push arithmetic@80 --to me/arithmetic --format gguf --dtype q8_0 --public
groupwise push arithmetic --to me/arithmetic --dataset --space
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from groupwise.cli.adapters import ExportFormat
from groupwise.cli.frame import AsJson, Debug, examples, print_table, quiet_libraries
from groupwise.cli.output import print_json, print_line, say
from groupwise.errors import ConfigError

if TYPE_CHECKING:
    from groupwise.cli.push.contents import Repository


def add_to(app: typer.Typer) -> None:
    """Make the command part of `groupwise`."""
    app.command(
        epilog=examples(
            "groupwise push arithmetic --to me/arithmetic --dry-run",
            "groupwise push arithmetic --to me/arithmetic",
            "groupwise push arithmetic@80 --to me/arithmetic-gguf --format gguf --dtype q8_0 --public",
            "groupwise push arithmetic --to me/arithmetic --dataset --space",
        )
    )(push)


def push(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run (its directory, its name), or RUN@N.", show_default=False)
    ],
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="OWNER/NAME", help="The repository on the hub.", show_default=False),
    ] = None,
    format_: Annotated[
        ExportFormat | None,
        typer.Option(
            "--format",
            help="peft: the adapter; merged, gguf: the whole model. Default: the adapter, if the run trained one.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Of a whole model: auto (as the base's files), float32, bfloat16, float16; of gguf also q8_0.",
            show_default=False,
        ),
    ] = None,
    dataset: Annotated[
        bool, typer.Option("--dataset", help="Also the run's rollouts, as the dataset of that name.")
    ] = False,
    space: Annotated[bool, typer.Option("--space", help="Also a Space of that name, which chats with it.")] = False,
    public: Annotated[bool, typer.Option("--public", help="For everybody; without it, private.")] = False,
    base_model: Annotated[
        str | None,
        typer.Option(
            metavar="OWNER/NAME",
            help="The base's name on the hub, where the run has it from a directory.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the cards and the files; without network or token.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Upload what a run trained to the Hugging Face hub, with a card of what was measured. Private unless --public.

    Given again it continues: what has arrived is not sent again. Keys and tokens that are known as such are masked.
    """
    repo = _checked(to, run)
    from groupwise.cli.push.contents import Wanted, checked_format, contents
    from groupwise.cli.push.facts import read_facts
    from groupwise.cli.push.upload import Hub
    from groupwise.store.locate import find_policy
    from groupwise.store.masking import Masking

    policy, masking = find_policy(run), Masking()
    facts = read_facts(policy, base_model=base_model)
    asked = Wanted(
        repo=repo, format=None if format_ is None else str(format_), dtype=dtype, dataset=dataset, space=space
    )
    checked_format(facts, asked)  # before anything is asked of the hub or loaded
    with ExitStack() as stack:
        if policy.adapter is not None:
            stack.enter_context(policy.adapter.held())
        hub = None if dry_run else Hub()
        if hub is not None:
            hub.check_owner(repo)
            if facts.base.hub and not facts.base.license:
                facts = replace(facts, base=replace(facts.base, license=hub.license_of(facts.base.hub)))
        quiet_libraries()
        scratch = Path(stack.enter_context(TemporaryDirectory()))
        repositories = contents(facts, asked, scratch=scratch, masking=masking, note=say)
        if masking.count:
            say(f"masked {masking.count} places that look like a key, a token or a password")
        if hub is None:
            return _print_all(repositories, public=public, as_json=as_json)
        addresses = [hub.push(each, public=public, note=say) for each in repositories]
    if as_json:
        return print_json(_as_json(repositories, public=public) | {"addresses": addresses})
    for address in addresses:
        print_line(address)


def _checked(to: str | None, run: str) -> str:
    """Return the repository's name. Raises ConfigError where it is left out, or no such name."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    example = f"groupwise push {run} --to OWNER/NAME"
    if to is None:
        raise ConfigError(
            "--to is left out: the repository on the hub that this goes to",
            hint=f"{example}, OWNER being you or an organisation; --dry-run first shows what goes up",
            field="--to",
        )
    named = to.removeprefix("hf://").removeprefix("https://huggingface.co/").rstrip("/")
    try:
        validate_repo_id(named)
    except HFValidationError as error:
        raise ConfigError(f"--to {to!r} is no name of a repository: {error}", hint=example, field="--to") from None
    if "/" not in named:
        raise ConfigError(
            f"--to {to!r} lacks its owner: you, or an organisation",
            hint=f"groupwise push {run} --to OWNER/{named}",
            field="--to",
        )
    return named


def _print_all(repositories: Sequence[Repository], *, public: bool, as_json: bool) -> None:
    """Print what would go up."""
    if as_json:
        return print_json(_as_json(repositories, public=public))
    for each in repositories:
        sizes = each.sizes()
        print_line(f"{each.kind} {each.name}, {'public' if public else 'private'}, {sum(sizes.values()):,} bytes:")
        print_table([(f"  {name}", f"{size:,}") for name, size in sizes.items()])
        print_line("")
        for line in each.card.splitlines():
            print_line(line)
        print_line("")
    say("nothing was sent (--dry-run)")


def _as_json(repositories: Sequence[Repository], *, public: bool) -> dict[str, object]:
    shown = [
        {"repository": each.name, "kind": each.kind, "public": public, "files": each.sizes(), "card": each.card}
        for each in repositories
    ]
    return {"repositories": shown}
