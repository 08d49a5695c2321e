"""Images from addresses, against real hosts on this machine: which are fetched, and every way in that is closed."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from groupwise.config.images import AllowedHost, allowed
from groupwise.config.serve import serve_config
from groupwise.errors import ConfigError, DataError
from groupwise.pictures import read_picture
from groupwise.tasks import fetching
from groupwise.tasks.fetching import fetch_picture, is_public
from image_host import ImageHost, bomb, certificate_of, image_host, png, reply
from wording import raises

PUBLIC = "93.184.215.14"


def hosts(*entries: str) -> tuple[AllowedHost, ...]:
    return tuple(map(AllowedHost.of, entries))


@pytest.fixture
def host() -> Iterator[ImageHost]:
    with image_host() as host:
        host.pages["/a.png"] = reply(png())
        yield host


@pytest.fixture
def here(host: ImageHost) -> str:
    return f"http://127.0.0.1:{host.port}"


def refused(url: str, *entries: str, **options: Any) -> str:
    is_fixed = not url.startswith(("http://localhost", "https://127")) and "example.com:" not in url
    with (raises if is_fixed else pytest.raises)(DataError) as error:
        fetch_picture(url, hosts(*entries), where="row 3: image", **options)
    assert error.value.kind == "image" and error.value.message.startswith("row 3: image is ")
    return error.value.message


# ---- what is fetched ----
def test_an_image_of_a_host_that_is_written_as_its_address(host: ImageHost, here: str) -> None:
    assert fetch_picture(f"{here}/a.png", hosts(here)) == read_picture(png())
    (asked,) = host.asked
    lines = asked.lower().split("\r\n")
    assert lines[0] == "get /a.png http/1.1" and f"host: 127.0.0.1:{host.port}" in lines
    assert "accept-encoding: identity" in lines and not [line for line in lines if line.startswith(("cookie", "auth"))]


def test_tls_is_checked_against_the_name_and_goes_to_the_address_that_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that resolves to this machine for once, as a public one would."""
    certificate = certificate_of(tmp_path, "images.example.com")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "public.pem"))
    monkeypatch.setattr(fetching, "is_public", lambda ip: True)
    with image_host(certificate=certificate) as host:
        host.pages["/a.png"] = reply(png())

        def resolve(name: str, port: int) -> Any:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

        entry = f"*.example.com:{host.port}"
        url = f"https://images.example.com:{host.port}/a.png"
        assert fetch_picture(url, hosts(entry), resolve=resolve) == read_picture(png())
        other = f"https://other.example.com:{host.port}/a.png"
        assert "certificate" in refused(other, entry, resolve=resolve).lower()
        monkeypatch.delenv("SSL_CERT_FILE")
        assert "certificate" in refused(url, entry, resolve=resolve).lower()


def test_redirects_within_what_is_allowed_are_followed(host: ImageHost, here: str) -> None:
    host.pages["/b"] = reply(b"", status="302 Found", Location="/c")
    host.pages["/c"] = reply(b"", status="307 Temporary Redirect", Location=f"{here}/a.png")
    assert fetch_picture(f"{here}/b", hosts(here)) == read_picture(png())


def test_what_kind_of_image_it_is_its_bytes_say(host: ImageHost, here: str) -> None:
    host.pages["/a.txt"] = reply(png(), Content_Type="text/html")
    host.pages["/a.txt?size=3"] = host.pages["/a.txt"]
    assert fetch_picture(f"{here}/a.txt?size=3#top", hosts(here)) == read_picture(png())


