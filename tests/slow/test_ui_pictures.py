"""Pictures in the web interface, with the seeing starter served: asked about, compared, taught, and seen afterwards.

pytest -m slow tests/slow/test_ui_pictures.py     two minutes; needs Chromium and `pip install playwright`
"""

from __future__ import annotations

import base64
import io
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from crash.place import Place, a_place
from groupwise.cli.report.build import report
from groupwise.config.serve import ServeConfig
from groupwise.model.image_tokens import FIRST, PLACES, key_of
from groupwise.pictures import Picture, read_picture
from groupwise.server.run_app import build_run_app
from groupwise.server.run_files import open_runs
from groupwise.tasks.starter.scenes import Thing, picture_of
from groupwise.types import Message, Prompt, RolloutGroup
from run_place import ASKED, make_run, scored
from seeing_models import drawn
from serving import running

from .chromium import CHROMIUM, expect, watched, wrong_in

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]

QUESTION = "How many red circles are there? Just the number."
TWO_RED = {"a1": Thing("circle", "red"), "c3": Thing("circle", "red"), "b2": Thing("square", "blue")}
BROUGHT = """([node, [name, kind, body], event]) => {
  const files = new DataTransfer();
  files.items.add(new File([Uint8Array.from(atob(body), (each) => each.charCodeAt(0))], name, { type: kind }));
  const options = { bubbles: true, cancelable: true };
  const brought = event === "paste" ? { clipboardData: files } : { dataTransfer: files };
  const made = new (event === "paste" ? ClipboardEvent : DragEvent)(event, { ...options, ...brought });
  node.dispatchEvent(made);
  return made.defaultPrevented;
}"""
WIDTHS = pytest.mark.parametrize("width", [390, 1280])
SCHEMES = pytest.mark.parametrize("scheme", ["light", "dark"])


def png(image: Any) -> bytes:
    written = io.BytesIO()
    image.save(written, format="PNG")
    return written.getvalue()


DOTS = png(picture_of(TWO_RED, random.Random(1)))
NOISE = png(drawn(64, 64))
LARGE = png(drawn(800, 600))  # noise, of 1.4 MB


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with a_place(tmp_path_factory.mktemp("place"), model="starter-vl", settings=["chat_body_bytes=1048576"]) as place:
        place.start()
        place.await_ready()
        yield place


def go(page: Any, url: str, where: str) -> None:
    page.goto(f"{url}/ui/#/{where}")
    expect(page.get_by_role("heading", level=1)).to_be_visible()


def bring(page: Any, target: Any, data: bytes, *, name: str = "dots.png", by: str = "paste", kind: str = "image/png"):
    """Paste or drop a file, and look whether the page took it."""
    file = [name, kind, base64.b64encode(data).decode()]
    assert page.evaluate(BROUGHT, [target.element_handle(), file, by])


def is_drawn(image: Any, *, wide: int = 64) -> None:
    expect(image).to_have_js_property("naturalWidth", wide)


def sampled(place: Place, data: bytes = DOTS) -> str:
    """Sample a group about a picture; the id of one of its rollouts."""
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    body = {"prompts": [[{"role": "user", "content": content}]], "n": 4, "max_tokens": 8}
    answer = httpx2.post(place.url + "/v1/completions/batch", json=body, timeout=60).json()
    return answer["completions"][0]["rollout_id"]


