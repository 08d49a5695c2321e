"""Hostile images: files that are no still image or are too large, what stands where an address should, and other parts.

They are what `tests/server/test_hostile_images.py` posts, and `benchmarks/floods.py` posts again and again.
"""

from __future__ import annotations

import base64
import gzip
import io
import struct
import zlib
from typing import Any

from PIL import Image

from seeing_models import drawn


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


def nothings(size: int) -> bytes:
    """What zlib makes of so many zeros, a whole number of MiB, without reading them all: tests import this module."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    mebibyte = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    return b"\x78\xda" + (size >> 20) * mebibyte + b"\x03\x00" + struct.pack(">I", (size % 65521) << 16 | 1)


GOOD = file_of(drawn(64, 48))
FRAMES: dict[str, Any] = {"save_all": True, "append_images": [drawn(64, 48, seed=i) for i in (1, 2)]}
BOMB = nothings(1 << 26)  # 64 MiB of nothing in 64 KiB
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
    "png a pixel high": png(49_999_999, 1, chunk(b"IDAT", nothings(1 << 24))),
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

# What stands where a part of a message should be
PARTS: dict[str, Any] = {
    "a number": 7,
    "null": None,
    "a list": ["data:image/png;base64,"],
    "an object in it": {"url": {"url": {"url": url(GOOD)}}},
    "bytes as numbers": [137, 80, 78, 71],
}
