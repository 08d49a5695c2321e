"""Reads URLs of servers that a user names: whether one is valid, has a certificate to check, is on this machine."""

from __future__ import annotations

from urllib.parse import urlsplit


def is_server_url(url: str) -> bool:
    """Return whether this is an http or https URL with a host, and with no port or one that there is."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets without an end, a port that is not a number
        return False


def has_certificate(url: str) -> bool:
    """Return whether the server proves who it is, which is httpx's `verify`: to read the certificates that are trusted
    takes 15 ms, which a client of http servers need not spend. `HTTPS://` is https, too."""
    return urlsplit(url).scheme == "https"


def is_local(url: str) -> bool:
    """Return whether the server is on this machine, so that no proxy is to be asked for it."""
    host = urlsplit(url).hostname or ""
    return host == "localhost" or host.startswith("127.") or host == "::1"
