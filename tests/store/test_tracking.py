"""Metrics and rollouts on disk come back as they were; trackers may fail without harm."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.config.run import TrackingConfig
from groupwise.errors import DataError, StorageError
from groupwise.run.health import Event
from groupwise.store.tracking import Tracking, open_trackers, read_metrics, read_rollouts
from groupwise.types import Completion, FinishReason, PolicyVersion, Prompt, Rollout, RolloutGroup, Turn
from run_place import group, scored
from wording import raises


class Recorder:
    """A tracker that keeps what it is told, and fails when it is asked to."""

    def __init__(self, *, failing: bool = False):
        self.failing, self.logged, self.closed = failing, [], False
        self.shown = []
        self.calls = 0

    def log(self, step, metrics):
        self.calls += 1
        if self.failing:
            raise ConnectionError("no route to host")
        self.logged.append((step, dict(metrics)))

    def distributions(self, step, values):
        self.shown.append(("distributions", step, values))

    def table(self, step, rows):
        self.shown.append(("table", step, rows))

    def summary(self, step, values):
        self.shown.append(("summary", step, values))

    def close(self):
        self.closed = True
        if self.failing:
            raise TimeoutError("still sending")


# --- metrics ---


def test_a_line_a_step_readable_at_once(tmp_path):
    with Tracking(tmp_path) as tracking:
        tracking.log(1, {"reward/mean": 0.25, "rollout/count": 8})
        [line] = (tmp_path / "metrics.jsonl").read_text().splitlines()  # before close
        record = json.loads(line)
        assert record.pop("time").endswith("+00:00")
        assert record == {"step": 1, "reward/mean": 0.25, "rollout/count": 8}


def test_what_is_not_finite_is_null_and_named(tmp_path):
    with Tracking(tmp_path) as tracking:
        tracking.log(1, {"a": math.nan, "b": math.inf, "c": np.float32(0.5), "d": -math.inf})
    text = (tmp_path / "metrics.jsonl").read_text()
    record = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    assert (record["a"], record["b"], record["c"], record["d"]) == (None, None, 0.5, None)
    assert record["non_finite"] == ["a", "b", "d"]


def test_a_metric_cannot_take_the_name_of_the_step(tmp_path):
    with Tracking(tmp_path) as tracking, raises(ValueError):
        tracking.log(1, {"step": 3.0})


def test_a_resumed_run_appends_after_the_torn_line_and_the_last_of_a_step_counts(tmp_path):
    with Tracking(tmp_path) as tracking:
        for step in (1, 2, 3):
            tracking.log(step, {"loss": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    with Tracking(tmp_path) as tracking:
        tracking.log(3, {"loss": 30.0})
        tracking.log(4, {"loss": 40.0})
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [(record["step"], record["loss"]) for record in records] == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]


def test_a_line_that_is_not_metrics_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with raises(DataError):
        read_metrics(tmp_path / "metrics.jsonl")


FULL_DISK = """
import resource, sys
from pathlib import Path
from groupwise.errors import StorageError
from groupwise.store.tracking import Tracking

tracking = Tracking(Path(sys.argv[1]))
tracking.log(1, {"loss": 1.0})
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
try:
    for step in range(2, 100):
        tracking.log(step, {"loss": 1.0})
except StorageError as error:
    print(error)
    sys.exit(75)
