"""A server of the Tinker wire after 10,000 requests that nobody fetches, and after 1,000 clients that came and went."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

pytest.importorskip("google.protobuf")

from crash.place import Place, a_place
from tinker_wire import Wire, sample, snapshot, supervised

from .place import CHAT, MIB, open_sockets, resident

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

FUTURES, CYCLES = 10_000, 1_000


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with a_place(tmp_path_factory.mktemp("place"), settings=("tinker=true", "tinker_gap_s=600")) as place:
        place.start()
        place.await_ready()
        yield place


@pytest.fixture
def http(place: Place) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=place.url, timeout=120) as http:
        yield http


def client(http: httpx2.Client) -> Wire:
    """One more client of the wire."""
    server = SimpleNamespace(config=SimpleNamespace(served_name="starter"))
    site: Any = SimpleNamespace(app=None, http=http, server=server)
    return Wire(site)


def test_ten_thousand_futures_are_refused_in_time_and_go_with_their_session(place: Place, http: httpx2.Client) -> None:
    wire = client(http)
    model = wire.model()
    before = resident(place)
    statuses = [wire.post("optim_step", model_id=model, seq_id=2 + n % 4000).status_code for n in range(FUTURES)]
    assert set(statuses) <= {200, 429}
    base = wire.ok("create_sampling_session", session_id=wire.session, sampling_session_seq_id=0)
    body: dict[str, Any] = {"sampling_session_id": base["sampling_session_id"], "sampling_params": {"max_tokens": 1}}
    body["prompt"] = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
    sampled = [wire.post("asample", seq_id=n, **body).status_code for n in range(FUTURES)]
    assert set(sampled) <= {200, 429} and sampled.count(200) >= 90
    wire.backward_answer(model, 1, supervised(1))  # what all wait for has room
    assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
    wire.ok(f"sessions/{wire.session}/finish")
    assert wire.post("retrieve_future", request_id=f"{model}:2").status_code == 410
    assert resident(place) < before + 150 * MIB


def test_a_thousand_clients_leave_nothing(place: Place, http: httpx2.Client) -> None:
    def cycle(number: int) -> None:
        wire = client(http)
        model = wire.model(seed=number)
        wire.backward_answer(model, 1, supervised(number))
        wire.step(model, 2)  # whose answer nobody fetches
        sampler = snapshot(wire, model, 3, 0)["sampling_session_id"]
        assert sample(wire, sampler, 0, sampling_params={"max_tokens": 2}).sequences
        wire.ok(f"sessions/{wire.session}/finish")

    for number in range(CYCLES // 5):
        cycle(number)
    memory, sockets = resident(place), open_sockets(place)
    for number in range(CYCLES // 5, CYCLES):
        cycle(number)
    print(f"{(resident(place) - memory) / MIB:.1f} MiB more after {CYCLES - CYCLES // 5} clients")
    assert resident(place) < memory + 32 * MIB and open_sockets(place) <= sockets + 2
    assert http.get("/api/v1/sessions").json() == {"sessions": []}
    assert not list(Path(place.state).glob("tinker/snapshots/*/v*"))
