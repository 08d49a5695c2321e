"""Of what one address sends at once the first few are in person, and the rest gives way to others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from groupwise.server import chat
from groupwise.server.sampling import IN_PERSON
from serving import Served, served

ASK = {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "max_tokens": 200, "ignore_eos": True}


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path, [chat.router]) as server:
        yield server


@pytest.mark.long
def test_what_an_address_sends_besides_is_a_batch(api: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    submit = api.engine.submit

    def noted(requests: Any, **options: Any) -> Any:
        asked.extend(each.interactive for each in requests)
        return submit(requests, **options)

    monkeypatch.setattr(api.engine, "submit", noted)

    def ask() -> None:
        httpx.post(f"{api.url}/v1/chat/completions", json=ASK, timeout=120)

    threads = [threading.Thread(target=ask) for _ in range(IN_PERSON + 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) == IN_PERSON + 4 and asked[:IN_PERSON] == [True] * IN_PERSON
    assert not all(asked[IN_PERSON:])
    assert not api.server.admissions.under_way  # all of it is given back
    ask()
    assert asked[-1]
