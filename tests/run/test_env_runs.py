"""Whole runs in environments that fail: the others go on, and everything that reads a run takes what failed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import running_jobs
from cli_project import Project, cli
from groupwise.config.run import load_config
from groupwise.errors import ConfigError
from groupwise.run.plan import make_plan
from groupwise.run.record import read_run
from groupwise.server.run_files import RunFiles
from groupwise.server.run_rollouts import change_of, groups_of
from groupwise.store.tracking import read_metrics, read_rollouts
from wording import raises

ENVS = '''
import itertools

from groupwise.tasks.env import Observation, StepResult


class Flaky:
    """Two turns; every fourth episode fails before the first, those of case 2 all do."""

    count = itertools.count()

    def cases(self):
        return [{"number": number} for number in range(4)]

    def eval_cases(self):
        return [{"number": number} for number in range(2, 5)]

    def reset(self, case, seed):
        if case["number"] == 2 or next(self.count) % 4 == 3:
            raise ConnectionError("no database")
        self.left = 2
        return f"Say many vowels, {case['number']}."

    def step(self, message):
        self.left -= 1
        content = message["content"]
        reward = sum(content.count(vowel) for vowel in "aeiou") / (1 + len(content))
        again = [{"role": "user", "content": "Again."}]
        return StepResult(messages=again, reward=reward, done=not self.left, info={"vowels": reward})


class Broken(Flaky):
    def step(self, message):
        raise ValueError("out of order")

    def score(self, episode):
        return 0.0


class Endless(Flaky):
    def reset(self, case, seed):
        return "Go on."

    def step(self, message):
        return StepResult(messages=[{"role": "user", "content": "On."}], reward=len(message["content"]) / 100)


class Deadly(Flaky):
    def reset(self, case, seed):
        self.number = case["number"]
        return f"Say vowels, {self.number}."

    def step(self, message):
        if self.number == 1:
            import os

            os._exit(5)
        while self.number == 3:
            pass
        return StepResult(reward=len(message["content"]) / 100, done=True)


class Dawdles(Flaky):
    def reset(self, case, seed):
        import random, time

        self.sleep = lambda: time.sleep(random.random() * 0.03)
        self.left = 2
        self.sleep()
        return f"Say many vowels, {case['number']}."

    def step(self, message):
        self.sleep()
        return super().step(message)


class Patient(Flaky):
    """The first episodes of the first trained version wait within their first turn until the next one samples."""

    begun = 0

    def cases(self):
        return [{"number": number} for number in range(40)]

    def reset(self, case, seed):
        Patient.begun += 1
        self.waits, self.left = Patient.begun in (13, 14), 2
        return f"Say many vowels, {case['number']}."

    def step(self, message):
        import time

        while self.waits and Patient.begun < 18:
            time.sleep(0.01)
        self.waits = False
        return super().step(message)


class Offers:
    def cases(self):
        return [{}]

    def reset(self, case, seed):
        look = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
        asked = [{"role": "user", "content": "Call look."}]
        return Observation(messages=asked, tools=[{"type": "function", "function": look}])

    def step(self, message):
        return None

    def score(self, episode):
        return float(len(episode.answer))
'''
CONFIG = """
name: toy
model: {model}
env: {{environment: my_envs:Flaky, workers: 0, stop_at_cut: false, max_turns: 3}}  # its episodes share a count
eval: {{every: 2, show: 3}}
rollout: {{prompts_per_step: 4, group_size: 4, max_tokens: 6}}
train: {{steps: 3, learning_rate: 0.01, lora: {{rank: 2, alpha: 4}}}}
"""


@pytest.fixture
def env_project(project: Project, model_dir: Path) -> Project:
    (project.folder / "my_envs.py").write_text(ENVS, encoding="utf-8")
    project.config.write_text(CONFIG.format(model=model_dir), encoding="utf-8")
    return project


def run(project: Project, *overrides: str) -> dict[str, tuple[str, int]]:
    """A run in `out`; what `groupwise health` finds, as label -> (severity, since which step)."""
    ran = cli("run", project.config, "run_dir=out", *overrides)
    assert ran.exit_code in (0, 1), ran.stderr  # 1: nothing was trained
    report = json.loads(cli("health", "out", "--json").stdout)
    return {each["label"]: (each["severity"], each["began"]) for each in report["findings"]}


@pytest.mark.slow
def test_a_run_in_which_episodes_fail_before_their_first_turn(env_project):
    """Metrics, rollouts, replay, curriculum, evaluation, display, health and report take episodes without turns."""
    options = (
        "rollout.replay={size: 4, share: 0.5}",
        "rollout.reroll={max_groups: 1}",
        "rewards=[my_rewards:constant]",
    )
    assert run(env_project, *options)["env.failed"] == ("warn", 3)
    lines = read_metrics(Path("out/metrics.jsonl"))
    trained = [line for line in lines if "env/failed_frac" in line]
    assert len(trained) == 3
    for line in trained:
        assert 0.2 < line["env/failed_frac"] < 0.9 and line["env/stop/error"] == line["env/failed_frac"]
        assert line["rollout/error_frac"] == line["env/failed_frac"] and line["rollout/turns_mean"] < 2
        assert line["env/stop/done"] == pytest.approx(1 - line["env/failed_frac"]) and "env/vowels" in line
    played = [rollout for group in running_jobs.groups_of(Path("out")) for rollout in group.rollouts]
    assert {len(rollout.turns) for rollout in played} == {0, 2}
    assert all((rollout.reward is None) == (not rollout.turns) == bool(rollout.error) for rollout in played)
    assert cli("report", "out").exit_code == 0
    page = Path("out/report.html").read_text(encoding="utf-8")
    assert "done after 2 turns" in page and '"env/stop/done":' in page and '"my_envs:Flaky"' in page


def test_an_evaluation_of_the_first_cases_only(env_project):
    plan = make_plan(load_config(env_project.config))
    assert [prompt.columns["number"] for prompt in plan.eval_prompts] == [2, 3, 4]
    plan = make_plan(load_config(env_project.config, ["eval.limit=2"]))
    assert [prompt.columns["number"] for prompt in plan.eval_prompts] == [2, 3]
    with raises(ConfigError, field="eval.limit", kind="conflict"):
        load_config(env_project.config, ["eval.limit=2", "eval.data.source=p.jsonl"])


@pytest.mark.slow
def test_an_evaluation_in_which_all_episodes_of_a_prompt_fail(env_project):
    run(env_project, "train.steps=2")
    read = read_run(Path("out"))
    change = change_of(RunFiles(Path("out"), id="out"))
    assert change.mode == "greedy" and change.prompts == 3
    last = [line for line in read.lines if "eval/greedy/reward" in line][-1]
    assert last["eval/greedy/failed"] >= 1.0
    assert cli("eval", "out/config.yaml", "--json").exit_code == 0
    checked = cli("check", env_project.config, "--json")
    assert checked.exit_code == 0 and json.loads(checked.stdout)["completions"]


def test_errors_in_an_environment_that_are_worth_nothing_are_found(env_project):
    """`env.on_error: zero` gives them a reward; the health of the run still says what they are."""
    options = ("env.environment=my_envs:Broken", "env.on_error=zero", "eval=null")
    assert run(env_project, *options)["env.failed"] == ("error", 3)


@pytest.mark.slow
def test_a_run_outlives_environments_that_loop_and_that_end_their_process(env_project):
    """One of four cases ends its process, one never returns: the others are trained, run and evaluation come to their
    end, and health says what it was."""
    options = ("env.environment=my_envs:Deadly", "env.workers=2", "env.step_timeout_s=0.5", "rollout.group_size=2")
    run(env_project, *options, "eval=null", "rollout.max_tokens=3", "train.steps=1")
    groups = [*read_rollouts(Path("out/rollouts/step_000001.jsonl"))]
    by_case: dict[int, set[str | None]] = {}
    for group in groups:
        by_case.setdefault(group.prompt.columns["number"], set()).update(each.error for each in group.rollouts)
    assert all("ended its worker (exit status 5)" in str(error) for error in by_case[1])
    assert all("took longer than 0.5 s" in str(error) for error in by_case[3])
    assert by_case[0] == by_case[2] == {None}


@pytest.mark.long
def test_two_runs_of_a_seed_in_lockstep_end_with_the_same_bytes(env_project):
    """However long environments took, in this process or in others."""
    options = ("env.environment=my_envs:Dawdles", "env.lockstep=true", "eval=null")
    weights = []
    for name, workers in (("one", 2), ("two", 2), ("three", 0)):
        ran = cli("run", env_project.config, f"run_dir={name}", f"env.workers={workers}", *options)
        assert ran.exit_code in (0, 1), ran.stderr  # 1: nothing was trained
        weights.append(Path(name, "adapters/toy/v000003/adapter_model.safetensors").read_bytes())
    assert weights[0] == weights[1] == weights[2]


@pytest.mark.slow
def test_a_run_in_which_only_limits_end_episodes(env_project):
    """Turns that are cut are another finding, which explains this one: here the context ends what cannot be cut."""
    options = ("env.environment=my_envs:Endless", "env.max_turns=2", "eval=null", "train.steps=5")
    found = run(env_project, *options, "rollout.stop=[a, e, i, o, u, n, t, r, s]", "rollout.max_tokens=40")
    assert found["env.limits"] == ("warn", 5)
    assert "eos.missing" not in found and "len.clipped" not in found


def test_a_run_in_which_no_tool_is_ever_called(env_project):
    options = ("env.environment=my_envs:Offers", "eval=null", "train.steps=11", "rollout.prompts_per_step=1")
    assert run(env_project, *options)["env.no_calls"] == ("warn", 10)


def test_an_episode_is_shown_as_a_transcript(env_project):
    run(env_project, "train.steps=1")
    damage: list[str] = []
    groups = [*groups_of(RunFiles(Path("out"), id="out"), 1, left_out=damage.append)]
    best = next(each for group in groups for each in group.rollouts if each.reward is not None)
    assert damage == [] and [part.role for part in best.parts] == ["assistant", "user", "assistant", "user"]
    assert all(part.reward is not None for part in best.parts if part.role == "assistant")
    assert best.parts[1].tokens == 1 and best.tokens[best.parts[0].tokens] == "Again."
    assert best.ended == "done after 2 turns"


def test_an_episode_that_is_longer_than_a_step_ends_with_its_version(env_project):
    """Its later turns ask for the version that its first was sampled by, when the sampler has had newer ones since."""
    sizes = ("rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_staleness=2", "train.steps=6")
    run(env_project, "env.environment=my_envs:Patient", "eval=null", "algo.advantage=mean", *sizes)
    played = [rollout for group in running_jobs.groups_of(Path("out")) for rollout in group.rollouts]
    versions = [[str(turn.completion.version) for turn in rollout.turns] for rollout in played]
    assert all(len(each) == 2 and len(set(each)) == 1 for each in versions)
    late = [step for step in range(1, 7) if read_metrics(Path("out/metrics.jsonl"))[step - 1]["rollout/staleness_max"]]
    assert late
