"""What three people come to the web interface for, with a real server and real runs of the starter, to the end: from a
first rating to a version that is live; from a run that fails to the cause; from two runs to the better one.

    pytest -m slow -s tests/slow/test_ui_three_jobs.py     a minute or two; -s prints the clicks and seconds of each
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from crash.place import a_place
from groupwise.config.serve import ServeConfig
from groupwise.server.run_app import build_run_app
from groupwise.server.run_files import open_runs
from serving import running

from .chromium import CHROMIUM, expect, watched

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]

WAIT_MS = 120_000
SILENT = "def silent(completions, **columns):\n    return [0.0 for _ in completions]\n"
COMMAND = [sys.executable, "-m", "groupwise"]


class Clicks:
    """Clicks what it is given, and counts."""

    def __init__(self) -> None:
        self.count, self._began = 0, time.monotonic()

    def __call__(self, what: Any) -> None:
        what.click(timeout=WAIT_MS)
        self.count += 1

    def told(self, job: str) -> None:
        print(f"\n{job}: {self.count} clicks, {time.monotonic() - self._began:.1f} s")


@contextmanager
def opened(browser: Any, url: str) -> Iterator[tuple[Any, Clicks]]:
    with watched(browser, url) as page:
        page.goto(f"{url}/ui/")
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        yield page, Clicks()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `groupwise ui` over three runs: one that learns, one that hardly does, one whose reward is 0."""
    folder = tmp_path_factory.mktemp("runs") / "task"
    subprocess.run([*COMMAND, "init", str(folder)], check=True, capture_output=True)
    (folder / "silent.py").write_text(SILENT)
    made = {
        "quick": ["train.steps=16"],
        "slow": ["train.steps=16", "train.learning_rate=1e-6"],
        "zero": ["train.steps=24", "rewards=[silent:silent]"],
    }
    for name, options in made.items():
        ran = subprocess.run(
            [*COMMAND, "run", "my_run.yaml", f"name={name}", f"run_dir={name}", "eval.every=8", *options],
            cwd=folder,
            capture_output=True,
            text=True,
        )
        assert (ran.returncode == 0) == (name != "zero"), ran.stderr
    with running(build_run_app(open_runs([folder / name for name in made]), ServeConfig())) as port:
        yield f"http://127.0.0.1:{port}"


def test_from_a_first_rating_to_a_version_that_is_live(browser: Any, tmp_path: Path) -> None:
    with a_place(tmp_path) as place:
        place.start()
        place.await_ready()
        with opened(browser, place.url) as (page, click):
            click(page.get_by_role("link", name="Teach", exact=True))
            page.get_by_label("Prompt 1", exact=True).fill("What is 47 + 38? Think step by step.")
            click(page.get_by_role("button", name="Sample", exact=True))
            cards = page.locator("[data-card]")
            expect(cards).to_have_count(8, timeout=WAIT_MS)
            for i, (word, _) in enumerate([("good", 1), ("bad", 0)] * 2, start=1):
                click(page.get_by_role("button", name=f"Completion {i} of group 1 is {word}"))
            train = page.get_by_role("button", name="Train", exact=True)
            expect(train).to_be_in_viewport()  # wherever one is in the list of completions
            click(train)
            expect(page.get_by_role("region", name="Before and after")).to_be_visible(timeout=WAIT_MS)
            assert httpx2.get(place.url + "/v1/adapters", timeout=30).json()["active_version"] == "taught@1"
            click(page.get_by_role("link", name="Now", exact=True))
            expect(page.locator("h1 + span + code")).to_have_text("taught@1")
            assert click.count <= 8
            click.told("from a first rating to a version that is live")


def test_from_a_run_that_fails_to_the_cause(browser: Any, runs: str) -> None:
    with opened(browser, runs) as (page, click):
        names = page.get_by_role("table").get_by_role("link")
        expect(names).to_have_text(["zero", "slow", "quick"])  # newest first
        click(page.get_by_role("link", name="zero"))
        health = page.locator("section", has=page.get_by_role("heading", name="Health"))
        expect(health).to_contain_text("reward.stuck_zero")
        expect(health).to_contain_text("right answers are not recognised")
        rewards = page.get_by_role("row", name=re.compile("^rewards"))
        expect(rewards).to_contain_text("silent:silent")  # among what was changed from the default
        assert page.get_by_role("region", name="Configuration, a table").get_by_role("row").count() < 20
        assert click.count == 1
        click.told("from a run that fails to the cause")


def test_from_two_runs_to_the_better_one(browser: Any, runs: str) -> None:
    with opened(browser, runs) as (page, click):
        for name in ("slow", "quick"):
            click(page.get_by_label(f"Compare {name}"))
        click(page.get_by_role("button", name="Compare 2"))
        beside = page.get_by_role("region", name="Held-out differences, a table")
        verdict = beside.get_by_role("row", name=re.compile("quick sampled, reward"))
        expect(verdict).to_contain_text("better")
        found = re.search(r"\+([0-9.]+) ± ([0-9.]+)", verdict.inner_text())
        assert found is not None and float(found[1]) > 3 * float(found[2])
        page.goto(f"{runs}/ui/#/runs/quick")
        commands = page.get_by_role("group", name="Commands to copy")
        click(commands.get_by_role("button", name="Copy the command: Serve"))
        expect(commands.get_by_role("status").filter(has_text=re.compile("copied|select"))).to_be_visible()
        assert click.count == 4
        click.told("from two runs to the better one")
