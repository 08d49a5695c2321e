"""The pictures of the web interface in the documentation, from a real server, the starter and real runs.

    cd tests && python -m slow.pictures                all of them into docs/, in minutes on two CPU cores
    cd tests && python -m slow.pictures --only teach   one part: server, runs, teach (the animation) or seeing
    cd tests && python -m slow.pictures --every DIR    also every page at 1440 and 390 pixels, light and dark, into DIR

A lesson is taught in the browser as somebody would: its frames are the animation, its versions, jobs and rollouts what
the other pages show. The runs are three seeds and a control whose rewards do not depend on the completions.
"""

from __future__ import annotations

import argparse
import io
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
from PIL import Image

from crash.place import Place, a_place
from groupwise.config.serve import ServeConfig
from groupwise.server.run_app import build_run_app
from groupwise.server.run_files import open_runs
from groupwise.tasks.starter.scenes import Thing, picture_of
from serving import running

from .chromium import expect, launched

DOCS = Path(__file__).parent.parent.parent / "docs"
DESKTOP, PHONE, WIDE = (1280, 860), (390, 844), (1440, 900)
ANIMATION = DOCS / "ui-teach.webp"
MOST_BYTES = 1_500_000
ANIMATED = (960, 600)
TRAIN_MS = 120_000
ROUNDS = 3
CHAT = "What is 47 + 38? Think step by step."
SERVER_PAGES = ("now", "jobs", "rollouts", "learn", "teach", "play", "play/compare", "adapters", "adapters?by=name")
CONTROL = """
import random

def blind(completions, **columns):
    return [random.random() for _ in completions]
"""


class Film:
    """Frames, each with how long it is shown."""

    def __init__(self, page: Any):
        self._page, self._frames = page, list[tuple[Image.Image, int]]()

    def shot(self, ms: int) -> None:
        shown = Image.open(io.BytesIO(self._page.screenshot())).convert("RGB")
        self._frames.append((shown.resize(ANIMATED, Image.Resampling.LANCZOS), ms))

    def write(self, target: Path) -> None:
        first, *rest = (image for image, _ in self._frames)
        lasting = [ms for _, ms in self._frames]
        for quality in (80, 65, 50, 35):
            first.save(target, save_all=True, append_images=rest, duration=lasting, loop=0, quality=quality, method=6)
            if target.stat().st_size <= MOST_BYTES:
                break
        print(f"{target}: {target.stat().st_size:,} bytes, {sum(lasting) / 1000:.1f} s, {len(lasting)} frames")


@contextmanager
def opened(browser: Any, size: tuple[int, int], *, scheme: str = "light") -> Iterator[Any]:
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
    yield context.new_page()
    context.close()


def go(page: Any, url: str, where: str) -> None:
    page.goto(f"{url}/ui/#/{where}")
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    page.wait_for_timeout(1200)


def shot(page: Any, target: Path) -> None:
    """Write what is seen, in 256 colours."""
    seen = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    few = seen.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    few.save(target, optimize=True)
    print(f"{target}: {target.stat().st_size:,} bytes")


# ---- a lesson ----
def teach(page: Any, url: str) -> Film:
    """Three rounds of the first example, filmed."""
    film = Film(page)
    go(page, url, "teach")
    film.shot(900)
    page.get_by_role("button", name=re.compile("^Sums")).click()
    page.wait_for_timeout(200)
    film.shot(700)
    page.get_by_role("button", name="Sample", exact=True).click()
    train = page.get_by_role("button", name="Train", exact=True)
    for _ in range(3):
        page.wait_for_timeout(150)
        film.shot(150)
    expect(train).to_be_enabled(timeout=TRAIN_MS)
    page.get_by_label("Adapter").fill("sums")
    _to(page, "Score")
    film.shot(1200)
    for number in range(1, ROUNDS + 1):
        _train(page, train, film)
        _to(page, "Before and after")
        film.shot(900 if number < ROUNDS else 600)
        if number < ROUNDS:
            page.get_by_role("button", name=f"Next round, from sums@{number}").click()
            expect(train).to_be_enabled(timeout=TRAIN_MS)
    page.get_by_role("region", name="Rounds").scroll_into_view_if_needed()
    page.wait_for_timeout(300)
    film.shot(2000)
    return film


