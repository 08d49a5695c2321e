"""`groupwise keys ...`: keys of a server that have a name and a role, made and ended without a restart.

groupwise keys add phone-app --role sample     # prints the key, once
groupwise keys list
groupwise keys turn phone-app                  # another key of the same role; the old one is worth nothing
groupwise keys revoke phone-app
groupwise keys add acme-app --role train --tenant acme    # of a tenant, which sees its own and the base model
groupwise keys log --tenant acme                          # what was changed with its keys
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from groupwise.cli.frame import OPTIONS, AsJson, Debug, examples, print_table
from groupwise.cli.output import print_json, print_line, say
from groupwise.cli.serve import STATE
from groupwise.errors import ConfigError
from groupwise.platform import is_locked

if TYPE_CHECKING:
    from groupwise.store.audit import Change
    from groupwise.store.keys import Key, KeyFile, Role

app = typer.Typer(help="Keys of a server: one for each program that uses it, with a role; no restart.", **OPTIONS)

Name = Annotated[str, typer.Argument(metavar="NAME", help="What the key is called, as in the server's log.")]
StateDir = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        metavar="DIR",
        help="That of the server, on the server's machine.",
        show_default="that of the server that runs, or ran, here",
    ),
]
STATE_DIR = Path("groupwise-state")


@app.command(
    epilog=examples(
        "groupwise keys add phone-app --role sample --tokens-per-day 1000000",
        "groupwise keys add grafana --role read",
        "groupwise keys add acme-app --role train --tenant acme --adapters 5 --jobs 2 --weight 3",
    )
)
def add(
    name: Name,
    role: Annotated[str, typer.Option(metavar="ROLE", help="sample, read, train or admin (docs/server.md).")],
    requests_per_minute: Annotated[
        int | None, typer.Option(metavar="N", help="More are answered 429.", show_default=False)
    ] = None,
    tokens_per_day: Annotated[
        int | None, typer.Option(metavar="N", help="Of prompts and completions, UTC; then 429.", show_default=False)
    ] = None,
    concurrent_requests: Annotated[
        int | None, typer.Option(metavar="N", help="Answered at once; more wait.", show_default=False)
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option(metavar="TENANT", help="Whose it is: sees only what keys of it made.", show_default=False),
    ] = None,
    adapters: Annotated[
        int | None, typer.Option(metavar="N", help="That its tenant may have.", show_default=False)
    ] = None,
    bytes_: Annotated[
        int | None, typer.Option("--bytes", metavar="N", help="That its tenant may keep.", show_default=False)
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(metavar="N", help="Of its tenant that wait or run.", show_default=False)
    ] = None,
    weight: Annotated[
        int | None,
        typer.Option(metavar="N", help="Of its tenant's share of the training: 1 to 100.", show_default=False),
    ] = None,
    state_dir: StateDir = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Make a key and print it. It is kept nowhere: what the server has is its digest."""
    state_dir = _meant(state_dir)
    keys = _keys(state_dir)
    first = not keys.all()
    bounds = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_day": tokens_per_day,
        "concurrent_requests": concurrent_requests,
        "adapters": adapters,
        "bytes": bytes_,
        "jobs": jobs,
        "weight": weight,
    }
    key = keys.add(name, role=_role(role), tenant=_tenant(tenant), **bounds)
    _logged(state_dir, "add", keys.named(name))
    _print_key(name, key, as_json=as_json)
    if first:
        whose = f"the server with the state directory {state_dir}"
        say(f"from now on {whose} asks every request for a key: this one, or its GROUPWISE_API_KEY")


