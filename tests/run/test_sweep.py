"""Several runs in one process: each leaves what it leaves alone, one's end is not the others', and Ctrl-C ends all."""

from __future__ import annotations

import io
import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cli_project import REWARDS, Project, cli
from groupwise.cli.sweep import announced
from groupwise.config.run import RunConfig, load_config
from groupwise.errors import ConfigError, RewardError
from groupwise.run.evaluate import load_evaluations
from groupwise.run.loop import run_loop
from groupwise.run.plan import make_plan
from groupwise.run.sweep import Heat, Outcome, SweptRun, heats, run_sweep, why_alone
from groupwise.run.sweep_display import open_sweep_display
from groupwise.store.rundir import owned
from groupwise.store.tracking import read_metrics
from groupwise.train.processor_turns import ProcessorTurns
from groupwise.train.together import JointPasses
from slow_cases import long_case
from wording import raises, wording

INTERRUPTS = """

def interrupts(completions, trainer_state, times, **columns):
    import os, pathlib, signal
    asked = pathlib.Path("asked")
    if trainer_state.global_step == 2 and not asked.exists():
        asked.touch()
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
    return vowels(completions)


def fails_later(completions, trainer_state, **columns):
    if trainer_state.global_step == 2:
        raise RuntimeError("the judge is out")
    return vowels(completions)
"""


@pytest.fixture
def project(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.chdir(tmp_path)
    made = Project.make(tmp_path, model=model_dir)
    (tmp_path / "my_rewards.py").write_text(REWARDS + INTERRUPTS, encoding="utf-8")
    return made


def swept(project: Project, each: Mapping[str, Sequence[str]], *more: str) -> list[SweptRun]:
    configs = {label: load_config(project.config, [*more, *overrides]) for label, overrides in each.items()}
    return [SweptRun(label=label, plan=make_plan(config)) for label, config in configs.items()]


def trained(runs: Sequence[SweptRun]) -> tuple[dict[str, Outcome], str]:
    """What became of each, and what was said."""
    said = io.StringIO()
    with open_sweep_display({run.label: run.config.train.steps for run in runs}, stream=said) as shown:
        return {each.run.label: each for each in run_sweep(heats(runs), shown=shown)}, said.getvalue()


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: without_times(each)
            for key, each in value.items()
            if key not in ("time", "created") and not key.startswith(("time/", "perf/"))
        }
    return [without_times(each) for each in value] if isinstance(value, list) else value


def left(run_dir: Path) -> dict[str, Any]:
    """Every file of a run, by its path in the directory: bytes, or JSON without what clocks said."""
    found: dict[str, Any] = {}
    for path in sorted(each for each in run_dir.rglob("*") if each.is_file()):
        content: Any = path.read_bytes()
        if path.suffix == ".jsonl":
            content = [without_times(json.loads(line)) for line in content.splitlines()]
        elif path.suffix == ".json":
            content = without_times(json.loads(content))
        found[str(path.relative_to(run_dir))] = content
    return found


