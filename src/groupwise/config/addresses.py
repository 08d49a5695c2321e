"""Reads the URL of a server: is it valid, has the server a certificate to check, is it on this machine?"""

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
    """Return whether the URL is of https, however that is written, so that the server's certificate is to be checked:
    `verify` of an httpx client. A client of http alone saves the 25 ms in which it would read the trusted ones."""
    return urlsplit(url).scheme == "https"


def is_local(url: str) -> bool:
    """Return whether the server is on this machine, so that no proxy is to be asked for it."""
    host = urlsplit(url).hostname or ""
    return host == "localhost" or host.startswith("127.") or host == "::1"
