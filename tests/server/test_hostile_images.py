"""Sixty hostile images and bodies, in every dialect: each is refused with a code, nothing is fetched, opened or kept,
and memory stays bounded."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from groupwise.model.vision import Vision
from groupwise.server.images import folder_of
from groupwise.server.reader import PIXELS, SHORT
from hostile_images import ADDRESSES, FILES, GOOD, PARTS, file_of, url
from seeing_models import drawn, save_seeing
from whole_server import Whole, whole

MOST_GROWTH = 64 << 20  # bytes: none of 50 million pixels is decoded in the server's process


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


@pytest.mark.parametrize("name", PARTS)
def test_what_is_no_url_is_refused(site: Whole, name: str) -> None:
    check_refused(site, PARTS[name], ("invalid_messages", "invalid_value", "invalid_type", "invalid_image", "missing"))


def test_an_image_of_many_pixels_is_looked_at_elsewhere(site: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, which tells the server what it found; here it is decoded for the model alone."""
    looked_at, here = Vision._looked_at, list[object]()
    monkeypatch.setattr(
        Vision, "_looked_at", lambda self, picture: here.append(seen := looked_at(self, picture)) or seen
    )
    many = file_of(Image.new("RGB", (2000, 1100)))
    assert len(many) < SHORT / 2 and PIXELS < 2000 * 1100
    part = {"type": "image_url", "image_url": {"url": url(many)}}
    body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
    answer = site.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200 and not here, answer.text


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