@pytest.fixture
def threads() -> Iterator[None]:
    """Gives torch its threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class CountedTurns(ProcessorTurns):
    """Counts how many threads compute at a time, by what they are for: decoding, or training."""

    def __init__(self, count: int):
        super().__init__(count)
        self.inside, self.most, self.kinds = 0, 0, Counter[str]()
        self._counting = threading.Lock()

    def __enter__(self) -> None:
        super().__enter__()
        with self._counting:
            self.inside += 1
            self.most = max(self.most, self.inside)
            self.kinds[threading.current_thread().name.partition("_")[0]] += 1

    def __exit__(self, *error: object) -> None:
        with self._counting:
            self.inside -= 1
        super().__exit__(*error)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("joins", [True, False], ids=["small micro-batches", "large ones"])
def test_no_more_threads_compute_at_a_time_than_there_are_for_one_run(
    project: Project, joins: bool, monkeypatch: pytest.MonkeyPatch
):
    """Engines and learners of all runs, whether micro-batches meet in joint passes or are computed by themselves."""
    places: list[JointPasses] = []

    def place(*, at_once: int) -> JointPasses:
        places.append(JointPasses(at_once=at_once))
        places[-1].turns = CountedTurns(at_once)
        return places[-1]

    monkeypatch.setattr("groupwise.run.sweep.JointPasses", place)
    if not joins:
        monkeypatch.setattr("groupwise.train.together.JOIN_TOKENS", 0)
    torch.set_num_threads(1)
    outcomes, _ = trained(swept(project, {"a": ["seed=0"], "b": ["seed=1"], "c": ["seed=2"]}, "train.steps=1"))
    assert all(outcome.result is not None and outcome.result.trained for outcome in outcomes.values())
    turns = places[0].turns
    assert isinstance(turns, CountedTurns)
    assert turns.most == 1 and turns.inside == 0
    assert min(turns.kinds["groupwise-engine"], turns.kinds["learner"]) >= 3, turns.kinds


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("number", [1, long_case(2)])
def test_each_run_leaves_what_it_leaves_alone(project: Project, number: int, monkeypatch: pytest.MonkeyPatch):
    """Although they train small micro-batches together."""
    places: list[JointPasses] = []

    def place(*, at_once: int) -> JointPasses:
        places.append(JointPasses(at_once=at_once))
        return places[-1]

    monkeypatch.setattr("groupwise.run.sweep.JointPasses", place)
    torch.set_num_threads(number)
    each = {
        "a": ["seed=0"],
        "b": ["seed=1", "algo.kl=k3", "algo.kl_coeff=0.1", "train.lora.rank=4", "rollout.group_size=4"],
    }
    outcomes, _ = trained(swept(project, each, "train.steps=2"))
    assert len({outcome.result.run_dir for outcome in outcomes.values() if outcome.result is not None}) == 2
    for label, overrides in each.items():
        alone = run_loop(load_config(project.config, ["train.steps=2", *overrides]))
        beside = outcomes[label].result
        assert beside is not None and beside.trained and beside.steps == 2
        assert torch.get_num_threads() == number
        assert beside.version == alone.version and left(beside.run_dir) == left(alone.run_dir)
    (used,) = places
    assert used.why_not is None and used.counts.seats >= 4 and used.counts.failed == 0


def test_an_error_ends_its_run_and_no_other(project: Project):
    rewards = {"good": "vowels", "later": "fails_later"}
    runs = swept(project, {label: [f"rewards=[my_rewards:{name}]"] for label, name in rewards.items()})
    outcomes, said = trained(runs)
    assert outcomes["good"].result is not None and outcomes["good"].result.steps == 3
    assert outcomes["later"].result is None and isinstance(outcomes["later"].error, RewardError)
    assert sum(line.startswith("later  failed: ") for line in said.splitlines()) == 1
    (run_dir,) = {path.parent for path in Path("runs").glob("*/metrics.jsonl")} - {outcomes["good"].result.run_dir}
    assert [line["step"] for line in read_metrics(run_dir / "metrics.jsonl") if "reward/mean" in line] == [1]
    with owned(run_dir):  # nobody holds it any more
        pass


def test_a_run_that_cannot_be_opened_ends_by_itself(project: Project):
    runs = swept(project, {"good": [], "bad": ["train.lora.targets=[nothing_of_this_name]"]})
    outcomes, _ = trained(runs)
    assert outcomes["good"].result is not None
    assert isinstance(outcomes["bad"].error, ConfigError)
    assert len([*Path("runs").iterdir()]) == 1


def test_ctrl_c_ends_all_after_the_step_that_each_is_in(project: Project):
    reward = "rewards=[{function: my_rewards:interrupts, args: {times: 1}}]"
    runs = swept(project, {"asks": [reward], "other": []}, "train.steps=50", "eval.every=0")
    outcomes, _ = trained([*runs, *swept(project, {"never": ["train.lora.dropout=0.1"]})])
    assert outcomes["never"].result is None and outcomes["never"].error is None
    for label in ("asks", "other"):
        result = outcomes[label].result
        assert result is not None and result.interrupted and 1 <= result.steps <= 3
        assert load_evaluations(result.run_dir, result.steps)
        assert (result.run_dir / "checkpoints" / f"step-{result.steps:06d}").is_dir()


def test_a_second_ctrl_c_stops_at_once(project: Project):
    reward = "rewards=[{function: my_rewards:interrupts, args: {times: 2}}]"
    runs = swept(project, {"asks": [reward], "other": []}, "train.steps=50", "eval.every=0")
    with pytest.raises(KeyboardInterrupt):
        trained(runs)
    for run_dir in Path("runs").iterdir():
        with owned(run_dir):
            pass


@pytest.mark.long
def test_each_goes_on_where_it_was(project: Project):
    each = {"a": ["seed=0"], "b": ["seed=1"]}
    first, _ = trained(swept(project, each, "train.steps=1", "output_dir=runs"))
    on, said = trained(swept(project, each, "train.steps=2", "output_dir=runs", "resume=auto"))
    for label, overrides in each.items():
        before, after = first[label].result, on[label].result
        assert before is not None and after is not None
        assert after.run_dir == before.run_dir and after.steps == 2
        begun = run_loop(load_config(project.config, [*overrides, "train.steps=1", "output_dir=alone"]))
        alone = run_loop(load_config(project.config, [*overrides, "train.steps=2", "output_dir=alone", "resume=auto"]))
        assert alone.run_dir == begun.run_dir
        ours, theirs = left(after.run_dir), left(alone.run_dir)
        assert {name for name in ours if ours[name] != theirs[name]} == {"config.yaml"}  # output_dir
    assert said.count("going on after step 1") == 2


# ---- what is trained beside what ----


@pytest.mark.parametrize(
    "override",
    [
        "engine=vllm",
        "train.lora=null",
        "train.lora.dropout=0.1",
        "train.memory_gb=4",
        "tracking.wandb=mine",
        "tracking.mlflow=mine",
        "stages=[{name: examples, train: {steps: 1}}]",
        "teacher={base_url: 'http://127.0.0.1:1/v1', model: other, top_k: 0}",
        "model=starter-vl",
    ],
)
def test_what_is_trained_by_itself(project: Project, override: str):
    wording(f"{why_alone(load_config(project.config, [override]))}")


def test_the_others_are_trained_beside_each_other(project: Project):
    for override in ("scoring.workers=2", "rollout.max_staleness=1", "tracking.tensorboard=true", "eval=null"):
        assert why_alone(load_config(project.config, [override])) is None


def parts(groups: Sequence[Heat]) -> list[list[str]]:
    return [[run.label for run in heat.runs] for heat in groups]


def test_heats_are_by_base_model_and_in_order(project: Project):
    runs = swept(
        project,
        {
            "a": [],
            "by itself": ["train.lora.dropout=0.1"],
            "starter": ["model=starter"],
            "b": ["seed=1"],
            "chat": ["chat.template_kwargs={enable_thinking: false}"],
        },
    )
    groups = heats(runs)
    assert parts(groups) == [["a", "b"], ["by itself"], ["starter"], ["chat"]]
    assert groups[0].why is None and all(heat.why for heat in groups[1:])


def test_what_follows_is_said_with_the_reason_before_anything_starts(project: Project):
    groups = heats(swept(project, {"a": [], "b": ["train.lora.dropout=0.1"], "c": ["seed=1"]}))
    wording("\n".join(announced(groups)))
    wording("\n".join(announced(groups[:1])))
    wording("\n".join(announced(heats(swept(project, {"a": [], "b": ["train.lora.dropout=0.1"]})))))


def test_a_later_heat_is_trained_after_the_first(project: Project):
    outcomes, _ = trained(swept(project, {"a": [], "b": ["seed=1"], "c": ["train.lora.dropout=0.1"]}, "train.steps=1"))
    assert all(each.result is not None and each.result.steps == 1 for each in outcomes.values())


def test_one_directory_is_for_one_run(project: Project):
    with raises(ConfigError, field="run_dir"):
        heats(swept(project, {"a": ["run_dir=out"], "b": ["run_dir=./out"]}))
    assert parts(heats(swept(project, {"a": ["run_dir=out"], "b": ["run_dir=other"]}))) == [["a", "b"]]


def test_processes_that_were_launched_train_one_run(project: Project, monkeypatch: pytest.MonkeyPatch):
    runs = swept(project, {"a": ["seed=0"], "b": ["seed=1"]})
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    with raises(ConfigError):
        heats(runs)


# ---- the command ----


def test_the_command_prints_all_runs_and_the_best(project: Project):
    ran = cli("run", project.config, "--sweep", "seed=0,1", "train.steps=1", "--json")
    assert ran.exit_code == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert [each["run"] for each in told["runs"]] == ["seed=0", "seed=1"]
    assert told["best"] in ("seed=0", "seed=1") and told["measure"] == "greedy/reward"
    (other,) = {"seed=0", "seed=1"} - {told["best"]}
    assert set(told["paired"]) == {other} and told["paired"][other]["prompts"] == 4
    assert told["paired"][other]["difference"] >= 0
    configs: list[RunConfig] = [load_config(Path(each["run_dir"]) / "config.yaml") for each in told["runs"]]
    assert [config.seed for config in configs] == [0, 1]


@pytest.mark.long
def test_what_is_over_is_not_trained_again_while_another_run_is_not(project: Project):
    def swept_again() -> dict[str, Path]:
        ran = cli("run", project.config, "--sweep", "seed=0,1", "train.steps=1", "resume=auto", "--json")
        assert ran.exit_code == 0, ran.stderr
        told = json.loads(ran.stdout)
        assert told["measure"] == "greedy/reward"
        return {each["run"]: Path(each["run_dir"]) for each in told["runs"]}

    assert cli("run", project.config, "seed=0", "train.steps=1").exit_code == 0
    (first,) = Path("runs").iterdir()
    records = (first / "metrics.jsonl").read_bytes()
    both = swept_again()
    assert both["seed=0"] == first and (first / "metrics.jsonl").read_bytes() == records
    assert both["seed=1"] != first and len([*Path("runs").iterdir()]) == 2
    assert not {*swept_again().values()} & {*both.values()}  # where all are over, all begin anew


def test_two_files_are_two_runs_and_the_page_says_what_failed(project: Project):
    text = project.config.read_text(encoding="utf-8")
    (project.folder / "other.yaml").write_text(text.replace("vowels", "raises"), encoding="utf-8")
    ran = cli("run", project.config, "other.yaml", "train.steps=1")
    assert ran.exit_code == 1
    assert "2 runs beside each other" in ran.stderr and "error: other: " in ran.stderr
    rows = [line.split()[:2] for line in ran.stdout.splitlines()]
    assert ["run", "1/1"] in rows and ["other", "0/1"] in rows


def test_a_mistake_in_one_of_them_is_said_before_anything_starts(project: Project):
    ran = cli("run", project.config, "--sweep", "data.source=prompts.jsonl,missing.jsonl")
    assert ran.exit_code == 2 and not Path("runs").exists()
    assert "of the run source=missing.jsonl:" in ran.stderr


def test_files_of_one_name_have_directories_of_their_own(project: Project):
    ran = cli("run", project.config, project.config, "train.steps=1", "--json")
    told = json.loads(ran.stdout)
    assert [each["run"] for each in told["runs"]] == ["run", "run (2)"]
    assert len({each["run_dir"] for each in told["runs"]}) == 2
