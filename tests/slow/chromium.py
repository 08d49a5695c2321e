"""The machine's own Chromium for the tests of the web interface (CHROMIUM names another); nothing is downloaded.

launched    a browser
watched     a page that fails its test for any request elsewhere, error of a script, or breach of the policy
serious     what axe-core, which comes from ui/node_modules, finds serious on some pages; and what scrolls sideways
accessible  the same of pages by their whole addresses;  wrong_in  of a page as it is
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
expect = playwright.expect

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
UI = Path(__file__).parent.parent.parent / "ui"
AXE = UI / "node_modules" / "axe-core" / "axe.min.js"

SIDEWAYS = """() => [...document.querySelectorAll("html, body, main *")].filter((each) => {
  const over = each.scrollWidth - (each === document.scrollingElement ? innerWidth : each.clientWidth);
  const scrolls = ["auto", "scroll"].includes(getComputedStyle(each).overflowX);
  return over > 1 && (each === document.scrollingElement || scrolls);
}).map((each) => each.outerHTML.slice(0, 120))"""


@contextmanager
def launched() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@contextmanager
def watched(browser: Any, url: str) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    wrong: list[str] = []
    page.on("request", lambda r: wrong.append(r.url) if not r.url.startswith((url, "blob:")) else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if "Content Security Policy" in said.text else None)
    yield page
    hit = page.evaluate("window.hit")
    context.close()
    assert wrong == [] and hit is None


def serious(browser: Any, url: str, pages: Sequence[str], *, scheme: str, width: int) -> list[str]:
    """What is wrong, as "page: rule: element"."""
    return accessible(browser, [f"{url}/ui/#/{where}" for where in pages], scheme=scheme, width=width)


def accessible(browser: Any, addresses: Sequence[str], *, scheme: str, width: int) -> list[str]:
    """What is wrong with the pages at these addresses."""
    if not AXE.exists():
        pytest.skip("axe-core is not installed: cd ui && npm ci")
    sizes = {"width": width, "height": 850}
    context = browser.new_context(bypass_csp=True, color_scheme=scheme, viewport=sizes)
    page = context.new_page()
    found: list[str] = []
    for where in addresses:
        page.goto(where)
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        page.wait_for_timeout(700)
        found += [f"{where}: {each}" for each in wrong_in(page)]
    context.close()
    return found


def wrong_in(page: Any) -> list[str]:
    """What axe-core finds serious on a page whose context bypasses the policy, and what of it scrolls sideways."""
    page.add_script_tag(path=str(AXE))
    grave = [each for each in page.evaluate("axe.run()")["violations"] if each["impact"] in ("serious", "critical")]
    found = [f"{each['id']}: {each['nodes'][0]['html'][:200]}" for each in grave]
    return found + [f"scrolls sideways: {box}" for box in page.evaluate(SIDEWAYS)]
