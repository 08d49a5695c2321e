"""What does one address cost the others? Chats beside a thousand connections that another address opened.

    python benchmarks/floods.py                       all three, about five minutes
    python benchmarks/floods.py --flood unread --seconds 600
    python benchmarks/floods.py --quick               does it run?

    unread      streams of 900 tokens that nobody reads
    watchers    listeners of /v1/events
    half-sent   requests whose body never comes whole

The flood comes from 127.0.0.2, the chats (16 tokens, one after another, 0.3 s apart) from 127.0.0.1; the server is
`groupwise serve starter` as it is by default. p50 and p99 are of the time until a chat is answered whole, before the
flood and beside it; MiB are the server's resident memory before, at its most, and 25 s after (an engine without work
gives its memory back after 20 s). Linux only: it reads /proc.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
from live_server import groupwise_server
from rich.console import Console
from rich.table import Table

ADDRESS, PAUSE_S, SETTLE_S = "127.0.0.2", 0.3, 25.0
ALONE_S = 60.0  # of chats before the flood, at most
CHAT = {"model": "starter", "messages": [{"role": "user", "content": "What is 3 + 4?"}]}


def request_of(flood: str) -> bytes:
    """What each connection of a flood sends."""
    if flood == "watchers":
        return b"GET /v1/events HTTP/1.1\r\nhost: x\r\n\r\n"
    body = json.dumps({**CHAT, "max_tokens": 900, "stream": True, "ignore_eos": True}).encode()
    sent = body if flood == "unread" else body[:10]
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + sent


@contextmanager
def flooded(url: str, flood: str, connections: int) -> Iterator[None]:
    """So many connections from another address until the block ends; nothing is read from them."""
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
    """MiB of this process's children."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            pages = int((stat.parent / "statm").read_text().split()[1])
        except OSError:  # it has ended
            continue
        total += pages if parent == os.getpid() else 0
    return total * os.sysconf("SC_PAGE_SIZE") >> 20


def measured(flood: str, connections: int, seconds: float, settle: float) -> dict[str, Any]:
    with groupwise_server() as client:
        url = client._url
        chats(url, 3)  # what is computed once
        alone, _, before = chats(url, min(seconds, ALONE_S))
        with flooded(url, flood, connections):
            beside, failed, most = chats(url, seconds)
        time.sleep(settle)
        row: dict[str, Any] = {"flood": flood, "connections": connections}
        for name, took in (("alone", alone), ("beside", beside)):
            row |= {f"{name} p50": statistics.median(took), f"{name} p99": percentile(took, 0.99)}
        return {**row, "failed": failed, "MiB before": before, "most": most, "after": resident()}


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    floods = {"unread": 1000, "watchers": 1200, "half-sent": 1000}
    parser.add_argument("--flood", choices=floods, action="append", help="this one (can be repeated); default: all")
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="of chats beside the flood; before it, 60 at most: 30"
    )
    parser.add_argument("--quick", action="store_true", help="ten connections, two seconds")
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
