"""The run directory: which run goes on, and what is forgotten when it does."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
import torch

from groupwise.config.run import RunConfig, load_config, parse_config
from groupwise.errors import AdapterError, AdapterNotFoundError, ConfigError, ModelError, StorageError
from groupwise.run.evaluate import Evaluation, load_evaluations, save_evaluations
from groupwise.store import checkpoint, rundir
from groupwise.store.adapters import AdapterStore
from groupwise.store.checkpoint import RunState
from groupwise.store.files import Provenance
from groupwise.store.locate import SeveralRunsWarning, find_adapter, find_policy, manner_of
from groupwise.store.rundir import open_run_dir, owned
from groupwise.train.learner import Learner
from groupwise.types import Completion, FinishReason, PolicyVersion, Prompt, Rollout, RolloutGroup, Turn
from wording import raises

STANDING = RunState(step=2, version=PolicyVersion("run", 2), sampler=PolicyVersion("run", 2), synced=2)


def config(tmp_path: Path, **keys) -> RunConfig:
    data = {
        "data": {"source": "x.jsonl"},
        "rewards": ["m:f"],
        "folder": str(tmp_path),
        "output_dir": str(tmp_path / "runs"),
        "resume": "auto",
    }
    return parse_config({**data, **keys})


def opened(given: RunConfig) -> tuple[Path, RunState | None]:
    with open_run_dir(given) as found:
        return found


def content(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def begun(tmp_path: Path, make_base, *, finished: bool = False, **keys) -> Path:
    """A run that wrote three steps and a checkpoint after the second."""
    run_dir, standing = opened(config(tmp_path, **{**keys, "resume": "never"}))
    assert standing is None
    lines = [json.dumps({"step": step, "reward/mean": step / 10}) for step in range(4)]
    (run_dir / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 4, "rew')
    (run_dir / "health.jsonl").write_text('{"step": 3, "event": "began"}\n')
    for folder, name in (("rollouts", "step_{:06d}.jsonl"), ("evaluations", "step_{:06d}.greedy.jsonl")):
        (run_dir / folder).mkdir()
        for step in range(4):
            (run_dir / folder / name.format(step)).write_text("")
    learner, store = Learner(make_base(dtype=torch.float32)), AdapterStore(run_dir / "adapters")
    for step in (1, 2, 3):
        info = Provenance(base_model="tiny", base_hash="0" * 16, parent=PolicyVersion.base(), step=step)
        store.activate(store.publish("run", learner.save_adapter, info=info))
    checkpoint.save(run_dir, learner, replace(STANDING, finished=finished))
    return run_dir


def test_it_goes_on_from_the_checkpoint(tmp_path: Path, make_base) -> None:
    """As if what came after had never been: the next version is number 3 again."""
    run_dir = begun(tmp_path, make_base)
    found, standing = opened(config(tmp_path))
    assert (found, standing) == (run_dir, STANDING)
    assert [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2]
    assert (run_dir / "health.jsonl").read_text() == ""
    for folder in ("rollouts", "evaluations"):
        assert sorted(int(path.name[5:11]) for path in (run_dir / folder).iterdir()) == [0, 1, 2]
    store = AdapterStore(run_dir / "adapters")
    assert [version.number for version in store.versions("run")] == [1, 2]
    assert store.active == PolicyVersion("run", 2) and store.warnings == []
    info = Provenance(base_model="tiny", base_hash="0" * 16, parent=store.active, step=3)
    assert store.publish("run", Learner(make_base(dtype=torch.float32)).save_adapter, info=info).number == 3


def test_a_run_without_a_checkpoint_begins_again(tmp_path: Path, make_base) -> None:
    run_dir = begun(tmp_path, make_base)
    for path in sorted((run_dir / "checkpoints").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    found, standing = opened(config(tmp_path))
    assert found == run_dir and standing is None
    assert (run_dir / "metrics.jsonl").read_text() == "" and not list((run_dir / "rollouts").iterdir())
    assert AdapterStore(run_dir / "adapters").versions("run") == ()


@pytest.mark.parametrize("why", ["finished", "another config", "never", "nothing there"])
def test_otherwise_it_is_a_new_run(tmp_path: Path, make_base, why: str) -> None:
    if why != "nothing there":
        first = begun(
            tmp_path, make_base, finished=why == "finished", run_dir=str(tmp_path / "runs" / "run-20200101T000000Z")
        )
    keys = {"another config": {"train": {"steps": 7}}, "never": {"resume": "never"}}.get(why, {})
    found, standing = opened(config(tmp_path, **keys))
    assert standing is None and found.parent == tmp_path / "runs"
    if why != "nothing there":
        assert found != first


def test_the_newest_of_several_goes_on(tmp_path: Path, make_base) -> None:
    for year in (2021, 2023, 2022):
        begun(tmp_path, make_base, run_dir=str(tmp_path / "runs" / f"run-{year}0101T000000Z"))
    (tmp_path / "runs" / "run-other-20240101T000000Z").mkdir()
    assert opened(config(tmp_path))[0].name == "run-20230101T000000Z"


def test_a_directory_with_another_run_is_refused(tmp_path: Path, make_base) -> None:
    begun(tmp_path, make_base, run_dir=str(tmp_path / "here"))
    with raises(ConfigError):
        opened(config(tmp_path, run_dir=str(tmp_path / "here"), resume="never"))
    with raises(ConfigError):
        opened(config(tmp_path, run_dir=str(tmp_path / "here"), seed=5, train={"steps": 7}))
    assert opened(config(tmp_path, run_dir=str(tmp_path / "here")))[1] == STANDING


def test_a_finished_run_that_is_named_is_as_it_was(tmp_path: Path, make_base) -> None:
    run_dir = begun(tmp_path, make_base, finished=True, run_dir=str(tmp_path / "here"))
    records = (run_dir / "metrics.jsonl").read_text()
    assert opened(config(tmp_path, run_dir=str(run_dir))) == (run_dir, replace(STANDING, finished=True))
    assert (run_dir / "metrics.jsonl").read_text() == records


@pytest.mark.parametrize("named", [True, False])
def test_a_finished_run_goes_on_where_more_steps_are_asked_for(tmp_path: Path, make_base, named: bool) -> None:
    place = {"run_dir": str(tmp_path / "runs" / "run-20200101T000000Z")}
    run_dir = begun(tmp_path, make_base, finished=True, **place)
    kept = (run_dir / "metrics.jsonl").read_text().splitlines()
    longer = {"train": {**config(tmp_path).model_dump()["train"], "steps": 5000}, **(place if named else {})}
    assert opened(config(tmp_path, **longer)) == (run_dir, STANDING)
    assert (run_dir / "metrics.jsonl").read_text().splitlines() == kept[: STANDING.step + 1]
    assert "steps: 5000" in (run_dir / "config.yaml").read_text()
    assert opened(config(tmp_path, **longer)) == (run_dir, STANDING)  # it was ended before its next checkpoint
    fewer = {**longer, "train": {**longer["train"], "steps": 4000}}
    if named:
        with pytest.raises(ConfigError):
            opened(config(tmp_path, **fewer))
    else:
        assert opened(config(tmp_path, **fewer))[0] != run_dir


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("changed", [{}, {"seed": 5}])
def test_a_run_that_is_being_trained_is_left_as_it_is(tmp_path: Path, make_base, named: bool, changed: dict) -> None:
    """A second process finds it, and reads and writes nothing there before it is told that it may not."""
    place = str(tmp_path / "runs" / "run-20200101T000000Z")
    run_dir = begun(tmp_path, make_base, run_dir=place)
    with owned(run_dir):
        before = content(run_dir)
        if named or not changed:
            with raises(StorageError):
                opened(config(tmp_path, **changed, **({"run_dir": place} if named else {})))
        else:
            assert opened(config(tmp_path, **changed))[0] != run_dir
        assert content(run_dir) == before
    assert opened(config(tmp_path))[1] == STANDING


def test_a_run_that_was_begun_and_has_written_nothing_yet_is_not_begun_twice(tmp_path: Path) -> None:
    given = config(tmp_path, run_dir=str(tmp_path / "here"), resume="never")
    with open_run_dir(given) as (run_dir, _):
        saved = (run_dir / "config.yaml").read_bytes()
        with raises(StorageError):
            opened(given.model_copy(update={"seed": 5}))
        assert (run_dir / "config.yaml").read_bytes() == saved


@pytest.mark.parametrize("named", [True, False])
def test_a_run_that_never_began_leaves_no_directory_of_its_own(tmp_path: Path, named: bool) -> None:
    place = {"run_dir": str(tmp_path / "here")} if named else {}
    with pytest.raises(ModelError), open_run_dir(config(tmp_path, **place)) as (run_dir, _):
        raise ModelError("there is no such model")
    assert run_dir.exists() == named


def test_a_run_that_may_go_on_and_begins_anew_says_why(tmp_path: Path) -> None:
    said: list[str] = []

    def begun(**keys) -> Path:
        with open_run_dir(config(tmp_path, **keys), note=said.append) as (run_dir, _):
            return run_dir

    first = begun()
    assert begun() == first and not said  # there was none, and then it was not finished
    second = begun(train={"steps": 7, "warmup_steps": 0})
    assert second != first and len(said) == 1
    assert str(first) in said[0] and "train.steps" in said[0] and "train.lora" not in said[0]
    third = begun(seed=5, name="other")
    assert third not in (first, second) and len(said) == 1


def test_runs_that_begin_in_the_same_second_have_a_directory_each(tmp_path: Path, monkeypatch) -> None:
    class Clock:
        now = staticmethod(lambda zone: datetime(2025, 1, 31, 12, tzinfo=zone))

    monkeypatch.setattr(rundir, "datetime", Clock)
    with ExitStack() as living:
        for seed in range(11):
            given = config(tmp_path, resume="never", seed=seed)
            run_dir, _ = living.enter_context(open_run_dir(given))
            assert run_dir.name == "run-20250131T120000Z" + (f"-{seed + 1}" if seed else "")
            assert load_config(run_dir / "config.yaml").seed == seed
    assert opened(config(tmp_path, seed=9))[0].name == "run-20250131T120000Z-10"
    opened(config(tmp_path, resume="never", seed=9))
    assert opened(config(tmp_path, seed=9))[0].name == "run-20250131T120000Z-12"  # the newest


def test_a_configuration_that_was_torn_is_of_no_run(tmp_path: Path) -> None:
    torn = tmp_path / "runs" / "run-20200101T000000Z"
    torn.mkdir(parents=True)
    for text in ("", "{", "- 1\n", "name: run\ntrain:\n"):
        (torn / "config.yaml").write_text(text)
        assert opened(config(tmp_path))[0] != torn
        with raises(ConfigError):
            opened(config(tmp_path, run_dir=str(torn)))


def test_only_the_records_of_the_run_are_wound_back(tmp_path: Path, make_base) -> None:
    run_dir = begun(tmp_path, make_base)
    (run_dir / "notes.jsonl").write_text("mine\n")
    (run_dir / ".staging-0").write_text("what a kill left")
    opened(config(tmp_path))
    assert (run_dir / "notes.jsonl").read_text() == "mine\n" and not (run_dir / ".staging-0").exists()


def test_evaluations_come_back(tmp_path: Path) -> None:
    completion = Completion(
        token_ids=(7, 2), logprobs=(-0.1, -0.30000000000000004), text="4", finish_reason=FinishReason.STOP
    )
    rollouts = (
        Rollout(turns=(Turn((5, 10), completion),), rewards={"exact": 1.0}, reward=1.0),
        Rollout(turns=(Turn((5, 10), completion),), rewards={"exact": None}, error="failed"),
    )
    group = RolloutGroup(
        prompt=Prompt(id="a", text="2+2", columns={"skill": "add"}, token_ids=(5, 10)), rollouts=rollouts
    )
    modes = {
        mode: Evaluation(mode=mode, version=PolicyVersion("run", 3), groups=(group,), success=0.5)
        for mode in ("greedy", "sampled")
    }
    save_evaluations(tmp_path, 4, modes)
    save_evaluations(tmp_path, 4, modes)
    assert load_evaluations(tmp_path, 4) == modes and load_evaluations(tmp_path, 5) == {}


def test_another_number_of_processes_is_the_same_run(tmp_path: Path, make_base) -> None:
    run_dir = begun(tmp_path, make_base)
    elsewhere = {
        "train": {"devices": 4, "parallel": "fsdp", "deadline_s": 5.0, "attention": "flex"},
        "launcher": "slurm",
    }
    assert opened(config(tmp_path, **elsewhere))[0] == run_dir
    assert opened(config(tmp_path, train={"learning_rate": 0.5}))[0] != run_dir


# ---- what users call a run, an adapter, a trained policy ----

several = pytest.mark.filterwarnings("ignore::groupwise.store.locate.SeveralRunsWarning")


@pytest.fixture
def runs(tmp_path, monkeypatch, make_base, make_adapter):
    """Under runs/: two runs `math` (the newer one began in the same second as another), one `code` in a directory of
    its own name, and one that trained all parameters."""
    monkeypatch.chdir(tmp_path)
    adapter = make_adapter(make_base("qwen3"), seed=1)

    def run(folder, name, count):
        store = AdapterStore(Path("runs", folder, "adapters"))
        info = Provenance(base_model="starter", base_hash="0" * 64)
        for _ in range(count):
            store.publish(name, lambda to: shutil.copytree(adapter, to, dirs_exist_ok=True), info=info)
        Path("runs", folder, "config.yaml").write_text("model: starter\n")
        return store

    run("math-20260101T000000Z", "math", 1)
    finished = run("math-20260102T000000Z-2", "math", 3)
    finished.activate(PolicyVersion("math", 2))
    run("math-20260102T000000Z", "math", 1)
    Path("runs/math-20260103T000000Z").mkdir()  # has only begun
    run("mine", "code", 2)
    Path("runs/whole-20260101T000000Z/model").mkdir(parents=True)
    Path("runs/whole-20260101T000000Z/model/config.json").write_text("{}")
    return adapter


NEWEST = "runs/math-20260102T000000Z-2"


@several
@pytest.mark.parametrize(
    ("text", "version", "run"),
    [
        ("math", "math@2", NEWEST),  # the active one of the newest run of this name that has any
        ("math@3", "math@3", NEWEST),
        (NEWEST, "math@2", NEWEST),
        ("math-20260102T000000Z-2@1", "math@1", NEWEST),
        (f"{NEWEST}/math@3", "math@3", NEWEST),
        (f"{NEWEST}/adapters/math/v000003", "math@3", NEWEST),
        ("mine", "code@2", "runs/mine"),  # none is active: the newest
        ("mine@1", "code@1", "runs/mine"),
        ("code@1", "code@1", "runs/mine"),  # by the adapter's name
    ],
)
def test_an_adapter_is_found_however_it_is_named(runs, text, version, run):
    before = snapshot(Path("runs"))
    policy = find_policy(text)
    assert policy.adapter is not None and policy.run_dir is not None
    assert (str(policy.adapter.version), policy.run_dir, policy.model) == (version, Path(run).absolute(), "starter")
    assert find_adapter(text) == policy.adapter
    assert snapshot(Path("runs")) == before  # looking changes nothing


def test_an_adapter_is_found_from_the_home_that_a_file_names(runs, monkeypatch):
    monkeypatch.setenv("HOME", str(Path.cwd()))
    assert find_adapter("~/runs/mine@1") == find_adapter(str(Path("runs/mine@1").absolute()))
    assert find_policy("~/runs/whole-20260101T000000Z").run_dir == Path("runs/whole-20260101T000000Z").absolute()


def snapshot(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_of_several_runs_the_newest_that_was_finished_is_taken_and_the_others_are_named(runs):
    """A trial that goes on, or was stopped, does not take the place of the run whose name it has."""
    with pytest.warns(SeveralRunsWarning) as caught:
        assert find_policy("math").run_dir == Path(NEWEST).absolute()  # none was finished
    older = Path("runs/math-20260101T000000Z")
    at = older / "checkpoints" / "step-000001"
    at.mkdir(parents=True)
    (at / "run.json").write_text(replace(STANDING, finished=True).dump())
    with pytest.warns(SeveralRunsWarning) as after:
        assert find_policy("math").run_dir == older.absolute()
    assert str(older) in str(caught[0].message) and NEWEST in str(after[0].message)
    assert find_policy(NEWEST).run_dir == Path(NEWEST).absolute()


def test_a_run_that_trained_all_parameters_is_its_model(runs):
    policy = find_policy("whole")
    assert (policy.model, policy.adapter) == ("runs/whole-20260101T000000Z/model", None)


@several
def test_a_directory_of_the_same_name_is_not_in_the_way_unless_it_is_an_adapter(runs):
    Path("math").mkdir()
    assert str(find_adapter("math").version) == "math@2"
    shutil.copytree(runs, "math", dirs_exist_ok=True)
    assert find_adapter("math").directory == Path("math")
    with raises(AdapterError):
        find_policy("math")


@several
@pytest.mark.parametrize("text", ["maths", "math@9", "runs/none", "base", "", "math@", "../x@1", "me/policy"])
def test_what_is_no_adapter_is_told_what_there_is(runs, text):
    with raises(AdapterNotFoundError):
        find_adapter(text)


@pytest.mark.parametrize("beside", [True, False])
def test_a_chat_template_is_found_whether_it_is_a_file_or_is_written_out(tmp_path, beside: bool):
    """A template that is longer than a file's name can be is still no file."""
    written = "own.jinja" if beside else "{{ messages[0]['content'] }}" + "{# the rest is silence #}" * 200
    (tmp_path / "own.jinja").write_text("{{ messages[0]['content'] }}")
    said = {"folder": str(tmp_path), "chat": {"template": written}, "data": {"system": "Be brief."}}
    (tmp_path / "config.yaml").write_text(json.dumps(said))
    template = str(tmp_path / "own.jinja") if beside else written
    assert manner_of(tmp_path) == {"system": "Be brief.", "chat": {"template": template}}