def _train(page: Any, train: Any, film: Film) -> None:
    expect(train).to_be_enabled(timeout=TRAIN_MS)
    train.scroll_into_view_if_needed()
    train.click()
    result, step = page.get_by_role("region", name="Before and after"), ""
    for _ in range(2000):
        if result.is_visible():
            break
        told = page.get_by_text(re.compile("^step [0-9]+ of [0-9]+$"))
        now = told.first.inner_text() if told.count() else step
        if now != step:
            step = now
            told.first.scroll_into_view_if_needed()
            film.shot(130)
        page.wait_for_timeout(40)
    expect(result).to_be_visible(timeout=TRAIN_MS)


def _to(page: Any, name: str) -> None:
    page.get_by_role("heading", name=name).first.scroll_into_view_if_needed()
    page.wait_for_timeout(250)


# ---- the server's pages ----
def server_pictures(browser: Any, place: Place, every: Path | None, *, parts: Sequence[str]) -> None:
    with opened(browser, DESKTOP) as page:
        film = teach(page, place.url)
        if "teach" in parts:
            film.write(ANIMATION)
    if "server" not in parts:
        return
    _more(place)
    for name, where, size, scheme in (
        ("ui-now", "now", DESKTOP, "light"),
        ("ui-now-phone", "now", PHONE, "light"),
        ("ui-jobs", "jobs", DESKTOP, "light"),
        ("ui-adapters", "adapters?version=sums@3", DESKTOP, "light"),
    ):
        with opened(browser, size, scheme=scheme) as page:
            go(page, place.url, where)
            shot(page, DOCS / f"{name}.png")
    with opened(browser, DESKTOP) as page:
        go(page, place.url, "rollouts")
        page.get_by_role("listbox").get_by_role("option").nth(1).click()
        page.wait_for_timeout(1000)
        shot(page, DOCS / "ui-rollouts.png")
    with opened(browser, DESKTOP, scheme="dark") as page:
        go(page, place.url, "play")
        page.get_by_role("button", name="Compare with another").click()
        for number, version in enumerate(("base", "sums@3"), start=1):
            page.get_by_label(f"Version {number}").select_option(version)
        page.get_by_label("Message", exact=True).fill(CHAT)
        page.get_by_label("Message", exact=True).press("Enter")
        expect(page.get_by_role("button", name="Answer again")).to_have_count(2, timeout=30_000)
        shot(page, DOCS / "ui-playground-dark.png")
    if every is not None:
        job = httpx2.get(place.url + "/v1/train/status").json()[0]["job_id"]
        _every(browser, place.url, [*SERVER_PAGES, f"jobs/{job}", "adapters?version=sums@3"], every / "server")


def _more(place: Place) -> None:
    """What a lesson does not leave behind: a merge, a note, and samples of several versions."""
    with httpx2.Client(base_url=place.url, timeout=120) as http:
        sources = [{"name": "sums@2", "weight": 0.5}, {"name": "sums@3", "weight": 0.5}]
        http.post("/v1/adapters/merge", json={"sources": sources, "output_name": "average"}).raise_for_status()
        for version, note in (
            ("sums@1", "first round: carries are wrong"),
            ("sums@3", "good at sums, weak at carries"),
        ):
            http.put(f"/v1/adapters/{version}/notes", json={"note": note}).raise_for_status()
        for version in ("base", "sums@1", "sums@3"):
            body = {"prompts": [[{"role": "user", "content": CHAT}]], "n": 8, "max_tokens": 96, "adapter": version}
            http.post("/v1/completions/batch", json=body).raise_for_status()


