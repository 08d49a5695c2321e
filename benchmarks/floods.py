"""What does one address cost the others? Chats beside what another address holds open, or sends again and again.

    python benchmarks/floods.py                       all eight, about fourteen minutes
    python benchmarks/floods.py --flood unread --seconds 600
    python benchmarks/floods.py --quick               does it run?

    unread      1,000 streams of 900 tokens that nobody reads
    watchers    1,200 listeners of /v1/events
    half-sent   1,000 requests whose body never comes whole
    schemas     50 chats a second with a response format that takes long or much to compile, each a new one
    ratings     50 ratings a second of one answer
    pictures    10 chats a second with a hostile image: all of tests/hostile_images.py, over and over
    pixels      10 chats a second with an image of 50 million pixels in 47 KB, cut off, each another one
    addresses   50 chats a second whose image is at an address that is allowed, of a host that sends a byte now and then

The flood comes from 127.0.0.2, the chats (16 tokens, one after another, 0.3 s apart) from 127.0.0.1; the server is
`groupwise serve starter` as it is by default, for images `starter-vl`. p50 and p99 are of the time until a chat is
answered whole, before the flood and beside it; MiB are the server's resident memory before, at its most, and 25 s after
(an engine without work gives its memory back after 20 s). Linux only: other systems have no 127.0.0.2.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import socket
import statistics
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import psutil
from live_server import groupwise_server
from rich.console import Console
from rich.table import Table

ADDRESS, PAUSE_S, SETTLE_S = "127.0.0.2", 0.3, 25.0
DRIP = 18427  # the port of a host that sends a byte now and then
ALONE_S = 60.0  # of chats before the flood, at most
HELD = {"unread": 1000, "watchers": 1200, "half-sent": 1000}  # connections
SENT = {"schemas": 50, "ratings": 50, "pictures": 10, "pixels": 10, "addresses": 50}  # requests a second
SEEN = ("pictures", "pixels", "addresses")  # by a model that sees
SENDERS = 4  # at once; a sender waits for its answer
MORE_SENDERS = {"addresses": 64}
CHAT = {"messages": [{"role": "user", "content": "What is 3 + 4?"}]}


def flooded(url: str, flood: str, size: int) -> AbstractContextManager[None]:
    return (held if flood in HELD else repeated)(url, flood, size)


def request_of(flood: str) -> bytes:
    """Returns what each connection of a flood that is held open sends."""
    if flood == "watchers":
        return b"GET /v1/events HTTP/1.1\r\nhost: x\r\n\r\n"
    body = json.dumps({**CHAT, "max_tokens": 900, "stream": True, "ignore_eos": True}).encode()
    sent = body if flood == "unread" else body[:10]
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + sent


@contextmanager
def held(url: str, flood: str, connections: int) -> Iterator[None]:
    """Holds so many connections from another address until the block ends; nothing is read from them."""
    where, sent = urlsplit(url), request_of(flood)
    with ExitStack() as opened:
        for _ in range(connections):
            line = opened.enter_context(socket.socket())
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            line.bind((ADDRESS, 0))
            line.settimeout(10)
            line.connect((where.hostname, where.port))
            line.sendall(sent)
        yield


@contextmanager
def repeated(url: str, flood: str, each_second: int) -> Iterator[None]:
    """Sends so many requests a second from another address, in a process of its own, until the block ends."""
    sender = multiprocessing.get_context("spawn").Process(target=send, args=(url, flood, each_second), daemon=True)
    sender.start()
    try:
        yield
    finally:
        ended = sender.exitcode
        sender.kill()
        sender.join()
        if ended is not None:
            raise SystemExit(f"the flood ended by itself: exit {ended}")


def send(url: str, flood: str, each_second: int) -> None:
    """Sends the requests of a flood for ever. A sender waits for its answer; after a slow one it is late."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # whose images some are of
    senders, dripping = MORE_SENDERS.get(flood, SENDERS), drip() if flood == "addresses" else ""
    pictures = hostile_pictures() if flood == "pictures" else []
    shown = {
        "pictures": lambda i: pictures[i % len(pictures)],
        "pixels": many_pixels,
        "addresses": lambda i: f"{dripping}?{i}",
    }
    with httpx2.Client(base_url=url, timeout=60, transport=httpx2.HTTPTransport(local_address=ADDRESS)) as client:
        rated = client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 4}).json()["id"]
        started = time.monotonic()

        def again(sender: int) -> None:
            for number in itertools.count(sender, senders):
                time.sleep(max(0.0, started + number / each_second - time.monotonic()))
                if flood == "schemas":
                    client.post("/v1/chat/completions", json=hostile_chat(number))
                elif flood in SEEN:
                    client.post("/v1/chat/completions", json=chat_about(shown[flood](number)))
                else:
                    client.post("/v1/feedback", json={"rollout_id": rated, "thumb": ("up", "down")[number % 2]})

        with ThreadPoolExecutor(senders) as pool:
            list(pool.map(again, range(senders)))


