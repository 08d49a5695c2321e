"""The web interface over a server's state after a busy week: what is in the page stays small, and everything is found.

pytest -m slow tests/slow/test_ui_large.py -s     a minute; -s prints what was measured of each page
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from crash.place import Place, a_place

from .chromium import CHROMIUM, expect, serious
from .filled import fill

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]

VERSIONS, JOBS, ROLLOUTS, DECISIONS = 500, 1500, 20_000, 130  # more jobs than the server tells at once
MOST_ELEMENTS = 2000
PAGES = {  # and what is there when its list is
    "now": "main section",
    "jobs": "tbody tr[aria-rowindex]",
    "rollouts": "[role=option]",
    "learn": "[aria-label='Decisions'] li",
    "adapters": "[aria-label='Versions, a list'] button",
    "adapters?by=name": "[aria-label='Versions, a list'] button",
    "adapters?q=sums": "[aria-label='Versions, a list'] button",
    "teach": "main textarea",
    "play": "main textarea",
    "play/compare": "main textarea",
}
SCROLLED = """async () => {
  const boxes = [...document.querySelectorAll("main *")].filter((each) => getComputedStyle(each).overflowY === "auto");
  const box = boxes.find((each) => each.scrollHeight > each.clientHeight + 50) ?? document.scrollingElement;
  const gaps = [];
  let most = 0;
  for (let i = 0, last = performance.now(); i < 60; i++) {
    box.scrollTop += 400;
    await new Promise(requestAnimationFrame);
    gaps.push(performance.now() - last);
    last = performance.now();
    most = Math.max(most, document.querySelectorAll("*").length);
  }
  gaps.sort((a, b) => a - b);
  return { most, median: gaps[30], worst: gaps[57] };
}"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("large")
    with a_place(root) as place:
        fill(
            place.state, versions=VERSIONS, jobs=JOBS, rollouts=ROLLOUTS, decisions=DECISIONS, scratch=root / "adapter"
        )
        place.start()
        place.await_ready()
        yield place


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("where", PAGES)
def test_only_what_is_seen_is_in_the_page(page: Any, place: Place, where: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    began = time.monotonic()
    page.goto(f"{place.url}/ui/#/{where}")
    page.locator(PAGES[where]).first.wait_for()
    took = time.monotonic() - began
    page.wait_for_timeout(500)
    seen = page.evaluate(SCROLLED)
    frames = f"frames {seen['median']:.0f} ms, of 60 the third worst {seen['worst']:.0f} ms"
    print(f"{where:18} {width:5} px: {took:.2f} s, {seen['most']} elements, {frames}")
    assert seen["most"] < MOST_ELEMENTS


def test_the_oldest_job_is_reached_and_found(page: Any, place: Place) -> None:
    page.goto(f"{place.url}/ui/#/jobs")
    table = page.get_by_role("region", name="Jobs, a table")
    expect(page.get_by_text("1,024 jobs so far")).to_be_visible()
    for _ in range(2):
        table.evaluate("box => (box.scrollTop = box.scrollHeight)")
        page.wait_for_timeout(500)
    expect(page.get_by_text("1,500 jobs", exact=True)).to_be_visible()
    table.evaluate("box => (box.scrollTop = box.scrollHeight)")
    expect(page.locator(f"tr[aria-rowindex='{JOBS + 1}']")).to_contain_text("sums")
    page.get_by_label("Filter by name or id").fill("diverged")
    expect(page.get_by_text(re.compile("^137 of 1,500 jobs"))).to_be_visible()


def test_the_oldest_decision_is_read(page: Any, place: Place) -> None:
    page.goto(f"{place.url}/ui/#/learn")
    decisions = page.get_by_role("region", name="Decisions")
    older = decisions.get_by_role("button", name=re.compile("^Older"))
    for shown in (50, 100, DECISIONS):
        expect(decisions.get_by_role("listitem")).to_have_count(shown)
        if shown < DECISIONS:
            older.click()
    expect(older).to_have_count(0)
    expect(decisions.get_by_role("listitem").last).to_contain_text("sums@1")
    page.wait_for_timeout(4_000)  # it is looked at again, and nothing is forgotten
    expect(decisions.get_by_role("listitem")).to_have_count(DECISIONS)


def test_the_panel_of_a_version_stays_in_view(page: Any, place: Place) -> None:
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto(f"{place.url}/ui/#/adapters?version=sums@200")
    chosen = page.get_by_role("button", name=re.compile("^sums@200 "))
    panel = page.get_by_role("region", name="Version sums@200")
    expect(chosen).to_be_in_viewport()  # the list is scrolled to what the address names
    page.get_by_role("group", name="Versions, a list").evaluate("box => (box.scrollTop = 0)")
    expect(chosen).to_have_count(0)
    expect(panel).to_be_in_viewport()
    page.get_by_role("button", name=re.compile("^sums@1 ")).click()
    expect(page.get_by_role("region", name="Version sums@1", exact=True)).to_be_in_viewport()


def test_all_versions_of_a_name_are_listed_once_they_are_asked_for(page: Any, place: Place) -> None:
    page.goto(f"{place.url}/ui/#/adapters?by=name&version=sums@250")
    rows = page.get_by_role("group", name="Versions, a list")
    expect(rows.get_by_role("button", name=re.compile("^sums@"))).to_have_count(5)
    rows.get_by_role("button", name="Show all 250 of sums").click()
    rows.evaluate("box => (box.scrollTop = box.scrollHeight)")
    expect(rows.get_by_role("button", name=re.compile("^sums@1 "))).to_be_visible()
    page.get_by_label("Search versions").fill("collapsed")
    expect(page.get_by_text(re.compile("^6 of 500 versions"))).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser: Any, place: Place, scheme: str) -> None:
    assert (
        serious(
            browser,
            place.url,
            ["now", "jobs", "learn", "adapters", "adapters?by=name", "rollouts"],
            scheme=scheme,
            width=390,
        )
        == []
    )
