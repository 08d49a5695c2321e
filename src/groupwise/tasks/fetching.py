"""Fetches images from the addresses that a configuration allows, and from no other machine.

    fetch_picture    a URL -> Picture, checked as any other; DataError where it is not fetched
    is_public        whether an address is one of the internet's

This protects the machines that this one can reach from attackers who choose the URL, run the named host, or control its
DNS.

- A name is resolved once. All its addresses must be public, unless the configuration names the machine itself, and the
  connection goes to one of the checked addresses.
- A redirect is checked like the first URL, and their number is small. Proxies, cookies and credentials of the
  environment are not used.
- One deadline holds for everything: the handshake, a head that drips in, an endless body. A compressed body is refused,
  so that no body grows here.
"""

from __future__ import annotations

import functools
import http.client
import ipaddress
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urljoin

from groupwise import __version__
from groupwise.config.images import AllowedHost, ImageAddress, address_of, allowed
from groupwise.errors import DataError
from groupwise.pictures import MOST_BYTES, Picture, read_picture

SECONDS = 20.0  # for one image, with all its redirects
MOST_REDIRECTS = 3
MOST_ADDRESSES = 4  # of one name that are tried
PIECE = 1 << 16
HINT = "send the image's bytes, or have the owner name its host in images.allowed_hosts"
CLOUDS = [ipaddress.ip_network(each) for each in ("192.0.0.0/24", "168.63.129.16/32")]  # services of Oracle's, Azure's
NAT64 = ipaddress.ip_network("64:ff9b::/96")  # how an IPv4 address is reached from a network without any

Resolve = Callable[[str, int], Sequence[tuple[Any, ...]]]  # as socket.getaddrinfo


def _resolve(name: str, port: int) -> Sequence[tuple[Any, ...]]:
    return socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)


def fetch_picture(
    url: str,
    hosts: Sequence[AllowedHost],
    *,
    where: str = "an image",
    most: int = MOST_BYTES,
    seconds: float = SECONDS,
    resolve: Resolve = _resolve,
) -> Picture:
    """Return the image at an address, of `most` bytes at most. Blocks, for `seconds` and the resolver's own time.

    Raises:
        DataError: the address is not allowed, or the image is missing, too large, too slow, or cannot be read.
    """
    try:
        data = _fetched(url, hosts, most=most, until=time.monotonic() + seconds, resolve=resolve)
    except (ValueError, OSError, http.client.HTTPException) as error:
        raise not_fetched(url, _why(error), where=where) from error
    return read_picture(data, where=where)


def not_fetched(url: str, why: str, *, where: str) -> DataError:
    """Return the error of an image that is not fetched."""
    shown = url if len(url) <= 80 else f"{url[:77]}..."
    return DataError(f"{where} is {shown!r}, which is not fetched: {why}", hint=HINT, kind="image")


def _why(error: Exception) -> str:
    """Return what went wrong, and nothing of what the other side said."""
    if isinstance(error, TimeoutError):
        return "it was not there in time"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message})"
    if isinstance(error, http.client.HTTPException | ssl.SSLError):
        return f"its host does not answer as a web server does ({type(error).__name__})"
    return str(error) or type(error).__name__


def _fetched(url: str, hosts: Sequence[AllowedHost], *, most: int, until: float, resolve: Resolve) -> bytes:
    for _ in range(1 + MOST_REDIRECTS):
        address = allowed(url, hosts)
        data, further = _answer(address, most=most, until=until, resolve=resolve)
        if further is None:
            return data
        url = urljoin(address.url, further)
    raise ValueError(f"there are more than {MOST_REDIRECTS} redirects")