def test_proxies_of_the_environment_are_not_asked(host: ImageHost, here: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert fetch_picture(f"{here}/a.png", hosts(here))


# ---- who may be asked ----
ALLOWED = ("images.example.com", "*.cdn.example.com", "http://127.0.0.1:9000", "files.example.com:8443")


@pytest.mark.parametrize(
    "url",
    [
        "https://images.example.com/a.png",
        "HTTPS://Images.Example.COM",
        "https://images.example.com:443/a b.png",
        "https://x.cdn.example.com?a=1",
        "https://a.b.cdn.example.com/@evil.com",
        "http://127.0.0.1:9000/a.png",
        "https://files.example.com:8443/a.png",
    ],
)
def test_hosts_that_are_named_are_allowed(url: str) -> None:
    found = allowed(url, hosts(*ALLOWED))
    assert found.name.endswith(("example.com", "127.0.0.1")) and found.path.startswith("/") and " " not in found.path


@pytest.mark.parametrize(
    "url",
    [
        "http://images.example.com/a.png",  # not by http
        "https://images.example.com:8443/a.png",  # not at this port
        "https://files.example.com/a.png",
        "https://cdn.example.com/a.png",  # the names below it only
        "https://evilcdn.example.com/a.png",
        "https://images.example.com.evil.com/a.png",
        "https://evil.com/images.example.com",
        "https://evil.com#images.example.com",
        "https://evil.com?images.example.com",
        "https://images.example.com@evil.com/a.png",
        "https://user:word@images.example.com/a.png",
        "https://evil.com\\@images.example.com/a.png",
        "https://images.example.com\\@evil.com/a.png",
        "https://images.example.com./a.png",
        "https://images.example.com%2eevil.com/a.png",
        "https://images.example.com%00.evil.com/",
        "https://images.example.com\r\n.evil.com/",
        "https://images.example.com:/a.png",
        "https://images.example.com:0443x/a.png",
        "https:images.example.com/a.png",
        "https:///images.example.com/a.png",
        "https://imag\u0435s.example.com/a.png",
        "https://images\u3002example.com/a.png",
        " https://images.example.com/a.png",
        "http://2130706433:9000/a.png",
        "http://0x7f.1:9000/a.png",
        "http://0177.0.0.1:9000/a.png",
        "http://127.1:9000/a.png",
        "http://127.0.0.1.:9000/a.png",
        "http://[::ffff:127.0.0.1]:9000/a.png",
        "http://[::1%25lo]:9000/a.png",
        "http://169.254.169.254/latest/meta-data/",
        "file:///etc/passwd",
        "gopher://127.0.0.1:9000/_GET",
        f"https://images.example.com/{'a' * 9000}",
    ],
)
def test_no_spelling_reaches_another_host(url: str) -> None:
    with pytest.raises(ValueError):
        allowed(url, hosts(*ALLOWED))


@pytest.mark.parametrize(
    "entry",
    ["*", "*.com", "https://*", "a.com/x", "me@a.com", "2130706433", "0x7f.1", "a..b", "a.com:99999", "*.1.2.3.4"],
)
def test_entries_that_name_no_host_are_errors_of_the_configuration(entry: str) -> None:
    with raises(ConfigError) as error:
        serve_config({"images": {"allowed_hosts": [entry]}}, environ={})
    assert error.value.field == "images.allowed_hosts"


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "100.100.100.200",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "192.0.0.192",
        "168.63.129.16",
        "198.18.0.1",
        "::",
        "::1",
        "::7f00:1",
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::1",
        "2002:7f00:1::",
        "2001:0:5ef5:79fb:0:0:0:0",
        "fe80::1",
        "fec0::1",
        "fc00::1",
        "fd00:ec2::254",
        "ff02::1",
        "2001:db8::1",
    ],
)
def test_addresses_of_ones_own_are_not_public(address: str) -> None:
    ip = ipaddress.ip_address(address)
    assert not is_public(ip)

    def resolve(name: str, port: int) -> Any:
        return [(0, 0, 0, "", (PUBLIC, port)), (0, 0, 0, "", (address, port))]

    assert "no public address" in refused("https://images.example.com/a.png", *ALLOWED, resolve=resolve)


def test_addresses_of_the_internet_are_public() -> None:
    for address in (PUBLIC, "1.1.1.1", "2606:4700:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"):
        assert is_public(ipaddress.ip_address(address)), address


def test_localhost_is_this_machine_and_nothing_else(host: ImageHost) -> None:
    entry = f"http://localhost:{host.port}"
    assert fetch_picture(f"{entry}/a.png", hosts(entry))

    def elsewhere(name: str, port: int) -> Any:
        return [(0, 0, 0, "", ("10.0.0.1", port))]

    assert "10.0.0.1" in refused(f"{entry}/a.png", entry, resolve=elsewhere)


