"""The tutorials are true: their files are written and their commands run, in order, in an empty directory; shortened by
overrides behind the commands, and with nothing that a page does not say."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from cli_project import cli
from groupwise.errors import TrainingError
from groupwise.pictures import read_picture

TUTORIALS = Path(__file__).parent.parent / "docs" / "tutorials"
SMALL = "rollout.prompts_per_step=2 rollout.group_size=4 eval=null train.steps=2"


@dataclass
class Reader:
    """Follows a page in `folder`, which is the working directory. `shorter` are words behind a command that would take
    long, by what it begins with: "elsewhere" for one that is not run, "beside" for a program that goes on in a terminal
    of its own. What a command said is in `said`."""

    folder: Path
    shorter: Mapping[str, str] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    beside: list[subprocess.Popen[str]] = field(default_factory=list)

    def follow(self, page: str, *, since: str = "", until: str | None = None) -> None:
        text = (TUTORIALS / page).read_text(encoding="utf-8")
        text = text[text.index(since) : None if until is None else text.index(until)]
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            if named := re.match(r"# (\w+\.(?:py|yaml))\n", block):
                (self.folder / named[1]).write_text(block, encoding="utf-8")
            elif language == "python":
                sampled = block.replace("max_tokens=48)", "max_tokens=48, seed=0)")  # rewards that differ, each time
                exec(compile(sampled, page, "exec"), {"__name__": "__main__"})
            elif language == "":
                for line in block.splitlines():
                    self.type(line)

    def type(self, line: str) -> None:
        program, *words = shlex.split(line)
        more = next((more for command, more in self.shorter.items() if line.startswith(command)), "")
        if more == "elsewhere":
            return
        if more == "beside":
            started = subprocess.Popen([sys.executable, *words], cwd=self.folder, stdout=subprocess.PIPE, text=True)
            self.beside.append(started)
            assert started.stdout is not None and started.stdout.readline(), f"{line} ended at once"
            return
        if program == "cd":
            self.folder = self.folder / words[0]
            os.chdir(self.folder)
            return
        if program == "python":
            subprocess.run([sys.executable, *words], cwd=self.folder, check=True, timeout=120)
            return
        assert program == "groupwise", line
        for name in [name for name in sys.modules if name.startswith("my_")]:
            del sys.modules[name]  # a command is a process of its own, which reads the files as they are now
        ended = cli(*words, *more.split())
        assert ended.exit_code == 0, f"{line}\n{ended.stdout}{ended.stderr}"
        count = sum(each.startswith(line) for each in self.said)
        self.said[line + " again" * count] = ended.stdout + ended.stderr


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_first_reward(place: Path) -> None:
    run = f"{SMALL} scoring.workers=0"
    reader = Reader(place, {"groupwise check": "scoring.workers=0 eval=null", "groupwise run": run})
    reader.follow("first_reward.md")
    hole = reader.said["groupwise rewards lint my_rewards:mentions"]
    assert re.search(r"warning junk +'every candidate': gets 1", hole)
    assert "my_rewards:tagged: ok" in reader.said["groupwise rewards lint my_rewards:tagged"]
    assert "reward/tagged" in (next(place.glob("runs/tags-*")) / "metrics.jsonl").read_text()
    assert "What is 25 + 60? Put the answer in <answer> tags." in reader.said["groupwise check tags.yaml"]


@pytest.mark.long
def test_the_first_pictures(place: Path) -> None:
    """With two photographs of one's own; the real model is not at hand."""
    few = "rollout.prompts_per_step=2 rollout.group_size=4 scoring.workers=0 data.limit=8 eval.data.limit=4"
    reader = Reader(place, {"groupwise check": few, "groupwise run": f"{few} eval.every=0 train.steps=2"})
    reader.follow("images.md", until="## Your own photographs")
    for name in ("ripe/1.png", "unripe/2.png"):
        (photo := reader.folder / "photos" / name).parent.mkdir(parents=True)
        Image.new("RGB", (320, 240), (200, 30, 30)).save(photo)
    reader.follow("images.md", since="## Your own photographs")
    assert "How many" in reader.said["groupwise check my_run.yaml"]
    (told,) = [said for line, said in reader.said.items() if line.startswith("groupwise chat")]
    assert "(my-images@2)" in told
    lines = [json.loads(line) for line in (place / "my-images" / "prompts.jsonl").read_text().splitlines()]
    assert {line["answer"] for line in lines} == {"ripe", "unripe"}
    assert read_picture(lines[0]["image"], folder=place / "my-images").pixels().size == (320, 240)