def _answer(address: ImageAddress, *, most: int, until: float, resolve: Resolve) -> tuple[bytes, str | None]:
    """Return the body at an address, or where it redirects to."""
    with _connected(address, until, resolve) as connected:
        asked = http.client.HTTPConnection(address.name, address.port)
        asked.sock = connected
        asked.putrequest("GET", address.path, skip_host=True, skip_accept_encoding=True)
        headers = {"Host": address.host, "User-Agent": f"groupwise/{__version__}", "Accept": "image/*"}
        for name, value in {**headers, "Accept-Encoding": "identity", "Connection": "close"}.items():
            asked.putheader(name, value)
        asked.endheaders()
        with asked.getresponse() as answer:
            if answer.status in (301, 302, 303, 307, 308):
                if (further := answer.getheader("Location")) is None:
                    raise ValueError(f"it was answered {answer.status} without a Location")
                return b"", further
            if answer.status != 200:
                raise ValueError(f"it was answered {answer.status}")
            if (coding := answer.getheader("Content-Encoding", "identity").strip().lower()) not in ("identity", ""):
                raise ValueError(f"its body is compressed ({coding[:40]}), which was not asked for")
            return _body(answer, most), None


def _body(answer: http.client.HTTPResponse, most: int) -> bytes:
    too_large = f"it has more than {most:,} bytes"
    if answer.length is not None and answer.length > most:
        raise ValueError(too_large)
    pieces, size = list[bytes](), 0
    while piece := answer.read(PIECE):
        pieces.append(piece)
        if (size := size + len(piece)) > most:
            raise ValueError(too_large)
    if answer.length:
        raise ValueError(f"it ended {answer.length} bytes early")
    return b"".join(pieces)


# ---- connections ----
@contextmanager
def _connected(address: ImageAddress, until: float, resolve: Resolve) -> Iterator[socket.socket]:
    """Yield a connection to one of the host's addresses, which is closed at `until` (monotonic)."""
    places = _addresses(address, resolve)
    with _open(places, address.port, until) as raw:
        is_late = threading.Event()
        connected = raw
        if address.scheme == "https":  # whose certificate is to be of the name, whatever its address
            context = _tls(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
            connected = context.wrap_socket(raw, server_hostname=address.name, do_handshake_on_connect=False)

        def end() -> None:
            is_late.set()
            with suppress(OSError):
                socket.socket.shutdown(connected, socket.SHUT_RDWR)  # a waiting read ends

        timer = threading.Timer(max(until - time.monotonic(), 0), end)
        timer.daemon = True
        timer.start()
        try:
            with connected:
                try:
                    if isinstance(connected, ssl.SSLSocket):
                        connected.do_handshake()
                    yield connected
                finally:
                    timer.cancel()
                    timer.join()  # its socket is still this one
                if is_late.is_set():
                    raise TimeoutError
        except (OSError, ValueError, http.client.HTTPException):
            if is_late.is_set():
                raise TimeoutError from None
            raise


def _addresses(address: ImageAddress, resolve: Resolve) -> list[str]:
    """Return the host's addresses, all of which may be connected to."""
    if (itself := address_of(address.name)) is not None:
        return [itself.compressed]
    found = list(dict.fromkeys(str(each[4][0]) for each in resolve(address.name, address.port)))
    for text in found:
        ip = address_of(text)
        fine = ip is not None and (ip.is_loopback if address.may_be_private else is_public(ip))
        if not fine:
            raise ValueError(f"its host {address.name} is at {text}, which is no public address")
    return found[:MOST_ADDRESSES]


def is_public(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Return whether an address is one of the internet's: not of this machine, of a network of one's own, of a cloud's
    services, or of a kind that could be read as one of these."""
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return is_public(ip.ipv4_mapped)
        if ip in NAT64:
            return is_public(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF))
        if ip.sixtofour is not None or ip.teredo is not None or ip.is_site_local or ip.scope_id is not None:
            return False
    of_a_cloud = any(ip in each for each in CLOUDS)
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified or of_a_cloud)


def _open(places: Sequence[str], port: int, until: float) -> socket.socket:
    """Return a connection to the first of these addresses that answers."""
    problem: OSError | None = None
    for place in places:
        left = until - time.monotonic()
        if left <= 0:
            break
        try:
            connected = socket.create_connection((place, port), timeout=left)
        except OSError as error:
            problem = error
            continue
        connected.settimeout(max(until - time.monotonic(), 0.001))
        return connected
    raise ValueError(f"its host does not answer ({problem or 'in time'})")


@functools.lru_cache(maxsize=4)
def _tls(file: str | None, directory: str | None) -> ssl.SSLContext:
    """Return what certificates are checked against: those that every client here trusts."""
    import httpx2

    return httpx2.create_ssl_context()
