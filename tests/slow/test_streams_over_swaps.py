"""Streams and plain chats in flight while the active version is swapped: each answer is of the one version it names.

    pytest -m slow tests/slow/test_streams_over_swaps.py     a minute

Each version is an adapter that says one letter and nothing else, so a single token of another version would show.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from crash.place import Place, a_place
from groupwise.model.load import load_model

from .marked import archive, save_marked

pytestmark = pytest.mark.slow

LETTERS = {"mark@1": "A", "mark@2": "Q", "mark@3": "z"}
SWAPS = 12
STREAMS = PLAIN = 60
TOKENS = 120
PROMPTS = [f"{i} + {i} = ?" for i in range(40)]


@dataclass(frozen=True)
class Heard:
    """An answer: the version in each place that names one, its text, why it ended, and when it was in flight."""

    streamed: bool
    named: frozenset[str]
    text: str
    finish_reason: str | None
    began: float
    ended: float


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("place")
    with a_place(root, settings=("batch_rows=160", "first_token_timeout_s=120")) as place:
        place.start()
        archives = [_archive(letter, root / letter) for letter in LETTERS.values()]
        place.await_ready()
        for content, version in zip(archives, LETTERS, strict=True):
            form = {"name": "mark", "new_version": "true"}
            answer = httpx2.post(place.url + "/v1/adapters/upload", data=form, files={"archive": content}, timeout=60)
            assert answer.json().get("version") == version, answer.text
        activate(place, "mark@1")
        yield place


def _archive(letter: str, directory: Path) -> bytes:
    return archive(save_marked(load_model("starter"), letter, directory, prompts=PROMPTS, tokens=TOKENS))


def activate(place: Place, version: str) -> None:
    answer = httpx2.post(f"{place.url}/v1/adapters/load", json={"name": version}, timeout=60)
    assert answer.json().get("version") == version, answer.text


def body(i: int, *, stream: bool) -> dict[str, Any]:
    messages = [{"role": "user", "content": PROMPTS[i % len(PROMPTS)]}]
    return {"messages": messages, "max_tokens": TOKENS, "temperature": 0, "stream": stream}


def ask(place: Place, i: int) -> Heard:
    return _stream(place, i) if i % 2 else _plain(place, i)


def _plain(place: Place, i: int) -> Heard:
    began = time.monotonic()
    response = httpx2.post(place.url + "/v1/chat/completions", json=body(i, stream=False), timeout=200)
    assert response.status_code == 200, response.text
    answer = response.json()
    (choice,) = answer["choices"]
    named = frozenset((answer["system_fingerprint"], response.headers["x-adapter-version"]))
    return Heard(False, named, choice["message"]["content"], choice["finish_reason"], began, time.monotonic())


def _stream(place: Place, i: int) -> Heard:
    began, text, named, reasons, ended = time.monotonic(), "", set(), [], False
    url = place.url + "/v1/chat/completions"
    with httpx2.stream("POST", url, json=body(i, stream=True), timeout=200) as response:
        assert response.status_code == 200, response.read()
        named.add(response.headers["x-adapter-version"])
        for line in response.iter_lines():
            if not line.startswith("data: "):
                continue
            assert not ended, f"something comes after [DONE]: {line}"
            if ended := line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            named.add(chunk["system_fingerprint"])
            for choice in chunk["choices"]:
                text += choice["delta"].get("content") or ""
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert ended and len(reasons) == 1, f"the stream was cut: {reasons}, {text[-40:]!r}"
    return Heard(True, frozenset(named), text, reasons[0], began, time.monotonic())


def test_every_answer_is_wholly_of_the_version_it_names(place: Place) -> None:
    heard: list[Heard] = []
    wanted = iter(range(10**6))
    enough, lock = threading.Event(), threading.Lock()

    def keep_asking() -> None:
        while not enough.is_set():
            with lock:
                i = next(wanted)
            heard.append(ask(place, i))

    swaps: list[float] = []
    with ThreadPoolExecutor(STREAMS + PLAIN) as threads:
        askers = [threads.submit(keep_asking) for _ in range(STREAMS + PLAIN)]
        try:
            time.sleep(1.5)
            for k in range(SWAPS):
                activate(place, list(LETTERS)[(k + 1) % len(LETTERS)])
                swaps.append(time.monotonic())
                time.sleep(0.7)
        finally:
            enough.set()
        for asker in askers:
            asker.result()

    for each in heard:
        assert len(each.named) == 1, each
        (version,) = each.named
        assert (each.text, each.finish_reason) == (LETTERS[version] * TOKENS, "length"), each
    over = [sum(each.began < swap < each.ended for each in heard) for swap in swaps]
    streams = sum(each.streamed for each in heard)
    versions = Counter(str(*each.named) for each in heard)
    print(f"\n{streams} streams, {len(heard) - streams} plain, {len(swaps)} swaps; ", end="")
    print(f"in flight over each: {over}; {versions}")
    assert min(streams, len(heard) - streams) >= 60 and min(over) >= 60 and set(versions) == set(LETTERS)
