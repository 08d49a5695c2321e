"""What each tracker's own client keeps of a run: metrics, distributions, tables of completions, the summary."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from pydantic import ValidationError

from groupwise.config.run import TrackingConfig
from groupwise.errors import ConfigError
from groupwise.store.masking import MASK
from groupwise.store.tracking import Tracking, open_trackers
from groupwise.types import RolloutGroup
from run_place import group, scored
from starter_run import starter_run
from wording import raises

SUMMARY = {"version": "toy@2", "steps": 2, "before/sampled/pass@8": 0.25, "after/sampled/pass@8": 0.75}


def sampled() -> list[RolloutGroup]:
    return [group(scored("4", 1.0), scored("5 | <b>\nor 6", 0.0)), group(scored("4", 1.0), scored("x", None), id="p:2")]


def tell(tracking: Tracking) -> None:
    """A run of two steps, as `training_run` tells of it."""
    for step in (1, 2):
        tracking.log(step, {"reward/mean": 0.5, "eval/sampled/pass@8": 0.25})
        tracking.rollouts(step, sampled())
    tracking.summary(2, SUMMARY)


def test_tensorboard_event_files_read_back(tmp_path):
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    config = TrackingConfig(tensorboard=True)
    with open_trackers(config, run_dir=tmp_path, run_name="r", resolved_config={}) as tracking:
        tracking.log(1, {"reward/mean": 0.25, "loss/kl": math.nan})
        tracking.log(2, {"reward/mean": 0.5})
    assert not tracking.failures
    [path] = (tmp_path / "tensorboard").iterdir()
    points = [
        (event.step, value.tag, value.tensor.float_val[0])
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
    ]
    assert (1, "reward/mean", 0.25) in points and (2, "reward/mean", 0.5) in points
    assert math.isnan(next(value for _, tag, value in points if tag == "loss/kl"))


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_a_missing_package_names_the_extra_before_anything_is_written(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)  # what an import of a missing package finds
    config = TrackingConfig.model_validate({"tensorboard": True, name: "my-project"})
    with raises(ConfigError):
        open_trackers(config, run_dir=tmp_path / "run", run_name="r", resolved_config={})
    assert not (tmp_path / "run").exists()


class WandbWithoutKey:
    """W&B's functions as they act where nobody logged in, since 0.31 or before; `init` without a mode would ask."""

    class Run:
        def log(self, metrics, step): ...

        def finish(self): ...

    def __init__(self, *, since_031: bool, key: str | None = None):
        self.inits: list[dict] = []
        self.api = type("api", (), {"api_key": key})
        self._since_031, self._key = since_031, key

    def login(self, **options):
        if "prompt" in options and not self._since_031:
            raise TypeError("login() got an unexpected keyword argument 'prompt'")
        assert options == {"prompt": False, "verify": False}
        return self._key is not None

    def init(self, **options):
        self.inits.append(options)
        return self.Run()


@pytest.mark.parametrize("since_031", [True, False])
@pytest.mark.parametrize(
    ("key", "mode", "offline"),
    [(None, None, True), ("k" * 40, None, False), (None, "disabled", False), (None, "online", False)],
)
def test_without_a_key_wandb_records_offline_with_one_warning(
    since_031, key, mode, offline, tmp_path, monkeypatch, caplog
):
    """Only where WANDB_MODE does not say what to do."""
    wandb = WandbWithoutKey(since_031=since_031, key=key)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("WANDB_MODE", mode)
    config = TrackingConfig(wandb="my-project", wandb_entity="my-team", wandb_name="first try")
    told = {"seed": 1, "rewards": [{"args": {"api_key": "swordfish-1"}}]}
    with open_trackers(config, run_dir=tmp_path / "run", run_name="r", resolved_config=told) as tracking:
        tracking.log(1, {"reward/mean": 0.25})
    (given,) = wandb.inits
    assert given["config"] == {"seed": 1, "rewards": [{"args": {"api_key": MASK}}]}
    assert (given["project"], given["entity"]) == ("my-project", "my-team")
    assert given["name"] == "first try"
    assert given.get("mode") == ("offline" if offline else None)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == offline and all("no W&B key" in each and "wandb sync" in each for each in said)


def test_wandb_takes_two_runs_of_one_directory_name_for_two_and_a_resumed_one_for_itself(tmp_path, monkeypatch):
    """As the stage `examples` of every run: it is resumed by its id, so one id for both mixes them."""
    wandb = WandbWithoutKey(since_031=True, key="k" * 40)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for run in ("first", "second", "first"):
        run_dir = tmp_path / run / "stages" / "examples"
        with open_trackers(TrackingConfig(wandb="p"), run_dir=run_dir, run_name="r", resolved_config={}) as tracking:
            tracking.log(1, {"reward/mean": 0.25})
    first, second, again = (given["id"] for given in wandb.inits)
    assert first == again != second and first.startswith("r-")