@app.command("list")
def list_(state_dir: StateDir = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """Show the names and roles of the keys, and when they were made."""
    state_dir = _meant(state_dir)
    keys = _keys(state_dir).all()
    if as_json:
        print_json([key.model_dump(exclude={"digest"}) for key in keys])
    elif keys:
        titles = ("name", "role", "tenant", "made", "turned", "requests a minute", "tokens a day", "at once")
        print_table([(*titles, "adapters", "bytes", "jobs", "weight"), *(_row(key) for key in keys)])
    else:
        say(f"no keys in {state_dir}; make one: groupwise keys add NAME --role sample")


@app.command()
def turn(name: Name, state_dir: StateDir = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """Replace a key by a new one of its role, and print that."""
    state_dir = _meant(state_dir)
    keys = _keys(state_dir)
    key = keys.turn(name)
    _logged(state_dir, "turn", keys.named(name))
    _print_key(name, key, as_json=as_json)


@app.command()
def revoke(name: Name, state_dir: StateDir = None, debug: Debug = False) -> None:
    """End a key: the server's next request with it is refused. Where no key is left, GROUPWISE_API_KEY alone counts."""
    state_dir = _meant(state_dir)
    keys = _keys(state_dir)
    key = keys.revoke(name)
    _logged(state_dir, "revoke", key)
    say(f"{name} ({key.role}) is worth nothing from now on")
    if not keys.all():
        say("no named key is left: a server without GROUPWISE_API_KEY now answers everybody who reaches it")


@app.command("log", epilog=examples("groupwise keys log --tenant acme --limit 20", "groupwise keys log --json"))
def log_(
    tenant: Annotated[
        str | None, typer.Option(metavar="TENANT", help="Only what its keys changed.", show_default=False)
    ] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="The newest N.")] = 100,
    state_dir: StateDir = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show what was changed with the keys, and to them, the newest first: who, when, what, and what came of it."""
    from groupwise.store.audit import AuditLog

    state_dir = _meant(state_dir)
    book = AuditLog(state_dir.absolute())
    changes = book.read_all(limit=limit) if tenant is None else book.read(_tenant(tenant), limit=limit)
    if as_json:
        print_json([change.model_dump() for change in changes])
    elif changes:
        rows = [(change.at, change.who, change.method, _what(change), str(change.status)) for change in changes]
        print_table([("when", "who", "how", "what", "status"), *rows])
    else:
        say(f"nothing was changed yet, as far as {state_dir} says")


def _what(change: Change) -> str:
    named = " ".join(f"{name}={value}" for name, value in change.things.items())
    return f"{change.route} {named}".strip()


def _logged(state_dir: Path, how: str, key: Key) -> None:
    """Write into the audit log what was done to a key, with this command."""
    from groupwise.store.audit import AuditLog, Change, now

    things = {"key": key.label, "role": key.role}
    change = Change(at=now(), who="groupwise keys", method=how, route="keys", things=things, status=200)
    AuditLog(state_dir.absolute()).append(change)


def _row(key: Key) -> tuple[str, ...]:
    from groupwise.store.keys import BOUNDS

    return (
        key.name,
        key.role,
        key.tenant or "-",
        key.made,
        key.turned or "-",
        *("-" if (bound := getattr(key, name)) is None else str(bound) for name in BOUNDS),
    )


def _meant(named: Path | None) -> Path:
    """Return the state directory that is meant: the one that is named, or of those here the one whose server runs, or
    the only one of which a server has begun; a server of a run has its own. Raises ConfigError for several."""
    from groupwise.server.listen import LOCK

    if named is not None:
        return named
    begun = [each for each in (STATE_DIR, *sorted(STATE.glob("*"))) if (each / LOCK).exists()]
    running = [each for each in begun if is_locked(each / LOCK)]
    found = running or begun or [STATE_DIR]
    if len(found) > 1:
        raise ConfigError(
            f"{len(found)} servers {'run' if running else 'were begun'} here, each with keys of its own",
            hint=f"--state-dir says which is meant: {', '.join(map(str, found))}",
            field="--state-dir",
        )
    if found != [STATE_DIR]:
        say(f"state directory {found[0]}")
    return found[0]


def _keys(state_dir: Path) -> KeyFile:
    from groupwise.store.keys import KeyFile

    return KeyFile(state_dir.absolute())


def _role(text: str) -> Role:
    """Return the role of this name. Raises ConfigError."""
    from groupwise.store.keys import ROLES

    for role in ROLES:
        if role == text:
            return role
    raise ConfigError(f"--role is {text[:80]!r}", field="role", hint=f"it is one of {', '.join(ROLES)}")


def _tenant(text: str | None) -> str:
    """Return the tenant that is asked for. Raises ConfigError, also for an empty name: it would be the owner's."""
    from groupwise.store.tenants import OWNER, check_tenant

    return OWNER if text is None else check_tenant(text)


def _print_key(name: str, key: str, *, as_json: bool) -> None:
    print_json({"name": name, "key": key}) if as_json else print_line(key)
