"""Bodies that nobody means well with, sent to every POST route of a real server: one 4xx each, and nothing stays.

pytest -m slow tests/slow/test_hostile_bodies.py     a minute or two
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import re
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx2
import pytest

from crash.place import Place, a_place
from raw_http import connect, head

from .place import CHAT, MIB, forget_highest, highest_resident, resident

pytestmark = pytest.mark.slow

GROWTH = 256 * MIB  # of memory by the whole corpus: what the allocators keep for the next large body
AGAIN = 96 * MIB  # of memory by its large bodies once more: what is lost each time would show here
PEAK = 1536 * MIB  # above the beginning, at any moment: 10 million numbers to train are parsed into objects, twice
LONGEST_ERROR = 2000  # bytes
JSON = "content-type: application/json"


@dataclass(frozen=True)
class Hostile:
    """A body, made when it is sent, and the head that goes with it."""

    make: Callable[[], bytes]
    lines: tuple[str, ...] = (JSON,)
    only: str = ""  # routes that it is meant for; "" is all


def _body(text: str | bytes) -> Hostile:
    content = text.encode() if isinstance(text, str) else text
    return Hostile(lambda: content)


def _fields(value: str) -> Hostile:
    """`value` for every field that some route reads first; a prompt may be any text, hence the temperature."""
    names = ("messages", "prompt", "prompts", "groups", "examples", "name", "sources", "version")
    return _body("{" + ", ".join(f'"{name}": {value}' for name in names) + ', "temperature": -1}')


def _messages(count: int) -> bytes:
    many = ",".join(['{"role":"user","content":"x"}'] * count)
    return f'{{"messages":[{many}],"x":1}}'.encode()


def _train_messages(count: int) -> bytes:
    many = ",".join(['{"role":"user","content":"x"}'] * count)
    return f'{{"examples":[{{"messages":[{many}]}}]}}'.encode()


def _large(size: int) -> bytes:
    return b'{"messages": "' + b"x" * size + b'"}'


def _form(archive: bytes, *, name: bytes = b"bomb", boundary: bytes = b"b") -> bytes:
    disposition = b'\r\nContent-Disposition: form-data; name="%s"'
    parts = [disposition % b"name" + b"\r\n\r\n" + name]
    parts.append(disposition % b"archive" + b'; filename="a.tar.gz"\r\n\r\n' + archive)
    return b"".join(b"--" + boundary + part + b"\r\n" for part in parts) + b"--" + boundary + b"--\r\n"


def _bomb() -> bytes:
    """A gigabyte of zeros as a tar.gz of one megabyte."""
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=9) as file:
        for name, size in (("adapter_config.json", 1 << 29), ("adapter_model.safetensors", 1 << 29)):
            info = tarfile.TarInfo(name)
            info.size = size
            file.write(info.tobuf())
            for _ in range(size // MIB):
                file.write(bytes(MIB))
        file.write(bytes(1024))
    return packed.getvalue()


def _tar(name: str, *, kind: bytes = tarfile.REGTYPE, target: str = "") -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        info = tarfile.TarInfo(name)
        info.type, info.linkname, info.size = kind, target, 3 if kind == tarfile.REGTYPE else 0
        archive.addfile(info, io.BytesIO(b"abc") if kind == tarfile.REGTYPE else None)
    return packed.getvalue()


_UPLOAD = ("content-type: multipart/form-data; boundary=b",)
CORPUS = {
    "nothing": _body(""),
    "half an object": _body('{"messages": [{"role": "user"'),
    "not an object": _body("[]"),
    "a text": _body('"x"'),
    "two values": _body("{} {}"),
    "a comment": _body("{} // x"),
    "a zero byte": _body(b'{"name": "a"}\x00'),
    "a byte order mark": _body(b"\xef\xbb\xbf{"),
    "UTF-16": _body('{"name": "a"}'.encode("utf-16")),
    "not UTF-8": _body(b'{"name": "\xff\xfe", "messages": "\xc3\x28"}'),
    "lists without end": _body("[" * 500_000),
    "deep lists": _body("[" * 50_000 + "]" * 50_000),
    "deep objects": _body('{"messages":' * 50_000 + "1" + "}" * 50_000),
    "deep in a field": _fields("[" * 5_000 + "]" * 5_000),
    "huge integer": _fields("1" * 4000),
    "huge integer beyond Python's": _fields("9" * 100_000),
    "huge exponent": _fields("1e999"),
    "huge negative exponent": _fields("-1e-999999999"),
    "NaN": _fields("NaN"),
    "Infinity": _fields("Infinity"),
    "-Infinity": _fields("[-Infinity]"),
    "lone surrogate": _fields('"\\ud800"'),
    "lone surrogate in a key": _body('{"\\udfff": 1}'),
    "a key twice": _body('{"name": 1, "name": 2, "messages": 1, "messages": 2}'),
    "true for everything": _fields("true"),
    "null for everything": _fields("null"),
    "numbers in texts": _fields('"1"'),
    "an empty list for everything": _fields("[]"),
    "a long name": _fields(json.dumps("n" * 10_000)),
    "long keys": _body(json.dumps({"k" * 10_000: 1, "messages": 1, "name": 2})),
    "controls in a name": _fields('"\\u0000\\u001b[2J\\r\\nset-cookie: x"'),
    "a path": _fields('"../../etc/passwd"'),
    "many keys": _body(json.dumps({f"k{i}": i for i in range(100_000)})),
    "unknown fields": _body('{"rewrd": 1, "__proto__": {}, "constructor": 2, "version": "x"}'),
    "a million messages": Hostile(lambda: _messages(1_000_000)),
    "a million messages to train": Hostile(lambda: _train_messages(1_000_000)),
    "20 MB": Hostile(lambda: _large(20_000_000)),
    "20 MB of spaces": Hostile(lambda: b" " * 20_000_000),
    "20 MB of brackets": Hostile(lambda: b"[" * 20_000_000),
    "20 MB of numbers": Hostile(lambda: b'{"messages":[' + b"1," * 10_000_000 + b"1]}"),
    "text": Hostile(lambda: b"{}", ("content-type: text/plain",)),
    "a form": Hostile(lambda: b"a=1", ("content-type: application/x-www-form-urlencoded",)),
    "XML": Hostile(lambda: b"<!DOCTYPE x [<!ENTITY y SYSTEM 'file:///etc/passwd'>]>", ("content-type: text/xml",)),
    "no content type": Hostile(lambda: b"{}", ()),
    "another charset": Hostile(lambda: b"{}", ("content-type: application/json; charset=utf-7",)),
    "a gzip bomb": Hostile(lambda: gzip.compress(bytes(200 * MIB)), (JSON, "content-encoding: gzip")),
    "brotli": Hostile(lambda: b"\x1b\x00", (JSON, "content-encoding: br")),
    "a form without end": Hostile(lambda: b"--b\r\nContent-Disposition: form-data; name=", _UPLOAD, "upload"),
    "a form of another boundary": Hostile(lambda: _form(b"x", boundary=b"other"), _UPLOAD, "upload"),
    "a form of 50,000 fields": Hostile(lambda: _form(b"x")[:-5] * 50_000, _UPLOAD, "upload"),
    "a form without a boundary": Hostile(lambda: _form(b"x"), ("content-type: multipart/form-data",), "upload"),
    "a name that leads out": Hostile(lambda: _form(_tar("a"), name=b"../../x"), _UPLOAD, "upload"),
    "a name of 10,000 letters": Hostile(lambda: _form(_tar("a"), name=b"n" * 10_000), _UPLOAD, "upload"),
    "not an archive": Hostile(lambda: _form(b"\x1f\x8b" + b"x" * 1000), _UPLOAD, "upload"),
    "an archive that leads out": Hostile(lambda: _form(_tar("../../../tmp/out")), _UPLOAD, "upload"),
    "an archive with a link": Hostile(
        lambda: _form(_tar("adapter_config.json", kind=tarfile.SYMTYPE, target="/etc/passwd")), _UPLOAD, "upload"
    ),
    "an archive that is a bomb": Hostile(lambda: _form(_bomb()), _UPLOAD, "upload"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with a_place(tmp_path_factory.mktemp("place")) as place:
        place.start()
        place.await_ready()
        yield place


def routes(place: Place) -> list[tuple[str, bool]]:
    """Every POST route, and whether it reads a body."""
    document = httpx2.get(place.url + "/openapi.json", timeout=30).json()
    found = []
    for path, item in document["paths"].items():
        if "post" in item:
            found.append((re.sub(r"\{[^}]*\}", "nothing", path), "requestBody" in item["post"]))
    return found


def send(place: Place, path: str, hostile: Hostile) -> bytes:
    """Everything that comes back on the connection."""
    body = hostile.make()
    top = head("POST", path, *hostile.lines, f"content-length: {len(body)}", "connection: close")
    received = b""
    with connect(place.port) as connection:
        connection.settimeout(60)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may refuse before all has arrived
            connection.sendall(top + body)
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(65536):
                received += part
    return received


def verdict(received: bytes, *, reads: bool) -> tuple[int, str | None]:
    """The status of the one answer, and what is wrong with it."""
    top, _, body = received.partition(b"\r\n\r\n")
    if not top:
        return 0, "no answer"
    status = int(top.split()[1])
    if received.count(b"HTTP/1.1 ") != 1:
        return status, "several answers"
    if not reads and status == 200:  # a route without a body ignores what comes along
        return status, None
    if not 400 <= status < 500:
        return status, f"not a 4xx: {body[:500]!r}"
    if b"x-request-id:" not in top.lower() or len(body) > LONGEST_ERROR:
        return status, f"no request id, or {len(body)} bytes of error"
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return status, f"no envelope: {body[:500]!r}"
    if set(error) != {"message", "type", "param", "code", "hint"} or not (error["message"] and error["code"]):
        return status, f"a wrong envelope: {error}"
    return status, "the inside shows" if re.search(r"Traceback|\.py\b|site-packages", error["message"]) else None


def test_every_hostile_body_gets_one_refusal_and_costs_no_memory(place: Place) -> None:
    every, began = routes(place), time.monotonic()
    for path, _ in every:  # what is imported and cached at first use
        send(place, path, CORPUS["20 MB"])
    assert httpx2.post(place.url + "/v1/chat/completions", json=CHAT, timeout=30).status_code == 200
    before = resident(place)
    forget_highest(place)
    wrong, statuses, slowest = [], Counter[int](), (0.0, "")
    for name, hostile in CORPUS.items():
        for path, reads in every:
            if hostile.only not in path or (name == "nothing" and "activate" in path):
                continue
            sent = time.monotonic()
            status, problem = verdict(send(place, path, hostile), reads=reads)
            slowest = max(slowest, (time.monotonic() - sent, f"{name} to {path}"))
            statuses[status] += 1
            if problem:
                wrong.append(f"{name} to {path}: {status}, {problem}")
    after, peak = resident(place), highest_resident(place)
    print(f"\n{sum(statuses.values())} bodies ({len(CORPUS)} kinds, {len(every)} routes) in ", end="")
    print(f"{time.monotonic() - began:.0f} s; {dict(statuses)}; slowest {slowest[0]:.1f} s: {slowest[1]}")
    for hostile in (hostile for name, hostile in CORPUS.items() if name.startswith(("20 MB", "a million"))):
        for path, _ in every:
            send(place, path, hostile)
    again = resident(place)
    print(f"memory {before / MIB:.0f} MiB before, {after / MIB:.0f} after, {peak / MIB:.0f} at most; ", end="")
    print(f"{again / MIB:.0f} after the large ones once more")
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong)
    assert after - before < GROWTH and again - after < AGAIN and peak - before < PEAK
    assert place.is_alive
    assert httpx2.post(place.url + "/v1/chat/completions", json=CHAT, timeout=30).status_code == 200
    assert httpx2.get(place.url + "/v1/health", timeout=30).json()["status"] == "ok"
    assert httpx2.get(place.url + "/v1/adapters", timeout=30).json()["available"] == []
    assert httpx2.get(place.url + "/v1/train/status", timeout=30).json() == []
