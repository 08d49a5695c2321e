"""`groupwise ui` in a browser, over runs on disk: what is listed, compared, followed as it is written, and read.

pytest -m slow tests/slow/test_ui_runs.py     half a minute; needs Chromium and `pip install playwright`
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from groupwise.config.serve import ServeConfig
from groupwise.server.guard import Gate
from groupwise.server.run_app import WithRun, build_run_app
from groupwise.server.run_files import open_runs
from groupwise.store.tracking import Tracking
from run_place import group, make_run, scored, write_line
from serving import running
from whole_server import whole

from .chromium import CHROMIUM, UI, expect, serious, watched

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
        run = make_run(place / f"slow-s{seed}", steps=0, seed=seed)
        with Tracking(run) as tracking:
            for step in (1, 2, 3):
                curve = {
                    "reward/mean": step / 15 + 0.2 * seed,
                    "reward/exact/mean": step / 6,
                    "reward/brief/mean": 0.3 / step,
                }
                flat = {
                    "loss/clip_frac_low": 0.0,
                    "kl/mean": step / 10,
                    "loss/kl": step / 10,
                    "loss/policy": step * 1e-9,
                }
                tracking.log(
                    step, {**curve, **flat, "rollout/truncated_frac": step / 3, "optim/grad_norm": 10.0**-step}
                )
            for step, groups in STEPS.items():
                tracking.rollouts(step, groups)
    measured = make_run(place / "measured", steps=0)
    for step, reward in ((0, 0.25), (3, 0.75)):
        write_line(measured, step, {"eval/greedy/reward": reward, "eval/greedy/reward_stderr": 0.02})
    make_run(place / "once", steps=1, planned=1, metrics={"reward/mean": 0.5, "mismatch/logprob_diff_mean": 0.25})
    make_run(place / "fast", train={"steps": 3, "learning_rate": 1e-3})
    sick = make_run(place / "sick", steps=0, planned=12)
    for step in range(1, 13):
        write_line(sick, step, {"reward/frac_zero_std": 1.0, "reward/mean": 0.5, "loss/entropy": 1 / step})
    make_run(place / "empty", steps=0)
    make_run(place / "going", steps=1, planned=9)
    return place


@pytest.fixture(scope="module")
def url(place: Path) -> Iterator[str]:
    app = build_run_app(open_runs([path for path in sorted(place.iterdir()) if path.is_dir()]), ServeConfig())
    with running(app) as port:
        yield f"http://127.0.0.1:{port}"


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
        "Serve this run",
    ]
    expect(page.get_by_role("row", name=re.compile("fast"))).to_contain_text("3/3")
    page.get_by_role("link", name="sick").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("sick")
    expect(page.get_by_text("rollout.group_size=16")).to_be_visible()
    keys = page.get_by_role("region", name="Configuration, a table").get_by_role("row")
    expect(keys.first).to_be_visible()
    few = keys.count()
    page.get_by_role("button", name=re.compile("^All [0-9]+ keys$")).click()
    expect(keys.filter(has_text="train.learning_rate")).to_be_visible()
    assert 0 < few < keys.count()


def test_each_reward_function_has_a_curve(page: Any, url: str) -> None:
    go(page, url, "runs/slow-s0")
    expect(page.get_by_role("img", name=re.compile("^Rewards by function. brief: 0.1; exact: 0.5"))).to_be_visible()


def test_the_reward_before_and_after_comes_first(page: Any, url: str) -> None:
    go(page, url, "runs/measured")
    outcome = page.get_by_role("region", name="Outcome")
    expect(outcome).to_contain_text(re.compile("Held-out reward, greedy.*0.25.*step 0.*0.75.*step 3", re.DOTALL))
    expect(outcome).to_contain_text("+0.5 ± 0.028 change, beyond two standard errors")
    first = page.locator("main section").first
    expect(first).to_have_attribute("aria-label", "Outcome")
    go(page, url, "runs/slow-s0")  # which has no evaluation
    expect(page.get_by_role("region", name="Outcome")).to_contain_text(
        re.compile("Training reward.*step 1.*step 3", re.DOTALL)
    )


def test_what_is_flat_or_a_twin_is_said_in_a_line(page: Any, url: str) -> None:
    go(page, url, "runs/slow-s0")
    expect(page.get_by_role("img", name="KL to the reference. measured: 0.3")).to_be_visible()
    said = page.get_by_role("listitem")
    expect(said.filter(has_text="KL to the reference, in the loss")).to_contain_text(
        "the same as KL to the reference, measured"
    )
    expect(said.filter(has_text="Share clipped")).to_contain_text(re.compile("0\\s+throughout"))
    expect(said.filter(has_text=re.compile("^Loss"))).to_contain_text("rounding")
    assert page.get_by_role("img", name=re.compile("^(Loss|Share clipped)")).count() == 0
    go(page, url, "runs/once")  # numbers with their names, each on its own ground
    expect(page.get_by_text("Gap between sampler and trainer")).to_be_visible()
    assert page.locator("main canvas").count() == 0
    boxes = [each.bounding_box() for each in page.locator("main dl").all()]
    assert len(boxes) > 5 and not any(overlap(a, b) for i, a in enumerate(boxes) for b in boxes[:i])


def overlap(a: dict[str, float], b: dict[str, float]) -> bool:
    apart = a["x"] + a["width"] <= b["x"] or b["x"] + b["width"] <= a["x"]
    return not (apart or a["y"] + a["height"] <= b["y"] or b["y"] + b["height"] <= a["y"])


def test_a_metric_is_explained_by_keyboard_and_by_touch(browser: Any, page: Any, url: str) -> None:
    go(page, url, "runs/slow-s0")
    name = "What is Share cut at their longest?"
    button = page.get_by_role("button", name=name)
    words = page.get_by_role("dialog", name="What Share cut at their longest is")
    button.focus()
    page.keyboard.press("Enter")
    expect(words).to_contain_text("near 0")
    expect(words).to_contain_text("raise rollout.max_tokens")
    expect(words).to_contain_text("len.clipped speaks up at the mean of 10 steps: warn > 0.3")
    page.keyboard.press("Escape")
    expect(words).to_be_hidden()
    expect(button).to_be_focused()
    assert page.locator("main [title]").count() == 0
    phone = browser.new_context(viewport={"width": 390, "height": 800}, has_touch=True, is_mobile=True)
    small = phone.new_page()
    go(small, url, "runs/slow-s0")
    small.get_by_role("button", name=name).tap()
    card = small.get_by_role("dialog", name="What Share cut at their longest is")
    expect(card).to_contain_text("near 0")
    box = card.bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 390 and box["y"] >= 0
    small.touchscreen.tap(5, 5)
    expect(card).to_be_hidden()
    phone.close()


def test_charts_share_a_cursor_a_scale_and_a_smoothing(page: Any, url: str) -> None:
    go(page, url, "runs/sick")
    expect(page.get_by_role("slider", name="Smoothing")).to_be_visible()
    page.get_by_role("slider", name="Smoothing").fill("0.9")
    expect(page.get_by_text("0.90", exact=True)).to_be_visible()
    page.reload()
    expect(page.get_by_text("0.90", exact=True)).to_be_visible()
    page.get_by_role("slider", name="Smoothing").fill("0")
    go(page, url, "runs/slow-s0")
    page.get_by_role("button", name="log scale of Gradient norm").click()
    expect(page.get_by_role("button", name="log scale of Gradient norm")).to_have_attribute("aria-pressed", "true")
    assert page.get_by_role("button", name=re.compile("^log scale of Rew")).count() == 0
    charts = page.locator("main .u-over")
    charts.first.hover()
    expect(page.get_by_text("at step 2")).to_have_count(charts.count())


def test_keys_of_the_configuration_are_cut_at_dots_only(page: Any, url: str) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    go(page, url, "runs/fast")
    page.get_by_role("button", name=re.compile("^All [0-9]+ keys$")).click()
    key = (
        page.get_by_role("row", name=re.compile("^rollout.prefix_cache_mib|^train.gradient_checkpointing"))
        .locator("td")
        .first
    )
    lines = key.evaluate(
        """cell => { const range = document.createRange(), lines = {};
        for (const node of cell.childNodes) for (let i = 0; i < (node.length ?? 0); i++) {
          range.setStart(node, i); range.setEnd(node, i + 1);
          const top = Math.round(range.getBoundingClientRect().top); lines[top] = (lines[top] ?? "") + node.data[i]; }
        return Object.values(lines) }"""
    )
    assert all(line.endswith(".") for line in lines[:-1]) and "".join(lines).count(".") == 1


def test_back_stays_in_the_interface(browser: Any, url: str) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 800})
    page = context.new_page()
    go(page, url, "")
    page.get_by_role("link", name="fast").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("fast")
    page.get_by_role("navigation", name="Pages").get_by_role("link", name="Rollouts").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Rollouts")
    page.go_back()
    expect(page.get_by_role("heading", level=1)).to_have_text("fast")
    page.go_back()
    expect(page.get_by_role("heading", level=1)).to_have_text("Runs")
    context.close()


def test_a_run_that_says_nothing_is_not_taken_for_one_that_goes_on(page: Any, url: str, place: Path) -> None:
    write_line(place / "going", 2, {"reward/mean": 0.5, "time/step_s": 1.0})
    os.utime(place / "going" / "config.yaml", (1, 1))
    with (place / "going" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as a run that is stopped holds it
        os.utime(place / "going" / "metrics.jsonl", (time.time() - 600, time.time() - 600))
        go(page, url, "runs/going")
        expect(page.get_by_text("has written nothing for 10 min")).to_be_visible()


def test_seeds_are_a_band_beside_other_curves(page: Any, url: str) -> None:
    go(page, url, "runs")
    for name in ("slow-s0", "slow-s1", "fast"):
        page.get_by_label(f"Compare {name}").check()
    page.get_by_role("button", name="Compare 3").click()
    expect(page.get_by_role("img", name="Reward. fast: 0.3; slow (2 seeds): 0.3 (0.2 to 0.4)")).to_be_visible()
    expect(page.get_by_role("row", name=re.compile("^train.learning_rate"))).to_contain_text("0.001")
    page.get_by_label("Seeds of one configuration").select_option("std")
    expect(page.get_by_role("img", name=re.compile(r"slow \(2 seeds\): 0.3 \(0.159 to 0.441\)"))).to_be_visible()
    page.get_by_label("Seeds of one configuration").select_option("each")
    expect(page.get_by_role("img", name="slow-s1: 0.4; slow-s0: 0.2")).to_be_visible()


def test_a_run_grows_as_it_is_written(page: Any, url: str, place: Path) -> None:
    os.utime(place / "going" / "metrics.jsonl")  # it was made long ago, where a minute is not long
    go(page, url, "runs/going")
    expect(page.get_by_text("running", exact=True)).to_be_visible()
    for step in (2, 3):
        write_line(place / "going", step, {"reward/mean": step / 4})
    expect(page.get_by_role("img", name="Reward. mean: 0.75")).to_be_visible()
    expect(page.get_by_text("3/9")).to_be_visible()
    go(page, url, "runs?compare=going&compare=fast")
    expect(page.get_by_role("img", name="Reward. going: 0.75; fast: 0.3")).to_be_visible()
    write_line(place / "going", 4, {"reward/mean": 1.0})
    expect(page.get_by_role("img", name="Reward. going: 1; fast: 0.3")).to_be_visible()


def test_completions_show_the_parts_of_their_reward(page: Any, url: str) -> None:
    go(page, url, "rollouts?run=slow-s1")
    rows = page.get_by_role("listbox").get_by_role("option")
    expect(rows).to_have_count(6)  # a prompt each
    page.get_by_role("button", name="A row a prompt").click()
    expect(rows).to_have_count(12)
    page.get_by_role("spinbutton", name="Step").fill("2")
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
    (place / "fast" / "adapters" / "toy" / "v000003").mkdir(parents=True, exist_ok=True)
    go(page, url, "serve")
    page.get_by_label("Run", exact=True).select_option("fast")
    expect(page.get_by_text(f"groupwise serve {place / 'fast'}")).to_be_visible()


def test_a_served_run_and_its_server_have_one_list_of_pages(
    browser: Any, model_dir: Path, tmp_path: Path, place: Path
) -> None:
    with whole(tmp_path, model_dir, served_model_name="tiny") as site:
        app = WithRun(site.app, place / "fast", ServeConfig(), gate=Gate("ready"), served=None)
        with running(app) as port, watched(browser, f"http://127.0.0.1:{port}") as page:
            pages = page.get_by_role("navigation", name="Pages")
            go(page, f"http://127.0.0.1:{port}", "now")
            expect(pages.get_by_role("link", name="Its rollouts")).to_be_visible()
            names = [name.strip() for name in pages.get_by_role("listitem").all_inner_texts()]
            assert names[-3:] == ["fast", "Run", "Its rollouts"]
            pages.get_by_role("link", name="Run", exact=True).click()
            expect(page.get_by_role("heading", level=1)).to_have_text("fast")
            assert "/run/ui/" in page.url
            expect(pages.get_by_role("listitem")).to_have_text(names)
            expect(pages.get_by_role("link", name="Run", exact=True)).to_have_attribute("aria-current", "page")
            pages.get_by_role("link", name="Its rollouts").click()
            expect(page.get_by_role("heading", level=1)).to_have_text("Rollouts")
            page.get_by_role("link", name="Chat with base").click()
            expect(page.get_by_role("heading", level=1)).to_have_text("Playground")
            expect(page.get_by_label("Version 1")).to_have_value("base")
            assert "/run/" not in page.url
            page.goto(f"http://127.0.0.1:{port}/run/ui/#/serve")
            page.get_by_role("link", name="Teach with base").click()
            expect(page.get_by_role("heading", level=1)).to_have_text("Teach")


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
    pages = ["runs", "runs/sick", "runs/measured", compared, "rollouts?run=slow-s0", "rollouts?run=slow-s0&id=1.0.0"]
    pages.append("serve")
    assert serious(browser, url, pages, scheme=scheme, width=width) == []


def test_what_the_pages_compute() -> None:
    """ui/test: differences of words, bands of seeds, which curves there are."""
    if shutil.which("npm") is None or not (UI / "node_modules").exists():
        pytest.skip("there is no Node, or its packages are not installed: cd ui && npm ci")
    ran = subprocess.run(["npm", "test"], cwd=UI, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0 and re.search(r"^# pass [1-9]", ran.stdout, re.MULTILINE), ran.stdout + ran.stderr
