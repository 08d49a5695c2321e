"""The keys of a server that have a name: made, listed, turned and revoked without a restart.

    STATE_DIR/keys.json     name, role, tenant, SHA-256 of the key, when it was made and turned, bounds; a key itself is
                            nowhere

    keys = KeyFile(state_dir)
    key = keys.add("phone-app", role="sample")      # shown once
    keys.find(key).name                             # "phone-app", until keys.revoke("phone-app")

A key is 256 random bits, so that its digest needs no salt and cannot be guessed back. A role is what its key may do:

    sample      chats, completions and batches, feedback on their answers, the names of models
    read        all that is only shown: status, metrics, jobs, rollouts, adapters and their files
    train       both, and jobs, adapters, and the API of Tinker's clients
    admin       everything, as with GROUPWISE_API_KEY

A key belongs to the owner, or to a tenant (`store.tenants`): it then sees what the keys of that tenant made, and
nothing else. No tenant's key is an admin's. The bounds `adapters`, `bytes` and `jobs` are those of the whole tenant,
and so is its `weight` in training: of several keys' the smallest counts.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from groupwise.errors import ConfigError, GroupwiseError, StorageError
from groupwise.store import files
from groupwise.store.tenants import OWNER, check_tenant, label
from groupwise.store.unchanged import Unchanged

Role = Literal["sample", "read", "train", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
FILE = "keys.json"
PREFIX = "gwk_"  # by which a key in a log or a repository is recognised

MOST_WEIGHT = 100

BOUNDS = ("requests_per_minute", "tokens_per_day", "concurrent_requests", "adapters", "bytes", "jobs", "weight")
OF_TENANTS = ("adapters", "bytes", "jobs")

Bound = Annotated[int, Field(ge=1)] | None

_NAME = re.compile(r"[a-zA-Z0-9][\w.-]{0,63}", re.ASCII)


class Key(BaseModel):
    """A key, without the key. Times are UTC, ISO 8601; `turned` is when the key was last replaced. Without a number a
    bound does not bound."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    role: Role
    digest: str
    made: str
    turned: str | None = None
    tenant: str = OWNER
    requests_per_minute: Bound = None
    tokens_per_day: Bound = None
    concurrent_requests: Bound = None
    adapters: Bound = None
    bytes: Bound = None
    jobs: Bound = None
    weight: Annotated[int, Field(ge=1, le=MOST_WEIGHT)] | None = None

    @property
    def label(self) -> str:
        """Return the name, behind the tenant's where it has one: no other key, also of another time, has it."""
        return label(self.tenant, self.name)


_KEYS = TypeAdapter(list[Key])


