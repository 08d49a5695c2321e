"""`groupwise ui` in a browser, over runs on disk: what is listed, compared, followed as it is written, and read.

pytest -m slow tests/slow/test_ui_runs.py     half a minute; needs Chromium and `pip install playwright`
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from groupwise.config.serve import ServeConfig
from groupwise.server.runs import build_run_app, open_runs
from run_place import group, make_run, scored, write_line
from serving import running

from .chromium import CHROMIUM, UI, expect, launched, serious, watched

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]

HOSTILE = "<img src=x onerror='window.hit=1'><script>window.hit=1</script>{{7*7}}\u202e"
STEPS = {
    step: [
        group(scored("4", 1.0, parts={"exact": 1.0, "brief": 0.25}, version=step), scored(HOSTILE, 0.0, version=step)),
        group(scored("no number", None, parts={"exact": None}), scored("no", 0.5, cut=True), id="p:2"),
    ]
    for step in (1, 2, 3)
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        curve = {"reward/mean": 0.2 + 0.2 * seed, "reward/exact/mean": 0.5, "reward/brief/mean": 0.1}
        make_run(place / f"slow-s{seed}", seed=seed, metrics=curve, rollouts=STEPS)
    make_run(place / "fast", train={"steps": 3, "learning_rate": 1e-3})
    sick = {"reward/frac_zero_std": 1.0, "reward/mean": 0.5}
    make_run(place / "sick", steps=12, planned=12, metrics=sick)
    make_run(place / "empty", steps=0)
    make_run(place / "going", steps=1, planned=9)
    return place


@pytest.fixture(scope="module")
def url(place: Path) -> Iterator[str]:
    app = build_run_app(open_runs([path for path in sorted(place.iterdir()) if path.is_dir()]), ServeConfig())
    with running(app) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as browser:
        yield browser


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    with watched(browser, url) as page:
        yield page


def go(page: Any, url: str, where: str) -> None:
    page.goto(f"{url}/ui/#/{where}")
    expect(page.get_by_role("heading", level=1)).to_be_visible()


def test_runs_are_listed_and_one_is_opened(page: Any, url: str) -> None:
    go(page, url, "")
    expect(page.get_by_role("heading", level=1)).to_have_text("Runs")
    names = page.get_by_role("navigation", name="Pages").get_by_role("listitem").all_inner_texts()
    assert [name.strip().split("\n")[0].split(",")[0] for name in names] == [
        "Runs",
        "Rollouts",
        "Playground",
        "Adapters",
    ]
    expect(page.get_by_role("row", name=re.compile("fast"))).to_contain_text("3/3")
    page.get_by_role("link", name="sick").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("sick")
    expect(page.get_by_text("rollout.group_size=16")).to_be_visible()
    expect(page.get_by_role("row", name=re.compile("^train.learning_rate"))).to_be_visible()


def test_each_reward_function_has_a_curve(page: Any, url: str) -> None:
    go(page, url, "runs/slow-s0")
    expect(page.get_by_role("img", name=re.compile("^Rewards by function. brief: 0.1; exact: 0.5"))).to_be_visible()


def test_seeds_are_a_band_beside_other_curves(page: Any, url: str) -> None:
    go(page, url, "runs")
    for name in ("slow-s0", "slow-s1", "fast"):
        page.get_by_label(f"Compare {name}").check()
    page.get_by_role("button", name="Compare 3").click()
    expect(page.get_by_role("img", name="reward/mean. fast: 0.3; slow (2 seeds): 0.3 (0.2 to 0.4)")).to_be_visible()
    expect(page.get_by_role("row", name=re.compile("^train.learning_rate"))).to_contain_text("0.001")
    page.get_by_label("Seeds of one configuration").select_option("std")
    expect(page.get_by_role("img", name=re.compile(r"slow \(2 seeds\): 0.3 \(0.159 to 0.441\)"))).to_be_visible()
    page.get_by_label("Seeds of one configuration").select_option("each")
    expect(page.get_by_role("img", name="slow-s0: 0.2; slow-s1: 0.4")).to_be_visible()


def test_a_run_grows_as_it_is_written(page: Any, url: str, place: Path) -> None:
    os.utime(place / "going" / "metrics.jsonl")  # it was made long ago, where a minute is not long
    go(page, url, "runs/going")
    expect(page.get_by_text("running", exact=True)).to_be_visible()
    for step in (2, 3):
        write_line(place / "going", step, {"reward/mean": step / 4})
    expect(page.get_by_role("img", name="Reward. mean: 0.75")).to_be_visible()
    expect(page.get_by_text("3/9")).to_be_visible()
    go(page, url, "runs?compare=going&compare=fast")
    expect(page.get_by_role("img", name="reward/mean. going: 0.75; fast: 0.3")).to_be_visible()
    write_line(place / "going", 4, {"reward/mean": 1.0})
    expect(page.get_by_role("img", name="reward/mean. going: 1; fast: 0.3")).to_be_visible()


def test_completions_show_the_parts_of_their_reward(page: Any, url: str) -> None:
    go(page, url, "rollouts?run=slow-s1")
    rows = page.get_by_role("listbox").get_by_role("option")
    expect(rows).to_have_count(12)
    page.get_by_label("Step").fill("2")
    expect(rows).to_have_count(4)
    rows.first.click()
    cards = page.get_by_role("region", name="Group").get_by_role("listitem")
    expect(cards).to_have_count(2)
    expect(cards.first.get_by_label("Parts of the reward")).to_have_text(re.compile(r"exact\s*1\s*brief\s*0.25"))
    expect(cards.last.get_by_text("onerror=").first).to_be_visible()
    rows.nth(2).click()
    expect(cards.last).to_contain_text("ValueError: no number in it")
    expect(cards.last.get_by_label("Parts of the reward")).to_have_text(re.compile(r"exact\s*failed"))
    assert page.evaluate("window.hit") is None


def test_what_needs_a_model_says_what_to_type(page: Any, url: str, place: Path) -> None:
    for where, title in (("play", "Playground"), ("adapters", "Adapters")):
        go(page, url, where)
        expect(page.get_by_role("heading", level=1)).to_have_text(title)
        page.get_by_label("Run").select_option("fast")
        expect(page.get_by_text("groupwise serve starter")).to_be_visible()


def test_nothing_yet_and_nothing_there(page: Any, url: str) -> None:
    go(page, url, "runs/empty")
    expect(page.get_by_text("No step yet")).to_be_visible()
    page.goto(f"{url}/ui/#/rollouts?run=empty")
    expect(page.get_by_text("Nothing was sampled yet")).to_be_visible()
    page.goto(f"{url}/ui/#/runs/none")
    expect(page.get_by_text("This run was not opened")).to_be_visible()
    page.goto(f"{url}/ui/#/jobs")
    expect(page.get_by_text("There is no page")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_axe_finds_nothing_serious(browser: Any, url: str, scheme: str, width: int) -> None:
    compared = "runs?compare=slow-s0&compare=slow-s1&compare=fast"
    pages = ["runs", "runs/sick", compared, "rollouts?run=slow-s0&id=1.0.0", "play", "adapters"]
    assert serious(browser, url, pages, scheme=scheme, width=width) == []


def test_what_the_pages_compute() -> None:
    """ui/test: differences of words, bands of seeds, which curves there are."""
    if shutil.which("npm") is None or not (UI / "node_modules").exists():
        pytest.skip("there is no Node, or its packages are not installed: cd ui && npm ci")
    ran = subprocess.run(["npm", "test"], cwd=UI, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0 and re.search(r"^# pass [1-9]", ran.stdout, re.MULTILINE), ran.stdout + ran.stderr