# ---- the playground ----
def test_a_pasted_picture_is_enlarged_taken_back_dropped_asked_about_and_found(page: Any, place: Place) -> None:
    asked: list[Any] = []
    page.on("request", lambda r: asked.append(r.post_data_json) if r.url.endswith("/chat/completions") else None)
    go(page, place.url, "play")
    message = page.get_by_role("textbox", name="Message")
    expect(page.get_by_role("button", name="Add pictures")).to_be_visible()
    bring(page, message, DOTS)
    small = page.get_by_role("button", name="Enlarge Picture 1, dots.png")
    small.focus()
    page.keyboard.press("Enter")
    zoom = page.get_by_role("dialog", name="Picture 1, dots.png")
    is_drawn(zoom.get_by_role("img", name="Picture 1, dots.png"))
    expect(zoom).to_contain_text("64 × 64 pixels")
    page.keyboard.press("Escape")
    expect(zoom).to_be_hidden()
    expect(small).to_be_focused()
    page.get_by_role("button", name="Remove Picture 1, dots.png").press("Enter")
    expect(small).to_have_count(0)
    bring(page, page.get_by_role("region", name="Chat 1"), DOTS, by="drop")
    expect(small).to_be_visible()
    message.fill(QUESTION)
    message.press("Enter")
    chat = page.get_by_role("region", name="Chat 1")
    expect(chat.get_by_role("button", name="Answer again")).to_be_visible(timeout=30_000)
    image, text = asked[-1]["messages"][0]["content"]
    assert text == {"type": "text", "text": QUESTION}
    assert base64.b64decode(image["image_url"]["url"].partition(",")[2]) == DOTS
    is_drawn(chat.locator("li button img"))
    message.fill("Where is the blue square?")  # the picture stays in the conversation
    message.press("Enter")
    expect(chat.get_by_role("button", name="Answer again")).to_be_visible(timeout=30_000)
    assert [type(each["content"]) for each in asked[-1]["messages"]] == [list, str, str]
    page.reload()
    is_drawn(chat.locator("li button img"))
    go(page, place.url, f"rollouts?id={sampled(place)}")
    group = page.get_by_role("region", name="Group")
    is_drawn(group.get_by_role("list", name="Pictures of the prompt").locator("button img"))
    expect(group.get_by_role("listitem").filter(has_text="tokens")).to_have_count(4)
    group.get_by_role("button", name="Enlarge Picture 1").click()
    is_drawn(page.get_by_role("dialog", name="Picture 1").get_by_role("img"))
    assert group.get_by_label("Colour by").get_by_role("option").all_inner_texts() == ["surprise (logprob)"]


def test_the_button_takes_files_and_what_is_none_is_said(page: Any, place: Place) -> None:
    go(page, place.url, "play")
    message = page.get_by_role("textbox", name="Message")
    with page.expect_file_chooser() as opened:
        page.get_by_role("button", name="Add pictures").click()
    files = [{"name": f"{i}.png", "mimeType": "image/png", "buffer": data} for i, data in enumerate((DOTS, NOISE))]
    opened.value.set_files(files)
    expect(page.get_by_role("button", name="Enlarge Picture 2, 1.png")).to_be_visible()
    refused = page.get_by_role("alert")
    bring(page, message, b"%PDF", name="paper.pdf", kind="application/pdf")
    expect(refused).to_contain_text("paper.pdf is application/pdf")
    bring(page, message, LARGE, name="large.png")
    expect(refused).to_contain_text("chat_body_bytes")
    expect(page.get_by_role("list", name="Pictures").get_by_role("listitem")).to_have_count(2)
    bring(page, message, b"no picture", name="broken.png")
    expect(page.get_by_text("Picture 3, broken.png: this browser cannot draw it")).to_be_visible()
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("region", name="Chat 1").get_by_role("alert")).to_contain_text("cannot be read as an image")


# ---- teaching ----
def test_what_is_taught_about_pictures_is_scored_beside_them(page: Any, place: Place) -> None:
    go(page, place.url, "teach")
    page.get_by_label("Prompt 1", exact=True).fill(QUESTION)
    page.get_by_label("Answer 1").fill("2")
    bring(page, page.get_by_label("Prompt 1", exact=True), DOTS)
    expect(page.get_by_role("button", name="Enlarge Picture 1, dots.png")).to_be_visible()
    page.get_by_role("button", name="Sample", exact=True).click()
    group = page.get_by_role("region", name="Group 1")
    expect(group.locator("[data-card]")).to_have_count(8, timeout=60_000)
    is_drawn(group.get_by_role("button", name="Enlarge Picture 1, dots.png").locator("img"))
    page.reload()
    is_drawn(group.get_by_role("button", name="Enlarge Picture 1, dots.png").locator("img"))
    card = group.locator("[data-card]").first
    for number, key in enumerate("ynyn"):
        group.locator("[data-card]").nth(number).focus()
        page.keyboard.press(key)
    group.get_by_role("button", name="Enlarge Picture 1, dots.png").click()
    page.keyboard.press("n")  # in the dialog it scores nothing
    page.keyboard.press("Escape")
    expect(card).to_have_attribute("aria-label", re.compile("score 1$"))
    page.get_by_role("button", name="A or B").click()
    is_drawn(page.get_by_role("group", name="Which is better?").locator("img").first)
    page.get_by_label("Adapter").fill("seen")
    page.get_by_role("button", name="Train", exact=True).click()
    expect(page.get_by_role("region", name="Before and after")).to_be_visible(timeout=120_000)