# ---- a model that sees ----
def seeing_picture(browser: Any, place: Place) -> None:
    """The playground, where a question is asked about a picture."""
    scene = {"b1": Thing("square", "red"), "b3": Thing("circle", "blue")}
    written = io.BytesIO()
    picture_of(scene, random.Random(1)).save(written, format="PNG")
    file = {"name": "shapes.png", "mimeType": "image/png", "buffer": written.getvalue()}
    with opened(browser, DESKTOP) as page:
        go(page, place.url, "play")
        page.get_by_text("Settings").click()
        page.get_by_label("Temperature").fill("0")
        page.get_by_text("Settings").click()
        page.locator("input[type=file]").set_input_files([file])
        for question in ("What is at b1?", "Where is the red square?"):
            page.get_by_label("Message", exact=True).fill(question)
            page.get_by_label("Message", exact=True).press("Enter")
            expect(page.get_by_role("button", name="Answer again")).to_be_visible(timeout=30_000)
        page.locator("input[type=file]").set_input_files([file])
        page.wait_for_timeout(500)
        shot(page, DOCS / "ui-pictures.png")


# ---- runs on disk ----
def run_pictures(browser: Any, root: Path, every: Path | None) -> None:
    runs = [*(_run(root, f"sums-s{seed}", seed, "my_rewards:exact") for seed in (0, 1, 2))]
    runs.append(_run(root, "shuffled", 0, "control:blind"))
    with running(build_run_app(open_runs(runs), ServeConfig())) as port:
        url = f"http://127.0.0.1:{port}"
        compared = "runs?" + "&".join(f"compare={run.name}" for run in runs)
        with opened(browser, DESKTOP) as page:
            go(page, url, compared)
            expect(page.get_by_label("Seeds of one configuration")).to_be_visible(timeout=60_000)
            page.get_by_role("heading", name="Curves").evaluate("heading => heading.scrollIntoView()")
            page.wait_for_timeout(1000)
            shot(page, DOCS / "ui-runs.png")
        if every is not None:
            where = [
                "runs",
                f"runs/{runs[0].name}",
                compared,
                f"rollouts?run={runs[0].name}",
                "serve",
            ]
            _every(browser, url, where, every / "runs")


def _run(root: Path, name: str, seed: int, reward: str) -> Path:
    """A run of the example that `groupwise init` writes."""
    command, folder = [sys.executable, "-m", "groupwise"], root / "task"
    if not folder.exists():
        subprocess.run([*command, "init", str(folder)], check=True, capture_output=True)
        (folder / "control.py").write_text(CONTROL)
    options = [f"name={name}", f"run_dir={root / name}", f"seed={seed}", f"rewards=[{reward}]", "eval.every=10"]
    subprocess.run([*command, "run", "my_run.yaml", *options], cwd=folder, check=True, capture_output=True)
    return root / name


def _every(browser: Any, url: str, pages: Sequence[str], target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for width in (WIDE, PHONE):
        for scheme in ("light", "dark"):
            with opened(browser, width, scheme=scheme) as page:
                for where in pages:
                    go(page, url, where)
                    name = re.sub(r"[^\w@]+", "-", where)[:40]
                    page.screenshot(path=target / f"{name}-{width[0]}-{scheme}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=["server", "runs", "teach", "seeing"])
    parser.add_argument("--every", type=Path)
    asked = parser.parse_args()
    parts = [asked.only] if asked.only else ["server", "runs", "teach", "seeing"]
    with TemporaryDirectory() as folder, launched() as browser:
        root = Path(folder)
        if "runs" in parts:
            run_pictures(browser, root, asked.every)
        if "seeing" in parts:
            with a_place(root / "seeing", model="starter-vl") as place:
                place.state.parent.mkdir()
                place.start()
                place.await_ready()
                seeing_picture(browser, place)
        if {"server", "teach"} & set(parts):
            with a_place(root) as place:
                place.start()
                place.await_ready()
                server_pictures(browser, place, asked.every, parts=parts)
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