def digest(text: str) -> str:
    """Return the SHA-256 of a key, in hexadecimal digits."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


class KeyFile:
    """The keys in a state directory. A change by another process counts from the next request on."""

    def __init__(self, state_dir: Path):
        self.path = state_dir / FILE
        self._read = Unchanged[dict[str, Key]]()

    def all(self) -> list[Key]:
        """Return the keys, in the order in which they were made.

        Raises StorageError if the file is there and cannot be read: then no key is known.
        """
        return list(self._by_digest().values())

    def find(self, text: str) -> Key | None:
        """Return the key of this text; None if there is none, or not any more. Raises StorageError as `all`."""
        return self._by_digest().get(digest(text))

    def add(self, name: str, *, role: Role, tenant: str = OWNER, **bounds: int | None) -> str:
        """Make a key with some of `BOUNDS`, and return it, which cannot be shown again.

        Raises ConfigError for a name that is taken or cannot be one, for a bound or a role that the key cannot have,
        StorageError if the file cannot be read or written.
        """
        if not _NAME.fullmatch(name):
            what = "give it 1 to 64 letters, digits, hyphens, dots or underscores, a letter or digit first"
            raise ConfigError(f"{name[:80]!r} cannot name a key", field="name", hint=what)
        for field, bound in bounds.items():
            if bound is not None and bound < 1:
                raise ConfigError(f"{field} is {bound}", field=field, hint="give 1 or more, or leave it out")
            if field == "weight" and bound is not None and bound > MOST_WEIGHT:
                hint = "weights are relative: 100 beside 1 is a hundred times as much"
                raise ConfigError(f"weight is {bound}; it is 1 to {MOST_WEIGHT}", field=field, hint=hint)
            if bound is not None and tenant == OWNER and field in OF_TENANTS:
                hint = "give the key a tenant, too; the owner has what the disk has"
                raise ConfigError(f"{field} bounds a tenant, and the key {name} has none", field=field, hint=hint)
        if tenant != OWNER and check_tenant(tenant) and role == "admin":
            hint = "give it train, which may do all that a tenant can"
            raise ConfigError(f"a key of the tenant {tenant} cannot be an admin's", field="role", hint=hint)
        with self._changing() as keys:
            if name in keys:
                hint = f"choose another name, or give it a new key: groupwise keys turn {name}"
                raise ConfigError(f"there is a key {name} already ({keys[name].role})", field="name", hint=hint)
            text = _new()
            given: dict[str, Any] = dict(bounds)
            keys[name] = Key(name=name, role=role, digest=digest(text), made=_now(), tenant=tenant, **given)
        return text

    def named(self, name: str) -> Key:
        """Return the key of a name. Raises as `turn`."""
        return self._named({key.name: key for key in self.all()}, name)

    def of(self, tenant: str) -> list[Key]:
        """Return the keys of a tenant. Raises StorageError as `all`."""
        return [key for key in self.all() if key.tenant == tenant]

    def weight(self, tenant: str) -> int:
        """Return a tenant's weight when tenants share the training: the smallest weight of its keys; 1 if no key has
        one, or if the keys cannot be read."""
        with suppress(StorageError):
            return self.bound(tenant, "weight") or 1
        return 1

    def bound(self, tenant: str, name: str) -> int | None:
        """Return one of `OF_TENANTS`, or `weight`: the smallest that a key of the tenant has. Raises StorageError as
        `all`."""
        return min((bound for key in self.of(tenant) if (bound := getattr(key, name)) is not None), default=None)

    def turn(self, name: str) -> str:
        """Replace a key by a new one of its role, and return that; the old one is worth nothing from now on.

        Raises ConfigError if there is none of this name, StorageError as `add`.
        """
        with self._changing() as keys:
            old, text = self._named(keys, name), _new()
            keys[name] = old.model_copy(update={"digest": digest(text), "turned": _now()})
        return text

    def revoke(self, name: str) -> Key:
        """End a key, and return what it was. Raises as `turn`."""
        with self._changing() as keys:
            old = self._named(keys, name)
            del keys[name]
        return old

    @staticmethod
    def _named(keys: dict[str, Key], name: str) -> Key:
        if name not in keys:
            known = ", ".join(keys) or "none"
            raise ConfigError(f"there is no key {name[:80]!r}", field="name", hint=f"the keys are: {known}")
        return keys[name]

    @contextmanager
    def _changing(self) -> Iterator[dict[str, Key]]:
        """Yield the keys by name for changes, and write them at the end of the block. No other process can change them
        meanwhile."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with files.locked(self.path.parent):
                keys = {key.name: key for key in self.all()}
                yield keys
                rows = [key.model_dump(exclude_defaults=True) for key in keys.values()]
                files.replace(self.path, json.dumps(rows, indent=1) + "\n", mode=0o600)
        except GroupwiseError:
            raise
        except OSError as error:
            raise StorageError.of(error, f"cannot write {self.path}: {error.strerror or error}") from error

    def _by_digest(self) -> dict[str, Key]:
        """Return the keys, read again where the file is another one than before. Raises StorageError."""
        try:
            return self._read.get(str(self.path), self._keys)
        except FileNotFoundError:
            return {}
        except StorageError:
            raise
        except OSError as error:
            raise StorageError.of(error, f"cannot read {self.path}: {error.strerror or error}") from error

    def _keys(self) -> dict[str, Key]:
        hint = "put a copy of it back, or remove it and make new keys; GROUPWISE_API_KEY is not kept there"
        return {key.digest: key for key in files.read_json(self.path, _KEYS, hint=hint) or ()}


def _new() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def _now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
