"""Sixty hostile images and bodies, in every dialect: each is refused with a code, nothing is fetched, opened or kept,
and memory stays bounded."""

from __future__ import annotations

import base64
import gzip
import io
import socket
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from groupwise.server.images import folder_of
from seeing_models import drawn, save_seeing
from whole_server import Whole, whole

MOST_GROWTH = 700 << 20  # bytes: an image of 50 million pixels, decoded, turned and made into an array


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    written = io.BytesIO()
    image.save(written, format=kind, **options)
    return written.getvalue()


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, *chunks: bytes, depth: int = 8, colour: int = 2) -> bytes:
    """A PNG whose head says that it is so large; what is in it comes from `chunks`."""
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    body = chunks or (chunk(b"IDAT", zlib.compress(b"")),)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + b"".join(body) + chunk(b"IEND", b"")


GOOD = file_of(drawn(64, 48))
FRAMES: dict[str, Any] = {"save_all": True, "append_images": [drawn(64, 48, seed=i) for i in (1, 2)]}
BOMB = zlib.compress(bytes(1 << 26), 9)  # 64 MiB of nothing in 64 KiB
LAUGHS = b'<?xml version="1.0"?><!DOCTYPE svg [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;">]><svg><text>&b;</text></svg>'
TURNED = Image.Exif()
TURNED[0x0112] = 6


def damaged(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


# What a data: URL holds, by name: files that are no still image, or are too large, or are damaged.
FILES: dict[str, bytes] = {
    "nothing": b"",
    "a space": b" ",
    "zeros": bytes(4096),
    "text": b"How many dots?",
    "html": b"<html><img src=http://169.254.169.254/></html>",
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
    "svg of entities": LAUGHS,
    "svgz": gzip.compress(LAUGHS),
    "pdf": b"%PDF-1.7\n1 0 obj<</Type/Catalog>>endobj",
    "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) (r) file",
    "zip": b"PK\x03\x04" + bytes(60),
    "mp4": b"\x00\x00\x00\x18ftypmp42" + bytes(64),
    "icon": file_of(drawn(32, 32), "ICO"),
    "jpeg 2000's head": b"\x00\x00\x00\x0cjP  \r\n\x87\n" + bytes(64),
    "photoshop's head": b"8BPS\x00\x01" + bytes(64),
    "animated gif": file_of(drawn(64, 48), "GIF", **FRAMES),
    "animated png": file_of(drawn(64, 48), "PNG", **FRAMES),
    "animated webp": file_of(drawn(64, 48), "WEBP", **FRAMES),
    "pages of a tiff": file_of(drawn(64, 48), "TIFF", **FRAMES),
    "png of 400 million pixels": png(20_000, 20_000, chunk(b"IDAT", BOMB)),
    "png of 2^62 pixels": png(2**31 - 1, 2**31 - 1),
    "png without pixels": png(0, 0),
    "png a pixel high": png(49_999_999, 1, chunk(b"IDAT", zlib.compress(bytes(1 << 24), 9))),
    "png far wider than high": file_of(Image.new("RGB", (3000, 1))),
    "png of an unknown colour": png(8, 8, colour=5),
    "png whose text is a bomb": png(8, 8, chunk(b"zTXt", b"a\0\0" + BOMB), chunk(b"IDAT", zlib.compress(b""))),
    "png whose profile is a bomb": png(8, 8, chunk(b"iCCP", b"a\0\0" + BOMB), chunk(b"IDAT", zlib.compress(b""))),
    "png whose chunk is longer than it": png(8, 8)[:33] + struct.pack(">I", 2**31 - 1) + b"IDAT" + bytes(64),
    "png cut off": GOOD[: len(GOOD) // 2],
    "png damaged": damaged(GOOD, 60),
    "png's head alone": GOOD[:33],
    "jpeg of 4 billion pixels": file_of(drawn(64, 48), "JPEG").replace(
        struct.pack(">HH", 48, 64), struct.pack(">HH", 65535, 65535), 1
    ),
    "jpeg cut off": file_of(drawn(64, 48), "JPEG")[:300],
    "jpeg turned, cut off": file_of(drawn(64, 48), "JPEG", exif=TURNED)[:400],
    "gif cut off": file_of(drawn(64, 48), "GIF")[:200],
    "gif of 4 billion pixels": b"GIF89a" + struct.pack("<HH", 65535, 65535) + bytes(3) + b";",
    "webp cut off": file_of(drawn(64, 48), "WEBP")[:60],
    "bmp of 2^60 pixels": b"BM" + struct.pack("<IHHIIiiHH", 1 << 20, 0, 0, 54, 40, 1 << 30, 1 << 30, 1, 24) + bytes(24),
    "tiff whose directory is itself": b"II*\x00\x08\x00\x00\x00\x00\x00\x08\x00\x00\x00",
    "tiff damaged": damaged(file_of(drawn(64, 48), "TIFF"), 5),
    "ppm of 10^18 pixels": b"P6 1000000000 1000000000 255\n",
    "ppm cut off": b"P6 64 48 255\n\x00",
    "base64 of base64": base64.b64encode(GOOD),
    "a data: URL": url(GOOD).encode(),
}
# Where a data: URL should be
ADDRESSES: dict[str, Any] = {
    "http": "http://127.0.0.1:{port}/a.png",
    "https": "https://127.0.0.1:{port}/a.png",
    "the cloud's metadata": "http://169.254.169.254/latest/meta-data/",
    "an address in brackets": "http://[::1]:{port}/a.png",
    "a user in front": "http://example.com@127.0.0.1:{port}/a.png",
    "a file": "file:///etc/passwd",
    "a path": "/etc/passwd",
    "a path from here": "../../etc/passwd",
    "another machine's": "\\\\127.0.0.1\\share\\a.png",
    "gopher": "gopher://127.0.0.1:{port}/_GET",
    "a script": "javascript:alert(1)",
    "a blob": "blob:http://127.0.0.1/1",
    "no comma": "data:image/png;base64",
    "no base64": "data:image/png;base64,!!!!",
    "base64 without its end": f"{url(GOOD)[:-7]}",
    "text": "data:text/plain,hello",
    "a page": "data:text/html;base64,PGgxPg==",
    "a URL in a URL": f"data:image/png;base64,{url(GOOD)}",
    "nothing": "",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    model = save_seeing("qwen2_5_vl", tmp_path_factory.mktemp("model"))
    with whole(tmp_path_factory.mktemp("state"), model) as site:
        yield site


@pytest.fixture(scope="module")
def listener() -> Iterator[socket.socket]:
    """Whoever is asked here was fetched from."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def bodies(address: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a request of each dialect with this for an image, and its route."""
    part = {"type": "image_url", "image_url": {"url": address}}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}]
    yield "/v1/chat/completions", {"messages": messages, "max_tokens": 1}
    yield "/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": address}]}]}
    group = {"messages": messages, "completions": [{"text": "1", "reward": 1.0}, {"text": "2", "reward": 0.0}]}
    yield "/v1/train/grpo", {"groups": [group], "config": {"output_name": "x"}}
    if isinstance(address, str) and address.startswith("data:image/png;base64,"):
        source = {"type": "base64", "media_type": "image/png", "data": address.partition(",")[2]}
        shown = [{"role": "user", "content": [{"type": "image", "source": source}]}]
        yield "/v1/messages", {"messages": shown, "max_tokens": 1}