def test_a_run_that_wandb_knows_by_its_directory_stays_that_run(tmp_path, monkeypatch):
    wandb = WandbWithoutKey(since_031=True, key="k" * 40)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.25}\n')
    with open_trackers(TrackingConfig(wandb="p"), run_dir=tmp_path / "run", run_name="r", resolved_config={}):
        pass
    assert [given["id"] for given in wandb.inits] == ["run"]


@pytest.mark.slow
def test_wandb_itself_without_a_key(tmp_path, monkeypatch):
    """The package as it is installed: an offline run lies in the run directory, and nothing was asked."""
    pytest.importorskip("wandb")
    code = (
        "import sys, pathlib\n"
        "from groupwise.config.run import TrackingConfig\n"
        "from groupwise.store.tracking import open_trackers\n"
        "where = pathlib.Path(sys.argv[1])\n"
        "config = TrackingConfig(wandb='p')\n"
        "with open_trackers(config, run_dir=where, run_name='r', resolved_config={'seed': 1}) as tracking:\n"
        "    tracking.log(1, {'reward/mean': 0.25})\n"
        "assert not tracking.failures, tracking.failures\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")} | {"HOME": str(tmp_path / "home")}
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("there is no W&B key") == 1
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*-r-*"))


@pytest.mark.slow
def test_mlflow_itself_with_its_default_database(tmp_path, monkeypatch):
    """What the extra installs is enough for the local store that MLflow takes where none is named."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    config = TrackingConfig(mlflow="my-experiment")
    with open_trackers(config, run_dir=tmp_path / "run", run_name="r", resolved_config={"train": {"x": 1}}) as tracking:
        tracking.log(1, {"reward/mean": 0.25})
    assert not tracking.failures
    (run,) = mlflow.search_runs(experiment_names=["my-experiment"], output_format="list")
    assert run.data.metrics["reward/mean"] == 0.25 and run.data.params["train.x"] == "1"


@pytest.mark.slow
def test_a_resumed_run_continues_in_mlflows_and_begins_another_where_that_is_gone(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")

    def goes_on(step: int) -> None:
        config = TrackingConfig(mlflow="resumed")
        told = {"train": {"steps": step}}  # more steps are asked for, and a param cannot change
        with open_trackers(config, run_dir=tmp_path / "run", run_name="r", resolved_config=told) as tracking:
            tracking.log(step, {"reward/mean": 0.25 * step})
        assert not tracking.failures

    def kept() -> list[Any]:
        return mlflow.search_runs(experiment_names=["resumed"], output_format="list")

    goes_on(1)
    goes_on(2)
    (run,) = kept()
    assert run.data.metrics["reward/mean"] == 0.5 and run.info.status == "FINISHED"
    mlflow.delete_run(run.info.run_id)
    goes_on(3)
    (other,) = kept()
    assert other.info.run_id != run.info.run_id and other.data.metrics["reward/mean"] == 0.75


def test_an_entity_needs_a_project():
    with raises(ValidationError):
        TrackingConfig(wandb_entity="my-team")


def test_a_tracker_that_cannot_start_is_a_config_error(tmp_path):
    (tmp_path / "tensorboard").write_text("in the way")
    with raises(ConfigError):
        open_trackers(TrackingConfig(tensorboard=True), run_dir=tmp_path, run_name="r", resolved_config={})


def test_tensorboard_has_histograms_and_texts(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    config = TrackingConfig(tensorboard=True)
    with open_trackers(config, run_dir=tmp_path, run_name="r", resolved_config={}) as tracking:
        tell(tracking)
    assert not tracking.failures
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    tensors = {tag: events.Tensors(tag) for tag in events.Tags()["tensors"]}
    plugin = {tag: events.SummaryMetadata(tag).plugin_data.plugin_name for tag in tensors}
    assert plugin["distribution/reward"] == plugin["distribution/reward/exact"] == "histograms"
    assert plugin["completions"] == plugin["summary"] == "text"
    assert [each.step for each in tensors["completions"]] == [1, 2]
    [bins] = [event for event in tensors["distribution/reward"] if event.step == 2]
    counts = make_ndarray(bins.tensor_proto)[:, 2]  # [bins, (left, right, count)]
    assert counts.sum() == 3 and (counts[0], counts[-1]) == (1, 2)
    table = tensors["completions"][0].tensor_proto.string_val[0].decode()
    lines = table.splitlines()
    assert lines[0] == "| step | prompt | completion | exact | reward | advantage |" and len(lines) == 2 + 3
    assert "5 \\| &lt;b><br>or 6" in lines[3]
    assert "toy@2" in tensors["summary"][0].tensor_proto.string_val[0].decode()


def test_a_run_tells_what_came_of_it(tmp_path):
    """Rewards and completions of every step, and at the end what its evaluations say."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows = "".join(json.dumps({"prompt": f"What is {i} + 1?", "answer": str(i + 1)}) + "\n" for i in range(4))
    (tmp_path / "prompts.jsonl").write_text(rows)
    result = starter_run(
        tmp_path,
        name="told",
        data={"source": "prompts.jsonl"},
        eval={"data": {"source": "prompts.jsonl"}, "modes": ["greedy"]},
        rewards=[{"function": "groupwise.rewards.length:ideal_length", "args": {"ideal": 4}}],
        scoring={"workers": 0},
        rollout={"prompts_per_step": 2, "group_size": 4, "max_tokens": 6},
        train={"steps": 2, "lora": {"rank": 2}},
        tracking={"tensorboard": True, "completions": 3},
    )
    events = EventAccumulator(str(result.run_dir / "tensorboard"))
    events.Reload()
    assert [each.step for each in events.Tensors("completions")] == [1, 2]
    (told,) = events.Tensors("summary")
    cells = dict(line.strip("| ").split(" | ") for line in told.tensor_proto.string_val[0].decode().splitlines())
    assert told.step == 2 and cells["version"] == str(result.version) and cells["steps"] == "2"
    for when, evaluations in (("before", result.before), ("after", result.after)):
        assert float(cells[f"{when}/greedy/reward"]) == pytest.approx(evaluations["greedy"].mean(), rel=1e-4)
    change = result.after["greedy"].mean() - result.before["greedy"].mean()
    assert float(cells["change/greedy/reward"]) == pytest.approx(change, rel=1e-4, abs=1e-6)
    assert 0 < float(cells["change/greedy/reward_p"]) <= 1