def test_a_name_is_resolved_once_and_not_again_when_it_is_connected_to(
    host: ImageHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DNS rebinding: the second answer would be this machine."""
    answers = iter([PUBLIC, "127.0.0.1"])
    connected: list[Any] = []

    def resolve(name: str, port: int) -> Any:
        return [(0, 0, 0, "", (next(answers), port))]

    def connect(place: Any, timeout: float) -> Any:
        connected.append(place)
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(socket, "create_connection", connect)
    assert "does not answer" in refused("https://images.example.com/a.png", *ALLOWED, resolve=resolve)
    assert connected == [(PUBLIC, 443)] and next(answers) == "127.0.0.1"


@pytest.mark.parametrize(
    "further",
    [
        "http://169.254.169.254/latest/meta-data/",
        "//127.0.0.2/a.png",
        "https://127.0.0.1/a.png",
        "http://localhost/a.png",
        "file:///etc/passwd",
        "http://127.0.0.1:{port}@127.0.0.2/a.png",
        "\\\\127.0.0.2/a.png",
    ],
)
def test_a_redirect_leads_to_no_host_that_is_not_allowed(host: ImageHost, here: str, further: str) -> None:
    host.pages["/b"] = reply(b"", status="302 Found", Location=further.format(port=host.port))
    refused(f"{here}/b", here)
    assert len(host.asked) <= 2  # the last is a path of this host


def test_redirects_end(host: ImageHost, here: str) -> None:
    host.pages["/b"] = reply(b"", status="302 Found", Location="/b")
    assert "more than 3 redirects" in refused(f"{here}/b", here) and len(host.asked) == 4
    host.pages["/c"] = reply(b"", status="302 Found")
    assert "Location" in refused(f"{here}/c", here)


# ---- how long, and how much ----
@pytest.mark.parametrize("path", ["/drips", "/drips-body", "/silent"])
def test_who_drips_or_is_silent_has_an_end(host: ImageHost, here: str, path: str) -> None:
    began = time.monotonic()
    assert "in time" in refused(f"{here}{path}", here, seconds=0.5)
    assert time.monotonic() - began < 3


def test_a_handshake_has_an_end(host: ImageHost) -> None:
    """A host that speaks no TLS, and never answers the first word of one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = f"https://127.0.0.1:{server.getsockname()[1]}"
        began = time.monotonic()
        assert "in time" in refused(f"{here}/a.png", here, seconds=0.5)
        assert time.monotonic() - began < 3


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_body_without_end_takes_no_more_than_an_image_may(host: ImageHost, here: str) -> None:
    host.pages["/endless"] = b"HTTP/1.1 200 OK\r\n\r\n"
    assert "more than 1,000,000 bytes" in refused(f"{here}/endless", here, most=1_000_000)
    host.pages["/large"] = b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n"
    assert "more than" in refused(f"{here}/large", here)
    host.pages["/chunked"] = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\n" + bytes(2_000_000)
    assert "more than" in refused(f"{here}/chunked", here, most=1_000_000)


def test_what_is_compressed_for_the_way_does_not_grow_here(host: ImageHost, here: str) -> None:
    host.pages["/bomb"] = reply(bomb(), Content_Encoding="gzip")
    assert "compressed (gzip)" in refused(f"{here}/bomb", here)


ANSWERS = {
    "no http": b"220 ftp ready\r\n",
    "nothing": b"",
    "many heads": b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200 + b"\r\n",
    "a long head": b"HTTP/1.1 200 OK\r\nA: " + b"b" * 70_000 + b"\r\n\r\n",
    "404": reply(png(), status="404 Not Found"),
    "206": reply(png(), status="206 Partial Content"),
    "401": reply(b"", status="401 Unauthorized", WWW_Authenticate="Basic"),
    "cut off": b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n" + png(),
    "chunks cut off": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfff\r\nabc",
    "continue for ever": b"HTTP/1.1 100 Continue\r\n\r\n" * 3,
}


@pytest.mark.parametrize("name", ANSWERS)
def test_what_is_no_whole_answer_is_no_image(host: ImageHost, here: str, name: str) -> None:
    host.pages["/x"] = ANSWERS[name]
    refused(f"{here}/x", here, seconds=5)


def test_a_page_is_no_image_and_nor_is_nothing(host: ImageHost, here: str) -> None:
    for name, body in {
        "/page": b"<html>",
        "/nothing": b"",
        "/svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    }.items():
        host.pages[name] = reply(body, Content_Type="image/png")
        with raises(DataError):
            fetch_picture(f"{here}{name}", hosts(here))


def test_connections_are_closed(host: ImageHost, here: str) -> None:
    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    for _ in range(20):
        fetch_picture(f"{here}/a.png", hosts(here))
        refused(f"{here}/missing", here)
    if sys.platform == "linux":
        time.sleep(0.1)
        assert len(os.listdir("/proc/self/fd")) <= before + 4  # of the host, which is in this process too