def chat_about(address: str) -> dict[str, Any]:
    """Returns a chat about an image."""
    parts = [{"type": "image_url", "image_url": {"url": address}}, {"type": "text", "text": "How many?"}]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 4}


def many_pixels(number: int) -> str:
    """Returns an image of 50 million pixels whose last two thirds are missing; each number's is another one."""
    from hostile_images import chunk, png, url  # pyright: ignore[reportMissingImports]

    said = chunk(b"tEXt", b"a\0" + str(number).encode())
    return url(png(7000, 7000, said, chunk(b"IDAT", zlib.compress(bytes(7000 * 3 * 2300), 9))))


def hostile_pictures() -> list[str]:
    """Returns what the tests post where an image's address should be."""
    from hostile_images import ADDRESSES, FILES, url  # pyright: ignore[reportMissingImports]

    return [*map(url, FILES.values()), *(each.format(port=9) for each in ADDRESSES.values())]


def drip() -> str:
    """Answers on `DRIP`'s port with a byte now and then, without end. Returns the address of an image there."""
    server = socket.create_server(("127.0.0.1", DRIP))

    def answer() -> None:
        with ThreadPoolExecutor(256) as pool:
            while True:
                pool.submit(_drip, server.accept()[0])

    threading.Thread(target=answer, daemon=True).start()
    return f"http://127.0.0.1:{DRIP}/a.png"


def _drip(line: socket.socket) -> None:
    with suppress(OSError), line:
        line.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n")
        while True:
            line.sendall(b"a")
            time.sleep(0.1)


def hostile_chat(number: int) -> dict[str, Any]:
    """Returns a chat whose response format takes long or much to compile; each number's is another one."""
    schema: dict[str, Any] = (
        {"type": "integer", "multipleOf": 99_999_989 + number},
        {"type": "object", "patternProperties": {f"^{number}a{i}.*b": {} for i in range(120)}},
        {"enum": [f"{number} {i}" for i in range(5000)]},
        {"type": "string", "pattern": f"(a|b|{number}){{900}}(c|d){{900}}"},
    )[number // SENDERS % 4]
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return {**CHAT, "max_tokens": 4, "response_format": form}


def chats(url: str, seconds: float) -> tuple[list[float], int, int]:
    """Milliseconds of each chat, how many failed, and the server's memory at its most."""
    took: list[float] = []
    failed = most = 0
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        started = time.perf_counter()
        try:
            answer = httpx2.post(f"{url}/v1/chat/completions", json={**CHAT, "max_tokens": 16}, timeout=60)
            failed += answer.status_code != 200
        except httpx2.HTTPError:
            failed += 1
        took.append(1e3 * (time.perf_counter() - started))
        most = max(most, resident())
        time.sleep(PAUSE_S)
    return took, failed, most


def resident() -> int:
    """Returns the MiB of the server and of the processes that it started."""
    flood = {each.pid for each in multiprocessing.active_children()}
    total = 0
    for child in psutil.Process().children():
        if child.pid not in flood:
            for each in (child, *child.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):  # it has ended
                    total += each.memory_info().rss
    return total >> 20


def measured(flood: str, size: int, seconds: float, settle: float) -> dict[str, Any]:
    allowed = {"images": {"allowed_hosts": [f"http://127.0.0.1:{DRIP}"]}}
    with groupwise_server(**({"model": "starter-vl", **allowed} if flood in SEEN else {})) as client:
        url = client._url
        chats(url, 3)  # what is computed once
        alone, _, before = chats(url, min(seconds, ALONE_S))
        with flooded(url, flood, size):
            beside, failed, most = chats(url, seconds)
        time.sleep(settle)
        row: dict[str, Any] = {"flood": flood, "size": size}
        for name, took in (("alone", alone), ("beside", beside)):
            row |= {f"{name} p50": statistics.median(took), f"{name} p99": percentile(took, 0.99)}
        return {**row, "failed": failed, "MiB before": before, "most": most, "after": resident()}


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    floods = {**HELD, **SENT}
    parser.add_argument("--flood", choices=floods, action="append", help="this one (can be repeated); default: all")
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="of chats beside the flood; before it, 60 at most: 30"
    )
    parser.add_argument("--quick", action="store_true", help="ten of each, two seconds")
    parser.add_argument("--json", type=Path, help="keep the numbers here")
    options = parser.parse_args()
    seconds, settle = (2.0, 0.0) if options.quick else (options.seconds, SETTLE_S)
    rows = [
        measured(flood, 10 if options.quick else floods[flood], seconds, settle) for flood in options.flood or floods
    ]
    table = Table(*rows[0], title="milliseconds of a chat, and the server's memory")
    for row in rows:
        table.add_row(*(f"{cell:.0f}" if isinstance(cell, float) else str(cell) for cell in row.values()))
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
