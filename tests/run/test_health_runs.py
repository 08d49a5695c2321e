"""Real runs of a tiny model that go wrong: each is told so while it runs, in its directory, and afterwards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cli_project import Project, cli, row, write_rows
from groupwise.algo.metrics import definitions
from groupwise.store.tracking import read_metrics

REWARDS = """
def vowels(completions, **columns):
    texts = [completion[0]["content"] for completion in completions]
    return [sum(text.count(vowel) for vowel in "aeiou") / (1 + len(text)) for text in texts]


def constant(completions, **columns):
    return [0.5] * len(completions)


def place(completions, **columns):
    return [float(i) for i in range(len(completions))]


def huge(completions, **columns):
    return [1e38 * i for i in range(len(completions))]


def picky(completions, kind, **columns):
    if kind[0] == "odd":
        raise RuntimeError("the judge is out")
    return vowels(completions)
"""


SMALL = ("rollout.prompts_per_step=1", "rollout.group_size=2")


@dataclass(frozen=True)
class Outcome:
    """What a run said while it went on, what `groupwise health` says of it, and the two exit codes."""

    exit_code: int
    notes: Sequence[str]
    events: Sequence[dict[str, Any]]
    report: dict[str, Any]
    health_exit_code: int

    @property
    def found(self) -> dict[str, tuple[str, int]]:
        """label -> (severity, step at which it began)."""
        return {each["label"]: (each["severity"], each["began"]) for each in self.report["findings"]}


def documented(metric: str) -> bool:
    """Whether metrics.yaml, of which docs/metrics.md is made, has a row of it."""
    return metric in ("step", "time", "non_finite") or any(each.fits(metric) for each in definitions())


@pytest.fixture
def run(project: Project):
    """`run("key=value", ...)`: the outcome of the project with these overrides."""
    (project.folder / "my_rewards.py").write_text(REWARDS, encoding="utf-8")

    def outcome(*overrides: str) -> Outcome:
        options = ("eval=null", "scoring.workers=0", "rollout.refill=1.0", "run_dir=out", *overrides)
        ran = cli("run", project.config, *options)
        health = cli("health", "out", "--json")
        path = Path("out/health.jsonl")
        events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        assert not [key for line in read_metrics(Path("out/metrics.jsonl")) for key in line if not documented(key)]
        notes = [line for line in ran.stderr.splitlines() if line.startswith("step ") and "/" not in line.split()[1]]
        assert notes == [f"step {event['step']}: {event['text']}" for event in events]
        return Outcome(ran.exit_code, notes, events, json.loads(health.stdout), health.exit_code)

    return outcome


def test_a_reward_that_never_differs(run):
    """Nothing can be learned: why the loss is 0 is said at once, and that it goes on is an error."""
    ran = run("rewards[0]=my_rewards:constant", "train.steps=11", *SMALL)
    assert ran.found["group.zero_std"] == ("error", 10) and ran.health_exit_code == 1
    assert ran.notes[0].startswith(
        "step 1: nothing was trained in this step and its loss is 0, because every completion"
    )
    assert "has the reward 0.5: no problem now and then, but" in ran.notes[0]
    assert sum("nothing was trained" in note for note in ran.notes) == 1
    (said,) = (note for note in ran.notes if "group.zero_std" in note)
    assert said.startswith("step 10: error: ") and said.endswith("rollout.group_size=4")


def test_a_loss_of_zero_is_explained_a_learning_rate_of_zero_is_found(run):
    """And, since a random model never ends its turn, that too."""
    ran = run("train.learning_rate=0", "train.steps=5")
    assert "step 1: the policy loss is 0 and that is no problem" in ran.notes[0] and "gradient is not 0" in ran.notes[0]
    assert ran.found == {"lr.zero": ("warn", 5), "eos.missing": ("error", 5)}


def test_a_reward_that_raises_now_and_then(run):
    ran = run("rewards[0]=my_rewards:picky", "train.steps=3", "rollout.prompts_per_step=4", "rollout.group_size=2")
    assert ran.exit_code == 0 and ran.found["reward.error_rate"] == ("warn", 3)
    assert "of the completions could not be scored and were left out" in "".join(ran.notes)


def test_a_reward_that_drowns_another(run):
    rewards = "[{function: my_rewards:place, weight: 100.0}, my_rewards:vowels]"
    ran = run(f"rewards={rewards}", "train.steps=8")
    assert ran.found["reward.dominated (vowels)"][0] == "warn"
    assert not any("place" in label for label in ran.found)
    (said,) = (note for note in ran.notes if "reward.dominated" in note)
    assert said.endswith("algo.aggregation=normalize_then_sum")


def test_rewards_so_large_that_the_gradient_overflows(run):
    ran = run("rewards[0]=my_rewards:huge", "algo.advantage=mean", "train.steps=3", *SMALL)
    assert ran.found["grad.nan"] == ("error", 1)
    assert [note.split(": ")[1] for note in ran.notes if "grad.nan" in note] == ["warn", "error"]


def test_a_sampler_that_never_gets_the_new_policy(run):
    ran = run("rollout.weight_sync_interval=0", "train.steps=14", "train.learning_rate=0.3")
    assert ran.found["mismatch.logp"] == ("error", 5) and ran.found["staleness.max"] == ("warn", 14)
    assert {"clip.high", "is.min"} & set(ran.found)


def test_steps_so_large_that_the_policy_falls_apart(run, project):
    write_rows(project.folder / "held_out.jsonl", [row(i) for i in range(20, 60)])  # of four prompts nothing is sure
    evaluation = "eval={data: {source: held_out.jsonl}, every: 0}"
    ran = run("train.learning_rate=1.0", "train.steps=5", evaluation, *SMALL)
    assert ran.found["eval.regress (greedy)"] == ("error", 5)
    assert "eval.best=greedy" in "".join(ran.notes)


def test_prompts_that_are_too_long(run, project):
    long = {"role": "user", "content": "What is " + "7" * 150 + "?"}
    write_rows(
        project.folder / "prompts.jsonl", [row(0), row(1), row(2) | {"prompt": [long]}, row(3) | {"prompt": [long]}]
    )
    ran = run("rollout.max_prompt_tokens=100", "train.steps=3", *SMALL)
    assert ran.found["data.too_long"] == ("warn", 3)
