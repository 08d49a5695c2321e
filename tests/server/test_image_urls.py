"""Images that requests name by an address: fetched for a server that allows their host, in every dialect, bounded."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from groupwise.config.images import ImagesConfig
from groupwise.pictures import read_picture
from groupwise.server import image_urls
from groupwise.server.images import folder_of
from image_host import ImageHost, bomb, image_host, png, reply
from seeing_models import save_seeing
from whole_server import Whole, whole


@pytest.fixture(scope="module")
def host() -> Iterator[ImageHost]:
    with image_host() as host:
        for i in range(4):
            host.pages[f"/{i}.png"] = reply(png(i))
        host.pages["/large"] = reply(bytes(3 << 20))
        host.pages["/bomb"] = reply(bomb(), Content_Encoding="gzip")
        host.pages["/away"] = reply(b"", status="302 Found", Location="http://169.254.169.254/latest/")
        yield host


@pytest.fixture(scope="module")
def site(host: ImageHost, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    model = save_seeing("qwen2_5_vl", tmp_path_factory.mktemp("model"))
    images = ImagesConfig(allowed_hosts=(f"http://127.0.0.1:{host.port}",))
    with whole(tmp_path_factory.mktemp("state"), model, images=images, chat_body_bytes=1 << 20) as site:
        yield site


@pytest.fixture(scope="module")
def here(host: ImageHost) -> str:
    return f"http://127.0.0.1:{host.port}"


def part(address: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address}}


def said(*addresses: str, text: str = "How many?") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*map(part, addresses), {"type": "text", "text": text}]}]


def chat(site: Whole, messages: list[dict[str, Any]], **options: Any) -> Any:
    return site.http.post(
        "/v1/chat/completions", json={"messages": messages, "max_tokens": 2, "return_token_ids": True, **options}
    )


def ids_of(site: Whole, answer: Any) -> list[int]:
    assert answer.status_code == 200, answer.text
    return answer.json()["prompt_token_ids"]


def test_an_address_is_the_image_that_is_there(site: Whole, here: str) -> None:
    posted = read_picture(png(0)).url
    assert ids_of(site, chat(site, said(f"{here}/0.png"))) == ids_of(site, chat(site, said(posted)))
    assert list(folder_of(site.server.config).glob(f"{read_picture(png(0)).digest}.*"))


def test_every_dialect_takes_addresses(site: Whole, here: str) -> None:
    wanted = len(ids_of(site, chat(site, said(f"{here}/1.png"))))
    source = {"type": "image", "source": {"type": "url", "url": f"{here}/1.png"}}
    block = {
        "max_tokens": 2,
        "messages": [{"role": "user", "content": [source, {"type": "text", "text": "How many?"}]}],
    }
    for path, name in (("/v1/messages", "usage"), ("/v1/messages/count_tokens", None)):
        answer = site.http.post(path, json={"model": "base", **block})
        assert answer.status_code == 200, answer.text
        told = answer.json()[name] if name else answer.json()
        assert told["input_tokens"] == wanted
    shown = [{"type": "input_image", "image_url": f"{here}/1.png"}, {"type": "input_text", "text": "How many?"}]
    body = {"input": [{"role": "user", "content": shown}], "max_output_tokens": 2}
    first = site.http.post("/v1/responses", json=body)
    assert first.status_code == 200 and first.json()["usage"]["input_tokens"] == wanted, first.text
    further = {"input": "And now?", "previous_response_id": first.json()["id"], "max_output_tokens": 2}
    again = site.http.post("/v1/responses", json=further)
    assert again.status_code == 200 and again.json()["usage"]["input_tokens"] > wanted, again.text
    batch = site.http.post("/v1/completions/batch", json={"prompts": [said(f"{here}/1.png")], "max_tokens": 2})
    assert batch.status_code == 200, batch.text


def test_a_posted_job_trains_on_addresses(site: Whole, here: str) -> None:
    groups = [
        {
            "messages": said(f"{here}/{i}.png"),
            "completions": [{"text": "a", "reward": 1.0}, {"text": "b", "reward": 0.0}],
        }
        for i in (0, 1)
    ]
    answer = site.http.post("/v1/train/grpo", json={"groups": groups, "config": {"output_name": "urls"}})
    assert answer.status_code in (200, 202), answer.text
    site.train()


def test_a_long_body_names_images_too(site: Whole, here: str) -> None:
    """It is read in a process of its own, which knows what was fetched."""
    messages = [
        *said(read_picture(png(2, 200, 160)).url, f"{here}/3.png"),
        {"role": "assistant", "content": "3"},
        *said(),
    ]
    answer = chat(site, messages)
    assert answer.status_code == 200 and len(answer.request.content) > 1 << 16, answer.text


@pytest.mark.parametrize(
    "address",
    [
        "{here}/missing",
        "{here}/bomb",
        "{here}/away",
        "{here}/large",
        "http://127.0.0.2:{port}/0.png",
        "http://169.254.169.254/latest/meta-data/",
        "http://127.0.0.1:{port}\\@169.254.169.254/",
        "https://127.0.0.1:{port}/0.png",
        "http://localhost:{port}/0.png",
    ],
)
def test_what_is_not_fetched_is_refused_with_its_place(site: Whole, host: ImageHost, here: str, address: str) -> None:
    url = address.format(here=here, port=host.port)
    answer = chat(site, said(f"{here}/0.png", url))
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "invalid_image", error
    assert error["param"] == "messages[0].content[1].image_url.url"
    block = {"type": "image", "source": {"type": "url", "url": url}}
    answer = site.http.post(
        "/v1/messages", json={"model": "base", "max_tokens": 2, "messages": [{"role": "user", "content": [block]}]}
    )
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_image"


def test_images_of_one_request_are_bounded_together(site: Whole, host: ImageHost, here: str) -> None:
    host.pages |= {f"/wide{i}": reply(png(i, 400, 300)) for i in range(6)}  # 360 KB each
    answer = chat(site, said(*(f"{here}/wide{i}" for i in range(6))))
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_image", answer.text
    many = chat(site, said(*(f"{here}/0.png?{i}" for i in range(257))))
    assert many.status_code == 400 and many.json()["error"]["code"] == "limit_exceeded", many.text
    host.pages["/again.png"] = host.pages["/0.png"]
    assert chat(site, said(*[f"{here}/again.png"] * 3)).status_code == 200
    assert sum("/again.png " in each for each in host.asked) == 1  # some of the first six may still be on their way


def test_who_drips_delays_nobody_else(site: Whole, here: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_urls, "SECONDS", 2.0)
    with ThreadPoolExecutor(4) as pool:
        slow = [pool.submit(chat, site, said(f"{here}/drips?{i}", f"{here}/drips")) for i in range(3)]
        time.sleep(0.2)
        began = time.monotonic()
        assert chat(site, said()).status_code == 200
        assert chat(site, said(f"{here}/0.png")).status_code == 200
        assert time.monotonic() - began < 2
        assert {each.result().status_code for each in slow} == {400}


def test_where_no_host_is_allowed_nothing_is_fetched(
    host: ImageHost, here: str, model_dir: Path, tmp_path: Path
) -> None:
    images = ImagesConfig(allowed_hosts=(here,))
    with whole(tmp_path / "blind", model_dir, images=images) as blind:
        assert chat(blind, said(f"{here}/0.png?blind")).json()["error"]["code"] == "invalid_image"
    with whole(tmp_path / "seeing", save_seeing("qwen2_5_vl", tmp_path / "model")) as seeing:
        assert chat(seeing, said(f"{here}/0.png?seeing")).json()["error"]["code"] == "invalid_image"
    assert not any("?blind " in each or "?seeing " in each for each in host.asked)
