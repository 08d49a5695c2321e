"""Identifies the sender of a request by its key, and says what keys of each role may do (`groupwise keys`,
`store.keys`).

    Keyring.of      a request's headers -> who sent it: the owner, or the holder of a named key; None without a key
    needed          a method and a path -> the role that it asks for
    may             whether keys of a role are enough for what is needed

The table is by the paths' beginnings, of which the longest counts; what it does not name is the owner's. It is read
before the body of a request is read.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from starlette.datastructures import Headers

from groupwise.errors import GroupwiseError
from groupwise.store.keys import Key, KeyFile, Role, digest
from groupwise.store.tenants import OWNER as OWNERS

TINKER, TINKER_OPENAI = "/api/v1/", "/oai/api/v1/"  # routes of Tinker's clients
TINKER_KEY = "tml-"  # how the key has to begin for them
SHOWS = ("GET", "HEAD", "OPTIONS")

# path -> what showing there asks for, and what changing does
NEEDED: dict[str, tuple[Role, Role]] = {
    "/": ("read", "admin"),
    "/v1/tenants": ("admin", "admin"),
    "/v1/models": ("sample", "admin"),
    "/v1/chat/completions": ("sample", "sample"),
    "/v1/completions": ("sample", "sample"),
    "/v1/messages": ("sample", "sample"),
    "/v1/responses": ("sample", "sample"),
    "/v1/feedback": ("read", "sample"),
    "/v1/train/": ("read", "train"),
    "/v1/adapters": ("read", "train"),
    TINKER: ("train", "train"),
    TINKER_OPENAI: ("sample", "sample"),
}

ENOUGH: dict[Role, frozenset[Role]] = {  # a role -> what its keys may do
    "sample": frozenset({"sample"}),
    "read": frozenset({"read"}),
    "train": frozenset({"sample", "read", "train"}),
    "admin": frozenset({"sample", "read", "train", "admin"}),
}


class RoleError(GroupwiseError):
    """The key is known, and keys of its role may not do this."""

    code, status, exit_code = "role_too_small", 403, 2


class OwnersError(GroupwiseError):
    """The key is a tenant's, and only the owner may do this."""

    code, status, exit_code = "owners_only", 403, 2


@dataclass(frozen=True)
class Caller:
    """The sender of a request. `key` is None for the owner, whose key is GROUPWISE_API_KEY."""

    role: Role
    key: Key | None = None

    @property
    def tenant(self) -> str:
        return OWNERS if self.key is None else self.key.tenant

    @property
    def label(self) -> str:
        """Return who it is in logs and counts."""
        return "owner" if self.key is None else self.key.label

    def check(self, method: str, path: str) -> None:
        """Raise RoleError unless the role is enough for a request of this method to this path."""
        if not may(self.role, method, path):
            enough = [role for role, what in ENOUGH.items() if needed(method, path) in what]
            name = "owner" if self.key is None else self.key.name
            raise RoleError(
                f"the key {name} is for {self.role}, which is not enough for {method} here",
                hint=f"use a key for {' or '.join(enough)}: groupwise keys add NAME --role {enough[0]}",
            )


OWNER = Caller("admin")


def needed(method: str, path: str) -> Role:
    """Return the role that a request asks for."""
    begin = max((each for each in NEEDED if path.startswith(each)), key=len, default="/")
    shows, changes = NEEDED[begin]
    return shows if method in SHOWS else changes


def may(role: Role, method: str, path: str) -> bool:
    """Return whether keys of a role are enough for a request."""
    return needed(method, path) in ENOUGH[role]


class Keyring:
    """The key of the configuration, and those of the state directory. Without either, everybody is the owner."""

    def __init__(self, api_key: str | None, keys: KeyFile):
        self._owner = None if api_key is None else digest(api_key)
        self._keys = keys

    def of(self, headers: Headers, path: str) -> Caller | None:
        """Return who sent a request: by `authorization: Bearer KEY`, or `x-api-key: KEY` as Anthropic's and Tinker's
        clients send it.

        Raises StorageError if the file of keys cannot be read, unless it is the owner.
        """
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if not given:
            scheme, given = "bearer", headers.get("x-api-key", "")
        given = given.strip()
        if path.startswith((TINKER, TINKER_OPENAI)):
            given = given.removeprefix(TINKER_KEY)
        bearer = scheme.lower() == "bearer"
        if self._owner is not None and bearer and hmac.compare_digest(digest(given), self._owner):
            return OWNER
        if self._owner is None and not self._keys.all():
            return OWNER
        key: Key | None = self._keys.find(given) if bearer and given else None
        return None if key is None else Caller(key.role, key)