"""


def test_a_full_disk_is_a_storage_error(tmp_path):
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 75, done.stderr
    assert "metrics.jsonl failed: [Errno 27]" in done.stdout
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1]


def test_a_run_directory_that_cannot_be_made_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with raises(StorageError):
        Tracking(tmp_path / "file" / "run")


# --- trackers ---


def test_a_failing_tracker_is_counted_and_warned_of_once_and_stops_nothing(tmp_path, caplog):
    failing, working = Recorder(failing=True), Recorder()
    with Tracking(tmp_path, trackers={"failing": failing, "working": working}) as tracking:
        for step in range(3):
            tracking.log(step, {"loss": 1.0})
    assert tracking.failures == {"failing": 4} and failing.calls == 3  # it is asked again every time; and on closing
    assert [record.getMessage() for record in caplog.records] == [
        "failing failed (ConnectionError: no route to host); metrics.jsonl is complete"
    ]
    assert [step for step, _ in working.logged] == [0, 1, 2]
    assert failing.closed and working.closed
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3


class Careless:
    """A tracker that changes what it is given and raises what no library should."""

    def log(self, step, metrics):
        metrics.clear()
        raise AssertionError

    def close(self):
        raise KeyError("run")


def test_whatever_a_tracker_does_the_record_and_the_other_trackers_are_whole(tmp_path):
    working = Recorder()
    with Tracking(tmp_path, trackers={"careless": Careless(), "working": working}) as tracking:
        tracking.log(1, {"reward/mean": 0.5})
    assert working.logged == [(1, {"reward/mean": 0.5, "reward": 0.5})] and working.closed
    assert tracking.failures == {"careless": 2}
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["reward/mean"] == 0.5


def shown_groups() -> list[RolloutGroup]:
    """Two prompts with two completions each, of which one could not be scored."""
    first = group(scored("4", 1.0, parts={"exact": 1.0, "short": 0.5}), scored("5 | <b>", 0.0))
    return [first, group(scored("four", None), scored("4", 2.0), id="p:2")]


def test_trackers_get_every_reward_some_completions_and_what_came_of_the_run(tmp_path):
    recorder = Recorder()
    with Tracking(tmp_path, trackers={"recorder": recorder}, completions=2) as tracking:
        path = tracking.rollouts(3, shown_groups())
        tracking.summary(4, {"version": "toy@4", "after/greedy/reward": 0.5})
    assert len(read_rollouts(path)) == 2  # the record has all
    (first, second, third) = recorder.shown
    values = {
        "distribution/reward": [1.0, 0.0, 2.0],
        "distribution/reward/exact": [1.0, 0.0, 2.0],
        "distribution/reward/short": [0.5],
    }
    assert first == ("distributions", 3, values)
    kind, step, rows = second
    assert (kind, step) == ("table", 3)
    asked = {"step": 3.0, "prompt": "user: 2+2?"}
    assert rows == [
        asked | {"completion": "4", "exact": 1.0, "short": 0.5, "reward": 1.0, "advantage": 0.5},
        asked | {"completion": "5 | <b>", "exact": 0.0, "short": None, "reward": 0.0, "advantage": -0.5},
    ]
    assert third == ("summary", 4, {"version": "toy@4", "after/greedy/reward": 0.5})


def test_without_completions_and_without_rewards_nothing_is_shown(tmp_path):
    recorder = Recorder()
    with Tracking(tmp_path, trackers={"recorder": recorder}) as tracking:
        tracking.rollouts(1, [group(scored("4", None))])
        tracking.rollouts(2, shown_groups())
    assert [kind for kind, *_ in recorder.shown] == ["distributions"]


# --- TRL's names ---


def test_trackers_get_trls_names_too_and_the_record_only_ours(tmp_path):
    metrics = {"reward/mean": 0.25, "rollout/total_tokens": 100.0}
    both, ours = Recorder(), Recorder()
    with Tracking(tmp_path / "a", trackers={"both": both}) as tracking:
        tracking.log(1, metrics)
    with Tracking(tmp_path / "b", trackers={"ours": ours}, trl_names=False) as tracking:
        tracking.log(1, metrics)
    assert both.logged == [(1, metrics | {"reward": 0.25, "num_tokens": 100.0})] and ours.logged == [(1, metrics)]
    for run in ("a", "b"):
        [record] = read_metrics(tmp_path / run / "metrics.jsonl")
        assert set(record) == {"step", "time", *metrics}


def test_the_token_count_goes_on_in_a_resumed_run(tmp_path):
    with Tracking(tmp_path) as tracking:
        for step in (1, 2, 3):
            tracking.log(step, {"rollout/total_tokens": 10.0 * step})
    recorder = Recorder()
    with Tracking(tmp_path, trackers={"recorder": recorder}) as tracking:  # step 3 is done again
        tracking.log(3, {"rollout/total_tokens": 5.0})
        tracking.log(3, {"eval/greedy/reward": 0.5})
        tracking.log(4, {"rollout/total_tokens": 1.0})
    assert [metrics.get("num_tokens") for _, metrics in recorder.logged] == [35.0, None, 36.0]


def test_the_configuration_switches_them_off(tmp_path):
    for trl_names in (True, False):
        config = TrackingConfig(trl_names=trl_names)
        with open_trackers(config, run_dir=tmp_path / str(trl_names), run_name="r", resolved_config={}) as tracking:
            tracking.trackers["recorder"] = recorder = Recorder()
            tracking.log(1, {"loss/entropy": 0.5})
        assert ("entropy" in recorder.logged[0][1]) == trl_names


# --- health ---


def events(*texts: str) -> list[Event]:
    return [Event(kind="note", step=7, text=text) for text in texts]


def test_health_is_a_line_an_event_and_no_file_without_one(tmp_path):
    path = tmp_path / "health.jsonl"
    with Tracking(tmp_path) as tracking:
        tracking.health([])
        assert not path.exists()
        tracking.health(events("one", "two"))
        lines = [json.loads(line) for line in path.read_text().splitlines()]  # before close
    assert [(each["step"], each["event"], each["text"]) for each in lines] == [(7, "note", "one"), (7, "note", "two")]
    assert lines[0]["time"].endswith("+00:00")
    with path.open("a") as file:
        file.write('{"step": 8, "ev')
    with Tracking(tmp_path) as tracking:
        tracking.health(events("three"))
    assert [json.loads(line)["text"] for line in path.read_text().splitlines()] == ["one", "two", "three"]


def test_health_that_cannot_be_written_is_a_storage_error(tmp_path):
    with Tracking(tmp_path) as tracking:
        (tmp_path / "health.jsonl").mkdir()
        with raises(StorageError):
            tracking.health(events("one"))


def test_no_torch():
    code = (
        "import sys, pathlib, tempfile, groupwise.store.trackers as t;"
        "import groupwise.store.tracking, groupwise.store.adapters, groupwise.run.display;"
        "t.TensorBoardTracker(pathlib.Path(tempfile.mkdtemp())).close();"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# --- rollouts ---

numbers = st.floats(allow_nan=False)
ids = st.lists(st.integers(0, 1 << 20), max_size=4).map(tuple)
texts = st.text(max_size=8)


@st.composite
def completions(draw):
    token_ids = draw(ids)
    return Completion(
        token_ids=token_ids,
        logprobs=tuple(draw(numbers) for _ in token_ids),
        text=draw(texts),
        finish_reason=draw(st.sampled_from(FinishReason)),
        version=draw(st.sampled_from([PolicyVersion.base(), PolicyVersion("math", 12)])),
    )


@st.composite
def groups(draw):
    prompt = Prompt(
        id=draw(texts),
        messages=draw(st.none() | st.just(({"role": "user", "content": "2+2?"}, {"role": "tool", "content": None}))),
        text=draw(st.none() | texts),
        tools=draw(st.just(()) | st.just(({"type": "function", "function": {"name": "f"}},))),
        columns=draw(st.dictionaries(texts, st.none() | st.booleans() | st.integers() | texts | st.lists(texts))),
        token_ids=draw(ids),
    )
    turns = st.builds(Turn, ids | st.just(prompt.token_ids), completions())
    rollouts = st.builds(
        Rollout,
        turns=st.lists(turns, max_size=2).map(tuple),
        rewards=st.dictionaries(texts, st.none() | numbers, max_size=2),
        reward=st.none() | numbers,
        advantage=st.none() | numbers,
        error=st.none() | texts,
    )
    return RolloutGroup(prompt=prompt, rollouts=tuple(draw(st.lists(rollouts, max_size=3))))


@pytest.fixture(scope="module")
def shared_tracking(tmp_path_factory):
    with Tracking(tmp_path_factory.mktemp("run")) as tracking:
        yield tracking


@settings(max_examples=25)
@given(step=st.lists(groups(), max_size=2))
def test_rollouts_come_back_exactly(shared_tracking, step):
    path = shared_tracking.rollouts(12, step)
    assert path.name == "step_000012.jsonl"
    assert read_rollouts(path) == tuple(step)  # the second writing of a step replaces the first


def test_numbers_that_json_lacks_come_back_too(tmp_path):
    completion = Completion(
        token_ids=(1, 2, 3), logprobs=(-math.inf, math.nan, -0.0), text="x", finish_reason=FinishReason.ABORT
    )
    rollout = Rollout(turns=(Turn((9,), completion),), rewards={"f": math.inf}, reward=math.nan, error="boom")
    group = RolloutGroup(prompt=Prompt(id="p", columns={"x": [math.nan]}), rollouts=(rollout,))
    with Tracking(tmp_path) as tracking:
        path = tracking.rollouts(1, [group])
    json.loads(path.read_text(), parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    [again] = read_rollouts(path)
    assert repr(again.rollouts) == repr(group.rollouts)  # repr: nan is not equal to itself
    assert again.prompt.columns == {"x": ["NaN"]}  # a column is the user's: as text, see the file's head


def test_a_line_that_is_not_a_group_is_named(tmp_path):
    with Tracking(tmp_path) as tracking:
        path = tracking.rollouts(1, [RolloutGroup(prompt=Prompt(id="p"), rollouts=())])
    with path.open("a") as file:
        file.write('{"prompt": {}}\n')
    with raises(DataError):
        read_rollouts(path)