def check_refused(site: Whole, address: Any, codes: tuple[str, ...]) -> None:
    before = {path.name for path in folder_of(site.server.config).glob("*")}
    for route, body in bodies(address):
        answer = site.http.post(route, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error.get("code")) in [(400, code) for code in codes], (route, answer.text[:300])
        assert len(answer.content) < 2000  # an image is not sent back
    assert {path.name for path in folder_of(site.server.config).glob("*")} - before <= set()
    assert not site.server.ledger.jobs()


def peak() -> int:
    """Return the most memory that this process had since `forget_peak`, bytes."""
    return next(
        int(line.split()[1]) << 10
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )


def forget_peak() -> int:
    """Forget it. Returns what there is now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def test_there_are_sixty() -> None:
    assert len(FILES) + len(ADDRESSES) + len(PARTS) >= 60


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_still_image_is_refused(site: Whole, name: str) -> None:
    measured = sys.platform == "linux"
    before = forget_peak() if measured else 0
    check_refused(site, url(FILES[name]), ("invalid_image",))
    assert not measured or peak() - before < MOST_GROWTH


@pytest.mark.parametrize("name", ADDRESSES)
def test_an_address_is_not_followed(site: Whole, listener: socket.socket, name: str) -> None:
    check_refused(site, ADDRESSES[name].format(port=listener.getsockname()[1]), ("invalid_image",))
    with pytest.raises(BlockingIOError):
        listener.accept()


# What stands where a part of a message should be
PARTS: dict[str, Any] = {
    "a number": 7,
    "null": None,
    "a list": ["data:image/png;base64,"],
    "an object in it": {"url": {"url": {"url": url(GOOD)}}},
    "bytes as numbers": [137, 80, 78, 71],
}


@pytest.mark.parametrize("name", PARTS)
def test_what_is_no_url_is_refused(site: Whole, name: str) -> None:
    check_refused(site, PARTS[name], ("invalid_messages", "invalid_value", "invalid_type", "invalid_image", "missing"))


def test_a_kind_that_is_said_wrong_changes_nothing(site: Whole) -> None:
    """The bytes say what they are."""
    for said in ("image/svg+xml", "text/html", "", "image/png;charset=utf-8"):
        part = {"type": "image_url", "image_url": {"url": url(file_of(drawn(64, 48), "JPEG"), said)}}
        body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
        assert site.http.post("/v1/chat/completions", json=body).status_code == 200


def test_so_many_images_are_refused_before_one_is_decoded(site: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("groupwise.pictures.Picture.pixels", None)
    part = {"type": "image_url", "image_url": {"url": url(GOOD[:200])}}
    body = {"messages": [{"role": "user", "content": [part] * 3000}], "max_tokens": 1}
    answer = site.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["code"] in ("limit_exceeded", "invalid_image")


def test_a_body_that_is_too_large_is_refused_by_its_length(site: Whole) -> None:
    body = b'{"messages": [{"role": "user", "content": [' + b"[" * (9 << 20)
    answer = site.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 413
