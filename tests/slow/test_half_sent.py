"""A thousand connections that never finish their requests, and a server that answers everybody else meanwhile.

pytest -m slow tests/slow/test_half_sent.py     under a minute
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx2
import pytest

from crash.place import Place, a_place
from raw_http import connect, head

from .place import CHAT, open_sockets

pytestmark = pytest.mark.slow

CONNECTIONS = 1000
HEADER_S, BODY_S = 6, 12
PROMPT_S, FIRST_S = 1.0, 4.0  # no chat waits for any of the server's deadlines
JSON = "content-type: application/json"
HALVES = (
    b"",
    b"POST /v1/chat/comp",
    head("POST", "/v1/chat/completions", JSON)[:-2],
    head("POST", "/v1/chat/completions", JSON, "content-length: 500"),
    head("POST", "/v1/chat/completions", JSON, "content-length: 500") + b'{"messages": [{"role": "user", "content": "2',
    head("POST", "/v1/train/grpo", JSON, "transfer-encoding: chunked") + b"20\r\n" + b'{"groups": [',
    head("POST", "/v1/adapters/upload", "content-type: multipart/form-data; boundary=b", "content-length: 9999")
    + b"--b",
    head("POST", "/v1/chat/completions", JSON, "content-length: 4000000") + b'{"messages": [' + b" " * 100_000,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    settings = (f"header_timeout_s={HEADER_S}", f"body_timeout_s={BODY_S}")
    with a_place(tmp_path_factory.mktemp("place"), settings=settings) as place:
        place.start()
        place.await_ready()
        yield place


def chat(client: httpx2.Client) -> float:
    """Seconds that one chat took."""
    began = time.monotonic()
    response = client.post("/v1/chat/completions", json=CHAT)
    assert response.status_code == 200, response.text
    return time.monotonic() - began


def open_connections(connections: list[socket.socket]) -> list[socket.socket]:
    """Those that the server has not closed. What it said on them is read and forgotten."""
    poll, known = select.poll(), {connection.fileno(): connection for connection in connections}
    for number in known:
        poll.register(number, select.POLLIN)
    closed = set()
    for number, _ in poll.poll(0):
        try:
            if not known[number].recv(65536):
                closed.add(number)
        except ConnectionResetError:
            closed.add(number)
    return [connection for number, connection in known.items() if number not in closed]


def test_half_sent_requests_hold_up_nobody_and_are_closed(place: Place) -> None:
    with ExitStack() as stack:
        client = stack.enter_context(httpx2.Client(base_url=place.url, timeout=30))
        chat(client)
        sockets_before, began = open_sockets(place), time.monotonic()
        connections = [connect(place.port, HALVES[i % len(HALVES)]) for i in range(CONNECTIONS)]
        for connection in connections:
            stack.enter_context(connection)
            connection.setblocking(False)
        opened = time.monotonic() - began
        assert opened < HEADER_S, f"opening took {opened:.1f} s, longer than the server keeps them"

        first, took = chat(client), []  # behind a thousand connections that have all just come
        still = open_connections(connections)
        assert len(still) == CONNECTIONS, f"{CONNECTIONS - len(still)} are closed after {opened:.1f} s"
        accepted_after = _accepted_after(place, sockets_before + CONNECTIONS, began)
        with ThreadPoolExecutor(4) as others:  # who comes anew must get through, too
            new = others.map(lambda _: _one_chat(place.url), range(4))
            took += [chat(client) for _ in range(10)] + list(new)
        while still and time.monotonic() - began < HEADER_S + BODY_S + 15:
            took.append(chat(client))
            still = open_connections(still)
            time.sleep(0.1)
        closed_after = time.monotonic() - began
        assert not still, f"{len(still)} connections are open after {closed_after:.0f} s"
        print(f"{CONNECTIONS} half-sent requests; {len(took)} chats meanwhile, slowest {max(took):.2f} s ", end="")
        print(f"(the first, behind all that connecting, {first:.2f} s); ", end="")
        print(f"all accepted after {accepted_after:.1f} s, closed after {closed_after:.1f} s")
        assert max(took) < PROMPT_S and first < FIRST_S
        assert open_sockets(place) <= sockets_before + 1
        assert place.is_alive and httpx2.get(place.url + "/ready").status_code == 200


def _accepted_after(place: Place, sockets: int, began: float) -> float:
    """Seconds after `began` at which the server had taken all connections from the kernel's queue, a few in a turn."""
    while open_sockets(place) < sockets:
        assert time.monotonic() - began < HEADER_S, f"{open_sockets(place)} of {sockets} sockets are accepted"
        time.sleep(0.02)
    return time.monotonic() - began


def _one_chat(url: str) -> float:
    with httpx2.Client(base_url=url, timeout=30) as client:
        return chat(client)