@pytest.mark.long
def test_the_first_environment(place: Path) -> None:
    run = f"{SMALL} env.max_turns=3"
    reader = Reader(place, {"groupwise run": run, "groupwise env check": "--max-tokens 8"})
    reader.follow("first_environment.md")
    (checked,) = [said for line, said in reader.said.items() if line.startswith("groupwise env check")]
    assert "Guess: ok (1000 cases)" in checked and "an unreadable call" in checked
    assert "env/stop/" in (next(place.glob("runs/guess-*")) / "metrics.jsonl").read_text()


@pytest.mark.xdist_group("live server")
def test_the_first_live_loop(
    place: Path, live: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`groupwise serve` is the server that the tests share; the script of the page's end is test_examples.py's."""
    monkeypatch.setenv("GROUPWISE_URL", live.url)
    monkeypatch.delenv("GROUPWISE_API_KEY", raising=False)
    assert cli("adapters", "activate", "base").exit_code == 0
    elsewhere = {"groupwise serve": "elsewhere", "python examples/live_loop.py": "elsewhere"}
    reader = Reader(place, {**elsewhere, "groupwise chat": "--max-tokens 24"})
    reader.follow("first_live_loop.md")
    assert re.fullmatch(r"sums@\d+\n", capsys.readouterr().out)
    assert "sums@" in reader.said["groupwise adapters list"] and "completed" in reader.said["groupwise train status"]


@pytest.mark.long
def test_from_examples_to_rewards(place: Path) -> None:
    reader = Reader(place, {"groupwise check": "scoring.workers=0", "groupwise run": "elsewhere"})
    reader.follow("examples_to_rewards.md")
    said = " ".join(reader.said["groupwise check rewards_only.yaml"].split())
    assert "examples first (stages, kind: sft)" in said
    both = (place / "both.yaml").read_text()
    assert both.count("steps: 100") == 1
    (place / "both.yaml").write_text(both.replace("steps: 100", "steps: 8"))  # a list has no overrides
    small = "rollout.prompts_per_step=4 rollout.group_size=4 train.steps=1 scoring.workers=0 eval.data.limit=2"
    ended = cli("run", "both.yaml", *small.split())
    assert ended.exit_code in (0, TrainingError.exit_code), ended.stderr  # shortened, no completion may be right
    (run,) = place.glob("runs/both-*")
    stage = (run / "stages" / "examples" / "metrics.jsonl").read_text()
    assert stage.count('"loss/cross_entropy"') == 8 and (run / "metrics.jsonl").exists()


@pytest.mark.long
def test_training_without_a_reward_function(place: Path) -> None:
    run = f"{SMALL} scoring.workers=0"
    reader = Reader(
        place,
        {"python my_judge.py": "beside", "groupwise check": "scoring.workers=0", "groupwise run": run},
    )
    try:
        reader.follow("no_reward_function.md")
    finally:
        for program in reader.beside:
            program.kill()
            program.communicate()
    (linted,) = [said for line, said in reader.said.items() if line.startswith("groupwise rewards lint")]
    assert "groupwise.rewards.group_judge:group_judge: ok" in linted
    metrics = (next(place.glob("runs/sums-*")) / "metrics.jsonl").read_text()
    page = (TUTORIALS / "no_reward_function.md").read_text(encoding="utf-8")
    assert "reward/judge/log/disagreement" in metrics and (place / "verdicts.sqlite").stat().st_size > 0
    for name in ("disagreement", "prefers_earlier", "prefers_longer", "votes_lost", "cache_hits"):
        assert f"`{name}`" in page and f'"reward/judge/log/{name}"' in metrics
