"""The file that `groupwise report` writes, in a browser: opened from the disk, without a server and without a network.

pytest -m slow tests/slow/test_report.py     half a minute; needs Chromium and `pip install playwright`
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from groupwise.cli.report.build import report
from groupwise.run.evaluate import Evaluation, save_evaluations
from groupwise.types import Message, PolicyVersion, Rollout
from run_place import group, make_run, scored, turn, write_line

from .chromium import CHROMIUM, accessible, expect, launched, watched

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]

HOSTILE = "</script><script>window.hit=1</script><img src=x onerror='window.hit=1'><!-- {{7*7}}\u202e"


def episode() -> Rollout:
    first, second = turn("look", logprob=-2.0), turn("It is 4.")
    messages = [
        Message(role="assistant", content="look"),
        Message(role="tool", name="search", content=HOSTILE),
        Message(role="assistant", content="It is 4."),
    ]
    return Rollout(turns=(first, second), messages=tuple(messages), stop="done", reward=1.0, advantage=0.5)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("reports")
    groups = [group(scored("4", 1.0), scored(HOSTILE, 0.0)), group(episode(), episode(), id="p:2")]
    run = make_run(place / "one", steps=12, planned=12, rollouts=dict.fromkeys((1, 6, 12), groups))
    settings = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(settings.replace("name: toy", f"name: {json.dumps(HOSTILE)}", 1))
    for step, value in ((4, 0.25), (12, 0.75)):
        write_line(run, step, {"eval/greedy/reward": value, "mine/metric": float(step), "reward/frac_zero_std": 1.0})
        held_out = Evaluation(mode="greedy", version=PolicyVersion.base(), groups=(group(scored(f"at {step}", value)),))
        save_evaluations(run, step, {"greedy": held_out})
    report(run, out=place / "one.html")
    report(run, compare=[make_run(place / "two", seed=7)], out=place / "both.html")
    return place


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as browser:
        yield browser


@pytest.fixture
def opened(browser: Any, place: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    url = (place / getattr(request, "param", "one.html")).as_uri()
    said: list[str] = []
    with watched(browser, url) as page:
        page.context.set_offline(True)
        page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
        page.goto(url)
        yield page
        assert said == []


def test_a_run_is_shown(opened: Any) -> None:
    expect(opened.get_by_role("heading", level=1)).to_have_text("one")
    expect(opened.get_by_role("img", name="Reward. mean: 1.2")).to_be_visible()
    assert opened.locator("canvas").count() >= 2 and opened.evaluate(
        "[...document.querySelector('canvas').getContext('2d').getImageData(0, 0, 300, 150).data].some(Boolean)"
    )
    expect(opened.get_by_role("row", name=re.compile("^greedy"))).to_contain_text("+0.5")
    expect(opened.get_by_text("of 1 prompts 1 got better, 0 worse")).to_be_visible()
    expect(opened.get_by_role("row", name=re.compile("^train.learning_rate"))).to_be_visible()
    expect(opened.get_by_role("heading", name="Health")).to_be_visible()
    expect(opened.get_by_role("region", name="Outcome")).to_contain_text(
        re.compile("0.25.*step 4.*0.75.*step 12", re.DOTALL)
    )
    opened.get_by_role("button", name="What is Held-out reward, greedy?").click()
    expect(opened.get_by_role("dialog", name="What Held-out reward, greedy is")).to_contain_text(
        "Mean reward on the held-out"
    )
    opened.keyboard.press("Escape")
    opened.get_by_text("1 other metric").click()
    expect(opened.get_by_role("img", name="mine/metric. mine/metric: 12")).to_be_visible()
    names = opened.get_by_role("navigation", name="Pages").get_by_role("listitem").all_inner_texts()
    assert [name.strip() for name in names] == ["Runs", "Rollouts"]


def test_its_completions_are_found_and_read(opened: Any) -> None:
    opened.get_by_role("link", name="Rollouts", exact=True).click()
    rows = opened.get_by_role("listbox").get_by_role("option")
    expect(rows).to_have_count(6)  # a prompt each
    opened.get_by_role("button", name="A row a prompt").click()
    expect(rows).to_have_count(12)
    opened.get_by_role("spinbutton", name="Step").fill("6")
    expect(rows).to_have_count(4)
    rows.first.click()
    cards = opened.get_by_role("region", name="Group").get_by_role("listitem")
    expect(cards).to_have_count(2)
    expect(cards.first.get_by_role("group", name="Completion")).to_have_text("4<|im_end|>")
    expect(cards.last.get_by_text("onerror=").first).to_be_visible()
    opened.get_by_label("Contains").fill("look")
    expect(rows).to_have_count(2)
    rows.first.click()
    expect(cards.first).to_contain_text("tool search")
    expect(cards.first).to_contain_text("done after 2 turns")
    assert opened.evaluate("window.hit") is None


def test_it_remembers_nothing_that_it_cannot_and_says_what_it_has_not(opened: Any) -> None:
    opened.get_by_role("button", name=re.compile("theme")).click()
    expect(opened.get_by_role("button", name="theme: light")).to_be_visible()
    opened.goto(opened.url.split("#")[0] + "#/runs/none")
    expect(opened.get_by_text("This run is not in the report")).to_be_visible()
    opened.goto(opened.url.split("#")[0] + "#/adapters")
    expect(opened.get_by_text("There is no page")).to_be_visible()


@pytest.mark.parametrize("opened", ["both.html"], indirect=True)
def test_several_runs_are_compared(opened: Any) -> None:
    expect(opened.get_by_role("heading", level=1)).to_have_text("2 runs")
    expect(opened.get_by_role("img", name="Reward. one: 1.2; two: 0.3")).to_be_visible()
    expect(opened.get_by_role("row", name=re.compile("^seed"))).to_contain_text("7")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_axe_finds_nothing_serious(browser: Any, place: Path, scheme: str, width: int) -> None:
    url = (place / "one.html").as_uri()
    pages = [f"{url}#/{where}" for where in ("now", "rollouts?id=6.1.0")]
    assert accessible(browser, pages, scheme=scheme, width=width) == []