@pytest.mark.slow
def test_wandb_itself_keeps_tables_histograms_and_the_summary(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = TrackingConfig(wandb="p")
    run_dir = tmp_path / "run"
    with open_trackers(config, run_dir=run_dir, run_name="r", resolved_config={}) as tracking:
        tell(tracking)
        summary = dict(tracking.trackers["wandb"]._run.summary)  # pyright: ignore[reportAttributeAccessIssue]
    assert not tracking.failures and wandb.run is None
    assert summary["summary/version"] == "toy@2" and summary["summary/after/sampled/pass@8"] == 0.75
    assert summary["distribution/reward"]["_type"] == "histogram"
    tables = [json.loads(path.read_text()) for path in run_dir.rglob("completions_*.table.json")]
    assert len(tables) == 2
    assert all(table["columns"] == ["step", "prompt", "completion", "exact", "reward", "advantage"] for table in tables)
    assert [row[2] for row in tables[0]["data"]] == ["4", "5 | <b>\nor 6", "4"]


@pytest.mark.slow
def test_mlflow_itself_keeps_tables_pictures_and_the_summary(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    config = TrackingConfig(mlflow="shown")
    with open_trackers(config, run_dir=tmp_path / "run", run_name="r", resolved_config={}) as tracking:
        tell(tracking)
    assert not tracking.failures
    (run,) = mlflow.search_runs(experiment_names=["shown"], output_format="list")
    assert run.data.metrics["eval/sampled/pass_at_8"] == 0.25  # pass@8 is no name there, and a step with it was lost
    assert run.data.metrics["summary/after/sampled/pass_at_8"] == 0.75 and run.data.tags["summary/version"] == "toy@2"

    def artifact(path: str) -> Path:
        return Path(mlflow.artifacts.download_artifacts(run_id=run.info.run_id, artifact_path=path))

    table = json.loads(artifact("completions/step_000001.json").read_text())
    assert table["columns"] == ["step", "prompt", "completion", "exact", "reward", "advantage"]
    assert [row[2] for row in table["data"]] == ["4", "5 | <b>\nor 6", "4"]
    picture = ElementTree.parse(artifact("distribution/reward/step_000002.svg")).getroot()
    bars = [float(each.get("height", 0)) for each in picture if each.tag.endswith("rect")]
    assert sorted(bars)[-2:] == [90.0, 180.0] and sum(bar > 0 for bar in bars) == 2  # one 0, two 1
    assert json.loads(artifact("summary.json").read_text()) == SUMMARY


@pytest.mark.slow
def test_trackio_itself_keeps_tables_and_histograms(tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    code = (
        "import sys, pathlib\n"
        "from groupwise.config.run import TrackingConfig\n"
        "from groupwise.store.tracking import open_trackers\n"
        "from test_trackers import tell\n"
        "config = TrackingConfig(trackio='p')\n"
        "with open_trackers(config, run_dir=pathlib.Path('run'), run_name='r', resolved_config={}) as tracking:\n"
        "    tell(tracking)\n"
        "assert not tracking.failures, tracking.failures\n"
        "import json, trackio\n"
        "from trackio.sqlite_storage import SQLiteStorage\n"
        "name = json.loads(pathlib.Path('run/tracked.json').read_text())['id']\n"
        "print(json.dumps(SQLiteStorage.get_logs('p', name), default=str))\n"
    )
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "PYTHONPATH": path}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    lines: list[dict[str, Any]] = json.loads(ran.stdout.splitlines()[-1])
    kept = {key: value for line in lines for key, value in line.items()}
    assert (
        kept["distribution/reward"]["_type"] == "trackio.histogram" and sum(kept["distribution/reward"]["values"]) == 3
    )
    assert kept["completions"]["_type"] == "trackio.table" and kept["summary"]["_type"] == "trackio.table"
