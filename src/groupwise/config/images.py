"""The addresses that images may be fetched from: none, unless a configuration names their hosts.

    images: {allowed_hosts: [images.example.com, "*.cdn.example.com", "http://127.0.0.1:9000"]}

AllowedHost     one entry: scheme, host, port
allowed(url)    the entry that admits a URL, and the URL's parts; ValueError where there is none

A URL is taken apart by one strict pattern, and what is connected to is made of the parts: there is no second parser
that could read another host in it.
"""

from __future__ import annotations

import ipaddress
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeGuard
from urllib.parse import quote

from pydantic import AfterValidator

from groupwise.config.section import Section, Texts

PORTS = {"https": 443, "http": 80}
LONGEST_URL = 8192
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = rf"{_LABEL}(?:\.{_LABEL})*"
_REST = r"(?::(?P<port>[0-9]{1,5}))?"
_ENTRY = re.compile(
    rf"(?:(?P<scheme>https?)://)?(?P<host>\[[0-9a-f:.]+\]|(?:\*\.)?{_NAME}){_REST}/?", re.IGNORECASE | re.ASCII
)
_URL = re.compile(
    rf"(?P<scheme>https?)://(?P<host>\[[0-9a-f:.]+\]|{_NAME}){_REST}(?P<rest>[/?#].*)?",
    re.IGNORECASE | re.ASCII | re.DOTALL,
)
_HINT = "write a host, as in images.example.com, *.example.com, http://localhost:9000 or https://10.0.0.5"


@dataclass(frozen=True)
class AllowedHost:
    """An entry of `allowed_hosts`. `name` is in lower case; with `below` what is allowed are the names below it."""

    scheme: str
    name: str
    port: int
    below: bool = False

    @property
    def is_spelt_out(self) -> bool:
        """Return whether the entry names a machine itself, as an address or localhost: then the address need not be
        public."""
        return self.name == "localhost" or address_of(self.name) is not None

    def admits(self, scheme: str, name: str, port: int) -> bool:
        is_named = name.endswith(f".{self.name}") if self.below else name == self.name
        return is_named and (scheme, port) == (self.scheme, self.port)

    @classmethod
    def of(cls, text: str) -> AllowedHost:
        """Return the entry that is written so. Raises ValueError."""
        found = _ENTRY.fullmatch(text)
        if found is None:
            raise ValueError(f"{text[:80]!r} is no host; {_HINT}")
        scheme, host, below = (found["scheme"] or "https").lower(), found["host"], found["host"].startswith("*.")
        name = _name(host.removeprefix("*."))
        if name is None or (below and ("." not in name or address_of(name) is not None)):
            raise ValueError(f"{text[:80]!r} is no host whose images can be allowed; {_HINT}")
        return cls(scheme, name, _port(found["port"], scheme), below)


@dataclass(frozen=True)
class ImageAddress:
    """A URL that an entry allows: what to connect to, and what to ask for there."""

    scheme: str
    name: str
    port: int
    path: str
    may_be_private: bool

    @property
    def host(self) -> str:
        """Return the host in the form of HTTP's Host."""
        name = f"[{self.name}]" if ":" in self.name else self.name
        return name if self.port == PORTS[self.scheme] else f"{name}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.host}{self.path}"


def is_address(value: Any) -> TypeGuard[str]:
    """Return whether a value is a URL that would have to be fetched."""
    return isinstance(value, str) and value[:8].lower().startswith(("http://", "https://"))


def allowed(url: str, hosts: Sequence[AllowedHost]) -> ImageAddress:
    """Return the parts of a URL that an entry admits. Raises ValueError if it is not a URL, or no entry admits it."""
    found = _URL.fullmatch(url) if len(url) <= LONGEST_URL else None
    name = None if found is None else _name(found["host"])
    if found is None or name is None:
        raise ValueError("it is no http: or https: URL of a host, without a user and of ASCII letters up to its path")
    scheme = found["scheme"].lower()
    port, rest = _port(found["port"], scheme), (found["rest"] or "").partition("#")[0]
    entry = next((each for each in hosts if each.admits(scheme, name, port)), None)
    if entry is None:
        host = ImageAddress(scheme, name, port, "", False).host
        shown = host if scheme == "https" else f"http://{host}"
        raise ValueError(f"its host {shown} is not one that images are fetched from (images.allowed_hosts)")
    path = quote(rest if rest.startswith("/") else f"/{rest}", safe=string.punctuation)
    return ImageAddress(scheme, name, port, path, entry.is_spelt_out)


def address_of(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that a name is, in its one usual spelling."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _name(host: str) -> str | None:
    """Return a host in the one spelling that is compared: in lower case, an address without brackets, and as short as
    it can be. None for numbers that resolvers would take for an address all the same (0x7f.1, 2130706433)."""
    name = host.lower()
    if name.startswith("["):
        address = address_of(name[1:-1])
        return address.compressed if isinstance(address, ipaddress.IPv6Address) else None
    last = name.rpartition(".")[2]
    if last.isdigit() or re.fullmatch(r"0x[0-9a-f]*", last):
        return name if isinstance(address_of(name), ipaddress.IPv4Address) else None
    return name


def _port(text: str | None, scheme: str) -> int:
    port = PORTS[scheme] if text is None else int(text)
    if not 1 <= port <= 65535:
        raise ValueError(f"the port {port} is not one of 1 to 65535")
    return port


def _are_hosts(entries: tuple[str, ...]) -> tuple[str, ...]:
    for entry in entries:
        AllowedHost.of(entry)
    return entries


class ImagesConfig(Section):
    """The hosts from which images may be fetched that are named by an address."""

    allowed_hosts: Annotated[Texts, AfterValidator(_are_hosts)] = ()
    """Hosts whose images are fetched: `images.example.com`, `*.example.com` (the names below it), with a port where it
    is not 443, and with `http://` in front where it is not https. A name must have public addresses; one that is
    private is written as itself (`https://10.0.0.5`, `http://localhost:9000`). None by default: addresses are
    refused."""

    @property
    def hosts(self) -> tuple[AllowedHost, ...]:
        """Return the parsed `allowed_hosts`."""
        return tuple(map(AllowedHost.of, self.allowed_hosts))
