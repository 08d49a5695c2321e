"""The first hour of someone who has only the README: every command is taken from its text, and run in an empty
directory with a new environment. The minutes of each stop are printed.

    pytest -m slow -s tests/slow/test_first_hour.py     ten minutes, twenty beside others

It needs PyPI, Chromium and `pip install playwright`. What is not the README's: where it installs from a clone, the
wheel of this clone is installed; the demo is shortened by `--steps 20`, and `serve` and `ui` get `--port 0`
(docs/cli.md), as another server may have the usual port. torch is the one that pip finds for this machine: where its
index has none for CPUs, that is PyPI's 5.9 GB.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from .chromium import CHROMIUM, expect, launched, watched

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMAND_S = 1200


def block(after: str) -> list[str]:
    """The commands of the README's first shell block that has the line `after`, without their comments."""
    for language, found in re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL):
        lines = [line.partition(" #")[0].strip() for line in found.splitlines() if not language]
        if after in lines:
            return lines
    raise AssertionError(f"the README has no command `{after}`")


def documented(word: str, page: str) -> str:
    """An option that is not in the README, as `page` names it."""
    assert word in (ROOT / "docs" / page).read_text(encoding="utf-8"), f"docs/{page} does not name {word}"
    return word


@dataclass
class Stranger:
    """A shell in an empty directory: `cd` is kept, commands come from a new environment, and nothing else is known."""

    folder: Path
    venv: Path
    minutes: list[tuple[str, float]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "LANG", "LC_", "SSL_"))}
        path = f"{self.venv / 'bin'}{os.pathsep}/usr/local/bin{os.pathsep}/usr/bin{os.pathsep}/bin"
        return {**kept, "PATH": path, "HOME": str(self.venv.parent), "BROWSER": "true", "VIRTUAL_ENV": str(self.venv)}

    @contextmanager
    def timed(self, stop: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.minutes.append((stop, (time.monotonic() - began) / 60))

    def type(self, command: str) -> str:
        """Run it to its end: what it printed on stdout."""
        words = shlex.split(command)
        with self.timed(command):
            if words[0] == "cd":
                self.folder = self.folder / words[1]
                return ""
            done = subprocess.run(
                words, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=COMMAND_S
            )
        assert done.returncode == 0 and "Traceback" not in done.stderr, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    @contextmanager
    def serving(self, command: str, *, said: str) -> Iterator[str]:
        """Leave it running: the address in its line that begins with `said`. Ctrl-C ends it, cleanly."""
        words, log = shlex.split(command), self.venv.parent / "serving.txt"
        with log.open("w") as out:
            process = subprocess.Popen(
                words, cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        try:
            with self.timed(command):
                yield _address(process, log, said)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) in (0, 130), log.read_text()
            assert "Traceback" not in log.read_text(), log.read_text()
        finally:
            process.kill()
            process.wait()

    def table(self) -> str:
        rows = [f"{minutes:7.2f}  {stop}" for stop, minutes in self.minutes]
        return "\n".join(["minutes  stop", *rows, f"{sum(each for _, each in self.minutes):7.2f}  in all"])


def _address(process: subprocess.Popen[bytes], log: Path, said: str) -> str:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith(said) and (url := re.search(r"http://\S+", line)):
                return url[0]
        time.sleep(0.1)
    raise AssertionError(f"no line begins with {said!r}:\n{log.read_text()}")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    words = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(words, check=True)
    return next(folder.glob("*.whl"))


@pytest.fixture
def stranger(tmp_path: Path) -> Iterator[Stranger]:
    (tmp_path / "empty").mkdir()
    stranger = Stranger(tmp_path / "empty", tmp_path / "venv")
    subprocess.run([getattr(sys, "_base_executable", sys.executable), "-m", "venv", str(stranger.venv)], check=True)
    yield stranger
    print(f"\n{stranger.table()}")


def test_the_first_hour(stranger: Stranger, wheel: Path) -> None:
    install(stranger, wheel)
    own_task(stranger)
    afterwards(stranger)


def install(stranger: Stranger, wheel: Path) -> None:
    """`pip install .` and the demo."""
    command, demo = block("groupwise demo")
    assert command == "pip install ."
    stranger.type(f"pip install {wheel}")
    shown = stranger.type(f"{demo} {documented('--steps 20', 'cli.md')}")
    before, after = re.search(r"^sampled/reward +(\S+) +(\S+)", shown, re.MULTILINE).groups()  # type: ignore[union-attr]
    assert float(after) > float(before)


def own_task(stranger: Stranger) -> None:
    """The folder that `init` writes, its reward changed, checked and run."""
    init, change, check, run = block("groupwise init my-task")
    stranger.type(init)
    stranger.type(change)
    reward = stranger.folder / "my_rewards.py"
    assert re.search(r"# my_rewards\.py\n(.*?)^```", README, re.MULTILINE | re.DOTALL)[1] in reward.read_text()  # type: ignore[index]
    edited = re.sub(
        r"\[float\((.* == .*)\) for c, a",
        r"[0.75 * (\1) + 0.25 * c[0]['content'].strip().isdigit() for c, a",
        reward.read_text(),
    )
    assert edited != reward.read_text()
    reward.write_text(edited)  # a quarter for a number and nothing else
    assert " 0.250  " in stranger.type(check) or " 0.250  " in stranger.type(check + " seed=1")
    shown = stranger.type(run)
    before, after = re.search(r"^sampled/reward +(\S+) +(\S+)", shown, re.MULTILINE).groups()  # type: ignore[union-attr]
    assert float(after) > float(before) + 0.1 and "my-task@40" in shown


def afterwards(stranger: Stranger) -> None:
    """The five questions, and what follows them."""
    fits, health, ui, better, export = block("groupwise health my-task")
    assert "memory    fits" in stranger.type(fits)
    stranger.type(health)
    with stranger.serving(f"{ui} {documented('--port', 'cli.md')} 0", said="") as url:
        (seen,) = httpx2.get(url.split("/ui/")[0] + "/v1/runs", timeout=30).json()["runs"]
        assert seen["step"] == 40
    assert re.search(r"^sampled/reward +\+0\.[1-9]", stranger.type(better), re.MULTILINE)
    stranger.type(export)
    assert (stranger.folder / "adapter" / "adapter_config.json").is_file()
    chat, serve = in_the_prose("groupwise chat my-task"), in_the_prose("groupwise serve my-task")
    assert re.search(r"\d", stranger.type(f"{chat} 'What is 47 + 38? Reply with just the number.'"))
    with (
        stranger.serving(f"{serve} {documented('--port', 'cli.md')} 0", said="ready on") as url,
        launched() as browser,
    ):
        chat_in_a_browser(browser, url)


def in_the_prose(command: str) -> str:
    """A command that the README has between backticks."""
    assert f"`{command}`" in README
    return command


def chat_in_a_browser(browser: Any, url: str) -> None:
    """One message, answered by what was trained."""
    with watched(browser, url) as page:
        page.goto(f"{url}/ui/#/play")
        expect(page.get_by_role("combobox", name="Version 1")).to_be_visible(timeout=60_000)
        message = page.get_by_label("Message", exact=True)
        message.fill("What is 47 + 38? Reply with just the number.")
        message.press("Enter")
        first = page.get_by_role("region", name="Chat 1")
        expect(first.get_by_role("button", name="Answer again")).to_be_visible(timeout=60_000)
        expect(first.get_by_role("listitem").get_by_text("my-task@40", exact=True)).to_have_count(1)