# ---- versions beside each other ----
def test_versions_are_shown_the_same_picture(page: Any, place: Place) -> None:
    go(page, place.url, "play/compare")
    bring(page, page.get_by_label("Prompt"), DOTS)
    page.get_by_label("Prompt").fill(QUESTION)
    page.get_by_label("Samples").fill("1")
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.get_by_role("region", name="Column 1").get_by_text("answered by base")).to_be_visible(timeout=30_000)
    go(page, place.url, "adapters?version=seen@1")
    bring(page, page.get_by_label("Prompts, one a line"), DOTS)
    page.get_by_label("Prompts, one a line").fill(QUESTION)
    page.get_by_role("button", name="Compare", exact=True).click()
    is_drawn(page.get_by_role("list", name="Pictures shown with each prompt").locator("button img"))
    expect(page.locator("article pre")).to_have_text(re.compile("[0-9]"))


# ---- of a run ----
@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "seen"
    pictures = [read_picture(data).keep(run / "images") for data in (DOTS, LARGE)]
    return make_run(run, rollouts={1: [group_about(each) for each in pictures]})


def group_about(picture: Picture) -> RolloutGroup:
    first = FIRST + key_of(picture.digest) * PLACES
    content = [{"type": "image", "image": picture}, {"type": "text", "text": QUESTION}]
    messages = (Message(role="user", content=content),)
    prompt = Prompt(id=picture.digest, messages=messages, token_ids=(*range(first, first + 16), *ASKED))
    return RolloutGroup(prompt=prompt, rollouts=(scored("2", 1.0), scored("3", 0.0)))


def test_a_run_on_disk_and_its_report_show_their_pictures(browser: Any, run: Path) -> None:
    page_of = report(run).page.as_uri()
    with running(build_run_app(open_runs([run]), ServeConfig())) as port:
        for url, wide in ((f"http://127.0.0.1:{port}/ui/", 800), (page_of, 320)):
            with watched(browser, url.removesuffix("ui/")) as page:
                for group, width in (("1.0.0", 64), ("1.1.0", wide)):
                    page.goto(f"{url}#/rollouts?id={group}")
                    is_drawn(page.get_by_role("list", name="Pictures of the prompt").locator("button img"), wide=width)


# ---- for everybody ----
@SCHEMES
@WIDTHS
def test_axe_finds_nothing_serious(browser: Any, place: Place, scheme: str, width: int) -> None:
    size = {"width": width, "height": 850}
    context = browser.new_context(bypass_csp=True, color_scheme=scheme, viewport=size)
    page = context.new_page()
    go(page, place.url, "play")
    for number in range(6):
        bring(page, page.get_by_role("textbox", name="Message"), DOTS, name=f"a_name_that_is_rather_long_{number}.png")
    bring(page, page.get_by_role("textbox", name="Message"), b"%PDF", name="paper.pdf", kind="application/pdf")
    expect(page.get_by_role("alert")).to_be_visible()
    assert wrong_in(page) == []
    page.get_by_role("button", name=re.compile("^Enlarge Picture 1")).click()
    expect(page.get_by_role("dialog")).to_be_visible()
    assert wrong_in(page) == []
    page.keyboard.press("Escape")
    page.get_by_role("textbox", name="Message").fill(QUESTION)
    page.get_by_role("textbox", name="Message").press("Enter")
    expect(page.get_by_role("button", name="Answer again")).to_be_visible(timeout=30_000)
    assert wrong_in(page) == []
    go(page, place.url, f"rollouts?id={sampled(place)}")
    is_drawn(page.get_by_role("list", name="Pictures of the prompt").locator("button img"))
    assert wrong_in(page) == []
    go(page, place.url, "teach")
    bring(page, page.get_by_label("Prompt 1", exact=True), DOTS)
    expect(page.get_by_role("button", name=re.compile("^Enlarge Picture 1"))).to_be_visible()
    assert wrong_in(page) == []
    context.close()
