"""Requests that are meant to keep a server from others, sent from a process of their own: `python load.py PORT NAME`.

Prints JSON when it is over: {"seconds": [..], "statuses": [..], "codes": [..]} of its requests.
"""

from __future__ import annotations

import http.client
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

WORDS = "the answer is 12 because 5 plus 7 is 12. "
FORM = "multipart/form-data; boundary=b"


def text(size: int) -> str:
    return (WORDS * (size // len(WORDS) + 1))[:size]


def chat(content: str) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}]}).encode()


def conversation(messages: int, content: str) -> bytes:
    turns = [{"role": ("user", "assistant")[i % 2], "content": content} for i in range(messages)]
    return json.dumps({"examples": [{"messages": turns}]}).encode()


def groups(size: int, *, completion: int = 1500, prompt: int = 12, each: int = 8) -> bytes:
    """Groups of completions, `size` bytes of them in all."""
    made, total = [], 0
    while total < size:
        completions = [{"text": text(completion - i % 7), "reward": float(i % 2)} for i in range(each)]
        made.append({"messages": [{"role": "user", "content": text(prompt)}], "completions": completions})
        total += each * (completion + 32) + prompt + 60
    return json.dumps({"groups": made, "config": {"learning_rate": 0}}).encode()


def ids(size: int) -> bytes:
    """One completion of so many bytes of token ids."""
    long = b",".join([b"300"] * (size // 4))
    return b'{"groups":[{"completions":[{"reward":1,"prompt_token_ids":[1],"token_ids":[' + long + b"]}]}]}"


def lists(size: int) -> bytes:
    return b'{"groups":[' + b"[]," * (size // 3) + b"[]]}"


BODIES: dict[str, tuple[str, int, Callable[[], bytes]]] = {
    "a chat of 8 MB": ("/v1/chat/completions", 1, lambda: chat("x" * 8_000_000)),
    "six chats of 7 MiB": ("/v1/chat/completions", 6, lambda: chat(text(7 << 20))),
    "8 MiB of ids to complete": ("/v1/completions", 1, lambda: b'{"prompt":[' + b"1," * 4_100_000 + b"1]}"),
    "60 MB of completions": ("/v1/train/grpo", 1, lambda: groups(60_000_000)),
    "60 MB of completions of one long prompt": (
        "/v1/train/grpo",
        1,
        lambda: groups(60_000_000, completion=60, prompt=1800, each=600_000),
    ),
    "60 MB of token ids": ("/v1/train/grpo", 1, lambda: ids(60_000_000)),
    "60 MB of lists": ("/v1/train/grpo", 1, lambda: lists(60_000_000)),
    "one message of 19 MiB": ("/v1/train/grpo", 1, lambda: groups(1, prompt=19 << 20)),
    "2,048 messages of a letter": ("/v1/train/sft", 1, lambda: conversation(2048, "x")),
    "45 bodies of 535 KiB": ("/v1/train/sft", 45, lambda: conversation(2048, "x" * 230)),
}


def post(port: int, path: str, body: bytes) -> tuple[float, int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=900)
    began = time.perf_counter()
    try:
        connection.request("POST", path, body=body, headers={"content-type": "application/json"})
        answer = connection.getresponse()
        said = json.loads(answer.read())
        return time.perf_counter() - began, answer.status, said.get("error", {}).get("code", "")
    except OSError as error:
        return time.perf_counter() - began, 0, type(error).__name__
    finally:
        connection.close()


def send(port: int, path: str, count: int, body: bytes) -> dict[str, Any]:
    told: list[tuple[float, int, str]] = []
    threads = [threading.Thread(target=lambda: told.append(post(port, path, body))) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, statuses, codes = zip(*told, strict=True)
    return {"seconds": seconds, "statuses": statuses, "codes": codes}


def open_silent(port: int, count: int) -> Iterator[socket.socket]:
    for _ in range(count):
        with suppress(OSError):
            yield socket.create_connection(("127.0.0.1", port), timeout=10)


def chunks(port: int) -> dict[str, Any]:
    """A body in chunks of one byte."""
    began = time.perf_counter()
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        top = b"POST /v1/train/grpo HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        connection.sendall(top + b"transfer-encoding: chunked\r\n\r\n")
        with suppress(OSError):
            connection.sendall(b"1\r\nx\r\n" * 1_000_000 + b"0\r\n\r\n")
        status = connection.recv(64)[9:12]
    return {"seconds": [time.perf_counter() - began], "statuses": [int(status or 0)], "codes": [""]}


def main(port: int, name: str) -> dict[str, Any]:
    if name == "6,000 silent connections":
        kept = list(open_silent(port, 6000))
        time.sleep(2)
        return {"seconds": [], "statuses": [], "codes": [], "kept": len(kept)}
    if name == "a million chunks":
        return chunks(port)
    path, count, make = BODIES[name]
    return send(port, path, count, make())


if __name__ == "__main__":
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(json.dumps(main(int(sys.argv[1]), sys.argv[2])))
