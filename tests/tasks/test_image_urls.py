"""Rows whose images are addresses: fetched where their hosts are allowed, kept, and errors that name row and place."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from groupwise.config.data import DataConfig
from groupwise.config.images import ImagesConfig
from groupwise.errors import DataError
from groupwise.pictures import pictures_in, read_picture
from groupwise.tasks.image_urls import addresses_in, fetched, kept_at
from groupwise.tasks.prompts import open_prompts
from image_host import ImageHost, image_host, png, reply


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ImageHost]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with image_host() as host:
        for i in range(3):
            host.pages[f"/{i}.png"] = reply(png(i))
        yield host


@pytest.fixture
def here(host: ImageHost) -> str:
    return f"http://127.0.0.1:{host.port}"


def prompts(folder: Path, rows: list[Any], here: str, **options: Any) -> Any:
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    kind = options.pop("kind", "grpo")
    config = DataConfig(source="rows.jsonl", images=ImagesConfig(allowed_hosts=(here,) if here else ()), **options)
    return open_prompts(config, folder=folder, kind=kind).known


def test_columns_and_parts_are_fetched(tmp_path: Path, host: ImageHost, here: str) -> None:
    part = {"type": "image_url", "image_url": {"url": f"{here}/2.png"}}
    rows = [
        {"prompt": "How many?", "image": f"{here}/0.png"},
        {"prompt": "How many?", "images": [{"bytes": None, "path": f"{here}/1.png"}, f"{here}/0.png"]},
        {"prompt": [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}]},
        {"prompt": [{"role": "user", "content": [{"type": "image", "url": f"{here}/1.png"}]}]},
    ]
    found = [pictures_in(prompt.messages) for prompt in prompts(tmp_path, rows, here)]
    assert found == [[read_picture(png(i)) for i in each] for each in ([0], [1, 0], [2], [1])]
    assert len(host.asked) <= 5


def test_pairs_and_answers_are_fetched_too(tmp_path: Path, host: ImageHost, here: str) -> None:
    row = {"prompt": "How many?", "chosen": "3", "rejected": "4", "image": f"{here}/0.png"}
    (pair,) = prompts(tmp_path, [row], here, kind="dpo")
    assert pictures_in(pair.messages) == [read_picture(png(0))]
    said = [{"role": "user", "content": [{"type": "image", "url": f"{here}/1.png"}]}]
    (example,) = prompts(tmp_path, [{"messages": [*said, {"role": "assistant", "content": "3"}]}], here, kind="sft")
    assert pictures_in(example.messages) == [read_picture(png(1))]


def test_what_was_fetched_is_kept_and_asked_for_once(tmp_path: Path, host: ImageHost, here: str) -> None:
    rows = [{"prompt": "How many?", "image": f"{here}/0.png"}]
    (first,) = prompts(tmp_path, rows, here)
    host.pages["/0.png"] = reply(png(7))
    (again,) = prompts(tmp_path, rows, here)
    assert pictures_in(again.messages) == pictures_in(first.messages) and len(host.asked) == 1
    assert kept_at(f"{here}/0.png").read_bytes() == png(0)
    kept_at(f"{here}/0.png").unlink()
    (anew,) = prompts(tmp_path, rows, here)
    assert pictures_in(anew.messages) == [read_picture(png(7))]


def test_what_was_kept_is_refused_once_its_host_is_not_allowed(tmp_path: Path, host: ImageHost, here: str) -> None:
    rows = [{"prompt": "How many?", "image": f"{here}/0.png"}]
    assert prompts(tmp_path, rows, here)
    for entry in ("", "https://images.example.com"):
        with pytest.raises(DataError, match=r"rows.jsonl:1: image is"):
            prompts(tmp_path, rows, entry)


def test_an_error_names_row_and_place(tmp_path: Path, host: ImageHost, here: str) -> None:
    good = {"prompt": "How many?", "image": f"{here}/0.png"}
    parts = [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": f"{here}/missing.png"}}]
    for row, place in [
        ({"prompt": "?", "images": [f"{here}/0.png", f"{here}/missing.png"]}, r"images\[1\]"),
        ({"prompt": [{"role": "user", "content": parts}]}, r"prompt\[0\]\.content\[1\]"),
        ({"prompt": "?", "image": "https://elsewhere.example.com/a.png"}, "image"),
    ]:
        with pytest.raises(DataError, match=rf"rows.jsonl:2: {place} is .*, which is not fetched"):
            prompts(tmp_path, [good, row], here)


def test_streamed_rows_and_each_source_have_their_hosts(tmp_path: Path, host: ImageHost, here: str) -> None:
    rows = [{"prompt": "How many?", "image": f"{here}/{i}.png"} for i in range(3)]
    assert len(prompts(tmp_path, rows, here, streaming=True, shuffle=False)) >= 1
    source = {"source": "rows.jsonl"}
    config = DataConfig.model_validate({"sources": [source], "images": {"allowed_hosts": [here]}})
    assert len(open_prompts(config, folder=tmp_path).known) == 3


def test_several_are_fetched_at_once(tmp_path: Path, host: ImageHost, here: str) -> None:
    running, most, lock = [0], [0], threading.Lock()
    serve = host.serve

    def counted(connection: Any) -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.05)
        serve(connection)
        with lock:
            running[0] -= 1

    host.serve = counted  # type: ignore[method-assign]
    rows = [{"prompt": f"{i}", "image": f"{here}/0.png?{i}"} for i in range(24)]
    host.pages |= {f"/0.png?{i}": reply(png()) for i in range(24)}
    assert len(prompts(tmp_path, rows, here)) == 24
    assert 2 <= most[0] <= 12  # eight, and those whose end the host has not seen yet


def test_only_images_parts_have_addresses() -> None:
    url = "https://a.example.com/x.png"
    part = {"type": "image_url", "image_url": {"url": url}}
    body = {"model": url, "messages": [{"role": "user", "content": [{"type": "text", "text": url}, part]}], "url": url}
    assert [*addresses_in(body)] == [("messages[0].content[1].image_url.url", url)]
    block = {"type": "image", "source": {"type": "url", "url": url}}
    assert [*addresses_in([block])] == [("[0].source.url", url)]
    assert not [*addresses_in({"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}})]
    row = {"prompt": "?", "notes": {"type": "image", "url": url}}  # no message
    assert fetched(row, ImagesConfig(allowed_hosts=("b.example.com",)), id="1") == row
