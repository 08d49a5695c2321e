"""Places each tenant's things in the state directory, and checks tenants' names.

    STATE_DIR/                        the owner's: adapters/, tinker/, images/, as without tenants
    STATE_DIR/tenants/acme/           the same of the tenant acme
    STATE_DIR/ledger.db               jobs, rollouts and feedback of all, each row with its tenant; "" is the owner

A tenant is called by lower-case letters, digits and hyphens. An adapter's name has no colon: `acme:math` in what the
owner reads (metrics, usage, the log) is the tenant's, and nothing that a client can type means it.
"""

from __future__ import annotations

import re
from pathlib import Path

from groupwise.errors import ConfigError

OWNER = ""  # in the place of a tenant
FOLDER = "tenants"
BETWEEN = ":"  # a tenant and its thing, in what the owner reads

_TENANT = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")


def is_tenant(text: str) -> bool:
    """Return whether `text` can be a tenant's name, and therefore a directory's."""
    return _TENANT.fullmatch(text) is not None


def check_tenant(text: str) -> str:
    """Return `text`, or raise ConfigError if no tenant can be called so."""
    if not is_tenant(text):
        what = "give it 1 to 32 lower-case letters, digits or hyphens, a letter or digit first"
        raise ConfigError(f"{text[:80]!r} cannot name a tenant", field="tenant", hint=what)
    return text


def home_of(state_dir: Path, tenant: str) -> Path:
    """Return the directory of a tenant's things; the owner's is the state directory itself."""
    return state_dir if tenant == OWNER else state_dir / FOLDER / check_tenant(tenant)


def tenants_in(state_dir: Path) -> list[str]:
    """Return the tenants that have a directory, sorted: those that have ever asked for something."""
    try:
        return sorted(each.name for each in (state_dir / FOLDER).iterdir() if is_tenant(each.name))
    except FileNotFoundError:
        return []


def label(tenant: str, name: str) -> str:
    """Return the owner's name of a tenant's thing."""
    return name if tenant == OWNER else f"{tenant}{BETWEEN}{name}"
